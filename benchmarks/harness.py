"""Runs a suite: checks every result, times all in turns, prints the table, writes the JSON."""

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_oneflow_ops as jof

from . import comparison, environment
from .cases import CASES, SWEEP, Case
from .ceilings import CEILINGS, Ceilings
from .report import rate_unit
from .timing import (
    Clock,
    Contender,
    Missing,
    Outcome,
    Timing,
    TooSlow,
    compare,
    make_clock,
    reason,
    rotation_sets,
)

Array = Any


class Input(NamedTuple):
    """An array that a case takes.

    The kinds: "normal" values around 0; "divisor", none of them near 0; "tenth", about 0.1;
    "scalar", one 0.75; "condition", half of them true; "hash", of the element's place. Indices
    below ``limit``: "uniform"; "hot", half of them one; "sorted"; "skewed", ``limit * u**4`` of a
    uniform u.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"
    limit: int = 0


Arrays = tuple[Array, ...]
Sets = list[Arrays]  # of inputs, which calls use in turn
# Makes a further contender from the sets and our result, and says what is known of it.
Maker = Callable[[Sets, Array], tuple[Contender, dict[str, Any]]]


@dataclass(frozen=True)
class Work:
    """What a suite says about one case; its functions take the arrays of ``inputs``, in order."""

    inputs: Sequence[Input]
    ours: Callable[..., Array]
    # What must be in our compiled program for it to count as native: a custom call, or one of some.
    target: str | tuple[str, ...]
    jnp: dict[str, Callable[..., Array]]
    torch: Callable[..., Any] | None  # takes the torch module first
    check: Callable[[Arrays, Array], str | None]  # what is wrong with our result
    exact: bool  # the rivals' results must be ours, bit for bit
    alone: bool = False  # our program must be that custom call and nothing else
    torch_inputs: Callable[..., Any] | None = None  # what torch takes instead; not timed
    compile: bool = False  # torch.compile is a rival, too: seconds before its first call
    others: dict[str, Maker] = field(default_factory=dict)  # on GPUs alone
    ceilings: tuple[str, ...] = ("copy", "fill")
    effort: float = 1.0  # the share of the usual samples that is enough
    variants: dict[str, Callable[..., Array]] = field(default_factory=dict)  # of ours, checked too
    errors: Callable[[Arrays, Array], dict[str, float]] | None = None  # of anybody's result
    # The first array is donated: a call takes the result of an earlier one instead.
    donated: bool = False
    skip: dict[str, str] = field(default_factory=dict)  # rivals too slow to run, and why
    # Timed by the wall over whole turns: memsets and memcpys, which no clock here sees, count.
    wall: bool = False
    about: dict[str, Any] = field(default_factory=dict)  # what else our entry of the row says

    @property
    def torches(self) -> list[str]:
        """The names of PyTorch's rivals."""
        return ([TORCH, COMPILED] if self.compile else [TORCH]) if self.torch else []


TORCH, COMPILED = "torch", "torch.compile"


class Entrants(NamedTuple):
    """Who takes part in a row, ours first, and what the row says beside their times.

    Of ours and of each rival that is under "ours" and "rivals" in ``about``; "jnp" names the
    rivals of which the best counts.
    """

    contenders: list[Contender]
    about: dict[str, Any]
    wall: bool = True  # as in Work
    effort: float = 1.0


@dataclass
class Machine:
    """What all rows of a suite share."""

    platform: str
    clock: Clock
    ceilings: Ceilings
    torch: Any
    no_torch: str | None  # why it is not there
    inputs: Inputs
    missing: dict[str, str] = field(default_factory=dict)  # rivals, and why they are not there

    def rivals(self, work: Work) -> list[str]:
        """The names of all that ours is compared with here, in the order of the columns."""
        others = work.others if self.platform == "gpu" else {}
        return [*work.variants, *work.jnp, *others, *(work.torches if self.torch else [])]


@dataclass(frozen=True)
class Prepared:
    """A case, its work, and its programs (ours, its variants, jnp's) in compilation."""

    case: Case
    work: Work
    programs: dict[str, Future[Any]]


