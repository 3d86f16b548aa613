"""Graph layers: messages, attention over edges and plans, against float64 NumPy and jnp."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from tests.arrays import rng_for

KINDS = ("uniform", "one receiver", "hub", "sorted", "loops", "repeated", "out of range", "few")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(scope="module", autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


def edges_of(kind, nodes, segments, edges, rng):
    """Senders and receivers of a random graph of a kind."""
    senders, receivers = rng.integers(0, nodes, edges), rng.integers(0, segments, edges)
    if kind == "one receiver":
        receivers[:] = segments // 2
    elif kind == "hub":
        receivers = np.where(rng.random(edges) < 0.7, segments - 1, receivers)
    elif kind == "sorted":
        receivers.sort()
    elif kind == "loops":
        senders = np.minimum(receivers, nodes - 1)
    elif kind == "repeated":
        senders, receivers = senders[np.arange(edges) // 4], receivers[np.arange(edges) // 4]
    elif kind == "out of range":
        senders = rng.integers(-2 * nodes, 2 * nodes, edges)
        receivers = rng.integers(-segments, 2 * segments, edges)
    elif kind == "few":
        receivers %= max(1, segments // 5)
    return senders.astype(np.int32), receivers.astype(np.int32)


def nearest(senders, nodes):
    return np.clip(np.where(senders < 0, senders + nodes, senders), 0, max(nodes - 1, 0))


def along(weights, rows):
    return weights.reshape(*weights.shape, *(1,) * (rows.ndim - weights.ndim))


def exact_sum(table, senders, receivers, weights, segments):
    rows = table[nearest(senders, len(table))] if senders.size else table[:0]
    rows = rows if weights is None else rows * along(weights, rows)
    sums = [rows[receivers == r].sum(0) for r in range(segments)]
    return np.reshape(sums, (segments, *table.shape[1:]))


def exact_softmax(logits, receivers, segments):
    result = np.zeros_like(logits)
    for r in range(segments):
        mine = receivers == r
        terms = np.exp(logits[mine] - logits[mine].max(0, initial=-np.inf))
        result[mine] = terms / terms.sum(0)
    return result


def sum_in_jnp(table, weights, senders, receivers, segments):
    rows = table[nearest(senders, len(table))]
    rows = rows if weights is None else rows * along(weights, rows)
    return jax.ops.segment_sum(rows, np.where(receivers < 0, segments, receivers), segments)


def softmax_in_jnp(logits, receivers, segments):
    to = np.where(receivers < 0, segments, receivers)
    most = jax.lax.stop_gradient(jax.ops.segment_max(logits, to, segments))
    most = jnp.concatenate([most, jnp.zeros((1, *most.shape[1:]))])
    terms = jnp.exp(logits - most[np.minimum(to, segments)])
    total = jax.ops.segment_sum(terms, to, segments + 1)
    weights = terms / total[np.minimum(to, segments)]
    return jnp.where(along(to < segments, weights), weights, 0)


def attention_in_jnp(logits, values, senders, receivers, segments):
    weights = softmax_in_jnp(logits, receivers, segments)
    return sum_in_jnp(values, weights, senders, receivers, segments)


def weighted_sum(table, senders, receivers, weights=None, **options):
    """A weighted message sum, for which kernels exist."""
    if weights is None:
        return jof.message_sum(lambda x: x, (table,), senders, receivers, **options)
    return jof.message_sum(
        lambda x, w: along(w, x) * x, (table,), senders, receivers, weights, **options
    )


def plans(senders, receivers, nodes, segments):
    return {
        "plan": jof.segment_plan(receivers, segments),
        "sender_plan": jof.segment_plan(senders, nodes),
    }


def assert_close(actual, exact, terms, dtype, count=0):
    """Results are rounded once; errors of sums in float32 are relative to the terms' magnitude.

    A sum of `count` terms, one after the other, has an error of at most count / 2 eps.
    """
    wide = jnp.float32 if jnp.dtype(dtype).itemsize == 2 else dtype
    error = np.abs(np.asarray(actual, np.float64) - exact)
    half_ulp = 0.51 * float(jnp.finfo(dtype).eps) * np.abs(exact) + 1e-7 * (dtype == "float16")
    bound = max(64, count / 2) * float(jnp.finfo(wide).eps)
    assert np.all(error <= half_ulp + bound * (terms + 1e-30))


# (shape of a row, shape of an edge's weights)
SHAPES = (
    ((), None),
    ((), ()),
    ((1,), ()),
    ((3,), (3,)),
    ((8,), None),
    ((24,), ()),
    ((128,), (1,)),
    ((128,), (128,)),
    ((4, 8), (4,)),
    ((3, 5), (3,)),
    ((2, 4, 6), (2, 4)),
    ((8, 1), (8,)),
    ((300,), ()),
)


# These shapes use the same kernels as other shapes, in other sizes.
RARE = SHAPES[2::3]


@pytest.mark.parametrize(
    ("row", "of_weights"),
    [pytest.param(*s, marks=[pytest.mark.exhaustive] * (s in RARE)) for s in SHAPES],
    ids=str,
)
def test_message_sum(row, of_weights):
    """Every kind of graph, half of them with plans; the dtype of a kind varies with the shape."""
    rng = rng_for(row, of_weights)
    first = SHAPES.index((row, of_weights))
    problems = []
    for k, (kind, planned) in enumerate(zip(KINDS, (True,) * 4 + (False,) * 4, strict=True)):
        dtype = DTYPES[(first + k) % len(DTYPES)]
        nodes, segments, edges = map(int, rng.integers(1, (60, 40, 2500)))
        graph = edges_of(kind, nodes, segments, edges, rng)
        table = rng.standard_normal((nodes, *row)).astype(jnp.dtype(dtype))
        weights = None
        if of_weights is not None:
            weights = rng.standard_normal((edges, *of_weights)).astype(table.dtype)
        problems.append((table, *graph, weights, segments, planned))

    @jax.jit
    def sums(arrays):
        results = []
        for (table, *graph, weights), (*_, n, planned) in zip(arrays, problems, strict=True):
            options = plans(*graph, len(table), n) if planned else {}
            results.append(weighted_sum(table, *graph, weights, num_segments=n, **options))
        return results

    for problem, result in zip(problems, sums([p[:4] for p in problems]), strict=True):
        table, senders, receivers, weights, segments, _ = problem
        assert result.dtype == table.dtype
        wide = [None if x is None else np.asarray(x, np.float64) for x in (table, weights)]
        exact = exact_sum(wide[0], senders, receivers, wide[1], segments)
        absolute = [None if x is None else np.abs(x) for x in wide]
        terms = exact_sum(absolute[0], senders, receivers, absolute[1], segments)
        assert_close(result, exact, terms, table.dtype.name, len(senders))


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    kind=st.sampled_from(KINDS),
    nodes=st.integers(1, 20),
    segments=st.integers(0, 20),
    edges=st.sampled_from((0, 1, 2, 31, 200, 1025, 3000)),
    heads=st.integers(1, 5),
    width=st.sampled_from((1, 2, 3, 24, 133)),
    planned=st.booleans(),
    seed=st.integers(0, 9),
)
def test_graphs(kind, nodes, segments, edges, heads, width, planned, seed):
    rng = np.random.default_rng(seed)
    edges = edges if segments else 0
    senders, receivers = edges_of(kind, nodes, max(segments, 1), edges, rng)
    values = rng.standard_normal((nodes, heads, width)).astype(np.float32)
    logits = rng.standard_normal((edges, heads)).astype(np.float32)

    @jax.jit
    def run(values, logits, *graph):
        options = plans(*graph, nodes, segments) if planned else {}
        given = {"num_segments": segments, **options}
        return (
            weighted_sum(values, *graph, **given),
            jof.message_mean(lambda x: x, (values,), *graph, **given),
            jof.segment_softmax(logits, graph[1], plan=jof.segment_plan(graph[1], segments)),
            jof.attention_sum(logits, values, *graph, **given),
        )

    total, mean, softmax, result = run(values, logits, senders, receivers)
    wide = values.astype(np.float64)
    exact, terms = (exact_sum(x, senders, receivers, None, segments) for x in (wide, np.abs(wide)))
    assert_close(total, exact, terms, "float32", edges)
    in_range = receivers[(receivers >= 0) & (receivers < segments)]
    count = np.maximum(np.bincount(in_range, minlength=segments), 1)[:, None, None]
    assert_close(mean, exact / count, terms / count, "float32", edges)
    weights = exact_softmax(logits.astype(np.float64), receivers, segments)
    np.testing.assert_allclose(softmax, weights, rtol=max(1e-5, edges * 2.0**-24), atol=1e-7)
    exact, terms = (
        exact_sum(x, senders, receivers, weights, segments) for x in (wide, np.abs(wide))
    )
    assert_close(result, exact, terms, "float32", 2 * edges)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_rounds_once(dtype):
    rng = rng_for(dtype)
    nodes, segments, edges, heads, width = 50, 30, 6000, 8, 16
    senders, receivers = edges_of("hub", nodes, segments, edges, rng)
    logits = jax.device_put((8 * rng.standard_normal((edges, heads))).astype(dtype))
    values = jax.device_put(rng.standard_normal((nodes, heads, width)).astype(dtype))
    result = jof.attention_sum(logits, values, senders, receivers, num_segments=segments)
    weights = exact_softmax(np.asarray(logits, np.float64), receivers, segments)
    wide = np.asarray(values, np.float64)
    exact = exact_sum(wide, senders, receivers, weights, segments)
    terms = exact_sum(np.abs(wide), senders, receivers, weights, segments)
    assert_close(result, exact, 20 * terms, dtype)


@pytest.mark.parametrize(
    ("logits_dtype", "dtype", "heads", "width"),
    [
        ("bfloat16", "bfloat16", 8, 16),
        ("float32", "bfloat16", 3, 24),
        ("float16", "bfloat16", 2, 5),
        ("bfloat16", "float16", 70, 1),
        ("float32", "float32", 2, 1027),
        ("float64", "float32", 1, 12),
        ("float32", "bfloat16", 3, 64),
        ("float32", "float32", 2, 256),
    ],
)
def test_gradients_of_attention(logits_dtype, dtype, heads, width):
    """Gradients of the kernels; the graph's largest receiver spans many chunks."""
    rng = rng_for(logits_dtype, dtype, heads)
    nodes, segments, edges = 50, 30, 3000
    graph = edges_of("hub", nodes, segments, edges, rng)
    graph[1][::9] = -1
    logits = jnp.asarray(2 * rng.standard_normal((edges, heads)), logits_dtype)
    values = jax.device_put(rng.standard_normal((nodes, heads, width)).astype(dtype))
    ct = jnp.asarray(rng.standard_normal((segments, heads, width)), dtype)

    @jax.jit
    def gradients(logits, values, ct):
        f = functools.partial(jof.attention_sum, num_segments=segments)
        y, pull = jax.vjp(lambda *xs: f(*xs, *graph), logits, values)
        return y, *pull(ct)

    found = gradients(logits, values, ct)
    wide = (np.asarray(x, np.float64) for x in (logits, values))

    @jax.jit
    def reference(logits, values, ct):
        y, pull = jax.vjp(lambda *xs: attention_in_jnp(*xs, *graph, segments), logits, values)
        return y, *pull(ct)

    exact = reference(*wide, np.asarray(ct, np.float64))
    ulps = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18, "float64": 2**-18}
    for x, wanted in zip(found, exact, strict=True):
        bound = max(ulps[str(x.dtype)], ulps[dtype])
        scale = 1 + np.abs(wanted).max()  # for logits: the kernel subtracts the rounded result
        np.testing.assert_allclose(np.asarray(x, np.float64), wanted, bound, bound * scale)
    assert [x.dtype for x in found] == [values.dtype, logits.dtype, values.dtype]


