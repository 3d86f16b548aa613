"""The one place that wires an operation into JAX.

An operation is two primitives. Users' programs contain the outer one. It carries abstract
evaluation, batching and differentiation, and chooses the implementation when it is lowered. If
native kernels run, it lowers to the inner primitive, wrapped in a `custom_partitioning` function
that tells the SPMD partitioner how to shard the call over devices. The inner primitive works on the
shard of one device. It lowers to an FFI call, or to a function of the shard that makes FFI calls.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_oneflow_ops import _compat, _native, _policy

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """How a call may be sharded over devices.

    Dimensions have names, as in the sharding rules of `custom_partitioning`. If operands are
    sharded along a name that results lack, the results of the shards are summed.
    """

    operands: Sequence[Sequence[str]]
    results: Sequence[Sequence[str]]
    replicated: frozenset[str] = frozenset()  # names of dimensions that every device needs whole
    # The dimension that ids or labels point into. A shard of it must know its offset.
    rows: str | None = None
    # From the number of shards of the rows: the parameters that change for the call on one of them.
    params_of_shard: Callable[[int], Params] = lambda shards: {}
    # By name: dimensions that no device needs if this one is sharded. XLA removes their gathers.
    unread: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The mesh axes that matter to the call on one shard."""

    summed: tuple[str, ...] = ()  # axes to sum all results over
    rows: tuple[str, ...] = ()  # axes that shard the rows
    # Further axes to sum each result over, as it lacks dimensions that other results have.
    partial: tuple[tuple[str, ...], ...] = ()


class GatherWarning(UserWarning):
    """An op all-gathers an operand that is sharded over devices.

    It is issued once for each function and reason, while a program is compiled. To silence it:
    ``warnings.filterwarnings("ignore", category=jax_oneflow_ops.GatherWarning)``.
    """


def _warn(function: str, message: str, *, of: tuple[str, ...] = ()) -> None:
    """Warns once of each `of`, by default of each message.

    Calls that a public function makes for itself have no name: their gathers are not its own.
    """
    key = (function, *(of or (message,)))
    if function and key not in _warned:
        _warned.add(key)
        warnings.warn(f"{function}: {message}", GatherWarning, stacklevel=2)


_warned = set[tuple[str, ...]]()


def _warn_of_gather(function: str, place: str, reason: str, array: str = "") -> None:
    """Warns of a place, which is that of the argument `array` if it has no name."""
    _warn(
        function,
        f"{array or place} is sharded and will be all-gathered: {reason}. "
        "docs/sharding.md lists the dimensions that need no communication.",
        of=(place, reason),
    )


def gathered(
    function: str, argument: str, x: jax.Array, axes: Sequence[int], reason: str = ""
) -> jax.Array:
    """`x`, all-gathered along those of `axes` that its type says are sharded.

    Types say so on Explicit meshes. On others, the partitioner gathers what a call needs.
    """
    aval = jax.typeof(x)
    sharded = _sharded(aval, axes)
    if not sharded:
        return x
    _warn_of_gather(
        function, f"dimension {sharded[0]} of {argument}", reason or "every device needs all of it"
    )
    spec = [None if a in sharded else entry for a, entry in enumerate(aval.sharding.spec)]
    return _compat.resharded(x, aval, spec)


def _sharded(aval: Any, axes: Sequence[int]) -> list[int]:
    """Those of `axes` that the type says are sharded."""
    if aval.sharding.mesh.empty:
        return []
    return [a for a in axes if aval.sharding.spec[a] is not None]


def _groups(shape: Sequence[Any], ranks: Sequence[int]) -> list[list[int]]:
    """The dimensions that are merged into each dimension, except those of size 1."""
    ends = [*itertools.accumulate(ranks, initial=0)]
    return [[a for a in range(*pair) if shape[a] != 1] for pair in itertools.pairwise(ends)]


def are_mergeable(x: jax.Array, ranks: Sequence[int]) -> bool:
    """Whether `merged` gathers nothing."""
    return not any(_sharded(jax.typeof(x), axes[1:]) for axes in _groups(x.shape, ranks))