def run(
    suite: str,
    cases: Sequence[Case],
    out: Path | None,
    whole: bool,
    argv: list[str],
    slow_rivals: bool = False,
    older: Sequence[dict[str, Any]] = (),
) -> int:
    """Runs the cases of a suite and returns the number of rows that are errors.

    Where they are not the ``whole`` suite, the results do not replace those of the repository.
    Rivals that their case would skip run where ``slow_rivals`` says so. ``older`` results are
    compared with the new ones.
    """
    if (module := load(suite)) is None:
        return 0
    x64 = jax.config.read("jax_enable_x64")  # some suites have 64-bit cases
    jax.config.update("jax_enable_x64", x64 or getattr(module, "X64", False))
    try:
        result = _run(suite, module, cases, out, whole, argv, slow_rivals)
    finally:
        jax.config.update("jax_enable_x64", x64)
    for old in older:
        print(comparison.compare(old, result))
    return sum("error" in row for row in result["rows"])


def load(suite: str) -> Any:
    """The module of a suite; None, and a word about it, where what it needs is not installed."""
    try:
        return importlib.import_module(f".{suite}", __package__)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(str(__package__)):
            raise
        print(f"{suite} is left out: {_not_installed(error)}")
        return None


def _not_installed(error: ModuleNotFoundError) -> str:
    return f"{error.name} is not installed"


