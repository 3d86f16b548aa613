"""Pads matrix products whose rows do not begin at multiples of 16 bytes.

The fast kernels of matrix libraries need such rows. Operands are padded with zeros, which costs
nothing if XLA fuses that with the operations that compute the operand. The result loses its padding
in the operations that read it, or in a copy.

Time on an H100 of a cross entropy over 50,257 words and its gradient, 16,384 tokens of 768 columns,
in bf16, and of 8192 tokens in f32:

    table of words                     XLA        with sums of exponentials   and with padding
    bf16 (50257, 768), as in a GPT-2   16.2 ms    13.4 ms                     7.1 ms
    bf16 (768, 50257), a dense layer   23.2 ms    20.5 ms                     7.3 ms
    f32 (50257, 768)                   15.7 ms    -                           7.9 ms, without sums
    f32 (768, 50257)                   19.2 ms    -                           8.2 ms, without sums

The three products alone take 11.7 and 18.6 ms in bf16 without padding, and 4.9 and 5.1 ms with it.
In f32 padding to multiples of 8 elements was up to 6 % faster than to multiples of 4.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_oneflow_ops import _compat, _emit, _policy
from jax_oneflow_ops._accelerate import common
from jax_oneflow_ops._compat import hlo

PADDED = "padded, so that rows begin at multiples of 16 bytes, which fast matrix products need"
_ALIGNED = 16  # bytes
_MULTIPLE = 8  # elements, to which dimensions are padded that are not aligned
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
_LEAST_FLOPS = 2**36  # takes about 0.3 ms without padding
# Seconds on an H100: what padding saved for each floating-point operation of the products above, on
# average (1.8e-15 and 3.6e-15); and what it takes to read and write a byte at 3 TB/s, twice, since
# the gain should exceed the cost clearly.
_SAVED, _COPIED = 2.7e-15, 2 * 2 / 3e12


@dataclasses.dataclass(frozen=True)
class Padding:
    """What is added at the end of dimensions: of the left and right operand and of the result."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Product:
    """A `jax.lax.dot_general` that is being lowered; operands are values of MLIR."""

    ctx: Any
    operands: tuple[Any, Any]
    dimension_numbers: Any
    precision: Any

    @property
    def _is_known(self) -> bool:
        """Whether there are measurements: float32 was measured as TensorFloat-32, the default."""
        first, second = self.ctx.avals_in
        default = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)
        is_plain = first.dtype != jnp.float32 or self.precision in default
        return first.dtype == second.dtype and first.dtype in _DTYPES and is_plain

    @property
    def _free(self) -> list[list[int]]:
        """The dimensions of each operand that are dimensions of the result but not of the batch."""
        return [
            [d for d in range(aval.ndim) if d not in (*contracting, *batch)]
            for aval, contracting, batch in zip(
                self.ctx.avals_in, *self.dimension_numbers, strict=True
            )
        ]

    @property
    def _is_enlarging(self) -> bool:
        """Whether the result is larger than the operands and has no batch, as logits."""
        (result,) = self.ctx.avals_out
        has_batch = any(map(len, self.dimension_numbers[1]))
        return not has_batch and result.size > max(aval.size for aval in self.ctx.avals_in)

    def padding(self, *, may_be_sharded: bool = False) -> Padding | None:
        """The padding with which rows are aligned; None if they are, or for other dtypes.

        The result is padded only if it is larger than the operands: what reads it would copy it
        otherwise. Attention reads it in a kernel.

        Args:
          may_be_sharded: whether dimensions may be sharded. Then only odd ones are padded, as these
            rarely are.
        """
        avals, (contracting, batch), free = self.ctx.avals_in, self.dimension_numbers, self._free
        if not self._is_known or any(aval.ndim < 2 for aval in avals):
            return None
        wanted = [
            (side, _last_in_memory(x, aval.ndim))
            for side, (x, aval) in enumerate(zip(self.operands, avals, strict=True))
        ]
        if self._is_enlarging and any(free):
            side = 1 if free[1] else 0
            wanted.append((side, free[side][-1]))
        more = [[0] * aval.ndim for aval in avals]
        result = [0] * (len(batch[0]) + len(free[0]) + len(free[1]))
        for side, d in wanted:
            size = avals[side].shape[d]
            lack = -size % _MULTIPLE if size * avals[side].dtype.itemsize % _ALIGNED else 0
            if lack == 0 or d in batch[side] or (may_be_sharded and size % 2 == 0):
                continue
            more[side][d] = lack
            if d in contracting[side]:
                place = [*contracting[side]].index(d)
                more[1 - side][contracting[1 - side][place]] = lack
            else:
                before = len(batch[0]) + (len(free[0]) if side else 0)
                result[before + free[side].index(d)] = lack
        return Padding(*map(tuple, (*more, result))) if any(map(any, more)) else None

    def gains_by(self, padding: Padding, devices: int) -> bool:
        """Whether a padded product is expected to be faster on GPUs that share the work.

        XLA copies operands that it does not compute by itself, and results without their padding,
        such as the gradient of a table. It does not copy logits: operations on all of their
        elements follow, which read them without the padding.
        """
        avals, (result,) = self.ctx.avals_in, self.ctx.avals_out
        depth = math.prod(avals[0].shape[d] for d in self.dimension_numbers[0][0])
        flops = 2 * int(result.size) * depth
        copied = [
            aval
            for x, aval, more in zip(
                self.operands, avals, (padding.left, padding.right), strict=True
            )
            if any(more) and not common.is_made_by(self.ctx, x, _WRITE_PADDING)
        ]
        if any(padding.result) and not self._is_enlarging:
            copied.append(result)
        is_large = flops >= _LEAST_FLOPS * devices
        return bool(is_large and _SAVED * flops >= _COPIED * _policy.nbytes(*copied))

    def lower(self, rule: _compat.Lowering, padding: Padding, **params: Any) -> list[Any]:
        """Lowers the product by JAX's rule."""
        ctx = self.ctx
        sides = zip(self.operands, ctx.avals_in, (padding.left, padding.right), strict=True)
        operands = [_emit.pad(_emit.Array(*one), more) for *one, more in sides]
        (result,) = ctx.avals_out
        sizes = [n + k for n, k in zip(result.shape, padding.result, strict=True)]
        whole = result.update(shape=(*sizes,))
        avals = [aval.update(shape=x.shape) for x, aval in zip(operands, ctx.avals_in, strict=True)]
        inner = ctx.replace(avals_in=avals, avals_out=[whole])
        (product,) = rule(inner, *(x.value for x in operands), **params)
        if not any(padding.result):
            return [product]
        *others, columns = padding.result
        is_read = columns > 0 and not any(others) and self._is_enlarging
        if is_read := is_read and _compat.is_for_one_device(ctx):
            product = _emit.with_lowest_at_end(_emit.Array(product, whole), columns).value
        ones = [1] * result.ndim
        part = hlo.slice(product, [0] * result.ndim, [*result.shape], ones)
        if is_read:
            _padded_in(ctx)[part] = product
        return [part]


def _padded_in(ctx: Any) -> dict[Any, Any]:
    """The logits of a program so far, padded with negative infinity, by those without padding."""
    known: dict[Any, Any] = _compat.functions_of_module(ctx).setdefault(Padding, {})
    return known


def with_padding(ctx: Any, x: Any) -> Any:
    """The padded array of which x is the part without padding; x itself if there is none.

    The padding is negative infinity, so that no maximum and no sum of exponentials changes.
    """
    return _padded_in(ctx).get(x, x)


def _last_in_memory(operand: Any, rank: int) -> int:
    """The dimension whose elements are adjacent: matrix products read transposed operands."""
    order = _compat.order_of_transpose(operand)
    return order.index(rank - 1) if order else rank - 1


# XLA computes these in a loop over the elements of the result, which can write the padding.
_WRITE_PADDING = (
    *("add", "subtract", "multiply", "divide", "negate", "select", "convert", "exponential"),
)
