"""`accelerate` on unchanged programs: what it swaps, where it applies, and that results agree."""

import functools
import inspect
import os
import re
import subprocess
import sys
import threading
import unittest.mock
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from jax_oneflow_ops import _compat, _emit, _native, _policy
from jax_oneflow_ops._accelerate import common, rules, scatters, tune
from jax_oneflow_ops._accelerate.report import Row
from tests.arrays import INEXACT, INTEGERS, rng_for
from tests.test_lowering import accelerated, compiled, lowered_targets, native_backend, targets

pytestmark = native_backend


NATIVE = ("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")


@pytest.fixture
def several_indices_too(monkeypatch):
    """Swaps, on GPUs, also the sums by several indices that are left to XLA by default."""
    if jax.default_backend() == "gpu":
        monkeypatch.setenv(*NATIVE)


def sums(f, *args, platform=None, **jit) -> int:
    """The number of scatter kernel calls in a lowered program."""
    platforms = None if platform is None else (platform,)
    traced = jax.jit(f, **jit).trace(*args)
    found = lowered_targets(traced.lower(lowering_platforms=platforms).as_text())
    return sum(n for name, n in found.items() if name.startswith("jof_scatter_"))


def integers(*shape, low=-40, high=40, dtype=np.int32) -> np.ndarray:
    return rng_for(shape, low, high).integers(low, high, shape).astype(dtype)


# --- every form of .at[...].add, against NumPy ----------------------------------------------------

FIRST, SECOND = integers(40, low=-12, high=16), integers(40, low=-9, high=10)
SQUARE = integers(6, 5, low=-7, high=7)
ALL = slice(None)
FORMS = {
    "leading": (FIRST,),
    "of any rank": (SQUARE,),
    "middle": (ALL, SECOND),
    "last": (ALL, ALL, SECOND % 5),
    "two": (FIRST, SECOND),
    "two last": (ALL, SECOND, FIRST),
    "three": (FIRST, SECOND, SECOND),
    "apart": (FIRST, ALL, SECOND),
    "broadcast": (FIRST[:, None], SECOND[None, :7]),
    "unsigned": (FIRST.astype(np.uint8),),
    "narrow": (ALL, SECOND.astype(np.int8)),
    "part of a window": (slice(2, 5), SECOND),
    "part of a row": (FIRST, slice(1, 4)),
    "in a row and a window": (ALL, SECOND, slice(3, 5)),
    "one and several": (3, SECOND),
}


def of_all_dimensions(read, index, x):
    """The index extended to all dimensions, with `read(ids, size)` in place of ids."""
    index = (*index, *(ALL,) * (x.ndim - len(index)))
    return tuple(
        slice(*i.indices(n)) if isinstance(i, slice) else read(np.asarray(i), n)
        for i, n in zip(index, x.shape, strict=True)
    )


def as_numpy_reads(index, x, mode):
    """An index into an array padded by one row per dimension, which takes dropped updates."""

    def read(i, n):
        i = np.where(i < 0, i.astype(int) + n, i)
        return np.clip(i, 0, n - 1) if mode == "clip" else np.where((i < 0) | (i >= n), n, i)

    return of_all_dimensions(read, index, x)


def numpy_added(x, index, u, mode, reducer="add"):
    """The expected result, by numpy.add.at or the ufunc of another reducer."""
    padded = np.pad(x, [(0, 1)] * x.ndim)
    ufunc = {"add": np.add, "max": np.maximum, "min": np.minimum, "multiply": np.multiply}[reducer]
    ufunc.at(padded, as_numpy_reads(index, x, mode), u)
    return padded[tuple(map(slice, x.shape))]


def numpy_set(x, index, u, mode):
    """The expected result of a set by NumPy, which keeps the last update of each element."""
    padded = np.pad(x, [(0, 1)] * x.ndim)
    padded[as_numpy_reads(index, x, mode)] = u
    return padded[tuple(map(slice, x.shape))]


@pytest.mark.parametrize(
    ("mode", "reducer"),
    [("drop", "add"), ("clip", "add"), ("drop", "max"), ("clip", "min"), ("drop", "multiply")],
)
def test_every_form_is_one_call_and_does_what_numpy_does(mode, reducer, several_indices_too):
    x = integers(11, 8, 6)
    us = {}
    for name, index in FORMS.items():
        us[name] = integers(*x[of_all_dimensions(np.mod, index, x)].shape)

    @jax.jit
    @jof.accelerate
    def reduced(x, us):
        return {n: getattr(x.at[FORMS[n]], reducer)(us[n], mode=mode) for n in FORMS}

    assert sums(reduced, x, us) == len(FORMS)
    for name, y in reduced(x, us).items():
        expected = numpy_added(x, FORMS[name], us[name], mode, reducer)
        np.testing.assert_array_equal(y, expected, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_extremes_are_those_of_xla(dtype):
    """NaNs, infinities, empty segments, and gradients where several values tie for the maximum."""
    with jax.enable_x64(True):
        values = integers(40, 3, low=-3, high=4).astype(dtype)
        if dtype != "int8":
            values[7, 0], values[8, 1], values[9, 2] = np.nan, np.inf, -np.inf

        def f(x):
            most = jax.ops.segment_max(x, FIRST % 9, 11)
            return most, jax.ops.segment_min(x, FIRST % 9, 11)

        def both(x):
            if dtype == "int8":
                return f(x)
            return f(x), jax.jvp(f, (x,), (jnp.sin(x),))[1]

        assert sums(jof.accelerate(f), values) == 2
        ours, xla = (jax.jit(g)(values) for g in (jof.accelerate(both), both))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
            np.testing.assert_allclose(*(np.float64(c) for c in (a, b)), rtol=2**-7)


def test_every_dtype():
    ids = integers(30, low=-5, high=9)
    x = {dtype: integers(7, 3, low=0, high=9).astype(dtype) for dtype in (*INTEGERS, *INEXACT)}
    u = {dtype: integers(30, 3, low=0, high=4).astype(dtype) for dtype in x}

    @jof.accelerate
    def added(x, u):
        return {d: (x[d].at[ids].add(u[d]), x[d].at[ids].subtract(2 * u[d])) for d in x}

    with jax.enable_x64(True):
        assert sums(added, x, u) == 2 * len(x)
        results = jax.jit(added)(x, u)
    for dtype, (more, less) in results.items():
        for y, factor in ((more, 1), (less, -2)):
            start, updates = (a[dtype].real.astype(np.float64) for a in (x, u))
            expected = numpy_added(start, (ids,), factor * updates, "drop")
            if dtype in INTEGERS:
                expected = expected.astype(np.int64)
            np.testing.assert_array_equal(y, expected.astype(dtype), dtype)


# --- scatters with any dimension numbers, against XLA ---------------------------------------------


def any_scatter(seed):
    """A random scatter: operand, indices, updates, dimension numbers and mode."""
    rng = rng_for("scatter", seed)
    shape = [int(n) for n in rng.integers(1, 6, rng.integers(1, 6))]
    kinds = rng.choice(["batching", "scattered", "inserted", "window"], len(shape))
    kinds[rng.integers(len(shape))] = "inserted"
    of = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in ("batching", "inserted")}
    columns = rng.permutation([i for i, k in enumerate(kinds) if k in ("scattered", "inserted")])
    if seed % 3 == 0 and len(columns) > 1:
        columns = columns[1:]  # no index for the dropped dimension: its windows start at 0
    # The dimensions of the indices, with the batch dimensions at random places.
    sizes = [int(n) for n in rng.integers(2, 5, rng.integers(1, 3))]
    places = rng.permutation(len(sizes) + len(of["batching"]))[: len(of["batching"])]
    batch = {int(place): shape[dim] for place, dim in zip(places, of["batching"], strict=True)}
    rest = iter(sizes)
    index = [batch[i] if i in batch else next(rest) for i in range(len(sizes) + len(batch))]
    windows = [
        int(rng.integers(1, n + 1)) if rng.random() < 0.5 else n
        for n, kind in zip(shape, kinds, strict=True)
        if kind in ("scattered", "window")
    ]
    rank = len(index) + len(windows)
    at = sorted(int(i) for i in rng.permutation(rank)[: len(windows)])
    of_index, of_window = iter(index), iter(windows)
    updates = [next(of_window if i in at else of_index) for i in range(rank)]
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(at),
        inserted_window_dims=tuple(of["inserted"]),
        scatter_dims_to_operand_dims=tuple(map(int, columns)),
        operand_batching_dims=tuple(of["batching"]),
        scatter_indices_batching_dims=tuple(map(int, places)),
    )
    ids = rng.integers(-2, 7, (*index, len(columns))).astype(rng.choice(["int8", "int32"]))
    modes = lax.GatherScatterMode
    mode = modes.CLIP if seed % 2 else modes.FILL_OR_DROP
    return integers(*shape), ids, integers(*updates), numbers, mode


@pytest.mark.exhaustive
def test_any_scatter_is_that_of_xla(several_indices_too):
    cases = [any_scatter(seed) for seed in range(60)]

    def added(arrays):
        return [
            lax.scatter_add(*args, numbers, mode=mode)
            for args, (*_, numbers, mode) in zip(arrays, cases, strict=True)
        ]

    arrays = [case[:3] for case in cases]
    alone = sum(case[1][..., 0].size == 1 for case in cases)
    assert sums(jof.accelerate(added), arrays) == len(cases) - alone
    ours, xla = (jax.jit(f)(arrays) for f in (jof.accelerate(added), added))
    for case, a, b in zip(cases, ours, xla, strict=True):
        np.testing.assert_array_equal(a, b, repr(case[3:]))


def test_an_inserted_dimension_without_an_index_is_not_repeated():
    """Updates go to row 0 of the result only."""
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    ids, updates = np.array([[1], [3]]), np.array([10.0, 20.0], np.float32)

    def added(ids, updates):
        return lax.scatter_add(jnp.zeros((2, 5), jnp.float32), ids, updates, numbers)

    expected = np.zeros((2, 5))
    expected[0, [1, 3]] = updates
    np.testing.assert_array_equal(jax.jit(jof.accelerate(added))(ids, updates), expected)


# --- the extent of the scope ----------------------------------------------------------------------

TABLE, IDS = np.linspace(-1, 1, 33, dtype=np.float32).reshape(11, 3), FIRST[:20] % 11
PARTS = IDS.reshape(4, 5)


def adds(table, ids):
    return jnp.asarray(table).at[ids].add(1.0)


def lookup(table, ids):
    return jnp.sum(jnp.sin(table[ids]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def with_jvp(table, ids):
    return lookup(table, ids)


@with_jvp.defjvp
def _with_jvp(ids, tables, tangents):
    return jax.jvp(lambda table: lookup(table, ids), tables, tangents)


@jax.custom_vjp
def with_vjp(table, ids):
    return lookup(table, ids)


def _with_vjp(table, ids):
    return jax.vjp(lambda table: lookup(table, ids), table)


with_vjp.defvjp(_with_vjp, lambda pull, ct: (*pull(ct), None))


def scanned(table, ids):
    return lax.scan(lambda c, i: (c.at[i].add(1.0), None), table, PARTS)[0]


def looked_up_in_a_scan(table, ids):
    total, _ = lax.scan(lambda c, i: (c + jnp.sin(table[i]).sum(0), None), table[0], PARTS)
    return jnp.sum(jnp.sin(total))


def looped(table, ids):
    def body(carry):
        return carry[0].at[ids].add(1.0), carry[1] + 1

    return lax.while_loop(lambda carry: carry[1] < 3, body, (table, 0))[0]


def branched(table, ids):
    branches = [lambda x, step=step: x.at[ids].add(step) for step in (1.0, 2.0)]
    return lax.cond(ids[0] > 4, *branches, table)


def hessian_vector_product(table, ids):
    return jax.jvp(lambda table: jax.grad(lookup)(table, ids), (table,), (table,))[1]


def mapped(table, ids):
    return jnp.sum(jax.vmap(lookup, (None, 0))(table, PARTS))


def taken_along_an_axis(table, ids):
    return jnp.sum(jnp.sin(jnp.take_along_axis(table, PARTS[:, :3], 0)))


def resized(table, ids):
    return jnp.sum(jnp.sin(jax.image.resize(table, (22, 6), "nearest")))


# Functions of (table, ids), each with its number of scatter kernel calls.
PROGRAMS = {
    "grad": (jax.grad(lookup), 1),
    "grad of jit": (jax.grad(jax.jit(lookup)), 1),
    "hessian-vector product": (hessian_vector_product, 1),
    "grad of grad": (jax.grad(lambda x, i: jnp.sum(jax.grad(lookup)(x, i) ** 2)), 2),
    "jvp": (lambda x, i: jax.jvp(lambda x: x.at[i].add(x[i]), (x,), (2 * x,)), 2),
    "vmap": (lambda x, i: jax.vmap(adds)(jnp.stack([x] * 4), PARTS), 1),
    "vmap of grad": (lambda x, i: jax.vmap(jax.grad(lookup), (None, 0))(x, PARTS), 1),
    "grad of vmap": (jax.grad(mapped), 1),
    "scan": (scanned, 1),
    "grad of scan": (jax.grad(looked_up_in_a_scan), 1),
    "while": (looped, 1),
    "cond": (branched, 2),
    "checkpoint": (jax.grad(jax.checkpoint(lookup)), 1),
    "custom_jvp": (jax.grad(with_jvp), 1),
    "custom_vjp": (jax.grad(with_vjp), 1),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i[:11], 5), 1),
    "bincount": (lambda x, i: jnp.bincount(i, length=11), 1),
    "histogram": (lambda x, i: jnp.histogram(x, bins=4)[0], 1),
    "take_along_axis": (jax.grad(taken_along_an_axis), 1),
    "resize": (jax.grad(resized), 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_sums_are_swapped_wherever_they_come_from(name, platform, monkeypatch):
    f, count = PROGRAMS[name]
    if (name, platform) == ("take_along_axis", "cuda"):  # by several indices
        monkeypatch.setenv(*NATIVE)
    if platform not in jof.implementations():
        pytest.skip(f"built without the module for {platform}")
    assert sums(jof.accelerate(f), TABLE, IDS, platform=platform) == count
    assert sums(f, TABLE, IDS, platform=platform) == 0


COLUMNS = "jof_scatter_add_columns"


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "float16"])
@pytest.mark.parametrize(
    ("shape", "axis", "count"),
    [((3, 30, 1400), 1, 7), ((30, 4097), 0, 50), ((2, 600, 33, 70), 1, 100)],
)
def test_lookups_along_a_middle_axis_sum_columns(shape, axis, count, dtype, mode):
    rng = rng_for(shape, dtype, mode)
    picked = (*shape[:axis], count, *shape[axis + 1 :])
    least, most = (0, shape[axis]) if mode == "promise_in_bounds" else (-40, shape[axis] + 9)
    ids = rng.integers(least, most, picked).astype(np.int32)
    ct = rng.integers(-3, 4, picked).astype(dtype)

    def gradient(ids, ct):
        zeros = jnp.zeros(shape, ct.dtype)
        pick = functools.partial(jnp.take_along_axis, indices=ids, axis=axis, mode=mode)
        return jax.linear_transpose(pick, zeros)(ct)[0]

    with jax.enable_x64(dtype == "float64"):
        accelerated = jax.jit(jof.accelerate(gradient))
        if "cuda" in jof.implementations():
            lowered = accelerated.trace(ids, ct).lower(lowering_platforms=("cuda",)).as_text()
            assert lowered_targets(lowered) == {COLUMNS: 1}
            ordered = jax.jit(jof.accelerate(gradient, deterministic=True))
            lowered = ordered.trace(ids, ct).lower(lowering_platforms=("cuda",)).as_text()
            assert COLUMNS not in lowered
        found = accelerated(ids, ct)
    n = shape[axis]
    at = np.where(ids < 0, ids + n, ids)
    at = at.clip(0, n - 1) if mode == "clip" else at
    index = list(np.indices(picked, sparse=True))
    index[axis] = at.clip(0, n - 1)
    expected = np.zeros(shape)
    np.add.at(expected, tuple(index), np.where((at >= 0) & (at < n), np.float64(ct), 0))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.float64(found), expected)


@pytest.mark.parametrize(
    ("shape", "axis", "why"),
    [
        ((3, 30, 1000), 1, "too few columns"),
        ((32768, 64, 8), 1, "few columns in a problem"),
        ((2, 2400, 4096), 1, "too many rows"),
        ((64, 4096), 1, "the last axis"),
    ],
)
def test_which_lookups_do_not_sum_columns(shape, axis, why):
    x = jax.ShapeDtypeStruct(shape, "float32")
    ids = jax.ShapeDtypeStruct(shape, "int32")

    def gradient(ids, ct):
        zeros = jnp.zeros(shape, ct.dtype)
        return jax.linear_transpose(lambda x: jnp.take_along_axis(x, ids, axis), zeros)(ct)[0]

    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for cuda")
    traced = jax.jit(jof.accelerate(gradient)).trace(ids, x)
    assert COLUMNS not in traced.lower(lowering_platforms=("cuda",)).as_text(), why


TILES = "jof_scatter_add_tiles"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize(
    ("dtype", "batch", "updates", "columns"),
    [
        ("bfloat16", 2051, 4100, 600),
        ("float16", 1030, 8192, 3000),
        ("bfloat16", 12, 700_001, 2048),
        ("float32", 1030, 8200, 4096),
        ("float32", 5, 1_700_003, 1300),
    ],
)
def test_many_problems_with_shared_ids_sum_tiles(dtype, batch, updates, columns, mode):
    rng = rng_for(dtype, batch, mode)
    least, most = (0, columns) if mode == "promise_in_bounds" else (-2 * columns, 2 * columns)
    ids = rng.integers(least, most, updates).astype(np.int32)
    ids[rng.random(updates) < 0.3] = columns // 2  # a hot row
    x, start = (rng.integers(-1, 2, (batch, n)).astype(dtype) for n in (updates, columns))

    def add(start, ids, x):
        return start.at[:, ids].add(x, mode=mode)

    mapped = jax.vmap(lambda start, ids, x: start.at[ids].add(x, mode=mode), (0, None, 0))
    for f in (add, mapped):
        accelerated = jax.jit(jof.accelerate(f))
        if "cuda" in jof.implementations():
            lowered = accelerated.trace(start, ids, x).lower(lowering_platforms=("cuda",))
            assert lowered_targets(lowered.as_text()) == {TILES: 1}
            ordered = jax.jit(jof.accelerate(f, deterministic=True))
            lowered = ordered.trace(start, ids, x).lower(lowering_platforms=("cuda",))
            assert TILES not in lowered.as_text()
    at = np.where(ids < 0, ids + columns, ids)
    at = at.clip(0, columns - 1) if mode == "clip" else at
    inside = (at >= 0) & (at < columns)
    order = np.argsort(at[inside], kind="stable")
    rows, begins = np.unique(at[inside][order], return_index=True)
    expected = start.astype(np.float32)
    expected[:, rows] += np.add.reduceat(x[:, inside][:, order].astype(np.float32), begins, 1)
    for f in (add, mapped) if jax.default_backend() == "gpu" else (add,):
        found = jax.jit(jof.accelerate(f))(start, ids, x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), expected.astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "batch", "updates", "columns", "why"),
    [
        ("float32", 64, 2**18, 1280, "private tables for each lane"),
        ("bfloat16", 64, 2**18, 511, "private tables for each lane"),
        ("float32", 64, 2**18, 4097, "too many rows"),
        ("float32", 64, 2**16, 4096, "too few updates"),
        ("float32", 16384, 999, 4096, "tiles are mostly empty"),
        ("float32", 3, 2**22, 4096, "too few problems"),
        ("int32", 64, 2**18, 4096, "additions are no loops"),
        ("float64", 64, 2**18, 4096, "no kernel"),
    ],
)
def test_which_problems_with_shared_ids_do_not_sum_tiles(dtype, batch, updates, columns, why):
    x, start = (jax.ShapeDtypeStruct((batch, n), dtype) for n in (updates, columns))
    ids = jax.ShapeDtypeStruct((updates,), "int32")
    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for cuda")
    with jax.enable_x64(dtype == "float64"):
        add = jax.jit(jof.accelerate(lambda start, ids, x: start.at[:, ids].add(x)))
        lowered = add.trace(start, ids, x).lower(lowering_platforms=("cuda",)).as_text()
    assert TILES not in lowered, why
    assert "jof_scatter_add" in lowered


def test_equal_updates_are_not_stored_for_tiles():
    start = jax.ShapeDtypeStruct((64, 4096), "float32")
    ids = jax.ShapeDtypeStruct((2**20,), "int32")
    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for cuda")
    add = jax.jit(jof.accelerate(lambda start, ids: start.at[:, ids].add(1.0)))
    lowered = add.trace(start, ids).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @(jof_\w+)\(.*: \((.*)\) ->", lowered)
    assert call[0] == "jof_scatter_add_private"
    assert "tensor<64x1x1xf32>" in call[1]


GRID = "jof_sum_grid"


# Lookups along an axis and the next: (shape, axis, rows looked up, whether the last comes first).
GRIDS = {
    "channels last": ((3, 40, 50, 16), 1, (90, 77), False),
    "channels first": ((5, 7, 40, 50), 2, (80, 100), True),
    "first axes": ((70, 90, 12), 0, (33, 200), False),
    "odd rows": ((3, 61, 67, 7), 1, (64, 128), True),
    "few updates": ((9, 100, 90, 2), 1, (5, 3), False),
}
OF_GRIDS = ("bfloat16", "float64", "int32", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("name", "ids", "dtype"),
    [
        (name, ids, dtype)
        for n, name in enumerate(GRIDS)
        for k, ids in enumerate(("spread", "hot", "out of range"))
        for dtype in ("float32", OF_GRIDS[(n + k) % 5])
    ],
)
def test_lookups_along_two_axes_are_summed_in_one_pass(name, ids, dtype):
    shape, axis, sizes, last_first = GRIDS[name]
    rng = rng_for(name, ids, dtype)
    indices = []
    for n, count in zip(shape[axis:], sizes, strict=False):
        low, high = (-2 * n, 2 * n) if ids == "out of range" else (-n, n)
        i = rng.integers(low, high, count)
        if ids == "hot":
            i[rng.random(count) < 0.6] = n // 2
        indices.append(i.astype(np.int32))
    i, j = indices
    picked = (*shape[:axis], *sizes, *shape[axis + 2 :])
    ct = rng.integers(-2, 3, picked).astype(dtype)

    def look_up(x, i, j):
        rows, columns = (ALL,) * axis + (i,), (ALL,) * (axis + 1) + (j,)
        for at in (columns, rows) if last_first else (rows, columns):
            x = x.at[at].get(mode="fill", fill_value=0)
        return x

    def gradient(i, j, ct):
        zeros = jnp.zeros(shape, ct.dtype)
        return jax.linear_transpose(lambda x: look_up(x, i, j), zeros)(ct)[0]

    with jax.enable_x64(dtype == "float64"):
        accelerated = jax.jit(jof.accelerate(gradient))
        if "cuda" in jof.implementations():
            lowered = accelerated.trace(i, j, ct).lower(lowering_platforms=("cuda",)).as_text()
            assert lowered_targets(lowered)[GRID] == 1
        if jax.default_backend() == "gpu":
            assert targets(compiled(accelerated, i, j, ct)) == [GRID]
        found = accelerated(i, j, ct)
    expected = np.zeros(shape, np.float64)
    a, b = (np.where(k < 0, k + n, k) for k, n in zip((i, j), shape[axis:], strict=False))
    good_a, good_b = (a >= 0) & (a < shape[axis]), (b >= 0) & (b < shape[axis + 1])
    kept = ct.take(np.flatnonzero(good_a), axis).take(np.flatnonzero(good_b), axis + 1)
    at = (ALL,) * axis + (a[good_a][:, None], b[good_b])
    np.add.at(expected, at, kept.astype(expected.dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found).astype(expected.dtype), expected)


HALF = np.arange(128) // 2


def in_columns(ct, ids=HALF):
    return jnp.zeros((8, 128, 64, 8), ct.dtype).at[:, :, ids].add(ct)


def in_rows(first, ids=HALF):
    return jnp.zeros((8, 64, 64, 8), first.dtype).at[:, ids].add(first)


def two_columns_of_indices(ct):
    """The second column points into a dimension that windows span."""
    numbers = lax.ScatterDimensionNumbers((0, 2, 3), (1,), (1, 2))
    ids, zeros = jnp.stack([HALF, HALF], 1), jnp.zeros((8, 64, 64, 8), ct.dtype)
    return lax.scatter_add(zeros, ids, in_columns(ct), numbers, mode="clip")


def added_between(ct, start=5.0, function=lax.add):
    first = lax.reduce(in_columns(ct), ct.dtype.type(start), function, ())
    return in_rows(first)


def read_before(ct):
    first = in_columns(ct)
    return jnp.sin(first), in_rows(first)


# Programs of two sums, and the number of them that one kernel computes.
TWO_SUMS = {
    "both": (lambda ct: in_rows(in_columns(ct)), 1),
    "first read later": (lambda ct: (in_rows(first := in_columns(ct)), first + 1), 1),
    "first read before": (read_before, 0),
    "equal updates": (lambda ct: in_rows(in_columns(jnp.full_like(ct, ct[0, 0, 0, 0]))), 1),
    "equal ids": (lambda ct: in_rows(in_columns(ct, jnp.full(128, 7)), jnp.full(128, 3)), 1),
    "two columns of indices": (two_columns_of_indices, 0),
    "a start between": (added_between, 0),
    "squares between": (lambda ct: added_between(ct, 0.0, lambda a, b: a + b * b), 0),
}


def test_small_integers_are_summed_along_one_axis_at_a_time():
    ct = integers(8, 128, 128, 8, dtype=np.int8)
    add = jax.jit(jof.accelerate(lambda ct: in_rows(in_columns(ct))))
    if "cuda" in jof.implementations():
        assert GRID not in add.trace(ct).lower(lowering_platforms=("cuda",)).as_text()
    expected = ct.reshape(8, 64, 2, 64, 2, 8).sum((2, 4), dtype=np.int8)
    np.testing.assert_array_equal(add(ct), expected)


@pytest.mark.parametrize("name", TWO_SUMS)
def test_two_sums_are_those_of_xla(name):
    program, count = TWO_SUMS[name]
    ct = integers(8, 128, 128, 8).astype(np.float32)
    if "cuda" in jof.implementations():
        lowered = jax.jit(jof.accelerate(program)).trace(ct).lower(lowering_platforms=("cuda",))
        assert lowered_targets(lowered.as_text())[GRID] == count
    ours, xla = jax.jit(jof.accelerate(program))(ct), jax.jit(program)(ct)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_resize_gradient_is_one_row_of_an_explanation():
    def gradient(ct):
        resize = functools.partial(jax.image.resize, shape=ct.shape, method="nearest")
        return jax.linear_transpose(resize, ct[:, ::2, ::2])(ct)[0]

    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for cuda")
    report = jof.explain(
        gradient, jax.ShapeDtypeStruct((8, 256, 256, 64), "float32"), platform="cuda"
    )
    (row,) = (row for row in report.rows if row.operation == "scatter-add")
    assert row.swapped
    assert "one pass" in row.reason
    assert row.bytes == 8 * 256 * 256 * 64 * 5


def test_additions_at_pairs_that_xla_makes_by_the_same_atomics_stay_its(monkeypatch):
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", raising=False)
    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for cuda")
    ids = jax.ShapeDtypeStruct((2**20,), "int32")

    def swapped(dtype, side=512):
        grid, x = (jax.ShapeDtypeStruct((*s, 8), dtype) for s in ((side, side), (2**20,)))
        add = jof.explain(lambda t, i, j, x: t.at[i, j].add(x), grid, ids, ids, x, platform="cuda")
        (row,) = add.rows
        return row.swapped

    monkeypatch.setattr(_compat, "adds_floats_by_loops", lambda: False)
    assert not swapped("float32")
    assert swapped("bfloat16")  # XLA's are loops
    monkeypatch.setattr(_compat, "adds_floats_by_loops", lambda: True)
    assert swapped("float32")


FUSED = "XLA computes the updates where it adds them, by atomics"


@pytest.fixture
def with_atomics(monkeypatch):
    """Chooses as for a GPU without measurements, whose XLA adds float32 by atomics."""
    monkeypatch.delenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", raising=False)
    monkeypatch.setattr(_native, "available", lambda platform: True)
    monkeypatch.setattr(_compat, "adds_floats_by_loops", lambda: False)


def is_left(f, *args, **how) -> bool:
    """Whether XLA computes the updates of the program's scatter where it adds them, or swaps it."""
    report = jof.explain(jof.accelerate(f, **how), *args, platform="cuda")
    (row,) = (row for row in report.rows if row.operation == "scatter-add")
    assert row.swapped != (row.reason == FUSED)
    return not row.swapped


COMPUTED = {
    "product": lambda x: x * x,
    "square": jnp.square,
    "quotient": lambda x: 1 / x,
    "negative": jnp.negative,
    "where": lambda x: jnp.where(x > 0, x, 0),
    "cast": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "exponential": jnp.exp,
    "logistic": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "in a function": jax.nn.silu,  # which jax.jit made
    "gathered": lambda x: x[:, ::-1][jnp.arange(len(x)) // 2],
    "reshaped": lambda x: (x * x).reshape(x.shape[::-1]).reshape(x.shape),
    "transposed": lambda x: jnp.tanh(x.reshape(x.shape[::-1])).T,
    "slice": lambda x: jnp.concatenate([x, x], 1)[:, : x.shape[1]],
}
STORED = {
    "operand": lambda x: x,
    "matrix product": lambda x: x @ jnp.ones((x.shape[1],) * 2, x.dtype),
    "sum": lambda x: x + 1,
}


def added(of_updates, width=64, into=2**14):
    return lambda x, ids: jnp.zeros((into, width), x.dtype).at[ids].add(of_updates(x))


def updates_of(rows=2**18, width=64, dtype="float32"):
    types = ((rows, width), dtype), ((rows,), "int32")
    return [jax.ShapeDtypeStruct(*t) for t in types]


@pytest.mark.usefixtures("with_atomics")
@pytest.mark.parametrize("name", [*COMPUTED, *STORED])
def test_updates_that_xla_computes_where_it_adds_them(name):
    f = (COMPUTED | STORED)[name]
    report = jof.explain(added(f), *updates_of(), platform="cuda")
    (row,) = (row for row in report.rows if row.operation == "scatter-add")
    if name == "gathered":  # the rule of gathered rows
        assert row.reason == "XLA fuses the gather with its sum, by atomics"
        return
    assert (row.reason == FUSED) == (name in COMPUTED)
    assert row.swapped == (name in STORED)


@pytest.mark.usefixtures("with_atomics")
def test_updates_that_kernels_add_although_xla_could_compute_them(monkeypatch):
    def product(x):
        return x * x

    assert is_left(added(product, into=2**8), *updates_of(2**10))
    assert is_left(added(product, into=2**20), *updates_of(2**20))  # larger than the cache
    assert not is_left(added(product), *updates_of(dtype="bfloat16"))  # XLA's are loops
    assert not is_left(added(product, 32), *updates_of(width=32))
    assert not is_left(added(product, into=2), *updates_of())  # many updates for each row
    assert not is_left(added(product), *updates_of(), deterministic=True)
    for read in (lambda y: y + 1, lambda y: y @ jnp.ones((64, 64))):

        def again(x, ids, read=read):
            y = x * x
            other = read(y)
            return added(lambda y: y.reshape(64, -1).reshape(-1, 64))(y, ids), other

        assert not is_left(again, *updates_of())
    monkeypatch.setattr(_compat, "adds_floats_by_loops", lambda: True)
    assert not is_left(added(product), *updates_of())


@pytest.mark.usefixtures("with_atomics")
def test_updates_over_explicit_axes_that_xla_computes_where_it_adds_them():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert is_left(added(lambda x: x * x), *updates_of())
        assert is_left(added(COMPUTED["reshaped"]), *updates_of())
        assert not is_left(added(lambda x: x), *updates_of())


@pytest.mark.usefixtures("with_atomics")
@pytest.mark.parametrize("tracebacks", [False, True])
def test_cotangents_that_xla_adds_up_where_it_scatters_them(tracebacks):
    table, (_, ids) = jax.ShapeDtypeStruct((2**14, 64), "float32"), updates_of()
    w = jax.ShapeDtypeStruct((64, 64), "float32")

    def gradient(of_rows):
        return jax.grad(lambda table, w, ids: of_rows(table[ids], w).sum())

    def my_add_any(x):
        return x + 1

    before = jax.config.jax_include_full_tracebacks_in_locations
    jax.config.update("jax_include_full_tracebacks_in_locations", tracebacks)
    try:
        assert is_left(gradient(lambda x, w: jnp.sin(x) * (x @ w)), table, w, ids)
        joined = gradient(lambda x, w: jnp.concatenate([x, x], 1) @ jnp.concatenate([w, w]))
        assert is_left(joined, table, w, ids)
        assert not is_left(gradient(lambda x, w: x @ w), table, w, ids)
        assert not is_left(added(my_add_any), *updates_of())
    finally:
        jax.config.update("jax_include_full_tracebacks_in_locations", before)


def test_programs_compute_the_same():
    def results(table, ids):
        return {name: f(table, ids) for name, (f, _) in PROGRAMS.items()}

    actual = jax.jit(jof.accelerate(results))(TABLE, IDS)
    with jax.enable_x64(True):
        expected = jax.jit(results)(TABLE.astype(np.float64), IDS)
    paths = jax.tree.leaves_with_path(actual)
    for (path, a), e in zip(paths, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2**-19, atol=2**-19, err_msg=str(path))


def test_the_innermost_choice_counts():
    def nested(table, ids):
        with jof.accelerate(False):
            table = adds(table, ids)
            with jof.accelerate():
                table = adds(table, ids)
        return adds(table, ids)

    assert sums(nested, TABLE, IDS) == 1
    assert sums(jof.accelerate(nested), TABLE, IDS) == 2
    assert sums(jof.accelerate(jof.accelerate(adds)), TABLE, IDS) == 1
    assert sums(jof.accelerate(False)(jof.accelerate(adds)), TABLE, IDS) == 1
    assert sums(jof.accelerate(jof.accelerate(False)(adds)), TABLE, IDS) == 0


def test_gradients_follow_the_functions_that_they_are_of():
    assert sums(jax.grad(jof.accelerate(lookup)), TABLE, IDS) == 1
    assert sums(jof.accelerate(jax.grad(jof.accelerate(False)(lookup))), TABLE, IDS) == 0


def test_every_way_to_write_it():
    f = jax.jit(adds)
    before = f(TABLE, IDS)  # compiled before
    scope = jof.accelerate()
    with scope, scope:
        assert targets(f.lower(TABLE, IDS).compile().as_text())
        np.testing.assert_array_equal(f(TABLE, IDS), before)
    for g in (jof.accelerate(f), jof.accelerate()(f), scope(f), jof.accelerate(fun=f)):
        assert targets(g.lower(TABLE, IDS).compile().as_text())
        assert lowered_targets(g.trace(TABLE, IDS).lower().as_text())
        assert g.eval_shape(TABLE, IDS).shape == TABLE.shape
        assert g.__name__ == "adds"
    assert not targets(f.lower(TABLE, IDS).compile().as_text())
    with pytest.raises(ZeroDivisionError), jof.accelerate():
        raise ZeroDivisionError
    assert sums(adds, TABLE, IDS) == 0

    class Model:
        @jof.accelerate
        def __call__(self, table, ids):
            return adds(table, ids)

    assert sums(Model(), TABLE, IDS) == 1


def test_another_thread_is_outside():
    found = []
    with jof.accelerate():
        thread = threading.Thread(target=lambda: found.append(sums(adds, TABLE, IDS)))
        thread.start()
        thread.join()
        assert sums(adds, TABLE, IDS) == 1
    assert found == [0]


def test_one_scope_serves_many_threads():
    scope, found, barrier = jof.accelerate(), [], threading.Barrier(4)

    def run():
        with scope:
            barrier.wait()
            found.append(sums(adds, TABLE, IDS))
            barrier.wait()
        found.append(sums(adds, TABLE, IDS))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4 + [0] * 4


# --- operations that are not swapped --------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x.at[3].add(1.0),
        lambda x, i: x.at[i[0], 1:].add(1.0),
        lambda x, i: x.at[i[:0]].add(1.0),
        lambda x, i: x.astype(jnp.float8_e4m3fn).at[i].add(1),
        lambda x, i: x.at[i].set(1.0),
        lambda x, i: x.at[i].apply(jnp.sin),
        lambda x, i: jof.segment_sum(x, i[:11], 5, implementation="xla"),
        lambda x, i: jax.grad(lambda x: jof.embedding_lookup(x, i, implementation="xla").sum())(x),
    ],
    ids=["one row", "one window", "nothing", "8 bits", "set", "apply", "xla", "grad of xla"],
)
def test_left_to_xla(f):
    assert sums(jof.accelerate(f), TABLE, IDS) == 0


def test_what_old_releases_compile_only_without_metadata():
    x = np.arange(64.0, dtype=np.float32)
    lowered = jax.jit(jof.accelerate(lambda x: lax.approx_max_k(x, 3))).lower(x)
    assert not re.search("@ApproxTopK.*jof_accelerate", lowered.as_text())
    np.testing.assert_array_equal(lowered.compile()(x)[1], [63, 62, 61])


def test_left_to_xla_where_kernels_would_move_data_or_cannot_run():
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:  # differs in jax 0.12
        with compute_on("device_host"):
            rows = jof.explain(adds, TABLE, IDS).rows
        # jax 0.8 lowers it elsewhere, so there may be no rows.
        assert {row.reason for row in rows} <= {"jax.experimental.compute_on says where it runs"}
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices (the CPU has 8 virtual ones)")
    two = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    specs = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    f = jax.shard_map(adds, mesh=two, axis_names={"x"}, **specs)
    (row,) = jof.explain(f, TABLE, IDS).rows
    assert not row.swapped
    assert "shard_map" in row.reason


def test_without_jit():
    with jof.accelerate():
        x = jnp.asarray(TABLE).at[IDS].add(1.0)
    np.testing.assert_array_equal(x, adds(TABLE, IDS))


def test_functions_of_this_package_are_as_outside():
    f = lambda x, i: jof.scatter_add(x, i, jof.embedding_lookup(x, i))  # noqa: E731
    inside, outside = (jax.jit(g).lower(TABLE, IDS).as_text() for g in (jof.accelerate(f), f))
    assert lowered_targets(inside) == lowered_targets(outside)


def test_the_environment_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    assert sums(jof.accelerate(adds), TABLE, IDS) == 0
    search = jax.jit(jof.accelerate(lambda x: jnp.searchsorted(jnp.arange(9), x)))
    assert "stablehlo.while" in search.lower(IDS).as_text()


OUTSIDE = """
import jax, jax.numpy as jnp, numpy as np
import jax_oneflow_ops as jof

@jax.jit
def f(x, i):
    return x.at[i].add(1.0), jax.ops.segment_max(x, i, 3), jax.grad(lambda x: x[:, i].sum())(x)

args = np.ones((4, 4), np.complex64).real, np.arange(4)
before = f.lower(*args)
with jof.accelerate():
    assert f.lower(*args).as_text() != before.as_text()
    inside = f(*args)
jax.clear_caches()
assert f.lower(*args).as_text() == before.as_text()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.clear_caches()
with jof.accelerate():
    again = f(*args)
for a, b in zip(inside, again):
    np.testing.assert_array_equal(a, b)
print("/jax/compilation_cache/cache_hits" in hits)
"""


def test_outside_nothing_changes_and_the_persistent_cache_knows_the_inside(tmp_path):
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", OUTSIDE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "True\n", result.stderr


# --- operands -------------------------------------------------------------------------------------


def operands_of_sums(text: str) -> list[str]:
    """The operand type of each scatter-add call."""
    return re.findall(r"custom_call @jof_scatter_add_\w+\(.* : \(tensor<([^>]*)>", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8", "uint32"])
def test_sums_into_zeros_are_given_no_operand(dtype):
    fresh = [lambda x: jnp.zeros((9, 4), dtype), lambda x: jnp.zeros(36, dtype).reshape(9, 4)]
    others = [lambda x: x, lambda x: jnp.ones((9, 4), dtype)]
    for start, expected in [*((f, "0x0x0x") for f in fresh), *((f, "9x4x") for f in others)]:
        f = jof.accelerate(lambda i, x, start=start: start(x).at[i].add(1))
        text = jax.jit(f).lower(IDS, jnp.zeros((9, 4), dtype)).as_text()
        assert [o.startswith(expected) for o in operands_of_sums(text)] == [True]


def test_kernels_read_ids_as_they_were_written():
    """Negative ids, too: otherwise XLA first writes the ids that jnp normalizes to memory."""
    ids, u = integers(5, 8, low=-14, high=16), np.linspace(0, 1, 120, dtype=np.float32)
    table = np.asarray(rng_for((11, 3)).standard_normal((11, 3)), np.float32)

    def added(mode):
        return lambda ids: jnp.asarray(table).at[ids].add(u.reshape(5, 8, 3), mode=mode)

    def counted(ids):
        return jnp.bincount(ids.ravel(), length=9)

    def weighed(ids):
        return jnp.bincount(ids.ravel(), u[:40], length=9)

    def shifted(ids):  # looks like jnp's wrapping of ids, but is not: it adds 10, not 11
        return jnp.zeros(11).at[jnp.where(ids < 0, ids + 10, ids)].add(1.0, mode="drop")

    def clipped(ids):  # like bincount, but ids that are too large go to the last row
        return jnp.zeros(9).at[jnp.clip(ids.ravel(), 0)].add(u[:40], mode="clip")

    @jax.jit
    def several(ids, low):
        narrow = ids.astype("int8").astype("int32")
        return jnp.maximum(ids, low), narrow, jnp.maximum(ids, narrow)

    def other(number):  # one result of `several`, of which all results are used
        def f(ids):
            found = several(ids.ravel(), 0)
            return jnp.zeros(9).at[found[number]].add(u[:40]) + sum(found).sum()

        return f

    read = {added("drop"): {"wrap"}, added("clip"): {"wrap", "clip"}, shifted: {"wrap"}}
    read |= {clipped: {"clip"}, other(0): {"clip"}, other(1): {"wrap"}, other(2): {"wrap"}}
    for f, how in (read | {counted: {"clip"}, weighed: {"clip"}}).items():
        accelerated = jax.jit(jof.accelerate(f))
        (call,) = re.findall(r"custom_call @jof_scatter_add.*", accelerated.lower(ids).as_text())
        assert {*re.findall(r"(wrap|clip) = true", call)} == how
        np.testing.assert_allclose(accelerated(ids), jax.jit(f)(ids), rtol=1e-5)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_single_updates_are_selected(mode):
    """The gradient of a cross entropy writes no zeros first. Other operands are added to."""
    x = np.asarray(rng_for((2, 3, 5, 4)).standard_normal((2, 3, 5, 4)), np.float32)
    outside = mode != "promise_in_bounds"
    ids = np.array([[0, 4, 2], [1, -3 * outside, 4 + outside]])
    labels = integers(2, 1, 5, 4, low=-outside, high=3 + outside)

    def of_pixels(x):
        return jnp.take_along_axis(x, labels, axis=1, mode=mode)

    def of_rows(x):
        return jax.vmap(jax.vmap(lambda x, i: x.at[i].get(mode=mode)))(x, ids)

    def subtracted(x):
        into = jax.vmap(jax.vmap(lambda x, i, u: x.at[i].subtract(u, mode=mode)))
        return into(jnp.zeros_like(x), ids, x[:, :, 1])

    gradients = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))) for f in (of_pixels, of_rows)]
    for f in (*gradients, subtracted):
        accelerated = jax.jit(jof.accelerate(f))
        text = accelerated.lower(x).as_text()
        assert "stablehlo.scatter" not in text
        assert not lowered_targets(text)
        np.testing.assert_array_equal(accelerated(x), jax.jit(f)(x))
    into = jax.vmap(jax.vmap(lambda x, i, u: x.at[i].add(u, mode=mode)))
    assert sums(jof.accelerate(into), x, ids, x[:, :, 0]) == 1


def test_updates_that_are_one_number_are_not_written_to_memory(monkeypatch):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "native")

    def count(ids, x):
        several = jax.vmap(lambda ids, start: start.at[ids].add(2.0))(ids, x)
        least = jnp.zeros(5, ids.dtype).at[ids[0]].min(ids[0, 0] - 9)
        return jnp.bincount(ids.ravel(), length=5), several, least

    # Enough ids for private copies on GPUs; the last ones do not fill a pack.
    ids = integers(3, 2**18 + 5, low=-2, high=6)
    x = integers(3, 5).astype(np.float32)
    ours = jax.jit(jof.accelerate(count)).lower(ids, x)
    calls = re.findall(r"@jof_scatter_\w+_private.*: \((.*)\) ->", ours.as_text())
    updates = {call.split(", ")[1] for call in calls}
    assert len(calls) == 3
    assert updates == {"tensor<1x1x1xi32>", "tensor<3x1x1xf32>"}
    for a, b in zip(ours.compile()(ids, x), jax.jit(count)(ids, x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_binary_searches_are_unrolled():
    """Results are the same for sorted and unsorted tables, signed zeros, NaNs and infinities."""
    x = np.array([-2, -0.0, 0, 1.5, 3, np.nan, np.inf, -np.inf], np.float32)
    tables = [x[:3], np.sort(x), x, np.arange(-3, 14, dtype=np.float32)]

    def search(tables, x):
        found = [jnp.searchsorted(t, x, side=side) for t in tables for side in ("left", "right")]
        return found, jnp.histogram(x, 5, (-2, 3))

    ours, plain = (jax.jit(f).lower(tables, x) for f in (jof.accelerate(search), search))
    assert plain.as_text().count("stablehlo.while") > ours.as_text().count("stablehlo.while") == 0
    jax.tree.map(
        np.testing.assert_array_equal, ours.compile()(tables, x), plain.compile()(tables, x)
    )

    def batched(table, x):
        return jax.vmap(jnp.searchsorted)(table, x)

    arrays = np.sort(np.ones((3, 9), np.float32)), np.ones((3, 4), np.float32)
    assert "while" not in jax.jit(jof.accelerate(batched)).lower(*arrays).as_text()


def test_other_loops_of_two_integers_stay_loops():
    """XLA would compile their unrolled steps slowly."""
    table, x = np.arange(1000), np.arange(64)

    def halved(table, x, low, high, dtype):
        def step(ends, _):
            low, high = ends
            middle = (low + high) // 2
            is_less = jnp.asarray(table)[middle] < x
            return (jnp.where(is_less, middle, low), jnp.where(is_less, high, middle)), None

        return lax.scan(step, (low.astype(dtype), high.astype(dtype)), None, length=12)[0]

    def signed(table, x):
        return halved(table, x, jnp.zeros_like(x), jnp.full_like(x, 1000), "int32")

    def from_arguments(table, x):
        return halved(table, x, x, x + 900, "uint32")

    def counted(table, x):
        return lax.scan(lambda ends, _: ((ends[0] + 1, ends[1]), None), (x, x), None, 5)[0]

    for loop in (signed, from_arguments, counted):
        accelerated = jax.jit(jof.accelerate(loop))
        assert "while" in accelerated.lower(table, x).as_text(), loop
        jax.tree.map(np.testing.assert_array_equal, accelerated(table, x), loop(table, x))


def test_what_xla_runs_faster_on_cpus_is_left_to_it():
    x, i = jnp.zeros((128, 128)), np.zeros(2**14, np.int32)
    for f in (
        lambda x, i: x.at[i, i].add(1.0),
        lambda x, i: jax.ops.segment_max(jnp.sin(i + 1.0), i, 128),
        lambda x, i: jax.ops.segment_max(jnp.ones((*i.shape, 15)), i, 128),
    ):
        counts = [sums(jof.accelerate(f), x, ids, platform="cpu") for ids in (i, i[:9])]
        assert counts == [0, 1]
        (row,) = jof.explain(f, x, i, platform="cpu").rows
        assert "XLA" in row.reason
    for row in (np.ones((2**14, 16), np.float32), jnp.ones((2**14, 2), jnp.bfloat16)):
        wide = jof.accelerate(lambda x, i: jax.ops.segment_max(x, i, 128))
        assert sums(wide, row, i, platform="cpu") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_xla_runs_faster_in_16_bits_is_summed_in_float32(monkeypatch, dtype):
    """The sums are integers: float32 is exact in any order, and `dtype` rounds them once."""
    decision = _policy.Decision(_policy.Call((), 0), "xla", "as measured")
    monkeypatch.setattr(_policy, "choose", lambda *_: decision)

    def f(x, ids, u):
        return x.at[:, ids].subtract(u.T[:5], mode="clip"), x.at[ids].add(u)

    x, u = (jnp.asarray(integers(*shape), dtype) for shape in ((5, 7), (90, 7)))
    ids = integers(90, low=-9, high=9)
    for step in (f, jax.vmap(f, (0, None, 1), 1)):
        args = (x, ids, u) if step is f else (jnp.stack([x, -x]), ids, jnp.stack([u, u], 1))
        ours = jax.jit(jof.accelerate(step)).lower(*args)
        assert len(re.findall(r": tensor<f32>, %\w+: tensor<f32>\)", ours.as_text())) == 2
        assert ours.as_text().count("func.func") == 1  # no extra function is traced
        wide = jax.jit(step)(args[0].astype("f4"), ids, args[2].astype("f4"))
        for found, expected in zip(ours.compile()(*args), wide, strict=True):
            np.testing.assert_array_equal(found, expected.astype(dtype))
    specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": (P(None, "x"), P("x"))}
    local = jax.shard_map(f, mesh=mesh("Auto"), **specs)
    jax.jit(jof.accelerate(local)).lower(x, ids, u).compile()


def test_negative_zeros_are_no_zeros():
    f = jax.jit(jof.accelerate(lambda i: jnp.full((3,), -0.0).at[i].add(-0.0)))
    assert np.signbit(f(np.array([0, 0]))).all()


@pytest.mark.parametrize("name", ["leading", "two", "middle", "apart"])
def test_a_donated_operand_is_not_copied(name, several_indices_too):
    x, u = np.zeros((16, 10, 10), np.float32), np.ones((), np.float32)
    f = jax.jit(jof.accelerate(lambda x, u: x.at[FORMS[name]].add(u)), donate_argnums=0)
    hlo = f.lower(x, u).compile().as_text()
    assert targets(hlo)
    assert not re.findall(r"f32\[(?:16,10,10|160,10|1600)\]\S* copy\(", hlo)


def test_deterministic():
    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for CUDA")

    def calls(f):
        lowered = jax.jit(f).trace(TABLE, IDS).lower(lowering_platforms=("cuda",))
        return re.findall(r"deterministic = (\w+)", lowered.as_text())

    assert calls(jof.accelerate(adds)) == ["false"]
    assert calls(jof.accelerate(adds, deterministic=True)) == ["true"]
    assert calls(jof.accelerate(deterministic=True)(adds)) == ["true"]


def test_rank_promotion_is_not_needed():
    x = np.float32(np.arange(40).reshape(8, 5) % 7)
    gradient = jax.grad(lambda x: jnp.median(x, 0).sum() + x[jnp.arange(4), 2:4, None].sum())
    with jax.numpy_rank_promotion("raise"):
        ours, theirs = (jax.jit(f)(x) for f in (jof.accelerate(gradient), gradient))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 20, 8), 2), ((4, 90, 400), 1)])
def test_ids_that_all_problems_share_are_sorted_once(shape, axis):
    of_updates = (*shape[:axis], 1100, *shape[axis + 1 :])
    x, u = (integers(*n).astype(np.float32) for n in (shape, of_updates))
    ids = integers(1100, low=-30, high=30)
    index = (*(ALL,) * axis, ids)

    @functools.partial(jof.accelerate, deterministic=True)
    def added(x, u):
        return x.at[index].add(u)

    np.testing.assert_array_equal(jax.jit(added)(x, u), numpy_added(x, index, u, "drop"))
    if "cuda" in jof.implementations():
        lowered = jax.jit(added).trace(x, u).lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"@jof_sort_rows\(.*\(tensor<(\w+)xi32>\) ->", lowered) == ["1x1100"]


@pytest.fixture
def ordered_on_cpus():
    """Installs the deterministic rule on CPUs; normally only GPUs need it."""
    rules._problem(common.DETERMINISTIC)  # installs the GPU rule, which stays
    installed = _compat.mlir_internals._lowerings
    before = installed[lax.scatter_p]
    _compat.replace_lowerings([lax.scatter_p], ["cpu"], scatters.in_order)
    yield
    _compat._replaced.discard((lax.scatter_p, "cpu"))
    installed[lax.scatter_p] = before


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_deterministic_programs_keep_the_last_update_of_a_row(mode, ordered_on_cpus):
    x = integers(11, 8, 6)
    us = {}
    for name, index in FORMS.items():
        us[name] = integers(*x[of_all_dimensions(np.mod, index, x)].shape)

    def put(x, us):
        return {name: x.at[FORMS[name]].set(us[name], mode=mode) for name in FORMS}

    ordered = jax.jit(jof.accelerate(put, deterministic=True))
    for name, y in ordered(x, us).items():
        np.testing.assert_array_equal(y, numpy_set(x, FORMS[name], us[name], mode), name)
    assert "maximum" in ordered.lower(x, us).as_text()
    assert "maximum" not in jax.jit(jof.accelerate(put)).lower(x, us).as_text()


# --- devices --------------------------------------------------------------------------------------


def mesh(kind):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices (the CPU has 8 virtual ones)")
    types = (getattr(AxisType, kind),)
    return jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])


def summing_calls(hlo: str) -> list[str]:
    return [target for target in targets(hlo) if target.startswith("jof_scatter_")]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_over_devices(kind):
    table, data = (np.float32(integers(*shape)) for shape in ((8, 6, 4), (8, 30, 4)))
    ids = integers(30, low=-9, high=9)

    def loss(table):
        return jnp.sum(jnp.sin(jnp.take(table, ids, axis=1, mode="clip")))

    def f(table, data):
        return jax.grad(loss)(table), table.at[:, ids].add(data), table.at[:, 0].add(1.0)

    expected = jax.jit(f)(table, data)
    with jax.set_mesh(mesh(kind)):
        args = jax.device_put((table, data), P("x"))
        step = jax.jit(jof.accelerate(f)).lower(*args).compile()
        for y, e in zip(step(*args), expected, strict=True):
            np.testing.assert_allclose(y, e, rtol=1e-6, atol=1e-6)
            assert y.sharding.spec[0] == "x"
    assert len(summing_calls(step.as_text())) == 2
    assert "all-gather" not in step.as_text()


def of_one(f):
    """The gradient with respect to the first argument."""
    return lambda x, *args: jax.grad(lambda x: f(x, *args).astype(jnp.float32).sum())(x)


def _pooled(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _patches(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=numbers)


# So many that sums and products of gathered rows pay on CPUs.
NODES, EDGE = ((100, 64), "float32"), ((2**13,), "int32")
SWAPPED = {  # functions, and shapes and dtypes of their arguments
    "segment_sum": (
        lambda x, i: jax.ops.segment_sum(x, i, 100),
        *(((2**13, 8), "float32"), EDGE),
    ),
    "segment_max": (
        lambda x, i: jax.ops.segment_max(x, i, 100),
        *(((2**13, 8), "float32"), EDGE),
    ),
    "lookups": (of_one(lambda x, i: jnp.sin(x[i])), NODES, EDGE),
    "bincount": (lambda i: jnp.bincount(i, length=50), EDGE),
    "messages": (lambda x, i, j: jax.ops.segment_sum(x[i], j, 100), NODES, EDGE, EDGE),
    "products of rows": (lambda x, y, i, j: (x[i] * y[j]).sum(-1), NODES, NODES, EDGE, EDGE),
    "softmax": (of_one(lambda x: jnp.sin(jax.nn.softmax(x))), ((100, 37), "bfloat16")),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), ((100, 37), "float32")),
    "matrix product": (lax.dot, ((64, 50), "bfloat16"), ((50, 77), "bfloat16")),
    "convolution": (of_one(_patches), ((2, 8, 8, 4), "bfloat16"), ((2, 2, 4, 8), "bfloat16")),
    "pooling": (of_one(_pooled), ((2, 8, 8, 4), "float32")),
    "search": (jnp.searchsorted, ((100,), "float32"), ((1000,), "float32")),
    "resize": (
        of_one(lambda x: jax.image.resize(x, (2, 16, 16, 3), "nearest") ** 2),
        *(((2, 8, 8, 3), "float32"),),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")  # edges of a search
@pytest.mark.parametrize(("devices", "kind"), [(1, "Explicit"), (2, "Explicit"), (2, "Auto")])
@pytest.mark.parametrize("name", SWAPPED)
def test_on_a_mesh(name, devices, kind):
    """What is swapped on one device is swapped on a mesh of one device. Shardings are those of jax.

    On two devices all arrays are sharded along their first dimension, if jax accepts that.
    """
    if len(jax.devices()) < devices:
        pytest.skip("needs 2 devices")
    f, *args = SWAPPED[name]
    args = [
        integers(*shape, high=120) if dtype == "int32" else jnp.asarray(integers(*shape), dtype) / 8
        for shape, dtype in args
    ]
    types = (getattr(AxisType, kind),)
    on_mesh = jax.make_mesh((devices,), ("x",), types, devices=jax.devices()[:devices])
    plain = jof.explain(f, *args).rows
    expected = jax.jit(f)(*args)
    with jax.set_mesh(on_mesh):
        args = jax.device_put(args, P("x" if devices > 1 else None))
        try:
            sharding = jax.jit(lambda *args: f(*args))(*args).sharding
        except (_compat.ShardingTypeError, ValueError):  # of jax itself
            pytest.skip("jax cannot compute it if it is sharded like this")
        got = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
        rows = jof.explain(f, *args).rows
    assert got.sharding.is_equivalent_to(sharding, got.ndim)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=0.02
    )
    if devices == 1:
        found, alone = ([(r.operation, r.swapped, r.bytes) for r in x] for x in (rows, plain))
        assert found == alone


def test_in_shard_map():
    def loss(table, ids):
        return lax.psum(lookup(table, ids), "x")

    specs = {"in_specs": (P(), P("x")), "out_specs": (P(), P())}
    f = jax.shard_map(jax.value_and_grad(loss), mesh=mesh("Auto"), **specs)
    step = jax.jit(jof.accelerate(f)).lower(TABLE, IDS).compile()
    assert len(summing_calls(step.as_text())) == 1
    expected = jax.jit(jax.value_and_grad(lookup))(TABLE, IDS)
    for y, e in zip(step(TABLE, IDS), expected, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-6, atol=1e-6)


def test_in_shard_map_each_platform_has_its_kernels():
    if "cuda" not in jof.implementations():
        pytest.skip("built without the module for CUDA")
    rows = jax.ShapeDtypeStruct((4096, 32), np.float32)
    ids = jax.ShapeDtypeStruct((4096,), np.int32)
    f = functools.partial(jax.ops.segment_sum, num_segments=16)
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    f = jax.jit(jof.accelerate(jax.shard_map(f, mesh=mesh("Auto"), **specs)))

    def kernels(*platforms):
        export = jax.export.export(f, platforms=platforms, disabled_checks=jof.export_checks())
        return set(re.findall(r"@(jof_scatter_\w+)", export(rows, ids).mlir_module()))

    on_cpu, on_cuda = kernels("cpu"), kernels("cuda")
    assert on_cpu != on_cuda
    assert kernels("cpu", "cuda") == on_cpu | on_cuda


# --- export ---------------------------------------------------------------------------------------


def test_export():
    f = jax.jit(jof.accelerate(jax.grad(lookup)))
    rows, count = jax.export.symbolic_shape("rows, count")
    of_any_size = (
        jax.ShapeDtypeStruct((rows, 3), jnp.float32),
        jax.ShapeDtypeStruct((count,), np.int32),
    )
    expected = jax.jit(jax.grad(lookup))(TABLE, IDS)
    every = ("tpu", "cuda", "cpu")
    here = "cuda" if jax.default_backend() == "gpu" else "cpu"
    for args, platforms in (((TABLE, IDS), (here,)), (of_any_size, every)):
        export = jax.export.export(f, platforms=platforms, disabled_checks=jof.export_checks())
        exported = export(*args)
        assert "jof_scatter_add" in exported.mlir_module()
        restored = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(restored.call(TABLE, IDS), expected, rtol=1e-6)
    for several in (adds, jof.accelerate(adds)):  # unaccelerated, too, although rules were replaced
        checks = jof.export_checks()
        export = jax.export.export(jax.jit(several), platforms=every, disabled_checks=checks)
        program = export(TABLE, IDS).mlir_module()
        assert ("jof_scatter" in program) == (several is not adds)
    export = jax.export.export(
        jax.jit(jof.accelerate(functools.partial(jnp.bincount, length=5))),
        disabled_checks=jof.export_checks(),
    )
    assert "jof_scatter" in export(of_any_size[1]).mlir_module()


def test_sizes_that_are_not_known_are_left_to_xla_where_rows_are_not_plain():
    rows, count = jax.export.symbolic_shape("rows, count")
    args = jax.ShapeDtypeStruct((rows, 3, 2), jnp.float32), jax.ShapeDtypeStruct((count,), np.int32)
    f = jax.jit(jof.accelerate(lambda x, i: x.at[i, i].add(1.0)))
    exported = jax.export.export(f)(*args)
    x, ids = np.zeros((4, 3, 2), np.float32), np.arange(3, dtype=np.int32)
    np.testing.assert_array_equal(exported.call(x, ids), x + np.eye(4, 3)[..., None])
    read = jax.vmap(lambda x, i: x[i])  # windows of one element of a row
    f = jax.jit(jof.accelerate(jax.grad(lambda x, i: jnp.sum(read(x, i)))))
    args = jax.ShapeDtypeStruct((4, rows), jnp.float32), jax.ShapeDtypeStruct((4,), np.int32)
    exported = jax.export.export(f, disabled_checks=jof.export_checks())(*args)
    np.testing.assert_array_equal(
        exported.call(x[:, :, 0], np.arange(4) % 3), np.eye(4, 3)[[0, 1, 2, 0]]
    )


# --- an incompatible jax --------------------------------------------------------------------------


def test_a_jax_that_differs_is_warned_of_once(monkeypatch):
    class Context:
        __slots__ = ()

    f = jax.jit(jof.accelerate(adds))
    warning = "runs programs as they are: jax .* xla_metadata"
    with monkeypatch.context() as patch:
        patch.setattr(_compat, "core_internals", SimpleNamespace(JaxprEqnContext=Context))
        rules._problem.cache_clear()
        rules._warn.cache_clear()
        with pytest.warns(RuntimeWarning, match=warning):
            y = f(TABLE, IDS)
        assert sums(jof.accelerate(adds), TABLE, IDS) == 0  # a second warning would be an error
        with jof.accelerate(False):
            np.testing.assert_array_equal(adds(TABLE, IDS), y)
    rules._problem.cache_clear()
    np.testing.assert_array_equal(y, adds(TABLE, IDS))
    assert sums(jof.accelerate(adds), TABLE, IDS) == 1


# --- explain --------------------------------------------------------------------------------------


def inner(x, ids):
    return jax.ops.segment_sum(jnp.sin(x), ids, 20) + jax.ops.segment_max(x, ids, 20).sum()


def mixed(table, ids, image):
    x = table[ids]
    for _ in range(2):
        x = jax.jit(inner)(x, ids)
    with jof.accelerate(False):
        x = x.at[ids].add(1.0)
    x = x.at[3].add(1.0)
    return jnp.sum(x**2) + jnp.sum(jax.image.resize(image, (1, 8, 8, 2), "nearest") ** 2)


MIXED = jax.value_and_grad(mixed, argnums=(0, 2)), (TABLE, IDS, np.ones((1, 4, 4, 2), np.float32))


def test_explain_counts_what_the_compiled_program_has():
    step, args = MIXED
    for _ in range(2):  # explain caches nothing that changes the result
        report = jof.explain(step, *args)
        swapped = sum(row.count for row in report.rows if row.swapped)
        assert swapped == len(summing_calls(compiled(jof.accelerate(step), *args))) == 9
        assert not summing_calls(compiled(step, *args))


def test_explain_names_lines_and_reasons():
    step, args = MIXED
    report = jof.explain(step, *args)
    first = mixed.__code__.co_firstlineno
    here = f"tests/test_accelerate.py:{first + 1}"
    (lookup,) = [row for row in report.rows if row.line.endswith(here)]
    assert lookup == Row(
        lookup.line, "scatter-add", ((11, 3), (20, 1), (20, 3)), "float32", True, lookup.reason, 452
    )
    by_operation = {}
    for row in report.rows:
        assert row.line.rpartition(":")[0].endswith("test_accelerate.py")
        assert bool(row.reason)
        by_operation.setdefault(row.operation, []).append(row)
    assert [r.reason for r in by_operation["scatter-add"] if not r.swapped] == [
        "one window, which XLA updates in place"
    ]
    (most,), (resized,) = by_operation["scatter-max"], by_operation["jax.image.resize"]
    assert most.swapped
    assert most.count == 2
    assert resized.reason.startswith("jof.resize")
    assert resized.shapes == ((1, 8, 8, 2), (1, 4, 4, 2))


def test_explain_names_what_would_help():
    """Library functions whose operations are not swapped, at the lines that call them."""
    optax, linen = pytest.importorskip("optax"), pytest.importorskip("flax.linen")
    scale = {"params": {"scale": np.ones(16, np.float32)}}

    def by_hand(x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def loss(x, labels):
        x = linen.RMSNorm().apply(scale, by_hand(x))
        x = jax.nn.softmax(x) + jax.nn.log_softmax(x) + jax.nn.gelu(x.astype(jnp.bfloat16))
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    x, labels = np.ones((8, 16), np.float32), np.zeros(8, np.int32)
    first = loss.__code__.co_firstlineno
    lines = {
        ("norm", -2, "jof.layer_norm and jof.rms_norm"),
        ("norm", 1, "jof.layer_norm and jof.rms_norm"),
        ("softmax", 2, "jof.softmax "),
        ("log_softmax", 2, "jof.log_softmax "),
        ("tanh", 2, "jof.fuse"),
        ("cross entropy", 3, "jof.softmax_cross_entropy_with_integer_labels"),
    }
    rows = jof.explain(jax.value_and_grad(loss), x, labels).rows
    found = {(r.operation, int(r.line.rpartition(":")[2]) - first): r for r in rows}
    for operation, line, help_ in lines:
        row = found[operation, line]
        assert row.reason.startswith(help_)
        assert (row.shapes[0], row.count, row.swapped) == ((8, 16), 1, False)


def test_explain_names_messages():
    """Finds sums of gathered rows, but not sums of matrix products or of ones."""

    def layer(x, w, senders, receivers):
        def total(messages):
            return jax.ops.segment_sum(messages, receivers, 5)

        messages = w * jax.nn.silu(x[senders] + jnp.take(x, receivers, axis=0))
        return total(messages) + total(messages @ x[:3]) + total(jnp.ones_like(w))

    ids = np.zeros(9, np.int32)
    args = np.ones((5, 3), np.float32), np.ones((9, 1), np.float32), ids, ids
    (row,) = [row for row in jof.explain(layer, *args).rows if row.operation == "messages"]
    assert int(row.line.rpartition(":")[2]) == layer.__code__.co_firstlineno + 2
    assert (row.shapes[0], row.count, row.swapped) == ((9, 3), 1, False)
    assert row.bytes == 2 * 4 * 9 * 3
    assert row.reason == (
        "jof.message_sum and jof.attention_sum store no row for each edge: here these are 108 B"
    )


def test_explain_for_a_device_that_is_not_here(monkeypatch):
    """Nor are its kernels."""
    cases = {"sum/narrow rows/32-bit": [[1 << 8, 100.0, 200.0, 0.0]] * 50}
    cases["sum/narrow rows/16-bit"] = [[1 << 8, 100.0, 50.0, 0.0]] * 50
    table = {"NVIDIA X": {"platform": "cuda", "cases": cases}}
    monkeypatch.setattr(_policy, "tables", lambda: table)
    monkeypatch.setattr(_native, "available", lambda platform: platform == "cpu")
    report = jof.explain(adds, TABLE, IDS, platform="NVIDIA X")
    (row,) = report.rows
    assert row.swapped
    assert "2.00x" in row.reason
    assert row.native_us * 2 == pytest.approx(row.xla_us)
    assert "1 swapped on NVIDIA X, 0 not" in str(report)
    (row,) = jof.explain(adds, TABLE.astype(jnp.bfloat16), IDS, platform="cuda").rows
    assert not row.swapped
    assert row.reason.startswith("summed in float32 by XLA: 0.50x")
    with pytest.raises(ValueError, match=r"explain: platform must be one of .*, got 'tpu'"):
        jof.explain(adds, TABLE, IDS, platform="tpu")


def test_explain_of_functions_of_jit_keeps_their_options():
    @functools.partial(jax.jit, static_argnames="size", donate_argnums=0)
    def f(table, ids, *, size):
        return table.at[ids].add(1.0), table[:size]

    for g in (f, jof.accelerate(f)):
        assert [row.swapped for row in jof.explain(g, TABLE, IDS, size=3).rows] == [True]
    assert not jof.explain(jnp.sin, TABLE).rows
    jof.accelerate(f).clear_cache()


def test_explain_of_functions_without_a_hash():
    """Modules of Equinox are such functions."""

    class Layer:
        __hash__ = None

        def __call__(self, ids):
            return jnp.zeros((4, 8)).at[ids].add(1.0)

    (row,) = jof.explain(Layer(), IDS).rows
    assert row.operation == "scatter-add"


def test_explain_of_programs_that_call_the_host():
    def f(table, ids):
        jax.debug.print("{}", table[0, 0])
        return adds(table, ids)

    assert [row.swapped for row in jof.explain(f, TABLE, IDS).rows] == [True]
    elsewhere = "cpu" if jax.default_backend() == "gpu" else "cuda"
    with pytest.raises(ValueError, match="Remedy: leave out the calls, or pass platform="):
        jof.explain(f, TABLE, IDS, platform=elsewhere)


def test_functions_of_nnx_jit(measured):
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit
    def step(table, ids):  # changes the table
        table[...] = table[...].at[ids].add(1.0)

    table, ids = nnx.Param(jnp.zeros((8, 3))), jnp.array([1, 1])
    assert [row.swapped for row in jof.explain(step, table, ids).rows] == [True]
    jof.accelerate(step, tune=True)(table, ids)
    np.testing.assert_array_equal(table[:3, 0], [0, 2, 0])


def test_a_report_fits_a_terminal(monkeypatch):
    step, args = MIXED
    report = jof.explain(step, *args)
    for columns in (80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= columns
        table, reasons = lines[: len(report.rows) + 1], " ".join(lines[len(report.rows) + 1 :])
        for row, line in zip(report.rows, table[1:], strict=True):
            number = re.search(r"\((\d+)\)$", line)[0]
            assert f"{number} {row.reason}" in re.sub(" +", " ", reasons)
    html = report._repr_html_()
    assert html.count("<tr>") == len(report.rows) + 1
    assert "2 x scatter-max" in html
    assert html.count("<") == html.count(">")


# --- tune -----------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replaces the clock by preset times, and lists the functions that were timed."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    clock = SimpleNamespace(times=[1.0, 1.0], calls=[])

    def times(functions, args, kwargs):
        clock.calls.append(functions)
        return clock.times

    monkeypatch.setattr(tune, "_times", times)
    return clock


def is_swapped(fun, *args) -> bool:
    """Whether a tuned function runs kernels."""
    jax.clear_caches()
    with unittest.mock.patch.object(_emit, "lower", side_effect=_emit.lower) as f:
        fun(*args)
    return f.called


@pytest.mark.parametrize(("plain", "ours"), [(1.03, 1.0), (1.01, 1.0), (1.0, 2.0)])
def test_the_faster_way_runs_and_is_remembered(measured, caplog, plain, ours):
    measured.times = [plain, ours]
    expected = adds(TABLE, IDS)
    with caplog.at_level("INFO", "jax_oneflow_ops"):
        for _ in range(2):  # the second pass reads the cache, as another process would
            tuned = jof.accelerate(jax.jit(adds), tune=True)
            np.testing.assert_array_equal(tuned(TABLE, IDS), expected)
            np.testing.assert_array_equal(tuned(TABLE, IDS), expected)
            assert is_swapped(tuned, TABLE, IDS) == (plain > 1.02)
    assert len(measured.calls) == 1
    lines = [record.getMessage() for record in caplog.records]
    runs = "with kernels" if plain > 1.02 else "as it is"
    assert [f"adds runs {runs}: " in line for line in lines] == [True, True]
    assert [line.rpartition(", ")[2] for line in lines] == ["measured now", "as measured before"]


def test_other_shapes_and_other_programs_are_measured_anew(measured):
    tuned = jof.accelerate(adds, tune=True)
    for ids in (IDS, IDS[:7], IDS):
        tuned(TABLE, ids)
    assert len(measured.calls) == 2

    def adds_twice(table, ids):
        return adds(adds(table, ids), ids)

    adds_twice.__name__ = "adds"
    jof.accelerate(adds_twice, tune=True)(TABLE, IDS)
    assert len(measured.calls) == 3


def test_values_count_only_if_they_are_static(measured, monkeypatch):
    """A new learning rate is not measured again; a new number of segments is."""

    @functools.partial(jax.jit, static_argnames="size")
    def scaled(data, ids, rate, *, size=None):
        return rate * jax.ops.segment_sum(data, ids, size or 3)

    tuned = jof.accelerate(scaled, tune=True)
    for rate in (0.5, 0.25):
        tuned(TABLE, FIRST[:11], rate)
    assert len(measured.calls) == 1
    for size in (4, 5, 4):
        for rate in (0.5, 0.25):
            tuned(TABLE, FIRST[:11], rate, size=size)
    assert len(measured.calls) == 3
    assert tuned.lower(TABLE, FIRST[:11], 0.5).as_text().count("jof_scatter") == 1
    # Switching kernels off with the environment variable needs another measurement.
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    jof.accelerate(scaled, tune=True)(TABLE, FIRST[:11], 0.5)
    assert len(measured.calls) == 4


class Model:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, table, ids, times=1):
        return adds(table, ids) * times


@pytest.mark.parametrize("options", [{}, {"tune": True}, {"fuse": True}], ids=str)
def test_a_method_that_jit_made(measured, options):
    model, expected = Model(), np.asarray(adds(TABLE, IDS))
    step = jof.accelerate(model.step, **options)
    np.testing.assert_array_equal(step(TABLE, IDS), expected)
    np.testing.assert_array_equal(step(TABLE, IDS, 2), 2 * expected)
    np.testing.assert_array_equal(step(TABLE, IDS, times=3), 3 * expected)
    np.testing.assert_array_equal(step.lower(TABLE, IDS).compile()(TABLE, IDS), expected)
    step.clear_cache()
    np.testing.assert_array_equal(step(TABLE, IDS), expected)
    (row,) = jof.explain(model.step, TABLE, IDS).rows
    assert row.operation == "scatter-add"


@pytest.mark.parametrize("options", [{}, {"tune": True}, {"fuse": True}], ids=str)
@pytest.mark.parametrize("like", [np.float16, jnp.float16, jax.ShapeDtypeStruct((3,), "float16")])
def test_static_arguments_may_look_like_arrays(measured, options, like):
    @functools.partial(jax.jit, static_argnames="like")
    def cast(x, like):
        return x.astype(like.dtype if isinstance(like, jax.ShapeDtypeStruct) else like)

    cast = jof.accelerate(cast, **options)
    assert cast(TABLE, like=like).dtype == jnp.float16
    assert cast(TABLE, like=np.float32).dtype == jnp.float32
    assert cast.lower(TABLE, like="float16").compile()(TABLE).dtype == jnp.float16


def test_functions_that_return_before_they_run_are_refused():
    async def later(x):
        return x

    def each(x):
        yield x

    async def each_later(x):
        yield x

    for function in (later, each, each_later):
        with pytest.raises(TypeError, match="accelerate the functions that it calls"):
            jof.accelerate(function)


@pytest.mark.parametrize("tune", [False, True])
def test_compiled_programs_are_refused(tune):
    compiled_adds = jax.jit(adds).lower(TABLE, IDS).compile()
    with pytest.raises(TypeError, match=r"fun is compiled already.* before you compile it"):
        jof.accelerate(compiled_adds, tune=tune)


def test_what_cannot_be_timed_runs_as_it_is(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for copies")
    monkeypatch.setattr(tune, "_times", unittest.mock.Mock(side_effect=error))
    tuned = jof.accelerate(adds, tune=True)
    np.testing.assert_array_equal(tuned(TABLE, IDS), adds(TABLE, IDS))
    assert "no memory for copies" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_what_is_on_disk_is_no_matter_of_trust(measured, tmp_path):
    jof.accelerate(adds, tune=True)(TABLE, IDS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{}")
    jof.accelerate(adds, tune=True)(TABLE, IDS)
    assert len(measured.calls) == 2


def test_tuning_runs_on_copies(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    step = jax.jit(lambda state, ids: {"x": adds(state["x"], ids)}, donate_argnums=0)
    state = {"x": jnp.asarray(TABLE)}
    result = jof.accelerate(step, tune=True)(state, IDS)
    np.testing.assert_array_equal(result["x"], adds(TABLE, IDS))
    assert state["x"].is_deleted()  # the call itself donated it


def test_a_tuned_step_that_changes_mutable_arrays_is_not_timed(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    total = jax.new_ref(jnp.zeros(()))

    def passed(counts, ids):
        counts[...] = counts[...].at[ids].add(1.0)
        return counts[...].sum()

    def captured(ids):
        total[...] += ids.sum()
        return ids

    counts = jax.new_ref(jnp.zeros(4))
    ids = jnp.array([0, 2, 2])
    assert jof.accelerate(passed, tune=True)(counts, ids) == 3
    np.testing.assert_array_equal(counts[...], [1, 0, 2, 0])
    np.testing.assert_array_equal(jof.accelerate(captured, tune=True)(ids), ids)
    assert total[...] == 4
    assert caplog.text.count("it would change mutable arrays") == 2
    assert not [*tmp_path.iterdir()]


def test_tuned_inside_another_scope(monkeypatch, tmp_path):
    """The step without kernels has none, whatever surrounds it."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    programs = []

    def times(functions, args, kwargs):
        programs.extend(lowered_targets(f.lower(*args, **kwargs).as_text()) for f in functions)
        return [1.0, 2.0]  # seconds without kernels and with them

    monkeypatch.setattr(tune, "_times", times)
    with jof.accelerate():
        jof.accelerate(adds, tune=True)(TABLE, IDS)
    assert [sum(found.values()) for found in programs] == [0, 1]


class Named:
    """Has a method of its own with the name of one that `jax.jit` adds to functions."""

    def __call__(self, table, ids):
        return adds(table, ids)

    def trace(self):
        return 0


@pytest.mark.parametrize("options", [{}, {"tune": True}, {"fuse": True}], ids=str)
def test_a_callable_with_a_method_named_trace(measured, options):
    step = jof.accelerate(Named(), **options)
    np.testing.assert_array_equal(step(TABLE, IDS), adds(TABLE, IDS))
    (row,) = jof.explain(Named(), TABLE, IDS).rows
    assert row.operation == "scatter-add"


def test_tuned_for_mutable_arrays_of_each_shape(measured):
    def read(x, ids):
        return x[...][ids]

    tuned = jof.accelerate(read, tune=True)
    for n in (3, 5, 5, 7):
        np.testing.assert_array_equal(tuned(jax.new_ref(jnp.arange(n)), jnp.array([1])), [1])
    assert len(measured.calls) == 3


def test_a_tuned_method_needs_to_be_jitted(measured):
    class Model:
        @functools.partial(jof.accelerate, tune=True)
        def step(self, x):
            return x

    with pytest.raises(TypeError, match=r"needs arrays as arguments, got Model\. Remedy"):
        Model().step(TABLE)


def test_a_tuned_function_is_not_for_transformations(measured):
    with pytest.raises(TypeError, match=r"Remedy: jof\.accelerate\(jax\.jit\(fun\), tune=True\)"):
        jax.jit(jof.accelerate(adds, tune=True))(TABLE, IDS)
    with pytest.raises(TypeError, match="Remedy"):  # not even with untraced arrays
        jax.jit(lambda x: x + jof.accelerate(adds, tune=True)(TABLE, IDS))(1.0)
    with pytest.raises(ValueError, match="pass one of them"):
        jof.accelerate(adds, tune=True, deterministic=True)
    monkey = unittest.mock.patch.object(jax, "process_count", return_value=2)
    with monkey, pytest.raises(NotImplementedError, match="tune=True works in one process"):
        jof.accelerate(adds, tune=True)(TABLE, IDS)


def test_equal_rows_are_one_that_counts_them():
    """Equal rows, such as a model's layers, share one row; other shapes get separate rows."""

    def add(table, ids):
        return table.at[ids].add(1.0)

    def layers(a, b, ids):
        for _ in range(3):
            a = add(jnp.tanh(a), ids)
        return a, add(b, ids)

    a, b, ids = jnp.ones((16, 4)), jnp.ones((32, 4)), jnp.arange(8)
    report = jof.explain(layers, a, b, ids)
    assert [(row.count, row.shapes[0]) for row in report.rows] == [(3, (16, 4)), (1, (32, 4))]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_with_their_own_ids_stay_sharded(kind, dtype):
    """Over several devices; on one, a kernel sums them."""

    def of_sort(x, ids):
        return jax.grad(lambda x: (jnp.sort(x, 0).astype(jnp.float32) ** 3).sum())(x)

    def of_lookup(x, ids):
        taken = functools.partial(jnp.take_along_axis, indices=ids, axis=0)
        return jax.grad(lambda x: (taken(x).astype(jnp.float32) ** 3).sum())(x)

    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    rng = rng_for(dtype)
    x = rng.normal(size=(32, 8)).astype(dtype)
    ids = rng.integers(0, 32, (32, 8)).astype(np.int32)
    for f in (of_sort, of_lookup):
        assert lowered_targets(accelerated(f, x, ids)).total() == 1
        with jax.set_mesh(mesh):
            sharded = [jax.device_put(v, NamedSharding(mesh, P(None, "a"))) for v in (x, ids)]
            steps = [jax.jit(g).lower(*sharded).compile() for g in (f, jof.accelerate(f))]
            found = [re.findall(r" all-(?:reduce|gather)\(", step.as_text()) for step in steps]
            assert found[0] == found[1]  # jax 0.8 itself gathers what it sorts
            plain, result = (step(*sharded) for step in steps)
        assert result.sharding == plain.sharding
        np.testing.assert_allclose(np.float64(result), np.float64(f(x, ids)), rtol=2**-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_between_indices_stay_sharded(dtype):
    """Unless the sum has to have the same bits on every run."""

    def add(x, ids):
        return x.at[ids, :, ids].add(1)

    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x, ids = np.zeros((5, 8, 5), dtype), np.array([3, 1, 3], np.int32)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "a")))
    lowered = jax.jit(jof.accelerate(add)).lower(x, ids)
    assert "x5xbf16>, tensor" not in lowered.as_text().partition("stablehlo.scatter")[2]
    by_xla = lowered.compile()
    assert not targets(by_xla.as_text())
    result = by_xla(x, ids)
    assert result.sharding == x.sharding
    np.testing.assert_array_equal(np.float64(result), np.float64(add(x, ids)))
    ordered = jax.jit(jof.accelerate(add, deterministic=True)).lower(x, ids)
    with pytest.warns(jof.GatherWarning):
        assert len(targets(ordered.compile().as_text())) == 1
