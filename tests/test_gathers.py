"""Sums of gathered rows inside `accelerate`: what is recognised, and that results agree."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from tests.arrays import rng_for
from tests.test_lowering import (
    ENVIRONMENT_VARIABLE,
    accelerated,
    compiled,
    lowered_targets,
    native_backend,
    targets,
)

pytestmark = [native_backend, pytest.mark.usefixtures("kernels_of_gpus")]

NODES, SEGMENTS, EDGES, HEADS, WIDTH = 23, 19, 157, 3, 5
SUM, DOT, SCATTER = "jof_message_sum", "jof_edge_dot", "jof_scatter"
FLOATS = ("float16", "bfloat16", "float32", "float64")


def called(f, *args, platform=None) -> dict[str, int]:
    """How often each kind of kernel is called in the lowered program."""
    found = lowered_targets(accelerated(f, *args, platform=platform))
    kinds = (SUM, DOT, SCATTER)
    counts = {kind: sum(n for t, n in found.items() if t.startswith(kind)) for kind in kinds}
    return {kind: n for kind, n in counts.items() if n}


def graph(seed=0, edges=EDGES, nodes=NODES, segments=SEGMENTS, outside=4):
    """Random senders and receivers, some of them negative and some too large."""
    rng = np.random.default_rng(seed)
    ends = (-outside - nodes, nodes + outside), (-outside, segments + outside)
    senders, receivers = (rng.integers(*limits, edges).astype(np.int32) for limits in ends)
    return jnp.asarray(senders), jnp.asarray(receivers)


def operands(dtype, *shapes):
    rng = rng_for(dtype, shapes)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def assert_near(found, exact, dtype):
    """Within a few roundings of the largest result, which bounds what sums cancel."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact)
    assert found.shape == exact.shape
    largest = np.abs(exact).max(initial=0)
    assert np.abs(found - exact).max(initial=0) <= 8 * float(jnp.finfo(dtype).eps) * largest


def check(f, *args):
    """Compares with JAX in float64, and returns the kernels that were called."""
    dtype = args[0].dtype
    counts = called(f, *args)
    results = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if x.dtype == dtype else x for x in args]
        exact = jax.jit(f)(*wide)
    for y, e in zip(*map(jax.tree.leaves, (results, exact)), strict=True):
        assert y.dtype == dtype
        assert_near(y, e, dtype)
    return counts


def total(messages, receivers):
    return jax.ops.segment_sum(messages, receivers, SEGMENTS)


