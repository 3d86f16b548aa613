"""Convolutions whose windows do not overlap, as matrix products.

Such are patches of an image (a window of 16 x 16 at a stride of 16), transposed convolutions that
enlarge an image (2 x 2 at a stride of 2), and the gradients of both. Each element of the image is
in one window, so that a permutation of axes makes the image a matrix, without an element twice.

XLA and cuDNN compute some of them well, but insert zeros between the elements of others, which
multiplies the work, or have no fast kernel for few channels. Time in us on an H100 in bf16, for
images of `image`, windows of `window` and outputs of `out` channels: the convolution, its gradient
with respect to the image, and to the kernel, by XLA and as a product.

    image            window    out    convolution       to the image      to the kernel
    256 x 224^2 x 3  16 x 16   384    907 -> 106      10,795 -> 106       294 -> 144
     64 x 224^2 x 3   4 x 4     96    123 -> 34          107 -> 36        107 -> 39
     64 x 64^2 x 16   2 x 2     32      8 -> 10           18 -> 11         20 -> 9
     64 x 56^2 x 96   2 x 2    192     28 -> 49           35 -> 51         40 -> 64
    transposed:
     64 x 14^2 x 384 16 x 16     3   3163 -> 30          289 -> 31         85 -> 36
     64 x 28^2 x 256  4 x 4     64   1129 -> 125          53 -> 122       291 -> 126
     16 x 128^2 x 128 2 x 2     64    320 -> 167          72 -> 164      4030 -> 172
     64 x 64^2 x 64   2 x 2      3    201 -> 21           43 -> 20       1098 -> 23

In float32 the gains were similar. On two threads of an AMD EPYC, the gradients gained 1.0x to 72x,
transposed convolutions 1.1x to 43x, and the others 0.5x to 1.1x.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_oneflow_ops import _compat

AS_PRODUCT = "as a matrix product, since the windows do not overlap"

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
_MOST_GATHERED, _MOST_SPREAD = 4, 16
"""The most channels of an image with which a product was faster on a GPU: if a convolution reads
the image, and if a gradient writes the image or sums over it."""

_Kind = Literal["windows", "spread", "taps", "spread taps"]


@dataclasses.dataclass(frozen=True)
class _Axis:
    """How an axis of the image, of `blocks` x `size` elements, becomes two axes of a product.

    By `kind`, the left operand, the right operand and the result have along this axis:

    - windows: the image, a window, blocks; each window of the image is multiplied by the kernel;
    - spread: blocks, a window, the image; each element times the kernel is a window of the image;
    - taps: the image, blocks, a window: the gradient of the first with respect to the kernel;
    - spread taps: blocks, the image, a window: that of the second.

    In kinds that spread, XLA counts the elements of windows backwards.
    """

    kind: _Kind
    blocks: int
    size: int

    def parts(self, array: int) -> tuple[str, ...]:
        """The parts of the axis that an array has: the left or right operand, or the result."""
        return _PARTS[self.kind][array]

    def sizes(self, array: int) -> list[int]:
        return [getattr(self, part) for part in self.parts(array)]


_BLOCKS, _SIZE, _BOTH = ("blocks",), ("size",), ("blocks", "size")
_PARTS: dict[_Kind, tuple[tuple[str, ...], ...]] = {
    "windows": (_BOTH, _SIZE, _BLOCKS),
    "spread": (_BLOCKS, _SIZE, _BOTH),
    "taps": (_BOTH, _BLOCKS, _SIZE),
    "spread taps": (_BLOCKS, _BOTH, _SIZE),
}


def _axis(
    left: int, right: int, result: int, stride: int, low: int, of_left: int, of_right: int
) -> _Axis | None:
    """The axis of a convolution with these sizes and parameters; None if windows overlap."""
    if of_left == of_right == 1 and stride == right and low == 0 and result * right <= left:
        return _Axis("windows", result, right)
    if of_right == stride == 1 and of_left == right and low == right - 1:
        return _Axis("spread", left, right) if 0 <= result - left * right < right else None
    if of_left == stride == 1 and of_right == result and low == 0 and right * result <= left:
        return _Axis("taps", right, result)
    if of_right == stride == 1 and of_left == result and low == result - 1:
        return _Axis("spread taps", left, result) if right == left * result else None
    return None


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution as a product.

    Attributes:
      numbers: the places of the convolution's axes.
      axes: its spatial axes.
      shape: the result's shape.
    """

    numbers: lax.ConvDimensionNumbers
    axes: tuple[_Axis, ...]
    shape: tuple[int, ...]

    def pays(self, platform: str, left: jax.core.ShapedArray, is_transposed: bool) -> bool:
        """Whether the product is expected to be faster than the convolution.

        Args:
          platform: "cpu" or "cuda".
          left: the type of the left operand.
          is_transposed: whether the kernel is reversed, as in the gradient of a convolution. XLA
            finds such gradients and does not insert zeros.
        """
        kinds = {axis.kind for axis in self.axes if axis.size > 1}
        if platform == "cpu":
            return "windows" not in kinds
        numbers = self.numbers
        if "spread taps" in kinds or ("spread" in kinds and not is_transposed):
            return True
        if "windows" in kinds:
            return bool(left.shape[numbers.lhs_spec[1]] <= _MOST_GATHERED)
        if "spread" in kinds:
            return self.shape[numbers.out_spec[1]] <= _MOST_SPREAD
        return bool(left.shape[numbers.lhs_spec[0]] <= _MOST_SPREAD)  # sums over the batch


