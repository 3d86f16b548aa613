"""The benchmarks' own machinery: what a number means before it is believed."""

import dataclasses
import json
import math
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import (
    accuracy,
    atomic_add,
    elementwise,
    environment,
    gelu_ladder,
    harness,
    kernels,
    libraries,
    permute,
    plot,
    report,
    scatter,
    timing,
    upsample,
)
from benchmarks.cases import (
    CASES,
    ELEMENTWISE,
    KERNELS,
    WIDTH,
    AtomicCase,
    CastCase,
    ElementwiseCase,
    KernelCase,
    LadderCase,
    PermuteCase,
    ScatterCase,
    UpsampleCase,
    count,
    itemsize,
)
from benchmarks.ceilings import Ceilings

TINY = UpsampleCase((1, 2, 8, 8), (16, 16))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("suite", CASES)
def test_case_names_are_unique(suite, platform):
    names = [case.name for case in CASES[suite](platform, False)]
    if suite in ("gelu_ladder", "atomic_add") and platform == "cpu":
        assert not names
        return
    assert len(set(names)) == len(names)
    quick = [case.name for case in CASES[suite](platform, True)]
    assert 0 < len(quick) < len(names)
    assert set(quick) <= set(names)


def test_case_bytes_are_both_images_once():
    case = UpsampleCase((2, 3, 4, 5), (8, 10), dtype="bfloat16", layout="NHWC")
    assert case.factor == 2
    assert case.small == (2, 4, 5, 3)
    assert case.large == (2, 8, 10, 3)
    assert case.bytes == 2 * (math.prod(case.small) + math.prod(case.large))


def test_case_scale_is_a_factor_only_where_it_is_an_integer():
    assert UpsampleCase((1, 1, 4, 4), (12, 12)).factor == 3
    assert UpsampleCase((1, 1, 4, 4), (8, 12)).factor is None
    assert UpsampleCase((1, 1, 4, 4), (6, 6)).scale["size"] == (6, 6)


def test_every_elementwise_op_has_its_cases():
    assert elementwise.OPS.keys() == ELEMENTWISE.keys()
    cases = CASES["elementwise"]("gpu", False)
    assert {c.op for c in cases} == ELEMENTWISE.keys()
    sizes = {c.elements * itemsize(c.dtype) for c in cases if c.group == "derivative"}
    assert sizes == {512 << 20, 64 << 20}
    for case in cases:
        assert case.group != "derivative" or elementwise.OPS[case.op].pullback is not None


@pytest.mark.parametrize(
    ("op", "group"),
    [
        *((op, "forward") for op in ELEMENTWISE),
        *((op, "derivative") for op, traffic in ELEMENTWISE.items() if traffic.derivative),
    ],
)
def test_elementwise_bytes_are_those_of_the_arrays(op, group):
    case = ElementwiseCase(op, "bfloat16", 300, "tiny", group)
    work = elementwise.work(case)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in work.inputs]
    program = jax.jit(work.ours).lower(*shapes).compile().as_text()
    signature = next(line for line in program.splitlines() if line.startswith("ENTRY"))
    # What is not used is no parameter.
    arrays = re.findall(r"\b(bf16|pred)\[300\]", signature)
    assert case.bytes == 300 * sum({"bf16": 2, "pred": 1}[dtype] for dtype in arrays)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_bytes_are_those_of_the_arrays(kernel):
    assert kernels.KERNELS.keys() == KERNELS.keys()
    case = KernelCase(kernel, "float16", 2 * WIDTH, "tiny")
    work = kernels.work(case)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in work.inputs]
    arrays += jax.tree.leaves(jax.eval_shape(work.jnp["jnp"], *arrays))
    assert case.bytes == sum(2 * x.size for x in arrays if x.ndim)


def test_cast_and_ladder_bytes():
    assert CastCase("float32", "float8_e4m3fn", 100, "tiny").bytes == 500
    assert CastCase("bfloat16", "float64", 100, "tiny").bytes == 1000
    assert CastCase("bfloat16", "float64", 1 << 20, "1M elements").name == "bf16-to-f64-1M"
    assert LadderCase("float16", 16 << 20).variant == "16M elements, 32 MiB"


def test_scatter_bytes_are_those_of_the_rows_that_move():
    assert [count(n) for n in (16 << 20, 64 << 10, 4096, 1024, 10_000)] == [
        "16M",
        "64k",
        "4k",
        "1024",
        "10000",
    ]
    sizes = (100, 8, 10, "uniform", "bfloat16")
    moved = {group: ScatterCase(group, *sizes).bytes for group in scatter._FUNCTIONS}
    ids, rows, table = 400, 1600, 160
    assert moved == {
        "segment_sum": ids + rows + table,
        "scatter_add": ids + rows + 2 * table,
        "scatter_add in place": ids + rows + 2 * table,
        "embedding gradient": ids + rows + table,
        "embedding": ids + table + rows,
    }
    few = ScatterCase("scatter_add in place", 3, 8, 10, "uniform", "float32")
    assert few.bytes == 12 + 3 * 3 * 8 * 4
    assert few.name == "scatter_add_in_place-3x8-to-10-uniform-f32"
    assert AtomicCase(32 << 20).bytes == 4 * 32 << 20


