"""The shared case table: the shapes, dtypes and sizes that benchmarks measure and tests may reuse.

Rows are plain data; this module imports neither JAX nor the package, so that anything can read it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Case(Protocol):
    """What the harness, the table and the report need to know of a case of any op."""

    @property
    def name(self) -> str:
        """Unique among the cases of a suite; ``--case`` looks for its text in it."""
        ...

    @property
    def group(self) -> str:
        """A panel of the chart, such as "forward"."""
        ...

    @property
    def variant(self) -> str:
        """What the report takes geometric means over, within group and dtype, such as "2x"."""
        ...

    @property
    def dtype(self) -> str:
        """The name of the dtype of the data."""
        ...

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once."""
        ...


@dataclass(frozen=True)
class UpsampleCase:
    """One call of ``upsample_nearest2d`` (group "forward") or of its transpose (group "backward").

    ``shape`` is the small image as (N, C, H, W) and ``size`` the large one's (H, W), whatever the
    layout.
    """

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    layout: str = "NCHW"
    dtype: str = "float32"
    group: str = "forward"
    method: str = "nearest"

    @property
    def factor(self) -> int | None:
        """The scale where it is one integer, else None."""
        (_, _, h, w), (p, q) = self.shape, self.size
        return p // h if p % h == 0 and q % w == 0 and p // h == q // w else None

    @property
    def variant(self) -> str:
        """Twofold, which has kernels of its own, other integers, and the rest."""
        return "2x" if self.factor == 2 else "other integers" if self.factor else "any size"

    @property
    def scale(self) -> dict[str, Any]:
        """The keyword arguments that ask the op for this case's scale."""
        size = {"size": self.size} if self.factor is None else {"scale_factor": self.factor}
        return {**size, "method": self.method, "data_format": self.layout}

    @property
    def small(self) -> tuple[int, int, int, int]:
        """Shape of the small image in the case's layout."""
        return self._in_layout(*self.shape[2:])

    @property
    def large(self) -> tuple[int, int, int, int]:
        """Shape of the large image in the case's layout."""
        return self._in_layout(*self.size)

    @property
    def spatial(self) -> tuple[int, int]:
        """The axes of height and width in the case's layout."""
        return (2, 3) if self.layout == "NCHW" else (1, 2)

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once: both images, both ways."""
        return (math.prod(self.small) + math.prod(self.large)) * _ITEMSIZE[self.dtype]

    @property
    def name(self) -> str:
        """Such as ``fwd-16x64x160x160-x2-NCHW-f16``."""
        scale = f"x{self.factor}" if self.factor else f"to{self.size[0]}"
        way = {"forward": "fwd", "backward": "bwd"}[self.group]
        shape = "x".join(map(str, self.shape))
        return f"{way}-{shape}-{scale}-{self.layout}-{_SHORT[self.dtype]}"

    def _in_layout(self, h: int, w: int) -> tuple[int, int, int, int]:
        n, c = self.shape[:2]
        return (n, c, h, w) if self.layout == "NCHW" else (n, h, w, c)


def _upsample(
    shape: tuple[int, int, int, int], size: int, layouts: list[str], dtypes: list[str]
) -> list[UpsampleCase]:
    """Both directions of one scale, over layouts and dtypes.

    At sizes that are no multiple the method is "nearest-exact", so that ``jax.image.resize`` is the
    same function.
    """
    method = "nearest" if size % shape[2] == 0 else "nearest-exact"
    return [
        UpsampleCase(shape, (size, size), layout, dtype, group, method)
        for group, layout, dtype in itertools.product(["forward", "backward"], layouts, dtypes)
    ]


def upsample_cases(platform: str, quick: bool = False) -> list[UpsampleCase]:
    """The rows of a platform ("gpu" or "cpu"); ``quick`` keeps one shape and two dtypes."""
    both, first, three = ["NCHW", "NHWC"], ["NCHW"], ["float32", "float16", "bfloat16"]
    if platform == "gpu":
        cases = [
            *_upsample((16, 64, 160, 160), 320, both, three),
            *_upsample((8, 320, 64, 64), 128, both, three),  # a diffusion UNet's decoder
            *_upsample((16, 32, 80, 80), 160, both, three),  # the shape of OneFlow's article
            *_upsample((8, 64, 128, 128), 512, first, three[:2]),
            *_upsample((16, 64, 160, 160), 224, first, three[:2]),
            *_upsample((16, 64, 160, 160), 480, first, three[:2]),
        ]
    else:
        cases = [
            *_upsample((4, 32, 80, 80), 160, both, three),
            *_upsample((2, 64, 64, 64), 128, both, three),
            *_upsample((2, 32, 64, 64), 192, both, three[:1]),
            *_upsample((4, 32, 80, 80), 112, first, three[:2]),
        ]
    if quick:
        cases = [c for c in cases if c.shape == cases[0].shape and c.dtype in three[:2]]
    return sorted(cases, key=lambda case: case.group != "forward")


CASES: dict[str, Callable[[str, bool], list[Any]]] = {"upsample": upsample_cases}
"""The table of every suite: ``CASES[suite](platform, quick)``."""
