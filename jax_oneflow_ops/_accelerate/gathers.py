"""Finds rows that a program gathers only to sum them, and computes the sums from their table.

A custom call needs its operands in memory. So a sum of gathered rows would make XLA store a row for
each edge of a graph: the rows of the senders, weighted. XLA may fuse its own scatter with the
gather, but its atomics are slow in 16 bits, for wide rows and for large tables. The kernel of
message sums reads the rows in their table. The kernel of edge dots does the same for dot products
of the rows at both ends of an edge, which are the gradient of the weights.

A lowering rule sees values of MLIR. These functions look at the operations that made them. XLA
removes an operation if nothing else reads its results.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_oneflow_ops import (
    _compat,
    _emit,
    _graph,
    _primitive,
    _scatter,
    _scatter_policy,
    _scatter_rows,
)
from jax_oneflow_ops._accelerate import common
from jax_oneflow_ops._compat import operands_of, shape_of

FROM_TABLES = "reads the gathered rows directly from their table, without an array of them"


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Rows of a table, one for each of E edges. All attributes are values of MLIR.

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
    """The updates that a scatter sums: gathered rows, with or without weights.

    Attributes:
      scatter: where the rows are added.
      gathered: the rows.
      weights: (E, *row[:weight_dims]), possibly with more dimensions of size 1; or None.
      weight_dims: the number of dimensions of a row that weights have.
    """

    scatter: _scatter_rows.Rows
    gathered: Gathered
    weights: Any = None
    weight_dims: int = 0

    @property
    def values(self) -> list[Any]:
        return [*self.gathered.values, *([] if self.weights is None else [self.weights])]

    @property
    def avals(self) -> list[Any]:
        """The types of the arrays that the kernel reads, except for those of the scatter."""
        return [*map(_emit.aval_of, self.values)]

    def pays(self, ctx: Any, platform: str) -> bool:
        """Whether the kernel is expected to be faster than a sum of stored rows, and than XLA."""
        problem = _problem(self.scatter, platform, self.avals[0])
        if (devices := _compat.count_shards(ctx)) > 1:  # each sorts the ids of its own edges
            edges = -(-problem.updates // devices)
            problem = dataclasses.replace(problem, updates=edges, is_sorted=False)
        return _scatter_policy.message_sum_pays(problem)

    def lower(self, ctx: Any, ids: Any, platform: str, read: str) -> list[Any]:
        """Lowers the sum. `ids` and `read` are the results of `scatters.as_written`."""
        avals = [ctx.avals_in[1], *self.avals]
        return _lower(
            *(_sum_messages, ctx.replace(avals_in=avals), ids, *self.values),
            scatter=self.scatter,
            platform=platform,
            read=read,
            weight_dims=self.weight_dims,
            count=len(self.gathered.values),
        )


@dataclasses.dataclass(frozen=True)
class Pair:
    """Rows at both ends of edges, whose products have the type `products`."""

    first: Gathered
    second: Gathered
    products: Any

    @property
    def avals(self) -> list[Any]:
        """The types of the arrays that the kernel reads."""
        return [*map(_emit.aval_of, (*self.first.values, *self.second.values))]

    def pays(self, ctx: Any, platform: str) -> bool:
        """Whether the kernel is expected to be faster than XLA."""
        edges, *row = self.products.shape
        edges, dtype = -(-edges // _compat.count_shards(ctx)), self.avals[0].dtype
        return _scatter_policy.dot_products_pay(platform, edges, math.prod(row), dtype)

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers the dot products."""
        values, (result,) = (*self.first.values, *self.second.values), ctx.avals_out
        return _lower(
            *(_dots, ctx.replace(avals_in=self.avals), *values),
            count=len(self.first.values),
            dims=result.ndim - 1,
            dtype=result.dtype,
        )


def _lower(function: Any, ctx: Any, *values: Any, **how: Any) -> list[Any]:
    """Lowers to kernels of one device's arrays, or to operations that the partitioner shards."""
    if _compat.knows_shapes_of_shards(ctx):
        results = _emit.lower(function, ctx, *values, alone=True, **how)
        return _compat.with_shardings_of_types(ctx, results)
    several: list[Any] = common.lower(
        function, _compat.with_devices(ctx), *values, alone=False, **how
    )
    return several


