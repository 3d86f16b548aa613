"""Finds sums of exponentials of rows, of which a program reads the rows twice.

`logsumexp`, and so cross entropy, subtracts the maximum of a row before the exponential. XLA reads
the row for the maximum and again for the sum. The kernel of `logsumexp` reads it once and returns
both.

A lowering rule sees the sum after the maximum was lowered. So the kernel's call is moved to where
the maximum was computed, and replaces it, too: the gradient reads both. Maxima are lowered to
handles, so that it also replaces them in what is lowered later.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops import _compat, _emit, _policy, _rows
from jax_oneflow_ops._accelerate import explanation, products
from jax_oneflow_ops._compat import operands_of

NAME = "sum of exp"  # of the operation in reports
READS_ONCE = "reads each row once for its maximum and the sum"
NARROW = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ExpSum:
    """The sum of exp(x - m) along an axis, where m is the maximum, or 0 where that is infinite.

    Attributes:
      x: a value of MLIR.
      axis: the axis of x.
      maximum: the operation that computes the maxima.
      is_finite: whether m is 0 where the maximum is infinite; else m is infinite there.
      part: the rows that the program sums, if these are not all: the slice along each dimension.
    """

    x: Any
    axis: int
    maximum: Any
    is_finite: bool
    part: tuple[slice, ...] | None = None

    @property
    def aval(self) -> Any:
        return _emit.aval_of(self.x)

    @property
    def summed(self) -> Any:
        """The type of the rows that the program sums."""
        if self.part is None:
            return self.aval
        return self.aval.update(shape=tuple(x.stop - x.start for x in self.part))

    def pays(self, ctx: Any, platform: str) -> _policy.Decision | None:
        """The measurement by which the kernel is expected to be faster than XLA, or None."""
        x = self._padded(ctx)
        is_read = x != self.x or is_stored(x)
        is_long = self.is_finite or self.aval.shape[self.axis] > _SHORT
        is_large = _policy.nbytes(self.aval) >= _LEAST_BYTES
        if platform != "cuda" or not (is_read and is_long and is_large):
            return None
        call = _policy.describe(_rows.logsumexp_p, [self.aval], axis=self.axis)
        decision = _policy.choose(call, platform, explanation.device_kind(platform))
        return decision if decision.implementation == "native" else None

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers maximum and sum to one call, and returns the sum."""
        (rows,) = ctx.avals_out
        how: dict[str, Any] = {"axis": self.axis, "is_finite": self.is_finite, "part": self.part}
        function = functools.partial(_maximum_and_sum, dtype=rows.dtype, **how)
        rule, x = _compat.lower_plain(function, True), self._padded(ctx)
        inner = ctx.replace(avals_in=[_emit.aval_of(x)], avals_out=[rows, rows])
        maximum, total = rule(_compat.with_current_mesh(inner), x)
        _compat.move_before(self.maximum, total)
        _compat.replace_result(self.maximum, maximum)
        return [total]

    def _padded(self, ctx: Any) -> Any:
        """The rows, with padding that changes no maximum and no sum if a product has such."""
        is_last = self.axis == self.aval.ndim - 1
        return products.with_padding(ctx, self.x) if is_last else self.x


_STORED = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call")


def is_stored(x: Any) -> bool:
    """Whether XLA stores a value: kernels of their own compute it, or the program gets it.

    Other operations, such as a product with a scale, XLA fuses into its passes over the rows.
    """
    return bool(operands_of(x, *_STORED)) or _compat.is_argument_of_program(x) or _has_bias(x)


def _has_bias(x: Any) -> bool:
    """Whether a value is a matrix product and a bias for each column, which its kernel adds."""
    pair = operands_of(x, "stablehlo.add")
    for product, bias in (pair, pair[::-1]) if pair else ():
        if operands_of(product, "stablehlo.dot_general"):
            places = [*range(len(_compat.shape_of(bias)))]
            while before := _compat.before_broadcast(bias, places):
                bias, places = before
            sizes = _compat.shape_of(bias)
            large = [place for place, n in zip(places, sizes, strict=True) if n > 1]
            return large == [len(_compat.shape_of(x)) - 1]
    return False


# XLA reads rows of a softmax up to this length once, and computes the softmax in the same kernel.
# With the kernel of sums, softmax of f32 took 1.1 times as long as XLA's with 16,384 elements in a
# row, and 1.5 times with 8192; with 20,000 and more 0.8 times, and 0.7 to 0.8 times in bf16. Sums
# alone took half to 0.6 times as long as XLA's for all rows from 1000 to 128,256 elements (H100).
_SHORT = 2**14
_LEAST_BYTES = 2**22  # less than this takes a few us either way
# Rows that are read for each row that is summed, at most. A slice, as in `logits[:, :-1]`, is not
# stored, so the kernel reads all rows. A step of a cross entropy over 50,304 words, with a bias,
# takes 3.8 ms for 1023 of 1024 rows, and 3.5 ms for all (H200).
_MOST_READ = 1.25


