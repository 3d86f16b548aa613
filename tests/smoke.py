"""The test that `make wheels` runs on an installed wheel, without a compiler.

``python -m tests.smoke`` checks that every function's kernel and its gradients in one program match
JAX; that `accelerate` replaces operations; and that `fuse` and `ElementwiseKernel` warn of the
missing compiler and run without it. It needs only jax.
"""

import collections
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import catalogue

GRADIENT_RTOL = 1e-5  # for float32 cases, whose inputs are integers
COMPILED = ("message_max", "attention_sum")  # their kernels are compiled when they are called


def check_case(case):
    """Checks that the kernel's values and gradients match JAX's; returns the targets called."""

    def both(f, *operands):
        def total(wrt):
            filled = list(operands)
            for position, x in zip(case.wrt, wrt, strict=True):
                filled[position] = x
            value = f(*filled)
            return (value * value).sum(), value

        wrt = [operands[i] for i in case.wrt]
        (_, value), gradients = jax.value_and_grad(total, has_aux=True)(wrt)
        return [value, *gradients]

    with case.precision():
        operands = case.inputs()
        program = jax.jit(lambda *xs: both(native(case), *xs)).lower(*operands).compile()
        targets = set(re.findall(r'custom_call_target="(jof_\w+)"', program.as_text()))
        assert targets or case.function in COMPILED, f"{case}: no kernel"
        for got, wanted in zip(program(*operands), both(case.ref, *operands), strict=True):
            scale = float(np.max(np.abs(wanted), initial=0)) or 1
            rtol = max(case.rtol, 1e-12 if case.dtype == "float64" else GRADIENT_RTOL)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * scale, err_msg=str(case))
    return targets


def native(case):
    return lambda *operands: case.f(*operands, implementation="native")


def check_accelerate():
    def step(table, words):
        return jax.grad(lambda t: jnp.tanh(t[words]).sum())(table) + jnp.bincount(words, length=3)

    operands = jnp.ones(3), jnp.array([0, 2, 2])
    report = jof.explain(step, *operands)
    assert [row.operation for row in report.rows] == ["scatter-add"] * 2, report
    np.testing.assert_allclose(jax.jit(jof.accelerate(step))(*operands), step(*operands), 1e-6)


def check_kernels():
    """Checks that kernels warn of the missing compiler, with a remedy, and compute right values."""
    cube = jof.ElementwiseKernel("T x", "T y", "y = x * x * x", "cube", reference=lambda x: x**3)
    x = jnp.arange(4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_allclose(jof.fuse(lambda x: x * jnp.exp(-x))(x), x * jnp.exp(-x), 1e-6)
        np.testing.assert_allclose(cube(x), x**3, 1e-6)
    said = {str(warning.message) for warning in caught}
    assert any("no C++ compiler on PATH: install g++" in message for message in said), said
    return said


def main():
    print(f"jax_oneflow_ops {jof.__version__}, jax {jax.__version__}: {jof.implementations()}")
    cases = [case for case in catalogue.FUNCTIONS if not case.variant]
    targets = set().union(*map(check_case, cases))
    check_accelerate()
    for message in check_kernels():
        print(f"without a compiler: {message}")
    functions = collections.Counter(case.function for case in cases)
    print(f"{len(functions)} functions, {len(cases)} cases, {len(targets)} kernels: all right")


if __name__ == "__main__":
    main()
