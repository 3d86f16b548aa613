"""Functions of rows: softmax and its relatives, and norms.

Each reduces along an axis and then combines every element with the result of the reduction. The
functions and their gradients take as few passes over memory as possible.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _compat, _group_norm, _native, _primitive, _reference, _rows

Implementation = Literal["native", "xla"] | None
Axis = int | Sequence[int] | None

_FLOATS = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """``exp(x) / sum(exp(x))`` along an axis. Replaces `jax.nn.softmax`.

    Args:
      x: array of any shape; integers are converted as `jnp.exp` converts them.
      axis: the axis of the sum, or several, or None for all. Axes that are not adjacent cost a
        transposition.
      where: booleans that broadcast to `x`: which elements take part. The result is 0 for the
        others. It costs additional passes over memory.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of `x`'s shape and dtype.

    Raises:
      TypeError: `x` is not an array of numbers, or `axis` is not made of integers.
      ValueError: `axis` is out of range or repeats, or an option has an unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      The maximum is subtracted first. 16-bit values are computed in float32 and rounded once.
      Results below 4e-38 may be 0. All results are NaN if an element is NaN or +inf, or if all are
      -inf, as in `jax.nn.softmax`.

    Differentiation and sharding:
      Differentiable to any order, in both modes; the gradient is one kernel, which reads the result
      and not `x`. All dimensions except `axis` may be sharded freely; `axis` is all-gathered, with
      a `GatherWarning`. On Explicit axes the result has the sharding of `x`, also along `axis`.

    Source:
      OneFlow's softmax, described in "How to Implement an Efficient Softmax CUDA Kernel".

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.softmax(jnp.array([[0.0, 0.0, -jnp.inf], [3.0, 3.0, 3.0]])).round(3))
      [[0.5   0.5   0.   ]
       [0.333 0.333 0.333]]
    """
    return _softmax("softmax", x, axis, where, 0, implementation, log=False)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """``x - log(sum(exp(x)))`` along an axis. Replaces `jax.nn.log_softmax`.

    Args:
      x: array of any shape; integers are converted as `jnp.exp` converts them.
      axis: the axis of the sum, or several, or None for all, as in `softmax`.
      where: booleans that broadcast to `x`: which elements take part. The result is -inf for the
        others.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of `x`'s shape and dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`.

    Numerics:
      As of `softmax`.

    Differentiation and sharding:
      As of `softmax`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.log_softmax(jnp.array([0.0, 0.0])).round(4))
      [-0.6931 -0.6931]
    """
    return _softmax("log_softmax", x, axis, where, -jnp.inf, implementation, log=True)


def _strong(x: jax.Array) -> jax.Array:
    """`x` without a weak type, which JAX's functions do not return."""
    return jax.lax.convert_element_type(x, x.dtype)


@_checks.in_own_precision
def _softmax(
    name: str, x: Any, axis: Any, where: Any, fill: float, implementation: Any, *, log: bool
) -> jax.Array:
    choice = _native.choose_implementation(name, implementation)
    x = _strong(_floating(name, "x", x))
    axes = _axes(name, axis, x.ndim)
    mask = _mask(name, where, x.shape)
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    types, x = [jax.typeof(x)], _primitive.gathered(name, "x", x, axes)
    rows, place, back = _merged(name, "x", x, axes)
    y = _primitive.bind(_rows.softmax_p, rows, axis=place, log=log, implementation=choice)
    y = _sharded_as(types, axes, back(y))
    return y if mask is None else jnp.where(mask, y, jnp.asarray(fill, y.dtype))


