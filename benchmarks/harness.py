"""Compiles the programs of cases, checks every result, and times all contenders in turns."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_oneflow_ops as jof

from .ceilings import Ceilings
from .inputs import Input, draw
from .results import Row
from .timing import (
    Clock,
    Contender,
    Missing,
    Outcome,
    TooSlow,
    compare,
    make_clock,
    reason,
    rotation_sets,
)

Array = Any  # of any framework
Arrays = tuple[Array, ...]
Sets = list[Arrays]  # input sets that calls use in turn
Function = Callable[..., Any]
# Makes a contender from the input sets and our result, and says whether its result agrees.
Maker = Callable[[Sets, Array], tuple[Contender, bool]]

SWEEP = "sweep"
"""The group of cases that are one call over all sizes."""


@dataclass(frozen=True)
class Case:
    """One call at one shape and dtype."""

    suite: str
    name: str  # unique within the suite
    op: str
    group: str  # such as "forward"
    shape: str  # in a form that people read
    dtype: str
    bytes: int  # each input byte read once and each output byte written once; 0: unknown
    # Returns a Work, or for a whole program a function that returns its Entrants.
    work: Callable[[], Any] = field(repr=False, compare=False)
    x64: bool = False  # some dtype has 64-bit elements
    plan: str = ""  # permute: the strategy and the movement size


@dataclass(frozen=True)
class Work:
    """How to run and check a case. Functions take the arrays of ``inputs``, in order."""

    inputs: Sequence[Input]
    ours: Function  # takes `implementation`, too
    forms: dict[str, Function]  # in jnp: as users write it first, then faster forms
    sample: Callable[[Arrays, Array], Any]  # on the device: what the check looks at ...
    verify: Callable[[Any], str | None]  # ... and, on the host in float64, what is wrong with it
    exact: bool = False  # results of all forms are equal bit for bit
    alone: bool = False  # our program is one custom call and nothing else
    variants: dict[str, Function] = field(default_factory=dict)  # of ours, checked too
    torch: Function | None = None  # takes the torch module first
    torch_inputs: Function | None = None  # what torch takes instead, made before it is timed
    compile: bool = False  # torch.compile is a rival, too: its first call takes seconds
    others: dict[str, Maker] = field(default_factory=dict)  # rivals on GPUs
    ceilings: Sequence[str] = ("copy",)
    effort: float = 0.5  # the share of the usual number of samples
    donated: bool = False  # the first array is donated: a call takes an earlier result instead
    skip: dict[str, str] = field(default_factory=dict)  # forms that take seconds a call, and why
    wall: bool = False  # timed by the wall: memsets and memcpys matter, which CUPTI does not record


@dataclass(frozen=True)
class Entrants:
    """The contenders of a row, ours first, and what else the row says."""

    contenders: list[Contender]
    about: Row
    forms: list[str]
    disagree: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    wall: bool = False
    effort: float = 1.0


@dataclass(frozen=True)
class Options:
    """What is measured beside the first of ``implementations`` ("native", "default", "xla")."""

    implementations: Sequence[str] = ("native",)
    libraries: bool = True  # other libraries and ceilings are rivals, too
    check_only: bool = False
    slow: bool = False  # run what cases skip
    effort: float = 1.0


TORCH, COMPILED = "torch", "torch.compile"
_CHUNK = 64  # cases whose programs are in memory together


@dataclass
class Machine:
    """What all cases share, and which rivals are missing here."""

    platform: str
    clock: Clock
    ceilings: Ceilings
    torch: Any
    seed: int
    missing: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def make_machine(seed: int, options: Options) -> Machine:
    """Finds the clock, the ceiling and PyTorch."""
    platform = jax.default_backend()
    clock, warning = make_clock(platform)
    ceilings = Ceilings(platform if options.libraries else "cpu")
    machine = Machine(platform, clock, ceilings, None, seed)
    machine.warnings = [text for text in (warning, ceilings.warning) if text]
    if options.libraries:
        machine.torch, why = _import_torch(platform)
        machine.missing |= {} if why is None else {TORCH: why}
    return machine


@dataclass(frozen=True)
class _Prepared:
    case: Case
    work: Any
    programs: dict[str, Future[Any]]


def measure(cases: Sequence[Case], machine: Machine, options: Options) -> Iterator[Row]:
    """Yields the row of each case, under a progress bar."""
    middle = sorted(cases, key=lambda case: case.bytes)[len(cases) // 2]
    # On a terminal only: in a file the table's lines show the progress.
    bar = tqdm(total=len(cases), file=sys.stderr, unit="case", leave=False, disable=None)
    with bar:
        for chunk in _chunks(cases):
            bar.set_postfix_str("compiling")
            for item in _prepare(chunk, options):
                bar.set_postfix_str(item.case.name[-40:])
                with _precision(item.case):
                    yield _row(item, machine, options, twice=item.case is middle)
                item.programs.clear()
                _make_room(machine.torch)
                bar.update()


def _chunks(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for i in range(0, len(cases), _CHUNK):
        yield cases[i : i + _CHUNK]


def _precision(case: Case) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if case.x64 else contextlib.nullcontext()


# ---- compilation ----


def _prepare(cases: Sequence[Case], options: Options) -> list[_Prepared]:
    """Compiles the programs of all cases in parallel."""
    prepared = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in cases:
            programs = dict[str, Future[Any]]()
            try:
                work = case.work()
            except Exception as error:  # the row says so
                work = error
            if isinstance(work, Work):
                for name, function in _functions(work, options).items():
                    donated = work.donated and name in ("ours", *work.variants, *work.forms)
                    call = partial(_compile, case, work, function, name, donated)
                    programs[name] = pool.submit(call)
            prepared.append(_Prepared(case, work, programs))
        futures = [future for item in prepared for future in item.programs.values()]
        bar = {"total": len(futures), "unit": "program", "leave": False, "disable": None}
        for _ in tqdm(as_completed(futures), file=sys.stderr, desc="compile", **bar):
            pass
    return prepared


_INPUTS, _SAMPLE, _DIFFERENCE = "(inputs)", "(sample)", "(difference)"


def _functions(work: Work, options: Options) -> dict[str, Function]:
    """The programs of a case, by the names of contenders or of steps of the check."""
    first, *rest = options.implementations
    ours = {"ours": _choose(work.ours, first)} | {name: _choose(work.ours, name) for name in rest}
    wanted = {name for name in work.forms if options.slow or name not in work.skip}
    forms = {name: function for name, function in work.forms.items() if name in wanted}
    variants = work.variants if options.libraries else {}
    steps = {_INPUTS: lambda *_: None, _SAMPLE: work.sample, _DIFFERENCE: difference}
    return {**ours, **variants, **forms, **steps}


def _choose(function: Function, implementation: str) -> Function:
    return partial(function, implementation=None if implementation == "default" else implementation)


def _compile(case: Case, work: Work, function: Function, name: str, donated: bool) -> Any:
    with _precision(case):
        if name == _INPUTS:
            seed = jax.ShapeDtypeStruct((), jnp.uint32)
            return jax.jit(partial(draw, inputs=work.inputs)).lower(seed).compile()
        arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in work.inputs)
        if name in (_SAMPLE, _DIFFERENCE):
            result = jax.eval_shape(next(iter(work.forms.values())), *arrays)
            first = arrays if name == _SAMPLE else result
            return jax.jit(function).lower(first, result).compile()
        return jax.jit(function, donate_argnums=(0,) if donated else ()).lower(*arrays).compile()


def custom_calls(program: str) -> list[str]:
    """Returns the targets of a compiled program's custom calls."""
    return re.findall(r'custom_call_target="([^"]+)"', program)


