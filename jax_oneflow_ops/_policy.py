"""Which implementation runs where the caller leaves it open, and the measurements that say so.

`policy.json` holds the cases that were measured on each device, by kinds of calls such as
"permute/tile/2-byte": the family, then what distinguishes its calls. A case is a list:

    [bytes, other sizes, ..., native, XLA, noise]

The last three are microseconds: the times of the kernels and of what the default runs instead, and
the spread of the kernels'. ``python -m benchmarks policy`` makes the file from the results of the
benchmarks and of surveys of random shapes.

A call is judged by all cases of its family. The nearer a case is, the more it counts: a tenth for
each part of the kind that differs, and for a size that is `ALIKE` times as large; the weight falls
with the square of the logarithm of the size. Cases that differ in a part count together as `OTHERS`
at most. Calls that move more bytes than any case are judged as if they moved as many.
"""

import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

import jax
from jax.extend import core

ALIKE, OTHERS = 16, 1.0
GAIN = 1.05
"""Kernels run where the mean gain is larger."""
NOTHING = 0.1
"""The weight, beside that of the cases, of a call that gains nothing: few cases must be clear."""
LOSS, LOSS_OF_SUMS, MOST = 3, 2, 2
"""How often a loss counts that is more than noise, and as which factor a gain or a loss counts at
most. The choice cannot know the ids of sums: rows may be hot, where XLA may take a hundred times as
long.

The constants and the kinds were chosen by leaving out one file of results after the other and
choosing for its cases by the others.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a choice depends on."""

    kind: tuple[str, ...]  # the family, then what distinguishes its calls
    bytes: int  # each array read or written once
    sizes: tuple[int, ...] = ()  # others that times depend on


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


def choose(call: Call | str, platform: str, device_kind: str | None = None) -> Decision:
    """Chooses between native kernels, which there are, and XLA."""
    if isinstance(call, str):
        return Decision(Call((), 0), "native", call)
    device, table = _table(platform, device_kind)
    if table is None:
        return Decision(call, "native", f"no device of the platform {platform} was measured")
    cases = _weighted(call, table["cases"])
    if not cases:
        return Decision(call, "native", f"no such call was measured on {device}")
    loss = LOSS_OF_SUMS if call.kind[0] == "sum" else LOSS
    total = sum(weight for weight, *_ in cases)
    gain = sum(weight * _worth(loss, *times) for weight, _, *times in cases) / (NOTHING + total)
    # What is told is of the nearest cases alone.
    enough = max(cases)[0] / 20
    near = [case for case in cases if case[0] >= enough]
    native, xla = (_mean((case[0], case[i] / case[1]) for case in near) for i in (2, 3))
    least = min(xla / native for _, _, native, xla, _ in near)
    speed = f"{xla / native:.2f}x as fast as XLA, {least:.2f}x in the worst case"
    reason = f"{speed}, in {len(near)} case{'s' * (len(near) > 1)} on {device}"
    reason += ", none of them near" * (total < NOTHING)
    implementation = "native" if gain > math.log(GAIN) else "xla"
    return Decision(call, implementation, reason, native * call.bytes, xla * call.bytes)


def _weighted(call: Call, cases: dict[str, Any]) -> list[tuple[float, ...]]:
    """The weight, the bytes, both times and the noise of each case of a call's family."""
    same: list[tuple[float, ...]] = []
    others: list[tuple[float, ...]] = []
    unit = math.log(ALIKE)
    family = {name: x for name, x in cases.items() if name.split("/")[0] == call.kind[0]}
    largest = max((case[0] for measured in family.values() for case in measured), default=0)
    sizes = [math.log(size or 1) for size in (min(call.bytes, largest), *call.sizes)]
    for name, measured in family.items():
        different = sum(map(operator.ne, name.split("/"), call.kind))
        for case in measured:
            pairs = zip(sizes, case[:-3], strict=False)
            apart = sum(((a - math.log(b or 1)) / unit) ** 2 for a, b in pairs)
            found = (10 ** -(different + apart), case[0] or 1, *case[-3:])
            (others if different else same).append(found)
    share = OTHERS / max(OTHERS, sum(weight for weight, *_ in others))
    return same + [(share * weight, *rest) for weight, *rest in others]


def _worth(loss: int, native: float, xla: float, noise: float) -> float:
    """What a case says for the kernels."""
    if xla >= native:
        return math.log(min(xla / native, MOST))
    return loss * math.log(min(max((xla + noise) / native, 1 / MOST), 1))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """The geometric mean of pairs of a weight and a number."""
    weights, logs = zip(*((weight, weight * math.log(x)) for weight, x in weighted), strict=True)
    return math.exp(sum(logs) / sum(weights))


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
        # The cases of "elementwise/2 operands/16-bit/one by one" and of three operands.
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

gradients_of: dict[core.Primitive, Callable[..., Call | str]] = {}
"""By primitive: the same of its gradient. Measurements of a gradient are of both together."""

WITH_GRADIENT = "with its gradient"
"""The parameter `implementation` of a call that is chosen so."""


def with_gradient(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call that is differentiated: one choice is made for it and its gradient.

    Chosen apart, the two could be slower together than either implementation of both.
    """
    return {**params, "implementation": params["implementation"] or WITH_GRADIENT}


def describe(
    primitive: core.Primitive,
    avals: Sequence[Any],
    implementation: str | None = None,
    **params: Any,
) -> Call | str:
    """What the choice for a call depends on, or the reason why kernels run."""
    sizes = (size for aval in avals for size in aval.shape)
    if not all(isinstance(size, int) for size in (*sizes, params.get("num_segments", 0))):
        return "sizes are not known yet"
    of = gradients_of if implementation == WITH_GRADIENT and primitive in gradients_of else calls_of
    return of[primitive](*avals, **params)


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
            avals = [variable.aval for variable in equation.invars]
            implementation = params["implementation"]
            asked = None if implementation == WITH_GRADIENT else implementation
            yield asked, describe(equation.primitive, avals, **params)
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

    If `implementation` is None, native kernels run if measured calls like it gained more than they
    lost on such a device, or if its family was not measured; else XLA runs. A function of rows that
    is differentiated and its gradient are one choice. `fun` is traced, not run.

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
