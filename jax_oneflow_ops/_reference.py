"""Every operation in pure jnp: the "xla" implementation, and what platforms without kernels run."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops._checks import in_own_precision
from jax_oneflow_ops._indexing import Indexing


def nearest_source(size_in: int, size_out: int, half_pixel: bool) -> np.ndarray:
    """The source position of each output position, in exact integer arithmetic."""
    out = np.arange(size_out, dtype=object)  # Python's integers: no overflow
    numerator, denominator = (2 * out + 1, 2 * size_out) if half_pixel else (out, size_out)
    return (numerator * size_in // denominator).astype(np.int64)


@in_own_precision
def upsample_nearest2d(
    x: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """Forward: repeats along the axes `axis` and `axis + 1`."""
    for i in range(2):
        x = _upsample_axis(x, axis + i, out_hw[i], half_pixel)
    return x


def _upsample_axis(x: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = x.shape[axis]
    if n and size % n == 0:
        shape = (*x.shape[: axis + 1], size // n, *x.shape[axis + 1 :])
        x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
        return x.reshape(*shape[:axis], size, *shape[axis + 2 :])
    return jnp.take(x, nearest_source(n, size, half_pixel), axis=axis, mode="clip")


@in_own_precision
def upsample_nearest2d_backward(
    dy: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """Its adjoint: sums each source position's outputs, 16-bit values in f32, rounded once."""
    if 0 in in_hw:
        return jnp.zeros((*dy.shape[:axis], *in_hw, *dy.shape[axis + 2 :]), dy.dtype)
    wide = dy.astype(jnp.float32) if dy.dtype.itemsize == 2 else dy
    for i in range(2):
        wide = _sum_axis(wide, axis + i, in_hw[i], half_pixel)
    return wide.astype(dy.dtype)


