"""Compiles generated sources: NVRTC for GPUs, the system's C++ compiler for CPUs, and a cache.

What comes out is bytes that a call carries: a cubin or PTX, a shared library.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform as machine
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax

from jax_oneflow_ops import _expression, _native

_CACHE_VARIABLE = "JAX_ONEFLOW_OPS_CACHE_DIR"

# CMakeLists.txt reads the same file. Clang refuses flags of GCC's optimiser that it does not know:
# those are in cpu/lanes.h.
_ISA_FLAGS = {
    isa: tuple(flags.split())
    for isa, flags in json.loads(
        Path(__file__).with_name("instruction_sets.json").read_text()
    ).items()
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", *_ISA_FLAGS["all"])
# The library travels in the call: without symbols and the pages that keep code and data apart it is
# half as large.
_LINKER_FLAGS = {
    # -z defs: what no library has is an error here, and not where the library is loaded.
    "linux": ("-s", "-Wl,-z,noseparate-code", "-Wl,--build-id=none", "-Wl,-z,defs"),
}


class CompilerMissingError(Exception):
    """There is no compiler here, or it cannot run; the message is the remedy."""


class CompilerError(Exception):
    """A compiler refuses the source."""

    def __init__(self, compiler: str, log: str):
        super().__init__(compiler, log)
        self.compiler = compiler
        self.log = log


def code(source: str, platform: str) -> bytes:
    """Compiled code of a source for a platform, "cpu" or "cuda", as its devices here need it.

    Raises:
      CompilerError: the source is wrong.
      CompilerMissingError: there is no compiler, and the cache has no code of any.
    """
    compiler: _CppCompiler | _Nvrtc
    compiler = _CppCompiler() if platform == "cpu" else _Nvrtc(cuda_architecture())
    key = _key(source, *compiler.target, *compiler.identity)
    with _locks_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _compiled:
            folder = cache_folder()
            found = None if folder is None else read(folder, key)
            if found is None:
                # A second entry names no compiler: one that is gone cannot be asked for.
                of_any = f"{_key(source, *compiler.target)}.any"
                try:
                    found = compiler.compile(source)
                except CompilerMissingError:
                    found = None if folder is None else read(folder, of_any)
                    if found is None:
                        raise
                else:
                    if folder is not None:
                        write(folder, key, found)
                        write(folder, of_any, found)
            _compiled[key] = found
        return _compiled[key]


# What this process has compiled or read.
_compiled: dict[str, bytes] = {}
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


def code_id(code: bytes) -> int:
    """The hash that the FFI handlers know code by."""
    return int.from_bytes(hashlib.sha256(code).digest()[:8], "little", signed=True)


# ---- compilers ----


class _CppCompiler:
    """The system's C++ compiler."""

    def __init__(self) -> None:
        self._chosen = os.environ.get("CXX", "")
        self._command, self._problem = _cpp_command(self._chosen, os.environ.get("PATH", ""))
        isa = _native.cpu_instruction_set()
        self._flags = (*_FLAGS, *_ISA_FLAGS[isa], *_LINKER_FLAGS.get(sys.platform, ()))

    @property
    def target(self) -> tuple[str, ...]:
        """What code depends on beside the source, but for the compiler that makes it."""
        return ("cpu", machine.machine(), sys.platform, self._chosen, *self._flags)

    @property
    def identity(self) -> tuple[str, ...]:
        # Asking for its version would take longer than all else. Replacing it changes the file.
        return (*map(_file_identity, self._command),)

    def compile(self, source: str) -> bytes:
        if self._problem is not None:
            raise CompilerMissingError(self._problem)
        try:
            return self._run(source)
        except OSError as error:
            raise CompilerMissingError(
                f"the C++ compiler {shlex.join(self._command)} cannot run ({error}): it needs a "
                "folder for temporary files, that of the environment variable TMPDIR or /tmp, and "
                "to be a program for this machine"
            ) from error

    def _run(self, source: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="jof-") as folder:
            library = Path(folder, "kernel.so")
            include = ("-DJOF_CPU_ISA=generated", f"-I{_native.include_dir()}")
            done = subprocess.run(
                [*self._command, *self._flags, *include, "-x", "c++", "-", "-o", str(library)],
                input=source,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
            if done.returncode != 0 or not library.exists():
                raise CompilerError(shlex.join(self._command), done.stderr)
            return library.read_bytes()


@functools.lru_cache(maxsize=8)
def _cpp_command(cxx: str, path: str) -> tuple[tuple[str, ...], str | None]:
    """The compiler's command, of absolute paths, or why there is none."""
    try:
        candidates = [shlex.split(cxx)] if cxx.strip() else [["c++"], ["clang++"], ["g++"]]
    except ValueError as error:
        return (), f"the environment variable CXX is no command ({error}): {cxx!r}"
    for program, *options in candidates:
        if (found := shutil.which(program, path=path)) is not None:
            # `ccache g++` names two programs.
            others = (shutil.which(o, path=path) or o for o in options if not o.startswith("-"))
            return (found, *others, *(o for o in options if o.startswith("-"))), None
    if cxx.strip():
        return (), f"the environment variable CXX names {cxx!r}, which is not on PATH"
    return (), (
        "there is no C++ compiler on PATH: install g++ or clang++, or set the environment variable "
        "CXX to one"
    )


@functools.lru_cache(maxsize=8)
def _file_identity(name: str) -> str:
    try:
        path = os.path.realpath(name, strict=True)
        status = os.stat(path)
    except OSError:
        return name
    return f"{path} {status.st_size} {status.st_mtime_ns}"


class _Nvrtc:
    """NVIDIA's run-time compiler."""

    def __init__(self, architecture: str):
        self._architecture = architecture

    @property
    def target(self) -> tuple[str, ...]:
        return ("cuda", self._architecture)

    @property
    def identity(self) -> tuple[str, ...]:
        return _versions("nvidia-cuda-nvrtc", "cuda-bindings")

    def compile(self, source: str) -> bytes:
        try:
            from cuda.bindings import nvrtc  # slow to import, and nothing else needs it

            nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError) as error:  # no such package, or no libnvrtc
            raise CompilerMissingError(
                "kernels for NVIDIA GPUs are compiled by NVRTC, through the package cuda-bindings, "
                f"which cannot be loaded ({_first_line(error)}): install the extra of your CUDA "
                "version, `pip install 'jax-oneflow-ops[cuda13]'` or [cuda12]"
            ) from error

        def checked(results: tuple[object, ...]) -> object:
            status, *values = results
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise CompilerError("NVRTC", str(status))
            return values[0] if values else None

        program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
        try:
            options = [
                f"--gpu-architecture={self._architecture}",
                "--std=c++17",
                "--disable-warnings",
                f"--include-path={_native.include_dir()}",
            ]
            if _expression.NARROW_RESULTS in source:  # within 2 ulp of float32
                options += ["--prec-div=false", "--prec-sqrt=false"]
            encoded = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = bytearray(int(str(checked(nvrtc.nvrtcGetProgramLogSize(program)))))
                checked(nvrtc.nvrtcGetProgramLog(program, log))
                raise CompilerError("NVRTC", log.rstrip(b"\0").decode(errors="replace"))
            what = "CUBIN" if self._architecture.startswith("sm_") else "PTX"
            size = int(str(checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program))))
            compiled = bytearray(size)
            checked(getattr(nvrtc, f"nvrtcGet{what}")(program, compiled))
            return bytes(compiled)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@functools.cache
