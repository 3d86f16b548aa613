"""Convolutions that XLA runs slowly: those whose windows do not overlap, and depthwise ones in 1D.

Windows that do not overlap: matrix products
--------------------------------------------

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

Depthwise convolutions along one axis: sums of shifted arrays
-------------------------------------------------------------

Each channel has a window of its own, as in the short convolutions of state space models. cuDNN has
good kernels for square windows of two axes. XLA computes a sum of a few shifted and scaled
arrays in one pass. Time in us on an H100, as above:

    array              window            convolution    to the array    to the kernel
    16 x 2048 x 2048    4      bf16      2435 -> 124     2437 -> 119    1691 -> 235
                               f32       2448 -> 193     2468 -> 193     846 -> 362
    16 x 2048 x 512    31      bf16      1287 -> 559     1300 -> 560    1015 -> 541
                               f32       2018 -> 445     2017 -> 428     989 -> 805

On CPUs they gained 2x to 37x, and the gradient to the kernel 1.6x to 21x if there are more than 32
channels. In two axes, at a stride
of 1, the convolution took 1.9 to 4.4 times as long as by cuDNN.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops import _checks, _compat

_MOST_TAPS = 32  # of a depthwise window
_FEW_CHANNELS = 32  # up to so many, gradients to kernels gained 0.4x to 1.3x on a CPU

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
    *, left: int, right: int, result: int, stride: int, low: int, dilation: int, of_kernel: int
) -> _Axis | None:
    """The axis of a convolution; None if windows overlap.

    The left operand is dilated by `dilation`, the right one by `of_kernel`. Where several kinds
    apply, as for windows of one element, they are the same product.
    """
    if dilation == of_kernel == 1 and stride == right and low == 0 and result * right <= left:
        return _Axis("windows", result, right)
    if of_kernel == stride == 1 and dilation == right and low == right - 1:
        return _Axis("spread", left, right) if 0 <= result - left * right < right else None
    if dilation == stride == 1 and of_kernel == result and low == 0 and right * result <= left:
        return _Axis("taps", right, result)
    if of_kernel == stride == 1 and dilation == result and low == result - 1:
        return _Axis("spread taps", left, result) if right == left * result else None
    return None


@dataclasses.dataclass(frozen=True)
class _Form:
    """A convolution in a new form.

    Attributes:
      numbers: the places of the convolution's axes.
      left: the type of the left operand.
      is_ordered: whether XLA is told how to store images.
      precision: that of the convolution.
      dtype: that of the result.
    """

    numbers: lax.ConvDimensionNumbers
    left: jax.core.ShapedArray
    is_ordered: bool
    precision: Any
    dtype: Any
    name = "convolution"

    def ordered(self, x: jax.Array, order: Sequence[int]) -> jax.Array:
        """An image, stored in this order of axes, as for the convolution.

        If XLA could choose, it would put the batch of a vision transformer last, and all layers
        would take 12 % longer (H100).
        """
        return _compat.with_order_in_memory(x, order) if self.is_ordered else x


def _order(spec: Sequence[int], batch_is_second: bool = False) -> tuple[int, ...]:
    """The axes of an image: the batch, the spatial ones, channels. Both others are first in it."""
    first, second, *spatial = spec
    batch, channels = (second, first) if batch_is_second else (first, second)
    return (batch, *spatial, channels)


@dataclasses.dataclass(frozen=True)
class Product(_Form):
    """A convolution as a product.

    Attributes:
      axes: its spatial axes.
      shape: the result's shape.
      is_transposed: whether the kernel is reversed, as in the gradient of a convolution. XLA finds
        such gradients and does not insert zeros.
    """

    axes: tuple[_Axis, ...]
    shape: tuple[int, ...]
    is_transposed: bool
    reason = "as a matrix product, since the windows do not overlap"

    def pays(self, platform: str) -> bool:
        """Whether the product is expected to be faster than the convolution."""
        kinds = {axis.kind for axis in self.axes if axis.size > 1}
        if platform == "cpu":
            return "windows" not in kinds
        numbers = self.numbers
        if "spread taps" in kinds or ("spread" in kinds and not self.is_transposed):
            return True
        if "windows" in kinds:
            return bool(self.left.shape[numbers.lhs_spec[1]] <= _MOST_GATHERED)
        if "spread" in kinds:
            return self.shape[numbers.out_spec[1]] <= _MOST_SPREAD
        return bool(self.left.shape[numbers.lhs_spec[0]] <= _MOST_SPREAD)  # sums over the batch

    def compute(self, left: jax.Array, right: jax.Array) -> jax.Array:
        numbers, axes = self.numbers, self.axes
        of_kernel = any(axis.kind.endswith("taps") for axis in axes)  # which sums over the batch
        left = self.ordered(left, _order(numbers.lhs_spec, of_kernel))
        if of_kernel:
            right = self.ordered(right, _order(numbers.rhs_spec, True))
        left, of_left = _split(left, numbers.lhs_spec, ("batch", "depth"), axes, 0)
        right, of_right = _split(right, numbers.rhs_spec, ("out", "depth"), axes, 1)
        right = lax.rev(right, _backwards(axes, "spread", of_right))
        summed = [name for name in of_left if name in of_right]
        places = [*map(of_left.index, summed)], [*map(of_right.index, summed)]
        result = lax.dot_general(
            left,
            right,
            (places, ((), ())),
            precision=lax.Precision.DEFAULT if self.precision is None else self.precision,
            preferred_element_type=self.dtype,
        )
        names = [name for name in of_left + of_right if name not in summed]
        result = lax.rev(result, _backwards(axes, "spread taps", names))
        wanted, sizes = _parts(self.shape, numbers.out_spec, ("batch", "out"), axes, 2)
        order = [names.index(name) for name in itertools.chain(*wanted)]
        merged = [*map(math.prod, sizes)]
        result = result.transpose(order).reshape(merged)
        # Elements after the last window have a gradient of zero.
        result = jnp.pad(result, [(0, n - k) for n, k in zip(self.shape, merged, strict=True)])
        return result if of_kernel else self.ordered(result, _order(numbers.out_spec))


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


@dataclasses.dataclass(frozen=True)
class Depthwise(_Form):
    """A convolution along one axis in which each channel has its own window, or a gradient of one.

    Attributes:
      of_kernel: whether the right operand is a cotangent, and the result the kernel's gradient.
      taps: the length of the window.
      apart: the distance of the window's elements.
      stride: the distance of windows.
      padding: zeros before and after the array.
    """

    of_kernel: bool
    taps: int
    apart: int
    stride: int
    padding: tuple[int, int]
    reason = "as a sum of shifted arrays, since each channel has its own window"

    def pays(self, platform: str) -> bool:
        """Whether the sums are expected to be faster: XLA sums some columns slowly."""
        if not self.of_kernel:
            return True
        channels: int = self.left.shape[self.numbers.lhs_spec[0]]
        if platform == "cpu":
            return channels > _FEW_CHANNELS
        return self.left.dtype.itemsize > 2 or channels % 2 == 0

    def compute(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The result, summed in float32 whatever the precision, and rounded once."""
        numbers, wide = self.numbers, _checks.promoted(self.dtype, jnp.float32)
        order = _order(numbers.lhs_spec, self.of_kernel)
        left = self.ordered(left, order)
        if self.of_kernel:
            right = self.ordered(right, _order(numbers.rhs_spec, True))
            # Otherwise XLA computes the convolution or its other gradient in the kernels of the
            # sums, which are slow at that.
            left, right = lax.optimization_barrier((left, right))
        x = left.transpose(order)
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*self.padding, 0), (0, 0, 0)])
        windows = (x.shape[1] - (self.taps - 1) * self.apart - 1) // self.stride + 1
        if self.of_kernel:
            windows = right.shape[numbers.rhs_spec[2]]
        first, _, last = x.shape
        shifted = [
            lax.slice(
                *(x, (0, k * self.apart, 0)),
                (first, k * self.apart + (windows - 1) * self.stride + 1, last),
                (1, self.stride, 1),
            ).astype(wide)
            for k in range(self.taps)
        ]
        of_result = _order(numbers.out_spec)
        if self.of_kernel:
            ct = right.transpose(_order(numbers.rhs_spec, True)).astype(wide)
            sums = lax.optimization_barrier([jnp.sum(y * ct, axis=(0, 1)) for y in shifted])
            result = jnp.stack(sums)[None]  # (1, taps, channels)
            return result.astype(self.dtype).transpose(np.argsort(of_result))
        out, depth, time = numbers.rhs_spec
        kernel = right.transpose(time, depth, out)[:, None].astype(wide)  # (taps, 1, 1, out)
        total = functools.reduce(operator.add, map(operator.mul, shifted, kernel))
        result = total.astype(self.dtype).transpose(np.argsort(of_result))
        return self.ordered(result, of_result)


