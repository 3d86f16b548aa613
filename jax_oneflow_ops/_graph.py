"""The primitives of graph layers, and their rules.

A graph is the six int32 arrays of `Graph`. An unknown order is two arrays of rank 2. Edges whose
receiver is out of range are ignored. A sender out of range is stored as ``~row``, where `row` is
the row that jnp reads for it. Its edge counts, except in sums at the senders and in their
derivatives. The parameter `drops_senders` marks those.

`message_sum` adds up weighted rows of the senders at the receivers. `edge_dot` computes the dot
product of the rows at both ends of each edge. Each is linear in either of its arrays, and its
derivatives are again these two primitives. `softmax_vjp` is the derivative of `softmax`. Its own
derivatives are computed with these primitives, too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _emit, _primitive, _scatter
from jax_oneflow_ops._indexing import Indexing
from jax_oneflow_ops._primitive import bind

FLOATS = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
MOST = 2**31 - 2  # edges, whose numbers are int32
MOST_ROWS = 2**30 - 1  # of a table: keys, which are twice a row number, are int32
# The fewest and the most positions of an order that a thread block takes, and the number of blocks
# that run at once on an H200: a wave. More positions than a wave takes are split evenly over whole
# waves.
LEAST_CHUNK, MOST_CHUNK, WAVE = 128, 1344, 396
CPU_CHUNK, CPU_CHUNKS = 1024, 256  # positions that a CPU thread takes, and the most chunks


def compute_dtype(dtype: Any) -> Any:
    """The dtype that values are computed in before they are rounded."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


Order = tuple[Any, Any]  # the numbers of edges, and their ids


class Graph(NamedTuple):
    """The first operands of the primitives."""

    senders: Any  # negative if they are out of range
    receivers: Any  # the same
    order: Any  # of the edges, such that edges of equal receivers are neighbours
    rows: Any  # the receivers in that order, -1 if they are out of range
    sender_order: Any  # such that edges of equal senders are neighbours
    sender_rows: Any  # the senders in that order

    def reversed(self) -> "Graph":
        """The graph with all edges reversed."""
        orders = self.sender_order, self.sender_rows, self.order, self.rows
        return Graph(self.receivers, self.senders, *orders)


def no_order() -> Order:
    """An unknown order.

    Its arrays are not empty: if a gradient in a `shard_map` keeps empty arrays, XLA of jaxlib
    0.11.2 terminates the process on several GPUs.
    """
    return jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)


def no_weights(heads: int, dtype: Any) -> Any:
    """A placeholder for the weights of an unweighted sum, with one dimension more than weights."""
    return jnp.zeros((1, 1, heads), dtype)


def sort(ids: Any, rows: int, implementation: str | None, *, function: str = "segment_plan") -> Any:
    """Sorts edges by id: their numbers, and keys for `receiver_rows` and `sender_rows`.

    A key is twice a row, plus 1 if the id is negative and counts from the end. It is ``2 * rows``
    if the id is out of range. So edges of a row are neighbours whether negative ids count, as for
    senders, or not, as for receivers.
    """
    # If there are no native kernels, the function that was called raises the error.
    choice = None if implementation == "native" else implementation
    return bind(order_p, ids, rows=rows, function=function, implementation=choice)


def receiver_rows(keys: Any, rows: int) -> Any:
    """The rows of keys, -1 for ids that are negative or out of range."""
    return jnp.where((keys & 1 == 0) & (keys < 2 * rows), keys >> 1, -1)


def sender_rows(keys: Any, rows: int) -> Any:
    """The rows of keys, -1 for ids that are out of range."""
    return jnp.where(keys < 2 * rows, keys >> 1, -1)


def order_of(ids: Any, rows: int, implementation: str | None) -> Order:
    """The order of a graph's senders or receivers, which are negative if they are out of range."""
    ids = jnp.where(ids < 0, rows, ids)
    # If edges are sharded, each device sorts its own, and XLA removes this.
    order, keys = sort(ids, rows, implementation, function="")
    return order, sender_rows(keys, rows)


def known_order(order: Any, keys: Any, ids: Any, rows: int) -> Order:
    """The given order, unless it is unknown or that of all edges instead of this shard's."""
    return (order, keys) if order.shape == ids.shape else order_of(ids, rows, None)


