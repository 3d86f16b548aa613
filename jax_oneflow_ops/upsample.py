"""Nearest-neighbour upsampling of images, and its gradient."""

import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _compat, _native, _policy, _primitive, _reference

_NAME = "upsample_nearest2d"
_HALF_PIXEL = {"nearest": False, "nearest-exact": True}
# The dtypes that the gradient kernel sums.
_SUMMED = frozenset(
    map(jnp.dtype, ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"))
)
# The position of the first spatial axis, from the end.
_SPATIAL_AXIS = {"NCHW": -2, "NHWC": -3}


def upsample_nearest2d(
    x: ArrayLike,
    scale_factor: float | tuple[float, float] | None = None,
    size: int | tuple[int, int] | None = None,
    *,
    method: Literal["nearest", "nearest-exact"] = "nearest",
    data_format: Literal["NCHW", "NHWC"] = "NCHW",
    implementation: Literal["native", "xla"] | None = None,
) -> jax.Array:
    """Resizes images by repeating the nearest pixel.

    Images are channels-first: ``data_format="NCHW"`` is the default, and channels-last images need
    ``data_format="NHWC"``. Output pixel ``i`` shows input pixel ``floor(i * n_in / n_out)``. Both
    are PyTorch's conventions. `jax.image.resize` takes a whole shape and shows
    ``floor((i + 0.5) * n_in / n_out)``, which differs unless the factor is an integer:
    :func:`resize` replaces it with identical results.

    Replaces ``torch.nn.functional.interpolate`` with modes ``nearest`` and ``nearest-exact``, and
    OneFlow's ``UpsampleNearest2D``.

    Exactly one of `scale_factor` and `size` must be given. If the output is smaller than the input,
    pixels are dropped.

    Args:
      x: array of rank 3 or more, of any dtype of 1 to 16 bytes. Its spatial dimensions, height and
        width, are the last two (``"NCHW"``) or the two before the last (``"NHWC"``); there may be
        any number of leading dimensions.
      scale_factor: a positive number, or a pair of them for height and width. The output has
        ``floor(n * scale_factor)`` pixels if the input has ``n``, in Python's float arithmetic.
      size: the output's size in pixels, an integer for both dimensions or a pair (height, width).
      method: the source pixel, of ``n_in``, that output pixel ``i`` of ``n_out`` shows:

        - ``"nearest"``: ``floor(i * n_in / n_out)``, as torch's ``nearest`` and OneFlow.
        - ``"nearest-exact"``: ``floor((i + 0.5) * n_in / n_out)``, the pixel whose centre is
          nearest, as `jax.image.resize` and torch's ``nearest-exact``.

        At integer factors the two are the same.
      data_format: ``"NCHW"`` or ``"NHWC"``.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of `x`'s dtype, and of its shape except for the two spatial dimensions.

    Raises:
      TypeError: `x` is not an array or has a dtype without a fixed number of bytes (int4, PRNG
        keys), or `scale_factor` or `size` is not made of concrete numbers.
      ValueError: both or neither of `scale_factor` and `size` are given, they are not positive and
        finite, `x` has fewer than 3 dimensions, only one of input and output would be empty, or an
        option has an unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      The forward kernel copies bits. XLA's form on CPUs may change payloads of NaNs of bfloat16 and
      8-bit floats. The index map is computed in exact integer arithmetic;
      `jax.image.resize` and torch compute it in float32, and can differ by one pixel if rounding in
      float32 moves the quotient across an integer. For upsampling by integer factors all agree bit
      for bit.
      The gradient is the exact adjoint of the index map: each source pixel sums its output pixels
      in a fixed order, in float32 (f16, bf16, f32) or in the dtype itself, and rounds once. It is
      deterministic, and exists for f16, bf16, f32, f64, complex64 and complex128.

    Sharding:
      All dimensions except the two spatial ones may be sharded freely; the spatial ones are
      all-gathered, with a `GatherWarning`. Inside a `jax.shard_map` over only some axes of a mesh,
      arrays are all-gathered over the other axes, with the same warning.

    Source:
      OneFlow's ``upsample_nearest_kernel.cu``, described in "OneFlow UpsampleNearest2D" by BBuf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> x = jnp.arange(4.0).reshape(1, 1, 2, 2)
      >>> print(jof.upsample_nearest2d(x, 2)[0, 0])
      [[0. 0. 1. 1.]
       [0. 0. 1. 1.]
       [2. 2. 3. 3.]
       [2. 2. 3. 3.]]
      >>> jof.upsample_nearest2d(x, size=(3, 5), method="nearest-exact").shape
      (1, 1, 3, 5)
      >>> print(jax.grad(lambda x: jof.upsample_nearest2d(x, 2).sum())(x)[0, 0])
      [[4. 4.]
       [4. 4.]]
    """
    x = _checks.as_array(_NAME, "x", x)
    _checks.check_movable(_NAME, "x", x)
    method = _option("method", method, _HALF_PIXEL)
    data_format = _option("data_format", data_format, _SPATIAL_AXIS)
    if x.ndim < 3:
        raise ValueError(
            f"{_NAME}: x must have at least 3 dimensions ({data_format[1:]} and any number before "
            f"them), got shape {x.shape}"
        )
    axis = x.ndim + _SPATIAL_AXIS[data_format]
    in_hw = x.shape[axis], x.shape[axis + 1]
    result: jax.Array = upsample_nearest2d_p.bind(
        x,
        axis=axis,
        in_hw=in_hw,
        out_hw=_output_size(in_hw, scale_factor, size),
        half_pixel=_HALF_PIXEL[method],
        implementation=_native.choose_implementation(_NAME, implementation),
    )
    return result


@_checks.in_own_precision
def resize(
    image: ArrayLike,
    shape: Sequence[int],
    method: str | jax.image.ResizeMethod = "nearest",
    antialias: bool = True,
    precision: Any = jax.lax.Precision.HIGHEST,
    *,
    implementation: Literal["native", "xla"] | None = None,
) -> jax.Array:
    """Resizes an image to a shape. Replaces `jax.image.resize`.

    The result has the same values, bit for bit except for the payloads of NaNs. If `method` is not
    ``"nearest"``, `jax.image.resize` runs.

    Args:
      image: array of any rank and dtype.
      shape: the shape of the result, with as many dimensions as `image`. Any of them may be
        resized.
      method: ``"nearest"``, ``jax.image.ResizeMethod.NEAREST``, or any other method of
        `jax.image.resize`.
      antialias: passed to `jax.image.resize`; ``"nearest"`` ignores it.
      precision: passed to `jax.image.resize`; ``"nearest"`` ignores it.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of the given shape. ``"nearest"`` keeps the dtype of `image`.

    Raises:
      ValueError: `implementation` has an unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.
      Exception: what `jax.image.resize` raises.

    Numerics:
      Output pixel ``i`` of ``n_out`` shows input pixel ``floor((i + 0.5) * n_in / n_out)`` of
      ``n_in``. Kernels compute this exactly. `jax.image.resize` computes it in float32, and XLA
      may replace the division by a multiplication with ``1 / n_out``: if the quotient is an
      integer, or so close to one that rounding decides, the pixel may be the one before (all
      pixels, from 82 to 41 on a CPU). So kernels run only if no rounding can change the result, and
      `jax.image.resize` itself resizes the other dimensions. Kernels run for the factors 2, 3,
      4, ... up to a size of a million, and 1/3, 1/5, 1/7, ...; for 1/2, 1/4, 1/6, ... if ``n_out``
      is a power of two; and for other factors if no quotient is an integer and
      ``n_in * n_out < 2**20 * gcd(n_in, n_out)``.
      The gradient of the kernels is that of `upsample_nearest2d`.
      `jax.image.resize` resizes float8, int4 and PRNG keys, and arrays of symbolic sizes.

    Differentiation and sharding:
      Differentiable to any order, in forward and reverse mode. Dimensions that are resized are
      all-gathered if they are sharded, with a `GatherWarning`; all others may be sharded freely.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> image = jnp.arange(4.0).reshape(1, 2, 2, 1)
      >>> print(jof.resize(image, (1, 4, 4, 1), "nearest")[0, :, :, 0])
      [[0. 0. 1. 1.]
       [0. 0. 1. 1.]
       [2. 2. 3. 3.]
       [2. 2. 3. 3.]]
      >>> jof.resize(image, (1, 3, 5, 1), "bilinear").shape
      (1, 3, 5, 1)
    """
    choice = _native.choose_implementation("resize", implementation)

    def by_jax(image: Any, shape: Any) -> jax.Array:
        result: jax.Array = jax.image.resize(image, shape, method, antialias, precision)
        return result

    is_nearest = method is jax.image.ResizeMethod.NEAREST or (
        isinstance(method, str) and method == "nearest"
    )
    if not is_nearest or not isinstance(image, _compat.ARRAY_TYPES):
        return by_jax(image, shape)
    x = _checks.as_array("resize", "image", image)
    if not _has_kernels(x.dtype):
        return by_jax(x, shape)
    try:
        sizes = [n if n is m else operator.index(n) for n, m in zip(shape, x.shape, strict=True)]
    except (TypeError, ValueError):
        return by_jax(x, shape)  # symbolic sizes, or an error
    resized = [i for i, n in enumerate(x.shape) if n is not sizes[i] and n != sizes[i]]
    if not all(isinstance(x.shape[i], int) and min(x.shape[i], sizes[i]) > 0 for i in resized):
        return by_jax(x, shape)
    steps = _resize_steps(x.shape, sizes, resized)
    for axes in sorted(steps, key=lambda axes: math.prod(sizes[a] / x.shape[a] for a in axes)):
        target = [sizes[i] if i in axes else n for i, n in enumerate(x.shape)]
        if _is_exact(x.shape[axes[0]], sizes[axes[0]]):
            x = _resize_by_kernel(x, axes, target, choice)
        else:
            x = by_jax(x, target)
    return x


def _resize_by_kernel(
    x: jax.Array, axes: Sequence[int], shape: Sequence[int], choice: str | None
) -> jax.Array:
    """Resizes one dimension, or two adjacent ones."""
    axis = axes[0]
    if len(axes) == 1:
        x = jnp.expand_dims(x, axis)
        shape = (*shape[:axis], 1, *shape[axis:])
    result: jax.Array = resize_p.bind(
        x,
        axis=axis,
        in_hw=tuple(x.shape[axis : axis + 2]),
        out_hw=tuple(shape[axis : axis + 2]),
        half_pixel=True,
        implementation=choice,
    )
    return jnp.squeeze(result, axis) if len(axes) == 1 else result


def _resize_steps(
    old: Sequence[int], new: Sequence[int], resized: Sequence[int]
) -> list[tuple[int, ...]]:
    """The dimensions to resize in each step: two adjacent ones, by a kernel, or one."""
    steps: list[tuple[int, ...]] = []
    for axis in resized:
        before = steps[-1] if steps else ()
        if before == (axis - 1,) and all(_is_exact(old[a], new[a]) for a in (axis - 1, axis)):
            steps[-1] = (axis - 1, axis)
        else:
            steps.append((axis,))
    return steps


# The assumed relative error of a float32 quotient is 1 / _ROUNDINGS: that of eight roundings. XLA's
# code has four.
_ROUNDINGS = 2**21
_LARGEST = 2**20


@functools.lru_cache(maxsize=4096)
def _is_exact(n_in: int, n_out: int) -> bool:
    """Whether float32 must find the same pixels as exact arithmetic, however XLA rounds.

    The quotients are ``(2i + 1) n_in / (2 n_out)``. Each must be farther from an integer than its
    rounding error, unless nothing is rounded: if `n_out` is a power of two and the products fit in
    float32.
    """
    if max(n_in, n_out) > _LARGEST:
        return False
    numerator = (2 * np.arange(n_out, dtype=np.int64) + 1) * n_in
    if n_out & (n_out - 1) == 0 and numerator[-1] < 2**24:
        return True
    remainder = numerator % (2 * n_out)
    distance = np.minimum(remainder, 2 * n_out - remainder)
    return bool((distance * _ROUNDINGS > numerator).all())


def _has_kernels(dtype: Any) -> bool:
    """Whether there is a forward kernel and, if jax has a gradient, a gradient kernel."""
    differentiable = jnp.issubdtype(dtype, jnp.inexact)
    return _checks.is_movable(dtype) and (not differentiable or dtype in _SUMMED)


def _option(name: str, value: Any, known: dict[str, Any]) -> Any:
    if not isinstance(value, str) or value not in known:
        expected = " or ".join(f'"{k}"' for k in known)
        raise ValueError(f"{_NAME}: {name} must be {expected}, got {value!r}")
    return value


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(
                f"{_NAME}: {name} must be one number or a pair (height, width), got {value!r}"
            )
        return value[0], value[1]
    return value, value


def _output_size(in_hw: tuple[int, int], scale_factor: Any, size: Any) -> tuple[int, int]:
    if (scale_factor is None) == (size is None):
        raise ValueError(
            f"{_NAME}: exactly one of scale_factor and size must be given, got "
            f"scale_factor={scale_factor!r} and size={size!r}"
        )
    out_hw: list[int] = []
    for n, value in zip(in_hw, _pair("size", size), strict=True) if scale_factor is None else ():
        try:
            if isinstance(value, bool | np.bool_):
                raise TypeError
            out = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{_NAME}: size must be made of concrete integers, got {value!r} of type "
                f"{type(value).__name__}"
            ) from None
        if out <= 0:
            raise ValueError(f"{_NAME}: size must be positive, got {size!r}")
        if n == 0:
            raise ValueError(
                f"{_NAME}: x has no pixels to fill size={size!r} with: its height and width are "
                f"{in_hw}"
            )
        out_hw.append(out)
    if size is not None:
        return out_hw[0], out_hw[1]
    for n, value in zip(in_hw, _pair("scale_factor", scale_factor), strict=True):
        if (
            isinstance(value, jax.Array)
            or not isinstance(value, numbers.Real | np.number)
            or (isinstance(value, bool))
        ):
            raise TypeError(
                f"{_NAME}: scale_factor must be made of Python or NumPy numbers, since it decides "
                f"the output's shape, got {value!r} of type {type(value).__name__}"
            )
        factor = float(value)
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"{_NAME}: scale_factor must be positive and finite, got {scale_factor!r}"
            )
        if isinstance(n, int):
            out = math.floor(n * factor)
        elif factor.is_integer():
            out = n * int(factor)
        else:
            raise ValueError(
                f"{_NAME}: scale_factor must be an integer where x has a symbolic height or width, "
                f"got {scale_factor!r} for {in_hw}; give size instead"
            )
        if out == 0 and n != 0:
            raise ValueError(
                f"{_NAME}: scale_factor={scale_factor!r} makes an empty output from height and "
                f"width {in_hw}"
            )
        out_hw.append(out)
    return out_hw[0], out_hw[1]


