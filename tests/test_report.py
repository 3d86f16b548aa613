"""What `python -m benchmarks report` writes, from small results."""

import copy
import json
import re

import pytest

from benchmarks import articles as said
from benchmarks.cases import SWEEP, CastCase, KernelCase, ModelCase, ScatterCase, UpsampleCase
from benchmarks.report import articles as report_articles
from benchmarks.report import headline, main, provenance
from benchmarks.report import suites as report_suites
from tests import results

README = "before\n" + "".join(
    f"<!-- benchmarks:{name} begin -->\nold\n<!-- benchmarks:{name} end -->\n"
    for name in ("headline", "advice", "models")
)
CPU = {"device": "AMD EPYC", "platform": "cpu", "driver": None, "cpu": {"cores": 2}}


@pytest.fixture
def suites():
    return {**results.suites(), "upsample": results.upsampling()}


def on_cpu(result):
    return {**result, "clock": "wall", "environment": {**result["environment"], **CPU}}


def tables(result):
    return "\n".join(report_suites.tables(result))


def write(root, *found):
    """A repository that has these results, and a README with old tables."""
    (root / "README.md").write_text(README)
    for result in found:
        folder = root / "benchmarks" / "results" / result["environment"]["platform"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['suite']}.json").write_text(json.dumps(result))


# ---- documents ----


def test_documents_are_written_and_what_is_stale_is_noticed(suites, tmp_path, capsys):
    write(tmp_path, *suites.values(), on_cpu(suites["upsample"]))
    root = f"--root={tmp_path}"
    with pytest.raises(SystemExit, match=r"stale: README.md, docs/articles.md, docs/benchmarks/"):
        main([root, "--check"])
    assert (tmp_path / "README.md").read_text() == README  # which a check leaves as it is
    assert main([root]) == 0
    assert main([root, "--check"]) == 0
    assert not main([root])
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert "old" not in text

    page = tmp_path / "docs" / "benchmarks" / "upsample.md"
    text = page.read_text()
    assert text.index("## NVIDIA H200") < text.index("## AMD EPYC, 2 cores")
    # Geometric means: of 2 and 0.5 over the best rival, of 4 and 0.5 over resize.
    assert "| **1.00x** | 0.50x | 1.41x |" in text
    assert "| fwd-c | error: wrong |" in text
    assert (
        "slower than the best jnp formulation, by more than the spread of the samples, in 1" in text
    )
    assert "- fwd-b: resize, 0.50x" in text
    assert "- fwd-c: wrong\n- torch on fwd-a: no" in text

    page.write_text(text.replace("0.50x", "2.50x"))
    with pytest.raises(SystemExit, match=r"stale: docs/benchmarks/upsample\.md;"):
        main([root, "--check"])
    assert main([root]) == 0
    (page.parent / "left.md").touch()
    with pytest.raises(SystemExit, match=r"stale: docs/benchmarks/left\.md;"):
        main([root, "--check"])
    capsys.readouterr()
    assert main([root]) == 0
    assert capsys.readouterr().out == "removed docs/benchmarks/left.md\n"
    assert main([root, "--check"]) == 0


def test_the_index_leads_to_every_page_and_they_to_the_charts(suites, tmp_path):
    write(tmp_path, suites["upsample"])
    images = tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    for name in ("upsample-nvidia-h200", "upsample-sweep-nvidia-h200", "upsample-cpu-amd-epyc"):
        (images / f"{name}.svg").touch()
    assert main([f"--root={tmp_path}"]) == 0
    folder = tmp_path / "docs" / "benchmarks"
    index = (folder / "index.md").read_text()
    pages = {page.stem for page in folder.glob("*.md")} - {"index"}
    assert {"upsample", "models", "training"} <= pages
    assert pages == set(re.findall(r"\]\((\w+)\.md\)", index))
    assert pages == set(re.findall(r"^\w+$", index[index.index("```{toctree}") :], re.MULTILINE))
    assert "| not measured yet |" in index
    assert "Not measured yet." in (folder / "models.md").read_text()
    text = (folder / "upsample.md").read_text()
    assert "![upsample sweep nvidia h200](../images/upsample-sweep-nvidia-h200.svg)" in text
    assert "amd-epyc" not in text


