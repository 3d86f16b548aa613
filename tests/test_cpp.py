"""Compiles and runs the C++ unit tests (cpp/*_test.cc) under the address and undefined-behaviour
sanitizers.

The first line of a test may name what it is compiled with: `// sources: csrc/cpu/foo.cc ...`.
"""

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = sorted((ROOT / "tests" / "cpp").glob("*_test.cc"))
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()),
]

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def sources(test: Path) -> list[str]:
    first_line = test.read_text().partition("\n")[0]
    marker = "// sources:"
    return first_line.removeprefix(marker).split() if first_line.startswith(marker) else []


# What CMakeLists.txt compiles the CPU kernels with, and the CPU flags that running them needs.
# Sanitizers double the time that compiling takes; two of the sets show them all of the source.
INSTRUCTION_SETS = {
    "baseline": (SANITIZERS, []),
    "avx2": (["-mavx2", "-mfma", "-mf16c"], ["avx2", "fma", "f16c"]),
    "avx512": (
        SANITIZERS
        + [f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")]
        + ["-mfma", "-mf16c", "-mprefer-vector-width=512"],
        [f"avx512{x}" for x in ("f", "bw", "dq", "vl")],
    ),
}


def builds():
    for test in TESTS:
        x86 = platform.machine() in ("x86_64", "AMD64")
        has_kernels = x86 and "csrc/cpu/kernels.cc" in sources(test)
        for name in INSTRUCTION_SETS if has_kernels else ["baseline"]:
            yield pytest.param(test, name, id=f"{test.stem}-{name}")


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def run(command: list[str], **kwargs) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)
    output = f"$ {shlex.join(command)}\n{result.stdout}{result.stderr}"
    print(output)
    assert result.returncode == 0, output


def test_there_are_cpp_tests():
    assert TESTS


@pytest.fixture(scope="session")
def objects(tmp_path_factory) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cpp-objects"
    folder.mkdir(exist_ok=True)
    return folder


def compiled(source: str, flags: list[str], folder: Path) -> str:
    """The object of a source that several tests have, compiled by the first that needs it."""
    stem = folder / Path(source).stem
    with open(f"{stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(f"{stem}.o").exists():
            run([*COMPILER, *FLAGS, *flags, "-c", source, "-o", f"{stem}.part.o"], cwd=ROOT)
            os.replace(f"{stem}.part.o", f"{stem}.o")
    return f"{stem}.o"


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason=f"no C++ compiler {COMPILER[0]!r}")
@pytest.mark.parametrize(("test", "instruction_set"), [*builds()])
def test_cpp(test, instruction_set, objects, tmp_path):
    flags, needed = INSTRUCTION_SETS[instruction_set]
    # The dispatcher knows one table then, the "baseline", whatever that is compiled for.
    defines = [f"-DJOF_CPU_ISA={instruction_set}", "-DJOF_CPU_KERNELS=kCpuKernelsBaseline"]
    if missing := set(needed) - cpu_flags():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    folder = objects / instruction_set
    folder.mkdir(exist_ok=True)
    linked = [compiled(source, [*flags, *defines], folder) for source in sources(test)]
    binary = str(tmp_path / test.stem)
    run([*COMPILER, *FLAGS, *flags, *defines, str(test), *linked, "-o", binary], cwd=ROOT)
    run([binary])
