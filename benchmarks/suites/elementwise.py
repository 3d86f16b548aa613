"""Elementwise functions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import oracle

from .. import accuracy, rivals
from ..accuracy import Cotangent
from ..harness import SWEEP, Case, Function, Work, one_element
from ..inputs import Input
from . import (
    FLOATS,
    array_sizes,
    compact,
    elements,
    in_float32,
    is_wide,
    itemsize,
    pick,
    random_size,
    short,
    size,
    sweep_sizes,
)

Array = Any

_SLOPE, _ALPHA = 0.01, 0.75


@dataclass(frozen=True)
class Op:
    """A function in JAX, in float64 on the host, and in PyTorch.

    ``pullback`` takes the arrays and a cotangent and returns a Cotangent for each array of
    ``differentiated``; it is None if the gradient moves nothing or is another op.
    """

    ours: Function
    jnp: Function
    value: Function
    pullback: Function | None = None
    torch: Function | None = None
    torch_pullback: Function | None = None
    torch_inputs: Function | None = None  # of the pullback, if PyTorch saves something else
    kinds: tuple[str, ...] = ("normal",)
    differentiated: tuple[int, ...] = (0,)
    reads: int | None = None  # arrays that the pullback moves; None: all, and the cotangents
    exact: bool = False  # the exact result is rounded once: all forms are equal
    wide: bool = False  # jnp may be faster in f32
    by_hand: Function | None = None  # the formula of which XLA makes the fastest kernel, in f32


def case(op: str, dtype: str, n: int, shape: str, group: str = "forward") -> Case:
    """An op (group "forward" or "sweep") or its pullback (group "derivative")."""
    about = OPS[op]
    conditions = about.kinds.count("condition")
    arrays = sum(kind not in ("scalar", "condition") for kind in about.kinds)
    moved = arrays + 1
    if group == "derivative":
        used = arrays if about.reads is None else about.reads
        moved = used + 1 + len(about.differentiated)
    prefix = {"forward": "fwd", "derivative": "vjp"}.get(group, group)
    name = f"{prefix}-{op}-{compact(shape)}-{short(dtype)}"
    nbytes = n * (moved * itemsize(dtype) + conditions)
    work = partial(_work, op, dtype, n, group, shape)
    return Case("elementwise", name, op, group, shape, dtype, nbytes, work, is_wide(dtype))


def cases(platform: str, quick: bool = False) -> list[Case]:
    """Every op on large arrays; ``quick`` keeps three ops, two dtypes and the smaller arrays."""
    sizes = array_sizes(platform)[-1 if quick else 0 :]
    ops = ("gelu_tanh", "multiply", "where") if quick else OPS
    listed = [
        case(op, dtype, elements(nbytes, dtype), shape, group)
        for nbytes, shape in sizes
        for dtype in FLOATS[: 2 if quick else 3]
        for group in ("forward", "derivative")
        for op in ops
        if group == "forward" or OPS[op].pullback
    ]
    return listed + [
        case("gelu_tanh", dtype, nbytes // itemsize(dtype), size(nbytes), SWEEP)
        for dtype in ("float32", "bfloat16")
        for nbytes in sweep_sizes(platform, quick)
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A case at random: any op, forward or gradient, any number of elements."""
    op, dtype = pick(rng, [*OPS]), pick(rng, FLOATS)
    gradient = bool(OPS[op].pullback) and rng.random() < 0.4
    n = max(1, random_size(rng, largest) // (4 * itemsize(dtype)))
    n = n & ~63 if rng.random() < 0.25 and n > 64 else n
    return case(op, dtype, n, str(n), "derivative" if gradient else "forward")


def _work(name: str, dtype: str, n: int, group: str, shape: str) -> Work:
    op = OPS[name]
    gradient = group == "derivative"
    inputs = [_input(kind, n, dtype) for kind in op.kinds]
    forms = {"jnp": op.jnp}
    if op.wide and dtype != "float32":
        forms["jnp f32"] = in_float32(op.jnp, dtype)
    if op.by_hand:
        forms["jnp by hand"] = in_float32(op.by_hand, dtype)
    ours = op.ours
    if gradient:
        forms = {form: pullback_of(op, function) for form, function in forms.items()}
        inputs.append(_input("normal", n, dtype))
        ours = partial(_our_pullback, op)
    kernel = f"{name}_vjp" if gradient else name
    large = rivals.is_large(shape)
    launch = {"1 element": one_element} if group == SWEEP else {}
    return Work(
        inputs,
        ours,
        forms,
        sample=accuracy.samples,
        verify=partial(_verify_pullback if gradient else _verify, op, dtype),
        exact=op.exact and not gradient,
        alone=True,
        torch=op.torch_pullback if gradient else op.torch,
        torch_inputs=op.torch_inputs if gradient else None,
        compile=dtype != "float16" and kernel in _COMPILED and large,
        others=_others(kernel, dtype, large) | launch,
        effort=1.0 if group == SWEEP else 0.4,
    )


def _input(kind: str, n: int, dtype: str) -> Input:
    if kind == "scalar":
        return Input((), dtype, kind)
    return Input((n,), "bool" if kind == "condition" else dtype, kind)


def _our_pullback(op: Op, *args: Array, implementation: str | None) -> Array:
    return pullback_of(op, partial(op.ours, implementation=implementation))(*args)


def pullback_of(op: Op, function: Function) -> Function:
    """The pullback alone: the value is not used, and XLA drops it."""

    def run(*args: Array) -> Array:
        arrays, ct = args[:-1], args[-1]

        def of_differentiated(*live: Array) -> Array:
            known = dict(zip(op.differentiated, live, strict=True))
            return function(*(known.get(i, x) for i, x in enumerate(arrays)))

        return jax.vjp(of_differentiated, *(arrays[i] for i in op.differentiated))[1](ct)

    return run


def _verify(op: Op, dtype: str, sampled: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]) -> Any:
    args, (out,) = accuracy.doubles(sampled)
    with np.errstate(all="ignore"):
        exact = op.value(*args)
    # A tail is where an activation is small against its argument.
    argument = np.prod(np.stack(args), axis=0) if op.wide else exact
    bound = accuracy.value_bound(exact, argument, dtype, is_product=op.wide and len(args) > 1)
    return accuracy.worst(out, exact, bound)