def find(
    ctx: Any, operands: Any, platform: str, params: dict[str, Any]
) -> tuple[Product | Depthwise, Any, Any] | None:
    """The new form of the convolution that is being lowered, and its operands' types and values."""
    (left, right), (result,) = ctx.avals_in, ctx.avals_out
    is_known = left.dtype in _DTYPES and right.dtype == left.dtype
    if not is_known or 0 in (*left.shape, *right.shape, *result.shape):
        return None
    of_operands = params["precision"]
    precision = {*of_operands} if isinstance(of_operands, tuple) else {of_operands}
    if not all(isinstance(one, lax.Precision | None) for one in precision):  # an algorithm
        return None
    # If arrays are sharded, XLA would all-gather them to order them.
    is_ordered = platform == "cuda" and _compat.knows_shapes_of_shards(ctx)
    common = params["dimension_numbers"], left, is_ordered, of_operands, result.dtype
    if (params["feature_group_count"], params["batch_group_count"]) != (1, 1):
        how = _depthwise(left, right, result, params)
        return how and (Depthwise(*common, *how), ctx.avals_in, operands)
    is_exact = left.dtype == jnp.float32 and not precision <= {None, lax.Precision.DEFAULT}
    axes = _axes(left, right, result, params)
    if axes is None or is_exact:
        return None
    is_transposed = bool(_compat.operands_of(operands[1], "stablehlo.reverse"))
    return Product(*common, axes, result.shape, is_transposed), ctx.avals_in, operands


