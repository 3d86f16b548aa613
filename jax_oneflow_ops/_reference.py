"""Every operation in pure jnp: the "xla" implementation, and what platforms without kernels run."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops._checks import in_own_precision, promoted
from jax_oneflow_ops._indexing import Indexing


def nearest_source(size_in: int, size_out: int, half_pixel: bool) -> np.ndarray:
    """The source position of each output position, in exact integer arithmetic."""
    fits = (2 * size_out + 1) * size_in < 2**63
    out = np.arange(size_out, dtype=np.int64 if fits else object)  # Python's integers if not
    numerator, denominator = (2 * out + 1, 2 * size_out) if half_pixel else (out, size_out)
    return (numerator * size_in // denominator).astype(np.int64)


def upsample_nearest2d(
    x: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """Repeats elements along the axes `axis` and `axis + 1`."""
    for i in range(2):
        x = _upsample_axis(x, axis + i, out_hw[i], half_pixel)
    return x


def _upsample_axis(x: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = x.shape[axis]
    if n and size % n == 0:
        shape = (*x.shape[: axis + 1], size // n, *x.shape[axis + 1 :])
        x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
        return x.reshape(*shape[:axis], size, *shape[axis + 2 :])
    return jnp.take(x, _source(n, size, half_pixel), axis=axis, mode="clip")


_MOST_CONSTANTS = 1 << 16


def _source(size_in: int, size_out: int, half_pixel: bool) -> Any:
    """The result of `nearest_source`: on CPUs a constant if it is small, else computed.

    If XLA computes the source, it divides for each element of the result. On CPUs, images of
    64 x 128 enlarged to 198 x 335 take 87 us, and 40 us with a constant. An H200 takes 0.75 to 0.99
    of the time without constants. 32 bits are not enough for very large sizes.
    """
    if (2 * size_out + 1) * size_in >= 2**32:
        return nearest_source(size_in, size_out, half_pixel)

    def constant() -> jax.Array:
        return jnp.asarray(nearest_source(size_in, size_out, half_pixel), jnp.int32)

    def computed() -> jax.Array:
        out = lax.iota(jnp.uint32, size_out)
        numerator, denominator = (2 * out + 1, 2 * size_out) if half_pixel else (out, size_out)
        return lax.div(numerator * np.uint32(size_in), jnp.uint32(denominator)).astype(jnp.int32)

    if size_out > _MOST_CONSTANTS:
        return computed()
    return lax.platform_dependent(cpu=constant, default=computed)


def upsample_nearest2d_backward(
    dy: jax.Array, *, axis: int, out_hw: tuple[int, int], in_hw: tuple[int, int], half_pixel: bool
) -> jax.Array:
    """The adjoint: sums the outputs of each source position, 16-bit values in f32, rounded once."""
    if 0 in in_hw:
        return jnp.zeros((*dy.shape[:axis], *in_hw, *dy.shape[axis + 2 :]), dy.dtype)
    wide = dy.astype(jnp.float32) if dy.dtype.itemsize == 2 else dy
    factors, rests = zip(*map(divmod, out_hw, in_hw), strict=True)
    if not any(rests) and all(0 < factor <= _MOST_SLICES for factor in factors):
        return _sum_of_slices(wide, axis, factors).astype(dy.dtype)
    for i in range(2):
        wide = _sum_axis(wide, axis + i, in_hw[i], half_pixel)
    return wide.astype(dy.dtype)


# XLA adds slices in one loop over the result. Sums over a dimension of 2 or 3 elements take 1.4 to
# 5 times as long on CPUs, and 0.8 to 13 times on an H100; there most of those of 4 or 5 take less.
# Slices along one axis of slices along the other take two loops: up to 10 MB, 1.3 times as long in
# the mean on an H200.
_MOST_SLICES = 3


def _sum_of_slices(dy: jax.Array, axis: int, factors: Sequence[int]) -> jax.Array:
    """Sums blocks of this many elements along `axis` and the axes after it."""
    after = dy.ndim - axis - len(factors)
    strides = [*[1] * axis, *factors, *[1] * after]
    starts = itertools.product(*map(range, strides))
    slices = (lax.slice(dy, start, dy.shape, strides) for start in starts)
    return functools.reduce(lax.add, slices)


def _sum_axis(dy: jax.Array, axis: int, size: int, half_pixel: bool) -> jax.Array:
    n = dy.shape[axis]
    factor, rest = divmod(n, size)
    if rest == 0 and 0 < factor <= _MOST_SLICES:
        return _sum_of_slices(dy, axis, [factor])
    if rest == 0:
        return dy.reshape(*dy.shape[:axis], size, factor, *dy.shape[axis + 1 :]).sum(axis + 1)
    # A gather of each source position's range of outputs, padded to the longest: unlike the
    # scatter that autodiff would make, it is deterministic and fast on every platform.
    begin = np.searchsorted(nearest_source(size, n, half_pixel), np.arange(size + 1))
    index = begin[:-1, None] + np.arange(math.ceil(n / size) + 1)
    inside = index < begin[1:, None]
    gathered = jnp.take(dy, np.where(inside, index, 0), axis=axis, mode="clip")
    inside = inside.reshape(inside.shape + (1,) * (dy.ndim - axis - 1))
    return jnp.where(inside, gathered, 0).sum(axis + 1)


def permute(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """A transposition, which XLA may fold into the operations around it."""
    return jnp.transpose(x, axes)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The tanh approximation of gelu."""
    return jax.nn.gelu(x, approximate=True)