def _maximum_and_sum(
    x: jax.Array, *, axis: int, is_finite: bool, part: tuple[slice, ...] | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    target = "jof_exp_sum"
    types = [jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :], 2), dtype)]
    if parts := _rows.parts_of_slices("cuda", x, axis, 1):
        target, types = _rows.split(target), [*types, parts]
    result, *_ = jax.ffi.ffi_call(target, types)(x, axis=np.int64(axis))
    if part is not None:
        result = result[*part[:axis], *part[axis + 1 :]]
    largest, total = result[..., 0], result[..., 1]
    largest = lax.select(total != total, total, largest)  # NaN if a value is
    if not is_finite:  # the program subtracts infinity from infinity
        total = lax.select(lax.is_finite(largest), total, jnp.full_like(total, jnp.nan))
    return largest, total


def find(ctx: Any, operand: Any, axes: Sequence[int]) -> ExpSum | None:
    """The sum of exponentials that a sum over `axes` computes; None if it does something else.

    None also where the partitioner shards arrays, as the kernel needs whole rows.
    """
    found = operands_of(operand, "stablehlo.exponential")
    parts = operands_of(found[0], "stablehlo.subtract") if found else ()
    if not parts or len(axes) != 1 or not _compat.knows_shapes_of_shards(ctx):
        return None
    (axis,), (wide, centre) = axes, parts
    of_wide, (total,) = _emit.aval_of(wide), ctx.avals_out
    if of_wide is None or of_wide.dtype not in (jnp.float32, jnp.float64) or of_wide.size == 0:
        return None
    if (maximum := maximum_of(centre, wide, axis)) is None or total.dtype != of_wide.dtype:
        return None
    rows = _before_widening(wide)
    part = None
    for source in operands_of(rows, "stablehlo.slice"):
        slices, whole = _compat.slices_of(rows), _compat.shape_of(source)
        has_all = whole[axis] == of_wide.shape[axis] and {x.step for x in slices} == {1}
        if has_all and math.prod(whole) <= _MOST_READ * of_wide.size:
            rows, part = _before_widening(source), (*slices,)
    return ExpSum(rows, axis, *maximum, part)


def _before_widening(x: Any) -> Any:
    """What 16-bit rows were before they were converted to float32, else the rows."""
    source = next(iter(operands_of(x, "stablehlo.convert")), x)
    before, after = _emit.aval_of(source), _emit.aval_of(x)
    is_widened = before and before.dtype.name in NARROW and after and after.dtype == jnp.float32
    return source if is_widened else x


def maximum_of(
    centre: Any, x: Any, axis: int, *, of_transposed: bool = False
) -> tuple[Any, bool] | None:
    """The operation that computes the maxima of x that `centre` repeats along an axis, or None.

    Also returns whether `centre` is 0 where they are infinite. With `of_transposed`, the operation
    may also compute them from what x is a transposition of.
    """
    value, is_finite = centre, False
    shape = _compat.shape_of(centre)
    places = [*range(len(shape))]
    while not operands_of(value, "stablehlo.reduce"):
        pair = operands_of(value, "stablehlo.maximum")
        lowest = [y for y in pair if _is_lowest(y)]
        if before := _compat.before_broadcast(value, places) or _compat.before_transpose(
            value, places
        ):
            value, places = before
        elif chosen := operands_of(value, "stablehlo.select"):
            tested, value, other = chosen
            if operands_of(tested, "stablehlo.is_finite") != [value]:
                return None
            if _compat.fill_of(other) != "0.000000e+00":
                return None
            is_finite = True
        elif len(lowest) == 1:  # jnp.max starts from it
            value = next(y for y in pair if y != lowest[0])
        else:
            return None
    if (found := _compat.maximum_along(value)) is None:
        return None
    source, summed = found
    places.insert(summed, axis)
    own = [*range(len(shape))]
    while x != source:
        if not of_transposed or (before := _compat.before_transpose(x, own)) is None:
            return None
        x, own = before
    # Broadcasts may leave places of dimensions of size 1 wrong.
    are_same = own[summed] == axis and all(
        n == 1 or a == b for n, a, b in zip(_compat.shape_of(x), own, places, strict=True)
    )
    return (value.owner.operation, is_finite) if are_same else None


def _is_lowest(value: Any) -> bool:
    """Whether a value is negative infinity, perhaps repeated and rounded."""
    while before := operands_of(value, "stablehlo.broadcast_in_dim", "stablehlo.convert"):
        (value,) = before
    return _compat.fill_of(value) in _compat.LOWEST
