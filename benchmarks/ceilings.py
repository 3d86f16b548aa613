"""The time of a plain copy of as many bytes: the bound for any memory-bound op.

On a GPU the copy is the kernel of ``csrc/copy.cu``, compiled by CuPy. On a CPU it is XLA's negation
of a float32 array.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Contender, rotation_sets

KINDS = {"gpu": "our own copy kernel, 16-byte packs", "cpu": "XLA's float32 negation"}
_SOURCE = Path(__file__).with_name("csrc") / "copy.cu"


@functools.lru_cache(maxsize=1)
def copy(nbytes: int) -> Contender:
    """Returns a copy that reads and writes ``nbytes`` in total, and keeps its buffers."""
    return (_packs if jax.default_backend() == "gpu" else _negation)(nbytes)


def _packs(nbytes: int) -> Contender:
    import cupy

    module = cupy.RawModule(code=_SOURCE.read_text(), options=("--std=c++17",))
    kernel = module.get_function("copy_packs")
    sets, packs = rotation_sets(nbytes), max(1, nbytes // 32)
    inputs = [cupy.arange(4 * packs, dtype="uint32").reshape(-1, 4) + i for i in range(sets)]
    outputs = [cupy.empty_like(x) for x in inputs]

    def call(i: int) -> None:
        arguments = inputs[i % sets], outputs[i % sets], np.uint64(packs)
        kernel((-(-packs // 256),), (256,), arguments)

    return Contender("copy", call, lambda _: cupy.cuda.Device().synchronize())


def _negation(nbytes: int) -> Contender:
    sets, n = rotation_sets(nbytes), max(1, nbytes // 8)
    inputs = [jnp.arange(n, dtype=jnp.float32) + i for i in range(sets)]
    negate = jax.jit(jnp.negative)
    return Contender("copy", lambda i: negate(inputs[i % sets]), jax.block_until_ready)
