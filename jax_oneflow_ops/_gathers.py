"""Finds rows that a program gathers only to sum them, and computes the sums from the table.

XLA stores a row for each edge of a graph: it gathers the rows of the senders, weights them, and
writes them to memory, where a scatter reads them. The kernel of message sums reads the rows in the
table. So does the kernel of dot products of the rows at both ends of an edge, which is the gradient
of the weights.

A lowering rule sees values of MLIR. These functions look at the operations that made them. An
operation that nothing else reads is then dead, and XLA removes it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_oneflow_ops import _compat, _emit, _graph, _scatter, _scatter_policy, _scatter_rows
from jax_oneflow_ops._compat import operands_of


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Rows of a table, one for each edge. All are values of MLIR.

    Attributes:
      table: (N, *row).
      indices: (E, 1). An index out of range reads the nearest row.
      mask: (E,), or None. Rows where it is false are zeros.
    """

    table: Any
    indices: Any
    mask: Any = None

    @property
    def values(self) -> list[Any]:
        return [self.table, self.indices, *([] if self.mask is None else [self.mask])]


@dataclasses.dataclass(frozen=True)
class Message:
    """What a scatter sums: gathered rows, times weights of shape (E, *row[:heads]) or without."""

    scatter: _scatter_rows.Rows
    dtype: Any
    rows: Gathered
    weights: Any = None
    heads: int = 0  # the number of dimensions of a row that weights have

    def problem(self, platform: str) -> _scatter_policy.Problem:
        """The sum as the policy knows it."""
        return _problem(self.scatter, platform, self.dtype)

    def lower(self, ctx: Any, indices: Any, platform: str, read: str) -> list[Any]:
        """Lowers the sum. `read` says how to read ids: see `_compat.ids_of`."""
        values = [*self.rows.values, *([] if self.weights is None else [self.weights])]
        avals = [ctx.avals_in[1], *map(_aval, values)]
        results = _emit.lower(
            *(_sum_messages, ctx.replace(avals_in=avals), indices, *values),
            rows=self.scatter,
            platform=platform,
            read=read,
            heads=self.heads,
            reads=len(self.rows.values),
        )
        return _compat.with_shardings_of_types(ctx, results)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Rows at both ends of edges, whose products have the type `products`."""

    first: Gathered
    second: Gathered
    products: Any

    def pays(self, platform: str) -> bool:
        """Whether the kernel is expected to be faster than XLA."""
        edges, *row = self.products.shape
        dtype = _aval(self.first.table).dtype
        return _scatter_policy.multiplies_rows(platform, edges, math.prod(row), dtype)

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers the dot products."""
        values, (result,) = [*self.first.values, *self.second.values], ctx.avals_out
        results = _emit.lower(
            *(_dots, ctx.replace(avals_in=[*map(_aval, values)]), *values),
            split=len(self.first.values),
            kept=result.ndim - 1,
            dtype=result.dtype,
        )
        return _compat.with_shardings_of_types(ctx, results)


# ---- what a program computes ----


def message_of(rows: _scatter_rows.Rows, ctx: Any, updates: Any) -> Message | None:
    """The messages that a scatter of `updates` sums; None if it does something else.

    None also if kernels cannot sum them, and in programs over several devices.
    """
    table, _, of_updates = ctx.avals_in
    edges, *row = of_updates.shape
    is_row_each = rows.is_plain and not rows.batch and rows.kept == (0,)
    if not row or not is_row_each or (*row,) != table.shape[1:] or table.dtype not in _graph.FLOATS:
        return None
    fits = edges <= _graph.MOST and rows.count <= _graph.MOST_ROWS
    if not fits or not _compat.is_for_one_device(ctx):
        return None
    value = updates
    while (source := operands_of(value, "stablehlo.reshape")) and _shape(source[0])[:1] == [edges]:
        (value,) = source
    if found := _gathered(value):
        return Message(rows, table.dtype, found)
    factors = operands_of(value, "stablehlo.multiply")
    for one, other in (factors, factors[::-1]) if factors else ():
        if (found := _gathered(one)) and (weights := _broadcast(other)):
            return Message(rows, table.dtype, found, *weights)
    return None


