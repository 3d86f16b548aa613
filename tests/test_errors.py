"""Bad input raises a Python error that says what is wrong, and never crashes."""

import functools
import inspect
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_oneflow_ops as jof

X = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
UP = {"scale_factor": 2}

# (what is wrong, x, keyword arguments, exception, what the message contains besides the function's
# name: the argument, and the actual or the expected value)
BAD_CALLS = [
    ("neither", X, {}, ValueError, ["size", "scale_factor"]),
    ("both", X, {"scale_factor": 2, "size": 7}, ValueError, ["size", "scale_factor", "7"]),
    ("zero size", X, {"size": 0}, ValueError, ["size", "positive", "0"]),
    ("negative size", X, {"size": -3}, ValueError, ["size", "positive", "-3"]),
    ("zero in a pair", X, {"size": (4, 0)}, ValueError, ["size", "positive", "(4, 0)"]),
    ("negative in a pair", X, {"size": (-2, 4)}, ValueError, ["size", "positive", "-2"]),
    ("float size", X, {"size": 2.5}, TypeError, ["size", "integer", "2.5"]),
    ("whole float size", X, {"size": 4.0}, TypeError, ["size", "integer", "4.0"]),
    ("float in a pair", X, {"size": (4, 2.5)}, TypeError, ["size", "integer", "2.5"]),
    ("bool size", X, {"size": True}, TypeError, ["size", "integer", "True"]),
    ("bool in a pair", X, {"size": (True, 4)}, TypeError, ["size", "integer", "True"]),
    ("string size", X, {"size": "44"}, TypeError, ["size", "integer", "44"]),
    ("None in a pair", X, {"size": (4, None)}, TypeError, ["size", "integer", "None"]),
    ("one size in a pair", X, {"size": (4,)}, ValueError, ["size", "pair", "(4,)"]),
    ("three sizes", X, {"size": (4, 5, 6)}, ValueError, ["size", "pair", "(4, 5, 6)"]),
    ("no sizes", X, {"size": ()}, ValueError, ["size", "pair", "()"]),
    ("array as size", X, {"size": np.array([4.0, 5.0])}, TypeError, ["size", "integer"]),
    ("zero factor", X, {"scale_factor": 0}, ValueError, ["scale_factor", "positive", "0"]),
    ("negative factor", X, {"scale_factor": -2.0}, ValueError, ["scale_factor", "-2.0"]),
    ("negative zero", X, {"scale_factor": -0.0}, ValueError, ["scale_factor", "-0.0"]),
    ("nan factor", X, {"scale_factor": np.nan}, ValueError, ["scale_factor", "finite", "nan"]),
    ("infinite", X, {"scale_factor": np.inf}, ValueError, ["scale_factor", "finite", "inf"]),
    ("infinite in a pair", X, {"scale_factor": (2, -np.inf)}, ValueError, ["scale_factor", "inf"]),
    ("complex factor", X, {"scale_factor": 2j}, TypeError, ["scale_factor", "2j"]),
    ("bool factor", X, {"scale_factor": True}, TypeError, ["scale_factor", "True"]),
    ("NumPy bool", X, {"scale_factor": np.True_}, TypeError, ["scale_factor", "True"]),
    ("string factor", X, {"scale_factor": "2"}, TypeError, ["scale_factor", "'2'"]),
    ("three factors", X, {"scale_factor": (1, 2, 3)}, ValueError, ["scale_factor", "(1, 2, 3)"]),
    ("one factor in a pair", X, {"scale_factor": [2]}, ValueError, ["scale_factor", "[2]"]),
    ("empty output", X, {"scale_factor": 0.2}, ValueError, ["scale_factor", "0.2", "empty"]),
    ("empty width", X, {"scale_factor": (1, 0.2)}, ValueError, ["scale_factor", "0.2", "empty"]),
    ("unknown method", X, {**UP, "method": "linear"}, ValueError, ["method", "'linear'"]),
    ("method of bytes", X, {**UP, "method": b"nearest"}, ValueError, ["method", "b'nearest'"]),
    ("no method", X, {**UP, "method": None}, ValueError, ["method", "nearest-exact", "None"]),
    ("list as method", X, {**UP, "method": []}, ValueError, ["method", "[]"]),
    ("unknown layout", X, {**UP, "data_format": "CHWN"}, ValueError, ["data_format", "'CHWN'"]),
    ("lower case", X, {**UP, "data_format": "nchw"}, ValueError, ["data_format", "NHWC", "nchw"]),
    ("unknown", X, {**UP, "implementation": "cuda"}, ValueError, ["implementation", "'cuda'"]),
    ("flag", X, {**UP, "implementation": True}, ValueError, ["implementation", "True"]),
    ("list", X, {**UP, "implementation": []}, ValueError, ["implementation", "[]"]),
    ("rank 0", X[0, 0, 0, 0], UP, ValueError, ["x", "3", "()"]),
    ("rank 1", X[0, 0, 0], UP, ValueError, ["x", "3", "(4,)"]),
    ("rank 2", X[0, 0], UP, ValueError, ["x", "3", "(3, 4)"]),
    ("list of lists", X.tolist(), UP, TypeError, ["x", "array", "list"]),
    ("None", None, UP, TypeError, ["x", "array", "NoneType"]),
    ("string", "x", UP, TypeError, ["x", "array", "str"]),
    ("number", 1.0, UP, TypeError, ["x", "array", "float"]),
    ("objects", X.astype(object), UP, TypeError, ["x", "dtype", "object"]),
    ("strings", X.astype(str), UP, TypeError, ["x", "dtype", "U"]),
    ("dates", X.astype("M8[s]"), UP, TypeError, ["x", "dtype", "datetime64"]),
    ("records", np.zeros((1, 2, 2), "i4, f4"), UP, TypeError, ["x", "dtype"]),
    ("no rows", X[:, :, :0], {"size": 4}, ValueError, ["size", "(0, 4)"]),
    ("no columns", X[..., :0], {"size": (3, 4)}, ValueError, ["size", "(3, 0)"]),
]


@pytest.mark.parametrize(
    ("x", "kwargs", "exception", "fragments"),
    [pytest.param(*call, id=name.replace(" ", "-")) for name, *call in BAD_CALLS],
)
def test_bad_call(x, kwargs, exception, fragments):
    with pytest.raises(exception, match=r"\bupsample_nearest2d\b") as caught:
        jof.upsample_nearest2d(x, **kwargs)
    assert type(caught.value) is exception
    message = str(caught.value).partition("upsample_nearest2d")[2]
    for fragment in fragments:
        # At the beginning of a word: the argument "x" is not found in "expected".
        pattern = rf"(?<!\w){re.escape(fragment)}"
        assert re.search(pattern, message), f"{fragment!r} is not in {str(caught.value)!r}"


def add(x, ids):
    return x.at[ids].add(1.0)


