"""cast for every pair of real dtypes, compared bit for bit with astype, NumPy and ml_dtypes."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_oneflow_ops as jof

pytestmark = pytest.mark.usefixtures("x64", "quiet_numpy")

IMPLEMENTATIONS = (None, "xla")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = (*FLOAT8, "float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS)
# The bits of precision of each float dtype.
PRECISION = {"float8_e4m3fn": 4, "float8_e5m2": 3, "float16": 11, "bfloat16": 8, "float32": 24}


@pytest.fixture(scope="module")
def quiet_numpy():
    """Silences warnings of NumPy's own casts, which pytest would turn into errors."""
    with np.errstate(all="ignore"):
        yield


def is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def unsigned_of(dtype) -> np.dtype:
    return np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def random_bits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random 64-bit words with evenly distributed numbers of leading zeros or ones."""
    words = rng.integers(0, 2**64, size=count, dtype=np.uint64)
    shifted = words >> rng.integers(0, 64, size=count).astype(np.uint64)
    return np.concatenate([words, shifted, ~shifted])


def special_integers(dtype) -> np.ndarray:
    """Powers of two, their neighbours, and integers halfway between values of a float dtype."""
    words = {0}
    for k in range(64):
        for lost in (0, *(2 ** max(0, k - precision) for precision in PRECISION.values())):
            for beside in (-1, 0, 1, lost):
                words.update((2**k + lost + beside, -(2**k) - lost - beside))
    words = np.array(sorted(word % 2**64 for word in words), dtype=np.uint64)
    return words.astype(unsigned_of(dtype)).view(dtype)


def special_floats(dtype) -> np.ndarray:
    """Values of narrower float dtypes, the midpoints between them, and the neighbours of both."""
    dtype = jnp.dtype(dtype)
    values = []
    for name in PRECISION:
        narrow = jnp.dtype(name)
        if narrow.itemsize >= dtype.itemsize:
            continue
        step = 2 ** max(0, 8 * narrow.itemsize - 16 + 2)
        bits = np.arange(0, 2 ** (8 * narrow.itemsize - 1), step, dtype=np.uint64)
        for offset in (0, 1):
            part = (bits + np.uint64(offset)).astype(unsigned_of(narrow)).view(narrow)
            values.append(part.astype(np.float64))
        low, high = values[-2:]
        values.append((low + high) / 2)
    # Values that overflow dtypes with few exponent bits, and the ends of integer ranges.
    powers = 2.0 ** np.arange(-5, 130)
    values += [
        powers,
        powers * 1.5,
        powers - 0.5,
        np.array([448.0, 464.0, 480.0, 61440.0, 65520.0]),
    ]
    exact = np.concatenate(values)
    exact = exact[np.isfinite(exact)].astype(dtype)
    up, down = (np.nextafter(exact, dtype.type(end)) for end in (np.inf, -np.inf))
    info = np.finfo(dtype)
    ends = [np.nan, np.inf, 0.0, info.tiny, info.tiny / 2, info.smallest_subnormal, info.max]
    positive = np.concatenate([exact, up, down, np.array(ends, dtype=dtype)])
    return np.concatenate([positive, -positive])


def values_of(dtype) -> np.ndarray:
    """Every value of an 8- or 16-bit dtype; special and random values of a wider dtype."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return np.array([False, True, True])
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=unsigned_of(dtype)).view(dtype)
    words = random_bits(np.random.default_rng(zlib.crc32(dtype.name.encode())), 20_001)
    random = words.astype(unsigned_of(dtype)).view(dtype)
    special = special_floats(dtype) if is_float(dtype) else special_integers(dtype)
    return np.concatenate([special, random])


def cast(x, dtype, **kwargs) -> np.ndarray:
    y = jof.cast(jax.device_put(x), dtype, **kwargs)
    assert isinstance(y, jax.Array)
    return np.asarray(y)


