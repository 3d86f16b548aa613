"""What the articles say: their figures, as they give them, with the chips they were measured on.

Nothing here was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Article:
    """Where figures come from."""

    title: str
    english: str
    authors: str
    chip: str

    @property
    def source(self) -> str:
        """One line that names it."""
        return f"{self.authors}: *{self.title}* ({self.english})"


ELEMENTWISE = Article(
    "高效、易用、可拓展我全都要: OneFlow CUDA Elementwise 模板库的设计优化思路",
    "the design of OneFlow's CUDA elementwise template",
    "Zheng Zekang, Yao Chi, Guo Ran and Liu Juncheng",
    "A100 40 GB",
)
LADDER = Article(
    "记一次 gelu 算子优化的学习过程",
    "learning to optimise a gelu",
    "HeduAiDev, whose code is `gelu.cu` of the repository cudaLearn",
    "RTX 2080 Ti",
)
NOTES = Article(
    "BBuf 的 CUDA 笔记",
    "CUDA notes: OneFlow's elementwise template, FastAtomicAdd and UpsampleNearest2d",
    "BBuf (GiantPandaCV)",
    "A100",
)
PERMUTE = Article(
    "如何实现比 PyTorch 快 6 倍的 Permute/Transpose 算子?",
    "a permute up to six times as fast as PyTorch's",
    "Zheng Zekang, Liu Juncheng, Yao Chi and Guo Ran",
    "A100 40 GB",
)

# ---- ELEMENTWISE: the time of PyTorch's cast of f32 to f16 over OneFlow's, "at all shapes" ----

CAST_GAIN = (1.8, 1.9)

# ---- LADDER: on 64 MB of f32, and as many elements of f16 ----

LADDER_SIZE = "16M elements"
LADDER_US = {
    "scalar": 257.70,
    "vec2": 249.79,
    "vec4": 249.15,
    "half2": 136.83,
    "vec2 half2": 127.23,
    "vec4 half2": 125.82,
    "cute": 125.75,
}
LADDER_REQUESTS = {"scalar": 524288, "vec2": 262144, "vec4": 131072}
LADDER_SECTORS = 2097152
LADDER_ERROR = 0.001  # of half arithmetic

# ---- NOTES ----


class Figure(NamedTuple):
    """A time, and the share of the chip's bandwidth."""

    us: float
    share: float


NAIVE, PACKED = "naive elementwise", "OneFlow elementwise"
MULTIPLY_CHIP = "A100 PCIe 40 GB"
MULTIPLY = {
    ("float32", NAIVE): Figure(298.46, 0.8588),
    ("float32", PACKED): Figure(284.0, 0.8942),
    ("float16", NAIVE): Figure(237.28, 0.5255),
    ("float16", PACKED): Figure(140.74, 0.8731),
}

ATOMICS_CHIP = "a chip that is not named"
ATOMICS_SIZE = "32M elements"
ATOMICS_MS = {"half": 422.36, "half2": 137.02, "FastAtomicAdd": 137.01}

PYTORCH, ONEFLOW = "PyTorch", "OneFlow"
UPSAMPLE_SHAPE = (16, 32, 80, 80)  # NCHW, twofold
UPSAMPLE = {
    (PYTORCH, "float32", "forward"): Figure(111.42, 0.2830),
    (PYTORCH, "float32", "backward"): Figure(65.12, 0.6016),
    (ONEFLOW, "float32", "forward"): Figure(61.44, 0.5218),
    (ONEFLOW, "float32", "backward"): Figure(50.56, 0.7766),
    (PYTORCH, "float16", "forward"): Figure(100.38, 0.1699),
    (PYTORCH, "float16", "backward"): Figure(57.38, 0.3156),
    (ONEFLOW, "float16", "forward"): Figure(35.36, 0.4326),
    (ONEFLOW, "float16", "backward"): Figure(40.26, 0.4482),
}

# ---- PERMUTE: PyTorch's time over OneFlow's, from 16 to 128 MB; charts are not in its text ----


class Gain(NamedTuple):
    """The least and the most that is claimed, of a permutation in some dtypes."""

    axes: str
    dtypes: tuple[str, ...]
    least: float | None
    most: float


PERMUTE_GAINS = (
    Gain("(1, 0, 2)", ("float32", "float16"), 1.24, 1.4),
    Gain("(0, 2, 1)", ("float32",), 3.0, 3.2),
    Gain("(0, 2, 1)", ("float16",), None, 6.3),
)
