"""The one place that wires an operation into JAX.

An operation is two primitives. The outer one is what users' programs contain: it carries abstract
evaluation, batching, differentiation, and chooses the implementation when it is lowered. Where
native kernels run it lowers to a `custom_partitioning` function, which tells the SPMD partitioner
how the work is divided over devices, around the inner primitive, which lowers to one FFI call on
the shard of one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_oneflow_ops import _compat, _native

Params = dict[str, Any]
# How a call may be divided: the names of each operand's and of each result's dimensions, in the
# notation of `custom_partitioning`, and the names that every device needs whole.
Division = tuple[Sequence[Sequence[str]], Sequence[Sequence[str]], frozenset[str]]


def define(
    target: str,
    *,
    function: str,
    abstract_eval: Callable[..., Any],
    reference: Callable[..., Any],
    attributes: Callable[..., Params],
    division: Callable[..., Division],
    batch: Callable[..., tuple[Any, Any]],
    multiple_results: bool = False,
) -> core.Primitive:
    """Defines a primitive.

    Args:
      target: the FFI target's name, which becomes the primitive's.
      function: the public function that errors name.
      abstract_eval: `(*avals, **params) -> aval`; must keep shardings (`aval.update`).
      reference: `(*args, **params) -> result` in pure jnp: the "xla" implementation, and what runs
        on platforms without native kernels.
      attributes: `(**params) -> attributes of the FFI call`, as NumPy scalars and arrays.
      division: `(*avals, **params) -> Division`.
      batch: `(primitive, args, dims, **params) -> (result, its batch dimension)`: a batching rule,
        given the primitive that is being defined.
      multiple_results: results, avals and batch dimensions are lists.

    Every primitive takes a parameter `implementation` (None, "native" or "xla"), which none of the
    functions above is given except `batch`.
    """
    inner = core.Primitive(f"{target}_ffi")
    inner.multiple_results = multiple_results
    inner.def_abstract_eval(abstract_eval)
    lower_to_ffi = jax.ffi.ffi_lowering(target)
    mlir.register_lowering(
        inner,
        lambda ctx, *args, **params: lower_to_ffi(ctx, *args, **attributes(**params)),
    )

    outer = core.Primitive(target)
    outer.multiple_results = multiple_results
    outer.def_abstract_eval(
        lambda *avals, implementation, **params: abstract_eval(*avals, **params)
    )
    outer.def_impl(functools.partial(_compat.apply_primitive, outer))
    _compat.require_devices_during_lowering(outer)

    def run(platform: str, divide: bool, *args: Any, implementation: Any, **params: Any) -> Any:
        if implementation == "xla":
            return reference(*args, **params)
        if _native.available(platform):
            call = functools.partial(inner.bind, **params)
            return (_divided(call, division, params) if divide else call)(*args)
        if implementation == "native":
            raise _native.missing(function, platform)
        return reference(*args, **params)

    def lower(ctx: Any, *args: Any, platform: str, **params: Any) -> Any:
        divide = not _compat.is_partially_manual(ctx)
        function = functools.partial(run, platform, divide)
        return mlir.lower_fun(function, multiple_results=multiple_results)(ctx, *args, **params)

    for platform in (None, "cpu", "cuda", "rocm", "tpu"):
        rule = functools.partial(lower, platform=platform or "other")
        mlir.register_lowering(outer, rule, platform=platform)
    batching.primitive_batchers[outer] = functools.partial(batch, outer)
    return outer


def define_linear_pair(
    forward: core.Primitive, backward: core.Primitive, transposed_params: Callable[..., Params]
) -> None:
    """Declares two linear primitives of one operand to be each other's transposes.

    JVP, VJP and every higher derivative follow.

    Args:
      forward: a primitive made by `define`.
      backward: its transpose, likewise.
      transposed_params: `(aval, **params) -> params` of the transpose of a call on `aval`.
    """
    for primitive, transpose in ((forward, backward), (backward, forward)):

        def rule(ct: Any, x: Any, *, transpose: core.Primitive = transpose, **params: Any) -> Any:
            result = transpose.bind(ct, **transposed_params(x.aval, **params))
            return [_compat.with_sharding_of(result, x.aval)]

        ad.deflinear2(primitive, rule)


def _divided(
    call: Callable[..., Any], division: Callable[..., Division], params: Params
) -> Callable[..., Any]:
    """`call` as a function that the SPMD partitioner can divide over devices."""
    # Imported here because it is slow to import and needed only when something is lowered.
    from jax.experimental.custom_partitioning import custom_partitioning

    function = custom_partitioning(call)

    def partition(
        mesh: Mesh, args: Sequence[Any], result: Any
    ) -> tuple[Mesh, Callable[..., Any], Any, tuple[NamedSharding, ...]]:
        operands, results, whole = division(*args, **params)
        axes: dict[str, Any] = {}
        for arg, names in zip(args, operands, strict=True):
            spec = (*arg.sharding.spec, *(None,) * len(names))
            for name, axis in zip(names, spec, strict=False):
                if name not in whole and axis is not None:
                    axes.setdefault(name, axis)

        def sharding(names: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in names)))

        shardings = [sharding(names) for names in results]
        return (
            mesh,
            call,
            shardings if isinstance(result, list) else shardings[0],
            tuple(sharding(names) for names in operands),
        )

    def sharding_rule(mesh: Any, operand_types: Any, result_types: Any) -> str:
        operands, results, _ = division(*operand_types, **params)
        sides = (", ".join(" ".join(names) for names in side) for side in (operands, results))
        return " -> ".join(sides)

    function.def_partition(partition=partition, sharding_rule=sharding_rule)
    return function
