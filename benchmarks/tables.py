"""Markdown tables, the lines that a run prints, and number formats."""

from collections.abc import Sequence

from . import results
from .results import Row

Line = Sequence[str]


def markdown(head: Line, lines: Sequence[Line]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def microseconds(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def size(nbytes: int) -> str:
    units = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
    unit, bits = next((unit, bits) for unit, bits in units if nbytes >> bits)
    return f"{nbytes / (1 << bits):.3g} {unit}"


PROGRESS = ("case", "us", "spread", "copy", "jnp", "best", "other")
_WIDTHS = (50, 9, 7, 5, 7, 7, 7)  # at most 100 columns, with the mark at the end


def progress(row: Row) -> str:
    """Returns the line of a row; ratios are the rival's time divided by ours."""
    if "us" not in row:
        return f"{row['case']} {'ERROR: ' + row['error'] if 'error' in row else 'is right'}"
    others = [us / row["us"] for us in results.numbers(row["others"]).values()]
    best = results.best(row) or ("", None)
    times = map(microseconds, (row["us"], row["iqr"]))
    copy = percent(row["copy"] / row["us"] if "copy" in row and row["bytes"] else None)
    ratios = map(ratio, (results.as_written(row), best[1], min(others, default=None)))
    return aligned([row["case"], *times, copy, *ratios]) + " <" * results.is_slower(row)


def aligned(cells: Sequence[str]) -> str:
    name, *numbers = (c[-w:].rjust(w) for c, w in zip(cells, _WIDTHS, strict=True))
    return " ".join([name.lstrip().ljust(_WIDTHS[0]), *numbers])


def notes(header: Row, rows: Sequence[Row]) -> list[str]:
    """Explains the columns, and lists the rivals that are missing, failed or disagree."""
    lines = [
        "copy: share of a plain copy's bandwidth. Then times over ours: jnp as users write it,",
        "XLA's best form, the fastest other library or variant. <: XLA's best is faster.",
    ]
    lines += [f"the copy is {header['ceiling']}"] if "ceiling" in header else []
    lines += [f"missing: {name}: {why}" for name, why in header.get("missing", {}).items()]
    for row in rows:
        rivals = {**row.get("xla", {}), **row.get("others", {})}
        said = [f"{name}: {us}" for name, us in rivals.items() if isinstance(us, str)]
        said += [f"{name} differs from ours, which is right" for name in row.get("disagree", [])]
        lines += [f"{row['case']}: {text}" for text in said]
    return lines
