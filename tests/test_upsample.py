"""Values of upsample_nearest2d and of its gradient, against NumPy and against JAX."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_oneflow_ops as jof
from tests import oracle
from tests.arrays import DTYPES, FLOAT8, INEXACT, any_bits, assert_same_bits, normals, rng_for

pytestmark = pytest.mark.usefixtures("x64")

METHODS = ("nearest", "nearest-exact")
LAYOUTS = ("NCHW", "NHWC")
IMPLEMENTATIONS = (None, "xla")
# Dtypes of every size; the kernels are compiled per element size.
DTYPE_OF_SIZE = ("uint8", "float16", "bfloat16", "float32", "float64", "complex128")


def small_integers(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Values whose sums are exact in float32, whatever the order of addition."""
    values = rng.integers(-8, 9, size=shape).astype(np.float64)
    if np.issubdtype(jnp.dtype(dtype), np.complexfloating):
        values = values + 1j * rng.integers(-8, 9, size=shape)
    return values.astype(dtype)


def forward(x, **kwargs) -> np.ndarray:
    y = jof.upsample_nearest2d(jax.device_put(x), **kwargs)
    assert isinstance(y, jax.Array)
    return np.asarray(y)


def backward(dy: np.ndarray, shape, **kwargs) -> np.ndarray:
    """The gradient alone, without a forward pass."""
    f = functools.partial(jof.upsample_nearest2d, **kwargs)
    (dx,) = jax.linear_transpose(f, jax.ShapeDtypeStruct(shape, dy.dtype))(dy)
    return np.asarray(dx)


def assert_same_values(actual, expected) -> None:
    """Asserts equal numbers (0 equals -0), dtypes and shapes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    np.testing.assert_array_equal(actual.astype(wide), expected.astype(wide))


def half_ulp(value: np.ndarray, dtype) -> np.ndarray:
    """Half the distance between adjacent values of `dtype` at `value`."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.abs(value))
    exponent = np.maximum(exponent - 1, info.minexp)
    return np.ldexp(0.5, exponent - info.nmant)


def assert_sums_within_error(dx, dy, size, **kwargs) -> None:
    """Asserts that `dx` holds each pixel's sum of `dy`, up to the summation error.

    The error of n terms added in any order is at most gamma(n - 1) times the sum of their
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). 16-bit terms
    are added in float32, and the total is rounded once. The bound includes the error of the oracle,
    which sums in float64.
    """
    dx = np.asarray(dx)
    assert dx.dtype == dy.dtype
    adjoint = functools.partial(oracle.upsample_nearest2d_adjoint, size=size, **kwargs)
    terms = adjoint(np.ones(dy.shape))
    assert dx.shape == terms.shape
    sums_in_double = dy.dtype in (np.float64, np.complex128)
    unit_roundoff = 2.0**-53 if sums_in_double else 2.0**-24

    def gamma(unit):
        steps = np.maximum(terms - 1, 0) * unit
        return steps / (1 - steps)

    parts = (np.real, np.imag) if np.iscomplexobj(dy) else (np.asarray,)
    for part in parts:
        terms_of_part = part(dy).astype(np.float64)
        exact = adjoint(terms_of_part)
        bound = (gamma(unit_roundoff) + gamma(2.0**-53)) * adjoint(np.abs(terms_of_part))
        if dy.dtype.itemsize == 2:
            bound = bound + half_ulp(np.abs(exact) + bound, dy.dtype)
        error = np.abs(part(dx).astype(np.float64) - exact)
        excess = np.max(error - bound, initial=0)
        assert excess <= 0, f"a sum errs by {excess} more than its bound"


# --- problems drawn by hypothesis -----------------------------------------------------------------


