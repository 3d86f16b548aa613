"""Softmax and related functions, and norms: hard values, and arguments."""

import functools
import importlib
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_oneflow_ops as jof
from jax_oneflow_ops import _primitive, _rows
from tests import oracle
from tests.arrays import normals, one_in, rng_for
from tests.catalogue import FLOATS
from tests.test_lowering import compiled, lowered_targets, targets

pytestmark = pytest.mark.usefixtures("x64", "kernels_of_gpus")

# Rows shorter and longer than a vector register, and than a block of them.
LENGTHS = (1, 2, 7, 33, 100, 333, 1000, 2048, 2049, 9000)


def assert_close(actual, exact, dtype, ulps, floor=0.0, least=0.0):
    """Within `ulps` units in the last place; `floor` is relative to the largest magnitude of a row,
    which is taken as at least `least`."""
    assert actual.dtype == dtype
    assert actual.shape == np.shape(exact)
    wide, exact = np.asarray(actual).astype(np.float64), np.float64(exact)
    unit = oracle.spacing(exact, dtype)
    largest = np.max(np.abs(exact), -1, keepdims=True, initial=least)
    slack = ulps * unit + floor * largest + 1e-37
    assert np.all(np.abs(wide - exact) <= slack), np.max(np.abs(wide - exact) / slack)


def eps(dtype) -> float:
    return float(jnp.finfo(dtype).eps)


def ulps(dtype) -> float:
    """The error bound in units in the last place; exponentials cost a few."""
    return {2: 1.0, 4: 4.0, 8: 16.0}[jnp.dtype(dtype).itemsize]


def rows_of(kind, rng, shape):
    """Hard rows, whose values are exact in float16."""
    x = rng.standard_normal(shape)
    if kind == "offset":
        x = 1000 + x
    elif kind == "outlier":
        x[..., rng.integers(shape[-1])] = 300
    elif kind == "constant":
        x = np.full(shape, 1.5)
    elif kind == "denormal":
        x = x * 1e-6
    elif kind == "wide":
        x = 30 * x
    return x.astype(np.float16).astype(np.float64)


KINDS = ("normal", "offset", "outlier", "constant", "denormal", "wide")


def hard_rows(dtype, count, n) -> np.ndarray:
    """`count` rows of each kind."""
    rows = [rows_of(kind, rng_for(kind, dtype, n), (count, n)) for kind in KINDS]
    return np.stack(rows).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_on_hard_rows(dtype):
    xs = [hard_rows(dtype, 3, n) for n in LENGTHS]
    labels = [
        rng_for(dtype, n).integers(0, n, x.shape[:2]) for n, x in zip(LENGTHS, xs, strict=True)
    ]

    def run(x, labels):
        return (
            jof.softmax(x),
            jof.log_softmax(x),
            jof.logsumexp(x, -1),
            jof.softmax_cross_entropy_with_integer_labels(x, labels),
        )

    results = jax.device_get(jax.jit(lambda *lists: [*map(run, *lists)])(xs, labels))
    for n, x, label, (*others, loss) in zip(LENGTHS, xs, labels, results, strict=True):
        wide = x.astype(np.float64)
        # Far from the row's maximum, the exponent has the rounding error of a difference.
        floor = 4 * eps(jnp.promote_types(dtype, jnp.float32))
        exact = oracle.softmax(wide), oracle.log_softmax(wide)
        for y, e in zip(others[:2], exact, strict=True):
            assert_close(y, e, dtype, ulps(dtype), floor)
        for y, e in zip(others[2], oracle.logsumexp(wide), strict=True):
            assert_close(y, e, dtype, ulps(dtype), floor)
        exact = oracle.cross_entropy(wide, label)
        # The error of log(sum) - (x - max) where the terms cancel.
        slack = 4 * eps(jnp.promote_types(dtype, jnp.float32)) * (1 + np.log(n))
        assert np.all(
            np.abs(np.float64(loss) - exact) <= ulps(dtype) * oracle.spacing(exact, dtype) + slack
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_softmax_on_hard_rows(dtype):
    lengths = (1, 7, 100, 5000)
    problems = []
    for n in lengths:
        x = hard_rows(dtype, 3, n)
        rng = rng_for(dtype, n)
        ct = rng.standard_normal(x.shape).astype(x.dtype)
        problems.append((x, ct, rng.integers(0, n, x.shape[:2])))

    def run(x, ct, labels):
        def loss(x):
            return jof.softmax_cross_entropy_with_integer_labels(x, labels).sum()

        sums = jax.grad(lambda x: jof.logsumexp(x, -1).sum())
        return jax.vjp(jof.softmax, x)[1](ct)[0], jax.grad(loss)(x), sums(x)

    results = jax.jit(lambda problems: [run(*p) for p in problems])(problems)
    for n, (x, ct, labels), found in zip(lengths, problems, results, strict=True):
        wide, dy = x.astype(np.float64), ct.astype(np.float64)
        p = oracle.softmax(wide)
        # The kernel reads the rounded y, and terms cancel.
        floor = 8 * eps(dtype) + 4 * eps(dtype) * np.log2(n + 1)
        expected = p * (dy - np.sum(p * dy, -1, keepdims=True))
        scale = np.max(np.abs(p * dy), -1, keepdims=True) + 1e-3 / n
        assert np.all(np.abs(np.float64(found[0]) - expected) <= floor * scale + 1e-30)
        onehot = np.arange(n) == labels[..., None]
        small = 8 * eps(jnp.promote_types(dtype, jnp.float32))
        assert_close(found[1], p - onehot, dtype, 2 * ulps(dtype), small, 1.0)
        assert_close(found[2], p, dtype, 2 * ulps(dtype), small)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(50_000, 2), (300_001, 1), (4, 5000, 3), (96, 40)])
def test_sums_along_other_axes_are_as_exact(shape, dtype):
    """Long sums of numbers of one sign, where each rounding of a running sum would show."""
    rng = rng_for(dtype, *shape)
    x, ct = (rng.uniform(0, 1, shape).astype(dtype) for _ in range(2))
    axis = len(shape) - 2

    @jax.jit
    def run(x, ct):
        y, pull = jax.vjp(lambda x: jof.softmax(x, axis), x)
        return y, pull(ct)[0], jof.logsumexp(x, axis), jof.log_softmax(x, axis)

    y, dx, total, log = run(x, ct)
    # NumPy adds up pairs only along adjacent elements.
    wide, dy = (np.moveaxis(np.float64(a), axis, -1).copy("C") for a in (x, ct))
    p, last = oracle.softmax(wide), functools.partial(jnp.moveaxis, source=axis, destination=-1)
    assert_close(last(y), p, dtype, ulps(dtype))
    assert_close(total, oracle.logsumexp(wide), dtype, ulps(dtype))
    assert_close(last(log), oracle.log_softmax(wide), dtype, ulps(dtype))
    rounded = np.float64(last(y)).copy("C")  # what the gradient is computed from
    expected = rounded * (dy - np.sum(rounded * dy, -1, keepdims=True))
    slack = 4 * eps(jnp.promote_types(dtype, jnp.float32)) * rounded
    slack += ulps(dtype) * oracle.spacing(expected, dtype)
    assert np.all(np.abs(np.float64(last(dx)) - expected) <= slack)


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 3_000_000), -1), ((3, 1_000_000), 0), ((40, 96), -1)]
)
def test_norms_of_long_and_of_short_rows(shape, axis, center):
    x = rng_for(*shape).uniform(1, 2, shape).astype(np.float32)
    y = jax.jit(norm_of_rows(center, axis))(x)
    expected = oracle.normalized(np.float64(x), center)[0]
    assert_close(y, expected, np.float32, 4, 2**-23)


@pytest.mark.parametrize("axis", [-1, -2])
def test_norms_of_rows_with_an_enormous_outlier(axis):
    x = rng_for("outlier").standard_normal((4, 4097)).astype(np.float32)
    x[:, 1000] = 1e6
    y = jax.jit(norm_of_rows(True, axis))(x)
    assert_close(y, oracle.normalized(np.float64(x), True)[0], np.float32, 4, 2**-23)


