"""Segments and scatters of rows: sums, maxima, minima and products; and lookups of rows."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _compat, _native, _primitive, _scatter
from jax_oneflow_ops._docstrings import documented
from jax_oneflow_ops._indexing import Indexing

if TYPE_CHECKING:
    from jax_oneflow_ops.graph import SegmentPlan

Implementation = Literal["native", "xla"] | None
Mode = Literal["drop", "fill", "clip", "promise_in_bounds"] | jax.lax.GatherScatterMode | None


@_checks.in_own_precision
def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    deterministic: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Sums the rows of each segment. Replaces `jax.ops.segment_sum`.

    ``result[s]`` is the sum of ``data[n]`` over all ``n`` with ``segment_ids[n] == s``.

    Args:
      data: array of shape ``(n, ...)``: float16, bfloat16, float32, float64, complex, or integers
        of 8 to 64 bits.
      segment_ids: array of integers, of any dtype and of shape ``(n,)``. They need not be sorted,
        and may repeat. In general `data` is broadcast to ``segment_ids.shape + data.shape[1:]``.
      num_segments: the number of rows of the result. None takes ``max(segment_ids) + 1``, which
        needs concrete ids: inside `jax.jit` it must be given.
      indices_are_sorted: a promise that `segment_ids` ascends, which saves sorting it. If it is not
        true, results are wrong.
      unique_indices: a promise that no id occurs twice, for the jnp reference.
      bucket_size: reduces each bucket of `bucket_size` consecutive ids separately, then the results
        of the buckets.
      mode: what happens to an id that is negative or too large. ``"drop"``, ``"fill"`` and None:
        it is ignored. ``"clip"``: it is clipped to the range. ``"promise_in_bounds"``: a promise
        that there is none; here the same as ``"drop"``. Or the `jax.lax.GatherScatterMode` of that
        name.
      out_sharding: the sharding of the result over Explicit axes of the mesh of `jax.set_mesh`, as
        in `jax.ops.segment_sum` of newer releases of jax. Not together with `bucket_size`.
      deterministic: gives results the same bits on every run. CPUs always do, and GPUs for integers
        and, in kernels, for sorted ids. Otherwise it takes GPUs up to four times as long to sum
        single floats.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of shape ``(num_segments,) + data.shape[1:]`` and of `data`'s dtype.

    Raises:
      TypeError: `data` is not an array or a number of a dtype listed above, `segment_ids` are not
        integers, or `num_segments` or `bucket_size` is not an integer.
      ValueError: `num_segments` is negative, `bucket_size` is not positive, `segment_ids` has other
        than one dimension with `bucket_size`, the shapes do not fit, an option has an unknown
        value, or `out_sharding` has an axis that is not Explicit.
      jax.errors.ConcretizationTypeError: `num_segments` is None, and ids are traced.
      NotImplementedError: both `out_sharding` and `bucket_size` are given, `out_sharding` has
        unreduced axes, or ``implementation="native"`` on a platform without native kernels.

    Numerics:
      Integers are exact modulo 2^k, where k is the number of bits. Floats are summed in their own
      dtype; 16-bit values are summed in float32 and rounded once. There is one exception: GPU sums
      of at most 8192 updates into more than sixteen times as many rows may be rounded at each
      addition, unless `indices_are_sorted` or `deterministic` is set. Atomic additions of float32
      on GPUs flush sums below 2^-126 to 0. The order of summation is not specified.

    Differentiation and sharding:
      The gradient gathers rows. Differentiable to any order, in forward and reverse mode. All
      dimensions after the first may be sharded freely. If `n` is sharded evenly, each device sums
      its rows, and one all-reduce adds up the sums: 16-bit values are rounded by each device and
      once more. If the rows of the result are sharded evenly, over other mesh axes, each device
      sums into its own rows.

    Source:
      OneFlow's and PyTorch's ``FastAtomicAdd``, described in "OneFlow FastAtomicAdd" by BBuf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> data, ids = jnp.arange(5.0), jnp.array([0, 0, 2, 2, -1])
      >>> print(jof.segment_sum(data, ids, 4))
      [1. 0. 5. 0.]
      >>> print(jax.grad(lambda x: (jof.segment_sum(x, ids, 4) ** 2).sum())(data))
      [ 2.  2. 10. 10.  0.]
    """
    return _segments(
        *("segment_sum", "add", data, segment_ids, num_segments, bucket_size, mode, out_sharding),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
        deterministic=bool(deterministic),
    )


