"""Matrix products inside `accelerate`: which are padded, and that results agree."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_oneflow_ops as jof
from tests.arrays import rng_for
from tests.test_lowering import ENVIRONMENT_VARIABLE, accelerated, native_backend

pytestmark = [native_backend, pytest.mark.usefixtures("kernels_of_gpus")]


def products(f, *args, platform=None) -> list[tuple[str, str]]:
    """The shapes of the operands of all products in the lowered program."""
    text = accelerated(f, *args, platform=platform)
    found = re.findall(r"dot_general.*: \(tensor<([\dx]+)x\w+>, tensor<([\dx]+)x\w+>\)", text)
    return [(a, b) for a, b in found]


def check(f, *args):
    """Compares with float64 and returns the shapes of the operands of products."""
    results = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
    exact = f(*(np.asarray(x, np.float64) for x in args))
    assert results.shape == exact.shape
    error = np.abs(np.asarray(results, np.float64) - exact)
    eps = 2 * float(jnp.finfo(results.dtype).eps) + 2**-20  # of the result and of float32 sums
    if jax.default_backend() == "gpu" and results.dtype == jnp.float32:
        eps += 2**-9  # factors are rounded to TensorFloat-32
    assert (error <= eps * np.abs(exact).max(initial=1)).all()
    return products(f, *args)


def arrays(dtype, *shapes):
    rng = rng_for(dtype, shapes)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


DTYPES = ["float16", "bfloat16", "float32"]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_place_of_a_row(dtype):
    x, y = arrays(dtype, (16, 21), (21, 24))
    assert check(lambda x, y: x @ y, x, y) == [("16x24", "24x24")]  # contracted
    assert check(lambda x, y: y.T @ x.T, x, y) == [("24x24", "24x16")]  # transposed views
    x, y = arrays(dtype, (16, 24), (24, 21))
    assert check(lambda x, y: x @ y, x, y) == [("16x24", "24x24")]  # in the result
    x, y = arrays(dtype, (24, 21), (24, 13))
    assert check(lambda x, y: x.T @ y, x, y) == [("24x24", "24x16")]  # both in the result
    x, y = arrays(dtype, (16, 24), (24, 8))
    assert check(lambda x, y: x @ y, x, y) == [("16x24", "24x8")]  # aligned


@pytest.mark.usefixtures("native")
def test_batches_and_several_dimensions():
    x, y = arrays("bfloat16", (3, 5, 4, 9), (3, 9, 4, 7))
    numbers = (((3, 2), (1, 2)), ((0,), (0,)))
    how = {"dimension_numbers": numbers, "preferred_element_type": jnp.float32}
    got = jax.jit(jof.accelerate(lambda x, y: lax.dot_general(x, y, **how)))(x, y)
    exact = np.einsum("bijk,bkjl->bil", *(np.asarray(z, np.float64) for z in (x, y)))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    assert products(lambda x, y: lax.dot_general(x, y, **how), x, y) == [("3x5x4x16", "3x16x4x8")]


@pytest.mark.usefixtures("native")
@given(
    sizes=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    flips=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
)
def test_any_product(sizes, flips, dtype):
    b, i, j, k, m, n = sizes
    x, y = arrays(dtype, (b, i, j, k, m), (b, k, m, n))
    x, y = (z.swapaxes(-1, -2) if flip else z for z, flip in zip((x, y), flips, strict=True))
    left = "bijmk" if flips[0] else "bijkm"
    right = "bknm" if flips[1] else "bkmn"

    def f(x, y):
        library = jnp if isinstance(x, jax.Array) else np
        return library.einsum(f"{left},{right}->bnij", x, y)

    check(f, x, y)


@pytest.mark.usefixtures("native")
def test_gradients():
    x, w = arrays("bfloat16", (16, 24), (24, 21))

    def loss(x, w):
        return jnp.sum(jnp.sin((x @ w).astype(jnp.float32)))

    got = jax.jit(jof.accelerate(jax.grad(loss, (0, 1))))(x, w)
    exact = jax.grad(loss, (0, 1))(*(z.astype(jnp.float32) for z in (x, w)))
    for g, e in zip(got, exact, strict=True):
        assert np.abs(np.asarray(g, np.float32) - e).max() <= 0.02 * np.abs(e).max()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_other_dtypes_stay(dtype):
    with jax.enable_x64(True):
        x, y = arrays(dtype, (16, 21), (21, 24))
        assert products(lambda x, y: x @ y, x, y) == [("16x21", "21x24")]


@pytest.mark.usefixtures("native")
def test_float32():
    """Rows of 4 values are aligned. Products in full precision use other kernels."""
    x, y = arrays("float32", (16, 20), (20, 24))
    assert products(jnp.matmul, x, y) == [("16x20", "20x24")]
    x, y = arrays("float32", (16, 21), (21, 24))
    for precision, padded in ((None, True), ("default", True), ("highest", False), ("high", False)):
        wanted = ("16x24", "24x24") if padded else ("16x21", "21x24")
        f = functools.partial(jnp.matmul, precision=precision)
        assert products(f, x, y) == [wanted]
    mixed = x.astype(jnp.bfloat16), y
    assert products(lambda x, y: lax.dot(x, y), *mixed) == [("16x21", "21x24")]


def head(tokens=16384, words=50257, width=768):
    def gradients(logits, table, hidden):
        ct = jnp.exp(logits.astype(jnp.float32)).astype(jnp.bfloat16)
        return ct @ table, ct.T @ hidden

    shapes = (tokens, words), (words, width), (tokens, width)
    return gradients, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def test_gradients_of_logits_are_padded_by_default(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    step, *args = head()
    found = products(step, *args, platform="cuda")
    assert found == [("16384x50264", "50264x768"), ("50264x16384", "16384x768")]
    rows = jof.explain(step, *args, platform="cuda").rows
    assert [(row.operation, row.swapped) for row in rows] == [("matrix product", True)] * 2
    assert rows[0].shapes == ((16384, 768), (16384, 50257))

    def dense(logits, kernel, hidden):  # the table of words is transposed
        ct = jnp.exp(logits.astype(jnp.float32)).astype(jnp.bfloat16)
        return ct @ kernel.T, hidden.T @ ct

    logits, table, hidden = args
    kernel = jax.ShapeDtypeStruct(table.shape[::-1], table.dtype)
    found = products(dense, logits, kernel, hidden, platform="cuda")
    assert found == [("16384x50264", "50264x768"), ("768x16384", "16384x50264")]
    aligned, *args = head(words=50304)
    assert products(aligned, *args, platform="cuda")[0] == ("16384x50304", "50304x768")


@pytest.mark.parametrize("tied", [False, True])
def test_sums_of_exponentials_read_padded_logits(tied, monkeypatch):
    """The padding of logits is negative infinity, so that it changes no maximum and no sum."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    _, _, table, hidden = head()
    shape = table.shape if tied else table.shape[::-1]

    def loss(table, hidden):
        logits = hidden @ (table.T if tied else table).astype(jnp.bfloat16)
        return jax.nn.logsumexp(logits.astype(jnp.float32), -1).mean()

    args = jax.ShapeDtypeStruct(shape, jnp.float32), hidden
    text = accelerated(jax.grad(loss, (0, 1)), *args, platform="cuda")
    assert len(re.findall(r"dot_general.*50264", text)) == 3
    assert re.search(r"func.*@jof_exp_sum|custom_call @jof_exp_sum", text)
    [call] = re.findall(r"custom_call @jof_exp_sum.*\(tensor<(\w+)>\)", text)
    assert call == "16384x50264xbf16"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_padded_logits(dtype):
    x, w = arrays(dtype, (64, 8), (8, 21))  # the result is larger than the operands

    def both(x, w):
        logits = x @ w
        wide = logits.astype(jnp.float32)
        return jax.nn.logsumexp(wide, -1), logits, jnp.max(wide, -1), jax.nn.softmax(logits)

    got = jax.jit(jof.accelerate(both))(x - 4, jnp.abs(w))  # all logits are negative
    exact = both(x.astype(jnp.float32) - 4, jnp.abs(w).astype(jnp.float32))
    for g, e in zip(got, exact, strict=True):
        bound = 16 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(g, np.float32), e, rtol=bound, atol=bound)


