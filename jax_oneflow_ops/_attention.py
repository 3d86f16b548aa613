"""The primitives of attention over edges, and their rules.

jof_attention returns the sums at the receivers of values (N, H, D), weighted by a softmax of logits
(E, H), and two statistics of each receiver and head: a reference logit, which is the maximum (on
GPUs the maximum may exceed it by up to 4), and the inverse of the sum of exponentials relative to
it. Logits have the dtype of values, or the dtype that values
are computed in. Weights are recomputed from the statistics wherever they are needed. Its JVP is
jof_attention_tangent, which is linear in the tangents of logits and values. The transposes of the
JVP are jof_attention_logits and jof_attention_values, one kernel each, and jof_attention_gradient,
which computes both. On GPUs it is a single kernel for the head sizes that `PACK_BYTES` allows.

To differentiate these four, the same functions are composed of messages, which are closed under
differentiation. There, the statistics and results that kernels pass to each other are functions of
logits and values, so they have no tangents of their own.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_oneflow_ops import _checks, _compat, _graph, _messages, _primitive
from jax_oneflow_ops._primitive import bind

GRAPH = _messages.GRAPH
FUNCTION = "attention_sum"


# ---- types ----


def _attention_type(*args: Any, num_segments: int) -> list[Any]:
    logits, values = args[GRAPH:]
    _, heads, width = values.sharding.spec
    heads = _graph.joined(heads, logits.sharding.spec[1])
    wide = _graph.compute_dtype(values.dtype)
    shape = num_segments, *values.shape[1:]
    result = _compat.with_spec(values, shape, (None, heads, width)).update(weak_type=False)
    stats = _compat.with_spec(values, (*shape[:2], 2), (None, heads, None))
    return [result, stats.update(dtype=wide, weak_type=False)]


def _tangent_type(*args: Any, **_: Any) -> Any:
    return args[GRAPH + 3].update(weak_type=False)


def _logits_type(*args: Any, **_: Any) -> Any:
    return args[GRAPH].update(weak_type=False)


def _gradient_type(*args: Any, **_: Any) -> list[Any]:
    return [x.update(weak_type=False) for x in args[GRAPH : GRAPH + 2]]


def _values_type(*args: Any, rows: int, **_: Any) -> Any:
    ct = args[-1]
    return _compat.with_spec(ct, (rows, *ct.shape[1:]), ct.sharding.spec).update(weak_type=False)


# ---- references in jnp ----


def _attention_reference(*args: Any, num_segments: int) -> list[jax.Array]:
    senders, receivers, *_orders, logits, values = args
    wide = logits.astype(_graph.compute_dtype(values.dtype))
    to = jnp.where(receivers < 0, num_segments, receivers)
    start = jnp.full((num_segments, wide.shape[1]), -jnp.inf, wide.dtype)
    most = start.at[to].max(wide, mode="drop")
    terms = jnp.exp(wide - _graph.rows_of(most, receivers))
    total = _graph.sums_of(terms, receivers, num_segments)
    stats = jnp.stack([most, 1 / total], -1)
    rows = _graph.rows_of(values, _graph.read(senders, False))
    weighted = rows * _weights(wide, stats, receivers)[..., None]
    result = _graph.sums_of(weighted, receivers, num_segments)
    return [result.astype(values.dtype), stats]


def _weights(logits: Any, stats: Any, receivers: Any) -> Any:
    of_edges = _graph.rows_of(stats, receivers)
    return jnp.exp(logits.astype(stats.dtype) - of_edges[..., 0]) * of_edges[..., 1]


def _logits_reference(*args: Any, **_: Any) -> jax.Array:
    senders, receivers, *_orders, logits, values, stats, result, ct = args
    moved = _graph.rows_of(values, _graph.read(senders, False)) - _graph.rows_of(result, receivers)
    dots = jnp.sum(_graph.rows_of(ct, receivers) * moved, axis=-1)
    weighted = _weights(logits, stats, receivers) * dots
    return jnp.where((receivers < 0)[:, None], 0, weighted).astype(logits.dtype)


def _values_reference(*args: Any, rows: int, **_: Any) -> jax.Array:
    senders, receivers, *_orders, logits, stats, ct = args
    weighted = _graph.rows_of(ct, receivers) * _weights(logits, stats, receivers)[..., None]
    weighted = jnp.where((receivers < 0)[:, None, None], 0, weighted)
    result: jax.Array = _graph.sums_of(weighted, senders, rows).astype(ct.dtype)
    return result


def _gradient_reference(*args: Any, **params: Any) -> list[jax.Array]:
    of_values = _of_values(*args)
    rows = args[GRAPH + 1].shape[0]
    return [_logits_reference(*args), _values_reference(*of_values, rows=rows, **params)]


def _of_values(*args: Any) -> list[Any]:
    """The operands of jof_attention_values, taken from those of jof_attention_gradient."""
    *graph, logits, _values, stats, _result, ct = args
    return [*graph, logits, stats, ct]


# ---- native kernels, on one device ----


def _attention_native(platform: str, *args: Any, num_segments: int) -> list[jax.Array]:
    senders, receivers, order, keys, *_order, logits, values = args
    heads, width = values.shape[1:]
    wide = _graph.compute_dtype(values.dtype)
    shape, of_stats = (num_segments, heads, width), (num_segments, heads, 2)
    if senders.size == 0 or 0 in shape:
        return [jnp.zeros(shape, values.dtype), jnp.zeros(of_stats, wide)]
    order, keys = _graph.known_order(order, keys, receivers, num_segments)
    scratch = (_graph.chunks(platform, senders.size), 2, heads * width + 2 * heads)
    call = jax.ffi.ffi_call(
        "jof_attention",
        [
            jax.ShapeDtypeStruct(shape, values.dtype),
            jax.ShapeDtypeStruct(of_stats, wide),
            jax.ShapeDtypeStruct(scratch, wide),
        ],
    )
    return [*call(values, logits, _graph.read(senders, False), keys, order)][:2]


def _logits_native(platform: str, *args: Any, **_: Any) -> jax.Array:
    senders, receivers, order, keys, *_order, logits, values, stats, result, ct = args
    if 0 in (*logits.shape, *values.shape, *result.shape):
        return jnp.zeros_like(logits)
    if order.shape != senders.shape:
        order, keys = jnp.zeros(0, jnp.int32), receivers
    call = jax.ffi.ffi_call(
        "jof_attention_logits", jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    )
    sources = _graph.read(senders, False)
    of_logits: jax.Array = call(values, logits, stats, result, ct, sources, keys, order)
    return of_logits


def _values_native(platform: str, *args: Any, rows: int, **_: Any) -> jax.Array:
    senders, receivers, _, _, order, keys, logits, stats, ct = args
    heads, width = ct.shape[1:]
    shape = (rows, heads, width)
    if 0 in (senders.size, ct.shape[0], *shape):
        return jnp.zeros(shape, ct.dtype)
    order, keys = _graph.known_order(order, keys, senders, rows)
    scratch = (_graph.chunks(platform, senders.size), 2, heads * width)
    call = jax.ffi.ffi_call(
        "jof_attention_values",
        [jax.ShapeDtypeStruct(shape, ct.dtype), jax.ShapeDtypeStruct(scratch, stats.dtype)],
    )
    result: jax.Array = call(ct, logits, stats, receivers, keys, order)[0]
    return result


# One kernel computes both gradients if the number of packs of this size in a head is a power of
# two, at most one pack per lane of a warp.
PACK_BYTES = 32


def _gradient_native(platform: str, *args: Any, **params: Any) -> list[jax.Array]:
    senders, receivers, *_order, order, keys, logits, values, stats, result, ct = args
    rows, _, width = values.shape
    is_one_kernel = False
    if platform != "cpu" and isinstance(width, int):
        packs, rest = divmod(width * values.dtype.itemsize, PACK_BYTES)
        is_one_kernel = rest == 0 and packs in (1, 2, 4, 8, 16, 32)
    if not is_one_kernel or 0 in (*logits.shape, *values.shape, *result.shape):
        of_values = _values_native(platform, *_of_values(*args), rows=rows, **params)
        return [_logits_native(platform, *args, **params), of_values]
    order, keys = _graph.known_order(order, keys, senders, rows)
    dots = jnp.sum(ct.astype(stats.dtype) * result.astype(stats.dtype), axis=-1)
    chunks = _graph.chunks(platform, senders.size, _graph.WAVE * 2 // 3)
    call = jax.ffi.ffi_call(
        "jof_attention_gradient",
        [
            jax.ShapeDtypeStruct(values.shape, ct.dtype),
            jax.ShapeDtypeStruct((chunks, 2, math.prod(ct.shape[1:])), stats.dtype),
            jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        ],
    )
    reads = _graph.read(senders, False)
    of_values, _, of_logits = call(ct, logits, stats, receivers, keys, order, values, dots, reads)
    return [of_logits, of_values]


def _attention_on_shard(
    call: Callable[..., Any], shard: _primitive.Shard, *args: Any, **params: Any
) -> list[jax.Array]:
    """Rescales the sums of shards of edges to a common maximum, then adds them up."""
    result, stats = call(*args, **params)
    if not shard.summed:
        return [result, stats]
    most, inverse = stats[..., 0], stats[..., 1]
    has_edges = inverse != 0
    most = jnp.where(has_edges, most, jnp.finfo(most.dtype).min)
    highest = jax.lax.pmax(most, shard.summed)
    scale = jnp.where(has_edges, jnp.exp(most - highest) / inverse, 0)
    parts = jnp.where(scale == 0, 0, scale)[..., None] * result.astype(scale.dtype)
    parts = jnp.where((scale == 0)[..., None], 0, parts)
    # One all-reduce sums the parts, the weights, and the number of devices that have edges.
    of_heads = jnp.stack([scale, has_edges.astype(scale.dtype)], -1)
    sums = jax.lax.psum(jnp.concatenate([parts, of_heads], -1), shard.summed)
    total, count = sums[..., -2], sums[..., -1]
    inverse = jnp.where(count > 0, 1 / total, 0)
    result = jnp.where(count[..., None] > 0, sums[..., :-2] / total[..., None], 0)
    highest = jnp.where(count > 0, highest, 0)
    return [result.astype(args[-1].dtype), jnp.stack([highest, inverse], -1)]


# For each result, whether it has a row for each segment, edge or row of the values.
_ROWS_OF_RESULTS = {
    "jof_attention": "ss",
    "jof_attention_logits": "e",
    "jof_attention_values": "n",
    "jof_attention_gradient": "en",
}


# ---- batching: problems become heads if they share the graph; else their graphs are merged ----


def _batch(
    primitive: core.Primitive, args: Any, dims: Any, *, num_segments: int, **params: Any
) -> tuple[Any, Any]:
    if all(d is None for d in dims[:GRAPH]):
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        own = [*zip(args[GRAPH:], dims[GRAPH:], strict=True)]

        def joined(x: Any, d: int | None) -> Any:
            first, heads, *rest = (n for k, n in enumerate(x.shape) if k != d)
            x = jnp.expand_dims(x, 1) if d is None else jnp.moveaxis(x, d, 1)
            x = jnp.broadcast_to(x, (first, size, heads, *rest))
            return _primitive.merged(FUNCTION, x, (1, 2, *(1 for _ in rest)))

        # All operands have the same heads.
        (heads,) = {[n for k, n in enumerate(x.shape) if k != d][1] for x, d in own}

        def split(x: Any) -> Any:
            first, _, *rest = x.shape
            shape = (first, size, heads, *rest)
            return _primitive.split(x, shape, (1, 2, *(1 for _ in rest)))

        operands = [joined(*each) for each in own]
        result = bind(*(primitive, *args[:GRAPH], *operands), num_segments=num_segments, **params)
        axes = [1] * len(result) if primitive.multiple_results else 1
        return jax.tree.map(split, result), axes
    p = _graph.Problems(FUNCTION, args, dims)
    rows = params["rows"] if "rows" in params else p.every(GRAPH + 1).shape[1]
    if "rows" in params:
        params["rows"] = p.size * rows
    operands = [*p.graph(rows, num_segments), *map(p.flat, range(GRAPH, len(args)))]
    result = bind(primitive, *operands, num_segments=p.size * num_segments, **params)
    sizes = {"s": num_segments, "e": p.edges, "n": rows}
    of = [sizes[kind] for kind in _ROWS_OF_RESULTS[primitive.name]]
    if primitive.multiple_results:
        found = [p.result(*each)[0] for each in zip(result, of, strict=True)]
        return found, [0] * len(found)
    return p.result(result, *of)


# ---- the primitives ----


attention_p = _primitive.define(
    "jof_attention",
    function=FUNCTION,
    abstract_eval=_attention_type,
    reference=_attention_reference,
    native=_attention_native,
    sharding_rule=_graph.rule(("eh", "nhd"), "shd", "shp", free="hde"),
    on_shard=_attention_on_shard,
    batch=_batch,
    multiple_results=True,
)
logits_p = _primitive.define(
    "jof_attention_logits",
    function=FUNCTION,
    abstract_eval=_logits_type,
    reference=_logits_reference,
    native=_logits_native,
    sharding_rule=_graph.rule(("eh", "nhd", "shp", "shd", "shd"), "eh", free="hde"),
    batch=_batch,
)
values_p = _primitive.define(
    "jof_attention_values",
    function=FUNCTION,
    abstract_eval=_values_type,
    reference=_values_reference,
    native=_values_native,
    sharding_rule=_graph.rule(("eh", "shp", "shd"), "nhd", free="hde"),
    batch=_batch,
)
gradient_p = _primitive.define(
    "jof_attention_gradient",
    function=FUNCTION,
    abstract_eval=_gradient_type,
    reference=_gradient_reference,
    native=_gradient_native,
    sharding_rule=_graph.rule(("eh", "nhd", "shp", "shd", "shd"), "eh", "nhd", free="hde"),
    on_shard=_primitive.sum_each,
    batch=_batch,
    multiple_results=True,
)
tangent_p = core.Primitive("jof_attention_tangent")


@_checks.in_own_precision
def _tangent(*args: Any, num_segments: int, implementation: str | None) -> Any:
    """Computes the primitive by messages."""
    *graph, logits, values, _stats, _result, of_logits, of_values = args
    composed = functools.partial(_composed, (num_segments, implementation), graph)
    return jax.jvp(composed, (logits, values), (of_logits, of_values))[1]


def _lower_tangent(ctx: Any, *args: Any, **params: Any) -> Any:
    results = mlir.lower_fun(_tangent, False)(_compat.with_current_mesh(ctx), *args, **params)
    return _compat.with_shardings_of_types(ctx, results)


def _tangent_batch(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    return jax.vmap(functools.partial(_tangent, **params), (*dims,))(*args), 0


tangent_p.def_abstract_eval(_tangent_type)
tangent_p.def_impl(functools.partial(_compat.apply_primitive, tangent_p))
_compat.require_devices_during_lowering(tangent_p)
mlir.register_lowering(tangent_p, _lower_tangent)
batching.primitive_batchers[tangent_p] = _tangent_batch


# ---- derivatives ----


def _instantiated(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    return [
        jnp.zeros_like(x) if isinstance(t, ad.Zero) else t
        for x, t in zip(primals, tangents, strict=True)
    ]


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    result, stats = bind(attention_p, *primals, **params)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (result, stats)]
    if all(isinstance(t, ad.Zero) for t in tangents[GRAPH:]):
        return [result, stats], zeros
    moves = _instantiated(primals[GRAPH:], tangents[GRAPH:])
    tangent = bind(tangent_p, *primals, stats, result, *moves, **params)
    return [result, stats], [tangent, zeros[1]]


def _tangent_transpose(ct: Any, *args: Any, **params: Any) -> list[Any]:
    *graph, logits, values, stats, result, of_logits, of_values = args
    cts: list[Any] = [None] * (GRAPH + 4)
    if ad.is_undefined_primal(of_logits) and ad.is_undefined_primal(of_values):
        operands = (*graph, logits, values, stats, result, ct)
        return [*cts, *bind(gradient_p, *operands, **params)]
    kernels: tuple[Any, ...] = (
        (of_logits, logits_p, (logits, values, stats, result, ct), {}),
        (of_values, values_p, (logits, stats, ct), {"rows": values.shape[0]}),
    )
    for undefined, primitive, operands, more in kernels:
        is_wanted = ad.is_undefined_primal(undefined)
        cts.append(bind(primitive, *graph, *operands, **more, **params) if is_wanted else None)
    return cts


def _logits_transpose(ct: Any, *args: Any, **params: Any) -> list[Any]:
    *known, _ = args
    values = known[GRAPH + 1]
    result = bind(tangent_p, *known, ct, jnp.zeros_like(values), **params)
    return [None] * len(known) + [result]


def _gradient_transpose(cts: Any, *args: Any, **params: Any) -> list[Any]:
    *known, _ = args
    of_logits, of_values = _instantiated(known[GRAPH : GRAPH + 2], cts)
    result = bind(tangent_p, *known, of_logits, of_values, **params)
    return [None] * len(known) + [result]


def _values_transpose(ct: Any, *args: Any, rows: int, **params: Any) -> list[Any]:
    *graph, logits, stats, of_result = args
    result = jnp.zeros(of_result.aval.shape, ct.dtype)
    known = *graph, logits, jnp.zeros_like(ct), stats, result
    moved = bind(tangent_p, *known, jnp.zeros_like(logits), ct, **params)
    return [None] * (GRAPH + 2) + [moved]


def _jvp_of_composed(
    primitive: core.Primitive, variables: Sequence[int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The JVP of a primitive that computes `function(composed, rows, *variables)`.

    `composed` is attention as a function of logits and values. `rows` is the parameter, if any.
    """

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, num_segments: int, **params: Any
    ) -> Any:
        result = bind(primitive, *primals, num_segments=num_segments, **params)
        arrays = [primals[GRAPH + k] for k in variables]
        moves = [tangents[GRAPH + k] for k in variables]
        if all(isinstance(t, ad.Zero) for t in moves):
            return result, jax.tree.map(functools.partial(_primitive.total, []), result)
        how = num_segments, params["implementation"]
        composed = functools.partial(_composed, how, primals[:GRAPH])
        of = functools.partial(function, composed, params.get("rows"))
        return result, jax.jvp(of, arrays, _instantiated(arrays, moves))[1]

    return jvp


