"""A vision transformer in bfloat16: `swiglu`, and `permute` around attention and into patches.

It learns to recognise the direction of stripes under noise. Parameters are float32. The same steps
run with native kernels and with XLA; the program fails if their losses differ.

    python -m examples.vit --quick
"""

from __future__ import annotations

import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_oneflow_ops as jof
from examples import programs, training

OPS = ("swiglu", "permute")
# Images, their side; the model's width, heads and depth; the learning rate.
SIZES = {
    "full": (64, 128, 768, 12, 4, 0.01),
    "small": (16, 64, 192, 3, 2, 0.03),
    "tiny": (16, 32, 64, 2, 1, 0.03),
}
CLASSES = 8
PATCH = 8
Dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
Norm = partial(nn.LayerNorm, use_bias=False, dtype=jnp.bfloat16)


class Attention(nn.Module):
    """Self-attention over (batch, tokens, width)."""

    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        qkv = Dense(3 * width)(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = jof.permute(qkv, (2, 0, 3, 1, 4))  # each (batch, heads, tokens, width of a head)
        scores = jnp.einsum("bhqc,bhkc->bhqk", q, k) * q.shape[-1] ** -0.5
        if self.causal:
            scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        y = jnp.einsum("bhqk,bhkc->bhqc", weights, v)
        return Dense(width)(jof.permute(y, (0, 2, 1, 3)).reshape(x.shape))


class Block(nn.Module):
    """Attention, and a layer gated by silu."""

    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + Attention(self.heads, self.causal)(Norm()(x))
        y = Norm()(x)
        return x + Dense(width)(jof.swiglu(Dense(3 * width)(y), Dense(3 * width)(y)))


class ViT(nn.Module):
    """Class scores of images (batch, size, size, 3)."""

    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = Dense(self.width)(patches(images.astype(jnp.bfloat16)))
        place = self.param("place", nn.initializers.normal(0.02), x.shape[1:])
        x = x + place.astype(x.dtype)
        for _ in range(self.depth):
            x = Block(self.heads)(x)
        return nn.Dense(CLASSES)(Norm()(x).mean(1, dtype=jnp.float32))


def patches(images: jax.Array) -> jax.Array:
    """The pixels of each patch in a row: (batch, patches, 3 * PATCH * PATCH)."""
    batch, height, width, channels = images.shape
    rows, columns = height // PATCH, width // PATCH
    x = images.reshape(batch, rows, PATCH, columns, PATCH, channels)
    return jof.permute(x, (0, 1, 3, 2, 4, 5)).reshape(batch, rows * columns, -1)


def problem(size: str) -> training.Problem:
    """The model and its data, for training."""
    batch, pixels, width, heads, depth, rate = SIZES[size]
    model = ViT(width, heads, depth)

    def loss(params: training.Tree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, label = batch
        scores = model.apply(params, images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, label))

    batches = programs.batches(partial(stripes, batch=batch, size=pixels))
    return training.Problem(
        lambda key: model.init(key, batches[0][0]),
        loss,
        batches,
        rate=rate,
        items=batch,
        unit="images",
        tolerance=programs.TOLERANCE,
        calls=programs.calls(OPS),
    )


def stripes(key: jax.Array, batch: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Images of stripes under noise, and the classes of their directions."""
    keys = jax.random.split(key, 4)
    label = jax.random.randint(keys[0], (batch,), 0, CLASSES)
    angle = (label * jnp.pi / CLASSES)[:, None, None, None]
    phase = jax.random.uniform(keys[1], (batch, 1, 1, 3), maxval=2 * jnp.pi)
    x, y = jnp.meshgrid(jnp.arange(size), jnp.arange(size), indexing="ij")
    across = jnp.cos(angle) * x[..., None] + jnp.sin(angle) * y[..., None]
    noise = jax.random.normal(keys[2], (batch, size, size, 3))
    return jnp.sin(across + phase) + noise, label


if __name__ == "__main__":
    sys.exit(programs.main(problem, __doc__, sys.argv[1:]))
