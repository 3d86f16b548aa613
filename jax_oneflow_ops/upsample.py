"""Nearest-neighbour upsampling of images, and its gradient."""

import functools
import math
import numbers
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _compat, _native, _primitive, _reference

_NAME = "upsample_nearest2d"
_HALF_PIXEL = {"nearest": False, "nearest-exact": True}
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

    Replaces ``jax.image.resize(x, shape, "nearest")``, ``torch.nn.functional.interpolate`` with
    modes ``nearest`` and ``nearest-exact``, and OneFlow's ``UpsampleNearest2D``.

    Exactly one of `scale_factor` and `size` must be given. Sizes smaller than the input are fine:
    pixels are dropped then.

    Args:
      x: array of rank 3 or more, of any dtype of 1 to 16 bytes. Its spatial dimensions, height and
        width, are the last two (``"NCHW"``) or the two before the last (``"NHWC"``); there may be
        any number of leading dimensions.
      scale_factor: a positive number, or a pair of them for height and width. The output has
        ``floor(n * scale_factor)`` pixels where the input has ``n``, in Python's float arithmetic.
      size: the output's size in pixels, an integer for both dimensions or a pair (height, width).
      method: which source pixel output pixel ``i`` of ``n_out`` shows, of ``n_in``:

        - ``"nearest"``: ``floor(i * n_in / n_out)``, as torch's ``nearest`` and OneFlow.
        - ``"nearest-exact"``: ``floor((i + 0.5) * n_in / n_out)``, the pixel whose centre is
          nearest, as `jax.image.resize` and torch's ``nearest-exact``.

        At integer factors the two agree.
      data_format: ``"NCHW"`` or ``"NHWC"``.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference, None
        for native kernels where there are any (on CPUs and NVIDIA GPUs) and the reference
        elsewhere. The environment variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function
        is traced, replaces None.

    Returns:
      An array of `x`'s dtype and shape, but for the two spatial dimensions.

    Raises:
      TypeError: `x` is not an array or has a dtype without a fixed number of bytes (int4, PRNG
        keys), or `scale_factor` or `size` is not made of concrete numbers.
      ValueError: both or neither of `scale_factor` and `size` are given, they are not positive and
        finite, `x` has fewer than 3 dimensions, the output would be empty though the input is not,
        or the other way round, or an option has an unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      The forward moves bits. The index map is computed in exact integer arithmetic;
      `jax.image.resize` and torch compute it in float32 and can differ by one pixel where
      ``i * n_in / n_out`` is within float32's rounding of an integer. At integer factors all agree
      bit for bit.
      The gradient is the exact adjoint of the index map: each source pixel sums its outputs in
      float32 (f16, bf16, f32) or in the dtype itself, rounded once, in a fixed order: it is
      deterministic. It exists for f16, bf16, f32, f64, complex64 and complex128.

    Sharding:
      All but the two spatial dimensions may be sharded freely; those are gathered, with a
      `GatherWarning`. Inside a `jax.shard_map` over some axes of a mesh only, arrays are gathered
      over the other axes, with that warning.

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
    if not _checks.is_movable(x.dtype):
        raise TypeError(
            f"{_NAME}: x must have a dtype of 1, 2, 4, 8 or 16 whole bytes, got {x.dtype}"
        )
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
                f"{_NAME}: scale_factor must be made of concrete real numbers, as it decides the "
                f"output's shape, got {value!r} of type {type(value).__name__}"
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


# The primitives. Both carry the same parameters: the first spatial axis, the sizes on the source
# side (in_hw) and on the output side (out_hw), and the method.


def _abstract_eval(x: Any, result_hw: tuple[int, int], axis: int) -> Any:
    shape = (*x.shape[:axis], *result_hw, *x.shape[axis + 2 :])
    return _compat.without_spatial_sharding(x, shape, gathered=(axis, axis + 1))


def _forward_abstract_eval(x: Any, *, axis: int, out_hw: tuple[int, int], **_: Any) -> Any:
    return _abstract_eval(x, out_hw, axis)


def _backward_abstract_eval(dy: Any, *, axis: int, in_hw: tuple[int, int], **_: Any) -> Any:
    if dy.dtype not in (
        jnp.float16,
        jnp.bfloat16,
        jnp.float32,
        jnp.float64,
        jnp.complex64,
        jnp.complex128,
    ):
        raise TypeError(
            f"{_NAME}: the gradient exists for float16, bfloat16, float32, float64, complex64 and "
            f"complex128, got {dy.dtype}; cast x first"
        )
    return _abstract_eval(dy, in_hw, axis)


def _attributes(*, axis: int, half_pixel: bool, **_: Any) -> dict[str, Any]:
    return {"axis": np.int64(axis), "half_pixel": np.bool_(half_pixel)}


def _division(x: Any, *, axis: int, **_: Any) -> _primitive.Division:
    free = [f"d{i}" for i in range(len(x.shape))]
    operand = (*free[:axis], "h", "w", *free[axis + 2 :])
    result = (*free[:axis], "p", "q", *free[axis + 2 :])
    return _primitive.Division([operand], [result], whole=frozenset("hwpq"))


def _batch(primitive: core.Primitive, args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    """The batch axis becomes one more leading or trailing dimension, wherever it stands.

    Only between height and width it would be in the way; there it is moved to the front.
    """
    (x,), (batch,) = args, dims
    if batch == axis + 1:
        x, batch = jnp.moveaxis(x, batch, 0), 0
    return primitive.bind(x, axis=axis + (batch <= axis), **params), batch


_define = functools.partial(
    _primitive.define, function=_NAME, attributes=_attributes, division=_division, batch=_batch
)

upsample_nearest2d_p = _define(
    "jof_upsample_nearest2d",
    abstract_eval=_forward_abstract_eval,
    reference=_reference.upsample_nearest2d,
)
upsample_nearest2d_backward_p = _define(
    "jof_upsample_nearest2d_backward",
    abstract_eval=_backward_abstract_eval,
    reference=_reference.upsample_nearest2d_backward,
)
_primitive.define_linear_pair(
    upsample_nearest2d_p, upsample_nearest2d_backward_p, lambda aval, **params: params
)
