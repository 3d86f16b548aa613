"""Values of permute, against NumPy, and the plan that both backends follow."""

import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from tests.arrays import DTYPES, FLOAT8, any_bits, assert_same_bits, normals, rng_for

pytestmark = pytest.mark.usefixtures("x64")

BACKEND = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
IMPLEMENTATIONS = (None, "xla")
# One dtype of each size; the kernels are compiled per element size.
DTYPE_OF_SIZE = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}


def moves(shape, axes) -> bool:
    """Whether data moves: axes of size 1 do not affect the layout; empty arrays have no data."""
    moving = [axis % len(shape) for axis in axes if shape[axis] != 1]
    return moving != sorted(moving) and 0 not in shape


def compiled(functions, xs):
    """Compiles each function of its array into one program; many programs would take longer."""
    jitted = jax.jit(lambda xs: [f(x) for f, x in zip(functions, xs, strict=True)])
    return jitted.lower(xs).compile()


def permuted(problems) -> list[jax.Array]:
    """Permutes every (x, axes), and asserts that each is one native call."""
    xs = [jax.device_put(x) for x, _ in problems]
    program = compiled([functools.partial(jof.permute, axes=axes) for _, axes in problems], xs)
    if _native.available(BACKEND):
        calls = program.as_text().count('custom_call_target="jof_permute"')
        assert calls == sum(moves(x.shape, axes) for x, axes in problems)
    return program(xs)


def assert_permuted(problems) -> None:
    for y, (x, axes) in zip(permuted(problems), problems, strict=True):
        assert_same_bits(y, np.transpose(x, axes))


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_OF_SIZE.values())
def test_every_permutation_of_small_ranks(dtype):
    rng = rng_for(dtype)
    shapes = [(), (5,), (3, 7), (4, 3, 5), (2, 5, 3, 4)]
    xs = [any_bits(rng, shape, dtype) for shape in shapes]
    assert_permuted([(x, axes) for x in xs for axes in itertools.permutations(range(x.ndim))])


# (shape, axes) with every kind of memory access, around the sizes of 16-byte packs, of rows of 64
# and 128 elements, and of tiles.
EDGES = [
    *(((m, n), (1, 0)) for m, n in [(15, 17), (16, 64), (33, 31), (64, 64), (65, 127), (128, 80)]),
    *(((m, n), (1, 0)) for m, n in [(129, 63), (192, 257), (1, 300), (2, 301), (1000, 3)]),
    *(((3, m, n), (0, 2, 1)) for m, n in [(16, 16), (31, 100), (64, 128), (96, 33)]),
    *(((m, 3, n), (2, 1, 0)) for m, n in [(64, 64), (65, 5), (16, 160)]),
    *(((5, 6, n), (1, 0, 2)) for n in (1, 2, 3, 8, 16, 17, 63, 64, 100)),
    *(((2, h, 8, c), (0, 3, 1, 2)) for h in (5, 16) for c in (2, 3, 4, 5, 17)),
    *(((2, c, h, 8), (0, 2, 3, 1)) for h in (5, 16) for c in (2, 3, 4, 5, 17)),
    ((7, 5, 13, 11), (2, 0, 3, 1)),
    ((16, 3, 4, 16), (3, 2, 1, 0)),
    ((4, 2, 8, 16, 16), (2, 0, 3, 1, 4)),
    ((2,) * 10, (9, 0, 8, 1, 7, 2, 6, 3, 5, 4)),
    ((3, 2) * 4, (6, 4, 2, 0, 7, 5, 3, 1)),
]


@pytest.mark.parametrize("itemsize", DTYPE_OF_SIZE)
def test_edges(itemsize):
    dtype = DTYPE_OF_SIZE[itemsize]
    rng = rng_for("edges", dtype)
    assert_permuted([(any_bits(rng, shape, dtype), axes) for shape, axes in EDGES])


