"""`ElementwiseKernel`: kernels that users write."""

import copy
import itertools
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from jax_oneflow_ops._codegen import cache, compilers, messages, signature
from tests import kernels
from tests.arrays import assert_same_bits, one_in, rng_for
from tests.kernels import rotation, scaled_silu, softsign

ROOT = Path(__file__).parents[1]
ON_CPU = jax.default_backend() == "cpu"
cpu_only = pytest.mark.skipif(not ON_CPU, reason="about the C++ compiler")


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder and memory cache. Calls must be lowered anew: see `compiled`."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_compiled", {})
    return folder


def compiled(kernel, *dtypes):
    """The code that the CPU compiler makes from a kernel."""
    return cache.code(kernel.source(dtypes or "float32", platform="cpu"), "cpu")


def normals(*shape, key="", dtype=np.float32):
    return rng_for(key, shape).standard_normal(shape).astype(dtype)


def close(actual, expected, rtol=2e-6, atol=2e-6):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.complex128), np.asarray(e, np.complex128), rtol=rtol, atol=atol
        )


def targets(f, *args):
    """The custom calls of a program."""
    text = jax.jit(f).lower(*args).as_text()
    return re.findall(r"custom_call @(jof_\w+)", text)


# ---- values ----


def test_the_example_of_the_docstring():
    squared_diff = jof.ElementwiseKernel(
        "T x, T y",
        "T z",
        "z = (x - y) * (x - y)",
        name="squared_diff",
        derivatives={"x": "2 * (x - y)", "y": "-2 * (x - y)"},
    )
    x, y = normals(8, 5), normals(8, 5, key=1)

    def loss(x, y):
        return squared_diff(x, y).mean()

    close(squared_diff(x, y), (x - y) ** 2)
    close(jax.jit(jax.grad(loss))(x, y), 2 * (x - y) / x.size)


@pytest.mark.usefixtures("as_users")
@pytest.mark.usefixtures("wide")
def test_every_dtype():
    names = [d for d in signature.TYPES if d != "bool"]
    letters = "abcdefghijklmnopqrstuvw"
    expressions = {"complex64": "{0} * {0}", "complex128": "{0} / ({0} + 2)"}
    kernel = jof.ElementwiseKernel(
        ", ".join(f"{d} {x}" for d, x in zip(names, letters, strict=False)),
        ", ".join(f"{d} {x}_" for d, x in zip(names, letters, strict=False)),
        "".join(
            f"{x}_ = {expressions.get(d, '{0} * 2').format(x)};"
            for d, x in zip(names, letters, strict=False)
        ),
        "every_dtype",
    )
    arrays = []
    for d in names:
        x = rng_for(d).integers(0, 40, 77)
        value = x + 1j * x[::-1] if "complex" in d else x
        arrays.append(jax.device_put(value.astype(d)))
    for d, x, y in zip(names, arrays, kernel(*arrays), strict=True):
        assert y.dtype == d
        expected = x * x if d == "complex64" else x * 2
        if d == "complex128":
            expected = x / (x + 2)
        np.testing.assert_allclose(
            np.asarray(y).astype(complex), np.asarray(expected).astype(complex), rtol=1e-6
        )


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 255, 256, 257, 5000])
def test_sizes(n):
    x = normals(3, n)
    bias = normals(n, key=1)
    expected = kernels.scaled_silu_ref(x, bias, np.float32(1.5))
    close(scaled_silu(x, bias, 1.5), expected)
    close(scaled_silu(bias, bias, 1.5), kernels.scaled_silu_ref(bias, bias, np.float32(1.5)))


@pytest.mark.usefixtures("as_users")
def test_many_threads_and_rows():
    x, bias = normals(1000, 333), normals(333, key=1)
    close(scaled_silu(x, bias, 0.5), kernels.scaled_silu_ref(x, bias, np.float32(0.5)))


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values_are_rounded_once(dtype):
    x, y = (normals(64, 100, key=k).astype(dtype) for k in range(2))
    kernel = jof.ElementwiseKernel("T x, T y", "T z", "auto p = x * y; z = p * p + x", "chain")
    wide, other = x.astype(np.float32), y.astype(np.float32)
    exact = ((wide * other) ** 2 + wide).astype(dtype)
    close(kernel(x, y), jnp.asarray(exact), rtol=2**-7 if dtype == "bfloat16" else 2**-10, atol=0)
    assert (np.asarray(kernel(x, y)) == exact).mean() > 0.999


def test_scalars():
    x = normals(3, 4)
    bias = x[0]
    expected = kernels.scaled_silu_ref(x, bias, np.float32(2))
    for two in (2, 2.0, True + 1, np.float32(2), np.array(2, np.float32), jnp.float32(2)):
        close(scaled_silu(x, bias, two), expected)
        close(jax.jit(scaled_silu)(x, bias, two), expected)
    close(scaled_silu(1.0, 2, 3.0), kernels.scaled_silu_ref(jnp.float32(1), 2, 3))
    assert scaled_silu(x.astype("bfloat16"), 1, 2).dtype == "bfloat16"
    assert not jax.typeof(scaled_silu(1.0, 2, 3.0)).weak_type


def test_all_inputs_may_be_scalars_or_weak():
    kernel = jof.ElementwiseKernel(
        "T x, int32 n", "T y, bool b", "y = x * n; b = x < n;", "scalars"
    )
    y, b = kernel(2.5, 3)
    assert (y.shape, y.dtype, float(y), bool(b)) == ((), "float32", 7.5, True)
    y, _ = kernel(jnp.full(3, 2.0), 3)
    assert y.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.usefixtures("as_users")
def test_functions():
    """Functions in f32 and f64, against NumPy's in f64."""
    from math import erf, erfc

    unary = {
        "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
        "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "cbrt": np.cbrt, "sin": np.sin,
        "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
        "asinh": np.arcsinh,
    }  # fmt: skip
    more = {
        "atan": np.arctan, "erf": np.vectorize(erf), "erfc": np.vectorize(erfc),
        "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "abs": np.abs,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
        "relu": lambda x: np.maximum(x, 0), "softplus": lambda x: np.log1p(np.exp(x)),
        "rsqrt": lambda x: x**-0.5,
    }  # fmt: skip
    x = np.linspace(0.01, 4, 300)
    with jax.enable_x64(True):
        for functions in (unary, more):
            names = [f"y{k}" for k in range(len(functions))]
            code = "".join(f"{y} = {f}(x);" for y, f in zip(names, functions, strict=True))
            kernel = jof.ElementwiseKernel(
                "T x", ", ".join(f"T {y}" for y in names), code, "functions"
            )
            for dtype, rtol in (("float32", 1e-6), ("float64", 1e-12)):
                points = x.astype(dtype)
                for f, y in zip(functions.values(), kernel(points), strict=True):
                    expected = f(points.astype(np.float64))
                    np.testing.assert_allclose(np.asarray(y), expected, rtol=rtol, atol=rtol)


@pytest.mark.usefixtures("as_users")
def test_logarithms_and_erf_are_within_a_few_ulp():
    """CPU kernels have their own implementations of these."""
    from math import erf

    functions = {
        "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
        "erf": np.vectorize(erf),
    }  # fmt: skip
    kernel = jof.ElementwiseKernel(
        "T x",
        ", ".join(f"T y{k}" for k in range(len(functions))),
        "".join(f"y{k} = {f}(x);" for k, f in enumerate(functions)),
        "logarithms_and_erf",
    )
    rng = rng_for("logarithms")
    everywhere = np.exp(rng.uniform(-60, 60, 20_000))
    x = np.concatenate([everywhere, rng.uniform(0.4, 4, 20_000)]).astype(np.float32)
    with np.errstate(divide="ignore"):
        for f, y in zip(functions.values(), kernel(x), strict=True):
            exact = f(x.astype(np.float64))
            ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
            assert np.max(np.abs(np.asarray(y, np.float64) - exact) / ulp) < 2.5
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, -1.0], np.float32)
    with np.errstate(all="ignore"):
        for f, y in zip(functions.values(), kernel(special), strict=True):
            np.testing.assert_array_equal(y, f(special.astype(np.float64)).astype(np.float32))


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations_are_the_built_in_ones(dtype):
    """Results are equal bit for bit; 16-bit types are tested on every value."""
    functions = {
        "tanh": jof.tanh, "sigmoid": jof.sigmoid, "silu": jof.silu, "softplus": jof.softplus,
        "mish": jof.mish, "gelu": jof.gelu,
    }  # fmt: skip
    kernel = jof.ElementwiseKernel(
        "T x",
        ", ".join(f"T y{k}" for k in range(len(functions))),
        "".join(f"y{k} = {f}(x);" for k, f in enumerate(functions)),
        "activations",
    )
    if dtype == "float32":
        x = jnp.asarray(4 * normals(5000, key="activations"))
    else:
        x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
        x = jnp.asarray(x[np.isfinite(x.astype(np.float32))])
    for builtin, y in zip(functions.values(), kernel(x), strict=True):
        assert_same_bits(y, builtin(x))


@pytest.mark.usefixtures("as_users")
def test_functions_of_several_and_of_integers():
    kernel = jof.ElementwiseKernel(
        "float32 x, int32 n, uint8 u",
        "float32 a, float32 b, int32 c, uint8 d, float32 e, bool f, float32 g",
        """a = max(x, 0) + pow(x, 2) + pow(2, n);
           b = clamp(x, -0.5f, 1) + fma(x, 2, n) + exp(n);
           c = min(n, 3) + abs(n);
           d = min(u, 3) + max(u, u);
           e = max(x, NAN) ;
           f = isnan(x) || isinf(x / 0) || !isfinite(x);
           g = atan2(x, n) + hypot(x, 1) + copysign(1, x) + fmod(x, 2);""",
        "several",
    )
    x = np.array([-1.5, 0.25, 2.0, 0.0], np.float32)
    n = np.array([-2, 1, 3, 2], np.int32)
    u = np.array([0, 2, 3, 200], np.uint8)
    a, b, c, d, e, f, g = kernel(x, n, u)
    close(a, (np.maximum(x, 0) + x**2 + 2.0**n).astype("f4"))
    close(b, (np.clip(x, -0.5, 1) + (2 * x + n) + np.exp(n)).astype(np.float32))
    assert c.tolist() == [0, 2, 6, 4]
    assert d.tolist() == [0, 4, 6, 203]
    assert np.isnan(e).all()
    assert f.tolist() == [True, True, True, False]
    close(g, (np.arctan2(x, n) + np.hypot(x, 1) + np.copysign(1, x) + np.fmod(x, 2)).astype("f4"))