def test_group_norm_of_many_pixels():
    x = rng_for("pixels").uniform(1, 2, (1, 400_000, 2)).astype(np.float32)
    dy = np.ones_like(x)
    scale, bias = np.ones(2, np.float32), np.zeros(2, np.float32)
    y, (dx, dscale, dbias) = group_norm_and_cotangents(dy, x, scale, bias, 1, False)
    exact = oracle.group_norm(*map(np.float64, (x, scale, bias)), 1, False)
    assert np.max(np.abs(y - exact)) < 2**-21
    expected = oracle.group_norm_vjp(*map(np.float64, (dy, x, scale, bias)), 1, False)
    np.testing.assert_allclose(dbias, expected[2], rtol=1e-6)
    # Terms cancel.
    np.testing.assert_allclose(dscale, expected[1], rtol=0, atol=1e-6 * np.sum(np.abs(exact)))
    assert np.max(np.abs(dx - expected[0])) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_short_rows(dtype):
    """CPUs work on groups of short rows. Whole and partial groups, with non-finite rows and labels
    out of range; the gradient of cross entropy overwrites the logits."""
    lengths, small = (1, 2, 3, 4, 7, 8, 9, 23, 40, 64), eps(jnp.promote_types(dtype, jnp.float32))
    xs, cts, labels = [], [], []
    for n in lengths:
        rng = rng_for(dtype, n)
        x = rng.standard_normal((300 + n, n)).astype(jnp.dtype(dtype))
        x[7, ::2] = x[8] = -INF
        x[9, -1], x[-1, 0] = INF, NAN
        xs.append(x)
        cts.append(rng.standard_normal(x.shape).astype(x.dtype))
        labels.append(rng.integers(-n - 1, n + 1, 300 + n).astype(np.int32))

    @jax.jit
    def of_rows(x, ct):
        of_each = (jax.vjp(f, x) for f in (jof.softmax, jof.log_softmax, jof.rms_norm))
        return [(y, pull(ct)[0]) for y, pull in of_each]

    @functools.partial(jax.jit, donate_argnums=0)
    def cross_entropy(x, labels, ct):
        f = functools.partial(jof.softmax_cross_entropy_with_integer_labels, labels=labels)
        y, pull = jax.vjp(f, x)
        return y, pull(ct)[0]

    close = functools.partial(np.testing.assert_allclose, rtol=8 * eps(dtype), atol=8 * eps(dtype))
    for n, x, ct, label in zip(lengths, xs, cts, labels, strict=True):
        ((y, dx), (log, dlog), (xhat, dnorm)), (loss, dloss) = (
            jax.tree.map(np.float64, found)
            for found in (of_rows(x, ct), cross_entropy(jnp.array(x), label, ct[:, 0]))
        )
        wide, dy = np.float64(x), np.float64(ct)
        with np.errstate(invalid="ignore", divide="ignore"):
            close(y, oracle.softmax(wide))
            close(log, oracle.log_softmax(wide))
            close(dx, y * (dy - np.sum(y * dy, -1, keepdims=True)))
            close(
                dlog,
                dy - np.exp(log) * np.sum(dy, -1, keepdims=True),
                atol=8 * eps(dtype) + n * small,
            )
            normalized, rstd = oracle.normalized(wide, False)
            close(xhat, normalized)
            close(dnorm / rstd, oracle.norm_vjp(wide, 1, dy, False)[0] / rstd)
            peak = np.max(wide, -1, keepdims=True)
            e = np.exp(wide - np.where(np.isfinite(peak), peak, 0))
            is_label = np.arange(n) == np.where(label < 0, label + n, label)[:, None]
            of_label = np.where(is_label.any(-1), np.sum(wide, -1, where=is_label), NAN)
            close(loss, np.logaddexp.reduce(wide, -1) - of_label)
            close(dloss, dy[:, :1] * (e * (1 / np.sum(e, -1, keepdims=True)) - is_label))


def norm_of_rows(center, axis):
    """A norm of rows along the last axis, which is moved to `axis` for the call."""
    norm = functools.partial(jof.layer_norm if center else jof.rms_norm, axis=axis)
    return lambda x, *vectors: jnp.moveaxis(norm(jnp.moveaxis(x, -1, axis), *vectors), axis, -1)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_norms_on_hard_rows(center, dtype, axis):
    norm = norm_of_rows(center, axis)
    problems = []
    for n in LENGTHS:
        rng = rng_for(dtype, n)
        scale = rng.uniform(0.5, 2, size=n).astype(np.float32)
        bias = rng.standard_normal(n).astype(jnp.dtype(dtype))
        count = 5 if n > 64 else 60  # more than the group of short rows that CPUs work on
        problems.append((hard_rows(dtype, count, n), scale, *([bias] if center else [])))
    run = jax.jit(lambda problems: [(norm(x), norm(x, *vectors)) for x, *vectors in problems])
    results = jax.device_get(run(problems))
    for (x, scale, *bias), found in zip(problems, results, strict=True):
        xhat, rstd = oracle.normalized(x.astype(np.float64), center)
        small = 2 * eps(jnp.promote_types(dtype, jnp.float32))
        exact = xhat * scale + (bias[0].astype(np.float64) if center else 0)
        for kind in range(len(KINDS)):
            slack = small
            if jnp.dtype(dtype).itemsize == 2:  # the mean is rounded to float32
                slack *= 1 + float(np.max(np.abs(np.float64(x[kind])) * rstd[kind]))
            assert_close(found[0][kind], xhat[kind], dtype, ulps(dtype), slack)
            assert_close(found[1][kind], exact[kind], dtype, ulps(dtype), 2 * slack)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_gradients_of_norms_on_hard_rows(center, dtype, axis):
    norm = norm_of_rows(center, axis)
    problems = []
    for n in (1, 7, 100, 5000):
        rng = rng_for(dtype, n)
        x = hard_rows(dtype, 50, n)  # parts of the sums that cut groups of rows
        scale = rng.uniform(0.5, 2, size=n).astype(np.float32)
        dy = rng.standard_normal(x.shape).astype(x.dtype)
        problems.append((dy, x, scale, *([np.zeros(n, np.float32)] if center else [])))

    def run(dys, xs, *vectors):
        return [jax.vjp(norm, x, *vectors)[1](dy) for dy, x in zip(dys, xs, strict=True)]

    results = jax.jit(lambda problems: [run(*p) for p in problems])(problems)
    for (dy, x, scale, *_), found in zip(problems, results, strict=True):
        for kind in range(len(KINDS)):
            wide = [a.astype(np.float64) for a in (x[kind], scale, dy[kind])]
            cts = found[kind]
            expected = oracle.norm_vjp(*wide, center)
            xhat, rstd = oracle.normalized(wide[0], center)
            small = 64 * eps(jnp.promote_types(dtype, jnp.float32))
            if jnp.dtype(dtype).itemsize == 2:
                small *= 1 + float(np.max(np.abs(wide[0])))
            slack = ulps(dtype) * oracle.spacing(expected[0], dtype) + small * 8 * rstd
            assert cts[0].dtype == dtype
            assert np.all(np.abs(np.float64(cts[0]) - expected[0]) <= slack)
            atol = 1e-4 * (1 + np.max(np.abs(xhat)))
            for ct, exact in zip(cts[1:], expected[1:], strict=False):
                assert ct.dtype == np.float32
                np.testing.assert_allclose(ct, exact, rtol=1e-5, atol=atol)


# Channels that fill packs and that do not, groups wider and narrower than a pack, images of one
# pixel and of several parts.
IMAGES = (((3, 8, 8, 32), 4), ((2, 49, 30), 10), ((1, 7, 5), 1), ((2, 64, 100, 24), 24))
IMAGES += (((2, 5, 2100), 30), ((5, 8), 2), ((1, 300, 300, 3), 1))


@functools.partial(jax.jit, static_argnums=(4, 5))
def group_norm_and_cotangents(dy, x, scale, bias, groups, silu):
    def f(x, *vectors):
        return jof.group_norm(x, groups, *vectors, activation="silu" if silu else None)

    y, pull = jax.vjp(f, x, scale, bias)
    return y, pull(dy)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["normal", "offset", "outlier", "constant"])
