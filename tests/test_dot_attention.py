"""Attention inside `accelerate`: which programs are recognised, and that results agree.

On CPUs a function of jnp stands for the kernels of cuDNN.
"""

import contextlib
import math
import re
import unittest.mock
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jax_oneflow_ops as jof
from jax_oneflow_ops import _primitive
from jax_oneflow_ops._accelerate import dot_attention, exp_sums, symbols
from tests.arrays import one_in, rng_for
from tests.test_lowering import accelerated, compiled, native_backend

pytestmark = [native_backend, pytest.mark.usefixtures("native", "kernels_of_gpus")]

BF16 = jnp.bfloat16
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
FORWARD, GRADIENT = {"attention": 1}, {"attention": 1, "attention gradient": 1}
FACTOR = 0.3


OF_JAX = jax.nn.dot_product_attention


def stand_in(
    q,
    k,
    v,
    *,
    scale,
    is_causal,
    mask=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    **_,
):
    """What the kernels compute, in float32. They have gradients for even lengths only."""
    assert q.shape[1] % 2 == k.shape[1] % 2 == 0
    assert jax.config.jax_numpy_dtype_promotion == "standard"  # functions of jax need it
    dtype, shared = q.dtype, q.shape[2] // k.shape[2]
    q, *of_keys = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (x.repeat(shared, 2) for x in of_keys)
    logits = logits_of(q, k) * scale
    keys = np.arange(k.shape[1])
    if key_value_seq_lengths is not None:
        kept = keys < key_value_seq_lengths[:, None, None, None]
        logits = jnp.where(kept, logits, -jnp.inf)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)  # cuDNN's gradient needs a key in each row
    if is_causal:
        logits = jnp.where(np.arange(q.shape[1])[:, None] >= keys, logits, -jnp.inf)
    return weighted(jax.nn.softmax(logits), v).astype(dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    if jax.default_backend() == "cpu":
        monkeypatch.setitem(dot_attention.KERNELS, "cpu", "stand-in")
        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)


@pytest.fixture
def sums_by_xla(monkeypatch):
    """Leaves sums of exponentials in float32 to XLA, as programs for GPUs do if rows are short."""
    monkeypatch.setattr(exp_sums, "find", lambda *args: None)


def exact(q, k, v, ct, mask=True, scale=FACTOR, added=False):
    """The attention of (..., T, D) and its gradients by their definition.

    Where the mask is False, a number replaces the logits, or is added to them.
    """
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    logits = np.where(mask, scale * q @ k.swapaxes(-1, -2), -1e100)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = ct @ v.swapaxes(-1, -2)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    of_logits = np.where(mask, of_logits, 0) if not added else of_logits
    of_q, of_k = of_logits @ k, of_logits.swapaxes(-1, -2) @ q
    return weights @ v, of_q, of_k, weights.swapaxes(-1, -2) @ ct


def arrays(*shapes, dtype=BF16, seed=0):
    rng = rng_for(*shapes, seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def operands(batch=2, heads=3, queries=10, keys=None, width=8, dtype=BF16, key_heads=None):
    """q, k, v and a cotangent: (B, T, N, D)."""
    many = (batch, queries, heads, width)
    few = (batch, keys or queries, key_heads or heads, width)
    return arrays(many, few, few, many, dtype=dtype)


def with_gradients(f):
    def all_results(q, k, v, ct):
        y, pullback = jax.vjp(f, q, k, v)
        return y, *pullback(ct)

    return all_results


def swapped(f, *args, platform=None) -> Counter:
    """The operations that are swapped, without those that are no attention."""
    rows = jof.explain(f, *args, platform=platform).rows
    return Counter(
        {r.operation: r.count for r in rows if r.swapped and r.operation.startswith("attention")}
    )


def assert_close(got, want, dtype, ulps=8):
    for y, e in zip(got, want, strict=True):
        assert y.dtype == dtype
        error = np.abs(np.asarray(y, np.float64) - e).max()
        assert error <= ulps * float(jnp.finfo(dtype).eps) * max(1, np.abs(e).max()), error


def by_heads(x):
    """(B, T, N, D) as (B, N, T, D)."""
    return np.asarray(x, np.float64).swapaxes(1, 2)


def check(f, mask=True, scale=FACTOR, expected=None, added=False, **how):
    """Compares f with NumPy in float64, with its gradients and without."""
    args = operands(**how)
    if isinstance(mask, str):  # "causal"
        mask = np.tril(np.ones((args[0].shape[1], args[1].shape[1]), bool))
    q, k, v, ct = map(by_heads, args)
    shared = q.shape[1] // k.shape[1]
    repeated = (x.repeat(shared, 1) for x in (k, v))
    y, of_q, *of_shared = (x.swapaxes(1, 2) for x in exact(q, *repeated, ct, mask, scale, added))
    sums = (x.reshape(*x.shape[:2], -1, shared, x.shape[3]).sum(3) for x in of_shared)
    both = with_gradients(f)
    # One program computes both, and what they share only once.
    ways = jof.accelerate(both), jof.accelerate(f)
    found, alone = jax.jit(lambda *args: (ways[0](*args), ways[1](*args[:3])))(*args)
    assert_close(found, (y, of_q, *sums), args[0].dtype)
    assert_close([alone], [y], args[0].dtype)
    assert swapped(both, *args) == (GRADIENT if expected is None else expected)
    assert swapped(f, *args[:3]) == (FORWARD if expected is None else {})


def logits_of(q, k):
    return jnp.einsum("btnd,bsnd->bnts", q, k)


def weighted(weights, v):
    return jnp.einsum("bnts,bsnd->btnd", weights, v)


def written_out(mask=lambda x: x, normalise=jax.nn.softmax):
    """Attention whose scaled logits (B, N, T, S) pass through `mask`."""

    def attention(q, k, v):
        return weighted(normalise(mask(logits_of(q, k) * FACTOR)), v)

    return attention


def below(x, shift=0):
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape[-2:], d) for d in (0, 1))
    return rows >= columns + shift


# ---- what is recognised ----


@pytest.mark.parametrize("queries", [10, 13])
@pytest.mark.parametrize("keys", [None, 6, 7])
def test_attention(queries, keys):
    check(written_out(), queries=queries, keys=keys)


