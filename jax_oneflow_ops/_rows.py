"""The primitives of functions of rows and their rules.

A function f has three primitives. f itself returns its results and statistics of each row. The
statistics have no tangents, as they are functions of the operands. f_vjp takes the residuals
(operands, results and statistics) and the results' cotangents; it is one native call. f_jvp takes
the residuals and the operands' tangents. It is computed in jnp, and is the transpose of f_vjp.

Unless a call is differentiated, statistics are not results (`keeps` is False): for short rows they
would be a large part of the bytes written.

An operand is an array, which has one axis along which rows extend; one value per row, or several in
a last axis; or a row vector.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _policy, _primitive, _reference
from jax_oneflow_ops._primitive import bind

ARRAY, ROW, STATS, VECTOR = "array", "row", "stats", "vector"
Kinds = tuple[list[str], list[str]]
Function = Callable[..., Any]


# ---- the types of results ----


def _without(aval: Any, axis: int, *last: int) -> Any:
    """The type of an array with one value per row of `aval`, or with `last` values."""
    shape = (*aval.shape[:axis], *aval.shape[axis + 1 :], *last)
    spec = [*aval.sharding.spec]
    return _compat.with_spec(aval, shape, [*spec[:axis], *spec[axis + 1 :], *[None] * len(last)])


def _with_rows_whole(aval: Any, axis: int) -> Any:
    """The type of `aval`, but not sharded along its rows."""
    spec = [*aval.sharding.spec]
    spec[axis] = None
    return _compat.with_spec(aval, aval.shape, spec)


def joined(function: str, axes: Sequence[int], **arrays: jax.Array) -> list[jax.Array]:
    """Arrays whose types are sharded alike: as jax joins the shardings of the operands of a sum.

    The first has `axes`, along which rows extend; others may have one value per row.
    """
    first = jax.typeof(next(iter(arrays.values())))

    def of_array(aval: Any) -> Any:
        entries = iter(aval.sharding.spec)
        is_row = aval.ndim < first.ndim
        spec = [None if is_row and a in axes else next(entries) for a in range(first.ndim)]
        return _compat.with_spec(aval, first.shape, spec)

    types = [of_array(jax.typeof(x)) for x in arrays.values()]
    if len({aval.sharding.spec for aval in types}) == 1:
        return [*arrays.values()]
    try:
        result = _compat.elementwise_aval(*types)
    except _compat.ShardingTypeError as error:
        raise _compat.ShardingTypeError(
            f"{function}: the shardings of {' and '.join(arrays)} do not fit together; apply "
            f"jax.sharding.reshard to one of them: {error}"
        ) from None
    of_rows = [e for a, e in enumerate(result.sharding.spec) if a not in axes]

    def resharded(x: jax.Array) -> jax.Array:
        spec = of_rows if x.ndim < first.ndim else result.sharding.spec
        return _compat.with_sharding_of(x, _compat.with_spec(result, x.shape, spec))

    return [*map(resharded, arrays.values())]


# ---- what all of them share ----


def _rule(kinds: Kinds, rank: int, axis: int, *, in_parts: bool = False) -> _primitive.ShardingRule:
    """All dimensions may be sharded, except the one along which rows extend.

    Each device needs whole rows, unless rows can be computed in parts.
    """
    dims = [f"d{i}" for i in range(rank)]
    dims[axis] = "n"
    rows = [d for d in dims if d != "n"]
    names = {ARRAY: dims, ROW: rows, STATS: [*rows, "k"], VECTOR: ["n"]}
    operands, results = ([names[kind] for kind in side] for side in kinds)
    if in_parts:
        return _primitive.ShardingRule(operands, results, frozenset("k"), rows="n")
    return _primitive.ShardingRule(operands, results, frozenset("nk"))


def _batched(
    args: Sequence[Any], dims: Sequence[int | None], kinds: Kinds, axis: int
) -> tuple[list[Any], int, list[int | None]]:
    """Operands with aligned batch axes, the axis of rows, and the batch axes of the results.

    The batch axis is moved to where the first operand that has one has it, or to the front if that
    operand is not an array. Row vectors have no batch axis.
    """
    first = next(i for i, d in enumerate(dims) if d is not None)
    at = dims[first] or 0
    if kinds[0][first] != ARRAY:
        at = 0
    axis += at <= axis
    place = {ARRAY: at, ROW: at - (at > axis), STATS: at - (at > axis)}
    size = args[first].shape[dims[first]]

    def with_batch(x: Any, d: int | None, kind: str) -> Any:
        if kind == VECTOR:
            return x
        if d is not None:
            return x if d == place[kind] else jnp.moveaxis(x, d, place[kind])
        shape = (*x.shape[: place[kind]], size, *x.shape[place[kind] :])
        return jnp.broadcast_to(jnp.expand_dims(x, place[kind]), shape)

    operands = [with_batch(*one) for one in zip(args, dims, kinds[0], strict=True)]
    return operands, axis, [place.get(kind) for kind in kinds[1]]


def _batch(
    kinds: Kinds, primitive: core.Primitive, args: Any, dims: Any, *, axis: int, **params: Any
) -> tuple[Any, Any]:
    xs, axis, out = _batched(args, dims, kinds, axis)
    many = primitive.multiple_results
    return bind(primitive, *xs, axis=axis, **params), out if many else out[0]


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


def linear(
    primitive: core.Primitive,
    reference: Function,
    first: Callable[..., int],
    statistics: Sequence[int],
    transpose: Function,
) -> None:
    """Sets the rules of a primitive that is linear in the operands from `first` on.

    Args:
      primitive: f_vjp or f_jvp.
      reference: the same in jnp, which reads no statistics.
      first: `(**params) -> int`: the number of the first linear operand.
      statistics: the numbers of the operands that are statistics.
      transpose: `(cts, *args, **params) -> list`.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        results = bind(primitive, *primals, **params)
        begin = first(**params)
        terms = []
        if not all(map(_is_zero, tangents[begin:])):
            again = (*primals[:begin], *map(ad.instantiate_zeros, tangents[begin:]))
            terms.append(bind(primitive, *again, **params))
        live = [
            i
            for i, t in enumerate(tangents[:begin])
            if not _is_zero(t)
            and i not in statistics
            and jnp.issubdtype(primals[i].dtype, jnp.inexact)
        ]
        if live:
            options = {k: v for k, v in params.items() if k != "implementation"}
            f = _primitive.of_some(functools.partial(reference, **options), primals, live)
            at, along = ([xs[i] for i in live] for xs in (primals, tangents))
            terms.append(jax.jvp(f, at, along)[1])
        if not terms:
            return results, jax.tree.map(lambda x: ad.Zero(jax.typeof(x)), results)
        return results, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), terms)

    _primitive.define_derivatives(primitive, jvp=jvp, transpose=transpose)


