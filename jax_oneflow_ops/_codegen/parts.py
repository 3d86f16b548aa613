"""Divides a program into elementwise kernels and the rest, for ``fuse(..., partial=True)``.

A value's level is the largest number of non-elementwise operations on a path to it. The values of
one level and shape are computed by one kernel. The kernel recomputes the elementwise operations
before them, back to the results of other operations and of kernels of lower levels. Some
operations, such as reductions, are fused by XLA with the elementwise operations that they read. No
kernel is made for their operands, which need not be in memory.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jax_oneflow_ops import _compat
from jax_oneflow_ops._codegen import scalars, traced
from jax_oneflow_ops._codegen.signature import MAX_OPERANDS, MAX_OUTPUTS, size_of

# Primitives that XLA fuses with the elementwise operations before them.
_READS_IN_PLACE = re.compile(
    r"^(reduce_|arg(max|min)$|cum|transpose$|reshape$|rev$|slice$|split$|concatenate$|pad$|gather$"
    r"|dynamic_slice$|unstack$|broadcast_in_dim$|select_and|iota$)"
)
# Kernels of fewer operations gain nothing.
_LEAST = 2

Kernel = Callable[[SimpleNamespace, Sequence[Any], Sequence[Any]], list[Any]]


def _has_no_rule(eqn: Any) -> bool:
    return not eqn.primitive.name.startswith("custom_")


def flattened(
    jaxpr: Any, consts: Sequence[Any], inlines: Callable[[Any], bool] = _has_no_rule
) -> SimpleNamespace:
    """Inlines the calls of a jaxpr, by default all but those with custom derivatives.

    The other equations stay as they are. If they were traced again, jax would forget which operands
    a `jax.custom_vjp` function closes over.
    """
    eqns: list[Any] = []
    constants: dict[Any, Any] = {}

    def inline(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = core.Var(var.aval)
            constants[env[var]] = value

        def read(atom: Any) -> Any:
            return atom if _compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [*map(read, eqn.invars)]
            called = _compat.called_jaxpr(eqn) if inlines(eqn) else None
            if called:
                outvars = inline(*called, invars)
            else:
                outvars = [core.Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=outvars))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [*map(read, jaxpr.outvars)]

    outvars = inline(jaxpr, consts, jaxpr.invars)
    flat = SimpleNamespace(
        invars=[*jaxpr.invars], constvars=[*constants], eqns=eqns, outvars=outvars
    )
    return SimpleNamespace(jaxpr=flat, consts=[*constants.values()])


@dataclasses.dataclass
class Parts:
    """The division of a jaxpr: which equations are elementwise, and the level of each value."""

    jaxpr: Any
    level: dict[Any, int]
    elementwise: dict[int, bool]  # for each equation, by its index
    fused: dict[Any, None]  # elementwise values that have to be in memory

    @functools.cached_property
    def places(self) -> dict[Any, int]:
        """For each elementwise value, the index of the equation that computes it."""
        eqns = ((k, eqn) for k, eqn in enumerate(self.jaxpr.eqns) if self.elementwise[k])
        return {var: k for k, eqn in eqns for var in eqn.outvars}

    @functools.cached_property
    def by_level(self) -> list[list[int]]:
        """For each level, the indices of its equations."""
        places: list[list[int]] = [[] for _ in range(max(self.level.values(), default=0) + 1)]
        for k, eqn in enumerate(self.jaxpr.eqns):
            places[self.level[eqn.outvars[0]]].append(k)
        return places


@dataclasses.dataclass
class Group:
    """Values that one kernel computes."""

    level: int
    inner: SimpleNamespace  # an elementwise jaxpr whose results are these values


def divide(name: str, jaxpr: Any, is_open: Callable[[Any], bool] = lambda eqn: True) -> Parts:
    """Divides a jaxpr without calls. Equations that are not open count as not elementwise."""
    level: dict[Any, int] = dict.fromkeys([*jaxpr.invars, *jaxpr.constvars], 0)
    elementwise: dict[int, bool] = {}
    made_by: dict[Any, Any] = {}
    apart = custom_vjps_of_broadcast(jaxpr)
    for k, eqn in enumerate(jaxpr.eqns):
        is_fusible = k not in apart and is_open(eqn)
        elementwise[k] = is_fusible and scalars.is_elementwise(name, eqn)
        inputs = [level[x] for x in eqn.invars if not _compat.is_literal(x)]
        own = max(inputs, default=0) + (not elementwise[k])
        for var in eqn.outvars:
            level[var] = own
            if elementwise[k]:
                made_by[var] = eqn
    wanted: dict[Any, None] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        if not elementwise[k] and not reads_in_place(eqn):
            wanted.update(dict.fromkeys(x for x in eqn.invars if not _compat.is_literal(x)))
    wanted.update(dict.fromkeys(x for x in jaxpr.outvars if not _compat.is_literal(x)))

    def operations(var: Any) -> int:
        """The number of operations that a kernel computes for a value, counted up to `_LEAST`."""
        pending, seen = [var], set[int]()
        while pending and len(seen) < _LEAST:
            eqn = made_by.get(pending.pop())
            if eqn is None or id(eqn) in seen:
                continue
            if eqn.primitive.name not in traced.IDENTITIES:
                seen.add(id(eqn))
                if scalars.called(eqn):
                    return _LEAST
            pending += [x for x in eqn.invars if not _compat.is_literal(x)]
        return len(seen)

    fused = {
        var: None
        for var in wanted
        if var in made_by and var.aval.size != 1 and operations(var) >= _LEAST
    }
    return Parts(jaxpr, level, elementwise, fused)


def custom_vjps_of_broadcast(jaxpr: Any) -> set[int]:
    """The indices of equations with a `jax.custom_vjp` on whose result a larger array depends.

    Their backward rules need the sum of the cotangents of all elements, which no kernel has.
    """
    own = {var: size_of(var.aval.shape) for eqn in jaxpr.eqns for var in eqn.outvars}
    most = dict(own)
    for eqn in reversed(jaxpr.eqns):
        for x in eqn.invars:
            if not _compat.is_literal(x) and x in most:
                most[x] = max(most[x], *(most[var] for var in eqn.outvars))
    return {
        k
        for k, eqn in enumerate(jaxpr.eqns)
        if any(most[var] > own[var] for var in eqn.outvars)
        and scalars.is_or_calls(eqn, "custom_vjp")
    }


def captures(eqn: Any) -> bool:
    """Whether an equation calls a function with custom derivatives that closes over arrays.

    Its rules may read these in another way than its value does, which kernels cannot.
    """
    called = scalars.called(eqn)
    if called is None:
        return False
    jaxpr, consts = called
    is_it = not _has_no_rule(eqn) and bool(eqn.params.get("num_consts", 0) or consts)
    return is_it or any(map(captures, jaxpr.eqns))


def reads_in_place(eqn: Any) -> bool:
    """Whether XLA fuses an operation with its operands' producers and its results' consumers."""
    return _READS_IN_PLACE.match(eqn.primitive.name) is not None


def run(
    name: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], kernel: Kernel
) -> list[Any]:
    """Computes the results by a kernel for each level and shape, or a few, and the rest by XLA.

    `kernel` computes the results of an elementwise jaxpr.
    """
    parts = divide(name, jaxpr, lambda eqn: not captures(eqn))
    fitting = [one for group in groups(parts) for one in _within_limits(name, group)]
    return evaluate(parts, fitting, consts, args, kernel)


def groups(parts: Parts) -> list[Group]:
    """The fused values, grouped by level and shape."""
    found = []
    known: set[Any] = set()
    by_level: list[dict[Any, list[Any]]] = [{} for _ in parts.by_level]
    for var in parts.fused:
        by_level[parts.level[var]].setdefault(var.aval.shape, []).append(var)
    for level, by_shape in enumerate(by_level):
        for outvars in by_shape.values():
            eqns = _before(parts, outvars, known)
            found.append(Group(level, closed(eqns, outvars, known)))
        known = known.union(*by_shape.values())
    return found


def is_one_kernel(name: str, inner: SimpleNamespace) -> bool:
    """Whether an elementwise jaxpr is within the limits of one kernel."""
    if len(inner.outvars) > MAX_OUTPUTS:
        return False
    demands = [scalars.whole(inner, var) for var in inner.outvars]
    return len(scalars.plan(name, inner, (), demands, {}).leaves) <= MAX_OPERANDS


def _within_limits(name: str, group: Group) -> Iterator[Group]:
    """Divides a group among kernels. XLA computes a value that reads more than a kernel can."""
    inner = group.inner
    # An array counts once for each set of dimensions that it is read along.
    most = len(inner.invars) << inner.outvars[0].aval.ndim
    is_small = most <= MAX_OPERANDS and len(inner.outvars) <= MAX_OUTPUTS
    if is_small or is_one_kernel(name, inner):
        yield group
    elif len(inner.outvars) > 1:
        for half in _halves(inner):
            yield from _within_limits(name, Group(group.level, closed(inner.eqns, half, set())))


def _halves(inner: SimpleNamespace) -> tuple[list[Any], list[Any]]:
    """Divides the results of a jaxpr such that those that read the same inputs are together."""
    reads = {var: frozenset([var]) for var in inner.invars}
    for eqn in inner.eqns:
        read = [reads[x] for x in eqn.invars if not _compat.is_literal(x)]
        reads.update(dict.fromkeys(eqn.outvars, frozenset[Any]().union(*read)))
    left = dict.fromkeys(inner.outvars)
    first: list[Any] = []
    known: frozenset[Any] = frozenset()
    while len(first) < len(inner.outvars) // 2:
        first.append(min(left, key=lambda var: len(reads[var] - known)))
        del left[first[-1]]
        known |= reads[first[-1]]
    return first, [*left]


def _before(parts: Parts, outvars: Sequence[Any], known: set[Any]) -> list[Any]:
    """The elementwise equations that `outvars` depend on, back to known values."""
    pending, found = [*outvars], set[int]()
    while pending:
        place = parts.places.get(var := pending.pop())
        if place is not None and place not in found and var not in known:
            found.add(place)
            pending += [x for x in parts.jaxpr.eqns[place].invars if not _compat.is_literal(x)]
    return [parts.jaxpr.eqns[k] for k in sorted(found)]


def evaluate(
    parts: Parts,
    groups: Sequence[Group],
    consts: Sequence[Any],
    args: Sequence[Any],
    kernel: Kernel,
    bind: Callable[[Any, Sequence[Any]], Any] = _compat.bind_equation,
) -> list[Any]:
    """Computes the results by one kernel for each group, and the rest by XLA."""
    jaxpr = parts.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    needed = needed_by_xla(parts, groups)

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    def run(eqn: Any) -> None:
        for var, value in zip(eqn.outvars, bind(eqn, [*map(read, eqn.invars)]), strict=True):
            env.setdefault(var, value)

    for level, here in enumerate(parts.by_level):
        for k in here:
            if not parts.elementwise[k]:
                run(jaxpr.eqns[k])
        for group in groups:
            if group.level == level:
                results = kernel(group.inner, (), [*map(read, group.inner.invars)])
                env.update(zip(group.inner.outvars, results, strict=True))
        for k in here:
            eqn = jaxpr.eqns[k]
            if parts.elementwise[k] and any(v in needed and v not in env for v in eqn.outvars):
                run(eqn)
    return outputs(jaxpr, env)


def outputs(jaxpr: Any, env: Mapping[Any, Any]) -> list[Any]:
    """The results of a jaxpr, given the values of its variables."""
    return [
        jnp.asarray(v.val, v.aval.dtype) if _compat.is_literal(v) else env[v] for v in jaxpr.outvars
    ]


def closed(eqns: Sequence[Any], outvars: Sequence[Any], known: set[Any]) -> SimpleNamespace:
    """A jaxpr of the equations that `outvars` need; its inputs are the values that these read."""
    needed = dict.fromkeys(outvars)
    kept = []
    for eqn in reversed(eqns):
        if any(var in needed and var not in known for var in eqn.outvars):
            kept.append(eqn)
            for var in eqn.outvars:
                needed.pop(var, None)
            needed.update(dict.fromkeys(x for x in eqn.invars if not _compat.is_literal(x)))
    return SimpleNamespace(invars=[*needed], constvars=[], eqns=kept[::-1], outvars=[*outvars])


def needed_by_xla(parts: Parts, groups: Sequence[Group]) -> set[Any]:
    """The values that XLA computes or reads if kernels compute these groups."""
    fused = {v for group in groups for v in group.inner.outvars}
    needed = {v for v in parts.jaxpr.outvars if not _compat.is_literal(v)}
    for k, eqn in reversed([*enumerate(parts.jaxpr.eqns)]):
        if not parts.elementwise[k] or any(
            var in needed and var not in fused for var in eqn.outvars
        ):
            needed.update(x for x in eqn.invars if not _compat.is_literal(x))
    return needed
