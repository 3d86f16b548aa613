"""``python -m benchmarks plot FILE...``: the bandwidth that ours and the rivals achieve.

A black tick marks what a copy of as many bytes achieves. Where a suite has many ops there is a
figure for each group, an op a line and a dtype a panel; small arrays have a figure of their times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import environment
from .cases import itemsize, short, size
from .report import rate_unit

Row = dict[str, Any]

# Okabe and Ito's colours, which stay apart for colour-blind eyes, and differ in lightness too.
_SERIES = {"ours": "#0072B2", "best jnp": "#E69F00", "torch": "#9A9A9A"}
_KERNELS = "the article's kernels"
_CEILING = "#222222"
_LINES = {"ours": "o-", "best jnp": "s--", "torch": "^:", "1 element": "-"}


@dataclass(frozen=True)
class Panel:
    """Bars: a label, and the values of some series, a line."""

    title: str
    bars: list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """Panels side by side. ``name`` is what its file has after the suite's name, if anything."""

    name: str
    title: str
    panels: list[Panel]
    logarithmic: bool = False


def main(argv: Sequence[str]) -> int:
    """Draws the charts of every result, as PNG and SVG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON)")
    parser.add_argument("--out", type=Path, default=Path("build/plots"), metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for file in options.files:
        result = json.loads(file.read_text())
        if "runs" in result:  # of a training example: a table says it all
            continue
        for stem in draw(result, options.out):
            print(f"wrote {stem}.png and {stem}.svg")
    return 0


def draw(result: Row, directory: Path) -> list[str]:
    """Draws every figure of a result; returns the names of the files, without suffix."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    about = result["environment"]
    unit, _ = rate_unit(about["platform"])
    made = [figure for figure in figures(result) if any(panel.bars for panel in figure.panels)]
    small = [row for row in result["rows"] if row["group"] == "small" and "error" not in row]
    if not made and not small:
        raise SystemExit(f"no row of the {result['suite']} result has times: nothing to draw")

    stems = []
    # No date and no random ids in the SVG: the same numbers give the same file.
    style: dict[Any, Any] = {"svg.hashsalt": "benchmarks", "font.size": 9}
    with plt.rc_context(style):
        drawings: list[tuple[str, Any]] = [(f.name, _bar_figure(plt, f, unit, about)) for f in made]
        if small:
            drawings.append(("small", _small_figure(plt, small, about)))
        for name, figure in drawings:
            words = [result["suite"], *([name] if name else []), environment.slug(about)]
            stems.append("-".join(words))
            for kind in ("png", "svg"):
                metadata = {"Date": None} if kind == "svg" else {}
                figure.savefig(directory / f"{stems[-1]}.{kind}", dpi=150, metadata=metadata)
            plt.close(figure)
    return stems


def figures(result: Row) -> list[Figure]:
    """What to draw of a suite: of the ladder kernels, of many ops a line each, else all cases."""
    _, scale = rate_unit(result["environment"]["platform"])
    rows = [row for row in result["rows"] if "error" not in row and row["group"] != "small"]
    suite = result["suite"]
    title = f"{suite}: bytes in and out over time"

    def panels(rows: Sequence[Row], key: str, label: str) -> list[Panel]:
        keys = dict.fromkeys(row[key] for row in rows)
        return [
            Panel(
                short(k) if key == "dtype" else k,
                [_bars(row, scale, label) for row in rows if row[key] == k],
            )
            for k in keys
        ]

    if suite == "gelu_ladder":
        ladders = [Panel(f"{short(r['dtype'])}, {r['variant']}", _kernels(r, scale)) for r in rows]
        return [Figure("", title, ladders)]
    if suite == "atomic_add":
        sizes = [Panel(r["variant"], _kernels(r, scale)) for r in rows]
        return [Figure("", title, sizes, logarithmic=True)]
    if suite == "scatter":
        rows = [{**row, "line": f"{row['group']}  {row['op']}"} for row in rows]
        return [Figure("", title, panels(rows, "dtype", "line"))]
    if suite == "permute":
        table = [row for row in rows if row["group"] == "table"]
        narrow = [row for row in table if itemsize(row["dtype"]) <= 4]
        article = [
            {**row, "line": f"{short(row['dtype'])}  {size(row['bytes'] // 2)}"}
            for row in rows
            if row["group"] == "article"
        ]
        return [
            Figure("", title, panels(narrow, "dtype", "op")),
            Figure("wide", title, panels([r for r in table if r not in narrow], "dtype", "op")),
            Figure("article", title, panels(article, "variant", "line")),
        ]
    if suite == "elementwise":
        largest = [row for row in rows if row["variant"] == rows[0]["variant"]]
        return [
            Figure(
                group,
                f"{suite} {group}, {rows[0]['variant']} an array: bytes in and out over time",
                panels([row for row in largest if row["group"] == group], "dtype", "op"),
            )
            for group in dict.fromkeys(row["group"] for row in largest)
        ]
    if suite == "kernels":
        return [Figure("", title, panels(rows, "dtype", "op"))]
    if suite == "cast":
        return [Figure("", title, panels(rows, "variant", "op"))]
    return [Figure("", title, panels(rows, "group", "case"))]


