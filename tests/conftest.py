"""Setup before any test module imports JAX: virtual devices, profiles, fixtures."""

import collections
import functools
import gc
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from importlib.metadata import version
from pathlib import Path

# XLA reads its flags once, when the CPU client starts, so this code precedes the import of JAX. The
# user's flags come last and win. XLA compiles thousands of small programs here, whose speed is not
# tested: without optimizations and MLIR the suite takes a third less time. test_xla.py runs what
# needs MLIR.
WITHOUT_EMITTERS = (
    "--xla_cpu_use_fusion_emitters=false"
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
    else "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
flags = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # programs are small, and all cores are busy
]
if "JOF_TEST_EMITTERS" not in os.environ:
    flags.append(WITHOUT_EMITTERS)
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()
# pytest-xdist runs several processes; by default each would claim most of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Nobody reads the tracebacks of expected errors. Filtering them took a tenth of the time.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# The same holds for the source locations of a program's operations.
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "false")
# All processes of a run share this cache of compiled kernels.
own_cache = None
if "JAX_ONEFLOW_OPS_CACHE_DIR" not in os.environ:
    own_cache = os.environ["JAX_ONEFLOW_OPS_CACHE_DIR"] = tempfile.mkdtemp(prefix="jof-kernels-")

# JAX makes many long-lived objects. Searching them for cycles takes a tenth of the time.
gc.set_threshold(100_000, 20, 50)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax.interpreters import mlir  # noqa: E402

from jax_oneflow_ops import _native, _policy, _primitive  # noqa: E402
from jax_oneflow_ops._codegen import cache, compilers, source  # noqa: E402

gc.freeze()

# For each program, JAX loads every MLIR dialect into a new context. One context per thread saves a
# fifth of the time.
new_context = mlir.make_ir_context
context_of = functools.cache(lambda thread: new_context())
sys.modules[new_context.__module__].make_ir_context = lambda: context_of(threading.get_ident())

# Generated kernels compile in a quarter less time; test_kernel.py compiles some with users' flags.
compilers._FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in compilers._FLAGS)


# Macros at the beginning of sources of kernels, by the folder with the headers that are precompiled
# with them: 10 MB instead of 42, or 19 without the second line. Other sources of narrow results are
# compiled with no such headers, since the macro must precede them.
NARROW, NO_HALF = "#define JOF_NARROW_RESULTS\n", f"{source.WITHOUT_HALF}\n"
MACROS = {
    "narrow": f"{NARROW}{NO_HALF}{source.MATH_OF_C}\n",
    "none": NARROW,
    "c": f"{NO_HALF}{source.MATH_OF_C}\n",
    "no-half": NO_HALF,
}
# The compiler of generated kernels reads a source from its standard input.
COMPILER = """#!/bin/sh
case " $* " in
  *" - "*) source=$(cat) ;;
  *) exec {compiler} "$@" ;;
esac
case $source in
{cases}
  *) headers=all ;;
esac
[ $headers = none ] || set -- -I{folder}/$headers -include first.h "$@"
printf '%s\\n' "$source" | exec {compiler} "$@"
"""


def use_precompiled_headers():
    """Precompiles the headers of generated kernels, once for this and later runs.

    Hundreds of kernels then compile in less time. test_kernel.py compiles some as users do.
    """
    os.environ["JOF_TEST_CXX"] = os.environ.get("CXX", "c++")  # for code that is not a kernel
    if "CXX" in os.environ:
        return
    compiler = compilers.CppCompiler()
    included = ["<math.h>", '"cpu/compiled.h"', '"common/traced.h"', '"cpu/compiled_rows.h"']
    headers = "".join(f"#include {name}\n" for name in [*included, '"cpu/messages.h"'])
    texts = {name: macros + headers for name, macros in [*MACROS.items(), ("all", "")]}
    del texts["none"]
    parts = (compiler.target, compiler.identity, cache._headers_hash(), COMPILER, texts)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = Path(__file__).resolve().parents[1] / "build" / "headers" / key
    name = "compiler-of-kernels"
    if os.pathsep in str(folder):
        return
    try:
        if not folder.exists():
            part = folder.with_suffix(f".{os.getpid()}")
            linked = compilers._LINKER_FLAGS.get(sys.platform, ())
            flags = [flag for flag in compiler._flags if flag not in linked]
            flags += ["-DJOF_CPU_ISA=generated", f"-I{_native.include_dir()}"]
            for variant, text in texts.items():
                header = part / variant / "first.h"
                header.parent.mkdir(parents=True)
                header.write_text(text)
                command = [*compiler._command, *flags, "-x", "c++-header", header]
                subprocess.run([*command, "-o", f"{header}.gch"], check=True, capture_output=True)
            cases = "\n".join(f'  *"{text}"*) headers={name} ;;' for name, text in MACROS.items())
            how = {"compiler": shlex.join(compiler._command), "folder": shlex.quote(str(folder))}
            (part / name).write_text(COMPILER.format(cases=cases, **how))
            (part / name).chmod(0o755)
            try:
                part.rename(folder)
            except OSError:  # another process was faster
                shutil.rmtree(part)
    except (OSError, subprocess.CalledProcessError):  # not x86, no compiler, or a read-only folder
        return
    os.environ["CXX"] = name
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


