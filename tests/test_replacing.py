"""Programs that use only JAX's names, run with this package's functions under these names.

Results and errors are JAX's, except for the differences that docs/differences.md lists.
"""

import doctest
import importlib
import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.replacing import ACTIVATIONS, ARITHMETIC, REPLACED, replaced

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


# ---- programs, as users write them: functions of a pytree of arrays, with a scalar result ----


def mlp(params):
    """An MLP with mixed dtypes, weak types and Python numbers."""
    h = jnp.add(params["x"] @ params["w"], params["b"])
    h = jax.nn.gelu(h) + jax.nn.gelu(h, approximate=False)
    h = jnp.multiply(h.astype(jnp.float16), 0.5).astype(jnp.float32)
    h = jax.nn.silu(h @ params["w"].T)
    h = jnp.subtract(jnp.where(h > 0.1, h, 0.1 * h), jnp.divide(1, 2 + h * h))
    return jnp.sum(jnp.maximum(h, -1)) + jax.nn.mish(params["b"][0])


def block(params):
    """An encoder and a decoder of images: layouts, a smaller image and the same size again."""
    x = jnp.transpose(params["x"], (0, 2, 3, 1))
    h = jax.nn.leaky_relu(x @ params["w"], 0.2)
    small = jax.nn.elu(h[:, ::2, ::2], alpha=params["alpha"])
    large = jax.image.resize(small, h.shape, "nearest")
    h = jax.nn.softplus(jnp.concatenate([h, large], -1)) + jax.nn.hard_swish(2 * h).mean()
    h = jnp.transpose(h, (0, -1, 1, 2)).astype("float16")
    return jnp.mean(jnp.tanh(h.astype(float)) ** 2) + jnp.transpose(x).sum()


def embeddings(params):
    """Rows of a table, summed by segment, with ids out of range."""
    rows = jnp.take(params["table"], jnp.array([[3, -1, 0], [2, 2, 1]]), axis=0)
    rows = jax.nn.sigmoid(jnp.take(rows, jnp.array([1, 7, -1]), axis=-1, mode="clip"))
    found = jnp.take(params["table"], np.array([9, 1]), axis=0, fill_value=1)
    bags = jax.ops.segment_sum(rows.reshape(6, 3), jnp.array([0, 3, -1, 1, 0, 5]), 4)
    bags = jnp.minimum(bags, jax.ops.segment_sum(params["table"][:4, :3], np.arange(4), 4))
    return jnp.sum(jax.nn.relu(bags - 0.3) ** 2) + jnp.tanh(found).sum()


PROGRAMS = {
    "mlp": (
        mlp,
        {"x": normal(2, 4), "w": normal(4, 3), "b": normal(3)},
        {"jof_gelu_tanh", "jof_gelu_tanh_vjp", "jof_gelu_erf_vjp", "jof_silu_vjp", "jof_cast"}
        | {"jof_where", "jof_where_vjp", "jof_divide", "jof_divide_vjp", "jof_maximum_vjp"},
    ),
    "block": (
        block,
        {"x": normal(1, 2, 4, 4), "w": normal(2, 3), "alpha": normal()},
        {"jof_permute", "jof_leaky_relu_vjp", "jof_elu", "jof_softplus_vjp", "jof_tanh_vjp"}
        | {
            "jof_upsample_nearest2d",
            "jof_upsample_nearest2d_backward",
            "jof_hard_swish",
            "jof_cast",
        },
    ),
    "embeddings": (
        embeddings,
        {"table": normal(4, 5)},
        {"jof_gather_rows", "jof_sigmoid_vjp", "jof_minimum_vjp", "jof_relu_vjp", "jof_tanh_vjp"},
    ),
}