HEADS_OF_ROWS, OF_EDGES = (NODES, HEADS, WIDTH), (EDGES, HEADS)
# Functions of rows (NODES, HEADS, WIDTH), weights (EDGES, HEADS), senders and receivers.
SUMS = {
    "weights of heads": lambda x, w, s, r: total(w[..., None] * x[s], r),
    "weights at the right": lambda x, w, s, r: total(x[s] * w[:, :, None], r),
    "one weight": lambda x, w, s, r: total(x[s] * w[:, :1, None], r),
    "one weight of flat rows": lambda x, w, s, r: total(x.reshape(NODES, -1)[s] * w[:, :1], r),
    "no weights": lambda x, w, s, r: total(x[s], r),
    "reshaped": lambda x, w, s, r: total((w[..., None] * x[s]).reshape(EDGES, -1), r),
    "clipped": lambda x, w, s, r: total(w[..., None] * x.at[s].get(mode="clip"), r),
    "zeros": lambda x, w, s, r: total(x.at[s].get(mode="fill", fill_value=0) * w[..., None], r),
    "clipped receivers": lambda x, w, s, r: (
        jnp.zeros((SEGMENTS, HEADS, WIDTH), x.dtype).at[r].add(w[..., None] * x[s], mode="clip")
    ),
    "negative receivers": lambda x, w, s, r: (
        jnp.zeros((SEGMENTS, HEADS, WIDTH), x.dtype).at[r].add(w[..., None] * x[s])
    ),
    "sorted": lambda x, w, s, r: jax.ops.segment_sum(
        w[..., None] * x[s], jnp.sort(r), SEGMENTS, indices_are_sorted=True
    ),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, w = operands(dtype, HEADS_OF_ROWS, OF_EDGES)
        assert check(SUMS[name], x, w, *graph()) == {SUM: 1}


DOTS = {
    "of heads": lambda x, y, s, r: jnp.sum(x[s] * y[r], -1, dtype=x.dtype),
    "of rows": lambda x, y, s, r: jnp.sum(x[s] * y[r], (-2, -1), dtype=x.dtype),
    "as jnp sums": lambda x, y, s, r: jnp.sum(x[s] * y[r], -1),
    "of one table": lambda x, y, s, r: jnp.sum(x[s] * x[r], -1),
    "of zeros": lambda x, y, s, r: jnp.sum(x.at[s].get(mode="fill", fill_value=0) * y[r], -1),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", DOTS)
def test_dot_products(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = operands(dtype, HEADS_OF_ROWS, HEADS_OF_ROWS)
        s, r = graph()
        assert check(DOTS[name], x, y, s, jnp.clip(r, 0, NODES - 1)) == {DOT: 1}


@pytest.mark.usefixtures("native")
def test_derivatives():
    """Both gradients of a weighted sum, and those of a function of them."""

    def value(x, w, s, r):
        return jnp.sum(jnp.sin(SUMS["weights of heads"](x, w, s, r)))

    def gradients(x, w, s, r):
        return jax.grad(value, (0, 1))(x, w, s, r)

    def hvp(x, w, s, r):
        return jax.jvp(lambda x, w: gradients(x, w, s, r), (x, w), (jnp.cos(x), jnp.cos(w)))[1]

    args = *operands("float32", HEADS_OF_ROWS, OF_EDGES), *graph()
    assert check(gradients, *args) == {SUM: 2, DOT: 1}
    assert check(hvp, *args)[SCATTER] == 2  # two products are added for each edge
    with jax.enable_x64(True):
        args = *operands("float64", HEADS_OF_ROWS, OF_EDGES), *graph()
        check(hvp, *args)


OTHERS = {
    "rows of edges": lambda x, w, s, r: total(jnp.repeat(w, WIDTH, 1) + 1, r),
    "functions of rows": lambda x, w, s, r: total(w[..., None] * jnp.sin(x[s]), r),
    "weights of columns": lambda x, w, s, r: total(x[s] * jnp.repeat(w, WIDTH, 1).reshape(
        EDGES, HEADS, WIDTH), r),
    "weights of the last dimension": lambda x, w, s, r: total(
        x.transpose(0, 2, 1)[s] * w[:, None, :], r),
    "a constant": lambda x, w, s, r: total(x[s] * 2, r),
    "NaN": lambda x, w, s, r: total(jnp.nan_to_num(jnp.take(x, s, axis=0)), r),
    "parts of rows": lambda x, w, s, r: total(x[s, :, 1:3], r),
    "the second dimension": lambda x, w, s, r: total(
        x.transpose(1, 0, 2)[:, s].transpose(1, 0, 2), r),
    "added to rows": lambda x, w, s, r: jnp.ones((SEGMENTS, HEADS, WIDTH), x.dtype).at[r].add(
        w[..., None] * x[s]),
    "subtracted": lambda x, w, s, r: jnp.zeros((SEGMENTS, HEADS, WIDTH), x.dtype).at[r].add(
        -(w[..., None] * x[s])),
    "a batch": lambda x, w, s, r: jax.vmap(lambda y: total(y[s], r))(jnp.stack([x, -x])),
    "graphs of a batch": lambda x, w, s, r: jax.vmap(lambda s, r: total(x[s], r))(
        s[None] + 0, r[None] + 0),
}  # fmt: skip


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay_as_they_are(name):
    x, w = operands("float32", HEADS_OF_ROWS, OF_EDGES)
    assert check(OTHERS[name], x, w, *graph()) == {SCATTER: 1}


@pytest.mark.usefixtures("native")
def test_edges_that_the_program_drops_count_nothing():
    """Also with weights that are not finite, which XLA would multiply by zero."""
    x, w = operands("float32", (NODES, HEADS, WIDTH), (EDGES, HEADS))
    s, r = graph()
    is_out = (s < -NODES) | (s >= NODES)
    w = jnp.where(is_out[:, None], jnp.inf, w)
    y = jax.jit(jof.accelerate(SUMS["zeros"]))(x, w, s, r)
    exact = SUMS["zeros"](x, jnp.where(is_out[:, None], 0, w), s, r)
    assert_near(y, exact, "float32")


ROWS = jax.lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
)
UPDATES = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_ids_of_every_dtype(dtype):
    """Those of `lax.gather`, which does not convert them as jnp does."""
    with jax.enable_x64(True):
        (x,) = operands("float32", (70_000, 3))
        most = min(np.iinfo(dtype).max, len(x) + 10)
        ids = jnp.asarray(np.linspace(0, most, EDGES), dtype)
        r = jnp.arange(EDGES, dtype=jnp.int32) % SEGMENTS

        def gathered(x, ids):
            return jax.lax.gather(x, ids[:, None], ROWS, (1, 3), mode="clip")

        assert check(lambda x, s, r: total(gathered(x, s), r), x, ids, r) == {SUM: 1}
        found = check(lambda x, s: jnp.sum(gathered(x, s) * gathered(x, s[::-1]), -1), x, ids)
        assert found == {DOT: 1}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("is_sorted", [False, True])
def test_receivers_of_64_bits(is_sorted):
    """Also those that would name a row if they had 32 bits."""
    with jax.enable_x64(True):
        (x,) = operands("float32", (NODES, 3))
        outside = [-(2**32), 1 - 2**32, 2**31, 2**32 + 1]
        r = np.concatenate([np.arange(EDGES) % SEGMENTS, outside]).astype(np.int64)
        r = jnp.asarray(np.sort(r) if is_sorted else r)
        s = jnp.arange(len(r), dtype=jnp.int32) % NODES

        def f(x, s, r):
            zeros, how = jnp.zeros((SEGMENTS, 3), x.dtype), {"indices_are_sorted": is_sorted}
            rows = x.at[s].get(mode="clip")
            return jax.lax.scatter_add(zeros, r[:, None], rows, UPDATES, mode="drop", **how)

        assert check(f, x, s, r) == {SUM: 1}


def test_sums_of_other_programs_need_no_devices():
    """One use of `accelerate` changes nothing for sums on abstract meshes, or on several meshes."""
    x = jnp.ones((8, 4))
    jax.jit(jof.accelerate(lambda x: x + 1)).lower(x)
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for f in (lambda x: jnp.sum(x * x, -1), jof.accelerate(lambda x: jnp.sum(x * x, -1))):
        jax.jit(f).trace(like).lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("native")
def test_values_that_other_operations_read():
    """Messages that are also a result are stored, and still summed from the table."""

    def both(x, w, s, r):
        messages = w[..., None] * x[s]
        return messages, total(messages, r), jnp.sum(messages * x[s], -1)

    x, w = operands("float32", HEADS_OF_ROWS, OF_EDGES)
    assert check(both, x, w, *graph())[SUM] == 1


@pytest.mark.usefixtures("native")
def test_in_loops_and_branches():
    def f(x, w, s, r):
        def body(y, _):
            y = y + jnp.pad(SUMS["weights of heads"](y, w, s, r), ((0, 4), (0, 0), (0, 0)))
            return y / (1 + jnp.max(jnp.abs(y))), None

        y, _ = jax.lax.scan(jax.checkpoint(body), x, length=3)
        return jax.lax.cond(jnp.sum(y) > 1e9, lambda y: y, lambda y: -y, y)

    x, w = operands("float32", HEADS_OF_ROWS, OF_EDGES)
    assert check(f, x, w, *graph()) == {SUM: 1}


@pytest.mark.exhaustive
@given(
    sizes=st.tuples(*(st.integers(1, 40) for _ in range(2)), st.integers(2, 300)),
    row=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_graphs(sizes, row, seed, data):
    nodes, segments, edges = sizes
    heads = data.draw(st.integers(0, len(row) - 1))
    s, r = graph(seed, edges, nodes, segments, data.draw(st.integers(0, 9)))
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(nodes, *row)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(edges, *row[:heads])), jnp.float32)

    def f(x, w):
        spread = w.reshape(*w.shape, *(1,) * (len(row) - heads))
        return jax.ops.segment_sum(x[s] * spread, r, segments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "native")
        y = jax.jit(jof.accelerate(f))(x, w)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64), w.astype(jnp.float64)]
        exact, magnitudes = np.asarray(f(*wide)), np.asarray(f(*map(jnp.abs, wide)))
    # Terms may cancel, so the bound is that of a sum of so many terms.
    bound = (edges + 2) * np.finfo(np.float32).eps * magnitudes
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()


