"""Whole programs: native kernels and XLA train them alike, and what their steps ran is checked."""

import importlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")  # of the extra "bench", which examples need
pytest.importorskip("flax")
pytest.importorskip("optax")

import jax_oneflow_ops as jof
from examples import programs

MODELS = ("unet", "vit", "graph", "language")


def on_one_worker(model):
    return pytest.param(model, marks=pytest.mark.xdist_group(model))


# test_examples.py trains the graph network both ways.
@pytest.fixture(scope="module", params=[on_one_worker(m) for m in MODELS if m != "graph"])
def trained(request):
    """A tiny program, its state, and the two compiled steps, which take seconds to compile."""
    module = importlib.import_module(f"examples.{request.param}")
    problem = module.problem("tiny")
    steps = {}
    for choice in ("native", "xla"):
        with programs.implementation(choice):
            steps[choice] = programs.lower(problem).compile()
    state = programs.start(problem)
    return SimpleNamespace(problem=problem, ops=module.OPS, state=state, steps=steps)


def take(trained, choice):
    """One step."""
    state = jax.tree.map(jnp.copy, trained.state)
    return trained.steps[choice](state, trained.problem.batches[0])


def test_gradients_are_those_of_xla_and_reach_all_parameters(trained):
    # After the first step the velocity of momentum is the gradient.
    native, xla = (take(trained, choice)[0].optimizer for choice in ("native", "xla"))
    leaves = jax.tree_util.tree_leaves_with_path(xla)
    for (path, b), a in zip(leaves, jax.tree.leaves(native), strict=True):
        size = np.linalg.norm(b)
        assert size > 0, path
        assert np.linalg.norm(a - b) <= 2**-5 * size, path


def test_steps_are_compared_and_follow_from_one_another(trained, monkeypatch):
    monkeypatch.setattr(programs, "STEPS", 24)
    steps = {"ours": trained.steps["native"], "xla": trained.steps["xla"]}
    about = programs.check_steps(trained.problem, trained.state, steps)
    assert about["apart"] <= programs.TOLERANCE
    for first, last in about["losses"].values():
        assert last < first


class Step:
    """Stands for a compiled step with some custom calls."""

    def __init__(self, *calls, loss=1.0):
        self.calls, self.loss = calls, loss

    def as_text(self):
        """As in HLO."""
        return "\n".join(f'custom_call_target="{call}"' for call in self.calls)

    def __call__(self, state, batch):
        return state, self.loss


OURS = Step("jof_silu", "jof_silu_vjp", "jof_permute")
SOME = SimpleNamespace(
    problem=SimpleNamespace(
        batches=[0, 1], tolerance=programs.TOLERANCE, calls=programs.calls(["silu", "permute"])
    ),
    state=np.zeros(()),
)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ({"ours": Step("jof_silu", "jof_permute"), "xla": Step()}, "ours has no .* jof_silu_vjp"),
        ({"ours": OURS, "xla": Step("jof_silu")}, "xla has custom calls"),
        ({"ours": OURS, "jnp": Step("jof_silu"), "xla": Step()}, "jnp has custom calls"),
        ({"ours": OURS, "xla": Step(), "only silu": Step("jof_silu")}, "only silu has no .*_vjp"),
        ({"ours": OURS, "xla": Step(loss=1.01)}, "losses differ"),
        ({"ours": OURS, "xla": Step(loss=float("nan"))}, "losses differ"),
    ],
)
def test_a_row_is_an_error(steps, error):
    with pytest.raises(ArithmeticError, match=error):
        programs.check_steps(SOME.problem, SOME.state, steps)


def test_noise_goes_out_of_the_difference_of_losses():
    problem = SimpleNamespace(batches=range(4))
    xla = np.full(10, 2.0)
    noise = np.array([1, -1, 1, -1, -1, -1, 1, 1, 1, -1]) / 8
    assert programs.difference(problem, xla + noise, xla) == 0
    assert programs.difference(problem, xla + noise + 2**-6, xla) == 2**-7
    assert np.isnan(programs.difference(problem, np.where(noise > 0, np.nan, xla), xla))


def test_contenders_are_traced_with_their_ops():
    module = importlib.import_module("examples.graph")
    problem = module.problem("tiny")

    def calls(name):
        with programs.tracing(name, module.OPS):
            return {*re.findall(r"custom_call @(jof_\w+)", programs.lower(problem).as_text())}

    silu = {"jof_silu", "jof_silu_vjp"}
    assert not calls("xla") | calls("jnp")
    assert calls("only silu") == silu
    assert calls("only message_mean") | silu == calls("ours")


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_plain_jnp_doubles_as_the_op_does(data_format):
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    ours = jof.upsample_nearest2d(x, 2, data_format=data_format)
    rival = programs.JNP["upsample_nearest2d"](x, 2, data_format=data_format)
    np.testing.assert_array_equal(ours, rival)
