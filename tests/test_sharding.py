"""Arrays sharded over devices, with automatic and explicit axes and in shard_map.

Values and gradients equal those of one device, and programs contain only the communication that the
table of tests/shardings.py allows.
"""

import contextlib
import doctest
import functools
import itertools
import math
import re
import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from jax_oneflow_ops import _compat, _primitive
from tests import catalogue
from tests.arrays import any_bits
from tests.catalogue import OPS, without_way
from tests.shardings import (
    LAYOUTS,
    REDUCTION_LAYOUTS,
    REDUCTIONS,
    RULES,
    Layout,
    rule_of,
    sized,
    split,
)

# The CPU has eight virtual devices. With only two devices (GPUs), only the tests that adapt to the
# mesh's shape run.
SHAPE = (4, 2) if len(jax.devices()) >= 8 else (2, 1)
ON_TWO_DEVICES = ("test_layout", "test_nested_in_scan", "test_loss_and_its_derivatives")
ON_TWO_DEVICES += ("test_attention_over_shards",)


@pytest.fixture(autouse=True)
def enough_devices(request):
    if len(jax.devices()) < (2 if request.node.originalname in ON_TWO_DEVICES else 8):
        pytest.skip("needs more devices")


AXIS_TYPES = ("auto", "explicit")


@contextlib.contextmanager
def mesh_of(axis_types: str, current: bool = False, shape: tuple[int, int] = SHAPE):
    """A mesh of 4 x 2 or 2 x 1 devices with axes `a` and `b`; current if any axis is explicit."""
    auto, explicit = AxisType.Auto, AxisType.Explicit
    types = {"auto": (auto, auto), "explicit": (explicit, explicit), "mixed": (explicit, auto)}
    devices = jax.devices()[: math.prod(SHAPE)]
    mesh = jax.make_mesh(shape, ("a", "b"), types[axis_types], devices=devices)
    with jax.set_mesh(mesh) if current or axis_types != "auto" else contextlib.nullcontext():
        yield mesh


def integers(shape, seed=0, dtype=np.float32) -> np.ndarray:
    """Small integers: all sums are exact, so one device and eight must agree bit for bit."""
    return np.random.default_rng(seed).integers(-8, 9, size=shape).astype(dtype)


def put(mesh, specs, xs) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]


def value_and_pullback(f, wrt):
    """(cotangent, operands) -> value, gradients with respect to `wrt`."""

    def run(dy, *xs):
        def of_wrt(*operands):
            given = dict(zip(wrt, operands, strict=True))
            return f(*(given.get(i, x) for i, x in enumerate(xs)))

        y, pull = jax.vjp(of_wrt, *(xs[i] for i in wrt))
        return y, pull(dy)

    return run


def on_one_device(f, wrt, xs):
    """A cotangent, and the value and the gradients for it."""
    y = jax.eval_shape(f, *xs)
    dy = integers(y.shape, seed=1, dtype=y.dtype)
    return dy, jax.jit(value_and_pullback(f, wrt))(dy, *xs)


def assert_close(actual, expected, rtol=0.0) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.dtype == e.dtype
        if rtol == 0:
            np.testing.assert_array_equal(a, e, strict=True)
        else:
            np.testing.assert_allclose(a, e, rtol=0, atol=rtol * np.nanmax(np.abs(e)), strict=True)


def assert_sharded(y: jax.Array, sharding: NamedSharding) -> None:
    assert y.sharding.is_equivalent_to(sharding, y.ndim), y.sharding


def collectives(hlo: str) -> dict[str, int]:
    """The number of collectives by name; a start/done pair counts once."""
    names = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" ({names}|collective-broadcast)(?:-start)?\(", hlo)
    return {name: found.count(name) for name in set(found)}


def assert_collectives(hlo: str, count: int) -> None:
    """Asserts the number of all-reduces. On two devices XLA may merge several into one."""
    found = collectives(hlo)
    if SHAPE == (2, 1) and 0 < found.get("all-reduce", 0) < count:
        found["all-reduce"] = count
    assert found == ({"all-reduce": count} if count else {})


def custom_calls(hlo: str) -> set[tuple[str, int]]:
    """The package's custom calls: target and element count of the first result."""
    call = r'= \(?\w+\[([\d,]*)\][^\n]* custom-call\([^\n]*custom_call_target="(jof_\w+)"'
    return {
        (without_way(target), math.prod(int(n) for n in shape.split(",") if n))
        for shape, target in re.findall(call, hlo)
        if target != "jof_sort_rows"  # sorts ids for any sum of rows
    }


BY_NAME = {str(layout): layout for layout in (*LAYOUTS, *REDUCTION_LAYOUTS)}
BY_CASE = {str(layout.case): layout.case for layout in BY_NAME.values()}
# One layout for each kind of implementation.
EACH_KIND = [
    BY_NAME[name]
    for name in (
        "swiglu(x=a, z=b)",
        "add-scalar0(x=a, z=b)",
        "scaled_silu(x=a, l=b)",
        "upsample_nearest2d-2x-NCHW(n=a, c=b)",
        "permute-cycle(i=a, k=b)",
        "segment_sum(n=a, u=b)",
        "scatter_add(n=a, u=b)",
        "embedding_lookup(n=a, u=b)",
    )
]
# Each layout with either automatic or explicit axes: for tests whose outcome depends on the kind
# and on the axis type independently.
EACH_KIND_WITH_AXES = [(AXIS_TYPES[k % 2], layout) for k, layout in enumerate(EACH_KIND)]
GRADIENT_OF_A_SCALAR = BY_NAME["scaled_silu(x=a, l=b)-d2"]
LOOKUP_IN_SHARDED_ROWS = BY_NAME["embedding_lookup(s=b, n=a)"]


# --- the table ------------------------------------------------------------------------------------


def test_every_op_is_in_the_table():
    tested = {layout.case.function for layout in (*LAYOUTS, *REDUCTION_LAYOUTS)}
    # These are composed of message_sum and of per-edge computations on every device.
    composed = {"message_mean", "message_max", "attention_sum"}
    assert tested - {"ElementwiseKernel"} == {op.public_name for op in OPS} - composed


@pytest.mark.parametrize("op", RULES)
def test_the_table_says_what_is_tested(op):
    """Layouts have the rule's dimensions, and shard every dimension that may be sharded."""
    rule = RULES[op]
    operands, result = split(rule.equation)
    layouts = [layout for layout in LAYOUTS if rule_of(layout.case) is rule]
    for layout in layouts:
        assert set(map(rule.kinds, layout.operands)) <= set(map(frozenset, operands))
        assert rule.kinds(layout.result) == frozenset(result)
    sharded = frozenset().union(*(rule.kinds(layout.axes) for layout in layouts))
    assert sharded == set(rule.names) - set(rule.gathered)


@functools.cache
def known(name: str, wrt: tuple[int, ...]):
    """A case's operands, a cotangent, and the reference's results for them on one device."""
    case = BY_CASE[name]
    xs = case.inputs()
    return xs, *on_one_device(case.ref, wrt, xs)


def mapped(layout: Layout, mesh, **options):
    """The op in a shard_map, where the user must sum over devices."""
    axes = layout.summed()

    def f(*xs):
        if not axes:
            return layout.case.f(*xs)
        if layout.case.name == "scatter_add":  # every device adds the whole operand
            xs = (xs[0] / lax.psum(1, axes), *xs[1:])
        return lax.psum(layout.case.f(*xs), axes)

    specs = {"in_specs": (*layout.specs(),), "out_specs": layout.spec(layout.result)}
    return jax.shard_map(f, mesh=mesh, **specs, **options)


BY_USER = ("scatter_add", "logsumexp", "softmax_cross_entropy_with_integer_labels")


def ways():
    kinds, primitives = (
        {case.name for case in cases} for cases in (catalogue.EACH_KIND, catalogue.EACH_PRIMITIVE)
    )
    first = {layout.case.name: layout for layout in reversed(LAYOUTS)}
    for layout in LAYOUTS:
        made = set(layout.axes).difference(*layout.operands)
        count = 3 if layout.case.name in primitives else 2 if layout.case.name in kinds else 1
        # Each op's rule differs by name only; the rest is the same for all ops of a kind.
        for way in ("auto", "explicit", "shard_map")[:count]:
            # In a shard_map the user must shard rows, add the operand only once, and sum
            # exponentials. With explicit axes, the result's sharding comes from operands, so a
            # dimension that no operand has cannot be sharded.
            by_user = "s" in layout.axes or (layout.case.name in BY_USER and layout.summed())
            if by_user if way == "shard_map" else made and way == "explicit":
                continue
            marks = [pytest.mark.xdist_group(str(layout.case))]  # shares the cache of `known`
            if way != "auto" and layout is not first[layout.case.name]:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(way, layout, id=f"{way}-{layout}", marks=marks)


