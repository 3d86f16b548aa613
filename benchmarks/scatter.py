"""The scatter suite: segment sums, scatter-adds and embeddings beside jnp's and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof

from . import accuracy, rivals
from .cases import ScatterCase, itemsize
from .harness import Input, Maker, Work
from .rivals import cub

Array = Any  # of any framework
Function = Callable[..., Array]

SUMS = tuple(f"jof_scatter_add_{way}" for way in ("sorted", "private", "atomic"))
"""The custom calls that may sum, one of which a shape gets."""

# A table from this size on costs more to clear or to copy than launches do.
_LARGE_TABLE = 64 << 20

# Of XLA's 16-bit atomics, compare and swap, half a million wait for one element.
_TOO_SLOW = "not run: seconds a call (--slow-rivals runs it)"


def work(case: ScatterCase) -> Work:
    """Everything the harness needs to run a case."""
    sums = case.group != "embedding"
    narrow = case.dtype != "float32"
    ours = _FUNCTIONS[case.function]
    on_gpu = jax.default_backend() == "gpu"
    slow = on_gpu and narrow and case.ids == "hot"
    reference = Reference(case)
    in_place = case.group == "scatter_add in place"
    table = case.segments * case.width * itemsize(case.dtype)
    clears = case.group in ("scatter_add", "embedding gradient")
    wall = on_gpu and clears and table >= _LARGE_TABLE
    return Work(
        inputs=_inputs(case),
        ours=partial(ours, case),
        target=SUMS if sums else "jof_gather_rows",
        variants={"deterministic": partial(ours, case, deterministic=True)} if sums else {},
        jnp=_forms(case),
        torch=partial(_TORCH[case.function], case),
        torch_inputs=(lambda torch, *x: (x[0].clone(), *x[1:])) if in_place else None,
        check=reference.check if sums else _check_rows,
        errors=reference.errors if sums else None,
        exact=not sums,
        others=_others(case, reference),
        donated=in_place,
        skip={"jnp": _TOO_SLOW} if slow else {},
        ceilings=("copy",),
        effort=1.0 if wall else 0.5,
        wall=wall,
    )


def _inputs(case: ScatterCase) -> list[Input]:
    def rows(n: int) -> Input:
        return Input((n, case.width) if case.width > 1 else (n,), case.dtype)

    ids = Input((case.rows,), "int32", case.ids, case.segments)
    return {
        "segment_sum": [rows(case.rows), ids],
        "scatter_add": [rows(case.segments), ids, rows(case.rows)],
        "scatter_add in place": [rows(case.segments), ids, rows(case.rows)],
        "embedding gradient": [rows(case.rows), ids],
        "embedding": [rows(case.segments), ids],
    }[case.function]


# ---- ours ----


def _segment_sum(case: ScatterCase, data: Array, ids: Array, **options: Any) -> Array:
    in_order = case.ids == "sorted"
    return jof.segment_sum(data, ids, case.segments, indices_are_sorted=in_order, **options)


def _scatter_add(
    case: ScatterCase, operand: Array, ids: Array, updates: Array, **options: Any
) -> Array:
    return jof.scatter_add(operand, ids, updates, **options)


def _gradient(case: ScatterCase, cotangent: Array, ids: Array, **options: Any) -> Array:
    return _pullback(lambda t: jof.embedding_lookup(t, ids, **options), case, cotangent)


def _lookup(case: ScatterCase, table: Array, ids: Array) -> Array:
    return jof.embedding_lookup(table, ids)


_FUNCTIONS: dict[str, Function] = {
    "segment_sum": _segment_sum,
    "scatter_add": _scatter_add,
    "scatter_add in place": _scatter_add,
    "embedding gradient": _gradient,
    "embedding": _lookup,
}


def _pullback(function: Function, case: ScatterCase, cotangent: Array) -> Array:
    """Alone: nothing of the forward pass is in it, which the table's values are not either."""
    table = jnp.zeros((case.segments, case.width), cotangent.dtype)
    (gradient,) = jax.vjp(function, table)[1](cotangent)
    return gradient


# ---- the rivals ----


def _jnp_segment_sum(case: ScatterCase, data: Array, ids: Array) -> Array:
    in_order = case.ids == "sorted"
    return jax.ops.segment_sum(data, ids, case.segments, indices_are_sorted=in_order)


def _jnp_scatter_add(case: ScatterCase, operand: Array, ids: Array, updates: Array) -> Array:
    return operand.at[ids].add(updates, mode="drop")


def _jnp_gradient(case: ScatterCase, cotangent: Array, ids: Array) -> Array:
    return _pullback(lambda table: jnp.take(table, ids, axis=0), case, cotangent)


_JNP: dict[str, Function] = {
    "segment_sum": _jnp_segment_sum,
    "scatter_add": _jnp_scatter_add,
    "scatter_add in place": _jnp_scatter_add,
    "embedding gradient": _jnp_gradient,
    "embedding": lambda case, table, ids: jnp.take(table, ids, axis=0),
}


def _forms(case: ScatterCase) -> dict[str, Function]:
    """What a user writes, and what one does who knows of the trouble with 16 bits.

    And on GPUs, sweeps apart, with atomics that wait for each other.
    """
    forms: dict[str, Function] = {"jnp": partial(_JNP[case.function], case)}
    if case.function == "embedding":
        forms["jnp in bounds"] = lambda table, ids: _rows(table, ids)
    elif case.dtype != "float32":
        forms["jnp f32"] = _in_float32(forms["jnp"], case.dtype)
    waits = case.group in ("segment_sum", "embedding gradient") and case.ids != "sorted"
    if waits and jax.default_backend() == "gpu":
        if _parts(case) > 1:
            forms["jnp in parts"] = _in_float32(partial(_in_parts, case), case.dtype)
        forms["jnp sorted"] = _in_float32(partial(_sorted, case), case.dtype)
    return forms


