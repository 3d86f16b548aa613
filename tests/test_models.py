"""Whole programs: native kernels and XLA train them alike, and suite "models" sees what ran."""

import importlib
import re
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")  # of the extra "bench", which examples need
pytest.importorskip("flax")
pytest.importorskip("optax")

import jax_oneflow_ops as jof
from benchmarks import models
from benchmarks.cases import MODELS, ModelCase
from examples import programs


def on_one_worker(model):
    return pytest.param(model, marks=pytest.mark.xdist_group(model))


@pytest.fixture(scope="module", params=[*map(on_one_worker, MODELS)])
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


def test_all_programs_are_traced_before_one_is_compiled(monkeypatch):
    """Tracing changes the environment, which XLA's threads read while they compile."""
    order = []
    lowered = SimpleNamespace(compile=lambda: order.append("compile"))
    monkeypatch.setattr(programs, "lower", lambda problem: order.append("trace") or lowered)
    monkeypatch.setattr(programs, "start", lambda problem: order.append("compile"))
    models.entrants([ModelCase(op, "tiny") for op in MODELS])
    traced = 2 * len(MODELS)
    assert order == ["trace"] * traced + ["compile"] * (len(order) - traced)
    assert len(order) == 2 * traced + len(MODELS)


def test_steps_are_compared_and_follow_from_one_another(trained, monkeypatch):
    monkeypatch.setattr(programs, "STEPS", 24)
    steps = {"ours": trained.steps["native"], "xla": trained.steps["xla"]}
    contenders, about, *_ = models._enter(model_of(trained, steps))
    assert [contender.name for contender in contenders] == ["ours", "xla"]
    assert about["apart"] <= programs.TOLERANCE
    for losses in about["losses"].values():
        assert np.mean(losses[-8:]) < 0.95 * np.mean(losses[:8])
    for contender in contenders:  # the state is donated: each call needs that of the one before
        contender.sync([contender.call(i) for i in range(3)])


def model_of(trained, steps):
    """What the suite makes of the steps; of an exception, one that does not compile."""

    def future(value):
        done = Future()
        (done.set_exception if isinstance(value, Exception) else done.set_result)(value)
        return done

    futures = {name: future(step) for name, step in steps.items()}
    return models.Model(trained.problem, future(trained.state), futures)


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


def test_a_rival_that_does_not_compile_is_in_the_row():
    steps = {"ours": OURS, "xla": Step(), "jnp": MemoryError("much")}
    contenders, about, *_ = models._enter(model_of(SOME, steps))
    assert [contender.name for contender in contenders] == ["ours", "xla"]
    assert about["rivals"] == {"jnp": {"error": "MemoryError: much"}}


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
        models._enter(model_of(SOME, steps))


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
        with models._tracing(name, module.OPS):
            return {*re.findall(r"custom_call @(jof_\w+)", programs.lower(problem).as_text())}

    silu = {"jof_silu", "jof_silu_vjp"}
    assert not calls("xla") | calls("jnp")
    assert calls("only silu") == silu
    assert calls("only segment_sum") | silu == calls("ours")


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_plain_jnp_doubles_as_the_op_does(data_format):
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    ours = jof.upsample_nearest2d(x, 2, data_format=data_format)
    rival = models.JNP["upsample_nearest2d"](x, 2, data_format=data_format)
    np.testing.assert_array_equal(ours, rival)


def test_content_of_a_program():
    text = """HloModule jit_step

%fused_computation (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%p)
}

%body (q: (f32[8], s32[])) -> (f32[8], s32[]) {
  %q = (f32[8]{0}, s32[]) parameter(0)
  %calls = (bf16[2]{0:T(8)}, /*index=1*/u8[5]{0}) custom-call(%q), custom_call_target="jof_silu"
  ROOT %copy.2 = f32[8]{0} copy(%q)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_computation, metadata={op_name="copy(x)"}
  %z = f32[8]{0} custom-call(%y), custom_call_target="__cublas$gemm"
  ROOT %w = f32[8]{0} transpose(%z), dimensions={0}
}
"""
    assert models.content(text) == {
        "calls": {"jof_silu": 1},
        "fusion": 1,
        "copy": 1,
        "transpose": 1,
        "library call": 1,
        # Results and operands: two bf16 and five u8, and a tuple, which the call reads whole;
        # the copy's f32 and the tuple; twice two arrays of f32.
        "bytes": (4 + 5 + 36) + (32 + 36) + 2 * (32 + 32),
    }
