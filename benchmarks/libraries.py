"""Libraries of kernels: nvcc compiles them into ``build/benchmarks`` where they are not there yet.

``python -m benchmarks SUITE --build`` does nothing else, for a machine that lacks nvcc.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from .timing import Missing

SOURCES = Path(__file__).with_name("csrc")
BUILD = Path(__file__).resolve().parent.parent / "build" / "benchmarks"
_CSRC = BUILD.parent.parent / "csrc"


def package_headers() -> list[Path]:
    """The headers of this package's own kernels."""
    return sorted(p for p in _CSRC.rglob("*.*h") if p.suffix in (".h", ".cuh"))


def compiled(
    name: str, headers: Sequence[Path], includes: Callable[[], Sequence[Path]] = tuple
) -> Path:
    """The library of ``csrc/NAME.cu`` and its headers as they are now, built if it is not there."""
    sources = [SOURCES / f"{name}.cu", *headers]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:8]
    path = BUILD / f"{name}-{digest}.so"
    if not path.exists():
        _compile(sources[0], path, [_CSRC, *includes()])
    return path


def _compile(source: Path, path: Path, includes: Sequence[Path]) -> None:
    if (nvcc := tool("nvcc")) is None:
        raise Missing("nvcc is not on PATH, and the library was not brought along")
    architectures = re.findall(r"\d+", os.environ.get("JOF_CUDA_ARCHITECTURES", "80;90"))
    command = [nvcc, "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command += [f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"]
    command += [f"-I{directory}" for directory in includes]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.so")
    done = subprocess.run(
        [*command, str(source), "-o", str(unfinished)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {source.name}: {done.stderr or done.stdout}")
    unfinished.replace(path)


class Library:
    """A compiled library: its Launch, which takes such types, and its Synchronize.

    Both give a CUDA error code.
    """

    def __init__(self, path: Path, *types: Any) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.Launch.argtypes = types

    def launch(self, *arguments: Any) -> None:
        """Starts a kernel on the default stream."""
        self._check(self._library.Launch(*arguments))

    def synchronize(self) -> None:
        """Waits for all kernels of the device."""
        self._check(self._library.Synchronize())

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, beside nvcc, or of its PyPI package."""
    if found := shutil.which(name):
        return found
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent] if nvcc else []
    places += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    return next((str(p / name) for p in places if (p / name).exists()), None)


@functools.cache
def disassembly(path: Path) -> dict[str, str]:
    """What the compiler made of each function of a library for this GPU, by its mangled name."""
    if (cuobjdump := tool("cuobjdump")) is None:
        raise FileNotFoundError("cuobjdump is not on PATH")
    capability = str(jax.devices()[0].compute_capability).replace(".", "")
    command = [cuobjdump, "--dump-sass", f"--gpu-architecture=sm_{capability}", str(path)]
    return functions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def functions(sass: str) -> dict[str, str]:
    """The text of each function of a disassembly, by its name."""
    parts = (part.split(maxsplit=1) for part in re.split(r"Function\s*:\s*", sass)[1:])
    return {name: text for name, text in parts}