def test_float16():
    f, args = with_gradients(written_out()), operands(dtype=jnp.float16)
    assert swapped(f, *args, platform="cuda") == GRADIENT
    if jax.default_backend() == "gpu":  # jnp's attention needs it
        check(written_out(), dtype=jnp.float16)


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("queries", [10, 13])
def test_weights_in_float32(queries):
    def normalise(x):
        return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)

    check(written_out(normalise=normalise), queries=queries)


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("queries", [10, 13])
def test_the_function_of_jax(queries, key_heads, causal):
    def attention(q, k, v):
        return OF_JAX(q, k, v, is_causal=causal)

    scale = 1 / math.sqrt(8)
    check(
        attention,
        "causal" if causal else True,
        scale,
        heads=6,
        key_heads=key_heads,
        queries=queries,
    )


LOW = float(jnp.finfo(BF16).min)
LOW_IN_F32 = float(jnp.finfo(jnp.float32).min)


def larger_bias(dtype):
    return (1 - jnp.tril(jnp.ones((32, 32), dtype))) * -1e10


CAUSAL = {
    "where": lambda x: jnp.where(below(x), x, -jnp.inf),
    "lowest": lambda x: jnp.where(below(x), x, LOW),
    "tril": lambda x: jnp.where(jnp.tril(jnp.ones(x.shape[-2:])) == 0, -jnp.inf, x),
    "of booleans": lambda x: jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e30),
    "of a larger mask": lambda x: jnp.where(
        jnp.tril(jnp.ones((1, 1, 64, 64)))[:, :, : x.shape[2], : x.shape[3]], x, -jnp.inf
    ),
    "upper": lambda x: jnp.where(jnp.triu(jnp.ones(x.shape[-2:], bool), 1), -jnp.inf, x),
    "less": lambda x: jnp.where(jnp.arange(x.shape[2])[:, None] < jnp.arange(x.shape[3]), LOW, x),
    "added": lambda x: x + jnp.where(below(x), 0, -1e9).astype(x.dtype),
    "multiplied": lambda x: x + (1 - jnp.tril(jnp.ones(x.shape[-2:], x.dtype))) * -1e10,
    "of larger numbers": lambda x: x + larger_bias(x.dtype)[: x.shape[2], : x.shape[3]],
    "before a factor": lambda x: jnp.where(below(x), x / 0.125, -1e9) * 0.125,
    "combined": lambda x: jnp.where(below(x) & jnp.ones(x.shape, bool), x, -jnp.inf),
}


@pytest.mark.parametrize("queries", [10, 13])
@pytest.mark.parametrize("name", one_in(2, CAUSAL))
def test_causal_masks(name, queries):
    check(written_out(CAUSAL[name]), "causal", queries=queries)


def masks(queries, keys):
    """Masks (B, N, T, S) of each query, of keys alone, of heads, and with queries without keys."""
    rng = rng_for(queries, keys)
    some = rng.random((2, 3, queries, keys)) < 0.6
    some[:, :, 2] = False
    return {
        "all": some,
        "of keys": some[:, :1, :1],
        "of queries and keys": some[:1, :1],
        "of the batch": some[:, :1],
        "of heads": some[:1],
        "one value": np.array(True),
        "none": np.array(False),
        "causal": some[:, :1, :1] & np.tril(np.ones((queries, keys), bool)),
    }


APPLIED = {
    "where": lambda mask: lambda x: jnp.where(mask, x, -1e30),
    "inverted": lambda mask: lambda x: jnp.where(jnp.logical_not(mask), LOW, x),
    "numbers": lambda mask: lambda x: jnp.where(mask.astype(jnp.float32), x, LOW),
    "replaced": lambda mask: lambda x: jnp.where(mask == 0, LOW, x),
}


@pytest.mark.parametrize("lengths", [(10, 10), (9, 7)])
@pytest.mark.parametrize("name", one_in(2, masks(3, 3)))
@pytest.mark.parametrize("how", one_in(2, APPLIED))
def test_masks_in_general(how, name, lengths):
    queries, keys = lengths
    mask = masks(*lengths)[name]
    apply = APPLIED[how](jnp.asarray(mask))
    check(written_out(apply), mask, queries=queries, keys=keys)


def bias_of(mask, dtype=BF16, low=LOW):
    return jax.lax.select(
        mask > 0, jnp.full(mask.shape, 0, dtype), jnp.full(mask.shape, low, dtype)
    )