@pytest.mark.parametrize(("way", "layout"), [*ways()])
def test_layout(way, layout):
    """The types, shardings, custom calls and collectives of the value and the gradient."""
    case, wrt = layout.case, layout.wrt
    is_along_b = SHAPE == (2, 1) and not any("a" in axes for axes in layout.axes.values())
    shape = SHAPE[::-1] if is_along_b else SHAPE
    with case.precision():
        xs, dy, expected = known(str(layout.case), layout.wrt)
        with mesh_of("auto" if way == "shard_map" else way, shape=shape) as mesh:
            specs = layout.specs()
            results = (layout.spec(layout.result), tuple(specs[i] for i in wrt))
            shardings = jax.tree.map(functools.partial(NamedSharding, mesh), results)
            # Operands do not determine how sums into rows are sharded; the user of the result does.
            said = way == "auto" and "s" in layout.axes
            run = value_and_pullback(mapped(layout, mesh) if way == "shard_map" else case.f, wrt)
            jitted = jax.jit(run, out_shardings=shardings if said else None)
            arguments = put(mesh, (results[0], *specs), (dy, *xs))
            traced = jitted.trace(*arguments)
            if way == "explicit":
                types = jax.tree.map(lambda out: out.sharding.spec, traced.out_info)
                assert types == results
            compiled = traced.lower().compile()
            actual = compiled(*arguments)
            assert_close(actual, expected, case.rtol)
            jax.tree.map(assert_sharded, actual, shardings)

            hlo = compiled.as_text()
            assert_collectives(hlo, sum(layout.on(mesh).all_reduces()))
            calls = custom_calls(hlo)
            size = functools.partial(layout.shard_size, mesh=mesh)
            value = (case.target, size(layout.result, expected[0].shape))
            sizes = {size(layout.operands[i], np.shape(xs[i])) for i in wrt}
            # With several devices, the value and its gradient are separate calls.
            apart = [t.replace("_with_vjp", "_vjp") for t in case.grad_targets[case.wrt]]
            gradients = {(target, n) for target in apart for n in sizes}
            assert value in calls
            if not layout.scalars:  # jnp may compute gradients of scalars
                assert calls <= {value} | gradients
                assert {target for target, _ in calls} == {t for t, _ in {value} | gradients}


def ways_of_reductions():
    for layout in REDUCTION_LAYOUTS:
        made = set(layout.axes).difference(*layout.operands)
        twin = not layout.case.op.name.endswith("_max")  # same rule as the maximum
        for axis_types in AXIS_TYPES[: 1 if made or twin else 2]:
            together = pytest.mark.xdist_group(str(layout.case))
            yield pytest.param(axis_types, layout, id=f"{axis_types}-{layout}", marks=together)


@pytest.mark.parametrize(("axis_types", "layout"), [*ways_of_reductions()])
def test_reductions_of_rows(axis_types, layout):
    """test_layout for maxima, minima, products and means, which communicate more."""
    case, wrt = layout.case, layout.wrt
    (sent,) = (sent for ops, sent in REDUCTIONS.items() if case.op.name in ops)
    xs, dy, expected = known(str(layout.case), layout.wrt)
    with mesh_of(axis_types) as mesh:
        specs = layout.specs()
        results = (layout.spec(layout.result), tuple(specs[i] for i in wrt))
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), results)
        said = axis_types == "auto" and "s" in layout.axes
        run = jax.jit(value_and_pullback(case.f, wrt), out_shardings=shardings if said else None)
        arguments = put(mesh, (results[0], *specs), (dy, *xs))
        compiled = run.lower(*arguments).compile()
        actual = compiled(*arguments)
        np.testing.assert_allclose(actual[0], expected[0], rtol=case.rtol)
        assert_close(actual[1], expected[1], case.rtol)
        jax.tree.map(assert_sharded, actual, shardings)
        law = Counter()
        for letter, costs in (("n", sent[:2]), ("s", sent[2:])):
            for cost in costs if letter in layout.axes else ():
                law.update(cost)
        assert collectives(compiled.as_text()) == law
        part = layout.shard_size(layout.result, expected[0].shape, mesh)
        by_segment = layout.result == "stu"  # other results have no custom call of their own
        assert not by_segment or (case.target, part) in custom_calls(compiled.as_text())


# --- inside other transformations -----------------------------------------------------------------


def squared(f):
    """The square of f, whose gradient needs f's value."""

    def run(*xs):
        y = f(*xs)
        return y * y

    return run


def scanned(f):
    return lambda *xs: lax.scan(lambda carry, x: (carry, f(*x)), None, xs)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axis_types", "layout"),
    [*EACH_KIND_WITH_AXES, *((axes, LOOKUP_IN_SHARDED_ROWS) for axes in AXIS_TYPES)],
    ids=str,
)
def test_nested_in_scan(axis_types, layout):
    """A scan of a checkpoint, which computes the value twice."""
    case, wrt = layout.case, layout.wrt
    with case.precision():
        xs = case.inputs(3)
        y = jax.eval_shape(squared(case.ref), *(x[0] for x in xs))
        dy = integers((3, *y.shape), seed=1, dtype=y.dtype)
        reference = jax.jit(value_and_pullback(squared(case.ref), wrt))
        steps = [reference(*step) for step in zip(dy, *xs, strict=True)]
        expected = jax.tree.map(lambda *parts: np.stack(parts), *steps)
        with mesh_of(axis_types) as mesh:
            specs = [P(None, *spec) for spec in layout.specs()]
            result = P(None, *layout.spec(layout.result))
            results = (result, tuple(specs[i] for i in wrt))
            shardings = jax.tree.map(functools.partial(NamedSharding, mesh), results)
            arguments = put(mesh, (result, *specs), (dy, *xs))
            run = value_and_pullback(scanned(jax.checkpoint(squared(case.f))), wrt)
            compiled = jax.jit(run, out_shardings=shardings).lower(*arguments).compile()
            actual = compiled(*arguments)
            assert_close(actual, expected, case.rtol)
            forward, gradient = layout.on(mesh).all_reduces()
            assert_collectives(compiled.as_text(), 2 * forward + gradient)


@pytest.mark.parametrize(
    ("axis_types", "layout"),
    [*EACH_KIND_WITH_AXES, *((axes, LOOKUP_IN_SHARDED_ROWS) for axes in AXIS_TYPES)],
    ids=str,
)
def test_loss_and_its_derivatives(axis_types, layout):
    """value_and_grad and a Hessian-vector product of a scalar loss."""
    case, wrt = layout.case, layout.wrt

    def step_of(f):
        def loss(*xs):
            y = f(*xs)
            return jnp.sum(y * y * y)

        grad = jax.value_and_grad(loss, argnums=wrt)

        def step(xs, vs):
            tangents = [v if i in wrt else jnp.zeros_like(v) for i, v in enumerate(vs)]
            return grad(*xs), jax.jvp(lambda *xs: grad(*xs)[1], xs, (*tangents,))[1]

        return step

    with case.precision():
        xs = case.inputs()
        vs = tuple(np.flip(x) for x in xs)
        expected = jax.jit(step_of(case.ref))(xs, vs)
        with mesh_of(axis_types) as mesh:
            specs = layout.specs()
            sharded = [tuple(put(mesh, specs, tree)) for tree in (xs, vs)]
            actual = jax.jit(step_of(case.f))(*sharded)
            assert_close(actual, expected, max(case.rtol, 1e-11) if case.rtol else 0)
            if axis_types == "auto" and layout is LOOKUP_IN_SHARDED_ROWS:
                return  # nothing determines how the gradient is sharded
            for i, *dxs in zip(wrt, actual[0][1], actual[1], strict=True):
                for dx in dxs:
                    assert_sharded(dx, NamedSharding(mesh, specs[i]))


@pytest.mark.parametrize(
    ("axis_types", "layout"), [*EACH_KIND_WITH_AXES, ("auto", GRADIENT_OF_A_SCALAR)], ids=str
)
def test_vmap_over_a_sharded_axis(axis_types, layout):
    """The batch axis is sharded over `a`; `b` shards the same dimension as without vmap."""
    axis = -1 if axis_types == "auto" else 0
    case, wrt = layout.case, layout.wrt
    layout = layout.sharded(**{x: axes for x, axes in layout.axes.items() if axes == "b"})

    def batched(f):
        return jax.vmap(f, in_axes=axis, out_axes=axis)

    def spec(letters):
        spec = [layout.axes.get(letter) for letter in letters]
        spec.insert(len(spec) if axis else 0, "a")
        return P(*spec)

    with case.precision():
        xs = [np.moveaxis(x, 0, axis) for x in case.inputs(8)]
        dy, expected = on_one_device(batched(case.ref), wrt, xs)
        with mesh_of(axis_types) as mesh:
            specs, result = [spec(letters) for letters in layout.operands], spec(layout.result)
            arguments = put(mesh, (result, *specs), (dy, *xs))
            run = value_and_pullback(batched(case.f), wrt)
            compiled = jax.jit(run).lower(*arguments).compile()
            assert_collectives(compiled.as_text(), sum(layout.all_reduces()))
            actual = compiled(*arguments)
            assert_close(actual, expected, case.rtol)
            assert_sharded(actual[0], NamedSharding(mesh, result))
            for i, dx in zip(wrt, actual[1], strict=True):
                assert_sharded(dx, NamedSharding(mesh, specs[i]))


@pytest.mark.parametrize(("axis_types", "layout"), EACH_KIND_WITH_AXES, ids=str)
def test_outside_jit(axis_types, layout):
    case = layout.case
    with case.precision():
        xs, _, (expected, _) = known(str(layout.case), layout.wrt)
        with mesh_of(axis_types) as mesh:
            arguments = put(mesh, layout.specs(), xs)
            y = case.f(*arguments)
            in_map = mapped(layout, mesh)(*arguments)
            assert_sharded(y, NamedSharding(mesh, layout.spec(layout.result)))
        assert_close((y, in_map), (expected, expected), case.rtol)


# --- meshes and shardings of other kinds ----------------------------------------------------------


@pytest.mark.parametrize(("axis_types", "layout"), EACH_KIND_WITH_AXES, ids=str)
def test_operands_that_jit_shards(axis_types, layout):
    """Operands are not on the mesh, which only `jax.set_mesh` sets; jit shards them."""
    case, wrt = layout.case, layout.wrt
    with case.precision():
        xs, dy, expected = known(str(layout.case), layout.wrt)
        with mesh_of(axis_types, current=True):
            shard = {"auto": lax.with_sharding_constraint, "explicit": jax.sharding.reshard}

            def run(*operands):
                specs = (layout.spec(layout.result), *layout.specs())
                operands = map(shard[axis_types], operands, specs)
                return value_and_pullback(case.f, wrt)(*operands)

            compiled = jax.jit(run).lower(dy, *xs).compile()
            assert_collectives(compiled.as_text(), sum(layout.all_reduces()))
            assert_close(compiled(dy, *xs), expected, case.rtol)
            assert_close(jax.jit(case.f)(*xs), expected[0], case.rtol)


