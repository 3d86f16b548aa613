"""The elementwise suite: every op and its pullback beside jnp's, PyTorch's and other libraries'."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from . import accuracy, rivals
from .accuracy import Cotangent
from .cases import SWEEP, ElementwiseCase
from .harness import Input, Maker, Sets, Work
from .rivals import cub
from .timing import Contender

Array = Any  # of any framework
Function = Callable[..., Any]

_SLOPE, _ALPHA = 0.01, 0.75
_NAIVE = Path(__file__).with_name("csrc") / "naive_multiply.cu"


@dataclass(frozen=True)
class Op:
    """An op in JAX, in float64 on the host, and in PyTorch.

    Pullbacks take the arrays and a cotangent, and give one for each array that is differentiated.
    """

    ours: Function
    jnp: Function
    value: Function
    pullback: Function | None = None
    torch: Function | None = None
    torch_pullback: Function | None = None
    torch_inputs: Function | None = None  # of the pullback, where PyTorch saves something else
    target: str = ""  # without jof_, where it is not the op's name
    vjp_target: str = ""  # likewise, without _vjp
    kinds: tuple[str, ...] = ("normal",)
    differentiated: tuple[int, ...] = (0,)
    linear: bool = False  # the op is its own pullback
    exact: bool = False  # results are rounded once from exact ones: all rivals must agree
    wide: bool = False  # jnp may be better off in f32
    by_hand: Function | None = None  # jnp's formula that XLA makes the fastest kernel of, in f32


def work(case: ElementwiseCase) -> Work:
    """Everything the harness needs to run a case."""
    op = OPS[case.op]
    target = f"jof_{op.target or case.op}"
    derivative = case.group == "derivative"
    inputs = [_input(case, kind) for kind in op.kinds]
    functions = {"jnp": op.jnp}
    if op.wide and case.dtype != "float32":
        functions["jnp f32"] = in_float32(op.jnp)
    if op.by_hand:
        functions["jnp by hand"] = in_float32(op.by_hand)
    torch = op.torch_pullback if derivative else op.torch
    if derivative:
        functions = {name: _pullback(op, f) for name, f in functions.items()}
        inputs.append(_input(case, "normal"))
        target = target if op.linear else f"jof_{op.vjp_target or case.op}_vjp"
    return Work(
        inputs=inputs,
        ours=_pullback(op, op.ours) if derivative else op.ours,
        target=target,
        jnp=functions,
        torch=torch,
        torch_inputs=op.torch_inputs if derivative else None,
        compile=case.dtype != "float16" and _kernel(case) in _COMPILED and rivals.is_large(case),
        check=partial(_check_pullback if derivative else check_value, op, case.dtype),
        exact=op.exact and not derivative,
        alone=True,
        others=_others(case),
        ceilings=("copy",),
        effort=0.4 if case.group != SWEEP else 1.0,
    )


def _input(case: ElementwiseCase, kind: str) -> Input:
    if kind == "scalar":
        return Input((), case.dtype, kind)
    return Input((case.elements,), "bool" if kind == "condition" else case.dtype, kind)


def _pullback(op: Op, function: Function) -> Function:
    """The pullback alone: the value is not used, and XLA drops it."""

    def run(*args: Array) -> Array:
        arrays, ct = args[:-1], args[-1]

        def of_differentiated(*live: Array) -> Array:
            known = dict(zip(op.differentiated, live, strict=True))
            return function(*(known.get(i, x) for i, x in enumerate(arrays)))

        return jax.vjp(of_differentiated, *(arrays[i] for i in op.differentiated))[1](ct)

    return run


def in_float32(function: Function) -> Function:
    """Widened by hand: XLA then rounds once."""

    def run(*args: Array) -> Array:
        wide = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args)
        return function(*wide).astype(args[-1].dtype)

    return run


def _host(args: Sequence[Array]) -> list[Array]:
    samples = (accuracy.sample(x) for x in args)
    return [x if x.dtype == np.bool_ else x.astype(np.float64) for x in samples]


def check_value(op: Op, dtype: str, args: tuple[Array, ...], out: Array) -> str | None:
    """What is wrong with samples of an op's result."""
    host = _host(args)
    with np.errstate(all="ignore"):
        exact = op.value(*host)
    # A tail is where an activation is small against its argument.
    argument = np.prod(host, axis=0) if op.wide else exact
    bound = accuracy.value_bound(exact, argument, dtype, is_product=op.wide and len(host) > 1)
    return accuracy.worst(accuracy.sample(out), exact, bound)


