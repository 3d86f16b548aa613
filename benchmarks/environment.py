"""What a result must say about where it came from. No host names, no directories."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ["jax", "jaxlib", "jax_oneflow_ops", "torch", "cupy", "numpy"]
_ROOT = Path(__file__).resolve().parent.parent


def describe(argv: list[str], module: str = "benchmarks", devices: int = 1) -> dict[str, Any]:
    """Versions, devices, processor, commit, date and command line."""
    import jax

    import jax_oneflow_ops as jof

    device = jax.devices()[0]
    client_version = getattr(device.client, "platform_version", "")
    return {
        "device": device.device_kind if device.platform != "cpu" else cpu_model(),
        "devices": devices,
        "platform": device.platform,
        "driver": _run(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cuda": " ".join(re.findall(r"cuda \d+", client_version)) or None,
        "native": jof.implementations(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        **_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(argv, module),
    }


def _commit() -> dict[str, Any]:
    """The commit, and whether tracked files differ from it.

    A copy of the tree without its history is told the commit by JOF_BENCHMARK_COMMIT.
    """
    if commit := os.environ.get("JOF_BENCHMARK_COMMIT"):
        return {"commit": commit, "dirty": None}
    status = _run("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _run("git", "rev-parse", "HEAD"),
        "dirty": None if status is None else status != "",
    }


def command_line(argv: list[str], module: str = "benchmarks") -> str:
    """The command, with absolute paths cut to their last component."""
    words = [re.sub(r"^(--\w+=)?/.*/", r"\1", word) for word in argv]
    return shlex.join(["python", "-m", module, *words])


def slug(environment: dict[str, Any]) -> str:
    """A directory name for the devices: ``nvidia-h200``, ``nvidia-h200-x2``, ``cpu-amd-epyc``."""
    prefix = "cpu-" if environment["platform"] == "cpu" else ""
    devices = environment.get("devices", 1)
    suffix = f"-x{devices}" if devices > 1 else ""
    return prefix + re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-") + suffix


def cpu_model() -> str:
    """The name that the processor gives itself."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """The version of the distribution that brings a package (CuPy has many), if one does."""
    names = importlib.metadata.packages_distributions().get(package, [package])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """The output of a command, None where it does not run or fails."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
