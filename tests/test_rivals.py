"""Other libraries as rivals: kernels that exist, libraries that are missing, results compared."""

import ctypes
import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tqdm")  # of the extra "bench"

from benchmarks import harness, inputs, rivals
from benchmarks.rivals import cutensor
from benchmarks.suites import elementwise, load, permute
from benchmarks.timing import Missing


def test_few_rivals_are_compiled():
    suites = ("elementwise", "cast", "upsample", "permute", "scatter", "kernels")
    compiled = sum(case.work().compile for suite in suites for case in load(suite).cases("gpu"))
    assert 8 <= compiled <= 25  # each costs seconds


def test_a_library_that_is_not_installed_is_missing(monkeypatch):
    x = jnp.ones((2, 3))
    cutensor._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("no such file")))
    with pytest.raises(Missing, match=r"pip install cutensor-cu13 \(OSError: no such file\)"):
        cutensor.rival("float32", (1, 0))["cutensor"]([(x,)], x.T)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for CPUs")
def test_views_are_of_the_arrays_and_each_set_has_results_of_its_own():
    sets = [(jnp.full(9, 1.0 + i), jnp.arange(9.0)) for i in range(2)]
    ours = sets[0][1], sets[0][0]
    seen = []

    def swap(sources, destinations):
        seen.append((sources, destinations))
        for source, destination in zip(sources, reversed(destinations), strict=True):
            ctypes.memmove(destination, source, 36)

    arguments = "swap", rivals.address, swap, lambda: None, sets
    contender, right = rivals.on_views(*arguments, ours, exact=True)
    assert right
    for i in (1, 2):
        contender.call(i)
    contender.sync(None)
    assert [sources for sources, _ in seen] == [
        [x.unsafe_buffer_pointer() for x in sets[i]] for i in (0, 1, 0)
    ]
    (_, first), (_, second), (_, third) = seen
    assert first == third
    assert not set(first) & set(second)
    _, right = rivals.on_views(*arguments, (ours[0], ours[1] + 1), exact=True)
    assert not right


class Tensor(np.ndarray):
    def contiguous(self):
        return self


def test_torch_compile_is_compiled_before_it_is_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", mock.MagicMock())
    torch_rival = importlib.import_module(name := f"{rivals.__name__}.torch_rival")
    del sys.modules[name], rivals.torch_rival  # it has the stand-in
    calls = []
    torch = sys.modules["torch"]
    torch.multiply = np.multiply
    torch.from_dlpack = lambda x: np.array(x).view(Tensor)
    torch.compiler.reset = lambda: calls.append("reset")
    torch.compile = lambda f, **options: lambda *x: calls.append("call") or f(*x)
    work = elementwise.case("multiply", "float32", 8, "8").work()
    arrays = inputs.draw(np.uint32(1), work.inputs)
    ours = arrays[0] * arrays[1]
    agrees = lambda y: bool((y == ours).all())  # noqa: E731
    for name, expected in (("torch", []), ("torch.compile", ["reset", "call"])):
        contender, right = torch_rival.contender(name, work, [arrays], ours, agrees)
        assert right
        assert contender.name == name
        assert calls == expected


# --- what needs a GPU -----------------------------------------------------------------------------


WITH_RIVALS = [
    *(permute.case((3, 100, 33), axes, "float16", "random") for axes in ((0, 2, 1), (1, 0, 2))),
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize("case", WITH_RIVALS, ids=lambda case: case.name)
def test_what_is_installed_agrees(case):
    work = case.work()
    sets = [inputs.draw(np.uint32(i), work.inputs) for i in range(2)]
    ours = jax.jit(lambda *x: work.ours(*x, implementation="native"))(*sets[0])
    for name, make in work.others.items():
        try:
            contender, right = make(sets, ours)
        except (Missing, ModuleNotFoundError):
            continue
        assert right, name
        contender.sync(contender.call(1))


def test_a_broken_torch_is_missing(monkeypatch):
    monkeypatch.setattr(harness.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(harness, "make_clock", lambda platform: (SimpleNamespace(name="x"), None))
    monkeypatch.setattr(harness, "Ceilings", lambda platform: SimpleNamespace(warning="no copy"))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.torch_rival", raising=False)
    machine = harness.make_machine(1, harness.Options())
    assert "ModuleNotFoundError" in machine.missing["torch"]
    assert machine.warnings == ["no copy"]
