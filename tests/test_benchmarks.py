"""The benchmark machinery: inputs, timing, checks, results, comparisons and tables."""

import dataclasses
import math
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tqdm")  # in the extra "bench"

from benchmarks import __main__ as cli
from benchmarks import (
    accuracy,
    comparison,
    environment,
    harness,
    inputs,
    policy,
    report,
    results,
    survey,
    tables,
    timing,
)
from benchmarks.inputs import Input
from benchmarks.suites import (
    FAMILIES,
    cast,
    elementwise,
    graph,
    kernels,
    load,
    permute,
    programs,
    rows,
    scatter,
    upsample,
)
from benchmarks.suites.scatter import Problem
from jax_oneflow_ops import _policy
from tests.arrays import one_in

SUITES = (*FAMILIES, "kernels", "graph", "programs")
TINY = {
    "elementwise": [
        elementwise.case(op, dtype, 900, "900", group)
        for op, dtype, group in (
            ("gelu_tanh", "float16", "forward"),
            ("scale_traced", "float32", "forward"),
            ("swiglu", "bfloat16", "derivative"),
            ("leaky_relu", "float32", "derivative"),
            ("where", "float16", "derivative"),
        )
    ],
    "cast": [cast.case("float32", "int8", 700, "700", kind="wide")],
    "permute": [permute.case((3, 33, 64), (0, 2, 1), "complex128", "random")],
    "upsample": [
        upsample.case(upsample.Problem((2, 3, 5, 7), (10, 14), "NHWC", "bfloat16")),
        upsample.case(upsample.Problem((2, 3, 5, 7), (8, 9), "NCHW", "float16", "backward")),
    ],
    "scatter": [
        scatter.case(Problem("segment_sum", 2048, 3, 8, "hot", "float16")),
        scatter.case(Problem("scatter_add in place", 300, 8, 20, "zipf", "bfloat16")),
        scatter.case(Problem("embedding gradient", 300, 1, 20, "sorted", "float32")),
        scatter.case(Problem("embedding", 300, 8, 20, "one", "bfloat16")),
    ],
    "rows": [rows.case("rms_norm", (64, 64), "bfloat16", "value and gradient")],
    "strided": [
        rows.case("softmax", (2, 9, 12), "float16", "forward", axis=1),
        rows.case("layer_norm", (3, 16, 10), "float32", "value and gradient", axis=1),
    ],
    "graph": [
        graph.case("weighted sum", "skewed", "float32", "forward", 64, 512),
        graph.case("attention", "sorted", "bfloat16", "value and gradient", 64, 512),
    ],
    "kernels": [
        kernels.case(name, "bfloat16", 4 * kernels.WIDTH, "tiny")
        for name in ("residual_gelu", "squared_diff_vjp", "chain")
    ],
    "programs": [
        programs.call(name, dtype, "tiny")
        for name, dtype in (
            ("bincount uniform", "int32"),
            ("histogram", "float32"),
            ("add to columns", "bfloat16"),
            ("add to pairs", "float32"),
            ("vmapped gather gradient", "float32"),
            ("take_along_axis gradient", "bfloat16"),
            ("resize gradient", "bfloat16"),
            ("segment_max of rows", "bfloat16"),
            ("segment_max gradient", "bfloat16"),
            ("segment softmax", "bfloat16"),
        )
    ],
}
CASES = [case for suite in TINY.values() for case in suite]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("suite", SUITES)
def test_cases_have_names_of_their_own_and_sweeps_all_sizes(suite, platform):
    cases = load(suite).cases(platform)
    assert len({case.name for case in cases}) == len(cases)
    sweep = [case for case in cases if case.group == harness.SWEEP]
    for line in results.by([vars(case) for case in sweep], "op", "dtype").values():
        sizes = [1 << bits for bits in range(10, 31 if platform == "gpu" else 27, 2)]
        assert [case["shape"] for case in line] == [tables.size(n) for n in sizes]
        # In addition to that array: ids, the small image, or the same size again.
        assert all(n <= c["bytes"] <= 2 * n + 1024 for n, c in zip(sizes, line, strict=True))
    assert bool(sweep) == (suite in FAMILIES and suite != "strided")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.suite != "graph"],  # counts a row once per edge that reads it
    ids=lambda case: case.name,
)
def test_bytes_are_those_of_the_arrays(case):
    work = case.work()
    with harness.precision(case):
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in work.inputs]
        program = jax.jit(list(work.forms.values())[-1]).lower(*arrays)
        read = [x for x in jax.tree.leaves(program.in_avals[0]) if x.shape]
        kept = [i for i in range(len(read)) if i in program._lowering.compile_args["kept_var_idx"]]
        moved = [*(read[i] for i in kept), *jax.tree.leaves(program.out_info)]
    total = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in moved)
    assert case.bytes <= total
    if "embedding" not in case.name:  # only looked-up rows of a table count
        assert case.bytes == total


