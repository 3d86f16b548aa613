"""The cast suite: conversions beside ``astype`` and ``Tensor.to``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from . import accuracy, rivals
from .cases import CastCase
from .harness import Input, Work

Array = Any

X64 = True  # there are 64-bit cases


def work(case: CastCase) -> Work:
    """Everything the harness needs to run a case."""
    return Work(
        inputs=[Input((case.elements,), case.dtype)],
        ours=lambda x: jof.cast(x, case.new_dtype),
        target="jof_cast",
        jnp={"astype": lambda x: x.astype(case.new_dtype)},
        torch=lambda torch, x: x.to(getattr(torch, case.new_dtype)),
        compile=case.op == "f32 to bf16" and rivals.is_large(case),
        check=_check(case),
        exact=True,
        alone=True,
        ceilings=("copy",),
        effort=0.4,
    )


def _check(case: CastCase) -> Callable[[tuple[Array, ...], Array], str | None]:
    """Rounded from float64 on the host, and to the bit; integers are truncated and saturate."""

    def check(args: tuple[Array, ...], out: Array) -> str | None:
        exact = accuracy.sample(args[0]).astype(np.float64)
        dtype = jnp.dtype(case.new_dtype)
        if dtype.kind == "i":
            about = jnp.iinfo(dtype)
            expected = np.clip(np.trunc(exact), int(about.min), int(about.max))
        else:
            expected = exact.astype(dtype).astype(np.float64)
        return accuracy.worst(accuracy.sample(out), expected, np.zeros_like(expected))

    return check
