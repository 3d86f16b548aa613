"""Every JAX transformation of every op, against the same transformation of plain jnp.

The rows of the table are in cases.py. A column is a function of (case, f): it transforms f, which
is the op or its reference in jnp, and returns arrays. To add a column, write the function.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.cases import CASES, Case

COLUMNS = {}
CORE = set()  # the columns that every case goes through
OF_SEVERAL_OPERANDS = set()  # the columns that are other columns again where there is one operand


def column(transformation):
    COLUMNS[transformation.__name__] = transformation
    return transformation


def core(transformation):
    CORE.add(transformation.__name__)
    return column(transformation)


def of_several_operands(transformation):
    OF_SEVERAL_OPERANDS.add(transformation.__name__)
    return transformation


def cube(f):
    """A scalar function with f inside, none of whose first three derivatives is constant."""

    def loss(*xs):
        y = f(*xs)
        weights = 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 3
        return jnp.sum(weights * y * y * y)

    return loss


def grad(case, f):
    """With respect to every operand, scalars too."""
    return jax.grad(f, argnums=case.every_operand)


def tangents(case: Case) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(np.flip(x)) for x in case.inputs())


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
        atol = rtol * np.max(np.abs(wide), initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=atol, strict=True)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(expected))


# --- compilation ----------------------------------------------------------------------------------


@core
def eager(case, f):
    return f(*map(jnp.asarray, case.inputs()))


@core
def jit(case, f):
    return jax.jit(f)(*case.inputs())


@column
def jit_in_jit(case, f):
    return jax.jit(lambda *xs: jax.jit(f)(*plus(xs, 1)) + jax.jit(f)(*xs))(*case.inputs())


@column
def without_jit(case, f):
    with jax.disable_jit():
        return grad(case, cube(f))(*case.inputs())


@column
def ahead_of_time(case, f):
    specs = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    return jax.jit(grad(case, cube(f))).lower(*specs).compile()(*case.inputs())


@column
def donated(case, f):
    total = jnp.ones_like(cotangents(case))
    result = jax.jit(lambda total, *xs: total + f(*xs), donate_argnums=0)(total, *case.inputs())
    assert total.is_deleted()
    return result


@column
def operands_donated(case, f):
    """The inputs' buffers are reused for results while the op may still read them."""

    def step(*xs):
        y = f(*xs)
        return [
            y.reshape(-1)[: x.size].reshape(x.shape) if y.size >= x.size else x + y.sum()
            for x in xs
        ]

    xs = [*map(jnp.asarray, case.inputs())]
    result = jax.jit(step, donate_argnums=case.every_operand)(*xs)
    assert all(x.is_deleted() for x in xs)
    return result


@column
def tree_map(case, f):
    trees = [{"a": x, "b": (x + 1, [x * 2])} for x in case.inputs()]
    return jax.jit(lambda trees: jax.tree.map(f, *trees))(trees)


