"""The diff in docs/adding-an-op.md applies to these sources; what the documents name exists."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import jax_oneflow_ops as jof
from tests import tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-an-op.md"
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


def the_diff() -> str:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return diff


def files_of(diff: str) -> list[str]:
    return re.findall(r"^--- a/(\S+)$", diff, re.MULTILINE)


def apply(diff: str, directory: Path) -> subprocess.CompletedProcess:
    """Applies the diff to copies of its files.

    GIT_CEILING_DIRECTORIES hides outer repositories, in which git would skip the files and succeed.
    """
    if shutil.which("git"):
        command = ["git", "apply", "-"]
    elif shutil.which("patch"):
        command = ["patch", "--force", "--fuzz=0", "-p1"]
    else:
        pytest.skip("neither git nor patch is here")
    for name in files_of(diff):
        copy = directory / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(directory.parent)
    return subprocess.run(
        command, input=diff, cwd=directory, env=environment, capture_output=True, text=True
    )


def test_the_diff_applies(tmp_path):
    result = apply(the_diff(), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_diff_that_does_not_apply_is_noticed(tmp_path):
    diff = re.sub(r"^ (.*softplus.*)$", r" \1 changed", the_diff(), flags=re.MULTILINE)
    assert apply(diff, tmp_path).returncode != 0


def test_the_function_of_the_diff_runs(tmp_path):
    """Runs the jnp implementation, which does not need compiled kernels."""
    package = tmp_path / "jax_oneflow_ops"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "jax_oneflow_ops", package, ignore=ignored)
    assert apply(the_diff(), tmp_path).returncode == 0
    for module in Path(jof.include_dir()).parent.glob("_c*.so"):
        (package / module.name).symlink_to(module)
    code = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
import jax
import jax_oneflow_ops as jof
f = lambda x: jof.soft_sign(x, implementation="xla").sum()
print(*jax.jit(jax.value_and_grad(f))(jax.numpy.array([3.0])))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.stdout == "0.75 [0.0625]\n", result.stderr


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
        "tests/catalogue.py",
    ]


def test_figures_are_those_of_the_comments():
    _, _, section = PAGE.read_text().partition("## Inside the template\n")
    comments = "".join(
        (ROOT / "csrc" / "cuda" / name).read_text() for name in ("elementwise.cuh", "launch.cuh")
    )
    figures = set(re.findall(r"\d\.\d\d\b", section))
    assert figures
    assert figures <= set(re.findall(r"\d\.\d\d\b", comments))


def prose(document: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub and the site generate for headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def broken(document: Path, root: Path = ROOT) -> list[str]:
    """The broken links and images of a document."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        # The site contains only docs/.
        outside = document.is_relative_to(root / "docs") and not target.is_relative_to(
            root / "docs"
        )
        if outside or not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document):
    assert not broken(document)
    for path in re.findall(
        r"`((?:csrc|tests|benchmarks|docs|examples|jax_oneflow_ops)/[^`\s]*)`", prose(document)
    ):
        assert [*ROOT.glob(path.rstrip("/"))], path


def test_links_that_lead_nowhere_are_noticed(tmp_path):
    (tmp_path / "docs").mkdir()
    page, readme = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    readme.write_text("# `a.b` & c, d\n[it](#ab--c-d) [it](docs/page.md#one)")
    page.write_text("## One\n```\n[code](none.md)\n```\n[self](page.md)\n[web](https://a.b)\n")
    assert broken(page, tmp_path) == broken(readme, tmp_path) == []
    bad = ["none.md", "#two", "page.md#two", "../README.md", "http://a.b", "images/none.svg"]
    page.write_text("## One\n" + "\n".join(f"![it]({link})" for link in bad))
    assert broken(page, tmp_path) == bad


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def unknown(document: Path) -> list[str]:
    """The names in a document's commands that do not exist in this project."""
    blocks = re.findall(r"^```\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    code = re.sub(r"\s+#.*", "", "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", prose(document))]))
    targets = re.search(r"^\.PHONY:((?:\\\n|.)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = []
    for arguments in re.findall(r"^make( .*)$", code, re.MULTILINE):
        words = [word for word in shlex.split(arguments) if "=" not in word]
        found += [word for word in words if word not in targets[1].split()]
    for extras in re.findall(r"pip install .*\[([\w,]+)\]", code):
        found += [e for e in extras.split(",") if e not in PROJECT["optional-dependencies"]]
    found += [m for m in re.findall(r"python -m ([\w.]+)", code) if not find_spec(m)]
    found += [f for f in re.findall(r"python ([\w/]+\.py)", code) if not (ROOT / f).exists()]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_what_exists(document):
    assert not unknown(document)


def test_commands_that_name_nothing_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "make a wish, `make docs`\n```\nmake demo VENV=a b  # it\npip install '.[test,c]'\n```\n"
        "`.venv/bin/python -m benchmarks.d`, `python -m benchmarks`, `python docs/e.py`"
    )
    assert unknown(page) == ["b", "c", "benchmarks.d", "docs/e.py"]


def requirements(extra: str) -> set[str]:
    """The distributions that the package requires with an extra."""
    names = set()
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        names |= {name}.union(*map(requirements, extras.split(",") if extras else []))
    return names


def test_the_extra_for_tests_has_what_they_import():
    """`pip install --editable '.[test]'` installs all that pytest needs."""
    imported = set()
    folders = ("tests", "benchmarks", "examples")
    for file in (file for folder in folders for file in (ROOT / folder).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, *folders, "jax_oneflow_ops"}
    assert "tqdm" in imported
    assert imported <= requirements("test") | {"ml_dtypes"}  # which comes with jax


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_current(name):
    """`python -m tests.tables` updates the tables."""
    text = tables.page(name).read_text()
    assert text == tables.updated(name, text)


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_that_is_not_current_is_noticed(name):
    text = tables.page(name).read_text()
    changed = re.sub(r"^\| `permute`.*\n", "", text, flags=re.MULTILINE)
    assert changed != text
    assert tables.updated(name, changed) == tables.updated(name, text)