@pytest.mark.parametrize("layout", [*EACH_KIND, BY_NAME["embedding_lookup(s=a)"]], ids=str)
def test_explicit_axis_beside_an_automatic_one(layout):
    case, wrt = layout.case, layout.wrt
    with case.precision():
        xs, dy, expected = known(str(layout.case), layout.wrt)
        with mesh_of("mixed") as mesh:
            specs, result = layout.specs(), layout.spec(layout.result)
            arguments = put(mesh, (result, *specs), (dy, *xs))
            compiled = jax.jit(value_and_pullback(case.f, wrt)).lower(*arguments).compile()
            assert_collectives(compiled.as_text(), sum(layout.all_reduces()))
            y, dxs = compiled(*arguments)
            assert_close((y, dxs), expected, case.rtol)
            assert_sharded(y, NamedSharding(mesh, result))
            for i, dx in zip(wrt, dxs, strict=True):
                assert_sharded(dx, NamedSharding(mesh, specs[i]))


@pytest.mark.parametrize("layout", [a for a in EACH_KIND if not a.summed()], ids=str)
def test_constraint_on_the_result_reaches_the_operands(layout):
    """If only the result's sharding is constrained, no communication is needed either."""
    case = layout.case
    with case.precision(), mesh_of("auto") as mesh:
        xs, _, (expected, _) = known(str(layout.case), layout.wrt)
        f = jax.jit(
            lambda *xs: case.f(*(-x for x in xs)),
            in_shardings=NamedSharding(mesh, P()),
            out_shardings=NamedSharding(mesh, layout.spec(layout.result)),
        )
        arguments = [-x for x in xs]
        compiled = f.lower(*arguments).compile()
        assert collectives(compiled.as_text()) == {}
        part = layout.shard_size(layout.result, expected.shape, mesh)
        assert custom_calls(compiled.as_text()) == {(case.target, part)}
        assert_close(compiled(*arguments), expected, case.rtol)


@pytest.mark.parametrize("layout", EACH_KIND, ids=str)
def test_dimensions_that_devices_do_not_divide(layout):
    """The padding of shards must not enter a sum: dimensions to be summed are gathered."""
    odd = {x: 7 for x in layout.axes}
    case, wrt = sized(layout.case, layout.equation, **odd), layout.wrt
    with case.precision():
        xs = case.inputs()
        dy, expected = on_one_device(case.ref, wrt, xs)
        with mesh_of("auto") as mesh:
            shardings = [NamedSharding(mesh, spec) for spec in layout.specs()]

            @jax.jit
            def run(dy, *xs):
                xs = map(lax.with_sharding_constraint, xs, shardings)
                return value_and_pullback(case.f, wrt)(dy, *xs)

            # XLA masks the padding in its own sums: gradients of scalars and of kernels' rows.
            by_xla = layout.scalars or case.kernel
            is_summed = any(layout.all_reduces()) and not by_xla
            with pytest.warns(jof.GatherWarning) if is_summed else contextlib.nullcontext():
                assert_close(run(dy, *xs), expected, case.rtol)


def test_explicit_dimensions_that_devices_do_not_divide():
    """JAX raises the error: a type cannot express uneven shards."""
    with mesh_of("explicit"), pytest.raises(ValueError, match="divi"):
        jax.jit(lambda x: jof.relu(jax.sharding.reshard(x, P("a"))))(np.ones((7, 3)))


@pytest.mark.parametrize(
    ("axis_types", "layout"),
    [
        (axis_types, BY_NAME[f"{name}(x=a, z=b)"])
        for axis_types in AXIS_TYPES
        for name in ("multiply", "swiglu", "fma", "where")
        # Like jnp.where, where refuses branches whose types have different shardings.
        if (axis_types, name) != ("explicit", "where")
    ],
    ids=str,
)
def test_operands_that_are_sharded_differently(axis_types, layout):
    """Each gradient has its operand's sharding if shardings are part of types."""
    case, wrt = layout.case, layout.wrt
    with case.precision():
        xs, dy, expected = known(str(layout.case), layout.wrt)
        for one, other, joined in (
            (P(), P("a", None, "b"), P("a", None, "b")),
            (P("a"), P(None, None, "b"), P("a", None, "b")),
        ):
            with mesh_of(axis_types) as mesh:
                specs = [*(one,) * (len(xs) - 1), other]
                arguments = put(mesh, (joined, *specs), (dy, *xs))
                forward = jax.jit(case.f).lower(*arguments[1:]).compile()
                assert collectives(forward.as_text()) == {}
                assert_sharded(forward(*arguments[1:]), NamedSharding(mesh, joined))
                actual = jax.jit(value_and_pullback(case.f, wrt))(*arguments)
                assert_close(actual, expected, case.rtol)
                if axis_types == "explicit":
                    for i, dx in zip(wrt, actual[1], strict=True):
                        assert_sharded(dx, NamedSharding(mesh, specs[i]))


# --- shard_map ------------------------------------------------------------------------------------


def replicated():
    """(layout, operand) for each array operand of functions of several arrays."""
    for name in ("add", "swiglu", "fma", "where", "segment_sum", "scatter_add", "embedding_lookup"):
        layout = next(layout for layout in LAYOUTS if layout.case.name == name)
        for i in range(len(layout.operands)):
            yield pytest.param(layout, i, id=f"{name}-{i}")


@pytest.mark.parametrize(("layout", "same"), [*replicated()])
def test_operand_that_every_device_has(layout, same):
    """One operand is replicated; the others and the result vary over devices.

    Its gradient is summed over devices.
    """
    case = layout.case
    wrt = [i for i in case.wrt if i == same]
    with case.precision():
        xs = [
            x if i == same else np.concatenate([np.roll(x, k) for k in range(4)])
            for i, x in enumerate(case.inputs())
        ]

        def one_after_another(*xs):
            parts = [(x,) * 4 if i == same else jnp.split(x, 4) for i, x in enumerate(xs)]
            return jnp.concatenate([case.ref(*each) for each in zip(*parts, strict=True)])

        dy, expected = on_one_device(one_after_another, wrt, xs)
        with mesh_of("auto") as mesh:
            specs = [P() if i == same else P("a") for i, x in enumerate(xs)]
            f = jax.shard_map(case.f, mesh=mesh, in_specs=(*specs,), out_specs=P("a"))
            arguments = put(mesh, (P("a"), *specs), (dy, *xs))
            compiled = jax.jit(value_and_pullback(f, wrt)).lower(*arguments).compile()
            assert_close(compiled(*arguments), expected, case.rtol)
            assert_collectives(compiled.as_text(), len(wrt))


@pytest.mark.parametrize("layout", EACH_KIND, ids=str)
def test_shard_map_over_some_axes(layout):
    """One mesh axis is manual; dimensions sharded over the other are gathered with a warning."""
    case, wrt = layout.case, layout.wrt
    by_hand = layout.sharded(**{x: axes for x, axes in layout.axes.items() if axes == "a"})
    with case.precision():
        xs, dy, expected = known(str(layout.case), layout.wrt)
        with mesh_of("auto") as mesh:
            arguments = put(mesh, (layout.spec(layout.result), *layout.specs()), (dy, *xs))
            run = jax.jit(value_and_pullback(mapped(by_hand, mesh, axis_names={"a"}), wrt))
            with pytest.warns(jof.GatherWarning, match=r"axes \(b\)") as given:
                actual = run(*arguments)
            assert any(str(w.message).startswith(case.function) for w in given)
            assert_close(actual, expected, case.rtol)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_gradient_inside_shard_map(axis_types):
    """Data-parallel training: each device differentiates its share, then the shares are summed."""
    table, ids = integers((8, 4)), np.arange(16) * 3 % 8
    weight, bias = integers((4,), seed=1), np.float32(3)

    def loss(parameters, ids):
        table, weight, bias = parameters
        x = jof.embedding_lookup(table, ids)
        x = jof.fma(x, jnp.broadcast_to(weight, x.shape), bias)
        return jnp.sum(jof.segment_sum(jof.relu(x), ids, 8) ** 2)

    def of_share(parameters, ids):
        axes = ("a", "b")
        vary = (lambda x: lax.pcast(x, axes, to="varying")) if hasattr(lax, "pcast") else None
        parameters = jax.tree.map(vary or (lambda x: lax.pvary(x, axes)), parameters)
        return lax.psum(jax.grad(loss)(parameters, ids), axes)

    parameters = (table, weight, bias)
    shares = ids.reshape(8, 2)
    parts = [jax.grad(loss)(jax.tree.map(jnp.asarray, parameters), share) for share in shares]
    expected = jax.tree.map(lambda *part: sum(part), *parts)
    with mesh_of(axis_types) as mesh:
        grad = jax.shard_map(of_share, mesh=mesh, in_specs=(P(), P(("a", "b"))), out_specs=P())
        parameters = tuple(put(mesh, (P(),) * 3, parameters))
        (ids,) = put(mesh, (P(("a", "b")),), (ids,))
        assert_close(jax.jit(grad)(parameters, ids), expected)


# --- sums that are not added up yet ---------------------------------------------------------------


# Whether jax has unreduced operands of scatters, and unreduced results of segment sums.
HAS_UNREDUCED = jax.__version_info__ >= (0, 9)


def delayed(name):
    """(table, ids, updates) -> an array that is unreduced over `a` at first."""

    def f(table, ids, updates):
        unreduced = P(None, None, unreduced={"a"})
        if name == "lookup":
            table = jax.sharding.reshard(table, P(None, None, reduced={"a"}))
            return jax.grad(lambda t: (t.at[ids].get(out_sharding=P("a")) * updates).sum())(table)
        if name == "scatter":
            return jnp.zeros_like(table).at[ids].add(updates, out_sharding=unreduced)
        if name == "segment_sum":
            return jax.ops.segment_sum(updates, ids, len(table), out_sharding=unreduced)
        product = jnp.matmul(updates.T, updates, out_sharding=unreduced)
        return product.at[jnp.arange(3)].add(jnp.ones_like(product))

    return f


