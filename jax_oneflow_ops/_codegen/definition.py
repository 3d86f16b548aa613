"""A kernel as it was written: its signature, its body, and the derivatives that were given for it.

The body is text or a traced jaxpr; both have the same members. Derivatives do not depend on the
kind of body: `partial` makes a kernel of each one that was given or that a reference has. The
derivatives of traced bodies are in `derive`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Union

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat
from jax_oneflow_ops._codegen import scalars
from jax_oneflow_ops._codegen.signature import Parameter, bind_variables, computed_in
from jax_oneflow_ops._codegen.text import Text
from jax_oneflow_ops._codegen.traced import Traced, computed

Position = tuple[int, int]  # of a derivative: the output, and the input with respect to which


@dataclasses.dataclass(frozen=True)
class Definition:
    """A kernel's inputs, outputs and body, and its derivatives."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    body: Text | Traced
    derivatives: tuple[tuple[Position, Union[str, "Definition", None]], ...] = ()
    # Not in the repr: names in programs are made from that, and must not differ between processes.
    reference: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)

    @property
    def reads(self) -> tuple[int, ...]:
        """The inputs that the body may read."""
        return self.body.reads(self.inputs)

    @functools.cached_property
    def uses(self) -> tuple[int, ...]:
        """The inputs that the body may read, or the rules of custom functions in it."""
        flat = self.traced.flat
        eqns = scalars.live(flat)
        if not any(scalars.is_or_calls(eqn, "custom_") for eqn in eqns):
            return self.reads
        read = {x for eqn in eqns for x in eqn.invars if not _compat.is_literal(x)}
        rules = (i for i, var in enumerate(flat.invars) if var in read)
        return tuple(sorted({*self.reads, *rules}))

    @property
    def traced(self) -> Traced:
        """The body, where it is not text."""
        assert isinstance(self.body, Traced)
        return self.body

    def output_dtypes(self, dtypes: Sequence[str]) -> tuple[str, ...]:
        """The dtypes of the outputs, given those of the inputs."""
        bound = bind_variables(self.inputs, dtypes)
        return tuple(bound.get(p.type, p.type) for p in self.outputs)

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)


def may_use_a_reference(definition: Definition) -> bool:
    """Whether a reference may compute its derivatives, of any order.

    A reference needs all inputs, because it is not known which ones it reads.
    """
    return definition.reference is not None or any(
        isinstance(d, Definition) and may_use_a_reference(d) for _, d in definition.derivatives
    )


def partial(definition: Definition, position: Position, dtypes: Sequence[str]) -> Definition | None:
    """The derivative of an output with respect to an input, as a kernel; None if it is zero.

    Raises NotImplementedError if it was not given and there is no reference.
    """
    o, i = position
    output, input_ = definition.outputs[o].name, definition.inputs[i].name
    derivative: str | Definition | None
    try:
        derivative = dict(definition.derivatives)[position]
    except KeyError:
        if definition.reference is None:
            raise NotImplementedError(_no_derivative(definition, output, input_)) from None
        return _traced_partial(definition, position, tuple(dtypes))
    if derivative is None:
        return None
    reference = definition.reference and PartialReference(
        definition.reference, len(definition.outputs), position
    )
    if isinstance(derivative, Definition):
        if derivative.reference is not None:
            return derivative
        return dataclasses.replace(derivative, reference=reference)
    return Definition(
        name=f"{definition.name}_d{output}_d{input_}",
        inputs=definition.inputs,
        outputs=(_derivative_parameter(definition, position, dtypes),),
        body=Text(
            derivative,
            definition.body.preamble,
            definition.body.kernel,
            f"derivative of {output} with respect to {input_} of {definition.name}",
            is_expression=True,
        ),
        reference=reference,
    )


def _derivative_parameter(
    definition: Definition, position: Position, dtypes: Sequence[str]
) -> Parameter:
    own, of = dtypes[position[1]], definition.output_dtypes(dtypes)[position[0]]
    return Parameter(own if own == of else computed_in(own, of), "jof_derivative")


@functools.lru_cache(maxsize=1024)
def _traced_partial(
    definition: Definition, position: Position, dtypes: tuple[str, ...]
) -> Definition | None:
    """The derivative of the reference, as a kernel; None if it is zero."""
    assert definition.reference is not None
    output, input_ = (
        side[k].name
        for side, k in zip((definition.outputs, definition.inputs), position, strict=True)
    )
    reference = PartialReference(definition.reference, len(definition.outputs), position)
    name = f"{definition.name}_d{output}_d{input_}"
    result = _derivative_parameter(definition, position, dtypes)
    body = _partial_of_reference(reference, name, dtypes, result.type)
    if body.program.is_zero:
        return None
    inputs = tuple(Parameter(p.type, f"x{i}") for i, p in enumerate(definition.inputs))
    return Definition(name, inputs, (result,), body, reference=reference)


@functools.lru_cache(maxsize=1024)
def _partial_of_reference(
    reference: Callable[..., Any], name: str, dtypes: tuple[str, ...], result: str
) -> Traced:
    """The traced body of the derivative of a reference; see `PartialReference`."""

    def function(*args: Any) -> Any:
        y = reference(*args)
        y = jnp.real(y) if jnp.iscomplexobj(y) and "complex" not in result else y
        return [jnp.asarray(y).astype(computed(result))]

    return Traced(scalars.trace(function, dtypes), name)


def _no_derivative(definition: Definition, output: str, input_: str) -> str:
    if isinstance(definition.body, Text) and definition.body.is_expression:
        return (
            f"{definition.body.kernel}: the {definition.body.label} is an expression, which cannot "
            f"be differentiated again, with respect to {input_}. Remedy: give that derivative as "
            "an ElementwiseKernel that has derivatives of its own."
        )
    key = f'"{input_}"' if len(definition.outputs) == 1 else f'("{output}", "{input_}")'
    return (
        f"{definition.name}: there is no derivative of {output} with respect to {input_}. Remedy: "
        f"give one when the kernel is made, derivatives={{{key}: ...}}, None for zero; or give the "
        f"kernel a reference, whose derivative it then is; or stop the gradient of {input_} with "
        "jax.lax.stop_gradient."
    )


@dataclasses.dataclass(frozen=True)
class PartialReference:
    """The derivative of one output of a reference with respect to one input, as a reference."""

    reference: Callable[..., Any]
    outputs: int
    position: Position

    def __call__(self, *args: Any) -> Any:
        o, i = self.position
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        full = [jnp.broadcast_to(x, shape) for x in args]

        def of_input(x: Any) -> Any:
            result = self.reference(*full[:i], x, *full[i + 1 :])
            result = jnp.asarray(result if self.outputs == 1 else result[o])
            if not jnp.issubdtype(result.dtype, jnp.inexact):  # it is cast to the output's dtype
                result = result.astype(x.dtype)
            return jnp.broadcast_to(result, shape)

        if jnp.iscomplexobj(full[i]):
            value, pull = jax.vjp(of_input, full[i])
            return pull(jnp.ones_like(value))[0]
        return jax.jvp(of_input, (full[i],), (jnp.ones_like(full[i]),))[1]
