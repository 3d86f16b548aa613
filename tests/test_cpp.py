"""Compiles and runs the C++ unit tests (cpp/*_test.cc) under the address and undefined-behaviour
sanitizers.

The first line of a test may name what it is compiled with: `// sources: csrc/cpu/foo.cc ...`.
"""

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
    *("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()),
]


def sources(test: Path) -> list[str]:
    first_line = test.read_text().partition("\n")[0]
    marker = "// sources:"
    return first_line.removeprefix(marker).split() if first_line.startswith(marker) else []


# What CMakeLists.txt compiles the CPU kernels with, and the CPU flags that running them needs.
INSTRUCTION_SETS = {
    "baseline": ([], []),
    "avx2": (["-mavx2", "-mfma", "-mf16c"], ["avx2", "fma", "f16c"]),
    "avx512": (
        [f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")]
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


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason=f"no C++ compiler {COMPILER[0]!r}")
@pytest.mark.parametrize(("test", "instruction_set"), [*builds()])
def test_cpp(test, instruction_set, tmp_path):
    flags, needed = INSTRUCTION_SETS[instruction_set]
    # The dispatcher knows one table then, the "baseline", whatever that is compiled for.
    defines = [f"-DJOF_CPU_ISA={instruction_set}", "-DJOF_CPU_KERNELS=kCpuKernelsBaseline"]
    if missing := set(needed) - cpu_flags():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    binary = str(tmp_path / test.stem)
    run([*COMPILER, *FLAGS, *flags, *defines, str(test), *sources(test), "-o", binary], cwd=ROOT)
    run([binary])
