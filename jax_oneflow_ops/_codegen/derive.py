"""Derivatives of traced bodies: again traced bodies, made by jax's own rules."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _primitive
from jax_oneflow_ops._codegen import scalars
from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.signature import Parameter, is_inexact
from jax_oneflow_ops._codegen.traced import FusionError, Traced, computed

# Runs a derivative's definition, given its inputs by number, and the numbers of the outputs whose
# tangents it computes or of the inputs whose cotangents it computes.
Run = Callable[[Definition, dict[int, Any], Sequence[int]], list[Any]]


def define(
    name: str,
    function: Callable[..., Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: Sequence[Any] | None = None,
) -> Definition:
    """Makes a definition of a function of scalars or of a row.

    `inputs` and `outputs` are the dtypes of stored elements; `function` takes the `computed` ones.
    """
    body = Traced(scalars.trace(function, inputs, shapes), name)
    return Definition(
        name,
        tuple(Parameter(dtype, f"x{i}") for i, dtype in enumerate(inputs)),
        tuple(Parameter(dtype, f"y{o}") for o, dtype in enumerate(outputs)),
        body,
    )


def _derivative(of: Definition, *args: Any) -> Definition:
    """`define`; if jax's rule needs an operation that kernels lack, the error says so."""
    try:
        return define(*args)
    except FusionError as error:
        if "cannot be fused" not in str(error):  # it is about the rule itself
            raise
        where = f" ({error.line})" if error.line else ""
        raise FusionError(
            f"{of.name}: its derivative needs {error.primitive}{where}, which cannot be part of "
            "this kernel. Remedy: differentiate the function itself, without "
            "jax_oneflow_ops.fuse.",
            error.primitive,
            error.line,
        ) from error


