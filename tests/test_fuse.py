"""`fuse`: Python functions as one kernel."""

import functools
import math
import os
import pickle
import re

import jax
import jax.numpy as jnp
import jax.scipy.special as sp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from jax_oneflow_ops import _primitive
from jax_oneflow_ops._codegen import cache
from tests.arrays import one_in, rng_for

N = 257


def normals(*shape, key="", dtype=np.float32):
    return jax.device_put(rng_for(key, shape).standard_normal(shape).astype(dtype))


def wide(x):
    x = np.asarray(x)
    kind = x.dtype.kind
    if kind == "c":
        return x.astype(np.complex128)
    return x.astype(np.float64) if kind in "fVb" else x


def targets(f, *args):
    """The custom calls of a program."""
    return re.findall(r"custom_call @(jof_\w+)", jax.jit(f).lower(*args).as_text())


def in_float64(f):
    """The function, computed in float64."""

    def exact(*args):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, jax.jit(f)(*map(wide, args)))

    return exact


def assert_close(actual, expected, rtol, atol, few=0, what=""):
    """All but `few` elements are close."""
    a, e = wide(actual), wide(expected)
    assert a.shape == e.shape, what
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(a - e) <= atol + rtol * np.abs(e)) & (a != e)
    wrong &= ~(np.isnan(a) & np.isnan(e))
    if wrong.sum() > few:
        at = np.argwhere(wrong)[0]
        raise AssertionError(
            f"{what}: {wrong.sum()} of {a.size} differ, such as {a[tuple(at)]} and {e[tuple(at)]}"
        )


def three_orders(f):
    """A function of one array with its elementwise first and second derivatives."""

    def first(x):
        return jax.jvp(f, (x,), (jnp.ones_like(x),))

    def every(x):
        (y, dy), (_, ddy) = jax.jvp(first, (x,), (jnp.ones_like(x),))
        return y, dy, ddy

    return every


# ---- the functions of jax.nn and jax.scipy.special ----

NN = {
    name: getattr(jax.nn, name)
    for name in re.findall(
        r"\w+",
        """celu elu gelu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid mish relu relu6
        selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus tanh""",
    )
} | {
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "log1mexp": lambda x: jax.nn.log1mexp(jnp.abs(x) + 0.25),
}
SPECIAL = {name: getattr(sp, name) for name in ["erf", "erfc", "expit", "ndtr"]} | {
    "gammaln": lambda x: sp.gammaln(jnp.abs(x) + 0.1),
    "digamma": lambda x: sp.digamma(jnp.abs(x) + 0.1),
    "entr": lambda x: sp.entr(jnp.abs(x)),
    "erfinv": lambda x: sp.erfinv(0.9 * jnp.sin(x)),
    "logit": lambda x: sp.logit(jax.nn.sigmoid(x)),
    "kl_div": lambda x: sp.kl_div(jnp.abs(x) + 0.5, jnp.square(x) + 1),
    "rel_entr": lambda x: sp.rel_entr(jnp.abs(x) + 0.5, jnp.square(x) + 1),
    "xlogy": lambda x: sp.xlogy(x, jnp.abs(x) + 0.5),
    "xlog1py": lambda x: sp.xlog1py(x, jnp.abs(x)),
}
if hasattr(sp, "boxcox"):  # since release 0.10
    SPECIAL["boxcox"] = lambda x: sp.boxcox(jnp.abs(x) + 0.5, 0.3)
    SPECIAL["boxcox1p"] = lambda x: sp.boxcox1p(jnp.abs(x), 0.3)
JNP = {
    name: getattr(jnp, name)
    for name in re.findall(
        r"\w+",
        """exp exp2 expm1 sin cos tan sinh cosh arctan arcsinh cbrt square abs sign floor ceil round
        trunc rint""",
    )
} | {
    "log": lambda x: jnp.log(jnp.abs(x) + 0.1),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "log2": lambda x: jnp.log2(jnp.abs(x) + 0.1),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x) + 0.1),
    "arcsin": lambda x: jnp.arcsin(0.9 * jnp.sin(x)),
    "arccos": lambda x: jnp.arccos(0.9 * jnp.sin(x)),
    "arctanh": lambda x: jnp.arctanh(0.9 * jnp.sin(x)),
    "arccosh": lambda x: jnp.arccosh(jnp.abs(x) + 1.5),
    "arctan2": lambda x: jnp.arctan2(x, x * x + 0.5),
    "hypot": lambda x: jnp.hypot(x, jnp.float32(2)),
    "power": lambda x: jnp.power(jnp.abs(x) + 0.1, 1.7),
    "integers": lambda x: x**3 - x**-2 + x**7.0,
    "clip": lambda x: jnp.clip(x, -0.5, 1.25),
    "remainder": lambda x: jnp.remainder(x, 0.7),
    "fmod": lambda x: jnp.fmod(x, 0.7),
    "minimum": lambda x: jnp.minimum(jnp.maximum(x, -x / 3), 1 / (1 + x * x)),
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
    "nan_to_num": lambda x: jnp.nan_to_num(x),
}


def batches(functions, size=16):
    """Groups of functions, each to be compiled as one kernel with several results."""
    items = [*functions.items()]
    return [dict(items[k : k + size]) for k in range(0, len(items), size)]


@pytest.mark.parametrize(
    ("dtype", "functions", "count"),
    [
        *(("float32", b, 3) for b in batches(NN | SPECIAL)),
        *(("float32", b, 2) for b in batches(JNP)),
        *(pytest.param("bfloat16", b, 2, marks=pytest.mark.exhaustive) for b in batches(NN)),
    ],
    ids=lambda p: p if isinstance(p, str) else str(p) if isinstance(p, int) else next(iter(p)),
)
def test_functions(functions, dtype, count):
    """Second derivatives consist of functions in JNP, so those of JNP itself need no test."""

    def f(x):
        return [g(x) for g in functions.values()]

    x = jnp.linspace(-6.03, 6, N).astype(dtype)

    def orders(f):
        return lambda x: three_orders(f)(x)[:count]

    actual = jax.jit(orders(jof.fuse(f)))(x)
    exact = in_float64(orders(f))(x)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-23
    for order, (ours, oracle) in enumerate(zip(actual, exact, strict=True)):
        for name, a, e in zip(functions, ours, oracle, strict=True):
            assert a.dtype == dtype
            # In bfloat16, errors are about 2^-15 relative to terms that a sum may cancel.
            size = np.nanmax(np.abs(np.where(np.isfinite(e), e, 0)), initial=1)
            atol = size * (2.0**-12 if dtype == "bfloat16" else 2.0**-19)
            assert_close(a, e, (32 if order else 8) * unit, atol, few=2, what=f"{name}, {order}")


@pytest.mark.exhaustive
def test_gamma_functions_are_those_of_scipy():
    """JAX's polygamma is wrong for negative and for large numbers."""
    sizes = np.concatenate([np.linspace(0.03, 59.9, 401), np.logspace(-12, 15, 97)])
    x = np.concatenate([sizes, -sizes[:401], [np.inf, np.nan]]).astype(np.float32)

    def f(x):
        of_zeta = sp.zeta(jnp.asarray(2.5, x.dtype), jnp.abs(x))
        return sp.gammaln(x), sp.digamma(x), sp.polygamma(1, x), sp.polygamma(2, x), of_zeta

    of_scipy = scipy.special
    exact = wide(x)
    expected = [of_scipy.gammaln(exact), of_scipy.digamma(exact)]
    expected += [of_scipy.polygamma(n, exact) for n in (1, 2)]
    expected += [of_scipy.zeta(2.5, np.abs(exact))]
    for a, e in zip(jof.fuse(f)(x), expected, strict=True):
        assert_close(a, e, 4e-6, 4e-6)
    with jax.enable_x64(True):
        for a, e in zip(jof.fuse(f)(exact), expected, strict=True):
            assert_close(a, e, 1e-13, 1e-13)
    poles = jnp.asarray([0.0, -0.0, -1, -2])
    expected = [*f(poles)]
    expected[1] = expected[1].at[:2].set(-jnp.inf)  # NaN in older releases
    for a, e in zip(jof.fuse(f)(poles), expected, strict=True):
        assert_close(a, e, 1e-6, 0)
    # Infinite exponents are left out: XLA's result for them depends on the platform.
    s, q = np.meshgrid([-2, 0, 1, 2, 3, np.nan], [0, -0.5, -1, 2, np.nan])
    s, q = (jnp.asarray(x.astype(np.float32)) for x in (s, q))
    assert_close(jof.fuse(lambda s, q: sp.zeta(s, q))(s, q), sp.zeta(s, q), 1e-6, 0)


@pytest.mark.exhaustive
def test_values_are_those_of_jax_where_there_are_no_numbers():
    """NaN, infinities, zeros of both signs, numbers too large for exp."""

    def f(x, y):
        return (
            jnp.maximum(x, y), jnp.minimum(x, y), jnp.clip(x, -1, 1), jnp.sign(x), -x, abs(x),
            x / y, jax.nn.relu(x), jnp.where(x > y, x, y), jnp.isfinite(x), jnp.isnan(x),
            jnp.exp(x), jnp.log(x), jnp.sqrt(x), jax.nn.sigmoid(x), jnp.tanh(x),
        )  # fmt: skip

    def g(x, y):
        return (
            jnp.log1p(x), jnp.expm1(x), sp.erf(x), sp.erfc(x), jax.nn.softplus(x),
            1 - jax.nn.sigmoid(x), 1 + jnp.tanh(x), 1 - jnp.tanh(x), x**2, x**-1,
            jnp.floor(x), jnp.round(x), jnp.copysign(x, y), jnp.nextafter(x, y), jnp.signbit(x),
            jnp.logaddexp(x, y),
        )  # fmt: skip

    values = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 100, -100, 0.5, -0.5, 3e38])
    x, y = (jax.device_put(v.astype(np.float32)) for v in np.meshgrid(values, values))
    for h in (f, g):
        for k, (a, e) in enumerate(zip(jof.fuse(h)(x, y), jax.jit(h)(x, y), strict=True)):
            assert_close(a, e, 2e-6, 1e-37, what=f"{h.__name__} {k}")
            same = (
                np.asarray((a != 0) | (jnp.signbit(a) == jnp.signbit(e))) if a.dtype != bool else 1
            )
            # XLA does not define which zero is larger.
            assert np.all(same) or k in (0, 1, 8), (h.__name__, k)


# ---- integers, bits, casts, complex numbers ----


