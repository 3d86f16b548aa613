"""The site, which `make docs` builds: every public name, and few and small drawings."""

import re
from collections import Counter
from pathlib import Path

import jax_oneflow_ops as jof

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = sorted((DOCS / "images").rglob("*.svg"))


def test_every_public_name_is_documented_once():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = Counter(
        re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", pages, re.M)
    )
    assert documented == Counter(jof.__all__)


def test_every_drawing_is_shown_once():
    pages = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    shown = Counter(re.findall(r"^!\[.+\]\((?:\.\./)?(images/.+)\)$", pages, re.M))
    assert shown == Counter(str(path.relative_to(DOCS)) for path in IMAGES)
    assert len(IMAGES) <= 12
    assert max(path.stat().st_size for path in IMAGES) < 60_000