def _tangent_of(composed: Callable[..., Any], _: Any, *args: Any) -> Any:
    return jax.jvp(composed, args[:2], args[2:])[1]


def _logits_of(composed: Callable[..., Any], _: Any, logits: Any, values: Any, ct: Any) -> Any:
    return jax.vjp(lambda x: composed(x, values), logits)[1](ct)[0]


def _gradient_of(composed: Callable[..., Any], _: Any, *args: Any) -> list[Any]:
    logits, values, ct = args
    return [*jax.vjp(composed, logits, values)[1](ct)]


def _values_of(composed: Callable[..., Any], rows: Any, logits: Any, ct: Any) -> Any:
    values = jnp.zeros((rows, *ct.shape[1:]), ct.dtype)
    # In a shard_map, JAX would sum their gradient over the devices, as if they were equal on all.
    values, *_ = _compat.join_varying_axes(values, logits, ct)
    return jax.vjp(lambda x: composed(logits, x), values)[1](ct)[0]


def _attention_transpose(
    cts: Any, *args: Any, num_segments: int, implementation: str | None
) -> list[Any]:
    """The transpose with respect to values, in which the sums are linear."""
    *graph, logits, values = args
    ct, _ = cts
    if isinstance(ct, ad.Zero):
        return [None] * (GRAPH + 1) + [ad.Zero(values.aval)]
    composed = functools.partial(_composed, (num_segments, implementation), graph)
    of_values = _values_of(composed, values.aval.shape[0], logits, ct)
    return [None] * (GRAPH + 1) + [of_values]


