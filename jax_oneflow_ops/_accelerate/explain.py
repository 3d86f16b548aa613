"""What `explain` reports: what was swapped while a program was lowered, and what was not."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat, _native, _policy
from jax_oneflow_ops._accelerate import common, exp_sums, explanation
from jax_oneflow_ops._accelerate.report import Report, Row
from jax_oneflow_ops._accelerate.rules import Scope

_RESIZE = "jof.resize, of the same signature, repeats pixels faster than gathers do"
_NORM = (
    "jof.layer_norm and jof.rms_norm are one kernel, but XLA fuses norms with their neighbours: "
    "measure the step with them and without"
)
_CHAIN = (
    "jof.fuse compiles a function of elementwise operations to one kernel; XLA often runs them "
    "below memory bandwidth in 16 bits"
)
_MESSAGES = "jof.message_sum and jof.attention_sum store no row for each edge: here these are {}"
_BY_MAXIMUM = {
    "softmax_cross_entropy_with_integer_labels": (
        "cross entropy",
        "jof.softmax_cross_entropy_with_integer_labels keeps no array of probabilities",
    ),
    "dot_product_attention": (
        "attention",
        'accelerate leaves it: docs/accelerate.md says when; implementation="cudnn" asks for '
        "kernels for 16 bits",
    ),
    **{
        name: (name, f"jof.{name} is one kernel: measure the step with it and without")
        for name in ("softmax", "log_softmax", "logsumexp")
    },
}
"""Advice for functions of JAX and of libraries that compute the maximum of each row."""
_BETWEEN_ROWS = ("dot", "conv_", "reduce", "cum", "sort", "scatter", "concatenate", "scan", "while")
_OF_CHAINS = frozenset({"tanh", "logistic", "erf", "erfc", "log1p"})
_OF_SOFTMAX = (exp_sums.NAME, "softmax", "softmax gradient", "attention", "attention gradient")
"""The names of operations that replace a softmax, a logsumexp, a part of them, or more."""
_ONE_DEVICE = "mhlo.num_partitions = 1 :"

_explained = itertools.count()


def _hashable(fun: Any) -> Any:
    """A function that `jax.jit` accepts: modules of Equinox, which hold arrays, have no hash."""
    try:
        hash(fun)
    except TypeError:
        return lambda *args, **kwargs: fun(*args, **kwargs)
    return fun


def report_on(fun: Any, args: Any, kwargs: Any, platform: str | None) -> Report:
    """The report on a function, perhaps one of `jax.jit`, with these arguments."""
    lowered_for, device_kind = _place(platform)
    found = explanation.Explanation(device_kind)
    token = explanation.current.set(found)
    try:
        of_another = _native.assumed(lowered_for if platform else None)
        with of_another, Scope(common.ON, str(next(_explained))):  # traced and lowered anew
            jitted: Any = fun if common.is_jitted(fun) else jax.jit(_hashable(fun))
            traced = jitted.trace(*args, **kwargs)
            jaxpr = _compat.jaxpr_of(traced)
            try:
                text = traced.lower(lowering_platforms=(lowered_for,)).as_text()
            except ValueError as error:
                names = {e.primitive.name for e, *_ in common.equations(jaxpr)}
                if not any("callback" in name or "debug_print" in name for name in names):
                    raise
                raise ValueError(
                    "explain: jax lowers a program that calls the host, as jax.debug.print does, "
                    "for the platform of this process only. Remedy: leave out the calls, or pass "
                    f"platform={_place(None)[0]!r}"
                ) from error
    finally:
        explanation.current.reset(token)
    # An operation in a function of jit may not know the line where the program calls it.
    lines = {
        explanation.key_of(eqn.primitive, eqn.invars): at for eqn, at, _ in common.equations(jaxpr)
    }
    counts = _tags(text)

    def line_of(row: Row, key: tuple[Any, ...]) -> str:
        within = (_compat.WITH_A_PROGRAM, *row.shapes)  # a search, in jax 0.12
        return row.line or lines.get(key) or lines.get(within, "")

    numbered = {
        i: dataclasses.replace(row, count=counts[i], line=line_of(row, key))
        for i, (row, key) in enumerate(found.rows)
        if counts[i]
    }
    rows = [*numbered.values()]
    fused = _chains_of(jaxpr, lowered_for) if _ONE_DEVICE in text else []
    of_chains = {row.line for row in fused}
    summed = [row for i, row in numbered.items() if i in found.messages]
    not_stored = {(row.line, row.shapes[-1]) for row in summed}

    # The program may reshape logits before their maximum. The softmax of an attention may stand in
    # another line than the products.
    read_once = {
        (line, math.prod(row.shapes[-1]))
        for i, row in numbered.items()
        if row.operation in _OF_SOFTMAX
        for line in (row.line, found.softmaxes.get(i, row.line))
    }

    def is_known(row: Row) -> bool:
        if row.operation == "messages":
            return (row.line, row.shapes[-1]) in not_stored
        if row.operation in ("logsumexp", "softmax", "attention"):
            return (row.line, math.prod(row.shapes[-1])) in read_once
        return row.reason == _CHAIN and row.line in of_chains

    rows += [row for row in _slow(jaxpr) if not is_known(row)]
    return Report(platform or lowered_for, _merged([*rows, *fused]))


def _chains_of(jaxpr: Any, platform: str) -> list[Row]:
    """The chains of a traced program that `fuse=True` turns into kernels."""
    from jax_oneflow_ops._accelerate import chains  # imported lazily: few programs need it

    def is_open(eqn: Any) -> bool:
        return _compat.scope_of(eqn) != _compat.OFF

    rows = []
    for group, reason in chains.find("explain", jaxpr, platform, is_open):
        inner = group.inner
        swapped = (_compat.scope_of(inner.eqns[-1]) or "").endswith(common.FUSED)
        result, *_ = avals = [v.aval for v in (*inner.outvars, *inner.invars)]
        row = Row(
            line=next((line for e in reversed(inner.eqns) if (line := _compat.line_of(e))), ""),
            operation=f"chain of {len(inner.eqns)}",
            shapes=(tuple(result.shape), tuple(max(avals, key=lambda x: x.size).shape)),
            dtype=result.dtype.name,
            swapped=swapped,
            reason=reason if swapped else f"accelerate(fuse=True) makes it one kernel: {reason}",
            bytes=_policy.nbytes(*avals),
        )
        rows.append(row)
    return rows


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Merges equal rows, such as those of a model's layers, into one row with a count."""
    counts = collections.Counter[Row]()
    for row in rows:
        counts[dataclasses.replace(row, count=1)] += row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def _place(platform: str | None) -> tuple[str, str | None]:
    """The name that jax has for a platform, and the kind of its device."""
    if platform is None:
        return _policy.place_of(None)
    if (kind := _policy.measured(platform)) is not None:
        return _policy.tables()[kind]["platform"], kind
    platform = "cuda" if platform == "gpu" else platform
    if platform not in common.PLATFORMS:
        known = ", ".join(map(repr, dict.fromkeys((*common.PLATFORMS, *_policy.tables()))))
        raise ValueError(f"explain: platform must be one of {known}, got {platform!r}")
    return platform, _policy.device_kind(platform)