def _run(
    suite: str,
    module: Any,
    cases: Sequence[Case],
    out: Path | None,
    whole: bool,
    argv: list[str],
    slow_rivals: bool,
) -> dict[str, Any]:
    begin, platform, seed = time.perf_counter(), jax.default_backend(), secrets.randbits(32)
    clock, clock_note = make_clock(platform)
    machine = Machine(platform, clock, Ceilings(platform), *_import_torch(platform), Inputs(seed))
    about = environment.describe(argv)
    notes = [note for note in (clock_note, machine.ceilings.note) if note]
    notes += getattr(module, "notes", list[str])()
    result: dict[str, Any] = {
        "suite": suite,
        "environment": about,
        "clock": clock.name,
        "ceiling": machine.ceilings.kind,
        "seed": seed,
        "notes": notes,
        "missing": machine.missing,
        "rows": [],
    }
    root = "benchmarks/results" if whole else "build/benchmarks"
    path = (out or Path(root) / environment.slug(about)) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    entries, rivals = _entries(module, cases, machine, slow_rivals)
    result["compile_seconds"] = round(time.perf_counter() - begin, 1)
    table = Table([case.name for case in cases], platform, rivals)
    print(f"{suite} on {about['device']}, {clock.name} clock; ceiling: {result['ceiling']}")
    print("\n".join([*(f"note: {note}" for note in notes), table.header()]), flush=True)
    if clocks := _clocks_at_work(platform):
        result["clocks"] = {"before": clocks}
    middle = sorted(cases, key=lambda case: case.bytes)[len(cases) // 2]
    # No bar where stderr is a file: there the lines of the table show how far it is.
    bar = tqdm(cases, file=sys.stderr, unit="case", leave=False, disable=None)
    for case, enter in zip(bar, entries, strict=True):
        bar.set_postfix_str(case.name)
        row = _row(case, enter, clock, twice=case is middle)
        if "self_check" in row:
            result["self_check"] = row.pop("self_check")
        result["rows"].append(row)
        _make_room(machine.torch)
        tqdm.write(table.line(row), file=sys.stdout)
        sys.stdout.flush()
        # Written after every row: a run cut short leaves what it measured.
        result["seconds"] = round(time.perf_counter() - begin, 1)
        path.write_text(to_json(result))
    if clocks:
        result["clocks"]["after"] = _clocks_at_work(platform)
        path.write_text(to_json(result))
    print("\n".join([*table.footnotes(result["rows"]), *remarks(result)]))
    print(f"wrote {path.name if path.is_absolute() else path}", flush=True)
    return result


def _entries(
    module: Any, cases: Sequence[Case], machine: Machine, slow_rivals: bool
) -> tuple[list[Callable[[], Entrants]], list[str]]:
    """What makes the entrants of each case, with all programs compiled, and the rivals' names.

    A suite says what its ``work`` is, or makes its ``entrants`` itself.
    """
    if hasattr(module, "entrants"):
        return module.entrants(cases), module.RIVALS
    works = [module.work(case) for case in cases]
    if slow_rivals:
        works = [replace(work, skip={}) for work in works]
    if machine.platform == "gpu":
        floor = {"1 element": _one_element}
        works = [
            replace(work, others=work.others | floor) if case.group == SWEEP else work
            for case, work in zip(cases, works, strict=True)
        ]
    prepared = _prepare_all(cases, works)
    rivals = dict.fromkeys(name for work in works for name in machine.rivals(work))
    return [partial(_entrants, item, machine) for item in prepared], list(rivals)


def _clocks_at_work(platform: str) -> dict[str, Any] | None:
    """A GPU's clocks while it works, which has warmed them."""
    if platform != "gpu":
        return None
    negate, x = jax.jit(jnp.negative), jnp.zeros(16 << 20)

    def work_until(done: Callable[[], bool]) -> None:
        y = x
        while not done():
            for _ in range(16):
                y = negate(y)
            jax.block_until_ready(y)

    begin = time.perf_counter()
    work_until(lambda: time.perf_counter() - begin > _WARM_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(environment.clocks)
        work_until(reading.done)
    return reading.result()


_WARM_SECONDS = 0.3


def remarks(result: dict[str, Any]) -> list[str]:
    """What to know of a result beside its rows."""
    lines = [f"missing: {name}: {why}" for name, why in result["missing"].items()]
    for when, clocks in result.get("clocks", {}).items():
        if clocks:
            lines.append(f"clocks {when}: " + ", ".join(f"{k} {v}" for k, v in clocks.items()))
    if (check := result.get("self_check")) is None:
        return [*lines, "WARNING: no self-check, its row is an error"]
    a, b = check["us"]
    text = f"{a:.2f} and {b:.2f} us, spread {check['spread_us']:.2f} us"
    text = f"self-check, the same function twice on {check['case']}: {text}"
    if check["agrees"]:
        return [*lines, f"{text}: they agree"]
    return [*lines, f"WARNING: {text}: they DISAGREE; smaller differences mean nothing here"]


def _prepare_all(cases: Sequence[Case], works: Sequence[Work]) -> list[Prepared]:
    """Compiles the programs of all cases side by side, before anything is timed."""

    def compiled(function: Callable[..., Array], work: Work) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in work.inputs]
        donated = (0,) if work.donated else ()
        return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        prepared = []
        for case, work in zip(cases, works, strict=True):
            functions = {"ours": work.ours, **work.variants, **work.jnp}
            programs = {
                name: pool.submit(compiled, function, work)
                for name, function in functions.items()
                if name not in work.skip
            }
            prepared.append(Prepared(case, work, programs))
        everything = [future for p in prepared for future in p.programs.values()]
        bar = {"total": len(everything), "unit": "program", "leave": False, "disable": None}
        for _ in tqdm(as_completed(everything), file=sys.stderr, desc="compile", **bar):
            pass
    return prepared


def _row(case: Case, enter: Callable[[], Entrants], clock: Clock, *, twice: bool) -> dict[str, Any]:
    """One case, checked and timed, or what went wrong; ``twice`` times ours as two contenders."""
    row: dict[str, Any] = {
        "case": case.name,
        "op": case.op,
        "group": case.group,
        "variant": case.variant,
        "dtype": case.dtype,
        "bytes": case.bytes,
    }
    try:
        contenders, about, wall, effort = enter()
        again = [replace(contenders[0], name="ours again")] if twice else []
        timings = compare([*contenders, *again], clock, effort)
    except Exception as error:  # a case that fails is a row that says so, and the exit status
        return {**row, "error": reason(error), "rivals": {}}
    if wall and clock.name != "wall":
        row["clock"] = "wall"
        timings = {k: t if isinstance(t, str) else t.by_wall() for k, t in timings.items()}
    if twice and (known := _self_check(case, timings, clock)):
        row["self_check"] = known

    rated = {name: _rated(timing, case.bytes) for name, timing in timings.items()}
    ceilings = {name: rated.pop(name) for name in CEILINGS if name in rated}
    ours = {**about.get("ours", {}), **rated.pop("ours")}
    rivals = about.get("rivals", {})
    rivals = {name: {**rivals.get(name, {}), **rated.get(name, {})} for name in {**rivals, **rated}}
    timed = {"ours": ours, "rivals": rivals, "ceilings": ceilings}
    return summarise({**row, "check": "pass", **about, **timed})


def _self_check(case: Case, timings: Outcome, clock: Clock) -> dict[str, Any] | None:
    """Whether one function's two times agree within what is printed as their spread."""
    a, b = timings["ours"], timings.pop("ours again")
    if isinstance(a, str) or isinstance(b, str):
        return None
    spread = max(a.spread_us, b.spread_us, clock.resolution_us)
    return {
        "case": case.name,
        "us": [round(a.us, 3), round(b.us, 3)],
        "spread_us": round(spread, 3),
        "agrees": abs(a.us - b.us) <= spread,
    }


def _entrants(item: Prepared, machine: Machine) -> Entrants:
    """Ours, checked, its rivals, compared with it, and the ceilings."""
    work, bytes_moved = item.work, item.case.bytes
    sets = machine.inputs.sets(work.inputs, rotation_sets(bytes_moved))
    ours = item.programs["ours"].result()
    program = ours.as_text() or ""
    about: dict[str, Any] = {
        "implementation": implementation(program, work.target, work.alone),
        "calls": list(dict.fromkeys(_targets(program))),
    }
    result = _once(ours, work, sets[0])
    if wrong := work.check(sets[0], result):
        raise ArithmeticError(wrong)
    known = work.errors(sets[0], result) if work.errors else {}
    contenders = [_jax_contender("ours", ours, work, sets)]
    rivals: dict[str, dict[str, Any]] = {}

    def join(name: str, make: Callable[[], tuple[Contender, dict[str, Any]]]) -> None:
        """Adds a rival, or says why it cannot run."""
        try:
            contender, rivals[name] = make()
            contenders.append(contender)
        except Missing as why:
            machine.missing[name] = str(why)
        except ModuleNotFoundError as error:
            machine.missing[name] = _not_installed(error)
        except TooSlow as why:
            rivals[name] = {"skipped": str(why)}
        except Exception as error:  # a rival may fail in ways of its own; the row says so
            rivals[name] = {"error": reason(error)}

    for name in work.variants:
        contender, rivals[name] = _variant(name, item, sets)
        contenders.append(contender)
    for name in work.jnp:
        if name in work.skip:
            rivals[name] = {"skipped": work.skip[name]}
            continue
        join(name, partial(_jax_rival, name, item.programs[name], work, sets, result))
        if work.exact and not rivals[name].get("agrees", True):
            raise ArithmeticError(f"differs from {name} by {rivals[name]['difference']}")
    if machine.platform == "gpu":
        for name, maker in work.others.items():
            join(name, partial(maker, sets, result))
    else:
        machine.missing |= dict.fromkeys(work.others, "needs a GPU")
    if machine.torch is None:
        machine.missing |= dict.fromkeys(work.torches, str(machine.no_torch))
    else:
        for name in work.torches:
            join(name, partial(_torch_rival, name, machine.torch, work, sets, result))
    ceilings = machine.ceilings.contenders(bytes_moved)
    contenders += [c for c in ceilings if c.name in work.ceilings]
    about |= {"ours": {**work.about, **known}, "rivals": rivals, "jnp": list(work.jnp)}
    return Entrants(contenders, about, work.wall, work.effort)


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """Adds what follows from a row's times.

    The ratios are rival / ours (above 1 ours is faster); the best rival is the best of the jnp
    ones; the share is that of a copy's bandwidth.
    """
    ours = row["ours"]
    if "us" not in ours:
        return {**row, "error": ours["error"]}
    for rival in row["rivals"].values():
        if "us" in rival:
            rival["ratio"] = round(rival["us"] / ours["us"], 4)
    timed = [name for name in row["jnp"] if "us" in row["rivals"].get(name, {})]
    if timed:
        row["best"] = min(timed, key=lambda name: row["rivals"][name]["us"])
        best = row["rivals"][row["best"]]
        row["ratio"] = best["ratio"]
        noise = max(ours["iqr_us"], best["iqr_us"])
        row["within_noise"] = abs(best["us"] - ours["us"]) <= noise
    if "us" in (copy := row["ceilings"].get("copy", {})):
        row["of_copy"] = round(copy["us"] / ours["us"], 4)
    return row


def to_json(result: dict[str, Any]) -> str:
    """Indented, but a list of samples stays on one line."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[\d.,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)
    return text + "\n"


def _rated(timing: Timing | str, nbytes: int) -> dict[str, Any]:
    if isinstance(timing, str):
        return {"error": timing}
    rate = {"tb_per_s": round(nbytes / timing.us / 1e6, 6)} if nbytes else {}
    return {**rate, **timing.to_json()}


def _targets(program: str) -> list[str]:
    return re.findall(r'custom_call_target="([^"]+)"', program)


def implementation(program: str, target: str | tuple[str, ...], alone: bool) -> str:
    """Whether a compiled program is our kernel, "native", or jnp's, "xla".

    Where it must be our kernel ``alone``, anything beside it is an error.
    """
    targets = _targets(program)
    wanted = (target,) if isinstance(target, str) else target
    if not set(wanted) & set(targets):
        return "xla"
    # The first word with a parenthesis in each line of the entry computation is its operation.
    entry = program[program.index("ENTRY") :].splitlines()[1:]
    found = [match[1] for line in entry if (match := re.search(r"= .*?([a-z][a-z-]*)\(", line))]
    beside = set(found) - _MOVES_NOTHING
    if alone and (beside or len(targets) > 1):
        said = ", ".join(sorted(beside) or targets)
        raise ArithmeticError(f"{said} in a program of {' or '.join(wanted)}")
    return "native"


_MOVES_NOTHING = {"parameter", "constant", "custom-call", "call", "bitcast"}
_MOVES_NOTHING |= {"tuple", "get-tuple-element"}


class Inputs:
    """Random inputs, as many sets as it takes to rotate beyond the caches.

    Cases that follow one another and take arrays of one shape and dtype get the same ones.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._arrays: dict[tuple[Input, int], Array] = {}

    def sets(self, inputs: Sequence[Input], count: int) -> Sets:
        """``count`` sets; arrays of other shapes and dtypes are dropped."""
        shapes = {(x.shape, x.dtype) for x in inputs}
        self._arrays = {k: v for k, v in self._arrays.items() if (k[0].shape, k[0].dtype) in shapes}
        return [
            tuple(self._array(x, j << 8 | i) for j, x in enumerate(inputs)) for i in range(count)
        ]

    def _array(self, description: Input, index: int) -> Array:
        key = description, index
        if key not in self._arrays:
            self._arrays[key] = _draw(np.uint32(self._seed ^ index), *description)
        return self._arrays[key]


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(seed: np.uint32, shape: tuple[int, ...], dtype: str, kind: str, limit: int) -> Array:
    if kind == "scalar":
        return jnp.full(shape, 0.75, dtype)
    if kind == "condition":
        return jax.random.bernoulli(jax.random.key(seed), shape=shape)
    if kind == "tenth":
        return (0.05 + 0.1 * jax.random.uniform(jax.random.key(seed), shape)).astype(dtype)
    if kind == "hash":
        return _draw_hash(seed, shape, dtype)
    if limit:
        return _draw_indices(jax.random.key(seed), shape, kind, limit).astype(dtype)
    values = 3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    if kind == "divisor":
        values += jnp.sign(values)
    return values.astype(dtype)


def _draw_hash(seed: np.uint32, shape: tuple[int, ...], dtype: str) -> Array:
    """Integers that the dtype holds exactly; they compile faster than what is random."""
    exact = jnp.issubdtype(dtype, jnp.inexact)
    width = jnp.finfo(dtype).nmant + 1 if exact else jnp.iinfo(dtype).bits
    places = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) ^ seed
    hashes = [places * np.uint32(odd) >> max(0, 32 - width) for odd in (2654435761, 2246822519)]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(*(x.astype(jnp.finfo(dtype).dtype) for x in hashes))
    return hashes[0].astype(dtype)