def transformed(f, x):
    """The results of transformations of f at x."""
    t = jax.tree.map(lambda v: v[..., ::-1] if v.ndim else v, x)
    several = jax.tree.map(lambda v: jnp.stack([v, 0.5 * v, -v]), x)

    def stepped(x, rate):
        return jax.tree.map(lambda v, g: jnp.subtract(v, rate * g), x, jax.grad(f)(x))

    _, pull = jax.vjp(f, x)
    return {
        "value": f(x),
        "grad": jax.grad(f)(x),
        "jit of grad": jax.jit(jax.grad(jax.jit(f)))(x),
        "pulled": pull(2.0),
        "jvp": jax.jvp(f, (x,), (t,)),
        "vmap": jax.vmap(f)(several),
        "vmap of grad": jax.vmap(jax.grad(f))(several),
        "hessian times t": jax.jvp(jax.grad(f), (x,), (t,)),
        "scan": lax.scan(lambda c, rate: (stepped(c, rate), f(c)), x, jnp.array([0.1, 0.2])),
        "while": lax.while_loop(
            lambda c: c[0] < 2, lambda c: (jnp.add(c[0], 1), stepped(c[1], 0.1)), (0, x)
        ),
        "cond": jax.grad(lambda x: lax.cond(f(x) > 0, f, lambda x: 2 * f(x), x))(x),
        "switch": jax.vmap(lambda i, x: lax.switch(i, [f, lambda x: jnp.multiply(3, f(x))], x))(
            jnp.array([0, 1, 1]), several
        ),
    }


def both(program):
    """A program's results with JAX's functions and with this package's, and the latter's calls."""
    expected = jax.jit(lambda: program())()
    with replaced() as counts:
        actual = jax.jit(lambda: program())()
    return expected, actual, counts


