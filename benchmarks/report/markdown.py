"""Pieces of Markdown, and how numbers are written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SLOWER = "▼"
SLOWER_NOTE = f"{SLOWER} ours is slower, by more than the spread of the samples."


def table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head. Lines may be shorter than that."""
    width = len(lines[0])
    head, *body = (f"| {' | '.join([*line, *[''] * (width - len(line))])} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * width, *body])


def bullets(texts: Sequence[str]) -> str:
    """A list without repetitions."""
    return "\n".join(f"- {text}" for text in dict.fromkeys(texts))


def folded(title: str, content: str) -> str:
    """Content that a click unfolds."""
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def joined(parts: Sequence[str]) -> str:
    """Paragraphs; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def times(ratios: Sequence[float]) -> str:
    """The geometric mean, such as ``1.50x``."""
    if not ratios:
        return "-"
    mean = _mean(ratios)
    return f"{mean:.2f}x" if mean < 10 else f"{mean:.1f}x" if mean < 100 else f"{mean:,.0f}x"


def percent(shares: Sequence[float]) -> str:
    """The geometric mean."""
    return f"{_mean(shares):.0%}" if shares else "-"


def _mean(values: Sequence[float]) -> float:
    """Geometric; a single value is not rounded."""
    return values[0] if len(values) == 1 else statistics.geometric_mean(values)


def microseconds(us: float | None) -> str:
    """With as many digits as mean something."""
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def rate_unit(platform: str) -> tuple[str, float]:
    """The unit that rates are shown in, and how many of it a TB/s has."""
    return ("GB/s", 1e3) if platform == "cpu" else ("TB/s", 1.0)
