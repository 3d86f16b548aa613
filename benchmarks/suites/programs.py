"""Programs without a call of this package, those of `tests.programs`, and single slow calls.

"ours" is what `jax_oneflow_ops.accelerate` makes of a program, "jnp" the program as it is.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import programs

from .. import accuracy
from ..harness import Array, Case, Entrants, Function, Work
from ..inputs import Input
from . import common

STEPS, BATCHES = 8, 4
TOLERANCE = 2**-7
"""Of losses, relative to the first one: both round to bfloat16's 8 bits, but in other places, and
adamw makes large steps of small gradients."""


def cases(platform: str) -> list[Case]:
    """Every program and call once: "full" on a GPU, "small" on a CPU, "tiny" in a hurry."""
    size = {"gpu": "full", "cpu": "small"}.get(platform, "tiny")
    return [
        *(step(name, size) for name in programs.LARGE),
        *(call(name, dtype, size) for name, dtype in _LISTED),
    ]


# ---- training steps and the like ----


def step(name: str, size: str) -> Case:
    """A step of a program."""
    dtype = "float32" if name in programs.PLAIN else "bfloat16"
    work = partial(enter, name, size)
    return Case("programs", f"{name}-{size}", name, "step", size, dtype, 0, lambda: work)


def enter(name: str, size: str) -> Entrants:
    """Compiles a step both ways, one after the other, compares losses, and makes contenders."""
    program = programs.make(name, size)
    key = jax.random.key(0, impl="rbg")  # which compiles faster than the usual kind
    state = jax.jit(program.state)(key)
    batches = [*map(jax.jit(program.batch), jax.random.split(key, BATCHES))]
    steps, calls = {}, {}
    for way, function in (("ours", jof.accelerate(program.step)), ("jnp", program.step)):
        steps[way] = jax.jit(function, donate_argnums=0).lower(state, batches[0]).compile()
        text = steps[way].as_text() or ""
        calls[way] = len(re.findall(r'custom_call_target="jof_', text))
    if calls["jnp"]:
        raise ArithmeticError("the program as it is has calls of this package")
    losses = {way: _losses(function, state, batches) for way, function in steps.items()}
    differences = np.subtract(losses["ours"], losses["jnp"])
    apart = float(np.max(np.abs(differences))) / abs(losses["jnp"][0])
    if not apart <= TOLERANCE:
        raise ArithmeticError(f"losses differ by {apart:.1e}, more than {TOLERANCE:.1e}")
    ends = {way: [round(values[i], 5) for i in (0, -1)] for way, values in losses.items()}
    about: dict[str, Any] = {"losses": ends, "apart": float(f"{apart:.2g}"), "calls": calls["ours"]}
    about |= {} if calls["ours"] else {"ran": "xla"}
    contenders = [common.contender(way, f, batches, state) for way, f in steps.items()]
    return Entrants(contenders, about, ["jnp"], {}, wall=True)


def _losses(function: Function, state: Any, batches: Sequence[Any]) -> list[float]:
    own, losses = jax.tree.map(jnp.copy, state), []
    for i in range(STEPS):
        own, loss = function(own, batches[i % len(batches)])
        losses.append(float(loss))
    return losses


# ---- single calls ----


class Call(NamedTuple):
    """A call that XLA runs slowly, and what it must give."""

    function: Function
    inputs: list[Input]
    verify: Function  # (inputs, result), in NumPy -> what is wrong
    exact: bool = False
    parts: bool = False  # `verify` sees a sixteenth, along the first dimension of large arrays


_LISTED = [
    ("bincount uniform", "int32"),
    ("bincount one", "int32"),
    ("histogram", "float32"),
    *(
        (name, dtype)
        for name in (
            "add to columns",
            "add to pairs",
            "vmapped gather gradient",
            "take_along_axis gradient",
            "resize gradient",
            "segment_max of rows",
            "segment_max of elements",
            "segment_max sorted",
            "segment_max gradient",
            "segment softmax",
        )
        for dtype in ("bfloat16", "float32")
    ),
]


def call(name: str, dtype: str, size: str) -> Case:
    """A single call; the size is "full", "small" or "tiny"."""
    made = _calls(dtype, {"full": 1 << 20, "small": 1 << 16, "tiny": 1 << 8}[size])[name]
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made.inputs]
    results = jax.tree.leaves(jax.eval_shape(made.function, *arrays))
    nbytes = sum(x.size * x.dtype.itemsize for x in (*arrays, *results))
    shape = ", ".join("x".join(map(common.count, x.shape)) for x in (*arrays, results[0]))
    full = f"{name.replace(' ', '_')}-{size}-{common.short(dtype)}"
    work = partial(_work, made, nbytes)
    return Case("programs", full, name, "call", shape, dtype, nbytes, work)


def _work(made: Call, nbytes: int) -> Work:
    def ours(*arrays: Array, implementation: str | None = None) -> Array:
        with jof.accelerate(implementation != "xla"):
            return made.function(*arrays)

    return Work(
        made.inputs,
        ours,
        {"jnp": made.function},
        sample=_part if made.parts else lambda arrays, out: (arrays, out),
        verify=lambda sampled: made.verify(*sampled),
        exact=made.exact,
        terms=max(x.shape[0] for x in made.inputs),
    )


def _part(arrays: Sequence[Array], out: Array) -> tuple[list[Array], Array]:
    """A sixteenth of the arrays that have as many rows as the result."""
    some = -(-len(out) // 16)
    return [x[:some] if len(x) == len(out) else x for x in arrays], out[:some]


def _calls(dtype: str, n: int) -> dict[str, Call]:
    """All calls, about `n` rows or 16 `n` elements each."""
    side, columns, segments = min(512, n >> 3), min(4096, n), min(10_000, n >> 4)
    batch, pixels = max(1, n >> 12), min(128, n >> 5)
    rows, ends = Input((n, 128), dtype), Input((n,), "int32", "uniform", segments)
    many = Input((16 * n,), dtype)
    x = jnp.zeros
    return {
        **{
            f"bincount {kind}": Call(
                lambda x: jnp.bincount(x, length=1024),
                [Input((16 * n,), "int32", kind, 1024)],
                partial(_sums, lambda ids: (0, ids, np.ones(ids.size))),
                exact=True,
            )
            for kind in ("uniform", "one")
        },
        "histogram": Call(
            lambda x: jnp.histogram(x, 256), [Input((16 * n,), "float32")], _histogram
        ),
        "add to columns": Call(
            lambda table, ids, x: table.at[:, ids].add(x),
            [
                Input((64, columns), dtype),
                Input((n,), "int32", "uniform", columns),
                Input((64, n), dtype),
            ],
            partial(
                _sums,
                lambda table, ids, x: (table, np.arange(len(x))[:, None] * columns + ids, x),
            ),
            parts=True,
        ),
        "add to pairs": Call(
            lambda table, i, j, x: table.at[i, j].add(x),
            [
                Input((side, side, 8), dtype),
                *[Input((n,), "int32", "uniform", side)] * 2,
                Input((n, 8), dtype),
            ],
            partial(
                _sums,
                lambda table, i, j, x: (table, (i * side + j)[:, None] * 8 + np.arange(8), x),
            ),
        ),
        "vmapped gather gradient": Call(
            lambda ids, ct: _pullback(jax.vmap(lambda x, i: x[i]), x(ct.shape, dtype), ids, ct),
            [
                Input((batch, 4096), "int32", "uniform", 4096),
                Input((batch, 4096, 16), dtype),
            ],
            partial(
                _sums,
                lambda ids, ct: (
                    0,
                    (np.arange(len(ids))[:, None, None] * 4096 + ids[..., None]) * 16
                    + np.arange(16),
                    ct,
                ),
            ),
            parts=True,
        ),
        "take_along_axis gradient": Call(
            lambda ids, ct: _pullback(
                lambda x, i: jnp.take_along_axis(x, i, 1), x(ct.shape, dtype), ids, ct
            ),
            [
                Input((max(1, n >> 14), side, side), "int32", "uniform", side),
                Input((max(1, n >> 14), side, side), dtype),
            ],
            partial(
                _sums,
                lambda ids, ct: (
                    0,
                    (np.arange(len(ids))[:, None, None] * side + ids) * side + np.arange(side),
                    ct,
                ),
            ),
            parts=True,
        ),
        "resize gradient": Call(
            lambda ct: _pullback(
                lambda x: jax.image.resize(x, ct.shape, "nearest"),
                x((len(ct), pixels, pixels, 64), dtype),
                ct,
            ),
            [Input((max(1, n >> 17), 2 * pixels, 2 * pixels, 64), dtype)],
            _resized,
            parts=True,
        ),
        "segment_max of rows": Call(
            lambda x, ids: jax.ops.segment_max(x, ids, segments), [rows, ends], _largest, exact=True
        ),
        "segment_max of elements": Call(
            lambda x, ids: jax.ops.segment_max(x, ids, 1024),
            [many, Input((16 * n,), "int32", "uniform", 1024)],
            _largest,
            exact=True,
        ),
        "segment_max sorted": Call(
            lambda x, ids: jax.ops.segment_max(x, ids, 1024, indices_are_sorted=True),
            [many, Input((16 * n,), "int32", "sorted", 1024)],
            _largest,
            exact=True,
        ),
        "segment_max gradient": Call(
            lambda x, ids, ct: _pullback(lambda x: jax.ops.segment_max(x, ids, segments), x, ct),
            [rows, ends, Input((segments, 128), dtype)],
            _gradient_of_largest,
        ),
        "segment softmax": Call(
            _segment_softmax,
            [Input((n, 8), dtype), Input((n,), "int32", "sorted", n >> 4)],
            _softmax,
        ),
    }


def _pullback(function: Function, x: Array, *rest: Array) -> Array:
    """The gradient of `function(x, ...)`; the cotangent comes last."""
    *others, cotangent = rest
    (gradient,) = jax.vjp(lambda x: function(x, *others), x)[1](cotangent)
    return gradient


def _segment_softmax(x: Array, ids: Array) -> Array:
    count = max(1, len(x) >> 4)
    e = jnp.exp(x - jax.ops.segment_max(x, ids, count, indices_are_sorted=True)[ids])
    return e / jax.ops.segment_sum(e, ids, count, indices_are_sorted=True)[ids]


# ---- checks, in float64 ----


def _sums(addends: Function, arrays: Sequence[np.ndarray], out: np.ndarray) -> str | None:
    """One rounding, after a sum in float32; `addends` gives what they are added to, and where.

    16 roundings of the magnitudes' sum are more than any order of summation needs.
    """
    start, places, values = addends(*arrays)
    start, values = (np.asarray(a, np.float64) for a in (start, values))
    places = places.ravel()
    exact, magnitude = (
        np.bincount(places, f(values).ravel(), out.size) + f(start).ravel()
        for f in (np.array, np.abs)
    )
    bound = 16 * 2.0**-24 * magnitude
    bound = 0 * bound if out.dtype.kind == "i" else bound + 0.501 * accuracy.ulp(exact, out.dtype)
    return accuracy.worst(out.ravel(), exact, bound)


def _resized(arrays: Sequence[np.ndarray], out: np.ndarray) -> str | None:
    """Rows are added first and rounded, then columns."""
    (ct,) = (a.astype(np.float64) for a in arrays)
    pairs = [ct[:, i::2, j::2] for i in range(2) for j in range(2)]
    exact, magnitude = np.sum(pairs, axis=0), np.sum(np.abs(pairs), axis=0)
    bound = 0.501 * accuracy.ulp(exact, out.dtype) + accuracy.ulp(magnitude, out.dtype)
    return accuracy.worst(out.ravel(), exact.ravel(), bound.ravel())


def _histogram(arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> str | None:
    counts, edges = out
    wide = np.linspace(float(arrays[0].min()), float(arrays[0].max()), len(edges))
    bound = np.full(len(edges), 4 * accuracy.ulp(np.abs(wide).max(keepdims=True), edges.dtype))
    if wrong := accuracy.worst(edges, wide, bound):
        return wrong
    expected = np.histogram(arrays[0], edges)[0].astype(np.float64)
    return accuracy.worst(counts, expected, np.zeros(len(counts)))


def _by_segment(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An order of rows in which segments follow each other, where they start, and which."""
    order = np.argsort(ids.astype(np.uint16), kind="stable")  # the fastest; no id is larger
    segments, starts = np.unique(ids[order], return_index=True)
    return order, starts, segments


