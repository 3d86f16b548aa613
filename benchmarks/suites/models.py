"""Training steps of whole programs, those of `examples`.

Ours has native kernels for all ops of the program. Its rivals: "xla", the same program with every
op's jnp form; "jnp", as users write it without this package; and "only OP", XLA but for one native
op. XLA fuses nothing with a custom call, so an op that is fast by itself can make a program slower:
the last kind says which one does.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from examples import programs, training

from ..harness import Case, Entrants, custom_calls
from ..timing import Contender, reason
from .common import short

MODELS = ("unet", "vit", "graph", "language")
FORMS = ["jnp", "xla"]


def case(model: str, size: str) -> Case:
    """A training step; ``size`` is "full", "small" or "tiny"."""
    name = f"{model}-{size}-{short('bfloat16')}"
    return Case(
        "models", name, model, "step", size, "bfloat16", 0, lambda: partial(enter, model, size)
    )


def cases(platform: str) -> list[Case]:
    """Every program once: "full" on a GPU, "small" on a CPU, "tiny" in a hurry."""
    size = {"gpu": "full", "cpu": "small"}.get(platform, "tiny")
    return [case(model, size) for model in MODELS]


def enter(model: str, size: str) -> Entrants:
    """Compiles the steps one after another, compares losses, and makes the contenders.

    XLA for GPUs times kernels while it compiles. It also reads the environment, which tracing
    changes, and reading it in one thread while another one writes it may crash.
    """
    module = importlib.import_module(f"examples.{model}")
    problem = module.problem(size)
    only = [] if size == "tiny" else [f"only {op}" for op in module.OPS]
    names = ["ours", "xla", *([] if size == "tiny" else ["jnp"]), *only]
    state = programs.start(problem)
    steps, failed = {}, {}
    for name in names:
        try:
            with programs.tracing(name, module.OPS):
                lowered = programs.lower(problem)
            steps[name] = lowered.compile()
        except Exception as error:  # rivals fail in many ways; the row says how
            if name in ("ours", "xla"):
                raise
            failed[name] = reason(error)
    return compare(problem, state, steps, failed)


def compare(
    problem: training.Problem,
    state: programs.State,
    steps: dict[str, Any],
    failed: dict[str, str],
) -> Entrants:
    """Checks that programs have the right custom calls and that losses agree."""
    for name, step in steps.items():
        calls = [c for c in custom_calls(step.as_text() or "") if c.startswith("jof_")]
        if wrong := _wrong_calls(name, problem, calls):
            raise ArithmeticError(f"{name} has {wrong}")
    losses = {}
    for name in ("ours", "xla"):
        start = jax.tree.map(jnp.copy, state)
        losses[name], _ = training.descend(
            steps[name], start, problem.batches, programs.STEPS, f"{name} losses"
        )
    apart = programs.difference(problem, losses["ours"], losses["xla"])
    if not apart <= problem.tolerance:
        raise ArithmeticError(f"losses differ by {apart:.1e}, more than {problem.tolerance:.1e}")
    ends = {name: [round(values[i], 5) for i in (0, -1)] for name, values in losses.items()}
    contenders = [_contender(name, step, problem, state) for name, step in steps.items()]
    about = {"losses": ends, "apart": float(f"{apart:.2g}")}
    return Entrants(contenders, about, FORMS, failed, wall=True)


def _wrong_calls(name: str, problem: training.Problem, calls: Sequence[str]) -> str | None:
    """Says what is wrong with the custom calls of a contender's program, if anything is."""
    single = programs.CALLS.get(name.removeprefix("only "), ())
    wanted = problem.calls if name == "ours" else single
    for pattern in wanted:
        if not any(re.fullmatch(pattern, call) for call in calls):
            return f"no custom call {pattern}"
    return f"custom calls {sorted({*calls})}" if calls and not wanted else None


def _contender(
    name: str, step: Callable[..., Any], problem: training.Problem, state: programs.State
) -> Contender:
    own = [jax.tree.map(jnp.copy, state)]  # each step takes an earlier step's state

    def call(i: int) -> None:
        own[0], _ = step(own[0], problem.batches[i % len(problem.batches)])

    return Contender(name, call, lambda _: jax.block_until_ready(own))
