"""Where the numbers of a result come from, and what is wrong with them or missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .markdown import bullets, folded
from .rows import Result, Row

_CLOCKS = {"cupti": "device time of the kernels (CUPTI)", "wall": "wall time"}


def chip(about: dict[str, Any]) -> str:
    """The device, and how many of them or of its cores."""
    devices = about.get("devices", 1)
    if about["platform"] == "cpu":
        return f"{about['device']}, {about['cpu']['cores']} cores"
    return f"{devices} {about['device']}" if devices > 1 else str(about["device"])


def origin(abouts: Sequence[dict[str, Any]], clock: str) -> str:
    """The device, the versions, the clock, the date and the commit; of some runs the newest's.

    Their commits are all named.
    """
    ordered = sorted(abouts, key=lambda about: str(about["date"]), reverse=True)
    newest, versions = ordered[0], ordered[0]["versions"]
    commits = dict.fromkeys(
        (about["commit"] or "unknown")[:10] + (" with changes" if about["dirty"] else "")
        for about in ordered
    )
    facts = [chip(newest), *([f"driver {newest['driver']}"] if newest["driver"] else [])]
    facts += [f"{name} {versions[name]}" for name in ("jax", "torch") if versions.get(name)]
    when = f"{newest['date'][:10]}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    return f"{', '.join(facts)}; {clock}, medians; {when}."


def provenance(result: Result) -> str:
    """Where the numbers come from and how to read them."""
    return (
        f"{origin([result['environment']], _CLOCKS[result['clock']])} "
        f"Ratios are the rival's time over ours: above 1, ours is faster. "
        f"The copy is {result['ceiling']}, moving as many bytes."
    )


def remarks(result: Result) -> str:
    """What is missing, what failed, the self-check and the clocks, folded."""
    said = [f"{name} is missing: {why}" for name, why in result.get("missing", {}).items()]
    said += [*result.get("notes", []), *_failures(result["rows"])]
    said += [*_self_check(result), *_clocks(result)]
    return folded("What is missing, failed or was noted", bullets(said)) if said else ""


def _failures(rows: Sequence[Row]) -> list[str]:
    """What could not be measured, or only just, and why."""
    said = [f"{row['case']}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        for name, known in row.get("rivals", {}).items():
            why = [known.get(k) for k in ("error", "skipped", "sass", "ncu")]
            why += [f"one call of {known['us'] / 1e6:.2f} s"] if "once" in known else []
            said += [f"{name} on {row['case']}: {text}" for text in why if text]
    return said


def _self_check(result: Result) -> list[str]:
    if not (check := result.get("self_check")):
        return []
    first, second = check["us"]
    verdict = "within" if check["agrees"] else "**apart by more than**"
    return [
        f"self-check: {check['case']}, timed twice as if it were two functions: {first:.2f} and "
        f"{second:.2f} us, {verdict} the spread of {check['spread_us']:.2f} us"
    ]


def _clocks(result: Result) -> list[str]:
    units = {
        "sm_mhz": "MHz",
        "memory_mhz": "MHz of the memory",
        "power_w": "W",
        "temperature_c": "°C",
    }
    said = []
    for when, known in (result.get("clocks") or {}).items():
        facts = [f"{known[key]:,.0f} {unit}" for key, unit in units.items() if known.get(key)]
        said += [f"{when} the run: {', '.join(facts)}"] if facts else []
    return said
