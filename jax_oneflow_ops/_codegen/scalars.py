"""Turns a jaxpr of arrays into a function of scalars that computes an element of each result.

A function that reduces rows becomes a function of a row: values that extend along the row's
dimensions are arrays of rank 1 instead of scalars.

Elements of intermediate arrays are traced from the results backwards. The alignment of an array
says, for each of its dimensions, which dimension of the results it lies along, or None if it has
size 1. An array that is used in several alignments, as in ``x[:, None] - x``, is a separate operand
for each of them. A short dimension, such as that of a stack of arrays, may be read at single
indices: its entry in the alignment is then a `Place`. Short loops are unrolled; their iterations
read and write such places.
Functions with custom derivatives (`jax.custom_jvp`, `jax.custom_vjp`) keep them: their rules become
functions of scalars when they are differentiated.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_oneflow_ops import _compat, _primitive
from jax_oneflow_ops._codegen import traced
from jax_oneflow_ops._codegen.rounding import rounded, rounds_to
from jax_oneflow_ops._codegen.signature import TYPES, is_inexact, is_narrow
from jax_oneflow_ops._codegen.traced import FusionError, computed


@dataclasses.dataclass(frozen=True)
class Place:
    """A single index in a dimension.

    `refused` is the error if several elements of an operand are needed there.
    """

    index: int
    refused: FusionError = dataclasses.field(compare=False)


Axes = tuple[int | None, ...]
Alignment = tuple[int | Place | None, ...]


@dataclasses.dataclass(frozen=True)
class Space:
    """The shape that a function's arrays broadcast to. Its last dimensions form the rows."""

    shape: tuple[int, ...]
    start: int  # the first dimension of the rows
    # Dimensions over which derivatives with respect to arrays that lack them are summed, after the
    # kernel that computes elements of the derivatives.
    summed: frozenset[int] = frozenset()

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes of the dimensions before those of the rows."""
        return self.shape[: self.start]

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape[self.start :])

    def is_along(self, alignment: Alignment) -> bool:
        """Whether an array with this alignment varies within a row."""
        last = len(self.shape)
        return any(isinstance(axis, int) and self.start <= axis < last for axis in alignment)

    def shaped(self, x: Any, alignment: Alignment) -> Any:
        """Broadcasts a value to rank 1 if its alignment varies within a row."""
        if np.ndim(x) or not self.is_along(alignment):
            return x
        return lax.broadcast_in_dim(x, (self.width,), ())


def space_of(name: str, jaxpr: Any) -> Space | None:
    """The space of a function, or None if it reduces nothing."""
    found: list[tuple[tuple[int, ...], list[int], Any]] = []

    def collect(jaxpr: Any) -> None:
        for eqn in live(jaxpr):
            inside = called(eqn)
            if inside is not None:
                collect(inside[0])
            elif eqn.primitive.name in traced.REDUCTIONS and eqn.invars[0].aval.ndim:
                found.append((eqn.invars[0].aval.shape, _reduced_axes(eqn), eqn))

    collect(jaxpr)
    if not found:
        return None
    shape, axes, eqn = max(found, key=lambda one: (bool(one[1]), _extent(one[0])))
    if not axes:  # rows of one element, or a function of elements that reduces nothing
        is_larger = any(len(sizes(v.aval.shape)) > len(sizes(shape)) for v in jaxpr.outvars)
        return None if is_larger else Space(shape, len(shape) - 1)
    start = axes[0]
    rest = [d for d in range(start, len(shape)) if shape[d] != 1]
    if rest != axes:
        raise _refused(name, eqn, _compat.line_of(eqn), "over these dimensions ", _NOT_LAST)
    row = [shape[d] for d in axes]
    # A result may have more dimensions than the arrays that are reduced.
    for var in jaxpr.outvars:
        dims = [d for d, n in enumerate(var.aval.shape) if n != 1]
        is_larger = len(dims) > len(sizes(shape))
        if is_larger and [var.aval.shape[d] for d in dims[-len(row) :]] == row:
            shape, start = var.aval.shape, dims[-len(row)]
    return Space(shape, start)


def sizes(shape: Sequence[Any]) -> list[Any]:
    """The sizes of dimensions that are not 1."""
    return [n for n in shape if n != 1]


def _extent(shape: Sequence[Any]) -> tuple[int, int]:
    """A measure of the size of arrays that broadcast together, also of symbolic sizes."""
    is_known = all(isinstance(n, int) for n in shape)
    return len(sizes(shape)), math.prod(shape) if is_known else 0


def live(jaxpr: Any) -> list[Any]:
    """The equations that the results of a jaxpr depend on."""
    needed = {v for v in jaxpr.outvars if not _compat.is_literal(v)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if not _compat.is_literal(x))
            found.append(eqn)
    return found[::-1]


def called(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and constants that an equation calls, once or in a loop, or None."""
    if eqn.primitive.name == "scan":
        return _compat.jaxpr_and_consts(eqn.params["jaxpr"])
    return _compat.called_jaxpr(eqn)


def contains(jaxpr: Any, prefix: str) -> bool:
    """Whether a jaxpr, or one that it calls, has a primitive whose name begins with `prefix`."""
    return any(is_or_calls(eqn, prefix) for eqn in jaxpr.eqns)


def is_or_calls(eqn: Any, prefix: str) -> bool:
    """The same for an equation."""
    inside = called(eqn)
    is_it = eqn.primitive.name.startswith(prefix)
    return is_it or (inside is not None and contains(inside[0], prefix))


def _reduced_axes(eqn: Any) -> list[int]:
    return [d for d in sorted(eqn.params["axes"]) if eqn.invars[0].aval.shape[d] != 1]


_NOT_LAST = (
    "the rows of one kernel are the last dimensions, the same in all of its reductions",
    "move these dimensions to the end with jnp.moveaxis before the call, or reduce outside",
)


