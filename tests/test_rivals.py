"""Other libraries as rivals: kernels that exist, libraries that are missing, results compared."""

import ctypes
import dataclasses
import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tqdm")  # of the extra "bench"

from benchmarks import harness, inputs, rivals, timing
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
def test_calls_are_on_the_arrays_and_each_set_has_a_result_of_its_own():
    sets = [(jnp.arange(9.0) + i,) for i in range(2)]
    seen = []

    def copy(source, destination):
        seen.append((source, destination))
        ctypes.memmove(destination, source, 36)

    call, result = cutensor.in_place(copy, sets, jnp.ones(9))
    for i in range(3):
        call(i)
    assert (result == sets[0][0]).all()
    (source,), (other,) = sets
    assert [x for x, _ in seen] == [x.unsafe_buffer_pointer() for x in (source, other, source)]
    (_, first), (_, second), (_, third) = seen
    assert first == third != second


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
    assert [*torch_rival.rivals(work)] == ["torch"]
    makers = torch_rival.rivals(dataclasses.replace(work, compile=True))
    for name, expected in (("torch", []), ("torch.compile", ["reset", "call"])):
        contender, theirs = makers[name]([arrays], ours)
        assert (theirs == ours).all()
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
            contender, theirs = make(sets, ours)
        except (Missing, ModuleNotFoundError):
            continue
        assert (theirs == ours).all(), name
        contender.sync(contender.call(1))


def test_a_broken_torch_is_missing(monkeypatch):
    monkeypatch.setattr(harness.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "make_clock", lambda platform: (SimpleNamespace(name="x"), None))
    monkeypatch.setattr(harness, "Ceilings", lambda platform: SimpleNamespace(warning="no copy"))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.torch_rival", raising=False)
    machine = harness.make_machine(1, harness.Options())
    assert "ModuleNotFoundError" in machine.missing["torch"]
    assert machine.warnings == ["no copy"]