def _axes(left: Any, right: Any, result: Any, params: dict[str, Any]) -> tuple[_Axis, ...] | None:
    """The axes of `Product`, or None."""
    axes = []
    for i, j, k, stride, (low, _), dilation, of_kernel in zip(
        *(spec[2:] for spec in params["dimension_numbers"]),
        *(params["window_strides"], params["padding"]),
        *(params["lhs_dilation"], params["rhs_dilation"]),
        strict=True,
    ):
        axis = _axis(
            left=left.shape[i],
            right=right.shape[j],
            result=result.shape[k],
            stride=stride,
            low=low,
            dilation=dilation,
            of_kernel=of_kernel,
        )
        if axis is None:
            return None
        axes.append(axis)
    return None if all(axis.size == 1 for axis in axes) else (*axes,)


def _depthwise(
    left: Any, right: Any, result: Any, params: dict[str, Any]
) -> tuple[bool, int, int, int, tuple[int, int]] | None:
    """What `Depthwise` adds to the attributes of a form, or None."""
    numbers = params["dimension_numbers"]
    groups, groups_of_batch = params["feature_group_count"], params["batch_group_count"]
    if left.ndim != 3 or params["lhs_dilation"] != (1,):
        return None
    of_kernel = groups_of_batch > 1
    (step,), (dilation,), (padding,) = (
        params[name] for name in ("window_strides", "rhs_dilation", "padding")
    )
    many = groups_of_batch if of_kernel else groups
    channels = left.shape[numbers.lhs_spec[0 if of_kernel else 1]]
    sizes = channels, right.shape[numbers.rhs_spec[0]], result.shape[numbers.out_spec[1]]
    if sizes != (many,) * 3 or (of_kernel and groups > 1):
        return None
    # A gradient to the kernel has a step for each of its elements.
    taps = result.shape[numbers.out_spec[2]] if of_kernel else right.shape[numbers.rhs_spec[2]]
    apart, stride = (step, dilation) if of_kernel else (dilation, step)
    return (of_kernel, taps, apart, stride, tuple(padding)) if taps <= _MOST_TAPS else None
