"""The choice between native kernels and XLA where the caller leaves it open."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_oneflow_ops as jof
from jax_oneflow_ops import _policy
from tests.catalogue import EACH_KIND, EACH_PRIMITIVE, FUNCTIONS
from tests.test_elementwise import (  # noqa: F401
    NARROW,
    OF_ONE_ARRAY,
    assert_all_16_bit_values,
    quiet_numpy,
)
from tests.test_lowering import BACKEND, ENVIRONMENT_VARIABLE, compiled, native_backend, targets

REAL = json.loads((Path(_policy.__file__).parent / "policy.json").read_text())
KIND = jax.devices()[0].device_kind


def table(platform=BACKEND, **cases):
    return {"platform": platform, "cases": {k.replace("__", "/"): v for k, v in cases.items()}}


def every_size(gain, us=1.0) -> list:
    """Cases of all sizes with this gain, at `us` microseconds per MiB."""
    sizes = [1 << bits for bits in range(0, 40, 2)]
    return [[n, us * n / 2**20, gain * us * n / 2**20, 0.0] for n in sizes]


def measured(gain, family) -> dict:
    """Measurements in which every call of a family has this gain on the devices here."""
    return {KIND: table(**{family: every_size(gain)})}


@pytest.fixture
def tables(monkeypatch):
    """Sets the measurements."""

    def use(found):
        monkeypatch.setattr(_policy, "tables", lambda: found)

    return use


def call(*kind, size=1 << 20) -> _policy.Call:
    return _policy.Call(kind, size)


# --- choosing -------------------------------------------------------------------------------------


def chosen(*kind, size=1 << 20) -> str:
    return _policy.choose(call(*kind, size=size), "cpu", "a").implementation


@pytest.mark.parametrize(
    ("gains", "noise", "expected"),
    [
        ([1.1] * 4, 0, "native"),
        ([1.04] * 4, 0, "xla"),  # hardly a gain
        ([1.054] * 4, 0, "native"),
        ([1.054], 0, "xla"),  # too few cases for so small a gain
        ([1.3] * 7 + [0.8], 0, "xla"),  # a loss counts eight times
        ([1.3] * 9 + [0.8], 0, "native"),
        ([1.3] * 7 + [0.8], 0.3, "native"),  # but not if it is within the noise
        ([1.4] * 12 + [0.01], 0, "xla"),
        ([1.9] * 12 + [0.01], 0, "native"),  # and counts as a factor of two at most
        ([0.8, 0.8, 0.8, 0.8, 100], 0, "xla"),
    ],
)
def test_kernels_run_where_they_gain_more_than_they_lose(tables, gains, noise, expected):
    cases = [[1 << 20, 1.0, gain, noise] for gain in gains]
    tables({"a": table("cpu", permute=cases)})
    decision = _policy.choose(call("permute"), "cpu", "a")
    assert decision.implementation == expected
    assert decision.native_us == pytest.approx(1)
    assert decision.xla_us == pytest.approx(np.exp(np.mean(np.log(gains))))
    cases = f"{len(gains)} cases" if len(gains) > 1 else "1 case"
    worst = f", {min(gains):.2f}x in the worst case, in {cases} on a"
    assert decision.reason.endswith(worst)


def test_the_nearest_cases_count_most(tables):
    small, large = [[1 << 16, 1.0, 0.5, 0.0]], [[1 << 24, 1.0, 2.0, 0.0]]
    tables({"a": table("cpu", permute__tile__a=small + large, permute__rows__a=large * 3)})
    assert chosen("permute", "tile", "a", size=1 << 15) == "xla"
    assert chosen("permute", "tile", "a", size=1 << 25) == "native"
    assert chosen("permute", "rows", "a", size=1 << 16) == "xla"  # another kind, but equally small
    assert chosen("permute", "tile", "b", size=1 << 24) == "native"
    slow = [[1 << 24, 1.0, 0.5, 0.0]]
    tables({"a": table("cpu", permute__tile__a=slow, permute__tile__b=large * 2)})
    assert chosen("permute", "tile", "a", size=1 << 24) == "xla"
    assert chosen("permute", "tile", "b", size=1 << 24) == "native"
    reason = _policy.choose(call("permute", "tile", "a", size=1 << 24), "cpu", "a").reason
    gain = 2 ** (-0.8 / 1.2)  # one case of weight 1, two of weight 0.1
    assert reason == f"{gain:.2f}x as fast as XLA, 0.50x in the worst case, in 3 cases on a"


def test_many_other_calls_do_not_outweigh_the_same_one(tables):
    """A function that gains nothing is left to XLA, whatever others gain."""
    same, others = [[1 << 20, 1.0, 1.0, 0.0]] * 3, [[1 << 20, 1.0, 1.2, 0.0]] * 200
    tables({"a": table("cpu", elementwise__add=same, elementwise__mish=others)})
    assert chosen("elementwise", "add") == "xla"
    assert chosen("elementwise", "silu") == "native"


def test_losses_of_sums_count_less(tables):
    """Times depend on whether ids collide, which the choice cannot know."""
    cases = [[1 << 20, 1.0, gain, 0.0] for gain in (100.0, 100.0, 0.75, 0.75)]
    tables({"a": table("cpu", sum=cases, permute=cases)})
    assert chosen("sum") == "native"
    assert chosen("permute") == "xla"


def test_cases_that_are_far_from_a_call_say_nothing(tables):
    tables({"a": table("cpu", permute__tile__a=[[1 << 24, 1.0, 1.3, 0.0]])})
    assert chosen("permute", "tile", "a", size=1 << 24) == "native"
    assert chosen("permute", "rows", "b", size=1 << 24) == "xla"
    assert chosen("permute", "tile", "a", size=1 << 16) == "xla"
    assert chosen("permute", "tile", "a", size=0) == "xla"


def test_calls_beyond_all_measurements_are_judged_like_the_largest(tables):
    """For such large calls, times are proportional to bytes."""
    small, large = [[1 << 20, 1.0, 0.5, 0.0]], [[1 << 30, 1.0, 1.3, 0.0]]
    tables({"a": table("cpu", permute__tile=small + large)})
    decision = _policy.choose(call("permute", "tile", size=1 << 40), "cpu", "a")
    assert decision.implementation == "native"
    assert "none of them near" not in decision.reason


def test_a_reason_says_that_nothing_near_was_measured(tables):
    tables({"a": table("cpu", permute__tile__a=[[1 << 30, 1.0, 1.3, 0.0]])})
    decision = _policy.choose(call("permute", "tile", "a", size=1 << 12), "cpu", "a")
    assert decision.implementation == "xla"
    assert decision.reason.endswith("in 1 case on a, none of them near")


def test_all_sizes_of_a_call_count(tables):
    short, long = [1 << 20, 16, 1.0, 2.0, 0.0], [1 << 20, 1 << 16, 1.0, 0.5, 0.0]
    tables({"a": table("cpu", rows__norm=[short, long])})
    for n, expected in ((8, "native"), (1 << 17, "xla")):
        found = _policy.Call(("rows", "norm"), 1 << 20, (n,))
        assert _policy.choose(found, "cpu", "a").implementation == expected


def test_devices_and_calls_that_were_not_measured(tables):
    cases = {"permute": every_size(0.5)}
    tables({"a": table("cpu", **cases), "b": table("cuda", **cases)})
    assert "not measured" not in _policy.choose(call("permute"), "cuda", "no such").reason
    unknown = _policy.choose(call("cast"), "cpu", "a")
    assert unknown.implementation == "native"
    assert "no such call was measured on a" in unknown.reason
    assert _policy.choose(call("permute"), "rocm").implementation == "native"


def test_the_measurements_are_whole():
    """Every device has its date and release; the cases of a kind are sorted and of equal length."""
    assert {found["platform"] for found in REAL.values()} >= {"cpu", "cuda"}
    assert "cpu" in REAL
    for found in REAL.values():
        assert {"platform", "measured", "jax", "seeds", "cases"} == found.keys()
        lengths = {}
        for kind, cases in found["cases"].items():
            family, *parts = kind.split("/")
            assert cases == sorted(cases)
            for *sizes, native, xla, noise in cases:
                assert lengths.setdefault(family, (len(parts), len(sizes))) == (
                    len(parts),
                    len(sizes),
                )
                assert min(native, xla) > 0
                assert min(noise, *sizes) >= 0


def test_calls_are_described_as_the_measurements_are(monkeypatch):
    """Calls have as many kind parts and sizes as the measurements."""
    monkeypatch.setattr(_policy, "tables", lambda: REAL)
    measured = {}
    for name, cases in REAL["cpu"]["cases"].items():
        measured[name.split("/")[0]] = name.count("/") + 1, len(cases[0]) - 3
    for case in FUNCTIONS:
        for decision in jof.policy(case.f, *case.inputs(), device="cpu"):
            found = decision.call
            if found.kind and found.kind[0] in measured:
                assert (len(found.kind), 1 + len(found.sizes)) == measured[found.kind[0]]


# Reasons for which kernels run regardless of measurements.
IN_ANY_CASE = {"sums in a fixed order", "XLA is less accurate in this dtype"}


# No survey includes graphs yet.
ALWAYS_NATIVE = ("message_sum", "message_mean", "message_max", "attention_sum")


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_what_calls_depend_on(case):
    """Every function describes its call, and counts the same bytes as the catalogue."""
    xs = case.inputs()
    decisions = jof.policy(case.f, *xs)
    for decision in decisions:
        assert decision.call.bytes > 0 or decision.reason in IN_ANY_CASE
        assert decision.implementation in ("native", "xla")
        assert str(decision.implementation) in str(decision)
    families = ("permute", "upsample", "scatter", "rows")
    assert decisions or case.op.family not in families or case.op.name in ALWAYS_NATIVE


# --- lowering -------------------------------------------------------------------------------------


def permuted(x, **options):
    return jof.permute(x, (1, 0), **options)


def kernels(f, *args) -> list[str]:
    return targets(compiled(f, *args))


@native_backend
def test_the_choice_is_what_is_compiled(tables, monkeypatch):
    x = jnp.ones((64, 96))
    for gain, expected in ((2.0, ["jof_permute"]), (0.5, [])):
        tables(measured(gain, "permute"))
        assert kernels(lambda x: permuted(x), x) == expected
        assert kernels(jax.vmap(lambda x: permuted(x)), x[None]) == expected
        assert kernels(jax.vjp(lambda x: permuted(x), x)[1], x.T) == expected
        assert kernels(lambda x: permuted(x, implementation="native"), x) == ["jof_permute"]
        assert kernels(lambda x: permuted(x, implementation="xla"), x) == []
        for value, forced in (("native", ["jof_permute"]), ("xla", [])):
            with monkeypatch.context() as environment:
                environment.setenv(ENVIRONMENT_VARIABLE, value)
                assert kernels(lambda x: permuted(x), x) == forced


@native_backend
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_over_several_devices_kernels_run(tables):
    """Shard shapes are not known yet when the choice is made; inside shard_map they are."""
    tables(measured(0.5, "permute"))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 96)), NamedSharding(mesh, PartitionSpec("a")))
    assert kernels(lambda x: permuted(x), x) == ["jof_permute"]
    specs = {"in_specs": PartitionSpec("a"), "out_specs": PartitionSpec(None, "a")}
    mapped = jax.shard_map(lambda x: permuted(x), mesh=mesh, **specs)
    assert kernels(mapped, x) == []


def test_sizes_that_are_not_known_yet(tables):
    tables(measured(0.5, "permute"))
    (rows,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(
        jax.jit(lambda x: permuted(x)), disabled_checks=jof.export_checks()
    )(jax.ShapeDtypeStruct((rows, 96), "float32"))
    assert ("jof_permute" in exported.mlir_module()) == (jof.implementations() != ("xla",))
    (decision,) = jof.policy(lambda x: permuted(x), jax.ShapeDtypeStruct((rows, 96), "float32"))
    assert (decision.implementation, decision.reason) == ("native", "sizes are not known yet")
    total = functools.partial(jof.segment_sum, num_segments=rows)  # the arrays have known sizes
    (decision,) = jof.policy(total, jnp.zeros((8, 4)), jnp.zeros(8, "int32"))
    assert (decision.implementation, decision.reason) == ("native", "sizes are not known yet")


@native_backend
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive] * (case not in EACH_PRIMITIVE))
        for case in EACH_KIND
        if not case.variant
    ],
    ids=str,
)
def test_either_choice_gives_the_same(case, tables):
    xs = case.inputs()
    decisions = jof.policy(case.f, *xs)
    is_native = case.op is None or case.op.name in ALWAYS_NATIVE
    if is_native or not decisions or {d.reason for d in decisions} & IN_ANY_CASE:
        pytest.skip("kernels run in any case")
    results = {}
    for gain in (2.0, 0.5):
        found = dict.fromkeys((*FAMILIES, *NOT_DRAWN), every_size(gain))
        tables({KIND: table(**found)})
        f = jax.jit(lambda *xs: case.f(*xs))
        assert bool(kernels(f, *xs)) == (gain > 1)
        results[gain] = jax.tree.map(np.asarray, f(*xs))
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        unit = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=16 * unit, atol=16 * unit)


NOT_DRAWN = ("max", "min", "multiply", "rows")  # not in any survey yet
FAMILIES = sorted({kind.split("/")[0] for found in REAL.values() for kind in found["cases"]})


@native_backend
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", OF_ONE_ARRAY, ids=str)
@pytest.mark.usefixtures("quiet_numpy")
def test_the_form_in_jnp_is_as_accurate_as_the_kernel(op, dtype, tables):
    tables(measured(0.5, "elementwise"))
    if (
        jof.policy(lambda x: op.row.function(x, *op.parameters), jnp.ones(2, dtype))[0].reason
        in IN_ANY_CASE
    ):
        pytest.skip("kernels run in any case")
    with jax.enable_x64(True):
        assert_all_16_bit_values(op, dtype)


# --- the function ---------------------------------------------------------------------------------


def test_policy_of_a_program(tables):
    tables({"a": table("cuda", permute=every_size(2.0))})
    x = jax.ShapeDtypeStruct((1024, 1024), "float32")

    @jax.jit
    def program(x, scale):
        y = jax.lax.scan(lambda carry, _: (permuted(carry), None), x, length=3)[0]
        return permuted(y, implementation="xla") * scale

    inner, outer = jof.policy(program, x, scale=2.0, device="a")
    assert inner.implementation == "native"
    assert (inner.native_us, inner.xla_us) == (pytest.approx(8), pytest.approx(16))
    assert inner.call.kind[0] == "permute"
    assert (outer.implementation, outer.reason) == ("xla", "asked for")
    assert "8 MiB: native (2.00x as fast as XLA, " in str(inner)
    assert jof.policy(functools.partial(permuted), np.ones((2, 3)), device=jax.devices()[0])


def test_one_element_is_left_to_xla(tables):
    tables({"a": table("cuda", elementwise=every_size(2.0))})
    for implementation in (None, "native"):
        relu = functools.partial(jof.relu, implementation=implementation)
        (decision,) = jof.policy(relu, jnp.ones((1, 1)), device="a")
        assert (decision.implementation, decision.reason) == ("xla", "arrays of one element")


WITH_GRADIENTS = {
    "softmax": lambda x, _: (jof.softmax(x) ** 2).sum(),
    "log_softmax": lambda x, _: jof.log_softmax(x, 0)[0].sum(),
    "logsumexp": lambda x, _: jof.logsumexp(x, -1).sum(),
    "cross entropy": lambda x, v: jof.softmax_cross_entropy_with_integer_labels(
        x, jnp.zeros(len(x), jnp.int32)
    ).sum(),
    "norm": lambda x, v: (jof.layer_norm(x, v) ** 2).sum(),
    "norm of a sum": lambda x, v: jnp.vdot(*jof.rms_norm(x, v, residual=x)),
    "group norm": lambda x, v: (jof.group_norm(x[:, None, None], 2, v, v) ** 2).sum(),
}


@native_backend
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_a_function_and_its_gradient_are_chosen_together(name, tables):
    f, args = WITH_GRADIENTS[name], (jnp.ones((12, 8)), jnp.ones(8))
    (alone,) = jof.policy(f, *args)
    value, gradient = jof.policy(jax.grad(f), *args)
    assert value.call == gradient.call != alone.call
    for gain in (2.0, 0.5):
        of_gradients = {"/".join(value.call.kind): every_size(gain)}
        of_values = {"/".join(alone.call.kind): every_size(1 / gain)}
        tables({KIND: table(**of_gradients, **of_values)})
        assert bool(kernels(lambda *args: jax.grad(f)(*args), *args)) == (gain > 1)
        assert bool(kernels(lambda *args: f(*args), *args)) == (gain < 1)


def test_what_is_asked_for_is_asked_for_of_gradients():
    f = jax.grad(lambda x: jof.softmax(x, implementation="xla")[0, 0])
    assert [d.reason for d in jof.policy(f, jnp.ones((2, 3)))] == ["asked for"] * 2


def test_the_beginning_of_a_devices_name_is_enough(measurements):
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    full, short = (
        jof.policy(jof.gelu, x, device=name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100")
    )
    assert full == short
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    full, short = (
        jof.explain(lambda x, ids: x.at[ids].add(1), x, ids, platform=name).rows
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100")
    )
    assert full == short != []
    for name in ("NVIDIA H", "NVIDIA", "H100"):
        with pytest.raises(ValueError, match=r"device must be a jax\.Device or one of"):
            jof.policy(jof.gelu, x, device=name)


def test_policy_of_an_unknown_device(tables):
    tables({"a": table("cuda")})
    with pytest.raises(ValueError, match=r"^policy: device must be .* one of 'a', got 'b'"):
        jof.policy(permuted, np.ones((2, 3)), device="b")
    with pytest.raises(TypeError, match=r"^policy: fun must be a function, got str; pass"):
        jof.policy("gelu", np.ones(2))


@native_backend
def test_functions_that_promise_one_rounding_always_run_kernels(monkeypatch):
    monkeypatch.setattr(_policy, "tables", lambda: REAL)
    x = jnp.ones(863)
    for device in ("cpu", "NVIDIA H100 80GB HBM3"):
        [decision] = jof.policy(jof.fma, x, x, x, device=device)
        assert decision.implementation == "native"
        assert decision.reason in IN_ANY_CASE


def test_sums_and_group_norms_depend_on_other_sizes():
    """Those of sums are the updates of a row of the result, and the elements of all updates. Those
    of group norms are the pixels of an image, and the bytes of a group in each. Kernels load pixels
    that are not whole packs element by element.
    """

    def sizes(function, *shapes):
        [decision] = jof.policy(function, *shapes)
        return decision.call.sizes

    x, ids = jax.ShapeDtypeStruct((1000, 8), "float32"), jax.ShapeDtypeStruct((1000,), "int32")
    for rows, hits in ((10, 100), (300, 3), (4000, 1)):
        assert sizes(lambda x, ids, n=rows: jof.segment_sum(x, ids, n), x, ids) == (hits, 8000)
    images = jax.ShapeDtypeStruct((2, 5, 7, 8), "float32")
    assert sizes(lambda x: jof.group_norm(x, 4), images) == (35, 8)
    for channels, kind in ((8, "whole packs"), (9, "edges")):
        images = jax.ShapeDtypeStruct((2, 5, 7, channels), "float32")
        [decision] = jof.policy(lambda x: jof.group_norm(x, 1), images)
        assert decision.call.kind == ("group_norm", "forward", kind)
