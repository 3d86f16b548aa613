"""Suite "models": steps of training of whole programs, those of `examples`.

Ours has native kernels for all ops of the program. Its rivals: "xla", the same program with every
op's jnp reference; "jnp", as one would write it without this package; and "only OP", XLA but for
one native op. XLA fuses nothing with a custom call, so an op that is fast by itself can make a
program slower: the last kind says which one does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_oneflow_ops as jof
from examples import programs, training

from .cases import ModelCase
from .harness import Entrants
from .timing import Contender, reason

Array = jax.Array

RIVALS = ["xla", "jnp"]


def _resize(x: Array, factor: int, *, data_format: str) -> Array:
    height = data_format.index("H")
    shape = [n * factor if height <= i < height + 2 else n for i, n in enumerate(x.shape)]
    resized: Array = jax.image.resize(x, shape, "nearest")
    return resized


JNP: dict[str, Callable[..., Array]] = {
    "embedding_lookup": lambda table, ids: jnp.take(table, ids, axis=0),
    "permute": jnp.transpose,
    "segment_sum": jax.ops.segment_sum,
    "silu": jax.nn.silu,
    "swiglu": lambda x, gate: jax.nn.silu(gate) * x,
    "upsample_nearest2d": _resize,
}
"""What each op replaces."""


@dataclass(frozen=True)
class Model:
    """A program of `examples`, and its steps in compilation, by the names of the contenders."""

    problem: training.Problem
    state: Future[programs.State]
    steps: dict[str, Future[jax.stages.Compiled]]


def entrants(cases: Sequence[ModelCase]) -> list[Callable[[], Entrants]]:
    """Compiles the steps of all programs before anything is timed."""
    problems = {case: _module(case).problem(case.variant) for case in cases}
    # What autotuning finds for the first step of a program is there for the others.
    names = ("ours", *RIVALS, *map("only {}".format, programs.CALLS))
    pairs = [(name, case) for name in names for case in cases if name in _names(case)]
    lowered = []
    for name, case in pairs:
        with _tracing(name, _module(case).OPS):
            lowered.append(programs.lower(problems[case]))
    # Not before all of that is done: XLA reads the environment, which tracing has changed, and a
    # process that reads it in one thread while another one writes it may crash. On a GPU one after
    # another: XLA times kernels while it compiles.
    with ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else os.cpu_count()) as pool:
        models = {
            case: Model(problem, pool.submit(programs.start, problem), {})
            for case, problem in problems.items()
        }
        for (name, case), program in zip(pairs, lowered, strict=True):
            models[case].steps[name] = pool.submit(program.compile)
        futures: list[Future[Any]] = [step for m in models.values() for step in m.steps.values()]
        bar = {"total": len(futures), "unit": "program", "leave": False, "disable": None}
        for _ in tqdm(as_completed(futures), file=sys.stderr, desc="compile", **bar):
            pass
    return [partial(_enter, models.pop(case)) for case in cases]


def _module(case: ModelCase) -> Any:
    return importlib.import_module(f"examples.{case.op}")


def _names(case: ModelCase) -> list[str]:
    """The contenders; those of the tiny size, which is for a look only, are soon compiled."""
    if case.variant == "tiny":
        return ["ours", "xla"]
    return ["ours", *RIVALS, *(f"only {op}" for op in _module(case).OPS)]


@contextlib.contextmanager
def _tracing(name: str, ops: Sequence[str]) -> Iterator[None]:
    """Programs that are traced inside are a contender's."""
    changed: dict[str, Callable[..., Array]] = {}
    if name == "jnp":
        changed = {op: JNP[op] for op in ops}
    elif name.startswith("only "):
        op = name.removeprefix("only ")
        changed = {op: partial(getattr(jof, op), implementation="native")}
    with (
        programs.implementation("native" if name == "ours" else "xla"),
        mock.patch.dict(vars(jof), changed),
    ):
        yield


def _enter(model: Model) -> Entrants:
    """Compares losses, and makes what is timed."""
    problem, state = model.problem, model.state.result()
    contenders, contents, rivals = [], {}, {}
    for name, future in model.steps.items():
        try:
            step = future.result()
        except Exception as error:  # a rival may fail in ways of its own; the row says so
            if name in ("ours", "xla"):
                raise
            rivals[name] = {"error": reason(error)}
            continue
        contents[name] = found = content(step.as_text() or "")
        if wrong := _wrong_calls(name, problem, found["calls"]):
            raise ArithmeticError(f"{name} has {wrong}")
        contenders.append(_contender(name, step, problem, state))

    losses = {}
    for name, key in (("ours", "native"), ("xla", "xla")):
        start, step = jax.tree.map(jnp.copy, state), model.steps[name].result()
        losses[key], _ = training.descend(
            step, start, problem.batches, programs.STEPS, f"{key} losses"
        )
    apart = programs.difference(problem, losses["native"], losses["xla"])
    if not apart <= problem.tolerance:
        raise ArithmeticError(f"losses differ by {apart:.1e}, more than {problem.tolerance:.1e}")
    about = {
        "implementation": "native",
        "calls": [*contents["ours"]["calls"]],
        "losses": losses,
        "apart": apart,
        "program": contents,
        "rivals": rivals,
        "jnp": RIVALS,
    }
    return Entrants(contenders, about)


def _wrong_calls(name: str, problem: training.Problem, calls: dict[str, int]) -> str | None:
    """What is wrong with the custom calls of a contender's program, if something is."""
    single = programs.CALLS.get(name.removeprefix("only "), ())
    wanted = problem.calls if name == "ours" else single
    for pattern in wanted:
        if not any(re.fullmatch(pattern, call) for call in calls):
            return f"no custom call {pattern}"
    if not wanted and calls:
        return f"custom calls {[*calls]}"
    return None


def content(program: str) -> dict[str, Any]:
    """What a compiled program runs: how many of each of our custom calls, and of other kernels.

    And the bytes of all that fusions, copies and our calls read and write. Where an op in between
    divides a fusion, an array more goes through memory.
    """
    types = training.types_of(program)
    fused = {*re.findall(r" fusion\(.*?, calls=%?([\w.-]+)", program)}
    count: Counter[str] = Counter()
    moved = 0
    for computation in re.split(r"\n\n+", program):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+)", computation)
        if name is None or name[1] in fused:
            continue
        for line in computation.splitlines():
            if match := _INSTRUCTION.match(line):
                result, opcode, operands = match.groups()
                library = opcode == "custom-call" and not training.custom_calls(line)
                count["library call" if library else opcode] += 1
                if opcode in _MOVERS and not library:
                    arrays = [result, *re.findall(r"[\w.-]+", operands)]
                    moved += sum(training.nbytes(types.get(array, "")) for array in arrays)
    kernels = ("fusion", "copy", "transpose", "library call")
    calls = dict(Counter(training.custom_calls(program)))
    return {"calls": calls, **{kind: count[kind] for kind in kernels}, "bytes": moved}


_INSTRUCTION = re.compile(r" +(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\((.*?)\)")
_MOVERS = {"fusion", "copy", "transpose", "custom-call"}


def _contender(
    name: str, step: Callable[..., Any], problem: training.Problem, state: programs.State
) -> Contender:
    own = [jax.tree.map(jnp.copy, state)]  # what a step gives, the next one takes

    def call(i: int) -> None:
        own[0], _ = step(own[0], problem.batches[i % len(problem.batches)])

    return Contender(name, call, lambda _: jax.block_until_ready(own))
