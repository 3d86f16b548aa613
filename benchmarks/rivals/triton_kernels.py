"""A gelu and a transpose in Triton; its autotuner takes the fastest of some sizes of blocks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from ..harness import Sets
from ..timing import Contender
from . import on_views


def _tuned(key: list[str], *configurations: tuple[dict[str, int], int]) -> Any:
    """The autotuner over (sizes of blocks, warps)."""
    return triton.autotune(
        [triton.Config(sizes, num_warps=warps) for sizes, warps in configurations],
        key,
        do_bench=partial(do_bench, warmup=5, rep=20),
    )


@_tuned(["n"], ({"BLOCK": 1024}, 4), ({"BLOCK": 2048}, 8), ({"BLOCK": 4096}, 8))
@triton.jit
def _gelu(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    v = tl.load(x + offsets, mask=inside).to(tl.float32)
    # x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3): one exponential.
    y = v * tl.sigmoid(1.5957691216057308 * v * (1 + 0.044715 * v * v))
    tl.store(out + offsets, y, mask=inside)


@_tuned(
    ["rows", "columns"],
    ({"ROWS": 32, "COLUMNS": 32}, 4),
    ({"ROWS": 64, "COLUMNS": 64}, 4),
    ({"ROWS": 64, "COLUMNS": 64}, 8),
    ({"ROWS": 128, "COLUMNS": 64}, 8),
    ({"ROWS": 128, "COLUMNS": 128}, 8),
)
@triton.jit
def _transpose(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    tile = tl.load(x + matrix + i[:, None] * columns + j[None, :], mask=inside)
    there = out + matrix + j[:, None] * rows + i[None, :]
    tl.store(there, tl.trans(tile), mask=tl.trans(inside))


def _launch_gelu(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    n = outputs[0].numel()
    _gelu[lambda sizes: (triton.cdiv(n, sizes["BLOCK"]),)](*inputs, *outputs, n)


def _transpose_last(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """The last two axes."""
    (x,), (out,) = inputs, outputs
    rows, columns = x.shape[-2:]

    def grid(sizes: Any) -> tuple[int, int, int]:
        matrices = x.numel() // (rows * columns)
        return triton.cdiv(columns, sizes["COLUMNS"]), triton.cdiv(rows, sizes["ROWS"]), matrices

    _transpose[grid](x, out, rows, columns)


KERNELS = {"gelu_tanh": _launch_gelu, "transpose": _transpose_last}


def contender(sets: Sets, ours: Any, kernel: str, exact: bool = False) -> tuple[Contender, bool]:
    """The rival "triton"."""
    start, synchronize = KERNELS[kernel], torch.cuda.synchronize
    return on_views("triton", torch.from_dlpack, start, synchronize, sets, ours, exact=exact)
