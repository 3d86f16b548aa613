"""Graph layers that do not store a row for each edge: message sums and attention over edges."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_oneflow_ops import (
    _attention,
    _checks,
    _compat,
    _graph,
    _messages,
    _native,
    _primitive,
    _scatter,
)
from jax_oneflow_ops._docstrings import documented
from jax_oneflow_ops._indexing import Indexing

Implementation = Literal["native", "xla"] | None


# `==` of arrays is an array, so plans are compared by identity.
@dataclasses.dataclass(frozen=True, eq=False)
class SegmentPlan:
    """An order in which the edges of a segment are consecutive, made by `segment_plan`.

    A pytree: it may be an argument or a result of a function under `jax.jit`.

    Attributes:
      order: the indices of the edges in that order, int32 of shape ``(edges,)``.
      keys: for each edge in that order, twice its segment, plus 1 if its id is negative and counts
        from the end. If its id is out of range, twice the number of segments.
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

    Without a plan, each program sorts the ids that it needs, in every run.

    Args:
      ids: integers of shape ``(edges,)``: the receivers of edges, or their senders.
      num_segments: the number of segments, which is the number of nodes.

    Returns:
      A `SegmentPlan` for these ids. Out-of-range ids are allowed if the function allows them.

    Raises:
      TypeError: `ids` are not integers, or `num_segments` is not a concrete integer.
      ValueError: `ids` do not have one dimension, there are 2^31 - 1 or more edges or 2^30 or more
        segments, or `num_segments` is negative.

    Differentiation and sharding:
      A plan has no derivative. Each device sorts all ids.

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


Message = Callable[..., ArrayLike]