def _tags(module: str) -> collections.Counter[int]:
    """How often each tag occurs in a program; tags in a function count once for each call."""
    pieces = re.split(r"func\.func (?:public|private) @", module)[1:]
    bodies = {re.split(r"[(\s]", piece, maxsplit=1)[0].strip('"'): piece for piece in pieces}

    @functools.cache
    def count(function: str) -> collections.Counter[int]:
        body = bodies[function]
        total = collections.Counter(map(int, re.findall(rf'{explanation.TAG} = "(\d+)"', body)))
        for called in re.findall(r'\bcall @"?([^"(\s]+)', body):
            if called in bodies:
                total.update(count(called))
        return total

    return count("main")


def _slow(jaxpr: Any) -> list[Row]:
    """The slow operations of a traced program that are not swapped but have alternatives."""
    found = []
    for equation, line, made in common.equations(jaxpr):
        if (help_ := _help(equation, made)) is None:
            continue
        name, avals, reason = help_
        found.append(explanation.row_of(name, avals, False, reason, line=line))
    return found


def _help(equation: Any, made: dict[Any, Any]) -> tuple[str, list[Any], str] | None:
    """The name of a slow operation, its result and operand, and advice; None for others."""
    if not equation.outvars:  # for example, it prints
        return None
    primitive, result = equation.primitive.name, equation.outvars[0].aval
    if equation.params.get("name") == "_resize":
        if "gather" in {e.primitive.name for e, *_ in common.equations(equation.params["jaxpr"])}:
            return "jax.image.resize", [result, equation.invars[0].aval], _RESIZE
    elif primitive == "reduce_max":
        functions = _compat.functions_of(equation)
        if name := next((f for f in functions if f in _BY_MAXIMUM), None):
            operation, reason = _BY_MAXIMUM[name]
            return operation, [equation.invars[0].aval] * 2, reason
    elif primitive == "rsqrt" and (rows := _reduced_rows(equation, made)) is not None:
        return "norm", [rows] * 2, _NORM
    elif primitive == "scatter-add" and _sums_messages(equation, made):
        rows = equation.invars[2].aval
        return "messages", [rows] * 2, _MESSAGES.format(_policy.bytes_text(_policy.nbytes(rows)))
    elif primitive in _OF_CHAINS and result.dtype in (jnp.float16, jnp.bfloat16):
        return primitive, [result] * 2, _CHAIN
    return None


def _sums_messages(equation: Any, made: dict[Any, Any]) -> bool:
    """Whether an equation is a segment sum of elementwise functions of gathered rows."""
    rows = equation.invars[2]
    if "segment_sum" not in _compat.functions_of(equation) or not explanation.is_known([rows.aval]):
        return False
    seen, found = set(), [rows]
    while found:
        variable = found.pop()
        maker = None if _compat.is_literal(variable) else made.get(variable)
        if maker is None or id(maker) in seen or variable.aval.shape[:1] != rows.aval.shape[:1]:
            continue
        seen.add(id(maker))
        inside = _compat.called_jaxpr(maker)
        names = {e.primitive.name for e, *_ in common.equations(inside[0])} if inside else set()
        names.add(maker.primitive.name)
        if not any(name.startswith(_BETWEEN_ROWS) for name in names):
            if "gather" in names:
                return True
            found += maker.invars
    return False


def _reduced_rows(equation: Any, made: dict[Any, Any]) -> Any:
    """The rows that an operation reduces to one number each, such as a variance; else None."""
    if equation.primitive.name == "reduce_sum":
        rows = equation.invars[0].aval
        return rows if equation.params["axes"] == (rows.ndim - 1,) and rows.ndim > 1 else None
    if inside := _compat.called_jaxpr(equation):  # such as jnp.var
        found = (e for e, *_ in common.equations(inside[0]) if e.primitive.name == "reduce_sum")
    else:
        operands = (v for v in equation.invars if not _compat.is_literal(v))
        found = (made[v] for v in operands if v in made)
    rows = (_reduced_rows(e, made) for e in found)
    return next((x for x in rows if x is not None), None)
