"""Flax's group norms inside `accelerate`: what is swapped, and that results agree."""

import gc
import inspect
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from jax_oneflow_ops import rows
from jax_oneflow_ops._accelerate import norms
from tests.arrays import rng_for
from tests.test_lowering import ENVIRONMENT_VARIABLE, accelerated, native_backend

nn = pytest.importorskip("flax.linen")
pytestmark = native_backend

VALUE, WITH_SILU = ("jof_group_norm", "false"), ("jof_group_norm", "true")
GRADIENT, OF_SILU = ("jof_group_norm_vjp", "false"), ("jof_group_norm_vjp", "true")


def calls(f, *args) -> dict[tuple[str, str], int]:
    """The calls of norms in a program inside `accelerate`, and whether they apply silu."""
    found = re.findall(r"@(jof_group_norm\w*)\(.*?silu = (\w+)", accelerated(f, *args))
    return {call: found.count(call) for call in found}


def operands(dtype="float32", shape=(3, 4, 5, 6)):
    rng = rng_for(dtype, shape)
    x, ct = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(rng.normal(size=shape[-1:]), "float32") for _ in range(2))
    return x, scale, bias, ct


def normalized(x, scale, bias, activation=lambda x: x, groups=3, **options):
    params = {"params": {"scale": scale, "bias": bias}}
    return activation(nn.GroupNorm(groups, dtype=x.dtype, **options).apply(params, x))


def with_gradients(f):
    def both(x, scale, bias, ct):
        y, pullback = jax.vjp(f, x, scale, bias)
        return y, pullback(ct)

    return both


def compare(f, *args, ulps=16, dtype=None):
    """Compares a function inside `accelerate` with flax in float64.

    The bound is a number of ulps of the largest element, of results rounded to `dtype` if given.
    """
    results = jax.jit(jof.accelerate(lambda *args: f(*args)))(*args)
    with jax.enable_x64(True):
        exact = jax.jit(f)(*(x.astype(jnp.float64) for x in args))
    for y, e in zip(*map(jax.tree.leaves, (results, exact)), strict=True):
        bound = ulps * float(jnp.finfo(dtype or y.dtype).eps) * np.max(np.abs(e))
        np.testing.assert_allclose(np.asarray(y, np.float64), e, rtol=0, atol=bound)


def silu_by_hand(x):
    return x * jax.nn.sigmoid(x)


@jax.jit
def silu(x):
    """Has the name of another function."""
    return x * jax.nn.sigmoid(1.702 * x)


@jax.jit
def swish(x):
    """Passes the norm on to a function of `jax.jit`: its argument is another array there."""
    return jax.nn.silu(x)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("activation", "is_in_kernel"),
    [
        (jax.nn.silu, True),
        (nn.swish, True),
        (lambda x: x, False),
        (silu_by_hand, False),
        (silu, False),
        (swish, False),
        (lambda x: jax.nn.silu(x.reshape(-1)).reshape(x.shape), False),
        (lambda x: jax.nn.silu(2 * x), False),
    ],
)
def test_a_norm_and_its_gradients(activation, is_in_kernel, dtype):
    def f(x, scale, bias):
        return normalized(x, scale, bias, activation)

    args = operands(dtype)
    value, both = calls(f, *args[:3]), calls(with_gradients(f), *args)
    if is_in_kernel:
        assert (value, both) == ({WITH_SILU: 1}, {WITH_SILU: 1, OF_SILU: 1})
    else:
        assert (value, both) == ({VALUE: 1}, {VALUE: 1, GRADIENT: 1})
    # XLA computes an activation outside of the kernel in the dtype of images.
    compare(with_gradients(f), *args, dtype=None if is_in_kernel else dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("options", [{}, {"use_bias": False, "use_scale": False}])
def test_modules_without_parameters(options):
    x, *_, ct = operands()
    norm = nn.GroupNorm(2, **options)
    variables = norm.init(jax.random.key(0), x)
    accelerated_variables = jof.accelerate(norm.init)(jax.random.key(0), x)
    assert jax.tree.structure(variables) == jax.tree.structure(accelerated_variables)
    jax.tree.map(np.testing.assert_array_equal, variables, accelerated_variables)

    def f(x, ct):
        y, pullback = jax.vjp(lambda x: nn.silu(norm.apply(variables, x)), x)
        return y, pullback(ct)

    assert calls(f, x, ct) == {WITH_SILU: 1, OF_SILU: 1}
    for y, e in zip(jax.jit(jof.accelerate(lambda *a: f(*a)))(x, ct), f(x, ct), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"use_scale": False}, {"use_bias": False}])
