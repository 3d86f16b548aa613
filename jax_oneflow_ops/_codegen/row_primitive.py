"""The primitive of row kernels, which compute functions that are passed to `fuse`, and its rules.

The inputs and outputs of a definition are arrays of rank 1, the elements of a row, and scalars,
values of a row. An operand has rank 0 or the rank of the arrays, (..., n), with size 1 in the
dimensions that it is broadcast over. A row vector is an operand that is broadcast over all rows. A
result holds elements, one value for each row, (..., 1), or the sum of either over all rows. The
cotangents of row vectors and scalars are such sums. Derivatives are those of the traced body, as
in `primitive`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _operands, _primitive
from jax_oneflow_ops._codegen import compilers, derive, primitive, row_source
from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.row_source import ARRAY, SCALAR, SUMS, VALUE, VECTOR
from jax_oneflow_ops._codegen.signature import MAX_OUTPUTS
from jax_oneflow_ops._codegen.traced import Program, computed, mapped

Kind = Literal["elements", "value", "sum of elements", "sum of values"]

MAX_INPUTS = 32
"""The limit for one call: kMaxRowInputs in csrc/ops/traced_rows.h."""
# The shared memory that every GPU allows a thread block, for array and row vector operands.
_MAX_SHARED_BYTES = 96 * 1024


@dataclasses.dataclass(frozen=True)
class Spec:
    """One kernel: a definition, the inputs that are operands, and the kinds of its results."""

    definition: Definition
    width: int  # elements of a row
    primals: tuple[int, ...]
    kinds: tuple[Kind, ...]

    def __str__(self) -> str:  # in printed jaxprs
        return self.definition.name

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(p.type for p in self.definition.inputs)

    @property
    def result_dtypes(self) -> tuple[str, ...]:
        return tuple(p.type for p in self.definition.outputs)

    @property
    def is_of_elements(self) -> list[bool]:
        """For each input, whether it holds elements of a row, not one value per row."""
        flat = self.definition.traced.flat
        return [bool(shape) for shape in derive.shapes_of(flat.invars)]

    @property
    def reads_elements(self) -> bool:
        """Whether an operand has more than one element for each row; otherwise XLA runs it."""
        return any(self.is_of_elements[i] for i in self.primals)

    @property
    def program(self) -> Program:
        return self.definition.traced.program


def bind(
    definition: Definition,
    width: int,
    kinds: Sequence[Kind],
    args: Mapping[int, Any],
    lead: Sequence[Any],
    implementation: str | None,
) -> list[Any]:
    """Binds the primitive for inputs given by number, with rows of leading shape `lead`."""
    every = dict(args)
    shape = (*lead, 1)
    if not _is_full(every.values(), lead) and any(kind.startswith("sum") for kind in kinds):
        # A sum counts identical rows separately, so one operand must have all rows.
        one = next(iter(every))
        x = every[one]
        full = (*lead, x.shape[-1] if x.ndim else 1)
        every[one] = jnp.broadcast_to(x, full)
    if not any(x.ndim for x in every.values()):
        one = next(iter(every))
        every[one] = jnp.reshape(every[one], [1] * len(shape))
    every = dict(zip(every, _with_shardings_that_fit(every.values()), strict=True))
    spec = Spec(definition, width, tuple(every), tuple(kinds))
    if not fits(spec, [x.shape for x in every.values()]):
        implementation = "xla"
    results: list[Any] = _operands.bind(
        kernel_p, *every.values(), spec=spec, implementation=implementation
    )
    return results


def _is_full(args: Any, lead: Sequence[Any]) -> bool:
    shapes = [x.shape[:-1] for x in args if x.ndim]
    return bool(shapes) and jnp.broadcast_shapes(*shapes) == tuple(lead)


def _with_shardings_that_fit(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    """Arrays whose sharding types fit together: with whole rows, unless they do as they are.

    In `x.mean(-1, keepdims=True) * y`, one axis of the mesh may shard rows of `x` and columns of
    `y`. The kernel reads both.
    """
    found = [*arrays]
    avals = [jax.typeof(x) for x in found if x.ndim]
    if len({aval.sharding for aval in avals}) > 1:
        try:
            _compat.elementwise_aval(*avals)
        except _compat.ShardingTypeError:
            return [_with_whole_rows(x) if x.ndim else x for x in found]
    return found


def _with_whole_rows(x: jax.Array) -> jax.Array:
    aval = jax.typeof(x)
    return _compat.resharded(x, aval, [*aval.sharding.spec[:-1], None])


def fits(spec: Spec, shapes: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the operands and results are within the limits of one kernel."""
    if len(spec.primals) > MAX_INPUTS or len(spec.kinds) > MAX_OUTPUTS:
        return False
    kinds = _kinds(spec, shapes)
    arrays = sum(kind == ARRAY for kind in kinds.values()) or 1
    vectors = sum(kind == VECTOR for kind in kinds.values())
    return row_source.shared_bytes(arrays, vectors, 8, 4) <= _MAX_SHARED_BYTES