def _rows(table: Array, ids: Array) -> Array:
    """Those of ids that are in bounds, which nothing checks."""
    return table.at[ids].get(mode="promise_in_bounds")


def _sorted(case: ScatterCase, data: Array, ids: Array) -> Array:
    """The rows in the order of their ids: neighbours are added before they meet an atomic."""
    in_order, places = jax.lax.sort_key_val(ids, jnp.arange(len(ids)))
    rows = _rows(data, places)
    return jax.ops.segment_sum(rows, in_order, case.segments, indices_are_sorted=True)


def _parts(case: ScatterCase) -> int:
    """Tables to sum into side by side: some 4 rows a place at least, or one."""
    parts = min(256, case.rows // (4 * case.segments))
    return 1 << parts.bit_length() - 1 if parts >= 16 else 1


def _in_parts(case: ScatterCase, data: Array, ids: Array) -> Array:
    """Neighbours into different tables, so that they do not wait for each other, and their sum."""
    parts = _parts(case)
    tables = jnp.arange(len(ids), dtype=ids.dtype) % parts
    sums = jax.ops.segment_sum(data, tables * case.segments + ids, parts * case.segments)
    return sums.reshape(parts, case.segments, *data.shape[1:]).sum(axis=0)


def _others(case: ScatterCase, reference: Reference) -> dict[str, Maker]:
    """CUB's, of elements in order."""
    if case.group == "segment_sum" and case.ids == "sorted" and case.width == 1:
        return {"cub": rivals.maker("cub", "segment_sum", reference.errors)}
    return {}


def build() -> list[Path]:
    """Compiles the library."""
    return [cub.segment_sum_library()]


def _in_float32(function: Function, dtype: str) -> Function:
    """What a user does who knows of the trouble with 16 bits."""

    def run(*arrays: Array) -> Array:
        wide = (x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in arrays)
        return function(*wide).astype(dtype)

    return run


def _torch_segment_sum(case: ScatterCase, torch: Any, data: Array, ids: Array) -> Array:
    return data.new_zeros((case.segments, *data.shape[1:])).index_add_(0, ids, data)


_TORCH: dict[str, Function] = {
    "segment_sum": _torch_segment_sum,
    "scatter_add": lambda case, torch, operand, ids, x: operand.index_add(0, ids, x),
    "scatter_add in place": lambda case, torch, operand, ids, x: operand.index_add_(0, ids, x),
    "embedding gradient": lambda case, torch, ct, ids: torch.ops.aten.embedding_dense_backward(
        ct, ids, case.segments, -1, False
    ),
    "embedding": lambda case, torch, table, ids: torch.nn.functional.embedding(ids, table),
}


# ---- checks ----


@dataclass(frozen=True)
class Reference:
    """The sums in float64 on the host, of some columns of the first arrays that it sees."""

    case: ScatterCase

    @cached_property
    def columns(self) -> np.ndarray:
        """Some eight and the last, an odd number apart: every place in a pack is seen."""
        width = self.case.width
        return np.unique([*range(0, width, (width // 8) | 1), width - 1])

    @cached_property
    def _known(self) -> dict[str, np.ndarray]:
        return {}

    def _sums(self, args: tuple[Array, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The sums and those of the magnitudes; all calls are on the same arrays."""
        if not self._known:
            added = self.case.group.startswith("scatter_add")
            (ids, updates) = args[1:] if added else (args[1], args[0])
            rows, ids = self.sample(updates), np.asarray(ids)
            for name, values in (("sums", rows), ("magnitudes", np.abs(rows))):
                totals = [np.bincount(ids, x, self.case.segments) for x in values.T]
                self._known[name] = np.stack(totals, axis=1)
            if added:
                operand = self.sample(args[0])
                self._known["sums"] += operand
                self._known["magnitudes"] += np.abs(operand)
        return self._known["sums"], self._known["magnitudes"]

    def sample(self, x: Array) -> np.ndarray:
        """The columns of an array, in float64."""
        x = x.reshape(x.shape[0], -1)
        return np.asarray(_take(x, self.columns)).astype(np.float64)

    def check(self, args: tuple[Array, ...], out: Array) -> str | None:
        """One rounding, after a sum in f32.

        The terms have either sign: 16 roundings of their magnitudes' sum are more than any order
        of summing needs.
        """
        if out.dtype != self.case.dtype:
            return f"a result of {out.dtype}"
        exact, magnitude = self._sums(args)
        bound = 0.501 * accuracy.ulp(exact, self.case.dtype) + 16 * 2.0**-24 * magnitude
        return accuracy.worst(self.sample(out).ravel(), exact.ravel(), bound.ravel())

    def errors(self, args: tuple[Array, ...], out: Array) -> dict[str, float]:
        """The root mean square of the errors over that of the sums."""
        exact, _ = self._sums(args)
        error = self.sample(out) - exact
        return {"rms_error": float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))}


@jax.jit
def _take(x: Array, columns: Array) -> Array:
    return x[:, columns]


def _check_rows(args: tuple[Array, ...], out: Array) -> str | None:
    """Some rows, to the bit; that all are jnp's is compared elsewhere."""
    table, ids = args
    some = np.arange(0, len(ids), (len(ids) // 1000) | 1)
    wrong = np.asarray(out[some]) != np.asarray(table[ids[some]])
    return f"{int(wrong.any(axis=1).sum())} of {len(some)} rows are off" if wrong.any() else None