NOT_IN_THIS_JAX = pytest.mark.skipif(not HAS_UNREDUCED, reason="not in this version of jax")


@pytest.mark.parametrize(
    "name",
    [
        *("lookup", "scatter"),
        *(pytest.param(name, marks=NOT_IN_THIS_JAX) for name in ("segment_sum", "operand")),
    ],
)
def test_accelerate_leaves_unreduced_results_to_jax(name, native):
    """Kernels return sums over all devices: XLA would take each for the part of one device."""
    xs = np.zeros((8, 3), np.float32), np.arange(16) * 5 % 8, integers((16, 3))

    def run(*xs):
        result = delayed(name)(*xs)
        assert jax.typeof(result).sharding.spec.unreduced == {"a"}
        return jax.sharding.reshard(result, P())

    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (P(), P("a"), P("a")), xs)
        expected = jax.jit(run)(*arguments)
        assert_close(jax.jit(jof.accelerate(run))(*arguments), expected)
        report = jof.explain(run, *arguments)
        assert all(not row.swapped for row in report.rows)
        if name != "operand":
            assert "unreduced" in str(report)


OF_UNREDUCED = {
    "softmax": jof.softmax,
    "layer_norm": jof.layer_norm,
    "segment_sum": lambda x: jof.segment_sum(x, np.arange(8), 8),
    "message_sum": lambda x: jof.message_sum(
        lambda x: x * x, (x,), np.arange(8), np.arange(8), num_segments=8
    ),
    "cast": lambda x: jof.cast(x, jnp.bfloat16),
    "permute": jof.permute,
    "upsample_nearest2d": lambda x: jof.upsample_nearest2d(x[None, None], 2),
    "fuse": jof.fuse(lambda x: x + x),
}


@NOT_IN_THIS_JAX
@pytest.mark.parametrize("name", OF_UNREDUCED)
@pytest.mark.parametrize("is_manual", [False, True])
def test_unreduced_operands_are_an_error(name, is_manual):
    f, x = OF_UNREDUCED[name], integers((8, 8))

    def in_shard_map(x):
        def of_shard(x):
            return lax.psum(f(lax.pcast(x, "a", to="unreduced")), "a")

        return jax.shard_map(of_shard, in_specs=P(None, "a"), out_specs=P())(x)

    def on_explicit_axes(x):
        return f(jnp.matmul(x, x.T, out_sharding=P(None, None, unreduced={"a"})))

    with mesh_of("explicit") as mesh:
        (x,) = put(mesh, (P(None, "a"),), (x,))
        with pytest.raises(_compat.ShardingTypeError, match=r"unreduced.*jax\.sharding\.reshard"):
            jax.jit(in_shard_map if is_manual else on_explicit_axes)(x)


@NOT_IN_THIS_JAX
def test_unreduced_out_sharding_is_an_error():
    unreduced = P(None, unreduced={"a"})
    with mesh_of("explicit"), pytest.raises(NotImplementedError, match="all-reduce"):
        jof.segment_sum(np.ones((4, 3)), np.arange(4), 4, out_sharding=unreduced)


@NOT_IN_THIS_JAX
def test_fused_function_of_a_reduced_operand():
    """Each device adds its part to the gradient of an operand that is "reduced"."""
    x, w = integers((8, 4)), integers((4,), 1)

    def gradient(f):
        def of_shard(x, w):
            dw = jax.grad(lambda w: f(x, w).sum())(lax.pcast(w, "a", to="reduced"))
            return lax.psum(dw, "a")

        return jax.jit(jax.shard_map(of_shard, in_specs=(P("a"), P()), out_specs=P()))

    def f(x, w):
        return x * w * w

    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (P("a"), P()), (x, w))
        assert_close(gradient(jof.fuse(f))(*arguments), gradient(f)(*arguments), 1e-6)


# --- upsample_nearest2d: images that are sharded --------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "axes"),
    [
        ("nchw", {"h": "a", "w": "b"}),
        ("nchw", {"n": "a", "h": "b"}),
        ("nhwc", {"h": "a", "c": "b"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_sharded_images_are_gathered(axis_types, equation, axes):
    """Sharded image dimensions are gathered; the other dimensions stay sharded."""
    f = functools.partial(jof.upsample_nearest2d, scale_factor=2, data_format=equation.upper())
    x = integers([{"w": 8}.get(letter, 4) for letter in equation])
    h, w = equation.index("h"), equation.index("w")
    dy, expected = on_one_device(lambda x: x.repeat(2, axis=h).repeat(2, axis=w), (0,), (x,))
    spec = P(*(axes.get(letter) for letter in equation))
    whole = P(*(None if letter in "hw" else axes.get(letter) for letter in equation))
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (whole, spec), (dy, x))
        with pytest.warns(jof.GatherWarning, match="upsample_nearest2d: dimension"):
            y, (dx,) = jax.jit(value_and_pullback(f, (0,)))(*arguments)
        assert_close((y, (dx,)), expected)
        assert_sharded(y, NamedSharding(mesh, whole))
        if axis_types == "explicit":  # the gradient has the type of the input
            assert_sharded(dx, NamedSharding(mesh, spec))


# --- rows that are sharded ------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("f", [jof.softmax, jof.log_softmax, jof.layer_norm, jof.rms_norm])
def test_sharded_rows_are_gathered(f, axis):
    name, f = f.__name__, functools.partial(f, axis=axis)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    dy, expected = on_one_device(functools.partial(f, implementation="xla"), (0,), (x,))
    with mesh_of("auto") as mesh:
        arguments = put(mesh, (P("b"), P("b", "a")), (dy, x))
        with pytest.warns(jof.GatherWarning, match=f"{name}: dimension {axis % 2} "):
            actual = jax.jit(value_and_pullback(f, (0,)))(*arguments)
        assert_close(actual, expected, 1e-5)


def test_edges_of_a_maximum_are_gathered():
    def f(table, senders, receivers):
        return jof.message_max(lambda x: x, (table,), senders, receivers, num_segments=7)

    xs = integers((6, 4)), np.arange(16) % 6, np.arange(16) * 5 % 7
    expected = jax.jit(f)(*xs)
    with mesh_of("auto") as mesh:
        arguments = put(mesh, (P(), P("a"), P("a")), xs)
        with pytest.warns(jof.GatherWarning, match="message_max"):
            assert_close(jax.jit(f)(*arguments), expected)


@pytest.mark.parametrize("has_plan", [False, True])
def test_an_order_of_all_edges_is_not_gathered(has_plan):
    """Each device sorts its own edges, and needs no other order. There is no warning of one."""

    def f(logits, values, senders, receivers):
        plan = jof.segment_plan(receivers, 7) if has_plan else None
        sums = jof.attention_sum(logits, values, senders, receivers, num_segments=7, plan=plan)
        return (sums**2).sum(), sums

    senders, receivers = np.arange(16) % 6, np.arange(16) * 5 % 7
    xs = integers((16, 2)) / 4, integers((6, 2, 3)), senders, receivers
    step = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    expected = step(*xs)
    with mesh_of("auto") as mesh:
        arguments = put(mesh, (P("a"), P(), P("a"), P("a")), xs)
        with warnings.catch_warnings():
            warnings.simplefilter("error", jof.GatherWarning)
            if has_plan:  # the user's own call sorts all edges
                warnings.filterwarnings("ignore", "segment_plan", jof.GatherWarning)
            program = step.lower(*arguments).compile()
        assert "all-gather" not in collectives(program.as_text())
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), program(*arguments), expected
        )


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("name", ["message_sum", "message_mean", "message_max"])
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
def test_gradients_of_edges_where_a_mesh_axis_also_shards_features(name, is_product):
    """Sums of products have kernels of their own."""
    ids = np.arange(8) % 5
    xs = integers((8, 8, 3)), ids, integers((8, 8), 1)

    def f(table, ids, edges):
        def function(x, e):
            return x * e if is_product else jnp.tanh(x) * e

        message = functools.partial(getattr(jof, name), function, (table,), ids, ids)
        return message(edges[..., None], num_segments=8).sum()

    step = jax.value_and_grad(f, argnums=(0, 2))
    expected = step(*xs)
    with mesh_of("explicit") as mesh:
        for of_edges in (P(), P(None, "a"), P("a")):
            arguments = put(mesh, (P(None, "a"), P("a"), of_edges), xs)
            value, gradients = step(*arguments)
            for gradient, x in zip(gradients, arguments[::2], strict=True):
                assert jax.typeof(gradient).sharding == jax.typeof(x).sharding
            found = value, gradients
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