def gelu_erf(x: jax.Array) -> jax.Array:
    """Gelu, computed with erf."""
    return jax.nn.gelu(x, approximate=False)


def swiglu(x: jax.Array, gate: jax.Array) -> jax.Array:
    """`x` gated by silu."""
    return jax.nn.silu(gate) * x


def geglu_tanh(x: jax.Array, gate: jax.Array) -> jax.Array:
    """`x` gated by the tanh approximation of gelu."""
    return gelu_tanh(gate) * x


def geglu_erf(x: jax.Array, gate: jax.Array) -> jax.Array:
    """`x` gated by gelu."""
    return gelu_erf(gate) * x


def fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """A product plus a third array."""
    return x * y + z


def where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """An elementwise selection."""
    return jnp.where(condition, x, y)


# ---- forms that are as accurate as kernels where jax's own are not ----


def _with_slope(
    value: Callable[..., jax.Array], slope: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """A function of an array and numbers with its derivative; jax's would suffer cancellation."""
    function = jax.custom_jvp(value)
    function.defjvp(lambda xs, dxs: (value(*xs), slope(*xs) * dxs[0]))
    return function


def _sech_squared_of_half(x: jax.Array) -> jax.Array:
    e = jnp.exp(-jnp.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


sigmoid_accurate = _with_slope(jax.nn.sigmoid, lambda x: _sech_squared_of_half(x) / 4)
tanh_accurate = _with_slope(jnp.tanh, lambda x: _sech_squared_of_half(2 * x))


def _elu(x: jax.Array, alpha: jax.Array) -> jax.Array:
    """Elu that keeps the sign of -0, which XLA's expm1 loses."""
    below = jnp.where(x == 0, x, jnp.expm1(jnp.minimum(x, 0)))
    return jnp.where(x > 0, x, alpha * below)


elu_accurate = _with_slope(
    _elu, lambda x, alpha: jnp.where(x > 0, 1, alpha * jnp.exp(jnp.minimum(x, 0)))
)


def gelu_accurate(x: jax.Array) -> jax.Array:
    """`gelu_tanh` by a sigmoid: 1 + tanh(u) is 2 sigmoid(2u). Beyond 20 the sigmoid is 0 or 1."""
    u = jnp.clip(x, -20, 20)
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))


def geglu_accurate(x: jax.Array, gate: jax.Array) -> jax.Array:
    """`x` gated by `gelu_accurate`."""
    return gelu_accurate(gate) * x


def segment_sum(
    data: jax.Array, ids: jax.Array, *, num_segments: int, indexing: Indexing, rows_spec: Any = None
) -> jax.Array:
    """Sums rows into zeros. `rows_spec` affects only the result's type."""
    lead, trailing = data.shape[: indexing.batch], data.shape[indexing.batch :]
    shape = (*lead, num_segments, *trailing[indexing.index_rank(ids) :])
    return scatter_add(jnp.zeros(shape, data.dtype), ids, data, indexing=indexing)


def scatter_add(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing
) -> jax.Array:
    """Sums rows into an operand. Narrow floats are summed in f32 and rounded once."""
    return _scatter(lax.scatter_add, operand, ids, updates, indexing)


def scatter_reduce(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing, reducer: str
) -> jax.Array:
    """Maxima, minima or products. Those of narrow floats are computed in f32 and rounded once."""
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


def scatter_set(
    operand: jax.Array, ids: jax.Array, updates: jax.Array, *, indexing: Indexing
) -> jax.Array:
    """Replaces each row of an operand by the last update for it. GPU scatters have no order."""
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


