"""Chooses the implementation where the caller leaves it open, by measurements.

`policy.json` holds the cases that were measured on each device, grouped by kind of call such as
"permute/tile/2-byte": the family, then what distinguishes calls within it. A case is a list:

    [bytes, other sizes, ..., native, XLA, noise]

The last three are in microseconds: the time of the kernels, the time of what the default runs
instead, and the spread of the kernels' times. ``python -m benchmarks policy`` makes the file from
the results of the benchmarks and of surveys of random shapes.

The choice for a call is a weighted vote of all cases of its family. A case whose kind and sizes
equal the call's has weight 1. Each part of the kind that differs divides the weight by ten. A size
that differs by a factor of `ALIKE` does the same; the exponent grows with the square of the
logarithm of that factor. The weights of all cases of other kinds sum to at most `OTHERS`. A call
that moves more bytes than any case is treated as if it moved as many as the largest case. Cases of
other devices of the same platform have `ELSEWHERE` times these weights.
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

ALIKE, OTHERS, ELSEWHERE = 12, 1.0, 0.3
GAIN = 1.05
"""Kernels run if the mean gain is larger than this."""
NOTHING = 0.1
"""The weight of a fictitious case that gains nothing: a few cases decide only if they are clear."""
LOSS, LOSS_OF_SUMS, MOST = 8, 2, 2
"""How many times a loss beyond noise counts, the same for sums, and the largest factor that a gain
or a loss counts as. Losses of sums count less because the choice cannot know their ids: rows may be
hot, and XLA may then take a hundred times as long.

The constants and the kinds were chosen by cross-validation: each file of results was left out in
turn, and the choices for its cases were made from the other files.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a choice depends on."""

    kind: tuple[str, ...]  # the family, then what distinguishes its calls
    bytes: int  # each array read or written once
    sizes: tuple[int, ...] = ()  # other sizes that times depend on


@dataclasses.dataclass(frozen=True)
class Decision:
    """The implementation of one call on one kind of device.

    Attributes:
      call: the family, what distinguishes the call within it, and the bytes that it moves.
      implementation: ``"native"`` or ``"xla"``.
      reason: the measurement, or why none is needed.
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
    """The total size of arrays in bytes."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def bytes_text(n: int) -> str:
    """A number of bytes in readable units."""
    power = min(3, max(0, n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def bits(dtype: Any) -> str:
    """The width of a dtype as text, such as "16-bit"."""
    return f"{8 * dtype.itemsize}-bit"


@functools.cache
def tables() -> dict[str, Any]:
    """The contents of `policy.json`, by the kind of device."""
    text = resources.files("jax_oneflow_ops").joinpath("policy.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def _table(platform: str, device_kind: str | None) -> tuple[str, Any]:
    """The measurements of a kind of device, or of the platform's first measured device."""
    known = {name: table for name, table in tables().items() if table["platform"] == platform}
    name = device_kind if device_kind in known else next(iter(known), "")
    return name, known.get(name)


ONE_ELEMENT = "arrays of one element"


def are_scalars(avals: Iterable[Any]) -> bool:
    """Whether no array of a call has more than one element.

    Such a call may be the computation of `jax.lax.reduce` or `x.at[i].apply`. XLA does not allow
    custom calls there: on CPUs they terminate the process. Other calls on scalars are faster in
    XLA.
    """
    return all(n == 1 for aval in avals for n in aval.shape)


def choose(call: Call | str, platform: str, device_kind: str | None = None) -> Decision:
    """Chooses between native kernels, which must be available, and XLA."""
    if isinstance(call, str):
        return Decision(Call((), 0), "xla" if call == ONE_ELEMENT else "native", call)
    device, table = _table(platform, device_kind)
    if table is None:
        return Decision(call, "native", f"no device of the platform {platform} was measured")
    own = _weighted(call, table["cases"])
    elsewhere = (
        case
        for name, other in tables().items()
        if other["platform"] == platform and name != device
        for case in _weighted(call, other["cases"])
    )
    cases = own + [(ELSEWHERE * weight, *rest) for weight, *rest in elsewhere]
    if not cases:
        return Decision(call, "native", f"no such call was measured on {device}")
    loss = LOSS_OF_SUMS if call.kind[0] == "sum" else LOSS
    total = sum(weight for weight, *_ in cases)
    gain = sum(weight * _worth(loss, *times) for weight, _, *times in cases) / (NOTHING + total)
    # The reported speed and times come from the nearest cases of this device only, if it has any.
    enough = max(own or cases)[0] / 20
    near = [case for case in own or cases if case[0] >= enough]
    native, xla = (_mean((case[0], case[i] / case[1]) for case in near) for i in (2, 3))
    least = min(xla / native for _, _, native, xla, _ in near)
    speed = f"{xla / native:.2f}x as fast as XLA, {least:.2f}x in the worst case"
    reason = f"{speed}, in {len(near)} case{'s' * (len(near) > 1)} on {device}"
    reason += ", none of them near" * (total < NOTHING)
    implementation = "native" if gain > math.log(GAIN) else "xla"
    return Decision(call, implementation, reason, native * call.bytes, xla * call.bytes)


