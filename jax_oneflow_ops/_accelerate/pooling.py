"""Gradients of pooling: of maxima without a scatter, of sums without zeros between gradients.

Maxima: XLA finds the largest element of each window again, writes it and its indices, 20 bytes for
each window in two dimensions, and scatters the gradients by atomics. Here one byte for each window
says which of its elements is the largest. XLA computes it in the kernel that computes the maxima.
Then each element adds up the gradients of those of its windows that chose it, in a fixed order.

Time in us on an H100 of the maxima and the gradient, by XLA and here:

    images               window, stride    bf16            f32
    128 x 112^2 x 64     3 x 3, 2          1253 -> 387     1095 -> 468
    128 x 112^2 x 64     2 x 2, 2           891 -> 220     1059 -> 361
     64 x 112^2 x 64     3 x 3, 1          3539 -> 558     1530 -> 597
    128 x 64 x 112^2     2 x 2, 2           859 -> 220     1146 -> 364
    256 x 32^2 x 3       2 x 2, 2            11 -> 5          9 -> 4

Kernels for both steps, with packs of 16 bytes, took 299 and 451 us in the first line, 226 and 396
in the second, and 807 and 820 in the fourth.

Sums, as in average pooling: JAX inserts zeros between the gradients, and XLA sums windows of the
result. Here each element adds up the gradients of its windows. The gradient alone, in the first,
the second and the fourth line: 512 -> 147, 235 -> 123 and 129 -> 123 us in bf16, 486 -> 194,
206 -> 175 and 175 -> 176 in f32.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops import _checks, _compat, _emit

_MOST = {"cuda": (25, 25), "cpu": (9, 4)}
"""The most elements of a window, and the most windows of an element. With more, sums were not
measured on a GPU, and took up to 33 times as long as XLA's scatter on a CPU."""


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Windows over an array: what `jax.lax.reduce_window` calls them, for each axis."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def pays(self, platform: str) -> bool:
        """Whether the sums are expected to be faster than what XLA does."""
        overlaps = (-(-k // s) for k, s in zip(self.sizes, self.strides, strict=True))
        elements, windows = _MOST[platform]
        return math.prod(self.sizes) <= elements and math.prod(overlaps) <= windows


@dataclasses.dataclass(frozen=True)
class GradientOfMaxima(_Windows):
    """The gradient of the maximum, or with `of_minima` the minimum, of each window."""

    of_minima: bool
    name = "max pool gradient"
    reason = "adds up the gradients of the windows that chose an element, without a scatter"

    def compute(self, ct: jax.Array, x: jax.Array) -> jax.Array:
        """The gradient to x. 16-bit values are summed in float32, rounded once."""
        chosen = _chosen(-x if self.of_minima else x, self)
        # Otherwise XLA may find the element anew for each of its windows.
        return _spread(ct, lax.optimization_barrier(chosen), x.shape, self)


@dataclasses.dataclass(frozen=True)
class GradientOfSums(_Windows):
    """The gradient of the sum of each window, to an array of a shape."""

    shape: tuple[int, ...]
    name = "window sum"
    reason = "adds up the gradients of an element's windows, without zeros between them"

    def compute(self, ct: jax.Array) -> jax.Array:
        """The gradient, rounded once."""
        return _spread(ct, None, self.shape, self)


def find_maxima(
    ctx: Any, operands: Any, platform: str, params: dict[str, Any]
) -> tuple[GradientOfMaxima, Any, Any] | None:
    """The gradient that is being lowered, and its operands' types and values; None for others."""
    ct, x = ctx.avals_in
    sizes, padding = params["window_dimensions"], tuple(map(tuple, params["padding"]))
    is_real = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    is_counted = math.prod(sizes) <= 256 and ct.size > 0  # by a byte
    select = params["select_prim"]
    if not is_real or not is_counted or select not in (lax.ge_p, lax.le_p):
        return None
    strides = tuple(params["window_strides"])
    form = GradientOfMaxima(tuple(sizes), strides, padding, select is lax.le_p)
    return form, ctx.avals_in, operands


def find_sums(
    ctx: Any, operands: Any, platform: str, params: dict[str, Any]
) -> tuple[GradientOfSums, Any, Any] | None:
    """The same for sums of windows that read zeros between elements, as gradients of sums do."""
    spread = _compat.before_spreading(*operands)
    sizes, (result,) = params["window_dimensions"], ctx.avals_out
    options = *params["window_strides"], *params["base_dilation"], *params["window_dilation"]
    is_plain = {*options} == {1} and not any(map(any, params["padding"]))
    if spread is None or not is_plain:
        return None
    ct, lows, strides = spread
    aval = _emit.aval_of(ct)
    is_known = aval is not None and jnp.issubdtype(aval.dtype, jnp.floating) and result.size > 0
    padding = tuple((size - 1 - low, 0) for size, low in zip(sizes, lows, strict=True))
    if not is_known or min(low for low, _ in padding) < 0:
        return None
    return GradientOfSums(tuple(sizes), tuple(strides), padding, result.shape), [aval], [ct]


def _chosen(x: jax.Array, windows: _Windows) -> jax.Array:
    """Which element of each window is the largest, a number that counts them in row-major order.

    As in JAX, that is the first element that is not less than those after it, and elements outside
    of the array are negative infinity. Nothing is not less than NaN.
    """
    padded = lax.pad(x, np.asarray(-np.inf, x.dtype), [(*pair, 0) for pair in windows.padding])
    best: jax.Array = jnp.asarray(-jnp.inf, x.dtype)
    chosen: jax.Array = jnp.asarray(0, jnp.uint8)
    for number, first in enumerate(np.ndindex(*windows.sizes)):
        ends = [
            n - size + 1 + i for n, size, i in zip(padded.shape, windows.sizes, first, strict=True)
        ]
        values = lax.slice(padded, first, ends, windows.strides)
        keep = best >= values
        best = jnp.where(keep, best, values)
        chosen = jnp.where(keep, chosen, jnp.uint8(number))
    return chosen


def _spread(
    ct: jax.Array, chosen: jax.Array | None, shape: tuple[int, ...], windows: _Windows
) -> jax.Array:
    """Adds the cotangent of each window to its chosen element, or to all of its elements.

    An element that is the r-th after the begin of window q, with r less than the stride, also
    belongs to the windows q - 1, q - 2, ..., if these are long enough.
    """
    wide = _checks.promoted(ct.dtype, jnp.float32)
    axes = [*zip(windows.sizes, windows.strides, strict=True)]
    lows = [low for low, _ in windows.padding]
    groups = [
        -(-(n + low) // stride) for n, low, stride in zip(shape, lows, windows.strides, strict=True)
    ]
    # Each axis becomes two: a window, and the element after its begin.
    after = []
    for axis, stride in enumerate(windows.strides):
        ones = [1] * (2 * ct.ndim)
        ones[2 * axis + 1] = stride
        after.append(np.arange(stride, dtype=np.int32).reshape(ones))
    total = jnp.zeros((), wide)
    for back in itertools.product(*(range(-(-size // stride)) for size, stride in axes)):
        number, is_inside = np.zeros((), np.int32), np.ones((), bool)
        for r, steps, (size, stride) in zip(after, back, axes, strict=True):
            place = r + steps * stride
            number = number * size + place
            is_inside = is_inside & (place < size)
        moved = [
            (steps, count - n - steps, 0)
            for steps, count, n in zip(back, groups, ct.shape, strict=True)
        ]

        def of_windows(y: jax.Array, moved: Any = moved) -> jax.Array:
            y = lax.pad(y, jnp.zeros((), y.dtype), moved)
            return y.reshape([k for n in groups for k in (n, 1)])

        is_chosen: Any = is_inside
        if chosen is not None:
            here = np.where(is_inside, number, 0).astype(np.uint8)
            is_chosen = is_inside & (of_windows(chosen) == here)
        total += jnp.where(is_chosen, of_windows(ct).astype(wide), 0)
    merged = [n * stride for n, stride in zip(groups, windows.strides, strict=True)]
    whole = total.astype(ct.dtype).reshape(merged)
    return lax.slice(whole, lows, [low + n for low, n in zip(lows, shape, strict=True)])
