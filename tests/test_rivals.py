"""PyTorch as a rival: compiled before it is timed, and missing where it is broken."""

import dataclasses
import importlib
import sys
from unittest import mock

import jax
import numpy as np
import pytest

pytest.importorskip("tqdm")  # of the extra "bench"

from benchmarks import harness, inputs, rivals, timing
from benchmarks.suites import elementwise, load

NAME = "benchmarks.rivals.torch_rival"


def test_few_rivals_are_compiled():
    suites = ("elementwise", "cast", "upsample", "permute", "scatter", "kernels")
    compiled = sum(case.work().compile for suite in suites for case in load(suite).cases("gpu"))
    assert 8 <= compiled <= 25  # each costs seconds


class Tensor(np.ndarray):
    def contiguous(self):
        return self


def test_torch_compile_is_compiled_before_it_is_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch := mock.MagicMock())
    torch_rival = importlib.import_module(NAME)
    del sys.modules[NAME], rivals.torch_rival  # it has the stand-in
    torch.multiply = np.multiply
    torch.from_dlpack = lambda x: np.array(x).view(Tensor)
    calls = []
    torch.compiler.reset = lambda: calls.append("reset")
    torch.compile = lambda f, **options: lambda *x: calls.append("call") or f(*x)
    work = elementwise.case("multiply", "float32", 8, "8").work()
    arrays = inputs.draw(np.uint32(1), work.inputs)
    ours = arrays[0] * arrays[1]
    assert torch_rival.names(work) == ["torch"]
    work = dataclasses.replace(work, compile=True)
    assert torch_rival.names(work) == ["torch", "torch.compile"]
    for name, expected in (("torch", []), ("torch.compile", ["reset", "call"])):
        contender, theirs = torch_rival.contender(name, work, [arrays], ours)
        assert (theirs == ours).all()
        assert contender.name == name
        assert calls == expected


def test_a_broken_torch_is_missing(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "CuptiClock", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    machine = harness.make_machine(1, harness.Options())
    assert "ModuleNotFoundError" in machine.missing["torch"]
