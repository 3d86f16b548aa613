"""Shared by the training examples: steps sharded over devices, checked against one device.

No code here calls a collective. Arrays have shardings, `jax.jit` partitions the step, and XLA adds
the collectives, which are read from the compiled step.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks import environment, results

Tree = Any  # of arrays, or of placeholders for arrays
State = tuple[Tree, Tree]  # the state of training: parameters and their velocities

# Plain momentum, not Adam: Adam divides by the gradient's magnitude, and would hide a gradient that
# is a multiple of the right one, for example because an all-reduce is missing.
MOMENTUM = 0.9


@dataclass(frozen=True)
class Problem:
    """A model to train, and its data."""

    init: Callable[[jax.Array], Tree]  # the parameters, from a key
    loss: Callable[[Tree, Tree], jax.Array]  # of the parameters and a batch
    batches: Sequence[Tree]  # steps use them in turn
    rate: float
    items: int  # in a batch ...
    unit: str  # ... of these
    tolerance: float  # for losses on several devices, relative to those on one
    calls: tuple[str, ...]  # patterns of the custom calls that the step must have


@dataclass(frozen=True)
class Division:
    """How parameters and batches are sharded over a mesh."""

    variant: str
    mesh: Mesh
    params: Tree  # of PartitionSpecs
    batch: PartitionSpec
    below: float = math.inf  # every collective has to move fewer bytes


@dataclass(frozen=True)
class Run:
    """The record of some training steps."""

    variant: str
    devices: int
    losses: list[float]
    rate: float  # items a second
    collectives: dict[str, list[int]]  # by kind, the bytes of their results
    calls: list[str]


def arguments(doc: str, steps: int, batch: int) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch, help="over all devices")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes")
    return parser


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the first devices, with axes of the given sizes."""
    devices = jax.devices()[: math.prod(axes.values())]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices)


def _place(division: Division, specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: NamedSharding(division.mesh, spec), specs)


def start(problem: Problem, division: Division) -> State:
    """The state before the first step.

    Random numbers do not depend on their sharding, so every device makes its own shard of the
    parameters.
    """

    def made(key: jax.Array) -> State:
        params = problem.init(key)
        return params, jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    shardings = _place(division, (division.params, division.params))
    state: State = jax.jit(made, out_shardings=shardings)(jax.random.key(0))
    return state


def compiled(problem: Problem, division: Division, state: State) -> jax.stages.Compiled:
    """The compiled step, from a donated state and a batch to the next state and the loss."""

    def step(state: State, batch: Tree) -> tuple[State, jax.Array]:
        params, velocity = state
        loss, gradient = jax.value_and_grad(problem.loss)(params, batch)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        params = jax.tree.map(lambda p, v: (p - problem.rate * v).astype(p.dtype), params, velocity)
        return (params, velocity), loss

    of_state, of_batch, of_loss = (
        _place(division, specs)
        for specs in ((division.params, division.params), division.batch, PartitionSpec())
    )
    jitted = jax.jit(
        step,
        in_shardings=(of_state, of_batch),
        out_shardings=(of_state, of_loss),
        donate_argnums=0,
    )
    return jitted.lower(state, problem.batches[0]).compile()


def train(problem: Problem, division: Division, steps: int, state: State) -> Run:
    """Trains from a state, which is donated, on the mesh of the division."""
    program = compiled(problem, division, state)
    batches = jax.device_put(problem.batches, _place(division, division.batch))
    losses, seconds = descend(program, state, batches, steps, division.variant)
    text = program.as_text() or ""
    return Run(
        division.variant,
        division.mesh.size,
        losses,
        problem.items / seconds,
        collectives(text),
        sorted({*custom_calls(text)}),
    )


def descend(
    program: Callable[[Tree, Tree], tuple[Tree, jax.Array]],
    state: Tree,
    batches: Sequence[Tree],
    steps: int,
    name: str,
) -> tuple[list[float], float]:
    """Runs steps on batches in turn, with a progress bar; returns losses and seconds per step."""
    losses: list[jax.Array] = []
    ends = []
    bar = tqdm(range(steps), desc=name, unit="step", leave=False, disable=None)
    for i, batch in zip(bar, itertools.cycle(batches), strict=False):
        state, loss = program(state, batch)
        losses.append(loss)
        # Shows the loss of the previous step, so that devices do not wait for the host to read it.
        bar.set_postfix_str(f"loss {float(losses[max(0, i - 1)]):.4f}", refresh=False)
        ends.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return [float(loss) for loss in losses], seconds