# The primitives. All have the same parameters: the first spatial axis, the sizes of the source
# (in_hw) and of the output (out_hw), and the method.


def _abstract_eval(x: Any, result_hw: tuple[int, int], axis: int) -> Any:
    shape = (*x.shape[:axis], *result_hw, *x.shape[axis + 2 :])
    return _compat.without_spatial_sharding(x, shape, gathered=(axis, axis + 1))


def _forward_abstract_eval(x: Any, *, axis: int, out_hw: tuple[int, int], **_: Any) -> Any:
    return _abstract_eval(x, out_hw, axis)


def _backward_abstract_eval(dy: Any, *, axis: int, in_hw: tuple[int, int], **_: Any) -> Any:
    if dy.dtype not in _SUMMED:
        raise TypeError(
            f"{_NAME}: the gradient exists for float16, bfloat16, float32, float64, complex64 and "
            f"complex128, got {dy.dtype}; cast x first"
        )
    return _abstract_eval(dy, in_hw, axis)


def _attributes(*, axis: int, half_pixel: bool, **_: Any) -> dict[str, Any]:
    return {"axis": np.int64(axis), "half_pixel": np.bool_(half_pixel)}


def _sharding_rule(x: Any, *, axis: int, **_: Any) -> _primitive.ShardingRule:
    free = [f"d{i}" for i in range(len(x.shape))]
    operand = (*free[:axis], "h", "w", *free[axis + 2 :])
    result = (*free[:axis], "p", "q", *free[axis + 2 :])
    return _primitive.ShardingRule([operand], [result], replicated=frozenset("hwpq"))


