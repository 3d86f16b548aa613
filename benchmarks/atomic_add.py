"""The atomic_add suite: an article's inner products by atomics, beside sums that need few.

The article adds every product of two half vectors to one address: as a half, as a pair of halves,
and as a half that is padded to a pair. ``csrc/atomic_add.cu`` has its three kernels, the last by
this package's ``FastAtomicAdd``, and one that sums in f32 and has one atomic a block. What a user
of this package would call is ``segment_sum`` of the products, into one segment.

A half cannot hold such a sum: from 32 on, a product of 0.01 is less than half of its last place.
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from . import libraries, scatter
from .cases import AtomicCase
from .harness import Input, Maker, Sets, Work
from .timing import Contender, TooSlow

Array = Any

VARIANTS = ["half", "half2", "FastAtomicAdd", "one a block"]
"""In the order of their numbers in the library."""

_TOO_LONG = 1.0  # seconds a call
_FIRST = 1 << 12  # elements


def work(case: AtomicCase) -> Work:
    """Everything the harness needs to run a case."""
    others: dict[str, Maker] = {
        name: partial(_contender, number, case) for number, name in enumerate(VARIANTS)
    }
    return Work(
        inputs=[Input((case.elements,), case.dtype, "tenth")] * 2,
        ours=_segment_sum,
        target=scatter.SUMS,
        jnp={"jnp.dot": lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)},
        torch=None,  # its dot gives a half, which overflows
        check=_check,
        exact=False,
        errors=_errors,
        others=others,
        ceilings=("copy",),
    )


def _segment_sum(a: Array, b: Array) -> Array:
    products = a.astype(jnp.float32) * b.astype(jnp.float32)
    return jof.segment_sum(products, jnp.zeros(a.shape, jnp.int32), 1)[0]


def _exact(a: Array, b: Array) -> float:
    """In float64, on the host."""
    a, b = np.asarray(a), np.asarray(b)
    parts = range(0, len(a), 1 << 20)
    return sum(
        float(a[i : i + (1 << 20)].astype(np.float64) @ b[i : i + (1 << 20)].astype(np.float64))
        for i in parts
    )


def _errors(args: tuple[Array, ...], result: Array) -> dict[str, float]:
    exact = _exact(*args)
    return {"relative_error": abs(float(result) - exact) / exact}


def _check(args: tuple[Array, ...], result: Array) -> str | None:
    error = _errors(args, result)["relative_error"]
    return None if error <= 1e-5 else f"the sum is off by {error:.3g} of itself"


def _contender(
    number: int, case: AtomicCase, sets: Sets, ours: Array
) -> tuple[Contender, dict[str, Any]]:
    """A kernel of the library, and how far its sum is off."""
    import cupy

    kernels = _load()
    pointers = [[x.unsafe_buffer_pointer() for x in arrays] for arrays in sets]
    out = cupy.empty(2, "float16")

    def launch(i: int, elements: int = case.elements) -> None:
        kernels.launch(number, *pointers[i % len(sets)], out.data.ptr, elements)

    def sync(_: Any) -> None:
        kernels.synchronize()

    sync(None)  # the inputs are made by another stream
    launch(0, _FIRST)
    sync(None)
    # A loop of compare and swap takes the longer, the more threads are in it.
    elements = _FIRST
    while elements < case.elements:
        begin = time.perf_counter()
        launch(0, elements)
        sync(None)
        seconds = (time.perf_counter() - begin) * case.elements / elements
        if seconds > _TOO_LONG:
            raise TooSlow(f"not run: {seconds:.1f} s a call or more, judged by {elements} elements")
        elements *= 4
    launch(0)
    sync(None)
    result = cupy.asnumpy(out)
    # The packed form has the sums of the elements of even and of odd index, the others one value.
    sums = result.view(np.float32) if VARIANTS[number] == "one a block" else result
    return Contender(VARIANTS[number], launch, sync), _errors(sets[0], np.sum(sums, dtype=float))


def _load() -> libraries.Library:
    pointer = ctypes.c_void_p
    types = (ctypes.c_int, pointer, pointer, pointer, ctypes.c_longlong)
    return libraries.Library(*build(), *types)


def build() -> list[Path]:
    """Compiles the library."""
    return [libraries.compiled("atomic_add", libraries.package_headers())]
