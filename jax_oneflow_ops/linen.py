"""Flax's norms with this package's kernels: the same modules, parameters and results.

They are subclasses of flax's modules and take the same arguments, so checkpoints load. Flax's own
code runs for a call with a mask, with statistics over devices (`axis_name`), with `feature_axes`
that differ from `reduction_axes`, for a group norm with `reduction_axes`, if
`force_float32_reductions` is False, if `epsilon` is an array, or if the dtype of the argument, of
the computation or of parameters is not a real floating-point one.
"""

import functools
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from jax_oneflow_ops import rows


def _axes(ndim: int, axes: Any) -> tuple[int, ...]:
    """Axes in flax's form: sorted, none negative, none repeated."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({a + ndim if a < 0 else a for a in given}))


def _is_flax_own(module: Any, x: jax.Array, mask: Any) -> bool:
    """Whether flax's own code runs for a call of a `flax.linen` or `flax.nnx` module."""
    if hasattr(module, "num_groups"):
        is_other = module.reduction_axes is not None or x.ndim < 2
    else:
        is_other = _axes(x.ndim, module.reduction_axes) != _axes(x.ndim, module.feature_axes)
    given = (d for d in (x.dtype, module.dtype, module.param_dtype) if d is not None)
    return (
        mask is not None
        or module.axis_name is not None
        or is_other
        or not getattr(module, "force_float32_reductions", True)
        or not isinstance(module.epsilon, numbers.Real)
        or not all(jnp.issubdtype(d, jnp.floating) for d in given)
    )


def _normalize(
    module: Any, x: jax.Array, norm: Callable[..., jax.Array], axes: Any, with_bias: bool = True
) -> jax.Array:
    shape = [x.shape[a] for a in _axes(x.ndim, axes)]
    vectors = {}
    if module.use_scale:
        vectors["scale"] = module.param("scale", module.scale_init, shape, module.param_dtype)
    if with_bias and module.use_bias:
        vectors["bias"] = module.param("bias", module.bias_init, shape, module.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, *vectors.values(), dtype=module.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, dtype))
    return norm(wide, **vectors, epsilon=float(module.epsilon)).astype(dtype)


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
        axes = _axes(x.ndim, self.feature_axes)
        return _normalize(self, x, functools.partial(rows.layer_norm, axis=axes), axes)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm`, computed by `jax_oneflow_ops.rms_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        axes = _axes(x.ndim, self.feature_axes)
        norm = functools.partial(rows.rms_norm, axis=axes)
        return _normalize(self, x, norm, axes, with_bias=False)


class GroupNorm(nn.GroupNorm):
    """`flax.linen.GroupNorm`, computed by `jax_oneflow_ops.group_norm`.

    `activation` is an addition to flax's arguments: ``"silu"`` applies silu to the result, in the
    same pass. Unless flax's own code runs, `use_fast_variance` has no effect, as in `LayerNorm`.
    """

    activation: Literal["silu"] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises groups of channels, the last axis, over all pixels of an image."""
        rows.check_activation(self.activation)
        channels = x.shape[-1]
        size = 1 if self.group_size is None else self.group_size
        groups = channels // max(size, 1) if self.num_groups is None else self.num_groups
        # If the sizes are wrong, flax raises the error.
        is_wrong = (self.num_groups is None) == (self.group_size is None)
        is_wrong = is_wrong or size < 1 or channels % size != 0 or groups < 1
        if is_wrong or _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own if self.activation is None else nn.silu(own)

        def norm(x: jax.Array, **options: Any) -> jax.Array:
            return rows.group_norm(x, groups, activation=self.activation, **options)

        return _normalize(self, x, norm, -1)