def test_group_norm_on_hard_images(kind, dtype):
    for (shape, groups), silu in zip(IMAGES, [True, False] * 4, strict=False):
        rng = rng_for(kind, dtype, *shape)
        n, channels = shape[0], shape[-1]
        # The values within a group of an image are hard.
        split = (n, groups, math.prod(shape[1:-1]) * channels // groups)
        x = np.moveaxis(rows_of(kind, rng, split).reshape(n, groups, -1, channels // groups), 1, 2)
        x = x.reshape(shape).astype(dtype)
        scale = rng.uniform(0.5, 2, size=channels).astype(np.float32)
        bias = rng.standard_normal(channels).astype(np.float32)
        dy = rng.standard_normal(shape).astype(dtype)
        y, cts = group_norm_and_cotangents(dy, x, scale, bias, groups, silu)
        wide = [a.astype(np.float64) for a in (x, scale, bias)]
        rows = oracle.rows_of_groups(wide[0], groups)
        xhat, rstd = (np.max(np.abs(a)) for a in oracle.normalized(rows, True))
        small = 8 * eps(jnp.promote_types(dtype, jnp.float32))
        if jnp.dtype(dtype).itemsize == 2:  # the mean is rounded to float32
            small *= 1 + float(np.max(np.abs(wide[0])) * rstd)
        exact = oracle.group_norm(*wide, groups, silu)
        slack = ulps(dtype) * oracle.spacing(exact, dtype) + 2 * small * (1 + xhat)
        assert y.dtype == dtype
        assert np.all(np.abs(np.float64(y) - exact) <= slack)
        expected = oracle.group_norm_vjp(np.float64(dy), *wide, groups, silu)
        slack = ulps(dtype) * oracle.spacing(expected[0], dtype) + 8 * small * (8 + xhat) * rstd
        assert np.all(np.abs(np.float64(cts[0]) - expected[0]) <= slack)
        for ct, e in zip(cts[1:], expected[1:], strict=True):
            np.testing.assert_allclose(ct, e, rtol=2e-5, atol=2e-4 * (1 + xhat) + 40 * small)


# --- non-finite values ----------------------------------------------------------------------------

INF, NAN = np.inf, np.nan
SPECIAL = np.array(
    [
        [1, 2, 3, 4],
        [-INF, 2, -INF, 4],
        [-INF, -INF, -INF, -INF],
        [INF, 2, 3, -INF],
        [NAN, 2, 3, 4],
        [NAN, NAN, NAN, NAN],
        [INF, NAN, 0, -INF],
        [3e38, -3e38, 3e38, 0],
        [-3e38, -3e38, -3e38, -3e38],
        [NAN, -INF, -INF, -INF],
        [INF, INF, INF, INF],
        [-1e30, -1e30, -1e30, -1e30],
        [-1e10, -2e10, -1e10, -1e10],
        [5e8, 5.4e8, 5.4e8, 5e8],
        [1e30, 1e20, -1e30, 1e30],
        [-1e9, -1e9, 5, 3],
    ],
    np.float32,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_special_values_are_those_of_jax(name, axis, dtype):
    """In float32, from the same values; 16-bit results are rounded."""
    special = np.asarray(jnp.asarray(SPECIAL, dtype), np.float32)
    xs = [np.repeat(special, repeats, -1) for repeats in (1, 40, 2100)]
    xs = [np.ascontiguousarray(x.T) if axis == 0 else x for x in xs]
    cts = [rng_for(name).standard_normal(x.shape).astype(np.float32) for x in xs]
    if name == "logsumexp":
        cts = [ct.take(0, axis) for ct in cts]

    def both(f, x, ct):
        y, pull = jax.vjp(lambda x: f(x, axis), x)
        return y, pull(ct)[0]

    def every(of, dtype):
        @jax.jit
        def run(*lists):
            found = [both(getattr(of, name), *one) for one in zip(*lists, strict=True)]
            return jax.tree.map(lambda x: x.astype(jnp.float32), found)

        return run(*([jnp.asarray(x, dtype) for x in arrays] for arrays in (xs, cts)))

    rounding = 0 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    found, exact = every(jof, dtype), every(jax.nn, "float32")
    for (y, dx), (expected, wanted) in zip(found, exact, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5 + rounding)
        # Gradients are made from the rounded result.
        np.testing.assert_allclose(dx, wanted, rtol=2e-4 + 4 * rounding, atol=1e-6 + 4 * rounding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("repeats", [1, 40, 2100])
def test_numbers_whose_exponentials_overflow_beside_infinity(dtype, repeats):
    x = jnp.asarray(np.repeat([INF, 95, 101.5, 110, 3], repeats), dtype)
    assert jof.logsumexp(x, axis=-1) == INF
    assert jof.softmax_cross_entropy_with_integer_labels(x, jnp.int32(-1)) == INF
    assert np.isnan(jof.log_softmax(x)).all()


def cross_entropy_in_jax(x, labels):
    of_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(x, -1) - of_label


@pytest.mark.parametrize("labels", [0, 3, -1, -4, 4, -5, 2**31 - 1, -(2**31)])
def test_special_labels_are_those_of_jax(labels):
    x, labels = jnp.asarray(SPECIAL), jnp.full(len(SPECIAL), labels, jnp.int32)
    loss = functools.partial(jof.softmax_cross_entropy_with_integer_labels, labels=labels)
    expected = functools.partial(cross_entropy_in_jax, labels=labels)
    # The tolerances below cover values that JAX rounds to 0 next to 3e38.
    columns = functools.partial(
        jof.softmax_cross_entropy_with_integer_labels, labels=labels, axis=0
    )
    ct = jnp.arange(1.0, len(SPECIAL) + 1, dtype=jnp.float32)

    def run(f, x):
        y, pull = jax.vjp(f, x)
        return y, pull(ct)[0]

    (y, dx), reference, (wanted, of_wanted), (along_columns, of_columns) = jax.jit(
        lambda x: (
            *(run(f, x) for f in (loss, reference_of(loss), expected)),
            run(columns, x.T),
        )
    )(x)
    for found, of_found in ((y, dx), reference):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1.5)
        np.testing.assert_allclose(of_found, of_wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(along_columns, y)
    np.testing.assert_allclose(of_columns.T, dx, rtol=1e-6)


def test_labels_of_64_bits_name_no_other_class():
    x = jnp.zeros((1, 4))
    labels = jnp.array([2**32 + 1])
    assert np.isnan(jof.softmax_cross_entropy_with_integer_labels(x, labels)).all()


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_special_values_of_norms(center):
    """A row with non-finite values has NaNs, and no other row has."""
    x = np.repeat(SPECIAL[[0, 3, 4, 2, 0]], 3, -1)
    y = np.asarray(jof.layer_norm(x) if center else jof.rms_norm(x))
    assert np.isfinite(y[[0, 4]]).all()
    assert np.isnan(y[2]).all()
    assert np.isnan(y[[1, 3]]).any(-1).all()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("label", [0, 3, -1, 4, -(2**31)])
def test_special_values_in_sharded_rows(label):
    """With one element per device (of four): shards whose maximum is infinite of either sign."""
    devices = jax.devices()[: 4 if len(jax.devices()) >= 4 else 2]
    mesh = jax.sharding.Mesh(np.array(devices), "n")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "n"))
    rows = np.concatenate([SPECIAL, [[-5000, -INF, -5001, -INF], [-INF, 5000, INF, 0]]])
    x = jnp.asarray(rows, jnp.float32)
    labels = jnp.full(len(x), label, jnp.int32)
    ct = jnp.arange(1.0, len(x) + 1, dtype=jnp.float32)
    for f in (
        functools.partial(jof.logsumexp, axis=-1),
        functools.partial(jof.softmax_cross_entropy_with_integer_labels, labels=labels),
    ):

        def both(x, f=f):
            y, pull = jax.vjp(f, x)
            return y, pull(ct)[0]

        y, dx = jax.jit(both)(jax.device_put(x, sharding))
        expected, wanted = both(x)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-6)
        assert dx.sharding.is_equivalent_to(sharding, 2)


# --- shapes and arguments -------------------------------------------------------------------------


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from(("bfloat16", "float32")),
)
def test_any_shape_and_axes(shape, data, dtype):
    axes = data.draw(
        st.one_of(
            st.none(),
            st.integers(-len(shape), len(shape) - 1),
            st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1).map(tuple),
        )
    )
    x = rng_for(*shape).standard_normal(shape).astype(jnp.dtype(dtype))
    where = rng_for("where", *shape).integers(0, 2, size=shape).astype(bool)

    @jax.jit
    def both(x, where):
        def every(of, x):
            return (
                of.softmax(x, axes),
                of.log_softmax(x, axes),
                *(of.logsumexp(x, axes, keepdims=keepdims) for keepdims in (False, True)),
                of.softmax(x, axes, where),
                of.logsumexp(x, axes, where=where),
            )

        return every(jof, x), every(jax.nn, x.astype(jnp.float32))

    for actual, expected in zip(*both(x, where), strict=True):
        assert actual.dtype == x.dtype
        assert actual.shape == expected.shape
        a, e = np.float64(actual), np.float64(expected)
        np.testing.assert_allclose(a, e, rtol=4 * eps(dtype), atol=4 * eps(dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bool"])
def test_integers_are_converted(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    for f in (jof.softmax, jof.log_softmax, functools.partial(jof.logsumexp, axis=-1)):
        expected = jnp.exp(x).dtype
        assert f(x).dtype == expected
        np.testing.assert_array_equal(f(x), f(x.astype(expected)))


@pytest.mark.parametrize("axis", [-1, 1, 0, (1, 2), (2, 0), (0, 1, 2)])
def test_cross_entropy_along_axes_is_that_of_optax(axis):
    """Unmasked, with a mask of rows, and with a mask of elements."""
    optax = pytest.importorskip("optax")
    rng = rng_for(axis)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    axes = axis if isinstance(axis, tuple) else (axis % 3,)
    batch = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    labels = rng.integers(0, x.size // np.prod(batch, dtype=int), size=batch)
    masks = None, rng.integers(0, 2, size=batch).astype(bool), x > -1

    def both(of, where):
        def f(x):
            return of.softmax_cross_entropy_with_integer_labels(x, labels, axis=axis, where=where)

        loss, pull = jax.vjp(f, jnp.asarray(x))
        return loss, pull(jnp.ones_like(loss))[0]

    run = jax.jit(lambda: [[both(of, where) for where in masks] for of in (jof, optax)])
    for a, e in zip(*map(jax.tree.leaves, run()), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 3)], ids=str)
def test_masks_that_broadcast_to_the_shape_of_labels(shape):
    """As many classes as rows, so that a mask would also fit the wrong axis."""
    rng = rng_for(shape)
    x, labels = rng.standard_normal((2, 3, 3)), rng.integers(0, 3, (2, 3))
    mask = np.arange(math.prod(shape)).reshape(shape) % 2 == 0
    of_label = np.take_along_axis(x, labels[:, None], 1).squeeze(1)
    losses = np.log(np.exp(x).sum(1)) - of_label
    ours = jof.softmax_cross_entropy_with_integer_labels(x, labels, 1, where=mask)
    np.testing.assert_allclose(ours, np.where(mask, losses, 0), rtol=1e-12)


AXES_OF_NORMS = [1, 0, -1, (0, 1), (1, 2), (2, 1), (0, 2), (0, 1, 2)]


def as_rows(x, axis):
    """`x` with `axis` last, several axes merged into one, and the inverse; in NumPy."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    last = [*range(-len(axes), 0)]
    moved = np.moveaxis(x, axes, last)
    rows = moved.reshape(*moved.shape[: -len(axes)], -1)
    return rows, lambda rows: np.moveaxis(rows.reshape(moved.shape), last, axes)


def exact_norm(xs, axis, center):
    """The results of a norm; `xs` has the operands that are given, by name."""
    total = xs["x"] + xs.get("residual", 0)
    rows, back = as_rows(total, axis)
    y = oracle.normalized(rows, center)[0] * np.ravel(xs.get("scale", 1))
    y = back(y + np.ravel(xs.get("bias", 0)))
    return [y, total] if "residual" in xs else [y]


def exact_gradient_of_norm(xs, cts, axis, center):
    """The cotangents of the operands, by name."""
    rows, back = as_rows(xs["x"] + xs.get("residual", 0), axis)
    dy, _ = as_rows(cts[0], axis)
    dx, dscale, dbias = oracle.norm_vjp(rows, np.ravel(xs.get("scale", 1)), dy, center)
    dx = back(dx) + sum(cts[1:])
    cotangents = {"x": dx, "residual": dx, "scale": dscale, "bias": dbias}
    return {name: cotangents[name].reshape(x.shape) for name, x in xs.items()}


def along(f, xs, ts):
    """The derivative of a NumPy function in the direction `ts`, from differences."""
    step = 1e-4
    at = [f(jax.tree.map(lambda x, t, k=k: x + k * step * t, xs, ts)) for k in (-2, -1, 1, 2)]
    return jax.tree.map(lambda a, b, c, d: (a - 8 * b + 8 * c - d) / (12 * step), *at)


def sizes_along(axis):
    return [(3, 4, 5)[a] for a in (axis if isinstance(axis, tuple) else (axis,))]


def list_of_results(norm):
    """A norm as a function of its operands by name, whose results are a list."""

    def f(xs):
        results = norm(**xs)
        return [*results] if "residual" in xs else [results]

    return f


def assert_trees_close(found, exact, tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for a, e in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1, np.max(np.abs(e))))


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("axis", one_in(2, [(axis,) for axis in AXES_OF_NORMS]), ids=str)
def test_norms_along_axes(axis, center, implementation):
    """Values, and first and second derivatives, with and without each optional operand."""
    options = {"axis": axis, "implementation": implementation}
    f = list_of_results(functools.partial(jof.layer_norm if center else jof.rms_norm, **options))
    vector = sizes_along(axis)
    optional = {"residual": (3, 4, 5), "scale": vector, **({"bias": vector} if center else {})}
    rng = rng_for(axis)
    problems = []
    for chosen in itertools.product((False, True), repeat=len(optional)):
        shapes = {"x": (3, 4, 5), **dict(itertools.compress(optional.items(), chosen))}
        xs, ts = ({k: rng.standard_normal(s) for k, s in shapes.items()} for _ in range(2))
        problems.append((xs, ts, [rng.standard_normal((3, 4, 5)) for _ in range(1 + chosen[0])]))

    def derivatives(xs, ts, cts):
        def gradient(xs):
            return jax.vjp(f, xs)[1](cts)[0]

        def directional(xs):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(xs), ts)))

        value, of_gradient = (jax.jvp(g, (xs,), (ts,)) for g in (f, gradient))
        return *value, *of_gradient, jax.grad(directional)(xs)

    for (xs, ts, cts), found in zip(
        problems, jax.jit(lambda ps: [derivatives(*p) for p in ps])(problems), strict=True
    ):
        value = functools.partial(exact_norm, axis=axis, center=center)
        gradient = functools.partial(exact_gradient_of_norm, cts=cts, axis=axis, center=center)
        second = along(gradient, xs, ts)
        assert_trees_close(found[::2][:2], (value(xs), gradient(xs)), 1e-12)
        assert_trees_close((found[1], *found[3:]), (along(value, xs, ts), second, second), 1e-7)


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (1, 0)], ids=str)
def test_batches_of_norms_along_axes(axis):
    """A batch axis at any place of all arrays, or of some."""
    rng, vector = rng_for(axis), sizes_along(axis)
    shapes = {"x": (3, 4, 5), "residual": (3, 4, 5), "scale": vector, "ct": (3, 4, 5)}
    batches = {name: rng.standard_normal((2, *shape)) for name, shape in shapes.items()}
    norm = functools.partial(jof.layer_norm, axis=axis, implementation="native")
    f = list_of_results(norm)

    def value_and_gradient(arrays):
        xs = {k: x for k, x in arrays.items() if k != "ct"}
        y, pull = jax.vjp(f, xs)
        return y, pull([arrays["ct"], xs["residual"]])[0]

    def exactly(arrays):
        xs = {k: x for k, x in arrays.items() if k != "ct"}
        cts = [arrays["ct"], xs["residual"]]
        return exact_norm(xs, axis, True), exact_gradient_of_norm(xs, cts, axis, True)

    # XLA's algebraic simplifier in jaxlib 0.8.0 makes gradients of scales per example wrong if the
    # batch axes of the residual and of the cotangent differ.
    old = jax.__version_info__ < (0, 9)
    places = [
        place
        for a in range(4)
        for place in (
            {"x": a, "residual": 3 - a, "scale": None, "ct": 0},
            {"x": a, "residual": None, "scale": None, "ct": a},
            {"x": None, "residual": a, "scale": 0, "ct": None},
            {"x": None, "residual": None, "scale": None, "ct": a},
            {"x": a, "residual": a, "scale": len(vector), "ct": a if old else 3 - a},
        )
    ]

    def of_place(place):
        arrays = {
            k: x[0] if place[k] is None else np.moveaxis(x, 0, place[k]) for k, x in batches.items()
        }
        return jax.vmap(value_and_gradient, in_axes=(place,))(arrays)

    for place, found in zip(places, jax.jit(lambda: [*map(of_place, places)])(), strict=True):
        examples = [
            exactly({k: x[0 if place[k] is None else i] for k, x in batches.items()})
            for i in range(2)
        ]
        assert_trees_close(found, jax.tree.map(lambda *xs: np.stack(xs), *examples), 1e-12)


@pytest.mark.parametrize("axis", AXES_OF_NORMS, ids=str)
def test_norms_along_axes_of_symbolic_sizes(axis):
    """Exported once, called with arrays of two sizes."""
    f = list_of_results(functools.partial(jof.layer_norm, axis=axis, implementation="native"))

    def value_and_gradient(xs):
        y, pull = jax.vjp(f, xs)
        return y, pull(y)

    sizes = ["abc"[a] for a in (axis if isinstance(axis, tuple) else (axis,))]
    dims = {"x": "a, b, c", "residual": "a, b, c", "scale": ", ".join(sizes)}
    problems = []
    for shape in ((3, 4, 5), (6, 2, 7)):
        rng, vector = rng_for(axis), [shape["abc".index(size)] for size in sizes]
        shapes = {"x": shape, "residual": shape, "scale": vector}
        problems.append({k: rng.standard_normal(s) for k, s in shapes.items()})
    types = jax.export.symbolic_args_specs((problems[0],), (dims,))
    export = functools.partial(jax.export.export, disabled_checks=jof.export_checks())
    exported = export(jax.jit(value_and_gradient))(*types)
    for xs in problems:
        assert_trees_close(exported.call(xs), value_and_gradient(xs), 1e-12)
    is_merged = axis not in ((2, 1), (0, 2))
    assert ("stablehlo.transpose" not in exported.mlir_module()) == is_merged
    of_gpus = export(jax.jit(value_and_gradient), platforms=["cuda"])(*types).mlir_module()
    assert ("stablehlo.transpose" not in of_gpus) == is_merged


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("axis", AXES_OF_NORMS, ids=str)
def test_transpositions_in_norms(axis, implementation, platform):
    """Axes that are adjacent and in order need none."""
    vector = sizes_along(axis)
    shapes = {"x": (3, 4, 5), "residual": (3, 4, 5), "scale": vector, "bias": vector}
    xs = {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in shapes.items()}
    f = list_of_results(functools.partial(jof.layer_norm, axis=axis, implementation=implementation))

    def gradient(xs):
        y, pull = jax.vjp(f, xs)
        return pull(y)

    are_merged = axis not in ((2, 1), (0, 2))
    for g, calls in ((f, {"jof_norm": 1}), (gradient, {"jof_norm": 1, "jof_norm_vjp": 1})):
        traced = jax.jit(g).trace(xs)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert lowered_targets(text) == (calls if implementation == "native" else {})
        assert ("transpose[" not in str(traced.jaxpr)) == are_merged
        assert ("stablehlo.transpose" not in text) == are_merged


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_batches_of_norms_are_not_moved(axis, platform):
    """Rows may be before the batch axis, too."""
    norm = functools.partial(jof.layer_norm, axis=axis, implementation="native")

    def value_and_gradient(x, dy):
        y, pull = jax.vjp(norm, x)
        return y, *pull(dy)

    for place in range(4):
        shape = [3, 4, 5]
        shape.insert(place, 2)
        x = jax.ShapeDtypeStruct(shape, np.float32)
        batched = jax.jit(jax.vmap(value_and_gradient, place, place))
        text = batched.trace(x, x).lower(lowering_platforms=(platform,)).as_text()
        assert lowered_targets(text) == {"jof_norm": 1, "jof_norm_vjp": 1}
        assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *(((0, 3, 4), (1, 2)), ((3, 2, 0), (0, 1)), ((3, 0, 2), (1, 2)), ((3, 0, 2), (1,))),
        *(((3, 4, 0), (1,)), ((0, 3, 4), (1,))),
    ],
)
def test_norms_along_axes_of_arrays_without_elements(shape, axis, center, implementation):
    norm = functools.partial(
        jof.layer_norm if center else jof.rms_norm, axis=axis, implementation=implementation
    )

    def expected(x, scale):
        centred = x - x.mean(axis, keepdims=True) if center else x
        normalized = centred * jax.lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-6)
        return normalized * jnp.expand_dims(scale, [a for a in range(3) if a not in axis])

    def results(f):
        x, scale = jnp.zeros(shape), jnp.ones([shape[a] for a in axis])
        y, pull = jax.vjp(f, x, scale)
        return y, *pull(y)

    for found, wanted in zip(results(norm), results(expected), strict=True):
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("shape", "axis"), [((300, 40), -1), ((3, 40, 300), 1)])
def test_residual_is_the_norm_of_the_sum(shape, axis, center, dtype):
    rng = rng_for(center, dtype)
    x, r, dy, ds = (rng.standard_normal(shape).astype(dtype) for _ in range(4))
    scale = rng.uniform(0.5, 2, size=40).astype(np.float32)
    norm = functools.partial(jof.layer_norm if center else jof.rms_norm, axis=axis)
    norm = functools.partial(norm, implementation="native")

    def fused(x, r, scale):
        return norm(x, scale, residual=r)

    def apart(x, r, scale):
        return norm(x + r, scale), x + r

    def both(f):
        y, pull = jax.vjp(f, x, r, scale)
        return y, pull((dy, ds))

    ((y, total), found), (expected, wanted) = jax.jit(lambda: (both(fused), both(apart)))()
    # On GPUs a row may be summed in another order.
    assert_close(y, np.float64(expected[0]), dtype, 2, 4 * eps(dtype))
    np.testing.assert_array_equal(np.asarray(total), np.asarray(expected[1]))
    *of_rows, of_scale = [np.float64(g) for g in found]
    *wanted_of_rows, wanted_of_scale = [np.float64(g) for g in wanted]
    np.testing.assert_allclose(of_rows, wanted_of_rows, rtol=8 * eps(dtype), atol=8 * eps(dtype))
    # A float32 sum over rows, of which some are small because their terms cancel.
    bound = 4 * eps("float32") * np.abs(wanted_of_scale).max()
    np.testing.assert_allclose(of_scale, wanted_of_scale, rtol=0, atol=bound)


@pytest.mark.parametrize("implementation", [None, "native"])
def test_results_have_no_weak_type(implementation):
    """A product with bfloat16 is float32, as in JAX."""
    weak = jnp.full((2, 3), 2.0)
    assert jax.typeof(weak).weak_type
    loss = jof.softmax_cross_entropy_with_integer_labels(
        weak, np.arange(2), implementation=implementation
    )
    assert not jax.typeof(loss).weak_type
    for name in ("softmax", "log_softmax", "logsumexp"):
        y = getattr(jof, name)(weak, implementation=implementation)
        expected = getattr(jax.nn, name)(weak)
        assert not jax.typeof(y).weak_type
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)


def test_masked_rows_of_64_bits_keep_their_dtype():
    with jax.enable_x64(True):
        x = jnp.linspace(-1, 1, 12, dtype=jnp.float64).reshape(3, 4)
    mask = np.ones(x.shape, bool)
    for name in ("softmax", "log_softmax", "logsumexp"):
        with jax.enable_x64(False):
            y = getattr(jof, name)(x, where=mask)
        with jax.enable_x64(True):
            expected = getattr(jax.nn, name)(x)
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, expected, rtol=1e-14)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_of_masked_cross_entropy_of_64_bits(wrapped):
    """Outside of x64, in both modes. A label may be masked, or name no class."""
    labels, mask = np.array([0, 3, -1, 4]), np.arange(16).reshape(4, 4) % 5 != 2
    x, t = normals(rng_for(1), (4, 4), "float64"), normals(rng_for(2), (4, 4), "float64")
    powers = np.exp(x) * mask
    named = np.arange(4) == np.where(labels < 0, labels + 4, labels)[:, None]
    expected = powers / powers.sum(1, keepdims=True) - named
    with jax.enable_x64(True):
        x, t, ones = jnp.asarray(x), jnp.asarray(t), jnp.ones(4)

    @wrapped
    def f(x):
        return jof.softmax_cross_entropy_with_integer_labels(x, labels, where=mask)

    with jax.enable_x64(False):
        (dx,) = jax.vjp(f, x)[1](ones)
        _, tangent = jax.jvp(f, (x,), (t,))
        second = jax.vjp(lambda x: jax.jvp(f, (x,), (t,))[1], x)[1](ones)[0]
    assert dx.dtype == tangent.dtype == second.dtype == np.float64
    np.testing.assert_allclose(dx, expected, rtol=1e-13)
    np.testing.assert_allclose(tangent, (expected * t).sum(1), rtol=1e-13)
    p = expected + named
    wanted = p * (t - (p * t).sum(1, keepdims=True))
    np.testing.assert_allclose(second, wanted, rtol=1e-12, atol=1e-15)


def reference_of(f):
    return functools.partial(f, implementation="xla")


def hard_to_linearise(f, *xs):
    """A scalar function with f inside whose derivatives are not constant."""
    weights = jnp.cos(jnp.arange(jnp.size(f(*xs)), dtype=xs[0].dtype))
    return lambda *xs: jnp.sum(weights * jnp.ravel(f(*xs)) ** 3)


DERIVATIVES_OF = {
    "softmax": (jof.softmax, 1),
    "log_softmax": (jof.log_softmax, 1),
    "logsumexp": (functools.partial(jof.logsumexp, axis=-1), 1),
    "cross_entropy": (
        functools.partial(
            jof.softmax_cross_entropy_with_integer_labels, labels=jnp.array([1, 0, 4], jnp.int32)
        ),
        1,
    ),
    "layer_norm": (jof.layer_norm, 3),
    "rms_norm": (jof.rms_norm, 2),
    "group_norm": (
        lambda x, *vectors, **options: jof.group_norm(
            x.reshape(1, 3, 5), 1, *vectors, activation="silu", **options
        ),
        3,
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES_OF)
def test_the_reference_has_the_derivatives_of_its_value(name):
    """test_transforms.py compares second derivatives and those of kernels with jnp's."""
    f, operands = DERIVATIVES_OF[name]
    rng = rng_for(name)
    xs = [rng.standard_normal((3, 5)), *rng.standard_normal((2, 5))][:operands]
    loss = jax.jit(hard_to_linearise(reference_of(f), *xs))
    check_grads(loss, tuple(xs), order=1, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4)


def test_gradients_of_each_example_with_respect_to_scale():
    x, dy = rng_for("per example").standard_normal((2, 4, 3, 5))
    scale = np.ones(5)

    def of_example(x, dy):
        return jax.vjp(lambda scale: jof.layer_norm(x, scale), scale)[1](dy)[0]

    def one_by_one(x, dy):
        return jnp.stack([of_example(*one) for one in zip(x, dy, strict=True)])

    ours, expected = (
        jax.jit(functools.partial(jax.jvp, f))((x, dy), (dy, x))  # and their derivatives
        for f in (jax.vmap(of_example), one_by_one)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "norm",
    [
        jof.layer_norm,
        lambda x, s: jof.layer_norm(x.T, s, axis=0).T,
        lambda x, s: jof.group_norm(x, 1, s),
    ],
)
def test_norms_are_linear_in_scale(norm):
    x, ct = rng_for("linear").standard_normal((2, 4, 5))
    found = jax.linear_transpose(lambda scale: norm(x, scale), np.ones(5))(ct)[0]
    np.testing.assert_allclose(found, (norm(x, np.ones(5)) * ct).sum(0), rtol=1e-12)


def test_a_scale_for_each_example():
    x, scale = rng_for("scales").standard_normal((2, 4, 5))
    expected = np.stack([jof.rms_norm(*one) for one in zip(x, scale, strict=True)])
    np.testing.assert_allclose(jax.vmap(jof.rms_norm)(x, scale), expected, rtol=1e-12)


def calls_in(f, *args) -> list[str]:
    """The custom calls of a compiled program."""
    return sorted(target.removeprefix("jof_") for target in targets(compiled(f, *args)))


def mean_of_losses(h, w, labels, weights=1.0):
    losses = jof.softmax_cross_entropy_with_integer_labels(h @ w, labels, implementation="native")
    return (losses * weights).mean()


H, W = rng_for("h").standard_normal((8, 4)), rng_for("w").standard_normal((4, 600))
LABELS = np.arange(8, dtype=np.int32) * 70
WEIGHTS = np.linspace(0.5, 2, 8)


def in_scan(h, w, labels):
    def step(total, of_rows):
        value, dw = jax.value_and_grad(mean_of_losses, 1)(*of_rows[:1], w, *of_rows[1:])
        return total + value, dw

    return jax.lax.scan(step, 0.0, (h.reshape(2, 4, 4), labels.reshape(2, 4)))


def with_metrics(h, w, labels):
    def loss(w):
        logits = h @ w
        losses = jof.softmax_cross_entropy_with_integer_labels(
            logits, labels, implementation="native"
        )
        return losses.mean(), (jnp.argmax(logits, -1) == labels, losses.max())

    return jax.value_and_grad(loss, has_aux=True)(w)


IN_ONE_PASS = {
    "mean": jax.value_and_grad(mean_of_losses, 1),
    "of two operands": jax.value_and_grad(mean_of_losses, (0, 1)),
    "weights": lambda *args: jax.value_and_grad(mean_of_losses, 1)(*args, jnp.array(WEIGHTS)),
    "weights that are computed later": lambda h, w, labels: jax.value_and_grad(
        lambda w: mean_of_losses(h, w, labels) / jax.lax.cond(h[0, 0] > 9, jnp.sin, jnp.cos, 2.0)
    )(w),
    "checkpoint": jax.value_and_grad(jax.checkpoint(mean_of_losses), 1),
    "scan": in_scan,
    "metrics": with_metrics,
    "logsumexp": jax.value_and_grad(
        lambda h, w, _: (jof.logsumexp(h @ w, -1, implementation="native") ** 1).sum(), 1
    ),
}


@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_a_loss_and_its_gradient_are_one_call(name):
    calls = calls_in(IN_ONE_PASS[name], H, W, LABELS)
    first = ["cross_entropy"] * (name == "checkpoint")
    kernel = "logsumexp" if name == "logsumexp" else "cross_entropy"
    assert calls == [*first, f"{kernel}_with_vjp"]
    found = jax.jit(IN_ONE_PASS[name])(H, W, LABELS)
    with jax.disable_jit():  # each call by itself
        expected = IN_ONE_PASS[name](H, W, LABELS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_call_computes_what_two_do(dtype):
    """Also for rows with infinities and NaN, and for labels that are negative or out of range."""
    for n in (96, 97, 2049, 8192, 8193):
        x = hard_rows(dtype, 2, n).reshape(-1, n)
        x[0, ::2] = x[1] = -np.inf
        x[2, n // 2] = np.inf
        x[3, 1] = np.nan
        labels = np.arange(len(x), dtype=np.int32) * (n // len(x))
        labels[4:7] = -1, n, -n - 1

        def losses_and_gradient(x, labels):
            def loss(x):
                losses = jof.softmax_cross_entropy_with_integer_labels(
                    x, labels, implementation="native"
                )
                return losses.sum(), losses

            (_, losses), dx = jax.value_and_grad(loss, has_aux=True)(x)
            return losses, dx

        assert calls_in(losses_and_gradient, x, labels) == ["cross_entropy_with_vjp"]
        found = jax.jit(losses_and_gradient)(x, labels)
        with jax.disable_jit():
            expected = losses_and_gradient(x, labels)
        losses_are_nan, gradients_are_nan = (np.isnan(np.float64(y)) for y in found)
        assert (losses_are_nan.sum(), gradients_are_nan.any(-1).sum()) == (4, 3)
        small = 4 * eps(jnp.promote_types(dtype, jnp.float32))  # losses are differences
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                np.float64(actual), np.float64(wanted), rtol=2 * eps(dtype), atol=small
            )


def of_long_rows(x, labels, ct):
    """Softmax and related functions, and their gradients."""

    def results(f, ct):
        y, pull = jax.vjp(functools.partial(f, implementation="native"), x)
        return y, *pull(ct)

    of_rows = ct[:, 0]
    return {
        "softmax": results(jof.softmax, ct),
        "log_softmax": results(jof.log_softmax, ct),
        "logsumexp": results(functools.partial(jof.logsumexp, axis=-1), of_rows),
        "cross_entropy": results(
            lambda x, **options: jof.softmax_cross_entropy_with_integer_labels(
                x, labels, **options
            ),
            of_rows,
        ),
    }


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("rows", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_few_very_long_rows(dtype, rows):
    """Rows of a million elements, an odd number: on GPUs they are split into slices."""
    n = 1_000_003
    rng = rng_for("long", rows)
    x = jnp.asarray(normals(rng, (rows, n), "float32") * 3, dtype).at[0, 5].set(20)
    ct = jnp.asarray(normals(rng, (rows, n), "float32"), dtype)
    labels = jnp.arange(rows, dtype=jnp.int32) - 1
    found = jax.jit(of_long_rows)(x, labels, ct)
    wide, ct = np.float64(x), np.float64(ct)
    lse = np.log(np.exp(wide).sum(-1, keepdims=True))
    share = np.exp(wide - lse)
    picked = np.arange(n) == labels[:, None] % n

    # The exact value and gradient of each, and the magnitude of their terms. The gradients of
    # softmax are functions of its rounded result.
    def of_sum(weights, terms):
        return (
            weights * (function(terms).sum(-1, keepdims=True)) for function in (np.asarray, abs)
        )

    y, log_y = (np.float64(found[name][0]) for name in ("softmax", "log_softmax"))
    total, all_of_total = of_sum(y, y * ct)
    log_total, all_of_log_total = of_sum(np.exp(log_y), ct)
    of_rows, size = ct[:, :1], abs(wide).max() + abs(lse).max()
    exact = {
        "softmax": (share, share, y * ct - total, abs(y * ct) + all_of_total),
        "log_softmax": (wide - lse, size, ct - log_total, abs(ct) + all_of_log_total),
        "logsumexp": (lse[:, 0], size, share * of_rows, share * abs(of_rows)),
        "cross_entropy": (
            *(lse[:, 0] - wide[picked], size),
            *((share - picked) * of_rows, (share + picked) * abs(of_rows)),
        ),
    }
    for name, (value, of_value, gradient, of_gradient) in exact.items():
        pairs = zip(found[name], (value, gradient), (of_value, of_gradient), strict=True)
        for actual, wanted, terms in pairs:
            assert actual.dtype == dtype
            error = np.abs(np.float64(actual) - wanted)
            assert np.all(error <= 4 * eps(dtype) * terms + 1e-37), name


def test_which_rows_are_split():
    """Of GPUs only, if rows are long and few, or longer than a cluster of blocks holds."""

    def calls(shape, dtype=jnp.float32, axis=-1, platform="cuda"):
        f = jax.jit(lambda x: jof.logsumexp(x, axis=axis, implementation="native"))
        x = jax.ShapeDtypeStruct(shape, dtype)
        return [*lowered_targets(f.trace(x).lower(lowering_platforms=(platform,)).as_text())]

    split = ["jof_split_logsumexp"]
    assert calls((1, 10**6)) == calls((4, 200_000)) == calls((10**4, 10**6)) == split
    assert calls((8, 10**6), jnp.bfloat16) == calls((10**6, 1), axis=0) == split
    for shape in ((5, 200_000), (1, 100_000), (1, 300_000, 4)):
        assert calls(shape, axis=1) == ["jof_logsumexp"]
    assert calls((1, 10**6), jnp.float64) == calls((1, 10**6), platform="cpu") == ["jof_logsumexp"]
    x = jax.ShapeDtypeStruct((1, 10**6), jnp.float32)
    labels = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = jax.jit(of_long_rows).trace(x, labels, x).lower(lowering_platforms=("cuda",)).as_text()
    names = "softmax", "softmax_vjp", "logsumexp", "cross_entropy"
    maps = {"jof_logsumexp_vjp", "jof_cross_entropy_vjp"}  # which reduce nothing
    assert lowered_targets(text).keys() == {f"jof_split_{name}" for name in names} | maps


def test_cotangents_that_depend_on_the_loss_come_after_it():
    f = jax.value_and_grad(lambda *args: jnp.exp(mean_of_losses(*args)), 1)
    assert calls_in(f, H, W, LABELS) == ["cross_entropy", "cross_entropy_vjp"]
    twice = jax.grad(lambda w: jnp.vdot(f(H, w, LABELS)[1], w))
    assert calls_in(twice, W).count("cross_entropy_with_vjp") == 0


@pytest.mark.parametrize("with_reader", [False, True])
def test_no_logits_are_copied(with_reader):
    """Logits are overwritten in place; with another reader, XLA writes to a separate buffer."""

    def f(w):
        def loss(w):
            logits = H @ w
            losses = jof.softmax_cross_entropy_with_integer_labels(
                logits, LABELS, implementation="native"
            )
            return losses.mean(), jnp.argmax(logits, -1) if with_reader else None

        return jax.value_and_grad(loss, has_aux=True)(w)

    text = jax.jit(f).lower(W).compile().as_text()
    assert "with_vjp" in text
    assert not re.search(r"f64\[8,600\]\S* copy\(", text)
    assert ("output_to_operand_aliasing" in text) != with_reader


@pytest.mark.parametrize("with_reader", [False, True])
@pytest.mark.parametrize("columns", [50257, 2**20])
def test_gradients_of_split_rows_overwrite_logits_too(columns, with_reader):
    def f(x, w):
        logits, pullback = jax.vjp(jnp.matmul, x, w)
        best = jnp.argmax(logits, -1) if with_reader else None
        loss = functools.partial(jof.logsumexp, axis=-1, implementation="native")
        gradient = jax.grad(lambda logits: loss(logits).sum())(logits)
        return pullback(gradient), best

    types = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 8), (8, columns)))
    text = jax.jit(f).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"@jof_logsumexp_(?:with_)?vjp.*", text)
    assert ("output_operand_alias" in call) != with_reader


def test_logits_of_the_caller_are_not_overwritten():
    x = np.float64(H @ W)
    f = jax.jit(jax.grad(lambda x: jof.logsumexp(x, -1, implementation="native").sum()))
    for _ in range(2):
        np.testing.assert_allclose(f(x).sum(-1), 1, rtol=1e-12)
    assert "copy(" not in f.lower(x).compile().as_text()


def test_gradient_of_cross_entropy_overwrites_dead_logits():
    labels = jnp.zeros(64, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def gradient(x):
        return jax.grad(lambda x: jof.softmax_cross_entropy_with_integer_labels(x, labels).sum())(x)

    x = jnp.zeros((64, 512), jnp.float32)
    memory = gradient.lower(x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == x.nbytes
    assert memory.temp_size_in_bytes < x.nbytes // 8


# --- bad input ------------------------------------------------------------------------------------

X = jnp.zeros((3, 4), jnp.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jof.softmax("x"), TypeError, "^softmax: x must be an array"),
        (lambda: jof.softmax(X.astype(complex)), TypeError, "^softmax: x must be float16"),
        (lambda: jof.softmax(X, 2), ValueError, "^softmax: axis must be from -2 to 1"),
        (lambda: jof.log_softmax(X, (0, -2)), ValueError, "^log_softmax: axis must not repeat"),
        (lambda: jof.logsumexp(X, 0.5), TypeError, "^logsumexp: axis must be None, an integer"),
        (
            lambda: jof.logsumexp(X, b=X, implementation="native"),
            TypeError,
            "^logsumexp: there are no kernels for b",
        ),
        (
            lambda: jof.softmax_cross_entropy_with_integer_labels(X, jnp.zeros(3)),
            TypeError,
            "labels must have an integer dtype",
        ),
        (
            lambda: jof.softmax_cross_entropy_with_integer_labels(X, jnp.zeros(4, int)),
            ValueError,
            r"labels must have the shape of logits without axis, \(3,\), got \(4,\)",
        ),
        (
            lambda: jof.softmax_cross_entropy_with_integer_labels(X.astype(int), jnp.zeros(3, int)),
            TypeError,
            "logits must be float16",
        ),
        (lambda: jof.layer_norm(X.astype(int)), TypeError, "^layer_norm: x must be float16"),
        (
            lambda: jof.layer_norm(X, jnp.zeros(3)),
            ValueError,
            r"^layer_norm: scale must have the shape of x along axis, \(4,\), got \(3,\)",
        ),
        (lambda: jof.rms_norm(X, 2.0), TypeError, "^rms_norm: scale must be a jax or NumPy array"),
        (
            lambda: jof.rms_norm(X, epsilon=X),
            TypeError,
            "^rms_norm: epsilon must be a Python or",
        ),
        (
            lambda: jof.rms_norm(X, residual=X.astype(jnp.float16)),
            TypeError,
            "^rms_norm: residual must have the dtype of x, float32, got float16",
        ),
        (
            lambda: jof.rms_norm(X, residual=X[0]),
            ValueError,
            "^rms_norm: residual must have the shape of x",
        ),
        (lambda: jof.rms_norm(X, axis=()), ValueError, "^rms_norm: axis must name an axis"),
        (lambda: jof.group_norm(X[0], 2), ValueError, "^group_norm: x must have shape"),
        (lambda: jof.group_norm(X, 3), ValueError, "^group_norm: num_groups must divide the 4"),
        (lambda: jof.group_norm(X, 2.0), TypeError, "^group_norm: num_groups must be a concrete"),
        (
            lambda: jof.group_norm(X, 2, X),
            ValueError,
            "^group_norm: scale must have the shape of t",
        ),
        (lambda: jof.group_norm(X, 2, activation="relu"), ValueError, "activation must be None or"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def sds(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return sds(*shape, dtype=jnp.int32)


NONE = sds(0, 0, 0)  # an array that is absent
NORM = {"center": True, "epsilon": 1e-6}


@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes", "message"),
    [
        ("softmax", [sds(2, 3)], sds(2, 3), {"axis": 2, "log": False}, "axis must be from 0 to 1"),
        ("softmax", [sds()], sds(), {"axis": 0, "log": False}, "axis must be from 0 to -1"),
        ("softmax", [sds(2, 3)], sds(3, 2), {"axis": 0, "log": False}, "the result must have"),
        ("softmax", [ints(2, 3)], ints(2, 3), {"axis": 0, "log": False}, "element type"),
        ("softmax_vjp", [sds(2, 3), sds(2, 2)], sds(2, 3), {"axis": 0, "log": True}, "dy must"),
        ("logsumexp", [sds(2, 0)], [sds(2), sds(2, 2)], {"axis": 1}, "rows must have elements"),
        ("logsumexp", [sds(2, 3)], [sds(2), sds(2)], {"axis": 1}, "stats must have 2"),
        ("logsumexp", [sds(2, 3)], [sds(2), sds(3, 2)], {"axis": 1}, "stats must have 2"),
        (
            "cross_entropy",
            [sds(2, 3), sds(2, dtype=jnp.uint32)],
            [sds(2), sds(2, 2)],
            {"axis": 1},
            "labels must have 1",
        ),
        (
            "cross_entropy_vjp",
            [sds(2, 3), ints(2), sds(2, 2), sds(2)],
            sds(2, 2),
            {"axis": 1},
            "the result must have",
        ),
        (
            "norm",
            [sds(2, 3), NONE, sds(3), sds(0)],
            [sds(2, 3), NONE, NONE],
            NORM,
            r"x must have shape \(outer, n, .*\), got \(2, 3\)",
        ),
        (
            "norm",
            [sds(2, 3, 1), sds(2, 3, 0), sds(3), sds(0)],
            [sds(2, 3, 1), sds(2, 3, 1), NONE],
            NORM,
            r"residual must have shape \(2, 3, 1\)",
        ),
        (
            "norm",
            [sds(2, 3, 1), NONE, sds(2), sds(0)],
            [sds(2, 3, 1), NONE, sds(2, 1, 3)],
            NORM,
            "scale must have shape",
        ),
        (
            "norm",
            [sds(2, 3, 1), NONE, sds(3), sds(0)],
            [sds(2, 3, 1), NONE, sds(2, 3, 1)],
            NORM,
            r"stats must have shape \(2, 1, 3\)",
        ),
        (
            "norm_vjp",
            [sds(2, 3, 1), sds(2, 1, 3), sds(2, 3, 1), NONE, sds(3)],
            [sds(2, 3, 1), sds(3), sds(3), sds(4, 1, 3)],
            {"center": True},
            "scratch must have shape",
        ),
        (
            "norm_vjp",
            [sds(2, 3, 1), sds(2, 1, 3), sds(2, 3, 1), sds(3, 2, 1), sds(3)],
            [sds(2, 3, 1), sds(3), sds(3), sds(4, 2, 3)],
            {"center": True},
            r"dsum must have shape \(2, 3, 1\)",
        ),
    ],
)
def test_handlers_check_what_they_are_given(target, operands, results, attributes, message):
    call = jax.ffi.ffi_call(f"jof_{target}", results)
    xs = [np.zeros(x.shape, x.dtype) for x in operands]
    attributes = {k: np.int64(v) if k == "axis" else v for k, v in attributes.items()}
    with pytest.raises(Exception, match=f"jof_{target}: .*{message}"):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs, **attributes))(*xs))


# --- flax's modules -------------------------------------------------------------------------------

MODULES = [
    ({}, {}),
    ({"dtype": jnp.bfloat16}, {}),
    ({"use_scale": False, "epsilon": 1e-3}, {}),
    ({"reduction_axes": (-1, 1), "feature_axes": (-1, 1)}, {}),
    ({"param_dtype": jnp.bfloat16}, {}),
    ({"feature_axes": (1, 2)}, {}),  # flax's own
    ({}, {"mask": np.arange(5) < 3}),  # flax's own
]
MODULES = [(name, *call) for name in ("LayerNorm", "RMSNorm") for call in MODULES] + [
    ("GroupNorm", {"num_groups": 1}, {}),
    ("GroupNorm", {"num_groups": None, "group_size": 1, "dtype": jnp.bfloat16}, {}),
    ("GroupNorm", {"num_groups": 5, "reduction_axes": (1, 2)}, {}),  # flax's own
]


NNX_CALLS = [
    ({}, {}),
    ({"dtype": jnp.bfloat16}, {}),
    ({"use_scale": False, "epsilon": 1e-3}, {}),
    ({"reduction_axes": (1, -1), "feature_axes": (-1, 1)}, {}),
    ({}, {"mask": np.arange(5) < 3}),  # flax's own
]


@pytest.mark.parametrize(
    ("name", "arguments", "call", "dtype"),
    [(*module, ("bfloat16", "float32")[k % 2]) for k, module in enumerate(MODULES)],
)
def test_modules_are_those_of_flax(name, arguments, call, dtype):
    nn = pytest.importorskip("flax.linen")
    from jax_oneflow_ops import linen

    x = rng_for(name).standard_normal((3, 4, 5)).astype(dtype)
    theirs, ours = (getattr(module, name)(**arguments) for module in (nn, linen))
    assert isinstance(ours, getattr(nn, name))
    variables = jax.eval_shape(theirs.init, jax.random.key(0), x)
    mine = jax.jit(ours.init)(jax.random.key(0), x)
    assert jax.tree.structure(mine) == jax.tree.structure(variables)
    variables = jax.tree.map(lambda v: v + jnp.arange(v.size, dtype=v.dtype).reshape(v.shape), mine)

    def loss(module, variables, x):
        return jnp.sum(jnp.float32(module.apply(variables, x, **call)) ** 3)

    @functools.partial(jax.jit, static_argnums=0)
    def both(m, variables, x):
        return m.apply(variables, x, **call), jax.grad(loss, (1, 2))(m, variables, x)

    results = [both(m, variables, x) for m in (ours, theirs)]
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.dtype == e.dtype
        largest = np.max(np.abs(np.float64(e)), initial=0)
        dtypes = {str(jnp.dtype(x)) for x in (a.dtype, dtype, arguments.get("dtype", dtype))}
        coarse = "bfloat16" in dtypes
        tolerance = 0.05 if coarse else 1e-4
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": jnp.complex64}, {"param_dtype": jnp.complex64}, {"epsilon": np.full(4, 0.1)}],
)
def test_modules_leave_other_arguments_to_flax(arguments):
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    from jax_oneflow_ops import linen
    from jax_oneflow_ops import nnx as norms

    x = rng_for("modules").standard_normal((3, 4)).astype(np.float32)
    for name in ("LayerNorm", "RMSNorm"):
        (y, _), (expected, _) = (
            getattr(m, name)(**arguments).init_with_output(jax.random.key(0), x)
            for m in (linen, nn)
        )
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)
        y, expected = (getattr(m, name)(4, **arguments, rngs=nnx.Rngs(0))(x) for m in (norms, nnx))
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("mask", [None, np.ones((3, 4), bool)])
def test_modules_know_their_activations(mask):
    nnx = pytest.importorskip("flax.nnx")
    from jax_oneflow_ops import linen
    from jax_oneflow_ops import nnx as norms

    x = jnp.ones((3, 4))
    other = {"num_groups": 2, "activation": "relu"}
    with pytest.raises(ValueError, match="activation must be None or 'silu', got 'relu'"):
        linen.GroupNorm(**other).init_with_output(jax.random.key(0), x, mask=mask)
    with pytest.raises(ValueError, match="activation must be None or 'silu', got 'relu'"):
        norms.GroupNorm(4, **other, rngs=nnx.Rngs(0))(x, mask=mask)