def test_sums_are_checked_in_every_place_of_a_pack():
    for width in (1, 7, 128, 2048):
        seen = scatter.columns(width)
        assert seen[-1] == width - 1
        assert {c % 8 for c in seen} == set(range(min(width, 8)))


def drawn(case):
    work = case.work()
    arrays = jax.jit(work.draw)(np.uint32(7))
    return work, arrays, jax.jit(partial(work.ours, implementation="native"))(*arrays)


@pytest.mark.parametrize("case", one_in(2, CASES), ids=lambda case: case.name)
def test_checks_pass_ours_and_see_what_is_off(case):
    with harness.precision(case):
        work, arrays, right = drawn(case)
        wrong = jax.tree.map(lambda y: jnp.roll(y, 1), right)
        sample, difference = jax.jit(work.sample), jax.jit(harness.difference)
        for out, is_right in ((right, True), (wrong, False)):
            sampled = jax.tree.map(np.asarray, sample(arrays, out))
            assert (work.verify(sampled) is None) == is_right
        assert not harness.agreement(difference(right, wrong), work.exact, right)
        assert harness.agreement(difference(right, right), True, right)


def test_all_forms_of_sums_agree(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # GPUs have more forms
    case = scatter.case(Problem("segment_sum", 2048, 3, 8, "hot", "float16"))
    work, arrays, right = drawn(case)
    assert work.forms.keys() == {"jnp", "jnp f32", "jnp in parts", "jnp sorted"}
    for name in ("jnp f32", "jnp in parts"):
        found = harness.difference(right, work.forms[name](*arrays))
        assert harness.agreement(found, False, right), name
    many = Problem("embedding gradient", 1 << 17, 8, 9, "one", "float16")
    assert "jnp" not in scatter.case(many).work().forms  # it takes seconds


def test_differences_are_of_both_parts_of_a_number_and_of_nan():
    ours = jnp.array([1 + 1j, 2], jnp.complex64)
    assert not harness.agreement(harness.difference(ours, ours.conj()), True, ours)
    x = jnp.array([jnp.nan, jnp.inf, 1.0])
    assert harness.agreement(harness.difference(x, x), True, x)
    assert not harness.agreement(harness.difference(x, x.at[0].set(1)), False, x)


def test_a_program_counts_as_native_only_if_the_kernel_is_alone_in_it():
    call = '  ROOT %a = f32[8]{0} custom-call(%x), custom_call_target="jof_silu"'
    program = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{call}\n}}"
    assert harness.is_native(program, True)
    assert not harness.is_native(program.replace("jof_silu", "other"), True)
    beside = program.replace(call, f"  %b = f32[8]{{0}} fusion(%x), kind=kLoop\n{call}")
    assert harness.is_native(beside, False)
    with pytest.raises(ArithmeticError, match="fusion beside our kernel"):
        harness.is_native(beside, True)


