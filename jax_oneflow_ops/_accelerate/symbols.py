"""Symbolic values of a program: numbers, affine functions of indices, and steps of these.

A causal mask is computed from constants: indices of rows are compared with indices of columns. This
module finds that out when a program is lowered, without computing the mask. It also looks into the
functions that a program calls, such as those of `jnp.where` and `jnp.tril`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops import _compat, _emit
from jax_oneflow_ops._compat import operands_of


@dataclasses.dataclass(frozen=True)
class Place:
    """A value of MLIR, and the calls of functions in which it is, outermost first."""

    value: Any
    calls: tuple[Any, ...] = ()

    def across_call(self, ctx: Any) -> "Place | None":
        """The same value as the result in the function that returns it, or as the caller's operand.

        None if no function returns it, and it is no argument of one.
        """
        if self.calls and (x := _compat.operand_of_call(self.calls[-1], self.value)) is not None:
            return Place(x, self.calls[:-1])
        if inside := _compat.result_in_function(ctx, self.value):
            call, value = inside
            return Place(value, (*self.calls, call))
        return None

    def source(self, ctx: Any) -> "Place":
        """The place where the value is computed."""
        place = self
        while before := place.across_call(ctx):
            place = before
        return place

    def operands(self, *names: str) -> "list[Place]":
        """The operands of the operation that made the value; none if it has none of these names."""
        return [Place(x, self.calls) for x in operands_of(self.value, *names)]

    def before_repeat(self, dims: Sequence[Any]) -> "tuple[Place, list[Any]] | None":
        """What a value was before a transposition, a broadcast or a wider dtype; or None.

        `dims` says for each dimension which dimension of a later result it becomes. Those of
        dimensions of size 1 may be wrong.
        """
        for source in self.operands("stablehlo.convert"):
            return (source, [*dims]) if _is_wider(self.value, source.value) else None
        before = _compat.before_transpose(self.value, dims)
        before = before or _compat.before_broadcast(self.value, dims)
        return (Place(before[0], self.calls), before[1]) if before else None

    def before_move(self, dims: Sequence[Any]) -> "tuple[Place, list[Any]] | None":
        """Like `before_repeat`, also through rounding, but None if elements were repeated."""
        for source in self.operands("stablehlo.convert"):
            are_floats = {_kind(self.value), _kind(source.value)} <= _FLOATS
            return (source, [*dims]) if are_floats else None
        if (before := self.before_repeat(dims)) is None:
            return None
        sizes = (math.prod(_compat.shape_of(x.value)) for x in (self, before[0]))
        return before if len({*sizes}) == 1 else None


_FLOATS = {"bf16", "f16", "f32", "f64"}


def _kind(value: Any) -> str:
    return str(_compat.ir.ShapedType(value.type).element_type)


def _is_wider(value: Any, source: Any) -> bool:
    """Whether a conversion of booleans or floats made a value that is 0 only where they are."""
    kinds = _kind(value), _kind(source)
    are_floats = {*kinds} <= _FLOATS
    return kinds[1] == "i1" or (are_floats and int(kinds[0][-2:]) > int(kinds[1][-2:]))


@dataclasses.dataclass(frozen=True)
class Line:
    """The number `constant + sum(slope * index)`, where `slopes` are those of all dimensions."""

    slopes: tuple[float, ...]
    constant: float

    @property
    def is_number(self) -> bool:
        return not any(self.slopes)

    def __sub__(self, other: "Line") -> "Line":
        slopes = tuple(map(operator.sub, self.slopes, other.slopes))
        return Line(slopes, self.constant - other.constant)


@dataclasses.dataclass(frozen=True)
class Step:
    """The number `inside` where the line is at least 0, else `outside`. The line is of integers."""

    line: Line
    inside: float
    outside: float

    def map(self, function: Callable[[float], float]) -> "Step":
        return Step(self.line, function(self.inside), function(self.outside))


Symbol = Line | Step | None


def array_of(symbol: Symbol, shape: Sequence[int], dtype: Any) -> jax.Array | None:
    """An array of what a symbol is, computed from indices; None if that is not a mask or a number.

    :func:`symbol_of` recognises it.
    """
    if isinstance(symbol, Line) and symbol.is_number:
        return jnp.full(shape, symbol.constant, dtype)
    if not isinstance(symbol, Step) or {symbol.inside, symbol.outside} != {0, 1}:
        return None
    line = symbol.line
    if not {*line.slopes} <= {-1, 0, 1} or not line.constant.is_integer() or dtype != np.bool_:
        return None

    def total(sign: int, start: int) -> jax.Array:
        indices = jnp.full(shape, start, jnp.int32)
        for d, slope in enumerate(line.slopes):
            if slope == sign:
                indices += lax.broadcasted_iota(jnp.int32, shape, d)
        return indices

    inside = total(1, int(line.constant)) >= total(-1, 0)
    return inside if symbol.inside else jnp.logical_not(inside)


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "stablehlo.add": operator.add,
    "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul,
    "stablehlo.divide": lambda x, y: x / y if y else math.nan,
    "stablehlo.and": lambda x, y: float(bool(x) and bool(y)),
    "stablehlo.or": lambda x, y: float(bool(x) or bool(y)),
}
_OF_ONE: dict[str, Callable[[float], float]] = {
    "stablehlo.negate": operator.neg,
    "stablehlo.not": lambda x: float(not x),
    "stablehlo.sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "stablehlo.rsqrt": lambda x: 1 / math.sqrt(x) if x > 0 else math.nan,
}
_COMPARISONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
}
_MOST_STEPS = 64  # operations that are looked at


def number(ctx: Any, place: Place) -> float | None:
    """The number to which all elements of a value are equal, if constants determine it."""
    symbol = symbol_of(ctx, place)
    return symbol.constant if isinstance(symbol, Line) and symbol.is_number else None


def symbol_of(ctx: Any, place: Place, steps: list[int] | None = None) -> Symbol:
    """What a value is; None if that is not known."""
    steps = [_MOST_STEPS] if steps is None else steps
    steps[0] -= 1
    place = place.source(ctx)
    op = getattr(place.value.owner, "operation", None)
    aval = _emit.aval_of(place.value)
    if steps[0] < 0 or op is None or aval is None:
        return None
    name = op.name
    if name == "stablehlo.constant":
        constant = _compat.number_of(place.value)
        return None if constant is None else Line((0.0,) * aval.ndim, constant)
    if name == "stablehlo.iota":
        if not _is_exact(aval.dtype):
            return None
        dim = _compat.dimension_of_iota(place.value)
        return Line(tuple(float(d == dim) for d in range(aval.ndim)), 0.0)

    def known(index: int) -> Symbol:
        operand = _compat.without_constraints(op.operands[index])
        return symbol_of(ctx, Place(operand, place.calls), steps)

    if name == "stablehlo.slice":
        return _sliced(place.value, known(0))
    if name in ("stablehlo.transpose", "stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        return _moved(place.value, known(0))
    if name == "stablehlo.convert":
        return _converted(known(0), aval.dtype)
    if not is_computed_as_numbers(name, aval.dtype):
        return None
    if name in _OF_ONE:
        return _converted(_mapped(known(0), _OF_ONE[name]), aval.dtype)
    if name == "stablehlo.compare":
        direction = next(d for d in _COMPARISONS if d in str(op.attributes["comparison_direction"]))
        return _compared(known(0), known(1), direction)
    if name == "stablehlo.select":
        return _selected(known(0), known(1), known(2))
    if name in _ARITHMETIC:
        return _converted(_combined(known(0), known(1), name), aval.dtype)
    return None


def is_computed_as_numbers(name: str, dtype: Any) -> bool:
    """Whether an operation has the result that it has for numbers: no bits, no wrapping around."""
    if name in ("stablehlo.and", "stablehlo.or", "stablehlo.not"):
        return bool(dtype == np.bool_)
    if name == "stablehlo.divide":
        return bool(jnp.issubdtype(dtype, jnp.floating))
    can_wrap = jnp.issubdtype(dtype, jnp.unsignedinteger)
    return not (can_wrap and name in {*_ARITHMETIC, *_OF_ONE})


def _mapped(x: Symbol, function: Callable[[float], float]) -> Symbol:
    if isinstance(x, Step):
        return x.map(function)
    return Line(x.slopes, function(x.constant)) if x is not None and x.is_number else None


def _converted(x: Symbol, dtype: Any) -> Symbol:
    if isinstance(x, Line) and not x.is_number:
        return x if _is_exact(dtype) else None
    return _mapped(x, functools.partial(rounded, dtype))


def rounded(dtype: Any, x: float) -> float:
    """A number after it is converted to a dtype."""
    with np.errstate(all="ignore"):
        return float(np.asarray(x).astype(dtype))


def _is_exact(dtype: Any) -> bool:
    """Whether a dtype represents all indices of arrays of ordinary sizes, and their differences."""
    return bool(dtype.itemsize >= 4 and not jnp.issubdtype(dtype, jnp.unsignedinteger))


def _on_line(x: Symbol, function: Callable[[Line], Line | None]) -> Symbol:
    """`x` with another line."""
    if not isinstance(x, Step):
        return None if x is None else function(x)
    line = function(x.line)
    return None if line is None else dataclasses.replace(x, line=line)


def _moved(value: Any, x: Symbol) -> Symbol:
    """`x` after its dimensions were transposed or repeated to make `value`."""
    dims = range(len(_compat.shape_of(value)))
    before = _compat.before_transpose(value, dims) or _compat.before_broadcast(value, dims)

    def move(line: Line) -> Line | None:
        slopes = [0.0 for _ in dims]
        if before is None and not line.is_number:
            return None
        if before is not None:
            source, places = before
            for d, slope, size in zip(places, line.slopes, _compat.shape_of(source), strict=True):
                if size > 1:
                    slopes[d] = slope
        return Line((*slopes,), line.constant)

    return _on_line(x, move)


def _sliced(value: Any, x: Symbol) -> Symbol:
    slices = _compat.slices_of(value)

    def part(line: Line) -> Line:
        shift = sum(slope * one.start for slope, one in zip(line.slopes, slices, strict=True))
        slopes = (slope * one.step for slope, one in zip(line.slopes, slices, strict=True))
        return Line((*slopes,), line.constant + shift)

    return _on_line(x, part)


def _combined(x: Symbol, y: Symbol, name: str) -> Symbol:
    if x is None or y is None:
        return None
    if isinstance(x, Line) and isinstance(y, Line) and not (x.is_number and y.is_number):
        return _summed(x, y, name)
    function = _ARITHMETIC[name]
    if isinstance(x, Step) and isinstance(y, Step):
        inside, outside = function(x.inside, y.inside), function(x.outside, y.outside)
        return Step(x.line, inside, outside) if x.line == y.line else None
    if isinstance(y, Line) and y.is_number:
        second = y.constant
        return _mapped(x, lambda first: function(first, second))
    if isinstance(x, Line) and x.is_number:
        first = x.constant
        return _mapped(y, lambda second: function(first, second))
    return None


def _summed(x: Line, y: Line, name: str) -> Symbol:
    if name == "stablehlo.subtract":
        return x - y
    if name == "stablehlo.add":
        return x - (Line((0.0,) * len(y.slopes), 0.0) - y)
    return None


def _compared(x: Symbol, y: Symbol, direction: str) -> Symbol:
    if isinstance(y, Step) and not isinstance(x, Step):
        swapped = {"GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}
        return _compared(y, x, swapped.get(direction, direction))
    if x is None or not isinstance(y, Line):
        return None
    test = _COMPARISONS[direction]
    if isinstance(x, Step) or (x.is_number and y.is_number):
        second = y.constant
        return _mapped(x, lambda first: float(test(first, second))) if y.is_number else None
    if not all(n.is_integer() for n in (*(x - y).slopes, (x - y).constant)):
        return None
    one = Line((0.0,) * len(x.slopes), 1.0)
    lines = {"GE": x - y, "GT": x - y - one, "LE": y - x, "LT": y - x - one}
    return Step(lines[direction], 1, 0) if direction in lines else None


def _selected(chosen: Symbol, x: Symbol, y: Symbol) -> Symbol:
    if isinstance(chosen, Line) and chosen.is_number:
        return x if chosen.constant else y
    if not isinstance(chosen, Step):
        return None
    values = [_sides(z, chosen.line) for z in (x, y)]
    if None in values:
        return None
    inside, outside = (values[not side] for side in (chosen.inside, chosen.outside))
    return Step(chosen.line, inside[0], outside[1])  # type: ignore[index]


def _sides(x: Symbol, line: Line) -> tuple[float, float] | None:
    """The numbers that a value is where the line is at least 0, and where it is not."""
    if isinstance(x, Step):
        return (x.inside, x.outside) if x.line == line else None
    return (x.constant, x.constant) if x is not None and x.is_number else None