def _sum_axis(dy: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = dy.shape[axis]
    if n % size == 0:
        return dy.reshape(*dy.shape[:axis], size, n // size, *dy.shape[axis + 1 :]).sum(axis + 1)
    # A gather of each source position's range of outputs, padded to the longest: unlike the
    # scatter that autodiff would make, it is deterministic and fast on every platform.
    begin = np.searchsorted(nearest_source(size, n, half_pixel), np.arange(size + 1))
    index = begin[:-1, None] + np.arange(math.ceil(n / size) + 1)
    inside = index < begin[1:, None]
    gathered = jnp.take(dy, np.where(inside, index, 0), axis=axis, mode="clip")
    inside = inside.reshape(inside.shape + (1,) * (dy.ndim - axis - 1))
    return jnp.where(inside, gathered, 0).sum(axis + 1)


def permute(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """A transposition, which XLA may fold into what is around it."""
    return jnp.transpose(x, axes)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Gelu by its approximation with tanh."""
    return jax.nn.gelu(x, approximate=True)


def gelu_erf(x: jax.Array) -> jax.Array:
    """Gelu itself."""
    return jax.nn.gelu(x, approximate=False)


def swiglu(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by silu."""
    return jax.nn.silu(gate) * x


def geglu_tanh(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by gelu's approximation."""
    return gelu_tanh(gate) * x


def geglu_erf(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by gelu."""
    return gelu_erf(gate) * x


def fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """A product and a sum."""
    return x * y + z


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """A choice."""
    return jnp.where(condition, x, y)


# ---- forms that are as accurate as kernels where jax's own are not ----


def _with_slope(
    value: Callable[..., jax.Array], slope: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """A function of an array and numbers whose derivative jax would compute by cancellation."""
    function = jax.custom_jvp(value)
    function.defjvp(lambda xs, dxs: (value(*xs), slope(*xs) * dxs[0]))
    return function


def _sech_squared_of_half(x: jax.Array) -> jax.Array:
    e = jnp.exp(-jnp.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


sigmoid_accurate = _with_slope(jax.nn.sigmoid, lambda x: _sech_squared_of_half(x) / 4)
tanh_accurate = _with_slope(jnp.tanh, lambda x: _sech_squared_of_half(2 * x))


def _elu(x: jax.Array, alpha: jax.Array) -> jax.Array:
    """XLA's expm1 loses the sign of -0."""
    below = jnp.where(x == 0, x, jnp.expm1(jnp.minimum(x, 0)))
    return jnp.where(x > 0, x, alpha * below)


elu_accurate = _with_slope(
    _elu, lambda x, alpha: jnp.where(x > 0, 1, alpha * jnp.exp(jnp.minimum(x, 0)))
)


def gelu_accurate(x: jax.Array) -> jax.Array:
    """The same as `gelu_tanh`: 1 + tanh(u) is 2 sigmoid(2u). Beyond 20 the sigmoid is 0 or 1."""
    u = jnp.clip(x, -20, 20)
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))


def geglu_accurate(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Gated by `gelu_accurate`."""
    return gelu_accurate(gate) * x


@in_own_precision
def segment_sum(
    data: jax.Array, ids: jax.Array, *, num_segments: int, indexing: Indexing, rows_spec: Any = None
) -> jax.Array:
    """Sums of rows into zeros; `rows_spec` is part of the result's type alone."""
    lead, trailing = data.shape[: indexing.batch], data.shape[indexing.batch :]
    shape = (*lead, num_segments, *trailing[indexing.index_rank(ids) :])
    return scatter_add(jnp.zeros(shape, data.dtype), ids, data, indexing=indexing)


@in_own_precision
def scatter_add(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing
) -> jax.Array:
    """Sums of rows into an operand, narrow floats in f32, rounded once."""
    return _scatter(lax.scatter_add, operand, ids, updates, indexing)


@in_own_precision
def scatter_reduce(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing, reducer: str
) -> jax.Array:
    """Maxima, minima or products, these narrow floats' in f32, rounded once."""
    functions = {"max": lax.scatter_max, "min": lax.scatter_min, "multiply": lax.scatter_mul}
    return _scatter(functions[reducer], operand, ids, updates, indexing)


def _scatter(
    function: Callable[..., jax.Array],
    operand: jax.Array,
    ids: jax.Array,
    updates: jax.Array,
    indexing: Indexing,
) -> jax.Array:
    rows = indexing.rows(operand.shape)
    rank = indexing.index_rank(ids)
    shape, dtype = operand.shape, operand.dtype
    operand = operand.reshape(
        *shape[: indexing.batch], rows, *shape[indexing.batch + indexing.row_rank :]
    )
    if operand.size == 0 or updates.size == 0:
        return operand.reshape(shape)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        operand, updates = operand.astype(jnp.float32), updates.astype(jnp.float32)
    is_sum = function is lax.scatter_add

    def scatter(ids: jax.Array, operand: jax.Array, updates: jax.Array) -> jax.Array:
        if is_sum and indexing.deterministic and jnp.issubdtype(dtype, jnp.inexact):
            return _add_by_sorting(operand, ids, updates, indexing)
        return function(
            operand,
            indexing.wrapped(ids, rows)[..., None],
            updates,
            lax.ScatterDimensionNumbers(tuple(range(rank, updates.ndim)), (0,), (0,)),
            indices_are_sorted=indexing.indices_are_sorted,
            unique_indices=indexing.unique_indices,
            mode=_mode(indexing),
        )

    return _batched(scatter, indexing)(ids, operand, updates).astype(dtype).reshape(shape)


@in_own_precision
def scatter_set(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing
) -> jax.Array:
    """Rows of an operand replaced, each by the last that names it; GPUs write in any order."""
    rows, shape = indexing.rows(operand.shape), operand.shape
    trailing = shape[indexing.batch + indexing.row_rank :]

    def put(ids: jax.Array, operand: jax.Array, updates: jax.Array) -> jax.Array:
        ids, valid = indexing.resolved(ids, rows)
        ids = jnp.where(valid, ids, rows)
        place = jnp.arange(ids.size).reshape(ids.shape)
        last = jnp.full(rows, -1).at[ids].max(place, mode="drop")
        is_last = last.at[ids].get(mode="fill", fill_value=-1) == place
        return operand.at[jnp.where(is_last, ids, rows)].set(updates, mode="drop")

    operand = operand.reshape(*shape[: indexing.batch], rows, *trailing)
    return _batched(put, indexing)(ids, operand, updates).reshape(shape)


@in_own_precision
def gather_rows(
    table: jax.Array, ids: jax.Array, *, fill: str | bytes, indexing: Indexing
) -> jax.Array:
    """The rows that ids name, and the fill value where there is none."""
    rows = table.shape[indexing.batch]
    rank = indexing.index_rank(ids)
    lead, trailing = table.shape[: indexing.batch], table.shape[indexing.batch + 1 :]
    shape = (*lead, *ids.shape[indexing.index_begin() :], *trailing)
    if table.size == 0 or ids.size == 0:
        return jnp.full(shape, fill_value(table.dtype, fill), table.dtype)

    def take(ids: jax.Array, table: jax.Array) -> jax.Array:
        return lax.gather(
            table,
            indexing.wrapped(ids, rows)[..., None],
            lax.GatherDimensionNumbers(tuple(range(rank, rank + table.ndim - 1)), (0,), (0,)),
            (1, *table.shape[1:]),
            indices_are_sorted=indexing.indices_are_sorted,
            unique_indices=indexing.unique_indices,
            mode=_mode(indexing),
            fill_value=None if fill == "invalid" else fill_value(table.dtype, fill)[()],
        )

    result: jax.Array = _batched(take, indexing)(ids, table)
    return result


def fill_value(dtype: Any, fill: str | bytes) -> Any:
    """An element where an id is out of range: 0, or as `jnp.take` has it if `fill` is "invalid".

    Else `fill` is the element's bytes.
    """
    if isinstance(fill, bytes):
        return np.frombuffer(fill, dtype)[0]
    value: Any = 0
    if fill == "invalid":
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif jnp.issubdtype(dtype, jnp.signedinteger):
            value = jnp.iinfo(dtype).min
        else:
            value = True if dtype == jnp.bool_ else jnp.iinfo(dtype).max
    return np.asarray(value, dtype)


def _mode(indexing: Indexing) -> lax.GatherScatterMode:
    modes = lax.GatherScatterMode
    return modes.CLIP if indexing.clip else modes.FILL_OR_DROP


def _batched(function: Callable[..., jax.Array], indexing: Indexing) -> Callable[..., jax.Array]:
    """`function` of ids and arrays of rows for every problem of the batch."""
    for _ in range(indexing.batch):
        function = _mapped(function, None if indexing.shared else 0)
    return function


def _mapped(function: Callable[..., jax.Array], ids_axis: int | None) -> Callable[..., jax.Array]:
    def mapped(ids: jax.Array, *arrays: jax.Array) -> jax.Array:
        axes = (ids_axis, *(0,) * len(arrays))
        result: jax.Array = jax.vmap(function, in_axes=axes)(ids, *arrays)
        return result

    return mapped


def _add_by_sorting(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, indexing: Indexing
) -> jax.Array:
    """Adds up in an order that depends on ids only, which a scatter on GPUs does not promise.

    Updates are sorted by id; a segmented scan sums them; a row's sum is where its ids end.
    """
    rows = operand.shape[0]
    keys, valid = indexing.resolved(ids.reshape(-1), rows)
    keys = jnp.where(valid, keys, rows)
    updates = updates.reshape(keys.size, *updates.shape[ids.ndim :])
    order = jnp.argsort(keys, stable=True)
    keys, updates = keys[order], updates[order]
    column = (-1, *(1,) * (updates.ndim - 1))
    first = jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]]).reshape(column)

    def combine(left: Any, right: Any) -> Any:
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = lax.associative_scan(combine, (first, updates))
    every_row = jnp.arange(rows, dtype=keys.dtype)
    end = jnp.searchsorted(keys, every_row, side="right") - 1
    hit = (end >= 0) & (keys[end] == every_row)
    return jnp.where(hit.reshape(column), operand + sums[end], operand)