def test_integers_are_those_of_jax():
    def f(a, b, s):
        return (
            a + b, a - b, a * b, jax.lax.div(a, b), jax.lax.rem(a, b), a // b, a % b, -a, abs(a),
            jnp.sign(a), jnp.maximum(a, b), a & b, a | b, a ^ b, ~a, a**3,
        )  # fmt: skip

    def g(a, b, s):
        return (
            a << s, a >> s, jax.lax.shift_right_logical(a, s), jax.lax.population_count(a),
            jax.lax.clz(a), a < b, a == b, jnp.clip(a, -5, 5), jnp.where(a < b, a, b),
            (a < b) ^ (b < 9), ~(a < b), (a < b) & (a != b), jnp.logical_or(a < b, a > 7),
            jax.lax.select_n(jnp.clip(s, 0, 2).astype(jnp.int32), a, b, s), jnp.bitwise_count(a),
            a.astype(jnp.float32) * 1.5,
        )  # fmt: skip

    for dtype in (np.int8, np.uint16, np.int32):
        info = np.iinfo(dtype)
        rng = rng_for(dtype)
        ends = np.array([info.min, info.max, 0, 1, info.max // 2, info.min // 2], dtype)
        a = np.concatenate([np.repeat(ends, 6), rng.integers(info.min, info.max, 64, dtype)])
        b = np.concatenate([np.tile(ends, 6), rng.integers(info.min, info.max, 64, dtype)])
        s = rng.integers(0, info.bits + 4, a.size).astype(dtype)
        for h in (f, g):
            for k, (x, e) in enumerate(zip(jof.fuse(h)(a, b, s), jax.jit(h)(a, b, s), strict=True)):
                assert x.dtype == e.dtype
                np.testing.assert_array_equal(x, e, err_msg=f"{dtype.__name__} {h.__name__} {k}")


def test_casts_are_those_of_astype():
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 32, 64)]
    names = ["bool", *integers, "float16", "bfloat16", "float32", "float64"]
    names += ["float8_e4m3fn", "float8_e5m2"]
    values = [0, -0.0, 1, -1, 0.5, -1.5, 2.5, 127, 128, 255.5, 3e4, -3e9, 448, 1e10, 1e20]
    values += [np.inf, -np.inf, np.nan, 1.0009765625, 3.140625, 2**-20, 65519, 65520]

    def cast(x):
        return [x.astype(name) for name in names]

    def rounded(x):  # XLA may remove casts from a program, but not from a single operation
        return [x.astype(name).astype(jnp.float32) for name in ("float16", "bfloat16")]

    with jax.enable_x64(True):
        for of in ("float32", "float64", "int32"):
            x = jnp.asarray(values).astype(jnp.float32).astype(of)
            ours = jof.fuse(lambda x: cast(x) + rounded(x))(x)
            for k, (a, e) in enumerate(zip(ours, jax.jit(cast)(x) + rounded(x), strict=True)):
                assert a.dtype == e.dtype
                assert_close(a, e, 0, 0, what=f"{of} {k}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_casts_inside_of_a_kernel(implementation, monkeypatch):
    """Also of subnormal numbers, and of those that only some formats have."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", implementation)
    # XLA casts numbers from 480 to 512 to float8_e4m3fn as 0.
    x = np.array([300, 248, 460, 7e4, 2**-7, 2**-9, 9e-4, 3e-5, 1e-6, 6e-8], np.float32)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):

        def cast(x, to=name):
            with np.errstate(over="ignore"):
                return x.astype(to).astype(np.float32)

        def f(x, to=name):
            return x.astype(to).astype(jnp.float32) * -1

        assert_close(jof.fuse(f)(x), cast(x) * -1, 0, 0, what=name)
        rows = jof.fuse(lambda x, f=f: f(x) - x.min(-1, keepdims=True))(x[None])[0]
        assert_close(rows, cast(x) * -1 - x.min(), 0, 0, what=name)
        # The cotangent of a cast is cast, too.
        _, pull = jax.vjp(jof.fuse(f), x)
        assert_close(pull(x)[0], cast(x * -1), 0, 0, what=name)


@pytest.mark.parametrize(
    "bits", [(8, 23), (8, 7), (5, 10), (4, 3), (5, 2), (8, 4), (3, 12)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reduced_precision(dtype, bits):
    """Kernels have the formats of dtypes; others are left to XLA."""

    def f(x):
        return jax.lax.reduce_precision(x * 1, *bits) + x

    x = jnp.asarray([300, 248, 7e4, 2**-7, 2**-9, 3e-5, 1e-6, 6e-8, np.inf, np.nan]).astype(dtype)
    expected = jax.jit(f)(x)
    fused = [jof.fuse(f, partial=True)]
    if bits in {"float32": [(8, 23), (8, 7)], "bfloat16": [(8, 23), (8, 7)]}.get(
        dtype, [(8, 23), (5, 10)]
    ):
        fused += [jof.fuse(f)]
    else:
        with pytest.raises(jof.FusionError, match=r"reduce_precision .* to this format cannot be"):
            jof.fuse(f)(x)
    for g in fused:
        np.testing.assert_array_equal(*(y.astype(jnp.float32) for y in (g(x), expected)))


def test_bits(monkeypatch):
    """The source includes all it needs, without the headers that conftest.py precompiles."""
    monkeypatch.setenv("CXX", os.environ["JOF_TEST_CXX"])

    def f(x, h, b):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return (
            bits >> 3,
            jax.lax.bitcast_convert_type(bits ^ 1, jnp.float32),
            jax.lax.bitcast_convert_type(h, jnp.uint16),
            jax.lax.bitcast_convert_type(b, jnp.uint16),
            jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(b, jnp.int16), jnp.bfloat16),
            jax.lax.bitcast_convert_type(b, jnp.float16),
            jax.lax.bitcast_convert_type(h, jnp.bfloat16),
            jnp.nextafter(b, jnp.bfloat16(0)),
            jax.lax.reduce_precision(x, 8, 7),
        )

    x = normals(N)
    args = x, x.astype(jnp.float16), x.astype(jnp.bfloat16)
    for k, (a, e) in enumerate(zip(jof.fuse(f)(*args), jax.jit(f)(*args), strict=True)):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e, err_msg=str(k))


def test_complex_numbers():
    def f(z, w, x):
        return (
            z * w + x, z / w, jnp.conj(z) - 1j * w, jnp.exp(z), jnp.log(w), z**3,
            jax.lax.complex(x, -x), -z, jnp.where(x > 0, z, w), jnp.sign(z),
            z.astype(jnp.complex64),
        )  # fmt: skip

    def g(z, w, x):
        return (
            jnp.abs(z),
            z.real * w.imag,
            jnp.angle(w),
            (z == w).astype(jnp.float32),
            jnp.real(z * w),
        )

    z, w = (normals(N, key=k) + 1j * normals(N, key=k + 1) for k in (1, 3))
    x = normals(N, key=5)
    for h in (f, g):
        for k, (a, e) in enumerate(zip(jof.fuse(h)(z, w, x), jax.jit(h)(z, w, x), strict=True)):
            assert a.dtype == e.dtype
            assert_close(a, e, 1e-5, 1e-6, what=str(k))

    def loss(h, z, w, x):
        return sum(jnp.abs(y).sum() for y in h(z, w, x))

    for h in (f, g):
        ours, theirs = (
            jax.jit(jax.grad(functools.partial(loss, k), (0, 1, 2)))(z, w, x)
            for k in (jof.fuse(h), h)
        )
        for a, e in zip(ours, theirs, strict=True):
            assert_close(a, e, 1e-4, 1e-4)


def test_quotients_of_complex_numbers():
    """Quotients of large numbers, and quotients by zero and infinity."""
    big, inf = 3e38, np.inf
    cases = {
        (1e-30 + big * 1j, big - 2j): 1j,
        (big + 0j, 1 + big * 1j): -1j,
        (1 + 1j, 0j): complex(inf, inf),
        (1 - 1j, complex(-0.0, 0)): complex(-inf, inf),
        (complex(inf, inf), 2 + 0j): complex(inf, inf),
        (complex(inf, 1), 1 + 1j): complex(inf, -inf),
        (1 - 2j, complex(inf, -inf)): 0j,
        (0j, 1 + 0j): 0j,
    }
    z, w = np.asarray([*cases], np.complex64).T
    for dtype in (np.complex64, np.complex128):
        with jax.enable_x64(dtype == np.complex128):
            found = np.asarray(jof.fuse(jnp.divide)(z.astype(dtype), w.astype(dtype)))
        np.testing.assert_allclose(found, np.asarray([*cases.values()], dtype), 1e-6, 1e-30)


# ---- shapes ----


def test_broadcasts_and_structures():
    def f(arrays, scale, *, row, column):
        x, y = arrays["x"], arrays["y"]
        z = (x + y[0]) * scale + row - column[:, None] * 2
        return {"z": z, "outer": (row * 2)[None, :] + jnp.expand_dims(column, 1), "same": y}

    arrays = {"x": normals(5, 33), "y": normals(1, 33, key=1)}
    more = {"row": normals(33, key=2), "column": normals(5, key=3)}

    def values_and_gradients(h):
        def loss(a, s):
            return sum(map(jnp.sum, h(a, s, **more).values()))

        scales = (2.5, jnp.float32(2.5), np.float32(2.5), 2)
        return [h(arrays, s, **more) for s in scales], jax.grad(loss, (0, 1))(arrays, 2.5)

    ours, theirs = (jax.jit(values_and_gradients, static_argnums=0)(h) for h in (jof.fuse(f), f))
    for a, e, tolerance in zip(ours, theirs, (1e-6, 1e-4), strict=True):
        jax.tree.map(lambda a, e, t=tolerance: assert_close(a, e, t, t), a, e)


def test_an_array_in_two_alignments():
    def f(x):
        return jnp.tanh(x[:, None] - x)

    pairs, x = jof.fuse(f), normals(19)
    both = jax.jit(lambda h: (h(x), jax.grad(lambda x: (h(x) ** 2 * x).sum())(x)), static_argnums=0)
    for a, e, tolerance in zip(both(pairs), both(f), (1e-6, 1e-4), strict=True):
        assert_close(a, e, tolerance, tolerance)
    assert targets(pairs, x) == ["jof_compiled"]


def test_ranks_and_empty_arrays():
    f = jof.fuse(lambda x: jnp.exp(x) * 2 + jnp.ones_like(x))
    shapes = ((), (1,), (0,), (0, 3), (1, 1), (3, 1, 4), (2, 1, 3, 1))

    @jax.jit
    def every(xs):
        return [
            (f(x), jax.vmap(f)(jnp.stack([x] * 4)), jax.grad(lambda x: f(x).sum())(x)) for x in xs
        ]

    xs = [normals(*shape) for shape in shapes]
    for x, (y, ys, dx) in zip(xs, every(xs), strict=True):
        assert_close(y, np.exp(x) * 2 + 1, 1e-6, 1e-6)
        assert_close(ys, np.stack([np.exp(x) * 2 + 1] * 4), 1e-6, 1e-6)
        assert_close(dx, np.exp(x) * 2, 1e-6, 1e-6)


def test_results_larger_than_operands():
    f = jof.fuse(lambda x: jnp.broadcast_to(jnp.exp(x)[:, None], (5, 7)))
    x = normals(5)
    assert_close(f(x), np.broadcast_to(np.exp(x)[:, None], (5, 7)), 1e-6, 0)
    assert_close(jax.grad(lambda x: f(x).sum())(x), 7 * np.exp(x), 1e-6, 0)


def test_constants_and_arguments_that_are_returned():
    table = normals(7)
    f = jof.fuse(lambda x: (x, jnp.zeros((3,)), 2, x + table + np.float32(1), None))
    x = normals(7, key=1)
    _, zeros, two, sum_, none = f(x)
    assert none is None
    np.testing.assert_array_equal(zeros, np.zeros(3))
    assert int(two) == 2
    assert_close(sum_, x + table + 1, 1e-6, 1e-6)
    in_numpy = np.arange(7.0)  # float64
    assert_close(jof.fuse(lambda x: x * in_numpy)(x), x * in_numpy, 1e-6, 0)
    assert not targets(jof.fuse(lambda x: (x, 1.0)), x)


@pytest.mark.parametrize("partial", [False, True])
def test_results_are_as_weakly_typed_as_those_of_jnp(partial):
    def f(step):
        return {"rate": step * 0.5 + 1, "number": 2.0, "step": step, "cast": step.astype(int)}

    for step in (jnp.arange(4), jnp.int32(3)):
        ours, theirs = jax.eval_shape(jof.fuse(f, partial=partial), step), jax.eval_shape(f, step)
        assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
        assert theirs["rate"].weak_type
    rate = 0.5  # its gradient is as weakly typed, too
    ours, theirs = (
        jax.eval_shape(jax.grad(lambda r, h=h: h(r)["rate"]), rate)
        for h in (jof.fuse(f, partial=partial), f)
    )
    assert jax.typeof(ours) == jax.typeof(theirs)
    report = jof.fuse(f, partial=partial).explain(jnp.arange(4))
    assert (len(report.kernels), report.rest) == (1, ())


def test_fused_functions_in_a_fused_function():
    gate = jof.fuse(lambda x: jnp.tanh(x) * 2)
    norm = jof.fuse(lambda x: x / jnp.abs(x).max(-1, keepdims=True))

    @jax.custom_jvp
    def twice(x):
        return gate(x) * 2

    twice.defjvp(lambda xs, dxs: (twice(*xs), gate(xs[0]) * dxs[0]))

    @jof.fuse
    def f(x):
        return norm(gate(x)) + twice(x)

    x = normals(3, 4)
    y = 2 * np.tanh(x)
    assert_close(f(x), y / np.abs(y).max(-1, keepdims=True) + 2 * y, 1e-6, 1e-6)
    assert targets(f, x) == ["jof_compiled_rows"]
    dx = jax.grad(lambda x: jof.fuse(lambda x: twice(x) + 1)(x).sum())(x)
    assert_close(dx, y, 1e-6, 1e-6)
    double = jof.ElementwiseKernel("T x", "T y", "y = x * 2", "doubled")
    assert not jof.fuse(lambda x: double(x), partial=True).explain(x).kernels
    with pytest.raises(jof.FusionError, match=r"use the function of JAX .* such as jax\.nn\.gelu"):
        jof.fuse(lambda x: jof.gelu(x))(x)


def test_methods():
    class Layer(tuple):  # a pytree
        @jof.fuse
        def __call__(self, x):
            return jnp.tanh(x) * self[0]

        @jof.fuse
        def scaled(self, x, *, by):
            return x * self[0] * by

    layer, x = Layer([2.0]), normals(5)
    jax.tree_util.register_pytree_node(Layer, lambda x: (tuple(x), None), lambda _, x: Layer(x))
    assert_close(layer(x), np.tanh(x) * 2, 1e-6, 0)
    assert_close(layer.scaled(x, by=3), x * 6, 1e-6, 0)
    assert len(Layer.scaled.explain(layer, x, by=3).kernels) == 1
    assert len(layer.scaled.explain(x, by=3).kernels) == 1
    assert layer.scaled.source(x, by=3) == Layer.scaled.source(layer, x, by=3)
    assert_close(jax.jit(layer.scaled)(x, by=3), x * 6, 1e-6, 0)


@pytest.mark.exhaustive
def test_what_depends_on_no_argument_is_left_to_xla():
    def f(x):
        places = (
            jax.random.uniform(jax.random.key(0), x.shape[:1]) + jnp.arange(70000.0)[x.shape[1]]
        )
        order = jnp.sort(jnp.array([3.0, 1.0]))
        return jnp.sin(x) * jnp.linspace(-1, 1, 16) + places[:, None] * order[0]

    def rows(x):
        return jax.nn.softmax(x * jnp.linspace(0, 2, 16)) - jnp.repeat(jnp.arange(4.0), 4)

    x = normals(8, 16)
    for h in (f, rows):
        fused = jof.fuse(h)
        assert len(fused.explain(x).kernels) == 1
        both = [
            (k(x), jax.grad(lambda x, k=k: (k(x) ** 2).sum())(x), jax.vmap(k)(x[None])[0])
            for k in (fused, h)
        ]
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, 1e-5), *both)
        if len(jax.devices()) > 1:
            mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
            spec = jax.sharding.PartitionSpec("a")
            sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
            ours, theirs = (
                jax.jit(jax.shard_map(k, mesh=mesh, in_specs=spec, out_specs=spec))(sharded)
                for k in (fused, h)
            )
            assert_close(ours, theirs, 1e-5, 1e-5)


def test_closures_of_tracers():
    @jax.jit
    def outer(w, x):
        f = jof.fuse(lambda x: jnp.tanh(x * w))
        return jax.grad(lambda x: f(x).sum())(x), f(x)

    w, x = normals(5), normals(5, key=1)
    assert_close(outer(w, x)[1], np.tanh(x * w), 1e-6, 1e-6)
    assert_close(outer(w, x)[0], w / np.cosh(x * w) ** 2, 1e-5, 1e-6)
    g = jax.grad(lambda w: jof.fuse(lambda x: jnp.tanh(x * w))(x).sum())(w)
    assert_close(g, x / np.cosh(x * w) ** 2, 1e-5, 1e-6)


# ---- dtypes ----


def test_narrow_values_are_rounded_once():
    def f(x, y):
        return (x * y) * (x * y) + x

    for dtype in ("bfloat16", "float16"):
        x, y = (normals(N, key=k, dtype=dtype) for k in (1, 2))
        exact = jnp.asarray(in_float64(f)(x, y)).astype(dtype)
        assert (jof.fuse(f)(x, y) == exact).mean() > 0.99


def test_numbers_stay_as_they_were_written():
    """`fuse` does not round 0.7978 to bfloat16, as jnp does; `finfo` values stay the dtype's."""
    f = jof.fuse(lambda x: (x * 0.7978845608, jnp.where(x > 0, x, jnp.finfo(x.dtype).min)))
    x = normals(N, dtype=jnp.bfloat16)
    y, masked = f(x)
    np.testing.assert_array_equal(y, (x.astype(jnp.float32) * 0.7978845608).astype(jnp.bfloat16))
    assert jnp.isfinite(masked).all()


def test_mixed_dtypes():
    def f(x, m, n, b):
        y = jnp.where(b, x.astype(jnp.float32) * n, m)
        return y.astype(jnp.bfloat16), y > 0, (y * 3).astype(jnp.int32)

    args = (
        normals(9, 8, dtype=jnp.bfloat16),
        normals(9, 8),
        np.arange(8),
        np.arange(9)[:, None] % 2 > 0,
    )
    for a, e in zip(jof.fuse(f)(*args), f(*map(jnp.asarray, args)), strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e, 2**-8, 0)


# ---- derivatives ----


def test_custom_rules_stay():
    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvp(lambda xs, ts: (straight(*xs), ts[0] * 3))

    @jax.custom_vjp
    def clipped(x, n):
        return x * n

    clipped.defvjp(lambda x, n: (x * n, n), lambda n, ct: (jnp.clip(ct, -1, 1) * n, None))

    @jax.custom_vjp
    def to_grid(x):
        return jnp.round(x / grid) * grid

    to_grid.defvjp(lambda x: (to_grid(x), None), lambda _, ct: (ct * 3,))

    x, n, grid = 2 * normals(N), np.arange(N), np.linspace(0.5, 1, N, dtype=np.float32)

    def f(x):
        return jnp.sin(straight(x)) + to_grid(x)

    def g(x, n):
        return clipped(jnp.sin(x), n) * 2

    def gradients(fused):
        f_, g_ = fused(f), fused(g)
        first = jax.grad(lambda x: f_(x).sum())
        return (
            first(x),
            jax.grad(lambda x: first(x).sum())(x),
            *(jax.grad(lambda x, s=s: (g_(x, n) * s).sum())(x) for s in (0.25, 4.0)),
            jax.grad(lambda x: fused(jax.nn.relu)(x).sum())(jnp.zeros(2)),  # its rule says 0
            jax.grad(lambda x: fused(jax.lax.stop_gradient)(x * 2).sum())(x),
        )

    ours, theirs = (jax.jit(gradients, static_argnums=0)(h) for h in (jof.fuse, lambda f: f))
    for a, e in zip(ours, theirs, strict=True):
        assert_close(a, e, 1e-5, 1e-5)
    assert ours[-2].tolist() == [0, 0]
    assert not ours[-1].any()
    with pytest.raises(TypeError, match="custom"):
        jax.jvp(lambda x: jof.fuse(g)(x, n), (x,), (x,))

    @jax.custom_jvp
    def scaled(x):
        return x * grid

    scaled.defjvp(lambda xs, ts: (scaled(*xs), ts[0] * grid))
    fused = jof.fuse(lambda x: scaled(x))
    with pytest.raises(jof.FusionError, match="reads an array that it closes over"):
        jax.grad(lambda x: fused(x).sum())(x)

    def of_captured(grid):
        @jax.custom_vjp
        def f(x):
            return x * grid

        f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
        return jof.fuse(lambda x: f(x))(x).sum()

    with pytest.raises(jof.FusionError, match="no derivative with respect to an array that it"):
        jax.grad(of_captured)(grid)


def test_limits_of_a_kernel_of_rows_are_named():
    f = jof.fuse(lambda x: [x * k / x.sum(-1, keepdims=True) for k in range(17)])
    with pytest.raises(jof.FusionError, match="writes at most 16, got 1 and 17"):
        f(normals(5, 8))


def test_report_of_a_function_of_any_number_of_arrays():
    (kernel,) = jof.fuse(lambda *xs: xs[0] * 2 + 1).explain("float32").kernels
    assert len(kernel.reads) == 1


def test_custom_vjp_of_an_array_and_a_number():
    both = jax.custom_vjp(lambda x: (jnp.sin(x), 3))
    both.defvjp(lambda x: ((jnp.sin(x), 3), x), lambda x, ct: (ct[0] * jnp.cos(x),))
    f = jof.fuse(lambda x: jnp.multiply(*both(x)))
    assert_close(jax.grad(lambda x: f(x).sum())(normals(N)), 3 * np.cos(normals(N)), 1e-5, 1e-5)


def test_places_in_a_row_are_rounded_to_their_dtype():
    f = jof.fuse(lambda x: x.sum(-1, keepdims=True) * jnp.arange(300, dtype=jnp.bfloat16) * 1.0)
    places = np.arange(300).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(f(jnp.ones((5, 300)))[0], 300 * places)


@pytest.mark.exhaustive
def test_custom_vjp_rules_of_numbers_and_of_an_array_in_two_places():
    @jax.custom_vjp
    def limited(x, most):
        return jnp.minimum(x, most)

    limited.defvjp(
        lambda x, most: (limited(x, most), most), lambda most, ct: (jnp.clip(ct, -most, most), None)
    )

    @jax.custom_vjp
    def product(a, b):
        return a * b

    product.defvjp(lambda a, b: (a * b, (a, b)), lambda r, ct: (ct * r[1], 10 * ct * r[0]))

    @jax.custom_vjp
    def first(a, b):  # the value does not use b, the rule does
        return a * 2

    first.defvjp(lambda a, b: (a * 2, b), lambda b, ct: (ct, 100 * ct * b))

    x = normals(N)
    for f in (
        lambda x: limited(x, 0.5),
        lambda x: jax.nn.softmax(limited(x, 0.5)) * x,
        lambda x: product(x, x) + 1,
        lambda x: first(x, x) + product(x, x * 2),
    ):
        ours, theirs = (jax.grad(lambda x, g=g: g(x).sum())(x) for g in (jof.fuse(f), f))
        assert_close(ours, theirs, 1e-5, 1e-5)


@pytest.mark.exhaustive
def test_second_derivatives_of_rules_that_read_what_the_function_does_not():
    @jax.custom_jvp
    def sine(x, y, w):
        return jnp.sin(x)

    sine.defjvp(lambda xs, ts: (sine(*xs), ts[0] * jnp.cos(xs[0]) * xs[1] + ts[2] * xs[2]))
    xs = [normals(3, N, key=k) for k in range(3)]
    for f in (
        lambda *xs: sine(*xs) * xs[0],
        lambda *xs: sine(*xs) / (1 + xs[0] ** 2).sum(-1, keepdims=True),
    ):

        def second(g):
            first = jax.grad(lambda *xs: (g(*xs) ** 2).sum(), (0, 1, 2))
            return jax.grad(lambda *xs: sum((v * v).sum() for v in first(*xs)), (0, 1, 2))(*xs)

        for a, e in zip(second(jof.fuse(f)), second(f), strict=True):
            assert_close(a, e, 1e-4, 1e-4)


@pytest.mark.exhaustive
def test_second_derivatives_of_custom_rules_that_do_not_call_the_function():
    """JAX differentiates the results that the rule computes, not the function."""

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 3 * jnp.cos(xs[0]) * ts[0]))

    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * x * ct,))

    @jax.custom_jvp
    def other_sine(x):  # the same value, another rule
        return jnp.sin(x)

    other_sine.defjvp(lambda xs, ts: (sine(xs[0]), 5 * jnp.cos(xs[0]) * ts[0]))

    def second(f):
        first = jax.grad(lambda x: f(x).sum())
        return jax.grad(lambda x: (first(x) * x).sum())

    x = normals(N)
    for f in (
        lambda x: sine(x) * x,
        lambda x: other_sine(x) * x,
        lambda x: square(x) * x,
        lambda x: with_clipped_gradient(x * 3) * x,
        lambda x: sine(x) / jnp.abs(x).sum(-1, keepdims=True),
    ):
        for fused in (jof.fuse(f), jof.fuse(f, partial=True)):
            assert_close(second(fused)(x), second(f)(x), 2e-5, 2e-5)
            squares = (second(lambda x, g=g: g(x) ** 2)(x) for g in (fused, f))
            assert_close(*squares, 5e-5, 5e-5)
    assert_close(
        jax.hessian(lambda x: jof.fuse(sine)(x).sum())(x), -3 * jnp.diag(jnp.sin(x)), 1e-5, 1e-5
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_custom_rules_of_rows_with_integer_arrays(dtype):
    @jax.custom_jvp
    def scaled(x, n):
        return x * n

    scaled.defjvp(lambda xs, ts: (xs[0] * xs[1], 2 * ts[0] * xs[1]))

    def f(x, n):
        return scaled(x, n) / (1 + x * x).sum(-1, keepdims=True)

    x, n = normals(3, N), np.arange(3 * N).reshape(3, N).astype(dtype)
    ours, theirs = (jax.grad(lambda x, g=g: g(x, n).sum())(x) for g in (jof.fuse(f), f))
    assert_close(ours, theirs, 1e-5, 1e-5)
    ours, theirs = (jax.jvp(lambda x, g=g: g(x, n), (x,), (x,))[1] for g in (jof.fuse(f), f))
    assert_close(ours, theirs, 1e-5, 1e-5)


def test_a_rule_that_rebuilds_its_result_from_a_captured_array():
    """First derivatives are right; those of its results are refused."""
    grid = np.linspace(0.5, 1, N, dtype=np.float32)

    @jax.custom_vjp
    def scaled(x):
        return x * grid

    scaled.defvjp(lambda x: (x * grid + 0, None), lambda _, ct: (ct * 3,))
    fused, x = jof.fuse(lambda x: scaled(x) * x), normals(N)
    first = jax.grad(lambda x: fused(x).sum())
    assert_close(first(x), x * 3 + x * grid, 1e-5, 1e-5)
    with pytest.raises(jof.FusionError, match="reads an array that it closes over"):
        jax.grad(lambda x: first(x).sum())(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_custom_rules_that_read_captured_arrays_are_left_to_xla(kind):
    """`partial=True` leaves to XLA what cannot be fused, here functions with such rules."""
    grid = np.linspace(0.5, 1, N, dtype=np.float32)

    def scaled(x):
        return x * grid

    if kind == "jvp":
        scaled = jax.custom_jvp(scaled)
        scaled.defjvp(lambda xs, ts: (scaled(*xs), ts[0] * grid * 3))
    else:
        scaled = jax.custom_vjp(scaled)
        scaled.defvjp(lambda x: (x * grid, x), lambda x, ct: (ct * grid * x,))

    @jax.custom_jvp
    def around(x):
        return scaled(x) + 1

    around.defjvp(lambda xs, ts: jax.jvp(lambda x: scaled(x) + 1, xs, ts))
    x = normals(3, N)
    for f in (
        lambda x: jnp.sort(scaled(x * 2) + 1) * x,
        lambda x: jax.nn.softmax(scaled(x * 2) + 1) * x,
        lambda x: jax.jit(lambda x: scaled(x) * 3)(x) + x,
        lambda x: jax.lax.fori_loop(0, 2, lambda _, y: scaled(y) + 1, x) * x,
        *([lambda x: around(x) * x] if kind == "jvp" else []),
    ):
        rest = jof.fuse(f, partial=True).explain(x).rest
        assert any("custom" in one or "scan" in one for one in rest)
        for d in (jax.grad, lambda f: jax.grad(lambda x: (jax.grad(f)(x) * x).sum())):
            ours, theirs = (
                d(lambda x, g=g: (g(x) ** 2).sum())(x) for g in (jof.fuse(f, partial=True), f)
            )
            assert_close(ours, theirs, 1e-5, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.mod(x, 2.0),
        lambda x: jnp.where(x > 0, x, x + 1),
        lambda x: jnp.where(x > 0, 2 * x, 2 * x + 1),
        lambda x: jnp.where(x > 0, x, x + 1).sum(-1, keepdims=True) + x,
    ],
    ids=["mod", "equal", "computed twice", "row"],
)
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_gradients_that_do_not_depend_on_what_their_jaxpr_reads(f, partial):
    x = normals(3, N)
    fused = jof.fuse(lambda x: f(x), partial=partial)
    for g in (fused, lambda x: fused(x) * x):
        want = f if g is fused else lambda x: f(x) * x
        ours, theirs = (jax.grad(lambda x, h=h: h(x).sum())(x) for h in (g, want))
        assert_close(ours, theirs, 1e-5, 1e-5)
        ours, theirs = (jax.jvp(jax.grad(lambda x, h=h: h(x).sum()), (x,), (x,)) for h in (g, want))
        for a, e in zip(ours, theirs, strict=True):
            assert_close(a, e, 1e-5, 1e-5)


@jax.custom_vjp
def with_clipped_gradient(x):
    return x


with_clipped_gradient.defvjp(
    lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),)
)  # not linear: the rule must see the sum of the cotangents of broadcast elements


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(), (4,), (5, 1), (1, 4)], ids=str)
def test_a_custom_vjp_of_a_broadcast_array_is_refused(shape):
    x, b = np.ones((5, 4), np.float32), np.full(shape, 2, np.float32)

    def scaled(x, b):
        return x * with_clipped_gradient(b)

    def of_rows(x, b):
        return (x * with_clipped_gradient(b)).sum(-1)

    def loss(f):
        return jax.grad(lambda x, b: f(x, b).sum(), (0, 1))

    np.testing.assert_array_equal(jof.fuse(scaled)(x, b), scaled(x, b))
    with pytest.raises(jof.FusionError, match="result is broadcast"):
        loss(jof.fuse(scaled))(x, b)
    for found, expected in zip(
        loss(jof.fuse(scaled, partial=True))(x, b), loss(scaled)(x, b), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    if shape == (5, 1):  # the kernel sums the cotangents of a row
        np.testing.assert_array_equal(loss(jof.fuse(of_rows))(x, b)[1], loss(of_rows)(x, b)[1])
    else:
        with pytest.raises(jof.FusionError, match="result is broadcast"):
            loss(jof.fuse(of_rows))(x, b)
    found = loss(jof.fuse(of_rows, partial=True))(x, b)
    np.testing.assert_array_equal(found[1], loss(of_rows)(x, b)[1])
    full = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(loss(jof.fuse(scaled))(x, full)[1], loss(scaled)(x, full)[1])


def test_casts_after_reductions_round():
    """Only the casts that end jnp.sum and jnp.mean of narrow arrays are left out."""
    x = rng_for("casts").standard_normal((64, 64)).astype(np.float32)

    def quantized(x):
        scale = (jnp.abs(x).max(-1, keepdims=True) / 127).astype(jnp.bfloat16)
        return jnp.round(x / scale.astype(jnp.float32)), scale

    def sums(x):
        return x.sum(-1).astype(jnp.bfloat16).astype(jnp.float32), x.max(-1).astype(jnp.float16)

    whole, scale = jof.fuse(quantized)(x)
    pairs = zip((scale, *jof.fuse(sums)(x)), (quantized(x)[1], *sums(x)), strict=True)
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=2**-7)
    exact = x / np.float64(scale)  # a scale that was not rounded would give other integers
    assert (np.abs(np.float64(whole) - exact) < 0.5 + 1e-4).all()
    weights = np.linspace(0.1, 2, 64, dtype=np.float32)
    for f, arrays in (
        (lambda x: x.sum(-1), [x]),
        (lambda x: x.max(-1), [x]),
        (lambda x, w: x.sum(-1, dtype=jnp.float32) * w, [x.astype(jnp.bfloat16), weights]),
    ):
        y = jof.fuse(lambda *xs, f=f: f(*xs).astype(jnp.bfloat16).astype(jnp.float32))(*arrays)
        np.testing.assert_array_equal(y, np.asarray(y).astype(jnp.bfloat16).astype(np.float32))


