"""One row for each op and variant that the table-driven tests (transformations, lowering) share."""

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of one array, and the same function in plain jnp."""

    name: str
    f: Callable[[jax.Array], jax.Array]
    ref: Callable[[jax.Array], jax.Array]
    shape: tuple[int, ...]
    target: str  # the custom call that f lowers to
    grad_target: str  # the custom call that its gradient lowers to
    rtol: float = 0.0  # 0: equal bit for bit, on small integers

    def __str__(self) -> str:
        return self.name

    def inputs(self, *leading: int) -> np.ndarray:
        """Integers in float32, so small that cubes of results and their sums are exact."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return rng.integers(-2, 3, size=(*leading, *self.shape)).astype(np.float32)


def upsample_case(name, shape, method, data_format, *, out, **as_called) -> Case:
    axis = oracle.spatial_axis(len(shape), data_format)
    rows = oracle.source_indices(shape[axis], out[0], method)
    cols = oracle.source_indices(shape[axis + 1], out[1], method)

    def ref(x):
        return jnp.take(jnp.take(x, rows, axis=axis), cols, axis=axis + 1)

    f = functools.partial(
        jof.upsample_nearest2d, method=method, data_format=data_format, **as_called
    )
    targets = ("jof_upsample_nearest2d", "jof_upsample_nearest2d_backward")
    return Case(f"upsample_nearest2d-{name}", f, ref, shape, *targets)


CASES = (
    upsample_case("2x-NCHW", (2, 1, 3, 4), "nearest", "NCHW", scale_factor=2, out=(6, 8)),
    upsample_case("2x-NHWC", (2, 2, 3, 2), "nearest", "NHWC", scale_factor=2, out=(4, 6)),
    upsample_case("exact-NHWC", (3, 4, 2), "nearest-exact", "NHWC", size=(5, 7), out=(5, 7)),
    upsample_case("3x2-rank3", (2, 2, 3), "nearest", "NCHW", scale_factor=(3, 2), out=(6, 6)),
    upsample_case("down-rank5", (1, 2, 1, 5, 4), "nearest", "NCHW", size=(2, 3), out=(2, 3)),
)
