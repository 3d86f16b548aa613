"""The primitives of group norm and their rules. There are three, as for the functions of `_rows`.

Images have shape (..., pixels ..., channels): `spatial` dimensions are pixels, and those before
them are independent. Operands are x, scale and bias, which are never omitted, then the operands
specific to the primitive.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _policy, _primitive, _reference, _rows

# The operands and results of each primitive: images, statistics, vectors over channels.
_IMAGE, _STATS, _VECTOR = "image", "stats", "vector"
_VALUE = [_IMAGE, _VECTOR, _VECTOR], [_IMAGE, _STATS]
_VJP = [_IMAGE, _VECTOR, _VECTOR, _STATS, _IMAGE], [_IMAGE, _VECTOR, _VECTOR]
_JVP = [_IMAGE, _VECTOR, _VECTOR, _STATS, _IMAGE, _VECTOR, _VECTOR], [_IMAGE]

# Bytes of a part of an image, the most parts of an image, and the bytes of a pixel that a kernel
# processes at a time: see group_norm.cu.
_PART_BYTES = {"cuda": 1 << 15, "cpu": 1 << 17}
_MOST_PARTS = 128
_TILE_BYTES = 4096


def _parts(platform: str, x: jax.Array) -> Any:
    """The number of parts in the scratch of a call, where x is (images, pixels, channels)."""
    _, pixels, channels = x.shape
    if not isinstance(pixels, int) or not isinstance(channels, int):
        return _MOST_PARTS
    pixel = channels * x.dtype.itemsize
    parts = math.ceil(pixels * pixel / _PART_BYTES[platform])
    return max(min(pixels, _MOST_PARTS, parts), math.ceil(pixel / _TILE_BYTES))


def _merged(x: jax.Array, spatial: int) -> jax.Array:
    """`x` reshaped to (images, pixels, channels)."""
    split = x.ndim - 1 - spatial
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:-1]), x.shape[-1])


def _result(shape: Sequence[Any], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _value_native(
    platform: str, x: jax.Array, *vectors: jax.Array, spatial: int, groups: int, **params: Any
) -> list[jax.Array]:
    if x.size == 0:
        return _reference.group_norm(x, *vectors, spatial=spatial, groups=groups, **params)
    wide, images = _reference.row_dtype(x.dtype), _merged(x, spatial)
    count = images.shape[0]
    y, stats, *_ = jax.ffi.ffi_call(
        "jof_group_norm",
        [
            _result(images.shape, x.dtype),
            _result((count, groups, 3), wide),
            _result((count, _parts(platform, images), groups, 4), wide),
            _result((count, 16), jnp.int32),
        ],
    )(images, *vectors, silu=params["silu"], epsilon=np.float64(params["epsilon"]))
    return [y.reshape(x.shape), stats.reshape(*x.shape[: x.ndim - 1 - spatial], groups, 3)]


def _vjp_native(
    platform: str, x: jax.Array, *operands: jax.Array, spatial: int, groups: int, **params: Any
) -> list[jax.Array]:
    if x.size == 0:
        return _reference.group_norm_vjp(x, *operands, spatial=spatial, groups=groups, **params)
    scale, bias, stats, dy = operands
    wide, images = _reference.row_dtype(x.dtype), _merged(x, spatial)
    (count, _, channels), parts = images.shape, _parts(platform, images)
    dx, dscale, dbias, *_ = jax.ffi.ffi_call(
        "jof_group_norm_vjp",
        [
            _result(images.shape, x.dtype),
            *[_result((channels,), wide)] * 2,
            _result((count, parts, 2, groups), wide),
            _result((count, parts, 2, channels), wide),
            _result((count, 16), jnp.int32),
        ],
    )(
        images,
        *(scale, bias, stats.reshape(count, groups, 3), _merged(dy, spatial)),
        silu=params["silu"],
    )
    return [dx.reshape(x.shape), dscale, dbias]


def _types(kinds: Sequence[str]) -> Any:
    def types(x: Any, *_: Any, spatial: int, groups: int, **__: Any) -> list[Any]:
        split = x.ndim - 1 - spatial
        batch = [*x.sharding.spec][:split]
        wide = _reference.row_dtype(x.dtype)
        of = {
            _IMAGE: (x.shape, [*batch, *[None] * (spatial + 1)], x.dtype),
            _STATS: ((*x.shape[:split], groups, 3), [*batch, None, None], wide),
            _VECTOR: (x.shape[-1:], [None], wide),
        }
        return [
            _compat.with_spec(x, *of[kind][:2]).update(dtype=of[kind][2], weak_type=False)
            for kind in kinds
        ]

    return types


def _sharding_rule(kinds: tuple[list[str], list[str]]) -> Any:
    """Images may be sharded; all other dimensions are replicated."""

    def rule(x: Any, *_: Any, spatial: int, **__: Any) -> _primitive.ShardingRule:
        batch = [f"n{i}" for i in range(len(x.shape) - 1 - spatial)]
        pixels = [f"p{i}" for i in range(spatial)]
        names = {_IMAGE: [*batch, *pixels, "c"], _STATS: [*batch, "g", "k"], _VECTOR: ["c"]}
        operands, results = ([names[kind] for kind in side] for side in kinds)
        return _primitive.ShardingRule(operands, results, frozenset([*pixels, *"cgk"]))

    return rule


def _batch(kinds: Any, reference: Any) -> Any:
    """The batch axis becomes a dimension of images. Vectors per example are left to jnp."""

    def batch(
        primitive: Any, args: Any, dims: Any, *, implementation: str | None, **params: Any
    ) -> tuple[Any, Any]:
        in_jnp = jax.vmap(functools.partial(reference, **params), in_axes=tuple(dims))
        sides = zip(dims, kinds[0], strict=True)
        if any(d is not None and kind == _VECTOR for d, kind in sides):
            results = in_jnp(*args)
            return results, [0] * len(results)
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

        def at_front(x: Any, d: int | None, kind: str) -> Any:
            if kind == _VECTOR:
                return x
            return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

        operands = [at_front(*one) for one in zip(args, dims, kinds[0], strict=True)]
        results = _primitive.bind(primitive, *operands, implementation=implementation, **params)
        if _VECTOR in kinds[1]:  # kernels sum over all examples, but each example needs its own
            results = [results[0], *in_jnp(*args)[1:]]
        return results, [0] * len(results)

    return batch


def _define() -> tuple[core.Primitive, core.Primitive]:
    def define(name: str, kinds: Any, reference: Any, native: Any, passes: int) -> core.Primitive:
        def call(
            passes: int, x: Any, *_: Any, spatial: int, groups: int, **__: Any
        ) -> _policy.Call:
            way = {2: "forward", 3: "backward"}[passes]
            pixels = math.prod(x.shape[-spatial - 1 : -1])
            pixel = x.shape[-1] * x.dtype.itemsize
            kind = ("group_norm", way, "edges" if pixel % 16 else "whole packs")
            # The last size is what a group has of a pixel.
            return _policy.Call(kind, passes * _policy.nbytes(x), (pixels, pixel // groups))

        return _primitive.define(
            f"jof_{name}",
            function="group_norm",
            abstract_eval=_types(kinds[1]),
            reference=reference,
            native=native,
            sharding_rule=_sharding_rule(kinds),
            on_shard=_primitive.sum_each if kinds is _VJP else None,
            batch=_batch(kinds, reference),
            multiple_results=True,
            call=functools.partial(call, passes) if passes else None,
            gradient=functools.partial(call, 3) if passes == 2 else None,
        )

    value_p = define("group_norm", _VALUE, _reference.group_norm, _value_native, 2)
    vjp_p = define("group_norm_vjp", _VJP, _reference.group_norm_vjp, _vjp_native, 3)
    jvp_reference = _reference.group_norm_jvp
    jvp_p = define("group_norm_jvp", _JVP, jvp_reference, _rows.in_jnp(jvp_reference), 0)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        params = _policy.with_gradient(params)
        y, stats = _primitive.bind(value_p, *primals, **params)
        wide = [t.astype(stats.dtype) for t in map(ad.instantiate_zeros, tangents[1:])]
        t_x = ad.instantiate_zeros(tangents[0])
        (t,) = _primitive.bind(jvp_p, *primals, stats, t_x, *wide, **params)
        return [y, stats], [t, ad.Zero(jax.typeof(stats))]

    def transpose_by(other: core.Primitive) -> Any:
        def transpose(cts: Any, *args: Any, **params: Any) -> Any:
            residuals, cotangents = args[:4], map(ad.instantiate_zeros, cts)
            return [None] * 4 + _primitive.bind(other, *residuals, *cotangents, **params)

        return transpose

    def first(**_: Any) -> int:
        return 4

    transpose = _rows.transposed_reference(_reference.group_norm)
    _primitive.define_derivatives(value_p, jvp=jvp, transpose=transpose)
    _rows.linear(vjp_p, _reference.group_norm_vjp, first, (3,), transpose_by(jvp_p))
    _rows.linear(jvp_p, _reference.group_norm_jvp, first, (3,), transpose_by(vjp_p))
    return value_p, vjp_p


group_norm_p, vjp_p = _define()