def test_norms_of_nnx(options, dtype):
    nnx = pytest.importorskip("flax.nnx")
    x, *_, ct = operands(dtype)
    module = nnx.GroupNorm(6, 3, dtype=dtype, rngs=nnx.Rngs(0), **options)

    def f(x, ct):
        def apply(module, x):
            return nnx.silu(module(x))

        y, pullback = jax.vjp(lambda x: apply(module, x), x)
        return y, *pullback(ct)

    assert calls(f, x, ct) == {WITH_SILU: 1, OF_SILU: 1}
    assert "jof_" not in jax.jit(f).lower(x, ct).as_text()
    bound = 16 * float(jnp.finfo(dtype).eps)
    for y, e in zip(jax.jit(jof.accelerate(lambda *a: f(*a)))(x, ct), f(x, ct), strict=True):
        assert y.dtype == e.dtype
        y, e = np.asarray(y, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(y, e, rtol=0, atol=bound * np.max(np.abs(e)))

    class Own(nnx.GroupNorm):
        """A class of the user's."""

    own = Own(6, 3, rngs=nnx.Rngs(0))
    assert calls(own, x) == calls(lambda x: module(x, mask=x > 0), x) == {}
    with pytest.raises(TypeError) as expected:
        module(x[..., :3])
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        jof.accelerate(lambda x: module(x))(x[..., :3])


class Block(nn.Module):
    """Two norms, the result of one of which has two uses."""

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.GroupNorm(2)(x)
        z = nn.silu(nn.GroupNorm(None, 3)(nn.silu(y)))
        return y + z, None


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("lift", "expected"),
    [
        (lambda m: m, {VALUE: 1, WITH_SILU: 2, GRADIENT: 1, OF_SILU: 2}),
        (nn.jit, {VALUE: 1, WITH_SILU: 2, GRADIENT: 1, OF_SILU: 2}),
        (nn.remat, {VALUE: 2, WITH_SILU: 4, GRADIENT: 1, OF_SILU: 2}),
        (
            lambda m: nn.scan(
                m, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            ),
            {VALUE: 1, WITH_SILU: 2, GRADIENT: 1, OF_SILU: 2},
        ),
        (
            lambda m: nn.vmap(m, variable_axes={"params": None}, split_rngs={"params": False}),
            {VALUE: 1, WITH_SILU: 2, GRADIENT: 1, OF_SILU: 2},
        ),
    ],
    ids=["plain", "jit", "remat", "scan", "vmap"],
)
def test_lifted_modules(lift, expected):
    x, *_, ct = operands(shape=(2, 3, 4, 6))
    module = lift(Block)()
    variables = module.init(jax.random.key(0), x)

    def f(variables, x, ct):
        y, pullback = jax.vjp(lambda v, x: module.apply(v, x)[0], variables, x)
        return y, pullback(ct)

    found = calls(f, variables, x, ct)
    if lift is nn.remat:  # what is computed again depends on the release of jax
        assert {*found} == {*expected}
    else:
        assert found == expected
    results = jax.jit(jof.accelerate(lambda *args: f(*args)))(variables, x, ct)
    for y, e in zip(*map(jax.tree.leaves, (results, f(variables, x, ct))), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("native")
def test_derivatives_to_second_order():
    x, scale, bias, t = operands(shape=(2, 3, 6))

    def loss(x, scale, bias):
        return jnp.sum(normalized(x, scale, bias, nn.silu) ** 3)

    def derivatives(x, scale, bias, t):
        gradient = jax.grad(loss, (0, 1, 2))
        ts = t, scale, bias
        return (
            jax.jvp(loss, (x, scale, bias), ts),
            jax.jvp(gradient, (x, scale, bias), ts),
            jax.grad(lambda *p: sum(map(jnp.vdot, gradient(*p), ts)), (0, 1, 2))(x, scale, bias),
        )

    assert {WITH_SILU, OF_SILU} <= calls(derivatives, x, scale, bias, t).keys()
    compare(derivatives, x, scale, bias, t, ulps=64)


class Own(nn.GroupNorm):
    """A class of the user's."""


def outer_interceptor(next_fun, args, kwargs, context):
    return next_fun(*args, **kwargs)


def in_interceptor(*args):
    with nn.intercept_methods(outer_interceptor):
        return normalized(*args)


def in_closed_scope(*args):
    with jof.accelerate(False):
        return normalized(*args)


def with_mask(x, scale, bias):
    params = {"params": {"scale": scale, "bias": bias}}
    return nn.GroupNorm(3).apply(params, x, mask=jnp.ones(x.shape, bool))


def of_own_class(x, scale, bias):
    return Own(3).apply({"params": {"scale": scale, "bias": bias}}, x)


def over_devices(x, scale, bias):
    return jax.vmap(lambda x: normalized(x, scale, bias, groups=3, axis_name="i"), axis_name="i")(
        x[None]
    )


def on_the_host(*args):
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        pytest.skip("jax traces functions for the host no differently")
    with compute_on("device_host"):
        return normalized(*args)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "f", [in_interceptor, in_closed_scope, with_mask, of_own_class, over_devices, on_the_host]
)
def test_flax_runs_what_may_differ(f):
    x, scale, bias, _ = operands()
    assert calls(f, x, scale, bias) == {}