# ---- where it is used ----


def lowered_for(platform, dtype, edges, nodes, heads, width, **options):
    shapes = (nodes, heads, width), (edges, heads)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    ids = jax.ShapeDtypeStruct((edges,), "int32")

    def f(x, w, s, r):
        return jax.ops.segment_sum(w[..., None] * x[s], r, nodes, **options)

    return called(f, x, w, ids, ids, platform=platform)


@pytest.mark.parametrize(
    ("platform", "dtype", "edges", "nodes", "heads", "width", "expected"),
    [
        # From rows in their table; by this package's sums of stored rows; by XLA.
        ("cuda", "bfloat16", 2**20, 2**16, 8, 16, {SUM: 1}),
        ("cuda", "float32", 2**20, 2**16, 1, 128, {SUM: 1}),
        ("cuda", "bfloat16", 2**17, 2**13, 1, 32, {SCATTER: 1}),
        ("cuda", "float32", 2**17, 2**13, 1, 128, {}),
        ("cuda", "float32", 2**17, 2**15, 1, 256, {SUM: 1}),
        ("cpu", "bfloat16", 2**16, 2**12, 4, 16, {SUM: 1}),
        ("cpu", "float32", 2**16, 2**12, 1, 64, {SUM: 1}),
    ],
)
def test_what_is_fastest_is_chosen(platform, dtype, edges, nodes, heads, width, expected):
    assert lowered_for(platform, dtype, edges, nodes, heads, width) == expected


