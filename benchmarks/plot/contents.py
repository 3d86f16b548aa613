"""What a result's charts show, as plain data: chosen here, drawn in ``drawing``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from .. import environment
from ..cases import SWEEP, itemsize, short, size
from ..report import rate_unit
from ..report.headline import families, widths
from ..report.provenance import chip
from ..report.rows import Result, Row, by, having, is_slower, main_rows, measured
from ..report.suites import SUITES

COPY = "copy"
LAUNCH = "launch floor"


@dataclass(frozen=True)
class Line:
    """A line of a panel: a bar where it has one value, else a bar of ours and marks of rivals."""

    label: str
    values: dict[str, float]
    roof: float | None = None  # what a copy of as many bytes achieves
    loses: bool = False


@dataclass(frozen=True)
class Bars:
    """A panel of lines, one below the other. ``worth`` is what follows a bar of ours, as text."""

    title: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False
    worth: dict[str, str] = field(default_factory=dict)  # by the line's label


@dataclass(frozen=True)
class Curves:
    """A panel of curves over ``x``, whose ``ticks`` are labels of its values, if it has any."""

    title: str
    unit: str
    x_unit: str
    x: list[float]
    curves: dict[str, list[float | None]]
    ticks: list[str] = field(default_factory=list)
    logarithmic: bool = False
    ratios: bool = False  # to ours


@dataclass(frozen=True)
class Figure:
    """Panels in ``columns`` columns; ``name`` is that of the file, without suffix."""

    name: str
    title: str
    subtitle: str
    panels: list[Bars] | list[Curves]
    columns: int

    @property
    def digest(self) -> str:
        """Of all that is drawn: two pictures of the same numbers have the same one."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def figures(results: Iterable[Result]) -> list[Figure]:
    """Every chart of some results; the headline is of the first GPU with more than one suite."""
    found = [result for result in results if "runs" not in result]  # training has tables only
    drawn = [figure for result in found for figure in _of_suite(result)]
    gpus = by(
        [result for result in found if result["environment"]["platform"] == "gpu"],
        lambda result: environment.slug(result["environment"]),
    )
    heads = [_headline(suites) for suites in gpus.values() if len(suites) > 1]
    return [figure for figure in [*heads[:1], *drawn] if any(map(_has_content, figure.panels))]


def _has_content(panel: Bars | Curves) -> bool:
    return bool(panel.lines if isinstance(panel, Bars) else panel.curves)


# ---- suites ----

_KERNELS = "the article's kernel"
_NOT_DRAWN = ("1 element", "naive", "naive, 32-bit")  # but as the article's kernel


def _of_suite(result: Result) -> list[Figure]:
    rows = measured(main_rows(result))
    suite, about = result["suite"], result["environment"]
    unit, scale = rate_unit(about["platform"])
    name = SUITES[suite].title if suite in SUITES else suite.capitalize()

    def figure(
        part: str, title: str, panels: list[Bars] | list[Curves], columns: int = 0
    ) -> Figure:
        stem = "-".join([suite, *([part] if part else []), environment.slug(about)])
        return Figure(stem, title, _origin(about), panels, columns or max(1, len(panels)))

    def rates(
        part: str,
        rows: Sequence[Row],
        panel: Callable[[Row], str] = _dtype,
        label: Callable[[Row], str] = _op,
        about: str = "",
    ) -> Figure:
        panels = [
            Bars(title, unit, [_line(row, label(row), scale) for row in members])
            for title, members in by(rows, panel).items()
        ]
        return figure(part, f"{name}{about}: bytes in and out over time", panels)

    def kernels(title: Callable[[Row], str], logarithmic: bool = False) -> Figure:
        panels = [Bars(title(row), unit, _kernels(row, scale), logarithmic) for row in rows]
        return figure("", f"{name}: bytes in and out over time", panels)

    if suite == "models":
        drawn = [
            figure("", "Training steps: native kernels against XLA's", _steps(rows), 2),
            figure("losses", "Losses of the same steps", _losses(rows), 2),
        ]
    elif suite == "gelu_ladder":
        drawn = [kernels(lambda row: f"{_dtype(row)}, {row['variant']}")]
    elif suite == "atomic_add":
        drawn = [kernels(_variant, logarithmic=True)]
    elif suite == "elementwise":
        largest = [row for row in rows if row["variant"] == rows[0]["variant"]]
        drawn = [
            rates(group, members, about=f", {group}, arrays of {rows[0]['variant']}")
            for group, members in by(largest, _group).items()
        ]
    elif suite == "permute":
        table = having(rows, group="table")
        narrow = [row for row in table if itemsize(row["dtype"]) <= 4]
        wide = [row for row in table if itemsize(row["dtype"]) > 4]
        drawn = [
            rates("", narrow),
            rates("wide", wide, about=", 8 bytes an element and more"),
            rates("article", having(rows, group="article"), _variant, _size, ", the article's"),
        ]
    elif suite == "scatter":
        drawn = [rates("", rows, label=lambda row: f"{row['group']}: {row['op']}")]
    elif suite == "cast":
        drawn = [rates("", rows, _variant)]
    elif suite == "upsample":
        drawn = [rates("", rows, _group, _case)]
    else:
        drawn = [rates("", rows)]
    sweeps = by([row for row in measured(result["rows"]) if row["group"] == SWEEP], _swept)
    panels = [_rates(title, members, unit, scale) for title, members in sweeps.items()]
    panels += [_ratios(members) for members in sweeps.values()]
    title = f"{name} over the size of the array"
    return [*drawn, figure("sweep", title, panels, max(1, len(sweeps)))]