@_checks.in_own_precision
@documented(like=segment_sum)
def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """The maximum of each segment. Replaces `jax.ops.segment_max`.

    For segments without rows it is -inf, or the smallest integer.

    Args:
      data: array of shape ``(n, ...)``: float16, bfloat16, float32, float64, or integers of 8 to 64
        bits.

    Numerics:
      Exact. If a segment contains NaN, its result is NaN. A result of 0 may have either sign.

    Differentiation and sharding:
      Equal values share the cotangent of their segment's result equally, as in JAX. Differentiable
      to any order. Sharding is that of `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> data, ids = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 2, 2])
      >>> print(jof.segment_max(data, ids, 3))
      [  3. -inf   5.]
    """
    return _segments(
        *("segment_max", "max", data, segment_ids, num_segments, bucket_size, mode, out_sharding),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
@documented(like=segment_sum)
def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """The minimum of each segment. Replaces `jax.ops.segment_min`.

    For segments without rows it is inf, or the largest integer.

    Args:
      data: array of shape ``(n, ...)``: float16, bfloat16, float32, float64, or integers of 8 to 64
        bits.

    Numerics:
      Exact. If a segment contains NaN, its result is NaN. A result of 0 may have either sign.

    Differentiation and sharding:
      Equal values share the cotangent of their segment's result equally, as in JAX. Differentiable
      to any order. Sharding is that of `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> data, ids = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 2, 2])
      >>> print(jof.segment_min(data, ids, 3))
      [ 1. inf  2.]
    """
    return _segments(
        *("segment_min", "min", data, segment_ids, num_segments, bucket_size, mode, out_sharding),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
@documented(like=segment_sum)
def segment_prod(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """The product of each segment. Replaces `jax.ops.segment_prod`.

    For segments without rows it is 1. Rows are sorted by id first, unless they already are.

    Args:
      data: array of shape ``(n, ...)``: float16, bfloat16, float32, float64, or integers of 8 to 64
        bits.
      unique_indices: a promise that no id occurs twice, which the derivative needs.

    Numerics:
      Integers are exact modulo 2^k, where k is the number of bits. Floats are multiplied in their
      own dtype; 16-bit values are multiplied in float32 and rounded once.

    Differentiation and sharding:
      Differentiable to any order with respect to `data` if `unique_indices` is set, as in JAX.
      Sharding is that of `segment_sum`, with an all-gather of partial products.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> data, ids = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 2, 2])
      >>> print(jof.segment_prod(data, ids, 3))
      [ 3.  1. 10.]
    """
    return _segments(
        *("segment_prod", "multiply", data, segment_ids, num_segments),
        *(bucket_size, mode, out_sharding),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
@documented(like=segment_sum)
def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    deterministic: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """The mean of each segment: the sum divided by the count. Replaces `jraph.segment_mean`.

    For segments without rows it is 0.

    Args:
      data: array of shape ``(n, ...)``: float16, bfloat16, float32, float64 or complex; integers
        are converted as jnp promotes them with float32.

    Raises:
      TypeError, ValueError, NotImplementedError: as `segment_sum`.

    Numerics:
      Those of `segment_sum`. The division rounds a second time. The sum of float16 values may
      overflow even if their mean would not.

    Differentiation and sharding:
      As of `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> data, ids = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 2, 2])
      >>> print(jof.segment_mean(data, ids, 3))
      [2.  0.  3.5]
    """
    name = "segment_mean"
    data = _checks.promoted_integers(_checks.as_array(name, "data", data, numbers=True))
    ids = _checks.as_ids(name, "segment_ids", segment_ids)
    size = _number_of_segments(name, num_segments, segment_ids)
    flags: dict[str, Any] = {
        "implementation": implementation,
        "indices_are_sorted": bool(indices_are_sorted),
        "unique_indices": bool(unique_indices),
    }
    total = _segments(name, "add", data, ids, size, deterministic=bool(deterministic), **flags)
    count = _segments(name, "add", jnp.ones(ids.shape, jnp.int32), ids, size, **flags)
    wide = _checks.promoted(data.dtype, jnp.float32)
    return _scatter.mean_of(total, count, wide).astype(data.dtype)


@_checks.in_own_precision
@documented(like=segment_sum)
def segment_softmax(
    logits: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    deterministic: bool = False,
    plan: "SegmentPlan | None" = None,
    implementation: Implementation = None,
) -> jax.Array:
    """The softmax over the rows of each segment. Replaces `jraph.segment_softmax`.

    Args:
      logits: array of shape ``(n, ...)``: float16, bfloat16, float32 or float64; integers are
        converted as jnp promotes them with float32.
      plan: a `segment_plan` of `segment_ids`. With it, maxima and sums take one pass over the
        logits, and so does the derivative. `num_segments` may then be None, and
        `indices_are_sorted`, `unique_indices` and `deterministic` have no effect.

    Returns:
      An array of the shape and dtype of `logits`; 0 where an id names no segment.

    Raises:
      TypeError, ValueError, NotImplementedError: as `segment_max`, and as `message_sum` for a plan.

    Numerics:
      The maximum of each segment is subtracted first. 16-bit values are computed and summed in
      float32, and rounded once.

    Differentiation and sharding:
      Differentiable to any order; the maximum is constant. Sharding is that of `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.segment_softmax(jnp.zeros(3), jnp.array([0, 0, 1]), 2))
      [0.5 0.5 1. ]
    """
    name = "segment_softmax"
    logits = _checks.promoted_integers(_checks.as_array(name, "logits", logits))
    if plan is not None:
        from jax_oneflow_ops import graph  # imported lazily: few programs have a plan

        return graph.planned_softmax(
            *(name, "logits", logits, "segment_ids", segment_ids, num_segments, plan),
            implementation=implementation,
        )
    ids = _checks.as_ids(name, "segment_ids", segment_ids)
    size = _number_of_segments(name, num_segments, segment_ids)
    ids = _checks.as_ids(name, "segment_ids", segment_ids, size)
    if ids.shape == logits.shape[: ids.ndim]:
        like = jax.typeof(logits)  # the sums that ids gather must have its sharding
        ids = _compat.resharded(ids, like, like.sharding.spec[: ids.ndim])
    flags: dict[str, Any] = {
        "indices_are_sorted": bool(indices_are_sorted),
        "unique_indices": bool(unique_indices),
        "deterministic": bool(deterministic),
    }

    def reduce(reducer: str, values: Any) -> Any:
        return _segments(name, reducer, values, ids, size, implementation=implementation, **flags)

    def of_segment(values: Any, missing: float) -> Any:
        result: Any = _primitive.bind(
            _scatter.gather_rows_p,
            values,
            ids,
            fill=np.asarray(missing, values.dtype).tobytes(),
            indexing=Indexing(**flags, function=name),
            implementation=_native.choose_implementation(name, implementation),
        )
        return result.astype(wide)

    wide = _checks.promoted(logits.dtype, jnp.float32)
    most = of_segment(reduce("max", jax.lax.stop_gradient(logits)), np.inf)
    # Rows whose id names no segment become exp(-inf), even if they are NaN or infinite.
    has_segment = jnp.expand_dims((ids >= 0) & (ids < size), range(ids.ndim, logits.ndim))
    terms = jnp.exp(jnp.where(has_segment, logits.astype(wide), 0) - most)
    totals = reduce("add", terms)
    result: jax.Array = (terms / of_segment(totals, 1)).astype(logits.dtype)
    return result


@_checks.in_own_precision
@documented(like=segment_sum)
def scatter_add(
    operand: ArrayLike,
    indices: ArrayLike,
    updates: ArrayLike,
    *,
    mode: Mode = "drop",
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    deterministic: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Adds rows to the rows that indices name. Replaces ``operand.at[indices].add(updates)``.

    Updates with equal indices are added up. Inside `jax.jit` the sum is made in place if the
    operand is not needed afterwards, for example if it is donated.

    Args:
      operand: array of shape ``(s, ...)``: float16, bfloat16, float32, float64, complex, or
        integers of 8 to 64 bits.
      indices: integers of any dtype and shape, or a number. Negative ones count from the end.
      updates: array or number that broadcasts to ``indices.shape + operand.shape[1:]``, of a dtype
        that jnp promotes to the operand's.
      mode: what happens to an index that is out of range, as in `segment_sum`.
      indices_are_sorted: a promise that the flattened indices ascend, once the number of rows is
        added to negative ones. It saves sorting them. If it is not true, sums are wrong.
      unique_indices: a promise that no index occurs twice, for the jnp reference.

    Returns:
      An array of the operand's shape and dtype. Rows that no index names keep their bits, except
      that XLA's form may change payloads of NaNs in 16 bits.

    Raises:
      TypeError: `operand` is not an array of a dtype listed above, `updates` is not an array or
        number of a dtype that the operand's dtype can hold, or `indices` are not integers.
      ValueError: `operand` is a scalar, `updates` does not broadcast, or an option has an unknown
        value.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Differentiation and sharding:
      The gradient with respect to the operand is the cotangent; the gradient with respect to the
      updates gathers rows of the cotangent. Differentiable to any order, in forward and reverse
      mode. All dimensions after the first may be sharded freely. If those of `indices` are sharded
      evenly, each device sums its updates, and one all-reduce adds up the sums and the operand:
      16-bit values are rounded by each device and once more. If the rows of the operand are sharded
      evenly, over other mesh axes, each device adds the updates of its own rows.

    Source:
      OneFlow's and PyTorch's ``FastAtomicAdd``, described in "OneFlow FastAtomicAdd" by BBuf.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> x = jnp.zeros((3, 2))
      >>> print(jof.scatter_add(x, jnp.array([0, -1, 0, 7]), 1.0))
      [[2. 2.]
       [0. 0.]
       [1. 1.]]
    """
    return _scatter_rows(
        *("scatter_add", "add", operand, indices, updates, mode),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
        deterministic=bool(deterministic),
    )


@_checks.in_own_precision
@documented(like=scatter_add)
def scatter_max(
    operand: ArrayLike,
    indices: ArrayLike,
    updates: ArrayLike,
    *,
    mode: Mode = "drop",
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """The maximum of a row and the updates that name it. Replaces ``operand.at[indices].max``.

    Args:
      operand: array of shape ``(s, ...)``: float16, bfloat16, float32, float64, or integers of 8 to
        64 bits.

    Numerics:
      Exact. A NaN makes the result NaN. A result of 0 may have either sign.

    Differentiation and sharding:
      The operand and the updates that are equal to the result share its cotangent equally, as in
      JAX. Differentiable to any order. Sharding is that of `scatter_add`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.scatter_max(jnp.zeros(3), jnp.array([0, 0, -1]), jnp.array([1.0, 2.0, -1.0])))
      [2. 0. 0.]
    """
    return _scatter_rows(
        *("scatter_max", "max", operand, indices, updates, mode),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
@documented(like=scatter_add)
def scatter_min(
    operand: ArrayLike,
    indices: ArrayLike,
    updates: ArrayLike,
    *,
    mode: Mode = "drop",
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """The minimum of a row and the updates that name it. Replaces ``operand.at[indices].min``.

    Args:
      operand: array of shape ``(s, ...)``: float16, bfloat16, float32, float64, or integers of 8 to
        64 bits.

    Numerics:
      Exact. A NaN makes the result NaN. A result of 0 may have either sign.

    Differentiation and sharding:
      The operand and the updates that are equal to the result share its cotangent equally, as in
      JAX. Differentiable to any order. Sharding is that of `scatter_add`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.scatter_min(jnp.zeros(3), jnp.array([0, 0, -1]), jnp.array([1.0, -2.0, -1.0])))
      [-2.  0. -1.]
    """
    return _scatter_rows(
        *("scatter_min", "min", operand, indices, updates, mode),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
@documented(like=scatter_add)
def scatter_mul(
    operand: ArrayLike,
    indices: ArrayLike,
    updates: ArrayLike,
    *,
    mode: Mode = "drop",
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """The product of a row and the updates that name it. Replaces ``operand.at[indices].multiply``.

    Args:
      operand: array of shape ``(s, ...)``: float16, bfloat16, float32, float64, or integers of 8 to
        64 bits.
      unique_indices: a promise that no index occurs twice, which the derivative with respect to
        updates needs.

    Numerics:
      Integers are exact modulo 2^k, where k is the number of bits. Floats are multiplied in their
      own dtype; 16-bit values are multiplied in float32 and rounded once.

    Differentiation and sharding:
      Differentiable to any order with respect to the operand, and with respect to updates if
      `unique_indices` is set, as in JAX. Sharding is that of `scatter_add`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.scatter_mul(jnp.ones(3), jnp.array([0, 0, -1]), jnp.array([2.0, 3.0, 4.0])))
      [6. 1. 4.]
    """
    return _scatter_rows(
        *("scatter_mul", "multiply", operand, indices, updates, mode),
        implementation=implementation,
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
    )


@_checks.in_own_precision
def embedding_lookup(
    table: ArrayLike,
    ids: ArrayLike,
    axis: int | None = 0,
    *,
    mode: Literal["fill", "clip", "wrap"] | None = None,
    fill_value: complex | np.number[Any] | np.bool | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """The rows of a table that ids name. Replaces ``jnp.take(table, ids, axis=0)``.

    `axis` is 0 by default; that of `jax.numpy.take` is None.

    Args:
      table: array of shape ``(s, ...)`` and of any dtype of 1 to 16 bytes.
      ids: integers of any dtype and shape, or a number.
      axis: the axis of the table that ids index; negative ones count from the end. None: the only
        axis of the flattened table.
      mode: how ids are interpreted, as in `jax.numpy.take`. ``"fill"`` and None: negative ids count
        from the end, and results of out-of-range ids are filled. ``"clip"``: ids are clipped to the
        range; negative ones become 0. ``"wrap"``: ids are taken modulo the number of rows.
      fill_value: the number to fill with, converted to the table's dtype. None: NaN, the smallest
        signed or the largest unsigned integer, or True.
      unique_indices: a promise that no id occurs twice, for the gradient of the jnp reference.
      indices_are_sorted: a promise that the flattened ids ascend, once the number of rows is added
        to negative ones. It saves the gradient sorting them. If it is not true, gradients are
        wrong.
      deterministic: the gradient has the same bits on every run, as in `scatter_add`.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes the one that was measured to be faster for such a call (see `policy`). The environment
        variable ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of shape ``table.shape[:axis] + ids.shape + table.shape[axis + 1:]`` and of the
      table's dtype.

    Raises:
      TypeError: `table` is not an array or has a dtype without a fixed number of bytes (int4, PRNG
        keys), `ids` are not integers, `axis` is not an integer, or `fill_value` is not a concrete
        number.
      ValueError: `table` has no such axis, or an option has an unknown value.
      IndexError: `table` has no rows, and there are ids.
      NotImplementedError: ``mode="raise"``, or ``implementation="native"`` on a platform without
        native kernels.

    Numerics:
      The kernel copies bits. XLA's form on CPUs, and lookups in a sharded table there, may change
      payloads of NaNs of bfloat16 and 8-bit floats. The gradient is a `segment_sum` of the rows of
      the cotangent, with the same numerics: 16-bit values are summed in float32. Out-of-range ids
      contribute nothing. The jnp reference sums 8-bit floats.

    Differentiation and sharding:
      Differentiable to any order, in forward and reverse mode. All dimensions of `ids` and all but
      the first of `table` may be sharded freely. If ids are sharded evenly, each device sums its
      part of the gradient, and one all-reduce adds up the parts. If the rows of the table are
      sharded evenly, over other mesh axes than `ids`, each device looks up its own rows, and one
      all-reduce combines the results, bit for bit; the gradient stays sharded. The table is
      all-gathered, with a `GatherWarning`, if a mesh axis shards both its rows and `ids`, or if it
      is smaller than twice the result.

    Source:
      OneFlow's and PyTorch's ``FastAtomicAdd``, for the gradient, described in "OneFlow
      FastAtomicAdd" by BBuf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> table = jnp.arange(6.0).reshape(3, 2)
      >>> print(jof.embedding_lookup(table, jnp.array([2, 0, -1, 3])))
      [[ 4.  5.]
       [ 0.  1.]
       [ 4.  5.]
       [nan nan]]
      >>> print(jax.grad(lambda t: jof.embedding_lookup(t, jnp.array([2, 0, -1])).sum())(table))
      [[1. 1.]
       [0. 0.]
       [2. 2.]]
    """
    name = "embedding_lookup"
    choice = _native.choose_implementation(name, implementation)
    table = _checks.as_array(name, "table", table)
    _checks.check_movable(name, "table", table)
    if axis is None:
        table, axis = table.reshape(-1), 0
    axis = _axis(name, axis, table.shape)
    rows = table.shape[axis]
    ids = _checks.as_ids(name, "ids", ids, rows or 1, modulo=_take_mode(name, mode) == "wrap")
    if rows == 0 and ids.size:
        raise IndexError(
            f"{name}: table must have rows where there are ids, got shapes {table.shape} and "
            f"{ids.shape}"
        )
    result: jax.Array = _primitive.bind(
        _scatter.gather_rows_p,
        table,
        ids,
        fill=_fill(name, fill_value, table.dtype),
        indexing=Indexing(
            batch=axis,
            wrap=mode in (None, "fill"),
            clip=mode == "clip",
            indices_are_sorted=bool(indices_are_sorted),
            unique_indices=bool(unique_indices),
            deterministic=bool(deterministic),
            function=name,
        ),
        implementation=choice,
    )
    return result


def _rows_spec(name: str, sharding: Any) -> Any:
    """The sharding of a result's rows, if over Explicit axes; only those are part of types."""
    spec = getattr(sharding, "spec", sharding)
    if getattr(spec, "unreduced", ()) or getattr(spec, "reduced", ()):
        raise NotImplementedError(
            f"{name}: out_sharding must not have unreduced or reduced axes, got {spec}; leave them "
            "out, which costs an all-reduce"
        )
    entry = (*spec, None)[0]
    explicit = {*jax.sharding.get_abstract_mesh().explicit_axes}
    return entry if explicit.issuperset(_compat.names_of(entry)) else None


def _segments(
    name: str,
    reducer: str,
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: Any = None,
    *,
    implementation: Implementation,
    **flags: bool,
) -> jax.Array:
    """Reduces the rows of each segment; with `bucket_size`, in each bucket and then over them."""
    choice = _native.choose_implementation(name, implementation)
    data = _checks.as_array(name, "data", data, numbers=True)
    _check_reduced(name, "data", data, reducer)
    ids = _checks.as_ids(name, "segment_ids", segment_ids)
    num_segments = _number_of_segments(name, num_segments, segment_ids)
    ids = _checks.as_ids(name, "segment_ids", segment_ids, num_segments)
    shape = (*ids.shape, *data.shape[1:])
    data = _broadcast(name, "data", data, shape, "segment_ids.shape + data.shape[1:]")
    data = data.astype(data.dtype)  # a strong type; the gradient has the weak type of data
    indexing = Indexing(clip=_clips(name, mode), function=name, **flags)

    def reduce(data: Any, ids: Any, rows_spec: Any = None) -> Any:
        params: dict[str, Any] = {"indexing": indexing, "num_segments": num_segments}
        params["rows_spec"] = rows_spec
        if reducer == "add":
            primitive = _scatter.segment_sum_p
            return _primitive.bind(primitive, data, ids, **params, implementation=choice)
        start = _scatter.rows_like(data, ids, _identity(reducer, data.dtype), **params)
        return _reduce(reducer, start, ids, data, indexing, choice)

    result: jax.Array
    if bucket_size is None:
        if out_sharding is None:
            result = reduce(data, ids)
            return result
        result = reduce(data, ids, _rows_spec(name, out_sharding))
        result = jax.sharding.reshard(result, out_sharding)  # or raises an error
        return result
    if out_sharding is not None:
        raise NotImplementedError(
            f"{name}: out_sharding together with bucket_size is not supported, as it is not by "
            f"jax.ops.{name}; shard the result with jax.sharding.reshard"
        )
    size = _checks.as_integer(name, "bucket_size", bucket_size)
    if size <= 0:
        raise ValueError(f"{name}: bucket_size must be positive, got {bucket_size!r}")
    if ids.ndim != 1:
        raise ValueError(
            f"{name}: segment_ids must have one dimension if bucket_size is given, got shape "
            f"{ids.shape}"
        )
    # The buckets are a batch. Rows of no segment pad the last one, so ids are clipped before.
    if indexing.clip:
        ids = jnp.clip(ids, 0, num_segments - 1)
        indexing = dataclasses.replace(indexing, clip=False)
    buckets = -(-ids.size // size)  # also for symbolic sizes
    missing = buckets * size - ids.size
    # Not jnp.pad: it has no gradient for 64-bit data while 64-bit dtypes are disabled.
    zeros = jnp.zeros((missing, *data.shape[1:]), data.dtype)
    data = jnp.concatenate([data, zeros])
    data = data.reshape(buckets, size, *data.shape[1:])
    ids = jnp.pad(ids, (0, missing), constant_values=num_segments).reshape(buckets, size)
    over_buckets: Any = {"add": jnp.sum, "max": jnp.max, "min": jnp.min, "multiply": jnp.prod}
    result = over_buckets[reducer](jax.vmap(reduce)(data, ids), axis=0)
    return result.astype(data.dtype)


def _reduce(
    reducer: str, operand: Any, ids: Any, updates: Any, indexing: Indexing, choice: str | None
) -> Any:
    params = {"indexing": indexing, "implementation": choice}
    if reducer == "add":
        return _primitive.bind(_scatter.scatter_add_p, operand, ids, updates, **params)
    primitive = _scatter.scatter_reduce_p
    return _primitive.bind(primitive, operand, ids, updates, reducer=reducer, **params)


def _identity(reducer: str, dtype: Any) -> Any:
    """The result of a reduction of no elements."""
    if reducer == "multiply":
        return 1
    is_max = reducer == "max"
    if dtype == jnp.bool_:
        return not is_max
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if is_max else jnp.iinfo(dtype).max
    return -jnp.inf if is_max else jnp.inf


def _scatter_rows(
    name: str,
    reducer: str,
    operand: ArrayLike,
    indices: ArrayLike,
    updates: ArrayLike,
    mode: Mode,
    *,
    implementation: Implementation,
    **flags: bool,
) -> jax.Array:
    choice = _native.choose_implementation(name, implementation)
    operand = _checks.as_array(name, "operand", operand)
    _check_reduced(name, "operand", operand, reducer)
    if operand.ndim == 0:
        raise ValueError(f"{name}: operand must have at least 1 dimension, got shape ()")
    ids = _checks.as_ids(name, "indices", indices, operand.shape[0])
    updates = _checks.as_array(name, "updates", updates, numbers=True)
    if jnp.result_type(operand, updates) != operand.dtype:
        raise TypeError(
            f"{name}: updates must have a dtype that {operand.dtype}, the operand's, can hold, got "
            f"{updates.dtype}; cast updates first"
        )
    shape = (*ids.shape, *operand.shape[1:])
    updates = _broadcast(name, "updates", updates, shape, "indices.shape + operand.shape[1:]")
    indexing = Indexing(wrap=True, clip=_clips(name, mode), function=name, **flags)
    result: jax.Array = _reduce(
        reducer, operand, ids, updates.astype(operand.dtype), indexing, choice
    )
    return result


def _check_reduced(function: str, name: str, x: jax.Array, reducer: str) -> None:
    if not _scatter.is_summed(x.dtype, reducer):
        raise TypeError(
            f"{function}: {name} must be float16, bfloat16, float32, float64, "
            f"{'complex, ' if reducer == 'add' else ''}or integers of 8 to 64 bits, got {x.dtype}; "
            f"cast {name} first"
        )


def _broadcast(
    function: str, name: str, x: jax.Array, shape: tuple[int, ...], expected: str
) -> jax.Array:
    if x.shape == shape:
        return x
    try:
        return jnp.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(
            f"{function}: {name} must broadcast to {expected} = {shape}, got shape {x.shape}"
        ) from None


def _number_of_segments(function: str, given: Any, ids: Any) -> int:
    value = np.max(ids) if given is None else given
    if isinstance(value, jax.Array):
        value = _compat.concrete_dimension(value, f"{function}() `num_segments` argument.")
    if given is None:
        value = _checks.as_integer(function, "num_segments", value) + 1
    return _checks.as_size(function, "num_segments", value)


def _axis(function: str, axis: Any, shape: tuple[int, ...]) -> int:
    """`axis` counted from the beginning."""
    index = _checks.as_integer(function, "axis", axis)
    if not -len(shape) <= index < len(shape):
        raise ValueError(
            f"{function}: axis must be one of table's {len(shape)} dimensions, got axis={index} "
            f"and a table of shape {shape}"
        )
    return index % len(shape)


def _take_mode(function: str, mode: Any) -> Any:
    if isinstance(mode, str) and mode == "raise":
        raise NotImplementedError(
            f'{function}: mode="raise" is not supported, as it is not by jnp.take; check ids with '
            "jax.experimental.checkify"
        )
    if mode is not None and not (isinstance(mode, str) and mode in ("fill", "clip", "wrap")):
        raise ValueError(f'{function}: mode must be "fill", "clip", "wrap" or None, got {mode!r}')
    return mode


def _fill(function: str, value: Any, dtype: Any) -> str | bytes:
    """The primitive's `fill`: the bytes of an element, or "invalid" for the default."""
    if value is None:
        return "invalid"
    is_number = isinstance(value, int | float | complex | np.bool) or (
        isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.number)
    )
    if not is_number or (np.iscomplexobj(value) and not np.issubdtype(dtype, np.complexfloating)):
        raise TypeError(
            f"{function}: fill_value must be a Python or NumPy number, since it is part of the "
            f"program, and real for a real table; got {value!r} of type {type(value).__name__}"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(value).astype(dtype).tobytes()  # NumPy's conversion, as in jax.lax.full


def _clips(function: str, mode: Any) -> bool:
    """Whether out-of-range ids are clipped; otherwise they are dropped."""
    modes = jax.lax.GatherScatterMode
    try:
        if mode is None or isinstance(mode, str | modes):
            return modes.from_any(mode) == modes.CLIP
    except ValueError:
        pass
    raise ValueError(
        f'{function}: mode must be "drop", "fill", "clip", "promise_in_bounds", None or a '
        f"jax.lax.GatherScatterMode, got {mode!r}"
    )
