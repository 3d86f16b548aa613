"""cuTENSOR's permutation, of the wheel cutensor-cu13, through its C interface."""

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..harness import Array, Maker, Sets
from ..timing import Contender, Missing, reason

TYPES = {"float32": 0, "float16": 2, "complex64": 4, "bfloat16": 14}
"""Of cudaDataType_t those whose scaling factor and arithmetic are of f32."""

_IDENTITY, _DEFAULT_ALGORITHM, _NO_JIT = 1, -1, 0
_ALIGNMENT = 128  # bytes, at least, of JAX's arrays


def rival(dtype: str, axes: Sequence[int]) -> dict[str, Maker]:
    """The rival "cutensor" of a permutation, if it knows the dtype."""
    return {"cutensor": partial(contender, axes)} if dtype in TYPES else {}


def contender(axes: Sequence[int], sets: Sets, ours: Array) -> tuple[Contender, Array]:
    """The rival "cutensor", and its result."""
    library, handle = _library()
    x = sets[0][0]
    rank, number = len(axes), TYPES[x.dtype.name]
    operand, result, operation, preference, plan = (ctypes.c_void_p() for _ in range(5))
    for descriptor, array in ((operand, x), (result, ours)):
        extents = (ctypes.c_int64 * rank)(*array.shape)
        dense = np.empty(array.shape, np.int8).strides  # of elements of one byte: in elements
        strides = (ctypes.c_int64 * rank)(*dense)
        describe = library.cutensorCreateTensorDescriptor
        _check(describe(handle, _at(descriptor), rank, extents, strides, number, _ALIGNMENT))
    modes = [(ctypes.c_int32 * rank)(*names) for names in (range(rank), axes)]
    arithmetic = ctypes.c_void_p.in_dll(library, "CUTENSOR_COMPUTE_DESC_32F")
    parts = (operand, modes[0], _IDENTITY, result, modes[1], arithmetic)
    _check(library.cutensorCreatePermutation(handle, _at(operation), *parts))
    choice = (_DEFAULT_ALGORITHM, _NO_JIT)
    _check(library.cutensorCreatePlanPreference(handle, _at(preference), *choice))
    no_workspace = ctypes.c_uint64(0)
    _check(library.cutensorCreatePlan(handle, _at(plan), operation, preference, no_workspace))
    one = (ctypes.c_float * 2)(1.0, 0.0)  # complex for some

    def start(*addresses: int) -> None:
        pointers = map(ctypes.c_void_p, addresses)
        _check(library.cutensorPermute(handle, plan, one, *pointers, None))

    call, theirs = in_place(start, sets, ours)
    call(0)
    _synchronize(None)
    return Contender("cutensor", call, _synchronize), theirs


def in_place(
    start: Callable[[int, int], None], sets: Sets, ours: Array
) -> tuple[Callable[[int], None], Array]:
    """Calls ``start`` on the addresses of an input and of a new array like ``ours``, of each set.

    Returns the new array of the first set, too.
    """
    results = jax.block_until_ready([jnp.zeros_like(ours) for _ in sets])

    def call(i: int) -> None:
        k = i % len(sets)
        start(sets[k][0].unsafe_buffer_pointer(), results[k].unsafe_buffer_pointer())

    return call, results[0]


@functools.cache
def _library() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    spec = importlib.util.find_spec("cutensor")
    places = [Path(p) / "lib" for p in (spec and spec.submodule_search_locations) or ()]
    found = next((p for place in places for p in place.glob("libcutensor.so.2")), None)
    try:
        library = ctypes.CDLL(str(found or "libcutensor.so.2"))
    except OSError as error:
        raise Missing(f"pip install cutensor-cu13 ({reason(error)})") from None
    handle = ctypes.c_void_p()
    _check(library.cutensorCreate(_at(handle)))
    return library, handle


_at = ctypes.byref


def _synchronize(_: object) -> None:
    _check(ctypes.CDLL("libcuda.so.1").cuCtxSynchronize())  # cuTENSOR has made it current


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"status {status}")