def test_few_short_rows_are_left_on_a_cpu():
    assert SUM not in lowered_for("cpu", "float32", 2**12, 2**8, 1, 16)


def test_sums_in_a_fixed_order():
    x, w = operands("float32", HEADS_OF_ROWS, OF_EDGES)
    f = jof.accelerate(SUMS["weights of heads"], deterministic=True)
    text = jax.jit(f).lower(x, w, *graph()).as_text()
    assert lowered_targets(text)[SUM] == 1


def test_explain_names_them():
    edges, nodes = 2**20, 2**16
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((nodes, HEADS, 64), (edges, HEADS)))
    ids = jax.ShapeDtypeStruct((edges,), "int32")

    def loss(x, w, s, r):
        y = jax.ops.segment_sum(w[..., None] * x[s], r, nodes)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    for platform in ("cuda", "cpu"):
        report = jof.explain(jax.grad(loss, (0, 1)), x, w, ids, ids, platform=platform)
        rows = [(row.operation, row.count, row.swapped) for row in report.rows]
        assert sorted(rows) == [("reduce_sum", 1, True), *[("scatter-add", 1, True)] * 2]
        stored = 2 * edges * HEADS * 64
        assert all(row.bytes < stored for row in report.rows)
        assert all("from their table" in row.reason for row in report.rows)
        assert all("test_gathers.py" in row.line for row in report.rows)


def test_explain_names_no_array_that_is_not_stored():
    """Neither where the environment asks for kernels, nor where XLA fuses the gather."""
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2**13, 64), (2**17, 1)))
    ids = jax.ShapeDtypeStruct((2**17,), "int32")

    def f(x, w, s, r):
        return jax.ops.segment_sum(w * x[s], r, 2**13)

    [fused] = jof.explain(f, x, w, ids, ids, platform="cuda").rows
    assert not fused.swapped
    assert "XLA fuses the gather" in fused.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "native")
        [asked] = jof.explain(f, x, w, ids, ids, platform="cuda").rows
    assert asked.swapped


# --- several devices ------------------------------------------------------------------------------

several = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")


def of_graph(dtype="float32"):
    """Arguments whose sizes are even, so that two devices can share them."""
    x, w = operands(dtype, (24, 4, 6), (160, 4))
    return x, w, *graph(edges=160, nodes=24)


def gradients(x, w, s, r):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(total(w[..., None] * x[s], r))), (0, 1))(x, w)


