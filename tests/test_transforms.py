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


def column(transformation):
    COLUMNS[transformation.__name__] = transformation
    return transformation


def cube(f):
    """A scalar function with f inside, none of whose first three derivatives is constant."""

    def loss(x):
        y = f(x)
        weights = 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 3
        return jnp.sum(weights * y * y * y)

    return loss


def tangents(case: Case) -> np.ndarray:
    return case.inputs()[..., ::-1].copy()


def cotangents(case: Case) -> np.ndarray:
    shape = jax.eval_shape(case.ref, case.inputs()).shape
    return (np.arange(np.prod(shape)).reshape(shape) % 5 - 2).astype(np.float32)


def assert_same(actual, expected, rtol: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=rtol, atol=0, strict=True)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(expected))


# --- compilation ----------------------------------------------------------------------------------


@column
def eager(case, f):
    return f(jnp.asarray(case.inputs()))


@column
def jit(case, f):
    return jax.jit(f)(case.inputs())


@column
def jit_in_jit(case, f):
    return jax.jit(lambda x: jax.jit(f)(x + 1) + jax.jit(f)(x))(case.inputs())


@column
def without_jit(case, f):
    with jax.disable_jit():
        return jax.grad(cube(f))(case.inputs())


@column
def ahead_of_time(case, f):
    spec = jax.ShapeDtypeStruct(case.shape, jnp.float32)
    return jax.jit(jax.grad(cube(f))).lower(spec).compile()(case.inputs())


@column
def donated(case, f):
    total = jnp.ones(cotangents(case).shape)
    result = jax.jit(lambda total, x: total + f(x), donate_argnums=0)(total, case.inputs())
    assert total.is_deleted()
    return result


@column
def operand_donated(case, f):
    """The input's buffer is reused for the result while the op may still read it."""

    def step(x):
        y = f(x)
        return y.reshape(-1)[: x.size].reshape(x.shape) if y.size >= x.size else x + y.sum()

    x = jnp.asarray(case.inputs())
    result = jax.jit(step, donate_argnums=0)(x)
    assert x.is_deleted()
    return result


@column
def tree_map(case, f):
    x = case.inputs()
    return jax.jit(lambda tree: jax.tree.map(f, tree))({"a": x, "b": (x + 1, [x * 2])})


@column
def threads(case, f):
    compiled = jax.jit(jax.value_and_grad(cube(f)))
    results = [None] * 4
    start = threading.Barrier(len(results))

    def work(i):
        start.wait()
        for _ in range(5):
            results[i] = jax.block_until_ready(compiled(case.inputs() + i))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


# --- differentiation ------------------------------------------------------------------------------


@column
def grad(case, f):
    return jax.grad(cube(f))(case.inputs())


@column
def jit_of_value_and_grad(case, f):
    return jax.jit(jax.value_and_grad(cube(f)))(case.inputs())


@column
def grad_of_jit(case, f):
    return jax.grad(cube(jax.jit(f)))(case.inputs())


@column
def jvp(case, f):
    return jax.jvp(f, (case.inputs(),), (tangents(case),))


@column
def vjp(case, f):
    y, pullback = jax.vjp(f, case.inputs())
    return y, pullback(cotangents(case))


@column
def linearize(case, f):
    y, linear = jax.linearize(f, case.inputs())
    return y, linear(tangents(case))


@column
def transpose(case, f):
    return jax.linear_transpose(f, case.inputs())(cotangents(case))


@column
def transpose_of_transpose(case, f):
    transposed = jax.linear_transpose(f, case.inputs())
    return jax.linear_transpose(lambda y: transposed(y)[0], cotangents(case))(case.inputs())


@column
def jacfwd(case, f):
    return jax.jacfwd(f)(case.inputs())


@column
def jacrev(case, f):
    return jax.jacrev(f)(case.inputs())


@column
def hvp_forward_over_reverse(case, f):
    return jax.jit(lambda x, v: jax.jvp(jax.grad(cube(f)), (x,), (v,)))(
        case.inputs(), tangents(case)
    )


@column
def hvp_reverse_over_forward(case, f):
    def directional(x, v):
        return jax.jvp(cube(f), (x,), (v,))[1]

    return jax.jit(jax.grad(directional))(case.inputs(), tangents(case))


@column
def hvp_reverse_over_reverse(case, f):
    v = tangents(case)
    return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(cube(f))(x), v)))(case.inputs())


@column
def third_derivative(case, f):
    v = tangents(case)

    def second(x):
        return jnp.vdot(jax.jvp(jax.grad(cube(f)), (x,), (v,))[1], v)

    return jax.jit(jax.grad(second))(case.inputs())


@column
def gradient_of_the_input_only_where_it_is_used(case, f):
    """One operand constant, the other not: symbolic zeros on one side."""
    x = case.inputs()
    return jax.grad(lambda a, b: jnp.vdot(f(a), f(b)), argnums=1)(x, x + 1)


@column
def checkpoint(case, f):
    return jax.jit(jax.grad(jax.checkpoint(cube(f))))(case.inputs())


@column
def custom_vjp(case, f):
    @jax.custom_vjp
    def g(x):
        return f(x)

    g.defvjp(lambda x: jax.vjp(f, x), lambda pullback, dy: pullback(2 * dy))
    return jax.grad(cube(g))(case.inputs())


# --- batching -------------------------------------------------------------------------------------


@column
def vmap(case, f):
    return jax.vmap(f)(case.inputs(3))


