"""Kernels that users write as an expression, beside built-in ops and other compilers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

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


def _functions_of(torch: Any) -> SimpleNamespace:
    found = SimpleNamespace(**{name: getattr(torch.nn.functional, name) for name in vars(_EXACT)})
    found.gelu = partial(found.gelu, approximate="tanh")
    return found


@dataclass(frozen=True)
class Kernel:
    """A kernel from a body in C++, and its formula over the functions of a library.

    ``cancelling`` and ``argument`` are those of accuracy.Exact; the former takes the error of
    activations, relative to that in float32, first.
    """

    text: str
    operands: str  # such as "T x, T s"
    body: str
    formula: Callable[..., Any]  # of the functions, then the operands
    inputs: str  # a letter an operand: an array, a row or a scalar; of a pullback the cotangent
    cancelling: Callable[..., Any] = lambda coarser, *operands: 0.0
    argument: Callable[..., Any] = lambda *operands: 0.0
    pullback: bool = False

    def ours(self, name: str) -> Function:
        """Makes the kernel."""
        slopes = {"x": "2 * (x - y)", "y": "-2 * (x - y)"} if "- y" in self.body else None
        return jof.ElementwiseKernel(self.operands, "T z", self.body, name, derivatives=slopes)


def case(name: str, dtype: str, n: int, shape: str) -> Case:
    """A kernel on arrays of n elements."""
    kernel = KERNELS[name]
    arrays = kernel.inputs.count("a") + (2 if kernel.pullback else 1)
    elements = arrays * n + WIDTH * kernel.inputs.count("r")
    group = "derivative" if kernel.pullback else "forward"
    full = f"{name}-{common.compact(shape)}-{common.short(dtype)}"
    nbytes = elements * common.itemsize(dtype)
    work = partial(_work, kernel, name, dtype, n)
    return Case("kernels", full, kernel.text, group, shape, dtype, nbytes, work)


def cases(platform: str) -> list[Case]:
    """Every kernel in three dtypes."""
    nbytes, shape = (256 << 20, "256 MiB") if platform == "gpu" else common.array_sizes("cpu")[0]
    dtypes = ("float32", "bfloat16", "float16")
    return [case(name, d, common.elements(nbytes, d), shape) for d in dtypes for name in KERNELS]


def _work(kernel: Kernel, name: str, dtype: str, n: int) -> Work:
    ours, by_hand = kernel.ours(f"{name}_kernel"), name in _FUSED
    forms: dict[str, Function] = {"jnp": partial(kernel.formula, jax.nn)}
    if dtype != "float32":
        forms["jnp f32"] = catalogue.in_float32(forms["jnp"])
    if by_hand:
        forms["jnp by hand"] = catalogue.in_float32(partial(kernel.formula, _BY_HAND))
    if kernel.pullback:
        arrays = range(len(kernel.inputs) - 1)  # the cotangent is none of them
        ours = common.pullback(ours, arrays)
        forms = {form: common.pullback(f, arrays) for form, f in forms.items()}
    inputs = {
        "a": Input((n // WIDTH, WIDTH), dtype),
        "r": Input((WIDTH,), dtype),
        "s": Input((), dtype, "scalar"),
    }
    return Work(
        [inputs[kind] for kind in kernel.inputs],
        lambda *args, implementation: ours(*args),
        forms,
        sample=accuracy.samples,
        verify=partial(_verify, kernel, dtype),
        alone=True,
        torch=None if kernel.pullback else partial(_torch, kernel),
        compile=by_hand and dtype != "float16",
        effort=1.0,
    )


def _torch(kernel: Kernel, torch: Any, *args: Array) -> Any:
    return kernel.formula(_functions_of(torch), *args)


def _verify(kernel: Kernel, dtype: str, sampled: accuracy.Sampled) -> str | None:
    args, out = accuracy.doubles(sampled)
    if kernel.pullback:
        x, y, ct = args
        expected = [Exact(2 * (x - y) * ct), Exact(-2 * (x - y) * ct)]
    else:
        # In 16 bits an activation has a relative error of 2^-15, 64 times that in f32.
        cancelling = kernel.cancelling(1 if dtype == "float32" else 64, *args)
        expected = [Exact(kernel.formula(_EXACT, *args), cancelling, kernel.argument(*args))]
    return accuracy.wrong(out, expected, dtype)


# ---- the kernels ----


def _chain(f: Any, x: Array, s: Array, b: Array) -> Array:
    h = x * s + b
    return f.relu(h * f.sigmoid(h)) * 0.5 + f.tanh(h)


def _of_sum(coarser: int, x: Array, s: Array, b: Array) -> Array:
    return np.abs(x * s) + np.abs(b)


def _of_residual(coarser: int, x: Array, r: Array, alpha: Array, s: Array, b: Array) -> Array:
    term = np.abs(alpha * catalogue.gelu_tanh(x * s + b))
    return _of_sum(coarser, x, s, b) + np.abs(r) + coarser * term


_FUSED = ("chain", "bias_gelu", "residual_gelu")
_SQUARE = "(x - y) * (x - y)"
KERNELS = {
    "chain": Kernel(
        "max(h * sigmoid(h), 0) * 0.5 + tanh(h), h = x * s + b",
        "T x, T s, T b",
        "auto h = x * s + b; z = max(h * sigmoid(h), 0) * 0.5f + tanh(h)",
        _chain,
        "ass",
        cancelling=_of_sum,
    ),
    "bias_gelu": Kernel(
        "gelu(x * scale + bias)",
        "T x, T scale, T bias",
        "z = gelu(x * scale + bias)",
        lambda f, x, scale, bias: f.gelu(x * scale + bias),
        "asr",
        cancelling=_of_sum,
        argument=lambda x, s, b: x * s + b,
    ),
    "residual_gelu": Kernel(
        "residual + alpha * gelu(x * scale + bias)",
        "T x, T residual, T alpha, T scale, T bias",
        "z = residual + alpha * gelu(x * scale + bias)",
        lambda f, x, residual, alpha, s, b: residual + alpha * f.gelu(x * s + b),
        "aassr",
        cancelling=_of_residual,
    ),
    "squared_diff": Kernel(
        _SQUARE, "T x, T y", f"z = {_SQUARE}", lambda f, x, y: (x - y) * (x - y), "aa"
    ),
    "squared_diff_vjp": Kernel(
        f"gradient of {_SQUARE}",
        "T x, T y",
        f"z = {_SQUARE}",
        lambda f, x, y: (x - y) * (x - y),
        "aaa",
        pullback=True,
    ),
}
"""By the names that cases have."""
