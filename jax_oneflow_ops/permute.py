"""Permutation of an array's axes."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _native, _policy, _primitive, _reference

_NAME = "permute"


def permute(
    a: ArrayLike,
    axes: Sequence[int] | None = None,
    *,
    implementation: Literal["native", "xla"] | None = None,
) -> jax.Array:
    """Permutes the axes of an array. Replaces `jax.numpy.transpose`.

    ``result.shape[i] == a.shape[axes[i]]``.

    The result is a new array in memory. Use this function for data that has to move, such as
    images between NHWC and NCHW, or attention heads for a kernel that needs them in order. Inside a
    larger `jax.jit` function XLA may fold a `jnp.transpose` into its neighbours for free: into a
    matrix product, which reads operands in any order, into a fusion, or into the layout of the
    array's producer. XLA cannot fold a custom call, and passes arrays to it in row-major order. So
    use this function if the profile shows a transpose kernel, and measure.

    Args:
      a: array of any rank and any dtype of 1 to 16 bytes, or a number.
      axes: a permutation of ``range(a.ndim)``; negative axes count from the end. None reverses the
        order of the axes.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for `jnp.transpose`. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of `a`'s dtype. If every axis stays in its place, it is `a` itself. If only axes of
      size 1 move, nothing is copied either.

    Raises:
      TypeError: `a` is not an array or has a dtype without a fixed number of bytes (int4, PRNG
        keys), or `axes` is not made of concrete integers.
      ValueError: `axes` is not a permutation of `a`'s axes, or an option has an unknown value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      Bits are copied: NaNs keep their payloads.

    Differentiation and sharding:
      Differentiable to any order, in forward and reverse mode: the transpose is the inverse
      permutation. Under `jax.vmap` the batch axis is one more axis of the same call, the first of
      the result. Every dimension may be sharded freely; the result's sharding is that of `a`,
      permuted. Inside a `jax.shard_map` over only some axes of a mesh, arrays are all-gathered over
      the other axes, with a `GatherWarning`.

    Source:
      OneFlow's ``permute`` kernels, described in "How to Make Permute 6 Times Faster than PyTorch".

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> x = jnp.arange(6).reshape(2, 3)
      >>> print(jof.permute(x))
      [[0 3]
       [1 4]
       [2 5]]
      >>> images = jnp.zeros((8, 32, 48, 3), jnp.uint8)
      >>> jof.permute(images, (0, 3, 1, 2)).shape
      (8, 3, 32, 48)
      >>> jof.permute(images, (0, 1, 2, -1)) is images
      True
    """
    x = _checks.as_array(_NAME, "a", a, numbers=True)
    _checks.check_movable(_NAME, "a", x)
    permutation = _permutation(x.ndim, axes)
    choice = _native.choose_implementation(_NAME, implementation)
    if permutation == tuple(range(x.ndim)):
        return x
    result: jax.Array = permute_p.bind(x, axes=permutation, implementation=choice)
    return result


def _permutation(ndim: int, axes: Any) -> tuple[int, ...]:
    """`axes` as a tuple of non-negative integers."""
    if axes is None:
        return tuple(reversed(range(ndim)))
    try:
        given = tuple(axes)
    except TypeError:
        raise TypeError(
            f"{_NAME}: axes must be None or a sequence of integers, got {axes!r} of type "
            f"{type(axes).__name__}"
        ) from None
    permutation = tuple(
        _checks.as_integer(_NAME, f"axes[{i}]", axis) for i, axis in enumerate(given)
    )
    if len(permutation) != ndim:
        raise ValueError(
            f"{_NAME}: axes must name each axis of a once, got {permutation} for a of rank {ndim}"
        )
    return _checks.as_axes(_NAME, "axes", permutation, ndim)


def _abstract_eval(x: Any, *, axes: tuple[int, ...]) -> Any:
    aval, _ = jax.lax.transpose_p.abstract_eval(x, permutation=axes)  # permutes the sharding, too
    return aval


def _move(platform: str, x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Permutes on one device. If only axes of size 1 move, no data does: it is a reshape."""
    shape = tuple(x.shape[axis] for axis in axes)
    moving = [axis for axis in axes if x.shape[axis] != 1]
    if moving == sorted(moving):
        return x.reshape(shape)
    call = jax.ffi.ffi_call("jof_permute", jax.ShapeDtypeStruct(shape, x.dtype))
    result: jax.Array = call(x, axes=np.asarray(axes, np.int64))
    return result


def _sharding_rule(x: Any, *, axes: tuple[int, ...]) -> _primitive.ShardingRule:
    names = [f"d{i}" for i in range(len(x.shape))]
    return _primitive.ShardingRule([names], [[names[axis] for axis in axes]])


def _batch(
    primitive: core.Primitive, args: Any, dims: Any, *, axes: tuple[int, ...], **params: Any
) -> Any:
    (x,), (batch,) = args, dims
    moved = (axis + (axis >= batch) for axis in axes)
    return primitive.bind(x, axes=(batch, *moved), **params), 0


def _inverse(x: Any, *, axes: tuple[int, ...], **params: Any) -> dict[str, Any]:
    return {"axes": tuple(map(axes.index, range(len(axes)))), **params}


def _call(x: Any, *, axes: tuple[int, ...]) -> _policy.Call:
    plan = _native.permute_plan(x.shape, axes, x.dtype.itemsize)
    unit = f"{plan['unit_bytes']}-byte"
    return _policy.Call((_NAME, plan["strategy"], unit), 2 * _policy.nbytes(x))


permute_p = _primitive.define(
    "jof_permute",
    function=_NAME,
    abstract_eval=_abstract_eval,
    reference=_reference.permute,
    native=_move,
    sharding_rule=_sharding_rule,
    batch=_batch,
    call=_call,
)
_primitive.define_linear_pair(permute_p, permute_p, _inverse)
