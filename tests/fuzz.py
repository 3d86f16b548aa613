"""Raw calls of every FFI target with random operands, results and attributes, most of them wrong.

Each must give a result or raise InvalidArgument: `python -m tests.fuzz --calls 10000 --seed 7`.
Every call is printed before it runs, so that the last line shows a call that kills the process. A
CPU module built with sanitizers (`make test-sanitize`) detects any byte that is read or written
outside the arrays.
"""

import argparse
import faulthandler
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_oneflow_ops import _native

SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 8, 16, 17, 33, 65)
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "int4"),
)
MOST_ELEMENTS = 1 << 16

Array = tuple[tuple[int, ...], str]  # shape and dtype


class Call(NamedTuple):
    """A call of an FFI target."""

    target: str
    operands: list[Array]
    results: list[Array]
    attributes: dict[str, Any]


def shape_of(rng: random.Random, rank: int | None = None) -> tuple[int, ...]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randrange(6) if rank is None else rank))
    return shape if math.prod(shape) <= MOST_ELEMENTS else shape_of(rng, rank)


def good_upsample(rng: random.Random, target: str) -> Call:
    source = shape_of(rng, rng.randrange(2, 5))
    axis = rng.randrange(len(source) - 1)
    size = [rng.randrange(1, 40) if n else 0 for n in source[axis : axis + 2]]
    output = (*source[:axis], *size, *source[axis + 2 :])
    dtype = rng.choice(("float16", "bfloat16", "float32", "float64", "complex64"))
    arrays = [(source, dtype), (output, dtype)]
    x, y = arrays if not target.endswith("backward") else reversed(arrays)
    flag = rng.random() < 0.5
    return Call(target, [x], [y], {"axis": np.int64(axis), "half_pixel": np.bool_(flag)})


def good_permute(rng: random.Random, target: str) -> Call:
    shape = shape_of(rng)
    axes = rng.sample(range(len(shape)), len(shape))
    dtype = rng.choice(DTYPES[:-1])
    result = tuple(shape[a] for a in axes)
    return Call(target, [(shape, dtype)], [(result, dtype)], {"axes": np.array(axes, np.int64)})


def good_scatter(rng: random.Random, target: str) -> Call:
    batch, rows, inner, size = (rng.choice(SIZES) for _ in range(4))
    adds, of_columns, in_tiles = (x in target for x in ("_add_", "_columns", "_tiles"))
    floats = ["float16", "bfloat16", "float32"]
    others = ["int32", "int64", *["complex64"] * (adds and not of_columns)]
    dtype = rng.choice(floats + others * (not in_tiles))
    ids = rng.choice(("int32", "int64"))
    inner = 1 if in_tiles else inner
    if target.endswith("sorted") and rng.random() < 0.3:
        ids, size = "uint16", rng.choice(SIZES)
    batch = rng.choice((1, batch))
    result = ((batch, size, inner), dtype)
    operand = result if not adds or rng.random() < 0.5 else ((0, 0, 0), dtype)
    order_type = "int64" if ids == "int64" else "int32"
    ordered = target.endswith("sorted") and batch == 1 and rng.random() < 0.5
    order = ((rows if ordered else 0,), order_type)
    # Only CPUs accept 0 private copies, and not for 16-bit sums.
    least = int(target.endswith("sorted") or dtype in ("float16", "bfloat16"))
    parts = rng.randrange(max(least, jax.default_backend() != "cpu"), 4)
    scratch = {
        "sorted": (batch, parts, 2, inner),
        "private": (parts, batch, size, inner),
        "atomic": (parts, batch, size, inner),
        "columns": (0, 0, 0),
        "few": (0, 0, 0),
        "tiles": (1, 2564),  # a list of 4096 positions and 1024 rows
    }[target.rpartition("_")[2]]
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    names = ("wrap", "clip", "deterministic")
    flags = {name: np.bool_(rng.random() < 0.3) for name in names}
    if target.endswith("sorted"):
        flags |= {"wrap": np.bool_(False), "clip": np.bool_(False)}
    if of_columns or in_tiles:
        flags |= {"deterministic": np.bool_(False)}
    of_ids = (1 if in_tiles else batch, rows * inner if of_columns else rows)
    operands = [operand, ((batch, rows, inner), dtype), (of_ids, ids), order]
    return Call(target, operands, [result, (scratch, wide)], flags)


