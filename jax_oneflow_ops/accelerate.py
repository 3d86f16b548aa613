"""`accelerate` runs unchanged programs with kernels, and `explain` shows what it swaps."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from jax_oneflow_ops import _compat

if TYPE_CHECKING:
    from jax_oneflow_ops._accelerate.report import Report
    from jax_oneflow_ops._accelerate.rules import Scope

F = TypeVar("F", bound=Callable[..., Any])


@overload
def accelerate(
    fun: F, *, tune: bool = False, deterministic: bool = False, fuse: bool = False
) -> F: ...
@overload
def accelerate(fun: bool = True, *, deterministic: bool = False) -> "Scope": ...
def accelerate(
    fun: Any = True, *, tune: bool = False, deterministic: bool = False, fuse: bool = False
) -> Any:
    """Runs a program with this package's kernels, without a change to the program.

    Inside, JAX's own scatters that add, subtract, multiply or take maxima or minima run as native
    kernels: those of `jax.ops.segment_sum` and its relatives, ``x.at[...].add``, `jnp.bincount` and
    `jnp.histogram`, and the gradients of lookups, as in embeddings, `jnp.take_along_axis` and
    `jax.image.resize`. The searches of `jnp.searchsorted` and `jnp.digitize` are kernels, too.
    Kernels also compute sums and dot products of gathered rows, such as
    ``segment_sum(w[:, None] * x[senders], receivers)``, without an array of these rows, where that
    was measured to be faster. On GPUs, cuDNN computes 16-bit attention without an array of weights,
    kernels compute other 16-bit softmaxes and their gradients, and sums of exponentials, as in
    cross entropies, read their rows once. Flax's group norms, also with silu, are kernels. Other
    slow operations become operations of XLA that are fast: some convolutions and gradients of
    pooling, and matrix products of sizes that GPUs compute slowly, which are padded. Outside,
    nothing changes. :func:`explain` shows what is swapped in a program, what is not, and why.

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
        shapes, on copies of them. It runs without kernels unless they gain more than 2 %, and if it
        writes to mutable arrays. The times are stored in the folder of compiled kernels
        (:class:`ElementwiseKernel` says where), and logged by the logger "jax_oneflow_ops". Call
        the result outside `jax.jit`, in a program of one process. A function that `jax.jit` did not
        return is compiled as one program.
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
      TypeError: `fun` is neither a function nor a bool, or it is async, a generator or compiled
        already; or `tune` or `fuse` is set without a function; or a tuned function is called inside
        a transformation; or `fuse` is set and an argument that is not an array is not hashable.
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
      The first use replaces the lowering rules of some primitives of JAX, how calls of functions
      named "silu" are traced, and the method of `flax.nnx.GroupNorm`. The replacements call the
      originals for operations outside. If a release of JAX does not allow that, programs run
      without kernels, after one warning. Exported programs need :func:`export_checks`.

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
    if isinstance(fun, jax.stages.Compiled):
        raise TypeError(
            "accelerate: fun is compiled already; accelerate the function before "
            "you compile it: jax.jit(accelerate(step)).lower(state, batch).compile()"
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
    from jax_oneflow_ops._accelerate import common  # imported lazily: not every program needs it
    from jax_oneflow_ops._accelerate.rules import Scope

    value = _compat.OFF if fun is False else common.DETERMINISTIC if deterministic else common.ON
    if isinstance(fun, bool):
        return Scope(value)
    fun = _as_function(fun)
    plain: Any = jax.jit(fun) if tune and not common.is_jitted(fun) else fun
    if fuse:
        from jax_oneflow_ops._accelerate import chains  # imported lazily: few programs need it

        program = chains.program(Scope(value + common.FUSED)(plain))
        value += common.FUSE
        accelerated = Scope(value)(program)
    else:
        accelerated = Scope(value)(plain)
    if not tune:
        return accelerated
    from jax_oneflow_ops._accelerate import tune as tuning  # imported lazily: few programs need it

    return tuning.tuned(Scope(_compat.OFF)(plain), accelerated, value)


def explain(
    fun: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> "Report":
    """Shows what `accelerate` swaps in a program, what it does not, and why.

    The program is traced and lowered, not compiled and not run.

    Args:
      fun: a function of arrays, or what `jax.jit` or :func:`accelerate` made of one.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`. Bind other arguments with
        `functools.partial`, or mark them as static with `jax.jit`.
      platform: what to lower for: ``"cpu"``, ``"cuda"`` or ``"gpu"``, or a kind of device that was
        measured, such as ``"NVIDIA H200"``, or its beginning. Neither such a device nor its kernels
        are needed. By default JAX's default device.
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
    from jax_oneflow_ops._accelerate import explain as explained  # lazily, as in `accelerate`

    return explained.report_on(_as_function(fun), args, kwargs, platform)


def _as_function(fun: Any) -> Any:
    """A method made by `jax.jit` as a function of the other arguments; others unchanged.

    Python passes the attributes of a method on to a bound method, so its `trace` takes `self`.
    """
    from jax_oneflow_ops._accelerate import common  # lazily, as in `accelerate`

    if not isinstance(fun, types.MethodType) or not common.is_jitted(fun):
        return fun
    of: Any = fun.__func__
    own: Any = functools.partial(of, fun.__self__)
    functools.update_wrapper(own, fun, updated=())
    for name in ("lower", "trace", "eval_shape"):
        setattr(own, name, functools.partial(getattr(of, name), fun.__self__))
    own.clear_cache = of.clear_cache
    return own
