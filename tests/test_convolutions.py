"""Convolutions inside `accelerate`: which are computed in another way, and that results agree."""

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


IMAGES = (0, 3, 1, 2)
NHWC = lax.ConvDimensionNumbers(IMAGES, (3, 2, 0, 1), IMAGES)


def patches(x, w, numbers=NHWC, **how):
    """One window after the other; elements after the last window are dropped."""
    window = [w.shape[i] for i in numbers.rhs_spec[2:]]
    return lax.conv_general_dilated(x, w, window, "VALID", dimension_numbers=numbers, **how)


def enlarged(x, w, numbers=NHWC, **how):
    window = [w.shape[i] for i in numbers.rhs_spec[2:]]
    return lax.conv_transpose(x, w, window, "SAME", dimension_numbers=numbers, **how)


def gradients(f):
    """The result of f(x, w), and the cotangents of both for a cotangent of the result."""

    def value_and_gradients(x, w, ct):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(ct)

    return value_and_gradients


def count(f, *args, platform=None) -> int:
    """How many convolutions are left in the lowered program."""
    return accelerated(f, *args, platform=platform).count("stablehlo.convolution")


def exact_patches(x, w, ct):
    """The three results by their definition, window by window, for x (N, ..., C)."""
    window = w.shape[:-2]
    y, of_x, of_w = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for block in np.ndindex(*ct.shape[1:-1]):
        place = tuple(slice(b * k, (b + 1) * k) for b, k in zip(block, window, strict=True))
        at, to = (slice(None), *place), (slice(None), *block)
        y[to] = np.tensordot(x[at], w, w.ndim - 1)
        of_x[at] = np.tensordot(ct[to], w, ((1,), (w.ndim - 1,)))
        of_w += np.tensordot(x[at], ct[to], ((0,), (0,)))
    return y, of_x, of_w


def exact_enlarged(x, w, ct):
    """The same for a transposed convolution. lax.conv_transpose does not reverse the window."""
    window, spatial = w.shape[:-2], [*range(w.ndim - 2)]
    w = np.flip(w, spatial)
    y, of_x, of_w = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for block in np.ndindex(*x.shape[1:-1]):
        place = tuple(slice(b * k, (b + 1) * k) for b, k in zip(block, window, strict=True))
        at, to = (slice(None), *block), (slice(None), *place)
        y[to] = np.tensordot(x[at], w, ((1,), (w.ndim - 2,)))
        of_x[at] = np.tensordot(ct[to], w, ([*range(1, ct.ndim)], [*spatial, w.ndim - 1]))
        of_w += np.moveaxis(np.tensordot(x[at], ct[to], ((0,), (0,))), 0, -2)
    return y, of_x, np.flip(of_w, spatial)


BOTH = {"patches": (patches, exact_patches), "enlarged": (enlarged, exact_enlarged)}


def check(name, dtype, x_shape, w_shape, lhs, rhs, out):
    """Compares value and gradients with float64, in the orders of axes of three permutations."""
    rng = rng_for(name, dtype, x_shape, w_shape)
    f, exact = BOTH[name]
    numbers = lax.ConvDimensionNumbers(
        *(_spec(order, last) for order, last in ((lhs, -1), (rhs, -2), (out, -1)))
    )
    x, w = (
        jnp.asarray(rng.normal(size=shape), dtype).transpose(order)
        for shape, order in ((x_shape, lhs), (w_shape, rhs))
    )
    g = gradients(lambda x, w: f(x, w, numbers=numbers))
    result = jax.eval_shape(lambda x, w: f(x, w, numbers=numbers), x, w)
    ct = jnp.asarray(rng.normal(size=result.shape), dtype)
    assert count(g, x, w, ct) == 0
    got = jax.jit(jof.accelerate(g))(x, w, ct)
    plain = (
        np.transpose(np.asarray(a, np.float64), np.argsort(p)) for a, p in ((x, lhs), (w, rhs))
    )
    wanted = exact(*plain, np.transpose(np.asarray(ct, np.float64), np.argsort(out)))
    for y, z, order in zip(got, wanted, (out, lhs, rhs), strict=True):
        z = z.transpose(order)
        assert y.dtype == dtype
        assert y.shape == z.shape
        eps = 2 * float(jnp.finfo(dtype).eps) + 2**-18
        if jax.default_backend() == "gpu" and dtype == "float32":
            eps += 2**-8  # factors are rounded to TensorFloat-32
        assert np.abs(np.asarray(y, np.float64) - z).max() <= eps * max(1, np.abs(z).max())


