"""resize: equal to jax.image.resize bit for bit, by kernels where float32 rounding is harmless."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from tests import oracle
from tests.arrays import DTYPES, any_bits, assert_same_bits, normals, rng_for

IMPLEMENTATIONS = (None, "xla")


def calls(f, *args) -> int:
    """The number of calls of the primitive."""
    return str(jax.make_jaxpr(f)(*args)).count("jof_resize[")


def nearest(shape, **options):
    return functools.partial(jof.resize, shape=shape, method="nearest", **options)


def gathered(x: np.ndarray, shape) -> np.ndarray:
    """The resized array, by indices in exact arithmetic."""
    for axis, n in enumerate(shape):
        x = np.take(x, oracle.source_indices(x.shape[axis], n, "nearest-exact"), axis=axis)
    return x


@st.composite
def problems(draw):
    """(shape, result's shape, dtype, seed); most dimensions are resized by simple factors."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)))
    resized = st.one_of(
        st.just(lambda n: n),
        st.integers(1, 4).map(lambda k: lambda n: k * n),
        st.integers(1, 30).map(lambda m: lambda n: m),
    )
    out = tuple(draw(resized)(n) for n in shape)
    return shape, out, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=settings().max_examples // 3)  # jax's own resize takes long to compile
@given(problem=problems())
def test_values_are_those_of_jax(problem):
    """Equal bit for bit, except NaN payloads: XLA on CPUs may clear those of 16-bit types."""
    shape, out, dtype, seed = problem
    with jax.enable_x64(True):
        x = any_bits(np.random.default_rng(seed), shape, dtype)
        y, expected = (np.asarray(f(x, out, "nearest")) for f in (jof.resize, jax.image.resize))
        assert y.dtype == expected.dtype
        with np.errstate(invalid="ignore"):
            both = (y != y) & (expected != expected)
        zero = np.zeros((), y.dtype)
        assert_same_bits(np.where(both, zero, y), np.where(both, zero, expected))


# (n_in, n_out): kernels handle those of the first list. For those of the second, float32 finds
# other pixels than exact arithmetic, on at least one backend.
KERNELS = [
    *((7, 7 * k) for k in (2, 3, 5, 8)),
    *((7 * k, 7) for k in (3, 5)),
    *((8 * k, 8) for k in (2, 3, 4, 6)),
    *[(2160, 1440), (3, 7), (480, 640), (13, 29), (299_999, 899_997)],
]
BY_JAX = [(82, 41), (6, 3), (376, 188), (140, 398), (388, 371), (10_199, 17_262), (640, 224)]


@pytest.mark.parametrize("is_native", [True, False])
def test_pixels_near_a_boundary(is_native):
    """Where float32 rounding decides, JAX resizes, by a gather with constant indices."""
    for n_in, n_out in KERNELS if is_native else BY_JAX:
        x = np.arange(n_in, dtype=np.int32)
        f = nearest((n_out,))
        assert_same_bits(f(x), jax.image.resize(x, (n_out,), "nearest"))
        if is_native:
            assert_same_bits(f(x), oracle.source_indices(n_in, n_out, "nearest-exact").astype("i4"))
        assert calls(f, x) == is_native, (n_in, n_out)


@pytest.mark.parametrize(
    ("shape", "out", "count"),
    [
        ((2, 3, 4, 5), (2, 6, 8, 5), 1),  # adjacent dimensions, channels last
        ((2, 3, 4, 5), (2, 3, 8, 10), 1),
        ((2, 3, 4, 5), (4, 3, 8, 5), 2),  # dimensions that are not adjacent
        ((2, 3, 4, 5), (2, 9, 12, 10), 2),
        ((2, 3, 4, 5), (4, 6, 8, 10), 2),
        ((3, 4, 2), (3, 4, 4), 1),
        ((3,), (9,), 1),
        ((3, 4, 6), (6, 8, 3), 1),  # the last one by jax
        ((3, 4), (3, 4), 0),
        ((), (), 0),
        ((0, 3), (0, 6), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_dimensions(shape, out, count, implementation):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    f = nearest(out, implementation=implementation)
    g = functools.partial(jax.image.resize, shape=out, method="nearest")
    dy = jnp.asarray(rng_for(out).integers(-8, 9, size=out), jnp.float32)  # sums are exact

    @jax.jit
    def run(x, dy):
        return [(*jax.jvp(h, (x,), (2 * x,)), jax.vjp(h, x)[1](dy)[0]) for h in (f, g)]

    (*ours, dx), (*theirs, wanted) = run(x, dy)
    np.testing.assert_array_equal(dx, wanted)
    for a, b in zip((f(x), *ours), (theirs[0], *theirs), strict=True):
        assert_same_bits(a, b)
    assert calls(f, x) == count


def test_sums_of_16_bits_are_rounded_once():
    dy = normals(rng_for("resize"), (96, 3, 64), "bfloat16")
    (dx,) = jax.linear_transpose(nearest(dy.shape), jax.ShapeDtypeStruct((4, 3, 64), dy.dtype))(dy)
    exact = dy.astype(np.float64).reshape(4, 24, 3, 64).sum(1)
    spacing = oracle.spacing(exact, "bfloat16")
    assert np.abs(np.asarray(dx, np.float64) - exact).max() <= np.max(0.5 * spacing + 1e-5)


def test_dtypes_types_and_layouts():
    with jax.enable_x64(True):
        for dtype in (*DTYPES, "int4"):
            x = jnp.asarray(np.arange(12).reshape(3, 4) % 2, dtype)
            assert_same_bits(jof.resize(x, (6, 4)), gathered(np.asarray(x), (6, 4)))
            assert bool(calls(nearest((6, 4)), x)) == (dtype in DTYPES and "8_" not in dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    assert jof.resize(keys, (6,)).shape == (6,)
    for x in (2.0, jnp.asarray(2.0), jnp.full(2, 2.0), jnp.broadcast_to(jnp.asarray(2), (2,))):
        out = (6,) if jnp.shape(x) else ()
        ours, theirs = (jax.typeof(f(x, out, "nearest")) for f in (jof.resize, jax.image.resize))
        assert (ours, ours.weak_type) == (theirs, theirs.weak_type)
    view = np.arange(24, dtype=np.float32).reshape(4, 6)[::-1, ::2]
    assert_same_bits(jof.resize(view, (8, 9)), gathered(view, (8, 9)))


@pytest.mark.parametrize("method", ["linear", "cubic", jax.image.ResizeMethod.LANCZOS3])
def test_other_methods_are_passed_on(method):
    x = normals(rng_for(1), (5, 6), "float32")
    for options in ({}, {"antialias": False}, {"precision": jax.lax.Precision.DEFAULT}):
        actual = jof.resize(x, (3, 9), method, **options)
        assert_same_bits(actual, jax.image.resize(x, (3, 9), method, **options))
    x16 = jnp.asarray(x, "bfloat16")
    assert jof.resize(x16, (3, 9), method).dtype == jnp.bfloat16


@pytest.mark.parametrize("out", [(3, 7, 9), (6, 4, 10), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic", "lanczos3"])
def test_images_of_64_bits_keep_their_dtype(method, out):
    """Outside of x64, values are those inside, and gradients by kernels have 64 bits, too."""
    with jax.enable_x64(True):
        x, ones = jnp.asarray(normals(rng_for(out), (3, 4, 5), "float64")), jnp.ones(out)
        expected = jax.image.resize(x, out, method)
    with jax.enable_x64(False):
        y, pull = jax.vjp(functools.partial(jof.resize, shape=out, method=method), x)
        assert_same_bits(y, expected)
        if out == (6, 4, 10) and method == "nearest":
            assert_same_bits(pull(ones)[0], np.full(x.shape, 4.0))


def test_signature():
    ours, theirs = (
        [*inspect.signature(f).parameters.values()] for f in (jof.resize, jax.image.resize)
    )
    assert [(p.name, p.kind) for p in ours[:-1]] == [(p.name, p.kind) for p in theirs]
    assert [p.default for p in ours[3:-1]] == [p.default for p in theirs[3:]]
    assert (ours[2].default, ours[-1].name) == ("nearest", "implementation")
    x = np.ones((2, 3), np.float32)
    assert jof.resize(x, [4, np.int64(6)], jax.image.ResizeMethod.NEAREST).shape == (4, 6)
    assert jof.resize(x, jnp.array([4, 6]), "nearest", False).shape == (4, 6)


@pytest.mark.parametrize(
    ("x", "shape", "method"),
    [
        (np.ones((2, 3)), (4,), "nearest"),
        (np.ones((2, 3)), (4, 6, 1), "nearest"),
        (np.ones((2, 3)), 4, "nearest"),
        (np.ones((2, 3)), (4.0, 6), "nearest"),
        (np.ones((2, 3)), (-4, 6), "nearest"),
        (np.ones((2, 3)), (4, 6), "nearby"),
        (np.ones((2, 3)), (4, 6), None),
        (np.ones((2, 3)), (4, 6), ["nearest"]),
        ([[1.0, 2.0]], (4, 6), "nearest"),
        (np.ones((0, 3)), (4, 6), "nearest"),
        (np.ones((2, 3)), (0, 6), "nearest"),
        ("x", (), "nearest"),
        (None, (), "nearest"),
    ],
    ids=str,
)
def test_refuses_what_jax_refuses(x, shape, method):
    """Errors are the same; arguments that JAX accepts are accepted."""

    def outcome(f):
        try:
            return f(x, shape, method).shape
        except Exception as error:
            return type(error), str(error).partition("\n")[0]

    assert outcome(jof.resize) == outcome(jax.image.resize)


def test_traced_sizes_and_symbolic_ones():
    x = jnp.ones((2, 3))
    with pytest.raises(TypeError):
        jax.jit(jof.resize)(x, (4, 6))
    static = jax.jit(jof.resize, static_argnames=("shape", "method"))
    assert static(x, (4, 6), "nearest").shape == (4, 6)
    h, w = jax.export.symbolic_shape("h, w")
    f = jax.jit(lambda x: jof.resize(x, (2 * x.shape[0], x.shape[1], 6)))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((h, w, 3), jnp.float32))
    x = normals(rng_for(3), (3, 4, 3), "float32")
    assert_same_bits(exported.call(x), gathered(x, (6, 4, 6)))


def test_float8_has_the_gradient_of_jax():
    x = jnp.asarray(rng_for(8).integers(-3, 4, size=(2, 3)), "float32")

    def loss(f, x):
        return (f(x.astype("float8_e5m2"), (4, 3), "nearest").astype("float32") ** 2).sum()

    expected = jax.grad(functools.partial(loss, jax.image.resize))(x)
    assert_same_bits(jax.grad(functools.partial(loss, jof.resize))(x), expected)