def test_a_readme_without_a_place_is_an_error(suites, tmp_path):
    write(tmp_path, suites["upsample"])
    for text in ("", README.replace("headline", "advice")):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(SystemExit, match=r"one pair of the markers <!-- benchmarks:headline"):
            main([f"--root={tmp_path}"])


def test_remarks_say_what_is_missing_failed_and_was_noted(suites):
    result = {**suites["upsample"], "notes": ["a note"], "missing": {"cutensor": "not installed"}}
    check = {"case": "fwd-a", "us": [2.0, 2.5], "spread_us": 0.1, "agrees": False}
    clocks = {"before": {"sm_mhz": 1980, "power_w": 103.4, "memory_mhz": None}, "after": {}}
    text = provenance.remarks({**result, "self_check": check, "clocks": clocks})
    assert "- cutensor is missing: not installed\n- a note\n- fwd-c: wrong" in text
    assert "2.00 and 2.50 us, **apart by more than** the spread of 0.10 us" in text
    assert "- before the run: 1,980 MHz, 103 W" in text
    assert "after the run" not in text
    agrees = provenance.remarks({**result, "self_check": {**check, "agrees": True}})
    assert "us, within the spread" in agrees
    assert provenance.remarks({**result, "rows": [], "notes": [], "missing": {}}) == ""


# ---- the suites' tables ----


def test_ops_are_compared(suites):
    text = tables(suites["elementwise"])
    assert "|  | forward f32 | derivative f32 | forward f16 |" in text
    assert "| silu ▼ | 1.50x 50% | 0.50x 50% ▼ |  |" in text
    assert "| multiply |  |  | 1.00x 50% |" in text
    assert "Every op at 64 MiB" in text
    assert "Other libraries" not in text
    suites["elementwise"]["rows"][0]["rivals"]["cupy"] = {"us": 5.0, "ratio": 2.5}
    table = "| case | ours, us | cupy |\n| --- | --- | --- |\n| fwd-silu-512MiB-f32 | 2.0 | 2.50x |"
    assert f"{table}\n\n</details>" in tables(suites["elementwise"])
    summary = text[: text.index("at 512 MiB")]
    assert "naive" not in summary
    assert "1 KiB" not in summary
    assert "| f32 to int8 ▼ | 0.50x 50% ▼ |" in tables(suites["cast"])


def test_sweeps_have_a_table_of_their_own(suites):
    result = suites["elementwise"]
    text = report_suites.sweeps(result)
    assert "| ours, us | 1 element | jnp |" in text
    assert "| silu | 1 KiB | f32 | 0.5 | 50% | 2.00 | 1.50 | 2.50 |" in text
    assert "1 KiB" not in tables(result)
    result["rows"].pop()
    assert report_suites.sweeps(result) == ""


def test_the_ladder_and_the_atomics(suites):
    text = tables(suites["gelu_ladder"])
    assert "| vec4 | 8.00 | 0.12 | 12% | - | - | 128, 128 | 131,072 | 2,097,152 |" in text
    assert "- cute on ladder-16M-f16: no permission" in provenance.remarks(suites["gelu_ladder"])
    text = tables(suites["atomic_add"])
    assert "| FastAtomicAdd | 20.0 | 50 | 9.0e-01 | 4.50x |" in text
    assert "| segment_sum of the products | 4.0 | 250 | 1.0e-07 | 22.5x |" in text
    assert "| half | not run | - | - | - |" in text
    assert "- half on atomics-16k-f16: not run: 9 s" in provenance.remarks(suites["atomic_add"])


def test_sums_of_rows(suites):
    text = tables(suites["scatter"])
    assert "| 16M x 1 to 1024, hot | segment_sum | 2.0 | 2.00x | 4.00x | 50% |" in text
    assert "| 16M x 1 to 1024, hot | segment_sum | 3.00x | 2.0e-04 | 5.0e-02 | - |" in text
    said = provenance.remarks(suites["scatter"])
    assert "torch on segment_sum-16Mx1-to-1024-hot-f16: one call of 2.50 s" in said


