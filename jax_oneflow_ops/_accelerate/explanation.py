"""What `explain` collects while a program is lowered."""

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_oneflow_ops import _compat, _policy
from jax_oneflow_ops._accelerate.report import Row

TAG = "jof_row"  # an attribute of operations in a program that is explained


@dataclasses.dataclass
class Explanation:
    """The operations of a program that this package could run, as far as it is lowered."""

    device_kind: str | None
    rows: list[tuple[Row, Any]] = dataclasses.field(default_factory=list)  # with `key_of` each
    # The numbers of those that sum gathered rows without an array of them.
    messages: set[int] = dataclasses.field(default_factory=set)
    # The lines of the softmaxes that attentions contain, by number.
    softmaxes: dict[int, str] = dataclasses.field(default_factory=dict)


current: contextvars.ContextVar[Explanation | None] = contextvars.ContextVar(
    "explanation", default=None
)


def add(
    primitive: Any,
    ctx: Any,
    result: Any,
    operation: str,
    avals: Sequence[Any],
    reason: str,
    *,
    decision: _policy.Decision | None = None,
    swapped: bool = True,
    is_message: bool = False,
    softmax_line: str = "",
    **changes: Any,
) -> None:
    """Reports an operation, if the program is explained. `changes` are attributes of its row.

    The operation that made `result`, a value of MLIR, is tagged with the number of the row: what
    the program does not contain in the end is not reported. The row's line is that of `ctx`.
    """
    if (explanation := current.get()) is None:
        return
    number = len(explanation.rows)
    _compat.tag(result, TAG, str(number))
    row = row_of(operation, avals, swapped, reason, decision, line=line_of(ctx), **changes)
    explanation.rows.append((row, key_of(primitive, ctx.avals_in)))
    if is_message:
        explanation.messages.add(number)
    if softmax_line:
        explanation.softmaxes[number] = softmax_line


def line_of(ctx: Any) -> str:
    """The user's line of the operation that is lowered, if the program is explained."""
    return _compat.user_line(ctx.traceback) if current.get() else ""


def device_kind(platform: str) -> str | None:
    """The kind of device that a program is lowered for, or explained for."""
    explanation = current.get()
    return explanation.device_kind if explanation else _policy.device_kind(platform)


def row_of(
    operation: str,
    avals: Sequence[Any],
    swapped: bool,
    reason: str,
    decision: _policy.Decision | None = None,
    *,
    line: str = "",
    **changes: Any,
) -> Row:
    """The row of an operation in a report; `changes` are attributes of it."""
    row = Row(
        line=line,
        operation=operation,
        shapes=tuple(tuple(aval.shape) for aval in avals),
        dtype=avals[0].dtype.name,
        swapped=swapped,
        reason=reason,
        bytes=_policy.nbytes(*avals) if is_known(avals) else 0,
        native_us=decision.native_us if decision else None,
        xla_us=decision.xla_us if decision else None,
    )
    return dataclasses.replace(row, **changes)


def is_known(avals: Any) -> bool:
    """Whether the sizes of arrays are numbers, not variables of `jax.export`."""
    return all(isinstance(size, int) for aval in avals for size in aval.shape)


def key_of(primitive: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Identifies an operation of a program by its primitive and the shapes of its operands."""
    return primitive.name, *(tuple(getattr(x, "aval", x).shape) for x in operands)
