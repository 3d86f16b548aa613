"""Shared by whole programs: trains the same steps with native kernels and with XLA.

XLA never fuses a custom call with the operations around it. An op that gains by itself may
therefore lose in a program, so these are realistic, if small, programs. The environment variable
JAX_ONEFLOW_OPS_IMPLEMENTATION selects the implementation; it is read when a function is traced.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from examples import training
from examples.training import Division, Problem, Run, Tree

STEPS = 64  # whose losses are compared; training is chaotic: later losses differ more
# The largest allowed `difference`. Both runs round to bfloat16's 8 bits, but at different points.
# Measured on CPUs: below 4e-4; with half the gradient of one op, 8e-3 to 0.1.
TOLERANCE = 2**-8

MODELS = ("unet", "vit", "graph", "language")
"""The modules with such programs."""

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


def calls(ops: Sequence[str]) -> tuple[str, ...]:
    """Patterns of the custom calls that a native step with these ops must have."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(CALLS[op] for op in ops)))


@contextlib.contextmanager
def implementation(choice: str) -> Iterator[None]:
    """A context in which functions that are traced run "native" kernels or "xla"."""
    with mock.patch.dict(os.environ, JAX_ONEFLOW_OPS_IMPLEMENTATION=choice):
        yield


def batches(make: Callable[[jax.Array], Tree], count: int = 8) -> list[Tree]:
    """Batches of random data, from `make` and a random key each."""
    key = jax.random.key(1, impl="rbg")  # compiles faster than the default kind
    make = jax.jit(make)
    return [make(key) for key in jax.random.split(key, count)]


def on_one_device(variant: str) -> Division:
    """A division on one device, in which nothing is sharded."""
    return Division(variant, training.mesh_of(data=1), PartitionSpec(), PartitionSpec())


def main(problem_of: Callable[[str], Problem], doc: str | None, argv: Sequence[str]) -> int:
    """Trains with native kernels and with XLA, compares, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)

    small = "tiny" if options.quick else "small"
    problem = problem_of("full" if jax.default_backend() == "gpu" and not options.quick else small)
    state = training.start(problem, on_one_device("start"))
    runs = []
    for choice in ("native", "xla"):
        with implementation(choice):
            own = jax.tree.map(jnp.copy, state)
            runs.append(training.train(problem, on_one_device(choice), options.steps, own))
    return 1 if compare(problem, *runs) else 0


def compare(problem: Problem, native: Run, xla: Run) -> int:
    """Prints both runs, and returns the number of errors."""
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
    """The difference of mean losses over a round of the batches, relative to XLA's first loss.

    The effect of rounding on single losses is random, and averages out. That of a wrong gradient
    does not.
    """
    apart = np.subtract(native[:STEPS], xla[:STEPS])
    starts = range(0, len(apart), len(problem.batches))
    means = [apart[i : i + len(problem.batches)].mean() for i in starts]
    return float(np.max(np.abs(means))) / xla[0]