class Constant:
    """An array that a function closes over."""

    def __init__(self, array: Any, dtype: Any):
        self.array = array
        self.dtype = dtype

    def number(self, alignment: Alignment) -> Any:
        """The element that an alignment selects; None if it selects several or it is not known."""
        if any(isinstance(axis, int) for axis in alignment) or not _is_known(self.array):
            return None
        return _number(np.asarray(self.array)[tuple(map(_index, alignment))], self.dtype)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A function of scalars, which are elements of `leaves`.

    A leaf is an input, given by its number, or a constant, with its alignment.
    """

    leaves: tuple[tuple[int | Constant, Alignment], ...]
    dtypes: tuple[str, ...]
    function: Callable[..., list[Any]]

    @property
    def reads_arguments(self) -> bool:
        """Whether it reads an input, not only constants."""
        return not all(isinstance(source, Constant) for source, _ in self.leaves)

    def operands(self, args: Sequence[Any]) -> list[tuple[Any, Axes]]:
        """The leaves as arrays, given the inputs `args`. Places are sliced out of them."""
        found = []
        for source, alignment in self.leaves:
            if isinstance(source, Constant):
                x = jnp.asarray(source.array, source.dtype)
            else:
                x = args[source]
            for d, axis in enumerate(alignment):
                if isinstance(axis, Place):
                    x = lax.slice_in_dim(x, axis.index, axis.index + 1, axis=d)
            found.append((x, tuple(a if isinstance(a, int) else None for a in alignment)))
        return found


def trace(
    function: Callable[..., Any], dtypes: Sequence[str], shapes: Sequence[Any] | None = None
) -> Any:
    """The jaxpr of a function of scalars, or of a row, for the `computed` forms of dtypes."""
    wide = any(dtype in ("int64", "uint64", "float64", "complex128") for dtype in dtypes)
    with _compat.without_mesh(), jax.enable_x64(True) if wide else contextlib.nullcontext():
        args = [
            jax.ShapeDtypeStruct(shape, computed(dtype))
            for shape, dtype in zip(shapes or [()] * len(dtypes), dtypes, strict=True)
        ]
        return jax.make_jaxpr(function)(*args)


def plan(
    name: str,
    jaxpr: Any,
    consts: Sequence[Any],
    demands: Sequence[tuple[int, Alignment]],
    exact: Mapping[int, Any],
    space: Space | None = None,
) -> Plan:
    """The function of scalars that computes elements of a jaxpr's results.

    Args:
      name: the name of the function, for errors.
      jaxpr: the jaxpr.
      consts: the constants of the jaxpr.
      demands: the results, by number, with their alignments.
      exact: see `exact_literals`.
      space: the space of a function that reduces rows.
    """
    if space is None:
        every = [axis for _, alignment in demands for axis in alignment]
        space = Space((), 0, frozenset(axis for axis in every if isinstance(axis, int)))
    else:
        lead = (d for d in range(space.start) if space.shape[d] != 1)
        space = dataclasses.replace(space, summed=frozenset(lead))
    found = _plan(name, jaxpr, consts, demands, exact, "", space)
    for _, alignment in found.leaves:
        if any(isinstance(axis, int) for axis in alignment):  # several elements
            for axis in alignment:
                if isinstance(axis, Place):
                    raise axis.refused
    return found


def _plan(
    name: str,
    jaxpr: Any,
    consts: Sequence[Any],
    demands: Sequence[tuple[int, Alignment]],
    exact: Mapping[int, Any],
    line: str,
    space: Space,
) -> Plan:
    """`plan` for a part of a function: its inputs may be stacks that are read at places.

    Errors name `line` for equations that have no line of their own.
    """
    unrounded = _results_of_reductions(jaxpr)
    sources: dict[Any, int | Constant] = {var: k for k, var in enumerate(jaxpr.invars)}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        is_constant = isinstance(const, Constant)
        sources[var] = const if is_constant else Constant(const, var.aval.dtype)
    wanted: dict[Any, dict[Alignment, None]] = {}

    def number(atom: Any, alignment: Alignment) -> Any:
        if _compat.is_literal(atom):
            found = exact.get(id(atom))
            return _number(atom.val if found is None else found, atom.aval.dtype)
        source = atom if isinstance(atom, Constant) else sources.get(atom)
        return source.number(alignment) if isinstance(source, Constant) else None

    def want(atom: Any, alignment: Alignment) -> None:
        if number(atom, alignment) is None:
            if not isinstance(atom, Constant):
                _check_dtype(name, atom.aval.dtype)
            wanted.setdefault(atom, {})[alignment] = None

    for k, alignment in demands:
        want(jaxpr.outvars[k], alignment)
    steps: list[_Step] = []
    for eqn in reversed(jaxpr.eqns):
        outs = [(k, a) for k, var in enumerate(eqn.outvars) for a in wanted.pop(var, ())]
        if not outs:
            continue
        try:
            step = _step(name, eqn, outs, exact, line, space, id(eqn) in unrounded)
        except FusionError:
            constants = _constants(jaxpr, eqn, sources)
            if constants is None:
                raise
            needs = [(constants[k], alignment) for k, alignment in outs]
            step = _Step(needs, [(eqn.outvars[k], a) for k, a in outs], lambda xs: xs)
        for atom, alignment in step.needs:
            want(atom, alignment)
        steps.append(step)
    places = {var: k for k, var in enumerate(jaxpr.invars)}
    atoms = sorted(wanted, key=lambda atom: places.get(atom, len(places)))
    leaves = [(atom, a) for atom in atoms for a in wanted[atom]]

    def function(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(leaves, args, strict=True))

        def read(atom: Any, alignment: Alignment) -> Any:
            found = number(atom, alignment)
            return env[atom, alignment] if found is None else found

        for step in reversed(steps):
            results = step.compute([read(*need) for need in step.needs])
            for (atom, alignment), result in zip(step.gives, results, strict=True):
                env[atom, alignment] = space.shaped(result, alignment)
        return [
            space.shaped(read(jaxpr.outvars[k], alignment), alignment) for k, alignment in demands
        ]

    found = [(a if isinstance(a, Constant) else sources[a], alignment) for a, alignment in leaves]
    dtypes = [str(a.dtype if isinstance(a, Constant) else a.aval.dtype) for a, _ in leaves]
    return Plan(tuple(found), tuple(dtypes), function)


def _constants(jaxpr: Any, eqn: Any, sources: Mapping[Any, Any]) -> list[Constant] | None:
    """Computes the results of an equation with XLA; None if it depends on an argument."""
    known: dict[Any, Any] = {
        var: source.array for var, source in sources.items() if isinstance(source, Constant)
    }

    def unknown(eqn: Any) -> set[Any]:
        return {x for x in eqn.invars if not _compat.is_literal(x) and x not in known}

    eqns, needed = [eqn], unknown(eqn)
    for each in reversed(jaxpr.eqns):  # what follows `eqn` makes nothing that it needs
        if not needed.isdisjoint(each.outvars):
            eqns.append(each)
            needed = needed.difference(each.outvars) | unknown(each)
    if needed:
        return None
    for each in reversed(eqns):
        args = [x.val if _compat.is_literal(x) else known[x] for x in each.invars]
        known.update(zip(each.outvars, _compat.bind_equation(each, args), strict=True))
    return [Constant(known[var], var.aval.dtype) for var in eqn.outvars]


def is_elementwise(name: str, eqn: Any) -> bool:
    """Whether an equation can be part of an elementwise kernel, wherever the kernel begins."""
    if eqn.primitive.name == "iota":  # XLA computes it where it is read
        return False
    outs = [(k, _identity(var.aval.shape)) for k, var in enumerate(eqn.outvars)]
    try:
        for var in eqn.outvars:
            _check_dtype(name, var.aval.dtype)
        step = _step(name, eqn, outs, {}, "", Space((), 0))
    except FusionError:
        return False
    return not any(isinstance(axis, Place) for _, alignment in step.needs for axis in alignment)


def _identity(shape: Sequence[Any]) -> Alignment:
    return tuple(d if n != 1 else None for d, n in enumerate(shape))


def whole(jaxpr: Any, var: Any) -> tuple[int, Alignment]:
    """The demand for a whole result, as `plan` takes it."""
    return jaxpr.outvars.index(var), _identity(var.aval.shape)


def of_rows(jaxpr: Any, var: Any, space: Space) -> tuple[int, Alignment] | None:
    """The demand for a result of elements or of a value for each row; None for others."""
    for dims in (range(len(space.shape)), range(space.start)):
        axes = iter([d for d in dims if space.shape[d] != 1])
        if sizes(var.aval.shape) == sizes([space.shape[d] for d in dims]):
            alignment = tuple(next(axes) if n != 1 else None for n in var.aval.shape)
            return jaxpr.outvars.index(var), alignment
    return None


@dataclasses.dataclass
class _Step:
    """An equation on scalars: the values that it needs and gives, and what computes them."""

    needs: list[tuple[Any, Alignment]]
    gives: list[tuple[Any, Alignment]]
    compute: Callable[[list[Any]], Sequence[Any]]


def _is_known(const: Any) -> bool:
    if isinstance(const, jax.core.Tracer):
        return False
    return bool(getattr(const, "is_fully_addressable", True))


def _number(value: Any, dtype: Any) -> Any:
    """A number in the `computed` form of a dtype."""
    return np.asarray(value).astype(computed(dtype))[()]


def _check_dtype(name: str, dtype: Any) -> None:
    if str(dtype) not in TYPES:
        raise FusionError(
            f"{name}: a kernel can have values of the dtypes {', '.join(TYPES)}, not of {dtype}. "
            "Remedy: compute these outside of it."
        )


def _step(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    exact: Mapping[int, Any],
    line: str,
    space: Space,
    is_unrounded: bool = False,
) -> _Step:
    line = _compat.line_of(eqn) or line
    primitive = eqn.primitive.name
    gives = [(eqn.outvars[k], alignment) for k, alignment in outs]
    if primitive == "custom_jvp_call" or primitive.startswith("custom_vjp_call"):
        return _custom(name, eqn, outs, gives, exact, line, space)
    called = _compat.called_jaxpr(eqn)
    if called is not None:
        inner = _plan(name, *called, outs, exact, line, space)
        return _Step(_of_operands(eqn, inner), gives, lambda xs: inner.function(*xs))
    if primitive == "scan":
        return _loop(name, eqn, outs, gives, exact, line, space)
    if primitive in _MOVES:
        moves = [_moved(name, eqn, k, alignment, line) for k, alignment in outs]
        return _Step(moves, gives, lambda xs: xs)
    if primitive in _PICKS:
        picks = [_picked(name, eqn, k, alignment, line) for k, alignment in outs]
        return _Step(picks, gives, lambda xs: xs)
    if primitive in ("argmax", "argmin") or primitive in _RUNNING:
        return _of_stack(name, eqn, outs, gives, line)
    if primitive in traced.REDUCTIONS and (space.shape or not _reduced_axes(eqn)):
        return _reduction(name, eqn, outs, gives, line, space)
    if primitive == "iota":
        return _places(name, eqn, outs, gives, line, space)
    if not traced.is_elementwise(primitive) and primitive != "stop_gradient":
        raise _refused(name, eqn, line)
    dtype = eqn.invars[0].aval.dtype
    if primitive == "reduce_precision" and rounds_to(dtype, eqn.params) is None:
        raise _refused(name, eqn, line, "to this format ")
    if primitive == "bitcast_convert_type" and dtype.itemsize != eqn.outvars[0].aval.dtype.itemsize:
        raise _refused(name, eqn, line, "between sizes ")
    _check_dtype(name, dtype)
    if not traced.is_supported(primitive, str(dtype)):
        raise _refused(name, eqn, line, f"of {dtype} ")
    count = len(eqn.invars)
    needs = [(atom, _own(atom, alignment)) for _, alignment in outs for atom in eqn.invars]

    def compute(xs: list[Any]) -> list[Any]:
        parts = (xs[k * count : (k + 1) * count] for k in range(len(outs)))
        return [x[0] if is_unrounded else _on_scalars(eqn, x) for x in parts]

    return _Step(needs, gives, compute)


def _own(atom: Any, alignment: Alignment) -> Alignment:
    """The alignment of an elementwise equation's operand, which may be broadcast."""
    if not atom.aval.ndim:
        return ()
    return tuple(a if n != 1 else None for a, n in zip(alignment, atom.aval.shape, strict=True))


