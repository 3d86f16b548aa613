"""``python -m benchmarks report FILE...``: the tables of the README, from results alone.

Each result has a place in the README, between ``<!-- benchmarks:NAME begin -->`` and
``<!-- benchmarks:NAME end -->``. NAME is the suite and the device: ``upsample-nvidia-h200``,
``upsample-cpu``. ``--check`` writes nothing and fails where the README is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import environment

Result = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Writes the tables into the README, or checks that they are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON)")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--check", action="store_true", help="fail if the README is stale")
    options = parser.parse_args(argv)

    old = text = options.readme.read_text()
    command = f"python -m benchmarks report {' '.join(map(str, options.files))}"
    for file in options.files:
        result = json.loads(file.read_text())
        try:
            text = insert(text, marker_name(result), tables(result))
        except LookupError as error:
            sys.exit(f"{options.readme}: {error.args[0]}")
    if options.check and text != old:
        sys.exit(f"{options.readme} is stale: run {command}")
    if text != old:
        options.readme.write_text(text)
    return 0


def marker_name(result: Result) -> str:
    """The suite and the device; all CPUs share one place."""
    about = result["environment"]
    return f"{result['suite']}-{'cpu' if about['platform'] == 'cpu' else environment.slug(about)}"


def insert(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = (f"<!-- benchmarks:{name} {word} -->" for word in ("begin", "end"))
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise LookupError(f"expected one pair of the markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def tables(result: Result) -> str:
    """Markdown: where the numbers come from, geometric means, and all rows folded away."""
    parts = [provenance(result), summary(result)]
    parts += ["<details><summary>All cases</summary>", details(result), "</details>"]
    return "\n\n".join(parts)


def provenance(result: Result) -> str:
    """Where the numbers come from and how to read them."""
    about = result["environment"]
    versions = about["versions"]
    commit = (about["commit"] or "unknown")[:10] + (" with changes" if about["dirty"] else "")
    facts = [about["device"]]
    facts += [f"driver {about['driver']}" if about["driver"] else f"{about['cpu']['cores']} cores"]
    facts += [f"{name} {versions[name]}" for name in ("jax", "torch") if versions.get(name)]
    clock = {"cupti": "device time of the kernels (CUPTI)", "wall": "wall time"}[result["clock"]]
    notes = "".join(f" Note: {note}." for note in result["notes"])
    return (
        f"{', '.join(facts)}; {clock}, medians; {about['date'][:10]}, commit {commit}. "
        f"Ratios are the rival's time over ours: above 1, ours is faster. "
        f"The copy is {result['ceiling']}, moving as many bytes.{notes}"
    )


def summary(result: Result) -> str:
    """Geometric means over the cases of each group, variant and dtype."""
    rows = [row for row in result["rows"] if "error" not in row]
    rivals = _rivals(rows)
    lines = [["", "", "dtype", "cases", "best jnp", "worst case", *rivals, "of copy"]]
    keys = [(row["group"], row["variant"], row["dtype"]) for row in rows]
    for key in dict.fromkeys(keys):
        members = [row for row, k in zip(rows, keys, strict=True) if k == key]
        ratios = [row["ratio"] for row in members if "ratio" in row]
        lines.append(
            [
                *key,
                str(len(members)),
                f"**{_times(ratios)}**",
                f"{min(ratios):.2f}x" if ratios else "-",
                *(_times(_ratios(members, rival)) for rival in rivals),
                _percent([row["of_copy"] for row in members if "of_copy" in row]),
            ]
        )
    return _markdown(lines)


def details(result: Result) -> str:
    """A line for every case."""
    unit, scale = rate_unit(result["environment"]["platform"])
    rivals = _rivals(result["rows"])
    lines = [["case", "ran", "us", unit, "of copy", "best jnp", *rivals]]
    for row in result["rows"]:
        if "error" in row:
            lines.append([row["case"], f"error: {row['error']}"])
            continue
        lines.append(
            [
                row["case"],
                row["implementation"],
                f"{row['ours']['us']:.1f}",
                f"{row['ours']['tb_per_s'] * scale:.2f}",
                _percent([row["of_copy"]] if "of_copy" in row else []),
                _times([row["ratio"]] if "ratio" in row else []),
                *(_times(_ratios([row], rival)) for rival in rivals),
            ]
        )
    return _markdown(lines)


def rate_unit(platform: str) -> tuple[str, float]:
    """The unit that rates are shown in, and how many of it a TB/s has."""
    return ("GB/s", 1e3) if platform == "cpu" else ("TB/s", 1.0)


def _rivals(rows: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["rivals"]))


def _ratios(rows: Iterable[Result], rival: str) -> list[float]:
    known = (row["rivals"].get(rival, {}).get("ratio") for row in rows)
    return [ratio for ratio in known if ratio is not None]


def _times(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}x" if ratios else "-"


def _percent(shares: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(shares):.0%}" if shares else "-"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])
