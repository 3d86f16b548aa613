"""Tables, in plain text and in Markdown, and how numbers are written in them."""

from collections.abc import Sequence

Line = Sequence[str]


def text(head: Line, lines: Sequence[Line]) -> str:
    """Returns an aligned table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    padded = (
        "  ".join(
            [
                f"{line[0]:{widths[0]}}",
                *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for line in (head, *lines)
    )
    return "\n".join(padded)


def markdown(head: Line, lines: Sequence[Line]) -> str:
    """Returns a Markdown table."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def ratio(value: float | None) -> str:
    """Such as ``1.50x``."""
    if value is None:
        return "-"
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"


def percent(value: float | None) -> str:
    """Such as ``98%``."""
    return "-" if value is None else f"{value:.0%}"


def microseconds(us: float | None) -> str:
    """With three significant digits or more."""
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def size(nbytes: int) -> str:
    """Such as ``64 MiB``."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.3g} {unit}"
    return f"{nbytes} B"