# Integer division as in jax.lax.div and jax.lax.rem, in all the ways to write it in C++.
DIVISIONS = """
#define REMAINDER(a, b) ((a) % (b))
template <typename C>
JOF_HOST_DEVICE JOF_INLINE C quotient(C a, C b) {
  static_assert(16 / 2 % 5 == 3, "");
  struct Whole {
    C value;
    JOF_HOST_DEVICE JOF_INLINE Whole operator/(Whole other) const {
      return {static_cast<C>(value / other.value)};
    }
  };
  return (Whole{a} / Whole{b}).value;
}
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_users")
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integers_divide_as_in_jax(dtype):
    """Division by zero is defined and overflow wraps; in ordinary C++ both end the process."""
    kernel = jof.ElementwiseKernel(
        "T x, T y",
        "T a, T b, T c, T d, T e, T f",
        """a = x / y;  // not x / 0
           b = x % y; c = x; c /= y, c /= 1; auto n = x; d = n %= y;
           e = quotient(x, y); f = REMAINDER(x, y) /* % 0 */;""",
        "divide",
        preamble=DIVISIONS,
    )
    info = np.iinfo(dtype)
    few = [0, 1, 2, 3, 7, info.max, info.min, info.max - 1, -1 if info.min else 5]
    x, y = (a.ravel() for a in np.meshgrid(*(np.array(few, dtype),) * 2))
    a, b, c, d, e, f = kernel(x, y)
    for quotient in (a, c, e):
        np.testing.assert_array_equal(quotient, jax.lax.div(x, y))
    for remainder in (b, d, f):
        np.testing.assert_array_equal(remainder, jax.lax.rem(x, y))


def test_division_binds_as_in_cpp_and_integers_do_all_else():
    kernel = jof.ElementwiseKernel(
        "T x, int32 n, int32 m, uint8 u, complex64 z",
        "T a, T b, int32 c, int32 d, T e, int32 f, complex64 w",
        """a = 12 / x / 2 * 3 - x / -2; a /= x > 0 ? 2 : 4;
           b = 1 / 2.0f * n / 4 + 7 / 2;
           const int table[8 / 2] = {1, 2, 3, 4};
           c = table[n & 3] + (n << 2) + (n >> 1) + (n ^ m | 1) + min(n, m) + max(n, 3) % 3 + ~u;
           d = 0; for (int k = n; k > 0; k /= 10) d += k % 10;
           e = static_cast<float>(n) / m * (n < m) + static_cast<T>(n / 2.0f);
           switch (n % 4) { case 6 / 3: f = n ? n : 7; break; default: f = u / 2; }
           w = z / 2 / z;""",
        "ordinary",
    )
    x = np.array([1.5, -2.0, 4.0], np.float32)
    n, m = np.array([118, 27, 3], np.int32), np.array([5, 40, 8], np.int32)
    u, z = np.array([9, 255, 0], np.uint8), np.array([1 + 1j, 2 - 3j, -1j], np.complex64)
    a, b, c, d, e, f, w = kernel(x, n, m, u, z)
    close(a, (12 / x / 2 * 3 + x / 2) / np.where(x > 0, 2, 4).astype(np.float32))
    close(b, (n / 8 + 3).astype(np.float32))
    table = np.array([1, 2, 3, 4])[n & 3]
    whole = table + (n << 2) + (n >> 1) + (n ^ m | 1) + np.minimum(n, m) + np.maximum(n, 3) % 3
    assert c.tolist() == (whole + ~u.astype(np.int32)).tolist()
    assert d.tolist() == [10, 9, 3]
    close(e, (n / m * (n < m) + n / 2).astype(np.float32))
    assert f.tolist() == [118, 127, 0]
    close(w, np.full(3, 0.5, np.complex64))


# The formula of GeluTanh in csrc/ops/elementwise.h, written out: x / (1 + e^(-2 u)).
GELU_PREAMBLE = """
    using namespace jof;
    JOF_HOST_DEVICE JOF_INLINE float bounded(float x) { return AtLeast(AtMost(x, 24.0f), -24.0f); }
    JOF_HOST_DEVICE JOF_INLINE float exponential(float x) {
      constexpr double kSlope = 1.5957691216057307117597842397375;
      constexpr double kLog2 = 1.4426950408889634073599246810019;
      constexpr float linear = static_cast<float>(-kSlope * kLog2);
      constexpr float cubic = static_cast<float>(-(kSlope * 0.044715) * kLog2);
      constexpr float linear_low = static_cast<float>(-kSlope * kLog2 - linear);
      constexpr float cubic_low = static_cast<float>(-(kSlope * 0.044715) * kLog2 - cubic);
      const float square = x * x, square_low = ProductResidue(x, x, square);
      const float factor = MulAdd(cubic, square, linear);
      const float factor_low = MulAdd(cubic, square, linear - factor) +
                               MulAdd(cubic, square_low, MulAdd(cubic_low, square, linear_low));
      const float exponent = x * factor;
      const float low = MulAdd(x, factor_low, ProductResidue(x, factor, exponent));
      return Exp2<float>(exponent, low);
    }
