"""Compilers of generated sources: NVRTC for GPUs, the system's C++ compiler for CPUs.

The result is bytes that the FFI call carries: a cubin or PTX, or a shared library.
"""

import contextlib
import functools
import json
import os
import platform as machine
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from jax_oneflow_ops import _native

# CMakeLists.txt reads the same file. Flags of GCC's optimiser, which Clang would refuse, are in
# cpu/lanes.h.
_ISA_FLAGS = {
    isa: tuple(flags.split())
    for isa, flags in json.loads(
        Path(__file__).parents[1].joinpath("instruction_sets.json").read_text()
    ).items()
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", *_ISA_FLAGS["all"])
# The call carries the library. Without symbols, and without padding between code and data pages, it
# is half as large.
_LINKER_FLAGS = {
    # -z defs: an undefined symbol is an error here, not when the library is loaded.
    "linux": ("-s", "-Wl,-z,noseparate-code", "-Wl,--build-id=none", "-Wl,-z,defs"),
}


class CompilerMissingError(Exception):
    """There is no compiler, or it cannot run; the message says what to do."""


class CompilerError(Exception):
    """A compiler refuses the source."""

    def __init__(self, compiler: str, log: str):
        super().__init__(compiler, log)
        self.compiler = compiler
        self.log = log


class CppCompiler:
    """The system's C++ compiler."""

    def __init__(self, contracts: bool = True) -> None:
        self._chosen = os.environ.get("CXX", "")
        self._command, self._problem = _cpp_command(self._chosen, os.environ.get("PATH", ""))
        isa = _native.cpu_instruction_set()
        self._flags = (*_FLAGS, *_ISA_FLAGS[isa], *_LINKER_FLAGS.get(sys.platform, ()))
        if not contracts:
            self._flags = (*self._flags, "-ffp-contract=off")

    @property
    def target(self) -> tuple[str, ...]:
        """Everything except the source and the compiler that the code depends on."""
        return ("cpu", machine.machine(), sys.platform, self._chosen, *self._flags)

    @property
    def identity(self) -> tuple[str, ...]:
        # Size and time of the file change with the compiler. Asking for its version is too slow.
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
    """The compiler's command, with absolute paths, or the reason why there is none."""
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


class Nvrtc:
    """NVIDIA's run-time compiler."""

    def __init__(self, architecture: str, is_narrow: bool, contracts: bool = True):
        self._architecture = architecture
        # If all results are narrow, quotients and roots may be within 2 ulp of float32.
        self._flags = (
            *(("--prec-div=false", "--prec-sqrt=false") if is_narrow else ()),
            *(() if contracts else ("--fmad=false",)),
        )

    @property
    def target(self) -> tuple[str, ...]:
        return ("cuda", self._architecture, *self._flags)

    @property
    def identity(self) -> tuple[str, ...]:
        return _versions("nvidia-cuda-nvrtc", "cuda-bindings")

    def compile(self, source: str) -> bytes:
        try:
            from cuda.bindings import nvrtc  # slow to import, and nothing else needs it

            _, *version = nvrtc.nvrtcVersion()
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
                "--device-as-default-execution-space",  # generic lambdas, before release 13.1 or so
                "--disable-warnings",
                f"--include-path={_native.include_dir()}",
                # Without declarations of textures and of the runtime API: 9 of 190 ms less.
                *(["--minimal"] if version >= [12, 4] else []),
                *self._flags,
            ]
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
    """The versions of installed distributions, also under their names for CUDA 12."""
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

    Machine code runs on GPUs of one major version. If this process's GPUs differ in it, or if there
    are no GPUs and the module was built for several major versions, the result is PTX, which the
    driver compiles.
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
