"""CuPy's own operations, and kernels from expressions as its users write them."""

from collections.abc import Sequence
from typing import Any

import cupy

from ..harness import Array, Sets
from ..timing import Contender
from . import on_views

_GELU = "float v = x; y = v / (1 + exp(-1.5957691216f * v * (1 + 0.044715f * v * v)))"
KERNELS: dict[str, Any] = {
    "multiply": cupy.multiply,
    "gelu_tanh": cupy.ElementwiseKernel("T x", "T y", _GELU, "gelu_tanh"),
}


def contender(sets: Sets, ours: Array, kernel: str, exact: bool = False) -> tuple[Contender, bool]:
    """The rival "cupy"."""

    def start(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        KERNELS[kernel](*inputs, *outputs)

    return on_views("cupy", view, start, synchronize, sets, ours, exact=exact)


def view(x: Array) -> Any:
    """The same memory in CuPy, which has no bfloat16."""
    memory = cupy.cuda.UnownedMemory(x.unsafe_buffer_pointer(), x.nbytes, x)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))


def synchronize() -> None:
    """Waits for all that was launched."""
    cupy.cuda.Device().synchronize()
