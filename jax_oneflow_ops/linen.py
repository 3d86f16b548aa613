"""Flax's norms with this package's kernels: the same modules, parameters and results.

They are subclasses of `flax.linen`'s, so checkpoints load, and any argument that those have may be
given. A call with a mask, over devices (`axis_name`), with features that are not what is
normalised, or without float32 reductions is flax's own.
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
    """`flax.linen.LayerNorm` by `jax_oneflow_ops.layer_norm`.

    The variance is that of `layer_norm`, more accurate than flax's, whatever `use_fast_variance`
    says.
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        return _normalize(self, x, with_bias=True)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` by `jax_oneflow_ops.rms_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        return _normalize(self, x, with_bias=False)
