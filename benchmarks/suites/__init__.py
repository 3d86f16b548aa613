"""The suites: each has a table of cases, what they are compared with, and how they are checked.

A module has ``cases(platform, quick)``, the listed ones, and, if it is a family of the survey,
``draw(rng, largest)``, a case at random that moves at most ``largest`` bytes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..tables import size

SUITES = ("elementwise", "cast", "upsample", "permute", "scatter", "kernels", "models")
FAMILIES = SUITES[:5]
"""The suites that the survey draws from."""

FLOATS = ("float32", "float16", "bfloat16")
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_SHORT |= {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "complex64": "c64"}
_SHORT |= {"complex128": "c128"}


def load(suite: str) -> ModuleType:
    """Imports the module of a suite."""
    return importlib.import_module(f".{suite}", __package__)


def short(dtype: str) -> str:
    """Such as ``bf16``."""
    return _SHORT.get(dtype, dtype)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return int(jnp.dtype(dtype).itemsize)


def is_wide(*dtypes: str) -> bool:
    """Returns whether arrays of a dtype need JAX's 64-bit mode."""
    return any(dtype in ("float64", "int64", "uint64", "complex128") for dtype in dtypes)


def sweep_sizes(platform: str, quick: bool) -> list[int]:
    """The bytes of the arrays of a sweep: from 1 KiB, where a launch dominates, to 1 GiB."""
    largest = 30 if platform == "gpu" else 26
    return [1 << bits for bits in ((10, 20) if quick else range(10, largest + 1, 2))]


def array_sizes(platform: str) -> list[tuple[int | None, str]]:
    """Bytes of the first array of listed cases, or None for 4M elements, and their names."""
    if platform == "cpu":
        return [(None, "4M elements")]
    return [(n << 20, size(n << 20)) for n in (512, 64)]


def elements(nbytes: int | None, dtype: str) -> int:
    """How many elements an array of a listed size has."""
    return 4 << 20 if nbytes is None else nbytes // itemsize(dtype)


def compact(shape: str) -> str:
    """Such as "512MiB", or "4M" of "4M elements"."""
    return shape.removesuffix(" elements").replace(" ", "")


def count(n: int) -> str:
    """Such as ``16M`` and ``64k``, which are powers of two, and ``10000``."""
    for unit, amount in (("M", 1 << 20), ("k", 1 << 10)):
        if n % amount == 0 and n > amount >> (unit == "M"):
            return f"{n // amount}{unit}"
    return str(n)


def in_float32(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Widens 16-bit inputs by hand: XLA then rounds once."""

    def run(*arrays: Any) -> Any:
        is_float = (jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)
        wide = (x.astype(jnp.float32) if f else x for x, f in zip(arrays, is_float, strict=True))
        return function(*wide).astype(dtype)

    return run


# ---- random cases ----

SMALLEST = 4 << 10  # bytes


def random_size(rng: np.random.Generator, largest: int, smallest: int = SMALLEST) -> int:
    """Draws a number of bytes, log-uniformly."""
    return int(math.exp(rng.uniform(math.log(smallest), math.log(largest))))


def random_dimension(rng: np.random.Generator, about: float) -> int:
    """Draws a dimension near ``about``: half of them are powers of two, some others are odd."""
    if rng.random() < 0.5:
        return 1 << max(0, round(math.log2(max(1.0, about))))
    return max(1, int(about) | int(rng.random() < 0.5))


def pick(rng: np.random.Generator, choices: Any) -> Any:
    """Draws one of the choices; NumPy would turn them into an array."""
    return choices[int(rng.integers(len(choices)))]
