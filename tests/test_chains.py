"""`accelerate(fuse=True)`: which chains of a program become kernels, and that results agree."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_oneflow_ops as jof
from jax_oneflow_ops import _policy
from jax_oneflow_ops._accelerate import tune
from jax_oneflow_ops._codegen import primitive
from tests.test_lowering import lowered_targets, native_backend

pytestmark = [native_backend, pytest.mark.usefixtures("kernels_of_gpus")]
BF16 = jnp.bfloat16


@pytest.fixture
def of_any_size(monkeypatch):
    """Makes chains of small arrays count as worthwhile."""
    chains = tuple(dataclasses.replace(one, least_bytes=0) for one in _policy.CHAINS)
    monkeypatch.setattr(_policy, "CHAINS", chains)


@pytest.fixture
def uncompiled(monkeypatch):
    """Lowers programs without compiling kernels: there is no GPU compiler here."""
    monkeypatch.setattr(primitive, "compiled", lambda *args: b"code")


def kernels(f, *args, platform=None) -> int:
    """The number of chain kernels in a program."""
    platforms = None if platform is None else (platform,)
    text = jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()
    return lowered_targets(text)["jof_compiled"]


def normals(*shape, key=0, dtype=BF16):
    return jax.device_put(np.random.default_rng(key).standard_normal(shape).astype(dtype))


X, Y, W = normals(16, 32), normals(16, 32, key=1), normals(32, 32, key=2)
BIAS = normals(32, key=3)


def gelu(x, bias):
    return jax.nn.gelu(x * 0.5 + bias)


# --- a program ------------------------------------------------------------------------------------


def widened(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def block(x, weights):
    up, bias, down = weights
    h = widened(x)
    h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(h.astype(x.dtype) @ up + bias) @ down


def loss(weights, x):
    """The loss of scanned layers that are recomputed for the gradient."""
    step = jax.checkpoint(lambda x, w: (block(x, w), None))
    y = lax.scan(step, x, weights)[0]
    return (widened(jnp.tanh(y)) ** 2).mean()


WEIGHTS = (normals(3, 32, 64, key=4) / 8, normals(3, 64, key=5), normals(3, 64, 32, key=6) / 8)


def test_a_program_of_scanned_layers(of_any_size):
    """Errors against float64 are as without kernels, for gradients inside and outside."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), (WEIGHTS, X))
        exact = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(*wide))
    plain = jax.jit(jax.value_and_grad(loss))(WEIGHTS, X)
    inside = jax.jit(jof.accelerate(jax.value_and_grad(loss), fuse=True))
    outside = jax.jit(jax.value_and_grad(jof.accelerate(loss, fuse=True)))
    for f in (inside, outside):
        found = "jof_compiled" in f.lower(WEIGHTS, X).as_text()
        assert found == (jax.default_backend() == "cpu")
        for ours, theirs, right in zip(
            *map(jax.tree.leaves, (f(WEIGHTS, X), plain, exact)), strict=True
        ):
            assert ours.dtype == theirs.dtype
            off, allowed = (np.abs(np.float64(y) - right).max() for y in (ours, theirs))
            assert off <= 1.5 * allowed + 2.0**-9 * np.abs(right).max()


def test_kernels_of_a_program(of_any_size, uncompiled):
    """Kernels in scan bodies and in recomputed layers; XLA fuses activations into products."""
    step = jof.accelerate(jax.value_and_grad(loss), fuse=True)
    assert kernels(jof.accelerate(printed, fuse=True), X, BIAS) == 0
    found = {p: kernels(step, WEIGHTS, X, platform=p) for p in ("cpu", "cuda")}
    assert found == {"cpu": 3, "cuda": 0}
    assert "optimization_barrier" in jax.jit(step).lower(WEIGHTS, X).as_text()  # the checkpoint's


# --- which chains are worthwhile ------------------------------------------------------------------


