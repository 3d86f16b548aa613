"""Compiles the programs of cases, checks every result, and times all contenders in turn."""

import contextlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jax_oneflow_ops import _policy

from . import ceilings, timing
from .inputs import Input, draw
from .results import Row, figure
from .timing import Contender, Outcome, reason

Array = Any  # of any framework
Arrays = tuple[Array, ...]
Sets = list[Arrays]  # input sets; successive calls use different ones
Function = Callable[..., Any]

SWEEP = "sweep"
"""The group of cases that run one call at all sizes."""


@dataclass(frozen=True)
class Case:
    """One call at one shape and dtype."""

    suite: str
    name: str  # unique within the suite
    op: str
    group: str  # such as "forward"
    shape: str  # for people to read
    dtype: str
    bytes: int  # each input byte read once and each output byte written once; 0: unknown
    # Returns a Work or, for a whole program, a function that returns its Entrants.
    work: Callable[[], Any] = field(repr=False, compare=False)
    x64: bool = False  # a dtype has 64-bit elements
    plan: str = ""  # permute: the strategy and the movement size


@dataclass(frozen=True)
class Work:
    """How to run and check a case. Functions take what ``draw`` returns, in order."""

    inputs: Sequence[Input]
    ours: Function  # takes `implementation`, too
    forms: dict[str, Function]  # in jnp: first as users write it, then faster forms
    sample: Callable[[Arrays, Array], Any]  # on the device: the data that `verify` checks
    verify: Callable[[Any], str | None]  # on the host, in float64: the error in it
    exact: bool = False  # results of all forms have the same bits
    terms: int = 1  # the most terms in a sum
    alone: bool = False  # our program is one custom call and nothing else
    variants: dict[str, Function] = field(default_factory=dict)  # of ours; checked, too
    torch: Function | None = None  # takes the torch module first
    torch_inputs: Function | None = None  # torch's inputs instead, made before timing
    compile: bool = False  # torch.compile is a rival, too; its first call takes seconds
    donated: bool = False  # the first array is donated; a call takes an earlier result instead
    wall: bool = False  # wall time: memsets and memcpys matter, and CUPTI omits them
    prepare: Function | None = None  # makes the arguments of calls from the arrays of ``inputs``

    def draw(self, seed: Array) -> Arrays:
        """One set of arguments; ``seed`` is a traced uint32."""
        arrays = draw(seed, self.inputs)
        return self.prepare(*arrays) if self.prepare else arrays


@dataclass(frozen=True)
class Entrants:
    """The contenders of a row, ours first, and the other contents of the row."""

    contenders: list[Contender]
    about: Row
    forms: list[str]
    failed: dict[str, str]
    wall: bool = False
    same: dict[str, str] = field(default_factory=dict)  # programs identical to another contender's


@dataclass(frozen=True)
class Options:
    """What to measure: the first of ``implementations`` ("native", "default", "xla") is ours."""

    implementations: Sequence[str] = ("native",)
    libraries: bool = True  # also time other libraries, variants and the copy
    check_only: bool = False
    effort: float = 1.0  # the share of the usual number of samples


@dataclass
class Machine:
    """State that all cases share, and the rivals that are missing on this machine."""

    platform: str
    clock: timing.Clock
    torch: Any  # rivals.torch_rival, or None
    seed: int
    missing: dict[str, str] = field(default_factory=dict)


def make_machine(seed: int, options: Options) -> Machine:
    platform = jax.default_backend()
    clock = timing.CuptiClock() if platform == "gpu" else timing.WallClock()
    machine = Machine(platform, clock, None, seed)
    if options.libraries and platform == "gpu":
        try:
            from .rivals import torch_rival

            machine.torch = torch_rival
        except Exception as error:  # a broken torch raises more than ImportError
            machine.missing["torch"] = reason(error)
    return machine


@dataclass(frozen=True)
class _Prepared:
    case: Case
    work: Any  # or the exception that case.work() raised
    programs: dict[str, Future[Any]]


_CHUNK = 64  # cases whose programs are in memory at the same time


def measure(cases: Sequence[Case], machine: Machine, options: Options) -> Iterator[Row]:
    """Yields the row of each case."""
    for i in range(0, len(cases), _CHUNK):
        for item in _prepare(cases[i : i + _CHUNK], options):
            with precision(item.case):
                yield _row(item, machine, options)
            item.programs.clear()
            if machine.torch is not None:
                machine.torch.make_room()


def precision(case: Case) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if case.x64 else contextlib.nullcontext()


_INPUTS, _SAMPLE, _DIFFERENCE = "(inputs)", "(sample)", "(difference)"


