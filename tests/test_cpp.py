"""Compiles and runs the C++ unit tests, cpp/*_test.cc, under sanitizers.

The first lines of a test may name what it is compiled with: `// sources: csrc/ffi/foo.cc ...`,
`// sanitizers: address thread`, or `plain` where those of `make test-sanitize` are enough. Kernels
are slow to compile: the objects of the build are tested where there are some, which have sanitizers
with JOF_SANITIZE=ON (`make test-sanitize`) only.
"""

import fcntl
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = sorted((ROOT / "tests" / "cpp").glob("*_test.cc"))
# The kernels and what chooses among instruction sets: most tests name all of them.
CPU = "csrc/cpu/*.cc"
DISPATCHER = "csrc/cpu/dispatch.cc"
CPU_SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(CPU))
COMPILER = shlex.split(os.environ["JOF_TEST_CXX"])
FLAGS = [
    *("-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()),
]
EVERYTHING = os.environ.get("JOF_SANITIZE") == "ON"
SANITIZERS = {
    "plain": ["-Og"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
# What CMakeLists.txt compiles the CPU kernels with.
INSTRUCTION_SETS_FILE = ROOT / "jax_oneflow_ops" / "instruction_sets.json"
INSTRUCTION_SETS: dict[str, list[str]] = {
    isa: flags.split()
    for isa, flags in json.loads(INSTRUCTION_SETS_FILE.read_text()).items()
    if isa != "all"
}


def named(test: Path, what: str) -> list[str]:
    """What a test's first lines say of sources or sanitizers."""
    marker = f"// {what}:"
    lines = test.read_text().splitlines()[:2]
    words = [word for line in lines if line.startswith(marker) for word in line.split()[2:]]
    return [name for word in words for name in (CPU_SOURCES if word == CPU else [word])]


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def builds():
    x86 = platform.machine() in ("x86_64", "AMD64")
    here = [
        name
        for name, flags in INSTRUCTION_SETS.items()
        if {flag.removeprefix("-m") for flag in flags if "=" not in flag} <= cpu_flags()
    ]
    for test in TESTS:
        has_kernels = DISPATCHER in named(test, "sources")
        for instruction_set in INSTRUCTION_SETS if x86 and has_kernels else ["baseline"]:
            for sanitizer in named(test, "sanitizers") or ["address"]:
                marks = []
                if instruction_set not in here:
                    marks = [pytest.mark.skip(reason=f"this CPU has no {instruction_set}")]
                elif has_kernels and sanitizer == "thread":
                    if instruction_set != here[-1]:
                        continue  # loops over threads are the same for all
                    marks = [pytest.mark.skipif(not EVERYTHING, reason="see make test-sanitize")]
                elif has_kernels and not EVERYTHING:
                    sanitizer = "plain"
                    marks = [pytest.mark.exhaustive] if instruction_set != here[-1] else []
                elif sanitizer == "plain" and EVERYTHING:
                    sanitizer = "address"
                is_twice = named(test, "sanitizers") == ["address", "thread"]
                # test_cast.py casts between all pairs, too.
                if test.stem == "cast_test" or (is_twice and sanitizer == "address"):
                    marks = [*marks, pytest.mark.exhaustive]
                build = (test, instruction_set, sanitizer)
                yield pytest.param(*build, id="-".join((test.stem, *build[1:])), marks=marks)


# The module under test may need a sanitizer's runtime in the process; compilers do not.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(command: list[str], **kwargs) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, **kwargs
    )
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


def built_kernels(instruction_set: str) -> dict[str, str]:
    """What `make`, pip or CMake has compiled for a module, if nothing has changed since."""
    headers = [
        path for part in ("common", "ops", "cpu") for path in (ROOT / "csrc" / part).glob("*.h")
    ]
    newest = max(path.stat().st_mtime for path in (*headers, INSTRUCTION_SETS_FILE))
    changed = {name: max(newest, (ROOT / name).stat().st_mtime) for name in CPU_SOURCES}
    for folder in (Path(sys.prefix, "build"), *sorted(ROOT.glob("build/*/"))):
        objects = folder / "CMakeFiles" / f"jof_cpu_{instruction_set}.dir"
        built = {name: objects / f"{name}.o" for name in CPU_SOURCES if name != DISPATCHER}
        if all(path.exists() and path.stat().st_mtime > changed[x] for x, path in built.items()):
            options = (folder / "CMakeCache.txt").read_text()
            if ("JOF_SANITIZE:BOOL=ON" in options) == EVERYTHING:
                return {name: str(path) for name, path in built.items()}
    return {}


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
@pytest.mark.parametrize(("test", "instruction_set", "sanitizer"), [*builds()])
def test_cpp(test, instruction_set, sanitizer, objects, tmp_path):
    flags = [*INSTRUCTION_SETS[instruction_set], *SANITIZERS[sanitizer]]
    # The dispatcher knows one table then: what it takes for the baseline's.
    table = f"kCpuKernels{instruction_set.capitalize()}"
    flags += [f"-DJOF_CPU_ISA={instruction_set}", f"-DJOF_CPU_KERNELS={table}"]
    flags += [f"-DkCpuKernelsBaseline={table}"]
    folder = objects / f"{instruction_set}-{sanitizer}"
    folder.mkdir(exist_ok=True)
    built = built_kernels(instruction_set) if sanitizer != "thread" else {}
    linked = [
        built.get(source) or compiled(source, flags, folder) for source in named(test, "sources")
    ]
    binary = str(tmp_path / test.stem)
    run([*COMPILER, *FLAGS, *flags, str(test), *linked, "-ldl", "-o", binary], cwd=ROOT)
    run([binary])
