"""``python -m benchmarks plot FILE...``: charts of results.

Bars are the bandwidth that ours achieves, marks that of its rivals, and a black tick that of a copy
of as many bytes. Every chart is written as PNG and SVG. ``--docs`` writes those of the committed
results that the documentation shows, ``--check`` fails where they show other numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..report.pages import read
from .contents import Figure, figures

__all__ = ["Figure", "figures", "main", "stale"]

_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    """Draws, or checks what was drawn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="results (default: all committed ones)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/plots"), metavar="DIR")
    parser.add_argument("--docs", action="store_true", help="write docs/images of all results")
    parser.add_argument("--check", action="store_true", help="fail if docs/images is stale")
    options = parser.parse_args(argv)
    if (options.docs or options.check) and options.files:
        parser.error("--docs and --check are about all committed results")
    results = [json.loads(file.read_text()) for file in options.files] or read(_ROOT)
    drawn = figures(results)
    images = _ROOT / "docs" / "images"
    if options.check:
        if names := stale(drawn, images):
            sys.exit(f"stale: {', '.join(sorted(names))}; run python -m benchmarks plot --docs")
        return 0
    if not drawn and not all("runs" in result for result in results):
        sys.exit("no row of these results has times: nothing to draw")

    from .drawing import save

    if options.docs:
        for name in stale(drawn, images) - {figure.name for figure in drawn}:
            (images / f"{name}.svg").unlink()
            print(f"removed {name}.svg")
        for figure in drawn:
            save(figure, images, ("svg",))
        print(f"wrote {len(drawn)} pictures")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        save(figure, options.out, ("svg", "png"))
        print(f"wrote {figure.name}.svg and {figure.name}.png")
    return 0


def stale(drawn: Sequence[Figure], images: Path) -> set[str]:
    """The pictures that are missing, of other numbers, or of no result any more.

    A picture says in its metadata what it was drawn of, because another matplotlib draws other
    lines. Pictures that do not are none of ours.
    """
    there = {}
    for file in images.glob("*.svg"):
        if found := re.search(r"<dc:identifier>data:(\w+)</dc:identifier>", file.read_text()):
            there[file.stem] = found[1]
    wanted = {figure.name: figure.digest for figure in drawn}
    return {name for name in there | wanted if there.get(name) != wanted.get(name)}
