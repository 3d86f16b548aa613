"""A small diffusion UNet in bfloat16: `upsample_nearest2d`, `silu` after group norms, `permute`.

It learns to predict the noise in an image, at any noise level, as diffusion models do. Images are
NCHW, as data often are; convolutions are fastest with the channels last. Parameters are float32.
The same steps run with native kernels and with XLA; the program fails if their losses differ.

    python -m examples.unet --quick
"""

from __future__ import annotations

import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof
from examples import autoencoder, programs, training
from examples.vit import Attention

OPS = ("upsample_nearest2d", "silu", "permute")
# Images, their side; channels at full size, half size, and so on; the learning rate.
SIZES = {
    "full": (16, 128, (160, 320, 320), 0.002),
    "small": (4, 32, (32, 64, 64), 0.01),
    "tiny": (4, 16, (32, 64), 0.01),
}
Conv = partial(nn.Conv, kernel_size=(3, 3), dtype=jnp.bfloat16)
Norm = partial(nn.GroupNorm, num_groups=None, group_size=16, dtype=jnp.bfloat16)


class Block(nn.Module):
    """Two convolutions, which depend on the noise level, and a shortcut."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        y = Conv(self.channels)(jof.silu(Norm()(x)))
        y = y + nn.Dense(self.channels, dtype=y.dtype)(level)[:, None, None]
        y = Conv(self.channels)(jof.silu(Norm()(y)))
        return y + (x if x.shape == y.shape else Conv(self.channels, kernel_size=(1, 1))(x))


class UNet(nn.Module):
    """Predicts the noise in images (batch, 3, size, size), each with its noise level."""

    channels: tuple[int, ...]  # at full size, half size, and so on

    @nn.compact
    def __call__(self, images: jax.Array, level: jax.Array) -> jax.Array:
        level = Features(4 * self.channels[0])(level)
        x = Conv(self.channels[0])(jof.permute(images.astype(jnp.bfloat16), (0, 2, 3, 1)))
        skips = []
        for channels in self.channels[1:]:  # the encoder, a small one
            skips.append(x)
            x = Conv(channels, strides=2)(x)
        x = Block(self.channels[-1])(x, level)
        flat = Norm()(x).reshape(x.shape[0], -1, x.shape[-1])
        x = x + Attention(heads=4)(flat).reshape(x.shape)
        for channels in reversed(self.channels[:-1]):
            x = Conv(x.shape[-1])(jof.upsample_nearest2d(x, 2, data_format="NHWC"))
            x = Block(channels)(jnp.concatenate([x, skips.pop()], axis=-1), level)
        x = Conv(3)(jof.silu(Norm()(x)))
        return jof.permute(x, (0, 3, 1, 2))


class Features(nn.Module):
    """Features of a noise level, for the blocks."""

    width: int

    @nn.compact
    def __call__(self, level: jax.Array) -> jax.Array:
        waves = level[:, None] * 2.0 ** jnp.arange(6)
        x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        return jof.silu(nn.Dense(self.width)(jof.silu(nn.Dense(self.width)(x))))


def problem(size: str) -> training.Problem:
    """The model and its data, for training."""
    batch, pixels, channels, rate = SIZES[size]
    model = UNet(channels)

    def loss(params: training.Tree, batch: tuple[jax.Array, ...]) -> jax.Array:
        images, level, noise = batch
        level_of = level[:, None, None, None]
        noisy = jnp.cos(level_of) * images + jnp.sin(level_of) * noise
        said = jnp.asarray(model.apply(params, noisy, level), jnp.float32)
        return jnp.mean((said - noise) ** 2)

    batches = programs.batches(partial(noises, batch=batch, size=pixels))
    return training.Problem(
        lambda key: model.init(key, *batches[0][:2]),
        loss,
        batches,
        rate=rate,
        items=batch,
        unit="images",
        tolerance=programs.TOLERANCE,
        calls=programs.calls(OPS),
    )


def noises(key: jax.Array, batch: int, size: int) -> tuple[jax.Array, ...]:
    """Images, a noise level for each, from 0 (image) to pi / 2 (noise), and the noise."""
    of_images, of_level, of_noise = jax.random.split(key, 3)
    images = autoencoder.images(of_images, batch, size) / 127.5 - 1
    level = jax.random.uniform(of_level, (batch,), maxval=jnp.pi / 2)
    return images, level, jax.random.normal(of_noise, images.shape)


if __name__ == "__main__":
    sys.exit(programs.main(problem, __doc__, sys.argv[1:]))
