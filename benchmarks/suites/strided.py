"""Functions of rows along the second of three axes: their elements are not contiguous.

As in a softmax over the channels of images (n, channels, pixels), or a norm of them.
"""

import numpy as np

from ..harness import Case
from . import common, rows

_OPS = ("softmax", "logsumexp", "layer_norm")
_SHAPES = {
    "gpu": [
        (1, 1000, 64),
        (1, 4096, 1024),
        (8, 21, 262144),
        (64, 768, 196),
        (32, 96, 3136),
        (16, 2048, 512),
        (128, 512, 8),
        (8, 50000, 16),
    ],
    "cpu": [(4, 21, 16384), (8, 256, 196), (2, 2048, 64)],
}


def cases(platform: str) -> list[Case]:
    return [
        rows.case(name, dims, dtype, group, axis=1)
        for name in _OPS
        for dims in _SHAPES[platform]
        for dtype in ("float32", "bfloat16")
        for group in ("forward", rows.GRADIENT)
    ]


def draw(rng: np.random.Generator, largest: int) -> Case:
    """A random case. Rows have at least 4 elements, because short norms are rounding errors."""
    names = ("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm")
    name, dtype = common.pick(rng, names), common.pick(rng, common.FLOATS)
    elements = max(8, common.random_size(rng, largest) // (4 * common.itemsize(dtype)))
    n = max(4, min(elements // 2, common.random_dimension(rng, 2 ** rng.uniform(2, 14))))
    inner = max(2, min(elements // n, common.random_dimension(rng, 2 ** rng.uniform(1, 16))))
    dims = (max(1, elements // n // inner), n, inner)
    return rows.case(name, dims, dtype, common.pick(rng, ("forward", rows.GRADIENT)), axis=1)
