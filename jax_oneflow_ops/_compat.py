"""The only module that knows versions of jax and imports its internals; each use has its reason."""

import contextlib
import dataclasses
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jaxlib.version
import numpy as np
from jax._src import core as core_internals
from jax._src import dispatch, literals, source_info_util
from jax._src import pjit as pjit_internals
from jax._src import sharding_impls as sharding_internals
from jax._src.interpreters import mlir as mlir_internals
from jax._src.lax import lax as lax_internals
from jax.extend import core
from jax.interpreters import mlir
from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import func as func_dialect
from jaxlib.mlir.dialects import stablehlo

# `_emit` writes programs with these. The public jax.ffi writes only calls.
hlo: Any = stablehlo
func: Any = func_dialect

# Runs a primitive outside `jit`: compiles it once for each set of shapes and parameters, honours
# `jax.disable_jit`. Every primitive of jax's own uses it; there is no public name.
apply_primitive = dispatch.apply_primitive


# NumPy's array types, and the type that jax converts them to inside transformations, which in
# release 0.8 is not a subclass.
NUMPY_TYPES: tuple[type[Any], ...] = (np.ndarray, np.generic, literals.TypedNdArray)
ARRAY_TYPES: tuple[type[Any], ...] = (jax.Array, *NUMPY_TYPES)
OPERAND_TYPES: tuple[type[Any], ...] = (*ARRAY_TYPES, jax.Ref)  # of programs


# Makes operands vary over the same axes inside a `shard_map`, as jax's own functions of several
# operands do. Without it, their gradients would miss a sum over devices. jax calls it for every
# `lax.add`; its name changed in release 0.9.
join_varying_axes: Callable[..., Sequence[Any]] = getattr(
    core_internals, "auto_insert_reshard", None
) or getattr(core_internals, "standard_insert_pvary")  # noqa: B009


# What jax raises if the shardings of operands do not fit together; it has no public name.
ShardingTypeError: type[Exception] = getattr(core_internals, "ShardingTypeError", TypeError)


def unreduced_or_reduced_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a type is "unreduced" or, if they are Explicit, "reduced".

    An unreduced array is a sum of the devices' parts that is not added up yet. The cotangents of a
    reduced one are. In a `shard_map`, functions join reduced operands with those that vary.
    """
    spec = getattr(getattr(aval, "sharding", None), "spec", None)  # tokens have none
    found: frozenset[Any] = frozenset().union(
        getattr(getattr(aval, "mat", None), "unreduced", ()),
        *(getattr(spec, name, ()) for name in ("unreduced", "reduced")),
    )
    return found


def elementwise_aval(*avals: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """The type of an elementwise function's result, except for its dtype: that of a sum.

    jax joins shardings and weak types, and raises an error if they or the shapes do not fit.
    """
    f32 = np.dtype("float32")
    result, *others = (aval.update(dtype=f32) for aval in avals)
    for other in others or [result]:
        result, _ = jax.lax.add_p.abstract_eval(result, other)
    return cast(jax.core.ShapedArray, result)


def converted(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """`x` with the dtype and weak type of `like`; the public function makes types strong."""
    if x.dtype == like.dtype and jax.typeof(x).weak_type == like.weak_type:
        return x
    return cast(jax.Array, lax_internals._convert_element_type(x, like.dtype, like.weak_type))


def as_array(x: Any) -> Any:
    """Converts a Python number to an array of rank 0, of jax's dtype; returns others unchanged."""
    if not isinstance(x, bool | int | float | complex) or isinstance(x, np.generic):
        return x
    aval = jax.typeof(x)  # a literal of a traced program is a number with a dtype
    return lax_internals._convert_element_type(x, aval.dtype, aval.weak_type)


def precision_of(xs: Any) -> contextlib.AbstractContextManager[Any]:
    """A context that enables 64-bit dtypes if one of `xs` is an array of such a dtype, or its type.

    `xs` is a pytree. NumPy arrays do not count: jax makes them 32 bits wide.
    """
    leaves = jax.tree.leaves(xs, is_leaf=lambda x: hasattr(x, "aval"))
    avals = (getattr(x, "aval", x) for x in leaves)
    is_wide = any(isinstance(a, jax.core.ShapedArray) and a.dtype in _WIDE for a in avals)
    context: contextlib.AbstractContextManager[Any] = (
        jax.enable_x64(True) if is_wide else contextlib.nullcontext()
    )
    return context


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def require_devices_during_lowering(primitive: core.Primitive) -> None:
    """Makes jax pass the device assignment when it lowers `primitive`.

    The lowering of `custom_partitioning` needs it, also if it is reached through the lowering of
    another primitive, where jax sees only the outer one. There is no public way to request it.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def automatic_axes_beside_manual_ones(ctx: Any) -> tuple[str, ...] | None:
    """In a `shard_map` over only some axes of a mesh: the other axes that have several devices.

    None elsewhere. In such a `shard_map`, `custom_partitioning` does not pass the mesh to its
    callbacks.
    """
    axis_context = ctx.module_context.axis_context
    manual: frozenset[str] = getattr(axis_context, "manual_axes", frozenset())
    if not manual or set(manual) == set(axis_context.mesh.axis_names):
        return None
    sizes = axis_context.mesh.shape
    return tuple(axis for axis in sizes if axis not in manual and sizes[axis] > 1)


def is_partly_manual() -> bool:
    """Whether what is traced is in a `shard_map` over only some axes that have several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {*getattr(mesh, "manual_axes", ())}
    return bool(manual) and any(n > 1 for axis, n in mesh.shape.items() if axis not in manual)