def test_ulp_is_the_distance_of_neighbours():
    values = np.array([1.0, 1.5, -2.0, 1e-7, 0.0])
    assert accuracy.ulp(values, jnp.float16).tolist() == [2**-10, 2**-10, 2**-9, 2**-24, 2**-24]
    wrong = accuracy.worst(np.array([1.0, np.nan]), np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    assert wrong.startswith("1 of 2 samples are off: nan instead of 2")
    assert accuracy.worst(np.array([1.05]), np.array([1.0]), np.array([0.1])) is None


def test_inputs_are_as_their_kind_says():
    kinds = ("uniform", "hot", "sorted", "skewed", "zipf", "one")
    uniform, hot, in_order, skewed, zipf, one = map(
        np.asarray, inputs.draw(np.uint32(3), [Input((4000,), "int32", k, 100) for k in kinds])
    )
    for x in (uniform, hot, in_order, skewed, zipf, one):
        assert x.min() >= 0
        assert x.max() < 100
    assert 20 < np.bincount(uniform).min() < np.bincount(uniform).max() < 70
    assert 0.45 < np.bincount(hot).max() / 4000 < 0.6
    assert (np.diff(in_order) >= 0).all()
    assert 0.25 < (skewed == 0).mean() < 0.4  # u**4 < 0.01
    assert np.bincount(zipf)[0] > 1.5 * np.bincount(zipf)[1] > 2 * np.bincount(zipf)[9]
    assert (one == one[0]).all()
    normal, divisor = inputs.draw(
        np.uint32(3), [Input((4000,), "float32"), Input((4000,), "float32", "divisor")]
    )
    assert abs(np.mean(normal)) < 0.3
    assert 2.8 < np.std(normal) < 3.2
    assert np.abs(divisor).min() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "complex64"])
def test_hashes_are_exact_and_differ(dtype):
    (x,) = inputs.draw(np.uint32(3), [Input((64, 1000), dtype, "hash")])
    values = np.asarray(x).astype(complex if dtype == "complex64" else float)
    assert (values.real % 1 == 0).all()
    assert len(np.unique(values)) > {"float16": 2000, "int8": 250}.get(dtype, 63000)


def test_kernels_are_summed_call_by_call():
    assert timing.per_call([1.0, 2.0, 3.0, 4.0], calls=2) == [3.0, 7.0]
    assert timing.per_call([1.0, 2.0, 3.0], calls=2) == [3.0]  # uneven: the mean per call


class Extension:
    """A fake extension that records the kernels that contenders launch."""

    sessions, is_open, in_order = 0, False, True

    def _cupti_init(self):
        assert not self.is_open
        self.is_open, self.records = True, []
        self.sessions += 1

    def _cupti_get_timings(self, finalize):
        self.is_open = False
        return self.records if self.in_order else sorted(self.records, reverse=True)

    def launcher(self, name, ms, number):
        """A contender whose calls launch kernels."""

        def call(i):
            if number == 0 and i > 1:  # after the warm-up
                raise RuntimeError("cannot open /some/directory/file.so")
            if self.is_open:
                self.records.extend([(name, ms)] * number)

        return timing.Contender(name, call, lambda found: None)


@pytest.mark.parametrize("in_order", [True, False])
def test_cupti_clock_tells_turns_apart_by_the_marker(in_order):
    extension = Extension()
    extension.in_order = in_order
    clock = timing.CuptiClock.__new__(timing.CuptiClock)
    clock._extension = extension
    clock._mark = lambda: extension.records.append((timing.MARKER, 0.001))
    parts = (("a", 1.0, 1), ("b", 0.5, 3), ("bad", 1.0, 0))
    outcome = timing.compare([extension.launcher(*part) for part in parts], clock)
    assert not extension.is_open
    assert outcome.pop("bad") == "RuntimeError: cannot open file.so"
    count = clock.rounds * clock.calls
    assert outcome == {"a": [1000.0] * count, "b": [1500.0] * count}
    # Out-of-order records cost one session per turn.
    assert extension.sessions == (1 if in_order else 1 + 3 * clock.rounds)