def test_permute_cases_reach_every_strategy():
    case = PermuteCase((2, 3, 5), (2, 0, 1), "other order", "complex64")
    assert case.bytes == 2 * 30 * 8
    assert case.name == "table-2x3x5-201-c64"
    cases = CASES["permute"]("gpu", False)
    moves = {permute._plan(c)["strategy"] for c in cases}
    assert moves >= {"rows", "interleave", "deinterleave", "tile", "runs"}
    article = {c.bytes >> 21 for c in cases if c.group == "article"}
    assert article == {16, 32, 64, 128}


def test_a_program_counts_as_native_only_if_the_kernel_is_alone_in_it():
    call = '  ROOT %a = f32[8]{0} custom-call(%x), custom_call_target="jof_silu"'
    program = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{call}\n}}"
    assert harness.implementation(program, "jof_silu", True) == "native"
    assert harness.implementation(program, "jof_tanh", True) == "xla"
    assert harness.implementation(program, ("jof_tanh", "jof_silu"), True) == "native"
    beside = program.replace(call, f"  %b = f32[8]{{0}} fusion(%x), kind=kLoop\n{call}")
    assert harness.implementation(beside, "jof_silu", False) == "native"
    with pytest.raises(ArithmeticError, match="fusion in a program"):
        harness.implementation(beside, "jof_silu", True)


