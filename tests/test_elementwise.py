"""Elementwise functions: values and derivatives, against double precision and against JAX."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from tests import oracle
from tests.arrays import assert_same_bits, rng_for
from tests.catalogue import BY_NAME, ELEMENTWISE_OPS, PARAMETER, POSITIVE, REAL, Op

pytestmark = pytest.mark.usefixtures("x64", "quiet_numpy")

NARROW = ("float16", "bfloat16")
FLOATS = (*NARROW, "float32", "float64")
# XLA's CPU threads flush subnormal numbers to zero, and so does some GPU arithmetic.
SMALLEST_NORMAL = 2.0**-126


@pytest.fixture(scope="module")
def quiet_numpy():
    """Silences warnings of NumPy's own arithmetic, which pytest would turn into errors."""
    with np.errstate(all="ignore"):
        yield


class OfOneArray(NamedTuple):
    """An op of one array with values for its parameters."""

    row: Op
    parameters: tuple[float, ...]

    def __str__(self) -> str:
        return "-".join((self.row.name, *map(str, self.parameters)))

    def exact(self, order: int, x: np.ndarray, dtype) -> np.ndarray:
        """The value or the derivative in double precision; parameters are rounded to `dtype`."""
        parameters = (float(np.asarray(p, jnp.dtype(dtype))) for p in self.parameters)
        return (self.row.exact, *self.row.derivatives)[order](x, *parameters)

    def both(self, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """The value and the derivative."""
        return value_and_derivative(lambda x: self.row.function(x, *self.parameters), x)

    def twins(self, x: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """JAX's value and derivative in double precision; parameters are rounded to x's dtype."""
        parameters = tuple(float(np.asarray(p, x.dtype)) for p in self.parameters)
        wide = jnp.asarray(x.astype(np.float64))
        return value_and_derivative(lambda x: self.row.replaces(x, *parameters), wide)


OF_ONE_ARRAY = tuple(
    OfOneArray(op, parameters)
    for op in ELEMENTWISE_OPS
    if len(op.arrays) == 1
    for parameters in op.settings
)
# Name of the op -> (f, JAX's function, number of operands).
OPS = {op.name: (op.function, op.replaces, len(op.domain)) for op in ELEMENTWISE_OPS}
# Ops whose last operand must be a scalar.
PARAMETRIC = [op.name for op in ELEMENTWISE_OPS if PARAMETER in op.domain]
# One function for each number of operands and each way that kernels are implemented: for tests that
# depend on nothing else.
KERNELS = ("relu", "silu", "elu", "add", "divide", "swiglu", "fma", "where")
OF_TWO_ARRAYS = [op for op in ELEMENTWISE_OPS if len(op.arrays) == 2]
ARITHMETIC = {op.name: op for op in OF_TWO_ARRAYS if not op.ulps}  # correctly rounded
INEXACT = {op.name: op for op in OF_TWO_ARRAYS if op.ulps}


@functools.partial(jax.jit, static_argnums=0)
def value_and_derivative(f, x):
    y, pull = jax.vjp(f, x)
    return y, pull(jnp.ones_like(y))[0]


def ordinal(x: np.ndarray) -> np.ndarray:
    """Maps floats to integers in the same order; adjacent floats differ by 1; -0 and 0 map to 0."""
    bits = x.view(f"int{8 * x.dtype.itemsize}").astype(np.int64)
    low = -(2 ** (8 * x.dtype.itemsize - 1))
    return np.where(bits < 0, low - bits, bits)


def assert_same(actual, expected, *sources) -> None:
    """Asserts equal bits, except that any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    wide = [a.reshape(-1).astype(np.float64) for a in (actual, expected)]
    same = wide[0] == wide[1]
    same &= np.signbit(wide[0]) == np.signbit(wide[1])
    same |= np.isnan(wide[0]) & np.isnan(wide[1])
    report(~same, actual, expected, *sources)


def report(wrong: np.ndarray, actual, expected, *sources) -> None:
    """Fails with the first few wrong elements, if any."""
    i = np.flatnonzero(wrong)[:5]
    shown = [np.asarray(a).reshape(-1)[i] for a in (actual, expected, *sources)]
    assert not i.size, (
        f"{np.count_nonzero(wrong)} of {wrong.size} wrong: {shown[0]}, want {shown[1]}, "
        f"from {shown[2:]}"
    )


def assert_accurate(y, exact, floor: float, *sources, ulps: float, slack=0.0) -> float:
    """Asserts errors of at most `ulps` ulps of y's dtype, where y is not tiny or overflowing."""
    dtype = y.dtype
    y, exact = np.asarray(y).astype(np.float64), np.asarray(exact)
    known = np.isfinite(exact) & (np.abs(exact) <= float(jnp.finfo(dtype).max))
    unit = oracle.spacing(np.where(known, exact, 1), dtype)
    # Below `floor` the bound is absolute: flushing a tiny value to zero is an error of many ulps.
    bound = np.where(np.abs(exact) >= floor, ulps * unit, np.maximum(floor, ulps * unit))
    error = np.abs(y - exact)
    report(known & ~(error <= bound + slack), y, exact, *sources)
    units = np.where(known & (np.abs(exact) >= floor), error / unit, 0)
    return float(units.max(initial=0))


def assert_same_special(y, twin, *sources) -> None:
    """Asserts NaNs and infinities, with their signs, in the same places."""
    y, twin = (np.asarray(a).astype(np.float64) for a in (y, twin))
    wrong = (np.isnan(y) != np.isnan(twin)) | (np.isinf(y) != np.isinf(twin))
    wrong |= np.isinf(y) & (y != twin)
    report(wrong, y, twin, *sources)


# --- activations: accuracy ------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype"), [*itertools.product(OF_ONE_ARRAY, NARROW)], ids=str)
def test_all_16_bit_values(op, dtype, record_property):
    for order, ulps in enumerate(assert_all_16_bit_values(op, dtype)):
        record_property(f"{op} {'fd'[order]} {dtype}", ulps)


def assert_all_16_bit_values(op: OfOneArray, dtype) -> list[float]:
    """Checks the value and the derivative, and returns their largest errors."""
    dtype, errors = jnp.dtype(dtype), []
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    results = op.both(jnp.asarray(x))
    for order, (y, twin) in enumerate(zip(results, op.twins(x), strict=True)):
        assert y.dtype == dtype
        y = np.asarray(y)
        exact = op.exact(order, np.where(finite, wide, 1), dtype)
        # A subnormal argument may be flushed to 0, which matters to piecewise functions.
        tiny = (wide != 0) & (np.abs(wide) < SMALLEST_NORMAL)
        exact = np.where(finite & (~tiny if order else True), exact, np.nan)
        bound = op.row.ulps or 0.5
        errors.append(assert_accurate(y, exact, op.row.floor[order], x, ulps=bound))
        assert_same_special(y, oracle.rounded(np.asarray(twin), dtype), x)
        if order == 0:
            zero = wide == 0
            assert_same(y[zero], np.asarray(twin)[zero].astype(dtype), x[zero])
    return errors


SPECIAL = (0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 20.0, -20.0, 88.7, -88.7, np.inf, -np.inf, np.nan)


def many_numbers(dtype) -> np.ndarray:
    rng = rng_for("many", dtype)
    x = np.concatenate(
        [
            np.linspace(-15, 15, 200_001),
            3 * rng.standard_normal(100_000),
            10.0 ** rng.uniform(-30, 30, 20_000),
            -(10.0 ** rng.uniform(-30, 30, 20_000)),
            np.array(SPECIAL),
        ]
    )
    return x.astype(dtype)


def with_twins(op: OfOneArray, x: np.ndarray):
    """Yields (order, result, exact result) after checking the positions of NaNs and infinities."""
    finite = np.isfinite(x)
    wide = x.astype(np.float64)
    for order, (y, twin) in enumerate(zip(op.both(jnp.asarray(x)), op.twins(x), strict=True)):
        assert y.dtype == x.dtype
        y = np.asarray(y)
        assert_same_special(y, np.asarray(twin).astype(x.dtype), x)
        if order == 0:
            zero = x == 0
            assert_same(y[zero], np.asarray(twin)[zero].astype(x.dtype), x[zero])
        yield order, y[finite].astype(np.float64), op.exact(order, wide[finite], x.dtype)


@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
def test_float32(op, record_property):
    x = many_numbers("float32")
    source = x[np.isfinite(x)].astype(np.float64)
    for order, y, exact in with_twins(op, x):
        unit = oracle.spacing(exact, "float32")
        magnitude, floor = np.abs(exact), op.row.floor[order]
        if order == 0:
            tail = magnitude < np.abs(source) / 1024
            bound = np.where(tail, 1e-4 * magnitude, 4 * unit)
        else:
            # Near a root of the derivative its terms cancel, so the error is relative to the terms.
            tail = magnitude < 2.0**-3
            bound = np.maximum(np.maximum(5e-7, 4 * unit), 1e-4 * magnitude)
        bound = np.where(magnitude < floor, floor, bound)
        error = np.abs(y - exact)
        report(~(error <= bound), y, exact, source)
        counted = magnitude >= floor
        ulps = (error / unit)[counted & ~tail].max()
        record_property(f"{op} {'fd'[order]} float32 ulp", float(ulps))
        relative = (error / np.where(magnitude > 0, magnitude, 1))[counted & tail]
        record_property(f"{op} {'fd'[order]} float32 tail", float(relative.max(initial=0)))


@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
def test_float64(op):
    x = many_numbers("float64")
    source = x[np.isfinite(x)]
    for order, y, exact in with_twins(op, x):
        magnitude = np.abs(exact)
        bound = np.maximum(1e-12 * magnitude, 1e-14 if order else 1e-290)
        report(~(np.abs(y - exact) <= bound), y, exact, source)


def largest(op: OfOneArray, dtype) -> None:
    """Checks values and derivatives of the largest numbers.

    Where the exact formula of the derivative overflows, the expected value is that at +-1e4.
    """
    info = np.finfo(dtype)
    numbers = [10.0**k for k in np.linspace(4, np.log10(info.max) - 1, 40)]
    x = np.array([*numbers, info.max / 2, info.max])
    x = np.concatenate([x, -x]).astype(dtype)
    wide = x.astype(np.float64)
    tolerance = {"rtol": 2 * info.eps, "atol": 1e-36}
    value, derivative = op.both(jnp.asarray(x))
    exact = op.exact(0, wide, dtype)
    kept = np.abs(exact) <= info.max  # values overflow where the slope is more than 1
    np.testing.assert_allclose(np.asarray(value)[kept], exact[kept], **tolerance)
    exact, moderate = (op.exact(1, a, dtype) for a in (wide, np.clip(wide, -1e4, 1e4)))
    exact = np.where(np.isfinite(exact), exact, moderate)
    np.testing.assert_allclose(np.asarray(derivative), exact, **tolerance)


@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
def test_largest_float32(op):
    largest(op, "float32")


@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
def test_largest_float64(op):
    largest(op, "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
def test_derivative_is_multiplied_by_the_cotangent(op, dtype):
    x = jax.device_put(np.linspace(-4, 4, 77).astype(dtype))
    ct = jax.device_put(rng_for(str(op), dtype).standard_normal(77).astype(dtype))

    @jax.jit
    def run(x, ct):
        y, pull = jax.vjp(lambda x: op.row.function(x, *op.parameters), x)
        tangent = jax.jvp(lambda x: op.row.function(x, *op.parameters), (x,), (ct,))
        return y, pull(ct)[0], tangent

    y, dx, tangent = run(x, ct)
    assert_same(tangent[0], y)
    assert_same(tangent[1], dx)
    exact = op.exact(1, np.asarray(x, np.float64), dtype) * np.asarray(ct, np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(dx, np.float64), exact, rtol=16 * eps, atol=16 * eps)


# --- arithmetic -----------------------------------------------------------------------------------


def any_bits(rng, count, dtype) -> np.ndarray:
    return rng.integers(0, 2**16, size=count, dtype=np.uint16).view(jnp.dtype(dtype))


def random_operands(key, count, dtype, operands=2) -> list[np.ndarray]:
    """Random bit patterns; in the second half, the first and last operand have close magnitudes."""
    rng = rng_for(key, dtype)
    arrays = [any_bits(rng, count, dtype) for _ in range(operands)]
    near = rng.integers(0, 200, size=count // 2, dtype=np.uint16)
    sign = rng.integers(0, 2, size=count // 2, dtype=np.uint16) << 15
    first, last = (arrays[i].view(np.uint16) for i in (0, -1))
    half = slice(count - count // 2, None)
    last[half] = (first[half] + near) ^ sign
    return arrays


def free_of_subnormals(dtype, *arrays) -> np.ndarray:
    """Mask of elements without bfloat16 subnormals, which are subnormal in float32, too."""
    keep = np.ones(arrays[0].shape, bool)
    if dtype == "bfloat16":
        for a in arrays:
            keep &= (a == 0) | ~(np.abs(a) < 1.2e-38)
    return keep


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(ARITHMETIC, NARROW)])
def test_16_bit_arithmetic_is_rounded_once(name, dtype):
    x, y = random_operands(name, 1_000_001, dtype)
    result = np.asarray(ARITHMETIC[name].function(jnp.asarray(x), jnp.asarray(y)))
    wide = x.astype(np.float64), y.astype(np.float64)
    expected = oracle.rounded(ARITHMETIC[name].exact(*wide), jnp.dtype(dtype))
    keep = free_of_subnormals(dtype, *wide, expected.astype(np.float64))
    assert keep.mean() > 0.9
    assert_same(result[keep], expected[keep], x[keep], y[keep])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_16_bit_arithmetic_with_a_scalar(name, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    f = jax.jit(ARITHMETIC[name].function)
    for number in (0.0, -0.0, 1.0, -3.0, 0.1, 1e-3, 7e4, np.inf, np.nan):
        scalar = np.asarray(number, jnp.dtype(dtype))
        for operands in ((x, scalar), (scalar, x)):
            wide = np.broadcast_arrays(*(a.astype(np.float64) for a in operands))
            expected = oracle.rounded(ARITHMETIC[name].exact(*wide), jnp.dtype(dtype))
            keep = free_of_subnormals(dtype, *wide, expected.astype(np.float64))
            assert_same(np.asarray(f(*operands))[keep], expected[keep], x[keep])


@pytest.mark.parametrize("dtype", NARROW)
def test_16_bit_fma(dtype, record_property):
    x, y, z = random_operands("fma", 1_000_001, dtype, 3)
    result = np.asarray(jof.fma(*map(jnp.asarray, (x, y, z))))
    wide = [a.astype(np.float64) for a in (x, y, z)]
    product = wide[0] * wide[1]  # exact
    expected = oracle.rounded_sum(product, wide[2], jnp.dtype(dtype))
    keep = free_of_subnormals(dtype, *wide, product, expected.astype(np.float64))
    nan = [np.isnan(a.astype(np.float64)) for a in (result, expected)]
    report(keep & (nan[0] != nan[1]), result, expected, x, y, z)
    distance = np.abs(ordinal(result) - ordinal(expected))
    distance = np.where(keep & ~nan[1], distance, 0)
    record_property(f"fma {dtype}", int(distance.max()))
    report(distance > 1, result, expected, x, y, z)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_wide_arithmetic(name, dtype):
    rng = rng_for(name, dtype)
    x, y = (np.ldexp(rng.standard_normal(50_001), rng.integers(-40, 40, 50_001)) for _ in "xy")
    x, y = (np.concatenate([a, b]) for a, b in zip((x, y), pairs_of_special(), strict=True))
    x, y = x.astype(dtype), y.astype(dtype)
    expected = ARITHMETIC[name].exact(x, y)
    assert_same(ARITHMETIC[name].function(jnp.asarray(x), jnp.asarray(y)), expected, x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_fma_is_rounded_once(dtype):
    """x * y - round(x * y) is the product's rounding error; rounding the product first gives 0."""
    rng = rng_for("fma", dtype)
    x, y = (rng.standard_normal(20_001).astype(dtype) for _ in "xy")
    z = -(x * y)
    result = np.asarray(jof.fma(*map(jnp.asarray, (x, y, z))), np.float64)
    if dtype == "float32":
        expected = x.astype(np.float64) * y.astype(np.float64) + z
        np.testing.assert_array_equal(result, expected)
    else:
        expected = [split_product_residue(*pair) for pair in zip(x, y, strict=True)]
        np.testing.assert_array_equal(result, np.array(expected))


def split_product_residue(x: float, y: float) -> float:
    """x * y - round(x * y), computed with Python's exact integer ratios."""
    (a, b), (c, d) = (float(v).as_integer_ratio() for v in (x, y))
    e, f = float(x * y).as_integer_ratio()
    return (a * c * f - e * b * d) / (b * d * f)


def pairs_of_special() -> tuple[np.ndarray, np.ndarray]:
    numbers = (0.0, -0.0, 1.0, -2.0, 3.5, np.inf, -np.inf, np.nan)
    x, y = zip(*itertools.product(numbers, repeat=2), strict=True)
    return np.array(x), np.array(y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_gradients_of_arithmetic_are_those_of_jax(name, dtype):
    rng = rng_for(name, dtype, "gradient")
    x, y = (np.concatenate([3 * rng.standard_normal(1001), a]) for a in pairs_of_special())
    y[:100] = x[:100]  # ties
    x, y = (np.tile(a, 4).astype(dtype) for a in (x, y))
    ct = rng.standard_normal(x.size)
    if ARITHMETIC[name].linear:  # for a maximum, jax multiplies by 0, which makes NaNs of these
        for i, number in enumerate((0.0, np.inf, np.nan)):
            ct[i * (x.size // 4) : (i + 1) * (x.size // 4)] = number
    ct = ct.astype(dtype)
    rtol = 8 * float(jnp.finfo(dtype).eps)

    def compared(f):
        @jax.jit
        def run(x, y, ct):
            _, pull = jax.vjp(f, x, y)
            _, pull_x = jax.vjp(lambda x: f(x, y), x)
            _, pull_y = jax.vjp(lambda y: f(x, y), y)
            tangent = jax.jvp(f, (x, y), (ct, ct[::-1]))[1]
            return *pull(ct), *pull_y(ct), *pull_x(ct), *pull_y(ct[::-1]), tangent

        return [np.asarray(r) for r in run(x, y, ct)]

    *cotangents, tangent = compared(ARITHMETIC[name].function)
    *wanted, _ = compared(ARITHMETIC[name].replaces)
    for i, (actual, expected) in enumerate(zip(cotangents, wanted, strict=True)):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=rtol, err_msg=f"result {i}")
    first, second = wanted[-2:]  # the terms of the tangent, which may cancel
    assert_same_special(tangent, first + second, x, y, ct)
    error, bound = np.abs(tangent - (first + second)), rtol * (np.abs(first) + np.abs(second))
    report(np.isfinite(first + second) & ~(error <= bound), tangent, first + second, x, y, ct)


# --- all ops of several arrays --------------------------------------------------------------------


def value_and_cotangents(op: Op, operands, ct) -> dict[str, jax.Array]:
    y, pull = jax.vjp(op.function, *map(jnp.asarray, operands))
    return {"f": y} | {f"d{i}": d for i, d in zip(op.wrt, pull(jnp.asarray(ct)), strict=True)}


def exact_value_and_cotangents(op: Op, operands, ct) -> dict[str, np.ndarray]:
    cotangents = zip(op.wrt, op.pullback(ct, *operands), strict=True)
    return {"f": op.exact(*operands)} | {f"d{i}": d for i, d in cotangents}


def places_of_numbers():
    """(op, operand) for ops of several arrays without a condition."""
    for op in ELEMENTWISE_OPS:
        if len(op.arrays) > 1 and {*op.domain} <= {REAL, POSITIVE}:
            for i in op.arrays:
                yield pytest.param(op, i, id=f"{op}-{i}")


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("op", "place"), [*places_of_numbers()])
def test_all_16_bit_values_of_an_operand(op, place, dtype, record_property):
    """One operand takes every 16-bit value; the others are of moderate size."""
    dtype = jnp.dtype(dtype)
    rng = rng_for(op.name, place, str(dtype))
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    every = np.concatenate([every, (3 * rng.standard_normal(100_000)).astype(dtype)])
    every = every[np.isfinite(every.astype(np.float64))]
    operands = [(2 * rng.standard_normal(every.size)).astype(dtype) for _ in op.domain]
    operands[place] = every
    ct = rng.uniform(-1, 1, every.size).astype(dtype)  # products with it do not overflow
    results = value_and_cotangents(op, operands, ct)
    wide = [a.astype(np.float64) for a in operands]
    exact = exact_value_and_cotangents(op, wide, ct.astype(np.float64))
    # Near a root of a derivative its terms cancel. Rounding the terms in float32 has the effect of
    # a float32 rounding error in an operand, so `slack` allows for that.
    nearby = [[*wide[:i], x * (1 + 2.0**-24), *wide[i + 1 :]] for i, x in enumerate(wide)]
    moved = [exact_value_and_cotangents(op, xs, ct.astype(np.float64)) for xs in nearby]
    subnormal = [(x != 0) & (np.abs(x) < SMALLEST_NORMAL) for x in wide]
    divisors = [s for s, domain in zip(subnormal, op.domain, strict=True) if domain == POSITIVE]
    overflows = np.abs(exact["f"]) > float(jnp.finfo(dtype).max)
    for key, expected in exact.items():
        value = key == "f"
        slack = 0 if value else sum(np.abs(other[key] - expected) for other in moved)
        # A subnormal operand may be flushed to 0. Where a value overflows, the intermediates of its
        # derivatives may overflow, too.
        unsure = np.any(divisors if value else [overflows, *subnormal], axis=0)
        expected = np.where(unsure, np.nan, expected)
        floor, bound = op.floor[not value], op.ulps or 0.5
        ulps = assert_accurate(
            results[key], expected, floor, *operands, ct, ulps=bound, slack=slack
        )
        record_property(f"{op} {key} {dtype}", ulps)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("name", INEXACT)
def test_wide_values_of_two_arrays(name, dtype, rtol):
    rng = rng_for(name, dtype)
    arrays = [2 * rng.standard_normal(20_001).astype(dtype) for _ in range(3)]
    op = INEXACT[name]
    results = value_and_cotangents(op, arrays[:2], arrays[2])
    *operands, ct = (a.astype(np.float64) for a in arrays)
    # The derivative with respect to a linear operand is as accurate as the value.
    accurate = {"f", *(f"d{i}" for i in op.wrt if (i,) in op.linear)}
    for key, exact in exact_value_and_cotangents(op, operands, ct).items():
        atol = rtol if key in accurate else 20 * rtol
        np.testing.assert_allclose(results[key], exact, rtol=100 * rtol, atol=atol, err_msg=key)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", INEXACT)
def test_gradient_of_two_arrays_is_one_custom_call(name, dtype):
    f, linear = INEXACT[name].function, INEXACT[name].linear
    x = jnp.ones((3, 5), dtype)

    def calls(wrt):
        def gradient(x, gate, ct):
            operands = [x, gate]

            def of_some(*some):
                for i, v in zip(wrt, some, strict=True):
                    operands[i] = v
                return f(*operands)

            return jax.vjp(of_some, *(operands[i] for i in wrt))[1](ct)

        text = jax.jit(gradient).lower(x, x, x).compile().as_text()
        total = text.count('custom_call_target="')
        assert total == text.count('custom_call_target="jof_')
        return total, text.count(f'custom_call_target="jof_{name}_vjp"')

    assert calls((0, 1)) == (1, 1)
    for i in (0, 1):  # the gradient of a linear operand is a call of the function itself
        assert calls((i,)) == (1, 0 if (i,) in linear else 1)


# --- scalars --------------------------------------------------------------------------------------

FLOAT_DTYPES = tuple(map(jnp.dtype, FLOATS))
SCALARS = {
    "float": 1.5,
    "int": 2,
    "bool": True,
    "NumPy float32": np.float32(1.5),
    "NumPy float64": np.float64(0.3),
    "NumPy int8": np.int8(3),
    "NumPy 0-d": np.array(1.5, np.float16),
    "jax 0-d": np.array(0.25, np.float32),
}


def coarsest(operands) -> float:
    """Tolerance for JAX's function, which rounds every step to the operands' dtypes."""
    dtypes = [jnp.dtype(x.dtype) for x in operands if hasattr(x, "dtype")]
    return 16 * max([float(jnp.finfo(d).eps) for d in dtypes if d in FLOAT_DTYPES], default=1e-7)


def assert_close(actual, expected, tolerance=None, message="") -> None:
    """Asserts equal dtypes, and values within `tolerance` both absolutely and relatively."""
    dtype = jnp.asarray(expected).dtype
    assert actual.dtype == dtype, message
    if not jnp.issubdtype(dtype, jnp.inexact):
        np.testing.assert_array_equal(actual, expected, err_msg=str(message))
        return
    if tolerance is None:
        # JAX's function rounds every step in 16-bit types.
        tolerance = 8 * float(jnp.finfo(dtype).eps)
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = (np.asarray(v).astype(wide) for v in (actual, expected))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=str(message))


def arrangements(name):
    """All choices of scalar operands with at least one scalar."""
    count = OPS[name][2]
    choices = [c for c in itertools.product((False, True), repeat=count) if any(c)]
    return [c for c in choices if c[-1]] if name in PARAMETRIC else choices


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", "float32"), *zip(SCALARS, itertools.cycle(("bfloat16", "float32")), strict=False)],
)
def test_scalars(kind, dtype):
    number = jnp.asarray(SCALARS[kind]) if kind.startswith("jax") else SCALARS[kind]
    x = jnp.asarray(np.linspace(-2, 2, 9), dtype)

    def takes(name, choice) -> bool:
        """Whether JAX accepts the operands: its sigmoid refuses integers, its subtract booleans."""
        try:
            jax.eval_shape(lambda: OPS[name][1](*(number if scalar else x for scalar in choice)))
        except TypeError:
            return False
        return True

    cases = {name: [c for c in arrangements(name) if takes(name, c)] for name in OPS}

    def run(which):
        return [
            OPS[name][which](*(number if scalar else x for scalar in choice))
            for name, choices in cases.items()
            for choice in choices
        ]

    values = [jax.jit(functools.partial(run, which))() for which in (0, 1)]
    keys = [(name, choice) for name, choices in cases.items() for choice in choices]
    for key, actual, expected in zip(keys, *values, strict=True):
        assert actual.shape == expected.shape, key
        assert_close(actual, expected, coarsest([x, number]), key)


@pytest.mark.parametrize("name", KERNELS)
def test_eager_and_traced_scalars(name):
    f, twin, count = OPS[name]
    x = jnp.asarray(np.linspace(-2, 2, 9), "float32")
    traced = jax.jit(f)
    calls = [
        [number if scalar else x for scalar in choice]
        for choice, number in zip(
            arrangements(name), itertools.cycle((1.5, np.float32(1.5))), strict=False
        )
    ]
    for operands, expected in zip(
        calls, jax.jit(lambda: [twin(*xs) for xs in calls])(), strict=True
    ):
        assert_close(f(*operands), expected)
        assert_close(traced(*operands), expected)
    assert count == len(calls[0])


@pytest.mark.parametrize("name", KERNELS)
def test_vmapped_scalars(name):
    f, twin, count = OPS[name]
    rng = rng_for(name, "vmap")
    x = jnp.asarray(rng.standard_normal((4, 6)), "float32")
    scalars = jnp.asarray(rng.standard_normal(4), "float32")

    def mapped(f):
        for choice in arrangements(name):
            assert count == len(choice)
            operands = [scalars if scalar else x for scalar in choice]
            yield jax.vmap(f)(*operands)
            # Maps over the scalars alone, or over all other operands.
            if not all(choice):
                axes = [0 if scalar else None for scalar in choice]
                yield jax.vmap(f, in_axes=axes)(*operands)
                axes = [None if scalar else 1 for scalar in choice]
                operands = [scalars[0] if scalar else x for scalar in choice]
                yield jax.vmap(f, in_axes=axes, out_axes=1)(*operands)

    results = [jax.jit(lambda g=g: [*mapped(g)])() for g in (f, twin)]
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PARAMETRIC)
def test_static_and_traced_parameters_give_the_same_bits(name, dtype):
    f = OPS[name][0]
    x = jnp.asarray(rng_for(name, dtype).standard_normal(1001), dtype)

    def of(x, alpha):
        y, pull = jax.vjp(lambda x: f(x, alpha), x)
        return y, *pull(x[::-1])

    jitted, alphas = jax.jit(of), (0.3, -1.7, 0.0)
    results = jax.jit(lambda x: [of(x, number) for number in alphas])(x)
    for alpha, static in zip(alphas, results, strict=True):
        for traced in (alpha, np.asarray(alpha, x.dtype)):
            for a, b in zip(jitted(x, traced), static, strict=True):
                assert_same(a, b)
    for a, b in zip(of(x, alpha), static, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PARAMETRIC)
def test_gradient_of_the_parameter(name, dtype):
    f, twin, _ = OPS[name]
    x = jnp.asarray(rng_for(name).standard_normal(101), dtype)
    alpha = jnp.asarray(0.7, dtype)

    def gradients(f):
        return jax.jit(jax.grad(lambda x, a: jnp.sum(f(x, a) * x), (0, 1)))(x, alpha)

    for a, b in zip(gradients(f), gradients(twin), strict=True):
        assert_close(a, b, 4 * float(jnp.finfo(dtype).eps) if dtype == "bfloat16" else 1e-5)


# --- dtypes ---------------------------------------------------------------------------------------

KINDS = ("bool", "int8", "int32", *NARROW, "float32", int, float)


def operand_of(kind, scalar: bool):
    if kind is int:
        return 2
    if kind is float:
        return 0.75
    values = np.array([1, 0, 2, 1]).astype(jnp.dtype(kind))
    return jax.device_put(values[0] if scalar else values)


def promotions(name):
    """(kinds, operands, type of JAX's result) for all kinds of operands that JAX accepts."""
    f, twin, count = OPS[name]
    for kinds in itertools.product(KINDS, repeat=min(count, 2)):
        kinds = kinds if count < 3 else (*kinds, kinds[0])
        scalars = [name in PARAMETRIC and i == count - 1 for i in range(count)]
        operands = [operand_of(*pair) for pair in zip(kinds, scalars, strict=True)]
        try:
            expected = jax.eval_shape(lambda operands=operands: twin(*operands))
        except TypeError:
            with pytest.raises(TypeError):
                jax.eval_shape(lambda operands=operands: f(*operands))
        else:
            yield kinds, operands, expected


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(OPS, [False]),
        *((name, True) for name in ("elu", "add", "divide", "fma", "where")),
        *(
            pytest.param(name, True, marks=pytest.mark.exhaustive)
            for name in ("relu", "silu", "swiglu")
        ),
    ],
    ids=lambda p: p if isinstance(p, str) else "x64" if p else "x32",
)
def test_promotion(name, mode):
    f, twin, count = OPS[name]
    with jax.enable_x64(mode):
        accepted = [*promotions(name)]
        assert len(accepted) > 3
        for kinds, operands, expected in accepted:
            actual = jax.eval_shape(lambda operands=operands: f(*operands))
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), kinds
            assert mode or actual.weak_type == expected.weak_type, kinds
        if mode:
            return
        some = accepted[:: 1 if count == 1 else 5]  # compiling all takes long
        results = [
            jax.jit(lambda g=g: [g(*operands) for _, operands, _ in some])() for g in (f, twin)
        ]
        for (kinds, operands, _), actual, expected in zip(some, *results, strict=True):
            assert_close(actual, expected, coarsest(operands), kinds)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jof.add(x, 0.1),
        lambda x: jof.scale(x, 0.1),
        lambda x: jof.fma(x, 0.1, 0.3),
        jof.leaky_relu,
        lambda x: jof.elu(x, 0.1),
        lambda x: jof.maximum(x, 0.1),
        lambda x: jof.where(np.array([True, False, True]), x, 0.1),
        lambda x: jof.cast(x, "float64"),
    ],
)
def test_numbers_beside_arrays_of_64_bits_where_those_are_disabled(f):
    with jax.enable_x64(True):
        x = jnp.array([-1.7, 0.3, 2.9])
        expected = f(x), *jax.vjp(f, x)[1](x)
    with jax.enable_x64(False):
        actual = f(x), *jax.vjp(f, x)[1](x)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)
        assert a.dtype == np.float64


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "scale", "fma", "where"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "int32", "uint8", "float8_e5m2"])
def test_other_dtypes_run_the_reference(name, dtype):
    f, twin, count = OPS[name]
    x = jax.device_put(np.array([1, 2, 3, 1]).astype(dtype))
    if name == "where":
        operands = [x > jnp.asarray(1, dtype) if dtype[0] != "c" else x != 1, x, x[::-1]]
    else:
        operands = [x, *(x[::-1],) * (count - 1)]
    if name == "scale":
        operands[1] = x[1]
    assert_close(f(*operands), twin(*operands))
    text = jax.jit(f).lower(*operands).as_text()
    # `where` moves any dtype, and a quotient of integers is a float.
    native = name == "where" or (name == "divide" and dtype in ("int32", "uint8"))
    assert ("jof_" in text) == native