@pytest.mark.parametrize("wrt", [(0,), (1,), (0, 1)])
def test_second_derivatives_of_attention_in_a_shard_map(wrt):
    """Each device has a graph of its own."""
    ids = np.arange(8) % 2
    xs = integers((4, 8, 2)) / 8, integers((4, 2, 2, 3), 1) / 8

    def step(*xs):
        def loss(*moving):
            logits, values = (moving[wrt.index(k)] if k in wrt else x[0] for k, x in enumerate(xs))
            return (jof.attention_sum(logits, values, ids, ids, num_segments=2) ** 2).sum()

        def of_gradient(*moving):
            return sum((g**3).sum() for g in gradient(*moving))

        gradient = jax.grad(loss, range(len(wrt)))
        moving = [xs[k][0] for k in wrt]
        orders = jax.jvp(gradient, moving, moving)[1], jax.grad(of_gradient)(*moving)
        return jax.tree.map(lambda x: x[None], orders)

    of_part = jax.jit(step)
    parts = [of_part(*(x[k : k + 1] for x in xs)) for k in range(4)]
    expected = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
    with mesh_of("auto") as mesh:
        mapped = jax.shard_map(step, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        assert_close(jax.jit(mapped)(*put(mesh, (P("a"), P("a")), xs)), expected, 1e-5)


@pytest.mark.parametrize("specs", [(P(None, "a"), P("a")), (P(None, ("a", "b")), P("b"))], ids=str)
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
def test_fused_rows_where_a_mesh_axis_also_shards_columns(specs):
    """Results have the types of the function's own."""
    xs = integers((8, 16)) / 8, integers((8, 1), 1)

    def f(x, y):
        return (x * x).mean(-1, keepdims=True) * y, jnp.exp(x).sum(-1) * y[:, 0]

    def orders(f):
        def loss(*xs):
            return sum((y**2).sum() for y in f(*xs))

        gradient = jax.grad(loss, (0, 1))
        return jax.jit(lambda *xs: (f(*xs), gradient(*xs), jax.jvp(gradient, xs, xs)[1]))

    with mesh_of("explicit") as mesh:
        arguments = put(mesh, specs, xs)
        found, expected = orders(jof.fuse(f))(*arguments), orders(f)(*arguments)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
        assert_close(found, expected, 1e-6)


# --- permute --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_permute_of_a_shard_that_need_not_move(axis_types):
    """Each device has one row, whose bytes are the same as a column."""
    x = integers((8, 6))
    with mesh_of(axis_types) as mesh:
        (sharded,) = put(mesh, (P(("a", "b")),), (x,))
        compiled = jax.jit(jof.permute).lower(sharded).compile()
        assert collectives(compiled.as_text()) == {}
        assert "custom-call" not in compiled.as_text()
        assert_close(compiled(sharded), x.T)
        assert_sharded(compiled(sharded), NamedSharding(mesh, P(None, ("a", "b"))))


# --- sums and lookups of rows ---------------------------------------------------------------------

ROWS = 64  # 16 on each of four devices
BORDERS = np.array(
    (
        *(0, 15, 16, 17, 31, 32, 47, 48, 63),
        *(-1, -16, -17, -63, -64),
        *(64, 65, -65, 2**31 - 1, -(2**31)),
        *(16, 16, 15, 63, 63, 0),
    ),
    np.int32,
)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_16_bit_rows_are_summed_over_devices_in_float32(axis_types):
    """257 ones plus the operand's 1 is 258; bfloat16 rounds 257 to 256, and 256 + 1 to 256."""
    ids = np.zeros(257 + 7, np.int32)
    ids[257:] = 9
    x = np.ones(ids.shape, jnp.bfloat16)
    operand = np.array([1, -0.0, 2], jnp.bfloat16)
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P(), P(("a", "b")), P(("a", "b"))), (operand, ids, x))
        y = np.asarray(jax.jit(jof.scatter_add)(*arguments))
        np.testing.assert_array_equal(y.astype(float), [258, 0, 2])
        assert np.signbit(y[1])


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
@pytest.mark.parametrize("name", ["scatter_max", "scatter_min"])
def test_a_nan_of_one_device_reaches_the_extremum(axis_types, name):
    """All-reduces may drop NaNs."""
    x = integers((16, 3))
    x[5, 1] = np.nan
    operand, ids = integers((4, 3), seed=1), np.arange(16) % 4
    expected = operand.copy()
    (np.maximum if name == "scatter_max" else np.minimum).at(expected, ids, x)
    with mesh_of(axis_types) as mesh:
        rows = P(("a", "b"))
        arguments = put(mesh, (P(), rows, rows), (operand, ids, x))
        compiled = jax.jit(getattr(jof, name)).lower(*arguments).compile()
        assert "all-reduce" in collectives(compiled.as_text())
        np.testing.assert_array_equal(np.asarray(compiled(*arguments)), expected)


@pytest.mark.parametrize(
    ("axis_types", "dtype"),
    [
        ("auto", "float32"),
        ("auto", "float8_e4m3fn"),
        ("auto", "int8"),
        ("auto", "bool"),
        ("explicit", "bfloat16"),
        ("explicit", "uint32"),
        ("explicit", "complex64"),
    ],
)
def test_lookup_in_a_sharded_table_moves_bits(axis_types, dtype):
    """Bits are kept, including NaN payloads and -0.

    The ids are at the borders of shards, out of range, and repeated.
    """
    table = any_bits(np.random.default_rng(0), (ROWS, 3, 2), dtype)
    expected = np.asarray(jnp.take(table, BORDERS, axis=0))
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P("a"), P()), (table, BORDERS))
        compiled = jax.jit(jof.embedding_lookup).lower(*arguments).compile()
        assert collectives(compiled.as_text()) == {"all-reduce": 1}
        actual = np.asarray(compiled(*arguments))
        np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_ids_of_any_dtype_in_sharded_rows(dtype):
    """Tables with more rows than the ids' dtype can count, and ids beyond int32.

    The expected values come from NumPy because jnp may wrap ids beyond int32.
    """
    rows, info = 1024, np.iinfo(dtype)
    near = [k * 256 + d for k in range(-5, 5) for d in (-1, 0, 1)]
    ids = [info.min, info.max, *(i for i in near if info.min <= i <= info.max)]
    table, x = integers((rows, 2)), integers((len(ids), 2), seed=1)
    looked_up, added, sums = np.full_like(x, np.nan), table.copy(), np.zeros_like(table)
    for n, i in enumerate(ids):
        if 0 <= i < rows:
            sums[i] += x[n]
        if -rows <= i < rows:
            looked_up[n] = table[i]
            added[i] += x[n]

    def f(table, ids, x):
        lookup = jof.embedding_lookup(table, ids)
        return lookup, jof.scatter_add(table, ids, x), jof.segment_sum(x, ids, rows)

    with jax.enable_x64(True), mesh_of("auto") as mesh:
        arguments = put(mesh, (P("a"), P(), P()), (table, np.array(ids, dtype), x))
        shardings = [NamedSharding(mesh, spec) for spec in (P(), P("a"), P("a"))]
        actual = jax.jit(f, out_shardings=(*shardings,))(*arguments)
        assert_close(actual, (looked_up, added, sums))


@pytest.mark.parametrize("options", [{"mode": "clip"}, {"indices_are_sorted": True}], ids=str)
@pytest.mark.parametrize("name", ["segment_sum", "scatter_add"])
def test_sums_into_sharded_rows(name, options):
    """Each id falls into the rows of at most one device, so none is counted twice."""
    ids = np.sort(BORDERS[BORDERS >= 0]) if "indices_are_sorted" in options else BORDERS
    x, operand = integers((len(ids), 3)), integers((ROWS, 3), seed=1)
    mode = options.get("mode", "drop")
    if name == "segment_sum":
        f, xs = (lambda x, ids: jof.segment_sum(x, ids, ROWS, **options)), (x, ids)
        expected = jax.ops.segment_sum(x, ids, ROWS, mode=mode)
    else:
        f, xs = functools.partial(jof.scatter_add, **options), (operand, ids, x)
        expected = jnp.asarray(operand).at[ids].add(x, mode=mode)
    with mesh_of("auto") as mesh:
        specs = [P("a") if len(x) == ROWS else P() for x in xs]
        arguments = put(mesh, specs, xs)
        compiled = jax.jit(f, out_shardings=NamedSharding(mesh, P("a"))).lower(*arguments).compile()
        assert collectives(compiled.as_text()) == {}
        assert_close(compiled(*arguments), expected)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (2, 1), (-1, None)], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_batches_of_sharded_tables(axis_types, axes):
    """One mesh axis shards the batch, the other the rows of each table."""
    tables, ids = integers((4, ROWS, 3)), np.stack([BORDERS[k::4][:5] for k in range(4)])
    xs = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip((tables, ids), axes, strict=True)
    ]
    specs = [list(spec) for spec in ((P("a", None)), P(None))]
    for spec, axis in zip(specs, axes, strict=True):
        if axis is not None:
            spec.insert(len(spec) if axis == -1 else axis, "b")
    specs = [P(*spec) for spec in specs]

    def batched(f):
        return jax.vmap(lambda table, ids: f(table, ids), in_axes=axes)

    take = batched(functools.partial(jnp.take, axis=0))
    dy, expected = on_one_device(take, (0,), xs)
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P("b"), *specs), (dy, *xs))
        run = value_and_pullback(batched(jof.embedding_lookup), (0,))
        gradient = NamedSharding(mesh, specs[0])
        shardings = (NamedSharding(mesh, P("b")), (gradient,)) if axis_types == "auto" else None
        compiled = jax.jit(run, out_shardings=shardings).lower(*arguments).compile()
        # The gradient of a table that examples share is summed over the examples.
        assert_collectives(compiled.as_text(), 1 + (axes[0] is None))
        actual = compiled(*arguments)
        assert_close(actual, expected)
        assert_sharded(actual[1][0], gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_training_step_with_a_sharded_table(axis_types, dtype):
    """Rows are sharded over one axis and examples over the other.

    There are two all-reduces, no array is as large as the table, and the table keeps its sharding
    although no constraint asks for it.
    """
    table, ids = integers((ROWS, 4), dtype=dtype), np.resize(BORDERS % ROWS, 32)

    def step(lookup):
        def loss(table, ids):
            return jnp.sum(lookup(table, ids).astype(jnp.float32) ** 2) / 2

        return lambda table, ids: table - jax.grad(loss)(table, ids)

    expected = step(lambda table, ids: jnp.take(table, ids, axis=0))
    expected = expected(jnp.asarray(table, jnp.float32), ids).astype(dtype)
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P("a"), P("b")), (table, ids))
        compiled = jax.jit(step(jof.embedding_lookup)).lower(*arguments).compile()
        assert collectives(compiled.as_text()) == {"all-reduce": 2}
        assert f"[{ROWS},4]" not in compiled.as_text()
        new = compiled(*arguments)
        assert_sharded(new, NamedSharding(mesh, P("a")))
        assert_close(new, expected)


