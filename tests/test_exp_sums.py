"""Sums of exponentials inside `accelerate`: what is recognised, and that results agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from tests.arrays import rng_for
from tests.test_lowering import ENVIRONMENT_VARIABLE, accelerated, lowered_targets, native_backend

pytestmark = [native_backend, pytest.mark.usefixtures("kernels_of_gpus")]

TARGET = "jof_exp_sum"
ROWS, COLUMNS = 12, 37


def called(f, *args, platform=None) -> int:
    """How often the kernel is called in the lowered program."""
    return lowered_targets(accelerated(f, *args, platform=platform)).get(TARGET, 0)


def rows_of(dtype, shape=(ROWS, COLUMNS), axis=-1):
    """Rows of all kinds along an axis."""
    x = rng_for(dtype, shape, axis).normal(size=shape) * 3
    rows = np.moveaxis(x, axis, -1).reshape(-1, shape[axis])
    rows[1] += 1000
    rows[2, 3], rows[3, :5], rows[4] = 60, -np.inf, -np.inf
    rows[5, 2], rows[6, 4] = np.inf, np.nan
    rows[7, :2], rows[8], rows[9] = [np.inf, -np.inf], 0, 1e-30
    moved = rows.reshape(np.moveaxis(x, axis, -1).shape)
    return jnp.asarray(np.moveaxis(moved, -1, axis), dtype)


def compare(f, *args, ulps=16):
    """Compares a function inside `accelerate` with JAX in float64."""
    results = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if x.dtype.kind not in "iub" else x for x in args]
        exact = jax.jit(f)(*wide)
    for y, e in zip(*map(jax.tree.leaves, (results, exact)), strict=True):
        bound = ulps * float(jnp.finfo(y.dtype).eps)
        e = np.asarray(e, np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), e, rtol=bound, atol=bound)


def check(f, *args):
    """Compares with JAX in float64, and returns how often the kernel is called."""
    compare(f, *args)
    return called(f, *args)


def test_long_rows_are_split():
    """Few very long rows are summed in slices, on GPUs with the same results."""
    x = rows_of("float32", (12, 1_000_003))[5:8]
    f = jax.nn.logsumexp
    found = lowered_targets(accelerated(lambda x: f(x, -1), x, platform="cuda"))
    assert found == {"jof_split_exp_sum": 1}
    compare(lambda x: f(x, -1), x)


def widened(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def by_hand(x, axis):
    largest = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True))
    return jnp.exp(x - largest) / jnp.sum(jnp.exp(x - largest), axis, keepdims=True)


def read_later(x, axis):
    largest = jnp.max(x, axis)
    total = jnp.sum(jnp.exp(x - jnp.expand_dims(largest, axis)), axis)
    return largest, largest + jnp.log(total), jnp.exp(largest / 3000)


FUNCTIONS = {
    "logsumexp": lambda x, axis: jax.nn.logsumexp(x, axis),
    "logsumexp with its dimension": lambda x, axis: jax.nn.logsumexp(x, axis, keepdims=True),
    "softmax": lambda x, axis: jax.nn.softmax(x, axis),
    "log_softmax": lambda x, axis: jax.nn.log_softmax(x, axis),
    "by hand": by_hand,
    "maximum and sum": lambda x, axis: (jnp.max(x, axis), jax.nn.logsumexp(x, axis)),
    "a maximum read later": read_later,
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = rows_of(dtype)
        assert check(lambda x: FUNCTIONS[name](widened(x), -1), x) == 1


SLICES = {
    "the last token": lambda x: widened(x)[:, :-1],
    "before they are widened": lambda x: widened(x[:, :-1]),
    "the first token": lambda x: widened(x)[:, 1:],
    "sequences and tokens": lambda x: widened(x)[1:, 1:-1],
    "many": lambda x: widened(x)[:, :3],
    "of the sum": lambda x: widened(x)[..., 1:],
    "every other": lambda x: widened(x)[:, ::2],
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SLICES)
def test_parts_of_rows(name, dtype):
    """As in losses of the next token. Rows that the program drops may be anything."""
    x = rows_of(dtype, (6, 12, COLUMNS))
    if name != "of the sum":
        x = x.at[:, 0].set(jnp.nan) if name == "the first token" else x.at[:, -1].set(jnp.nan)

    def sums(x):
        return jax.nn.logsumexp(SLICES[name](x), -1)

    def loss(x):
        return jnp.sum(jnp.sin(sums(x)))

    assert check(sums, x) == 1
    assert [row.operation for row in jof.explain(sums, x).rows] == ["sum of exp"]
    finite = jnp.asarray(rng_for(name).normal(size=x.shape), dtype)
    assert check(jax.grad(loss), finite) == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
@pytest.mark.parametrize("name", ["logsumexp", "softmax"])
def test_axes(name, axis):
    """Also with dimensions of equal sizes, which are not the same dimensions."""
    for shape in ((4, 6, 8), (6, 6, 6), (5, 1, 12), (10, 10, 1)):
        if shape[axis] > 1:
            x = rng_for(shape, axis).normal(size=shape)
            assert check(lambda x: FUNCTIONS[name](x, axis), jnp.asarray(x, "float32")) == 1


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cross_entropy_with_its_gradient(dtype):
    x = jnp.asarray(rng_for(dtype).normal(size=(ROWS, COLUMNS)), dtype)
    labels = jnp.arange(ROWS) % COLUMNS

    def loss(x, labels):
        entropy = optax.softmax_cross_entropy_with_integer_labels(widened(x), labels)
        return jnp.sum(entropy * jnp.arange(ROWS))

    assert check(jax.value_and_grad(loss), x, labels) == 1
    if dtype == "float32":

        def hvp(x, labels):
            return jax.jvp(lambda x: jax.grad(loss)(x, labels), (x,), (jnp.cos(x),))[1]

        assert check(hvp, x, labels) == 1


@pytest.mark.usefixtures("native")
def test_in_loops_functions_and_batches():
    x = jnp.asarray(rng_for("loops").normal(size=(6, 4, COLUMNS)), "float32")

    @jax.jit
    def rows(x):
        return jax.nn.logsumexp(x, -1)

    def scanned(x):
        return jax.lax.scan(lambda c, row: (c + jnp.sum(jax.checkpoint(rows)(row)), None), 0.0, x)

    assert check(jax.vmap(rows), x) == 1
    assert check(scanned, x) == 1
    assert check(lambda x: jax.grad(lambda x: scanned(x)[0])(x), x) >= 1
    assert check(lambda x: jax.lax.cond(x[0, 0, 0] > 9, rows, lambda x: -rows(x), x), x) == 2


@pytest.mark.usefixtures("native")
def test_a_maximum_outside():
    """A maximum that was lowered outside of `accelerate` may still be read later."""

    def f(x):
        with jof.accelerate(False):
            largest = jnp.max(x, -1)
        return largest, jnp.log(jnp.sum(jnp.exp(x - largest[:, None]), -1)) + largest

    assert check(f, jnp.asarray(rng_for("outside").normal(size=(ROWS, COLUMNS)), "float32")) == 1


OTHERS = {
    "a mask": lambda x: jax.nn.logsumexp(x, -1, where=x > 0),
    "factors": lambda x: jax.nn.logsumexp(x, -1, b=jnp.abs(x)),
    "two axes": lambda x: jax.nn.logsumexp(x, (0, 1)),
    "no maximum": lambda x: jnp.sum(jnp.exp(x), -1),
    "a minimum": lambda x: jnp.sum(jnp.exp(x - jnp.min(x, -1, keepdims=True)), -1),
    "the maximum of all": lambda x: jnp.sum(jnp.exp(x - jnp.max(x)), -1),
    "maxima of columns": lambda x: jnp.sum(jnp.exp(x - jnp.max(x, 0, keepdims=True)), -1),
    "maxima of other rows": lambda x: jnp.sum(jnp.exp(x - jnp.max(x.T, -1)[:, None]), -1),
    "a maximum of at least 0": lambda x: jnp.sum(
        jnp.exp(x - jnp.max(x, -1, keepdims=True, initial=0)), -1
    ),
    "rounded": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16), -1).astype(jnp.float32),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay_as_they_are(name):
    x = jax.ShapeDtypeStruct((COLUMNS, COLUMNS), "float32")
    assert called(OTHERS[name], x) == 0


@pytest.mark.usefixtures("native")
def test_outside_nothing_changes():
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), "float32")

    def f(x):
        with jof.accelerate(False):
            return jax.nn.logsumexp(x, -1)

    assert called(f, x) == 0
    assert TARGET not in jax.jit(lambda x: jax.nn.logsumexp(x, -1)).lower(x).as_text()


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    scale=st.sampled_from([1e-3, 1, 30, 3000]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_random_rows(shape, dtype, scale, seed, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "native")
        check(lambda x: jax.nn.log_softmax(widened(x), axis), x)
        check(lambda x: jax.nn.softmax(widened(x), axis), x)


# ---- where it is used ----


def lowered_for(f, dtype="bfloat16", columns=50257, platform="cuda"):
    """How often the kernel is called if f reads logits (8192, columns) and their product."""
    shapes = (8192, 256), (256, columns)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return called(lambda x, w: f(widened(x @ w)), *args, platform=platform)


def test_what_is_fastest_is_chosen():
    def logsumexp(x):
        return jax.nn.logsumexp(x, -1)

    for dtype in ("bfloat16", "float32"):
        assert lowered_for(logsumexp, dtype) == 1
        assert lowered_for(lambda x: jax.nn.softmax(x, -1), dtype) == 1
    assert lowered_for(logsumexp, columns=1000) == 1
    assert lowered_for(lambda x: jax.nn.softmax(x, -1), columns=1000) == 0  # XLA reads rows once
    assert lowered_for(lambda x: logsumexp(30 * jnp.tanh(x / 30))) == 0  # XLA fuses the tanh
    assert lowered_for(logsumexp, platform="cpu") == 0
    assert lowered_for(lambda x: logsumexp(x[:-1])) == 1  # the kernel reads all rows
    assert lowered_for(lambda x: logsumexp(x[:4096])) == 0
    assert lowered_for(lambda x: logsumexp(x[:, 1:])) == 0
    assert lowered_for(lambda x: logsumexp(x + jnp.arange(x.shape[1]) / 7)) == 0  # in float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bias_is_part_of_the_product(dtype):
    x, w, b, c = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((8192, 256), (256, 50304), (50304,), (8192,))
    )
    assert called(lambda x, w, b: logits(x @ w + b), x, w, b, platform="cuda") == 1
    assert called(lambda x, w, b: logits(b + x @ w), x, w, b, platform="cuda") == 1
    assert called(lambda x, w, c: logits(x @ w + c[:, None]), x, w, c, platform="cuda") == 0
    assert called(lambda x, w: logits(x @ w + x @ w), x, w, platform="cuda") == 0


def logits(x):
    return jax.nn.logsumexp(widened(x), -1)


@pytest.mark.usefixtures("native")
def test_several_devices():
    """In a `shard_map`, rows are whole; the partitioner might shard them."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(rows_of("float32"), jax.sharding.NamedSharding(mesh, jax.P("x")))

    def f(x):
        return jax.nn.logsumexp(x, -1)

    assert check(f, x) == 0
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    assert check(mapped, x) == 1