def test_complex_tanh_runs_the_reference():
    x = jnp.asarray([0.5 + 1j, -2j], "complex64")
    assert_close(jof.tanh(x), jnp.tanh(x))


# --- errors ---------------------------------------------------------------------------------------


def shapes_of(name, *, parameter=()):
    """Shapes that fit: a parameter's is the last one."""
    count = OPS[name][2]
    return [*((3,),) * (count - 1), parameter if name in PARAMETRIC else (3,)]


@pytest.mark.parametrize("name", [name for name in OPS if name != "where"])
def test_native_without_a_kernel(name):
    f = OPS[name][0]
    operands = [jnp.ones(shape, "int32") for shape in shapes_of(name)]
    try:
        produced = OPS[name][1](*operands).dtype
    except TypeError:  # jax refuses integers
        with pytest.raises(TypeError):
            f(*operands, implementation="native")
        return
    if jnp.issubdtype(produced, jnp.floating):
        f(*operands, implementation="native")  # promoted to what has a kernel
        return
    with pytest.raises(TypeError, match=rf"\b{BY_NAME[name].public_name}.*float16.*int32"):
        f(*operands, implementation="native")


def test_native_integers_without_a_kernel():
    with pytest.raises(TypeError, match=r"\badd\b.*float16, bfloat16.*int32"):
        jof.add(jnp.arange(3, dtype="int32"), 1, implementation="native")
    with pytest.raises(TypeError, match=r"\brelu\b.*float16, bfloat16.*int32"):
        jof.relu(jnp.arange(3, dtype="int32"), implementation="native")


