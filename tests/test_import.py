"""What importing the package does and does not do."""

import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native

ROOT = Path(__file__).parents[1]


def python(code: str, **environment: str) -> str:
    """Runs the code in a fresh interpreter, and returns its output."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("origin", "parts"),
    [
        (None, ["the source without", "no build", "pip install --editable ."]),
        ("{}", ["the source without", "shadows the build installed in {installed}", "python -P"]),
        ('{"dir_info":{"editable":true}}', ["{installed} has no compiled module"]),
    ],
)
def test_source_without_compiled_modules(origin, parts, tmp_path):
    """Imports a copy of the source; `origin` tells how another build is installed."""
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "jax_oneflow_ops", source / "jax_oneflow_ops", ignore=ignored)
    if origin is not None:
        metadata = site / "jax_oneflow_ops-0.1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Name: jax-oneflow-ops\nVersion: 0.1.0\n")
        (metadata / "direct_url.json").write_text(origin)
    code = f"""
import importlib.metadata, sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
sys.path[:0] = [{str(source)!r}, {str(site)!r}]
def not_found(name):
    raise importlib.metadata.PackageNotFoundError(name)
if {origin is None}:  # what this test runs in is installed
    importlib.metadata.distribution = not_found
try:
    import jax_oneflow_ops
except ImportError as error:
    print(error)
"""
    message = python(code)
    for part in (*parts, "jax_oneflow_ops", "Remedy", "pip install"):
        assert part.format(installed=site.resolve() / "jax_oneflow_ops") in message


def test_import_initialises_no_backend_so_that_a_platform_can_be_chosen():
    code = """
import jax_oneflow_ops as jof, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
import numpy as np
y = jof.upsample_nearest2d(np.ones((1, 2, 3), np.float32), 2)
print(jax.default_backend(), jax.device_count(), y.shape)
"""
    assert python(code, XLA_FLAGS="", JAX_PLATFORMS="") == "cpu 3 (1, 4, 6)\n"


@pytest.fixture(scope="module")
def imported():
    """The modules and mapped files that an import adds to a process without a working backend."""
    code = """
import jax, pathlib, sys
maps = lambda: {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
before = {*sys.modules}, maps()
import jax_oneflow_ops
print(*sorted({*sys.modules} - before[0]))
print(*sorted(maps() - before[1]), sep="\\n")
"""
    modules, *files = python(code, JAX_PLATFORMS="a_platform_that_does_not_exist").splitlines()
    return modules.split(), {Path(path).name for path in files}


reads_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="reads /proc, which Linux has"
)


@reads_proc
def test_no_cuda_call_is_made(imported):
    """The static runtime's first CUDA call would load the driver's library."""
    _, loaded = imported
    assert any(name.startswith("_cpu.") for name in loaded), loaded
    if _native.available("cuda"):
        assert any(name.startswith("_cuda.") for name in loaded), loaded
    assert not [name for name in loaded if name.startswith(("libcuda", "libnvidia"))], loaded


@reads_proc
def test_import_loads_little(imported):
    """The import adds only modules of jax and the package; rarely used ones are imported lazily."""
    added, _ = imported
    own = {name.removeprefix("jax_oneflow_ops.") for name in added if "jax_oneflow_ops" in name}
    assert {name.partition(".")[0] for name in added} <= {"jax", "jax_oneflow_ops"}
    later = {"_accelerate", "_codegen", "_fuse", "_messages", "_attention"}
    later |= {"graph", "kernel", "linen", "nnx", "rows"}
    assert not {name.partition(".")[0] for name in own} & later
    assert len(own) <= 25


def test_one_module_knows_versions_and_internals_of_jax():
    pattern = re.compile(r"jax\._src|jax(lib)?\.(__)?version|(import|from) jaxlib|hasattr\(jax")
    modules = Path(jof.__file__).parent.glob("**/*.py")
    assert {m.name for m in modules if pattern.search(m.read_text())} == {"_compat.py"}


def test_version_is_that_of_the_distribution():
    assert jof.__version__ == importlib.metadata.version("jax-oneflow-ops")


def test_source_distribution(tmp_path, monkeypatch):
    """It contains the sources, and no files of a build next to them."""
    build = pytest.importorskip("scikit_build_core.build")
    sources = ["csrc", "cmake", "jax_oneflow_ops"]
    built = shutil.ignore_patterns("__pycache__", "*.so", "include")
    for name in sources:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=built)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    packed = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    for name in ("build/x/_cpu.dir/csrc/cpu.o", ".venv/build/csrc/cuda.o", ".venv-1/cmake/x.cmake"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with tarfile.open(tmp_path / "dist" / build.build_sdist("dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == packed | {"PKG-INFO"}


def test_types_ship():
    assert (importlib.resources.files("jax_oneflow_ops") / "py.typed").is_file()


def test_public_names():
    for name in jof.__all__:
        assert getattr(jof, name).__doc__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jof.no_such_name


@pytest.mark.parametrize(
    ("built", "runtime"), [((0, 1), (0, 1)), ((0, 1), (0, 5)), ((0, 9), (0, 10)), ((1, 0), (1, 2))]
)
def test_ffi_api_that_fits(built, runtime):
    assert _native.check_ffi_api(built, runtime) is None


@pytest.mark.parametrize(
    ("built", "runtime"), [((0, 4), (0, 1)), ((0, 10), (0, 9)), ((1, 0), (0, 9)), ((0, 9), (1, 0))]
)
def test_ffi_api_that_does_not_fit(built, runtime):
    with pytest.raises(ImportError, match="jax_oneflow_ops") as caught:
        _native.check_ffi_api(built, runtime)
    message = str(caught.value)
    for version in (built, runtime):
        assert ".".join(map(str, version)) in message
    assert "pip install" in message  # the remedy


@pytest.mark.exhaustive
def test_an_older_runtime_does_not_break_jax(tmp_path):
    """The package refuses to load and registers nothing, and jax starts as usual."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 0\n")
    code = f"""
import jax
jax.ffi.include_dir = lambda: {str(tmp_path)!r}
try:
    import jax_oneflow_ops
except ImportError as error:
    print(error)
print(jax.jit(lambda x: x + 1)(1))
"""
    message, _, result = python(code).strip().rpartition("\n")
    for part in ("jax_oneflow_ops", "0.0", "pip install"):
        assert part in message
    assert result == "2"