def assert_same(expected, actual, rtol=2e-5):
    """Equal types, and values up to rounding, relative to the largest value of an array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, e in jax.tree_util.tree_leaves_with_path(expected):
        a = actual
        for key in path:
            a = a[getattr(key, "key", getattr(key, "idx", None))]
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype, a.weak_type) == (e.shape, e.dtype, e.weak_type), name
        a, e = (np.asarray(v).astype(np.complex128) for v in (a, e))
        finite = np.abs(e[np.isfinite(e)])
        np.testing.assert_allclose(a, e, rtol, rtol * finite.max(initial=0), err_msg=name)


# The others use functions that test_functions covers, too.
@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("block", "embeddings"))],
)
def test_programs(name):
    f, x, targets = PROGRAMS[name]
    expected, actual, counts = both(lambda: transformed(f, x))
    assert_same(expected, actual, rtol=2e-3 if name == "block" else 5e-4)  # they have 16-bit parts
    assert targets <= counts.keys(), targets - counts.keys()


# ---- single functions ----

X, Y = normal(2, 3), normal(3)
FUNCTIONS = {
    **{
        name: (lambda x, name=name: getattr(jax.nn, name)(x), (X,))
        for name in ("relu", "sigmoid", "silu", "swish", "softplus", "hard_swish", "mish", "gelu")
    },
    "leaky_relu": (lambda x, slope: jax.nn.leaky_relu(x, slope), (X, Y)),
    "elu": (lambda x, alpha: jax.nn.elu(x, alpha=alpha), (X, Y[0])),
    "tanh": (lambda x: jnp.tanh(x), (X,)),
    **{name: (lambda x, y, name=name: getattr(jnp, name)(x, y), (X, Y)) for name in ARITHMETIC},
    "where": (lambda x, y: jnp.where(x > 0, x, y), (X, Y)),
    "where of a number": (lambda x: jnp.where(x > 0, x, 0), (X,)),
    "transpose": (lambda x: jnp.transpose(x), (X,)),
    "take": (lambda x: jnp.take(x, jnp.array([1, -1, 5])), (X,)),
    "take, filled": (lambda x: jnp.take(x, jnp.array([[1, 5]]), 1, fill_value=-1), (X,)),
    "take, wrapped": (lambda x: jnp.take(x, jnp.array([[1, 5]]), 1, mode="wrap"), (X,)),
    "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.array([1, 1]), 2), (X,)),
    "segment_sum by buckets": (
        lambda x: jax.ops.segment_sum(x, jnp.array([3, 1]), 4, bucket_size=1, mode="clip"),
        (X,),
    ),
    "resize": (lambda x: jax.image.resize(x, (4, 5), "nearest"), (X,)),
    "resize by a cubic": (lambda x: jax.image.resize(x, (4, 5), "cubic"), (X,)),
    "astype": (lambda x: x.astype(jnp.float16).astype(jnp.float32), (X,)),
}
LINEAR = ("add", "subtract", "transpose", "take", "segment_sum", "segment_sum by buckets", "resize")


def derived():
    """Derivatives of every function, also batched and at Python numbers."""

    def of(name, f, xs):
        wrt = tuple(range(len(xs)))
        numbers = [1.5, -0.75][: len(xs)]
        last = [x[..., None] for x in xs]
        y = jax.eval_shape(f, *xs)
        one = jnp.arange(1.0, y.size + 1).reshape(y.shape)
        found = {
            "jacrev": jax.jacrev(f, wrt)(*xs),
            "hessian": jax.jvp(jax.grad(lambda *xs: jnp.vdot(f(*xs), one), wrt), xs, xs),
            "vmap": jax.vmap(f, in_axes=-1, out_axes=1)(*last),
        }
        if f(*xs).dtype == jnp.float32 and xs[0].shape == f(*xs).shape:
            found |= {
                "tangents": jax.jvp(f, xs, tuple(1 + x * x for x in xs)),
            }
            # Releases of JAX differ in whether these gradients are weakly typed.
            if name not in ("maximum", "minimum"):
                scalar = jax.value_and_grad(lambda *xs: jnp.sum(f(*xs)), wrt)
                found["numbers"] = scalar(*numbers)
        if name in LINEAR:
            found["transpose"] = jax.linear_transpose(f, *xs)(one)
        return found

    return {name: of(name, f, xs) for name, (f, xs) in FUNCTIONS.items()}


def test_functions():
    expected, actual, counts = both(derived)
    assert_same(expected, actual)
    assert len([target for target in counts if target.startswith("jof_")]) > 30


def test_functions_outside_of_jit():
    def eager():
        rows = (FUNCTIONS[name] for name in ("gelu", "elu", "where", "take", "resize", "astype"))
        return [f(*xs) for f, xs in rows]

    expected = eager()
    with replaced() as counts:
        assert_same(expected, eager())
    assert len([target for target in counts if target.startswith("jof_")]) == 6


# ---- types and errors ----


class Wrapped:
    """An array wrapper, as some libraries have for parameters."""

    def __jax_array__(self):
        return jnp.ones((2, 3))


OPERANDS = {
    **{
        dtype: jnp.ones((2, 3), dtype)
        for dtype in ("float32", "float16", "bfloat16", "int8", "uint32", "bool", "complex64")
    },
    **{"row": jnp.ones(3), "column": jnp.ones((2, 1), "int32"), "empty": jnp.ones((0, 2, 3))},
    **{"2": 2, "0.5": 0.5, "True": True, "1j": 1j, "weak": jnp.asarray(2.0)},
    **{"f64": np.ones((2, 3)), "i64": np.ones(3, np.int64), "f16 scalar": np.float16(2)},
    **{"four": jnp.ones(4), "list": [1.0, 2.0, 3.0], "None": None, "string": "a"},
    "float8": jnp.ones((2, 3), "float8_e4m3fn"),
}
# Not paired with each other: JAX may reject one, and this package the other.
WRONG = ("four", "list", "None", "string", "float8")
IDS = jnp.array([1, 0])


def calls():
    """Named calls whose types or errors must be JAX's."""
    nn, half, row = jax.nn, OPERANDS["float16"], OPERANDS["row"]
    arithmetic = {name: getattr(jnp, name) for name in ARITHMETIC}
    activations = [jnp.tanh, *(getattr(nn, name) for name in ACTIVATIONS)]
    for (a, x), (b, y) in itertools.product(OPERANDS.items(), OPERANDS.items()):
        if not {a, b} <= {*WRONG} and ("float32" in (a, b) or a <= b):
            for name, function in arithmetic.items():
                if "float32" in (a, b) or name in ("add", "divide"):
                    yield f"{name}({a}, {b})", partial(function, x, y)
            yield f"where(bool, {a}, {b})", partial(jnp.where, OPERANDS["bool"], x, y)
    for a, x in OPERANDS.items():
        for function in activations:
            yield f"{function.__name__}({a})", partial(function, x)
        yield f"leaky_relu(float16, {a})", partial(nn.leaky_relu, half, x)
        yield f"elu(float16, {a})", partial(nn.elu, half, x)
        yield f"where({a}, 1, 2)", partial(jnp.where, x, 1, 2)
        yield f"where({a})", partial(jnp.where, x)
        yield f"transpose({a})", partial(jnp.transpose, x)
        yield f"transpose({a}, (1, 0))", partial(jnp.transpose, x, (1, 0))
        for method in ("nearest", "bilinear"):
            yield f"resize({a}, {method})", partial(jax.image.resize, x, (4, 6), method)
        for dtype in ("float16", "int8", "bool", "complex64", float, int, None, "no"):
            yield f"astype({a}, {dtype})", partial(jnp.astype, x, dtype)
            yield f"{a}.astype({dtype})", lambda x=x, dtype=dtype: x.astype(dtype)
        for axis, mode in ((None, None), (0, "clip"), (-1, "wrap"), (7, "fill"), (0, "no")):
            if hasattr(x, "dtype"):
                name = f"take({a}, axis={axis}, mode={mode})"
                yield name, partial(jnp.take, x, IDS, axis=axis, mode=mode)
        if a != "float8":
            yield f"segment_sum({a})", partial(jax.ops.segment_sum, x, IDS, 2)
    for rows in (-1, 1.5, "4"):
        yield f"segment_sum(num_segments={rows})", partial(jax.ops.segment_sum, half, IDS, rows)
    for fill in (1, 1.5, True, np.float32(2), np.int8(3), jnp.dtype("bfloat16").type(2)):
        yield f"take(fill={fill!r})", partial(jnp.take, row, IDS, fill_value=fill)
    for function in (jnp.transpose, jnp.tanh, jnp.add):
        yield f"{function.__name__}()", function
    yield "transpose(wrapped)", partial(jnp.transpose, Wrapped())
    yield "astype(wrapped)", partial(jnp.astype, Wrapped(), "float16")