@pytest.mark.parametrize("center", [True, False])
def test_gradients_of_a_bias_need_a_norm_with_a_mean(center):
    """The native call says so; no function of this package asks for them."""
    jof.rms_norm(jnp.ones((2, 4)), implementation="native")  # registers the targets
    x, stats = np.ones((2, 4, 1), "float32"), np.ones((2, 1, 3), "float32")
    absent, scale = np.zeros((0, 0, 0), "float32"), np.zeros(0, "float32")
    sizes = (2, 4, 1), (4,), (4,), (1, 2, 4)  # of dx, dscale, dbias and the scratch
    types = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    call = jax.jit(functools.partial(jax.ffi.ffi_call("jof_norm_vjp", types), center=center))
    if center:
        assert len(call(x, stats, x, absent, scale)) == len(types)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="dbias needs center"):
            jax.block_until_ready(call(x, stats, x, absent, scale))


def test_no_result_has_a_weak_type():
    x = jnp.broadcast_to(jnp.asarray(0.5), (2, 4))
    assert jax.typeof(x).weak_type
    for f in (
        jof.softmax,
        jof.logsumexp,
        jof.layer_norm,
        jof.rms_norm,
        lambda x: jof.rms_norm(x, residual=x),
        lambda x: jof.group_norm(x, 2),
    ):
        for y in jax.tree.leaves((f(x), jax.jit(f)(x))):
            assert not jax.typeof(y).weak_type


def test_epsilon_of_numpy():
    x = jnp.arange(12.0).reshape(3, 4)
    for epsilon in (np.float32(0.5), np.float64(0.5)):
        np.testing.assert_array_equal(
            jof.layer_norm(x, epsilon=epsilon), jof.layer_norm(x, epsilon=0.5)
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "arguments", "call"),
    [
        *[(name, *case) for name in ("LayerNorm", "RMSNorm") for case in NNX_CALLS],
        ("GroupNorm", {"num_groups": 5, "dtype": jnp.bfloat16}, {}),
        ("GroupNorm", {"num_groups": 1, "reduction_axes": (1, 2)}, {}),  # flax's own
    ],
)
def test_modules_are_those_of_nnx(name, arguments, call):
    nnx = pytest.importorskip("flax.nnx")
    from jax_oneflow_ops import nnx as norms

    x = rng_for(name).standard_normal((3, 4, 5)).astype(np.float32)
    features = 20 if "feature_axes" in arguments else 5
    theirs, ours = (
        getattr(module, name)(features, **arguments, rngs=nnx.Rngs(0)) for module in (nnx, norms)
    )
    state = jax.tree.map(lambda v: v + jnp.arange(v.size, dtype=v.dtype), nnx.state(theirs))
    nnx.update(theirs, state)
    nnx.update(ours, state)  # as a checkpoint does

    @nnx.jit
    def both(module, x):
        def loss(module, x):
            return jnp.sum(jnp.float32(module(x, **call)) ** 3)

        return module(x, **call), nnx.grad(loss, argnums=(0, 1))(module, x)

    is_own = "mask" in call or ("reduction_axes" in arguments and features == 5)
    text = jax.jit(lambda x: ours(x, **call)).lower(x).as_text()
    assert ("jof_" in text) != is_own
    results = [jax.tree.leaves(both(module, x)) for module in (ours, theirs)]
    for a, e in zip(*results, strict=True):
        assert a.dtype == e.dtype
        largest = np.max(np.abs(np.float64(e)), initial=0)
        tolerance = 0.05 if "dtype" in arguments else 1e-4
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm"])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_modules_take_the_epsilons_that_flax_takes(library, name):
    """NumPy's scalars and jax's, which `jit` may trace."""
    flax = pytest.importorskip(f"flax.{library}")
    x = rng_for(name).standard_normal((3, 4, 5)).astype(np.float32)
    groups = {"num_groups": 1} if name == "GroupNorm" else {}

    def of(module, epsilon):
        options = {"epsilon": epsilon, **groups}
        if library == "nnx":
            return getattr(module, name)(5, rngs=flax.Rngs(0), **options)(x)
        return getattr(module, name)(**options).init_with_output(jax.random.key(0), x)[0]

    ours = importlib.import_module(f"jax_oneflow_ops.{library}")
    expected = of(flax, 0.25)
    assert "jof_" in jax.jit(lambda: of(ours, np.float32(0.25))).lower().as_text()
    for epsilon in (np.float32(0.25), jnp.float32(0.25), np.array(0.25)):
        np.testing.assert_allclose(of(ours, epsilon), expected, rtol=0, atol=1e-6)
    traced = jax.jit(lambda epsilon: of(ours, epsilon))(0.25)
    np.testing.assert_allclose(traced, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [0, -1, 2])
