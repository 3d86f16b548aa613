"""Nearest-neighbour upsampling and its transpose."""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import catalogue

from .. import accuracy
from ..harness import SWEEP, Array, Case, Function, Work
from ..inputs import Input
from ..tables import size
from . import common


class Problem(NamedTuple):
    """``shape`` is the small image as (N, C, H, W), ``size`` the large one's (H, W)."""

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    layout: str = "NCHW"
    dtype: str = "float32"
    group: str = "forward"

    @property
    def factor(self) -> int | None:
        (_, _, h, w), (p, q) = self.shape, self.size
        return p // h if p % h == 0 and q % w == 0 and p // h == q // w else None

    @property
    def op(self) -> Any:
        """The row of the catalogue; if there is no factor, that of ``jax.image.resize``."""
        return catalogue.UPSAMPLE if self.factor else catalogue.UPSAMPLE_EXACT

    @property
    def options(self) -> dict[str, Any]:
        scale = {"scale_factor": self.factor} if self.factor else {"size": self.size}
        return {**scale, "data_format": self.layout}

    def image(self, h: int, w: int) -> tuple[int, ...]:
        n, c = self.shape[:2]
        return (n, c, h, w) if self.layout == "NCHW" else (n, h, w, c)


def case(p: Problem, shape: str = "") -> Case:
    """The case of the call, or of its transpose (group "backward")."""
    scale = f"x{p.factor}" if p.factor else f"to{p.size[0]}"
    if not p.factor and p.size[0] != p.size[1]:
        scale += f"x{p.size[1]}"
    way = {"forward": "fwd", "backward": "bwd"}.get(p.group, p.group)
    sizes = "x".join(map(str, p.shape))
    name = f"{way}-{sizes}-{scale}-{p.layout}-{common.short(p.dtype)}"
    pixels = math.prod(p.shape[2:]) + math.prod(p.size)
    nbytes = math.prod(p.shape[:2]) * pixels * common.itemsize(p.dtype)
    op = "2x" if p.factor == 2 else "other integers" if p.factor else "any size"
    shown = shape or f"{sizes} {scale} {p.layout}"
    return Case("upsample", name, op, p.group, shown, p.dtype, nbytes, partial(_work, p))


# The shapes of small images, the sides of large ones, layouts, and how many dtypes are measured.
_BOTH, _FIRST = ("NCHW", "NHWC"), ("NCHW",)
_LISTED: dict[str, list[Any]] = {
    "gpu": [
        ((16, 64, 160, 160), 320, _BOTH, 3),
        ((8, 320, 64, 64), 128, _BOTH, 3),  # a diffusion UNet's decoder
        ((16, 32, 80, 80), 160, _BOTH, 3),  # the shape of OneFlow's article
        ((8, 64, 128, 128), 512, _FIRST, 2),
        ((16, 64, 160, 160), 224, _FIRST, 2),
        ((16, 64, 160, 160), 480, _FIRST, 2),
    ],
    "cpu": [
        ((4, 32, 80, 80), 160, _BOTH, 3),
        ((2, 64, 64, 64), 128, _BOTH, 3),
        ((2, 32, 64, 64), 192, _BOTH, 1),
        ((4, 32, 80, 80), 112, _FIRST, 2),
    ],
}