def test_rows_that_are_constant():
    x = np.ones((5, 7), np.float32)
    for f in (
        lambda x: (x - x.mean(-1, keepdims=True)).sum(-1),
        lambda x: (x**0).sum(-1),
        lambda x: ((jnp.arange(7) * x**0).sum(-1), x**0 * jnp.arange(7)),
        lambda x: jnp.ones_like(x).sum(-1),
        lambda x: (jnp.ones_like(x, jnp.bfloat16).sum(-1, keepdims=True), jnp.zeros_like(x)),
    ):
        found, expected = (jax.tree.leaves(g(x)) for g in (jof.fuse(f), f))
        for a, e in zip(found, expected, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            np.testing.assert_array_equal(np.float32(a), np.float32(e))
        gradient = jax.grad(lambda x, f=f: sum(map(jnp.sum, jax.tree.leaves(jof.fuse(f)(x)))))
        np.testing.assert_array_equal(gradient(x), np.zeros_like(x))


def test_reductions_of_a_scalar():
    assert jof.fuse(lambda x: x.sum() * 2 + x.max())(jnp.float32(3)) == 9


@pytest.mark.usefixtures("as_users")  # compilers replace pow by sqrt only with -O3
def test_powers_of_two_beside_numbers_near_the_largest():
    """A product of both that overflows would be infinite, or a warning of NumPy."""
    x = np.float32([0, 0.25, -0.5])
    fused = jof.fuse(lambda x: (x * 3e38) * 2)
    np.testing.assert_array_equal(fused(x), x * np.float32(3e38) * 2)
    assert jax.grad(lambda x: fused(x).sum())(x).tolist() == [np.inf] * 3


def test_powers_of_one_half():
    x = np.array([4, 0, -0.0, -4, np.inf, -np.inf, np.nan] * 6, np.float32)
    for dtype in (np.float32, np.float16):
        y = jof.fuse(lambda x: x**0.5)(x.astype(dtype))
        expected = np.array([2, 0, 0, np.nan, np.inf, np.inf, np.nan] * 6, dtype)
        np.testing.assert_array_equal(y, expected)
        assert not np.signbit(np.asarray(y)[2])


def test_arrays_of_64_bits_keep_their_dtype():
    with jax.enable_x64(True):
        x = jnp.arange(1, 5, dtype=jnp.float64).reshape(2, 2) / 3
    for f in (lambda x: x * 2, lambda x: x - x.max(-1, keepdims=True), jnp.sum):
        y = jof.fuse(f)(x)
        assert y.dtype == np.float64
        with jax.enable_x64(True):
            np.testing.assert_allclose(y, f(x), rtol=1e-15)


def test_custom_rules_of_functions_with_integers():
    """Tangents and cotangents of integers (as in jnp.ldexp) have no dtype that kernels support."""

    @jax.custom_jvp
    def split(x):
        return x - jnp.floor(x), jnp.floor(x).astype(jnp.int32)

    split.defjvp(lambda xs, ts: (split(*xs), (ts[0] * 3, np.zeros(xs[0].shape, jax.dtypes.float0))))

    @jax.custom_vjp
    def scaled(x):
        return x * 2, (x * 2).astype(jnp.int32)

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, cts: (cts[0] * 5,))

    def f(x):
        (rest, whole), (y, n) = split(x), scaled(x)
        return eight_times(jnp.sin(rest)) * whole, jnp.sin(y) + n

    def eight_times(y):
        return jnp.ldexp(y, 3)

    x = normals(N)
    if jax.__version_info__ >= (0, 12):  # there it is a primitive whose program is made later
        with pytest.raises(jof.FusionError, match="call_hi_primitive"):
            jof.fuse(eight_times)(x)

        def eight_times(y):
            return y * 8

    def both(h, x):
        return h(x), jax.vjp(h, x)[1]((x, x))

    ours, theirs = (jax.jit(functools.partial(both, h))(x) for h in (jof.fuse(f), f))
    jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, 1e-5), ours, theirs)


