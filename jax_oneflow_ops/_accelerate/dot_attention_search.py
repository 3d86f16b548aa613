"""Finds dot-product attention in a program, by the lowering rule of its matrix products.

Logits may be scaled by a number and masked, before or after they are widened to float32. Dimensions
may have any order, and there may be several of the batch, none, or heads that share keys. Labels
keep track of them: a dimension of an operand or result is labelled with the dimension of the logits
to which it corresponds, or as features. A reshape may merge two dimensions of the products into one
of the softmax, as in models that compute with groups of heads: these get the labels that follow
those of the dimensions of the logits.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat, _emit
from jax_oneflow_ops._accelerate import exp_sums, softmaxes, symbols
from jax_oneflow_ops._accelerate.dot_attention import (
    OF_KEYS,
    OF_VALUES,
    Attention,
    Form,
    Gradient,
    Labels,
    WithWeights,
    known_in,
)
from jax_oneflow_ops._accelerate.symbols import Place

Found = Attention | Gradient | WithWeights


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product of two values of MLIR, with labels of the dimensions of operands and result."""

    operands: tuple[Any, Any]
    labels: tuple[Labels, Labels]
    result: Labels
    contracted: frozenset[int]
    batch: frozenset[int]

    def free(self, side: int) -> frozenset[int]:
        """The labels that only one operand has."""
        own = {x for x in self.labels[side] if x is not None}
        return frozenset(own - self.contracted - self.batch)


def _is_product(ctx: Any) -> Callable[[Any], bool]:
    """Whether a product made a value."""
    padded = known_in(ctx).padded
    return lambda x: x in padded or _compat.product_of(x) is not None


def _free_dims(rank: int, contracting: Sequence[int], batch: Sequence[int]) -> list[int]:
    return [d for d in range(rank) if d not in (*contracting, *batch)]


def _product_before(
    ctx: Any, value: Any, result: Labels | None, contracted: int
) -> _Product | None:
    """The product that made a value, from the labels of its result and of what it contracts."""
    product = known_in(ctx).padded.get(value) or _compat.product_of(value)
    if product is None or result is None:
        return None
    operands, (contracting, batch) = product
    of_batch, others = result[: len(batch[0])], iter(result[len(batch[0]) :])
    found: list[Labels] = []
    for side, x in enumerate(operands):
        shape = _compat.shape_of(x)
        labels: list[int | None] = [None] * len(shape)
        for d, label in zip(batch[side], of_batch, strict=True):
            labels[d] = label
        for d in _free_dims(len(shape), contracting[side], batch[side]):
            labels[d] = next(others)
        large = [d for d in contracting[side] if shape[d] > 1]
        if len(large) != 1:
            return None
        labels[large[0]] = contracted
        found.append((*labels,))
    left, right = operands
    shared = frozenset(x for x in of_batch if x is not None)
    return _Product((left, right), (found[0], found[1]), result, frozenset([contracted]), shared)


def _product_after(
    operands: tuple[Any, Any], side: int, labels: Labels, dimension_numbers: Any, others: int
) -> _Product | None:
    """A product from the labels of one operand; `others` labels what only the other operand has."""
    contracting, batch = dimension_numbers
    shape = _compat.shape_of(operands[1 - side])
    of_other: list[int | None] = [None] * len(shape)
    for pairs in (contracting, batch):
        for own, other in zip(pairs[side], pairs[1 - side], strict=True):
            of_other[other] = labels[own]
    free = _free_dims(len(shape), contracting[1 - side], batch[1 - side])
    large = [d for d in free if shape[d] > 1]
    if len(large) != 1:
        return None
    of_other[large[0]] = others
    both = (labels, tuple(of_other)) if side == 0 else (tuple(of_other), labels)
    result = [labels[d] for d in batch[side]]
    for one, x in enumerate(operands):
        dims = _free_dims(len(_compat.shape_of(x)), contracting[one], batch[one])
        result += [both[one][d] for d in dims]
    shared, summed = (
        frozenset(labels[d] for d in pairs[side] if labels[d] is not None)
        for pairs in (batch, contracting)
    )
    return _Product(operands, both, tuple(result), summed, shared)


