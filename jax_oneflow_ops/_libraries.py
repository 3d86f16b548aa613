"""Functions of flax and optax that `accelerate` replaces while a program is traced.

JAX's own operations are swapped where they are lowered. By then the gradient of a norm is a dozen
operations that cannot be told from their neighbours, so a norm is replaced as a whole, before it is
differentiated: by a function that calls this package's inside `accelerate`, and the library's own
outside. A release whose functions have other parameters is left as it is.
"""

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from jax_oneflow_ops import _compat

Function = Callable[..., Any]
Found = Callable[[str, Sequence[Any]], None]

LEAST_BYTES = 1 << 20
"""Smaller arrays stay XLA's: they are in the cache, and it fuses norms with what is around them."""

REASON = "one pass over memory, and two for the gradient"

_FLOATS = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))

found: ContextVar[Found | None] = ContextVar("found", default=None)
"""Is told of each call that is replaced: the name of the function, and its arrays."""

_local = threading.local()
_installing = threading.Lock()


def _is_large(x: Any) -> bool:
    sizes = x.shape
    known = all(isinstance(size, int) for size in sizes)
    return known and math.prod(sizes) * x.dtype.itemsize >= LEAST_BYTES


# ---- flax's norms: statistics, then arithmetic that creates or is given the parameters ----


def _stats(original: Function, arguments: Callable[..., Mapping[str, Any]]) -> Function:
    """Remembers the last statistics that are plain ones of all elements of the axes."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = arguments(*args, **kwargs)
        is_plain = (
            given.get("mask") is None
            and given.get("axis_name") is None
            and given.get("force_float32_reductions", True)
        )
        _local.stats = (result[0], given.get("use_mean", True)) if is_plain else None
        return result

    return compute


def _normalize(original: Function, arguments: Callable[..., Mapping[str, Any]]) -> Function:
    """The whole norm in one call. XLA drops the statistics, which nobody reads then."""

    def normalize(*args: Any, **kwargs: Any) -> Any:
        given = arguments(*args, **kwargs)
        x, stats = given["x"], getattr(_local, "stats", None)
        axes = [
            tuple(a % x.ndim for a in (axes if isinstance(axes, tuple | list) else (axes,)))
            for axes in (given["reduction_axes"], given["feature_axes"])
        ]
        if stats is None or stats[0] is not given["mean"] or axes[0] != axes[1]:
            return original(*args, **kwargs)
        dtype = jnp.dtype(given["dtype"] or jnp.result_type(x, *_dtypes(given)))
        # A result of another dtype than x would take another pass.
        is_one_pass = x.dtype == dtype and dtype in _FLOATS and axes[0] == (x.ndim - 1,)
        if not is_one_pass or not _is_large(x):
            return original(*args, **kwargs)
        vectors = _vectors(given, [x.shape[-1]])
        name = "layer_norm" if stats[1] else "rms_norm"
        _tell(name, (x, *vectors.values()))
        from jax_oneflow_ops import rows  # imported lazily: not every program has norms

        norm = rows.layer_norm if stats[1] else rows.rms_norm
        return norm(x, **vectors, epsilon=given["epsilon"])

    return normalize


def _dtypes(given: Mapping[str, Any]) -> list[Any]:
    """Of the scale and the bias, as they are or will be made."""
    if "mdl" not in given:
        return [given[name] for name in ("scale", "bias") if given[name] is not None]
    return [given["param_dtype"]] * (given["use_scale"] or given["use_bias"])


def _vectors(given: Mapping[str, Any], shape: list[int]) -> dict[str, Any]:
    """The scale and the bias: nnx passes them, linen has them made or looked up."""
    if "mdl" not in given:
        return {name: given[name] for name in ("scale", "bias") if given[name] is not None}
    return {
        name: given["mdl"].param(name, given[f"{name}_init"], shape, given["param_dtype"])
        for name in ("scale", "bias")
        if given[f"use_{name}"]
    }


# ---- optax's cross entropy ----


def _cross_entropy(original: Function, arguments: Callable[..., Mapping[str, Any]]) -> Function:
    """Of 16-bit logits: XLA fuses a conversion to float32 with the passes that it makes anyway."""

    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        given = arguments(*args, **kwargs)
        logits = given["logits"]
        is_narrow = getattr(logits, "dtype", None) in (jnp.float16, jnp.bfloat16)
        if not is_narrow or given["where"] is not None or not _is_large(logits):
            return original(*args, **kwargs)
        from jax_oneflow_ops import rows

        _tell("softmax_cross_entropy_with_integer_labels", (logits, given["labels"]))
        return rows.softmax_cross_entropy_with_integer_labels(
            logits, given["labels"], given["axis"]
        )

    return cross_entropy


def _tell(name: str, arrays: Sequence[Any]) -> None:
    if (tell := found.get()) is not None:
        tell(name, arrays)


# ---- replacing ----

_NORMALIZE = ("x", "mean", "var", "reduction_axes", "feature_axes", "dtype", "epsilon")
_REPLACED: tuple[tuple[tuple[str, ...], str, Function, tuple[str, ...]], ...] = (
    *(
        ((module,), name, make, parameters)
        for module, more in (
            ("flax.linen.normalization", ("mdl", "scale_init", "bias_init", "param_dtype")),
            ("flax.nnx.nn.normalization", ("scale", "bias")),
        )
        for name, make, parameters in (
            ("_compute_stats", _stats, ("x", "axes", "axis_name", "use_mean", "mask")),
            ("_normalize", _normalize, (*_NORMALIZE, *more)),
        )
    ),
    (
        ("optax.losses._classification", "optax.losses", "optax"),
        "softmax_cross_entropy_with_integer_labels",
        _cross_entropy,
        ("logits", "labels", "axis", "where"),
    ),
)
"""The modules that have a function, its name, what replaces it, and parameters it must have."""


def install() -> None:
    """Replaces the functions of those libraries that are imported, once."""
    with _installing:
        for modules, name, make, parameters in _REPLACED:
            home = sys.modules.get(modules[0])
            original = getattr(home, name, None)
            if original is None or hasattr(original, "_jof_original"):
                continue
            signature = inspect.signature(original)
            if not {*parameters} <= {*signature.parameters}:
                continue
            replacement = _in_scope(original, make(original, _arguments(signature)))
            for module in map(sys.modules.get, modules):
                if getattr(module, name, None) is original:
                    setattr(module, name, replacement)


def _arguments(signature: inspect.Signature) -> Callable[..., Mapping[str, Any]]:
    def arguments(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    return arguments


def _in_scope(original: Function, replacement: Function) -> Function:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        is_on = _compat.scope_now() not in (None, _compat.OFF)
        return (replacement if is_on else original)(*args, **kwargs)

    function._jof_original = original  # type: ignore[attr-defined]
    return function