def _of_operands(eqn: Any, inner: Plan) -> list[tuple[Any, Alignment]]:
    return [
        (leaf if isinstance(leaf, Constant) else eqn.invars[leaf], alignment)
        for leaf, alignment in inner.leaves
    ]


# ---- rows ----


def _results_of_reductions(jaxpr: Any) -> set[int]:
    """The ids of the casts to narrow floats with which jnp.sum and jnp.mean of narrow arrays end.

    Kernels skip these casts: they round values only when they store them.
    """

    def maker(atom: Any) -> Any:
        return None if _compat.is_literal(atom) else made_by.get(atom)

    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "convert_element_type" or not is_narrow(
            str(eqn.params["new_dtype"])
        ):
            continue
        source = maker(eqn.invars[0])
        while source is not None and (
            source.primitive.name in ("broadcast_in_dim", "reshape", "squeeze")
            or (source.primitive.name in ("div", "mul") and _compat.is_literal(source.invars[1]))
        ):
            source = maker(source.invars[0])
        if source is None or source.primitive.name not in ("reduce_sum", "reduce_prod"):
            continue
        cast = maker(source.invars[0])
        is_cast = cast is not None and cast.primitive.name == "convert_element_type"
        if is_cast and cast.invars[0].aval.dtype == eqn.params["new_dtype"]:
            found.add(id(eqn))
    return found


