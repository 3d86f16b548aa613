"""Nearest-neighbour upsampling and its transpose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import oracle

from ..harness import SWEEP, Case, Function, Work, one_element
from ..inputs import Input
from . import FLOATS, is_wide, itemsize, pick, random_size, short, size, sweep_sizes

Image = Any

_FORWARD = {"forward", SWEEP}


@dataclass(frozen=True)
class Problem:
    """``shape`` is the small image as (N, C, H, W), ``size`` the large one's (H, W)."""

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    layout: str = "NCHW"
    dtype: str = "float32"
    group: str = "forward"

    @property
    def factor(self) -> int | None:
        """The scale if it is one integer."""
        (_, _, h, w), (p, q) = self.shape, self.size
        return p // h if p % h == 0 and q % w == 0 and p // h == q // w else None

    @property
    def method(self) -> str:
        """At sizes that are no multiple only this one is what ``jax.image.resize`` computes."""
        return "nearest-exact" if self.factor is None else "nearest"

    def in_layout(self, h: int, w: int) -> tuple[int, ...]:
        """The shape of an image."""
        n, c = self.shape[:2]
        return (n, c, h, w) if self.layout == "NCHW" else (n, h, w, c)

    @property
    def small(self) -> tuple[int, ...]:
        """The shape of the small image."""
        return self.in_layout(*self.shape[2:])

    @property
    def large(self) -> tuple[int, ...]:
        """The shape of the large image."""
        return self.in_layout(*self.size)

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of height and width."""
        return (2, 3) if self.layout == "NCHW" else (1, 2)

    @property
    def source(self) -> list[np.ndarray]:
        """The source index of every output index, for both axes, from the tests' oracle."""
        pairs = zip(self.shape[2:], self.size, strict=True)
        return [oracle.source_indices(n, m, self.method) for n, m in pairs]


def case(p: Problem, shape: str = "") -> Case:
    """The call, or its transpose (group "backward")."""
    scale = f"x{p.factor}" if p.factor else f"to{p.size[0]}"
    if not p.factor and p.size[0] != p.size[1]:
        scale += f"x{p.size[1]}"
    way = {"forward": "fwd", "backward": "bwd"}.get(p.group, p.group)
    sizes = "x".join(map(str, p.shape))
    name = f"{way}-{sizes}-{scale}-{p.layout}-{short(p.dtype)}"
    nbytes = (math.prod(p.small) + math.prod(p.large)) * itemsize(p.dtype)
    variant = "2x" if p.factor == 2 else "other integers" if p.factor else "any size"
    work = partial(_work, p)
    shown = shape or f"{sizes} {scale} {p.layout}"
    return Case("upsample", name, variant, p.group, shown, p.dtype, nbytes, work, is_wide(p.dtype))


def _both(
    shape: tuple[int, int, int, int], side: int, layouts: Sequence[str], dtypes: Sequence[str]
) -> list[Problem]:
    return [
        Problem(shape, (side, side), layout, dtype, group)
        for group, layout, dtype in itertools.product(("forward", "backward"), layouts, dtypes)
    ]


def cases(platform: str, quick: bool = False) -> list[Case]:
    """``quick`` keeps one shape and two dtypes."""
    both, first = ("NCHW", "NHWC"), ("NCHW",)
    if platform == "gpu":
        listed = [
            *_both((16, 64, 160, 160), 320, both, FLOATS),
            *_both((8, 320, 64, 64), 128, both, FLOATS),  # a diffusion UNet's decoder
            *_both((16, 32, 80, 80), 160, both, FLOATS),  # the shape of OneFlow's article
            *_both((8, 64, 128, 128), 512, first, FLOATS[:2]),
            *_both((16, 64, 160, 160), 224, first, FLOATS[:2]),
            *_both((16, 64, 160, 160), 480, first, FLOATS[:2]),
        ]
    else:
        listed = [
            *_both((4, 32, 80, 80), 160, both, FLOATS),
            *_both((2, 64, 64, 64), 128, both, FLOATS),
            *_both((2, 32, 64, 64), 192, both, FLOATS[:1]),
            *_both((4, 32, 80, 80), 112, first, FLOATS[:2]),
        ]
    if quick:
        listed = [p for p in listed if p.shape == listed[0].shape and p.dtype in FLOATS[:2]]
    listed.sort(key=lambda p: p.group != "forward")
    sweep = (_sweep(nbytes) for nbytes in sweep_sizes(platform, quick))
    return [*map(case, listed), *sweep]


