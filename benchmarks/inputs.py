"""Random inputs, drawn on the device by a hash, which compiles faster than JAX's generators."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


class Input(NamedTuple):
    """An array that a case takes.

    Kinds of values: "normal", with standard deviation 3; "wide", with magnitudes from 2^-12 to
    2^12; "divisor", none near 0; "scalar", 0.75; "condition", half of them true; "hash", integers
    that the dtype represents exactly. Kinds of indices below ``limit``: "uniform"; "hot", half of
    them one index; "one", all of them one index; "sorted"; "skewed", ``limit * u**4`` of a uniform
    u; "zipf", with a probability of about 1 / index.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"
    limit: int = 0


def shapes(inputs: Sequence[Input]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes with which functions of the inputs are traced."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)


def draw(seed: Array, inputs: Sequence[Input]) -> tuple[Array, ...]:
    """Returns one set of the inputs; ``seed`` is a traced uint32."""
    return tuple(_draw(seed + np.uint32(1000003 * (i + 1)), x) for i, x in enumerate(inputs))


def _draw(seed: Array, x: Input) -> Array:
    bits = _bits(seed, x.shape)
    if x.kind == "scalar":
        return jnp.full(x.shape, 0.75, x.dtype)
    if x.kind == "condition":
        return bits >> 31 == 1
    if x.kind == "hash":
        return _integers(bits, seed, x)
    uniform = (bits >> 8).astype(jnp.float32) * np.float32(2**-24)
    if x.limit:
        return _indices(uniform, _bits(~seed, x.shape), x)
    values = 3 * math.sqrt(2) * jax.lax.erf_inv(2 * uniform - np.float32(1 - 2**-24))
    if x.kind == "wide":
        scale = (_bits(~seed, x.shape) >> 27).astype(jnp.float32) - 16  # -16 to 15
        values *= jnp.exp2(jnp.clip(scale, -12, 12))
    if x.kind == "divisor":
        values += jnp.sign(values)
    if jnp.issubdtype(x.dtype, jnp.integer):
        about = jnp.iinfo(x.dtype)
        values = jnp.clip(values, float(max(about.min, -(1 << 30))), float(min(about.max, 1 << 30)))
    return values.astype(x.dtype)


def _bits(seed: Array, shape: tuple[int, ...]) -> Array:
    """Returns pseudorandom uint32: the finalizer of MurmurHash3 applied to the element's index."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    x = x * np.uint32(0x9E3779B1) ^ seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * np.uint32(factor)
    return x ^ x >> 16


def _integers(bits: Array, seed: Array, x: Input) -> Array:
    exact = jnp.issubdtype(x.dtype, jnp.inexact)
    width = jnp.finfo(x.dtype).nmant + 1 if exact else jnp.iinfo(x.dtype).bits
    kept = bits >> np.uint32(max(0, 32 - width))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        part = jnp.finfo(x.dtype).dtype
        other = _bits(~seed, x.shape) >> np.uint32(max(0, 32 - width))
        return jax.lax.complex(kept.astype(part), other.astype(part))
    return kept.astype(x.dtype)


def _indices(uniform: Array, bits: Array, x: Input) -> Array:
    values = x.limit * uniform
    if x.kind == "skewed":
        values = x.limit * uniform**4
    elif x.kind == "zipf":
        values = jnp.exp(uniform * math.log(x.limit + 1)) - 1
    elif x.kind == "one":
        values = jnp.full_like(uniform, x.limit // 3)
    indices = jnp.minimum(values.astype(x.dtype), x.limit - 1)
    if x.kind == "hot":
        indices = jnp.where(bits >> 31 == 1, x.limit // 3, indices).astype(x.dtype)
    return jnp.sort(indices) if x.kind == "sorted" else indices
