"""What the ops lower to; the tests read it from the compiled or lowered program."""

import functools
import os
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from tests import catalogue
from tests.catalogue import REPRESENTATIVE, UPSAMPLE_CASES, without_way

CASES, FUNCTIONS, EACH_KIND = (
    [case for case in cases if not case.composed]
    for cases in (catalogue.CASES, catalogue.FUNCTIONS, catalogue.EACH_KIND)
)
STABLE_OPCODE = re.compile(r"stablehlo\.(\w+)")
LOOPS = {"while", "gather", "dynamic_gather", "dynamic_slice", "case", "if"}
OPCODE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)
TARGET = re.compile(r'custom_call_target="([^"]+)"')
ENVIRONMENT_VARIABLE = "JAX_ONEFLOW_OPS_IMPLEMENTATION"
# Opcodes that move no data. On GPUs XLA wraps the custom call in a command buffer that it `call`s.
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
    """The package's custom-call targets, once per call."""
    return [without_way(target) for target in TARGET.findall(hlo) if target.startswith("jof_")]


def accelerated(f, *args, platform=None) -> str:
    """The lowered program of f inside `accelerate`, for a platform or for that of the device."""
    platforms = None if platform is None else (platform,)
    traced = jax.jit(jof.accelerate(lambda *args: f(*args))).trace(*args)
    return traced.lower(lowering_platforms=platforms).as_text()


def lowered_targets(module: str) -> Counter:
    """The package's custom-call targets in an uncompiled program.

    Targets in a function count once per call of the function.
    """
    bodies = {
        re.match(r'"?([^"(]+)', text)[1]: text
        for text in re.split(r"func\.func (?:public|private) @", module)[1:]
    }

    def count(function) -> Counter:
        total = Counter()
        for custom, called in re.findall(r'\b(custom_)?call @"?([^"(]+)', bodies[function]):
            if not custom:
                total += count(called)
            elif called.startswith("jof_"):
                total[without_way(called.split()[0])] += 1
        return total

    return count("main")


def lowered(f, case, *args) -> str:
    """The program as lowered, before XLA compiles it."""
    with case.precision():
        return jax.jit(f).lower(*args).as_text()


def calls_of(f, case, *args) -> Counter:
    return lowered_targets(lowered(f, case, *args))


def squares(f):
    return lambda *xs: jnp.sum(f(*xs) ** 2)


def pullback(f, case, wrt):
    """The gradient alone; f's result is unused."""

    def pull(dy, *xs):
        def of_wrt(*operands):
            given = dict(zip(wrt, operands, strict=True))
            return f(*(given.get(i, x) for i, x in enumerate(xs)))

        return jax.vjp(of_wrt, *(xs[i] for i in wrt))[1](dy)

    return pull


def result_like(f, *xs) -> np.ndarray:
    y = jax.eval_shape(f, *xs)
    return np.ones(y.shape, y.dtype)


def test_backend_is_native():
    """Without native kernels, the other tests would be skipped."""
    assert jax.default_backend() not in ("cpu", "gpu") or _native.available(BACKEND)


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_is_one_custom_call(case):
    with case.precision():
        hlo = compiled(case.f, *case.inputs())
    assert targets(hlo) == [case.target]
    assert set(opcodes(hlo)) <= {"custom-call", *FREE, *case.besides}, hlo


def gradients():
    for case in CASES:
        for wrt in case.grad_targets:
            yield pytest.param(case, wrt, id=f"{case}-{''.join(map(str, wrt))}")


@native_backend
@pytest.mark.parametrize(("case", "wrt"), [*gradients()])
def test_gradient_is_the_expected_custom_calls(case, wrt):
    """One call for all operands together, and none if the gradient is the cotangent."""
    with case.precision():
        xs = case.inputs()
        hlo = compiled(pullback(case.f, case, wrt), result_like(case.f, *xs), *xs)
    assert targets(hlo) == [*case.grad_targets[wrt]]
    besides = case.besides | case.grad_besides
    assert set(opcodes(hlo)) <= {"custom-call", *FREE, *besides}, hlo