def test_contenders_take_turns_and_nobody_always_follows_the_same_one():
    taken = []

    class Clock(timing.WallClock):
        def record(self, turns, outcome):
            taken.extend((contender.name, start) for contender, start in turns)

    contenders = [timing.Contender(name, lambda i: i, lambda _: None) for name in "abc"]
    timing.compare(contenders, Clock(rounds=4))
    assert "".join(name for name, _ in taken) == "abc" + "bca" + "cab" + "abc"
    assert [start for _, start in taken] == list(range(12))  # every turn has new inputs


def test_spreads_are_interquartile_ranges():
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 50.0]) == 2.0
    assert timing.spread([1.0]) == 0.0


def test_turns_of_several_calls_are_their_mean_and_fit_into_the_budget(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now) * 1e-3)  # 1 ms per turn
    contender = timing.Contender("a", lambda i: i, lambda found: None)
    assert timing.compare([contender], timing.WallClock(64, 4, 8e3))["a"] == [250.0] * 2


def test_what_is_slow_is_called_once_more_and_no_more(monkeypatch):
    calls = []
    slow = timing.Contender("slow", calls.append, lambda found: None)
    monkeypatch.setattr(timing, "SLOW_US", -1.0)
    assert len(timing.compare([slow], timing.WallClock())["slow"]) == 1
    assert len(calls) == 2
    wrong = timing.Contender("wrong", lambda i: i // 0, lambda found: None)
    assert timing.compare([wrong], timing.WallClock())["wrong"].startswith("ZeroDivisionError")


def test_inputs_rotate_beyond_the_caches():
    assert timing.rotation_sets(1 << 10) == 8
    assert timing.rotation_sets(100 << 20) == 3
    assert timing.rotation_sets(1 << 30) == 1


@pytest.fixture
def bare(monkeypatch):
    """The harness as on a CPU, on any machine, with a small time budget."""
    clock = timing.WallClock(budget_us=3e4)
    machine = lambda seed, options: harness.Machine("cpu", clock, None, seed)  # noqa: E731
    monkeypatch.setattr(harness, "make_machine", machine)


def test_a_run_writes_what_it_measured(bare, tmp_path, capsys):
    cases = [TINY["upsample"][1], TINY["cast"][0], TINY["scatter"][1]]
    options = harness.Options(("native", "default"))
    about = {"suite": "some", "seed": 3}
    rows = cli.run(cases, options, about, ["--out", str(tmp_path)], tmp_path)
    text = (tmp_path / "some.jsonl").read_text()
    assert str(tmp_path) not in text
    header, read = results.read(tmp_path / "some.jsonl")
    assert read == rows
    assert {"device", "date", "versions", "clock", "seed"} <= header.keys()
    for case, row in zip(cases, rows, strict=True):
        assert list(row["xla"]) == list(case.work().forms)
        assert row["us"] > 0
        assert row["copy"] > 0
        assert row["others"]["default"] > 0
        assert "ran" not in row
    assert rows[2]["others"]["deterministic"] > 0
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())


def entered(case, options=harness.Options(), torch=None, **changes):  # noqa: B008
    """The entrants that the harness makes from a case."""
    work = dataclasses.replace(case.work(), **changes)
    case = dataclasses.replace(case, work=lambda: work)
    machine = harness.Machine("cpu", timing.WallClock(), torch, 1)
    (item,) = harness._prepare([case], options)
    with harness.precision(case):
        return harness._entrants(item, machine, options)


def test_xla_beside_kernels_is_what_the_default_may_run():
    """The case is an elementwise function that differs from ``implementation="xla"``."""
    (case,) = [c for c in elementwise.cases("cpu") if c.name == "fwd-gelu_tanh-4M-f16"]
    options = harness.Options(("native", "default", "xla"), libraries=False, check_only=True)
    before = _policy.prefers_xla
    (item,) = harness._prepare([case], options)
    assert _policy.prefers_xla is before
    programs = {name: item.programs[name].result().as_text() for name in ("ours", "default", "xla")}
    assert harness.is_native(programs["ours"], alone=True)
    assert not harness.is_native(programs["xla"], alone=False)
    work = case.work()
    plain = harness._compile(case, work, "x", partial(work.ours, implementation="xla"))
    assert harness._without_names(plain.as_text()) != harness._without_names(programs["xla"])