_primitive.define_derivatives(attention_p, jvp=_attention_jvp, transpose=_attention_transpose)
for _p, _variables, _function, _transpose in (
    (tangent_p, (0, 1, 4, 5), _tangent_of, _tangent_transpose),
    (logits_p, (0, 1, 4), _logits_of, _logits_transpose),
    (gradient_p, (0, 1, 4), _gradient_of, _gradient_transpose),
    (values_p, (0, 2), _values_of, _values_transpose),
):
    _primitive.define_derivatives(
        _p, jvp=_jvp_of_composed(_p, _variables, _function), transpose=_transpose
    )


# ---- the same, composed of messages ----

How = tuple[int, str | None]  # the number of segments, and the implementation


def _composed(how: How, graph: Sequence[Any], logits: Any, values: Any) -> jax.Array:
    logits = logits[..., None]
    stats = _of_softmax(how, logits, values.dtype, graph)
    return _attention(how, logits, values, *stats, *graph)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(
    how: How, logits: Any, values: Any, most: Any, inverse: Any, *graph: Any
) -> jax.Array:
    """The weighted sums, given the maxima and the inverse sums of exponentials."""
    return _of_weights(how, logits, values, most, inverse, graph, values.dtype)


def _of_weights(
    how: How,
    logits: Any,
    values: Any,
    most: Any,
    inverse: Any,
    graph: Sequence[Any],
    dtype: Any,
) -> jax.Array:
    def message(v: Any, most: Any, inverse: Any, x: Any) -> Any:
        weight = _weight(x, most, inverse)
        return (weight * v.astype(weight.dtype)).astype(dtype)

    arrays = values, most, inverse, logits
    result: jax.Array = _attention_sum(how, message, arrays, "srre", graph)
    return result