if "JOF_TEST_CXX" not in os.environ:  # workers inherit it
    use_precompiled_headers()

settings.register_profile(
    "quick",
    max_examples=8,
    deadline=None,  # the first example of a shape compiles, later ones do not
    database=None,
    derandomize="CI" in os.environ,
    print_blob=True,
)
settings.register_profile("exhaustive", settings.get_profile("quick"), max_examples=30)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_unconfigure():
    gc.collect()  # otherwise pytest collects five times and Python once: seconds per worker
    gc.freeze()
    if own_cache:
        shutil.rmtree(own_cache, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every combination of parameters")


def pytest_configure(config):
    if config.option.exhaustive and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("exhaustive")


def is_exhaustive(item, first):
    """Whether a test is marked, or differs from the first in more than one list of parameters."""
    count = 0
    for mark in item.iter_markers("parametrize"):
        names = [mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0]
        count += any(item.callspec.params[n] is not first.callspec.params[n] for n in names)
    return count > 1 or item.get_closest_marker("exhaustive") is not None


def quick(items):
    """The tests that run without --exhaustive.

    If a test has several lists of parameters, each value runs with the first values of the other
    lists. Of more than 6 variants that are left, half run; of more than 30, a third. These are
    always the same.
    """
    first = {}
    for item in items:
        first.setdefault(item.function, item)
    items = [item for item in items if not is_exhaustive(item, first[item.function])]
    variants = collections.Counter(item.function for item in items)

    def is_left_out(item):
        share = 1 + (variants[item.function] > 6) + (variants[item.function] > 30)
        return item is not first[item.function] and zlib.crc32(item.nodeid.encode()) % share != 0

    return [item for item in items if not is_left_out(item)]


def pytest_collection_modifyitems(config, items):
    """Drops exhaustive tests, and leaves to test_xla.py what XLA gets wrong with the flags above.

    test_xla.py is one long test, so it runs first: no worker has to wait for it at the end.
    """
    if not config.option.exhaustive:
        kept = quick(items)
        config.hook.pytest_deselected(items=[*{*items}.difference(kept)])
        items[:] = kept
    items.sort(key=lambda item: item.path.name != "test_xla.py")
    if WITHOUT_EMITTERS in os.environ["XLA_FLAGS"]:
        skip = pytest.mark.skip(reason="XLA is wrong without fusion emitters: see test_xla.py")
        for item in items:
            if item.get_closest_marker("fusion_emitters"):
                item.add_marker(skip)


# The tests test kernels. Without measurements, kernels run wherever the choice is left open.
# test_policy.py tests the choice.
_measurements = _policy.tables
_policy.tables = dict


@pytest.fixture(autouse=True)
def every_warning():
    """Forgets which gathers and missing kernels were warned of, so that each test sees its own."""
    _primitive._warned.clear()
    _native.warn_of_fallback.cache_clear()


@pytest.fixture
def native(monkeypatch):
    """Runs kernels, and what else replaces XLA's operations, wherever the choice is left open."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")


@pytest.fixture
def measurements(monkeypatch):
    """Chooses by the committed measurements, as for users."""
    monkeypatch.setattr(_policy, "tables", _measurements)


@pytest.fixture
def as_users(monkeypatch):
    """Compiles kernels with users' flags; other tests use -O1 and compiled headers to save time."""
    flags = ["-O3" if flag == "-O1" else flag for flag in compilers._FLAGS]
    monkeypatch.setattr(compilers, "_FLAGS", tuple(flags))
    monkeypatch.setenv("CXX", os.environ["JOF_TEST_CXX"])


@pytest.fixture(scope="module")
def x64():
    """Enables 64-bit dtypes for the modules that request it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def kernels_of_gpus():
    """Programs for GPUs have kernels, also where these were not built: they are read, not run."""
    with _native.assumed("cuda"):
        yield
