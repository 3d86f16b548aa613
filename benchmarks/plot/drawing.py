"""Draws figures with matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contents import COPY, LAUNCH, Bars, Curves, Figure

# Okabe and Ito's colours, which stay apart for colour-blind eyes; marks differ in shape, too.
_BLUE, _ORANGE, _SKY, _GREEN = "#0072B2", "#E69F00", "#56B4E9", "#009E73"
_VERMILLION, _PURPLE, _YELLOW = "#D55E00", "#CC79A7", "#F0E442"
_GREY, _INK, _GRID, _WHITE = "#8C8C8C", "#222222", "#DDDDDD", "#FFFFFF"
_STYLES = {
    "ours": (_BLUE, "o"),
    "best jnp": (_ORANGE, "D"),
    "XLA": (_ORANGE, "D"),
    "torch": (_GREY, "s"),
    "torch.compile": (_SKY, "^"),
    "triton": (_VERMILLION, "P"),
    "pallas": (_VERMILLION, "X"),
    "cupy": (_YELLOW, "p"),
    "cub": (_PURPLE, "*"),
    "cutensor": (_PURPLE, "h"),
    "the article's kernel": (_GREEN, "<"),
    "deterministic": (_WHITE, "o"),
    "built-in": (_GREEN, ">"),
    "one native op": (_GREY, "s"),
}
_OTHER = (_INK, "d")
_SLOWER = "slower than XLA"

_STYLE = {
    # Text stays text, and no random ids: the same numbers give the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "axes.edgecolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
}
_WIDTH = 9.0  # inches


def save(figure: Figure, directory: Path, kinds: Sequence[str]) -> None:
    """Writes a figure's files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        drawing = draw(plt, figure)
        for kind in kinds:
            path = directory / f"{figure.name}.{kind}"
            if kind == "svg":
                path.write_text(_svg(drawing, figure))
            else:
                drawing.savefig(path, dpi=150)
        plt.close(drawing)


def _svg(drawing: Any, figure: Figure) -> str:
    """Without the date and the program, and with coordinates of two decimals: a third smaller."""
    metadata = {"Title": figure.title, "Identifier": f"data:{figure.digest}"}
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, **metadata})
    text = re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
    return re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)


