"""Programs as users write them, without calls to this package: the targets of `accelerate`.

Each is made from a size and a compute dtype, and can be traced without allocating its arrays.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# Sizes: "tiny" for tests, "small" for benchmarks on CPUs, "full" for benchmarks on GPUs.
LARGE = (
    *("graph_attention", "mesh_graph_net", "gpt2", "llama", "unet", "segmentation", "vit"),
    *("pic", "histogram"),
)
PLAIN = ("pic", "histogram")  # in 32 bits
SCALE_FREE = ("graph_attention_scale_free", "mesh_graph_net_scale_free")  # in benchmarks only
LAYERS = ("graph_attention", "mesh_graph_net", *SCALE_FREE)  # benchmarked with graph layers, too
NAMES = (*LARGE, "nnx_gpt2", "equinox_mesh_graph_net")  # the last two are "tiny" or "small"


class Program(NamedTuple):
    """A step, and functions that make its arguments from a key."""

    step: Callable[[Any, Any], tuple[Any, jax.Array]]  # (state, batch) -> (state, loss)
    state: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]


def make(name: str, size: str, dtype: str = "bfloat16", layers: bool = False) -> Program:
    """The program of a name; raises ModuleNotFoundError if its library is not installed.

    With `layers`, it uses this package's graph layers: the state is the same, batches differ.
    """
    library, _, model = name.partition("_")
    if library in ("nnx", "equinox"):
        module = importlib.import_module(f"{__name__}.in_{library}")
    elif name in PLAIN:
        module, model = importlib.import_module(f"{__name__}.plain"), name
    else:
        library = "layers" if layers else "linen"
        module, model = importlib.import_module(f"{__name__}.in_{library}"), name
    if name in SCALE_FREE:
        made = getattr(module, name.removesuffix("_scale_free"))(size, dtype, scale_free=True)
    else:
        made = getattr(module, model)(size, dtype)
    program: Program = made
    return program
