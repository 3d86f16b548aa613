"""Layers of graph networks: sums of weighted rows and attention, on graphs of several kinds.

Plans are made before a call is timed, as a program makes them once for a graph. "without plans" is
the same layer that sorts its edges in each call; "jnp in order" is jnp with the order of the plan.
In all forms of jnp but the first, attention divides sums instead of each edge's weight, so that its
gradient scatters no denominators. The gradient of the first takes XLA seconds with a hub.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from .. import accuracy
from ..harness import Array, Case, Function, Work
from ..inputs import Input
from . import common

HEADS, WIDTH = 8, 16
_SIZES = {"gpu": (1 << 16, 1 << 20), "cpu": (1 << 13, 1 << 17)}  # nodes, edges
_GRAPHS = {
    "uniform": "random receivers",
    "sorted": "edges in order",
    "skewed": "power law",
    "hot": "one hub",
}
_GRADIENT = "value and gradient"


def case(op: str, kind: str, dtype: str, group: str, nodes: int, edges: int) -> Case:
    """A row of `HEADS` x `WIDTH` elements is read for each edge, three of them for a gradient."""
    row = HEADS * WIDTH * common.itemsize(dtype)
    of_edge = 8 + math.prod(_LAYERS[op].edge) * common.itemsize(dtype)
    nbytes = edges * (row + of_edge) + nodes * row
    if group == _GRADIENT:
        nbytes += 2 * edges * (row + of_edge) + nodes * row
    prefix = {"forward": "fwd", _GRADIENT: "vag"}[group]
    name = f"{prefix}-{op.replace(' ', '_')}-{kind}-{common.short(dtype)}"
    work = partial(_work, op, kind, dtype, group == _GRADIENT, nodes, edges)
    return Case("graph", name, op, group, _GRAPHS[kind], dtype, nbytes, work, x64=True)


def cases(platform: str) -> list[Case]:
    return [
        case(op, kind, dtype, group, *_SIZES[platform])
        for group in ("forward", _GRADIENT)
        for op in _LAYERS
        for kind in _GRAPHS
        for dtype in ("float32", "bfloat16")
    ]


def _weighted_sum(x: Array, weights: Array, *graph: Array, **options: Any) -> Array:
    def message(row: Array, weight: Array) -> Array:
        return row * weight

    return jof.message_sum(message, (x,), *graph, weights, **options)


def _weighted_sum_in_jax(x: Array, weights: Array, *graph: Array, **options: Any) -> Array:
    senders, receivers = graph
    return jax.ops.segment_sum(x[senders] * weights, receivers, **options)


def _attention(values: Array, logits: Array, *graph: Array, **options: Any) -> Array:
    return jof.attention_sum(logits, values, *graph, **options)


def _softmax_in_jax(logits: Array, receivers: Array, **options: Any) -> Array:
    """Without a derivative of the maximum, which cancels and takes XLA seconds with a hub."""
    largest = jax.ops.segment_max(jax.lax.stop_gradient(logits), receivers, **options)
    e = jnp.exp(logits - largest[receivers])
    return e / jax.ops.segment_sum(e, receivers, **options)[receivers]


def _attention_in_jax(values: Array, logits: Array, *graph: Array, **options: Any) -> Array:
    senders, receivers = graph
    weights = _softmax_in_jax(logits, receivers, **options)
    return jax.ops.segment_sum(weights[..., None] * values[senders], receivers, **options)


def _attention_divided_last(values: Array, logits: Array, *graph: Array, **options: Any) -> Array:
    senders, receivers = graph
    largest = jax.ops.segment_max(jax.lax.stop_gradient(logits), receivers, **options)
    e = jnp.exp(logits - largest[receivers])[..., None]
    total = jax.ops.segment_sum(e * values[senders], receivers, **options)
    weight = jax.ops.segment_sum(e, receivers, **options)
    return total / jnp.where(weight > 0, weight, 1)  # 0 without an edge


def _torch_weighted_sum(torch: Any, x: Array, weights: Array, *graph: Array) -> Array:
    senders, receivers = graph
    return torch.zeros_like(x).index_add_(0, receivers, x[senders] * weights)


def _torch_attention(torch: Any, values: Array, logits: Array, *graph: Array) -> Array:
    from torch_geometric.utils import softmax

    senders, receivers = graph
    weights = softmax(logits, receivers, num_nodes=len(values))
    return torch.zeros_like(values).index_add_(0, receivers, weights[..., None] * values[senders])


class Layer(NamedTuple):
    """A layer in three libraries, and the dimensions of a node and of an edge."""

    ours: Function
    in_jax: Function  # as it is written
    fast_in_jax: Function
    in_torch: Function
    node: tuple[int, ...]
    edge: tuple[int, ...]


_SUM = Layer(
    *(_weighted_sum, _weighted_sum_in_jax, _weighted_sum_in_jax, _torch_weighted_sum),
    node=(HEADS * WIDTH,),
    edge=(1,),
)
_ATTENTION = Layer(
    *(_attention, _attention_in_jax, _attention_divided_last, _torch_attention),
    node=(HEADS, WIDTH),
    edge=(HEADS,),
)
_LAYERS = {"weighted sum": _SUM, "attention": _ATTENTION}


def _work(op: str, kind: str, dtype: str, gradient: bool, nodes: int, edges: int) -> Work:
    layer = _LAYERS[op]
    inputs = [
        Input((nodes, *layer.node), dtype),
        Input((edges, *layer.edge), dtype),
        Input((edges,), "int32", "uniform", nodes),
        Input((edges,), "int32", kind, nodes),
    ]
    inputs += [Input((nodes, *layer.node), dtype)] * gradient

    def planned(*arrays: Array) -> tuple[Any, ...]:
        senders, receivers = arrays[2:4]
        plans = jof.segment_plan(receivers, nodes), jof.segment_plan(senders, nodes)
        return (*arrays[:4], plans, *arrays[4:])

    def ours(*args: Any, implementation: str | None = None, with_plans: bool = True) -> Array:
        *arrays, (plan, sender_plan) = args
        plans = {"plan": plan, "sender_plan": sender_plan} if with_plans else {}
        return layer.ours(*arrays, num_segments=nodes, implementation=implementation, **plans)

    def in_jax(function: Function, *args: Any) -> Array:
        return function(*args[:-1], num_segments=nodes, indices_are_sorted=kind == "sorted")

    jnp_form, fast_form = (partial(in_jax, f) for f in (layer.in_jax, layer.fast_in_jax))

    def in_order(*args: Any) -> Array:
        x, of_edges, senders, receivers, (plan, _) = args
        edges = (array[plan.order] for array in (of_edges, senders, receivers))
        return layer.fast_in_jax(x, *edges, num_segments=nodes, indices_are_sorted=True)

    def in_float32(form: Function) -> Function:
        def run(*args: Any) -> Array:
            wide = (x.astype(jnp.float32) for x in args[:2])
            return form(*wide, *args[2:]).astype(dtype)

        return form if dtype == "float32" else run

    def measured(function: Function) -> Function:
        return common.with_pullback(function, (0, 1)) if gradient else function

    def sample(args: Sequence[Any], out: Any) -> Any:
        wide = [x.astype(jnp.float64) if i in (0, 1, 5) else x for i, x in enumerate(args)]
        exact = measured(jnp_form)(*wide)
        from_rounding = jax.tree.map(lambda x: jnp.zeros((1,) * x.ndim), exact)
        if gradient and op == "attention":
            of_logits = _from_rounding(wide[1], wide[3], wide[5], out[0], num_segments=nodes)
            from_rounding = (*from_rounding[:2], of_logits)
        return out, exact, from_rounding

    forms: dict[str, Function] = {"jnp": jnp_form}
    if layer.fast_in_jax is not layer.in_jax:
        forms["jnp divided last"] = fast_form
    if dtype != "float32":
        forms["jnp f32"] = in_float32(fast_form)
    if kind != "sorted":
        forms["jnp in order"] = in_float32(in_order)
    return Work(
        inputs,
        measured(ours),
        {name: measured(form) for name, form in forms.items()},
        sample,
        _verify,
        terms=edges,
        variants={"without plans": measured(partial(ours, with_plans=False))},
        torch=None if gradient else layer.in_torch,
        torch_inputs=lambda torch, x, y, *ids: (x, y, *(i.long() for i in ids)),
        prepare=planned,
    )


def _from_rounding(logits: Array, receivers: Array, dy: Array, y: Array, **options: Any) -> Array:
    """The most that attention's gradient of logits may be off because `y` was rounded.

    The gradient of an edge is its weight times the dot product of `dy` and of the difference of the
    sender's values and `y`.
    """
    weights = _softmax_in_jax(logits, receivers, **options)
    _, exponent = jnp.frexp(y.astype(jnp.float64))
    half_ulp = jnp.ldexp(0.5, exponent - 1 - jnp.finfo(y.dtype).nmant)
    return weights * (jnp.abs(dy) * half_ulp).sum(-1)[receivers]


def _verify(sampled: Any) -> str | None:
    """Compares with JAX's form in float64; a hub sums half a million terms."""
    for found, exact, more in zip(*map(jax.tree.leaves, sampled), strict=True):
        value = np.asarray(exact, np.float64)
        most = np.abs(value).max(keepdims=True)
        bound = 0.501 * accuracy.ulp(value, found.dtype) + 2.0**-17 * most + np.asarray(more)
        if wrong := accuracy.worst(np.asarray(found, np.float64), value, bound):
            return wrong
    return None