def is_native(program: str, alone: bool) -> bool:
    """Returns whether a compiled program runs our kernels.

    Raises:
      ArithmeticError: something else is in a program that must be one of our kernels ``alone``.
    """
    calls = custom_calls(program)
    if not any(call.startswith("jof_") for call in calls):
        return False
    # The first word with a parenthesis in each line of the entry computation is its operation.
    entry = program[program.index("ENTRY") :].splitlines()[1:]
    found = [match[1] for line in entry if (match := re.search(r"= .*?([a-z][a-z-]*)\(", line))]
    beside = set(found) - _MOVES_NOTHING
    if alone and (beside or len(calls) > 1):
        raise ArithmeticError(f"{', '.join(sorted(beside) or calls)} beside our kernel")
    return True


_MOVES_NOTHING = {"parameter", "constant", "custom-call", "call", "bitcast"}
_MOVES_NOTHING |= {"tuple", "get-tuple-element"}


# ---- a row ----


def _row(item: _Prepared, machine: Machine, options: Options, *, twice: bool) -> Row:
    """Checks and times one case. ``twice`` times ours as two contenders, the self-check."""
    case = item.case
    row = {"suite": case.suite, "case": case.name, "op": case.op, "group": case.group}
    row |= {"dtype": case.dtype, "shape": case.shape, "bytes": case.bytes}
    row |= {"plan": case.plan} if case.plan else {}
    try:
        if isinstance(item.work, Exception):
            raise item.work
        prepared = isinstance(item.work, Work)
        entrants = _entrants(item, machine, options) if prepared else item.work()
        row |= entrants.about
        if options.check_only:
            return row
        ours = entrants.contenders[0]
        again = [replace(ours, name="ours again")] if twice and options.libraries else []
        effort = entrants.effort * options.effort
        timings = compare([*entrants.contenders, *again], machine.clock, effort)
        return _timed(row, entrants, timings, machine)
    except Exception as error:  # a failing case is a row that says so, and the exit status
        return {**row, "error": reason(error)}


