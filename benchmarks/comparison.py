"""``python -m benchmarks compare OLD NEW``: what got slower or faster by more than the noise.

``python -m benchmarks --compare OLD...`` does the same with a run as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]

# Two runs differ by more than the samples of either tell: by 1 %, and by a few ticks of a clock.
_LEAST_SHARE, _LEAST_US = 0.01, 0.05


def main(argv: Sequence[str]) -> int:
    """Prints the comparison of two results of one suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path, metavar="OLD", help="a result (JSON)")
    parser.add_argument("new", type=Path, metavar="NEW", help="a later one of the same suite")
    options = parser.parse_args(argv)
    try:
        old = read(options.old)
        new = read(options.new, [old["suite"]])
    except ValueError as error:
        parser.error(str(error))
    print(compare(old, new))
    return 0


def read(path: Path, suites: Sequence[str] = ()) -> Result:
    """A result from its file, of one of the suites if there are any."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(result, dict) or not {"suite", "rows", "environment"} <= result.keys():
        raise ValueError(f"{path} is not a result of a suite")
    if suites and result["suite"] not in suites:
        raise ValueError(f"{path} is of the suite {result['suite']}, not of {', '.join(suites)}")
    return result


def compare(old: Result, new: Result) -> str:
    """A table of the rows that differ, slowest first, and what else to know."""
    before, after = ({row["case"]: row for row in result["rows"]} for result in (old, new))
    both = [name for name in after if name in before]
    lines = [f"{new['suite']}: {_origin(old)}, then {_origin(new)}"]
    lines += [f"WARNING: {text}" for text in differences(old, new)]
    lines += [] if both else ["WARNING: they have no row in common"]
    changes = [(change(before[name], after[name]), name) for name in both]
    found = sorted(((ratio, name) for ratio, name in changes if ratio is not None), reverse=True)
    width = max((len(name) for _, name in found), default=0)
    for ratio, name in found:
        us = [row[name]["ours"]["us"] for row in (before, after)]
        word = "SLOWER" if ratio > 1 else "faster"
        lines.append(f"{word} {name:{width}} {us[0]:10.2f} {us[1]:10.2f} us {ratio:6.2f}x")
    slower = sum(ratio > 1 for ratio, _ in found)
    lines.append(f"of {len(both)} rows {slower} slower, {len(found) - slower} faster")
    lines += _named("an error now", [name for name in both if "error" in after[name]])
    lines += _named("an error before", [name for name in both if "error" in before[name]])
    lines += _named("only before", [name for name in before if name not in after])
    lines += _named("only now", [name for name in after if name not in before])
    return "\n".join(lines)


def change(before: Result, after: Result) -> float | None:
    """The new time of ours over the old one, where they differ by more than the noise.

    The noise: both interquartile ranges, end to end.
    """
    if "error" in before or "error" in after:
        return None
    old, new = before["ours"], after["ours"]
    noise = max(old["iqr_us"] + new["iqr_us"], _LEAST_SHARE * old["us"], _LEAST_US)
    return new["us"] / old["us"] if abs(new["us"] - old["us"]) > noise else None


def differences(old: Result, new: Result) -> list[str]:
    """What makes times of two runs hard to compare, of what both have recorded."""

    def facts(result: Result) -> dict[str, Any]:
        about = result["environment"]
        names = ("device", "devices", "driver", "cpu", "native")
        known = {name: about[name] for name in names if name in about}
        versions = {f"version of {k}": v for k, v in about.get("versions", {}).items()}
        return {**known, "clock": result["clock"], **versions}

    a, b = facts(old), facts(new)
    found = [f"{k}: {a[k]}, then {b[k]}" for k in a if k in b and a[k] != b[k]]
    if (drift := _drift(old, new)) and abs(drift - 1) > _LEAST_SHARE:
        found.append(f"the ceiling's copies took {drift:.2f}x as long, in the median")
    return found


def _drift(old: Result, new: Result) -> float | None:
    """The new times of the copies of as many bytes over the old ones: the machine's own change."""
    before, after = (
        {row["case"]: row.get("ceilings", {}).get("copy", {}).get("us") for row in result["rows"]}
        for result in (old, new)
    )
    both = [us / before[name] for name, us in after.items() if us and before.get(name)]
    return statistics.median(both) if both else None


def _origin(result: Result) -> str:
    about = result["environment"]
    return f"{str(about.get('commit'))[:8]} of {about.get('date')}"


def _named(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}"] if names else []
