"""Tests that need XLA for CPUs with its default fusion emitters.

conftest.py disables the emitters to save time. Without them, XLA rounds twice when it converts to
fp8, and changes bits of NaNs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAG = "--xla_cpu_use_fusion_emitters"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    f"{FLAG}=false" not in os.environ["XLA_FLAGS"], reason="XLA is as users have it"
)
def test_with_fusion_emitters(pytestconfig):
    tests = Path(__file__).resolve().parent
    options = ["-q", "-p", "no:cacheprovider", "-m", "fusion_emitters"]
    options += ["--exhaustive"] if pytestconfig.option.exhaustive else []
    files = (str(tests / f"test_{name}.py") for name in ("cast", "upsample"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=tests.parent,
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {FLAG}=true"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