def test_derivatives_in_both_modes():
    def f(x, bias, alpha):
        h = x + bias
        return alpha * jax.nn.silu(h), jnp.tanh(h) * h

    fused = jof.fuse(f)
    args = normals(6, 17), normals(17, key=1), jnp.float32(1.5)

    def loss(h):
        return lambda *xs: sum((y * jnp.cos(y)).sum() for y in h(*xs))

    programs = (
        lambda h: jax.grad(loss(h), (0, 1, 2))(*args),
        lambda h: jax.jvp(h, args, args),
        lambda h: jax.jvp(jax.grad(loss(h), (0, 1, 2)), args, args),
        lambda h: jax.grad(lambda *xs: jax.jvp(loss(h), xs, args)[1], (0, 1, 2))(*args),
        lambda h: jax.grad(lambda *xs: jax.grad(loss(h))(*xs).sum(), (0, 1, 2))(*args),
        lambda h: jax.vmap(jax.grad(loss(h), (0, 1, 2)), (0, None, None))(*args),
        lambda h: jax.linearize(h, *args)[1](*args),
        lambda h: jax.grad(jax.checkpoint(loss(h)), (0, 1, 2))(*args),
    )
    ours, theirs = (jax.jit(lambda h=h: [p(h) for p in programs])() for h in (fused, f))
    for k, pair in enumerate(zip(ours, theirs, strict=True)):
        jax.tree.map(lambda a, e, k=k: assert_close(a, e, 3e-5, 3e-5, what=str(k)), *pair)


def test_derivatives_that_are_zero():
    f = jof.fuse(lambda x, y, n: (jnp.floor(x) * 2, jnp.sin(y) * n, n + 1))
    x, y, n = normals(5), normals(5, key=1), np.arange(5)
    assert not targets(jax.grad(lambda x: f(x, y, n)[0].sum()), x)
    zero, slope = jax.grad(lambda x, y: f(x, y, n)[1].sum(), (0, 1))(x, y)
    assert not zero.any()
    assert_close(slope, n * np.cos(y), 1e-6, 1e-6)
    assert not jax.grad(lambda x, y: f(x, y, n)[0].sum(), (0, 1))(x, y)[1].any()


def test_one_kernel_each():
    f = jof.fuse(lambda x, b: jax.nn.gelu(x + b) * jax.nn.sigmoid(x))
    x, b = normals(6, 17), normals(17)
    assert targets(f, x, b) == ["jof_compiled"]
    assert targets(jax.grad(lambda x, b: f(x, b).sum(), (0, 1)), x, b) == ["jof_compiled"]
    assert targets(lambda x: jax.jvp(lambda x: f(x, b), (x,), (x,))[1], x) == ["jof_compiled"]

    def hvp(x):
        return jax.jvp(jax.grad(lambda x: f(x, b).sum()), (x,), (x,))[1]

    assert targets(hvp, x) == ["jof_compiled"]
    assert targets(lambda x: jax.vmap(f, (0, None))(x, b), x[None]) == ["jof_compiled"]