def message_sum(
    graph: Sequence[Any],
    table: Any,
    weights: Any,
    *,
    num_segments: int,
    function: str,
    implementation: str | None,
    drops_senders: bool = False,
) -> Any:
    """Binds the primitive, which sorts the edges if the order of the receivers is unknown."""
    return bind(
        *(message_sum_p, *graph, table, weights),
        num_segments=num_segments,
        drops_senders=drops_senders,
        function=function,
        implementation=implementation,
    )


def softmax(
    ids: Any,
    order: Order,
    x: Any,
    *,
    num_segments: int,
    function: str,
    implementation: str | None,
) -> Any:
    """Binds the primitive with the order, which is computed here if it is unknown."""
    if order[0].shape != ids.shape:
        order = order_of(ids, num_segments, implementation)
    return bind(
        *(softmax_p, ids, *order, x),
        num_segments=num_segments,
        function=function,
        implementation=implementation,
    )


# ---- types and shardings ----


def joined(*entries: Any) -> Any:
    """The sharding of a dimension that several operands have."""
    return next((entry for entry in entries if entry is not None), None)


def beside(edges: Any, features: Sequence[Any]) -> Any:
    """The sharding of edges, None if its mesh axes shard features, too: these keep them."""
    used = {axis for entry in features for axis in _compat.names_of(entry)}
    return None if used.intersection(_compat.names_of(edges)) else edges


def _order_type(ids: Any, **_: Any) -> list[Any]:
    return [ids.update(dtype=jnp.dtype(jnp.int32), weak_type=False)] * 2


def _message_sum_type(*args: Any, num_segments: int, **_: Any) -> Any:
    *_orders, table, weights = args
    _, heads, width = table.sharding.spec
    shape = (num_segments, *table.shape[1:])
    spec = (None, joined(heads, weights.sharding.spec[1]), width)
    return _compat.with_spec(table, shape, spec).update(weak_type=False)


def _edge_dot_type(senders: Any, *args: Any, dtype: Any, **_: Any) -> Any:
    *_orders, a, b = args
    heads = joined(a.sharding.spec[1], b.sharding.spec[1])
    spec = (beside(senders.sharding.spec[0], [heads]), heads)
    result = _compat.with_spec(a, (senders.shape[0], a.shape[1]), spec)
    return result.update(dtype=dtype, weak_type=False)


def _softmax_type(*args: Any, num_segments: int, **_: Any) -> Any:
    x = args[3]
    return _compat.with_spec(x, x.shape, (None, x.sharding.spec[1])).update(weak_type=False)


def rule(
    arrays: Sequence[str], *results: str, free: str = "hd"
) -> Callable[..., _primitive.ShardingRule]:
    """Makes a sharding rule in which the `free` dimensions may be sharded; others are replicated.

    Dimensions have names of one letter, such as "h" and "d" for features and "e" for edges. If
    edges are free, each device sorts its own.
    """

    def of(*avals: Any, **_: Any) -> _primitive.ShardingRule:
        ids = [
            [f"i{k}_{d}" for d in range(len(aval.shape))]
            for k, aval in enumerate(avals[: len(avals) - len(arrays)])
        ]
        unread = set[str]()
        if "e" in free:
            unread.update(*ids[2:])
            ids[:2] = ["e"], ["e"]
        operands = [[*names] for names in arrays]
        for names, aval in zip(operands, avals[len(ids) :], strict=True):
            if len(aval.shape) > len(names):  # no weights
                names[:1] = ["none", "one"]
        whole = {name for names in (*ids, *operands, *results) for name in names} - {*free}
        sides = [*ids, *operands], [*map(list, results)]
        return _primitive.ShardingRule(*sides, frozenset(whole), unread={"e": frozenset(unread)})

    return of


# ---- references in jnp ----


def rows_of(table: Any, ids: Any) -> Any:
    """The rows that ids name, in the dtype that they are computed in; 0 where an id names none."""
    wide = table.astype(compute_dtype(table.dtype))
    found = wide.at[jnp.where(ids < 0, table.shape[0], ids)].get(mode="fill", fill_value=0)
    return jnp.asarray(found)


def sums_of(rows: Any, ids: Any, size: int) -> Any:
    zeros = jnp.zeros((size, *rows.shape[1:]), rows.dtype)
    return zeros.at[jnp.where(ids < 0, size, ids)].add(rows, mode="drop")


def read(senders: Any, drops_senders: bool) -> Any:
    """The rows that edges read, -1 for edges that are ignored."""
    return jnp.where(senders < 0, -1 if drops_senders else ~senders, senders)


