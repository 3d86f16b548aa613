"""Models in flax linen: graph networks, language models, U-Nets, a vision transformer."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.programs.training import cross_entropy, graph, squared_error, text, trained


class GraphAttention(nn.Module):
    """A layer of a graph attention network (Velickovic et al., 2018)."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        count, width = nodes.shape
        dense = partial(nn.DenseGeneral, dtype=self.dtype)
        values = dense((self.heads, width // self.heads))(nodes)
        scores = dense(self.heads)(nodes)[senders] + dense(self.heads)(nodes)[receivers]
        scores = nn.leaky_relu(scores, 0.2)
        largest = jax.ops.segment_max(scores, receivers, count)
        weights = jnp.exp(scores - largest[receivers])
        weights = weights / jax.ops.segment_sum(weights, receivers, count)[receivers]
        messages = weights[..., None] * values[senders]
        return jax.ops.segment_sum(messages, receivers, count).reshape(count, width)


class GraphAttentionNetwork(nn.Module):
    width: int
    heads: int
    depth: int
    dtype: Any
    layer = GraphAttention

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        x = nn.Dense(self.width, dtype=self.dtype)(nodes)
        for _ in range(self.depth):
            x = x + nn.elu(self.layer(self.heads, self.dtype)(x, senders, receivers))
        return nn.Dense(1, dtype=self.dtype)(x)[:, 0]


def graph_attention(size, dtype, scale_free=False, network=GraphAttentionNetwork, graph=graph):
    nodes, edges, width, heads, depth = {
        "full": (1 << 16, 1 << 20, 128, 8, 3),
        "small": (1 << 12, 1 << 16, 64, 4, 2),
        "tiny": (32, 128, 8, 2, 1),
    }[size]
    model = network(width, heads, depth, dtype)

    def init(key):
        x, _, senders, receivers, _ = jax.eval_shape(batch, key)
        return model.init(key, *jax.tree.map(zeros, (x, senders, receivers)))

    def loss(params, batch):
        x, _, senders, receivers, target = batch
        return squared_error(model.apply(params, x, senders, receivers), target)

    batch = partial(graph, nodes=nodes, edges=edges, width=width, scale_free=scale_free)
    return trained(init, loss, batch)


def zeros(x):
    return jnp.zeros(x.shape, x.dtype)


class MLP(nn.Module):
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class MeshGraphNet(nn.Module):
    """Messages between nodes of a mesh (Pfaff et al., 2021)."""

    width: int
    depth: int
    dtype: Any

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        mlp = partial(MLP, self.width, self.dtype)
        nodes, edges = mlp()(nodes), mlp()(edges)
        for _ in range(self.depth):
            ends = [edges, nodes[senders], nodes[receivers]]
            edges = edges + mlp()(jnp.concatenate(ends, axis=-1))
            total = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
            nodes = nodes + mlp()(jnp.concatenate([nodes, total], axis=-1))
        return nn.Dense(1, dtype=self.dtype)(nodes)[:, 0]


def mesh_graph_net(size, dtype, scale_free=False, network=MeshGraphNet, graph=graph):
    nodes, edges, width, depth = {
        "full": (1 << 16, 1 << 20, 128, 3),
        "small": (1 << 12, 1 << 15, 64, 2),
        "tiny": (32, 128, 8, 1),
    }[size]
    model = network(width, depth, dtype)

    def init(key):
        return model.init(key, *jax.tree.map(zeros, jax.eval_shape(batch, key)[:-1]))

    def loss(params, batch):
        *arrays, target = batch
        return squared_error(model.apply(params, *arrays), target)

    batch = partial(graph, nodes=nodes, edges=edges, width=width, scale_free=scale_free)
    return trained(init, loss, batch)


class GPT2Block(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        dense, norm = partial(nn.Dense, dtype=self.dtype), partial(nn.LayerNorm, dtype=self.dtype)
        qkv = dense(3 * width)(norm()(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        # cuDNN takes 16-bit floats only.
        fast = jax.default_backend() == "gpu" and jnp.dtype(self.dtype).itemsize == 2
        y = jax.nn.dot_product_attention(
            *jnp.moveaxis(qkv, 2, 0), is_causal=True, implementation="cudnn" if fast else "xla"
        )
        x = x + dense(width)(y.reshape(x.shape))
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


class GPT2(nn.Module):
    """GPT-2; the word embedding table also gives the logits."""

    vocabulary: int
    length: int
    width: int
    heads: int
    depth: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        words = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        places = nn.Embed(self.length, self.width, dtype=self.dtype)
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        for _ in range(self.depth):
            x = GPT2Block(self.heads, self.dtype)(x)
        return words.attend(nn.LayerNorm(dtype=self.dtype)(x))


TEXTS = {
    "full": (16, 1024, 50257, 768, 12, 12),
    "small": (4, 128, 4096, 128, 4, 2),
    "tiny": (2, 16, 32, 8, 2, 1),
}
"""Texts, their length, the vocabulary; the width, heads and depth of models."""


def language_model(model, count, length, vocabulary):
    def loss(params, tokens):
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    return trained(
        lambda key: model.init(key, jnp.zeros((count, length), jnp.int32)),
        loss,
        partial(text, batch=count, length=length, vocabulary=vocabulary),
    )


def gpt2(size, dtype):
    count, length, vocabulary, width, heads, depth = TEXTS[size]
    model = GPT2(vocabulary, length, width, heads, depth, dtype)
    return language_model(model, count, length, vocabulary)


def rotated(x):
    """Rotary embeddings of positions (Su et al., 2021) of (texts, positions, heads, features)."""
    rates = 1e4 ** -jnp.linspace(0, 1, x.shape[3] // 2, endpoint=False)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class LlamaBlock(nn.Module):
    heads: int
    key_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        norm = partial(nn.RMSNorm, dtype=self.dtype)
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        y = norm()(x)
        heads = (self.heads, self.key_heads, self.key_heads)
        q, k, v = (dense((n, width // self.heads))(y) for n in heads)
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + dense(width, axis=(-2, -1))(y)
        y = norm()(x)
        return x + dense(width)(nn.silu(dense(3 * width)(y)) * dense(3 * width)(y))


class Llama(nn.Module):
    """A language model with the layers of Llama 3: heads share keys and values."""

    vocabulary: int
    width: int
    heads: int
    key_heads: int
    depth: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.depth):
            x = LlamaBlock(self.heads, self.key_heads, self.dtype)(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def llama(size, dtype):
    count, length, vocabulary, width, heads, key_heads, depth = {
        "full": (16, 1024, 32000, 768, 12, 4, 8),
        "small": (4, 128, 4096, 128, 4, 2, 2),
        "tiny": (2, 16, 32, 16, 4, 2, 1),
    }[size]
    model = Llama(vocabulary, width, heads, key_heads, depth, dtype)
    return language_model(model, count, length, vocabulary)


class ResidualBlock(nn.Module):
    channels: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        y = x
        for _ in range(2):
            y = nn.silu(nn.GroupNorm(None, 4, dtype=self.dtype)(y))
            y = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype)(x)
        return x + y


class UNet(nn.Module):
    channels: tuple[int, ...]  # at the images' resolution, half of it, and so on
    dtype: Any

    @nn.compact
    def __call__(self, images):
        conv = partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        x, skips = conv(self.channels[0])(images), []
        for channels in self.channels[:-1]:
            x = ResidualBlock(channels, self.dtype)(x)
            skips.append(x)
            x = conv(channels, strides=2)(x)
        x = ResidualBlock(self.channels[-1], self.dtype)(x)
        for channels in reversed(self.channels[:-1]):
            batch, height, width, before = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * width, before), "nearest")
            x = jnp.concatenate([conv(channels)(x), skips.pop()], axis=-1)
            x = ResidualBlock(channels, self.dtype)(x)
        return conv(images.shape[-1])(x)


def unet(size, dtype):
    count, pixels, channels = {
        "full": (32, 64, (128, 256, 256)),
        "small": (4, 32, (32, 64)),
        "tiny": (1, 4, (4, 4)),
    }[size]
    model = UNet(channels, dtype)
    shape = (count, pixels, pixels, 3)

    def loss(params, batch):
        images, noise = batch
        return squared_error(model.apply(params, images + noise), noise)

    return trained(
        lambda key: model.init(key, jnp.zeros(shape)),
        loss,
        lambda key: tuple(jax.random.normal(key, (2, *shape))),
    )


class SegmentationNet(nn.Module):
    """The U-Net of Ronneberger et al. (2015), on images whose borders are padded."""

    classes: int
    channels: tuple[int, ...]  # at the images' resolution, half of it, and so on
    dtype: Any

    @nn.compact
    def __call__(self, x):
        skips = []
        for channels in self.channels[:-1]:
            x = self.convolved(x, channels)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self.convolved(x, self.channels[-1])
        for channels in reversed(self.channels[:-1]):
            x = nn.ConvTranspose(channels, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = self.convolved(jnp.concatenate([skips.pop(), x], axis=-1), channels)
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype)(x)

    def convolved(self, x, channels):
        for _ in range(2):
            x = nn.relu(nn.Conv(channels, (3, 3), dtype=self.dtype)(x))
        return x


def segmentation(size, dtype):
    count, pixels, channels = {
        "full": (16, 256, (64, 128, 256, 512, 1024)),
        "small": (2, 64, (16, 32, 64)),
        "tiny": (1, 4, (4, 8)),
    }[size]
    classes = 21
    model = SegmentationNet(classes, channels, dtype)
    shape = (count, pixels, pixels, 3)

    def loss(params, batch):
        images, labels = batch
        return cross_entropy(model.apply(params, images), labels)

    return trained(
        lambda key: model.init(key, jnp.zeros(shape)),
        loss,
        lambda key: (
            jax.random.normal(key, shape),
            jax.random.randint(key, shape[:-1], 0, classes),
        ),
    )


class ViTBlock(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        norm, dense = partial(nn.LayerNorm, dtype=self.dtype), partial(nn.Dense, dtype=self.dtype)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x))
        return x + dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))


class ViT(nn.Module):
    patch: int
    width: int
    heads: int
    depth: int
    dtype: Any
    classes: int = 1000

    @nn.compact
    def __call__(self, images):
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("first", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, self.width)), x], axis=1)
        places = self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        x = (x + places).astype(self.dtype)
        for _ in range(self.depth):
            x = ViTBlock(self.heads, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


def vit(size, dtype):
    count, pixels, patch, width, heads, depth = {
        "full": (256, 224, 16, 384, 6, 12),
        "small": (8, 64, 8, 128, 4, 2),
        "tiny": (2, 4, 2, 8, 2, 1),
    }[size]
    model = ViT(patch, width, heads, depth, dtype)

    def loss(params, batch):
        images, labels = batch
        return cross_entropy(model.apply(params, images), labels)

    def batch(key):
        images, labels = jax.random.split(key)
        shape = (count, pixels, pixels, 3)
        return jax.random.normal(images, shape), jax.random.randint(labels, (count,), 0, 1000)

    def init(key):
        return model.init(key, jnp.zeros((count, pixels, pixels, 3)))

    return trained(init, loss, batch)
