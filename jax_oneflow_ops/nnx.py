"""The norms of `flax.nnx` with this package's kernels: the same modules, parameters and results.

They are subclasses of flax's modules and take the same arguments, so checkpoints load. Flax's own
code runs for the calls that `jax_oneflow_ops.linen` names.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_oneflow_ops import rows
from jax_oneflow_ops.linen import _axes, _is_flax_own


def _normalize(
    module: Any, x: jax.Array, norm: Callable[..., jax.Array], *names: str, **options: Any
) -> jax.Array:
    shape = [x.shape[a] for a in options.get("axis", (-1,))]  # parameters have one dimension
    vectors = [getattr(module, name) for name in names]
    vectors = [None if vector is None else vector[...].reshape(shape) for vector in vectors]
    # Flax of 2025 has no such attribute. It rounds to this dtype later.
    promote = getattr(module, "promote_dtype", dtypes.promote_dtype)
    x, *vectors = promote((x, *vectors), dtype=module.dtype)
    given = dict(zip(names, vectors, strict=True))
    return norm(x, **given, epsilon=float(module.epsilon), **options)


def group_norm_of(module: Any, x: jax.Array, mask: Any) -> Callable[..., jax.Array] | None:
    """What computes a call of a `flax.nnx.GroupNorm`, with an `activation`.

    None if flax's own code has to run, also to raise an error.
    """
    channels = module.num_groups * module.group_size
    if x.ndim == 0 or x.shape[-1] != channels or _is_flax_own(module, x, mask):
        return None
    norm = functools.partial(rows.group_norm, num_groups=module.num_groups)
    return functools.partial(_normalize, module, x, norm, "scale", "bias")


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, computed by `jax_oneflow_ops.layer_norm`.

    Unless flax's own code runs, `use_fast_variance` has no effect: the variance is that of
    `layer_norm`, which is more accurate than flax's.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        x = jnp.asarray(x)
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        axes = _axes(x.ndim, self.feature_axes)
        return _normalize(self, x, rows.layer_norm, "scale", "bias", axis=axes)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, computed by `jax_oneflow_ops.rms_norm`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalises the last axis, or `reduction_axes`."""
        x = jnp.asarray(x)
        if _is_flax_own(self, x, mask):
            own: jax.Array = super().__call__(x, mask=mask)
            return own
        axes = _axes(x.ndim, self.feature_axes)
        return _normalize(self, x, rows.rms_norm, "scale", axis=axes)


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, computed by `jax_oneflow_ops.group_norm`.

    `activation` is an addition to flax's arguments: ``"silu"`` applies silu to the result, in the
    same pass. Unless flax's own code runs, `use_fast_variance` has no effect, as in `LayerNorm`.
    """

    def __init__(self, *args: Any, activation: Literal["silu"] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises groups of channels, the last axis, over all pixels of an image."""
        rows.check_activation(self.activation)
        x = jnp.asarray(x)
        if (norm := group_norm_of(self, x, mask)) is not None:
            return norm(activation=self.activation)
        own: jax.Array = super().__call__(x, mask=mask)
        return own if self.activation is None else nnx.silu(own)
