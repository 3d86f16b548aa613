"""``python -m benchmarks survey --seed N``: random shapes and dtypes, against XLA's best.

Kernels are tuned on the listed cases. This command draws other cases from a seed: the same seed
always gives the same cases. Every result is checked, as for listed cases.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from . import results, tables
from .__main__ import PARTS, parse, run
from .harness import Case, Options, about
from .results import Row
from .suites import FAMILIES, SUITES, load

SLOW = 0.95
LARGEST = {"gpu": 1 << 30, "cpu": 64 << 20}
"""The most bytes that a case reads and writes."""
CHECKED = 1 << 20  # the most bytes with --check-only
_BANDS = ((1 << 20, "under 1 MB"), (16 << 20, "1 to 16 MB"), (1 << 62, "over 16 MB"))


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables, and returns 1 if a row is an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks survey", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="which cases are drawn")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--count", type=int, help="cases a family (default: 60; permute: 150)")
    parser.add_argument(
        "--check-only", action="store_true", help="check values on small arrays, without timing"
    )
    options = parse(parser, argv)
    counts = {f: options.count or count(f) for f in options.family}
    largest = CHECKED if options.check_only else LARGEST[jax.default_backend()]
    cases = draw(options.seed, counts, largest)
    if options.count or options.check_only or options.family is not FAMILIES:
        options.out = options.out or PARTS
    measuring = Options(options.implementation, False, options.check_only, effort=0.3)
    rows = run(cases, measuring, {"seed": options.seed}, ["survey", *argv], options.out)
    for implementation in options.implementation if not options.check_only else ():
        print("\n" + text(rows, implementation, options.implementation[0]))
    errors = sum("error" in row for row in rows)
    print(f"{len(rows) - errors} of {len(rows)} results are right", file=sys.stderr)
    return 1 if errors else 0


def draw(seed: int, counts: dict[str, int], largest: int) -> list[Case]:
    """Draws cases. Those of a family do not depend on the other families that are drawn."""
    cases: dict[str, Case] = {}
    for family, count in counts.items():
        rng = np.random.default_rng([seed, FAMILIES.index(family)])
        wanted = len(cases) + count
        while len(cases) < wanted:
            case = load(family).draw(rng, largest)
            cases[f"{family} {case.name}"] = case
    return list(cases.values())


def count(family: str) -> int:
    return 150 if family == "permute" else 60


def read(path: Path) -> results.Result:
    """Reads a result and adds the fields of its cases; those of surveys are drawn again."""
    result = results.read(path)
    suite = result.header.get("suite", "")
    if suite and suite not in SUITES:
        return result
    drawn = cases(result)
    if suite:
        told = {case.name: about(case) for case in drawn.values()}
        rows = [told.get(row["case"], {}) | row for row in result.rows]
        return results.Result(result.header, rows)
    rows = [row for row in result.rows if isinstance(row, dict)]
    for case, us, iqr, xla, default, form in (x for x in result.rows if isinstance(x, list)):
        if case not in drawn:
            raise ValueError(f"{path}: the seed does not draw {case} any more")
        row = about(drawn[case]) | {"us": us, "iqr": iqr, "form": form}
        rows.append(row | {"xla": {"xla": xla}, "others": {"default": default}})
    return results.Result(result.header, rows)


def cases(result: results.Result) -> dict[str, Case]:
    header = result.header
    if "suite" in header:
        found = load(header["suite"]).cases(header["platform"])
    else:
        names = [row["suite"] if isinstance(row, dict) else row[0] for row in result.rows]
        drawn = Counter(name.partition(" ")[0] for name in names)
        counts = {family: max(n, count(family)) for family, n in drawn.items()}
        found = draw(header["seed"], counts, LARGEST[header["platform"]])
    return {f"{case.suite} {case.name}": case for case in found}


HEAD = ["cases", "mean", "worst", "under 0.95x", "by more than noise", "worst case"]


def text(rows: Sequence[Row], implementation: str, first: str) -> str:
    """Returns the tables of one of the implementations that were measured in the same run."""
    rows = timed(rows, implementation, first)
    made = {f"{implementation}, by {what}": summaries(rows, what) for what in LABELS}
    slowest = []
    for row in sorted(rows, key=_ratio)[:10]:
        us, ratio = tables.microseconds(row["us"]), tables.ratio(_ratio(row))
        slowest.append(f"slowest: {row['case'][-60:]}, {us} us, {ratio}")
    parts = [tables.markdown([title, *HEAD], lines) for title, lines in made.items() if lines]
    return "\n\n".join([*parts, "\n".join(slowest)])


def timed(rows: Sequence[Row], implementation: str, first: str = "native") -> list[Row]:
    """The rows that were measured, with an implementation's time in place of ours."""
    rows = [row for row in rows if "us" in row and results.best(row)]
    if implementation == first:
        return rows
    known = ((row, results.numbers(row["others"]).get(implementation)) for row in rows)
    return [{**row, "us": us} for row, us in known if us is not None]


def _family(row: Row) -> str:
    suite, group = row["suite"], row["group"]
    one = suite if group in ("random", suite) else f"{suite} {group}"
    return group if suite == "scatter" else one


LABELS: dict[str, Callable[[Row], str]] = {
    "family": _family,
    "size": lambda row: f"{row['suite']}, {_BANDS[_band(row)[1]][1]}",
    "strategy": lambda row: row.get("plan", "").partition(",")[0],
}
"""The labels by which rows are summarised."""


def summaries(rows: Sequence[Row], by_what: str) -> list[list[str]]:
    """One line per label: cases, geometric mean, worst, shares under 0.95x, worst case."""
    labelled = sorted(({**row, "label": LABELS[by_what](row)} for row in rows), key=_band)
    lines = []
    for (label,), found in results.by(labelled, "label").items():
        worst = min(found, key=_ratio)
        slow = sum(_ratio(row) < SLOW for row in found)
        beyond = sum(results.is_slower(row, SLOW) for row in found)
        shares = [tables.percent(n / len(found)) for n in (slow, beyond)]
        ratios = [tables.ratio(results.mean(map(_ratio, found))), tables.ratio(_ratio(worst))]
        shape = f"{worst['dtype']} {worst['shape']}"[:40]
        lines += [[label, str(len(found)), *ratios, *shares, shape]] if label else []
    return lines


def _band(row: Row) -> tuple[int, int]:
    size = [row["bytes"] <= most for most, _ in _BANDS].index(True)
    return FAMILIES.index(row["suite"]), size


def _ratio(row: Row) -> float:
    """The time of XLA's best form divided by ours."""
    return (results.best(row) or ("", math.inf))[1]