def test_permutations_and_kernels(suites):
    text = tables(suites["permute"])
    assert "| all |  | int8 | 1 | **0.50x** | 0.50x | 0.50x | 2.00x | 50% |" in text
    assert "| images |  | complex64 | 1 | **1.50x** |" in text
    assert "| (32, 225, 225, 3) by (0, 3, 1, 2) ▼ | 0.50x 50% ▼ | 1.50x 50% |" in text
    assert "| native: runs, 1 B | 2.0 |" in text
    text = tables(suites["kernels"])
    assert "| all |  | float32 | 1 | **1.50x** | 1.50x | 1.25x | 1.50x | 50% |" in text
    assert "| expression | of each array | dtype | us | of copy | built-in | jnp |" in text
    assert "| `silu(x)` | 256 MiB | f32 | 2.0 | 50% | 1.25x | 1.50x |" in text


def models(us):
    rivals = {"xla": 2.0, "jnp": 3.0, "only silu": 1.6, "torch": 4.0}
    row = results.row(ModelCase("unet", "full"), us, rivals, ["xla", "jnp"])
    row |= {"losses": {"native": [1.0, 0.25], "xla": [1.0, 0.2501]}}
    counts = {"calls": {"jof_silu": 3}, "library call": 1, "fusion": 9, "copy": 2, "transpose": 0}
    counts["bytes"] = 5_000_000_000
    row |= {"program": {"ours": counts, "xla": {**counts, "calls": {}}}}
    return {**results.upsampling(), "suite": "models", "rows": [row]}


def test_models():
    text = tables(models(1.0))
    assert "| native, us | xla, us | jnp, us | torch, us | xla over native |" in text
    assert (
        "| unet | full | bf16 | 1.00 | 2.00 | 3.00 | 4.00 | 2.00x | 3.00x | 4.00x | 1.0000 to"
        in text
    )
    assert "| unet | `silu` | 1.60 | 1.25x | 1.60x |" in text
    assert "| unet | ours | 3 jof_silu | 1 | 9 | 2 | 0 | 5.00 |\n| unet | xla | - | 1 |" in text
    assert "▼" not in text
    assert "| unet ▼ | full |" in tables(models(2.5))
    assert "▼" not in tables(models(2.05))  # within the spread


# ---- the README ----


def timed(case, ours, **rivals):
    """A row of a GPU on which the first rival is what one writes."""
    return results.row(case, ours, rivals, tuple(n for n in rivals if n != "torch"))


def test_the_headline_has_means_by_the_width_of_dtypes(suites):
    casts = [
        timed(CastCase("float32", "float16", 99, "64 MiB"), 2.0, astype=2.0, torch=4.0),
        timed(CastCase("float32", "int8", 99, "64 MiB"), 2.0, astype=2.0, torch=1.0),
        timed(CastCase("float16", "int8", 99, "64 MiB"), 2.0, astype=6.0, torch=4.0),
    ]
    result = {**suites["cast"], "rows": casts}
    text = headline.headline([result])
    assert "| `cast` | `astype` | 1.00x / 3.00x | 1.00x / 3.00x | 1.00x / 2.00x |" in text
    assert "| 32 bits |\n" in f"{text}\n"
    casts[1] = timed(CastCase("float32", "int8", 99, "64 MiB"), 2.0, astype=1.0)
    assert "| 32 bits; slower in 1 of 3 cases, at worst 0.50x ▼ |" in headline.headline([result])
    text = headline.headline([on_cpu(result), result])
    assert text.startswith("NVIDIA H200")
    assert text.index("<details><summary>The same on a CPU: AMD EPYC, 2 cores") > 0
    assert headline.headline([]) == ""


def test_all_commits_of_the_headline_are_named(suites):
    old, new = suites["cast"], copy.deepcopy(suites["upsample"])
    new["environment"] |= {"commit": "decaf", "date": "2026-02-02T00:00:00", "dirty": True}
    text = headline.headline([old, new])
    assert "medians; 2026-02-02, commits decaf with changes, c0ffee.\n" in text


