"""The diff in docs/adding-an-op.md applies to these sources; what the documents name exists."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-an-op.md"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def the_diff() -> str:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return diff


def files_of(diff: str) -> list[str]:
    return re.findall(r"^--- a/(\S+)$", diff, re.MULTILINE)


def checker() -> list[str]:
    """A command that reads a diff and fails where it does not apply to the current directory."""
    if shutil.which("git"):
        return ["git", "apply", "--check", "-"]
    if shutil.which("patch"):
        return ["patch", "--dry-run", "--force", "--fuzz=0", "-p1"]
    pytest.skip("neither git nor patch is here")


def check(diff: str) -> subprocess.CompletedProcess:
    """Checks copies: in a repository of another root git would pass over the files and succeed."""
    with tempfile.TemporaryDirectory() as directory:
        for name in files_of(diff):
            copy = Path(directory, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environment["GIT_CEILING_DIRECTORIES"] = str(Path(directory).parent)
        return subprocess.run(
            checker(), input=diff, cwd=directory, env=environment, capture_output=True, text=True
        )


def test_the_diff_applies():
    result = check(the_diff())
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_diff_that_does_not_apply_is_noticed():
    diff = re.sub(r"^ (.*softplus.*)$", r" \1 changed", the_diff(), flags=re.MULTILINE)
    assert check(diff).returncode != 0


def test_an_op_takes_few_lines_in_few_places():
    lines = the_diff().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++ ")]
    removed = [line for line in lines if line.startswith("-") and not line.startswith("--- ")]
    assert len(added) <= 35
    assert not removed
    assert files_of(the_diff()) == [
        "csrc/ops/elementwise.h",
        "csrc/ops/elementwise_ops.h",
        "jax_oneflow_ops/__init__.py",
        "jax_oneflow_ops/elementwise.py",
        "tests/cases.py",
    ]


def test_figures_are_those_of_the_comments():
    _, _, section = PAGE.read_text().partition("## Inside the template\n")
    comments = "".join(
        (ROOT / "csrc" / "cuda" / name).read_text() for name in ("elementwise.cuh", "launch.cuh")
    )
    figures = set(re.findall(r"\d\.\d\d\b", section))
    assert figures
    assert figures <= set(re.findall(r"\d\.\d\d\b", comments))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_exist(document):
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    for path in re.findall(
        r"`((?:csrc|tests|benchmarks|docs|examples|jax_oneflow_ops)/[^`\s]*)`", text
    ):
        assert [*ROOT.glob(path.rstrip("/"))], path


def test_tables_are_current():
    """`python -m tests.tables` writes them."""
    assert tables.README.read_text() == tables.updated(tables.README.read_text())


def test_a_table_that_is_not_current_is_noticed():
    text = re.sub("^.*`relu`.*✓.*\n", "", tables.README.read_text(), flags=re.MULTILINE)
    assert text != tables.README.read_text()
    assert tables.updated(text) == tables.updated(tables.README.read_text())
