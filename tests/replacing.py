"""Puts this package's functions in place of the JAX functions that they replace."""

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_oneflow_ops as jof


def take(
    a,
    indices,
    axis=None,
    out=None,
    mode=None,
    unique_indices=False,
    indices_are_sorted=False,
    fill_value=None,
):
    """`embedding_lookup` with `jnp.take`'s signature; docs/differences.md lists differences."""
    if out is not None:
        raise NotImplementedError("take: out is not supported")
    return jof.embedding_lookup(
        a,
        indices,
        axis,
        mode=mode,
        fill_value=fill_value,
        unique_indices=unique_indices,
        indices_are_sorted=indices_are_sorted,
    )


def astype(x, dtype, copy=False, device=None):
    """`cast` with `jnp.astype`'s signature; JAX handles `copy` and `device`, which it lacks."""
    if copy or device is not None:
        return NATIVE_ASTYPE(x, dtype, copy=copy, device=device)
    return jof.cast(x, dtype)


NATIVE_ASTYPE = jnp.astype
ARITHMETIC = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
ACTIVATIONS = (
    *("relu", "leaky_relu", "elu", "sigmoid", "silu", "softplus", "hard_swish", "mish", "gelu"),
)
# (Module or class, name that programs use) -> replacement.
REPLACED: dict[tuple[Any, str], Callable[..., Any]] = {
    **{(jnp, name): getattr(jof, name) for name in (*ARITHMETIC, "where", "tanh")},
    (jnp, "true_divide"): jof.divide,
    (jnp, "transpose"): jof.permute,
    (jnp, "permute_dims"): jof.permute,
    (jnp, "take"): take,
    (jnp, "astype"): astype,
    **{(jax.nn, name): getattr(jof, name) for name in ACTIVATIONS},
    (jax.nn, "swish"): jof.silu,
    (jax.nn, "hard_silu"): jof.hard_swish,
    (jax.ops, "segment_sum"): jof.segment_sum,
    (jax.image, "resize"): jof.resize,
    (type(jnp.zeros(())), "astype"): astype,
    (jax.core.Tracer, "astype"): astype,
}


def is_called_by(package: str) -> bool:
    """Whether a function of `package` is on this thread's call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False


def standing_in(replacement: Callable[..., Any], original: Any, calls: collections.Counter) -> Any:
    """`replacement` for all callers except this package, whose references use JAX's functions."""

    @functools.wraps(original, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_called_by("jax_oneflow_ops"):
            return original(*args, **kwargs)
        calls[replacement.__name__] += 1
        return replacement(*args, **kwargs)

    return function


@contextlib.contextmanager
def replaced() -> Iterator[collections.Counter]:
    """Puts this package's functions in place of JAX's, and counts calls.

    Counts calls by function name, and the native calls that programs are lowered to by FFI target.
    """
    counts: collections.Counter = collections.Counter()
    ffi_call = jax.ffi.ffi_call

    def counted(target: str, *args: Any, **kwargs: Any) -> Any:
        counts[target] += 1
        return ffi_call(target, *args, **kwargs)

    with (
        pytest.MonkeyPatch.context() as patch,
        # Keeps JAX's trace caches in here and outside apart: this setting is part of the caches'
        # keys. On CPUs it changes nothing else.
        jax.default_matmul_precision("highest"),
    ):
        patch.setattr(jax.ffi, "ffi_call", counted)
        for (owner, name), replacement in REPLACED.items():
            patch.setattr(owner, name, standing_in(replacement, getattr(owner, name), counts))
        yield counts
