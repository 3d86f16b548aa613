"""CUB, of the CUDA toolkit: ReduceByKey as a sum of sorted segments.

nvcc compiles it into ``build/benchmarks``, which may be copied to a machine without nvcc.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..harness import Array, Sets
from ..timing import Contender, Missing
from . import address, on_views

TYPES = ("float32", "float16", "bfloat16")
"""In the order of their numbers in the library."""

SOURCES = Path(__file__).parents[1] / "csrc"
BUILD = Path(__file__).resolve().parents[2] / "build" / "benchmarks"
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def contender(sets: Sets, ours: Array) -> tuple[Contender, bool]:
    """The rival "cub"."""
    library = ctypes.CDLL(str(compiled("cub_segment_sum")))
    library.Launch.argtypes = (_INT, *(_POINTER,) * 8, _INT, _INT)
    number, segments, rows = TYPES.index(ours.dtype.name), len(ours), len(sets[0][1])
    size = ctypes.c_size_t()
    needed = ctypes.addressof(size)
    _check(library.Launch(number, None, needed, *(None,) * 6, rows, segments))
    workspace = [
        jnp.zeros(size.value, "uint8"),
        *(jnp.zeros(segments, dtype) for dtype in ("int32", "float32")),
        jnp.zeros(1, "int32"),
    ]
    temporary, keys, sums, runs = (address(x.block_until_ready()) for x in workspace)

    def start(inputs: Sequence[int], outputs: Sequence[int], keep: Any = (size, workspace)) -> None:
        pointers = (temporary, needed, *inputs, keys, sums, runs, *outputs)
        _check(library.Launch(number, *pointers, rows, segments))

    return on_views("cub", address, start, lambda: _check(library.Synchronize()), sets, ours)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")


def compiled(name: str) -> Path:
    """Returns the library, named by a hash of its source."""
    source = SOURCES / f"{name}.cu"
    path = BUILD / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:8]}.so"
    if path.exists():
        return path
    if (nvcc := shutil.which("nvcc")) is None:
        raise Missing("nvcc is not on PATH, and the library was not brought along")
    architectures = re.findall(r"\d+", os.environ.get("JOF_CUDA_ARCHITECTURES", "80;90"))
    command = [nvcc, "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command += [f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.so")
    command += [str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {source.name}: {done.stderr or done.stdout}")
    return unfinished.replace(path)