@native_backend
@pytest.mark.parametrize("case", [case for case in CASES if case.linear], ids=str)
def test_transpose_is_the_gradient(case):
    with case.precision():
        xs = case.inputs()
        for wrt in case.linear:
            others = [i for i in case.every_operand if i not in wrt]

            def of_wrt(*operands, wrt=wrt, others=others):
                given = dict(zip((*wrt, *others), operands, strict=True))
                return case.f(*(given[i] for i in case.every_operand))

            def transposed(dy, *fixed, wrt=wrt, of_wrt=of_wrt):
                linear = jax.linear_transpose(
                    lambda *operands: of_wrt(*operands, *fixed), *(xs[i] for i in wrt)
                )
                return linear(dy)

            hlo = compiled(transposed, result_like(case.f, *xs), *(xs[i] for i in others))
            assert targets(hlo) == [*case.grad_targets[wrt]]
            besides = case.besides | case.grad_besides
            assert set(opcodes(hlo)) <= {"custom-call", *FREE, *besides}, hlo


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_call_each_once(case):
    calls = calls_of(jax.value_and_grad(squares(case.f), argnums=case.wrt), case, *case.inputs())
    assert calls == Counter(case.both_targets())


@native_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_is_one_call_for_the_value_and_those_of_the_tangent(case):
    def jvp(vs, *xs):
        def of_wrt(*operands):
            given = dict(zip(case.wrt, operands, strict=True))
            return case.f(*(given.get(i, x) for i, x in enumerate(xs)))

        return jax.jvp(of_wrt, [xs[i] for i in case.wrt], vs)

    xs = case.inputs()
    assert calls_of(jvp, case, [xs[i] for i in case.wrt], *xs) == Counter(case.jvp_targets)


# --- vmap -----------------------------------------------------------------------------------------


def between_height_and_width(case) -> int | None:
    """The position of a batch axis that is between H and W."""
    if case not in UPSAMPLE_CASES:
        return None
    return len(case.shape) - (2 if "NHWC" in case.name else 1)


def shared_axes(case, axis) -> tuple[int | None, ...]:
    """The same batch axis for all arrays, and None for scalars."""
    return tuple(axis if shape else None for shape in case.shapes)


def batched(case, axes) -> tuple[np.ndarray, ...]:
    """Operands with batch axes at the positions `axes`."""
    return tuple(
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip(case.inputs(3), axes, strict=True)
    )