def _message_sum_reference(
    *args: Any, num_segments: int, drops_senders: bool, **_: Any
) -> jax.Array:
    senders, receivers, *_orders, table, weights = args
    senders = read(senders, drops_senders)
    rows = rows_of(table, senders)
    if weights.ndim == 2:
        weighted = rows * weights.astype(rows.dtype)[..., None]
        rows = jnp.where((senders < 0)[:, None, None], 0, weighted)
    result: jax.Array = sums_of(rows, receivers, num_segments).astype(table.dtype)
    return result


def _edge_dot_reference(*args: Any, dtype: Any, drops_senders: bool, **_: Any) -> jax.Array:
    senders, receivers, *_orders, a, b = args
    senders = read(senders, drops_senders)
    dots = jnp.sum(rows_of(a, receivers) * rows_of(b, senders), axis=-1)
    return jnp.where(((senders < 0) | (receivers < 0))[:, None], 0, dots).astype(dtype)


def _softmax_reference(*args: Any, num_segments: int, **_: Any) -> jax.Array:
    ids, *_orders, x = args
    wide = x.astype(compute_dtype(x.dtype))
    to = jnp.where(ids < 0, num_segments, ids)
    most = jnp.full((num_segments, x.shape[1]), -jnp.inf, wide.dtype).at[to].max(wide, mode="drop")
    terms = jnp.exp(wide - rows_of(most, ids))
    y = terms / rows_of(sums_of(terms, ids, num_segments), ids)
    return jnp.where((ids < 0)[:, None], 0, y).astype(x.dtype)


def _softmax_vjp_reference(*args: Any, num_segments: int, **_: Any) -> jax.Array:
    ids, *_orders, y, t = args
    wide = compute_dtype(y.dtype)
    value, tangent = y.astype(wide), t.astype(wide)
    result = value * (tangent - rows_of(sums_of(value * tangent, ids, num_segments), ids))
    return jnp.where((ids < 0)[:, None], 0, result).astype(y.dtype)


# ---- native kernels, on one device ----


