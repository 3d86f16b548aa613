"""The documents' tables of test coverage, generated from the parameters of the tests.

`python -m tests.tables [--check]` writes them between their markers.
"""

import argparse
import re
import sys
from pathlib import Path

from tests import shardings, test_export, test_transforms
from tests.catalogue import CASES, EACH_KIND, Case

DOCS = Path(__file__).parents[1] / "docs"


SHARED = "tested on another function whose rules this one shares"


def transformations() -> str:
    """The table of transformations: rows are functions, columns are groups of test columns."""
    cells = [(case, c.group, c.name, c.reason(case)) for case, c in test_transforms.cells()]
    cells += [(case, *column, None) for case in EACH_KIND for column in test_export.COLUMNS]
    groups: dict[str, dict[str, None]] = {c.group: {} for c in test_transforms.COLUMNS.values()}
    for _, group, name, _ in cells:
        groups.setdefault(group, {})[name] = None
    footnotes: list[str] = []

    def mark(case, group) -> str:
        reasons = [reason for c, g, _, reason in cells if c is case and g == group]
        notes = sorted({*reasons} - {None}) if reasons else [SHARED]
        footnotes.extend(note for note in notes if note not in footnotes)
        numbers = ", ".join(str(1 + footnotes.index(note)) for note in notes)
        return ("✓" if None in reasons or not reasons else "") + (
            f"<sup>{numbers}</sup>" if notes else ""
        )

    full = sorted((case for case in CASES if not case.variant), key=lambda case: case.function)
    rows = [[label(case), *(mark(case, group) for group in groups)] for case in full]
    variants = len(CASES) - len(full)
    run = sum(reason is None for *_, reason in cells)
    return "\n".join(
        [
            f"| | {' | '.join(groups)} |",
            f"|---|{':-:|' * len(groups)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            *(f"<sup>{i}</sup> {note}.  " for i, note in enumerate(footnotes, 1)),
            "",
            f"<details><summary>{run} tests: these, and {variants} variants (scalar operands, "
            "other formulas and modes)</summary>",
            "",
            *(
                f"- {group}: {', '.join(name.replace('_', ' ') for name in names)}"
                for group, names in groups.items()
            ),
            "",
            "</details>",
        ]
    )


def label(case: Case) -> str:
    return f"`{case.function}`" + (f", {case.kernel}" if case.kernel else "")


TABLES = {"transformations": transformations, "sharding": shardings.table}
"""The table of the page of that name."""


def page(name: str) -> Path:
    return DOCS / f"{name}.md"


def updated(name: str, text: str) -> str:
    """The page's `text` with the current table between its markers."""
    begin, end = f"<!-- tests:{name} begin -->", f"<!-- tests:{name} end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"{page(name)} lacks {begin} ... {end}"
    return pattern.sub(lambda _: f"{begin}\n{TABLES[name]()}\n{end}", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where they are not current")
    check = parser.parse_args().check
    stale = 0
    for name in TABLES:
        text = page(name).read_text()
        if updated(name, text) != text:
            stale += 1
            if not check:
                page(name).write_text(updated(name, text))
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
