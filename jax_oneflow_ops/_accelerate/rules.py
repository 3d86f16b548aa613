"""The lowering rules that replace those of jax's own primitives in a scope of `accelerate`.

A rule looks for a pattern in the program as far as it is lowered: at the operations that made its
operands. The other modules of this package recognise the patterns, know whether it pays to replace
them, and emit what replaces them. A rule calls jax's own rule for everything else. Lowering comes
after differentiation and batching, so rules see what these made.
"""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from jax_oneflow_ops import _compat, _policy
from jax_oneflow_ops._accelerate import (
    common,
    convolutions,
    dot_attention,
    dot_attention_search,
    exp_sums,
    explanation,
    gathers,
    norms,
    pooling,
    products,
    scatters,
    searches,
    softmaxes,
)

F = TypeVar("F", bound=Callable[..., Any])


_MAKES_SUMS = tuple(f"stablehlo.{name}" for name in ("multiply", "convert", "exponential"))
"""The operations whose results `_sums` looks for."""


def _sums(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of sums over dimensions: dot products of gathered rows, and exponentials of rows."""

    def lower(ctx: Any, operand: Any, **params: Any) -> Any:
        source, axes = _compat.without_constraints(operand), params["axes"]
        made = _compat.operands_of(source, *_MAKES_SUMS)
        if not made or not common.is_open(ctx) or common.why_no_kernels(ctx, platform):
            return rule(ctx, operand, **params)
        (result,), is_asked_for = ctx.avals_out, common.is_asked_for()
        if pair := gathers.pair_of(ctx, source, axes):
            if not (is_asked_for or pair.pays(ctx, platform)):
                return rule(ctx, operand, **params)
            results = pair.lower(ctx)
            how = primitive.name, (result, pair.products), gathers.FROM_TABLES
            more: dict[str, Any] = {"bytes": _policy.nbytes(result, *pair.avals)}
        elif found := exp_sums.find(ctx, source, axes):
            decision = found.pays(ctx, platform)
            if not (is_asked_for or decision):
                return rule(ctx, operand, **params)
            results = _compat.with_shardings_of_types(ctx, found.lower(ctx))
            how = exp_sums.NAME, (result, found.summed), exp_sums.READS_ONCE
            nbytes = _policy.nbytes(result, found.aval)
            more = {"decision": decision, "dtype": found.aval.dtype.name, "bytes": nbytes}
        else:
            return rule(ctx, operand, **params)
        explanation.add(primitive, ctx, results[0], *how, **more)
        return results

    return lower


def _softmaxes(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of quotients and products: those that are a softmax or its gradient."""
    is_product = primitive is lax.mul_p
    find: Any = softmaxes.find_gradient if is_product else softmaxes.find
    rule = _compat.with_plain_cases(rule)

    def lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        found = None
        if common.may_change(ctx, platform) and _compat.has_known_sizes(ctx):
            pair = [*map(_compat.without_constraints, (x, y))]
            if any(_compat.operands_of(z, "stablehlo.exponential") for z in pair[: 1 + is_product]):
                found = find(*pair)
        if found is None or common.why_no_kernels(ctx, platform):
            return rule(ctx, x, y, **params)
        is_possible = _compat.can_be_sharded(ctx)
        decision = found.pays(ctx, platform) if is_possible else None
        if not (decision or (is_possible and common.is_asked_for() and found.has_kernel)):
            return found.keep(ctx, rule(ctx, x, y, **params))
        results, nbytes = found.lower(ctx), found.arrays * _policy.nbytes(found.aval)
        how = found.name, [found.aval] * 2, softmaxes.ONE_KERNEL
        explanation.add(primitive, ctx, results[0], *how, decision=decision, bytes=nbytes)
        return results

    return lower


def _products(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of matrix products: finds attention, and pads other products that are slow."""

    def lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        if not (common.may_change(ctx, platform) and _compat.has_known_sizes(ctx)):
            return rule(ctx, x, y, **params)
        part = _part_of_attention(ctx, x, y, platform, params)
        if part is None:
            return padded(ctx, x, y, **params)
        found, by = part
        if by is None:
            return found.keep(ctx, padded(ctx, x, y, **params))
        is_called = found.is_called(ctx)
        results = found.lower(ctx, by)
        if not is_called:
            for replaced in found.replaced(ctx):
                _compat.untag(replaced, explanation.TAG)
            how = found.name, [found.aval] * 2, found.reason
            softmax = softmaxes.known_in(ctx).results.get(found.softmax.exponentials)
            more = {"softmax_line": softmax.line if softmax else "", "bytes": found.nbytes}
            explanation.add(primitive, ctx, results[0], *how, **more)
        return results

    def padded(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        devices = _compat.count_shards(ctx)
        dimensions = params["dimension_numbers"]
        product = products.Product(ctx, (x, y), dimensions, params["precision"])
        padding = product.padding(may_be_sharded=devices > 1)
        if padding is None or common.why_no_kernels(ctx, platform):
            return rule(ctx, x, y, **params)
        if not (common.is_asked_for() or product.gains_by(padding, devices)):
            return rule(ctx, x, y, **params)
        results = product.lower(rule, padding, **params)
        dot_attention.remember(ctx, results[0], (x, y), dimensions)
        avals = *ctx.avals_out, max(ctx.avals_in, key=lambda aval: aval.size)
        explanation.add(primitive, ctx, results[0], "matrix product", avals, products.PADDED)
        return results

    return lower


def _part_of_attention(
    ctx: Any, x: Any, y: Any, platform: str, params: dict[str, Any]
) -> tuple[Any, Any] | None:
    """The part of an attention that a product is, and what implements its kernels; or None.

    The part may also be one whose product stays until another part is replaced: then nothing does.
    """
    by = dot_attention.KERNELS.get(platform)
    if by is None or common.mode(ctx) != common.ON:
        return None
    found = dot_attention_search.find(ctx, (x, y), params["dimension_numbers"])
    if found is None or common.why_no_kernels(ctx, platform):
        return None
    if isinstance(found, dot_attention.WithWeights):
        return found, None
    if not (common.is_asked_for() or found.pays(ctx, platform)):
        return None
    if explanation.current.get() and jax.default_backend() != "gpu":  # where cuDNN cannot be asked
        by = "xla"
    return (found, by) if found.has_kernels(ctx, by) else None


_FORMS: dict[Any, Callable[..., Any]] = {
    lax.conv_general_dilated_p: convolutions.find,
    lax.select_and_scatter_add_p: pooling.find_maxima,
    lax.reduce_window_sum_p: pooling.find_sums,
}
"""By primitive: what finds calls that XLA runs faster in another form."""


def _rewritten(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of operations that XLA runs faster in another form."""
    find = _FORMS[primitive]

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        is_open = common.is_open(ctx) and _compat.has_known_sizes(ctx)
        if not is_open or common.why_no_kernels(ctx, platform):
            return rule(ctx, *operands, **params)
        found = find(ctx, operands, platform, params)
        if found is None or not (common.is_asked_for() or found[0].pays(platform)):
            return rule(ctx, *operands, **params)
        form, avals, values = found
        results = common.lower(_compute, ctx.replace(avals_in=avals), *values, form=form)
        shapes = *ctx.avals_out, avals[0]
        explanation.add(primitive, ctx, results[0], form.name, shapes, form.reason)
        return results

    return lower


def _compute(*operands: jax.Array, form: Any) -> jax.Array:
    result: jax.Array = form.compute(*operands)
    return result


_MOST_STEPS = 16


def _searched(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of loops of fixed length: swaps the searches of `jnp.searchsorted`.

    Unrolls other short searches, so that XLA fuses their steps. In a loop, each step writes
    the remaining ranges to memory.
    """

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        if searches.keep_reference(ctx, params) or not common.is_open(ctx):
            return rule(ctx, *args, **params)
        has_masks = any(aval.dtype == bool and aval.ndim > 1 for aval in ctx.avals_in)
        if has_masks and common.mode(ctx) == common.ON and common.may_change(ctx, platform):
            params = dot_attention_search.with_own_masks(ctx, args, params)
        if not searches.may_be_search(ctx, args, params):
            return rule(ctx, *args, **params)
        search = searches.find(ctx, args, params)
        reason = common.why_no_kernels(ctx, platform)
        if search and not reason and not common.is_asked_for():
            reason = search.why_not(platform, not _compat.knows_shapes_of_shards(ctx))
        if search and not reason:
            results = common.lower(searches.ends, ctx, *args, several=True, search=search)
        else:
            if params["length"] <= _MOST_STEPS and common.runs_kernels(platform):
                params["unroll"] = params["length"]
            results = rule(ctx, *args, **params)
        if search:
            avals = ctx.avals_in[search.place], ctx.avals_in[1 - search.place]
            how = "binary search", avals, reason or searches.MEASURED
            explanation.add(primitive, ctx, results[1], *how, swapped=not reason)
        return results

    return lower


def _with_handle(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of maxima, which `exp_sums` may replace later."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        is_replaced = common.is_open(ctx) and _compat.has_known_sizes(ctx)
        return _compat.as_handles(results) if is_replaced else results

    return lower


def _without_metadata(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of an operation that old releases of jaxlib compile only without metadata.

    jax attaches metadata to the operation that makes the results: here a reshape is added for it.
    """

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        return [_compat.hlo.reshape(x.type, x) for x in results] if common.mode(ctx) else results

    return lower


def _with_chains(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of function calls: turns chains of elementwise operations in them into kernels."""

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        is_fused = (_compat.scope_of(ctx) or "").endswith(common.FUSE)
        is_plain = is_fused and _compat.is_for_one_device(ctx) and _compat.has_known_sizes(ctx)
        if is_plain and common.runs_kernels(platform):
            from jax_oneflow_ops._accelerate import chains  # lazily: few programs need it

            done, jaxpr = _compat.functions_of_module(ctx), params["jaxpr"]
            key = _with_chains, jaxpr
            if key not in done:
                name = f"{params['name']}_chain"
                done[key] = chains.rewritten(name, jaxpr, platform, _may_be_in_chain)
            params["jaxpr"] = done[key]
        return rule(ctx, *args, **params)

    return lower


def _may_be_in_chain(eqn: Any) -> bool:
    """Whether an operation of a function may become part of a kernel."""
    scope = _compat.scope_of(eqn)
    # Operations that autodiff made have no scope.
    is_inside = scope is None or scope.endswith((common.FUSE, common.FUSED))
    return is_inside and not _compat.is_computed_elsewhere(eqn)


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """A new rule of some primitives; `_compat.replace_lowerings` explains the options."""

    primitives: Sequence[Any]
    rule: Callable[..., _compat.Lowering]
    on_several: bool = False
    looks_at_operands: bool = True

    def install(self, platforms: Sequence[str] = common.PLATFORMS) -> None:
        options = {"on_several": self.on_several, "looks_at_operands": self.looks_at_operands}
        _compat.replace_lowerings(self.primitives, platforms, self.rule, **options)


_RULES = (
    _Replacement([*scatters.REDUCTIONS], scatters.rule, on_several=True),
    _Replacement([lax.scan_p], _searched, on_several=True),
    _Replacement([lax.reduce_sum_p], _sums),
    _Replacement([lax.div_p, lax.mul_p], _softmaxes),
    _Replacement([lax.dot_general_p], _products),
    _Replacement([*_FORMS], _rewritten),
    _Replacement([lax.reduce_max_p], _with_handle, looks_at_operands=False),
    _Replacement([lax.approx_top_k_p], _without_metadata, looks_at_operands=False),
    _Replacement(norms.PRIMITIVES, norms.rule),
)


@functools.cache
def _problem(value: str) -> str | None:
    """Installs the rules for a scope of `value`; returns why jax does not allow that, or None."""
    try:
        for replacement in _RULES:
            replacement.install()
        # Not in _RULES: if jax has no such name, that is a problem to warn of, as others are.
        _compat.replace_calls("silu", norms.silu)
        reshards = [_compat.reshard_primitive()]
        _Replacement(reshards, scatters.by_jax_if_unreduced).install()
        if value.startswith(common.DETERMINISTIC):
            ordered = _Replacement([lax.scatter_p], scatters.in_order, on_several=True)
            ordered.install(["cuda"])
        if value.endswith(common.FUSE):
            calls = [_compat.jit_primitive()]
            _Replacement(calls, _with_chains, looks_at_operands=False).install()
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        _warn(problem)
        return problem
    return None


@functools.cache
def _warn(problem: str) -> None:
    """Warns once, whatever scopes are opened."""
    warnings.warn(
        f"jax_oneflow_ops.accelerate runs programs as they are: jax {_compat.RELEASE} differs "
        f"from the releases that it knows ({problem}). Remedy: update jax_oneflow_ops.",
        RuntimeWarning,
        stacklevel=5,
    )


class Scope:
    """A context manager and decorator, which may be reused, nested and shared by threads."""

    def __init__(self, value: str, note: str | None = None) -> None:
        self._value, self._note = value, note
        self._entered = threading.local()

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        if _problem(self._value) is not None:
            yield
            return
        with _compat.in_scope(self._value, self._note), norms.swapped(self._value):
            yield

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