def test_attention_to_infinities():
    receivers = np.array([0, 0, 1, 1, 2, 2, 3, 4, 4])
    inf, nan = np.inf, np.nan
    logits = np.array([-inf, 0, -inf, -inf, nan, 0, 1e30, 500, -3e38], np.float32)
    values = np.arange(1.0, 10.0, dtype=np.float32)[:, None]
    y = jof.attention_sum(logits, values, np.arange(9), receivers, num_segments=6)
    np.testing.assert_array_equal(y[:, 0], np.array([2, nan, nan, 7, 8, 0], np.float32))


def test_softmax_of_infinities():
    plan = jof.segment_plan(np.array([0, 0, 0, 1, 1, 2, 2, 3]), 4)
    inf, nan = np.inf, np.nan
    logits = np.array([-inf, 0, -inf, -inf, -inf, nan, 0, 1e30], np.float32)
    y = jof.segment_softmax(logits, np.array([0, 0, 0, 1, 1, 2, 2, 3]), plan=plan)
    np.testing.assert_array_equal(y, np.array([0, 1, 0, nan, nan, nan, nan, 1], np.float32))


def setting(planned, of_weights=(3,), row=(3, 4)):
    rng = rng_for("derivatives")
    nodes, segments, edges = 9, 7, 60
    senders, receivers = edges_of("hub", nodes, segments, edges, rng)
    receivers[::9] = -1
    table = rng.standard_normal((nodes, *row))
    weights = rng.standard_normal((edges, *of_weights))
    options = plans(senders, receivers, nodes, segments) if planned else {}
    graph = (senders, receivers)
    tangents = rng.standard_normal(weights.shape), rng.standard_normal(table.shape)
    return graph, segments, options, (weights, table), tangents, rng