def test_ulp_is_the_distance_of_neighbours():
    values = np.array([1.0, 1.5, -2.0, 1e-7, 0.0])
    spacing = [2**-10, 2**-10, 2**-9, 2**-24, 2**-24]
    assert accuracy.ulp(values, jnp.float16).tolist() == spacing
    assert accuracy.ulp(np.array([1.0]), jnp.bfloat16).tolist() == [2**-7]
    wrong = accuracy.worst(np.array([1.0, np.nan]), np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    assert wrong.startswith("1 of 2 samples are off: nan instead of 2")
    assert accuracy.worst(np.array([1.05]), np.array([1.0]), np.array([0.1])) is None


def test_kernels_are_summed_call_by_call():
    assert timing.per_call([1.0, 2.0, 3.0, 4.0], calls=2) == [3.0, 7.0]
    assert timing.per_call([1.0, 2.0, 3.0], calls=2) == [3.0]  # uneven: their mean a call


def test_cupti_clock_reads_every_kernel_and_always_ends_its_session():
    class Extension:
        sessions, open = 0, False

        def _cupti_init(self):
            assert not self.open
            self.open = True
            self.sessions += 1

        def _cupti_get_timings(self):  # of a release without the `finalize` argument
            self.open = False
            return [("kernel_a", 0.25), ("kernel_b", 0.5)] * (clock.calls + 1)

    clock = timing.CuptiClock.__new__(timing.CuptiClock)
    clock._extension, clock._marker = Extension(), None

    def fail(i):
        if i > 1:  # after the warm-up
            raise RuntimeError("cannot open /some/directory/file.so")

    good = timing.Contender("good", lambda i: i, lambda results: None)
    bad = timing.Contender("bad", fail, lambda results: None)
    outcome = timing.compare([good, bad], clock)
    assert not clock._extension.open
    assert clock._extension.sessions == clock.rounds + 1  # one that fails is not tried again
    assert outcome["bad"] == "RuntimeError: cannot open file.so"
    assert outcome["good"].kernels == ["kernel_a", "kernel_b"]
    assert outcome["good"].us == 750.0
    assert len(outcome["good"].samples_us) == clock.rounds * clock.calls


@pytest.mark.parametrize("in_order", [True, False])
def test_cupti_clock_tells_turns_apart_by_the_marker(in_order):
    class Extension:
        sessions = 0

        def _cupti_init(self):
            self.sessions += 1
            self.records = []

        def _cupti_get_timings(self, finalize):
            return self.records if in_order else sorted(self.records)

    extension = Extension()
    clock = timing.CuptiClock.__new__(timing.CuptiClock)
    clock._extension = extension
    clock._marker = lambda: extension.records.append((timing.MARKER, 0.001))
    extension.records = []

    def contender(name, ms, kernels):
        call = lambda i: extension.records.extend([(name, ms)] * kernels)  # noqa: E731
        return timing.Contender(name, call, lambda results: None)

    outcome = timing.compare([contender("a", 1.0, 1), contender("b", 0.5, 3)], clock)
    assert outcome["a"].us == 1000
    assert outcome["b"].us == 1500
    assert outcome["b"].kernels == ["b"]
    assert (
        len(outcome["a"].samples_us) == len(outcome["b"].samples_us) == clock.rounds * clock.calls
    )
    # Records that are out of order cost a session a turn, and are not trusted again.
    assert extension.sessions == (1 if in_order else 1 + 2 * clock.rounds)
    assert (clock._marker is None) != in_order


def test_timing_the_same_function_twice_agrees():
    f, x = jax.jit(jnp.negative), jnp.ones(1 << 18)
    twins = [timing.Contender(name, lambda i: f(x), jax.block_until_ready) for name in "ab"]
    a, b = timing.compare(twins, timing.WallClock()).values()
    # Generous: neighbours share this machine.
    assert abs(a.us - b.us) <= 3 * max(a.spread_us, b.spread_us) + 0.5 * max(a.us, b.us)


def test_wall_times_may_replace_those_of_kernels():
    both = timing.Timing("cupti", [1.0, 2.0], [5.0, 6.0, 7.0], ["kernel"])
    assert (both.us, both.by_wall().us) == (1.5, 6.0)
    assert both.by_wall().to_json()["kernels"] == ["kernel"]
    assert timing.Timing("wall", [1.0]).by_wall().us == 1.0


def test_what_is_slow_is_called_once_more_and_no_more(monkeypatch):
    calls = []
    slow = timing.Contender("slow", calls.append, lambda results: None)
    monkeypatch.setattr(timing, "SLOW_US", -1.0)
    known = timing.compare([slow], timing.WallClock())["slow"]
    assert len(calls) == 2
    assert known.once
    assert known.to_json()["once"]
    monkeypatch.undo()
    assert not timing.compare([slow], timing.WallClock())["slow"].once


@pytest.fixture
def bare(monkeypatch):
    """The harness without CUPTI, CuPy and PyTorch, wherever the test runs."""
    monkeypatch.setattr(harness, "make_clock", lambda platform: (timing.WallClock(), None))
    monkeypatch.setattr(harness, "_import_torch", lambda platform: (None, "no torch"))
    monkeypatch.setattr(harness, "Ceilings", lambda platform: Ceilings("cpu"))


def test_harness_writes_what_it_measured(bare, tmp_path, capsys):
    odd = UpsampleCase((1, 2, 8, 8), (11, 11), "NHWC", "float16", "backward", "nearest-exact")
    cases = [TINY, odd]
    assert harness.run("upsample", cases, tmp_path, False, ["--out", str(tmp_path)]) == 0
    text = (tmp_path / "upsample.json").read_text()
    assert str(tmp_path) not in text
    first, second = json.loads(text)["rows"]
    assert first["rivals"].keys() == {"resize", "repeat", "broadcast"}
    assert second["rivals"].keys() == {"resize"}
    assert first["implementation"] in ("native", "xla")
    assert first["ratio"] == first["rivals"][first["best"]]["ratio"]
    assert TINY.name in capsys.readouterr().out


def test_harness_refuses_a_wrong_result(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(
        upsample.jof, "upsample_nearest2d", lambda x, **_: jnp.zeros(TINY.large, x.dtype)
    )
    assert harness.run("upsample", [TINY], tmp_path, False, []) == 1
    (row,) = json.loads((tmp_path / "upsample.json").read_text())["rows"]
    assert "differs" in row["error"]
    assert "ours" not in row


def test_quick_elementwise_run(bare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        harness, "select", lambda *_: [c for c in quick if c.op in ("multiply", "where")][:2]
    )
    quick = CASES["elementwise"]("cpu", True)
    assert cli.main(["elementwise", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "elementwise.json").read_text())["rows"]
    assert [row["op"] for row in rows] == ["multiply", "where"]
    assert all(row["best"] == "jnp" and row["check"] == "pass" for row in rows)
    assert "jnp f32" not in capsys.readouterr().out  # no column that no row has


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_the_jnp_twin_passes_a_loose_check(op, dtype, monkeypatch):
    """The float64 formulas are those of the functions, and so are their derivatives."""
    eps = float(jnp.finfo(dtype).eps)
    groups = ["forward", *(["derivative"] if ELEMENTWISE[op].derivative else [])]
    for group in groups:
        work = elementwise.work(ElementwiseCase(op, dtype, 4096, "tiny", group))
        (arrays,) = harness.Inputs(1).sets(work.inputs, 1)
        host = [np.asarray(x).astype(np.float64) for x in arrays]
        host = [x != 0 if a.dtype == bool else x for x, a in zip(host, arrays, strict=True)]
        function = elementwise.OPS[op].value if group == "forward" else elementwise.OPS[op].pullback
        exact = jax.tree.leaves(function(*host))
        exact = exact if group == "forward" else exact[::3]  # of (exact, cancelling, argument)
        results = jax.tree.leaves(work.jnp["jnp"](*arrays))
        for y, expected in zip(results, exact, strict=True):
            scale = np.abs(expected).max()
            # A rounded argument may fall on the other side of a kink.
            far = np.abs(np.asarray(y).astype(np.float64) - expected) > 16 * eps * scale
            assert far.mean() < 0.01


SCATTER_GROUPS = [
    ("segment_sum", 2000, 1, 50, "sorted"),
    ("segment_sum", 2000, 24, 50, "hot"),
    ("scatter_add", 500, 24, 100, "uniform"),
    ("scatter_add in place", 50, 24, 100, "uniform"),
    ("embedding gradient", 500, 24, 100, "skewed"),
    ("embedding", 500, 24, 100, "uniform"),
]


@pytest.mark.parametrize("sizes", SCATTER_GROUPS)
def test_scatter_references_are_sums_in_float64(sizes):
    case = ScatterCase(*sizes, "float16")
    work = scatter.work(case)
    (arrays,) = harness.Inputs(7).sets(work.inputs, 1)
    best = list(work.jnp)[-1]  # in 16 bits this is the sum in f32
    right = work.jnp[best](*arrays)
    assert work.check(arrays, right) is None
    assert "off" in work.check(arrays, right.at[0].add(8))
    if work.errors:
        assert "result of float32" in work.check(arrays, right.astype(jnp.float32))
        assert work.errors(arrays, right)["rms_error"] < 5e-4
        assert work.errors(arrays, 2 * right)["rms_error"] == pytest.approx(1, rel=0.01)


def test_scatter_columns_see_every_place_of_a_pack():
    for width in (1, 8, 24, 128, 1024, 2048):
        columns = scatter.Reference(ScatterCase("", 1, width, 1, "", "float16")).columns
        assert columns[0] == 0
        assert columns[-1] == width - 1
        assert len(columns) <= 10
        assert {c % 8 for c in columns} == set(range(min(width, 8)))


def test_indices_are_drawn_as_their_kind_says():
    kinds = ("uniform", "hot", "sorted", "skewed")
    inputs = [harness.Input((4000,), "int32", kind, 100) for kind in kinds]
    (arrays,) = harness.Inputs(3).sets(inputs, 1)
    uniform, hot, in_order, skewed = map(np.asarray, arrays)
    assert all(x.min() >= 0 and x.max() < 100 for x in (uniform, hot, in_order, skewed))
    assert np.bincount(uniform).max() < 100
    assert 0.45 < np.bincount(hot).max() / 4000 < 0.6
    assert (np.diff(in_order) >= 0).all()
    assert 0.25 < (skewed == 0).mean() < 0.4  # u**4 < 0.01


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "complex64"])
def test_hashes_are_exact_and_differ(dtype):
    ((x,),) = harness.Inputs(3).sets([harness.Input((64, 1000), dtype, "hash")], 1)
    x, wide = np.asarray(x), {"complex64": complex}.get(dtype, float)
    values = x.astype(wide)
    assert (values.real % 1 == 0).all()
    assert (x[:, 1:] != x[:, :-1]).all()
    assert len(np.unique(x)) == {"float16": 2048, "int8": 256}.get(dtype, 64000)