LARGE = [
    ((1024, 2048), (1, 0), "uint8"),
    ((1023, 1025), (1, 0), "bfloat16"),
    ((1024, 768), (1, 0), "float32"),
    ((4, 500, 513), (0, 2, 1), "float64"),
    ((64, 128, 16, 16), (2, 0, 1, 3), "uint8"),
    ((8, 256, 12, 64), (0, 2, 1, 3), "bfloat16"),
    ((8, 256, 12, 65), (0, 2, 1, 3), "bfloat16"),
    ((4, 256, 256, 3), (0, 3, 1, 2), "uint8"),
    ((4, 3, 256, 256), (0, 2, 3, 1), "float32"),
    ((1000, 130, 4), (0, 2, 1), "bfloat16"),
    ((1000, 3, 130), (0, 2, 1), "bfloat16"),
    ((33, 65, 29, 27), (2, 0, 3, 1), "bfloat16"),
    ((2, 2048, 2, 9, 26), (3, 1, 4, 2, 0), "bfloat16"),
    ((16, 32, 256, 2, 8), (0, 3, 1, 4, 2), "float16"),
    ((8, 3, 64, 32, 4, 4), (4, 2, 0, 5, 3, 1), "float16"),
    ((70, 9, 300, 64), (3, 1, 0, 2), "uint8"),
    ((8, 10, 200, 64), (2, 0, 3, 1), "float16"),
    ((16, 500, 8, 16), (2, 1, 3, 0), "float32"),
    ((40, 8, 31, 4, 41), (1, 0, 2, 4, 3), "bfloat16"),
    ((800, 3, 1001), (0, 2, 1), "bfloat16"),
    ((300, 7, 301), (2, 1, 0), "complex128"),
    ((20, 3000, 30), (2, 1, 0), "uint8"),
    ((19, 40, 8, 2, 7, 64), (3, 5, 0, 1, 4, 2), "int8"),
    ((595, 13, 3, 64, 3), (4, 3, 0, 1, 2), "bfloat16"),
    ((5, 99, 8, 4, 11, 13), (0, 5, 4, 3, 2, 1), "uint8"),
    ((45, 4, 30, 25, 21), (1, 3, 0, 4, 2), "complex64"),
    ((1001, 777), (1, 0), "uint8"),
    ((7, 13, 120, 31), (3, 1, 2, 0), "float32"),
    ((300, 2, 7, 61), (2, 3, 1, 0), "float16"),
]


def test_large_arrays_of_every_strategy():
    """Enough work to be split among threads, or to need more than one wave of thread blocks."""
    rng = rng_for("large")
    assert_permuted([(any_bits(rng, shape, dtype), axes) for shape, axes, dtype in LARGE])
    plans = [plan_of(shape, axes, jnp.dtype(dtype).itemsize) for shape, axes, dtype in LARGE]
    strategies = {plan["strategy"] for plan in plans}
    tiles = {"tile", "small tile", "runs"}
    assert strategies == {"gather", "rows", "interleave", "deinterleave"} | tiles
    runs = {(p["in_run"] > 1, p["out_run"] > 1) for p in plans if p["strategy"] == "tile"}
    assert len(runs) == 4  # with several dimensions on either side, on both, on neither


def test_every_dtype_moves_bit_for_bit():
    """The bits include NaNs with payloads, infinities, -0 and subnormals."""
    rng = rng_for("dtypes")
    problems = [((9, 5, 16), (2, 0, 1)), ((7, 3, 8), (1, 0, 2))]
    assert_permuted(
        [(any_bits(rng, shape, dtype), axes) for dtype in DTYPES for shape, axes in problems]
    )


def test_slices_of_a_larger_array():
    """XLA may pass the middle of another buffer, aligned only to an element."""
    x = any_bits(rng_for("slices"), (5, 9, 7), "uint8")
    ys = jax.jit(lambda x: [jof.permute(x[i : i + 2], (2, 1, 0)) for i in range(4)])(x)
    for i, y in enumerate(ys):
        assert_same_bits(y, x[i : i + 2].transpose())