@dataclasses.dataclass(frozen=True)
class _Mask:
    """How logits were masked: by a select, or by adding `bias`; one of the two is set.

    A select keeps those where `condition` is true if `keeps`, else those where it is false. If
    `adds`, a number was added to the others, and 0 to these.
    """

    condition: Place | None
    keeps: bool
    bias: Place | None
    fill: float  # what replaces or is added to what is masked, after all that follows
    dims: tuple[Any, ...]  # for each dimension of `condition` or `bias`, that of the logits
    adds: bool = False

    def queries(self, ctx: Any, keys: int) -> int | None:
        """The dimension of queries if they attend to keys up to their own position, else None."""
        place = self.condition or self.bias
        symbol = symbols.symbol_of(ctx, place) if place else None
        if place is None or not isinstance(symbol, symbols.Step):
            return None
        kept = symbol.map(lambda y: (y == 0) if self.bias else (bool(y) == self.keeps))
        line = kept.line
        if (kept.inside, kept.outside) == (False, True):  # where the line is negative
            line = symbols.Line(tuple(-x for x in line.slopes), -1 - line.constant)
        elif (kept.inside, kept.outside) != (True, False):
            return None
        sizes = _compat.shape_of(place.value)
        axes = zip(self.dims, line.slopes, sizes, strict=True)
        slopes = {d: slope for d, slope, n in axes if slope and n > 1}
        by_key = -slopes.pop(keys, 0.0)
        is_causal = [*slopes.values()] == [by_key] and 0 <= line.constant < by_key
        return next(iter(slopes)) if is_causal else None

    @property
    def gives_means(self) -> bool:
        """Whether rows without keys become means of values, as in kernels, and not NaN."""
        return self.bias is None and math.isfinite(self.fill)

    def is_absorbing(self, dtype: Any) -> bool:
        """Whether sums of logits of a dtype and the fill are the fill, whatever the logits are.

        In float16, sums overflow.
        """
        return dtype == jnp.bfloat16 or (dtype == jnp.float32 and self.fill <= _LOW_IN_F32)

    def source(self, ctx: Any) -> tuple[Any, Labels] | None:
        """What the condition was before it was repeated: a value outside of calls, its labels.

        The value is perhaps a number that is not 0 where the condition is true.
        """
        place, dims = self.condition, [*self.dims]
        found = None
        while place is not None:
            if not place.calls:
                shape = _compat.shape_of(place.value)
                labels = (d if n > 1 else None for d, n in zip(dims, shape, strict=True))
                found = place.value, tuple(labels)
            if inside := place.across_call(ctx):
                place = inside
            elif before := place.before_repeat(dims):
                place, dims = before
            else:
                place = _before_test(ctx, place)
        return found


def _before_test(ctx: Any, place: Place) -> Place | None:
    """What was compared with 0 to make a condition that is true where it is not 0; or None."""
    pair = place.operands("stablehlo.compare")
    if not pair or "NE" not in str(place.value.owner.attributes["comparison_direction"]):
        return None
    return pair[0] if symbols.number(ctx, pair[1]) == 0 else None


@dataclasses.dataclass(frozen=True)
class _Path:
    """What a value was before it was moved, scaled and masked."""

    value: Any
    # The dimension at the end that each dimension of `value` becomes; those that it becomes, if a
    # reshape splits it. If a reshape merges dimensions, these have the numbers rank, rank + 1, ...
    dims: Sequence[int | tuple[int, ...]]
    scale: float
    masks: tuple[_Mask, ...]

    @property
    def labels(self) -> Labels | None:
        """For each dimension, that of the value at the end; None if one is made of several."""
        if any(isinstance(d, tuple) for d in self.dims):
            return None
        dims: Any = zip(self.dims, _compat.shape_of(self.value), strict=True)
        return tuple(d if n > 1 else None for d, n in dims)

    def parts(self, rank: int) -> list[int]:
        """The sizes of the parts of a dimension of the value at the end, if it has parts here."""
        shape: Any = zip(self.dims, _compat.shape_of(self.value), strict=True)
        sizes = {d: n for d, n in shape if not isinstance(d, tuple)}
        return [sizes[d] for d in sorted(sizes) if d >= rank]

    def label_of(self, d: Any, labels: Labels) -> int | None:
        """The label of what a mask's dimension becomes, if `labels` are those at the end."""
        return self.dims.index(d) if isinstance(d, tuple) else labels[d]

    def labels_at_end(self, end: Any) -> Labels | None:
        """The dimension here that each dimension of the value `end` was.

        None if one was merged from several.
        """
        places = dict[int, int]()
        for place, (d, n) in enumerate(zip(self.dims, _compat.shape_of(self.value), strict=True)):
            if isinstance(d, tuple):
                places |= {part: len(self.dims) + i for i, part in enumerate(d)}
            elif n > 1:
                places[d] = place
        shape = _compat.shape_of(end)
        is_known = all(d in places for d, n in enumerate(shape) if n > 1)
        return tuple(map(places.get, range(len(shape)))) if is_known else None


