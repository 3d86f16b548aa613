"""Pads the operands of matrix products whose rows do not begin at multiples of 16 bytes.

The fast kernels of matrix libraries need that. So the gradient of logits over a vocabulary of
50,257 words runs at a quarter of the speed of 50,264. The padding is zeros, and costs nothing if
XLA fuses it with the operations that compute the operand.

Time on an H100, without and with padding: 16,384 x 50,257 by 50,257 x 768 in bf16 6.4 and 1.5 ms;
its transpose by 16,384 x 768 3.9 and 1.5 ms. With 32,001 instead of 50,257 columns 4.2 and 1.0, 2.5
and 1.0 ms.
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
        ones = [1] * result.ndim
        return [hlo.slice(product, [0] * result.ndim, [*result.shape], ones)]


def find(avals: Sequence[Any], operands: Sequence[Any], dimension_numbers: Any) -> Padding | None:
    """The padding with which all rows of a product are aligned; None if they are.

    Args:
      avals: the types of the operands.
      operands: values of MLIR.
      dimension_numbers: as of `jax.lax.dot_general`.
    """
    contracting, batch = dimension_numbers
    if any(aval.dtype not in _NARROW or aval.ndim < 2 for aval in avals):
        return None
    free = _free(avals, dimension_numbers)
    more = [[0] * aval.ndim for aval in avals]
    result = [0] * (len(batch[0]) + len(free[0]) + len(free[1]))
    for side, aval in enumerate(avals):
        last = _last_in_memory(operands[side], aval.ndim)
        lack = -aval.shape[last] % (_ALIGNED // aval.dtype.itemsize)
        if lack == 0 or last in batch[side]:
            continue
        more[side][last] = lack
        if last in contracting[side]:
            place = [*contracting[side]].index(last)
            more[1 - side][contracting[1 - side][place]] = lack
        else:
            before = len(batch[0]) + (len(free[0]) if side else 0)
            result[before + free[side].index(last)] = lack
    return Padding(*map(tuple, (*more, result))) if any(map(any, more)) else None


def _free(avals: Sequence[Any], dimension_numbers: Any) -> list[list[int]]:
    """The dimensions of each operand that are dimensions of the result but not of the batch."""
    return [
        [d for d in range(aval.ndim) if d not in (*contracting, *batch)]
        for aval, contracting, batch in zip(avals, *dimension_numbers, strict=True)
    ]


def pays(
    padding: Padding, avals: Sequence[Any], operands: Sequence[Any], dimension_numbers: Any
) -> bool:
    """Whether a padded product is expected to be faster on a GPU.

    XLA has to copy an operand that it does not compute by itself, and may have to copy a result
    whose rows were padded. If such a result is larger than the operands, as logits are, the time is
    that of what reads it: kernels need it without padding.
    """
    _, of_right = _free(avals, dimension_numbers)
    columns = math.prod(avals[1].shape[d] for d in of_right)
    flops = 2 * avals[0].size * columns
    sides = zip(operands, avals, (padding.left, padding.right), strict=True)
    copied = sum(aval.size for x, aval, more in sides if any(more) and not _is_fused(x))
    if padding.result[-1:] > (0,):
        inner = math.prod(avals[1].shape[d] for d in dimension_numbers[0][1])
        batch = math.prod(avals[1].shape[d] for d in dimension_numbers[1][1])
        size = avals[0].size // (inner * batch) * avals[1].size // inner
        if size > max(aval.size for aval in avals):
            return False
        copied += size
    nbytes = copied * avals[0].dtype.itemsize
    return bool(flops >= _LEAST_FLOPS and _SAVED * flops >= _COPIED * nbytes)


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
