"""Choosing rows of results, and numbers from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..cases import SWEEP

Result = dict[str, Any]
Row = dict[str, Any]


def main_rows(result: Result) -> list[Row]:
    """All but those of a sweep through sizes, which no mean is taken over."""
    return [row for row in result["rows"] if row["group"] != SWEEP]


def measured(rows: Iterable[Row]) -> list[Row]:
    """All but those that failed."""
    return [row for row in rows if "error" not in row]


def having(rows: Iterable[Row], **values: str) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def by(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows of each key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def rivals(rows: Iterable[Row]) -> list[str]:
    """The names in their order, PyTorch's last."""
    names = dict.fromkeys(name for row in rows for name in row.get("rivals", {}))
    return sorted(names, key=lambda name: name.startswith("torch"))


def ratios(rows: Iterable[Row], rival: str) -> list[float]:
    """The rival's time over ours, where it ran."""
    known = (row["rivals"].get(rival, {}).get("ratio") for row in rows)
    return [ratio for ratio in known if ratio is not None]


def best(rows: Iterable[Row]) -> list[float]:
    """The best jnp formulation's time over ours."""
    return [row["ratio"] for row in rows if "ratio" in row]


def of_copy(rows: Iterable[Row]) -> list[float]:
    """Shares of a copy's bandwidth."""
    return [row["of_copy"] for row in rows if "of_copy" in row]


def is_slower(row: Row) -> bool:
    """Than the best jnp formulation, by more than the spread of the samples."""
    return bool(row.get("ratio", 1) < 1 and not row["within_noise"])
