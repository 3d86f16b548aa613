"""Names and sizes of listed cases, and draws for random cases."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..timing import Contender

FLOATS = ("float32", "float16", "bfloat16")
_SHORT = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "bfloat16": "bf16"}
_LETTERS = {"float": "f", "complex": "c"}


def short(dtype: str) -> str:
    name = dtype.rstrip("0123456789")
    return _SHORT.get(dtype) or _LETTERS.get(name, name) + dtype[len(name) :]


def itemsize(dtype: str) -> int:
    return int(jnp.dtype(dtype).itemsize)


def is_wide(*dtypes: str) -> bool:
    """Returns whether arrays of a dtype need JAX's 64-bit mode."""
    return any(dtype in ("float64", "int64", "uint64", "complex128") for dtype in dtypes)


def sweep_sizes(platform: str) -> list[int]:
    """The bytes of the arrays of a sweep: from 1 KiB, where launch overhead dominates, to 1 GiB."""
    return [1 << bits for bits in range(10, 31 if platform == "gpu" else 27, 2)]


def array_sizes(platform: str) -> list[tuple[int | None, str]]:
    """The bytes of the first array of listed cases (None: 4M elements), and their names."""
    if platform == "cpu":
        return [(None, "4M elements")]
    return [(n << 20, f"{n} MiB") for n in (512, 64)]


def is_large(shape: str) -> bool:
    return shape in ("512 MiB", "4M elements")


def elements(nbytes: int | None, dtype: str) -> int:
    """The number of elements of an array of a listed size."""
    return 4 << 20 if nbytes is None else nbytes // itemsize(dtype)


def compact(shape: str) -> str:
    """A short name: "512MiB" for "512 MiB", "4M" for "4M elements"."""
    return shape.removesuffix(" elements").replace(" ", "")


def count(n: int) -> str:
    """A short number, such as ``16M`` and ``64k`` (powers of two), or ``10000``."""
    for unit, amount in (("M", 1 << 20), ("k", 1 << 10)):
        if n % amount == 0 and n > amount >> (unit == "M"):
            return f"{n // amount}{unit}"
    return str(n)


def forms_of(op: Any, dtype: str) -> dict[str, Callable[..., Any]]:
    """Returns the jnp forms of a row of the catalogue, first the form that users write."""
    fast = {f"jnp {name.replace('in float32', 'f32')}": form for name, form in op.best.items()}
    if dtype == "float32":
        fast.pop("jnp f32", None)
    return {"jnp": op.replaces, **fast}


def random_size(rng: np.random.Generator, largest: int) -> int:
    """Draws a number of bytes from 4 KiB, log-uniformly."""
    return int(math.exp(rng.uniform(math.log(4 << 10), math.log(largest))))


def random_elements(rng: np.random.Generator, largest: int, each: int) -> int:
    """Draws a number of elements of ``each`` bytes; a quarter of the draws are multiples of 64."""
    n = max(1, random_size(rng, largest) // each)
    return n & ~63 if rng.random() < 0.25 and n > 64 else n


def random_dimension(rng: np.random.Generator, about: float) -> int:
    """Draws a dimension near ``about``: half of them powers of two, some others odd."""
    if rng.random() < 0.5:
        return 1 << max(0, round(math.log2(max(1.0, about))))
    return max(1, int(about) | int(rng.random() < 0.5))


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    """Draws one of the choices; NumPy would turn them into an array."""
    return choices[int(rng.integers(len(choices)))]


def with_pullback(function: Callable[..., Any], wrt: Sequence[int] = (0,)) -> Callable[..., Any]:
    """A function of (operands, cotangent) that returns the value and the operands' cotangents."""

    def run(*args: Any, **options: Any) -> Any:
        *operands, cotangent = args

        def of_some(live: dict[int, Any]) -> Any:
            return function(*(live.get(i, x) for i, x in enumerate(operands)), **options)

        y, pull = jax.vjp(of_some, {i: operands[i] for i in wrt})
        return y, *pull(cotangent)[0].values()

    return run


def pullback(function: Callable[..., Any], wrt: Sequence[int] = (0,)) -> Callable[..., Any]:
    """As `with_pullback`, without the value: XLA drops it, because it is not used."""
    run = with_pullback(function, wrt)
    return lambda *args, **options: run(*args, **options)[1:]


def contender(name: str, step: Callable[..., Any], state: Any, batches: Sequence[Any]) -> Contender:
    """A contender that trains from a copy of a state, on batches in turn."""
    own = [jax.tree.map(jnp.copy, state)]

    def call(i: int) -> None:
        own[0], _ = step(own[0], batches[i % len(batches)])

    return Contender(name, call, lambda _: jax.block_until_ready(own))