def _reduction(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    gives: list[tuple[Any, Alignment]],
    line: str,
    space: Space,
) -> _Step:
    (operand,) = eqn.invars
    shape, axes = operand.aval.shape, _reduced_axes(eqn)
    dims = [d for d in range(space.start, len(space.shape)) if space.shape[d] != 1]
    if axes and [shape[d] for d in axes] != [space.shape[d] for d in dims]:
        raise _refused(name, eqn, line, "over these dimensions ", _NOT_LAST)
    if axes and "complex" in str(operand.aval.dtype):
        raise _refused(name, eqn, line, f"of {operand.aval.dtype} ", _COMPLEX_ROWS)
    along = dict(zip(axes, dims, strict=False))
    needs: list[tuple[Any, Alignment]] = []
    for _, alignment in outs:
        if axes and space.is_along(alignment):
            raise _refused(name, eqn, line, "over these dimensions ", _NOT_LAST)
        rest = iter(alignment)
        removed = set(eqn.params["axes"])
        every = [along.get(d) if d in removed else next(rest) for d in range(len(shape))]
        needs.append((operand, tuple(every)))
    params = {k: None if "sharding" in k else v for k, v in eqn.params.items()} | {"axes": (0,)}

    def compute(xs: list[Any]) -> list[Any]:
        return [eqn.primitive.bind(x, **params) for x in xs] if axes else xs

    return _Step(needs, gives, compute)


_MOST_PLACES = 2**16  # the largest array that is embedded in a program


def _places(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    gives: list[tuple[Any, Alignment]],
    line: str,
    space: Space,
) -> _Step:
    """`iota`: computed along one-dimensional rows; a constant array elsewhere, if it is short."""
    d, dtype = eqn.params["dimension"], eqn.params["dtype"]
    size = eqn.params["shape"][d]
    rows = [k for k in range(space.start, len(space.shape)) if space.shape[k] != 1]
    axes = [alignment[d] for _, alignment in outs]

    def compute(_: list[Any]) -> list[Any]:
        places = _converted(lax.iota(np.int32, space.width), np.dtype(np.int32), dtype)
        return [places if isinstance(a, int) else _number(_index(a), dtype) for a in axes]

    if space.shape and all(not isinstance(axis, int) or [axis] == rows for axis in axes):
        return _Step([], gives, compute)
    if not isinstance(size, int) or size > _MOST_PLACES:
        raise _refused(name, eqn, line)
    _check_dtype(name, dtype)
    places = Constant(np.arange(size).astype(dtype), dtype)
    return _Step([(places, (axis,)) for axis in axes], gives, lambda xs: xs)


# ---- equations that move elements at most across dimensions of size 1 ----

_MOVES = traced.IDENTITIES - {"stop_gradient"}


def _moved(name: str, eqn: Any, k: int, alignment: Alignment, line: str) -> tuple[Any, Alignment]:
    """The operand that holds the elements of result k, and its alignment."""
    operand = eqn.invars[0] if len(eqn.outvars) == 1 else eqn.invars[k]
    shape, result = operand.aval.shape, eqn.outvars[k].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return operand, tuple(
            alignment[d] if n == result[d] and n != 1 else None
            for d, n in zip(dims, shape, strict=True)
        )
    if shape == result:
        return operand, alignment
    if [n for n in shape if n != 1] != [n for n in result if n != 1]:
        raise _refused(name, eqn, line)
    rest = iter([a for a, n in zip(alignment, result, strict=True) if n != 1])
    return operand, tuple(next(rest) if n != 1 else None for n in shape)


# ---- short dimensions, whose elements are separate values, and short loops ----

_MOST_VALUES = 64  # elements of a dimension, and iterations of a loop
STACKS = frozenset({"concatenate", "stack", "scan"})
"""Primitives that make arrays, or read constants, that kernels access at single places only."""
_PICKS = frozenset({"slice", "split", "unstack", "concatenate", "stack", "transpose"})
_RUNNING = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
}