def upsample(variant, group, dtype, ours, **rivals):
    size = {"2x": 16, "other integers": 24, "any size": 13}[variant]
    case = UpsampleCase((1, 2, 8, 8), (size, size), "NCHW", dtype, group)
    assert case.variant == variant
    return timed(case, ours, **rivals)


def test_advice_follows_the_results(suites):
    def advice(*rows):
        result = {**suites["upsample"], "rows": list(rows)}
        return headline.advice([result]).removeprefix("On NVIDIA H200:\n\n- ")

    backward = ("2x", "backward", "float32")
    gain, nothing = {"resize": 9.0, "broadcast": 2.0}, {"resize": 9.0, "broadcast": 1.05}
    assert advice(upsample(*backward, 1.0, **gain)) == (
        "**Swap in all dtypes**: upsampling's gradient."
    )
    assert advice(upsample(*backward, 1.0, **nothing)).startswith("**Swap, unless the call is")
    assert advice(upsample(*backward, 1.0, resize=1.05)).startswith("**Leave to XLA**")
    half = ("2x", "backward", "bfloat16")
    both = upsample(*backward, 1.0, **nothing), upsample(*half, 1.0, **gain)
    unless = "**Swap, unless the call is already written in the form that XLA is best at**"
    assert advice(*both) == (
        "**Swap in 16 bits and fewer**: upsampling's gradient.\n"
        f"- {unless}: upsampling's gradient in 32 bits."
    )
    both = upsample(*backward, 1.0, **gain), upsample(*half, 1.0, **nothing)
    assert advice(*both) == (
        "**Swap in 32 bits and more**: upsampling's gradient.\n"
        f"- {unless}: upsampling's gradient in 16 bits."
    )
    both = upsample(*backward, 1.0, resize=1.0), upsample(*half, 1.0, **gain)
    assert advice(*both) == "**Swap in 16 bits and fewer**: upsampling's gradient."
    text = advice(
        upsample(*backward, 1.0, resize=1.0), upsample("any size", *half[1:], 1.0, **gain)
    )
    assert "**Swap in all dtypes**: upsampling's gradient (at other sizes).\n" in text
    assert text.endswith("**Leave to XLA**: upsampling's gradient (at 2x).")


@pytest.mark.parametrize(
    ("group", "rows", "ids", "member"),
    [
        ("segment_sum", 64 << 20, "uniform", "many rows a sum"),
        ("segment_sum", 1000, "uniform", "few rows a sum"),
        ("segment_sum", 1000, "sorted", "sorted ids"),
        ("scatter_add", 4096, "uniform", "few rows into an operand that is not donated"),
        ("scatter_add in place", 4096, "uniform", "few rows a sum"),
        ("embedding", 4096, "uniform", None),
    ],
)
def test_sums_are_told_apart_by_how_often_they_are_added_to(group, rows, ids, member):
    (family,) = (f for f in headline.FAMILIES if f.name == "sums of rows")
    case = ScatterCase(group, rows, 8, 1 << 20, ids, "float32")
    assert family.member({"op": case.op, "group": group, "variant": ids}) == member


def test_every_row_of_a_suite_belongs_to_one_family(suites):
    suites["kernels"]["rows"].append(timed(KernelCase("chain", "float16", 9, "9 B"), 1.0, jnp=2.0))
    for result in suites.values():
        own = [family for family in headline.FAMILIES if family.suite == result["suite"]]
        for row in result["rows"] if own else []:
            if row["group"] not in (SWEEP, "article"):
                assert sum(family.member(row) is not None for family in own) == 1


def test_models_have_a_column_a_device():
    text = headline.models([models(1.0), on_cpu(models(4.0))])
    assert "| NVIDIA H200, over jnp as written | NVIDIA H200, over XLA's best | AMD EPYC, 2" in text
    assert "| [unet](examples/unet.py) | 3.00x | 2.00x | 0.75x | 0.50x ▼ |" in text
    assert headline.models([results.upsampling()]) == ""


# ---- the articles ----


