"""Replacements for jraph's layers, written with this package's graph layers.

They take jraph graphs whose nodes are one array, and the same parameters. They ignore edge
features. `plans` are the `plan` and `sender_plan` of `jax_oneflow_ops.message_sum`, made once per
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof

Nodes = Callable[[jax.Array], jax.Array]
Layer = Callable[..., Any]  # maps a jraph.GraphsTuple and plans to a graph with new nodes


def graph_convolution(
    update_node_fn: Nodes, add_self_edges: bool = False, symmetric_normalization: bool = True
) -> Layer:
    """`jraph.GraphConvolution`, for nodes that are one array."""

    def layer(graph: Any, **plans: Any) -> Any:
        nodes = update_node_fn(graph.nodes)
        count = len(nodes)

        def normalized(x: jax.Array, ids: jax.Array) -> jax.Array:
            if not symmetric_normalization:
                return x
            degree = jof.segment_sum(jnp.ones_like(ids), ids, count) + int(add_self_edges)
            return x * jax.lax.rsqrt(jnp.maximum(degree, 1.0))[:, None]

        nodes = normalized(nodes, graph.senders)
        ends = graph.senders, graph.receivers
        total = jof.message_sum(lambda x: x, (nodes,), *ends, num_segments=count, **plans)
        total = total + nodes if add_self_edges else total
        return graph._replace(nodes=normalized(total, graph.receivers))

    return layer


def gat(
    attention_query_fn: Nodes,
    of_sender_fn: Nodes,
    of_receiver_fn: Nodes,
    node_update_fn: Nodes | None = None,
) -> Layer:
    """`jraph.GAT` with the logits of its paper, ``leaky_relu(of_sender + of_receiver)``.

    `jraph.GAT` takes one function of the rows at both ends of an edge. `of_sender` and
    `of_receiver` are computed once per node, although a node has many edges.
    """

    def layer(graph: Any, **plans: Any) -> Any:
        nodes = attention_query_fn(graph.nodes)
        ends = graph.senders, graph.receivers
        logits = of_sender_fn(nodes)[ends[0]] + of_receiver_fn(nodes)[ends[1]]
        logits = jax.nn.leaky_relu(logits, 0.2)
        nodes = jof.attention_sum(logits, nodes, *ends, num_segments=len(nodes), **plans)
        if node_update_fn is None:
            nodes = jax.nn.leaky_relu(nodes).reshape(len(nodes), -1)
        else:
            nodes = node_update_fn(nodes)
        return graph._replace(nodes=nodes)

    return layer
