"""What the whole programs share: the same steps of training by native kernels and by XLA.

A custom call is never fused with what is around it. What an op gains by itself may be lost in a
program, so these are real ones, if small. The environment variable JAX_ONEFLOW_OPS_IMPLEMENTATION
says which implementation runs; it is read when a function is traced.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_oneflow_ops as jof
from examples import training
from examples.training import Problem, Run, Tree

STEPS = 64  # whose losses are compared; training is chaotic, and rounding shows more in later ones
# Of `difference`. Both round to bfloat16's 8 bits, but in other places. Measured on CPUs: below
# 4e-4; with half the gradient of one op 8e-3 to 0.1.
TOLERANCE = 2**-8

SUMS = "jof_(segment_sum|scatter_add).*"
CALLS = {
    "embedding_lookup": ("jof_gather_rows", SUMS),
    "message_mean": ("jof_messages", SUMS),
    "permute": ("jof_permute",),
    "silu": ("jof_silu", "jof_silu_vjp"),
    "swiglu": ("jof_swiglu", "jof_swiglu_vjp"),
    "upsample_nearest2d": ("jof_upsample_nearest2d", "jof_upsample_nearest2d_backward"),
}
"""The custom calls that an op and its gradient make, as patterns."""


class State(NamedTuple):
    """What a step changes."""

    params: Tree
    optimizer: Tree


def calls(ops: Sequence[str]) -> tuple[str, ...]:
    """Patterns of the custom calls that a native step with these ops must have."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(CALLS[op] for op in ops)))


@contextlib.contextmanager
def implementation(choice: str) -> Iterator[None]:
    """Functions that are traced inside run "native" kernels or "xla"."""
    with mock.patch.dict(os.environ, JAX_ONEFLOW_OPS_IMPLEMENTATION=choice):
        yield


def _resize(x: jax.Array, factor: int, *, data_format: str) -> jax.Array:
    height = data_format.index("H")
    shape = [n * factor if height <= i < height + 2 else n for i, n in enumerate(x.shape)]
    resized: jax.Array = jax.image.resize(x, shape, "nearest")
    return resized


def _message_mean(
    message: Callable[..., jax.Array],
    tables: Sequence[jax.Array],
    senders: jax.Array,
    receivers: jax.Array,
    *,
    plan: jof.SegmentPlan,
    **_: Any,
) -> jax.Array:
    rows = (table[ids] for table, ids in zip(tables, (senders, receivers), strict=True))
    messages = message(*rows)
    total = jax.ops.segment_sum(messages, receivers, plan.num_segments)
    degree = jax.ops.segment_sum(jnp.ones_like(receivers), receivers, plan.num_segments)
    return total / jnp.maximum(degree, 1)[:, None].astype(total.dtype)


JNP: dict[str, Callable[..., jax.Array]] = {
    "embedding_lookup": lambda table, ids: jnp.take(table, ids, axis=0),
    "message_mean": _message_mean,
    "permute": jnp.transpose,
    "silu": jax.nn.silu,
    "swiglu": lambda x, gate: jax.nn.silu(gate) * x,
    "upsample_nearest2d": _resize,
}
"""What each op replaces."""


@contextlib.contextmanager
def tracing(name: str, ops: Sequence[str]) -> Iterator[None]:
    """Chooses what functions that are traced inside run.

    The choices: "ours", native kernels; "xla"; "only OP", XLA but for that op; "jnp", what users
    write without this package.
    """
    changed: dict[str, Callable[..., jax.Array]] = {}
    if name == "jnp":
        changed = {op: JNP[op] for op in ops}
    elif name.startswith("only "):
        op = name.removeprefix("only ")
        changed = {op: partial(getattr(jof, op), implementation="native")}
    with (
        implementation("native" if name == "ours" else "xla"),
        mock.patch.dict(vars(jof), changed),
    ):
        yield


def start(problem: Problem) -> State:
    """The state before the first step, the same for every implementation."""
    state: State = jax.jit(partial(_start, problem))(_key(0))
    return state


def _start(problem: Problem, key: jax.Array) -> State:
    params = problem.init(key)
    return State(params, _optimizer(problem).init(params))


def _key(seed: int) -> jax.Array:
    """For random numbers of a kind that compiles faster than the usual one."""
    return jax.random.key(seed, impl="rbg")


def batches(make: Callable[[jax.Array], Tree], count: int = 8) -> list[Tree]:
    """Batches of random data."""
    make = jax.jit(make)
    return [make(key) for key in jax.random.split(_key(1), count)]


