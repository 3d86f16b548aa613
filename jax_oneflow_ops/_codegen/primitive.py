"""The primitive of kernels that users write, and its rules.

One primitive, jof_compiled, runs every kernel. Its parameter `spec` names the definition and says
whether to compute the value or a derivative. A JVP is one kernel of the inputs and their tangents.
Its transpose, a VJP, is one kernel of the inputs and the cotangents. Both read only those inputs
that the derivatives name, and are linear in the vectors, that is, the tangents or cotangents. Their
own derivatives with respect to the inputs are sums of products with second derivatives, if those
are kernels too. The derivatives of a traced body, of any order, are traced bodies: see `derive`.

If the kernel has a reference, its derivatives take all inputs as operands: the implementation is
chosen when they are lowered, and jax's derivative of the reference needs all inputs. A native call
drops those that it does not read.

Operands broadcast: see `_operands`.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _operands, _primitive
from jax_oneflow_ops._codegen import cache, compilers, derive
from jax_oneflow_ops._codegen.definition import Definition, may_use_a_reference, partial
from jax_oneflow_ops._codegen.messages import annotated, messages
from jax_oneflow_ops._codegen.signature import (
    MAX_OPERANDS,
    MAX_OUTPUTS,
    computed_in,
    is_inexact,
    is_narrow,
    size_of,
)
from jax_oneflow_ops._codegen.source import Mode, Spec, derivative_spec, source, value_spec
from jax_oneflow_ops._codegen.traced import Traced


class KernelCompileError(RuntimeError):
    """The compiler rejects the code that a user has written for an `ElementwiseKernel`.

    The message shows the user's lines with the compiler's messages at them.

    Attributes:
      kernel: the kernel's name.
      log: the full output of the compiler.
      source: the generated source that it compiled.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> wrong = jof.ElementwiseKernel("T x", "T y", "y = x * scale", "wrong")
      >>> try:
      ...     wrong(jnp.ones(3))
      ... except jof.KernelCompileError as error:
      ...     print("y = x * scale" in str(error), "scale" in error.log)
      True True
    """

    def __init__(self, message: str, kernel: str, log: str, source: str):
        super().__init__(message)
        self.kernel = kernel
        self.log = log
        self.source = source

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.kernel, self.log, self.source)


def bind(*args: Any, spec: Spec, implementation: str | None) -> list[Any]:
    """Binds the primitive; see `_operands.bind`."""
    results: list[Any] = _operands.bind(kernel_p, *args, spec=spec, implementation=implementation)
    return results


def _abstract_eval(*avals: Any, spec: Spec) -> list[jax.core.ShapedArray]:
    aval = _operands.result_aval(*avals)
    return [aval.update(dtype=jnp.dtype(d), weak_type=False) for d in spec.result_dtypes]


def _sharding_rule(*types: Any, spec: Spec) -> _primitive.ShardingRule:
    return _operands.sharding_rule(*types, results=len(spec.result_dtypes))


def _shape_of(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.broadcast_shapes(*(x.shape for x in args)))


# ---- implementations ----


def _call(platform: str, *args: Any, spec: Spec) -> list[Any]:
    """Makes the FFI call, with code compiled for this machine's devices."""
    full, every = spec, args
    spec, args = _without_unread(full, every)
    name = spec.definition.name
    operands, kinds, shape = _operands.native(args)
    try:
        text = source(spec, kinds, platform)
        code = compiled(name, text, platform, spec.is_narrow, has_reference(spec.definition))
    except compilers.CompilerError as error:
        raise _compile_error(spec, error, kinds, platform) from None
    if code is None:
        return reference(*every, spec=full)
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for d in spec.result_dtypes]
    return ffi_call("jof_compiled", code, name, operands, results, kinds)


def compiled(
    name: str, text: str, platform: str, is_narrow: bool, has_reference: bool = True
) -> bytes | None:
    """The compiled code of a kernel; None if there is no compiler and the reference runs."""
    if has_reference:
        what = "fused functions, and the references of kernels, by XLA"
        return cache.code_or_fallback(name, what, text, platform, is_narrow=is_narrow)
    try:
        return cache.code(text, platform, is_narrow=is_narrow)
    except compilers.CompilerMissingError as error:
        raise NotImplementedError(
            f"{name}: {error}. Or give the kernel a jnp function to run in its place: "
            "ElementwiseKernel(..., reference=...)."
        ) from error


