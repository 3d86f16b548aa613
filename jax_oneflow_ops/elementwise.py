"""Elementwise functions: activations, arithmetic, gated linear units, casts.

Each replaces the function of jax or jnp that its docstring names, with the same semantics. It runs
as one kernel, bound by memory bandwidth, and so does its gradient.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from jax_oneflow_ops import _checks, _compat, _elementwise, _native, _operands, _reference

Implementation = Literal["native", "xla"] | None
_P = ParamSpec("_P")
_R = TypeVar("_R")

_FLOATS = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))
_REAL_DTYPES = _FLOATS | frozenset(
    jnp.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)

_COMMON = """\
Args:
  {arguments}
  implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
    takes the one that was measured to be faster for such a call (see `policy`). The environment
    variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

Returns:
  {returns};
  other dtypes run the jnp reference. So do calls on one element, and activations and arithmetic
  with a boolean operand.

Raises:
  TypeError: an operand is not an array or a number, or ``implementation="native"`` was passed
    for a dtype without kernels.
  ValueError: operands' shapes do not broadcast together, or an option has an unknown value.
  NotImplementedError: ``implementation="native"`` on a platform without native kernels.

Numerics:
  {numerics}

Differentiation and sharding:
  {derivative}
  Differentiable to any order, in forward and reverse mode. All dimensions may be sharded freely.
  Inside a `jax.shard_map` over only some axes of a mesh, arrays are all-gathered over the other
  axes, with a `GatherWarning`.

Source:
  OneFlow's ``elementwise.cuh``, described in "OneFlow CUDA Elementwise" (Zheng, Yao, Guo, Liu)."""
_PROMOTED = """\
An array of the shape that the operands broadcast to, and of the dtype that jnp promotes them to.
  Kernels exist for {}"""
_NUMERICS = {
    "arithmetic": "16-bit values are computed in float32 and rounded once.",
    "activation": (
        "16-bit values are computed in float32 and rounded once: at most 2 ulp from the exact\n"
        "  result, tails included. float32 is within 4 ulp where ``|f(x)| >= |x| / 1024`` and\n"
        "  within 1e-4 relative in the tails. Results below 4e-36 may be 0."
    ),
    "conversion": "Rounding, saturation and NaN are those of ``astype``.",
    "movement": (
        "The kernel copies bits. XLA's form on CPUs may change payloads of NaNs of bfloat16 and\n"
        "  8-bit floats."
    ),
}