def outcome(call):
    """A traced result, or the type of an error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


def outcomes():
    """The type of each call's result or error, by name."""
    errors = {}

    def traced():
        found = {name: outcome(call) for name, call in calls()}
        errors.update({name: y for name, y in found.items() if isinstance(y, str)})
        return {name: y for name, y in found.items() if not isinstance(y, str)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about casts of complex numbers
        types = jax.eval_shape(traced)
    shown = lambda y: (y.shape, y.dtype.name, y.weak_type)  # noqa: E731
    return {name: jax.tree.map(shown, y) for name, y in types.items()} | errors


@pytest.mark.exhaustive
def test_types_and_errors():
    expected = outcomes()
    with replaced():
        actual = outcomes()
    different = {k: (v, actual[k]) for k, v in expected.items() if v != actual[k]}
    # docs/differences.md describes the errors for shapes that do not broadcast.
    assert not {k: v for k, v in different.items() if v != ("TypeError", "ValueError")}
    assert all("four" in k or "empty" in k for k in different)


# ---- the examples in the docstrings of JAX ----

MODULES = ("jax._src.nn.functions", "jax._src.ops.scatter")
ORIGINALS = {(owner, name): getattr(owner, name) for owner, name in REPLACED}


def examples():
    """The doctests of JAX's modules and of the functions that are replaced, with their globals."""
    finder = doctest.DocTestFinder(recurse=False)
    for module in map(importlib.import_module, MODULES):
        yield from doctest.DocTestFinder().find(module)
    for (owner, name), original in ORIGINALS.items():
        if name in ("add", "maximum", "where", "transpose", "take") and owner is jnp:
            yield from finder.find(original, f"jnp.{name}", globs={})


def failures():
    """The number of examples and the output of the failing ones, by name."""
    found = {}
    for test in examples():
        for (owner, name), original in ORIGINALS.items():
            if test.globs.get(name) is original:
                test.globs[name] = getattr(owner, name)
        test.globs.update(jax=jax, jnp=jnp, np=np)
        printed = []
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
        attempted = runner.run(test, out=printed.append).attempted
        found[test.name] = attempted, "".join(printed)
    return found


@pytest.mark.exhaustive
def test_examples_of_jax():
    expected = failures()
    assert sum(attempted for attempted, _ in expected.values()) > 40
    with replaced() as counts:
        assert failures() == expected
    assert {"relu", "segment_sum", "add", "where", "take", "permute"} <= counts.keys()