"""


@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("written", ["out", "by name"])
def test_gelu_as_a_user_writes_it(dtype, written):
    """Uses the operations of the built-in, which has shorter ones for 16 bits."""
    operation = {
        "out": "y = x * InverseOfOnePlus<float>(exponential(bounded(x)))",
        "by name": "y = gelu(x)",
    }
    kernel = jof.ElementwiseKernel("T x", "T y", operation[written], "my", preamble=GELU_PREAMBLE)
    x = np.concatenate([4 * normals(64, 501).ravel(), [0, -0.0, np.inf, -np.inf, np.nan, 50, -50]])
    x = x.astype(dtype)
    if ON_CPU and (dtype == "float32" or written == "by name"):
        assert_same_bits(kernel(x), jof.gelu(x))
    elif ON_CPU:  # one of the two may round to the next number
        eps, least = (float(getattr(jnp.finfo(dtype), n)) for n in ("eps", "smallest_subnormal"))
        close(kernel(x), jof.gelu(x), rtol=eps, atol=max(least, 4e-36))
    else:
        close(kernel(x), jof.gelu(x), rtol=1e-2, atol=1e-3)


# ---- expression trees ----

LEAVES = st.sampled_from(["x", "y", "0.5", "2.0", "-1.25"])
UNARY = {
    "tanh": (np.tanh, lambda a: ("-", "1.0", ("*", ("tanh", a), ("tanh", a)))),
    "sin": (np.sin, lambda a: ("cos", a)),
    "cos": (np.cos, lambda a: ("neg", ("sin", a))),
    "sigmoid": (
        lambda a: 1 / (1 + np.exp(-a)),
        lambda a: ("*", ("sigmoid", a), ("-", "1.0", ("sigmoid", a))),
    ),
    "sqrt1": (lambda a: np.sqrt(1 + a * a), lambda a: ("/", a, ("sqrt1", a))),
    "neg": (np.negative, lambda a: "-1.0"),
}
BINARY = ("+", "-", "*", "/", "max")
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([*UNARY]), inner),
        st.tuples(st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=8,
)


def cpp(tree):
    if isinstance(tree, str):
        return tree
    op, *inner = tree
    a, *b = map(cpp, inner)
    match op:
        case "neg":
            return f"(- {a})"
        case "sqrt1":
            return f"sqrt(1 + {a} * {a})" if a.isidentifier() else f"sqrt(fma({a}, {a}, 1))"
        case "max":
            return f"max({a}, {b[0]})"
        case "/":
            return f"({a} / (1 + {b[0]} * {b[0]}))"
        case "+" | "-" | "*":
            return f"({a} {op} {b[0]})"
    return f"{op}({a})"


def numpy(tree, env):
    if isinstance(tree, str):
        return env.get(tree) if tree in env else np.float64(tree)
    op, *inner = tree
    a, *b = (numpy(t, env) for t in inner)
    match op:
        case "+":
            return a + b[0]
        case "-":
            return a - b[0]
        case "*":
            return a * b[0]
        case "/":
            return a / (1 + b[0] * b[0])
        case "max":
            return np.maximum(a, b[0])
        case "where":
            return np.where(a >= b[0], b[1], b[2])
    return UNARY[op][0](a)


def derivative(tree, name, env):
    """The derivative in NumPy, by the chain rule."""
    if isinstance(tree, str):
        return np.float64(tree == name)
    op, *inner = tree
    a, *b = (numpy(t, env) for t in inner)
    da, *db = (derivative(t, name, env) for t in inner)
    match op:
        case "+":
            return da + db[0]
        case "-":
            return da - db[0]
        case "*":
            return da * b[0] + a * db[0]
        case "/":
            d = 1 + b[0] * b[0]
            return da / d - a * 2 * b[0] * db[0] / d**2
        case "max":
            return np.where(a > b[0], da, db[0])
    slope = UNARY[op][1](inner[0])
    return numpy(slope, env) * da


def derivative_cpp(tree, name):
    """The derivative as C++ source."""
    if isinstance(tree, str):
        return "1.0" if tree == name else "0.0"
    op, *inner = tree
    a, *b = map(cpp, inner)
    da, *db = (derivative_cpp(t, name) for t in inner)
    match op:
        case "+" | "-":
            return f"({da} {op} {db[0]})"
        case "*":
            return f"({da} * {b[0]} + {a} * {db[0]})"
        case "/":
            d = f"(1 + {b[0]} * {b[0]})"
            return f"({da} / {d} - {a} * 2 * {b[0]} * {db[0]} / ({d} * {d}))"
        case "max":
            return f"({a} > {b[0]} ? {da} : {db[0]})"
    return f"({slope_cpp(op, inner[0])} * {da})"


def slope_cpp(op, inner):
    slope = UNARY[op][1](inner)
    if op == "sqrt1":  # a quotient, which is not an operation of the trees
        return f"({cpp(inner)} / {cpp(('sqrt1', inner))})"
    return cpp(slope)


UNARY["sqrt1"] = (UNARY["sqrt1"][0], lambda a: ("*", a, ("over", ("sqrt1", a))))
UNARY["over"] = (lambda a: 1 / a, lambda a: "0.0")


@pytest.mark.usefixtures("as_users")
@cpu_only
@pytest.mark.usefixtures("wide")
@settings(max_examples=5 if settings().max_examples <= 100 else 100)
@given(first=TREES, second=TREES)
def test_expression_trees(first, second):
    trees = {"u": first, "v": second}
    kernel = jof.ElementwiseKernel(
        "T x, T y",
        "T u, T v",
        "".join(f"{out} = {cpp(tree)};" for out, tree in trees.items()),
        "tree",
        derivatives={
            (out, name): derivative_cpp(tree, name)
            for out, tree in trees.items()
            for name in ("x", "y")
        },
    )
    rng = rng_for(str(first), str(second))
    env = {"x": rng.standard_normal((5, 9)), "y": rng.standard_normal(9)}
    full = {"x": env["x"], "y": np.broadcast_to(env["y"], (5, 9))}
    expected = [np.broadcast_to(numpy(t, full), (5, 9)) for t in trees.values()]
    close(kernel(env["x"], env["y"]), expected, 1e-9, 1e-9)

    tangents = {k: rng.standard_normal(v.shape) for k, v in env.items()}
    cts = [rng.standard_normal((5, 9)) for _ in trees]
    slopes = {
        (k, name): np.broadcast_to(derivative(tree, name, full), (5, 9))
        for k, tree in enumerate(trees.values())
        for name in env
    }
    _, found = jax.jvp(kernel, (env["x"], env["y"]), (tangents["x"], tangents["y"]))
    close(found, [sum(slopes[k, n] * tangents[n] for n in env) for k in range(2)], 1e-8, 1e-8)
    dx, dy = jax.vjp(kernel, env["x"], env["y"])[1](tuple(map(jnp.asarray, cts)))
    close(dx, sum(slopes[k, "x"] * cts[k] for k in range(2)), 1e-8, 1e-8)
    close(dy, sum(slopes[k, "y"] * cts[k] for k in range(2)).sum(0), 1e-8, 1e-8)


# ---- transformations ----

CASES = {
    "softsign": (softsign, kernels.softsign_ref, lambda: (normals(6, 5),)),
    "scaled_silu": (
        scaled_silu,
        kernels.scaled_silu_ref,
        lambda: (normals(6, 5), normals(5, key=1), np.float32(1.5)),
    ),
    "rotation": (
        rotation,
        kernels.rotation_ref,
        lambda: (normals(6, 5), normals(6, 5, key=1), normals(6, 5, key=2)),
    ),
}
cases = pytest.mark.parametrize("case", CASES)
one_case = pytest.mark.parametrize("case", one_in(len(CASES), CASES))


def loss_of(f):
    def loss(*args):
        return sum(jnp.sum(jnp.sin(y) * y) for y in jax.tree.leaves(f(*args)))

    return loss


@cases
def test_both_directions_are_one_kernel_each(case):
    """Each covers all inputs and all outputs."""
    kernel, _, inputs = CASES[case]
    args = inputs()
    assert targets(kernel, *args) == ["jof_compiled"]
    y, linear = jax.linearize(kernel, *args)
    assert targets(linear, *args) == ["jof_compiled"]
    assert targets(jax.linear_transpose(linear, *args), y) == ["jof_compiled"]


@pytest.mark.usefixtures("as_users")
@one_case
def test_the_transpose_of_the_vjp_is_the_jvp(case):
    kernel, ref, inputs = CASES[case]
    args = inputs()
    tangents = tuple(x[..., ::-1] if np.ndim(x) else x for x in args)
    y, pull = jax.vjp(kernel, *args)
    close(pull(y), jax.vjp(ref, *args)[1](y), 1e-5, 1e-5)
    (back,) = jax.linear_transpose(pull, y)(tangents)
    close(back, jax.jvp(ref, args, tangents)[1], 1e-5, 1e-5)


def test_transpose_of_what_is_not_linear():
    with pytest.raises(NotImplementedError, match=r"softsign: .* with respect to x, which a"):
        jax.linear_transpose(softsign, 1.0)(1.0)
    # Transposing with respect to an input that the derivative reads is an error, not zeros.
    square = jof.ElementwiseKernel(
        "T x", "T y", "y = x * x", "square", derivatives={"x": "2 * x"}, reference=lambda x: x * x
    )
    with pytest.raises(NotImplementedError, match=r"square: .* with respect to x, which a"):
        jax.linear_transpose(lambda x: jax.jvp(square, (x,), (3.0,))[1], 1.0)(1.0)
    # Transposing with respect to an input that no derivative reads works.
    twice = jof.ElementwiseKernel(
        "T x", "T y", "y = 2 * x", "twice", derivatives={"x": "2"}, reference=lambda x: 2 * x
    )
    x = normals(3)
    for f in (twice, lambda x: jax.jvp(twice, (x,), (x,))[1]):
        close(jax.linear_transpose(f, x)(x)[0], 2 * x)


def test_vmap():
    """With every position of the batch axis in each operand, and without one."""
    kernel, ref, inputs = CASES["scaled_silu"]
    args = inputs()
    axes = [(None, *range(np.ndim(x) + 1)) for x in args]
    choices = [c for c in itertools.product(*axes) if any(axis is not None for axis in c)]
    batches = [
        [
            x if axis is None else np.stack([x * np.float32(w) for w in (0.5, 1, 2)], axis)
            for x, axis in zip(args, in_axes, strict=True)
        ]
        for in_axes in choices
    ]

    @jax.jit
    def both(batches):
        pairs = [*zip(choices, batches, strict=True)]
        return [[jax.vmap(f, in_axes)(*xs) for in_axes, xs in pairs] for f in (kernel, ref)]

    close(*both(batches))


@pytest.mark.parametrize(
    "shapes", [((3, 1), (4,)), ((1, 4), (3, 1)), ((2, 3, 1), (2, 1, 4)), ((3, 4), (2, 1, 1))]
)
def test_broadcasting(shapes):
    """Columns, channels, and operands that kernels cannot read in place; also derivatives."""
    definition = dict(derivatives={"x": "y * y + 0 * z", "y": "2 * x * y + 0 * z", "z": "1"})
    kernel = jof.ElementwiseKernel(
        "T x, T y, T z", "T r", "r = x * y * y + z", "broadcast", **definition
    )
    xs = (normals(*shapes[0]), normals(*shapes[1]), normals(3, 4))

    def reference(x, y, z):
        return x * y * y + z

    def everything(f):
        value, pull = jax.vjp(f, *xs)
        return value, pull(value), jax.jvp(f, xs, xs)

    actual, expected = (jax.jit(everything, static_argnums=0)(f) for f in (kernel, reference))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
    )


def test_vmap_does_not_loop_or_copy():
    x, bias = normals(4, 6, 5), normals(5)
    text = jax.jit(jax.vmap(scaled_silu, (0, None, None))).lower(x, bias, 1.0).as_text()
    assert text.count("custom_call @jof_compiled") == 1
    assert not re.search(r"broadcast_in_dim.*-> tensor<4x6x5xf32>", text)  # only to 1x1x5


def test_jaxprs_name_the_kernel():
    jaxpr = jax.make_jaxpr(softsign)(np.float32(1))
    assert len(jaxpr.eqns) == 1
    assert "spec=softsign" in str(jaxpr)


def test_second_order_of_an_expression_is_refused():
    kernel = jof.ElementwiseKernel(
        "T x, T y", "T z", "z = sin(x) * y", "wave", derivatives={"x": "cos(x) * y", "y": "sin(x)"}
    )
    with pytest.raises(
        NotImplementedError, match=r"(?s)wave.*of z with respect to x.*ElementwiseKernel"
    ):
        jax.grad(jax.grad(kernel))(0.5, 2.0)
    # It is no problem where the derivative does not depend on the differentiated input.
    second = jax.jvp(jax.grad(lambda y: kernel(0.5, y) ** 2), (1.0,), (1.0,))[1]
    np.testing.assert_allclose(second, 2 * np.sin(0.5) ** 2, rtol=1e-5)


@pytest.mark.exhaustive
def test_python_numbers_in_derivatives():
    """JAX passes them to rules unchanged: primals, tangents, cotangents, residuals."""
    x = normals(3)

    def product(x, y):
        return product_kernel(x, y)

    def by_hand(x, y):
        return x * y

    def found(f):
        return [
            jax.grad(f)(1.0, 2.0),
            jax.jvp(f, (1.0, 2.0), (1.0, 3.0)),
            jax.jvp(lambda y: f(x, y), (2.0,), (1.0,)),
            jax.vjp(f, 1.0, 2.0)[1](1.0),
            jax.linearize(f, 1.0, 2.0)[1](1.0, 0.5),
            jax.linear_transpose(lambda x: f(x, 2.0), 1.0)(1.0),
            jax.grad(jax.jit(lambda x: f(x, 2.0)))(1.0),
            jax.grad(jax.jit(lambda y: f(x, y).sum()))(2.0),
            jax.vmap(lambda v: jax.jvp(f, (v, 2.0), (1.0, v)))(x),
            jax.vmap(lambda v: jax.vjp(f, 3.0, v)[1](1.0))(x),
            jax.vmap(jax.grad(lambda v: f(v, 2.0)))(x),
        ]

    expected = jax.jit(lambda: found(by_hand))()
    for reference in (None, by_hand):
        product_kernel = jof.ElementwiseKernel(
            "T x, T y",
            "T z",
            "z = x * y",
            "product",
            derivatives={"x": "y", "y": "x"},
            reference=reference,
        )
        for a, e in zip(*map(jax.tree.leaves, (found(product), expected)), strict=True):
            close(a, e)


def test_derivatives_that_are_none_or_missing():
    kernel = jof.ElementwiseKernel(
        "T x, T y, T w",
        "T z",
        "z = x * floor(y) + w",
        "partly",
        derivatives={"x": "floor(y)", "y": None},
    )
    x, y, w = 1.5, 2.5, 1.0
    assert jax.grad(kernel, (0, 1))(x, y, w) == (2.0, 0.0)
    with pytest.raises(
        NotImplementedError,
        match=r"partly: there is no derivative of z with respect"
        r" to w\. Remedy: give one .* derivatives=\{\"w\"",
    ):
        jax.grad(kernel, 2)(x, y, w)
    assert jax.grad(lambda w: kernel(x, y, jax.lax.stop_gradient(w)))(w) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [{}, {"x": "alpha * exp(-x * x) * (1 - 2 * x * x) + bias"}])
def test_missing_derivatives_are_those_of_the_reference(given):
    def reference(x, bias, alpha):
        return alpha * x * jnp.exp(-x * x) + bias * x

    kernel = jof.ElementwiseKernel(
        "T x, T bias, T alpha",
        "T y",
        "y = alpha * x * exp(-x * x) + bias * x",
        "hermite",
        derivatives=given,
        reference=reference,
    )
    args = normals(4, 7), normals(7, key=1), np.float32(1.5)

    def loss(f):
        return lambda *xs: (f(*xs) ** 2).sum()

    programs = (
        lambda f: jax.grad(loss(f), (0, 1, 2))(*args),
        lambda f: jax.jvp(f, args, args),
        lambda f: jax.jvp(jax.grad(loss(f), (0, 1, 2)), args, args),
        lambda f: jax.grad(lambda *xs: jax.grad(loss(f))(*xs).sum(), (0, 1, 2))(*args),
    )
    ours, theirs = (jax.jit(lambda f=f: [p(f) for p in programs])() for f in (kernel, reference))
    close(ours, theirs, 3e-5, 3e-5)
    assert targets(jax.grad(loss(kernel)), *args).count("jof_compiled") == 2
    narrow = [x.astype("bfloat16") for x in args]
    slope = jax.jvp(lambda x: kernel(x, *narrow[1:]), (narrow[0],), (np.ones_like(narrow[0]),))[1]
    exact = jax.vmap(jax.vmap(jax.grad(reference), (0, 0, None)), (0, None, None))(*args)
    close(slope.astype("float32"), exact, 0.05, 0.05)


def test_integers_have_no_derivative():
    kernel = jof.ElementwiseKernel(
        "T x, int32 n, bool b",
        "T z, int32 m",
        "z = b ? x * n : 0; m = n + 1;",
        "mixed",
        derivatives={("z", "x"): "b ? n : 0"},
    )
    x, n, b = normals(4), np.arange(4, dtype=np.int32), np.array([True, False, True, True])
    (z, m), tangents = jax.jvp(lambda x: kernel(x, n, b), (x,), (x,))
    close(z, np.where(b, x * n, 0).astype("f4"))
    close(tangents[0], z)
    assert tangents[1].dtype == jax.dtypes.float0
    assert m.tolist() == [1, 2, 3, 4]
    dx, dn = jax.grad(lambda x, n: kernel(x, n, b)[0].sum(), (0, 1), allow_int=True)(x, n)
    close(dx, np.where(b, n, 0).astype(np.float32))
    assert dn.dtype == jax.dtypes.float0


def test_only_what_derivatives_read_is_kept():
    kernel = jof.ElementwiseKernel(
        "T x, T y", "T z", "z = exp(x) + y", "sum_of", derivatives={"x": "exp(x)", "y": "1"}
    )
    x, y = normals(6, 5), normals(6, 5, key=1)
    jaxpr = jax.make_jaxpr(lambda x, y: jax.vjp(kernel, x, y)[1](x))(x, y)
    assert [len(e.invars) for e in jaxpr.eqns if e.primitive.name == "jof_compiled"] == [2, 2]
    close(jax.grad(lambda b: kernel(x, b).sum())(y[0]), np.full(5, 6, np.float32))
    close(jax.jvp(lambda b: kernel(x, b), (y[0],), (y[0],))[1], np.broadcast_to(y[0], (6, 5)))


def test_sums_over_what_was_broadcast_are_in_f32():
    x = np.ones((5000, 3), jnp.bfloat16)
    args = x, x[0], jnp.bfloat16(1)
    kernel = jof.ElementwiseKernel(
        "T x, T b, T s",
        "T z",
        "z = x * b * s",
        "p3",
        derivatives={"x": "b * s", "b": "x * s", "s": "x * b"},
    )
    _, db, ds = jax.grad(lambda *a: kernel(*a).astype(jnp.float32).sum(), (0, 1, 2))(*args)
    assert db.tolist() == [jnp.bfloat16(5000)] * 3
    assert ds == jnp.bfloat16(15000)


@pytest.mark.exhaustive
def test_complex_derivatives():
    magnitude = jof.ElementwiseKernel(
        "complex64 z",
        "float32 r",
        "r = abs(z)",
        "magnitude",
        derivatives={"z": "conj(z) / abs(z)"},
        reference=jnp.abs,
    )
    polar = jof.ElementwiseKernel(
        "float32 r, float32 t",
        "complex64 z",
        "z.re = r * cos(t); z.im = r * sin(t);",
        "polar",
        derivatives={
            "r": "Complex<float>{cos(t), sin(t)}",
            "t": "Complex<float>{-r * sin(t), r * cos(t)}",
        },
        reference=lambda r, t: jax.lax.complex(r * jnp.cos(t), r * jnp.sin(t)),
    )
    square = jof.ElementwiseKernel(
        "T z", "T w", "w = z * z", "square", derivatives={"z": "2 * z"}, reference=lambda z: z * z
    )
    z = (normals(3, 4) + 1j * normals(3, 4, key=1)).astype(np.complex64)
    magnitude.check(z)
    square.check(z)
    square.check(z.real)
    polar.check(np.abs(z), np.angle(z[0]))
    close(jax.grad(lambda z: magnitude(z).sum())(z), jax.grad(lambda z: jnp.abs(z).sum())(z))


# ---- devices ----


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    kind = getattr(jax.sharding.AxisType, request.param.title())
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])


def test_sharding_of_two_outputs(mesh):
    args = [normals(8, 4, key=k) for k in range(3)]
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
    put = [jax.device_put(x, sharding) for x in args]
    with jax.set_mesh(mesh):
        for f, ref in (
            (rotation, kernels.rotation_ref),
            *[(jax.grad(loss_of(f), (0, 1, 2)) for f in (rotation, kernels.rotation_ref))],
        ):
            program = jax.jit(f).lower(*put).compile()
            assert not re.search("all-(gather|reduce)", program.as_text())
            results = program(*put)
            assert all(y.sharding.is_equivalent_to(sharding, 2) for y in results)
            close(results, ref(*args), 1e-5, 1e-5)


# ---- the reference ----


@cases
def test_reference_in_its_place(case, monkeypatch):
    kernel, ref, inputs = CASES[case]
    args = inputs()
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    # jax.jit caches traces by function: a new function hides this trace from other tests.
    assert targets(lambda *args: kernel(*args), *args) == []
    every = tuple(range(len(args)))
    close(kernel(*args), ref(*args))

    def transformed(f):
        axes = (None,) * len(every[1:]) + (0,)
        yield jax.grad(loss_of(f), every)(*args)
        yield jax.jvp(f, args, args)
        yield jax.vmap(f, axes)(*args[:-1], np.stack([args[-1]] * 3))

    close(*(jax.jit(lambda f=f: [*transformed(f)])() for f in (kernel, ref)), 1e-5, 1e-5)
    if case == "softsign":
        point = args[0][0]
        close(*(jax.hessian(lambda x, f=f: (f(x) ** 2).sum())(point) for f in (kernel, ref)), 1e-4)


@pytest.mark.parametrize("where", ["asked for", "no compiler", "scalars"])
def test_references_are_differentiated_at_the_real_inputs(where, fresh, monkeypatch):
    """This holds whichever inputs the kernel's own derivatives name."""

    def made(derivative):
        return jof.ElementwiseKernel(
            "T x, T y",
            "T z",
            "z = x * x",
            "unlike",
            derivatives={"x": derivative},
            reference=lambda x, y: x * x * x * y,
        )

    x, y = normals(4), normals(4, key=1)
    if where == "asked for":
        monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    elif where == "no compiler":
        if not ON_CPU:
            pytest.skip("about the C++ compiler")
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setattr(_native, "warn_of_fallback", lambda *_: None)
    else:
        x, y = x[0], y[0]
    t, ct = x + 1, x - 1
    first = made("2")
    close(jax.jvp(lambda x: first(x, y), (x,), (t,))[1], 3 * x * x * y * t)
    close(jax.vjp(lambda x: first(x, y), x)[1](ct)[0], 3 * x * x * y * ct)
    d = jof.ElementwiseKernel("T x, T y", "T d", "d = 2 * x", "unlike_d", derivatives={"x": "2"})
    second = made(d)
    moved = jax.jvp(lambda x: jax.vjp(lambda x: second(x, y), x)[1](ct)[0], (x,), (t,))[1]
    close(moved, 6 * x * y * ct * t, 1e-5)