def _moved(value: Any, ends: Callable[[Any], bool]) -> _Path | None:
    """Follows a value back to where `ends` holds, through transpositions and conversions."""
    place, dims = Place(_compat.without_constraints(value)), [*range(len(_compat.shape_of(value)))]
    rank = len(dims)
    while not ends(place.value):
        if (before := place.before_move(dims) or _before_reshape(place, dims, rank)) is None:
            return None
        place, dims = before
    return _Path(place.value, dims, 1, ())


def _scaled(ctx: Any, value: Any, ends: Callable[[Any], bool], fill: float) -> _Path | None:
    """Like `_moved`, but also through factors, and through masks whose fill is at most `fill`."""
    place, dims = Place(_compat.without_constraints(value)), [*range(len(_compat.shape_of(value)))]
    rank, scale = len(dims), 1.0
    masks: list[_Mask] = []
    later: list[Callable[[float], float]] = []  # what changes numbers between here and the end
    for _ in range(_MOST_STEPS):
        if not place.calls and ends(place.value):
            return _Path(place.value, dims, scale, tuple(masks))
        if inside := place.across_call(ctx):
            place = inside
        elif before := place.before_move(dims) or _before_reshape(place, dims, rank):
            later += _rounding(place)
            place, dims = before
        elif factor := _before_factor(ctx, place):
            later += [*_rounding(place), functools.partial(operator.mul, factor[1])]
            place, scale = factor[0], scale * factor[1]
        elif scale > 0 and (masked := _before_mask(ctx, place, tuple(dims), fill / scale)):
            place, mask = masked
            masks.append(dataclasses.replace(mask, fill=_after(later, mask.fill)))
        else:
            break
    return None


def _rounding(place: Place) -> list[Callable[[float], float]]:
    """How a value rounds numbers to its dtype, which may make a low number infinite."""
    aval = _emit.aval_of(place.value)
    return [functools.partial(symbols.rounded, aval.dtype)] if aval else []


def _after(steps: Sequence[Callable[[float], float]], number: float) -> float:
    """A number after steps, of which the last comes first."""
    for step in reversed(steps):
        number = step(number)
    return number


def _before_reshape(place: Place, dims: Sequence[Any], rank: int) -> tuple[Place, list[Any]] | None:
    """What a value was before one of its dimensions was split, or several were merged; or None.

    The value at the end has so many dimensions. Only one may have parts.
    """
    for source in place.operands("stablehlo.reshape"):
        after, before = (_compat.shape_of(x.value) for x in (place, source))
        short, long = sorted((after, before), key=len)
        at = next((i for i, (m, n) in enumerate(zip(short, long, strict=False)) if m != n), None)
        if at is None:
            return None
        count = len(long) - len(short) + 1
        is_one = short[:at] == long[:at] and short[at + 1 :] == long[at + count :]
        if not is_one or min(long[at : at + count]) == 1:
            return None
        if short is after:  # it was merged
            parts = [*range(rank, rank + count)]
            is_first = isinstance(dims[at], int) and not {*parts} & {*dims}
            return (source, [*dims[:at], *parts, *dims[at + 1 :]]) if is_first else None
        own = dims[at : at + count]
        if any(isinstance(d, tuple) for d in dims):
            return None
        return source, [*dims[:at], tuple(own), *dims[at + count :]]
    return None


_MOST_STEPS = 64  # operations between products and softmaxes that are looked at


def _before_factor(ctx: Any, place: Place) -> tuple[Place, float] | None:
    """What was multiplied or divided by a number to make a value, and the factor; or None."""
    pair = place.operands("stablehlo.multiply")
    for x, other in (pair, pair[::-1]) if pair else ():
        if (factor := symbols.number(ctx, other)) is not None:
            return x, factor
    if pair := place.operands("stablehlo.divide"):
        divisor = symbols.number(ctx, pair[1])
        return (pair[0], 1 / divisor) if divisor else None
    return None