TWO_ROWS, TWO_IDS = jnp.arange(6.0).reshape(2, 3), jnp.array([0, 1])
TWO = {"num_segments": 2}
EDGES = {"senders": TWO_IDS, "receivers": TWO_IDS}
FIRST_MISTAKES = [
    (
        lambda: jof.accelerate(add(TWO_ROWS, TWO_IDS)),
        TypeError,
        "accelerate: .* got Array.*; pass the func",
    ),
    (lambda: jof.accelerate(None), TypeError, "accelerate: .* got NoneType; pass the function"),
    (lambda: jof.accelerate(tune=True), TypeError, r"tune=True times a .* accelerate\(step, tune"),
    (
        lambda: jof.explain(add(TWO_ROWS, TWO_IDS)),
        TypeError,
        r"explain: .* got Array.* explain\(step, state",
    ),
    (
        lambda: jof.fuse(lambda x: x if x.sum() > 0 else -x)(TWO_ROWS),
        jof.FusionError,
        "jnp.where in pl",
    ),
    (lambda: jof.fuse(lambda x: np.exp(x))(TWO_ROWS), jof.FusionError, "jnp in place of np"),
    (
        lambda: jof.fuse(lambda x: jax.debug.print("{}", x) or x)(TWO_ROWS),
        jof.FusionError,
        "side effec",
    ),
    (
        lambda: jof.softmax(TWO_ROWS, where=TWO_IDS),
        TypeError,
        "softmax: where must be booleans, got int32",
    ),
    (
        lambda: jof.softmax(TWO_ROWS, where=np.ones((4, 2, 3), bool)),
        ValueError,
        r"where .*\(2, 3\), got",
    ),
    (
        lambda: jof.logsumexp(jnp.float32(1), -1),
        ValueError,
        "axis must be None for an array of rank 0",
    ),
    (
        lambda: jof.softmax_cross_entropy_with_integer_labels(TWO_ROWS, TWO_ROWS),
        *(TypeError, r"one-hot labels take labels.argmax\(axis\)"),
    ),
    (
        lambda: jof.message_sum(jnp.exp, (TWO_ROWS,), **EDGES),
        ValueError,
        "message_sum: give num_segments=..., or a",
    ),
    (
        lambda: jof.message_sum(jnp.exp, (TWO_ROWS,), **EDGES, plan=TWO_IDS),
        TypeError,
        "plan must be what segment_plan",
    ),
    (
        lambda: jof.scatter_add(TWO_ROWS, slice(1), 1.0),
        TypeError,
        r"indices must .* got slice; .*x.at\[",
    ),
    (
        lambda: jof.cast(TWO_ROWS, "floatt"),
        TypeError,
        "cast: float32 cannot be converted to 'floatt'",
    ),
    (
        lambda: jof.message_sum(jnp.multiply, (TWO_ROWS[:, :2],), TWO_IDS, TWO_IDS, TWO_IDS, **TWO),
        *(ValueError, r"such as weights\[:, None\]"),
    ),
    (
        lambda: jof.message_max(np.exp, (TWO_ROWS,), **EDGES, **TWO),
        *(jof.FusionError, "message_max: .* jnp in place of np"),
    ),
    (lambda: jof.gelu("x"), TypeError, "x must be an array or a number, got str$"),
    (lambda: jof.gelu([1.0]), TypeError, "got list; convert it with jnp.asarray first"),
]


@pytest.mark.parametrize(("call", "exception", "message"), FIRST_MISTAKES)
def test_first_mistakes(call, exception, message):
    """Typical beginners' mistakes: the message says what to do."""
    with pytest.raises(exception, match=message):
        call()


def test_unknown_argument():
    with pytest.raises(TypeError, match="mode"):
        jof.upsample_nearest2d(X, 2, mode="nearest")
    with pytest.raises(TypeError, match="positional"):
        jof.upsample_nearest2d(X, 2, None, "nearest")


@pytest.mark.parametrize("name", ["scale_factor", "size"])
@pytest.mark.parametrize("pair", [False, True])
def test_traced_sizes(name, pair):
    @jax.jit
    def f(n):
        return jof.upsample_nearest2d(X, **{name: (n, 2) if pair else n})

    with pytest.raises(TypeError, match=rf"upsample_nearest2d\b.*\b{name}\b"):
        f(2)


@pytest.mark.parametrize(
    "name",
    [n for n in dir(jnp) if re.fullmatch(r"u?int[124]|float[46]_\w+", n)],
)
def test_dtypes_of_less_than_a_byte(name):
    x = jax.ShapeDtypeStruct((1, 2, 4), jnp.dtype(name))
    with pytest.raises(TypeError, match=rf"upsample_nearest2d: x\b.*\b{name}\b"):
        jax.eval_shape(lambda x: jof.upsample_nearest2d(x, 2), x)


def test_dtypes_that_are_not_numbers():
    keys = jax.random.split(jax.random.key(0), (1, 2, 2))
    with pytest.raises(TypeError, match=r"upsample_nearest2d: x\b.*\bkey<"):
        jof.upsample_nearest2d(keys, 2)
    with pytest.raises(TypeError, match=r"upsample_nearest2d: x\b.*\bfloat0\b"):
        jof.upsample_nearest2d(np.zeros((1, 2, 2), jax.dtypes.float0), 2)


def test_the_traceback_ends_in_the_package():
    """The last frame names the function's own file, not one of JAX's."""
    with pytest.raises(ValueError, match="size") as caught:
        jof.upsample_nearest2d(X, size=-1)
    assert inspect.getmodule(caught.tb.tb_next).__name__.startswith("jax_oneflow_ops")


# --- calls of the FFI targets by hand -------------------------------------------------------------

FORWARD, BACKWARD = "jof_upsample_nearest2d", "jof_upsample_nearest2d_backward"
GOOD = {"axis": np.int64(2), "half_pixel": np.bool_(False)}


def raw_call(target, operand, result_shape, result_dtype=np.float32, **attributes):
    """Makes the FFI call as a user might write it, and waits for it."""
    result = jax.ShapeDtypeStruct(result_shape, result_dtype)
    operands = operand if isinstance(operand, tuple) else (operand,)
    f = jax.jit(lambda *operands: jax.ffi.ffi_call(target, result)(*operands, **attributes))
    return np.asarray(f(*operands))


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


def with_axis(axis):
    return {**GOOD, "axis": np.int64(axis)}


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


