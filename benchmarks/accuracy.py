"""Samples of results against float64, on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sampled = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]  # of arguments and of results
_SAMPLES = 32_768


def samples(args: Sequence[Any], out: Any) -> tuple[list[Any], list[Any]]:
    """Returns some elements of arrays of one size, on the device.

    The stride is odd, so that every place in a pack is seen. Scalars are repeated.
    """
    results = jax.tree.leaves(out)
    n = results[0].size
    step = (n // _SAMPLES) | 1

    def strided(x: Any) -> Any:
        x = jnp.broadcast_to(x, results[0].shape) if x.size < n else x
        return x.reshape(-1)[::step]

    return [strided(x) for x in args], [strided(y) for y in results]


def doubles(sampled: Any) -> Any:
    """Returns samples in float64, and conditions as they are."""

    def widened(x: Any) -> Any:
        return np.asarray(x, bool if x.dtype == bool else np.float64)

    return jax.tree.map(widened, sampled)


def ulp(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance of neighbours among the dtype's numbers where ``exact`` is."""
    about = jnp.finfo(dtype)
    exponent = np.where(exact == 0, int(about.minexp), np.frexp(exact)[1] - 1)
    exponent = np.maximum(exponent, int(about.minexp))
    return np.asarray(np.ldexp(float(about.eps), exponent))


def worst(result: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> str | None:
    """Says which element is farthest beyond its bound, if one is."""
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


def wrong(
    found: Sequence[Any], exact: Sequence[Any], args: Sequence[Any], dtype: Any
) -> str | None:
    """Says what is wrong with samples of some results, if anything is.

    Allowed are 4 ulp, and what float32, or an activation in 16 bits, loses of terms that cancel:
    those are as large as the product of the arguments, each taken for 1 at least.
    """
    terms = np.prod([np.maximum(np.abs(x), 1.0) for x in args], axis=0)
    lost = 2.0**-14 if jnp.finfo(dtype).bits == 16 else 2.0**-20
    for i, (y, value) in enumerate(zip(found, exact, strict=True)):
        if text := worst(y, value, 4 * ulp(value, dtype) + lost * terms):
            return f"result {i}: {text}"
    return None


def same(found: np.ndarray, expected: np.ndarray) -> str | None:
    """Says which element is not equal, if one is; NaN is NaN."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"a result of {found.dtype}, {found.shape}"
    equal = (found == expected) | ((found != found) & (expected != expected))
    if equal.all():
        return None
    i = np.unravel_index(np.argmin(equal), equal.shape)
    count = f"{int((~equal).sum())} of {equal.size}"
    return f"{count} samples are off: {found[i]} instead of {expected[i]}"