def batch_axes():
    """(case, axis) for the first, the middle and the last position of a batch axis."""
    for case in EACH_KIND:
        axes = range(len(case.shape) + 1) if case.free_axes is None else sorted(case.free_axes)
        axes = [axis for axis in axes if axis != between_height_and_width(case)]
        for axis in sorted({axes[0], axes[len(axes) // 2], axes[-1]} if axes else ()):
            yield pytest.param(case, axis, id=f"{case}-{axis}")


@native_backend
@pytest.mark.parametrize(("case", "axis"), [*batch_axes()])
def test_vmap_is_the_same_custom_calls_and_moves_nothing_else(case, axis):
    axes = shared_axes(case, axis)
    with case.precision():
        xs = batched(case, axes)
        f = jax.vmap(case.f, in_axes=axes, out_axes=axis)
        value = compiled(f, *xs)
        pull = jax.vmap(pullback(case.f, case, case.wrt), in_axes=(axis, *axes), out_axes=axis)
        gradient = compiled(pull, result_like(f, *xs), *xs)
    for hlo, expected, besides in (
        (value, (case.target,), case.besides),
        (gradient, case.grad_targets[case.wrt], case.besides | case.grad_besides),
    ):
        assert targets(hlo) == [*expected]
        assert set(opcodes(hlo)) <= {"custom-call", *FREE, *besides}, hlo


@native_backend
@pytest.mark.parametrize("case", UPSAMPLE_CASES, ids=str)
def test_vmap_between_height_and_width_is_one_custom_call(case):
    axis = between_height_and_width(case)
    f = jax.vmap(case.f, in_axes=axis, out_axes=axis)
    hlo = compiled(f, *batched(case, (axis,)))
    assert targets(hlo) == [case.target]
    assert not {"while", "gather", "dynamic-slice"} & set(opcodes(hlo)), hlo


@native_backend
def test_permute_of_batches_is_one_custom_call_wherever_the_batch_is():
    """Values and gradients with two batch axes anywhere in the operand, first in the result."""

    def f(xs):
        return [jax.vmap(jax.vmap(permute, i), j)(x) for x, (i, j) in zip(xs, axes, strict=True)]

    def pull(dys):
        return jax.linear_transpose(f, xs)(dys)

    permute = functools.partial(jof.permute, axes=(2, 0, 1))
    axes = [(i, j) for i in range(4) for j in range(5)]
    xs = [np.ones((2, 3, 4, 5, 6), np.float32)] * len(axes)
    for g, operands in ((f, xs), (pull, [np.asarray(y) for y in f(xs)])):
        hlo = compiled(g, operands)
        assert targets(hlo) == ["jof_permute"] * len(axes)
        assert set(opcodes(hlo)) <= {"custom-call", *FREE}, hlo


@native_backend
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((1, 6), None), ((3, 1, 5), (1, 0, 2)), ((1, 4, 1, 2), (1, 2, 3, 0)), ((0, 3), None)],
    ids=str,
)
def test_permute_that_moves_nothing_is_no_custom_call(shape, axes):
    hlo = compiled(lambda x: jof.permute(x, axes), np.ones(shape, np.float32))
    assert targets(hlo) == []
    # XLA copies the operand because a program's result needs its own buffer.
    assert set(opcodes(hlo)) <= {"copy", "fusion", "constant", *FREE}, hlo


def some_batched():
    """(case, operands without a batch axis).

    These are each operand alone; for one case of each primitive, also all other operands; and for
    cases with scalars, no operand at all, so that the scalars get a batch axis.
    """
    for case in EACH_KIND:
        alone = {frozenset({i}) for i in case.every_operand}
        others = {frozenset(case.every_operand) - one for one in alone}
        choices = (alone if len(case.shapes) > 1 else set()) | {frozenset()}
        choices |= others if len(case.shapes) > 1 and case in catalogue.EACH_PRIMITIVE else set()
        for fixed in sorted(choices, key=sorted):
            if fixed or not all(case.shapes):
                name = "".join(map(str, sorted(fixed))) or "none"
                yield pytest.param(case, fixed, id=f"{case}-fixed-{name}")


@native_backend
@pytest.mark.parametrize(("case", "fixed"), [*some_batched()])
def test_vmap_of_some_operands_is_no_loop(case, fixed):
    axes = tuple(None if i in fixed else 0 for i in case.every_operand)
    parameters = case.every_operand[len(case.shapes) - case.parameters :]
    # No kernel takes one parameter per example.
    loss = jax.value_and_grad(squares(case.f), argnums=case.wrt)
    text = lowered(jax.vmap(loss, in_axes=axes), case, *batched(case, axes))
    mapped = any(axes[i] is not None for i in parameters)
    assert lowered_targets(text) == Counter(() if mapped else case.both_targets())
    assert not LOOPS & {*STABLE_OPCODE.findall(text)}, text


@native_backend
@pytest.mark.parametrize("case", EACH_KIND, ids=str)
def test_vmap_of_grad_calls_each_once(case):
    axes = shared_axes(case, 0)
    f = jax.grad(squares(case.f), argnums=case.wrt)
    shaped = zip(case.inputs(2, 3), case.shapes, strict=True)
    xs = [x if shape else x[0, 0] for x, shape in shaped]
    text = lowered(jax.vmap(jax.vmap(f, in_axes=axes), in_axes=axes), case, *xs)
    assert lowered_targets(text) == Counter(case.both_targets())
    assert "while" not in STABLE_OPCODE.findall(text)


# --- the choice of the implementation -------------------------------------------------------------


def with_implementation(case, implementation):
    return lambda *xs: case.f(*xs, implementation=implementation)


@native_backend
@pytest.mark.parametrize("case", [case for case in FUNCTIONS if case in EACH_KIND], ids=str)
def test_native_can_be_asked_for(case):
    both = jax.value_and_grad(squares(with_implementation(case, "native")), argnums=case.wrt)
    assert calls_of(both, case, *case.inputs()) == Counter(case.both_targets())


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_xla_has_no_custom_call(case):
    """For one case of each kind, second derivatives and batches have none, either."""
    f = with_implementation(case, "xla")
    every = functools.partial(jax.value_and_grad, argnums=case.every_operand)
    if case not in EACH_KIND:
        assert calls_of(every(squares(f)), case, *case.inputs()) == {}
        return
    hvp = every(lambda *xs: sum(jnp.sum(dx**2) for dx in every(squares(f))(*xs)[1]))
    mapped = jax.vmap(every(squares(f)))
    both = calls_of(lambda a, b: (hvp(*a), mapped(*b)), case, case.inputs(), case.inputs(3))
    assert both == {}


@native_backend
@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_environment_variable_switches(case, monkeypatch):
    def calls(implementation=None, transform=lambda f: f):
        # A new function each time, because jax caches traces.
        f = transform(with_implementation(case, implementation))
        return [*calls_of(f, case, *case.inputs()).elements()]

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "xla")
    assert calls() == []
    assert calls(transform=lambda f: jax.grad(squares(f), argnums=case.wrt)) == []
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "native")
    assert calls() == [case.target]
    assert calls("xla") == []
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert calls() == [case.target]
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert calls() == [case.target]