def _dtype(row: Row) -> str:
    return short(row["dtype"])


def _op(row: Row) -> str:
    return str(row["op"])


def _group(row: Row) -> str:
    return str(row["group"])


def _variant(row: Row) -> str:
    return str(row["variant"])


def _size(row: Row) -> str:
    """Of a permutation: its bytes are read and written."""
    return f"{_dtype(row)}, {size(row['bytes'] // 2)}"


def _case(row: Row) -> str:
    """The name without what a panel's title says."""
    return str(row["case"]).split("-", 1)[1].replace("-", "  ")


def _swept(row: Row) -> str:
    return _op(row) if _dtype(row) in row["op"] else f"{row['op']}, {_dtype(row)}"


def _origin(about: dict[str, Any]) -> str:
    versions = about["versions"]
    known = [f"{name} {versions[name]}" for name in ("jax", "torch") if versions.get(name)]
    return ", ".join([chip(about), *known, str(about["date"])[:10]])


def contenders(row: Row) -> dict[str, Row]:
    """Ours, the best jnp formulation, and the other rivals that a chart shows, where they ran."""
    best = {"best jnp": row["rivals"][row["best"]]} if "best" in row else {}
    others = {k: v for k, v in row["rivals"].items() if k not in (*row["jnp"], *_NOT_DRAWN)}
    if row["group"] == "article":
        others[_KERNELS] = row["rivals"].get("naive", {})
    found = {"ours": row["ours"], **best, **others}
    return {name: known for name, known in found.items() if "us" in known}


def _line(row: Row, label: str, scale: float) -> Line:
    values = {name: known["tb_per_s"] * scale for name, known in contenders(row).items()}
    return Line(label, values, _roof(row, scale), is_slower(row))


def _roof(row: Row, scale: float) -> float | None:
    copy = row["ceilings"].get("copy", {})
    return copy["tb_per_s"] * scale if "tb_per_s" in copy else None


def _kernels(row: Row, scale: float) -> list[Line]:
    """A bar for each kernel of a row, coloured by whose it is."""
    lines = []
    for name, known in {**row["rivals"], "ours, in JAX": row["ours"]}.items():
        if "tb_per_s" in known:
            whose = "best jnp" if name in row["jnp"] else _KERNELS
            whose = name if name.startswith("torch") else whose
            whose = "ours" if name.startswith("ours") else whose
            loses = whose == "ours" and is_slower(row)
            rate = known["tb_per_s"] * scale
            lines.append(Line(name, {whose: rate}, _roof(row, scale), loses))
    return lines


# ---- sweeps ----


def _sizes(rows: Sequence[Row]) -> list[float]:
    """The bytes that ``size`` wrote as the rows' variants."""
    units = {"KiB": 10, "MiB": 20, "GiB": 30}
    return [
        float(int(number) << units[unit])
        for number, unit in (str(row["variant"]).split() for row in rows)
    ]


