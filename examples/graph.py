"""A graph network in bfloat16: nodes receive the mean of messages by `message_mean`.

One kernel reads the rows at both ends of an edge, computes the message and adds it to the sum.
Neither it nor its gradient stores a row for each edge. `segment_plan` sorts each graph once. Some
nodes are hubs, with many edges. The network learns the mean of the features around each node, one
and two edges away. Parameters are float32. The same steps run with native kernels and with XLA; the
program fails if their losses differ.

    python -m examples.graph --quick
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof
from examples import programs, training

OPS = ("message_mean", "silu")
# Nodes, edges, the width of node features, layers, the learning rate.
SIZES = {
    "full": (1 << 16, 1 << 20, 128, 2, 0.01),
    "small": (1 << 13, 1 << 16, 64, 2, 0.02),
    "tiny": (512, 4096, 32, 1, 0.02),
}
FEATURES = 16
Dense = partial(nn.Dense, dtype=jnp.bfloat16)


class Graph(NamedTuple):
    """The ends of the edges, unsorted, and the plans of the graph, as keywords for graph layers."""

    senders: jax.Array
    receivers: jax.Array
    plans: dict[str, Any]


class Layer(nn.Module):
    """A layer that updates nodes from their neighbours."""

    @nn.compact
    def __call__(self, nodes: jax.Array, graph: Graph) -> jax.Array:
        def message(sender: jax.Array, receiver: jax.Array) -> jax.Array:
            return jax.nn.silu(sender + receiver)

        width = nodes.shape[1]
        # There are fewer nodes than edges, so linear maps come before messages and after their
        # mean.
        tables = Dense(width)(nodes), Dense(width)(nodes)
        mean = jof.message_mean(message, tables, graph.senders, graph.receivers, **graph.plans)
        mean = Dense(width, use_bias=False)(mean)
        update = jof.silu(Dense(width)(nn.LayerNorm(dtype=nodes.dtype)(nodes + mean)))
        return nodes + Dense(width)(update)


class GraphNetwork(nn.Module):
    """Predicts a number for each node."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, nodes: jax.Array, graph: Graph) -> jax.Array:
        x = Dense(self.width)(nodes)
        for _ in range(self.depth):
            x = Layer()(x, graph)
        return nn.Dense(1)(x.astype(jnp.float32))[:, 0]


def problem(size: str) -> training.Problem:
    """The model and its data, for training."""
    nodes, edges, width, depth, rate = SIZES[size]
    model = GraphNetwork(width, depth)

    def loss(params: training.Tree, batch: training.Tree) -> jax.Array:
        *inputs, target = batch
        return jnp.mean((jnp.asarray(model.apply(params, *inputs)) - target) ** 2)

    batches = programs.batches(partial(data, nodes=nodes, edges=edges))
    return training.Problem(
        lambda key: model.init(key, *batches[0][:2]),
        loss,
        batches,
        rate=rate,
        items=edges,
        unit="edges",
        tolerance=programs.TOLERANCE,
        calls=programs.calls(OPS),
    )


def data(key: jax.Array, nodes: int, edges: int) -> tuple[jax.Array, Graph, jax.Array]:
    """The features of nodes, a graph, and the targets of nodes."""
    of_features, of_senders, of_receivers = jax.random.split(key, 3)
    features = jax.random.normal(of_features, (nodes, FEATURES))
    senders = jax.random.randint(of_senders, (edges,), 0, nodes)
    # The square of a uniform number is often small, so the first nodes are hubs.
    receivers = (nodes * jax.random.uniform(of_receivers, (edges,)) ** 2).astype(jnp.int32)

    def around(x: jax.Array) -> jax.Array:
        total = jnp.zeros(nodes).at[receivers].add(x[senders])
        return total / jnp.maximum(jnp.zeros(nodes).at[receivers].add(1.0), 1)

    near = jnp.tanh(features[:, 0] + features[:, 1])
    plan, sender_plan = jof.segment_plan(receivers, nodes), jof.segment_plan(senders, nodes)
    graph = Graph(senders, receivers, {"plan": plan, "sender_plan": sender_plan})
    return features, graph, 2 * around(near) + around(around(near)) + near


if __name__ == "__main__":
    sys.exit(programs.main(problem, __doc__, sys.argv[1:]))