def _sweep(nbytes: int) -> Case:
    """Twofold to so many bytes of bf16: images of 64 by 64 or less, in batches of 64 channels."""
    bits = (nbytes // 8).bit_length() - 1  # of the small image's elements
    h, w = 1 << min(6, bits // 2), 1 << min(6, bits - bits // 2)
    images = (nbytes // 8) // (h * w)
    shape = (max(1, images // 64), min(64, images), h, w)
    problem = Problem(shape, (2 * h, 2 * w), dtype="bfloat16", group=SWEEP)
    return case(problem, size(nbytes))


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A case at random: either direction and layout, any width, at 2x, other integers, any size."""
    dtype, layout = pick(rng, FLOATS), pick(rng, ("NCHW", "NHWC"))
    group = pick(rng, ("forward", "backward"))
    h, w = (int(rng.integers(1, 200)) for _ in range(2))
    if rng.random() < 0.3:
        h, w = (1 << int(rng.integers(2, 8)) for _ in range(2))
    kind = rng.random()
    if kind < 0.6:
        factor = 2 if kind < 0.4 else int(rng.integers(3, 6))
        out = (h * factor, w * factor)
    else:
        out = (max(1, int(h * rng.uniform(0.4, 4))), max(1, int(w * rng.uniform(0.4, 4))))
    images = random_size(rng, largest) // (itemsize(dtype) * (h * w + out[0] * out[1]))
    channels = min(max(1, images), pick(rng, (1, 3, 4, 8, 32, 64, 65, 320)))
    shape = (max(1, images // channels), channels, h, w)
    return case(Problem(shape, out, layout, dtype, group))


def _work(p: Problem) -> Work:
    backward = p.group == "backward"
    forms = {"resize": lambda x: jax.image.resize(x, p.large, "nearest")}
    if p.factor is None:
        forms["take"] = _take(p)
        if backward:
            forms["matmul"] = _matmul(p)
    else:
        forms |= {"repeat": _repeat(p), "broadcast": _broadcast(p)}
    scale = {"size": p.size} if p.factor is None else {"scale_factor": p.factor}

    def ours(x: Image, implementation: str | None) -> Image:
        call = partial(
            jof.upsample_nearest2d,
            **scale,
            method=p.method,
            data_format=p.layout,
            implementation=implementation,
        )
        return _direction(p, call)(x)

    return Work(
        [Input(p.large if backward else p.small, p.dtype)],
        ours,
        {name: _direction(p, function) for name, function in forms.items()},
        sample=partial(_sample_backward if backward else _sample_forward, p),
        verify=partial(_verify_backward, p) if backward else _verify_forward,
        exact=not backward,
        torch=partial(_torch, p),
        compile=(p.shape, p.size, p.layout, p.dtype) == _COMPILED,
        others={"1 element": one_element} if p.group == SWEEP else {},
        ceilings=("copy", "fill"),
        effort=1.0,
    )


_COMPILED = (16, 64, 160, 160), (320, 320), "NCHW", "bfloat16"


def _direction(p: Problem, forward: Function) -> Function:
    """``forward`` itself, or its transpose alone."""
    if p.group in _FORWARD:
        return forward
    transpose = jax.linear_transpose(forward, jax.ShapeDtypeStruct(p.small, p.dtype))
    return lambda cotangent: transpose(cotangent)[0]


def _repeat(p: Problem) -> Function:
    (h, w), factor = p.axes, p.factor or 1
    return lambda x: jnp.repeat(jnp.repeat(x, factor, axis=h), factor, axis=w)


def _broadcast(p: Problem) -> Function:
    (h, w), factor = p.axes, p.factor or 1

    def run(x: Image) -> Image:
        x = jnp.expand_dims(x, (h + 1, w + 2))
        shape = list(x.shape)
        shape[h + 1] = shape[w + 2] = factor
        return jnp.broadcast_to(x, shape).reshape(p.large)

    return run


def _take(p: Problem) -> Function:
    (h, w), (rows, columns) = p.axes, p.source

    def run(x: Image) -> Image:
        x = jnp.take(x, rows.astype(np.int32), axis=h, mode="clip")
        return jnp.take(x, columns.astype(np.int32), axis=w, mode="clip")

    return run


def _matmul(p: Problem) -> Function:
    """A product with a matrix of ones and zeros for each axis."""
    axes = "nchw,ph,qw->ncpq" if p.layout == "NCHW" else "nhwc,ph,qw->npqc"
    spread = [np.eye(n)[i] for n, i in zip(p.shape[2:], p.source, strict=True)]

    def run(x: Image) -> Image:
        matrices = [jnp.asarray(matrix, x.dtype) for matrix in spread]
        return jnp.einsum(axes, x, *matrices, precision="highest")

    return run


def _torch(p: Problem, torch: Any, x: Image) -> Image:
    """PyTorch's own call on the same memory; NHWC is its channels_last format."""
    channels_last = p.layout == "NHWC"
    x = x.permute(0, 3, 1, 2) if channels_last else x
    if p.group in _FORWARD:
        y = torch.nn.functional.interpolate(x, size=p.size, mode=p.method)
    else:
        exact = p.method == "nearest-exact"
        name = "_upsample_nearest_exact2d_backward" if exact else "upsample_nearest2d_backward"
        y = getattr(torch.ops.aten, name).default(x, p.size, p.shape)
    return y.permute(0, 2, 3, 1) if channels_last else y


# ---- checks of some elements; the forms are compared on all ----

_SAMPLES = 2048


def _places(p: Problem, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Coordinates of elements of an image of this shape, drawn at random."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, n, _SAMPLES, dtype=np.int32) for n in shape]


def _sample_forward(p: Problem, args: tuple[Image, ...], out: Image) -> tuple[Image, Image]:
    places = _places(p, p.large)
    there = [*places]
    for axis, source in zip(p.axes, p.source, strict=True):
        there[axis] = source[places[axis]].astype(np.int32)
    return args[0][tuple(there)], out[tuple(places)]


def _verify_forward(sampled: tuple[np.ndarray, np.ndarray]) -> str | None:
    expected, found = sampled
    wrong = int((expected != found).sum())
    return f"{wrong} of {found.size} samples are not what they should be" if wrong else None


def _sample_backward(p: Problem, args: tuple[Image, ...], out: Image) -> tuple[Image, Image]:
    """Elements of the result, and for each the rectangle of cotangents that it sums, or zeros."""
    places = _places(p, p.small)
    h, w = p.axes
    (first_row, rows), (first_column, columns) = (
        _extents(source, n) for source, n in zip(p.source, p.shape[2:], strict=True)
    )
    i, j = np.arange(max(1, rows.max())), np.arange(max(1, columns.max()))
    row = first_row[places[h]][:, None] + i
    column = first_column[places[w]][:, None] + j
    inside = (i < rows[places[h]][:, None])[:, :, None]
    inside = inside & (j < columns[places[w]][:, None])[:, None, :]
    index: list[np.ndarray] = [place[:, None, None] for place in places]
    index[h] = np.minimum(row, p.size[0] - 1)[:, :, None].astype(np.int32)
    index[w] = np.minimum(column, p.size[1] - 1)[:, None, :].astype(np.int32)
    return jnp.where(inside, args[0][tuple(index)], 0), out[tuple(places)]


def _extents(source: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The first output index that reads each source index, and how many do."""
    first = np.searchsorted(source, np.arange(n))
    return first, np.searchsorted(source, np.arange(n), side="right") - first


def _verify_backward(p: Problem, sampled: tuple[np.ndarray, np.ndarray]) -> str | None:
    """One rounding, after a sum in float32."""
    terms, found = (x.astype(np.float64) for x in sampled)
    expected, magnitude = terms.sum((1, 2)), np.abs(terms).sum((1, 2))
    bound = 0.51 * float(jnp.finfo(p.dtype).eps) * np.abs(expected) + 1e-6 * magnitude
    error = np.abs(found - expected)
    if (error <= bound).all():
        return None
    return f"off by up to {np.nanmax(error / np.maximum(bound, 1e-300)):.3g} x the error bound"