def _maxima(x: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    order, starts, segments = _by_segment(ids)
    found = np.full((count, *x.shape[1:]), -np.inf)
    found[segments] = np.maximum.reduceat(x[order], starts, axis=0)
    return found


def _some_columns(*arrays: np.ndarray) -> list[np.ndarray]:
    """In float64: every place in a pack is seen."""
    return [a[..., ::9].astype(np.float64) if a.ndim > 1 else a.astype(np.float64) for a in arrays]


def _largest(arrays: Sequence[np.ndarray], out: np.ndarray) -> str | None:
    x, found = _some_columns(arrays[0], out)
    wrong = int((_maxima(x, arrays[1], len(out)) != found).sum())
    return f"{wrong} of {found.size} maxima are off" if wrong else None


def _gradient_of_largest(arrays: Sequence[np.ndarray], out: np.ndarray) -> str | None:
    """Equal shares for all rows that are the largest: a division and a product are rounded."""
    x, ct, found = _some_columns(arrays[0], arrays[2], out)
    ids = arrays[1]
    largest = x == _maxima(x, ids, len(ct))[ids]
    order, starts, segments = _by_segment(ids)
    ties = np.ones_like(ct)
    ties[segments] = np.add.reduceat(largest[order].astype(float), starts, axis=0)
    exact = largest * (ct / ties)[ids]
    bound = 2 * accuracy.ulp(exact, out.dtype)
    return accuracy.worst(found.ravel(), exact.ravel(), bound.ravel())


def _softmax(arrays: Sequence[np.ndarray], out: np.ndarray) -> str | None:
    """Roundings of the difference count with its size, for the row and for those in its sum."""
    x, found = (a.astype(np.float64) for a in (arrays[0], out))
    ids, eps = arrays[1], float(jnp.finfo(out.dtype).eps)
    below = x - _maxima(x, ids, int(ids.max()) + 1)[ids]
    e, (order, starts, segments) = np.exp(below), _by_segment(ids)

    def total(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((int(ids.max()) + 1, x.shape[1]))
        sums[segments] = np.add.reduceat(values[order], starts, axis=0)
        return np.asarray(sums[ids])

    exact = e / total(e)
    relative = np.abs(below) + total(e * np.abs(below)) / total(e) + 4
    bound = exact * np.expm1(eps * relative) + 1e-36
    return accuracy.worst(found.ravel(), exact.ravel(), bound.ravel())