NO_ARRAYS = ([1.0, 2.0, 3.0], (1.0,) * 3, None, "x", {}, object())


@pytest.mark.parametrize("bad", NO_ARRAYS, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", OPS)
def test_no_arrays(name, bad):
    f, _, count = OPS[name]
    for i in range(count):
        operands = [jnp.ones(shape) for shape in shapes_of(name)]
        operands[i] = bad
        with pytest.raises(
            TypeError, match=rf"\b{BY_NAME[name].public_name}.*{type(bad).__name__}"
        ):
            f(*operands)


@pytest.mark.parametrize("name", [name for name in OPS if OPS[name][2] > 1])
def test_shapes_that_do_not_fit(name):
    f, _, count = OPS[name]
    for shape in ((4,), (0,), (3, 2)):
        for i in range(count):
            operands = [jnp.ones(3)] * count
            operands[i] = jnp.ones(shape)
            with pytest.raises(ValueError, match=rf"\b{BY_NAME[name].public_name}\w*:.*broadcast"):
                f(*operands)


@pytest.mark.parametrize("implementation", ["cuda", "cpu", True, 1, []])
@pytest.mark.parametrize("name", OPS)
def test_unknown_implementation(name, implementation):
    operands = [jnp.ones(shape) for shape in shapes_of(name)]
    with pytest.raises(ValueError, match=rf"\b{BY_NAME[name].public_name}.*implementation"):
        OPS[name][0](*operands, implementation=implementation)


# --- shapes and buffers ---------------------------------------------------------------------------


def operands_of(name, shape, dtype, *key) -> list[np.ndarray]:
    rng = rng_for(name, dtype, *key)
    count = OPS[name][2]
    operands = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(count)]
    if name in PARAMETRIC:
        operands[-1] = np.asarray(0.75, jnp.dtype(dtype))
    if name == "where":
        operands[0] = rng.standard_normal(shape) > 0
    return operands