def _draw_indices(key: Array, shape: tuple[int, ...], kind: str, limit: int) -> Array:
    if kind == "skewed":
        return jnp.minimum(limit * jax.random.uniform(key, shape) ** 4, limit - 1)
    indices = jax.random.randint(key, shape, 0, limit)
    if kind == "hot":
        chosen = jax.random.bernoulli(jax.random.fold_in(key, 1), shape=shape)
        return jnp.where(chosen, limit // 3, indices)
    return jnp.sort(indices) if kind == "sorted" else indices


def _make_room(torch: Any) -> None:
    """Gives cached memory back where less of the GPU's is left than the next row may want."""
    if torch is None or torch.cuda.mem_get_info()[0] >= _ROOM_BYTES:
        return
    torch.cuda.empty_cache()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()


_ROOM_BYTES = 16 << 30


def _jax_contender(name: str, compiled: Callable[..., Array], work: Work, sets: Sets) -> Contender:
    if not work.donated:
        return Contender(name, lambda i: compiled(*sets[i % len(sets)]), jax.block_until_ready)
    states = [jnp.copy(arrays[0]) for arrays in sets]  # what a call gives, the next one takes

    def call(i: int) -> None:
        k = i % len(sets)
        states[k] = compiled(states[k], *sets[k][1:])

    return Contender(name, call, lambda _: jax.block_until_ready(states))


def _once(compiled: Callable[..., Array], work: Work, arrays: Arrays) -> Array:
    """A result; nothing is donated."""
    first = jnp.copy(arrays[0]) if work.donated else arrays[0]
    return jax.block_until_ready(compiled(first, *arrays[1:]))


def _variant(name: str, item: Prepared, sets: Sets) -> tuple[Contender, dict[str, Any]]:
    """Another form of ours, of which as much is asked."""
    work, compiled = item.work, item.programs[name].result()
    result = _once(compiled, work, sets[0])
    if wrong := work.check(sets[0], result):
        raise ArithmeticError(wrong)
    known: dict[str, Any] = {"calls": list(dict.fromkeys(_targets(compiled.as_text() or "")))}
    known |= work.errors(sets[0], result) if work.errors else {}
    return _jax_contender(name, compiled, work, sets), known


def _jax_rival(
    name: str, program: Future[Any], work: Work, sets: Sets, ours: Array
) -> tuple[Contender, dict[str, Any]]:
    compiled = program.result()
    result = _once(compiled, work, sets[0])
    return _jax_contender(name, compiled, work, sets), _known(work, sets, ours, result)


def _known(work: Work, sets: Sets, ours: Array, theirs: Array) -> dict[str, Any]:
    """What a rival's result says, beside its time."""
    errors = work.errors(sets[0], theirs) if work.errors else {}
    return agreement(ours, theirs, work.exact) | errors


def _one_element(sets: Sets, ours: Array) -> tuple[Contender, dict[str, Any]]:
    """A kernel of ours on one element: what it costs to launch one."""
    one = jnp.ones(1)
    compiled = jax.jit(jof.relu).lower(one).compile()
    return Contender("1 element", lambda i: compiled(one), jax.block_until_ready), {}


def _torch_rival(
    name: str, torch: Any, work: Work, sets: Sets, ours: Array
) -> tuple[Contender, dict[str, Any]]:
    if work.torch is None:
        raise ValueError("nothing to compare with")
    function = partial(work.torch, torch)
    if name == COMPILED:
        # What was compiled for earlier cases counts towards a limit, beyond which nothing is.
        torch.compiler.reset()
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
    theirs = [_from_torch(torch, leaf) for leaf in jax.tree.leaves(y)]
    result = jax.tree.unflatten(jax.tree.structure(ours), theirs)
    return Contender(name, call, sync), _known(work, sets, ours, result)


def _from_torch(torch: Any, y: Any) -> Array:
    y = y.contiguous()
    try:
        return jnp.from_dlpack(y)
    except Exception:  # a dtype that the two do not exchange
        bits = jnp.from_dlpack(y.view(getattr(torch, f"int{8 * y.itemsize}")))
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(str(y.dtype).removeprefix("torch.")))


