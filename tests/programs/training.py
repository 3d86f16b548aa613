"""Code that the models share: random data, losses and AdamW steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs import Program


class State(NamedTuple):
    params: Any
    optimizer: Any


def trained(
    init: Callable[[jax.Array], Any],
    loss: Callable[[Any, Any], jax.Array],
    batch: Callable[[jax.Array], Any],
) -> Program:
    """A program whose steps minimize a loss of parameters and a batch."""
    optimizer = optax.adamw(1e-4)  # at 1e-3 some losses explode, in a way that depends on rounding

    def start(key):
        params = init(key)
        return State(params, optimizer.init(params))

    def step(state, batch):
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments), value

    return Program(step, start, batch)


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(found, wanted):
    return jnp.mean((found.astype(jnp.promote_types(found.dtype, jnp.float32)) - wanted) ** 2)


def text(key, batch, length, vocabulary):
    """Tokens (batch, length + 1), by Zipf's law."""
    rank = vocabulary ** jax.random.uniform(key, (batch, length + 1))
    return rank.astype(jnp.int32) - 1


def graph(key, nodes, edges, width, scale_free=False):
    """Node features, edge features, senders and receivers in random order, a number per node.

    Ends are uniform, or with `scale_free` node i has a probability proportional to i^(-1/2), as in
    graphs that grow by preferential attachment (Barabasi and Albert, 1999).
    """
    keys = jax.random.split(key, 5)
    if scale_free:
        ends = jax.random.uniform(keys[0], (2, edges))
        senders, receivers = (nodes * ends * ends).astype(jnp.int32)
    else:
        senders, receivers = jax.random.randint(keys[0], (2, edges), 0, nodes)
    return (
        jax.random.normal(keys[1], (nodes, width)),
        jax.random.normal(keys[2], (edges, 4)),
        senders,
        receivers,
        jax.random.normal(keys[3], (nodes,)),
    )