ADDED = {
    "bfloat16": lambda mask: lambda x: x + bias_of(mask),
    "select": lambda mask: lambda x: jnp.where(mask, 0, -1e30).astype(BF16) + x,
    "inverted": lambda mask: lambda x: x + jnp.where(mask == 0, LOW, 0).astype(x.dtype),
    "float32": lambda mask: lambda x: x.astype(jnp.float32) + bias_of(mask, jnp.float32, -1e10),
    "widened": lambda mask: lambda x: x.astype(jnp.float32) + bias_of(mask).astype(jnp.float32),
    "subtracted": lambda mask: lambda x: x - jnp.where(mask > 0, 0, 1e30).astype(x.dtype),
    "of integers": lambda mask: lambda x: x + (1 - (mask > 0)) * -1e9,
    # As in Keras.
    "by arithmetic": lambda mask: lambda x: x + (1.0 - (mask > 0).astype(x.dtype)) * -1e9,
    "less arithmetic": lambda mask: lambda x: x - 1e30 * (1 - (mask > 0).astype(x.dtype)),
    "a product": lambda mask: lambda x: x + (mask == 0).astype(jnp.float32).astype(x.dtype) * LOW,
}


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("lengths", [(10, 10), (9, 7)])
@pytest.mark.parametrize("name", one_in(2, masks(3, 3)))
@pytest.mark.parametrize("how", one_in(2, ADDED))
def test_masks_that_are_added(how, name, lengths):
    """As from masks of 0 and 1 in Hugging Face's models; rows without keys have equal weights."""
    queries, keys = lengths
    mask = masks(*lengths)[name]
    if mask.ndim == 0 and how in ("of integers", "by arithmetic", "a product"):
        pytest.skip("JAX computes the number that is added while it traces the function")
    apply = ADDED[how](jnp.asarray(mask, jnp.int32))

    def normalise(x):
        return jax.nn.softmax(x).astype(BF16)

    check(written_out(apply, normalise), mask, added=True, queries=queries, keys=keys)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("key_heads", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_biases_of_the_function_of_jax(key_heads):
    for mask in masks(10, 10).values():
        if mask.ndim and (key_heads == 3 or mask.shape[1] == 1):

            def attention(q, k, v, mask=mask):
                return OF_JAX(q, k, v, bias=bias_of(jnp.asarray(mask, jnp.int32)))

            check(attention, mask, 1 / math.sqrt(8), added=True, key_heads=key_heads)


@pytest.mark.parametrize(
    "bias",
    [
        lambda mask: (1.0 - mask) * -1e9,  # numbers, perhaps between 0 and 1
        lambda mask: (1.0 - (mask > 0).astype(BF16)) * -5,
        lambda mask: (2.0 - (mask > 0).astype(BF16)) * -1e9,
        lambda mask: (1.0 - (mask > 0).astype(BF16)) * 1e9,
        lambda mask: (mask > 0).astype(BF16) * -jnp.inf,  # NaN
        lambda mask: ((mask > 0).astype(jnp.uint8) - 1) * -1e9,  # 255 times
    ],
)
def test_arithmetic_that_makes_no_mask(bias):
    def attention(q, k, v, mask):
        return written_out(lambda x: x + bias(mask))(q, k, v)

    *args, _ = operands()
    mask = jnp.asarray(masks(10, 10)["all"], BF16)
    assert swapped(attention, *args, mask) == {}


def test_added_masks_of_positions():
    """They are not causal."""
    f = written_out(lambda x: x + jnp.where(jnp.arange(10) < 7, 0, -1e30).astype(x.dtype))
    check(f, np.arange(10) < 7, added=True)


@pytest.mark.parametrize(
    ("dtype", "low"), [(jnp.float16, -65504), (jnp.float32, -1e9), (BF16, -50), (BF16, -jnp.inf)]
)
@pytest.mark.usefixtures("sums_by_xla")
def test_added_masks_that_kernels_would_compute_otherwise(dtype, low):
    narrow = BF16 if dtype == jnp.float32 else dtype

    def attention(q, k, v, mask):
        apply = lambda x: x.astype(dtype) + bias_of(mask, dtype, low)  # noqa: E731
        return written_out(apply, lambda x: jax.nn.softmax(x).astype(narrow))(q, k, v)

    *args, _ = operands(dtype=narrow)
    mask = jnp.asarray(masks(10, 10)["all"], jnp.int32)
    assert swapped(attention, *args, mask) == {}


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("key_heads", [pytest.param(3, marks=pytest.mark.exhaustive), 1])
def test_masks_of_the_function_of_jax(key_heads):
    for name, mask in masks(10, 10).items():
        if key_heads == 3 or "heads" not in name:

            def attention(q, k, v, mask=mask):
                return OF_JAX(q, k, v, mask=jnp.asarray(mask), is_causal=True)

            both = mask & np.tril(np.ones((10, 10), bool))
            check(attention, both, 1 / math.sqrt(8), key_heads=key_heads)


OTHER_MASKS = {
    "one more": lambda x: jnp.where(below(x, -1), x, -jnp.inf),
    "reversed": lambda x: jnp.where(~below(x, 1), x, -jnp.inf),
    "a window": lambda x: jnp.where(below(x) & ~below(x, 4), x, -jnp.inf),
    "not low": lambda x: jnp.where(below(x), x, -5),
    "twice": lambda x: jnp.where(below(x), jnp.where(~below(x, 4), x, -jnp.inf), -jnp.inf),
    "negated": lambda x: -jnp.where(below(x), x, 1e30),
    "before a small factor": lambda x: jnp.where(below(x), x, -1e9) * 1e-9,
    "any numbers": lambda x: x + jnp.sin(jnp.arange(x.shape[3], dtype=x.dtype)),
    "a slope": lambda x: x + jax.lax.broadcasted_iota(x.dtype, x.shape, 3),
    "every other": lambda x: jnp.where(
        2 * jnp.arange(x.shape[2])[:, None] >= jnp.arange(x.shape[3]), x, -jnp.inf
    ),
}


def agrees(f, *args):
    """Compares with the program as it is, in float32."""
    got = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
    want = jax.jit(f)(*(x.astype(jnp.float32) for x in args))
    for y, e in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        e = np.asarray(e, np.float64)
        error = np.abs(np.asarray(y, np.float64) - e).max()
        assert error <= 0.05 * max(1, np.abs(e).max())


@pytest.mark.parametrize("name", one_in(2, OTHER_MASKS))
def test_other_masks_stay(name):
    f = with_gradients(written_out(OTHER_MASKS[name]))
    args = operands()
    assert swapped(f, *args) == {}
    agrees(f, *args)


@pytest.mark.parametrize("low", [-jnp.inf, -50])
def test_masks_that_kernels_would_compute_otherwise(low):
    """Rows without keys are NaN; what is masked has weights."""

    def attention(q, k, v, mask):
        return written_out(lambda x: jnp.where(mask, x, low))(q, k, v)

    *args, _ = operands()
    assert swapped(attention, *args, jnp.asarray(masks(10, 10)["all"])) == {}


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize(
    "apply",
    [
        lambda mask, x: jnp.where(mask, x.astype(jnp.float32), LOW_IN_F32).astype(BF16),
        lambda mask, x: jnp.where(mask, x, LOW) * 2,
        lambda mask, x: (x.astype(jnp.float32) + jnp.where(mask, 0, LOW_IN_F32)).astype(BF16),
        lambda mask, x: jnp.where(mask, x, jnp.full((), LOW, BF16) * 2),
        lambda mask, x: ((x.astype(jnp.float32) + jnp.where(mask, 0, -1e10)) * 0.01).astype(BF16),
    ],
)
def test_low_numbers_that_become_infinite_or_too_high(apply):
    """Then rows without keys are NaN, or their weights differ."""
    some = jnp.asarray(masks(10, 10)["all"])
    f = written_out(lambda x: apply(some, x))
    *args, _ = operands()
    assert swapped(f, *args) == {}


def test_masks_of_earlier_keys_only():
    """They are not causal: the first query has no key, and becomes the mean."""
    f = written_out(lambda x: jnp.where(below(x, 1), x, -1e30))
    check(f, np.tril(np.ones((10, 10), bool), -1))


def test_causal_masks_of_other_lengths_stay():
    f = written_out(CAUSAL["where"])
    assert swapped(f, *operands(queries=10, keys=12)[:3]) == {}


KEEPS = np.arange(20).reshape(2, 10) % 7 < 5
MASK_OF_ALL = np.arange(200).reshape(2, 10, 10) % 7 < 5


@pytest.mark.exhaustive
@settings(
    max_examples=2 * settings().max_examples,
    phases=[Phase.explicit, Phase.generate],  # what fails is short enough
)
@given(st.data())
def test_dimensions_in_any_order(data):
    """Einsums with operands, logits and results in any order, over one batch dimension or two."""
    order = st.permutations
    batch = data.draw(st.sampled_from(["b", "bn", "n", ""]))
    q, v = ("".join(data.draw(order([*batch, *dims]))) for dims in ("td", "se"))
    k = "".join(data.draw(order([*batch, *"sd"])))
    result = "".join(data.draw(order([*batch, *"te"])))
    logits = "".join(data.draw(order([*batch, *"ts"])))
    again = "".join(data.draw(order([*batch, *"ts"])))
    causal = data.draw(st.booleans())
    length = data.draw(st.sampled_from([5, 6]))
    keys = length if causal else data.draw(st.sampled_from([3, 4]))
    sizes = {"b": 2, "n": 3, "t": length, "s": keys, "d": 8, "e": 8}

    def attention(x, y, z):
        found = jnp.einsum(f"{q},{k}->{logits}", x, y) / jnp.sqrt(4.0).astype(x.dtype)
        if causal:
            rows, columns = (
                jax.lax.broadcasted_iota(jnp.int32, found.shape, logits.index(d)) for d in "ts"
            )
            found = jnp.where(rows >= columns, found, -jnp.inf)
        weights = jax.nn.softmax(found, logits.index("s"))
        weights = weights.transpose([logits.index(d) for d in again])
        return jnp.einsum(f"{again},{v}->{result}", weights, z)

    args = arrays(*([sizes[d] for d in dims] for dims in (q, k, v, result)))
    plain = [
        np.einsum(f"{dims}->{batch}{last}", np.asarray(x, np.float64))
        for dims, last, x in zip((q, k, v, result), ("td", "sd", "se", "te"), args, strict=True)
    ]
    mask = np.tril(np.ones((length, keys), bool)) if causal else True
    wanted = [
        np.einsum(f"{batch}{last}->{dims}", x)
        for dims, last, x in zip(
            (result, q, k, v), ("te", "td", "sd", "se"), exact(*plain, mask, 0.5), strict=True
        )
    ]
    both = with_gradients(attention)
    assert_close(jax.jit(jof.accelerate(both))(*args), wanted, BF16)
    assert swapped(both, *args) == GRADIENT


# ---- heads that are one dimension of the softmax, and two of the products ----


def merged(mask=lambda x: x, logits="btkgs", groups=3, of_values=None):
    """Attention of key heads to so many heads each. Logits pass through `mask` with N heads.

    Their dimensions are batch, queries, N heads and keys, or as in `logits`, with heads "kg".
    """

    def attention(q, k, v):
        q = q.reshape(*q.shape[:2], -1, groups, q.shape[3])
        x = jnp.einsum(f"btkgd,bskd->{logits}", q * FACTOR, k)
        at = logits.index("k")
        y = mask(x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]))
        weights = jax.nn.softmax(y)
        weights = weights.reshape(*x.shape[:at], -1, of_values or groups, *x.shape[at + 2 :])
        return jnp.einsum(f"{logits},bskd->btkgd", weights, v).reshape(*q.shape[:2], -1, v.shape[3])

    return attention


