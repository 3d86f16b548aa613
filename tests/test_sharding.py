"""Arrays divided over devices: no communication where the op needs none, and the values and
gradients of one device, with automatic and explicit axes and in shard_map."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from tests import oracle
from tests.cases import ELEMENTWISE_CASES, Case

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="needs 8 devices (the CPU has 8 virtual ones)"
)

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
)
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@contextlib.contextmanager
def mesh_of(axis_types: str):
    """A mesh of 4 x 2 devices, `a` and `b`; current where its axes are explicit."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AXIS_TYPES[axis_types],) * 2)
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        yield mesh


def integers(shape, seed=0) -> np.ndarray:
    """Exact in every sum, so that one device and eight must agree bit for bit."""
    return np.random.default_rng(seed).integers(-8, 9, size=shape).astype(np.float32)


def assert_sharded(y: jax.Array, sharding: NamedSharding) -> None:
    assert y.sharding.is_equivalent_to(sharding, y.ndim), y.sharding


def pull(f, x, dy):
    return jax.vjp(f, x)[1](dy)[0]


VARIANTS = {
    "2x": {"scale_factor": 2},
    "any": {"size": (5, 7), "method": "nearest-exact"},
    "down": {"size": (2, 3)},
}
# (data format, shape, spec), with everything but the spatial dimensions divided somehow.
FREE = [
    ("NCHW", (8, 4, 4, 6), P("a")),
    ("NCHW", (8, 4, 4, 6), P(None, "a")),
    ("NCHW", (8, 4, 4, 6), P("a", "b")),
    ("NCHW", (8, 4, 4, 6), P("b", "a", None, None)),
    ("NCHW", (8, 4, 4, 6), P(("a", "b"))),
    ("NCHW", (4, 3, 2, 4, 6), P("a", None, "b")),
    ("NCHW", (8, 4, 6), P(("b", "a"))),
    ("NHWC", (8, 4, 6, 4), P("a")),
    ("NHWC", (8, 4, 6, 4), P(None, None, None, "a")),
    ("NHWC", (8, 4, 6, 4), P("a", None, None, "b")),
    ("NHWC", (3, 4, 6, 8), P(None, None, None, ("a", "b"))),
    ("NHWC", (4, 6, 8), P(None, None, "b")),
]
# Spatial dimensions divided, alone or besides others.
SPATIAL = [
    ("NCHW", (8, 4, 4, 8), P(None, None, "a")),
    ("NCHW", (8, 4, 4, 8), P(None, None, None, "a")),
    ("NCHW", (8, 4, 4, 8), P(None, None, "a", "b")),
    ("NCHW", (8, 4, 4, 8), P("a", None, "b")),
    ("NHWC", (8, 4, 8, 4), P(None, "a", None, "b")),
    ("NHWC", (8, 4, 8, 4), P("a", None, "b")),
]


def arguments(data_format, variant):
    return functools.partial(jof.upsample_nearest2d, data_format=data_format, **VARIANTS[variant])


def without_spatial(spec: P, ndim: int, data_format: str) -> P:
    axis = oracle.spatial_axis(ndim, data_format)
    padded = (*spec, *(None,) * (ndim - len(spec)))
    return P(*padded[:axis], None, None, *padded[axis + 2 :])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("data_format", "shape", "spec"), FREE, ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_free_dimensions_need_no_communication(axis_types, data_format, shape, spec, variant):
    f = arguments(data_format, variant)
    x = integers(shape)
    y = np.asarray(f(x))
    dy = integers(y.shape, seed=1)
    dx = np.asarray(pull(f, x, dy))

    with mesh_of(axis_types) as mesh:
        sharding = NamedSharding(mesh, spec)
        x, dy = (jax.device_put(array, sharding) for array in (x, dy))

        forward = jax.jit(f).lower(x).compile()
        assert not COLLECTIVE.search(forward.as_text())
        assert 'custom_call_target="jof_upsample_nearest2d"' in forward.as_text()
        assert_sharded(forward(x), sharding)
        np.testing.assert_array_equal(forward(x), y)

        backward = jax.jit(functools.partial(pull, f)).lower(x, dy).compile()
        assert not COLLECTIVE.search(backward.as_text())
        assert 'custom_call_target="jof_upsample_nearest2d_backward"' in backward.as_text()
        assert_sharded(backward(x, dy), sharding)
        np.testing.assert_array_equal(backward(x, dy), dx)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("data_format", "shape", "spec"), SPATIAL, ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_divided_images_are_gathered(axis_types, data_format, shape, spec, variant):
    """Images divided over devices are put together first; the other dimensions stay divided."""
    f = arguments(data_format, variant)
    x = integers(shape)
    y = np.asarray(f(x))
    dy = integers(y.shape, seed=1)
    dx = np.asarray(pull(f, x, dy))

    with mesh_of(axis_types) as mesh:
        sharding = NamedSharding(mesh, spec)
        x = jax.device_put(x, sharding)
        whole_images = NamedSharding(mesh, without_spatial(spec, x.ndim, data_format))
        result = jax.jit(f)(x)
        np.testing.assert_array_equal(result, y)
        assert_sharded(result, whole_images)
        dy = jax.device_put(dy, whole_images)
        gradient = jax.jit(functools.partial(pull, f))(x, dy)
        np.testing.assert_array_equal(gradient, dx)
        if axis_types == "explicit":  # the gradient has the type of the input
            assert_sharded(gradient, sharding)