@pytest.mark.usefixtures("native")
def test_a_silu_outside_of_the_scope():
    def f(*args):
        with jof.accelerate():
            y = normalized(*args)
        return nn.silu(y)

    def g(*args):
        y = normalized(*args)
        with jof.accelerate(False):
            return nn.silu(y)

    x, scale, bias, _ = operands()
    for h in (f, jof.accelerate(g)):
        text = jax.jit(h).lower(x, scale, bias).as_text()
        assert text.count("@jof_group_norm") == 1
        assert "silu = false" in text


@pytest.mark.usefixtures("native")
def test_interceptors_outside_see_the_call():
    seen = []

    def interceptor(next_fun, args, kwargs, context):
        seen.append(context.method_name)
        return 2 * next_fun(*args, **kwargs)

    def f(x, scale, bias):
        with jof.accelerate():
            return normalized(x, scale, bias, nn.silu)

    x, scale, bias, _ = operands()
    with nn.intercept_methods(interceptor):
        y = jax.jit(f)(x, scale, bias)
        text = jax.jit(f).lower(x, scale, bias).as_text()
    assert {*seen} == {"__call__"}
    assert "silu = false" in text  # of twice the norm
    assert "silu = true" not in text
    expected = jax.nn.silu(2 * normalized(x, scale, bias))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_the_environment_leaves_all_norms_to_flax(monkeypatch):
    x, scale, bias, _ = operands()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "xla")
    y = jax.jit(jof.accelerate(lambda *a: normalized(*a)))(x, scale, bias)
    np.testing.assert_array_equal(y, jax.jit(normalized)(x, scale, bias))
    assert calls(normalized, x, scale, bias) == {}
    jaxpr = str(jax.make_jaxpr(jof.accelerate(normalized))(x, scale, bias))
    assert "group_norm" not in jaxpr


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("groups", [4, 0, -1, None])
def test_errors_are_those_of_flax(groups):
    x, scale, bias, _ = operands()
    with pytest.raises(Exception, match=r".") as expected:
        normalized(x, scale, bias, groups=groups)
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        jax.jit(jof.accelerate(lambda *a: normalized(*a, groups=groups)))(x, scale, bias)


@pytest.mark.usefixtures("native")
def test_without_jit():
    x, scale, bias, _ = operands()
    f = jof.accelerate(lambda *a: normalized(*a, nn.silu))
    np.testing.assert_allclose(f(x, scale, bias), normalized(x, scale, bias, nn.silu), atol=1e-5)
    gradient = jax.grad(lambda *a: (normalized(*a, nn.silu) ** 2).sum())
    found, expected = (g(x, scale, bias) for g in (jof.accelerate(gradient), gradient))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(AttributeError):  # as without
        jof.accelerate(lambda: nn.GroupNorm(3).apply({}, "x"))()


