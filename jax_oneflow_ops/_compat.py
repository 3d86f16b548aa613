"""The only module that knows versions of jax and imports its internals; each use has its reason."""

import contextlib
import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax._src import core as core_internals
from jax._src import dispatch, literals, source_info_util
from jax._src.interpreters import mlir as mlir_internals
from jax._src.lax import lax as lax_internals
from jax.extend import core
from jax.interpreters import mlir
from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import func as func_dialect
from jaxlib.mlir.dialects import stablehlo

# What `_emit` writes programs with; the public jax.ffi writes calls only.
hlo: Any = stablehlo
func: Any = func_dialect

# Runs a primitive outside `jit`: compiles it once for each set of shapes and parameters, honours
# `jax.disable_jit`. Every primitive of jax's own uses it; there is no public name.
apply_primitive = dispatch.apply_primitive


# NumPy's arrays, and the kind that jax makes of them inside transformations: in release 0.8 that is
# no subclass.
NUMPY_TYPES: tuple[type[Any], ...] = (np.ndarray, np.generic, literals.TypedNdArray)


# Joins what operands vary over inside a `shard_map`, as jax's own functions of several operands do:
# without it their gradients would miss a sum over devices. jax calls it for every `lax.add`, by one
# name before release 0.9 and by the other since.
join_varying_axes: Callable[..., Sequence[Any]] = getattr(
    core_internals, "auto_insert_reshard", None
) or getattr(core_internals, "standard_insert_pvary")  # noqa: B009