MERGED = {
    "no mask": (lambda x: x, True),
    "causal": (lambda x: jnp.where(below(x.swapaxes(1, 2))[:, None], x, LOW), "causal"),
    "of keys": (lambda x: jnp.where(KEEPS[:, None, None], x, LOW), KEEPS[:, None, None]),
    "of queries and keys": (
        lambda x: jnp.where(MASK_OF_ALL[:, :, None], x, LOW),
        MASK_OF_ALL[:, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_merged_heads(name):
    """As in flax's Gemma: logits (B, T, K, G, S) become (B, T, N, S), and weights become 5D."""
    mask, kept = MERGED[name]
    check(merged(mask), kept, heads=6, key_heads=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("logits", ["bkgts", "kgbts"])
def test_merged_heads_in_another_order(logits, causal):
    mask = CAUSAL["where"] if causal else lambda x: x
    check(merged(mask, logits), "causal" if causal else True, heads=6, key_heads=2)


def test_merged_heads_in_a_select_of_each_head_stay():
    some = np.asarray(masks(10, 10)["all"]).repeat(2, 1).swapaxes(1, 2)
    f = merged(lambda x: jnp.where(some, x, LOW))
    check(f, some.swapaxes(1, 2), heads=6, key_heads=2, expected={})


def test_heads_that_are_merged_in_another_way_stay():
    q, k, *_ = operands(heads=6, key_heads=2)
    *_, v, _ = operands(heads=6, key_heads=3)
    f = merged(of_values=2)
    agrees(f, q, k, v)
    assert swapped(f, q, k, v) == {}


def test_queries_that_are_merged_in_another_way_stay():
    """Two dimensions of queries become one, and then two others."""

    def f(q, k, v):
        x = jnp.einsum("btghd,bsd->btghs", q, k)
        weights = jax.nn.softmax(x.reshape(*x.shape[:2], -1, x.shape[4]))
        weights = weights.reshape(*x.shape[:2], x.shape[3], x.shape[2], x.shape[4])
        return jnp.einsum("btghs,bsd->btghd", weights, v)

    args = arrays((2, 10, 4, 2, 8), (2, 9, 8), (2, 9, 8))
    agrees(f, *args)
    assert swapped(f, *args) == {}


def test_dimensions_that_have_no_label_do_not_reach_kernels(monkeypatch):
    """Queries that are merged before the softmax only, and a mask of merged heads."""
    found = unittest.mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(dot_attention, "_calls", found)

    def queries(q, k, v):
        x = jnp.einsum("btghd,bsd->btghs", q, k)
        weights = jax.nn.softmax(x.reshape(*x.shape[:2], -1, x.shape[4]))
        return jnp.einsum("btns,bsd->btnd", weights, v)

    args = arrays((2, 10, 4, 2, 8), (2, 9, 8), (2, 9, 8))
    assert swapped(queries, *args) == {}
    some = jnp.asarray(masks(10, 10)["all"].repeat(2, 1).swapaxes(1, 2))
    heads = merged(lambda x: jnp.where(some, x, LOW))
    assert swapped(heads, *operands(heads=6, key_heads=2)[:3]) == {}


def test_gradients_of_merged_heads_that_a_program_computes_otherwise_stay():
    @jax.custom_vjp
    def logits(q, k):
        return jnp.einsum("btkgd,bsd->bkgts", q, k)

    def backward(residuals, ct):
        q, k = residuals
        ct = ct.reshape(ct.shape[0], -1, *ct.shape[3:])
        flat = q.reshape(*q.shape[:2], -1, q.shape[4])
        of_q = jnp.einsum("bnts,bsd->btnd", ct, k).reshape(q.shape)
        return of_q, jnp.einsum("bnts,btnd->bsd", ct, flat)

    logits.defvjp(lambda q, k: (logits(q, k), (q, k)), backward)

    def f(q, k, v):
        weights = jax.nn.softmax(jnp.where(below(logits(q, k)), logits(q, k) * FACTOR, -1e9))
        return jnp.einsum("bkgts,bsd->btkgd", weights, v)

    q, k, v, ct = arrays((2, 10, 2, 3, 8), (2, 10, 8), (2, 10, 8), (2, 10, 2, 3, 8))
    agrees(with_gradients(f), q, k, v, ct)


# ---- programs ----


def test_nothing_else_computes_the_weights():
    """On CPUs the products of the function that stands for the kernel are all that is left."""
    args = operands()
    f = with_gradients(written_out(CAUSAL["where"]))
    by = dot_attention.KERNELS.get(jax.default_backend(), "cudnn")
    how = {"scale": FACTOR, "is_causal": True, "implementation": by}
    reference = with_gradients(lambda *args: jax.nn.dot_product_attention(*args, **how))
    ours, theirs = compiled(jof.accelerate(f), *args), compiled(reference, *args)
    for what in (" dot(", "__cudnn$fmha"):
        assert ours.count(what) == theirs.count(what)
    assert ours.count(" dot(") + ours.count("__cudnn$fmha") >= 2
    assert "jof_softmax" not in ours


@pytest.mark.exhaustive
def test_other_transformations():
    f, args = with_gradients(written_out(CAUSAL["where"])), operands()
    assert swapped(jax.vmap(f), *arrays(*[(3, 2, 10, 2, 8)] * 4)) == GRADIENT
    remat = with_gradients(jax.checkpoint(written_out()))
    assert swapped(remat, *args) == GRADIENT
    agrees(remat, *args)

    def layers(q, k, v, ct):
        def layer(x, _):
            return jax.checkpoint(written_out(CAUSAL["where"]))(x, k, v), None

        return jax.vjp(lambda q: jax.lax.scan(layer, q, None, 3)[0], q)[1](ct)

    assert swapped(layers, *args) == GRADIENT
    agrees(layers, *args)
    jitted = with_gradients(jax.jit(written_out()))
    assert swapped(jitted, *args)["attention"] == 1
    agrees(jitted, *args)
    agrees(lambda *args: jax.jvp(written_out(), args[:3], args[:3]), *args)
    many = arrays(*[(3, 2, 10, 2, 8)] * 4)
    assert swapped(lambda *args: jax.lax.map(lambda a: f(*a), args), *many) == GRADIENT


LAYERS = {
    "where": written_out(CAUSAL["where"]),
    "upper": written_out(CAUSAL["upper"]),
    "less": written_out(CAUSAL["less"]),
    "combined": written_out(CAUSAL["combined"]),
    "jax": lambda q, k, v: OF_JAX(q, k, v, is_causal=True),
    "no mask": written_out(),
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("jax", "upper") else pytest.mark.exhaustive)
        for name in LAYERS
    ],
)
def test_layers_in_a_scan(name):
    """jax computes the mask before the loop; attention is swapped in both directions."""

    def layers(x, scales):
        def layer(x, scale):
            return x + jax.checkpoint(LAYERS[name])(x * scale, x, x), None

        return jax.lax.scan(layer, x, scales)[0]

    def step(x, ct, scales):
        y, pullback = jax.vjp(lambda x: layers(x, scales), x)
        return y, *pullback(ct)

    x, ct = arrays(*[(2, 10, 3, 8)] * 2)
    scales = jnp.array([0.5, 0.25], BF16)
    assert swapped(step, x, ct, scales) == GRADIENT
    agrees(step, x, ct, scales)
    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of(2, kind=kind)
        places = [jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(D), jax.P(D), jax.P())]
        with jax.set_mesh(mesh):
            agrees(step, *jax.device_put([x, ct, scales], places))


def test_loops_with_other_masks():
    """A mask that is an operand of the program, and another one of positions."""
    x, ct = arrays(*[(2, 10, 3, 8)] * 2)
    of_program = jnp.asarray(masks(10, 10)["of queries and keys"])

    for kept in (of_program, jnp.arange(10)[:, None] >= jnp.arange(10) + 1):

        def step(x, ct, kept=kept):
            def layer(x, _):
                return written_out(lambda x: jnp.where(kept, x, -1e30))(x, x, x), None

            return jax.vjp(lambda x: jax.lax.scan(layer, x, length=2)[0], x)[1](ct)

        agrees(step, x, ct)


def test_derivatives_of_second_order():
    def loss(q, k, v):
        return jnp.sum(jnp.sin(written_out(CAUSAL["where"])(q, k, v).astype(jnp.float32)))

    *args, ct = operands()
    agrees(lambda q, k, v, ct: jax.jvp(lambda q: jax.grad(loss)(q, k, v), [q], [ct]), *args, ct)
    agrees(lambda q, k, v: jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, k, v) ** 2))(q), *args)


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (1, 2), (2,)])
def test_gradients_of_some_operands(wanted):
    def some(*args):
        *operands, ct = args

        def f(*chosen):
            for i, x in zip(wanted, chosen, strict=True):
                operands[i] = x
            return written_out()(*operands)

        return jax.vjp(f, *(operands[i] for i in wanted))[1](ct)

    args = operands()
    expected = {} if wanted == (2,) else {"attention gradient": 1}
    assert swapped(some, *args) == expected
    agrees(some, *args)


