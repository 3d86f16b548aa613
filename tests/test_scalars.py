"""Python numbers and literals of traced programs in every rule, and calls on scalars."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_oneflow_ops as jof
from tests.catalogue import CONDITION, ELEMENTWISE_OPS, PARAMETER, POSITIVE, REAL, of_numbers

# Numbers at which all ops are smooth.
NUMBERS = {REAL: (1.5, -2.0, 0.5), POSITIVE: (2.0,) * 3, PARAMETER: (0.25,) * 3}
NUMBERS[CONDITION] = NUMBERS[REAL]


def row(op):
    """The jof function, its jnp equivalent, and numbers."""
    numbers = [NUMBERS[domain][i] for i, domain in enumerate(op.domain)]
    if PARAMETER in op.domain:
        numbers[0] *= -1  # for positive numbers some ignore the parameter
    return of_numbers(op, op.function), of_numbers(op, op.replaces), tuple(numbers)


FUNCTIONS = {op.name: row(op) for op in ELEMENTWISE_OPS if not op.variant}
FUNCTIONS["cast"] = (
    lambda x: jof.cast(x, jnp.float16),
    lambda x: jnp.asarray(x).astype(jnp.float16),
    (0.75,),
)
ROWS = pytest.mark.parametrize("name", FUNCTIONS)


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), actual, expected)


def every_derivative(f, numbers):
    """Values and derivatives, with Python numbers for all vectors."""
    f32 = [jnp.float32(x) for x in numbers]
    wrt = tuple(range(len(numbers)))
    # jit turns closed-over numbers into literals.
    partial = jax.jit(lambda x: f(x, *numbers[1:]))
    result, pull = jax.vjp(partial, f32[0])
    return (
        f(*numbers),
        jax.grad(lambda *xs: f(*xs).astype(jnp.float32), wrt)(*numbers),
        jax.jvp(f, f32, [1.0] * len(f32)) if result.dtype == jnp.float32 else (),
        jax.grad(lambda x: partial(x).astype(jnp.float32))(numbers[0]),
        pull(1.0) if result.dtype == jnp.float32 else pull(jnp.ones((), result.dtype)),
        jax.grad(jax.grad(lambda x: partial(x).astype(jnp.float32)))(numbers[0]),
        jax.vmap(partial)(jnp.full(3, numbers[0])),
        jax.vmap(jax.grad(lambda x: partial(x).astype(jnp.float32)))(jnp.full(3, numbers[0])),
    )


# One function of each kind runs outside `jax.jit`, where every operation compiles separately.
# Inside, the rules get the same numbers.
EAGER = ("cast", "fma", "leaky_relu", "multiply", "sigmoid", "where")


@ROWS
def test_numbers(name):
    f, reference, numbers = FUNCTIONS[name]
    compiled = jax.jit(every_derivative, static_argnums=(0, 1))
    actual = (every_derivative if name in EAGER else compiled)(f, numbers)
    assert_close(actual, compiled(reference, numbers))


def literal(v):
    return jof.where(True, v, 0.0).sum()


def test_literals_in_transposes():
    assert_close(jax.grad(jax.jit(literal))(jnp.ones(3)), jnp.ones(3))
    assert_close(jax.grad(jax.jit(lambda s: jof.multiply(s, 2.0)))(1.0), 2.0)


def test_scalar_computations():
    """XLA runs these inside reductions and scatters, where it allows no custom call."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    total = jax.lax.reduce(x, 0.0, lambda a, b: jof.add(a, b), (0,))
    np.testing.assert_allclose(total, np.sum(x, 0), rtol=1e-6)
    largest = jax.jit(lambda x: jax.lax.reduce(x, -jnp.inf, lambda a, b: jof.maximum(a, b), (1,)))
    np.testing.assert_array_equal(largest(x), np.max(x, 1))
    windows = jax.lax.reduce_window(
        x, 0.0, lambda a, b: jof.fma(a, 1.0, b), (1, 2), (1, 1), "VALID"
    )
    np.testing.assert_allclose(windows, x[:, 1:] + x[:, :-1], rtol=1e-6)
    np.testing.assert_allclose(x.at[1].apply(jof.gelu)[1], jax.nn.gelu(x[1]), rtol=1e-5)
    # One-element arrays work there, too.
    apply = x.at[0].apply(lambda v: jof.embedding_lookup(jof.relu(v[None]), 0))
    np.testing.assert_array_equal(apply[0], np.maximum(x[0], 0))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_scalars_lower_to_jnp(platform):
    exported = jax.export.export(jax.jit(jof.gelu), platforms=[platform])(jnp.float32(1))
    assert "custom_call" not in exported.mlir_module()


