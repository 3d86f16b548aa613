"""Finds the softmax of 16-bit rows and its gradient in programs, and computes each in one kernel.

`jax.nn.softmax` divides exponentials by their sum, and autodiff keeps both of them. Its gradient is
their product with `ct / sum - sum(ct * exponentials / sum**2)`. XLA compiles each of the two to one
kernel, or to two that read the rows again. If 16-bit rows do not begin at multiples of 16 bytes, as
in the attention of a vision transformer over 197 tokens, these kernels run at 14 to 21 % of the
speed of a copy (H100).

The lowering rule of the division finds the softmax. That of the last product finds the gradient,
which is computed from the result of the softmax. If only both together are faster as kernels, the
rule of the product also replaces the softmax. The maximum, the exponentials and their sum remain in
the program if something else reads them. Otherwise XLA removes them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_oneflow_ops import _compat, _emit, _exp_sums, _policy, _rows
from jax_oneflow_ops._compat import operands_of

ONE_KERNEL = "a kernel reads each row once, wherever rows begin"
_LEAST_BYTES = 2**22  # less than this takes a few us either way


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of rows, or its gradient.

    Attributes:
      x: the rows, a value of MLIR.
      axis: the axis along which rows extend.
      exponentials: a value of MLIR.
      ct: the cotangent of the result if this is the gradient, a value of MLIR.
    """

    x: Any
    axis: int
    exponentials: Any
    ct: Any = None

    @property
    def aval(self) -> Any:
        return _emit.aval_of(self.x)

    @property
    def name(self) -> str:
        """The name of the operation in reports."""
        return "softmax" if self.ct is None else "softmax gradient"

    def pays(self, platform: str, device_kind: str | None) -> _policy.Decision | None:
        """The measurement by which kernels are expected to be faster than XLA, or None."""
        if platform != "cuda" or _policy.nbytes(self.aval) < _LEAST_BYTES:
            return None
        passes, implementation = (2, None) if self.ct is None else (5, _policy.WITH_GRADIENT)
        how = {"axis": self.axis, "log": False}
        call = _policy.describe(_rows.softmax_p, [self.aval], implementation, **how)
        decision = _policy.choose(call, platform, device_kind)
        if decision.implementation != "native":
            return None
        native, xla = decision.native_us, decision.xla_us
        if _exp_sums.is_stored(self.x) or native is None or xla is None:
            return decision
        # XLA has to write the rows for the kernel, which it would otherwise compute as it reads.
        native *= (passes + 2) / passes
        return dataclasses.replace(decision, native_us=native) if native < xla else None

    def keep(self, ctx: Any, results: list[Any]) -> list[Any]:
        """Handles for XLA's results, which the kernel of the gradient may replace later."""
        (quotient,) = results
        _results_in(ctx)[self.exponentials] = quotient
        return _compat.as_handles(results)

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers to calls of kernels."""
        aval = self.aval
        if self.ct is None:
            y = self._forward(ctx)
            _results_in(ctx)[self.exponentials] = y
            return [y]
        y = _results_in(ctx).get(self.exponentials)
        if y is None or not _compat.is_in_current_block(y):
            y = self._forward(ctx)
        elif operands_of(y, "stablehlo.divide"):  # by XLA
            quotient, y = y.owner.operation, self._forward(ctx)
            _compat.replace_result(quotient, y)
        _results_in(ctx)[self.exponentials] = y
        return [_lowering(True, self.axis)(ctx.replace(avals_in=[aval, aval]), y, self.ct)]

    def _forward(self, ctx: Any) -> Any:
        inner = ctx.replace(avals_in=[self.aval], avals_out=[self.aval])
        return _lowering(False, self.axis)(inner, self.x)


def _results_in(ctx: Any) -> dict[Any, Any]:
    """The results of the softmaxes of a program so far, by exponentials."""
    known: dict[Any, Any] = _compat.functions_of_module(ctx).setdefault(Softmax, {})
    return known


@functools.cache
def _lowering(is_gradient: bool, axis: int) -> Callable[..., Any]:
    """The lowering of a call of a kernel: as one function for equal calls in a program."""
    primitive = _rows.softmax_vjp_p if is_gradient else _rows.softmax_p
    how = {"axis": axis, "log": False, "implementation": "native"}
    rule = _compat.lower_plain(jax.jit(functools.partial(primitive.bind, **how)), False)

    def lower(ctx: Any, *values: Any) -> Any:
        results = rule(_compat.with_current_mesh(ctx), *values)
        (result,) = _compat.with_shardings_of_types(ctx, results)
        return result

    return lower


def find(exponentials: Any, divisor: Any) -> Softmax | None:
    """The softmax that a quotient is, or None."""
    parts = operands_of(exponentials, "stablehlo.exponential")
    pair = operands_of(parts[0], "stablehlo.subtract") if parts else ()
    if not pair or (axis := _summed_axis(divisor, exponentials)) is None:
        return None
    x, centre = pair
    aval = _emit.aval_of(x)
    if aval is None or aval.dtype.name not in _exp_sums.NARROW or aval.size == 0:
        return None
    found = _exp_sums.maximum_of(centre, x, axis)
    # If infinite maxima were replaced by 0, rows with infinity would have other results.
    return Softmax(x, axis, exponentials) if found and not found[1] else None


def find_gradient(factors: list[Any]) -> Softmax | None:
    """The gradient of a softmax that a product of two factors is, or None.

    That is `exponentials * (ct / sum - sum(ct * exponentials / sum**2))`.
    """
    for exponentials, other in (factors, factors[::-1]):
        for quotient, rest in _in_either_order(operands_of(other, "stablehlo.add")):
            ct_and_sum = operands_of(quotient, "stablehlo.divide")
            if not ct_and_sum:
                continue
            ct, divisor = ct_and_sum
            softmax = find(exponentials, divisor)
            if softmax and _is_rest(rest, ct, divisor, softmax):
                return dataclasses.replace(softmax, ct=ct)
    return None


def _in_either_order(pair: list[Any]) -> list[list[Any]]:
    return [pair, pair[::-1]] if pair else []


def _is_rest(rest: Any, ct: Any, divisor: Any, softmax: Softmax) -> bool:
    """Whether a value is `-sum(ct * exponentials / divisor**2)` along the axis of rows."""
    if (product := _before_sum(rest, softmax.axis, _shape(ct), negated=True)) is None:
        return False
    product = next(iter(operands_of(product, "stablehlo.convert")), product)
    for scaled, exponentials in _in_either_order(operands_of(product, "stablehlo.multiply")):
        if exponentials != softmax.exponentials:
            continue
        for first, inverse in _in_either_order(operands_of(scaled, "stablehlo.multiply")):
            if first == ct and _is_inverse_square(inverse, divisor):
                return True
    return False


def _is_inverse_square(value: Any, of: Any) -> bool:
    """Whether a value is 1 / of**2, where both may be broadcast."""
    parts = operands_of(_before_broadcasts(value), "stablehlo.divide")
    if not parts or _compat.fill_of(parts[0]) != "1.000000e+00":
        return False
    squared = [*map(_before_broadcasts, operands_of(parts[1], "stablehlo.multiply"))]
    return squared == [_before_broadcasts(of)] * 2


def _before_broadcasts(value: Any) -> Any:
    while source := operands_of(value, "stablehlo.broadcast_in_dim"):
        (value,) = source
    return value


def _summed_axis(value: Any, summed: Any) -> int | None:
    """The axis along which `value` repeats the sums of `summed`, perhaps widened; or None."""
    shape = _shape(summed)
    for axis in range(len(shape)):
        source = _before_sum(value, axis, shape)
        if source is not None and summed in (source, *operands_of(source, "stablehlo.convert")):
            return axis
    return None


def _shape(value: Any) -> list[int]:
    return [*_compat.ir.ShapedType(value.type).shape]


def _before_sum(value: Any, axis: int, shape: list[int], *, negated: bool = False) -> Any:
    """What of this shape was summed along an axis to make a value, or None.

    The value repeats the sums along the axis, or has size 1 there, and is negative if `negated`.
    """
    places = [*range(len(shape))]
    while True:
        if before := _compat.before_broadcast(value, places):
            value, places = before
        elif source := operands_of(value, "stablehlo.convert"):
            (value,) = source
        elif negated and (source := operands_of(value, "stablehlo.negate")):
            (value,), negated = source, False
        elif (summed := _compat.before_sum(value)) is None:
            return None
        else:
            source, axes = summed
            whole = _shape(source)
            if all(whole[a] == 1 for a in axes):  # jax makes these when it transposes broadcasts
                value, places = source, _with_places(places, axes)
            elif axes == [axis] and whole == shape and not negated:
                rows = [place for place in range(len(shape)) if place != axis]
                is_same = (shape[r] == 1 or p == r for p, r in zip(places, rows, strict=True))
                return source if all(is_same) else None
            else:
                return None


def _with_places(places: list[int], axes: list[int]) -> list[int]:
    """The places with any number, such as 0, for dimensions of size 1 that were summed."""
    kept = iter(places)
    return [0 if a in axes else next(kept) for a in range(len(places) + len(axes))]