def test_values_that_are_projected_late():
    """What reads the gradient of v may come before the gradient of the logits."""

    def f(q, k, x, w):
        weights = jax.nn.softmax(logits_of(q, k) * FACTOR)
        return weighted(weights, jnp.einsum("bsnd,de->bsne", x, w))

    q, k, v, ct = operands()
    (w,) = arrays((8, 8))

    def gradients(q, k, v, w, ct):
        return jax.vjp(f, q, k, v, w)[1](ct)

    assert swapped(gradients, q, k, v, w, ct) == {"attention gradient": 1}
    agrees(gradients, q, k, v, w, ct)


def test_weights_that_are_read_otherwise():
    def f(q, k, v):
        weights = jax.nn.softmax(logits_of(q, k) * FACTOR)
        return weighted(weights, v), weights, weights.astype(jnp.float32).sum(1)

    def loss(*args):
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in f(*args))

    *args, _ = operands()
    agrees(f, *args)
    agrees(jax.grad(loss, (0, 1, 2)), *args)


def dropped(x):
    return x * (jax.lax.broadcasted_iota(jnp.int32, x.shape, 3) % 3 > 0)


UNLIKE = {
    "dropout": written_out(normalise=lambda x: dropped(jax.nn.softmax(x))),
    "a bias": written_out(lambda x: x + x[0, 0, 0]),
    "no exponential": written_out(normalise=jax.nn.relu),
    "a negative factor": written_out(lambda x: x * -2),
    "a sum over queries": written_out(normalise=lambda x: jax.nn.softmax(x, 2)),
    "weights of other keys": written_out(normalise=lambda x: jax.nn.softmax(x).swapaxes(2, 3)),
    "wider values": lambda q, k, v: weighted(
        jax.nn.softmax(logits_of(q, k)), jnp.concatenate([v, v], -1)
    ),
    "values in float32": lambda q, k, v: weighted(
        jax.nn.softmax(logits_of(q, k)), v.astype(jnp.float32)
    ),
}


