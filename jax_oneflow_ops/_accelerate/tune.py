"""Finds whether a program runs faster with kernels or without, by running it both ways."""

import functools
import hashlib
import json
import logging
import re
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat, _native
from jax_oneflow_ops._codegen import cache

_GAIN = 1.02  # a smaller gain is noise, and the unchanged program does not need this package
_ROUNDS, _BUDGET_S = 16, 2.0  # the most for each way; there are at least three rounds
_log = logging.getLogger("jax_oneflow_ops")


def tuned(plain: Any, accelerated: Callable[..., Any], how: str) -> Callable[..., Any]:
    """A function that runs the faster one of two, which it times for each new kind of arguments.

    `plain` is a function made by `jax.jit`. It runs without kernels even inside an outer scope.
    `how` says how `accelerated` was made from it.
    """
    chosen: dict[str, Callable[..., Any]] = {}
    are_static: dict[str, list[bool]] = {}  # by kind: the arguments whose values matter
    lock = threading.Lock()

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves) or not _compat.runs_now():
            raise TypeError(
                "accelerate: tune=True times the function on arrays, and it was called inside "
                "jax.jit or another transformation. Remedy: jof.accelerate(jax.jit(fun), tune=True)"
            )
        kinds = _without_addresses(f"{how} {tree} {[*map(_kind, leaves)]}")
        if kinds not in are_static:
            try:
                are_static[kinds] = _compat.are_static(plain, args, kwargs)
            except TypeError as error:
                arrays = *_compat.OPERAND_TYPES, bool, int, float, complex
                others = {type(x).__name__ for x in leaves if not isinstance(x, arrays)}
                if not others:
                    raise
                raise TypeError(
                    f"accelerate: tune=True needs arrays as arguments, got {', '.join(others)}. "
                    "Remedy: jof.accelerate(jax.jit(fun, static_argnums=...), tune=True), or "
                    "capture them in a closure; split modules of equinox with eqx.partition"
                ) from error
        if any(are_static[kinds]):
            values = [x for x, yes in zip(leaves, are_static[kinds], strict=True) if yes]
            kinds += _without_addresses(f" {values}")
        if kinds not in chosen:
            with lock:  # time one at a time
                if kinds not in chosen:
                    faster = _is_faster(plain, accelerated, kinds, args, kwargs)
                    chosen[kinds] = accelerated if faster else plain
        return chosen[kinds](*args, **kwargs)

    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        if hasattr(accelerated, name):
            setattr(run, name, getattr(accelerated, name))
    return run


def _kind(leaf: Any) -> str:
    """What a compiled program depends on in an argument, except values of static arguments."""
    if isinstance(leaf, jax.Array):
        return f"{jax.typeof(leaf)} {leaf.sharding}"
    return (
        f"{leaf.dtype}{leaf.shape}"
        if isinstance(leaf, _compat.OPERAND_TYPES)
        else type(leaf).__name__
    )


def _without_addresses(text: str) -> str:
    """The text without addresses of functions and objects, which differ between processes."""
    return re.sub(r"0x[0-9a-f]+", "", text)


def _is_faster(plain: Any, accelerated: Any, kinds: str, args: Any, kwargs: Any) -> bool:
    if jax.process_count() > 1:
        raise NotImplementedError(
            "accelerate: tune=True works in one process: others might choose otherwise. Remedy: "
            "tune in one process, and pass tune=False where there are many"
        )
    jaxpr = _compat.jaxpr_of(plain.trace(*args, **kwargs))
    if _compat.changes_mutable_arrays(jaxpr):
        _log.warning("accelerate: runs as it is, since timing it would change mutable arrays")
        return False
    text = _without_addresses(str(jaxpr))
    device = jax.devices()[0].device_kind
    asked = str(_native.choose_implementation("accelerate", None))  # from the environment
    parts = (text, kinds, device, str(jax.device_count()), asked, *_versions())
    key = "tuned-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = cache.cache_folder()
    found = None if folder is None else cache.read(folder, key)
    known = None if found is None else json.loads(found)
    source = "as measured before"
    if known is None:
        source = "measured now"
        try:
            times = _times([plain, accelerated], args, kwargs)
        except jax.errors.JaxRuntimeError as error:  # such as too little memory for copies
            _log.warning("accelerate: runs as it is, since it could not be timed: %s", error)
            return False
        known = {"plain_ms": times[0] * 1e3, "accelerated_ms": times[1] * 1e3}
        if folder is not None:
            cache.write(folder, key, json.dumps(known).encode())
    faster = known["plain_ms"] >= _GAIN * known["accelerated_ms"]
    _log.info(
        "accelerate: %s runs %s: %.4g ms with kernels, %.4g ms without, %s",
        getattr(plain, "__name__", "the function"),
        "with kernels" if faster else "as it is",
        known["accelerated_ms"],
        known["plain_ms"],
        source,
    )
    return bool(faster)


def _times(functions: list[Any], args: Any, kwargs: Any) -> list[float]:
    """The median time of each in seconds. They get copies of arguments, as they may donate them."""

    def copied(leaf: Any) -> Any:
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

    def run(function: Any) -> float:
        copies = jax.tree.map(copied, (args, kwargs))
        jax.block_until_ready(copies)
        begin = time.perf_counter()
        jax.block_until_ready(function(*copies[0], **copies[1]))
        return time.perf_counter() - begin

    for function in functions:
        run(function)  # compiles
    samples: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + _BUDGET_S * len(functions)
    for i in range(_ROUNDS):
        if i >= 3 and time.perf_counter() > end:
            break
        order = range(len(functions))
        for j in order if i % 2 == 0 else reversed(order):
            samples[j].append(run(functions[j]))
    return [statistics.median(times) for times in samples]


def _versions() -> list[str]:
    """The versions of all packages that a measurement depends on."""
    from importlib.metadata import version

    return [version(name) for name in ("jax", "jaxlib", "jax-oneflow-ops")]