def _bar_figure(plt: Any, figure: Figure, unit: str, about: Row) -> Any:
    everything = [bar for panel in figure.panels for bar in panel.bars]
    colours = {**_SERIES, _KERNELS: "#009E73"}
    series = [name for name in colours if any(name in bar for bar in everything)]
    alone = all(sum(name in bar for name in series) == 1 for bar in everything)
    lanes = 1 if alone else len(series)
    most = max(len(panel.bars) for panel in figure.panels)
    height = 1.2 + (0.115 * (lanes + 1) if lanes > 1 else 0.26) * most
    drawing, panels = plt.subplots(
        1,
        len(figure.panels),
        figsize=(11, max(height, 2.4)),
        squeeze=False,
        sharex=len(figure.panels) > 2,
        layout="constrained",
    )
    shown: list[str] = []
    handles: dict[str, Any] = {}
    for axes, panel in zip(panels[0], figure.panels, strict=True):
        _panel(axes, panel.bars, {name: colours[name] for name in series}, lanes)
        axes.set_title(panel.title, loc="left", fontweight="bold")
        axes.set_xlabel(unit)
        if figure.logarithmic:
            axes.set_xscale("log")
        labels = [bar["label"] for bar in panel.bars]
        axes.set_yticks(range(len(labels)), labels if labels != shown else [])
        shown = labels
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    drawing.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
    )
    drawing.suptitle(f"{figure.title}, {about['device']}", x=0.01, ha="left")
    return drawing


def _panel(axes: Any, bars: Sequence[Row], series: dict[str, str], lanes: int) -> None:
    step = 0.82 / lanes
    for k, (name, colour) in enumerate(series.items()):
        middle = (k - (lanes - 1) / 2) * step if lanes > 1 else 0.0
        places = [i + middle for i, bar in enumerate(bars) if name in bar]
        values = [bar[name] for bar in bars if name in bar]
        axes.barh(places, values, height=step * 0.92, color=colour, label=name)
    copies = {i: bar["copy"] for i, bar in enumerate(bars) if "copy" in bar}
    low, high = ([i + side for i in copies] for side in (-0.45, 0.45))
    axes.vlines(list(copies.values()), low, high, _CEILING, lw=1.6, label="copy")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(axis="x", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(row: Row, scale: float, label: str) -> Row:
    """The label of a row, and what each contender achieved in the unit of the chart."""
    text = row["case"].split("-", 1)[1].replace("-", "  ") if label == "case" else row[label]
    rates = {name: t["tb_per_s"] * scale for name, t in _timed(row).items() if "tb_per_s" in t}
    return {"label": text, **rates}


def _timed(row: Row) -> dict[str, Row]:
    timed = {"ours": row["ours"], "best jnp": row["rivals"].get(row.get("best", ""), {})}
    return timed | {
        "torch": row["rivals"].get("torch", {}),
        "1 element": {k: v for k, v in row["rivals"].get("1 element", {}).items() if k == "us"},
        _KERNELS: row["rivals"].get("naive", {}) if row["group"] == "article" else {},
        "copy": row["ceilings"].get("copy", {}),
    }


def _kernels(row: Row, scale: float) -> list[Row]:
    """A bar for each kernel of a row, coloured by whose it is."""
    copy = row["ceilings"].get("copy", {})
    tick = {"copy": copy["tb_per_s"] * scale} if "tb_per_s" in copy else {}
    bars = []
    for name, known in {**row["rivals"], "ours, in JAX": row["ours"]}.items():
        if "tb_per_s" in known:
            whose = "torch" if name == "torch" else "best jnp" if name in row["jnp"] else _KERNELS
            whose = "ours" if name.startswith("ours") else whose
            bars.append({"label": name, whose: known["tb_per_s"] * scale, **tick})
    return bars


def _small_figure(plt: Any, rows: Sequence[Row], about: Row) -> Any:
    """Microseconds over the size of the array, in powers of four."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    drawing, panels = plt.subplots(
        1, len(dtypes), figsize=(9, 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    colours = {**_SERIES, "1 element": _CEILING}
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        found = [row for row in rows if row["dtype"] == dtype]
        for name, style in _LINES.items():
            values = [_timed(row)[name].get("us") for row in found]
            if any(v is not None for v in values):
                axes.plot(range(len(found)), values, style, color=colours[name], label=name)
        axes.set_xticks(range(len(found)), [row["variant"] for row in found])
        axes.set_title(short(dtype), loc="left", fontweight="bold")
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("us")
    handles, names = panels[0][0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    title = f"{rows[0]['op']} of small arrays, {about['device']}"
    drawing.suptitle(title, x=0.01, ha="left")
    return drawing
