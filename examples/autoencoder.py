"""An autoencoder of images in bfloat16, its batches sharded over all devices.

Strided convolutions make an image smaller; `upsample_nearest2d` and convolutions enlarge it again.
Parameters are float32, activations are bfloat16. Batches are sharded and parameters are replicated,
so the only communication should be the all-reduces of gradients.

The same steps run on one device. The program fails if the losses differ, if there is a collective
other than all-reduce, or if the step lacks one of this package's expected custom calls.

    python -m examples.autoencoder
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from examples import training

CHANNELS = (3, 64, 128, 16)  # at full, half, a quarter and an eighth of the image's size
BLOBS = 6  # in an image
CALLS = (
    *("jof_permute", "jof_cast", "jof_silu", "jof_silu_vjp", "jof_gelu_tanh", "jof_gelu_tanh_vjp"),
    *("jof_upsample_nearest2d", "jof_upsample_nearest2d_backward"),
)
# Several devices round their parts of a gradient to bfloat16's 8 bits before the parts are summed;
# one device rounds once. Later steps carry the difference on. Measured on CPUs: losses differ by
# 0.002 at most in 100 steps. With half a gradient, as if an all-reduce over two devices were
# missing, they differ by 0.3.
TOLERANCE = 2**-6


def main(argv: Sequence[str]) -> int:
    """Trains on one device and on all, and returns the exit status."""
    parser = training.arguments(__doc__, steps=100, batch=256)
    parser.add_argument("--size", type=int, default=128, help="width and height of the images")
    options = parser.parse_args(argv)

    keys = jax.random.split(jax.random.key(1), 8)
    problem = training.Problem(
        init,
        loss,
        batches=[images(key, options.batch, options.size) for key in keys],
        rate=0.02,
        items=options.batch,
        unit="images",
        tolerance=TOLERANCE,
        calls=CALLS,
    )
    one, several = (
        training.Division(variant, training.mesh_of(data=count), P(), P("data"))
        for variant, count in (("one device", 1), ("batch", options.devices or len(jax.devices())))
    )
    return training.run_all("autoencoder", problem, one, [several], options, argv)


def images(key: jax.Array, batch: int, size: int) -> jax.Array:
    """Images of blobs with random places, widths and colours: (batch, 3, size, size), uint8."""
    keys = jax.random.split(key, 3)
    place = jax.random.uniform(keys[0], (2, batch, BLOBS, 1))
    width = jax.random.uniform(keys[1], (batch, BLOBS, 1), minval=0.05, maxval=0.3)
    colour = jax.random.uniform(keys[2], (batch, BLOBS, 3), minval=-2, maxval=2)
    y, x = jnp.exp(-0.5 * ((jnp.linspace(0, 1, size) - place) / width) ** 2)
    image = jnp.tanh(jnp.einsum("nbc,nby,nbx->ncyx", colour, y, x))
    return (127.5 * (image + 1)).astype(jnp.uint8)


def init(key: jax.Array) -> list[jax.Array]:
    """The kernels, (3, 3, in, out), of the encoder and then of the decoder."""
    channels = (*CHANNELS, *reversed(CHANNELS[:-1]))
    keys = jax.random.split(key, len(channels) - 1)
    return [
        jax.random.normal(k, (3, 3, c, d)) * (2 / (9 * c)) ** 0.5
        for k, (c, d) in zip(keys, itertools.pairwise(channels), strict=True)
    ]


def loss(kernels: list[jax.Array], images: jax.Array) -> jax.Array:
    """The mean squared error of the reconstructed images."""
    # Convolutions are fastest with the channels last.
    x = jof.cast(jof.permute(images, (0, 2, 3, 1)), jnp.bfloat16) / 127.5 - 1
    y = x
    *hidden, last = kernels
    half = len(kernels) // 2
    for kernel in hidden[:half]:
        y = jof.silu(convolution(y, kernel, stride=2))
    for kernel in hidden[half:]:
        y = jof.gelu(convolution(double(y), kernel))
    y = convolution(double(y), last)
    return jnp.mean((y.astype(jnp.float32) - x.astype(jnp.float32)) ** 2)


def double(x: jax.Array) -> jax.Array:
    """Doubles the width and the height of images."""
    return jof.upsample_nearest2d(x, 2, data_format="NHWC")


def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution in the dtype of `x`."""
    layout = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), strides, "SAME", dimension_numbers=layout
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
