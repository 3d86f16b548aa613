"""Elementwise functions and their gradients: all rows of the catalogue."""

from functools import partial
from typing import Any

import numpy as np

from tests import catalogue

from .. import accuracy
from ..accuracy import Exact
from ..harness import SWEEP, Case, Function, Work
from ..inputs import Input, shapes
from ..tables import size
from . import common

OPS: dict[str, Any] = {op.name: op for op in catalogue.ELEMENTWISE_OPS}
TRACED = {"scale_traced": "scale"}
"""Cases of ops whose parameters are traced arrays instead of Python numbers."""

_EXACT = {"relu", "multiply", "maximum", "minimum", "where"}  # all forms have the same bits


def _computed(op: Any) -> list[int]:
    """The operands whose cotangents a kernel computes."""
    return [i for i in op.wrt if i not in op.same]


def _has_gradient(name: str) -> bool:
    return name in OPS and bool(_computed(OPS[name]))


def case(name: str, dtype: str, n: int, shape: str, group: str = "forward") -> Case:
    """An op (group "forward" or "sweep") or its pullback alone (group "derivative")."""
    op = OPS[TRACED.get(name, name)]
    prefix = {"forward": "fwd", "derivative": "vjp"}.get(group, group)
    operands = shapes(_inputs(op, n, dtype, parameters=True))
    moved = op.gradient_bytes if group == "derivative" else op.bytes
    nbytes = moved(*operands) - (len(operands) - len(op.arrays)) * common.itemsize(dtype)
    full = f"{prefix}-{name}-{common.compact(shape)}-{common.short(dtype)}"
    work = partial(_work, name, dtype, n, group, shape)
    return Case("elementwise", full, name, group, shape, dtype, nbytes, work)


def cases(platform: str) -> list[Case]:
    """Every op on large arrays, and gelu over all sizes."""
    return [
        case(op, dtype, common.elements(nbytes, dtype), shape, group)
        for nbytes, shape in common.array_sizes(platform)
        for dtype in common.FLOATS
        for group in ("forward", "derivative")
        for op in (*OPS, *TRACED)
        if group == "forward" or _has_gradient(op)
    ] + [
        case("gelu_tanh", dtype, nbytes // common.itemsize(dtype), size(nbytes), SWEEP)
        for dtype in ("float32", "bfloat16")
        for nbytes in common.sweep_sizes(platform)
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: any op, forward or gradient, any number of elements."""
    name, dtype = common.pick(rng, [*OPS]), common.pick(rng, common.FLOATS)
    gradient = _has_gradient(name) and rng.random() < 0.4
    n = common.random_elements(rng, largest, 4 * common.itemsize(dtype))
    return case(name, dtype, n, str(n), "derivative" if gradient else "forward")


def _inputs(op: Any, n: int, dtype: str, parameters: bool) -> list[Input]:
    special = {
        catalogue.PARAMETER: Input((), dtype, "scalar"),
        catalogue.POSITIVE: Input((n,), dtype, "divisor"),
        catalogue.CONDITION: Input((n,), "bool", "condition"),
    }
    domains = [d for d in op.domain if parameters or d != catalogue.PARAMETER]
    return [special.get(domain, Input((n,), dtype)) for domain in domains]


def _work(name: str, dtype: str, n: int, group: str, shape: str) -> Work:
    op, traced = OPS[TRACED.get(name, name)], name in TRACED
    gradient = group == "derivative"
    inputs = _inputs(op, n, dtype, parameters=traced)
    # Numbers come after the arrays, and are compiled in.
    numbers = () if traced else op.settings[0]

    def of_arrays(function: Function) -> Function:
        return lambda *arrays, **options: function(*arrays, *numbers, **options)

    def measured(function: Function) -> Function:
        function = of_arrays(function)
        return common.pullback(function, _computed(op)) if gradient else function

    kernel = f"{name}_vjp" if gradient else name
    return Work(
        [*inputs, *[Input((n,), dtype)] * gradient],
        measured(op.function),
        {form: measured(f) for form, f in common.forms_of(op, dtype).items()},
        sample=accuracy.samples,
        verify=partial(_verify_pullback if gradient else _verify, op, dtype, numbers),
        exact=name in _EXACT and not gradient,
        alone=True,
        torch=None if gradient else TORCH.get(name),
        compile=dtype != "float16" and kernel in _COMPILED and common.is_large(shape),
    )


_HAS_A_ROOT = {"gelu_tanh", "gelu_erf", "silu", "hard_swish", "mish"}  # their slopes have a root


def _verify(op: Any, dtype: str, numbers: Any, sampled: accuracy.Sampled) -> str | None:
    args, out = accuracy.doubles(sampled)
    with np.errstate(all="ignore"):
        exact = op.exact(*args, *numbers)
    # A result is in a tail if an activation is small compared with its argument.
    argument = np.prod(np.stack(args), axis=0) if op.best else 0.0
    known = Exact(exact, argument=argument, product=bool(op.best) and len(args) > 1)
    return accuracy.wrong(out, [known], dtype)


def _verify_pullback(op: Any, dtype: str, numbers: Any, sampled: accuracy.Sampled) -> str | None:
    (*args, ct), out = accuracy.doubles(sampled)
    with np.errstate(all="ignore"):
        exact = [ct * slope(*args, *numbers) for slope in op.derivatives]
    expected = [Exact(exact[op.wrt.index(i)]) for i in _computed(op)]
    if op.name in _HAS_A_ROOT:
        expected = [expected[0]._replace(cancelling=ct)]
    elif op.best and len(args) == 2:  # x activation(gate)
        x, gate = args
        expected[0] = expected[0]._replace(argument=ct * gate)
        expected[1] = expected[1]._replace(cancelling=ct * x)
    return accuracy.wrong(out, expected, dtype)


_COMPILED = {"gelu_tanh", "silu", "swiglu", "mish"}


def _functional(name: str, **options: Any) -> Function:
    return lambda torch, x: getattr(torch.nn.functional, name)(x, **options)


def _own(name: str) -> Function:
    return lambda torch, *operands: getattr(torch, name)(*operands)


def _gated(activation: str) -> Function:
    return lambda torch, x, gate: TORCH[activation](torch, gate) * x


_OWN = ("sigmoid", "tanh", "maximum", "minimum", "where", "add", "subtract", "multiply", "divide")
TORCH: dict[str, Function] = {
    **{name: _functional(name) for name in ("relu", "elu", "softplus", "mish", "silu")},
    **{name: _own(name) for name in _OWN},
    "leaky_relu": _functional("leaky_relu", negative_slope=0.01),
    "hard_swish": _functional("hardswish"),
    "gelu_tanh": _functional("gelu", approximate="tanh"),
    "gelu_erf": _functional("gelu", approximate="none"),
    "scale": lambda torch, x: x * 0.75,
    "scale_traced": lambda torch, x, alpha: x * alpha,
    "fma": lambda torch, x, y, z: torch.addcmul(z, x, y),
    "swiglu": _gated("silu"),
    "geglu_tanh": _gated("gelu_tanh"),
    "geglu_erf": _gated("gelu_erf"),
}
"""By the names of cases. PyTorch's gradients do more work than the pullback, so they are no rivals.
"""