def _prepare(cases: Sequence[Case], options: Options) -> list[_Prepared]:
    prepared: list[_Prepared] = []
    for case in cases:
        try:
            work = case.work()
        except Exception as error:  # the row says so
            work = error
        prepared.append(_Prepared(case, work, {}))
    for left_to_xla in (True, False):
        choice = mock.patch.object(_policy, "prefers_xla", _may_prefer_xla)
        # Exiting the pool waits for its programs.
        with (
            choice if left_to_xla else contextlib.nullcontext(),
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for item in prepared:
                work = item.work
                functions = _functions(work, options) if isinstance(work, Work) else {}
                for name, function in functions.items():
                    if (name == "xla") == left_to_xla:
                        program = pool.submit(_compile, item.case, work, name, function)
                        item.programs[name] = program
    return prepared


def _may_prefer_xla(primitive: Any, avals: Sequence[Any], params: Row, platform: str) -> bool:
    """Replaces the policy: whether the default may take XLA."""
    if primitive not in _policy.calls_of:
        return False
    return isinstance(_policy.describe(primitive, avals, **params), _policy.Call)


def _functions(work: Work, options: Options) -> dict[str, Function]:
    """The functions to compile for a case, by the names of contenders or of steps of the check.

    "xla" is what the default runs if the policy chooses XLA.
    """
    first, *others = options.implementations
    chosen = {"ours": None if first == "default" else first}
    chosen |= {name: name if name == "native" else None for name in others}
    ours = {name: partial(work.ours, implementation=i) for name, i in chosen.items()}
    variants = work.variants if options.libraries else {}
    steps: dict[str, Function] = {_INPUTS: work.draw, _SAMPLE: work.sample, _DIFFERENCE: difference}
    return {**ours, **variants, **work.forms, **steps}


def _compile(case: Case, work: Work, name: str, function: Function) -> Any:
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    with precision(case):
        if name == _INPUTS:
            return jax.jit(function).lower(seed).compile()
        arrays = jax.eval_shape(work.draw, seed)
        if name in (_SAMPLE, _DIFFERENCE):
            result = jax.eval_shape(next(iter(work.forms.values())), *arrays)
            first = arrays if name == _SAMPLE else result
            return jax.jit(function).lower(first, result).compile()
        donated = (0,) if work.donated else ()
        return jax.jit(function, donate_argnums=donated).lower(*arrays).compile()


_MOVES_NOTHING = {"parameter", "constant", "custom-call", "call", "bitcast"}
_MOVES_NOTHING |= {"tuple", "get-tuple-element"}


def is_native(program: str, alone: bool) -> bool:
    """Returns whether a compiled program runs our kernels; if ``alone``, others are an error."""
    calls = re.findall(r'custom_call_target="([^"]+)"', program)
    if not any(call.startswith("jof_") for call in calls):
        return False
    # In each line of the entry computation, the first word before a parenthesis is the operation.
    entry = program[program.index("ENTRY") :].splitlines()[1:]
    found = {match[1] for line in entry if (match := re.search(r"= .*?([a-z][a-z-]*)\(", line))}
    if alone and (found - _MOVES_NOTHING or len(calls) > 1):
        beside = sorted(found - _MOVES_NOTHING) or calls
        raise ArithmeticError(f"{', '.join(beside)} beside our kernel")
    return True


def about(case: Case) -> Row:
    names = ("op", "group", "dtype", "shape", "bytes", *(["plan"] if case.plan else []))
    row = {"suite": case.suite, "case": case.name}
    return row | {name: getattr(case, name) for name in names}


def _row(item: _Prepared, machine: Machine, options: Options) -> Row:
    """Checks and times one case."""
    case = item.case
    row = about(case)
    try:
        if isinstance(item.work, Exception):
            raise item.work
        prepared = isinstance(item.work, Work)
        entrants = _entrants(item, machine, options) if prepared else item.work()
        row |= entrants.about
        if options.check_only:
            return row
        clock = machine.clock
        if entrants.wall and machine.platform == "gpu":
            row["clock"], clock = "wall", timing.WALL_OF_GPU
        timings = timing.compare(entrants.contenders, clock, options.effort)
        timings |= {name: timings[other] for name, other in entrants.same.items()}
        return _timed(row, entrants, timings)
    except Exception as error:  # the row has the error, and the exit status shows it
        return {**row, "error": reason(error)}


def _timed(row: Row, entrants: Entrants, timings: Outcome) -> Row:
    medians: dict[str, Any] = {**entrants.failed}
    for name, t in timings.items():
        medians[name] = t if isinstance(t, str) else figure(statistics.median(t))
    ours, us = timings["ours"], medians.pop("ours")
    if isinstance(ours, str):
        return {**row, "error": ours}
    row |= {"us": us, "iqr": figure(timing.spread(ours), 2)}
    row |= {"copy": medians.pop("copy")} if "copy" in medians else {}
    row["xla"] = {name: medians.pop(name) for name in entrants.forms if name in medians}
    return {**row, "others": medians}


def _entrants(item: _Prepared, machine: Machine, options: Options) -> Entrants:
    """Checks our result, compares the rivals' results with it, and makes the contenders."""
    work, programs = item.work, item.programs
    count = 1 if options.check_only else timing.rotation_sets(item.case.bytes)
    sets: Sets = [programs[_INPUTS].result()(np.uint32(machine.seed + i)) for i in range(count)]
    contenders: list[Contender] = []
    about: Row = {}
    disagree: list[str] = []
    failed: dict[str, str] = {}
    known: dict[str, str] = {}
    same: dict[str, str] = {}

    def run(name: str) -> Array:
        """Runs a program, makes a contender of it, and returns its result."""
        compiled = programs[name].result()
        if (other := known.setdefault(_without_names(compiled.as_text() or name), name)) != name:
            same[name] = other  # timing one program twice would show only noise
        else:
            contenders.append(_jax_contender(name, compiled, work, sets))
        first = jnp.copy(sets[0][0]) if work.donated else sets[0][0]
        return jax.block_until_ready(compiled(first, *sets[0][1:]))

    def verified(name: str) -> Array:
        result = run(name)
        sampled = programs[_SAMPLE].result()(sets[0], result)
        if wrong := work.verify(jax.tree.map(np.asarray, sampled)):
            raise ArithmeticError(wrong if name == "ours" else f"{name}: {wrong}")
        return result

    def agrees(theirs: Array) -> bool:
        return agreement(programs[_DIFFERENCE].result()(ours, theirs), work.exact, ours, work.terms)

    ours = verified("ours")
    alone = work.alone and options.implementations[0] == "native"
    if not is_native(programs["ours"].result().as_text() or "", alone):
        about["ran"] = "xla"
    for name in [*options.implementations[1:], *(work.variants if options.libraries else [])]:
        verified(name)
    for name in work.forms:
        try:
            disagree += [] if agrees(run(name)) else [name]
        except Exception as error:
            failed[name] = reason(error)
    ran = {*work.forms} - {*failed}
    if ran and ran <= {*disagree}:
        raise ArithmeticError(f"the result differs from that of {', '.join(sorted(ran))}")
    if options.libraries and not options.check_only:
        for name in machine.torch.names(work) if machine.torch is not None else ():
            try:
                contender, theirs = machine.torch.contender(name, work, sets, ours)
                disagree += [] if agrees(theirs) else [name]
                contenders.append(contender)
            except Exception as error:  # rivals fail in many ways; the row says how
                failed[name] = reason(error)
        contenders.append(ceilings.copy(item.case.bytes))
    about |= {"disagree": disagree} if disagree else {}
    return Entrants(contenders, about, list(work.forms), failed, work.wall, same)


def _without_names(program: str) -> str:
    """A compiled program's instructions, with numbers for names and no source locations."""
    program = re.sub(
        r"^HloModule .*|^\w+\n(\d+ .*\n)+|, metadata=\{[^}]*\}", "", program, flags=re.M
    )
    program = re.sub(r"[\w.-]+: ", "", program)  # of parameters
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), program)