def test_attention_and_other_batches_keep_their_results(monkeypatch):
    """A softmax kernel reads them."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    q = jax.ShapeDtypeStruct((1024, 197, 16, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)

    def attention(q, k, bias):
        weights = (
            jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q + bias, k + bias)) * bias[:, :1, None]
        )
        return jnp.einsum("bhqk,bkhd->bqhd", weights, k).astype(jnp.float32).sum()

    rows = jof.explain(jax.grad(attention, (0, 1)), q, q, bias, platform="cuda").rows
    swapped = [row.operation for row in rows if row.swapped]
    assert sorted(swapped) == ["softmax", "softmax gradient"]


def test_reports_show_logits_without_padding(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    _, _, table, hidden = head()

    def loss(table, hidden):
        logits = (hidden @ table.T).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1).mean()

    rows = jof.explain(loss, table, hidden, platform="cuda").rows
    assert [(row.operation, row.shapes[-1]) for row in rows] == [
        ("matrix product", (768, 50257)),
        ("sum of exp", (16384, 50257)),
    ]


def test_results_that_programs_update_are_not_padded_logits(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)

    def updated(x, u, i):
        return jax.nn.logsumexp(lax.dynamic_update_slice(x * 2, u, (i, 0)), -1)

    x, u = (jax.ShapeDtypeStruct((n, 50257), jnp.float32) for n in (16384, 1))
    i = jax.ShapeDtypeStruct((), jnp.int32)
    rows = jof.explain(updated, x, u, i, platform="cuda").rows
    assert not [row for row in rows if row.swapped]


def test_others_stay_by_default(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    small, *args = head(tokens=64)
    assert products(small, *args, platform="cuda")[0] == ("64x50257", "50257x768")
    step, *args = head()
    assert products(step, *args, platform="cpu")[0] == ("16384x50257", "50257x768")
    logits, table, _ = args
    # To copy these would cost more than padding saves.
    rows = jax.ShapeDtypeStruct((400, 400), jnp.bfloat16)
    long = jax.ShapeDtypeStruct((400, 250001), jnp.bfloat16)
    found = products(lambda x, y: x @ (y + y), rows, long, platform="cuda")
    assert found == [("400x400", "400x250001")]
    narrow = jax.ShapeDtypeStruct((50257, 64), jnp.bfloat16)
    assert products(jnp.matmul, logits, narrow, platform="cuda") == [("16384x50257", "50257x64")]
    wide = jax.ShapeDtypeStruct((16384, 50257), jnp.bfloat16)
    assert products(jnp.matmul, wide, table, platform="cuda") == [("16384x50264", "50264x768")]


@pytest.mark.usefixtures("native")
def test_several_devices():
    """Odd dimensions are padded where the partitioner decides; others only in a shard_map."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def put(x, spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*spec)))

    x, y, z = arrays("bfloat16", (16, 21), (21, 24), (16, 20))
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    sharded = put(x, ("x", None)), put(y, (None, None))
    assert products(jnp.matmul, *sharded) == [("16x24", "24x24")]
    got = jax.jit(jof.accelerate(jnp.matmul))(*sharded)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=0.02, atol=0.1)
    even = put(z, (None, "x")), put(z, (None, "x"))
    assert products(lambda a, b: a @ b.T, *even) == [("16x20", "20x16")]

    @jax.shard_map(mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"))
    def local(x, y):
        return x @ y

    assert products(local, put(x[:, :20], ("x", None)), put(y[:20], ())) == [("8x24", "24x24")]
    got = jax.jit(jof.accelerate(local))(put(x, ("x", None)), put(y, ()))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=0.02, atol=0.1)
