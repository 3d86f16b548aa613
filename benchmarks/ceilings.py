"""What a copy and a fill of as many bytes cost: the most that any memory-bound op can reach.

On a GPU these are the plain kernels of ``csrc/copy.cu``, compiled by CuPy; without CuPy, and on a
CPU, the copy is XLA's negation of a float32 array, and says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Contender, reason, rotation_sets

_SOURCE = Path(__file__).with_name("csrc") / "copy.cu"
_THREADS = 256
CEILINGS = ("copy", "fill")
_FALLBACK = "XLA's float32 negation"


class Ceilings:
    """Makes the contenders "copy" and "fill" for a number of bytes moved in all."""

    def __init__(self, platform: str) -> None:
        self.kind, self._cupy = _FALLBACK, None
        self.warning: str | None = None
        self._nbytes, self._made = 0, list[Contender]()
        if platform != "gpu":
            return
        try:
            import cupy

            module = cupy.RawModule(code=_SOURCE.read_text(), options=("--std=c++17",))
            self._copy, self._fill = (module.get_function(n) for n in ("copy_packs", "fill_packs"))
            self._cupy, self.kind = cupy, "our own copy kernel, 16-byte packs"
            for contender in self._kernels(1 << 20):
                contender.sync(contender.call(0))
        except Exception as error:  # no CuPy, or one that does not fit this CUDA
            self._cupy, self.kind = None, _FALLBACK
            self.warning = (
                f"CuPy cannot run the copy kernel ({reason(error)}): the ceiling is XLA's"
            )

    def contenders(self, nbytes: int) -> list[Contender]:
        """The copy, and the fill where there is one, at ``nbytes`` read and written in all.

        They keep their buffers until they are made for another number of bytes.
        """
        if nbytes != self._nbytes:
            self._made = []  # before new buffers are allocated
            self._made = [_negate(nbytes)] if self._cupy is None else self._kernels(nbytes)
            self._nbytes = nbytes
        return self._made

    def _kernels(self, nbytes: int) -> list[Contender]:
        cupy: Any = self._cupy
        sets = rotation_sets(nbytes)
        half = nbytes // 32  # packs; a copy reads half of the bytes and writes the other half
        inputs = [cupy.empty((half, 4), dtype="uint32") for _ in range(sets)]
        outputs = [cupy.empty((2 * half, 4), dtype="uint32") for _ in range(sets)]

        def copy(i: int) -> None:
            self._launch(self._copy, half, inputs[i % sets], outputs[i % sets], np.uint64(half))

        def fill(i: int, arrays: list[Any] = outputs) -> None:
            array = arrays[i % sets]
            self._launch(self._fill, len(array), array, np.uint64(len(array)), np.uint32(i + 1))

        def sync(_: Any) -> None:
            cupy.cuda.Device().synchronize()

        for i in range(sets):
            fill(i, inputs)
        sync(None)
        return [Contender(n, f, sync) for n, f in zip(CEILINGS, (copy, fill), strict=True)]

    @staticmethod
    def _launch(kernel: Any, packs: int, *arguments: Any) -> None:
        kernel((-(-packs // _THREADS),), (_THREADS,), arguments)


def _negate(nbytes: int) -> Contender:
    sets = rotation_sets(nbytes)
    keys = jax.random.split(jax.random.key(0), sets)
    inputs = [jax.random.normal(key, (nbytes // 8,), jnp.float32) for key in keys]
    negate = jax.jit(jnp.negative)
    return Contender("copy", lambda i: negate(inputs[i % sets]), jax.block_until_ready)