def _index(axis: int | Place | None) -> int:
    """The index that is read in a dimension that lies along none of the results' dimensions."""
    return axis.index if isinstance(axis, Place) else 0


def _place(index: Any, size: Any, refused: FusionError) -> Place | None:
    """The alignment of a dimension of this size that is read at one index."""
    if not isinstance(index, int | np.integer) or not isinstance(size, int):  # symbolic
        raise refused
    return None if size == 1 else Place(int(index), refused)


def _picked(name: str, eqn: Any, k: int, alignment: Alignment, line: str) -> tuple[Any, Alignment]:
    """The operand that result k takes its elements from, and its alignment."""
    primitive, params, every = eqn.primitive.name, eqn.params, [*alignment]
    operand, result = eqn.invars[0], eqn.outvars[k]
    refused = _refused(name, eqn, line)
    if primitive == "transpose":
        every = [alignment[[*params["permutation"]].index(d)] for d in range(len(alignment))]
        axes = [axis for axis in every if isinstance(axis, int)]
        if axes != sorted(axes):
            raise refused
        return operand, tuple(every)
    if primitive == "unstack":
        d = params["axis"]
        return operand, (*every[:d], _place(k, operand.aval.shape[d], refused), *every[d:])
    if primitive in ("slice", "split"):
        if primitive == "slice":
            strides = params["strides"] or [1] * len(alignment)
            starts = params["start_indices"]
        else:
            strides, starts = [1] * len(alignment), [0] * len(alignment)
            starts[params["axis"]] = sum(params["sizes"][:k])
        for d, (n, axis) in enumerate(zip(operand.aval.shape, alignment, strict=True)):
            if n != result.aval.shape[d]:
                if isinstance(axis, int):
                    raise refused
                index = starts[d] + strides[d] * _index(axis)
                every[d] = _place(index, n, axis.refused if isinstance(axis, Place) else refused)
        return operand, tuple(every)
    d = params["axis"] if primitive == "stack" else params["dimension"]
    axis = every.pop(d)
    if isinstance(axis, int):
        raise refused
    if primitive == "stack":
        return eqn.invars[_index(axis)], tuple(every)
    index = _index(axis)
    for operand in eqn.invars:
        n = operand.aval.shape[d]
        place = _place(index, n, refused)
        if index < n:
            break
        index -= n
    return operand, (*every[:d], place, *every[d:])


def _of_stack(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    gives: list[tuple[Any, Alignment]],
    line: str,
) -> _Step:
    """`argmax`, `argmin` or a cumulative operation along a short dimension."""
    (operand,), params = eqn.invars, eqn.params
    refused = _refused(name, eqn, line)
    operation = _RUNNING.get(eqn.primitive.name)
    (d,) = params["axes"] if operation is None else (params["axis"],)
    size = operand.aval.shape[d]
    if not isinstance(size, int) or not 0 < size <= _MOST_VALUES:
        raise refused
    read: list[list[tuple[Any, Alignment]]] = []
    for _, alignment in outs:
        places, rest = range(size), [*alignment]
        if operation is not None:
            axis = rest.pop(d)
            if isinstance(axis, int):
                raise refused
            index = _index(axis)
            places = places[index:][::-1] if params["reverse"] else places[: index + 1]
        own = (_place(k, size, refused) for k in places)
        read.append([(operand, (*rest[:d], place, *rest[d:])) for place in own])

    def compute(xs: list[Any]) -> list[Any]:
        given, results = iter(xs), []
        for needs in read:
            own = [next(given) for _ in needs]
            if operation is None:
                results.append(_place_of_largest(eqn, own))
            else:
                results.append(functools.reduce(operation, own))
        return results

    return _Step([need for needs in read for need in needs], gives, compute)


def _place_of_largest(eqn: Any, xs: Sequence[Any]) -> Any:
    """`argmax` or `argmin`: the first index of the extreme value, or of NaN if there is one."""
    is_better = jnp.greater if eqn.primitive.name == "argmax" else jnp.less
    number = np.dtype(eqn.params["index_dtype"]).type
    best, place = xs[0], number(0)
    for k, x in enumerate(xs[1:], 1):
        better = is_better(x, best) | ((x != x) & (best == best))
        best, place = jnp.where(better, x, best), jnp.where(better, number(k), place)
    return place


def _turns(eqn: Any) -> float:
    """How many copies of its innermost loop body an equation unrolls to."""
    inside = called(eqn)
    if inside is None:
        return 1
    own = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    if not isinstance(own, int):  # symbolic
        return math.inf
    return own * max(map(_turns, inside[0].eqns), default=1)


def _loop(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    gives: list[tuple[Any, Alignment]],
    exact: Mapping[int, Any],
    line: str,
    space: Space,
) -> _Step:
    """Unrolls a short loop."""
    length, refused = eqn.params["length"], _refused(name, eqn, line)
    if _turns(eqn) > _MOST_VALUES:
        raise refused
    body = _compat.jaxpr_and_consts(eqn.params["jaxpr"])
    # An iteration reads constants, carried values and elements of arrays; it returns carried values
    # and elements. How jax marks them depends on the release, so they are recognised by rank.
    is_in_array, is_out_array = (
        [x.aval.ndim > v.aval.ndim for x, v in zip(*pair, strict=True)]
        for pair in ((eqn.invars, body[0].invars), (eqn.outvars, body[0].outvars))
    )
    first = is_in_array.count(False) - is_out_array.count(False)
    carried = range(first, is_in_array.count(False))
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    # What is demanded of the initial carried values, and of the results of each iteration.
    wanted: list[dict[tuple[int, Alignment], None]] = [{} for _ in range(length + 1)]
    results = []
    for k, alignment in outs:
        turn, own = length, alignment
        if is_out_array[k]:
            axis, *rest = alignment
            if isinstance(axis, int):
                raise refused
            turn, own = order.index(_index(axis)) + 1, tuple(rest)
        wanted[turn][k, own] = None
        results.append((turn, (k, own)))
    turns: list[Any] = []  # plans
    for turn in range(length, 0, -1):
        turns.insert(0, _plan(name, *body, [*wanted[turn]], exact, line, space))
        for source, alignment in turns[0].leaves:
            if source in carried:
                wanted[turn - 1][source - first, alignment] = None
    needs = [(eqn.invars[first + k], alignment) for k, alignment in wanted[0]]
    for index, inner in zip(order, turns, strict=True):
        for source, alignment in inner.leaves:
            if isinstance(source, Constant):
                needs.append((source, alignment))
            elif is_in_array[source]:
                place = _place(index, length, refused)
                needs.append((eqn.invars[source], (place, *alignment)))
            elif source not in carried:
                needs.append((eqn.invars[source], alignment))

    def compute(xs: list[Any]) -> list[Any]:
        given = iter(xs)
        found = [{key: next(given) for key in wanted[0]}]
        for keys, inner in zip(wanted[1:], turns, strict=True):
            args = [
                found[-1][source - first, alignment] if source in carried else next(given)
                for source, alignment in inner.leaves
            ]
            found.append(dict(zip(keys, inner.function(*args), strict=True)))
        return [found[turn][key] for turn, key in results]

    return _Step(needs, gives, compute)


