"""Which document holds what: all that ``python -m benchmarks report`` writes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import environment
from . import articles, headline
from .markdown import joined, table
from .provenance import chip, provenance, remarks
from .rows import Result
from .suites import SUITES, slower, sweeps, tables
from .training import ABOUT, TITLE, training

_NOTICE = "<!-- Written by `python -m benchmarks report` from benchmarks/results. Do not edit. -->"
_PAGES = Path("docs/benchmarks")


def main(argv: Sequence[str]) -> int:
    """Writes the documents, or checks that they are what the results say."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report",
        description="Write README's tables, docs/benchmarks and docs/articles.md from the results.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any is stale")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[2], help="of the repository"
    )
    options = parser.parse_args(argv)
    root: Path = options.root

    try:
        wanted = documents(root)
    except MissingMarkers as error:
        sys.exit(f"README.md: {error}")
    stale = [
        path
        for path, text in wanted.items()
        if not (root / path).exists() or (root / path).read_text() != text
    ]
    surplus = [p for p in sorted((root / _PAGES).glob("*.md")) if p.relative_to(root) not in wanted]
    if options.check and (stale or surplus):
        names = ", ".join(str(path) for path in (*stale, *(p.relative_to(root) for p in surplus)))
        sys.exit(f"stale: {names}; run python -m benchmarks report")
    for path in stale:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(wanted[path])
        print(f"wrote {path}")
    for path in surplus:
        path.unlink()
        print(f"removed {path.relative_to(root)}")
    return 0


def documents(root: Path) -> dict[Path, str]:
    """The text of every document, by its path from the root of the repository."""
    results = read(root)
    readme = (root / "README.md").read_text()
    for name, content in headline.section(results).items():
        readme = insert(readme, name, content)
    pages = {Path("README.md"): readme, Path("docs/articles.md"): _whole(articles.page(results))}
    for name in _names(results):
        pages[_PAGES / f"{name}.md"] = _whole(_page(name, _of(results, name), root))
    pages[_PAGES / "index.md"] = _whole(_index(results))
    return pages


def read(root: Path) -> list[Result]:
    """All committed results: those of GPUs first, those of CPUs last."""
    results = [
        json.loads(file.read_text())
        for file in sorted((root / "benchmarks" / "results").glob("*/*.json"))
    ]
    return sorted(results, key=lambda result: bool(result["environment"]["platform"] == "cpu"))


class MissingMarkers(Exception):
    """README has no place for a table."""


def insert(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = (f"<!-- benchmarks:{name} {word} -->" for word in ("begin", "end"))
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise MissingMarkers(f"expected one pair of the markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def _whole(text: str) -> str:
    return f"{_NOTICE}\n\n{text}\n"


def _name(result: Result) -> str:
    """Of the page: examples that train share one."""
    return "training" if "runs" in result else str(result["suite"])


def _of(results: Sequence[Result], name: str) -> list[Result]:
    return [result for result in results if _name(result) == name]


def _names(results: Sequence[Result]) -> list[str]:
    """The pages in the order of the index: known suites have one before they have results."""
    return [*dict.fromkeys([*SUITES, "training", *map(_name, results)])]


def _title(name: str) -> tuple[str, str]:
    """And what the page is about."""
    if name == "training":
        return TITLE, ABOUT
    suite = SUITES.get(name)
    return (suite.title, suite.about) if suite else (name, "")


def _page(name: str, results: Sequence[Result], root: Path) -> str:
    title, about = _title(name)
    parts = [f"# {title}", about, "" if results else "Not measured yet."]
    for result in results:
        device = chip(result["environment"])
        if "runs" in result:
            parts += [f"## {result['suite'].capitalize()} on {device}", training(result)]
            continue
        parts += [f"## {device}", provenance(result), *_charts(result, root), *tables(result)]
        parts += [slower(result["rows"]), sweeps(result), remarks(result)]
        parts.append(_command(result))
    return joined(parts)


def _charts(result: Result, root: Path) -> list[str]:
    """Those that ``python -m benchmarks plot`` drew of it."""
    slug = environment.slug(result["environment"])
    images = root / "docs" / "images"
    stems = {p.stem for p in images.glob(f"{result['suite']}*-{slug}.svg")}
    return [f"![{stem.replace('-', ' ')}](../images/{stem}.svg)" for stem in sorted(stems)]


def _command(result: Result) -> str:
    return f"`python -m benchmarks --suite {result['suite']}` measures it on your machine."


def _index(results: Sequence[Result]) -> str:
    lines = [["", "on"]]
    for name in _names(results):
        devices = dict.fromkeys(chip(result["environment"]) for result in _of(results, name))
        lines.append([f"[{_title(name)[0]}]({name}.md)", "; ".join(devices) or "not measured yet"])
    return joined(
        [
            "# Benchmarks",
            "Times are medians: on GPUs the device time of the kernels (CUPTI), on CPUs wall time. "
            "Inputs are fresh and rotated beyond the cache, ours and the rivals run in turns, and "
            "every result is checked. Ratios are the rival's time over ours: above 1, ours is "
            "faster. `of copy` is the bandwidth against that of a plain copy kernel for the same "
            "number of bytes. `best jnp` is the fastest of the jnp formulations of each case. "
            "The machines of the CPUs are shared, and the spread there is wide.",
            table(lines),
            "`python -m benchmarks` measures everything on your machine (`--help` says what may be "
            "left out), `python -m benchmarks report` writes these pages from the results, "
            "and `python -m benchmarks plot` draws the charts.",
            "\n".join(["```{toctree}", ":hidden:", "", *_names(results), "```"]),
        ]
    )
