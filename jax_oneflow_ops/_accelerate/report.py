"""The report that `explain` returns."""

import dataclasses
import html
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from jax_oneflow_ops._policy import bytes_text


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation of a program that this package could run.

    Attributes:
      line: the file and line in your program; for a gradient, those of the differentiated code.
      operation: JAX's name for it.
      shapes: the shapes of operand, indices and updates, of edges and queries, or of the result and
        the operand.
      dtype: the dtype of the operand.
      swapped: whether it runs as a kernel of this package.
      reason: why, or which function to call instead.
      bytes: the number of bytes that it must read and write, counting each array once.
      count: how often the compiled program contains it; the body of a loop counts once.
      native_us: the expected time of the kernel in microseconds, None if nothing like it was
        measured.
      xla_us: the expected time of XLA, or None.
    """

    line: str
    operation: str
    shapes: tuple[tuple[Any, ...], ...]
    dtype: str
    swapped: bool
    reason: str
    bytes: int
    count: int = 1
    native_us: float | None = None
    xla_us: float | None = None


class Report:
    """The operations of a program that this package could run. Printed, it is a table.

    Attributes:
      platform: the platform or device that the program was lowered for.
      rows: a list of :class:`Row`, in the order of the program.
    """

    def __init__(self, platform: str, rows: Sequence[Row]) -> None:
        self.platform = platform
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def total(self) -> str:
        """A one-line summary."""
        swapped = [row for row in self.rows if row.swapped]
        calls = sum(row.count for row in swapped)
        others = sum(row.count for row in self.rows) - calls
        text = f"{calls} swapped on {self.platform}, {others} not"
        if swapped:
            text += f"; {bytes_text(sum(row.bytes * row.count for row in swapped))}"
        timed = [row for row in swapped if row.native_us is not None and row.xla_us is not None]
        if timed:
            ours, xla = (
                sum((getattr(row, name) or 0.0) * row.count for row in timed)
                for name in ("native_us", "xla_us")
            )
            text += f"; expected where measured: {_time(ours)} native, {_time(xla)} XLA at best"
        return text

    def _cells(self) -> list[list[str]]:
        head = ["where", "operation", "updates -> result", "runs", "native", "XLA", "why"]
        cells = [head]
        for row in self.rows:
            times = f"{row.count} x " if row.count > 1 else ""
            shapes = " -> ".join(map(_shape, (row.shapes[-1], row.shapes[0])))
            runs = "native" if row.swapped else "XLA"
            expected = (_time(row.native_us), _time(row.xla_us))
            what = f"{row.dtype.replace('float', 'f')}{shapes}"
            cells.append([row.line, times + row.operation, what, runs, *expected, row.reason])
        return cells

    def table(self, width: int) -> str:
        """The table as text, at most `width` characters wide if that is possible."""
        if not self.rows:
            return (
                f"{self.total()}: the program has none of the operations that accelerate swaps, "
                "such as segment sums and the gradients of lookups"
            )
        cells = self._cells()
        reasons = list(dict.fromkeys(row.reason for row in self.rows))
        for line, row in zip(cells[1:], self.rows, strict=True):
            line[-1] = f"({reasons.index(row.reason) + 1})"

        def widths_of(cells: list[list[str]]) -> list[int]:
            return [max(map(len, column)) for column in zip(*cells, strict=True)]

        space = width - 2 * (len(cells[0]) - 1)
        if sum(widths_of(cells)) > space:  # drop folders first, then shorten the longest columns
            cells = [[line[0].rpartition("/")[2], *line[1:]] for line in cells]
        widths = widths_of(cells)
        while sum(widths) > space and max(widths[0], widths[2]) > 12:
            widths[0 if widths[0] > widths[2] else 2] -= 1
        lines = []
        for line in cells:
            columns = enumerate(zip(line, widths, strict=True))
            fitted = [_fit(cell, width, i == 0) for i, (cell, width) in columns]
            lines.append("  ".join(fitted).rstrip())
        notes = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
        for note in (*notes, self.total()):
            lines += textwrap.wrap(note, width, subsequent_indent="    ")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table(max(80, shutil.get_terminal_size((120, 24)).columns))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        head, *body = self._cells()
        table = line(head, "th") + "".join(line(cells, "td") for cells in body)
        return f"<table>{table}</table><p>{html.escape(self.total())}</p>"


def _fit(text: str, width: int, keep_end: bool) -> str:
    if len(text) <= width:
        return text.ljust(width)
    return "…" + text[len(text) - width + 1 :] if keep_end else text[: width - 1] + "…"


def _shape(shape: Sequence[Any]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"