def elementwise_aval(*avals: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """The type of an elementwise function's result, but for its dtype: that of a sum.

    jax joins shardings and weak types, and says what is wrong where they or the shapes differ.
    """
    f32 = np.dtype("float32")
    result, *others = (aval.update(dtype=f32) for aval in avals)
    for other in others or [result]:
        result, _ = jax.lax.add_p.abstract_eval(result, other)
    return cast(jax.core.ShapedArray, result)


def converted(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """`x` in the dtype of `like` and as weakly typed; the public function makes types strong."""
    if x.dtype == like.dtype and jax.typeof(x).weak_type == like.weak_type:
        return x
    return cast(jax.Array, lax_internals._convert_element_type(x, like.dtype, like.weak_type))


def as_array(x: Any) -> Any:
    """A Python number as an array of rank 0, of the dtype that jax gives it; others as they are."""
    if not isinstance(x, bool | int | float | complex) or isinstance(x, np.generic):
        return x
    aval = jax.typeof(x)  # literals of a traced program are numbers that know their dtype
    return lax_internals._convert_element_type(x, aval.dtype, aval.weak_type)


def require_devices_during_lowering(primitive: core.Primitive) -> None:
    """Makes jax pass the device assignment when it lowers `primitive`.

    The lowering of `custom_partitioning` needs it, also where it is reached through the lowering of
    another primitive; jax sees the outer one only. There is no public way to say so.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def automatic_axes_beside_manual_ones(ctx: Any) -> tuple[str, ...] | None:
    """Inside a `shard_map` over some axes of a mesh only: those others that have several devices.

    None elsewhere. `custom_partitioning` does not give its callbacks the mesh there.
    """
    axis_context = ctx.module_context.axis_context
    manual: frozenset[str] = getattr(axis_context, "manual_axes", frozenset())
    if not manual or set(manual) == set(axis_context.mesh.axis_names):
        return None
    sizes = axis_context.mesh.shape
    return tuple(axis for axis in sizes if axis not in manual and sizes[axis] > 1)


def knows_shapes_of_shards(ctx: Any) -> bool:
    """Whether shapes are those of one device's arrays where something is lowered.

    They are in programs for one device and in a `shard_map` over all axes of the mesh.
    """
    axis_context = ctx.module_context.axis_context
    manual: frozenset[str] = getattr(axis_context, "manual_axes", frozenset())
    if manual:
        return set(manual) == set(axis_context.mesh.axis_names)
    return is_for_one_device(ctx)


def is_for_one_device(ctx: Any) -> bool:
    """Whether a program is lowered for one device."""
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    return int(mesh.size if mesh is not None else axis_context.num_devices or 1) == 1


def with_current_mesh(ctx: Any) -> Any:
    """A lowering context that knows the mesh of `jax.set_mesh`.

    `jit` does not say it if no argument is on it, and `custom_partitioning` reads shardings by it.
    """
    axis_context = ctx.module_context.axis_context
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(axis_context, "abstract_mesh", mesh) is not None:
        return ctx
    if mesh.empty or mesh.size != axis_context.num_devices:
        return ctx
    axis_context = dataclasses.replace(axis_context, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axis_context))


def with_shardings_of_types(ctx: Any, results: Sequence[Any]) -> list[Any]:
    """Results that are sharded as their types say, as those of jax's own functions are.

    `jit` does it for the results of a program, on meshes all of whose axes are Explicit.
    """
    return [
        mlir_internals.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def with_sharding_of(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """`x` with the sharding that `aval` has in its type, where the mesh's axes are Explicit.

    `jax.sharding.reshard` fails where there is no mesh.
    """
    if aval.sharding.mesh.empty or jax.typeof(x).sharding == aval.sharding:
        return x
    return cast(jax.Array, jax.sharding.reshard(x, aval.sharding))


def with_sharding_over(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """`x` with the sharding of `aval` but for dimensions of size 1, over which it is broadcast."""
    if aval.sharding.mesh.empty:
        return x
    spec = [
        entry if n == size else None
        for entry, n, size in zip(aval.sharding.spec, x.shape, aval.shape, strict=True)
    ]
    return with_sharding_of(x, with_spec(aval, x.shape, spec))


def broadcast_like(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """What broadcasts to the shape of `aval`, with its shape and its sharding.

    It is broadcast to shards: the transpose of that sums on each device, then over devices. That of
    a broadcast to one device's array and a reshard would gather the cotangent first.
    """
    if x.shape == aval.shape:
        return with_sharding_of(x, aval)
    is_sharded = any(entry is not None for entry in aval.sharding.spec)
    dims = tuple(range(aval.ndim - x.ndim, aval.ndim))
    sharding = aval.sharding if is_sharded else None
    return jax.lax.broadcast_in_dim(x, aval.shape, dims, out_sharding=sharding)


@functools.cache
def runtime_ffi_api() -> tuple[int, int]:
    """Version of XLA's FFI API that the installed jaxlib implements.

    jaxlib offers it only in the C header that it ships.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(
        re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text(), re.MULTILINE)
    )
    return int(found["MAJOR"]), int(found["MINOR"])


def without_spatial_sharding(
    aval: jax.core.ShapedArray, shape: tuple[int, ...], gathered: tuple[int, ...]
) -> jax.core.ShapedArray:
    """`aval` with another shape, its sharding dropped on the dimensions `gathered`."""
    spec = [None if i in gathered else s for i, s in enumerate(aval.sharding.spec)]
    return with_spec(aval, shape, spec)


def with_spec(
    aval: jax.core.ShapedArray, shape: Sequence[int], spec: Sequence[Any]
) -> jax.core.ShapedArray:
    """`aval` with another shape and sharding on its mesh."""
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return cast(jax.core.ShapedArray, aval.update(shape=tuple(shape), sharding=sharding))


def lower_plain(function: Any, multiple_results: bool) -> Callable[..., Any]:
    """A lowering rule by `(*args, **params) -> result` in jnp, for which arrays are plain.

    Types with a sharding or with the axes of a `shard_map` say what the primitive has dealt with,
    and forbid what lowering may well do: reshapes, scatters whose sharding would be ambiguous.
    """

    def plain(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]

    rule = mlir.lower_fun(function, multiple_results)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        # What an op of this package is made of is not swapped again.
        scope = contextlib.nullcontext() if scope_of(ctx) is None else in_scope(OFF)
        # Inside `jax.set_mesh` even types that are made here would have a sharding.
        with scope, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            avals = {"avals_in": plain(ctx.avals_in), "avals_out": plain(ctx.avals_out)}
            # The context of the equation would bring its mesh back.
            return rule(ctx.replace(jaxpr_eqn_ctx=None, **avals), *args, **params)

    return lower


# Whether what is called runs, and is not traced by a transformation around it. Without arguments
# that it traces there is no public way to know.
runs_now: Callable[[], bool] = getattr(core_internals, "trace_state_clean", lambda: True)


# The concrete size of a dimension, or jax's own error that says that it was traced: the same that
# the function has which is replaced.
concrete_dimension = core_internals.concrete_dim_or_error


# ---- swapping the lowering of jax's own primitives, for accelerate: all of it is checked once ----

RELEASE = jax.__version__
OFF = "off"
_SCOPE = "jof_accelerate"  # the key in the metadata of equations, where users may have others
_replacing = threading.Lock()
_replaced: set[tuple[core.Primitive, str]] = set()

Lowering = Callable[..., Any]
Rules = dict[str, Lowering]  # by platform
_USED_FIELDS = {"jaxpr_eqn_ctx", "traceback", "avals_in", "avals_out", "dim_var_values"}


def in_scope(value: str, note: str | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context in which equations are traced with `value`, which `scope_of` finds.

    jax keeps metadata through every transformation, and traces functions anew where it differs: a
    `note` is for nothing else.
    """
    notes = {} if note is None else {f"{_SCOPE}_note": note}
    manager: contextlib.AbstractContextManager[Any] = _metadata()(**{_SCOPE: value}, **notes)
    return manager


@functools.cache
def _metadata() -> Callable[..., Any]:
    from jax.experimental import xla_metadata  # imported lazily: older releases lack it

    return xla_metadata.set_xla_metadata


def scope_of(where: Any) -> str | None:
    """What `in_scope` was given where an equation was traced.

    `where`: the equation, of a jaxpr, or the context in which it is being lowered.
    """
    metadata = getattr(_context(where), "xla_metadata", None) or {}
    return cast(str | None, metadata.get(_SCOPE))


def is_computed_elsewhere(where: Any) -> bool:
    """Whether an equation is inside `compute_on`: the host runs it, say, in a program for GPUs."""
    return getattr(_context(where), "compute_type", None) is not None


def _context(where: Any) -> Any:
    return where.jaxpr_eqn_ctx if hasattr(where, "jaxpr_eqn_ctx") else where.ctx


def has_known_sizes(ctx: Any) -> bool:
    """Whether a program that is being lowered is for one platform and for arrays of known sizes."""
    return not ctx.dim_var_values


@functools.cache
def jit_primitive() -> core.Primitive:
    """That of the calls of functions of `jax.jit`."""
    return cast(core.Primitive, jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].primitive)


def replace_lowerings(
    primitives: Sequence[core.Primitive],
    platforms: Sequence[str],
    replacement: Callable[[core.Primitive, str, Lowering], Lowering],
    *,
    has_kernels: bool = True,
) -> None:
    """Registers `replacement(primitive, platform, the rule so far)`, once for each.

    With `has_kernels` it may lower to kernels, which need to know the devices and the operands.
    Without, programs for several platforms keep the rules so far.

    Raises AttributeError, ImportError or TypeError where jax's internals differ from those known.
    """
    in_scope(OFF)
    fields = {field.name for field in dataclasses.fields(mlir_internals.LoweringRuleContext)}
    if missing := _USED_FIELDS - fields:
        raise AttributeError(f"LoweringRuleContext has no {', '.join(sorted(missing))}")
    if "xla_metadata" not in core_internals.JaxprEqnContext.__slots__:
        raise AttributeError("JaxprEqnContext has no xla_metadata")
    with _replacing:
        for primitive in primitives:
            new = [p for p in platforms if (primitive, p) not in _replaced]
            if not new:
                continue
            default = mlir_internals._lowerings[primitive].rule
            every = mlir_internals._platform_specific_lowerings
            own = {p: every[p][primitive].rule for p in every if primitive in every[p]}
            with_new = own | {p: replacement(primitive, p, own.get(p, default)) for p in new}
            rule = for_each_platform(default, own, with_new if has_kernels else own, with_new)
            # A lowering that jax caches is given no operands, of which some are zeros.
            mlir.register_lowering(primitive, rule, cacheable=not has_kernels)
            for p in own:
                del every[p][primitive]
            if has_kernels:
                require_devices_during_lowering(primitive)
            _replaced.update((primitive, p) for p in new)


def for_each_platform(default: Lowering, own: Rules, of_several: Rules, of_one: Rules) -> Lowering:
    """One rule for all platforms: `default` for those that are not in dicts of rules.

    jax can choose between rules for several platforms in one program, but fails where it does not
    cache the rules.
    """
    platforms_of, choose = mlir_internals._platforms_for_eqn, mlir_internals.lower_per_platform

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        platforms = platforms_of(ctx)
        if len(platforms) == 1:
            return of_one.get(platforms[0], default)(ctx, *args, **params)
        rules = own if scope_of(ctx) in (None, OFF) else of_several
        if not rules:
            return default(ctx, *args, **params)
        ctx = ctx.replace(avals_out=[*ctx.avals_out])
        return choose(ctx, "accelerate", rules, default, frozenset(), *args, **params)

    return lower


def functions_of_module(ctx: Any) -> dict[Any, Any]:
    """The functions that a program has already for what it calls several times."""
    return cast(dict[Any, Any], ctx.module_context.cached_primitive_lowerings)


def _sources(value: Any) -> Iterator[tuple[Any, Any]]:
    """An operand of a lowering rule and what it is broadcast from, each with its operation."""
    moved = ("broadcast_in_dim", "reshape", "transpose", "sharding_constraint")
    while hasattr(value.owner, "operation"):  # the owner of a function's argument is a block
        op = value.owner.operation
        yield value, op
        if op.name.partition(".")[2] not in moved:
            return
        value = op.operands[0]
    yield value, None


def scalar_of(value: Any) -> Any:
    """The value of rank 0 that an operand of a lowering rule is broadcast from; None if none is."""
    return next((v for v, _ in _sources(value) if ir.ShapedType(v.type).rank == 0), None)


def fill_of(value: Any) -> str | None:
    """The number that all elements of an operand of a lowering rule are, as MLIR writes it.

    None where the program does not say so beside the operand.
    """
    *_, (value, op) = _sources(value)
    if op is None or op.name.partition(".")[2] != "constant":
        return None
    if "complex" in str(value.type):  # of which Python has no attribute
        text = op.get_asm(large_elements_limit=4, use_local_scope=True)
    else:
        attribute = op.attributes["value"]
        text = str(attribute) if getattr(attribute, "is_splat", False) else ""
    found = re.search(r"dense<([^>\[\"]+)> : ", text)
    return None if found is None else found[1]


def _operands(value: Any, *names: str) -> list[Any]:
    """Those of the operation that made a value if it has one of these names; else none."""
    op = getattr(value.owner, "operation", None)  # the owner of a function's argument is a block
    return [*op.operands] if op is not None and op.name in names else []


def ids_of(ctx: Any, indices: Any, size: int) -> tuple[Any, str] | None:
    """What jnp made indices of one dimension of this size from, and how kernels can read that.

    "wrap": negative ids count from the end. "floor": they are 0, as in `jnp.bincount`.
    """
    spread = _operands(indices, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
    parts = _operands(spread[0], "stablehlo.select") if spread else []
    if not parts:
        return None
    shape, order = [*ir.ShapedType(spread[0].type).shape], indices.owner.attributes
    places = [*order["broadcast_dimensions"]] if "broadcast_dimensions" in order else None
    if places not in (None, [*range(len(shape))]):
        return None
    condition, wrapped, ids = parts  # ids < 0, ids + size, ids
    compared, added = _operands(condition, "stablehlo.compare"), _operands(wrapped, "stablehlo.add")
    found = [*ir.ShapedType(indices.type).shape, *compared[:1], *added[:1]]
    if found != [*shape, 1, ids, ids]:
        return None
    is_negative = "LT" in str(condition.owner.attributes["comparison_direction"])
    if (is_negative, fill_of(compared[1]), fill_of(added[1])) != (True, "0", str(size)):
        return None
    if called := _operands(ids, "func.call"):
        function = ctx.module_context.symbol_table[ids.owner.attributes["callee"].value]
        block, number = function.regions[0].blocks[0], ir.OpResult(ids).result_number
        if _is_larger_argument(block, number) and fill_of(called[1]) == "0":
            return called[0], "floor"
    return ids, "wrap"


def _is_larger_argument(block: Any, number: int) -> bool:
    """Whether this result of a function is the larger of its two arguments, the first as it is."""
    *_, end = block.operations
    pair = _operands(end.operands[number], "stablehlo.maximum")
    found = []
    for value in pair:
        while before := _operands(value, "stablehlo.convert", "stablehlo.broadcast_in_dim"):
            (value,) = before
        found.append(value)
    arguments = [*block.arguments]
    return arguments[0] in pair and arguments in (found, found[::-1])


def tag(result: Any, name: str, value: str) -> None:
    """Gives the operation that made a lowering's result an attribute, which programs keep."""
    op, key = result.owner.operation, "mhlo.frontend_attributes"
    named: dict[str, Any] = {name: ir.StringAttr.get(value)}
    if key in op.attributes:
        attributes: Any = op.attributes[key]
        named |= {a.name: a.attr for a in attributes}
    op.attributes[key] = ir.DictAttr.get(named)


# ---- calls that one lowered later takes the place of ----


def as_handles(values: Sequence[Any]) -> list[Any]:
    """The results of a call, which `replace_call` can replace wherever they are used by then."""
    return [hlo.reshape(value.type, value) for value in values]


def call_behind(handle: Any, target: str) -> Any:
    """The call of an FFI target that made a handle in the block that is being lowered, or None."""
    for value in _operands(handle, "stablehlo.reshape"):
        call = getattr(value.owner, "operation", None)
        if call is not None and call.name == "stablehlo.custom_call":
            is_here = call.block == ir.InsertionPoint.current.block
            name = ir.StringAttr(call.attributes["call_target_name"]).value
            return call if is_here and name == target else None
    return None


def move_before(call: Any, value: Any) -> bool:
    """Moves what computes a value before a call. False if that depends on the call.

    A program says by operands alone what runs before what.
    """
    later: list[Any] = []
    values = [value]

    def read(inner: Any) -> Any:
        values.extend(inner.operands)
        return ir.WalkResult.ADVANCE

    while values:
        op = getattr(values.pop().owner, "operation", None)
        if op is None or op in later or op.block != call.block:
            continue
        if op == call or len(later) == _MOST_MOVED:
            return False
        if call.is_before_in_block(op):
            later.append(op)
            op.walk(read)
    while later:
        first = next(op for op in later if not any(o.is_before_in_block(op) for o in later))
        first.move_before(call)
        later.remove(first)
    return True


_MOST_MOVED = 64


def replace_call(call: Any, values: Sequence[Any]) -> None:
    """Puts values in the place of a call's results, which are known by handles only."""
    for result, value in zip(call.results, values, strict=True):
        move_before(call, value)  # an insertion point would not do: jax 0.8 adds to the block's end
        result.replace_all_uses_with(value)
    call.erase()


def has_other_readers(value: Any, call: Any) -> bool:
    """Whether anything beside a call, which may be None, has read an operand so far.

    Arguments of a program that are not donated are read by the caller.
    """
    if any(call is None or use.owner.operation != call for use in value.uses):
        return True
    block = value.owner
    if hasattr(block, "operation"):
        return False
    function = block.owner.operation
    if ir.StringAttr(function.attributes["sym_name"]).value != "main":
        return False
    number = ir.BlockArgument(value).arg_number
    attributes = ir.ArrayAttr(function.attributes["arg_attrs"])[number]
    return not any(name in str(attributes) for name in ("jax.buffer_donor", "tf.aliasing_output"))


# ---- jaxprs, for fuse ----

# Functions inside a jaxpr: the parameter that has each as a jaxpr. Names differ between releases.
_CALLS = frozenset(
    re.findall(
        r"\w+",
        """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call
        custom_vjp_call_jaxpr""",
    )
)


def jaxpr_of(traced: Any) -> Any:
    """What `jax.jit(f).trace` has traced, or flax's `nnx.jit(f).trace`, which wraps that."""
    return getattr(traced, "traced", traced).jaxpr


def jaxpr_and_consts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and what its `constvars` stand for. Newer releases have one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def in_place_of(jaxpr: Any, new: Any) -> Any:
    """`new` as a parameter in place of `jaxpr`; `jaxpr` if it has no place for new constants."""
    flat, consts = jaxpr_and_consts(new)
    if len(consts) != len(jaxpr_and_consts(jaxpr)[1]):
        return jaxpr
    return new if hasattr(jaxpr, "consts") else flat


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number, and no variable."""
    return isinstance(atom, core.Literal)


def called_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """What an equation calls, as `jaxpr_and_consts`; None where it is no call."""
    if eqn.primitive.name not in _CALLS:
        return None
    found = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((jaxpr_and_consts(jaxpr) for jaxpr in found if jaxpr is not None), None)


def is_plain_call(eqn: Any) -> bool:
    """Whether an equation only calls a function: what it computes may be written in its place.

    Others say where arrays are, how they are compiled, or what is computed again.
    """
    name, params = eqn.primitive.name, eqn.params
    if called_jaxpr(eqn) is None or name in ("remat", "remat2", "checkpoint"):
        return False
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    is_free = all(type(x).__name__ == "UnspecifiedValue" for x in shardings)
    return is_free and not any(layouts) and not params.get("compiler_options_kvs")


def donated_operands(eqn: Any) -> list[Any]:
    """The operands that a call of a function of `jax.jit` donates."""
    flags = eqn.params.get("donated_invars", ())
    return [x for x, flag in zip(eqn.invars, flags, strict=False) if flag and not is_literal(x)]


def bind_equation(eqn: Any, args: Sequence[Any]) -> Any:
    """The results of an equation for other operands, as a list.

    Rules of its function, the user's line and the context stay, as in `jax.core.eval_jaxpr`.
    """
    source = source_info_util.user_context(eqn.source_info.traceback)
    with source, eqn.ctx.manager:
        found = eqn.primitive.get_bind_params(eqn.params)
        if isinstance(found, tuple):  # before release 0.10
            functions, params = found
            results = eqn.primitive.bind(*functions, *args, **params)
        else:
            results = eqn.primitive.bind(*args, **found)
    return results if eqn.primitive.multiple_results else [results]


def at_line_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which equations have the user's line of another one, as profiles show it."""
    return source_info_util.user_context(eqn.source_info.traceback)


def context_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """The mesh, and what else there was, where an equation was traced."""
    return cast(contextlib.AbstractContextManager[Any], eqn.ctx.manager)


def line_of(eqn: Any) -> str:
    """The user's line that an equation comes from; empty where jax does not say."""
    try:
        return user_line(eqn.source_info.traceback)
    except AttributeError:
        return ""


def functions_of(eqn: Any) -> list[str]:
    """The names of the functions that an equation was traced in, the outermost first."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return [frame.function_name for frame in reversed(frames)]


WITH_A_PROGRAM = "call_hi_primitive"
"""The name of primitives of jax 0.12 whose programs are made where they are lowered."""


def user_line(traceback: Any) -> str:
    """The file and line of an equation in the user's own program, else in a library."""
    frames = [(_origin(f.file_name), f) for f in source_info_util.user_frames(traceback)]
    at = [f for origin, f in frames if origin == "user"]
    frame = next(iter(at or [f for origin, f in frames if origin == "library"]), None)
    return "" if frame is None else f"{_short(frame.file_name)}:{frame.start_line}"


@functools.lru_cache(maxsize=1024)
def _origin(file_name: str) -> str:
    if file_name.startswith(str(Path(__file__).parent)):
        return "this package"
    installed = ("site-packages", "dist-packages")
    return "library" if any(part in Path(file_name).parts for part in installed) else "user"


def _short(file_name: str) -> str:
    return _relative(file_name, os.getcwd())


@functools.lru_cache(maxsize=1024)
def _relative(file_name: str, folder: str) -> str:
    path = Path(file_name)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