# ---- equations on scalars ----


def _on_scalars(eqn: Any, args: Sequence[Any]) -> Any:
    """An elementwise equation, in `computed` dtypes."""
    dtype = eqn.outvars[0].aval.dtype
    name = eqn.primitive.name
    if name == "convert_element_type":
        return _converted(args[0], eqn.invars[0].aval.dtype, dtype)
    if name == "reduce_precision":
        return rounded(args[0], rounds_to(dtype, eqn.params))
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
    shapes = {np.shape(x) for x in args} - {()}
    if shapes and len(args) > 1:  # elements of a row, and values of the row
        (shape,) = shapes
        args = [x if np.ndim(x) else lax.broadcast_in_dim(x, shape, ()) for x in args]
    if name in ("bitcast_convert_type", "nextafter"):  # these see the bits
        stored = [
            lax.convert_element_type(x, atom.aval.dtype)
            for x, atom in zip(args, eqn.invars, strict=True)
        ]
        return lax.convert_element_type(eqn.primitive.bind(*stored, **params), computed(dtype))
    return eqn.primitive.bind(*args, **params)


def _converted(x: Any, of: Any, to: Any) -> Any:
    """`astype`. Narrow floats are float32, rounded to what the narrow dtype can represent."""
    if of == to:
        return x
    if is_narrow(str(to)):
        if computed(of) not in ("float32", "float64"):
            x = lax.convert_element_type(lax.real(x) if "complex" in str(of) else x, jnp.float32)
        return lax.convert_element_type(rounded(x, to), jnp.float32)
    return x if computed(of) == to else lax.convert_element_type(x, to)


# ---- functions with custom derivatives ----