def test_a_native_call_reads_what_derivatives_name():
    """The other inputs are passed for the reference only."""
    kernel = jof.ElementwiseKernel(
        "T x, T y",
        "T z",
        "z = exp(x) + y",
        "sum_of",
        derivatives={"x": "exp(x)", "y": "1"},
        reference=lambda x, y: jnp.exp(x) + y,
    )
    x, y = normals(6, 5), normals(6, 5, key=1)

    def both(x, y):
        z, pull = jax.vjp(kernel, x, y)
        return z, pull(z)

    text = jax.jit(both).lower(x, y).as_text()
    calls = re.findall(r"custom_call @jof_compiled\((.*?)\)", text)
    assert sorted(call.count("%") for call in calls) == [2, 2]  # x and y; x and the cotangent
    # In the jaxpr the VJP has all three: its lowering may choose the reference.
    vjp = jax.make_jaxpr(both)(x, y).eqns[-1]
    assert (vjp.primitive.name, len(vjp.invars)) == ("jof_compiled", 3)
    # Only the array has the result's shape.
    close(jax.jvp(lambda s: kernel(x, s), (2.0,), (3.0,))[1], np.full((6, 5), 3, np.float32))


@pytest.mark.parametrize("with_derivative", [False, True])
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_references_of_steps(monkeypatch, dtype, implementation, with_derivative):
    """A reference may return bool or integers: as in jnp, the derivative of a cast of them is 0."""
    derivatives = {("z", "x"): "x - x"} if with_derivative else {}
    kernel = jof.ElementwiseKernel(
        *("T x, T y", "T z, float32 w", "z = x == y; w = 2", "steps"),
        derivatives=derivatives,
        reference=lambda x, y: (x == y, 2),
    )
    x, y = np.arange(3).astype(dtype), np.array([0, 5, 2], dtype)
    v = np.full_like(x, 2)

    def f(x):
        return kernel(x, y)

    def cts(x):
        return jax.vjp(f, x)[1]((v, v.astype(np.float32)))[0]

    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", implementation)
    for g in (f, cts):
        results, tangents = jax.jit(lambda g=g: jax.jvp(g, (x,), (v,)))()
        expected = (x == y, np.full(3, 2)) if g is f else np.zeros(3)
        jax.tree.map(np.testing.assert_array_equal, results, expected)
        jax.tree.map(lambda t: np.testing.assert_array_equal(t, 0), tangents)