def test_more_than_a_kernel_can_read_is_left_to_xla():
    f = jof.fuse(lambda *xs: sum(jnp.sin(x) for x in xs))
    xs = [normals(5, key=k) for k in range(20)]
    assert_close(f(*xs), sum(map(np.sin, xs)), 1e-5, 1e-5)
    tangents = jax.jvp(f, xs, xs)[1]
    assert_close(tangents, sum(x * np.cos(x) for x in xs), 1e-5, 1e-5)
    for x, g in zip(xs, jax.grad(lambda *xs: f(*xs).sum(), range(20))(*xs), strict=True):
        assert_close(g, np.cos(x), 1e-5, 1e-5)
    with pytest.raises(jof.FusionError, match="reads at most 32 arrays"):
        f(*xs, *xs)
    assert_close(
        jof.fuse(lambda *xs: sum(jnp.sin(x) for x in xs), partial=True)(*xs, *xs),
        2 * f(*xs),
        1e-5,
        1e-5,
    )


def test_parts_that_are_more_than_a_kernel_can_read_or_write():
    """Results that read the same arrays are together: 12 arrays of parameters in 4 kernels."""

    def adam(x, g, m, v):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        return jax.tree.map(lambda x, m, v: x - m / (jnp.sqrt(v) + 0.1), x, m, v), m, v

    def one_in_two_places(*xs):
        return sum(jnp.sin(x)[None] + jnp.cos(x)[:, None] for x in xs)

    def of_all_and_of_one(*xs):
        return sum(jnp.sin(x) for x in xs), jnp.cos(xs[0]) * 2

    xs = [abs(normals(5, key=k)) for k in range(48)]
    trees = [dict(enumerate(xs[12 * k : 12 * (k + 1)])) for k in range(4)]
    for f, args, kernels in (
        (adam, trees, 4),
        (lambda x: [jnp.sin(x * k) * 2 for k in range(40)], xs[:1], 4),
        (one_in_two_places, xs[:17], 0),
        (of_all_and_of_one, xs, 1),
    ):
        fused = jof.fuse(f, partial=True)
        for a, e in zip(jax.tree.leaves(fused(*args)), jax.tree.leaves(f(*args)), strict=True):
            assert_close(a, e, 1e-5, 1e-5)
        report = fused.explain(*args)
        assert len(report.kernels) == kernels
        assert sum(len(kernel.reads) for kernel in report.kernels) <= 48


# ---- transformations and other implementations ----


def test_transformations(monkeypatch):
    f = jof.fuse(lambda x, s: jnp.exp(-x * x) * s)
    x = normals(4, 9)
    expected = np.exp(-x * x) * 2
    assert_close(jax.lax.map(lambda x: f(x, 2.0), x), expected, 1e-6, 0)
    assert_close(jax.vmap(f)(x, jnp.full(4, 2.0)), expected, 1e-6, 0)
    assert_close(jax.lax.scan(lambda c, x: (c, f(x, 2.0)), 0, x)[1], expected, 1e-6, 0)
    donated = jax.jit(f, donate_argnums=0)(x + 0, 2.0)
    assert_close(donated, expected, 1e-6, 0)
    exported = jax.export.export(jax.jit(f), disabled_checks=jof.export_checks())(x, 2.0)
    assert_close(exported.call(x, 2.0), expected, 1e-6, 0)
    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(x, 2.0)
    assert "jof_compiled" not in exported.mlir_module()
    with jax.disable_jit():
        assert_close(f(x, 2.0), expected, 1e-6, 0)
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    assert_close(f(x, 2.0), expected, 1e-6, 0)
    assert not targets(lambda x: f(x, 2.0), x)


def table(x):
    """A constant that XLA computes, since it is a cumulative sum."""
    c = jnp.arange(x.shape[-1], dtype=x.dtype)
    for _ in range(60):
        c = 0.25 * c + 0.25 * c
    return x + jnp.cumsum(c)


def of_two_terms(x):
    a, b = x / x.max(-1, keepdims=True), jnp.sin(x)
    for _ in range(60):
        a, b = b, 0.4 * (a + b)
    return b.sum(-1)


def squared(x):
    y = x / (x * x).max(-1, keepdims=True)
    for _ in range(60):
        y = jnp.exp2(-y) * y * y
    return (y - y.mean(-1, keepdims=True)).sum(-1)


@pytest.mark.parametrize("f", [table, of_two_terms, squared])
def test_values_that_are_reached_on_many_paths(f):
    """Their number grows exponentially: a search that follows each of them does not end."""
    x = normals(3, 7) + 3
    assert_close(jof.fuse(f)(x), f(x), 1e-5, 1e-5)
    ours, expected = (jax.grad(lambda x, g=g: g(x).sum())(x) for g in (jof.fuse(f), f))
    assert_close(ours, expected, 1e-4, 1e-5)


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    if jax.default_backend() != "cpu":
        pytest.skip("about the C++ compiler")
    f = jof.fuse(lambda x, b: jnp.exp(x) * 2 - b)
    x, b = normals(3, 8, dtype=jnp.bfloat16), normals(8)
    with pytest.warns(RuntimeWarning, match="no-such-compiler"):
        y = f(x, b)
    assert_close(y, np.exp(x.astype(np.float32)) * 2 - b, 2**-7, 2**-7)


@pytest.mark.parametrize("explicit", [False, True])
def test_sharding(explicit):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    devices = jax.devices()[: 4 if len(jax.devices()) >= 4 else 2]
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    shape = len(devices) // 2, 2
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(kind, kind), devices=devices)
    spec = jax.sharding.PartitionSpec
    x, b = normals(8, 16), normals(16)

    def f(x, b):
        return jax.nn.relu(jnp.tanh(x) * 2 + b)

    fused = jof.fuse(f)

    def loss(h, x, b):
        return (h(x, b) ** 2).sum()

    expected = f(x, b)
    grads = jax.grad(functools.partial(loss, f), (0, 1))(x, b)
    with jax.set_mesh(mesh):
        xs = jax.device_put(x, jax.NamedSharding(mesh, spec("a", "b")))
        bs = jax.device_put(b, jax.NamedSharding(mesh, spec("b")))
        program = jax.jit(fused).lower(xs, bs).compile()
        assert "all-gather" not in program.as_text()
        y = program(xs, bs)
        assert y.sharding.is_equivalent_to(xs.sharding, 2)
        assert_close(y, expected, 1e-6, 1e-6)
        ours = jax.jit(jax.grad(functools.partial(loss, fused), (0, 1)))(xs, bs)
        for a, e in zip(ours, grads, strict=True):
            assert_close(a, e, 1e-5, 1e-5)
        specs = spec("a", "b"), spec("b")
        mapped = jax.shard_map(fused, in_specs=specs, out_specs=specs[0])
        assert_close(mapped(xs, bs), expected, 1e-6, 1e-6)
        ours = jax.jit(jax.grad(functools.partial(loss, mapped), (0, 1)))(xs, bs)
        for a, e in zip(ours, grads, strict=True):
            assert_close(a, e, 1e-5, 1e-5)


# ---- random expressions ----

UNARY = (
    jnp.tanh, jnp.sin, jnp.cos, jax.nn.sigmoid, jax.nn.relu, jax.nn.silu, jnp.abs, jnp.negative,
    jnp.square, sp.erf, jnp.arctan, lambda x: jnp.exp(-jnp.abs(x)), lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(1 + x * x), lambda x: x**3 / 8, lambda x: 1 / (1 + x * x), jax.nn.gelu,
    lambda x: jnp.clip(x, -2, 2), lambda x: x + 0.3, lambda x: 1.7 * x, jnp.floor,
    lambda x: x.astype(jnp.int32).astype(x.dtype) / 2,
)  # fmt: skip
BINARY = (
    jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, jnp.arctan2, jnp.logaddexp,
    lambda x, y: x / (1 + jnp.abs(y)), lambda x, y: jnp.where(x > y, x, 0.5 * y),
    lambda x, y: jnp.where((x < y) & (y > 0), jnp.sin(x), y), lambda x, y: x * jax.nn.sigmoid(y),
)  # fmt: skip


def expression(draw_int, operations):
    """A function of six arrays, made of `operations` operations."""
    code = [
        (draw_int(0, len(UNARY) + 2 * len(BINARY) - 1), draw_int(0, 99), draw_int(0, 99))
        for _ in range(operations)
    ]

    def f(*arrays):
        values = [*arrays]
        for op, i, j in code:
            x, y = values[-1 - i % min(len(values), 6)], values[j % len(values)]
            g = UNARY[op] if op < len(UNARY) else BINARY[(op - len(UNARY)) % len(BINARY)]
            y = g(x) if op < len(UNARY) else g(x, y)
            values.append(jnp.clip(y, -30, 30) if op % 3 == 0 else y)
        return values[-1] + 0 * arrays[0]

    return f


@settings(max_examples=max(1, settings.default.max_examples // 30), deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_random_expressions(data, seed):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    functions = [expression(draw, operations) for operations in (3, 6, 15)]
    rng = np.random.default_rng(seed)
    shapes = ((11, 13), (11, 13), (13,), (11, 1), (), (1, 13))
    arrays = [jax.device_put(rng.standard_normal(s).astype(np.float32)) for s in shapes]

    def every(*xs):
        return tuple(f(*xs) for f in functions)

    def orders(h):
        def loss(*xs):
            ys = h(*xs)
            return sum((y * jnp.cos(y)).sum() for y in ys), ys

        def run(*xs):
            return jax.jvp(lambda *xs: jax.grad(loss, range(6), has_aux=True)(*xs), xs, xs)

        return jax.jit(run)

    ours = jax.tree.leaves(orders(jof.fuse(every))(*arrays))
    exact = jax.tree.leaves(in_float64(orders(every))(*arrays))
    unfused = jax.tree.leaves(orders(every)(*arrays))
    for a, e, u in zip(ours, exact, unfused, strict=True):
        e, u = np.asarray(e), wide(u)
        if not np.all(np.isfinite(e)):
            continue
        error = np.abs(wide(u) - e).max(initial=0)
        scale = np.abs(e).max(initial=1)
        # Where rounding alone decides a branch, both results are right.
        assert_close(a, e, 0, 8 * error + 2e-5 * scale, few=2)


@settings(max_examples=max(1, settings.default.max_examples // 30), deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_random_expressions_of_mixed_dtypes(data, seed):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    functions = [expression(draw, operations) for operations in (3, 6, 10, 20, 40)]
    rng = np.random.default_rng(seed)
    shapes = ((11, 13), (11, 13), (13,), (11, 1), (), (1, 13))
    dtypes = ("bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16", "float16")
    arrays = [
        jax.device_put(np.asarray(rng.standard_normal(s)).astype(d))
        for s, d in zip(shapes, dtypes, strict=True)
    ]

    def every(*xs):
        return tuple(f(*xs) for f in functions)

    for a, e in zip(jof.fuse(every)(*arrays), in_float64(every)(*arrays), strict=True):
        scale = np.abs(e).max(initial=1)
        assert_close(a, e, 2**-6, 2**-6 * scale, few=4)


# ---- what cannot be fused ----

REFUSED = {
    "reduce_sum": (lambda x: x - x.mean(0), "the rows of one kernel are the last dimensions"),
    "reduce_max": (lambda x: x / x.sum(-1, keepdims=True) - x.max(0), "the same in all"),
    "argmax": (lambda x: x - x.argmax(-1, keepdims=True), "by sum, prod, max"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), "by sum, prod, max"),
    "dot_general": (lambda x: jnp.tanh(x @ x.T), "reads many elements"),
    "gather": (lambda x: x[jnp.array([1, 0])] * 2, "moves elements"),
    "sort": (lambda x: jnp.sort(x) * 2, "moves elements"),
    "transpose": (lambda x: x + x.T, "moves elements"),
    "concatenate": (lambda x: jnp.concatenate([x, x]), "moves elements"),
    "reshape": (lambda x: x.reshape(-1) * 2, "moves elements"),
    "scan": (lambda x: jax.lax.fori_loop(0, 65, lambda _, x: x * 2, x), "at most 64 turns"),
    "while": (lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x * 2, x.sum()), "64 turns"),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "no branches"),
    "slice": (lambda x: x[0] * x[1], "moves elements"),
    "stack": (lambda x: jnp.stack([x, x * 2]), "moves elements"),
    "bessel_i0e": (lambda x: sp.i0e(x), "no form in C"),
}


def test_places_of_elements():
    x = normals(3, 4, 5)

    def f(x):
        places = jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)
        return x**2 * jnp.arange(4.0)[:, None] + jnp.where(jnp.arange(5) > 2, places, x)

    for order in (lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())):
        np.testing.assert_allclose(order(jof.fuse(f))(x), order(f)(x), rtol=1e-6)
        assert len(targets(order(jof.fuse(f)), x)) == 1


@pytest.mark.parametrize("primitive", REFUSED)
def test_what_cannot_be_fused(primitive):
    f, reason = REFUSED[primitive]
    x = normals(5, 5)
    with pytest.raises(jof.FusionError, match=reason) as raised:
        jof.fuse(f)(x)
    if primitive == "stack":  # concatenate in older releases
        primitive = jax.make_jaxpr(lambda x: jnp.stack([x, x]))(x).eqns[-1].primitive.name
    assert raised.value.primitive == primitive
    assert "test_fuse.py" in raised.value.line
    assert raised.value.line in str(raised.value)
    assert "partial=True" in str(raised.value)


