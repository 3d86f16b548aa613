"""``python -m benchmarks plot FILE...``: the bandwidth that ours and the rivals achieve.

A black tick marks what a copy of as many bytes achieves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import environment
from .report import rate_unit

# Okabe and Ito's colours, which stay apart for colour-blind eyes, and differ in lightness too.
_SERIES = {"ours": "#0072B2", "best jnp": "#E69F00", "torch": "#9A9A9A"}
_CEILING = "#222222"


def main(argv: Sequence[str]) -> int:
    """Draws a chart of every result, as PNG and SVG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON)")
    parser.add_argument("--out", type=Path, default=Path("build/plots"), metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for file in options.files:
        result = json.loads(file.read_text())
        stem = f"{result['suite']}-{environment.slug(result['environment'])}"
        draw(result, [options.out / f"{stem}.{kind}" for kind in ("png", "svg")])
        print(f"wrote {stem}.png and {stem}.svg")
    return 0


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """One panel a group (forward, backward), one bar a contender, a black tick where a copy is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    about = result["environment"]
    unit, scale = rate_unit(about["platform"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "error" not in row:
            groups.setdefault(row["group"], []).append(_bars(row, scale))
    everything = [case for cases in groups.values() for case in cases]
    series = [name for name in _SERIES if any(name in case for case in everything)]
    if not series:
        raise SystemExit(f"no row of the {result['suite']} result has times: nothing to draw")

    # No date and no random ids in the SVG: the same numbers give the same file.
    style: dict[Any, Any] = {"svg.hashsalt": "benchmarks", "font.size": 9}
    with plt.rc_context(style):
        height = 1.2 + 0.115 * (len(series) + 1) * max(map(len, groups.values()))
        figure, panels = plt.subplots(
            1, len(groups), figsize=(11, height), squeeze=False, layout="constrained"
        )
        shown: list[str] = []
        for axes, (group, cases) in zip(panels[0], groups.items(), strict=True):
            _panel(axes, cases, series)
            axes.set_title(group, loc="left", fontweight="bold")
            axes.set_xlabel(unit)
            labels = [case["label"] for case in cases]
            axes.set_yticks(range(len(cases)), labels if labels != shown else [])
            shown = labels
        figure.legend(
            *panels[0][0].get_legend_handles_labels(),
            loc="outside upper right",
            ncols=4,
            frameon=False,
        )
        title = f"{result['suite']} on {about['device']}: bytes in and out over time"
        figure.suptitle(title, x=0.01, ha="left")
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
        plt.close(figure)


def _panel(axes: Any, cases: Sequence[dict[str, Any]], series: Sequence[str]) -> None:
    step = 0.82 / len(series)
    for k, name in enumerate(series):
        places = [i + (k - (len(series) - 1) / 2) * step for i in range(len(cases))]
        values = [case.get(name, 0.0) for case in cases]
        axes.barh(places, values, height=step * 0.92, color=_SERIES[name], label=name)
    copies = {i: case["copy"] for i, case in enumerate(cases) if "copy" in case}
    low, high = ([i + side for i in copies] for side in (-0.45, 0.45))
    axes.vlines(list(copies.values()), low, high, _CEILING, lw=1.6, label="copy")
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.grid(axis="x", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(row: dict[str, Any], scale: float) -> dict[str, Any]:
    """The label of a row, and what each contender achieved in the unit of the chart."""
    timed = {"ours": row["ours"], "best jnp": row["rivals"].get(row.get("best", ""), {})}
    timed |= {"torch": row["rivals"].get("torch", {}), "copy": row["ceilings"].get("copy", {})}
    rates = {name: t["tb_per_s"] * scale for name, t in timed.items() if "tb_per_s" in t}
    return {"label": row["case"].split("-", 1)[1].replace("-", "  "), **rates}
