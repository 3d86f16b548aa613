"""Gradients of maximum pooling inside `accelerate`: which are swapped, and that results agree."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_oneflow_ops as jof
from tests.arrays import rng_for
from tests.test_lowering import native_backend

pytestmark = native_backend


def pool(x, sizes, strides, padding="VALID", of_minima=False):
    start, function = (jnp.inf, lax.min) if of_minima else (-jnp.inf, lax.max)
    return lax.reduce_window(x, np.asarray(start, x.dtype), function, sizes, strides, padding)


def gradient(*args, **how):
    """The function (x, ct) -> the value and the gradient."""

    def value_and_gradient(x, ct):
        y, vjp = jax.vjp(lambda x: pool(x, *args, **how), x)
        return y, *vjp(ct)

    return value_and_gradient


def lowered(f, *args, platform=None) -> str:
    platforms = None if platform is None else (platform,)
    traced = jax.jit(jof.accelerate(lambda *args: f(*args))).trace(*args)
    return traced.lower(lowering_platforms=platforms).as_text()


def count(f, *args, platform=None) -> int:
    """How many gradients are left to XLA in the lowered program."""
    return lowered(f, *args, platform=platform).count("stablehlo.select_and_scatter")


def exact(x, ct, sizes, strides, padding, of_minima=False):
    """The gradient by its definition, window by window."""
    x = np.asarray(-x if of_minima else x, np.float64)
    padded = np.pad(x, padding, constant_values=-np.inf)
    result = np.zeros(padded.shape)
    for window in np.ndindex(*ct.shape):
        best = None
        for place in np.ndindex(*sizes):
            at = tuple(w * s + i for w, s, i in zip(window, strides, place, strict=True))
            if best is None or not padded[best] >= padded[at]:
                best = at
        result[best] += ct[window]
    lows = [low for low, _ in padding]
    return result[tuple(slice(low, low + n) for low, n in zip(lows, x.shape, strict=True))]


def check(x, sizes, strides, padding, of_minima=False):
    f = gradient(sizes, strides, padding, of_minima=of_minima)
    shape = jax.eval_shape(lambda x: pool(x, sizes, strides, padding), x).shape
    rng = rng_for("ct", shape)
    ct = jnp.asarray(rng.normal(size=shape), x.dtype)
    assert count(f, x, ct) == 0
    value, got = jax.jit(jof.accelerate(f))(x, ct)
    plain, as_jax = jax.jit(f)(x, ct)
    np.testing.assert_array_equal(*(np.asarray(y, np.float64) for y in (value, plain)))
    wanted = exact(x, np.asarray(ct, np.float64), sizes, strides, padding, of_minima)
    assert got.dtype == x.dtype
    eps = float(jnp.finfo(x.dtype).eps)
    scale = np.abs(wanted).max(initial=1) + np.abs(np.asarray(ct, np.float64)).max(initial=1)
    assert np.abs(np.asarray(got, np.float64) - wanted).max(initial=0) <= 2 * eps * scale
    assert (np.equal(got, 0) == np.equal(as_jax, 0)).mean() > 0.99  # sums may cancel


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_images(dtype):
    rng = rng_for(dtype)
    x = jnp.asarray(rng.normal(size=(2, 9, 12, 5)), dtype)
    check(x, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4)
    check(x, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0)))
    check(x, (1, 3, 3, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(rng_for("float64").normal(size=(2, 9, 12)))
        check(x, (1, 3, 2), (1, 2, 3), ((0, 0), (2, 0), (0, 1)))


@given(data=st.data(), rank=st.integers(1, 4), of_minima=st.booleans())
def test_any_windows(data, rank, of_minima):
    draw = data.draw
    sizes = [draw(st.integers(1, 3)) for _ in range(rank)]
    strides = [draw(st.integers(1, 4)) for _ in range(rank)]
    padding = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(rank)]
    shape = [draw(st.integers(size, 7)) for size in sizes]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.integers(-3, 4, size=shape).astype(np.float32)  # some elements are equal
    for special in (np.nan, -np.inf, np.inf):
        x[rng.random(shape) < draw(st.sampled_from([0, 0.1]))] = special
    check(jnp.asarray(x), (*sizes,), (*strides,), (*padding,), of_minima)


def sums(x, sizes, strides, padding="VALID"):
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, sizes, strides, padding)


def gradient_of_sums(*args):
    return lambda x, ct: jax.vjp(lambda x: sums(x, *args), x)[1](ct)[0]


def count_sums(f, *args, platform=None):
    return lowered(f, *args, platform=platform).count("stablehlo.reduce_window")


@given(data=st.data(), rank=st.integers(1, 4), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_gradients_of_any_sums(data, rank, dtype):
    draw = data.draw
    sizes = [draw(st.integers(1, 3)) for _ in range(rank)]
    strides = [draw(st.integers(1, 4)) for _ in range(rank)]
    padding = [(draw(st.integers(0, k - 1)), draw(st.integers(0, 3))) for k in sizes]
    shape = [draw(st.integers(size, 7)) for size in sizes]
    x = jnp.zeros(shape, dtype)
    f = gradient_of_sums(sizes, strides, padding)
    windows = jax.eval_shape(lambda x: sums(x, sizes, strides, padding), x).shape
    ct = jnp.asarray(np.random.default_rng(draw(st.integers(0, 99))).normal(size=windows), dtype)
    got = jax.jit(jof.accelerate(f))(x, ct)
    padded = np.zeros([n + low + high for n, (low, high) in zip(shape, padding, strict=True)])
    for window in np.ndindex(*windows):
        at = tuple(slice(w * s, w * s + k) for w, s, k in zip(window, strides, sizes, strict=True))
        padded[at] += float(ct[window])
    wanted = padded[tuple(slice(low, low + n) for n, (low, _) in zip(shape, padding, strict=True))]
    assert got.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=eps, atol=8 * eps)


def test_which_sums_are_swapped():
    x, ct = arrays((2, 9, 9, 4), (2, 4, 4, 4))
    for platform in ("cpu", "cuda"):
        f = gradient_of_sums((1, 3, 3, 1), (1, 2, 2, 1))
        assert count_sums(f, x, ct, platform=platform) == 0
        assert count_sums(lambda x: sums(x, *WINDOW), x, platform=platform) == 1
    [row] = jof.explain(f, x, ct).rows
    assert (row.operation, row.swapped) == ("window sum gradient", True)
    assert row.shapes == ((2, 9, 9, 4), (2, 4, 4, 4))
    x, ct = arrays((1, 34, 34, 1), (1, 13, 13, 1))
    f = gradient_of_sums((1, 9, 9, 1), (1, 2, 2, 1))
    assert count_sums(f, x, ct) == 1  # so many elements

    def of_ones(ct):  # these are no zeros
        spread = lax.pad(ct, np.ones((), ct.dtype), [(0, 0, 0), (1, 1, 1), (0, 0, 0)])
        return sums(spread, (1, 2, 1), (1, 1, 1))

    assert count_sums(of_ones, *arrays((2, 4, 4))) == 1


WINDOW = ((1, 2, 2, 1), (1, 2, 2, 1))


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_it_runs_by_default(platform):
    x, ct = arrays((2, 8, 8, 4), (2, 4, 4, 4))
    assert count(gradient(*WINDOW), x, ct, platform=platform) == 0


def test_what_is_left_to_xla():
    x, ct = arrays((1, 32, 32, 1), (1, 24, 24, 1))
    assert count(gradient((1, 9, 9, 1), (1, 1, 1, 1)), x, ct) == 1  # so many elements
    x, ct = arrays((0, 8, 8, 4), (0, 4, 4, 4))
    assert count(gradient(*WINDOW), x, ct) == 1
    with jof.accelerate(False):
        x, ct = arrays((1, 8, 8, 4), (1, 4, 4, 4))
        assert "select_and_scatter" in jax.jit(gradient(*WINDOW)).lower(x, ct).as_text()


def test_transformations():
    x = jnp.asarray(rng_for("transformations").normal(size=(3, 6, 6, 4)), "float32")

    def loss(x):
        def layer(total, scale):
            y = pool(jnp.sin(x * scale), (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            return total + jnp.sum(y**3), None

        return lax.scan(jax.checkpoint(layer), 0.0, jnp.arange(1.0, 3.0))[0]

    def per_image(x):
        return jax.vmap(jax.grad(lambda x: loss(x[None])))(x)

    for f in (jax.grad(loss), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)), per_image):
        got, wanted = jax.jit(jof.accelerate(f))(x), f(x)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_explain():
    x, ct = arrays((2, 8, 8, 4), (2, 4, 4, 4))
    [row] = jof.explain(gradient(*WINDOW), x, ct).rows
    assert (row.operation, row.swapped) == ("max pool gradient", True)
    assert row.shapes == ((2, 8, 8, 4), (2, 4, 4, 4))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_several_devices(kind):
    axis_type = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    mesh = jax.make_mesh((2,), ("d",), (axis_type[kind],), devices=jax.devices()[:2])
    rng = rng_for("devices")
    args = [jnp.asarray(rng.normal(size=(4, n, n, 4)), "float32") for n in (8, 4)]
    g = gradient(*WINDOW)
    wanted = g(*args)
    sharded = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("d"))) for x in args]
    with jax.set_mesh(mesh):
        got = jax.jit(jof.accelerate(g))(*sharded)
        assert count(g, *sharded) == (0 if kind == "auto" else 1)
    for y, z in itertools.zip_longest(got, wanted):
        np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)