def _call(
    group: str, target: str, passes: int, x: Any, axis: int, function: str = ""
) -> _policy.Call:
    """A call that reads or writes `passes` arrays like `x`. Similar functions share a group."""
    direction = "gradient" if target.endswith("_vjp") else "forward"
    n = x.shape[axis]
    nbytes = n * x.dtype.itemsize
    # XLA loads 16-bit rows of odd lengths one element at a time.
    alignment = "whole packs" if nbytes % 16 == 0 else "edges" if nbytes % 4 == 0 else "odd edges"
    inner = math.prod(x.shape[axis + 1 :])
    if inner > 1:
        alignment = "strided"
    kind = ("rows", f"{group} {direction}", alignment, function or group)
    return _policy.Call(kind, passes * _policy.nbytes(x), (n, inner))


def not_linear(*args: Any, **params: Any) -> Any:
    raise NotImplementedError("functions of rows are not linear in their operands")


def transposed_reference(reference: Function) -> Function:
    """The transpose with respect to scale and bias, which only `jax.linear_transpose` needs."""

    def transpose(cts: Any, *args: Any, implementation: Any, **params: Any) -> Any:
        def norm(*args: Any) -> Any:
            return reference(*args, **params)[0]

        return _primitive.transposed_by(norm, ad.instantiate_zeros(cts[0]), args)

    return transpose


def _without_statistics(reference: Function) -> Callable[..., list[jax.Array]]:
    """The reference of a function, whose last result is statistics, with the parameter `keeps`."""

    def results(*args: Any, keeps: bool, **params: Any) -> list[jax.Array]:
        *results, stats = reference(*args, **params)
        return [*results, *[stats] * keeps]

    return results


def in_jnp(reference: Function) -> Function:
    """The `native` argument of a primitive that has no kernels: the reference."""
    return lambda platform, *args, **params: reference(*args, **params)


def _function_of_softmax(*, log: bool, **_: Any) -> str:
    return "log_softmax" if log else "softmax"


def _absent(result: Any) -> jax.ShapeDtypeStruct:
    """The type of a result that a kernel does not write."""
    return jax.ShapeDtypeStruct((0,) * len(result.shape), result.dtype)