def shapes_of(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes of the inputs or results of a body's jaxpr."""
    return [var.aval.shape for var in variables]


def _read(definition: Definition, args: Sequence[Any]) -> list[Any]:
    """The arguments of a linear function; 0 in place of those that no result depends on.

    Callers do not pass these, but the jaxpr still mentions them, such as x in `where(x > 0, t, t)`.
    """
    return [x if i in definition.reads else jnp.zeros_like(x) for i, x in enumerate(args)]


def _types(parameters: Sequence[Parameter]) -> list[str]:
    return [p.type for p in parameters]


@functools.lru_cache(maxsize=1024)
def jvp(definition: Definition, moving: tuple[int, ...]) -> tuple[Definition, tuple[int, ...]]:
    """The definition of the nonzero tangents of outputs, and the numbers of these outputs.

    Its inputs are those of `definition`, followed by the tangents of the inputs `moving`.
    """
    inputs, outputs = _types(definition.inputs), _types(definition.outputs)
    count = len(inputs)
    function = core.jaxpr_as_fun(definition.traced.jaxpr)
    outs = [o for o, dtype in enumerate(outputs) if is_inexact(dtype)]

    def tangents(of: Sequence[int]) -> Callable[..., Any]:
        def chosen(*args: Any) -> Any:
            results = function(*args)
            return [results[o] for o in of]

        def compute(*args: Any) -> Any:
            of_moving = _primitive.of_some(chosen, args[:count], moving)
            return jax.jvp(of_moving, [args[i] for i in moving], [*args[count:]])[1]

        return compute

    dtypes = [*inputs, *(inputs[i] for i in moving)]
    flat = definition.traced.flat
    shapes = shapes_of(flat.invars)
    shapes += [shapes[i] for i in moving]

    def made(of: Sequence[int]) -> Definition:
        name = f"{definition.name}_jvp"
        results = [outputs[o] for o in of]
        return _derivative(definition, name, tangents(of), dtypes, results, shapes)

    every = made(outs)
    program = every.traced.program
    alive = [
        o
        for o, result in zip(outs, program.results, strict=True)
        if any(i >= count for i in program.inputs_of([result]))
    ]
    return (every if alive == outs else made(alive) if alive else every), tuple(alive)


@functools.lru_cache(maxsize=1024)
def with_rules(definition: Definition, moving: tuple[int, ...]) -> Definition:
    """The definition of the results when the inputs `moving` are differentiated.

    The rule of a custom function computes its results, too. If it does not call the function for
    that, their derivatives are not those of the function.
    """
    flat = definition.traced.flat
    if not moving or not scalars.contains(flat, "custom_"):
        return definition
    function = core.jaxpr_as_fun(definition.traced.jaxpr)

    def compute(*args: Any) -> Any:
        of_moving = _primitive.of_some(function, args, moving)
        return jax.vjp(of_moving, *(args[i] for i in moving))[0]

    inputs, outputs = _types(definition.inputs), _types(definition.outputs)
    shapes = shapes_of(flat.invars)
    found = _derivative(definition, definition.name, compute, inputs, outputs, shapes)
    calls = [
        len(re.findall("custom_[jv]+p_call", str(d.traced.jaxpr))) for d in (definition, found)
    ]
    is_same = calls[0] == calls[1] and found.traced.code == definition.traced.code
    return definition if is_same else found


@functools.lru_cache(maxsize=1024)
def transpose(
    definition: Definition,
    linear: tuple[int, ...],
    live: tuple[int, ...],
    results: tuple[str, ...] | None = None,
) -> Definition:
    """The definition of the cotangents of the inputs `linear`, which outputs are linear in.

    Its inputs are those of `definition`, of which it does not read `linear`, followed by the
    cotangents of the outputs `live`. Its outputs have the dtypes `results`, by default those of the
    inputs.
    """
    inputs, outputs = _types(definition.inputs), _types(definition.outputs)
    count = len(inputs)
    function = core.jaxpr_as_fun(definition.traced.jaxpr)
    flat = definition.traced.flat
    shapes, outs = shapes_of(flat.invars), shapes_of(flat.outvars)

    def chosen(*args: Any) -> Any:
        results = function(*args)
        return [results[o] for o in live]

    def cotangents(*args: Any) -> Any:
        of_linear = _primitive.of_some(chosen, _read(definition, args[:count]), linear)
        avals = [jax.ShapeDtypeStruct(shapes[i], computed(inputs[i])) for i in linear]
        return jax.linear_transpose(of_linear, *avals)([*args[count:]])

    return _derivative(
        definition,
        f"{definition.name.removesuffix('_jvp')}_vjp",
        cotangents,
        [*inputs, *(outputs[o] for o in live)],
        results or [inputs[i] for i in linear],
        [*shapes, *(outs[o] for o in live)],
    )


# ---- rules for primitives whose parameter `spec` has a traced definition ----


def is_zero(x: Any) -> bool:
    """Whether a tangent or a cotangent is a symbolic zero or of dtype float0."""
    return isinstance(x, ad.Zero) or jnp.result_type(x) == jax.dtypes.float0


def tangents_like(results: Sequence[Any], found: Mapping[int, Any]) -> list[Any]:
    """A tangent for each result, zero if it is not in `found`."""
    return [
        _compat.broadcast_like(found[o], jax.typeof(result))
        if o in found
        else ad.Zero(jax.typeof(result).to_tangent_aval())
        for o, result in enumerate(results)
    ]


def tangents_of(
    spec: Any, primals: Sequence[Any], tangents: Sequence[Any], run: Run
) -> dict[int, Any]:
    """Computes the nonzero tangents of the outputs by one kernel."""
    given = dict(zip(spec.primals, primals, strict=True))
    moving = {i: t for i, t in zip(spec.primals, tangents, strict=True) if not is_zero(t)}
    if not moving:
        return {}
    definition, outs = jvp(spec.definition, tuple(moving))
    count = len(spec.definition.inputs)
    every = given | {count + k: t for k, t in enumerate(moving.values())}
    args = {i: every[i] for i in definition.uses if i in every}
    return dict(zip(outs, run(definition, args, outs), strict=True)) if outs else {}


def results_of(
    spec: Any, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any], run: Run
) -> list[Any]:
    """The results when they are differentiated: see `with_rules`."""
    given = dict(zip(spec.primals, primals, strict=True))
    moving = tuple(i for i, t in zip(spec.primals, tangents, strict=True) if not is_zero(t))
    definition = with_rules(spec.definition, moving)
    args = {i: given[i] for i in definition.uses if i in given}
    if definition is spec.definition or not args or not {*definition.reads} <= {*args}:
        return [*results]
    found = run(definition, args, range(len(results)))
    return [
        _compat.broadcast_like(new, jax.typeof(old))
        for new, old in zip(found, results, strict=True)
    ]


def cotangents_of(
    spec: Any,
    cts: Sequence[Any],
    args: Sequence[Any],
    run: Run,
    like: Callable[[Any, Any], Any],
    dtype_of: Callable[[int, Any], str] | None = None,
) -> list[Any]:
    """Computes the cotangents of the operands that the outputs are linear in, by one kernel.

    `like` gives a cotangent the type of its operand; `dtype_of` returns the dtype that the kernel
    stores it in.
    """
    given = dict(zip(spec.primals, args, strict=True))
    linear = {i: x.aval for i, x in given.items() if ad.is_undefined_primal(x)}
    live = {o: ct for o, ct in enumerate(cts) if not is_zero(ct)}
    found: dict[int, Any] = {}
    if linear and live:
        dtypes = tuple(dtype_of(i, aval) for i, aval in linear.items()) if dtype_of else None
        definition = transpose(spec.definition, tuple(linear), tuple(live), dtypes)
        count = len(spec.definition.inputs)
        every = given | {count + k: ct for k, ct in enumerate(live.values())}
        for i in definition.reads:
            if i in linear:
                raise NotImplementedError(
                    f"{spec.definition.name}: it cannot be transposed with respect to input {i}, "
                    "which it is not linear in."
                )
        operands = {i: every[i] for i in definition.uses if i not in linear}
        if operands:  # otherwise they are zero
            found = dict(zip(linear, run(definition, operands, tuple(linear)), strict=True))
    return [like(found[i], linear[i]) if i in found else None for i in spec.primals]
