"""The upsample suite: what ours is compared with, and how its results are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from .cases import UpsampleCase
from .harness import Input, Work

Image = Any  # an array of any framework


def work(case: UpsampleCase) -> Work:
    """Everything the harness needs to run a case."""
    backward = case.group == "backward"
    forwards = {
        "resize": lambda x: jax.image.resize(x, case.large, "nearest"),
        **({} if case.factor is None else {"repeat": _repeat(case), "broadcast": _broadcast(case)}),
    }
    if backward and case.factor is None:
        forwards["matmul"] = _matmul(case)
    return Work(
        inputs=[Input(case.large if backward else case.small, case.dtype)],
        ours=_direction(case, lambda x: jof.upsample_nearest2d(x, **case.scale)),
        target="jof_upsample_nearest2d" + ("_backward" if backward else ""),
        jnp={name: _direction(case, f) for name, f in forwards.items()},
        torch=lambda torch, x: _torch(case, torch, x),
        compile=(case.shape, case.size, case.layout, case.dtype) == _COMPILED,
        check=partial(_check_backward if backward else _check_forward, case),
        exact=not backward,
    )


# What torch.compile has a go at, both ways: each takes it seconds.
_COMPILED = (16, 64, 160, 160), (320, 320), "NCHW", "bfloat16"


def _direction(case: UpsampleCase, forward: Callable[[Image], Image]) -> Callable[[Image], Image]:
    """``forward`` itself, or its transpose alone (no forward work is in it)."""
    if case.group != "backward":
        return forward
    transpose = jax.linear_transpose(forward, jax.ShapeDtypeStruct(case.small, case.dtype))
    return lambda cotangent: transpose(cotangent)[0]


def _repeat(case: UpsampleCase) -> Callable[[Image], Image]:
    (h, w), factor = case.spatial, case.factor or 1
    return lambda x: jnp.repeat(jnp.repeat(x, factor, axis=h), factor, axis=w)


def _broadcast(case: UpsampleCase) -> Callable[[Image], Image]:
    (h, w), factor = case.spatial, case.factor or 1

    def run(x: Image) -> Image:
        x = jnp.expand_dims(x, (h + 1, w + 2))
        shape = list(x.shape)
        shape[h + 1] = shape[w + 2] = factor
        return jnp.broadcast_to(x, shape).reshape(case.large)

    return run


def _matmul(case: UpsampleCase) -> Callable[[Image], Image]:
    """A product with a matrix of ones and zeros an axis; its transpose is one as well."""
    axes = "nchw,ph,qw->ncpq" if case.layout == "NCHW" else "nhwc,ph,qw->npqc"
    spread = [np.eye(n)[i] for n, i in zip(case.shape[2:], _source(case), strict=True)]

    def run(x: Image) -> Image:
        matrices = [jnp.asarray(matrix, x.dtype) for matrix in spread]
        return jnp.einsum(axes, x, *matrices, precision="highest")

    return run


def _torch(case: UpsampleCase, torch: Any, x: Image) -> Image:
    """PyTorch's own call on the same memory; NHWC is its channels_last format."""
    channels_last = case.layout == "NHWC"
    x = x.permute(0, 3, 1, 2) if channels_last else x
    if case.group != "backward":
        y = torch.nn.functional.interpolate(x, size=case.size, mode=case.method)
    else:
        exact = case.method == "nearest-exact"
        name = "_upsample_nearest_exact2d_backward" if exact else "upsample_nearest2d_backward"
        y = getattr(torch.ops.aten, name).default(x, case.size, case.shape)
    return y.permute(0, 2, 3, 1) if channels_last else y


def _source(case: UpsampleCase) -> list[np.ndarray]:
    """For both axes, the source index of every output index, in exact integers."""
    indices = []
    for n, m in zip(case.shape[2:], case.size, strict=True):
        i = np.arange(m)
        indices.append(i * n // m if case.method == "nearest" else (2 * i + 1) * n // (2 * m))
    return indices


def _samples(case: UpsampleCase) -> list[int]:
    """The first and the last image of the batch: what NumPy looks at."""
    return [0, case.shape[0] - 1]


def _check_forward(case: UpsampleCase, args: tuple[Image, ...], out: Image) -> str | None:
    """NumPy's own indexing on two images; the harness compares all of them with the rivals."""
    (x,), (rows, columns) = args, _source(case)
    h, w = (axis - 1 for axis in case.spatial)
    for n in _samples(case):
        expected = np.asarray(x[n]).take(rows, axis=h).take(columns, axis=w)
        if not np.array_equal(np.asarray(out[n]), expected):
            return f"image {n} differs from NumPy's indexing"
    return None


def _check_backward(case: UpsampleCase, args: tuple[Image, ...], out: Image) -> str | None:
    """The sums in float64 on two images, and all images against JAX's own gradient in float32."""
    (ct,) = args
    eps = float(jnp.finfo(case.dtype).eps)
    spread = [np.eye(n)[i] for n, i in zip(case.shape[2:], _source(case), strict=True)]
    sums = "cpq,ph,qw->chw" if case.layout == "NCHW" else "pqc,ph,qw->hwc"
    for n in _samples(case):
        image = np.asarray(ct[n]).astype(np.float64)
        expected = np.einsum(sums, image, *spread, optimize=True)
        magnitude = np.einsum(sums, np.abs(image), *spread, optimize=True)
        # One rounding, after a sum in float32.
        bound = 0.51 * eps * np.abs(expected) + 1e-6 * magnitude
        error = np.abs(np.asarray(out[n]).astype(np.float64) - expected)
        if not (error <= bound).all():
            return f"image {n} is off by up to {np.nanmax(error / bound):.3g} x its error bound"
    resize = _direction(
        replace(case, dtype="float32"), lambda x: jax.image.resize(x, case.large, "nearest")
    )
    reference = jax.jit(resize)(ct.astype(jnp.float32))
    close = jnp.abs(out.astype(jnp.float32) - reference) <= eps * jnp.abs(reference) + 1e-5
    return None if bool(close.all()) else "differs from the gradient of jax.image.resize in float32"
