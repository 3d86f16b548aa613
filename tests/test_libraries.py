"""Norms of flax and optax's cross entropy inside `accelerate`: native, the same values, or left."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")  # of the extra "bench"
optax = pytest.importorskip("optax")
from flax import nnx  # noqa: E402

import jax_oneflow_ops as jof  # noqa: E402
from jax_oneflow_ops import _libraries  # noqa: E402
from tests.test_lowering import native_backend, targets  # noqa: E402

pytestmark = native_backend
SHAPE = (4, 6, 24)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(_libraries, "LEAST_BYTES", 0)


def x_of(dtype, shape=SHAPE, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(1, 3, shape), dtype)


def of_linen(module, x, **kwargs):
    params = module.init(jax.random.key(0), x)
    leaves, tree = jax.tree.flatten(params)
    moved = [leaf + x_of(leaf.dtype, leaf.shape, seed=1) / 8 for leaf in leaves]
    params = jax.tree.unflatten(tree, moved)
    return lambda x, *p: module.apply(p[0] if p else params, x, **kwargs), params


def of_nnx(make, x):
    graph, state = nnx.split(make(x.shape[-1], rngs=nnx.Rngs(0)))
    return lambda x, *s: nnx.merge(graph, s[0] if s else state)(x), state


def with_gradients(f):
    """Values and gradients with respect to the input and the parameters."""

    def run(x, params):
        def loss(x, params):
            return jnp.sum(jnp.sin(f(x, params).astype(jnp.float32)))

        return f(x, params), jax.grad(loss, argnums=(0, 1))(x, params)

    return run


NORMS = {
    "linen LayerNorm": lambda x: of_linen(nn.LayerNorm(dtype=x.dtype), x),
    "linen LayerNorm without bias": lambda x: of_linen(
        nn.LayerNorm(use_bias=False, epsilon=1e-3, dtype=x.dtype), x
    ),
    "linen RMSNorm": lambda x: of_linen(nn.RMSNorm(dtype=x.dtype), x),
    "nnx LayerNorm": lambda x: of_nnx(
        lambda n, rngs: nnx.LayerNorm(n, dtype=x.dtype, rngs=rngs), x
    ),
    "nnx RMSNorm": lambda x: of_nnx(lambda n, rngs: nnx.RMSNorm(n, dtype=x.dtype, rngs=rngs), x),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_run_native_with_their_gradients(name, dtype):
    x = x_of(dtype)
    f, params = NORMS[name](x)
    run = with_gradients(f)
    compiled = jax.jit(jof.accelerate(run)).lower(x, params).compile()
    assert sorted(set(targets(compiled.as_text()))) == ["jof_norm", "jof_norm_vjp"]
    expected = jax.jit(run)(x.astype(jnp.float32), params)
    bound = 2**-18 if dtype == "float32" else 2**-6
    for found, exact in zip(*map(jax.tree.leaves, (compiled(x, params), expected)), strict=True):
        assert found.dtype == (x.dtype if found.shape == SHAPE else jnp.float32)
        found, exact = (np.asarray(y, np.float64) for y in (found, exact))
        assert np.linalg.norm(found - exact) <= bound * np.linalg.norm(exact), name


def test_outside_and_where_it_is_switched_off_norms_are_flax_own():
    x = x_of("float32")
    f, _ = NORMS["linen LayerNorm"](x)

    def off(x):
        with jof.accelerate(False):
            return f(x)

    for function in (f, jof.accelerate(off)):
        assert not targets(jax.jit(function).lower(x).compile().as_text())
    assert targets(jax.jit(jof.accelerate(f)).lower(x).compile().as_text())


MASK = np.arange(SHAPE[-1]) % 3 > 0
LEFT = {
    "a mask": lambda x: of_linen(nn.LayerNorm(), x, mask=MASK),
    "another axis": lambda x: of_linen(nn.LayerNorm(reduction_axes=1, feature_axes=1), x),
    "two axes": lambda x: of_linen(nn.LayerNorm(reduction_axes=(1, 2)), x),
    "another dtype": lambda x: of_linen(nn.LayerNorm(dtype=jnp.bfloat16), x),
    "16-bit reductions": lambda x: of_linen(nn.LayerNorm(force_float32_reductions=False), x),
    "groups": lambda x: of_linen(nn.GroupNorm(4), x),
    "a batch": lambda x: (
        lambda x: nn.BatchNorm(use_running_average=False).init_with_output(jax.random.key(0), x)[0],
        None,
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_other_norms_are_left(what):
    x = x_of("float32")
    f, _ = LEFT[what](x)
    compiled = jax.jit(jof.accelerate(f)).lower(x).compile()
    assert not targets(compiled.as_text())
    np.testing.assert_allclose(compiled(x), jax.jit(f)(x), rtol=1e-6, atol=1e-6)


def test_small_arrays_are_left(monkeypatch):
    monkeypatch.undo()
    x = x_of("float32")
    f, _ = NORMS["linen LayerNorm"](x)
    assert not targets(jax.jit(jof.accelerate(f)).lower(x).compile().as_text())


def test_cross_entropy_of_16_bit_logits():
    logits, labels = x_of("bfloat16", (12, 50)), jnp.arange(12)

    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    compiled = jax.jit(jof.accelerate(jax.value_and_grad(loss))).lower(logits).compile()
    assert sorted(targets(compiled.as_text())) == ["jof_cross_entropy", "jof_cross_entropy_vjp"]
    wide = jax.value_and_grad(loss)(logits.astype(jnp.float32))
    for found, exact in zip(compiled(logits), wide, strict=True):
        np.testing.assert_allclose(found.astype(np.float32), exact, rtol=2**-7, atol=2**-12)
    # XLA fuses the conversion of others into its passes.
    wide = jax.jit(jof.accelerate(lambda x: loss(x.astype(jnp.float32))))
    assert not targets(wide.lower(logits).compile().as_text())


def test_explain_names_them_at_the_users_line():
    x = x_of("float32")
    f, _ = NORMS["linen LayerNorm"](x)
    [row] = jof.explain(lambda x: f(f(x)), x).rows
    assert (row.operation, row.swapped, row.shapes, row.count) == ("layer_norm", True, (SHAPE,), 2)
    assert "test_libraries.py" in row.line


def test_a_function_with_other_parameters_is_left(monkeypatch):
    def normalize(x, statistics):
        return x

    module = types.SimpleNamespace(_normalize=normalize, _compute_stats=normalize)
    monkeypatch.setitem(sys.modules, "flax.linen.normalization", module)
    _libraries.install()
    assert module._normalize is module._compute_stats is normalize
