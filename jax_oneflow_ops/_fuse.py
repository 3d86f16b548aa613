"""Python functions of arrays as one kernel."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_oneflow_ops import _checks, _compat, _native, _operands
from jax_oneflow_ops._codegen import derive, parts, primitive, scalars
from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.signature import MAX_OUTPUTS, is_narrow
from jax_oneflow_ops._codegen.source import Spec
from jax_oneflow_ops._codegen.source import source as source_of
from jax_oneflow_ops._codegen.traced import FusionError

__all__ = ["Fused", "FusionError", "fuse"]

P = ParamSpec("P")
R = TypeVar("R")


def fuse(fun: Callable[P, R], *, partial: bool = False) -> "Fused[P, R]":
    """`fun` as one kernel."""
    return Fused(fun, partial)


class Fused(Generic[P, R]):
    """What `fuse` returns: a function."""

    def __init__(self, fun: Callable[P, R], partial: bool):
        if not callable(fun):
            raise TypeError(f"fuse: fun must be a function, got {type(fun).__name__}")
        functools.update_wrapper(self, fun)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._partial = partial

        def run(implementation: str | None, args: Any, kwargs: Any) -> Any:
            return _run(self._name, fun, partial, implementation, args, kwargs)

        run.__name__ = run.__qualname__ = self._name
        self._run = jax.jit(run, static_argnums=0, inline=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        implementation = _native.choose_implementation(self._name, None)
        result: R = self._run(implementation, args, kwargs)
        return result


def _traced(
    fun: Callable[..., Any], tree: Any, leaves: Sequence[Any], partial: bool
) -> tuple[Any, Any]:
    """The jaxpr of a function of flat arguments, and the structure of its result."""
    structure = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal structure
        args, kwargs = jax.tree.unflatten(tree, leaves)
        results, structure = jax.tree.flatten(fun(*args, **kwargs))
        return results

    closed = jax.make_jaxpr(flat)(*leaves)
    if partial:
        closed = parts.flattened(*_compat.jaxpr_and_consts(closed), leaves)
    return closed, structure


def _run(
    name: str,
    fun: Callable[..., Any],
    partial: bool,
    implementation: str | None,
    args: Any,
    kwargs: Any,
) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    leaves = [_checks.as_array(name, "an argument", x, numbers=True) for x in leaves]
    closed, structure = _traced(fun, tree, leaves, partial)
    exact: dict[int, Any] = {}
    if any(is_narrow(str(x.dtype)) for x in leaves):
        wide = [x.astype(jnp.float32) if is_narrow(str(x.dtype)) else x for x in leaves]
        try:
            exact = scalars.exact_literals(closed, _traced(fun, tree, wide, partial)[0])
        except Exception:  # a function of 16-bit arrays only may raise anything
            exact = {}
    jaxpr, consts = _compat.jaxpr_and_consts(closed)
    one_kernel = functools.partial(_one_kernel, name, exact=exact, implementation=implementation)
    if partial:
        results = parts.run(name, jaxpr, consts, leaves, one_kernel)
    else:
        results = one_kernel(jaxpr, consts, leaves)
    return jax.tree.unflatten(structure, results)


def _one_kernel(
    name: str,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    *,
    exact: dict[int, Any],
    implementation: str | None,
) -> list[Any]:
    """The results of a jaxpr, of which those that are computed must be one kernel's."""
    given = dict(zip(jaxpr.invars, args, strict=True))
    computed = [
        var
        for var in dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, core.Literal))
        if var not in given
    ]
    constant = []
    if len({var.aval.shape for var in computed}) > 1:
        for var in computed:
            plan = scalars.plan(name, jaxpr, consts, [scalars.whole(jaxpr, var)], exact)
            if not plan.leaves:  # it depends on no array, and need not be part of the kernel
                constant.append(var)
                given[var] = _kernel(name, plan, [var.aval], args, implementation)[0]
    computed = [var for var in computed if var not in constant]
    shapes = {var.aval.shape: None for var in computed}
    if len(shapes) > 1:
        shown = ", ".join(map(str, shapes))
        raise FusionError(
            f"{name}: the results of one kernel have one shape, got {shown}. Remedy: broadcast "
            "them to one shape, make a function of each, or jax_oneflow_ops.fuse(..., "
            "partial=True)."
        )
    if computed:
        demands = [scalars.whole(jaxpr, var) for var in computed]
        plan = scalars.plan(name, jaxpr, consts, demands, exact)
        outs = _kernel(name, plan, [var.aval for var in computed], args, implementation)
        given.update(zip(computed, outs, strict=True))
    return [
        jnp.asarray(v.val, v.aval.dtype) if isinstance(v, core.Literal) else given[v]
        for v in jaxpr.outvars
    ]


def _kernel(
    name: str, plan: scalars.Plan, avals: Sequence[Any], args: Sequence[Any], how: str | None
) -> list[Any]:
    """A kernel's results, of these types; a plan's leaves are of `args`."""
    dtypes = [str(aval.dtype) for aval in avals]
    if len(plan.leaves) > primitive.MAX_OPERANDS or len(avals) > MAX_OUTPUTS:
        raise FusionError(
            f"{name}: a kernel reads at most {primitive.MAX_OPERANDS} arrays and writes at most "
            f"{MAX_OUTPUTS}, got {len(plan.leaves)} and {len(avals)}. Remedy: make two functions of "
            "it, or pass in stacked arrays."
        )
    if not plan.leaves:
        return [
            jnp.full(aval.shape, value, aval.dtype)
            for value, aval in zip(plan.function(), avals, strict=True)
        ]
    definition = derive.define(name, plan.function, plan.dtypes, dtypes, Definition)
    operands = {}
    for k, (source, alignment) in enumerate(plan.leaves):
        array = source.array if isinstance(source, scalars.Constant) else args[source]
        operands[k] = _aligned(jnp.asarray(array), alignment, avals[0].ndim)
    results = primitive.bind_traced(definition, operands, how)
    return [_compat.broadcast_like(y, aval) for y, aval in zip(results, avals, strict=True)]


def _aligned(x: Any, alignment: scalars.Alignment, rank: int) -> Any:
    """An array as an operand of a kernel whose results have this rank."""
    dropped = [d for d, axis in enumerate(alignment) if axis is None]
    kept = [axis for axis in alignment if axis is not None]
    if dropped:
        x = jax.lax.squeeze(x, dropped)
    if not kept or len(kept) == rank:
        return x
    return jax.lax.expand_dims(x, [d for d in range(rank) if d not in kept])
