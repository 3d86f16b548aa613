"""Results as JSON lines: a header that describes their origin, and then one line per case.

A row has the suite, the case, its op, group, dtype, shape and bytes; ``us`` and ``iqr``, the median
and the interquartile range of our times in microseconds; ``copy``, the time of a plain copy of as
many bytes; ``xla``, the medians of the jnp forms, with the form that users write first; and
``others``, the medians of other libraries and of our variants. A rival that failed has its error
message instead of a time. A case that failed has ``error``. Files leave out the fields that follow
from the case's name, and lines of surveys are `packed`; `survey.read` restores them.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Result(NamedTuple):
    """A header and the rows that were measured together."""

    header: dict[str, Any]
    rows: list[Row]


def write(path: Path, header: dict[str, Any], rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header, *(rows if "suite" in header else packed(rows))]
    texts = [json.dumps(x, separators=(",", ":"), ensure_ascii=False) for x in lines]
    path.write_text("\n".join(texts) + "\n")


def read(path: Path) -> Result:
    """Reads a result; raises ValueError if the file does not contain one."""
    try:
        header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(header, dict) or not {"device", "date"} <= header.keys():
        raise ValueError(f"{path} is not a result of `python -m benchmarks`")
    return Result(header, rows)


def figure(us: float, digits: int = 4) -> float:
    """A time with four significant digits, or a spread with two: more are noise."""
    return float(f"{us:.{digits}g}")


def numbers(medians: dict[str, Any]) -> dict[str, float]:
    """Returns the medians of the rivals that ran."""
    return {name: us for name, us in medians.items() if isinstance(us, int | float)}


def best(row: Row) -> tuple[str, float] | None:
    """Returns XLA's best form, and its time divided by ours: above 1, ours is faster."""
    ratios = {name: us / row["us"] for name, us in numbers(row.get("xla", {})).items()}
    return min(ratios.items(), key=lambda pair: pair[1], default=None)


def as_written(row: Row) -> float | None:
    """Returns the time of the first form, the call as users write it, divided by ours."""
    return rival(row, {"cast": "astype", "upsample": "resize"}.get(row["suite"], "jnp"))


def rival(row: Row, name: str) -> float | None:
    """Returns the time of a form or of another library, divided by ours."""
    us = numbers({**row.get("xla", {}), **row.get("others", {})}).get(name)
    return None if us is None else us / row["us"]


def without(told: dict[str, Row], row: Row) -> Row:
    """A row without the fields that follow from its case, but with the case's name."""
    known = told.get(row["case"], {})
    return {k: v for k, v in row.items() if k == "case" or k not in known or known[k] != v}


def packed(rows: Iterable[Row]) -> list[Any]:
    """Lines without the fields that drawing the cases again restores. Errors are unchanged.

    A line has the case, the time of native kernels and its spread, and the times of XLA's best
    form, of the default, and of the `form` that the default may run instead of kernels.
    """
    lines: list[Any] = []
    for row in rows:
        name = f"{row['suite']} {row['case']}"
        if "us" in row:
            xla = min(numbers(row["xla"]).values(), default=None)
            default = numbers(row["others"]).get("default")
            times = (row["us"], row["iqr"], xla, default, form(row))
            lines.append([name, *(us and figure(us) for us in times)])
        else:
            lines.append(row)
    return lines


def form(row: Row) -> float | None:
    """The time of the form that the default may run instead of kernels.

    That is "xla" if it was measured together with the kernels. Otherwise it is jnp in float32 for
    sums, and the fastest form for others, which the default may not have.
    """
    forms, own = numbers(row["xla"]), numbers(row["others"]).get("xla")
    if row.get("form") is not None:
        return float(row["form"])
    if own is not None:
        return own
    if row["suite"] == "scatter":
        return forms.get("jnp f32", forms.get("jnp"))
    return min(forms.values(), default=None)


def is_slower(row: Row, below: float = 1.0) -> bool:
    """Returns whether XLA's best is faster than ours by more than the spread of the samples."""
    found = best(row)
    return found is not None and found[1] < below and (1 - found[1]) * row["us"] > row["iqr"]


def mean(ratios: Iterable[float | None]) -> float | None:
    """Returns the geometric mean of the ratios that are known."""
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


def by(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Groups rows by some of their fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups
