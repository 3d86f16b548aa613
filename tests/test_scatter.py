"""segment_sum, scatter_add and embedding_lookup: values, against NumPy and against JAX."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native, _scatter_policy
from tests import oracle
from tests.arrays import INTEGERS, any_bits, assert_same_bits, normals, rng_for
from tests.catalogue import BY_NAME

pytestmark = pytest.mark.usefixtures("x64")

BACKEND = jax.default_backend()
IMPLEMENTATIONS = (None, "xla")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATS, "complex64", "complex128", *INTEGERS)
MOVED = (*DTYPES, "bool", "float8_e4m3fn", "float8_e5m2")
MODES = (None, "drop", "fill", "clip", *jax.lax.GatherScatterMode)


def exact_terms(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Values whose sum is the same in every order: integers of the whole range, or floats so small
    that 16-bit floats hold the sum of sixty of them, with zeros of both signs."""
    dtype = jnp.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, size=shape, dtype=dtype, endpoint=True)
    values = rng.choice([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 3.0], size=shape)
    if dtype.kind == "c":
        parts = np.stack([values, rng.permuted(np.atleast_1d(values)).reshape(shape)], axis=-1)
        return parts.view(np.complex128)[..., 0].astype(dtype)
    return values.astype(dtype)


def assert_same_values(actual, expected) -> None:
    """Equal as numbers (0 equals -0) and in dtype and shape."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype.kind not in "iu":
        wide = np.complex128 if actual.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore"):  # bfloat16's NaN
            actual, expected = actual.astype(wide), expected.astype(wide)
    np.testing.assert_array_equal(actual, expected)


def assert_same_sums(actual, expected, implementation) -> None:
    """Compares sums into zeros. Sums of -0 are +0, but XLA may simplify 0 + x to x."""
    if implementation == "xla":
        assert_same_values(actual, expected)
    else:
        assert_same_bits(actual, expected + np.zeros((), expected.dtype))


def fit_32_bits(ids) -> bool:
    """Whether ids fit into 32 bits; in jnp, ids that do not fit may name another row."""
    return not ids.size or -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31


def on_cpu(f, *args):
    """JAX's result on the CPU: on GPUs some versions of it lose updates."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, f(*args))


def together(calls):
    """The results of `f(*arrays)` for all (f, arrays), in one program, which saves much time.

    Ids that f closes over stay concrete, as they are outside `jax.jit`.
    """
    fs, arrays = zip(*calls, strict=True)
    return jax.jit(lambda arrays: [f(*xs) for f, xs in zip(fs, arrays, strict=True)])(arrays)


def clips(mode) -> bool:
    return mode in ("clip", jax.lax.GatherScatterMode.CLIP)


def promises(mode) -> bool:
    return mode == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS


def like_sums(total: np.ndarray, dtype) -> np.ndarray:
    """The oracle's exact sums in the dtype of the result."""
    with np.errstate(over="ignore"):
        return total.astype(dtype)


# --- problems drawn by hypothesis -----------------------------------------------------------------


@st.composite
def index_arrays(draw, size, shape, bounded):
    """Ids around [0, size) and at the limits of their dtype; if `bounded`, ids in [0, size)."""
    dtype = draw(st.sampled_from(INTEGERS))
    info = np.iinfo(dtype)
    low, high = (0, size - 1) if bounded else (-2 * size - 2, 2 * size + 2)
    low, high = max(low, info.min), min(high, info.max)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ids = rng.integers(low, high, size=shape, endpoint=True)
    ids = np.asarray(ids).astype(dtype)
    if not bounded and draw(st.booleans()):
        ends = np.array([info.min, info.max], dtype)
        ids = np.where(rng.random(shape) < 0.1, rng.choice(ends, shape), ids)
    return ids


SIZES = st.one_of(st.integers(0, 6), st.integers(7, 50))
# Empty rows, single elements, rows up to the limit of private sums, and longer rows.
TRAILING = st.sampled_from([(), (), (1,), (3,), (8,), (2, 2), (9,), (33,), (0,), (2, 0)])
INDEX_SHAPES = st.one_of(
    st.integers(0, 60).map(lambda n: (n,)), st.sampled_from([(), (2, 3), (1, 0), (3, 1, 4)])
)


@st.composite
def problems(draw, modes=MODES, dtypes=DTYPES):
    """(size, ids, rng, trailing shape, dtype, mode)"""
    mode = draw(st.sampled_from(modes))
    size, shape = draw(SIZES), draw(INDEX_SHAPES)
    bounded = promises(mode)
    size = max(size, 1) if bounded else size
    ids = draw(index_arrays(size, shape, bounded))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return size, ids, rng, draw(TRAILING), draw(st.sampled_from(dtypes)), mode


