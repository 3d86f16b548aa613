"""What all rules ask: whether they apply to an operation, and whether kernels may run there."""

import functools
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax

from jax_oneflow_ops import _compat, _native, _policy
from jax_oneflow_ops._accelerate.symbols import Place

PLATFORMS = ("cpu", "cuda")
ON, DETERMINISTIC = OPEN = "on", "deterministic"
# Suffixes of the above: around the call of a function whose chains are fused, and inside of it.
FUSE, FUSED = "+fuse", "+fused"


def is_jitted(fun: Any) -> bool:
    """Whether `fun` was made by `jax.jit`, or wraps such a function and has its methods."""
    return all(callable(getattr(fun, name, None)) for name in ("lower", "trace", "eval_shape"))


def mode(where: Any) -> str | None:
    """The mode of the scope in which an operation was traced; None outside of scopes.

    `where`: its equation, or the context in which it is lowered.
    """
    scope = _compat.scope_of(where)
    return scope and scope.partition("+")[0]


def is_open(ctx: Any) -> bool:
    """Whether an operation was traced in a scope that accelerates it.

    Not if a type is unreduced or reduced: kernels return sums over all devices.
    """
    if mode(ctx) not in OPEN:
        return False
    return not any(map(_compat.unreduced_or_reduced_axes, (*ctx.avals_in, *ctx.avals_out)))


def may_change(ctx: Any, platform: str) -> bool:
    """Whether an operation is in a scope, on a platform where it may be replaced."""
    return is_open(ctx) and (platform == "cuda" or is_asked_for())


def runs_kernels(platform: str) -> bool:
    """Whether there are kernels, and the environment does not switch them off."""
    implementation = _native.choose_implementation("accelerate", None)
    return _native.is_used("accelerate", platform, implementation)


def is_asked_for() -> bool:
    """Whether kernels run wherever they can, regardless of measurements."""
    return _native.choose_implementation("accelerate", None) == "native"


def why_no_kernels(ctx: Any, platform: str) -> str | None:
    """The reason why no kernels run where an operation was traced, or None."""
    if not runs_kernels(platform):
        asked = _native.choose_implementation("accelerate", None) is not None
        none = f"there are no kernels for {platform}"
        return "JAX_ONEFLOW_OPS_IMPLEMENTATION is xla" if asked else none
    if _compat.is_computed_elsewhere(ctx):
        return "jax.experimental.compute_on says where it runs"
    if _compat.automatic_axes_beside_manual_ones(ctx):
        return "in a shard_map over some axes of the mesh only, kernels would all-gather"
    return None


def is_made_by(ctx: Any, value: Any, names: Container[str], *, alone: bool = False) -> bool:
    """Whether a value is the result of an operation with one of these names: see `name_of_maker`.

    Looks through reshapes, transpositions and calls of functions. With `alone`, no operation so far
    may read the value.
    """
    reads = 0  # of what was looked through
    place = Place(value)
    while True:
        if alone and _compat.count_uses(place.value) > reads:
            return False
        passed = place.across_call(ctx)
        if passed is None:
            own = _compat.without_constraints(place.value)
            passed = Place(own, place.calls) if own != place.value else None
        if passed is None:
            before = place.operands("stablehlo.reshape", "stablehlo.transpose")
            passed = before[0] if before else None
        if passed is None:
            return _compat.name_of_maker(place.value) in names
        place, reads = passed, 1


def lower(
    function: Callable[..., Any], ctx: Any, *operands: Any, several: bool = False, **how: Any
) -> Any:
    """Lowers `function(*operands, **how)`, which jax traces. `several`: it returns a list."""
    rule = _compat.lower_plain(_jitted(function, **how), several)
    results = rule(_compat.with_current_mesh(ctx), *operands)
    return _compat.with_shardings_of_types(ctx, results)


@functools.lru_cache(maxsize=1024)
def _jitted(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """One function for equal calls: jax traces it once, and lowers it once per program."""
    return jax.jit(functools.partial(function, **how))


def equations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str, dict[Any, Any]]]:
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
                yield from equations(inner, line)