@_checks.in_own_precision
def message_sum(
    fun: Message,
    tables: tuple[ArrayLike, ...],
    senders: ArrayLike,
    receivers: ArrayLike,
    *edge_inputs: ArrayLike,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes a message for each edge from the rows at both ends; sums messages at the receivers.

    The result is that of ``jax.ops.segment_sum(fun(tables[0][senders], tables[1][receivers],
    *edge_inputs), receivers, num_segments)``. One kernel reads the rows, computes and sums. Neither
    it nor its derivatives store a row for each edge.

    Args:
      fun: a function of as many arrays as there are tables and edge inputs, written for arrays
        whose first dimension is that of edges. It returns one such array, the messages. It is
        traced as `fuse` traces functions, and may contain the same elementwise operations. It may
        close over arrays of one row, such as a bias, and has gradients with respect to them.
      tables: a tuple of one array, whose rows are read at the senders, or of two arrays, the second
        of which is read at the receivers. Their shapes are ``(nodes, ...)``, of any dtype that
        `fuse` takes.
      senders: integers of shape ``(edges,)``: rows of the first table. Negative ones count from the
        end. Out-of-range ones read the nearest row, as in ``tables[0][senders]``, and add nothing
        to its gradient, as in JAX.
      receivers: integers of shape ``(edges,)``: rows of the result. Edges whose receiver is
        negative or too large are dropped, as by `segment_sum`.
      *edge_inputs: arrays of shape ``(edges, ...)``, which may broadcast against rows, such as
        ``(edges, 1)`` or ``(edges, heads, 1)``.
      num_segments: the number of rows of the result. None takes the number of the plan.
      plan: a `segment_plan` of `receivers`. Without it the program sorts.
      sender_plan: a `segment_plan` of `senders` and the number of nodes, which derivatives with
        respect to the first table use.
      implementation: ``"native"`` for this package's kernels, ``"xla"`` for the jnp reference. None
        takes kernels on every platform that has them. The environment variable
        ``JAX_ONEFLOW_OPS_IMPLEMENTATION``, read when a function is traced, replaces None.

    Returns:
      An array of shape ``(num_segments, ...)``, of the other dimensions and the dtype of messages.
      Messages of integers and complex numbers run in jnp, which stores them.

    Raises:
      FusionError: `fun` contains an operation that is not elementwise.
      TypeError: an argument is not an array of numbers, `num_segments` is not a concrete integer,
        `fun` is not a function of arrays to one array, messages are booleans or floats of 8 bits,
        or a plan is not a `SegmentPlan`.
      ValueError: shapes do not fit, a plan is for other ids, `num_segments` is missing or negative,
        a table has no rows but there are edges, or there are 2^31 - 1 or more edges or 2^30 or more
        nodes.
      NotImplementedError: ``implementation="native"`` on a platform without native kernels.

    Numerics:
      Messages are computed as `fuse` computes: 16-bit values in float32, not rounded in between.
      They are summed in float32 and rounded once. Results have the same bits on every run: the
      order of summation depends only on shapes and ids. If ids or a plan are traced, a plan of
      other ids gives wrong sums without an error.

    Differentiation and sharding:
      Differentiable to any order, in both modes, with respect to tables, edge inputs and arrays
      that `fun` closes over. Each derivative is again a kernel that reads rows, computes and sums,
      or stores the gradient of an edge input. It stores no row for each edge, unless an edge input
      has that shape. `fun` may call functions with a `jax.custom_jvp`. Derivatives of those with a
      `jax.custom_vjp` raise a `FusionError`.
      Dimensions after the first may be sharded freely. Edge inputs, senders and receivers may be
      sharded by edges: each device sorts its own edges, and an all-reduce adds up the sums. Nodes
      and plans are all-gathered, with a `GatherWarning`.

    Compilation:
      As for `fuse`, with the same cache. If `fun` returns a row or its product with weights, the
      kernels are built in. Call it under `jax.jit`: outside, a function with custom derivatives is
      compiled at each call.

    Example:
      >>> import jax, jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([2, 2, 0])
      >>> nodes = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]])
      >>> print(jof.message_sum(lambda x: x, (nodes,), senders, receivers, num_segments=3))
      [[3. 4.]
       [0. 0.]
       [4. 6.]]
      >>> def message(sender, receiver, weight):
      ...     return jax.nn.relu(sender - receiver) * weight
      >>> weights = jnp.array([[1.0], [10.0], [100.0]])
      >>> tables = nodes, nodes
      >>> print(jof.message_sum(message, tables, senders, receivers, weights, num_segments=3))
      [[200. 200.]
       [  0.   0.]
       [  0.  42.]]
    """
    return _reduced(
        *("message_sum", "sum", fun, tables, senders, receivers, edge_inputs),
        *(num_segments, plan, sender_plan, implementation),
    )


@_checks.in_own_precision
@documented(like=message_sum)
def message_mean(
    fun: Message,
    tables: tuple[ArrayLike, ...],
    senders: ArrayLike,
    receivers: ArrayLike,
    *edge_inputs: ArrayLike,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`message_sum`, divided by the number of edges of each receiver; 0 for one without edges.

    Replaces two calls of `jax.ops.segment_sum`: of rows, and of ones.

    Returns:
      An array as of `message_sum`; the mean of integers is float32.

    Numerics:
      Those of `message_sum`. The division rounds once more. The sum of float16 messages may
      overflow even if their mean would not.

    Differentiation and sharding:
      As of `message_sum`.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([2, 2, 0])
      >>> nodes = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> print(jof.message_mean(lambda x: x, (nodes,), senders, receivers, num_segments=3))
      [[3. 4.]
       [0. 0.]
       [2. 3.]]
    """
    name = "message_mean"
    total = _reduced(
        *(name, "sum", fun, tables, senders, receivers, edge_inputs),
        *(num_segments, plan, sender_plan, implementation),
    )
    size = total.shape[0]
    ids = _in_range(_edge_ids(name, "receivers", receivers, size), size)
    ones, wide = jnp.ones(ids.shape, jnp.int32), total.dtype
    if total.dtype in _graph.FLOATS:
        count = _primitive.bind(
            *(_scatter.segment_sum_p, ones, ids),
            num_segments=size,
            rows_spec=None,
            indexing=Indexing(),
            implementation=_native.choose_implementation(name, implementation),
        )
        wide = _graph.compute_dtype(total.dtype)  # which holds every count
    else:
        count = jax.ops.segment_sum(ones, ids, size)
    mean = _scatter.mean_of(total, count, wide)
    return mean if wide == total.dtype else mean.astype(total.dtype)


