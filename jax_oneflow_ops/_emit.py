"""Arrays of a program that is being lowered. Operations on them are emitted into it immediately.

Tracing a function that replaces an operation, and then lowering the trace, takes ten times as long.
Functions that work on both kinds of arrays ask an array for its namespace, which is `jax.numpy` or
this module. This module has those functions and methods of jax.numpy that they need, for integers
and known sizes.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_oneflow_ops import _primitive
from jax_oneflow_ops._compat import (
    func,
    functions_of_module,
    hlo,
    ir,
    lower_plain,
    scalar_of,
    with_current_mesh,
)


def lower(function: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> list[Any]:
    """Lowers a call of `function` of arrays, whose types are those in `ctx`.

    `function` becomes a function of the program that equal calls share. Operands that are broadcast
    from scalars are passed as scalars.
    """
    scalars = [scalar_of(x) for x in operands]
    values = [x if one is None else one for x, one in zip(operands, scalars, strict=True)]
    known = tuple(one is None for one in scalars)
    key = (function, *ctx.avals_in, known, *params.values())
    made = functions_of_module(ctx)
    if key not in made:
        (result,) = ctx.avals_out
        types = [value.type for value in values], [_type(result.shape, result.dtype)]
        name = f"jof_{function.__name__.strip('_')}"
        made[key] = func.FuncOp(name, types, visibility="private", ip=ctx.module_context.ip)
        block = made[key].add_entry_block()
        ctx.module_context.symbol_table.insert(made[key])
        with ir.InsertionPoint(block):
            arrays = map(functools.partial(_argument, ctx), block.arguments, ctx.avals_in)
            func.ReturnOp([function(*arrays, **params).value])
    return [*func.CallOp(made[key], values).results]


def _argument(ctx: Any, value: Any, aval: Any) -> "Array":
    if aval.shape and is_scalar(value):
        return broadcast_to(Array(value, _aval((), aval.dtype), ctx), aval.shape)
    return Array(value, aval, ctx)


class Array:
    """A value of MLIR, with the shape and the dtype that it has in jax."""

    def __init__(self, value: Any, like: Any, ctx: Any = None) -> None:
        self.value, self.shape, self.dtype, self.ctx = value, like.shape, like.dtype, ctx
        self.ndim = len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __array_namespace__(self) -> Any:
        return sys.modules[__name__]

    def _like(self, value: Any, shape: Sequence[int], dtype: Any = None) -> "Array":
        return Array(value, _aval((*shape,), dtype or self.dtype), self.ctx)

    def __getitem__(self, index: tuple[Any, int]) -> "Array":
        _, column = index  # x[..., column]
        *sizes, _ = self.shape
        start, end = [0] * len(sizes) + [column], [*sizes, column + 1]
        part = hlo.slice(self.value, start, end, [1] * self.ndim)
        return self._like(part, (*sizes, 1)).reshape(*sizes)

    def reshape(self, *shape: Any) -> "Array":
        sizes = [*(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // -math.prod(sizes)
        if (*sizes,) == self.shape:
            return self
        return self._like(hlo.reshape(_type(sizes, self.dtype), self.value), sizes)

    def transpose(self, *axes: Any) -> "Array":
        order = axes[0] if axes and not isinstance(axes[0], int) else axes
        if [*order] == [*range(self.ndim)]:
            return self
        value = hlo.transpose(self.value, [*order])
        return self._like(value, [self.shape[axis] for axis in order])

    def astype(self, dtype: Any) -> "Array":
        if (dtype := np.dtype(dtype)) == self.dtype:
            return self
        value = hlo.convert(_type(self.shape, dtype), self.value)
        return self._like(value, self.shape, dtype)

    def __neg__(self) -> "Array":
        return self._like(hlo.negate(self.value), self.shape)

    def __add__(self, other: Any) -> "Array":
        return _elementwise(hlo.add, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> "Array":
        return _elementwise(hlo.multiply, self, other)

    def __and__(self, other: Any) -> "Array":
        return _elementwise(hlo.and_, self, other)

    def __lt__(self, other: Any) -> "Array":
        return _compared("LT", self, other)

    def __le__(self, other: Any) -> "Array":
        return _compared("LE", self, other)

    def __ge__(self, other: Any) -> "Array":
        return _compared("GE", self, other)


@functools.lru_cache(maxsize=1024)
def _aval(shape: tuple[int, ...], dtype: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype)


def aval_of(value: Any) -> jax.core.ShapedArray | None:
    """The shape and dtype of a value of MLIR; None if sizes vary or `_DTYPES` lacks its dtype."""
    kind = ir.ShapedType(value.type)
    dtype = _DTYPES.get(str(kind.element_type))
    return _aval((*kind.shape,), dtype) if dtype is not None and kind.has_static_shape else None


def is_scalar(value: Any) -> bool:
    """Whether a value of MLIR has no dimensions."""
    return bool(ir.ShapedType(value.type).rank == 0)


_DTYPES = {
    **{"bf16": jax.numpy.dtype("bfloat16"), "i1": np.dtype("bool")},
    **{f"f{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    **{f"i{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"ui{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
}


def _shape(*args: Any) -> tuple[int, ...]:
    """The shape that arrays broadcast to."""
    first, *others = [x.shape for x in args if isinstance(x, Array)]
    same = all(shape == first for shape in others)
    return first if same else np.broadcast_shapes(first, *others)


def _type(shape: Sequence[int], dtype: Any) -> Any:
    return ir.RankedTensorType.get([*shape], mlir.dtype_to_ir_type(np.dtype(dtype)))


def _constant(x: Any, shape: Sequence[int], dtype: Any) -> Any:
    if math.prod(shape) == 0:
        return mlir.ir_constant(np.zeros(shape, dtype))
    element = ir.IntegerAttr.get(mlir.dtype_to_ir_type(dtype), int(x))
    return hlo.constant(ir.DenseElementsAttr.get_splat(_type(shape, dtype), element))


def _spread(x: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The MLIR value of an array or a number, broadcast to a shape."""
    return broadcast_to(x, shape).value if isinstance(x, Array) else _constant(x, shape, dtype)