SMALL, LARGE = (1, 2, 3, 4), (1, 2, 6, 8)
# (what is wrong, source-side shape, output-side shape, attributes), in either direction
BAD_SHAPES = [
    ("result of lower rank", SMALL, LARGE[1:], GOOD),
    ("result of higher rank", SMALL, (1, *LARGE), GOOD),
    ("operand of rank 0", (), LARGE, GOOD),
    ("result of rank 0", SMALL, (), GOOD),
    ("rank 0 and no axis", (), (), with_axis(0)),
    ("rank 1", (4,), (8,), with_axis(0)),
    ("rank 1 and axis -1", (4,), (8,), with_axis(-1)),
    ("other batch", SMALL, (2, *LARGE[1:]), GOOD),
    ("other channels", SMALL, (1, 3, 6, 8), GOOD),
    ("other trailing dimension", (2, 3, 4, 5), (2, 6, 8, 4), with_axis(1)),
    ("axis of the wrong layout", SMALL, LARGE, with_axis(1)),
    ("axis without a next one", SMALL, LARGE, with_axis(3)),
    ("axis at the rank", SMALL, LARGE, with_axis(4)),
    ("axis past the rank", SMALL, LARGE, with_axis(5)),
    ("axis -1", SMALL, SMALL, with_axis(-1)),
    ("axis -2", SMALL, LARGE, with_axis(-2)),
    ("largest axis", SMALL, LARGE, with_axis(2**63 - 1)),
    ("second largest axis", SMALL, LARGE, with_axis(2**63 - 2)),
    ("smallest axis", SMALL, LARGE, with_axis(-(2**63))),
    ("axis past 32 bits", SMALL, LARGE, with_axis(2**32 + 2)),
    ("no axis", SMALL, LARGE, without("axis")),
    ("no half_pixel", SMALL, LARGE, without("half_pixel")),
    ("no attributes", SMALL, LARGE, {}),
    ("axis of 32 bits", SMALL, LARGE, {**GOOD, "axis": np.int32(2)}),
    ("axis of a float", SMALL, LARGE, {**GOOD, "axis": np.float64(2)}),
    ("axis of a string", SMALL, LARGE, {**GOOD, "axis": "2"}),
    ("axis of an array", SMALL, LARGE, {**GOOD, "axis": np.array([2, 3])}),
    ("half_pixel of an integer", SMALL, LARGE, {**GOOD, "half_pixel": np.int64(0)}),
]


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("source", "output", "attributes"),
    [pytest.param(*call, id=name.replace(" ", "-")) for name, *call in BAD_SHAPES],
)
def test_ffi_call_of_wrong_shapes_or_attributes(target, source, output, attributes):
    operand, result = (source, output) if target == FORWARD else (output, source)
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        raw_call(target, zeros(*operand), result, **attributes)
    assert_alive()


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 3, 0), (1, 2, 0, 0)], ids=str)
def test_ffi_call_that_makes_something_of_nothing(target, shape):
    # With the shapes swapped, the result is empty, and XLA drops the call.
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        raw_call(target, zeros(*shape), SMALL, **GOOD)
    assert_alive()


@pytest.mark.parametrize(
    ("target", "operand_dtype", "result_dtype"),
    [
        (FORWARD, "float32", "float16"),
        (FORWARD, "float32", "int32"),
        (FORWARD, "float16", "bfloat16"),
        (FORWARD, "uint8", "float32"),
        (FORWARD, "int4", "int4"),
        (FORWARD, "uint4", "int8"),
        (FORWARD, "int8", "int4"),
        (BACKWARD, "float32", "float16"),
        (BACKWARD, "float16", "float32"),
        (BACKWARD, "float16", "bfloat16"),
        (BACKWARD, "float32", "complex64"),
        (BACKWARD, "int32", "int32"),
        (BACKWARD, "bool", "bool"),
        (BACKWARD, "uint8", "uint8"),
        (BACKWARD, "int4", "int4"),
        (BACKWARD, "float8_e4m3fn", "float8_e4m3fn"),
        (BACKWARD, "float8_e5m2", "float32"),
    ],
)
def test_ffi_call_of_wrong_dtypes(target, operand_dtype, result_dtype):
    operand, result = (SMALL, LARGE) if target == FORWARD else (LARGE, SMALL)
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        raw_call(target, zeros(*operand, dtype=operand_dtype), result, result_dtype, **GOOD)
    assert_alive()


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
@pytest.mark.parametrize("count", [0, 2])
def test_ffi_call_of_the_wrong_number_of_operands(target, count):
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        raw_call(target, (zeros(*LARGE),) * count, LARGE, **GOOD)
    assert_alive()


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
def test_ffi_call_of_the_wrong_number_of_results(target):
    results = (jax.ShapeDtypeStruct(LARGE, np.float32),) * 2
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        jax.block_until_ready(jax.jit(lambda x: jax.ffi.ffi_call(target, results)(x, **GOOD))(X))
    assert_alive()


def test_ffi_error_names_the_op_and_the_shapes():
    with pytest.raises(Exception, match="INVALID_ARGUMENT") as caught:
        raw_call(FORWARD, zeros(*SMALL), (1, 7, 6, 8), **GOOD)
    for part in ("jof_upsample_nearest2d", "(1, 2, 3, 4)", "(1, 7, 6, 8)"):
        assert part in str(caught.value)


def test_ffi_calls_of_empty_arrays():
    """If operand and result are both empty, the call succeeds and reads and writes nothing."""
    for source, output in (((0, 2, 3, 4), (0, 2, 6, 8)), ((1, 2, 0, 4), (1, 2, 0, 8))):
        assert raw_call(FORWARD, zeros(*source), output, **GOOD).shape == output
        assert raw_call(BACKWARD, zeros(*output), source, **GOOD).shape == source


def assert_alive():
    """A good call still works, forward and backward."""
    y = raw_call(FORWARD, X, LARGE, **GOOD)
    np.testing.assert_array_equal(y, X.repeat(2, axis=2).repeat(2, axis=3))
    np.testing.assert_array_equal(raw_call(BACKWARD, y, SMALL, **GOOD), 4 * X)


# --- the same for elementwise targets -------------------------------------------------------------

VALUE, BOTH = {"wanted": np.int64(1)}, {"wanted": np.int64(3)}


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


A, S = array(2, 3), array()
HALF, WHOLE, FLAGS = (
    array(2, 3, dtype="float16"),
    array(2, 3, dtype="int32"),
    array(2, 3, dtype=bool),
)
COMPLEX, NIBBLES = array(2, 3, dtype="complex64"), array(2, 3, dtype="int4")
# target -> (operands, results, attributes) of a valid call, with every kind of signature
GOOD_ELEMENTWISE = {
    "jof_relu": ((A,), (A,), VALUE),
    "jof_relu_vjp": ((A, A), (A,), VALUE),
    "jof_elu": ((A, S), (A,), VALUE),
    "jof_elu_vjp": ((A, A, S), (A,), VALUE),
    "jof_scale": ((A, S), (A,), VALUE),
    "jof_add": ((A, A), (A,), VALUE),
    "jof_multiply": ((S, A), (A,), VALUE),
    "jof_multiply_vjp": ((A, S, A), (A, A), BOTH),
    "jof_multiply_jvp": ((A, A, S, A), (A,), VALUE),
    "jof_fma": ((A, S, A), (A,), VALUE),
    "jof_where": ((FLAGS, A, S), (A,), VALUE),
    "jof_where_vjp": ((FLAGS, A), (A, A), BOTH),
    "jof_cast": ((A,), (HALF,), VALUE),
}
ONE = 1.0  # fills every operand


def call_elementwise(target, operands, results, attributes):
    """Calls the target with operands of ones, waits, and returns a list of results."""
    # XLA drops a call without results unless it is marked as having side effects.
    call = jax.ffi.ffi_call(target, results, has_side_effect=not results)
    f = jax.jit(lambda *xs: call(*xs, **attributes))
    xs = [np.full(x.shape, ONE, x.dtype) for x in operands]  # jnp.full would compile
    return [np.asarray(y) for y in f(*xs)]


@pytest.mark.parametrize("target", GOOD_ELEMENTWISE)
def test_good_ffi_call(target):
    """The valid call from which the bad calls are derived."""
    operands, results, attributes = GOOD_ELEMENTWISE[target]
    actual = call_elementwise(target, operands, results, attributes)
    assert [(y.shape, y.dtype) for y in actual] == [(y.shape, y.dtype) for y in results]
    expected = {
        "jof_add": [2],
        "jof_fma": [2],
        "jof_multiply_jvp": [2],
        "jof_where_vjp": [1, 0],
    }.get(target, [1] * len(results))
    for y, number in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(y, np.full(y.shape, number, y.dtype))