def _to_torch(torch: Any, x: Array) -> Any:
    """The same memory as a tensor; a copy through the host where the two do not agree on DLPack."""
    try:
        return torch.from_dlpack(x)
    except Exception:
        bits = np.asarray(x).view(f"int{8 * x.dtype.itemsize}")
        return torch.from_numpy(bits).cuda().view(getattr(torch, x.dtype.name))


def agreement(ours: Array, theirs: Array, exact: bool) -> dict[str, Any]:
    """How far a rival's result is from ours, and whether that is as it should be.

    Where results need not be equal, a rival may sum in its own dtype: some ulp of the largest.
    """
    agrees, largest_difference = True, 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        difference, largest = map(float, _difference(a, b))
        bound = 0.0 if exact else 16 * float(jnp.finfo(a.dtype).eps) * largest
        agrees &= difference <= bound
        if not difference <= largest_difference:  # NaN too
            largest_difference = difference
    return {"agrees": agrees, "difference": largest_difference}


@jax.jit
def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """The largest difference between two results, and the largest of the first; NaN shows."""
    if not jnp.issubdtype(a.dtype, jnp.complexfloating):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(a))


def _import_torch(platform: str) -> tuple[Any, str | None]:
    if platform != "gpu":
        return None, "needs a GPU"
    # What torch.compile and Triton make is compiled in every run, and not kept.
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(variable, _scratch())
    try:
        import torch

        if not torch.cuda.is_available():
            return None, f"torch {torch.__version__} sees no CUDA device"
        return torch, None
    except ModuleNotFoundError as error:
        return None, _not_installed(error)
    except Exception as error:  # a broken torch raises more than ImportError
        return None, f"cannot be imported ({reason(error)})"