def assert_same(actual, expected, source=None) -> None:
    """Asserts equal bits, except that any NaN equals any NaN: payloads depend on the processor."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = [a.reshape(-1).view(unsigned_of(a.dtype)) for a in (actual, expected)]
    same = bits[0] == bits[1]
    if is_float(actual.dtype):
        nan = [np.isnan(a.reshape(-1)) for a in (actual, expected)]
        same = (nan[0] & nan[1]) | (~nan[0] & ~nan[1] & same)
    if not same.all():
        i = np.flatnonzero(~same)
        x = "" if source is None else f" from {np.asarray(source).reshape(-1)[i[:5]]}"
        raise AssertionError(
            f"{i.size} of {same.size} differ: {actual.reshape(-1)[i[:5]]}, "
            f"want {expected.reshape(-1)[i[:5]]}{x}"
        )


def comparable(x: np.ndarray, dtype) -> np.ndarray:
    """The values whose result does not depend on XLA's version or the processor."""
    if x.dtype == jnp.bfloat16 and jnp.dtype(dtype).kind == "b":
        # Some XLA versions treat subnormals as zeros here.
        magnitude = x.view(np.uint16) & 0x7FFF
        return x[(magnitude == 0) | (magnitude >= 0x0080)]
    if x.dtype == np.float64 and dtype == "float16":
        # Processors without an instruction for this cast round to float32 first.
        twice = x.astype(np.float32).astype(np.float16)
        return x[(twice == x.astype(np.float16)) | np.isnan(x)]
    return x


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.fusion_emitters
@pytest.mark.parametrize("source", DTYPES)
def test_matches_astype(source):
    """All casts are in one program, which takes a fraction of the time of many."""
    xs = {to: comparable(values_of(source), to) for to in DTYPES}
    both = jax.jit(lambda xs: {to: (jof.cast(x, to), x.astype(to)) for to, x in xs.items()})(xs)
    for to, (actual, expected) in both.items():
        assert actual.dtype == to
        assert_same(actual, expected, xs[to])


@pytest.mark.parametrize("source", DTYPES)
def test_reference_implementation_is_astype(source):
    x = values_of(source)[-1001:]
    # In one program, which takes a fraction of the time of many.
    xla = jax.jit(lambda x: [jof.cast(x, to, implementation="xla") for to in DTYPES])
    astype = jax.jit(lambda x: [x.astype(to) for to in DTYPES])
    for actual, expected in zip(xla(x), astype(x), strict=True):
        assert_same(actual, expected, x)


@pytest.mark.fusion_emitters
@given(
    source=st.sampled_from(DTYPES),
    to=st.sampled_from(DTYPES),
    size=st.integers(0, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_values_match_astype(source, to, size, seed):
    rng = np.random.default_rng(seed)
    if source == "bool":
        x = rng.integers(0, 2, size=size).astype(bool)
    else:
        x = rng.permutation(random_bits(rng, size))[:size]
        x = comparable(x.astype(unsigned_of(source)).view(jnp.dtype(source)), to)
    assert_same(cast(x, to), jnp.asarray(x).astype(to), x)


@given(
    x=st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_subnormal=False)),
    to=st.sampled_from(DTYPES),
)
def test_one_value_matches_astype(x, to):
    x = np.asarray(x, dtype="int64" if isinstance(x, int) else "float64")
    assert_same(cast(x, to), jnp.asarray(x).astype(to), x)


def in_range(x: np.ndarray, to) -> np.ndarray:
    """The values for which NumPy, ml_dtypes and XLA must agree."""
    source, to = x.dtype, jnp.dtype(to)
    if is_float(source):
        wide = x.astype(np.float64)
        # Subnormals may be treated as zeros. XLA rounds some float64 values twice, so only values
        # that float32 represents are kept.
        keep = np.isfinite(wide) & ((wide == 0) | (np.abs(wide) >= 2.0**-126))
        if to.itemsize < 4:
            keep &= wide.astype(np.float32) == wide
        if jnp.issubdtype(to, jnp.integer):
            info = jnp.iinfo(to)
            keep &= (wide > float(info.min) - 1) & (wide < float(info.max) + 1)
            if to.itemsize == 8:  # float64 cannot represent 2^63 - 1 and 2^64 - 1
                keep &= (wide >= float(info.min)) & (wide < float(info.max))
        if to == np.float32:
            keep &= (wide == 0) | (np.abs(wide) > 2.0**-125)
        return x[keep]
    if jnp.issubdtype(source, jnp.integer) and is_float(to) and to.itemsize < 4:
        return x[(x.astype(np.float64) < 2**24) & (x.astype(np.float64) > -(2**24))]
    return x


@pytest.mark.parametrize("source", DTYPES)
def test_matches_numpy(source):
    xs = [in_range(values_of(source), to) for to in DTYPES]
    assert all(x.size > 0 for x in xs)
    results = jax.jit(lambda xs: [jof.cast(x, to) for x, to in zip(xs, DTYPES, strict=True)])(xs)
    for actual, x, to in zip(results, xs, DTYPES, strict=True):
        via = x.astype(np.float32) if jnp.dtype(to).itemsize < 4 and is_float(to) else x
        assert_same(actual, via.astype(jnp.dtype(to)), x)


@pytest.mark.parametrize("source", FLOATS)
def test_floats_saturate_as_integers(source):
    x = np.array([np.inf, -np.inf, np.nan]).astype(jnp.dtype(source))
    if source == "float8_e4m3fn":  # it has no infinity
        x = x[2:]
    for to in INTEGERS:
        info = jnp.iinfo(to)
        expected = np.array([info.max, info.min, 0][-x.size :], dtype=to)
        assert_same(cast(x, to), expected, x)
    assert cast(x, "bool").all()


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
def test_overflow_of_float8(source):
    x = np.array([480, -480, np.inf, -np.inf, np.nan]).astype(jnp.dtype(source))
    assert np.isnan(cast(x, "float8_e4m3fn")).all()
    x = np.array([61440, -61440, np.inf, -np.inf]).astype(jnp.dtype(source))
    expected = np.array([np.inf, -np.inf, np.inf, -np.inf]).astype(jnp.dtype("float8_e5m2"))
    assert_same(cast(x, "float8_e5m2"), expected)


