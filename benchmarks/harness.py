"""Runs a suite: checks every result, times all in turns, prints the table, writes the JSON."""

from __future__ import annotations

import importlib
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from . import environment
from .cases import CASES, Case
from .ceilings import Ceilings
from .report import rate_unit
from .timing import Clock, Contender, Timing, compare, make_clock, reason, rotation_sets

Array = Any


@dataclass(frozen=True)
class Work:
    """What a suite says about one case; its functions take the arrays of ``shapes``, in order."""

    shapes: Sequence[tuple[tuple[int, ...], str]]
    ours: Callable[..., Array]
    target: str  # the custom call that must be in our compiled program for it to count as native
    jnp: dict[str, Callable[..., Array]]
    torch: Callable[..., Any]  # takes the torch module first
    check: Callable[[tuple[Array, ...], Array], str | None]  # what is wrong with our result
    exact: bool  # the rivals' results must be ours, bit for bit


def run(suite: str, cases: Sequence[Case], out: Path | None, whole: bool, argv: list[str]) -> int:
    """Runs the cases of a suite and returns the number of rows that are errors.

    Where they are not the ``whole`` suite, the results do not replace those of the repository.
    """
    begin, platform = time.perf_counter(), jax.default_backend()
    clock, clock_note = make_clock(platform)
    ceilings = Ceilings(platform)
    torch, torch_note = _import_torch(platform)
    about = environment.describe(argv)
    seed = secrets.randbits(32)
    notes = [note for note in (clock_note, ceilings.note, torch_note) if note]
    result: dict[str, Any] = {
        "suite": suite,
        "environment": about,
        "clock": clock.name,
        "ceiling": ceilings.kind,
        "seed": seed,
        "notes": notes,
        "rows": [],
    }
    root = "benchmarks/results" if whole else "build/benchmarks"
    path = (out or Path(root) / environment.slug(about)) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    table = Table([case.name for case in cases], platform)
    print(f"{suite} on {about['device']}, {clock.name} clock; ceiling: {ceilings.kind}")
    print("\n".join([*(f"note: {note}" for note in notes), table.header()]), flush=True)
    make_work = importlib.import_module(f".{suite}", __package__).work
    # No bar where stderr is a file: there the lines of the table show how far it is.
    bar = tqdm(cases, file=sys.stderr, unit="case", leave=False, disable=None)
    for i, case in enumerate(bar):
        bar.set_postfix_str(case.name)
        row = _row(case, seed + i, make_work, clock, ceilings, torch)
        result["rows"].append(row)
        tqdm.write(table.line(row), file=sys.stdout)
        sys.stdout.flush()
        # Written after every row: a run cut short leaves what it measured.
        result["seconds"] = round(time.perf_counter() - begin, 1)
        path.write_text(_json(result))
    print("\n".join(table.footnotes(result["rows"])))
    print(f"wrote {path.name if path.is_absolute() else path}")
    return sum("error" in row for row in result["rows"])


def _row(
    case: Case,
    seed: int,
    make_work: Callable[[Any], Work],
    clock: Clock,
    ceilings: Ceilings,
    torch: Any,
) -> dict[str, Any]:
    """One case, checked and timed; whatever fails is in the row."""
    row: dict[str, Any] = {
        "case": case.name,
        "group": case.group,
        "variant": case.variant,
        "dtype": case.dtype,
        "bytes": case.bytes,
    }
    rivals: dict[str, dict[str, Any]] = {}
    try:
        work = make_work(case)
        sets = _inputs(work, case.bytes, seed)
        ours = jax.jit(work.ours).lower(*sets[0]).compile()
        targets = re.findall(r'custom_call_target="([^"]+)"', ours.as_text() or "")
        row["implementation"] = "native" if work.target in targets else "xla"
        result = jax.block_until_ready(ours(*sets[0]))
        if wrong := work.check(sets[0], result):
            raise ArithmeticError(wrong)

        contenders = [_jax_contender("ours", ours, sets)]
        for name, function in work.jnp.items():
            make = partial(_jax_rival, name, function, work, sets, result)
            rivals[name] = _prepare(contenders, make)
            if work.exact and not rivals[name].get("agrees", True):
                raise ArithmeticError(f"differs from {name} by {rivals[name]['difference']}")
        if torch is not None:
            rivals["torch"] = _prepare(contenders, partial(_torch_rival, torch, work, sets, result))
        contenders += ceilings.contenders(case.bytes)
        timings = compare(contenders, clock)
    except Exception as error:  # a case that fails is a row that says so, and the exit status
        return {**row, "error": reason(error), "rivals": rivals}

    rated = {name: _rated(timing, case.bytes) for name, timing in timings.items()}
    return summarise(
        {
            **row,
            "check": "pass",
            "ours": rated["ours"],
            "rivals": {name: {**known, **rated.get(name, {})} for name, known in rivals.items()},
            "jnp": list(work.jnp),
            "ceilings": {name: rated[name] for name in ("copy", "fill") if name in rated},
        }
    )


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