class _Custom:
    """A call of a function with a custom JVP or VJP, as a call on scalars with the same rule."""

    def __init__(
        self,
        name: str,
        eqn: Any,
        outs: Sequence[tuple[int, Alignment]],
        exact: Mapping[int, Any],
        line: str,
        space: Space,
    ) -> None:
        self.name, self.eqn, self.outs, self.line, self.space = name, eqn, outs, line, space
        called = _compat.called_jaxpr(eqn)
        assert called is not None
        self.inner = _plan(name, *called, outs, exact, line, space)
        self.needs = _of_operands(eqn, self.inner)
        # Where the needs are in eqn.invars: an array may have several places. -1: it is captured.
        self.positions = [
            -1 if isinstance(leaf, Constant) else leaf for leaf, _ in self.inner.leaves
        ]
        self._add_unused()
        given = [k for k, atom in enumerate(eqn.invars) if not _compat.is_literal(atom)]
        self.variables = [eqn.invars[k] for k in given]
        # What has a derivative: the indices into needs, outs and variables.
        self.moving_needs = [k for k, (atom, _) in enumerate(self.needs) if self._is_moving(atom)]
        self.moving_outs = [k for k, (of, _) in enumerate(outs) if _may_move(eqn.outvars[of])]
        self.moving_variables = [
            k for k, atom in enumerate(self.variables) if self._is_moving(atom)
        ]
        # The place of each position, for those of variables with a derivative.
        self.place_of = {given[k]: place for place, k in enumerate(self.moving_variables)}

    def _add_unused(self) -> None:
        """Adds operands that the value does not use, but that the rule may use."""
        shapes = {self.eqn.outvars[k].aval.shape: alignment for k, alignment in self.outs}
        for position, atom in enumerate(self.eqn.invars):
            if not _compat.is_literal(atom) and position not in self.positions:
                alignment = shapes.get(atom.aval.shape, None if atom.aval.ndim else ())
                if alignment is not None:
                    self.needs.append((atom, alignment))
                    self.positions.append(position)

    def is_captured(self, atom: Any) -> bool:
        captured = self.eqn.invars[: self.eqn.params.get("num_consts", 0)]
        return isinstance(atom, Constant) or any(atom is other for other in captured)

    def _is_moving(self, atom: Any) -> bool:
        return not self.is_captured(atom) and not _compat.is_literal(atom) and _may_move(atom)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The function of the scalars that `needs` names."""

        def value(*xs: Any) -> list[Any]:
            return self.inner.function(*xs[: len(self.inner.leaves)])

        if self.eqn.primitive.name == "custom_jvp_call":
            with_jvp: Any = jax.custom_jvp(value)
            with_jvp.defjvp(self._jvp)
            return with_jvp  # type: ignore[no-any-return]
        with_vjp: Any = jax.custom_vjp(value)
        with_vjp.defvjp(lambda *xs: (self._results(xs), xs), self._vjp)
        return with_vjp  # type: ignore[no-any-return]

    @functools.cached_property
    def _rule_of_results(self) -> Any:
        """The jaxpr of the results as the rule computes them: it need not call the function."""

        def rule(primals: Any, _: Any) -> Any:
            of_places = _primitive.of_some(self._bound, primals, self.moving_variables)
            return jax.vjp(of_places, *(primals[k] for k in self.moving_variables))[0]

        return self._traced(rule, [])

    def _results(self, xs: Sequence[Any]) -> list[Any]:
        """The results when the function is differentiated."""
        closed = self._rule_of_results
        try:
            return self._planned(closed, self.outs, lambda leaf: self._operand(leaf, xs))
        except FusionError as error:
            if self._is_own_call(_compat.jaxpr_and_consts(closed)[0]):
                return [*self.function(*xs)]
            # A kernel cannot compute the rule's results: they keep their values, but have no
            # derivative.
            refuse = self.refusing(str(error), error.primitive)
            return [refuse(y) for y in self.function(*xs)]

    def _is_own_call(self, jaxpr: Any) -> bool:
        """Whether a rule's results are those of a call of the function itself."""
        made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        eqn = None if _compat.is_literal(jaxpr.outvars[0]) else made_by.get(jaxpr.outvars[0])
        if eqn is None or eqn.primitive is not self.eqn.primitive:
            return False
        own, other = (str(_compat.called_jaxpr(e)) for e in (self.eqn, eqn))
        given = [
            var
            for var, atom in zip(jaxpr.invars, self.variables, strict=True)
            if not self.is_captured(atom)
        ]
        read = [atom for atom in eqn.invars if atom in given]
        return [*eqn.outvars] == [*jaxpr.outvars] and read == given and own == other

    def _jvp(self, xs: Sequence[Any], ts: Sequence[Any]) -> Any:
        places, variables = self.moving_variables, self.variables

        def rule(primals: Any, tangents: Any) -> Any:
            of_places = _primitive.of_some(self._bound, primals, places)
            return jax.jvp(of_places, [primals[k] for k in places], tangents)[1]

        def where(leaf: Any) -> Any:
            source, alignment = leaf
            if isinstance(source, Constant) or source < len(variables):
                return self._operand(leaf, xs)
            return self._operand((places[source - len(variables)], alignment), ts)

        tangents = [variables[k].aval for k in places]
        demands = [self.outs[k] for k in self.moving_outs]
        found = self._planned(self._traced(rule, tangents), demands, where)
        results = self._results(xs)
        every = [*map(_no_tangent, results)]
        for k, tangent in zip(self.moving_outs, found, strict=True):
            every[k] = tangent
        return results, every

    def _vjp(self, xs: Sequence[Any], cts: Sequence[Any]) -> Any:
        name, eqn, outs, line = self.name, self.eqn, self.outs, self.line
        moving, moved, places, variables = (
            self.moving_needs,
            self.moving_outs,
            self.moving_variables,
            self.variables,
        )
        if any(self.space.summed.difference(outs[k][1]) for k in moved):
            raise FusionError(
                f"{name}: {_label(eqn, line)} is a jax.custom_vjp function whose result is "
                "broadcast: its backward rule would receive the cotangent of each element, not "
                "their sum. Remedy: call it outside of the fused function, or "
                "jax_oneflow_ops.fuse(..., partial=True).",
                eqn.primitive.name,
                line,
            )

        def rule(primals: Any, vectors: Any) -> Any:
            of_places = _primitive.of_some(self._bound, primals, places)
            results, pull = jax.vjp(of_places, *(primals[k] for k in places))
            full = [*map(_no_tangent, results)]
            for k, ct in zip(moved, vectors, strict=True):
                full[outs[k][0]] = full[outs[k][0]] + ct
            return pull(full)

        def where(leaf: Any) -> Any:
            source, alignment = leaf
            if isinstance(source, Constant) or source < len(variables):
                return self._operand(leaf, xs)
            k = moved[source - len(variables)]
            if alignment != outs[k][1]:
                raise _refused(name, eqn, line, "with such a derivative ")
            return cts[k]

        vectors = [eqn.outvars[outs[k][0]].aval for k in moved]
        demands = [(self.place_of[self.positions[k]], self.needs[k][1]) for k in moving]
        if len({of for of, _ in demands}) < len(demands):
            raise _refused(name, eqn, line, "of an array in two ways ")
        cotangents = self._planned(self._traced(rule, vectors), demands, where)
        found = dict(zip(moving, cotangents, strict=True))
        return tuple(found.get(k) for k in range(len(self.needs)))

    def _bound(self, *xs: Any) -> Sequence[Any]:
        """The call on arrays: those of `variables`."""
        every = iter(xs)
        args = [a.val if _compat.is_literal(a) else next(every) for a in self.eqn.invars]
        results: Sequence[Any] = _compat.bind_equation(self.eqn, args)
        return results

    def _traced(self, rule: Callable[..., Any], vectors: Sequence[Any]) -> Any:
        """The jaxpr of a rule on arrays: `variables`, and tangents or cotangents."""
        # Rules expect the types that they were traced for, shardings included.
        with _compat.context_of(self.eqn):
            return traced.make_jaxpr(rule, [v.aval for v in self.variables], vectors)

    def _planned(self, closed: Any, demands: Any, where: Callable[[Any], Any]) -> list[Any]:
        """Computes scalars of a rule's results; `where` finds the scalar of a leaf."""
        jaxpr = _compat.jaxpr_and_consts(closed)
        found = _plan(self.name, *jaxpr, demands, {}, self.line, self.space)
        return found.function(*map(where, found.leaves))

    def _operand(self, leaf: tuple[Any, Alignment], xs: Sequence[Any]) -> Any:
        """Finds, among the scalars `xs` (one for each need), the one for a leaf of a rule."""
        source, alignment = leaf
        atom = source if isinstance(source, Constant) else self.variables[source]
        for (other, own), x in zip(self.needs, xs, strict=True):
            if other is atom and own == alignment:
                return x
        what = "in another way than its value does. Remedy: "
        if isinstance(source, Constant):
            what = "that it closes over. Remedy: pass it the array as an argument, or "
        raise FusionError(
            f"{self.name}: the derivative of {_label(self.eqn, self.line)} reads an array {what}"
            "call it outside of the fused function.",
            self.eqn.primitive.name,
            self.line,
        )

    def refusing(self, message: str, primitive: str | None) -> Callable[[Any], Any]:
        """The identity, whose derivative is an error."""

        @jax.custom_jvp
        def identity(x: Any) -> Any:
            return x

        @identity.defjvp
        def _(*_: Any) -> Any:
            raise FusionError(message, primitive, self.line)

        return identity


