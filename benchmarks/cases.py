"""The shared case table: the shapes, dtypes and sizes that benchmarks measure and tests may reuse.

Rows are plain data; this module imports neither JAX nor the package, so that anything can read it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e5m2": "e5m2",
    "complex64": "c64",
    "complex128": "c128",
}
_ITEMSIZE = {"float8_e4m3fn": 1, "float8_e5m2": 1}


def itemsize(dtype: str) -> int:
    """Bytes of an element: the number in the dtype's name says the bits."""
    return _ITEMSIZE.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8


def short(dtype: str) -> str:
    """Such as ``bf16``."""
    return _SHORT.get(dtype, dtype)


SWEEP = "sweep"
"""The group of the rows of one op over all sizes, whose ``variant`` is the size of the array."""


def size(nbytes: int) -> str:
    """A number of bytes that is a whole number of KiB, MiB or GiB, such as ``64 MiB``."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << bits:
            return f"{nbytes >> bits} {unit}"
    return f"{nbytes >> 10} KiB"


def sweep_sizes(platform: str, quick: bool) -> list[int]:
    """The bytes of the arrays of a sweep: from 1 KiB, which a launch outlasts, to 1 GiB."""
    largest = 30 if platform == "gpu" else 26
    return [1 << bits for bits in ((10, 20) if quick else range(10, largest + 1, 2))]


class Case(Protocol):
    """What the harness, the table and the report need to know of a case of any op."""

    @property
    def name(self) -> str:
        """Unique among the cases of a suite; ``--case`` looks for its text in it."""
        ...

    @property
    def op(self) -> str:
        """What is computed; rows of the tables that compare ops."""
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

    Group "sweep" is the call again, over sizes of the large image. ``shape`` is the small image as
    (N, C, H, W) and ``size`` the large one's (H, W), whatever the layout.
    """

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    layout: str = "NCHW"
    dtype: str = "float32"
    group: str = "forward"
    method: str = "nearest"
    op: str = "upsample_nearest2d"

    @property
    def factor(self) -> int | None:
        """The scale where it is one integer, else None."""
        (_, _, h, w), (p, q) = self.shape, self.size
        return p // h if p % h == 0 and q % w == 0 and p // h == q // w else None

    @property
    def variant(self) -> str:
        """Twofold, which has kernels of its own, other integers, and the rest."""
        if self.group == SWEEP:
            return size(math.prod(self.large) * itemsize(self.dtype))
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
        return (math.prod(self.small) + math.prod(self.large)) * itemsize(self.dtype)

    @property
    def name(self) -> str:
        """Such as ``fwd-16x64x160x160-x2-NCHW-f16``."""
        scale = f"x{self.factor}" if self.factor else f"to{self.size[0]}"
        way = {"forward": "fwd", "backward": "bwd"}.get(self.group, self.group)
        shape = "x".join(map(str, self.shape))
        return f"{way}-{shape}-{scale}-{self.layout}-{short(self.dtype)}"

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
    cases.sort(key=lambda case: case.group != "forward")
    return cases + [_upsample_sweep(nbytes) for nbytes in sweep_sizes(platform, quick)]


