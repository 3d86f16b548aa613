"""Rounding of values inside kernels to the narrow dtypes that they are cast to.

In a jaxpr of scalars, float32 stands for narrow floats, so a cast to one of these rounds a float32.
`jax.lax.reduce_precision` has no subnormal numbers, and an infinity in all formats. So it would do
for bfloat16 only, which has the exponents of float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_oneflow_ops import _compat
from jax_oneflow_ops._codegen.signature import is_narrow


def rounded(x: Any, dtype: Any) -> Any:
    """`x` rounded to what a narrow dtype can represent; for other dtypes, `x`.

    Its derivative rounds tangents and cotangents likewise, as those of casts do.
    """
    return rounded_p.bind(x, to=str(dtype)) if is_narrow(str(dtype)) else x


def rounds_to(dtype: Any, params: Any) -> str | None:
    """The dtype that a `reduce_precision` of `dtype` rounds to; None if no dtype is such a format.

    It is `dtype`, or bfloat16 for float32. Formats with fewer exponent bits have other subnormal
    numbers and infinities than dtypes of as many bits.
    """
    own, bits = jnp.finfo(dtype), (params["exponent_bits"], params["mantissa_bits"])
    if bits[0] >= own.nexp and bits[1] >= own.nmant:
        return str(dtype)
    return "bfloat16" if dtype == jnp.float32 and bits == (8, 7) else None


def _cast(x: Any, *, to: str) -> list[Any]:
    """The cast and the cast back, which XLA would remove as a pair, in programs for XLA."""
    if to == "bfloat16" and x.dtype == jnp.float32:
        return [jax.lax.reduce_precision(x, 8, 7)]
    return [jax.lax.optimization_barrier(x.astype(to)).astype(x.dtype)]


rounded_p = core.Primitive("jof_rounded")
rounded_p.def_abstract_eval(lambda x, *, to: x)
rounded_p.def_impl(lambda x, *, to: _cast(x, to=to)[0])
ad.deflinear2(rounded_p, lambda ct, x, *, to: [rounded_p.bind(ct, to=to)])
batching.defvectorized(rounded_p)
mlir.register_lowering(rounded_p, _compat.lower_plain(_cast, multiple_results=True))
