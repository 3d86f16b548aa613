"""The one place that wires an operation into JAX.

An operation is two primitives. The outer one is what users' programs contain: it carries abstract
evaluation, batching, differentiation, and chooses the implementation when it is lowered. Where
native kernels run it lowers to a `custom_partitioning` function, which tells the SPMD partitioner
how the work is divided over devices, around the inner primitive, which lowers to FFI calls on the
shard of one device: to one, or to what a function of that shard makes of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_oneflow_ops import _compat, _native

Params = dict[str, Any]
# How a call may be divided: the names of each operand's and of each result's dimensions, in the
# notation of `custom_partitioning`, and the names that every device needs whole. Over names of
# operands that results lack, the shards' results are summed.
Division = tuple[Sequence[Sequence[str]], Sequence[Sequence[str]], frozenset[str]]


def define(
    target: str,
    *,
    function: str,
    abstract_eval: Callable[..., Any],
    reference: Callable[..., Any],
    attributes: Callable[..., Params] | None = None,
    native: Callable[..., Any] | None = None,
    division: Callable[..., Division],
    summed: Callable[..., Any] | None = None,
    batch: Callable[..., tuple[Any, Any]],
    multiple_results: bool = False,
) -> core.Primitive:
    """Defines a primitive.

    Args:
      target: the primitive's name, and that of its FFI target if it is one call.
      function: the public function that errors name.
      abstract_eval: `(*avals, **params) -> aval`; must keep shardings (`aval.update`).
      reference: `(*args, **params) -> result` in pure jnp: the "xla" implementation, and what runs
        on platforms without native kernels.
      attributes: of an op that is one FFI call: `(**params) -> attributes of that call`, as NumPy
        scalars and arrays.
      native: of any other op, in its place: `(platform, *args, **params) -> result` on one device,
        a function in jnp and of `jax.ffi.ffi_call`.
      division: `(*avals, **params) -> Division`.
      summed: `(call, axes, *args) -> result` on one device, where a call of `native` is divided
        along names that results lack: what all devices of the mesh axes `axes` have, from
        `call(*args)` on each one's shard. By default the sum of the calls.
      batch: `(primitive, args, dims, **params) -> (result, its batch dimension)`: a batching rule,
        given the primitive that is being defined.
      multiple_results: results, avals and batch dimensions are lists.

    Every primitive takes a parameter `implementation` (None, "native" or "xla"), which none of the
    functions above is given except `batch`.
    """
    inner = core.Primitive(f"{target}_ffi")
    inner.multiple_results = multiple_results
    inner.def_abstract_eval(
        lambda *avals, platform, mesh_axes, **params: abstract_eval(*avals, **params)
    )

    if attributes is not None:
        mlir.register_lowering(inner, _lower_to_call(target, attributes))
    elif native is not None:
        function_of_shard = functools.partial(_on_one_device, native, summed or _sum)
        rule = _compat.lower_plain(function_of_shard, multiple_results)
        mlir.register_lowering(inner, rule)

    outer = core.Primitive(target)
    outer.multiple_results = multiple_results
    outer.def_abstract_eval(
        lambda *avals, implementation, **params: abstract_eval(*avals, **params)
    )
    outer.def_impl(functools.partial(_compat.apply_primitive, outer))
    _compat.require_devices_during_lowering(outer)

    lower_reference = _compat.lower_plain(reference, multiple_results)

    def lower(
        ctx: Any, *args: Any, platform: str, implementation: str | None, **params: Any
    ) -> Any:
        if implementation == "xla" or not _native.available(platform):
            if implementation == "native":
                raise _native.missing(function, platform)
            return lower_reference(ctx, *args, **params)
        call: Any = functools.partial(inner.bind, platform=platform, mesh_axes=(), **params)
        if not _compat.is_partially_manual(ctx):
            call = _divided(call, division, params)
        return mlir.lower_fun(call, multiple_results=multiple_results)(ctx, *args)

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


def _lower_to_call(target: str, attributes: Callable[..., Params]) -> Callable[..., Any]:
    """A lowering rule to one FFI call."""
    lower = jax.ffi.ffi_lowering(target)

    def rule(ctx: Any, *args: Any, platform: str, mesh_axes: Sequence[str], **params: Any) -> Any:
        return lower(ctx, *args, **attributes(**params))

    return rule


def _on_one_device(
    native: Callable[..., Any],
    summed: Callable[..., Any],
    *args: Any,
    platform: str,
    mesh_axes: Sequence[str],
    **params: Any,
) -> Any:
    call = functools.partial(native, platform, **params)
    return summed(call, mesh_axes, *args) if mesh_axes else call(*args)


def _sum(call: Callable[..., Any], axes: Sequence[str], *args: Any) -> Any:
    return jax.tree.map(functools.partial(sum_over, axes), call(*args))


def sum_over(
    axes: Sequence[str],
    x: jax.Array,
    finish: Callable[[jax.Array], jax.Array] = lambda total: total,
) -> jax.Array:
    """`finish` of the sum of `x` over mesh axes; narrow floats in f32 and rounded once."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    total = jax.lax.psum(x.astype(jnp.float32) if narrow else x, tuple(axes))
    return finish(total).astype(x.dtype)


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
        kept = frozenset[str]().union(*results)
        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for arg, names in zip(args, operands, strict=True):
            spec = (*arg.sharding.spec, *(None,) * len(names))
            for name, size, axis in zip(names, arg.shape, spec, strict=False):
                if name in whole or name in axes or axis is None:
                    continue
                these = axis if isinstance(axis, tuple) else (axis,)
                # An axis divides one dimension only; the first operand that has it decides.
                if used.intersection(these):
                    continue
                # What shards are padded with must not enter a sum.
                if name in kept or size % math.prod(mesh.shape[a] for a in these) == 0:
                    axes[name] = these
                    used.update(these)
        reduced = [axis for name in axes if name not in kept for axis in axes[name]]

        def sharding(names: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in names)))

        shardings = [sharding(names) for names in results]
        return (
            mesh,
            functools.partial(call, mesh_axes=tuple(reduced)),
            shardings if isinstance(result, list) else shardings[0],
            tuple(sharding(names) for names in operands),
        )

    def sharding_rule(mesh: Any, operand_types: Any, result_types: Any) -> str:
        operands, results, _ = division(*operand_types, **params)
        sides = (", ".join(" ".join(names) for names in side) for side in (operands, results))
        return " -> ".join(sides)

    function.def_partition(partition=partition, sharding_rule=sharding_rule)
    return function
