"""Softmaxes of 16-bit rows inside `accelerate`: what is recognised, and that results agree."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from jax_oneflow_ops import _policy
from jax_oneflow_ops._accelerate import common, softmaxes
from tests.arrays import rng_for
from tests.test_exp_sums import compare
from tests.test_lowering import ENVIRONMENT_VARIABLE, accelerated, lowered_targets, native_backend

pytestmark = native_backend

FORWARD, GRADIENT = "jof_softmax", "jof_softmax_vjp"


def called(f, *args, platform=None) -> tuple[int, int]:
    """How often the kernels of the softmax and of its gradient are called."""
    targets = lowered_targets(accelerated(f, *args, platform=platform))
    return targets.get(FORWARD, 0), targets.get(GRADIENT, 0)


def check(f, *args):
    """Compares with JAX in float64, and returns how often the kernels are called."""
    compare(f, *args, ulps=4)
    return called(f, *args)


def pair(dtype, shape=(5, 37)):
    rng = rng_for(dtype, shape)
    return [jnp.asarray(rng.normal(size=shape) * k, dtype) for k in (3, 1)]


def with_gradient(f):
    def both(x, ct):
        y, pullback = jax.vjp(f, x)
        return y, *pullback(ct)

    return both


DTYPES = ["float16", "bfloat16"]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax(dtype):
    x, _ = pair(dtype)
    assert check(jax.nn.softmax, x) == (1, 0)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_infinities_and_nan(dtype):
    x = np.asarray(pair(dtype)[0], np.float64)
    x[0, 3], x[1, :5], x[2, 4], x[3] = 60, -np.inf, np.inf, -np.inf
    x[4, 7] = np.nan
    assert check(jax.nn.softmax, jnp.asarray(x, dtype)) == (1, 0)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_axes(axis, dtype):
    """Also with dimensions of equal sizes, which are not the same dimensions."""
    for shape in ((4, 6, 8), (6, 6, 6), (5, 1, 12), (10, 10, 1)):
        if shape[axis] > 1:
            f = with_gradient(lambda x: jax.nn.softmax(x, axis))
            assert check(f, *pair(dtype, shape)) == (1, 1)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_attention(dtype):
    rng = rng_for(dtype)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 19, 3, 8)) / 2, dtype) for _ in range(3))

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v).astype(jnp.float32)))

    gradient = jax.grad(loss, (0, 1, 2))
    assert called(gradient, q, k, v) == (1, 1)
    accelerated = jax.jit(jof.accelerate(lambda *args: gradient(*args)))(q, k, v)
    exact = jax.jit(gradient)(*(x.astype(jnp.float32) for x in (q, k, v)))
    for got, want in zip(accelerated, exact, strict=True):
        error = np.abs(np.asarray(got, np.float32) - np.asarray(want)).max()
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.abs(want).max()


@pytest.mark.usefixtures("native")
def test_other_transformations():
    x, ct = pair("bfloat16", (3, 4, 21))
    f = with_gradient(jax.nn.softmax)
    assert check(jax.vmap(f), x, ct) == (1, 1)
    assert check(lambda x, ct: jax.lax.map(lambda a: f(*a), (x, ct)), x, ct) == (1, 1)
    assert check(lambda x, ct: jax.jvp(jax.nn.softmax, [x], [ct])[0], x, ct) == (1, 0)
    remat = with_gradient(jax.checkpoint(jax.nn.softmax))
    assert check(remat, x, ct) == (2, 1)


@pytest.mark.usefixtures("native")
def test_residuals_that_cross_functions():
    """The gradient is computed elsewhere from the exponentials, as the program says."""
    x, ct = pair("bfloat16", (3, 4, 21))
    f = with_gradient(lambda x: jax.jit(jax.nn.softmax)(x) * 2)
    assert check(f, x, ct) == (1, 0)

    def layers(x, ct):
        def loss(x):
            return jax.lax.scan(lambda c, _: (jax.nn.softmax(c * 3), None), x, length=3)[0]

        return with_gradient(loss)(x, ct)

    assert called(layers, x, ct)[0] == 1


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (3, 1, 8), (1, 6, 8)])
def test_maxima_and_sums_of_different_axes(shape, dtype):
    """Also where one of the axes has size 1."""
    (x, _), axes = pair(dtype, shape), range(len(shape))
    for of_max, of_sum in itertools.product(axes, axes):

        def parts(x, of_max=of_max, of_sum=of_sum):
            e = jnp.exp(x - jnp.max(x, of_max, keepdims=True))
            return e, jnp.sum(e, of_sum, keepdims=True)

        compare(lambda x, parts=parts: jnp.divide(*parts(x)), x)
        compare(lambda x, parts=parts: jnp.log(parts(x)[1]), x)


@pytest.mark.usefixtures("native")
def test_what_is_no_softmax():
    """Each differs in one step, and stays with XLA."""
    x, _ = pair("bfloat16", (6, 6))

    def largest(x):
        return jnp.max(x, 1, keepdims=True)

    def total(e):
        return jnp.sum(e, 1, keepdims=True)

    def count(centre, divisor):
        def quotient(x):
            e = jnp.exp(x - centre(x))
            return e / divisor(e)

        return called(quotient, x)

    def finite(x):
        return jnp.where(jnp.isfinite(largest(x)), largest(x), 0)

    assert count(largest, total) == (1, 0)
    assert count(lambda x: jnp.max(x, 0), total) == (0, 0)
    assert count(lambda x: jnp.max(x, 1), total) == (0, 0)  # transposed
    assert count(lambda x: jnp.mean(x, 1, keepdims=True), total) == (0, 0)
    assert count(finite, total) == (0, 0)
    assert count(largest, lambda e: 2 * total(e)) == (0, 0)
    assert count(largest, lambda e: jnp.sum(e, 0)) == (0, 0)
    assert count(largest, lambda e: jnp.sum(e, 1)) == (0, 0)
    assert count(largest, largest) == (0, 0)
    assert count(largest, lambda e: total(e * e)) == (0, 0)
    for dtype in ("int32", "float8_e5m2"):  # which round more than to the dtype of rows
        assert count(largest, lambda e, d=dtype: total(e).astype(d).astype(e.dtype)) == (0, 0)
        assert count(largest, lambda e, d=dtype: total(e.astype(d)).astype(e.dtype)) == (0, 0)
    assert called(lambda x: jax.nn.softmax(x.astype(jnp.float32)), x) == (0, 0)
    assert called(lambda x: jax.nn.softmax(x, where=x > 0), x) == (0, 0)


@pytest.mark.usefixtures("native")
def test_products_that_are_no_gradient():
    """Each differs in one step from the gradient."""
    x, ct = pair("bfloat16", (6, 6))

    def gradient(x, ct, other=None, axis=1, sign=-1, power=2, factor=None, rounded=None, turn=0):
        e = jnp.exp(x - jnp.max(x, 1, keepdims=True))
        total = jnp.sum(e, 1, keepdims=True)
        inverse = jax.lax.integer_pow(total, -2) if power == 2 else 1 / total
        inverse = inverse.T if turn else inverse
        terms = (ct if other is None else other) * inverse * e
        terms = terms if rounded is None else terms.astype(rounded)
        inner = jnp.sum(terms, axis, keepdims=True).astype(x.dtype)
        rest = jnp.broadcast_to(-inner if sign < 0 else inner, e.shape)
        return (e if factor is None else factor) * (ct / total + rest)

    assert check(gradient, x, ct) == (1, 1)
    assert called(lambda x, ct: gradient(x, ct, other=x), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, axis=0), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, sign=1), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, power=1), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, factor=jnp.exp(x)), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, rounded="int32"), x, ct) == (0, 0)
    assert called(lambda x, ct: gradient(x, ct, turn=1), x, ct) == (0, 0)


@pytest.mark.usefixtures("native")
def test_sums_of_another_axis_in_a_gradient():
    """The squares are those of the sums of other rows."""
    x, ct = pair("bfloat16", (6, 6))

    def gradient(x, ct, axis):
        e = jnp.exp(x - jnp.max(x, 1, keepdims=True))
        total = jnp.sum(e, 1)
        inverse = jax.lax.broadcast_in_dim(jax.lax.integer_pow(total, -2), (6, 6), (axis,))
        rest = jnp.broadcast_to(-jnp.sum(ct * inverse * e, 1, keepdims=True), e.shape)
        return e * (ct / jax.lax.broadcast_in_dim(total, (6, 6), (0,)) + rest)

    assert called(lambda x, ct: gradient(x, ct, 0), x, ct) == (1, 1)
    assert called(lambda x, ct: gradient(x, ct, 1), x, ct) == (0, 0)


@pytest.mark.usefixtures("native")
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    axis=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_shape(shape, axis, dtype, seed):
    axis %= len(shape)
    rng = np.random.default_rng(seed)
    x, ct = (jnp.asarray(rng.normal(size=shape) * 4, dtype) for _ in range(2))
    check(with_gradient(lambda x: jax.nn.softmax(x, axis)), x, ct)


def test_programs_for_cpus_stay(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    shape = jax.ShapeDtypeStruct((4096, 1003), jnp.bfloat16)

    def operations(f):
        text = jax.jit(f).trace(shape).lower(lowering_platforms=("cpu",)).as_text()
        return text.count("stablehlo.")

    handles = 1  # of the maximum
    assert operations(jof.accelerate(jax.nn.softmax)) == operations(jax.nn.softmax) + handles


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_pay_only_together(dtype, monkeypatch):
    """The rule of the gradient replaces the softmax in what has read it, and in what will."""
    monkeypatch.setattr(common, "is_asked_for", lambda: False)
    monkeypatch.setattr(common, "may_change", lambda ctx, platform: True)
    monkeypatch.setattr(softmaxes.Softmax, "pays", lambda *_: None)
    decision = _policy.Decision(_policy.Call((), 0), "native", "as measured")
    monkeypatch.setattr(softmaxes.Gradient, "pays", lambda *_: decision)
    x, ct = pair(dtype)
    assert check(jax.nn.softmax, x) == (0, 0)

    def read(x, ct):
        y, pullback = jax.vjp(jax.nn.softmax, x)
        before = jnp.sin(y)
        (dx,) = pullback(ct)
        again = jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, y)
        return before, dx, again, *pullback(ct + 1)

    assert check(read, x, ct) == (1, 2)
    compiled = jax.jit(jof.accelerate(read)).lower(x, ct).compile().as_text()
    assert "exponential(" not in compiled  # XLA computes no softmax besides


@pytest.mark.usefixtures("measured")
def test_reports_count_the_time_of_a_softmax_once():
    def both(x, ct):
        y, pullback = jax.vjp(jax.nn.softmax, x)
        return y, *pullback(ct)

    x = jax.ShapeDtypeStruct((302592, 197), jnp.bfloat16)
    first, second = jof.explain(both, x, x, platform="NVIDIA H200").rows
    assert (first.operation, second.operation) == ("softmax", "softmax gradient")
    assert (first.bytes, second.bytes) == (2 * x.size * 2, 3 * x.size * 2)
    together, *_ = jof.policy(lambda x: jax.vjp(jof.softmax, x)[1](x), x, device="NVIDIA H200")
    for name in ("native_us", "xla_us"):
        total = getattr(first, name) + getattr(second, name)
        assert total == pytest.approx(getattr(together, name))


def attention_of(tokens, dtype="bfloat16", heads=6, batch=256):
    """Attention with dropout, which no kernel of cuDNN replaces."""
    q = jax.ShapeDtypeStruct((batch, tokens, heads, 64), dtype)

    kept = jax.ShapeDtypeStruct((batch, heads, tokens, tokens), bool)

    def gradients(q, k, kept):
        def loss(q, k):
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            weights = jnp.where(kept, weights, 0)
            return jnp.einsum("bhqk,bkhd->bqhd", weights, k).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(q, k)

    return gradients, q, q, kept


@pytest.fixture
def measured(monkeypatch):
    """The measurements that users have."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    found = json.loads(Path(_policy.__file__).with_name("policy.json").read_text())
    monkeypatch.setattr(_policy, "tables", lambda: found)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("dtype", DTYPES)