# Reason that a table is gathered -> (its rows, the number of ids, the mesh axis that shards ids).
GATHERED = {
    "more is looked up than there is": (8, 64, None),
    "the ids have the axis": (ROWS, 16, "a"),
}


@pytest.mark.parametrize("reason", GATHERED)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_tables_that_are_gathered(axis_types, reason):
    rows, count, axis = GATHERED[reason]
    table, ids = integers((rows, 4)), np.arange(count) * 7 % rows
    dy, expected = on_one_device(lambda t, ids: jnp.take(t, ids, axis=0), (0,), (table, ids))
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P(axis), P("a"), P(axis)), (dy, table, ids))
        with pytest.warns(jof.GatherWarning, match="embedding_lookup"):
            actual = jax.jit(value_and_pullback(jof.embedding_lookup, (0,)))(*arguments)
        assert_close(actual, expected)
        if axis_types == "explicit":
            assert_sharded(actual[1][0], NamedSharding(mesh, P("a")))


def test_rows_that_devices_do_not_divide():
    table, ids = integers((13, 5)), np.arange(6) * 4 % 13
    with mesh_of("auto") as mesh:

        @jax.jit
        def run(table, ids):
            table = lax.with_sharding_constraint(table, NamedSharding(mesh, P("a")))
            y, (dx,) = value_and_pullback(jof.embedding_lookup, (0,))(y_like, table, ids)
            return y, lax.with_sharding_constraint(dx, NamedSharding(mesh, P("a")))

        y_like = integers((6, 5), seed=1)
        with pytest.warns(jof.GatherWarning, match="embedding_lookup"):
            actual = run(table, ids)
    dx = np.zeros_like(table)
    np.add.at(dx, ids, y_like)
    assert_close(actual, (table[ids], dx))


# --- the warning ----------------------------------------------------------------------------------


def gathering(size):
    """Compiles a program that gathers."""
    with mesh_of("auto") as mesh:
        (x,) = put(mesh, (P(None, None, "a"),), (integers((1, 1, 4, size)),))
        return jax.jit(lambda x: jof.upsample_nearest2d(x, 2)).lower(x).compile()


def test_warning_is_given_once():
    with pytest.warns(jof.GatherWarning):
        gathering(1)
    gathering(2)


def test_warning_can_be_silenced():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=jof.GatherWarning)
        assert collectives(gathering(3).as_text()) == {"all-gather": 1}


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_factors_of_a_mesh_axis(parts):
    """After a reshape, one axis shards two dimensions, those of the call, too."""
    count = 4 if parts % 3 else 6
    if len(jax.devices()) < count:
        pytest.skip("needs more devices")
    mesh = jax.make_mesh((count,), ("a",), (AxisType.Auto,), devices=jax.devices()[:count])
    x = jax.device_put(integers((12, 5)).astype(np.float32), NamedSharding(mesh, P("a")))

    def f(x):
        return jof.softmax(x.reshape(parts, -1, 5)).reshape(x.shape)

    with warnings.catch_warnings():
        warnings.simplefilter("error", jof.GatherWarning)
        program = jax.jit(f).lower(x).compile()
    assert collectives(program.as_text()) == {}
    np.testing.assert_allclose(program(x), jax.nn.softmax(x), rtol=1e-5)


def test_a_reshape_may_divide_a_mesh_axis_among_dimensions(monkeypatch):
    """As in gradient accumulation: rows that a mesh axis of 4 shards become 2 x 8 rows."""
    table = np.linspace(-2, 2, 33, dtype=np.float32).reshape(11, 3)
    words = np.arange(16 * 5).reshape(16, 5) % 11

    def of_parts(table, parts):
        def add(total, part):
            return total + jax.grad(lambda table: jnp.sum(jnp.sin(table[part])))(table), None

        return lax.scan(add, jnp.zeros_like(table), parts)[0]

    def step(table, words):
        return of_parts(table, words.reshape(2, 8, 5))

    with mesh_of("auto") as mesh:
        arrays = put(mesh, (P(), P("a")), (table, words))
        expected = jax.jit(step)(*arrays)
        with warnings.catch_warnings():
            warnings.simplefilter("error", jof.GatherWarning)
            found = jax.jit(jof.accelerate(step))(*arrays)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

        monkeypatch.setattr(_primitive, "_finer", lambda mesh: iter([mesh]))
        with pytest.warns(jof.GatherWarning, match="mesh axes cannot express its sharding"):
            found = jax.jit(jof.accelerate(lambda *args: step(*args)))(*arrays)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

        def constrained(table, words):
            parts = words.reshape(2, 8, 5)
            parts = lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, "a")))
            return of_parts(table, parts)

        with warnings.catch_warnings():
            warnings.simplefilter("error", jof.GatherWarning)
            found = jax.jit(jof.accelerate(constrained))(*arrays)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


# --- the documentation ----------------------------------------------------------------------------


def test_examples_of_the_documentation():
    page = Path(__file__).parents[1] / "docs" / "sharding.md"
    with warnings.catch_warnings():  # the page changes warning filters
        assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_gradients_in_a_shard_map_keep_no_empty_arrays():
    """No residual is empty: on several GPUs, XLA of jaxlib 0.11.2 ends the process if one is."""
    ids = jnp.array([0, 2, 1, 1])

    def loss(table, weights):
        def sums(message, *weights):
            return jof.message_sum(message, (table,), ids, ids, *weights, num_segments=3)

        plain, weighted = sums(lambda row: row), sums(lambda row, w: row * w, weights)
        general = sums(lambda row, w: jnp.tanh(row * w), weights)
        means = jof.attention_sum(weights[:, 0], table, ids, ids, num_segments=3)
        return plain + weighted + general + means

    with mesh_of("auto") as mesh:
        specs = {"in_specs": (P(), P()), "out_specs": P()}
        mapped = jax.shard_map(loss, mesh=mesh, **specs)
        operands = jnp.ones((3, 2)), jnp.ones((4, 1))
        text = jax.jit(jax.grad(lambda *xs: mapped(*xs).sum())).lower(*operands).as_text()
    passed = [line for line in text.splitlines() if re.search(r"sdy\.(manual|return)", line)]
    assert len(passed) >= 4
    assert not any("tensor<0x" in line for line in passed)


@pytest.mark.parametrize("f", [jof.softmax, jof.logsumexp, jof.rms_norm])
def test_axes_that_are_reduced_together(f):
    x = integers((2, 3, 8))
    expected = f(x, axis=(1, 2))
    with mesh_of("explicit") as mesh:
        shards = jax.device_put(x, NamedSharding(mesh, P(None, None, "a")))
        is_whole = f is not jof.logsumexp
        reason = "every device needs all" if is_whole else "it is reduced together"
        with pytest.warns(jof.GatherWarning, match=f"dimension 2 .* {reason}"):
            y = jax.jit(functools.partial(f, axis=(1, 2)))(shards)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_operands_on_no_mesh(traced):
    """Outside of `jax.set_mesh`, arrays on Explicit axes meet others as in jnp."""
    with mesh_of("explicit") as mesh:
        x = jax.device_put(integers((8, 2)), NamedSharding(mesh, P("a")))
    y = jnp.asarray(integers((8, 2), seed=1))
    expected = jax.typeof(x)
    product = jax.jit(jof.multiply) if traced else jof.multiply
    chosen = jax.jit(jof.where) if traced else jof.where
    norm = functools.partial(jof.layer_norm, residual=y)
    found = [product(x, y), product(y, x), product(x, y[0]), chosen(y > 0, x, y), norm(x)[1]]
    wanted = [x * y, x * y, x * y[0], jnp.where(y > 0, x, y), x + y]
    for a, b in zip(found, wanted, strict=True):
        assert jax.typeof(a) == expected
        np.testing.assert_array_equal(a, b)


# Functions of ids and of weights (16, 4, 1), with a table that they make.
WITH_OWN_TABLE = {
    "lookup": lambda ids, w: jof.embedding_lookup(jnp.arange(64.0).reshape(16, 4, 1), ids) * w,
    "sum": lambda ids, w: jof.message_sum(
        jnp.multiply, (jnp.arange(128.0).reshape(8, 4, 4),), ids, ids, w, num_segments=8
    ),
    "attention": lambda ids, w: jof.attention_sum(
        w[..., 0], jnp.arange(64.0).reshape(8, 4, 2) / 64, ids, jnp.arange(16) % 3, num_segments=8
    ),
}


@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("name", WITH_OWN_TABLE)
@pytest.mark.usefixtures("x64")  # terms of gradients cancel
def test_tables_on_no_mesh(name):
    """Outside of `jax.set_mesh`, arrays that a program makes are on no mesh."""
    ids, w = np.arange(16) * 5 % 8, integers((16, 4, 1), dtype=np.float64)
    f = WITH_OWN_TABLE[name]
    run = jax.jit(lambda ids, w: (f(ids, w), gradients(functools.partial(f, ids))(w)))
    expected = run(ids, w)
    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (P("b"), P(None, "a")), (ids, w))
    assert_close(run(*arguments), expected, 1e-6)


ROWS_OF = {
    "softmax": (jof.softmax, jax.nn.softmax),
    "log_softmax": (lambda x: jof.log_softmax(x, (1, 2)), lambda x: jax.nn.log_softmax(x, (1, 2))),
    "layer_norm": (jof.layer_norm, None),
    "rms_norm": (lambda x: jof.rms_norm(x, axis=(1, 2)), None),
    "norm_of_columns": (lambda x: jof.rms_norm(x, axis=1), None),
    "norm_of_first_axes": (lambda x: jof.layer_norm(x, axis=(0, 1)), None),
    "norm_of_reversed_axes": (lambda x: jof.layer_norm(x, axis=(2, 1)), None),
    "residual": (lambda x: jof.rms_norm(x, residual=2 * x), None),
    "group_norm": (lambda x: jof.group_norm(x, 2), None),
}


