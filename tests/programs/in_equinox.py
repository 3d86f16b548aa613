"""A model in equinox, which maps single-row layers over all rows."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.programs.training import graph, squared_error, trained


class MLP(eqx.Module):
    layers: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, inputs, width, key):
        self.layers = eqx.nn.MLP(inputs, width, width, 2, key=key)
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, x):
        return self.norm(self.layers(x))


class MeshGraphNet(eqx.Module):
    nodes: MLP
    edges: MLP
    of_edges: list[MLP]
    of_nodes: list[MLP]
    out: eqx.nn.Linear

    def __init__(self, width, depth, key):
        keys = iter(jax.random.split(key, 3 + 2 * depth))
        self.nodes, self.edges = MLP(width, width, next(keys)), MLP(4, width, next(keys))
        self.of_edges = [MLP(3 * width, width, next(keys)) for _ in range(depth)]
        self.of_nodes = [MLP(2 * width, width, next(keys)) for _ in range(depth)]
        self.out = eqx.nn.Linear(width, "scalar", key=next(keys))

    def __call__(self, nodes, edges, senders, receivers):
        nodes, edges = jax.vmap(self.nodes)(nodes), jax.vmap(self.edges)(edges)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes, strict=True):
            ends = jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1)
            edges = edges + jax.vmap(of_edges)(ends)
            total = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
            nodes = nodes + jax.vmap(of_nodes)(jnp.concatenate([nodes, total], axis=-1))
        return jax.vmap(self.out)(nodes)


def mesh_graph_net(size, dtype):
    nodes, edges, width, depth = {"small": (1 << 12, 1 << 15, 64, 2), "tiny": (32, 128, 8, 1)}[size]

    model = partial(MeshGraphNet, width, depth)
    shapes = eqx.filter_eval_shape(model, jax.random.key(0))
    rest = eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct), inverse=True)

    def init(key):
        return eqx.filter(model(key), eqx.is_array)

    def loss(params, batch):
        nodes, edges, senders, receivers, target = batch
        params, nodes, edges = jax.tree.map(lambda x: x.astype(dtype), (params, nodes, edges))
        return squared_error(eqx.combine(params, rest)(nodes, edges, senders, receivers), target)

    return trained(init, loss, partial(graph, nodes=nodes, edges=edges, width=width))