def test_vision_transformers_gain_by_default(dtype):
    """Rows of 197 tokens do not begin at multiples of 16 bytes."""
    step, *args = attention_of(197, dtype)
    rows = jof.explain(step, *args, platform="NVIDIA H200").rows
    swapped = [row.operation for row in rows if row.swapped]
    assert sorted(swapped) == ["softmax", "softmax gradient"]
    assert not [row for row in rows if not row.swapped and row.operation == "softmax"]
    assert all(row.native_us < row.xla_us for row in rows if row.swapped)


@pytest.mark.usefixtures("measured")
def test_by_default_rows_that_xla_does_not_store_stay():
    def masked(q, k, _):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jax.nn.softmax(jnp.where(logits > 0, logits, -jnp.inf))

    _, *args = attention_of(200)
    rows = jof.explain(masked, *args, platform="NVIDIA H200").rows
    assert [row.swapped for row in rows if row.operation == "softmax"] == [False]

    step, *args = attention_of(5, batch=1)  # few
    assert not any(row.swapped for row in jof.explain(step, *args, platform="NVIDIA H200").rows)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_several_devices(kind):
    """Kernels run in a shard_map, and where the partitioner shards rows."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("x",), types, devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    x, ct = (jax.device_put(a, sharding) for a in pair("bfloat16", (6, 37)))
    f = with_gradient(jax.nn.softmax)
    compare(f, x, ct, ulps=4)
    program = jax.jit(jof.accelerate(lambda *args: f(*args))).lower(x, ct).compile()
    assert [program.as_text().count(f'target="{x}"') for x in (FORWARD, GRADIENT)] == [1, 1]
    assert "all-gather" not in program.as_text()
    assert all(y.sharding.is_equivalent_to(sharding, 2) for y in program(x, ct))
    specs = {"in_specs": (jax.P("x"), jax.P("x")), "out_specs": (jax.P("x"), jax.P("x"))}
    assert check(jax.shard_map(f, mesh=mesh, **specs), x, ct) == (1, 1)