@pytest.mark.parametrize(("data_format", "shape", "spec"), [FREE[2], FREE[9], SPATIAL[3]], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_loss_and_its_derivatives(axis_types, data_format, shape, spec):
    """value_and_grad and a Hessian-vector product of a scalar loss, as a training step has them."""

    def loss(x):
        y = jof.upsample_nearest2d(x, 2, data_format=data_format)
        return jnp.sum(y * y * y)

    def step(x, v):
        return jax.value_and_grad(loss)(x), jax.jvp(jax.grad(loss), (x,), (v,))[1]

    x, v = integers(shape), integers(shape, seed=1)
    expected = jax.jit(step)(x, v)
    with mesh_of(axis_types) as mesh:
        x, v = (jax.device_put(array, NamedSharding(mesh, spec)) for array in (x, v))
        actual = jax.jit(step)(x, v)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        if spec != SPATIAL[3][2] or axis_types == "explicit":  # the compiler's choice otherwise
            for array in (actual[0][1], actual[1]):
                assert_sharded(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_outside_jit(axis_types):
    x = integers((8, 4, 4, 6))
    with mesh_of(axis_types) as mesh:
        sharding = NamedSharding(mesh, P("a", "b"))
        y = jof.upsample_nearest2d(jax.device_put(x, sharding), 2)
        assert_sharded(y, sharding)
        np.testing.assert_array_equal(y, oracle.upsample_nearest2d(x, (8, 12)))


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
@pytest.mark.parametrize(("axis", "spec"), [(0, P("a", "b")), (1, P("b", "a")), (4, P("a"))])
def test_vmap_over_a_divided_axis(axis_types, axis, spec):
    f = jax.vmap(lambda x: jof.upsample_nearest2d(x, 2), in_axes=axis, out_axes=axis)
    shape = [8, 3, 3, 5]
    shape.insert(axis, 8)
    if axis == 4:
        spec = P(*spec, *(None,) * (4 - len(spec)), "b")
    x = integers(tuple(shape))
    y = np.asarray(f(x))
    dy = integers(y.shape, seed=1)
    dx = np.asarray(pull(f, x, dy))
    with mesh_of(axis_types) as mesh:
        sharding = NamedSharding(mesh, spec)
        if axis == 1:  # 8 examples of 8: divide both
            sharding = NamedSharding(mesh, P("b", "a"))
        x, dy = (jax.device_put(array, sharding) for array in (x, dy))
        both = jax.jit(lambda x, dy: (f(x), pull(f, x, dy))).lower(x, dy).compile()
        assert not COLLECTIVE.search(both.as_text())
        actual = both(x, dy)
        np.testing.assert_array_equal(actual[0], y)
        np.testing.assert_array_equal(actual[1], dx)
        for array in actual:
            assert_sharded(array, sharding)


def test_the_type_of_an_explicit_result():
    """The sharding is part of the type already while tracing."""
    with mesh_of("explicit") as mesh:
        x = jax.device_put(integers((8, 4, 4, 8)), NamedSharding(mesh, P("a", None, None, "b")))
        traced = []

        @jax.jit
        def f(x):
            y = jof.upsample_nearest2d(x, 2)
            traced.append(jax.typeof(y))
            return y

        y = f(x)
        assert jax.typeof(y).sharding.spec == traced[0].sharding.spec == P("a", None, None, None)


def test_batch_that_devices_do_not_divide():
    x = integers((6, 3, 4, 5))
    with mesh_of("auto") as mesh:
        sharding = NamedSharding(mesh, P("a"))

        @jax.jit
        def f(x, dy):
            x = lax.with_sharding_constraint(x, sharding)
            return jof.upsample_nearest2d(x, 2), pull(lambda x: jof.upsample_nearest2d(x, 2), x, dy)

        dy = integers((6, 3, 8, 10), seed=1)
        y, dx = f(x, dy)
    np.testing.assert_array_equal(y, oracle.upsample_nearest2d(x, (8, 10)))
    np.testing.assert_array_equal(dx, oracle.upsample_nearest2d_adjoint(dy, (4, 5)))


def test_constraint_on_the_result_reaches_the_operand():
    """With the result divided and the operand not said, nothing needs to be gathered either."""
    x = integers((8, 4, 4, 6))
    with mesh_of("auto") as mesh:
        sharding = NamedSharding(mesh, P("a", "b"))
        f = jax.jit(
            lambda x: jof.upsample_nearest2d(x * 2, 2),
            in_shardings=NamedSharding(mesh, P()),
            out_shardings=sharding,
        )
        compiled = f.lower(x).compile()
        assert not COLLECTIVE.search(compiled.as_text())
        # One device works on its eighth only.
        assert "f32[2,2,8,12]" in compiled.as_text()
        assert "f32[8,4,8,12]" not in compiled.as_text()
        np.testing.assert_array_equal(f(x), oracle.upsample_nearest2d(2 * x, (8, 12)))


# --- shard_map ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("data_format", "shape", "spec"), [FREE[0], FREE[2], FREE[9]], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_shard_map(axis_types, data_format, shape, spec, variant):
    f = arguments(data_format, variant)
    x = integers(shape)
    y = np.asarray(f(x))
    dy = integers(y.shape, seed=1)
    dx = np.asarray(pull(f, x, dy))
    with mesh_of(axis_types) as mesh:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
        sharding = NamedSharding(mesh, spec)
        x, dy = (jax.device_put(array, sharding) for array in (x, dy))
        for transform in (lambda g: g, jax.jit):
            np.testing.assert_array_equal(transform(mapped)(x), y)
            actual = transform(functools.partial(pull, mapped))(x, dy)
            np.testing.assert_array_equal(actual, dx)
            assert_sharded(actual, sharding)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_shard_map_with_a_replicated_operand(axis_types):
    """The gradient of what every device has is summed over the devices."""
    x, w = integers((8, 2, 4, 6)), integers((1, 2, 4, 6), seed=1)

    def f(x, w):
        return jof.upsample_nearest2d(x, 2) * jof.upsample_nearest2d(w, 2)

    def derivatives(f, x, w):
        return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), argnums=(0, 1))(x, w)

    expected = derivatives(f, x, w)
    with mesh_of(axis_types) as mesh:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
        x = jax.device_put(x, NamedSharding(mesh, P("a")))
        w = jax.device_put(w, NamedSharding(mesh, P()))
        actual = jax.jit(functools.partial(derivatives, mapped))(x, w)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_gradient_inside_shard_map(axis_types):
    """Data-parallel training: each device differentiates its share, then the shares are summed."""
    x, w = integers((8, 2, 4, 6)), integers((2, 4, 6), seed=1)

    def loss(w, x):
        return jnp.sum(jof.upsample_nearest2d(x * w, 2) ** 2)

    expected = jax.grad(loss)(w, x)
    with mesh_of(axis_types) as mesh:

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(("a", "b"))), out_specs=P())
        def grad(w, x):
            w = (
                lax.pcast(w, ("a", "b"), to="varying")
                if hasattr(lax, "pcast")
                else lax.pvary(w, ("a", "b"))
            )
            return lax.psum(jax.grad(loss)(w, x), ("a", "b"))

        actual = jax.jit(grad)(
            jax.device_put(w, NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P(("a", "b")))),
        )
        np.testing.assert_array_equal(actual, expected)


