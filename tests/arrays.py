"""Inputs and comparisons that the tests of several ops share."""

import math
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOAT8 = tuple(name for name in dir(jnp) if name.startswith("float8_"))
INEXACT = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# The dtypes of kernels that only move bits.
DTYPES = ("bool", *INTEGERS, *FLOAT8, *INEXACT)


def rng_for(*key) -> np.random.Generator:
    """A generator that gives a test the same numbers in every process."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def one_in(step: int, values) -> list:
    """Values of a parameter, of which one in `step` runs without --exhaustive.

    A tuple is the values of several parameters.
    """
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    rest = [pytest.mark.exhaustive]
    return [pytest.param(*v, marks=rest if i % step else []) for i, v in enumerate(several)]


def any_bits(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Random bit patterns, including NaNs with payloads, infinities, -0 and subnormals."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, size=shape).astype(bool)
    count = math.prod(shape) * dtype.itemsize
    return rng.integers(0, 256, size=count, dtype=np.uint8).view(dtype).reshape(shape)


def normals(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    values = rng.standard_normal(shape)
    if np.issubdtype(jnp.dtype(dtype), np.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def assert_same_bits(actual, expected) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    as_bytes = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (actual, expected)]
    np.testing.assert_array_equal(*as_bytes)
