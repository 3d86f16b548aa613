"""Error bounds of elementwise results against float64, on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Sampled = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]  # of arguments and of results
_SAMPLES = 32_768
_TINY = 1e-36  # results below it may be 0


def samples(args: Sequence[Any], out: Any) -> tuple[list[Any], list[Any]]:
    """Returns some elements of arrays of equal size, on the device.

    The stride is odd, so that samples come from every position in a pack. Scalars are repeated.
    """
    results = jax.tree.leaves(out)
    n = results[0].size
    step = (n // _SAMPLES) | 1

    def strided(x: Any) -> Any:
        x = jnp.broadcast_to(x, results[0].shape) if x.size < n else x
        return x.reshape(-1)[::step]

    return [strided(x) for x in args], [strided(y) for y in results]


def doubles(sampled: Any) -> Any:
    """Returns samples in float64, and conditions unchanged."""

    def widened(x: Any) -> Any:
        return np.asarray(x, bool if x.dtype == bool else np.float64)

    return jax.tree.map(widened, sampled)


def ulp(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between neighbouring numbers of the dtype at ``exact``."""
    about = jnp.finfo(dtype)
    exponent = np.where(exact == 0, int(about.minexp), np.frexp(exact)[1] - 1)
    exponent = np.maximum(exponent, int(about.minexp))
    return np.asarray(np.ldexp(float(about.eps), exponent))


def worst(result: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> str | None:
    """Describes the element that is farthest beyond its bound; None if all are within bounds."""
    result, exact, bound = map(np.ravel, (result, exact, bound))
    with np.errstate(invalid="ignore"):
        error = np.abs(result.astype(np.float64) - exact)
    wrong = ~(error <= bound)
    if not wrong.any():
        return None
    i = int(np.argmax(np.where(wrong, error / np.maximum(bound, 1e-300), 0.0)))
    return (
        f"{int(wrong.sum())} of {wrong.size} samples are off: "
        f"{result[i]} instead of {exact[i]:.9g}, {error[i] / max(bound[i], 1e-300):.3g} x the bound"
    )


class Exact(NamedTuple):
    """An exact result, the size of the terms that may cancel in it, and an activation's argument.

    A result is in a tail if it is small compared with these two. A ``product`` has an activation as
    a factor.
    """

    value: np.ndarray
    cancelling: np.ndarray | float = 0.0
    argument: np.ndarray | float = 0.0
    product: bool = True


def bound(exact: Exact, dtype: Any) -> np.ndarray:
    """The allowed error: 2 ulp in 16-bit dtypes, 4 ulp in f32, 1e-4 relative in tails of f32.

    A product inherits a factor's relative error, at most 4 ulp of the factor, and is rounded
    itself. Measured in ulp of the product, the inherited error may be up to eight.
    """
    value, cancelling, argument, product = exact
    rounding = 8 * np.ldexp(1.0, -24) * np.abs(cancelling) + _TINY
    unit = ulp(value, dtype)
    if jnp.finfo(dtype).bits == 16:
        return np.asarray(2 * unit + rounding)
    carried = 4 * float(jnp.finfo(dtype).eps) * np.abs(value) + 0.5 * unit
    tail = np.abs(value) < np.maximum(np.abs(cancelling), np.abs(argument)) / 1024
    allowed = np.where(tail, 1e-4 * np.abs(value), carried if product else 4 * unit)
    return np.asarray(allowed + rounding)


def wrong(out: Sequence[np.ndarray], expected: Sequence[Exact], dtype: Any) -> str | None:
    for i, (exact, y) in enumerate(zip(expected, out, strict=True)):
        if text := worst(y, exact.value, bound(exact, dtype)):
            return f"result {i}: {text}"
    return None


def same(found: np.ndarray, expected: np.ndarray) -> str | None:
    """Describes the first element that is not equal; None if all are. NaN equals NaN."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"a result of {found.dtype}, {found.shape}"
    equal = (found == expected) | ((found != found) & (expected != expected))
    if equal.all():
        return None
    i = np.unravel_index(np.argmin(equal), equal.shape)
    count = f"{int((~equal).sum())} of {equal.size}"
    return f"{count} samples are off: {found[i]} instead of {expected[i]}"
