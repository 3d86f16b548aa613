"""Sums and lookups of rows: ``segment_sum``, ``scatter_add``, ``embedding_lookup``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from .. import accuracy, rivals
from ..harness import SWEEP, Case, Function, Work, one_element
from ..inputs import Input
from . import FLOATS, count, in_float32, itemsize, pick, random_size, short, size, sweep_sizes

Array = Any

_LARGE_TABLE = 64 << 20  # clearing or copying a table of this many bytes costs more than launches
_TOO_SLOW = "seconds a call (--slow-rivals runs it)"


@dataclass(frozen=True)
class Problem:
    """``rows`` rows of ``width`` elements that belong to ``segments`` rows, as ``ids`` has it.

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
        """The group of the function that a sweep calls."""
        return "segment_sum" if self.group == SWEEP else self.group

    @property
    def sums(self) -> bool:
        """Whether it adds, or else looks rows up."""
        return self.function != "embedding"

    @property
    def operand(self) -> bool:
        """Whether it adds to an operand."""
        return self.function.startswith("scatter_add")

    @property
    def bytes(self) -> int:
        """A table that is looked up or updated in place counts with the rows that are used."""
        rows, table = self.rows * self.width, self.segments * self.width
        hit = min(self.rows, self.segments) * self.width
        elements = {
            "segment_sum": rows + table,
            "scatter_add": rows + 2 * table,
            "scatter_add in place": rows + 2 * hit,
            "embedding gradient": rows + table,
            "embedding": hit + rows,
        }[self.function]
        return elements * itemsize(self.dtype) + 4 * self.rows


def case(p: Problem, shape: str = "") -> Case:
    """A sum or a lookup."""
    sizes = f"{count(p.rows)}x{p.width}-to-{count(p.segments)}"
    name = f"{p.group.replace(' ', '_')}-{sizes}-{p.ids}-{short(p.dtype)}"
    shown = shape or f"{count(p.rows)}x{p.width} to {count(p.segments)}, {p.ids}"
    work = partial(_work, p)
    return Case("scatter", name, p.function, p.group, shown, p.dtype, p.bytes, work)


_LISTED = {
    "gpu": [
        ("segment_sum", 16 << 20, 1, 1024, "uniform"),
        ("segment_sum", 16 << 20, 1, 1 << 20, "uniform"),
        ("segment_sum", 16 << 20, 1, 1 << 20, "sorted"),
        ("segment_sum", 1 << 20, 128, 10_000, "uniform"),
        ("segment_sum", 1 << 20, 128, 10_000, "hot"),
        ("segment_sum", 1 << 20, 128, 10_000, "sorted"),
        ("scatter_add", 1 << 20, 128, 10_000, "uniform"),
        ("scatter_add in place", 1 << 20, 128, 10_000, "uniform"),
        ("scatter_add", 4096, 2048, 128 << 10, "uniform"),
        ("scatter_add in place", 4096, 2048, 128 << 10, "uniform"),
        ("embedding gradient", 256 << 10, 2048, 128 << 10, "skewed"),
        ("embedding gradient", 256 << 10, 2048, 128 << 10, "uniform"),
        ("embedding", 256 << 10, 2048, 128 << 10, "skewed"),
        ("embedding", 256 << 10, 2048, 128 << 10, "uniform"),
    ],
    "cpu": [
        ("segment_sum", 1 << 20, 1, 1024, "uniform"),
        ("segment_sum", 1 << 20, 1, 64 << 10, "uniform"),
        ("segment_sum", 1 << 20, 1, 64 << 10, "sorted"),
        ("segment_sum", 64 << 10, 128, 1000, "uniform"),
        ("segment_sum", 64 << 10, 128, 1000, "hot"),
        ("segment_sum", 64 << 10, 128, 1000, "sorted"),
        ("scatter_add", 64 << 10, 128, 1000, "uniform"),
        ("scatter_add in place", 64 << 10, 128, 1000, "uniform"),
        ("scatter_add", 1024, 1024, 16 << 10, "uniform"),
        ("scatter_add in place", 1024, 1024, 16 << 10, "uniform"),
        ("embedding gradient", 8 << 10, 1024, 16 << 10, "skewed"),
        ("embedding gradient", 8 << 10, 1024, 16 << 10, "uniform"),
        ("embedding", 8 << 10, 1024, 16 << 10, "skewed"),
        ("embedding", 8 << 10, 1024, 16 << 10, "uniform"),
    ],
}