def draw(plt: Any, figure: Figure) -> Any:
    """The figure as matplotlib has it."""
    bars = [panel for panel in figure.panels if isinstance(panel, Bars)]
    rows = -(-len(figure.panels) // figure.columns)
    if bars:
        height = rows * (0.55 + 0.2 * max(len(panel.lines) for panel in bars)) + 0.95
    else:
        height = 1.0 + 2.5 * rows
    drawing, grid = plt.subplots(
        rows,
        figure.columns,
        figsize=(_WIDTH if figure.columns > 1 or bars else 6.5, height),
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    shown: list[str] = []
    for place, axes in enumerate(grid.flat):
        if place >= len(figure.panels):
            axes.set_visible(False)
            continue
        panel = figure.panels[place]
        axes.set_title(panel.title)
        axes.grid(axis="x" if isinstance(panel, Bars) else "both")
        if isinstance(panel, Bars):
            _bars(axes, panel)
            labels = [line.label for line in panel.lines]
            repeated = place % figure.columns and labels == shown
            axes.set_yticks(range(len(labels)), [] if repeated else labels)
            shown = labels
        else:
            _curves(axes, panel)
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    names = sorted(handles, key=_order)
    shown_handles = [handles[name] for name in names]
    rows = -(-len(names) // int(0.8 * drawing.get_figwidth()))
    columns = -(-len(names) // rows)  # as many in every row
    drawing.legend(shown_handles, names, loc="outside lower center", ncols=columns)
    drawing.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.42 / height))
    drawing.text(0.01, 1 - 0.12 / height, figure.title, weight="bold", size=10, va="center")
    drawing.text(0.01, 1 - 0.32 / height, figure.subtitle, color="#595959", size=8, va="center")
    return drawing


def _order(name: str) -> int:
    """Of a series among all: what a copy achieves and what is noted follow the contenders."""
    names = [*_STYLES, COPY, LAUNCH, _SLOWER]
    return names.index(name) if name in names else len(_STYLES)


def _bars(axes: Any, panel: Bars) -> None:
    lines = list(enumerate(panel.lines))
    names = list(dict.fromkeys(name for _, line in lines for name in line.values))
    names.sort(key=_order)
    for name in names:
        colour, mark = _STYLES.get(name, _OTHER)
        found = [(i, line.values[name]) for i, line in lines if name in line.values]
        lone = all(len(panel.lines[i].values) == 1 for i, _ in found)
        places, values = zip(*found, strict=True)
        if lone or name == "ours":
            axes.barh(places, values, height=0.66, color=colour, label=name)
        else:
            edge = _BLUE if colour == _WHITE else _INK
            style = {
                "s": 40 if mark == "*" else 26,
                "marker": mark,
                "color": colour,
                "edgecolors": edge,
                "lw": 0.6,
            }
            axes.scatter(values, places, label=name, zorder=3, **style)
    roofs = {i: line.roof for i, line in lines if line.roof is not None}
    if roofs:
        low, high = ([i + side for i in roofs] for side in (-0.45, 0.45))
        axes.vlines(list(roofs.values()), low, high, _INK, lw=1.6, label=COPY)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.unit)
    for i, line in lines:
        if text := panel.worth.get(line.label):
            right = max(*line.values.values(), line.roof or 0.0)
            style = {"textcoords": "offset points", "va": "center", "color": _INK}
            axes.annotate(text, (right, i), (5, 0), **style)
    losing = [i for i, line in lines if line.loses]
    if losing:
        style = {"transform": axes.get_yaxis_transform(), "marker": "v", "color": _VERMILLION}
        axes.scatter([0.97] * len(losing), losing, s=30, label=_SLOWER, **style)
    if panel.logarithmic:
        known = [
            value for line in panel.lines for value in (*line.values.values(), line.roof) if value
        ]
        axes.set_xscale("log")
        axes.set_xlim(min(known) / 3, max(known) * (20 if losing else 3))
        axes.minorticks_off()
    else:
        room = 1 + 0.07 * bool(losing) + 0.07 * bool(panel.worth)
        axes.set_xlim(0, room * axes.get_xlim()[1])


def _curves(axes: Any, panel: Curves) -> None:
    bounds = {COPY: "-", LAUNCH: ":"}
    for name, values in panel.curves.items():
        colour, mark = (_INK, "") if name in bounds else _STYLES.get(name, _OTHER)
        found = [(x, y) for x, y in zip(panel.x, values, strict=False) if y is not None]
        xs, ys = zip(*found, strict=True)
        style: dict[str, Any] = {
            "color": _BLUE if colour == _WHITE else colour,
            "ls": bounds.get(name, "-" if name == "ours" else "--"),
        }
        style |= {"lw": 1.8 if name == "ours" else 1.2}
        if panel.ratios:
            style |= {"marker": mark, "mfc": colour, "ms": 5, "mec": _INK, "mew": 0.5}
        axes.plot(xs, ys, label=name, **style)
    if panel.ticks:
        axes.set_xscale("log", base=2)
        step = 2 if len(panel.ticks) > 6 else 1
        axes.set_xticks(panel.x[::step], panel.ticks[::step])
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    if panel.ratios:
        axes.axhline(1, color=_BLUE, lw=1.8, zorder=1)
        bottom, top = axes.get_ylim()
        low, high = min(bottom, 0.85), max(top, 1.15)
        axes.set_ylim(low, high)
        axes.set_yticks(
            [tick for tick in (_FINE if high < 2.2 * low else _COARSE) if low <= tick <= high]
        )
    elif LAUNCH in panel.curves:
        # The floor of a launch crosses the roof and is of no interest beyond it.
        axes.set_ylim(top=2 * max(y for y in panel.curves[COPY] if y is not None))
    axes.set_ylabel(panel.unit)
    axes.set_xlabel(panel.x_unit)


# Ticks of ratios: over a short range, and over a long one.
_FINE = [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2]
_COARSE = [digit * 10**power for power in range(-3, 4) for digit in (1, 2, 5)]
