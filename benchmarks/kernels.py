"""The kernels suite: expressions that users write, beside built-in ops and other compilers."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from jax_oneflow_ops import _compile

from . import accuracy, rivals
from .accuracy import Cotangent
from .cases import WIDTH, KernelCase
from .elementwise import OPS, gelu_by_hand, in_float32
from .harness import Input, Maker, Work

Array = Any
Function = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel or its pullback, in jnp and in PyTorch, and in float64 on the host.

    ``exact`` takes the samples, and first how far off the activations of this dtype may be, in
    those of f32. ``others`` are the modules of rivals that have it, by their names.
    """

    ours: Function
    jnp: Function
    torch: Function
    exact: Function
    inputs: tuple[str, ...]  # "array", "row" or "scalar"
    built_in: Function | None = None
    wide: bool = True  # jnp may be better off in f32
    by_hand: Function | None = None  # as in elementwise.Op
    compile: bool = False  # torch.compile has a go at it, which takes seconds
    others: dict[str, str] = field(default_factory=dict)


def work(case: KernelCase) -> Work:
    """Everything the harness needs to run a case."""
    kernel = KERNELS[case.kernel]
    functions = {"jnp": kernel.jnp}
    if kernel.wide and case.dtype != "float32":
        functions["jnp f32"] = in_float32(kernel.jnp)
    if kernel.by_hand:
        functions["jnp by hand"] = in_float32(kernel.by_hand)
    ours = kernel.ours
    if case.group == "derivative":
        ours, functions = _pullback(ours), {name: _pullback(f) for name, f in functions.items()}
    others: dict[str, Maker] = {
        name: rivals.maker(module, case.kernel)
        for name, module in kernel.others.items()
        if (name, case.dtype) != ("cupy", "bfloat16")  # which CuPy lacks
    }
    return Work(
        inputs=_inputs(case),
        ours=ours,
        target="jof_generated",
        jnp=functions,
        torch=kernel.torch,
        compile=kernel.compile and case.dtype != "float16",
        check=partial(_check, case),
        exact=False,
        alone=True,
        others=others,
        variants={"built-in": kernel.built_in} if kernel.built_in else {},
        ceilings=("copy",),
    )


def _inputs(case: KernelCase) -> list[Input]:
    kinds: dict[str, tuple[tuple[int, ...], str]] = {
        "array": ((case.elements // WIDTH, WIDTH), "normal"),
        "row": ((WIDTH,), "normal"),
        "scalar": ((), "scalar"),
    }
    shapes = (kinds[name] for name in KERNELS[case.kernel].inputs)
    return [Input(shape, case.dtype, kind) for shape, kind in shapes]


def _pullback(function: Function) -> Function:
    """With respect to all arrays but the last, which is the cotangent."""
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])


def _check(case: KernelCase, args: tuple[Array, ...], out: Any) -> str | None:
    """What is wrong with samples of a result."""
    shape = args[0].shape
    samples = (accuracy.sample(jnp.broadcast_to(x, shape) if x.ndim else x) for x in args)
    host = [x.astype(np.float64) for x in samples]
    # Activations are as accurate as results of 16 bits need, a relative 2^-15.
    coarser = 1 if case.dtype == "float32" else 64
    with np.errstate(all="ignore"):
        expected = KERNELS[case.kernel].exact(coarser, *host)
    for i, (result, y) in enumerate(zip(expected, jax.tree.leaves(out), strict=True)):
        bound = accuracy.cotangent_bound(result, case.dtype)
        if wrong := accuracy.worst(accuracy.sample(y), result.exact, bound):
            return f"result {i}: {wrong}"
    return None


def notes() -> list[str]:
    """How long it takes to lower a call of a kernel that is used for the first time."""
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")
    one = jax.ShapeDtypeStruct((), "bfloat16")

    def milliseconds() -> float:
        _compile._compiled.clear()
        begin = time.perf_counter()
        jax.jit(lambda *args: _CHAIN(*args)).lower(x, one, one)
        return (time.perf_counter() - begin) * 1e3

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"JAX_ONEFLOW_OPS_CACHE_DIR": folder}),
    ):
        first = milliseconds()
        cached = statistics.median(milliseconds() for _ in range(5))
    return [
        f"the first use of the chain in bf16 took {first:.0f} ms to compile and lower, "
        f"{cached:.1f} ms from the cache on disk"
    ]


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
    value = np.maximum(OPS["silu"].value(h), 0) * 0.5 + np.tanh(h)
    return [Cotangent(value, cancelling=np.abs(x * s) + np.abs(b))]


def _exact_gelu(coarser: int, x: Array, scale: Array, bias: Array) -> list[Cotangent]:
    h = x * scale + bias
    cancelling = np.abs(x * scale) + np.abs(bias)
    return [Cotangent(OPS["gelu_tanh"].value(h), cancelling, argument=h)]


def _exact_residual(
    coarser: int, x: Array, residual: Array, alpha: Array, scale: Array, bias: Array
) -> list[Cotangent]:
    (y,) = _exact_gelu(coarser, x, scale, bias)
    term = alpha * y.exact
    return [Cotangent(residual + term, y.cancelling + np.abs(residual) + coarser * np.abs(term))]


def _exact_squared_diff_vjp(coarser: int, x: Array, y: Array, ct: Array) -> list[Cotangent]:
    return [Cotangent(2 * (x - y) * ct), Cotangent(-2 * (x - y) * ct)]


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
        _SILU,
        jax.nn.silu,
        lambda torch, x: torch.nn.functional.silu(x),
        lambda coarser, x: [Cotangent(OPS["silu"].value(x), argument=x)],
        ("array",),
        built_in=jof.silu,
    ),
    "multiply": Kernel(
        _MULTIPLY,
        jnp.multiply,
        lambda torch, x, y: x * y,
        lambda coarser, x, y: [Cotangent(x * y)],
        ("array", "array"),
        built_in=jof.multiply,
        wide=False,
    ),
    "chain": Kernel(
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
        _BIAS_GELU,
        partial(_bias_gelu, jax.nn.gelu),
        _with_torch_gelu(_bias_gelu),
        _exact_gelu,
        ("array", "scalar", "row"),
        by_hand=partial(_bias_gelu, gelu_by_hand),
        compile=True,
    ),
    "residual_gelu": Kernel(
        _RESIDUAL_GELU,
        partial(_residual_gelu, jax.nn.gelu),
        _with_torch_gelu(_residual_gelu),
        _exact_residual,
        ("array", "array", "scalar", "scalar", "row"),
        by_hand=partial(_residual_gelu, gelu_by_hand),
        compile=True,
    ),
    "squared_diff": Kernel(
        _DIFFERENTIABLE,
        _squared_diff,
        lambda torch, x, y: _squared_diff(x, y),
        lambda coarser, x, y: [Cotangent((x - y) ** 2)],
        ("array", "array"),
        others={"cupy": "cupy_kernels"},
    ),
    "squared_diff_vjp": Kernel(
        _DIFFERENTIABLE,
        _squared_diff,
        _squared_diff_vjp_in_torch,
        _exact_squared_diff_vjp,
        ("array", "array", "array"),
    ),
}
"""The kernels of the suite by the names in ``cases.KERNELS``."""
