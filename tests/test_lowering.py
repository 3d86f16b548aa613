"""What the ops lower to: which path ran is read off the compiled program, not believed."""

import os
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from tests.cases import CASES

OPCODE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)
TARGET = re.compile(r'custom_call_target="([^"]+)"')
ENVIRONMENT_VARIABLE = "JAX_ONEFLOW_OPS_IMPLEMENTATION"
# What moves no data: XLA on GPUs wraps the custom call in a command buffer, which it `call`s.
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "call"}

BACKEND = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
native_backend = pytest.mark.skipif(
    not _native.available(BACKEND), reason=f"no native kernels for {BACKEND}"
)


def compiled(f, *args) -> str:
    return jax.jit(f).lower(*args).compile().as_text()


def opcodes(hlo: str) -> Counter:
    counts = Counter(OPCODE.findall(hlo))
    assert counts["parameter"], f"no HLO was recognised in:\n{hlo}"
    return counts


def targets(hlo: str) -> list[str]:
    """The custom-call targets of this package, one for each call."""
    return [target for target in TARGET.findall(hlo) if target.startswith("jof_")]


def squares(f):
    return lambda x: jnp.sum(f(x) ** 2)


def test_backend_is_native():
    """The other tests would all skip if it were not."""
    assert jax.default_backend() not in ("cpu", "gpu") or _native.available(BACKEND)


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_is_one_custom_call(case):
    hlo = compiled(case.f, case.inputs())
    assert targets(hlo) == [case.target]
    assert set(opcodes(hlo)) <= {"custom-call", *FREE}, hlo


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_one_custom_call(case):
    y = jax.eval_shape(case.f, case.inputs())
    hlo = compiled(jax.linear_transpose(case.f, case.inputs()), y)
    assert targets(hlo) == [case.grad_target]
    assert set(opcodes(hlo)) <= {"custom-call", *FREE}, hlo


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_call_each_direction_once(case):
    hlo = compiled(jax.value_and_grad(squares(case.f)), case.inputs())
    assert sorted(targets(hlo)) == sorted([case.target, case.grad_target])


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_calls_the_op_for_value_and_tangent(case):
    x = case.inputs()
    hlo = compiled(lambda x, v: jax.jvp(case.f, (x,), (v,)), x, x)
    assert targets(hlo) == [case.target] * 2


def between_height_and_width(case) -> int:
    """Where a batch axis stands between H and W, once it is there."""
    return len(case.shape) - (2 if "NHWC" in case.name else 1)


def batch_axes():
    for case in CASES:
        for axis in range(len(case.shape) + 1):
            if axis != between_height_and_width(case):
                yield pytest.param(case, axis, id=f"{case}-{axis}")


@native_backend
@pytest.mark.parametrize(("case", "axis"), [*batch_axes()])
def test_vmap_is_one_custom_call_and_moves_nothing_else(case, axis):
    x = jax.ShapeDtypeStruct(np.moveaxis(case.inputs(3), 0, axis).shape, jnp.float32)
    f = jax.vmap(case.f, in_axes=axis, out_axes=axis)
    y = jax.eval_shape(f, x)
    for function, operand, target in (
        (f, x, case.target),
        (jax.linear_transpose(f, x), y, case.grad_target),
    ):
        hlo = compiled(function, operand)
        assert targets(hlo) == [target]
        assert set(opcodes(hlo)) <= {"custom-call", *FREE}, hlo


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap_between_height_and_width_is_one_custom_call(case):
    axis = between_height_and_width(case)
    f = jax.vmap(case.f, in_axes=axis, out_axes=axis)
    hlo = compiled(f, np.moveaxis(case.inputs(3), 0, axis))
    assert targets(hlo) == [case.target]
    assert not {"while", "gather", "dynamic-slice"} & set(opcodes(hlo)), hlo


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap_of_grad_calls_each_direction_once(case):
    hlo = compiled(jax.vmap(jax.vmap(jax.grad(squares(case.f)))), case.inputs(2, 3))
    assert sorted(targets(hlo)) == sorted([case.target, case.grad_target])
    assert "while" not in opcodes(hlo)