def test_no_reference(monkeypatch):
    kernel = jof.ElementwiseKernel("T x", "T y", "y = x + 1", "alone")
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    with pytest.raises(NotImplementedError, match=r"alone.*reference="):
        kernel(1.0)
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION")
    with pytest.raises(NotImplementedError, match=r"alone.*CPUs and NVIDIA GPUs.*reference="):
        jax.export.export(jax.jit(kernel), platforms=["tpu"])(1.0)
    exported = jax.export.export(jax.jit(lambda x: softsign(x)), platforms=["tpu"])(1.0)
    assert "@jof_compiled" not in exported.mlir_module()


@one_case
def test_check(case):
    """With 16-bit inputs, for which `check` also runs in float32."""
    kernel, _, inputs = CASES[case]
    kernel.check(*(x.astype(jnp.bfloat16) for x in inputs()))


def test_check_finds_what_is_wrong():
    def made(operation="y = x * x", derivative="2 * x", reference=lambda x: x * x):
        return jof.ElementwiseKernel(
            "T x", "T y", operation, "checked", derivatives={"x": derivative}, reference=reference
        )

    x = normals(5)
    made().check(x)
    with pytest.raises(AssertionError, match="checked: y is not that of the reference"):
        made(operation="y = x * x + 1").check(x)
    with pytest.raises(AssertionError, match="checked: the JVP with respect to x of y is not"):
        made(derivative="3 * x").check(x)
    made(derivative="2.001 * x").check(x, rtol=1e-2)
    # Wrong except where inputs are 1.
    with pytest.raises(AssertionError, match="checked: the JVP with respect to x of y is not"):
        made(derivative="2").check(x)
    with pytest.raises(AssertionError, match="checked: the JVP with respect to x of y is not"):
        made(derivative=None).check(x)
    # With 16-bit inputs, zero is not close to small values, and three digits are not enough.
    narrow = (x / 64).astype("bfloat16")
    made().check(narrow)
    with pytest.raises(AssertionError, match="checked: the JVP with respect to x of y is not"):
        made(derivative="0").check(narrow)
    with pytest.raises(AssertionError, match="x of y in float32 is not that of the reference"):
        made(derivative="2.001 * x").check(narrow)
    with pytest.raises(ValueError, match="checked: check compares with the reference"):
        made(reference=None).check(x)


# ---- the object ----


def test_repr_hash_equality_and_copies():
    def made(operation="y = x"):
        return jof.ElementwiseKernel("T x", "T y", operation, "same", derivatives={"x": "1"})

    a, b = made(), made()
    assert a == b
    assert hash(a) == hash(b)
    assert a != made("y = +x")
    assert a != "same"
    assert repr(a) == ("ElementwiseKernel('T x', 'T y', 'y = x', name='same', derivatives={'x'})")
    for again in (
        pickle.loads(pickle.dumps(rotation)),
        copy.deepcopy(rotation),
        copy.copy(rotation),
    ):
        assert again == rotation
        assert hash(again) == hash(rotation)
    assert pickle.loads(pickle.dumps(softsign)) == softsign
    assert rotation.name == "rotation"
    assert "jit_rotation" in jax.jit(rotation).lower(1.0, 2.0, 3.0).as_text()
    with pytest.raises(AttributeError):
        a.anything = 1
    count = 0

    def traced(k, x):
        nonlocal count
        count += 1
        return k(x)

    f = jax.jit(traced, static_argnums=0)
    f(a, 1.0), f(b, 1.0)
    assert count == 1


def test_a_letter_has_one_dtype():
    kernel = make("T x, T s", "T y", "y = x * s")
    with pytest.raises(ValueError, match="inputs of type T must have one dtype"):
        kernel.source(["bfloat16", "float32"], platform="cpu")
    assert kernel.source(["bfloat16", jnp.bfloat16], platform="cpu")