def gather_rows(
    table: jax.Array, ids: jax.Array, *, fill: str | bytes, indexing: Indexing
) -> jax.Array:
    """The rows that ids name, and the fill value where an id names none."""
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
    """The element for an id that is out of range.

    It is 0, or that of `jnp.take` if `fill` is "invalid". If `fill` is bytes, it has these bytes.
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
    """`function` of ids and arrays of rows, mapped over the problems of the batch."""
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
    """Sums in an order that depends only on ids, which a scatter on GPUs does not guarantee.

    Updates are sorted by id, and a segmented scan sums them. A row's sum is at its last id.
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


# ---- rows: computed in float32 or float64, and rounded once ----


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(row_dtype(x.dtype))


def row_dtype(dtype: Any) -> Any:
    """The dtype in which rows of `dtype` are computed, and the dtype of their statistics."""
    return promoted(dtype, jnp.float32)


def softmax(x: jax.Array, *, axis: int, log: bool) -> jax.Array:
    """The softmax of rows, or its logarithm."""
    function = jax.nn.log_softmax if log else jax.nn.softmax
    return function(_wide(x), axis).astype(x.dtype)


def softmax_vjp(y: jax.Array, dy: jax.Array, *, axis: int, log: bool) -> jax.Array:
    """The cotangent of x, from the result y. Without `log`, it is also the tangent of y."""
    y, ct = _wide(y), _wide(dy)
    if log:
        dx = ct - jnp.exp(y) * ct.sum(axis, keepdims=True)
    else:
        dx = y * (ct - (y * ct).sum(axis, keepdims=True))
    return dx.astype(dy.dtype)