def with_own_gradient(function, gradient):
    """A function of logits whose gradient a program replaces."""
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), None), lambda _, ct: (gradient(ct),))
    return written_out(own)


NO_KEYS_IN_ONE_ROW = np.ones((10, 10), bool)
NO_KEYS_IN_ONE_ROW[2] = False
OWN_GRADIENTS = {
    "guarded": (lambda x: x, lambda ct: jnp.where(jnp.isfinite(ct), ct, 0)),
    "if one value says so": (lambda x: x, lambda ct: jnp.where(jnp.sum(ct) < jnp.inf, ct, 0)),
    "scaled": (lambda x: x, lambda ct: ct * 0.2),
    "not masked": (lambda x: jnp.where(NO_KEYS_IN_ONE_ROW, x, -1e30), lambda ct: ct),
    "masked": (lambda x: x, lambda ct: jnp.where(NO_KEYS_IN_ONE_ROW, ct, 0)),
    "masked where numbers were added": (
        lambda x: x + jnp.where(NO_KEYS_IN_ONE_ROW, 0, LOW).astype(x.dtype),
        lambda ct: jnp.where(NO_KEYS_IN_ONE_ROW, ct, 0),
    ),
}


@pytest.mark.parametrize("name", one_in(2, OWN_GRADIENTS))
def test_gradients_that_a_program_replaces(name):
    f, args = with_gradients(with_own_gradient(*OWN_GRADIENTS[name])), operands()
    assert swapped(f, *args) == FORWARD
    agrees(f, *args)


def test_one_softmax_for_several_attentions():
    """Of other values, and of one cotangent that is read in two orders."""
    (*args, ct), (other,) = operands(8, 8, 8, width=8), arrays([8] * 4)

    def of_two_values(q, k, v, other, ct):
        weights, pullback = jax.vjp(lambda q, k: jax.nn.softmax(logits_of(q, k) * FACTOR), q, k)

        def of(v):
            y, pullback_of_v = jax.vjp(weighted, weights, v)
            of_weights, of_v = pullback_of_v(ct)
            return y, of_v, pullback(of_weights)

        return of(v), of(other)

    assert swapped(of_two_values, *args, other, ct) == {"attention": 2, "attention gradient": 2}
    agrees(of_two_values, *args, other, ct)

    def in_two_orders(q, k, v, ct):
        _, pullback = jax.vjp(lambda q, k: jax.nn.softmax(logits_of(q, k) * FACTOR), q, k)
        return [
            pullback(jnp.einsum(f"{order},bsnd->bnts", ct, v)) for order in ("btnd", "tbnd", "bntd")
        ]

    assert swapped(in_two_orders, *args, ct) == {"attention gradient": 3}
    agrees(in_two_orders, *args, ct)


def test_masks_that_conversions_change():
    *args, _ = operands()
    few = jnp.asarray(rng_for("few").uniform(0, 2, (2, 1, 1, 10)), jnp.float32)
    large = jnp.asarray(np.arange(10) % 3 * 128)
    tiny = jnp.asarray(np.arange(10) % 3 * 1e-10, jnp.float32)
    for mask, dtype in ((few, jnp.int32), (large, jnp.uint8), (tiny, jnp.float16)):

        def f(q, k, v, dtype=dtype, mask=mask):
            return written_out(lambda x: jnp.where(mask.astype(dtype) != 0, x, -1e30))(q, k, v)

        assert swapped(f, *args) == FORWARD
        agrees(f, *args)


QUANTISED = {
    "logits": written_out(lambda x: x.astype(jnp.int32).astype(x.dtype)),
    "logits in 8 bits": written_out(lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype)),
    "weights": written_out(normalise=lambda x: jax.nn.softmax(x).astype(jnp.int8).astype(x.dtype)),
    "unsigned positions": written_out(
        lambda x: jnp.where(
            jnp.arange(x.shape[2], dtype=jnp.uint32)[:, None]
            - jnp.arange(x.shape[3], dtype=jnp.uint32)
            >= 0,
            x,
            -jnp.inf,
        )
    ),
    "a factor of bits": written_out(lambda x: x * (jnp.int32(6) & jnp.int32(3)).astype(x.dtype)),
    "a quotient of integers": written_out(
        lambda x: x * jax.lax.div(jnp.int32(5), jnp.int32(2)).astype(x.dtype)
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_steps_that_are_no_steps_of_numbers(name):
    *args, _ = operands()
    assert swapped(QUANTISED[name], *args) == {}


def test_a_mask_along_a_dimension_of_size_1():
    """It is causal for one query only, and the others are a batch."""
    q, k, v = (x[0, :, 0] for x in operands()[:3])

    def f(q, k, v):
        logits = jnp.einsum("td,sd->ts", q, k).reshape(10, 1, 10)
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, d) for d in (1, 2))
        logits = jnp.where(rows >= columns, logits, -1e30).reshape(10, 1, 1, 10)
        return jnp.einsum("tabs,sd->tabd", jax.nn.softmax(logits), v)

    agrees(f, q, k, v)