def assert_same_derivatives(f, g, primals, tangents, order=2):
    """Compares gradients, tangents, and second derivatives in forward and reverse mode."""
    every = tuple(range(len(primals)))

    def gradient(f):
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), every)

    def along_tangents(f):
        gradients = gradient(f)
        return lambda *xs: sum(
            jnp.sum(dx * t) for dx, t in zip(gradients(*xs), tangents, strict=True)
        )

    def everything(f):
        programs = (
            lambda *xs: (gradient(f)(*xs), jax.jvp(f, xs, (*tangents,))),
            lambda *xs: jax.jvp(gradient(f), xs, (*tangents,)),
            jax.grad(along_tangents(f), every),
        )
        return jax.jit(lambda *xs: [run(*xs) for run in programs[: 2 * order - 1]])

    found, wanted = everything(f)(*primals), everything(g)(*primals)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("row", "of_weights"), [((3, 4), (3,)), ((5,), (5,)), ((6,), ())], ids=str)
def test_derivatives_of_message_sum(planned, row, of_weights):
    graph, segments, options, primals, tangents, _ = setting(planned, of_weights, row)
    assert_same_derivatives(
        lambda w, t: weighted_sum(t, *graph, w, num_segments=segments, **options),
        lambda w, t: sum_in_jnp(t, w, *graph, segments),
        *(primals, tangents),
    )


@pytest.mark.exhaustive
def test_derivatives_of_attention():
    """With plans; test_transforms.py tests without plans."""
    graph, segments, options, primals, tangents, _ = setting(True)
    assert_same_derivatives(
        lambda w, t: jof.attention_sum(w, t, *graph, num_segments=segments, **options),
        lambda w, t: attention_in_jnp(w, t, *graph, segments),
        *(primals, tangents),
    )


@pytest.mark.parametrize("has_plan", [False, True])
def test_softmax_ignores_logits_without_a_segment(has_plan):
    """Padded edges may hold anything."""
    ids = jnp.array([-1, 0, 0, 5, 1])
    plan = jof.segment_plan(ids, 2) if has_plan else None

    def softmax(logits):
        return jof.segment_softmax(logits, ids, 2, plan=plan)

    logits = jnp.array([jnp.inf, 0.0, 1.0, jnp.nan, 3.0])
    p = 1 / (1 + np.e)
    np.testing.assert_allclose(softmax(logits), [0, p, 1 - p, 0, 1], rtol=1e-6)
    gradient = jax.grad(lambda x: softmax(x) @ jnp.arange(5.0))(logits)
    np.testing.assert_allclose(gradient, [0, -p * (1 - p), p * (1 - p), 0, 0], atol=1e-6)
    for value in (np.nan, np.inf):  # in a segment
        of_value = jax.grad(lambda x: softmax(x) @ jnp.arange(5.0))(logits.at[1].set(value))
        np.testing.assert_array_equal(np.isnan(of_value), [False, True, True, False, False])


def test_derivatives_of_planned_softmax():
    """Derivatives of attention are composed of other operations and do not cover these."""
    (_, receivers), segments, options, (logits, _), (tangent, _), _ = setting(True)
    assert_same_derivatives(
        lambda x: jof.segment_softmax(x, receivers, segments, plan=options["plan"]),
        lambda x: softmax_in_jnp(x, receivers, segments),
        *((logits,), (tangent,)),
    )


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 2)], ids=str)
def test_vmap_over_features(axes):
    graph, segments, options, primals, _, rng = setting(True)
    xs = [
        x if axis is None else rng.standard_normal((*x.shape[:axis], 3, *x.shape[axis:]))
        for x, axis in zip(primals, axes, strict=True)
    ]

    def value_and_gradient(f):
        both = jax.value_and_grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))
        return jax.jit(jax.vmap(both, axes))

    found = value_and_gradient(
        lambda w, t: jof.attention_sum(w, t, *graph, num_segments=segments, **options)
    )
    wanted = value_and_gradient(lambda w, t: attention_in_jnp(w, t, *graph, segments))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, found(*xs), wanted(*xs))
    assert "while" not in found.lower(*xs).as_text()


@pytest.mark.parametrize("shared", ["neither", "senders", "receivers"])
def test_vmap_over_graphs(shared):
    """Also vmap over plans."""
    rng = rng_for(shared)
    problems, nodes, segments, edges = 4, 6, 5, 50
    logits = rng.standard_normal((problems, edges, 2))
    values = rng.standard_normal((problems, nodes, 2, 3))
    senders, receivers = rng.integers(-1, 6, (2, problems, edges))
    axes = {"senders": senders[0], "receivers": receivers[0]}
    ids = [
        axes.get(shared, x) if shared == name else x
        for name, x in (("senders", senders), ("receivers", receivers))
    ]
    in_axes = (0, 0, *(None if shared == name else 0 for name in ("senders", "receivers")))

    def loss(logits, values, senders, receivers):
        options = {
            "plan": jof.segment_plan(receivers, segments),
            "sender_plan": jof.segment_plan(senders, nodes),
        }
        y = jof.attention_sum(logits, values, senders, receivers, **options)
        return jnp.sum(jnp.sin(y)), y

    both = jax.grad(loss, (0, 1), has_aux=True)
    found = jax.jit(jax.vmap(both, in_axes))(logits, values, *ids)
    both = jax.jit(both)
    for k in range(problems):
        wanted = both(
            *(logits[k], values[k]), *(x if x.ndim == 1 else x[k] for x in map(np.asarray, ids))
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[k], b, rtol=1e-9, atol=1e-12),  # noqa: B023
            *(found, wanted),
        )


def largest_array(f, *args):
    """The number of elements of the largest array in a compiled program."""
    text = jax.jit(f).lower(*args).compile().as_text()
    shapes = re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)
    return max(np.prod([int(n) for n in dims.split(",")]) for dims in shapes)


def test_no_array_of_edges_times_width():
    """The compiled gradient and its tangent hold no (E, H, C) array, only weights (E, H)."""
    nodes, edges, heads, width = 100, 5000, 4, 16
    senders, receivers = edges_of("uniform", nodes, nodes, edges, rng_for("buffers"))
    logits = jnp.ones((edges, heads), jnp.bfloat16)
    values = jnp.ones((nodes, heads, width), jnp.bfloat16)
    options = plans(senders, receivers, nodes, nodes)

    def loss(logits, values, options):
        y = jof.attention_sum(logits, values, senders, receivers, **options)
        y = weighted_sum(y, senders, receivers, **options)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def second(*args):
        return jax.jvp(lambda x, y: jax.grad(loss, (0, 1))(x, y, args[2]), args[:2], args[:2])

    assert largest_array(second, logits, values, options) < edges * heads * width