def good_gather(rng: random.Random, target: str) -> Call:
    batch, rows, inner, size = (rng.choice(SIZES) for _ in range(4))
    dtype = rng.choice(DTYPES[:-1])
    itemsize = jnp.dtype(dtype).itemsize
    ids = ((batch, rows), rng.choice(("int32", "int64")))
    fill = np.zeros(max(1, itemsize // 8), np.int64)
    flags = {name: np.bool_(rng.random() < 0.3) for name in ("wrap", "clip")}
    table = ((batch, size, inner), dtype)
    return Call(target, [table, ids], [((batch, rows, inner), dtype)], {**flags, "fill": fill})


def good_sort(rng: random.Random, target: str) -> Call:
    batch, rows, size = (rng.choice(SIZES) for _ in range(3))
    ids = rng.choice(("int32", "int64"))
    n = batch * rows
    results = [((1, n), ids), ((n,), ids), ((batch * size + 1,), ids)]
    flags = {name: np.bool_(rng.random() < 0.3) for name in ("wrap", "clip")}
    return Call(target, [((batch, rows), ids)], results, {"size": np.int64(size), **flags})


def good_grid(rng: random.Random, target: str) -> Call:
    outer, m, n, inner, rows, columns = (rng.choice(SIZES) for _ in range(6))
    dtype = rng.choice(("float16", "bfloat16", "float32", "int32", "int64", "complex64"))
    ids = rng.choice(("int32", "int64"))
    operands = [((outer, m, n, inner), dtype), ((m,), ids), ((n,), ids)]
    lists = (rows + 1 + m + columns + 1 + n,), "int32"
    names = ("wrap_rows", "wrap_columns", "clip_rows", "clip_columns")
    flags = {name: np.bool_(rng.random() < 0.3) for name in names}
    sizes = {"rows": np.int64(rows), "columns": np.int64(columns)}
    return Call(target, operands, [((outer, rows, columns, inner), dtype), lists], flags | sizes)


def good_search(rng: random.Random, target: str) -> Call:
    dtype, shape = rng.choice((*DTYPES[5:9], *DTYPES[9:13])), shape_of(rng)
    operands = [(shape_of(rng, 1), dtype), (shape, dtype)]
    result = shape, rng.choice(("int32", "uint32"))
    return Call(target, operands, [result], {"right": np.bool_(rng.random() < 0.5)})


def good_split(rng: random.Random, target: str) -> Call:
    shape = shape_of(rng, rng.randrange(1, 4))
    axis = rng.randrange(len(shape))
    rows = (*shape[:axis], *shape[axis + 1 :])
    dtype = rng.choice(DTYPES[9:13])
    wide = "float64" if dtype == "float64" else "float32"
    parts = (math.prod(rows), rng.choice((1, max(shape[axis], 1))), 2), wide
    flags = {"axis": np.int64(axis)}
    if "softmax" in target:
        operands = [(shape, dtype)] * (2 if target.endswith("vjp") else 1)
        flags |= {"log": np.bool_(rng.random() < 0.5)}
        return Call(target, operands, [(shape, dtype), parts], flags)
    operands = [(shape, dtype), *[(rows, "int32")] * ("cross_entropy" in target)]
    is_sum = target.endswith("exp_sum")
    stats = ((*rows, 2) if is_sum or rng.random() < 0.5 else (0,) * (len(rows) + 1)), wide
    return Call(target, operands, [*[(rows, dtype)] * (not is_sum), stats, parts], flags)


def good_elementwise(rng: random.Random, target: str) -> Call:
    shape, dtype = shape_of(rng), rng.choice(DTYPES[9:13])
    operands = [(shape if rng.random() < 0.8 else (), dtype) for _ in range(rng.randrange(1, 5))]
    wanted = rng.randrange(1, 4)
    results = [(shape, dtype)] * wanted.bit_count()
    return Call(target, operands, results, {"wanted": np.int64(wanted)})


GOOD = {
    "jof_upsample": good_upsample,
    "jof_permute": good_permute,
    "jof_scatter": good_scatter,
    "jof_gather": good_gather,
    "jof_sort": good_sort,
    "jof_searchsorted": good_search,
    "jof_sum_grid": good_grid,
    "jof_split": good_split,
}


def good_maker(target: str) -> Callable[[random.Random, str], Call]:
    """The function that makes plausible calls of the target."""
    return next((GOOD[p] for p in GOOD if target.startswith(p)), good_elementwise)


def change_array(rng: random.Random, array: Array) -> Array:
    shape, dtype = array
    what = rng.randrange(4)
    if what == 0:
        return shape, rng.choice(DTYPES)
    if what == 1 or not shape:
        return shape_of(rng), dtype
    k = rng.randrange(len(shape))
    if what == 2:
        return (*shape[:k], rng.choice(SIZES), *shape[k + 1 :]), dtype
    return (*shape[:k], *shape[k + 1 :]), dtype


def change_attribute(rng: random.Random, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        ends = (-(2**63), 2**63 - 1)
        return np.array([rng.choice((-1, 0, 1, 2, 7, *ends)) for _ in range(rng.randrange(5))])
    if isinstance(value, np.bool_):
        return np.int64(1)
    return np.int64(rng.choice((-1, 0, 1, 2, 3, 64, 2**31, 2**62, -(2**63), 2**63 - 1)))


def mutate(rng: random.Random, call: Call) -> Call:
    """Makes one change, which usually makes the call invalid."""
    operands, results, attributes = [*call.operands], [*call.results], dict(call.attributes)
    what = rng.randrange(6)
    side = operands if what % 2 == 0 or not results else results
    if what < 3 and side:
        k = rng.randrange(len(side))
        side[k] = change_array(rng, side[k])
    elif what == 3 and side:
        del side[rng.randrange(len(side))]
    elif what == 4:
        side.append(rng.choice(side) if side else ((2,), "float32"))
    elif attributes:
        name = rng.choice([*attributes])
        if rng.random() < 0.2:
            del attributes[name]
        else:
            attributes[name] = change_attribute(rng, attributes[name])
    if not results:
        results = call.results
    return Call(call.target, operands, results, attributes)


def contents(rng: random.Random, array: Array) -> np.ndarray:
    """Random bits; integers are often small, because they may be indices."""
    shape, name = array
    dtype = jnp.dtype(name)
    generator = np.random.default_rng(rng.getrandbits(32))
    if name == "int4":
        return generator.integers(-8, 8, shape).astype(ml_dtypes.int4)
    if jnp.issubdtype(dtype, jnp.integer) and rng.random() < 0.7:
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -3
        return generator.integers(low, 40, shape).astype(dtype)
    if name == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(generator.bytes(size), dtype).reshape(shape).copy()


def run(rng: random.Random, call: Call) -> str:
    """Makes the call and returns "result" or "refused". Raises on any other outcome."""
    arrays = [contents(rng, operand) for operand in call.operands]
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in call.results]
    function = jax.ffi.ffi_call(call.target, results)
    try:
        out = jax.block_until_ready(jax.jit(lambda *a: function(*a, **call.attributes))(*arrays))
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return "refused"
    # An accepted call must be right. XLA drops a call whose result is empty.
    if call.target == "jof_permute" and out[0].size > 0:
        expected = np.transpose(arrays[0], call.attributes["axes"])
        assert np.asarray(out[0]).tobytes() == expected.tobytes(), call
    return "result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="", help="only targets that contain this")
    options = parser.parse_args()
    faulthandler.enable()
    platform = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    targets = sorted(t for t in _native._loaded[platform].targets() if options.target in t)
    ends: Counter[str] = Counter()
    with jax.enable_x64(True):
        for i in range(options.calls):
            rng = random.Random(f"{options.seed}-{i}")
            # Most calls go to other targets, because the elementwise targets are many and alike.
            others = [t for t in targets if good_maker(t) is not good_elementwise]
            target = rng.choice(others if others and i % 4 else targets)
            call = good_maker(target)(rng, target)
            for _ in range(rng.choice((0, 0, 1, 1, 1, 2))):
                call = mutate(rng, call)
            print(f"{i}: {call}", file=sys.stderr, flush=True)
            ends[run(rng, call)] += 1
    print(dict(ends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