HALF = settings(max_examples=max(1, settings().max_examples // 2))  # each compiles programs
OPTIONS = st.fixed_dictionaries(
    {"deterministic": st.booleans(), "implementation": st.sampled_from(IMPLEMENTATIONS)}
)


@HALF
@given(problem=problems(), options=OPTIONS)
def test_segment_sum_equals_numpy_and_jnp(problem, options):
    size, ids, rng, trailing, dtype, mode = problem
    ids = ids.reshape(-1)
    data = exact_terms(rng, (*ids.shape, *trailing), dtype)
    actual = jof.segment_sum(data, ids, size, mode=mode, **options)
    if fit_32_bits(ids):
        expected = on_cpu(jax.jit(lambda: jax.ops.segment_sum(data, ids, size, mode=mode)))
        assert_same_values(actual, expected)
    rows = oracle.named_rows(ids, size, wrap=False, clip=clips(mode))
    total = oracle.scatter_add(np.zeros((size, *trailing), dtype), rows, data)
    assert_same_sums(actual, like_sums(total, dtype), options["implementation"])


@HALF
@given(problem=problems(), options=OPTIONS)
def test_scatter_add_equals_numpy_and_jnp(problem, options):
    size, ids, rng, trailing, dtype, mode = problem
    operand = exact_terms(rng, (size, *trailing), dtype)
    updates = exact_terms(rng, (*ids.shape, *trailing), dtype)
    actual = jof.scatter_add(operand, ids, updates, mode=mode, **options)
    # The reference's segmented scan returns +0 for a sum of -0.
    scans = options == {"deterministic": True, "implementation": "xla"}
    assert_same = assert_same_values if scans else assert_same_bits
    if fit_32_bits(ids) and (size or not ids.size):  # jnp refuses ids where there are no rows
        expected = on_cpu(jax.jit(lambda: jnp.asarray(operand).at[ids].add(updates, mode=mode)))
        # jaxlib 0.8.0 computes 0 + -0 as -0 for one 16-bit update that is promised to be in bounds.
        assert_same_values(actual, expected)
    rows = oracle.named_rows(ids, size, wrap=True, clip=clips(mode))
    assert_same(actual, like_sums(oracle.scatter_add(operand, rows, updates), dtype))


@HALF
@given(problem=problems(modes=(None,), dtypes=MOVED), options=OPTIONS)
def test_embedding_lookup_equals_numpy_and_jnp(problem, options):
    size, ids, rng, trailing, dtype, _ = problem
    size = max(size, 1)
    table = any_bits(rng, (size, *trailing), dtype)
    actual = jof.embedding_lookup(table, ids, **options)
    if fit_32_bits(ids):
        expected = on_cpu(jax.jit(lambda: jnp.take(table, ids, axis=0)))
        assert_same_values(actual, expected)
    if dtype in DTYPES:
        kind = jnp.dtype(dtype).kind
        limit = np.iinfo(dtype) if kind in "iu" else None
        fill = np.nan if limit is None else limit.min if kind == "i" else limit.max
        rows = oracle.named_rows(ids, size, wrap=True, clip=False)
        # XLA on CPUs quiets 16-bit signalling NaNs.
        is_xla = options.get("implementation") == "xla"
        assert_same = assert_same_values if is_xla else assert_same_bits
        assert_same(actual, oracle.gather_rows(table, rows, np.asarray(fill, dtype)))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_lookups_of_rows_of_every_length(mode):
    """Rows of 1 to 150 bytes, in one compilation."""
    rng = rng_for(mode)
    ids = rng.integers(-3, 24, 70).astype(np.int32)
    tables = [any_bits(rng, (21, width), "uint8") for width in range(1, 151)]
    lookup = functools.partial(jof.embedding_lookup, ids=ids, mode=mode, implementation="native")
    rows = oracle.named_rows(ids, 21, wrap=mode == "fill", clip=mode == "clip")
    for table, looked_up in zip(tables, together([(lookup, (x,)) for x in tables]), strict=True):
        assert_same_bits(looked_up, oracle.gather_rows(table, rows, np.uint8(255)))


@pytest.mark.parametrize("count", [65_536, 65_537, 70_007])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_lookups_of_many_single_words(mode, count):
    """On a GPU, from 65,537 ids on, threads load several ids and store several words at once."""
    rng = rng_for(mode, count)
    ids = rng.integers(-3, 24, count)
    tables = [any_bits(rng, (21, 1), f"uint{bits}") for bits in (8, 16, 32, 64)]
    with jax.enable_x64(True):
        for dtype in (np.int32, np.int64):
            for table in tables:
                looked_up = jof.embedding_lookup(
                    table, ids.astype(dtype), mode=mode, implementation="native"
                )
                rows = oracle.named_rows(ids, 21, wrap=mode == "fill", clip=mode == "clip")
                fill = np.iinfo(table.dtype).max
                assert_same_bits(looked_up, oracle.gather_rows(table, rows, table.dtype.type(fill)))


@pytest.mark.parametrize(
    ("count", "bucket_size"), [(0, 3), (1, 1), (10, 3), (10, 10), (10, 40), (10, None)]
)
def test_options_change_no_sum(count, bucket_size):
    rng, ours, theirs = rng_for(count), [], []
    data, operand = exact_terms(rng, (count, 3), "float32"), exact_terms(rng, (10, 3), "float32")
    for is_sorted, is_unique, deterministic in itertools.product((False, True), repeat=3):
        ids = rng.permutation(10)[:count] if is_unique else rng.integers(0, 10, size=count)
        if is_sorted:
            ids.sort()
        options = {"indices_are_sorted": is_sorted, "unique_indices": is_unique}

        def sums(segment_sum, ids=ids, options=options, **more):
            f = functools.partial(segment_sum, num_segments=10, bucket_size=bucket_size)
            return lambda data: f(data, ids, **options, **more)

        more = {"deterministic": deterministic}
        ours.append((sums(jof.segment_sum, **more), (data,)))
        theirs.append((sums(jax.ops.segment_sum), (data,)))
        add = functools.partial(jof.scatter_add, indices=ids, **options, **more)
        ours.append((lambda x, y, add=add: add(x, updates=y), (operand, data)))
        theirs.append((lambda x, y, i=ids, o=options: x.at[i].add(y, **o), (operand, data)))
    for k, (actual, expected) in enumerate(
        zip(together(ours), on_cpu(together, theirs), strict=True)
    ):
        (assert_same_bits if k % 2 else assert_same_values)(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_narrow_ids_of_more_rows_than_they_count(dtype, implementation):
    """Whether an id is negative is decided in its dtype; it wraps after it is widened."""
    size = 70_000
    info = np.iinfo(dtype)
    ids = np.array([info.min, info.max, 0, 1, info.max - 1], dtype)
    data = np.arange(1.0, 6)
    rows = oracle.named_rows(ids, size, wrap=True, clip=False)
    expected = oracle.scatter_add(np.zeros(size), rows, data)
    actual = jof.scatter_add(np.zeros(size), ids, data, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)
    table = np.arange(float(size))
    np.testing.assert_array_equal(
        jof.embedding_lookup(table, ids, implementation=implementation), table[rows]
    )
    rows = oracle.named_rows(ids, size, wrap=False, clip=False)
    expected = oracle.scatter_add(np.zeros(size), rows, data)
    actual = jof.segment_sum(data, ids, size, implementation=implementation)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["uint32", "uint64", "int64"])
def test_ids_that_only_64_bits_hold(dtype, x64):
    """These ids are out of range, even if their low 32 bits name a row."""
    wide = np.array([2**31, 2**32 - 1, 1], dtype)
    if dtype != "uint32":
        wide = np.append(wide, np.array([2**32, 2**32 + 1, 2**63 - 1], dtype))
    if dtype == "uint64":
        wide = np.append(wide, np.array([2**63, 2**64 - 1], dtype))
    data = np.arange(1, 1 + len(wide), dtype=np.float32)
    with jax.enable_x64(x64):
        expected = np.zeros(4, np.float32)
        rows = oracle.named_rows(wide, 4, wrap=False, clip=False)
        expected = oracle.scatter_add(expected, rows, data).astype(np.float32)
        assert_same_bits(jof.segment_sum(data, wide, 4), expected)
        clipped = oracle.named_rows(wide, 4, wrap=False, clip=True)
        expected = oracle.scatter_add(np.zeros(4), clipped, data).astype(np.float32)
        assert_same_bits(jof.segment_sum(data, wide, 4, mode="clip"), expected)


# --- how it is called -----------------------------------------------------------------------------


def test_signatures():
    def parameters(f):
        return {
            p.name: p.default if p.default is not p.empty else p.kind.name
            for p in inspect.signature(f).parameters.values()
        }

    both = {"deterministic": False, "implementation": None}
    positional = "POSITIONAL_OR_KEYWORD"
    flags = {"indices_are_sorted": False, "unique_indices": False}
    assert [*parameters(jof.segment_sum).items()] == [
        *{"data": positional, "segment_ids": positional, "num_segments": None}.items(),
        *{**flags, "bucket_size": None, "mode": None, "out_sharding": None, **both}.items(),
    ]
    arrays = {"operand": positional, "indices": positional, "updates": positional}
    assert parameters(jof.scatter_add) == {**arrays, "mode": "drop", **flags, **both}
    assert [*parameters(jof.embedding_lookup).items()] == [
        *{"table": positional, "ids": positional, "axis": 0, "mode": None}.items(),
        *{"fill_value": None, "unique_indices": False, "indices_are_sorted": False, **both}.items(),
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_number_of_segments(implementation):
    data, ids = np.arange(4.0), np.array([0, 5, 5, -1])
    f = functools.partial(jof.segment_sum, implementation=implementation)
    for given_ids in (ids, jnp.asarray(ids), ids.astype(np.uint8) % 7):
        expected = on_cpu(lambda given_ids=given_ids: jax.ops.segment_sum(data, given_ids))
        assert_same_bits(f(data, given_ids), expected)
    assert f(data, ids, np.int32(3)).shape == (3,)
    assert f(data, ids, jnp.int32(3)).shape == (3,)
    jitted = jax.jit(f, static_argnums=2)
    assert_same_bits(jitted(data, ids, 6), f(data, ids))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_updates_broadcast(implementation):
    operand = exact_terms(rng_for(1), (5, 2, 3), "float32")
    ids = np.array([[0, -1, 7], [2, 2, 0]])
    for shape in ((), (1,), (3,), (2, 3), (3, 1, 1), (2, 1, 2, 3), (1, 3, 1, 3)):
        updates = exact_terms(rng_for(shape), shape, "float32")
        actual = jof.scatter_add(operand, ids, updates, implementation=implementation)
        expected = on_cpu(
            jax.jit(lambda updates: jnp.asarray(operand).at[ids].add(updates, mode="drop")), updates
        )
        assert_same_bits(actual, expected)
    # Only the first dimension of data is indexed by ids, however many dimensions ids have.
    for of, shape in ((ids[0], ()), (ids[0], (1, 3)), (ids, (3,)), (ids, (1, 2)), (ids, (3, 2, 2))):
        data = exact_terms(rng_for(shape), shape, "float32")
        actual = jof.segment_sum(data, of, 3, implementation=implementation)
        expected = on_cpu(jax.jit(lambda data, of: jax.ops.segment_sum(data, of, 3)), data, of)
        assert_same_values(actual, expected)


def test_numbers_in_place_of_arrays():
    x = np.arange(6.0).reshape(3, 2)
    assert_same_bits(jof.scatter_add(x, -1, 1), jnp.asarray(x).at[-1].add(1, mode="drop"))
    assert_same_bits(jof.scatter_add(x, np.int8(1), 2.0), jnp.asarray(x).at[1].add(2.0))
    assert_same_bits(jof.embedding_lookup(x, 2), x[2])
    assert_same_bits(jof.embedding_lookup(x, jnp.uint8(1)), x[1])
    ids = np.array([0, 0, 2])
    assert_same_bits(jof.segment_sum(1.5, ids, 3), on_cpu(jax.ops.segment_sum, 1.5, ids, 3))


def weak(value, shape):
    return jnp.broadcast_to(jnp.asarray(value), shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_result_types(implementation):
    """Also for arrays made from Python numbers, whose dtype is weak."""
    ids = np.array([0, 1, 1])

    def assert_same_type(ours, theirs, *arguments):
        actual, expected = (jax.eval_shape(lambda f=f: f(*arguments)) for f in (ours, theirs))
        assert (actual.dtype, actual.weak_type) == (expected.dtype, expected.weak_type)

    options = {"implementation": implementation}
    total, lookup, add = (
        functools.partial(f, **options)
        for f in (jof.segment_sum, jof.embedding_lookup, jof.scatter_add)
    )
    arrays = [weak(1, (3,)), weak(1.0, (3,)), jnp.ones(3, "bfloat16"), jnp.ones(3, "int8")]
    for x in arrays:
        assert_same_type(total, jax.ops.segment_sum, x, ids, 2)
        assert_same_type(lookup, functools.partial(jnp.take, axis=0), x, ids)
        for y in (*arrays, 1, 1.0, jnp.float16(1)):
            if jnp.result_type(x, y) == x.dtype:
                assert_same_type(add, lambda x, ids, y: x.at[ids].add(y), x, ids, y)


# --- special values and errors --------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
def test_special_values_stay_in_their_row(dtype, width):
    specials = [np.inf, -np.inf, np.nan, -0.0]
    data = np.ones((9, width), dtype)
    data[:4, 0] = specials
    data[4:6, -1] = np.inf, -np.inf
    ids = np.array([1, 2, 3, 4, 5, 5, 0, 0, 99])
    operand = np.full((8, width), -0.0, dtype)
    ways = ({"deterministic": False}, {"deterministic": True})
    ours = [(lambda x, y, o=o: jof.scatter_add(x, ids, y, **o), (operand, data)) for o in ways]
    ours += [(lambda y, o=o: jof.segment_sum(y, ids, 8, **o), (data,)) for o in ways]
    theirs = [(lambda x, y: x.at[ids].add(y), (operand, data))] * 2
    theirs += [(lambda y: jax.ops.segment_sum(y, ids, 8), (data,))] * 2
    results = [*map(np.asarray, together(ours))]
    for actual, expected in zip(results, on_cpu(together, theirs), strict=True):
        assert_same_values(actual, expected)
    for added, total in zip(results[:2], results[2:], strict=True):
        assert_same_bits(added[6:], operand[6:])  # no id names these rows: -0 stays
        assert np.signbit(added.real)[4, 0]  # -0 - 0
        assert not np.signbit(total.real[[4, 6, 7]]).any()


def assert_sums_within_error(actual, operand, rows, updates, additions_round=False) -> None:
    """The error of n terms added in any order is at most gamma(n - 1) times the sum of magnitudes
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). 16-bit terms are added
    in float32 and the total is rounded once; if `additions_round`, each addition is rounded."""
    actual = np.asarray(actual)
    dtype = actual.dtype
    count = 1 + oracle.scatter_add(np.zeros(operand.shape), rows, np.ones(updates.shape))
    unit = 2.0**-53 if dtype in (np.float64, np.complex128) else 2.0**-24
    gamma = count * unit / (1 - count * unit) + count * 2.0**-53 / (1 - count * 2.0**-53)
    for part in (np.real, np.imag) if dtype.kind == "c" else (np.asarray,):
        terms = [part(x).astype(np.float64) for x in (operand, updates)]
        exact = oracle.scatter_add(terms[0], rows, terms[1])
        magnitude = oracle.scatter_add(abs(terms[0]), rows, abs(terms[1]))
        bound = gamma * magnitude
        if dtype.itemsize == 2:
            largest = magnitude + bound if additions_round else abs(exact) + bound
            bound += oracle.spacing(largest, dtype) / 2 * (count if additions_round else 1)
        excess = np.max(abs(part(actual).astype(np.float64) - exact) - bound, initial=0)
        assert excess <= 0, f"a sum errs by {excess} more than its bound"


# (updates, rows, width): private sums, counting sort, comparison sort, wide rows, few rows.
PROBLEMS = [(9000, 100, 1), (5000, 40, 3), (3000, 50, 17), (500, 5000, 2), (60, 7, 300)]


@pytest.mark.parametrize(
    ("implementation", "deterministic"), [(None, False), (None, True), ("xla", False)]
)
@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_sums_within_error(dtype, implementation, deterministic):
    options = {"deterministic": deterministic, "implementation": implementation}
    calls, known = [], []
    for count, size, width in PROBLEMS:
        rng = rng_for(count, size, width)
        ids = rng.integers(-2, size + 2, size=count)
        ids[: count // 3] = size // 2
        updates = normals(rng, (count, width), dtype)
        operand = normals(rng, (size, width), dtype)
        # On GPUs a small number of updates is added directly to 16-bit rows.
        additions_round = BACKEND == "gpu" and not deterministic and count < size
        for wrap, start in ((True, operand), (False, np.zeros_like(operand))):
            rows = oracle.named_rows(ids, size, wrap=wrap, clip=False)
            known.append((start, rows, updates, additions_round))
        calls.append((lambda x, i, y: jof.scatter_add(x, i, y, **options), (operand, ids, updates)))
        f = functools.partial(jof.segment_sum, num_segments=size, **options)
        calls.append((f, (updates, ids)))
    for actual, expected in zip(together(calls), known, strict=True):
        assert_sums_within_error(actual, *expected)


@pytest.mark.parametrize("width", [1, 12])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_err_no_more_than_those_of_xla(dtype, width):
    for count, size in ((6000, 40), (300, 150), (100, 300)):
        rng = rng_for(count, size)
        ids = rng.integers(0, size, size=count)
        updates = rng.uniform(0, 1, size=(count, width)).astype(dtype)
        exact = oracle.scatter_add(np.zeros((size, width), dtype), ids, updates)

        def error(f, ids=ids, updates=updates, size=size, exact=exact):
            result = jax.jit(f, static_argnums=2)(updates, ids, size)
            return np.max(abs(np.asarray(result).astype(np.float64) - exact))

        assert error(jof.segment_sum) <= on_cpu(lambda: error(jax.ops.segment_sum))


def test_16_bit_sums_are_rounded_once():
    """Sums that need more than 16 bits: small terms after large ones, intermediate overflow."""
    # From `edge` on, neighbouring numbers of the dtype are 2 apart.
    for dtype, big, edge in (("float16", 40000.0, 2048.0), ("bfloat16", 2.0**127, 256.0)):
        sums = [[edge, *[0.25] * 20], [edge, 1.0, 2.0**-12], [big, big, -big], [edge, 1.0]]
        if dtype == "bfloat16":
            sums.pop(2)  # float32 overflows where bfloat16 does
        data = np.concatenate(sums).astype(dtype)
        ids = np.repeat(np.arange(len(sums)), [len(terms) for terms in sums])
        expected = oracle.rounded(np.array([sum(terms) for terms in sums]), dtype)
        for options in ({}, {"indices_are_sorted": True}, {"deterministic": True}):
            assert_same_bits(jof.segment_sum(data, ids, len(sums), **options), expected)
        first = np.array([terms[0] for terms in sums], dtype)
        rest = np.concatenate([terms[1:] for terms in sums]).astype(dtype)
        ids = np.repeat(np.arange(len(sums)), [len(terms) - 1 for terms in sums])
        assert_same_bits(jof.scatter_add(first, ids, rest), expected)


# --- strategies -----------------------------------------------------------------------------------

TARGET = re.compile(r'custom_call_target="(jof_\w+)"')
SORTED, PRIVATE, ATOMIC, FEW = (
    f"jof_scatter_add_{way}" for way in ("sorted", "private", "atomic", "few")
)
IN_ORDER, ALWAYS = {"indices_are_sorted": True}, {"deterministic": True}
# (platform, dtype, updates, rows, width, options, custom calls, scratch shape of atomics)
STRATEGIES = [
    ("cpu", "float32", 9000, 100, 3, {}, [PRIVATE], ""),
    ("cpu", "float16", 50_000, 4, 1, {}, [PRIVATE], ""),
    ("cpu", "int8", 5000, 4000, 8, {}, [PRIVATE], ""),
    ("cpu", "bfloat16", 3000, 500, 17, {}, [PRIVATE], ""),
    ("cpu", "bfloat16", 300, 5000, 17, {}, ["jof_sort_rows", SORTED], ""),
    ("cpu", "complex64", 3000, 4000, 2, {}, [PRIVATE], ""),
    ("cpu", "float64", 500, 50_000, 1, {}, [PRIVATE], ""),
    ("cpu", "float32", 3000, 500, 300, {}, ["jof_sort_rows", SORTED], ""),
    ("cpu", "bfloat16", 500, 50_000, 1, {}, ["jof_sort_rows", SORTED], ""),
    ("cpu", "float32", 5000, 300, 3, IN_ORDER, [SORTED], ""),
    ("cpu", "float16", 3000, 7, 700, IN_ORDER, [SORTED], ""),
    ("gpu", "float32", 300_000, 1000, 1, {}, [PRIVATE], ""),
    ("gpu", "bfloat16", 300_000, 40, 1, {}, [PRIVATE], ""),
    ("gpu", "uint32", 300_000, 4000, 1, {}, [PRIVATE], ""),
    ("gpu", "float16", 400_000, 1000, 2, {}, [PRIVATE], ""),
    ("gpu", "float32", 40_000, 64, 1, {}, [PRIVATE], ""),
    ("gpu", "float32", 12_800, 100, 2, ALWAYS, [PRIVATE], ""),
    ("gpu", "float16", 2000, 10, 1, ALWAYS, [PRIVATE], ""),
    ("gpu", "float16", 100_000, 1000, 1, ALWAYS, [PRIVATE], ""),
    ("gpu", "float32", 5000, 300, 3, IN_ORDER, [SORTED], ""),
    ("gpu", "int32", 5000, 300, 3, IN_ORDER, [ATOMIC], ""),
    ("gpu", "float64", 9000, 100, 1, IN_ORDER, [SORTED], ""),
    ("gpu", "float32", 500, 7, 2, IN_ORDER, [FEW], ""),
    ("gpu", "float32", 1_000_000, 50_000, 8, IN_ORDER, [SORTED], ""),
    ("gpu", "bfloat16", 300, 5000, 40, IN_ORDER, [SORTED], ""),
    ("gpu", "float16", 100_000, 3000, 1, IN_ORDER, [SORTED], ""),
    ("gpu", "float32", 60_000, 20_000, 400, {}, ["jof_sort_rows", SORTED], ""),
    ("gpu", "bfloat16", 20_000, 40_000, 256, {}, ["jof_sort_rows", SORTED], ""),
    ("gpu", "bfloat16", 60_000, 3000, 512, {}, ["jof_sort_rows", SORTED], ""),
    ("gpu", "complex64", 60_000, 20_000, 200, {}, ["jof_sort_rows", SORTED], ""),
    ("gpu", "float32", 3000, 500, 3, ALWAYS, ["jof_sort_rows", SORTED], ""),
    ("gpu", "float16", 3000, 500, 1, ALWAYS, [SORTED], ""),
    ("gpu", "complex128", 3000, 70_000, 1, ALWAYS, ["jof_sort_rows", SORTED], ""),
    ("gpu", "float16", 10_000, 200_000, 1, {}, [SORTED], ""),
    ("gpu", "int32", 3000, 500, 3, {}, [ATOMIC], ""),
    ("gpu", "float32", 3000, 500, 3, {}, [ATOMIC], ""),
    ("gpu", "float32", 8000, 500, 256, {}, [ATOMIC], "0,0,0"),
    ("gpu", "float32", 8191, 30, 32, {}, [ATOMIC], "0,0,0"),
    ("gpu", "float32", 8192, 30, 32, {}, [ATOMIC], "8,1,30,32"),
    ("gpu", "float32", 40_000, 100, 128, {}, [ATOMIC], "32,1,100,128"),
    ("gpu", "float32", 40_000, 1000, 128, {}, [ATOMIC], "0,0,0"),
    ("gpu", "float32", 70_000, 5000, 16, {}, [ATOMIC], ""),
    ("gpu", "float32", 70_000, 5000, 8, {}, [ATOMIC], ""),
    ("gpu", "float32", 90_000, 3000, 3, {}, [ATOMIC], "2,1,3000,3"),
    ("gpu", "int32", 90_000, 3000, 3, {}, [ATOMIC], ""),
    ("gpu", "bfloat16", 2048, 10, 64, {}, [ATOMIC], "8,1,10,64"),
    ("gpu", "float16", 40_000, 512, 1, {}, [ATOMIC], "4,1,512,1"),
    ("gpu", "float16", 2048, 10, 1, {}, [ATOMIC], "1,1,10,1"),
    ("gpu", "float16", 40_000, 70_000, 17, {}, [ATOMIC], "1,1,70000,17"),
    ("gpu", "float16", 300, 5000, 33, {}, [ATOMIC], "0,0,0"),
    ("gpu", "bfloat16", 300, 5000, 40, {}, [ATOMIC], "0,0,0"),
    ("gpu", "bfloat16", 3000, 500, 8, {}, [ATOMIC], "1,1,500,8"),
    ("gpu", "float16", 30, 500, 33, {}, [FEW], ""),
    ("gpu", "bfloat16", 200, 90, 704, {}, [FEW], ""),
    ("gpu", "float32", 100, 500, 40, {}, [ATOMIC], "0,0,0"),
    ("gpu", "complex64", 1000, 20, 7, ALWAYS, [FEW], ""),
    ("gpu", "float32", 1, 1000, 1, ALWAYS, [FEW], ""),
    ("gpu", "float64", 1000, 50, 3, ALWAYS, [FEW], ""),
    ("gpu", "float16", 128, 100, 5, IN_ORDER, [FEW], ""),
]


def strategies(of):
    """Parametrizes a test by the STRATEGIES of a platform."""
    names = ("dtype", "count", "size", "width", "options", "targets", "scratch")
    rows = [row for platform, *row in STRATEGIES if platform == of]
    ids = ["-".join(map(str, (*row[:4], *row[4]))) for row in rows]
    return pytest.mark.parametrize(names, rows, ids=ids)


@pytest.mark.skipif(not _native.available("cuda"), reason="the _cuda module was not built")
@strategies("gpu")
def test_strategies_on_a_gpu(dtype, count, size, width, options, targets, scratch):
    """Exports for CUDA, on machines with and without a GPU."""

    def f(updates, ids):
        return jof.segment_sum(updates, ids, size, **options)

    types = jax.ShapeDtypeStruct((count, width), dtype), jax.ShapeDtypeStruct((count,), "int32")
    checks = jof.export_checks()
    export = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(*types)
    module = export.mlir_module()
    assert set(re.findall(r"custom_call @(jof_\w+)", module)) == set(targets)
    if scratch:
        # The call's second result. An absent operand has the shape (0, 0, 0), too.
        (found,) = re.findall(r"-> \(tensor<\S+>, tensor<(\S+)xf32>\)", module)
        assert found == scratch.replace(",", "x")


@pytest.mark.skipif(not _native.available("cuda"), reason="the _cuda module was not built")
@pytest.mark.parametrize(
    ("batch", "count", "parts"),
    [(64, 300_000, 2), (3, 300_000, 37), (200, 5000, 0), (200, 8, None), (3, 5000, None)],
)
def test_problems_of_a_batch_have_private_sums_each(batch, count, parts):
    """Blocks take one problem each, or several if `parts` is 0.

    Few problems without enough work for a block, and those with few updates, use atomics.
    """

    def f(updates, ids):
        return jax.vmap(lambda x: jof.segment_sum(x, ids, 70))(updates)

    types = jax.ShapeDtypeStruct((batch, count), "float32"), jax.ShapeDtypeStruct((count,), "int32")
    checks = jof.export_checks()
    export = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(*types)
    module = export.mlir_module()
    assert re.findall(r"custom_call @(jof_\w+)", module) == [ATOMIC if parts is None else PRIVATE]
    assert (f"tensor<{parts}x{batch}x70x1xf32>" in module) == (parts is not None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ids", ["any", "one row"])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32", "complex64"]
)
@pytest.mark.parametrize(
    ("batch", "count", "rows", "width"),
    [(64, 1, 1, 1), (70, 9, 7, 1), (300, 33, 5, 3), (77, 64, 64, 2), (65, 900, 130, 4)],
)
def test_many_small_problems(batch, count, rows, width, dtype, ids):
    """Those of one block, with ids that are dropped, wrapped or clipped, and with an operand."""
    rng = rng_for(batch, count, dtype)
    updates, operand = (rng.integers(-2, 3, (batch, n, width)).astype(dtype) for n in (count, rows))
    if dtype == "complex64":
        updates = updates + np.complex64(1j) * rng.integers(-2, 3, updates.shape)
        updates = updates.astype(dtype)
    low, high = (-rows, 2 * rows) if ids == "any" else (rows - 1, rows)
    ids = rng.integers(low, high, (batch, count)).astype(np.int32)

    def add(operand, ids, updates):
        return (
            jof.segment_sum(updates, ids, rows, implementation="native"),
            jof.scatter_add(operand, ids, updates, implementation="native"),
            jof.scatter_add(operand, ids, updates, mode="clip", implementation="native"),
            jof.segment_sum(jnp.ones(count, dtype), ids, rows, implementation="native"),
            jof.scatter_max(operand, ids, updates, implementation="native")
            if dtype != "complex64"
            else operand,
        )

    found = jax.jit(jax.vmap(add))(operand, ids, updates)
    for b in range(batch):
        zeros, ones = np.zeros_like(operand[b]), np.ones((count, 1), dtype)
        dropped, wrapped, clipped = (
            oracle.named_rows(ids[b], rows, wrap=wrap, clip=clip)
            for wrap, clip in ((False, False), (True, False), (True, True))
        )
        expected = [
            oracle.scatter_add(zeros, dropped, updates[b]),
            oracle.scatter_add(operand[b], wrapped, updates[b]),
            oracle.scatter_add(operand[b], clipped, updates[b]),
            oracle.scatter_add(zeros[:, :1], dropped, ones)[:, 0],
        ]
        for f, e in zip(found, expected, strict=False):
            np.testing.assert_array_equal(np.asarray(f[b]), e.astype(dtype))
        if dtype != "complex64":
            largest = operand[b].copy()
            is_row = wrapped >= 0
            np.maximum.at(largest, wrapped[is_row], updates[b][is_row])
            np.testing.assert_array_equal(np.asarray(found[-1][b]), largest)


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("reducer", ["max", "min"])
def test_gradients_of_maxima_of_nan(reducer, implementation):
    """A row that no id names keeps its gradient, also if it is NaN, as in jax."""
    x = jnp.array([1, np.nan, np.nan, 3], jnp.float32)
    ids, sign = jnp.array([0, 2, 9]), 1 if reducer == "max" else -1
    u = jnp.array([2, 2, np.nan], jnp.float32) * sign
    reduce = getattr(jof, f"scatter_{reducer}")
    f = functools.partial(reduce, implementation=implementation)
    scale = jnp.arange(1, 5, dtype=jnp.float32)
    dx, du = jax.grad(lambda x, u: (f(x, ids, u) * scale).sum(), (0, 1))(x, u)
    np.testing.assert_array_equal(dx, [0, 2, 0, 4])
    np.testing.assert_array_equal(du, [1, 0, 0])
    of_jax = jax.grad(lambda x: (getattr(x.at[ids], reducer)(u) * scale).sum())(x)
    np.testing.assert_array_equal(dx, of_jax)
    t = jax.jvp(lambda x: f(x, ids, u), [x], [scale])[1]
    np.testing.assert_array_equal(t, [0, 2, 0, 4])


@strategies(BACKEND)
def test_strategies(dtype, count, size, width, options, targets, scratch):
    rng = rng_for(count, size, width)
    updates = rng.integers(-2, 3, size=(count, width)).astype(dtype)
    operand = rng.integers(-2, 3, size=(size, width)).astype(dtype)
    hot = np.where(rng.random(count) < 0.5, size // 2, rng.integers(-size // 50, size, count))
    for ids in (rng.integers(-3, size + 3, size=count), hot):
        if "indices_are_sorted" in options:
            ids = np.sort(ids)
        rows = oracle.named_rows(ids, size, wrap=False, clip=False)
        for base in (None, operand):

            def f(updates, ids, base=base):
                if base is None:
                    return jof.segment_sum(updates, ids, size, **options)
                # Ids that do not wrap.
                return jof.scatter_add(base, jnp.where(ids < 0, size, ids), updates, **options)

            if base is not None and "indices_are_sorted" in options:
                ids = np.sort(np.where(ids < 0, size, ids))
                rows = oracle.named_rows(ids, size, wrap=False, clip=False)
            compiled = jax.jit(f).lower(updates, ids.astype(np.int32)).compile()
            hlo = compiled.as_text()
            assert sorted(TARGET.findall(hlo)) == sorted(targets)
            if scratch:
                assert f"f32[{scratch}]" in hlo
            total = oracle.scatter_add(
                np.zeros_like(operand) if base is None else base, rows, updates
            )
            actual = np.asarray(compiled(updates, ids.astype(np.int32)))
            if dtype in ("float16", "bfloat16"):
                assert_same_bits(actual + actual.dtype.type(0), oracle.rounded(total, dtype))
            else:
                np.testing.assert_array_equal(actual, like_sums(total, dtype))


@pytest.mark.parametrize(
    ("dtype", "width"), [("float16", 1), ("float32", 3), ("int32", 1), ("bfloat16", 16)]
)
def test_runs(dtype, width):
    """Run lengths around the length of the chunks that sorted ids are cut into, empty segments
    between the runs, and dropped rows at both ends."""
    lengths = {
        "of all lengths": [1, 2, 3, 0, 1023, 1024, 1025, 0, 0, 2, 3000, 1, 100],
        "one": [0, 0, 5000, 0],
        "the first": [4097],
        "single ones": [1] * 2500,
        "two halves": [2048, 2048],
        "around a hot one": [1, 4094, 1],
    }
    calls, expected = [], []
    for runs, dropped in itertools.product(lengths.values(), (0, 1500)):
        ids = np.repeat(np.arange(-1, len(runs) + 1), [dropped, *runs, dropped])
        data = rng_for(len(ids)).integers(-1, 2, size=(len(ids), width)).astype(dtype)
        zeros = np.zeros((len(runs), width), dtype)
        rows = oracle.named_rows(ids, len(runs), wrap=False, clip=False)
        for options in ({}, IN_ORDER, ALWAYS):
            f = functools.partial(jof.segment_sum, num_segments=len(runs), **options)
            calls.append((f, (data, ids)))
            expected.append(like_sums(oracle.scatter_add(zeros, rows, data), dtype))
    for actual, wanted in zip(together(calls), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    ("options", "implementation"), [({}, None), (IN_ORDER, None), (ALWAYS, None), ({}, "xla")]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_rows_of_nothing(dtype, options, implementation):
    """No rows, no updates, empty rows, more rows than updates, updates that are all dropped."""
    options = {**options, "implementation": implementation}
    calls, expected = [], []
    for count, size, width in itertools.product((0, 3), (0, 20), (0, 1, 9)):
        rng = rng_for(count, size, width)
        data = exact_terms(rng, (count, width), dtype)
        operand = exact_terms(rng, (size, width), dtype)
        for ids in (np.full(count, size + 3), np.sort(rng.integers(0, 20, size=count))):
            rows = oracle.named_rows(ids, size, wrap=True, clip=False)
            f = functools.partial(jof.segment_sum, segment_ids=ids, num_segments=size, **options)
            calls.append((f, (data,)))
            expected.append(oracle.scatter_add(np.zeros_like(operand), rows, data))
            f = functools.partial(jof.scatter_add, indices=ids, **options)
            calls.append((lambda x, y, f=f: f(x, updates=y), (operand, data)))
            expected.append(oracle.scatter_add(operand, rows, data))
    for k, (actual, total) in enumerate(zip(together(calls), expected, strict=True)):
        if k % 2:
            assert_same_bits(actual, like_sums(total, dtype))
        else:
            assert_same_sums(actual, like_sums(total, dtype), implementation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("options", [{}, IN_ORDER, ALWAYS, {**IN_ORDER, **ALWAYS}], ids=str)
def test_the_same_bits_on_every_run(dtype, options):
    """CPUs always give the same bits."""
    if BACKEND == "gpu" and not options:
        pytest.skip("not promised on GPUs")
    calls = []
    for count, size, width in (*PROBLEMS, (100_000, 100, 1), (20_000, 300, 16)):
        rng = rng_for(count, size)
        ids = rng.integers(-1, size + 1, size=count)
        ids[: count // 2] = 3
        ids = np.sort(ids) if "indices_are_sorted" in options else ids
        data, operand = (normals(rng, (n, width), dtype) for n in (count, size))
        table = jax.ShapeDtypeStruct(operand.shape, dtype)

        def f(operand, ids, data, size=size, table=table):
            options_of_lookup = {k: v for k, v in options.items() if k == "deterministic"}
            with_lookup = BACKEND == "cpu" or options_of_lookup

            def lookup(table):
                return jof.embedding_lookup(table, ids % size, **options_of_lookup)

            inside = jnp.where(ids < 0, size, ids)
            return (
                jof.segment_sum(data, ids, size, **options),
                jof.scatter_add(operand, inside, data, **options),
                *(jax.linear_transpose(lookup, table)(data) if with_lookup else ()),
            )

        calls.append((f, (operand, ids, data)))
    fs, arrays = zip(*calls, strict=True)
    run = jax.jit(lambda arrays: [f(*xs) for f, xs in zip(fs, arrays, strict=True)])
    first = run(arrays)
    for _ in range(9):
        jax.tree.map(assert_same_bits, run(arrays), first)


def test_ids_that_break_the_promise_to_be_sorted():
    """The sums are wrong, but no other memory is touched, and later sums are right."""
    ids = rng_for(0).integers(-500, 500, size=20_000)
    data = np.ones((20_000, 3), np.float32)
    for _ in range(3):
        broken = jof.segment_sum(data, ids, 400, indices_are_sorted=True)
        assert broken.shape == (400, 3)
        rows = oracle.named_rows(ids, 400, wrap=False, clip=False)
        expected = oracle.scatter_add(np.zeros((400, 3)), rows, data)
        np.testing.assert_array_equal(jof.segment_sum(data, ids, 400), expected)


@pytest.mark.xdist_group("one process, for its memory")
@pytest.mark.skipif(BACKEND != "gpu", reason="needs 20 GB of device memory: only on a GPU")
@pytest.mark.parametrize(("width", "size"), [(128, 1000), (1, 500)])
def test_more_than_two_to_the_31_updates(width, size):
    count = 2**31 // width + 1001

    @jax.jit
    def f():
        n = jax.lax.iota(jnp.int64, count)
        column = (jnp.arange(width) % 2).astype(jnp.bfloat16)
        data = (n % 3 - 1).astype(jnp.bfloat16)[:, None] + column
        data = data.reshape(count) if width == 1 else data
        return jof.segment_sum(data, (n * 7 % (size + 1)).astype(jnp.int32), size)

    expected = np.zeros((size, 2))
    period = 3 * (size + 1)  # the pairs of terms and ids repeat
    n = np.arange(period)
    for begin, times in ((0, count // period), (count // period * period, 1)):
        some = n[: period if times > 1 else count - begin]
        rows = oracle.named_rows((begin + some) * 7 % (size + 1), size, wrap=False, clip=False)
        terms = ((begin + some) % 3 - 1)[:, None] + np.arange(2)
        expected += times * oracle.scatter_add(np.zeros((size, 2)), rows, terms)
    expected = expected[:, np.arange(width) % 2].astype(jnp.bfloat16)
    assert_same_values(np.asarray(f()).reshape(size, width), expected)


@pytest.mark.xdist_group("one process, for its memory")
@pytest.mark.skipif(BACKEND != "gpu", reason="needs 15 GB of device memory: only on a GPU")
@pytest.mark.parametrize("width", [128, 1])
def test_more_than_two_to_the_31_elements_of_an_operand(width):
    size = 2**31 // width + 77

    @functools.partial(jax.jit, donate_argnums=0)
    def add(operand, ids, updates):
        return jof.scatter_add(operand, ids, updates)

    ids = np.array([0, size - 1, -1, size // 2, size, -size, -size - 1])
    operand = jnp.ones((size, width), jnp.bfloat16)
    table = add(operand, ids, np.ones((7, width), jnp.bfloat16))
    looked_up = np.asarray(jof.embedding_lookup(table, np.append(ids, [1, size - 2])))
    expected = np.array([3, 3, 3, 2, np.nan, 3, np.nan, 1, 1])[:, None]
    np.testing.assert_array_equal(looked_up.astype(float), np.broadcast_to(expected, (9, width)))
    assert float(jnp.sum(table != 1)) == 3 * width


# --- derivatives ----------------------------------------------------------------------------------

IDS = np.array([[3, -1, 0], [7, 3, -9]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_derivatives_to_second_order(mode, implementation):
    """With nonlinear functions before and after the op, on complex numbers."""
    dtype = "complex128"
    rng = rng_for(dtype)
    x, y = normals(rng, (5, 2), dtype), normals(rng, (2, 3, 2), dtype)
    options = {"implementation": implementation}

    def add(x, y):
        return jnp.sin(jof.scatter_add(x * x, IDS, y * y, mode="clip", **options))

    def total(y):
        return jnp.sin(jof.segment_sum((y * y).reshape(6, 2), IDS.reshape(-1), 5, **options))

    def lookup(x):
        return jnp.sin(jof.embedding_lookup(x * x, IDS % 5, **options))

    for f, xs in ((add, (x, y)), (total, (y,)), (lookup, (x,))):
        check_grads(jax.jit(f), xs, order=2, modes=[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_of_dropped_rows_is_zero(implementation):
    table, dy = np.ones((5, 2)), exact_terms(rng_for(0), (2, 3, 2), "float64")

    def pull(f, x):
        return jax.vjp(f, x)[1](dy)[0]

    actual = pull(lambda t: jof.embedding_lookup(t, IDS, implementation=implementation), table)
    assert_same_values(actual, on_cpu(pull, lambda t: jnp.take(t, IDS, axis=0), table))
    for mode in ("drop", "fill", "clip"):

        def weighted(f, updates):
            return jnp.sum(f(updates) * np.arange(10.0).reshape(5, 2))

        def ours(updates, mode=mode):
            return jof.scatter_add(table, IDS, updates, mode=mode, implementation=implementation)

        def theirs(updates, mode=mode):
            return jnp.asarray(table).at[IDS].add(updates, mode=mode)

        actual = jax.grad(functools.partial(weighted, ours))(dy)
        assert_same_values(actual, on_cpu(jax.grad(functools.partial(weighted, theirs)), dy))


FUNCTIONS = {
    "segment_sum": (
        lambda x, ids, _, **options: jof.segment_sum(x, ids[:, 0], 4, **options),
        lambda x, ids, _: jax.ops.segment_sum(x, ids[:, 0], 4),
    ),
    "scatter_add": (
        lambda x, ids, y, **options: jof.scatter_add(x, ids, y, mode="clip", **options),
        lambda x, ids, y: jnp.asarray(x).at[ids].add(y, mode="clip"),
    ),
    "embedding_lookup": (
        lambda x, ids, _, **options: jof.embedding_lookup(x, ids % 5, **options),
        lambda x, ids, _: jnp.take(x, ids % 5, axis=0),
    ),
}


def operands(name, *leading):
    rng = rng_for(name)
    rows = 6 if name == "segment_sum" else 5
    x = exact_terms(rng, (*leading, rows, 2), "float32")
    ids = rng.integers(-2, 6, size=(*leading, 6, 3))
    return x, ids, exact_terms(rng, (*leading, 6, 3, 2), "float32")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ids_have_float0_tangents(name):
    x, ids, y = operands(name)
    zero = np.zeros(ids.shape, jax.dtypes.float0)

    def run(f):
        primals, tangents = (x, ids, y), (x, zero, y)
        out, linear = jax.linearize(f, *primals)
        loss = jax.grad(lambda *xs: jnp.sum(f(*xs) ** 2), argnums=(0, 1, 2), allow_int=True)
        grads = loss(*primals)
        assert grads[1].dtype == jax.dtypes.float0
        closed = jax.jvp(lambda x, y: f(x, ids, y), (x, y), (x, y))
        both = jax.jvp(f, primals, tangents)
        return out, linear(*tangents), grads[0], grads[2], closed, both

    ours, theirs = FUNCTIONS[name]
    compiled = on_cpu(jax.jit(run, static_argnums=0), theirs)
    jax.tree.map(assert_same_values, run(ours), compiled)


# --- batching -------------------------------------------------------------------------------------


def batch_axes():
    """Every combination of the operands' batch axes: none, first or last."""
    for name in FUNCTIONS:
        last = (None,) if name != "scatter_add" else (None, 1)
        for axes in itertools.product((None, 0, -1), (None, 0, -1), last):
            if any(axis is not None for axis in axes):
                yield pytest.param(name, axes, id=f"{name}-{axes}")


@pytest.mark.parametrize(("name", "axes"), [*batch_axes()])
def test_vmap_over_any_operands(name, axes):
    ours, theirs = FUNCTIONS[name]
    xs = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(operands(name, 2), axes, strict=True)
    ]

    def run(f):
        def value_and_grad(*xs):
            return jax.value_and_grad(lambda *xs: jnp.sum(f(*xs) ** 2), argnums=(0, 2))(*xs)

        both = (jax.vmap(g, in_axes=axes) for g in (f, value_and_grad))
        return jax.jit(lambda *xs, both=(*both,): [g(*xs) for g in both])

    compiled = run(ours).lower(*xs).compile()
    assert not re.search(r"\bwhile\(|\bsort\(|\bgather\(", compiled.as_text())
    jax.tree.map(assert_same_values, compiled(*xs), on_cpu(run(theirs), *xs))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_makes_no_loop(name):
    xs = operands(name, 2, 3)
    for implementation in IMPLEMENTATIONS:
        f = functools.partial(FUNCTIONS[name][0], implementation=implementation)
        loss = jax.grad(lambda *xs, f=f: jnp.sum(f(*xs) ** 2))
        for g in (f, loss):
            jaxpr = str(jax.make_jaxpr(jax.vmap(jax.vmap(g)))(*xs))
            assert not re.search(r"\b(while|scan)\[", jaxpr)
        actual = jax.vmap(jax.vmap(f))(*xs)
        assert_same_values(actual, on_cpu(jax.vmap(jax.vmap(FUNCTIONS[name][1])), *xs))


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("count", "size", "width"), [(9000, 100, 3), (300, 500, 17)])
def test_donated_operand_is_added_to_in_place(count, size, width, dtype):
    rng = rng_for(count)
    operand, updates = (exact_terms(rng, (n, width), dtype) for n in (size, count))
    ids = rng.integers(0, size, size=count).astype(np.int32)
    x = jnp.asarray(operand) + 0  # a new buffer
    compiled = jax.jit(jof.scatter_add, donate_argnums=0).lower(x, ids, updates).compile()
    hlo = compiled.as_text()
    assert "input_output_alias={ {}: (0, {}" in hlo
    assert not re.search(r"= \S+ copy\(", hlo), hlo
    assert compiled.memory_analysis().alias_size_in_bytes == operand.nbytes
    where = x.unsafe_buffer_pointer()
    result = compiled(x, ids, updates)
    assert x.is_deleted()
    assert result.unsafe_buffer_pointer() == where
    expected = oracle.scatter_add(operand, ids, updates)
    np.testing.assert_allclose(np.asarray(result, float), expected, rtol=1e-3)

    kept = jnp.asarray(operand)
    jax.jit(jof.scatter_add)(kept, ids, updates)
    assert_same_bits(kept, operand)


# --- training -------------------------------------------------------------------------------------


def losses(step, parameters):
    step = jax.jit(jax.value_and_grad(step))
    result = []
    for _ in range(8):
        loss, grads = step(parameters)
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, grads)
        result.append(loss)
    assert result[-1] < 0.95 * result[0]
    return np.array(result)


def test_training_of_a_graph_network():
    """Two layers of message passing; each node takes the mean of its incoming messages."""
    rng = rng_for("graph")
    nodes, edges, width = 50, 300, 8
    senders, receivers = rng.integers(0, nodes, size=(2, edges))
    features, targets = normals(rng, (nodes, width), "float64"), normals(rng, (nodes,), "float64")
    first, second = 0.3 * normals(rng, (2, width, width), "float64")
    parameters = (first, second, normals(rng, (width,), "float64"))

    def loss(segment_sum, parameters):
        *layers, readout = parameters
        h = features
        degree = 1 + segment_sum(np.ones(edges), receivers, nodes)
        for w in layers:
            arrived = segment_sum((h @ w)[senders], receivers, nodes)
            h = jnp.tanh(h + arrived / degree[:, None])
        return jnp.mean((h @ readout - targets) ** 2)

    actual = losses(functools.partial(loss, jof.segment_sum), parameters)
    expected = on_cpu(losses, functools.partial(loss, jax.ops.segment_sum), parameters)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


def test_training_of_an_embedding():
    """A bag of words; some words occur often."""
    rng = rng_for("embedding")
    words = (20 * rng.uniform(size=(64, 7)) ** 3).astype(np.int32)
    labels = rng.integers(0, 2, size=64)
    parameters = (normals(rng, (20, 6), "float64"), normals(rng, (6,), "float64"))

    def loss(lookup, parameters):
        table, readout = parameters
        logits = lookup(table, words).mean(axis=1) @ readout
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

    def take(table, ids):
        return jnp.take(table, ids, axis=0)

    actual = losses(functools.partial(loss, jof.embedding_lookup), parameters)
    expected = on_cpu(losses, functools.partial(loss, take), parameters)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


# --- bad input ------------------------------------------------------------------------------------

X, ID, U = np.ones((4, 3), np.float32), np.array([0, 1, 1]), np.ones((3, 3), np.float32)
sums, adds, looks = jof.segment_sum, jof.scatter_add, jof.embedding_lookup
KEYS = jax.random.split(jax.random.key(0), 4)
# (function, arguments, keyword arguments, exception, fragments of the message after the function's
# name: the argument, and the actual or expected value)
BAD_CALLS = [
    (sums, (U, ID + 0.5, 3), {}, TypeError, ["segment_ids", "integer", "float64"]),
    (sums, (U, ID > 0, 3), {}, TypeError, ["segment_ids", "integer", "bool"]),
    (sums, (U, [0, 1, 1], 3), {}, TypeError, ["segment_ids", "list"]),
    (sums, (U, None, 3), {}, TypeError, ["segment_ids", "NoneType"]),
    (sums, (U, 1.0, 3), {}, TypeError, ["segment_ids", "integer"]),
    (sums, ([1.0], ID, 3), {}, TypeError, ["data", "list"]),
    (sums, (U > 0, ID, 3), {}, TypeError, ["data", "bool"]),
    (sums, (U.astype(jnp.float8_e4m3fn), ID, 3), {}, TypeError, ["data", "float8_e4m3fn"]),
    (sums, (jnp.ones((3, 3), jnp.int4), ID, 3), {}, TypeError, ["data", "int4"]),
    (sums, (KEYS[:3], ID, 3), {}, TypeError, ["data", "key<fry>"]),
    (sums, (U[:2], ID, 3), {}, ValueError, ["data", "(3, 3)", "(2, 3)"]),
    (sums, (X, ID, 3), {}, ValueError, ["data", "(3, 3)", "(4, 3)"]),
    (sums, (U, ID, -1), {}, ValueError, ["num_segments", "-1"]),
    (sums, (U, ID, 2.0), {}, TypeError, ["num_segments", "2.0"]),
    (sums, (U, ID, True), {}, TypeError, ["num_segments", "True"]),
    (sums, (U, ID, "3"), {}, TypeError, ["num_segments", "'3'"]),
    (sums, (U, ID - 5), {}, ValueError, ["num_segments", "-3"]),
    (sums, (U, ID, 3), {"bucket_size": 0}, ValueError, ["bucket_size", "positive", "0"]),
    (sums, (U, ID, 3), {"bucket_size": -2}, ValueError, ["bucket_size", "-2"]),
    (sums, (U, ID, 3), {"bucket_size": 1.5}, TypeError, ["bucket_size", "1.5"]),
    (sums, (U, IDS, 3), {"bucket_size": 2}, ValueError, ["segment_ids", "(2, 3)"]),
    (sums, (U, ID, 3), {"mode": "wrap"}, ValueError, ["mode", "drop", "'wrap'"]),
    (sums, (U, ID, 3), {"mode": 1}, ValueError, ["mode", "1"]),
    (sums, (U, ID, 3), {"implementation": "cuda"}, ValueError, ["implementation", "'cuda'"]),
    (adds, (X, ID + 0.5, U), {}, TypeError, ["indices", "float64"]),
    (adds, (X, ID > 0, U), {}, TypeError, ["indices", "bool", "jnp.where"]),
    (adds, (X, (ID, ID), U), {}, TypeError, ["indices", "tuple"]),
    (adds, (X, slice(3), U), {}, TypeError, ["indices", "slice"]),
    (adds, (X[0, 0], ID, U), {}, ValueError, ["operand", "1 dimension", "()"]),
    (adds, (1.0, ID, U), {}, TypeError, ["operand", "float"]),
    (adds, (X.tolist(), ID, U), {}, TypeError, ["operand", "list"]),
    (adds, (X > 0, ID, U), {}, TypeError, ["operand", "bool"]),
    (adds, (X.astype(jnp.float8_e5m2), ID, U), {}, TypeError, ["operand", "float8_e5m2"]),
    (adds, (X, ID, U.astype(complex)), {}, TypeError, ["updates", "float32", "complex128"]),
    (adds, (X.astype(int), ID, U), {}, TypeError, ["updates", "int64", "float32"]),
    (adds, (X.astype("i1"), ID, U.astype("i4")), {}, TypeError, ["updates", "int8", "int32"]),
    (adds, (X, ID, U[:2]), {}, ValueError, ["updates", "(3, 3)", "(2, 3)"]),
    (adds, (X, ID, U[:, :2]), {}, ValueError, ["updates", "(3, 3)", "(3, 2)"]),
    (adds, (X, ID, U[None, None]), {}, ValueError, ["updates", "(1, 1, 3, 3)"]),
    (adds, (X, ID, "1"), {}, TypeError, ["updates", "str"]),
    (adds, (X, ID, U), {"mode": "one"}, ValueError, ["mode", "'one'"]),
    (adds, (X, ID, U), {"mode": b"drop"}, ValueError, ["mode", "b'drop'"]),
    (adds, (X, ID, U), {"implementation": 1}, ValueError, ["implementation", "1"]),
    (looks, (X, ID * 1.0), {}, TypeError, ["ids", "float64"]),
    (looks, (X, ID > 0), {}, TypeError, ["ids", "bool"]),
    (looks, (X, [0]), {}, TypeError, ["ids", "list"]),
    (looks, (X[0, 0], ID), {}, ValueError, ["table", "()"]),
    (looks, (X.tolist(), ID), {}, TypeError, ["table", "list"]),
    (looks, (jnp.ones((3, 3), jnp.int4), ID), {}, TypeError, ["table", "int4"]),
    (looks, (KEYS, ID), {}, TypeError, ["table", "key<fry>"]),
    (looks, (X.astype("M8[s]"), ID), {}, TypeError, ["table", "datetime64"]),
    (looks, (X[:0], ID), {}, IndexError, ["table", "rows", "(0, 3)"]),
    (looks, (X, ID), {"implementation": "gpu"}, ValueError, ["implementation", "'gpu'"]),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "exception", "fragments"), BAD_CALLS)
def test_bad_call(function, args, kwargs, exception, fragments):
    name = function.__name__
    with pytest.raises(exception, match=rf"^{name}: ") as caught:
        function(*args, **kwargs)
    assert type(caught.value) is exception
    message = str(caught.value).removeprefix(name)
    for fragment in fragments:
        # The fragment must begin a word.
        assert re.search(rf"(?<!\w){re.escape(fragment)}", message), f"{fragment!r}: {message}"


def test_number_of_segments_that_is_traced():
    with pytest.raises(jax.errors.ConcretizationTypeError, match="num_segments"):
        jax.jit(lambda ids: jof.segment_sum(U, ids))(ID)
    with pytest.raises(jax.errors.ConcretizationTypeError, match="num_segments"):
        jax.jit(lambda n: jof.segment_sum(U, ID, n))(3)


# --- 64-bit ids and arrays outside x64 ------------------------------------------------------------

# If these are truncated to 32 bits, some of them name a row.
FAR = (2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31) - 1, -(2**32), -(2**63))
FAR_UNSIGNED = (2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1)


def far_ids():
    yield np.array([*FAR, 1], np.int64)
    yield np.array([*FAR_UNSIGNED, 1], np.uint64)
    yield np.array([2**31, 2**32 - 1, 1], np.uint32)
    yield from (np.int64(FAR[1]), np.uint64(FAR_UNSIGNED[3]), np.uint32(2**32 - 1))
    yield from (*FAR, *FAR_UNSIGNED, 2**64, 2**80, -(2**63) - 1)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("mode", [None, "clip"])
def test_ids_of_the_host_are_not_cut(mode, x64):
    """NumPy and Python integers are exact; outside x64, jnp takes them modulo 2^32."""
    size, width = 5, 2
    with jax.enable_x64(x64):
        for ids in far_ids():
            data = np.arange(1, 1 + np.size(ids) * width, dtype=np.float32)
            data = data.reshape(*np.shape(ids), width)
            rows = oracle.named_rows(np.array(ids, object), size, wrap=True, clip=mode == "clip")
            expected = oracle.scatter_add(np.ones((size, width)), rows, data).astype(np.float32)
            operand = np.ones((size, width), np.float32)
            assert_same_bits(jof.scatter_add(operand, ids, data, mode=mode), expected)
            table = np.arange(10, dtype=np.float32).reshape(size, width)
            unwrapped = oracle.named_rows(np.array(ids, object), size, wrap=False, clip=True)
            looked_up = rows if mode is None else unwrapped  # jnp.take clips negative ids to 0
            expected = oracle.gather_rows(table, looked_up, np.nan)
            assert_same_bits(jof.embedding_lookup(table, ids, mode=mode), expected)
            modulo = np.array(ids, object) % size
            expected = oracle.gather_rows(table, np.asarray(modulo, np.int64), np.nan)
            assert_same_bits(jof.embedding_lookup(table, ids, mode="wrap"), expected)
            rows = oracle.named_rows(np.array(ids, object), size, wrap=False, clip=mode == "clip")
            data = data[..., 0]
            expected = oracle.scatter_add(np.zeros(size), rows, data).astype(np.float32)
            assert_same_bits(jof.segment_sum(data, ids, size, mode=mode), expected)


def test_number_of_segments_counts_exactly():
    for ids in (np.array([3, 255], np.uint8), jnp.array([3, 255], jnp.uint8)):
        assert jof.segment_sum(np.ones(2), ids).shape == (256,)
    with jax.enable_x64(False):
        for ids in (np.array([1, 2**32]), np.array([1, 2**40], np.uint64), 2**31):
            with pytest.raises(ValueError, match=r"^segment_sum: segment_ids\b.*\benable_x64\b"):
                jof.segment_sum(np.ones(np.shape(ids), np.float32), ids)


def test_rows_that_only_64_bits_count():
    """Outside x64, 32-bit ids cannot name every row of the table."""
    table = jax.ShapeDtypeStruct((2**31 + 8,), "int8")
    for ids in (2**31, np.array([2**31 + 7]), jnp.array([1], jnp.uint32)):
        lookup = functools.partial(jof.embedding_lookup, ids=ids)
        with (
            jax.enable_x64(False),
            pytest.raises(ValueError, match=r"^embedding_lookup: ids\b.*\benable_x64\b"),
        ):
            jax.eval_shape(lookup, table)
        assert jax.eval_shape(lookup, table).shape == np.shape(ids)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "implementation"), [("float64", None), ("int64", None), ("float64", "xla")]
)
def test_64_bit_arrays_outside_of_x64(dtype, implementation):
    """Arrays and their gradients stay 64-bit."""
    scale = 2**45 if dtype == "int64" else 2.0**-40
    table = (jnp.arange(12).reshape(4, 3) * scale + 1).astype(dtype)
    updates = jnp.full((5, 3), scale + 1).astype(dtype)
    ids = jnp.array([0, 2, -1, 7, 2**32])
    ct = updates[:4] if dtype == "float64" else None
    options = {"implementation": implementation}

    def results():
        fs = {
            "scatter_add": (lambda x, y: jof.scatter_add(x, ids, y, **options), (table, updates)),
            "number": (lambda x: jof.scatter_add(x, ids, 1, **options), (table,)),
            "ordered": (
                lambda x, y: jof.scatter_add(x, ids, y, deterministic=True, **options),
                (table, updates),
            ),
            "segment_sum": (lambda y: jof.segment_sum(y, ids, 4, **options), (updates,)),
            "buckets": (
                lambda y: jof.segment_sum(y, ids, 4, bucket_size=2, **options),
                (updates,),
            ),
            "lookup": (lambda x: jof.embedding_lookup(x, ids, **options), (table,)),
        }
        for name, (f, arrays) in fs.items():
            value, vjp = jax.vjp(f, *arrays) if ct is not None else (f(*arrays), None)
            assert value.dtype == dtype, name
            yield value, jax.jit(f)(*arrays)
            if ct is not None:
                yield vjp(updates if name == "lookup" else ct)
                yield jax.jvp(f, arrays, arrays)

    expected = [*map(np.asarray, jax.tree.leaves([*results()]))]
    with jax.enable_x64(False):
        actual = jax.tree.leaves([*results()])
    for a, e in zip(actual, expected, strict=True):
        assert_same_values(a, e)


# --- Python numbers and literals of a traced program ----------------------------------------------

X3, IDS3 = np.arange(3.0, dtype=np.float32), np.array([0, 2, 2])


@pytest.mark.parametrize(
    "call",
    [
        lambda add, total, take: jax.vjp(lambda x: take(x, 1), X3)[1](1.0),
        lambda add, total, take: jax.linear_transpose(lambda x: take(x, 1), X3)(1.0),
        lambda add, total, take: jax.grad(jax.jit(lambda x: take(x, 1)))(X3),
        lambda add, total, take: jax.vmap(jax.jit(lambda u: add(X3, 1, u)))(X3),
        lambda add, total, take: jax.vmap(jax.jit(lambda i: add(X3, i, 1.0)))(IDS3),
        lambda add, total, take: jax.vmap(jax.jit(lambda u: total(u, 1, 3)))(X3),
        lambda add, total, take: jax.grad(jax.jit(lambda u: add(X3, 1, u).sum()))(1.0),
        lambda add, total, take: jax.jvp(jax.jit(lambda u: add(X3, 1, u)), (1.0,), (1.0,)),
        lambda add, total, take: jax.grad(jax.jit(lambda u: total(u, IDS3, 3).sum()))(1.0),
        lambda add, total, take: jax.jvp(lambda u: total(u, 1, 3), (1.0,), (1.0,)),
        lambda add, total, take: jax.linear_transpose(lambda u: total(u, 1, 3), 1.0)(X3),
    ],
)
def test_numbers_among_primals_tangents_and_cotangents(call):
    """Values and weak types are jnp's."""

    def add(x, ids, updates):
        return jnp.asarray(x).at[ids].add(updates, mode="drop")

    with jax.enable_x64(False):
        actual = call(jof.scatter_add, jof.segment_sum, jof.embedding_lookup)
        expected = call(add, jax.ops.segment_sum, functools.partial(jnp.take, axis=0))
        for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            assert_same_bits(a, e)
            assert jax.typeof(a).weak_type == jax.typeof(e).weak_type


# --- the options of jnp.take ----------------------------------------------------------------------


@st.composite
def lookups(draw):
    """(table's shape, ids, axis, mode, fill value, dtype, seed)"""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    axis = draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    dtype = draw(st.sampled_from(MOVED))
    fills = [None, 0, -1, 2.75, True, np.float32(3), np.int8(-7)]
    fills += [np.nan, -np.inf, 300, 2**33]
    ids = draw(index_arrays(np.prod(shape, dtype=int), draw(INDEX_SHAPES), False))
    mode, fill = draw(st.sampled_from([None, "fill", "clip", "wrap"])), draw(st.sampled_from(fills))
    return shape, ids, axis, mode, fill, dtype, draw(st.integers(0, 2**32 - 1))


@pytest.mark.filterwarnings("ignore:invalid value|overflow encountered")
@HALF
@given(lookup=lookups(), implementation=st.sampled_from(IMPLEMENTATIONS))
def test_options_are_those_of_take(lookup, implementation):
    shape, ids, axis, mode, fill, dtype, seed = lookup
    table = any_bits(np.random.default_rng(seed), shape, dtype)
    options = {"axis": axis, "mode": mode, "fill_value": fill}
    f = functools.partial(jof.embedding_lookup, **options, implementation=implementation)
    actual = f(table, ids)
    if fit_32_bits(ids):
        # jnp computes with the row count in the ids' dtype, which may overflow: it gets wide ids.
        wide = ids.astype(np.int64)
        assert_same_values(actual, on_cpu(functools.partial(jnp.take, **options), table, wide))
    assert_same_bits(jax.jit(f)(table, jnp.asarray(ids)), actual)


@pytest.mark.parametrize("axis", [1, -1, None])
@pytest.mark.parametrize(
    ("mode", "implementation"), [(None, None), ("clip", None), ("wrap", None), ("clip", "xla")]
)
def test_derivatives_along_any_axis(mode, axis, implementation):
    table = normals(rng_for(1), (2, 5, 3), "float64")
    ids = np.array([[0, 2, -1], [7, 2, -9]])
    tangent = normals(rng_for(2), table.shape, "float64")

    def results(take, **options):
        f = functools.partial(take, axis=axis, mode=mode, **options)

        @jax.jit
        def run(table, tangent):
            return (
                jax.jvp(lambda t: jnp.nan_to_num(f(t, ids)), (table,), (tangent,)),
                jax.grad(lambda t: (jnp.nan_to_num(f(t, ids)) ** 3).sum())(table),
                jax.vmap(f, in_axes=(None, 0))(table, ids),
                [
                    jax.vmap(lambda t: f(t, ids), in_axes=i, out_axes=1)(jnp.stack([table] * 2, i))
                    for i in range(3)
                ],
            )

        return jax.tree.leaves(run(table, tangent))

    expected = on_cpu(lambda: results(jnp.take))
    for a, e in zip(
        results(jof.embedding_lookup, implementation=implementation), expected, strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-14, atol=0)


def test_promises_of_a_lookup():
    """Gradients under promises: these ids are sorted and unique once negative ids wrap."""
    table, ids = normals(rng_for(3), (3, 6), "float64"), np.array([0, 1, -3, 4, -1])
    for axis, mode in ((1, None), (-1, "wrap")):
        for promises in ({}, {"indices_are_sorted": True, "unique_indices": True}):
            f = functools.partial(jof.embedding_lookup, ids=ids, axis=axis, mode=mode, **promises)
            (ct,) = jax.grad(lambda t, f=f: f(t).sum())(table)[None]
            np.testing.assert_array_equal(ct, [[1, 1, 0, 1, 1, 1]] * 3)


@pytest.mark.parametrize("native", [*filter(_native.available, ("cpu", "cuda"))])
def test_lookup_along_an_axis_is_one_call(native):
    f = functools.partial(jof.embedding_lookup, ids=np.array([1, 0]), axis=1, fill_value=7)
    exported = jax.export.export(
        jax.jit(f), platforms=[native], disabled_checks=jof.export_checks()
    )(jax.ShapeDtypeStruct((4, 5, 3), "float32"))
    assert exported.mlir_module().count("custom_call @jof_gather_rows") == 1
    assert "transpose" not in exported.mlir_module()


@pytest.mark.filterwarnings("ignore:Casting complex")  # by jnp
@pytest.mark.parametrize(
    ("options", "exception"),
    [
        ({"axis": 2}, ValueError),
        ({"axis": -3}, ValueError),
        ({"axis": 1.0}, TypeError),
        ({"mode": "raise"}, NotImplementedError),
        ({"mode": "drop"}, ValueError),
        ({"mode": jax.lax.GatherScatterMode.CLIP}, ValueError),
        ({"fill_value": "0"}, TypeError),
        ({"fill_value": 1j}, TypeError),
        ({"fill_value": np.ones(1)}, Exception),
    ],
    ids=str,
)
def test_options_that_take_refuses(options, exception):
    """Errors have jnp's types and name the option."""
    (name,) = options
    with pytest.raises(exception, match=rf"^embedding_lookup: {name}\b"):
        jof.embedding_lookup(np.ones((2, 3)), 0, **options)
    if options == {"fill_value": 1j}:  # jax 0.8 drops the imaginary part, with a warning
        return
    with pytest.raises(exception):
        jnp.take(np.ones((2, 3)), 0, **{"axis": 0, **options})


def test_means_of_no_one_and_several_rows():
    data, ids = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([2, 0, 2, 4, 2, 0])
    expected = [data[ids == i].mean(0) if i in ids else np.zeros(2) for i in range(6)]
    np.testing.assert_array_equal(jof.segment_mean(data, ids, 6), np.float32(expected))


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softmax_of_a_long_16_bit_segment(dtype, implementation):
    """The sum of its exponentials is too large for float16, and for the precision of bfloat16."""
    rng = np.random.default_rng(0)
    logits, ct = (rng.integers(low, 3, 70_000).astype(dtype) for low in (-2, -1))
    ids = np.zeros(logits.shape, np.int32)

    def f(x):
        return jof.segment_softmax(x, ids, 1, implementation=implementation)

    y, pull = jax.vjp(f, logits)
    wide, wide_ct = logits.astype(np.float64), ct.astype(np.float64)
    expected = BY_NAME["segment_softmax"].exact(wide, ids, num_segments=1)
    (of_logits,) = BY_NAME["segment_softmax"].transpose(wide_ct, wide, ids, num_segments=1)
    info = jnp.finfo(dtype)
    for actual, exact in ((y, expected), (pull(ct)[0], of_logits)):
        assert actual.dtype == dtype
        actual, smallest = np.asarray(actual, np.float64), float(info.smallest_subnormal)
        np.testing.assert_allclose(actual, exact, rtol=0.51 * float(info.eps), atol=smallest)


def test_empty_axes_of_a_lookup():
    with pytest.raises(IndexError, match=r"^embedding_lookup: table\b"):
        jof.embedding_lookup(np.ones((2, 0)), 0, axis=1)
    for mode in (None, "clip", "wrap"):
        none = np.zeros((2, 0), int)
        assert jof.embedding_lookup(np.ones((3, 0)), none, axis=1, mode=mode).shape == (3, 2, 0)
        assert jof.embedding_lookup(np.ones((0, 2)), 1, axis=1, mode=mode).shape == (0,)
        assert jof.embedding_lookup(np.ones((2, 3)), none, axis=None, mode=mode).shape == (2, 0)


# --- the sharding of sums over segments -----------------------------------------------------------

MESH_SIZE = (2, 2)
needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


@needs_devices
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")  # of a small table
@pytest.mark.parametrize(
    "spec", [jax.P("a"), jax.P(None, "b"), jax.P(("a", "b")), jax.P()], ids=str
)
def test_out_sharding(spec):
    mesh = jax.make_mesh(MESH_SIZE, ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    data, ids = exact_terms(rng_for(4), (8, 4), "float32"), np.arange(8) % 3
    expected = oracle.scatter_add(np.zeros((4, 4), np.float32), ids, data)
    with jax.set_mesh(mesh):
        x = jax.device_put(data, jax.NamedSharding(mesh, jax.P("a", "b")))
        for out_sharding in (spec, jax.NamedSharding(mesh, spec)):
            f = jax.jit(
                functools.partial(jof.segment_sum, num_segments=4, out_sharding=out_sharding)
            )
            total, vjp = jax.vjp(lambda x, f=f: f(x, ids), x)
            assert_same_values(total, expected.astype(np.float32))
            assert jax.typeof(total).sharding.spec == jax.P(*spec, *(None,) * (2 - len(spec)))
            (gradient,) = vjp(total)
            np.testing.assert_array_equal(gradient, expected[ids])
            assert jax.typeof(gradient).sharding == jax.typeof(x).sharding


@needs_devices
def test_out_sharding_that_cannot_be():
    """No axis is silently ignored."""
    data, ids = np.ones(8, np.float32), np.arange(8) % 3
    with pytest.raises(ValueError, match="mesh"):
        jof.segment_sum(data, ids, 4, out_sharding=jax.P("a"))
    auto = jax.make_mesh(MESH_SIZE, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(auto):
        for wrong in (jax.P("a"), "a"):
            with pytest.raises((TypeError, ValueError)):
                jof.segment_sum(data, ids, 4, out_sharding=wrong)
        with pytest.raises(NotImplementedError, match=r"^segment_sum: out_sharding\b"):
            jof.segment_sum(data, ids, 4, bucket_size=2, out_sharding=jax.P())


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min", "segment_prod"])
def test_clipped_ids_in_buckets(name):
    """The rows that fill the last bucket belong to no segment, not to the last one."""
    data, ids = jnp.array([-1.0, -2.0, -3.0]), jnp.array([-4, 9, 1])
    reduce, plain = getattr(jof, name), getattr(jax.ops, name)
    for sign in (1, -1):
        found = reduce(sign * data, ids, 2, bucket_size=2, mode="clip")
        np.testing.assert_array_equal(found, plain(sign * data, jnp.clip(ids, 0, 1), 2))


@pytest.mark.parametrize(
    ("rows", "kind", "expected"),
    [
        (24_576, None, True),  # 96 KiB of sums
        (24_577, None, False),
        (24_577, "NVIDIA GeForce RTX 4090", False),
        (24_577, "NVIDIA RTX A4000", False),
        (40_960, "NVIDIA A100-SXM4-80GB", True),
        (40_960, "NVIDIA H200", True),
        (40_960, "NVIDIA GB200", True),
    ],
)
def test_where_private_sums_take_one_update(rows, kind, expected):
    problem = _scatter_policy.Problem("cuda", 1, 2**24, rows, 1, jnp.dtype("int32"))
    assert _scatter_policy.takes_one_update(problem, kind) == expected


@pytest.mark.parametrize(
    ("dtype", "inner", "rows", "strategy"),
    [
        ("float32", 3, 6_000, "private"),  # 72 KiB of sums: two copies
        ("float32", 3, 7_000, "atomic"),
        ("bfloat16", 2, 10_000, "private"),
        ("float32", 4, 1_280, "private"),  # 20 KiB: eight copies
        ("float32", 4, 1_300, "atomic"),
        ("complex64", 1, 10_000, "private"),  # two numbers
        ("complex64", 2, 1_300, "atomic"),  # four
    ],
)
def test_which_narrow_rows_have_private_sums_on_gpus(dtype, inner, rows, strategy):
    problem = _scatter_policy.Problem("cuda", 1, 9_000_000, rows, inner, jnp.dtype(dtype))
    assert _scatter_policy.plan(problem).strategy == strategy


@pytest.mark.parametrize(
    ("updates", "changes", "strategy"),
    [
        (1, {}, "atomic"),  # no scratch space
        (256, {"reducer": "max"}, "few"),
        (257, {"reducer": "max"}, "atomic"),
        (256, {"dtype": "bfloat16"}, "few"),
        (257, {"dtype": "bfloat16"}, "atomic"),
        (1024, {"ordered": True}, "few"),
        (1025, {"ordered": True}, "sorted"),
        (1024, {"reducer": "multiply"}, "few"),
        (1025, {"reducer": "multiply"}, "sorted"),
        (100, {"reducer": "max", "rows": 2048}, "atomic"),
        (100, {"reducer": "max", "inner": 256}, "few"),  # 2 blocks for each of 512 rows
        (100, {"reducer": "max", "inner": 257}, "atomic"),  # 9 blocks: a row is not whole packs
        (100, {"reducer": "max", "batch": 3}, "atomic"),
    ],
)
def test_when_sums_look_for_their_updates_on_gpus(updates, changes, strategy):
    sizes = {"batch": 1, "rows": 512, "inner": 8, "dtype": "float32", **changes}
    sizes["dtype"] = jnp.dtype(sizes["dtype"])
    problem = _scatter_policy.Problem("cuda", updates=updates, **sizes)
    assert _scatter_policy.plan(problem).strategy == strategy
