"""Every JAX transformation of every op, against the same transformation of plain jnp.

The rows of the table are in catalogue.py. A column is a function of (case, f): it transforms f,
which is the op or its reference in jnp, and returns arrays. To add a column, write the function.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_oneflow_ops as jof
from tests.catalogue import (
    CASES,
    EACH_FAMILY,
    EACH_KIND,
    EACH_PRIMITIVE,
    FUNCTIONS,
    OPS,
    REPRESENTATIVE,
    Case,
)


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    transform: Callable[[Case, Callable[..., Any]], Any]
    group: str  # the column of docs/transformations.md
    core: bool  # also runs for variants
    # The cases that run this column: all cases; one of each kind if the transformation does not
    # depend on an op's formula; one of each family if it only exercises JAX's own machinery.
    among: tuple[Case, ...]
    # Whether the transformations of the op and of the reference are compiled into one program,
    # together with the group's other columns, to save time. The remaining columns test what happens
    # outside `jax.jit`, or compile programs themselves.
    traced: bool
    # The column whose reference results this column must reproduce; one compiled program computes
    # them.
    expects: str | None
    # Returns why the column does not apply to a case, or None.
    reason: Callable[[Case], str | None]


# For columns that only exercise JAX's own machinery.
FEW = tuple(case for case in EACH_FAMILY if case in REPRESENTATIVE or case.kernel)

# Functions that share another function's rules up to a flag or a factor; they are tested like
# variants. The last two are built from message_sum's rules; test_graph.py also tests their
# derivatives and batching.
TWINS = {"segment_min", "segment_prod", "segment_mean", "scatter_min", "rms_norm", "message_mean"}
TWINS |= {"scatter_max", "log_softmax"}
TWINS |= {"message_max", "attention_sum"}
# test_kernel.py also transforms this one.
TWINS |= {"rotation"}

# The groups of columns.
JIT = "`jit`"
SETTINGS = "settings"
GRAD = "`grad`"
JVP = "`jvp`"
TRANSPOSE = "transpose"
HIGHER = "2nd, 3rd order"
RULES = "remat, custom rules"
VMAP = "`vmap`"
CONTROL = "control flow"
SYMBOLIC = "symbolic shapes"

COLUMNS: dict[str, Column] = {}


def always(case: Case) -> str | None:
    return None


def not_linear(case: Case) -> str | None:
    return None if linear_sets(case.name) else "not linear in any operand"


def column(group, *, core=False, among=CASES, traced=True, expects=None, reason=always):
    def decorate(transform):
        name = transform.__name__
        COLUMNS[name] = Column(name, transform, group, core, among, traced, expects, reason)
        return transform

    return decorate


def cube(f):
    """A scalar function of f whose first three derivatives are not constant."""

    def loss(*xs):
        y = f(*xs)
        weights = 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 3
        return jnp.sum(weights * y * y * y)

    return loss


def grad(case, f):
    """The gradient with respect to every operand, including scalars."""
    return jax.grad(f, argnums=case.every_operand)


def tangents(case: Case) -> tuple[jax.Array, ...]:
    return tuple(x.reshape(-1)[::-1].reshape(x.shape) for x in case.inputs())


def result_of(case: Case) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(case.ref, *case.inputs())


def cotangents(case: Case) -> np.ndarray:
    y = result_of(case)
    return (np.arange(np.prod(y.shape)).reshape(y.shape) % 5 - 2).astype(y.dtype)


def vdot(xs, ys):
    return sum(jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True))


def plus(xs, number):
    return tuple(x + x.dtype.type(number) for x in xs)


def times(number, xs):
    return tuple(number * x for x in xs)


def assert_same(actual, expected, rtol: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        wide = np.asarray(e).astype(np.float64)
        assert np.all(np.isfinite(wide))
        # Scales rtol so that narrower types are allowed the same number of ulps.
        narrow = jnp.issubdtype(e.dtype, jnp.floating) and e.dtype != np.float64
        scale = float(jnp.finfo(e.dtype).eps / np.finfo(np.float64).eps) if narrow else 1
        atol = rtol * scale * np.max(np.abs(wide), initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=atol, strict=True)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(expected))


def assert_same_types(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (e.shape, e.dtype, e.weak_type)


# --- compilation ----------------------------------------------------------------------------------


@column(JIT, among=EACH_FAMILY, traced=False, expects="eager")
def eager(case, f):
    return f(*map(jnp.asarray, case.inputs()))


@column(JIT, core=True, traced=False, expects="eager")
def jit(case, f):
    return jax.jit(f)(*case.inputs())


@column(JIT, among=FEW, traced=False, expects="gradient")
def of_constants(case, f):
    return jax.jit(lambda: grad(case, cube(f))(*case.inputs()))()


@column(JIT, among=EACH_KIND)
def jit_in_jit(case, f):
    return jax.jit(lambda *xs: jax.jit(f)(*plus(xs, 1)) + jax.jit(f)(*xs))(*case.inputs())


@column(JIT, among=FEW, traced=False, expects="gradient")
def ahead_of_time(case, f):
    specs = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    return jax.jit(grad(case, cube(f))).lower(*specs).compile()(*case.inputs())


@column(JIT, among=EACH_FAMILY, traced=False)
def donated(case, f):
    total = jnp.ones_like(cotangents(case))
    result = jax.jit(lambda total, *xs: total + f(*xs), donate_argnums=0)(total, *case.inputs())
    assert total.is_deleted()
    return result


@column(JIT, among=EACH_FAMILY, traced=False)
def operands_donated(case, f):
    """The inputs' buffers are reused for results while the op may still read them."""

    def step(*xs):
        y = f(*xs).astype(xs[0].dtype)
        return [
            y.reshape(-1)[: x.size].reshape(x.shape) if y.size >= x.size else x + y.sum()
            for x in xs
        ]

    xs = [*map(jnp.asarray, case.inputs())]
    result = jax.jit(step, donate_argnums=case.every_operand)(*xs)
    assert all(x.is_deleted() for x in xs)
    return result


