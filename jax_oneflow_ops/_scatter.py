"""The primitives of sums and gathers of rows, and their rules.

There are four: sums into zeros (segment_sum), sums into an operand (scatter_add), maxima, minima
or products with an operand (scatter_reduce), and gathers. Sums into zeros and gathers are each
other's transposes. All four have the parameter `indexing`, which says what the operands' dimensions
mean.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _emit, _policy, _primitive, _reference, _scatter_policy
from jax_oneflow_ops._indexing import Indexing
from jax_oneflow_ops._primitive import bind

_SUMMED = frozenset(
    jnp.dtype(name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)
_REDUCED = frozenset(dtype for dtype in _SUMMED if dtype.kind != "c")
_INT32_MAX = 2**31 - 1
_AS_STORED = Indexing()  # ids are rows already, or out of range


def is_summed(dtype: Any, reducer: str = "add") -> bool:
    """Whether there are kernels that reduce elements of `dtype`."""
    reduced = _SUMMED if reducer == "add" else _REDUCED
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.dtype(dtype) in reduced


# ---- types and shardings ----


def mean_of(total: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    """Row sums divided by row counts, computed in a dtype that represents every count."""
    divisor = jnp.maximum(count, 1).reshape(-1, *(1,) * (total.ndim - 1))
    return total.astype(dtype) / divisor.astype(dtype)


def _index_spec(ids: Any, indexing: Indexing) -> tuple[Any, ...]:
    return tuple(ids.sharding.spec)[indexing.index_begin() :]


def _typed(
    like: Any, ids: Any, middle: Sequence[int], middle_spec: Sequence[Any], cut: int, how: Indexing
) -> Any:
    """The type of `like` with the `cut` dimensions after the batch replaced by `middle`.

    On a mesh with Explicit axes, a batch dimension takes its sharding from either operand. A mesh
    axis that would shard two dimensions shards only the first.
    """
    n = how.batch
    shape = (*like.shape[:n], *middle, *like.shape[n + cut :])
    own, of_ids = tuple(like.sharding.spec), tuple(ids.sharding.spec)
    batch = own[:n]
    if not how.shared:
        batch = tuple(a or b for a, b in zip(batch, of_ids[:n], strict=True))
    used: set[str] = set()
    spec = []
    for entry in (*batch, *middle_spec, *own[n + cut :]):
        spec.append(None if used.intersection(_compat.names_of(entry)) else entry)
        used.update(_compat.names_of(entry))
    return _compat.with_spec(like, shape, spec)


def _unless_index_has_it(entry: Any, ids: Any, indexing: Indexing) -> Any:
    """The sharding of a table's rows after updates are added to them.

    None if the same mesh axes shard ids: then every device has partial sums for all rows.
    """
    used = {axis for of_index in _index_spec(ids, indexing) for axis in _compat.names_of(of_index)}
    return None if used.intersection(_compat.names_of(entry)) else entry


def _segment_sum_type(
    data: Any, ids: Any, *, num_segments: int, rows_spec: Any, indexing: Indexing
) -> Any:
    rank = indexing.index_rank(ids)
    # On one device's shard there is no mesh.
    rows_spec = None if data.sharding.mesh.empty else rows_spec
    spec = _unless_index_has_it(rows_spec, ids, indexing)
    return _typed(data, ids, (num_segments,), (spec,), rank, indexing).update(weak_type=False)


def _scatter_add_type(
    operand: Any, ids: Any, updates: Any, *, indexing: Indexing, reducer: str = "add"
) -> Any:
    rank = indexing.row_rank
    rows = slice(indexing.batch, indexing.batch + rank)
    spec = [_unless_index_has_it(s, ids, indexing) for s in operand.sharding.spec[rows]]
    return _typed(operand, ids, operand.shape[rows], spec, rank, indexing)


def _gather_rows_type(table: Any, ids: Any, *, fill: str | bytes, indexing: Indexing) -> Any:
    index = ids.shape[indexing.index_begin() :]
    return _typed(table, ids, index, _index_spec(ids, indexing), 1, indexing)


def _names(ids: Any, ndim: int, indexing: Indexing) -> tuple[list[str], ...]:
    """Names for the dimensions of ids, their index part, the batch and the trailing part."""
    batch = [f"b{i}" for i in range(indexing.batch)]
    index = [f"i{i}" for i in range(len(ids.shape) - indexing.index_begin())]
    trailing = [f"t{i}" for i in range(ndim - indexing.batch)]
    return batch[: indexing.index_begin()] + index, index, batch, trailing


_ROWS = "r"


def _segment_sum_sharding_rule(
    data: Any, ids: Any, *, num_segments: int, indexing: Indexing, **_: Any
) -> _primitive.ShardingRule:
    rank = len(ids.shape) - indexing.index_begin()
    of_ids, index, batch, trailing = _names(ids, len(data.shape) - rank, indexing)
    return _primitive.ShardingRule(
        [batch + index + trailing, of_ids],
        [[*batch, _ROWS, *trailing]],
        rows=_ROWS,
        params_of_shard=lambda shards: {"num_segments": num_segments // shards},
    )


def _scatter_add_sharding_rule(
    operand: Any, ids: Any, _: Any, *, indexing: Indexing, reducer: str = "add"
) -> _primitive.ShardingRule:
    rank = indexing.row_rank
    of_ids, index, batch, trailing = _names(ids, len(operand.shape) - rank, indexing)
    inner = [f"r{i}" for i in range(1, rank)]
    table = [*batch, _ROWS, *inner, *trailing]
    operands = [table, of_ids, batch + index + trailing]
    return _primitive.ShardingRule(operands, [table], frozenset(inner), rows=_ROWS)


def _gather_rows_sharding_rule(
    table: Any, ids: Any, *, indexing: Indexing, **_: Any
) -> _primitive.ShardingRule:
    of_ids, index, batch, trailing = _names(ids, len(table.shape) - 1, indexing)
    table = [*batch, _ROWS, *trailing]
    return _primitive.ShardingRule([table, of_ids], [batch + index + trailing], rows=_ROWS)


def _in_shard(
    ids: Any, rows: int, shard: _primitive.Shard, indexing: Indexing
) -> tuple[Any, Indexing, Any]:
    """Ids relative to this device's shard of `rows` rows, and how to read them.

    Sorted ids stay sorted: ids of rows on other devices are out of range on either side. Also
    returns which ids name a row on any device; None if rows are not sharded.
    """
    if not shard.rows:
        return ids, indexing, None
    total = rows * jax.lax.psum(1, shard.rows)
    first = (jax.lax.axis_index(shard.rows) * rows).astype(ids.dtype)
    ids, valid = indexing.resolved(ids, total)
    ids = jnp.clip(jnp.clip(ids, -1, total) - first, -1, rows)
    return ids, dataclasses.replace(indexing, wrap=False, clip=False), valid


def _segment_sum_on_shard(
    call: Callable[..., Any],
    shard: _primitive.Shard,
    data: Any,
    ids: Any,
    *,
    num_segments: int,
    indexing: Indexing,
    **params: Any,
) -> jax.Array:
    ids, indexing, _ = _in_shard(ids, num_segments, shard, indexing)
    sums = call(data, ids, num_segments=num_segments, indexing=indexing, **params)
    return _primitive.sum_over(shard.summed, sums)


def _scatter_add_on_shard(
    call: Callable[..., Any],
    shard: _primitive.Shard,
    operand: Any,
    ids: Any,
    updates: Any,
    *,
    indexing: Indexing,
) -> jax.Array:
    """Adds the operand once, except where the sum is 0: all-reduces do not preserve -0."""
    ids, indexing, _ = _in_shard(ids, indexing.rows(operand.shape), shard, indexing)
    if not shard.summed:
        result: jax.Array = call(operand, ids, updates, indexing=indexing)
        return result

    def add(total: jax.Array) -> jax.Array:
        start = operand.astype(total.dtype)
        return jnp.where(total == 0, start, start + total)

    sums = call(jnp.zeros_like(operand), ids, updates, indexing=indexing)
    return _primitive.sum_over(shard.summed, sums, add)


def _scatter_reduce_on_shard(
    call: Callable[..., Any],
    shard: _primitive.Shard,
    operand: Any,
    ids: Any,
    updates: Any,
    *,
    indexing: Indexing,
    reducer: str,
) -> jax.Array:
    """Reduces the updates of each device, then the results of all devices.

    Each device's product starts from ones; the operand is multiplied in at the end.
    """
    ids, indexing, _ = _in_shard(ids, indexing.rows(operand.shape), shard, indexing)
    is_product = bool(shard.summed) and reducer == "multiply"
    start = jnp.ones_like(operand) if is_product else operand
    result: jax.Array = call(start, ids, updates, indexing=indexing, reducer=reducer)
    if is_product:
        all_gather: Callable[..., Any] = jax.lax.all_gather
        products = all_gather(result, shard.summed)
        products = products.astype(_wide(result.dtype))
        product: jax.Array = operand * jnp.prod(products, 0, dtype=products.dtype)
        return product.astype(result.dtype)
    if shard.summed:
        reduce: Callable[..., Any] = jax.lax.pmax if reducer == "max" else jax.lax.pmin
        # All-reduces may drop NaNs.
        is_nan = jax.lax.psum((result != result).astype(jnp.int32), shard.summed) > 0
        nan = jnp.full_like(result, jnp.nan) if result.dtype.kind not in "iu" else result
        result = jnp.where(is_nan, nan, reduce(result, shard.summed))
    return result


def _wide(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are computed."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def _gather_rows_on_shard(
    call: Callable[..., Any],
    shard: _primitive.Shard,
    table: Any,
    ids: Any,
    *,
    fill: str | bytes,
    indexing: Indexing,
) -> jax.Array:
    """Gathers zeros for rows of other devices; the sum has the bits of the device with the row."""
    ids, indexing, valid = _in_shard(ids, table.shape[indexing.batch], shard, indexing)
    found = call(table, ids, fill="zero", indexing=indexing)
    found = _primitive.sum_of_bits_over(shard.rows, found)
    if fill == "zero":
        return found
    begin = indexing.batch if indexing.shared else 0
    shape = (1,) * begin + valid.shape + (1,) * (found.ndim - begin - valid.ndim)
    return jnp.where(valid.reshape(shape), found, _reference.fill_value(table.dtype, fill))


# ---- native kernels, on one device ----


def add_rows(
    platform: str,
    operand: Any,
    ids: Any,
    updates: Any,
    rows: int,
    indexing: Indexing,
    reducer: str = "add",
) -> Any:
    """Reduces rows of `updates` into `operand`, or sums them into zeros if `operand` is None."""
    n, rank, dtype = indexing.batch, indexing.index_rank(ids), updates.dtype
    trailing = updates.shape[n + rank :]
    shape = (*updates.shape[:n], rows, *trailing) if operand is None else operand.shape
    if math.prod(shape) == 0 or updates.size == 0:
        return updates.__array_namespace__().zeros(shape, dtype) if operand is None else operand
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        # Exact: 32-bit results are right modulo any smaller power of two. The kernels have no
        # atomics of fewer bits.
        wide = None if operand is None else operand.astype(jnp.int32)
        updates = updates.astype(jnp.int32)
        return add_rows(platform, wide, ids, updates, rows, indexing, reducer).astype(dtype)
    batch, inner = math.prod(shape[:n]), math.prod(trailing)
    updates = updates.reshape(batch, -1, inner)
    ids = ids.reshape(1 if indexing.shared else batch, -1)
    # Integers have the same sum in any order. Kernels with sorted ids keep the order, too.
    in_order = indexing.deterministic or indexing.indices_are_sorted
    ordered = in_order and bool(jnp.issubdtype(dtype, jnp.inexact))
    ordered = ordered and reducer not in ("max", "min")
    p = _scatter_policy.Problem(
        *(platform, batch, updates.shape[1], rows, inner, dtype, reducer),
        ordered=ordered,
        is_sorted=indexing.indices_are_sorted,
        shared=indexing.shared,
        equal=_emit.are_equal(updates),
    )
    plan = _scatter_policy.plan(p)
    call = functools.partial(_call, p, plan, shape, operand)
    if plan.sort:
        return _sort_and_sum(call, p, ids, updates, indexing)
    if plan.strategy == "sorted":
        if indexing.wrap or indexing.clip:
            # The promise is about the rows that ids name, and a row must have one run of equal ids.
            ids, _ = indexing.resolved(ids, rows)
        indexing = _AS_STORED
    return call(updates, ids, indexing)


def add_columns(
    p: _scatter_policy.Problem, shape: Sequence[int], ids: Any, updates: Any, clip: bool
) -> Any:
    """Sums `updates` into zeros where each column of a row has its own ids."""
    plan = _scatter_policy.Plan("columns", (0, 0, 0))
    updates, ids = updates.reshape(p.batch, p.updates, p.inner), ids.reshape(p.batch, -1)
    return _call(p, plan, shape, None, updates, ids, Indexing(clip=clip))


def _sort_and_sum(
    call: Callable[..., Any],
    p: _scatter_policy.Problem,
    ids: Any,
    updates: Any,
    indexing: Indexing,
) -> Any:
    """Sorts ids and sums: the ids of all problems as one problem, or shared ids once."""
    flat = p.flat()
    updates = updates.reshape(flat.batch, flat.updates, p.inner)
    with _wide_ids(flat):
        order: Any
        if p.is_element() and not (p.platform == "cpu" and p.has_known_sizes()):
            # Single elements are sorted along with their ids. For rows, the row numbers are.
            keys = _sort_keys(_ids_to_sort(p, ids), p.rows, indexing)
            keys, values = _emit.sort_pairs(keys, updates.reshape(-1))
            keys, order, updates = _as_read(p, keys), None, values.reshape(updates.shape)
        else:
            keys, order = sort_rows(p, ids, indexing)
        return call(updates, keys.reshape(1, -1), order=order)


def sort_rows(p: _scatter_policy.Problem, ids: Any, indexing: Indexing) -> tuple[Any, Any]:
    """Sorts the ids of all problems, or shared ids once.

    Returns the rows that they name, in order, and the position that each had before.
    """
    flat = p.flat()
    with _wide_ids(flat):
        ids = _ids_to_sort(p, ids)
        if p.has_known_sizes() and (p.platform == "cpu" or _index_dtype(flat) == jnp.int32):
            return sort_ids(p.platform, ids, p.rows, indexing)
        keys = _sort_keys(ids, p.rows, indexing)
        numbers = ids.__array_namespace__().arange(flat.updates, dtype=_index_dtype(flat))
        keys, numbers = _emit.sort_pairs(keys, numbers)
        return _as_read(p, keys), numbers


def _ids_to_sort(p: _scatter_policy.Problem, ids: Any) -> Any:
    """The ids of the problems that are sorted together, in a dtype that can name all rows."""
    flat = p.flat()
    dtype = jnp.int64 if _index_dtype(flat) == jnp.int64 else ids.dtype
    shape = (1 if flat is p else p.batch, p.updates)
    return ids.__array_namespace__().broadcast_to(ids.astype(dtype), shape)


def _as_read(p: _scatter_policy.Problem, keys: Any) -> Any:
    """Sorted keys in a dtype that the kernels read."""
    is_read = keys.dtype == jnp.uint16 and p.platform != "cpu"
    return keys if is_read else keys.astype(_index_dtype(p.flat()))


def _index_dtype(flat: _scatter_policy.Problem) -> Any:
    is_long = not flat.has_known_sizes() or max(flat.updates, flat.rows) >= _INT32_MAX
    return jnp.int64 if is_long else jnp.int32


def _wide_ids(flat: _scatter_policy.Problem) -> contextlib.AbstractContextManager[Any]:
    """A context in which ids can name all rows and updates."""
    return jax.enable_x64(True) if _index_dtype(flat) == jnp.int64 else contextlib.nullcontext()


def sort_ids(platform: str, ids: Any, rows: int, indexing: Indexing) -> tuple[Any, Any]:
    """Calls the native sort of ids of shape (problems, positions), with the results of `sort_rows`.

    On GPUs the number of positions, and the rows of all problems, must be below 2**31. There, keys
    of fewer than 2**16 rows are uint16.
    """
    count, total, is_cpu = ids.size, ids.shape[0] * rows, platform == "cpu"
    dtype = ids.dtype if is_cpu else jnp.dtype("int32")
    key_dtype = jnp.dtype("uint16") if not is_cpu and total < 2**16 else dtype
    scratch = _scatter_policy.sort_scratch(platform, count, total)
    results = [
        jax.ShapeDtypeStruct((1, count), key_dtype),
        jax.ShapeDtypeStruct((count,), dtype),
        jax.ShapeDtypeStruct((scratch,), dtype),
    ]
    keys, order, _ = _emit.ffi_call(
        "jof_sort_rows", results, ids, size=np.int64(rows), **_rule(indexing)
    )
    return keys, order


def _sort_keys(ids: Any, rows: int, indexing: Indexing) -> Any:
    """The number of each id's row among the rows of all problems.

    An id that names no row gets the total number of rows. Keys have the narrowest possible dtype: a
    radix sort takes one pass per byte.
    """
    batch, total = ids.shape[0], ids.shape[0] * rows
    sizes = ((jnp.uint16, 2**16), (jnp.uint32, 2**32), (jnp.uint64, 2**64))
    key = next((d for d, limit in sizes if isinstance(total, int) and total < limit), jnp.uint64)
    ids, valid = indexing.resolved(ids, rows)
    # Compute in uint32 at least: 16-bit arithmetic is no faster on a device.
    wide = jnp.uint32 if key is jnp.uint16 else key
    xp, keys = ids.__array_namespace__(), ids.astype(wide)
    if not isinstance(batch, int) or batch > 1:
        keys = keys + xp.arange(batch, dtype=wide).reshape(-1, 1) * xp.asarray(rows, wide)
    keys = xp.where(valid, keys, xp.asarray(total, wide))
    return keys.astype(key).reshape(-1)


def _call(
    p: _scatter_policy.Problem,
    plan: _scatter_policy.Plan,
    shape: Sequence[int],
    operand: Any,
    updates: Any,
    ids: Any,
    indexing: Indexing = _AS_STORED,
    *,
    order: Any = None,
) -> Any:
    """Makes the FFI call. Its scratch space is a second result, which is not used.

    The operand and the result are not reshaped: XLA would copy the operand, even if it is donated.
    """
    xp = updates.__array_namespace__()
    if plan.strategy == "private" and p.is_element() and p.equal:
        kind = None if p.platform == "cpu" else _policy.device_kind(p.platform)
        if _scatter_policy.takes_one_update(p, kind):
            updates = _emit.one_of_each(updates)  # saves writing and reading equal updates
    result, _ = _emit.ffi_call(
        f"jof_scatter_{p.reducer}_{plan.strategy}",
        [
            jax.ShapeDtypeStruct(shape, p.dtype),
            jax.ShapeDtypeStruct(plan.scratch, p.compute_dtype),
        ],
        xp.zeros((0, 0, 0), p.dtype) if operand is None else operand,
        updates,
        ids,
        xp.zeros(0, jnp.int32) if order is None else order,
        aliases=None if operand is None else {0: 0},
        deterministic=np.bool_(p.ordered),
        **_rule(indexing),
    )
    return result


def _rule(indexing: Indexing) -> dict[str, Any]:
    return {"wrap": np.bool_(indexing.wrap), "clip": np.bool_(indexing.clip)}


def _segment_sum_native(
    platform: str, data: Any, ids: Any, *, num_segments: int, indexing: Indexing, rows_spec: Any
) -> Any:
    if not is_summed(data.dtype):  # such as the cotangent of a gather of 8-bit floats
        return _reference.segment_sum(data, ids, num_segments=num_segments, indexing=indexing)
    return add_rows(platform, None, ids, data, num_segments, indexing)


def _scatter_add_native(
    platform: str, operand: Any, ids: Any, updates: Any, *, indexing: Indexing
) -> Any:
    return add_rows(platform, operand, ids, updates, indexing.rows(operand.shape), indexing)


def _scatter_reduce_native(
    platform: str, operand: Any, ids: Any, updates: Any, *, indexing: Indexing, reducer: str
) -> Any:
    if not is_summed(operand.dtype, reducer):
        return _reference.scatter_reduce(operand, ids, updates, indexing=indexing, reducer=reducer)
    rows = indexing.rows(operand.shape)
    return add_rows(platform, operand, ids, updates, rows, indexing, reducer)


def _gather_rows_native(
    platform: str, table: Any, ids: Any, *, fill: str | bytes, indexing: Indexing
) -> Any:
    n, dtype = indexing.batch, table.dtype
    rows, inner = table.shape[n], math.prod(table.shape[n + 1 :])
    shape = (*table.shape[:n], *ids.shape[indexing.index_begin() :], *table.shape[n + 1 :])
    value = _reference.fill_value(dtype, fill)
    if table.size == 0 or ids.size == 0:
        return jnp.full(shape, value, dtype)
    batch = math.prod(shape[:n])
    ids = ids.reshape(1 if indexing.shared else batch, -1)
    call = jax.ffi.ffi_call(
        "jof_gather_rows", jax.ShapeDtypeStruct((batch, ids.shape[1], inner), dtype)
    )
    element = np.frombuffer(value.tobytes().ljust(16, b"\0"), np.int64)
    return call(table.reshape(batch, rows, inner), ids, **_rule(indexing), fill=element).reshape(
        shape
    )


# ---- batching ----


def _place(x: Any, axis: int | None, at: int, size: int) -> Any:
    """`x` with its batch axis at `at`, broadcast if it has none."""
    if axis is not None:
        return jnp.moveaxis(x, axis, at)
    x = jnp.expand_dims(x, at)
    return jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))


def _place_ids(
    ids: Any, axis: int | None, at: int, batch: Sequence[int], indexing: Indexing
) -> tuple[Any, Indexing]:
    """Ids with a batch dimension added at `at`, and their rule. `batch` holds all batch sizes."""
    if axis is None and indexing.shared:
        return ids, dataclasses.replace(indexing, batch=len(batch))
    if indexing.shared and axis is not None:
        ids = jnp.moveaxis(ids, axis, 0)
        ids = ids.reshape(*(n if i == at else 1 for i, n in enumerate(batch)), *ids.shape[1:])
        ids = jnp.broadcast_to(ids, (*batch, *ids.shape[len(batch) :]))
    else:
        ids = _place(ids, axis, at, batch[at])
    return ids, dataclasses.replace(indexing, batch=len(batch), shared=False)


def _size(args: Sequence[Any], dims: Sequence[int | None]) -> Any:
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


def _segment_sum_batch(
    primitive: core.Primitive, args: Any, dims: Any, *, indexing: Indexing, **params: Any
) -> Any:
    """The batch axis of data becomes one more leading or trailing dimension.

    It stays in place if possible. An axis between index dimensions is moved to the front, as is a
    trailing one if ids have a batch axis, too.
    """
    (data, ids), (axis, ids_axis) = args, dims
    n = indexing.batch
    rank = indexing.index_rank(ids) - (ids_axis is not None)
    if ids_axis is None and axis >= n + rank:
        return bind(primitive, data, ids, indexing=indexing, **params), axis - rank + 1
    at = axis if axis is not None and axis <= n else 0
    data = _place(data, axis, at, _size(args, dims))
    ids, indexing = _place_ids(ids, ids_axis, at, data.shape[: n + 1], indexing)
    return bind(primitive, data, ids, indexing=indexing, **params), at


def _scatter_add_batch(
    primitive: core.Primitive, args: Any, dims: Any, *, indexing: Indexing, **params: Any
) -> Any:
    """As for segment_sum; the operand's batch axis is moved to match that of the updates."""
    (operand, ids, updates), (axis, ids_axis, updates_axis) = args, dims
    n, size = indexing.batch, _size(args, dims)
    rank = indexing.index_rank(ids) - (ids_axis is not None)
    # Keep the axis of the updates in place, as they are usually the larger array.
    trailing = updates_axis - n - rank if updates_axis is not None else (axis or 0) - n - 1
    if ids_axis is None and trailing >= 0:
        operand = _place(operand, axis, n + 1 + trailing, size)
        updates = _place(updates, updates_axis, n + rank + trailing, size)
        result = bind(primitive, operand, ids, updates, indexing=indexing, **params)
        return result, n + 1 + trailing
    at = next((d for d in (updates_axis, axis) if d is not None and d <= n), 0)
    operand, updates = _place(operand, axis, at, size), _place(updates, updates_axis, at, size)
    ids, indexing = _place_ids(ids, ids_axis, at, operand.shape[: n + 1], indexing)
    return bind(primitive, operand, ids, updates, indexing=indexing, **params), at


