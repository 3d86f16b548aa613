"""Unchanged programs under accelerate: the same losses and gradients, and what was swapped."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")  # of the extra "bench"
pytest.importorskip("optax")

import jax_oneflow_ops as jof
from tests.programs import museum
from tests.test_lowering import native_backend, targets

pytestmark = native_backend

# A program, the library that it needs, and the sums that its step has.
PROGRAMS = {
    "graphs.attention": ("flax", 6),
    "graphs.mesh_graph_net": ("flax", 3),
    "language.gpt": ("flax", 3),
    "vision.unet": ("flax", 2),
    "vision.vit": ("optax", 1),
    "physics.particles": ("jax", 4),
    "libraries.graph_network": ("jraph", 4),
    "libraries.graph_convolution": ("jraph", 4),
    "libraries.graph_attention": ("jraph", 7),
    "libraries.words": ("equinox", 1),
}


def summing_calls(hlo: str) -> int:
    return sum("scatter_add" in target for target in targets(hlo))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_the_same_by_kernels(name):
    """In float64, in which whatever is not the same sum of the same numbers shows."""
    library, count = PROGRAMS[name]
    pytest.importorskip(library)
    file, function = name.split(".")
    program = getattr(importlib.import_module(f"tests.programs.{file}"), function)
    with jax.enable_x64(True):
        options = {} if name == "physics.particles" else {"dtype": jnp.float64}
        step, args = program(**options)
        args = jax.tree.map(widened, args)
        report = jof.explain(step, *args)
        compiled = jax.jit(jof.accelerate(step)).lower(*args).compile()
        ours, xla = compiled(*args), jax.jit(step)(*args)
    assert sum(row.count for row in report.rows if row.swapped) == count
    assert summing_calls(compiled.as_text()) == count
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        assert a.dtype == b.dtype
        size = np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= 2**-40 * size


def widened(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_the_museum():
    """Integers are the same bits, floats as near to float64 as XLA's."""
    pieces = {f.__name__: (f, museum.arguments(f.__name__)) for f in museum.PIECES}

    def visit(arguments):
        return {name: f(*arguments[name]) for name, (f, _) in pieces.items()}

    arguments = {name: args for name, (_, args) in pieces.items()}
    step = jax.jit(jof.accelerate(visit)).lower(arguments).compile()
    assert summing_calls(step.as_text()) == len(pieces) + 1  # pictures have two sums
    ours, xla = step(arguments), jax.jit(visit)(arguments)
    with jax.enable_x64(True):
        exact = jax.jit(visit)(jax.tree.map(widened, arguments))
    for name, y in ours.items():
        if jnp.issubdtype(y.dtype, jnp.integer):
            np.testing.assert_array_equal(y, xla[name], name)
        else:
            of_xla, of_exact = np.asarray(xla[name]), np.asarray(exact[name])
            error, limit = (np.linalg.norm(z - of_exact) for z in (np.asarray(y), of_xla))
            assert error <= 2 * limit + 2**-22 * np.linalg.norm(of_exact), name
