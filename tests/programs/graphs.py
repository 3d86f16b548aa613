"""Graph networks in flax linen: attention over edges, and MeshGraphNet."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.programs.training import step_of


def random_graph(nodes, edges, width, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    ends = [jax.random.randint(key, (edges,), 0, nodes) for key in keys[:2]]
    features = jax.random.normal(keys[2], (nodes, width), dtype)
    return features, jax.random.normal(keys[3], (edges, 4), dtype), *ends


class Attention(nn.Module):
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, senders, receivers):
        nodes, width = x.shape
        dense = partial(nn.Dense, width, dtype=self.dtype)
        split = (-1, self.heads, width // self.heads)
        query, key, value = (dense()(x).reshape(split) for _ in range(3))
        logits = (query[receivers] * key[senders]).sum(-1) / split[-1] ** 0.5
        most = jax.ops.segment_max(logits, receivers, nodes)
        weights = jnp.exp(logits - jax.lax.stop_gradient(most)[receivers])
        total = jax.ops.segment_sum(weights, receivers, nodes)
        weights = weights / (total[receivers] + 1e-6)
        message = weights[..., None] * value[senders]
        update = jax.ops.segment_sum(message, receivers, nodes).reshape(nodes, width)
        return x + nn.gelu(dense()(nn.LayerNorm(dtype=self.dtype)(update)))


class GraphAttention(nn.Module):
    layers: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, graph):
        x, _, senders, receivers = graph
        for _ in range(self.layers):
            x = Attention(self.heads, self.dtype)(x, senders, receivers)
        return nn.Dense(1)(x)[:, 0]


class MLP(nn.Module):
    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class MeshGraphNet(nn.Module):
    blocks: int
    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, graph):
        x, edges, senders, receivers = graph
        mlp = partial(MLP, self.width, self.dtype)
        x, edges = mlp()(x), mlp()(edges)
        for _ in range(self.blocks):
            edges = edges + mlp()(jnp.concatenate([edges, x[senders], x[receivers]], -1))
            total = jax.ops.segment_sum(edges, receivers, len(x))
            x = x + mlp()(jnp.concatenate([x, total], -1))
        return nn.Dense(1)(x)[:, 0]


def _program(model, nodes, edges, width, dtype):
    graph = random_graph(nodes, edges, width, dtype)
    params = jax.jit(model.init)(jax.random.key(1), graph)

    def loss(params, graph):
        return jnp.mean((model.apply(params, graph) - jnp.tanh(graph[0][:, 0])) ** 2)

    return step_of(loss, params, graph)


def attention(nodes=48, edges=160, width=16, layers=1, heads=4, dtype=jnp.float32):
    return _program(GraphAttention(layers, heads, dtype), nodes, edges, width, dtype)


def mesh_graph_net(nodes=48, edges=160, width=16, blocks=1, dtype=jnp.float32):
    return _program(MeshGraphNet(blocks, width, dtype), nodes, edges, width, dtype)
