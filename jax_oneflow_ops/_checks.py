"""Checks of operands that the public functions share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(function: str, name: str, x: Any, *, numbers: bool = False) -> jax.Array:
    """`x` as a jax array; raises TypeError where it is none, nor a number if `numbers` is set."""
    if isinstance(x, jax.Array):
        return x  # jnp.asarray would drop a tracer's sharding under vmap in jax 0.8
    if isinstance(x, np.ndarray | np.generic):
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