def _timed(row: Row, entrants: Entrants, timings: Outcome, machine: Machine) -> Row:
    """Adds the times."""
    if entrants.wall and machine.clock.name != "wall":
        row["clock"] = "wall"
        timings = {k: t if isinstance(t, str) else t.by_wall() for k, t in timings.items()}
    ours = timings.pop("ours")
    if isinstance(ours, str):
        return {**row, "error": ours}
    row |= {"us": round(ours.us, 3), "iqr": round(ours.iqr_us, 3)}
    if (again := timings.pop("ours again", None)) and not isinstance(again, str):
        spread = max(ours.iqr_us, again.iqr_us, machine.clock.resolution_us)
        row["again"] = round(again.us, 3)
        if abs(ours.us - again.us) > spread:
            warning = f"{row['case']} timed twice: {ours.us:.2f} and {again.us:.2f} us"
            machine.warnings.append(f"{warning}, more than the spread of {spread:.2f} us apart")
    medians: dict[str, Any] = {
        name: t if isinstance(t, str) else round(t.us, 3) for name, t in timings.items()
    }
    for name, t in timings.items():
        if not isinstance(t, str) and t.wall_us and t.clock == "cupti":
            wall = min(t.wall_us)
            if wall > 2 * t.us + _HIDDEN_US:
                text = f"{name} on {row['case']}: kernels take {t.us:.1f} us, a call {wall:.1f} us"
                machine.warnings.append(text)
    row |= {name: medians.pop(name) for name in ("copy", "fill") if name in medians}
    medians = {**entrants.failed, **medians}
    row["xla"] = {name: medians.pop(name) for name in entrants.forms if name in medians}
    row["others"] = medians
    if entrants.disagree:
        row["disagree"] = entrants.disagree
    return row


_HIDDEN_US = 100.0  # more than launches take: probably a memset or a memcpy