def bad_counts():
    for target, (operands, results, attributes) in GOOD_ELEMENTWISE.items():
        for wrong in (operands[:-1], (*operands, operands[-1]), ()):
            yield f"{len(wrong)}-operands", target, wrong, results, attributes
        yield "one-result-more", target, operands, (*results, A), attributes
        if len(results) > 1:  # on a GPU, a call without results fails asynchronously
            yield "one-result-less", target, operands, results[:-1], attributes
        yield "ten-results", target, operands, (A,) * 10, attributes
    operands, results, _ = GOOD_ELEMENTWISE["jof_multiply_vjp"]
    for target in ("jof_multiply_vjp", "jof_where_vjp"):
        operands, results, _ = GOOD_ELEMENTWISE[target]
        yield "both-wanted-one-result", target, operands, results[:1], BOTH
        for bit in (1, 2):
            one = {"wanted": np.int64(bit)}
            yield f"wanted-{bit}-two-results", target, operands, results, one


def bad_wanted():
    for target, (operands, results, _) in GOOD_ELEMENTWISE.items():
        outputs = len(results)
        for wanted in (0, 1 << outputs, (1 << outputs) + 1, -1, 2**32 + 1, 2**63 - 1, -(2**63)):
            yield f"wanted-{wanted}", target, operands, results, {"wanted": np.int64(wanted)}
    operands, results, _ = GOOD_ELEMENTWISE["jof_multiply_vjp"]
    for name, attributes in (
        ("no-wanted", {}),
        ("wanted-of-another-name", {"want": np.int64(3)}),
        ("wanted-of-32-bits", {"wanted": np.int32(3)}),
        ("wanted-of-a-float", {"wanted": np.float64(3)}),
        ("wanted-of-a-bool", {"wanted": np.bool_(True)}),
        ("wanted-of-a-string", {"wanted": "3"}),
        ("wanted-of-an-array", {"wanted": np.array([3])}),
    ):
        yield name, "jof_multiply_vjp", operands, results, attributes
        yield name, "jof_where_vjp", *GOOD_ELEMENTWISE["jof_where_vjp"][:2], attributes
        yield name, "jof_relu", (A,), (A,), attributes


def shaped(what, x, shape):
    """The name of a call with a wrong shape.

    "-of-" marks shapes of another rank as alike, so that `refusals` runs only some of them.
    """
    return f"{what}-of-{shape}" if len(shape) != len(x.shape) else f"{what}-{shape}"


def bad_shapes():
    for target, (operands, results, attributes) in GOOD_ELEMENTWISE.items():
        for i, x in enumerate(operands):
            if x.shape:
                for shape in ((3, 2), (6,), (1, 2, 3), (3, 1), (1,), (2, 4), (0,)):
                    wrong = (*operands[:i], array(*shape, dtype=x.dtype), *operands[i + 1 :])
                    yield shaped(f"operand-{i}", x, shape), target, wrong, results, attributes
            elif target in ("jof_elu", "jof_elu_vjp", "jof_scale"):
                for shape in ((1,), (2, 3), (1, 1)):
                    wrong = (*operands[:i], array(*shape), *operands[i + 1 :])
                    yield f"parameter-of-{shape}", target, wrong, results, attributes
        for shape in ((3, 2), (2,), (1, 2, 3), (), (4, 5)):
            other = tuple(array(*shape, dtype=y.dtype) for y in results)
            yield shaped("result", A, shape), target, operands, other, attributes
    for target in ("jof_relu", "jof_scale", "jof_cast"):
        operands, results, attributes = GOOD_ELEMENTWISE[target]
        yield "scalar-to-array", target, (S, *operands[1:]), results, attributes
    for target in ("jof_multiply_vjp", "jof_where_vjp"):
        operands, _, attributes = GOOD_ELEMENTWISE[target]
        yield "results-of-two-shapes", target, operands, (A, array(3, 2)), attributes


def bad_dtypes():
    for target, (operands, results, attributes) in GOOD_ELEMENTWISE.items():
        if target == "jof_cast":
            continue
        for i, x in enumerate(operands):
            if x.dtype == jnp.float32:
                for dtype in ("int32", "float16", "float64", "bool"):
                    other = array(*x.shape, dtype=dtype)
                    wrong = (*operands[:i], other, *operands[i + 1 :])
                    yield f"operand-{i}-of-{dtype}", target, wrong, results, attributes
        other = (HALF,) * len(results)
        yield "results-of-float16", target, operands, other, attributes
        if "where" not in target:
            for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "int4"):
                xs = tuple(array(*x.shape, dtype=dtype) for x in operands)
                ys = tuple(array(*y.shape, dtype=dtype) for y in results)
                yield f"all-{dtype}", target, xs, ys, attributes
    for condition in (A, WHOLE, array(2, 3, dtype="int8"), array(2, 3, dtype="uint8"), NIBBLES):
        name = f"condition-of-{condition.dtype}"
        yield name, "jof_where", (condition, A, A), (A,), VALUE
        yield name, "jof_where_vjp", (condition, A), (A, A), BOTH
    yield "int4-branches", "jof_where", (FLAGS, NIBBLES, NIBBLES), (NIBBLES,), VALUE
    yield "branches-of-two-dtypes", "jof_where", (FLAGS, A, WHOLE), (A,), VALUE
    yield "cotangents-of-two-dtypes", "jof_where_vjp", (FLAGS, A), (A, HALF), BOTH
    yield "cotangents-of-two-dtypes", "jof_multiply_vjp", (A, A, A), (A, HALF), BOTH
    for x, y in ((COMPLEX, A), (A, COMPLEX), (COMPLEX, COMPLEX), (NIBBLES, A), (A, NIBBLES)):
        yield f"{x.dtype}-to-{y.dtype}", "jof_cast", (x,), (y,), VALUE


def refusals(calls, config):
    """Yields (name, target, attributes, message) of calls, each of which must be refused.

    On CPUs, many calls are branches of one program, because compiling a program for each takes
    long. Only calls whose attributes have the right types are combined: within one program, jax
    lowers 1 and 1.0 alike. Without --exhaustive, only every third of the combined calls that differ
    after "-of-" alone runs, such as "operand-0-of-bool" and "operand-0-of-int32".
    """

    def branch(target, operands, results, attributes):
        def run():
            xs = [np.full(x.shape, ONE, x.dtype) for x in operands]
            jax.ffi.ffi_call(target, results, has_side_effect=True)(*xs, **attributes)
            return 0

        return run

    together, alone = [], []
    for call in calls:
        on_cpu = jax.default_backend() == "cpu"
        (together if on_cpu and right_types(call[1], call[-1]) else alone).append(call)
    kinds = Counter()

    def runs(name, target, *_):
        kind = target, name.partition("-of-")[0]
        kinds[kind] += 1
        return config.option.exhaustive or kinds[kind] % 3 == 1

    for size, calls in ((32, [call for call in together if runs(*call)]), (1, alone)):
        for begin in range(0, len(calls), size):
            some = calls[begin : begin + size]
            run = jax.jit(lambda i, some=some: lax.switch(i, [branch(*call) for _, *call in some]))
            for i, (name, target, *call) in enumerate(some):
                made = functools.partial(
                    *((run, i) if size > 1 else (call_elementwise, target, *call))
                )
                with pytest.raises(Exception, match="INVALID_ARGUMENT") as caught:
                    pytest.fail(f"{target}: {name} was accepted: {made()}")
                yield name, target, call[-1], str(caught.value)