def lower(problem: Problem) -> jax.stages.Lowered:
    """The step from a state, which is donated, and a batch to the next state and the loss."""

    def step(state: State, batch: Tree) -> tuple[State, jax.Array]:
        loss, gradient = jax.value_and_grad(problem.loss)(state.params, batch)
        updates, optimizer = _optimizer(problem).update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer), loss

    state = jax.eval_shape(partial(_start, problem), _key(0))
    return jax.jit(step, donate_argnums=0).lower(state, problem.batches[0])


def _optimizer(problem: Problem) -> Any:
    return optax.sgd(problem.rate, training.MOMENTUM)


def main(problem_of: Callable[[str], Problem], doc: str | None, argv: Sequence[str]) -> int:
    """Trains by native kernels and by XLA, compares, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses")
    options = parser.parse_args(argv)

    small = "tiny" if options.quick else "small"
    problem = problem_of("full" if jax.default_backend() == "gpu" and not options.quick else small)
    state = start(problem)
    runs = [train(problem, choice, state, options.steps) for choice in ("native", "xla")]
    errors = compare(problem, *runs)
    if options.plot:
        plot(runs, options.plot)
    return 1 if errors else 0


def train(problem: Problem, choice: str, state: State, steps: int) -> Run:
    """Trains from a state, which stays, with one implementation."""
    with implementation(choice):
        program = lower(problem).compile()
    own = jax.tree.map(jnp.copy, state)
    losses, seconds = training.descend(program, own, problem.batches, steps, choice)
    found = sorted({*training.custom_calls(program.as_text() or "")})
    return Run(choice, 1, losses, problem.items / seconds, {}, found)


def compare(problem: Problem, native: Run, xla: Run) -> int:
    """Prints both runs; the number of things that are wrong."""
    print(f"step{native.variant:>12}{xla.variant:>12}   loss")
    count = len(native.losses)
    for i in sorted({*range(0, count, max(1, count // 10)), count - 1}):
        print(f"{i:4}{native.losses[i]:12.4f}{xla.losses[i]:12.4f}")
    print(f"{'':4}{native.rate:12,.0f}{xla.rate:12,.0f}   {problem.unit}/s")
    print(f"native is {native.rate / xla.rate:.2f} times as fast as xla")
    print(f"custom calls: {', '.join(native.calls)}")

    apart = difference(problem, native.losses, xla.losses)
    print(f"losses are within {apart:.1e}")
    errors = [f"native: {error}" for error in training.check(problem, native)]
    if xla.calls:
        errors.append(f"xla: the step has custom calls {xla.calls}")
    if not apart <= problem.tolerance:
        errors.append(f"losses differ by more than {problem.tolerance:.1e}")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return len(errors)


def difference(problem: Problem, native: Sequence[float], xla: Sequence[float]) -> float:
    """How far apart the mean losses of a round of the batches are, relative to XLA's first loss.

    What rounding does to single losses is random and goes out of the mean; a wrong gradient does
    not.
    """
    apart = np.subtract(native[:STEPS], xla[:STEPS])
    starts = range(0, len(apart), len(problem.batches))
    means = [apart[i : i + len(problem.batches)].mean() for i in starts]
    return float(np.max(np.abs(means))) / xla[0]


def check_steps(problem: Problem, state: State, steps: dict[str, Any]) -> dict[str, Any]:
    """Checks that compiled steps have the right custom calls, and that losses agree.

    Args:
      problem: what is trained.
      state: the state before the first step, which stays.
      steps: by the choices of `tracing`; "ours" and "xla" are compared.

    Returns:
      The first and the last losses of both, and how far apart they are.

    Raises:
      ArithmeticError: a step has other custom calls, or losses differ.
    """
    for name, step in steps.items():
        found = {*training.custom_calls(step.as_text() or "")}
        single = CALLS.get(name.removeprefix("only "), ())
        wanted = problem.calls if name == "ours" else single
        for pattern in wanted:
            if not any(re.fullmatch(pattern, call) for call in found):
                raise ArithmeticError(f"{name} has no custom call {pattern}")
        if found and not wanted:
            raise ArithmeticError(f"{name} has custom calls {sorted(found)}")
    losses = {}
    for name in ("ours", "xla"):
        own = jax.tree.map(jnp.copy, state)
        step = steps[name]
        losses[name], _ = training.descend(step, own, problem.batches, STEPS, f"{name} losses")
    apart = difference(problem, losses["ours"], losses["xla"])
    if not apart <= problem.tolerance:
        raise ArithmeticError(f"losses differ by {apart:.1e}, more than {problem.tolerance:.1e}")
    ends = {name: [round(values[i], 5) for i in (0, -1)] for name, values in losses.items()}
    return {"losses": ends, "apart": float(f"{apart:.2g}")}


def plot(runs: Sequence[Run], file: Path) -> None:
    """Draws the losses, step by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=f"{run.variant}, {run.rate:,.0f}/s")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)
