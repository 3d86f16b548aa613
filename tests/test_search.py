"""Binary searches that `accelerate` swaps: positions equal jnp's exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from jax_oneflow_ops import _compat
from jax_oneflow_ops._accelerate import common
from tests.test_errors import array
from tests.test_lowering import lowered_targets, targets

pytestmark = pytest.mark.usefixtures("kernels_of_gpus")

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint32", "int32", "int64", "uint64")
MANY = ("float32", "int64")
SIDES = ("left", "right", "left", "right")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Swaps searches of any size on all platforms."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")


def special(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        info = jnp.finfo(dtype)
        least = np.nextafter(np.asarray(0, dtype), np.asarray(1, dtype))
        return [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, info.max, info.min, info.tiny, least]
    info = jnp.iinfo(dtype)
    return [0, 1, info.max, info.max - 1, info.min, info.min + 1]


def arrays(dtype, rng):
    """Edges (repeated and special values, uneven spacing, unsorted, many), and queries."""
    some = np.asarray(special(dtype), dtype)
    drawn = rng.integers(0, 40, 300).astype(dtype)
    several = [np.concatenate([drawn, some, some[::2]]), np.ones(1, dtype)]
    if dtype in FLOATS:
        far = np.exp(np.linspace(-9, 9, 200))
        several[1] = np.concatenate([[-np.inf], far, [np.inf]]).astype(dtype)
    several = [np.asarray(jnp.sort(x)) for x in several] + [drawn]
    if dtype in MANY:  # more than shared memory holds, and than CPUs make keys for
        several.append(np.arange(-5000, 5000).astype(dtype))
    queries = np.concatenate([some, *several, 60 * rng.standard_normal(9000)], None)
    return several, queries.astype(dtype)


def searches(edges, queries):
    """One search in each of the edges, on either side, and one more in the first."""
    pairs = zip(edges, SIDES, strict=False)
    found = [jnp.searchsorted(e, queries, side=side) for e, side in pairs]
    return *found, jnp.searchsorted(edges[0], queries, side="right")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_positions_are_those_of_jnp():
    rng = np.random.default_rng()
    with jax.enable_x64(True):
        args = {dtype: arrays(dtype, rng) for dtype in (*FLOATS, *INTEGERS)}

        def search(args):
            return {dtype: searches(*of) for dtype, of in args.items()}

        ours = jax.jit(jof.accelerate(search)).lower(args)
        count = 4 * len(args) + len(MANY)
        assert lowered_targets(ours.as_text()) == {"jof_searchsorted": count}
        actual, expected = ours.compile()(args), jax.jit(search)(args)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
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
    """A different function with the name of jnp's: it skips the first edge."""
    steps = (edges.size - 1).bit_length()

    def step(ends, _):
        low, high = ends
        middle = low + (high - low) // jnp.uint32(2)
        is_left = x <= edges[middle]
        return (jnp.where(is_left, low, middle), jnp.where(is_left, middle, high)), None

    ends = jnp.ones(x.shape, jnp.uint32), jnp.full(x.shape, edges.size, jnp.uint32)
    return lax.scan(step, ends, None, steps)[0][1].astype(jnp.int32)


def from_the_second_edge(edges, x):
    """jnp's own loop with another start, if the jaxpr contains it."""
    every = common.equations(jax.make_jaxpr(jnp.searchsorted)(edges, x))
    loop = next((eqn for eqn, *_ in every if eqn.primitive.name == "scan"), None)
    if loop is None:
        return searchsorted(edges, x)
    low, high = (v.aval for v in loop.invars[2:])
    ends = jnp.ones(low.shape, low.dtype), jnp.full(high.shape, edges.size, high.dtype)
    return _compat.bind_equation(loop, [edges, x, *ends])[1].astype(jnp.int32)


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
    "another beginning": (from_the_second_edge, 0),
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


def test_explain_names_searches(monkeypatch):
    def step(x, edges):
        return jnp.histogram(x, 100)[0], jax.vmap(lambda e: jnp.searchsorted(e, x))(edges)

    x = jax.ShapeDtypeStruct((2**22,), np.float32)
    edges = jax.ShapeDtypeStruct((2, 3), np.float32)
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION")
    rows = jof.explain(step, x, edges, platform="cuda").rows
    search, _ = rows
    assert (search.operation, search.swapped, search.count) == ("binary search", True, 1)
    assert search.shapes == ((101,), (2**22,))
    assert search.line.startswith("tests/test_search.py:")
    few = jax.ShapeDtypeStruct((9,), np.float32)
    small, _ = jof.explain(step, few, edges, platform="cuda").rows
    assert not small.swapped


def test_searches_over_several_devices_are_of_few_edges(monkeypatch):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices (the CPU has 8 virtual ones)")
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION")
    x = jax.ShapeDtypeStruct((2**22,), np.float32)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for size, swapped in ((9, True), (2**17, False)):
        table = jax.ShapeDtypeStruct((size,), np.float32, sharding=jax.NamedSharding(mesh, P()))
        (row,) = jof.explain(jnp.searchsorted, table, x, platform="cuda").rows
        assert row.swapped == swapped


def test_queries_stay_sharded():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices (the CPU has 8 virtual ones)")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    edges, x = np.linspace(-2, 2, 9), np.random.default_rng().standard_normal((8, 3))
    edges, x = edges.astype(np.float32), x.astype(np.float32)
    over = jax.NamedSharding(mesh, P("x"))
    per_device = jax.shard_map(jnp.digitize, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    for f in (jnp.digitize, per_device):
        ours = jax.jit(jof.accelerate(f)).lower(jax.device_put(x, over), edges)
        compiled = ours.compile()
        assert targets(compiled.as_text()) == ["jof_searchsorted"] * 2
        assert "all-gather" not in compiled.as_text()
        found = compiled(jax.device_put(x, over), edges)
        assert found.sharding.is_equivalent_to(over, 2)
        np.testing.assert_array_equal(found, np.digitize(x, edges))


def test_refused_calls():
    def call(operands, result):
        xs = [np.ones(x.shape, x.dtype) for x in operands]
        return jax.ffi.ffi_call("jof_searchsorted", result)(*xs, right=True)

    edges, queries, found = array(9), array(3, 4), array(3, 4, dtype="int32")
    complex_ = [array(*x.shape, dtype="complex64") for x in (edges, queries)]
    calls = {
        "edges of two dimensions": (array(3, 3), queries, found),
        "edges of another type": (array(9, dtype="int32"), queries, found),
        "values in no order": (*complex_, found),
        "positions of floats": (edges, queries, queries),
        "positions of another shape": (edges, queries, array(4, 3, dtype="int32")),
    }
    for name, (*operands, result) in calls.items():
        with pytest.raises(Exception, match="INVALID_ARGUMENT: jof_searchsorted: "):
            pytest.fail(f"accepted: {name}, {call(operands, result)}")
