"""Scatters that users reported as slow in jax and openxla/xla issues, as short functions of arrays.

Names describe the pattern of an issue.
"""

import jax
import jax.numpy as jnp


def histogram(values):
    return jnp.histogram(values, bins=64, range=(-4, 4))[0]


def bincount(ids):
    return jnp.bincount(ids, length=64)


def weighted_bincount(ids, weights):
    return jnp.bincount(ids, weights, length=64)


def embedding_gradient(table, ids):
    return jax.grad(lambda table: jnp.sum(jnp.sin(table[ids].astype(jnp.float32))))(table)


def vmapped_gradient(rows, ids):
    def loss(rows):
        return jnp.sum(jnp.sin(jax.vmap(lambda row, i: row[i])(rows, ids)))

    return jax.grad(loss)(rows)


def along_an_axis(x, ids):
    return jax.grad(lambda x: jnp.sum(jnp.sin(jnp.take_along_axis(x, ids, axis=1))))(x)


def columns(x, ids, updates):
    return x.at[:, ids].add(updates)


def pairs(grid, i, j, updates):
    return grid.at[i, j].add(updates)


def segments(data, ids):
    return jax.ops.segment_sum(data, ids, 64)


def segment_softmax(logits, ids):
    exp = jnp.exp(logits - jax.ops.segment_max(logits, ids, 64)[ids])
    return exp / jax.ops.segment_sum(exp, ids, 64)[ids]


def gathered_exponentials(table, senders, receivers):
    return jax.ops.segment_sum(jnp.exp(table[senders]), receivers, 64)


def resized_gradient(image):
    def loss(image):
        batch, height, width, channels = image.shape
        larger = jax.image.resize(image, (batch, 2 * height, 2 * width, channels), "nearest")
        return jnp.sum(jnp.sin(larger.astype(jnp.float32)))

    return jax.grad(loss)(image)


def arguments(name, scale=1, dtype=jnp.float32):
    """Arrays for a function; their size grows with `scale`."""
    key = jax.random.key(len(name))
    n = 256 * scale

    def ids(*shape, most=64):
        return jax.random.randint(key, shape, 0, most)

    def normal(*shape):
        return jax.random.normal(key, shape, dtype)

    return {
        "histogram": lambda: (normal(n),),
        "bincount": lambda: (ids(n),),
        "weighted_bincount": lambda: (ids(n), normal(n)),
        "embedding_gradient": lambda: (normal(64, 8), ids(n)),
        "vmapped_gradient": lambda: (normal(n // 16, 64, 2), ids(n // 16, 32)),
        "along_an_axis": lambda: (normal(n // 32, 64, 8), ids(n // 32, 64, 8)),
        "columns": lambda: (normal(4, 64), ids(n), normal(4, n)),
        "pairs": lambda: (normal(8, 8, 2), ids(n, most=8), ids(n, most=8)[::-1], normal(n, 2)),
        "segments": lambda: (normal(n, 4), ids(n)),
        "segment_softmax": lambda: (normal(n, 4), ids(n)),
        "gathered_exponentials": lambda: (normal(64, 4), ids(n), ids(n)[::-1]),
        "resized_gradient": lambda: (normal(n // 64, 4, 4, 3),),
    }[name]()


PIECES = (
    *(histogram, bincount, weighted_bincount, embedding_gradient, vmapped_gradient),
    *(along_an_axis, columns, pairs, segments, segment_softmax, gathered_exponentials),
    resized_gradient,
)
