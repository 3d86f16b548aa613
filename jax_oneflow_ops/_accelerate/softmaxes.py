"""Finds the softmax of 16-bit rows and its gradient in programs, and computes each in one kernel.

`jax.nn.softmax` divides exponentials by their sum, and autodiff keeps both of them. Its gradient is
their product with `ct / sum - sum(ct * exponentials / sum**2)`. XLA computes the softmax in one
kernel, and both together in two to four. On an H100 the two took 1.0 to 1.1 times as long as native
kernels for rows of 64, 200 and 256 elements, 1.4 to 2.2 times for most others, and up to 6.6 times
if rows do not begin at multiples of 16 bytes, as in the attention of a vision transformer over 197
tokens.

The lowering rule of `div` finds the softmax. That of `mul` finds the gradient, which is computed
from the result of the softmax. Kernels may be faster only for both together: then the rule of `mul`
also replaces the softmax. The maximum, the exponentials and their sum remain in the program if
something else reads them. Otherwise XLA removes them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_oneflow_ops import _compat, _emit, _policy, _rows
from jax_oneflow_ops._accelerate import exp_sums, explanation
from jax_oneflow_ops._compat import operands_of, shape_of

ONE_KERNEL = "a kernel reads each row once, wherever rows begin"
_DTYPES = (*exp_sums.NARROW, "float32")
_LEAST_BYTES = 2**22  # less than this takes a few us either way


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of rows.

    Attributes:
      x: the rows, a value of MLIR.
      axis: the axis along which rows extend.
      exponentials: a value of MLIR.
    """

    x: Any
    axis: int
    exponentials: Any

    name = "softmax"  # of the operation in reports
    arrays = 2  # that the kernel reads and writes

    @property
    def aval(self) -> Any:
        return _emit.aval_of(self.x)

    @property
    def has_kernel(self) -> bool:
        """Whether kernels compute it. In other dtypes it may be part of an attention."""
        return self.aval.dtype.name in exp_sums.NARROW

    def pays(self, ctx: Any, platform: str) -> _policy.Decision | None:
        """The measurement by which the kernel is expected to be faster than XLA, or None."""
        return self.decision(ctx, platform, None, 2)

    def decision(
        self,
        ctx: Any,
        platform: str,
        implementation: str | None,
        arrays: int,
    ) -> _policy.Decision | None:
        """The decision for a call that reads and writes so many arrays, None if it is for XLA.

        If the partitioner shards the rows, all devices are assumed to have as many.
        """
        sizes, axis = [*self.aval.shape], self.axis
        if others := [d for d in range(len(sizes)) if d != axis]:
            longest = max(others, key=sizes.__getitem__)
            sizes[longest] = -(-sizes[longest] // _compat.count_shards(ctx))
        aval = self.aval.update(shape=(*sizes,))
        is_measured = platform == "cuda" and self.has_kernel
        if not is_measured or _policy.nbytes(aval) < _LEAST_BYTES:
            return None
        how = {"axis": axis, "log": False}
        call = _policy.describe(_rows.softmax_p, [aval], implementation, **how)
        decision = _policy.choose(call, platform, explanation.device_kind(platform))
        if decision.implementation != "native":
            return None
        native, xla = decision.native_us, decision.xla_us
        if exp_sums.is_stored(self.x) or native is None or xla is None:
            return decision
        # XLA computes these rows as it reads them, but has to write them for the kernel. That is
        # estimated to take the kernel's time for as many arrays.
        native *= (arrays + 2) / arrays
        return dataclasses.replace(decision, native_us=native) if native < xla else None

    def keep(self, ctx: Any, results: list[Any]) -> list[Any]:
        """Handles for XLA's results, which the kernel of the gradient may replace later."""
        (quotient,) = results
        handles = _compat.as_handles(results)
        self._is_known_as(ctx, _Result(quotient, True, explanation.line_of(ctx)), handles[0])
        return handles

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers to a call of the kernel."""
        inner = ctx.replace(avals_in=[self.aval], avals_out=[self.aval])
        y = _lowering(_rows.softmax_p, self.axis)(inner, self.x)
        self._is_known_as(ctx, _Result(y, False, explanation.line_of(ctx)), y)
        return [y]

    def _is_known_as(self, ctx: Any, result: "_Result", value: Any) -> None:
        known = known_in(ctx)
        known.results[self.exponentials] = result
        known.softmaxes[_compat.without_constraints(value)] = self
        known.sizes.add(self.aval.size)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of a softmax, with the cotangent of the result, a value of MLIR."""

    softmax: Softmax
    ct: Any

    name = "softmax gradient"
    arrays = 3

    @property
    def aval(self) -> Any:
        return self.softmax.aval

    @property
    def has_kernel(self) -> bool:
        return self.softmax.has_kernel

    def pays(self, ctx: Any, platform: str) -> _policy.Decision | None:
        """The decision for the softmax together with its gradient, which were measured together.

        The times are those of the gradient alone if the softmax is a kernel already.
        """
        both = self.softmax.decision(ctx, platform, _policy.WITH_GRADIENT, 5)
        known = known_in(ctx).results.get(self.softmax.exponentials)
        if both is None or known is None or known.is_by_xla:
            return both
        one = self.softmax.pays(ctx, platform)
        if one is None or one.native_us is None or one.xla_us is None:
            return both
        return dataclasses.replace(
            both,
            native_us=both.native_us and both.native_us - one.native_us,
            xla_us=both.xla_us and both.xla_us - one.xla_us,
        )

    def keep(self, ctx: Any, results: list[Any]) -> list[Any]:
        """XLA's results, which nothing replaces."""
        known_in(ctx).gradients[_compat.without_constraints(results[0])] = self
        return results

    def lower(self, ctx: Any) -> list[Any]:
        """Lowers to a call of the kernel, and to one for the softmax if there is none yet."""
        softmax = self.softmax
        known = known_in(ctx).results.get(softmax.exponentials)
        if known is not None and not _compat.is_in_current_block(known.value):
            known = None
        if known is not None and not known.is_by_xla:
            y = known.value
        else:
            (y,) = softmax.lower(ctx)
            if known is not None:
                _compat.replace_result(known.value.owner.operation, y)
        inner = ctx.replace(avals_in=[self.aval, self.aval], avals_out=[self.aval])
        result = _lowering(_rows.softmax_vjp_p, softmax.axis)(inner, y, self.ct)
        known_in(ctx).gradients[_compat.without_constraints(result)] = self
        return [result]


@dataclasses.dataclass(frozen=True)
class _Result:
    """The result of a softmax, a value of MLIR, and the user's line if the program is explained."""

    value: Any
    is_by_xla: bool
    line: str


@dataclasses.dataclass
class Known:
    """The softmaxes of a program so far: their results by exponentials, and what a value is."""

    results: dict[Any, _Result]
    softmaxes: dict[Any, Softmax]
    gradients: dict[Any, Gradient]
    sizes: set[int]  # of softmaxes


def known_in(ctx: Any) -> Known:
    """What is known of the program in which an operation is lowered."""
    known: Known = _compat.functions_of_module(ctx).setdefault(Known, Known({}, {}, {}, set()))
    return known


@functools.cache
def _lowering(primitive: Any, axis: int) -> Callable[..., Any]:
    """The lowering of a call of a kernel: as one function for equal calls in a program."""
    how = {"axis": axis, "log": False, "implementation": "native"}
    rule = _compat.lower_plain(jax.jit(functools.partial(primitive.bind, **how)), False)

    def lower(ctx: Any, *values: Any) -> Any:
        results = rule(_compat.with_devices(ctx) or ctx, *values)
        (result,) = _compat.with_shardings_of_types(ctx, results)
        return result

    return lower


# ---- finding them ----


def find(exponentials: Any, divisor: Any) -> Softmax | None:
    """The softmax that a quotient is, or None."""
    parts = operands_of(exponentials, "stablehlo.exponential")
    pair = operands_of(parts[0], "stablehlo.subtract") if parts else ()
    if not pair or (axis := _axis_of_sums(divisor, exponentials)) is None:
        return None
    x, centre = pair
    aval = _emit.aval_of(x)
    if aval is None or aval.dtype.name not in _DTYPES or aval.size == 0:
        return None
    found = exp_sums.maximum_of(centre, x, axis, of_transposed=True)
    # If infinite maxima were replaced by 0, rows with infinity would have other results.
    return Softmax(x, axis, exponentials) if found and not found[1] else None


def find_gradient(*factors: Any) -> Gradient | None:
    """The gradient of a softmax that a product of two factors is, or None.

    That is `exponentials * (ct / sum - sum(ct * exponentials / sum**2))`.
    """
    for exponentials, other in _in_either_order(factors):
        for quotient, rest in _in_either_order(operands_of(other, "stablehlo.add")):
            if not (ct_and_sum := operands_of(quotient, "stablehlo.divide")):
                continue
            ct, divisor = ct_and_sum
            softmax = find(exponentials, divisor)
            if softmax and _is_rest(rest, ct, softmax):
                return Gradient(softmax, ct)
    return None


def _in_either_order(pair: Sequence[Any]) -> list[Sequence[Any]]:
    return [pair, pair[::-1]] if pair else []


def _is_rest(rest: Any, ct: Any, softmax: Softmax) -> bool:
    """Whether a value is `-sum(ct * exponentials / sum**2)` along the axis of rows."""
    product, axis = _behind_sum(rest, shape_of(ct), negated=True) or (None, None)
    if axis != softmax.axis:
        return False
    product = _before_rounding(product)
    for scaled, exponentials in _in_either_order(operands_of(product, "stablehlo.multiply")):
        if exponentials != softmax.exponentials:
            continue
        for first, inverse in _in_either_order(operands_of(scaled, "stablehlo.multiply")):
            if first == ct and _is_inverse_square(inverse, softmax):
                return True
    return False


def _is_inverse_square(value: Any, softmax: Softmax) -> bool:
    """Whether a value repeats 1 / sum**2, where sums are those of exponentials."""
    places = [*range(len(shape_of(value)))]
    while before := _compat.before_broadcast(value, places):
        value, places = before
    one, squared = operands_of(value, "stablehlo.divide") or (None, None)
    if one is None or _compat.fill_of(one) != "1.000000e+00":
        return False
    first, second = operands_of(squared, "stablehlo.multiply") or (None, None)
    if first is None or first != second:
        return False
    return _axis_of_sums(first, softmax.exponentials, places) == softmax.axis


def _axis_of_sums(value: Any, of: Any, places: list[int] | None = None) -> int | None:
    """The axis along which a value repeats the sums of `of`, or has size 1; None if it does not."""
    source, axis = _behind_sum(value, shape_of(of), places) or (None, None)
    return axis if source is not None and _before_rounding(source) == of else None


def _behind_sum(
    value: Any, shape: list[int], places: list[int] | None = None, *, negated: bool = False
) -> tuple[Any, int] | None:
    """What of this shape was summed along which axis to make a value; None if nothing was.

    The value repeats the sums along the axis, or has size 1 there, perhaps rounded. It is negative
    if `negated`. `places` says which dimension of `shape` each of its dimensions is.
    """
    places = [*range(len(shape))] if places is None else places
    while True:
        if before := _compat.before_broadcast(value, places):
            value, places = before
        elif (source := _before_rounding(value)) != value:
            value = source
        elif negated and (operands := operands_of(value, "stablehlo.negate")):
            (value,), negated = operands, False
        elif (summed := _compat.before_sum(value)) is None:
            return None
        else:
            source, axes = summed
            whole = shape_of(source)
            if all(whole[a] == 1 for a in axes):
                # jax makes such sums when it transposes broadcasts. Places of dimensions of size 1
                # do not matter.
                kept = iter(places)
                value, places = source, [0 if a in axes else next(kept) for a in range(len(whole))]
            elif len(axes) == 1 and whole == shape and not negated:
                return (source, axes[0]) if _compat.are_rows(places, shape, axes[0]) else None
            else:
                return None


def _before_rounding(value: Any) -> Any:
    """The operand of a conversion between the dtypes of rows and of their sums; else the value."""
    for source in operands_of(value, "stablehlo.convert"):
        kinds = {str(_compat.ir.ShapedType(v.type).element_type) for v in (source, value)}
        if kinds in ({"f16", "f32"}, {"bf16", "f32"}):
            return source
    return value
