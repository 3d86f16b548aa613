"""Computes the group norms of flax's modules by kernels, together with a silu that follows.

On an H200, the training step of a U-Net of batch 32 took 5.29 ms, 5.18 ms with kernels for its
group norms, and 4.86 ms with kernels that also apply silu. Layer norms stay as they are: with
kernels for them, steps of vision and language models took as long as before.

Norms are found when a program is traced, not when it is lowered as other operations are. By then
they are differentiated, and the gradient of such a norm and of silu is some thirty operations,
which differ between releases. A norm is the call of a module, and its result is the operand of
`jax.nn.silu`.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_oneflow_ops import _compat, _group_norm, _native, _policy
from jax_oneflow_ops._accelerate import common, explanation

NORM = "+norm"
"""The suffix of the scope of a norm."""
ONE_CALL = "one call for the norm and a silu that follows, one call for all gradients"
_VJP = _group_norm.vjp_p
_NAMES = {_group_norm.group_norm_p: "group norm", _VJP: "group norm gradient"}
PRIMITIVES = (*_NAMES,)

_here = threading.local()
"""`scopes`: the values of the scopes that are open. `last`: a weak reference to the result of the
last norm, and the function that computes it."""


@contextlib.contextmanager
def swapped(value: str) -> Iterator[None]:
    """A context that swaps the group norms of flax, or keeps them, in a scope of this value."""
    linen, nnx = (sys.modules.get(f"flax.{name}") for name in ("linen", "nnx"))
    if hasattr(nnx, "GroupNorm"):
        _replace_method(nnx)
    intercept = getattr(linen, "intercept_methods", lambda _: contextlib.nullcontext())
    scopes = _here.__dict__.setdefault("scopes", [])
    scopes.append(value)
    try:
        with intercept(_swap):
            yield
    finally:
        scopes.pop()


def _swap(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Computes a call of a method of a `flax.linen` module.

    Flax calls the interceptors from the outermost to the innermost, which then calls the method.
    """
    module, is_innermost = context.module, next_fun is context.orig_method
    is_norm = type(module) is sys.modules["flax.linen"].GroupNorm
    if is_norm and is_innermost and context.method_name == "__call__" and _may_swap(args, kwargs):
        from jax_oneflow_ops import linen  # lazily: flax is optional

        if (norm := linen.group_norm_of(module, args[0], kwargs.get("mask"))) is not None:
            return _computed(norm)
    return next_fun(*args, **kwargs)


@functools.cache
def _replace_method(nnx: Any) -> None:
    """Lets calls of `flax.nnx.GroupNorm`, which has no interceptors, be swapped in scopes."""
    module = nnx.GroupNorm
    own = module.__call__

    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is module and getattr(_here, "scopes", None) and _may_swap(args, kwargs):
            from jax_oneflow_ops import nnx as norms  # lazily: flax is optional

            if (norm := norms.group_norm_of(self, args[0], kwargs.get("mask"))) is not None:
                return _computed(norm)
        return own(self, *args, **kwargs)

    module.__call__ = call


def _computed(norm: Callable[..., jax.Array]) -> jax.Array:
    """The result of a function of an activation, which is remembered for `silu`."""
    value = _here.scopes[-1]

    def compute(activation: str | None = None) -> jax.Array:
        with _compat.in_scope(value + NORM):
            return norm(activation=activation)

    y = compute()
    if isinstance(y, jax.core.Tracer):  # else what follows is no part of a program
        _here.last = weakref.ref(y, _forget), compute
    return y


def _forget(reference: Any) -> None:
    """Releases the operands of a norm whose result no longer exists."""
    if getattr(_here, "last", (None,))[0] is reference:
        del _here.last


def _may_swap(args: Any, kwargs: Any) -> bool:
    """Whether a call of a norm may be swapped here, and no kernel would need all pixels copied."""
    if _here.scopes[-1] == _compat.OFF or len(args) != 1 or kwargs.keys() - {"mask"}:
        return False
    if not isinstance(args[0], jax.Array) or args[0].ndim == 0:
        return False
    if _native.choose_implementation("accelerate", None) == "xla":
        return False
    kind = jax.typeof(args[0])
    spec = getattr(getattr(kind, "sharding", None), "spec", ())
    if not explanation.is_known([kind]) or any(axis is not None for axis in spec[1:]):
        return False
    if _compat.unreduced_or_reduced_axes(kind) or _compat.is_partly_manual():
        return False
    return not _compat.is_computed_elsewhere(_compat.equation_of(lambda x: x + 1, 0.0))


def silu(x: Any, jaxpr: Any) -> jax.Array | None:
    """The silu of a group norm in one kernel; None if `x` is no norm, or `jaxpr` no silu."""
    if not hasattr(_here, "last") or _here.last[0]() is not x:
        return None
    compute: Callable[..., jax.Array] = _here.last[1]
    own = _compat.equation_of(jax.nn.silu, x)
    is_silu = common.mode(own) in common.OPEN and str(jaxpr) == str(own.params["jaxpr"])
    return compute("silu") if is_silu else None


def rule(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The rule of our norms: reports those that were swapped."""

    def lower(ctx: Any, x: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, x, *args, **params)
        if explanation.current.get() and (_compat.scope_of(ctx) or "").endswith(NORM):
            why_not, is_vjp = common.why_no_kernels(ctx, platform), primitive is _VJP
            call = _policy.describe(primitive, ctx.avals_in, **params)
            decision = _policy.choose(call, platform, explanation.device_kind(platform))
            is_chosen = decision.implementation == "native" or common.is_asked_for()
            if _compat.knows_shapes_of_shards(ctx) and not is_chosen:
                why_not = why_not or decision.reason
            if params["implementation"] == _policy.WITH_GRADIENT and not is_vjp:
                # The times are those of the norm with its gradient: these are in the other row.
                decision = dataclasses.replace(decision, native_us=None, xla_us=None)
            aval = ctx.avals_in[0]
            how = _NAMES[primitive], [aval] * 2, why_not or ONE_CALL
            nbytes, swapped = (2 + is_vjp) * _policy.nbytes(aval), not why_not
            more: dict[str, Any] = {"decision": decision, "swapped": swapped, "bytes": nbytes}
            explanation.add(primitive, ctx, results[0], *how, **more)
        return results

    return lower