def test_rivals_that_fail_or_differ_are_named():
    def contender(name, work, sets, ours):
        if name == "torch":
            return timing.Contender(name, lambda i: ours, lambda _: None), ours + 1
        raise RuntimeError("why")

    torch = types.SimpleNamespace(names=lambda work: ["torch", "broken"], contender=contender)
    case = TINY["upsample"][0]
    found = entered(case, torch=torch)
    assert found.failed == {"broken": "RuntimeError: why"}
    assert found.about == {"disagree": ["torch"]}
    forms = [*case.work().forms]
    assert [c.name for c in found.contenders] == ["ours", *forms, "torch", "copy"]
    found = entered(case, harness.Options(libraries=False), torch)
    assert [c.name for c in found.contenders] == ["ours", *forms]


def test_one_program_is_timed_once():
    """Names of parameters and functions do not matter, nor does which of our forms calls it."""
    case = TINY["elementwise"][1]  # times a scalar

    def product(renamed, scale):
        return scale * renamed

    forms = {"jnp": lambda x, a: x * a, "other": lambda x, a: jnp.sin(jnp.arcsin(x * a))}
    changes = {"ours": lambda x, a, implementation: product(a, x), "forms": forms}
    found = entered(case, harness.Options(("xla", "default")), **changes)
    assert found.same == {"default": "ours", "jnp": "ours"}
    assert [c.name for c in found.contenders] == ["ours", "other", "copy"]
    text = 'HloModule {0}\n\nFileNames\n1 "{0}"\n\nENTRY %{0} ({0}: f32[2]) -> f32[2] {{\n'
    text += '  ROOT %{0}.1 = f32[2] {1}(%{0}), metadata={{op_name="{0}"}}\n}}'
    one, same, other = (text.format(*x) for x in (("a", "sine"), ("b.2", "sine"), ("a", "cosine")))
    assert harness._without_names(one) == harness._without_names(same)
    assert harness._without_names(one) != harness._without_names(other)


def test_what_differs_from_all_forms_or_fails_its_check_is_an_error():
    case = TINY["elementwise"][1]
    off = {"jnp": lambda x, a: x * a + 1e-3}
    with pytest.raises(ArithmeticError, match="the result differs from that of jnp"):
        entered(case, forms=off)
    found = entered(case, forms={**off, "right": jnp.multiply})
    assert found.about == {"disagree": ["jnp"]}
    with pytest.raises(ArithmeticError, match="samples are off"):
        entered(case, ours=lambda x, a, implementation: x * a + 1e-3)


def test_errors_are_rows():
    def fail():
        raise ValueError("no such shape")

    machine = harness.Machine("cpu", timing.WallClock(), None, 1)
    case = dataclasses.replace(CASES[0], work=fail)
    (row,) = harness.measure([case], machine, harness.Options())
    assert row["error"] == "ValueError: no such shape"
    entrants = harness.Entrants([], {}, ["jnp"], {"torch": "why"})
    times = {"ours": [9.0, 10.0, 11.0], "jnp": [20.0], "copy": [5.0]}
    row = harness._timed({"case": "a"}, entrants, times)
    assert row["xla"] == {"jnp": 20.0}
    assert row["others"] == {"torch": "why"}
    assert (row["us"], row["iqr"], row["copy"]) == (10.0, 1.0, 5.0)


def test_programs_are_timed_by_the_wall_on_gpus():
    machine = harness.Machine("gpu", timing.CuptiClock, None, 1)
    ours = timing.Contender("ours", lambda i: i, lambda found: None)
    entrants = harness.Entrants([ours], {}, [], {}, wall=True)
    case = dataclasses.replace(CASES[0], work=lambda: lambda: entrants)
    (row,) = harness.measure([case], machine, harness.Options())
    assert row["clock"] == "wall"
    assert row["us"] >= 0