def test_flax_raises_the_errors_of_group_sizes(size):
    nn = pytest.importorskip("flax.linen")
    from jax_oneflow_ops import linen

    for module in (nn, linen):
        with pytest.raises((ValueError, ZeroDivisionError)):
            module.GroupNorm(None, group_size=size).init(jax.random.key(0), jnp.ones((3, 5)))


def test_activation_of_a_group_norm_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    from jax_oneflow_ops import nnx as norms

    x = rng_for("silu").standard_normal((3, 4, 5)).astype(np.float32)
    for options in ({}, {"reduction_axes": (1, 2)}):
        with_silu = norms.GroupNorm(5, 5, activation="silu", rngs=nnx.Rngs(0), **options)
        plain = nnx.GroupNorm(5, 5, rngs=nnx.Rngs(0))
        np.testing.assert_allclose(with_silu(x), jax.nn.silu(plain(x)), rtol=0, atol=1e-5)


def test_what_the_choice_for_a_call_depends_on():
    for shape, axis, alignment in (
        ((300, 64), 1, "whole packs"),
        ((300, 66), 1, "edges"),
        ((300, 65), 1, "odd edges"),
        ((300, 64, 1), 1, "whole packs"),
        ((300, 64, 2), 1, "strided"),
    ):
        call = _rows._call("norm", "norm_vjp", 4, jax.ShapeDtypeStruct(shape, jnp.float16), axis)
        assert call.kind == ("rows", "norm gradient", alignment, "norm")
        sizes = shape[axis], math.prod(shape[axis + 1 :])
        assert (call.bytes, call.sizes) == (4 * 2 * math.prod(shape), sizes)


