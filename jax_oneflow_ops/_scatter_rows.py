"""Converts any JAX scatter to the form that the kernels take: rows named by ids."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops._indexing import Indexing

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """A scatter whose operand is viewed as rows, in the shape (*batch, rows, *trailing).

    Dimensions `begin` to `end` of the operand are merged into one, the rows. The dimensions before
    them are the batch, and those after them form a row. The operand is not moved in memory. If a
    scatter writes windows that are not whole rows, each position of a window gets its own id.
    """

    shape: tuple[int, ...]  # of the operand
    updates_shape: tuple[int, ...]
    begin: int
    end: int
    # For each dimension of the operand from `begin` to `end`: the column of the indices that points
    # into it, the dimension of the updates that steps through it, and the window size.
    columns: tuple[int | None, ...]
    steps: tuple[int | None, ...]
    windows: tuple[int, ...]
    batch: tuple[int, ...]  # the dimension of the updates for each batch dimension
    batch_of_ids: tuple[int, ...]  # those of `batch` that the indices have, too
    index: tuple[int, ...]  # the other dimensions of the updates that the indices have
    expanded: tuple[int, ...]  # window dimensions of the updates whose positions get their own ids
    trailing: tuple[int, ...]  # dimensions of the updates that form a row
    scatter_dims: tuple[int, ...]  # all dimensions of the updates that the indices have
    clip: bool
    indices_are_sorted: bool

    @functools.cached_property
    def count(self) -> Any:
        """The number of rows of one problem."""
        return math.prod(self.shape[self.begin : self.end])

    @property
    def is_plain(self) -> bool:
        """Whether the indices are ids already."""
        return self.end == self.begin + 1 and not self.expanded

    @property
    def problem(self) -> tuple[int, int, int, int]:
        """The sizes of the batch, and of a problem's updates, rows and elements of a row."""
        updates = math.prod(self.sizes((*self.index, *self.expanded)))
        batch, inner = math.prod(self.sizes(self.batch)), math.prod(self.sizes(self.trailing))
        return batch, updates, self.count, inner

    @functools.cached_property
    def own_columns(self) -> tuple[int, int, int, int] | None:
        """The sizes of the batch, and of a problem's updates, rows and columns.

        None unless each column of a row has its own ids, as in lookups along a middle axis.
        """
        cut = len(self.index) - len(self.steps) + 1
        sizes, steps = self.shape[self.begin + 1 : self.end], self.index[cut:]
        has_own_ids = (
            len(sizes) > 0
            and self.steps == (None, *steps)
            and self.columns[0] is not None
            and self.columns.count(None) == len(steps)
            and self.sizes(steps) == sizes
            and self.batch == self.batch_of_ids
            and not self.trailing
        )
        if not has_own_ids:
            return None
        updates = math.prod(self.sizes(self.index[:cut]))
        batch, columns = math.prod(self.sizes(self.batch)), math.prod(sizes)
        return batch, updates, self.shape[self.begin], columns

    @functools.cached_property
    def single(self) -> int | None:
        """The dimension that indices point into, if each place of the others gets one update."""
        pointed = [i for i, c in enumerate(self.columns) if c is not None]
        place = self.begin + pointed[0]
        sizes = {dim: self.updates_shape[u] for dim, u in self._sources().items()}
        others = [dim for dim in range(len(self.shape)) if dim != place]
        whole = all(sizes.get(dim, 1) == self.shape[dim] for dim in others)
        count = math.prod(self.shape[dim] for dim in others)
        is_single = len(pointed) == 1 and whole and math.prod(self.updates_shape) == count
        return place if is_single and self.shape[place] <= _INT32_MAX else None

    def _sources(self) -> dict[int, int]:
        """For each dimension of the operand, the dimension of the updates that steps through it."""
        own = (*self.batch, *self.steps, *self.trailing)
        return {dim: source for dim, source in enumerate(own) if source is not None}

    def select(self, indices: jax.Array, updates: jax.Array) -> jax.Array:
        """The sum of `updates` into zeros without a scatter, which needs a `single` dimension."""
        place = self.single
        assert place is not None
        sources = [(d, u) for d, u in self._sources().items() if d != place]

        def spread(x: jax.Array, order: dict[int, int]) -> jax.Array:
            """`x` with one dimension for each dimension of the operand."""
            rest = [axis for axis in range(x.ndim) if axis not in order.values()]
            shape = [x.shape[order[d]] if d in order else 1 for d in range(len(self.shape))]
            return x.transpose(*order.values(), *rest).reshape(shape)

        own = {d: self.scatter_dims.index(u) for d, u in sources if u in self.scatter_dims}
        ids = spread(indices[..., self.columns[place - self.begin] or 0], own)
        if self.clip:
            ids = ids.clip(0, self.shape[place] - 1)
        places = jax.lax.broadcasted_iota(ids.dtype, self.shape, place)
        zero = jnp.zeros((), updates.dtype)
        return jnp.where(places == ids, spread(updates, dict(sources)), zero)

    @property
    def kept(self) -> tuple[int, ...]:
        """The dimensions of the updates that ids have, in the order of the ids."""
        return (*self.batch_of_ids, *self.index, *self.expanded)

    @functools.cached_property
    def indexing(self) -> Indexing:
        """How to read the ids."""
        return self.read(False)

    def read(
        self, deterministic: bool, row_rank: int | None = None, wrap: bool = False
    ) -> Indexing:
        """How to read the ids, with a choice of the summation order and the operand's row rank."""
        return Indexing(
            batch=len(self.batch),
            shared=not self.batch_of_ids,
            wrap=wrap,
            clip=self.clip and self.is_plain,  # else `ids` has clipped them
            indices_are_sorted=self.indices_are_sorted and self.is_plain,
            deterministic=deterministic,
            row_rank=row_rank or self.end - self.begin,
        )

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The sizes of some dimensions of the updates."""
        return tuple(self.updates_shape[dim] for dim in dims)

    def operands(self, operand: Any) -> tuple[Any, Any]:
        """The types of the updates and ids that are passed to the kernels."""
        batch = self.batch if self.batch_of_ids else ()
        order = (*self.index, *self.expanded)
        return (
            jax.ShapeDtypeStruct(self.sizes((*self.batch, *order, *self.trailing)), operand.dtype),
            jax.ShapeDtypeStruct(self.sizes((*batch, *order)), jnp.dtype("int32")),
        )

    def updates(self, x: jax.Array) -> jax.Array:
        """The updates in the shape (*batch, *index, *trailing)."""
        return x.transpose(*self.batch, *self.index, *self.expanded, *self.trailing)

    def ids(self, indices: jax.Array) -> jax.Array:
        """Ids of rows, of the shape (*batch, *index) or, if shared, (*index)."""
        xp: Any = indices.__array_namespace__()

        def column(c: int) -> jax.Array:
            ids = self._column(indices, c)
            return ids.reshape(*ids.shape, *(1,) * len(self.expanded))

        ids = column(self.columns[0] or 0) if self.is_plain else self._linear(xp, column)
        if not self.batch_of_ids:
            return ids
        inner = ids.shape[len(self.batch_of_ids) :]
        batch = self.sizes(self.batch)
        own = (dim in self.batch_of_ids for dim in self.batch)
        ids = ids.reshape(*(n if has else 1 for n, has in zip(batch, own, strict=True)), *inner)
        result: jax.Array = ids.__array_namespace__().broadcast_to(ids, (*batch, *inner))
        return result

    def ids_of_columns(self, indices: jax.Array) -> jax.Array:
        """The ids within each column, in the shape of the updates, if columns have their own."""
        return self._column(indices, self.columns[0] or 0)

    def _column(self, indices: jax.Array, c: int) -> jax.Array:
        order = [self.scatter_dims.index(dim) for dim in (*self.batch_of_ids, *self.index)]
        return indices[..., c].transpose(order)

    def _linear(self, xp: Any, column: Callable[[int], jax.Array]) -> jax.Array:
        """The number of the row that each element is for; `count` if it is for none."""
        shape = self.sizes(self.kept)
        dtype = jnp.dtype("int32" if self.count <= _INT32_MAX else "int64")
        total: Any = None
        valid: Any = None
        sizes = self.shape[self.begin : self.end]
        for size, c, step, window in zip(
            sizes, self.columns, self.steps, self.windows, strict=True
        ):
            at: Any = 0
            if c is not None:
                start = column(c)
                last = size - window
                if self.clip:
                    start = xp.clip(start, 0, last)
                else:
                    inside = (start >= 0) & (start <= last)
                    valid = inside if valid is None else valid & inside
                at = start.astype(dtype)
            if step is not None:
                place = self.kept.index(step)
                steps = xp.arange(shape[place], dtype=dtype)
                steps = steps.reshape(*(1,) * place, -1, *(1,) * (len(shape) - place - 1))
                at = steps if c is None else at + steps
            total = at if total is None else total * size + at
        if valid is not None:
            total = xp.where(valid, total, xp.asarray(self.count, dtype))
        result: jax.Array = xp.broadcast_to(total, shape)
        return result


@functools.lru_cache(maxsize=1024)
def find(
    shape: tuple[int, ...],
    indices_shape: tuple[int, ...],
    updates_shape: tuple[int, ...],
    numbers: Any,
    *,
    clip: bool,
    indices_are_sorted: bool,
) -> Rows | str:
    """A scatter of these shapes as `Rows`, or the reason why it is left to XLA."""
    sizes = (*shape, *updates_shape, *indices_shape)
    known = all(isinstance(size, int) for size in sizes)
    if known and 0 in sizes:
        return "nothing is added"
    columns = {dim: c for c, dim in enumerate(numbers.scatter_dims_to_operand_dims)}
    at_windows = numbers.update_window_dims
    scatter_dims = tuple(i for i in range(len(updates_shape)) if i not in at_windows)
    if not columns or (known and math.prod(updates_shape[i] for i in scatter_dims) == 1):
        return "one window, which XLA updates in place"
    batching = {
        dim: scatter_dims[i]
        for dim, i in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        )
    }
    no_window = {*numbers.inserted_window_dims, *batching}
    windowed = [dim for dim in range(len(shape)) if dim not in no_window]
    window_of = dict(zip(windowed, at_windows, strict=True))
    window = {dim: updates_shape[i] for dim, i in window_of.items()}
    if known and clip:  # a window that spans a whole dimension can only start at 0
        columns = {d: c for d, c in columns.items() if window.get(d) != shape[d]} or columns

    # The rows span all dimensions from the first to the last of these: dimensions that the indices
    # point into, that windows cover only partly, or that are in no window. A dimension in no window
    # that no index points into is updated at position 0.
    partial = {dim for dim in window if window[dim] != shape[dim]}
    pointed = {*columns, *partial, *numbers.inserted_window_dims}
    begin = min(pointed)
    end = max({*pointed, *(dim for dim in batching if dim > begin)}) + 1
    rows = range(begin, end)
    if not known and (len(rows) > 1 or (begin in window_of and not isinstance(shape[begin], int))):
        return "sizes are variables of jax.export"
    step = {**window_of, **{dim: i for dim, i in batching.items() if dim >= begin}}
    batch = tuple({**window_of, **batching}[dim] for dim in range(begin))
    batch_of_ids = tuple(batching[dim] for dim in range(begin) if dim in batching)
    return Rows(
        shape,
        updates_shape,
        begin,
        end,
        columns=tuple(columns.get(dim) for dim in rows),
        steps=tuple(step.get(dim) for dim in rows),
        windows=tuple(window.get(dim, 1) for dim in rows),
        batch=batch,
        batch_of_ids=batch_of_ids,
        index=tuple(i for i in scatter_dims if i not in batch_of_ids),
        expanded=tuple(window_of[dim] for dim in rows if dim in window_of),
        trailing=tuple(window_of[dim] for dim in range(end, len(shape))),
        scatter_dims=scatter_dims,
        clip=clip,
        indices_are_sorted=indices_are_sorted,
    )


def precision(rows: Rows) -> contextlib.AbstractContextManager[Any]:
    """A context in which ids can name all rows: with 64-bit dtypes if 32 bits are too few."""
    wide = not rows.is_plain and rows.count > _INT32_MAX
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
