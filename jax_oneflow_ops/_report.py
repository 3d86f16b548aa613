"""What `explain` returns."""

import dataclasses
import html
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of a program that this package could run.

    Attributes:
      line: where the program has it, or has what it is the gradient of.
      operation: JAX's name of it.
      shapes: of its operand, indices and updates, or of whatever it has.
      dtype: of its operand.
      swapped: whether it runs as a kernel of this package.
      reason: why, or what to do.
      bytes: what it has to read and write, each array once.
      count: how often the compiled program has it; loops count once.
      native_us: the time expected of the kernel in microseconds, if anything like it was measured.
      xla_us: likewise of XLA.
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
    """The operations of a program that this package could run; printed, it is a table.

    Attributes:
      platform: that the program was lowered for.
      rows: a list of :class:`Row`, in the order of the program.
    """

    def __init__(self, platform: str, rows: Sequence[Row]) -> None:
        self.platform = platform
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def total(self) -> str:
        """One line about all of them."""
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
            text += f"; {_time(ours)} expected of the measured ones, {_time(xla)} of XLA"
        return text

    def _cells(self) -> list[list[str]]:
        head = ["where", "operation", "updates -> result", "runs", "native", "XLA", "why"]
        cells = [head]
        for row in self.rows:
            times = f"{row.count} x " if row.count > 1 else ""
            shapes = " -> ".join(map(_shape, (row.shapes[-1], row.shapes[0])))
            runs = "native" if row.swapped else "XLA"
            expected = (_time(row.native_us), _time(row.xla_us))
            what = f"{row.dtype} {shapes}"
            cells.append([row.line, times + row.operation, what, runs, *expected, row.reason])
        return cells

    def table(self, width: int) -> str:
        """The table as text of at most so many columns, as far as that can be."""
        if not self.rows:
            return self.total()
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        gaps = 2 * (len(widths) - 1)
        # A reason that does not fit stands below its operation. If that is not enough, the longest
        # columns give way: where it is (its end is kept) and what it is.
        below = sum(widths) + gaps > width
        if below:
            widths.pop()
        while below and sum(widths) + gaps - 2 > width:
            i = max((0, 2), key=lambda i: widths[i])
            if widths[i] <= 12:
                break
            widths[i] -= 1
        lines = []
        for line in cells:
            columns = enumerate(zip(line, widths, strict=not below))
            fitted = [_fit(cell, width, i == 0) for i, (cell, width) in columns]
            lines.append("  ".join(fitted).rstrip())
            if below:
                reason = textwrap.wrap(line[-1], width - 4) if line is not cells[0] else []
                lines += ["    " + part for part in reason]
        return "\n".join([*lines, *textwrap.wrap(self.total(), width)])

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


def bytes_text(n: int) -> str:
    """A number of bytes, for people."""
    power = min(3, max(0, n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"