def _before_mask(
    ctx: Any, place: Place, dims: tuple[int, ...], fill: float
) -> tuple[Place, _Mask] | None:
    """What was masked to make a value, and the mask; or None."""
    if parts := place.operands("stablehlo.select"):
        condition, first, second = parts
        for keeps, x, other in ((True, first, second), (False, second, first)):
            low = symbols.number(ctx, other)
            if low is not None and (low <= fill < 0 or low == fill == 0):
                own = dims if _compat.shape_of(condition.value) else ()  # one for all elements
                return x, _Mask(condition, keeps, None, low, own)
    if fill < 0 and (difference := place.operands("stablehlo.subtract")):
        x, bias = difference
        mask = _added_mask(ctx, bias, dims, fill, is_subtracted=True)
        return (x, mask) if mask else None
    pair = place.operands("stablehlo.add") if fill < 0 else ()
    for x, bias in (pair, pair[::-1]) if pair else ():
        if mask := _added_mask(ctx, bias, dims, fill):
            return x, mask
        symbol = symbols.symbol_of(ctx, bias)
        if isinstance(symbol, symbols.Step):
            values = sorted((symbol.inside, symbol.outside))
            is_low = values[0] <= fill and values[1] == 0
            return (x, _Mask(None, True, bias, values[0], dims)) if is_low else None
    return None


def _added_mask(
    ctx: Any, place: Place, dims: Sequence[Any], fill: float, *, is_subtracted: bool = False
) -> _Mask | None:
    """The mask that a value is if it is 0 or a number, depending on a condition; or None.

    The value is selected, or computed from the condition, as in `(1 - mask) * -1e9`. `dims` says
    which dimension of the logits each dimension of the value is.
    """
    steps: list[Callable[[float], float]] = [operator.neg] if is_subtracted else []
    for _ in range(_MOST_STEPS):
        if parts := place.operands("stablehlo.select"):
            condition, *others = parts
            numbers = [x for y in others if (x := symbols.number(ctx, y)) is not None]
            return _numbers_as_mask(condition, numbers, steps, dims, fill)
        if (source := place.operands("stablehlo.convert")) and _compat.is_boolean(source[0].value):
            return _numbers_as_mask(source[0], [1.0, 0.0], steps, dims, fill)
        if inside := place.across_call(ctx):
            place = inside
        elif before := place.before_move(dims) or place.before_repeat(dims):
            steps += _rounding(place)
            place, dims = before
        elif source:  # of integers, as `1 - mask` is
            steps += _rounding(place)
            place = source[0]
        elif found := _before_arithmetic(ctx, place):
            steps += [*_rounding(place), found[1]]
            place = found[0]
        else:
            break
    return None


def _before_arithmetic(ctx: Any, place: Place) -> tuple[Place, Callable[[float], float]] | None:
    """What a value was before an operation with a number, and that operation; or None."""
    aval = _emit.aval_of(place.value)
    for name, function in (
        ("stablehlo.multiply", operator.mul),
        ("stablehlo.subtract", operator.sub),
    ):
        if aval is None or not symbols.is_computed_as_numbers(name, aval.dtype):
            return None
        for side, x in enumerate(pair := place.operands(name)):
            if (number := symbols.number(ctx, x)) is not None:
                return pair[1 - side], functools.partial(_applied, function, number, side)
    return None


def _applied(function: Any, number: float, side: int, x: float) -> float:
    result: float = function(x, number) if side else function(number, x)
    return result


def _numbers_as_mask(
    condition: Place,
    numbers: Sequence[float],
    steps: Sequence[Callable[[float], float]],
    dims: Sequence[Any],
    fill: float,
) -> _Mask | None:
    """The mask that adds numbers where a condition is true, and where it is not, after steps."""
    numbers = [_after(steps, x) for x in numbers]
    if len(numbers) != 2 or max(numbers) != 0 or not min(numbers) <= fill:
        return None
    own = (*dims,) if _compat.shape_of(condition.value) else ()
    return _Mask(condition, numbers[0] == 0, None, min(numbers), own, adds=True)