def test_bad_input():
    x = normals(4, 4)
    with pytest.raises(jof.FusionError, match=r"one shape, got \(4, 4\), \(4,\)"):
        jof.fuse(lambda x, row: (x * row, row * 2))(x, x[0])
    with pytest.raises(TypeError, match="fun must be a function, got int"):
        jof.fuse(3)
    with pytest.raises(ValueError, match="Incompatible shapes"):
        jof.fuse(lambda x, y: x + y)(x, normals(3))
    remedy = r"args\[1\]\['mode'\] must be an array or a number, got str. Remedy: .* in a closure"
    with pytest.raises(TypeError, match=remedy):
        jof.fuse(lambda x, options: x)(x, {"mode": "text"})
    with pytest.raises(TypeError, match=r"args\[0\] .* change its byte order with [^ ]*$"):
        jof.fuse(lambda x: x * 2)(np.arange(3, dtype=np.dtype("f4").newbyteorder()))
    with pytest.raises(TypeError, match=r"^<lambda>: a result must be an array or a number, got"):
        jof.fuse(lambda x: {"y": x, "mode": "text"})(x)
    with pytest.raises(jof.FusionError, match=r"bitcast_convert_type .* between sizes"):
        jof.fuse(lambda x: jax.lax.bitcast_convert_type(x, jnp.int8))(x)
    with pytest.raises(jof.FusionError, match="capture what is no array in a closure"):
        jof.fuse(lambda x, n: sum(x**i for i in range(n)))(x, 3)
    with pytest.raises(jof.FusionError, match="over the same last dimensions in the entire"):
        jof.fuse(lambda x: x.sum(-1).sum(-1))(x[None])


# ---- short stacks and short loops ----


def stacks(x, c):
    three = jnp.stack([x, jax.nn.relu(x) * x, jnp.sin(x)])
    four = jnp.moveaxis(jnp.concatenate([three, three[:1] * x]), 0, -1)
    return (
        jnp.select([x < -1, x < 1], [x * x, jnp.sin(x)], -x * c[1]),
        jnp.piecewise(x, [x < -1, x > 1], [jnp.cos, lambda x: x**3, 0.5]),
        jnp.cumsum(three > 0, 0)[1] * jax.lax.slice_in_dim(four, 1, None, 2, -1)[..., 1] / 4,
        jnp.argmin(three, 0) * x,
        sp.ndtri(jax.nn.sigmoid(x / 2)),
    )


def loops(x, c):
    def turn(y, place):
        return jnp.tanh(y) * place - c[2], y * x

    last, every = jax.lax.scan(turn, x, jnp.arange(1.0, 4), reverse=True)
    nested = jax.lax.fori_loop(0, 3, lambda _, y: turn(turn(y, 1.5)[0], 0.5)[0], x)
    newton = jax.lax.fori_loop(0, 4, lambda k, y: (y + (x * x + 2) / y) / 2 + k * 0.0625, 1 + x * x)
    none = jax.lax.fori_loop(0, 0, lambda _, y: y / 0, x)
    return last + every[0] * every[2], nested, newton * none, jnp.polyval(c, x)


def rows_of_loops(x, c):
    def turn(_, y):
        return y - jax.nn.logsumexp(y, -1, keepdims=True) / 2

    mean = x.mean(-1, keepdims=True)
    return jax.lax.fori_loop(0, 3, turn, x), jnp.select(
        [x > 1, x > mean + 0.1], [x * c[0], mean], 2
    )


@pytest.mark.parametrize("f", one_in(3, [stacks, loops, rows_of_loops]))
@pytest.mark.parametrize("partial", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_short_stacks_and_short_loops(f, partial):
    args = normals(3, 67), jnp.asarray([0.5, -0.75, 1.25])
    fused = jof.fuse(f, partial=partial)
    mapped = jax.vmap(fused, (None, 0), 1)(args[0], jnp.stack([args[1], 2 * args[1]]))

    def orders(h):
        def loss(*xs):
            return sum(jnp.sin(y).sum() for y in h(*xs))

        def forward(*xs):
            return jax.jvp(loss, xs, xs)[1]

        def every(*xs):
            grads = jax.grad(loss, (0, 1))
            return h(*xs), jax.jvp(grads, xs, xs), jax.grad(forward, (0, 1))(*xs)

        return every

    ours, exact = jax.jit(orders(fused))(*args), in_float64(orders(f))(*args)
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert_close(a, e, 2e-5, 2e-5 * np.abs(e).max())
    for m, y in zip(mapped, in_float64(f)(args[0], 2 * args[1]), strict=True):
        assert_close(m[:, 1], y, 1e-5, 1e-5)
    report = fused.explain(*args)
    assert len(report.kernels) == 1
    assert {rest.split()[0] for rest in report.rest} == {"slice"}  # slices `c` into scalars


def test_a_derivative_that_needs_other_operations_says_so():
    """The derivative of zeta sums a series. The function itself is a kernel."""
    f = jof.fuse(lambda x: jax.scipy.special.zeta(2.5, x))
    x = 1 + jnp.abs(normals(5))
    assert_close(f(x), jax.scipy.special.zeta(2.5, x), 1e-5, 1e-5)
    with pytest.raises(jof.FusionError, match=r"its derivative needs reduce_sum.* Remedy: diff"):
        jax.grad(lambda x: f(x).sum())(x)


def test_turns_of_nested_loops_are_multiplied():
    def f(turns, x):
        def inner(_, y):
            return jax.lax.fori_loop(0, 8, lambda _, y: y * 0.5 + x, y)

        return jax.lax.fori_loop(0, turns, inner, x)

    x = normals(3)
    assert_close(jof.fuse(functools.partial(f, 8))(x), f(8, x), 1e-6, 1e-6)
    with pytest.raises(jof.FusionError, match="nested ones multiplied"):
        jof.fuse(functools.partial(f, 9))(x)


def test_running_sums():
    """Running sums, whose gradients XLA for CPUs gets wrong."""

    def f(x):
        three = jnp.stack([x, x * x, jnp.sin(x)], -1)
        back = jax.lax.cumprod(three, 2, reverse=True)
        return jnp.cumsum(three, -1)[..., 2] + jax.lax.cummax(three, 2)[..., 1] * back[..., 1]

    x = normals(3, 67)
    y, dx = jax.value_and_grad(lambda x: jof.fuse(f)(x).sum())(x)
    x, sin, cos = wide(x), np.sin(wide(x)), np.cos(wide(x))
    largest, slope = np.maximum(x, x * x), np.where(x > x * x, 1, 2 * x)
    exact = 1 + 2 * x + cos + slope * x * x * sin + largest * (2 * x * sin + x * x * cos)
    assert_close(y, (x + x * x + sin + largest * x * x * sin).sum(), 1e-5, 0)
    assert_close(dx, exact, 1e-5, 1e-5)


def test_places_of_the_largest():
    nan = np.nan
    rows = [[1, 2, 2], [nan, 3, nan], [0.0, -0.0, 0], [-1, nan, nan], [np.inf, 5, np.inf]]
    columns = np.asarray(rows, np.float32).T

    def f(x, y, z):
        three = jnp.stack([x, y, z], -1)
        return jnp.argmax(three, -1), jnp.argmin(three, -1), jnp.argmax(three > 1, -1)

    every = columns.T, columns.T, columns.T > 1
    for a, of, g in zip(
        jof.fuse(f)(*columns), every, (np.argmax, np.argmin, np.argmax), strict=True
    ):
        np.testing.assert_array_equal(a, g(of, -1))


def test_numbers_in_loops_stay_as_they_were_written():
    def f(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y * 0.7978845608 + x, x)

    x = normals(N, dtype=jnp.bfloat16)
    exact = jnp.asarray(in_float64(f)(x)).astype(jnp.bfloat16)
    assert (jof.fuse(f)(x) == exact).mean() > 0.99


def test_stacks_beside_what_is_left_to_xla():
    def f(x, w):
        return jnp.select([x < 0, x < 1], [jnp.sin(x) * x, jnp.cos(x)], 2) @ w * 2 + 1

    x, w = normals(6, 16), normals(16, 16, key=1)
    with jax.default_matmul_precision("highest"):
        fused = jof.fuse(f, partial=True)
        assert_close(jax.jit(fused)(x, w), jax.jit(f)(x, w), 1e-5, 1e-5)
    assert len(fused.explain(x, w).kernels) == 2


# ---- reports ----


def test_source_and_explain():
    @jof.fuse
    def gated(x, bias, rate):
        """A gate."""
        return jax.nn.relu(x + bias) * rate

    assert gated.__doc__ == "A gate."
    x, bias = normals(2, 3), normals(3)
    report = gated.explain(x, bias, 0.5)
    assert str(report) == (
        "gated: 1 kernel; reads 40 B, writes 24 B\n"
        "  gated: 3 operations; reads f32[2,3] f32[1,3] f32[], writes f32[2,3]"
    )
    assert [k.name for k in gated.explain(x, bias, 0.5, derivative="jvp").kernels] == ["gated_jvp"]
    (kernel,) = gated.explain("bfloat16").kernels
    assert kernel.bytes_read == 3 * kernel.bytes_written == 3 * 2048
    spec = jax.ShapeDtypeStruct((4, 5), jnp.float16)
    text = gated.source(spec, spec, spec)
    assert '#include "cuda/compiled.cuh"' in text
    assert "jof::Half" in text
    text = gated.source(x, bias, 0.5, platform="cpu", derivative="vjp")
    assert '#include "cpu/compiled.h"' in text
    assert "gated_vjp" in text
    assert "ScalarOperand<float>" in text
    of_columns = jof.fuse(lambda x: jnp.tanh(x - x.mean(0)) * 2, partial=True).explain(x)
    assert len(of_columns.kernels) == 1
    assert any("reduce_sum (tests/test_fuse.py" in operation for operation in of_columns.rest)
    norm = jof.fuse(rms_norm)
    assert str(norm.explain(x, bias)).split("\n")[1] == (
        "  rms_norm: 7 operations, 1 reduction in turn; reads f32[2,3] f32[1,3], writes f32[2,3]"
    )
    assert '#include "cuda/compiled_rows.cuh"' in norm.source("bfloat16")
    assert (
        norm.source(jnp.bfloat16) == norm.source(jnp.dtype("bfloat16")) == norm.source("bfloat16")
    )
    with pytest.raises(ValueError, match='platform must be "cpu" or "cuda", got \'tpu\''):
        gated.source("float32", platform="tpu")
    with pytest.raises(ValueError, match='derivative must be None, "jvp" or "vjp", got 2'):
        gated.explain("float32", derivative=2)


def test_sources_include_what_they_need(monkeypatch):
    """Sources compile as for users, without the headers that conftest.py puts before each."""
    monkeypatch.setenv("CXX", os.environ["JOF_TEST_CXX"])
    x, ids = jnp.arange(6.0).reshape(2, 3), jnp.array([1, 0])
    of_rows = jof.fuse(lambda x: x - x.max(-1, keepdims=True))
    np.testing.assert_array_equal(of_rows(x), [[-2, -1, 0]] * 2)
    messages = jax.jit(functools.partial(jof.message_sum, lambda x: x + 1, num_segments=2))
    np.testing.assert_array_equal(messages((x,), ids, ids), x + 1)


def test_errors_can_be_pickled():
    error = jof.FusionError("f: sort", "sort", "here.py:3")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.primitive, again.line) == ("f: sort", "sort", "here.py:3")


# ---- rows ----


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6) * scale + bias


def cross_entropy(x, labels):
    one_hot = jnp.arange(x.shape[-1]) == labels[..., None]
    return jax.nn.logsumexp(x, -1) - jnp.where(one_hot, x, 0).sum(-1)


def gated_norm(x, gate, scale):
    return rms_norm(x * jax.nn.silu(gate), scale) + x


def masked_softmax(x, mask, temperature):
    return jax.nn.softmax(jnp.where(mask > 0, x / temperature, -1e30))


def causal_softmax(x):
    rows, columns = (jnp.arange(n) for n in x.shape[-2:])
    return jax.nn.softmax(jnp.where(rows[:, None] >= columns, x, -1e30))


def extrema(x):
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (x - low) / (high - low), low, high[..., 0], (x > 0).any(-1), (x > 0).sum(-1)


