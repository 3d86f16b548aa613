"""Loads the native modules, registers their FFI targets, and reports what is available.

Importing this module initialises no backend and makes no CUDA call: jax keeps the registrations
until a backend starts.
"""

import contextlib
import contextvars
import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_oneflow_ops import _compat

_ENVIRONMENT_VARIABLE = "JAX_ONEFLOW_OPS_IMPLEMENTATION"
_IMPLEMENTATIONS = ("native", "xla")

# By platform, as jax names it in lowering rules: the module, and the platform's name in FFI.
_MODULES = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}


def check_ffi_api(module_version: tuple[int, int], runtime_version: tuple[int, int]) -> None:
    """Raises ImportError if a module's FFI headers are newer than the runtime.

    When a backend starts, XLA rejects such a module, and the whole backend fails. So a mismatch
    must be found before anything is registered.
    """
    if module_version > runtime_version or module_version[0] != runtime_version[0]:
        built, runtime = (".".join(map(str, v)) for v in (module_version, runtime_version))
        raise ImportError(
            f"jax_oneflow_ops was built with XLA FFI API {built}, but the installed jaxlib "
            f"implements {runtime}. Upgrade jax and jaxlib, or rebuild jax_oneflow_ops against the "
            "installed jaxlib: `pip install --no-build-isolation --force-reinstall --no-deps .` in "
            "its source."
        )


def _why_not_built() -> str:
    """Why there is no CPU module, with the remedy."""
    import json  # imported lazily: only an import that fails needs them
    from importlib.metadata import PackageNotFoundError, distribution

    package = os.path.dirname(os.path.realpath(__file__))
    root = os.path.dirname(package)
    source = f"jax_oneflow_ops was imported from {package}, the source without compiled modules"
    try:
        found = distribution("jax-oneflow-ops")
    except PackageNotFoundError:
        return (
            f"{source}, and no build of it is installed for {sys.executable}. Remedy: run "
            f"`pip install --editable .` in {root}; or run `pip install .` there, and Python in "
            "another directory."
        )
    installed = os.path.realpath(str(found.locate_file("jax_oneflow_ops")))
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if installed == package or origin.get("dir_info", {}).get("editable"):
        return (
            f"jax_oneflow_ops is installed, but {installed} has no compiled module that "
            f"{sys.executable} can load. Remedy: install it again, with "
            "`pip install --force-reinstall --no-deps` and what you installed it from."
        )
    return (
        f"{source}. It shadows the build installed in {installed}, because Python searches the "
        "current directory or PYTHONPATH first. Remedy: run Python in another directory, or as "
        f"`python -P`; or, to work in {root}, run `pip install --editable .` there."
    )


def _load() -> Mapping[str, Any]:
    loaded = {}
    for platform, (name, ffi_platform) in _MODULES.items():
        try:
            module = importlib.import_module(f"jax_oneflow_ops.{name}")
        except ModuleNotFoundError as error:
            if platform == "cpu":
                raise ImportError(_why_not_built()) from error
            continue  # built without CUDA; `_missing` says so when it is asked for
        check_ffi_api(module.ffi_api_version, _compat.runtime_ffi_api())
        for target, capsule in module.targets().items():
            jax.ffi.register_ffi_target(target, capsule, platform=ffi_platform)
        loaded[platform] = module
    return loaded


_loaded = _load()


def available(platform: str) -> bool:
    """Whether native kernels for `platform` ("cpu" or "cuda") are loaded."""
    return platform in _loaded