# ---- slices of rows ----
#
# On GPUs, few very long rows are split into slices, so that all multiprocessors have some: see
# rows_split.cuh. A cluster of blocks that holds a row is faster, unless there are very few rows.
_HELD_BYTES, _FEW_BYTES, _FEW_ROWS = 3 << 19, 3 << 18, 4
_SLICE, _MOST_SLICES, _MOST_BLOCKS = 4096, 512, 2112


def parts_of_slices(
    platform: str, x: jax.Array, axis: int, arrays: int
) -> jax.ShapeDtypeStruct | None:
    """The type of the parts of rows in `arrays` arrays like `x`; None if rows are not split."""
    if platform != "cuda" or not all(isinstance(size, int) for size in x.shape):
        return None
    rows, n, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    nbytes = n * x.dtype.itemsize
    is_long = arrays * nbytes > _HELD_BYTES or (rows <= _FEW_ROWS and nbytes >= _FEW_BYTES)
    if inner != 1 or x.dtype == jnp.float64 or not is_long:
        return None
    slices = min(math.ceil(n / _SLICE), _MOST_SLICES, max(1, _MOST_BLOCKS // rows))
    return jax.ShapeDtypeStruct((rows, slices, 2), _reference.row_dtype(x.dtype))


def split(target: str) -> str:
    """The target for slices of rows."""
    return target.replace("jof_", "jof_split_", 1)


# ---- softmax ----


def _define_softmax() -> tuple[core.Primitive, core.Primitive]:
    def define(
        target: str, operands: int, reference: Function, has_kernel: bool = True
    ) -> core.Primitive:
        kinds = [ARRAY] * operands, [ARRAY]

        def native(platform: str, *args: jax.Array, axis: int, **params: Any) -> Any:
            x = args[0]
            if x.size == 0:
                return x
            params["axis"] = np.int64(axis)
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            if parts := parts_of_slices(platform, x, axis, len(args)):
                return jax.ffi.ffi_call(split(target), [like, parts])(*args, **params)[0]
            return jax.ffi.ffi_call(target, like)(*args, **params)

        def call(x: Any, *_: Any, axis: int, **__: Any) -> _policy.Call:
            return _call("softmax", target, 1 + operands, x, axis)

        def gradient(x: Any, *, axis: int, **_: Any) -> _policy.Call:
            return _call("softmax", f"{target}_vjp", 3, x, axis)

        return _primitive.define(
            target,
            function=_function_of_softmax if has_kernel else "log_softmax",
            abstract_eval=lambda x, *_, axis, **__: _with_rows_whole(x, axis),
            reference=reference,
            native=native if has_kernel else in_jnp(reference),
            sharding_rule=lambda x, *_, axis, **__: _rule(kinds, len(x.shape), axis),
            batch=functools.partial(_batch, kinds),
            call=call if has_kernel else None,
            gradient=gradient if operands == 1 else None,
        )

    softmax_p = define("jof_softmax", 1, _reference.softmax)
    vjp_p = define("jof_softmax_vjp", 2, _reference.softmax_vjp)
    jvp_p = define("jof_log_softmax_jvp", 2, _reference.log_softmax_jvp, has_kernel=False)

    def tangent(y: Any, t: Any, *, axis: int, log: bool, **params: Any) -> Any:
        if log:
            return bind(jvp_p, y, t, axis=axis, **params)
        return bind(vjp_p, y, t, axis=axis, log=False, **params)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        params = _policy.with_gradient(params)
        y = bind(softmax_p, *primals, **params)
        return y, tangent(y, tangents[0], **params)

    def vjp_transpose(ct: Any, y: Any, _: Any, **params: Any) -> Any:
        return [None, tangent(y, ct, **params)]

    def jvp_transpose(ct: Any, y: Any, _: Any, **params: Any) -> Any:
        return [None, bind(vjp_p, y, ct, log=True, **params)]

    _primitive.define_derivatives(softmax_p, jvp=jvp, transpose=not_linear)
    linear(vjp_p, _reference.softmax_vjp, lambda **_: 1, (), vjp_transpose)
    linear(jvp_p, _reference.log_softmax_jvp, lambda **_: 1, (), jvp_transpose)
    return softmax_p, vjp_p


softmax_p, softmax_vjp_p = _define_softmax()


# ---- logsumexp, and cross entropy, which is logsumexp minus the element that a label names ----
#
# Rows that are sharded over devices are computed in parts: statistics are combined by two
# all-reduces, and no logits are sent.


def _labels_on_shard(
    labels: Sequence[jax.Array], n: int, shard: _primitive.Shard
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Labels relative to this shard, `n` if outside it; and whether they name an element of x."""
    count = jax.lax.psum(1, shard.rows)
    counted = [jnp.where(label < 0, label + n * count, label) for label in labels]
    local = [label - n * jax.lax.axis_index(shard.rows) for label in counted]
    names_any = [(label >= 0) & (label < n * count) for label in counted]
    return [jnp.where((i >= 0) & (i < n), i, n).astype(jnp.int32) for i in local], names_any


def _logsumexp_on_shard(
    call: Function,
    shard: _primitive.Shard,
    x: jax.Array,
    *labels: jax.Array,
    axis: int,
    keeps: bool,
) -> list[jax.Array]:
    if not shard.rows:
        results: list[jax.Array] = call(x, *labels, axis=axis, keeps=keeps)
        return results
    n = x.shape[axis]
    local, names_any = _labels_on_shard(labels, n, shard)
    _, stats = call(x, *local, axis=axis, keeps=True)
    centre, total = stats[..., 0], 1 / stats[..., 1]
    # If the maximum of a part is infinite, its centre is 0.
    peak = jnp.where(total == 0, -jnp.inf, jnp.where(total == jnp.inf, jnp.inf, centre))
    top = jax.lax.pmax(peak, shard.rows)
    base = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.where(jnp.isinf(peak), total, total * jnp.exp(centre - base))
    of_label = [jnp.expand_dims(jnp.minimum(i, n - 1), axis) for i in local]
    values = [
        jnp.where(i < n, jnp.take_along_axis(x, at, axis).squeeze(axis).astype(total.dtype), 0)
        for i, at in zip(local, of_label, strict=True)
    ]
    total, *values = jax.lax.psum([total, *values], shard.rows)
    result = jnp.log(total) + (0 if values else base)
    for value, is_one in zip(values, names_any, strict=True):
        result -= jnp.where(is_one, value, jnp.nan) - base
    return [result.astype(x.dtype), *[jnp.stack([base, 1 / total], -1)] * keeps]


def _logsumexp_vjp_on_shard(
    call: Function, shard: _primitive.Shard, x: jax.Array, *operands: jax.Array, axis: int
) -> jax.Array:
    *labels, stats, ct = operands
    if shard.rows:
        labels, _ = _labels_on_shard(labels, x.shape[axis], shard)
    result: jax.Array = call(x, *labels, stats, ct, axis=axis)
    return result


def _logsumexp_results(x: jax.Array, axis: int) -> list[jax.ShapeDtypeStruct]:
    """The types of the values and of the statistics of rows."""
    rows = (*x.shape[:axis], *x.shape[axis + 1 :])
    stats = jax.ShapeDtypeStruct((*rows, 2), _reference.row_dtype(x.dtype))
    return [jax.ShapeDtypeStruct(rows, x.dtype), stats]


def _call_logsumexp(
    target: str, results: Sequence[Any], *operands: jax.Array, axis: int, over: int | None = None
) -> list[jax.Array]:
    """Makes the FFI call; result `over` may overwrite the first operand."""
    aliases = {} if over is None else {0: over}
    call = jax.ffi.ffi_call(target, [*results], input_output_aliases=aliases)
    return [*call(*operands, axis=np.int64(axis))]


def _define_logsumexp(name: str, function: str, labels: int) -> core.Primitive:
    """Defines the primitives of a function of x and `labels` labels per row, 0 or 1."""
    target = f"jof_{name}"
    given = [ARRAY, *[ROW] * labels]
    reference = _without_statistics(_reference.logsumexp)

    def define(
        suffix: str,
        kinds: Kinds,
        reference: Function,
        native: Function,
        types: Function,
        on_shard: Function | None = None,
        **more: Any,
    ) -> core.Primitive:
        def kinds_of(keeps: bool = True, **_: Any) -> Kinds:
            return kinds[0], kinds[1] if keeps else kinds[1][:1]

        def batch(primitive: core.Primitive, args: Any, dims: Any, **params: Any) -> Any:
            return _batch(kinds_of(**params), primitive, args, dims, **params)

        return _primitive.define(
            target + suffix,
            function=function,
            abstract_eval=types,
            reference=reference,
            native=native,
            sharding_rule=lambda x, *_, axis, **params: _rule(
                kinds_of(**params), len(x.shape), axis, in_parts=on_shard is not None
            ),
            on_shard=on_shard,
            batch=batch,
            multiple_results=len(kinds[1]) > 1,
            **more,
        )

    def described(suffix: str, passes: int) -> Function:
        """Describes calls to the policy."""

        def call(x: Any, *_: Any, axis: int, **__: Any) -> _policy.Call:
            return _call("logsumexp", target + suffix, passes, x, axis)

        return call

    def native(
        platform: str, x: jax.Array, *labels: jax.Array, axis: int, keeps: bool
    ) -> list[jax.Array]:
        if x.size == 0:
            return reference(x, *labels, axis=axis, keeps=keeps)
        y, stats = _logsumexp_results(x, axis)
        types = y, stats if keeps else _absent(stats)
        if parts := parts_of_slices(platform, x, axis, 1):
            results = _call_logsumexp(split(target), (*types, parts), x, *labels, axis=axis)
        else:
            results = _call_logsumexp(target, types, x, *labels, axis=axis)
        return results[: 1 + keeps]

    def native_vjp(
        platform: str, x: jax.Array, *operands: jax.Array, axis: int, in_place: bool = True
    ) -> list[jax.Array]:
        """The gradient, by default in the logits' buffer: a training step no longer needs them."""
        if x.size == 0:
            return [x]
        over = 0 if in_place else None
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        return _call_logsumexp(f"{target}_vjp", like, x, *operands, axis=axis, over=over)

    def native_with_vjp(
        platform: str, x: jax.Array, *operands: jax.Array, axis: int, in_place: bool
    ) -> list[jax.Array]:
        """The value, the statistics and the gradient."""
        over = 2 if in_place else None
        types = *_logsumexp_results(x, axis), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _call_logsumexp(f"{target}_with_vjp", types, x, *operands, axis=axis, over=over)

    def lower(ctx: Any, *args: Any, platform: str, **params: Any) -> list[Any]:
        """Returns handles, so that `lower_vjp` can put a call for value and gradient there."""
        results: list[Any] = _primitive.lower_native(native, platform)(ctx, *args, **params)
        return _compat.as_handles(results) if _compat.has_known_sizes(ctx) else results

    def lower_vjp(ctx: Any, *args: Any, platform: str, **params: Any) -> list[Any]:
        """Computes value and gradient in one call, if the cotangent does not depend on the value.

        That call reads the logits once. Rows that are split into slices have two calls. The
        gradient of a sum or a mean of losses has such a cotangent. If something else reads the
        logits, the gradient is not written in place: XLA would copy them.
        """
        *operands, stats, ct = args
        value, of_slices = (_compat.call_behind(stats, t) for t in (target, split(target)))
        reader = of_slices if value is None else value
        params["in_place"] = not _compat.has_other_readers(operands[0], reader)
        if value is None or [*value.operands] != operands or not _compat.move_before(value, ct):
            plain: list[Any] = _primitive.lower_native(native_vjp, platform)(ctx, *args, **params)
            return plain
        *of_operands, of_stats, of_ct = ctx.avals_in
        ctx = ctx.replace(
            avals_in=[*of_operands, of_ct], avals_out=[of_ct, of_stats, *ctx.avals_out]
        )
        rule = _primitive.lower_native(native_with_vjp, platform)
        y, kept, dx = rule(ctx, *operands, ct, **params)
        _compat.replace_call(value, [y, kept])
        return [dx]

    def value_types(x: Any, *_: Any, axis: int, keeps: bool) -> Any:
        stats = _without(x, axis, 2).update(dtype=_reference.row_dtype(x.dtype))
        return [_without(x, axis), *[stats] * keeps]

    f_p = define(
        *("", (given, [ROW, STATS]), reference, native, value_types, _logsumexp_on_shard),
        on_one_device=lower,
        call=described("", 1),
        gradient=described("_vjp", 2),
    )
    vjp_p = define(
        "_vjp",
        ([*given, STATS, ROW], [ARRAY]),
        _reference.logsumexp_vjp,
        lambda *args, **params: native_vjp(*args, **params)[0],
        lambda x, *_, axis: x,
        _logsumexp_vjp_on_shard,
        on_one_device=lower_vjp,
        call=described("_vjp", 2),
    )
    jvp_p = define(
        "_jvp",
        ([*given, STATS, ARRAY], [ROW]),
        _reference.logsumexp_jvp,
        in_jnp(_reference.logsumexp_jvp),
        lambda x, *_, axis: _without(x, axis),
    )

    def jvp(primals: Any, tangents: Any, *, keeps: bool, **params: Any) -> Any:
        params = _policy.with_gradient(params)
        y, stats = bind(f_p, *primals, keeps=True, **params)
        t = bind(jvp_p, *primals, stats, ad.instantiate_zeros(tangents[0]), **params)
        return [y, *[stats] * keeps], [t, *[ad.Zero(jax.typeof(stats))] * keeps]

    def transpose_by(other: core.Primitive) -> Function:
        def transpose(ct: Any, *args: Any, **params: Any) -> Any:
            *residuals, _ = args
            return [*[None] * len(residuals), bind(other, *residuals, ct, **params)]

        return transpose

    def first(**_: Any) -> int:
        return 2 + labels

    _primitive.define_derivatives(f_p, jvp=jvp, transpose=not_linear)
    linear(vjp_p, _reference.logsumexp_vjp, first, (1 + labels,), transpose_by(jvp_p))
    linear(jvp_p, _reference.logsumexp_jvp, first, (1 + labels,), transpose_by(vjp_p))
    return f_p


logsumexp_p = _define_logsumexp("logsumexp", "logsumexp", 0)
cross_entropy_p = _define_logsumexp("cross_entropy", "softmax_cross_entropy_with_integer_labels", 1)


# ---- norms ----
#
# The parameter `given` says which of the optional operands are present, in their order.


def _norm_kinds(given: Sequence[bool], keeps: bool) -> Kinds:
    has_residual = given[0]
    operands = [ARRAY, *_some([ARRAY, VECTOR, VECTOR], given)]
    return operands, [ARRAY, *[ARRAY] * has_residual, *[STATS] * keeps]


def _norm_vjp_kinds(given: Sequence[bool], wanted: Sequence[bool]) -> Kinds:
    operands = [ARRAY, STATS, *_some([VECTOR, ARRAY, ARRAY], given)]
    return operands, [ARRAY, *[VECTOR] * sum(wanted)]


def _norm_jvp_kinds(given: Sequence[bool], passed: bool) -> Kinds:
    operands = [ARRAY, STATS, *_some([VECTOR, ARRAY, VECTOR, VECTOR], given)]
    return operands, [ARRAY] * (1 + passed)


def _some(items: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [item for item, there in zip(items, which, strict=True) if there]


def _function_of_norm(*, center: bool, **_: Any) -> str:
    return "layer_norm" if center else "rms_norm"


def _norm_types(
    x: Any, *_: Any, axis: int, given: Sequence[bool], keeps: bool, **__: Any
) -> list[Any]:
    y = _with_rows_whole(x, axis)
    stats = _without(x, axis, 3).update(dtype=_reference.row_dtype(x.dtype))
    return [y, *[y] * given[0], *[stats] * keeps]


def _norm_vjp_types(x: Any, *_: Any, axis: int, wanted: Sequence[bool], **__: Any) -> list[Any]:
    vector = _compat.with_spec(x, (x.shape[axis],), [None])
    sums = vector.update(dtype=_reference.row_dtype(x.dtype), weak_type=False)
    return [_with_rows_whole(x, axis), *[sums] * sum(wanted)]


def _norm_jvp_types(x: Any, *_: Any, axis: int, passed: bool, **__: Any) -> list[Any]:
    return [_with_rows_whole(x, axis)] * (1 + passed)


# Kernels of norms count columns on GPUs in 32 bits. jnp takes longer rows.
_MOST_COLUMNS = 2**30 - 1


def _has_kernel(platform: str, x: jax.Array, axis: int) -> bool:
    columns = x.shape[axis]  # may be a variable of `jax.export`
    is_long = isinstance(columns, int) and columns > _MOST_COLUMNS
    return x.size != 0 and not (is_long and platform == "cuda")


_norm_in_jnp = _without_statistics(_reference.norm)


def _problem(x: jax.Array, axis: int) -> tuple[Any, Any, Any]:
    """The shape (outer, n, inner) of the arrays of a call."""
    return math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])


def _norm_native(
    platform: str,
    x: jax.Array,
    *operands: jax.Array,
    axis: int,
    center: bool,
    epsilon: float,
    given: tuple[bool, ...],
    keeps: bool,
) -> list[jax.Array]:
    if not _has_kernel(platform, x, axis):
        return _norm_in_jnp(
            *(x, *operands), axis=axis, center=center, epsilon=epsilon, given=given, keeps=keeps
        )
    problem = outer, _, inner = _problem(x, axis)
    residual, scale, bias = _reference.spread(operands, given)
    no_rows, no_vector = jnp.zeros((0, 0, 0), x.dtype), jnp.zeros((0,), x.dtype)
    y = jax.ShapeDtypeStruct(problem, x.dtype)
    total = y if given[0] else _absent(y)
    kept = jax.ShapeDtypeStruct((outer, inner, 3), _reference.row_dtype(x.dtype))
    results = jax.ffi.ffi_call("jof_norm", [y, total, kept if keeps else _absent(kept)])(
        x.reshape(problem),
        no_rows if residual is None else residual.reshape(problem),
        no_vector if scale is None else scale,
        no_vector if bias is None else bias,
        center=center,
        epsilon=np.float64(epsilon),
    )
    *arrays, stats = results
    arrays = [array.reshape(x.shape) for array in arrays[: 1 + given[0]]]
    of_rows = *x.shape[:axis], *x.shape[axis + 1 :], 3
    return [*arrays, stats.reshape(of_rows)] if keeps else arrays


def _norm_vjp_native(
    platform: str,
    x: jax.Array,
    stats: jax.Array,
    *operands: jax.Array,
    axis: int,
    given: tuple[bool, ...],
    wanted: tuple[bool, ...],
    center: bool,
    epsilon: float,
) -> list[jax.Array]:
    if not _has_kernel(platform, x, axis):
        return _reference.norm_vjp(
            *(x, stats, *operands),
            axis=axis,
            center=center,
            epsilon=epsilon,
            given=given,
            wanted=wanted,
        )
    problem = outer, n, inner = _problem(x, axis)
    dtype = _reference.row_dtype(x.dtype)
    scale, dy, of_sum = _reference.spread(operands, given)
    no_rows, no_vector = jnp.zeros((0, 0, 0), x.dtype), jnp.zeros((0,), x.dtype)
    if isinstance(inner, int) and inner == 1:
        parts = _primitive.parts_of_sums(platform, outer, n)
    else:
        parts = _primitive.parts_of_strided_sums(platform, outer * inner, n, x.dtype.itemsize)
    types = [jax.ShapeDtypeStruct(problem, x.dtype)]
    types += [jax.ShapeDtypeStruct((n if w else 0,), dtype) for w in wanted]
    types.append(jax.ShapeDtypeStruct((parts, sum(wanted), n), dtype))
    dx, dscale, dbias, _ = jax.ffi.ffi_call("jof_norm_vjp", types)(
        x.reshape(problem),
        stats.reshape(outer, inner, 3),
        dy.reshape(problem),
        no_rows if of_sum is None else of_sum.reshape(problem),
        no_vector if scale is None else scale,
        center=center,
    )
    return [dx.reshape(x.shape), *_some([dscale, dbias], wanted)]


def _of_kinds(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that say which operands and results there are."""
    return {k: v for k, v in params.items() if k in ("given", "wanted", "passed", "keeps")}


def _norm_batch(
    reference: Function,
    kinds: Callable[..., Kinds],
    primitive: core.Primitive,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axis: int,
    implementation: str | None,
    **params: Any,
) -> tuple[Any, Any]:
    """Row vectors per example are left to jnp, whether they are operands or results."""
    sides = kinds(**_of_kinds(params))
    in_jnp = jax.vmap(functools.partial(reference, axis=axis, **params), in_axes=dims)
    if any(d is not None and k == VECTOR for d, k in zip(dims, sides[0], strict=True)):
        results = in_jnp(*args)
        return results, [0] * len(results)
    operands, axis, out = _batched(args, dims, sides, axis)
    params |= {"axis": axis, "implementation": implementation}
    if VECTOR not in sides[1]:
        return bind(primitive, *operands, **params), out
    (dx,) = bind(primitive, *operands, **{**params, "wanted": (False, False)})
    sums = in_jnp(*args)[1:]
    return [dx, *sums], [out[0], *[0] * len(sums)]


def _norm_call(x: Any, *_: Any, axis: int, given: Any, center: bool, **__: Any) -> _policy.Call:
    """The call of a norm. A residual and the sum with it are two more arrays."""
    return _call("norm", "norm", 2 + 2 * given[0], x, axis, _function_of_norm(center=center))


def _norm_vjp_call(
    has_sum: Callable[[Any], bool], x: Any, *_: Any, axis: int, given: Any, center: bool, **__: Any
) -> _policy.Call:
    passes = 3 + has_sum(given)
    return _call("norm", "norm_vjp", passes, x, axis, _function_of_norm(center=center))


_CALL_OF_NORM: dict[str, Function] = {
    "norm": _norm_call,
    "norm_vjp": functools.partial(_norm_vjp_call, lambda given: given[2]),
}
_GRADIENT_OF_NORM: dict[str, Function] = {
    "norm": functools.partial(_norm_vjp_call, lambda given: given[0]),
}


def _define_norm() -> core.Primitive:
    def define(
        name: str, reference: Function, native: Function, types: Function, kinds: Any
    ) -> core.Primitive:
        def sharding_rule(x: Any, *_: Any, axis: int, **params: Any) -> _primitive.ShardingRule:
            return _rule(kinds(**_of_kinds(params)), len(x.shape), axis)

        return _primitive.define(
            f"jof_{name}",
            function=_function_of_norm,
            abstract_eval=types,
            reference=reference,
            native=native,
            sharding_rule=sharding_rule,
            on_shard=_primitive.sum_each if name == "norm_vjp" else None,
            batch=functools.partial(_norm_batch, reference, kinds),
            multiple_results=True,
            call=_CALL_OF_NORM.get(name),
            gradient=_GRADIENT_OF_NORM.get(name),
        )

    norm_p = define("norm", _norm_in_jnp, _norm_native, _norm_types, _norm_kinds)
    vjp_p = define(
        "norm_vjp", _reference.norm_vjp, _norm_vjp_native, _norm_vjp_types, _norm_vjp_kinds
    )
    jvp_p = define(
        "norm_jvp",
        _reference.norm_jvp,
        in_jnp(_reference.norm_jvp),
        _norm_jvp_types,
        _norm_jvp_kinds,
    )

    def jvp(primals: Any, tangents: Any, *, given: Any, keeps: bool, **params: Any) -> Any:
        params = _policy.with_gradient(params)
        y, *total, stats = bind(norm_p, *primals, given=given, keeps=True, **params)
        x = total[0] if total else primals[0]
        t_x, *rest = tangents
        t_residual, t_scale, t_bias = _reference.spread(rest, given)
        if total and not (_is_zero(t_x) and _is_zero(t_residual)):
            t_x = jax.lax.add(*map(ad.instantiate_zeros, (t_x, t_residual)))
        scale = _reference.spread(primals[1:], given)[1]
        of_rows = [t_x, *(_in_dtype(t, stats.dtype) for t in (t_scale, t_bias))]
        live = [t is not None and not _is_zero(t) for t in of_rows]
        t = bind(
            jvp_p,
            *(x, stats, *_some([scale], [given[1]]), *_some(of_rows, live)),
            given=(given[1], *live),
            passed=bool(total),
            **params,
        )
        zeros = [ad.Zero(jax.typeof(stats))] * keeps
        return [y, *total, *[stats] * keeps], [*t, *zeros]

    def vjp_transpose(
        cts: Any, x: Any, stats: Any, *rest: Any, given: Any, wanted: Any, **params: Any
    ) -> Any:
        scale = _reference.spread(rest, given)[0]
        of_x, *sums = cts
        of_vectors = iter(sums)
        tangents = [of_x, *(next(of_vectors) if w else ad.Zero(stats) for w in wanted)]
        live = [not _is_zero(t) for t in tangents]
        results = bind(
            jvp_p,
            *(x, stats, *_some([scale], [given[0]]), *_some(tangents, live)),
            given=(given[0], *live),
            passed=given[2],
            **params,
        )
        return [None, None, *[None] * given[0], *results]

    def jvp_transpose(
        cts: Any, x: Any, stats: Any, *rest: Any, given: Any, passed: Any, **params: Any
    ) -> Any:
        has_scale, *live = given
        scale = rest[0] if has_scale else None
        dy, of_sum = cts[0], cts[1] if passed and not _is_zero(cts[1]) else None
        present = has_scale, True, of_sum is not None
        dx, *sums = bind(
            vjp_p,
            *(x, stats, *_some([scale, ad.instantiate_zeros(dy), of_sum], present)),
            given=present,
            wanted=tuple(live[1:]),
            **params,
        )
        return [None, None, *[None] * has_scale, *[dx] * live[0], *sums]

    def first(*, given: Sequence[bool], **_: Any) -> int:
        return 2 + given[0]

    transpose = transposed_reference(_norm_in_jnp)
    _primitive.define_derivatives(norm_p, jvp=jvp, transpose=transpose)
    linear(vjp_p, _reference.norm_vjp, first, (1,), vjp_transpose)
    linear(jvp_p, _reference.norm_jvp, first, (1,), jvp_transpose)
    return norm_p


def _in_dtype(x: Any, dtype: Any) -> Any:
    return x if x is None or _is_zero(x) else x.astype(dtype)


norm_p = _define_norm()
