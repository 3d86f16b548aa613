"""``python -m benchmarks compare OLD NEW``: what got slower or faster by more than the noise.

``python -m benchmarks --compare OLD...`` does the same with a run as soon as it is measured.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from .results import Result, Row, read

# Two runs differ by more than the samples of either show: by 1 %, and by a few ticks of a clock.
_LEAST_SHARE, _LEAST_US = 0.01, 0.05


def main(argv: Sequence[str]) -> int:
    """Prints the comparison of two results."""
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
            print(compare(read(old), read(new)))
    except ValueError as error:
        parser.error(str(error))
    return 0


def compare(old: Result, new: Result) -> str:
    """Returns the rows that differ, slowest first, and what makes the runs hard to compare."""
    before, after = ({(r["suite"], r["case"]): r for r in result.rows} for result in (old, new))
    both = [key for key in after if key in before]
    lines = [f"{new.header.get('suite', 'survey')}: {_origin(old)}, then {_origin(new)}"]
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
    lines += _named("an error now", [key for key in both if "error" in after[key]])
    lines += _named("an error before", [key for key in both if "error" in before[key]])
    lines += _named("only before", [key for key in before if key not in after])
    lines += _named("only now", [key for key in after if key not in before])
    return "\n".join(lines)


def change(before: Row, after: Row) -> float | None:
    """Returns the new time of ours over the old one if they differ by more than the noise.

    The noise is the sum of both interquartile ranges.
    """
    if "us" not in before or "us" not in after:
        return None
    old, new = before["us"], after["us"]
    noise = max(before["iqr"] + after["iqr"], _LEAST_SHARE * old, _LEAST_US)
    return float(new / old) if abs(new - old) > noise else None


def differences(old: Result, new: Result) -> list[str]:
    """Returns what makes times of two runs hard to compare, of what both have recorded."""

    def facts(header: dict[str, Any]) -> dict[str, Any]:
        names = ("device", "devices", "driver", "host", "cores", "native", "clock")
        versions = {f"version of {k}": v for k, v in header.get("versions", {}).items()}
        return {**{name: header[name] for name in names if name in header}, **versions}

    a, b = facts(old.header), facts(new.header)
    found = [f"{k}: {a[k]}, then {b[k]}" for k in a if k in b and a[k] != b[k]]
    if (drift := _drift(old, new)) and abs(drift - 1) > _LEAST_SHARE:
        found.append(f"plain copies took {drift:.2f}x as long, in the median")
    return found


def _drift(old: Result, new: Result) -> float | None:
    """Returns the new times of plain copies over the old ones: the machine's own change."""
    before, after = ({row["case"]: row.get("copy") for row in result.rows} for result in (old, new))
    pairs = ((before.get(case), us) for case, us in after.items())
    known = [us / was for was, us in pairs if _is_time(us) and _is_time(was)]
    return statistics.median(known) if known else None


def _is_time(us: Any) -> TypeGuard[float]:
    return isinstance(us, float | int) and us > 0


def _origin(result: Result) -> str:
    return f"{result.header.get('commit')} of {result.header['date'][:16]}"


def _named(what: str, keys: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{what}: {', '.join(name for _, name in keys)}"] if keys else []
