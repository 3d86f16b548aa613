"""CUB, of the CUDA toolkit: DeviceTransform, and ReduceByKey as a sum of sorted segments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .. import libraries
from ..harness import Sets
from ..timing import Contender
from . import address, on_views

Array = Any
Kernel = tuple[Callable[..., None], Callable[[], None]]  # what starts it, and what waits

OPS = ("gelu_tanh", "add")
TYPES = ("float32", "float16", "bfloat16")
"""In the order of their numbers in the libraries."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def contender(sets: Sets, ours: Array, kernel: str) -> tuple[Contender, bool]:
    """The rival "cub"."""
    start, synchronize = KERNELS[kernel](sets, ours)
    return on_views("cub", address, start, synchronize, sets, ours)


def transform_library() -> Path:
    """The library of the elementwise suite."""
    return libraries.compiled("cub_transform", [])


def segment_sum_library() -> Path:
    """The library of the scatter suite."""
    return libraries.compiled("cub_segment_sum", [])


def _transform(op: str, sets: Sets, ours: Array) -> Kernel:
    types = (_INT, _INT, _POINTER, _POINTER, _POINTER, _INT)
    library = libraries.Library(transform_library(), *types)
    numbers = OPS.index(op), TYPES.index(ours.dtype.name)

    def start(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        library.launch(*numbers, inputs[0], inputs[-1], outputs[0], ours.size)

    return start, library.synchronize


def _segment_sum(sets: Sets, ours: Array) -> Kernel:
    library = libraries.Library(segment_sum_library(), _INT, *(_POINTER,) * 8, _INT, _INT)
    number, segments = TYPES.index(ours.dtype.name), len(ours)
    size = ctypes.c_size_t()
    needed = ctypes.addressof(size)
    rows = len(sets[0][1])
    library.launch(number, None, needed, *(None,) * 6, rows, segments)
    workspace = [
        jnp.zeros(size.value, "uint8"),
        *(jnp.zeros(segments, dtype) for dtype in ("int32", "float32")),
        jnp.zeros(1, "int32"),
    ]
    temporary, keys, sums, runs = (address(x.block_until_ready()) for x in workspace)

    def start(inputs: Sequence[int], outputs: Sequence[int], keep: Any = (size, workspace)) -> None:
        pointers = (temporary, needed, *inputs, keys, sums, runs, *outputs)
        library.launch(number, *pointers, rows, segments)

    return start, library.synchronize


KERNELS = {op: partial(_transform, op) for op in OPS} | {"segment_sum": _segment_sum}