ROWS = {
    "rms_norm": (rms_norm, ["x", "row"]),
    "layer_norm": (layer_norm, ["x", "row", "row"]),
    "softmax": (lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x)), ["x"]),
    "standardize": (jax.nn.standardize, ["x"]),
    "column": (lambda x, c: jax.nn.softmax(jnp.tanh(x * c)) * c, ["x", "column"]),
    "cross_entropy": (cross_entropy, ["x", "label"]),
    "gated_norm": (gated_norm, ["x", "x", "row"]),
    "masked_softmax": (masked_softmax, ["x", "mask", "scalar"]),
    "extrema": (extrema, ["x"]),
    "causal_softmax": (causal_softmax, ["x"]),
}


# Second derivatives of these are tested, too; the others' are made in the same ways.
TWICE = ("layer_norm", "softmax", "cross_entropy")
ALIKE = ("rms_norm", "standardize")


def arguments(kinds, n, dtype, lead=(2, 3)):
    shapes = {"x": (*lead, n), "row": (n,), "column": (*lead, 1), "scalar": ()}
    labels = (np.arange(math.prod(lead)) * 7 % n).reshape(lead)
    masks = (rng_for(n).random((*lead, n)) < 0.7).astype(np.int8)
    return [
        jax.device_put(labels)
        if kind == "label"
        else jax.device_put(masks)
        if kind == "mask"
        else normals(*shapes[kind], key=k).astype(dtype) + (kind == "scalar") * 2
        for k, kind in enumerate(kinds)
    ]


def of_rows(f, args):
    """Value, gradient and Hessian-vector product."""
    moving = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def loss(*xs):
        ys = f(*(dict(zip(moving, xs, strict=True)).get(k, x) for k, x in enumerate(args)))
        inexact = [y for y in jax.tree.leaves(ys) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum((y * jnp.cos(y)).sum() for y in inexact), ys

    def grads(*xs):
        return jax.grad(loss, range(len(moving)), has_aux=True)(*xs)

    xs = [args[k] for k in moving]
    ((first, ys), (second, _)) = jax.jvp(grads, xs, xs)
    return ys, first, second


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The two norms in ALIKE are parts of layer_norm.
    [
        pytest.param(name, "float32", marks=[pytest.mark.exhaustive] * (name in ALIKE))
        for name in ROWS
    ]
    + [(name, "bfloat16") for name in ("layer_norm", "masked_softmax")],
)
def test_rows(name, dtype):
    f, kinds = ROWS[name]
    # On a CPU: two blocks of equal or unequal length, or one block.
    width = {"layer_norm": 1101, "gated_norm": 1100}.get(name, 37)
    args = arguments(kinds, width, dtype)
    fused = jof.fuse(f)
    assert targets(fused, *args) == ["jof_compiled_rows"]
    if dtype == "bfloat16":  # derivatives are the same programs
        ours, exact = fused(*args), in_float64(f)(*args)
    else:
        order = 2 if name in TWICE else 1
        program = jax.jit(lambda *xs: of_rows(fused, xs)[: 1 + order])
        # The value, its gradient, and the derivative of each.
        lowered = program.lower(*args)
        found = re.findall(r"custom_call @(jof_\w+)", lowered.as_text())
        assert set(found) == {"jof_compiled_rows"}
        assert len(found) <= 2 * order
        exact = in_float64(lambda *xs: of_rows(f, xs)[: 1 + order])(*args)
        ours = lowered.compile()(*args)
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        is_narrow = a.dtype == jnp.bfloat16
        scale = np.abs(wide(e)).max(initial=0 if is_narrow else 1)
        unit = 2.0**-8 if is_narrow else 2.0**-20
        assert_close(a, e, 4 * unit, 4 * unit * scale)


def pullback_of_rows(f, args):
    """Value and gradients, for cotangents that do not depend on how values are rounded.

    Cotangents are exact in 16 bits: XLA on GPUs may remove a cast to 16 bits and back.
    """
    moving = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of_moving(*xs):
        return f(*(dict(zip(moving, xs, strict=True)).get(k, x) for k, x in enumerate(args)))

    y, pullback = jax.vjp(of_moving, *(args[k] for k in moving))
    ct = jnp.arange(y.size).reshape(y.shape) % 7 - 3
    return y, pullback(ct.astype(y.dtype))


# Whole and partial packs, equal and unequal numbers of packs per thread; a cluster; chunks.
@pytest.mark.parametrize("width", [4096, 1000, 1001, 40000, 40001, 150000, 150001])
def test_rows_of_all_teams(width):
    if jax.default_backend() != "gpu":
        pytest.skip("teams are of threads of a GPU")
    for name in ("layer_norm", "cross_entropy", "masked_softmax"):
        f, kinds = ROWS[name]
        args = arguments(kinds, width, "bfloat16", (9, 10))
        ours = jax.jit(lambda *xs, f=f: pullback_of_rows(jof.fuse(f), xs))(*args)
        exact = jax.jit(lambda *xs, f=f: pullback_of_rows(f, xs))(
            *(x.astype("float32") if x.dtype == "bfloat16" else x for x in args)
        )
        for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
            assert_close(a, e, 2.0**-6, 2.0**-6 * np.abs(wide(e)).max())


def test_rows_of_several_dimensions_and_constants():
    table = normals(6, 5, key=1)

    @jof.fuse
    def f(x, row):
        y = x - x.mean((-2, -1), keepdims=True) + table
        return y * row, y.max((-2, -1)), (row * x).sum((-2, -1)), jnp.ones((2, 2))

    x, row = normals(3, 6, 5), normals(6, 1, key=2)
    for a, e in zip(jax.jit(f)(x, row), jax.jit(f.__wrapped__)(x, row), strict=True):
        assert_close(a, e, 1e-5, 1e-5)
    grads = [
        jax.jit(jax.grad(lambda x, r, f=f: sum((y * y).sum() for y in f(x, r)), (0, 1)))(x, row)
        for f in (f, f.__wrapped__)
    ]
    jax.tree.map(lambda a, e: assert_close(a, e, 1e-4, 1e-3), *grads)


def outer(rows, columns):
    return lambda t: jax.nn.softmax(jnp.broadcast_to(jnp.arange(columns) * t, (rows, columns)))


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize(
    ("f", "shapes"),
    one_in(
        3,
        [
            # Operands of one element.
            (outer(8, 8), [()]),
            (outer(3, 4), [(1, 1)]),
            (lambda v: outer(3, 4)(v[0]).sum(-1), [(2,)]),
            # No elements, and results of other ranks.
            (lambda x: x / x.sum(), [(0, 4)]),
            (lambda x: x - x.mean((-2, -1), keepdims=True), [(2, 3, 0, 5)]),
            (lambda x: x.mean((-2, -1), keepdims=True), [(0, 3, 4, 5)]),
            (lambda x: (x - x.sum(-1, keepdims=True))[:, None], [(0, 4)]),
            (lambda x: (x - x.sum(-1, keepdims=True), x.sum(-1)[None, :, None]), [(3, 4)]),
            # Dimensions of operands and results that have the same size, in different places.
            (lambda x: jnp.broadcast_to(x, (4, 4, 1, 8)).sum(-1).reshape(1, 4, 4), [(4, 1, 8)]),
            (
                lambda x: (
                    (z := jnp.broadcast_to(x, (4, 4, 1, 8))) - z.sum(-1, keepdims=True)
                ).reshape(1, 4, 4, 8),
                [(4, 1, 8)],
            ),
            # Rows of one element, and results that are larger than the arrays that are reduced.
            (lambda x, y: jax.nn.softmax(x) * y, [(4, 2), (3, 4, 2)]),
            (lambda x, y: jax.nn.softmax(x) * y, [(4, 1), (3, 4, 1)]),
            (lambda x, y: jax.nn.softmax(x) * y, [(4, 1), (4, 6)]),
            (lambda x, y: x - x.sum(-1, keepdims=True) + y, [(0, 4), (3, 0, 4)]),
            (lambda x: (x.sum(-1), x.max(-1, keepdims=True)), [(4, 1)]),
            # Short vectors.
            (lambda x, v: (lambda a, b: a * x + b)(*v), [(3,), (2,)]),
            (lambda x, v: (lambda a, b: (a * x).sum(-1) + b)(*v), [(5, 3), (2,)]),
            (lambda x, v: (lambda a, b: a * x + b[1])(*jnp.split(v, [1])), [(5, 3), (3,)]),
            # Results that depend on no argument.
            (lambda x: (x * 2, jnp.arange(3.0), jnp.arange(15.0).reshape(5, 3)), [(5, 3)]),
            (lambda x: (x / x.sum(-1, keepdims=True), jnp.linspace(0, 1, 7)), [(5, 3)]),
        ],
    ),
)
def test_shapes_of_results(f, shapes, partial):
    xs = [normals(*shape, key=k) + 2 for k, shape in enumerate(shapes)]
    fused = jof.fuse(lambda *xs: f(*xs), partial=partial)
    for a, e in zip(*(jax.tree.leaves(g(*xs)) for g in (fused, f)), strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e, 1e-5, 1e-5)
    grads = (
        jax.grad(lambda *xs, g=g: sum((y * y).sum() for y in jax.tree.leaves(g(*xs))))(*xs)
        for g in (fused, f)
    )
    assert_close(*grads, 1e-4, 1e-4)


def test_differences_are_summed_after_their_common_factor_is_taken_out():
    p = 1000 + normals(3, 4096, dtype=np.float32)
    q = p + 1e-2 * normals(3, 4096, key=1, dtype=np.float32)
    ours = jof.fuse(lambda p, q: (p / p.max(-1)[:, None] - q / p.max(-1)[:, None]).sum(-1))(p, q)
    p, q = wide(p), wide(q)
    assert_close(ours, ((p - q) / p.max(-1, keepdims=True)).sum(-1), 0, 2e-7)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, v: x.sum(-1),
        lambda x, v: jax.nn.softmax(x) * jax.nn.softmax(v),
        lambda x, v: x / x.sum(),
        lambda x, v: (x - x.mean((-2, -1), keepdims=True))[:, None] + v,
        lambda x, v: x.prod(-1) * v.max(),
    ],
    ids=["sum", "two softmaxes", "sum of everything", "new axis", "product"],
)
def test_rows_of_symbolic_length(f):
    fused = jof.fuse(lambda x, v: f(x, v))
    n, m = jax.export.symbolic_shape("n, m")
    types = (jax.ShapeDtypeStruct((n, m), np.float32), jax.ShapeDtypeStruct((m,), np.float32))
    exported = jax.export.export(jax.jit(fused), disabled_checks=jof.export_checks())(*types)
    x, v = normals(3, 4), normals(4, key=1)
    assert_close(exported.call(x, v), f(x, v), 1e-5, 1e-5)


def test_the_gradient_of_sums_of_rows_of_symbolic_length():
    gradient = jax.jit(jax.grad(lambda x: jof.fuse(lambda x: x.sum(-1))(x).sum()))
    (n,) = jax.export.symbolic_shape("n")
    types = jax.ShapeDtypeStruct((4, n), np.float32)
    exported = jax.export.export(gradient, disabled_checks=jof.export_checks())(types)
    assert_close(exported.call(normals(4, 3)), np.ones((4, 3)), 0, 0)


def test_a_reduction_that_no_result_depends_on():
    @jof.fuse
    def f(x, y):
        x.mean(-1, keepdims=True)
        return y * 2 + 1

    for y in (jnp.float32(3), jnp.ones((4, 1)), jnp.ones(5)):
        assert_close(f(jnp.ones((4, 8)), y), y * 2 + 1, 0, 0)