def _custom(
    name: str,
    eqn: Any,
    outs: Sequence[tuple[int, Alignment]],
    gives: list[tuple[Any, Alignment]],
    exact: Mapping[int, Any],
    line: str,
    space: Space,
) -> _Step:
    """A call of a function with a custom JVP or VJP."""
    call = _Custom(name, eqn, outs, exact, line, space)
    fixed = call.refusing(
        f"{name}: {_label(eqn, line)} has no derivative with respect to an array that it closes "
        "over. Remedy: pass it the array as an argument.",
        eqn.primitive.name,
    )
    is_fixed = [call.is_captured(atom) for atom, _ in call.needs]

    def compute(xs: list[Any]) -> Any:
        given = (fixed(x) if fix else x for x, fix in zip(xs, is_fixed, strict=True))
        return call.function(*given)

    return _Step(call.needs, gives, compute)


def _may_move(atom: Any) -> bool:
    """Whether a value may have a derivative."""
    return is_inexact(str(atom.aval.dtype))


def _no_tangent(y: Any) -> Any:
    """A zero tangent or cotangent, of dtype float0 for integers."""
    if is_inexact(str(y.dtype)):
        return jnp.zeros_like(y)
    return np.zeros(np.shape(y), jax.dtypes.float0)  # it may be a number


# ---- what cannot be fused ----

_REASONS = (
    (
        r"^(reduce_(?!precision)|arg(max|min)$|cum)",
        "`fuse` reduces rows only by sum, prod, max, min, any and all, over the same last "
        "dimensions in the entire function; functions of messages reduce nothing",
        "reduce outside of the function, and pass in the result",
    ),
    (
        r"dot_general|conv_general|ragged_dot|fft|linalg|cholesky|triangular|^(lu|qr|svd|eigh?)",
        "it reads many elements for each result",
        "call it outside of the function",
    ),
    (
        r"^(while|scan|cond|switch)",
        f"kernels have no branches, and loops only of at most {_MOST_VALUES} turns, nested ones "
        "multiplied, a number that is known while the function is traced",
        "use jnp.where in place of a branch",
    ),
    (
        r"^jof_",
        "it is a kernel of its own",
        "use the function of JAX that it replaces, such as jax.nn.gelu",
    ),
    (r"random|threefry|rng", "kernels draw no random numbers", "draw them before the call"),
    (
        r"gather|scatter|slice|split|concatenate|stack|pad|transpose|reshape|rev|sort|top_k|tile",
        "it moves elements",
        "do it outside of the function",
    ),
)  # fmt: skip


_COMPLEX_ROWS = "a kernel of rows has no complex numbers", "reduce outside of the function"


def reason_of(primitive: str) -> tuple[str, str]:
    """Why a primitive cannot be fused, and what to do."""
    for pattern, reason, remedy in _REASONS:
        if re.search(pattern, primitive):
            return reason, remedy
    return "it has no form in C++", "call it outside of the function"


def _label(eqn: Any, line: str) -> str:
    name = eqn.params.get("name") or eqn.primitive.name
    return f"{name} ({line})" if line else str(name)


def _refused(
    name: str, eqn: Any, line: str, what: str = "", why: tuple[str, str] | None = None
) -> FusionError:
    primitive = eqn.primitive.name
    reason, remedy = why or reason_of(primitive)
    return FusionError(
        f"{name}: {_label(eqn, line)} {what}cannot be fused: {reason}. Remedy: {remedy}; or "
        "jax_oneflow_ops.fuse(..., partial=True), which fuses the rest.",
        primitive,
        line,
    )


# ---- numbers as they were written ----


def exact_literals(narrow: Any, wide: Any) -> dict[int, Any]:
    """The float32 values, by id, of literals that a jaxpr has rounded to 16 bits or fewer.

    jnp rounds a number such as 0.7978845608 to the dtype of the array beside it. `wide` is the
    jaxpr of the same function for float32. If the two differ in more than dtypes, for example
    because numbers depend on dtypes, the rounded literals stay.
    """
    found: dict[int, Any] = {}
    return found if _collect(narrow, wide, found) else {}


def _collect(narrow: Any, wide: Any, found: dict[int, Any]) -> bool:
    ours, theirs = (
        [e for e in _compat.jaxpr_and_consts(j)[0].eqns if e.primitive.name not in _CASTS]
        for j in (narrow, wide)
    )
    if [e.primitive.name for e in ours] != [e.primitive.name for e in theirs]:
        return False
    for a, b in zip(ours, theirs, strict=True):
        if len(a.invars) != len(b.invars):
            return False
        for x, y in zip(a.invars, b.invars, strict=True):
            if _compat.is_literal(x) and _compat.is_literal(y):
                dtype = x.aval.dtype
                value = np.asarray(y.val)
                if is_narrow(str(dtype)) and value.dtype == np.float32:
                    with np.errstate(over="ignore"):
                        if value.astype(dtype) == np.asarray(x.val, dtype):
                            found[id(x)] = value
        calls = called(a), called(b)
        if (calls[0] is None) != (calls[1] is None):
            return False
        if calls[0] and calls[1] and not _collect(calls[0][0], calls[1][0], found):
            return False
    return True


_CASTS = ("convert_element_type", "copy")
