"""The origin of a result, without host names or directories."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jax

import jax_oneflow_ops as jof

_PACKAGES = ("jax", "jaxlib", "torch", "triton", "cupy", "numpy", "flax", "optax")
_ROOT = Path(__file__).resolve().parents[1]


def header(argv: list[str], module: str = "benchmarks", devices: int = 1) -> dict[str, Any]:
    """Returns the header of a result: devices, versions, commit, date and command line."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    owners = importlib.metadata.packages_distributions()  # CuPy's distribution has many names
    found = {
        "device": device.device_kind if on_gpu else cpu_model(),
        "devices": devices,
        "platform": device.platform,
        "driver": _nvidia_smi("driver_version") if on_gpu else None,
        "cuda": " ".join(re.findall(r"cuda \d+", device.client.platform_version)),
        "native": jof.implementations().get("cuda" if on_gpu else "cpu"),
        "host": cpu_model(),
        "cores": os.cpu_count(),
        "versions": {p: importlib.metadata.version(owners[p][0]) for p in _PACKAGES if p in owners},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *(Path(word).name for word in argv)]),
    }
    return {name: value for name, value in found.items() if value}


def _nvidia_smi(field: str) -> str | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return _run("nvidia-smi", f"--id={visible}", f"--query-gpu={field}", "--format=csv,noheader")


def _commit() -> str | None:
    """Returns the commit, with a "+" if tracked files other than results differ from it.

    In a copy of the tree without its history, JOF_BENCHMARK_COMMIT gives the commit.
    """
    if commit := os.environ.get("JOF_BENCHMARK_COMMIT"):
        return commit
    commit = _run("git", "rev-parse", "--short=10", "HEAD")
    others = ("--", ".", ":(exclude)benchmarks/results")
    dirty = _run("git", "status", "--porcelain", "--untracked-files=no", *others)
    return commit and commit + "+" * bool(dirty)


def slug(header: dict[str, Any]) -> str:
    """A directory name for the devices: ``nvidia-h200``, ``nvidia-h200-x2``, ``cpu-amd-epyc``."""
    prefix = "cpu-" if header["platform"] == "cpu" else ""
    suffix = f"-x{header['devices']}" if header.get("devices", 1) > 1 else ""
    return prefix + re.sub(r"[^a-z0-9]+", "-", header["device"].lower()).strip("-") + suffix


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _run(*command: str) -> str | None:
    """Returns the output of a command; None if the command does not exist or fails."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