@_checks.in_own_precision
@documented(like=message_sum)
def message_max(
    fun: Message,
    tables: tuple[ArrayLike, ...],
    senders: ArrayLike,
    receivers: ArrayLike,
    *edge_inputs: ArrayLike,
    num_segments: int | None = None,
    plan: SegmentPlan | None = None,
    sender_plan: SegmentPlan | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes a message for each edge from the rows at both ends; takes maxima at the receivers.

    The result is that of ``jax.ops.segment_max`` of the messages of `message_sum`.

    Returns:
      An array of the shape and dtype of `message_sum`; -inf for receivers without edges.

    Numerics:
      16-bit messages are computed in float32 and rounded once. If a message is NaN, so is the
      maximum.

    Differentiation and sharding:
      As of `message_sum`. The edges that have the maximum share the gradient equally, as in
      `jax.ops.segment_max`. Edges are all-gathered.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> senders, receivers = jnp.array([0, 1, 1]), jnp.array([1, 1, 0])
      >>> nodes = jnp.array([[1.0, 4.0], [3.0, 2.0]])
      >>> print(jof.message_max(lambda x: x, (nodes,), senders, receivers, num_segments=2))
      [[3. 2.]
       [3. 4.]]
    """
    return _reduced(
        *("message_max", "max", fun, tables, senders, receivers, edge_inputs),
        *(num_segments, plan, sender_plan, implementation),
    )


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

    The softmax of `logits` is over all edges of a receiver. The result is that of `message_sum` of
    the products of values and this softmax. Replaces a softmax over edges and
    `jax.ops.segment_sum` of ``weights * values[senders]``.

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
      An array of shape ``(num_segments,) + values.shape[1:]`` and of the dtype of `values`; 0 for
      receivers without edges.

    Raises:
      TypeError, ValueError, NotImplementedError: as `message_sum`.

    Numerics:
      Exponentials are relative to one of the receiver's logits, near their maximum. 16-bit logits
      are widened, and the softmax stays in float32; sums are rounded once. Results have the same
      bits on every run. If all logits of a receiver are -inf, its result is NaN. The gradient of
      logits subtracts the rounded result: in 16 bits its error is up to three times that of one
      rounding, and a quarter of that of the gradient in jnp.

    Differentiation and sharding:
      Differentiable to any order, in both modes. A gradient reads the rows of edges once on a GPU,
      or once for logits and once for values. It stores no array of edges except that of the logits.
      Tangents and higher derivatives are composed as those of `message_sum`. Sharding is that of
      `message_sum`.

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
    choice = _native.choose_implementation(name, implementation)
    values = _as_floats(name, "values", values)
    logits = _as_floats(name, "logits", logits)
    if values.ndim == 0:
        raise ValueError(f"{name}: values must have at least 1 dimension")
    size = _number_of_segments(name, num_segments, plan)
    graph = _graph_of(name, senders, receivers, values.shape[0], "values", size, plan, sender_plan)
    _check_edges(name, "logits", logits, graph.senders)
    depth = _check_leading(name, logits.shape, values.shape)
    if graph.order.shape != graph.senders.shape:
        order, keys = _graph.order_of(graph.receivers, size, choice)
        graph = graph._replace(order=order, rows=keys)
    row, dtype = values.shape[1:], values.dtype
    wide = _checks.promoted(logits.dtype, _graph.compute_dtype(dtype))
    if wide != _graph.compute_dtype(dtype):  # a softmax in float64
        values = values.astype(wide)
    if logits.dtype != values.dtype:
        logits = logits.astype(wide)
    ranks = 1, depth, len(row) - depth
    result, _ = _primitive.bind(
        _attention.attention_p,
        *graph,
        _primitive.merged(name, logits, (1, logits.ndim - 1)),
        _primitive.merged(name, values, ranks),
        num_segments=size,
        implementation=choice,
    )
    return _primitive.split(result.astype(dtype), (size, *row), ranks)


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
    """`segment_softmax` with a plan; errors name `function` and its arguments."""
    choice = _native.choose_implementation(function, implementation)
    logits = _as_floats(function, name, logits)
    size = _number_of_segments(function, num_segments, plan)
    given, ids = ids, _edge_ids(function, ids_name, ids, size)
    order = _order(function, "plan", plan, given, ids, size, _graph.receiver_rows)
    _check_edges(function, name, logits, ids)
    ranks = 1, logits.ndim - 1
    result = _graph.softmax(
        _in_range(ids, size),
        order,
        _primitive.merged(function, logits, ranks),
        num_segments=size,
        function=function,
        implementation=choice,
    )
    return _primitive.split(result, logits.shape, ranks)


def _reduced(
    function: str,
    reduction: str,
    fun: Message,
    tables: Any,
    senders: Any,
    receivers: Any,
    edge_inputs: Sequence[Any],
    num_segments: int | None,
    plan: SegmentPlan | None,
    sender_plan: SegmentPlan | None,
    implementation: Implementation,
) -> jax.Array:
    choice = _native.choose_implementation(function, implementation)
    if not callable(fun):
        raise TypeError(f"{function}: fun must be a function, got {type(fun).__name__}")
    if not isinstance(tables, tuple | list) or len(tables) not in (1, 2):
        got = f"{len(tables)} tables" if isinstance(tables, tuple | list) else type(tables).__name__
        raise TypeError(
            f"{function}: tables must be a tuple of one array, read at the senders, or of two, the "
            f"second read at the receivers; got {got}"
        )
    size = _number_of_segments(function, num_segments, plan)
    arrays = [_checks.as_array(function, f"tables[{k}]", x) for k, x in enumerate(tables)]
    arrays += [_checks.as_array(function, f"edge input {k}", x) for k, x in enumerate(edge_inputs)]
    for k, x in enumerate(arrays[: len(tables)]):
        if x.ndim == 0:
            raise ValueError(
                f"{function}: tables[{k}] must have at least 1 dimension, got shape ()"
            )
    rows = arrays[0].shape[0]
    graph = _graph_of(function, senders, receivers, rows, "tables[0]", size, plan, sender_plan)
    if len(tables) == 2 and arrays[1].shape[0] != size:
        if arrays[1].shape[0] == 0 and graph.senders.size:
            raise ValueError(f"{function}: tables[1] must have rows where there are edges")
        arrays[1] = arrays[1][jnp.arange(size)]  # the rows that receivers of the result read
    for k, x in enumerate(arrays[len(tables) :]):
        _check_edges(function, f"edge input {k}", x, graph.senders)
    sides = "sr"[: len(tables)] + "e" * len(edge_inputs)
    traced = _messages.traced(function, fun, arrays, sides, graph.senders.shape[0])
    result: jax.Array
    if traced is None:
        # jnp reads the nearest row for an id out of range, and drops its gradient. Such an id
        # becomes int32.min if that is the first row, and `rows` or `size` if it is the last.
        own = graph.senders
        outside = jnp.where(own == ~0, jnp.iinfo(jnp.int32).min, rows)
        receivers = jnp.where(graph.receivers < 0, size, graph.receivers)
        ids = jnp.where(own < 0, outside, own), receivers
        gathered = [x[i] for x, i in zip(arrays, ids[: len(tables)], strict=False)]
        messages = jnp.asarray(fun(*gathered, *arrays[len(tables) :]))
        if reduction == "sum" and messages.dtype == jnp.bool_:
            raise TypeError(f"{function}: fun must return numbers, got booleans; cast them")
        if jnp.issubdtype(messages.dtype, jnp.floating) and messages.dtype.itemsize == 1:
            raise TypeError(
                f"{function}: fun must return floats of at least 16 bits, got {messages.dtype}; "
                "cast them"
            )
        result = getattr(jax.ops, f"segment_{reduction}")(messages, receivers, size)
        return result
    product = traced.product() if reduction == "sum" else None
    if product is not None:
        table, weights, depth = product
        ranks = 1, depth, table.ndim - 1 - depth
        if _primitive.are_mergeable(table, ranks) and (
            weights is None or _primitive.are_mergeable(weights, (1, weights.ndim - 1))
        ):
            return _weighted_sum(function, graph, table, weights, ranks, size, choice)
    result = _messages.reduced(
        *(graph, traced, reduction), num_segments=size, function=function, implementation=choice
    )
    return result


def _graph_of(
    function: str,
    senders: Any,
    receivers: Any,
    rows: int,
    table: str,
    size: int,
    plan: SegmentPlan | None,
    sender_plan: SegmentPlan | None,
) -> _graph.Graph:
    given = senders, receivers
    senders = _edge_ids(function, "senders", senders, rows)
    receivers = _edge_ids(function, "receivers", receivers, size)
    if senders.shape != receivers.shape:
        raise ValueError(
            f"{function}: senders and receivers must have one shape, got {senders.shape} and "
            f"{receivers.shape}"
        )
    if rows == 0 and senders.size:
        raise ValueError(f"{function}: {table} must have rows where there are edges")
    order = _order(function, "plan", plan, given[1], receivers, size, _graph.receiver_rows)
    sender_order = _order(
        *(function, "sender_plan", sender_plan, given[0], senders, rows, _graph.sender_rows)
    )
    own = jnp.where(senders < 0, senders + rows, senders)
    nearest = jnp.clip(own, 0, max(rows - 1, 0))
    senders = jnp.where(own == nearest, nearest, ~nearest).astype(jnp.int32)
    return _graph.Graph(senders, _in_range(receivers, size), *order, *sender_order)


def _weighted_sum(
    function: str,
    graph: _graph.Graph,
    table: jax.Array,
    weights: jax.Array | None,
    ranks: Sequence[int],
    size: int,
    implementation: str | None,
) -> jax.Array:
    """The sum by built-in kernels, of a table whose `ranks` are its rows, heads and features."""
    rows = _primitive.merged(function, table, ranks)
    if weights is None:
        weights = _graph.no_weights(rows.shape[1], table.dtype)
    else:
        weights = _primitive.merged(function, weights, (1, weights.ndim - 1))
    result = _graph.message_sum(
        graph,
        rows,
        weights,
        num_segments=size,
        function=function,
        implementation=implementation,
    )
    return _primitive.split(result, (size, *table.shape[1:]), ranks)


def _check_leading(function: str, logits: tuple[int, ...], values: tuple[int, ...]) -> int:
    """The number of dimensions of a row that logits have."""
    own, row = logits[1:], values[1:]
    for depth in range(len(own) + 1):
        if own[:depth] == row[:depth] and all(n == 1 for n in own[depth:]) and len(own) <= len(row):
            return depth
    raise ValueError(
        f"{function}: logits must have the shape (edges, ...) with the first dimensions of a row "
        f"of values, or 1s at the end; got shapes {logits} and {values}"
    )


def _as_floats(function: str, name: str, given: Any) -> jax.Array:
    """Checks for an array of floats; promotes integers."""
    x = _checks.promoted_integers(_checks.as_array(function, name, given))
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
    if (isinstance(ids.size, int) and ids.size > _graph.MOST) or (
        isinstance(rows, int) and rows > _graph.MOST_ROWS
    ):
        raise ValueError(
            f"{function}: at most {_graph.MOST} edges and {_graph.MOST_ROWS} rows are supported, "
            f"got {ids.size} and {rows}"
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
    function: str,
    name: str,
    plan: SegmentPlan | None,
    given: Any,
    ids: Any,
    rows: int,
    rows_of: Callable[[Any, int], Any],
) -> _graph.Order:
    """The order of a plan, and the rows of its keys; `ids` are made from the ids `given`."""
    if plan is None:
        return _graph.no_order()
    if not isinstance(plan, SegmentPlan):
        raise TypeError(f"{function}: {name} must be a SegmentPlan, got {type(plan).__name__}")
    if plan.order.shape != ids.shape or plan.num_segments != rows:
        raise ValueError(
            f"{function}: {name} must be of {ids.size} edges and {rows} segments, got one of "
            f"{math.prod(plan.order.shape)} and {plan.num_segments}"
        )
    if not _is_of(plan, given, rows):
        raise ValueError(
            f"{function}: {name} was made from other ids than those that it is used with. Remedy: "
            f"segment_plan({'senders' if name == 'sender_plan' else 'receivers'}, num_segments)."
        )
    return plan.order, rows_of(plan.keys, rows)


def _is_of(plan: SegmentPlan, ids: Any, rows: int) -> bool:
    """Whether a plan was made from these ids; True if that is unknown, as for traced arrays."""
    for x in (plan.order, plan.keys, ids):
        if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
            return True
    with jax.ensure_compile_time_eval():
        ids = _checks.as_ids("segment_plan", "ids", ids, rows)
        return bool(_are_keys_of(plan.keys, plan.order, ids, rows))


@functools.partial(jax.jit, static_argnums=3)
def _are_keys_of(keys: Any, order: Any, ids: Any, rows: int) -> Any:
    keys, order, ids = (_compat.resharded(x, jax.typeof(x), [None]) for x in (keys, order, ids))
    return jnp.all(_graph.keys_of(ids, rows)[order] == keys)
