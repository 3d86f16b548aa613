"""A small language model in bfloat16, in which the gradient of `embedding_lookup` sums rows.

Few tokens are frequent (Zipf's law), so many rows are added to the same row. The rest is a
transformer, as in `examples/vit.py` but causal. In the artificial language, every other token is
determined by the one before it. Parameters are float32. The same steps run with native kernels and
with XLA; the program fails if their losses differ.

    python -m examples.language --quick
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
from examples.vit import Block, Dense, Norm

OPS = ("embedding_lookup", "swiglu", "permute")
# Vocabulary size, texts, their length; the model's width, heads and depth; the learning rate.
SIZES = {
    "full": (1 << 15, 64, 256, 512, 8, 2, 0.02),
    "small": (1 << 12, 8, 128, 128, 2, 2, 0.05),
    "tiny": (512, 8, 64, 32, 2, 1, 0.05),
}


class LanguageModel(nn.Module):
    """Predicts scores of the next token, after each token of (batch, length)."""

    vocabulary: int
    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = (self.vocabulary, self.width)
        table = self.param("table", nn.initializers.normal(0.02), shape)
        x = jof.embedding_lookup(table.astype(jnp.bfloat16), tokens)
        for _ in range(self.depth):
            x = Block(self.heads, causal=True)(x)
        return Dense(self.vocabulary)(Norm()(x))


def problem(size: str) -> training.Problem:
    """The model and its data, for training."""
    vocabulary, batch, length, width, heads, depth, rate = SIZES[size]
    model = LanguageModel(vocabulary, width, heads, depth)

    def loss(params: training.Tree, tokens: jax.Array) -> jax.Array:
        scores = jnp.asarray(model.apply(params, tokens[:, :-1]), jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]))

    batches = programs.batches(partial(text, batch=batch, length=length, vocabulary=vocabulary))
    return training.Problem(
        lambda key: model.init(key, batches[0]),
        loss,
        batches,
        rate=rate,
        items=batch * length,
        unit="tokens",
        tolerance=programs.TOLERANCE,
        calls=programs.calls(OPS),
    )


def text(key: jax.Array, batch: int, length: int, vocabulary: int) -> jax.Array:
    """Tokens (batch, length + 1): one drawn by Zipf's law, one that it determines, and so on."""
    rank = vocabulary ** jax.random.uniform(key, (batch, length // 2 + 1))
    token = rank.astype(jnp.int32) - 1
    return jnp.stack([token, (token + 1) // 2], axis=-1).reshape(batch, -1)[:, : length + 1]


if __name__ == "__main__":
    sys.exit(programs.main(problem, __doc__, sys.argv[1:]))