def pair_of(ctx: Any, operand: Any, axes: Sequence[int]) -> Pair | None:
    """The rows whose products a sum over `axes` adds up; None if it does something else.

    None also if kernels cannot multiply them, and in programs over several devices.
    """
    (products,), (result,) = ctx.avals_in, ctx.avals_out
    is_last = 0 < result.ndim == min(axes, default=0)
    if not is_last or not _compat.has_known_sizes(ctx) or not _compat.is_for_one_device(ctx):
        return None
    if products.size == 0 or products.shape[0] > _graph.MOST:
        return None
    value = operand
    if source := operands_of(value, "stablehlo.convert"):
        (value,) = source
    factors = operands_of(value, "stablehlo.multiply")
    found = [rows for x in factors if (rows := _gathered(x)) is not None]
    if len(found) != 2:
        return None
    dtypes = {_aval(rows.table).dtype for rows in found}
    computed = {_graph.compute_dtype(dtype) for dtype in dtypes if dtype in _graph.FLOATS}
    if dtypes != {products.dtype} and computed != {products.dtype}:
        return None
    return Pair(found[0], found[1], products) if computed else None


def _gathered(value: Any) -> Gathered | None:
    if parts := operands_of(value, "stablehlo.select"):
        mask, chosen, other = parts
        spread = operands_of(mask, "stablehlo.broadcast_in_dim")
        rows = _gathered(chosen)
        if not rows or rows.mask is not None or _compat.fill_of(other) != "0.000000e+00":
            return None
        if not spread or _compat.places_of(mask) != [0] or len(_shape(spread[0])) != 1:
            return None
        return dataclasses.replace(rows, mask=spread[0])
    if not (parts := operands_of(value, "stablehlo.gather")):
        return None
    table, indices = parts
    if not _compat.gathers_whole_rows(value) or len(_shape(indices)) != 2:
        return None
    is_known = _aval(table) and _aval(indices) and _aval(table).shape[0] <= _graph.MOST_ROWS
    return Gathered(table, indices) if is_known else None


def _broadcast(value: Any) -> tuple[Any, int] | None:
    """What `value` (E, *row) is broadcast from, and the number of dimensions of a row it has.

    None unless it is the same for all positions of the row's last dimensions.
    """
    if not (parts := operands_of(value, "stablehlo.broadcast_in_dim")):
        return None
    (source,) = parts
    places, own, whole = _compat.places_of(value), _shape(source), _shape(value)
    kept = [place for place, n in zip(places, own, strict=True) if n != 1]
    heads = len(kept) - 1
    if not kept or kept != [*range(len(kept))] or heads == len(whole) - 1:
        return None
    return (source, heads) if _aval(source) else None


def _shape(value: Any) -> list[int]:
    return [*_compat.ir.ShapedType(value.type).shape]


def _aval(value: Any) -> Any:
    return _emit.aval_of(value)


# ---- what it computes instead, on one device ----


def _problem(rows: _scatter_rows.Rows, platform: str, dtype: Any) -> _scatter_policy.Problem:
    edges, *row = rows.updates_shape
    sizes = 1, edges, rows.count, math.prod(row)
    return _scatter_policy.Problem(platform, *sizes, dtype, is_sorted=rows.indices_are_sorted)


def _sum_messages(
    indices: Any,
    *values: Any,
    rows: _scatter_rows.Rows,
    platform: str,
    read: str,
    heads: int,
    reads: int,
) -> Any:
    ids = rows.ids(indices.reshape(*indices.shape, 1) if read else indices)
    indexing = rows.read(False, row_rank=1, wrap=read == "wrap")
    order = None
    if rows.indices_are_sorted:
        keys, _ = indexing.resolved(ids, rows.count)
    else:
        p = _problem(rows, platform, values[0].dtype)
        keys, order = _scatter.sort_rows(p, ids.reshape(1, -1), indexing)
    table, sources = _read(*values[:reads])
    row, weights = table.shape[1:], values[reads:]
    count = math.prod(row[:heads])
    result = _graph.sum_of_rows(
        platform,
        table.reshape(-1, count, math.prod(row) // count),
        weights[0].reshape(sources.size, count) if weights else None,
        sources,
        keys.reshape(-1).astype(jnp.int32),
        order,
        rows.count,
    )
    return result.reshape(rows.shape)


def _dots(*values: Any, split: int, kept: int, dtype: Any) -> Any:
    (a, a_ids), (b, b_ids) = _read(*values[:split]), _read(*values[split:])
    row = a.shape[1:]
    count = math.prod(row[:kept])
    a, b = (x.reshape(-1, count, math.prod(row) // count) for x in (a, b))
    result = _graph.dots_of_rows(a, b, a_ids, b_ids, None, dtype)
    return result.reshape(a_ids.size, *row[:kept])


def _read(table: Any, indices: Any, mask: Any = None) -> tuple[Any, Any]:
    """A table, and the row that each edge reads, -1 for zeros."""
    xp = indices.__array_namespace__()
    ids = xp.clip(indices.reshape(indices.shape[0]), 0, table.shape[0] - 1).astype(jnp.int32)
    return table, ids if mask is None else xp.where(mask, ids, -1)