@pytest.mark.parametrize(("dtype", "width", "calls"), [("bfloat16", 16, 1), ("float32", 24, 2)])
def test_both_gradients_of_attention_are_one_kernel_on_gpus(dtype, width, calls):
    if "cuda" not in jof.implementations():
        pytest.skip("the _cuda module was not built")
    ids = jnp.zeros(9, int)

    def gradients(logits, values):
        f = functools.partial(jof.attention_sum, num_segments=4)
        return jax.grad(lambda *xs: jnp.sum(f(*xs, ids, ids)), (0, 1))(logits, values)

    args = jnp.ones((9, 2), dtype), jnp.ones((3, 2, width), dtype)
    text = jax.jit(gradients).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@jof_attention_\w+", text)) == calls


def test_plan_is_made_under_jit_and_is_a_pytree():
    ids = jnp.array([3, 0, 7, 3, -1, 1])
    plan = jax.jit(lambda ids: jof.segment_plan(ids, 5))(ids)
    assert plan.num_segments == 5
    # A negative id that wraps comes after the others of its row, and an id out of range last.
    np.testing.assert_array_equal(plan.order, [1, 5, 0, 3, 4, 2])
    np.testing.assert_array_equal(plan.keys, [0, 2, 6, 6, 9, 10])
    np.testing.assert_array_equal(plan.order, jof.segment_plan(ids, 5).order)
    assert jax.tree.structure(plan) == jax.tree.structure(jof.segment_plan(ids, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": (4, 5)}, "message_sum: plan must be of 6 edges and 5 segments, got one of 4"),
        ({"plan": (6, 4)}, "message_sum: plan must be of 6 edges and 5 segments, got one of 6 and"),
        ({"sender_plan": (6, 5)}, "message_sum: sender_plan must be of 6 edges and 3 segments"),
        ({"weights": (5,)}, "message_sum: edge input 0 must have one entry for each of 6 edges"),
        ({"num_segments": -1}, "message_sum: num_segments must be non-negative"),
        ({"num_segments": None}, "message_sum: give num_segments"),
        ({"senders": np.zeros((6, 1), int)}, "message_sum: senders must have 1 dimension"),
        ({"senders": np.zeros(5, int)}, "message_sum: senders and receivers must have one shape"),
        (
            {"table": jnp.zeros((0, 2))},
            "message_sum: tables[0] must have rows where there are edges",
        ),
    ],
)
def test_values_that_do_not_fit(options, message):
    ids = np.zeros(6, int)
    given = {"table": jnp.zeros((3, 2)), "senders": ids, "receivers": ids, "num_segments": 5}
    for name in ("plan", "sender_plan"):
        if name in options:
            edges, segments = options[name]
            options = {name: jof.segment_plan(ids[:edges], segments)}
    if "weights" in options:
        options = {"weights": jnp.zeros(options["weights"])}
    with pytest.raises(ValueError, match=re.escape(message)):
        weighted_sum(**(given | options))


def test_messages_are_numbers():
    ids = jnp.array([1, 0])
    with pytest.raises(TypeError, match="message_sum: fun must return numbers, got booleans"):
        jof.message_sum(lambda x: x > 0, (jnp.ones((2, 3)),), ids, ids, num_segments=2)
    largest = jof.message_max(lambda x: x > 0, (jnp.ones((2, 3)),), ids, ids, num_segments=2)
    np.testing.assert_array_equal(largest, np.ones((2, 3), bool))
    narrow = jnp.ones((2, 3), "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"message_mean: .* at least 16 bits.* got float8_e4m3fn"):
        jof.message_mean(lambda x: x, (narrow,), ids, ids, num_segments=2)


def test_plans_are_compared_by_identity():
    plan = jof.segment_plan(jnp.array([1, 0]), 2)
    assert plan == plan
    assert plan != copy.deepcopy(plan)
    assert len({plan, plan}) == 1


def test_types_that_do_not_fit():
    ids, table = np.zeros(3, int), jnp.zeros((2, 2))
    with pytest.raises(TypeError, match=r"^attention_sum: plan must be a SegmentPlan, got int"):
        jof.attention_sum(jnp.zeros(3), table, ids, ids, num_segments=2, plan=3)
    with pytest.raises(TypeError, match=r"^message_mean: tables must be a tuple of one array"):
        jof.message_mean(lambda x: x, table, ids, ids, num_segments=2)
    with pytest.raises(TypeError, match=r"^message_max: fun must be a function, got Array"):
        jof.message_max(*(table,) * 4, num_segments=2)
    with pytest.raises(TypeError, match=r"^message_sum: fun must return one array, got 2"):
        jof.message_sum(lambda x: (x, x), (table,), ids, ids, num_segments=2)
    with pytest.raises(TypeError, match=r"must return one array, got 1 in a list$"):
        jof.message_sum(lambda x: [x], (table,), ids, ids, num_segments=2)
    with pytest.raises(ValueError, match=r"^message_sum: fun must return an array whose first"):
        jof.message_sum(lambda x: x[0], (table,), ids, ids, num_segments=2)
    with pytest.raises(jof.FusionError, match=r"messages reduce nothing. Remedy[^;]*\.$"):
        jof.message_sum(lambda x: x.sum(1), (table,), ids, ids, num_segments=2)
    with pytest.raises(TypeError, match=r"^segment_plan: ids must have an integer dtype"):
        jof.segment_plan(jnp.zeros(3), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "edges"), [("float16", 70_000), ("bfloat16", 259)])
def test_counts_that_a_dtype_does_not_hold(dtype, edges):
    ids, table = jnp.zeros(edges, jnp.int32), jnp.full((1, 1), 0.75, dtype)
    mean = jof.message_mean(lambda x: x, (table,), ids, ids, num_segments=1)
    total = jof.message_sum(lambda x: x, (table,), ids, ids, num_segments=1)
    assert mean == (total.astype(jnp.float64) / edges).astype(dtype)
    grad = jax.grad(lambda x: jof.message_mean(lambda x: x, (x,), ids, ids, num_segments=1)[0, 0])
    assert abs(grad(table) - 1) < 0.01


def test_integers_and_complex_numbers():
    senders, receivers = edges_of("out of range", 5, 4, 50, rng_for("integers"))
    for table in (np.arange(10).reshape(5, 2), np.arange(10).reshape(5, 2) * (1 + 2j)):
        weights = np.arange(50) % 3
        result = weighted_sum(table, senders, receivers, weights, num_segments=4)
        assert result.dtype == jnp.result_type(table, weights)
        rows = table[nearest(senders, 5)] * weights[:, None]
        exact = np.zeros((4, 2), table.dtype)
        is_row = (receivers >= 0) & (receivers < 4)
        np.add.at(exact, receivers[is_row], rows[is_row])
        np.testing.assert_array_equal(result, exact)


