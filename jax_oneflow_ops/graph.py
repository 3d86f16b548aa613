"""Graph layers that store no row for each edge: sums of messages, attention over edges."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_oneflow_ops import _checks, _graph, _native, _scatter
from jax_oneflow_ops._indexing import Indexing

Implementation = Literal["native", "xla"] | None


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """An order in which the edges of a segment are consecutive, made by `segment_plan`.

    A pytree: it may be an argument or a result of a function under `jax.jit`.

    Attributes:
      order: the indices of the edges in that order, int32 of shape ``(edges,)``.
      keys: for each edge in that order twice its segment, plus 1 if its id is out of range.
      num_segments: the number of segments.
    """

    order: jax.Array
    keys: jax.Array
    num_segments: int


jax.tree_util.register_dataclass(
    SegmentPlan, data_fields=["order", "keys"], meta_fields=["num_segments"]
)


@_checks.in_own_precision
def segment_plan(ids: ArrayLike, num_segments: int) -> SegmentPlan:
    """Sorts edges by segment, once for all layers and steps of a graph network.

    Without a plan, each program sorts the ids that it needs, once per run.

    Args:
      ids: integers of shape ``(edges,)``: the receivers of edges, or their senders.
      num_segments: the number of segments, which is the number of nodes.

    Returns:
      A `SegmentPlan` for these ids. Out-of-range ids are allowed if the function allows them.

    Raises:
      TypeError: `ids` are not integers, or `num_segments` is not a concrete integer.
      ValueError: `ids` do not have one dimension, there are 2^31 - 1 or more edges or segments, or
        `num_segments` is negative.

    Differentiation and sharding:
      There is no derivative. Each device sorts all ids.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> print(jof.segment_plan(jnp.array([2, 0, 2, 1]), 3).order)
      [1 3 0 2]
    """
    name = "segment_plan"
    size = _checks.as_size(name, "num_segments", num_segments)
    ids = _edge_ids(name, "ids", ids, size)
    limits = jnp.iinfo(jnp.int32)
    ids = jnp.clip(ids, limits.min, limits.max).astype(jnp.int32)
    choice = _native.choose_implementation(name, None)
    order, keys = _graph.sort(ids, size, choice)
    return SegmentPlan(order, keys, size)


@_checks.in_own_precision
def message_sum(
    table: ArrayLike,
    senders: ArrayLike,
    receivers: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Reads a row of a table at the sender of each edge, and sums the rows at the receivers.

    The result is that of ``jax.ops.segment_sum(weights * table[senders], receivers,
    num_segments)``. Neither the function nor its derivatives store a row for each edge.

    Args:
      table: array of shape ``(nodes, ...)``: float16, bfloat16, float32 or float64. Integers and
        complex numbers run in jnp, which stores the rows.
      senders: integers of shape ``(edges,)``, the rows that are read. Negative ones count from the
        end, and those out of range mean the nearest row, as in ``table[senders]``. The gradient of
        such an edge goes to that row, where that of ``table[senders]`` is dropped.
      receivers: integers of shape ``(edges,)``, the rows of the result. Edges whose receiver is
        negative or too large are dropped, as by `segment_sum`.
      weights: None for no weights, or numbers of shape ``(edges, ...)``, where the other dimensions
        are the first ones of a row, such as ``(edges, heads)`` for a table of shape
        ``(nodes, heads, width)``. Dimensions at the end may be 1; they are broadcast.
      num_segments: the number of rows of the result. None takes the number of the plan.
      plan: a `segment_plan` of `receivers`. Without it the program sorts.
      sender_plan: a `segment_plan` of `senders` and the number of nodes, which derivatives with
        respect to `table` use.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes kernels on every platform that has them. The environment variable
        ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of shape ``(num_segments,) + table.shape[1:]``, of the dtype that the product of
      table and weights has in jnp.

    Raises:
      TypeError: an argument is not an array of numbers, `num_segments` is not a concrete integer,
        or a plan is not a `SegmentPlan`.
      ValueError: shapes do not fit, a plan is for another number of edges or segments,
        `num_segments` is missing or negative, the table has no rows but there are edges, or there
        are 2^31 - 1 or more edges or nodes.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      16-bit values are multiplied and summed in float32 and rounded once. Results have the same
      bits on every run: the order of summation depends only on shapes and ids. A plan that was made
      from other ids gives wrong sums, and no error.

    Differentiation and sharding:
      To any order, in both modes, with respect to `table` and `weights`. No derivative stores a row
      for each edge, unless `weights` have that shape. Dimensions after the first may be sharded
      freely; edges and nodes are all-gathered, with a `GatherWarning`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([2, 2, 0])
      >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> print(jof.message_sum(table, senders, receivers, num_segments=3))
      [[3. 4.]
       [0. 0.]
       [4. 6.]]
      >>> weights = jnp.array([1.0, 10.0, 100.0])
      >>> print(jof.message_sum(table, senders, receivers, weights, num_segments=3))
      [[300. 400.]
       [  0.   0.]
       [ 31.  42.]]
    """
    return _message_sum(
        *("message_sum", table, senders, receivers, weights, num_segments, plan, sender_plan),
        implementation=implementation,
    )