def ffi_call(
    target: str,
    code: bytes,
    name: str,
    operands: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    kinds: Sequence[int],
    **attributes: Any,
) -> list[Any]:
    """Calls a kernel through the FFI; `kinds` are those of its operands and results."""
    sizes = [x.dtype.itemsize for x in (*operands, *results)]
    call: Any = jax.ffi.ffi_call(target, [*results])
    return [
        *call(
            *operands,
            code=np.frombuffer(code, np.uint8),
            id=np.int64(cache.code_id(code)),
            name=name,
            kinds=np.asarray(kinds, np.int64),
            element_bytes=np.asarray(sizes, np.int64),
            **attributes,
        )
    ]


def native_form(spec: Spec, args: Sequence[Any]) -> tuple[Spec, list[int]]:
    """The kernel that is compiled for operands of these shapes, and the operands' kinds."""
    found: list[Any] = []

    def call(*xs: Any) -> list[Any]:
        narrowed, kept = _without_unread(spec, xs)
        operands, kinds, _ = _operands.native(kept)
        found.extend((narrowed, kinds))
        return operands

    jax.eval_shape(call, *args)
    return found[0], found[1]


def _without_unread(spec: Spec, args: tuple[Any, ...]) -> tuple[Spec, tuple[Any, ...]]:
    """Drops the inputs that the kernel does not read.

    Keeps all of them if the remaining operands do not broadcast to the shape of the results.
    """
    if _is_traced(spec):
        read = spec.definition.reads
    elif spec.mode == "value":
        return spec, args
    else:
        of = derivative_spec(spec.definition, spec.mode, spec.dtypes, spec.ins, spec.outs)
        read = of.primals
    count = len(spec.primals)
    kept = *(x for i, x in zip(spec.primals, args, strict=False) if i in read), *args[count:]
    if _shape_of(kept) != _shape_of(args):
        return spec, args
    return dataclasses.replace(spec, primals=read), kept


def _compile_error(
    spec: Spec, error: compilers.CompilerError, kinds: Sequence[int], platform: str
) -> KernelCompileError:
    """The error that shows the compiler's messages at the user's lines."""
    text = source(spec, kinds, platform, safe_division=False)
    with contextlib.suppress(compilers.CompilerMissingError):
        try:
            cache.code(text, platform, is_narrow=spec.is_narrow)
        except compilers.CompilerError as plain:
            error = plain
    name = spec.definition.name
    what = {"value": "", "jvp": "'s derivative", "vjp": "'s derivative"}[spec.mode]
    types = ", ".join(
        f"{p} is {dtype}" if p.is_variable else str(p)
        for p, dtype in zip(spec.definition.inputs, spec.dtypes, strict=True)
    )
    found = messages(error.log, spec.texts())
    shown = annotated(spec.texts(), found) if found else error.log.strip()
    message = f"{name}{what} does not compile where {types} ({error.compiler}):\n\n{shown}"
    if any(map(is_narrow, spec.dtypes)) and any(
        w in error.log for w in ("jof::Half", "BFloat16", "Float8")
    ):
        message += (
            "\n\nA letter is the type of stored elements. Values of 16 bits and less are float in "
            "an expression: declare yours with auto or Compute<T>."
        )
    return KernelCompileError(message, name, error.log, text)


def has_reference(definition: Definition) -> bool:
    """Whether something other than a kernel can compute it."""
    return definition.reference is not None or isinstance(definition.body, Traced)