def _spec(order, last):
    """The places of an array's axes: the first two of a specification, then spatial ones.

    `order` permutes an array whose last axis has channels: images (N, ..., C) and kernels
    (..., C, O), whose specifications begin with N, C and O, C.
    """
    places = [order.index(axis) for axis in range(len(order))]
    if last == -1:
        return (places[0], places[-1], *places[1:-1])
    return (places[-1], places[-2], *places[:-2])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_images(name, dtype):
    order = (0, 1, 2, 3)
    check(name, dtype, (2, 8, 12, 3), (4, 4, 3, 5), order, order, order)


@pytest.mark.usefixtures("native")
@given(data=st.data(), name=st.sampled_from([*BOTH]), rank=st.integers(1, 3))
def test_any_sizes_and_orders(data, name, rank):
    sizes = st.lists(st.integers(1, 4), min_size=rank, max_size=rank)
    window = data.draw(sizes.filter(lambda sizes: max(sizes) > 1))
    blocks = data.draw(sizes)
    image = blocks
    if name == "patches":  # with elements after the last window
        more = [data.draw(st.integers(0, k - 1)) for k in window]
        image = [b * k + m for b, k, m in zip(blocks, window, more, strict=True)]
    n, c, o = (data.draw(st.integers(1, 5)) for _ in range(3))
    orders = [tuple(data.draw(st.permutations(range(rank + 2)))) for _ in range(3)]
    check(name, "float32", (n, *image, c), (*window, c, o), *orders)


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("name", "channels", "on_cuda", "on_cpu"),
    [
        # convolutions left: of the value, the gradient to the image, and that to the kernel
        ("patches", 3, 0, 1),
        ("patches", 16, 1, 1),
        ("patches", 64, 3, 1),
        ("enlarged", 3, 0, 1),
        ("enlarged", 64, 1, 1),
    ],
)
def test_which_are_swapped(name, channels, on_cuda, on_cpu):
    f, _ = BOTH[name]
    few = {"patches": (channels, 96), "enlarged": (96, channels)}[name]
    x, w = arrays((2, 32, 32, few[0]), (2, 2, *few))
    ct = jax.eval_shape(f, x, w)
    g = gradients(f)
    for platform, left in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert count(g, x, w, ct, platform=platform) == left


