"""Swaps JAX's scatters that reduce: sums, differences, products, maxima and minima of rows."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_oneflow_ops import (
    _checks,
    _compat,
    _emit,
    _policy,
    _reference,
    _scatter,
    _scatter_policy,
    _scatter_rows,
)
from jax_oneflow_ops._accelerate import common, explanation, gathers, grids


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


REDUCTIONS: dict[Any, _Reduction] = {
    lax.scatter_add_p: _Reduction(fills=_compat.ZEROS),
    lax.scatter_sub_p: _Reduction(negative=True, fills=_compat.ZEROS),
    lax.scatter_max_p: _Reduction("max"),
    lax.scatter_min_p: _Reduction("min"),
    lax.scatter_mul_p: _Reduction("multiply"),
}
"""The scatters that are swapped. To swap another one, add a line."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """How a scatter is lowered."""

    reason: str
    rows: _scatter_rows.Rows | None = None  # if it is swapped
    decision: _policy.Decision | None = None
    message: gathers.Message | None = None  # if it sums gathered rows without storing them
    grid: grids.Grid | None = None  # if it also does the sum that made its updates
    in_f32: bool = False  # if XLA computes it in float32
    selected: _scatter_rows.Rows | None = None  # if XLA selects single updates


def _key(result: Any) -> Any:
    """The key under which a program keeps how jax lowers the scatter that has this result."""
    return "scatter of jax_oneflow_ops", _compat.without_constraints(result)


def by_jax_if_unreduced(
    primitive: Any, platform: str, default: _compat.Lowering
) -> _compat.Lowering:
    """The rule of reshards: jax's own scatter is emitted if its result becomes "unreduced".

    jax has such a result if the user asks for it with `out_sharding`, or in the gradient of a table
    that is "reduced": the devices' parts of a sum over updates. A constraint after the scatter says
    so, and XLA leaves out its all-reduce. It would take the sum of a kernel for a part.
    """

    def lower(ctx: Any, x: Any, **params: Any) -> Any:
        made = None
        if _compat.unreduced_or_reduced_axes(ctx.avals_out[0]):
            made = _compat.functions_of_module(ctx).get(_key(x))
        if made is not None:
            by_jax, (operation, avals, _) = made
            _compat.untag(x, explanation.TAG)
            (x,) = by_jax()
            row = operation, avals, "its result is unreduced: XLA adds up the devices' parts later"
            explanation.add(primitive, ctx, x, *row, swapped=False)
        return default(ctx, x, **params)

    return lower


def rule(primitive: Any, platform: str, default: _compat.Lowering) -> _compat.Lowering:
    """The new lowering rule of `primitive`, in place of `default`."""
    reduction = REDUCTIONS[primitive]

    def lower(ctx: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
        if not common.is_open(ctx):
            return default(ctx, operand, indices, updates, **params)
        is_fresh = _compat.fill_of(operand) in reduction.fills
        deterministic = common.mode(ctx) == common.DETERMINISTIC
        args = ctx, operand, indices, updates
        grid = _grid(reduction, platform, *args, params) if is_fresh else None
        if grid is not None:
            choice = _Choice(_IN_ONE_PASS, grid.second.rows, grid=grid)
        else:
            choice = _choose(reduction, platform, ctx, updates, params, is_fresh, deterministic)
        more = dict[str, Any]()
        if choice.selected is not None:
            how: dict[str, Any] = {"rows": choice.selected, "negative": reduction.negative}
            results = common.lower(_selected, *args, **how)
        elif choice.in_f32:
            function = lax.sub if reduction.negative else lax.add
            results = _in_f32(default, function, *args, **params)
        elif choice.rows is None:
            results = default(*args, **params)
        elif choice.grid is not None:
            _compat.untag(choice.grid.between, explanation.TAG)
            results = choice.grid.lower(ctx)
            more["bytes"] = _policy.nbytes(*ctx.avals_out, choice.grid.aval)
        elif choice.message is not None:
            (inner, _, ids, _), read = as_written(choice.rows, is_fresh, *args)
            results = choice.message.lower(inner, ids, platform, read)
        else:
            how = {
                "rows": choice.rows,
                "reduction": reduction,
                "is_fresh": is_fresh,
                "deterministic": deterministic,
                "platform": platform,
            }
            results = _lower_reduction(*args, **how)
        if choice.message is not None:
            more["bytes"] = _policy.nbytes(*ctx.avals_in[:2], *choice.message.avals)
            more["is_message"] = True
        more |= {"decision": choice.decision, "swapped": choice.rows is not None}
        row = primitive.name, ctx.avals_in, choice.reason
        explanation.add(primitive, ctx, results[0], *row, **more)
        if choice.rows is not None or choice.selected is not None:
            by_jax = functools.partial(default, *args, **params)
            _compat.functions_of_module(ctx)[_key(results[0])] = by_jax, row
        return results

    return lower


def _lower_reduction(
    ctx: Any, operand: Any, indices: Any, updates: Any, *, rows: _scatter_rows.Rows, **how: Any
) -> Any:
    """Lowers a scatter to `_reduce`, which is emitted where that is possible, and traced else."""
    args = ctx, operand, indices, updates
    if not _is_emitted(ctx):
        return common.lower(_reduce, *args, rows=rows, alone=False, **how)
    read, alone, is_fresh = "", _compat.is_for_one_device(ctx), how["is_fresh"]
    if alone:
        args, read = as_written(rows, is_fresh, *args)
    results = _emit.lower(_reduce, *args, rows=rows, alone=alone, read=read, **how)
    if alone and is_fresh and how["reduction"] == REDUCTIONS[lax.scatter_add_p]:
        _compat.functions_of_module(ctx)[_SUM, _compat.callee_of(results[0])] = rows, read
    return _compat.with_shardings_of_types(ctx, results)


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


_MAKES_MESSAGES = tuple(f"stablehlo.{name}" for name in ("gather", "multiply", "select", "reshape"))
"""The operations that `gathers` looks for."""


def _message(
    reduction: _Reduction, rows: _scatter_rows.Rows, ctx: Any, updates: Any
) -> gathers.Message | None:
    """The messages that a scatter sums into zeros, if that is what it does."""
    is_sum = reduction.reducer == "add" and not reduction.negative
    source = _compat.without_constraints(updates)
    made = _compat.operands_of(source, *_MAKES_MESSAGES)
    if not is_sum or not made or not _is_emitted(ctx):
        return None
    return gathers.message_of(rows, ctx, source)


# XLA computes the results of these in the loop that adds them. Additions are left out: their result
# is often the state of a network, which other operations read too. Sums of cotangents are included:
# only the scatter reads them.
_FUSED = frozenset(
    (
        *("abs", "cbrt", "ceil", "clamp", "convert", "cosine", "divide", "exponential"),
        *("exponential_minus_one", "floor", "gather", "log", "log_plus_one", "logistic"),
        *("maximum", "minimum", "multiply", "negate", "power", "rsqrt", "select", "sign", "sine"),
        *("slice", "sqrt", "square", "tan", "tanh", "erf", _compat.SUM_OF_COTANGENTS),
    )
)

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
) -> grids.Grid | None:
    """The sums along two axes whose second step is this scatter, if one kernel computes them."""
    source = _compat.before_empty_sums(updates)
    # What reads the first sum later is not known yet: then that sum is computed, too.
    if _compat.count_uses(source) > (source != updates):
        return None
    updates = source
    before = _compat.functions_of_module(ctx).get((_SUM, _compat.callee_of(updates)))
    is_sum = reduction == REDUCTIONS[lax.scatter_add_p]
    if before is None or platform != "cuda" or not is_sum or not _compat.is_for_one_device(ctx):
        return None
    rows = _find(ctx.avals_in, params)
    if isinstance(rows, str) or common.why_no_kernels(ctx, platform) or not _is_emitted(ctx):
        return None
    (_, _, ids, _), read = as_written(rows, True, ctx, operand, indices, updates)
    grid = grids.find(grids.Sum(rows, read, ids), updates, *before)
    return grid if grid and grid.pays() else None


def as_written(
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


def in_order(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of scatters that set rows: orders the updates of a row, which GPUs need not do."""

    def lower(ctx: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
        is_plain = params["update_jaxpr"] is None and not params["unique_indices"]
        if common.mode(ctx) == common.DETERMINISTIC and is_plain:
            rows = _find(ctx.avals_in, params)
            if isinstance(rows, _scatter_rows.Rows):
                return common.lower(_set, ctx, operand, indices, updates, rows=rows)
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
    if reason := common.why_no_kernels(ctx, platform):
        return _Choice(reason)
    rows = _find(ctx.avals_in, params)
    if isinstance(rows, str):
        return _Choice(rows)
    message = _message(reduction, rows, ctx, updates) if is_fresh else None
    if common.is_asked_for():
        return _Choice("asked for", rows, message=message)
    if is_fresh and explanation.is_known(ctx.avals_in) and rows.single is not None:
        return _Choice("single updates: XLA selects them where it reads the sums", selected=rows)
    if message is not None:
        if deterministic or message.pays(ctx, platform):
            return _Choice(gathers.FROM_TABLES, rows, message=message)
        if platform == "cuda" and operand.dtype.itemsize > 2:
            return _Choice("XLA fuses the gather with its sum, by atomics", message=message)
    if not _compat.knows_shapes_of_shards(ctx):
        if None in rows.columns and not deterministic:
            in_f32 = is_sum and operand.dtype in (jnp.float16, jnp.bfloat16)
            return _Choice(_STAYS_SHARDED, in_f32=in_f32)
        return _Choice("sharded: the partitioner decides what a device has", rows)
    if platform == "cpu" and (reason := _why_not_on_cpu(reduction, rows, operand.dtype)):
        return _Choice(reason)
    if not deterministic and (
        reason := _why_atomics_pay(reduction, rows, ctx, updates, is_fresh, platform)
    ):
        return _Choice(reason)
    how = {"num_segments": rows.count, "indexing": rows.read(deterministic)}
    call: Any = "always swapped: only sums were measured against XLA"
    if is_sum:
        call = _policy.describe(_scatter.segment_sum_p, rows.operands(operand), **how)
    decision = _policy.choose(call, platform, explanation.device_kind(platform))
    if decision.implementation == "native":
        return _Choice(decision.reason, rows, decision)
    if operand.dtype in (jnp.float16, jnp.bfloat16):
        reason = f"summed in float32 by XLA: {decision.reason}"
        return _Choice(reason, decision=decision, in_f32=True)
    return _Choice(decision.reason, decision=decision)


def _why_atomics_pay(
    reduction: _Reduction,
    rows: _scatter_rows.Rows,
    ctx: Any,
    updates: Any,
    is_fresh: bool,
    platform: str,
) -> str | None:
    """Why XLA is faster if it computes ids or updates in the loop that adds the updates, or None.

    Kernels need arrays of them. 1M rows of 8 f32, added at pairs of indices, take 24 us in XLA on
    an H200, where the kernel, which uses atomics as well, takes 29.
    """
    dtype = ctx.avals_in[0].dtype
    is_measured = platform == "cuda" and dtype == jnp.float32
    if not is_measured or _compat.adds_floats_by_loops():
        return None
    if reduction.reducer != "add" or reduction.negative:
        return None
    if is_fresh and _columns(rows, platform, dtype) is not None:
        return None
    shared = not rows.batch_of_ids
    problem = _scatter_policy.Problem(platform, *rows.problem, dtype, shared=shared)
    if not problem.has_known_sizes():
        return None
    if not rows.is_plain:
        is_atomic = _scatter_policy.is_atomic_in_place(problem)
        reason = "by several indices, which XLA computes where it adds, by atomics as well"
        return reason if is_atomic else None
    if not _scatter_policy.fused_atomics_pay(problem):
        return None
    is_fused = common.is_made_by(ctx, updates, _FUSED, alone=True)
    return "XLA computes the updates where it adds them, by atomics" if is_fused else None


def _columns(
    rows: _scatter_rows.Rows, platform: str, dtype: Any, *how: Any
) -> _scatter_policy.Problem | None:
    """The problem of sums into zeros where columns have their own ids, if its kernel is used."""
    if rows.own_columns is None:
        return None
    problem = _scatter_policy.Problem(platform, *rows.own_columns, dtype, *how)
    return problem if _scatter_policy.columns_pay(problem) else None


_STAYS_SHARDED = "over several devices, a kernel would need all of a dimension that has its own ids"
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