@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("name", ROWS_OF)
@pytest.mark.parametrize("spec", [P(None, None, "a"), P("b", "a"), P(None, ("a", "b"))])
def test_results_of_rows_have_the_type_of_their_operand(name, spec):
    """As with JAX's formulas, whose results may be the carry of a loop."""
    f, reference = ROWS_OF[name]
    x = integers((8, 8, 8), dtype=np.float32)
    with mesh_of("explicit") as mesh:
        (sharded,) = put(mesh, (spec,), (x,))
        for y in jax.tree.leaves(jax.jit(f)(sharded)):
            assert jax.typeof(y) == jax.typeof(sharded)
        assert_close(jax.jit(f)(sharded), f(x), 1e-6)
        if reference:
            assert jax.typeof(reference(sharded)) == jax.typeof(f(sharded))


@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("specs", [(P("a"), P(None, None, "b")), (P(), P("b", None, "a"))])
@pytest.mark.parametrize("swaps", [False, True])
def test_the_sharding_of_a_residual_is_that_of_the_sum(specs, swaps):
    x = integers((8, 8, 8), dtype=np.float32)
    with mesh_of("explicit") as mesh:
        xs = put(mesh, specs[::-1] if swaps else specs, (x, x))
        expected = jax.typeof(jnp.add(*xs))
        for y in jax.jit(lambda x, r: jof.layer_norm(x, residual=r))(*xs):
            assert jax.typeof(y) == expected


def along(f):
    """The derivative of f in the direction of its operands."""
    return lambda *xs: jax.jvp(f, xs, xs)[1]


def gradients(f):
    def loss(*xs):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*xs)))

    return lambda *xs: jax.grad(loss, argnums=tuple(range(len(xs))))(*xs)


DERIVATIVES = {
    "value": lambda f: f,
    "gradients": gradients,
    "jvp-of-gradients": lambda f: along(gradients(f)),
    "gradients-of-jvp": lambda f: gradients(along(f)),
    "gradients-of-gradients": lambda f: gradients(gradients(f)),
    "jvp-of-jvp": lambda f: along(along(f)),
}


def cross_entropy(x, labels, **options):
    return jof.softmax_cross_entropy_with_integer_labels(x, labels, **options)


# Functions of labels, of rows (..., 4, 8), and of further operands, which the second item lists.
ROWS_OPS = {
    "softmax": (lambda _, x: jof.softmax(x), ()),
    "masked_log_softmax": (
        lambda labels, x: jof.log_softmax(x, where=labels[..., None] != 3).clip(-10),
        (),
    ),
    "logsumexp": (lambda _, x: jof.logsumexp(x, -1), ()),
    "cross_entropy": (lambda labels, x: cross_entropy(x, labels), ()),
    "masked_cross_entropy": (lambda labels, x: cross_entropy(x, labels, where=labels != 3), ()),
    "layer_norm": (lambda _, *xs: jof.layer_norm(*xs), ((8,), (8,))),
    "rms_norm": (lambda _, x, s, r: jof.rms_norm(x, s, residual=r), ((8,), (8, 4, 8))),
    "layer_norm_of_columns": (lambda _, *xs: jof.layer_norm(*xs, axis=-3), ((8,), (8,))),
    "layer_norm_of_two_axes": (
        lambda _, *xs: jof.layer_norm(*xs, axis=(-2, -1)),
        ((4, 8), (4, 8)),
    ),
    "group_norm": (lambda _, x, *vectors: jof.group_norm(x, 2, *vectors), ((8,), (8,))),
}
# Each mesh axis shards another dimension: of x, and of the labels and the other operands.
ROWS_SPECS = {
    "columns": (P("a", None, "b"), P("a"), {(8,): P("b"), (4, 8): P(None, "b")}),
    "one axis": (P("a"), P("a"), {(8,): P("a"), (4, 8): P(None, "a")}),
    "joined": (P("a"), P(None, "b"), {(8, 4, 8): P(None, "b")}),
    "x joined": (P(), P("a"), {(8, 4, 8): P("a")}),
}


def operands_of_rows(name, batch=()):
    f, others = ROWS_OPS[name]
    rng = np.random.default_rng(len(name))
    labels = rng.integers(-1, 8, (*batch, 8, 4))
    shapes = [(*batch, *shape) for shape in ((8, 4, 8), *others)]
    xs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return f, labels, *xs


def check_derivatives(f, specs, arguments, derivative, axes=None):
    """Compares the types of all derivatives, and the values of one, with those of one device.

    Gradients have the types of operands, tangents those of values. If operands are mapped, `axes`
    are their batch axes. `f` takes labels first.
    """

    def of(derive):
        def run(labels, *xs):
            return derive(functools.partial(f, labels))(*xs)

        return jax.jit(run if axes is None else jax.vmap(run, axes))

    expected = of(DERIVATIVES[derivative])(*arguments)
    with mesh_of("explicit") as mesh:
        sharded = put(mesh, specs, arguments)
        for name, derive in DERIVATIVES.items():
            types = jax.eval_shape(of(derive), *sharded)
            if axes is not None:
                assert all(y.sharding.spec[0] == "a" for y in jax.tree.leaves(types))
            else:
                values = jax.eval_shape(of(DERIVATIVES["value"]), *sharded)
                like = sharded[1:] if "gradients" in name else jax.tree.leaves(values)
                for y, x in zip(jax.tree.leaves(types), like, strict=True):
                    assert y.sharding.spec == jax.typeof(x).sharding.spec
        actual = of(DERIVATIVES[derivative])(*sharded)
        for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def with_derivatives(*lists):
    """All combinations, with the derivatives in turn. Two of seven run without --exhaustive."""
    combinations = zip(itertools.product(*lists), itertools.cycle(DERIVATIVES))
    return [
        pytest.param(*c, d, marks=pytest.mark.exhaustive if i % 7 % 4 else [])
        for i, (c, d) in enumerate(combinations)
    ]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize(("name", "specs", "derivative"), with_derivatives(ROWS_OPS, ROWS_SPECS))
def test_functions_of_rows_with_explicit_axes(name, specs, derivative):
    """Operands are also sharded differently, and along dimensions that are gathered."""
    if jax.__version_info__ < (0, 10) and name == "masked_log_softmax" and "joined" in specs:
        pytest.skip("here the gradient of jnp.where itself has the sharding of the mask")
    f, *arguments = operands_of_rows(name)
    of_x, of_labels, of_others = ROWS_SPECS[specs]
    others = [of_others.get(x.shape, P()) for x in arguments[2:]]
    check_derivatives(f, [of_labels, of_x, *others], arguments, derivative)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mapped", "derivative"), with_derivatives(ROWS_OPS, ("all", "x")))
def test_vmap_of_functions_of_rows_with_explicit_axes(name, mapped, derivative):
    """The batch axis is sharded."""
    f, *arguments = operands_of_rows(name, (8,))
    axes = [0 if mapped == "all" or i == 1 else None for i in range(len(arguments))]
    specs = [P() if axis is None else P("a") for axis in axes]
    arguments = [x if axis == 0 else x[0] for x, axis in zip(arguments, axes, strict=True)]
    check_derivatives(f, specs, arguments, derivative, (*axes,))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("residual", (P("a"), P("b"))),
        ("residual", (P("a"), P(None, "a"))),
        ("labels", (P("a"), P("b"))),
        ("labels", (P(None, None, "a"), P("a"))),
    ],
)
def test_shardings_that_do_not_fit_together(name, specs):
    """The value is an error of the same type as that of a sum, not only its derivatives."""
    with mesh_of("explicit") as mesh:
        x, y = put(mesh, specs, [np.zeros((8, 4, 8), np.float32)] * 2)
        if name == "residual":
            calls = (lambda: x + y), (lambda: jof.layer_norm(x, residual=y))
        else:
            labels = jnp.int32(y[..., 0])
            calls = (lambda: x + labels[..., None]), (lambda: cross_entropy(x, labels))
        for call in calls:
            with pytest.raises(Exception, match="shard") as error:
                call()
            assert type(error.value).__name__ == "ShardingTypeError"
        assert re.match(rf"\w+: .* and {name} .*; apply jax.sharding.reshard", str(error.value))


def test_a_mesh_axis_shards_one_dimension_of_a_result():
    with mesh_of("explicit") as mesh:
        logits, values = put(
            mesh, (P(None, "a"), P(None, None, "a")), (integers((8, 4)), integers((8, 4, 8)))
        )
        ids = jnp.arange(8)
        with pytest.raises(
            Exception, match=r"mesh axis 'a'; apply jax\.sharding\.reshard"
        ) as error:
            jof.attention_sum(logits, values, ids, ids, num_segments=8)
        assert type(error.value).__name__ == "ShardingTypeError"
        with pytest.raises(Exception, match="shard") as error:
            logits[..., None] * values
        assert type(error.value).__name__ == "ShardingTypeError"


def test_sum_of_rows_with_two_dimensions():
    """A dimension that may be sharded is not merged into another."""
    ids = jnp.array([0, 2, 1, 1])
    with mesh_of("explicit") as mesh:
        for spec in (P(None, "a"), P(None, None, "a")):
            table = jax.device_put(jnp.ones((3, 4, 8)), NamedSharding(mesh, spec))
            y = jax.eval_shape(
                lambda table: jof.message_sum(lambda row: row, (table,), ids, ids, num_segments=3),
                table,
            )
            assert [*y.sharding.spec][: len(spec)] == [*spec]