def merged(function: str, x: jax.Array, ranks: Sequence[int]) -> jax.Array:
    """`x` with neighbouring dimensions merged: each of `ranks` says how many become one."""
    groups = _groups(x.shape, ranks)
    for axes in groups:  # of the merged dimensions, jax allows only the first to be sharded
        x = gathered(function, "operand 0", x, axes[1:], "it is merged with others before it")
    spec = jax.typeof(x).sharding.spec
    shape = [math.prod(x.shape[a] for a in axes) for axes in groups]
    return _compat.reshaped(x, shape, [spec[axes[0]] if axes else None for axes in groups])


def split(x: jax.Array, shape: Sequence[Any], ranks: Sequence[int]) -> jax.Array:
    """The inverse of `merged`, for results: the first of the merged dimensions is sharded."""
    spec: list[Any] = [None] * len(shape)
    for axes, entry in zip(_groups(shape, ranks), jax.typeof(x).sharding.spec, strict=False):
        if axes:
            spec[axes[0]] = entry
    return _compat.reshaped(x, shape, spec)


def define(
    target: str,
    *,
    function: str | Callable[..., str],
    abstract_eval: Callable[..., Any],
    reference: Callable[..., Any],
    native: Callable[..., Any],
    sharding_rule: Callable[..., ShardingRule],
    on_shard: Callable[..., Any] | None = None,
    batch: Callable[..., tuple[Any, Any]],
    multiple_results: bool = False,
    in_jnp: Callable[..., Callable[..., Any] | None] | None = None,
    call: Callable[..., _policy.Call | str] | None = None,
    gradient: Callable[..., _policy.Call | str] | None = None,
    on_one_device: Callable[..., Any] | None = None,
) -> core.Primitive:
    """Defines a primitive.

    Args:
      target: the primitive's name, and that of its FFI target if it lowers to one call.
      function: the public function that errors name, or `(**params) -> its name`.
      abstract_eval: `(*avals, **params) -> aval`; must keep shardings (`aval.update`).
      reference: `(*args, **params) -> result` in pure jnp: the "xla" implementation, and what runs
        on platforms without native kernels.
      native: `(platform, *args, **params) -> result` on one device, written with jnp and
        `jax.ffi.ffi_call`.
      sharding_rule: `(*avals, **params) -> ShardingRule`.
      on_shard: `(call, shard, *args, **params) -> result` on one device, for calls that are sharded
        along rows or along names that results lack. `call(*args, **params)` runs `native` on the
        data of one device. By default the results of the calls are summed over the devices.
      batch: `(primitive, args, dims, **params) -> (result, its batch dimension)`: a batching rule
        that is also given the primitive being defined.
      multiple_results: results, avals and batch dimensions are lists.
      in_jnp: `(**params) -> function or None`: a function like `reference`, which is the default.
        It runs on scalars and where `_policy` chooses XLA, and is the fastest form in jnp that is
        as accurate as the kernel. If it is None, the kernel runs.
      call: `(*avals, **params) -> Call`: what the choice of `_policy` depends on, or the reason why
        kernels always run. By default they always do.
      gradient: like `call`, for a differentiated call, for which one choice includes the gradient.
      on_one_device: `(ctx, *args, platform, **params) -> results`: a lowering rule that replaces
        `native` in programs for one device. It may depend on the program around the call.

    Every primitive takes a parameter `implementation` (None, "native", "xla" or
    `_policy.WITH_GRADIENT`). Of the functions above, only `batch` receives it.
    """

    def types(*avals: Any, **params: Any) -> Any:
        return abstract_eval(*_compat.on_one_mesh(avals), **params)

    inner = core.Primitive(f"{target}_ffi")
    inner.multiple_results = multiple_results
    inner.def_abstract_eval(lambda *avals, platform, shard, **params: types(*avals, **params))

    function_of_shard = functools.partial(_on_one_device, native, on_shard or _sum)
    mlir.register_lowering(inner, _compat.lower_plain(function_of_shard, multiple_results))

    outer = core.Primitive(target)
    outer.multiple_results = multiple_results
    outer.def_abstract_eval(lambda *avals, implementation, **params: types(*avals, **params))
    outer.def_impl(functools.partial(_compat.apply_primitive, outer))
    _compat.require_devices_during_lowering(outer)

    def name(params: Params) -> str:
        return function if isinstance(function, str) else function(**params)

    # Equal calls get the same function object, by which jax finds what it has compiled.
    @functools.lru_cache(maxsize=1024)
    def partitioned(platform: str, items: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        params = dict(items)
        call = functools.partial(inner.bind, platform=platform)
        return partitioned_call(target, name(params), call, sharding_rule, params)

    def lower(
        ctx: Any, *args: Any, platform: str, implementation: str | None, **params: Any
    ) -> Any:
        form = None
        is_open = implementation in (None, _policy.WITH_GRADIENT)
        choice = {**params, "implementation": implementation}
        if not _native.is_used(name(params), platform, None if is_open else implementation):
            form = reference
        elif _policy.are_scalars((*ctx.avals_in, *ctx.avals_out)) or (
            is_open
            and _compat.knows_shapes_of_shards(ctx)
            and _policy.prefers_xla(outer, ctx.avals_in, choice, platform)
        ):
            form = reference if in_jnp is None else in_jnp(**params)
        of_platform: Any = {"platform": platform, "shard": Shard(), **params}
        if form is None and _compat.is_for_one_device(ctx):  # there is nothing to partition
            if on_one_device is not None:
                return on_one_device(ctx, *args, platform=platform, **params)
            form, params = function_of_shard, of_platform
        if form is not None:
            rule = _compat.lower_plain(form, multiple_results)
            return _compat.with_shardings_of_types(ctx, rule(ctx, *args, **params))
        ctx = _compat.with_current_mesh(ctx)
        call: Any = functools.partial(inner.bind, **of_platform)
        automatic = _compat.automatic_axes_beside_manual_ones(ctx)
        if automatic is None:
            call = partitioned(platform, tuple(params.items()))
        if automatic:
            _warn(
                name(params),
                "in a shard_map over some axes of the mesh only, arrays that are sharded over its "
                f"other axes ({', '.join(automatic)}) are all-gathered. Remedy: name all axes that "
                "shard them in axis_names.",
            )
        results = mlir.lower_fun(call, multiple_results=multiple_results)(ctx, *args)
        return _compat.with_shardings_of_types(ctx, results)

    default = functools.partial(lower, platform="other")
    rules: dict[str, Callable[..., Any]] = {
        p: functools.partial(lower, platform=p) for p in ("cpu", "cuda", "rocm", "tpu")
    }
    if on_one_device is None:
        mlir.register_lowering(outer, default)
        for platform, rule in rules.items():
            mlir.register_lowering(outer, rule, platform=platform)
    else:  # the rule needs the operands, which jax does not pass to rules that it caches
        rule = _compat.for_each_platform(default, rules, rules, rules)
        mlir.register_lowering(outer, rule, cacheable=False)

    def batched(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        with _compat.precision_of(args):
            return batch(outer, [*map(_compat.as_array, args)], dims, **params)

    batching.primitive_batchers[outer] = batched
    if call is not None:
        _policy.calls_of[outer] = call
    if gradient is not None:
        _policy.gradients_of[outer] = gradient
    return outer


def lower_native(native: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Makes a lowering rule from a function like `native` of `define` that returns a list."""
    on_one_device = functools.partial(
        _on_one_device, native, _sum, platform=platform, shard=Shard()
    )
    return _compat.lower_plain(on_one_device, multiple_results=True)


def bind(primitive: core.Primitive, *args: Any, **params: Any) -> Any:
    """Binds after making operands vary over the same axes inside a `shard_map`."""
    return primitive.bind(*_compat.join_varying_axes(*map(_compat.as_array, args)), **params)


def define_derivatives(
    primitive: core.Primitive, *, jvp: Callable[..., Any], transpose: Callable[..., Any]
) -> None:
    """Sets the JVP and the transpose of a primitive, which are written for arrays.

    jax may pass Python numbers and literals of a traced program as primals, tangents, cotangents
    and residuals. They are converted to arrays first. The transpose is never called with `ad.Zero`.
    It may return anything for operands that need no cotangent, None for a zero, and cotangents with
    any sharding.
    """

    def transposed(ct: Any, *args: Any, **params: Any) -> list[Any]:
        cts = [None] * len(args)
        if not isinstance(ct, ad.Zero):
            cts = transpose(ct, *args, **params)

        def like(found: Any, x: Any) -> Any:
            if not ad.is_undefined_primal(x):
                return None
            if found is None or isinstance(found, ad.Zero):
                return ad.Zero(x.aval)
            return _compat.with_sharding_of(found, x.aval)

        return [like(found, x) for found, x in zip(cts, args, strict=True)]

    ad.primitive_jvps[primitive] = _of_arrays(jvp)
    ad.primitive_transposes[primitive] = _of_arrays(transposed)


def of_some(function: Callable[..., Any], args: Sequence[Any], which: Sequence[int]) -> Any:
    """`function` of the arguments `which`, with the others fixed to those of `args`."""

    def of_which(*xs: Any) -> Any:
        given = dict(zip(which, xs, strict=True))
        return function(*(given.get(i, x) for i, x in enumerate(args)))

    return of_which


def transposed_by(reference: Callable[..., Any], ct: Any, args: Sequence[Any]) -> list[Any]:
    """The cotangents that jax derives from a reference."""
    live = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    f = of_some(reference, args, live)
    cts = dict(zip(live, jax.linear_transpose(f, *(args[i].aval for i in live))(ct), strict=True))
    return [cts.get(i) for i in range(len(args))]


def total(tangents: Sequence[Any], result: Any) -> Any:
    """The sum of the tangents of a result, or a zero if there are none."""
    if not tangents:
        return ad.Zero(jax.typeof(result).to_tangent_aval())
    return sum(tangents[1:], start=tangents[0])


def _of_arrays(rule: Callable[..., Any]) -> Callable[..., Any]:
    def of_arrays(*args: Any, **params: Any) -> Any:
        with _compat.precision_of(args):
            return rule(*map(as_arrays, args), **params)

    def as_arrays(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [*map(_compat.as_array, arg)]
        return _compat.as_array(arg)

    return of_arrays


def define_linear_pair(
    forward: core.Primitive, backward: core.Primitive, transposed_params: Callable[..., Params]
) -> None:
    """Declares two linear primitives of one operand to be each other's transposes.

    JVP, VJP and every higher derivative follow.

    Args:
      forward: a primitive made by `define`.
      backward: its transpose, also made by `define`.
      transposed_params: `(aval, **params) -> params` of the transpose of a call on `aval`.
    """
    for primitive, transpose in ((forward, backward), (backward, forward)):

        def rule(ct: Any, x: Any, *, transpose: core.Primitive = transpose, **params: Any) -> Any:
            result = transpose.bind(ct, **transposed_params(x.aval, **params))
            return [_compat.with_sharding_of(result, x.aval)]

        ad.deflinear2(primitive, _of_arrays(rule))


def _on_one_device(
    native: Callable[..., Any],
    on_shard: Callable[..., Any],
    *args: Any,
    platform: str,
    shard: Shard,
    **params: Any,
) -> Any:
    call = functools.partial(native, platform)
    if shard == Shard():
        return call(*args, **params)
    return on_shard(call, shard, *args, **params)


def _sum(call: Callable[..., Any], shard: Shard, *args: Any, **params: Any) -> Any:
    return jax.tree.map(functools.partial(sum_over, shard.summed), call(*args, **params))


def sum_each(call: Callable[..., Any], shard: Shard, *args: Any, **params: Any) -> list[Any]:
    """Sums each of several results over the sharded dimensions that it lacks."""
    results = call(*args, **params)
    partial = shard.partial or ((),) * len(results)
    sums = zip(partial, results, strict=True)
    return [sum_over((*shard.summed, *axes), x) for axes, x in sums]


def parts_of_sums(platform: str, rows: Any, n: Any) -> int:
    """The most parts that sums over rows of `n` elements are split into.

    On a GPU: two for each multiprocessor, and fewer for long rows, since several multiprocessors
    share such a row. There may be up to seven more parts than rows: rows that begin at different
    offsets within a pack, of which there are up to eight, are summed separately. On a CPU: several
    for each thread, and fewer for long rows, whose parts take longer to add up than to compute.
    """
    least, most, elements, more = (16, 128, 2**18, 0) if platform == "cpu" else (40, 272, 2**22, 7)
    parts = max(least, min(most, elements // n)) if isinstance(n, int) else most
    return min(rows + more, parts) if isinstance(rows, int) else parts


def parts_of_strided_sums(platform: str, rows: Any, n: Any, itemsize: int) -> int:
    """The most parts of sums over rows of `n` elements that are not contiguous.

    On a GPU: blocks are small then, so there are several for each multiprocessor; fewer for few
    rows, which have few tiles, and for long rows. On a CPU: at most one for 64 rows, since adjacent
    rows are processed together.
    """
    if platform == "cpu":
        return parts_of_sums(platform, max(1, rows // 64) if isinstance(rows, int) else rows, n)
    parts = max(16, min(1584, 2**22 // n)) if isinstance(n, int) else 272
    return min(rows, max(16, min(parts, rows * itemsize // 32))) if isinstance(rows, int) else parts


def sum_over(
    axes: Sequence[str],
    x: jax.Array,
    finish: Callable[[jax.Array], jax.Array] = lambda total: total,
) -> jax.Array:
    """`finish` of the sum of `x` over mesh axes. Narrow floats are summed in f32, rounded once."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    total = jax.lax.psum(x.astype(jnp.float32) if narrow else x, tuple(axes))
    return finish(total).astype(x.dtype)


def sum_of_bits_over(axes: Sequence[str], x: jax.Array) -> jax.Array:
    """The sum of `x` if all devices but one have zeros: that device's bits, even of -0 and NaNs.

    It adds 32-bit words, which all devices can do, whatever the dtype.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = sum_of_bits_over(axes, jnp.stack([x.real, x.imag]))
        return jax.lax.complex(parts[0], parts[1])
    if x.dtype == jnp.bool_:
        return sum_of_bits_over(axes, x.astype(jnp.uint8)).astype(bool)
    per_word = max(1, 4 // x.dtype.itemsize)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % per_word))
    words = jax.lax.bitcast_convert_type(
        flat.reshape(-1, per_word) if per_word > 1 else flat, jnp.uint32
    )
    bits = jax.lax.bitcast_convert_type(jax.lax.psum(words, tuple(axes)), x.dtype)
    return bits.reshape(-1)[: x.size].reshape(x.shape)


def partitioned_call(
    target: str,
    public_name: str,
    of_shard: Callable[..., Any],
    sharding_rule: Callable[..., ShardingRule],
    params: Params,
) -> Callable[..., Any]:
    """A function of whole arrays, which the partitioner shards. Each device runs `of_shard`."""
    call = functools.partial(of_shard, shard=Shard(), **params)
    return _named(target, params, _partitioned(public_name, call, sharding_rule, params))


def _named(target: str, params: Params, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as a separate function of the program, with a name that says what it computes.

    `custom_partitioning` writes an address in this process into the program, and jax computes the
    keys of its persistent compilation cache from the program. In another process, another operation
    may have that address. Without the name, the cache would return the wrong program.
    """

    def function(*args: Any) -> Any:
        return call(*args)

    digest = hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()
    function.__name__ = f"{target}_{digest[:16]}"
    return jax.jit(function)


def _partitioned(
    public_name: str,
    call: Callable[..., Any],
    rule: Callable[..., ShardingRule],
    params: Params,
) -> Callable[..., Any]:
    """`call` as a function that the SPMD partitioner can shard over devices."""
    # Imported here because it is slow to import and needed only when something is lowered.
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def function(*args: Any) -> Any:  # jax needs a function without keyword arguments
        return call(*args)

    def partition(
        mesh: Mesh, args: Sequence[Any], result: Any
    ) -> tuple[Mesh, Callable[..., Any], Any, tuple[NamedSharding, ...]]:
        def named(array: Any) -> Any:
            if (found := _compat.in_mesh_axes(array, mesh)) is not None:
                return found
            _warn(
                public_name,
                f"every device computes all of an array of shape {array.shape}: mesh axes cannot "
                "express its sharding, as after a reshape of a sharded dimension. Remedy: apply "
                "jax.lax.with_sharding_constraint to the reshaped array.",
            )
            replicated = NamedSharding(mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated)

        def is_expressible(mesh: Mesh) -> bool:
            arrays = jax.tree.leaves((args, result))
            return None not in (_compat.in_mesh_axes(x, mesh) for x in arrays)

        mesh = next(filter(is_expressible, _finer(mesh)), mesh)
        args, result = jax.tree.map(named, (args, result))
        names = rule(*args, **params)
        axes = _mesh_axes(public_name, mesh, names, args, jax.tree.leaves(result))
        kept = frozenset[str]().union(*names.results)
        partial = tuple(
            tuple(axis for name in axes if name in kept.difference(own) for axis in axes[name])
            for own in names.results
        )
        shard = Shard(
            summed=tuple(axis for name in axes if name not in kept for axis in axes[name]),
            rows=axes.get(names.rows, ()) if names.rows else (),
            partial=partial if any(partial) else (),
        )
        of_shard = names.params_of_shard(_count(mesh, shard.rows)) if shard.rows else {}

        def sharding(of: Sequence[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in of)))

        return (
            mesh,
            functools.partial(call, shard=shard, **of_shard),
            jax.tree.unflatten(jax.tree.structure(result), map(sharding, names.results)),
            tuple(map(sharding, names.operands)),
        )

    def sharding_rule(mesh: Any, operand_types: Any, result_types: Any) -> str:
        names = rule(*operand_types, **params)
        sides = (", ".join(map(" ".join, side)) for side in (names.operands, names.results))
        return " -> ".join(sides)

    function.def_partition(partition=partition, sharding_rule=sharding_rule, decode_shardings=False)
    return function


def _finer(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh, and meshes of the same devices, whose axes are prime factors of its axes.

    After a reshape, one axis may shard several dimensions: 64 rows on 8 devices become 4 x 16. The
    order of factors decides which dimension has which. Two orders are tried.
    """
    yield mesh
    for step in (1, -1):
        axes = {
            f"{name}.{i}": factor
            for name, size in mesh.shape.items()
            for i, factor in enumerate(_prime_factors(size)[::step])
        }
        yield Mesh(mesh.devices.reshape([*axes.values()]), [*axes])


def _prime_factors(n: int) -> list[int]:
    factors, divisor = list[int](), 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def _count(mesh: Mesh, axes: Sequence[str]) -> int:
    return int(math.prod(mesh.shape[axis] for axis in axes))


def _mesh_axes(
    function: str, mesh: Mesh, names: ShardingRule, args: Sequence[Any], results: Sequence[Any]
) -> dict[str, tuple[str, ...]]:
    """Chooses the mesh axes that shard each name, among those that shard operands and results."""
    kept = frozenset[str]().union(*names.results)
    everywhere = kept.intersection(*names.results)
    axes: dict[str, tuple[str, ...]] = {}
    gathered: dict[str, str] = {}  # names that are all-gathered, and why

    def dimensions(arrays: Sequence[Any], sides: Sequence[Sequence[str]], is_operand: bool) -> Any:
        for array, side in zip(arrays, sides, strict=True):
            spec = (*array.sharding.spec, *(None,) * len(side))
            yield from zip(side, array.shape, spec, (is_operand,) * len(side), strict=False)

    every = [
        *dimensions(args, names.operands, True),
        *dimensions(results, names.results, False),
    ]
    # A mesh axis can shard only one name: the first that has it. Rows come last.
    for name, size, entry, is_operand in sorted(every, key=lambda one: one[0] == names.rows):
        if entry is None or name in axes:
            continue
        these = _compat.names_of(entry)
        is_free = not {axis for used in axes.values() for axis in used}.intersection(these)
        reason = None
        if name in names.replicated:
            reason = "every device needs all of it"
        elif name == names.rows or name not in everywhere:
            # The padding of uneven shards must not enter a sum or count as rows.
            if size % _count(mesh, these):
                reason = f"{_count(mesh, these)} devices do not divide its size {size} evenly"
            elif not is_free:
                reason = "the mesh axis that shards it shards another dimension, too"
        if reason:
            gathered |= {name: reason} if is_operand else {}
        elif is_free:
            axes[name] = these

    def elements(array: Any, side: Sequence[str]) -> int:
        """The number of elements in one device's shard."""
        shards = _count(mesh, [axis for name in side for axis in axes.get(name, ())])
        return int(math.prod(array.shape)) // shards

    rows = names.rows
    if rows in axes and rows not in kept:
        # An all-reduce moves the results twice. An all-gather moves the operand once.
        moved = 2 * elements(results[0], names.results[0])
        if moved > elements(args[0], names.operands[0]) * _count(mesh, axes[rows]):
            del axes[rows]
            gathered[rows] = "that moves less data than all-reducing partial results"
    unread = frozenset[str]().union(*(of for name, of in names.unread.items() if name in axes))
    for name, reason in gathered.items():
        if name in axes or name in unread:
            continue
        operand = next(i for i, side in enumerate(names.operands) if name in side)
        dimension = f"dimension {names.operands[operand].index(name)} of"
        array = f"{dimension} an array of shape {tuple(args[operand].shape)}"
        _warn_of_gather(function, f"{dimension} operand {operand}", reason, array)
    return axes
