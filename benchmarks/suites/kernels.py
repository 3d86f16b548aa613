"""Kernels that users write as an expression, beside built-in ops and other compilers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import oracle

from .. import accuracy, rivals
from ..accuracy import Cotangent
from ..harness import Case, Function, Work
from ..inputs import Input
from . import array_sizes, compact, elements, in_float32, itemsize, short, size
from .elementwise import gelu_by_hand

Array = Any

WIDTH = 4096
"""The last axis of the arrays, and so the length of a row."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or its pullback, in jnp and in PyTorch, and in float64 on the host.

    ``exact`` takes the samples after ``coarser``, the error of an activation in this dtype relative
    to that in f32. ``others`` are the rivals that have it, by the names of their modules.
    """

    text: str
    ours: Function
    jnp: Function
    torch: Function
    exact: Function
    inputs: tuple[str, ...]  # "array", "row" or "scalar"
    results: int = 1
    gradient: bool = False
    built_in: Function | None = None
    wide: bool = True  # jnp may be faster in f32
    by_hand: Function | None = None
    compile: bool = False
    others: dict[str, str] = field(default_factory=dict)


def case(name: str, dtype: str, n: int, shape: str) -> Case:
    """A kernel on arrays of n elements."""
    kernel = KERNELS[name]
    arrays = kernel.inputs.count("array") + kernel.results
    nbytes = (arrays * n + WIDTH * kernel.inputs.count("row")) * itemsize(dtype)
    group = "derivative" if kernel.gradient else "forward"
    work = partial(_work, kernel, name, dtype, n)
    full = f"{name}-{compact(shape)}-{short(dtype)}"
    return Case("kernels", full, kernel.text, group, shape, dtype, nbytes, work)


def cases(platform: str, quick: bool = False) -> list[Case]:
    """``quick`` keeps two kernels and dtypes."""
    nbytes, shape = (256 << 20, size(256 << 20)) if platform == "gpu" else array_sizes("cpu")[0]
    names = ("silu", "chain") if quick else KERNELS
    dtypes = ("float32", "bfloat16") if quick else ("float32", "bfloat16", "float16")
    return [case(name, d, elements(nbytes, d), shape) for d in dtypes for name in names]


def _work(kernel: Kernel, name: str, dtype: str, n: int) -> Work:
    forms = {"jnp": kernel.jnp}
    if kernel.wide and dtype != "float32":
        forms["jnp f32"] = in_float32(kernel.jnp, dtype)
    if kernel.by_hand:
        forms["jnp by hand"] = in_float32(kernel.by_hand, dtype)
    ours = kernel.ours
    if kernel.gradient:
        ours, forms = _pullback(ours), {form: _pullback(f) for form, f in forms.items()}
    shapes = {"array": (n // WIDTH, WIDTH), "row": (WIDTH,), "scalar": ()}
    values = {"scalar": "scalar"}
    return Work(
        [Input(shapes[kind], dtype, values.get(kind, "normal")) for kind in kernel.inputs],
        lambda *args, implementation: ours(*args),
        forms,
        sample=accuracy.samples,
        verify=partial(_verify, kernel, dtype),
        alone=True,
        variants={"built-in": kernel.built_in} if kernel.built_in else {},
        torch=kernel.torch,
        compile=kernel.compile and dtype != "float16",
        others={
            rival: rivals.maker(module, name)
            for rival, module in kernel.others.items()
            if (rival, dtype) != ("cupy", "bfloat16")  # which CuPy lacks
        },
        effort=1.0,
    )


def _pullback(function: Function) -> Function:
    """With respect to all arrays but the last, which is the cotangent."""
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])


def _verify(
    kernel: Kernel, dtype: str, sampled: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
) -> str | None:
    args, out = accuracy.doubles(sampled)
    # In 16 bits activations have a relative error of 2^-15.
    coarser = 1 if dtype == "float32" else 64
    with np.errstate(all="ignore"):
        expected = kernel.exact(coarser, *args)
    return accuracy.worst_cotangent(out, expected, dtype)


# ---- the kernels ----

_SILU = jof.ElementwiseKernel("T x", "T y", "y = silu(x)", "silu_expression")
_MULTIPLY = jof.ElementwiseKernel("T x, T y", "T z", "z = x * y", "multiply_expression")
_CHAIN = jof.ElementwiseKernel(
    "T x, T s, T b",
    "T z",
    "auto h = x * s + b; z = max(h * sigmoid(h), 0) * 0.5f + tanh(h)",
    "chain",
)
_BIAS_GELU = jof.ElementwiseKernel(
    "T x, T scale, T bias", "T y", "y = gelu(x * scale + bias)", "bias_gelu"
)
_RESIDUAL_GELU = jof.ElementwiseKernel(
    "T x, T residual, T alpha, T scale, T bias",
    "T y",
    "y = residual + alpha * gelu(x * scale + bias)",
    "residual_gelu",
)
_DIFFERENTIABLE = jof.ElementwiseKernel(
    "T x, T y",
    "T z",
    "z = (x - y) * (x - y)",
    "squared_diff",
    derivatives={"x": "2 * (x - y)", "y": "-2 * (x - y)"},
)

_silu, _gelu = oracle.ACTIVATIONS["silu"][0], oracle.ACTIVATIONS["gelu_tanh"][0]


def _chain_in_jnp(x: Array, s: Array, b: Array) -> Array:
    h = x * s + b
    return jnp.maximum(h * jax.nn.sigmoid(h), 0) * 0.5 + jnp.tanh(h)


def _chain_by_hand(x: Array, s: Array, b: Array) -> Array:
    h = x * s + b
    return jnp.maximum(h * jax.nn.sigmoid(h), 0) * 0.5 + (2 * jax.nn.sigmoid(2 * h) - 1)


def _chain_in_torch(torch: Any, x: Array, s: Array, b: Array) -> Array:
    h = x * s + b
    return torch.relu(h * torch.sigmoid(h)) * 0.5 + torch.tanh(h)


def _exact_chain(coarser: int, x: Array, s: Array, b: Array) -> list[Cotangent]:
    h = x * s + b
    value = np.maximum(_silu(h), 0) * 0.5 + np.tanh(h)
    return [Cotangent(value, cancelling=np.abs(x * s) + np.abs(b))]


def _exact_gelu(coarser: int, x: Array, scale: Array, bias: Array) -> list[Cotangent]:
    h = x * scale + bias
    return [Cotangent(_gelu(h), np.abs(x * scale) + np.abs(bias), argument=h)]


def _exact_residual(
    coarser: int, x: Array, residual: Array, alpha: Array, scale: Array, bias: Array
) -> list[Cotangent]:
    (y,) = _exact_gelu(coarser, x, scale, bias)
    term = alpha * y.exact
    return [Cotangent(residual + term, y.cancelling + np.abs(residual) + coarser * np.abs(term))]


def _bias_gelu(gelu: Function, x: Array, scale: Array, bias: Array) -> Array:
    return gelu(x * scale + bias)


def _residual_gelu(
    gelu: Function, x: Array, residual: Array, alpha: Array, scale: Array, bias: Array
) -> Array:
    return residual + alpha * gelu(x * scale + bias)


def _with_torch_gelu(function: Function) -> Function:
    def run(torch: Any, *arrays: Array) -> Array:
        return function(partial(torch.nn.functional.gelu, approximate="tanh"), *arrays)

    return run


def _squared_diff(x: Array, y: Array) -> Array:
    return (x - y) * (x - y)


def _squared_diff_vjp_in_torch(torch: Any, x: Array, y: Array, ct: Array) -> tuple[Array, Array]:
    scaled = 2 * (x - y) * ct
    return scaled, -scaled


KERNELS: dict[str, Kernel] = {
    "silu": Kernel(
        "silu(x)",
        _SILU,
        jax.nn.silu,
        lambda torch, x: torch.nn.functional.silu(x),
        lambda coarser, x: [Cotangent(_silu(x), argument=x)],
        ("array",),
        built_in=jof.silu,
    ),
    "multiply": Kernel(
        "x * y",
        _MULTIPLY,
        jnp.multiply,
        lambda torch, x, y: x * y,
        lambda coarser, x, y: [Cotangent(x * y)],
        ("array", "array"),
        built_in=jof.multiply,
        wide=False,
    ),
    "chain": Kernel(
        "max(h * sigmoid(h), 0) * 0.5 + tanh(h), h = x * s + b",
        _CHAIN,
        _chain_in_jnp,
        _chain_in_torch,
        _exact_chain,
        ("array", "scalar", "scalar"),
        by_hand=_chain_by_hand,
        compile=True,
        others={"triton": "triton_kernels"},
    ),
    "bias_gelu": Kernel(
        "gelu(x * scale + bias)",
        _BIAS_GELU,
        partial(_bias_gelu, jax.nn.gelu),
        _with_torch_gelu(_bias_gelu),
        _exact_gelu,
        ("array", "scalar", "row"),
        by_hand=partial(_bias_gelu, gelu_by_hand),
        compile=True,
    ),
    "residual_gelu": Kernel(
        "residual + alpha * gelu(x * scale + bias)",
        _RESIDUAL_GELU,
        partial(_residual_gelu, jax.nn.gelu),
        _with_torch_gelu(_residual_gelu),
        _exact_residual,
        ("array", "array", "scalar", "scalar", "row"),
        by_hand=partial(_residual_gelu, gelu_by_hand),
        compile=True,
    ),
    "squared_diff": Kernel(
        "(x - y) * (x - y)",
        _DIFFERENTIABLE,
        _squared_diff,
        lambda torch, x, y: _squared_diff(x, y),
        lambda coarser, x, y: [Cotangent((x - y) ** 2)],
        ("array", "array"),
        others={"cupy": "cupy_kernels"},
    ),
    "squared_diff_vjp": Kernel(
        "gradient of (x - y) * (x - y)",
        _DIFFERENTIABLE,
        _squared_diff,
        _squared_diff_vjp_in_torch,
        lambda coarser, x, y, ct: [Cotangent(2 * (x - y) * ct), Cotangent(-2 * (x - y) * ct)],
        ("array", "array", "array"),
        results=2,
        gradient=True,
    ),
}
"""The kernels by the names that cases have."""