def find(ctx: Any, operands: tuple[Any, Any], numbers: Any) -> Found | None:
    """What a product is a part of: an attention or its gradient, or None.

    `numbers` are the contracting and the batch dimensions.
    """
    found = softmaxes.known_in(ctx)
    for side, x in enumerate(operands):
        if math.prod(_compat.shape_of(x)) not in found.sizes:
            continue
        if path := _moved(x, found.softmaxes.__contains__):
            if (labels := path.labels_at_end(x)) is None:
                return None
            softmax = found.softmaxes[path.value]
            return _with_weights(ctx, operands, side, labels, numbers, softmax)
        if path := _scaled(ctx, x, found.gradients.__contains__, 0):
            gradient = found.gradients[path.value]
            return _gradient(ctx, operands, side, path, numbers, gradient)
    return None


def _with_weights(
    ctx: Any,
    operands: tuple[Any, Any],
    side: int,
    labels: Labels,
    numbers: Any,
    softmax: softmaxes.Softmax,
) -> Attention | WithWeights | None:
    """What the product of weights with `v` or with a cotangent is."""
    (result,) = ctx.avals_out
    product = _product_after(operands, side, labels, numbers, OF_VALUES)
    if product is None:
        return None
    if product.contracted != {softmax.axis}:
        ct, of_ct = operands[1 - side], product.labels[1 - side]
        return WithWeights(softmax, ct, of_ct, product.result, result)
    v, of_v = operands[1 - side], product.labels[1 - side]
    attention = _attention(ctx, softmax, v, of_v, product.result, result.shape)
    return attention if attention and result.dtype == attention.dtype else None


def _attention(
    ctx: Any,
    softmax: softmaxes.Softmax,
    v: Any,
    of_v: Labels,
    result: Labels,
    shape: Sequence[int],  # of the result
) -> Attention | None:
    keys = softmax.axis
    path = _scaled(ctx, softmax.x, _is_product(ctx), _low_of(softmax))
    product = path and _product_before(ctx, path.value, path.labels, OF_KEYS)
    if not path or not product or len(path.masks) > 1 or not 0 < path.scale < math.inf:
        return None
    rank = softmax.aval.ndim
    side = next((s for s in (0, 1) if product.free(s) == {keys}), None)
    if side is None:
        return None
    q, k = product.operands[1 - side], product.operands[side]
    of_q, of_k = product.labels[1 - side], product.labels[side]
    avals: list[Any] = [*map(_emit.aval_of, (q, k, v))]
    if None in avals or len({x.dtype for x in avals}) > 1:
        return None
    features = avals[0].shape[of_q.index(OF_KEYS)]
    is_known = avals[0].dtype.name in exp_sums.NARROW
    is_known &= {*of_v} - {None} == {*product.batch, keys, OF_VALUES}
    if not is_known or avals[2].shape[of_v.index(OF_VALUES)] != features:
        return None
    sizes = (*softmax.aval.shape, *path.parts(rank), features)
    both = [*zip(of_v, avals[2].shape, strict=True), *zip(result, shape, strict=True)]
    if any(d is not None and d >= 0 and sizes[d] != n for d, n in both):
        return None  # heads are merged in another way
    queries, groups = [*product.free(1 - side)], list[int]()
    of_logits = softmax.aval.dtype
    masks: list[tuple[Any, Labels]] = []
    is_causal = False
    for mask in path.masks:
        rows = mask.queries(ctx, keys)
        is_causal = rows is not None and rows in queries and sizes[rows] == sizes[keys]
        if rows is not None and is_causal:
            queries, groups = [rows], [x for x in queries if x != rows]
        elif mask.adds and not mask.is_absorbing(of_logits):
            return None
        elif mask.gives_means and (masked := mask.source(ctx)):
            masks.append(masked)
        else:
            return None
    known = {*product.batch, *queries, *groups, keys}
    if {*result} - {None} != known - {keys} | {OF_VALUES}:
        return None
    if any(not {*labels} <= {*known, None} for _, labels in masks):
        return None  # a mask of merged dimensions
    batch = sorted(product.batch)
    heads = batch.pop() if len(batch) > 1 else None
    form = Form(
        of_q,
        of_k,
        of_v,
        result,
        sizes,
        batch=(*batch,),
        heads=() if heads is None else (heads,),
        groups=(*sorted(groups),),
        queries=(*sorted(queries),),
        keys=keys,
        scale=path.scale,
        is_causal=is_causal,
        mask=masks[0][1] if masks else None,
        keeps=not masks or path.masks[0].keeps,
        adds=bool(masks) and path.masks[0].adds,
    )
    return Attention(form, (q, k, v, *(value for value, _ in masks)), softmax)