def test_on_a_mesh_of_one_device():
    """Its types have shardings, and JAX writes them between operations."""
    f, args = with_gradients(written_out(CAUSAL["where"])), operands()
    mesh = jax.make_mesh((1,), ("x",), (EXPLICIT,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        assert swapped(f, *args) == GRADIENT
        agrees(f, *args)


@pytest.mark.parametrize("name", UNLIKE)
def test_other_programs_stay(name):
    *args, _ = operands()
    assert swapped(UNLIKE[name], *args) == {}
    agrees(UNLIKE[name], *args)


def test_operands_in_float32_stay():
    *args, _ = operands(dtype=jnp.float32)
    assert swapped(written_out(), *args) == {}


def test_deterministic_programs_stay():
    *args, _ = operands()

    def f(*args):
        return written_out()(*args)

    text = jax.jit(jof.accelerate(f, deterministic=True)).lower(*args).as_text()
    plain = jax.jit(lambda *args: f(*args)).lower(*args).as_text()
    assert text.count("dot_general") == plain.count("dot_general")


def test_strict_promotion_of_dtypes():
    f, args = with_gradients(written_out()), operands(queries=11)
    with jax.numpy_dtype_promotion("strict"):
        assert swapped(f, *args) == GRADIENT
        agrees(f, *args)


@pytest.mark.usefixtures("sums_by_xla")
@pytest.mark.parametrize("causal", [False, True])
def test_a_report_names_an_attention_once(causal):
    """The function of JAX transposes logits before it looks for their maximum."""

    def attention(q, k, v):
        return OF_JAX(q, k, v, is_causal=causal)

    *args, ct = operands()
    rows = jof.explain(with_gradients(attention), *args, ct).rows
    named = [row.operation for row in rows if row.operation.startswith("attention")]
    assert Counter(named) == GRADIENT


@pytest.mark.usefixtures("sums_by_xla")
def test_a_report_leaves_out_the_softmax_of_an_attention():
    """It stands in another line than the products. Another softmax of its size is reported."""

    def attention(q, k, v):
        logits = logits_of(q, k) * FACTOR
        weights = jax.nn.softmax(logits)
        return weighted(weights, v)

    def two(q, k, v, ct):
        weights = jax.nn.softmax(logits_of(q, ct).astype(jnp.float32))  # XLA runs it
        return weights, with_gradients(attention)(q, k, v, ct)

    rows = jof.explain(two, *operands(queries=16)).rows
    assert Counter(row.operation for row in rows if row.swapped) == GRADIENT
    (left,) = (row for row in rows if not row.swapped)
    assert left.operation == "softmax"
    assert int(left.line.rpartition(":")[2]) == two.__code__.co_firstlineno + 1


def test_export():
    f, args = with_gradients(written_out()), operands()
    program = jax.jit(jof.accelerate(lambda *args: f(*args)))
    exported = jax.export.export(program, disabled_checks=jof.export_checks())(*args)
    restored = jax.export.deserialize(exported.serialize())
    for y, e in zip(restored.call(*args), program(*args), strict=True):
        np.testing.assert_array_equal(y, e)


COLLECTIVES = r" (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("


def mesh_of(*sizes, kind=AUTO, reverse=False):
    count = math.prod(sizes)
    if len(jax.devices()) < count:
        pytest.skip(f"fewer than {count} devices")
    devices = jax.devices()[:count][:: -1 if reverse else 1]
    names = ("data", "model")[: len(sizes)]
    return jax.sharding.Mesh(np.reshape(devices, sizes), names, axis_types=(kind,) * len(sizes))


def check_sharded(mesh, specs, f=None, *, more=0, **how):
    """Compares an attention and its gradients with those on one device, and the communication.

    `specs` are those of q and the cotangent, and of k and v. It may need `more` collectives.
    """
    f = with_gradients(f or (lambda q, k, v: OF_JAX(q, k, v, scale=FACTOR, is_causal=True)))
    args = operands(**how)
    want = jax.jit(f)(*args)
    places = [jax.sharding.NamedSharding(mesh, specs[i]) for i in (0, 1, 1, 0)]
    sharded = [jax.device_put(x, place) for x, place in zip(args, places, strict=True)]
    with jax.set_mesh(mesh) if EXPLICIT in mesh.axis_types else contextlib.nullcontext():
        assert swapped(f, *sharded) == GRADIENT
        program, by_xla = (jax.jit(g).lower(*sharded).compile() for g in (jof.accelerate(f), f))
    got = program(*sharded)
    for y, e in zip(got, want, strict=True):
        assert_close([y], [np.asarray(e, np.float64)], BF16)
    counts = [len(re.findall(COLLECTIVES, p.as_text())) for p in (program, by_xla)]
    assert counts[0] <= counts[1] + more, counts
    on_cpu = jax.default_backend() == "cpu"  # the forward pass is computed once
    calls = program.as_text().count(" exponential(" if on_cpu else 'target="__cudnn$fmha')
    assert calls == (1 if on_cpu else 2)
    return got, program


D, M = "data", "model"
SHARDED = {
    "batch": (jax.P(D), jax.P(D)),
    "heads": (jax.P(None, None, M), jax.P(None, None, M)),
    "batch by all": (jax.P((D, M)), jax.P((D, M))),
    "batch, heads": (jax.P(D, None, M), jax.P(D, None, M)),
    "batch, queries": (jax.P(D, M), jax.P(D)),
    "queries by both": (jax.P(None, (D, M)), jax.P()),
}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", one_in(2, SHARDED))
def test_sharded_among_devices(name, kind):
    got, _ = check_sharded(mesh_of(2, 4, kind=kind), SHARDED[name], batch=8, heads=4, queries=16)
    for y, spec in zip(got, [SHARDED[name][i] for i in (0, 0, 1, 1)], strict=True):
        assert y.sharding.is_equivalent_to(jax.sharding.NamedSharding(y.sharding.mesh, spec), 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("key_heads", "spec"), [(2, jax.P(D)), (2, jax.P(None, None, D)), (1, jax.P(D))]
)
def test_sharded_heads_that_share_keys(key_heads, spec):
    check_sharded(mesh_of(2), (spec, spec), batch=4, heads=4, key_heads=key_heads)


@pytest.mark.exhaustive
def test_more_devices_than_key_heads():
    """One axis of the mesh shards key heads and their groups, after a reshape of the heads."""
    for specs in ((jax.P(D, None, M), jax.P(D)), (jax.P(None, None, M), jax.P())):
        check_sharded(mesh_of(2, 4), specs, batch=4, heads=8, key_heads=2, queries=16)


def test_the_mesh_of_arguments(monkeypatch):
    """It counts, if another one is current, whose factors would do as well."""
    monkeypatch.setattr(_primitive, "_finer", lambda mesh: iter([mesh]))
    args = operands(batch=8)
    f = with_gradients(lambda q, k, v: OF_JAX(q, k, v, scale=FACTOR))

    def total(*args):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in f(*args))

    place = jax.sharding.NamedSharding(mesh_of(2, 4), jax.P(D))
    sharded = jax.device_put(args, place)
    with jax.set_mesh(jax.make_mesh((8,), ("other",), (AUTO,), devices=jax.devices()[:8])):
        program = jax.jit(jof.accelerate(total)).lower(*sharded).compile()
    assert "all-gather" not in program.as_text()
    np.testing.assert_allclose(program(*sharded), jax.jit(total)(*args), rtol=0.05, atol=1)


def test_queries_of_heads_that_share_keys_sharded():
    """Each device has other queries of the one head, so the gradients of its keys are summed."""
    specs = jax.P(None, None, D), jax.P()
    check_sharded(mesh_of(2), specs, batch=2, heads=4, key_heads=1)


def test_devices_in_another_order():
    check_sharded(mesh_of(2, 2, reverse=True), (jax.P(M, None, D),) * 2, batch=4, heads=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["padding", "causal"])
def test_masks_sharded_among_devices(name):
    mask = np.arange(16) < np.array([16, 5, 9, 16])[:, None, None, None]
    mask = mask if name == "padding" else np.tri(16, dtype=bool)
    f = written_out(lambda x: jnp.where(mask, x, jnp.finfo(BF16).min))
    specs = {"padding": (jax.P(D, M), jax.P(D)), "causal": (jax.P(D, None, M),) * 2}[name]
    check_sharded(mesh_of(2, 2), specs, f, batch=4, heads=4, queries=16)


def test_constraints_on_logits_and_weights():
    """A program says how what is replaced would be sharded."""
    mesh = mesh_of(2, 2)
    place = jax.sharding.NamedSharding(mesh, jax.P(D, M))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, place)

    f = written_out(constrained, lambda x: constrained(jax.nn.softmax(x)))
    check_sharded(mesh, (jax.P(D, None, M),) * 2, f, batch=4, heads=4)


