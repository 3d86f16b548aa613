"""Other libraries as rivals: kernels that exist, libraries that are missing, results compared."""

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import elementwise, harness, kernels, libraries, permute, rivals, scatter, upsample
from benchmarks.cases import (
    CASES,
    WIDTH,
    CastCase,
    ElementwiseCase,
    KernelCase,
    PermuteCase,
    ScatterCase,
    UpsampleCase,
)
from benchmarks.rivals import cutensor
from benchmarks.timing import Missing

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="for CPUs")

SUITES = sorted(CASES.keys() - {"models"})


def imported(name: str, monkeypatch):
    """A module of rivals, beside stand-ins for the libraries that it imports."""
    fakes = ("cupy", "torch", "triton", "triton.language", "triton.testing")
    for fake in fakes:
        monkeypatch.setitem(sys.modules, fake, mock.MagicMock())
    path = Path(rivals.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{rivals.__name__}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_suites_ask_for_the_kernels_that_there_are(monkeypatch):
    asked: dict[str, set] = {}

    def maker(module, *arguments):
        asked.setdefault(module, set()).add((arguments[0], case.dtype))

    monkeypatch.setattr(rivals, "maker", maker)
    compiled = 0
    for suite in SUITES:
        module = importlib.import_module(f"benchmarks.{suite}")
        for case in CASES[suite]("gpu", False):
            compiled += module.work(case).compile
    assert 20 <= compiled <= 25  # each costs seconds
    assert asked.keys() == {"triton_kernels", "cupy_kernels", "cub", "cutensor"}
    for name in ("triton_kernels", "cupy_kernels", "cub"):
        assert {kernel for kernel, _ in asked[name]} == imported(name, monkeypatch).KERNELS.keys()
    assert "bfloat16" not in {dtype for _, dtype in asked["cupy_kernels"]}
    assert {dtype for _, dtype in asked["cutensor"]} <= cutensor.TYPES.keys()


@on_cpu
def test_on_a_cpu_other_libraries_are_named_as_missing(monkeypatch, tmp_path):
    case = CastCase("float32", "bfloat16", 1000, "4M elements")
    assert harness.run("cast", [case], tmp_path, False, []) == 0
    assert '"torch.compile": "' in (tmp_path / "cast.json").read_text()
    case = ElementwiseCase("add", "float32", 1000, "4M elements")
    assert elementwise.work(case).others.keys() == {"triton", "cupy", "cub"}


@pytest.mark.parametrize(
    ("module", "library"), [("triton_kernels", "torch"), ("cupy_kernels", "cupy")]
)
def test_a_library_that_is_not_installed_is_missing(module, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"{rivals.__name__}.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=library):
        rivals.maker(module, "add")([()], jnp.ones(1))


def test_libraries_without_their_compiler_or_wheel_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(libraries, "tool", lambda name: None)
    monkeypatch.setattr(libraries, "BUILD", tmp_path)
    x = jnp.ones((2, 3))
    for kernel in ("add", "segment_sum"):
        with pytest.raises(Missing, match="nvcc"):
            rivals.maker("cub", kernel)([(x, x)], x)
    cutensor._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("no such file")))
    with pytest.raises(Missing, match=r"pip install cutensor-cu13 \(OSError: no such file\)"):
        rivals.maker("cutensor", (1, 0))([(x,)], x.T)


def test_strides_are_those_of_a_dense_array():
    assert cutensor._strides((2, 3, 5)) == [15, 5, 1]
    assert cutensor._strides((7,)) == [1]


@on_cpu
def test_views_are_of_the_arrays_and_each_set_has_results_of_its_own():
    sets = [(jnp.full(9, 1.0 + i), jnp.arange(9.0)) for i in range(2)]
    ours = sets[0][1], sets[0][0]
    seen = []

    def swap(inputs, outputs):
        seen.append((inputs, outputs))
        for source, destination in zip(inputs, reversed(outputs), strict=True):
            ctypes.memmove(destination, source, 36)

    arguments = "swap", rivals.address, swap, lambda: None, sets
    contender, known = rivals.on_views(
        *arguments, ours, exact=True, errors=lambda args, out: {"first": float(out[1][0])}
    )
    assert known == {"agrees": True, "difference": 0.0, "first": 1.0}
    for i in (1, 2):
        contender.call(i)
    contender.sync(None)
    assert [inputs for inputs, _ in seen] == [
        [x.unsafe_buffer_pointer() for x in sets[i]] for i in (0, 1, 0)
    ]
    (_, first), (_, second), (_, third) = seen
    assert first == third
    assert not set(first) & set(second)
    _, wrong = rivals.on_views(*arguments, (ours[0], ours[1] + 1), exact=True)
    assert wrong == {"agrees": False, "difference": 1.0}


