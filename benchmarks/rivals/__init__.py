"""Other libraries' kernels, on the memory of the same JAX arrays.

A module's ``contender(...)`` makes a rival, and needs the library only then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..harness import Array, Sets, agreement, difference
from ..timing import Contender


def is_large(shape: str) -> bool:
    """Returns whether a case of the elementwise and cast suites has the larger arrays."""
    return shape in ("512 MiB", "4M elements")


def on_views(
    name: str,
    view: Callable[[Array], Any],
    start: Callable[[Sequence[Any], Sequence[Any]], Any],
    synchronize: Callable[[], Any],
    sets: Sets,
    ours: Array,
    *,
    exact: bool = False,
) -> tuple[Contender, bool]:
    """Returns a contender that calls ``start(inputs, outputs)`` on views of JAX arrays.

    Each set of inputs has its own outputs, new arrays like ``ours``, which are written in place.
    """
    results = jax.block_until_ready([jax.tree.map(jnp.zeros_like, ours) for _ in sets])
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
    right = agreement(jax.jit(difference)(ours, results[0]), exact, ours)
    return Contender(name, call, sync), right


def address(x: Array) -> int:
    """Where the array's memory is."""
    return int(x.unsafe_buffer_pointer())