def _versions(*distributions: str) -> tuple[str, ...]:
    """Of installed distributions, CUDA 12's names included."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in distributions:
        for one in (name, f"{name}-cu12"):
            with contextlib.suppress(PackageNotFoundError):
                found.append(f"{one} {version(one)}")
    return tuple(found)


@functools.cache
def cuda_architecture() -> str:
    """What NVRTC compiles for: "sm_90" for machine code, "compute_80" for PTX.

    Machine code runs on GPUs of one major version. Where this process's GPUs differ in it, and
    where it has none and the module was built for several, the driver compiles PTX.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        listed = re.findall(r"(\d+)(\d)[af]?(?:-\w+)?", _native.cuda_architectures())
    else:
        listed = [tuple(d.compute_capability.split(".")) for d in devices]
    versions = {(int(major), int(minor)) for major, minor in listed} or {(8, 0)}
    lowest = min(versions)
    same_major = len({major for major, _ in versions}) == 1
    return f"{'sm' if same_major else 'compute'}_{lowest[0]}{lowest[1]}"


# ---- the cache on disk ----

# An entry is this, the SHA-256 of the code, and the code.
_MAGIC = b"jax_oneflow_ops kernel 1\n"


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: $JAX_ONEFLOW_OPS_CACHE_DIR, or the platform's place.

    None where the user has no home.
    """
    try:
        if chosen := os.environ.get(_CACHE_VARIABLE):
            return Path(chosen).expanduser().absolute()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "jax_oneflow_ops"
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jax_oneflow_ops"
    except RuntimeError:
        return None


def _key(*parts: str) -> str:
    every = (_MAGIC.decode(), _headers_hash(), *parts)
    return hashlib.sha256("\0".join(every).encode()).hexdigest()


@functools.cache
def _headers_hash() -> str:
    """Of the package's version and of every header that a source may include."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("jax-oneflow-ops").encode())
    root = Path(_native.include_dir())
    for path in sorted(root.rglob("*.*h")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_private(status: os.stat_result) -> bool:
    """Whether nobody but this user, or root, can have written what is loaded as code."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(folder: Path, key: str) -> bytes | None:
    """An entry; None where there is none that is whole and this user's."""
    with contextlib.suppress(OSError):
        if not _is_private(os.stat(folder)):
            return None
        # A pipe would be waited for.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(folder / key, flags)
        with open(file, "rb") as entry:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                return None
            content = entry.read()
        head, code = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if code and head == _MAGIC + hashlib.sha256(code).digest():
            return code
    return None


def write(folder: Path, key: str, code: bytes) -> None:
    """Puts an entry in place as a whole, or, where that is not possible, does nothing."""
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.stat(folder)):
            return
        file, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        with open(file, "wb") as entry:
            entry.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.replace(temporary, folder / key)
    except OSError:  # read-only, or full
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