@_checks.in_own_precision
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation = None,
) -> Any:
    """``log(sum(exp(a)))``. Replaces `jax.nn.logsumexp` and `jax.scipy.special.logsumexp`.

    Args:
      a: array of any shape; integers are converted as `jnp.exp` converts them. For complex
        numbers, and with `b` or `return_sign`, JAX's function runs.
      axis: the axis of the sum, or several, as in `softmax`; None for all.
      b: factors of the exponentials.
      keepdims: whether the result keeps the axes, with size 1.
      return_sign: whether to return a pair, whose second element is the sign of the sum.
      where: booleans that broadcast to `a`: which elements take part.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of `a`'s dtype and shape without the axes.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`.

    Numerics:
      The maximum is subtracted first, if it is finite. 16-bit values are computed in float32 and
      rounded once. The result is -inf if there are no elements, as in JAX.

    Differentiation and sharding:
      Differentiable to any order, in both modes; the gradient is one kernel, which reads `a` and
      two numbers per row. All dimensions may be sharded freely. If `axis` is sharded, two
      all-reduces of one number per row combine the parts of rows; forward-mode derivatives
      all-gather them.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.logsumexp(jnp.array([1000.0, 1000.0])).round(1))
      1000.7
    """
    name = "logsumexp"
    choice = _native.choose_implementation(name, implementation)
    x = _checks.as_array(name, "a", a, numbers=True)
    if b is not None or return_sign or jnp.issubdtype(x.dtype, jnp.complexfloating):
        if choice == "native":
            raise TypeError(f"{name}: there are no kernels for b, return_sign or complex numbers")
        return jax.nn.logsumexp(x, axis, b, keepdims, return_sign, where)
    x = _strong(_floating(name, "a", x))
    axes = _axes(name, axis, x.ndim)
    mask = _mask(name, where, x.shape)
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    rows, place, _ = _merged(name, "a", x, axes)
    [y] = _primitive.bind(_rows.logsumexp_p, rows, axis=place, keeps=False, implementation=choice)
    return jnp.expand_dims(y, axes) if keepdims else y


@_checks.in_own_precision
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """``logsumexp(logits) - logits[label]`` along an axis. Replaces optax's function of that name.

    The loss and its gradient together read the logits once and write once if they run on one device
    and the cotangent does not depend on the loss, as for a sum or a mean of losses, unless rows are
    so long that several blocks of a GPU share one. Otherwise they read the logits twice. The
    gradient overwrites the logits if nothing else needs them.

    Args:
      logits: array of any shape.
      labels: integers of the shape of `logits` without the axes. With several axes, a label is an
        index into all of them flattened, in the order of `axis`.
      axis: the axis of the classes, or several.
      where: booleans of the shape of the labels or of the logits: which elements take part. The
        result is 0 for a row in which no element does.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of the shape of `labels` and the dtype of `logits`.

    Raises:
      TypeError: `logits` are not an array of floats, or `labels` not one of integers.
      ValueError: shapes do not fit, `axis` is out of range or repeats, or an option has an unknown
        value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      16-bit logits are computed in float32 and the loss is rounded once. Negative labels count from
      the end; labels out of range give NaN and no gradient of their own, as in optax.

    Differentiation and sharding:
      Differentiable to any order, in both modes; the gradient is one kernel. All dimensions may be
      sharded freely. Sharded classes cost two all-reduces of a few numbers per row; no logits are
      sent, and the gradient needs no communication. Forward-mode derivatives all-gather sharded
      classes.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> logits = jnp.array([[0.0, 0.0, 0.0], [-30.0, 0.0, -30.0]])
      >>> print(jof.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 0])).round(1))
      [ 1.1 30. ]
    """
    name = "softmax_cross_entropy_with_integer_labels"
    choice = _native.choose_implementation(name, implementation)
    x = _strong(_float_array(name, "logits", logits))
    axes = _axes(name, axis, x.ndim, sort=False)
    if axis is None or not axes:
        raise ValueError(f"{name}: axis must name an axis of logits, got {axis!r}")
    if jnp.shape(labels) == x.shape != () and jnp.issubdtype(jnp.result_type(labels), jnp.floating):
        raise TypeError(
            f"{name}: labels must be integers that name classes, got an array of logits' shape; of "
            "one-hot labels take labels.argmax(axis)"
        )
    ids = _checks.as_ids(name, "labels", labels, math.prod(x.shape[a] for a in axes))
    wanted = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    if ids.shape != wanted:
        raise ValueError(
            f"{name}: labels must have the shape of logits without axis, {wanted}, got {ids.shape}"
        )
    x, ids = _rows.joined(name, axes, logits=x, labels=ids)
    rows, place, _ = _merged(name, "logits", x, axes)
    mask = _mask(name, where, x.shape, wanted)
    if mask is not None and mask.ndim != x.ndim:
        mask = jnp.expand_dims(mask, sorted(axes))
    if ids.dtype != jnp.int32:
        limits = jnp.iinfo(jnp.int32)
        ids = jnp.clip(ids, limits.min, limits.max).astype(jnp.int32)
    if mask is None:
        loss: jax.Array
        [loss] = _primitive.bind(
            _rows.cross_entropy_p, rows, ids, axis=place, keeps=False, implementation=choice
        )
        return loss
    masked = jnp.where(mask, x, -jnp.inf)
    total = logsumexp(masked, tuple(axes), implementation=implementation)
    of_label = _reference.at_labels(rows, ids, place)
    some = jnp.broadcast_to(mask, x.shape).any(axes)
    masked_loss: jax.Array = jnp.where(some, total - of_label, 0)
    return masked_loss