def compute(left: jax.Array, right: jax.Array, *, product: Product, **how: Any) -> jax.Array:
    """The result. `how` are further arguments of `jax.lax.dot_general`.

    Images stay in memory with channels last, as for the convolution. If XLA could choose, it would
    put the batch of a vision transformer last, and all layers would take 12 % longer (H100).
    """
    numbers, axes = product.numbers, product.axes
    sums_over_batch = "taps" in axes[0].kind
    left = _channels_last(left, numbers.lhs_spec, sums_over_batch)
    if sums_over_batch:
        right = _channels_last(right, numbers.rhs_spec, sums_over_batch)
    left, of_left = _split(left, numbers.lhs_spec, ("batch", "depth"), axes, 0)
    right, of_right = _split(right, numbers.rhs_spec, ("out", "depth"), axes, 1)
    right = lax.rev(right, _backwards(axes, "spread", of_right))
    summed = [name for name in of_left if name in of_right]
    places = [*map(of_left.index, summed)], [*map(of_right.index, summed)]
    result = lax.dot_general(left, right, (places, ((), ())), **how)
    names = [name for name in of_left + of_right if name not in summed]
    result = lax.rev(result, _backwards(axes, "spread taps", names))
    wanted, sizes = _parts(product.shape, numbers.out_spec, ("batch", "out"), axes, 2)
    order = [names.index(name) for name in itertools.chain(*wanted)]
    merged = [*map(math.prod, sizes)]
    result = result.transpose(order).reshape(merged)
    # Elements after the last window have a gradient of zero.
    result = jnp.pad(result, [(0, n - k) for n, k in zip(product.shape, merged, strict=True)])
    return result if sums_over_batch else _channels_last(result, numbers.out_spec)


def _channels_last(x: jax.Array, spec: Sequence[int], batch_is_second: bool = False) -> jax.Array:
    first, second, *spatial = spec
    batch, channels = (second, first) if batch_is_second else (first, second)
    return _compat.with_order_in_memory(x, (batch, *spatial, channels))


def _backwards(axes: Sequence[_Axis], kind: _Kind, names: Sequence[Any]) -> list[int]:
    """The places of the windows' elements along axes of a kind, among the named axes."""
    return [names.index(("size", i)) for i, axis in enumerate(axes) if axis.kind == kind]


def _split(
    x: jax.Array, spec: Sequence[int], names: Sequence[Any], axes: Sequence[_Axis], array: int
) -> tuple[jax.Array, list[Any]]:
    """An operand whose spatial axes are split into parts, and the names of all its axes."""
    of_axes, sizes = _parts(x.shape, spec, names, axes, array)
    x = lax.slice(x, [0] * x.ndim, [*map(math.prod, sizes)])  # up to the last window
    return x.reshape([*itertools.chain(*sizes)]), [*itertools.chain(*of_axes)]


def _parts(
    shape: Sequence[int],
    spec: Sequence[int],
    names: Sequence[Any],
    axes: Sequence[_Axis],
    array: int,
) -> tuple[list[list[Any]], list[list[int]]]:
    """The names and the sizes of the parts of each axis of an array."""
    of_axes: list[list[Any]] = [[] for _ in shape]
    sizes = [[n] for n in shape]
    for place, name in zip(spec, names, strict=False):
        of_axes[place] = [name]
    for i, (place, axis) in enumerate(zip(spec[2:], axes, strict=True)):
        of_axes[place] = [(part, i) for part in axis.parts(array)]
        sizes[place] = axis.sizes(array)
    return of_axes, sizes


def find(ctx: Any, params: dict[str, Any]) -> Product | None:
    """The convolution that is being lowered as a product, or None."""
    (left, right), (result,) = ctx.avals_in, ctx.avals_out
    numbers, precision = params["dimension_numbers"], params["precision"]
    default = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)
    is_plain = left.dtype != jnp.float32 or precision in default
    is_known = left.dtype in _DTYPES and right.dtype == left.dtype and is_plain
    has_groups = params["feature_group_count"] * params["batch_group_count"] > 1
    # JAX would have to be told how the product is sharded.
    is_sharded = any(entry for x in (left, right, result) for entry in x.sharding.spec)
    if has_groups or is_sharded or not is_known or 0 in (*left.shape, *right.shape):
        return None
    axes = []
    for i, j, k, stride, (low, _), *dilations in zip(
        *(spec[2:] for spec in numbers),
        *(params["window_strides"], params["padding"]),
        *(params["lhs_dilation"], params["rhs_dilation"]),
        strict=True,
    ):
        axis = _axis(left.shape[i], right.shape[j], result.shape[k], stride, low, *dilations)
        if axis is None:
            return None
        axes.append(axis)
    one_element = all(axis.size == 1 for axis in axes)
    return None if one_element else Product(numbers, (*axes,), result.shape)