def _upsample_sweep(nbytes: int) -> UpsampleCase:
    """Twofold to so many bytes of bf16: images of 64 by 64 or less, in batches of 64 channels."""
    bits = (nbytes // 8).bit_length() - 1  # of the small image's elements
    h, w = 1 << min(6, bits // 2), 1 << min(6, bits - bits // 2)
    images = (nbytes // 8) // (h * w)
    shape = (max(1, images // 64), min(64, images), h, w)
    return UpsampleCase(shape, (2 * h, 2 * w), dtype="bfloat16", group=SWEEP)


# ---- elementwise ----


@dataclass(frozen=True)
class Traffic:
    """How many arrays an elementwise op moves, and how many conditions of a byte an element.

    No number where the derivative moves nothing, or is an op that has its own row.
    """

    forward: int
    derivative: int | None
    conditions: int = 0


_UNARY, _BINARY = Traffic(2, 3), Traffic(3, 5)
ELEMENTWISE = {
    "relu": _UNARY,
    "leaky_relu": _UNARY,
    "elu": _UNARY,
    "gelu_tanh": _UNARY,
    "gelu_erf": _UNARY,
    "sigmoid": _UNARY,
    "silu": _UNARY,
    "tanh": _UNARY,
    "softplus": _UNARY,
    "hard_swish": _UNARY,
    "mish": _UNARY,
    "scale": Traffic(2, 2),  # the cotangent, scaled
    "scale_traced": Traffic(2, None),
    "add": Traffic(3, None),
    "subtract": Traffic(3, None),
    "multiply": _BINARY,
    "divide": _BINARY,
    "maximum": _BINARY,
    "minimum": _BINARY,
    "fma": Traffic(4, 5),  # the third cotangent is the result's own
    "where": Traffic(3, 3, conditions=1),
    "swiglu": _BINARY,
    "geglu_tanh": _BINARY,
    "geglu_erf": _BINARY,
}
"""The ops of the elementwise suite, and the arrays that each reads and writes."""


@dataclass(frozen=True)
class ElementwiseCase:
    """An op (group "forward") or its pullback alone (group "derivative") on arrays of a size.

    Group "sweep" is the forward op over sizes. ``variant`` says the size, such as "512 MiB".
    """

    op: str
    dtype: str
    elements: int
    variant: str
    group: str = "forward"

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once."""
        traffic = ELEMENTWISE[self.op]
        arrays = traffic.derivative if self.group == "derivative" else traffic.forward
        return self.elements * ((arrays or 0) * itemsize(self.dtype) + traffic.conditions)

    @property
    def name(self) -> str:
        """Such as ``vjp-silu-512MiB-f16``."""
        way = {"forward": "fwd", "derivative": "vjp"}.get(self.group, self.group)
        return f"{way}-{self.op}-{_compact(self.variant)}-{short(self.dtype)}"


def _compact(variant: str) -> str:
    """Such as "512MiB", or "4M" of "4M elements"."""
    return variant.removesuffix(" elements").replace(" ", "")


def _sizes(platform: str, dtype: str) -> list[tuple[int, str]]:
    """Elements, and what the size is called: on a GPU it is that of the first array."""
    if platform == "cpu":
        return [(4 << 20, "4M elements")]
    return [(nbytes // itemsize(dtype), size(nbytes)) for nbytes in (512 << 20, 64 << 20)]


def elementwise_cases(platform: str, quick: bool = False) -> list[ElementwiseCase]:
    """The rows of a platform; ``quick`` keeps three ops, two dtypes and the smaller arrays.

    Rows of one size and dtype are neighbours: they share their inputs.
    """
    cases = [
        ElementwiseCase(op, dtype, *_sizes(platform, dtype)[i], group)
        for i in range(len(_sizes(platform, "float32")))
        for dtype in ("float32", "float16", "bfloat16")
        for group in ("forward", "derivative")
        for op, traffic in ELEMENTWISE.items()
        if group == "forward" or traffic.derivative
    ]
    if quick:
        smallest = cases[-1].variant
        ops, dtypes = ("gelu_tanh", "multiply", "where"), ("float32", "float16")
        cases = [c for c in cases if c.variant == smallest and c.op in ops and c.dtype in dtypes]
    cases += [
        ElementwiseCase("gelu_tanh", dtype, nbytes // itemsize(dtype), size(nbytes), SWEEP)
        for dtype in ("float32", "bfloat16")
        for nbytes in sweep_sizes(platform, quick)
    ]
    return cases


# ---- cast ----


@dataclass(frozen=True)
class CastCase:
    """A conversion of an array of ``dtype`` to ``new_dtype``; ``variant`` says the input's size."""

    dtype: str
    new_dtype: str
    elements: int
    variant: str
    group: str = "cast"

    @property
    def op(self) -> str:
        """Such as "f32 to f16"."""
        return f"{short(self.dtype)} to {short(self.new_dtype)}"

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once."""
        return self.elements * (itemsize(self.dtype) + itemsize(self.new_dtype))

    @property
    def name(self) -> str:
        """Such as ``f32-to-f16-512MiB``."""
        name = f"{self.op.replace(' ', '-')}-{_compact(self.variant)}"
        return f"{SWEEP}-{name}" if self.group == SWEEP else name


_CAST_PAIRS = [
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float32", "int8"),
    ("float16", "int8"),
    ("bfloat16", "int8"),
    ("float32", "float64"),
    ("float32", "int32"),
]


def cast_cases(platform: str, quick: bool = False) -> list[CastCase]:
    """The rows of a platform, both directions of every pair; ``quick`` keeps one pair and size."""
    pairs = sorted(pair for a, b in _CAST_PAIRS for pair in ((a, b), (b, a)))
    cases = [
        CastCase(a, b, *_sizes(platform, a)[i])
        for i in range(len(_sizes(platform, "float32")))
        for a, b in pairs
    ]
    if quick:
        last = cases[-1].variant
        cases = [c for c in cases if c.variant == last and {c.dtype, c.new_dtype} == _QUICK_CAST]
    return cases + [
        CastCase("float32", "bfloat16", nbytes // 4, size(nbytes), SWEEP)
        for nbytes in sweep_sizes(platform, quick)
    ]


_QUICK_CAST = {"float32", "float16"}


# ---- the gelu ladder ----


@dataclass(frozen=True)
class LadderCase:
    """The article's gelu kernels of one dtype beside ours, on one array."""

    dtype: str
    elements: int
    group: str = "ladder"
    op: str = "gelu_tanh"

    @property
    def variant(self) -> str:
        """The number of elements and the size of the input."""
        return f"{self.elements >> 20}M elements, {size(self.elements * itemsize(self.dtype))}"

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once."""
        return 2 * self.elements * itemsize(self.dtype)

    @property
    def name(self) -> str:
        """Such as ``ladder-16M-f16``."""
        return f"ladder-{self.elements >> 20}M-{short(self.dtype)}"


def ladder_cases(platform: str, quick: bool = False) -> list[LadderCase]:
    """The article's input is 64 MiB of f32: as many f16 elements, and as many bytes of them.

    The kernels run on GPUs alone.
    """
    if platform != "gpu":
        return []
    cases = [
        LadderCase("float32", 16 << 20),
        LadderCase("float16", 16 << 20),
        LadderCase("float16", 32 << 20),
    ]
    return cases[:2] if quick else cases


# ---- scatter ----


def count(n: int) -> str:
    """Such as ``16M`` and ``64k``, which are powers of two, and ``10000``."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n % size == 0 and n > size >> (unit == "M"):
            return f"{n // size}{unit}"
    return str(n)


@dataclass(frozen=True)
class ScatterCase:
    """``rows`` rows of ``width`` elements that belong to ``segments`` rows, as ``ids`` has it.

    The groups: "segment_sum"; "scatter_add" into an operand, and "scatter_add in place" into one
    that is donated; "embedding gradient" and "embedding" itself; "sweep", segment_sum over sizes of
    the rows. The ids: "uniform"; "hot", half of
    them one segment; "sorted"; "skewed", ``segments * u**4`` of a uniform u, somewhat like words.
    """

    group: str
    rows: int
    width: int
    segments: int
    ids: str
    dtype: str

    @property
    def op(self) -> str:
        """Such as "16M x 1 to 1024, uniform"; of a sweep the function."""
        if self.group == SWEEP:
            return self.function
        return f"{count(self.rows)} x {self.width} to {count(self.segments)}, {self.ids}"

    @property
    def variant(self) -> str:
        """What the ids are like."""
        if self.group == SWEEP:
            return size(self.rows * self.width * itemsize(self.dtype))
        return self.ids

    @property
    def function(self) -> str:
        """What is called, such as "segment_sum"."""
        return "segment_sum" if self.group == SWEEP else self.group

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once.

        Of a table that is looked up, and of one that is added to in place, these are at most as
        many rows as there are ids.
        """
        rows, table = self.rows * self.width, self.segments * self.width
        hit = min(self.rows, self.segments) * self.width
        elements = {
            "segment_sum": rows + table,
            "scatter_add": rows + 2 * table,
            "scatter_add in place": rows + 2 * hit,
            "embedding gradient": rows + table,
            "embedding": hit + rows,
        }[self.function]
        return elements * itemsize(self.dtype) + 4 * self.rows

    @property
    def name(self) -> str:
        """Such as ``segment_sum-16Mx1-to-1024-uniform-f16``."""
        sizes = f"{count(self.rows)}x{self.width}-to-{count(self.segments)}"
        return f"{self.group.replace(' ', '_')}-{sizes}-{self.ids}-{short(self.dtype)}"


_SCATTER = {
    "gpu": [
        ("segment_sum", 16 << 20, 1, 1024, "uniform"),
        ("segment_sum", 16 << 20, 1, 1 << 20, "uniform"),
        ("segment_sum", 16 << 20, 1, 1 << 20, "sorted"),
        ("segment_sum", 1 << 20, 128, 10_000, "uniform"),
        ("segment_sum", 1 << 20, 128, 10_000, "hot"),
        ("segment_sum", 1 << 20, 128, 10_000, "sorted"),
        ("scatter_add", 1 << 20, 128, 10_000, "uniform"),
        ("scatter_add in place", 1 << 20, 128, 10_000, "uniform"),
        ("scatter_add", 4096, 2048, 128 << 10, "uniform"),
        ("scatter_add in place", 4096, 2048, 128 << 10, "uniform"),
        ("embedding gradient", 256 << 10, 2048, 128 << 10, "skewed"),
        ("embedding gradient", 256 << 10, 2048, 128 << 10, "uniform"),
        ("embedding", 256 << 10, 2048, 128 << 10, "skewed"),
        ("embedding", 256 << 10, 2048, 128 << 10, "uniform"),
    ],
    "cpu": [
        ("segment_sum", 1 << 20, 1, 1024, "uniform"),
        ("segment_sum", 1 << 20, 1, 64 << 10, "uniform"),
        ("segment_sum", 1 << 20, 1, 64 << 10, "sorted"),
        ("segment_sum", 64 << 10, 128, 1000, "uniform"),
        ("segment_sum", 64 << 10, 128, 1000, "hot"),
        ("segment_sum", 64 << 10, 128, 1000, "sorted"),
        ("scatter_add", 64 << 10, 128, 1000, "uniform"),
        ("scatter_add in place", 64 << 10, 128, 1000, "uniform"),
        ("scatter_add", 1024, 1024, 16 << 10, "uniform"),
        ("scatter_add in place", 1024, 1024, 16 << 10, "uniform"),
        ("embedding gradient", 8 << 10, 1024, 16 << 10, "skewed"),
        ("embedding gradient", 8 << 10, 1024, 16 << 10, "uniform"),
        ("embedding", 8 << 10, 1024, 16 << 10, "skewed"),
        ("embedding", 8 << 10, 1024, 16 << 10, "uniform"),
    ],
}


def scatter_cases(platform: str, quick: bool = False) -> list[ScatterCase]:
    """The rows of a platform; ``quick`` keeps what is summed over all orders of ids, in f16."""
    cases = [
        ScatterCase(*sizes, dtype)
        for sizes in _SCATTER[platform]
        for dtype in ("float32", "float16", "bfloat16")
    ]
    if quick:
        cases = [c for c in cases if c.dtype == "float16" and c.group == "segment_sum"]
    return cases + [_scatter_sweep(nbytes // 256) for nbytes in sweep_sizes(platform, quick)]


def _scatter_sweep(rows: int) -> ScatterCase:
    """Rows of 128 in bf16, some 64 a segment: messages of a graph."""
    return ScatterCase(SWEEP, rows, 128, max(1, rows // 64), "uniform", "bfloat16")


# ---- the atomics of an article ----


@dataclass(frozen=True)
class AtomicCase:
    """The inner product of two f16 vectors, every product added to one address."""

    elements: int
    dtype: str = "float16"
    group: str = "atomics"
    op: str = "inner product"

    @property
    def variant(self) -> str:
        """The number of elements."""
        return f"{count(self.elements)} elements"

    @property
    def bytes(self) -> int:
        """Each input byte read once; the result is nothing."""
        return 2 * self.elements * itemsize(self.dtype)

    @property
    def name(self) -> str:
        """Such as ``atomics-32M-f16``."""
        return f"atomics-{count(self.elements)}-{short(self.dtype)}"


def atomic_cases(platform: str, quick: bool = False) -> list[AtomicCase]:
    """The article's 32M elements, and so few that none of its forms takes long; on GPUs alone."""
    sizes = [16 << 10, 256 << 10, 4 << 20, 32 << 20] if platform == "gpu" else []
    return [AtomicCase(n) for n in (sizes[:1] if quick else sizes)]


# ---- permute ----


@dataclass(frozen=True)
class PermuteCase:
    """A permutation of an array's axes: of the group "table", or of the "article"'s figures.

    ``variant`` says what moves, such as "transpose"; of the article's, the axes. Group "sweep" is
    the transpose of a matrix over its sizes.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    variant: str
    dtype: str
    group: str = "table"

    @property
    def op(self) -> str:
        """Such as "(1024, 256, 256) by (1, 0, 2)"; of a sweep "transpose"."""
        if self.group == SWEEP:
            return "transpose"
        return f"{self.shape} by {self.axes}"

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once."""
        return 2 * math.prod(self.shape) * itemsize(self.dtype)

    @property
    def name(self) -> str:
        """Such as ``table-1024x256x256-102-f32``."""
        shape, axes = "x".join(map(str, self.shape)), "".join(map(str, self.axes))
        return f"{self.group}-{shape}-{axes}-{short(self.dtype)}"


_KEPT, _TRANSPOSE, _IMAGES, _ORDER = "last axis kept", "transpose", "images", "other order"
_PERMUTE = {
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


def permute_cases(platform: str, quick: bool = False) -> list[PermuteCase]:
    """The rows of a platform; ``quick`` keeps one shape and two dtypes.

    On a GPU elements of 8 and 16 bytes join where whole rows move and in transposes, and there are
    the article's cases: f32 and f16 of 16 to 128 MiB. Its figures do not survive in its text; the
    shapes are a guess.
    """
    gpu = platform == "gpu"
    narrow, wide = ["float32", "float16", "int8"], ["complex64", "complex128"]
    cases = [
        PermuteCase(shape, axes, variant, dtype)
        for shape, axes, variant in _PERMUTE[platform]
        for dtype in [*narrow, *(wide if gpu and variant in (_KEPT, _TRANSPOSE) else [])]
    ]
    if quick:
        cases = [c for c in cases if c.shape == cases[0].shape and c.dtype in narrow[:2]]
    elif gpu:
        for axes, dtype in itertools.product([(1, 0, 2), (0, 2, 1)], narrow[:2]):
            for nbytes in (16 << 20, 32 << 20, 64 << 20, 128 << 20):
                shape = nbytes // itemsize(dtype) >> 16, 256, 256
                cases.append(PermuteCase(shape, axes, str(axes), dtype, "article"))
    return cases + [_permute_sweep(nbytes) for nbytes in sweep_sizes(platform, quick)]


def _permute_sweep(nbytes: int) -> PermuteCase:
    """A matrix of so many bytes of bf16, square or twice as wide as high."""
    bits = (nbytes // 2).bit_length() - 1
    shape = 1 << bits // 2, 1 << bits - bits // 2
    return PermuteCase(shape, (1, 0), size(nbytes), "bfloat16", SWEEP)


# ---- kernels of users ----

WIDTH = 4096
"""The last axis of the arrays of the kernels suite, and so the length of a row."""


@dataclass(frozen=True)
class Expression:
    """What a kernel of the suite computes, the arrays that it moves, and whether it reads a row."""

    text: str
    arrays: int
    row: bool = False
    group: str = "forward"


KERNELS = {
    "silu": Expression("silu(x)", 2),
    "multiply": Expression("x * y", 3),
    "chain": Expression("max(h * sigmoid(h), 0) * 0.5 + tanh(h), h = x * s + b", 2),
    "bias_gelu": Expression("gelu(x * scale + bias)", 2, row=True),
    "residual_gelu": Expression("residual + alpha * gelu(x * scale + bias)", 3, row=True),
    "squared_diff": Expression("(x - y) * (x - y)", 3),
    "squared_diff_vjp": Expression("gradient of (x - y) * (x - y)", 5, group="derivative"),
}
"""The expressions of the kernels suite."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel from an expression, on arrays of a size; ``variant`` says that of the first."""

    kernel: str
    dtype: str
    elements: int
    variant: str

    @property
    def op(self) -> str:
        """The expression."""
        return KERNELS[self.kernel].text

    @property
    def group(self) -> str:
        """The value, "forward", or the pullback alone, "derivative"."""
        return KERNELS[self.kernel].group

    @property
    def bytes(self) -> int:
        """Each input byte read once and each output byte written once; scalars are nothing."""
        about = KERNELS[self.kernel]
        return (about.arrays * self.elements + WIDTH * about.row) * itemsize(self.dtype)

    @property
    def name(self) -> str:
        """Such as ``chain-256MiB-bf16``."""
        return f"{self.kernel}-{_compact(self.variant)}-{short(self.dtype)}"


def kernel_cases(platform: str, quick: bool = False) -> list[KernelCase]:
    """The rows of a platform; ``quick`` keeps two kernels and dtypes.

    Rows of one dtype are neighbours: they share their inputs.
    """
    cases = []
    for dtype in ("float32", "bfloat16", "float16"):
        elements, variant = (256 << 20) // itemsize(dtype), size(256 << 20)
        if platform == "cpu":
            elements, variant = _sizes(platform, dtype)[0]
        cases += [KernelCase(kernel, dtype, elements, variant) for kernel in KERNELS]
    if quick:
        kernels, dtypes = ("silu", "chain"), ("float32", "bfloat16")
        cases = [c for c in cases if c.kernel in kernels and c.dtype in dtypes]
    return cases


# ---- whole programs ----

MODELS = ("unet", "vit", "graph", "language")
"""The programs of the models suite."""


@dataclass(frozen=True)
class ModelCase:
    """A training step of a small program; ``variant`` is its size: "full", "small" or "tiny"."""

    op: str
    variant: str
    dtype: str = "bfloat16"
    group: str = "step"
    bytes: int = 0  # not known: neither rates nor shares of a copy

    @property
    def name(self) -> str:
        """Such as ``unet-full-bf16``."""
        return f"{self.op}-{self.variant}-{short(self.dtype)}"


def model_cases(platform: str, quick: bool = False) -> list[ModelCase]:
    """Every program once: "full" on a GPU, "small" on a CPU, "tiny" if ``quick``."""
    variant = "tiny" if quick else "full" if platform == "gpu" else "small"
    return [ModelCase(model, variant) for model in MODELS]


CASES: dict[str, Callable[[str, bool], list[Any]]] = {
    "upsample": upsample_cases,
    "elementwise": elementwise_cases,
    "cast": cast_cases,
    "gelu_ladder": ladder_cases,
    "scatter": scatter_cases,
    "atomic_add": atomic_cases,
    "permute": permute_cases,
    "kernels": kernel_cases,
    "models": model_cases,
}
"""The table of every suite: ``CASES[suite](platform, quick)``."""