@column(JIT, among=FEW, traced=False)
def threads(case, f):
    compiled = jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))
    results = [None] * 4
    start = threading.Barrier(len(results))

    def work(i):
        with case.precision():  # the setting is per-thread
            start.wait()
            for _ in range(5):
                results[i] = jax.block_until_ready(compiled(*plus(case.inputs(), i)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


@column(JIT, traced=False)
def eval_shape(case, f):
    """Shapes, dtypes and weak types."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.shapes]
    batch = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in types]
    return [
        jax.eval_shape(f, *types),
        jax.eval_shape(jax.jit(f), *types),
        jax.eval_shape(grad(case, cube(f)), *types),
        jax.eval_shape(jax.jacrev(f, argnums=case.every_operand), *types),
        jax.eval_shape(jax.vmap(f), *batch),
    ]


# --- debugging and settings -----------------------------------------------------------------------


@column(SETTINGS, among=FEW, traced=False, expects="gradient")
def without_jit(case, f):
    with jax.disable_jit():
        return grad(case, cube(f))(*case.inputs())


@column(SETTINGS, among=FEW, traced=False, expects="jit_of_value_and_grad")
def debug_nans(case, f):
    """No NaN is reported."""
    with jax.debug_nans(True):
        return jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))(*case.inputs())


@column(SETTINGS, among=EACH_FAMILY, traced=False)
def x64(case, f):
    """Enabling 64-bit types changes neither the bits nor the types of 32-bit values."""
    xs = [x.astype(np.float32) for x in case.inputs()]

    def results(enabled):
        with jax.enable_x64(enabled):
            return jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))(*xs)

    wide, narrow = results(True), results(False)
    assert_same(wide, narrow, rtol=0)
    return wide


# --- differentiation ------------------------------------------------------------------------------


@column(GRAD, core=True, among=EACH_FAMILY, traced=False, expects="gradient")
def gradient(case, f):
    """The gradient outside `jax.jit`; hvp_forward_over_reverse computes it inside `jax.jit`."""
    return grad(case, cube(f))(*case.inputs())


@column(GRAD, among=EACH_KIND)
def gradient_of_one_operand(case, f):
    return [jax.grad(cube(f), argnums=i)(*case.inputs()) for i in case.every_operand]


@column(GRAD, among=EACH_KIND, traced=False, expects="jit_of_value_and_grad")
def jit_of_value_and_grad(case, f):
    return jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))(*case.inputs())


@column(GRAD, among=EACH_KIND)
def grad_of_jit(case, f):
    return grad(case, cube(jax.jit(f)))(*case.inputs())


@column(JVP, core=True)
def jvp(case, f):
    return jax.jvp(f, case.inputs(), tangents(case))


@column(JVP, among=EACH_KIND)
def jvp_of_one_operand(case, f):
    results = []
    for i, (x, v) in enumerate(zip(case.inputs(), tangents(case), strict=True)):
        before, after = case.inputs()[:i], case.inputs()[i + 1 :]
        results.append(jax.jvp(lambda x, b=before, a=after: f(*b, x, *a), (x,), (v,)))
    return results


@column(GRAD, among=EACH_KIND)
def vjp(case, f):
    y, pullback = jax.vjp(f, *case.inputs())
    return y, pullback(cotangents(case))


@column(JVP, among=EACH_KIND)
def linearize(case, f):
    y, linear = jax.linearize(f, *case.inputs())
    return y, linear(*tangents(case))


def part(xs, f, wrt):
    """f as a function of the operands `wrt` alone, and those operands."""

    def of_some(*operands):
        given = dict(zip(wrt, operands, strict=True))
        return f(*(given.get(i, x) for i, x in enumerate(xs)))

    return of_some, [xs[i] for i in wrt]


def transposed(xs, f, wrt):
    function, operands = part(xs, f, wrt)
    return jax.linear_transpose(function, *operands)


@functools.cache
def linear_sets(name: str) -> list[tuple[int, ...]]:
    """The sets of operands with respect to which the jnp function can be transposed."""
    (case,) = (case for case in CASES if case.name == name)
    sets = []
    for count in case.every_operand:
        for wrt in itertools.combinations(case.every_operand, count + 1):
            with case.precision(), contextlib.suppress(Exception):  # exception types vary
                jax.eval_shape(
                    lambda ct, *xs, wrt=wrt: transposed(xs, case.ref, wrt)(ct),
                    *(cotangents(case), *case.inputs()),
                )
                sets.append(wrt)
    return sets


@column(TRANSPOSE, core=True, reason=not_linear)
def transpose(case, f):
    sets = linear_sets(case.name)
    return [transposed(case.inputs(), f, wrt)(cotangents(case)) for wrt in sets]


@column(TRANSPOSE, among=EACH_KIND, reason=not_linear)
def transpose_of_transpose(case, f):
    results = []
    for wrt in linear_sets(case.name):
        _, operands = part(case.inputs(), f, wrt)
        again = jax.linear_transpose(transposed(case.inputs(), f, wrt), cotangents(case))
        results.append(again(tuple(operands)))
    return results


@column(JVP, among=EACH_KIND)
def jacfwd(case, f):
    return jax.jacfwd(f, argnums=case.every_operand)(*case.inputs())


@column(GRAD, among=EACH_KIND)
def jacrev(case, f):
    return jax.jacrev(f, argnums=case.every_operand)(*case.inputs())


@column(HIGHER, core=True)
def hvp_forward_over_reverse(case, f):
    return jax.jvp(grad(case, cube(f)), case.inputs(), tangents(case))


@column(HIGHER)
def hvp_reverse_over_forward(case, f):
    def directional(xs, vs):
        return jax.jvp(cube(f), xs, vs)[1]

    return jax.grad(directional)(case.inputs(), tangents(case))


@column(HIGHER, among=EACH_KIND)
def hvp_reverse_over_reverse(case, f):
    vs = tangents(case)
    return jax.grad(lambda xs: vdot(grad(case, cube(f))(*xs), vs))(case.inputs())


@column(HIGHER, among=(*EACH_PRIMITIVE, *(case for case in CASES if case not in EACH_KIND)))
def third_derivative(case, f):
    vs = tangents(case)

    def second(xs):
        return vdot(jax.jvp(grad(case, cube(f)), xs, vs)[1], vs)

    return jax.grad(second)(case.inputs())


@column(GRAD, among=EACH_KIND)
def gradient_of_the_input_only_where_it_is_used(case, f):
    """One call has constant operands, the other does not: symbolic zeros on one side."""
    xs = case.inputs()
    return jax.grad(lambda a, b: jnp.vdot(f(*a), f(*b)), argnums=1)(xs, plus(xs, 1))


@column(RULES, among=FEW, core=True)
def checkpoint(case, f):
    return grad(case, jax.checkpoint(cube(f)))(*case.inputs())


@column(RULES, among=FEW)
def custom_vjp(case, f):
    @jax.custom_vjp
    def g(*xs):
        return f(*xs)

    g.defvjp(lambda *xs: jax.vjp(f, *xs), lambda pullback, dy: pullback(2 * dy))
    return grad(case, cube(g))(*case.inputs())


@column(RULES, among=FEW)
def custom_jvp(case, f):
    @jax.custom_jvp
    def g(*xs):
        return f(*xs)

    @g.defjvp
    def rule(xs, vs):
        y, dy = jax.jvp(f, xs, vs)
        return y, 2 * dy

    return grad(case, cube(g))(*case.inputs())


# --- batching -------------------------------------------------------------------------------------


@column(VMAP, among=EACH_KIND)
def vmap(case, f):
    return jax.vmap(f)(*case.inputs(3))


@column(VMAP, among=EACH_KIND)
def vmap_of_vmap(case, f):
    """The inner batch axis comes second in operands (first for scalars) and third in results."""
    axes = tuple(min(1, len(shape)) for shape in case.shapes)
    xs = [jnp.moveaxis(x, 1, 1 + axis) for x, axis in zip(case.inputs(2, 3), axes, strict=True)]
    return jax.vmap(jax.vmap(f, in_axes=axes, out_axes=2))(*xs)


@column(VMAP, among=EACH_KIND, core=True)
def vmap_of_grad(case, f):
    return jax.vmap(grad(case, cube(f)))(*case.inputs(3))


@column(VMAP, among=EACH_KIND)
def vmap_of_hvp(case, f):
    xs = case.inputs(3)
    return jax.vmap(lambda xs, vs: jax.jvp(grad(case, cube(f)), xs, vs)[1])(
        xs, tuple(x[::-1] for x in xs)
    )


@column(VMAP, among=EACH_KIND)
def vmap_of_some_operands(case, f):
    """The value and the gradient where one operand, or all but one, has a batch axis."""
    every = {*case.every_operand}
    results = []
    for batched in {frozenset({i}) for i in every} | {frozenset(every - {i}) for i in every}:
        if not batched:
            continue
        axes = tuple(-1 if i in batched else None for i in case.every_operand)
        xs = [
            jnp.moveaxis(x, 0, -1) if i in batched else x[0] for i, x in enumerate(case.inputs(3))
        ]
        function = jax.value_and_grad(cube(f), argnums=case.every_operand)
        results.append(jax.vmap(function, in_axes=axes)(*xs))
    return results


@column(VMAP, among=EACH_KIND)
def vmap_over_any_axis(case, f):
    """A batch axis between other axes, counted from either end.

    Other columns test the first and the last axis.
    """

    def value_and_gradients(dy, *xs):
        y, pull = jax.vjp(f, *xs)
        return y, pull(dy)

    results = []
    xs, dys = case.inputs(3), np.stack([cotangents(case) + i for i in range(3)])
    for axis in (1, -2):
        axes = tuple(min(axis, len(shape)) if shape else 0 for shape in case.shapes)
        function = jax.vmap(value_and_gradients, in_axes=(axis, *axes), out_axes=(axis, axes))
        moved = (jnp.moveaxis(x, 0, a) for x, a in zip(xs, axes, strict=True))
        results.append(function(np.moveaxis(dys, 0, axis), *moved))
    return results


@column(VMAP, among=EACH_FAMILY)
def map_in_batches(case, f):
    return lax.map(lambda xs: f(*xs), case.inputs(5), batch_size=2)


# --- control flow ---------------------------------------------------------------------------------


def zero(case):
    return jnp.zeros((), case.dtype)


@column(CONTROL, among=FEW, core=True)
def scan(case, f):
    def step(carry, xs):
        y = f(*xs)
        return carry + y.sum(), y

    return lax.scan(step, zero(case), case.inputs(4))


@column(CONTROL, among=FEW)
def grad_of_scan(case, f):
    def total(xs):
        return lax.scan(lambda carry, x: (carry + cube(f)(*x), None), zero(case), xs)[0]

    return jax.grad(total)(case.inputs(4))


@column(CONTROL, among=FEW)
def while_loop(case, f):
    def step(state):
        i, xs = state
        return i + 1, tuple(x + f(*xs).sum() % 3 for x in xs)

    return lax.while_loop(lambda state: state[0] < 3, step, (0, case.inputs()))


def for_each(values, function):
    """Applies `function` in a loop, so that the values are unknown to the compiler."""
    return lax.map(function, np.array(values))


@column(CONTROL, among=FEW)
def cond(case, f):
    def either(flag):
        return lax.cond(flag, lambda *xs: f(*xs), lambda *xs: f(*times(2, xs)), *case.inputs())

    return for_each([True, False], either)


@column(CONTROL, among=FEW)
def grad_of_cond(case, f):
    def either(flag, xs):
        return lax.cond(flag, lambda xs: cube(f)(*xs), lambda xs: -cube(f)(*times(2, xs)), xs)

    return for_each([True, False], lambda flag: jax.grad(either, argnums=1)(flag, case.inputs()))


@column(CONTROL, among=FEW)
def vmap_of_cond(case, f):
    def either(flag, *xs):
        return lax.cond(flag, lambda *xs: f(*xs), lambda *xs: f(*times(2, xs)), *xs)

    return jax.vmap(either)(np.array([True, False, True]), *case.inputs(3))


# --- symbolic shapes ------------------------------------------------------------------------------


@column(SYMBOLIC, among=EACH_KIND, traced=False)
def symbolic_shapes(case, f):
    """Exported once, called with arrays of two sizes; the reference is not exported."""

    def value_and_gradients(*xs):
        return f(*xs), grad(case, cube(f))(*xs)

    def of_sizes(call):
        return jax.jit(lambda *sizes: [call(*xs) for xs in sizes])(
            case.inputs(), case.larger().inputs()
        )

    if f is case.ref:
        return of_sizes(value_and_gradients)
    types = jax.export.symbolic_args_specs(case.inputs(), case.symbolic_shapes)
    export = jax.export.export(jax.jit(value_and_gradients), disabled_checks=jof.export_checks())
    return of_sizes(export(*types).call)


# --- the table ------------------------------------------------------------------------------------


def cells(cases: Iterable[Case] = CASES) -> Iterator[tuple[Case, Column]]:
    """(row, column) for every cell of the table, including those skipped for a reason."""
    for case in cases:
        for column in COLUMNS.values():
            full = not case.variant and case.name not in TWINS
            if case in column.among and (column.core or full):
                yield case, column


# The columns that twins run without --exhaustive; the second needs all derivatives. Variants run
# only the first.
TWIN_COLUMNS = ("jit", "hvp_forward_over_reverse")
# Without --exhaustive, only FEW run these columns: they exercise JAX's own machinery around rules
# that other columns test.
MACHINERY = ("jit_in_jit", "jit_of_value_and_grad", "x64", "transpose_of_transpose", "vmap_of_vmap")
MACHINERY += ("hvp_reverse_over_reverse", "third_derivative", "vmap_of_hvp")


def is_exhaustive(case: Case, column: Column) -> bool:
    if case.variant:
        return column.name != "jit"
    if case.name in TWINS:
        return column.name not in TWIN_COLUMNS
    return case not in FEW and column.name in MACHINERY


def parameters():
    for case, column in cells():
        marks = []
        if (
            column.traced or column.expects
        ):  # pytest-xdist runs these on one worker, which compiles the program once
            program = column.group if column.traced else "expected"
            marks.append(pytest.mark.xdist_group(f"{case}, {program}"))
        if is_exhaustive(case, column):
            marks.append(pytest.mark.exhaustive)
        yield pytest.param(case, column, id=f"{case}-{column.name}", marks=marks)


class InProgram(Case):
    """A case whose inputs are computed in the traced program and unknown to the compiler."""

    def inputs(self, *leading: int) -> tuple[jax.Array, ...]:
        return tuple(lax.optimization_barrier(super().inputs(*leading)))


def both(case: Case, column: Column):
    return column.transform(case, case.f), column.transform(case, case.ref)


@functools.lru_cache(maxsize=4)  # a group's columns are not all adjacent
def traced(name: str, group: str, exhaustive: bool) -> dict[str, Any]:
    """Runs a row's traced columns of a group as one program, which saves much time."""
    columns = [
        (case, column)
        for case, column in cells(case for case in CASES if case.name == name)
        if column.group == group and column.traced and not column.reason(case)
        if exhaustive or not is_exhaustive(case, column)
    ]
    return jax.jit(
        lambda: {column.name: both(InProgram(**vars(case)), column) for case, column in columns}
    )()


@functools.lru_cache(maxsize=8)
def expected(name: str, column: str) -> Any:
    """The reference's results for one row and column, compiled as one program."""
    (case,) = (case for case in CASES if case.name == name)
    return jax.jit(lambda: COLUMNS[column].transform(case, case.ref))()


@pytest.mark.parametrize(("case", "column"), [*parameters()])
def test_transformation(case, column, pytestconfig):
    if why := column.reason(case):
        pytest.skip(why)
    with case.precision():
        if column is COLUMNS["eval_shape"]:
            assert_same_types(*both(case, column))
        elif column.traced:
            results = traced(case.name, column.group, pytestconfig.option.exhaustive)
            assert_same(*results[column.name], case.rtol)
        elif column.expects:
            actual = column.transform(case, case.f)
            assert_same(actual, expected(case.name, column.expects), case.rtol)
        else:
            assert_same(*both(case, column), case.rtol)


@pytest.mark.skipif(pytest.version_tuple >= (9, 2), reason="pyproject.toml has an older pytest")
@pytest.mark.xdist_group("together")
def test_workers_know_groups(request):
    """pytest-xdist keeps groups together; otherwise each worker compiles every group's program."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("tests are not divided by groups")
    assert request.node.nodeid.endswith("@together")


def test_every_op_has_one_row_of_all_columns():
    full = [case.function for case in FUNCTIONS if not case.variant]
    assert sorted(full) == sorted({op.public_name for op in OPS})
    assert len([case for case in CASES if case.kernel and not case.variant]) == 3


def test_no_column_is_left_out_by_all_rows_or_for_no_row():
    for column in COLUMNS.values():
        reasons = [column.reason(case) for case, other in cells() if other is column]
        assert None in reasons
        assert any(reasons) == (column.reason is not always)


# --- what does not fit the table ----------------------------------------------------------------

FULL = [case for case in CASES if not case.variant]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FULL, ids=str)
def test_vmap_over_an_axis_of_size_0(case):
    """Of all operands, and of the first one."""
    xs = case.inputs()
    none = [np.zeros((0, *x.shape), x.dtype) for x in xs]
    with case.precision():
        for axes, given in ((0, none), ((0, *[None] * (len(xs) - 1)), [none[0], *xs[1:]])):
            ours, theirs = (
                jax.eval_shape(jax.vmap(grad(case, cube(f)), axes), *given)
                for f in (case.f, case.ref)
            )
            assert jax.tree.map(str, ours) == jax.tree.map(str, theirs)
            result = jax.jit(jax.vmap(case.f, axes))(*given)
            assert result.shape == (0, *result_of(case).shape)
            assert result.dtype == result_of(case).dtype


@pytest.mark.parametrize("case", FULL, ids=str)
def test_debug_nans_finds_one(case):
    xs = [np.full_like(x, np.nan) if i in case.wrt else x for i, x in enumerate(case.inputs())]
    with case.precision(), jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(case.f)(*xs)


def test_debug_nans_finds_one_that_an_op_makes():
    with jax.debug_nans(True):
        for f, xs in ((jof.divide, (0.0, 0.0)), (jof.embedding_lookup, (np.ones(3), 7))):
            with pytest.raises(FloatingPointError, match="nan"):
                f(*xs)


X, IDS = np.arange(12.0, dtype=np.float32).reshape(1, 3, 4), np.array([2, 0, 2], np.int32)


@pytest.mark.parametrize(
    ("function", "operands", "options"),
    [
        (jof.cast, (X,), {"dtype": "float16"}),
        (jof.gelu, (X,), {"approximate": False}),
        (jof.geglu, (X, X), {"approximate": False}),
        (jof.permute, (X,), {"axes": (2, 0, 1)}),
        (jof.upsample_nearest2d, (X,), {"scale_factor": 2, "data_format": "NHWC"}),
        (jof.upsample_nearest2d, (X,), {"size": (5, 5), "method": "nearest-exact"}),
        (jof.segment_sum, (X[0], IDS), {"num_segments": 3, "bucket_size": 2, "mode": "clip"}),
        (jof.scatter_add, (X[0], IDS, X[0]), {"mode": "clip", "deterministic": True}),
        (jof.embedding_lookup, (X[0], IDS), {"deterministic": True}),
    ],
)
def test_static_arguments(function, operands, options):
    """Options are hashable, and have the same effect as static arguments of `jax.jit`."""
    options = {**options, "implementation": "native"}
    actual = jax.jit(function, static_argnames=[*options])(*operands, **options)
    assert_same(actual, function(*operands, **options), 0)


# --- arrays of 64 bits where those are disabled ---------------------------------------------------


EACH_RULE = [case for case in EACH_KIND if case.name not in TWINS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in EACH_RULE else pytest.mark.exhaustive) for c in FULL],
    ids=str,
)
def test_arrays_of_64_bits_where_those_are_disabled(case):
    """The same values, derivatives and second derivatives as where they are enabled."""
    forms = [case.f]
    if not case.kernel:
        forms = [functools.partial(case.f, implementation=form) for form in ("native", "xla")]
    with jax.enable_x64(True):
        wide = dataclasses.replace(case, dtype="float64")
        xs, vs = (tuple(map(jnp.asarray, arrays)) for arrays in (wide.inputs(), tangents(wide)))
        ct, batch = jnp.asarray(cotangents(wide)), tuple(jnp.stack([x, x]) for x in xs)

    def results():
        """The values, and the program of the derivatives."""

        def derivatives(f):
            def cts(*xs):
                y, pull = jax.vjp(f, *xs)
                return y, pull(ct)

            return jax.jvp(cts, xs, vs), jax.vmap(f)(*batch)

        return [f(*xs) for f in forms], jax.jit(lambda: [*map(derivatives, forms)]).lower()

    with jax.enable_x64(True):
        expected, of_expected = results()
    with jax.enable_x64(False):
        actual, of_actual = results()
    assert_same(actual, expected, 0)
    if of_actual.as_text() != of_expected.as_text():  # else the results are the same
        with jax.enable_x64(True):
            expected = of_expected.compile()()
        with jax.enable_x64(False):
            actual = of_actual.compile()()
        assert_same(actual, expected, 0)


# --- derivatives where there are none -------------------------------------------------------------


DERIVATIVES = {
    "grad": lambda f, xs, argnums: jax.grad(f, argnums)(*xs),
    "grad_of_integers": lambda f, xs, argnums: jax.grad(f, argnums, allow_int=True)(*xs),
    "jacfwd": lambda f, xs, argnums: jax.jacfwd(f, argnums)(*xs),
    "jvp": lambda f, xs, argnums: jax.jvp(f, xs, xs),
    "jvp_of_integers": lambda f, xs, argnums: jax.jvp(f, xs, [*map(tangent_type_ones, xs)]),
    "vjp": lambda f, xs, argnums: jax.vjp(f, *xs)[1](jnp.float32(1)),
}


def tangent_type_ones(x):
    floating = np.issubdtype(x.dtype, np.floating)
    return np.ones_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)


def outcome(function):
    """The types of the result, or the error."""
    try:
        return jax.eval_shape(function)
    except Exception as error:
        return type(error), str(error)


def of_integers():
    """(case, operands to make integers): all operands, and those that never have derivatives."""
    for case in FUNCTIONS:
        # JAX's softmax warns of -inf among integers; optax and flax do not accept integers.
        if case.variant or (case.op and case.op.family == "rows"):
            continue
        without = {*case.arrays}.difference(*case.grad_targets)
        for operands in {case.every_operand, (*sorted(without),)} - {()}:
            yield pytest.param(case, operands, id=f"{case}-{''.join(map(str, operands))}")


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize(("case", "operands"), [*of_integers()])
def test_derivatives_with_respect_to_integers(case, operands, derivative):
    """The same errors as the jnp function, or derivatives of type float0."""
    xs = [x.astype(np.int32 if i in operands else x.dtype) for i, x in enumerate(case.inputs())]

    def of(f):
        def loss(*xs):
            return jnp.sum(f(*xs), dtype=jnp.float32)

        return outcome(lambda: DERIVATIVES[derivative](loss, xs, case.every_operand))

    assert of(case.f) == of(case.ref)


# --- options of symbolic sizes --------------------------------------------------------------------


def symbolic_export(f, xs, *dims):
    types = jax.export.symbolic_args_specs(xs, dims)
    return jax.export.export(jax.jit(f), disabled_checks=jof.export_checks())(*types)


@pytest.mark.parametrize(
    ("f", "ref", "xs", "dims"),
    [
        pytest.param(
            lambda x: jof.upsample_nearest2d(x, 2),
            lambda x: x.repeat(2, axis=1).repeat(2, axis=2),
            (X,),
            ("a, b, c",),
            id="upsample-NCHW",
        ),
        pytest.param(
            lambda x: jof.upsample_nearest2d(x, scale_factor=(3, 1), data_format="NHWC"),
            lambda x: x.repeat(3, axis=0),
            (X,),
            ("a, b, c",),
            id="upsample-NHWC",
        ),
        pytest.param(
            lambda x, ids: jof.segment_sum(x, ids, 4, bucket_size=2),
            lambda x, ids: jax.ops.segment_sum(x, ids, 4, bucket_size=2),
            (X[0], IDS),
            ("a, b", "a"),
            id="bucket_size",
        ),
    ],
)
def test_symbolic_shapes(f, ref, xs, dims):
    """Symbolic spatial dimensions and bucket_size, which the table's column does not cover."""

    def both(f):
        return lambda *xs: (f(*xs), jax.grad(cube(f))(*xs))

    larger = [np.concatenate([x] * 2) for x in xs]
    call = symbolic_export(both(f), xs, *dims).call
    actual = jax.jit(lambda *of_sizes: [call(*xs) for xs in of_sizes])(xs, larger)
    assert_same(actual, jax.jit(lambda *of: [both(ref)(*xs) for xs in of])(xs, larger), 0)


@pytest.mark.parametrize(
    ("f", "dims", "message"),
    [
        (lambda x: jof.upsample_nearest2d(x, 1.5), "3, a, b", "upsample_nearest2d: scale_factor"),
        (lambda x: jof.upsample_nearest2d(x, size=x.shape[1:]), "3, a, b", "upsample_nearest2d: s"),
        (lambda x: jof.permute(x, (2, 1, x.shape[0])), "a, b, c", "permute: axes"),
        (lambda x: jof.segment_sum(x, IDS[:2], 4), "a, b, c", "segment_sum: data"),
        (lambda x: jof.segment_sum(x, IDS, 4, bucket_size=x.shape[1]), "3, a, b", "segment_sum: b"),
        (lambda x: jof.scatter_add(x, IDS, x), "a, b, c", "scatter_add: updates"),
        (lambda x: jof.add(x, x.mT), "a, b, c", "add: operands"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_symbolic_sizes_that_cannot_be(f, dims, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        symbolic_export(f, (np.ones((3, 3, 3), np.float32),), dims)