def right_types(target, attributes) -> bool:
    good = (GOOD_ROWS | GOOD_ELEMENTWISE | {PERMUTE: (P_AXES,)})[target][-1]
    given, wanted = ({k: np.asarray(v).dtype for k, v in a.items()} for a in (attributes, good))
    return given == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("calls", [bad_counts, bad_wanted, bad_shapes, bad_dtypes])
def test_ffi_call_of_elementwise_targets(calls, pytestconfig):
    """Hundreds of bad calls are refused, after which valid ones work."""
    with jax.enable_x64(True):
        for name, target, attributes, message in refusals(calls(), pytestconfig):
            # XLA itself refuses attributes that are missing or have another type.
            decoded = isinstance(attributes.get("wanted"), np.int64)
            said = f" {target}: " if decoded else r"attribute|Attribute|scalar data type"
            assert re.search(said, message), f"{name}: {message}"
    for target, call in GOOD_ELEMENTWISE.items():
        assert len(call_elementwise(target, *call)) == len(call[1])


# --- the same for permute -------------------------------------------------------------------------

# (what is wrong, x, axes, keyword arguments, exception, what the message says)
BAD_PERMUTES = [
    ("too few", X, (0, 1, 2), {}, ValueError, ["axes", "(0, 1, 2)", "rank 4"]),
    ("too many", X, (0, 1, 2, 3, 4), {}, ValueError, ["axes", "(0, 1, 2, 3, 4)", "rank 4"]),
    ("none", X, (), {}, ValueError, ["axes", "()", "rank 4"]),
    ("some for a scalar", X[0, 0, 0, 0], (0,), {}, ValueError, ["axes", "(0,)", "rank 0"]),
    ("some for a number", 1.0, (-1,), {}, ValueError, ["axes", "(-1,)", "rank 0"]),
    ("repeated", X, (0, 1, 1, 3), {}, ValueError, ["axes", "repeat", "(0, 1, 1, 3)", "rank 4"]),
    (
        "repeated from the end",
        X,
        (0, 1, 3, -1),
        {},
        ValueError,
        ["axes", "(0, 1, 3, -1)", "rank 4"],
    ),
    ("too large", X, (0, 1, 2, 4), {}, ValueError, ["axes", "-4 to 3", "(0, 1, 2, 4)", "rank 4"]),
    ("too small", X, (0, 1, 2, -5), {}, ValueError, ["axes", "-4 to 3", "(0, 1, 2, -5)", "rank 4"]),
    ("beyond 64 bits", X, (0, 1, 2, 2**64 + 3), {}, ValueError, ["axes", "rank 4"]),
    ("float", X, (0, 1, 3, 2.0), {}, TypeError, ["axes", "integer", "2.0", "float"]),
    ("bool", X[0, 0], (True, False), {}, TypeError, ["axes", "integer", "True", "bool"]),
    ("NumPy bool", X[0, 0], (np.True_, 0), {}, TypeError, ["axes", "integer", "True"]),
    ("floats", X[0, 0], np.array([1.0, 0.0]), {}, TypeError, ["axes", "integer", "1.0"]),
    ("None inside", X[0, 0], (1, None), {}, TypeError, ["axes", "integer", "None"]),
    ("nested", X[0, 0], ((1, 0),), {}, TypeError, ["axes", "integer", "(1, 0)", "tuple"]),
    ("string", X[0, 0], "10", {}, TypeError, ["axes", "integer", "'1'", "str"]),
    ("one number", X[0, 0, 0], 0, {}, TypeError, ["axes", "sequence", "0", "int"]),
    ("array of rank 0", X[0, 0, 0], jnp.array(0), {}, TypeError, ["axes", "sequence"]),
    ("list of lists", X.tolist(), None, {}, TypeError, ["a must", "array", "list"]),
    ("no array", None, None, {}, TypeError, ["a must", "array", "NoneType"]),
    ("objects", X.astype(object), None, {}, TypeError, ["a must", "dtype", "object"]),
    ("keys", jax.random.split(jax.random.key(0)), None, {}, TypeError, ["a must", "key<fry>"]),
    ("float0", np.zeros((2, 2), jax.dtypes.float0), None, {}, TypeError, ["a must", "float0"]),
    ("unknown", X, None, {"implementation": "cuda"}, ValueError, ["implementation", "'cuda'"]),
    ("unknown, in place", X, range(4), {"implementation": 1}, ValueError, ["implementation", "1"]),
]


@pytest.mark.parametrize(
    ("x", "axes", "kwargs", "exception", "fragments"),
    [pytest.param(*call, id=name.replace(" ", "-")) for name, *call in BAD_PERMUTES],
)
def test_bad_permute(x, axes, kwargs, exception, fragments):
    with pytest.raises(exception, match=r"^permute: ") as caught:
        jof.permute(x, axes, **kwargs)
    assert type(caught.value) is exception
    message = str(caught.value).removeprefix("permute")
    for fragment in fragments:
        assert re.search(rf"(?<!\w){re.escape(fragment)}", message), f"{fragment!r}: {message}"


def test_traced_axes_of_permute():
    for axes in ((1, 0), np.array([1, 0])):
        with pytest.raises(TypeError, match=r"^permute: axes\b.*\bconcrete\b"):
            jax.jit(jof.permute)(X[0, 0], axes)


def test_permute_of_dtypes_of_less_than_a_byte():
    names = [n for n in dir(jnp) if re.fullmatch(r"u?int[124]|float[46]_\w+", n)]
    assert "int4" in names
    for name in names:
        x = jax.ShapeDtypeStruct((2, 4), jnp.dtype(name))
        with pytest.raises(TypeError, match=rf"^permute: a\b.*\b{name}\b"):
            jax.eval_shape(jof.permute, x)


PERMUTE = "jof_permute"
P_IN, P_OUT = array(2, 3, 4), array(4, 2, 3)


def with_axes(*axes, dtype=np.int64):
    return {"axes": np.array(axes, dtype)}


P_AXES = with_axes(2, 0, 1)


