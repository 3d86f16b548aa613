"""The benchmarks' own machinery: what a number means before it is believed."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as cli
from benchmarks import environment, harness, plot, report, timing, upsample
from benchmarks.cases import CASES, UpsampleCase
from benchmarks.ceilings import Ceilings

TINY = UpsampleCase((1, 2, 8, 8), (16, 16))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("suite", CASES)
def test_case_names_are_unique(suite, platform):
    names = [case.name for case in CASES[suite](platform, False)]
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
    clock._extension = Extension()

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
    assert "slower" in harness.Table(["fwd-b"], "gpu").line(b)
    assert "slower" not in harness.Table(["fwd-a"], "gpu").line(a)
    assert "wrong" in harness.Table(["fwd-c"], "gpu").line(result["rows"][2])


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
