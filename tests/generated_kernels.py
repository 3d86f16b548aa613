"""Small generated kernels of every kind, each against NumPy, bit for bit.

`python -m tests.generated_kernels` runs on the default backend, under compute-sanitizer too. Every
array has an allocation of its own, so that what is read or written beside it is seen.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests.arrays import assert_same_bits, rng_for

# Fewer elements than a pack, packs that end with a row and not, and more than a block.
SHAPES = ((0,), (1,), (13,), (3, 5), (2, 64), (7, 33), (5, 1001))
ARRAY, ROW, SCALAR = range(3)


def product(dtype: str) -> jof.ElementwiseKernel:
    """With derivatives that read other inputs, and one that reads none."""
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    return jof.ElementwiseKernel(
        "T x, T y, T z",
        "T w",
        "w = x * y + z",
        "product",
        derivatives=None if exact else {"x": "y", "y": "x", "z": "1"},
    )


several = jof.ElementwiseKernel(
    "float32 a, bfloat16 b, int8 c, uint64 d, bool e",
    "bfloat16 p, float64 q, int8 r, bool s, complex64 t",
    """p = a + b;
       q = e ? a : c;
       r = c + static_cast<int8_t>(d);
       s = a < b || e;
       t = Complex<float>{a, b};""",
    "several",
)


def integers(*key, shape, dtype) -> np.ndarray:
    """So small that every dtype has all sums of products."""
    least = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1
    return rng_for(*key).integers(least, 2, shape).astype(dtype)


def of_kind(kind: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return {ARRAY: shape, ROW: shape[-1:], SCALAR: ()}[kind]


def check_product(dtype: str, kinds: tuple[int, ...]) -> None:
    kernel = product(dtype)
    inputs = [
        [integers(k, shape=of_kind(kind, shape), dtype=dtype) for k, kind in enumerate(kinds)]
        for shape in SHAPES
    ]
    has_derivatives = jnp.issubdtype(dtype, jnp.inexact)

    def run(xs):
        if not has_derivatives:
            return [kernel(*xs)]
        w, pull = jax.vjp(kernel, *xs)
        return [w, jax.jvp(kernel, xs, xs)[1], *pull(jnp.ones_like(w))]

    for xs, results in zip(inputs, jax.jit(lambda every: [*map(run, every)])(inputs), strict=True):
        x, y, z = (a.astype(np.complex128) for a in xs)
        expected = [x * y + z]
        if has_derivatives:
            expected += [2 * x * y + z]
            ones = np.ones(expected[0].shape)
            expected += [summed(d * ones, like=a) for d, a in ((y, x), (x, y), (1, z))]
        for actual, want in zip(results, expected, strict=True):
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            assert_same_bits(actual, (want if is_complex else want.real).astype(dtype))


def summed(d: np.ndarray, like: np.ndarray) -> np.ndarray:
    return d.sum(tuple(range(d.ndim - like.ndim)))


def check_several() -> None:
    dtypes = ("float32", "bfloat16", "int8", "uint64", "bool")
    inputs = [
        [rng_for(k).integers(0, 2, shape).astype(dtype) for k, dtype in enumerate(dtypes)]
        for shape in SHAPES
    ]
    every = jax.jit(lambda inputs: [several(*xs) for xs in inputs])(inputs)
    for (a, b, c, d, e), results in zip(inputs, every, strict=True):
        b = b.astype(np.float32)
        expected = (
            (a + b).astype("bfloat16"),
            np.where(e, a, c).astype(np.float64),
            (c + d.astype(np.int8)).astype(np.int8),
            (a < b) | e,
            (a + 1j * b).astype(np.complex64),
        )
        for actual, want in zip(results, expected, strict=True):
            assert_same_bits(actual, want)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    kinds = {"array": ARRAY, "row": ROW, "scalar": SCALAR}
    for names in itertools.chain(itertools.permutations(kinds), [("array",) * 3]):
        these = tuple(kinds[name] for name in names)
        yield f"float32, {' '.join(names)}", lambda these=these: check_product("float32", these)
    for dtype in (
        *("float16", "bfloat16", "float64", "float8_e5m2", "complex64", "complex128"),
        *("int8", "int16", "int32", "uint64"),
    ):
        these = (ARRAY, ROW, SCALAR)
        yield dtype, lambda dtype=dtype, these=these: check_product(dtype, these)
    yield "five dtypes", check_several


def main() -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with jax.enable_x64(True):
        for name, check in checks():
            check()
            print(f"{name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