def test_the_articles_figures_are_beside_ours(suites):
    suites["cast"]["rows"].append(
        timed(CastCase("float32", "float16", 9, "1 MiB"), 2.0, astype=2.0, torch=3.7)
    )
    suites["upsample"]["rows"] += [
        timed(
            UpsampleCase(said.UPSAMPLE_SHAPE, (160, 160), "NCHW", dtype, way),
            2.0,
            resize=3.0,
            torch=t,
        )
        for dtype, way, t in (("float32", "forward", 5.0), ("float16", "backward", 1.0))
    ]
    text = report_articles.page([*suites.values()])

    def verdict(claim):
        return re.search(
            rf"\| {re.escape(claim)} \| (.*) \| NVIDIA H200 \| (.*) \|\n", text
        ).groups()

    claim = verdict("the cast of f32 to f16 beats PyTorch's")
    assert claim == ("1.80x to 1.90x", "1.85x | **holds**")
    assert "| vec4 | f32 | 249.15 | 8.00 | 12% | 131,072 | 131,072 | 2,097,152 |" in text
    claim = verdict("four f32 a thread beat one")
    assert claim == ("1.03x", "1.00x | **no difference here**")
    assert verdict("half2 beats f32") == ("1.88x", "1.60x | **holds**")
    assert verdict("CuTe is as fast as four half2 by hand")[1].endswith("**holds**")
    assert verdict("each widening halves the requests and leaves the sectors")[1].endswith(
        "**holds**"
    )
    assert "9.0e-04; f32 arithmetic, rounded once: 2.0e-04 | **holds**" in text

    assert "| naive elementwise | f16 | 237.28 | 53% | 512 MiB | 3.00 | 33% |" in text
    claim = verdict("packs beat one element a thread, f16, 512 MiB")
    assert claim == ("1.69x", "1.50x | **holds**")
    assert "| half | 422.36 | 16k elements | not run: 9 s |" in text
    assert verdict("a padded half beats a half, 32M elements") == ("3.08x", "4.50x | **holds**")
    claim = verdict("a padded half is as fast as a pair, 16k elements")
    assert claim == ("1.00x", "1.50x | **holds**")
    assert "| PyTorch | f32 | forward | 111.42 | 28% | 5.00 | 20% |" in text
    assert "| OneFlow; here ours | f16 | backward | 40.26 | 45% | 2.00 | 50% |" in text
    claim = "a kernel for twofold upsampling beats PyTorch's, "
    assert verdict(f"{claim}forward f32") == ("1.81x", "2.50x | **holds**")
    assert verdict(f"{claim}backward f16") == ("1.43x", "0.50x | **does not hold**")

    row = "| (1, 0, 2) | f32 | 16 MiB | 3.00 | 9.00 | 6.00 | 2.60 | 2.00 | 1.00 |"
    assert f"{row} 4.50x | 1.30x | 50% |" in text
    claim = verdict("(1, 0, 2) beats PyTorch's, f32 and f16")
    assert claim == ("1.24x to 1.40x", "1.30x | **holds**")
    claim = verdict("(0, 2, 1) beats PyTorch's, f32")
    assert claim == ("3.00x to 3.20x", "2.00x | **holds, by less than there**")
    assert "up to 6.30x" not in text  # no case of it


def test_a_claim_fails_where_the_counts_do_not_halve(suites):
    ladder = copy.deepcopy(suites["gelu_ladder"])
    ladder["rows"][0]["rivals"]["vec2"]["requests"] -= 1
    text = report_articles.page([ladder])
    assert "| 524,288; 262,143; 131,072 | **does not hold** |" in text


@pytest.mark.parametrize(
    ("gains", "as_much", "verdict"),
    [
        ([1.2, 3.0], True, report_articles.HOLDS),
        ([1.01, 3.0], False, report_articles.HOLDS_BY_LESS),
        ([0.99, 3.0], False, report_articles.FAILS),
        ([0.99, 1.02], False, report_articles.EQUAL),
        ([0.9, 1.02], False, report_articles.FAILS),
    ],
)
def test_a_gain_may_be_smaller_than_an_articles(gains, as_much, verdict):
    assert report_articles._of_gains(gains, as_much) == verdict


def test_articles_without_results_have_no_tables():
    text = report_articles.page([])
    assert "|" not in text
    assert all(article.title in text for article in (said.ELEMENTWISE, said.PERMUTE))