BOOLS = {"array": jnp.array([False, True]), "number": False, "numpy": np.array([True, False])}


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum"])
@pytest.mark.parametrize("kind", BOOLS)
def test_bool_with_a_number(name, kind):
    """XLA selects where a factor is bool: False times NaN is 0."""
    for number in (float("nan"), float("inf"), -0.0, 2.5):
        for operands in ((BOOLS[kind], number), (number, BOOLS[kind])):
            actual, expected = (getattr(m, name)(*operands) for m in (jof, jnp))
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected, err_msg=f"{operands}")
            np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_calls_are_traced_once(caplog):
    """The second time, JAX reuses the call's trace; newer releases retrace what they lower.

    This needs a program over several devices: on one device there is no such function.
    """
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((4, 5)), jax.NamedSharding(mesh, jax.P("a")))
    traced = []
    with jax.explain_cache_misses(True), caplog.at_level(logging.WARNING):
        for factor in (2, 3):
            caplog.clear()
            jax.jit(lambda x, factor=factor: jof.silu(x) * factor)(x)
            assert "lambda" in caplog.text  # jax reports a miss for the program
            traced.append(caplog.text.count("jof_silu_"))
    assert traced[1] < traced[0]


# ---- broadcasting ----

SHAPES = [
    ((3, 4), (4,)),
    ((3, 4), (3, 1)),
    ((3, 1), (1, 4)),
    ((2, 3, 4), (3, 4)),
    ((2, 3, 4), (3, 1)),
    ((2, 3, 4), (2, 1, 4)),
    ((1,), (5,)),
    ((3, 4), (1, 1)),
    ((0, 4), (4,)),
    ((3, 4), ()),
]
BINARY = {
    "add": (jof.add, jnp.add),
    "multiply": (jof.multiply, jnp.multiply),
    "divide": (jof.divide, jnp.divide),
    "swiglu": (jof.swiglu, lambda x, gate: jax.nn.silu(gate) * x),
    "where": (lambda x, y: jof.where(x > 0, y, x), lambda x, y: jnp.where(x > 0, y, x)),
    "fma": (lambda x, y: jof.fma(x, y, y), lambda x, y: x * y + y),
}


# The others broadcast as multiply does.
@pytest.mark.parametrize(
    "name",
    ["multiply", "where", "fma"]
    + [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("add", "divide", "swiglu")],
)
def test_broadcasting(name):
    rng = np.random.default_rng(0)
    numbers = [-2.0, -1.0, 1.0, 2.0]
    pairs = [[rng.choice(numbers, s).astype(np.float32) for s in shapes] for shapes in SHAPES]
    pairs += [pair[::-1] for pair in pairs]

    def everything(f):
        results = []
        for xs in pairs:
            value, pull = jax.vjp(f, *xs)
            hvp = jax.grad(lambda *ys: sum(g.sum() for g in jax.vjp(f, *ys)[1](value)))  # noqa: B023
            results.append((value, pull(value), jax.jvp(f, xs, xs), hvp(*xs)))
        return results

    actual, expected = (jax.jit(everything, static_argnums=0)(f) for f in BINARY[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), actual, expected)


def test_vmapped_broadcasting():
    x, y = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(6.0).reshape(2, 3)
    for in_axes in ((0, None), (None, 0), (0, 0), (1, 1), (2, None)):
        if in_axes == (0, None):
            xs = x, y[:, :, None]
        elif in_axes == (None, 0):
            xs = x[0], y[:, :, None]
        else:
            xs = x, (y[:, :, None] if in_axes != (2, None) else y)
        actual, expected = (jax.vmap(f, in_axes)(*xs) for f in (jof.multiply, jnp.multiply))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", sorted({*BINARY} - {"where"}))
def test_shapes_that_do_not_broadcast(name):
    with pytest.raises(ValueError, match=r"shapes that broadcast together, got .*\(3, 4\)"):
        BINARY[name][0](jnp.ones((3, 4)), jnp.ones(3))


def test_where_with_one_argument():
    condition = jnp.array([0, 1, 2])
    np.testing.assert_array_equal(jof.where(condition)[0], [1, 2])
    np.testing.assert_array_equal(jof.where(condition, size=3, fill_value=7)[0], [1, 2, 7])
    with pytest.raises(TypeError, match="where requires ndarray or scalar"):
        jof.where(condition, 1.0)


@pytest.mark.parametrize("name", ["leaky_relu", "elu", "scale"])
def test_arrays_as_parameters(name):
    x, alpha = jnp.array([[-1.0, 2.0, -3.0]]), jnp.array([[0.5], [2.0]])
    f, reference, _ = FUNCTIONS[name]
    np.testing.assert_allclose(f(x, alpha), reference(x, alpha), rtol=1e-6)
    if name != "scale":
        with pytest.raises(ValueError, match=f'{name}: implementation="native" takes a scalar'):
            f(x, alpha, implementation="native")


@pytest.mark.parametrize("approximate", [0, 1, np.bool_(True), jnp.array(False)])
def test_approximate_as_jax_reads_it(approximate):
    x = jnp.linspace(-3, 3, 7)
    expected = jax.nn.gelu(x, approximate=bool(approximate))
    np.testing.assert_allclose(jof.gelu(x, approximate=approximate), expected, atol=1e-6)
    np.testing.assert_allclose(jof.geglu(1.0, x, approximate), expected, atol=1e-6)