def scanned_layers(q, k, v):
    def layer(x, _):
        return jax.checkpoint(written_out())(x, k, v), None

    return jax.lax.scan(layer, q, length=2)[0]


def one_of_two(q, k, v):
    def masked(*args):
        return written_out(CAUSAL["where"])(*args)

    return jax.lax.cond(jnp.sum(q) > 1e9, written_out(), masked, q, k, v)


def a_batch_on_an_axis(q, k, v):
    split = (x.reshape(2, -1, *x.shape[1:]) for x in (q, k, v))
    return jax.vmap(written_out(), spmd_axis_name=D)(*split).reshape(q.shape)


def constrained_unevenly(q, k, v):
    place = jax.sharding.NamedSharding(mesh_of(2), jax.P(None, None, D))
    return written_out()(*(jax.lax.with_sharding_constraint(x, place) for x in (q, k, v)))


TRANSFORMED = {
    "bfloat16": written_out(),
    "checkpoint": jax.checkpoint(written_out()),
    "a scan": scanned_layers,
    "a condition": one_of_two,
    "vmap": a_batch_on_an_axis,
    "three heads on two devices": constrained_unevenly,
}


@pytest.mark.parametrize("name", one_in(2, TRANSFORMED))
def test_transformations_on_several_devices(name):
    f, args = with_gradients(TRANSFORMED[name]), operands(batch=4)
    place = jax.sharding.NamedSharding(mesh_of(2), jax.P(D))
    sharded = jax.device_put(args, place)
    assert swapped(f, *sharded)["attention"] >= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", jof.GatherWarning)
        agrees(f, *sharded)


@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
def test_sharded_keys_and_features():
    """They are gathered. XLA gathers keys, too, and sums products of features over devices."""
    for spec, more in ((jax.P(None, D), 0), (jax.P(None, None, None, D), 3)):
        check_sharded(mesh_of(2), (spec, spec), more=more, queries=16)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_in_a_shard_map(kind):
    mesh = mesh_of(2, kind=kind)
    place = jax.sharding.NamedSharding(mesh, jax.P(D))
    args = [jax.device_put(x, place) for x in operands()]
    f = with_gradients(written_out())
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P(D), out_specs=jax.P(D))
    assert swapped(mapped, *args) == GRADIENT
    agrees(mapped, *args)


def test_programs_for_devices_that_are_not_here():
    """They stay: their calls would refer to functions of this process, and there are no devices."""
    f, mesh = with_gradients(written_out()), jax.sharding.AbstractMesh((2,), (D,))
    place = jax.sharding.NamedSharding(mesh, jax.P(D))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in operands()]
    program = jax.jit(jof.accelerate(lambda *args: f(*args)))
    exported = jax.export.export(program, platforms=[jax.default_backend()])(*args)
    assert "custom_call" not in exported.mlir_module()
    many = jax.sharding.AbstractMesh((1024,), (D,))
    args = [jax.ShapeDtypeStruct((1024, *x.shape[1:]), BF16) for x in args]
    place = jax.sharding.NamedSharding(many, jax.P(D))
    args = [jax.ShapeDtypeStruct(x.shape, BF16, sharding=place) for x in args]
    text = program.trace(*args).lower(lowering_platforms=(jax.default_backend(),)).as_text()
    assert "CustomSPMDPartitioning" not in text


@pytest.mark.usefixtures("measurements")
def test_sizes_that_pay(monkeypatch):
    """Without being asked, only attention for which cuDNN was measured to be faster."""
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION")

    def swapped_at(*sizes):
        x = jax.ShapeDtypeStruct(sizes, BF16)
        return swapped(with_gradients(written_out()), x, x, x, x, platform="NVIDIA H200")

    for sizes in ((8, 512, 12, 64), (128, 197, 12, 64), (64, 56, 8, 64)):
        assert swapped_at(*sizes) == GRADIENT
    few, odd, fails = (4096, 16, 8, 64), (2048, 57, 4, 64), (2**16, 64, 1, 64)
    for sizes in (few, odd, fails, (1, 64, 4, 64)):
        assert swapped_at(*sizes) == {}


def test_without_cudnn(monkeypatch):
    """A program for GPUs keeps its attention where cuDNN cannot be asked."""
    monkeypatch.setattr(dot_attention.Attention, "has_kernels", lambda *_: False)
    *args, _ = operands()
    assert "attention" not in accelerated(written_out(), *args, platform="cuda")


def test_symbols_of_floats_are_not_compared():
    """x - 0.5 > y is not x - y - 1.5 >= 0."""
    line = symbols.Line((1.0,), 0.5)
    other = symbols.Line((0.0,), 2.0)
    assert symbols._compared(line, other, "GT") is None
