"""Gradients of pooling inside `accelerate`: which are swapped, and that results agree."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_oneflow_ops as jof
from tests.arrays import rng_for
from tests.test_lowering import accelerated, native_backend

pytestmark = [native_backend, pytest.mark.usefixtures("kernels_of_gpus")]


def pool(x, sizes, strides, padding="VALID", of_minima=False):
    start, function = (jnp.inf, lax.min) if of_minima else (-jnp.inf, lax.max)
    return lax.reduce_window(x, np.asarray(start, x.dtype), function, sizes, strides, padding)


def gradient(*args, **how):
    """The function (x, ct) -> the value and the gradient."""

    def value_and_gradient(x, ct):
        y, vjp = jax.vjp(lambda x: pool(x, *args, **how), x)
        return y, *vjp(ct)

    return value_and_gradient


def count(f, *args, platform=None) -> int:
    """How many gradients are left to XLA in the lowered program."""
    return accelerated(f, *args, platform=platform).count("stablehlo.select_and_scatter")


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
    for y in (got, as_jax):  # XLA adds 16-bit values in 16 bits
        terms = 2 if y is got else 2 * np.prod(sizes)
        assert np.abs(np.asarray(y, np.float64) - wanted).max(initial=0) <= terms * eps * scale


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_images(dtype):
    rng = rng_for(dtype)
    x = jnp.asarray(rng.normal(size=(2, 9, 12, 5)), dtype)
    check(x, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4)
    check(x, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0)))
    check(x, (1, 3, 3, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


@pytest.mark.usefixtures("native")
def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(rng_for("float64").normal(size=(2, 9, 12)))
        check(x, (1, 3, 2), (1, 2, 3), ((0, 0), (2, 0), (0, 1)))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("native")
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
    return accelerated(f, *args, platform=platform).count("stablehlo.reduce_window")


@pytest.mark.usefixtures("native")
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
    assert count_sums(f, x, ct) == (max(strides) == 1)
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
    assert (row.operation, row.swapped) == ("window sum", True)
    assert row.shapes == ((2, 9, 9, 4), (2, 4, 4, 4))


SPREAD = [(0, 0, 0), (1, 1, 1), (0, 0, 0)]
SUMS = {  # zeros between elements, the padding value, the window, strides, padding, dilation
    "of ones": (SPREAD, 1, 2, 1, (0, 0), 1),
    "with strides": (SPREAD, 0, 2, 2, (0, 0), 1),
    "of padding": (SPREAD, 0, 2, 1, (1, 0), 1),
    "of dilated windows": (SPREAD, 0, 2, 1, (0, 0), 2),
    "of many zeros": ([(0, 0, 0), (5, 1, 1), (0, 0, 0)], 0, 2, 1, (0, 0), 1),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("which", SUMS)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sums_that_are_left_to_xla(which, dtype):
    spread, fill, size, stride, padding, dilation = SUMS[which]

    def f(x):
        x = lax.pad(x, np.asarray(fill, x.dtype), spread)
        return lax.reduce_window(
            *(x, np.zeros((), x.dtype), lax.add, (1, size, 1), (1, stride, 1)),
            ((0, 0), padding, (0, 0)),
            window_dilation=(1, dilation, 1),
        )

    x = jnp.arange(32, dtype=dtype).reshape(2, 4, 4)
    assert count_sums(f, x) == 1
    np.testing.assert_array_equal(jax.jit(jof.accelerate(f))(x), f(x))


@pytest.mark.usefixtures("native")
def test_integers_are_left_to_xla():
    def f(x):
        return sums(lax.pad(x, np.zeros((), x.dtype), SPREAD), (1, 2, 1), (1, 1, 1))

    assert [count_sums(f, *arrays((2, 4, 4), dtype=d)) for d in ("int32", "float32")] == [1, 0]


@pytest.mark.usefixtures("native")
def test_sixteen_bits_are_summed_in_float32():
    """One element gets 256 and some ones. In bfloat16, 256 + 1 is 256.

    XLA may leave out a rounding between additions, so the program is read, too.
    """
    x, ct = arrays((2, 12, 12, 4), (2, 5, 5, 4))
    window = (1, 3, 3, 1), (1, 2, 2, 1)
    for f in (gradient(*window), gradient_of_sums(*window)):
        additions = re.findall(r"stablehlo\.add .*x(\w+)>", accelerated(f, x, ct))
        assert {*additions} - {"i32"} == {"f32"}
    x = jnp.zeros((1, 7), "bfloat16").at[0, 3].set(1)
    x = jnp.broadcast_to(x, (4, 7))
    ct = jnp.ones((1, 4), "bfloat16").at[0, 0].set(256)
    of_maxima = jax.jit(jof.accelerate(gradient((4, 4), (1, 1))))(x, ct)[1]
    assert float(of_maxima[0, 3]) == 256 + 4  # 259, rounded
    f = jof.accelerate(gradient_of_sums((1, 6), (1, 2)))
    ct = jnp.ones((1, 3), "bfloat16").at[0, 0].set(256)
    assert float(jax.jit(f)(jnp.zeros((1, 10), "bfloat16"), ct)[0, 4]) == 258


@pytest.mark.usefixtures("native")
def test_modes_of_promotion():
    x, ct = (jnp.ones(shape, "bfloat16") for shape in ((2, 8, 8, 4), (2, 4, 4, 4)))
    for f in (gradient(*WINDOW), gradient_of_sums(*WINDOW)):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            got = jax.jit(jof.accelerate(f))(x, ct)
        jax.tree.map(np.testing.assert_array_equal, got, f(x, ct))


@pytest.mark.usefixtures("native")
def test_64_bits_where_they_are_not_enabled():
    with jax.enable_x64(True):
        x = jnp.asarray(rng_for("64").normal(size=(2, 8, 8, 4)))
        ct = jnp.asarray(rng_for("ct").normal(size=(2, 4, 4, 4)))
        wanted = gradient(*WINDOW)(x, ct)
    got = jax.jit(jof.accelerate(gradient(*WINDOW)))(x, ct)
    for y, z in zip(got, wanted, strict=True):
        assert y.dtype == z.dtype == np.float64
        np.testing.assert_array_equal(y, z)


WINDOW = ((1, 2, 2, 1), (1, 2, 2, 1))


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("size", "stride", "on_cuda", "on_cpu"),
    [(2, 2, 0, 0), (3, 2, 0, 0), (3, 1, 0, 1), (4, 2, 0, 1), (5, 1, 0, 1), (6, 1, 1, 1)],
)
def test_which_are_swapped(size, stride, on_cuda, on_cpu):
    """How many gradients are left to XLA."""
    n = (12 - size) // stride + 1
    x, ct = arrays((2, 12, 12, 4), (2, n, n, 4))
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    f = gradient(window, strides)
    assert [count(f, x, ct, platform=p) for p in ("cuda", "cpu")] == [on_cuda, on_cpu]
    if stride > 1:
        f = gradient_of_sums(window, strides)
        assert [count_sums(f, x, ct, platform=p) for p in ("cuda", "cpu")] == [on_cuda, on_cpu]


@pytest.mark.usefixtures("native")
def test_what_is_left_to_xla():
    x, ct = arrays((1, 32, 32, 1), (1, 16, 16, 1))
    assert count(gradient((1, 17, 17, 1), (1, 1, 1, 1)), x, ct) == 1  # so many elements
    x, ct = arrays((2, 8, 8, 4), (2, 4, 4, 4))
    how = {"window_dimensions": WINDOW[0], "window_strides": WINDOW[1], "padding": ((0, 0),) * 4}
    for select, left in ((lax.ge_p, 0), (lax.le_p, 0), (lax.gt_p, 1)):
        of_pool = functools.partial(lax.select_and_scatter_add_p.bind, select_prim=select, **how)
        assert count(of_pool, ct, x) == left
    x, ct = arrays((0, 8, 8, 4), (0, 4, 4, 4))
    assert count(gradient(*WINDOW), x, ct) == 1
    with jof.accelerate(False):
        x, ct = arrays((1, 8, 8, 4), (1, 4, 4, 4))
        assert "select_and_scatter" in jax.jit(gradient(*WINDOW)).lower(x, ct).as_text()


@pytest.mark.usefixtures("native")
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
        assert count(f, x) == 0
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
        assert count(g, *sharded) == 0
        compiled = jax.jit(jof.accelerate(g)).lower(*sharded).compile().as_text()
    assert "all-gather" not in compiled
    for y, z in itertools.zip_longest(got, wanted):
        np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)