def ffi(name, results, *operands):
    """A hand-made FFI call on zeros; results and operands are (dtype, *shape)."""

    def arrays(of):
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in of]

    operands = [np.zeros(x.shape, x.dtype) for x in arrays(operands)]
    return jax.block_until_ready(jax.jit(jax.ffi.ffi_call(name, arrays(results)))(*operands))


SUM = (("f4", 5, 2, 4), ("f4", 1, 2, 8)), (("f4", 3, 2, 4), ("f4", 6, 2))
DOT = (("f4", 6, 2),), (("f4", 3, 2, 4), ("f4", 5, 2, 4))
ATTENTION = (
    (("f4", 5, 2, 4), ("f4", 5, 2, 2), ("f4", 1, 2, 12)),
    (("f4", 3, 2, 4), ("f4", 6, 2)),
)
LOGITS = (
    (("f4", 6, 2),),
    (("f4", 3, 2, 4), ("f4", 6, 2), ("f4", 5, 2, 2), ("f4", 5, 2, 4), ("f4", 5, 2, 4)),
)
VALUES = (
    (("f4", 3, 2, 4), ("f4", 1, 2, 8)),
    (("f4", 5, 2, 4), ("f4", 6, 2), ("f4", 5, 2, 2)),
)
SOFTMAX = (("f4", 6, 2), ("f4", 5, 2, 2), ("f4", 1, 2, 4)), (("f4", 6, 2),)
IDS = (("i4", 6),) * 3


@pytest.mark.parametrize(
    ("target", "call", "where", "wrong"),
    [
        ("jof_message_sum", SUM, (0, 0), ("f4", 5, 2, 3)),
        ("jof_message_sum", SUM, (0, 1), ("f4", 1, 2, 7)),
        ("jof_message_sum", SUM, (0, 1), ("f4", 0, 2, 8)),
        ("jof_message_sum", SUM, (1, 0), ("i4", 3, 2, 4)),
        ("jof_message_sum", SUM, (1, 1), ("f4", 5, 2)),
        ("jof_message_sum", SUM, (1, 1), ("f2", 6, 2)),
        ("jof_message_sum", SUM, (1, 2), ("i4", 5)),
        ("jof_message_sum", SUM, (1, 3), ("i4", 6, 1)),
        ("jof_message_sum", SUM, (1, 4), ("i4", 7)),
        ("jof_attention", ATTENTION, (0, 1), ("f4", 5, 2, 1)),
        ("jof_attention", ATTENTION, (0, 2), ("f4", 1, 2, 8)),
        ("jof_attention", ATTENTION, (1, 1), ("f4", 0, 2)),
        ("jof_attention_logits", LOGITS, (0, 0), ("f4", 6, 1)),
        ("jof_attention_logits", LOGITS, (1, 1), ("f2", 6, 2)),
        ("jof_attention_logits", LOGITS, (1, 2), ("f4", 3, 2, 2)),
        ("jof_attention_logits", LOGITS, (1, 4), ("f4", 5, 2, 3)),
        ("jof_attention_values", VALUES, (0, 1), ("f4", 1, 2, 12)),
        ("jof_attention_values", VALUES, (1, 2), ("f4", 3, 2, 2)),
        ("jof_edge_dot", DOT, (0, 0), ("f4", 6, 3)),
        ("jof_edge_dot", DOT, (0, 0), ("f2", 6, 2)),
        ("jof_edge_dot", DOT, (1, 1), ("f4", 5, 2, 3)),
        ("jof_edge_dot", DOT, (1, 3), ("u4", 6)),
        ("jof_segment_softmax", SOFTMAX, (0, 0), ("f4", 6, 1)),
        ("jof_segment_softmax", SOFTMAX, (0, 1), ("f4", 5, 1, 2)),
        ("jof_segment_softmax", SOFTMAX, (0, 2), ("f4", 1, 2, 2)),
        ("jof_segment_softmax", SOFTMAX, (1, 1), ("i4", 5)),
    ],
)
def test_handlers_refuse(target, call, where, wrong):
    results, operands = (list(side) for side in call)
    operands += IDS
    ffi(target, results, *operands)
    side, k = where
    (results, operands)[side][k] = wrong
    with pytest.raises(Exception, match=rf"INVALID_ARGUMENT.*{target}: "):
        ffi(target, results, *operands)


@pytest.mark.parametrize("width", [1, 8, 128])
def test_dropped_edges_between_others(width):
    """Rows have one or two edges, and the plan has dropped edges between them."""
    rng = rng_for(width)
    segments, edges = 2000, 5000
    senders, receivers = edges_of("out of range", 50, segments, edges, rng)
    table = rng.integers(-8, 8, (50, width)).astype(np.float32)
    weights = rng.integers(-8, 8, edges).astype(np.float32)
    plan = jof.segment_plan(receivers, segments)
    result = weighted_sum(table, senders, receivers, weights, plan=plan)
    exact = exact_sum(table, senders, receivers, weights, segments)
    np.testing.assert_array_equal(result, exact)
    logits = rng.standard_normal((edges, width)).astype(np.float32)
    y = jof.segment_softmax(logits, receivers, plan=plan)
    exact = exact_softmax(logits.astype(np.float64), receivers, segments)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-7)


# --- functions of rows ----------------------------------------------------------------------------


def message(sender, receiver, weight, edge):
    return jax.nn.relu(sender + receiver) * weight + jnp.tanh(edge)


def in_jnp(fun, tables, senders, receivers, *edges, num_segments, reduce="sum"):
    rows = [x[ids] for x, ids in zip(tables, (senders, receivers), strict=False)]
    return getattr(jax.ops, f"segment_{reduce}")(fun(*rows, *edges), receivers, num_segments)


REDUCTIONS = {"sum": jof.message_sum, "max": jof.message_max}


@pytest.mark.parametrize(("dtype", "row"), [("bfloat16", (4, 8)), ("float32", (3, 5))], ids=str)
def test_functions_of_rows(dtype, row):
    """Against float64; the second table has more rows than there are receivers."""
    rng = rng_for(dtype)
    names = {"hub": "sum", "one receiver": "max", "out of range": "sum", "few": "max"}
    for kind, name in names.items():
        nodes, segments, edges = rng.integers(1, (60, 40, 5000))
        senders, receivers = edges_of(kind, nodes, segments, edges, rng)
        shapes = (nodes, *row), (segments + 1, *row), (edges, row[0], 1), (edges, *row)
        arrays = [jax.device_put(rng.standard_normal(shape).astype(dtype)) for shape in shapes]
        options = plans(senders, receivers, nodes, segments) if kind == "hub" else {}
        reduce = functools.partial(REDUCTIONS[name], num_segments=segments, **options)
        found = jax.jit(functools.partial(reduce, message))(
            arrays[:2], senders, receivers, *arrays[2:]
        )
        assert found.dtype == dtype

        def in_float64(*arrays, name=name, of=lambda y: y, ids=(senders, receivers), size=segments):
            def fun(*xs):
                return of(message(*xs))

            return in_jnp(fun, arrays[:2], *ids, *arrays[2:], num_segments=size, reduce=name)

        wide = [np.asarray(x, np.float64) for x in arrays]
        exact = np.asarray(jax.jit(in_float64)(*wide))
        absolute = functools.partial(in_float64, name="sum", of=jnp.abs)
        terms = np.asarray(jax.jit(absolute)(*wide))
        found = np.asarray(found, np.float64)
        is_empty = ~np.isfinite(exact)
        np.testing.assert_array_equal(found[is_empty], exact[is_empty])
        assert_close(found[~is_empty], exact[~is_empty], terms[~is_empty], dtype)