def reference(*args: Any, spec: Spec) -> list[Any]:
    """Computes what the kernel does, by the user's jnp function and jax's derivatives of it.

    Where kernels compute in float32, so does this; it rounds once.
    """
    definition = spec.definition
    if definition.reference is None and isinstance(definition.body, Traced):
        given = dict(zip(spec.primals, args, strict=True))
        every = [given.get(i, jnp.zeros((), d)) for i, d in enumerate(spec.dtypes)]
        results = definition.body(*map(_widened, every))
        return [y.astype(d) for y, d in zip(results, spec.result_dtypes, strict=True)]
    if definition.reference is None:
        raise NotImplementedError(
            f"{definition.name}: an ElementwiseKernel runs on CPUs and NVIDIA GPUs for which "
            "jax_oneflow_ops was built, and elsewhere, or under "
            "JAX_ONEFLOW_OPS_IMPLEMENTATION=xla, what its reference computes, but it has none. "
            "Remedy: ElementwiseKernel(..., reference=a jnp function of the same inputs), or a "
            "platform with kernels."
        )
    shape = _shape_of(args)
    given = dict(zip(spec.primals, args, strict=False))
    # An input is missing only if a transpose is linear in it: its value does not matter.
    inputs = [given.get(i, jnp.ones((), d)) for i, d in enumerate(spec.dtypes)]
    vectors = args[len(spec.primals) :]

    def function(*values: Any) -> list[Any]:
        result = definition.reference(*map(_widened, values))  # type: ignore[misc]
        results = [result] if len(definition.outputs) == 1 else result
        dtypes = definition.output_dtypes(spec.dtypes)
        return [
            _as_dtype(jnp.broadcast_to(results[o], shape), jnp.dtype(dtypes[o])) for o in spec.outs
        ]

    if spec.mode == "value":
        return function(*inputs)
    for i in spec.ins:
        inputs[i] = jnp.broadcast_to(inputs[i], shape).astype(spec.dtypes[i])

    of_ins = _primitive.of_some(function, inputs, spec.ins)
    primals = [inputs[i] for i in spec.ins]
    if spec.mode == "jvp":
        tangents = [jnp.broadcast_to(t, shape) for t in vectors]
        return [*jax.jvp(of_ins, primals, tangents)[1]]
    _, pull = jax.vjp(of_ins, *primals)
    return [*pull([jnp.broadcast_to(ct, shape) for ct in vectors])]


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if _is_narrow(x.dtype) else x