RECEIVERS = np.arange(16) * 5 % 8
GRAPH, SIZE = (RECEIVERS, RECEIVERS), {"num_segments": 8}
# Functions of a table with 4 x 8 features and of an array of edges with the given features.
OF_FEATURES = {
    "product": ((4, 1), lambda x, w: jof.message_sum(jnp.multiply, (x,), *GRAPH, w, **SIZE)),
    "product_of_all": ((4, 8), lambda x, w: jof.message_sum(jnp.multiply, (x,), *GRAPH, w, **SIZE)),
    "product_of_none": (
        (1, 1),
        lambda x, w: jof.message_sum(jnp.multiply, (x,), *GRAPH, w, **SIZE),
    ),
    "attention": ((), lambda x, w: jof.attention_sum(w, x, *GRAPH, **SIZE)),
    "attention_of_heads": ((4,), lambda x, w: jof.attention_sum(w, x, *GRAPH, **SIZE)),
    "attention_of_features": ((4, 8), lambda x, w: jof.attention_sum(w, x, *GRAPH, **SIZE)),
    "softmax": (
        (4, 8),
        lambda x, w: x[:1] + jof.segment_softmax(w, RECEIVERS, plan=jof.segment_plan(RECEIVERS, 8)),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("spec", [P(None, "b", "a"), P(None, None, "a"), P(None, "a")], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if "_of_" in name else [])
        for name in OF_FEATURES
    ],
)
def test_features_of_graphs_over_explicit_axes(name, spec):
    """Features that are sharded keep their sharding, or are gathered with a warning."""
    shape, f = OF_FEATURES[name]
    xs = integers((8, 4, 8)), integers((16, *shape), seed=1) / 8
    of_edges = P(None, *(a if n > 1 else None for n, a in zip(shape, spec[1:], strict=False)))

    def results(*xs):
        return f(*xs), *jax.jvp(jax.grad(lambda *xs: (f(*xs) ** 2).sum(), (0, 1)), xs, xs)

    expected = jax.jit(results)(*xs)
    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (spec, of_edges), xs)
        actual = jax.jit(results)(*arguments)
        assert_close((f(*arguments), *actual), (expected[0], *expected), 1e-5)
        for cotangents in actual[1:]:
            for x, argument in zip(cotangents, arguments, strict=True):
                assert_sharded(x, argument.sharding)
        if "product" in name:
            assert_sharded(actual[0], arguments[0].sharding)


# Functions of an array of edges (16, 4), of ids, and of a table (8, 4).
OF_EDGES = {
    "sum": lambda w, ids, x: jof.message_sum(lambda x: x, (x,), ids, ids, **SIZE),
    "product": lambda w, ids, x: jof.message_sum(jnp.multiply, (x,), ids, ids, w, **SIZE),
    "mean": lambda w, ids, x: jof.message_mean(
        lambda x, w: jnp.tanh(x + w), (x,), ids, ids, w, **SIZE
    ),
    "softmax": lambda w, ids, x: jof.segment_softmax(w, ids, plan=jof.segment_plan(ids, 8)),
    "attention": lambda w, ids, x: jof.attention_sum(w, x, np.arange(16) // 2, ids, **SIZE),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("batch", [None, "a"])
@pytest.mark.parametrize("mapped", list(itertools.product((0, None), repeat=3))[:-1], ids=str)
@pytest.mark.parametrize("name", OF_EDGES)
def test_vmap_of_graphs_over_explicit_axes(name, mapped, batch):
    """Edges are sharded, and the batch axis or not."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(RECEIVERS) for _ in range(4)])
    xs = rng.standard_normal((4, 16, 4)), ids, rng.standard_normal((4, 8, 4))
    specs = [("b",), ("b",), ()]
    specs = [P(*s) if d is None else P(batch, *s) for s, d in zip(specs, mapped, strict=True)]
    xs = [x[0] if d is None else x for x, d in zip(xs, mapped, strict=True)]

    def results(w, ids, x):
        def loss(w, x):
            y = OF_EDGES[name](w, ids, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)(w, x)

    run = jax.jit(jax.vmap(results, mapped))
    expected = run(*xs)
    with mesh_of("explicit") as mesh:
        assert_close(run(*put(mesh, specs, xs)), expected, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "specs", [("a", "b"), ("a", None), (None, "a"), (("a", "b"), "a")], ids=str
)
def test_softmax_of_rows_and_ids_over_different_axes(specs):
    logits, ct = integers((16, 8)), integers((16, 8), seed=1)

    def f(x, ids):
        return jof.segment_softmax(x, ids, 8)

    def results(x, ct, ids):
        y, pull = jax.vjp(lambda x: f(x, ids), x)
        return y, pull(ct)[0]

    expected = results(logits, ct, RECEIVERS)
    for axes in (P(specs[0]), P(None, specs[0])):
        with mesh_of("explicit") as mesh:
            arguments = put(mesh, (axes, axes, P(specs[1])), (logits, ct, RECEIVERS))
            for run in (results, jax.jit(results)):
                actual = run(*arguments)
                assert_close(actual, expected, 1e-6)
                for x in actual:
                    assert_sharded(x, arguments[0].sharding)


def softmax_in_jnp(w, ids):
    terms = jnp.exp(w - lax.stop_gradient(jax.ops.segment_max(w, ids, 8))[ids])
    return terms / jax.ops.segment_sum(terms, ids, 8)[ids]


def of_scatter(name, in_jnp):
    unique = {"unique_indices": name == "scatter_mul"}
    return (
        lambda w, x, ids: getattr(jof, name)(x, ids, w, **unique),
        lambda w, x, ids: getattr(x.at[ids], in_jnp)(w, **unique),
    )


def of_segments(name):
    is_product = name == "segment_prod"
    how = {"num_segments": 16 if is_product else 5, "unique_indices": is_product}
    return (
        lambda w, x, ids: getattr(jof, name)(w, ids, **how),
        lambda w, x, ids: getattr(jax.ops, name)(w, ids, **how),
    )


# Functions of updates, of a table and of ids, and the same in jnp.
OF_ROWS = {
    "segment_max": of_segments("segment_max"),
    "segment_min": of_segments("segment_min"),
    "segment_prod": of_segments("segment_prod"),
    "scatter_max": of_scatter("scatter_max", "max"),
    "scatter_min": of_scatter("scatter_min", "min"),
    "scatter_mul": of_scatter("scatter_mul", "multiply"),
    "segment_softmax": (
        lambda w, x, ids: jof.segment_softmax(w, ids, 8),
        lambda w, x, ids: softmax_in_jnp(w, ids),
    ),
}
# Of updates, of the table and of ids.
SPECS_OF_ROWS = [
    (P("b"), P(), P("b")),
    (P("a"), P(), P("b")),
    (P(), P("a"), P("b")),
    (P(None, "b"), P(None, "b"), P("b")),
    (P(None, "b"), P(None, "a"), P()),
    (P("a", "b"), P("b"), P(("a", "b"))),
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize(("jitted", "current"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    ("name", "specs", "derivative"), with_derivatives(OF_ROWS, SPECS_OF_ROWS), ids=str
)
@pytest.mark.usefixtures("x64")  # in second derivatives, terms of about 1 cancel to 1e-5
def test_reductions_of_rows_over_explicit_axes(name, specs, derivative, current, jitted):
    """Also outside of `jax.set_mesh`."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(16) if name in ("segment_prod", "scatter_mul") else np.arange(16) % 5
    xs = [rng.standard_normal((16, 8)) for _ in range(2)]

    def of(f):
        return lambda ids, *xs: DERIVATIVES[derivative](lambda w, x: f(w, x, ids))(*xs)

    f, in_jnp = map(of, OF_ROWS[name])
    expected = jax.jit(in_jnp)(ids, *xs)
    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (specs[2], *specs[:2]), (ids, *xs))
    with jax.set_mesh(mesh) if current else contextlib.nullcontext():
        actual = (jax.jit(f) if jitted else f)(*arguments)
    assert_close(actual, expected, 1e-5)
    if derivative.startswith("gradients"):
        for y, x in zip(actual, arguments[1:], strict=True):
            assert_sharded(y, x.sharding)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b"))], ids=str)
def test_plans_of_edges_over_explicit_axes(spec):
    table, ids = integers((8, 4)), RECEIVERS.astype(np.int32)

    def f(table, ids):
        how = {"plan": jof.segment_plan(ids, 8)}
        sums = jof.message_sum(lambda row: row * row, (table,), ids, ids, num_segments=8, **how)
        return sums, jof.segment_softmax(table[RECEIVERS], ids, **how)

    expected = f(table, ids)
    with mesh_of("explicit") as mesh:
        arguments = put(mesh, (P(), spec), (table, ids))
        for run in (f, jax.jit(f)):
            assert_close(run(*arguments), expected, 1e-6)
        plan = jof.segment_plan(arguments[1], 8)
        with pytest.raises(ValueError, match="plan was made from other ids"):
            jof.segment_softmax(table[RECEIVERS], arguments[1] * 0, plan=plan)


@pytest.mark.filterwarnings("ignore::jax_oneflow_ops.GatherWarning")
@pytest.mark.parametrize(
    "specs",
    [(P("e"), P(), P("e"), P("e")), (P(), P(None, None, "e"), P(), P())],
    ids=("edges", "features"),
)
def test_attention_over_shards(specs):
    """Each device takes the softmax of its own edges.

    For some receivers a device has no edges, or only edges with logit -inf.
    """
    rng = np.random.default_rng(0)
    nodes, edges = 12, 64
    senders = jnp.asarray(rng.integers(0, nodes, edges), jnp.int32)
    receivers = jnp.asarray(rng.integers(-2, nodes - 1, edges), jnp.int32)
    receivers = receivers.at[:8].set(3).at[40].set(3)
    logits = jnp.asarray(3 * rng.standard_normal((edges, 2)), jnp.float32).at[:8].set(-jnp.inf)
    values = jnp.asarray(rng.standard_normal((nodes, 2, 16)), jnp.float32)

    def gradients(logits, values, *graph):
        def loss(logits, values):
            y = jof.attention_sum(logits, values, *graph, num_segments=nodes)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)(logits, values)

    args = logits, values, senders, receivers
    wanted = jax.jit(gradients)(*args)
    count = min(8, len(jax.devices()))
    mesh = jax.make_mesh((count,), ("e",), devices=jax.devices()[:count])
    shards = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
    found = jax.jit(gradients)(*shards)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)