def cases(platform: str, quick: bool = False) -> list[Case]:
    """``quick`` keeps segment_sum in f16."""
    listed = [
        Problem(*sizes, dtype)
        for sizes in _LISTED[platform]
        for dtype in FLOATS
        if not quick or (dtype == "float16" and sizes[0] == "segment_sum")
    ]
    # The sweep: rows of 128 in bf16, some 64 a segment, such as messages of a graph.
    return [*map(case, listed)] + [
        case(Problem(SWEEP, n // 256, 128, max(1, n >> 14), "uniform", "bfloat16"), size(n))
        for n in sweep_sizes(platform, quick)
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A case at random: any function, width, number of segments and distribution of ids."""
    group, dtype = pick(rng, [*_JNP]), pick(rng, FLOATS)
    widths = (1, 1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 768, 1000, 2048)
    width = pick(rng, widths)
    most = max(1, min(largest, 256 << 20) // (3 * (width * itemsize(dtype) + 4)))
    rows = min(most, max(1, random_size(rng, largest) // (width * itemsize(dtype) + 4)))
    segments = max(1, min(most, int(rows * math.exp(rng.uniform(math.log(max(1e-4, 2 / rows)), math.log(4))))))
    ids = pick(rng, ("uniform", "zipf", "hot", "one", "sorted"))
    return case(Problem(group, rows, width, segments, ids, dtype))


def _work(p: Problem) -> Work:
    on_gpu = jax.default_backend() == "gpu"
    narrow = p.dtype != "float32"
    slow = on_gpu and narrow and p.sums and p.ids in ("hot", "one") and p.rows > 1 << 16
    in_place = p.group == "scatter_add in place"
    clears = p.group in ("scatter_add", "embedding gradient")
    wall = on_gpu and clears and p.segments * p.width * itemsize(p.dtype) >= _LARGE_TABLE
    ours = partial(_FUNCTIONS[p.function], p)
    others = {"1 element": one_element} if p.group == SWEEP else {}
    if p.group == "segment_sum" and p.ids == "sorted" and p.width == 1:
        others["cub"] = rivals.maker("cub", "segment_sum")
    return Work(
        _inputs(p),
        ours,
        _forms(p),
        sample=partial(_sample, p) if p.sums else _sample_rows,
        verify=partial(_verify, p) if p.sums else _verify_rows,
        exact=not p.sums,
        variants={"deterministic": partial(ours, deterministic=True)} if p.sums else {},
        torch=partial(_TORCH[p.function], p),
        torch_inputs=(lambda torch, *x: (x[0].clone(), *x[1:])) if in_place else None,
        others=others,
        donated=in_place,
        skip={"jnp": _TOO_SLOW} if slow else {},
        effort=1.0 if wall else 0.5,
        wall=wall,
    )


def _inputs(p: Problem) -> list[Input]:
    def rows(n: int) -> Input:
        return Input((n, p.width) if p.width > 1 else (n,), p.dtype)

    ids = Input((p.rows,), "int32", p.ids, p.segments)
    if p.operand:
        return [rows(p.segments), ids, rows(p.rows)]
    return [rows(p.rows if p.sums else p.segments), ids]


# ---- ours ----


def _segment_sum(p: Problem, data: Array, ids: Array, **options: Any) -> Array:
    in_order = p.ids == "sorted"
    return jof.segment_sum(data, ids, p.segments, indices_are_sorted=in_order, **options)


def _scatter_add(p: Problem, operand: Array, ids: Array, updates: Array, **options: Any) -> Array:
    return jof.scatter_add(operand, ids, updates, **options)


def _gradient(p: Problem, cotangent: Array, ids: Array, **options: Any) -> Array:
    return _pullback(lambda t: jof.embedding_lookup(t, ids, **options), p, cotangent)


_FUNCTIONS: dict[str, Function] = {
    "segment_sum": _segment_sum,
    "scatter_add": _scatter_add,
    "scatter_add in place": _scatter_add,
    "embedding gradient": _gradient,
    "embedding": lambda p, table, ids, **options: jof.embedding_lookup(table, ids, **options),
}


def _pullback(function: Function, p: Problem, cotangent: Array) -> Array:
    """Alone: it does not depend on the table's values."""
    shape = (p.segments, p.width) if p.width > 1 else (p.segments,)
    (gradient,) = jax.vjp(function, jnp.zeros(shape, cotangent.dtype))[1](cotangent)
    return gradient


# ---- the forms in jnp ----


def _jnp_segment_sum(p: Problem, data: Array, ids: Array) -> Array:
    in_order = p.ids == "sorted"
    return jax.ops.segment_sum(data, ids, p.segments, indices_are_sorted=in_order)


def _jnp_scatter_add(p: Problem, operand: Array, ids: Array, updates: Array) -> Array:
    return operand.at[ids].add(updates, mode="drop")


def _jnp_gradient(p: Problem, cotangent: Array, ids: Array) -> Array:
    return _pullback(lambda table: jnp.take(table, ids, axis=0), p, cotangent)


_JNP: dict[str, Function] = {
    "segment_sum": _jnp_segment_sum,
    "scatter_add": _jnp_scatter_add,
    "scatter_add in place": _jnp_scatter_add,
    "embedding gradient": _jnp_gradient,
    "embedding": lambda p, table, ids: jnp.take(table, ids, axis=0),
}


def _forms(p: Problem) -> dict[str, Function]:
    """What users write; widened to f32 by hand; on GPUs, with fewer conflicts of atomics."""
    forms: dict[str, Function] = {"jnp": partial(_JNP[p.function], p)}
    if not p.sums:
        forms["jnp in bounds"] = _rows
    elif p.dtype != "float32":
        forms["jnp f32"] = in_float32(forms["jnp"], p.dtype)
    waits = p.group in ("segment_sum", "embedding gradient") and p.ids != "sorted"
    if waits and jax.default_backend() == "gpu":
        if _parts(p) > 1:
            forms["jnp in parts"] = in_float32(partial(in_parts, p), p.dtype)
        forms["jnp sorted"] = in_float32(partial(in_order, p), p.dtype)
    return forms


def _rows(table: Array, ids: Array) -> Array:
    """Without a check that ids are in bounds."""
    return table.at[ids].get(mode="promise_in_bounds")


def in_order(p: Problem, data: Array, ids: Array) -> Array:
    """Sorted by their ids: neighbours are added before they meet an atomic."""
    ordered, places = jax.lax.sort_key_val(ids, jnp.arange(len(ids)))
    return jax.ops.segment_sum(_rows(data, places), ordered, p.segments, indices_are_sorted=True)


def _parts(p: Problem) -> int:
    """Tables to sum into side by side, or one."""
    parts = min(256, p.rows // (4 * p.segments))
    return 1 << parts.bit_length() - 1 if parts >= 16 else 1


def in_parts(p: Problem, data: Array, ids: Array) -> Array:
    """Neighbours go into different tables, so that they do not wait for each other."""
    parts = _parts(p)
    tables = jnp.arange(len(ids), dtype=ids.dtype) % parts
    sums = jax.ops.segment_sum(data, tables * p.segments + ids, parts * p.segments)
    return sums.reshape(parts, p.segments, *data.shape[1:]).sum(axis=0)


# ---- PyTorch ----


def _torch_segment_sum(p: Problem, torch: Any, data: Array, ids: Array) -> Array:
    return data.new_zeros((p.segments, *data.shape[1:])).index_add_(0, ids, data)


_TORCH: dict[str, Function] = {
    "segment_sum": _torch_segment_sum,
    "scatter_add": lambda p, torch, operand, ids, x: operand.index_add(0, ids, x),
    "scatter_add in place": lambda p, torch, operand, ids, x: operand.index_add_(0, ids, x),
    "embedding gradient": lambda p, torch, ct, ids: torch.ops.aten.embedding_dense_backward(
        ct, ids, p.segments, -1, False
    ),
    "embedding": lambda p, torch, table, ids: torch.nn.functional.embedding(ids, table),
}


# ---- checks ----


def columns(width: int) -> np.ndarray:
    """Some eight and the last, an odd number apart: every place in a pack is seen."""
    return np.unique([*range(0, width, (width // 8) | 1), width - 1])


def _sample(p: Problem, args: Sequence[Array], out: Array) -> tuple[Array, list[Array]]:
    """The ids, and some columns of the result and of the other arrays."""
    seen = columns(p.width)
    ids = args[1]
    arrays = [out, args[2], args[0]] if p.operand else [out, args[0]]
    return ids, [x.reshape(x.shape[0], -1)[:, seen] for x in arrays]


def _verify(p: Problem, sampled: tuple[np.ndarray, list[np.ndarray]]) -> str | None:
    """One rounding, after a sum in float32.

    The addends have either sign: 16 roundings of their magnitudes' sum are more than any order of
    summation needs.
    """
    ids, arrays = sampled
    if arrays[0].dtype != p.dtype:
        return f"a result of {arrays[0].dtype}"
    found, updates, *operand = (x.astype(np.float64) for x in arrays)
    exact, magnitude = (
        np.stack([np.bincount(ids, column, p.segments) for column in values.T], axis=1)
        for values in (updates, np.abs(updates))
    )
    for x in operand:
        exact, magnitude = exact + x, magnitude + np.abs(x)
    bound = 0.501 * accuracy.ulp(exact, p.dtype) + 16 * 2.0**-24 * magnitude
    if rounds_each_addition(p):
        further = np.maximum(np.bincount(ids, minlength=p.segments) - 1, 0)[:, None]
        bound += 0.5 * float(jnp.finfo(p.dtype).eps) * further * magnitude
    return accuracy.worst(found.ravel(), exact.ravel(), bound.ravel())


def rounds_each_addition(p: Problem) -> bool:
    """Returns whether docs/numerics.md allows a rounding for each addition."""
    few = p.rows <= 8192 and p.segments > 16 * p.rows
    return few and p.dtype != "float32" and jax.default_backend() == "gpu"


def _sample_rows(args: Sequence[Array], out: Array) -> tuple[Array, Array]:
    table, ids = args
    some = np.arange(0, len(ids), (len(ids) // 1000) | 1)
    return table[ids[some]], out[some]


def _verify_rows(sampled: tuple[np.ndarray, np.ndarray]) -> str | None:
    expected, found = sampled
    wrong = int((expected != found).reshape(len(found), -1).any(axis=1).sum())
    return f"{wrong} of {len(found)} rows are off" if wrong else None