def gradients_of(name, operands, ct):
    """The cotangents of all arrays that have gradients."""
    f = OPS[name][0]
    first = 1 if name == "where" else 0
    last = -1 if name in PARAMETRIC else len(operands)
    arrays = operands[first:last]
    head, tail = operands[:first], operands[last:] if last < 0 else []
    _, pull = jax.vjp(lambda *arrays: f(*head, *arrays, *tail), *arrays)
    return pull(ct)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in KERNELS),
        *itertools.product(("silu", "add"), ("float16", "float32", "float64")),
    ],
)
def test_sizes(name, dtype):
    """Arrays of any size give the results of one large array. The C++ tests cover more sizes."""
    sizes = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, *(2**k + d for k in (6, 10, 15) for d in (-1, 0, 1))]
    whole = operands_of(name, (sizes[-1],), dtype)
    ct = rng_for(name, "ct").standard_normal(sizes[-1]).astype(jnp.dtype(dtype))

    def part(a, size):
        return a[:size] if np.ndim(a) else a

    @jax.jit
    def run(parts, cts):
        return [
            (OPS[name][0](*operands), *gradients_of(name, operands, ct))
            for operands, ct in zip(parts, cts, strict=True)
        ]

    results = run([[part(a, n) for a in whole] for n in sizes], [part(ct, n) for n in sizes])
    expected = [np.asarray(r) for r in results[-1]]
    for size, result in zip(sizes, results, strict=True):
        for actual, wanted in zip(result, expected, strict=True):
            assert_near_bits(actual, wanted[:size])
    twin = OPS[name][1](*map(jax.device_put, whole))
    assert_close(expected[0], twin, 8 * float(jnp.finfo(dtype).eps))