@_attention.defjvp
def _(how: How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Sums ``weight * (tangent of logit * (value - result) + tangent of value)`` over the edges.

    All other edges enter through the result, so the cotangent of a logit needs no sum over them.
    """
    logits, values, most, inverse, *graph = primals
    of_logits, of_values = tangents[:2]
    # Not rounded, as it is subtracted from values that may be close to it.
    wide = _graph.compute_dtype(values.dtype)
    result = _of_weights(how, logits, values, most, inverse, graph, wide)

    def message(v: Any, of_v: Any, y: Any, most: Any, inverse: Any, x: Any, of_x: Any) -> Any:
        moved = of_x.astype(y.dtype) * (v.astype(y.dtype) - y) + of_v.astype(y.dtype)
        return (_weight(x, most, inverse) * moved).astype(v.dtype)

    arrays = values, of_values, result, most, inverse, logits, of_logits
    return result.astype(values.dtype), _attention_sum(how, message, arrays, "ssrrree", graph)


def _weight(x: Any, most: Any, inverse: Any) -> Any:
    return jnp.exp(x.astype(inverse.dtype) - most.astype(inverse.dtype)) * inverse


def _of_softmax(how: How, logits: Any, dtype: Any, graph: Sequence[Any]) -> tuple[Any, Any]:
    """The maximum of each receiver, and the inverse of its sum of exponentials."""
    wide = _checks.promoted(logits.dtype, _graph.compute_dtype(dtype))
    still = jax.lax.stop_gradient(logits)
    most = _attention_sum(how, lambda x: x, (still,), "e", graph, "max")

    def term(most: Any, x: Any) -> Any:
        return jnp.exp(x.astype(wide) - most.astype(wide))

    total = _attention_sum(how, term, (most, logits), "re", graph)
    return most, 1 / jnp.where(total == 0, 1, total)


def _attention_sum(
    how: How,
    fun: Callable[..., Any],
    arrays: Sequence[Any],
    sides: str,
    graph: Sequence[Any],
    reduction: str = "sum",
) -> Any:
    size, implementation = how
    messages = _messages.traced(FUNCTION, fun, arrays, sides, graph[0].shape[0])
    assert messages is not None
    return _messages.reduced(
        *(graph, messages, reduction),
        num_segments=size,
        function=FUNCTION,
        implementation=implementation,
        math="full",
    )