def test_losses_of_unchanged_programs_are_compared(monkeypatch):
    found = programs.step("histogram", "tiny").work()()
    assert [c.name for c in found.contenders] == ["ours", "jnp"]
    assert found.about["apart"] == 0
    assert len(found.about["losses"]["jnp"]) == 2
    for contender in found.contenders:
        contender.sync([contender.call(i) for i in range(3)])

    def wrong(step):
        return lambda *args: (step(*args)[0], 1.01 * step(*args)[1])

    monkeypatch.setattr(programs.jof, "accelerate", wrong)
    with pytest.raises(ArithmeticError, match="losses differ by 1"):
        programs.enter("histogram", "tiny")


def row(case="a", us=2.0, forms=(4.0, 3.0), group="forward", **more):
    xla = {("astype", "jnp 1")[i]: t for i, t in enumerate(forms)}
    known = {"suite": "cast", "case": case, "op": "f32 to f16", "group": group, "dtype": "float32"}
    known |= {"shape": "9", "bytes": 99, "us": us, "iqr": 0.1, "copy": 1.0, "xla": xla}
    return {**known, "others": {"torch": 5.0}, **more}


def test_best_is_the_fastest_form_that_ran():
    assert results.best(row()) == ("jnp 1", 1.5)
    assert results.as_written(row()) == 2.0
    assert results.best(row(forms=("not run", 3.0))) == ("jnp 1", 1.5)
    assert results.as_written(row(forms=("not run", 3.0))) is None
    assert results.best(row(forms=("not run",))) is None
    assert results.rival(row(), "torch") == 2.5
    assert results.form(row()) == 3.0  # the fastest program that the default may run, or
    assert results.form(row(others={"default": 2.0, "xla": 3.5})) == 3.5  # the measured one
    assert results.form(row(suite="rows", form=2.5)) == 2.5  # from a survey's line
    assert results.is_slower(row(forms=(1.0,)))
    assert not results.is_slower(row(forms=(1.95,)))  # within the spread
    assert "<" in tables.progress(row(forms=(1.0,)))
    assert "ERROR: why" in tables.progress({"case": "a", "error": "why"})


HEADER = {
    "suite": "cast",
    "device": "NVIDIA H200",
    "devices": 1,
    "platform": "gpu",
    "clock": "cupti",
}
HEADER |= {
    "driver": "1",
    "versions": {"jax": "1.2"},
    "commit": "c0ffee",
    "date": "2026-01-02T03:04",
}


