"""What a run prints: a line for each case as it is measured, and notes at the end."""

import sys
from collections.abc import Sequence

from tqdm import tqdm

from . import results
from .results import Row
from .tables import microseconds, percent, ratio

_NAME = 50  # a line has at most 100 columns


class Table:
    """The plain-text table; ratios are the rival's time over ours."""

    def __init__(self, longest: int) -> None:
        self._width = min(longest, _NAME)

    def header(self) -> str:
        """The names of the columns."""
        return self._line("case", ("us", "spread", "copy", "jnp", "best", "other"))

    def print(self, row: Row) -> None:
        """Prints a row above the progress bar."""
        tqdm.write(self.line(row), file=sys.stdout)
        sys.stdout.flush()

    def line(self, row: Row) -> str:
        """One row."""
        if "error" in row:
            return f"{row['case']} ERROR: {row['error']}"
        if "us" not in row:
            return f"{row['case']} is right"
        best = results.best(row)
        others = [us / row["us"] for us in results.numbers(row["others"]).values()]
        share = row["copy"] / row["us"] if "copy" in row and row["bytes"] else None
        cells = [
            microseconds(row["us"]),
            microseconds(row["iqr"]),
            percent(share),
            ratio(results.as_written(row)),
            ratio(best and best[1]),
            ratio(min(others, default=None)),
        ]
        return self._line(row["case"], cells) + (" <" if results.is_slower(row) else "")

    def _line(self, name: str, cells: Sequence[str]) -> str:
        widths = (9, 7, 5, 7, 7, 7)
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"{name[-self._width :]:{self._width}} {' '.join(padded)}"


def notes(header: Row, rows: Sequence[Row]) -> list[str]:
    """What the columns mean, which rivals are missing, failed or disagree, and warnings."""
    lines = [
        "copy: share of a plain copy's bandwidth. Then times over ours: jnp as users write it,",
        "XLA's best form, the fastest other library or variant. <: XLA's best is faster.",
    ]
    lines += [f"missing: {name}: {why}" for name, why in header.get("missing", {}).items()]
    for row in rows:
        for name, us in {**row.get("xla", {}), **row.get("others", {})}.items():
            if isinstance(us, str):
                lines.append(f"{name} on {row['case']}: {us}")
        for name in row.get("disagree", []):
            lines.append(f"{name} on {row['case']} differs from ours, which passed its check")
        if "again" in row:
            lines.append(f"timed twice: {row['case']}: {row['us']:.2f} and {row['again']:.2f} us")
    lines += [f"clocks: {header['clocks']}"] if header.get("clocks") else []
    return lines + [f"WARNING: {warning}" for warning in header.get("warnings", [])]
