"""Binary searches, which `accelerate` finds in programs as the loops that `jnp.searchsorted` makes.

The body of such a loop is one step of a search. A loop is taken for a search if its body equals
that of jnp's own search, if it starts with the range of all edges, and if it has enough steps. For
the comparison, jnp's search is lowered once for each dtype. Loops that only look similar are left
unchanged.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_oneflow_ops import _compat, _primitive
from jax_oneflow_ops._accelerate import common

_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "uint64")
_NARROW = ("int8", "int16", "uint8", "uint16")  # searched as int32
_MOST_STEPS = 31  # as positions are int32
_REFERENCE = "search "  # the scope in which jnp's own search is lowered

_LEAST_QUERIES = {"cpu": 2**16, "cuda": 2**18}
_FEWEST_EDGES = 8
_MOST_EDGES = {"cpu": 4096, "cuda": 2**31}  # CPU kernels make sort keys for up to 4096 edges
_MOST_GATHERED = 2**16  # the most edges, if they may be sharded
MEASURED = "searches were faster than XLA's in all measured calls of such sizes"

_bodies: dict[str, str] = {}  # of reference loops, by scope


def keep_reference(ctx: Any, params: Any) -> bool:
    """Whether a loop is a reference to compare others with. If so, its body is recorded."""
    scope = _compat.scope_of(ctx) or ""
    if scope.startswith(_REFERENCE):
        _bodies[scope] = _form(params["jaxpr"])
        return True
    return False


def _is_identity(eqn: Any) -> bool:
    """Whether an equation changes no values, but for example only their sharding."""
    same = [v.aval.shape for v in eqn.outvars] == [x.aval.shape for x in eqn.invars]
    names = ("reshard", "mesh_cast", "pvary", "pcast", "sharding_constraint", "broadcast_in_dim")
    return same and eqn.primitive.name in names


def _form(jaxpr: Any) -> str:
    """The text of a program with variables numbered in order and without shardings."""
    flat, _ = _compat.jaxpr_and_consts(jaxpr)
    numbers = itertools.count()
    names = {v: f"v{next(numbers)}" for v in (*flat.constvars, *flat.invars)}

    def name(atom: Any) -> str:
        return f"{atom.val!r}" if _compat.is_literal(atom) else names[atom]

    lines = [f"{[*map(_type, flat.invars)]}"]
    for eqn in flat.eqns:
        operands = [*map(name, eqn.invars)]
        if _is_identity(eqn):
            names[eqn.outvars[0]] = operands[0]
            continue
        names |= {v: f"v{next(numbers)}" for v in eqn.outvars}
        called, consts = _compat.called_jaxpr(eqn) or (None, ())
        if called is not None and not consts:
            what = f"call {_form(called)}"
        else:
            of = sorted((k, f"{v!r}") for k, v in eqn.params.items() if "sharding" not in k)
            what = f"{eqn.primitive.name} {of}"
        lines.append(f"{what} {operands} {[*map(_type, eqn.outvars)]}")
    return "\n".join([*lines, f"{[*map(name, flat.outvars)]}"])


def _type(variable: Any) -> tuple[Any, ...]:
    return (*variable.aval.shape, variable.aval.dtype.name)


_SIZE, _SIZES = 911, range(7001, 7999, 12)  # of edges and queries: no other number equals these


@functools.lru_cache(maxsize=256)
def _reference(right: bool, dtype: Any, rank: int, x64: bool) -> str:
    """The body of the loop of jnp's search, for arrays of these sizes."""
    scope = f"{_REFERENCE}{right} {dtype} {rank} {x64}"
    side = "right" if right else "left"

    def search(edges: Any, queries: Any) -> Any:
        return jnp.searchsorted(edges, queries, side=side)

    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((_SIZE,), (*_SIZES[:rank],))]
    with _compat.without_mesh(), _compat.in_scope(scope):
        jax.jit(search).trace(*arrays).lower(lowering_platforms=("cpu",))
    return _bodies.get(scope, "")


@dataclasses.dataclass(frozen=True)
class Search:
    """A loop that is a search."""

    place: int  # which of the first two operands has the edges; the other one has the queries
    right: bool  # whether positions are those after equal edges
    size: int  # number of edges
    count: int  # number of queries

    def why_not(self, platform: str, is_for_shards: bool) -> str | None:
        """Why the search is left to XLA, which was as fast when measured or may be faster, or None.

        Sizes are those of one device, unless `is_for_shards` is set.
        """
        if is_for_shards:
            return "so many edges may be sharded" if self.size > _MOST_GATHERED else None
        if self.count < _LEAST_QUERIES[platform]:
            return "XLA was measured to be as fast for so few queries"
        if not _FEWEST_EDGES <= self.size <= _MOST_EDGES[platform]:
            return "XLA was measured to be as fast for so few, or on CPUs so many, edges"
        return None


