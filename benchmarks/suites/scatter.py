"""Sums and lookups of rows: ``segment_sum``, ``scatter_add``, ``embedding_lookup``."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import catalogue

from .. import accuracy
from ..harness import SWEEP, Array, Case, Function, Work
from ..inputs import Input
from ..tables import size
from . import common

_LARGE_TABLE = 64 << 20  # clearing or copying a table of this many bytes costs more than launches


class Problem(NamedTuple):
    """``rows`` rows of ``width`` elements; ``ids`` says how they map to ``segments`` rows.

    Groups: "segment_sum"; "scatter_add" into an operand, and "scatter_add in place" into one that
    is donated; "embedding gradient" and "embedding"; "sweep", a segment_sum. Ids: the kinds of
    indices in ``inputs.Input``.
    """

    group: str
    rows: int
    width: int
    segments: int
    ids: str
    dtype: str

    @property
    def function(self) -> str:
        return "segment_sum" if self.group == SWEEP else self.group.removesuffix(" in place")

    @property
    def in_place(self) -> bool:
        return self.group.endswith(" in place")

    @property
    def bytes(self) -> int:
        """The bytes moved.

        If a table is looked up or updated in place, only the rows that are used count.
        """
        hit = min(self.rows, self.segments)
        also = {"scatter_add": 2 * self.segments, "scatter_add in place": 2 * hit, "embedding": hit}
        rows = self.rows + also.get(self.group, self.segments)
        return rows * self.width * common.itemsize(self.dtype) + 4 * self.rows


def case(p: Problem, shape: str = "") -> Case:
    rows, segments = common.count(p.rows), common.count(p.segments)
    start = f"{p.group.replace(' ', '_')}-{rows}x{p.width}-to-{segments}-{p.ids}"
    name = f"{start}-{common.short(p.dtype)}"
    shown = shape or f"{rows}x{p.width} to {segments}, {p.ids}"
    work = partial(_work, p)
    op = p.function if p.group == SWEEP else p.group
    return Case("scatter", name, op, p.group, shown, p.dtype, p.bytes, work)


# The function and the kind of ids, then (rows, width, segments) on a GPU and on a CPU.
_LISTED = [
    ("segment_sum", "uniform", (16 << 20, 1, 1024), (1 << 20, 1, 1024)),
    ("segment_sum", "uniform", (16 << 20, 1, 1 << 20), (1 << 20, 1, 64 << 10)),
    ("segment_sum", "sorted", (16 << 20, 1, 1 << 20), (1 << 20, 1, 64 << 10)),
    ("segment_sum", "uniform", (1 << 20, 128, 10_000), (64 << 10, 128, 1000)),
    ("segment_sum", "hot", (1 << 20, 128, 10_000), (64 << 10, 128, 1000)),
    ("segment_sum", "sorted", (1 << 20, 128, 10_000), (64 << 10, 128, 1000)),
    ("scatter_add", "uniform", (1 << 20, 128, 10_000), (64 << 10, 128, 1000)),
    ("scatter_add in place", "uniform", (1 << 20, 128, 10_000), (64 << 10, 128, 1000)),
    ("scatter_add", "uniform", (4096, 2048, 128 << 10), (1024, 1024, 16 << 10)),
    ("scatter_add in place", "uniform", (4096, 2048, 128 << 10), (1024, 1024, 16 << 10)),
    ("embedding gradient", "skewed", (256 << 10, 2048, 128 << 10), (8 << 10, 1024, 16 << 10)),
    ("embedding gradient", "uniform", (256 << 10, 2048, 128 << 10), (8 << 10, 1024, 16 << 10)),
    ("embedding", "skewed", (256 << 10, 2048, 128 << 10), (8 << 10, 1024, 16 << 10)),
    ("embedding", "uniform", (256 << 10, 2048, 128 << 10), (8 << 10, 1024, 16 << 10)),
]


def cases(platform: str) -> list[Case]:
    """The listed cases, and a sweep of bf16 rows of 128 elements, about 64 rows per segment."""
    return [
        case(Problem(group, *(gpu if platform == "gpu" else cpu), ids, dtype))
        for group, ids, gpu, cpu in _LISTED
        for dtype in common.FLOATS
    ] + [
        case(Problem(SWEEP, n // 256, 128, max(1, n >> 14), "uniform", "bfloat16"), size(n))
        for n in common.sweep_sizes(platform)
    ]


_WIDTHS = (1, 1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 768, 1000, 2048)


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: any function, width, number of segments and distribution of ids."""
    group = common.pick(rng, [*_OPS, "scatter_add in place"])
    dtype = common.pick(rng, common.FLOATS)
    width = common.pick(rng, _WIDTHS)
    row = width * common.itemsize(dtype) + 4
    most = max(1, min(largest, 256 << 20) // (3 * row))
    rows = min(most, max(1, common.random_size(rng, largest) // row))
    share = math.exp(rng.uniform(math.log(max(1e-4, 2 / rows)), math.log(4)))
    segments = max(1, min(most, int(rows * share)))
    ids = common.pick(rng, ("uniform", "zipf", "hot", "one", "sorted"))
    return case(Problem(group, rows, width, segments, ids, dtype))


_OPS = {
    "segment_sum": catalogue.SEGMENT_SUM,
    "scatter_add": catalogue.SCATTER_ADD,
    "embedding gradient": catalogue.EMBEDDING_LOOKUP,
    "embedding": catalogue.EMBEDDING_LOOKUP,
}
"""The rows of the catalogue that the functions of problems call."""


def _work(p: Problem) -> Work:
    on_gpu, sums = jax.default_backend() == "gpu", p.group != "embedding"
    clears = p.group in ("scatter_add", "embedding gradient")
    table = p.segments * p.width * common.itemsize(p.dtype)
    wall = on_gpu and clears and table >= _LARGE_TABLE
    ours = _called(p, _OPS[p.function].function)
    return Work(
        _inputs(p),
        ours,
        _forms(p),
        sample=partial(_sample, p) if sums else _sample_rows,
        verify=partial(_verify, p) if sums else lambda rows: accuracy.same(*rows),
        exact=not sums,
        terms=p.rows,
        variants={"deterministic": partial(ours, deterministic=True)} if sums else {},
        torch=partial(_TORCH[p.function], p),
        torch_inputs=(lambda torch, *x: (x[0].clone(), *x[1:])) if p.in_place else None,
        donated=p.in_place,
        wall=wall,
    )


def _inputs(p: Problem) -> list[Input]:
    rows, table = (
        Input((n, p.width) if p.width > 1 else (n,), p.dtype) for n in (p.rows, p.segments)
    )
    ids = Input((p.rows,), "int32", p.ids, p.segments)
    if p.function == "scatter_add":
        return [table, ids, rows]
    return [table if p.function == "embedding" else rows, ids]


def _called(p: Problem, function: Function) -> Function:
    """A function, ours or another, that takes the problem's inputs."""
    if p.function == "segment_sum":
        in_order = p.ids == "sorted"
        return partial(function, num_segments=p.segments, indices_are_sorted=in_order)
    if p.function == "embedding gradient":
        return partial(_gradient, p, function)
    return function


def _gradient(
    p: Problem, function: Function, cotangent: Array, ids: Array, **options: Any
) -> Array:
    """The gradient alone; it does not depend on the table's values."""
    table = jnp.zeros((p.segments, *cotangent.shape[1:]), cotangent.dtype)
    return common.pullback(partial(function, **options))(table, ids, cotangent)[0]


_TORCH: dict[str, Function] = {
    "segment_sum": lambda p, torch, data, ids: data.new_zeros(
        (p.segments, *data.shape[1:])
    ).index_add_(0, ids, data),
    "scatter_add": lambda p, torch, operand, ids, x: (
        operand.index_add_(0, ids, x) if p.in_place else operand.index_add(0, ids, x)
    ),
    "embedding gradient": lambda p, torch, ct, ids: torch.ops.aten.embedding_dense_backward(
        ct, ids, p.segments, -1, False
    ),
    "embedding": lambda p, torch, table, ids: torch.nn.functional.embedding(ids, table),
}


def _forms(p: Problem) -> dict[str, Function]:
    """The jnp forms: as users write it, widened to f32, and with fewer atomic conflicts."""
    forms = {"jnp": _called(p, _OPS[p.function].replaces)}
    if p.group == "embedding":
        return forms | {"jnp in bounds": catalogue.EMBEDDING_LOOKUP.best["in bounds"]}
    on_gpu = jax.default_backend() == "gpu"
    if p.dtype != "float32":
        forms["jnp f32"] = catalogue.in_float32(forms["jnp"])
        if on_gpu and p.ids in ("hot", "one") and p.rows > 1 << 16:
            forms.pop("jnp")  # 16-bit atomics on one row wait for each other: seconds per call
    if on_gpu and p.group in ("segment_sum", "embedding gradient") and p.ids != "sorted":
        fast = common.forms_of(catalogue.SEGMENT_SUM, p.dtype)
        parted = p.rows >= 64 * p.segments  # 16 tables or more
        for name in ["jnp in parts"] * parted + ["jnp sorted"]:
            forms[name] = partial(fast[name], num_segments=p.segments)
    return forms


def columns(width: int) -> np.ndarray:
    """About eight columns, and the last; their stride is odd, to cover all pack positions."""
    return np.unique([*range(0, width, (width // 8) | 1), width - 1])


def _sample(p: Problem, args: Sequence[Array], out: Array) -> tuple[Array, list[Array]]:
    """The ids, and some columns of the result, the updates and the operand."""
    arrays = [out, *reversed([x for x in args if jnp.issubdtype(x.dtype, jnp.floating)])]
    return args[1], [x.reshape(x.shape[0], -1)[:, columns(p.width)] for x in arrays]


def _verify(p: Problem, sampled: tuple[np.ndarray, list[np.ndarray]]) -> str | None:
    """Allows one rounding after a sum in float32.

    Addends have both signs. The bound adds 16 roundings of the sum of their magnitudes, which is
    more than any order of summation needs.
    """
    ids, arrays = sampled
    if arrays[0].dtype != p.dtype:
        return f"a result of {arrays[0].dtype}"
    found, updates, *operand = (x.astype(np.float64) for x in arrays)

    def summed(values: np.ndarray) -> Any:
        return np.stack([np.bincount(ids, column, p.segments) for column in values.T], axis=1)

    exact, magnitude = summed(updates), summed(np.abs(updates))
    for x in operand:
        exact, magnitude = exact + x, magnitude + np.abs(x)
    bound = 0.501 * accuracy.ulp(exact, p.dtype) + 16 * 2.0**-24 * magnitude
    few = p.rows <= 8192 and p.segments > 16 * p.rows
    if few and p.dtype != "float32" and jax.default_backend() == "gpu":
        # Here docs/numerics.md allows a rounding for each addition.
        further = np.maximum(np.bincount(ids, minlength=p.segments) - 1, 0)[:, None]
        bound = bound + 0.5 * float(jnp.finfo(p.dtype).eps) * further * magnitude
    return accuracy.worst(found, exact, bound)


def _sample_rows(args: Sequence[Array], out: Array) -> tuple[Array, Array]:
    some = np.arange(0, len(out), (len(out) // 1000) | 1)
    return args[0][args[1][some]], out[some]
