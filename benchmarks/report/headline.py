"""The README's tables: what each family of calls gains, and which calls to swap."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..cases import itemsize
from .markdown import SLOWER, bullets, folded, joined, percent, table, times
from .provenance import chip, origin
from .rows import Result, Row, best, by, is_slower, main_rows, measured, of_copy, ratios

GAIN = 1.1
"""What is called a gain: a tenth more than the best jnp formulation. Less is nothing."""

_WIDE, _NARROW = "32 bits", "16 bits"  # and more, and fewer


@dataclass(frozen=True)
class Family:
    """Calls that are swapped alike.

    ``member`` says which of its calls a row measures, and None of a row of another family.
    """

    name: str
    swap: str
    replaces: str
    suite: str
    member: Callable[[Row], str | None]


_ARITHMETIC = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "fma", "where"}
_ARITHMETIC |= {"scale", "scale_traced"}
_GATED = {"swiglu", "geglu_tanh", "geglu_erf"}
_FORMULAS = {
    "gelu_tanh": "`gelu`",
    "gelu_erf": "`gelu(approximate=False)`",
    "geglu_tanh": "`geglu`",
    "geglu_erf": "`geglu(approximate=False)`",
    "scale_traced": "`scale`",
}


_SCALES = {"2x": "at 2x", "other integers": "at other integers", "any size": "at other sizes"}


def _op(row: Row) -> str:
    return _FORMULAS.get(row["op"], f"`{row['op']}`")


FAMILIES = (
    Family(
        "activations",
        "`gelu`, `silu`, `mish`, ...",
        "`jax.nn.gelu`, ...",
        "elementwise",
        lambda row: None if row["op"] in _ARITHMETIC | _GATED else _op(row),
    ),
    Family(
        "gated units",
        "`swiglu`, `geglu`",
        "`jax.nn.silu(x) * gate`",
        "elementwise",
        lambda row: _op(row) if row["op"] in _GATED else None,
    ),
    Family(
        "arithmetic",
        "`add`, `fma`, `where`, ...",
        "`x + y`, ...",
        "elementwise",
        lambda row: _op(row) if row["op"] in _ARITHMETIC else None,
    ),
    Family("casts", "`cast`", "`astype`", "cast", lambda row: ""),
    Family(
        "upsampling",
        "`upsample_nearest2d`",
        "`jax.image.resize`",
        "upsample",
        lambda row: "" if row["group"] == "forward" else None,
    ),
    Family(
        "upsampling's gradient",
        "its gradient",
        "that of `jax.image.resize`",
        "upsample",
        lambda row: _SCALES[row["variant"]] if row["group"] == "backward" else None,
    ),
    Family(
        "permutations",
        "`permute`",
        "`jnp.transpose`",
        "permute",
        lambda row: row["variant"] if row["group"] == "table" else None,
    ),
    Family(
        "sums of rows",
        "`segment_sum`, `scatter_add`",
        "`jax.ops.segment_sum`, `x.at[i].add`",
        "scatter",
        lambda row: None if row["group"].startswith("embedding") else _sum(row),
    ),
    Family(
        "embeddings",
        "`embedding_lookup`",
        "`jnp.take`",
        "scatter",
        lambda row: {"embedding": "lookup", "embedding gradient": "gradient"}.get(row["group"]),
    ),
    Family(
        "kernels of your own",
        "`ElementwiseKernel`",
        "a chain in jnp",
        "kernels",
        lambda row: f"`{row['op']}`",
    ),
)


def _sum(row: Row) -> str:
    """How often a sum is added to, and in which order."""
    found = re.match(r"(\d+)([kM]?) x \d+ to (\d+)([kM]?),", row["op"])
    assert found is not None, row["op"]
    rows, sums = (int(found[i]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[found[i + 1]] for i in (1, 3))
    if row["variant"] == "sorted":
        return "sorted ids"
    if rows >= 32 * sums:
        return "many rows a sum"
    kept = row["group"] == "scatter_add"  # XLA copies the operand first
    return "few rows into an operand that is not donated" if kept else "few rows a sum"


def _width(row: Row) -> str:
    """By the widest dtype: a cast has two."""
    words = row["op"].split(" to ") if row["group"] == "cast" else []
    wide = itemsize(row["dtype"]) > 2 or any(word in ("f32", "f64", "int32") for word in words)
    return _WIDE if wide else _NARROW


def widths(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of 32 bits an element and more, and those of 16 bits and fewer."""
    return {width: [row for row in rows if _width(row) == width] for width in (_WIDE, _NARROW)}


def _plain(rows: Sequence[Row]) -> list[float]:
    """The time over ours of the call as one writes it, the first of the jnp formulations."""
    return [ratio for row in rows if row["jnp"] for ratio in ratios([row], row["jnp"][0])]


def families(results: Sequence[Result]) -> Iterator[tuple[Family, list[Row]]]:
    """The families that were measured, each with its rows."""
    suites = {
        result["suite"]: measured(main_rows(result)) for result in results if _is_suite(result)
    }
    for family in FAMILIES:
        rows = [row for row in suites.get(family.suite, []) if family.member(row) is not None]
        if rows:
            yield family, rows


def _is_suite(result: Result) -> bool:
    return "rows" in result and result["suite"] != "models"


def headline(results: Sequence[Result]) -> str:
    """A table a device, GPUs' first; CPUs' are folded away."""
    parts = []
    for (is_cpu, name), found in _devices(results).items():
        clock = "device time" if found[0]["clock"] == "cupti" else "wall time"
        text = f"{origin([r['environment'] for r in found], clock)}\n\n{gains(found)}"
        parts.append(folded(f"The same on a CPU: {name}", text) if is_cpu else text)
    return joined(parts)