def _check_pullback(op: Op, dtype: str, args: tuple[Array, ...], out: Array) -> str | None:
    if op.pullback is None:
        raise ValueError("no pullback to compare with")
    with np.errstate(all="ignore"):
        expected = op.pullback(*_host(args))
    for i, (cotangent, y) in enumerate(zip(expected, out, strict=True)):
        bound = accuracy.cotangent_bound(cotangent, dtype)
        if wrong := accuracy.worst(accuracy.sample(y), cotangent.exact, bound):
            return f"cotangent {i}: {wrong}"
    return None


# ---- further contenders ----

_COMPILED = {"gelu_tanh", "gelu_tanh_vjp", "silu", "swiglu", "swiglu_vjp", "mish"}
"""What torch.compile has a go at: each takes it seconds."""

_TRITON = {"add", "gelu_tanh", "silu", "swiglu", "swiglu_vjp"}
_CUPY = {"relu", "add", "multiply", "gelu_tanh", "silu"}


def _kernel(case: ElementwiseCase) -> str:
    """The name of what is computed: that of the op, with ``_vjp`` if it is the pullback."""
    return f"{case.op}_vjp" if case.group == "derivative" else case.op


def _others(case: ElementwiseCase) -> dict[str, Maker]:
    """Of large arrays of forward ops and pullbacks; one element a thread of all products."""
    kernel, by_cupy = _kernel(case), case.dtype != "bfloat16"  # which CuPy lacks
    others: dict[str, Maker] = {}
    if kernel == "multiply" and by_cupy:
        others["naive"] = partial(_naive, case)
    if not rivals.is_large(case):
        return others
    if kernel in _TRITON:
        others["triton"] = rivals.maker("triton_kernels", kernel)
    if kernel in _CUPY and by_cupy:
        others["cupy"] = rivals.maker("cupy_kernels", kernel)
    if kernel in cub.OPS:
        others["cub"] = rivals.maker("cub", kernel)
    return others


def build() -> list[Path]:
    """Compiles the library."""
    return [cub.transform_library()]


