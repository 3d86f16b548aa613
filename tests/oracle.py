"""NumPy formulas that several tests share, written independently of the package.

They compute which pixel is read, which row an index refers to, and how a number is rounded.
Formulas of single ops are in catalogue.py.
"""

import math

import jax.numpy as jnp
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
    """The transpose of upsample_nearest2d as a linear map, in double precision.

    Each element of dy is added to the pixel from which its output was read, one at a time. `size`
    is that of the result.
    """
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


# --- rounding -------------------------------------------------------------------------------------


def spacing(value: np.ndarray, dtype) -> np.ndarray:
    """The distance between neighbours of `dtype` at `value`: a unit in the last place."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.abs(value))
    return np.ldexp(1.0, np.maximum(exponent - 1, info.minexp) - info.nmant)


def rounded(value: np.ndarray, dtype) -> np.ndarray:
    """Doubles rounded to `dtype` once, to the nearest, ties to even.

    A conversion by NumPy's extension types may pass through float32 and round twice.
    """
    value = np.asarray(value, np.float64)
    finite = np.isfinite(value)
    unit = spacing(np.where(finite, value, 1), dtype)
    nearest = np.where(finite, np.rint(value / unit) * unit, value)
    with np.errstate(over="ignore"):  # beyond the largest number, the result is infinity
        return np.copysign(nearest, value).astype(dtype)


def rounded_sum(x: np.ndarray, y: np.ndarray, dtype) -> np.ndarray:
    """The exact sum of two doubles, rounded to `dtype` once.

    The double-precision sum is rounded to odd: if it is not exact, to the neighbour whose last bit
    is set. A second rounding to at least two fewer bits never takes that for a tie (Boldo and
    Melquiond, "When double rounding is odd").
    """
    total = x + y
    with np.errstate(invalid="ignore"):
        part = total - x
        lost = (x - (total - part)) + (y - part)  # total + lost is exact
        lost = np.where(np.isfinite(total), lost, 0)
    even = total.view(np.int64) % 2 == 0
    odd = np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return rounded(odd, dtype)


# --- sums and lookups of rows ---------------------------------------------------------------------


def named_rows(ids, size: int, wrap: bool, clip: bool) -> np.ndarray:
    """The row of each id, or -1 if it has none, in Python's unbounded integers."""
    rows = []
    for i in np.asarray(ids).reshape(-1).tolist():
        row = i + size if wrap and i < 0 else i
        row = min(max(row, 0), size - 1) if clip else row
        rows.append(row if 0 <= row < size else -1)
    return np.array(rows, np.int64).reshape(np.shape(ids))


def scatter_add(operand, rows, updates) -> np.ndarray:
    """Sums in double precision. Sums of integers are exact, modulo a power of two."""
    operand, updates = np.asarray(operand), np.asarray(updates)
    wide = {"i": np.uint64, "u": np.uint64, "c": np.complex128}.get(operand.dtype.kind, np.float64)
    total = operand.astype(wide)
    hit = rows >= 0
    np.add.at(total, rows[hit], updates.astype(wide)[hit])
    return total


def scatter_reduce(ufunc, operand, rows, updates) -> np.ndarray:
    """Maxima, minima or products in double precision."""
    result = np.asarray(operand).astype(np.float64)
    hit = rows >= 0
    ufunc.at(result, rows[hit], np.asarray(updates, np.float64)[hit])
    return result


def scatter_extremum_transpose(ufunc, ct, operand, rows, updates) -> tuple[np.ndarray, np.ndarray]:
    """The cotangents of operand and updates: values equal to the result share its cotangent."""
    result = scatter_reduce(ufunc, operand, rows, updates)
    shares = [np.asarray(operand == result, np.float64), np.zeros(np.shape(updates))]
    for place in np.argwhere(rows >= 0):
        shares[1][tuple(place)] = updates[tuple(place)] == result[rows[tuple(place)]]
    share = ct / np.maximum(scatter_add(shares[0], rows, shares[1]), 1)
    return shares[0] * share, shares[1] * gather_rows(share, rows, 0)