def _verify_pullback(
    op: Op, dtype: str, sampled: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
) -> str | None:
    args, out = accuracy.doubles(sampled)
    assert op.pullback is not None
    with np.errstate(all="ignore"):
        expected = op.pullback(*args)
    return accuracy.worst_cotangent(out, expected, dtype)


# ---- further rivals ----

_COMPILED = {"gelu_tanh", "gelu_tanh_vjp", "silu", "swiglu", "swiglu_vjp", "mish"}
_TRITON = {"add", "gelu_tanh", "silu", "swiglu", "swiglu_vjp"}
_CUPY = {"relu", "add", "multiply", "gelu_tanh", "silu"}
_CUB = {"gelu_tanh", "add"}


def _others(kernel: str, dtype: str, large: bool) -> dict[str, Any]:
    """Other libraries' kernels, for large arrays."""
    found = {"triton": kernel in _TRITON, "cub": kernel in _CUB}
    found["cupy"] = kernel in _CUPY and dtype != "bfloat16"  # which CuPy lacks
    modules = {"triton": "triton_kernels", "cupy": "cupy_kernels", "cub": "cub"}
    return {name: rivals.maker(modules[name], kernel) for name in found if found[name] and large}


# ---- float64 on the host ----

_VALUES = {name: value for name, (value, _) in oracle.ACTIVATIONS.items()}
_SLOPES = {name: slope for name, (_, slope) in oracle.ACTIVATIONS.items()}
_CANCELS = {"gelu_tanh", "gelu_erf", "silu", "hard_swish", "mish"}  # the slope has a root


def _half_where(condition: Array, equal: Array, ct: Array) -> Array:
    return np.where(equal, ct / 2, np.where(condition, ct, 0))


def _terms(*cotangents: Array) -> list[Cotangent]:
    return [Cotangent(ct) for ct in cotangents]


# ---- jnp by hand ----


def gelu_by_hand(x: Array) -> Array:
    """By one exponential, not by tanh."""
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gelu_erf_by_hand(x: Array) -> Array:
    """By erf, as PyTorch has it; jax.nn's erfc is accurate in the tail, too."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _mish_by_hand(x: Array) -> Array:
    """By one exponential: tanh(log(1 + e)) is e (e + 2) / (e (e + 2) + 2)."""
    e = jnp.exp(jnp.minimum(x, 20))  # beyond it the quotient is 1
    n = e * (e + 2)
    return x * (n / (n + 2))


# ---- PyTorch ----


def _functional(name: str, **options: Any) -> Function:
    return lambda torch, x: getattr(torch.nn.functional, name)(x, **options)


def _aten(name: str, *options: Any, **keywords: Any) -> Function:
    """Such as ``gelu_backward(ct, x, ...)``."""

    def run(torch: Any, x: Array, ct: Array) -> Array:
        return getattr(torch.ops.aten, name)(ct, x, *options, **keywords)

    return run


def _where_torch_pullback(torch: Any, condition: Array, x: Array, y: Array, ct: Array) -> Any:
    zero = torch.zeros((), dtype=ct.dtype, device=ct.device)
    return torch.where(condition, ct, zero), torch.where(condition, zero, ct)


# ---- the ops ----


def _unary(
    name: str,
    ours: Function,
    reference: Function,
    torch: Function,
    backward: Function,
    *parameters: float,
    **options: Any,
) -> Op:
    """An activation with its float64 formulas from the tests' oracle."""

    def pullback(x: Array, ct: Array) -> list[Cotangent]:
        slope = _SLOPES[name](x, *parameters)
        return [Cotangent(ct * slope, cancelling=ct if name in _CANCELS else 0.0)]

    return Op(
        ours,
        reference,
        lambda x: _VALUES[name](x, *parameters),
        pullback,
        torch,
        backward,
        **{"wide": True, **options},
    )