def _ctx(args: Sequence[Any]) -> Any:
    for x in args:
        if isinstance(x, Array) and x.ctx is not None:
            return x.ctx
    return None


def _elementwise(function: Callable[..., Any], *args: Any, dtype: Any = None) -> Array:
    """Applies an operation to numbers and arrays of one dtype, which broadcast."""
    shape, own = _shape(*args), args[0].dtype
    value = function(*[_spread(x, shape, own) for x in args])
    return Array(value, _aval(shape, dtype or own), _ctx(args))


def _compare(direction: str, dtype: Any, x: Any, y: Any) -> Any:
    kind = "SIGNED" if dtype.kind == "i" else "UNSIGNED"
    return hlo.compare(
        x,
        y,
        hlo.ComparisonDirectionAttr.get(direction),
        compare_type=hlo.ComparisonTypeAttr.get(kind),
    )


def _compared(direction: str, x: Array, y: Any) -> Array:
    return _elementwise(
        functools.partial(_compare, direction, x.dtype), x, y, dtype=np.dtype("bool")
    )


# ---- functions of jax.numpy ----


def asarray(x: Any, dtype: Any) -> Any:
    return np.asarray(x, dtype)


def zeros(shape: Any, dtype: Any) -> Array:  # empty, or of an integer dtype
    shape = (shape,) if isinstance(shape, int) else shape
    return Array(_constant(0, shape, dtype), _aval(shape, np.dtype(dtype)))


def arange(n: int, dtype: Any) -> Array:
    value = hlo.iota(_type((n,), dtype), ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0))
    return Array(value, _aval((n,), np.dtype(dtype)))


def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    if x.shape == (*shape,):
        return x
    kept = [i for i, n in enumerate(x.shape) if n != 1]
    first = len(shape) - x.ndim
    places = [first + i for i in kept]
    narrow = x.reshape([x.shape[i] for i in kept])
    value = hlo.broadcast_in_dim(_type(shape, x.dtype), narrow.value, places)
    return x._like(value, shape)


def where(condition: Array, x: Any, y: Any) -> Array:
    own = x.dtype if isinstance(x, Array) else y.dtype
    shape = _shape(condition, x, y)
    value = hlo.select(*[_spread(v, shape, own) for v in (condition, x, y)])
    return condition._like(value, shape, own)


