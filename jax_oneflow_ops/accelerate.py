"""Swaps slow operations of unchanged JAX programs for kernels when the programs are lowered."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import math
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_oneflow_ops import (
    _checks,
    _compat,
    _emit,
    _native,
    _policy,
    _reference,
    _scatter,
    _scatter_policy,
    _scatter_rows,
    _search,
)
from jax_oneflow_ops._report import Report, Row, bytes_text

if TYPE_CHECKING:
    from jax_oneflow_ops import _gathers, _grids

F = TypeVar("F", bound=Callable[..., Any])
_PLATFORMS = ("cpu", "cuda")
_ON, _DETERMINISTIC = "on", "deterministic"
# Suffixes of the above: around the call of a function whose chains are fused, and inside of it.
_FUSE, _FUSED = "+fuse", "+fused"
_TAG = "jof_row"  # an attribute of operations in a program that is explained


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """How this package computes one of JAX's scatters."""

    reducer: str = "add"
    negative: bool = False  # negates the updates
    # Operands that need not be passed, as MLIR writes them: one primitive sums into implicit zeros.
    fills: frozenset[str] = frozenset()

    def __call__(
        self,
        operand: jax.Array | None,
        ids: jax.Array,
        updates: jax.Array,
        rows: int,
        how: Any,
        platform: str | None,
    ) -> jax.Array:
        """Reduces `updates` into the rows of `operand`; None stands for `rows` rows of zeros.

        Calls kernels directly, without primitives, if `platform` is given.
        """
        updates = -updates if self.negative else updates
        if platform is not None:
            alone: jax.Array = _scatter.add_rows(
                platform, operand, ids, updates, rows, how["indexing"], self.reducer
            )
            return alone
        args: tuple[Any, ...] = (operand, ids, updates)
        primitive, more = _scatter.scatter_add_p, dict[str, Any]()
        if operand is None:
            primitive, args = _scatter.segment_sum_p, (updates, ids)
            more = {"num_segments": rows, "rows_spec": None}
        elif self.reducer != "add":
            primitive, more = _scatter.scatter_reduce_p, {"reducer": self.reducer}
        result: jax.Array = _emit.bind(primitive, *args, **how, **more)
        return result


_REDUCTIONS: dict[Any, _Reduction] = {
    lax.scatter_add_p: _Reduction(fills=_compat.ZEROS),
    lax.scatter_sub_p: _Reduction(negative=True, fills=_compat.ZEROS),
    lax.scatter_max_p: _Reduction("max"),
    lax.scatter_min_p: _Reduction("min"),
    lax.scatter_mul_p: _Reduction("multiply"),
}
"""The scatters that are swapped. To swap another one, add a line."""


@dataclasses.dataclass
class _Explanation:
    """What `explain` collects while a program is lowered."""

    device_kind: str | None
    rows: list[tuple[Row, Any]]  # with the key that finds it in the traced program
    # The numbers of those that sum gathered rows without an array of them.
    messages: set[int] = dataclasses.field(default_factory=set)

    def add(self, row: Row, primitive: Any, ctx: Any, result: Any) -> None:
        """Adds a row, and tags the operation that made `result`, a value of MLIR, with its number.

        The row's line is that of `ctx`. What the program does not contain in the end is not
        reported.
        """
        _compat.tag(result, _TAG, str(len(self.rows)))
        row = dataclasses.replace(row, line=_compat.user_line(ctx.traceback))
        self.rows.append((row, _key(primitive, ctx.avals_in)))


_explanation: contextvars.ContextVar[_Explanation | None] = contextvars.ContextVar(
    "explanation", default=None
)


def _device_kind(platform: str) -> str | None:
    """The kind of device that a program is lowered for, or explained for."""
    explanation = _explanation.get()
    return explanation.device_kind if explanation else _policy.device_kind(platform)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """How a scatter is lowered."""

    reason: str
    rows: _scatter_rows.Rows | None = None  # if it is swapped
    decision: _policy.Decision | None = None
    message: "_gathers.Message | None" = None  # if it sums gathered rows without storing them
    grid: "_grids.Grid | None" = None  # if it also does the sum that made its updates
    in_f32: bool = False  # if XLA computes it in float32
    selected: _scatter_rows.Rows | None = None  # if XLA selects single updates


def _mode(ctx: Any) -> str | None:
    """The mode of the scope in which an operation was traced; None outside of scopes."""
    scope = _compat.scope_of(ctx)
    return scope and scope.partition("+")[0]