def _binary(ours: Function, reference: Function, torch: Function, **options: Any) -> Op:
    return Op(
        ours, reference, options.pop("value", None) or _in_numpy(reference), torch=torch, **options
    )


def _in_numpy(reference: Function) -> Function:
    return getattr(np, reference.__name__)  # type: ignore[no-any-return]


def _gated(
    ours: Function, activation: str, reference: Function, torch: Function, backward: Function
) -> Op:
    value, slope = oracle.ACTIVATIONS[activation]

    def pullback(x: Array, gate: Array, ct: Array) -> list[Cotangent]:
        of_x = Cotangent(ct * value(gate), argument=ct * gate)
        return [of_x, Cotangent(ct * x * slope(gate), cancelling=ct * x)]

    def torch_pullback(torch_: Any, x: Array, gate: Array, ct: Array) -> Any:
        return ct * torch(torch_, gate), backward(torch_, gate, ct * x)

    hand = {"gelu_tanh": gelu_by_hand, "gelu_erf": _gelu_erf_by_hand}.get(activation)
    return Op(
        ours,
        lambda x, gate: reference(gate) * x,
        lambda x, gate: value(gate) * x,
        pullback,
        lambda torch_, x, gate: torch(torch_, gate) * x,
        torch_pullback,
        wide=True,
        by_hand=hand and (lambda x, gate: hand(gate) * x),
        **_TWO,
    )


_TWO: dict[str, Any] = {"kinds": ("normal", "normal"), "differentiated": (0, 1)}
_SAVES_RESULT: dict[str, Callable[..., Any]] = {
    name: lambda torch, x, ct, name=name: (getattr(torch, name)(x), ct)
    for name in ("sigmoid", "tanh")
}
_SILU, _SILU_BACK = _functional("silu"), _aten("silu_backward")
_GELU = {kind: _functional("gelu", approximate=kind) for kind in ("tanh", "none")}
_GELU_BACK = {kind: _aten("gelu_backward", approximate=kind) for kind in ("tanh", "none")}
_gelu, _geglu = partial(jof.gelu, approximate=False), partial(jof.geglu, approximate=False)
_jax_gelu = partial(jax.nn.gelu, approximate=False)

