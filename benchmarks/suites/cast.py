"""Casts, beside ``astype`` and ``Tensor.to``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from .. import accuracy, rivals
from ..harness import SWEEP, Case, Work, one_element
from ..inputs import Input
from . import (
    array_sizes,
    compact,
    elements,
    is_wide,
    itemsize,
    random_size,
    short,
    size,
    sweep_sizes,
)

Array = Any

_PAIRS = [
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float32", "int8"),
    ("float16", "int8"),
    ("bfloat16", "int8"),
    ("float32", "float64"),
    ("float32", "int32"),
]
_DTYPES = sorted({dtype for pair in _PAIRS for dtype in pair})


def case(
    dtype: str, new: str, n: int, shape: str, group: str = "cast", kind: str = "normal"
) -> Case:
    """A conversion of n elements."""
    op = f"{short(dtype)} to {short(new)}"
    name = f"{op.replace(' ', '-')}-{compact(shape)}"
    name = f"{SWEEP}-{name}" if group == SWEEP else name
    nbytes = n * (itemsize(dtype) + itemsize(new))
    work = partial(_work, dtype, new, n, shape, group, kind)
    return Case("cast", name, op, group, shape, dtype, nbytes, work, is_wide(dtype, new))


def cases(platform: str, quick: bool = False) -> list[Case]:
    """Both directions of every pair; ``quick`` keeps one pair and the smaller arrays."""
    pairs = _PAIRS[:1] if quick else _PAIRS
    return [
        *(
            case(a, b, elements(nbytes, a), shape)
            for nbytes, shape in array_sizes(platform)[-1 if quick else 0 :]
            for a, b in sorted(pair for a, b in pairs for pair in ((a, b), (b, a)))
        ),
        *(
            case("float32", "bfloat16", nbytes // 4, size(nbytes), SWEEP)
            for nbytes in sweep_sizes(platform, quick)
        ),
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A case at random: any two of the dtypes, any number of elements, values that overflow."""
    dtype, new = (_DTYPES[i] for i in rng.choice(len(_DTYPES), 2, replace=False))
    n = max(1, random_size(rng, largest) // (itemsize(dtype) + itemsize(new)))
    n = n & ~63 if rng.random() < 0.25 and n > 64 else n
    return case(dtype, new, n, str(n), kind="wide")


def _work(dtype: str, new: str, n: int, shape: str, group: str, kind: str) -> Work:
    def ours(x: Array, implementation: str | None) -> Array:
        return jof.cast(x, new, implementation=implementation)

    return Work(
        [Input((n,), dtype, kind)],
        ours,
        {"astype": lambda x: x.astype(new)},
        sample=accuracy.samples,
        verify=partial(_verify, new),
        exact=True,
        alone=True,
        torch=lambda torch, x: x.to(getattr(torch, new)),
        compile=(dtype, new) == ("float32", "bfloat16") and rivals.is_large(shape),
        others={"1 element": one_element} if group == SWEEP else {},
        effort=0.4,
    )


def _verify(new: str, sampled: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]) -> str | None:
    """Rounded from float64, to the bit; integers are truncated and saturate, and NaN becomes 0."""
    (x,), (out,) = accuracy.doubles(sampled)
    dtype = jnp.dtype(new)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.kind == "i":
            about = jnp.iinfo(dtype)
            expected = np.clip(np.trunc(np.nan_to_num(x)), int(about.min), int(about.max))
        else:
            expected = x.astype(dtype).astype(np.float64)
    same = (out == expected) | (np.isnan(out) & np.isnan(expected))
    if same.all():
        return None
    i = int(np.argmin(same))
    return f"{int((~same).sum())} of {same.size} samples are off: {x[i]} became {out[i]}"