def gather_rows(table, rows, fill) -> np.ndarray:
    result = np.empty((*rows.shape, *table.shape[1:]), table.dtype)
    for place in np.ndindex(rows.shape):
        result[place] = fill if rows[place] < 0 else table[rows[place]]
    return result


# --- rows -----------------------------------------------------------------------------------------


def log_softmax(x, axis=-1) -> np.ndarray:
    shifted = x - np.max(x, axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis, keepdims=True))


def softmax(x, axis=-1) -> np.ndarray:
    e = np.exp(x - np.max(x, axis, keepdims=True))
    return e / np.sum(e, axis, keepdims=True)


def logsumexp(x, axis=-1) -> np.ndarray:
    peak = np.max(x, axis, keepdims=True)
    return (peak + np.log(np.sum(np.exp(x - peak), axis, keepdims=True))).squeeze(axis)


def cross_entropy(x, labels) -> np.ndarray:
    return -np.take_along_axis(log_softmax(x), labels[..., None], -1)[..., 0]


def normalized(x, center, epsilon=1e-6) -> tuple[np.ndarray, np.ndarray]:
    """The normalized array and 1 / the standard deviation; in long doubles, to test float64."""
    x = np.asarray(x, np.longdouble)
    centred = x - np.mean(x, -1, keepdims=True) if center else x
    rstd = 1 / np.sqrt(np.mean(centred**2, -1, keepdims=True) + epsilon)
    return np.float64(centred * rstd), np.float64(rstd)


def norm_vjp(x, scale, dy, center) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cotangents of x, scale and bias."""
    xhat, rstd = normalized(x, center)
    g = dy * scale
    dx = g - xhat * np.mean(g * xhat, -1, keepdims=True)
    dx = (dx - np.mean(g, -1, keepdims=True) if center else dx) * rstd
    rows = tuple(range(x.ndim - 1))
    return dx, np.sum(dy * xhat, rows), np.sum(dy, rows)


def group_norm(x, scale, bias, num_groups=0, silu=True) -> np.ndarray:
    """Group norm of images (n, ..., channels); by default with gcd(32, channels) groups."""
    y = _in_groups(x, num_groups or math.gcd(32, x.shape[-1]))[0] * scale + bias
    return y / (1 + np.exp(-y)) if silu else y


def group_norm_vjp(ct, x, scale, bias, num_groups=0, silu=True) -> tuple[np.ndarray, ...]:
    """The cotangents of x, scale and bias."""
    groups = num_groups or math.gcd(32, x.shape[-1])
    xhat, back = _in_groups(x, groups)
    y = xhat * scale + bias
    share = 1 / (1 + np.exp(-y))
    dy = ct * share * (1 + y * (1 - share)) if silu else ct
    rows = [rows_of_groups(a, groups) for a in (x, dy * scale)]
    dx = back(norm_vjp(rows[0], 1, rows[1], True)[0])
    pixels = tuple(range(x.ndim - 1))
    return dx, np.sum(dy * xhat, pixels), np.sum(dy, pixels)


def rows_of_groups(x, groups) -> np.ndarray:
    """Reshapes to (n, groups, pixels x channels of a group)."""
    n, channels = x.shape[0], x.shape[-1]
    split = np.reshape(x, (n, -1, groups, channels // groups))
    return np.moveaxis(split, 2, 1).reshape(n, groups, -1)


def _in_groups(x, groups):
    """`x` with its groups normalized, and a function that turns rows of groups into images."""
    n, channels = x.shape[0], x.shape[-1]

    def back(rows):
        split = rows.reshape(n, groups, -1, channels // groups)
        return np.moveaxis(split, 1, 2).reshape(x.shape)

    return back(normalized(rows_of_groups(x, groups), True)[0]), back
