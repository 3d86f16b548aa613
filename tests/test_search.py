"""Binary searches that `accelerate` swaps: positions are those of jnp, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_oneflow_ops as jof
from tests.test_lowering import lowered_targets

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Searches of any size are swapped on all platforms."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")


def special(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        info = jnp.finfo(dtype)
        least = np.nextafter(np.asarray(0, dtype), np.asarray(1, dtype))
        return [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, info.max, info.min, info.tiny, least]
    info = jnp.iinfo(dtype)
    return [0, 1, info.max, info.max - 1, info.min, info.min + 1]


def arrays(dtype, rng):
    """Edges with repetitions and special values, of one bin, of equal bins, and far apart."""
    some = np.asarray(special(dtype), dtype)
    drawn = rng.integers(0, 40, 300) / (4 if dtype in FLOATS else 1)
    sets = [np.concatenate([drawn.astype(dtype), some, some[::2]]), np.ones(1, dtype)]
    sets.append(np.linspace(1, 97, 33).astype(dtype))
    if dtype in FLOATS:
        sets.append(np.exp(np.linspace(-9, 9, 200)).astype(dtype))
        sets.append(np.asarray([-np.inf, *range(9), np.inf], dtype))
    queries = np.concatenate([some, *(x[:90] for x in sets), 30 * rng.standard_normal(9000)], None)
    return [np.asarray(jnp.sort(x)) for x in sets], queries[: 3 * (len(queries) // 3)].astype(dtype)


def searches(edges, queries):
    sides = ("left", "right")
    return [[jnp.searchsorted(e, queries, side=side) for side in sides] for e in edges]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_positions_are_those_of_jnp():
    rng = np.random.default_rng()
    with jax.enable_x64(True):
        args = {dtype: arrays(dtype, rng) for dtype in (*FLOATS, *INTEGERS)}

        def search(args):
            return {dtype: searches(*of) for dtype, of in args.items()}

        ours = jax.jit(jof.accelerate(search)).lower(args)
        count = sum(2 * len(edges) for edges, _ in args.values())
        assert lowered_targets(ours.as_text()) == {"jof_searchsorted": count}
        expected = jax.jit(search)(args)
        for (path, a), e in zip(
            jax.tree.leaves_with_path(ours.compile()(args)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(a, e, err_msg=str(path), strict=True)


def mapped(edges, x):
    return jax.vmap(lambda x: jnp.searchsorted(edges, x), 1)(x.reshape(-1, 3))


def mapped_edges(edges, x):
    return jax.vmap(jnp.searchsorted)(jnp.stack([edges, edges]), jnp.stack([x, x]))


def scanned(edges, x):
    return lax.map(functools.partial(jnp.searchsorted, edges, side="right"), x.reshape(3, -1))


def switched_off(edges, x):
    with jof.accelerate(False):
        return jnp.searchsorted(edges, x)


def searchsorted(edges, x):
    """A function of the same name, of all edges but the first: it is another one."""
    steps = (edges.size - 1).bit_length()

    def step(ends, _):
        low, high = ends
        middle = low + (high - low) // jnp.uint32(2)
        is_left = x <= edges[middle]
        return (jnp.where(is_left, low, middle), jnp.where(is_left, middle, high)), None

    ends = jnp.ones(x.shape, jnp.uint32), jnp.full(x.shape, edges.size, jnp.uint32)
    return lax.scan(step, ends, None, steps)[0][1].astype(jnp.int32)


PROGRAMS = {
    "unrolled": (functools.partial(jnp.searchsorted, method="scan_unrolled"), 1),
    "as many queries as edges": (lambda e, x: jnp.searchsorted(e, x[: e.size]), 1),
    "digitize": (lambda e, x: jnp.digitize(x.reshape(3, -1), e, right=True), 2),
    "histogram": (lambda e, x: jnp.histogram(x, e)[0], 1),
    "histogram2d": (lambda e, x: jnp.histogram2d(x, x[::-1], [e, e[::2]])[0], 2),
    "interp": (lambda e, x: jnp.interp(x, e, e**2), 1),
    "vmap": (mapped, 1),
    "vmap of edges": (mapped_edges, 0),
    "loop": (scanned, 1),
    "sort": (functools.partial(jnp.searchsorted, method="sort"), 0),
    "switched off": (switched_off, 0),
    "another function": (searchsorted, 0),
}


def test_programs_compute_the_same():
    edges = np.linspace(-2, 2, 37, dtype=np.float32)
    x = np.random.default_rng().standard_normal(999).astype(np.float32)

    def results(edges, x):
        return {name: f(edges, x) for name, (f, _) in PROGRAMS.items()}

    for name, (f, count) in PROGRAMS.items():
        ours = jax.jit(jof.accelerate(f)).trace(edges, x)
        calls = lowered_targets(ours.lower(lowering_platforms=("cuda",)).as_text())
        assert calls["jof_searchsorted"] == count, name
    actual, expected = jax.jit(jof.accelerate(results))(edges, x), jax.jit(results)(edges, x)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