_LOW = -1e8  # logits that are masked are at most this, or the least number of their dtype
_LOW_IN_F32 = -1e10  # if it is added, logits of up to 512 do not matter


def _low_of(softmax: softmaxes.Softmax) -> float:
    least = float(jnp.finfo(softmax.aval.dtype).min)
    return max(_LOW, least)


def _gradient(
    ctx: Any,
    operands: tuple[Any, Any],
    side: int,
    path: _Path,
    numbers: Any,
    gradient: softmaxes.Gradient,
) -> Gradient | None:
    """Which gradient the product of a gradient of logits with `k` or `q` is."""
    softmax = gradient.softmax
    from_ct = _moved(gradient.ct, _is_product(ctx))
    before = from_ct and _product_before(ctx, from_ct.value, from_ct.labels, OF_VALUES)
    labels = path.labels_at_end(operands[side])
    product = labels and _product_after(operands, side, labels, numbers, OF_KEYS)
    if not before or not labels or not product:
        return None
    place = next((s for s in (0, 1) if before.free(s) == {softmax.axis}), None)
    if place is None:
        return None
    v, of_v = before.operands[place], before.labels[place]
    ct, of_ct = before.operands[1 - place], before.labels[1 - place]
    attention = known_in(ctx).attention(softmax)
    if attention is None or attention.operands[2] != v:
        attention = _attention(ctx, softmax, v, of_v, of_ct, _compat.shape_of(ct))
    if attention is None or not math.isclose(path.scale, attention.form.scale, rel_tol=1e-6):
        return None
    form, other = attention.form, (operands[1 - side], product.labels[1 - side])
    # Without a select, the gradients of rows without keys are not 0.
    if form.mask is not None and form.adds == bool(path.masks):
        return None
    for mask in path.masks:  # of gradients that are 0 anyway, if it is the mask of the logits
        dims = tuple(d if d is None else path.label_of(d, labels) for d in mask.dims)
        own = dataclasses.replace(mask, dims=dims)
        if form.is_causal:
            is_same = (own.queries(ctx, form.keys),) == form.queries
        elif form.mask is not None:
            masked = (attention.operands[3], form.mask), form.keeps
            is_same = (own.source(ctx), own.keeps) == masked
        else:
            is_same = False
        if not is_same:
            return None
    aval = _emit.aval_of(ct)
    if {*form.result} != {*of_ct} or aval is None or aval.dtype != attention.dtype:
        return None
    summed = {*form.queries, *form.groups}
    for operand, *factor, contracted in (
        (0, attention.operands[1], form.k, {softmax.axis}),
        (1, attention.operands[0], form.q, summed),
    ):
        if [*other] == factor and product.contracted == contracted:
            return Gradient(attention, ct, of_ct, operand, product.result, path.value)
    return None


def with_own_masks(ctx: Any, args: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a loop that computes the causal masks which it gets in each step.

    jax computes what is the same in all steps before the loop. In a step, attention is recognised
    only if it is known what masks are, and the numbers that replace logits.
    """
    wide = [i for i in range(_compat.count_constants(params)) if ctx.avals_in[i].ndim > 1]
    found = {i: symbols.symbol_of(ctx, Place(args[i])) for i in wide}
    if not any(isinstance(symbol, symbols.Step) for symbol in found.values()):
        return params
    body, constants = _compat.jaxpr_and_consts(params["jaxpr"])
    avals = [x.aval for x in body.invars]

    def step(*operands: jax.Array) -> Any:
        own = {i: symbols.array_of(x, avals[i].shape, avals[i].dtype) for i, x in found.items()}
        known = [x if own.get(i) is None else own[i] for i, x in enumerate(operands)]
        return jax.core.eval_jaxpr(body, constants, *known)

    inside = (x.aval for eqn in body.eqns for x in eqn.outvars)
    try:
        with _compat.precision_of([*avals, *inside]):
            jaxpr = jax.make_jaxpr(step)(*avals)
    except (_compat.ShardingTypeError, TypeError, ValueError):
        return params  # on a mesh with Explicit axes, masks may be sharded in another way
    return {**params, "jaxpr": _compat.in_place_of(params["jaxpr"], jaxpr)}