@pytest.mark.parametrize(
    ("reduce", "order"),
    [("sum", 1), ("max", 1), pytest.param("sum", 2, marks=pytest.mark.exhaustive)],
)
def test_derivatives_of_functions(reduce, order):
    """With respect to tables, edge arrays and closed-over arrays; some maxima are ties.

    Second derivatives without plans are in test_transforms.py.
    """
    rng = rng_for("functions")
    nodes, segments, edges, row = 9, 7, 60, (3, 4)
    senders, receivers = edges_of("hub", nodes, segments, edges, rng)
    senders[::7], receivers[::9] = -1 - senders[::7], -1
    senders[1::2], receivers[1::2] = senders[::2], receivers[::2]
    of_sender, of_receiver = rng.standard_normal((nodes, *row)), rng.standard_normal((7, *row))
    weights, bias = rng.standard_normal((edges, 3, 1)), rng.standard_normal((1, 4))
    weights[1::2] = weights[::2]
    options = plans(senders, receivers, nodes, segments) if reduce == "sum" else {}

    def layer(reduced):
        def f(a, w, b=of_receiver, bias=bias):
            def fun(x, y, w):
                return jnp.tanh(x * w + y) + bias * x

            y = reduced(fun, (a, b), senders, receivers, w)
            return jnp.where(jnp.isfinite(y), y, 0)

        return f

    found = layer(functools.partial(REDUCTIONS[reduce], num_segments=segments, **options))
    wanted = layer(functools.partial(in_jnp, num_segments=segments, reduce=reduce))
    xs = of_sender, weights, *((of_receiver, bias) if reduce == "sum" else ())
    tangents = [rng.standard_normal(x.shape) for x in xs]
    assert_same_derivatives(found, wanted, xs, tangents, order)


def test_a_maximum_of_nan_has_no_edges():
    """Its gradient is 0, as that of jax.ops.segment_max."""
    x = np.array([[1], [np.nan], [2], [3], [4]], np.float32)
    edges, receivers = np.arange(5), np.array([0, 0, 1, 1, 2])

    def largest(x):
        return jof.message_max(lambda x: x, (x,), edges, receivers, num_segments=3).sum()

    np.testing.assert_array_equal(jax.grad(largest)(x)[:, 0], [0, 0, 0, 1, 1])


@pytest.mark.parametrize("make", [jax.custom_vjp, jax.custom_jvp], ids=["vjp", "jvp"])
def test_custom_derivatives_of_functions_of_messages(make):
    """Functions with the value of their argument are no products; custom_vjp has no JVP."""

    @make
    def reversed_gradient(x):
        return x

    if make is jax.custom_vjp:
        reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    else:
        reversed_gradient.defjvp(lambda xs, ts: (*xs, -ts[0]))
    x, weights, ids = np.ones((3, 4), np.float32), np.full((3, 1), 2, np.float32), np.arange(3)

    def total(x, weights):
        return jof.message_sum(
            lambda x, w: x * reversed_gradient(w), (x,), ids, ids, weights, num_segments=3
        ).sum()

    assert total(x, weights) == 24
    if make is jax.custom_jvp:
        np.testing.assert_array_equal(jax.grad(total, 1)(x, weights), np.full((3, 1), -4))
    else:
        with pytest.raises(jof.FusionError, match=r"message_sum: .* Remedy: use jax.custom_jvp"):
            jax.grad(total, 1)(x, weights)


@pytest.mark.exhaustive
def test_custom_derivatives_of_functions_with_one_formula():
    def scaled_gradient(scale):
        @jax.custom_jvp
        def f(x):
            return jnp.maximum(x, 0)

        f.defjvp(lambda xs, ts: (f(*xs), scale * ts[0]))
        return f

    x, ids = -np.ones((3, 4), np.float32), np.arange(3)
    for f, slope in ((jax.nn.relu, 0), *((scaled_gradient(scale), scale) for scale in (1, 5))):
        for reduce in (jof.message_sum, jof.message_max):

            def total(x, f=f, reduce=reduce):
                return reduce(lambda x: f(x) * 1.5, (x,), ids, ids, num_segments=3).sum()

            np.testing.assert_array_equal(jax.grad(total)(x), np.full((3, 4), 1.5 * slope))


def test_gradient_of_senders_out_of_range():
    """Senders out of range read the nearest row, which gets no gradient from them."""
    senders, receivers = np.array([0, -1, 5, -9]), np.zeros(4, int)
    table, weights = jnp.arange(6.0).reshape(3, 2), jnp.ones((4, 1))

    def both(reduce, fun):
        def loss(table, weights):
            y = reduce(fun, (table,), senders, receivers, weights, num_segments=1)
            return jnp.sum(y * jnp.array([1.0, 10.0])).real, y

        tangents = jax.jvp(loss, (table, weights), (table, weights), has_aux=True)[1]
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(table, weights), tangents

    for fun in (
        lambda x, w: x * w,
        lambda x, w: jnp.sin(x) * w,
        lambda x, w: x * w * (2 + 1j),  # there are no kernels for complex numbers
    ):
        jax.tree.map(np.testing.assert_allclose, both(jof.message_sum, fun), both(in_jnp, fun))


def test_messages_that_stop_gradients():
    """A product is not one if a factor of it, or all of it, has no gradient."""
    stop = jax.lax.stop_gradient
    senders, receivers = np.array([0, 1, 1]), np.array([1, 1, 0])
    operands = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[2.0], [3.0], [5.0]])

    def both(reduce, fun):
        def loss(table, weights):
            y = reduce(fun, (table,), senders, receivers, weights, num_segments=2)
            return jnp.sum(y * jnp.array([1.0, 10.0]))

        gradient = jax.grad(loss, (0, 1))
        return gradient(*operands), jax.jvp(gradient, operands, operands)

    def mean_in_jnp(*args, **options):
        return in_jnp(*args, **options) / jnp.array([[1.0], [2.0]])

    for fun in (
        lambda x, w: x * stop(w),
        lambda x, w: stop(x) * w,
        lambda x, w: stop(x),
        lambda x, w: stop(x * w),
        lambda x, w: jax.jit(stop)(x) * w,
    ):
        for ours, reference in ((jof.message_sum, in_jnp), (jof.message_mean, mean_in_jnp)):
            found, expected = both(ours, fun), both(reference, fun)
            jax.tree.map(np.testing.assert_allclose, found, expected)


