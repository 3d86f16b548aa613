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


def value_bound(
    exact: np.ndarray, x: np.ndarray, dtype: Any, *, is_product: bool = False
) -> np.ndarray:
    """What is allowed of a value f(x): 2 ulp of 16 bits, 4 of f32 and 1e-4 in f32's tails.

    Or of a product with such a value.
    """
    if jnp.finfo(dtype).bits == 16:
        return 2 * ulp(exact, dtype) + _TINY
    tail = np.abs(exact) < np.abs(x) / 1024
    allowed = _of_product(exact, dtype) if is_product else 4 * ulp(exact, dtype)
    return np.asarray(np.where(tail, 1e-4 * np.abs(exact), allowed) + _TINY)


def _of_product(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """It carries over a factor's relative error, of 4 ulp at most, and is rounded itself.

    As ulps of the product those may be up to eight.
    """
    carried = 4 * float(jnp.finfo(dtype).eps) * np.abs(exact)
    return np.asarray(carried + 0.5 * ulp(exact, dtype))


class Cotangent(NamedTuple):
    """An exact cotangent, the size of the terms that may cancel in it, and its factors' argument.

    Its tail is where it is small against those.
    """

    exact: np.ndarray
    cancelling: np.ndarray | float = 0.0
    argument: np.ndarray | float = 0.0


def cotangent_bound(cotangent: Cotangent, dtype: Any) -> np.ndarray:
    """What is allowed of a cotangent, a product that is computed in f32 at least."""
    exact, cancelling, argument = cotangent
    rounding = 8 * np.ldexp(1.0, -24) * np.abs(cancelling)
    if jnp.finfo(dtype).bits == 16:
        return np.asarray(2 * ulp(exact, dtype) + rounding + _TINY)
    tail = np.abs(exact) < np.maximum(np.abs(cancelling), np.abs(argument)) / 1024
    allowed = np.where(tail, 1e-4 * np.abs(exact), _of_product(exact, dtype))
    return np.asarray(allowed + rounding + _TINY)


def worst_cotangent(
    out: Sequence[np.ndarray], expected: Sequence[Cotangent], dtype: Any
) -> str | None:
    """Says what is wrong with samples of some cotangents, if anything is."""
    for i, (cotangent, y) in enumerate(zip(expected, out, strict=True)):
        if wrong := worst(y, cotangent.exact, cotangent_bound(cotangent, dtype)):
            return f"result {i}: {wrong}"
    return None