def clip(x: Array, low: int, high: int) -> Array:
    return _elementwise(hlo.minimum, _elementwise(hlo.maximum, x, low), high)


# ---- functions that have no method or namespace ----


def pad(x: Array, more: Sequence[int]) -> Array:
    """Adds zeros at the end of dimensions of an array of floats."""
    if not any(more):
        return x
    kind = _type((), x.dtype)
    zero = hlo.constant(
        ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0))
    )
    none = [0] * x.ndim
    shape = [n + k for n, k in zip(x.shape, more, strict=True)]
    return x._like(hlo.pad(x.value, zero, none, [*more], none), shape)


def sort_pairs(keys: Any, values: Any) -> Any:
    """Keys, integers of rank 1, and values, sorted by key. The sort is stable."""
    if not isinstance(keys, Array):
        return jax.lax.sort((keys, values), num_keys=1, is_stable=True)
    pair = (keys, values)
    sort = hlo.SortOp(
        [_type(x.shape, x.dtype) for x in pair],
        [x.value for x in pair],
        dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0),
        is_stable=ir.BoolAttr.get(True),
    )
    scalars = [_type((), x.dtype) for x in pair for _ in range(2)]
    block = sort.comparator.blocks.append(*scalars)
    with ir.InsertionPoint(block):
        x, y, *_ = block.arguments
        hlo.return_([_compare("LT", keys.dtype, x, y)])
    return [x._like(result, x.shape) for x, result in zip(pair, sort.results, strict=True)]


def with_lowest_at_end(x: Array, count: int) -> Array:
    """Sets the last `count` columns of an array of floats to negative infinity."""
    shape = (*x.shape[:-1], count)
    element = ir.FloatAttr.get(_type((), x.dtype).element_type, -math.inf)
    lowest = hlo.constant(ir.DenseElementsAttr.get_splat(_type(shape, x.dtype), element))
    starts = [*[0] * (x.ndim - 1), x.shape[-1] - count]
    places = [_constant(n, (), np.dtype("int32")) for n in starts]
    return x._like(hlo.dynamic_update_slice(x.value, lowest, places), x.shape)


def first(x: Any, count: int) -> Any:
    """The first elements of an array of rank 1."""
    if not isinstance(x, Array):
        return x[:count]
    return x._like(hlo.slice(x.value, [0], [count], [1]), (count,))


def are_equal(x: Any) -> bool:
    """Whether all elements are known to be the same number."""
    return isinstance(x, Array) and scalar_of(x.value) is not None


def one_of_each(updates: Any) -> Any:
    """One update for each problem, if all updates are equal."""
    one = Array(scalar_of(updates.value), _aval((), updates.dtype), updates.ctx)
    return broadcast_to(one, (updates.shape[0], 1, 1))


def bind(primitive: Any, *args: Any, **params: Any) -> Any:
    """Binds a primitive of this package, which is lowered at once if its operands are `Array`s."""
    if (ctx := _ctx(args)) is None:
        return _primitive.bind(primitive, *args, **params)
    avals = [_aval(x.shape, x.dtype) for x in args]
    result, _ = primitive.abstract_eval(*avals, **params)
    inner = with_current_mesh(ctx).replace(avals_in=avals, avals_out=[result])
    rule = lower_plain(functools.partial(primitive.bind, **params), False)
    (value,) = rule(inner, *map(operator.attrgetter("value"), args))
    return Array(value, result, ctx)


def ffi_call(
    target: str, results: Sequence[Any], *args: Any, aliases: Any = None, **how: Any
) -> Any:
    """Calls an FFI target, as `jax.ffi.ffi_call` does, with these result types and attributes."""
    if (ctx := _ctx(args)) is None:
        return jax.ffi.ffi_call(target, tuple(results), input_output_aliases=aliases)(*args, **how)
    avals = [[_aval((*x.shape,), x.dtype) for x in side] for side in (args, results)]
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    inner = ctx.replace(avals_in=avals[0], avals_out=avals[1])
    values = rule(inner, *map(operator.attrgetter("value"), args), **how)
    return [*map(functools.partial(Array, ctx=ctx), values, avals[1])]