def test_rows_of_one_element_and_of_none():
    f = jof.fuse(lambda x: jax.nn.softmax(x) + x.max(-1, keepdims=True))
    for shape in [(3, 1), (0, 4), (4,), (2, 1, 3)]:
        x = normals(*shape)
        assert_close(f(x), jax.jit(f.__wrapped__)(x), 1e-6, 1e-6)
        assert jax.jit(jax.grad(lambda x: f(x).sum()))(x).shape == shape
    of_none = jof.fuse(lambda x: (x.sum(-1), x.prod(-1), x - x.mean(-1, keepdims=True)))
    x = jnp.ones((3, 0))
    for a, e in zip(of_none(x), of_none.__wrapped__(x), strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize(
    ("f", "shape"),
    [(jax.nn.softmax, (2, 1)), (lambda a: (a[:, None] * jnp.arange(4.0)).sum(-1), (3,))],
)
def test_reports_of_rows_that_xla_runs(f, shape):
    fused, x = jof.fuse(f), normals(*shape)
    np.testing.assert_allclose(fused(x), f(x), rtol=1e-6)
    assert "jof" not in jax.jit(fused).lower(x).as_text()
    for derivative in (None, "vjp"):
        assert fused.source(x, derivative=derivative) == ""
        report = fused.explain(x, derivative=derivative)
        assert not report.kernels
        assert "no operand has several elements for each row" in str(report)


def test_rows_of_complex_numbers_are_refused():
    reason = r"reduce_sum .* of complex64 cannot be fused: a kernel of rows has no complex numbers"
    with pytest.raises(jof.FusionError, match=reason):
        jof.fuse(lambda z: z.sum(-1))(jnp.ones((3, 4), jnp.complex64))


def test_the_tail_of_erfc():
    """Its exponential must not enlarge the rounding error of its argument."""
    x = np.linspace(-4, 9, 20001, dtype=np.float32)
    exact = np.array([math.erfc(v) for v in x.astype(float)])
    error = np.abs(np.asarray(jof.fuse(sp.erfc)(x), np.float64) / exact - 1)
    assert error[x < 2].max() < 3.5 * 2**-23
    assert error.max() < 2**-18.3


def test_rows_of_symbolic_sizes():
    rows, width = jax.export.symbolic_shape("rows, width")

    def f(x, scale):
        return jax.nn.softmax(x * scale)

    @jax.jit
    def gradients(f, x, scale):
        return jax.grad(lambda x, scale: (f(x, scale) ** 2).sum(), (0, 1))(x, scale)

    x, scale = normals(4, 5), normals(5, key=1)
    expected = gradients(jax.tree_util.Partial(f), x, scale)
    for n in (5, width):  # XLA computes rows whose width is not known
        specs = (jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((rows, n), (n,)))
        ours = jax.jit(functools.partial(gradients, jax.tree_util.Partial(jof.fuse(f))))
        export = jax.export.export(ours, disabled_checks=jof.export_checks())(*specs)
        assert ("jof_compiled_rows" in export.mlir_module()) == (n == 5)
        for a, e in zip(export.call(x, scale), expected, strict=True):
            assert_close(a, e, 1e-5, 1e-6)


@pytest.mark.parametrize("shapes", [("n, k", "k"), ("n, 4", "4")], ids=str)
@pytest.mark.parametrize(
    "f",
    [lambda x, b: jnp.tanh(x) * b, lambda x, b: jnp.tanh(x - x.mean(0)) * 2 * b],
    ids=["elementwise", "columns"],
)
def test_parts_of_symbolic_sizes(f, shapes):
    x, b = normals(3, 4), normals(4, key=1)
    specs = jax.export.symbolic_args_specs((x, b), shapes)
    fused = jof.fuse(lambda x, b: f(x, b), partial=True)
    for of in (lambda g: g, lambda g: jax.grad(lambda x, b: (g(x, b) ** 2).sum(), 1)):
        export = jax.export.export(jax.jit(of(fused)), disabled_checks=jof.export_checks())(*specs)
        assert_close(export.call(x, b), of(f)(x, b), 1e-5, 1e-6)


def test_results_of_reductions_are_not_rounded():
    """`fuse` does not round the mean to bfloat16, as jnp.mean does."""
    x, scale = normals(64, 256, dtype=jnp.bfloat16), jnp.ones(256, jnp.bfloat16)
    exact = jnp.asarray(in_float64(rms_norm)(x, scale)).astype(jnp.bfloat16)
    assert (jof.fuse(rms_norm)(x, scale) == exact).mean() > 0.99


def test_integers_and_not_numbers_in_rows():
    @jof.fuse
    def f(x, n):
        return x.max(-1), x.min(-1), x.sum(-1), n.sum(-1), n.max(-1), (n > 0).all(-1), n.prod(-1)

    x = jnp.asarray([[1, np.nan, 3], [np.inf, -np.inf, 0], [-0.0, -1, -np.inf]], jnp.float32)
    n = jnp.asarray([[2**30, 2**30, 2**30], [-5, 0, -(2**31)], [1, 2, 3]], jnp.int32)
    for a, e in zip(f(x, n), f.__wrapped__(x, n), strict=True):
        np.testing.assert_array_equal(a, e)


def test_transformations_of_rows(tmp_path):
    f = jof.fuse(layer_norm)
    args = normals(4, 6, 9), normals(9, key=1), normals(9, key=2)

    def loss(h, *xs):
        return (h(*xs) ** 3).sum()

    def programs(h):
        each = jax.vmap(jax.grad(functools.partial(loss, h), (0, 1, 2)), (0, None, None))
        last = jax.vmap(functools.partial(h), (2, None, None), 2)
        return (
            each(*args),
            last(jnp.moveaxis(args[0], 0, -1), *args[1:]),
            jax.lax.scan(lambda c, x: (c + h(x, *args[1:]).sum(), None), 0.0, args[0])[0],
            jax.grad(jax.checkpoint(functools.partial(loss, h)), (0, 1))(*args),
            jax.linearize(h, *args)[1](*args),
        )

    # The reference runs op by op: under the suite's flags jaxlib 0.8.0 miscompiles it.
    ours, theirs = jax.jit(functools.partial(programs, f))(), programs(layer_norm)
    jax.tree.map(lambda a, e: assert_close(a, e, 1e-4, 1e-4), ours, theirs)
    donated = jax.jit(f, donate_argnums=0)(args[0] + 0, *args[1:])
    assert_close(donated, layer_norm(*args), 1e-5, 1e-5)
    exported = jax.export.export(jax.jit(f), disabled_checks=jof.export_checks())(*args)
    assert_close(exported.call(*args), donated, 0, 0)
    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(*args)
    assert "custom_call @jof" not in exported.mlir_module()


@pytest.mark.exhaustive
@pytest.mark.parametrize("explicit", [False, True])
def test_sharding_of_rows(explicit):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec
    args = normals(4, 6, 16), normals(16, key=1), normals(16, key=2)

    def loss(h, *xs):
        return (h(*xs) ** 2).sum()

    expected = layer_norm(*args), jax.grad(functools.partial(loss, layer_norm), (0, 1))(*args)
    expected = *expected, expected[1][1]
    fused = jof.fuse(layer_norm)
    with jax.set_mesh(mesh):
        x = jax.device_put(args[0], jax.NamedSharding(mesh, spec("a", "b")))

        def both(*xs):
            of_fused = functools.partial(loss, fused)
            return fused(*xs), jax.grad(of_fused, (0, 1))(*xs), jax.grad(of_fused, 1)(*xs)

        program = jax.jit(both).lower(x, *args[1:]).compile()
        assert "all-gather" not in program.as_text()
        ours = program(x, *args[1:])
        assert ours[0].sharding.is_equivalent_to(x.sharding, 3)
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-4, 1e-4), ours, expected)
        specs = (spec("a", "b"), spec(), spec())
        mapped = jax.shard_map(fused, in_specs=specs, out_specs=specs[0])
        ours = jax.jit(jax.grad(functools.partial(loss, mapped), (0, 1)))(x, *args[1:])
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-4, 1e-4), ours, expected[1])
        along = jax.device_put(args[0], jax.NamedSharding(mesh, spec(None, "a", "b")))
        _primitive._warned.clear()  # it warns once
        with pytest.warns(jof.GatherWarning, match="every device needs all of it"):
            jax.jit(fused).lower(along, *args[1:]).compile()
        assert_close(jax.jit(fused)(along, *args[1:]), expected[0], 1e-5, 1e-5)


def test_wrong_calls_of_rows_end_no_process():
    if jax.default_backend() != "cpu":
        pytest.skip("carries code for a CPU")
    source = jof.fuse(rms_norm).source(normals(5, 4), normals(4), platform="cpu", derivative="vjp")
    code = cache.code("//" + re.split("^//", source, flags=re.MULTILINE)[-1], "cpu")
    good = {
        "code": np.frombuffer(code, np.uint8),
        "id": np.int64(cache.code_id(code)),
        "name": "by_hand",
        "kinds": np.array([0, 0, 1, 0, 4]),  # x, dy, scale -> dx, partial sums of dscale
        "element_bytes": np.full(5, 4),
        "width": np.int64(4),
        "layout": np.array([4, 4, 256, 1, 1, 4]),
    }
    x, row = normals(5, 4), normals(4)
    f32 = np.dtype("float32")

    def call(x=x, row=row, parts=2, **changed):
        results = [jax.ShapeDtypeStruct((5, 4), f32), jax.ShapeDtypeStruct((parts, 1, 4), f32)]
        call = jax.ffi.ffi_call("jof_compiled_rows", results)
        return jax.block_until_ready(call(x, x, row, **{**good, **changed}))

    call()
    for changed, message in (
        ({"x": normals(3, 4)}, "result 0 must have 12 elements, got 20"),
        ({"row": normals(5)}, "operand 2 must have 4 elements, got 5"),
        ({"parts": 0}, "result 1 must be sums of at least one part"),
        ({"kinds": np.array([0, 1, 0, 0, 4])}, "operand 1 must have 4 elements, got 20"),
        ({"kinds": np.array([0, 0, 1, 1, 4])}, "result 0 has a kind"),
        ({"kinds": np.zeros(4, np.int64)}, "must have 5 entries"),
        ({"element_bytes": np.array([4, 4, 8, 4, 4])}, "operand 2 must have elements of 8"),
        ({"width": np.int64(0)}, "width must be positive"),
        ({"layout": np.array([4, 4, 256, 1, 0, 4])}, "at least one part"),
        ({"layout": np.array([0, 4, 256, 1, 1, 4])}, "layout is not that of a kernel"),
    ):
        with pytest.raises(Exception, match=f"by_hand.*{message}"):
            call(**changed)


REDUCTIONS = (
    lambda x: x.mean(-1, keepdims=True), lambda x: x.max(-1, keepdims=True),
    lambda x: jax.nn.logsumexp(x, -1, keepdims=True), lambda x: jnp.var(x, -1)[..., None],
    lambda x: (x * x).sum(-1, keepdims=True) / 8, lambda x: jnp.tanh(x.sum(-1, keepdims=True)),
)  # fmt: skip


@settings(max_examples=max(1, settings.default.max_examples // 50), deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_random_expressions_of_rows(data, seed):
    code = [
        tuple(data.draw(st.integers(0, k)) for k in (len(REDUCTIONS) - 1, 9, 9, 9))
        for _ in range(4)
    ]

    def f(*arrays):
        values = [*arrays]
        for reduction, i, j, k in code:
            x, y, z = (values[-1 - m % len(values)] for m in (i, j, k))
            wide = jnp.clip(x + arrays[0], -9, 9)
            y = BINARY[(i + j) % 3](y, REDUCTIONS[reduction](wide))
            values.append(jnp.clip(UNARY[(j + k) % 8](y) * z / 2, -9, 9))
        return values[-1] + values[-2] * arrays[0]

    rng = np.random.default_rng(seed)
    shapes = ((5, 17), (17,), (5, 1), (), (1, 17))
    arrays = [jax.device_put(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    ours, exact, unfused = (
        jax.tree.leaves(run(lambda *xs, h=h: of_rows(h, xs)[:2])(*arrays))
        for run, h in ((jax.jit, jof.fuse(f)), (in_float64, f), (jax.jit, f))
    )
    for a, e, u in zip(ours, exact, unfused, strict=True):
        error = np.abs(wide(u) - e).max(initial=0)
        assert_close(a, e, 0, 8 * error + 2e-5 * np.abs(e).max(initial=1), few=2)


# ---- parts of programs ----


def two_layers(x, w, v, b):
    h = jax.nn.gelu(x @ w + b)
    h = h * jax.nn.sigmoid(h)
    h = h / (1 + jnp.square(h).sum(-1, keepdims=True))
    return jnp.tanh(h @ v) * 2 + x, h.sum(), jnp.sin(b) * 2


def softmax_of_a_chain(x):
    return jax.nn.softmax(x * 2 + 1) * jnp.sin(x)


def sorted_and_scanned(x):
    y = jnp.sort(jnp.tanh(x) * 2, -1)
    y = jax.lax.fori_loop(0, 3, lambda _, y: y * 0.5 + 1, y)
    return jax.nn.relu(jnp.concatenate([y, x]) - 0.5) * 2


@pytest.mark.parametrize(
    ("f", "shapes", "kernels"),
    [
        (rms_norm, [(6, 16), (16,)], 1),
        (two_layers, [(6, 16), (16, 16), (16, 16), (16,)], 3),
        (softmax_of_a_chain, [(6, 16)], 1),
        (sorted_and_scanned, [(6, 16)], 2),
        (lambda x: x.sum() + 1, [(6, 16)], 0),
        (lambda x: jax.nn.silu(x) * x, [(6, 16)], 1),
    ],
)
def test_parts(f, shapes, kernels):
    args = [normals(*shape, key=k) / len(shapes) for k, shape in enumerate(shapes)]
    fused = jof.fuse(f, partial=True)
    assert len(targets(lambda *xs: fused(*xs), *args)) == kernels

    def value_and_grads(h):
        def loss(*xs):
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(h(*xs)))

        return h(*args), jax.grad(loss, range(len(args)))(*args)

    with jax.default_matmul_precision("highest"):
        ours, theirs = (jax.jit(functools.partial(value_and_grads, h))() for h in (fused, f))
    jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, 1e-5), ours, theirs)
