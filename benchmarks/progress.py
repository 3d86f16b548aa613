"""What a run prints: a line for each case as it is measured, and notes at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from . import environment, results
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
    lines += [f"{when}: {header[when]}" for when in ("clocks", "clocks_after") if header.get(when)]
    return lines + [f"WARNING: {warning}" for warning in header.get("warnings", [])]


def clocks_at_work(platform: str) -> dict[str, Any] | None:
    """Returns a GPU's clocks while it works."""
    if platform != "gpu":
        return None
    import jax
    import jax.numpy as jnp

    negate, x = jax.jit(jnp.negative), jnp.zeros(16 << 20)

    def work_until(done: Callable[[], bool]) -> None:
        y = x
        while not done():
            for _ in range(16):
                y = negate(y)
            jax.block_until_ready(y)

    begin = time.perf_counter()
    work_until(lambda: time.perf_counter() - begin > WARM_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(environment.clocks)
        work_until(reading.done)
    return reading.result()


WARM_SECONDS = 0.3