def chunks(platform: str, edges: int, wave: int = WAVE) -> int:
    """The number of chunks of an order of `edges`, where `wave` thread blocks run at once.

    The number of edges may be a variable of `jax.export`.
    """
    if platform == "cpu":
        return min(CPU_CHUNKS, edges // CPU_CHUNK + 1) if isinstance(edges, int) else CPU_CHUNKS
    if not isinstance(edges, int):
        return edges // MOST_CHUNK + 1
    return min(edges // LEAST_CHUNK + 1, -(-edges // (MOST_CHUNK * wave)) * wave)


def _message_sum_native(
    platform: str, *args: Any, num_segments: int, drops_senders: bool, **_: Any
) -> jax.Array:
    senders, receivers, order, keys, *_order, table, weights = args
    shape = (num_segments, *table.shape[1:])
    if senders.size == 0 or 0 in shape:
        return jnp.zeros(shape, table.dtype)
    order, keys = known_order(order, keys, receivers, num_segments)
    sources, own = read(senders, drops_senders), weights if weights.ndim == 2 else None
    result: jax.Array = sum_of_rows(platform, table, own, sources, keys, order, num_segments)
    return result


def sum_of_rows(
    platform: str, table: Any, weights: Any, sources: Any, keys: Any, order: Any, segments: int
) -> Any:
    """Calls the kernel of message sums, see csrc/ffi/segments.h. Weights and order may be None."""
    heads, width = table.shape[1:]
    xp, wide = table.__array_namespace__(), compute_dtype(table.dtype)
    wave = WAVE if table.dtype.itemsize != 4 else WAVE * 4 // 3  # more blocks fit
    scratch = (chunks(platform, sources.size, wave), 2, heads * width)
    result, _ = _emit.ffi_call(
        "jof_message_sum",
        [
            jax.ShapeDtypeStruct((segments, heads, width), table.dtype),
            jax.ShapeDtypeStruct(scratch, wide),
        ],
        table,
        xp.zeros((0, heads), table.dtype) if weights is None else weights,
        *(sources, keys, xp.zeros(0, jnp.int32) if order is None else order),
    )
    return result


def _edge_dot_native(
    platform: str, *args: Any, dtype: Any, drops_senders: bool, **_: Any
) -> jax.Array:
    senders, receivers, order, keys, *_order, a, b = args
    shape = (senders.size, a.shape[1])
    if 0 in (*shape, *a.shape, *b.shape):
        return jnp.zeros(shape, dtype)
    if order.shape != senders.shape:
        order, keys = None, receivers
    result: jax.Array = dots_of_rows(a, b, keys, read(senders, drops_senders), order, dtype)
    return result


def dots_of_rows(a: Any, b: Any, keys: Any, b_ids: Any, order: Any, dtype: Any) -> Any:
    """Calls the kernel of edge dots, see csrc/ffi/segments.h. The order may be None."""
    order = a.__array_namespace__().zeros(0, jnp.int32) if order is None else order
    shape = jax.ShapeDtypeStruct((b_ids.size, a.shape[1]), dtype)
    (result,) = _emit.ffi_call("jof_edge_dot", [shape], a, b, keys, b_ids, order)
    return result


def _softmax_native(
    platform: str, ids: Any, order: Any, keys: Any, *arrays: Any, num_segments: int, **_: Any
) -> jax.Array:
    """The softmax of one array, or its derivative, which has two."""
    edges, heads = arrays[0].shape
    if 0 in (edges, heads, num_segments):
        return jnp.zeros_like(arrays[0])
    name, parts = ("", 2) if len(arrays) == 1 else ("_vjp", 1)
    shapes = (
        (num_segments, parts, heads),
        (chunks(platform, edges), 2, parts * heads),
    )
    wide = compute_dtype(arrays[0].dtype)
    call = jax.ffi.ffi_call(
        f"jof_segment_softmax{name}",
        (
            jax.ShapeDtypeStruct((edges, heads), arrays[0].dtype),
            *(jax.ShapeDtypeStruct(shape, wide) for shape in shapes),
        ),
    )
    result: jax.Array = call(*arrays, ids, keys, order)[0]
    return result


def keys_of(ids: Any, rows: int) -> Any:
    row = jnp.where(ids < 0, ids + rows, ids)
    return jnp.where((row >= 0) & (row < rows), 2 * row + jnp.where(ids < 0, 1, 0), 2 * rows)


def _order_reference(ids: Any, *, rows: int, **_: Any) -> list[jax.Array]:
    """Sorts keys along the last dimension: the original place of each, and the sorted keys."""
    keys, limit = keys_of(ids, rows), 2 * rows + 1
    places = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    # A radix sort takes one pass per byte.
    is_short = isinstance(limit, int) and limit <= 2**16
    keys = keys.astype(jnp.uint16 if is_short else jnp.uint32)
    keys, places = jax.lax.sort((keys, places), num_keys=1, is_stable=True)
    return [places, keys.astype(jnp.int32)]


def _order_native(platform: str, ids: Any, *, rows: int, **_: Any) -> list[jax.Array]:
    """Sorts all problems as one, with a separate range of keys for each."""
    problems, length = math.prod(ids.shape[:-1]), ids.shape[-1]
    limit = (2 * rows + 1) * problems
    if not isinstance(limit * length, int) or ids.size == 0 or limit > MOST:
        return _order_reference(ids, rows=rows)
    problem = jnp.arange(problems, dtype=jnp.int32)[:, None]
    keys = (keys_of(ids, rows).reshape(problems, length) + (2 * rows + 1) * problem).reshape(-1)
    keys, order = _scatter.sort_ids(platform, keys[None], limit, Indexing())
    of_problem = ((order, length), (keys.astype(jnp.int32), 2 * rows + 1))
    return [
        (x.reshape(problems, length) - size * problem).reshape(ids.shape) for x, size in of_problem
    ]


# ---- batching: problems are merged into one that has all edges and rows ----


class Problems:
    """Arrays of several problems. An array may be shared by all of them."""

    def __init__(self, function: str, args: Sequence[Any], dims: Sequence[int | None]) -> None:
        self.function = function
        self.size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        self.has_own = [d is not None for d in dims]
        self.args = [
            x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)
        ]
        self.edges = self.args[0].shape[-1]  # of each problem

    def every(self, k: int) -> Any:
        """An array with the problems as its first dimension."""
        x = self.args[k]
        return x if self.has_own[k] else jnp.broadcast_to(x, (self.size, *x.shape))

    def merged(self, x: Any) -> Any:
        """`x`, whose first dimension is the problems, with that merged into the second."""
        return _primitive.merged(self.function, x, (2, *(1,) * (x.ndim - 2)))

    def flat(self, k: int) -> Any:
        """An array of all problems' edges."""
        return self.merged(self.every(k))

    def table(self, k: int) -> Any:
        """A table of all problems' rows, or the one that they share."""
        return self.flat(k) if self.has_own[k] else self.args[k]

    def ids(self, k: int, rows: int) -> Any:
        """Ids into the merged rows of all problems, `rows` each; 0 if they share the rows.

        An id ``~row`` stays negative: it becomes ``~`` of the merged row.
        """
        ids = self.every(k)
        first = rows * jnp.arange(self.size, dtype=jnp.int32)[:, None]
        return self.merged(jnp.where(ids < 0, ~(~ids + first), ids + first))

    def order(self, k: int, rows: int) -> Order:
        """The merged order in arguments k and k + 1, for problems with `rows` rows each.

        It is unknown if problems share the rows: then the edges of a row are not neighbours.
        """
        if self.args[k].shape[self.has_own[k] :] != (self.edges,) or not rows:
            return no_order()
        return self.ids(k, self.edges), self.ids(k + 1, rows)

    def graph(self, senders: int, receivers: int) -> tuple[Any, ...]:
        """The merged graph of problems with this many rows each; 0 if they share the rows."""
        ids = self.ids(0, senders), self.ids(1, receivers)
        return *ids, *self.order(2, receivers), *self.order(4, senders)

    def result(self, x: Any, rows: int) -> tuple[Any, int]:
        """A result with `rows` rows for each problem."""
        shape = (self.size, rows, *x.shape[1:])
        return _primitive.split(x, shape, (2, *(1,) * (x.ndim - 1))), 0


def _order_batch(primitive: core.Primitive, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return primitive.bind(jnp.moveaxis(args[0], dims[0], 0), **params), (0, 0)


def _message_sum_batch(
    primitive: core.Primitive, args: Any, dims: Any, *, num_segments: int, **params: Any
) -> tuple[Any, int]:
    p = Problems(params["function"], args, dims)
    rows = p.args[6].shape[1] if p.has_own[6] else 0
    graph = p.graph(rows, num_segments)
    has_weights = p.args[7].ndim == 2 + p.has_own[7]
    weights = p.flat(7) if has_weights else no_weights(p.args[7].shape[-1], p.args[7].dtype)
    result = bind(
        *(primitive, *graph, p.table(6), weights), num_segments=p.size * num_segments, **params
    )
    return p.result(result, num_segments)


def _edge_dot_batch(
    primitive: core.Primitive, args: Any, dims: Any, **params: Any
) -> tuple[Any, int]:
    p = Problems(params["function"], args, dims)
    a_rows, b_rows = (p.args[k].shape[1] if p.has_own[k] else 0 for k in (6, 7))
    graph = p.graph(b_rows, a_rows)
    result = bind(primitive, *graph, p.table(6), p.table(7), **params)
    return p.result(result, p.edges)


def _softmax_batch(
    primitive: core.Primitive, args: Any, dims: Any, *, num_segments: int, **params: Any
) -> tuple[Any, int]:
    p = Problems(params["function"], args, dims)
    arrays = map(p.flat, range(3, len(args)))
    order = p.order(1, num_segments)
    result = bind(
        *(primitive, p.ids(0, num_segments), *order, *arrays),
        num_segments=p.size * num_segments,
        **params,
    )
    return p.result(result, p.edges)


# ---- the primitives and their derivatives ----


def _function(*, function: str, **_: Any) -> str:
    return function


order_p = _primitive.define(
    "jof_segment_order",
    function=_function,
    abstract_eval=_order_type,
    reference=_order_reference,
    native=_order_native,
    sharding_rule=lambda ids, **_: _primitive.ShardingRule(
        [[f"i{k}" for k in range(len(ids.shape))]],
        [[f"i{k}" for k in range(len(ids.shape))]] * 2,
        frozenset({f"i{len(ids.shape) - 1}"}),
    ),
    batch=_order_batch,
    multiple_results=True,
)
message_sum_p = _primitive.define(
    "jof_message_sum",
    function=_function,
    abstract_eval=_message_sum_type,
    reference=_message_sum_reference,
    native=_message_sum_native,
    sharding_rule=rule(("nhd", "eh"), "shd", free="hde"),
    batch=_message_sum_batch,
)
edge_dot_p = _primitive.define(
    "jof_edge_dot",
    function=_function,
    abstract_eval=_edge_dot_type,
    reference=_edge_dot_reference,
    native=_edge_dot_native,
    sharding_rule=rule(("shd", "nhd"), "eh", free="hde"),
    batch=_edge_dot_batch,
)
softmax_p = _primitive.define(
    "jof_segment_softmax",
    function=_function,
    abstract_eval=_softmax_type,
    reference=_softmax_reference,
    native=_softmax_native,
    sharding_rule=rule(("eh",), "eh"),
    batch=_softmax_batch,
)
softmax_vjp_p = _primitive.define(
    "jof_segment_softmax_vjp",
    function=_function,
    abstract_eval=_softmax_type,
    reference=_softmax_vjp_reference,
    native=_softmax_native,
    sharding_rule=rule(("eh", "eh"), "eh"),
    batch=_softmax_batch,
)


def _bilinear_jvp(primitive: core.Primitive) -> Callable[..., Any]:
    """The JVP of a primitive that is linear in either of its last two operands."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        *graph, x, y = primals
        of_x, of_y = tangents[-2:]
        result = bind(primitive, *primals, **params)
        terms = []
        if not isinstance(of_x, ad.Zero):
            terms.append(bind(primitive, *graph, of_x, y, **params))
        no_weights = primitive is message_sum_p and y.ndim != 2
        if not isinstance(of_y, ad.Zero) and not no_weights:
            terms.append(bind(primitive, *graph, x, of_y, **params))
        return result, _primitive.total(terms, result)

    return jvp


def _message_sum_transpose(ct: Any, *args: Any, num_segments: int, **params: Any) -> list[Any]:
    *graph, table, weights = args
    cts: list[Any] = [None] * 8
    if ad.is_undefined_primal(table):
        rows = {**params, "num_segments": table.aval.shape[0], "drops_senders": True}
        cts[6] = message_sum(Graph(*graph).reversed(), ct, weights, **rows)
    if ad.is_undefined_primal(weights):
        cts[7] = bind(edge_dot_p, *graph, ct, table, dtype=weights.aval.dtype, **params)
    return cts


def _edge_dot_transpose(
    ct: Any, *args: Any, dtype: Any, drops_senders: bool, **params: Any
) -> list[Any]:
    *graph, a, b = args
    cts: list[Any] = [None] * 8
    ways = (6, a, b, graph, drops_senders), (7, b, a, Graph(*graph).reversed(), True)
    for k, undefined, other, edges, drops in ways:
        if ad.is_undefined_primal(undefined):
            rows = {**params, "num_segments": undefined.aval.shape[0], "drops_senders": drops}
            cts[k] = message_sum(edges, other, ct, **rows)
    return cts


_primitive.define_derivatives(
    message_sum_p, jvp=_bilinear_jvp(message_sum_p), transpose=_message_sum_transpose
)
_primitive.define_derivatives(
    edge_dot_p, jvp=_bilinear_jvp(edge_dot_p), transpose=_edge_dot_transpose
)


def _softmax_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    *graph, _ = primals
    y = bind(softmax_p, *primals, **params)
    if isinstance(tangents[3], ad.Zero):
        return y, _primitive.total([], y)
    return y, bind(softmax_vjp_p, *graph, y, tangents[3], **params)


def _softmax_vjp_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, num_segments: int, **others: Any
) -> Any:
    """The JVP of ``y t - y s``, where s is the segment's sum of ``y t``.

    It consists of sums and products over a graph in which each edge has its own sender row.
    """
    ids, order, keys, y, t = primals
    of_y, of_t = tangents[3:]
    params: dict[str, Any] = {"num_segments": num_segments, **others}
    result = bind(softmax_vjp_p, *primals, **params)
    terms = []
    if not isinstance(of_t, ad.Zero):
        terms.append(bind(softmax_vjp_p, ids, order, keys, y, of_t, **params))
    if not isinstance(of_y, ad.Zero):
        edges = jnp.arange(ids.shape[0], dtype=jnp.int32)
        graph = (edges, ids, order, keys, edges, edges)

        def times_sum(x: Any, of: Any) -> Any:
            total = message_sum(graph, t[..., None], of, **params)
            args = (*graph, total, x[..., None])
            return bind(edge_dot_p, *args, dtype=x.dtype, drops_senders=False, **others)

        terms.append(of_y * t - times_sum(of_y, y) - times_sum(y, of_y))
    return result, _primitive.total(terms, result)


def _softmax_vjp_transpose(ct: Any, *args: Any, **params: Any) -> list[Any]:
    """The transpose with respect to the tangent: the derivative of a softmax is symmetric."""
    *graph, y, _ = args
    return [None] * 4 + [bind(softmax_vjp_p, *graph, y, ct, **params)]


ad.primitive_jvps[softmax_p] = _softmax_jvp
_primitive.define_derivatives(softmax_vjp_p, jvp=_softmax_vjp_jvp, transpose=_softmax_vjp_transpose)