def _may_be_sharded(ctx: Any, edges: int, *tables: Any) -> bool:
    """Whether kernels can be called for the edges of each device, and should be.

    Each device needs all rows of the tables, whose types or those of results are passed. They must
    have no more rows than it has edges: embedding tables may have too many for one device.
    """
    devices = _compat.count_shards(ctx)
    fit = devices == 1 or all(devices * table.shape[0] <= edges for table in tables)
    return fit and _compat.can_be_sharded(ctx)


# ---- what a program computes ----


def message_of(scatter: _scatter_rows.Rows, ctx: Any, updates: Any) -> Message | None:
    """The messages that a scatter of `updates` sums; None if it does something else.

    None also if kernels cannot sum them.
    """
    operand, _, of_updates = ctx.avals_in
    edges, *row = of_updates.shape
    adds_rows = scatter.is_plain and not scatter.batch and scatter.kept == (0,)
    if not row or not adds_rows or (*row,) != operand.shape[1:]:
        return None
    fits = edges <= _graph.MOST and scatter.count <= _graph.MOST_ROWS
    if not fits or operand.dtype not in _graph.FLOATS:
        return None
    value = updates
    while (parts := operands_of(value, "stablehlo.reshape")) and shape_of(parts[0])[:1] == [edges]:
        (value,) = parts
    if (found := _weighted(value)) is None:
        return None
    rows, weights = found
    if not _may_be_sharded(ctx, edges, operand, _emit.aval_of(rows.table)):
        return None
    return Message(scatter, rows, *weights)


def _weighted(value: Any) -> tuple[Gathered, tuple[Any, ...]] | None:
    """Gathered rows, and their weights if they were multiplied by some: see `Message`."""
    if rows := _gathered(value):
        return rows, ()
    factors = operands_of(value, "stablehlo.multiply")
    for one, other in (factors, factors[::-1]) if factors else ():
        if (rows := _gathered(one)) and (weights := _weights(other)):
            return rows, weights
    return None


def pair_of(ctx: Any, operand: Any, axes: Sequence[int]) -> Pair | None:
    """The rows whose products a sum over `axes` adds up; None if it does something else.

    None also if kernels cannot multiply them. 16-bit products may have been converted to float32
    before the sum, as `jnp.sum` does.
    """
    (products,), (result,) = ctx.avals_in, ctx.avals_out
    are_last = 0 < result.ndim == min(axes, default=0)  # the axes, and edges are not among them
    if not are_last or not _compat.has_known_sizes(ctx):
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
    pair = Pair(found[0], found[1], products)
    dtype = pair.avals[0].dtype
    if dtype not in _graph.FLOATS or products.dtype not in (dtype, _graph.compute_dtype(dtype)):
        return None
    tables = (_emit.aval_of(rows.table) for rows in found)
    return pair if _may_be_sharded(ctx, products.shape[0], *tables) else None


def _gathered(value: Any) -> Gathered | None:
    """Rows that a gather reads by indices (E, 1), some of them replaced by zeros; else None."""
    if parts := operands_of(value, "stablehlo.select"):
        mask, chosen, other = parts
        spread = operands_of(mask, "stablehlo.broadcast_in_dim")
        rows = _gathered(chosen)
        if not rows or rows.mask is not None or _compat.fill_of(other) != "0.000000e+00":
            return None
        if not spread or _compat.places_of(mask) != [0] or len(shape_of(spread[0])) != 1:
            return None
        return dataclasses.replace(rows, mask=spread[0])
    if not (parts := operands_of(value, "stablehlo.gather")):
        return None
    table, indices = parts
    if not _compat.gathers_whole_rows(value) or len(shape_of(indices)) != 2:
        return None
    of_table = _emit.aval_of(table)
    is_known = of_table and _emit.aval_of(indices) and of_table.shape[0] <= _graph.MOST_ROWS
    return Gathered(table, indices) if is_known else None


def _weights(value: Any) -> tuple[Any, int] | None:
    """What `value` (E, *row) is broadcast from, and the number of dimensions of a row it has.

    None unless it is the same for all positions of the row's last dimensions.
    """
    if not (parts := operands_of(value, "stablehlo.broadcast_in_dim")):
        return None
    (source,) = parts
    places, own, whole = _compat.places_of(value), shape_of(source), shape_of(value)
    kept = [place for place, n in zip(places, own, strict=True) if n != 1]
    dims = len(kept) - 1
    if not kept or kept != [*range(len(kept))] or dims == len(whole) - 1:
        return None
    return (source, dims) if _emit.aval_of(source) else None


