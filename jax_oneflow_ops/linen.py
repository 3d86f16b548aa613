"""Flax's norms with this package's kernels: the same modules, parameters and results.

They are subclasses of flax's modules and take the same arguments, so checkpoints load. Flax's own
code runs for a call with a mask, with statistics over devices (`axis_name`), with `feature_axes`
that differ from `reduction_axes`, without float32 reductions, or on values that are not real
floating-point numbers.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from jax_oneflow_ops import rows


def _axes(ndim: int, axes: Any) -> tuple[int, ...]:
    return tuple(a % ndim for a in (axes if isinstance(axes, tuple | list) else (axes,)))


def _is_flax_own(module: Any, x: jax.Array, mask: Any) -> bool:
    return (
        mask is not None
        or module.axis_name is not None
        or _axes(x.ndim, module.reduction_axes) != _axes(x.ndim, module.feature_axes)
        or not module.force_float32_reductions
        or not jnp.issubdtype(x.dtype, jnp.floating)
    )


def _normalize(module: Any, x: jax.Array, with_bias: bool) -> jax.Array:
    axes = _axes(x.ndim, module.feature_axes)
    shape = [x.shape[a] for a in axes]
    vectors = {}
    if module.use_scale:
        vectors["scale"] = module.param("scale", module.scale_init, shape, module.param_dtype)
    if with_bias and module.use_bias:
        vectors["bias"] = module.param("bias", module.bias_init, shape, module.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, *vectors.values(), dtype=module.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, dtype))
    norm = rows.layer_norm if with_bias else rows.rms_norm
    result: jax.Array = norm(wide, **vectors, axis=axes, epsilon=module.epsilon)
    return result.astype(dtype)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm`, computed by `jax_oneflow_ops.layer_norm`.

    Unless flax's own code runs, `use_fast_variance` has no effect: the variance is that of
    `layer_norm`, which is more accurate than flax's.
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        return _normalize(self, x, with_bias=True)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm`, computed by `jax_oneflow_ops.rms_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        return _normalize(self, x, with_bias=False)