def test_shard_map_over_some_axes():
    """One mesh axis by hand, the other left to the compiler."""
    x = integers((8, 4, 4, 6))
    f = functools.partial(jof.upsample_nearest2d, scale_factor=2)
    y = np.asarray(f(x))
    dy = integers(y.shape, seed=1)
    dx = np.asarray(pull(f, x, dy))
    with mesh_of("auto") as mesh:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
        sharding = NamedSharding(mesh, P("a", "b"))
        x, dy = (jax.device_put(array, sharding) for array in (x, dy))
        np.testing.assert_array_equal(jax.jit(mapped)(x), y)
        np.testing.assert_array_equal(jax.jit(functools.partial(pull, mapped))(x, dy), dx)


# --- permute --------------------------------------------------------------------------------------

# (shape, axes, spec)
PERMUTES = [
    ((8, 3, 4), (2, 0, 1), P("a", None, "b")),
    ((8, 3, 4), (0, 2, 1), P(("a", "b"))),
    ((3, 4, 2, 8), None, P(None, "b", None, "a")),
]


def permuted_spec(shape, axes, spec: P) -> P:
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    return P(*(entries[axis] for axis in axes or reversed(range(len(shape)))))


@pytest.mark.parametrize(("shape", "axes", "spec"), PERMUTES, ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_permute_needs_no_communication(axis_types, shape, axes, spec):
    """In jit, by itself and in shard_map; dimensions are divided as they were."""
    f = functools.partial(jof.permute, axes=axes)
    x = integers(shape)
    y = np.transpose(x, axes)
    result_spec = permuted_spec(shape, axes, spec)

    def loss(f, x):
        z = f(x)
        return jnp.sum(z * z), z

    with mesh_of(axis_types) as mesh:
        operand, result = NamedSharding(mesh, spec), NamedSharding(mesh, result_spec)
        mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=result_spec)
        sharded = jax.device_put(x, operand)
        for g in (f, mapped):
            forward = jax.jit(g).lower(sharded).compile()
            assert not COLLECTIVE.search(forward.as_text())
            assert 'custom_call_target="jof_permute"' in forward.as_text()
            assert_sharded(forward(sharded), result)
            np.testing.assert_array_equal(forward(sharded), y)
            grad = jax.jit(jax.grad(functools.partial(loss, g), has_aux=True))
            dx, z = grad(sharded)
            assert_sharded(dx, operand)
            assert_sharded(z, result)
            np.testing.assert_array_equal(dx, 2 * x)
            dy = jax.device_put(y, result)
            backward = jax.jit(functools.partial(pull, g)).lower(sharded, dy).compile()
            assert not COLLECTIVE.search(backward.as_text())
            assert_sharded(backward(sharded, dy), operand)
            np.testing.assert_array_equal(backward(sharded, dy), x)
        assert_sharded(f(sharded), result)
        if axis_types == "explicit":
            assert jax.typeof(f(sharded)).sharding.spec == result_spec