def _json(result: dict[str, Any]) -> str:
    """Indented, but a list of samples stays on one line."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[\d.,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)
    return text + "\n"


def _rated(timing: Timing | str, nbytes: int) -> dict[str, Any]:
    if isinstance(timing, str):
        return {"error": timing}
    return {"tb_per_s": round(nbytes / timing.us / 1e6, 6), **timing.to_json()}


def _inputs(work: Work, nbytes: int, seed: int) -> list[tuple[Array, ...]]:
    """Fresh random inputs, as many sets as it takes to rotate beyond the caches."""
    keys = jax.random.split(jax.random.key(seed), (rotation_sets(nbytes), len(work.shapes)))
    return [
        tuple(jax.random.normal(k, *shape) for k, shape in zip(row, work.shapes, strict=True))
        for row in keys
    ]


def _prepare(
    contenders: list[Contender], make: Callable[[], tuple[Contender, dict[str, Any]]]
) -> dict[str, Any]:
    """Adds a rival to the contenders; returns what is known of it by now, or why it cannot run."""
    try:
        contender, known = make()
    except Exception as error:  # a rival may fail in ways of its own; the row says so
        return {"error": reason(error)}
    contenders.append(contender)
    return known


def _jax_contender(
    name: str, compiled: Callable[..., Array], sets: list[tuple[Array, ...]]
) -> Contender:
    return Contender(name, lambda i: compiled(*sets[i % len(sets)]), jax.block_until_ready)


def _jax_rival(
    name: str,
    function: Callable[..., Array],
    work: Work,
    sets: list[tuple[Array, ...]],
    ours: Array,
) -> tuple[Contender, dict[str, Any]]:
    compiled = jax.jit(function).lower(*sets[0]).compile()
    known = _agreement(work, ours, compiled(*sets[0]))
    return _jax_contender(name, compiled, sets), known


def _torch_rival(
    torch: Any, work: Work, sets: list[tuple[Array, ...]], ours: Array
) -> tuple[Contender, dict[str, Any]]:
    tensors = [[_to_torch(torch, x) for x in arrays] for arrays in sets]

    def call(i: int) -> Any:
        return work.torch(torch, *tensors[i % len(tensors)])

    def sync(_: Any) -> None:
        torch.cuda.synchronize()

    with torch.no_grad():
        y = call(0).contiguous()
        sync(y)
        known = _agreement(work, ours, jnp.from_dlpack(y))
    return Contender("torch", call, sync), known


def _to_torch(torch: Any, x: Array) -> Any:
    """The same memory as a tensor; a copy through the host where the two do not agree on DLPack."""
    try:
        return torch.from_dlpack(x)
    except Exception:
        bits = np.asarray(x).view(f"int{8 * x.dtype.itemsize}")
        return torch.from_numpy(bits).cuda().view(getattr(torch, x.dtype.name))


def _agreement(work: Work, ours: Array, theirs: Array) -> dict[str, Any]:
    """How far a rival's result is from ours, and whether that is as it should be.

    Where results need not be equal, a rival may sum in its own dtype: some ulp of the largest.
    """
    difference, largest = map(float, _difference(ours, theirs))
    bound = 0.0 if work.exact else 16 * float(jnp.finfo(ours.dtype).eps) * largest
    return {"agrees": difference <= bound, "difference": difference}


@jax.jit
def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """The largest difference between two results, and the largest of the first; NaN shows."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(a))


def _import_torch(platform: str) -> tuple[Any, str | None]:
    if platform != "gpu":
        return None, "torch is compared on CUDA only"
    try:
        import torch

        if not torch.cuda.is_available():
            return None, f"torch {torch.__version__} sees no CUDA device: not compared"
        return torch, None
    except Exception as error:  # a broken torch raises more than ImportError
        return None, f"torch cannot be imported ({reason(error)}): not compared"


class Table:
    """The plain-text table, one line a row as it is measured."""

    rivals = ("resize", "repeat", "broadcast", "torch")

    def __init__(self, names: Sequence[str], platform: str) -> None:
        self._width = max(map(len, names), default=4)
        self._unit, self._scale = rate_unit(platform)

    def header(self) -> str:
        """The names of the columns."""
        columns = [f"{'case':{self._width}} impl  ", f"{'us':>9} {'iqr':>7}"]
        columns += [f"{self._unit:>6} of copy", *(f"{rival:>9}" for rival in self.rivals)]
        return " ".join([*columns, f"{'best':>8}"])

    def line(self, row: dict[str, Any]) -> str:
        """One row."""
        start = f"{row['case']:{self._width}} {row.get('implementation', '-'):6}"
        if "error" in row:
            return f"{start} ERROR: {row['error']}"
        ours = row["ours"]
        share = f"{row['of_copy']:7.0%}" if "of_copy" in row else "      -"
        cells = [start, f"{ours['us']:9.1f} {ours['iqr_us']:7.1f}"]
        cells += [f"{ours['tb_per_s'] * self._scale:6.2f} {share}"]
        cells += [self._ratio(row["rivals"].get(rival)) for rival in self.rivals]
        if "ratio" in row:
            cells.append(f"{row['ratio']:7.2f}x")
            if row["ratio"] < 1:
                cells.append("< slower (noise)" if row["within_noise"] else "< slower")
        return " ".join(cells)

    @staticmethod
    def _ratio(rival: dict[str, Any] | None) -> str:
        if rival is None:
            return f"{'-':>9}"
        return f"{rival['ratio']:8.2f}x" if "ratio" in rival else f"{'failed':>9}"

    def footnotes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """What the columns mean, and every rival that failed or disagrees."""
        notes = ["all columns from 'of copy' on: that one's time / ours; best: of the jnp ones"]
        for row in rows:
            for name, other in {**row["rivals"], **row.get("ceilings", {})}.items():
                if "error" in other:
                    notes.append(f"{name} failed on {row['case']}: {other['error']}")
                elif not other.get("agrees", True):
                    what = f"{other['difference']:.3g} from ours, which passed its check"
                    notes.append(f"{name} on {row['case']} is {what}")
        return notes


def select(suite: str, quick: bool, substring: str, dtype: str | None) -> list[Case]:
    """The cases of a suite on this machine that the options ask for."""
    cases = CASES[suite](jax.default_backend(), quick)
    return [c for c in cases if substring in c.name and dtype in (None, c.dtype)]