@column
def vmap_of_vmap(case, f):
    return jax.vmap(jax.vmap(f, in_axes=1, out_axes=2))(case.inputs(2, 3).swapaxes(1, 2))


@column
def vmap_of_grad(case, f):
    return jax.jit(jax.vmap(jax.grad(cube(f))))(case.inputs(3))


@column
def grad_of_vmap(case, f):
    return jax.jit(jax.grad(cube(jax.vmap(f, in_axes=-1, out_axes=1))))(
        np.moveaxis(case.inputs(3), 0, -1)
    )


@column
def vmap_of_jvp(case, f):
    x = case.inputs(3)
    return jax.vmap(lambda x, v: jax.jvp(f, (x,), (v,)))(x, x[::-1])


@column
def vmap_of_hvp(case, f):
    x = case.inputs(3)
    return jax.vmap(lambda x, v: jax.jvp(jax.grad(cube(f)), (x,), (v,))[1])(x, x[::-1])


@column
def vmap_of_one_operand(case, f):
    x = case.inputs(3)
    return jax.vmap(lambda a, b: f(a) * f(b), in_axes=(0, None))(x, x[0])


@column
def map_in_batches(case, f):
    return lax.map(f, case.inputs(5), batch_size=2)


# --- control flow ---------------------------------------------------------------------------------


@column
def scan(case, f):
    def step(carry, x):
        y = f(x)
        return carry + y.sum(), y

    return lax.scan(step, jnp.float32(0), case.inputs(4))


@column
def grad_of_scan(case, f):
    def total(xs):
        return lax.scan(lambda carry, x: (carry + cube(f)(x), None), jnp.float32(0), xs)[0]

    return jax.jit(jax.grad(total))(case.inputs(4))


@column
def while_loop(case, f):
    x = case.inputs()

    def step(state):
        i, x = state
        return i + 1, x + f(x).sum() % 3

    return jax.jit(lambda x: lax.while_loop(lambda state: state[0] < 3, step, (0, x)))(x)


@column
def grad_of_fori_loop(case, f):
    def total(x):
        return lax.fori_loop(0, 3, lambda i, carry: carry + (i + 1) * cube(f)(x), jnp.float32(0))

    return jax.jit(jax.value_and_grad(total))(case.inputs())


@column
def cond(case, f):
    def either(flag, x):
        return lax.cond(flag, lambda x: f(x), lambda x: f(2 * x), x)

    return [jax.jit(either)(flag, case.inputs()) for flag in (True, False)]


@column
def grad_of_cond(case, f):
    def either(x, flag):
        return lax.cond(flag, cube(f), lambda x: -cube(f)(2 * x), x)

    return [jax.jit(jax.grad(either))(case.inputs(), flag) for flag in (True, False)]


@column
def vmap_of_cond(case, f):
    def either(flag, x):
        return lax.cond(flag, lambda x: f(x), lambda x: f(2 * x), x)

    return jax.vmap(either)(np.array([True, False, True]), case.inputs(3))


@column
def switch(case, f):
    branches = [f, lambda x: -f(x), lambda x: f(x) * f(x)]
    return [jax.jit(lambda i, x: lax.switch(i, branches, x))(i, case.inputs()) for i in range(3)]


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transformation", COLUMNS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_transformation(case, transformation):
    transform = COLUMNS[transformation]
    assert_same(transform(case, case.f), transform(case, case.ref), case.rtol)


# --- what does not fit the table ----------------------------------------------------------------


def batch_axes():
    """(case, axis) for every position of a batch axis, from either end; between H and W too."""
    for case in CASES:
        ndim = len(case.shape)
        for axis in (*range(ndim + 1), -1, -2):
            yield pytest.param(case, axis, id=f"{case}-{axis}")


@pytest.mark.parametrize(("case", "axis"), [*batch_axes()])
def test_vmap_over_any_axis(case, axis):
    """Against a Python loop over the batch."""
    xs = case.inputs(3)
    out_axis = axis if axis < 0 else len(case.shape) - axis
    y = jax.vmap(case.f, in_axes=axis, out_axes=out_axis)(np.moveaxis(xs, 0, axis))
    expected = jnp.stack([case.ref(x) for x in xs], axis=out_axis)
    assert_same(y, expected, case.rtol)

    dys = np.stack([cotangents(case) + i for i in range(3)], axis=out_axis)
    dx = jax.vmap(jax.linear_transpose(case.f, xs[0]), in_axes=out_axis, out_axes=axis)(dys)[0]
    pull = jax.linear_transpose(case.ref, xs[0])
    expected = jnp.stack([pull(cotangents(case) + i)[0] for i in range(3)], axis=axis)
    assert_same(dx, expected, case.rtol)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eval_shape(case):
    x = jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
    for transform in (lambda f: f, jax.jit, lambda f: jax.grad(cube(f)), jax.jacrev, jax.vmap):
        spec = x if transform is not jax.vmap else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        actual = jax.eval_shape(transform(case.f), spec)
        expected = jax.eval_shape(transform(case.ref), spec)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.weak_type == expected.weak_type


@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_round_trip(case):
    pytest.importorskip("flatbuffers")
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (case.target, case.grad_target)
    ]
    x, dy = case.inputs(), cotangents(case)
    exported = jax.export.export(jax.jit(case.f), disabled_checks=checks)(x)
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_same(restored.call(x), case.ref(x), case.rtol)
    actual = jax.jit(lambda x, dy: jax.vjp(restored.call, x)[1](dy))(x, dy)
    assert_same(actual, jax.linear_transpose(case.ref, x)(dy), case.rtol)
