"""The catalogue itself: every op has a row, and the rows' claims are true."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_oneflow_ops as jof
from tests.arrays import DTYPES, rng_for
from tests.catalogue import CASES, CONDITION, FUNCTIONS, INDEX, OPS, Call, Op

NOT_OPS = {
    "ElementwiseKernel",
    "FusionError",
    "GatherWarning",
    "KernelCompileError",
    "SegmentPlan",
    "accelerate",
    "explain",
    "export_checks",
    "fuse",
    "implementations",
    "include_dir",
    "policy",
    "segment_plan",
}
TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>")


@pytest.fixture(scope="module", autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


def test_every_public_op_has_one_row():
    """Every public op has one row besides those of its variants."""
    rows = [op.public_name for op in OPS if not op.variant]
    assert sorted(rows) == sorted({*jof.__all__} - NOT_OPS)
    for name in jof.__all__:
        public = getattr(jof, name)
        chooses = (
            inspect.isfunction(public) and "implementation" in inspect.signature(public).parameters
        )
        assert chooses == (name not in NOT_OPS), name


def test_every_row_goes_through_the_tables():
    assert len({op.name for op in OPS}) == len(OPS)
    assert {case.op.name for case in FUNCTIONS} == {op.name for op in OPS}
    assert all(case in CASES for case in FUNCTIONS)


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_options_are_passed_on(case):
    """Rows pass options on to the public function, and errors name it."""
    with pytest.raises(ValueError, match=f"^{case.function}: implementation"):
        case.f(*case.inputs(), implementation="no such")


def arguments(op: Op, call: Call, dtype) -> tuple[list, list]:
    """Random operands, and the same operands in double precision."""
    xs = op.inputs(rng_for(op.name, dtype), call, dtype)
    return list(map(jax.device_put, xs)), [x if x.dtype.kind in "bi" else np.float64(x) for x in xs]


def gradient(op: Op, call: Call):
    """(cotangent, operands) -> the cotangents of the operands `wrt`, alone."""

    def run(ct, *xs):
        def of_wrt(*operands):
            given = dict(zip(op.wrt, operands, strict=True))
            operands = (given.get(i, x) for i, x in enumerate(xs))
            return op.function(*operands, **call.options)

        return jax.vjp(of_wrt, *(xs[i] for i in op.wrt))[1](ct)

    return run


def assert_close(actual, exact, rtol) -> None:
    """The tolerance is relative to the largest value, because terms may cancel."""
    assert actual.shape == np.shape(exact)
    atol = rtol * np.max(np.abs(exact), initial=0, where=np.isfinite(exact))
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_row_on_a_random_call(op, seed):
    """The public function, JAX's function, the fast forms and the formula agree.

    The gradient agrees with its formula.
    """
    call = op.call(rng_for(op.name, seed), 2000)
    xs, wide = arguments(op, call, "float32")
    exact = op.exact(*wide, **call.options)
    ct = rng_for("ct").standard_normal(exact.shape).astype(op.result(*xs, **call.options).dtype)
    functions = {"function": op.function, "replaces": op.replaces, **op.best}

    @jax.jit
    def run(ct, *xs):
        results = {name: f(*xs, **call.options) for name, f in functions.items()}
        return results, gradient(op, call)(ct, *xs)

    results, cotangents = run(ct, *xs)
    rtol = max(1e-5, 2 * float(jnp.finfo(ct.dtype).eps))
    for y in results.values():
        assert y.dtype == ct.dtype
        assert_close(y, exact, rtol)
    expected = op.pullback(ct.astype(np.float64), *wide, **call.options)
    for dx, wanted in zip(cotangents, expected, strict=True):
        assert_close(dx, wanted, rtol)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_dtypes_are_those_with_native_kernels(op):
    call = op.call(rng_for(op.name), 6)
    native = set()
    for dtype in DTYPES:
        to = "bool" if dtype != "bool" else "int8"  # a cast to the same dtype is dropped
        options = {"dtype": to} if "dtype" in call.options else call.options
        shapes = zip(op.domain, call.shapes, strict=True)
        fixed = {CONDITION: "bool", INDEX: "int32"}
        xs = [jax.ShapeDtypeStruct(shape, fixed.get(d, dtype)) for d, shape in shapes]
        try:
            jaxpr = jax.make_jaxpr(functools.partial(op.function, **options))(*xs)
            if "jof_" in str(jaxpr) and (
                "dtype" in options or op.result(*xs, **options).dtype == dtype
            ):
                native.add(dtype)
        # Such as warnings about casts of complex numbers and about -inf among integers.
        except (TypeError, ValueError, DeprecationWarning, RuntimeWarning):
            continue
    assert native == {*op.dtypes}


def moved_by_custom_calls(f, *xs) -> int:
    """The bytes of all operands and results of custom calls."""
    calls = re.findall(r"custom_call @jof_.* : (\(.*\) -> .*)", jax.jit(f).lower(*xs).as_text())
    tensors = (tensor for call in calls for tensor in TENSOR.findall(call))
    return sum(
        int(np.prod([int(n) for n in dims.split("x")[:-1]])) * max(1, int(bits) // 8)
        for dims, _, bits in tensors
    )


@pytest.mark.parametrize("op", [op for op in OPS if op.family not in ("scatter", "rows")], ids=str)
def test_bytes_are_those_of_the_custom_calls(op):
    """The row's byte counts are those of the custom calls.

    Not tested for two families: rows ops also move statistics, sums also use scratch space and a
    pass over ids, and lookups do not read the whole table.
    """
    call = op.call(rng_for(op.name), 200)
    xs, _ = arguments(op, call, "float32")

    def value(*xs):
        return op.function(*xs, **call.options)

    ct = jnp.ones_like(value(*xs))
    assert op.bytes(*xs, **call.options) == moved_by_custom_calls(value, *xs)
    moved = moved_by_custom_calls(gradient(op, call), ct, *xs)
    assert op.gradient_bytes(*xs, **call.options) == moved