def test_permute_of_a_shard_that_need_not_move():
    """A device has one row, which as a column is the same."""
    x = integers((8, 6))
    for axis_types in AXIS_TYPES:
        with mesh_of(axis_types) as mesh:
            sharded = jax.device_put(x, NamedSharding(mesh, P(("a", "b"))))
            compiled = jax.jit(jof.permute).lower(sharded).compile()
            assert not COLLECTIVE.search(compiled.as_text())
            assert "custom-call" not in compiled.as_text()
            np.testing.assert_array_equal(compiled(sharded), x.T)
            assert_sharded(compiled(sharded), NamedSharding(mesh, P(None, ("a", "b"))))


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_vmap_of_permute_over_a_divided_axis(axis_types):
    x = integers((3, 8, 4))
    f = jax.vmap(jof.permute, in_axes=1)
    with mesh_of(axis_types) as mesh:
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, "a", "b")))
        both = jax.jit(lambda x: (f(x), pull(f, x, f(x)))).lower(sharded).compile()
        assert not COLLECTIVE.search(both.as_text())
        y, dx = both(sharded)
        np.testing.assert_array_equal(y, x.transpose(1, 2, 0))
        np.testing.assert_array_equal(dx, x)
        assert_sharded(y, NamedSharding(mesh, P("a", "b")))
        assert_sharded(dx, sharded.sharding)


def test_permute_with_partly_automatic_axes():
    """A constraint on the result reaches the operand; dimensions that devices do not divide; one
    mesh axis by hand, the other left to the compiler."""
    x, odd = integers((8, 3, 4)), integers((6, 5, 3))
    f = functools.partial(jof.permute, axes=(2, 0, 1))
    with mesh_of("auto") as mesh:
        whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("b", "a"))
        g = jax.jit(lambda x: f(x * 2), in_shardings=whole, out_shardings=divided)
        hlo = g.lower(x).compile().as_text()
        assert not COLLECTIVE.search(hlo)
        assert re.search(r'f32\[2,2,3\][^=]*custom-call\(.*"jof_permute"', hlo), hlo
        np.testing.assert_array_equal(g(x), 2 * np.transpose(x, (2, 0, 1)))

        uneven = jax.jit(lambda x: f(lax.with_sharding_constraint(x, NamedSharding(mesh, P("a")))))
        np.testing.assert_array_equal(uneven(odd), np.transpose(odd, (2, 0, 1)))

        spec = {"in_specs": P("a"), "out_specs": P(None, "a"), "axis_names": {"a"}}
        mapped = jax.shard_map(f, mesh=mesh, **spec)
        sharded = jax.device_put(x, NamedSharding(mesh, P("a", None, "b")))
        np.testing.assert_array_equal(jax.jit(mapped)(sharded), np.transpose(x, (2, 0, 1)))


# --- elementwise functions ------------------------------------------------------------------------

REPRESENTATIVE = [case for case in ELEMENTWISE_CASES if case.every_column]
SHAPE = (8, 4, 6)
SPECS = [P("a", None, "b"), P(("a", "b")), P(None, None, "b")]


def each_spec():
    """Every function with one spec, those that stand for others with all."""
    for case in ELEMENTWISE_CASES:
        count = 1 if all(case.shapes) or case.parameters else 0  # no scalars twice
        for spec in SPECS if case.every_column else SPECS[:count]:
            yield pytest.param(case.resized(SHAPE), spec, id=f"{case}-{spec}")


def value_and_pullback(f, wrt):
    """(cotangent, operands) -> value, gradients with respect to `wrt`."""

    def run(dy, *xs):
        def of_wrt(*operands):
            given = dict(zip(wrt, operands, strict=True))
            return f(*(given.get(i, x) for i, x in enumerate(xs)))

        y, pull = jax.vjp(of_wrt, *(xs[i] for i in wrt))
        return y, pull(dy)

    return run


def specs_of(case: Case, spec: P) -> tuple[P, ...]:
    """Arrays are divided, scalars are on every device."""
    return tuple(spec if shape else P() for shape in case.shapes)


def put(mesh, specs, xs) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]


def cotangent(case: Case) -> np.ndarray:
    return integers(SHAPE, seed=1).astype(case.dtype)