OPS: dict[str, Op] = {
    "relu": _unary(
        "relu",
        jof.relu,
        jax.nn.relu,
        _functional("relu"),
        _aten("threshold_backward", 0),
        wide=False,
        exact=True,
    ),
    "leaky_relu": _unary(
        "leaky_relu",
        lambda x, **options: jof.leaky_relu(x, _SLOPE, **options),
        lambda x: jax.nn.leaky_relu(x, _SLOPE),
        _functional("leaky_relu", negative_slope=_SLOPE),
        _aten("leaky_relu_backward", _SLOPE, False),
        _SLOPE,
        wide=False,
    ),
    "elu": _unary(
        "elu",
        jof.elu,
        jax.nn.elu,
        _functional("elu"),
        lambda torch, x, ct: torch.ops.aten.elu_backward(ct, 1, 1, 1, False, x),
        1.0,
    ),
    "gelu_tanh": _unary(
        "gelu_tanh", jof.gelu, jax.nn.gelu, _GELU["tanh"], _GELU_BACK["tanh"], by_hand=gelu_by_hand
    ),
    "gelu_erf": _unary(
        "gelu_erf", _gelu, _jax_gelu, _GELU["none"], _GELU_BACK["none"], by_hand=_gelu_erf_by_hand
    ),
    "sigmoid": _unary(
        "sigmoid",
        jof.sigmoid,
        jax.nn.sigmoid,
        lambda torch, x: torch.sigmoid(x),
        _aten("sigmoid_backward"),
        torch_inputs=_SAVES_RESULT["sigmoid"],
    ),
    "silu": _unary("silu", jof.silu, jax.nn.silu, _SILU, _SILU_BACK),
    "tanh": _unary(
        "tanh",
        jof.tanh,
        jnp.tanh,
        lambda torch, x: torch.tanh(x),
        _aten("tanh_backward"),
        torch_inputs=_SAVES_RESULT["tanh"],
    ),
    "softplus": _unary(
        "softplus",
        jof.softplus,
        jax.nn.softplus,
        _functional("softplus"),
        _aten("softplus_backward", 1, 20),
    ),
    "hard_swish": _unary(
        "hard_swish",
        jof.hard_swish,
        jax.nn.hard_swish,
        _functional("hardswish"),
        _aten("hardswish_backward"),
    ),
    "mish": _unary(
        "mish",
        jof.mish,
        jax.nn.mish,
        _functional("mish"),
        _aten("mish_backward"),
        by_hand=_mish_by_hand,
    ),
    "scale": Op(
        lambda x, **options: jof.scale(x, _ALPHA, **options),
        lambda x: x * _ALPHA,
        lambda x: x * _ALPHA,
        lambda x, ct: _terms(ct * _ALPHA),
        lambda torch, x: x * _ALPHA,
        lambda torch, x, ct: ct * _ALPHA,
        reads=0,
    ),
    "scale_traced": _binary(
        jof.scale, jnp.multiply, lambda torch, x, alpha: x * alpha, kinds=("normal", "scalar")
    ),
    "add": _binary(jof.add, jnp.add, lambda torch, x, y: x + y, kinds=_TWO["kinds"]),
    "subtract": _binary(jof.subtract, jnp.subtract, lambda torch, x, y: x - y, kinds=_TWO["kinds"]),
    "multiply": _binary(
        jof.multiply,
        jnp.multiply,
        lambda torch, x, y: x * y,
        pullback=lambda x, y, ct: _terms(ct * y, ct * x),
        torch_pullback=lambda torch, x, y, ct: (ct * y, ct * x),
        exact=True,
        **_TWO,
    ),
    "divide": _binary(
        jof.divide,
        jnp.divide,
        lambda torch, x, y: x / y,
        pullback=lambda x, y, ct: _terms(ct / y, -ct * x / y**2),
        torch_pullback=lambda torch, x, y, ct: (ct / y, -ct * ((x / y) / y)),
        kinds=("normal", "divisor"),
        differentiated=(0, 1),
    ),
    "maximum": _binary(
        jof.maximum,
        jnp.maximum,
        lambda torch, x, y: torch.maximum(x, y),
        pullback=lambda x, y, ct: _terms(
            _half_where(x > y, x == y, ct), _half_where(y > x, x == y, ct)
        ),
        exact=True,
        **_TWO,
    ),
    "minimum": _binary(
        jof.minimum,
        jnp.minimum,
        lambda torch, x, y: torch.minimum(x, y),
        pullback=lambda x, y, ct: _terms(
            _half_where(x < y, x == y, ct), _half_where(y < x, x == y, ct)
        ),
        exact=True,
        **_TWO,
    ),
    "fma": Op(
        jof.fma,
        lambda x, y, z: x * y + z,
        lambda x, y, z: x * y + z,
        lambda x, y, z, ct: _terms(ct * y, ct * x),
        lambda torch, x, y, z: torch.addcmul(z, x, y),
        lambda torch, x, y, z, ct: (ct * y, ct * x),
        kinds=("normal", "normal", "normal"),
        differentiated=(0, 1),  # the third cotangent is the result's own
        reads=2,
    ),
    "where": _binary(
        jof.where,
        jnp.where,
        lambda torch, condition, x, y: torch.where(condition, x, y),
        value=lambda condition, x, y: np.where(condition > 0, x, y),
        pullback=lambda c, x, y, ct: _terms(np.where(c > 0, ct, 0), np.where(c > 0, 0, ct)),
        torch_pullback=_where_torch_pullback,
        kinds=("condition", "normal", "normal"),
        differentiated=(1, 2),
        reads=0,
        exact=True,
    ),
    "swiglu": _gated(jof.swiglu, "silu", jax.nn.silu, _SILU, _SILU_BACK),
    "geglu_tanh": _gated(jof.geglu, "gelu_tanh", jax.nn.gelu, _GELU["tanh"], _GELU_BACK["tanh"]),
    "geglu_erf": _gated(_geglu, "gelu_erf", _jax_gelu, _GELU["none"], _GELU_BACK["none"]),
}
"""The ops by the names that cases have."""
