"""The primitive of messages, and its rules.

One primitive, jof_messages, reads rows at both ends of each edge and computes a traced function of
them. It reduces the results at the senders ("s") or at the receivers ("r"), or returns one result
per edge ("e"). An operand is a table that is read at the senders or at the receivers, an array with
one row per edge, or a single row for all edges ("c"). After its first dimension an operand has the
dimensions of a message, with size 1 where it is broadcast. A graph is the six arrays of `_graph`.

The JVP of a sum is the sum of the function's JVP. The transpose of a sum with respect to a table is
a sum at those ends of the edges where the table is read. With respect to an array of edges it is
one result per edge. Both are the same primitive again. The derivative of a maximum is that of jax:
edges that attain the maximum share it.
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

from jax_oneflow_ops import _compat, _graph, _operands, _primitive
from jax_oneflow_ops._codegen import cache, derive, edges, scalars
from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.rounding import rounded
from jax_oneflow_ops._codegen.signature import is_narrow
from jax_oneflow_ops._codegen.traced import FusionError, trace

GRAPH = 6  # the number of arrays in a graph
MOST_OPERANDS = 16


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one call computes.

    Attributes:
      definition: the function of the elements that an edge reads. It has one output.
      inputs: for each operand, the number of the definition's input that it supplies; -1 for an
        operand of zeros that only supplies dimensions that the other operands lack.
      sides: where each operand is read, one letter of "srec" each.
      target: where the results are, one letter of "sre".
      drops_senders: whether edges whose sender is out of range are ignored. Edges whose receiver
        is out of range always are.
      kept: for each dimension of a message, whether results have it. Other dimensions are summed.
      reduction: "sum" or "max".
      math: see `edges.Kernel`.
    """

    definition: Definition
    inputs: tuple[int, ...]
    sides: str
    target: str
    drops_senders: bool
    kept: tuple[bool, ...]
    reduction: str = "sum"
    math: str = "narrow"

    def __str__(self) -> str:  # in printed jaxprs
        return f"{self.reduction} of {self.definition.name} at {self.target}"

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.definition.outputs[0].type)


def bind(
    graph: Sequence[Any],
    operands: dict[int, Any],
    row: Sequence[Any],
    spec: Spec,
    *,
    num_segments: int,
    function: str,
    implementation: str | None,
) -> Any:
    """Binds the primitive with only those operands that the definition uses.

    Args:
      graph: the six arrays of a `Graph`.
      operands: inputs of the definition, by number.
      row: the dimensions of a message.
      spec: the call. Its `sides` are those of all `operands`, in the same order; its `inputs` are
        ignored.
      num_segments: the number of rows of a result at senders or receivers.
      function: the public function's name.
      implementation: the parameter that every primitive has.
    """
    sides = dict(zip(operands, spec.sides, strict=True))
    read = [k for k in operands if k in spec.definition.uses]
    arrays = [operands[k] for k in read]
    found = "".join(sides[k] for k in read)
    inputs = tuple(read)
    if not arrays or _row_of(arrays) != tuple(row):
        arrays.append(jnp.zeros((1, *row), jnp.int8))
        found, inputs = f"{found}c", (*inputs, -1)
    if len(arrays) > MOST_OPERANDS:
        implementation = "xla"
    spec = dataclasses.replace(spec, sides=found, inputs=inputs)
    return _primitive.bind(
        *(messages_p, *graph, *arrays),
        spec=spec,
        num_segments=num_segments,
        function=function,
        implementation=implementation,
    )


def _row_of(operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.broadcast_shapes(*(x.shape[1:] for x in operands))) if operands else ()


