"""Permutations of axes, compared with ``jnp.transpose``."""

import itertools
import math
from functools import partial

import numpy as np

from jax_oneflow_ops import _native
from tests import catalogue

from .. import accuracy
from ..harness import SWEEP, Array, Case, Work
from ..inputs import Input
from ..tables import size
from . import common

_KEPT, _TRANSPOSE, _IMAGES, _ORDER = "last axis kept", "transpose", "images", "other order"
_LISTED = {
    "gpu": [
        ((1024, 256, 256), (1, 0, 2), _KEPT),
        ((8, 2048, 16, 128), (0, 2, 1, 3), _KEPT),  # the heads of an attention
        ((16, 8, 32, 64, 64), (2, 0, 3, 1, 4), _KEPT),
        ((64, 1000, 513), (1, 0, 2), _KEPT),
        ((5000, 4400, 3), (1, 0, 2), _KEPT),
        ((1024, 256, 256), (0, 2, 1), _TRANSPOSE),
        ((8192, 8192), (1, 0), _TRANSPOSE),
        ((64, 1000, 513), (0, 2, 1), _TRANSPOSE),
        ((32, 64, 224, 224), (0, 2, 3, 1), _IMAGES),
        ((32, 224, 224, 64), (0, 3, 1, 2), _IMAGES),
        ((32, 3, 224, 224), (0, 2, 3, 1), _IMAGES),
        ((32, 224, 224, 3), (0, 3, 1, 2), _IMAGES),
        ((32, 225, 225, 3), (0, 3, 1, 2), _IMAGES),
        ((64, 64, 64, 256), (3, 2, 1, 0), _ORDER),
        ((33, 65, 129, 127), (2, 0, 3, 1), _ORDER),
    ],
    "cpu": [
        ((256, 128, 128), (1, 0, 2), _KEPT),
        ((4, 512, 16, 64), (0, 2, 1, 3), _KEPT),
        ((8, 4, 16, 32, 32), (2, 0, 3, 1, 4), _KEPT),
        ((256, 128, 128), (0, 2, 1), _TRANSPOSE),
        ((2048, 2048), (1, 0), _TRANSPOSE),
        ((16, 250, 513), (0, 2, 1), _TRANSPOSE),
        ((4, 64, 112, 112), (0, 2, 3, 1), _IMAGES),
        ((4, 112, 112, 64), (0, 3, 1, 2), _IMAGES),
        ((8, 3, 224, 224), (0, 2, 3, 1), _IMAGES),
        ((8, 224, 224, 3), (0, 3, 1, 2), _IMAGES),
        ((32, 32, 32, 64), (3, 2, 1, 0), _ORDER),
        ((17, 33, 65, 63), (2, 0, 3, 1), _ORDER),
    ],
}
_NARROW, _WIDE = ("float32", "float16", "int8"), ("complex64", "complex128")


def case(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    dtype: str,
    group: str,
    prefix: str = "table",
    shown: str = "",
) -> Case:
    sizes, order = "x".join(map(str, shape)), "".join(map(str, axes))
    name = f"{prefix}-{sizes}-{order}-{common.short(dtype)}"
    nbytes = 2 * math.prod(shape) * common.itemsize(dtype)
    found = _native.permute_plan(shape, axes, common.itemsize(dtype))
    plan = f"{found['strategy']}, {found['unit_bytes']} B"
    work, x64 = partial(_work, shape, axes, dtype), common.is_wide(dtype)
    shown = shown or f"{shape} by {axes}".replace(" ", "").replace("by", " by ")
    return Case("permute", name, "permute", group, shown, dtype, nbytes, work, x64, plan)


def cases(platform: str) -> list[Case]:
    """The listed shapes; on a GPU also elements of 8 and 16 bytes, and two orders in more sizes."""
    gpu = platform == "gpu"
    listed = [
        case(shape, axes, dtype, group)
        for shape, axes, group in _LISTED[platform]
        for dtype in [*_NARROW, *(_WIDE if gpu and group in (_KEPT, _TRANSPOSE) else [])]
    ]
    if gpu:
        for axes, dtype in itertools.product([(1, 0, 2), (0, 2, 1)], _NARROW[:2]):
            for mib in (16, 32, 64, 128):
                shape = ((mib << 4) // common.itemsize(dtype), 256, 256)
                listed.append(case(shape, axes, dtype, "other sizes", "article"))
    for nbytes in common.sweep_sizes(platform):
        # A bf16 matrix, square or twice as wide as it is high.
        bits = (nbytes // 2).bit_length() - 1
        matrix = 1 << bits // 2, 1 << bits - bits // 2
        listed.append(case(matrix, (1, 0), "bfloat16", SWEEP, SWEEP, size(nbytes)))
    return listed


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: 2 to 6 axes, elements of 1 to 16 bytes, often a small last dimension."""
    dtype = common.pick(rng, ("int8", "float16", "bfloat16", "float32", "complex64", "complex128"))
    most = 2 * largest // common.itemsize(dtype)
    n = max(4.0, common.random_size(rng, largest) / (2 * common.itemsize(dtype)))
    while True:
        rank = int(rng.integers(2, 7))
        parts = rng.dirichlet(np.full(rank, 2.0)) * math.log2(n)
        if rng.random() < 0.3:
            parts[-1] = rng.uniform(0, 3)
        shape = tuple(common.random_dimension(rng, 2**part) for part in parts)
        axes = tuple(int(i) for i in rng.permutation(rank))
        moving = [axis for axis in axes if shape[axis] > 1]
        if 4 * math.prod(shape) <= most and moving != sorted(moving):  # otherwise nothing moves
            return case(shape, axes, dtype, "random", "random")


def _work(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Work:
    """The programs return the default layout, so jnp's program has to move the array, too."""
    return Work(
        [Input(shape, dtype, "hash")],
        partial(catalogue.PERMUTE.function, axes=axes),
        {"jnp": partial(catalogue.PERMUTE.replaces, axes=axes)},
        sample=partial(_sample, shape, axes),
        verify=lambda sampled: accuracy.same(*sampled),
        exact=True,
        alone=True,
        torch=lambda torch, x: x.permute(axes).contiguous(),
        compile=shape == (8192, 8192) and dtype == "float16",
    )


def _sample(
    shape: tuple[int, ...], axes: tuple[int, ...], args: tuple[Array, ...], out: Array
) -> tuple[Array, Array]:
    """Some elements of the result, and the elements that NumPy's index arithmetic expects there."""
    places = np.random.default_rng(0).integers(0, math.prod(shape), 4096)
    there = np.unravel_index(places, tuple(shape[axis] for axis in axes))
    source = tuple(there[axes.index(axis)] for axis in range(len(axes)))
    from_source = np.ravel_multi_index(source, shape)
    x = args[0].reshape(-1)[from_source.astype(np.int32)]
    return out.reshape(-1)[places.astype(np.int32)], x