def test_comparison_tells_changes_from_noise(tmp_path, capsys):
    before = [row(case, 10.0, iqr=iqr) for case, iqr in (("a", 0.1), ("b", 0.1), ("c", 0.5))]
    after = [{**r, "us": us} for r, us in zip(before, (10.3, 9.7, 10.5), strict=True)]
    after.append({"suite": "cast", "case": "e", "error": "wrong"})
    before.append({"suite": "cast", "case": "d", "error": "wrong"})
    files = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for file, lines in zip(files, (before, after), strict=True):
        results.write(file, HEADER, lines)
    assert cli.main(["compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["SLOWER", "a", "10.00", "10.30", "us", "1.03x"]
    assert lines[2].split() == ["faster", "b", "10.00", "9.70", "us", "0.97x"]
    assert lines[3:] == ["of 3 rows 1 slower, 1 faster", "only before: d", "only now: e"]
    assert comparison.change(row(us=10.0), row(us=10.09)) is None
    assert comparison.change(row(us=1.0, iqr=0.0), row(us=1.04, iqr=0.0)) is None  # clock ticks
    assert comparison.change(row(us=10.0, iqr=0.0), row(us=10.11, iqr=0.0)) > 1
    other = {**HEADER, "driver": "2", "versions": {"jax": "3", "flax": "3"}}
    slow = [{**r, "copy": 1.2} for r in before if "us" in r]
    text = comparison.compare(results.Result(HEADER, before), results.Result(other, slow))
    assert "WARNING: driver: 1, then 2\nWARNING: version of jax: 1.2, then 3\n" in text
    assert "plain copies took 1.20x as long" in text
    assert "flax" not in text  # absent from the older result
    files[0].write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["compare", *map(str, files)])
    assert "not a result" in capsys.readouterr().err


MARKER = "<!-- benchmarks:headline nvidia-h200 {} -->"
MARKED = f"a\n{MARKER.format('begin')}\nold\n{MARKER.format('end')}\nb"


def test_report_writes_between_markers_and_says_what_is_stale(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text(MARKED)
    rows = [row(), row("b", 2.0, (1.0,)), row("c", group="sweep", forms=(0.1,))]
    results.write(tmp_path / "benchmarks/results/nvidia-h200/cast.jsonl", HEADER, rows)
    check = ["report", "--check", "--root", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"stale: README.md"):
        cli.main(check)
    assert cli.main(["report", "--root", str(tmp_path)]) == 0
    assert cli.main(check) == 0
    text = page.read_text()
    assert text.startswith("a\n<!--")
    assert text.endswith("-->\nb")
    assert "| `cast` | 1.00x | 0.87x | - | - |" in text  # over jnp as written: 2.0 and 0.5
    assert "failed" not in text
    case = programs.cases("gpu")[-1]
    bad = {"case": case.name, "error": "ArithmeticError: off"}
    results.write(
        tmp_path / "benchmarks/results/nvidia-h100/programs.jsonl",
        {**HEADER, "suite": "programs"},
        [{**bad, "suite": "programs", "op": case.op, "group": "call", "dtype": case.dtype}],
    )
    page.write_text(MARKED.replace("headline nvidia-h200", "steps nvidia-h100 programs call"))
    assert cli.main(["report", "--root", str(tmp_path)]) == 0
    assert "failed: ArithmeticError: off | - | - |" in page.read_text()
    for wrong in (
        "<!-- benchmarks:headline x begin -->",
        MARKED.replace("headline", "none"),
        MARKED.replace("h200", "h300"),
        MARKED.replace(" end", " begin"),
    ):
        page.write_text(wrong)
        with pytest.raises(SystemExit, match=r"README.md: "):
            cli.main(check)


@pytest.mark.usefixtures("measurements")
@pytest.mark.exhaustive  # .ci/run checks the same
def test_the_documents_tables_are_current():
    assert report.main(["--check"]) == 0


@pytest.mark.usefixtures("measurements")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in report.TABLES if name not in ("suite", "steps")])
def test_every_table_can_be_made_of_the_committed_results(name):
    for device in ("nvidia-h200", "cpu-amd-epyc"):
        assert report.table(name, [device], results.RESULTS)


def test_committed_results_are_small_and_are_of_cases_that_exist():
    files = [*results.RESULTS.glob("*/*.jsonl")]
    assert sum(file.stat().st_size for file in files) < 500_000
    for file in files:
        header, rows = results.read(file)
        if header.get("suite") in SUITES:
            known = {case.name for case in load(header["suite"]).cases(header["platform"])}
            assert {r["case"] for r in rows} <= known, file


def test_a_seed_draws_the_same_cases_and_families_do_not_matter():
    counts = dict.fromkeys(FAMILIES, 20)
    names = [case.name for case in survey.draw(5, counts, 1 << 24)]
    assert len(set(names)) == 20 * len(FAMILIES)
    assert names == [case.name for case in survey.draw(5, counts, 1 << 24)]
    alone = survey.draw(5, {"permute": 20}, 1 << 24)
    assert [case.name for case in alone] == names[60:80]
    assert not {case.name for case in alone} & {c.name for c in survey.draw(6, counts, 1 << 24)}


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_cover_sizes_dtypes_and_directions(family):
    cases = survey.draw(11, {family: 200}, 1 << 28)
    sizes = [case.bytes for case in cases]
    assert max(sizes) <= 1.1 * (1 << 28)
    assert sum(size < 1 << 20 for size in sizes) > 30
    assert sum(size > 16 << 20 for size in sizes) > 30
    assert len({case.dtype for case in cases}) >= 3
    if family == "permute":
        shapes = [eval(case.shape.partition(" ")[0]) for case in cases]
        assert {len(shape) for shape in shapes} == {2, 3, 4, 5, 6}
        ones = [n & (n - 1) == 0 for shape in shapes for n in shape]
        assert 0.4 < np.mean(ones) < 0.8


