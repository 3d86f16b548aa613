"""``python -m benchmarks compare OLD NEW``: what became slower or faster, beyond noise."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import results, survey
from .results import Result, Row

# Two runs differ by more than the spread within either run: by 1 %, and by a few clock ticks.
_LEAST_SHARE, _LEAST_US = 0.01, 0.05


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path, metavar="OLD", help="a result, or a directory of results")
    parser.add_argument("new", type=Path, metavar="NEW", help="a later one")
    options = parser.parse_args(argv)
    pairs = [(options.old, options.new)]
    if options.old.is_dir() and options.new.is_dir():
        names = [path.name for path in sorted(options.old.glob("*.jsonl"))]
        pairs = [(options.old / n, options.new / n) for n in names if (options.new / n).exists()]
    try:
        for old, new in pairs:
            print(compare(survey.read(old), survey.read(new)))
    except ValueError as error:
        parser.error(str(error))
    return 0


def compare(old: Result, new: Result) -> str:
    """Returns the rows that differ, slowest first, and warnings if the runs are hard to compare."""
    before, after = ({(r["suite"], r["case"]): r for r in result.rows} for result in (old, new))
    both = [key for key in after if key in before]
    origins = [f"{r.header.get('commit')} of {r.header['date'][:16]}" for r in (old, new)]
    lines = [f"{new.header.get('suite', 'survey')}: {', then '.join(origins)}"]
    lines += [f"WARNING: {text}" for text in differences(old, new)]
    lines += [] if both else ["WARNING: they have no row in common"]
    changes = ((change(before[key], after[key]), key) for key in both)
    found = sorted(((ratio, key) for ratio, key in changes if ratio is not None), reverse=True)
    width = max((len(name) for _, (_, name) in found), default=0)
    for ratio, key in found:
        us = [row[key]["us"] for row in (before, after)]
        word = "SLOWER" if ratio > 1 else "faster"
        lines.append(f"{word} {key[1]:{width}} {us[0]:10.2f} {us[1]:10.2f} us {ratio:6.2f}x")
    slower = sum(ratio > 1 for ratio, _ in found)
    lines.append(f"of {len(both)} rows {slower} slower, {len(found) - slower} faster")
    said = {
        "an error now": [key for key in both if "error" in after[key]],
        "an error before": [key for key in both if "error" in before[key]],
        "only before": [key for key in before if key not in after],
        "only now": [key for key in after if key not in before],
    }
    lines += [f"{w}: {', '.join(name for _, name in keys)}" for w, keys in said.items() if keys]
    return "\n".join(lines)


def change(before: Row, after: Row) -> float | None:
    """Returns our new time divided by our old one if they differ by more than the noise.

    The noise is the sum of both interquartile ranges, or the least difference of two runs if that
    is larger.
    """
    if "us" not in before or "us" not in after:
        return None
    old, new = before["us"], after["us"]
    noise = max(before["iqr"] + after["iqr"], _LEAST_SHARE * old, _LEAST_US)
    return float(new / old) if abs(new - old) > noise else None


def differences(old: Result, new: Result) -> list[str]:
    """Returns the differences between two runs that make their times hard to compare."""
    names = ("device", "devices", "driver", "host", "cores", "native", "clock")
    facts, copies = [], []
    for header, rows in (old, new):
        versions = {f"version of {k}": v for k, v in header.get("versions", {}).items()}
        facts.append({name: header[name] for name in names if name in header} | versions)
        copies.append(results.numbers({r["case"]: r["copy"] for r in rows if "copy" in r}))
    a, b = facts
    found = [f"{k}: {a[k]}, then {b[k]}" for k in a if k in b and a[k] != b[k]]
    drifts = [us / copies[0][case] for case, us in copies[1].items() if case in copies[0]]
    if drifts and abs((drift := statistics.median(drifts)) - 1) > _LEAST_SHARE:
        found.append(f"plain copies took {drift:.2f}x as long, in the median")
    return found
