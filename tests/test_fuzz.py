"""Raw FFI calls at random: a result or InvalidArgument, in a process that lives on."""

import re
import subprocess
import sys
from pathlib import Path


def test_random_calls_of_every_target():
    command = [sys.executable, "-m", "tests.fuzz", "--calls", "120", "--seed", "1"]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    results, refused = (
        int(re.search(rf"'{end}': (\d+)", done.stdout)[1]) for end in ("result", "refused")
    )
    assert results > 20, done.stdout
    assert refused > 20, done.stdout