@pytest.mark.parametrize("function", ["softmax", "layer_norm"])
def test_the_choice_depends_on_the_axis(function):
    x = jax.ShapeDtypeStruct((6, 5, 4, 3), jnp.float16)
    for axis, alignment, sizes in ((-1, "odd edges", (3, 1)), (1, "strided", (5, 12))):
        f = functools.partial(getattr(jof, function), axis=axis)
        for g in (f, lambda x, f=f: jax.vjp(f, x)[1](x)):
            decisions = jof.policy(g, x)
            assert len(decisions) > 0
            for decision in decisions:
                assert decision.call.kind[2:] == (alignment, function)
                assert decision.call.sizes == sizes


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_strict_promotion_allows_what_is_wider_inside(implementation):
    """Vectors of norms may be float32, too, and have fewer dimensions, as in flax."""
    ids, vector, chosen = jnp.arange(4), jnp.ones(8), {"implementation": implementation}
    functions = [
        lambda x: jof.layer_norm(x, vector, vector, **chosen),
        lambda x: jof.rms_norm(x, vector, **chosen),
        lambda x: jof.group_norm(x, 2, vector, **chosen),
        jof.logsumexp,
        lambda x: jof.softmax_cross_entropy_with_integer_labels(x, ids),
        lambda x: jof.segment_mean(x, ids, 3) + jof.segment_softmax(x, ids, 3)[:3],
        lambda x: jof.attention_sum(x[:, :2], x.reshape(4, 2, 4), ids, ids, num_segments=4),
    ]
    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for f in functions:
            g = jax.grad(lambda x, f=f: f(x).astype(jnp.float32).sum())
            for h in (f, g):
                for call in (h, lambda x, h=h: jax.jvp(h, (x,), (x,))[1]):
                    lowered = jax.jit(call).lower(x)
                    assert lowered.out_info.dtype == x.dtype


