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


def _normalized(
    module: Any, x: jax.Array, norm: Callable[..., jax.Array], axes: Any, with_bias: bool = True
) -> Callable[..., jax.Array]:
    """Makes the module's parameters, and returns a function of further options of `norm`."""
    shape = [x.shape[a] for a in _axes(x.ndim, axes)]
    vectors = {}
    if module.use_scale:
        vectors["scale"] = module.param("scale", module.scale_init, shape, module.param_dtype)
    if with_bias and module.use_bias:
        vectors["bias"] = module.param("bias", module.bias_init, shape, module.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, *vectors.values(), dtype=module.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, dtype))
    epsilon = float(module.epsilon)
    return lambda **options: norm(wide, **vectors, epsilon=epsilon, **options).astype(dtype)


def group_norm_of(module: Any, x: jax.Array, mask: Any) -> Callable[..., jax.Array] | None:
    """What computes a call of a `flax.linen.GroupNorm`, with an `activation`.

    None if flax's own code has to run, also to raise an error. Otherwise it makes the module's
    parameters.
    """
    channels = x.shape[-1] if x.ndim else 0
    size = 1 if module.group_size is None else module.group_size
    groups = channels // max(size, 1) if module.num_groups is None else module.num_groups
    is_wrong = (module.num_groups is None) == (module.group_size is None)
    is_wrong = is_wrong or size < 1 or channels % size != 0 or groups < 1
    if is_wrong or channels % groups != 0 or _is_flax_own(module, x, mask):
        return None
    return _normalized(module, x, functools.partial(rows.group_norm, num_groups=groups), -1)


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
        return _normalized(self, x, functools.partial(rows.layer_norm, axis=axes), axes)()


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
        return _normalized(self, x, norm, axes, with_bias=False)()


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
        if (norm := group_norm_of(self, x, mask)) is not None:
            return norm(activation=self.activation)
        own: jax.Array = super().__call__(x, mask=mask)
        return own if self.activation is None else nn.silu(own)