def assert_close(actual, expected, rtol) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        atol = rtol * np.max(np.abs(e))
        np.testing.assert_allclose(a, e, rtol=0, atol=atol, strict=True)


@pytest.mark.parametrize(("case", "spec"), [*each_spec()])
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_elementwise_needs_no_communication(axis_types, case, spec):
    """All dimensions are divided freely, in the function and in its gradient."""
    with case.precision():
        xs, dy = case.inputs(), cotangent(case)
        run = value_and_pullback(case.f, case.wrt)
        expected = value_and_pullback(case.ref, case.wrt)(dy, *xs)
        with mesh_of(axis_types) as mesh:
            arguments = put(mesh, (spec, *specs_of(case, spec)), (dy, *xs))
            compiled = jax.jit(run).lower(*arguments).compile()
            hlo = compiled.as_text()
            assert not COLLECTIVE.search(hlo)
            for target in (case.target, *case.grad_targets[case.wrt]):
                assert f'custom_call_target="{target}"' in hlo
            assert f"[{','.join(map(str, SHAPE))}]" not in hlo  # one device works on its part
            actual = compiled(*arguments)
            assert_close(actual, expected, case.rtol)
            for array in jax.tree.leaves(actual):
                assert_sharded(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    "case", [case.resized(SHAPE) for case in ELEMENTWISE_CASES if not all(case.shapes)], ids=str
)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_gradient_of_a_scalar_is_summed_over_devices(axis_types, case):
    spec = P("a", None, "b")
    with case.precision():
        xs, dy = case.inputs(), cotangent(case)
        wrt = [i for i, shape in enumerate(case.shapes) if i in case.wrt or not shape]
        expected = value_and_pullback(case.ref, wrt)(dy, *xs)
        rtol = max(case.rtol, 1e-15 if case.dtype == "float64" else 0)
        with mesh_of(axis_types) as mesh:
            specs = specs_of(case, spec)
            arguments = put(mesh, (spec, *specs), (dy, *xs))
            run = value_and_pullback(case.f, wrt)
            y, dxs = jax.jit(run)(*arguments)
            assert_close((y, dxs), expected, rtol)
            assert_sharded(y, NamedSharding(mesh, spec))
            for i, dx in zip(wrt, dxs, strict=True):
                assert_sharded(dx, NamedSharding(mesh, specs[i]))

            if axis_types == "explicit":  # the tangent has the type of the result
                (scalar,) = (i for i, shape in enumerate(case.shapes) if not shape)
                before, x, *after = arguments[1:][:scalar], *arguments[1:][scalar:]
                _, tangent = jax.jvp(lambda x: case.f(*before, x, *after), (x,), (x,))
                assert_sharded(tangent, NamedSharding(mesh, spec))

            mapped = jax.shard_map(case.f, mesh=mesh, in_specs=specs, out_specs=spec)
            actual = jax.jit(value_and_pullback(mapped, wrt))(*arguments)
            assert_close(actual, expected, rtol)


