"""PyTorch, as it is and through torch.compile, on the memory of JAX arrays."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..harness import Array, Sets, Work
from ..timing import Contender

_ROOM_BYTES = 16 << 30

if not torch.cuda.is_available():
    raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")


def names(work: Work) -> list[str]:
    """The rivals of a case, by name."""
    return [*["torch"] * (work.torch is not None), *["torch.compile"] * work.compile]


def contender(name: str, work: Work, sets: Sets, ours: Array) -> tuple[Contender, Array]:
    """A rival on the input sets, and its result, which has the structure of ours."""
    function: Any = partial(work.torch or torch.empty, torch)
    if name == "torch.compile":
        torch.compiler.reset()  # compilations of earlier cases count towards a limit
        function = torch.compile(function, fullgraph=True, dynamic=False)
    tensors: list[Any] = [  # without plans, which are not arrays
        [_to_torch(x) for x in arrays if isinstance(x, jax.Array)] for arrays in sets
    ]
    if work.torch_inputs is not None:
        tensors = [work.torch_inputs(torch, *arrays) for arrays in tensors]

    def call(i: int) -> Any:
        with torch.no_grad():
            return function(*tensors[i % len(tensors)])

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    theirs = [_from_torch(leaf) for leaf in jax.tree.leaves(call(0))]
    sync(None)
    return Contender(name, call, sync), jax.tree.unflatten(jax.tree.structure(ours), theirs)


def make_room() -> None:
    """Frees the caches of PyTorch and CuPy if little of the GPU's memory is left."""
    if torch.cuda.mem_get_info()[0] < _ROOM_BYTES:
        torch.cuda.empty_cache()
        if cupy := sys.modules.get("cupy"):
            cupy.get_default_memory_pool().free_all_blocks()


def _from_torch(y: Any) -> Array:
    y = y.contiguous()
    try:
        return jnp.from_dlpack(y)
    except Exception:  # a dtype that the two do not exchange
        bits = jnp.from_dlpack(y.view(getattr(torch, f"int{8 * y.itemsize}")))
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(str(y.dtype).removeprefix("torch.")))


def _to_torch(x: Array) -> Any:
    """Returns a view of the same memory; a copy through the host if DLPack lacks the dtype."""
    try:
        return torch.from_dlpack(x)
    except Exception:
        bits = np.asarray(x).view(f"int{8 * x.dtype.itemsize}")
        return torch.from_numpy(bits).cuda().view(getattr(torch, x.dtype.name))
