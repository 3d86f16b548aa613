"""Loads the native modules, registers their FFI targets, and says what is available.

Importing this module initialises no backend and makes no CUDA call: jax keeps the registrations
until a backend starts.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_oneflow_ops import _compat

_ENVIRONMENT_VARIABLE = "JAX_ONEFLOW_OPS_IMPLEMENTATION"
_IMPLEMENTATIONS = ("native", "xla")

# Platforms, as jax names them in lowering rules, with the module and FFI's name of each.
_MODULES = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}


def check_ffi_api(module_version: tuple[int, int], runtime_version: tuple[int, int]) -> None:
    """Raises ImportError where a module's FFI headers are newer than the runtime.

    XLA refuses such a module when a backend starts, and the whole backend with it, so a mismatch
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


def _load() -> Mapping[str, Any]:
    loaded = {}
    for platform, (name, ffi_platform) in _MODULES.items():
        try:
            module = importlib.import_module(f"jax_oneflow_ops.{name}")
        except ModuleNotFoundError as error:
            if platform == "cpu":
                raise ImportError(
                    "jax_oneflow_ops has no native modules: this is its source, not a build of "
                    "it. Run `pip install .`, or `pip install --editable .`, in its repository."
                ) from error
            continue  # built without CUDA; `missing` says so when it is asked for
        check_ffi_api(module.ffi_api_version, _compat.runtime_ffi_api())
        for target, capsule in module.targets().items():
            jax.ffi.register_ffi_target(target, capsule, platform=ffi_platform)
        loaded[platform] = module
    return loaded


_loaded = _load()


def available(platform: str) -> bool:
    """Whether native kernels for `platform` ("cpu" or "cuda") are loaded."""
    return platform in _loaded


def implementations() -> dict[str, str]:
    """What runs on each platform that has native kernels.

    Returns:
      A dict from platform ("cpu", "cuda") to a description of the native module: the instruction
      set that the CPU kernels use here, the architectures that the CUDA kernels are compiled for.
      A platform that is missing runs the "xla" implementation.

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


def include_dir() -> str:
    """The directory of the elementwise template's C++ and CUDA headers.

    With it on the compiler's search path, ``#include "cuda/elementwise.cuh"`` and
    ``#include "ops/elementwise.h"`` compile under nvcc and NVRTC; they need no other header. This
    is how to write a fused elementwise kernel from a functor of one's own.

    Returns:
      An absolute path.
    """
    return os.path.join(os.path.dirname(os.path.abspath(_loaded["cpu"].__file__)), "include")


def permute_plan(
    shape: Sequence[int], axes: Sequence[int], itemsize: int, alignment: int = 16
) -> dict[str, Any]:
    """How a permutation is carried out: what csrc/ops/permute_plan.h decides.

    Args:
      shape: of the operand.
      axes: a permutation of ``range(len(shape))``.
      itemsize: bytes of an element: 1, 2, 4, 8 or 16.
      alignment: bytes that both arrays are aligned to.

    Returns:
      A dict: ``strategy``; ``unit_bytes``, the movement size; ``index_bytes``; ``shape``, the
      merged dimensions in the order of the output; ``axes``, for each of them its place in the
      order of the input; and, for the strategy "runs", ``tile``, how much of each a tile covers,
      and ``in_run`` and ``out_run``, along how many of them it is contiguous.
    """
    plan: dict[str, Any] = _loaded["cpu"].permute_plan(list(shape), list(axes), itemsize, alignment)
    return plan


def missing(function: str, platform: str) -> NotImplementedError:
    """The error for `function(..., implementation="native")` on a platform without kernels."""
    remedy = 'use implementation="xla" or leave it at None'
    if platform == "cuda":
        remedy = (
            "rebuild the package with the CUDA module: `JOF_CUDA=ON pip install .` in its source "
            "(pip fetches nvcc where there is none)"
        )
    return NotImplementedError(
        f'{function}: implementation="native" was asked for, but there are no native kernels for '
        f'platform "{platform}" here. Remedy: {remedy}.'
    )


def choose_implementation(function: str, implementation: str | None) -> str | None:
    """Checks the argument and applies the environment variable where it is None."""
    if implementation is not None:
        source, value = "implementation must be None,", implementation
    elif environment := os.environ.get(_ENVIRONMENT_VARIABLE):
        source, value = f"the environment variable {_ENVIRONMENT_VARIABLE} must be", environment
    else:
        return None
    if value not in _IMPLEMENTATIONS:
        raise ValueError(f'{function}: {source} "native" or "xla", got {value!r}')
    return value
