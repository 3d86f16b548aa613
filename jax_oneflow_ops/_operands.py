"""Operands of elementwise calls, which broadcast as those of jnp do.

An operand of a primitive is a scalar, of rank 0, or has the result's rank, with size 1 in the
dimensions that it is broadcast over. Results have the shape that the operands broadcast to.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_oneflow_ops import _compat, _primitive


def broadcast_shape(function: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that arrays broadcast to. `shapes` has the names that errors use."""
    try:
        return tuple(jnp.broadcast_shapes(*shapes.values()))
    except ValueError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{function}: operands must have shapes that broadcast together, got {shown}"
        ) from None


def promoted(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of any rank as operands: each has rank 0 or the largest rank."""
    rank = max(x.ndim for x in arrays)
    return [jnp.expand_dims(x, range(rank - x.ndim)) if 0 < x.ndim < rank else x for x in arrays]


def bind(primitive: core.Primitive, *args: Any, **params: Any) -> Any:
    """Binds after giving operands the same varying axes in a `shard_map`, and one sharding.

    On a mesh with Explicit axes, the sharding is part of a type. A cotangent must have the type of
    its operand, but kernels return cotangents of the result's type.
    """
    args = tuple(_compat.join_varying_axes(*map(_compat.as_array, args)))
    arrays = [jax.typeof(x) for x in args if x.ndim]
    if len({aval.sharding for aval in arrays}) > 1:
        joined = _compat.elementwise_aval(*arrays)
        args = tuple(_compat.with_sharding_over(x, joined) if x.ndim else x for x in args)
    return primitive.bind(*args, **params)


def result_aval(*avals: Any) -> Any:
    """The type of a result, except its dtype."""
    return _compat.elementwise_aval(*([aval for aval in avals if aval.ndim] or avals))


def sharding_rule(
    *types: Any, results: int = 1, width: int | None = None
) -> _primitive.ShardingRule:
    """All dimensions may be sharded. Those that an operand is broadcast over get separate names.

    `width` is the size of the results' last dimension, if no operand need have it.
    """
    rank = max(len(t.shape) for t in types)
    sizes = [*jnp.broadcast_shapes(*(tuple(t.shape) for t in types))]
    sizes = sizes if width is None else [*sizes[:-1], width]
    dims = [f"d{i}" for i in range(rank)]
    operands = [
        [
            name if n == size else f"one{k}_{name}"
            for name, n, size in zip(dims, t.shape, sizes, strict=False)
        ]
        for k, t in enumerate(types)
    ]
    return _primitive.ShardingRule(operands, [dims] * results)


def batch(args: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], int]:
    """Operands with a common batch axis among their dimensions, and that axis.

    It stays where an array of the largest rank has it. Arrays without it are broadcast over it.
    """
    ranks = [x.ndim - (d is not None) for x, d in zip(args, dims, strict=True)]
    rank = max(ranks)
    operands = [*zip(args, dims, ranks, strict=True)]
    axis = next((d for _, d, own in operands if own == rank and d is not None), 0)

    def batched(x: Any, d: int | None, own: int) -> Any:
        if own == 0 and (d is None or rank == 0):
            return x
        if d is None:
            return jnp.expand_dims(x, axis)
        if own == 0:
            return jnp.expand_dims(x, [i for i in range(rank + 1) if i != axis])
        return x if d == axis else jnp.moveaxis(x, d, axis)

    return [batched(*operand) for operand in operands], axis


# How the kernels take an operand: csrc/ops/elementwise_call.h.
ARRAY, SCALAR, BROADCAST = range(3)
_MAX_BROADCASTS = 8

_Run = tuple[Any, Any]


def column_run(shape: Sequence[Any], result: Sequence[Any]) -> _Run | int | None:
    """The number of elements after and in the one run of dimensions that an operand varies over.

    ARRAY if it varies over all dimensions, SCALAR if over none, None if there are several runs.
    """
    if not shape:
        return SCALAR
    varies = [n == size for n, size in zip(shape, result, strict=True) if size != 1]
    sizes = [size for size in result if size != 1]
    if all(varies):
        return ARRAY
    if not any(varies):
        return SCALAR
    first = varies.index(True)
    last = len(varies) - varies[::-1].index(True)
    if not all(varies[first:last]):
        return None
    return math.prod(sizes[last:]), math.prod(sizes[first:last])


def native(args: Sequence[jax.Array]) -> tuple[list[jax.Array], list[int], tuple[int, ...]]:
    """The operands and their kinds as the kernels take them, and the shape of the results."""
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    arrays, kinds, _ = in_runs(args, shape)
    return arrays, kinds, shape


def in_runs(
    args: Sequence[jax.Array], shape: Sequence[Any], lead: int = 0
) -> tuple[list[jax.Array], list[int], list[_Run]]:
    """The operands and their kinds as the kernels take them, and the runs of BROADCAST operands.

    Operands broadcast to `shape` after their first `lead` dimensions. Kernels broadcast operands
    that vary over one run of neighbouring dimensions. Other operands are broadcast beforehand.
    """
    arrays, kinds = [], []
    runs: dict[_Run, int] = {}
    for x in args:
        run = column_run(x.shape[lead:], shape)
        if run is None or (isinstance(run, tuple) and len({*runs, run}) > _MAX_BROADCASTS):
            x, run = jnp.broadcast_to(x, (*x.shape[:lead], *shape)), ARRAY
        arrays.append(x)
        kinds.append(run if isinstance(run, int) else BROADCAST + runs.setdefault(run, len(runs)))
    return arrays, kinds, [*runs]