def _curves(rows: Sequence[Row], of: Callable[[Row, str], float | None]) -> dict[str, Any]:
    """A value of each contender of any row at each size."""
    names = dict.fromkeys(name for row in rows for name in contenders(row))
    return {name: [of(row, name) for row in rows] for name in names}


def _rates(title: str, rows: Sequence[Row], unit: str, scale: float) -> Curves:
    def rate(row: Row, name: str) -> float | None:
        known = contenders(row).get(name)
        return known["tb_per_s"] * scale if known else None

    curves = _curves(rows, rate)
    curves[COPY] = [_roof(row, scale) for row in rows]
    floors = [row["rivals"].get("1 element", {}).get("us") for row in rows]
    curves[LAUNCH] = [
        row["bytes"] / us / 1e6 * scale if us else None
        for row, us in zip(rows, floors, strict=True)
    ]
    curves = {name: values for name, values in curves.items() if any(values)}
    ticks = [str(row["variant"]) for row in rows]
    return Curves(title, unit, "", _sizes(rows), curves, ticks, logarithmic=True)


def _ratios(rows: Sequence[Row]) -> Curves:
    def ratio(row: Row, name: str) -> float | None:
        known = contenders(row).get(name)
        return known["us"] / row["ours"]["us"] if known else None

    curves = _curves(rows, ratio)
    curves.pop("ours")
    ticks = [str(row["variant"]) for row in rows]
    unit, x_unit = "time over ours", "size of the array"
    return Curves("", unit, x_unit, _sizes(rows), curves, ticks, logarithmic=True, ratios=True)


# ---- models ----


def _steps(rows: Sequence[Row]) -> list[Bars]:
    panels = []
    for row in rows:
        timed = {"native": row["ours"], **row["rivals"]}
        series = {"native": "ours", "xla": "XLA", "jnp": "XLA"}
        lines = [
            Line(
                name,
                {series.get(name, "one native op"): known["us"] / 1e3},
                loses=name == "native" and is_slower(row),
            )
            for name, known in timed.items()
            if "us" in known
        ]
        worth = {line.label: f"{value:.3g}" for line in lines for value in line.values.values()}
        panels.append(
            Bars(f"{row['op']}, {_dtype(row)}", "ms a step (less is better)", lines, worth=worth)
        )
    return panels


def _losses(rows: Sequence[Row]) -> list[Curves]:
    names = {"native": "ours", "xla": "XLA"}
    panels = []
    for row in rows:
        curves = {names.get(k, k): list(losses) for k, losses in row.get("losses", {}).items()}
        if curves:
            steps = [float(i + 1) for i in range(max(map(len, curves.values())))]
            panels.append(Curves(f"{row['op']}, {_dtype(row)}", "loss", "step", steps, curves))
    return panels


# ---- the headline ----

_HEADLINE = ("ours", "best jnp", "torch")


def _headline(results: Sequence[Result]) -> Figure:
    """Shares of a copy's bandwidth, geometric means over the cases that all were timed on."""
    panels: dict[str, list[Line]] = {}
    for family, rows in families(results):
        for width, members in widths(rows).items():
            if line := _mean(family.name, members):
                panels.setdefault(width, []).append(line)
    titles = {"32 bits": "32 bits and more an element", "16 bits": "16 bits and fewer"}
    bars = [
        Bars(
            titles.get(width, width),
            "% of a copy's bandwidth",
            lines,
            worth={line.label: f"{line.values['ours']:.0f}" for line in lines},
        )
        for width, lines in panels.items()
    ]
    newest = max(results, key=lambda result: str(result["environment"]["date"]))
    title = "How much of the bandwidth of a copy each family of calls reaches"
    return Figure("headline", title, _origin(newest["environment"]), bars, max(1, len(bars)))


def _mean(label: str, rows: Sequence[Row]) -> Line | None:
    rows = [row for row in rows if "us" in row["ceilings"].get("copy", {}) and "best" in row]
    names = [name for name in _HEADLINE if any(name in contenders(row) for row in rows)]
    rows = [row for row in rows if all(name in contenders(row) for name in names)]
    if not rows:
        return None
    shares = {
        name: [100 * row["ceilings"]["copy"]["us"] / contenders(row)[name]["us"] for row in rows]
        for name in names
    }
    means = {name: geometric_mean(values) for name, values in shares.items()}
    loses = means.get("best jnp", 0.0) > means["ours"]
    return Line(label, means, roof=100.0, loses=loses)