def _batch(primitive: core.Primitive, args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    """The batch axis becomes one more leading or trailing dimension.

    It stays in its place, unless it is between height and width; then it moves to the front.
    """
    (x,), (batch,) = args, dims
    if batch == axis + 1:
        x, batch = jnp.moveaxis(x, batch, 0), 0
    return primitive.bind(x, axis=axis + (batch <= axis), **params), batch


def _policy_call(
    direction: str,
    x: Any,
    *,
    axis: int,
    in_hw: tuple[int, int],
    out_hw: tuple[int, int],
    **_: Any,
) -> _policy.Call:
    (h, w), (p, q) = in_hw, out_hw
    even = h and w and p % h == 0 and q % w == 0
    scale = "any size" if not even else "2x" if (p, q) == (2 * h, 2 * w) else "integers"
    layout = "planes" if math.prod(x.shape[axis + 2 :]) == 1 else "channels"
    pixels = x.shape[axis] * x.shape[axis + 1]
    moved = _policy.nbytes(x) * (h * w + p * q) // max(1, pixels)
    return _policy.Call((_NAME, direction, scale, _policy.bits(x.dtype), layout), moved)


def _call(
    target: str, abstract_eval: Callable[..., Any], _: str, x: jax.Array, **params: Any
) -> jax.Array:
    """Calls the kernel on one device."""
    result = abstract_eval(jax.typeof(x), **params)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(result.shape, result.dtype))
    y: jax.Array = call(x, **_attributes(**params))
    return y


def _define_pair(name: str, function: str) -> core.Primitive:
    """Defines the primitives of the public `function`; returns the forward one."""

    def define(suffix: str, reference: Callable[..., Any], abstract_eval: Any) -> core.Primitive:
        return _primitive.define(
            name + suffix,
            function=function,
            abstract_eval=abstract_eval,
            reference=reference,
            native=functools.partial(_call, f"jof_{_NAME}{suffix}", abstract_eval),
            sharding_rule=_sharding_rule,
            batch=_batch,
            call=functools.partial(_policy_call, "backward" if suffix else "forward"),
        )

    forward = define("", _reference.upsample_nearest2d, _forward_abstract_eval)
    backward = define("_backward", _reference.upsample_nearest2d_backward, _backward_abstract_eval)
    _primitive.define_linear_pair(forward, backward, lambda aval, **params: params)
    return forward


upsample_nearest2d_p = _define_pair("jof_upsample_nearest2d", _NAME)
resize_p = _define_pair("jof_resize", "resize")