def may_be_search(ctx: Any, operands: Any, params: Any) -> bool:
    """Whether a loop may be a search that jnp makes, perhaps of a batch.

    It carries the ends of ranges, two integers which are constants at first, and gathers from a
    table once. Middles are unsigned: XLA compiles unrolled steps slowly if they divide signed
    integers, or if the first ends are arrays.
    """
    if len(ctx.avals_out) != 2 or None in map(_compat.fill_of, operands[-2:]):
        return False
    body, _ = _compat.jaxpr_and_consts(params["jaxpr"])
    ends = [*body.outvars, *ctx.avals_in[-2:], *ctx.avals_out]
    types = [getattr(x, "aval", x) for x in ends]
    # A value that is not carried has an additional dimension, for the steps.
    if any((x.shape, x.dtype) != (types[0].shape, types[0].dtype) for x in types):
        return False
    equations = [e for e, *_ in common.equations(body)]
    divided = [e.outvars[0].aval.dtype for e in equations if e.primitive.name == "div"]
    is_signed = any(jnp.issubdtype(dtype, jnp.signedinteger) for dtype in divided)
    if is_signed or not jnp.issubdtype(types[0].dtype, jnp.integer):
        return False
    done = collections.Counter(e.primitive.name for e in equations)
    return done["gather"] == 1 and not done["while"] + done["scan"]


def find(ctx: Any, operands: Sequence[Any], params: Any) -> Search | None:
    """The search that a loop performs, or None if it is not a search."""
    body, consts = _compat.jaxpr_and_consts(params["jaxpr"])
    gathers = [eqn for eqn in body.eqns if eqn.primitive.name == "gather"]
    if not _compat.has_known_sizes(ctx) or len(operands) != 4 or consts or len(gathers) != 1:
        return None
    moved = {e.outvars[0]: e.invars[0] for e in body.eqns if _is_identity(e)}
    table = moved.get(gathers[0].invars[0], gathers[0].invars[0])
    if table not in body.invars[:2]:
        return None
    place = body.invars.index(table)
    edges, queries = ctx.avals_in[place], ctx.avals_in[1 - place]
    if edges.ndim != 1 or edges.dtype.name not in _DTYPES + _NARROW or queries.dtype != edges.dtype:
        return None
    (size,) = edges.shape
    if not 1 <= size.bit_length() <= params["length"] <= _MOST_STEPS:
        return None
    if [*map(_compat.fill_of, operands[2:])] != ["0", str(size)]:
        return None
    sizes = zip((_SIZE, *_SIZES), (size, *queries.shape), strict=False)
    sized = {str(reference): str(n) for reference, n in sizes}
    form, x64 = _form(params["jaxpr"]), jax.dtypes.canonicalize_dtype("i8") == "i8"
    for right in (False, True):
        reference = _reference(right, edges.dtype, queries.ndim, x64)
        if re.sub(r"\d+", lambda found: sized.get(found[0], found[0]), reference) == form:
            return Search(place, right, size, queries.size)
    return None


def ends(*operands: jax.Array, search: Search) -> list[jax.Array]:
    """The low and high ends that the loop arrives at, of which jnp returns the high one."""
    edges, queries, dtype = operands[search.place], operands[1 - search.place], operands[3].dtype
    if edges.dtype.name in _NARROW:
        edges, queries = edges.astype(jnp.int32), queries.astype(jnp.int32)
    how = {"right": search.right, "implementation": "native"}
    high = _primitive.bind(search_p, edges, queries, **how).astype(dtype)
    return [jnp.maximum(high, 1) - jnp.ones((), dtype), high]


def _abstract_eval(edges: Any, queries: Any, *, right: bool) -> Any:
    return queries.update(dtype=jnp.dtype(jnp.int32), weak_type=False)


def _plain(edges: jax.Array, queries: jax.Array, *, right: bool) -> jax.Array:
    side = "right" if right else "left"
    found = jnp.searchsorted(edges, queries, side=side, method="scan_unrolled")
    return found.astype(jnp.int32)


def _native(platform: str, edges: jax.Array, queries: jax.Array, *, right: bool) -> jax.Array:
    of = jax.ShapeDtypeStruct(queries.shape, jnp.int32)
    result: jax.Array = jax.ffi.ffi_call("jof_searchsorted", of)(edges, queries, right=right)
    return result


def _sharding_rule(edges: Any, queries: Any, *, right: bool) -> _primitive.ShardingRule:
    dims = [f"d{i}" for i in range(len(queries.shape))]
    return _primitive.ShardingRule([["edges"], dims], [dims], replicated=frozenset({"edges"}))


def _batch(primitive: core.Primitive, args: Any, dims: Any, **params: Any) -> Any:
    if dims[0] is None:
        return primitive.bind(*args, **params), dims[1]
    return jax.vmap(functools.partial(_plain, right=params["right"]), dims)(*args), 0


search_p = _primitive.define(
    "jof_searchsorted",
    function="accelerate",
    abstract_eval=_abstract_eval,
    reference=_plain,
    native=_native,
    sharding_rule=_sharding_rule,
    batch=_batch,
)
