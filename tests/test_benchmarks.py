"""The benchmarks' own machinery: what a number means before it is believed."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
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
    comparison,
    elementwise,
    environment,
    gelu_ladder,
    harness,
    kernels,
    libraries,
    permute,
    scatter,
    timing,
    upsample,
)
from benchmarks.cases import (
    CASES,
    ELEMENTWISE,
    KERNELS,
    SWEEP,
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
from tests import results

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
    if suite == "models":
        assert len(quick) == len(names)
        assert not set(quick) & set(names)  # all of them, and smaller
        return
    assert 0 < len(quick) < len(names)
    assert set(quick) <= set(names)


@pytest.mark.parametrize("suite", ["cast", "elementwise", "permute", "scatter", "upsample"])
def test_sweeps_go_from_a_launch_to_the_bandwidth(suite):
    sizes = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for platform, largest in (("gpu", 30), ("cpu", 26)):
        cases = [c for c in CASES[suite](platform, False) if c.group == SWEEP]
        for line in {(c.op, c.dtype) for c in cases}:
            sweep = [c for c in cases if (c.op, c.dtype) == line]
            nbytes = [int(c.variant.split()[0]) * sizes[c.variant.split()[1]] for c in sweep]
            assert nbytes == [1 << bits for bits in range(10, largest + 1, 2)]
            # What is moved beside that array: ids, the small image, or as much again.
            assert all(n <= c.bytes <= 2 * n + 1024 for n, c in zip(nbytes, sweep, strict=True))
        assert len({(c.op, c.dtype) for c in cases}) == (2 if suite == "elementwise" else 1)
    assert {c.variant for c in CASES[suite]("gpu", True) if c.group == SWEEP} == {"1 KiB", "1 MiB"}


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
    assert both.by_wall().to_json()["device_us"] == 1.5
    assert timing.Timing("wall", [1.0]).by_wall().us == 1.0


def test_contenders_take_turns_and_nobody_always_follows_the_same_one():
    taken = []

    class Clock(timing.WallClock):
        rounds = 4

        def record(self, turns, outcome, budget_us):
            taken.extend((turn.contender.name, turn.start) for turn in turns)

    contenders = [timing.Contender(name, lambda i: i, lambda _: None) for name in "abc"]
    timing.compare(contenders, Clock())
    assert "".join(name for name, _ in taken) == "abc" + "bca" + "cab" + "abc"
    assert [start for _, start in taken] == list(range(12))  # nobody's inputs are the last one's


def test_median_and_spread_are_those_of_the_samples():
    known = timing.Timing("wall", [1.0, 2.0, 3.0, 4.0, 50.0])
    assert (known.us, known.spread_us) == (3.0, 2.0)
    assert timing.Timing("wall", [7.0]).spread_us == 0.0


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
    """The harness as on a CPU, wherever the test runs, and in a hurry."""
    machine = harness.Machine
    monkeypatch.setattr(harness, "Machine", lambda platform, *rest: machine("cpu", *rest))
    monkeypatch.setattr(timing.WallClock, "budget_us", 3e4)
    monkeypatch.setattr(harness, "make_clock", lambda platform: (timing.WallClock(), None))
    monkeypatch.setattr(harness, "_import_torch", lambda platform: (None, "no torch"))
    monkeypatch.setattr(harness, "Ceilings", lambda platform: Ceilings("cpu"))
    monkeypatch.setattr(harness, "_clocks_at_work", lambda platform: None)


def test_harness_writes_what_it_measured(bare, tmp_path, capsys):
    odd = UpsampleCase((1, 2, 8, 8), (11, 11), "NHWC", "float16", "backward", "nearest-exact")
    cases = [TINY, odd]
    assert harness.run("upsample", cases, tmp_path, False, ["--out", str(tmp_path)]) == 0
    text = (tmp_path / "upsample.json").read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    first, second = result["rows"]
    assert result["missing"]["torch"] == "no torch"
    check = result["self_check"]
    assert check["case"] == max(cases, key=lambda case: case.bytes).name
    assert check["agrees"] == (abs(check["us"][0] - check["us"][1]) <= check["spread_us"])
    assert first["rivals"].keys() == upsample.work(TINY).jnp.keys()
    assert second["rivals"].keys() == upsample.work(odd).jnp.keys()
    assert first["implementation"] in ("native", "xla")
    assert first["ratio"] == first["rivals"][first["best"]]["ratio"]
    out = capsys.readouterr().out
    assert TINY.name in out
    assert "missing: torch: no torch" in out
    assert "self-check, the same function twice on" in out


@pytest.mark.parametrize("b", [10.25, 10.75])
def test_self_check_warns_of_times_that_do_not_agree(b):
    timings = {"ours": timing.Timing("cupti", [9.75, 10.0, 10.25])}
    timings["ours again"] = timing.Timing("cupti", [b - 0.5, b, b + 0.5])
    check = harness._self_check(TINY, timings, timing.WallClock())
    assert check == {
        "case": TINY.name,
        "us": [10.0, b],
        "spread_us": 0.5,
        "agrees": b == 10.25,
    }
    assert timings.keys() == {"ours"}
    text = "\n".join(harness.remarks({"missing": {}, "self_check": check}))
    assert ("WARNING" in text) == (b == 10.75)
    assert "no self-check" in harness.remarks({"missing": {}})[-1]


def entered(work, case, platform="gpu", torch=None):
    """What the harness makes of some work, and which rivals are missing."""
    machine = harness.Machine(
        platform, timing.WallClock(), Ceilings("cpu"), torch, "no torch", harness.Inputs(1)
    )
    (prepared,) = harness._prepare_all([case], [work])
    return harness._entrants(prepared, machine), machine.missing


def test_rivals_that_are_not_there_are_missing_and_not_errors():
    def maker(error):
        def make(sets, ours):
            if error is None:
                return timing.Contender("there", lambda i: ours, lambda _: None), {"known": 1}
            raise error

        return make

    others = {
        "cutensor": maker(timing.Missing("no wheel")),
        "triton": maker(ModuleNotFoundError("No module", name="triton")),
        "broken": maker(RuntimeError("why")),
        "slow": maker(timing.TooSlow("not run: 9 s")),
        "there": maker(None),
    }
    work = dataclasses.replace(upsample.work(TINY), others=others, compile=True)
    (contenders, about, *_), missing = entered(work, TINY)
    assert missing == {
        "cutensor": "no wheel",
        "triton": "triton is not installed",
        "torch": "no torch",
        "torch.compile": "no torch",
    }
    assert about["rivals"]["broken"] == {"error": "RuntimeError: why"}
    assert about["rivals"]["slow"] == {"skipped": "not run: 9 s"}
    assert about["rivals"]["there"] == {"known": 1}
    assert not about["rivals"].keys() & missing.keys()
    names = [c.name for c in contenders]
    assert names == ["ours", "resize", "repeat", "broadcast", "there", "copy"]
    _, missing = entered(work, TINY, "cpu")
    assert missing.keys() == {*others, "torch", "torch.compile"}
    assert missing["there"] == "needs a GPU"


class Tensor(np.ndarray):
    def contiguous(self):
        return self


def fake_torch(compiled):
    """As much of PyTorch as the harness and upsampling use."""

    def interpolate(x, size, mode):
        return np.repeat(np.repeat(x, 2, axis=2), 2, axis=3)

    def compiler(function, **options):
        assert options == {"fullgraph": True, "dynamic": False}
        if compiled is None:
            raise RuntimeError("a graph break")
        return lambda *tensors: compiled.append("call") or function(*tensors)

    return types.SimpleNamespace(
        from_dlpack=lambda x: np.array(x).view(Tensor),
        no_grad=contextlib.nullcontext,
        cuda=types.SimpleNamespace(synchronize=lambda: None),
        nn=types.SimpleNamespace(functional=types.SimpleNamespace(interpolate=interpolate)),
        compiler=types.SimpleNamespace(reset=lambda: compiled and compiled.append("reset")),
        compile=compiler,
    )


def test_torch_compile_is_a_rival_where_it_is_asked_for():
    work, calls = dataclasses.replace(upsample.work(TINY), others={}), ["begin"]
    (_, about, *_), _ = entered(work, TINY, torch=fake_torch(calls))
    assert "torch.compile" not in about["rivals"]
    assert calls == ["begin"]
    work = dataclasses.replace(work, compile=True)
    (contenders, about, *_), _ = entered(work, TINY, torch=fake_torch(calls))
    assert calls == ["begin", "reset", "call"]  # compiled and called before it is timed
    assert contenders[-2].name == "torch.compile"
    assert about["rivals"]["torch.compile"] == about["rivals"]["torch"]
    assert about["rivals"]["torch.compile"]["agrees"]
    (contenders, about, *_), _ = entered(work, TINY, torch=fake_torch(None))
    assert about["rivals"]["torch.compile"] == {"error": "RuntimeError: a graph break"}
    assert contenders[-2].name == "torch"


def test_sweeps_have_the_launch_of_one_element_on_gpus_alone():
    case = next(c for c in CASES["elementwise"]("cpu", True) if c.group == SWEEP)
    for platform in ("gpu", "cpu"):
        machine = harness.Machine(
            platform, timing.WallClock(), Ceilings("cpu"), None, "no torch", harness.Inputs(1)
        )
        (enter,), rivals = harness._entries(elementwise, [case], machine, slow_rivals=False)
        names = [c.name for c in enter().contenders]
        assert ("1 element" in names) == ("1 element" in rivals) == (platform == "gpu")


def test_suites_may_bring_whole_programs(bare, tmp_path, monkeypatch, capsys):
    def entrants(cases):
        def enter(case):
            if case.op == "vit":
                raise ArithmeticError("losses differ")
            states = {"ours": [0], "xla": [0]}

            def contender(name, seconds):
                def call(i):
                    states[name].append(i)
                    time.sleep(seconds)

                return timing.Contender(name, call, lambda _: None)

            contenders = [contender("ours", 1e-3), contender("xla", 2e-2)]
            about = {"implementation": "native", "losses": {"native": [2.0, 1.0]}, "jnp": ["xla"]}
            return harness.Entrants(contenders, about | {"ours": {"steps": 3}}, effort=0.1)

        return [functools.partial(enter, case) for case in cases]

    suite = types.SimpleNamespace(entrants=entrants, RIVALS=["xla"])
    monkeypatch.setattr(harness, "load", lambda name: suite)
    clocks = {"sm_mhz": 1980.0, "slowed": ["power cap"]}
    monkeypatch.setattr(harness, "_clocks_at_work", lambda platform: clocks)
    cases = CASES["models"]("cpu", True)[:2]
    assert harness.run("models", cases, tmp_path, False, []) == 1
    result = json.loads((tmp_path / "models.json").read_text())
    good, bad = result["rows"]
    assert good["best"] == "xla"
    assert good["ours"]["steps"] == 3
    assert 1.5 < good["ratio"] == good["rivals"]["xla"]["ratio"]
    assert good["losses"] == {"native": [2.0, 1.0]}
    assert "tb_per_s" not in good["ours"]
    assert "of_copy" not in good
    assert bad["error"] == "ArithmeticError: losses differ"
    assert result["clocks"] == {"before": clocks, "after": clocks}
    out = capsys.readouterr().out
    assert "ERROR: ArithmeticError" in out
    assert "clocks after: sm_mhz 1980.0, slowed ['power cap']" in out


def test_a_suite_is_left_out_where_what_it_needs_is_not_installed(monkeypatch, tmp_path, capsys):
    def missing(name):
        def load(*_):
            raise ModuleNotFoundError("No module", name=name)

        monkeypatch.setattr(harness.importlib, "import_module", load)

    missing("flax")
    assert harness.run("models", CASES["models"]("cpu", True), tmp_path, False, []) == 0
    assert capsys.readouterr().out == "models is left out: flax is not installed\n"
    missing("benchmarks.models")  # ours
    with pytest.raises(ModuleNotFoundError):
        harness.load("models")


def test_clocks_are_read_while_the_gpu_works(monkeypatch):
    said = {
        "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active": (
            "1980, 3201, 350.25, [N/A], 0x0000000000000024"
        )
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,GPU-8")

    def run(program, which, query, form):
        assert (program, which, form) == (
            "nvidia-smi",
            "--id=GPU-7",
            "--format=csv,noheader,nounits",
        )
        return said[query.removeprefix("--query-gpu=")]

    monkeypatch.setattr(environment, "_run", run)
    monkeypatch.setattr(harness, "_WARM_SECONDS", 0.0)
    assert harness._clocks_at_work("gpu") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 350.25,
        "temperature_c": None,
        "slowed": ["power cap", "heat, by software"],
    }
    assert harness._clocks_at_work("cpu") is None
    monkeypatch.setattr(environment, "_run", lambda *_: None)
    assert harness._clocks_at_work("gpu") is None


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that has two, where JAX has not started; what is set is recorded."""
    listed = "0, GPU-a, NVIDIA H200\n1, GPU-b, NVIDIA H200"
    monkeypatch.setattr(environment, "_run", lambda *_: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    backend = lambda: settings["jax_platforms"].replace("cuda,cpu", "gpu")  # noqa: E731
    monkeypatch.setattr(jax, "default_backend", backend)
    yield settings
    monkeypatch.undo()  # of the variables that use_device has set, too
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)


