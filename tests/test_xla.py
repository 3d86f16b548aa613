"""Tests that need XLA for CPUs with its default fusion emitters.

conftest.py disables the emitters to save time. Without them, XLA rounds twice when it converts to
fp8, and changes bits of NaNs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WITHOUT_EMITTERS


@pytest.mark.skipif(
    WITHOUT_EMITTERS not in os.environ["XLA_FLAGS"], reason="XLA is as users have it"
)
def test_with_fusion_emitters(pytestconfig):
    tests = Path(__file__).resolve().parent
    # pytest-benchmark, where it is installed, warns if the parent is a process of xdist.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "fusion_emitters"]
    options += ["--exhaustive"] if pytestconfig.option.exhaustive else []
    files = (str(tests / f"test_{name}.py") for name in ("cast", "upsample"))
    flags = os.environ["XLA_FLAGS"].replace(WITHOUT_EMITTERS, "")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=tests.parent,
        env={**os.environ, "XLA_FLAGS": flags, "JOF_TEST_EMITTERS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