# ---- arguments ----


def _floating(name: str, argument: str, operand: Any) -> jax.Array:
    x = _checks.as_array(name, argument, operand, numbers=True)
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_:
        x = x.astype(jax.eval_shape(jnp.exp, x).dtype)
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{name}: {argument} must be float16, bfloat16, float32, float64 or integers, got "
            f"{x.dtype}"
        )
    return x


def _axes(name: str, axis: Any, ndim: int, *, sort: bool = True) -> tuple[int, ...]:
    """`axis` as a tuple of non-negative integers, sorted by default."""
    if axis is None:
        return tuple(range(ndim))
    try:
        axes = _checks.as_axes(name, "axis", axis, ndim)
    except TypeError:
        raise TypeError(
            f"{name}: axis must be None, an integer or a sequence of integers, got {axis!r}"
        ) from None
    return tuple(sorted(axes)) if sort else axes


def _mask(
    name: str, where: Any, shape: tuple[int, ...], rows: tuple[int, ...] | None = None
) -> jax.Array | None:
    """`where` as booleans that broadcast to `shape`, or that have the shape of the rows."""
    if where is None:
        return None
    mask = _checks.as_array(name, "where", where, numbers=True)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{name}: where must be booleans, got {mask.dtype}; compare, as in w != 0")
    wanted = shape if rows is None or mask.ndim == len(shape) else rows
    if not _broadcasts(mask.shape, wanted):
        raise ValueError(f"{name}: where must broadcast to shape {wanted}, got {mask.shape}")
    # Axes are inserted into a mask of rows later, so it must have all of theirs.
    return mask if wanted == shape else jnp.broadcast_to(mask, wanted)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


def _merged(
    name: str, argument: str, x: jax.Array, axes: Sequence[int]
) -> tuple[jax.Array, int, Any]:
    """`x` with `axes` merged into one, the position of that axis, and the inverse, for results."""
    shape = x.shape
    if len(axes) == 1:
        return x, axes[0], lambda y: y
    # Of axes that a reshape merges, jax allows only the first to be sharded in a type.
    reason = "it is reduced together with others"
    x = _primitive.gathered(name, argument, x, axes[1:], reason)
    begin = axes[0] if axes else x.ndim
    if [*axes] == [*range(begin, begin + len(axes))]:
        n = math.prod(shape[a] for a in axes)
        merged = (*shape[:begin], n, *shape[begin + len(axes) :])
        return x.reshape(merged), begin, lambda y: y.reshape(shape)
    others = [a for a in range(x.ndim) if a not in axes]
    order = (*others, *axes)
    moved = jnp.transpose(x, order)
    merged = (*(shape[a] for a in others), math.prod(shape[a] for a in axes))
    inverse = [order.index(a) for a in range(x.ndim)]
    return (
        moved.reshape(merged),
        len(others),
        lambda y: jnp.transpose(y.reshape(moved.shape), inverse),
    )


def _sharded_as(types: Sequence[Any], axes: Sequence[int], y: jax.Array) -> jax.Array:
    """`y`, sharded along `axes` as the operands' types are: JAX's formulas return such arrays."""
    specs = [aval.sharding.spec for aval in types if not aval.sharding.mesh.empty]
    own = jax.typeof(y).sharding
    if not specs or own.mesh.empty:
        return y
    used = {axis for a, e in enumerate(own.spec) if a not in axes for axis in _compat.names_of(e)}
    spec = [*own.spec]
    for a in axes:
        entry = next((given[a] for given in specs if given[a] is not None), None)
        spec[a] = entry if used.isdisjoint(_compat.names_of(entry)) else None
        used.update(_compat.names_of(spec[a]))
    return _compat.resharded(y, jax.typeof(y), spec)