def _documented(
    *,
    numerics: str = "arithmetic",
    derivative: str = "The gradient is one fused kernel.",
    returns: str = _PROMOTED.format("float16, bfloat16, float32 and float64"),
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Adds what all functions of this module share: they keep 64-bit dtypes and have more sections.

    The sections precede the example. Arguments that the docstring lists under "Args" come first. If
    it lists none, these are x and, for functions of two arrays, y.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        text = inspect.cleandoc(function.__doc__ or "")
        head, _, example = text.partition("Example:\n")
        head, _, arguments = head.partition("Args:\n")
        if not arguments:
            arguments = "x: array of any shape, or a number."
            if "y" in inspect.signature(function).parameters:
                arguments += "\n  y: array that broadcasts with ``x``, or a number."
        common = _COMMON.format(
            arguments=arguments.strip(),
            returns=returns,
            numerics=_NUMERICS[numerics],
            derivative=derivative,
        )
        function.__doc__ = f"{head.rstrip()}\n\n{common}\n\nExample:\n{example}"
        return _checks.in_own_precision(function)

    return decorate


def _call(
    name: str,
    primitive: core.Primitive,
    reference: Callable[..., jax.Array],
    operands: dict[str, Any],
    implementation: Implementation,
    *,
    parameter: str | None = None,
) -> jax.Array:
    """Checks and promotes operands as jnp does, and binds the primitive.

    Args:
      name: the public function.
      primitive: the primitive of the function, from `_elementwise`.
      reference: the jnp function of the operands, in their order.
      operands: the arrays by the names that errors use; the parameter comes last.
      implementation: as the user gave it.
      parameter: the name of the operand that kernels take as a scalar only.
    """
    choice = _native.choose_implementation(name, implementation)
    arrays = {k: _checks.as_array(name, k, x, numbers=True) for k, x in operands.items()}
    _operands.broadcast_shape(name, {k: x.shape for k, x in arrays.items()})
    like = _result_type(reference, *arrays.values())
    if like.dtype not in _FLOATS:
        if choice == "native":
            raise _no_kernel(name, "float16, bfloat16, float32 and float64", like.dtype)
        return reference(*arrays.values())
    if parameter is not None and arrays[parameter].ndim:
        if choice == "native":
            raise ValueError(
                f'{name}: implementation="native" takes a scalar as {parameter}, got shape '
                f"{arrays[parameter].shape}; map over several values with jax.vmap"
            )
        return reference(*arrays.values())
    # For a bool factor XLA compiles a select, so that False times infinity or NaN is 0 in jnp.
    if choice is None and any(x.dtype == jnp.bool_ for x in arrays.values()):
        return reference(*arrays.values())
    converted = [_compat.converted(x, like) for x in arrays.values()]
    promoted = _operands.promoted(converted)
    result: jax.Array = _operands.bind(primitive, *promoted, implementation=choice)
    return result


def _result_type(reference: Callable[..., jax.Array], *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """The dtype and weak type of jnp's result; rarely needs to trace the reference."""
    dtype, *others = {x.dtype for x in arrays}
    is_plain = not others and dtype in _FLOATS and not any(jax.typeof(x).weak_type for x in arrays)
    # jnp may warn of different ranks, or raise an error.
    config: Any = jax.config
    checks_ranks = config.jax_numpy_rank_promotion != "allow"
    if not is_plain or (checks_ranks and len({x.ndim for x in arrays} - {0}) > 1):
        like: jax.ShapeDtypeStruct = jax.eval_shape(reference, *arrays)
        return like
    return jax.ShapeDtypeStruct((), dtype)


def _no_kernel(name: str, expected: str, dtype: Any) -> TypeError:
    return TypeError(
        f'{name}: implementation="native" exists for {expected}, got {dtype}; cast the operands or '
        'use implementation="xla"'
    )


# ---- activations ----

_relu_p = _elementwise.differentiable("relu", jax.nn.relu)
_leaky_relu_p = _elementwise.differentiable("leaky_relu", jax.nn.leaky_relu, parameters=1)
_elu_p = _elementwise.differentiable(
    "elu", jax.nn.elu, parameters=1, accurate=_reference.elu_accurate, approximate_in_xla=4
)
_sigmoid_p = _elementwise.differentiable(
    "sigmoid", jax.nn.sigmoid, accurate=_reference.sigmoid_accurate
)
_silu_p = _elementwise.differentiable("silu", jax.nn.silu)
_tanh_p = _elementwise.differentiable(
    "tanh", jnp.tanh, accurate=_reference.tanh_accurate, approximate_in_xla=4
)
_softplus_p = _elementwise.differentiable("softplus", jax.nn.softplus, approximate_in_xla=4)
_hard_swish_p = _elementwise.differentiable("hard_swish", jax.nn.hard_swish)
_mish_p = _elementwise.differentiable("mish", jax.nn.mish, approximate_in_xla=4)
_gelu_p = {
    approximate: _elementwise.differentiable(
        target, reference, function="gelu", accurate=accurate, approximate_in_xla=size
    )
    for approximate, target, reference, accurate, size in (
        (True, "gelu_tanh", _reference.gelu_tanh, _reference.gelu_accurate, 4),
        (False, "gelu_erf", _reference.gelu_erf, None, 2),
    )
}


@_documented()
def relu(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``max(x, 0)``. Replaces `jax.nn.relu`.

    NaN stays NaN. The derivative at 0 is 0, as in jax.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.relu(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    return _call("relu", _relu_p, jax.nn.relu, {"x": x}, implementation)


@_documented()
def leaky_relu(
    x: ArrayLike, negative_slope: ArrayLike = 0.01, *, implementation: Implementation = None
) -> jax.Array:
    """``x`` where it is not negative, else ``negative_slope * x``. Replaces `jax.nn.leaky_relu`.

    Args:
      x: array of any shape, or a number.
      negative_slope: a scalar, which may be traced. An array runs the jnp reference, and is an
        error with ``"native"``.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.leaky_relu(jnp.array([-1.0, 0.0, 2.0]), 0.5))
      [-0.5  0.   2. ]
    """
    operands = {"x": x, "negative_slope": negative_slope}
    return _call(
        "leaky_relu",
        _leaky_relu_p,
        jax.nn.leaky_relu,
        operands,
        implementation,
        parameter="negative_slope",
    )


@_documented(numerics="activation")
def elu(
    x: ArrayLike, alpha: ArrayLike = 1.0, *, implementation: Implementation = None
) -> jax.Array:
    """``x`` where it is positive, else ``alpha * (exp(x) - 1)``. Replaces `jax.nn.elu`.

    Args:
      x: array of any shape, or a number.
      alpha: a scalar, which may be traced. An array runs the jnp reference, and is an error with
        ``"native"``.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.elu(jnp.array([-jnp.inf, 0.0, 2.0]), alpha=3.0))
      [-3.  0.  2.]
    """
    return _call(
        "elu", _elu_p, jax.nn.elu, {"x": x, "alpha": alpha}, implementation, parameter="alpha"
    )


@_documented(numerics="activation")
def sigmoid(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``1 / (1 + exp(-x))``. Replaces `jax.nn.sigmoid`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.sigmoid(jnp.array([-jnp.inf, 0.0, jnp.inf])))
      [0.  0.5 1. ]
    """
    return _call("sigmoid", _sigmoid_p, jax.nn.sigmoid, {"x": x}, implementation)


@_documented(numerics="activation")
def silu(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x * sigmoid(x)``, also known as swish. Replaces `jax.nn.silu`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(f"{jof.silu(jnp.array(1.0)):.3f}")
      0.731
    """
    return _call("silu", _silu_p, jax.nn.silu, {"x": x}, implementation)


@_documented(numerics="activation")
def tanh(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """The hyperbolic tangent. Replaces `jnp.tanh`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(f"{jof.tanh(jnp.array(1.0)):.3f}")
      0.762
    """
    return _call("tanh", _tanh_p, jnp.tanh, {"x": x}, implementation)


@_documented(numerics="activation")
def softplus(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``log(1 + exp(x))``. Replaces `jax.nn.softplus`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(f"{jof.softplus(jnp.array(1.0)):.3f}")
      1.313
    """
    return _call("softplus", _softplus_p, jax.nn.softplus, {"x": x}, implementation)


@_documented(numerics="activation")
def hard_swish(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x * relu6(x + 3) / 6``. Replaces `jax.nn.hard_swish`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.hard_swish(jnp.array([-3.0, 0.0, 3.0, 6.0])))
      [-0.  0.  3.  6.]
    """
    return _call("hard_swish", _hard_swish_p, jax.nn.hard_swish, {"x": x}, implementation)


@_documented(numerics="activation")
def mish(x: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x * tanh(softplus(x))``. Replaces `jax.nn.mish`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(f"{jof.mish(jnp.array(1.0)):.3f}")
      0.865
    """
    return _call("mish", _mish_p, jax.nn.mish, {"x": x}, implementation)


@_documented(numerics="activation")
def gelu(
    x: ArrayLike, approximate: bool = True, *, implementation: Implementation = None
) -> jax.Array:
    """``x`` times the standard normal distribution function of ``x``. Replaces `jax.nn.gelu`.

    Args:
      x: array of any shape, or a number.
      approximate: True for ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``, False for
        ``0.5 x erfc(-x / sqrt(2))``. Both have a small relative error in the negative tail.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(f"{jof.gelu(jnp.array(1.0)):.3f}")
      0.841
    """
    approximate = bool(approximate)
    reference = _reference.gelu_tanh if approximate else _reference.gelu_erf
    return _call("gelu", _gelu_p[approximate], reference, {"x": x}, implementation)


# ---- arithmetic ----

_add_p = _elementwise.linear_sum("add", jnp.add, (1, 1))
_subtract_p = _elementwise.linear_sum("subtract", jnp.subtract, (1, -1))
_multiply_p = _elementwise.differentiable("multiply", jnp.multiply, inputs=2, linear=(0, 1))
_divide_p = _elementwise.differentiable("divide", jnp.divide, inputs=2, linear=(0,))
_maximum_p = _elementwise.differentiable("maximum", jnp.maximum, inputs=2)
_minimum_p = _elementwise.differentiable("minimum", jnp.minimum, inputs=2)
_scale_p = _elementwise.differentiable("scale", jnp.multiply, parameters=1, linear=(0,))
_fma_p = _elementwise.fused_multiply_add(_reference.fma, _multiply_p, _add_p)
_where_p = _elementwise.selection(_reference.where)
_where_by_jnp: Any = jax.jit(_reference.where)
_cast_p = _elementwise.conversion()


@_documented()
def scale(x: ArrayLike, alpha: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x * alpha`` for a scalar ``alpha``. Replaces ``alpha * x``.

    Args:
      x: array of any shape, or a number.
      alpha: a scalar. It may be traced: the kernel reads it from device memory. With an array,
        `multiply` runs.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.scale(jnp.array([1.0, 2.0]), 0.5))
      [0.5 1. ]
    """
    operands = {"x": x, "alpha": alpha}
    if getattr(alpha, "ndim", 0):
        return _call("scale", _multiply_p, jnp.multiply, operands, implementation)
    return _call("scale", _scale_p, jnp.multiply, operands, implementation, parameter="alpha")


@_documented(derivative="The gradient moves no data.")
def add(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x + y``. Replaces `jnp.add`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.add(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      [4. 6.]
    """
    return _call("add", _add_p, jnp.add, {"x": x, "y": y}, implementation)


@_documented(derivative="The gradient is at most a negation.")
def subtract(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x - y``. Replaces `jnp.subtract`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.subtract(jnp.array([1.0, 2.0]), 1.0))
      [0. 1.]
    """
    return _call("subtract", _subtract_p, jnp.subtract, {"x": x, "y": y}, implementation)


@_documented()
def multiply(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x * y``. Replaces `jnp.multiply`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.multiply(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
      [3. 8.]
    """
    return _call("multiply", _multiply_p, jnp.multiply, {"x": x, "y": y}, implementation)


@_documented()
def divide(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``x / y``. Replaces `jnp.divide`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.divide(jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0])))
      [0.5 inf]
    """
    return _call("divide", _divide_p, jnp.divide, {"x": x, "y": y}, implementation)


@_documented()
def maximum(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """The larger of ``x`` and ``y``, NaN if either is. Replaces `jnp.maximum`.

    Equal operands get half of the gradient each, as in JAX.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.maximum(jnp.array([1.0, 4.0]), jnp.array([3.0, 2.0])))
      [3. 4.]
    """
    return _call("maximum", _maximum_p, jnp.maximum, {"x": x, "y": y}, implementation)


@_documented()
def minimum(x: ArrayLike, y: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """The smaller of ``x`` and ``y``, NaN if either is. Replaces `jnp.minimum`.

    Equal operands get half of the gradient each, as in JAX.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.minimum(jnp.array([1.0, 4.0]), jnp.array([3.0, 2.0])))
      [1. 2.]
    """
    return _call("minimum", _minimum_p, jnp.minimum, {"x": x, "y": y}, implementation)


@_documented(derivative="The gradient with respect to x and y is one fused kernel.")
def fma(
    x: ArrayLike, y: ArrayLike, z: ArrayLike, *, implementation: Implementation = None
) -> jax.Array:
    """``x * y + z``, rounded once. Replaces ``x * y + z``, which may be rounded twice.

    On CPUs 16-bit results are rounded to float32 first, and may be 1 ulp off.

    Args:
      x: array of any shape, or a number.
      y: array that broadcasts with ``x``, or a number.
      z: array that broadcasts with ``x`` and ``y``, or a number.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.fma(jnp.array([1.0, 2.0]), 3.0, jnp.array([0.5, 0.5])))
      [3.5 6.5]
    """
    return _call("fma", _fma_p, _reference.fma, {"x": x, "y": y, "z": z}, implementation)


@_documented(
    numerics="movement", returns=_PROMOTED.format("dtypes of 1, 2, 4, 8 and 16 whole bytes")
)
def where(
    condition: ArrayLike,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    size: int | None = None,
    fill_value: Any = None,
    implementation: Implementation = None,
) -> Any:
    """``x`` where ``condition`` is true, else ``y``. Replaces `jnp.where`.

    Without ``x`` and ``y`` it is `jnp.where` itself: a tuple of the indices at which ``condition``
    is not zero.

    Args:
      condition: boolean array of any shape, or numbers, of which all but zero count as true.
      x: array of any dtype of 1 to 16 bytes, or a number.
      y: array of any dtype of 1 to 16 bytes, or a number.
      size: for the form with one argument, as in `jnp.where`.
      fill_value: for the form with one argument, as in `jnp.where`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.where(jnp.array([True, False]), jnp.array([1.0, 2.0]), 0.0))
      [1. 0.]
    """
    choice = _native.choose_implementation("where", implementation)
    if x is None or y is None or size is not None or fill_value is not None:
        if choice == "native":
            raise ValueError('where: implementation="native" needs x and y')
        every: Any = jnp.where
        return every(condition, x, y, size=size, fill_value=fill_value)
    operands = {"condition": condition, "x": x, "y": y}
    arrays = {k: _checks.as_array("where", k, v, numbers=True) for k, v in operands.items()}
    _operands.broadcast_shape("where", {k: v.shape for k, v in arrays.items()})
    like = _where_by_jnp.eval_shape(*arrays.values())
    if not _checks.is_movable(like.dtype):
        if choice == "native":
            raise _no_kernel("where", "dtypes of 1, 2, 4, 8 or 16 whole bytes", like.dtype)
        return _reference.where(*arrays.values())
    chosen = arrays["condition"]
    chosen = chosen if chosen.dtype == jnp.bool_ else chosen != 0
    branches = (_compat.converted(arrays[k], like) for k in ("x", "y"))
    promoted = _operands.promoted([chosen, *branches])
    result: jax.Array = _operands.bind(_where_p, *promoted, implementation=choice)
    return result


@_documented(
    numerics="conversion",
    derivative="The gradient is the cast of the cotangent to x's dtype.",
    returns="An array of x's shape. Kernels exist for bool, integers and floats of 8 to 64 bits",
)
def cast(x: ArrayLike, dtype: DTypeLike, *, implementation: Implementation = None) -> jax.Array:
    """``x`` converted to ``dtype``. Replaces ``x.astype(dtype)``, bit for bit.

    Args:
      x: array of any shape, or a number.
      dtype: the dtype of the result.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.cast(jnp.array([1.5, -2.5, 300.0]), jnp.int8))
      [  1  -2 127]
    """
    choice = _native.choose_implementation("cast", implementation)
    x = _checks.as_array("cast", "x", x, numbers=True)
    new_dtype = _converted_dtype(x, dtype)
    if not {x.dtype, new_dtype} <= _REAL_DTYPES:
        if choice == "native":
            raise _no_kernel(
                "cast", "bool, integers and floats of 8 to 64 bits", f"{x.dtype} to {new_dtype}"
            )
        return x.astype(dtype)
    if x.dtype == new_dtype:
        return x.astype(dtype)  # moves nothing
    result: jax.Array = _operands.bind(_cast_p, x, new_dtype=new_dtype, implementation=choice)
    return result


def _converted_dtype(x: jax.Array, dtype: Any) -> Any:
    """The dtype of ``x.astype(dtype)``; the errors and warnings are those of jax.

    jax is not asked in the most frequent cases, as it would trace a function for each call.
    """
    is_plain = isinstance(dtype, np.dtype | type(jnp.float32))
    if is_plain and {x.dtype, plain := np.dtype(dtype)} <= _REAL_DTYPES and plain.itemsize < 8:
        return plain
    try:
        return jax.eval_shape(lambda x: x.astype(dtype), x).dtype
    except (TypeError, ValueError) as error:
        raise type(error)(f"cast: {x.dtype} cannot be converted to {dtype!r}: {error}") from error


# ---- gated linear units ----

_swiglu_p = _elementwise.differentiable("swiglu", _reference.swiglu, inputs=2, linear=(0,))
_geglu_p = {
    approximate: _elementwise.differentiable(
        *(target, reference),
        function="geglu",
        inputs=2,
        linear=(0,),
        accurate=accurate,
        approximate_in_xla=size,
    )
    for approximate, target, reference, accurate, size in (
        (True, "geglu_tanh", _reference.geglu_tanh, _reference.geglu_accurate, 4),
        (False, "geglu_erf", _reference.geglu_erf, None, 2),
    )
}


@_documented(numerics="activation", derivative="The gradient is one kernel with two results.")
def swiglu(x: ArrayLike, gate: ArrayLike, *, implementation: Implementation = None) -> jax.Array:
    """``silu(gate) * x``. Replaces ``jax.nn.silu(gate) * x``.

    Args:
      x: array of any shape, or a number.
      gate: array that broadcasts with ``x``, or a number.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.swiglu(jnp.array([2.0, 2.0]), jnp.array([0.0, 100.0])))
      [  0. 200.]
    """
    return _call("swiglu", _swiglu_p, _reference.swiglu, {"x": x, "gate": gate}, implementation)


@_documented(numerics="activation", derivative="The gradient is one kernel with two results.")
def geglu(
    x: ArrayLike,
    gate: ArrayLike,
    approximate: bool = True,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """``gelu(gate, approximate) * x``. Replaces ``jax.nn.gelu(gate, approximate) * x``.

    Args:
      x: array of any shape, or a number.
      gate: array that broadcasts with ``x``, or a number.
      approximate: as for `gelu`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.geglu(jnp.array([2.0, 2.0]), jnp.array([0.0, 100.0])))
      [  0. 200.]
    """
    approximate = bool(approximate)
    reference = _reference.geglu_tanh if approximate else _reference.geglu_erf
    return _call("geglu", _geglu_p[approximate], reference, {"x": x, "gate": gate}, implementation)