LEFT = {
    "overlap": ((1, 8, 8, 3), (3, 3, 3, 4), {"window_strides": (2, 2)}),
    "gaps": ((1, 8, 8, 3), (2, 2, 3, 4), {"window_strides": (3, 3)}),
    "padding": ((1, 8, 8, 3), (2, 2, 3, 4), {"window_strides": (2, 2), "padding": "SAME_LOWER"}),
    "one element": ((1, 8, 8, 3), (1, 1, 3, 4), {"window_strides": (1, 1)}),
    "dilation": (
        *((1, 8, 8, 3), (2, 2, 3, 4)),
        {"window_strides": (2, 2), "rhs_dilation": (2, 2)},
    ),
    "groups": (
        *((1, 8, 8, 4), (2, 2, 2, 4)),
        {"window_strides": (2, 2), "feature_group_count": 2},
    ),
    "precision": (
        *((1, 8, 8, 3), (2, 2, 3, 4)),
        {"window_strides": (2, 2), "precision": "highest"},
    ),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_to_xla(why):
    x_shape, w_shape, how = LEFT[why]
    if why == "padding":
        x_shape = (1, 7, 7, 3)
    how = {"padding": "VALID", **how}
    x, w = arrays(x_shape, w_shape, dtype="float32")

    def convolution(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=NHWC, **how)

    assert count(convolution, x, w) == 1


@pytest.mark.usefixtures("native")
def test_dtypes_that_are_left_to_xla():
    with jax.enable_x64(True):
        x, w = arrays((1, 8, 8, 3), (2, 2, 3, 4), dtype="float64")
        assert count(lambda x, w: patches(x, w), x, w) == 1


ORDERS = (("NHC", "HIO", "NHC"), ("NCH", "OIH", "NCH"), ("HNC", "IOH", "NHC"))


def depthwise(numbers, channels, **how):
    return lambda x, w: lax.conv_general_dilated(
        x, w, dimension_numbers=numbers, feature_group_count=channels, **how
    )


def exact_depthwise(x, w, ct, stride, apart, low):
    """The three results for x (N, H, C), w (K, C) and ct (N, windows, C), element by element."""
    y, of_x, of_w = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for window, k in np.ndindex(ct.shape[1], len(w)):
        at = window * stride + k * apart - low
        if 0 <= at < x.shape[1]:
            y[:, window] += x[:, at] * w[k]
            of_x[:, at] += ct[:, window] * w[k]
            of_w[k] += (x[:, at] * ct[:, window]).sum(0)
    return y, of_x, of_w


@pytest.mark.usefixtures("native")
@given(
    sizes=st.tuples(*[st.integers(2, 5)] * 2, st.integers(1, 9), st.integers(1, 4)),
    stride=st.integers(1, 3),
    apart=st.integers(1, 2),
    padding=st.tuples(st.integers(-2, 4), st.integers(-2, 4)),
    order=st.sampled_from(ORDERS),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_depthwise_along_one_axis(sizes, stride, apart, padding, order, dtype):
    n, c, h, k = sizes
    low, high = padding
    windows = (h + low + high - (k - 1) * apart - 1) // stride + 1
    if windows < 1:
        return
    rng = rng_for(sizes, stride, apart, padding, order, dtype)
    x, w, ct = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((n, h, c), (k, 1, c), (n, windows, c))
    )
    places = [
        [plain.index(name) for name in spec]
        for plain, spec in zip(("NHC", "HIO", "NHC"), order, strict=True)
    ]
    args = [y.transpose(p) for y, p in zip((x, w, ct), places, strict=True)]
    how = {"window_strides": (stride,), "padding": [padding], "rhs_dilation": (apart,)}
    g = gradients(depthwise(order, c, **how))
    # The gradient to the array of a convolution with a stride is left to XLA.
    assert count(g, *args) == (stride > 1)
    wanted = exact_depthwise(
        *(np.asarray(y, np.float64) for y in (x, w[:, 0], ct)), stride, apart, low
    )
    wanted = wanted[0], wanted[1], wanted[2][:, None]
    eps = 2 * float(jnp.finfo(dtype).eps) + 2**-18
    if stride > 1 and jax.default_backend() == "gpu":
        eps += 2**-8  # XLA may round to TensorFloat-32
    orders = places[2], places[0], places[1]
    for y, z, p in zip(jax.jit(jof.accelerate(g))(*args), wanted, orders, strict=True):
        assert y.dtype == dtype
        error = np.abs(np.asarray(y, np.float64) - z.transpose(p))
        assert error.max(initial=0) <= eps * max(1, np.abs(z).max())


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_which_depthwise_convolutions_are_swapped(platform):
    def left(c, shape, window, multiplier=1, groups=None):
        spatial = "HW"[: len(window)]
        numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        groups = groups or c
        x, w = arrays((2, *shape, c), (*window, c // groups, c * multiplier))
        f = depthwise(numbers, groups, window_strides=(1,) * len(window), padding="SAME")
        return count(f, x, w, platform=platform)

    assert left(8, (16,), (4,)) == 0
    assert left(7, (16,), (4,)) == 0
    assert left(8, (64,), (33,)) == 1  # so many elements
    assert left(8, (16, 16), (3, 3)) == 1
    assert left(8, (16,), (4,), multiplier=2) == 1
    assert left(8, (16,), (4,), groups=4) == 1


@pytest.mark.parametrize(("channels", "on_cuda", "on_cpu"), [(7, 1, 1), (33, 1, 0), (34, 0, 0)])
def test_gradients_to_depthwise_kernels(channels, on_cuda, on_cpu):
    x, w, ct = arrays((2, 16, channels), (4, 1, channels), (2, 13, channels))
    f = depthwise(ORDERS[0], channels, window_strides=(1,), padding="VALID")
    for platform, left in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert count(gradients(f), x, w, ct, platform=platform) == left


@pytest.mark.usefixtures("native")
def test_transformations():
    rng = rng_for("transformations")
    x, w = (jnp.asarray(rng.normal(size=s), "float32") for s in ((3, 2, 8, 8, 3), (2, 2, 3, 4)))

    def loss(w, x):
        def layer(total, x):
            y = jnp.sin(patches(x, w))
            return total + jnp.sum(enlarged(y, w.swapaxes(2, 3)) ** 2), None

        return lax.scan(jax.checkpoint(layer), 0.0, x)[0]

    def per_image(w, x):
        return jax.vmap(jax.grad(lambda w, x: loss(w, x[None])), (None, 0))(w, x)

    for f in (jax.grad(loss), jax.jacfwd(jax.grad(loss)), per_image):
        # Under vmap, the gradients to the kernel have groups.
        assert count(f, w, x) == (2 if f is per_image else 0)
        got, wanted = jax.jit(jof.accelerate(f))(w, x), f(w, x)
        tolerance = 1e-2 if jax.default_backend() == "gpu" else 1e-4
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.usefixtures("native")
def test_wider_results_and_explain():
    rng = rng_for("explain")
    x, w = (jnp.asarray(rng.normal(size=s), "bfloat16") for s in ((2, 8, 8, 3), (4, 4, 3, 5)))

    def f(x, w):
        return patches(x, w, preferred_element_type=jnp.float32)

    got = jax.jit(jof.accelerate(f))(x, w)
    assert got.dtype == jnp.float32
    exact, *_ = exact_patches(*(np.asarray(a, np.float64) for a in (x, w)), np.zeros((2, 2, 2, 5)))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    [row] = jof.explain(f, x, w).rows
    assert (row.operation, row.swapped) == ("convolution", True)
    assert row.shapes == ((2, 2, 2, 5), (2, 8, 8, 3))
    assert "matrix product" in row.reason


@pytest.mark.parametrize("name", ["patches", "depthwise"])
def test_sums_are_in_float32(name):
    """256 and three ones: in bfloat16, 256 + 1 is 256.

    XLA may leave out a rounding between additions, so the program is read, too.
    """
    x = jnp.ones((1, 8, 1), "bfloat16")
    if name == "depthwise":
        f = depthwise(ORDERS[0], 2, window_strides=(1,), padding="VALID")
        x, w = jnp.ones((1, 8, 2), "bfloat16"), jnp.ones((4, 1, 2), "bfloat16").at[0].set(256)
        [y] = jax.jit(jof.accelerate(f))(x, w)[:, 0]
        found = re.findall(r"stablehlo\.(?:add|multiply) .*x(\w+)>", accelerated(f, x, w))
        assert {*found} == {"f32"}
    else:
        numbers = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
        f = gradients(lambda x, w: patches(x, w, numbers))
        ct = jnp.ones((1, 4, 1), "bfloat16").at[0, 0].set(256)
        y = jax.jit(jof.accelerate(f))(x, jnp.ones((2, 1, 1), "bfloat16"), ct)[2][0]
    assert float(y[0] if y.ndim == 1 else y[0, 0]) == 260  # 259, rounded


ALL = {
    "patches": (patches, (2, 8, 8, 3), (4, 4, 3, 5)),
    "enlarged": (enlarged, (2, 4, 4, 5), (2, 2, 5, 3)),
    "depthwise": (
        *(depthwise(ORDERS[0], 4, window_strides=(1,), padding="SAME"), (2, 8, 4), (3, 1, 4)),
    ),
}


def normal(*shapes, dtype="float32"):
    rng = rng_for(shapes, dtype)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ALL)
def test_modes_of_promotion(name):
    f, *shapes = ALL[name]
    x, w = normal(*shapes, dtype="bfloat16")
    g = gradients(f)
    ct = jnp.ones(jax.eval_shape(f, x, w).shape, x.dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = jax.jit(jof.accelerate(g))(x, w, ct)
    for y, z in zip(got, g(x, w, ct), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (y, z)), 0.02, 0.02)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["patches", "enlarged"])
def test_algorithms_of_products(name):
    f, *shapes = ALL[name]
    x, w = normal(*shapes, dtype="bfloat16")
    assert count(lambda x, w: f(x, w, precision="F16_F16_F16"), x, w) == 1
    assert count(lambda x, w: f(x, w, precision="highest"), x, w) == 0
    with jax.default_matmul_precision("TF32_TF32_F32"):
        jax.jit(jof.accelerate(lambda x, w: f(x, w))).lower(x, w)
    traced = jax.jit(jof.accelerate(lambda x, w: f(x, w))).trace(x, w)
    with jax.default_matmul_precision("highest"):  # after the program is traced
        assert "HIGHEST" not in traced.lower().as_text()


@pytest.mark.usefixtures("native")
def test_wider_results_of_depthwise_convolutions():
    with jax.enable_x64(True):
        _, *shapes = ALL["depthwise"]
        x, w = normal(*shapes)
        how = {"window_strides": (1,), "padding": "SAME", "preferred_element_type": jnp.float64}
        got = jax.jit(jof.accelerate(depthwise(ORDERS[0], 4, **how)))(x, w)
        wide = depthwise(ORDERS[0], 4, window_strides=(1,), padding="SAME")
        wanted = wide(x.astype(jnp.float64), w.astype(jnp.float64))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export_and_order_in_memory(name, platform):
    f, *shapes = ALL[name]
    x, w = normal(*shapes)
    program = jax.jit(jof.accelerate(lambda x, w: f(x, w)))
    exported = jax.export.export(
        program, platforms=[platform], disabled_checks=jof.export_checks()
    )(x, w)
    is_swapped = "stablehlo.convolution" not in exported.mlir_module()
    assert is_swapped == (platform == "cuda" or name != "patches")
    assert ("LayoutConstraint" in exported.mlir_module()) == (platform == "cuda")
    if jax.default_backend() == {"cuda": "gpu"}.get(platform, platform):
        restored = jax.export.deserialize(exported.serialize())
        tolerance = 2e-2 if platform == "cuda" else 1e-5
        np.testing.assert_allclose(restored.call(x, w), f(x, w), tolerance, tolerance)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", ALL)
def test_batches_over_devices_are_not_gathered(name):
    f, *shapes = ALL[name]
    x, w = normal(*shapes)
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
    compiled = jax.jit(jof.accelerate(lambda x, w: f(x, w))).lower(x, w).compile()
    assert "all-gather" not in compiled.as_text()


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_several_devices(kind):
    axis_type = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    mesh = jax.make_mesh((2,), ("d",), (axis_type[kind],), devices=jax.devices()[:2])
    rng = rng_for("devices")
    shapes = (4, 8, 8, 3), (2, 2, 3, 4), (4, 4, 4, 4)
    args = [jnp.asarray(rng.normal(size=s), "float32") for s in shapes]
    g = gradients(lambda x, w: patches(x, w))
    wanted = g(*args)
    specs = (jax.P("d"), jax.P(), jax.P("d"))
    sharded = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        got = jax.jit(jof.accelerate(g))(*sharded)
        assert count(g, *sharded) == 0
        assert jax.eval_shape(jax.jit(jof.accelerate(g)), *sharded)[0].sharding == (
            jax.eval_shape(g, *sharded)[0].sharding
        )
        compiled = jax.jit(jof.accelerate(g)).lower(*sharded).compile().as_text()
    assert "all-gather" not in compiled
    tolerance = 2e-2 if jax.default_backend() == "gpu" else 1e-4
    for y, z in itertools.zip_longest(got, wanted):
        np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance)