_assumed: contextvars.ContextVar[str | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assumed(platform: str | None) -> Iterator[None]:
    """Lowers to the kernels of a platform wherever there are any: the program is read, not run."""
    token = _assumed.set(platform)
    try:
        yield
    finally:
        _assumed.reset(token)


def implementations() -> dict[str, str]:
    """Returns which native kernels run on each platform that has them.

    Returns:
      A dict from platform ("cpu", "cuda") to a description of the native module, with the
      instruction set that the CPU kernels use here, or the architectures that the CUDA kernels are
      compiled for. On other platforms, functions run as jnp.

    Example:
      >>> import jax_oneflow_ops as jof
      >>> "cpu" in jof.implementations()
      True
    """
    described = {}
    if cpu := _loaded.get("cpu"):
        described["cpu"] = f"native ({cpu.instruction_set()})"
    if cuda := _loaded.get("cuda"):
        described["cuda"] = f"native ({cuda.architectures})"
    return described


def cpu_instruction_set() -> str:
    """The instruction set that the CPU kernels use here: "baseline", "avx2" or "avx512"."""
    return str(_loaded["cpu"].instruction_set())


def cuda_architectures() -> str:
    """The CUDA module's architectures: CMake's list with commas, empty if there is no module."""
    return str(_loaded["cuda"].architectures) if "cuda" in _loaded else ""


def include_dir() -> str:
    """Returns the directory of the elementwise template's C++ and CUDA headers.

    If it is on the compiler's search path, ``#include "cuda/elementwise.cuh"`` and
    ``#include "ops/elementwise.h"`` compile under nvcc and NVRTC; they need no other header. Use
    them to write a fused elementwise kernel from your own functor.

    Returns:
      An absolute path.
    """
    return os.path.join(os.path.dirname(os.path.abspath(_loaded["cpu"].__file__)), "include")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the checks that `jax.export.export` must disable for this package's calls.

    `jax.export` refuses custom calls that it does not know, because the process that loads the
    program needs them. Import this package there before you call the program.

    A program for several devices can be exported if its calls are inside a `jax.shard_map` over all
    axes of the mesh. Otherwise JAX raises an error: to partition the calls, XLA would need this
    process.

    Returns:
      A list for the argument `disabled_checks`: a `jax.export.DisabledSafetyCheck` for each FFI
      target of the native modules that are loaded here, and for what else `accelerate` calls:
      cuDNN's attention, and the call that tells XLA how to store an array. A program that is
      exported for a platform whose module is not loaded runs as jnp there, and needs none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> x = jnp.array([-1.0, 2.0])
      >>> exported = jax.export.export(jax.jit(jof.relu), disabled_checks=jof.export_checks())(x)
      >>> restored = jax.export.deserialize(exported.serialize())
      >>> print(restored.call(x))
      [0. 2.]
    """
    targets = {_compat.LAYOUT, *_compat.ATTENTION}.union(
        *(module.targets() for module in _loaded.values())
    )
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


def permute_plan(
    shape: Sequence[int], axes: Sequence[int], itemsize: int, alignment: int = 16
) -> dict[str, Any]:
    """The plan of a permutation, as csrc/ops/permute_plan.h makes it.

    Args:
      shape: the operand's shape.
      axes: a permutation of ``range(len(shape))``.
      itemsize: bytes of an element: 1, 2, 4, 8 or 16.
      alignment: bytes that both arrays are aligned to.

    Returns:
      A dict: ``strategy``; ``unit_bytes``, the movement size; ``index_bytes``; ``shape``, the
      merged dimensions in the order of the output; ``axes``, the place of each of them in the order
      of the input; for the strategies "tile", "small tile" and "runs", ``in_run`` and ``out_run``,
      the number of dimensions along which a tile is contiguous in the input and in the output; and,
      for "runs", ``tile``, the extent of a tile along each dimension.
    """
    plan: dict[str, Any] = _loaded["cpu"].permute_plan(list(shape), list(axes), itemsize, alignment)
    return plan


def is_used(function: str, platform: str, implementation: str | None) -> bool:
    """Whether a call is lowered to native kernels.

    Raises NotImplementedError if native kernels were asked for but are not available. Warns once if
    kernels were built but do not run here.
    """
    if implementation == "xla":
        return False
    if platform == _assumed.get():
        return True
    problem = _cuda_problem() if platform == "cuda" and available(platform) else None
    if available(platform) and problem is None:
        return True
    if implementation == "native":
        raise _missing(function, platform, problem)
    if problem is not None:
        warn_of_fallback("its pure-jnp implementations on this GPU", problem)
    return False


def _missing(function: str, platform: str, problem: str | None) -> NotImplementedError:
    """The error for `function(..., implementation="native")` on a platform without kernels."""
    if problem is None:
        remedy = (
            'use implementation="xla" or leave it at None; '
            f"unset {_ENVIRONMENT_VARIABLE} if it is set"
        )
        if platform == "cuda":
            remedy = (
                "rebuild the package with the CUDA module: `JOF_CUDA=ON pip install .` in its "
                "source (pip fetches nvcc if it is missing)"
            )
        problem = f'there are no native kernels for platform "{platform}" here. Remedy: {remedy}.'
    return NotImplementedError(f'{function}: implementation="native" was asked for, but {problem}')


@functools.cache
def warn_of_fallback(what: str, problem: str) -> None:
    """Warns once that `what` runs instead of kernels. `problem` gives the reason and the remedy."""
    warnings.warn(f"jax_oneflow_ops runs {what}: {problem}", RuntimeWarning, stacklevel=2)


@functools.cache
def _cuda_problem() -> str | None:
    """Why the CUDA module's kernels do not run on this process's GPUs, with the remedy, or None.

    This queries the GPUs that jax uses, so it is called only when something is lowered. A process
    without GPUs lowers for other machines (`jax.export`), whose GPUs are not known here.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    module = _loaded["cuda"]
    capabilities = {_version(device.compute_capability) for device in devices}
    return cuda_problem(
        module.architectures, module.runtime_version, module.driver_version(), capabilities
    )


def cuda_problem(
    architectures: str, runtime: int, driver: int, capabilities: Iterable[tuple[int, int]]
) -> str | None:
    """Why kernels do not run, with the remedy, or None if they do.

    Args:
      architectures: what the kernels are compiled for: CMake's list, with commas.
      runtime: the CUDA version that the kernels are compiled and linked with, in CUDA's encoding
        (12040).
      driver: the newest CUDA version that the driver supports.
      capabilities: the compute capabilities of the GPUs, as (major, minor).
    """
    # Machine code runs under any driver of the same or a later major version.
    if driver // 1000 < runtime // 1000:
        return (
            f"the package was built with CUDA {_cuda_version(runtime)}, and the NVIDIA driver "
            f"supports CUDA {_cuda_version(driver)} at most. Remedy: update the driver, or rebuild "
            f"the package with nvcc {driver // 1000} on PATH: `JOF_CUDA=ON pip install .` in its "
            "source."
        )
    for capability in sorted(capabilities):
        if not any(
            _runs(architecture, capability, newest_ptx=runtime <= driver)
            for architecture in architectures.split(",")
        ):
            major, minor = capability
            return (
                f"the package was compiled for the architectures {architectures}, and has no code "
                f"that a GPU of compute capability {major}.{minor} under a driver for CUDA "
                f"{_cuda_version(driver)} can run. Remedy: rebuild the package for this GPU: "
                f"`JOF_CUDA=ON JOF_CUDA_ARCHITECTURES={major}{minor} pip install .` in its source."
            )
    return None


def _runs(architecture: str, capability: tuple[int, int], newest_ptx: bool) -> bool:
    """Whether the code that nvcc makes for one entry of CMake's list runs on a GPU.

    "80" is machine code and PTX, "80-real" is machine code only, and "80-virtual" is PTX only.
    """
    match = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", architecture)
    if match is None:
        return True  # CMake keywords such as "native" and "all", which are assumed to fit
    compiled = int(match[1]), int(match[2])
    if match[3] == "a":  # code that is specific to one compute capability
        return compiled == capability
    same_major = compiled[0] == capability[0] and compiled[1] <= capability[1]
    # The driver compiles PTX, if it is no older than the nvcc that wrote it.
    from_ptx = compiled <= capability and newest_ptx and match[3] == ""
    return (same_major and match[4] != "virtual") or (from_ptx and match[4] != "real")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def choose_implementation(function: str, implementation: str | None) -> str | None:
    """Checks the argument, and applies the environment variable if it is None."""
    if implementation is not None:
        source, value = "implementation must be None,", implementation
    elif environment := os.environ.get(_ENVIRONMENT_VARIABLE):
        source, value = f"the environment variable {_ENVIRONMENT_VARIABLE} must be", environment
    else:
        return None
    if value not in _IMPLEMENTATIONS:
        raise ValueError(f'{function}: {source} "native" or "xla", got {value!r}')
    return value