def switched_off(x, bias):
    with jof.accelerate(False):
        return gelu(x, bias)


def printed(x, bias):
    jax.debug.print("{}", x[0, 0])  # programs with effects are left unchanged
    return gelu(x, bias)


def dropout(x, key):
    return jnp.where(jax.random.bits(key, x.shape, jnp.uint16) > 9, jnp.tanh(x) * 2, 0)


def gradient_with_bias(x, bias, ct):
    return jax.vjp(gelu, x, bias)[1](ct)


def looped(x, bias):
    x = lax.fori_loop(0, 3, lambda _, x: gelu(x, bias), x)
    return lax.cond(bias[0] > 0, lambda x: gelu(x, bias), lambda x: x, x)


CASES = {
    "chain": (gelu, (X, BIAS), 1, 1),
    "float16": (gelu, (X.astype(jnp.float16), BIAS.astype(jnp.float16)), 1, 1),
    "float32": (gelu, (X.astype(jnp.float32), BIAS.astype(jnp.float32)), 0, 0),
    "in float32 inside": (lambda x: jnp.tanh(x.astype(jnp.float32)).astype(BF16), (X,), 1, 1),
    "wide operand": (lambda x, y: jnp.tanh(x + y).astype(BF16), (X, Y.astype(jnp.float32)), 0, 0),
    "two results": (lambda x: (gelu(x, 1), jnp.exp(x) * 2), (X,), 0, 1),
    "masked": (lambda x, m: jnp.where(m, jnp.tanh(x) * 2, x), (X, X > 0), 1, 1),
    "one operation": (jnp.tanh, (X,), 0, 0),
    "arithmetic": (lambda x, y: (x - y) * (x - y), (X, Y), 0, 1),
    "odd": (lambda x, y: (x - y) * (x - y), (X[:15, :31], Y[:15, :31]), 1, 1),
    "gated": (lambda x, y: jax.nn.silu(x) * y, (X, Y), 1, 1),
    "two chains": (lambda x, y: (gelu(x, 1), gelu(y, 2)), (X, Y), 2, 2),
    "after a product": (lambda x, w: gelu(x @ w, 1), (X, W), 0, 1),
    "after a product, reshaped": (lambda x, w: gelu((x @ w).reshape(-1), 1), (X, W), 0, 1),
    "between": (lambda x, w: gelu(lax.sort(x), 1) @ w, (X, W), 1, 1),
    "in a function": (lambda x, b: jax.jit(gelu)(x, b), (X, BIAS), 1, 1),
    "in loops": (looped, (X, BIAS), 2, 2),
    "also reduced": (lambda x, b: (y := gelu(x, b), y.sum(0)), (X, BIAS), 0, 1),
    "gradient with a bias": (gradient_with_bias, (X, BIAS, Y), 0, 1),
    "of a slice": (lambda x: gelu(x[:, ::2], 1), (X,), 0, 0),
    "of a reshaped slice": (lambda x: gelu(x[:, ::2].reshape(-1), 1), (X,), 0, 0),
    "of random bits": (dropout, (X, jax.random.key(0)), 0, 0),
    "norm": (lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1), (X,), 0, 0),
    "barrier": (lambda x: lax.optimization_barrier(x * 2) + 1, (X,), 0, 0),
    "switched off": (switched_off, (X, BIAS), 0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_chains_are_kernels(name, of_any_size, uncompiled):
    f, args, cuda, cpu = CASES[name]
    fused = jof.accelerate(f, fuse=True)
    assert kernels(fused, *args, platform="cuda") == cuda
    assert kernels(fused, *args, platform="cpu") == cpu


def test_what_is_not_worthwhile_is_lowered_as_it_was():
    x = jax.ShapeDtypeStruct((500, 500), BF16)  # moves nearly 1 MiB

    def text(f) -> str:
        lowered = jax.jit(f).lower(x, BF16(1)).as_text()
        return re.sub(r"\+fused?", "", re.sub(r"@\w+", "@f", lowered))

    def called(x, bias):
        return jax.jit(gelu)(x, bias)

    assert text(jof.accelerate(gelu, fuse=True)) == text(jof.accelerate(called))
    assert "jof_accelerate" not in text(called)  # without accelerate nothing changes


# --- how it is called -----------------------------------------------------------------------------


def test_ways_to_call_it(of_any_size):
    """With and without jit, under vmap, with non-array arguments and donated arguments."""
    calls = []

    def f(x, bias, *, rate, kind):
        calls.append((jax.typeof(rate).dtype, kind))
        assert isinstance(kind, str)
        return {"y": gelu(x, bias) * rate}

    fused = jof.accelerate(f, fuse=True)
    expected = np.float32(jax.jit(gelu)(X, BIAS)) * 2
    near = {"rtol": 2.0**-6, "atol": 2.0**-6}
    for _ in range(2):
        np.testing.assert_allclose(fused(X, BIAS, rate=2, kind="a")["y"], expected, **near)
    fused(X, BIAS, rate=2.0, kind="a")
    assert calls == [("int32", "a"), ("float32", "a")]  # traced once for each type of rate
    mapped = jax.vmap(lambda x: fused(x, BIAS, rate=2, kind="a")["y"])
    np.testing.assert_allclose(mapped(X[:, None])[:, 0], expected, **near)

    jitted = jax.jit(f, donate_argnums=0, static_argnames="kind")
    fused = jof.accelerate(jitted, fuse=True)
    x = jnp.array(X)
    compiled = fused.lower(x, BIAS, rate=2, kind="a").compile()
    assert "jof_compiled" in compiled.as_text()
    np.testing.assert_allclose(fused(x, BIAS, rate=2, kind="a")["y"], expected, **near)
    assert x.is_deleted()
    with pytest.raises(TypeError, match="must be hashable, got slice_like; capture"):
        jof.accelerate(lambda x, y: x, fuse=True)(X, type("slice_like", (), {"__hash__": None})())


def test_a_with_statement_has_no_function():
    with pytest.raises(TypeError, match=r"accelerate\(step, fuse=True\)"):
        jof.accelerate(fuse=True)


def test_export_and_another_thread(of_any_size, uncompiled):
    fused = jax.jit(jof.accelerate(gelu, fuse=True))
    exported = jax.export.export(fused, disabled_checks=jof.export_checks())(X, BIAS)
    assert lowered_targets(exported.mlir_module())["jof_compiled"] == 1
    both = jax.export.export(fused, platforms=["cpu", "cuda"])(X, BIAS)
    assert "jof_compiled" not in both.mlir_module()
    (n,) = jax.export.symbolic_shape("n")
    sizes = jax.ShapeDtypeStruct((n, 32), BF16)
    assert "jof_compiled" not in jax.export.export(fused)(sizes, BIAS).mlir_module()
    found = []

    def inside(x, bias):
        thread = threading.Thread(target=lambda: found.append(kernels(gelu, X, BIAS)))
        thread.start()
        thread.join()
        return gelu(x, bias)

    assert kernels(jof.accelerate(inside, fuse=True), X, BIAS) == 1
    assert found == [0]


def test_the_environment_variable_switches_it_off(of_any_size, monkeypatch):
    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    text = jax.jit(jof.accelerate(gelu, fuse=True)).lower(X, BIAS).as_text()
    assert "f32" not in text  # XLA's fallback for a kernel would contain it


def test_mutable_arrays_are_arguments_as_for_jit():
    traced = []

    def add(x, by):
        traced.append(by)
        x[...] += by
        return x[...]

    fused = jof.accelerate(add, fuse=True)
    for _ in range(3):
        x = jax.new_ref(jnp.ones(3))
        np.testing.assert_array_equal(fused(x, jnp.ones(3)), [2, 2, 2])
        np.testing.assert_array_equal(x[...], [2, 2, 2])
    assert len(traced) == 1


def test_numbers_are_arguments_as_for_jit():
    traced = []

    def divide(x, by):
        traced.append(by)
        return x / by

    fused = jof.accelerate(divide, fuse=True)
    ones = np.ones(3, np.float32)
    np.testing.assert_array_equal(fused(ones, 0.0), np.full(3, np.inf))
    np.testing.assert_array_equal(fused(ones, -0.0), np.full(3, -np.inf))
    for by in range(1, 9):
        np.testing.assert_array_equal(fused(ones, 1.0 * by), np.float32(1 / by) * ones)
    assert len(traced) == 1
    traced.clear()
    chosen = jax.jit(lambda x, by, *, mode: divide(x, by), static_argnames="mode")
    fused = jof.accelerate(chosen, fuse=True)
    for by, expected in ((0.0, np.inf), (-0.0, -np.inf), (2.0, 0.5), (4.0, 0.25)):
        np.testing.assert_array_equal(fused(ones, by=by, mode="a"), np.full(3, expected))
    assert len(traced) == 1


def test_formats_without_a_dtype_are_no_part_of_a_chain(of_any_size):
    def f(x, bias):
        return gelu(x, bias), jax.lax.reduce_precision(x * 2, 8, 4)

    assert kernels(jof.accelerate(f, fuse=True), X, BIAS) == 1
    ours, theirs = (jax.jit(g)(X, BIAS) for g in (jof.accelerate(f, fuse=True), f))
    np.testing.assert_allclose(np.float32(ours[0]), np.float32(theirs[0]), 2.0**-6, 2.0**-6)
    np.testing.assert_array_equal(np.float32(ours[1]), np.float32(theirs[1]))


def test_numbers_are_static_inside_of_jit():
    def f(p, x, n, shape, train=False):
        y = x[:n].reshape(shape) * p
        return jnp.tanh(y) if train else y

    x, p = jnp.arange(8.0), jnp.float32(2)
    fused = jof.accelerate(f, fuse=True)
    options = {"static_argnums": (2, 3), "static_argnames": "train"}
    for train in (True, False):
        expected = f(p, x, 6, (2, 3), train=train)
        jitted = jax.jit(fused, **options)(p, x, 6, (2, 3), train=train)
        np.testing.assert_allclose(jitted, expected, 1e-6)
        inside = jax.jit(lambda p, x, t=train: fused(p, x, 6, (2, 3), train=t))(p, x)
        np.testing.assert_allclose(inside, expected, 1e-6)


def test_tuned(of_any_size, uncompiled, monkeypatch, tmp_path):
    """Times a program with kernels, under another cache key than without fuse=True."""
    monkeypatch.setenv("JAX_ONEFLOW_OPS_CACHE_DIR", str(tmp_path))
    found = []

    def times(functions, args, kwargs):
        found.append([kernels(f, *args, **kwargs) for f in functions])
        return [1.0, 1.01]

    monkeypatch.setattr(tune, "_times", times)
    for fuse in (False, True):
        jof.accelerate(jax.jit(gelu), tune=True, fuse=fuse)(X, BIAS)
    assert found == [[0, 0], [0, 1]]


def test_explain_counts_them(of_any_size, uncompiled):
    def layers(x, bias):
        return gelu(lax.sort(gelu(x, bias)), bias)

    for f, swapped in ((layers, False), (jof.accelerate(layers, fuse=True), True)):
        (row,) = jof.explain(f, X, BIAS, platform="cuda").rows
        assert (row.count, row.shapes[0], row.dtype) == (2, X.shape, "bfloat16")
        assert row.operation.startswith("chain of ")
        assert row.line.endswith(f":{gelu.__code__.co_firstlineno + 1}")
        assert row.swapped == swapped
        assert "ran 1.42 to 2.17x as fast" in row.reason
        assert row.reason.startswith("accelerate(fuse=True)") != swapped