def _devices(results: Sequence[Result]) -> dict[tuple[bool, str], list[Result]]:
    """The results of each device; the key says whether it is a CPU, and its name."""
    return dict(sorted(by([r for r in results if _is_suite(r)], _device).items()))


def _device(result: Result) -> tuple[bool, str]:
    about = result["environment"]
    return about["platform"] == "cpu", chip(about)


def gains(results: Sequence[Result]) -> str:
    """A row a family: geometric means over 32 bits and more, and over 16 bits and fewer."""
    torch = any(ratios(rows, "torch") for _, rows in families(results))
    heads = [
        "over that call: 32 bits / 16 bits",
        "over XLA's best",
        *(["over PyTorch"] if torch else []),
    ]
    lines = [["call", "instead of", *heads, "of a copy", "gains nothing in"]]
    for family, rows in families(results):
        known: list[Callable[[Sequence[Row]], str]] = [
            lambda rows: times(_plain(rows)),
            lambda rows: times(best(rows)),
            *([lambda rows: times(ratios(rows, "torch"))] if torch else []),
            lambda rows: percent(of_copy(rows)),
        ]
        cells = [" / ".join(of(members) for members in widths(rows).values()) for of in known]
        lost = list(filter(is_slower, rows))
        nothing = _nothing(family, rows)
        if lost:
            worst = times([min(best(lost))])
            nothing.append(f"slower in {len(lost)} of {len(rows)} cases, at worst {worst} {SLOWER}")
        lines.append([family.swap, family.replaces, *cells, "; ".join(nothing)])
    return table(lines)


def _nothing(family: Family, rows: Sequence[Row]) -> list[str]:
    """The members that gain nothing, by the width of dtypes."""
    said = {}
    for width, its in widths(rows).items():
        members = by(its, family.member)
        gain = [name for name, rows in members.items() if _gains(best(rows))]
        rest = [name for name in members if name not in gain]
        if rest:
            short = f"all but {_list(gain)}" if len(rest) > len(gain) + 1 else _list(rest)
            said[width] = short if gain else "all"
    if len(said) == 2 and len({*said.values()}) == 1:
        return [said[_WIDE]]
    return [width if names == "all" else f"{width}: {names}" for width, names in said.items()]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def advice(results: Sequence[Result]) -> str:
    """Which calls gain on the first GPU (without one: on the first CPU), by the width of dtypes."""
    if not (devices := _devices(results)):
        return ""
    (_, device), found = next(iter(devices.items()))
    kinds: dict[str, list[str]] = {kind: [] for kind in (_ALL, *_ONE.values(), _PLAIN, _LEAVE)}
    for family, rows in families(found):
        members = by(rows, family.member)
        sorted_in: dict[tuple[str, str], list[str]] = {}
        for member, its in members.items():
            for verdict in _kinds(its):
                sorted_in.setdefault(verdict, []).append(member)
        for (kind, where), names in sorted_in.items():
            which = "" if len(names) == len(members) else f" ({_list(names)})"
            kinds[kind].append(family.name + where + which)
    said = [f"**{kind}**: {'; '.join(names)}." for kind, names in kinds.items() if names]
    return f"On {device}:\n\n{bullets(said)}"


_ALL = "Swap in all dtypes"
_ONE = {_NARROW: "Swap in 16 bits and fewer", _WIDE: "Swap in 32 bits and more"}
_PLAIN = "Swap, unless the call is already written in the form that XLA is best at"
_LEAVE = "Leave to XLA"


def _kinds(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What to do about a call, each with the dtypes if it is not all that were measured."""
    known = {width: its for width, its in widths(rows).items() if best(its)}
    gain = [width for width, its in known.items() if _gains(best(its))]
    plain = [width for width, its in known.items() if width not in gain and _gains(_plain(its))]
    found = []
    if gain:
        found.append((_ALL if len(gain) == len(known) else _ONE[gain[0]], ""))
    if plain:
        found.append((_PLAIN, "" if len(plain) == len(known) else f" in {plain[0]}"))
    return found or [(_LEAVE, "")]


def _gains(values: Sequence[float]) -> bool:
    return bool(values) and statistics.geometric_mean(values) >= GAIN


def models(results: Sequence[Result]) -> str:
    """A row a model: the times of a training step in jnp over ours, on every device."""
    found = [r for r in results if r["suite"] == "models" and measured(r["rows"])]
    found.sort(key=_device)
    cells: dict[str, dict[str, list[str]]] = {}
    for result in found:
        for row in measured(result["rows"]):
            over_best = times(best([row])) + (f" {SLOWER}" if is_slower(row) else "")
            over = [times(ratios([row], "jnp")), over_best]
            cells.setdefault(row["op"], {})[chip(result["environment"])] = over
    if not cells:
        return ""
    names = [chip(result["environment"]) for result in found]
    heads = [f"{name}, over {what}" for name in names for what in ("jnp as written", "XLA's best")]
    lines = [["a training step of", *heads]]
    for op, values in cells.items():
        cell = [text for name in names for text in values.get(name, ["-", "-"])]
        lines.append([f"[{op}](examples/{op}.py)", *cell])
    return table(lines)


def section(results: Sequence[Result]) -> dict[str, str]:
    """What the README has between markers, by their names."""
    return {
        "headline": headline(results),
        "advice": advice(results),
        "models": models(results) or "Not measured yet.",
    }
