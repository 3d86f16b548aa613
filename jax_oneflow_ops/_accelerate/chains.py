"""Chains of elementwise operations that `accelerate(fuse=True)` computes in one kernel each.

Programs are rewritten when they are lowered, after differentiation and batching. The body of a
function is divided as for ``fuse(partial=True)``. A possible kernel is used if `_policy` finds it
worthwhile and if it does not prevent a fusion that costs XLA nothing:

- On GPUs, no operation that XLA could fuse with the chain reads the values that the kernel
  computes, such as the sum for the gradient of a bias, or a norm. XLA would compute both in one
  pass over memory.
- The operands of the kernel are in memory in any case. They are not slices, transposes or random
  numbers, which XLA would compute where they are read, and not values of rows, as in norms and
  softmax.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat, _fuse, _native, _policy
from jax_oneflow_ops._accelerate import common
from jax_oneflow_ops._codegen import parts
from jax_oneflow_ops._codegen.traced import FusionError

_BODIES = re.compile(r"^(scan|while|cond|remat2?|checkpoint|p?jit)$")
_PRODUCTS = ("dot_general", "conv_general_dilated")
_RANDOM = re.compile(r"^(random_|threefry|rng_)")
_OF_ROWS = re.compile(r"^(reduce_|arg(max|min)$|cum)")
# Primitives by which users prevent fusion or say where values are.
_KEPT = frozenset({"optimization_barrier", "sharding_constraint", "layout_constraint", "reshard"})

IsOpen = Callable[[Any], bool]
Chosen = tuple[parts.Group, str]  # with the reason


def rewritten(name: str, jaxpr: Any, platform: str, is_open: IsOpen) -> Any:
    """A body with kernels for its worthwhile chains; `jaxpr` itself if it has none."""
    found = _divided(name, jaxpr, is_open)
    if found is None:
        return jaxpr
    divided, consts, bodies = found
    chosen = [group for group, _ in _chosen(name, divided, platform)]
    others = {}
    for eqn in bodies:
        params = {k: _of_param(name, v, platform, is_open) for k, v in eqn.params.items()}
        if any(params[k] is not v for k, v in eqn.params.items()):
            others[id(eqn)] = eqn.replace(params=params)
    if not chosen and not others:
        return jaxpr
    implementation = _native.choose_implementation("accelerate", None)
    one_kernel = functools.partial(_fuse.one_kernel, name, exact={}, implementation=implementation)

    def kernel(inner: Any, consts: Any, args: Any) -> list[Any]:
        with _compat.at_line_of(inner.eqns[-1]):
            return one_kernel(inner, consts, args)

    def bind(eqn: Any, args: Any) -> Any:
        return _compat.bind_equation(others.get(id(eqn), eqn), args)

    def run(*args: Any) -> list[Any]:
        return parts.evaluate(divided, chosen, consts, args, kernel, bind)

    with _compat.in_scope(_compat.OFF):  # the calls of kernels are not rewritten again
        new = jax.make_jaxpr(run)(*(var.aval for var in divided.jaxpr.invars))
    return _compat.in_place_of(jaxpr, new)


def _of_param(name: str, value: Any, platform: str, is_open: IsOpen) -> Any:
    if isinstance(value, tuple) and any(map(_policy.is_jaxpr, value)):
        new = tuple(_of_param(name, x, platform, is_open) for x in value)
        return new if any(x is not y for x, y in zip(new, value, strict=True)) else value
    return rewritten(name, value, platform, is_open) if _policy.is_jaxpr(value) else value


def find(name: str, jaxpr: Any, platform: str, is_open: IsOpen) -> Iterator[Chosen]:
    """Yields the worthwhile chains of a traced program and of its bodies, with the reasons."""
    found = _divided(name, jaxpr, is_open)
    if found is not None:
        divided, _, bodies = found
        yield from _chosen(name, divided, platform)
        for eqn in bodies:
            for inner in jax.tree.leaves(eqn.params, is_leaf=_policy.is_jaxpr):
                if _policy.is_jaxpr(inner):
                    yield from find(name, inner, platform, is_open)


def _divided(name: str, jaxpr: Any, is_open: IsOpen) -> tuple[parts.Parts, Any, list[Any]] | None:
    """The parts of a body, its constants, and its equations that contain other bodies."""
    flat, consts = _compat.jaxpr_and_consts(jaxpr)
    avals = [var.aval for var in flat.invars]
    if flat.effects or not _may_gain(flat) or not all(map(_has_plain_dtype, avals)):
        return None
    body = parts.flattened(flat, consts, _compat.is_plain_call)
    flat, consts = _compat.jaxpr_and_consts(body)

    def is_part(eqn: Any) -> bool:
        primitive = eqn.primitive.name
        is_body = _compat.called_jaxpr(eqn) is not None or _BODIES.match(primitive) is not None
        return is_open(eqn) and not is_body and primitive not in _KEPT

    bodies = [eqn for eqn in flat.eqns if _BODIES.match(eqn.primitive.name) and is_open(eqn)]
    return parts.divide(name, flat, is_part), consts, bodies


def _has_plain_dtype(aval: Any) -> bool:
    """Whether a value is an array whose dtype does not change if it is traced here."""
    if not hasattr(aval, "dtype"):
        return False
    is_extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return is_extended or jax.dtypes.canonicalize_dtype(aval.dtype) == aval.dtype


def _may_gain(jaxpr: Any) -> bool:
    """A quick check whether a result is large enough to be that of a worthwhile chain."""
    least = min(one.least_bytes for one in _policy.CHAINS) / 8  # of all bytes that a chain moves
    for eqn in jaxpr.eqns:
        if any(_is_narrow(v.aval) and _policy.nbytes(v.aval) >= least for v in eqn.outvars):
            return True
        for inner in jax.tree.leaves(eqn.params, is_leaf=_policy.is_jaxpr):
            if _policy.is_jaxpr(inner) and _may_gain(_compat.jaxpr_and_consts(inner)[0]):
                return True
    return False


def _is_narrow(aval: Any) -> bool:
    return str(getattr(aval, "dtype", None)) in ("bfloat16", "float16")


def _chosen(name: str, divided: parts.Parts, platform: str) -> list[Chosen]:
    made_by = {var: eqn for eqn in divided.jaxpr.eqns for var in eqn.outvars}
    chosen: list[Chosen] = []
    for group in parts.groups(divided):
        for one in _apart(group):
            chain = _chain(one, divided, made_by)
            reason = chain and _policy.why_worthwhile(chain, platform)
            if reason and _is_one_kernel(name, one.inner):
                chosen.append((one, reason))
    # A chain that is left to XLA may read what another chain computes.
    while platform in _policy.JOINS_RESULTS:
        groups = [group for group, _ in chosen]
        read = _read_by_xla(divided, groups)
        kept = [(group, why) for group, why in chosen if read.isdisjoint(_values(group, divided))]
        if len(kept) == len(chosen):
            break
        chosen = kept
    return chosen


def _apart(group: parts.Group) -> list[parts.Group]:
    """Splits the 16-bit results of a group into chains that share no operand of their size."""
    found: list[tuple[set[Any], list[Any]]] = []
    for var in group.inner.outvars:
        if not _is_narrow(var.aval):
            continue
        inner = parts.closed(group.inner.eqns, [var], set())
        reads, outs = {x for x in inner.invars if x.aval.size == var.aval.size}, [var]
        for other in [one for one in found if one[0] & reads]:
            found.remove(other)
            reads, outs = reads | other[0], [*other[1], *outs]
        found.append((reads, outs))
    return [
        parts.Group(group.level, parts.closed(group.inner.eqns, outs, set())) for _, outs in found
    ]


def _chain(
    group: parts.Group, divided: parts.Parts, made_by: dict[Any, Any]
) -> _policy.Chain | None:
    """The properties of a chain by which `_policy` decides; None if XLA has to compute it."""
    inner = group.inner
    result = inner.outvars[0].aval
    arrays = [atom for atom in inner.invars if atom.aval.size == result.size]
    makers = {atom: _maker(atom, divided, made_by) for atom in inner.invars}
    if any(_OF_ROWS.match(_name(makers[x])) for x in inner.invars if x.aval.size > 1):
        return None
    if any(x.aval.dtype.itemsize > 2 or _is_in_place(makers[x], divided) for x in arrays):
        return None
    return _policy.Chain(
        dtype=str(result.dtype),
        arrays=len(arrays),
        results=len(inner.outvars),
        bytes=_policy.nbytes(*(x.aval for x in (*inner.invars, *inner.outvars))),
        size=result.size,
        has_function=any(eqn.primitive.name in _policy.FUNCTIONS for eqn in inner.eqns),
        after_product=len(arrays) == 1 and _name(makers[arrays[0]]) in _PRODUCTS,
    )


def _is_one_kernel(name: str, inner: Any) -> bool:
    try:
        return parts.is_one_kernel(name, inner)
    except FusionError:
        return False


def _name(eqn: Any) -> str:
    return "" if eqn is None else str(eqn.primitive.name)


def _maker(atom: Any, divided: parts.Parts, made_by: dict[Any, Any]) -> Any:
    """The equation that computes an array; None if that is an argument or in memory anyway."""
    while atom not in divided.fused and (eqn := made_by.get(atom)) is not None:
        if eqn.primitive.name != "reshape":  # moves nothing
            return eqn
        (atom,) = eqn.invars
    return None


def _is_in_place(eqn: Any, divided: parts.Parts) -> bool:
    """Whether XLA computes the results of an operation where they are read."""
    if eqn is None:
        return False
    is_random = _RANDOM.match(eqn.primitive.name) is not None
    return is_random or parts.reads_in_place(eqn) or eqn.outvars[0] in divided.places


def _values(group: parts.Group, divided: parts.Parts) -> set[Any]:
    """The arrays of a chain's size that it computes and that no lower level computes."""
    size = group.inner.outvars[0].aval.size
    every = (var for eqn in group.inner.eqns for var in eqn.outvars)
    return {v for v in every if divided.level[v] == group.level and v.aval.size == size}