def _entrants(item: _Prepared, machine: Machine, options: Options) -> Entrants:
    """Checks ours, compares the rivals' results with it, and makes the contenders."""
    work, case = item.work, item.case
    count = 1 if options.check_only else rotation_sets(case.bytes)
    make = item.programs[_INPUTS].result()
    seeds = range(machine.seed, machine.seed + count)
    sets: Sets = [make(np.uint32(seed % (1 << 32))) for seed in seeds]
    apart = item.programs[_DIFFERENCE].result()
    contenders: list[Contender] = []
    disagree: list[str] = []
    failed: dict[str, str] = {}
    about: Row = {}

    ours = None
    names = ["ours", *options.implementations[1:], *(work.variants if options.libraries else [])]
    for name in names:
        compiled = item.programs[name].result()
        result = _once(compiled, work, sets[0])
        sampled = item.programs[_SAMPLE].result()(sets[0], result)
        if wrong := work.verify(jax.tree.map(np.asarray, sampled)):
            raise ArithmeticError(wrong if name == "ours" else f"{name}: {wrong}")
        contenders.append(_jax_contender(name, compiled, work, sets))
        if name == "ours":
            ours = result
            native = options.implementations[0] == "native"
            if not is_native(compiled.as_text() or "", work.alone and native):
                about["ran"] = "xla"

    def agrees(theirs: Array) -> bool:
        return agreement(apart(ours, theirs), work.exact, ours)

    def join(name: str, make: Callable[[], tuple[Contender, bool]]) -> None:
        try:
            contender, right = make()
            contenders.append(contender)
            disagree.extend([] if right else [name])
        except Missing as why:
            machine.missing[name] = str(why)
        except ModuleNotFoundError as error:
            machine.missing[name] = f"{error.name} is not installed"
        except TooSlow as why:
            failed[name] = f"not run: {why}"
        except Exception as error:  # rivals fail in many ways; the row says how
            failed[name] = reason(error)

    def form(name: str) -> tuple[Contender, bool]:
        compiled = item.programs[name].result()
        right = agrees(_once(compiled, work, sets[0]))
        return _jax_contender(name, compiled, work, sets), right

    for name in work.forms:
        if name in item.programs:
            join(name, partial(form, name))
        else:
            failed[name] = f"not run: {work.skip[name]}"
    ran = [name for name in work.forms if name not in failed]
    if ran and {*ran} <= {*disagree}:
        raise ArithmeticError(f"the result differs from that of {', '.join(ran)}")
    if options.libraries and not options.check_only:
        if machine.platform == "gpu":
            for name, maker in work.others.items():
                join(name, partial(maker, sets, ours))
        for name in [TORCH, COMPILED][: (work.torch is not None) * (1 + work.compile)]:
            if machine.torch is not None:
                join(name, partial(_torch_rival, name, machine.torch, work, sets, ours, agrees))
        ceilings = machine.ceilings.contenders(case.bytes)
        contenders += [c for c in ceilings if c.name in work.ceilings]
    forms = list(work.forms)
    return Entrants(contenders, about, forms, disagree, failed, work.wall, work.effort)


def _make_room(torch: Any) -> None:
    """Frees the caches of PyTorch and CuPy if little of the GPU's memory is left."""
    if torch is None or torch.cuda.mem_get_info()[0] >= _ROOM_BYTES:
        return
    torch.cuda.empty_cache()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()


_ROOM_BYTES = 16 << 30


def _jax_contender(name: str, compiled: Function, work: Work, sets: Sets) -> Contender:
    if not work.donated:
        return Contender(name, lambda i: compiled(*sets[i % len(sets)]), jax.block_until_ready)
    states = [jnp.copy(arrays[0]) for arrays in sets]  # each call takes an earlier call's result

    def call(i: int) -> None:
        k = i % len(sets)
        states[k] = compiled(states[k], *sets[k][1:])

    return Contender(name, call, lambda _: jax.block_until_ready(states))


def _once(compiled: Function, work: Work, arrays: Arrays) -> Array:
    """Returns a result; the inputs survive."""
    first = jnp.copy(arrays[0]) if work.donated else arrays[0]
    return jax.block_until_ready(compiled(first, *arrays[1:]))