def test_a_device_is_chosen_for_everybody(two_gpus, monkeypatch):
    environment.use_device("gpu:1")
    assert two_gpus == {"jax_platforms": "cuda,cpu"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    environment.use_device("gpu")  # the first of those that are visible
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"there are: cpu$"):
        environment.use_device("gpu")
    environment.use_device("cpu")
    assert two_gpus == {"jax_platforms": "cpu"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="started on 'gpu' already"):
        environment.use_device("cpu")


@pytest.mark.parametrize("name", ["gpu:2", "gpu:x", "cpu:1", "tpu", "gpu:-1"])
def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are(two_gpus, name, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(["--device", name, "--list"])
    assert status.value.code == 2
    here = "cpu, gpu:0 (NVIDIA H200), gpu:1 (NVIDIA H200)"
    assert f"no device '{name}'; there are: {here}" in capsys.readouterr().err
    assert not two_gpus


def test_harness_refuses_a_wrong_result(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(
        upsample.jof, "upsample_nearest2d", lambda x, **_: jnp.zeros(TINY.large, x.dtype)
    )
    assert harness.run("upsample", [TINY], tmp_path, False, []) == 1
    (row,) = json.loads((tmp_path / "upsample.json").read_text())["rows"]
    assert "differs" in row["error"]
    assert "ours" not in row


def test_quick_elementwise_run(bare, tmp_path, capsys, monkeypatch):
    quick = [c for c in CASES["elementwise"]("cpu", True) if c.op in ("multiply", "where")][:2]
    quick = [dataclasses.replace(c, elements=4096) for c in quick]
    monkeypatch.setattr(harness, "select", lambda *_: quick)
    assert cli.main(["--suite", "elementwise", "--quick", "--out", str(tmp_path)]) == 0
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
        assert row["rivals"].keys() >= {"deterministic", "jnp", "jnp f32"}
        assert row["ours"]["rms_error"] < 4e-3
        assert row["rivals"]["deterministic"]["ratio"] > 0
    assert rows[-1]["rivals"].keys() == scatter.work(cases[-1]).jnp.keys()
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
    works = [kernels.work(case) for case in cases]
    assert [set(row["rivals"]) for row in result["rows"]] == [
        {*work.variants, *work.jnp} for work in works
    ]
    assert works[0].variants.keys() == {"built-in"}
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
    arguments = ["--suite", "permute", "--explain", "--dtype", "float16", "--case", "256-021"]
    assert cli.main(arguments) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["case", "strategy", "unit", "index", "shape", "axes", "tile"]
    assert len(lines) == 1 + 4
    name, strategy, *rest = re.split("  +", lines[0])
    assert (name, strategy) == ("table-1024x256x256-021-f16", "tile")
    assert rest == ["2 B", "32 bit", "(1024, 256, 256)", "(0, 2, 1)", "-"]
    with pytest.raises(SystemExit):
        cli.main(["--suite", "upsample", "--explain"])


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
        def launch(self, number, a, b, out, n):
            launched.append(n)
            self.seconds = 1e-5 * n if slow else 0.0

        def synchronize(self):
            time.sleep(getattr(self, "seconds", 0.0))

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
    with pytest.raises(timing.Missing, match="nvidia-cutlass"):
        gelu_ladder.library("gelu_cute")


@pytest.fixture
def result():
    return results.upsampling()


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


def measured(us, spread=0.1, **more):
    samples = {"us": us, "iqr_us": spread}
    return {"ours": samples, "ceilings": {"copy": {"us": 5.0}}, **more}


@pytest.fixture
def before():
    """A result of four rows, of which one is an error."""
    rows = [measured(10.0, case="a"), measured(10.0, case="b"), measured(10.0, 0.5, case="c")]
    rows.append({"case": "d", "error": "wrong", "rivals": {}})
    about = {"device": "NVIDIA H200", "driver": "1", "versions": {"jax": "1"}, "commit": "c0ffee"}
    return {"suite": "cast", "clock": "cupti", "environment": about, "rows": rows}


def test_comparison_tells_changes_from_noise(before, tmp_path, capsys):
    after = copy.deepcopy(before)
    for row, us in zip(after["rows"], (10.3, 9.7, 10.5), strict=False):
        row["ours"]["us"] = us
    after["rows"][3] = measured(1.0, case="e")
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, result in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(result))
    assert cli.main(["compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["SLOWER", "a", "10.00", "10.30", "us", "1.03x"]
    assert lines[2].split() == ["faster", "b", "10.00", "9.70", "us", "0.97x"]
    assert lines[3:] == ["of 3 rows 1 slower, 1 faster", "only before: d", "only now: e"]
    assert comparison.change(measured(10.0), measured(10.09)) is None
    assert comparison.change(measured(1.0, 0.0), measured(1.04, 0.0)) is None  # ticks of a clock
    assert comparison.change(measured(10.0, 0.0), measured(10.11, 0.0)) == pytest.approx(1.011)


def test_comparison_warns_of_other_machines(before, tmp_path, capsys):
    after = copy.deepcopy(before)
    after["environment"] |= {"driver": "2", "versions": {"jax": "3", "flax": "3"}}
    for row in after["rows"][:3]:
        row["ceilings"]["copy"]["us"] = 6.0
    text = comparison.compare(before, after)
    assert "WARNING: driver: 1, then 2\nWARNING: version of jax: 1, then 3\n" in text
    assert "flax" not in text  # which the older one does not know of
    assert "WARNING: the ceiling's copies took 1.20x as long" in text
    assert "WARNING: device" not in text
    assert "an error now: d\nan error before: d" in text
    assert "WARNING" not in comparison.compare(before, before)
    after["rows"] = [row | {"case": row["case"] * 2} for row in after["rows"]]
    assert "WARNING: they have no row in common" in comparison.compare(before, after)
    file = tmp_path / "old.json"
    for content, said in (
        ("{}", "not a result"),
        ("[", "Expecting"),
        (json.dumps(before), "suite"),
    ):
        file.write_text(content)
        with pytest.raises(SystemExit):
            cli.main(["--suite", "upsample", "--compare", str(file), "--list"])
        assert said in capsys.readouterr().err


def test_a_run_is_compared_with_older_ones(bare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness, "select", lambda *_: [TINY])
    run = ["--suite", "upsample", "--out", str(tmp_path)]
    assert cli.main(run) == 0
    file = tmp_path / "upsample.json"
    old = json.loads(file.read_text())
    old["rows"][0]["ours"] |= {"us": 1e-3, "iqr_us": 0.0}
    file.write_text(json.dumps(old))
    # Where other tests run beside this one, times of any size are noise.
    monkeypatch.setattr(timing.Timing, "spread_us", 0.0)
    capsys.readouterr()
    assert cli.main([*run, "--compare", str(file)]) == 0  # the file is this run's own, too
    assert f"SLOWER {TINY.name}" in capsys.readouterr().out


def test_environment_names_no_directories():
    assert environment.command_line(["--out", "/a/b/c"]) == "python -m benchmarks --out c"
    about = {"platform": "cpu", "device": "AMD EPYC 9654 (96 cores)"}
    assert environment.slug(about) == "cpu-amd-epyc-9654-96-cores"


def test_options_that_choose_no_case_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--case", "of no suite"])
    assert "no case has that name" in capsys.readouterr().err


def test_list_prints_the_cases_that_the_options_choose(capsys):
    arguments = ["--suite", "upsample", "cast", "--list", "--case", "f16", "--dtype", "float16"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert {line.split("-")[0] for line in lines} == {"fwd", "bwd", "f16"}
    with pytest.raises(SystemExit):
        cli.main(["--suite", "no-such-suite"])