def _naive(case: ElementwiseCase, sets: Sets, ours: Array) -> tuple[Contender, dict[str, Any]]:
    """One element a thread: what the articles measure the template against."""
    import cupy

    module = cupy.RawModule(code=_NAIVE.read_text(), options=("--std=c++17",))
    kernel = module.get_function(f"multiply_{case.dtype}")
    n, blocks = np.uint64(case.elements), -(-case.elements // 256)

    def start(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        kernel((blocks,), (256,), (*map(np.uint64, [*inputs, *outputs]), n))

    wait = cupy.cuda.Device().synchronize
    return rivals.on_views("naive", rivals.address, start, wait, sets, ours, exact=True)


# ---- float64 on the host: formulas that do not cancel ----


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_erfc = np.frompyfunc(math.erfc, 1, 1)


def _phi(x: Array) -> Array:
    return np.asarray(0.5 * _erfc(-x / math.sqrt(2)), np.float64)


def _two_u(x: Array) -> Array:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh(x: Array) -> Array:
    return x * _sigmoid(_two_u(x))


def _gelu_tanh_slope(x: Array) -> Array:
    s, inner = _sigmoid(_two_u(x)), 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return s * (1 + x * _sigmoid(-_two_u(x)) * inner)


def _gelu_erf(x: Array) -> Array:
    return x * _phi(x)


def _gelu_erf_slope(x: Array) -> Array:
    return _phi(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _silu_slope(x: Array) -> Array:
    return _sigmoid(x) * (1 + x * _sigmoid(-x))


def _hard_swish_slope(x: Array) -> Array:
    return np.where(np.abs(x) < 3, (2 * x + 3) / 6, (x >= 3) * 1.0)


def _mish(x: Array) -> Array:
    e = np.exp(np.minimum(x, 40))
    return x * (e * (e + 2) / (e * (e + 2) + 2))


def _mish_slope(x: Array) -> Array:
    bounded = np.minimum(x, 40)
    e = np.exp(bounded)
    n = e * (e + 2)
    return e * ((e + 2) * (n + 2) + 4 * bounded * (1 + e)) / (n + 2) ** 2


def _half_where(condition: Array, equal: Array, ct: Array) -> Array:
    return np.where(equal, ct / 2, np.where(condition, ct, 0))


def _terms(*cotangents: Array) -> list[Cotangent]:
    """Cotangents of one term each."""
    return [Cotangent(ct) for ct in cotangents]


def _unary(slope: Function, cancels: bool = False) -> Function:
    """The pullback of a function of one array, of which the slope has a root where it cancels."""
    return lambda x, ct: [Cotangent(ct * slope(x), cancelling=ct if cancels else 0.0)]


def _gated(activation: Function, slope: Function) -> Function:
    def pullback(x: Array, gate: Array, ct: Array) -> list[Cotangent]:
        return [
            Cotangent(ct * activation(gate), argument=ct * gate),
            Cotangent(ct * x * slope(gate), cancelling=ct * x),
        ]

    return pullback


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


def _result_instead(name: str) -> Function:
    """PyTorch saves the result, not the argument."""
    return lambda torch, x, ct: (getattr(torch, name)(x), ct)


def _gated_torch(activation: Function) -> Function:
    return lambda torch, x, gate: activation(torch, gate) * x


def _gated_torch_pullback(activation: Function, backward: Function) -> Function:
    def run(torch: Any, x: Array, gate: Array, ct: Array) -> Any:
        return ct * activation(torch, gate), backward(torch, gate, ct * x)

    return run


def _where_torch_pullback(torch: Any, condition: Array, x: Array, y: Array, ct: Array) -> Any:
    zero = torch.zeros((), dtype=ct.dtype, device=ct.device)
    return torch.where(condition, ct, zero), torch.where(condition, zero, ct)


_TORCH_GELU = {kind: _functional("gelu", approximate=kind) for kind in ("tanh", "none")}
_TORCH_GELU_BACK = {kind: _aten("gelu_backward", approximate=kind) for kind in ("tanh", "none")}


# ---- the ops ----

_TWO: dict[str, Any] = {"kinds": ("normal", "normal"), "differentiated": (0, 1)}

OPS: dict[str, Op] = {
    "relu": Op(
        jof.relu,
        jax.nn.relu,
        lambda x: np.maximum(x, 0),
        _unary(lambda x: (x > 0) * 1.0),
        torch=_functional("relu"),
        torch_pullback=_aten("threshold_backward", 0),
        exact=True,
    ),
    "leaky_relu": Op(
        lambda x: jof.leaky_relu(x, _SLOPE),
        lambda x: jax.nn.leaky_relu(x, _SLOPE),
        lambda x: np.where(x >= 0, x, _SLOPE * x),
        _unary(lambda x: np.where(x >= 0, 1, _SLOPE)),
        torch=_functional("leaky_relu", negative_slope=_SLOPE),
        torch_pullback=_aten("leaky_relu_backward", _SLOPE, False),
    ),
    "elu": Op(
        jof.elu,
        jax.nn.elu,
        lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        _unary(lambda x: np.exp(np.minimum(x, 0))),
        torch=_functional("elu"),
        torch_pullback=lambda torch, x, ct: torch.ops.aten.elu_backward(ct, 1, 1, 1, False, x),
        wide=True,
    ),
    "gelu_tanh": Op(
        partial(jof.gelu, approximate=True),
        partial(jax.nn.gelu, approximate=True),
        _gelu_tanh,
        _unary(_gelu_tanh_slope, cancels=True),
        torch=_TORCH_GELU["tanh"],
        torch_pullback=_TORCH_GELU_BACK["tanh"],
        wide=True,
        by_hand=gelu_by_hand,
    ),
    "gelu_erf": Op(
        partial(jof.gelu, approximate=False),
        partial(jax.nn.gelu, approximate=False),
        _gelu_erf,
        _unary(_gelu_erf_slope, cancels=True),
        torch=_TORCH_GELU["none"],
        torch_pullback=_TORCH_GELU_BACK["none"],
        wide=True,
        by_hand=_gelu_erf_by_hand,
    ),
    "sigmoid": Op(
        jof.sigmoid,
        jax.nn.sigmoid,
        _sigmoid,
        _unary(lambda x: _sigmoid(x) * _sigmoid(-x)),
        torch=lambda torch, x: torch.sigmoid(x),
        torch_pullback=_aten("sigmoid_backward"),
        torch_inputs=_result_instead("sigmoid"),
        wide=True,
    ),
    "silu": Op(
        jof.silu,
        jax.nn.silu,
        _silu,
        _unary(_silu_slope, cancels=True),
        torch=_functional("silu"),
        torch_pullback=_aten("silu_backward"),
        wide=True,
    ),
    "tanh": Op(
        jof.tanh,
        jnp.tanh,
        np.tanh,
        _unary(lambda x: 4 * _sigmoid(2 * x) * _sigmoid(-2 * x)),
        torch=lambda torch, x: torch.tanh(x),
        torch_pullback=_aten("tanh_backward"),
        torch_inputs=_result_instead("tanh"),
        wide=True,
    ),
    "softplus": Op(
        jof.softplus,
        jax.nn.softplus,
        lambda x: np.logaddexp(0, x),
        _unary(_sigmoid),
        torch=_functional("softplus"),
        torch_pullback=_aten("softplus_backward", 1, 20),
        wide=True,
    ),
    "hard_swish": Op(
        jof.hard_swish,
        jax.nn.hard_swish,
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        _unary(_hard_swish_slope, cancels=True),
        torch=_functional("hardswish"),
        torch_pullback=_aten("hardswish_backward"),
        wide=True,
    ),
    "mish": Op(
        jof.mish,
        jax.nn.mish,
        _mish,
        _unary(_mish_slope, cancels=True),
        torch=_functional("mish"),
        torch_pullback=_aten("mish_backward"),
        wide=True,
        by_hand=_mish_by_hand,
    ),
    "scale": Op(
        lambda x: jof.scale(x, _ALPHA),
        lambda x: x * _ALPHA,
        lambda x: x * _ALPHA,
        lambda x, ct: _terms(ct * _ALPHA),
        torch=lambda torch, x: x * _ALPHA,
        torch_pullback=lambda torch, x, ct: ct * _ALPHA,
        linear=True,
    ),
    "scale_traced": Op(
        jof.scale,
        jnp.multiply,
        np.multiply,
        torch=lambda torch, x, alpha: x * alpha,
        target="scale",
        kinds=("normal", "scalar"),
    ),
    "add": Op(
        jof.add, jnp.add, np.add, torch=lambda torch, x, y: x + y, kinds=("normal", "normal")
    ),
    "subtract": Op(
        jof.subtract,
        jnp.subtract,
        np.subtract,
        torch=lambda torch, x, y: x - y,
        kinds=("normal", "normal"),
    ),
    "multiply": Op(
        jof.multiply,
        jnp.multiply,
        np.multiply,
        lambda x, y, ct: _terms(ct * y, ct * x),
        torch=lambda torch, x, y: x * y,
        torch_pullback=lambda torch, x, y, ct: (ct * y, ct * x),
        exact=True,
        **_TWO,
    ),
    "divide": Op(
        jof.divide,
        jnp.divide,
        np.divide,
        lambda x, y, ct: _terms(ct / y, -ct * x / y**2),
        torch=lambda torch, x, y: x / y,
        torch_pullback=lambda torch, x, y, ct: (ct / y, -ct * ((x / y) / y)),
        kinds=("normal", "divisor"),
        differentiated=(0, 1),
    ),
    "maximum": Op(
        jof.maximum,
        jnp.maximum,
        np.maximum,
        lambda x, y, ct: _terms(_half_where(x > y, x == y, ct), _half_where(y > x, x == y, ct)),
        torch=lambda torch, x, y: torch.maximum(x, y),
        exact=True,
        **_TWO,
    ),
    "minimum": Op(
        jof.minimum,
        jnp.minimum,
        np.minimum,
        lambda x, y, ct: _terms(_half_where(x < y, x == y, ct), _half_where(y < x, x == y, ct)),
        torch=lambda torch, x, y: torch.minimum(x, y),
        exact=True,
        **_TWO,
    ),
    "fma": Op(
        jof.fma,
        lambda x, y, z: x * y + z,
        lambda x, y, z: x * y + z,
        lambda x, y, z, ct: _terms(ct * y, ct * x),
        torch=lambda torch, x, y, z: torch.addcmul(z, x, y),
        torch_pullback=lambda torch, x, y, z, ct: (ct * y, ct * x),
        kinds=("normal", "normal", "normal"),
        differentiated=(0, 1),
        vjp_target="multiply",
    ),
    "where": Op(
        jof.where,
        jnp.where,
        np.where,
        lambda condition, x, y, ct: _terms(np.where(condition, ct, 0), np.where(condition, 0, ct)),
        torch=lambda torch, condition, x, y: torch.where(condition, x, y),
        torch_pullback=_where_torch_pullback,
        kinds=("condition", "normal", "normal"),
        differentiated=(1, 2),
        exact=True,
    ),
    "swiglu": Op(
        jof.swiglu,
        lambda x, gate: jax.nn.silu(gate) * x,
        lambda x, gate: _silu(gate) * x,
        _gated(_silu, _silu_slope),
        torch=_gated_torch(_functional("silu")),
        torch_pullback=_gated_torch_pullback(_functional("silu"), _aten("silu_backward")),
        wide=True,
        **_TWO,
    ),
    "geglu_tanh": Op(
        partial(jof.geglu, approximate=True),
        lambda x, gate: jax.nn.gelu(gate, approximate=True) * x,
        lambda x, gate: _gelu_tanh(gate) * x,
        _gated(_gelu_tanh, _gelu_tanh_slope),
        torch=_gated_torch(_TORCH_GELU["tanh"]),
        torch_pullback=_gated_torch_pullback(_TORCH_GELU["tanh"], _TORCH_GELU_BACK["tanh"]),
        wide=True,
        by_hand=lambda x, gate: gelu_by_hand(gate) * x,
        **_TWO,
    ),
    "geglu_erf": Op(
        partial(jof.geglu, approximate=False),
        lambda x, gate: jax.nn.gelu(gate, approximate=False) * x,
        lambda x, gate: _gelu_erf(gate) * x,
        _gated(_gelu_erf, _gelu_erf_slope),
        torch=_gated_torch(_TORCH_GELU["none"]),
        torch_pullback=_gated_torch_pullback(_TORCH_GELU["none"], _TORCH_GELU_BACK["none"]),
        wide=True,
        by_hand=lambda x, gate: _gelu_erf_by_hand(gate) * x,
        **_TWO,
    ),
}
"""The ops of the suite by the names in ``cases.ELEMENTWISE``."""