def bad_permutes():
    yield "no-operand", (), (P_OUT,), P_AXES
    yield "two-operands", (P_IN, P_IN), (P_OUT,), P_AXES
    yield "two-results", (P_IN,), (P_OUT, P_OUT), P_AXES
    for axes in (
        *((), (2,), (2, 0), (2, 0, 1, 3), (2, 0, 0), (2, 2, 1), (2, 0, -2), (-1, 0, 1), (2, 0, 3)),
        *((3, 0, 1), (2**32 + 2, 0, 1), (2, 2**63 - 1, 1), (2, 0, -(2**63)), (0, 1, 2), (1, 2, 0)),
    ):
        yield f"axes-{axes}", (P_IN,), (P_OUT,), with_axes(*axes)
    for shape in ((2, 3, 4), (4, 3, 2), (4, 6), (24,), (), (4, 2, 3, 1), (1, 4, 2, 3), (4, 2, 4)):
        yield f"result-of-{shape}", (P_IN,), (array(*shape),), P_AXES
    for shape in ((4, 2, 3), (6, 4), (), (2, 3, 4, 1), (2, 3, 0), (1, 3, 4)):
        yield f"operand-of-{shape}", (array(*shape),), (P_OUT,), P_AXES
    for x, y in (
        *(("float32", "float16"), ("float32", "int32"), ("float16", "bfloat16")),
        *(("uint8", "int8"), ("bool", "int8"), ("int4", "int4"), ("int4", "int8")),
    ):
        yield f"{x}-to-{y}", (array(2, 3, 4, dtype=x),), (array(4, 2, 3, dtype=y),), P_AXES
    for name, attributes in (
        ("no-axes", {}),
        ("axes-of-another-name", {"permutation": P_AXES["axes"]}),
        ("axes-of-32-bits", with_axes(2, 0, 1, dtype=np.int32)),
        ("axes-of-floats", with_axes(2, 0, 1, dtype=np.float64)),
        ("one-axis", {"axes": np.int64(2)}),
        ("axes-of-a-string", {"axes": "201"}),
    ):
        yield name, (P_IN,), (P_OUT,), attributes


def test_ffi_call_of_permute(pytestconfig):
    """Bad calls are refused, after which a valid one works."""
    calls = ((name, PERMUTE, *call) for name, *call in bad_permutes())
    for name, _, _, message in refusals(calls, pytestconfig):
        said = {
            "axes-(2, 0, 3)": "permutation of 0 to 2, got 3",
            "result-of-(4, 2, 4)": r"jof_permute: .*\(4, 2, 4\).*\(2, 3, 4\)",
        }
        assert re.search(said.get(name, ""), message), f"{name}: {message}"
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y = raw_call(PERMUTE, x, (4, 2, 3), **P_AXES)
    np.testing.assert_array_equal(y, x.transpose(2, 0, 1))
    assert raw_call(PERMUTE, x[:, :0], (4, 2, 0), **P_AXES).shape == (4, 2, 0)
    # Python never calls the target for a permutation that moves nothing, but the target accepts it.
    np.testing.assert_array_equal(raw_call(PERMUTE, x, (2, 3, 4), **with_axes(0, 1, 2)), x)
    np.testing.assert_array_equal(raw_call(PERMUTE, x[0, 0, 0], (), **with_axes()), x[0, 0, 0])


# --- the same for scatters and gathers ------------------------------------------------------------

SUMMING = ["jof_scatter_add_sorted", "jof_scatter_add_private"]
REDUCING = ["jof_scatter_multiply_sorted"]
REDUCING += [f"jof_scatter_{of}_{way}" for of in ("max", "min") for way in ("sorted", "private")]
IS_CPU = jax.default_backend() == "cpu"
REDUCING += ["jof_scatter_multiply_private"] if IS_CPU else []
if jax.default_backend() == "gpu":
    SUMMING += [f"jof_scatter_add_{way}" for way in ("atomic", "columns", "tiles", "few")]
    REDUCING += ["jof_scatter_max_atomic", "jof_scatter_min_atomic"]
    REDUCING += [f"jof_scatter_{of}_few" for of in ("max", "min", "multiply")]
RULE = {"wrap": np.bool_(False), "clip": np.bool_(False)}
DETERMINISTIC = {**RULE, "deterministic": np.bool_(False)}
FILL = {**RULE, "fill": np.zeros(2, np.int64)}
SORT = {**RULE, "size": np.int64(4)}
# B = 1 problem with N = 5 updates to S = 4 rows of D = 3 elements.
ROWS, UPDATES, INDEX = array(1, 4, 3), array(1, 5, 3), array(1, 5, dtype="int32")
NONE, NO_ORDER = array(0, 0, 0), array(0, dtype="int32")
SCRATCH = {
    target: array(1, 2, 2, 3) if target.endswith("sorted") else array(2, 1, 4, 3)
    for target in (*SUMMING, *REDUCING)
}
SCRATCH |= dict.fromkeys(("jof_scatter_add_atomic", "jof_scatter_add_columns"), NONE)
SCRATCH |= {target: NONE for target in SCRATCH if target.endswith("_few")}
SCRATCH["jof_scatter_add_tiles"] = array(1, 2564)  # a list of 4096 positions and 1024 rows
IDS = {"jof_scatter_add_columns": array(1, 15, dtype="int32")}  # one for each element
GOOD_ROWS = {
    target: (
        (ROWS, UPDATES, IDS.get(target, INDEX), NO_ORDER),
        (ROWS, SCRATCH[target]),
        DETERMINISTIC,
    )
    for target in (*SUMMING, *REDUCING)
}
if "jof_scatter_add_tiles" in SUMMING:  # D = 1
    elements = array(1, 4, 1), array(1, 5, 1), INDEX, NO_ORDER
    results = elements[0], SCRATCH["jof_scatter_add_tiles"]
    GOOD_ROWS["jof_scatter_add_tiles"] = elements, results, DETERMINISTIC
GOOD_ROWS["jof_gather_rows"] = ((ROWS, INDEX), (UPDATES,), FILL)
KEYS = array(1, 5, dtype="int32" if IS_CPU else "uint16")
SORTED_ROWS = KEYS, array(5, dtype="int32"), array(5 if IS_CPU else 0, dtype="int32")
GOOD_ROWS["jof_sort_rows"] = ((INDEX,), SORTED_ROWS, SORT)


def with_other(xs, i, other):
    return (*xs[:i], other, *xs[i + 1 :])


@pytest.mark.parametrize("target", GOOD_ROWS)
def test_good_ffi_call_of_rows(target):
    """The valid call from which the bad calls are derived; all ids and all values are 1."""
    operands, results, attributes = GOOD_ROWS[target]
    first = call_elementwise(target, operands, results, attributes)[0]
    expected = {"jof_gather_rows": np.ones((1, 5, 3)), "jof_sort_rows": np.ones((1, 5))}
    summed = np.ones(results[0].shape)
    summed[:, 1] += 5 * (target in SUMMING)
    np.testing.assert_array_equal(first, expected.get(target, summed))


@pytest.mark.parametrize("target", SUMMING)
def test_ffi_call_without_an_operand_or_updates(target):
    operands, results, attributes = GOOD_ROWS[target]
    first, _ = call_elementwise(target, (NONE, *operands[1:]), results, attributes)
    np.testing.assert_array_equal(first[0, :, 0], [0, 5, 0, 0])
    nothing = array(1, 0, results[0].shape[2]), array(1, 0, dtype="int32")
    first, _ = call_elementwise(target, (NONE, *nothing, NO_ORDER), results, attributes)
    np.testing.assert_array_equal(first, np.zeros(results[0].shape))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ffi_call_of_an_order_that_is_out_of_range(dtype):
    """Sums are wrong, but nothing outside the updates is read."""
    target = "jof_scatter_add_sorted"
    results = (ROWS, SCRATCH[target])
    with jax.enable_x64(True):
        info = np.iinfo(dtype)
        ids = jnp.ones((1, 5), dtype)
        for wrong in (info.max, info.min, -1, 5, 10**6):
            order = jnp.full(5, wrong, dtype)
            call = jax.ffi.ffi_call(target, results)
            xs = (jnp.zeros(ROWS.shape), jnp.ones(UPDATES.shape), ids, order)
            xs = [x.astype(jnp.float32) if x.dtype == jnp.float64 else x for x in xs]
            y, _ = jax.jit(lambda *xs, call=call: call(*xs, **DETERMINISTIC))(*xs)
            assert np.isin(np.asarray(y), np.arange(6)).all()