def log_softmax_jvp(y: jax.Array, tangent: jax.Array, *, axis: int) -> jax.Array:
    """The tangent of the result."""
    t = _wide(tangent)
    return (t - (jnp.exp(_wide(y)) * t).sum(axis, keepdims=True)).astype(tangent.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def at_labels(x: jax.Array, labels: jax.Array, axis: int) -> jax.Array:
    """The elements that labels name, NaN where they name none.

    Derivatives find the elements by comparison: the transpose of a lookup is a scatter into an
    array as large as x, and in 32 bits if 64-bit dtypes are disabled.
    """
    if jax.typeof(x).sharding.spec[axis] is None:
        index = jnp.expand_dims(labels, axis)
        return jnp.take_along_axis(x, index, axis, mode="fill").squeeze(axis)
    # jax does not look elements up along an axis that is sharded in the type of x.
    is_label = _are_labels(labels, x, axis)
    return jnp.where(is_label.any(axis), jnp.where(is_label, x, 0).sum(axis), jnp.nan)


@at_labels.defjvp
@in_own_precision
def _at_labels_jvp(
    axis: int, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
    x, labels = primals
    tangent = jnp.where(_are_labels(labels, x, axis), tangents[0], 0).sum(axis)
    return at_labels(x, labels, axis), tangent


def _are_labels(labels: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Which elements labels name."""
    places = jnp.expand_dims(jnp.where(labels < 0, labels + x.shape[axis], labels), axis)
    return places == lax.broadcasted_iota(labels.dtype, x.shape, axis)


def logsumexp(x: jax.Array, *labels: jax.Array, axis: int) -> list[jax.Array]:
    """log(sum(exp(x))), minus the element that the label names, if any; and 2 statistics per row.

    An element's share of the sum is exp(x - first statistic) * second statistic.
    """
    result, centre, total = _logsumexp(x, labels, axis)
    return [result.astype(x.dtype), jnp.stack([centre, 1 / total], -1)]


def _logsumexp(
    x: jax.Array, labels: Sequence[jax.Array], axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result in the dtype that rows are computed in, what is subtracted from x, and the sum."""
    centre, powers = _exponentials(x, axis)
    total = powers.sum(axis)
    shift = -centre
    for label in labels:
        shift += _wide(at_labels(x, label, axis))
    return jnp.log(total) - shift, centre, total


def _exponentials(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The maximum of each row, 0 if it is infinite, and exp(x - that)."""
    wide = _wide(x)
    peak = jax.lax.stop_gradient(wide.max(axis, initial=-jnp.inf))
    centre = jnp.where(jnp.isfinite(peak), peak, 0)
    return centre, jnp.exp(wide - jnp.expand_dims(centre, axis))


def logsumexp_vjp(x: jax.Array, *operands: jax.Array, axis: int) -> jax.Array:
    """The cotangent of x.

    Operands are labels, if any, statistics (not read) and the cotangent of the result. The element
    that a label names is found by comparison: jax's gradient of a lookup is a scatter into an array
    as large as x.
    """
    *labels, _, ct = operands
    _, powers = _exponentials(x, axis)
    ct = _wide(ct)
    dx = powers * jnp.expand_dims(ct / powers.sum(axis), axis)
    for label in labels:
        dx -= jnp.where(_are_labels(label, x, axis), jnp.expand_dims(ct, axis), 0)
    return dx.astype(x.dtype)


def logsumexp_jvp(x: jax.Array, *operands: jax.Array, axis: int) -> jax.Array:
    """The tangent of the result, from labels, if any, statistics (not read) and that of x."""
    *labels, _, tangent = operands
    moved = [_wide(x)], [_wide(tangent)]
    result: jax.Array = jax.jvp(lambda x: _logsumexp(x, labels, axis)[0], *moved)[1]
    return result.astype(x.dtype)


def norm(
    x: jax.Array,
    *operands: jax.Array,
    axis: int,
    center: bool,
    epsilon: float,
    given: tuple[bool, ...],
) -> list[jax.Array]:
    """The norm of rows, x + residual if there is one, and 3 statistics per row, in a last axis.

    Args:
      x: rows along `axis`.
      *operands: those of residual, scale and bias that are given.
      axis: the axis of the rows.
      center: whether the mean is subtracted.
      epsilon: the number added to the variance, or to the mean of squares.
      given: which operands are given.
    """
    residual, scale, bias = spread(operands, given)
    total = x if residual is None else (_wide(x) + _wide(residual)).astype(x.dtype)
    y, mean, rstd = _normalized(total, scale, bias, axis, center, epsilon)
    stats = _statistics(_at_end(mean, axis), _at_end(rstd, axis))
    results = [y.astype(x.dtype), stats]
    return results if residual is None else [results[0], total, stats]


def spread(operands: Sequence[Any], given: Sequence[bool]) -> list[Any]:
    """Operands with None for those that are not given."""
    left = iter(operands)
    return [next(left) if there else None for there in given]


def _statistics(mean: jax.Array, rstd: jax.Array) -> jax.Array:
    """Three statistics in place of a last dimension of size 1: the mean, 0 and `rstd`.

    They are not concatenated, because jax requires that arrays are sharded alike for that, also
    along the axis of a vmap. Zeros are not sharded.
    """

    def at(place: int, x: jax.Array) -> jax.Array:
        return lax.pad(x, x.dtype.type(0), [(0, 0, 0)] * (x.ndim - 1) + [(place, 2 - place, 0)])

    return at(0, mean) + at(2, rstd)


def _at_end(of_rows: jax.Array, axis: int) -> jax.Array:
    """An array with one value per row, whose dimension of size 1 moves from `axis` to the end."""
    return of_rows if axis == of_rows.ndim - 1 else jnp.expand_dims(of_rows.squeeze(axis), -1)


def _other_axes(x: jax.Array, axis: int) -> list[int]:
    return [a for a in range(x.ndim) if a != axis]


def _like_rows(vector: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """A vector along `axis` of `x`, in its dtype and with its rank."""
    return lax.expand_dims(vector.astype(x.dtype), _other_axes(x, axis))


def _normalized(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    axis: int,
    center: bool,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = _wide(x)
    of_rows = *x.shape[:axis], 1, *x.shape[axis + 1 :]
    mean = wide.mean(axis, keepdims=True) if center else jnp.zeros(of_rows, wide.dtype)
    centred = wide - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis, keepdims=True) + epsilon)
    y = centred * rstd
    y = y if scale is None else y * _like_rows(scale, y, axis)
    return y if bias is None else y + _like_rows(bias, y, axis), mean, rstd


def norm_vjp(
    x: jax.Array,
    stats: jax.Array,
    *operands: jax.Array,
    axis: int,
    center: bool,
    epsilon: float,
    given: tuple[bool, ...],
    wanted: tuple[bool, ...],
) -> list[jax.Array]:
    """The cotangents of x and, if wanted, of scale and bias in the dtype that rows are computed in.

    Args:
      x: rows along `axis`, or their sum with the residual if there was one.
      stats: not read.
      *operands: those of scale, dy and the sum's cotangent that are given.
      axis: as for `norm`.
      center: as for `norm`.
      epsilon: as for `norm`.
      given: which operands are given; dy always is.
      wanted: whether the cotangents of scale and of bias are wanted.
    """
    scale, ct, of_sum = spread(operands, given)
    wide = _wide(x)
    mean = wide.mean(axis, keepdims=True) if center else 0
    centred = wide - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis, keepdims=True) + epsilon)
    normalized, dy = centred * rstd, _wide(ct)
    g = dy if scale is None else dy * _like_rows(scale, dy, axis)
    # The mean of g * centred does not wait for rstd, so XLA computes it with the mean of squares.
    dx = g - normalized * (rstd * (g * centred).mean(axis, keepdims=True))
    dx = (dx - g.mean(axis, keepdims=True) if center else dx) * rstd
    dx = dx if of_sum is None else dx + _wide(of_sum)
    rows = tuple(_other_axes(x, axis))
    sums = [(dy * normalized).sum(rows), dy.sum(rows)]
    return [dx.astype(x.dtype), *(s for s, w in zip(sums, wanted, strict=True) if w)]


def norm_jvp(
    x: jax.Array,
    stats: jax.Array,
    *operands: jax.Array,
    axis: int,
    center: bool,
    epsilon: float,
    given: tuple[bool, ...],
    passed: bool,
) -> list[jax.Array]:
    """The tangent of the result and, if `passed`, that of x unchanged.

    Args:
      x: rows along `axis`, or their sum with the residual if there was one.
      stats: not read.
      *operands: those of scale and the tangents of x, scale and bias that are given.
      axis: as for `norm`.
      center: as for `norm`.
      epsilon: as for `norm`.
      given: which operands are given.
      passed: whether the sum's tangent is a result, too.
    """
    scale, *tangents = spread(operands, given)
    t_x, t_scale, t_bias = tangents
    wide = _wide(x)

    def f(x: jax.Array) -> jax.Array:
        return _normalized(x, None, None, axis, center, epsilon)[0]

    zero = jnp.zeros_like(wide)
    normalized, t = jax.jvp(f, [wide], [zero if t_x is None else _wide(t_x)])
    t = t if scale is None else t * _like_rows(scale, t, axis)
    t = t if t_scale is None else t + normalized * _like_rows(t_scale, t, axis)
    t = t if t_bias is None else t + _like_rows(t_bias, t, axis)
    return [t.astype(x.dtype), *([zero.astype(x.dtype) if t_x is None else t_x] * passed)]


# ---- group norm, of images (..., pixels ..., channels) with `spatial` dimensions of pixels ----


def _group_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    spatial: int,
    groups: int,
    epsilon: float,
    silu: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, in the dtype of the operands, and the means and factors of groups."""
    width = x.shape[-1] // groups
    in_groups = x.reshape(*x.shape[:-1], groups, width)
    axes = (*range(x.ndim - 1 - spatial, x.ndim - 1), x.ndim)
    mean = in_groups.mean(axes, keepdims=True)
    centred = in_groups - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + epsilon)
    last = x.ndim - 1
    y = (centred * rstd).reshape(x.shape) * _like_rows(scale, x, last) + _like_rows(bias, x, last)
    return jax.nn.silu(y) if silu else y, mean.squeeze(axes), rstd.squeeze(axes)


def group_norm(x: jax.Array, *vectors: jax.Array, **params: Any) -> list[jax.Array]:
    """The norm of groups, optionally followed by silu, and 3 statistics per group.

    Args:
      x: images.
      *vectors: scale and bias.
      **params: `spatial`, `groups`, `epsilon` and `silu`.
    """
    wide = row_dtype(x.dtype)
    y, *stats = _group_norm(_wide(x), *(v.astype(wide) for v in vectors), **params)
    return [y.astype(x.dtype), _statistics(*(jnp.expand_dims(s, -1) for s in stats))]


def group_norm_vjp(x: jax.Array, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The cotangents of x, and of scale and bias in the dtype that groups are computed in.

    Args:
      x: images.
      *operands: scale, bias, statistics (not read), and the cotangent of the result.
      **params: as for `group_norm`.
    """
    *vectors, _, dy = operands
    primals = [a.astype(row_dtype(x.dtype)) for a in (x, *vectors)]
    dx, *sums = jax.vjp(lambda *xs: _group_norm(*xs, **params)[0], *primals)[1](_wide(dy))
    return [dx.astype(x.dtype), *sums]


def group_norm_jvp(x: jax.Array, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The tangent of the result.

    Args:
      x: images.
      *operands: scale, bias, statistics (not read), and the tangents of x, scale and bias.
      **params: as for `group_norm`.
    """
    scale, bias, _, *tangents = operands
    wide = row_dtype(x.dtype)
    primals, moved = ([a.astype(wide) for a in xs] for xs in ((x, scale, bias), tangents))
    return [jax.jvp(lambda *xs: _group_norm(*xs, **params)[0], primals, moved)[1].astype(x.dtype)]
