"""Finds sums along two neighbouring axes, one after the other, and computes both in one pass.

Such sums are the gradient of lookups along both axes, as in `jax.image.resize` or
`x[:, i][:, :, j]`. Two kernels would write and read the array between them.

The second sum is lowered when the first one is in the program already. So its lowering rule looks
at the call that made its updates. XLA removes that call if nothing else reads the result.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_oneflow_ops import _compat, _emit, _scatter_policy, _scatter_rows


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of rows. `indices` is a value of MLIR, and `scatters.as_written` explains `read`."""

    rows: _scatter_rows.Rows
    read: str
    indices: Any

    @property
    def ids(self) -> Any:
        """The type of the indices as ids (N,); None unless there is one for each update."""
        aval, shape = _emit.aval_of(self.indices), self.rows.sizes(self.rows.index)
        if aval is None or aval.shape not in ((), shape, (*shape, 1)):
            return None  # () if they are broadcast from one id
        return aval.update(shape=shape)

    @property
    def axis(self) -> int | None:
        """The axis, or None if this is another scatter."""
        rows = self.rows
        has_ids = rows.is_plain and not rows.batch_of_ids and rows.index == (rows.begin,)
        return rows.begin if has_ids and self.read in ("", "wrap") else None

    @property
    def rule(self) -> tuple[int, bool, bool]:
        """The number of rows, and whether to wrap and to clip ids."""
        return self.rows.count, self.read == "wrap", self.rows.clip


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sums along two neighbouring axes.

    Attributes:
      first: the sum along the first of the axes.
      second: the sum along the axis after it.
      between: the result of the sum that the program computes first, a value of MLIR.
      updates: what that sums, a value of MLIR.
      aval: the type of the updates.
    """

    first: Sum
    second: Sum
    between: Any
    updates: Any
    aval: Any

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (O, M, N, D) of the updates: M and N are the axes, and D elements a row."""
        shape, axis = self.aval.shape, self.first.rows.begin
        return math.prod(shape[:axis]), *shape[axis : axis + 2], math.prod(shape[axis + 2 :])

    def pays(self) -> bool:
        """Whether one pass is expected to be faster than two."""
        rows = self.first.rows.count, self.second.rows.count
        return _scatter_policy.grid_pays(self.sizes, rows)

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers the sums. `ctx` is that of the sum that the program computes last."""
        values = self.first.indices, self.second.indices, self.updates
        whole = self.first.ids, self.second.ids, self.aval
        # Values that are broadcast from scalars are scalars here.
        avals = [
            all_ if _emit.is_scalar(x) else _emit.aval_of(x)
            for x, all_ in zip(values, whole, strict=True)
        ]
        results = _emit.lower(
            *(_sum_grid, ctx.replace(avals_in=avals), *values),
            sizes=self.sizes,
            rules=(self.first.rule, self.second.rule),
        )
        return _compat.with_shardings_of_types(ctx, results)


def find(last: Sum, updates: Any, rows: _scatter_rows.Rows, read: str) -> Grid | None:
    """The sums along two axes that end with a sum of `updates` into zeros, or None.

    A call of a kernel made these updates: it sums `rows`, and reads indices as `read` says.
    """
    _, indices, source = _compat.operands_of(updates, "func.call")
    before = Sum(rows, read, indices)
    if last.axis is None or before.axis is None or abs(last.axis - before.axis) != 1:
        return None
    first, second = (before, last) if before.axis < last.axis else (last, before)
    i, j, aval = first.ids, second.ids, _emit.aval_of(source)
    if i is None or j is None or aval is None or i.dtype != j.dtype:
        return None
    # The kernel has no integers of fewer than 32 bits.
    is_added = aval.dtype.itemsize >= 4 or jnp.issubdtype(aval.dtype, jnp.floating)
    aval = aval.update(shape=rows.updates_shape)
    return Grid(first, second, updates, source, aval) if is_added else None


def _sum_grid(
    i: Any,
    j: Any,
    updates: Any,
    *,
    sizes: tuple[int, int, int, int],
    rules: tuple[tuple[int, bool, bool], tuple[int, bool, bool]],
) -> Any:
    (rows, wrap_rows, clip_rows), (columns, wrap_columns, clip_columns) = rules
    outer, m, n, inner = sizes
    (result,) = updates.ctx.avals_out
    sums, _ = _emit.ffi_call(
        "jof_sum_grid",
        [
            jax.ShapeDtypeStruct((outer, rows, columns, inner), updates.dtype),
            jax.ShapeDtypeStruct((rows + 1 + m + columns + 1 + n,), np.dtype("int32")),
        ],
        updates.reshape(sizes),
        i.reshape(m),
        j.reshape(n),
        rows=np.int64(rows),
        columns=np.int64(columns),
        wrap_rows=np.bool_(wrap_rows),
        wrap_columns=np.bool_(wrap_columns),
        clip_rows=np.bool_(clip_rows),
        clip_columns=np.bool_(clip_columns),
    )
    return sums.reshape(result.shape)