def _read_by_xla(divided: parts.Parts, groups: Sequence[parts.Group]) -> set[Any]:
    """The values that are read by operations which XLA could fuse with their producers."""
    needed = parts.needed_by_xla(divided, groups)
    fused = {var for group in groups for var in group.inner.outvars}
    read = set[Any]()
    for k, eqn in enumerate(divided.jaxpr.eqns):
        if divided.elementwise[k]:
            is_together = any(var in needed and var not in fused for var in eqn.outvars)
        else:
            is_together = parts.reads_in_place(eqn)
        if is_together:
            read.update(x for x in eqn.invars if not _compat.is_literal(x))
    return read


# ---- programs ----

_STATIC = object()  # in place of an argument that is a part of the program


def program(fun: Any) -> Callable[..., Any]:
    """Makes `fun` a call in a `jax.jit` program, whose lowering rule can rewrite its body.

    As for `jax.jit`, arguments are arrays or numbers. Static arguments of a function that
    `jax.jit` made, and other objects, are parts of the program.
    """
    made: dict[Any, Callable[..., Any]] = {}
    is_jitted = common.is_jitted(fun)

    def made_for(
        args: Any, kwargs: Any, taken_types: tuple[type[Any], ...] = _compat.OPERAND_TYPES
    ) -> tuple[Callable[..., Any], Any, Any]:
        """The program for arguments like these, and the arguments that it takes."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        # While jax traces a program around this call, numbers are static: others are tracers.
        are_static = is_jitted or not _compat.runs_now()
        numbers = () if are_static else (bool, int, float, complex)
        is_taken = [isinstance(x, (*taken_types, *numbers)) for x in leaves]
        if is_jitted and not all(is_taken):  # arguments that are not static are arrays
            static = _compat.are_static(fun, args, kwargs)
            is_taken = [a or not b for a, b in zip(is_taken, static, strict=True)]
        rest = tuple(None if yes else x for yes, x in zip(is_taken, leaves, strict=True))
        taken = [x if yes else _STATIC for yes, x in zip(is_taken, leaves, strict=True)]
        all_args, all_kwargs = jax.tree.unflatten(tree, taken)
        # Like jax.jit, without arguments that are static as a whole.
        taken_args = tuple(_without_static(x) for x in all_args if x is not _STATIC)
        named = {name: x for name, x in all_kwargs.items() if x is not _STATIC}
        taken_kwargs = _without_static(named)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = iter(jax.tree.leaves((args, kwargs)))
            every = [next(found) if yes else x for yes, x in zip(is_taken, rest, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, every)
            return fun(*own_args, **own_kwargs)

        call.__name__ = getattr(fun, "__name__", type(fun).__name__)
        inner = jax.jit(call, inline=False)

        def new() -> Callable[..., Any]:
            how = _donated(call, taken_args, taken_kwargs) if is_jitted else {}
            own = functools.wraps(fun, updated=())(lambda *xs, **named: inner(*xs, **named))
            return jax.jit(own, **how)

        if not _compat.runs_now():  # a function may close over values that are traced around it
            return inner, taken_args, taken_kwargs
        key = tree, tuple(is_taken), tuple((type(x), x) for x in rest)
        try:
            hash(key)
        except TypeError as error:
            kinds = ", ".join(sorted({type(x).__name__ for x in rest if x is not None}))
            raise TypeError(
                "accelerate: with fuse=True, arguments that are not arrays must be hashable, got "
                f"{kinds}; capture them in a closure, or call the function inside jax.jit"
            ) from error
        if key not in made:
            made[key] = new()
        return made[key], taken_args, taken_kwargs

    @functools.wraps(fun, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        own, taken_args, taken_kwargs = made_for(args, kwargs)
        return own(*taken_args, **taken_kwargs)

    if is_jitted:
        for name in ("lower", "trace", "eval_shape"):

            def method(*args: Any, name: str = name, **kwargs: Any) -> Any:
                types = (*_compat.OPERAND_TYPES, jax.ShapeDtypeStruct)
                own, taken_args, taken_kwargs = made_for(args, kwargs, types)
                return getattr(own, name)(*taken_args, **taken_kwargs)

            setattr(run, name, method)

        def clear_cache() -> None:
            made.clear()
            if hasattr(fun, "clear_cache"):
                fun.clear_cache()

        jitted: Any = run
        jitted.clear_cache = clear_cache
    return run


def _without_static(tree: Any) -> Any:
    return jax.tree.map(lambda x: None if x is _STATIC else x, tree)


def _donated(call: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The options by which a function donates what the `jax.jit` function that it calls donates."""
    leaves, tree = jax.tree.flatten((args, kwargs))

    def flat(*leaves: Any) -> Any:
        own_args, own_kwargs = jax.tree.unflatten(tree, leaves)
        return call(*own_args, **own_kwargs)

    jaxpr, _ = _compat.jaxpr_and_consts(jax.make_jaxpr(flat)(*leaves))
    found = {x for eqn in jaxpr.eqns for x in _compat.donated_operands(eqn)}
    flags = jax.tree.unflatten(tree, [var in found for var in jaxpr.invars])
    return {
        "donate_argnums": [k for k, x in enumerate(flags[0]) if any(jax.tree.leaves(x))],
        "donate_argnames": [k for k, x in flags[1].items() if any(jax.tree.leaves(x))],
    }
