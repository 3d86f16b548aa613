"""Programs that stay as they are: JAX's own slow operations are swapped where they are lowered."""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
from jax import lax

from jax_oneflow_ops import _compat, _native, _rows, _scatter
from jax_oneflow_ops._checks import in_own_precision

F = TypeVar("F", bound=Callable[..., Any])
_PLATFORMS = ("cpu", "cuda")
_ON, _DETERMINISTIC = "on", "deterministic"


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """How this package computes what one of JAX's scatters does."""

    into: Callable[..., jax.Array]  # (operand, ids, updates, indexing) -> result
    fresh: Callable[..., jax.Array]  # (updates, ids, number of rows, indexing) -> result
    fills: frozenset[str]  # operands for which `fresh` gives the same, as MLIR writes them


def _add(operand: jax.Array, ids: jax.Array, updates: jax.Array, indexing: Any) -> jax.Array:
    bound = {"indexing": indexing, "implementation": None}
    result: jax.Array = _scatter.bind(_scatter.scatter_add_p, operand, ids, updates, **bound)
    return result


def _sum(updates: jax.Array, ids: jax.Array, rows: int, indexing: Any) -> jax.Array:
    bound = {"num_segments": rows, "indexing": indexing, "implementation": None}
    result: jax.Array = _scatter.bind(_scatter.segment_sum_p, updates, ids, rows_spec=None, **bound)
    return result


_ZEROS = frozenset({"0", "0.000000e+00", "(0.000000e+00,0.000000e+00)"})
# What is swapped. Other reductions are other lines.
_REDUCTIONS: dict[Any, _Reduction] = {
    lax.scatter_add_p: _Reduction(_add, _sum, _ZEROS),
    lax.scatter_sub_p: _Reduction(
        lambda operand, ids, updates, how: _add(operand, ids, -updates, how),
        lambda updates, ids, rows, how: _sum(-updates, ids, rows, how),
        _ZEROS,
    ),
}