@pytest.mark.parametrize("target", REDUCING)
def test_ffi_call_of_what_only_sums_can_do(target):
    operands, results, attributes = GOOD_ROWS[target]
    pairs = [array(*x.shape, dtype="complex64") for x in (*operands[:2], *results)]
    for name, *wrong in (
        ("operand must have", (NONE, *operands[1:]), results),
        ("the element type must be", (*pairs[:2], *operands[2:]), pairs[2:]),
    ):
        with pytest.raises(Exception, match=f"INVALID_ARGUMENT: {target}: .*{name}"):
            call_elementwise(target, *wrong, attributes)


def bad_rows_counts():
    for target, (operands, results, attributes) in GOOD_ROWS.items():
        for wrong in (operands[:-1], (*operands, operands[-1]), ()):
            yield f"{len(wrong)}-operands", target, wrong, results, attributes
        yield "one-result-more", target, operands, (*results, A), attributes
        if len(results) > 1:
            yield "one-result-less", target, operands, results[:-1], attributes


# DecodeScatter in csrc/ffi/scatter.h only distinguishes sums from other reductions, so one other
# reduction is enough.
CHECKED = [t for t in GOOD_ROWS if not re.match("jof_scatter_(min|multiply)", t)]


def bad_rows_attributes():
    for target, (operands, results, attributes) in GOOD_ROWS.items():
        yield "none", target, operands, results, {}
        for name in attributes:
            others = {key: value for key, value in attributes.items() if key != name}
            yield f"no-{name}", target, operands, results, others
            wrong = (np.int32(1), np.float64(1), "1", np.array([1, 2, 3], np.int64))
            for value in wrong if target in CHECKED else wrong[:1]:
                yield f"{name}-{value!r}", target, operands, results, {**others, name: value}
    for name, size in (("negative", -1), ("keys-too-large", 2**31 - 1), ("largest", 2**63 - 1)):
        attributes = {**SORT, "size": np.int64(size)}
        yield f"{name}-size", "jof_sort_rows", *GOOD_ROWS["jof_sort_rows"][:2], attributes
    if jax.default_backend() == "gpu":  # more than two chunks of 4096 one-element updates
        many = array(1, 8193, 1), array(1, 8193, dtype="int32")
        wrong = (array(1, 4, 1), *many, NO_ORDER), (array(1, 4, 1), array(1, 2, 2, 1))
        yield "too-long-chunks", "jof_scatter_add_sorted", *wrong, DETERMINISTIC
    shapes = (1, 1, 1), (1, 4, 1), (2, 1, 4, 1)
    one, result, scratch = (array(*shape, dtype="complex64") for shape in shapes)
    if "jof_scatter_add_tiles" in GOOD_ROWS:
        target = "jof_scatter_add_tiles"
        operands, results, attributes = GOOD_ROWS[target]
        ordered = {**attributes, "deterministic": np.bool_(True)}
        yield "sums-in-order", target, operands, results, ordered
        yield (
            "rows-of-3",
            target,
            GOOD_ROWS["jof_scatter_add_atomic"][0],
            (ROWS, results[1]),
            attributes,
        )
        many = array(1, 4097, 1)
        yield "many-rows", target, (many, *operands[1:]), (many, results[1]), attributes
        for shape in ((1, 2563), (2, 2564), (0, 2564), (2564,), (1, 1, 2564)):
            yield f"scratch-{shape}", target, operands, (results[0], array(*shape)), attributes
        for dtype in ("float64", "int32", "complex64"):
            xs = [array(*x.shape, dtype=dtype) for x in (*operands[:2], *results)]
            yield f"tiles-of-{dtype}", target, (*xs[:2], *operands[2:]), xs[2:], attributes
        two = array(2, 4, 1), array(2, 5, 1), array(2, 5, dtype="int32"), NO_ORDER
        yield "own-ids", target, two, (two[0], results[1]), attributes
    if "jof_scatter_add_few" in GOOD_ROWS:
        target = "jof_scatter_add_few"
        operands, results, attributes = GOOD_ROWS[target]
        many = array(1, 4097, 3), array(1, 4097, dtype="int32"), NO_ORDER
        yield "many-updates", target, (ROWS, *many), results, attributes
    if "jof_scatter_add_columns" in GOOD_ROWS:
        target = "jof_scatter_add_columns"
        operands, results, attributes = GOOD_ROWS[target]
        ordered = {**attributes, "deterministic": np.bool_(True)}
        yield "sums-in-order", target, operands, results, ordered
        many = array(1, 5121, 3)  # more than 20 KiB for a column
        yield "many-rows", target, (many, *operands[1:]), (many, results[1]), attributes
        pairs = (array(*x.shape, dtype="complex64") for x in (ROWS, UPDATES, ROWS, NONE))
        table, rows, sums, scratch_of_pairs = pairs
        wrong = (table, rows, *operands[2:]), (sums, scratch_of_pairs)
        yield "complex-columns", target, *wrong, attributes
    wrong = (result, one, INDEX, NO_ORDER), (result, scratch)
    yield "one-complex-update", "jof_scatter_add_private", *wrong, DETERMINISTIC
    for flag in ("wrap", "clip"):  # sorted ids are never wrapped or clipped
        target = "jof_scatter_add_sorted"
        attributes = {**DETERMINISTIC, flag: np.bool_(True)}
        yield flag, target, *GOOD_ROWS[target][:2], attributes


WRONG_SHAPES = [(), (3,), (5, 3), (1, 5), (1, 4, 4), (2, 4, 3), (1, 7, 3), (1, 0, 3)]
WRONG_SHAPES += [(0, 0), (0, 4, 3), (1, 4, 0), (3, 1, 2, 3), (1, 0, 2, 3), (0, 1, 4, 3), (2, 5)]


def bad_rows_shapes():
    for target in CHECKED:
        operands, results, attributes = GOOD_ROWS[target]
        if target == "jof_sort_rows":
            continue
        for i, x in enumerate(operands):
            for shape in WRONG_SHAPES:
                is_table = target == "jof_gather_rows" and i == 0
                if shape == x.shape or (is_table and math.prod(shape) % 3 == 0):
                    continue  # valid: a table with another number of rows
                wrong = with_other(operands, i, array(*shape, dtype=x.dtype))
                yield shaped(f"operand-{i}", x, shape), target, wrong, results, attributes
        for i, x in enumerate(results):
            for shape in WRONG_SHAPES:
                # XLA drops a call whose results are all empty.
                if (i == 0 and 0 in shape) or (i == 1 and is_scratch(target, shape)):
                    continue
                wrong = with_other(results, i, array(*shape, dtype=x.dtype))
                yield shaped(f"result-{i}", x, shape), target, operands, wrong, attributes
    target = "jof_sort_rows"
    operands, results, attributes = GOOD_ROWS[target]
    for shape in ((5,), (1, 5, 1), (), (1, 6), (2, 5)):
        yield f"ids-of-{shape}", target, (array(*shape, dtype="int32"),), results, attributes
    for i in range(3):
        for shape in ((4,), (1, 4), (1, 5, 1), (), (0, 0), (6,)):
            wrong = with_other(results, i, array(*shape, dtype="int32"))
            yield f"result-{i}-of-{shape}", target, operands, wrong, attributes


