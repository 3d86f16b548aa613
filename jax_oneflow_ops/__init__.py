"""OneFlow's CUDA techniques for memory-bound operations as ordinary JAX functions.

Every function has the signature and the semantics of the JAX function it replaces, works under
`jit`, `grad`, `vmap` and sharding, and runs as a native kernel on GPUs and CPUs. See the functions
for their numerics, and :func:`implementations` for what is available where. :func:`accelerate` runs
a program that calls none of them with their kernels.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jax_oneflow_ops._native import export_checks, implementations, include_dir
from jax_oneflow_ops._policy import policy
from jax_oneflow_ops._primitive import GatherWarning
from jax_oneflow_ops.accelerate import accelerate, explain
from jax_oneflow_ops.elementwise import (
    add,
    cast,
    divide,
    elu,
    fma,
    geglu,
    gelu,
    hard_swish,
    leaky_relu,
    maximum,
    minimum,
    mish,
    multiply,
    relu,
    scale,
    sigmoid,
    silu,
    softplus,
    subtract,
    swiglu,
    tanh,
    where,
)
from jax_oneflow_ops.permute import permute
from jax_oneflow_ops.scatter import (
    embedding_lookup,
    scatter_add,
    scatter_max,
    scatter_min,
    scatter_mul,
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_softmax,
    segment_sum,
)
from jax_oneflow_ops.upsample import resize, upsample_nearest2d

if TYPE_CHECKING:
    from jax_oneflow_ops._fuse import FusionError, fuse
    from jax_oneflow_ops.graph import (
        SegmentPlan,
        attention_sum,
        message_max,
        message_mean,
        message_sum,
        segment_plan,
    )
    from jax_oneflow_ops.kernel import ElementwiseKernel, KernelCompileError
    from jax_oneflow_ops.rows import (
        group_norm,
        layer_norm,
        log_softmax,
        logsumexp,
        rms_norm,
        softmax,
        softmax_cross_entropy_with_integer_labels,
    )

__all__ = [
    "ElementwiseKernel",
    "FusionError",
    "GatherWarning",
    "KernelCompileError",
    "SegmentPlan",
    "accelerate",
    "add",
    "attention_sum",
    "cast",
    "divide",
    "elu",
    "embedding_lookup",
    "explain",
    "export_checks",
    "fma",
    "fuse",
    "geglu",
    "gelu",
    "group_norm",
    "hard_swish",
    "implementations",
    "include_dir",
    "layer_norm",
    "leaky_relu",
    "log_softmax",
    "logsumexp",
    "maximum",
    "message_max",
    "message_mean",
    "message_sum",
    "minimum",
    "mish",
    "multiply",
    "permute",
    "policy",
    "relu",
    "resize",
    "rms_norm",
    "scale",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_plan",
    "segment_prod",
    "segment_softmax",
    "segment_sum",
    "sigmoid",
    "silu",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
    "softplus",
    "subtract",
    "swiglu",
    "tanh",
    "upsample_nearest2d",
    "where",
]


# These modules take milliseconds to import, and not every program needs them: they are imported on
# first use.
_LAZY = {
    "_fuse": ("FusionError", "fuse"),
    "graph": (
        "SegmentPlan",
        "attention_sum",
        "message_max",
        "message_mean",
        "message_sum",
        "segment_plan",
    ),
    "kernel": ("ElementwiseKernel", "KernelCompileError"),
    "rows": (
        "group_norm",
        "layer_norm",
        "log_softmax",
        "logsumexp",
        "rms_norm",
        "softmax",
        "softmax_cross_entropy_with_integer_labels",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jax-oneflow-ops")
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    # Given the module as `obj`, Python 3.12 and newer suggest the name that was meant.
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=sys.modules[__name__])