def _replacement(primitive: Any, platform: str, rule: _compat.Lowering) -> _compat.Lowering:
    """The lowering rule of `primitive`, which was `rule` so far."""

    def lower(ctx: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
        scope = _compat.scope_of(ctx)
        if scope not in (_ON, _DETERMINISTIC):
            return rule(ctx, operand, indices, updates, **params)
        rows = _decision(platform, ctx.avals_in, params)
        if isinstance(rows, str):
            return rule(ctx, operand, indices, updates, **params)
        reduction = _REDUCTIONS[primitive]
        is_fresh = _compat.fill_of(operand) in reduction.fills
        function = functools.partial(
            _reduce,
            rows=rows,
            reduction=reduction,
            is_fresh=is_fresh,
            deterministic=scope == _DETERMINISTIC,
        )
        lower = _compat.lower_plain(function, False)
        results = lower(_compat.with_current_mesh(ctx), operand, indices, updates)
        return _compat.with_shardings_of_types(ctx, results)

    return lower


def _decision(platform: str, avals: Any, params: Any) -> _rows.Rows | str:
    """The rows of a scatter that is swapped, or why it is not."""
    operand, indices, updates = avals
    if not _scatter.is_summed(operand.dtype):
        return f"no kernel for {operand.dtype}"
    choice = _native.choose_implementation("accelerate", None)
    if not _native.is_used("accelerate", platform, choice):
        return "JAX_ONEFLOW_OPS_IMPLEMENTATION=xla" if choice else f"no kernels for {platform}"
    rows = _rows.find(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        clip=params["mode"] == lax.GatherScatterMode.CLIP,
        indices_are_sorted=params["indices_are_sorted"],
    )
    return rows


@in_own_precision
def _reduce(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    rows: _rows.Rows,
    reduction: _Reduction,
    is_fresh: bool,
    deterministic: bool,
) -> jax.Array:
    with _rows.precision(rows):
        ids, indexing = rows.ids(indices, updates.shape)
        indexing = dataclasses.replace(indexing, deterministic=deterministic)
        if not is_fresh:
            return reduction.into(operand, ids, rows.updates(updates), indexing)
        # Sums into zeros have one dimension of rows; a result is reshaped for nothing.
        indexing = dataclasses.replace(indexing, row_rank=1)
        result = reduction.fresh(rows.updates(updates), ids, rows.count, indexing)
        return result.reshape(operand.shape)


# ---- what users call ----


@functools.cache
def _problem() -> str | None:
    """Why nothing can be swapped with the jax that is installed, if so."""
    try:
        _compat.replace_lowerings([*_REDUCTIONS], _PLATFORMS, _replacement)
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


class _Scope(contextlib.ContextDecorator):
    """A context manager and a decorator, for any number of uses and threads at a time."""

    def __init__(self, value: str) -> None:
        self._value = value
        self._local = threading.local()

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        if _problem() is None:
            stack.enter_context(_compat.in_scope(self._value))
        self._local.stacks = [*getattr(self._local, "stacks", []), stack]

    def __exit__(self, *exception: Any) -> None:
        self._local.stacks.pop().close()

    def __call__(self, function: F) -> F:
        wrapped = super().__call__(function)
        # What jax.jit gives functions.
        for name in ("lower", "trace", "eval_shape"):
            if callable(method := getattr(function, name, None)):
                setattr(wrapped, name, super().__call__(method))
        return wrapped


@overload
def accelerate(fun: F, *, deterministic: bool = False) -> F: ...
@overload
def accelerate(fun: bool = True, *, deterministic: bool = False) -> _Scope: ...
def accelerate(fun: Any = True, *, deterministic: bool = False) -> Any:
    """Runs a program with this package's kernels, without a change to the program.

    Inside, JAX's own scatter-adds run as native kernels: those of `jax.ops.segment_sum`,
    ``x.at[...].add``, `jnp.bincount` and `jnp.histogram`, and those that differentiation makes of
    lookups, as in embeddings, `jnp.take_along_axis` and `jax.image.resize`. Outside nothing
    changes. :func:`explain` says what is swapped in a program, and what is not, and why.

    Use it as a function, a decorator or a context manager, inside `jax.jit` or around it::

        step = jax.jit(jof.accelerate(step))

        @jof.accelerate
        def step(state, batch): ...

        with jof.accelerate():
            state = step(state, batch)

        with jof.accelerate(False):  # not this call
            total = jax.ops.segment_sum(data, ids, 10)

    Args:
      fun: a function to run accelerated; or whether what is inside a ``with`` statement is. The
        innermost choice counts, and gradients follow the functions that they are of.
      deterministic: the same bits on every run, at some cost: see :func:`segment_sum`.

    Returns:
      A function like `fun`, with the methods of a function made by `jax.jit` if it is one. Without
      a function: a context manager, which is a decorator, too.

    Raises:
      TypeError: `fun` is neither a function nor a bool.

    Numerics:
      Those of :func:`segment_sum` and :func:`scatter_add`: results may differ from XLA's in the
      last bits, as the order of summation does. Sums of 16-bit values are more exact: they are made
      in float32 and rounded once. An ``indices_are_sorted=True`` that is not true gives wrong sums,
      where XLA may ignore it.

    Notes:
      The lowering rules of JAX's primitives are replaced when this is first used, by ones that
      leave operations outside to the rules before. Where a release of jax does not allow that,
      programs run as they are, after one warning. Programs that are exported need
      :func:`export_checks`.

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
    if fun is False:
        return _Scope(_compat.OFF)
    scope = _Scope(_DETERMINISTIC if deterministic else _ON)
    if fun is True:
        return scope
    if not callable(fun):
        raise TypeError(
            f"accelerate: fun must be a function, True or False, got {fun!r} of type "
            f"{type(fun).__name__}"
        )
    return scope(fun)