def is_scratch(target, shape):
    """Whether the shape is valid scratch: any number of chunks or parts.

    On CPUs there may be no parts; on GPUs, the kernels of private sums need none.
    """
    chunks = 1 if target.endswith("sorted") else 0
    good = SCRATCH[target].shape
    is_private = target.endswith("private")
    least = int(chunks == 1 or not (is_private or jax.default_backend() == "cpu"))
    return len(shape) == len(good) == 4 and shape == with_other(
        good, chunks, max(shape[chunks], least)
    )


def bad_rows_dtypes():
    for target in CHECKED:
        operands, results, attributes = GOOD_ROWS[target]
        others = ("int32", "uint32", "float16", "float64", "int64", "uint16", "bool", "complex64")
        for xs, of_results in ((operands, False), (results, True)):
            for i, x in enumerate(xs):
                for dtype in others:
                    if x.dtype == dtype:
                        continue
                    if target == "jof_gather_rows" and i == 1 and dtype == "int64":
                        continue  # a valid dtype of ids
                    of_ids = target == "jof_sort_rows" and not of_results
                    if of_ids and not IS_CPU and dtype == "int64":
                        continue  # results do not depend on the dtype of ids
                    scatters = target in SCRATCH and not of_results
                    if scatters and i == 2 and dtype == "int64":
                        continue
                    if scatters and i == 3:
                        continue  # the order is empty
                    is_sorted = scatters and target.endswith("sorted")
                    if is_sorted and i == 2 and dtype == "uint16" and not IS_CPU:
                        continue
                    wrong = with_other(xs, i, array(*x.shape, dtype=dtype))
                    pair = (operands, wrong) if of_results else (wrong, results)
                    yield f"{of_results}-{i}-of-{dtype}", target, *pair, attributes
    for target in SCRATCH.keys() & CHECKED:
        operands, results, attributes = GOOD_ROWS[target]
        for dtype in ("bool", "int8", "uint16", "float8_e4m3fn", "int4"):
            xs = [array(*x.shape, dtype=dtype) for x in (*operands[:2], *results)]
            wrong = (xs[0], xs[1], *operands[2:])
            yield f"sums-{dtype}", target, wrong, (xs[2], xs[3]), attributes
        for dtype in ("float16", "bfloat16"):  # scratch must be float32
            xs = [array(*x.shape, dtype=dtype) for x in (*operands[:2], *results)]
            wrong = (xs[0], xs[1], *operands[2:])
            yield f"scratch-of-{dtype}", target, wrong, (xs[2], xs[3]), attributes
        order = array(5, dtype="int64")
        yield "order-of-int64", target, with_other(operands, 3, order), results, attributes
    nibbles = [array(*x.shape, dtype="int4") for x in (ROWS, UPDATES)]
    yield "gather-of-int4", "jof_gather_rows", (nibbles[0], INDEX), (nibbles[1],), FILL


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "calls", [bad_rows_counts, bad_rows_attributes, bad_rows_shapes, bad_rows_dtypes]
)
def test_ffi_call_of_scatters_and_gathers(calls, pytestconfig):
    """Hundreds of bad calls are refused, after which valid ones work."""
    with jax.enable_x64(True):
        assert [*refusals(calls(), pytestconfig)]
    for target, call in GOOD_ROWS.items():
        assert len(call_elementwise(target, *call)) == len(call[1])


# --- the same for sums of grids -------------------------------------------------------------------

GRID = "jof_sum_grid"
GRID_IN = (array(2, 5, 6, 3), array(5, dtype="int32"), array(6, dtype="int32"))
GRID_OUT = (array(2, 4, 3, 3), array(4 + 1 + 5 + 3 + 1 + 6, dtype="int32"))
GRID_ATTRIBUTES = {"rows": np.int64(4), "columns": np.int64(3)} | {
    f"{rule}_{axis}": np.bool_(False) for rule in ("wrap", "clip") for axis in ("rows", "columns")
}


def bad_grids():
    for i, (x, shapes) in enumerate(
        zip(
            GRID_IN,
            ([(2, 5, 18), (5, 6, 3), (2, 6, 5, 3)], [(6,), (5, 1)], [(5,), ()]),
            strict=True,
        )
    ):
        for shape in shapes:
            wrong = with_other(GRID_IN, i, array(*shape, dtype=x.dtype))
            yield shaped(f"operand-{i}", x, shape), GRID, wrong, GRID_OUT, GRID_ATTRIBUTES
        for dtype in ("float64", "uint32", "int8", "bool"):
            wrong = with_other(GRID_IN, i, array(*x.shape, dtype=dtype))
            yield f"operand-{i}-of-{dtype}", GRID, wrong, GRID_OUT, GRID_ATTRIBUTES
    for i, x in enumerate(GRID_OUT):
        wrong = with_other(GRID_OUT, i, array(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype))
        yield f"result-{i}", GRID, GRID_IN, wrong, GRID_ATTRIBUTES
        wrong = with_other(GRID_OUT, i, array(*x.shape, dtype="float64"))
        yield f"result-{i}-of-float64", GRID, GRID_IN, wrong, GRID_ATTRIBUTES
    for dtype in ("int8", "bool", "uint16"):
        xs = array(2, 5, 6, 3, dtype=dtype), array(2, 4, 3, 3, dtype=dtype)
        yield f"sums-of-{dtype}", GRID, (xs[0], *GRID_IN[1:]), (xs[1], GRID_OUT[1]), GRID_ATTRIBUTES
    for name in ("rows", "columns"):
        for size in (-1, 5, 8193, 2**62):
            wrong = {**GRID_ATTRIBUTES, name: np.int64(size)}
            yield f"{size}-{name}", GRID, GRID_IN, GRID_OUT, wrong
    for name in GRID_ATTRIBUTES:
        others = {key: value for key, value in GRID_ATTRIBUTES.items() if key != name}
        yield f"no-{name}", GRID, GRID_IN, GRID_OUT, others
    yield "one-result", GRID, GRID_IN, GRID_OUT[:1], GRID_ATTRIBUTES


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only GPUs have this target")
def test_ffi_call_of_grids(pytestconfig):
    with jax.enable_x64(True):
        assert [*refusals(bad_grids(), pytestconfig)]
    sums, _ = call_elementwise(GRID, GRID_IN, GRID_OUT, GRID_ATTRIBUTES)
    expected = np.zeros((2, 4, 3, 3))
    expected[:, 1, 1] = 5 * 6  # all ids are 1
    np.testing.assert_array_equal(sums, expected)