SIZES = (2, 3, 4, 1, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 192, 257)
ELEMENTS = 2**15


@st.composite
def problems(draw):
    """(shape, axes) of rank 0 to 10; some axes are negative, and some shapes have a 0."""
    ndim = draw(st.integers(0, 10))
    shape = []
    for _ in range(ndim):
        limit = min(ELEMENTS // math.prod(shape), 1 + int(ELEMENTS ** (2 / ndim)))
        shape.append(draw(st.sampled_from([size for size in SIZES if size <= limit])))
    shape = list(draw(st.permutations(shape)))
    if ndim and draw(st.integers(0, 15)) == 15:
        shape[draw(st.integers(0, ndim - 1))] = 0
    axes = draw(st.permutations(range(ndim)))
    negative = draw(st.integers(0, 2**ndim - 1))
    return tuple(shape), tuple(a - ndim * (negative >> i & 1) for i, a in enumerate(axes))


@given(problem=problems(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1))
def test_permute_matches_numpy_and_its_inverse_undoes_it(problem, dtype, seed):
    shape, axes = problem
    x = any_bits(np.random.default_rng(seed), shape, dtype)
    expected = np.transpose(x, axes)
    inverse = tuple(int(i) for i in np.argsort([axis % len(shape) for axis in axes]))
    y, z = permuted([(x, axes), (expected, inverse)])
    assert_same_bits(y, expected)
    assert_same_bits(z, x)


@pytest.mark.xdist_group("one process, for its memory")
@pytest.mark.skipif(BACKEND != "cuda", reason="needs 5 GB of device memory: only on a GPU")
@pytest.mark.parametrize(
    ("strategy", "shape", "axes"),
    [
        ("gather", (8, 280_000_000), (1, 0)),
        ("rows", (5636, 3, 127_127), (1, 0, 2)),
        ("interleave", (3, 720_000_000), (1, 0)),
        ("deinterleave", (720_000_000, 3), (1, 0)),
        ("tile", (46_352, 46_352), (1, 0)),
        ("runs", (65, 33, 1001, 1009), (2, 0, 3, 1)),
    ],
)
def test_more_than_two_to_the_31_elements(strategy, shape, axes):
    plan = _native.permute_plan(shape, axes, 1)
    assert (plan["strategy"], plan["unit_bytes"], plan["index_bytes"]) == (strategy, 1, 8)

    def byte_at(offset):
        return (offset * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(jnp.uint8)

    @jax.jit
    def f():
        x = byte_at(jax.lax.iota(jnp.uint64, math.prod(shape))).reshape(shape)
        return jof.permute(x, axes)

    @jax.jit
    def wrong(y):
        """The number of bytes that differ from their source."""
        offset = jnp.zeros((), jnp.uint64)
        for i, axis in enumerate(axes):
            position = jax.lax.broadcasted_iota(jnp.uint64, y.shape, i)
            offset = offset + position * np.uint64(math.prod(shape[axis + 1 :]))
        return jnp.sum(y != byte_at(offset))

    assert wrong(f()) == 0


# --- what moves nothing ---------------------------------------------------------------------------


def test_identity_is_the_operand_itself():
    x = jnp.ones((2, 3, 4))
    for axes in ((0, 1, 2), (-3, 1, -1), [0, 1, 2]):
        for implementation in (*IMPLEMENTATIONS, "native"):
            assert jof.permute(x, axes, implementation=implementation) is x
        assert jof.permute(np.asarray(x), axes).shape == (2, 3, 4)
    assert jof.permute(x[0, 0]) is not x
    scalar = jnp.float32(3)
    assert jof.permute(scalar) is jof.permute(scalar, ()) is scalar
    assert not jax.make_jaxpr(lambda x: jof.permute(x, (0, 1, 2)))(x).eqns
    assert jof.permute(2.5) == 2.5


def test_axes_of_size_one_and_empty_arrays():
    shapes = [
        ((1, 6), (1, 0)),
        ((3, 1, 5), (1, 0, 2)),
        ((1, 4, 1, 2), (1, 2, 3, 0)),
        ((1, 1), (1, 0)),
        ((0, 3), (1, 0)),
        ((2, 0, 3), (2, 1, 0)),
        ((0, 0), (1, 0)),
    ]
    assert not any(moves(*shape_and_axes) for shape_and_axes in shapes)
    assert_permuted([(any_bits(rng_for(0), shape, "int32"), axes) for shape, axes in shapes])
    for shape, axes in shapes:
        x = jnp.ones(shape)
        y, pull = jax.vjp(lambda x, axes=axes: jof.permute(x, axes), x)
        assert pull(y)[0].shape == shape


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derivatives_to_second_order(implementation):
    def f(x):  # nonlinear before and after the op, so that the second derivative is not zero
        return jnp.sin(jof.permute(x * x, (2, 0, 1), implementation=implementation))

    x = normals(rng_for("derivatives"), (2, 3, 2), "complex128") / 2
    check_grads(f, (x,), order=2, modes=["fwd", "rev"], rtol=1e-5, atol=1e-5)


def test_cotangents_move_bit_for_bit():
    """Cotangents of every float dtype, including 8-bit ones; those of integers are float0."""
    axes, inverse = (2, 0, 1), (1, 2, 0)
    names = (*FLOAT8, "float16", "bfloat16", "float32", "complex64")
    dys = [any_bits(rng_for(name), (4, 2, 3), name) for name in names]

    @jax.jit
    def pull(dys):
        specs = [jax.ShapeDtypeStruct((2, 3, 4), dy.dtype) for dy in dys]
        return jax.linear_transpose(lambda xs: [jof.permute(x, axes) for x in xs], specs)(dys)

    for dx, dy in zip(*pull(dys), dys, strict=True):
        assert_same_bits(dx, np.transpose(dy, inverse))
    for dtype in ("bool", "int32", "uint8"):
        x = jnp.ones((2, 3, 4), dtype)
        tangent = np.zeros(x.shape, jax.dtypes.float0)
        y, dy = jax.jvp(lambda x: jof.permute(x, axes), (x,), (tangent,))
        assert (y.dtype, dy.dtype) == (x.dtype, jax.dtypes.float0)
        assert y.shape == dy.shape == (4, 2, 3)
        loss = jax.grad(lambda x: jof.permute(x, axes).astype(float).sum(), allow_int=True)
        assert (loss(x).dtype, loss(x).shape) == (jax.dtypes.float0, x.shape)


# --- how it is called -----------------------------------------------------------------------------


def test_signature():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (jof.permute, jnp.transpose)
    )
    assert ours[:2] == theirs
    assert ours[2:] == [("implementation", inspect.Parameter.KEYWORD_ONLY, None)]
    x = np.arange(6).reshape(2, 3)
    assert_same_bits(jof.permute(a=x, axes=(1, 0)), jnp.transpose(a=x, axes=(1, 0)))


def test_ways_to_say_the_axes():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = x.transpose(2, 0, 1)
    ways = [
        (2, 0, 1),
        [2, 0, 1],
        (-1, -3, -2),
        (np.int32(2), np.uint8(0), -2),
        np.array([2, 0, 1]),
        jnp.array([2, 0, 1]),
        iter((2, 0, 1)),
    ]
    for axes in ways:
        assert_same_bits(jof.permute(x, axes), expected)
    assert_same_bits(jof.permute(x), x.transpose())
    assert_same_bits(jof.permute(x, None, implementation="xla"), x.transpose())
    static = jax.jit(jof.permute, static_argnames=("axes", "implementation"))
    assert_same_bits(static(x, (2, 0, 1)), expected)
    assert_same_bits(static(x, axes=(2, 0, 1), implementation="native"), expected)


def test_numpy_views():
    x = np.arange(360, dtype=np.float32).reshape(3, 4, 5, 6)
    views = [x[:, ::-2, 1:, ::2], np.asfortranarray(x), x.transpose(3, 1, 0, 2)]
    views.append(np.broadcast_to(x[:, :1], x.shape))
    assert_permuted([(view, (2, 0, 3, 1)) for view in views])


def test_64_bit_input_follows_the_x64_setting():
    values = np.arange(20).reshape(4, 5)
    for x64, width in ((True, "64"), (False, "32")):
        with jax.enable_x64(x64):
            for kind in ("float", "int", "uint"):
                y = jof.permute(values.astype(kind + "64"))
                assert_same_bits(y, values.astype(kind + width).transpose())


def test_result_stays_on_the_device_of_the_input():
    device = jax.devices()[-1]
    assert jof.permute(jax.device_put(np.ones((4, 5)), device)).devices() == {device}


# --- the plan -------------------------------------------------------------------------------------


def plan_of(shape, axes, itemsize, alignment=16):
    return _native.permute_plan(
        shape, [axis % len(shape) for axis in axes], itemsize, max(itemsize, alignment)
    )


def in_order_of_the_input(plan):
    """The merged dimensions in the order of the input, slowest first."""
    return [plan["shape"][plan["axes"].index(i)] for i in range(len(plan["axes"]))]


problems_to_plan = given(
    problem=problems().filter(lambda problem: 0 not in problem[0]),
    itemsize=st.sampled_from([*DTYPE_OF_SIZE]),
    alignment=st.sampled_from([1, 2, 4, 8, 16]),
)


@problems_to_plan
def test_plan_is_the_same_permutation(problem, itemsize, alignment):
    shape, axes = problem
    plan = plan_of(shape, axes, itemsize, alignment)
    unit = plan["unit_bytes"]
    assert unit in DTYPE_OF_SIZE
    assert unit % itemsize == 0
    assert max(itemsize, alignment) % unit == 0
    assert plan["index_bytes"] == 4
    assert 1 not in plan["shape"]
    data = rng_for(shape).bytes(math.prod(shape) * itemsize)
    x = np.frombuffer(data, f"V{itemsize}").reshape(shape)
    units = np.frombuffer(data, f"V{unit}").reshape(in_order_of_the_input(plan))
    assert units.transpose(plan["axes"]).tobytes() == x.transpose(axes).tobytes()


@problems_to_plan
def test_plan_does_not_depend_on_how_the_problem_is_put(problem, itemsize, alignment):
    """The plan is the same for merged or split dimensions, with or without those of size 1."""
    shape, axes = problem
    axes = [axis % len(shape) for axis in axes]
    plan = plan_of(shape, axes, itemsize, alignment)
    merged = in_order_of_the_input(plan)
    assert plan_of(merged, plan["axes"], plan["unit_bytes"], alignment) == plan
    # Splits each dimension in two: a small factor, perhaps 1, and the rest.
    factors = [next((k for k in (2, 3, 5, 7) if n % k == 0), 1) for n in shape]
    split = [part for n, k in zip(shape, factors, strict=True) for part in (k, n // k)]
    both = [part for axis in axes for part in (2 * axis, 2 * axis + 1)]
    assert plan_of(split, both, itemsize, alignment) == plan


@problems_to_plan
def test_tiles_are_contiguous_on_both_sides(problem, itemsize, alignment):
    shape, axes = problem
    larger = [17 * n for n in shape]  # because small arrays use "gather"
    plan = plan_of(larger, axes, itemsize, alignment)
    if plan["strategy"] != "runs":
        return
    shape, axes, tile = plan["shape"], plan["axes"], plan["tile"]
    assert all(1 <= extent <= size for extent, size in zip(tile, shape, strict=True))
    fastest_out = [*reversed(range(len(shape)))]
    fastest_in = sorted(fastest_out, key=lambda i: -axes[i])
    runs = fastest_in[: plan["in_run"]], fastest_out[: plan["out_run"]]
    for run in runs:
        assert all(tile[i] == shape[i] for i in run[:-1])
    assert all(tile[i] == 1 for i in {*fastest_out}.difference(*runs))
    assert math.prod(tile) * plan["unit_bytes"] <= 48 * 1024  # a block's shared memory


@pytest.mark.parametrize(
    ("shape", "axes", "itemsize", "expected"),
    [
        ((3, 4, 5), (0, 1, 2), 4, {"strategy": "copy"}),
        ((1, 4096), (1, 0), 1, {"strategy": "copy"}),
        ((8192, 8192), (1, 0), 4, {"strategy": "tile", "unit_bytes": 4, "shape": [8192, 8192]}),
        ((8, 2048, 16, 128), (0, 2, 1, 3), 2, {"strategy": "gather", "unit_bytes": 16}),
        ((8, 2048, 16, 127), (0, 2, 1, 3), 2, {"strategy": "rows", "unit_bytes": 2}),
        ((32, 224, 224, 3), (0, 3, 1, 2), 1, {"strategy": "deinterleave", "axes": [0, 2, 1]}),
        ((32, 3, 224, 224), (0, 2, 3, 1), 1, {"strategy": "interleave", "axes": [0, 2, 1]}),
        ((190, 8, 31, 4, 41), (1, 0, 2, 4, 3), 2, {"strategy": "gather", "unit_bytes": 2}),
        ((800, 3, 1001), (0, 2, 1), 2, {"strategy": "interleave", "unit_bytes": 2}),
        ((4, 3, 32768, 30), (1, 0, 3, 2), 4, {"strategy": "runs", "unit_bytes": 4}),
        ((9, 5, 129, 127), (2, 0, 3, 1), 2, {"strategy": "gather", "unit_bytes": 2}),
        ((39, 64), (1, 0), 4, {"strategy": "gather", "unit_bytes": 4}),
        ((357, 373), (1, 0), 4, {"strategy": "small tile", "unit_bytes": 4}),
        (
            (1795, 13, 3, 64, 3),
            (4, 3, 0, 1, 2),
            2,
            {"strategy": "tile", "shape": [3, 64, 70005], "in_run": 2, "out_run": 1},
        ),
        # Rows of eight 2-byte elements become 16-byte elements.
        ((512, 256, 8), (1, 0, 2), 2, {"unit_bytes": 16, "shape": [256, 512], "axes": [1, 0]}),
        ((2**16, 2**15 - 1), (1, 0), 1, {"index_bytes": 4}),
        ((2**16, 2**15), (1, 0), 1, {"index_bytes": 8}),
        ((3, 2**20, 2**12), (1, 0, 2), 1, {"index_bytes": 4}),  # counts 16-byte units
        ((2**20, 2**20, 2**20), (2, 1, 0), 4, {"index_bytes": 8}),
    ],
)
def test_plans_of_known_problems(shape, axes, itemsize, expected):
    plan = plan_of(shape, axes, itemsize)
    assert plan | expected == plan


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_numbers_and_wide_arrays(implementation):
    """Derivatives with Python numbers, and 64-bit arrays where 64-bit types are disabled."""
    f = functools.partial(jof.permute, implementation=implementation)
    for transform in (
        lambda f: jax.grad(jax.jit(f))(1.0),
        lambda f: jax.vjp(f, 1.0)[1](1.0),
        lambda f: jax.jvp(f, (1.0,), (1.0,)),
        lambda f: jax.vmap(jax.jit(f))(np.arange(3.0)),
    ):
        for a, e in zip(*(jax.tree.leaves(transform(g)) for g in (f, jnp.transpose)), strict=True):
            assert_same_bits(a, e)
            assert jax.typeof(a).weak_type == jax.typeof(e).weak_type
    with jax.enable_x64(True):
        x = jnp.arange(6.0).reshape(2, 3) + 2.0**-40
        expected = [np.asarray(x.T), np.asarray(x)]
    with jax.enable_x64(False):
        y, vjp = jax.vjp(f, x)
        assert_same_bits(y, expected[0])
        assert_same_bits(vjp(y)[0], expected[1])
        assert_same_bits(jax.jit(f)(x), expected[0])
