"""Softmax, cross entropy and norms, alone and with their gradients: rows of the catalogue."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import catalogue

from .. import accuracy
from ..harness import SWEEP, Array, Case, Function, Work
from ..inputs import Input, shapes
from ..tables import size
from . import common

OPS: dict[str, Any] = {op.name: op for op in catalogue.OPS if op.family == "rows"}
GRADIENT = "value and gradient"
_LISTED = {
    "gpu": [(65536, 512), (131072, 1024), (16384, 4096), (8192, 50257), (400000, 100)],
    "cpu": [(4096, 512), (512, 4096), (4096, 333), (64, 50257)],
}
# Softmax over the tokens of vision and text transformers, whose rows are not aligned: 256 images, 6
# heads and 197 tokens are 302,592 rows.
_TOKENS = [(302592, n) for n in (77, 197, 257, 577, 785, 1025)]
# Few very long rows, such as the weights of particles.
_LONG = [(1, 1_000_000), (16, 262_144), (64, 500_000)]
# For group norm: images, pixels, channels.
_IMAGES = {"gpu": [(32, 4096, 256), (16, 1024, 512)], "cpu": [(8, 1024, 64), (2, 4096, 320)]}


def case(name: str, dims: tuple[int, ...], dtype: str, group: str, axis: int = -1) -> Case:
    """A case with rows along an axis: the last, or the second of three."""
    op = OPS[name]
    operands, options = shapes(_inputs(op, dims, dtype, axis)), _options(axis)
    nbytes = op.bytes(*operands, **options)
    if group == GRADIENT:  # also reads the cotangent, and writes the value and gradients
        result = op.result(*operands, **options)
        nbytes += sum(map(catalogue.nbytes, (result, *(operands[i] for i in op.wrt))))
    prefix = {"forward": "fwd", GRADIENT: "vag"}.get(group, group)
    full = f"{prefix}-{name}-{'x'.join(map(str, dims))}-{common.short(dtype)}"
    shape = " x ".join(map(str, dims))
    work = partial(_work, op, dims, dtype, group == GRADIENT, axis)
    suite = "strided" if options else "rows"
    return Case(suite, full, name, group, shape, dtype, nbytes, work)


def cases(platform: str) -> list[Case]:
    """Every op on rows of several lengths, and softmax over all sizes."""
    listed = [
        case(name, dims, dtype, group)
        for name in OPS
        for dims in (_IMAGES if name == "group_norm" else _LISTED)[platform]
        for dtype in ("float32", "bfloat16")
        for group in ("forward", GRADIENT)
    ]
    listed += [
        case("softmax", dims, dtype, group)
        for dims in (_TOKENS if platform == "gpu" else [])
        for dtype in ("float32", "bfloat16")
        for group in ("forward", GRADIENT)
    ]
    listed += [
        case(name, dims, dtype, group)
        for name in ("softmax", "logsumexp")
        for dims in (_LONG if platform == "gpu" else [])
        for dtype in ("float32", "bfloat16")
        for group in ("forward", GRADIENT)
    ]
    for nbytes in common.sweep_sizes(platform):
        n = min(1024, nbytes // 2)
        swept = case("softmax", (nbytes // 2 // n, n), "bfloat16", SWEEP)
        listed.append(dataclasses.replace(swept, shape=size(nbytes)))
    return listed


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: any op, forward or with its gradient, rows of any length.

    Norms of one value are 1 or -1, those of two less their mean 1 and -1, and what any form returns
    as their gradient is rounding error. None are drawn; the tests have such rows.
    """
    name, dtype = common.pick(rng, [*OPS]), common.pick(rng, common.FLOATS)
    elements = max(1, common.random_size(rng, largest) // (4 * common.itemsize(dtype)))
    n = min(elements, common.random_dimension(rng, 2 ** rng.uniform(1, 17)))
    dims: tuple[int, ...]
    if name == "group_norm":
        n = min(n, 2048)
        pixels = min(elements // n, common.random_dimension(rng, 2 ** rng.uniform(1, 14)))
        pixels = max(pixels, -(-4 * math.gcd(32, n) // n))
        dims = (max(1, elements // n // pixels), pixels, n)
    else:
        n = max(n, {"layer_norm": 4, "rms_norm": 2}.get(name, 1))
        dims = (max(1, elements // n), n)
    return case(name, dims, dtype, common.pick(rng, ("forward", GRADIENT)))


def _options(axis: int) -> dict[str, int]:
    return {} if axis == -1 else {"axis": axis}


def _inputs(op: Any, dims: tuple[int, ...], dtype: str, axis: int) -> list[Input]:
    vector = Input((dims[axis],), "float32", "divisor")
    labels = Input(dims[:1], "int32", "uniform", dims[-1])
    others = [labels if d == catalogue.INDEX else vector for d in op.domain[1:]]
    return [Input(dims, dtype), *others]


def _work(op: Any, dims: tuple[int, ...], dtype: str, gradient: bool, axis: int) -> Work:
    options = _options(axis)

    def measured(function: Function) -> Function:
        function = partial(function, **options)
        return common.with_pullback(function, op.wrt) if gradient else function

    inputs = _inputs(op, dims, dtype, axis)
    if gradient:
        inputs.append(Input(op.result(*shapes(inputs), **options).shape, dtype))
    return Work(
        inputs,
        measured(op.function),
        {form: measured(f) for form, f in common.forms_of(op, dtype).items()},
        sample=partial(_sample, op, gradient, bool(options)),
        verify=partial(_verify, op, gradient, dtype),
        terms=_terms(op, dims, axis),
        torch=None if gradient or options else _TORCH[op.name],
    )


def _terms(op: Any, dims: tuple[int, ...], axis: int) -> int:
    """The most terms in a sum, over a row or over all rows for a vector's gradient."""
    if op.name == "group_norm":
        return max(math.prod(dims[1:]) // math.gcd(32, dims[-1]), math.prod(dims[:-1]))
    return max(dims[axis], math.prod(dims) // dims[axis])


_ROWS = 8


def _sample(op: Any, gradient: bool, strided: bool, args: tuple[Array, ...], out: Any) -> Any:
    """Some rows, and entire scales. Sums over rows are only compared among the forms."""

    def some(rows: int) -> np.ndarray:
        return np.unique(np.linspace(0, rows - 1, _ROWS).astype(int))

    def of(x: Array) -> Array:
        x = jnp.take(x, some(x.shape[0]), 0, mode="clip")
        if not strided:
            return x
        x = jnp.moveaxis(jnp.take(x, some(x.shape[-1]), -1, mode="clip"), -1, 1)
        return x.reshape(-1, *x.shape[2:])

    whole = {i for i, domain in enumerate(op.domain) if i and domain != catalogue.INDEX}
    sampled = [x if i in whole else of(x) for i, x in enumerate(args)]
    return sampled, [*map(of, out[:2] if gradient else [out])]


def _verify(op: Any, gradient: bool, dtype: str, sampled: Any) -> str | None:
    args, found = jax.tree.map(lambda x: x if x.dtype.kind == "i" else np.float64(x), sampled)
    exact = [op.exact(*(args[:-1] if gradient else args))]
    if gradient:
        exact.append(op.pullback(args[-1], *args[:-1])[0])
    for y, value in zip(found, exact, strict=True):
        # Terms cancel, so errors are relative to the largest value of a row.
        axes = tuple(range(1, value.ndim)) or None
        size = np.abs(value)
        if value is not exact[0] and op.name == "softmax":
            # The gradient is computed from the rounded result. If one probability is nearly 1, the
            # whole row of the gradient cancels to less than that rounding error.
            size = np.maximum(size, np.abs(exact[0] * args[-1]))
        largest = np.max(size, axes, keepdims=True)
        bound = 4 * float(jnp.finfo(dtype).eps) * (np.abs(value) + largest) + 1e-5 * (largest + 1)
        if text := accuracy.worst(y, value, bound):
            return text
    return None


def _norm(name: str, torch: Any, x: Array, *vectors: Array) -> Array:
    vectors = tuple(v.to(x.dtype) for v in vectors)
    return getattr(torch.nn.functional, name)(x, x.shape[1:], *vectors, eps=1e-6)


_TORCH: dict[str, Function] = {
    "softmax": lambda torch, x: torch.softmax(x, -1),
    "log_softmax": lambda torch, x: torch.log_softmax(x, -1),
    "logsumexp": lambda torch, x: torch.logsumexp(x, -1),
    "cross_entropy": lambda torch, x, labels: torch.nn.functional.cross_entropy(
        x, labels.long(), reduction="none"
    ),
    "layer_norm": partial(_norm, "layer_norm"),
    "rms_norm": partial(_norm, "rms_norm"),
    "group_norm": lambda torch, x, scale, bias: torch.nn.functional.silu(
        torch.nn.functional.group_norm(
            x.movedim(-1, 1), math.gcd(32, x.shape[-1]), scale.to(x.dtype), bias.to(x.dtype), 1e-6
        )
    ).movedim(1, -1),
}