def test_scatter_run(bare, tmp_path, capsys):
    cases = [ScatterCase(*sizes, "bfloat16") for sizes in SCATTER_GROUPS]
    assert harness.run("scatter", cases, tmp_path, False, []) == 0
    rows = json.loads((tmp_path / "scatter.json").read_text())["rows"]
    for row in rows[:-1]:
        assert row["rivals"].keys() == {"deterministic", "jnp", "jnp f32"}
        assert row["ours"]["rms_error"] < 4e-3
        assert row["rivals"]["deterministic"]["ratio"] > 0
    assert rows[-1]["rivals"].keys() == {"jnp"}
    assert "failed" not in capsys.readouterr().out


def test_rivals_that_are_too_slow_run_only_when_told(bare, tmp_path, capsys, monkeypatch):
    case = ScatterCase("segment_sum", 200, 8, 20, "hot", "float16")
    make = scatter.work
    monkeypatch.setattr(
        scatter, "work", lambda c: dataclasses.replace(make(c), skip={"jnp": "not run: why"})
    )
    for slow_rivals in (False, True):
        harness.run("scatter", [case], tmp_path, False, [], slow_rivals)
        ((row,), out) = (
            json.loads((tmp_path / "scatter.json").read_text())["rows"],
            capsys.readouterr().out,
        )
        assert ("us" in row["rivals"]["jnp"]) == slow_rivals
        assert ("not run: why" in out) != slow_rivals


PERMUTE_CASES = [
    PermuteCase((4, 6, 8), (1, 0, 2), "last axis kept", "int8"),
    PermuteCase((3, 64, 64), (0, 2, 1), "transpose", "float16"),
    PermuteCase((2, 8, 8, 3), (0, 3, 1, 2), "images", "complex64"),
]


@pytest.mark.parametrize("case", PERMUTE_CASES)
def test_permute_check_sees_what_is_not_in_its_place(case):
    work = permute.work(case)
    ((x,),) = harness.Inputs(7).sets(work.inputs, 1)
    right = jnp.transpose(x, case.axes)
    assert work.check((x,), right) is None
    assert "at index 0 of the first axis" in work.check((x,), right.at[0, 0, 0].add(1))
    assert "a result of" in work.check((x,), right[None])


def test_agreement_is_of_both_parts_of_a_number():
    ours = jnp.array([1 + 1j, 2], jnp.complex64)
    assert harness.agreement(ours, ours, exact=True)["agrees"]
    assert harness.agreement(ours, ours.conj(), exact=True) == {"agrees": False, "difference": 2.0}


