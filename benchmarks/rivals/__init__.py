"""Other libraries' kernels, on the memory of the same JAX arrays.

A module each, which imports its library and whose ``contender(sets, ours, ...)`` makes a rival. A
suite names one by ``maker``, so that a library which is missing is one only to the harness.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..cases import Case
from ..harness import Arrays, Maker, Sets, agreement
from ..timing import Contender

Array = Any
Errors = Callable[[Arrays, Array], dict[str, float]]  # as in Work


def is_large(case: Case) -> bool:
    """Whether it is of the larger arrays of the elementwise and cast suites: one size is enough."""
    return case.variant in ("512 MiB", "4M elements")


def maker(module: str, *arguments: Any) -> Maker:
    """The rival of the ``module`` here that its ``contender`` makes of further ``arguments``."""

    def make(sets: Sets, ours: Array) -> tuple[Contender, dict[str, Any]]:
        imported = importlib.import_module(f".{module}", __name__)
        made: tuple[Contender, dict[str, Any]] = imported.contender(sets, ours, *arguments)
        return made

    return make


def on_views(
    name: str,
    view: Callable[[Array], Any],
    start: Callable[[Sequence[Any], Sequence[Any]], Any],
    synchronize: Callable[[], Any],
    sets: Sets,
    ours: Array,
    *,
    exact: bool = False,
    errors: Errors | None = None,
) -> tuple[Contender, dict[str, Any]]:
    """What ``start(inputs, outputs)`` does, given views of JAX arrays, and what its result says.

    Each set of inputs has its own outputs, new arrays like ``ours``, which are written to in place.
    """
    results = jax.block_until_ready([jax.tree.map(_new, ours) for _ in sets])
    # The arrays stay beside their views: an address keeps nothing alive.
    buffers = [
        (arrays, result, *([view(x) for x in jax.tree.leaves(part)] for part in (arrays, result)))
        for arrays, result in zip(sets, results, strict=True)
    ]

    def call(i: int) -> None:
        _, _, inputs, outputs = buffers[i % len(buffers)]
        start(inputs, outputs)

    def sync(_: Any) -> None:
        synchronize()

    call(0)
    sync(None)
    known = errors(sets[0], results[0]) if errors else {}
    return Contender(name, call, sync), agreement(ours, results[0], exact) | known


def _new(like: Array) -> Array:
    return jnp.zeros(like.shape, like.dtype)


def address(x: Array) -> int:
    """Where the array's memory is."""
    return int(x.unsafe_buffer_pointer())