@pytest.mark.parametrize("case", [case.resized(SHAPE) for case in REPRESENTATIVE], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_elementwise_in_shard_map(axis_types, case):
    spec = P("a", None, "b")
    with case.precision():
        xs, dy = case.inputs(), cotangent(case)
        expected = value_and_pullback(case.ref, case.wrt)(dy, *xs)
        with mesh_of(axis_types) as mesh:
            specs = specs_of(case, spec)
            arguments = put(mesh, (spec, *specs), (dy, *xs))
            mapped = jax.shard_map(case.f, mesh=mesh, in_specs=specs, out_specs=spec)
            run = value_and_pullback(mapped, case.wrt)
            hlo = jax.jit(run).lower(*arguments).compile().as_text()
            assert not COLLECTIVE.search(hlo)
            assert f'custom_call_target="{case.target}"' in hlo
            for transform in (lambda g: g, jax.jit):
                actual = transform(run)(*arguments)
                assert_close(actual, expected, case.rtol)
                for array in jax.tree.leaves(actual):
                    assert_sharded(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("axis_types", "case"),
    [
        pytest.param(axis_types, case.resized(SHAPE), id=f"{axis_types}-{case}")
        for axis_types in AXIS_TYPES
        for case in REPRESENTATIVE
        # Like jnp.where, where refuses branches whose types have different shardings.
        if len(case.arrays) > 1 and (axis_types, case.name) != ("explicit", "where")
    ],
)
def test_operands_that_are_divided_differently(axis_types, case):
    """The gradient has the sharding of its operand, where that is part of its type."""
    last = case.arrays[-1]
    for one, other in ((P("a"), P()), (P(), P("a", "b")), (P("a"), P(None, None, "b"))):
        with case.precision():
            xs, dy = case.inputs(), cotangent(case)
            expected = value_and_pullback(case.ref, case.wrt)(dy, *xs)
            with mesh_of(axis_types) as mesh:
                specs = [one if shape else P() for shape in case.shapes]
                specs[last] = other
                padded = [(*spec, *(None,) * (len(SHAPE) - len(spec))) for spec in (one, other)]
                joined = P(*(a or b for a, b in zip(*padded, strict=True)))
                arguments = put(mesh, (joined, *specs), (dy, *xs))
                forward = jax.jit(case.f).lower(*arguments[1:]).compile()
                assert not COLLECTIVE.search(forward.as_text())
                assert_sharded(forward(*arguments[1:]), NamedSharding(mesh, joined))
                actual = jax.jit(value_and_pullback(case.f, case.wrt))(*arguments)
                assert_close(actual, expected, case.rtol)
                if axis_types == "explicit":
                    for i, dx in zip(case.wrt, actual[1], strict=True):
                        assert_sharded(dx, NamedSharding(mesh, specs[i]))


@pytest.mark.parametrize("case", [case.resized(SHAPE) for case in REPRESENTATIVE], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_elementwise_loss_and_its_derivatives(axis_types, case):
    def step_of(f):
        def loss(*xs):
            y = f(*xs)
            return jnp.sum(y * y * y)

        grad = jax.value_and_grad(loss, argnums=case.wrt)
        return lambda xs, vs: (grad(*xs), jax.jvp(lambda *xs: grad(*xs)[1], xs, vs)[1])

    spec = P("a", None, "b")
    with case.precision():
        xs = case.inputs()
        vs = tuple(np.asarray(np.flip(x)) for x in xs)
        expected = jax.jit(step_of(case.ref))(xs, vs)
        rtol = max(case.rtol, 1e-11 if case.dtype == "float64" else 0)
        with mesh_of(axis_types) as mesh:
            xs, vs = (tuple(put(mesh, specs_of(case, spec), tree)) for tree in (xs, vs))
            actual = jax.jit(step_of(case.f))(xs, vs)
            assert_close(actual, expected, rtol)
            for array in (*actual[0][1], *actual[1]):
                assert_sharded(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("case", [case.resized((4, 6)) for case in REPRESENTATIVE], ids=str)
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_elementwise_vmap_over_a_divided_axis(axis_types, axis, case):
    spec = P(*(None,) * axis, "a")
    axes = tuple(axis if shape else None for shape in case.shapes)
    with case.precision():
        xs = [
            np.moveaxis(x, 0, axis) if shape else x[0]
            for x, shape in zip(case.inputs(8), case.shapes, strict=True)
        ]

        def f(*xs):
            return jax.vmap(case.f, in_axes=axes, out_axes=axis)(*xs)

        def ref(*xs):
            return jax.vmap(case.ref, in_axes=axes, out_axes=axis)(*xs)

        y = np.asarray(ref(*xs))
        dy = integers(y.shape, seed=1).astype(case.dtype)
        expected = value_and_pullback(ref, case.wrt)(dy, *xs)
        with mesh_of(axis_types) as mesh:
            arguments = put(mesh, (spec, *specs_of(case, spec)), (dy, *xs))
            compiled = jax.jit(value_and_pullback(f, case.wrt)).lower(*arguments).compile()
            assert not COLLECTIVE.search(compiled.as_text())
            actual = compiled(*arguments)
            assert_close(actual, expected, case.rtol)
            for array in jax.tree.leaves(actual):
                assert_sharded(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("case", [case.resized(SHAPE) for case in REPRESENTATIVE], ids=str)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_elementwise_outside_jit(axis_types, case):
    with case.precision(), mesh_of(axis_types) as mesh:
        spec = P("a", None, "b")
        xs = case.inputs()
        y = case.f(*put(mesh, specs_of(case, spec), xs))
        assert_sharded(y, NamedSharding(mesh, spec))
    with case.precision():
        assert_close(y, case.ref(*xs), case.rtol)


def test_cast_needs_no_communication():
    x = integers(SHAPE)
    for axis_types in AXIS_TYPES:
        with mesh_of(axis_types) as mesh:
            sharding = NamedSharding(mesh, P("a", None, "b"))

            def run(x, dy):
                y, pull = jax.vjp(lambda x: jof.cast(x, jnp.bfloat16), x)
                return y, pull(dy)[0]

            arguments = [jax.device_put(v, sharding) for v in (x, x.astype(jnp.bfloat16))]
            compiled = jax.jit(run).lower(*arguments).compile()
            assert not COLLECTIVE.search(compiled.as_text())
            assert 'custom_call_target="jof_cast"' in compiled.as_text()
            for array in compiled(*arguments):
                assert_sharded(array, sharding)
                np.testing.assert_array_equal(np.asarray(array, np.float32), x)


@pytest.mark.parametrize("case", [case.resized(SHAPE) for case in REPRESENTATIVE], ids=str)
def test_elementwise_shard_map_over_some_axes(case):
    """One mesh axis by hand, the other left to the compiler."""
    with case.precision():
        xs, dy = case.inputs(), cotangent(case)
        expected = value_and_pullback(case.ref, case.wrt)(dy, *xs)
        with mesh_of("auto") as mesh:
            arguments = put(mesh, (P("a", "b"), *specs_of(case, P("a", "b"))), (dy, *xs))
            mapped = jax.shard_map(
                case.f,
                mesh=mesh,
                in_specs=specs_of(case, P("a")),
                out_specs=P("a"),
                axis_names={"a"},
            )
            actual = jax.jit(value_and_pullback(mapped, case.wrt))(*arguments)
            assert_close(actual, expected, case.rtol)


def test_elementwise_constraint_on_the_result_reaches_the_operands():
    x, y = integers(SHAPE), integers(SHAPE, seed=1)
    with mesh_of("auto") as mesh:
        whole = NamedSharding(mesh, P())
        f = jax.jit(
            lambda x, y: jof.multiply(x * 2, y),
            in_shardings=(whole, whole),
            out_shardings=NamedSharding(mesh, P("a", None, "b")),
        )
        hlo = f.lower(x, y).compile().as_text()
        assert not COLLECTIVE.search(hlo)
        assert re.search(r'f32\[2,4,3\][^=]*custom-call\(.*"jof_multiply"', hlo), hlo
        np.testing.assert_array_equal(f(x, y), 2 * x * y)


def test_elementwise_dimension_that_devices_do_not_divide():
    x, y = integers((6, 3)), integers((6, 3), seed=1)
    with mesh_of("auto") as mesh:
        sharding = NamedSharding(mesh, P("a"))

        @jax.jit
        def f(x, y):
            x = lax.with_sharding_constraint(x, sharding)
            z, pull = jax.vjp(jof.multiply, x, y)
            return z, pull(z)

        actual = f(x, y)
    jax.tree.map(np.testing.assert_array_equal, actual, (x * y, (x * y * y, x * x * y)))


# --- sums and lookups of rows ---------------------------------------------------------------------

NODES, EDGES, FEATURES = 6, 16, (4, 8)


def rows_case(name):
    """(function, function in jnp, operands, which of them are not ids)"""
    x, y = integers((EDGES, *FEATURES)), integers((NODES, *FEATURES), seed=1)
    ids = np.random.default_rng(2).integers(-2, NODES + 2, size=EDGES).astype(np.int32)
    return {
        "segment_sum": (
            lambda x, ids: jof.segment_sum(x, ids, NODES),
            lambda x, ids: jax.ops.segment_sum(x, ids, NODES),
            (x, ids),
            (0,),
        ),
        "scatter_add": (
            jof.scatter_add,
            lambda operand, ids, updates: jnp.asarray(operand).at[ids].add(updates, mode="drop"),
            (y, ids, x),
            (0, 2),
        ),
        "embedding_lookup": (
            jof.embedding_lookup,
            lambda table, ids: jnp.take(table, ids, axis=0),
            (y, ids % NODES),
            (0,),
        ),
    }[name]


def rows_specs(name, index, rest) -> tuple[tuple[P, ...], P]:
    """Specs of the operands and of the result."""
    many, few = P(index, *rest), P(None, *rest)
    return {
        "segment_sum": ((many, P(index)), few),
        "scatter_add": ((few, P(index), many), few),
        "embedding_lookup": ((few, P(index)), many),
    }[name]


ROWS_CASES = ("segment_sum", "scatter_add", "embedding_lookup")
# (mesh axis of the ids, those of the other dimensions)
ROWS_SPECS = [
    (None, ("a",)),
    (None, (None, ("a", "b"))),
    (None, ("b", "a")),
    ("a", ()),
    (("a", "b"), ()),
    ("a", (None, "b")),
]


def count_collectives(hlo: str) -> dict[str, int]:
    """Collectives by name; one that is split into a start and an end counts once."""
    found = re.findall(r"= \S+ (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", hlo)
    return {name: found.count(name) for name in set(found)}


@pytest.mark.parametrize(("index", "rest"), ROWS_SPECS, ids=str)
@pytest.mark.parametrize("name", ROWS_CASES)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_rows_are_summed_where_they_are(axis_types, name, index, rest):
    """Trailing dimensions need no communication; where ids are divided, sums of each device's rows
    are added up by one all-reduce, in the function or in its gradient."""
    f, ref, xs, wrt = rows_case(name)
    dy = integers(np.shape(ref(*xs)), seed=3)
    expected = value_and_pullback(ref, wrt)(dy, *xs)
    specs, result = rows_specs(name, index, rest)
    reduces = {"all-reduce": 1} if index else {}
    forward_reduces = {} if name == "embedding_lookup" else reduces
    backward_reduces = reduces if name == "embedding_lookup" else {}
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, specs, xs)
        dy = jax.device_put(dy, NamedSharding(mesh, result))
        forward = jax.jit(f).lower(*arguments).compile()
        assert count_collectives(forward.as_text()) == forward_reduces
        y = forward(*arguments)
        np.testing.assert_array_equal(y, expected[0])
        assert_sharded(y, NamedSharding(mesh, result))

        def gradient(dy, *xs):
            return value_and_pullback(f, wrt)(dy, *xs)[1]

        backward = jax.jit(gradient).lower(dy, *arguments).compile()
        assert count_collectives(backward.as_text()) == backward_reduces
        actual = backward(dy, *arguments)
        jax.tree.map(np.testing.assert_array_equal, actual, expected[1])
        for i, dx in zip(wrt, actual, strict=True):
            assert_sharded(dx, NamedSharding(mesh, specs[i]))
        # One device works on its part only.
        for hlo in (forward.as_text(), backward.as_text()):
            assert f"f32[{EDGES},{FEATURES[0]},{FEATURES[1]}]" not in hlo


@pytest.mark.parametrize("name", ROWS_CASES)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_batches_of_rows_need_no_communication(axis_types, name):
    f, ref, xs, wrt = rows_case(name)
    xs = [np.stack([x + i if x.dtype != np.int32 else np.roll(x, i) for i in range(8)]) for x in xs]
    f, ref = jax.vmap(f), jax.vmap(ref)
    dy = integers(np.shape(ref(*xs)), seed=3)
    expected = value_and_pullback(ref, wrt)(dy, *xs)
    with mesh_of(axis_types) as mesh:
        sharding = NamedSharding(mesh, P(("a", "b")))
        arguments = [jax.device_put(x, sharding) for x in (dy, *xs)]
        compiled = jax.jit(value_and_pullback(f, wrt)).lower(*arguments).compile()
        assert not COLLECTIVE.search(compiled.as_text())
        actual = compiled(*arguments)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        for array in jax.tree.leaves(actual):
            assert_sharded(array, sharding)


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_16_bit_rows_are_summed_over_devices_in_float32(axis_types):
    """257 and the operand's 1: had bfloat16 the 257, it would be 256, and with 1 still."""
    ids = np.zeros(257 + 7, np.int32)
    ids[257:] = 9
    x = np.ones(ids.shape, jnp.bfloat16)
    operand = np.array([1, -0.0, 2], jnp.bfloat16)
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P(), P(("a", "b")), P(("a", "b"))), (operand, ids, x))
        y = np.asarray(jax.jit(jof.scatter_add)(*arguments))
        np.testing.assert_array_equal(y.astype(float), [258, 0, 2])
        assert np.signbit(y[1])


def test_rows_that_devices_do_not_divide():
    """What shards are padded with must not enter a sum."""
    x, ids = integers((13, 5)), np.arange(13, dtype=np.int32) % 4
    expected = jax.ops.segment_sum(x, ids, 4)
    with mesh_of("auto") as mesh:

        @jax.jit
        def f(x, ids):
            x, ids = (
                lax.with_sharding_constraint(v, NamedSharding(mesh, P("a"))) for v in (x, ids)
            )
            total = jof.segment_sum(x, ids, 4)
            return total, jof.embedding_lookup(total, ids)

        total, looked_up = f(x, ids)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(looked_up, np.asarray(expected)[ids])


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_divided_tables(axis_types):
    """Rows of tables that are divided over devices are still all there."""
    f, ref, (table, ids), wrt = rows_case("embedding_lookup")
    table = np.concatenate([table, table])
    dy = integers(np.shape(ref(table, ids)), seed=3)
    expected = value_and_pullback(ref, wrt)(dy, table, ids)
    with mesh_of(axis_types) as mesh:
        arguments = put(mesh, (P(), P("a"), P()), (dy, table, ids))
        actual = jax.jit(value_and_pullback(f, wrt))(*arguments)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        if axis_types == "explicit":
            assert_sharded(actual[1][0], NamedSharding(mesh, P("a")))


@pytest.mark.parametrize("name", ROWS_CASES)
@pytest.mark.parametrize("axis_types", AXIS_TYPES)
def test_rows_in_shard_map(axis_types, name):
    """Data-parallel: tables are on every device, and their gradient is summed over devices."""
    f, ref, xs, wrt = rows_case(name)
    spec = P(("a", "b"))
    specs = {
        "segment_sum": (spec, spec),
        "scatter_add": (P(), spec, spec),
        "embedding_lookup": (P(), spec),
    }[name]
    is_lookup = name == "embedding_lookup"
    in_map = (lambda *xs: f(*xs)) if is_lookup else (lambda *xs: lax.psum(f(*xs), ("a", "b")))

    def loss(f):
        return jax.value_and_grad(lambda *xs: jnp.sum(f(*xs) ** 2), argnums=wrt)

    def scaled(*xs):  # each device adds its updates to the whole operand
        return ref(8 * xs[0], *xs[1:]) if name == "scatter_add" else ref(*xs)

    expected = loss(scaled)(*map(jnp.asarray, xs))
    with mesh_of(axis_types) as mesh:
        mapped = jax.shard_map(
            in_map, mesh=mesh, in_specs=specs, out_specs=spec if is_lookup else P()
        )
        arguments = put(mesh, specs, xs)
        for transform in (lambda g: g, jax.jit):
            actual = transform(loss(mapped))(*arguments)
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
