"""The graph networks of `in_linen` with this package's graph layers and the same parameters.

Graphs carry a sorted order of their edges, which is computed once, not in each step.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof
from tests.programs import in_linen, training


class Ends(NamedTuple):
    """The nodes at one end of all edges, with their plan."""

    ids: jax.Array
    plan: jof.SegmentPlan


def graph(key, nodes, **sizes):
    """The graph of `training`, with the plans of its edge ends."""
    *features, senders, receivers, target = training.graph(key, nodes, **sizes)
    ends = (Ends(ids, jof.segment_plan(ids, nodes)) for ids in (senders, receivers))
    return *features, *ends, target


@jax.custom_vjp
def rows_of(table, ends):
    """The rows of nodes at the ends of edges; the gradient is a sum that uses the plan."""
    return table[ends.ids]


@jax.custom_vjp
def sums_of(rows, ends):
    edges = jnp.arange(len(rows))
    return jof.message_sum(lambda row: row, (rows,), edges, ends.ids, plan=ends.plan)


rows_of.defvjp(lambda x, ends: (rows_of(x, ends), ends), lambda ends, ct: (sums_of(ct, ends), None))
sums_of.defvjp(lambda x, ends: (sums_of(x, ends), ends), lambda ends, ct: (rows_of(ct, ends), None))


class GraphAttention(nn.Module):
    """Stores nothing per edge except its logits."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        count, width = nodes.shape
        dense = partial(nn.DenseGeneral, dtype=self.dtype)
        values = dense((self.heads, width // self.heads))(nodes)
        scores = dense(self.heads)(nodes)[senders.ids] + dense(self.heads)(nodes)[receivers.ids]
        logits = nn.leaky_relu(scores, 0.2)
        plans = {"plan": receivers.plan, "sender_plan": senders.plan}
        y = jof.attention_sum(logits, values, senders.ids, receivers.ids, **plans)
        return y.reshape(count, width)


class GraphAttentionNetwork(in_linen.GraphAttentionNetwork):
    layer = GraphAttention


graph_attention = partial(in_linen.graph_attention, network=GraphAttentionNetwork, graph=graph)


class Dense(nn.Module):
    """Multiplies node rows before edges read them: fewer rows, and no concatenation."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, edges, nodes, senders, receivers):
        shape = edges.shape[1] + 2 * nodes.shape[1], self.width
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.width, jnp.float32)
        kernel, bias = kernel.astype(self.dtype), bias.astype(self.dtype)
        of_edge, of_sender, of_receiver = jnp.split(kernel, 3)
        ends = rows_of(nodes @ of_sender, senders) + rows_of(nodes @ of_receiver + bias, receivers)
        return edges @ of_edge + ends


class MLP(nn.Module):
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, *args):
        x = nn.relu(Dense(self.width, self.dtype)(*args))
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class MeshGraphNet(in_linen.MeshGraphNet):
    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        mlp = partial(in_linen.MLP, self.width, self.dtype)
        nodes, edges = mlp()(nodes), mlp()(edges)
        for _ in range(self.depth):
            edges = edges + MLP(self.width, self.dtype)(edges, nodes, senders, receivers)
            total = sums_of(edges, receivers)
            nodes = nodes + mlp()(jnp.concatenate([nodes, total], axis=-1))
        return nn.Dense(1, dtype=self.dtype)(nodes)[:, 0]


mesh_graph_net = partial(in_linen.mesh_graph_net, network=MeshGraphNet, graph=graph)