def _type(*avals: Any, spec: Spec, num_segments: int, **_: Any) -> Any:
    senders, operands = avals[0], avals[GRAPH:]
    row = _row_of(operands)
    entries = [
        _graph.joined(*(x.sharding.spec[d + 1] for x in operands if x.shape[d + 1] == n))
        for d, n in enumerate(row)
    ]
    rows = senders.shape[0] if spec.target == "e" else num_segments
    shape = (rows, *(n if kept else 1 for n, kept in zip(row, spec.kept, strict=True)))
    entries = [e if kept else None for e, kept in zip(entries, spec.kept, strict=True)]
    first = senders.sharding.spec[0] if spec.target == "e" else None
    first = _graph.beside(first, entries)
    return _compat.with_spec(operands[0], shape, (first, *entries)).update(
        dtype=spec.dtype, weak_type=False
    )


def _sharding_rule(*avals: Any, spec: Spec, **_: Any) -> _primitive.ShardingRule:
    """Feature dimensions may be sharded if results have them, and edges if the reduction is a sum.

    The sums of the shards are then all-reduced. Each device sorts its own shard of edges, as an
    order of all edges does not apply to it.
    """
    operands = avals[GRAPH:]
    row = _row_of(operands)
    whole = set()

    def names(k: int, shape: Sequence[Any], side: str) -> list[str]:
        first = {"e": "e", "s": "s", "r": "r"}.get(side, f"one{k}")
        own = [f"d{d}" if n == row[d] else f"one{k}_{d}" for d, n in enumerate(shape[1:])]
        whole.update({first} - {"e"})
        return [first, *own]

    sides = [
        names(k, x.shape, side)
        for k, (x, side) in enumerate(zip(operands, spec.sides, strict=True))
    ]
    result = [
        spec.target,
        *(f"d{d}" if kept else f"sum{d}" for d, kept in enumerate(spec.kept)),
    ]
    whole.update({spec.target} - {"e"})
    whole.update(f"sum{d}" for d, kept in enumerate(spec.kept) if not kept)
    orders = [[f"i{k}_{d}" for d in range(len(avals[k].shape))] for k in range(GRAPH - 4, GRAPH)]
    unread = frozenset(name for names in orders for name in names)
    whole.update(unread)
    if spec.reduction != "sum":
        whole.add("e")
    ids = [["e"], ["e"], *orders]
    return _primitive.ShardingRule([*ids, *sides], [result], frozenset(whole), unread={"e": unread})


# ---- implementations ----


def _reference(*args: Any, spec: Spec, num_segments: int, **_: Any) -> jax.Array:
    senders, receivers, operands = args[0], args[1], args[GRAPH:]
    row = _row_of(operands)
    definition: Any = spec.definition
    count = senders.shape[0]
    reads = _graph.read(senders, False)
    is_dropped = receivers < 0
    if spec.drops_senders:
        is_dropped |= senders < 0
    given: dict[int, Any] = {}
    for k, side, x in zip(spec.inputs, spec.sides, operands, strict=True):
        ids = {"s": reads, "r": jnp.maximum(receivers, 0)}.get(side)
        x = x.astype(jnp.float32) if is_narrow(str(x.dtype)) else x
        given[k] = x if ids is None else x[ids] if x.shape[0] else x[:0]
    every = [given.get(i, jnp.zeros((), p.type)) for i, p in enumerate(definition.inputs)]
    every = [x.astype(jnp.float32) if is_narrow(str(x.dtype)) else x for x in every]
    results = definition.body(*every)[0]
    wide = _graph.compute_dtype(spec.dtype)
    messages = jnp.broadcast_to(results.astype(wide), (count, *row))
    if spec.target == "e":
        axes = tuple(d + 1 for d, kept in enumerate(spec.kept) if not kept)
        messages = jnp.where(is_dropped.reshape(-1, *(1,) * len(row)), 0, messages)
        return jnp.sum(messages, axes, keepdims=True).astype(spec.dtype)
    to = jnp.where(is_dropped, num_segments, reads if spec.target == "s" else receivers)
    at = jnp.full((num_segments, *row), identity(spec.reduction), wide).at[to]
    reduced = at.add if spec.reduction == "sum" else at.max
    return jnp.asarray(reduced(messages, mode="drop")).astype(spec.dtype)