@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_unknown_value_of_the_environment_variable(case, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=ENVIRONMENT_VARIABLE) as caught:
        case.f(*case.inputs())
    for part in ("cudnn", "native", "xla"):
        assert part in str(caught.value)


# --- platforms that this machine need not have ----------------------------------------------------


def exported(f, case, platforms):
    checks = jof.export_checks()
    with case.precision():
        specs = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
        return jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=checks)(*specs)


def exported_targets(f, case, platforms) -> Counter:
    return lowered_targets(exported(f, case, platforms).mlir_module())


@pytest.fixture
def cuda_module():
    if not _native.available("cuda"):
        assert os.environ.get("JOF_REQUIRE_CUDA_MODULE") != "1", "the _cuda module was not built"
        pytest.skip("the _cuda module was not built (set JOF_CUDA=ON to build it)")


def cases_and_platforms(cases, one, several):
    """(case, platforms): one case of each primitive has all choices, the others have `one`."""
    for case in cases:
        for platforms in (one, *several) if case in catalogue.EACH_PRIMITIVE else (one,):
            yield pytest.param(case, platforms, id=f"{case}-{'+'.join(platforms)}")


@pytest.mark.usefixtures("cuda_module")
@pytest.mark.parametrize(
    ("case", "platforms"), [*cases_and_platforms(EACH_KIND, ["cpu", "cuda"], [["cuda"]])]
)
def test_cuda_lowering_names_the_target(case, platforms):
    """Works with or without a GPU. The squares' gradient needs the op's value and gradient."""
    grad = jax.grad(squares(case.f), argnums=case.wrt)
    calls = Counter(case.both_targets() * len(platforms))
    assert exported_targets(grad, case, platforms) == calls


@pytest.mark.parametrize("case", EACH_KIND, ids=str)
def test_other_platforms_get_the_reference(case):
    grad = jax.grad(squares(case.f), argnums=case.every_operand)
    assert exported_targets(grad, case, ["tpu", "rocm"]) == {}


@pytest.mark.parametrize(
    ("case", "platforms"),
    [*cases_and_platforms(catalogue.FUNCTIONS, ["tpu"], [["rocm"]])],
)
def test_native_where_there_is_none_says_what_is_missing(case, platforms):
    with pytest.raises(NotImplementedError, match=rf"\b{case.function}: ") as caught:
        exported(with_implementation(case, "native"), case, platforms)
    for part in ("native", *platforms, 'implementation="xla"'):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "case", [c for c in catalogue.FUNCTIONS if c in catalogue.EACH_KIND], ids=str
)
def test_native_without_the_cuda_module_says_how_to_get_it(case, monkeypatch):
    monkeypatch.setattr(_native, "available", lambda platform: platform != "cuda")
    with pytest.raises(NotImplementedError, match=rf"\b{case.function}: ") as caught:
        exported(with_implementation(case, "native"), case, ["cuda"])
    for part in ("native", "cuda", "JOF_CUDA=ON"):
        assert part in str(caught.value)


@native_backend
def test_implementations_describes_what_is_loaded():
    described = jof.implementations()
    assert {platform for platform in ("cpu", "cuda") if _native.available(platform)} == set(
        described
    )
    assert all(text.startswith("native") for text in described.values())