def _replacement(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The new lowering rule of `primitive`, in place of `rule`."""
    reduction = _REDUCTIONS[primitive]

    def lower(ctx: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
        scope = _mode(ctx)
        if scope not in (_ON, _DETERMINISTIC):
            return rule(ctx, operand, indices, updates, **params)
        is_fresh = _compat.fill_of(operand) in reduction.fills
        deterministic = scope == _DETERMINISTIC
        args = ctx, operand, indices, updates
        scatter = platform, ctx, updates, params
        grid = _grid(reduction, platform, *args, params) if is_fresh else None
        if grid is not None:
            choice = _Choice(_IN_ONE_PASS, grid.second.rows, grid=grid)
        else:
            choice = _choose(reduction, *scatter, is_fresh, deterministic)
        if choice.selected is not None:
            one = _same(_selected, rows=choice.selected, negative=reduction.negative)
            results = _lower(one, *args)
        elif choice.in_f32:
            results = _in_f32(rule, lax.sub if reduction.negative else lax.add, *args, **params)
        elif choice.rows is None:
            results = rule(*args, **params)
        elif choice.grid is not None:
            _compat.untag(choice.grid.between, _TAG)
            results = choice.grid.lower(ctx)
        elif choice.message is not None:
            (inner, _, ids, _), read = _as_written(choice.rows, is_fresh, *args)
            results = choice.message.lower(inner, ids, platform, read)
        else:
            how: dict[str, Any] = {
                "rows": choice.rows,
                "reduction": reduction,
                "is_fresh": is_fresh,
                "deterministic": deterministic,
                "platform": platform,
            }
            if _is_emitted(ctx):
                alone = _compat.is_for_one_device(ctx)
                if alone:
                    args, how["read"] = _as_written(choice.rows, is_fresh, *args)
                results = _emit.lower(_reduce, *args, alone=alone, **how)
                if alone and is_fresh and reduction == _REDUCTIONS[lax.scatter_add_p]:
                    known = _compat.functions_of_module(ctx)
                    known[_SUM, _compat.callee_of(results[0])] = choice.rows, how["read"]
                results = _compat.with_shardings_of_types(ctx, results)
            else:
                results = _lower(_same(_reduce, alone=False, **how), *args)
        if explanation := _explanation.get():
            decision, swapped = choice.decision, choice.rows is not None
            row = _row(primitive.name, ctx.avals_in, swapped, choice.reason, decision)
            if choice.message is not None:
                nbytes = _policy.nbytes(*ctx.avals_in[:2], *choice.message.avals)
                row = dataclasses.replace(row, bytes=nbytes)
                explanation.messages.add(len(explanation.rows))
            if choice.grid is not None:
                nbytes = _policy.nbytes(*ctx.avals_out, choice.grid.aval)
                row = dataclasses.replace(row, bytes=nbytes)
            explanation.add(row, primitive, ctx, results[0])
        return results

    return lower


def _in_f32(
    rule: _compat.Lowering,
    function: Callable[..., Any],
    ctx: Any,
    operand: Any,
    indices: Any,
    updates: Any,
    **params: Any,
) -> Any:
    """Lowers a scatter of 16-bit values to XLA's, with `function` in float32, rounded once.

    XLA's measured times are those of sums widened by hand, which are never much slower.
    """
    f32 = jnp.dtype(jnp.float32)
    narrow, of_ids, of_updates = ctx.avals_in
    result, *_ = ctx.avals_out
    wide, wide_updates, *wide_results = (x.update(dtype=f32) for x in (narrow, of_updates, result))
    scalar = jax.ShapeDtypeStruct((), f32)
    jaxpr = jax.make_jaxpr(function)(scalar, scalar)
    params["update_jaxpr"] = _compat.in_place_of(params["update_jaxpr"], jaxpr)
    operand, updates = (
        _emit.Array(x, aval).astype(f32).value
        for x, aval in ((operand, narrow), (updates, of_updates))
    )
    inner = ctx.replace(avals_in=[wide, of_ids, wide_updates], avals_out=wide_results)
    (sums,) = rule(inner, operand, indices, updates, **params)
    return [_emit.Array(sums, wide).astype(result.dtype).value]


def _is_emitted(ctx: Any) -> bool:
    """Whether a call is written into the program directly, which is faster than tracing it.

    In programs of symbolic sizes or for several platforms, functions need the sizes or the platform
    as arguments, so these calls are traced.
    """
    return ctx.avals_in[1].dtype in (jnp.int32, jnp.int64) and _compat.has_known_sizes(ctx)


_FROM_TABLES = "reads the gathered rows directly from their table, without an array of them"


def _message(
    reduction: _Reduction, rows: _scatter_rows.Rows, ctx: Any, updates: Any
) -> "_gathers.Message | None":
    """The messages that a scatter sums into zeros, if that is what it does."""
    is_sum = reduction.reducer == "add" and not reduction.negative
    source = _compat.without_constraints(updates)
    made = _compat.operands_of(source, *_MAKES_MESSAGES)
    if not is_sum or not made or not _is_emitted(ctx):
        return None
    from jax_oneflow_ops import _gathers  # imported lazily: few programs need it

    return _gathers.message_of(rows, ctx, source)


_IN_ONE_PASS = "sums along two axes in one pass, without the array between them"
_SUM = "sum into zeros"  # the key of functions of a program that compute one


def _grid(
    reduction: _Reduction,
    platform: str,
    ctx: Any,
    operand: Any,
    indices: Any,
    updates: Any,
    params: Any,
) -> "_grids.Grid | None":
    """The sums along two axes whose second step is this scatter, if one kernel computes them."""
    source = _compat.before_empty_sums(updates)
    # What reads the first sum later is not known yet: then that sum is computed, too.
    if _compat.count_uses(source) > (source != updates):
        return None
    updates = source
    before = _compat.functions_of_module(ctx).get((_SUM, _compat.callee_of(updates)))
    is_sum = reduction == _REDUCTIONS[lax.scatter_add_p]
    if before is None or platform != "cuda" or not is_sum or not _compat.is_for_one_device(ctx):
        return None
    rows = _find(ctx.avals_in, params)
    if isinstance(rows, str) or _why_no_kernels(ctx, platform) or not _is_emitted(ctx):
        return None
    from jax_oneflow_ops import _grids  # imported lazily: few programs need it

    (_, _, ids, _), read = _as_written(rows, True, ctx, operand, indices, updates)
    grid = _grids.find(_grids.Sum(rows, read, ids), updates, *before)
    return grid if grid and grid.pays() else None


_MAKES_MESSAGES = tuple(f"stablehlo.{name}" for name in ("gather", "multiply", "select", "reshape"))
"""The operations that `_gathers` looks for."""


def _sums(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of sums over dimensions: dot products of gathered rows, and exponentials of rows."""

    def lower(ctx: Any, operand: Any, **params: Any) -> Any:
        swap, source = None, _compat.without_constraints(operand)
        made = _compat.operands_of(source, *_MAKES_SUMS)
        if made and _mode(ctx) in (_ON, _DETERMINISTIC) and not _why_no_kernels(ctx, platform):
            swap = _swapped_sum(ctx, source, params["axes"], platform)
        if swap is None:
            return rule(ctx, operand, **params)
        found, row = swap
        results = _compat.with_shardings_of_types(ctx, found.lower(ctx))
        if explanation := _explanation.get():
            explanation.add(row, primitive, ctx, results[0])
        return results

    return lower


_EXP_SUM = "sum of exp"  # the name of such an operation in reports
_OF_SOFTMAX = (_EXP_SUM, "softmax", "softmax gradient", "attention", "attention gradient")
"""The names of operations that replace a softmax, a logsumexp, a part of them, or more."""
_MAKES_SUMS = tuple(f"stablehlo.{name}" for name in ("multiply", "convert", "exponential"))
"""The operations whose results `_swapped_sum` looks for."""


def _swapped_sum(ctx: Any, operand: Any, axes: Any, platform: str) -> tuple[Any, Row] | None:
    """What a kernel computes in place of a sum over `axes`, and its row in a report; or None."""
    from jax_oneflow_ops import _exp_sums, _gathers  # imported lazily: few programs need them

    (result,) = ctx.avals_out
    if pair := _gathers.pair_of(ctx, operand, axes):
        if not (_is_asked_for() or pair.pays(platform)):
            return None
        row = _row("reduce_sum", (result, pair.products), True, _FROM_TABLES)
        return pair, dataclasses.replace(row, bytes=_policy.nbytes(result, *pair.avals))
    if (found := _exp_sums.find(ctx, operand, axes)) is None:
        return None
    decision = found.pays(ctx, platform, _device_kind(platform))
    if not (_is_asked_for() or decision):
        return None
    row = _row(_EXP_SUM, (result, found.aval), True, _exp_sums.READS_ONCE, decision)
    return found, dataclasses.replace(row, dtype=found.aval.dtype.name)


def _softmaxes(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of quotients and products: those that are a softmax or its gradient."""
    is_product = primitive is lax.mul_p
    rule = _compat.with_plain_cases(rule)

    def lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        found = None
        pair = [*map(_compat.without_constraints, (x, y))] if _may_change(ctx, platform) else ()
        if any(_compat.operands_of(z, "stablehlo.exponential") for z in pair[: 1 + is_product]):
            from jax_oneflow_ops import _softmaxes  # imported lazily: few programs need it

            if _compat.has_known_sizes(ctx):
                find = _softmaxes.find_gradient if is_product else _softmaxes.find
                found = find(*pair)
        if found is None or _why_no_kernels(ctx, platform):
            return rule(ctx, x, y, **params)
        is_possible = _compat.can_be_sharded(ctx)
        decision = found.pays(ctx, platform, _device_kind(platform)) if is_possible else None
        if not (decision or (is_possible and _is_asked_for() and found.has_kernel)):
            return found.keep(ctx, rule(ctx, x, y, **params))
        results = found.lower(ctx)
        if explanation := _explanation.get():
            row = _row(found.name, [found.aval] * 2, True, _softmaxes.ONE_KERNEL, decision)
            row = dataclasses.replace(row, bytes=found.arrays * _policy.nbytes(found.aval))
            explanation.add(row, primitive, ctx, results[0])
        return results

    return lower


def _may_change(ctx: Any, platform: str) -> bool:
    """Whether an operation is in a scope, on a platform where it may be replaced."""
    is_in_scope = _mode(ctx) in (_ON, _DETERMINISTIC)
    return is_in_scope and (platform == "cuda" or _is_asked_for())


def _products(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of matrix products: finds attention, and pads other products that are slow."""

    def lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        if not (_may_change(ctx, platform) and _compat.has_known_sizes(ctx)):
            return rule(ctx, x, y, **params)
        part = _part_of_attention(ctx, x, y, platform, params)
        if part is None:
            return padded(ctx, x, y, **params)
        found, by = part
        if by is None:
            return found.keep(ctx, padded(ctx, x, y, **params))
        is_called = found.is_called(ctx)
        results = found.lower(ctx, by)
        if (explanation := _explanation.get()) and not is_called:
            for replaced in found.replaced(ctx):
                _compat.untag(replaced, _TAG)
            row = _row(found.name, [found.aval] * 2, True, found.reason)
            row = dataclasses.replace(row, bytes=found.nbytes)
            explanation.add(row, primitive, ctx, results[0])
        return results

    def padded(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        from jax_oneflow_ops import _dot_attention, _products  # lazily: few programs need them

        devices = _compat.count_shards(ctx)
        how = params["dimension_numbers"], params["precision"]
        product = _products.Product(ctx, (x, y), *how)
        padding = product.padding(may_be_sharded=devices > 1)
        if padding is None or _why_no_kernels(ctx, platform):
            return rule(ctx, x, y, **params)
        if not (_is_asked_for() or product.gains_by(padding, devices)):
            return rule(ctx, x, y, **params)
        results = product.lower(rule, padding, **params)
        _dot_attention.remember(ctx, results[0], (x, y), params["dimension_numbers"])
        if explanation := _explanation.get():
            avals = *ctx.avals_out, max(ctx.avals_in, key=lambda aval: aval.size)
            row = _row("matrix product", avals, True, _products.PADDED)
            explanation.add(row, primitive, ctx, results[0])
        return results

    return lower


def _part_of_attention(
    ctx: Any, x: Any, y: Any, platform: str, params: dict[str, Any]
) -> tuple[Any, Any] | None:
    """The part of an attention that a product is, and what implements its kernels; or None.

    The part may also be one whose product stays until another part is replaced: then nothing does.
    """
    if _mode(ctx) != _ON:
        return None
    from jax_oneflow_ops import _dot_attention, _dot_attention_search  # lazily: few need them

    if (by := _dot_attention.KERNELS.get(platform)) is None:
        return None
    found = _dot_attention_search.find(ctx, (x, y), params["dimension_numbers"])
    if found is None or _why_no_kernels(ctx, platform):
        return None
    if isinstance(found, _dot_attention.WithWeights):
        return found, None
    if not (_is_asked_for() or found.pays(ctx, platform)):
        return None
    if _explanation.get() and jax.default_backend() != "gpu":  # where cuDNN cannot be asked
        by = "xla"
    return (found, by) if found.has_kernels(ctx, by) else None


def _rewritten(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of operations that XLA runs faster in another form: see the modules it imports."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        is_open = _mode(ctx) in (_ON, _DETERMINISTIC) and _compat.has_known_sizes(ctx)
        if not is_open or _why_no_kernels(ctx, platform):
            return rule(ctx, *operands, **params)
        from jax_oneflow_ops import _convolutions, _pooling  # lazily: few programs need them

        find: Any = {
            lax.conv_general_dilated_p: _convolutions.find,
            lax.select_and_scatter_add_p: _pooling.find_maxima,
            lax.reduce_window_sum_p: _pooling.find_sums,
        }[primitive]
        found = find(ctx, operands, platform, params)
        if found is None or not (_is_asked_for() or found[0].pays(platform)):
            return rule(ctx, *operands, **params)
        form, avals, values = found
        results = _lower(_same(_compute, form=form), ctx.replace(avals_in=avals), *values)
        if explanation := _explanation.get():
            row = _row(form.name, (*ctx.avals_out, avals[0]), True, form.reason)
            explanation.add(row, primitive, ctx, results[0])
        return results

    return lower


def _compute(*operands: jax.Array, form: Any) -> jax.Array:
    result: jax.Array = form.compute(*operands)
    return result


def _as_written(
    rows: _scatter_rows.Rows, is_fresh: bool, ctx: Any, operand: Any, indices: Any, updates: Any
) -> tuple[tuple[Any, ...], str]:
    """Replaces the indices by the ids that the user wrote, if kernels can read these as jnp does.

    XLA then need not compute the indices. The second result says how to read the ids: see
    `_compat.ids_of`. It is "" if the indices stay.
    """
    if rows.is_plain and (found := _compat.ids_of(ctx, indices, rows.count)):
        ids, read = found
        if read == "wrap" or (is_fresh and len(rows.shape) == 1 and not rows.clip):
            table, of_indices, of_updates = ctx.avals_in
            *sizes, _ = of_indices.shape
            of_ids = _compat.with_spec(of_indices, sizes, of_indices.sharding.spec[:-1])
            ctx = ctx.replace(avals_in=[table, of_ids, of_updates])
            return (ctx, operand, ids, updates), read
    return (ctx, operand, indices, updates), ""


@functools.lru_cache(maxsize=1024)
def _same(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """One function for equal scatters: jax traces it once, and lowers it once per program."""
    return jax.jit(functools.partial(function, **how))


def _lower(
    function: Callable[..., Any], ctx: Any, *args: Any, multiple_results: bool = False
) -> Any:
    rule = _compat.lower_plain(function, multiple_results)
    results = rule(_compat.with_current_mesh(ctx), *args)
    return _compat.with_shardings_of_types(ctx, results)


def _in_order(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of scatters that set rows: orders the updates of a row, which GPUs need not do."""

    def lower(ctx: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
        is_plain = params["update_jaxpr"] is None and not params["unique_indices"]
        if _mode(ctx) == _DETERMINISTIC and is_plain:
            rows = _find(ctx.avals_in, params)
            if isinstance(rows, _scatter_rows.Rows):
                function = _same(_set, rows=rows)
                return _lower(function, ctx, operand, indices, updates)
        return rule(ctx, operand, indices, updates, **params)

    return lower


def _set(
    operand: jax.Array, indices: jax.Array, updates: jax.Array, *, rows: _scatter_rows.Rows
) -> jax.Array:
    with _scatter_rows.precision(rows):
        ids = rows.ids(_checks.as_ids("accelerate", "indices", indices))
        data = rows.updates(updates)
        result: jax.Array = _reference.scatter_set(operand, ids, data, indexing=rows.indexing)
    return result


_MOST_STEPS = 16


def _searched(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of loops of fixed length: swaps the searches of `jnp.searchsorted`.

    Unrolls other short searches, so that XLA fuses their steps. In a loop, each step writes
    the remaining ranges to memory.
    """

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        if _search.keep_reference(ctx, params) or _mode(ctx) not in (_ON, _DETERMINISTIC):
            return rule(ctx, *args, **params)
        has_masks = any(aval.dtype == bool and aval.ndim > 1 for aval in ctx.avals_in)
        if has_masks and _mode(ctx) == _ON and _may_change(ctx, platform):
            from jax_oneflow_ops import _dot_attention_search  # lazily: few programs need it

            params = _dot_attention_search.with_own_masks(ctx, args, params)
        if not _is_search(ctx, args, params):
            return rule(ctx, *args, **params)
        search = _search.find(ctx, args, params)
        reason = _why_no_kernels(ctx, platform)
        if search and not reason and not _is_asked_for():
            reason = search.why_not(platform, not _compat.knows_shapes_of_shards(ctx))
        if search and not reason:
            one = _same(_search.ends, search=search)
            results = _lower(one, ctx, *args, multiple_results=True)
        else:
            if params["length"] <= _MOST_STEPS and _runs_kernels(platform):
                params["unroll"] = params["length"]
            results = rule(ctx, *args, **params)
        if search and (explanation := _explanation.get()):
            avals = ctx.avals_in[search.place], ctx.avals_in[1 - search.place]
            row = _row("binary search", avals, not reason, reason or _search.MEASURED)
            explanation.add(row, primitive, ctx, results[1])
        return results

    return lower


def _is_search(ctx: Any, operands: Any, params: Any) -> bool:
    """Whether a loop may be a search that jnp makes, perhaps of a batch.

    It carries the ends of ranges, two integers which are constants at first, and gathers from a
    table once. Middles are unsigned: XLA compiles unrolled steps slowly if they divide signed
    integers, or if the first ends are arrays.
    """
    if len(ctx.avals_out) != 2 or None in map(_compat.fill_of, operands[-2:]):
        return False
    body, _ = _compat.jaxpr_and_consts(params["jaxpr"])
    ends = [*body.outvars, *ctx.avals_in[-2:], *ctx.avals_out]
    types = [getattr(x, "aval", x) for x in ends]
    # A value that is not carried has an additional dimension, for the steps.
    if any((x.shape, x.dtype) != (types[0].shape, types[0].dtype) for x in types):
        return False
    equations = [e for e, *_ in _equations(body)]
    divided = [e.outvars[0].aval.dtype for e in equations if e.primitive.name == "div"]
    is_signed = any(jnp.issubdtype(dtype, jnp.signedinteger) for dtype in divided)
    if is_signed or not jnp.issubdtype(types[0].dtype, jnp.integer):
        return False
    done = collections.Counter(e.primitive.name for e in equations)
    return done["gather"] == 1 and not done["while"] + done["scan"]


def _with_handle(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of maxima, which `_exp_sums` may replace later."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        is_replaced = _mode(ctx) in (_ON, _DETERMINISTIC) and _compat.has_known_sizes(ctx)
        return _compat.as_handles(results) if is_replaced else results

    return lower


def _without_metadata(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of an operation that old releases of jaxlib compile only without metadata.

    jax attaches metadata to the operation that makes the results: here a reshape is added for it.
    """

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        return [_compat.hlo.reshape(x.type, x) for x in results] if _mode(ctx) else results

    return lower


def _with_chains(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of function calls: turns chains of elementwise operations in them into kernels."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        is_fused = (_compat.scope_of(ctx) or "").endswith(_FUSE)
        is_plain = is_fused and _compat.is_for_one_device(ctx) and _compat.has_known_sizes(ctx)
        if is_plain and _runs_kernels(platform):
            from jax_oneflow_ops import _chains  # imported lazily: few programs need it

            done, jaxpr = _compat.functions_of_module(ctx), params["jaxpr"]
            key = _with_chains, jaxpr
            if key not in done:
                name = f"{params['name']}_chain"
                done[key] = _chains.rewritten(name, jaxpr, platform, _is_open)
            params["jaxpr"] = done[key]
        return rule(ctx, *args, **params)

    return lower


def _runs_kernels(platform: str) -> bool:
    implementation = _native.choose_implementation("accelerate", None)
    return _native.is_used("accelerate", platform, implementation)


def _is_asked_for() -> bool:
    """Whether kernels run wherever they can, regardless of measurements."""
    return _native.choose_implementation("accelerate", None) == "native"


def _why_no_kernels(ctx: Any, platform: str) -> str | None:
    """The reason why no kernels run where an operation was traced, or None."""
    if not _runs_kernels(platform):
        asked = _native.choose_implementation("accelerate", None) is not None
        none = f"there are no kernels for {platform}"
        return "JAX_ONEFLOW_OPS_IMPLEMENTATION is xla" if asked else none
    if _compat.is_computed_elsewhere(ctx):
        return "jax.experimental.compute_on says where it runs"
    if _compat.automatic_axes_beside_manual_ones(ctx):
        return "in a shard_map over some axes of the mesh only, kernels would all-gather"
    return None


def _is_open(eqn: Any) -> bool:
    """Whether an operation of a function may become part of a kernel."""
    scope = _compat.scope_of(eqn)
    is_inside = scope is None or scope.endswith((_FUSE, _FUSED))  # None if autodiff made it
    return is_inside and not _compat.is_computed_elsewhere(eqn)


def _selected(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    rows: _scatter_rows.Rows,
    negative: bool,
) -> jax.Array:
    """A sum of single updates into zeros, as in the gradient of a cross entropy.

    XLA fuses it with the operations that read it. A scatter would need the zeros in memory.
    """
    indices = _checks.as_ids("accelerate", "indices", indices)
    return rows.select(indices, -updates if negative else updates)


def _find(avals: Any, params: Any) -> _scatter_rows.Rows | str:
    return _scatter_rows.find(
        *(aval.shape for aval in avals),
        params["dimension_numbers"],
        clip=params["mode"] == lax.GatherScatterMode.CLIP,
        indices_are_sorted=params["indices_are_sorted"],
    )


def _choose(
    reduction: _Reduction,
    platform: str,
    ctx: Any,
    updates: Any,
    params: Any,
    is_fresh: bool,
    deterministic: bool,
) -> _Choice:
    operand, is_sum = ctx.avals_in[0], reduction.reducer == "add"
    if not _scatter.is_summed(operand.dtype, reduction.reducer):
        return _Choice(f"there is no kernel for {operand.dtype}")
    if reason := _why_no_kernels(ctx, platform):
        return _Choice(reason)
    rows = _find(ctx.avals_in, params)
    if isinstance(rows, str):
        return _Choice(rows)
    message = _message(reduction, rows, ctx, updates) if is_fresh else None
    if _is_asked_for():
        return _Choice("asked for", rows, message=message)
    if is_fresh and _is_known(ctx.avals_in) and rows.single is not None:
        return _Choice("single updates: XLA selects them where it reads the sums", selected=rows)
    if message is not None:
        if deterministic or message.pays(platform):
            return _Choice(_FROM_TABLES, rows, message=message)
        if platform == "cuda" and operand.dtype.itemsize > 2:
            return _Choice("XLA fuses the gather with its sum, by atomics", message=message)
    if not _compat.knows_shapes_of_shards(ctx):
        return _Choice("sharded: the partitioner decides what a device has", rows)
    if platform == "cpu" and (reason := _why_not_on_cpu(reduction, rows, operand.dtype)):
        return _Choice(reason)
    if not deterministic and _adds_as_xla(reduction, rows, is_fresh, operand.dtype, platform):
        return _Choice("by several indices, which XLA computes where it adds, by atomics as well")
    how = {"num_segments": rows.count, "indexing": rows.read(deterministic)}
    call: Any = "always swapped: only sums were measured against XLA"
    if is_sum:
        call = _policy.describe(_scatter.segment_sum_p, rows.operands(operand), **how)
    decision = _policy.choose(call, platform, _device_kind(platform))
    if decision.implementation == "native":
        return _Choice(decision.reason, rows, decision)
    if operand.dtype in (jnp.float16, jnp.bfloat16):
        reason = f"summed in float32 by XLA: {decision.reason}"
        return _Choice(reason, decision=decision, in_f32=True)
    return _Choice(decision.reason, decision=decision)


def _adds_as_xla(
    reduction: _Reduction, rows: _scatter_rows.Rows, is_fresh: bool, dtype: Any, platform: str
) -> bool:
    """Whether the kernel would use atomics as XLA does, and need an array of ids besides.

    1M rows of 8 f32, added at pairs of indices, take 24 us in XLA on an H200. The kernel takes 29.
    """
    is_measured = platform == "cuda" and dtype == jnp.float32
    if not is_measured or _compat.adds_floats_by_loops():
        return False
    if rows.is_plain or reduction.reducer != "add" or reduction.negative:
        return False
    if is_fresh and _columns(rows, platform, dtype) is not None:
        return False
    shared = not rows.batch_of_ids
    problem = _scatter_policy.Problem(platform, *rows.problem, dtype, shared=shared)
    return problem.has_known_sizes() and _scatter_policy.is_atomic_in_place(problem)


def _columns(
    rows: _scatter_rows.Rows, platform: str, dtype: Any, *how: Any
) -> _scatter_policy.Problem | None:
    """The problem of sums into zeros where columns have their own ids, if its kernel is used."""
    if rows.own_columns is None:
        return None
    problem = _scatter_policy.Problem(platform, *rows.own_columns, dtype, *how)
    return problem if _scatter_policy.columns_pay(problem) else None


_MANY = 2**14  # values in all updates; fewer take as long either way
_WIDE = 16  # values in a row


def _why_not_on_cpu(reduction: _Reduction, rows: _scatter_rows.Rows, dtype: Any) -> str | None:
    """The reason why XLA was measured to be faster on CPUs, or None.

    A kernel's ids are computed separately from the indices. XLA then computes the indices again for
    each operation that reads them: a particle-in-cell step took 1.4 times as long with kernels.
    Maxima of rows of 2 to 15 f32 took kernels 1.2 to 2.8 times as long as XLA, those of wider rows
    mostly 0.4 to 1.2 times. In 16 bits XLA is slower.
    """
    sizes = rows.updates_shape
    if rows.expanded or not all(isinstance(n, int) for n in sizes) or math.prod(sizes) < _MANY:
        return None
    width = math.prod(sizes[k] for k in rows.trailing)
    if width == 1 and len(rows.columns) - rows.columns.count(None) > 1:
        return "by several indices, which XLA computes once for all that read them"
    is_extreme = reduction.reducer in ("max", "min") and jnp.issubdtype(dtype, jnp.floating)
    is_narrow = width == 1 or (width < _WIDE and dtype.itemsize > 2)
    if is_extreme and is_narrow and not rows.indexing.indices_are_sorted:
        return "XLA was measured to be faster for maxima and minima of so few values in a row"
    return None


def _row(
    operation: str,
    avals: Sequence[Any],
    swapped: bool,
    reason: str,
    decision: _policy.Decision | None = None,
    line: str = "",
) -> Row:
    return Row(
        line=line,
        operation=operation,
        shapes=tuple(tuple(aval.shape) for aval in avals),
        dtype=avals[0].dtype.name,
        swapped=swapped,
        reason=reason,
        bytes=_policy.nbytes(*avals) if _is_known(avals) else 0,
        native_us=decision.native_us if decision else None,
        xla_us=decision.xla_us if decision else None,
    )


def _is_known(avals: Any) -> bool:
    return all(isinstance(size, int) for aval in avals for size in aval.shape)


@_checks.in_own_precision
def _reduce(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    rows: _scatter_rows.Rows,
    reduction: _Reduction,
    is_fresh: bool,
    deterministic: bool,
    platform: str,  # a program for several platforms has one function for each
    alone: bool,  # on one device
    read: str = "",
) -> jax.Array:
    if isinstance(indices, jax.Array):
        indices = _checks.as_ids("accelerate", "indices", indices)
    elif read:
        indices = indices.reshape(*indices.shape, 1)
    if read == "floor":  # an additional row takes all ids that are too large
        rows = dataclasses.replace(rows, shape=(rows.count + 1,), clip=True)
    how_added = operand.dtype, reduction.reducer, deterministic
    columns = _columns(rows, platform, *how_added) if alone and is_fresh else None
    if columns is not None:
        data = rows.updates(-updates if reduction.negative else updates)
        ids = rows.ids_of_columns(indices)
        found: jax.Array = _scatter.add_columns(columns, operand.shape, ids, data, rows.clip)
        return found
    with _scatter_rows.precision(rows):
        ids, data = rows.ids(indices), rows.updates(updates)
        # Sums into zeros have one dimension of rows; to reshape the result costs nothing.
        row_rank = 1 if is_fresh else None
        indexing = rows.read(deterministic, row_rank=row_rank, wrap=read == "wrap")
        how = {"indexing": indexing, "implementation": "native"}
        start = None if is_fresh else operand
        result = reduction(start, ids, data, rows.count, how, platform if alone else None)
        result = _emit.first(result, operand.size) if read == "floor" else result
        return result.reshape(operand.shape)


# ---- what users call ----


@functools.cache
def _problem(value: str) -> str | None:
    """Installs the rules for a scope of `value`; returns why jax does not allow that, or None."""
    try:
        _compat.replace_lowerings([*_REDUCTIONS], _PLATFORMS, _replacement)
        _compat.replace_lowerings([lax.scan_p], _PLATFORMS, _searched)
        _compat.replace_lowerings([lax.reduce_sum_p], _PLATFORMS, _sums, on_several=False)
        pair = [lax.div_p, lax.mul_p]
        _compat.replace_lowerings(pair, _PLATFORMS, _softmaxes, on_several=False)
        _compat.replace_lowerings([lax.dot_general_p], _PLATFORMS, _products, on_several=False)
        windows = [
            *(lax.conv_general_dilated_p, lax.select_and_scatter_add_p, lax.reduce_window_sum_p),
        ]
        _compat.replace_lowerings(windows, _PLATFORMS, _rewritten, on_several=False)
        for one, rule in (
            (lax.reduce_max_p, _with_handle),
            (lax.approx_top_k_p, _without_metadata),
        ):
            rules = [one], _PLATFORMS, rule
            _compat.replace_lowerings(*rules, on_several=False, looks_at_operands=False)
        if value.startswith(_DETERMINISTIC):
            _compat.replace_lowerings([lax.scatter_p], ["cuda"], _in_order)
        if value.endswith(_FUSE):
            rules = [_compat.jit_primitive()], _PLATFORMS, _with_chains
            _compat.replace_lowerings(*rules, on_several=False, looks_at_operands=False)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"jax_oneflow_ops.accelerate runs programs as they are: jax {_compat.RELEASE} differs "
            f"from the releases that it knows ({problem}). Remedy: update jax_oneflow_ops.",
            RuntimeWarning,
            stacklevel=4,
        )
        return problem
    return None


class _Scope:
    """A context manager and decorator, which may be reused, nested and shared by threads."""

    def __init__(self, value: str, note: str | None = None) -> None:
        self._value, self._note = value, note
        self._entered = threading.local()

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if _problem(self._value) is None:
            return _compat.in_scope(self._value, self._note)
        return contextlib.nullcontext()

    def __enter__(self) -> None:
        context = self._context()
        context.__enter__()
        self._entered.last = context, getattr(self._entered, "last", None)

    def __exit__(self, *exception: Any) -> None:
        context, self._entered.last = self._entered.last
        context.__exit__(*exception)

    def __call__(self, function: F) -> F:
        wrapped: Any = self._around(function)
        # The methods that jax.jit adds to functions.
        for name in ("lower", "trace", "eval_shape", "clear_cache"):
            if callable(method := getattr(function, name, None)):
                setattr(wrapped, name, self._around(method))
        result: F = wrapped
        return result

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return function(*args, **kwargs)

        return wrapped


@overload
def accelerate(
    fun: F, *, tune: bool = False, deterministic: bool = False, fuse: bool = False
) -> F: ...
@overload
def accelerate(fun: bool = True, *, deterministic: bool = False) -> _Scope: ...
def accelerate(
    fun: Any = True, *, tune: bool = False, deterministic: bool = False, fuse: bool = False
) -> Any:
    """Runs a program with this package's kernels, without a change to the program.

    Inside, JAX's own scatters that add, subtract, multiply or take maxima or minima run as native
    kernels: those of `jax.ops.segment_sum` and its relatives, ``x.at[...].add``, `jnp.bincount` and
    `jnp.histogram`, and the gradients of lookups, as in embeddings, `jnp.take_along_axis` and
    `jax.image.resize`. The searches of `jnp.searchsorted` and `jnp.digitize` are kernels, too. On
    one device, kernels also compute sums and dot products of gathered rows, such as
    ``segment_sum(w[:, None] * x[senders], receivers)``, without an array of these rows, where that
    was measured to be faster. On GPUs, cuDNN computes 16-bit attention without an array of weights,
    kernels compute other 16-bit softmaxes and their gradients, and sums of exponentials, as in
    cross entropies, read their rows once. Other slow operations become operations of XLA that are
    fast: some convolutions and gradients of pooling, and matrix products of sizes that GPUs compute
    slowly, which are padded. Outside, nothing changes. :func:`explain` shows what is swapped in a
    program, what is not, and why.

    Use it as a function, a decorator or a context manager, inside `jax.jit` or around it::

        step = jax.jit(jof.accelerate(step))

        @jof.accelerate
        def step(state, batch): ...

        with jof.accelerate():
            state = step(state, batch)

        with jof.accelerate(False):  # not this call
            total = jax.ops.segment_sum(data, ids, 10)

    Args:
      fun: a function to run accelerated, or a bool: whether to accelerate inside a ``with``
        statement. The innermost choice wins. A gradient is accelerated if its function is.
      tune: times the program with kernels and without when it is first called with arguments of new
        shapes, on copies of them. It runs without kernels unless they gain more than 2 %. The times
        are stored in the folder of compiled kernels (:class:`ElementwiseKernel` says where), and
        logged by the logger "jax_oneflow_ops". Call the result outside `jax.jit`, in a program of
        one process. A function that `jax.jit` did not return is compiled as one program.
      fuse: also computes chains of elementwise operations in 16-bit dtypes in one kernel each, as
        :func:`fuse` does, where such chains were measured to gain. Pass a function, not a ``with``
        statement. It is traced as by `jax.jit`, and has to be pure. Chains stay as they are in
        programs over several devices, in programs for several platforms, and in functions with
        side effects such as `jax.debug.print`.
      deterministic: gives every sum that is swapped the same bits on every run, at some cost (see
        :func:`segment_sum`). It also orders ``x.at[ids].set(u)`` on GPUs: the last update of a row
        wins, as on CPUs. Attention is left to XLA.

    Returns:
      A function like `fun`, with the methods of a function made by `jax.jit` if it is one. Without
      a function: a context manager, which is a decorator, too.

    Raises:
      TypeError: `fun` is neither a function nor a bool, or it is async or a generator; or `tune` or
        `fuse` is set without a function; or a tuned function is called inside a transformation; or
        `fuse` is set and an argument that is not an array is not hashable.
      ValueError: `tune` and `deterministic` are both set.
      NotImplementedError: a tuned function is called in a program of several processes.

    Numerics:
      Those of :func:`segment_sum` and :func:`scatter_add`: results may differ from XLA's in the
      last bits, as the order of summation does. Sums of 16-bit values are more accurate: they are
      computed in float32 and rounded once, with the exception that :func:`segment_sum` names.
      Attention and softmax in 16 bits are computed in float32, so they may differ by more from
      programs that round between steps. The gradient of attention may differ between runs. If
      ``indices_are_sorted=True`` is not true, sums are wrong, even where XLA ignores it. With
      ``fuse=True``, 16-bit values inside a chain are float32, and are rounded when the chain stores
      them, as in :func:`fuse`.

    Notes:
      The first use replaces the lowering rules of some primitives of JAX. The new rules call the
      old ones for operations outside. If a release of JAX does not allow that, programs run without
      kernels, after one warning. Exported programs need :func:`export_checks`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> @jax.jit
      ... @jof.accelerate
      ... def count(x):
      ...     return jnp.bincount(x, length=4)
      >>> print(count(jnp.array([0, 2, 2, 3, 2])))
      [1 0 3 1]
    """
    if not callable(fun) and (tune or fuse or not isinstance(fun, bool)):
        if tune and isinstance(fun, bool):
            raise TypeError("accelerate: tune=True times a function: accelerate(step, tune=True)")
        if fuse and isinstance(fun, bool):
            raise TypeError(
                "accelerate: fuse=True rewrites a function, and a `with` statement has none; pass "
                "the function, and call what accelerate returns: accelerate(step, fuse=True)"
            )
        raise TypeError(
            f"accelerate: fun must be a function, True or False, got {type(fun).__name__}; pass "
            "the function, and call what accelerate returns: accelerate(step)(state, batch)"
        )
    if tune and deterministic:
        raise ValueError(
            "accelerate: tune=True may run the program without kernels, and then "
            "deterministic=True cannot hold; pass one of them"
        )
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(fun) for is_kind in kinds):
        raise TypeError(
            "accelerate: the body of an async function or a generator runs after the call has "
            "returned; accelerate the functions that it calls instead"
        )
    value = _compat.OFF if fun is False else _DETERMINISTIC if deterministic else _ON
    if isinstance(fun, bool):
        return _Scope(value)
    fun = _as_function(fun)
    plain: Any = jax.jit(fun) if tune and not hasattr(fun, "trace") else fun
    accelerated = _fused(plain, value) if fuse else _Scope(value)(plain)
    if not tune:
        return accelerated
    from jax_oneflow_ops import _tune  # imported lazily: few programs need it

    return _tune.tuned(plain, accelerated, value + _FUSE * fuse)


def _as_function(fun: Any) -> Any:
    """A method made by `jax.jit` as a function of the other arguments; others unchanged.

    Python passes the attributes of a method on to a bound method, so its `trace` takes `self`.
    """
    if not isinstance(fun, types.MethodType) or not hasattr(fun, "trace"):
        return fun
    of: Any = fun.__func__
    own: Any = functools.partial(of, fun.__self__)
    functools.update_wrapper(own, fun, updated=())
    for name in ("lower", "trace", "eval_shape"):
        setattr(own, name, functools.partial(getattr(of, name), fun.__self__))
    own.clear_cache = of.clear_cache
    return own


def _fused(fun: Callable[..., Any], value: str) -> Callable[..., Any]:
    from jax_oneflow_ops import _chains  # imported lazily: few programs need it

    return _Scope(value + _FUSE)(_chains.program(_Scope(value + _FUSED)(fun)))


_RESIZE = "jof.resize, of the same signature, repeats pixels faster than gathers do"
_NORM = (
    "jof.layer_norm and jof.rms_norm are one kernel, but XLA fuses norms with their neighbours: "
    "measure the step with them and without"
)
_CHAIN = (
    "jof.fuse compiles a function of elementwise operations to one kernel; XLA often runs them "
    "below memory bandwidth in 16 bits"
)
_MESSAGES = "jof.message_sum and jof.attention_sum store no row for each edge: here these are {}"
_BY_MAXIMUM = {
    "softmax_cross_entropy_with_integer_labels": (
        "cross entropy",
        "jof.softmax_cross_entropy_with_integer_labels keeps no array of probabilities",
    ),
    "dot_product_attention": (
        "attention",
        'accelerate leaves it: docs/accelerate.md says when; implementation="cudnn" asks for '
        "kernels for 16 bits",
    ),
    **{
        name: (name, f"jof.{name} is one kernel: measure the step with it and without")
        for name in ("softmax", "log_softmax", "logsumexp")
    },
}
"""Advice for functions of JAX and of libraries that compute the maximum of each row."""
_BETWEEN_ROWS = ("dot", "conv_", "reduce", "cum", "sort", "scatter", "concatenate", "scan", "while")
_OF_CHAINS = frozenset({"tanh", "logistic", "erf", "erfc", "log1p"})

_explained = itertools.count()


def explain(
    fun: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Report:
    """Shows what `accelerate` swaps in a program, what it does not, and why.

    The program is traced and lowered, not compiled and not run.

    Args:
      fun: a function of arrays, or what `jax.jit` or :func:`accelerate` made of one.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`. Bind other arguments with
        `functools.partial`, or mark them as static with `jax.jit`.
      platform: what to lower for: ``"cpu"``, ``"cuda"`` or ``"gpu"``, or a kind of device that was
        measured, such as ``"NVIDIA H200"``. No such device is needed. By default JAX's default
        device.
      **kwargs: keyword arguments of `fun`.

    Returns:
      A report. Printed, it is a table. Its `rows` are a list of dataclasses, which give for each
      operation the line in your program, its shapes and dtype, whether it is swapped and why, how
      many bytes it moves, and the expected times if such calls were measured. The report also names
      slow operations that are not swapped, and the functions that help.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: `platform` is unknown, or the program calls the host and `platform` is not that of
        this process.

    Example:
      >>> import jax, jax.numpy as jnp, jax_oneflow_ops as jof
      >>> def count(x):
      ...     return jnp.bincount(x, length=1024)
      >>> x = jax.ShapeDtypeStruct((2**24,), jnp.int32)
      >>> [row] = jof.explain(count, x, platform="NVIDIA H200").rows
      >>> row.operation, row.swapped, row.shapes
      ('scatter-add', True, ((1024,), (16777216, 1), (16777216,)))
    """
    if not callable(fun):
        raise TypeError(
            f"explain: fun must be a function, got {type(fun).__name__}; pass the function and "
            "then its arguments: explain(step, state, batch)"
        )
    lowered_for, device_kind = _place(platform)
    explanation = _Explanation(device_kind, [])
    token = _explanation.set(explanation)
    try:
        with _Scope(_ON, str(next(_explained))):  # traced and lowered anew each time
            fun = _as_function(fun)
            jitted: Any = fun if hasattr(fun, "trace") else jax.jit(fun)
            traced = jitted.trace(*args, **kwargs)
            jaxpr = _compat.jaxpr_of(traced)
            try:
                text = traced.lower(lowering_platforms=(lowered_for,)).as_text()
            except ValueError as error:
                names = {e.primitive.name for e, *_ in _equations(jaxpr)}
                if not any("callback" in name or "debug_print" in name for name in names):
                    raise
                raise ValueError(
                    "explain: jax lowers a program that calls the host, as jax.debug.print does, "
                    "for the platform of this process only. Remedy: leave out the calls, or pass "
                    f"platform={_place(None)[0]!r}"
                ) from error
    finally:
        _explanation.reset(token)
    # An operation in a function of jit may not know the line where the program calls it.
    lines = {_key(eqn.primitive, eqn.invars): at for eqn, at, _ in _equations(jaxpr)}
    counts = _tags(text)

    def line_of(row: Row, key: tuple[Any, ...]) -> str:
        within = (_compat.WITH_A_PROGRAM, *row.shapes)  # a search, in jax 0.12
        return row.line or lines.get(key) or lines.get(within, "")

    numbered = {
        i: dataclasses.replace(row, count=counts[i], line=line_of(row, key))
        for i, (row, key) in enumerate(explanation.rows)
        if counts[i]
    }
    rows = [*numbered.values()]
    chains = _chains_of(jaxpr, lowered_for) if _ONE_DEVICE in text else []
    of_chains = {row.line for row in chains}
    summed = [row for i, row in numbered.items() if i in explanation.messages]
    not_stored = {(row.line, row.shapes[-1]) for row in summed}

    read_once = {(row.line, row.shapes[-1]) for row in rows if row.operation in _OF_SOFTMAX}

    def is_known(row: Row) -> bool:
        if row.operation == "messages":
            return (row.line, row.shapes[-1]) in not_stored
        if row.operation in ("logsumexp", "softmax", "attention"):
            return (row.line, row.shapes[-1]) in read_once
        return row.reason == _CHAIN and row.line in of_chains

    rows += [row for row in _slow(jaxpr) if not is_known(row)]
    return Report(platform or lowered_for, _merged([*rows, *chains]))


_ONE_DEVICE = "mhlo.num_partitions = 1 :"


def _chains_of(jaxpr: Any, platform: str) -> list[Row]:
    """The chains of a traced program that `fuse=True` turns into kernels."""
    from jax_oneflow_ops import _chains  # imported lazily: few programs need it

    def is_open(eqn: Any) -> bool:
        return _compat.scope_of(eqn) != _compat.OFF

    rows = []
    for group, reason in _chains.find("explain", jaxpr, platform, is_open):
        inner = group.inner
        swapped = (_compat.scope_of(inner.eqns[-1]) or "").endswith(_FUSED)
        result, *_ = avals = [v.aval for v in (*inner.outvars, *inner.invars)]
        row = Row(
            line=next((line for e in reversed(inner.eqns) if (line := _compat.line_of(e))), ""),
            operation=f"chain of {len(inner.eqns)}",
            shapes=(tuple(result.shape), tuple(max(avals, key=lambda x: x.size).shape)),
            dtype=result.dtype.name,
            swapped=swapped,
            reason=reason if swapped else f"accelerate(fuse=True) makes it one kernel: {reason}",
            bytes=_policy.nbytes(*avals),
        )
        rows.append(row)
    return rows


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Merges equal rows, such as those of a model's layers, into one row with a count."""
    counts = collections.Counter[Row]()
    for row in rows:
        counts[dataclasses.replace(row, count=1)] += row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def _key(primitive: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Identifies an operation of a program by its primitive and the shapes of its operands."""
    return primitive.name, *(tuple(getattr(x, "aval", x).shape) for x in operands)


def _place(platform: str | None) -> tuple[str, str | None]:
    """The name that jax has for a platform, and the kind of its device."""
    if platform is None:
        return _policy.place_of(None)
    if platform in _policy.tables():
        return _policy.tables()[platform]["platform"], platform
    platform = "cuda" if platform == "gpu" else platform
    if platform not in _PLATFORMS:
        known = ", ".join(map(repr, dict.fromkeys((*_PLATFORMS, *_policy.tables()))))
        raise ValueError(f"explain: platform must be one of {known}, got {platform!r}")
    return platform, _policy.device_kind(platform)


def _tags(module: str) -> collections.Counter[int]:
    """How often each tag occurs in a program; tags in a function count once for each call."""
    pieces = re.split(r"func\.func (?:public|private) @", module)[1:]
    bodies = {re.split(r"[(\s]", piece, maxsplit=1)[0].strip('"'): piece for piece in pieces}

    @functools.cache
    def count(function: str) -> collections.Counter[int]:
        body = bodies[function]
        total = collections.Counter(map(int, re.findall(rf'{_TAG} = "(\d+)"', body)))
        for called in re.findall(r'\bcall @"?([^"(\s]+)', body):
            if called in bodies:
                total.update(count(called))
        return total

    return count("main")


def _slow(jaxpr: Any) -> list[Row]:
    """The slow operations of a traced program that are not swapped but have alternatives."""
    found = []
    for equation, line, made in _equations(jaxpr):
        if (help_ := _help(equation, made)) is None:
            continue
        name, avals, reason = help_
        found.append(_row(name, avals, False, reason, line=line))
    return found


def _help(equation: Any, made: dict[Any, Any]) -> tuple[str, list[Any], str] | None:
    """The name of a slow operation, its result and operand, and advice; None for others."""
    if not equation.outvars:  # for example, it prints
        return None
    primitive, result = equation.primitive.name, equation.outvars[0].aval
    if equation.params.get("name") == "_resize":
        if "gather" in {e.primitive.name for e, *_ in _equations(equation.params["jaxpr"])}:
            return "jax.image.resize", [result, equation.invars[0].aval], _RESIZE
    elif primitive == "reduce_max":
        functions = _compat.functions_of(equation)
        if name := next((f for f in functions if f in _BY_MAXIMUM), None):
            operation, reason = _BY_MAXIMUM[name]
            return operation, [equation.invars[0].aval] * 2, reason
    elif primitive == "rsqrt" and (rows := _reduced_rows(equation, made)) is not None:
        return "norm", [rows] * 2, _NORM
    elif primitive == "scatter-add" and _sums_messages(equation, made):
        rows = equation.invars[2].aval
        return "messages", [rows] * 2, _MESSAGES.format(bytes_text(_policy.nbytes(rows)))
    elif primitive in _OF_CHAINS and result.dtype in (jnp.float16, jnp.bfloat16):
        return primitive, [result] * 2, _CHAIN
    return None


def _sums_messages(equation: Any, made: dict[Any, Any]) -> bool:
    """Whether an equation is a segment sum of elementwise functions of gathered rows."""
    rows = equation.invars[2]
    if "segment_sum" not in _compat.functions_of(equation) or not _is_known([rows.aval]):
        return False
    seen, found = set(), [rows]
    while found:
        variable = found.pop()
        maker = None if _compat.is_literal(variable) else made.get(variable)
        if maker is None or id(maker) in seen or variable.aval.shape[:1] != rows.aval.shape[:1]:
            continue
        seen.add(id(maker))
        inside = _compat.called_jaxpr(maker)
        names = {e.primitive.name for e, *_ in _equations(inside[0])} if inside else set()
        names.add(maker.primitive.name)
        if not any(name.startswith(_BETWEEN_ROWS) for name in names):
            if "gather" in names:
                return True
            found += maker.invars
    return False


def _reduced_rows(equation: Any, made: dict[Any, Any]) -> Any:
    """The rows that an operation reduces to one number each, such as a variance; else None."""
    if equation.primitive.name == "reduce_sum":
        rows = equation.invars[0].aval
        return rows if equation.params["axes"] == (rows.ndim - 1,) and rows.ndim > 1 else None
    if inside := _compat.called_jaxpr(equation):  # such as jnp.var
        found = (e for e, *_ in _equations(inside[0]) if e.primitive.name == "reduce_sum")
    else:
        operands = (v for v in equation.invars if not _compat.is_literal(v))
        found = (made[v] for v in operands if v in made)
    rows = (_reduced_rows(e, made) for e in found)
    return next((x for x in rows if x is not None), None)


def _equations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str, dict[Any, Any]]]:
    """Yields the equations of a traced program and of all programs inside, with the user's lines.

    Yields with each a dict from variables to the equations before it that made them.
    """
    made: dict[Any, Any] = {}
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        line = _compat.user_line(equation.source_info.traceback) or outer
        yield equation, line, made
        made.update((variable, equation) for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=_policy.is_jaxpr):
            if _policy.is_jaxpr(inner):
                yield from _equations(inner, line)
