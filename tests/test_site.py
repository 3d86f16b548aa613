"""The site, which `make docs` builds: every public name, and drawings that are of the sources."""

import re
import runpy
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native, _scatter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = sorted((DOCS / "images" / "kernels").glob("*.svg"))


def test_every_public_name_is_documented_once():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = Counter(
        re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", pages, re.M)
    )
    assert documented == Counter(jof.__all__)


def test_drawings_are_what_the_script_draws(tmp_path):
    runpy.run_path(str(DOCS / "drawings.py"))["main"](tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {path.name: path.read_text() for path in IMAGES} == drawn, "run python docs/drawings.py"


def test_every_drawing_is_shown_once():
    page = (DOCS / "how-kernels-work.md").read_text()
    shown = Counter(re.findall(r"^!\[.+\]\(images/kernels/(.+)\)$", page, re.M))
    assert shown == Counter(path.name for path in IMAGES)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_texts_are_within_the_drawing(path):
    """In DejaVu Sans, which is wider than what browsers take for the fonts that are named."""
    font_manager = pytest.importorskip("matplotlib.font_manager")
    from matplotlib.textpath import TextToPath

    svg = ElementTree.parse(path).getroot()
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        weight = text.get("font-weight", "normal")
        font = font_manager.FontProperties(
            family="DejaVu Sans", size=float(text.get("font-size")), weight=weight
        )
        width, _, _ = TextToPath().get_text_width_height_descent(text.text, font, ismath=False)
        share = {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        left = float(text.get("x")) - share * width
        assert left >= 4, text.text
        assert left + width <= int(svg.get("width")) - 4, text.text
        assert 0 < float(text.get("y")) < int(svg.get("height")) - 4, text.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("csrc/common/pack.h", "kPackBytes = 16;"),
        ("csrc/cuda/launch.cuh", "kBlockSize = 256;"),
        ("csrc/cuda/launch.cuh", "kPrefetchDistance = 512;"),
        ("csrc/cuda/elementwise.cuh", "kThreads = kNarrows ? 1024 : kBlockSize;"),
        ("csrc/cuda/scatter.h", "kPrivateBytes = 160 * 1024;"),
        ("csrc/cuda/scatter_private.cu", "kThreads = 1024, kWarp = 32;"),
        ("csrc/cuda/scatter_private.cu", "sizeof(T) == 8 || sizeof(Index) == 8 ? 4 : 8;"),
        ("csrc/cuda/scatter_atomic.cu", "kItems = 8, kHot = 4;"),
        ("csrc/cuda/scatter_sorted.cu", "kItems = 16;"),
        ("csrc/cuda/gather_rows.cu", "kItems = 4;"),
        ("csrc/cuda/upsample_nearest2d.cu", "kSharedBytes = 24 * 1024,"),
        ("csrc/cuda/upsample_nearest2d.cu", "kBatch = kPack == 1 ? 1 : 3;"),
        ("csrc/cuda/permute_tiles.cu", "kIn = 256, kOut = 256;"),
        ("csrc/ops/permute_plan.h", "kShortestRow = 64;"),
    ],
)
def test_constants_are_those_that_the_drawings_show(source, text):
    assert text in (ROOT / source).read_text(), "redraw docs/drawings.py, and change the page"


def test_rules_are_those_that_the_page_has():
    assert (_scatter._PRIVATE_BYTES, _scatter._PRIVATE_ORDERED_BYTES) == (160 << 10, 16 << 10)
    assert (_scatter._PRIVATE_PARTS, _scatter._PRIVATE_HITS) == (128, 64)
    assert (_scatter._PRIVATE_UPDATES, _scatter._PRIVATE_ROW_ELEMENTS) == (2048, 4 << 20)
    assert (_scatter._WIDE_ROW_BYTES, _scatter._SORT_BYTES) == (32, 4 << 20)
    assert (_scatter._ELEMENT_CHUNK, _scatter._ROW_CHUNK) == (4096, 128)
    assert (_scatter._FEW_UPDATES, _scatter._SCRATCH_ROWS) == (8192, 16)


@pytest.mark.parametrize(
    ("shape", "axes", "strategy", "merged"),
    [
        ((32, 224, 224, 64), (0, 3, 1, 2), "tile", [32, 64, 50176]),
        ((64, 32, 4), (1, 0, 2), "tile", [32, 64]),
        ((32, 3, 224, 224), (0, 2, 3, 1), "interleave", [32, 50176, 3]),
    ],
)
def test_plans_are_those_that_are_drawn(shape, axes, strategy, merged):
    plan = _native.permute_plan(shape, axes, 4)
    assert (plan["strategy"], plan["shape"]) == (strategy, merged)
