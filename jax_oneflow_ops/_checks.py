"""Checks of operands that the public functions share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_oneflow_ops import _compat


def as_array(function: str, name: str, x: Any, *, numbers: bool = False) -> jax.Array:
    """`x` as a jax array; raises TypeError where it is none, nor a number if `numbers` is set."""
    if isinstance(x, jax.Array):
        return x  # jnp.asarray would drop a tracer's sharding under vmap in jax 0.8
    if isinstance(x, _compat.NUMPY_TYPES):
        try:
            return jnp.asarray(x)
        except TypeError as error:
            raise TypeError(
                f"{function}: {name} must have a dtype that jax has, got {x.dtype}"
            ) from error
    if numbers and isinstance(x, bool | int | float | complex):
        return jnp.asarray(x)
    expected = "an array or a number" if numbers else "a jax or NumPy array"
    raise TypeError(
        f"{function}: {name} must be {expected}, got {type(x).__name__}; convert it with "
        "jnp.asarray first"
    )


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


def as_ids(function: str, name: str, x: Any) -> jax.Array:
    """`x` as an array of int32 or int64, which the kernels take, that names the same rows."""
    ids = as_array(function, name, x, numbers=True)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        hint = (
            "select rows by a mask with jnp.where or jnp.nonzero"
            if ids.dtype == jnp.bool_
            else "round and cast it first"
        )
        raise TypeError(f"{function}: {name} must have an integer dtype, got {ids.dtype}; {hint}")
    if ids.dtype in (jnp.int32, jnp.int64):
        return ids
    bits = jnp.iinfo(ids.dtype).bits
    # int32 where 64-bit dtypes are not enabled.
    wider = jax.dtypes.canonicalize_dtype(jnp.int64) if bits >= 32 else jnp.dtype(jnp.int32)
    if bits >= 8 * wider.itemsize:  # unsigned: what is too large must stay so, and not be negative
        ids = jnp.minimum(ids, np.asarray(jnp.iinfo(wider).max, ids.dtype))
    return ids.astype(wider)
