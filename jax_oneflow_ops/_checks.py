"""Checks of operands that the public functions share."""

import functools
import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_oneflow_ops import _compat

P = ParamSpec("P")
R = TypeVar("R")


def as_array(function: str, name: str, x: Any, *, numbers: bool = False) -> jax.Array:
    """`x` as a jax array. Raises TypeError unless it is an array or, with `numbers`, a number."""
    if hasattr(x, "__jax_array__") and not isinstance(x, type | jax.Array):
        x = x.__jax_array__()
    if isinstance(x, jax.Array):
        if axes := _compat.unreduced_or_reduced_axes(jax.typeof(x)):
            raise _compat.ShardingTypeError(
                f"{function}: {name} is unreduced or reduced over the mesh axes "
                f"{sorted(map(str, axes))}: it, or its cotangent, is a sum that is not added up "
                "yet; add it up first, with jax.sharding.reshard, or jax.lax.psum in a shard_map"
            )
        return x  # jnp.asarray would drop a tracer's sharding under vmap in jax 0.8
    if isinstance(x, _compat.NUMPY_TYPES):
        try:
            return jnp.asarray(x)
        except TypeError as error:
            is_native = getattr(x.dtype, "isnative", True)
            hint = (
                "" if is_native else "; change its byte order with x.astype(x.dtype.newbyteorder())"
            )
            raise TypeError(
                f"{function}: {name} must have a dtype that jax has, got {x.dtype}{hint}"
            ) from error
    if numbers and isinstance(x, bool | int | float | complex):
        return jnp.asarray(x)
    expected = "an array or a number" if numbers else "a jax or NumPy array"
    hint = "; convert it with jnp.asarray first" if isinstance(x, _CONVERTIBLE) else ""
    raise TypeError(f"{function}: {name} must be {expected}, got {type(x).__name__}{hint}")


_CONVERTIBLE = (list, tuple, range, bool, int, float, complex)


@functools.lru_cache(maxsize=64)
def is_movable(dtype: Any) -> bool:
    """Whether elements of `dtype` take 1, 2, 4, 8 or 16 whole bytes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits >= 8)
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(jnp.finfo(dtype).bits >= 8)
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def check_movable(function: str, name: str, x: jax.Array) -> None:
    """Raises TypeError if elements of `x` do not take a number of bytes that kernels move."""
    if not is_movable(x.dtype):
        raise TypeError(
            f"{function}: {name} must have a dtype of 1, 2, 4, 8 or 16 whole bytes, got {x.dtype}"
        )


def in_own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, made to keep the 64-bit dtypes of its arrays even where those are disabled.

    Such arrays may come from code where 64-bit dtypes are enabled. Where they are disabled, jnp
    would combine them with arrays that it makes 32 bits wide.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with _compat.precision_of((args, kwargs)):
            return function(*args, **kwargs)

    return wrapped


def promoted(dtype: Any, other: Any) -> Any:
    """The dtype to compute both in, even if the user has set dtype promotion to strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def promoted_integers(x: jax.Array) -> jax.Array:
    """`x`, converted as jnp promotes it with float32 if it is an array of integers."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return x.astype(promoted(x.dtype, jnp.float32)) if is_integer else x


def as_ids(function: str, name: str, x: Any, rows: Any = 0, *, modulo: bool = False) -> jax.Array:
    """`x` as an array of int32 or int64, which the kernels take, that names the same of `rows`.

    Ids that this dtype cannot hold become its least or greatest number, which names no row either.
    jnp would truncate them to 32 bits, and so change the rows that they name. With `modulo`, ids
    are taken modulo `rows`.
    """
    if isinstance(x, int) and not isinstance(x, bool):  # of any size
        x = np.asarray(x % rows if modulo else min(max(x, -(2**63)), 2**64 - 1))
    if isinstance(x, slice | tuple | EllipsisType):
        raise TypeError(
            f"{function}: {name} must be integers that name rows, got {type(x).__name__}; for "
            "other indexing use x.at[...] inside jax_oneflow_ops.accelerate"
        )
    on_host = isinstance(x, _compat.NUMPY_TYPES)
    ids: Any = np.asarray(x) if on_host else as_array(function, name, x, numbers=True)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        hint = (
            "select rows by a mask with jnp.where or jnp.nonzero"
            if ids.dtype == jnp.bool_
            else "round and cast it first"
        )
        raise TypeError(f"{function}: {name} must have an integer dtype, got {ids.dtype}; {hint}")
    xp: Any = np if on_host else jnp
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    # int32 where 64-bit dtypes are not enabled.
    dtype = ids.dtype if ids.dtype == jnp.int32 else jax.dtypes.canonicalize_dtype(jnp.int64)
    if ids.dtype == dtype and not modulo:
        return jnp.asarray(ids) if on_host else cast(jax.Array, ids)
    info, limits = jnp.iinfo(ids.dtype), jnp.iinfo(dtype)
    held = ids
    if not modulo:
        held = xp.clip(ids, max(info.min, limits.min), min(info.max, limits.max))
    far = modulo or (held is not ids and (not on_host or (held != ids).any()))
    if far and isinstance(rows, int) and rows > limits.max:
        # A clipped id, which must name no row, would name one.
        raise ValueError(
            f"{function}: {name} of {ids.dtype} need 64 bits to name one of {rows} rows, which jax "
            "has under `jax.enable_x64(True)` only; call the function there"
        )
    if modulo:
        held = xp.mod(ids, xp.asarray(rows).astype(ids.dtype))
    if held.dtype != dtype:
        held = held.astype(dtype)
    return jnp.asarray(held) if on_host else cast(jax.Array, held)  # see as_array


def as_integer(function: str, name: str, value: Any) -> int:
    """`value` as a Python integer. Raises TypeError if it is not a concrete integer."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {name} must be a concrete integer, got {value!r} of type "
            f"{type(value).__name__}"
        ) from None


def as_axes(function: str, name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    """Different axes, or one, counted from the beginning. Raises TypeError unless integers."""
    given = [*map(operator.index, axes if isinstance(axes, list | tuple) else [axes])]
    if not all(-ndim <= axis < ndim for axis in given):
        known = f"from {-ndim} to {ndim - 1}" if ndim else "None"
        raise ValueError(
            f"{function}: {name} must be {known} for an array of rank {ndim}, got {axes!r}"
        )
    found = tuple(axis % ndim for axis in given)
    if len({*found}) != len(found):
        raise ValueError(
            f"{function}: {name} must not repeat, got {axes!r} for an array of rank {ndim}"
        )
    return found


def as_size(function: str, name: str, value: Any) -> int:
    """`value` as a size: a non-negative Python integer, or a symbolic dimension."""
    if jax.export.is_symbolic_dim(value):
        return cast(int, value)
    size = as_integer(function, name, value)
    if size < 0:
        raise ValueError(f"{function}: {name} must be non-negative, got {size}")
    return size