def knows_shapes_of_shards(ctx: Any) -> bool:
    """Whether the shapes at this place of a program are those of one device's arrays.

    They are in programs for one device and in a `shard_map` over all axes of the mesh.
    """
    axis_context = ctx.module_context.axis_context
    manual: frozenset[str] = getattr(axis_context, "manual_axes", frozenset())
    if manual:
        return set(manual) == set(axis_context.mesh.axis_names)
    return is_for_one_device(ctx)


def count_devices(ctx: Any) -> int:
    """The number of devices that a program is lowered for."""
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    return int(mesh.size if mesh is not None else axis_context.num_devices or 1)


def count_shards(ctx: Any) -> int:
    """The number of devices over which arrays at this place of a program may be sharded."""
    return 1 if knows_shapes_of_shards(ctx) else count_devices(ctx)


def is_for_one_device(ctx: Any) -> bool:
    """Whether a program is lowered for one device."""
    return count_devices(ctx) == 1


def with_current_mesh(ctx: Any) -> Any:
    """A lowering context that contains the mesh of `jax.set_mesh`.

    `jit` leaves it out if no argument is on the mesh. `custom_partitioning` needs it to read
    shardings.
    """
    axis_context = ctx.module_context.axis_context
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(axis_context, "abstract_mesh", mesh) is not None:
        return ctx
    if mesh.empty or mesh.size != axis_context.num_devices:
        return ctx
    axis_context = dataclasses.replace(axis_context, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axis_context))


def with_devices(ctx: Any) -> Any | None:
    """A lowering context with which `custom_partitioning` works, or None if that is impossible.

    jax passes devices and the mesh only if a program contains a primitive that is registered as
    needing them. Otherwise the mesh is that of the program's arguments, or of `jax.set_mesh`. Only
    the number of devices matters, because shardings refer to devices by index: CPUs may stand in.
    """
    module_context = ctx.module_context
    axis_context = module_context.axis_context
    is_exported = getattr(module_context.lowering_parameters, "for_export", True)
    if is_exported or not isinstance(axis_context, sharding_internals.ShardingContext):
        return None
    count, known = axis_context.num_devices, functions_of_module(ctx)
    if axis_context.abstract_mesh is None and with_devices not in known:
        known[with_devices] = _mesh_of_program(module_context.module)
    current = with_current_mesh(ctx).module_context.axis_context.abstract_mesh
    mesh = axis_context.abstract_mesh or known[with_devices] or current
    devices = axis_context.device_assignment or jax.devices()[:count]
    if len(devices) < count:
        devices = jax.devices("cpu")[:count]
    if mesh is None or not count == mesh.size == len(devices):
        return None
    axis_context = dataclasses.replace(
        axis_context, device_assignment=tuple(devices), abstract_mesh=mesh
    )
    return ctx.replace(module_context=module_context.replace(axis_context=axis_context))


def _mesh_of_program(module: Any) -> jax.sharding.AbstractMesh | None:
    """The mesh of a program's arguments, if it is one mesh, and its devices are in order."""
    from jaxlib.mlir.dialects import sdy  # here, as a program without Shardy needs none

    meshes = set[Any]()
    for op in module.body.operations:
        attributes = op.operation.attributes
        if "arg_attrs" in attributes and ir.StringAttr(attributes["sym_name"]).value == "main":
            of_arguments = map(ir.DictAttr, ir.ArrayAttr(attributes["arg_attrs"]))
            shardings = (x["sdy.sharding"] for x in of_arguments if "sdy.sharding" in x)
            meshes |= {sdy.TensorShardingAttr(sharding).mesh_or_ref for sharding in shardings}
    if len(meshes) != 1 or not all(map(sdy.MeshAttr.isinstance, meshes)):
        return None
    mesh = sdy.MeshAttr(meshes.pop())
    axes = [*map(sdy.MeshAxisAttr, mesh.axes)]
    if mesh.device_ids or not axes:
        return None
    sizes, names = (tuple(getattr(axis, name) for axis in axes) for name in ("size", "name"))
    return jax.sharding.AbstractMesh(sizes, names)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context in which types have no shardings, as on one device, also inside `jax.set_mesh`."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def can_be_sharded(ctx: Any) -> bool:
    """Whether a kernel can be called: shapes are those of shards, or arrays can be sharded."""
    return knows_shapes_of_shards(ctx) or with_devices(ctx) is not None


def on_one_device(ctx: Any) -> Any:
    """A lowering context in which shapes are those of one device's arrays.

    In it, functions that say how they are partitioned are lowered to what one device computes.
    """
    mesh: Any = jax.sharding.AbstractMesh((1,), ("device",))
    axis_context = sharding_internals.SPMDAxisContext(mesh, frozenset(mesh.axis_names))
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axis_context))


def are_static(fun: Any, args: Any, kwargs: dict[str, Any]) -> list[bool]:
    """For each leaf of the arguments of a `jax.jit` function, whether it may be static.

    jax tells which keyword arguments are. If it left out positional ones, it does not tell which:
    then all that are not arrays may be.
    """
    own_args, own_kwargs = getattr(fun.trace(*args, **kwargs), "args_info", ((), {}))
    some_are = len(own_args) < len(args)
    found = [some_are and not isinstance(x, OPERAND_TYPES) for x in jax.tree.leaves(args)]
    for name in sorted(kwargs):  # as jax orders leaves
        leaves = jax.tree.leaves(kwargs[name])
        found += [name not in own_kwargs and not isinstance(x, OPERAND_TYPES) for x in leaves]
    return found