def _weighted(call: Call, cases: dict[str, Any]) -> list[tuple[float, ...]]:
    """The weight, bytes, two times and noise of each case of a call's family."""
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
    """The logarithm of a case's gain from the kernels, negative for a loss."""
    if xla >= native:
        return math.log(min(xla / native, MOST))
    return loss * math.log(min(max((xla + noise) / native, 1 / MOST), 1))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """The weighted geometric mean of pairs of a weight and a number."""
    weights, logs = zip(*((weight, weight * math.log(x)) for weight, x in weighted), strict=True)
    return math.exp(sum(logs) / sum(weights))


# ---- chains of elementwise operations, for accelerate(fuse=True) ----


@dataclasses.dataclass(frozen=True)
class Chain:
    """16-bit elementwise operations that one kernel would compute."""

    dtype: str
    arrays: int  # arrays read, each as large as a result
    results: int
    bytes: int  # each array read or written once
    size: int  # elements of a result
    has_function: bool  # contains one of `FUNCTIONS`, such as exp
    after_product: bool  # all arrays are the result of one matrix product or convolution


@dataclasses.dataclass(frozen=True)
class Worthwhile:
    """Chains that were measured to run faster as one kernel on a platform."""

    platform: str
    reason: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    arrays: int = 1  # at most
    results: int = 1  # at most
    least_bytes: int = 1 << 22
    needs_function: bool = False
    in_fours: bool | None = None  # whether 4 must divide the number of elements; None: either
    # Whether chains after a product qualify. XLA's products on GPUs include a bias and an
    # activation.
    after_product: bool = False


CHAINS = (
    Worthwhile(
        "cuda",
        # `chain` and `bias_gelu` of the suite `kernels`; the slowest of the suite `elementwise`.
        "chains of one array ran 1.42 to 2.17x as fast, single operations at least 1.26x (H200)",
    ),
    Worthwhile(
        "cuda",
        # `residual_gelu`; gradients of activations and gated units. Chains without such a function,
        # as in `squared_diff`, and chains of more arrays, as in gradients of gated units, ran 0.99
        # to 1.01x as fast.
        "chains of two arrays with a function such as exp ran 1.03 to 1.70x as fast (H200)",
        arrays=2,
        needs_function=True,
    ),
    Worthwhile(
        "cuda",
        # The cases of "elementwise/2 operands/16-bit/one by one", and those of three operands.
        "arrays that are not loaded in fours ran 1.3 to 2.1x as fast (H100, H200)",
        arrays=3,
        in_fours=False,
    ),
    Worthwhile(
        "cpu",
        # All chains of the suite `kernels`. Smaller arrays, down to 1 MiB, ran at least 1.4x as
        # fast on an AMD EPYC.
        "chains ran 2.6 to 4.6x as fast in bfloat16, in which XLA rounds each operation (Xeon)",
        dtypes=("bfloat16",),
        arrays=3,
        results=2,
        least_bytes=1 << 20,
        after_product=True,
    ),
    Worthwhile(
        "cpu",
        # The same suite. Chains without such a function ran 0.72 to 1.32x as fast.
        "chains with a function such as exp ran 1.6 to 2.3x as fast in float16 (Intel Xeon)",
        dtypes=("float16",),
        arrays=2,
        least_bytes=1 << 20,
        needs_function=True,
        after_product=True,
    ),
)
"""Chains in float32 ran at the speed of XLA. Norms and softmax were slower in whole programs."""