def _gather_rows_batch(
    primitive: core.Primitive, args: Any, dims: Any, *, indexing: Indexing, **params: Any
) -> Any:
    """If the table has no batch axis, that of the ids becomes an index dimension: no copies."""
    (table, ids), (axis, ids_axis) = args, dims
    n = indexing.batch
    if axis is None:
        begin = indexing.index_begin()
        at = max(ids_axis, begin)
        # The caller's promises hold for each example, but not for all of them together.
        indexing = dataclasses.replace(indexing, indices_are_sorted=False, unique_indices=False)
        ids = jnp.moveaxis(ids, ids_axis, at)
        return bind(primitive, table, ids, indexing=indexing, **params), n + at - begin
    rank = indexing.index_rank(ids) - (ids_axis is not None)
    if ids_axis is None and axis > n:
        return bind(primitive, table, ids, indexing=indexing, **params), axis - 1 + rank
    at = axis if axis <= n else 0
    table = _place(table, axis, at, _size(args, dims))
    ids, indexing = _place_ids(ids, ids_axis, at, table.shape[: n + 1], indexing)
    return bind(primitive, table, ids, indexing=indexing, **params), at


# ---- what the choice between kernels and XLA depends on ----


def _sum_call(
    updates: Any, ids: Any, rows: int, indexing: Indexing, reducer: str = "sum"
) -> _policy.Call | str:
    """The call of a sum. It does not depend on `unique_indices`: any row may be hot."""
    if indexing.deterministic:
        return "sums in a fixed order"
    n, rank = indexing.batch, indexing.index_rank(ids)
    inner, count = math.prod(updates.shape[n + rank :]), math.prod(updates.shape[n : n + rank])
    width = _width(inner, updates)
    order = "sorted ids" if indexing.indices_are_sorted else "any ids"
    result = math.prod(updates.shape[:n]) * rows * inner * updates.dtype.itemsize
    moved = _policy.nbytes(updates, ids) + result
    kind = (reducer, width, _policy.bits(updates.dtype), order)
    hits = max(1, count // max(1, rows))  # per row, on average: atomics of XLA wait for each other
    return _policy.Call(kind, moved, (hits, math.prod(updates.shape)))


def _width(inner: int, rows: Any) -> str:
    is_narrow = inner * rows.dtype.itemsize <= 32  # a sector
    return "elements" if inner == 1 else "narrow rows" if is_narrow else "wide rows"


def _gather_call(table: Any, ids: Any, *, indexing: Indexing, **_: Any) -> _policy.Call:
    inner = math.prod(table.shape[indexing.batch + 1 :])
    copies = math.prod(table.shape[: indexing.batch]) if indexing.shared else 1
    row = inner * table.dtype.itemsize
    moved = _policy.nbytes(ids) + 2 * copies * math.prod(ids.shape) * row
    return _policy.Call(("gather", _policy.bits(table.dtype), _width(inner, table)), moved)


# ---- the primitives and their derivatives ----


def _function(*, indexing: Indexing, **_: Any) -> str:
    return indexing.function


segment_sum_p = _primitive.define(
    "jof_segment_sum",
    function=_function,
    abstract_eval=_segment_sum_type,
    reference=_reference.segment_sum,
    native=_segment_sum_native,
    sharding_rule=_segment_sum_sharding_rule,
    on_shard=_segment_sum_on_shard,
    batch=_segment_sum_batch,
    call=lambda data, ids, *, num_segments, indexing, **_: _sum_call(
        data, ids, num_segments, indexing
    ),
)
scatter_add_p = _primitive.define(
    "jof_scatter_add",
    function=_function,
    abstract_eval=_scatter_add_type,
    reference=_reference.scatter_add,
    native=_scatter_add_native,
    sharding_rule=_scatter_add_sharding_rule,
    on_shard=_scatter_add_on_shard,
    batch=_scatter_add_batch,
    call=lambda operand, ids, updates, *, indexing: _sum_call(
        updates, ids, indexing.rows(operand.shape), indexing
    ),
)
scatter_reduce_p = _primitive.define(
    "jof_scatter_reduce",
    function=_function,
    abstract_eval=_scatter_add_type,
    reference=_reference.scatter_reduce,
    native=_scatter_reduce_native,
    sharding_rule=_scatter_add_sharding_rule,
    on_shard=_scatter_reduce_on_shard,
    batch=_scatter_add_batch,
    call=lambda operand, ids, updates, *, indexing, reducer: _sum_call(
        updates, ids, indexing.rows(operand.shape), indexing, reducer
    ),
)
gather_rows_p = _primitive.define(
    "jof_gather_rows",
    function=_function,
    abstract_eval=_gather_rows_type,
    reference=_reference.gather_rows,
    native=_gather_rows_native,
    sharding_rule=_gather_rows_sharding_rule,
    on_shard=_gather_rows_on_shard,
    batch=_gather_rows_batch,
    call=_gather_call,
)


def _segment_sum_transpose(
    ct: Any, data: Any, ids: Any, *, indexing: Indexing, implementation: str | None, **_: Any
) -> list[Any]:
    params = {"indexing": indexing, "implementation": implementation}
    return [bind(gather_rows_p, ct, ids, fill="zero", **params), None]


def _sum_into_rows_of(table: Any, data: Any, ids: Any, *, indexing: Indexing, **params: Any) -> Any:
    """The sum of data into zeros of a table's type."""
    return bind(
        segment_sum_p,
        data,
        ids,
        num_segments=table.shape[indexing.batch],
        rows_spec=table.sharding.spec[indexing.batch],
        indexing=indexing,
        **params,
    )


def _gather_rows_transpose(
    ct: Any, table: Any, ids: Any, *, fill: str | bytes, indexing: Indexing, **params: Any
) -> list[Any]:
    return [_sum_into_rows_of(table.aval, ct, ids, indexing=indexing, **params), None]


def _scatter_add_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    _, ids, _ = primals
    operand, _, updates = tangents
    result = bind(scatter_add_p, *primals, **params)
    aval = jax.typeof(result)
    if isinstance(updates, ad.Zero):
        if isinstance(operand, ad.Zero):
            return result, _primitive.total([], result)
        return result, _compat.with_sharding_of(operand, aval)
    if isinstance(operand, ad.Zero):
        tangent = _sum_into_rows_of(aval, updates, ids, **params)
        return result, _compat.with_sharding_of(tangent, aval)
    return result, bind(scatter_add_p, operand, ids, updates, **params)


def _scatter_add_transpose(
    ct: Any, operand: Any, ids: Any, updates: Any, **params: Any
) -> list[Any]:
    of_updates = None
    if ad.is_undefined_primal(updates):
        of_updates = _segment_sum_transpose(ct, updates, ids, **params)[0]
    return [ct, None, of_updates]


def _check_unique(indexing: Indexing) -> None:
    """Rejects the derivative of a product by its updates if ids may repeat, as JAX does."""
    if not indexing.unique_indices:
        raise NotImplementedError(
            f"{indexing.function}: the derivative with respect to the rows that are multiplied "
            "needs unique_indices=True, as that of jax.lax.scatter_mul does"
        )


def _scatter_reduce_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    reducer: str,
    indexing: Indexing,
    implementation: str | None,
) -> Any:
    """As for `jax.lax.scatter_max`, values that equal a maximum or minimum share its tangent."""
    operand, ids, updates = primals
    of_operand, _, of_updates = tangents
    params: dict[str, Any] = {"indexing": indexing, "implementation": implementation}
    reduce = functools.partial(bind, scatter_reduce_p, reducer=reducer, **params)
    result = reduce(operand, ids, updates)
    if isinstance(of_operand, ad.Zero) and isinstance(of_updates, ad.Zero):
        return result, _primitive.total([], result)
    aval = jax.typeof(result)

    def like_result(x: Any) -> Any:
        return _compat.with_sharding_of(x, aval)

    def add(rows: Any) -> Any:
        return like_result(_sum_into_rows_of(aval, rows, ids, **params))

    terms: list[Any] = []
    if reducer == "multiply":
        if not isinstance(of_operand, ad.Zero):
            terms.append(reduce(of_operand, ids, updates))
        if not isinstance(of_updates, ad.Zero):
            _check_unique(indexing)
            terms.append(like_result(operand) * add(of_updates))
        return result, _primitive.total(terms, result)
    # On Explicit axes, updates may be sharded differently from ids and the operand.
    found = bind(gather_rows_p, result, ids, fill="zero", **params)
    found = _compat.with_sharding_of(found, jax.typeof(updates))
    is_hit = updates == found
    # Nothing equals NaN. Where the result is NaN, all updates of the row are counted, so that a row
    # without updates can be told from others: it keeps its tangent.
    hits = add((is_hit | (found != found)).astype(updates.dtype))
    is_kept = (like_result(operand) == result) | ((result != result) & (hits == 0))
    hits += is_kept.astype(result.dtype)
    if not isinstance(of_operand, ad.Zero):
        of_operand = like_result(of_operand)
        terms.append(jnp.where(is_kept, of_operand, jnp.zeros_like(of_operand)))
    if not isinstance(of_updates, ad.Zero):
        terms.append(add(jnp.where(is_hit, of_updates, jnp.zeros_like(of_updates))))
    return result, _primitive.total(terms, result) / jnp.maximum(hits, 1)