def check_compiled(f, *args):
    """Compares with JAX as `check`, and returns the kernels and collectives of each device."""
    hlo = compiled(jof.accelerate(lambda *args: f(*args)), *args)
    check(f, *args)
    found = collections.Counter(target for target in targets(hlo) if target.startswith((SUM, DOT)))
    found["all-reduce"] = len(re.findall(r" all-reduce(?:-start)?\(", hlo))
    assert "all-gather" not in hlo
    return +found


# The axes that shard x, w, and the ids; and the numbers of all-reduces of the sum and of gradients.
SHARDED = {
    "replicated": ((), (), (), 0, 0),
    "edges": ((), ("d",), ("d",), 1, 2),
    "heads": ((None, "d"), (None, "d"), (), 0, 0),
    "features": ((None, None, "d"), (), (), 0, 1),
}


@several
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHARDED)
def test_on_several_devices(name, dtype):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    of_x, of_w, of_ids, *reduced = SHARDED[name]
    specs = [jax.NamedSharding(mesh, P(*spec)) for spec in (of_x, of_w, of_ids, of_ids)]
    args = [*map(jax.device_put, of_graph(dtype), specs)]
    sums = check_compiled(SUMS["weights of heads"], *args)
    assert sums == collections.Counter({SUM: 1, "all-reduce": reduced[0]}) - collections.Counter()
    found = check_compiled(gradients, *args)
    assert (found[SUM], found[DOT]) == (2, 1)
    assert (found["all-reduce"] > 0) == (reduced[1] > 0)  # XLA may combine them


@pytest.mark.exhaustive
@several
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", sorted({*SUMS} - {"sorted"}))
def test_forms_on_several_devices(name):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = operands("float32", HEADS_OF_ROWS, OF_EDGES)
    args = [jax.device_put(x, jax.NamedSharding(mesh, P())) for x in (x, w, *graph())]
    assert check_compiled(SUMS[name], *args) == {SUM: 1}


@several
@pytest.mark.usefixtures("native")
def test_with_explicit_axes():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = [
        jax.device_put(x, jax.NamedSharding(mesh, P(*("d",) * (i > 0))))
        for i, x in enumerate(of_graph())
    ]

    def f(x, w, s, r):
        rows = x.at[s].get(out_sharding=P("d"))
        zeros = jnp.zeros((SEGMENTS, *x.shape[1:]), x.dtype)
        return zeros.at[r].add(w[..., None] * rows, out_sharding=P())

    with jax.set_mesh(mesh):
        assert check_compiled(f, *args) == {SUM: 1, "all-reduce": 1}


@several
@pytest.mark.usefixtures("native")
def test_in_a_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("d"), P("d"), P("d")), "out_specs": P()}
    f = jax.shard_map(
        lambda *args: jax.lax.psum(SUMS["weights of heads"](*args), "d"), mesh=mesh, **specs
    )
    assert check_compiled(f, *of_graph()) == {SUM: 1, "all-reduce": 1}


@several
@pytest.mark.usefixtures("native")
def test_tables_of_more_rows_than_a_device_has_edges_are_not_gathered():
    """As in bags of embeddings: a table by rows may not fit on one device."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    (x,) = operands("float32", (400, 8))
    args = [jax.device_put(y, jax.NamedSharding(mesh, P("d"))) for y in (x, *graph(edges=160))]
    for f in (lambda x, s, r: total(x[s], r), lambda x, s, r: jnp.sum(x[s] * x[r], -1)):
        hlo = compiled(jof.accelerate(lambda *args, f=f: f(*args)), *args)
        assert not {*targets(hlo)} & {SUM, DOT}
        assert "f32[200,8]" in hlo
        assert "f32[400,8]" not in hlo
        check(f, *args)


@several
@pytest.mark.usefixtures("native")
def test_a_sharded_table_is_gathered_with_a_warning():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, *rest = of_graph()
    x = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    rest = [jax.device_put(y, jax.NamedSharding(mesh, P())) for y in rest]
    f = jax.jit(jof.accelerate(SUMS["weights of heads"]))
    with pytest.warns(jof.GatherWarning, match=r"an array of shape \(24, 4, 6\)"):
        y = f(x, *rest)
    assert_near(y, SUMS["weights of heads"](x, *rest), "float32")