def identity(reduction: str) -> float:
    """The value of a segment without edges."""
    return 0.0 if reduction == "sum" else -np.inf


def _native_call(
    platform: str, *args: Any, spec: Spec, num_segments: int, function: str
) -> jax.Array:
    row = _row_of(args[GRAPH:])
    count = args[0].shape[0]
    shape = tuple(n if kept else 1 for n, kept in zip(row, spec.kept, strict=True))
    result = ((count if spec.target == "e" else num_segments), *shape)
    if not all(isinstance(n, int) for n in row):  # a variable of jax.export
        return _reference(*args, spec=spec, num_segments=num_segments)
    if 0 in (count, *result, *row):
        return jnp.full(result, identity(spec.reduction), spec.dtype)
    # Move the dimensions that are summed to the end.
    kept = [d for d, n in enumerate(row) if spec.kept[d] or n == 1]
    moved = [*kept, *(d for d in range(len(row)) if d not in kept)]
    inner = math.prod(row[d] for d in moved[len(kept) :])
    row = tuple(row[d] for d in moved)
    own = [
        (k, side, jnp.transpose(x, (0, *(d + 1 for d in moved))))
        for k, side, x in zip(spec.inputs, spec.sides, args[GRAPH:], strict=True)
        if k >= 0
    ]
    primary = "s" if spec.target == "s" else "r"
    kernel, arrays, runs = _kernel(spec, own, row, primary, inner if spec.target == "e" else 0)
    text = edges.source(kernel, platform)
    code = cache.code_or_fallback(
        *(function, "the jnp references of functions of messages", text, platform),
        is_narrow=kernel.is_narrow,
        contracts=kernel.math != "exact",
    )
    if code is None:
        return _reference(*args, spec=spec, num_segments=num_segments)
    keys, order, others = _ids(args[:GRAPH], spec, primary, num_segments)
    columns = math.prod(row)
    types: Any
    if spec.target == "e":
        types = ((count, columns // inner), spec.dtype), ((0,), jnp.dtype(jnp.float32))
    else:
        scratch = (_graph.chunks(platform, count), 2, columns)
        types = (
            ((num_segments, columns), spec.dtype),
            (scratch, _graph.compute_dtype(spec.dtype)),
        )
    sizes = [jnp.dtype(o.dtype).itemsize for o in kernel.operands]
    call: Any = jax.ffi.ffi_call("jof_messages", [jax.ShapeDtypeStruct(*t) for t in types])
    y = call(
        *(keys, order, others, *arrays),
        code=np.frombuffer(code, np.uint8),
        id=np.int64(cache.code_id(code)),
        name=spec.definition.name,
        rows=np.asarray([edges.ROWS[o.row] for o in kernel.operands], np.int64),
        broadcasts=np.asarray([o.broadcast for o in kernel.operands], np.int64),
        inners=np.asarray([run[0] for run in runs], np.int64),
        counts=np.asarray([run[1] for run in runs], np.int64),
        element_bytes=np.asarray([*sizes, spec.dtype.itemsize], np.int64),
        pack_bytes=np.asarray(
            [
                kernel.pack * size if o.broadcast == edges.ALL or o.in_packs == "pack" else 0
                for o, size in zip(kernel.operands, sizes, strict=True)
            ],
            np.int64,
        ),
        layout=np.asarray([columns, kernel.inner, kernel.pack], np.int64),
    )[0]
    y = y.reshape(result[0], *(result[d + 1] for d in moved))
    back = [moved.index(d) for d in range(len(moved))]
    return jnp.transpose(y, (0, *(d + 1 for d in back)))


def _kernel(
    spec: Spec, operands: Sequence[Any], row: tuple[int, ...], primary: str, inner: int
) -> tuple[edges.Kernel, list[Any], list[tuple[int, int]]]:
    """The kernel, its operands as it takes them, and the column runs of broadcast operands."""
    columns = math.prod(row)
    found, own, runs = _operands.in_runs([x for _, _, x in operands], row, lead=1)
    arrays = [x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in found]
    names = {_operands.ARRAY: edges.ALL, _operands.SCALAR: edges.ONLY}
    kinds = [names.get(kind, kind - _operands.BROADCAST) for kind in own]
    sizes = [x.dtype.itemsize for x, kind in zip(arrays, kinds, strict=True) if kind == edges.ALL]
    pack = 16 // min(8, max(2, min([*sizes, spec.dtype.itemsize])))
    while columns % pack or (inner > 1 and inner % pack):
        pack //= 2

    def how(kind: int) -> str:
        if kind < 0:
            return ""
        each, count = runs[kind]
        if each % pack == 0:
            return "splat"
        return "pack" if each == 1 and count % pack == 0 else "each"

    where = {primary: "key", "e": "edge", "c": "only"}
    of = tuple(
        edges.Operand(k, str(x.dtype), where.get(side, "other"), kind, how(kind))
        for (k, side, x), kind in zip(operands, kinds, strict=True)
    )
    unroll = edges.unroll_of(of, pack, inner)
    kernel = edges.Kernel(spec.definition, of, spec.reduction, inner, pack, unroll, spec.math)
    return kernel, arrays, runs


def _ids(graph: Sequence[Any], spec: Spec, primary: str, num_segments: int) -> tuple[Any, ...]:
    """The keys by position, the order, and the other ends' ids by edge, as kernels take them."""
    graph = _graph.Graph(*graph)
    senders, receivers = graph.senders, graph.receivers
    reads = _graph.read(senders, spec.drops_senders)
    none = jnp.zeros(0, jnp.int32)
    if primary == "s":
        order, keys = graph.sender_order, graph.sender_rows
        others = receivers
        dropped = senders
    else:
        order, keys = graph.order, graph.rows
        others = reads if "s" in spec.sides or spec.drops_senders else none
        dropped = receivers
    if spec.target == "e" and order.shape != senders.shape:  # edges need no order
        return receivers, none, others
    order, keys = _graph.known_order(order, keys, dropped, num_segments)
    return keys, order, others


def _batch(
    primitive: core.Primitive, args: Any, dims: Any, *, spec: Spec, num_segments: int, **params: Any
) -> tuple[Any, int]:
    graph_dims = dims[:GRAPH]
    if all(d is None for d in graph_dims):  # the batch axis becomes a dimension of messages
        operands = [
            jnp.expand_dims(x, 1) if d is None else jnp.moveaxis(x, d, 1)
            for x, d in zip(args[GRAPH:], dims[GRAPH:], strict=True)
        ]
        more = dataclasses.replace(spec, kept=(True, *spec.kept))
        result = primitive.bind(
            *args[:GRAPH], *operands, spec=more, num_segments=num_segments, **params
        )
        return result, 1
    p = _graph.Problems(params["function"], args, dims)
    rows = {"e": p.edges}
    for k, side in enumerate(spec.sides, GRAPH):
        if side != "c":
            rows[side] = p.args[k].shape[1 if p.has_own[k] else 0]
    if spec.target in "sr":
        rows[spec.target] = num_segments
    graph = (
        p.ids(0, rows.get("s", 1)),
        p.ids(1, rows.get("r", 1)),
        *p.order(2, rows.get("r", 0)),
        *p.order(4, rows.get("s", 0)),
    )
    operands, sides = [], ""
    for k, side in enumerate(spec.sides, GRAPH):
        x = p.every(k)
        if side == "c" and p.has_own[k]:  # each problem's receivers read its row
            shape = (p.size, rows.get("r", 1), *x.shape[2:])
            operands.append(p.merged(jnp.broadcast_to(x, shape)))
            sides += "r"
        else:
            operands.append(p.args[k] if side == "c" else p.flat(k))
            sides += side
    spec = dataclasses.replace(spec, sides=sides)
    params |= {"spec": spec, "num_segments": p.size * num_segments}
    result = _primitive.bind(primitive, *graph, *operands, **params)
    return p.result(result, rows[spec.target])


messages_p = _primitive.define(
    "jof_messages",
    function=lambda *, function, **_: function,
    abstract_eval=_type,
    reference=_reference,
    native=_native_call,
    sharding_rule=_sharding_rule,
    batch=_batch,
)


# ---- derivatives ----


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, **params: Any
) -> tuple[Any, Any]:
    body = spec.definition.traced
    if scalars.contains(body.flat, "custom_vjp"):
        raise FusionError(
            f"{params['function']}: fun calls a function that jax.custom_vjp made, and derivatives "
            "of messages need its JVP. Remedy: use jax.custom_jvp, or call it on the arrays before "
            "they are read at edges.",
            "custom_vjp_call",
            "",
        )
    graph, operands = primals[:GRAPH], primals[GRAPH:]
    row = _row_of(operands)
    given = {k: x for k, x in zip(spec.inputs, operands, strict=True) if k >= 0}
    sides = {k: side for k, side in zip(spec.inputs, spec.sides, strict=True) if k >= 0}
    moving = {
        k: t
        for k, t in zip(spec.inputs, tangents[GRAPH:], strict=True)
        if k >= 0 and not isinstance(t, ad.Zero) and jnp.result_type(t) != jax.dtypes.float0
    }
    definition, outs = derive.jvp(spec.definition, tuple(moving)) if moving else (None, ())
    of_rules = derive.with_rules(spec.definition, tuple(moving))
    spec = dataclasses.replace(spec, definition=of_rules)
    result = _primitive.bind(messages_p, *primals, spec=spec, **params)
    if definition is None or not outs:
        return result, _primitive.total([], result)
    count = len(spec.definition.inputs)
    every = given | {count + n: t for n, t in enumerate(moving.values())}
    of = sides | {count + n: sides[k] for n, k in enumerate(moving)}
    if spec.reduction != "sum":
        definition, more = _of_chosen(graph, given, sides, row, result, spec, definition, params)
        every |= more
        of |= dict.fromkeys(more, "r")
    linear = dataclasses.replace(
        spec, definition=definition, sides="".join(of.values()), reduction="sum"
    )
    tangent = bind(graph, every, row, linear, **params)
    return result, _compat.broadcast_like(tangent, jax.typeof(result))


def _of_chosen(
    graph: Sequence[Any],
    given: dict[int, Any],
    sides: dict[int, str],
    row: Any,
    result: Any,
    spec: Spec,
    tangent: Definition,
    params: Any,
) -> tuple[Definition, dict[int, Any]]:
    """The tangent of edges that attain their receiver's maximum, divided by their number.

    Returns its definition and its last two inputs, which are read at the receivers: the maximum and
    that number. The initial value -inf of a maximum counts as one more edge where it is attained.
    """
    is_chosen = _is_chosen(spec.definition)
    count = len(spec.definition.inputs)
    counting = dataclasses.replace(
        spec,
        definition=is_chosen,
        sides="".join([*(sides[k] for k in given), "r"]),
        reduction="sum",
    )
    result = jax.lax.stop_gradient(result)
    many = bind(graph, given | {count: result}, row, counting, **params)
    many = many + (result == identity(spec.reduction)).astype(many.dtype)
    last = len(tangent.inputs)
    return _of_shared(spec.definition, tangent), {last: result, last + 1: many}


@functools.lru_cache(maxsize=1024)
def _is_chosen(definition: Any) -> Any:
    """Defines 1 where a message equals the last input, else 0, in the dtype that sums have."""
    function = core.jaxpr_as_fun(definition.traced.jaxpr)
    dtype = definition.outputs[0].type

    def chosen(*args: Any) -> list[Any]:
        return [(rounded(function(*args[:-1])[0], dtype) == args[-1]).astype(wide)]

    wide = str(_graph.compute_dtype(dtype))
    inputs = [*(p.type for p in definition.inputs), dtype]
    return derive.define(f"{definition.name}_chosen", chosen, inputs, [wide])


@functools.lru_cache(maxsize=1024)
def _of_shared(definition: Any, tangent: Any) -> Any:
    value, of_tangent = (core.jaxpr_as_fun(d.traced.jaxpr) for d in (definition, tangent))
    dtype, count = definition.outputs[0].type, len(definition.inputs)

    def shared(*args: Any) -> list[Any]:
        *own, most, many = args
        is_chosen = rounded(value(*own[:count])[0], dtype) == most
        part = of_tangent(*own)[0]
        # A maximum of NaN equals no message, so it has no edges that share it.
        return [jnp.where(is_chosen, part / jnp.maximum(many, 1), jnp.zeros_like(part))]

    inputs = [*(p.type for p in tangent.inputs), dtype, str(_graph.compute_dtype(dtype))]
    return derive.define(tangent.name, shared, inputs, [dtype])


@functools.lru_cache(maxsize=1024)
def _transposed(definition: Any, linear: tuple[int, ...], k: int, dtype: str) -> Any:
    """The definition of the cotangent of input k, one of the `linear` inputs of a definition."""
    every = derive.transpose(definition, linear, (0,))
    function = core.jaxpr_as_fun(every.traced.jaxpr)
    inputs = [p.type for p in every.inputs]
    of = linear.index(k)

    def one(*args: Any) -> list[Any]:
        return [function(*args)[of]]

    return derive.define(every.name, one, inputs, [dtype])


def _transpose(ct: Any, *args: Any, spec: Spec, num_segments: int, **params: Any) -> list[Any]:
    graph, operands = args[:GRAPH], args[GRAPH:]
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    none: list[Any] = [None] * GRAPH
    row = _row_of([x.aval if u else x for x, u in zip(operands, is_linear, strict=True)])
    count = len(spec.definition.inputs)
    linear = tuple(k for k, u in zip(spec.inputs, is_linear, strict=True) if u)
    given = {
        k: x for k, x, u in zip(spec.inputs, operands, is_linear, strict=True) if not u and k >= 0
    }
    sides = {k: side for k, side in zip(spec.inputs, spec.sides, strict=True) if k in given}
    given[count], sides[count] = ct, spec.target
    drops_senders = spec.drops_senders or spec.target == "s"
    cts: list[Any] = []
    for k, side, x, u in zip(spec.inputs, spec.sides, operands, is_linear, strict=True):
        if not u:
            cts.append(None)
            continue
        aval = x.aval
        # A result that is summed further outside of the kernel is rounded after that sum.
        is_whole = side == "e" or (side in "sr" and aval.shape[1:] == row)
        dtype = aval.dtype if is_whole else _graph.compute_dtype(aval.dtype)
        definition = _transposed(spec.definition, linear, k, str(dtype))
        for i in definition.reads:
            if i in linear:
                raise NotImplementedError(
                    f"{params['function']}: it cannot be transposed with respect to operand {i}, "
                    "which it is not linear in."
                )
        target = "r" if side == "c" else side
        kept = tuple(side != "e" or own == n for own, n in zip(aval.shape[1:], row, strict=True))
        own = dataclasses.replace(
            spec,
            definition=definition,
            sides="".join(sides.values()),
            target=target,
            drops_senders=drops_senders or target == "s",
            kept=kept,
        )
        segments = {"e": 0, "c": _receivers(graph, spec, operands, num_segments)}.get(
            side, aval.shape[0]
        )
        result = bind(graph, given, row, own, num_segments=segments, **params)
        axes = tuple(
            d for d, (a, b) in enumerate(zip(aval.shape, result.shape, strict=True)) if a != b
        )
        if axes:
            result = jnp.sum(result, axes, keepdims=True)
        cts.append(result.astype(aval.dtype))
    return none + cts


def _receivers(graph: Sequence[Any], spec: Spec, operands: Sequence[Any], segments: int) -> int:
    """The number of rows at the receivers, from the result or an operand that is read there."""
    if spec.target == "r":
        return segments
    for side, x in zip(spec.sides, operands, strict=True):
        if side == "r":
            return int((x.aval if ad.is_undefined_primal(x) else x).shape[0])
    raise AssertionError("what is differentiated is a sum at the receivers")


_primitive.define_derivatives(messages_p, jvp=_jvp, transpose=_transpose)


# ---- what users write ----


@dataclasses.dataclass(frozen=True)
class Messages:
    """A function of gathered rows, as a definition and its operands.

    Attributes:
      definition: the function of scalars.
      operands: its inputs, by number.
      sides: where each is read.
      row: the dimensions of a message.
    """

    definition: Definition
    operands: dict[int, Any]
    sides: str
    row: tuple[Any, ...]

    def product(self) -> tuple[Any, Any, int] | None:
        """A table, weights and their rank, if the function is their product or just the table.

        Without weights they are None, and the rank is that of heads. None for other functions.
        """
        body = self.definition.traced
        program, dtype = body.program, self.definition.outputs[0].type
        value = program.values[program.results[0]]
        factors = [value] if value.kind == "input" else [program.values[k] for k in value.args]
        if value.kind not in ("input", "mul") or any(f.kind != "input" for f in factors):
            return None
        jaxpr = _compat.jaxpr_and_consts(body.jaxpr)[0]
        if any(scalars.contains(jaxpr, name) for name in ("custom_", "stop_gradient")):
            return None  # its derivative is not that of a product
        by_side = {self.sides[int(f.text)]: self.operands[int(f.text)] for f in factors}
        table, weights = by_side.get("s"), by_side.get("e")
        if len(by_side) != len(factors) or table is None or set(by_side) - {"s", "e"}:
            return None
        if table.dtype != dtype or table.shape[1:] != self.row:
            return None
        if weights is None:
            depth = max(len(self.row) - 1, 0)  # keeps the dimensions of heads
            return table, None, depth
        own = weights.shape[1:]
        depth = max((d + 1 for d, n in enumerate(own) if n != 1), default=0)
        wide = _graph.compute_dtype(dtype)
        if weights.dtype not in (jnp.dtype(dtype), wide) or own[:depth] != self.row[:depth]:
            return None
        return table, weights, depth


def reduced(
    graph: Sequence[Any],
    messages: Messages,
    reduction: str,
    *,
    num_segments: int,
    function: str,
    implementation: str | None,
    math: str = "narrow",
) -> Any:
    """A reduction of messages at the receivers."""
    spec = Spec(
        definition=messages.definition,
        inputs=(),
        sides=messages.sides,
        target="r",
        drops_senders=False,
        kept=(True,) * len(messages.row),
        reduction=reduction,
        math="exact" if reduction != "sum" else math,
    )
    return bind(
        *(graph, messages.operands, messages.row, spec),
        num_segments=num_segments,
        function=function,
        implementation=implementation,
    )


def traced(
    function: str, fun: Callable[..., Any], arrays: Sequence[Any], sides: str, count: Any
) -> Messages | None:
    """The messages that a function makes of arrays, which are read at the given sides.

    None if messages have a dtype that kernels lack, or if there are fewer than two edges and the
    function works for their number only, for example because it closes over arrays of edges.
    """
    # With one edge, the dimension of edges could not be told from others of size 1.
    edges, are_few = count, isinstance(count, int) and count < 2
    count = 2 if are_few else count
    avals = [jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) for x in arrays]
    try:
        closed = _trace(function, fun, avals)
    except Exception:
        if not are_few:
            raise
        own = [jax.ShapeDtypeStruct((edges, *x.shape[1:]), x.dtype) for x in arrays]
        _trace(function, fun, own)  # it may be wrong for any number
        return None
    exact: dict[int, Any] = {}
    if any(is_narrow(str(x.dtype)) for x in avals):
        wide = [
            jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_narrow(str(x.dtype)) else x
            for x in avals
        ]
        with contextlib.suppress(Exception):  # f32 arrays may make the function raise anything
            exact = scalars.exact_literals(closed, _trace(function, fun, wide))
    jaxpr, consts = _compat.jaxpr_and_consts(closed)
    (out,) = jaxpr.outvars
    shape, dtype = out.aval.shape, out.aval.dtype
    if are_few and shape[:1] != (count,):
        return None
    if _compat.is_literal(out) or shape[:1] != (count,):
        raise ValueError(
            f"{function}: fun must return an array whose first dimension is that of edges, got "
            f"shape {shape}"
        )
    if dtype not in _graph.FLOATS:
        return None
    try:
        plan = scalars.plan(function, jaxpr, consts, [scalars.whole(jaxpr, out)], exact)
    except FusionError as error:
        reason = str(error).partition("; or jax_oneflow_ops.fuse")[0].rstrip(".")
        raise FusionError(f"{reason}.", error.primitive, error.line) from None
    operands: dict[int, Any] = {}
    found = ""
    for k, (x, alignment) in enumerate(plan.operands(arrays)):
        source, _ = plan.leaves[k]
        if isinstance(source, scalars.Constant):
            side = "e" if alignment[:1] == (0,) else "c"
            x = x if side == "e" else x[None]
            axes = alignment[1:] if side == "e" else alignment
        else:
            side = sides[source]
            axes = alignment[1:]
            if alignment[:1] != (0,) or 0 in axes:
                raise ValueError(
                    f"{function}: fun must keep edges as the first dimension of its arrays. Edge "
                    "inputs broadcast as in jnp: give them as many dimensions as tables have, such "
                    "as weights[:, None]"
                )
        found += side
        operands[k] = _aligned(x, [None if a is None else a - 1 for a in axes], len(shape) - 1)
    definition = derive.define(function, plan.function, plan.dtypes, [str(dtype)])
    return Messages(_known(definition), operands, found, tuple(shape[1:]))