def test_source():
    text = scaled_silu.source("bfloat16", platform="cpu", kinds=["array", "broadcast", "scalar"])
    for part in (
        "alpha * silu(x + bias)",
        "cpu/compiled.h",
        "jof::BroadcastOperand<jof::BFloat16, 0>",
        '#line 1 "operation of scaled_silu"',
        "silu_derivative",
    ):
        assert part in text
    assert "cuda/compiled.cuh" in softsign.source({"T": jnp.float16})
    assert "JVP" in rotation.source(["float32"] * 3, derivative="jvp")
    for call, message in (
        (lambda: softsign.source({}), "softsign: dtypes must have one for T"),
        (lambda: softsign.source(["float32"] * 2), "must have 1 entries"),
        (lambda: softsign.source("float32", platform="tpu"), "platform must be one of"),
        (lambda: softsign.source("float32", kinds=["array"] * 2), "kinds must have 1 entries"),
        (lambda: softsign.source("float32", kinds=["pile"]), "kinds must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="softsign: x must have one of the dtypes"):
        softsign.source("int4")


def test_threads():
    kernel = jof.ElementwiseKernel("T x, T s", "T y", "y = x * s + 17", "threaded")
    x = normals(100)
    results, errors = {}, []

    def work(n):
        try:
            results[n] = jax.jit(lambda x: kernel(x, float(n)))(x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for n, y in results.items():
        close(y, x * np.float32(n) + 17)


def test_many_kernels_at_once():
    """Each kernel is loaded from a separate file."""
    made = [jof.ElementwiseKernel("T x", "T y", f"y = x + {n}", f"plus_{n}") for n in range(6)]
    assert [float(k(1.0)) for k in made] == [1.0 + n for n in range(6)]
    assert [float(k(1.0)) for k in reversed(made)] == [6.0 - n for n in range(6)]


def test_a_cached_call_adds_nothing():
    x = jnp.ones((128, 128))
    mine = jax.jit(jof.ElementwiseKernel("T x", "T y", "y = relu(x)", "my_relu"))
    builtin = jax.jit(jof.relu)

    def seconds(f):
        best = np.inf
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(20):
                f(x)
            x.block_until_ready()
            best = min(best, time.perf_counter() - start)
        return best / 20

    for f in (mine, builtin):
        f(x).block_until_ready()
    assert seconds(mine) < 1.5 * seconds(builtin) + 20e-6


# ---- export ----

LOAD = """
import pathlib, pickle, sys
import jax
import jax_oneflow_ops
program, args = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
f = jax.export.deserialize(program).call
results = jax.device_get((f(*args), jax.grad(lambda *a: f(*a)[0].sum(), (0, 1, 2))(*args)))
pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(results))
"""


@pytest.mark.exhaustive
def test_export_to_a_process_without_compiler(tmp_path):
    args = CASES["rotation"][2]()
    export = jax.export.export(jax.jit(rotation), disabled_checks=jof.export_checks())
    exported = export(*args)
    assert "@jof_compiled" in exported.mlir_module()
    program = exported.serialize(vjp_order=1)
    (tmp_path / "in").write_bytes(pickle.dumps((program, args)))
    environment = {
        **os.environ,
        "CXX": "no-such-compiler",
        "JAX_ONEFLOW_OPS_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        LOAD,
        str(tmp_path / "in"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    value, gradient = pickle.loads((tmp_path / "out").read_bytes())
    close(value, jax.device_get(exported.call(*args)), 0, 0)
    close(value, jax.device_get(kernels.rotation_ref(*args)))

    def first(*a):
        return kernels.rotation_ref(*a)[0].sum()

    close(gradient, jax.device_get(jax.grad(first, (0, 1, 2))(*args)), 1e-5, 1e-5)
    assert not (tmp_path / "cache").exists()


# ---- the cache ----


def entries(folder):
    """The entries that name a compiler. Each has a companion (".any") that names none."""
    every = [path for path in folder.iterdir() if not path.name.startswith(".")]
    of_compilers = sorted(path for path in every if path.suffix != ".any")
    assert len(every) == 2 * len(of_compilers)
    return of_compilers


@cpu_only
def test_cold_and_warm(fresh, monkeypatch):
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    start = time.perf_counter()
    code = compiled(softsign)
    cold = time.perf_counter() - start
    assert len(calls) == 1
    (entry,) = entries(fresh)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert compiled(softsign) is code  # from memory
    monkeypatch.setattr(cache, "_compiled", {})
    start = time.perf_counter()
    assert compiled(softsign) == code
    warm = time.perf_counter() - start
    assert len(calls) == 1
    assert cold < 3
    assert warm < 0.03


@pytest.mark.exhaustive
@cpu_only
@pytest.mark.parametrize(
    "damage", ["truncated", "changed", "empty", "foreign", "folder", "writable", "link", "pipe"]
)
def test_damaged_entries_are_rebuilt(damage, fresh, monkeypatch, tmp_path):
    code = compiled(softsign)
    (entry,) = entries(fresh)
    content = entry.read_bytes()
    if damage == "truncated":
        entry.write_bytes(content[:-100])
    elif damage == "changed":
        entry.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "writable":
        entry.chmod(0o666)
    elif damage == "foreign":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(entry, 12345, -1)
    elif damage == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        entry.unlink()
        os.mkfifo(entry)
    else:
        entry.unlink()
        entry.mkdir()
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    monkeypatch.setattr(cache, "_compiled", {})
    again = compiled(softsign)
    assert len(calls) == 1
    if damage != "folder":
        assert entry.read_bytes()[-len(again) :] == again
        assert not entry.is_symlink()
    assert len(code) == len(again)
    assert {p.suffix for p in fresh.iterdir()} == {"", ".any"}  # no temporary file is left
    assert entries(fresh) == [entry]


@cpu_only
@pytest.mark.parametrize("problem", ["a file", "others may write", "read-only", "no home"])
def test_without_a_folder(problem, fresh, monkeypatch):
    if problem == "a file":
        fresh.write_text("")
    elif problem == "others may write":
        fresh.mkdir(mode=0o777)
        fresh.chmod(0o777)
    elif problem == "read-only":
        # Root may write to read-only folders, but nobody may write to this one.
        monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", "/proc/self/no such folder")
    else:
        monkeypatch.delenv("JAX_ONEFLOW_OPS_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def no_home():
            raise RuntimeError

        monkeypatch.setattr(Path, "home", no_home)
        assert cache.cache_folder() is None
    assert compiled(softsign).startswith(b"\x7fELF") or sys.platform != "linux"
    if fresh.is_dir():
        assert not entries(fresh)


def test_the_folder(monkeypatch):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", "/some/where")
    assert cache.cache_folder() == Path("/some/where")
    monkeypatch.delenv("JAX_ONEFLOW_OPS_CACHE_DIR")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        assert cache.cache_folder() == Path("/caches/jax_oneflow_ops")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
        assert cache.cache_folder() == Path.home() / ".cache" / "jax_oneflow_ops"


RACE = """
import sys, time
from jax_oneflow_ops._codegen import cache
source = sys.stdin.read()
time.sleep(max(0, float(sys.argv[1]) - time.time()))
sys.stdout.buffer.write(cache.code(source, "cpu"))
"""


@pytest.mark.exhaustive
@cpu_only
def test_two_processes_race(fresh):
    source = softsign.source("float64", platform="cpu").encode()
    start = str(time.time() + 3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, start], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for process in processes:
        process.stdin.write(source)
        process.stdin.close()
    codes = []
    for process in processes:
        codes.append(process.stdout.read())
        process.stdout.close()
        assert process.wait() == 0
    (entry,) = entries(fresh)
    stored = entry.read_bytes()
    assert all(len(code) > 1000 for code in codes)
    assert any(stored.endswith(code) for code in codes)


@cpu_only
def test_the_key(fresh, monkeypatch, tmp_path):
    """Every compiler and every source has a separate entry."""
    compiled(softsign)
    compiled(softsign, "float64")
    assert len(entries(fresh)) == 2
    other = tmp_path / "other-c++"
    other.symlink_to(shutil.which("c++"))
    monkeypatch.setenv("CXX", f"{other} -DUNUSED")
    compiled(softsign)
    assert len(entries(fresh)) == 3
    monkeypatch.setattr(_native, "cpu_instruction_set", lambda: "baseline")
    compiled(softsign)
    assert len(entries(fresh)) == 4


@cpu_only
def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    alone = jof.ElementwiseKernel("T x", "T y", "y = x + 2.5", "compilerless")
    with pytest.raises(
        NotImplementedError, match=r"compilerless: there is no C\+\+ compiler.*CXX.*reference="
    ):
        alone(1.0)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(NotImplementedError, match="CXX names 'no-such-compiler -O2'"):
        jof.ElementwiseKernel("T x", "T y", "y = x + 2.125", "wrong_cxx")(1.0)
    monkeypatch.setenv("CXX", "g++ -DQUOTE='")
    with pytest.raises(NotImplementedError, match=r"open_quote: .*CXX is no command.*QUOTE"):
        jof.ElementwiseKernel("T x", "T y", "y = x + 2.25", "open_quote")(1.0)


@cpu_only
@pytest.mark.parametrize("problem", ["no folder", "no program"])
def test_a_compiler_that_cannot_run(problem, fresh, monkeypatch, tmp_path):
    if problem == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    else:
        compiler = tmp_path / "c++"
        compiler.write_bytes(b"\x7fELF for another machine")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
    kernel = jof.ElementwiseKernel("T x", "T y", "y = x + 3.5", "unable")
    with pytest.raises(NotImplementedError, match=r"(?s)unable: .* cannot run \(.*TMPDIR"):
        kernel(1.0)
    referred = jof.ElementwiseKernel(
        "T x", "T y", "y = x + 3.5", "unable", reference=lambda x: x + 3.5
    )
    with pytest.warns(RuntimeWarning, match="cannot run"):
        assert referred(np.ones(2, np.float32)).tolist() == [4.5, 4.5]
    with pytest.raises(NotImplementedError, match=r"unable: .* cannot run"):
        referred.check(np.ones(2, np.float32))


@cpu_only
def test_a_warm_cache_needs_no_compiler(fresh, monkeypatch):
    """If the compiler is gone, and CXX is unchanged or unset."""
    code = compiled(softsign)
    monkeypatch.setattr(cache, "_compiled", {})
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiled(softsign) == code
    with pytest.raises(compilers.CompilerMissingError):
        compiled(softsign, "float64")
    # Another CXX may have other options, so the default compiler's entries do not apply.
    monkeypatch.setattr(cache, "_compiled", {})
    monkeypatch.setenv("CXX", "no-such-compiler -ffast-math")
    with pytest.raises(compilers.CompilerMissingError):
        compiled(softsign)


@cpu_only
def test_the_reference_runs_without_a_compiler(fresh, monkeypatch):
    """With one warning for all kernels, and none if the reference was requested."""

    def made(n):
        return jof.ElementwiseKernel(
            "T x",
            "T y",
            f"y = x + {n}",
            f"plus_{n}",
            reference=lambda x: x + n,
            derivatives={"x": "1"},
        )

    monkeypatch.setenv("CXX", "no-such-compiler")
    x = np.ones(2, np.float32)
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    assert made(3)(x).tolist() == [4, 4]
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")
    with pytest.raises(NotImplementedError, match=r"plus_4: .*native.*asked for.*CXX names"):
        made(4)(x)
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION")
    with pytest.warns(RuntimeWarning, match="the references of kernels.*CXX names 'no-such"):
        assert made(5)(x).tolist() == [6, 6]
    assert jax.grad(lambda x: made(6)(x).sum())(x).tolist() == [1, 1]


# ---- errors of compilers ----


@cpu_only
def test_a_compile_error_shows_the_users_lines():
    kernel = jof.ElementwiseKernel(
        "T x, T y",
        "T z",
        """
        auto d = x - y;
        z = d * scale;
        """,
        "wrong",
    )
    with pytest.raises(jof.KernelCompileError) as caught:
        jax.jit(kernel)(1.0, 2.0)
    error = caught.value
    lines = str(error).splitlines()
    at = next(k for k, line in enumerate(lines) if "z = d * scale" in line)
    assert lines[at].startswith("    3 | ")
    assert "'scale' was not declared" in lines[at + 1] or "undeclared" in lines[at + 1]
    assert lines[at + 1].index("^") == lines[at].index("scale")
    assert "operation of wrong:" in lines
    assert "wrong does not compile where x is T" not in str(error)
    assert "T x is float32" in str(error)
    assert "scale" in error.log
    assert "struct jof_functor" in error.source
    assert error.kernel == "wrong"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.log) == (str(error), error.log)


@cpu_only
@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        ({"preamble": "\nstruct A { nonsense b; };"}, "preamble of broken:"),
        ({"derivatives": {"x": "2 * nonsense"}}, "derivative of y with respect to x of broken:"),
        ({"preamble": "\n#include <nonsense.h>"}, "    2 | #include <nonsense.h>"),
    ],
)
def test_compile_errors_elsewhere(arguments, label):
    kernel = jof.ElementwiseKernel("T x", "T y", "y = 2 * x", "broken", **arguments)
    with pytest.raises(jof.KernelCompileError) as caught:
        jax.grad(kernel)(1.0)
    assert label in str(caught.value)
    assert "nonsense" in str(caught.value)


@cpu_only
@pytest.mark.parametrize(
    ("operation", "derivative", "shown"),
    [
        ("y = x +", "1", "    1 | y = x +\n      |        ^ expected"),
        ("\n  y = x *\n", "1", "    2 |   y = x *\n      |          ^ expected"),
        ("y = x", "0, 2 * x", "    1 | 0, 2 * x\n      |         ^ no matching function"),
        ("y = x", "2 *", "    1 | 2 *\n      |    ^ expected"),
        ("y = __expf(x)", "1", "    1 | y = __expf(x)\n      |     ^ __expf is declared, but"),
        ("y = 2 * own(x)", "1", "    1 | y = 2 * own(x)\n      |         ^ own is declared, but"),
        ('y = 2 * silu("x")', "1", '    1 | y = 2 * silu("x")\n      |             ^ invalid'),
        ("y = x / 2 % x", "1", "    1 | y = x / 2 % x\n      |           ^ invalid operands"),
    ],
)
def test_compile_errors_at_the_end_in_headers_and_of_linkers(operation, derivative, shown):
    if "clang" in subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("has GCC's words")
    kernel = jof.ElementwiseKernel(
        "T x",
        "T y",
        operation,
        "broken",
        preamble="float own(float);",
        derivatives={"x": derivative},
    )
    with pytest.raises(jof.KernelCompileError) as caught:
        jax.grad(lambda x: kernel(x) ** 2)(1.0)
    assert shown in str(caught.value)
    assert "include/" not in str(caught.value)


# Compiler messages about the third line `z = d * scale;`, and about a missing header.
LOGS = {
    "GCC": """\
In file included from /include/cpu/compiled.h:9:
operation of wrong: In static member function 'static float jof_f0::Of(float, float)':
operation of wrong:3:17: error: 'scale' was not declared in this scope
preamble of wrong:2:10: fatal error: nonsense.h: No such file or directory
compilation terminated.
""",
    "Clang": """\
operation of wrong:3:17: error: use of undeclared identifier 'scale'
    3 |         z = d * scale;
      |                 ^
preamble of wrong:2:10: fatal error: 'nonsense.h' file not found
    2 | #include <nonsense.h>
      |          ^~~~~~~~~~~~
2 errors generated.
""",
    "NVRTC": """\
operation of wrong(3): error: identifier "scale" is undefined
          z = d * scale;
                  ^

preamble of wrong(2): catastrophic error: cannot open source file "nonsense.h"
  #include <nonsense.h>
                       ^

2 errors detected in the compilation of "kernel.cu".
""",
    "Clang, in a header": """\
include/common/expression.h:54:17: error: 'scale' cannot be this
   54 |     return name(static_cast<float>(x));
      |                 ^
operation of wrong:3:17: note: in instantiation of function template specialization 'sigmoid'
preamble of wrong:2:10: fatal error: 'nonsense.h' file not found
""",
    "Clang's linker": """\
ld.lld: error: undefined symbol: jof_expression::jof_n0::scale(float)
>>> referenced by <stdin>
preamble of wrong:2:10: fatal error: 'nonsense.h' file not found
""",
    "macOS": """\
Undefined symbols for architecture arm64:
  "_scale", referenced from:
      _jof_compiled in kernel-1.o
preamble of wrong:2:10: fatal error: 'nonsense.h' file not found
""",
    "NVRTC with numbers": """\
operation of wrong(3): error #20: identifier "scale" is undefined
preamble of wrong(2): catastrophic error #1696-D: cannot open source file "nonsense.h"
""",
}


@pytest.mark.parametrize("compiler", LOGS)
def test_what_compilers_say(compiler):
    texts = {
        "operation of wrong": "\n        auto d = x - y;\n        z = d * scale;",
        "preamble of wrong": "\n#include <nonsense.h>",
    }
    found = messages.messages(LOGS[compiler], texts)
    lines = messages.annotated(texts, found).splitlines()
    at = lines.index("    3 |         z = d * scale;")
    column = "z" if "NVRTC" in compiler else "scale"
    assert lines[at + 1].index("^") == lines[at].index(column)
    assert "scale" in lines[at + 1][lines[at + 1].index("^") :]
    at = lines.index("    2 | #include <nonsense.h>")
    assert "nonsense.h" in lines[at + 1]
    assert sum("^" in line for line in lines) == 2


@cpu_only
def test_a_compile_error_about_the_type_of_stored_elements():
    kernel = jof.ElementwiseKernel("T x", "T y", "T h = x * x; y = h;", "stored")
    assert kernel(2.0) == 4
    with pytest.raises(jof.KernelCompileError, match="declare yours with auto or Compute<T>"):
        kernel(jnp.bfloat16(2))


def test_inputs_are_constants_and_preambles_include():
    include = "#include <stdint.h>\n" if ON_CPU else ""  # NVRTC has no such header
    kernel = jof.ElementwiseKernel(
        "T x",
        "T y",
        "y = twice(x)",
        "includes",
        preamble=f"""{include}
            JOF_HOST_DEVICE JOF_INLINE float twice(float x) {{ return x + x; }}""",
    )
    assert kernel(2.0) == 4
    if ON_CPU:
        with pytest.raises(jof.KernelCompileError, match=r"read-only|const"):
            jof.ElementwiseKernel("T x", "T y", "x += 1; y = x", "assigns")(1.0)


# ---- bad input ----


def make(in_params="T x", out_params="T y", operation="y = x", name="bad", **options):
    return jof.ElementwiseKernel(in_params, out_params, operation, name, **options)


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"in_params": ""}, ValueError, 'bad: in_params must be "type name" pairs'),
        ({"in_params": "T"}, ValueError, "in_params .* got 'T'"),
        ({"in_params": "T x,"}, ValueError, "got ''"),
        ({"in_params": "raw T x"}, ValueError, '"raw" of CuPy is not supported'),
        ({"in_params": 3}, TypeError, "bad: in_params must be a string"),
        ({"in_params": "TT x"}, ValueError, "a type must be a single letter"),
        ({"in_params": "float x"}, ValueError, r"for C\+\+'s float write float32"),
        ({"in_params": "T 2x"}, ValueError, "must be letters, digits"),
        ({"in_params": "T é"}, ValueError, "must be letters, digits"),
        ({"in_params": "T class"}, ValueError, "'class', which is a word of C"),
        ({"in_params": "T jof_x"}, ValueError, "begins with jof"),
        ({"in_params": "T a__b"}, ValueError, "is reserved"),
        ({"in_params": "T NAN"}, ValueError, "is a macro"),
        ({"in_params": "T x, T x"}, ValueError, "'x' twice"),
        ({"in_params": "T y"}, ValueError, "'y' twice"),
        ({"in_params": "T T"}, ValueError, "'T' is a parameter's name and a type"),
        ({"in_params": ", ".join(f"T x{k}" for k in range(17))}, ValueError, "at most 16"),
        ({"out_params": "U y"}, ValueError, "the type U of 'y' is not that of an input"),
        ({"operation": ""}, ValueError, "bad: operation must not be empty"),
        ({"operation": " ; "}, ValueError, "must not be empty"),
        ({"operation": None}, TypeError, "operation must be a string"),
        ({"operation": "y = (x"}, ValueError, r"line 1: '\(' is never closed"),
        ({"operation": "y = x;\n}"}, ValueError, "line 2: '}' closes nothing"),
        ({"operation": "y = x; /* "}, ValueError, "does not end"),
        ({"operation": "y = \0"}, ValueError, "NUL"),
        ({"operation": "y = x; // \ud800"}, ValueError, r"bad: operation .*UTF-8.*'\\ud800'"),
        ({"preamble": "// \udfff"}, ValueError, "bad: preamble .*UTF-8"),
        ({"derivatives": {"x": "1 /* \ud800 */"}}, ValueError, "the derivative of y .*UTF-8"),
        ({"operation": 'y = R"(x)'}, ValueError, "does not end"),
        ({"preamble": "struct {"}, ValueError, "bad: preamble, line 1"),
        ({"name": "two words"}, ValueError, "name must be letters"),
        ({"name": "for"}, ValueError, "is a word of C"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"reference": 3}, TypeError, "reference must be a function"),
        ({"reference": Unhashable()}, TypeError, "reference must be hashable, .* got Unhashable"),
        ({"derivatives": ["1"]}, TypeError, "derivatives must be a dict"),
        ({"derivatives": {"w": "1"}}, ValueError, "'w' is not an input"),
        ({"derivatives": {("z", "x"): "1"}}, ValueError, "'z' is not an output"),
        ({"derivatives": {3: "1"}}, ValueError, 'must have keys "input"'),
        ({"derivatives": {"x": 1}}, TypeError, "the derivative of y with respect to x must be"),
        ({"derivatives": {"x": "1;"}}, ValueError, "without a semicolon"),
        ({"derivatives": {"x": ""}}, ValueError, "must not be empty"),
        ({"derivatives": {"x": "1", ("y", "x"): "1"}}, ValueError, "is given twice"),
        ({"in_params": "T x, int32 n", "derivatives": {"n": "1"}}, ValueError, "n is int32"),
        ({"out_params": "T y, T z", "derivatives": {"x": "1"}}, ValueError, "must have keys"),
        (
            {"derivatives": {"x": rotation}},
            ValueError,
            "a kernel of the same inputs, T x, with one",
        ),
    ],
)
def test_bad_definitions(arguments, kind, message):
    with pytest.raises(kind, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    "operation",
    [
        "x * 2",
        "y == 2 * x",
        "x += y",
        "y",
        "if (x > 0) { x * y; }",
        "auto f = [&](float v) { return v + y; }; f(x)",
        "max(x, y)",
        "x & y",
        "{ auto y = x; }",
        "/* y = x */ x",
        "x; // \\\ny = x",
        "auto s = 'y'; s = x",
        "Complex<float> v{}; v.y = x",
        "x[y] = 2",
        "for (float v = x; v < y; v += 1) v *= 2",
    ],
)
def test_an_output_that_is_never_assigned_is_refused(operation):
    with pytest.raises(ValueError, match=r"bad: operation must assign to every .* to 'y': write"):
        make(operation=operation)