def _abstract_eval(*avals: Any, spec: Spec, **_: Any) -> list[jax.core.ShapedArray]:
    aval = _operands.result_aval(*avals)
    *lead, _row = (
        aval.sharding.spec if len(aval.sharding.spec) == aval.ndim else (None,) * aval.ndim
    )
    ones = (1,) * (aval.ndim - 1)
    types: dict[str, Any] = {
        "elements": ((*aval.shape[:-1], spec.width), (*lead, _row)),
        "value": ((*aval.shape[:-1], 1), (*lead, None)),
        "sum of elements": ((*ones, spec.width), (None,) * aval.ndim),
        "sum of values": ((*ones, 1), (None,) * aval.ndim),
    }
    return [
        _compat.with_spec(aval, *types[kind]).update(dtype=jnp.dtype(dtype), weak_type=False)
        for kind, dtype in zip(spec.kinds, spec.result_dtypes, strict=True)
    ]


# ---- implementations ----


def _kinds(spec: Spec, shapes: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """The kind of each operand: an array, a row vector, a value per row or a scalar."""
    lead = jnp.broadcast_shapes(*(shape[:-1] for shape in shapes))
    rows = math.prod(lead)
    found = {}
    for i, shape in zip(spec.primals, shapes, strict=True):
        own = math.prod(shape[:-1])
        if spec.is_of_elements[i]:
            found[i] = VECTOR if own == 1 and rows != 1 else ARRAY
        else:
            found[i] = SCALAR if own == 1 else VALUE
    return found


_RESULT_KINDS: dict[str, int] = {
    "elements": ARRAY,
    "value": VALUE,
    "sum of elements": SUMS,
    "sum of values": VALUE,
}


@dataclasses.dataclass(frozen=True)
class Form:
    """The kernel that is compiled for operands of given shapes."""

    inputs: tuple[int, ...]  # the inputs that are read
    order: row_source.Layout
    text: str


@functools.lru_cache(maxsize=1024)
def native_form(spec: Spec, shapes: tuple[tuple[int, ...], ...], platform: str) -> Form:
    """The kernel that a call compiles."""
    program = spec.program
    every = _kinds(spec, shapes)
    read = {i: kind for i, kind in every.items() if i in program.reads}
    if ARRAY not in read.values():  # the kernel takes the number of rows from an array
        one = next((i for i in every if every[i] == VECTOR), None)
        one = next(i for i in every if spec.is_of_elements[i]) if one is None else one
        read[one] = ARRAY
    kinds = [_RESULT_KINDS[kind] for kind in spec.kinds]
    order = row_source.layout(program, spec.dtypes, read, spec.result_dtypes, kinds)
    text = row_source.source(
        program,
        f"{spec.definition.name}: {spec.definition}",
        spec.dtypes,
        spec.result_dtypes,
        order,
        spec.width,
        platform,
    )
    return Form(tuple(read), order, text)


def _call(platform: str, *args: Any, spec: Spec) -> list[Any]:
    """Makes the FFI call, with code compiled for this machine's devices."""
    given = dict(zip(spec.primals, args, strict=True))
    lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in args))
    rows, width = math.prod(lead), spec.width
    if not isinstance(width, int):
        return reference(*args, spec=spec)
    is_known = isinstance(rows, int)
    is_short = platform == "cuda" and width > 1 << 16 and is_known and rows < 64
    if rows * width == 0 or is_short or not spec.reads_elements:
        return reference(*args, spec=spec)
    name = spec.definition.name
    form = native_form(spec, tuple(x.shape for x in args), platform)
    order = form.order
    try:
        # For 16-bit results, divisions may be approximate; values of a row are float32 either way.
        is_narrow = "JOF_NARROW_RESULTS" in form.text
        code = primitive.compiled(name, form.text, platform, is_narrow)
    except compilers.CompilerError as error:
        raise RuntimeError(f"{name}: {error.compiler} refuses the kernel: {error.log}") from None
    if code is None:
        return reference(*args, spec=spec)
    operands = [
        _operand(given[i], kind, lead, width)
        for i, kind in zip(order.inputs, order.input_kinds, strict=True)
    ]
    word = jnp.dtype(order.word)
    results = [
        jax.ShapeDtypeStruct(
            (rows, width) if kind == ARRAY else (rows,), jnp.dtype(spec.result_dtypes[o])
        )
        for o, kind in zip(order.outputs, order.output_kinds, strict=True)
    ]
    kinds = [*order.input_kinds, *order.output_kinds]
    if order.sums:
        parts = _primitive.parts_of_sums(platform, rows, width)
        results.append(jax.ShapeDtypeStruct((parts, len(order.sums), width), word))
        kinds.append(SUMS)
    held, depth = order.elements // order.pack, spec.program.reductions
    facts = order.pack, held, order.threads, depth, len(order.sums)
    found = primitive.ffi_call(
        "jof_compiled_rows",
        code,
        name,
        operands,
        results,
        kinds,
        width=np.int64(width),
        layout=np.asarray([*facts, word.itemsize], np.int64),
    )
    by_output = dict(zip(order.outputs, found, strict=False))
    if order.sums:
        totals = jnp.sum(found[-1], 0)
        by_output |= {o: totals[s] for s, o in enumerate(order.sums)}
    ones = (1,) * len(lead)
    shapes: dict[str, Any] = {
        "elements": (*lead, width),
        "value": (*lead, 1),
        "sum of elements": (*ones, width),
        "sum of values": (*ones, 1),
    }
    every = []
    for o, (kind, dtype) in enumerate(zip(spec.kinds, spec.result_dtypes, strict=True)):
        y = by_output[o]
        y = jnp.sum(y) if kind == "sum of values" else y
        every.append(y.reshape(shapes[kind]).astype(dtype))
    return every