def test_a_survey_checks_values(bare, tmp_path, capsys):
    command = ["survey", "--seed", "3", "--count", "1", "--check-only", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    rows = results.read(tmp_path / "survey-3.jsonl").rows
    assert [row["suite"] for row in rows] == [*FAMILIES]
    assert not [row for row in rows if "us" in row or "error" in row]
    assert f"{len(rows)} of {len(rows)} results are right" in capsys.readouterr().err


def test_tables_of_a_survey():
    rows = [
        row("a", 1.0, (2.0,), bytes=1 << 10),
        row("b", 1.0, (0.5,), bytes=1 << 21, shape="worst"),
        row("c", 1.0, (0.94,), bytes=1 << 25, iqr=1.0, others={"default": 0.5}),
    ]
    ((name, count, mean, *rest),) = survey.summaries(rows, "family")
    assert (name, count) == ("cast forward", "3")
    assert mean == tables.ratio((2 * 0.5 * 0.94) ** (1 / 3))
    assert rest == ["0.50x", "67%", "33%", "float32 worst"]
    bands = [line[0] for line in survey.summaries(rows, "size")]
    assert bands == ["cast, under 1 MB", "cast, 1 to 16 MB", "cast, over 16 MB"]
    assert ", 1.88x" in survey.text(rows, "default", "native")
    plans = ("tile, 2 B", "tile, 4 B", "rows, 16 B")
    planned = [row(suite="permute", group="random", plan=plan) for plan in plans]
    lines = survey.summaries(planned, "strategy")
    assert [line[:2] for line in lines] == [["tile", "2"], ["rows", "1"]]
    assert all(len(line) <= 100 for line in survey.text(rows, "native", "native").splitlines())


def test_the_policy_compares_kernels_with_what_the_default_runs_instead(tmp_path):
    (case,) = survey.draw(5, {"rows": 1}, survey.LARGEST["cpu"])
    times = {"us": 2.0, "iqr": 0.0, "xla": {"jnp": 1.0}, "others": {"default": 3.0, "xla": 3.0}}
    header = {name: x for name, x in HEADER.items() if name != "suite"}
    header |= {"seed": 5, "platform": "cpu"}
    results.write(tmp_path / "survey-5.jsonl", header, [harness.about(case) | times])
    read = survey.read(tmp_path / "survey-5.jsonl")
    assert [xla for _, _, xla, _ in policy._samples(read)] == [3.0]
    assert results.best(read.rows[0]) == ("xla", 0.5)


def test_environment_names_no_directories():
    command = environment.header(["--out", "/a/b/c"])["command"]
    assert command == "python -m benchmarks --out c"
    about = {"platform": "cpu", "device": "AMD EPYC 9654 (96 cores)"}
    assert environment.slug(about) == "cpu-amd-epyc-9654-96-cores"


def test_options_choose_cases(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--suite", "cast", "--case", "of no suite"])
    assert "no case has that name" in capsys.readouterr().err
    arguments = ["--suite", "permute", "cast", "--list", "--case", "f16"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"table", "f16"} <= {line.split("-")[0] for line in lines}
    assert all("f16" in line for line in lines)
    assert lines[0].endswith(" B")  # the plan
    assert cli.main([*arguments, "--quick"]) == 0
    assert 0 < len(capsys.readouterr().out.splitlines()) < len(lines)