def test_gradient_of_receivers_out_of_range():
    """Also of complex messages, for which there are no kernels."""
    senders, receivers = np.array([0, 1]), np.array([0, 5])
    tables = jnp.array([[2.0], [3.0]]), jnp.array([[1.0], [0.0]])

    def both(reduce, factor):
        def loss(*tables):
            y = reduce(lambda a, b: factor * a / b, tables, senders, receivers, num_segments=2)
            return jnp.sum(y.real)

        return jax.jit(jax.grad(loss, 1))(*tables)

    for factor in (1, 1 + 1j):
        np.testing.assert_allclose(both(jof.message_sum, factor), both(in_jnp, factor))


def test_attention_to_senders_out_of_range():
    """The gradient of their logits uses the nearest row's values, too."""
    senders, receivers = np.array([0, -1, 5, -9, 2, 7]), np.array([0, 0, 0, 1, 1, 9])
    rng = rng_for("senders")
    logits, values = rng.standard_normal((6, 2)), rng.standard_normal((3, 2, 8))

    def both(attention):
        def loss(logits, values):
            return jnp.sum(jnp.sin(attention(logits, values)))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(logits, values)

    def in_jnp(logits, values):
        terms = jnp.exp(logits)
        weights = terms / jax.ops.segment_sum(terms, receivers, 2)[jnp.minimum(receivers, 1)]
        return jax.ops.segment_sum(weights[..., None] * values[senders], receivers, 2)

    ours = both(lambda *xs: jof.attention_sum(*xs, senders, receivers, num_segments=2))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), ours, both(in_jnp))


def test_gradient_of_attention_is_transposed():
    graph, segments, options, primals, tangents, _ = setting(True)

    def attention(logits, values):
        return jof.attention_sum(logits, values, *graph, num_segments=segments, **options)

    y, tangent = jax.jvp(attention, primals, tangents)
    pull = jax.vjp(attention, *primals)[1]
    (found,) = jax.jit(lambda *xs: jax.linear_transpose(pull, y)(xs))(*tangents)
    np.testing.assert_allclose(found, tangent, rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("over", ["features", "graphs"])
def test_vmap_of_functions(over):
    rng = rng_for(over)
    problems, nodes, segments, edges = 3, 6, 5, 50
    a, b = rng.standard_normal((problems, nodes, 4)), rng.standard_normal((segments, 4))
    w, bias = rng.standard_normal((edges, 4)), rng.standard_normal((problems, 4))
    ids = rng.integers(-1, 6, (2, problems, edges))
    axes = (0, None, None, 0, 0 if over == "graphs" else None, None)
    senders, receivers = ids if over == "graphs" else ids[:, 0]
    receivers = receivers[0] if over == "graphs" else receivers

    def both(reduce):
        def loss(a, b, w, bias, senders, receivers):
            fun = lambda x, y, w: jnp.sin(x * y + bias) * w  # noqa: E731
            y = reduce(fun, (a, b), senders, receivers, w, num_segments=segments)
            return jnp.sum(jnp.sin(y))

        return jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)), axes)

    args = a, b, w, bias, senders, receivers
    found, wanted = jax.jit(both(jof.message_sum))(*args), jax.jit(both(in_jnp))(*args)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, found, wanted)


def test_functions_store_no_row_of_edges():
    nodes, edges, heads, width = 100, 5000, 4, 16
    senders, receivers = edges_of("uniform", nodes, nodes, edges, rng_for("buffers"))
    options = plans(senders, receivers, nodes, nodes)
    x, w = jnp.ones((nodes, heads, width), jnp.bfloat16), jnp.ones((edges, heads, 1), jnp.bfloat16)

    def loss(x, w, options):
        y = jof.message_sum(
            *(lambda x, y, w: jax.nn.relu(x + y) * w, (x, x), senders, receivers, w), **options
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def second(*args):
        return jax.jvp(lambda x, y: jax.grad(loss, (0, 1))(x, y, args[2]), args[:2], args[:2])

    assert largest_array(second, x, w, options) < edges * heads * width


def test_plan_of_another_graph():
    """A plan of another graph is an error if ids are concrete."""
    senders, receivers = edges_of("uniform", 9, 7, 40, rng_for("plan"))
    right, wrong = (jof.segment_plan(ids, 7) for ids in (receivers, receivers[::-1]))
    table = jnp.ones((9, 2))

    @jax.jit
    def layer(table, plan):
        return jof.message_sum(lambda x: x, (table,), senders, receivers, plan=plan)

    layer(table, right)
    jof.message_sum(lambda x: x, (table,), senders, receivers, plan=right)
    message = r"^message_sum: plan was made from other ids than those that it is used with"
    with pytest.raises(ValueError, match=message):
        jof.message_sum(lambda x: x, (table,), senders, receivers, plan=wrong)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jof.message_sum(lambda y: y, (x,), senders, receivers, plan=wrong))(table)


def test_handler_of_messages_refuses(monkeypatch):
    calls = []
    plain = jax.ffi.ffi_call

    def spy(name, types, **options):
        def call(*args, **attributes):
            if name == "jof_messages":
                calls.append((list(types), [jax.typeof(x) for x in args], attributes))
            return plain(name, types, **options)(*args, **attributes)

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", spy)
    table, weights, ids = jnp.ones((3, 8)), jnp.ones((6, 1)), np.zeros(6, int)

    def layer(table, weights):
        fun = lambda x, w: jnp.sin(x) * w  # noqa: E731
        return jof.message_sum(fun, (table,), ids, ids, weights, num_segments=5)

    jax.jit(layer)(table, weights)
    ((types, args, attributes),) = calls

    def run(types, args, attributes):
        zeros = [jnp.zeros(x.shape, x.dtype) for x in args]
        jax.block_until_ready(
            jax.jit(lambda *xs: plain("jof_messages", types)(*xs, **attributes))(*zeros)
        )

    run(types, args, attributes)
    wrong = [
        (types, [*args[:k], args[k].update(shape=shape), *args[k + 1 :]], {})
        for k, shape in ((0, (5,)), (1, (7,)), (2, (0,)), (3, (3, 7)), (4, (5, 1)))
    ]
    wrong += [([types[0].update(shape=(5, 7)), types[1]], args, {})]
    wrong += [
        (types, args, {name: np.asarray(values, np.int64)})
        for name, values in (
            ("rows", [1]),
            ("rows", [4, 2]),
            ("broadcasts", [-3, -2]),
            ("broadcasts", [0, -2]),
            ("layout", [8, 0]),
            ("layout", [9, 0, 1]),
            ("layout", [8, 3, 1]),
            ("element_bytes", [8, 8, 4]),
        )
    ]
    for types_, args_, more in wrong:
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*jof_messages: "):
            run(types_, args_, {**attributes, **more})