def _operand(x: Any, kind: int, lead: tuple[int, ...], width: int) -> Any:
    """Broadcasts an operand to the shape that the kernel expects."""
    if kind == ARRAY:
        return jnp.broadcast_to(x, (*lead, width))
    if kind == VALUE:
        return jnp.broadcast_to(x, (*lead, 1))
    return x


def reference(*args: Any, spec: Spec) -> list[Any]:
    """Computes the same results with XLA."""
    given = dict(zip(spec.primals, args, strict=True))
    rank = max(x.ndim for x in args)
    lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in args))
    every = []
    for i, (dtype, of_elements) in enumerate(zip(spec.dtypes, spec.is_of_elements, strict=True)):
        x = given.get(i)
        if x is None:
            x = jnp.zeros((spec.width,) if of_elements else (), dtype)
        if of_elements:
            x = jnp.broadcast_to(x, (*x.shape[:-1], spec.width))
            x = x.reshape((1,) * (rank - x.ndim) + x.shape)
        elif x.ndim:
            x = jnp.squeeze(x, -1)
        every.append(x.astype(computed(dtype)))
    results = mapped(core.jaxpr_as_fun(spec.definition.traced.jaxpr), every, lead)
    found = []
    axes = tuple(range(len(lead)))
    for kind, y, dtype in zip(spec.kinds, results, spec.result_dtypes, strict=True):
        if kind.endswith(("value", "values")):
            y = jnp.broadcast_to(y, lead)[..., None]
        else:
            y = jnp.broadcast_to(y, (*lead, spec.width))
        if kind.startswith("sum"):
            y = jnp.sum(y, axes, keepdims=True)
        found.append(y.astype(dtype))
    return found


# ---- sharding and batching ----


def _sharding_rule(*types: Any, spec: Spec) -> _primitive.ShardingRule:
    """All dimensions except the last are independent; sums reduce over all of them."""
    rule = _operands.sharding_rule(*types, width=spec.width)
    (dims,) = rule.results
    rank = len(dims)
    results = [
        [
            name if is_whole else f"one_of_result{o}_{name}"
            for name, is_whole in zip(
                dims,
                [*[not kind.startswith("sum")] * (rank - 1), kind.endswith("elements")],
                strict=True,
            )
        ]
        for o, kind in enumerate(spec.kinds)
    ]
    return _primitive.ShardingRule(rule.operands, results, replicated=frozenset(dims[-1:]))


