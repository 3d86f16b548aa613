"""Casts, compared with ``astype`` and ``Tensor.to``."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from tests import catalogue

from .. import accuracy
from ..harness import SWEEP, Case, Work
from ..inputs import Input
from ..tables import size
from . import common

_PAIRS = {
    "float32": ("float16", "bfloat16", "float8_e4m3fn", "int8", "float64", "int32"),
    "float16": ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"),
    "bfloat16": ("float8_e4m3fn", "int8"),
}
_BOTH_WAYS = sorted(
    pair for a, others in _PAIRS.items() for b in others for pair in ((a, b), (b, a))
)
_DTYPES = sorted({dtype for pair in _BOTH_WAYS for dtype in pair})


def case(
    dtype: str, new: str, n: int, shape: str, group: str = "cast", kind: str = "normal"
) -> Case:
    op = f"{common.short(dtype)} to {common.short(new)}"
    prefix = f"{SWEEP}-" if group == SWEEP else ""
    name = f"{prefix}{op.replace(' ', '-')}-{common.compact(shape)}"
    nbytes = n * (common.itemsize(dtype) + common.itemsize(new))
    work, x64 = partial(_work, dtype, new, n, shape, kind), common.is_wide(dtype, new)
    return Case("cast", name, op, group, shape, dtype, nbytes, work, x64)


def cases(platform: str) -> list[Case]:
    return [
        case(a, b, common.elements(nbytes, a), shape)
        for nbytes, shape in common.array_sizes(platform)
        for a, b in _BOTH_WAYS
    ] + [
        case("float32", "bfloat16", nbytes // 4, size(nbytes), SWEEP)
        for nbytes in common.sweep_sizes(platform)
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: any two of the dtypes, any number of elements, values that overflow."""
    dtype, new = (_DTYPES[i] for i in rng.choice(len(_DTYPES), 2, replace=False))
    n = common.random_elements(rng, largest, common.itemsize(dtype) + common.itemsize(new))
    return case(dtype, new, n, str(n), kind="wide")


def _work(dtype: str, new: str, n: int, shape: str, kind: str) -> Work:
    return Work(
        [Input((n,), dtype, kind)],
        partial(catalogue.CAST.function, dtype=new),
        {"astype": partial(catalogue.CAST.replaces, dtype=new)},
        sample=accuracy.samples,
        verify=partial(_verify, new),
        exact=True,
        alone=True,
        torch=lambda torch, x: x.to(getattr(torch, new)),
        compile=(dtype, new) == ("float32", "bfloat16") and common.is_large(shape),
    )


def _verify(new: str, sampled: accuracy.Sampled) -> str | None:
    """Checks for the exact bits: results are rounded once from float64.

    Floats that become integers are truncated and saturate, and NaN becomes 0. Wider integers lose
    their high bits.
    """
    (x,), (out,) = accuracy.doubles(sampled)
    dtype = jnp.dtype(new)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.kind == "i" and sampled[0][0].dtype.kind == "i":
            expected = x.astype(np.int64).astype(dtype).astype(np.float64)
        elif dtype.kind == "i":
            about = jnp.iinfo(dtype)
            expected = np.clip(np.trunc(np.nan_to_num(x)), int(about.min), int(about.max))
        else:
            expected = x.astype(dtype).astype(np.float64)
    return accuracy.same(out, expected)
