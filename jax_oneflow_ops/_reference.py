"""Every operation in pure jnp: the "xla" implementation, and what platforms without kernels run."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def nearest_source(size_in: int, size_out: int, half_pixel: bool) -> np.ndarray:
    """The source position of each output position, in exact integer arithmetic."""
    out = np.arange(size_out, dtype=object)  # Python's integers: no overflow
    numerator, denominator = (2 * out + 1, 2 * size_out) if half_pixel else (out, size_out)
    return (numerator * size_in // denominator).astype(np.int64)


def upsample_nearest2d(
    x: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """Forward: repeats along the axes `axis` and `axis + 1`."""
    for i in range(2):
        x = _upsample_axis(x, axis + i, out_hw[i], half_pixel)
    return x


def _upsample_axis(x: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = x.shape[axis]
    if n and size % n == 0:
        shape = (*x.shape[: axis + 1], size // n, *x.shape[axis + 1 :])
        x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
        return x.reshape(*shape[:axis], size, *shape[axis + 2 :])
    return jnp.take(x, nearest_source(n, size, half_pixel), axis=axis, mode="clip")


def upsample_nearest2d_backward(
    dy: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """Its adjoint: sums each source position's outputs, 16-bit values in f32, rounded once."""
    if 0 in in_hw:
        return jnp.zeros((*dy.shape[:axis], *in_hw, *dy.shape[axis + 2 :]), dy.dtype)
    wide = dy.astype(jnp.float32) if dy.dtype.itemsize == 2 else dy
    for i in range(2):
        wide = _sum_axis(wide, axis + i, in_hw[i], half_pixel)
    return wide.astype(dy.dtype)


def _sum_axis(dy: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = dy.shape[axis]
    if n % size == 0:
        return dy.reshape(*dy.shape[:axis], size, n // size, *dy.shape[axis + 1 :]).sum(axis + 1)
    # A gather of each source position's range of outputs, padded to the longest: unlike the
    # scatter that autodiff would make, it is deterministic and fast on every platform.
    begin = np.searchsorted(nearest_source(size, n, half_pixel), np.arange(size + 1))
    index = begin[:-1, None] + np.arange(math.ceil(n / size) + 1)
    inside = index < begin[1:, None]
    gathered = jnp.take(dy, np.where(inside, index, 0), axis=axis, mode="clip")
    inside = inside.reshape(inside.shape + (1,) * (dy.ndim - axis - 1))
    return jnp.where(inside, gathered, 0).sum(axis + 1)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Gelu by its approximation with tanh."""
    return jax.nn.gelu(x, approximate=True)


def gelu_erf(x: jax.Array) -> jax.Array:
    """Gelu itself."""
    return jax.nn.gelu(x, approximate=False)


def swiglu(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by silu."""
    return jax.nn.silu(gate) * x


def geglu_tanh(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by gelu's approximation."""
    return gelu_tanh(gate) * x


def geglu_erf(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by gelu."""
    return gelu_erf(gate) * x


def fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """A product and a sum."""
    return x * y + z


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """A choice."""
    return jnp.where(condition, x, y)
