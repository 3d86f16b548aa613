"""Models of pictures in flax linen: a UNet that resizes as JAX does, and a ViT."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.programs.training import step_of


class Stage(nn.Module):
    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(x)
            x = nn.silu(nn.GroupNorm(num_groups=4, dtype=self.dtype)(x))
        return x


class UNet(nn.Module):
    channels: tuple[int, ...]
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        skipped = []
        for channels in self.channels:
            x = Stage(channels, self.dtype)(x)
            skipped.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        for channels, skip in zip(self.channels[::-1], skipped[::-1], strict=True):
            shape = (*skip.shape[:3], x.shape[-1])
            x = jax.image.resize(x, shape, "nearest")
            x = Stage(channels, self.dtype)(jnp.concatenate([x, skip], -1))
        return nn.Conv(3, (1, 1), dtype=self.dtype)(x)


def unet(batch=2, size=4, channels=(4,), dtype=jnp.float32):
    model = UNet(channels, dtype)
    images = jax.random.normal(jax.random.key(0), (batch, size, size, 3), dtype)
    params = jax.jit(model.init)(jax.random.key(1), images)

    def loss(params, images):
        return jnp.mean((model.apply(params, images) - jnp.tanh(images)) ** 2)

    return step_of(loss, params, images)


class ViT(nn.Module):
    patch: int
    width: int
    heads: int
    layers: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, images):
        dense, norm = partial(nn.Dense, dtype=self.dtype), partial(nn.LayerNorm, dtype=self.dtype)
        window = (self.patch, self.patch)
        x = nn.Conv(self.width, window, strides=window, dtype=self.dtype)(images)
        x = x.reshape(len(x), -1, self.width)
        initial = nn.initializers.normal(0.02)
        x = x + self.param("positions", initial, x.shape[1:]).astype(self.dtype)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x))
            x = x + dense(self.width)(nn.gelu(dense(4 * self.width)(norm()(x))))
        return dense(10)(norm()(x).mean(1))


def vit(batch=2, size=8, patch=4, width=16, heads=2, layers=1, dtype=jnp.float32):
    model = ViT(patch, width, heads, layers, dtype)
    images = jax.random.normal(jax.random.key(0), (batch, size, size, 3), dtype)
    params = jax.jit(model.init)(jax.random.key(1), images)
    labels = jnp.arange(batch) % 10

    def loss(params, batch):
        logits = model.apply(params, batch[0]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return step_of(loss, params, (images, labels))