@native_backend
def test_native_can_be_asked_for():
    hlo = compiled(
        lambda x: jof.upsample_nearest2d(x, 2, implementation="native"), jnp.ones((1, 2, 3))
    )
    assert targets(hlo) == ["jof_upsample_nearest2d"]


def test_xla_has_no_custom_call():
    def f(x):
        return jof.upsample_nearest2d(x, 2, implementation="xla")

    x = jnp.ones((1, 2, 3))
    assert targets(compiled(f, x)) == []
    assert targets(compiled(jax.grad(squares(f)), x)) == []
    assert targets(compiled(jax.vmap(jax.vmap(f)), jnp.ones((2, 2, 1, 2, 3)))) == []


@native_backend
def test_environment_variable_switches(monkeypatch):
    x = jnp.ones((1, 2, 3))

    def fresh(**kwargs):
        return lambda x: jof.upsample_nearest2d(x, 2, **kwargs)

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "xla")
    assert targets(compiled(fresh(), x)) == []
    assert targets(compiled(jax.grad(squares(fresh())), x)) == []
    np.testing.assert_array_equal(fresh()(x), np.ones((1, 4, 6)))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "native")
    assert targets(compiled(fresh(), x)) == ["jof_upsample_nearest2d"]
    assert targets(compiled(fresh(implementation="xla"), x)) == []
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv(ENVIRONMENT_VARIABLE)
        else:
            monkeypatch.setenv(ENVIRONMENT_VARIABLE, unset)
        assert targets(compiled(fresh(), x)) == ["jof_upsample_nearest2d"]


def test_unknown_value_of_the_environment_variable(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=ENVIRONMENT_VARIABLE) as caught:
        jof.upsample_nearest2d(jnp.ones((1, 2, 3)), 2)
    for part in ("cudnn", "native", "xla"):
        assert part in str(caught.value)


# --- platforms that this machine need not have ----------------------------------------------------


def exported(f, case, platforms):
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (case.target, case.grad_target)
    ]
    x = jax.ShapeDtypeStruct(case.shape, jnp.float32)
    return jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=checks)(x)


def exported_targets(f, case, platforms) -> Counter:
    module = exported(f, case, platforms).mlir_module()
    return Counter(re.findall(r"custom_call @(jof_\w+)", module))


@pytest.fixture
def cuda_module():
    if not _native.available("cuda"):
        assert os.environ.get("JOF_REQUIRE_CUDA_MODULE") != "1", "the _cuda module was not built"
        pytest.skip("the _cuda module was not built (set JOF_CUDA=ON to build it)")


@pytest.mark.usefixtures("cuda_module")
@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids="+".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_lowering_names_the_target(case, platforms):
    """On a machine with or without a GPU."""
    count = len(platforms)
    assert exported_targets(case.f, case, platforms) == {case.target: count}
    grad = jax.grad(squares(case.f))
    assert exported_targets(grad, case, platforms) == {
        case.target: count,
        case.grad_target: count,
    }


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_platforms_get_the_reference(case, platform):
    assert exported_targets(jax.grad(squares(case.f)), case, [platform]) == {}


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_native_where_there_is_none_says_what_is_missing(platform):
    case = CASES[0]

    def f(x):
        return jof.upsample_nearest2d(x, 2, implementation="native")

    with pytest.raises(NotImplementedError, match="upsample_nearest2d") as caught:
        exported(f, case, [platform])
    for part in ("native", platform, 'implementation="xla"'):
        assert part in str(caught.value)


def test_native_without_the_cuda_module_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(_native, "available", lambda platform: platform != "cuda")
    case = CASES[0]

    def f(x):
        return jof.upsample_nearest2d(x, 2, implementation="native")

    with pytest.raises(NotImplementedError, match="upsample_nearest2d") as caught:
        exported(f, case, ["cuda"])
    for part in ("native", "cuda", "JOF_CUDA=ON"):
        assert part in str(caught.value)


@native_backend
def test_implementations_describes_what_is_loaded():
    described = jof.implementations()
    assert {platform for platform in ("cpu", "cuda") if _native.available(platform)} == set(
        described
    )
    assert all(text.startswith("native") for text in described.values())