# ---- what it computes instead, from arrays of `_emit` ----


# How primitives are called in programs over several devices. Edges that read no row are dropped.
_ON_SEVERAL: dict[str, Any] = {
    "function": "accelerate",
    "implementation": "native",
    "drops_senders": True,
}


def _problem(scatter: _scatter_rows.Rows, platform: str, table: Any) -> _scatter_policy.Problem:
    is_sorted = scatter.indices_are_sorted
    return _scatter_policy.Problem(platform, *scatter.problem, table.dtype, is_sorted=is_sorted)


def _sum_messages(
    indices: Any,
    *values: Any,
    scatter: _scatter_rows.Rows,
    platform: str,
    read: str,
    weight_dims: int,
    count: int,
    alone: bool,
) -> Any:
    """The sums of messages, in the shape of the scatter's result.

    The first `count` of the values are those of the gathered rows; the weights follow. Keys of
    edges that go nowhere are out of range, and the kernel ignores them. `alone`: the arrays are
    those of one device.
    """
    ids = scatter.ids(indices.reshape(*indices.shape, 1) if read else indices)
    indexing = scatter.read(False, row_rank=1, wrap=read == "wrap")
    (table, sources), weights = _read(*values[:count]), values[count:]
    table = _in_heads(table, weight_dims)
    heads = table.shape[1]
    of_edges = weights[0].reshape(sources.size, heads) if weights else None
    if not alone:
        rows, is_row = indexing.resolved(ids.reshape(-1), scatter.count)
        receivers = jnp.where(is_row, rows, -1).astype(jnp.int32)
        shared: Any = _graph.message_sum(
            (sources, receivers, *_graph.no_order(), *_graph.no_order()),
            table,
            _graph.no_weights(heads, table.dtype) if of_edges is None else of_edges,
            num_segments=scatter.count,
            **_ON_SEVERAL,
        )
        return shared.reshape(scatter.shape)
    order = None
    if scatter.indices_are_sorted:
        # Ids may have 64 bits. Those out of range stay so in 32 bits.
        keys, _ = indexing.resolved(ids, scatter.count)
        keys = keys.__array_namespace__().clip(keys, -1, scatter.count)
    else:
        p = _problem(scatter, platform, values[0])
        keys, order = _scatter.sort_rows(p, ids.reshape(1, -1), indexing)
        order = order.astype(jnp.int32)
    result = _graph.sum_of_rows(
        platform,
        table,
        of_edges,
        sources,
        keys.reshape(-1).astype(jnp.int32),
        order,
        scatter.count,
    )
    return result.reshape(scatter.shape)


def _dots(*values: Any, count: int, dims: int, dtype: Any, alone: bool) -> Any:
    """The dot products (E, *row[:dims]) of rows over their other dimensions.

    The first `count` of the values are those of the rows at one end of the edges.
    """
    (a, a_ids), (b, b_ids) = _read(*values[:count]), _read(*values[count:])
    a_rows, b_rows = (_in_heads(x, dims) for x in (a, b))
    if alone:
        result = _graph.dots_of_rows(a_rows, b_rows, a_ids, b_ids, None, dtype)
    else:
        graph = b_ids, a_ids, *_graph.no_order(), *_graph.no_order()
        how = {"dtype": dtype, **_ON_SEVERAL}
        result = _primitive.bind(_graph.edge_dot_p, *graph, a_rows, b_rows, **how)
    return result.reshape(a_ids.size, *a.shape[1 : 1 + dims])


def _read(table: Any, indices: Any, mask: Any = None) -> tuple[Any, Any]:
    """A table, and the row that each edge reads, -1 for zeros."""
    xp, ids = indices.__array_namespace__(), indices.reshape(indices.shape[0])
    ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids  # so that it holds every row
    ids = xp.clip(ids, 0, table.shape[0] - 1).astype(jnp.int32)
    return table, ids if mask is None else xp.where(mask, ids, -1)


def _in_heads(table: Any, dims: int) -> Any:
    """A table (N, *row) in the shape (N, heads, width): the first `dims` of a row are heads."""
    row = table.shape[1:]
    heads = math.prod(row[:dims])
    return table.reshape(-1, heads, math.prod(row) // heads)