def communication(collectives: dict[str, list[int]]) -> str:
    """A text: how many collectives of each kind there are, and the megabytes that they move."""
    texts = (f"{len(s)} {kind}, {sum(s) / 1e6:,.2f} MB" for kind, s in collectives.items())
    return "; ".join(texts) or "none"


def custom_calls(program: str) -> list[str]:
    """The custom calls of this package in a compiled program, with repetitions."""
    return re.findall(r'custom_call_target="(jof_\w+)"', program)


def collectives(program: str) -> dict[str, list[int]]:
    """The collectives of a compiled program: the bytes of their results, by kind."""
    types = types_of(program)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    made: dict[str, list[int]] = {}
    for shapes, kind, start, names in re.findall(rf" = (.*?) ({kinds})(-start)?\((.*?)\)", program):
        size = nbytes(shapes)
        operands = sum(nbytes(types.get(name, "")) for name in re.findall(r"[\w.-]+", names))
        # The type of an instruction that starts one may include operands and results.
        made.setdefault(kind, []).append(size - operands if start and size > operands else size)
    return made


def types_of(program: str) -> dict[str, str]:
    """The HLO type of every instruction of a compiled program."""
    return dict(re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*?) [\w-]+\(", program, re.MULTILINE))


def nbytes(shapes: str) -> int:
    """The bytes of the arrays in an HLO type, such as ``(f32[8,4]{1,0}, bf16[])``."""
    arrays = re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", shapes)
    return sum(
        int(bits or 8) // 8 * math.prod(int(n) for n in dimensions.split(",") if n)
        for bits, dimensions in arrays
    )


def compare(problem: Problem, one: Run, divisions: Sequence[Division], runs: Sequence[Run]) -> int:
    """Compares the runs with that on one device, prints, and returns the number of errors."""
    print(f"{'':13}devices   first loss    last loss {problem.unit + '/s':>14}   collectives")
    for run in (one, *runs):
        print(
            f"{run.variant:13}{run.devices:7}{run.losses[0]:13.5f}{run.losses[-1]:13.5f}"
            f"{run.rate:15,.0f}   {communication(run.collectives)}"
        )
    print(f"custom calls: {', '.join(one.calls)}")
    errors = [f"{run.variant}: {error}" for run in (one, *runs) for error in check(problem, run)]
    for division, run in zip(divisions, runs, strict=True):
        apart = np.max(np.abs(np.array(run.losses) / one.losses - 1))
        print(f"{run.variant}: losses are within {apart:.1e} of those on one device")
        if not apart <= problem.tolerance:
            errors.append(f"{run.variant}: losses differ by more than {problem.tolerance:.1e}")
        if run.devices > 1 and run.collectives.keys() != {"all-reduce"}:
            errors.append(f"{run.variant}: not all-reduces alone: {[*run.collectives]}")
        if any(size >= division.below for sizes in run.collectives.values() for size in sizes):
            errors.append(f"{run.variant}: a collective moves {division.below} bytes or more")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return len(errors)


def check(problem: Problem, run: Run) -> Iterator[str]:
    """Yields the errors of a single run."""
    if not run.losses[-1] < run.losses[0]:
        yield "the loss did not fall"
    for pattern in problem.calls:
        if not any(re.fullmatch(pattern, call) for call in run.calls):
            yield f"the step has no custom call {pattern}, only {run.calls}"


def run_all(
    name: str,
    problem: Problem,
    one: Division,
    divisions: Sequence[Division],
    options: argparse.Namespace,
    argv: Sequence[str],
) -> int:
    """Trains on one device and in every division, compares, and returns the exit status."""
    alone, *runs = (
        train(problem, division, options.steps, start(problem, division))
        for division in (one, *divisions)
    )
    errors = compare(problem, alone, divisions, runs)
    if options.out:
        about = environment.header(list(argv), f"examples.{name}", devices=runs[0].devices)
        settings = {k: v for k, v in vars(options).items() if k not in ("out", "devices")}
        rows = [
            {
                "suite": name,
                "case": run.variant,
                "devices": run.devices,
                "losses": [round(run.losses[i], 5) for i in (0, -1)],
                "rate": run.rate,
                "unit": problem.unit,
                "collectives": run.collectives,
            }
            for run in (alone, *runs)
        ]
        results.write(options.out, {"suite": name, **about, "settings": settings}, rows)
    return 1 if errors else 0
