"""A GPT in flax nnx, whose embedding is its last layer, too."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.programs.training import step_of


class Block(nnx.Module):
    def __init__(self, width, heads, dtype, rngs):
        options = {"dtype": dtype, "rngs": rngs}
        self.first, self.second = (nnx.LayerNorm(width, **options) for _ in range(2))
        self.qkv = nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)
        self.heads = heads

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.first(x)).reshape(batch, length, 3, self.heads, -1)
        on_gpu = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
        attended = jax.nn.dot_product_attention(
            *(qkv[:, :, i] for i in range(3)),
            is_causal=True,
            implementation="cudnn" if on_gpu else None,
        )
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class GPT(nnx.Module):
    def __init__(self, vocabulary, length, width, heads, layers, dtype, rngs):
        self.tokens = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(width, heads, dtype, rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def gpt(vocabulary=67, batch=2, length=12, width=16, heads=2, layers=1, dtype=jnp.float32):
    sizes = (vocabulary, length, width, heads, layers)
    model = nnx.jit(lambda: GPT(*sizes, dtype, nnx.Rngs(0)))()
    definition, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)

    def loss(params, tokens):
        logits = nnx.merge(definition, params)(tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return step_of(loss, params, tokens)