@pytest.mark.parametrize(
    ("operation", "preamble"),
    [
        ("y += x", ""),
        ("if (x > 1e9f) x; else y = x", ""),
        ("x > 0 ? y = x : y = -1", ""),
        ("(y) = x", ""),
        ("float v; (x > 0 ? y : v) = x", ""),
        ("float v; (x > 0 ? v : y) = x; y = x", ""),
        ("*&y = x", ""),
        ("float* p = &y; *p = x", ""),
        ("auto& r = y; r = x", ""),
        ("auto&& r{y}; r = x", ""),
        ("set(x, &y)", "void set(float x, float* y) { *y = x; }"),
        ("set(x, y)", "void set(float x, float& y) { y = x; }"),
        ("at(y) = x", "float& at(float& y) { return y; }"),
        ("auto set = [](float& r, float v) { r = v; }; set(y, x)", ""),
        ("[&] { y = x; }()", ""),
        ("Holder<float>{y}.r = x", "template <typename T> struct Holder { T& r; };"),
        ("y ^ x", "struct V { float v; }; void operator^(V, V) {}"),
        ("OUT(x)", "#define OUT(v) y = v"),
        ("#define OUT y\nOUT = x", ""),
        ("%:define OUT y\nOUT = x", ""),
        ("\\\n y\\\n = x", ""),
        ("++y; y--", ""),
        ("y or_eq x", ""),
        ("set(x, bitand y)", ""),
        ("while (y < x) y = y + 1", ""),
        ("L: y = x", ""),
        ('asm("" : "=f"(y) : "f"(x))', ""),
    ],
)
def test_whatever_may_assign_is_not_refused(operation, preamble):
    make(operation=operation, preamble=preamble)


def test_members_of_outputs_may_be_assigned():
    make(out_params="complex64 y", operation="y.re = x; y.im = 0")
    make(out_params="T y, T z", operation="y = z = x")
    with pytest.raises(ValueError, match="does not to 'z'"):
        make(out_params="T y, T z", operation="y = x, z")


@pytest.mark.parametrize(
    ("derivative", "preamble"),
    [
        ("FACTOR", "%:define FACTOR alpha"),
        ("JOIN(al, pha)", "#define JOIN(a, b) a##b"),
        ("al\\\npha", ""),
        ("al\\ \npha * 1 // \\", ""),
    ],
)
def test_inputs_by_other_names_are_read(derivative, preamble):
    """Such inputs have their values, not zeros."""
    kernel = jof.ElementwiseKernel(
        "T x, T alpha",
        "T y",
        "y = x * alpha",
        "named",
        preamble=preamble,
        derivatives={"x": derivative},
    )
    assert jax.jvp(lambda x: kernel(x, 2.0), (3.0,), (1.0,)) == (6.0, 2.0)


def test_inputs_by_other_names_in_operations():
    joined = "#define JOIN(a, b) a %:%: b\ny = JOIN(al, pha)"
    d = jof.ElementwiseKernel("T x, T alpha", "T y", joined, "joined")
    kernel = jof.ElementwiseKernel(
        "T x, T alpha", "T y", "y = x * alpha", "named", derivatives={"x": d}
    )
    assert jax.jvp(lambda x: kernel(x, 2.0), (3.0,), (1.0,)) == (6.0, 2.0)


X = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: softsign(), TypeError, r"softsign: takes 1 inputs \(T x\), got 0"),
        (lambda: softsign(X, X), TypeError, "got 2"),
        (lambda: softsign("x"), TypeError, "softsign: x must be an array or a number, got str"),
        (lambda: softsign([1.0]), TypeError, "got list"),
        (lambda: softsign(jax.random.key(0)), TypeError, "softsign: x must have one of the dtypes"),
        (
            lambda: scaled_silu(X, X.astype(np.float16), 1),
            TypeError,
            "scaled_silu: bias must have the dtype T, which is float32 in x, got float16",
        ),
        (
            lambda: make("T x, int32 n")(X, 0.5),
            TypeError,
            "bad: n must have the dtype int32, got 0.5",
        ),
        (lambda: make("T x, int8 n")(X, 300), ValueError, "n must be from -128 to 127.*got 300"),
        (lambda: make("T x, int32 n")(X, X), TypeError, "n must have the dtype int32, got float32"),
        (lambda: make("T x, float64 n")(X, 1.0), TypeError, "64-bit"),
        (lambda: make("float32 x", "float32 y")(1j), TypeError, "got 1j"),
        (
            lambda: scaled_silu(X, X.T, 1),
            ValueError,
            r"scaled_silu: operands must have shapes that broadcast.*x \(2, 3\), bias \(3, 2\)",
        ),
        (lambda: scaled_silu(X, X[:, 0], 1), ValueError, r"bias \(2,\)"),
        (lambda: scaled_silu(X, X[:, :2], 1), ValueError, "broadcast together"),
        (lambda: scaled_silu(X[0], X[0, :2], 1), ValueError, "broadcast together"),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_digits_with_separators_and_strings_are_no_brackets():
    make(operation="y = x * 1'000 + sizeof(\"(\") + '{' + u8'[' // (")
    make(operation='y = x * sizeof(R"(")") * sizeof(u8R"a()" /* )b")a")')
    make(operation="y = x * sizeof('\\\\') + 0x1.8p+3f")
    make(operation="// ( \\\n (\ny = x")


def test_the_handler_checks_again():
    """A call by hand must not crash the process."""
    if not ON_CPU:
        pytest.skip("carries code for a CPU")
    code = np.frombuffer(compiled(softsign), np.uint8)
    good = {
        "code": code,
        "id": np.int64(cache.code_id(code.tobytes())),
        "name": "by_hand",
        "kinds": np.zeros(1, np.int64),
        "element_bytes": np.full(2, 4, np.int64),
    }
    x = jnp.ones((2, 3))
    # Code for a processor that is newer than any that exists.
    source = softsign.source("float32", platform="cpu")
    define = "#undef JOF_COMPILED_ISA\n#define JOF_COMPILED_ISA 9\n"
    newer = cache.code(source.replace("namespace", define + "namespace", 1), "cpu")

    def call(x=x, **changed):
        f = jax.ffi.ffi_call("jof_compiled", jax.ShapeDtypeStruct((2, 3), np.float32))
        return f(x, **{**good, **changed})

    close(call(), kernels.softsign_ref(x))
    for changed, message in (
        ({"kinds": np.zeros(2, np.int64)}, "kinds must have 1"),
        ({"kinds": np.full(1, 10, np.int64)}, "operand 0 does not have the kind 10"),
        ({"kinds": np.full(1, -1, np.int64)}, "operand 0 does not have the kind -1"),
        ({"kinds": np.full(1, 1, np.int64)}, "operand 0 does not have the kind 1 "),
        ({"element_bytes": np.array([8, 4])}, "operand 0"),
        ({"element_bytes": np.array([4, 8])}, "result 0"),
        ({"x": jnp.ones((3, 2))}, "operand 0"),
        ({"code": code[:100], "id": np.int64(1)}, "cannot be loaded"),
        ({"code": np.frombuffer(b"nonsense", np.uint8), "id": np.int64(2)}, "cannot be loaded"),
        ({"code": np.frombuffer(newer, np.uint8), "id": np.int64(3)}, "vector instructions"),
    ):
        with pytest.raises(Exception, match=f"by_hand.*{message}"):
            call(**changed).block_until_ready()


def test_operands_of_one_broadcast_kind_must_have_one_layout():
    """The kernel would read the first of these operands out of bounds."""
    if not ON_CPU:
        pytest.skip("carries code for a CPU")
    kernel = make("T x, T y", "T z", "z = (x - y) * (x - y)")
    source = kernel.source("float32", platform="cpu", kinds=["broadcast"] * 2)
    code = cache.code(source, "cpu")
    f = jax.ffi.ffi_call("jof_compiled", jax.ShapeDtypeStruct((2, 3), np.float32))

    def call(x, y):
        return f(
            *(x, y),
            code=np.frombuffer(code, np.uint8),
            id=np.int64(cache.code_id(code)),
            name="by_hand",
            kinds=np.full(2, 2, np.int64),
            element_bytes=np.full(3, 4, np.int64),
        )

    row, element = jnp.arange(3, dtype=jnp.float32).reshape(1, 3), jnp.ones((1, 1))
    close(call(row, row + 2), np.full((2, 3), 4, np.float32))
    for operands in ((element, row), (row, element)):
        with pytest.raises(Exception, match=r"by_hand.*operand 1 does not have the kind 2"):
            call(*operands).block_until_ready()


# ---- NVRTC, without a GPU ----


@pytest.fixture
def nvrtc():
    required = os.environ.get("JOF_REQUIRE_CUDA_MODULE") == "1"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        if required:
            raise
        pytest.skip("NVRTC is not installed (pip install cuda-bindings nvidia-cuda-nvrtc)")


@one_case
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("dtype", "architecture"), [("bfloat16", "sm_90"), ("float32", "compute_80")]
)
def test_nvrtc(case, dtype, architecture, monkeypatch):
    """Compiles to machine code, and to PTX that loads and stores packs."""
    monkeypatch.setattr(cache, "cuda_architecture", lambda: architecture)
    kernel, _, _ = CASES[case]
    for derivative in (None, "jvp", "vjp"):
        code = cache.code(kernel.source(dtype, derivative=derivative), "cuda")
        if architecture == "sm_90":
            assert code.startswith(b"\x7fELF")
        else:
            assert b".entry jof_compiled" in code
            assert re.search(rb"ld\.global(\.nc)?(\.\w+)*\.v4\.", code)


@pytest.mark.usefixtures("nvrtc")
def test_nvrtc_reports_errors_at_the_users_lines():
    kernel = jof.ElementwiseKernel("T x", "T y", "auto h = x;\ny = h * scale;", "wrong")
    source = kernel.source("float32")
    with pytest.raises(compilers.CompilerError) as caught:
        cache.code(source, "cuda")
    (message,) = messages.messages(caught.value.log, {})
    assert (message.label, message.line) == ("operation of wrong", 2)
    assert "scale" in message.text


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("operation", "line", "said"),
    [
        ("y = x;\ny += own(x)", 2, "own is declared, but defined nowhere"),
        ('y = 1;\ny *= sigmoid("x")', 2, "invalid type conversion"),
        ("y = x +", 3, "expected an expression"),
    ],
)
def test_nvrtc_names_the_users_lines_for_other_errors(operation, line, said, monkeypatch):
    monkeypatch.setattr(cache, "cuda_architecture", lambda: "sm_90")
    own = "__device__ float own(float);"
    kernel = jof.ElementwiseKernel("T x", "T y", operation, "wrong", preamble=own)
    with pytest.raises(compilers.CompilerError) as caught:
        cache.code(kernel.source("float32"), "cuda")
    texts = {"operation of wrong": operation}
    (message,) = messages.messages(caught.value.log, texts)
    assert (message.line, message.text) == (line, said)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.skipif(not _native.available("cuda"), reason="built without the CUDA module")
@pytest.mark.parametrize(("architecture", "begin"), [("sm_90", b"\x7fELF"), ("compute_80", b"//")])
def test_cuda_lowering(architecture, begin, monkeypatch):
    """The architecture selects machine code or PTX, whatever the module was built for."""
    monkeypatch.setattr(cache, "cuda_architecture", lambda: architecture)
    args = CASES["scaled_silu"][2]()
    f = jax.jit(jax.value_and_grad(loss_of(scaled_silu), (0, 1, 2)))
    export = jax.export.export(f, platforms=["cuda"], disabled_checks=jof.export_checks())
    text = export(*args).mlir_module()
    pattern = r'custom_call @jof_compiled\(.*?code = dense<"0x([0-9A-F]+)">.*? id = (-?\d+) : i64'
    calls = re.findall(pattern, text)
    assert len(calls) == 2  # the value and the VJP
    for code, number in calls:
        assert bytes.fromhex(code).startswith(begin)
        assert cache.code_id(bytes.fromhex(code)) == int(number)
    assert "kinds = dense<[0, 2, 1]>" in text


def test_nvrtc_missing(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(cache, "cuda_architecture", lambda: "sm_90")
    with pytest.raises(
        compilers.CompilerMissingError, match=r"cuda-bindings.*jax-oneflow-ops\[cuda13\]"
    ):
        cache.code(softsign.source("float32"), "cuda")


def test_architectures(monkeypatch):
    def no_gpu(backend):
        raise RuntimeError

    monkeypatch.setattr(jax, "local_devices", no_gpu)
    for listed, expected in (
        ("90", "sm_90"), ("80,90", "compute_80"), ("", "sm_80"), ("90a-real", "sm_90"),
        ("100-real,103-real", "sm_100"), ("native", "sm_80"),
    ):  # fmt: skip
        monkeypatch.setattr(_native, "cuda_architectures", lambda listed=listed: listed)
        compilers.cuda_architecture.cache_clear()
        assert compilers.cuda_architecture() == expected
    compilers.cuda_architecture.cache_clear()


@pytest.mark.parametrize("shapes", [("n, k", "k"), ("n, k", "n, 1")], ids=str)
def test_export_of_the_gradient_of_a_broadcast_operand(shapes):
    product = jof.ElementwiseKernel(
        "T x, T b", "T y", "y = x * b", "product", derivatives={"x": "b", "b": "x"}
    )
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = x[0] if shapes[1] == "k" else x[:, :1]
    gradient = jax.grad(lambda x, b: (product(x, b) ** 2).sum(), 1)
    specs = jax.export.symbolic_args_specs((x, b), shapes)
    export = jax.export.export(jax.jit(gradient), disabled_checks=jof.export_checks())(*specs)
    np.testing.assert_allclose(export.call(x, b), gradient(x, b), 1e-6)


@cpu_only
def test_macros_of_sources_precede_precompiled_headers():
    """The compiler that conftest.py sets must not change what a source computes."""
    for macro, size in (("", 4), ("#define JOF_NARROW_RESULTS\n", 2)):
        for others in ("", "#define JOF_WITHOUT_HALF\n"):
            text = f'{macro}{others}#include "common/traced.h"\n'
            compilers.CppCompiler().compile(
                text + f"static_assert(sizeof(jof_expression::jof_Rounded) == {size});"
            )