def assert_near_bits(actual, expected) -> None:
    """Asserts equality up to rounding: the ends of arrays may be computed without an FMA."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    eps = float(jnp.finfo(actual.dtype).eps)
    wide = [a.astype(np.float64) for a in (actual, expected)]
    np.testing.assert_allclose(*wide, rtol=2 * eps, atol=eps / 64)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (0, 3), (3, 0, 2), (5, 7), (1, 2, 1, 3, 2, 1, 2, 5)]
)
def test_shapes(shape):
    operands = {name: operands_of(name, shape, "float32") for name in KERNELS}
    ct = np.ones(shape, "float32")

    @jax.jit
    def run(operands):
        return {
            name: (OPS[name][0](*args), OPS[name][1](*args), gradients_of(name, args, ct))
            for name, args in operands.items()
        }

    for actual, expected, gradients in run(operands).values():
        assert actual.shape == shape
        assert_close(actual, expected, 3e-6)
        for gradient in gradients:
            assert gradient.shape == shape
            assert gradient.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_parts_of_buffers(name, dtype):
    """The compiler may pass a kernel a pointer to the middle of a buffer."""
    operands = operands_of(name, (1001,), dtype)
    f = OPS[name][0]
    expected = np.asarray(f(*operands))

    ends = ((1, None), (3, 999), (0, 77), (5, 6), (8, -8))

    @jax.jit
    def run(operands):
        def part(a, begin, end):
            return a[begin:end] if np.ndim(a) else a

        one = [f(*(part(a, *e) for a in operands)) for e in ends]
        mixed = [f(*(part(a, i, 900 + i) for i, a in enumerate(operands)))]
        return one, mixed, [jnp.concatenate([one[0], one[1]])]

    one, mixed, joined = run(operands)
    for result, (begin, end) in zip(one, ends, strict=True):
        assert_near_bits(result, expected[begin:end])
    shifted = [a[i : 900 + i] if a.ndim else a for i, a in enumerate(operands)]
    assert_near_bits(mixed[0], f(*shifted))
    assert_near_bits(joined[0], np.concatenate([expected[1:], expected[3:999]]))


def test_derivatives_of_pullbacks_of_many_cotangents():
    """Derivatives of a pullback that is vmapped over cotangents; only these have a batch axis."""
    x, gate = rng_for("pullbacks").standard_normal((2, 3, 5))
    cts = rng_for("cotangents").standard_normal((4, 3, 5))

    def loss(f, *args):
        *arrays, cts = args
        results = jax.vmap(jax.vjp(f, *arrays)[1])(cts)
        return sum(jnp.sum(jnp.sin(y)) for y in results)

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(x, gate, cts)
        for f in (jof.swiglu, BY_NAME["swiglu"].replaces)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), ours, theirs
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["silu", "relu", "add", "multiply", "swiglu", "fma"])
def test_donated_operands(name, dtype):
    """A result may overwrite a donated operand."""
    f, _, count = OPS[name]
    for donated in range(count):
        operands = [jnp.asarray(a) for a in operands_of(name, (4099,), dtype)]
        expected = np.asarray(f(*operands))
        given_away = operands[donated]
        result = jax.jit(f, donate_argnums=donated)(*operands)
        assert_same(result, expected)
        assert given_away.is_deleted()


@pytest.mark.parametrize("name", KERNELS)
def test_large_arrays(name):
    """An odd size, large enough to be split among threads."""
    operands = operands_of(name, (700_001,), "bfloat16")
    f, twin, _ = OPS[name]
    assert_close(jax.jit(f)(*operands), jax.jit(twin)(*operands), 3 * 2.0**-7)


def test_one_array_as_all_operands():
    x = jnp.asarray(np.linspace(-2, 2, 77), "float32")
    names = [name for name in OPS if name not in PARAMETRIC]

    def run(which):
        return jax.jit(lambda x: [OPS[n][which](*(x,) * OPS[n][2]) for n in names])(x)

    for name, actual, expected in zip(names, run(0), run(1), strict=True):
        assert_close(actual, expected, 3e-6, name)


# --- random problems ------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


def drawn(rng, shape, dtype, scalar: bool) -> np.ndarray:
    """Multiples of 1/8, so that sums of products are exact in double."""
    return np.asarray(rng.integers(-64, 65, () if scalar else shape) / 8).astype(jnp.dtype(dtype))


def widest(operands, shape):
    """The operands in double precision, broadcast together."""
    whole = np.broadcast_shapes(*(a.shape for a in operands))
    assert whole in (shape, ())
    return [np.broadcast_to(a.astype(np.float64), whole) for a in operands]


@given(
    name=st.sampled_from(sorted(ARITHMETIC)),
    dtype=st.sampled_from(FLOATS),
    shape=shapes,
    scalars=st.tuples(st.booleans(), st.booleans()),
    seed=seeds,
)
def test_random_arithmetic(name, dtype, shape, scalars, seed):
    rng = np.random.default_rng(seed)
    operands = [drawn(rng, shape, dtype, scalar) for scalar in scalars]
    with np.errstate(all="ignore"):
        x, y = widest(operands, shape)
        expected = ARITHMETIC[name].exact(x, y)
        expected = oracle.rounded(expected, jnp.dtype(dtype)) if dtype != "float64" else expected
    result = ARITHMETIC[name].function(*operands)
    is_by_xla = shape == () and jax.default_backend() == "gpu"  # as single elements are
    if is_by_xla and (name, dtype) == ("divide", "float32"):  # within 1 ulp
        np.testing.assert_allclose(result, expected, rtol=float(jnp.finfo(dtype).eps))
    else:
        assert_same(result, expected)


@given(
    dtype=st.sampled_from(FLOATS),
    shape=shapes,
    scalars=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=seeds,
)
def test_random_fma(dtype, shape, scalars, seed):
    rng = np.random.default_rng(seed)
    operands = [drawn(rng, shape, dtype, scalar) for scalar in scalars]
    x, y, z = widest(operands, shape)
    result = np.asarray(jof.fma(*operands))
    assert result.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(result, (x * y + z).astype(result.dtype))


@given(
    dtype=st.sampled_from((*FLOATS, "bool", "int8", "int32", "uint64", "complex64", "complex128")),
    condition=st.sampled_from(("bool", "int8", "float32")),
    shape=shapes,
    scalars=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=seeds,
)
def test_random_where(dtype, condition, shape, scalars, seed):
    rng = np.random.default_rng(seed)
    chosen = np.asarray(rng.integers(0, 2, () if scalars[0] else shape)).astype(condition)
    operands = [
        np.asarray(rng.integers(0, 100, () if scalar else shape)).astype(jnp.dtype(dtype))
        for scalar in scalars[1:]
    ]
    result = np.asarray(jof.where(chosen, *operands))
    expected = np.where(chosen.astype(bool), *operands)
    assert result.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_where_moves_bits(dtype):
    dtype = jnp.dtype(dtype)
    rng = rng_for("where", str(dtype))
    bits = f"uint{8 * dtype.itemsize}"
    x, y = (rng.integers(0, 256, 5000 * dtype.itemsize, dtype=np.uint8).view(bits) for _ in "xy")
    chosen = rng.integers(0, 2, 5000).astype(bool)
    result = np.asarray(jof.where(chosen, x.view(dtype), y.view(dtype)))
    np.testing.assert_array_equal(result.view(bits), np.where(chosen, x, y))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_batches_of_gradients(implementation):
    """The cotangent of a sum has no batch axis, and a tangent need not have one either."""
    x, scalars = (jnp.linspace(-2, 2, n, dtype="float32") for n in (6, 3))
    x = x.reshape(3, 2)
    gelu = functools.partial(jof.gelu, implementation=implementation)
    plain = jax.nn.gelu
    for f, g in ((gelu, plain), (lambda x: gelu(x) ** 2, lambda x: plain(x) ** 2)):
        for transform, at in (
            (lambda f: jax.grad(lambda x: f(x).sum()), x),
            (jax.grad, scalars),
            (lambda f: jax.grad(jax.grad(f)), scalars),
            (lambda f: lambda x: jax.jvp(f, (x,), (jnp.float32(1),))[1], scalars),
        ):
            found, expected = (jax.vmap(transform(h))(at) for h in (f, g))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    empty = jax.vmap(jax.grad(lambda x: gelu(x).sum()))(jnp.ones((3, 0)))
    assert empty.shape == (3, 0)


CALLS = {
    "gelu": lambda x: jof.gelu(x),
    "swiglu": lambda x: jof.swiglu(x, x),
    "where": lambda x: jof.where(x > 0, x, 0.0),
    "cast": lambda x: jof.cast(x, jnp.bfloat16),
    "cast to a dtype": lambda x: jof.cast(x, np.dtype("int8")),
    "permute": lambda x: jof.permute(x),
    "softmax": lambda x: jof.softmax(x),
    "segment_sum": lambda x: jof.segment_sum(x, jnp.arange(4), 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_outside_of_jit_are_traced_once(name, caplog):
    x = jnp.ones((4, 6))
    CALLS[name](x)
    with jax.log_compiles():
        CALLS[name](x)
    assert not [record for record in caplog.messages if "Finished tracing" in record]
    with jax.log_compiles():
        CALLS[name](jnp.ones((4, 7)))
    assert [record for record in caplog.messages if "Finished tracing" in record]


def test_numpy_arrays_of_the_other_byte_order_are_named():
    x = np.arange(3, dtype=np.dtype("f4").newbyteorder())
    message = r"^relu: x must have a dtype that jax has, got .f4; change its byte order with"
    with pytest.raises(TypeError, match=message):
        jof.relu(x)
    np.testing.assert_array_equal(jof.relu(x.astype(x.dtype.newbyteorder())), [0, 1, 2])


def test_rank_promotion_is_that_of_jnp():
    jax.clear_caches()  # jnp warns when it is traced
    functions = {"add": 2, "multiply": 2, "maximum": 2, "swiglu": 2, "fma": 3}
    for n, (name, count) in enumerate(functions.items(), 8):
        function = getattr(jof, name)
        x, row = jnp.ones((6, n)), jnp.ones(n)
        arguments = [x, row, row][:count]
        with jax.numpy_rank_promotion("raise"):
            with pytest.raises(ValueError, match="rank_promotion"):
                function(*arguments)
            assert function(*[x, 2.0, x][:count]).shape == x.shape
        with jax.numpy_rank_promotion("warn"), pytest.warns(UserWarning, match="rank promotion"):
            function(*arguments)
    assert jof.where(x > 0, x, row).shape == x.shape  # jnp.where has no such check