def _as_dtype(x: Any, dtype: Any) -> Any:
    """`x` in another dtype; its real part if that dtype is real."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    return x.astype(dtype)


# ---- batching ----


def _batch(
    primitive: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    spec: Spec,
    implementation: str | None,
) -> tuple[list[Any], list[int]]:
    operands, axis = _operands.batch(args, dims)
    results = bind(*operands, spec=spec, implementation=implementation)
    return results, [axis] * len(results)


kernel_p = _primitive.define(
    "jof_compiled",
    function="ElementwiseKernel",
    abstract_eval=_abstract_eval,
    reference=reference,
    native=_call,
    sharding_rule=_sharding_rule,
    batch=_batch,
    multiple_results=True,
    in_jnp=lambda spec: reference if has_reference(spec.definition) else None,
)


# ---- derivatives ----


def _tangents(
    definition: Definition,
    dtypes: Sequence[str],
    primals: Mapping[int, Any],
    tangents: Mapping[int, Any],
    implementation: str | None,
    shape: Sequence[int] | None,
) -> dict[int, Any]:
    """Computes the nonzero tangents of a kernel's outputs by one kernel.

    Args:
      definition: the kernel.
      dtypes: the dtypes of all its inputs.
      primals: the inputs that are known, by number.
      tangents: the nonzero tangents of inputs, by number.
      implementation: the primitive's parameter.
      shape: the shape that the results must have; None for any that broadcasts to the outputs'.
    """
    results = definition.output_dtypes(dtypes)
    positions = [
        (o, i)
        for o, dtype in enumerate(results)
        for i in tangents
        if is_inexact(dtype) and partial(definition, (o, i), dtypes) is not None
    ]
    outs, ins = (sorted({position[side] for position in positions}) for side in (0, 1))
    if not positions:
        return {}
    spec = derivative_spec(definition, "jvp", dtypes, ins, outs)
    vectors = [tangents[i] for i in ins]
    read = [*spec.primals]
    if may_use_a_reference(definition):
        read = [*primals]
    elif shape is not None:
        # The results have the shape that operands broadcast to: adds inputs until it is `shape`.
        for i in sorted(primals, key=lambda i: size_of(primals[i].shape), reverse=True):
            if _shape_of([*(primals[k] for k in read), *vectors]) == shape:
                break
            read = [*{*read, i}]
    spec = dataclasses.replace(spec, primals=tuple(sorted(read)))
    operands = [*(primals[i] for i in spec.primals), *vectors]
    return dict(zip(outs, bind(*operands, spec=spec, implementation=implementation), strict=True))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, implementation: str | None
) -> tuple[list[Any], list[Any]]:
    results = bind(*primals, spec=spec, implementation=implementation)
    if _is_traced(spec):

        def run(definition: Definition, args: dict[int, Any], _: Sequence[int]) -> list[Any]:
            return bind_traced(definition, args, implementation)

        found = derive.tangents_of(spec, primals, tangents, run)
        results = derive.results_of(spec, primals, tangents, results, run)
        return results, derive.tangents_like(results, found)
    shape = results[0].shape
    given = dict(zip(spec.primals, primals, strict=False))
    moving = {i: t for i, t in zip(spec.primals, tangents, strict=False) if not derive.is_zero(t)}
    out: list[Any] = [None] * len(results)
    if spec.mode == "value":
        found = _tangents(spec.definition, spec.dtypes, given, moving, implementation, shape)
        out = [found.get(o) for o in spec.outs]
    else:
        vectors = primals[len(spec.primals) :]
        moved = tangents[len(spec.primals) :]
        if not all(map(derive.is_zero, moved)):
            operands = [
                *primals[: len(spec.primals)],
                *map(ad.instantiate_zeros, moved),
            ]
            out = bind(*operands, spec=spec, implementation=implementation)
        if moving:
            more = _second_order(spec, given, moving, vectors, implementation, shape)
            out = [
                b if a is None else a if b is None else jnp.add(a, b)
                for a, b in zip(out, more, strict=True)
            ]
    return results, derive.tangents_like(
        results, {o: t for o, t in enumerate(out) if t is not None}
    )


def _second_order(
    spec: Spec,
    primals: Mapping[int, Any],
    tangents: Mapping[int, Any],
    vectors: Sequence[Any],
    implementation: str | None,
    shape: Sequence[int],
) -> list[Any]:
    """The tangents of a derivative kernel for constant vectors: sums of products."""
    by_input = spec.mode == "jvp"
    place = {k: n for n, k in enumerate(spec.ins if by_input else spec.outs)}
    sums: dict[int, Any] = {}
    for (o, i), definition in spec.partials().items():
        reads = set(definition.reads)
        moving = {k: t for k, t in tangents.items() if k in reads}
        if not moving:
            continue
        found = _tangents(definition, spec.dtypes, primals, moving, implementation, None)
        if 0 not in found:
            continue
        vector = vectors[place[i if by_input else o]]
        product = _product(found[0], vector, shape)
        k = o if by_input else i
        sums[k] = product if k not in sums else sums[k] + product
    wanted = spec.outs if by_input else spec.ins
    return [
        _as_dtype(sums[k], jnp.dtype(dtype)) if k in sums else None
        for k, dtype in zip(wanted, spec.result_dtypes, strict=True)
    ]


def _product(a: Any, b: Any, shape: Sequence[int]) -> Any:
    dtype = computed_in(a.dtype.name, b.dtype.name)
    return jnp.multiply(*(jnp.broadcast_to(x.astype(dtype), shape) for x in (a, b)))


def _transpose(cts: Sequence[Any], *args: Any, spec: Spec, implementation: str | None) -> list[Any]:
    """The transpose of a JVP is the VJP, and vice versa.

    A value that is linear in operands is its own JVP with respect to them.
    """
    if _is_traced(spec):

        def run(definition: Definition, args: dict[int, Any], _: Sequence[int]) -> list[Any]:
            return bind_traced(definition, args, implementation)

        def like(found: Any, aval: Any) -> Any:
            (of_result, *_) = (jax.typeof(ct) for ct in cts if not derive.is_zero(ct))
            return _summed_like(_compat.broadcast_like(found, of_result), aval)

        return derive.cotangents_of(spec, cts, args, run, like)
    if spec.mode == "value":
        order = sorted(spec.primals, key=lambda i: ad.is_undefined_primal(args[i]))
        known = [i for i in order if not ad.is_undefined_primal(args[i])]
        jvp = dataclasses.replace(
            spec, mode="jvp", primals=tuple(known), ins=tuple(order[len(known) :])
        )
        moved = _transpose(cts, *(args[i] for i in order), spec=jvp, implementation=implementation)
        return [moved[order.index(i)] for i in spec.primals]
    count = len(spec.primals)
    given = {
        i: x for i, x in zip(spec.primals, args, strict=False) if not ad.is_undefined_primal(x)
    }
    vectors = args[count:]
    linear = {
        k: vector.aval
        for k, vector in zip(spec.ins if spec.mode == "jvp" else spec.outs, vectors, strict=True)
        if ad.is_undefined_primal(vector)
    }
    results = spec.outs if spec.mode == "jvp" else spec.ins
    live = {k: ct for k, ct in zip(results, cts, strict=True) if not derive.is_zero(ct)}
    found: dict[int, Any] = {}
    side = 1 if spec.mode == "jvp" else 0  # the side of a position (output, input) that is linear
    partials = {p: d for p, d in spec.partials().items() if p[1 - side] in live}
    for definition in partials.values():
        for i in definition.reads:
            if i not in given:
                raise NotImplementedError(
                    f"{spec.definition.name}: it cannot be transposed with respect to "
                    f"{spec.definition.inputs[i].name}, which a derivative reads."
                )
    pairs = [position for position in partials if position[side] in linear]
    if pairs:
        outs, ins = (sorted({pair[k] for pair in pairs}) for k in (0, 1))
        mode: Mode = "vjp" if spec.mode == "jvp" else "jvp"
        other = derivative_spec(spec.definition, mode, spec.dtypes, ins, outs)
        wanted, sources = (ins, outs) if mode == "vjp" else (outs, ins)
        if may_use_a_reference(spec.definition):
            other = dataclasses.replace(other, primals=tuple(given))
        operands = [*(given[i] for i in other.primals), *(live[k] for k in sources)]
        transposed = bind(*operands, spec=other, implementation=implementation)
        found = dict(zip(wanted, transposed, strict=True))
    of_vectors = spec.ins if spec.mode == "jvp" else spec.outs
    pulled = {k: _summed_like(ct, linear[k]) for k, ct in found.items() if k in linear}
    return [*(None,) * count, *map(pulled.get, of_vectors)]


def _summed_like(ct: Any, aval: Any) -> Any:
    """Sums the cotangent of an operand that was broadcast; narrow floats in float32."""
    if ct.shape != aval.shape:
        axes = tuple(
            d for d, size in enumerate(ct.shape) if not aval.shape or size != aval.shape[d]
        )
        total = jnp.sum(_widened(ct), axes, keepdims=bool(aval.shape))
        ct = total.astype(aval.dtype)
    return ct


# ---- derivatives of traced bodies ----


def _is_traced(spec: Spec) -> bool:
    # An ElementwiseKernel's derivative may be a traced body too, that of its reference.
    return spec.definition.reference is None and isinstance(spec.definition.body, Traced)


def bind_traced(
    definition: Definition, args: Mapping[int, Any], implementation: str | None
) -> list[Any]:
    """Computes the outputs of a definition with a traced body, for inputs given by number.

    A derivative that reads or writes more than one kernel can is left to XLA.
    """
    if len(args) > MAX_OPERANDS or len(definition.outputs) > MAX_OUTPUTS:
        implementation = "xla"
    dtypes = tuple(p.type for p in definition.inputs)
    spec = dataclasses.replace(value_spec(definition, dtypes), primals=tuple(args))
    return bind(*args.values(), spec=spec, implementation=implementation)


_primitive.define_derivatives(kernel_p, jvp=_jvp, transpose=_transpose)
