"""Which implementation runs where the caller leaves it open, and the measurements that say so.

`policy.json` holds, for each device measured, cells such as "permute/tile/2-byte": the family of
calls, then what distinguishes them. A cell has a line for each range of sizes:

    [most bytes, cases, gain, low, least, native, xla]

`gain` is the geometric mean of XLA's time over that of the kernels, `least` the least one, and
`low` the least one that counts: noise does not, nor do single losses of sums. `native` and `xla`
are their median times in microseconds per MiB. ``python -m benchmarks policy`` makes the file from
the results of the benchmarks and of surveys of random shapes.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import jax
from jax.extend import core

BANDS = (1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 50)
"""The most bytes of each range of sizes."""
CASES, GAIN, LOW = 4, 1.03, 0.95
"""Native kernels run where at least so many cases gain so much, and none is slower than this,"""
FEW, CLEAR = 2, 1.1
"""or where there are so few, and each of them gains so much."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a choice depends on."""

    kind: tuple[str, ...]  # from the family to what distinguishes calls: a cell's name
    bytes: int  # each array read or written once
    unmeasured: str = "native"  # what runs where the device has no cell for such calls
    least_depth: int = 1  # coarser cells, of fewer parts of the kind, say nothing about the call


@dataclasses.dataclass(frozen=True)
class Decision:
    """The implementation of one call on one kind of device.

    Attributes:
      call: the family, what distinguishes the call within it, and the bytes that it moves.
      implementation: ``"native"`` or ``"xla"``.
      reason: the measurement, or the reason why none is needed.
      native_us: the expected time of the kernels in microseconds, None if nothing like the call was
        measured.
      xla_us: the expected time of XLA, or None.
    """

    call: Call
    implementation: str
    reason: str
    native_us: float | None = None
    xla_us: float | None = None

    def __str__(self) -> str:
        size = [f"{self.call.bytes / 2**20:.3g} MiB"] if self.call.bytes else []
        what = ", ".join([*self.call.kind, *size]) or "call"
        return f"{what}: {self.implementation} ({self.reason})"