def _batch(
    primitive: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    spec: Spec,
    implementation: str | None,
) -> tuple[list[Any], list[int]]:
    operands, axis = _operands.batch(args, dims)
    rank = max(x.ndim for x in operands)
    if axis == rank - 1:  # the last dimension must be that of row elements
        operands = [jnp.moveaxis(x, -1, 0) if x.ndim else x for x in operands]
        axis = 0
    kinds: list[Kind] = [
        "elements" if kind.endswith("elements") else "value" for kind in spec.kinds
    ]
    lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in operands))
    found = bind(spec.definition, spec.width, kinds, dict(zip(spec.primals, operands, strict=True)),
                 lead, implementation)  # fmt: skip
    rest = tuple(d for d in range(rank - 1) if d != axis)
    results = [
        jnp.sum(y, rest, keepdims=True) if kind.startswith("sum") else y
        for y, kind in zip(found, spec.kinds, strict=True)
    ]
    return results, [axis] * len(results)


kernel_p = _primitive.define(
    "jof_compiled_rows",
    function="fuse",
    abstract_eval=_abstract_eval,
    reference=reference,
    native=_call,
    sharding_rule=_sharding_rule,
    on_shard=_primitive.sum_each,
    batch=_batch,
    multiple_results=True,
)


# ---- derivatives ----


def _lead(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.broadcast_shapes(*(aval.shape[:-1] for aval in avals)))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, implementation: str | None
) -> tuple[list[Any], list[Any]]:
    lead = _lead([jax.typeof(x) for x in primals])

    def run(definition: Definition, args: dict[int, Any], outs: Sequence[int]) -> list[Any]:
        kinds = [spec.kinds[o] for o in outs]
        return bind(definition, spec.width, kinds, args, lead, implementation)

    results = kernel_p.bind(*primals, spec=spec, implementation=implementation)
    found = derive.tangents_of(spec, primals, tangents, run)
    results = derive.results_of(spec, primals, tangents, results, run)
    return results, derive.tangents_like(results, found)


def _transpose(cts: Sequence[Any], *args: Any, spec: Spec, implementation: str | None) -> list[Any]:
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in args]
    lead = _lead(avals)
    kinds = {
        i: _kind_of_cotangent(spec.is_of_elements[i], aval, lead)
        for i, aval in zip(spec.primals, avals, strict=True)
    }

    def run(definition: Definition, args: dict[int, Any], linear: Sequence[int]) -> list[Any]:
        of_linear = [kinds[i] for i in linear]
        return bind(definition, spec.width, of_linear, args, lead, implementation)

    def dtype_of(i: int, aval: Any) -> str:
        return computed(aval.dtype) if kinds[i].startswith("sum") else str(aval.dtype)

    like = functools.partial(_like, lead=lead)
    return derive.cotangents_of(spec, cts, args, run, like, dtype_of)


def _kind_of_cotangent(of_elements: bool, aval: Any, lead: tuple[Any, ...]) -> Kind:
    """The kind of an operand's cotangent. The kernel sums over all leading dimensions or none."""
    is_summed = math.prod(lead) != 1 and math.prod(aval.shape[:-1]) == 1
    if of_elements:
        return "sum of elements" if is_summed else "elements"
    return "sum of values" if is_summed else "value"


def _like(ct: Any, aval: Any, lead: tuple[Any, ...]) -> Any:
    """Gives a cotangent the type of its operand; XLA sums it over partly broadcast dimensions."""
    if aval.ndim == 0:
        ct = jnp.reshape(ct, ())
    elif math.prod(aval.shape[:-1]) != 1:
        ct = jnp.broadcast_to(ct, (*lead, ct.shape[-1]))
        axes = tuple(
            d for d, (n, size) in enumerate(zip(aval.shape, lead, strict=False)) if n != size
        )
        if axes:
            ct = jnp.sum(ct.astype(computed(aval.dtype)), axes, keepdims=True)
    return ct.astype(aval.dtype)


_primitive.define_derivatives(kernel_p, jvp=_jvp, transpose=_transpose)