def test_permute_run(bare, tmp_path):
    cases = [PERMUTE_CASES[0], dataclasses.replace(PERMUTE_CASES[1], dtype="complex128")]
    assert harness.run("permute", cases, tmp_path, False, []) == 0
    rows = json.loads((tmp_path / "permute.json").read_text())["rows"]
    assert [row["ours"]["strategy"] for row in rows] == [
        permute._plan(c)["strategy"] for c in cases
    ]
    assert all(row["best"] == "jnp" and row["rivals"]["jnp"]["agrees"] for row in rows)


def test_kernels_run(bare, tmp_path):
    pick = ("multiply", "residual_gelu", "squared_diff_vjp")
    cases = [KernelCase(kernel, "bfloat16", 4 * WIDTH, "tiny") for kernel in pick]
    assert harness.run("kernels", cases, tmp_path, False, []) == 0
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [set(row["rivals"]) for row in result["rows"]] == [
        {"built-in", "jnp"},
        {"jnp", "jnp f32"},
        {"jnp", "jnp f32"},
    ]
    assert all(row["implementation"] == "native" for row in result["rows"])
    assert "first use of the chain in bf16 took" in result["notes"][-1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_checks_pass_jnp_in_float32_and_see_what_is_off(kernel, dtype):
    work = kernels.work(KernelCase(kernel, dtype, 4 * WIDTH, "tiny"))
    (arrays,) = harness.Inputs(7).sets(work.inputs, 1)
    right = list(work.jnp.values())[-1](*arrays)
    assert work.check(arrays, right) is None
    assert "result 0" in work.check(arrays, jax.tree.map(lambda y: y * 1.01, right))


def test_explain_prints_the_plans(capsys):
    assert cli.main(["permute", "--explain", "--dtype", "float16", "--case", "256-021"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["case", "strategy", "unit", "index", "shape", "axes", "tile"]
    assert len(lines) == 1 + 4
    name, strategy, *rest = re.split("  +", lines[0])
    assert (name, strategy) == ("table-1024x256x256-021-f16", "tile")
    assert rest == ["2 B", "32 bit", "(1024, 256, 256)", "(0, 2, 1)", "-"]
    with pytest.raises(SystemExit):
        cli.main(["upsample", "--explain"])


def test_atomic_run(bare, tmp_path):
    assert harness.run("atomic_add", [AtomicCase(1 << 14)], tmp_path, False, []) == 0
    (row,) = json.loads((tmp_path / "atomic_add.json").read_text())["rows"]
    assert row["ours"]["relative_error"] < 1e-5
    assert row["rivals"]["jnp.dot"]["relative_error"] < 1e-5


def test_a_half_cannot_hold_the_sum_of_the_atomics():
    (arrays,) = harness.Inputs(5).sets(atomic_add.work(AtomicCase(1 << 18)).inputs, 1)
    assert atomic_add._check(arrays, np.float16(32)) is not None
    assert atomic_add._errors(arrays, np.float16(32))["relative_error"] > 0.9


@pytest.mark.parametrize("slow", [False, True])
def test_atomics_that_take_too_long_are_judged_by_few_elements(slow, monkeypatch):
    case, launched = AtomicCase(1 << 18), []

    class Kernels:
        def Launch(self, number, a, b, out, n):
            launched.append(n)
            self.seconds = 1e-5 * n if slow else 0.0
            return 0

        def Synchronize(self):
            time.sleep(getattr(self, "seconds", 0.0))
            return 0

    out = types.SimpleNamespace(data=types.SimpleNamespace(ptr=0))
    cupy = types.SimpleNamespace(
        empty=lambda *_: out, asnumpy=lambda _: np.array([16, 16], np.float16)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(atomic_add, "_load", Kernels)
    sets = harness.Inputs(5).sets(atomic_add.work(case).inputs, 2)
    if slow:
        with pytest.raises(
            timing.TooSlow, match=r"not run: 2\.\d s a call or more, judged by 4096"
        ):
            atomic_add._contender(0, case, sets, None)
        return
    contender, known = atomic_add._contender(1, case, sets, None)
    assert contender.name == "half2"
    assert launched[-1] == case.elements
    assert known["relative_error"] == pytest.approx(1 - 32 / atomic_add._exact(*sets[0]))


SASS = """
	code for sm_90
		Function : _ZN3jof17ElementwiseKernelILi4EArticleFloat
        /*0000*/  @P1 LDG.E.CONSTANT R0, desc[UR4][R2.64] ;  /* 0x0000000402001981 */
        /*0010*/  @!P1 LDG.E.128.CONSTANT R4, desc[UR4][R8.64] ;
        /*0020*/  STG.E.64 desc[UR4][R2.64], R4 ;
		Function : _ZN3jof8GeluCute
        /*0000*/  LDG.E.U16 R0, desc[UR4][R2.64] ;
        /*0020*/  STG.E desc[UR4][R2.64], R4 ;
"""
NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","ElementwiseKernel","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","524,288"
"0","7","ElementwiseKernel","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","2097152"
"1","7","memset","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","1"
"2","7","GeluCute","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","65,536"
"2","7","GeluCute","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","1,048,576"
==PROF== Disconnected
"""


def test_ladder_reads_widths_and_counts():
    template, cute = gelu_ladder.access_widths(libraries.functions(SASS)).values()
    assert template == {"load_bits": 128, "store_bits": 64}
    assert cute == {"load_bits": 16, "store_bits": 32}
    assert gelu_ladder.counted(NCU.splitlines()) == [
        {"requests": 524288, "sectors": 2097152},
        {"requests": 65536, "sectors": 1048576},
    ]
    assert gelu_ladder.counted(["==ERROR== no permission"]) == []


def test_ladder_numbers_follow_the_libraries():
    for library in ("gelu_ladder", "gelu_cute"):
        numbers = [v.number for v in gelu_ladder.VARIANTS if v.library == library]
        assert numbers == list(range(len(numbers)))


def test_ladder_errors_are_in_units_of_the_last_place():
    x = np.array([0.0, 1.0, -1.0], np.float16)
    exact = elementwise.OPS["gelu_tanh"].value(x.astype(np.float64))
    off = exact.astype(np.float16)
    off[1] += 2**-9
    errors = gelu_ladder.errors(x, off)
    assert 3.5 <= errors["max_ulp"] <= 4.5  # of 0.84, 2^-11 apart
    assert 1e-3 < errors["max_error"] < 3e-3


def test_cute_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(gelu_ladder.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(libraries, "BUILD", tmp_path)
    with pytest.raises(FileNotFoundError, match="nvidia-cutlass"):
        gelu_ladder.library("gelu_cute")


def rated(us):
    return {"us": us, "iqr_us": 0.1, "tb_per_s": 1 / us, "samples_us": [us]}


@pytest.fixture
def result():
    """Two rows, of which ours loses one, and one that failed."""
    row = {"group": "forward", "variant": "2x", "dtype": "float32", "bytes": 1000000}
    row |= {"implementation": "native", "jnp": ["resize", "repeat"]}

    def measured(name, ours, resize, repeat):
        rivals = {"resize": rated(resize), "repeat": rated(repeat), "torch": {"error": "no"}}
        timed = {"ours": rated(ours), "rivals": rivals, "ceilings": {"copy": rated(1.0)}}
        return harness.summarise({**row, "case": name, **timed})

    about = {"device": "NVIDIA H200", "platform": "gpu", "driver": "580", "commit": "c0ffee"}
    about |= {"versions": {"jax": "1.2"}, "dirty": False, "date": "2026-01-02T03:04:05"}
    rows = [measured("fwd-a", 2.0, 8.0, 4.0), measured("fwd-b", 4.0, 2.0, 6.0)]
    rows.append({**row, "case": "fwd-c", "error": "wrong", "rivals": {}})
    shell = {"suite": "upsample", "clock": "cupti", "ceiling": "a copy", "notes": []}
    return {**shell, "environment": about, "rows": rows}


def test_summary_takes_the_best_jnp_rival(result):
    a, b, _ = result["rows"]
    assert (a["best"], a["ratio"]) == ("repeat", 2.0)
    assert (b["best"], b["ratio"]) == ("resize", 0.5)
    assert a["of_copy"] == 0.5
    table = harness.Table(["fwd-a", "fwd-b", "fwd-c"], "gpu", ["resize", "repeat", "torch"])
    assert table.header().split()[-4:] == ["resize", "repeat", "torch", "best"]
    assert "slower" in table.line(b)
    assert "slower" not in table.line(a)
    assert "wrong" in table.line(result["rows"][2])


def test_report_fills_the_readme_and_notices_when_it_is_stale(result, tmp_path):
    file, readme = tmp_path / "upsample.json", tmp_path / "README.md"
    file.write_text(json.dumps(result))
    arguments = [str(file), "--readme", str(readme)]
    readme.write_text("no place for it\n")
    with pytest.raises(SystemExit, match="markers"):
        report.main(arguments)
    name = "benchmarks:upsample-nvidia-h200"
    readme.write_text(f"before\n<!-- {name} begin -->\nold\n<!-- {name} end -->\nafter\n")
    with pytest.raises(SystemExit, match="stale"):
        report.main([*arguments, "--check"])
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    # Geometric means: of 2 and 0.5 over the best rival, of 4 and 0.5 over resize.
    assert "| **1.00x** | 0.50x | 1.41x |" in text
    assert "| fwd-c | error: wrong |" in text


def test_plot_draws(result, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "upsample.json"
    file.write_text(json.dumps(result))
    assert plot.main([str(file), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "upsample-nvidia-h200.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "upsample-nvidia-h200.svg").read_text()


def test_environment_names_no_directories():
    assert environment.command_line(["--out", "/a/b/c"]) == "python -m benchmarks --out c"
    about = {"platform": "cpu", "device": "AMD EPYC 9654 (96 cores)"}
    assert environment.slug(about) == "cpu-amd-epyc-9654-96-cores"


def test_list_prints_the_cases_that_the_options_choose(capsys):
    assert cli.main(["upsample", "--list", "--case", "bwd", "--dtype", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("bwd") and line.endswith("-f16") for line in lines)
    with pytest.raises(SystemExit):
        cli.main(["no-such-suite"])


@pytest.fixture
def suites(result):
    """Small results of the other suites, by name."""

    def row(case, ours, rivals, jnp=("jnp",), **more):
        row = {"case": case.name, "op": case.op, "group": case.group, "variant": case.variant}
        row |= {"dtype": case.dtype, "bytes": case.bytes, "implementation": "native"}
        timed = {name: {**rated(us), **more.get(name, {})} for name, us in rivals.items()}
        row |= {"ours": rated(ours), "rivals": timed, "jnp": list(jnp)}
        return harness.summarise({**row, "ceilings": {"copy": rated(1.0)}})

    def case(op, dtype, group="forward", size="512 MiB"):
        return ElementwiseCase(op, dtype, 1 << 20, size, group)

    ops = [
        row(case("silu", "float32"), 2.0, {"jnp": 3.0, "torch": 4.0}),
        row(case("silu", "float32", "derivative"), 2.0, {"jnp": 1.0, "torch": 4.0}),
        row(case("multiply", "float16"), 2.0, {"jnp": 2.0, "torch": 2.0, "naive": 3.0}),
        row(case("silu", "float32", size="64 MiB"), 2.0, {"jnp": 6.0, "torch": 4.0}),
        row(case("silu", "float32", "small", "1 KiB"), 2.0, {"jnp": 2.5, "1 element": 1.5}),
    ]
    wide = {"requests": 131072, "sectors": 2097152, "load_bits": 128, "store_bits": 128}
    counts = {"scalar": {**wide, "requests": 524288}, "vec2": {**wide, "requests": 262144}}
    errors = {"vec4 half2": {"max_error": 9e-4}, "ours, f32 math": {"max_error": 2e-4}}
    f32 = {"jnp": 9.0, "scalar": 8.0, "vec2": 8.0, "vec4": 8.0, "ours, f32 math": 7.0}
    f16 = {"half2": 5.0, "vec4 half2": 4.0, "cute": 4.02, "ours, f32 math": 4.0}
    ladder = [
        row(LadderCase("float32", 16 << 20), 7.0, f32, **counts, vec4=wide),
        row(LadderCase("float16", 16 << 20), 4.0, {"jnp": 6.0, **f16}, **errors),
    ]
    ladder[1]["rivals"]["cute"]["ncu"] = "no permission"
    casts = [row(CastCase("float32", "int8", 99, "64 MiB"), 2.0, {"astype": 1.0}, ["astype"])]
    rows = {"elementwise": ops, "gelu_ladder": ladder, "cast": casts}
    sizes = ("segment_sum", 16 << 20, 1, 1024, "hot")
    rms = [{"rms_error": error} for error in (2e-4, 5e-2)]
    times = {"deterministic": 6.0, "jnp": 4.0, "torch": 8.0}
    rows["scatter"] = [row(ScatterCase(*sizes, "float16"), 2.0, times)]
    rows["scatter"][0]["rivals"]["jnp"] |= rms[1]
    rows["scatter"][0]["ours"] |= rms[0]
    rows["scatter"][0]["rivals"]["torch"] |= {"once": True, "us": 2.5e6}
    forms = {"half": 90.0, "half2": 30.0, "FastAtomicAdd": 20.0, "one a block": 2.0}
    errors = {name: {"relative_error": 0.9} for name in forms}
    rows["atomic_add"] = [row(AtomicCase(32 << 20), 4.0, forms, [], **errors)]
    rows["atomic_add"] += [row(AtomicCase(16 << 10), 4.0, forms, [], **errors)]
    for found in rows["atomic_add"]:
        found["ours"]["relative_error"] = 1e-7
    rows["atomic_add"][1]["rivals"]["half"] = {"skipped": "not run: 9 s"}
    images = PermuteCase((32, 225, 225, 3), (0, 3, 1, 2), "images", "int8")
    kept, swapped = (
        PermuteCase((64, 256, 256), axes, str(axes), "float32", "article")
        for axes in ((1, 0, 2), (0, 2, 1))
    )
    times = {"jnp": 3.0, "naive": 9.0, "naive, 32-bit": 6.0}
    rows["permute"] = [
        row(images, 2.0, {"jnp": 1.0, "torch": 4.0}),
        row(dataclasses.replace(images, dtype="complex64"), 2.0, {"jnp": 3.0, "torch": 4.0}),
        row(kept, 2.0, {**times, "torch": 2.6}),
        row(swapped, 2.0, {**times, "torch": 4.0}),
    ]
    for found in rows["permute"]:
        found["ours"] |= {"strategy": "runs", "unit_bytes": 1}
    expression = KernelCase("silu", "float32", 1 << 20, "256 MiB")
    rows["kernels"] = [row(expression, 2.0, {"built-in": 2.5, "jnp": 3.0})]
    return {suite: {**result, "suite": suite, "rows": rows[suite]} for suite in rows}


def test_report_compares_ops(suites):
    text = report.tables(suites["elementwise"])
    assert "|  | forward f32 | derivative f32 | forward f16 |" in text
    assert "| silu ▼ | 1.50x 50% | 0.50x 50% ▼ |  |" in text
    assert "| multiply |  |  | 1.00x 50% |" in text
    assert "| f16 | 512 MiB | 3.0 us, 0.33 TB/s | 2.0 us, 0.50 TB/s | 1.50x | 1.69x |" in text
    assert "| 1 KiB | f32 | 2.00 | 1.50 | 2.50 |" in text
    assert "Every op at 64 MiB" in text
    summary = text[: text.index("At 512 MiB")]
    assert "naive" not in summary
    assert "small" not in summary
    assert "| f32 to int8 ▼ | 0.50x 50% ▼ |" in report.tables(suites["cast"])


def test_report_judges_the_ladder(suites):
    text = report.tables(suites["gelu_ladder"])
    assert "| vec4 | 8.00 | 0.12 | 12% | - | - | 128, 128 | 131,072 | 2,097,152 | 249.15 |" in text
    assert "four f32 a thread beat one: **no difference here**, 1.00x here, 1.03x" in text
    assert "half2 beats f32: **holds**, 1.60x here" in text
    assert "CuTe is as fast as four half2 by hand: **holds**" in text
    assert "halves the requests and leaves the sectors: **holds**" in text
    assert "off by 0.001: **holds**, 9.0e-04 here; f32 arithmetic, rounded once, 2.0e-04" in text
    assert "cute on ladder-16M-f16: no permission" in text


def test_report_of_scatter_and_atomics(suites):
    text = report.tables(suites["scatter"])
    assert "| 16M x 1 to 1024, hot | segment_sum | 2.0 | 2.00x | 4.00x | 50% |" in text
    assert "| 16M x 1 to 1024, hot | segment_sum | 3.00x | 2.0e-04 | 5.0e-02 | - |" in text
    assert "torch on segment_sum-16Mx1-to-1024-hot-f16: one call of 2.50 s" in text
    text = report.tables(suites["atomic_add"])
    assert "| FastAtomicAdd | 20.0 | 50 | 9.0e-01 | 4.50x | 137.01 | 3.08x |" in text
    assert "| segment_sum of the products | 4.0 | 250 | 1.0e-07 | 22.50x | - | - |" in text
    assert "a padded half beats a half, 32M elements: **holds**, 4.50x here, 3.08x" in text
    assert "as fast as a pair, 16k elements: **holds**, 1.50x here, 1.00x in the article" in text
    assert "half on atomics-16k-f16: not run: 9 s" in text


def test_report_of_permute(suites):
    text = report.tables(suites["permute"])
    assert "| all |  | int8 | 1 | **0.50x** | 0.50x | 0.50x | 2.00x | 50% |" in text
    assert "| images |  | complex64 | 1 | **1.50x** |" in text
    assert "| (32, 225, 225, 3) by (0, 3, 1, 2) ▼ | 0.50x 50% ▼ | 1.50x 50% |" in text
    assert "| native: runs, 1 B | 2.0 |" in text
    row = "| (64, 256, 256) by (1, 0, 2) | f32, 16 MiB | 3.0 us | 9.0 us | 6.0 us | 2.6 us | 2.0 us"
    assert f"{row} | 1.0 us | 4.50x | 1.30x | 50% |" in text
    assert "(1, 0, 2) in f32 and f16 is 1.24x to 1.40x as fast" in text
    assert "A100: **holds**, 1.30x to 1.30x here" in text
    assert "A100: **does not hold**, 2.00x to 2.00x here" in text
    assert "up to 6.30x" not in text  # no case of it
    assert "in most cases: 50% to 50% here" in text


def test_report_of_kernels(suites):
    text = report.tables(suites["kernels"])
    assert "| all |  | float32 | 1 | **1.50x** | 1.50x | 1.25x | 1.50x | 50% |" in text
    assert "| expression | of each array | dtype | us | of copy | built-in | jnp |" in text
    assert "| `silu(x)` | 256 MiB | f32 | 2.0 | 50% | 1.25x | 1.50x |" in text


def test_plot_draws_a_figure_a_group(suites, tmp_path):
    pytest.importorskip("matplotlib")
    made = [stem for result in suites.values() for stem in plot.draw(result, tmp_path)]
    assert {stem.removesuffix("-nvidia-h200") for stem in made} == {
        "elementwise-forward",
        "elementwise-derivative",
        "elementwise-small",
        "gelu_ladder",
        "cast",
        "scatter",
        "atomic_add",
        "permute",
        "permute-wide",
        "permute-article",
        "kernels",
    }
    assert all((tmp_path / f"{stem}.png").stat().st_size > 1000 for stem in made)