JOINS_RESULTS = ("cuda",)
"""Platforms on which XLA computes several results of the same arrays in one pass. A kernel for one
of the results would read the arrays again. CPUs are not listed: a training step of a small GPT-2,
which computes the gradient of gelu next to the sum for a bias, took 26 % less processor time if
kernels always ran (AMD EPYC)."""

FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv pow sin cos tan asin acos atan
        sinh cosh asinh acosh atanh atan2 cbrt""",
    )
)
"""Primitives that take many instructions for each element."""


def why_worthwhile(chain: Chain, platform: str) -> str | None:
    """The measurement that makes a chain one kernel; None if the chain is left to XLA."""
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
"""By primitive: `(*avals, **params) -> Call`, or the reason why kernels always run."""

gradients_of: dict[core.Primitive, Callable[..., Call | str]] = {}
"""By primitive: the same for its gradient. Its measurements time the call and gradient together."""

WITH_GRADIENT = "with its gradient"
"""The `implementation` parameter of a call that is chosen together with its gradient."""


def with_gradient(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a differentiated call, which make one choice for it and its gradient.

    With separate choices, the pair could be slower than with either implementation for both.
    """
    return {**params, "implementation": params["implementation"] or WITH_GRADIENT}


def describe(
    primitive: core.Primitive,
    avals: Sequence[Any],
    implementation: str | None = None,
    **params: Any,
) -> Call | str:
    """What the choice for a call depends on, or the reason why kernels always run."""
    sizes = (size for aval in avals for size in aval.shape)
    if not all(isinstance(size, int) for size in (*sizes, params.get("num_segments", 0))):
        return "sizes are not known yet"
    of = gradients_of if implementation == WITH_GRADIENT and primitive in gradients_of else calls_of
    return of[primitive](*avals, **params)


def prefers_xla(
    primitive: core.Primitive, avals: Sequence[Any], params: dict[str, Any], platform: str
) -> bool:
    """Whether XLA is chosen for a call on this process's devices."""
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
            if are_scalars([*avals, *(variable.aval for variable in equation.outvars)]):
                yield None, ONE_ELEMENT
                continue
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

    Functions of graphs, fused functions and each `ElementwiseKernel` are not listed: no choice is
    made for them.

    If `implementation` is None, native kernels run if similar calls measured on such a device
    gained more than they lost, or if the call's family was not measured. Otherwise XLA runs. If a
    function of rows is differentiated, one choice is made for it and its gradient. `fun` is traced,
    not run.

    Two kinds of calls do not depend on measurements. XLA runs calls on at most one element. Native
    kernels run calls in programs over several devices, except inside a `jax.shard_map` over all
    axes of the mesh.

    Args:
      fun: a function of arrays that calls functions of this package, or one of those functions.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`. Bind others, such as `num_segments`,
        with `functools.partial`.
      device: a device, or the name of a measured kind such as ``"NVIDIA H200"``, or its beginning;
        you need not have one. By default JAX's default device. A device of a kind that was not
        measured uses the first measurements of its platform.
      **kwargs: keyword arguments of `fun`.

    Returns:
      A `Decision` for each call, in program order: its `implementation`, the `reason`, the expected
      times `native_us` and `xla_us`, and the `call`.

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
        kind = measured(device)
        if kind is None:
            known = ", ".join(map(repr, tables()))
            raise ValueError(
                f"policy: device must be a jax.Device or one of {known}, got {device!r}"
            )
        platform = tables()[kind]["platform"]
    else:
        platform, kind = place_of(device)
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


def measured(name: str) -> str | None:
    """The measured device of a name, of which the beginning is enough; None if there is none."""
    if name in tables():
        return name
    found = [kind for kind in tables() if kind.startswith(f"{name} ")]
    return found[0] if len(found) == 1 else None


def place_of(device: jax.Device | None) -> tuple[str, str]:
    """The platform of a device, as lowering names it, and the device's kind."""
    device = device or jax.devices()[0]
    return ("cuda" if device.platform == "gpu" else device.platform), device.device_kind


@functools.cache
def device_kind(platform: str) -> str | None:
    """The kind of this process's devices of a platform; None if there is none."""
    try:
        return str(jax.local_devices(backend=platform)[0].device_kind)
    except RuntimeError:
        return None