@pytest.mark.parametrize(
    ("shape", "parts"),
    [("4, 8", 11), ("9000, 4096", 272), ("9000, 50257", 83), ("4, 128256", 11), ("r, n", 272)],
)
def test_how_many_parts_sums_over_rows_have(shape, parts):
    """The number of partial sums on GPUs; long rows need little scratch memory."""

    def loss(x, scale, bias):
        return jof.layer_norm(x, scale, bias, implementation="native").sum()

    rows, n = jax.export.symbolic_shape(shape)
    xs = [jax.ShapeDtypeStruct(dims, np.float32) for dims in ((rows, n), (n,), (n,))]
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    checks = jof.export_checks()
    exported = jax.export.export(gradient, platforms=["cuda"], disabled_checks=checks)(*xs)
    width = n if isinstance(n, int) else "?"
    assert f"tensor<{parts}x2x{width}xf32>" in exported.mlir_module()


@pytest.mark.parametrize(
    ("shape", "parts"),
    [("r, 64, c", 1584), ("r, 1048576, 8", 16), ("r, n, 8", 272), ("2048, 64, 64", 1584)],
)
def test_how_many_parts_sums_over_strided_rows_have(shape, parts):
    def loss(x, scale):
        return jof.rms_norm(x, scale, axis=1, implementation="native").sum()

    dims = jax.export.symbolic_shape(shape)
    xs = [jax.ShapeDtypeStruct(dims, np.float32), jax.ShapeDtypeStruct(dims[1:2], np.float32)]
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    checks = jof.export_checks()
    exported = jax.export.export(gradient, platforms=["cuda"], disabled_checks=checks)(*xs)
    width = dims[1] if isinstance(dims[1], int) else "?"
    assert f"tensor<{parts}x1x{width}xf32>" in exported.mlir_module()


@pytest.mark.parametrize(
    ("rows", "on_gpus", "on_cpus"),
    [(7, 7, 1), (64, 16, 1), (4096, 256, 64), (1 << 20, 1584, 128)],
)
def test_few_strided_rows_have_few_parts(rows, on_gpus, on_cpus):
    assert _primitive.parts_of_strided_sums("cuda", rows, 100, 2) == on_gpus
    assert _primitive.parts_of_strided_sums("cpu", rows, 100, 2) == on_cpus


@pytest.mark.parametrize("axis", [1, 0])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("columns", "calls"), [(2**30 - 1, 1), (2**30, 0)])
def test_norms_of_rows_that_gpus_do_not_count_are_jnp(columns, calls, gradient, axis):
    def norm(x, scale):
        return jof.rms_norm(x, scale, axis=axis, implementation="native")

    def f(x, scale):
        return jax.vjp(norm, x, scale)[1](x) if gradient else norm(x, scale)

    shapes = (2, columns) if axis == 1 else (columns, 2), (columns,)
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    lowered = jax.jit(f).trace(x, scale).lower(lowering_platforms=("cuda",))
    found = lowered_targets(lowered.as_text())
    assert sum(n for name, n in found.items() if name.startswith("jof_norm")) == calls * (
        1 + gradient
    )


WITH_STATISTICS = {
    "logsumexp": ("0x0", "6x2", lambda x, **options: jof.logsumexp(x, -1, **options)),
    "cross_entropy": (
        "0x0",
        "6x2",
        lambda x, **options: jof.softmax_cross_entropy_with_integer_labels(
            x, np.zeros(6, np.int32), **options
        ),
    ),
    "norm": ("0x0x0", "6x1x3", jof.rms_norm),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_statistics_are_stored_only_for_a_gradient(name, platform):
    """Of short rows, they are a large part of the bytes written."""
    absent, stored, function = WITH_STATISTICS[name]

    def value(x):
        return function(x, implementation="native")

    def square(x):  # the cotangent depends on the value, so these are two calls
        return jnp.square(value(x)).sum()

    def last_result(f):
        x = jnp.ones((6, 5), np.float32)
        lowered = jax.jit(f).trace(x).lower(lowering_platforms=(platform,))
        return re.search(rf"@jof_{name}\(.*-> \(.*(tensor<.*?>)\)", lowered.as_text())[1]

    assert last_result(value) == f"tensor<{absent}xf32>"
    assert last_result(jax.value_and_grad(square)) == f"tensor<{stored}xf32>"