def _jax_contender(name: str, compiled: Function, work: Work, sets: Sets) -> Contender:
    if not work.donated:
        return Contender(name, lambda i: compiled(*sets[i % len(sets)]), jax.block_until_ready)
    states = [jnp.copy(arrays[0]) for arrays in sets]  # a call takes an earlier call's result

    def call(i: int) -> None:
        k = i % len(sets)
        states[k] = compiled(states[k], *sets[k][1:])

    return Contender(name, call, lambda _: jax.block_until_ready(states))


def difference(ours: Array, theirs: Array) -> list[tuple[Array, Array]]:
    """Returns, for each array, the largest difference and the largest magnitude of our values."""

    def of_pair(a: Array, b: Array) -> tuple[Array, Array]:
        same = a == b
        if not jnp.issubdtype(a.dtype, jnp.complexfloating):
            wide = jnp.float64 if a.dtype.itemsize == 8 else jnp.float32
            a, b = a.astype(wide), b.astype(wide)
        same |= jnp.isnan(a) & jnp.isnan(b)
        finite = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
        return jnp.max(jnp.where(same, 0, jnp.abs(a - b)), initial=0), jnp.max(finite, initial=0)

    return [*map(of_pair, jax.tree.leaves(ours), jax.tree.leaves(theirs))]


def agreement(
    differences: Sequence[tuple[Array, Array]], exact: bool, ours: Array, terms: int = 1
) -> bool:
    """Returns whether two results are equal, or as close as sums of so many terms have to be."""
    ulps = max(16.0, 4 * terms**0.5)
    bounds = (0.0 if exact else ulps * float(jnp.finfo(a.dtype).eps) for a in jax.tree.leaves(ours))
    return all(float(d) <= e * float(m) for (d, m), e in zip(differences, bounds, strict=True))