def changes_mutable_arrays(jaxpr: Any) -> bool:
    """Whether a program writes to mutable arrays, which are arguments or captured."""
    return any(type(e).__name__ in ("WriteEffect", "AccumEffect") for e in jaxpr.effects)


def in_mesh_axes(x: Any, mesh: Any) -> Any | None:
    """`x` with a `NamedSharding` over `mesh` in place of the sharding that the partitioner passes.

    None if axes cannot express it, where jax's own conversion raises an error.
    """
    hlo = getattr(x.sharding, "_hlo_sharding", None)
    if hlo is None:
        return x
    try:
        spec = sharding_internals.parse_flatten_op_sharding(hlo, mesh)[0]
    except (AssertionError, LookupError, NotImplementedError, StopIteration, ValueError):
        return None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))


def with_shardings_of_types(ctx: Any, results: Sequence[Any]) -> list[Any]:
    """Shards results as their types say, as jax's own functions do.

    `jit` does it for the results of a program, on meshes whose axes are all Explicit.
    """
    return [
        mlir_internals.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def with_sharding_of(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """`x` with the sharding that `aval` has in its type, if the mesh's axes are Explicit.

    `jax.sharding.reshard` fails if there is no mesh, and for an array on no mesh outside of `jit`
    and `jax.set_mesh`; operations take such an array as it is.
    """
    own, wanted = jax.typeof(x).sharding, aval.sharding
    is_outside = own.mesh.empty and jax.sharding.get_abstract_mesh().empty
    if wanted.mesh.empty or is_outside or own == wanted:
        return x
    return cast(jax.Array, jax.sharding.reshard(x, wanted))


def resharded(x: jax.Array, like: jax.core.ShapedArray, spec: Sequence[Any]) -> jax.Array:
    """`x` sharded by `spec` over the mesh of `like`."""
    return with_sharding_of(x, with_spec(like, x.shape, spec))


def with_sharding_over(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """`x` with the sharding of `aval`, except in the dimensions that it is broadcast over."""
    if aval.sharding.mesh.empty:
        return x
    spec = [
        entry if n == size else None
        for entry, n, size in zip(aval.sharding.spec, x.shape, aval.shape, strict=True)
    ]
    return with_sharding_of(x, with_spec(aval, x.shape, spec))


def reshaped(x: jax.Array, shape: Sequence[Any], spec: Sequence[Any]) -> jax.Array:
    """`x` in another shape, sharded by `spec` if its own type is sharded.

    jax itself finds the sharding of only a few reshapes.
    """
    is_sharded = any(entry is not None for entry in spec)
    mesh = jax.typeof(x).sharding.mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec)) if is_sharded else None
    return jax.lax.reshape(x, tuple(shape), out_sharding=sharding)


ATTENTION = [
    f"__cudnn$fmha{kind}{direction}"
    for kind in ("Softmax", "ScaleBiasSoftmax")
    for direction in ("", "Backward")
]
"""The targets of the custom calls that `jax.nn.dot_product_attention` makes for cuDNN."""
LAYOUT = "LayoutConstraint"
"""The target of the custom call that `with_order_in_memory` adds. XLA removes it."""


def with_order_in_memory(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """`x`, which XLA has to store with these axes from major to minor at this place."""
    from jax.experimental import layout  # which few programs need

    return cast(jax.Array, layout.with_layout_constraint(x, layout.Layout(tuple(axes))))


def broadcast_like(x: jax.Array, aval: jax.core.ShapedArray) -> jax.Array:
    """Broadcasts `x` to the shape and the sharding of `aval`.

    The broadcast is sharded: its transpose sums on each device, then over devices. The transpose of
    a broadcast that is resharded afterwards would gather the cotangent first.
    """
    if x.shape == aval.shape:
        return with_sharding_of(x, aval)
    is_sharded = any(entry is not None for entry in aval.sharding.spec)
    dims = tuple(range(aval.ndim - x.ndim, aval.ndim))
    sharding = aval.sharding if is_sharded else None
    return jax.lax.broadcast_in_dim(x, aval.shape, dims, out_sharding=sharding)


def adds_floats_by_loops() -> bool:
    """Whether XLA adds float32 in loops of compare-and-swap on GPUs.

    It did in jaxlib 0.10.2 to 0.11.0: https://github.com/openxla/xla/issues/46225.
    """
    return bool((0, 10, 2) <= jaxlib.version.__version_info__ <= (0, 11, 0))


@functools.cache
def runtime_ffi_api() -> tuple[int, int]:
    """Version of XLA's FFI API that the installed jaxlib implements.

    jaxlib states it only in the C header that it ships.
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
    """`aval` with another shape and sharding on its mesh.

    Raises a ShardingTypeError, as jax does for sums, if a mesh axis would shard two dimensions.
    """
    axes = [axis for entry in spec for axis in names_of(entry)]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardingTypeError(
                f"operands shard two dimensions of a result over the mesh axis {axis!r}; apply "
                "jax.sharding.reshard to one of them"
            )
    sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return cast(jax.core.ShapedArray, aval.update(shape=tuple(shape), sharding=sharding))


def on_one_mesh(avals: Sequence[jax.core.ShapedArray]) -> Sequence[jax.core.ShapedArray]:
    """Types of operands of one call, with those on no mesh replicated over that of the others.

    Outside of `jax.set_mesh`, arrays that a program makes are on no mesh.
    """
    meshes = (aval.sharding.mesh for aval in avals)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:
        return avals

    def on_mesh(aval: jax.core.ShapedArray) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*(None,) * aval.ndim))
        return aval.update(sharding=sharding) if aval.sharding.mesh.empty else aval

    return [*map(on_mesh, avals)]


def lower_plain(function: Any, multiple_results: bool) -> Callable[..., Any]:
    """A lowering rule from a jnp function `(*args, **params) -> result` of plain arrays.

    Types may contain a sharding or the axes of a `shard_map`, with which the primitive has dealt
    already. They would forbid operations that are fine in a lowering, such as reshapes, or scatters
    whose sharding would be ambiguous. 64-bit dtypes are kept even where they are disabled, as they
    are in the threads in which some releases of jax lower this.
    """

    def plain(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]

    rule = mlir.lower_fun(function, multiple_results)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        # The operations that an op of this package consists of are not swapped again.
        scope = contextlib.nullcontext() if scope_of(ctx) is None else in_scope(OFF)
        with scope, without_mesh():
            avals = {"avals_in": plain(ctx.avals_in), "avals_out": plain(ctx.avals_out)}
            with precision_of(avals):
                # The context of the equation would bring its mesh back.
                return rule(ctx.replace(jaxpr_eqn_ctx=None, **avals), *args, **params)

    return lower


# Whether a call runs now, and is not traced by a transformation around it. If no argument is
# traced, there is no public way to know.
runs_now: Callable[[], bool] = getattr(core_internals, "trace_state_clean", lambda: True)


# Returns the concrete size of a dimension. For a traced one, raises the same error of jax as the
# function that is replaced.
concrete_dimension = core_internals.concrete_dim_or_error


# ---- swapping the lowering rules of jax's own primitives, for accelerate ----
# `replace_lowerings` checks that the internals it uses exist.

RELEASE = jax.__version__
OFF = "off"
_SCOPE = "jof_accelerate"  # a key in the metadata of equations; users may have others
_replacing = threading.Lock()
_replaced: set[tuple[core.Primitive, str]] = set()

Lowering = Callable[..., Any]
Rules = dict[str, Lowering]  # by platform
_USED_FIELDS = {"jaxpr_eqn_ctx", "traceback", "avals_in", "avals_out", "dim_var_values"}


def in_scope(value: str, note: str | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context that marks the equations traced in it with `value`, which `scope_of` returns.

    jax keeps metadata through every transformation, and traces functions anew if it differs. The
    only use of `note` is to force that.
    """
    notes = {} if note is None else {f"{_SCOPE}_note": note}
    manager: contextlib.AbstractContextManager[Any] = _metadata()(**{_SCOPE: value}, **notes)
    return manager


@functools.cache
def _metadata() -> Callable[..., Any]:
    from jax.experimental import xla_metadata  # imported lazily: older releases lack it

    return xla_metadata.set_xla_metadata


def scope_of(where: Any) -> str | None:
    """The value of the innermost `in_scope` in which an equation was traced, or None.

    `where`: the equation in a jaxpr, or the context in which it is lowered.
    """
    metadata = getattr(_context(where), "xla_metadata", None) or {}
    return cast(str | None, metadata.get(_SCOPE))


def is_computed_elsewhere(where: Any) -> bool:
    """Whether an equation is inside `compute_on`: for example, the host runs it, not the GPU."""
    return getattr(_context(where), "compute_type", None) is not None


def _context(where: Any) -> Any:
    return where.jaxpr_eqn_ctx if hasattr(where, "jaxpr_eqn_ctx") else where.ctx


def has_known_sizes(ctx: Any) -> bool:
    """Whether a program that is being lowered is for one platform and for arrays of known sizes."""
    return not ctx.dim_var_values


def equation_of(fun: Callable[..., Any], *args: Any) -> Any:
    """The first equation of a function, traced here and now."""
    return jax.make_jaxpr(fun)(*args).eqns[0]


@functools.cache
def jit_primitive() -> core.Primitive:
    """The primitive that calls functions of `jax.jit`."""
    called: core.Primitive = equation_of(jax.jit(lambda x: x), 0.0).primitive
    return called


@functools.cache
def replace_calls(name: str, replacement: Callable[[Any, Any], Any]) -> None:
    """Lets a function replace calls of functions of `jax.jit` when they are traced.

    `replacement(operand, jaxpr)` returns the result of a function of one array with this name, or
    None to leave it.
    """
    primitive: Any = jit_primitive()
    own = primitive.bind

    def bind(*args: Any, **params: Any) -> Any:
        if params.get("name") == name and len(args) == 1:
            result = replacement(args[0], params.get("jaxpr"))
            if result is not None:
                return [result]
        return own(*args, **params)

    vars(primitive)["bind"] = bind


def reshard_primitive() -> core.Primitive:
    """The primitive of `jax.sharding.reshard`, for which there is no public name."""
    return pjit_internals.reshard_p


def replace_lowerings(
    primitives: Sequence[core.Primitive],
    platforms: Sequence[str],
    replacement: Callable[[core.Primitive, str, Lowering], Lowering],
    *,
    on_several: bool = True,
    looks_at_operands: bool = True,
) -> None:
    """Registers `replacement(primitive, platform, current rule)`, once for each pair.

    With `on_several`, the new rules also apply to programs over several devices, for which they
    need to know the devices, and to programs for several platforms. All programs with such a
    primitive then need devices when they are lowered. With `looks_at_operands`, jax does not cache
    what the new rules make, as it would not pass them the operands.

    Raises AttributeError, ImportError or TypeError if jax's internals differ from those known.
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
            rule = for_each_platform(default, own, with_new if on_several else own, with_new)
            mlir.register_lowering(primitive, rule, cacheable=not looks_at_operands)
            for p in own:
                del every[p][primitive]
            if on_several:
                require_devices_during_lowering(primitive)
            _replaced.update((primitive, p) for p in new)


def for_each_platform(default: Lowering, own: Rules, of_several: Rules, of_one: Rules) -> Lowering:
    """One rule for all platforms: it applies `default` to platforms that have no rule in a dict.

    jax can choose between rules for several platforms in one program, but fails if it does not
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


def with_plain_cases(rule: Lowering) -> Lowering:
    """A rule of an elementwise operation of two operands that takes less time in most cases.

    Where jax would cache a rule, `replace_lowerings` calls it for every operation. In these cases
    its rule emits one operation, and a broadcast if an operand is a scalar.
    """
    emits: Any = getattr(rule, "args", ())
    general = getattr(getattr(rule, "func", None), "__name__", "")
    if general != "_nary_lower_hlo" or len(emits) != 1:
        return rule
    (emit,) = emits

    def lower(ctx: Any, x: Any, y: Any, **params: Any) -> Any:
        (result,), (of_x, of_y) = ctx.avals_out, ctx.avals_in
        shape, known = result.shape, ((), result.shape)
        is_plain = of_x.shape in known and of_y.shape in known and shape in (of_x.shape, of_y.shape)
        has_more = not result.sharding.mesh.empty or ctx.dim_var_values or any(params.values())
        if has_more or not is_plain:
            return rule(ctx, x, y, **params)
        if of_x.shape != shape:
            x = hlo.broadcast_in_dim(y.type, x, [])
        elif of_y.shape != shape:
            y = hlo.broadcast_in_dim(x.type, y, [])
        return [emit(x, y)]

    return lower


def functions_of_module(ctx: Any) -> dict[Any, Any]:
    """The functions that a program shares between equal calls, by key."""
    return cast(dict[Any, Any], ctx.module_context.cached_primitive_lowerings)


def _sources(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields an operand of a lowering rule and its sources before broadcasts, with operations."""
    moved = ("broadcast_in_dim", "reshape", "transpose", "sharding_constraint")
    while hasattr(value.owner, "operation"):  # the owner of a function's argument is a block
        op = value.owner.operation
        yield value, op
        if op.name.partition(".")[2] not in moved:
            return
        value = op.operands[0]
    yield value, None


def scalar_of(value: Any) -> Any:
    """The value of rank 0 that an operand of a lowering rule is broadcast from, or None."""
    return next((v for v, _ in _sources(value) if ir.ShapedType(v.type).rank == 0), None)


def fill_of(value: Any) -> str | None:
    """The number to which all elements of a lowering rule's operand are equal, as MLIR writes it.

    None unless the operand is a constant of one number, possibly broadcast.
    """
    *_, (value, op) = _sources(value)
    if op is None or op.name.partition(".")[2] != "constant":
        return None
    if "complex" in str(value.type):  # Python has no attribute for these
        text = op.get_asm(large_elements_limit=4, use_local_scope=True)
    else:
        attribute = op.attributes["value"]
        text = str(attribute) if getattr(attribute, "is_splat", False) else ""
    found = re.search(r"dense<([^>\[\"]+)> : ", text)
    return None if found is None else found[1]


def operands_of(value: Any, *names: str) -> list[Any]:
    """The operands of the operation that made a value; none if it has none of these names.

    Constraints on their shardings are left out.
    """
    op = getattr(value.owner, "operation", None)  # the owner of a function's argument is a block
    return [*map(without_constraints, op.operands)] if op is not None and op.name in names else []


def is_boolean(value: Any) -> bool:
    """Whether a value is an array of booleans."""
    return str(ir.ShapedType(value.type).element_type) == "i1"


def without_constraints(value: Any) -> Any:
    """What a value was before constraints on its sharding.

    jax writes one after each operation on a mesh with Explicit axes.
    """
    while (op := getattr(value.owner, "operation", None)) is not None:
        if op.name != "sdy.sharding_constraint":
            break
        value = op.operands[0]
    return value


def before_sum(value: Any) -> tuple[Any, list[int]] | None:
    """What was summed over dimensions to make a value, and these dimensions; or None."""
    parts = operands_of(value, "stablehlo.reduce")
    if len(parts) != 2 or fill_of(parts[1]) not in ZEROS:
        return None
    op = value.owner.operation
    return (parts[0], [*op.attributes["dimensions"]]) if _reduces_by(op, "stablehlo.add") else None


def before_spreading(value: Any) -> tuple[Any, list[int], list[int]] | None:
    """What was padded with zeros, also between its elements, to make a value; or None.

    Also returns the number of zeros before it and the distance of its elements, for each axis.
    """
    parts = operands_of(value, "stablehlo.pad")
    if not parts or fill_of(parts[1]) not in ZEROS:
        return None
    attributes = value.owner.operation.attributes
    lows, between = (
        [*ir.DenseI64ArrayAttr(attributes[name])]
        for name in ("edge_padding_low", "interior_padding")
    )
    return (parts[0], lows, [n + 1 for n in between]) if any(between) else None


def operand_of_call(call: Any, value: Any) -> Any:
    """What a call passes as the argument `value` of its function; None if it is no argument."""
    if hasattr(value.owner, "operation"):
        return None
    return without_constraints(call.operands[ir.BlockArgument(value).arg_number])


def result_in_function(ctx: Any, value: Any) -> tuple[Any, Any] | None:
    """If the call of a function of the program made a value: the call, and the value inside."""
    if callee_of(value) is None:
        return None
    call, known = value.owner.operation, functions_of_module(ctx)
    name = call.attributes["callee"].value
    if (result_in_function, name) not in known:
        block = ctx.module_context.symbol_table[name].regions[0].blocks[0]
        *_, known[result_in_function, name] = block.operations
    end = known[result_in_function, name]
    return call, without_constraints(end.operands[ir.OpResult(value).result_number])


def number_of(value: Any) -> float | None:
    """The number to which all elements of a constant are equal, or None."""
    text = fill_of(value)
    if text is None or "(" in text:
        return None
    if text.startswith("0x"):
        return -math.inf if text in LOWEST else None
    return float({"true": 1, "false": 0}.get(text, text))


def dimension_of_iota(value: Any) -> int:
    """The dimension along which an iota counts."""
    return int(ir.IntegerAttr(value.owner.attributes["iota_dimension"]).value)


def slices_of(value: Any) -> list[slice]:
    """The slice along each dimension of the `stablehlo.slice` that made a value."""
    attributes = value.owner.attributes
    names = ("start_indices", "limit_indices", "strides")
    numbers = ([*ir.DenseI64ArrayAttr(attributes[name])] for name in names)
    return [*map(slice, *numbers)]


def product_of(value: Any) -> tuple[Any, tuple[Any, Any]] | None:
    """The operands of the `dot_general` that made a value, and its dimensions; or None.

    The dimensions are those contracted and those of the batch. Operands have their constraints.
    """
    if not operands_of(value, "stablehlo.dot_general"):
        return None
    op = value.owner.operation
    numbers = hlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    dimensions = (
        ([*numbers.lhs_contracting_dimensions], [*numbers.rhs_contracting_dimensions]),
        ([*numbers.lhs_batching_dimensions], [*numbers.rhs_batching_dimensions]),
    )
    return (*op.operands,), dimensions


def before_empty_sums(value: Any) -> Any:
    """What sums over no dimensions were applied to: jax makes these when it transposes lookups."""
    while (summed := before_sum(value)) and not summed[1]:
        value = summed[0]
    return value


def _reduces_by(op: Any, name: str) -> bool:
    """Whether a reduction combines two values by one operation."""
    block = op.regions[0].blocks[0]
    first, *others = block.operations
    is_plain = [*first.operation.operands] == [*block.arguments]
    return first.operation.name == name and is_plain and len(others) == 1


SUM_OF_COTANGENTS = "add_any"
"""jax's name for the sum of the cotangents of a value that is used several times."""


def name_of_maker(value: Any) -> str | None:
    """The name of the operation that made a value, without its dialect; None for an argument.

    Sums of cotangents are additions like others, but jax names them in their locations.
    """
    op = getattr(value.owner, "operation", None)
    if op is None:
        return None
    name = str(op.name).partition(".")[2]
    is_own = name == "add" and re.match(_LOCATION_OF_COTANGENTS, str(op.location))
    return SUM_OF_COTANGENTS if is_own else name


_LOCATION_OF_COTANGENTS = rf'loc\("(?:[^"]*/)?{SUM_OF_COTANGENTS}:?"'


def count_uses(value: Any) -> int:
    """How often operations that are in the program already read a value."""
    return len([*value.uses])


def callee_of(value: Any) -> str | None:
    """The name of the function of the program whose call made a value, or None."""
    op = getattr(value.owner, "operation", None)
    return str(op.attributes["callee"]) if op is not None and op.name == "func.call" else None


def places_of(value: Any) -> list[int]:
    """For each dimension of a broadcast's operand, its dimension in the result `value`."""
    return [*value.owner.attributes["broadcast_dimensions"]]


def order_of_transpose(value: Any) -> list[int]:
    """For each dimension of a transposition's result `value`, that of its operand; else empty."""
    is_transposed = operands_of(value, "stablehlo.transpose")
    return [*value.owner.attributes["permutation"]] if is_transposed else []


def shape_of(value: Any) -> list[int]:
    """The shape of a value."""
    return [*ir.ShapedType(value.type).shape]


def before_broadcast(value: Any, places: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """The operand of the broadcast or reshape that made a value, and the places of its dimensions.

    `places` says for each dimension of `value` which dimension of a later result it becomes. Those
    of dimensions of size 1 may be wrong. None if another operation made the value, or a reshape
    that splits or merges dimensions.
    """
    if source := operands_of(value, "stablehlo.broadcast_in_dim"):
        return source[0], [places[place] for place in places_of(value)]
    if not (source := operands_of(value, "stablehlo.reshape")):
        return None
    inner, outer = map(shape_of, (source[0], value))
    kept = [(n, place) for n, place in zip(outer, places, strict=True) if n != 1]
    if [n for n in inner if n != 1] != [n for n, _ in kept]:
        return None
    later = iter(kept)
    return source[0], [next(later)[1] if n != 1 else 0 for n in inner]


def before_transpose(value: Any, places: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """The operand of the transposition that made a value, and the places of its dimensions."""
    order = order_of_transpose(value)
    if not order:
        return None
    (source,) = operands_of(value, "stablehlo.transpose")
    return source, [places[order.index(d)] for d in range(len(order))]


def are_rows(places: Sequence[int], shape: Sequence[int], axis: int) -> bool:
    """Whether places are all dimensions but `axis`, in order; those of size 1 may be wrong."""
    rows = [place for place in range(len(shape)) if place != axis]
    return all(shape[r] == 1 or p == r for p, r in zip(places, rows, strict=True))


def maximum_along(value: Any) -> tuple[Any, int] | None:
    """What a value of the block that is being lowered is the maximum of, and along which axis.

    None if it is something else. The maximum of numbers starts from negative infinity.
    """
    parts = operands_of(value, "stablehlo.reduce")
    if len(parts) != 2 or not is_in_current_block(value) or fill_of(parts[1]) not in LOWEST:
        return None
    op = value.owner.operation
    axes = [*op.attributes["dimensions"]]
    is_one = len(axes) == 1 and _reduces_by(op, "stablehlo.maximum")
    return (parts[0], axes[0]) if is_one else None


def is_in_current_block(value: Any) -> bool:
    """Whether an operation of the block that is being lowered made a value."""
    op = getattr(value.owner, "operation", None)
    return op is not None and op.block == ir.InsertionPoint.current.block


ZEROS = frozenset({"0", "0.000000e+00", "(0.000000e+00,0.000000e+00)"})
LOWEST = ("0xFC00", "0xFF80", "0xFF800000", "0xFFF0000000000000")
"""Negative infinity in float16, bfloat16, float32 and float64."""


def is_argument_of_program(value: Any) -> bool:
    """Whether a value is an operand of the program."""
    block = value.owner
    if hasattr(block, "operation"):
        return False
    function = block.owner.operation
    is_function = function.name == "func.func"
    return is_function and ir.StringAttr(function.attributes["sym_name"]).value == "main"


def gathers_whole_rows(value: Any) -> bool:
    """Whether the gather that made a value reads rows of a table (N, *row) by indices (E, 1)."""
    attributes, rank = value.owner.attributes, len(shape_of(value))
    numbers = hlo.GatherDimensionNumbers(attributes["dimension_numbers"])
    sizes = [1, *shape_of(value)[1:]]
    table = shape_of(value.owner.operands[0])[1:]
    found = [
        *([*numbers.offset_dims], [*numbers.collapsed_slice_dims], [*numbers.start_index_map]),
        *([*numbers.operand_batching_dims], numbers.index_vector_dim),
        *([*attributes["slice_sizes"]], table),
    ]
    return found == [[*range(1, rank)], [0], [0], [], 1, sizes, sizes[1:]]


def ids_of(ctx: Any, indices: Any, size: int) -> tuple[Any, str] | None:
    """The ids from which jnp made indices into one dimension of this size, and how to read them.

    "wrap": negative ids count from the end. "floor": negative ids are read as 0, as in
    `jnp.bincount`. None if indices were not made so.
    """
    indices = without_constraints(indices)
    spread = operands_of(indices, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
    parts = operands_of(spread[0], "stablehlo.select") if spread else []
    if not parts:
        return None
    shape, order = shape_of(spread[0]), indices.owner.attributes
    places = [*order["broadcast_dimensions"]] if "broadcast_dimensions" in order else None
    if places not in (None, [*range(len(shape))]):
        return None
    condition, wrapped, ids = parts  # ids < 0, ids + size, ids
    compared = operands_of(condition, "stablehlo.compare")
    added = operands_of(wrapped, "stablehlo.add")
    found = [*shape_of(indices), *compared[:1], *added[:1]]
    if found != [*shape, 1, ids, ids]:
        return None
    is_negative = "LT" in str(condition.owner.attributes["comparison_direction"])
    if (is_negative, fill_of(compared[1]), fill_of(added[1])) != (True, "0", str(size)):
        return None
    if called := operands_of(ids, "func.call"):
        function = ctx.module_context.symbol_table[ids.owner.attributes["callee"].value]
        block, number = function.regions[0].blocks[0], ir.OpResult(ids).result_number
        if _is_larger_argument(block, number) and fill_of(called[1]) == "0":
            return called[0], "floor"
    return ids, "wrap"


def _is_larger_argument(block: Any, number: int) -> bool:
    """Whether a result of a function is the maximum of its two arguments, the first unchanged."""
    *_, end = block.operations
    pair = operands_of(end.operands[number], "stablehlo.maximum")
    found = []
    for value in pair:
        while before := operands_of(value, "stablehlo.convert", "stablehlo.broadcast_in_dim"):
            (value,) = before
        found.append(value)
    arguments = [*block.arguments]
    return arguments[0] in pair and arguments in (found, found[::-1])


def tag(result: Any, name: str, value: str) -> None:
    """Adds an attribute, which programs keep, to the operation that made a lowering's result."""
    op, key = without_constraints(result).owner.operation, "mhlo.frontend_attributes"
    named: dict[str, Any] = {name: ir.StringAttr.get(value)}
    if key in op.attributes:
        attributes: Any = op.attributes[key]
        named |= {a.name: a.attr for a in attributes}
    op.attributes[key] = ir.DictAttr.get(named)


def untag(result: Any, name: str) -> None:
    """Removes what :func:`tag` added."""
    op, key = without_constraints(result).owner.operation, "mhlo.frontend_attributes"
    if key in op.attributes:
        attributes: Any = op.attributes[key]
        op.attributes[key] = ir.DictAttr.get({a.name: a.attr for a in attributes if a.name != name})


# ---- calls that are replaced by a later lowering ----


def as_handles(values: Sequence[Any]) -> list[Any]:
    """Handles for a call's results: `replace_call` can replace the results in all later uses."""
    return [hlo.reshape(value.type, value) for value in values]


def call_behind(handle: Any, target: str) -> Any:
    """The call of an FFI target that made a handle in the block that is being lowered, or None."""
    for value in operands_of(handle, "stablehlo.reshape"):
        call = getattr(value.owner, "operation", None)
        if call is not None and call.name == "stablehlo.custom_call":
            is_here = call.block == ir.InsertionPoint.current.block
            name = ir.StringAttr(call.attributes["call_target_name"]).value
            return call if is_here and name == target else None
    return None


def move_before(call: Any, value: Any) -> bool:
    """Moves the operations that compute a value before a call.

    Returns False if they depend on the call or are more than `_MOST_MOVED`. Moving them is valid,
    because only operands determine the order in which operations run.
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

    def order(one: Any, other: Any) -> int:
        return -1 if one.is_before_in_block(other) else 1

    for op in sorted(later, key=functools.cmp_to_key(order)):
        op.move_before(call)
    return True


_MOST_MOVED = 64


def replace_call(call: Any, values: Sequence[Any]) -> None:
    """Replaces a call's results, which are used only through handles, by values."""
    for result, value in zip(call.results, values, strict=True):
        move_before(call, value)  # jax 0.8 appends to the block despite an insertion point
        result.replace_all_uses_with(value)
    call.erase()


def replace_result(call: Any, value: Any) -> None:
    """Replaces the result of an operation in what has read it so far.

    Later operations may still read the result, unless all of them go through a handle.
    """
    move_before(call, value)
    call.results[0].replace_all_uses_with(value)


def replace_value(value: Any, new: Any) -> bool:
    """Replaces a value in what has read it so far, if the new one can be computed there."""
    is_possible = move_before(value.owner.operation, new)
    if is_possible:
        value.replace_all_uses_with(new)
    return is_possible


def has_other_readers(value: Any, call: Any) -> bool:
    """Whether anything other than `call`, which may be None, has read a value so far.

    Arguments of a program that are not donated count as read by the caller.
    """
    if any(call is None or use.owner.operation != call for use in value.uses):
        return True
    if not is_argument_of_program(value):
        return False
    number = ir.BlockArgument(value).arg_number
    attributes = ir.ArrayAttr(value.owner.owner.operation.attributes["arg_attrs"])[number]
    return not any(name in str(attributes) for name in ("jax.buffer_donor", "tf.aliasing_output"))


# ---- jaxprs, for fuse ----

# Primitives that call a function, which is a jaxpr in a parameter. Names differ between releases.
_CALLS = frozenset(
    re.findall(
        r"\w+",
        """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call
        custom_vjp_call_jaxpr""",
    )
)


def jaxpr_of(traced: Any) -> Any:
    """The jaxpr in a result of `jax.jit(f).trace`, or of flax's `nnx.jit(f).trace`."""
    return getattr(traced, "traced", traced).jaxpr


def jaxpr_and_consts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and what its `constvars` stand for. Newer releases have one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def count_constants(params: dict[str, Any]) -> int:
    """The number of operands of a `scan` that are the same in all steps: the first ones."""
    if "num_consts" in params:
        return cast(int, params["num_consts"])
    found: Any = getattr(params.get("ft_in"), "unpack", tuple)()
    return len(found[0]) if found else 0


def in_place_of(jaxpr: Any, new: Any) -> Any:
    """`new` in the form of the parameter `jaxpr`; `jaxpr` if it cannot hold new constants."""
    flat, consts = jaxpr_and_consts(new)
    if len(consts) != len(jaxpr_and_consts(jaxpr)[1]):
        return jaxpr
    return new if hasattr(jaxpr, "consts") else flat


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number, not a variable."""
    return isinstance(atom, core.Literal)


def called_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls, and its constants; None if it is not a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    found = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((jaxpr_and_consts(jaxpr) for jaxpr in found if jaxpr is not None), None)


def is_plain_call(eqn: Any) -> bool:
    """Whether an equation only calls a function, so that the function may be inlined.

    Other calls also say where arrays are, how to compile, or what to recompute.
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
    """Evaluates an equation for other operands, and returns a list.

    Keeps its function's rules, the user's line and the context, as `jax.core.eval_jaxpr` does.
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
    """A context that gives new equations the user's line of `eqn`, which profiles show."""
    return source_info_util.user_context(eqn.source_info.traceback)


def context_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which an equation was traced, such as its mesh."""
    return cast(contextlib.AbstractContextManager[Any], eqn.ctx.manager)


def line_of(eqn: Any) -> str:
    """The user's line that an equation comes from; empty if jax does not say."""
    try:
        return user_line(eqn.source_info.traceback)
    except AttributeError:
        return ""


def functions_of(eqn: Any) -> list[str]:
    """The names of the functions in which an equation was traced, outermost first."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return [frame.function_name for frame in reversed(frames)]


WITH_A_PROGRAM = "call_hi_primitive"
"""The name of the primitives of jax 0.12 whose programs are made when they are lowered."""


def user_line(traceback: Any) -> str:
    """The file and line of an equation in the user's own program, else in a library."""
    frames = [(_origin(f.file_name), f) for f in source_info_util.user_frames(traceback)]
    at = [f for origin, f in frames if origin == "user"]
    frame = next(iter(at or [f for origin, f in frames if origin == "library"]), None)
    return "" if frame is None else f"{_relative(frame.file_name, os.getcwd())}:{frame.start_line}"


@functools.lru_cache(maxsize=1024)
def _origin(file_name: str) -> str:
    if file_name.startswith(str(Path(__file__).parent)):
        return "this package"
    installed = ("site-packages", "dist-packages")
    return "library" if any(part in Path(file_name).parts for part in installed) else "user"


@functools.lru_cache(maxsize=1024)
def _relative(file_name: str, folder: str) -> str:
    path = Path(file_name)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
