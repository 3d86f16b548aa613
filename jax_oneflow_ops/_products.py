"""Pads the operands of matrix products whose rows do not begin at multiples of 16 bytes.

The fast kernels of matrix libraries need that. The padding is zeros, and costs nothing if XLA fuses
it with the operations that compute the operand.

Time on an H100 of a cross entropy over 50,257 words and its gradient, 16,384 tokens of 768 columns,
in bf16:

    table of words               XLA        with sums of exponentials   and with padding
    (50257, 768), as in a GPT-2  16.2 ms    13.4 ms                     7.1 ms
    (768, 50257), a dense layer  23.2 ms    20.5 ms                     7.3 ms

The three products alone take 11.7 and 18.6 ms without padding, and 4.9 and 5.1 ms with it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_oneflow_ops import _compat, _emit
from jax_oneflow_ops._compat import hlo

PADDED = "padded, so that rows begin at multiples of 16 bytes, which fast matrix products need"
_ALIGNED = 16  # bytes
_LEAST_FLOPS = 2**36  # such a product takes about 0.3 ms without padding
# The time that padding saves for each operation, and twice the time that a byte takes if XLA has to
# copy the operand, in seconds on an H100.
_SAVED, _COPIED = 2.7e-15, 2 * 2 / 3e12
_NARROW = (jnp.float16, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Padding:
    """What is added at the end of dimensions: of the left and right operand and of the result."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]

    def lower(
        self, rule: _compat.Lowering, ctx: Any, left: Any, right: Any, **params: Any
    ) -> list[Any]:
        """Lowers the product by JAX's rule."""
        sides = zip((left, right), ctx.avals_in, (self.left, self.right), strict=True)
        operands = [_emit.pad(_emit.Array(*one), more) for *one, more in sides]
        (result,) = ctx.avals_out
        whole = result.update(shape=_longer(result.shape, self.result))
        avals = [aval.update(shape=x.shape) for x, aval in zip(operands, ctx.avals_in, strict=True)]
        inner = ctx.replace(avals_in=avals, avals_out=[whole])
        (product,) = rule(inner, *(x.value for x in operands), **params)
        if whole.shape == result.shape:
            return [product]
        *others, columns = self.result
        with_rows = columns and not any(others) and _compat.is_for_one_device(ctx)
        if with_rows:  # what reads whole rows finds neither a maximum nor an exponential there
            product = _emit.with_lowest_at_end(_emit.Array(product, whole), columns).value
        ones = [1] * result.ndim
        part = hlo.slice(product, [0] * result.ndim, [*result.shape], ones)
        if with_rows:
            _padded_in(ctx)[part] = product
        return [part]


def _padded_in(ctx: Any) -> dict[Any, Any]:
    """The padded results of a program so far, by the parts of them without padding."""
    known: dict[Any, Any] = _compat.functions_of_module(ctx).setdefault(Padding, {})
    return known


def with_padding(ctx: Any, x: Any) -> Any:
    """Whole rows of a product, if x is all of them but the padding, negative infinity; else x."""
    return _padded_in(ctx).get(x, x)


def find(
    avals: Sequence[Any],
    operands: Sequence[Any],
    dimension_numbers: Any,
    *,
    may_be_divided: bool = False,
) -> Padding | None:
    """The padding with which rows of a product are aligned; None if they are.

    Args:
      avals: the types of the operands.
      operands: values of MLIR.
      dimension_numbers: as of `jax.lax.dot_general`.
      may_be_divided: whether dimensions may be divided among devices. Then only odd ones, which are
        not divided, are padded.
    """
    contracting, batch = dimension_numbers
    if any(aval.dtype not in _NARROW or aval.ndim < 2 for aval in avals):
        return None
    free = _free(avals, dimension_numbers)
    last = [_last_in_memory(x, aval.ndim) for x, aval in zip(operands, avals, strict=True)]
    wanted = [*enumerate(last)]
    if any(free):  # also the last dimension of the result
        side = 1 if free[1] else 0
        wanted.append((side, free[side][-1]))
    more = [[0] * aval.ndim for aval in avals]
    result = [0] * (len(batch[0]) + len(free[0]) + len(free[1]))
    for side, d in wanted:
        size = avals[side].shape[d]
        lack = -size % (_ALIGNED // avals[side].dtype.itemsize)
        if lack == 0 or d in batch[side] or (may_be_divided and size % 2 == 0):
            continue
        more[side][d] = lack
        if d in contracting[side]:
            place = [*contracting[side]].index(d)
            more[1 - side][contracting[1 - side][place]] = lack
        else:
            before = len(batch[0]) + (len(free[0]) if side else 0)
            result[before + free[side].index(d)] = lack
    return Padding(*map(tuple, (*more, result))) if any(map(any, more)) else None


def _free(avals: Sequence[Any], dimension_numbers: Any) -> list[list[int]]:
    """The dimensions of each operand that are dimensions of the result but not of the batch."""
    return [
        [d for d in range(aval.ndim) if d not in (*contracting, *batch)]
        for aval, contracting, batch in zip(avals, *dimension_numbers, strict=True)
    ]


def pays(
    padding: Padding,
    avals: Sequence[Any],
    operands: Sequence[Any],
    dimension_numbers: Any,
    devices: int,
) -> bool:
    """Whether a padded product is expected to be faster on GPUs that share the work.

    XLA has to copy an operand that it does not compute by itself. It also copies a result whose
    rows were padded, such as the gradient of a table, but not one that is larger than the operands,
    such as logits: operations on all of its elements follow, which read it without the padding.
    """
    flops, size = _work(avals, dimension_numbers)
    sides = zip(operands, avals, (padding.left, padding.right), strict=True)
    copied = sum(aval.size for x, aval, more in sides if any(more) and not _is_fused(x))
    if padding.result[-1:] > (0,) and size <= max(aval.size for aval in avals):
        copied += size
    nbytes = copied * avals[0].dtype.itemsize
    return flops >= _LEAST_FLOPS * devices and _SAVED * flops >= _COPIED * nbytes


def _work(avals: Sequence[Any], dimension_numbers: Any) -> tuple[int, int]:
    """The floating-point operations of a product, and the size of its result."""
    _, of_right = _free(avals, dimension_numbers)
    columns = math.prod(avals[1].shape[d] for d in of_right)
    depth = math.prod(avals[0].shape[d] for d in dimension_numbers[0][0])
    multiplied = int(avals[0].size) * columns
    return 2 * multiplied, multiplied // max(depth, 1)


def _last_in_memory(operand: Any, rank: int) -> int:
    """The dimension whose elements are adjacent: matrix products read transposed operands."""
    order = _compat.order_of_transpose(operand)
    return order.index(rank - 1) if order else rank - 1


def _is_fused(operand: Any) -> bool:
    """Whether XLA computes an operand in a loop over its elements, which can write the padding."""
    source = next(iter(_compat.operands_of(operand, "stablehlo.transpose")), operand)
    return bool(_compat.operands_of(source, *_ELEMENTWISE))


_ELEMENTWISE = (
    *("stablehlo.add", "stablehlo.subtract", "stablehlo.multiply", "stablehlo.divide"),
    *("stablehlo.negate", "stablehlo.select", "stablehlo.convert", "stablehlo.exponential"),
)


def _longer(shape: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(n + k for n, k in zip(shape, more, strict=True))