@st.composite
def output_sizes(draw, n_in: int) -> int:
    """Integer factors up and down, which have special kernels, and arbitrary sizes."""
    return draw(
        st.one_of(
            st.integers(1, 4).map(lambda k: k * n_in),
            st.integers(1, 4).map(lambda k: max(1, n_in // k)),
            st.integers(1, 40),
        )
    )


@st.composite
def problems(draw, dtypes):
    """(shape, size, keyword arguments, dtype, seed) with a rank of 3 to 6."""
    data_format = draw(st.sampled_from(LAYOUTS))
    ndim = draw(st.integers(3, 6))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    axis = oracle.spatial_axis(ndim, data_format)
    shape[axis] = draw(st.integers(1, 20))
    shape[axis + 1] = draw(st.integers(1, 20))
    if data_format == "NHWC":
        shape[-1] = draw(st.integers(1, 20))
    size = (draw(output_sizes(shape[axis])), draw(output_sizes(shape[axis + 1])))
    kwargs = {"method": draw(st.sampled_from(METHODS)), "data_format": data_format}
    seed = draw(st.integers(0, 2**32 - 1))
    return tuple(shape), size, kwargs, draw(st.sampled_from(dtypes)), seed


@given(problem=problems(DTYPES))
def test_forward_matches_oracle(problem):
    shape, size, kwargs, dtype, seed = problem
    x = any_bits(np.random.default_rng(seed), shape, dtype)
    actual = forward(x, size=size, **kwargs)
    assert_same_bits(actual, oracle.upsample_nearest2d(x, size, **kwargs))


@given(problem=problems(INEXACT))
def test_backward_matches_oracle(problem):
    shape, size, kwargs, dtype, seed = problem
    out_shape = oracle.resized(shape, size, kwargs["data_format"])
    dy = normals(np.random.default_rng(seed), out_shape, dtype)
    actual = backward(dy, shape, size=size, **kwargs)
    in_size = shape[(axis := oracle.spatial_axis(len(shape), kwargs["data_format"])) : axis + 2]
    assert_sums_within_error(actual, dy, in_size, **kwargs)


@given(problem=problems(INEXACT))
def test_reference_implementation_matches_oracle(problem):
    shape, size, kwargs, dtype, seed = problem
    rng = np.random.default_rng(seed)
    x = normals(rng, shape, dtype)
    actual = forward(x, size=size, implementation="xla", **kwargs)
    assert_same_bits(actual, oracle.upsample_nearest2d(x, size, **kwargs))
    dy = normals(rng, actual.shape, dtype)
    actual = backward(dy, shape, size=size, implementation="xla", **kwargs)
    in_size = shape[(axis := oracle.spatial_axis(len(shape), kwargs["data_format"])) : axis + 2]
    assert_sums_within_error(actual, dy, in_size, **kwargs)


@given(problem=problems(["float64"]))
def test_backward_is_the_adjoint_of_forward(problem):
    shape, size, kwargs, dtype, seed = problem
    rng = np.random.default_rng(seed)
    x = small_integers(rng, shape, dtype)
    ax = forward(x, size=size, **kwargs)
    y = small_integers(rng, ax.shape, dtype)
    assert np.vdot(y, ax) == np.vdot(backward(y, shape, size=size, **kwargs), x)


@given(
    n_in=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    factor=st.tuples(*[st.one_of(st.floats(0.05, 9.0), st.integers(1, 9))] * 2),
    data_format=st.sampled_from(LAYOUTS),
)
def test_scale_factor_gives_floor_of_the_product(n_in, factor, data_format):
    x = jax.ShapeDtypeStruct(oracle.resized((2, 3, 4, 5), n_in, data_format), jnp.float32)
    size = tuple(math.floor(n * f) for n, f in zip(n_in, factor, strict=True))
    f = functools.partial(jof.upsample_nearest2d, scale_factor=factor, data_format=data_format)
    if 0 in size:
        with pytest.raises(ValueError, match="scale_factor"):
            jax.eval_shape(f, x)
    else:
        y = jax.eval_shape(f, x)
        assert y.shape == oracle.resized(x.shape, size, data_format)
        assert y.dtype == x.dtype


# --- every dtype, every special case --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_bit_for_bit(dtype):
    rng = rng_for(dtype)
    for data_format in LAYOUTS:
        x = any_bits(rng, (2, 5, 7, 6), dtype)
        options = [
            {"size": size, "method": method, "data_format": data_format}
            for size in ((10, 14), (15, 7), (7, 12), (4, 3))
            for method in METHODS
        ]
        every = jax.jit(
            lambda x, options=options: [jof.upsample_nearest2d(x, **o) for o in options]
        )
        for actual, kwargs in zip(every(x), options, strict=True):
            assert_same_bits(actual, oracle.upsample_nearest2d(x, **kwargs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_special_values_pass(dtype, implementation):
    values = [np.nan, np.inf, -np.inf, -0.0, 0.0, jnp.finfo(dtype).tiny, jnp.finfo(dtype).max]
    x = np.array(values, dtype).reshape(1, 1, 7)
    for size in ((2, 14), (1, 7), (3, 10)):
        y = forward(x, size=size, implementation=implementation)
        expected = oracle.upsample_nearest2d(x, size)
        wide, expected = y.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_array_equal(wide, expected)
        np.testing.assert_array_equal(np.signbit(wide), np.signbit(expected))


@pytest.mark.parametrize(
    ("data_format", "factor"),
    # In NHWC a pixel's channels are copied as one block for any factor, so two factors suffice.
    [*(("NCHW", factor) for factor in (1, 2, 3, 4, (2, 3))), ("NHWC", 2), ("NHWC", (2, 3))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPE_OF_SIZE)
def test_widths_around_the_vectors(dtype, data_format, factor):
    """Rows shorter and longer than a vector, aligned and unaligned, in one compilation."""
    if data_format == "NCHW":
        shapes = [(2, 3, 1 + w % 3, w) for w in (*range(1, 10), *range(15, 41, 3), 32, 40)]
    else:
        shapes = [(2, 1 + c % 3, 1 + c % 5, c) for c in (*range(1, 10), *range(12, 21, 2))]
    factors = factor if isinstance(factor, tuple) else (factor, factor)
    axis = oracle.spatial_axis(4, data_format)
    in_sizes = [shape[axis : axis + 2] for shape in shapes]
    sizes = [tuple(n * k for n, k in zip(s, factors, strict=True)) for s in in_sizes]
    f = functools.partial(jof.upsample_nearest2d, scale_factor=factor, data_format=data_format)
    rng = rng_for(dtype, data_format, factor)

    xs = [any_bits(rng, shape, dtype) for shape in shapes]
    ys = jax.jit(lambda xs: [f(x) for x in xs])(xs)
    for y, x, size in zip(ys, xs, sizes, strict=True):
        assert_same_bits(y, oracle.upsample_nearest2d(x, size, data_format=data_format))

    if dtype not in INEXACT:
        return
    dys = [
        small_integers(rng, oracle.resized(shape, size, data_format), dtype)
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    transposed = jax.jit(jax.linear_transpose(lambda xs: [f(x) for x in xs], specs))
    for dx, dy, in_size in zip(transposed(dys)[0], dys, in_sizes, strict=True):
        expected = oracle.upsample_nearest2d_adjoint(dy, in_size, data_format=data_format)
        assert_same_values(dx, expected.astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "size", "data_format"),
    [
        ((3, 40, 64, 64), (128, 128), "NCHW"),
        ((3, 40, 63, 61), (126, 122), "NCHW"),
        ((3, 40, 32, 48), (96, 144), "NCHW"),
        ((3, 40, 64, 64), (90, 150), "NCHW"),
        ((3, 40, 128, 128), (50, 70), "NCHW"),
        ((1, 1, 1000, 500), (2000, 1000), "NCHW"),
        ((1, 1, 1000, 500), (1500, 800), "NCHW"),
        ((3, 64, 64, 40), (128, 128), "NHWC"),
        ((3, 64, 64, 33), (128, 128), "NHWC"),
        ((3, 64, 64, 40), (90, 150), "NHWC"),
        ((1, 1000, 500, 1), (2000, 1000), "NHWC"),
    ],
    ids=str,
)
def test_large_arrays(shape, size, data_format, dtype):
    """Enough work to be split among threads, or to need more than one wave of thread blocks."""
    rng = rng_for(shape, size, dtype)
    x = any_bits(rng, shape, dtype)
    y = forward(x, size=size, data_format=data_format)
    assert_same_bits(y, oracle.upsample_nearest2d(x, size, data_format=data_format))
    if dtype == "float32":
        dy = small_integers(rng, y.shape, dtype)
        dx = backward(dy, shape, size=size, data_format=data_format)
        in_size = shape[(axis := oracle.spatial_axis(4, data_format)) : axis + 2]
        expected = oracle.upsample_nearest2d_adjoint(dy, in_size, data_format=data_format)
        assert_same_values(dx, expected.astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize(
    ("shape", "size", "data_format"),
    [
        ((300, 5, 13, 4), (26, 8), "NCHW"),
        ((60, 2, 3, 37), (6, 74), "NCHW"),
        ((300, 3, 7, 5), (21, 35), "NCHW"),
        ((300, 2, 9, 3), (20, 11), "NCHW"),
        ((300, 2, 9, 3), (20, 7), "NCHW"),
        ((90, 1, 3, 40), (390, 3), "NCHW"),
        ((300, 2, 21, 6), (10, 12), "NCHW"),
        ((100, 11, 4, 3), (22, 8), "NHWC"),
        ((100, 3, 20, 5), (300, 3), "NHWC"),
    ],
    ids=str,
)
def test_many_narrow_images(shape, size, data_format, dtype):
    """Groups of rows that end at any row of an image."""
    rng = rng_for(shape, size, dtype)
    x = any_bits(rng, shape, dtype)
    y = forward(x, size=size, data_format=data_format)
    assert_same_bits(y, oracle.upsample_nearest2d(x, size, data_format=data_format))
    dy = normals(rng, y.shape, dtype)
    dx = backward(dy, shape, size=size, data_format=data_format)
    in_size = shape[(axis := oracle.spatial_axis(4, data_format)) : axis + 2]
    assert_sums_within_error(dx, dy, in_size, data_format=data_format)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("n_in", "n_out"),
    [
        (100_003, 70_001),  # the product exceeds 2^32
        (3, 4_000_037),
        (4_000_037, 3),
        (16_777_259, 16_777_289),  # float32 cannot represent all these integers
    ],
)
def test_long_rows_are_indexed_exactly(n_in, n_out, method):
    x = any_bits(rng_for(n_in), (1, 1, n_in), "uint8")
    indices = np.arange(n_out, dtype=np.int64)
    doubled = 2 * indices + (method == "nearest-exact")
    expected = x[:, :, doubled * n_in // (2 * n_out)]
    assert_same_bits(forward(x, size=(1, n_out), method=method), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
@pytest.mark.parametrize(
    ("n_in", "n_out"),
    [
        (5000, 5000),
        (5000, 10_000),
        (4999, 14_997),
        (5000, 12_001),
        (12_001, 5000),
        (1, 5000),
        (3, 10_000),
        (2049, 2050),
    ],
)
def test_gradient_of_long_rows(n_in, n_out, dtype, method):
    """Rows too long for a stack buffer, and pixels with more cotangents than a buffer holds."""
    values = rng_for(n_in, n_out).integers(-1, 2, size=(2, 3, n_out))
    dy = values.astype(dtype)
    size = {"size": (3, n_out), "method": method}
    expected = oracle.upsample_nearest2d_adjoint(dy, (2, n_in), method=method)
    assert_same_values(backward(dy, (2, 2, n_in), **size), expected.astype(dtype))


@pytest.mark.xdist_group("one process, for its memory")
@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs 15 GB of device memory: only on a GPU"
)
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("size", [(1024, 1024), (1000, 1050)], ids=str)
def test_more_than_two_to_the_31_elements(size, data_format):
    count = 2200
    shape = (count, 512, 512, 1) if data_format == "NHWC" else (count, 1, 512, 512)
    assert count * math.prod(size) > 2**31
    f = functools.partial(jof.upsample_nearest2d, size=size, data_format=data_format)
    x = jax.random.bits(jax.random.key(0), shape, jnp.uint8)
    y = jax.jit(f)(x)
    for n in (0, count // 2, count - 1):
        expected = oracle.upsample_nearest2d(x[n : n + 1], size, data_format=data_format)
        assert_same_bits(y[n : n + 1], expected)
    del y
    # Random numbers for all images would take four times the memory.
    out_shape = oracle.resized(shape, size, data_format)
    first = jax.random.bits(jax.random.key(1), (1, *out_shape[1:]), jnp.uint8)
    other = jnp.arange(count, dtype=jnp.uint8).reshape(-1, 1, 1, 1)
    dy = jax.jit(lambda x, n: ((x ^ n) % 16).astype(jnp.bfloat16))(first, other)
    (dx,) = jax.jit(jax.linear_transpose(f, jax.ShapeDtypeStruct(shape, dy.dtype)))(dy)
    for n in (0, count // 2, count - 1):
        expected = oracle.upsample_nearest2d_adjoint(
            dy[n : n + 1], (512, 512), data_format=data_format
        )
        assert_same_values(dx[n : n + 1], expected.astype(dy.dtype))


# --- against JAX ----------------------------------------------------------------------------------


def jax_resize(x, size, data_format):
    return jax.image.resize(x, oracle.resized(x.shape, size, data_format), "nearest")


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_jax_image_resize_at_integer_factors(method, data_format):
    x = normals(rng_for(method), (2, 5, 7, 6), "float32")
    axis = oracle.spatial_axis(4, data_format)

    @jax.jit
    def both(x):
        pairs = []
        for factor in range(1, 9):
            options = {"scale_factor": factor, "method": method, "data_format": data_format}
            size = tuple(factor * n for n in x.shape[axis : axis + 2])
            pairs.append((jof.upsample_nearest2d(x, **options), jax_resize(x, size, data_format)))
        return pairs

    for actual, expected in both(x):
        assert_same_bits(actual, expected)


def resize_is_exact(n_in: int, n_out: int) -> bool:
    """Whether jax.image.resize must agree with exact arithmetic.

    It computes floor((i + 0.5) * n_in / n_out) in float32. Rounding can change the floor only of
    an integer quotient, so there must be none, unless division by n_out is exact.
    """
    if n_out & (n_out - 1) == 0:
        return True
    return all((2 * i + 1) * n_in % (2 * n_out) for i in range(n_out))


exact_pairs = st.tuples(st.integers(1, 60), st.integers(1, 60)).filter(
    lambda pair: resize_is_exact(*pair)
)


@given(rows=exact_pairs, cols=exact_pairs)
def test_nearest_exact_equals_jax_image_resize(rows, cols):
    x = np.arange(rows[0] * cols[0], dtype=np.float32).reshape(1, rows[0], cols[0])
    size = (rows[1], cols[1])
    expected = jax_resize(x, size, "NCHW")
    assert_same_bits(forward(x, size=size, method="nearest-exact"), expected)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", INEXACT)
def test_gradient_equals_that_of_jax_image_resize(dtype, data_format):
    """The integers are so small that the sums of jax.image.resize are exact even in 16 bits."""
    rng = rng_for(dtype, data_format)
    x = small_integers(rng, (2, 5, 7, 6), dtype)
    axis = oracle.spatial_axis(4, data_format)
    sizes = {k: tuple(k * n for n in x.shape[axis : axis + 2]) for k in (1, 2, 3)}
    dys = {
        k: small_integers(rng, oracle.resized(x.shape, size, data_format), dtype)
        for k, size in sizes.items()
    }

    def ours(x, factor):
        return jof.upsample_nearest2d(x, factor, data_format=data_format)

    def theirs(x, factor):
        return jax_resize(x, sizes[factor], data_format)

    @functools.partial(jax.jit, static_argnums=0)
    def both(f, x, dys):
        results = []
        for factor, dy in dys.items():
            y, vjp = jax.vjp(lambda x, factor=factor: f(x, factor), x)
            results.append((y, vjp(dy)[0]))
        return results

    for (y, dx), (expected, wanted) in zip(both(ours, x, dys), both(theirs, x, dys), strict=True):
        assert_same_bits(y, expected)
        assert_same_values(dx, wanted)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "data_format", "dtype"),
    [
        ({"scale_factor": 2}, "NCHW", "float64"),
        ({"scale_factor": 2}, "NHWC", "complex128"),
        ({"size": (5, 7), "method": "nearest-exact"}, "NCHW", "complex128"),
        ({"size": (2, 3)}, "NHWC", "float64"),
    ],
    ids=str,
)
def test_derivatives_to_second_order(kwargs, data_format, dtype):
    x = jnp.asarray(normals(rng_for(str(kwargs)), (2, 3, 4, 3), dtype))

    def f(x):  # nonlinear before and after the op, so that the second derivative is not zero
        return jnp.sin(jof.upsample_nearest2d(x * x, data_format=data_format, **kwargs))

    check_grads(jax.jit(f), (x,), order=2, modes=["fwd", "rev"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_summed_in_float32(dtype, data_format, implementation):
    """Sums that would be wrong in 16-bit arithmetic.

    They have small terms after large ones, partial sums that overflow, or results that double
    rounding would change.
    """
    # From `edge` on, adjacent values of the dtype differ by 2.
    big, edge = (40000.0, 2048.0) if dtype == "float16" else (2.0**15, 256.0)
    nothing = [0.0] * 20
    sums = [  # each list has the terms of one pixel, in two rows of 11
        [edge, *[0.25] * 20, 0.0],
        [edge, 1.0, 2.0**-12, *nothing],
        [edge, 1.0, *nothing[:9], 1.0, *nothing],  # the first row's total, then the second's
        [big, big, *nothing[:9], -big, 1.0, -big, *nothing],
        [1.0] * 22,
    ]
    dy = np.array([terms[:22] for terms in sums], dtype).reshape(5, 2, 11)
    expected = dy.astype(np.float64).sum(axis=(1, 2)).astype(dtype)
    shape = (5, 1, 1)
    if data_format == "NHWC":
        dy, shape = dy[..., None], (5, 1, 1, 1)
    kwargs = {"size": (2, 11), "implementation": implementation, "data_format": data_format}
    assert_same_values(backward(dy, shape, **kwargs).reshape(5), expected)


def test_nan_and_infinite_cotangents_stay_in_their_pixel():
    dy = np.ones((1, 4, 6), np.float32)
    dy[0, 0, 1], dy[0, 2, 2], dy[0, 3, 5] = np.nan, np.inf, -np.inf
    dx = backward(dy, (1, 2, 3), scale_factor=2)
    np.testing.assert_array_equal(dx, [[[np.nan, 4, 4], [4, np.inf, -np.inf]]])


@pytest.mark.parametrize("size", [(2, 3), (1, 1), (5, 2)], ids=str)
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_pixels_that_nothing_reads_have_zero_gradient(method, data_format, size):
    shape = (3, 7, 9, 5)
    out_shape = oracle.resized(shape, size, data_format)
    kwargs = {"method": method, "data_format": data_format}
    dx = backward(np.ones(out_shape, np.float32), shape, size=size, **kwargs)
    in_size = shape[(axis := oracle.spatial_axis(4, data_format)) : axis + 2]
    expected = oracle.upsample_nearest2d_adjoint(np.ones(out_shape, np.float32), in_size, **kwargs)
    assert (expected == 0).any()
    assert_same_values(dx, expected.astype(np.float32))


@pytest.mark.parametrize("size", [(128, 192), (100, 220), (37, 50)], ids=str)
def test_gradient_is_deterministic(size):
    dy = normals(rng_for(size), (4, 8, *size), "float32")
    first = backward(dy, (4, 8, 64, 96), size=size)
    for _ in range(5):
        assert_same_bits(backward(dy, (4, 8, 64, 96), size=size), first)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8"])
def test_integers_have_float0_tangents(dtype):
    x = jnp.ones((1, 2, 3), dtype)
    tangent = np.zeros(x.shape, jax.dtypes.float0)
    y, dy = jax.jvp(lambda x: jof.upsample_nearest2d(x, 2), (x,), (tangent,))
    assert y.dtype == x.dtype
    assert dy.dtype == jax.dtypes.float0
    assert dy.shape == y.shape == (1, 4, 6)

    def loss(x):
        return jof.upsample_nearest2d(x, 2).astype(jnp.float32).sum()

    dx = jax.grad(loss, allow_int=True)(x)
    assert dx.dtype == jax.dtypes.float0
    assert dx.shape == x.shape


@pytest.mark.parametrize("dtype", FLOAT8)
def test_gradient_of_float8_is_refused(dtype):
    x = jnp.ones((1, 2, 2), dtype)
    with pytest.raises(TypeError, match="upsample_nearest2d") as caught:
        jax.grad(lambda x: jof.upsample_nearest2d(x, 2).astype(jnp.float32).sum())(x)
    assert dtype in str(caught.value)


# --- empty arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "kwargs", "expected"),
    [
        ((0, 3, 4, 5), {"scale_factor": 2}, (0, 3, 8, 10)),
        ((0, 3, 4, 5), {"size": (7, 2)}, (0, 3, 7, 2)),
        ((2, 0, 4, 5), {"scale_factor": 1.5, "method": "nearest-exact"}, (2, 0, 6, 7)),
        ((2, 4, 5, 0), {"scale_factor": 2, "data_format": "NHWC"}, (2, 8, 10, 0)),
        ((0, 4, 5, 3), {"size": 9, "data_format": "NHWC"}, (0, 9, 9, 3)),
        ((2, 3, 0, 5), {"scale_factor": 2}, (2, 3, 0, 10)),
        ((2, 3, 4, 0), {"scale_factor": (3, 2)}, (2, 3, 12, 0)),
        ((3, 0, 0), {"scale_factor": 0.5}, (3, 0, 0)),
        ((0, 5, 3), {"scale_factor": 2, "data_format": "NHWC"}, (0, 10, 3)),
    ],
    ids=str,
)
def test_empty_arrays(shape, kwargs, expected, implementation):
    def f(x):
        return jof.upsample_nearest2d(x, implementation=implementation, **kwargs)

    x = jnp.zeros(shape)
    assert f(x).shape == jax.eval_shape(f, x).shape == expected

    @jax.jit
    def transformed(x):
        y, vjp = jax.vjp(f, x)
        return y, vjp(y)[0], jax.jvp(f, (x,), (x,))[1], jax.jacrev(f)(x), jax.vmap(f)(x[None])

    y, dx, tangent, jacobian, batch = transformed(x)
    assert y.shape == tangent.shape == expected
    assert dx.shape == shape
    assert jacobian.shape == (*expected, *shape)
    assert batch.shape == (1, *expected)


def test_empty_vmap_axis():
    f = jax.vmap(lambda x: jof.upsample_nearest2d(x, 2))
    assert f(jnp.zeros((0, 3, 4, 5))).shape == (0, 3, 8, 10)


# --- how it is called -----------------------------------------------------------------------------


def test_signature():
    signature = inspect.signature(jof.upsample_nearest2d)
    assert [(p.name, p.kind.name, p.default) for p in signature.parameters.values()] == [
        ("x", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("scale_factor", "POSITIONAL_OR_KEYWORD", None),
        ("size", "POSITIONAL_OR_KEYWORD", None),
        ("method", "KEYWORD_ONLY", "nearest"),
        ("data_format", "KEYWORD_ONLY", "NCHW"),
        ("implementation", "KEYWORD_ONLY", None),
    ]


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        ({"size": 6}, (6, 6)),
        ({"size": (6, 9)}, (6, 9)),
        ({"size": np.int32(6)}, (6, 6)),
        ({"size": (np.int64(6), 9)}, (6, 9)),
        ({"size": [6, 9]}, (6, 9)),
        ({"scale_factor": 2}, (8, 10)),
        ({"scale_factor": 1.5}, (6, 7)),
        ({"scale_factor": (1.25, 3)}, (5, 15)),
        ({"scale_factor": [2, 0.5]}, (8, 2)),
        ({"scale_factor": np.float32(1.5)}, (6, 7)),
        ({"scale_factor": np.int64(3)}, (12, 15)),
    ],
    ids=str,
)
def test_ways_to_say_the_size(kwargs, size):
    x = np.arange(40, dtype=np.float32).reshape(2, 4, 5)
    expected = oracle.upsample_nearest2d(x, size)
    assert_same_bits(forward(x, **kwargs), expected)
    static = jax.jit(lambda x: jof.upsample_nearest2d(x, **kwargs))
    assert_same_bits(static(x), expected)


def test_sizes_can_be_static_arguments_of_jit():
    f = jax.jit(jof.upsample_nearest2d, static_argnames=("scale_factor", "size", "method"))
    x = np.arange(20, dtype=np.float32).reshape(1, 4, 5)
    assert_same_bits(f(x, 2), oracle.upsample_nearest2d(x, (8, 10)))
    actual = f(x, size=(6, 3), method="nearest-exact")
    assert_same_bits(actual, oracle.upsample_nearest2d(x, (6, 3), "nearest-exact"))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, ::-1, ::-1],
        lambda x: x[:, ::-2, 1:, ::2],
        lambda x: x.transpose(3, 1, 0, 2),
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
    ],
    ids=["reversed", "strided", "transposed", "fortran", "broadcast"],
)
def test_numpy_views(view):
    x = view(np.arange(3 * 4 * 5 * 6, dtype=np.float32).reshape(3, 4, 5, 6))
    size = (7, 11)
    expected = oracle.upsample_nearest2d(x, size)
    assert_same_bits(jof.upsample_nearest2d(x, size=size), expected)
    assert_same_bits(jax.jit(lambda x: jof.upsample_nearest2d(x, size=size))(x), expected)


@pytest.mark.fusion_emitters
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32"])
def test_slices_of_a_larger_array(dtype):
    """XLA may pass the middle of another buffer, aligned only to an element."""
    x = any_bits(rng_for(dtype), (5, 1, 7, 9), dtype)

    @jax.jit
    def f(x):
        return [jof.upsample_nearest2d(x[i : i + 2], 2) for i in range(4)]

    for i, y in enumerate(f(x)):
        assert_same_bits(y, oracle.upsample_nearest2d(x[i : i + 2], (14, 18)))


def test_64_bit_input_follows_the_x64_setting():
    values = np.arange(20).reshape(1, 4, 5)
    for x64, width in ((True, "64"), (False, "32")):
        with jax.enable_x64(x64):
            for kind in ("float", "int", "uint"):
                y = forward(values.astype(kind + "64"), scale_factor=2)
                expected = oracle.upsample_nearest2d(values.astype(kind + width), (8, 10))
                assert_same_bits(y, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_64_bit_arrays_outside_of_x64(implementation):
    """64-bit arrays and their gradients keep all bits."""
    x = jnp.arange(20.0).reshape(1, 4, 5) + 2.0**-40
    value, cotangent = np.asarray(x), np.full((1, 8, 7), 1 + 2.0**-40)
    dy = jnp.asarray(cotangent)
    f = functools.partial(jof.upsample_nearest2d, size=(8, 7), implementation=implementation)
    with jax.enable_x64(False):
        y, vjp = jax.vjp(f, x)
        (dx,) = vjp(dy)
        assert jax.jit(f)(x).dtype == np.float64
    assert_same_bits(y, oracle.upsample_nearest2d(value, (8, 7)))
    assert_sums_within_error(dx, cotangent, (4, 5))


def test_result_stays_on_the_device_of_the_input():
    device = jax.devices()[-1]
    x = jax.device_put(np.ones((1, 4, 5), np.float32), device)
    y, vjp = jax.vjp(lambda x: jof.upsample_nearest2d(x, 2), x)
    assert y.devices() == {device}
    assert vjp(y)[0].devices() == {device}