@cache
def _scratch() -> str:
    """A folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


_HIDDEN_US = 100.0  # more than launches need: a memset or a memcpy, probably


class Table:
    """The plain-text table, one line a row as it is measured."""

    def __init__(self, names: Sequence[str], platform: str, rivals: Sequence[str]) -> None:
        self._rivals = rivals
        # As wide as a ratio such as 1234.56x, or as the name.
        self._widths = [max(9, len(rival)) for rival in rivals]
        self._width = max(map(len, names), default=4)
        self._unit, self._scale = rate_unit(platform)

    def header(self) -> str:
        """The names of the columns."""
        columns = [f"{'case':{self._width}} impl  ", f"{'us':>9} {'iqr':>7}"]
        columns += [f"{self._unit:>6} of copy", *self._cells(self._rivals)]
        return " ".join([*columns, f"{'best':>8}"])

    def line(self, row: dict[str, Any]) -> str:
        """One row."""
        start = f"{row['case']:{self._width}} {row.get('implementation', '-'):6}"
        if "error" in row:
            return f"{start} ERROR: {row['error']}"
        ours = row["ours"]
        share = f"{row['of_copy']:7.0%}" if "of_copy" in row else "      -"
        cells = [start, f"{ours['us']:9.1f} {ours['iqr_us']:7.1f}"]
        rate = f"{ours['tb_per_s'] * self._scale:6.2f}" if "tb_per_s" in ours else f"{'-':>6}"
        cells += [f"{rate} {share}"]
        cells += self._cells(self._ratio(row["rivals"].get(rival)) for rival in self._rivals)
        if "ratio" in row:
            cells.append(f"{row['ratio']:7.2f}x")
            if row["ratio"] < 1:
                cells.append("< slower (noise)" if row["within_noise"] else "< slower")
        return " ".join(cells)

    def _cells(self, texts: Iterable[str]) -> list[str]:
        return [f"{text:>{width}}" for text, width in zip(texts, self._widths, strict=True)]

    @staticmethod
    def _ratio(rival: dict[str, Any] | None) -> str:
        if rival is None:
            return "-"
        if "skipped" in rival:
            return "not run"
        return f"{rival['ratio']:.2f}x" if "ratio" in rival else "failed"

    def footnotes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """What the columns mean, and every rival that failed, was spared or disagrees."""
        notes = ["all columns from 'of copy' on: that one's time / ours; best: of the jnp ones"]
        for row in rows:
            ours = {"ours": row.get("ours", {})}
            for name, other in {**ours, **row["rivals"], **row.get("ceilings", {})}.items():
                if "error" in other:
                    notes.append(f"{name} failed on {row['case']}: {other['error']}")
                    continue
                if "skipped" in other:
                    notes.append(f"{name} on {row['case']} {other['skipped']}")
                if other.get("wall_us", 0.0) > 2 * other.get("us", 0.0) + _HIDDEN_US:
                    what = f"kernels take {other['us']:.1f} us, a call {other['wall_us']:.1f} us"
                    notes.append(f"{name} on {row['case']}: {what}")
                if "once" in other:
                    notes.append(f"{name} on {row['case']}: one call of {other['us'] / 1e6:.2f} s")
                if not other.get("agrees", True):
                    what = f"{other['difference']:.3g} from ours, which passed its check"
                    notes.append(f"{name} on {row['case']} is {what}")
        return notes


def select(
    suite: str, quick: bool, substring: str, dtype: str | None, platform: str | None = None
) -> list[Case]:
    """The cases of a suite, on this machine unless a platform is named, that the options want."""
    cases = CASES[suite](platform or jax.default_backend(), quick)
    return [c for c in cases if substring in c.name and dtype in (None, c.dtype)]