@pytest.mark.parametrize("source", FLOATS)
def test_round_trip_through_wider_floats(source):
    """A cast to a dtype that holds every value, and back, changes nothing."""
    x = values_of(source)
    x = x[(x == 0) | (np.abs(x.astype(np.float64)) >= 2.0**-126) | np.isnan(x)]
    for wide in FLOATS:
        narrow_info, wide_info = jnp.finfo(source), jnp.finfo(wide)
        if wide_info.nmant >= narrow_info.nmant and wide_info.nexp >= narrow_info.nexp:
            assert_same(cast(cast(x, wide), source), x)


# --- arrays ---------------------------------------------------------------------------------------

PAIRS = (
    ("float32", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float8_e4m3fn"),
    ("float8_e5m2", "float16"),
    ("float64", "float16"),
    ("int32", "bool"),
    ("bool", "float8_e5m2"),
    ("int8", "int8"),
    ("uint64", "float32"),
    ("float32", "int64"),
)


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_shapes(source, to):
    shapes = [(), (0,), (1,), (3, 0, 2), (2, 3, 5), (513,), (7, 1031)]
    xs = [np.resize(comparable(values_of(source), to), shape) for shape in shapes]
    both = jax.jit(lambda xs: [(jof.cast(x, to), x.astype(to)) for x in xs])(xs)
    for actual, expected in both:
        assert_same(actual, expected)


@pytest.mark.fusion_emitters
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_large_array(source, to):
    """An odd size, large enough to be split among threads."""
    x = np.resize(comparable(values_of(source), to), 1_500_001)
    assert_same(cast(x, to), jnp.asarray(x).astype(to))


@pytest.mark.parametrize(
    "dtype", [float, int, bool, "float32", np.int8, jnp.bfloat16, jnp.dtype("f2")]
)
def test_ways_to_name_a_dtype(dtype):
    x = jnp.arange(-3.0, 4.0, 0.5, dtype="float32")
    assert_same(cast(x, dtype), x.astype(dtype))


def test_without_x64_64_bit_dtypes_are_32_bit_ones():
    with jax.enable_x64(False):
        x = jnp.arange(5, dtype="float32")
        assert_same(cast(x, int), x.astype(int))
        assert_same(cast(x, float), x.astype(float))


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("source", FLOATS)
def test_gradient_is_the_cotangent_cast_back(source, implementation):
    x = jnp.asarray(np.linspace(-3, 3, 37).astype(jnp.dtype(source)))
    cts = [jax.device_put(np.linspace(-5, 4, 37).astype(to)) for to in FLOATS]

    def pulled_back(x, ct):
        y, vjp = jax.vjp(lambda x: jof.cast(x, ct.dtype, implementation=implementation), x)
        (expected,) = jax.vjp(lambda x: x.astype(ct.dtype), x)[1](ct)
        return y, x.astype(ct.dtype), *vjp(ct), ct.astype(source), expected

    every = jax.jit(lambda x, cts: [pulled_back(x, ct) for ct in cts])
    for y, value, dx, back, expected in every(x, cts):
        assert_same(y, value)
        assert_same(dx, back)
        assert_same(dx, expected)


@pytest.mark.parametrize("source", FLOATS)
def test_tangent_is_cast(source):
    x = jnp.asarray(np.linspace(-3, 3, 37).astype(jnp.dtype(source)))

    @jax.jit
    def every(x):
        return [
            (*jax.jvp(lambda x, to=to: jof.cast(x, to), (x,), (x[::-1],)), x.astype(to))
            for to in FLOATS
        ]

    for y, dy, value in every(x):
        assert_same(y, value)
        assert_same(dy, value[::-1])


@pytest.mark.parametrize("to", ["int32", "uint8", "bool"])
def test_no_gradient_through_integers(to):
    x = jnp.linspace(-3, 3, 37, dtype="float32")
    gradient = jax.grad(lambda x: jnp.sum(jof.cast(jof.cast(x, to), "float32") + x * 2))(x)
    assert_same(gradient, jnp.full_like(x, 2))


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_jit_and_vmap(source, to):
    x = jnp.asarray(np.resize(comparable(values_of(source), to), (5, 77)))
    expected = x.astype(to)
    assert_same(jax.jit(lambda x: jof.cast(x, to))(x), expected)
    for axis in (0, 1):
        assert_same(jax.vmap(lambda x: jof.cast(x, to), in_axes=axis, out_axes=axis)(x), expected)