def test_a_number_of_segments_that_is_symbolic():
    """A layer whose graph may have any number of nodes and edges."""

    def layer(x, edges):
        sums = jof.message_sum(lambda s, r: s * r, (x, x), *edges, num_segments=x.shape[0])
        return sums + jof.segment_sum(x[edges[0]], edges[1], x.shape[0])

    nodes, count = jax.export.symbolic_shape("nodes, count")
    specs = (
        jax.ShapeDtypeStruct((nodes, 2), jnp.float32),
        [jax.ShapeDtypeStruct((count,), np.int32)] * 2,
    )
    export = jax.export.export(jax.jit(layer), disabled_checks=jof.export_checks())(*specs)
    for n in (3, 5):
        x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        senders, receivers = np.array([[0, 2, 2, n - 1], [1, 1, 0, 2]], np.int32)
        expected = np.zeros((n, 2))
        np.add.at(expected, receivers, x[senders] * (1 + x[receivers]))
        np.testing.assert_array_equal(export.call(x, [senders, receivers]), expected)


@pytest.mark.parametrize("row", [(), (1,)])
def test_messages_that_read_nothing(row):
    """Such as the number of edges of each node."""
    ids = jnp.array([0, 1, 1])
    table = jnp.zeros((4, *row))
    found = jof.message_sum(jnp.ones_like, (table,), ids, ids, num_segments=4)
    np.testing.assert_array_equal(found.reshape(-1), [1, 2, 0, 0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("edges", [0, 1, 3])
def test_functions_that_close_over_arrays_of_edges(edges):
    """With fewer than two edges, the function cannot be traced for two."""
    x = jnp.asarray(rng_for("closures").normal(size=(4, 2)), jnp.float32)
    ids, w = jnp.arange(edges, dtype=jnp.int32), jnp.full((edges, 1), 3.0)
    for f in (
        lambda a: a * w,
        lambda a: a + jnp.broadcast_to(jnp.float32(1), (edges, 2)),
        lambda a: jnp.broadcast_to(jnp.tanh(a), (edges, 2)),
        lambda a: jnp.broadcast_to(w, (edges, 2)),
    ):
        want = jax.ops.segment_sum(f(x[ids]), ids, 4)
        got = jof.message_sum(f, (x,), ids, ids, num_segments=4)
        np.testing.assert_allclose(got, want, 1e-6)
    with pytest.raises(TypeError, match="fun must return one array"):
        jof.message_sum(lambda a: (a, a), (x,), ids, ids, num_segments=4)
    with pytest.raises(jof.FusionError, match="needs the values"):
        jof.message_sum(lambda a: a if a.sum() > 0 else -a, (x,), ids, ids, num_segments=4)


@pytest.mark.exhaustive
def test_derivatives_of_messages_whose_rule_does_not_call_the_function():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 3 * jnp.cos(xs[0]) * ts[0]))
    x, ids = jnp.asarray(rng_for("rules").normal(size=(5, 3)), jnp.float32), jnp.arange(5)
    # The derivatives of the last two do not read what their jaxpr reads.
    for f in (lambda a: sine(a) * a, lambda a: jnp.mod(a, 2.0), lambda a: jnp.mod(a, 2.0) * a):

        def total(x, f=f):
            return (jof.message_sum(f, (x,), ids, ids, num_segments=5) ** 2).sum()

        for d in (jax.grad, lambda f: jax.grad(lambda x: (jax.grad(f)(x) * x).sum())):
            want = d(lambda x, f=f: (f(x) ** 2).sum())(x)
            np.testing.assert_allclose(d(total)(x), want, 2e-5, 2e-5)


def with_rule(value, rule):
    f = jax.custom_jvp(value)
    f.defjvp(lambda xs, ts: rule(f, xs, ts))
    return f


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize(
    "f",
    [
        with_rule(
            lambda x, y, w: jnp.sin(x),
            lambda f, xs, ts: (f(*xs), ts[0] * jnp.cos(xs[0]) * xs[1] + ts[2] * xs[2]),
        ),
        with_rule(
            lambda x, y, w: jnp.ones_like(x),
            lambda f, xs, ts: (f(*xs), ts[0] * xs[0] + ts[1] * xs[1]),
        ),
        with_rule(
            lambda x, y, w: jnp.sin(x) * w,
            lambda f, xs, ts: (jnp.sin(xs[0]) * xs[2], ts[0] * jnp.cos(xs[0]) * xs[1]),
        ),
    ],
    ids=["one operand", "no operand", "rebuilds its result"],
)
def test_rules_of_messages_that_read_what_the_message_does_not(f, reduction):
    rng = rng_for("rules", reduction)
    senders, receivers = rng.integers(0, 4, (2, 9))
    x, y, w = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 3), (4, 3), (9, 3))
    )

    def ours(x, y, w):
        reduced = {"sum": jof.message_sum, "max": jof.message_max}[reduction]
        return reduced(f, (x, y), senders, receivers, w, num_segments=4)

    def theirs(x, y, w):
        reduced = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}[reduction]
        return reduced(f(x[senders], y[receivers], w), receivers, 4)

    def gradients(g):
        return jax.grad(lambda *xs: jnp.where(jnp.isfinite(h := g(*xs)), h * h, 0).sum(), (0, 1, 2))

    def of_gradients(g):
        return jax.grad(lambda *xs: sum((v * v).sum() for v in gradients(g)(*xs)), (0, 1, 2))

    for derivative in (gradients, of_gradients):
        for a, e in zip(derivative(ours)(x, y, w), derivative(theirs)(x, y, w), strict=True):
            np.testing.assert_allclose(a, e, 2e-5, 2e-5)


def test_kernels_of_gradients_read_no_more_than_they_use():
    """Also where a message calls a function with a rule of its own, such as relu."""
    x, ids, w = jnp.ones((4, 3)), jnp.arange(4), jnp.ones((4, 3))

    def total(s, r, w):
        message = jof.message_sum(
            lambda s, r, w: jax.nn.relu(s) * r + w * r, (s, r), ids, ids, w, num_segments=4
        )
        return (message * message).sum()

    jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(x, x, w).jaxpr
    inputs = [e.params["spec"].inputs for e in jaxpr.eqns if e.primitive.name == "jof_messages"]
    definitions = [
        e.params["spec"].definition for e in jaxpr.eqns if e.primitive.name == "jof_messages"
    ]
    assert len(inputs) == 4
    for own, definition in zip(inputs[1:], definitions[1:], strict=True):
        assert own == definition.reads
