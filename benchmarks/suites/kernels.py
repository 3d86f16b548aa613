"""Kernels that users write as an expression, compared with jnp and other compilers."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_oneflow_ops as jof
from tests import catalogue

from .. import accuracy
from ..accuracy import Exact
from ..harness import Array, Case, Function, Work
from ..inputs import Input
from . import common

WIDTH = 4096
"""The last axis of the arrays, and so the length of a row."""

_BY_HAND = SimpleNamespace(
    gelu=catalogue.gelu_by_hand,
    relu=jax.nn.relu,
    sigmoid=jax.nn.sigmoid,
    tanh=lambda x: 2 * jax.nn.sigmoid(2 * x) - 1,
)
_EXACT = SimpleNamespace(
    gelu=catalogue.gelu_tanh,
    relu=lambda x: np.maximum(x, 0),
    sigmoid=catalogue.logistic,
    tanh=np.tanh,
)


class Kernel(NamedTuple):
    """A kernel with a body in C++, and its formula in terms of a library's functions."""

    text: str
    operands: str  # such as "T x, T s"
    formula: Callable[..., Any]  # takes the functions, then the operands
    inputs: str  # one letter per operand: array, row or scalar; pullback: the cotangent, too
    argument: Callable[..., Any] = lambda *operands: 0.0  # accuracy.Exact's
    body: str = ""  # in C++, if it differs from the text
    slopes: dict[str, str] | None = None  # the derivatives of a pullback


def case(name: str, dtype: str, n: int, shape: str) -> Case:
    kernel = KERNELS[name]
    arrays = kernel.inputs.count("a") + (len(kernel.slopes) if kernel.slopes else 1)
    elements = arrays * n + WIDTH * kernel.inputs.count("r")
    group = "derivative" if kernel.slopes else "forward"
    full = f"{name}-{common.compact(shape)}-{common.short(dtype)}"
    nbytes = elements * common.itemsize(dtype)
    work = partial(_work, kernel, name, dtype, n)
    return Case("kernels", full, kernel.text, group, shape, dtype, nbytes, work)


def cases(platform: str) -> list[Case]:
    nbytes, shape = (256 << 20, "256 MiB") if platform == "gpu" else common.array_sizes("cpu")[0]
    dtypes = ("float32", "bfloat16", "float16")
    return [case(name, d, common.elements(nbytes, d), shape) for d in dtypes for name in KERNELS]


def _work(kernel: Kernel, name: str, dtype: str, n: int) -> Work:
    ours: Function = jof.ElementwiseKernel(
        kernel.operands,
        "T z",
        kernel.body or f"z = {kernel.text}",
        f"{name}_kernel",
        derivatives=kernel.slopes,
    )
    forms: dict[str, Function] = {"jnp": partial(kernel.formula, jax.nn)}
    if dtype != "float32":
        forms["jnp f32"] = catalogue.in_float32(forms["jnp"])
    if by_hand := name in _FUSED:
        forms["jnp by hand"] = catalogue.in_float32(partial(kernel.formula, _BY_HAND))
    if kernel.slopes:
        wrt = range(len(kernel.slopes))
        ours = common.pullback(ours, wrt)
        forms = {form: common.pullback(f, wrt) for form, f in forms.items()}
    array, row = Input((n // WIDTH, WIDTH), dtype), Input((WIDTH,), dtype)
    inputs = {"a": array, "r": row, "s": Input((), dtype, "scalar")}
    return Work(
        [inputs[kind] for kind in kernel.inputs],
        lambda *args, implementation: ours(*args),
        forms,
        sample=accuracy.samples,
        verify=partial(_verify, kernel, dtype),
        alone=True,
        torch=None if kernel.slopes else partial(_torch, kernel),
        compile=by_hand and dtype != "float16",
    )


def _torch(kernel: Kernel, torch: Any, *args: Array) -> Any:
    functions = {name: getattr(torch.nn.functional, name) for name in vars(_EXACT)}
    functions["gelu"] = partial(functions["gelu"], approximate="tanh")
    return kernel.formula(SimpleNamespace(**functions), *args)


def _verify(kernel: Kernel, dtype: str, sampled: accuracy.Sampled) -> str | None:
    args, out = accuracy.doubles(sampled)
    formula = partial(kernel.formula, _EXACT)
    if kernel.slopes:
        x, y, ct = args
        expected = [Exact(2 * (x - y) * ct), Exact(-2 * (x - y) * ct)]
    else:
        # Terms that cancel have the errors of their operands. In 16-bit dtypes an activation has a
        # relative error of 2^-15, 64 times that in f32. `bound` allows eight times 2^-24 of the
        # terms.
        coarser, exact = 1 if dtype == "float32" else 64, formula(*args)
        moved = (formula(*args[:i], x * (1 + 2.0**-20), *args[i + 1 :]) for i, x in enumerate(args))
        terms = coarser * 2.0**20 * sum(np.abs(y - exact) for y in moved)
        expected = [Exact(exact, terms, kernel.argument(*args))]
    return accuracy.wrong(out, expected, dtype)


def _chain(f: Any, x: Array, s: Array, b: Array) -> Array:
    h = x * s + b
    return f.relu(h * f.sigmoid(h)) * 0.5 + f.tanh(h)


def _squared_diff(f: Any, x: Array, y: Array) -> Array:
    return (x - y) * (x - y)


_FUSED = ("chain", "bias_gelu", "residual_gelu")
_SQUARE = "(x - y) * (x - y)"
KERNELS = {
    "chain": Kernel(
        "max(h * sigmoid(h), 0) * 0.5 + tanh(h), h = x * s + b",
        "T x, T s, T b",
        _chain,
        "ass",
        body="auto h = x * s + b; z = max(h * sigmoid(h), 0) * 0.5f + tanh(h)",
    ),
    "bias_gelu": Kernel(
        "gelu(x * scale + bias)",
        "T x, T scale, T bias",
        lambda f, x, scale, bias: f.gelu(x * scale + bias),
        "asr",
        lambda x, s, b: x * s + b,
    ),
    "residual_gelu": Kernel(
        "residual + alpha * gelu(x * scale + bias)",
        "T x, T residual, T alpha, T scale, T bias",
        lambda f, x, residual, alpha, s, b: residual + alpha * f.gelu(x * s + b),
        "aassr",
    ),
    "squared_diff": Kernel(_SQUARE, "T x, T y", _squared_diff, "aa"),
    "squared_diff_vjp": Kernel(
        f"gradient of {_SQUARE}",
        "T x, T y",
        _squared_diff,
        "aaa",
        body=f"z = {_SQUARE}",
        slopes={"x": "2 * (x - y)", "y": "-2 * (x - y)"},
    ),
}
"""By the names of cases."""