def nbytes(*avals: Any) -> int:
    """The bytes of arrays."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def bits(dtype: Any) -> str:
    """Such as "16-bit"."""
    return f"{8 * dtype.itemsize}-bit"


@functools.cache
def tables() -> dict[str, Any]:
    """The contents of `policy.json`, by the kind of device."""
    text = resources.files("jax_oneflow_ops").joinpath("policy.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def _table(platform: str, device_kind: str | None) -> tuple[str, Any]:
    """The measurements of a kind of device, else those of the first one of its platform."""
    known = {name: table for name, table in tables().items() if table["platform"] == platform}
    name = device_kind if device_kind in known else next(iter(known), "")
    return name, known.get(name)


def is_enough(cases: int, low: float) -> bool:
    """Whether so many cases, the slowest of which gains `low`, decide about others."""
    return cases >= CASES or (cases >= FEW and low >= CLEAR)


def choose(call: Call | str, platform: str, device_kind: str | None = None) -> Decision:
    """Chooses between native kernels, which there are, and XLA."""
    if isinstance(call, str):
        return Decision(Call((), 0), "native", call)
    device, table = _table(platform, device_kind)
    if table is None:
        return Decision(call, "native", f"no device of the platform {platform} was measured")
    size = next(most for most in BANDS if call.bytes <= most)
    for depth in range(len(call.kind), call.least_depth - 1, -1):
        for most, cases, gain, low, least, native, xla in table["cells"].get(
            "/".join(call.kind[:depth]), ()
        ):
            # A line says nothing about smaller arrays: a coarser cell that has them does.
            if most != size or not is_enough(cases, low):
                continue
            wins = gain >= GAIN and low >= LOW
            speed = f"{gain:.2f}x as fast as XLA, {least:.2f}x in the worst case"
            reason = f"{speed}, in {cases} cases on {device}"
            times = (us * call.bytes / 2**20 for us in (native, xla))
            return Decision(call, "native" if wins else "xla", reason, *times)
    return Decision(call, call.unmeasured, f"no such call was measured on {device}")


# ---- chains of elementwise operations, for accelerate(fuse=True) ----


@dataclasses.dataclass(frozen=True)
class Chain:
    """Elementwise operations that one kernel would compute, in 16 bits."""

    dtype: str
    arrays: int  # that it reads, each as large as its results
    results: int
    bytes: int  # each array read or written once
    size: int  # of a result, in elements
    has_function: bool  # such as exp
    after_product: bool  # all arrays are the result of one matrix product or convolution


@dataclasses.dataclass(frozen=True)
class Worthwhile:
    """Chains that were measured to gain as one kernel, on the platform."""

    platform: str
    reason: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    arrays: int = 1  # at most
    results: int = 1  # at most
    least_bytes: int = 1 << 22
    needs_function: bool = False
    in_fours: bool | None = None  # whether 4 divides the number of elements
    after_product: bool = False  # XLA's products on GPUs end in a bias and an activation


CHAINS = (
    Worthwhile(
        "cuda",
        # `chain` and `bias_gelu` of the suite `kernels`; the least of the suite `elementwise`.
        "chains of one array ran 1.42 to 2.17x as fast, single operations at least 1.26x (H200)",
    ),
    Worthwhile(
        "cuda",
        # `residual_gelu`; gradients of activations and gated units. Without such a function, as in
        # `squared_diff`, and of more arrays, as in gradients of gated units, 0.99 to 1.01x.
        "chains of two arrays with a function such as exp ran 1.03 to 1.70x as fast (H200)",
        arrays=2,
        needs_function=True,
    ),
    Worthwhile(
        "cuda",
        # The cells "elementwise/2 operands/16-bit/one by one" and those of three operands.
        "arrays that are not loaded in fours ran 1.3 to 2.1x as fast (H100, H200)",
        arrays=3,
        in_fours=False,
    ),
    Worthwhile(
        "cpu",
        # All chains of the suite `kernels`; 1.4x at least in smaller arrays, down to 1 MiB.
        "chains ran 3.2 to 6.4x as fast in bfloat16, in which XLA rounds each operation (AMD EPYC)",
        dtypes=("bfloat16",),
        arrays=3,
        results=2,
        least_bytes=1 << 20,
        after_product=True,
    ),
    Worthwhile(
        "cpu",
        # Of the same suite; without such a function 0.89 to 1.68x.
        "chains with a function such as exp ran 4.4 to 6.2x as fast in float16 (AMD EPYC)",
        dtypes=("float16",),
        arrays=2,
        least_bytes=1 << 20,
        needs_function=True,
        after_product=True,
    ),
)
"""Chains in float32 ran at the speed of XLA. Norms and softmax were slower in whole programs."""

JOINS_RESULTS = ("cuda",)
"""Where XLA computes several results of the same arrays in one pass: a kernel for one of them would
read the arrays again. On CPUs a step of a small GPT-2, whose gelu is differentiated beside the sum
for a bias, took 26 % less processor time with kernels in any case (AMD EPYC)."""

FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv pow sin cos tan asin acos atan
        sinh cosh asinh acosh atanh atan2 cbrt""",
    )
)
"""Primitives that take many instructions for each element."""


def why_worthwhile(chain: Chain, platform: str) -> str | None:
    """The measurement by which a chain is one kernel; None where it is left to XLA."""
    for one in CHAINS:
        if (
            (one.platform, one.in_fours) in ((platform, None), (platform, chain.size % 4 == 0))
            and chain.dtype in one.dtypes
            and 1 <= chain.arrays <= one.arrays
            and chain.results <= one.results
            and chain.bytes >= one.least_bytes
            and chain.has_function >= one.needs_function
            and one.after_product >= chain.after_product
        ):
            return one.reason
    return None


# ---- the calls of a program ----

calls_of: dict[core.Primitive, Callable[..., Call | str]] = {}
"""By primitive: `(*avals, **params) -> Call`, or the reason why kernels run in any case."""


