"""jraph's own networks."""

import jax
import jax.numpy as jnp


def step_of(loss, params, graph):
    def step(params, graph):
        value, gradient = jax.value_and_grad(loss)(params, graph)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value

    return step, (params, graph)


def graph_of(nodes, edges, width, dtype):
    import jraph

    keys = jax.random.split(jax.random.key(0), 4)
    senders, receivers = (jax.random.randint(key, (edges,), 0, nodes) for key in keys[:2])
    return jraph.GraphsTuple(
        nodes=jax.random.normal(keys[2], (nodes, width), dtype),
        edges=jax.random.normal(keys[3], (edges, width), dtype),
        senders=senders,
        receivers=receivers,
        n_node=jnp.array([nodes // 2, nodes - nodes // 2]),
        n_edge=jnp.array([edges // 2, edges - edges // 2]),
        globals=jnp.ones((2, width), dtype),
    )


def _jraph_program(network_of, nodes, edges, width, dtype):
    graph = graph_of(nodes, edges, width, dtype)
    params = jax.random.normal(jax.random.key(1), (4, width, width), dtype)

    def loss(params, graph):
        return jnp.mean(jnp.tanh(network_of(params)(graph).nodes) ** 2)

    return step_of(loss, params, graph)


def graph_network(nodes=20, edges=60, width=8, dtype=jnp.float32):
    import jraph

    def network_of(params):
        def update(i):
            return lambda x, *others: jnp.tanh(x @ params[i] + sum(o @ params[3] for o in others))

        return jraph.GraphNetwork(update(0), update(1), update(2))

    return _jraph_program(network_of, nodes, edges, width, dtype)


def graph_convolution(nodes=20, edges=60, width=8, dtype=jnp.float32):
    import jraph

    def network_of(params):
        return jraph.GraphConvolution(lambda x: x @ params[0], add_self_edges=True)

    return _jraph_program(network_of, nodes, edges, width, dtype)


def graph_attention(nodes=20, edges=60, width=8, dtype=jnp.float32):
    import jraph

    def network_of(params):
        def logit(sent, received, edges):
            return jnp.sum(sent * received + edges @ params[1], -1, keepdims=True)

        return jraph.GAT(lambda x: x @ params[0], logit)

    return _jraph_program(network_of, nodes, edges, width, dtype)
