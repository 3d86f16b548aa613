"""The permute suite: permutations of axes beside those of other libraries and of an article.

``--explain`` prints how each case is carried out, without running anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native

from . import libraries, rivals
from .cases import SWEEP, PermuteCase, itemsize
from .harness import Input, Maker, Sets, Work
from .rivals import cutensor
from .timing import Contender

Array = Any  # of any framework

X64 = True  # there are elements of 16 bytes

NAIVE = {"naive": 8, "naive, 32-bit": 4}
"""The kernels that the article starts from, and the bytes of their indices."""


def work(case: PermuteCase) -> Work:
    """Everything the harness needs to run a case.

    jnp's own program has nothing to fuse with: XLA must give a result of the default layout, so the
    array is moved and not just viewed in another order.
    """
    plan = _plan(case)
    return Work(
        inputs=[Input(case.shape, case.dtype, "hash")],
        ours=lambda x: jof.permute(x, case.axes),
        target="jof_permute",
        jnp={"jnp": lambda x: jnp.transpose(x, case.axes)},
        torch=lambda torch, x: x.permute(case.axes).contiguous(),
        compile=case.shape == (8192, 8192) and case.dtype == "float16",
        check=partial(_check, case),
        exact=True,
        alone=True,
        about={name: plan[name] for name in ("strategy", "unit_bytes")},
        others=_others(case),
        ceilings=("copy",),
        effort=0.5,
    )


def _check(case: PermuteCase, args: tuple[Array, ...], out: Array) -> str | None:
    """To the bit, at three indices of the result's first axis; the rivals see all of it."""
    (x,), n = args, out.shape[0]
    some = np.array([0, n // 2, n - 1])
    expected = np.transpose(np.asarray(_take(x, some, case.axes[0])), case.axes)
    found = np.asarray(_take(out, some, 0))
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"a result of {out.dtype} {out.shape}"
    wrong = [i for i, a, b in zip(some, expected, found, strict=True) if a.tobytes() != b.tobytes()]
    return f"differs from np.transpose at index {wrong[0]} of the first axis" if wrong else None


@partial(jax.jit, static_argnums=2)
def _take(x: Array, indices: Array, axis: int) -> Array:
    return jnp.take(x, indices, axis)


# ---- the plans ----


def _plan(case: PermuteCase) -> dict[str, Any]:
    return _native.permute_plan(case.shape, case.axes, itemsize(case.dtype))


def explain(cases: Sequence[PermuteCase]) -> str:
    """A table of the plans: a line a case; shapes, axes and tiles are those of merged axes.

    The shape and the tile are in the order of the result.
    """
    lines = [["case", "strategy", "unit", "index", "shape", "axes", "tile"]]
    for case in cases:
        plan = _plan(case)
        tile = str(tuple(plan["tile"])) if plan["strategy"] == "runs" else "-"
        lines.append(
            [
                case.name,
                plan["strategy"],
                f"{plan['unit_bytes']} B",
                f"{8 * plan['index_bytes']} bit",
                str(tuple(plan["shape"])),
                str(tuple(plan["axes"])),
                tile,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


# ---- further contenders ----


def _others(case: PermuteCase) -> dict[str, Maker]:
    """What the article starts from, Triton's transpose of matrices, and cuTENSOR."""
    others: dict[str, Maker] = {}
    if case.group == "article":
        others |= {name: partial(_naive, name, case) for name in NAIVE}
    if case.group == SWEEP:
        return others
    *kept, rows, columns = range(len(case.axes))
    if case.axes == (*kept, columns, rows) and itemsize(case.dtype) <= 4:
        others["triton"] = rivals.maker("triton_kernels", "transpose", True)
    if case.dtype in cutensor.TYPES:
        others["cutensor"] = rivals.maker("cutensor", case.axes)
    return others


def _naive(
    name: str, case: PermuteCase, sets: Sets, ours: Array
) -> tuple[Contender, dict[str, Any]]:
    number, pointer = ctypes.c_int, ctypes.c_void_p
    types = (number, number, pointer, pointer, number, pointer, pointer)
    library = libraries.Library(*build(), *types)
    rank, size = len(case.shape), itemsize(case.dtype)
    integers = ctypes.c_longlong * rank
    problem = (rank, integers(*case.shape), integers(*case.axes))

    def start(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        library.launch(NAIVE[name], size, *inputs, *outputs, *problem)

    wait = library.synchronize
    return rivals.on_views(name, rivals.address, start, wait, sets, ours, exact=True)


def build() -> list[Path]:
    """Compiles the library."""
    return [libraries.compiled("naive_permute", [])]