def describe(primitive: core.Primitive, avals: Sequence[Any], **params: Any) -> Call | str:
    """What the choice for a call depends on, or the reason why kernels run."""
    sizes = (size for aval in avals for size in aval.shape)
    if not all(isinstance(size, int) for size in (*sizes, params.get("num_segments", 0))):
        return "sizes are not known yet"
    return calls_of[primitive](*avals, **params)


def prefers_xla(
    primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any], platform: str
) -> bool:
    """Whether a call on this process's devices is one that XLA runs as fast."""
    if primitive not in calls_of:
        return False
    call = describe(primitive, avals, **params)
    return choose(call, platform, device_kind(platform)).implementation == "xla"


def calls(jaxpr: Any) -> Iterator[tuple[Any, Call | str]]:
    """The calls of this package's functions in a traced program, and what they depend on."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        params = dict(equation.params)
        if equation.primitive in calls_of:
            implementation = params.pop("implementation")
            avals = [variable.aval for variable in equation.invars]
            yield implementation, describe(equation.primitive, avals, **params)
        else:
            for inner in jax.tree.leaves(params, is_leaf=is_jaxpr):
                yield from calls(inner) if is_jaxpr(inner) else ()


def is_jaxpr(x: Any) -> bool:
    """Whether a parameter of an equation is a program."""
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def policy(
    fun: Callable[..., Any], *args: Any, device: jax.Device | str | None = None, **kwargs: Any
) -> list[Decision]:
    """Shows which implementation runs for each call of this package's functions in a program.

    If `implementation` is None, native kernels run if they were measured to be faster than XLA, by
    more than noise, for such calls on such a device; otherwise XLA runs. `fun` is traced, not run.
    Measurements do not decide about calls on at most one element, which XLA runs, or about calls in
    programs over several devices, which native kernels run.

    Args:
      fun: a function of arrays that calls functions of this package, or one of them.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`. Bind others, such as `num_segments`,
        by `functools.partial`.
      device: a device, or the name of a measured kind such as ``"NVIDIA H200"``, which you need not
        have. By default JAX's default device. A device of a kind that was not measured uses the
        first measurements of its platform.
      **kwargs: keyword arguments of `fun`.

    Returns:
      A `Decision` for each call, in the order of the program: its `implementation`, `reason`, the
      expected times `native_us` and `xla_us`, and the `call`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: `device` is not the name of a measured device.

    Example:
      >>> import jax, jax.numpy as jnp, jax_oneflow_ops as jof
      >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
      >>> [decision] = jof.policy(jof.gelu, x, device="NVIDIA H200")
      >>> decision.implementation
      'native'
    """
    if not callable(fun):
        raise TypeError(
            f"policy: fun must be a function, got {type(fun).__name__}; pass the function and then "
            "its arguments: policy(jax_oneflow_ops.gelu, x)"
        )
    if isinstance(device, str):
        if device not in tables():
            known = ", ".join(map(repr, tables()))
            raise ValueError(
                f"policy: device must be a jax.Device or one of {known}, got {device!r}"
            )
        platform, kind = tables()[device]["platform"], device
    else:
        platform, kind = _place(device)
    jaxpr = jax.make_jaxpr(functools.partial(fun, **kwargs))(*args)
    decisions = []
    for implementation, call in calls(jaxpr):
        decision = choose(call, platform, kind)
        if implementation is not None:
            decision = dataclasses.replace(
                decision, implementation=implementation, reason="asked for"
            )
        decisions.append(decision)
    return decisions


def _place(device: jax.Device | None) -> tuple[str, str]:
    """The platform of a device as lowering names it, and its kind."""
    device = device or jax.devices()[0]
    return ("cuda" if device.platform == "gpu" else device.platform), device.device_kind


@functools.cache
def device_kind(platform: str) -> str | None:
    """The kind of this process's devices of a platform; None if there is none."""
    try:
        return str(jax.local_devices(backend=platform)[0].device_kind)
    except RuntimeError:
        return None
