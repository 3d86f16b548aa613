"""Programs that do not call this package (`tests.programs`), and single calls that XLA runs slowly.

"ours" is the program inside `jax_oneflow_ops.accelerate`, "jnp" is the unchanged program, and
"layers" is the same program with graph layers, also inside `accelerate`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from tests import programs

from .. import accuracy
from ..harness import Array, Case, Entrants, Function, Work
from ..inputs import Input, shapes
from . import common

STEPS, BATCHES = 8, 4
TOLERANCE = 2**-7
"""The allowed difference of losses, relative to the first loss.

Both programs round to bfloat16's 8 bits, but at different points, and adamw turns small gradients
into large steps.
"""


def cases(platform: str, devices: int = 1) -> list[Case]:
    """Every program and call once: "full" on a GPU, "small" on a CPU, "tiny" with --quick.

    On several devices, only the programs.
    """
    size = {"gpu": "full", "cpu": "small"}.get(platform, "tiny")
    steps = [step(name, size, devices) for name in (*programs.LARGE, *programs.SCALE_FREE)]
    return steps + [call(*each, size) for each in (_LISTED if devices == 1 else [])]


def step(name: str, size: str, devices: int = 1) -> Case:
    dtype = "float32" if name in programs.PLAIN else "bfloat16"
    work = partial(enter, name, size, devices)
    return Case("programs", f"{name}-{size}", name, "step", size, dtype, 0, lambda: work)


def enter(name: str, size: str, devices: int = 1) -> Entrants:
    """Compiles a step in each way, compares losses, and makes contenders.

    On several devices, the same step on one device is a contender, too.
    """
    program = programs.make(name, size)
    key = jax.random.key(0, impl="rbg")  # which compiles faster than the usual kind
    state = jax.jit(program.state)(key)
    batches = [*map(jax.jit(program.batch), jax.random.split(key, BATCHES))]
    ways = {"ours": jof.accelerate(program.step), "jnp": program.step}
    steps, arguments = {}, {}
    for count in dict.fromkeys((devices, 1)):
        arrays = (state, batches) if count == 1 else _sharded(state, batches, count)
        same = jax.tree.map(lambda x: x.sharding, arrays[0])
        for way, function in ways.items():
            run = way if count == devices else f"{way} on one"
            jitted = jax.jit(function, donate_argnums=0, out_shardings=(same, None))
            steps[run] = jitted.lower(arrays[0], arrays[1][0]).compile()
            arguments[run] = arrays
    if devices == 1 and name in programs.LAYERS:
        layers = programs.make(name, size, layers=True)
        own = [*map(jax.jit(layers.batch), jax.random.split(key, BATCHES))]
        jitted = jax.jit(jof.accelerate(layers.step), donate_argnums=0)
        steps["layers"] = jitted.lower(state, own[0]).compile()
        arguments["layers"] = state, own
    texts = {way: steps[way].as_text() or "" for way in ways}
    calls = {way: text.count('custom_call_target="jof_') for way, text in texts.items()}
    if calls["jnp"]:
        raise ArithmeticError("the program as it is has calls of this package")
    losses = {name: _losses(step, *arguments[name]) for name, step in steps.items()}
    first = losses["jnp"]
    apart = max(float(np.max(np.abs(np.subtract(x, first)))) for x in losses.values())
    if not (apart := apart / abs(first[0])) <= TOLERANCE:
        raise ArithmeticError(f"losses differ by {apart:.1e}, more than {TOLERANCE:.1e}")
    ends = {name: [round(values[i], 5) for i in (0, -1)] for name, values in losses.items()}
    about: dict[str, Any] = {"losses": ends, "apart": float(f"{apart:.2g}"), "calls": calls["ours"]}
    sizes = {n: getattr(s.memory_analysis(), "temp_size_in_bytes", 0) for n, s in steps.items()}
    about["temporary MiB"] = {name: size >> 20 for name, size in sizes.items()}
    if devices > 1:
        kinds = {way: re.findall(r" (all-[a-z]+)(?:-start)?\(", texts[way]) for way in ways}
        about["sent"] = {way: dict(Counter(found)) for way, found in kinds.items()}
    contenders = [common.contender(name, steps[name], *arguments[name]) for name in steps]
    return Entrants(contenders, about, ["jnp"], {}, wall=True)


def _sharded(state: Any, batches: list[Any], devices: int) -> tuple[Any, list[Any]]:
    """Copies the state to all devices, and shards the longest arrays of batches over them."""
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    longest = max(len(x) for x in jax.tree.leaves(batches) if x.ndim)

    def put(x: Array) -> Array:
        spec = P("data") if x.ndim and len(x) == longest else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.device_put(state, NamedSharding(mesh, P())), jax.tree.map(put, batches)


def _losses(function: Function, state: Any, batches: Sequence[Any]) -> list[float]:
    own, losses = jax.tree.map(jnp.copy, state), []
    for i in range(STEPS):
        own, loss = function(own, batches[i % len(batches)])
        losses.append(float(loss))
    return losses


class Call(NamedTuple):
    """A call that XLA runs slowly."""

    function: Function
    inputs: list[Input]
    ulps: float = 0.501  # allowed error against float32
    share: float = 2.0**-18  # of the largest result, which is also allowed
    rounds_between: bool = False  # partial sums are rounded, then added, and may cancel


_DTYPES = ("bfloat16", "float32")
_LISTED = [("bincount uniform", "int32"), ("bincount one", "int32"), ("histogram", "float32")]


def call(name: str, dtype: str, size: str) -> Case:
    """A single call; the size is "full", "small" or "tiny"."""
    made = _calls(dtype, {"full": 1 << 20, "small": 1 << 16, "tiny": 1 << 8}[size])[name]
    arrays = shapes(made.inputs)
    results = jax.tree.leaves(jax.eval_shape(made.function, *arrays))
    nbytes = sum(x.size * x.dtype.itemsize for x in (*arrays, *results))
    shape = ", ".join("x".join(map(common.count, x.shape)) for x in (*arrays, results[0]))
    full = f"{name.replace(' ', '_')}-{size}-{common.short(dtype)}"
    return Case("programs", full, name, "call", shape, dtype, nbytes, partial(_work, made))


def _work(made: Call) -> Work:
    def ours(*arrays: Array, implementation: str | None = None) -> Array:
        with jof.accelerate(implementation != "xla"):
            return made.function(*arrays)

    def sample(arrays: Sequence[Array], out: Array) -> tuple[Array, Array]:
        wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays)
        # Tensor cores truncate the sums of long products.
        with jax.default_matmul_precision("highest"):
            return out, made.function(*wide)

    def verify(sampled: tuple[Any, Any]) -> str | None:
        for found, exact in zip(*map(jax.tree.leaves, sampled), strict=True):
            wide = exact.ravel().astype(np.float64)
            bound = np.zeros(wide.shape)
            if found.dtype.kind != "i":
                most = np.abs(wide).max(keepdims=True)
                bound = made.ulps * accuracy.ulp(wide, found.dtype) + made.share * most
                bound += made.rounds_between * accuracy.ulp(most, found.dtype)
            if wrong := accuracy.worst(found.ravel().astype(np.float64), wide, bound):
                return wrong
        return None

    forms, counts = {"jnp": made.function}, {x.dtype for x in made.inputs} == {"int32"}
    terms = max(x.shape[0] for x in made.inputs)
    return Work(made.inputs, ours, forms, sample, verify, exact=counts, terms=terms)


def _calls(dtype: str, n: int) -> dict[str, Call]:
    """All calls, each with about `n` rows or 16 `n` elements."""
    side, columns, segments = min(512, n >> 3), min(4096, n), min(10_000, n >> 4)
    batch, pixels, squares = max(1, n >> 12), min(128, n >> 5), max(1, n >> 14)

    def x(*shape: int) -> Input:
        return Input(shape, dtype)

    def ids(most: int, *shape: int, kind: str = "uniform") -> Input:
        return Input(shape, "int32", kind, most)

    def largest(x: Array, ids: Array, count: int = segments, **options: Any) -> Array:
        return jax.ops.segment_max(x, ids, count, **options)

    def gradient(function: Function) -> Function:
        return lambda *args: common.pullback(function)(*args)[0]

    def gradient_at_zero(function: Function) -> Function:
        return lambda ids, ct: gradient(function)(jnp.zeros_like(ct), ids, ct)

    def resize_gradient(ct: Array) -> Array:
        resize = partial(jax.image.resize, shape=ct.shape, method="nearest")
        return gradient(resize)(ct[:, ::2, ::2], ct)

    def cross_entropy(x: Array, labels: Array) -> Array:
        of_rows = optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), labels)
        return of_rows.mean()

    def pooled(function: Function, start: float) -> Function:
        """The gradient of pooling with windows of 3 x 3 and a stride of 2."""

        def pool(x: Array) -> Array:
            first = np.asarray(start, x.dtype)
            return lax.reduce_window(x, first, function, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

        return gradient(pool)

    def convolved(x: Array, kernel: Array, ct: Array) -> Any:
        """A depthwise convolution along one axis, as in state space models, and its gradients."""
        apply = partial(
            lax.conv_general_dilated,
            window_strides=(1,),
            padding=[(len(kernel) - 1, 0)],
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=x.shape[-1],
        )
        y, vjp = jax.vjp(apply, x, kernel)
        return y, *vjp(ct)

    def attention(q: Array, k: Array, v: Array, ct: Array) -> Any:
        """Causal attention of q, k and v (batch, positions, heads, features), and its gradients."""

        def apply(q: Array, k: Array, v: Array) -> Array:
            logits = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
            causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
            weights = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf))
            return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

        y, vjp = jax.vjp(apply, q, k, v)
        return y, *vjp(ct)

    def enlarged(x: Array, kernel: Array, ct: Array) -> Any:
        """A transposed convolution, as in U-Nets, and its gradients."""
        apply = partial(
            lax.conv_transpose,
            strides=(2, 2),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y, vjp = jax.vjp(apply, x, kernel)
        return y, *vjp(ct)

    image, half = (squares, pixels, pixels, 64), (squares, pixels >> 1, pixels >> 1, 64)
    heads = (max(1, n >> 16), min(1024, n >> 4), 12, 64)
    sequence = (max(1, n >> 16), min(2048, n), min(2048, n))
    words = min(50257, n >> 4)
    counts, logits = partial(jnp.bincount, length=1024), x(max(1, n >> 7), words)
    return {
        "bincount uniform": Call(counts, [ids(1024, 16 * n)]),
        "bincount one": Call(counts, [ids(1024, 16 * n, kind="one")]),
        "histogram": Call(lambda x: jnp.histogram(x, 256), [Input((16 * n,), "float32")]),
        "add to columns": Call(
            lambda t, ids, x: t.at[:, ids].add(x), [x(64, columns), ids(columns, n), x(64, n)]
        ),
        "add to pairs": Call(
            lambda table, i, j, x: table.at[i, j].add(x),
            [x(side, side, 8), ids(side, n), ids(side, n), x(n, 8)],
        ),
        "vmapped gather gradient": Call(
            gradient_at_zero(jax.vmap(lambda x, i: x[i])),
            [ids(4096, batch, 4096), x(batch, 4096, 16)],
        ),
        "take_along_axis gradient": Call(
            gradient_at_zero(partial(jnp.take_along_axis, axis=1)),
            [ids(side, squares, side, side), x(squares, side, side)],
        ),
        "resize gradient": Call(
            resize_gradient, [x(max(1, n >> 17), 2 * pixels, 2 * pixels, 64)], rounds_between=True
        ),
        "cross entropy gradient": Call(
            jax.grad(cross_entropy), [logits, ids(words, logits.shape[0])]
        ),
        "softmax of long rows": Call(
            lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(dtype), [logits], ulps=4
        ),
        "segment_max of rows": Call(largest, [x(n, 128), ids(segments, n)]),
        "segment_max of elements": Call(
            partial(largest, count=1024), [x(16 * n), ids(1024, 16 * n)]
        ),
        "segment_max sorted": Call(
            partial(largest, count=1024, indices_are_sorted=True),
            [x(16 * n), ids(1024, 16 * n, kind="sorted")],
        ),
        "segment_max gradient": Call(
            gradient(largest),
            [x(n, 128), ids(segments, n), x(segments, 128)],
            ulps=3,  # a division and a product
        ),
        "segment_max of elements gradient": Call(
            gradient(partial(largest, count=1024)),
            [x(16 * n), ids(1024, 16 * n), x(1024)],
            ulps=3,
        ),
        "segment softmax": Call(
            partial(_segment_softmax, indices_are_sorted=True),
            [x(n, 8), ids(max(1, n >> 4), n, kind="sorted")],
            ulps=16,  # 16-bit differences and sums
        ),
        "segment softmax without a promise": Call(
            _segment_softmax, [x(n, 8), ids(max(1, n >> 4), n, kind="sorted")], ulps=16
        ),
        "attention": Call(attention, [x(*heads)] * 4, rounds_between=True),
        "max pool gradient": Call(pooled(lax.max, -np.inf), [x(*image), x(*half)]),
        "average pool gradient": Call(
            lambda ct: pooled(lax.add, 0)(jnp.zeros(image, ct.dtype), ct), [x(*half)]
        ),
        "depthwise convolution": Call(
            convolved, [x(*sequence), x(4, 1, sequence[-1]), x(*sequence)]
        ),
        "transposed convolution": Call(
            enlarged,
            [x(*half), x(2, 2, 64, 64), x(*image)],
            share=2.0**-16,  # tensor cores truncate sums, here of 2^20 products
        ),
    }


# XLA rounds products in float32 before it multiplies; and attention in float32 stays as it is.
_IN_16_BITS = ("transposed convolution", "attention")


def _segment_softmax(x: Array, ids: Array, **options: Any) -> Array:
    count = max(1, len(x) >> 4)
    e = jnp.exp(x - jax.ops.segment_max(x, ids, count, **options)[ids])
    return e / jax.ops.segment_sum(e, ids, count, **options)[ids]


_LISTED += [
    (name, dtype)
    for name in [*_calls("float32", 1 << 8)][3:]
    for dtype in _DTYPES
    if dtype != "float32" or name not in _IN_16_BITS
]
