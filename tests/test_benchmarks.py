"""The benchmarks' own machinery: what a number means before it is believed."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import (
    accuracy,
    elementwise,
    environment,
    gelu_ladder,
    harness,
    plot,
    report,
    timing,
    upsample,
)
from benchmarks.cases import (
    CASES,
    ELEMENTWISE,
    CastCase,
    ElementwiseCase,
    LadderCase,
    UpsampleCase,
    itemsize,
)
from benchmarks.ceilings import Ceilings

TINY = UpsampleCase((1, 2, 8, 8), (16, 16))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("suite", CASES)
def test_case_names_are_unique(suite, platform):
    names = [case.name for case in CASES[suite](platform, False)]
    if (suite, platform) == ("gelu_ladder", "cpu"):
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


def test_cast_and_ladder_bytes():
    assert CastCase("float32", "float8_e4m3fn", 100, "tiny").bytes == 500
    assert CastCase("bfloat16", "float64", 100, "tiny").bytes == 1000
    assert CastCase("bfloat16", "float64", 1 << 20, "1M elements").name == "bf16-to-f64-1M"
    assert LadderCase("float16", 16 << 20).variant == "16M elements, 32 MiB"


def test_a_program_counts_as_native_only_if_the_kernel_is_alone_in_it():
    call = '  ROOT %a = f32[8]{0} custom-call(%x), custom_call_target="jof_silu"'
    program = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{call}\n}}"
    assert harness.implementation(program, "jof_silu", True) == "native"
    assert harness.implementation(program, "jof_tanh", True) == "xla"
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
    template, cute = gelu_ladder.access_widths(SASS).values()
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
    monkeypatch.setattr(gelu_ladder, "_BUILD", tmp_path)
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


def test_plot_draws_a_figure_a_group(suites, tmp_path):
    pytest.importorskip("matplotlib")
    made = [stem for result in suites.values() for stem in plot.draw(result, tmp_path)]
    assert {stem.removesuffix("-nvidia-h200") for stem in made} == {
        "elementwise-forward",
        "elementwise-derivative",
        "elementwise-small",
        "gelu_ladder",
        "cast",
    }
    assert all((tmp_path / f"{stem}.png").stat().st_size > 1000 for stem in made)
