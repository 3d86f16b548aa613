"""Where a result comes from, without host names or directories, and the choice of the device."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = [
    "jax",
    "jaxlib",
    "jax_oneflow_ops",
    "torch",
    "triton",
    "cupy",
    "cutensor",
    "numpy",
    "flax",
    "optax",
]
_ROOT = Path(__file__).resolve().parents[1]


def header(argv: list[str], module: str = "benchmarks", devices: int = 1) -> dict[str, Any]:
    """The header of a result: devices, versions, commit, date and command line."""
    import jax

    import jax_oneflow_ops as jof

    device = jax.devices()[0]
    client_version = getattr(device.client, "platform_version", "")
    found = {
        "device": device.device_kind if device.platform != "cpu" else cpu_model(),
        "devices": devices,
        "platform": device.platform,
        "driver": "".join(_query("driver_version") or []),
        "cuda": " ".join(re.findall(r"cuda \d+", client_version)),
        "native": jof.implementations().get("cuda" if device.platform == "gpu" else "cpu"),
        "host": cpu_model(),
        "cores": os.cpu_count(),
        "versions": {p: v for p in _PACKAGES if (v := _version(p))},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(argv, module),
    }
    return {name: value for name, value in found.items() if value}


def use_device(name: str) -> None:
    """Makes "cpu", "gpu" or such as "gpu:1" the device of everything; call it before anything runs.

    PyTorch, CuPy and nvidia-smi count GPUs from the first visible one, so others are hidden.
    """
    import jax

    gpus = _gpus()
    identifiers = {"cpu": "", **{f"gpu:{i}": uuid for i, (uuid, _) in enumerate(gpus)}}
    if gpus:
        identifiers["gpu"] = identifiers["gpu:0"]
    if name not in identifiers:
        here = ["cpu", *(f"gpu:{i} ({kind})" for i, (_, kind) in enumerate(gpus))]
        raise ValueError(f"no device {name!r}; there are: {', '.join(here)}")
    platform = name.partition(":")[0]
    if platform == "gpu":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi has them
        os.environ["CUDA_VISIBLE_DEVICES"] = identifiers[name]
    jax.config.update("jax_platforms", {"gpu": "cuda,cpu"}.get(platform, platform))
    try:
        found = jax.default_backend()
    except RuntimeError as error:  # a JAX for CPUs alone
        raise ValueError(f"JAX cannot use {name!r}: {error}") from error
    if found != platform:
        raise ValueError(f"JAX has started on {found!r} already")


def _gpus() -> list[tuple[str, str]]:
    """The identifier and the name of each visible GPU."""
    text = _run("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")
    known = [line.split(", ") for line in (text or "").splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [index for index, *_ in known] if visible is None else visible.split(",")
    return [
        (uuid, kind)
        for want in filter(None, wanted)
        for i, uuid, kind in known
        if want == i or uuid.startswith(want)
    ]


_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
_SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}


def clocks() -> dict[str, Any] | None:
    """Returns the clocks of the first visible GPU, its power and temperature, and what slows it."""
    values = _query(*_CLOCKS.values(), "clocks_event_reasons.active")
    if values is None:
        return None
    *numbers, reasons = values
    mask = int(reasons, 16) if reasons.startswith("0x") else 0
    known = {k: _number(text) for k, text in zip(_CLOCKS, numbers, strict=True)}
    return {**known, "slowed": [text for bit, text in _SLOWED.items() if mask & bit]}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _query(*fields: str) -> list[str] | None:
    """What nvidia-smi says of the first visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    text = _run(
        "nvidia-smi",
        f"--id={visible or 0}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    )
    return text.split(", ") if text else None


def _commit() -> str | None:
    """The commit, with a "+" if tracked files other than results differ from it.

    A copy of the tree without its history is told the commit by JOF_BENCHMARK_COMMIT.
    """
    if commit := os.environ.get("JOF_BENCHMARK_COMMIT"):
        return commit
    commit = _run("git", "rev-parse", "--short=10", "HEAD")
    others = ("--", ".", ":(exclude)benchmarks/results")
    dirty = _run("git", "status", "--porcelain", "--untracked-files=no", *others)
    return commit and commit + "+" * bool(dirty)


def command_line(argv: list[str], module: str = "benchmarks") -> str:
    """The command, with absolute paths cut to their last component."""
    words = [re.sub(r"^(--\w+=)?/.*/", r"\1", word) for word in argv]
    return shlex.join(["python", "-m", module, *words])


def slug(header: dict[str, Any]) -> str:
    """A directory name for the devices: ``nvidia-h200``, ``nvidia-h200-x2``, ``cpu-amd-epyc``."""
    prefix = "cpu-" if header["platform"] == "cpu" else ""
    suffix = f"-x{header['devices']}" if header.get("devices", 1) > 1 else ""
    return prefix + re.sub(r"[^a-z0-9]+", "-", header["device"].lower()).strip("-") + suffix


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
    names = _distributions().get(package, [package])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return None


_distributions = functools.cache(importlib.metadata.packages_distributions)  # half a second


def _run(*command: str) -> str | None:
    """The output of a command, None where it does not run or fails."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
