"""The examples run and confirm their claims; those that train detect wrong results."""

import dataclasses
import importlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")  # from the extra "bench", which the examples need
pytest.importorskip("tqdm")

from benchmarks import environment, results
from examples import demo, programs, training

TINY = {
    "autoencoder": ["--size=16", "--batch=8", "--steps=6"],
    "embedding": [*("--vocabulary=600", "--width=16"), *("--batch=16", "--length=8", "--steps=24")],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "devices"), [("embedding", 4), ("autoencoder", 2)])
def test_training_on_several_devices_is_that_on_one(name, devices, tmp_path):
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices (the CPU has 8 virtual ones)")
    file = tmp_path / "result.json"
    main = importlib.import_module(f"examples.{name}").main
    assert main([*TINY[name], f"--devices={devices}", f"--out={file}"]) == 0

    header, (one, *runs) = results.read(file)
    assert one["losses"][-1] < 0.99 * one["losses"][0]
    assert not one["collectives"]
    for run in runs:
        assert run["devices"] == devices
        np.testing.assert_allclose(run["losses"], one["losses"], rtol=2**-7)
        assert run["collectives"].keys() == {"all-reduce"}
    assert environment.slug(header).endswith(f"-x{devices}")


PROBLEM = training.Problem(
    *(lambda key: key, lambda params, batch: params),
    batches=[],
    rate=1.0,
    items=1,
    unit="images",
    tolerance=0.01,
    calls=("jof_silu(_vjp)?",),
)
ONE = training.Run("one device", 1, [2.0, 1.0], 1.0, {}, ["jof_silu"])
TWO = training.Run("two", 2, [2.0, 1.009], 1.0, {"all-reduce": [4, 99]}, ["jof_silu_vjp"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, ""),
        ({"losses": [2.0, 1.011]}, "two: losses differ by more than 1.0e-02"),
        ({"losses": [2.0, math.nan]}, "two: losses differ by more than 1.0e-02"),
        ({"losses": [2.0, 2.0]}, "two: the loss did not fall"),
        ({"collectives": {"all-reduce": [4], "all-gather": [4]}}, "two: not all-reduces alone"),
        ({"collectives": {}}, "two: not all-reduces alone"),
        ({"collectives": {"all-reduce": [4, 100]}}, "two: a collective moves 100 bytes or more"),
        ({"calls": ["jof_silus"]}, "two: the step has no custom call jof_silu(_vjp)?"),
    ],
)
def test_what_is_wrong_with_a_run_is_noticed(change, error, capsys):
    run = dataclasses.replace(TWO, **change)
    spec = jax.sharding.PartitionSpec()
    division = training.Division("two", training.mesh_of(data=1), spec, spec, below=100)
    errors = training.compare(PROBLEM, ONE, [division], [run])
    printed = capsys.readouterr().err
    assert error in printed
    assert (errors > 0) == bool(error) == bool(printed)


def test_the_same_training_by_native_kernels_and_by_xla(capsys):
    graph = pytest.importorskip("examples.graph")  # flax
    assert programs.main(graph.problem, graph.__doc__, ["--quick", "--steps=16"]) == 0
    printed = capsys.readouterr().out
    assert "custom calls: jof_messages, " in printed
    assert re.search(r"^  15 +0\.\d+ +0\.\d+$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("native", "xla", "error"),
    [
        ({}, {}, ""),
        ({"losses": [2.0, 2.0]}, {"losses": [2.0, 2.0]}, "native: the loss did not fall"),
        ({"losses": [2.0, 1.1]}, {}, "losses differ by more than 1.0e-02"),
        ({"losses": [2.0, math.nan]}, {}, "losses differ by more than 1.0e-02"),
        ({"calls": []}, {}, "native: the step has no custom call jof_silu(_vjp)?"),
        ({}, {"calls": ["jof_silu"]}, "xla: the step has custom calls ['jof_silu']"),
    ],
)
def test_what_differs_between_native_kernels_and_xla_is_noticed(native, xla, error, capsys):
    problem = dataclasses.replace(PROBLEM, batches=[0, 1])
    runs = [
        dataclasses.replace(ONE, variant="native", **native),
        dataclasses.replace(ONE, **{"variant": "xla", "calls": [], **xla}),
    ]
    errors = programs.compare(problem, *runs)
    printed = capsys.readouterr().err
    assert error in printed
    assert (errors > 0) == bool(error) == bool(printed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["full", "small"])
@pytest.mark.parametrize("name", programs.MODELS)
def test_models_have_larger_sizes(name, size, monkeypatch):
    model = pytest.importorskip(f"examples.{name}")  # flax

    def zeros(make):
        batch = jax.eval_shape(make, jax.random.key(0))
        return [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)]

    monkeypatch.setattr(programs, "batches", zeros)
    problem = model.problem(size)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    loss = jax.eval_shape(problem.loss, params, problem.batches[0])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_collectives_of_a_program():
    assert training.collectives(
        """
  %a = f32[8,4]{1,0} all-reduce(%x), channel_id=1
  %b = (bf16[2,3]{1,0:T(8)}, /*index=1*/pred[5]{0}, f8e4m3fn[7]{0}) all-reduce-start(%x, %y, %z)
  %c = bf16[2,3]{1,0} all-reduce-done(%b)
  %e = u32[6]{0} fusion(%c), kind=kLoop
  %f = (u32[6]{0}, u32[6]{0}) all-reduce-start(u32[6]{0} %e), channel_id=2
  %g = (u32[6]{0}, u32[24]{0}) all-gather-start(%e), channel_id=3
  ROOT %d = s32[] all-gather(%a), metadata={op_name="all-to-all(x)"}
"""
    ) == {"all-reduce": [128, 24, 24], "all-gather": [96, 4]}


@pytest.mark.exhaustive  # .ci/run runs it, too
def test_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "BATCH", 512)
    monkeypatch.setattr(demo, "STEPS", 4)
    monkeypatch.setattr(demo, "CELLS", (4, 8))
    demo.main([f"--out={tmp_path}"])
    printed = capsys.readouterr().out
    assert re.search(r"demo.py:\d+ +4 x scatter-add +bf16", printed)
    assert "8 swapped on " in printed
    reached = [float(x) for x in re.findall(r"steps, ([\d.]+) dB", printed)]
    assert len(reached) == 2
    assert min(reached) > 6
    assert (tmp_path / "demo.png").stat().st_size > 100_000
