"""A model in flax nnx, in the functional form that flax recommends for speed."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.programs import Program
from tests.programs.in_linen import TEXTS
from tests.programs.training import cross_entropy, text


class Block(nnx.Module):
    def __init__(self, width, heads, dtype, rngs):
        self.heads = heads
        linear = partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x):
        qkv = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, self.heads, -1)
        y = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT2(nnx.Module):
    def __init__(self, vocabulary, length, width, heads, depth, dtype, rngs):
        self.words = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dtype, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.words.attend(self.norm(x))


def gpt2(size, dtype):
    count, length, vocabulary, width, heads, depth = TEXTS[size]

    def both(key):
        model = GPT2(vocabulary, length, width, heads, depth, jnp.dtype(dtype), nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: both(jax.random.key(0))))

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return nnx.state((model, optimizer)), value

    batch = partial(text, batch=count, length=length, vocabulary=vocabulary)
    return Program(step, lambda key: nnx.state(both(key)), batch)