@_checks.in_own_precision
def message_mean(
    table: ArrayLike,
    senders: ArrayLike,
    receivers: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`message_sum`, divided by the number of edges of each receiver; 0 where it has none.

    Replaces two calls of `jax.ops.segment_sum`: of rows, and of ones.

    Args:
      table: rows of the senders, as in `message_sum`.
      senders: the rows that are read, as in `message_sum`.
      receivers: the rows of the result, as in `message_sum`.
      weights: None or weights of edges, as in `message_sum`. They do not change the divisor.
      num_segments: the number of rows of the result, as in `message_sum`.
      plan: a `segment_plan` of `receivers`.
      sender_plan: a `segment_plan` of `senders`, as in `message_sum`.
      implementation: ``"native"``, ``"xla"`` or None, as in `message_sum`.

    Returns:
      An array of the shape and dtype of `message_sum`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `message_sum`.

    Numerics:
      Those of `message_sum`. The division rounds once more.

    Differentiation and sharding:
      As of `message_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([2, 2, 0])
      >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> print(jof.message_mean(table, senders, receivers, num_segments=3))
      [[3. 4.]
       [0. 0.]
       [2. 3.]]
    """
    total = _message_sum(
        *("message_mean", table, senders, receivers, weights, num_segments, plan, sender_plan),
        implementation=implementation,
    )
    size = total.shape[0]
    ids = _in_range(_edge_ids("message_mean", "receivers", receivers, size), size)
    ones = jnp.ones(ids.shape, jnp.int32)
    if total.dtype in _graph.FLOATS:
        count = _scatter.bind(
            *(_scatter.segment_sum_p, ones, ids),
            num_segments=size,
            rows_spec=None,
            indexing=Indexing(),
            implementation=_native.choose_implementation("message_mean", implementation),
        )
    else:
        count = jax.ops.segment_sum(ones, ids, size)
    divisor = jnp.maximum(count, 1).astype(total.dtype)
    return total / divisor.reshape(-1, *(1,) * (total.ndim - 1))


@_checks.in_own_precision
def attention_sum(
    logits: ArrayLike,
    values: ArrayLike,
    senders: ArrayLike,
    receivers: ArrayLike,
    *,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Graph attention: the sum of the senders' values, weighted by a softmax over edges.

    The softmax of `logits` is over all edges of a receiver. The result is that of `message_sum`
    with this softmax as weights. Replaces a softmax over edges and `jax.ops.segment_sum` of
    ``weights * values[senders]``.

    Args:
      logits: real numbers of shape ``(edges,)`` or ``(edges, heads)``. In general, the dimensions
        after the first are the first ones of a row of `values`.
      values: array of shape ``(nodes, ...)``, such as ``(nodes, heads, width)``: float16, bfloat16,
        float32 or float64; integers are converted as jnp promotes them with float32.
      senders: the rows of `values` that are read, as in `message_sum`.
      receivers: the rows of the result, as in `message_sum`.
      num_segments: the number of rows of the result. None takes the number of the plan.
      plan: a `segment_plan` of `receivers`. Without it the program sorts.
      sender_plan: a `segment_plan` of `senders` and the number of nodes, which derivatives with
        respect to `values` use.
      implementation: ``"native"``, ``"xla"`` or None, as in `message_sum`.

    Returns:
      An array of shape ``(num_segments,) + values.shape[1:]`` and of the dtype of `values`; 0 where
      a receiver has no edges.

    Raises:
      TypeError, ValueError, NotImplementedError: as `message_sum`.

    Numerics:
      The maximum of each receiver's logits is subtracted first. 16-bit logits are widened, and the
      softmax stays in float32; sums are rounded once. Results have the same bits on every run. If
      all logits of a receiver are -inf, its result is NaN.

    Differentiation and sharding:
      To any order, in both modes. Derivatives store float32 arrays of a number for each edge and
      head, but no row for each edge. Sharding is that of `message_sum`.

    Source:
      "Graph Attention Networks", Velickovic et al., 2018.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
      >>> logits, values = jnp.zeros(3), jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> print(jof.attention_sum(logits, values, senders, receivers, num_segments=2))
      [[2. 3.]
       [3. 4.]]
    """
    name = "attention_sum"
    values = _as_floats(name, "values", values)
    logits = _as_floats(name, "logits", logits)
    wide = _graph.compute_dtype(values.dtype)
    logits = logits.astype(jnp.promote_types(logits.dtype, wide))
    count = _number_of_segments(name, num_segments, plan)
    weights = planned_softmax(
        *(name, "logits", logits, "receivers", receivers, count, plan),
        implementation=implementation,
    )
    return _message_sum(
        *(name, values, senders, receivers, weights.astype(wide), count, plan, sender_plan),
        implementation=implementation,
        names=("values", "logits"),
        dtype=values.dtype,
    )


def planned_softmax(
    function: str,
    name: str,
    logits: Any,
    ids_name: str,
    ids: ArrayLike,
    num_segments: int | None,
    plan: SegmentPlan | None,
    *,
    implementation: Implementation,
) -> jax.Array:
    """`segment_softmax` by a plan; arguments have the names of the function that is called."""
    choice = _native.choose_implementation(function, implementation)
    logits = _as_floats(function, name, logits)
    size = _number_of_segments(function, num_segments, plan)
    ids = _edge_ids(function, ids_name, ids, size)
    order = _order(function, "plan", plan, ids, size, drops=True)
    _check_edges(function, name, logits, ids)
    result: jax.Array = _graph.softmax(
        _in_range(ids, size),
        order,
        logits.reshape(ids.size, math.prod(logits.shape[1:])),
        num_segments=size,
        function=function,
        implementation=choice,
    )
    return result.reshape(logits.shape)


def _message_sum(
    function: str,
    table: Any,
    senders: Any,
    receivers: Any,
    weights: Any,
    num_segments: int | None,
    plan: SegmentPlan | None,
    sender_plan: SegmentPlan | None,
    *,
    implementation: Implementation,
    names: tuple[str, str] = ("table", "weights"),
    dtype: Any = None,
) -> jax.Array:
    """The result has the dtype of the product, or that of the table where that is given."""
    choice = _native.choose_implementation(function, implementation)
    table = _as_numbers(function, names[0], table)
    if table.ndim == 0:
        raise ValueError(f"{function}: {names[0]} must have at least 1 dimension, got shape ()")
    rows, row = table.shape[0], table.shape[1:]
    size = _number_of_segments(function, num_segments, plan)
    senders = _edge_ids(function, "senders", senders, rows)
    receivers = _edge_ids(function, "receivers", receivers, size)
    if senders.shape != receivers.shape:
        raise ValueError(
            f"{function}: senders and receivers must have one shape, got {senders.shape} and "
            f"{receivers.shape}"
        )
    if rows == 0 and senders.size:
        raise ValueError(f"{function}: {names[0]} must have rows where there are edges")
    order = _order(function, "plan", plan, receivers, size, drops=True)
    sender_order = _order(function, "sender_plan", sender_plan, senders, rows, drops=False)
    depth = 0
    if weights is not None:
        weights = _as_numbers(function, names[1], weights)
        _check_edges(function, names[1], weights, senders)
        depth = _shared_dims(function, names, weights.shape, table.shape)
        if dtype is None:
            dtype = jnp.result_type(table, weights)
            table, weights = table.astype(dtype), weights.astype(dtype)
    heads, width = math.prod(row[:depth]), math.prod(row[depth:])
    table = table.reshape(rows, heads, width)
    weights = None if weights is None else weights.reshape(senders.size, heads)
    nearest = jnp.clip(jnp.where(senders < 0, senders + rows, senders), 0, max(rows - 1, 0))
    if table.dtype not in _graph.FLOATS:
        messages = table[nearest] if senders.size else table[:0]
        messages = messages if weights is None else messages * weights[..., None]
        result: jax.Array = jax.ops.segment_sum(messages, _in_range(receivers, size), size)
        return result.reshape(size, *row)
    graph = (nearest.astype(jnp.int32), _in_range(receivers, size), *order, *sender_order)
    result = _graph.message_sum(
        graph,
        table,
        jnp.zeros((0, heads), table.dtype) if weights is None else weights,
        num_segments=size,
        function=function,
        implementation=choice,
    )
    return result.reshape(size, *row)


def _shared_dims(
    function: str, names: tuple[str, str], weights: tuple[int, ...], table: tuple[int, ...]
) -> int:
    """How many dimensions of a row weights have of their own."""
    own, row = weights[1:], table[1:]
    for depth in range(len(own) + 1):
        if own[:depth] == row[:depth] and all(n == 1 for n in own[depth:]) and len(own) <= len(row):
            return depth
    raise ValueError(
        f"{function}: {names[1]} must have the shape (edges, ...) with the first dimensions of a "
        f"row of {names[0]}, or 1s at the end; got shapes {weights} and {table}"
    )


def _as_numbers(function: str, name: str, given: Any) -> jax.Array:
    x: jax.Array = _checks.as_array(function, name, given)
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"{function}: {name} must be numbers, got {x.dtype}; cast {name} first")
    return x


def _as_floats(function: str, name: str, given: Any) -> jax.Array:
    """Integers are promoted."""
    x = _as_numbers(function, name, given)
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if x.dtype not in _graph.FLOATS:
        raise TypeError(
            f"{function}: {name} must be float16, bfloat16, float32, float64 or integers, got "
            f"{x.dtype}; cast {name} first"
        )
    return x


def _edge_ids(function: str, name: str, given: Any, rows: int) -> jax.Array:
    ids = _checks.as_ids(function, name, given, rows)
    if ids.ndim != 1:
        raise ValueError(f"{function}: {name} must have 1 dimension, got shape {ids.shape}")
    if any(isinstance(n, int) and n > _graph.MOST for n in (ids.size, rows)):
        raise ValueError(
            f"{function}: at most {_graph.MOST} edges and rows are supported, got {ids.size} and "
            f"{rows}"
        )
    return ids


def _in_range(ids: Any, rows: int) -> Any:
    return jnp.where((ids >= 0) & (ids < rows), ids, -1).astype(jnp.int32)


def _check_edges(function: str, name: str, x: Any, ids: Any) -> None:
    if x.shape[:1] != ids.shape:
        raise ValueError(
            f"{function}: {name} must have one entry for each of {ids.size} edges, got shape "
            f"{x.shape}"
        )


def _number_of_segments(function: str, given: Any, plan: SegmentPlan | None) -> int:
    if given is None and isinstance(plan, SegmentPlan):
        return plan.num_segments
    if given is None and plan is None:
        raise ValueError(f"{function}: give num_segments=..., or a plan, which knows it")
    if given is None:
        raise TypeError(
            f"{function}: plan must be what segment_plan returns, got {type(plan).__name__}"
        )
    return _checks.as_size(function, "num_segments", given)


def _order(
    function: str, name: str, plan: SegmentPlan | None, ids: Any, rows: int, *, drops: bool
) -> _graph.Order:
    """The order of a plan, in which ids out of range are dropped or mean the nearest row."""
    if plan is None:
        return _graph.no_order()
    if not isinstance(plan, SegmentPlan):
        raise TypeError(f"{function}: {name} must be a SegmentPlan, got {type(plan).__name__}")
    if plan.order.shape != ids.shape or plan.num_segments != rows:
        raise ValueError(
            f"{function}: {name} must be of {ids.size} edges and {rows} segments, got one of "
            f"{math.prod(plan.order.shape)} and {plan.num_segments}"
        )
    return plan.order, _graph.in_range(plan.keys) if drops else plan.keys >> 1
