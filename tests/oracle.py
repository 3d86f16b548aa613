"""What the ops compute, in NumPy, written apart from the package it judges."""

import numpy as np


def source_indices(n_in: int, n_out: int, method: str) -> np.ndarray:
    """The input index that each output index reads, in Python's unbounded integers."""
    if method == "nearest":
        indices = [i * n_in // n_out for i in range(n_out)]
    elif method == "nearest-exact":
        indices = [(2 * i + 1) * n_in // (2 * n_out) for i in range(n_out)]
    else:
        raise AssertionError(method)
    return np.array(indices, dtype=np.int64)


def spatial_axis(ndim: int, data_format: str) -> int:
    """The axis of H; W is the next one."""
    return {"NCHW": ndim - 2, "NHWC": ndim - 3}[data_format]


def resized(shape: tuple[int, ...], size: tuple[int, int], data_format: str) -> tuple[int, ...]:
    axis = spatial_axis(len(shape), data_format)
    return (*shape[:axis], *size, *shape[axis + 2 :])


def upsample_nearest2d(x, size, method="nearest", data_format="NCHW") -> np.ndarray:
    x = np.asarray(x)
    axis = spatial_axis(x.ndim, data_format)
    for a, n_out in zip((axis, axis + 1), size, strict=True):
        every = [slice(None)] * x.ndim
        every[a] = source_indices(x.shape[a], n_out, method)
        x = x[tuple(every)]
    return x


def upsample_nearest2d_adjoint(dy, size, method="nearest", data_format="NCHW") -> np.ndarray:
    """The transpose of upsample_nearest2d as a linear map: each dy is added to the pixel it was
    read from, one at a time, in double precision. `size` is that of the result."""
    dy = np.asarray(dy)
    axis = spatial_axis(dy.ndim, data_format)
    wide = np.complex128 if np.issubdtype(dy.dtype, np.complexfloating) else np.float64
    rows = source_indices(size[0], dy.shape[axis], method)
    cols = source_indices(size[1], dy.shape[axis + 1], method)
    dx = np.zeros(resized(dy.shape, size, data_format), wide)
    where = [slice(None)] * dy.ndim
    where[axis], where[axis + 1] = rows[:, None], cols[None, :]
    np.add.at(dx, tuple(where), dy.astype(wide))
    return dx
