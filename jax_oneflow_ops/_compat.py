"""The only module that knows versions of jax and imports its internals, each use with its reason."""

import functools
import re
from pathlib import Path
from typing import cast

import jax
from jax._src import dispatch
from jax.extend import core


def require_devices_during_lowering(primitive: core.Primitive) -> None:
    """Makes jax pass the device assignment when it lowers `primitive`.

    The lowering of `custom_partitioning` needs it, also where it is reached through the lowering of
    another primitive; jax sees the outer one only. There is no public way to say so.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


@functools.cache
def runtime_ffi_api() -> tuple[int, int]:
    """Version of XLA's FFI API that the installed jaxlib implements.

    jaxlib offers it only in the C header that it ships.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(
        re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text(), re.MULTILINE)
    )
    return int(found["MAJOR"]), int(found["MINOR"])


def without_spatial_sharding(
    aval: jax.core.ShapedArray, shape: tuple[int, ...], gathered: tuple[int, ...]
) -> jax.core.ShapedArray:
    """`aval` with another shape, its sharding dropped on the dimensions `gathered`."""
    sharding = aval.sharding
    spec = [None if i in gathered else s for i, s in enumerate(sharding.spec)]
    sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return cast(jax.core.ShapedArray, aval.update(shape=shape, sharding=sharding))