# --- jnp by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["forward", "derivative"])
@pytest.mark.parametrize("op", [op for op, about in elementwise.OPS.items() if about.by_hand])
def test_formulas_by_hand_are_the_ops(op, group):
    """As exact as asked of ours, but for PyTorch's form of gelu in its tail."""
    case = ElementwiseCase(op, "bfloat16", 4096, "tiny", group)
    work = elementwise.work(case)
    args = harness.Inputs(1).sets(work.inputs, 1)[0]
    if "erf" in op:
        args = tuple(jnp.abs(x) for x in args)
    assert work.check(args, jax.jit(work.jnp["jnp by hand"])(*args)) is None


@pytest.mark.parametrize("kernel", [name for name, k in kernels.KERNELS.items() if k.by_hand])
def test_chains_by_hand_are_the_chains(kernel):
    work = kernels.work(KernelCase(kernel, "float32", WIDTH, "tiny"))
    args = harness.Inputs(2).sets(work.inputs, 1)[0]
    by_hand, jnp_form = (work.jnp[name](*args) for name in ("jnp by hand", "jnp"))
    assert harness.agreement(jnp_form, by_hand, exact=False)["agrees"]


@pytest.mark.parametrize("form", ["_in_parts", "_sorted"])
@pytest.mark.parametrize("width", [1, 3])
def test_sums_that_spare_atomics_are_the_sums(form, width):
    case = ScatterCase("segment_sum", 2048, width, 8, "hot", "float32")
    assert scatter._parts(case) == 64
    data, ids = harness.Inputs(3).sets(scatter.work(case).inputs, 1)[0]
    result = getattr(scatter, form)(case, data, ids)
    expected = jax.ops.segment_sum(data, ids, 8)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_a_gradient_by_matrices_is_the_gradient():
    case = UpsampleCase((2, 3, 5, 7), (8, 9), "NCHW", "float32", "backward", "nearest-exact")
    work = upsample.work(case)
    args = harness.Inputs(4).sets(work.inputs, 1)[0]
    assert work.check(args, work.jnp["matmul"](*args)) is None


# --- what needs a compiler or a GPU ---------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("name", ["cub_transform", "cub_segment_sum"])
def test_cub_compiles(name, tmp_path):
    source = libraries.SOURCES / f"{name}.cu"
    command = ["nvcc", "-std=c++17", "-arch=compute_90", "-ptx", source, "-o", tmp_path / "ptx"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CASES_OF_OTHERS = [
    *(
        (elementwise, ElementwiseCase(op, dtype, 8192, "512 MiB", group))
        for op, group in (
            ("relu", "forward"),
            ("add", "forward"),
            ("multiply", "forward"),
            ("gelu_tanh", "forward"),
            ("silu", "forward"),
            ("swiglu", "forward"),
            ("swiglu", "derivative"),
        )
        for dtype in ("float32", "float16", "bfloat16")
    ),
    *(
        (kernels, KernelCase(kernel, dtype, WIDTH, "tiny"))
        for kernel in ("chain", "squared_diff")
        for dtype in ("float32", "bfloat16")
    ),
    *(
        (permute, PermuteCase((3, 100, 33), axes, "tiny", dtype, "article"))
        for axes in ((0, 2, 1), (1, 0, 2))
        for dtype in ("float32", "float16")
    ),
    *(
        (scatter, ScatterCase("segment_sum", 5000, 1, 1000, "sorted", dtype))
        for dtype in ("float32", "float16", "bfloat16")
    ),
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize(("suite", "case"), CASES_OF_OTHERS, ids=lambda x: getattr(x, "name", ""))
def test_what_is_installed_agrees(suite, case):
    work = suite.work(case)
    sets = harness.Inputs(5).sets(work.inputs, 2)
    ours = jax.jit(work.ours)(*sets[0])
    for name, make in work.others.items():
        try:
            contender, known = make(sets, ours)
        except (Missing, ModuleNotFoundError):
            continue
        assert known["agrees"], (name, known)
        contender.sync(contender.call(1))