def one_element(sets: Sets, ours: Array) -> tuple[Contender, bool]:
    """Our kernel on one element, which costs as much as a launch."""
    one = jnp.ones(1)
    compiled = jax.jit(jof.relu).lower(one).compile()
    return Contender("1 element", lambda i: compiled(one), jax.block_until_ready), True


# ---- agreement of all elements of two results ----


def difference(ours: Array, theirs: Array) -> list[tuple[Array, Array]]:
    """Returns, for each array, the largest difference and the largest value of ours."""

    def of_pair(a: Array, b: Array) -> tuple[Array, Array]:
        same = a == b
        if not jnp.issubdtype(a.dtype, jnp.complexfloating):
            wide = jnp.float64 if a.dtype.itemsize == 8 else jnp.float32
            a, b = a.astype(wide), b.astype(wide)
        same |= jnp.isnan(a) & jnp.isnan(b)
        finite = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
        return jnp.max(jnp.where(same, 0, jnp.abs(a - b)), initial=0), jnp.max(finite, initial=0)

    return [*map(of_pair, jax.tree.leaves(ours), jax.tree.leaves(theirs))]


def agreement(differences: Sequence[tuple[Array, Array]], exact: bool, ours: Array) -> bool:
    """Returns whether two results are equal, or within some ulp of the largest value.

    Rivals may sum in the arrays' dtype.
    """
    for (apart, largest), a in zip(differences, jax.tree.leaves(ours), strict=True):
        bound = 0.0 if exact else 16 * float(jnp.finfo(a.dtype).eps) * float(largest)
        if not float(apart) <= bound:  # NaN disagrees
            return False
    return True


def difference_of(ours: Array, theirs: Array, exact: bool) -> bool:
    """Returns whether two results agree; compiles for their shapes."""
    return agreement(jax.jit(difference)(ours, theirs), exact, ours)


# ---- PyTorch ----


def _import_torch(platform: str) -> tuple[Any, str | None]:
    if platform != "gpu":
        return None, "needs a GPU"
    try:
        import torch

        if not torch.cuda.is_available():
            return None, f"torch {torch.__version__} sees no CUDA device"
        return torch, None
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Exception as error:  # a broken torch raises more than ImportError
        return None, f"cannot be imported ({reason(error)})"


def _torch_rival(
    name: str, torch: Any, work: Work, sets: Sets, ours: Array, agrees: Callable[[Array], bool]
) -> tuple[Contender, bool]:
    assert work.torch is not None
    function = partial(work.torch, torch)
    if name == COMPILED:
        torch.compiler.reset()  # compilations of earlier cases count towards a limit
        function = torch.compile(function, fullgraph=True, dynamic=False)
    tensors = [[_to_torch(torch, x) for x in arrays] for arrays in sets]
    if work.torch_inputs is not None:
        tensors = [work.torch_inputs(torch, *arrays) for arrays in tensors]

    def call(i: int) -> Any:
        with torch.no_grad():
            return function(*tensors[i % len(tensors)])

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    y = call(0)
    sync(y)
    theirs = [_from_torch(leaf) for leaf in jax.tree.leaves(y)]
    result = jax.tree.unflatten(jax.tree.structure(ours), theirs)
    return Contender(name, call, sync), agrees(result)


def _from_torch(y: Any) -> Array:
    y = y.contiguous()
    try:
        return jnp.from_dlpack(y)
    except Exception:  # a dtype that the two do not exchange
        torch = sys.modules["torch"]
        bits = jnp.from_dlpack(y.view(getattr(torch, f"int{8 * y.itemsize}")))
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(str(y.dtype).removeprefix("torch.")))


def _to_torch(torch: Any, x: Array) -> Any:
    """Returns a view of the same memory; a copy through the host if DLPack lacks the dtype."""
    try:
        return torch.from_dlpack(x)
    except Exception:
        bits = np.asarray(x).view(f"int{8 * x.dtype.itemsize}")
        return torch.from_numpy(bits).cuda().view(getattr(torch, x.dtype.name))