@column
def threads(case, f):
    compiled = jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))
    results = [None] * 4
    start = threading.Barrier(len(results))

    def work(i):
        with case.precision():  # a thread has its own
            start.wait()
            for _ in range(5):
                results[i] = jax.block_until_ready(compiled(*plus(case.inputs(), i)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


# --- differentiation ------------------------------------------------------------------------------


@core
def gradient(case, f):
    return grad(case, cube(f))(*case.inputs())


@column
@of_several_operands
def gradient_of_one_operand(case, f):
    return [jax.grad(cube(f), argnums=i)(*case.inputs()) for i in case.every_operand]


@column
def jit_of_value_and_grad(case, f):
    return jax.jit(jax.value_and_grad(cube(f), argnums=case.every_operand))(*case.inputs())


@column
def grad_of_jit(case, f):
    return grad(case, cube(jax.jit(f)))(*case.inputs())


@core
def jvp(case, f):
    return jax.jvp(f, case.inputs(), tangents(case))


@column
@of_several_operands
def jvp_of_one_operand(case, f):
    results = []
    for i, (x, v) in enumerate(zip(case.inputs(), tangents(case), strict=True)):
        before, after = case.inputs()[:i], case.inputs()[i + 1 :]
        results.append(jax.jvp(lambda x, b=before, a=after: f(*b, x, *a), (x,), (v,)))
    return results


@column
def vjp(case, f):
    y, pullback = jax.vjp(f, *case.inputs())
    return y, pullback(cotangents(case))


@column
def linearize(case, f):
    y, linear = jax.linearize(f, *case.inputs())
    return y, linear(*tangents(case))


def linear_parts(case, f):
    """f as a function of the operands that it is linear in, and these."""
    xs = case.inputs()
    for wrt in case.linear:

        def part(*operands, wrt=wrt):
            given = dict(zip(wrt, operands, strict=True))
            return f(*(given.get(i, x) for i, x in enumerate(xs)))

        yield part, [xs[i] for i in wrt]


@column
def transpose(case, f):
    return [
        jax.linear_transpose(part, *operands)(cotangents(case))
        for part, operands in linear_parts(case, f)
    ]


@column
def transpose_of_transpose(case, f):
    results = []
    for part, operands in linear_parts(case, f):
        transposed = jax.linear_transpose(part, *operands)
        again = jax.linear_transpose(transposed, cotangents(case))
        results.append(again(tuple(operands)))
    return results


@column
def jacfwd(case, f):
    return jax.jacfwd(f, argnums=case.every_operand)(*case.inputs())


@column
def jacrev(case, f):
    return jax.jacrev(f, argnums=case.every_operand)(*case.inputs())


@core
def hvp_forward_over_reverse(case, f):
    return jax.jit(lambda xs, vs: jax.jvp(grad(case, cube(f)), xs, vs))(
        case.inputs(), tangents(case)
    )


@core
def hvp_reverse_over_forward(case, f):
    def directional(xs, vs):
        return jax.jvp(cube(f), xs, vs)[1]

    return jax.jit(jax.grad(directional))(case.inputs(), tangents(case))


@column
def hvp_reverse_over_reverse(case, f):
    vs = tangents(case)
    return jax.jit(jax.grad(lambda xs: vdot(grad(case, cube(f))(*xs), vs)))(case.inputs())


@column
def third_derivative(case, f):
    vs = tangents(case)

    def second(xs):
        return vdot(jax.jvp(grad(case, cube(f)), xs, vs)[1], vs)

    return jax.jit(jax.grad(second))(case.inputs())


@column
def gradient_of_the_input_only_where_it_is_used(case, f):
    """One set of operands constant, the other not: symbolic zeros on one side."""
    xs = case.inputs()
    return jax.grad(lambda a, b: jnp.vdot(f(*a), f(*b)), argnums=1)(xs, plus(xs, 1))


@core
def checkpoint(case, f):
    return jax.jit(grad(case, jax.checkpoint(cube(f))))(*case.inputs())


@column
def custom_vjp(case, f):
    @jax.custom_vjp
    def g(*xs):
        return f(*xs)

    g.defvjp(lambda *xs: jax.vjp(f, *xs), lambda pullback, dy: pullback(2 * dy))
    return grad(case, cube(g))(*case.inputs())


# --- batching -------------------------------------------------------------------------------------


@core
def vmap(case, f):
    return jax.vmap(f)(*case.inputs(3))


@column
def vmap_of_vmap(case, f):
    """With the inner batch axis second, and third in the result; scalars have no other."""
    axes = tuple(min(1, len(shape)) for shape in case.shapes)
    xs = [np.moveaxis(x, 1, 1 + axis) for x, axis in zip(case.inputs(2, 3), axes, strict=True)]
    return jax.vmap(jax.vmap(f, in_axes=axes, out_axes=2))(*xs)


@core
def vmap_of_grad(case, f):
    return jax.jit(jax.vmap(grad(case, cube(f))))(*case.inputs(3))


@column
def grad_of_vmap(case, f):
    xs = [np.moveaxis(x, 0, -1) for x in case.inputs(3)]
    return jax.jit(grad(case, cube(jax.vmap(f, in_axes=-1, out_axes=1))))(*xs)


@column
def vmap_of_jvp(case, f):
    xs = case.inputs(3)
    return jax.vmap(lambda xs, vs: jax.jvp(f, xs, vs))(xs, tuple(x[::-1] for x in xs))


@column
def vmap_of_hvp(case, f):
    xs = case.inputs(3)
    return jax.vmap(lambda xs, vs: jax.jvp(grad(case, cube(f)), xs, vs)[1])(
        xs, tuple(x[::-1] for x in xs)
    )


@column
def vmap_of_one_of_two_calls(case, f):
    xs = case.inputs(3)
    return jax.vmap(lambda a, b: f(*a) * f(*b), in_axes=(0, None))(xs, tuple(x[0] for x in xs))


@core
@of_several_operands
def vmap_of_one_operand(case, f):
    """And of its gradient: the others have no batch axis."""
    results = []
    for i in case.every_operand:
        axes = tuple(0 if j == i else None for j in case.every_operand)
        xs = [x if j == i else x[0] for j, x in enumerate(case.inputs(3))]
        function = jax.value_and_grad(cube(f), argnums=case.every_operand)
        results.append((jax.vmap(f, in_axes=axes)(*xs), jax.vmap(function, in_axes=axes)(*xs)))
    return results


@column
@of_several_operands
def vmap_of_all_operands_but_one(case, f):
    results = []
    for i in case.every_operand:
        axes = tuple(None if j == i else -1 for j in case.every_operand)
        xs = [x[0] if j == i else np.moveaxis(x, 0, -1) for j, x in enumerate(case.inputs(3))]
        function = jax.value_and_grad(cube(f), argnums=case.every_operand)
        results.append(jax.jit(jax.vmap(function, in_axes=axes))(*xs))
    return results


@column
def map_in_batches(case, f):
    return lax.map(lambda xs: f(*xs), case.inputs(5), batch_size=2)


# --- control flow ---------------------------------------------------------------------------------


def zero(case):
    return jnp.zeros((), case.dtype)


@core
def scan(case, f):
    def step(carry, xs):
        y = f(*xs)
        return carry + y.sum(), y

    return lax.scan(step, zero(case), case.inputs(4))


@column
def grad_of_scan(case, f):
    def total(xs):
        return lax.scan(lambda carry, x: (carry + cube(f)(*x), None), zero(case), xs)[0]

    return jax.jit(jax.grad(total))(case.inputs(4))


@column
def while_loop(case, f):
    def step(state):
        i, xs = state
        return i + 1, tuple(x + f(*xs).sum() % 3 for x in xs)

    return jax.jit(lambda xs: lax.while_loop(lambda state: state[0] < 3, step, (0, xs)))(
        case.inputs()
    )


@column
def grad_of_fori_loop(case, f):
    def total(xs):
        return lax.fori_loop(0, 3, lambda i, carry: carry + (i + 1) * cube(f)(*xs), zero(case))

    return jax.jit(jax.value_and_grad(total))(case.inputs())


@column
def cond(case, f):
    def either(flag, *xs):
        return lax.cond(flag, lambda *xs: f(*xs), lambda *xs: f(*times(2, xs)), *xs)

    return [jax.jit(either)(flag, *case.inputs()) for flag in (True, False)]


@column
def grad_of_cond(case, f):
    def either(flag, xs):
        return lax.cond(flag, lambda xs: cube(f)(*xs), lambda xs: -cube(f)(*times(2, xs)), xs)

    return [jax.jit(jax.grad(either, argnums=1))(flag, case.inputs()) for flag in (True, False)]


@column
def vmap_of_cond(case, f):
    def either(flag, *xs):
        return lax.cond(flag, lambda *xs: f(*xs), lambda *xs: f(*times(2, xs)), *xs)

    return jax.vmap(either)(np.array([True, False, True]), *case.inputs(3))


@column
def switch(case, f):
    branches = [f, lambda *xs: -f(*xs), lambda *xs: f(*xs) * f(*xs)]
    return [
        jax.jit(lambda i, *xs: lax.switch(i, branches, *xs))(i, *case.inputs()) for i in range(3)
    ]


# --- the table ------------------------------------------------------------------------------------


def cells():
    for case in CASES:
        for name in COLUMNS:
            if (
                (name in CORE or case.every_column)
                and not ("transpose" in name and not case.linear)
                and not (name in OF_SEVERAL_OPERANDS and len(case.shapes) == 1)
            ):
                yield pytest.param(case, name, id=f"{case}-{name}")


@pytest.mark.parametrize(("case", "transformation"), [*cells()])
def test_transformation(case, transformation):
    transform = COLUMNS[transformation]
    with case.precision():
        assert_same(transform(case, case.f), transform(case, case.ref), case.rtol)


# --- what does not fit the table ----------------------------------------------------------------


def batch_axes():
    """(case, axis) for every position of a batch axis, from either end; between H and W too."""
    for case in CASES:
        if (case.elementwise and not case.every_column) or not all(case.shapes):
            continue
        ndim = len(case.shape)
        for axis in (*range(ndim + 1), -1, -2):
            yield pytest.param(case, axis, id=f"{case}-{axis}")


@pytest.mark.parametrize(("case", "axis"), [*batch_axes()])
def test_vmap_over_any_axis(case, axis):
    """Against a Python loop over the batch."""

    def both(f):
        def value_and_gradients(dy, *xs):
            y, pull = jax.vjp(f, *xs)
            return y, pull(dy)

        return value_and_gradients

    with case.precision():
        xs = case.inputs(3)
        out_axis = axis if axis < 0 else len(case.shape) - axis
        axes = tuple(min(axis, len(shape)) for shape in case.shapes)
        dys = np.stack([cotangents(case) + i for i in range(3)])
        actual = jax.vmap(both(case.f), in_axes=(axis, *axes), out_axes=(out_axis, axes))(
            np.moveaxis(dys, 0, axis),
            *(np.moveaxis(x, 0, a) for x, a in zip(xs, axes, strict=True)),
        )
        each = [both(case.ref)(dys[i], *(x[i] for x in xs)) for i in range(3)]
        y = jnp.stack([y for y, _ in each], axis=out_axis)
        dxs = tuple(
            jnp.stack(parts, axis=a)
            for a, *parts in zip(axes, *(dxs for _, dxs in each), strict=True)
        )
        assert_same(actual, (y, dxs), case.rtol)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eval_shape(case):
    xs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.shapes]
    for transform in (
        lambda f: f,
        jax.jit,
        lambda f: grad(case, cube(f)),
        lambda f: jax.jacrev(f, argnums=case.every_operand),
        jax.vmap,
    ):
        leading = (3,) if transform is jax.vmap else ()
        specs = [jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype) for x in xs]
        actual = jax.eval_shape(transform(case.f), *specs)
        expected = jax.eval_shape(transform(case.ref), *specs)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (e.shape, e.dtype, e.weak_type)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_round_trip(case):
    pytest.importorskip("flatbuffers")
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(case.all_targets())
    ]
    with case.precision():
        xs, dy = case.inputs(), cotangents(case)
        exported = jax.export.export(jax.jit(case.f), disabled_checks=checks)(*xs)
        restored = jax.export.deserialize(exported.serialize(vjp_order=1))
        assert_same(restored.call(*xs), case.ref(*xs), case.rtol)
        actual = jax.jit(lambda xs, dy: jax.vjp(restored.call, *xs)[1](dy))(xs, dy)
        assert_same(actual, jax.vjp(case.ref, *xs)[1](dy), case.rtol)