@pytest.mark.usefixtures("native")
def test_nothing_outlives_the_result():
    x, scale, bias, _ = operands()
    with jax.checking_leaks():
        jax.jit(jof.accelerate(lambda *a: normalized(*a).sum())).lower(x, scale, bias)
    gc.collect()
    assert not hasattr(norms._here, "last")


@pytest.mark.usefixtures("native")
def test_threads_do_not_see_each_other():
    x, scale, bias, _ = operands()
    found = []

    def other():
        found.append(jax.jit(lambda *a: normalized(*a)).lower(x, scale, bias).as_text())

    def f(*args):
        y = normalized(*args)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return nn.silu(y)

    assert calls(f, x, scale, bias) == {WITH_SILU: 1}
    assert "jof_" not in found[0]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec", [P("a"), P(None, "a"), P(None, None, None, "a")], ids=["images", "pixels", "channels"]
)
def test_over_several_devices(kind, spec):
    if len(spec) == 4 and kind == AxisType.Explicit:
        pytest.skip("flax itself cannot split such channels into groups")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    args = x, scale, bias, ct = operands(shape=(4, 4, 4, 6))
    f = with_gradients(lambda *a: normalized(*a, nn.silu))
    expected = f(*args)
    with jax.set_mesh(mesh):
        x, ct = (jax.device_put(v, NamedSharding(mesh, spec)) for v in (x, ct))
        of_pixels = spec != P("a")  # or of channels
        g = jax.jit(jof.accelerate(lambda *a: f(*a)))
        if of_pixels and kind == AxisType.Auto:
            with pytest.warns(jof.GatherWarning):
                results = g(x, scale, bias, ct)
        else:
            results = g(x, scale, bias, ct)
        text = g.lower(x, scale, bias, ct).as_text()
    assert ("jof_group_norm" in text) == (not of_pixels or kind == AxisType.Auto)
    for y, e in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("axes", "is_native"), [({"a"}, False), ({"a", "b"}, True)])
def test_in_a_shard_map(axes, is_native):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, scale, bias, _ = operands(shape=(4, 4, 4, 6))
    f = jax.shard_map(
        lambda *args: normalized(*args, nn.silu),
        mesh=mesh,
        in_specs=(P("a"), P(), P()),
        out_specs=P("a"),
        axis_names=axes,
    )
    assert calls(f, x, scale, bias) == ({WITH_SILU: 1} if is_native else {})
    compare(f, x, scale, bias)


def test_symbolic_sizes_are_left_to_flax(native):
    n, c = jax.export.symbolic_shape("n, 6")
    x = jax.ShapeDtypeStruct((n, 5, c), jnp.float32)
    vector = jax.ShapeDtypeStruct((6,), jnp.float32)
    f = jax.jit(jof.accelerate(lambda *a: normalized(*a, nn.silu)))
    exported = jax.export.export(f)(x, vector, vector)
    assert "jof_group_norm" not in exported.mlir_module()


def test_the_report(measurements):
    x = jax.ShapeDtypeStruct((32, 64, 64, 128), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((128,), jnp.float32)
    f = with_gradients(lambda *a: normalized(*a, nn.silu, groups=32))
    line = normalized.__code__.co_firstlineno + 2
    value, gradient = jof.explain(f, x, vector, vector, x, platform="NVIDIA H200").rows
    assert (value.operation, value.swapped) == ("group norm", True)
    assert (gradient.operation, gradient.swapped) == ("group norm gradient", True)
    assert (value.dtype, value.shapes) == ("bfloat16", (x.shape,) * 2)
    assert value.line.endswith(f"test_norms.py:{line}")
    assert value.native_us is None  # both times are in the row of the gradient
    assert gradient.native_us < gradient.xla_us
    assert (value.bytes, gradient.bytes) == (2 * x.size * 2, 3 * x.size * 2)

    def own(*args):  # not swapped by accelerate
        return rows.group_norm(*args[:1], 32, *args[1:])

    assert jof.explain(own, x, vector, vector, platform="NVIDIA H200").rows == []


def test_small_norms_are_left_to_xla(measurements):
    x = jax.ShapeDtypeStruct((1, 2, 6), jnp.float32)
    vector = jax.ShapeDtypeStruct((6,), jnp.float32)
    (row,) = jof.explain(normalized, x, vector, vector, platform="NVIDIA H200").rows
    assert not row.swapped
    assert "as fast as XLA" in row.reason
