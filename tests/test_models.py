"""Whole programs: native kernels and XLA train them alike, and losses that differ are noticed."""

import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")  # in the extra "bench", which examples need
pytest.importorskip("flax")
pytest.importorskip("optax")

from examples import programs, training


def of_model(name):
    marks = [pytest.mark.xdist_group(name)]  # keeps it on one worker
    if name != "language":  # the others take longer to compile
        marks.append(pytest.mark.exhaustive)
    return pytest.param(name, marks=marks)


# test_examples.py trains the graph network both ways.
@pytest.mark.parametrize("model", [of_model(m) for m in programs.MODELS if m != "graph"])
def test_gradients_are_those_of_xla_and_reach_all_parameters(model):
    problem = importlib.import_module(f"examples.{model}").problem("tiny")
    one = programs.on_one_device("one")
    state = training.start(problem, one)
    velocities = []
    for choice in ("native", "xla"):
        with programs.implementation(choice):
            program = training.compiled(problem, one, state)
        calls = {*training.custom_calls(program.as_text())}
        assert bool(calls) == (choice == "native")
        (_, velocity), loss = program(jax.tree.map(jnp.copy, state), problem.batches[0])
        assert np.isfinite(loss)
        velocities.append(velocity)  # after the first step it is the gradient
    native, xla = velocities
    leaves = jax.tree_util.tree_leaves_with_path(xla)
    for (path, b), a in zip(leaves, jax.tree.leaves(native), strict=True):
        size = np.linalg.norm(b)
        assert size > 0, path
        assert np.linalg.norm(a - b) <= 2**-5 * size, path


def test_noise_goes_out_of_the_difference_of_losses():
    problem = SimpleNamespace(batches=range(4))
    xla = np.full(10, 2.0)
    noise = np.array([1, -1, 1, -1, -1, -1, 1, 1, 1, -1]) / 8
    assert programs.difference(problem, xla + noise, xla) == 0
    assert programs.difference(problem, xla + noise + 2**-6, xla) == 2**-7
    assert np.isnan(programs.difference(problem, np.where(noise > 0, np.nan, xla), xla))