def _scatter_reduce_transpose(
    ct: Any, operand: Any, ids: Any, updates: Any, *, reducer: str, **params: Any
) -> list[Any]:
    """The transpose of a product. It is linear in the operand, and in updates with unique ids."""
    if ad.is_undefined_primal(operand):
        result = bind(scatter_reduce_p, ct, ids, updates, reducer=reducer, **params)
        return [result, None, None]
    _check_unique(params["indexing"])
    return [None, None, _segment_sum_transpose(ct * operand, updates, ids, **params)[0]]


def _jvp_of_rows(
    primitive: core.Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    of_tangent: dict[str, Any],
    **params: Any,
) -> Any:
    """The JVP of a primitive that is linear in rows: it is applied to their tangents."""
    result = bind(primitive, *primals, **params)
    rows, ids = tangents[0], primals[1]
    if isinstance(rows, ad.Zero):
        return result, _primitive.total([], result)
    return result, bind(primitive, rows, ids, **params | of_tangent)


_primitive.define_derivatives(
    segment_sum_p,
    jvp=functools.partial(_jvp_of_rows, segment_sum_p, of_tangent={}),
    transpose=_segment_sum_transpose,
)
_primitive.define_derivatives(
    gather_rows_p,
    jvp=functools.partial(_jvp_of_rows, gather_rows_p, of_tangent={"fill": "zero"}),
    transpose=_gather_rows_transpose,
)
_primitive.define_derivatives(scatter_add_p, jvp=_scatter_add_jvp, transpose=_scatter_add_transpose)
_primitive.define_derivatives(
    scatter_reduce_p, jvp=_scatter_reduce_jvp, transpose=_scatter_reduce_transpose
)


def rows_like(
    data: Any, ids: Any, value: Any, *, num_segments: int, rows_spec: Any, indexing: Indexing
) -> jax.Array:
    """An array filled with one value, of the type that the segment sums of `data` have."""
    args = _compat.join_varying_axes(data, ids)
    aval = _segment_sum_type(
        *map(jax.typeof, args), num_segments=num_segments, rows_spec=rows_spec, indexing=indexing
    )
    return _compat.with_sharding_of(jnp.full(aval.shape, value, aval.dtype), aval)