# ---- norms ----


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    residual: ArrayLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``, with moments along an axis.

    Replaces the arithmetic of `flax.linen.LayerNorm`. `jax_oneflow_ops.linen` has the module.

    Args:
      x: array of any shape.
      scale: array with the shape of `x` along `axis`, in that order; None for no factor.
      bias: array with the shape of `x` along `axis`, in that order; None for no summand.
      axis: the axis that is normalised, or several. Axes that are not adjacent or not in ascending
        order cost a transposition.
      epsilon: a Python or NumPy number.
      residual: array of `x`'s shape and dtype that is added to `x` first, in the same pass.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of `x`'s shape and dtype; with `residual` a pair: the norm of ``x + residual``, and
      that sum.

    Raises:
      TypeError: an operand is not an array of floats, dtypes do not fit, or `axis` is not made of
        integers.
      ValueError: shapes do not fit, `axis` is out of range or repeats, or an option has an unknown
        value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      16-bit values are computed in float32 and rounded once; the sum with `residual` is rounded
      before it is normalised. The variance is the mean of the squared distances to the mean, which
      does not cancel; in float32 and float64 the mean is kept in more digits than the dtype has.
      XLA's form, which None may take, rounds the mean: results may be off by 1e-4 or more in rows
      that are constant or far from 0. Pass ``"native"`` for such rows.

    Differentiation and sharding:
      Differentiable to any order, in both modes. One call computes the gradients of `x` (and
      `residual`), `scale` and `bias`, on GPUs by up to three kernels. They are deterministic. All
      dimensions except `axis` may be sharded freely, and then the gradients of `scale` and `bias`
      cost an all-reduce; `axis` is all-gathered, with a `GatherWarning`. jnp computes per-example
      gradients of `scale` and `bias`, as under `jax.vmap`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.layer_norm(jnp.array([[1.0, 3.0], [5.0, 5.0]])).round(3))
      [[-1.  1.]
       [ 0.  0.]]
    """
    return _norm("layer_norm", x, scale, bias, axis, epsilon, residual, implementation, center=True)


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    residual: ArrayLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """``x / sqrt(mean(x**2) + epsilon) * scale``, with the mean along an axis.

    Replaces the arithmetic of `flax.linen.RMSNorm`. `jax_oneflow_ops.linen` has the module.

    Args:
      x: array of any shape.
      scale: array with the shape of `x` along `axis`; None for no factor.
      axis: the axis that is normalised, or several. Axes that are not adjacent or not in ascending
        order cost a transposition.
      epsilon: a Python or NumPy number.
      residual: array of `x`'s shape and dtype that is added to `x` first, in the same pass.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of `x`'s shape and dtype; with `residual` a pair, as from `layer_norm`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `layer_norm`.

    Numerics:
      As of `layer_norm`.

    Differentiation and sharding:
      As of `layer_norm`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.rms_norm(jnp.array([3.0, -3.0, 3.0, 3.0])).round(3))
      [ 1. -1.  1.  1.]
    """
    return _norm("rms_norm", x, scale, None, axis, epsilon, residual, implementation, center=False)


@_checks.in_own_precision
def group_norm(
    x: ArrayLike,
    num_groups: int,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    activation: Literal["silu"] | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``, with moments of groups of channels.

    Replaces the arithmetic of `flax.linen.GroupNorm`. `jax_oneflow_ops.linen` has the module.

    Args:
      x: images with shape ``(n, ..., channels)``.
      num_groups: how many groups of neighbouring channels there are. The moments are those of all
        pixels of an image and of the channels of a group.
      scale: array with shape ``(channels,)``; None for no factor.
      bias: array with shape ``(channels,)``; None for no summand.
      epsilon: a Python or NumPy number.
      activation: ``"silu"`` for `silu` of the result, in the same pass.
      implementation: ``"native"``, ``"xla"`` or None, as in `softmax`.

    Returns:
      An array of `x`'s shape and dtype.

    Raises:
      TypeError: an operand is not an array of floats, or `num_groups` is not an integer.
      ValueError: shapes do not fit, `num_groups` does not divide the channels, or an option has an
        unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      As of `layer_norm`; with `activation`, one rounding after it.

    Differentiation and sharding:
      Differentiable to any order, in both modes. One call computes the gradients of `x`, `scale`
      and `bias`, on GPUs by up to three kernels. They are deterministic. The first dimension may be
      sharded freely, and then the gradients of `scale` and `bias` cost an all-reduce; the others
      are all-gathered, with a `GatherWarning`. jnp computes per-example gradients of `scale` and
      `bias`, as under `jax.vmap`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.group_norm(jnp.array([[[1.0, 7.0], [3.0, 7.0]]]), 2).round(3))
      [[[-1.  0.]
        [ 1.  0.]]]
    """
    name = "group_norm"
    choice = _native.choose_implementation(name, implementation)
    x = _float_array(name, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{name}: x must have shape (n, ..., channels), got {x.shape}")
    groups, channels = _checks.as_integer(name, "num_groups", num_groups), x.shape[-1]
    if groups < 1 or channels % groups != 0:
        raise ValueError(
            f"{name}: num_groups must divide the {channels} channels of x, got {num_groups}"
        )
    check_activation(activation)
    pixels = range(1, x.ndim)
    types, x = [jax.typeof(x)], _primitive.gathered(name, "x", x, pixels)
    vectors = [
        _row_vector(name, argument, v, (channels,), x.dtype, "of the channels of x")
        for argument, v in (("scale", scale), ("bias", bias))
    ]
    missing = (jnp.ones, jnp.zeros)
    y: jax.Array = _primitive.bind(
        _group_norm.group_norm_p,
        x,
        *(
            fill((channels,), jnp.float32) if v is None else v
            for v, fill in zip(vectors, missing, strict=True)
        ),
        spatial=x.ndim - 2,
        groups=groups,
        epsilon=_epsilon(name, epsilon),
        silu=activation is not None,
        implementation=choice,
    )[0]
    return _sharded_as(types, pixels, y)


def check_activation(activation: Any) -> None:
    """Raises a ValueError if `group_norm` does not have an activation."""
    if activation not in (None, "silu"):
        raise ValueError(f"group_norm: activation must be None or 'silu', got {activation!r}")


@_checks.in_own_precision
def _norm(
    name: str,
    x: Any,
    scale: Any,
    bias: Any,
    axis: Any,
    epsilon: Any,
    residual: Any,
    implementation: Any,
    *,
    center: bool,
) -> Any:
    choice = _native.choose_implementation(name, implementation)
    x = _strong(_float_array(name, "x", x))
    axes = _axes(name, axis, x.ndim, sort=False)
    if not axes:
        raise ValueError(f"{name}: axis must name an axis of x, got {axis!r}")
    types, x = [jax.typeof(x)], _primitive.gathered(name, "x", x, axes)
    if residual is not None:
        residual = _strong(_checks.as_array(name, "residual", residual))
        if residual.dtype != x.dtype:
            raise TypeError(
                f"{name}: residual must have the dtype of x, {x.dtype}, got {residual.dtype}; cast "
                "it first"
            )
        if residual.shape != x.shape:
            raise ValueError(
                f"{name}: residual must have the shape of x, {x.shape}, got {residual.shape}"
            )
        types.append(jax.typeof(residual))
        residual = _primitive.gathered(name, "residual", residual, axes)
        x, residual = _rows.joined(name, axes, x=x, residual=residual)
    sizes = tuple(x.shape[a] for a in axes)
    vectors = [
        _row_vector(name, argument, v, sizes, x.dtype)
        for argument, v in (("scale", scale), ("bias", bias))
    ]
    rows, place, back = _merged(name, "x", x, axes)
    if residual is not None:
        residual, _, _ = _merged(name, "residual", residual, axes)
    operands = [residual, *vectors]
    results = _primitive.bind(
        _rows.norm_p,
        *(rows, *(operand for operand in operands if operand is not None)),
        axis=place,
        given=tuple(operand is not None for operand in operands),
        center=center,
        epsilon=_epsilon(name, epsilon),
        keeps=False,
        implementation=choice,
    )
    y, *total = [_sharded_as(types, axes, back(a)) for a in results]
    return (y, *total) if total else y


def _float_array(name: str, argument: str, operand: Any) -> jax.Array:
    x = _checks.as_array(name, argument, operand)
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{name}: {argument} must be float16, bfloat16, float32 or float64, got {x.dtype}"
        )
    return x


def _epsilon(name: str, epsilon: Any) -> float:
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
        raise TypeError(
            f"{name}: epsilon must be a Python or NumPy number, since it is part of the program, "
            f"got {epsilon!r}"
        )
    return float(epsilon)


def _row_vector(
    name: str,
    argument: str,
    v: Any,
    sizes: tuple[int, ...],
    dtype: Any,
    expected: str = "of x along axis",
) -> jax.Array | None:
    """A scale or bias in one dimension, in the dtype of x or in float32, as kernels take it."""
    if v is None:
        return None
    v = _float_array(name, argument, v)
    if v.shape != sizes:
        raise ValueError(
            f"{name}: {argument} must have the shape {expected}, {sizes}, got {v.shape}"
        )
    v = _primitive.gathered(name, argument, v, range(v.ndim))
    vector: jax.Array = v if v.dtype == dtype else v.astype(jnp.float32)
    return vector.reshape(-1)