def cases(platform: str) -> list[Case]:
    """Both directions of the listed shapes, and a sweep of the forward call at 2x."""
    listed = [
        case(Problem(shape, (side, side), layout, dtype, group))
        for group in ("forward", "backward")
        for shape, side, layouts, dtypes in _LISTED[platform]
        for layout, dtype in itertools.product(layouts, common.FLOATS[:dtypes])
    ]
    for nbytes in common.sweep_sizes(platform):
        # Images of 64 by 64 or less, in batches of 64 channels.
        bits = (nbytes // 8).bit_length() - 1  # of the small image's elements
        h, w = 1 << min(6, bits // 2), 1 << min(6, bits - bits // 2)
        images = (nbytes // 8) // (h * w)
        small = (max(1, images // 64), min(64, images), h, w)
        problem = Problem(small, (2 * h, 2 * w), "NCHW", "bfloat16", SWEEP)
        listed.append(case(problem, size(nbytes)))
    return listed


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case: any direction, layout and width; factor 2, another integer, or any size."""
    dtype, layout = common.pick(rng, common.FLOATS), common.pick(rng, _BOTH)
    group = common.pick(rng, ("forward", "backward"))
    h, w = map(int, rng.integers(1, 200, 2))
    if rng.random() < 0.3:
        h, w = (1 << int(bits) for bits in rng.integers(2, 8, 2))
    kind = rng.random()
    factor = 2 if kind < 0.4 else int(rng.integers(3, 6))
    out = (h * factor, w * factor)
    if kind > 0.6:
        out = (max(1, int(h * rng.uniform(0.4, 4))), max(1, int(w * rng.uniform(0.4, 4))))
    image = common.itemsize(dtype) * (h * w + out[0] * out[1])
    images = max(1, common.random_size(rng, largest) // image)
    channels = min(images, common.pick(rng, (1, 3, 4, 8, 32, 64, 65, 320)))
    return case(Problem((images // channels, channels, h, w), out, layout, dtype, group))


_COMPILED = (16, 64, 160, 160), (320, 320), "NCHW", "bfloat16"


def _work(p: Problem) -> Work:
    backward = p.group == "backward"
    of_factor = ["repeat", "broadcast", *["slices"] * backward]
    names = of_factor if p.factor else ["products"] * backward
    forms = {"resize": p.op.best["resize"], "take": p.op.replaces}
    forms |= {name.replace("products", "matmul"): p.op.best[name] for name in names}

    return Work(
        [Input(p.image(*(p.size if backward else p.shape[2:])), p.dtype)],
        partial(_direction, p, p.op.function),
        {name: partial(_direction, p, form) for name, form in forms.items()},
        sample=partial(_sample, p),
        verify=partial(_verify, p),
        exact=not backward,
        torch=partial(_torch, p),
        compile=p[:4] == _COMPILED,
    )


def _direction(p: Problem, function: Function, x: Array, **options: Any) -> Array:
    """The forward call, or its transpose alone."""
    forward = partial(function, **p.options, **options)
    if p.group != "backward":
        return forward(x)
    small = jax.ShapeDtypeStruct(p.image(*p.shape[2:]), p.dtype)
    return jax.linear_transpose(forward, small)(x)[0]


def _torch(p: Problem, torch: Any, x: Array) -> Array:
    """PyTorch's own call on the same memory; NHWC is its channels_last format."""
    last = p.layout == "NHWC"
    x = x.permute(0, 3, 1, 2) if last else x
    if p.group != "backward":
        mode = "nearest" if p.factor else "nearest-exact"
        y = torch.nn.functional.interpolate(x, size=p.size, mode=mode)
    else:
        exact = "upsample_nearest2d" if p.factor else "_upsample_nearest_exact2d"
        y = getattr(torch.ops.aten, f"{exact}_backward").default(x, p.size, p.shape)
    return y.permute(0, 2, 3, 1) if last else y


def _sample(p: Problem, args: tuple[Array, ...], out: Array) -> list[Array]:
    """The first and last channels of the first and last images; forms are compared in full."""
    n, c = (np.unique([0, size - 1]) for size in p.shape[:2])
    axis = 1 if p.layout == "NCHW" else 3
    return [jnp.take(x[n], c, axis, mode="clip") for x in (*args, out)]


def _verify(p: Problem, sampled: list[np.ndarray]) -> str | None:
    x, found = (x.astype(np.float64) for x in sampled)
    if p.group != "backward":
        return accuracy.same(found, p.op.exact(x, **p.options))
    expected, magnitude = (p.op.transpose(ct, found, **p.options)[0] for ct in (x, np.abs(x)))
    # One rounding, after a sum in float32.
    bound = 0.51 * float(jnp.finfo(p.dtype).eps) * np.abs(expected) + 1e-6 * magnitude
    return accuracy.worst(found, expected, bound)
