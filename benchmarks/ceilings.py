"""What a copy of as many bytes costs: the most that any memory-bound op can reach.

On a GPU it is the plain kernel of ``csrc/copy.cu``, compiled by CuPy. Without CuPy, and on a CPU,
it is XLA's negation of a float32 array.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Contender, reason, rotation_sets

_SOURCE = Path(__file__).with_name("csrc") / "copy.cu"


class Ceilings:
    """Makes the contender "copy"; ``kind`` says what it is, ``warning`` why it is not CUDA's."""

    def __init__(self, platform: str) -> None:
        self.kind, self._cupy = "XLA's float32 negation", None
        self.warning: str | None = None
        self._made: tuple[int, Contender] | None = None
        if platform != "gpu":
            return
        try:
            import cupy

            module = cupy.RawModule(code=_SOURCE.read_text(), options=("--std=c++17",))
            self._kernel, self._cupy = module.get_function("copy_packs"), cupy
            probe = self._packs(1 << 20)
            probe.sync(probe.call(0))
            self.kind = "our own copy kernel, 16-byte packs"
        except Exception as error:  # no CuPy, or one that does not fit this CUDA
            self._cupy = None
            self.warning = f"CuPy cannot run the copy kernel ({reason(error)}); XLA copies"

    def copy(self, nbytes: int) -> Contender:
        """Returns the copy that reads and writes ``nbytes`` in all; it keeps its buffers."""
        if self._made is None or self._made[0] != nbytes:
            self._made = None  # free its buffers before new ones are allocated
            self._made = nbytes, (self._packs if self._cupy else _negation)(nbytes)
        return self._made[1]

    def _packs(self, nbytes: int) -> Contender:
        cupy: Any = self._cupy
        sets, packs = rotation_sets(nbytes), max(1, nbytes // 32)
        inputs = [cupy.arange(4 * packs, dtype="uint32").reshape(-1, 4) + i for i in range(sets)]
        outputs = [cupy.empty_like(x) for x in inputs]

        def call(i: int) -> None:
            arguments = inputs[i % sets], outputs[i % sets], np.uint64(packs)
            self._kernel((-(-packs // 256),), (256,), arguments)

        return Contender("copy", call, lambda _: cupy.cuda.Device().synchronize())


def _negation(nbytes: int) -> Contender:
    sets, n = rotation_sets(nbytes), max(1, nbytes // 8)
    inputs = [jnp.arange(n, dtype=jnp.float32) + i for i in range(sets)]
    negate = jax.jit(jnp.negative)
    return Contender("copy", lambda i: negate(inputs[i % sets]), jax.block_until_ready)