def _trace(function: str, fun: Callable[..., Any], avals: Sequence[Any]) -> Any:
    def one(*args: Any) -> Any:
        result = fun(*args)
        leaves = jax.tree.leaves(result)
        if len(leaves) != 1 or leaves[0] is not result:
            found = f"{len(leaves)} in a {type(result).__name__}"
            raise TypeError(f"{function}: fun must return one array, got {found}")
        return jnp.asarray(result)

    return trace(function, one, avals)


def _aligned(x: Any, axes: Sequence[int | None], rank: int) -> Any:
    """`x` with `rank` dimensions after the first: its own at `axes`, others of size 1."""
    x = jax.lax.squeeze(x, [d + 1 for d, axis in enumerate(axes) if axis is None])
    return jax.lax.expand_dims(x, [d + 1 for d in range(rank) if d not in axes])


def _known(definition: Any) -> Any:
    """The same object for equal definitions, so that jax finds what it has compiled.

    The text of a definition does not show which custom derivative rules it has. With rules, it
    equals no other.
    """
    closed = definition.traced.jaxpr
    text = str(closed)
    if "custom_" in text:
        return definition
    key = f"{definition.name} {definition} {text} {_compat.jaxpr_and_consts(closed)[1]}"
    found = _definitions.pop(key, definition)
    _definitions[key] = found
    if len(_definitions) > 256:
        del _definitions[next(iter(_definitions))]
    return found


# Definitions by a text of what they compute.
_definitions: dict[str, Definition] = {}
