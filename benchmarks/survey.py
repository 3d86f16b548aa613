"""``python -m benchmarks survey --seed N``: random shapes and dtypes, native against XLA's best.

The listed cases are those that kernels are tuned on. This draws others: from one seed always the
same, from another seed others. Every result is checked, as those of listed cases are.
"""

import argparse
import math
import sys
from collections.abc import Sequence

import jax
import numpy as np

from . import results, tables
from .__main__ import parse, run
from .harness import Case, Options
from .results import Row
from .suites import FAMILIES, load

SLOW = 0.95
_COUNTS = {"permute": 150}
_COUNT = 60
_BANDS = ((1 << 20, "under 1 MB"), (16 << 20, "1 to 16 MB"), (1 << 62, "over 16 MB"))


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables, and returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks survey", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="which cases are drawn")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--count", type=int, help="cases a family (default: 60; permute: 150)")
    parser.add_argument(
        "--check-only", action="store_true", help="check values on small arrays, without timing"
    )
    options = parse(parser, argv)
    counts = {f: options.count or _COUNTS.get(f, _COUNT) for f in options.family}
    cases = draw(options.seed, counts, _largest(options.check_only))
    whole = options.family is FAMILIES and not (options.count or options.check_only)
    measuring = Options(
        tuple(options.implementation),
        libraries=False,
        check_only=options.check_only,
        effort=0.6 if jax.default_backend() == "gpu" else 0.2,
    )
    rows = run(cases, measuring, {"seed": options.seed}, ["survey", *argv], options.out, whole)
    for implementation in options.implementation if not options.check_only else ():
        print("\n" + text(rows, implementation, options.implementation[0]))
    errors = sum("error" in row for row in rows)
    print(f"{len(rows) - errors} of {len(rows)} results are right", file=sys.stderr)
    return 1 if errors else 0


def draw(seed: int, counts: dict[str, int], largest: int) -> list[Case]:
    """Draws cases; those of a family do not depend on which others are drawn."""
    cases: dict[str, Case] = {}
    for family, count in counts.items():
        rng = np.random.default_rng([seed, FAMILIES.index(family)])
        wanted = len(cases) + count
        while len(cases) < wanted:
            case = load(family).draw(rng, largest)
            cases[f"{family} {case.name}"] = case
    return list(cases.values())


def _largest(check_only: bool) -> int:
    """The most bytes that a case reads and writes."""
    if check_only:
        return 1 << 20
    if jax.default_backend() != "gpu":
        return 64 << 20
    stats = jax.devices()[0].memory_stats() or {}
    return int(min(1 << 30, stats.get("bytes_limit", 16 << 30) // 32))


# ---- tables ----


def measured(rows: Sequence[Row], implementation: str, first: str) -> list[Row]:
    """Returns the rows as one of the implementations that were measured together has them."""
    timed = results.measured(rows)
    if implementation == first:
        return timed
    known = ((row, results.numbers(row["others"]).get(implementation)) for row in timed)
    return [{**row, "us": us} for row, us in known if us is not None]


def text(rows: Sequence[Row], implementation: str, first: str) -> str:
    """Returns the tables of one implementation: by family, by size, by strategy, the slowest."""
    rows = measured(rows, implementation, first)
    head = [implementation, *HEAD]
    parts = [tables.text(head, by_family(rows)), tables.text(head, by_size(rows))]
    if strategies := by_strategy(rows):
        parts.append(tables.text(["permute, by strategy", *HEAD], strategies))
    slowest = sorted(rows, key=_ratio)[:10]
    lines = [
        [
            row["case"][-60:],
            tables.microseconds(row["us"]),
            tables.microseconds(row["iqr"]),
            tables.ratio(_ratio(row)),
        ]
        for row in slowest
    ]
    parts.append(tables.text(["slowest", "us", "spread", "XLA's best"], lines))
    return "\n\n".join(parts)


HEAD = ["cases", "mean", "worst", "under 0.95x", "by more than noise", "worst case"]


def summary(rows: Sequence[Row]) -> list[str]:
    """One line: cases, geometric mean, worst, the share under 0.95x, and the worst case's shape."""
    rows = [row for row in rows if results.best(row)]
    if not rows:
        return ["0", *["-"] * 5]
    worst = min(rows, key=_ratio)
    slow = sum(_ratio(row) < SLOW for row in rows)
    beyond = sum(results.is_slower(row, SLOW) for row in rows)
    return [
        str(len(rows)),
        tables.ratio(results.mean(map(_ratio, rows))),
        tables.ratio(_ratio(worst)),
        tables.percent(slow / len(rows)),
        tables.percent(beyond / len(rows)),
        f"{worst['dtype']} {worst['shape']}"[:40],
    ]


def _ratio(row: Row) -> float:
    """XLA's best form's time over ours."""
    found = results.best(row)
    return found[1] if found else math.inf


def by_family(rows: Sequence[Row]) -> list[list[str]]:
    """A line a family and direction."""
    groups = results.by(rows, "suite", "group")
    return [[_label(suite, group), *summary(found)] for (suite, group), found in groups.items()]


def _label(suite: str, group: str) -> str:
    if suite == "scatter":
        return group
    return suite if group in ("random", suite) else f"{suite} {group}"


def by_size(rows: Sequence[Row]) -> list[list[str]]:
    """A line a family and band of bytes read and written."""
    lines = []
    for (suite,), found in results.by(rows, "suite").items():
        above = -1
        for most, name in _BANDS:
            band = [row for row in found if above < row["bytes"] <= most]
            lines += [[f"{suite}, {name}", *summary(band)]] if band else []
            above = most
    return lines


def by_strategy(rows: Sequence[Row]) -> list[list[str]]:
    """A line a strategy of permutations."""
    planned = [{**row, "plan": row["plan"].partition(",")[0]} for row in rows if row.get("plan")]
    return [[plan, *summary(found)] for (plan,), found in results.by(planned, "plan").items()]
