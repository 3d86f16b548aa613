"""The charts: what they show of a result, and whether it can be read."""

import copy
import itertools
import json
import re

import pytest

from benchmarks import harness, plot
from benchmarks.cases import SWEEP, CastCase, ElementwiseCase
from benchmarks.plot import contents
from tests import results


@pytest.fixture
def suites():
    return results.suites()


def named(drawn, name):
    (figure,) = [figure for figure in drawn if figure.name == f"{name}-nvidia-h200"]
    return figure


def of(suite, rows):
    return {**results.upsampling(), "suite": suite, "rows": rows}


def sweep():
    """Two sizes, with and without PyTorch; ours loses the smaller."""
    cases = [ElementwiseCase("silu", "float32", 1 << 8, text, SWEEP) for text in ("1 KiB", "1 GiB")]
    rivals = {"jnp": 2.0, "1 element": 1.5, "triton": 8.0}
    return of(
        "elementwise",
        [
            results.row(cases[0], 4.0, {**rivals, "torch": 6.0}),
            results.row(cases[1], 4.0, rivals),
        ],
    )


def models():
    timed = {"ours": results.rated(2000.0), "rivals": {"xla": results.rated(1500.0)}}
    row = {"case": "unet", "op": "unet", "group": "step", "variant": "full", "dtype": "bfloat16"}
    row |= {"bytes": 0, "jnp": ["xla"], "ceilings": {}, **timed}
    for entry in (row["ours"], row["rivals"]["xla"]):
        del entry["tb_per_s"]
    losses = {"native": [3.0, 2.0], "xla": [3.0, 2.5]}
    return of("models", [harness.summarise({**row, "losses": losses})])


def test_figures_of_every_suite(suites):
    drawn = contents.figures([*suites.values(), results.upsampling(), models()])
    assert [figure.name.removesuffix("-nvidia-h200") for figure in drawn] == [
        "headline",
        "elementwise-forward",
        "elementwise-derivative",
        "elementwise-sweep",
        "gelu_ladder",
        "cast",
        "scatter",
        "atomic_add",
        "permute",
        "permute-wide",
        "permute-article",
        "kernels",
        "upsample",
        "models",
        "models-losses",
    ]
    assert len({figure.digest for figure in drawn}) == len(drawn)


def test_a_line_has_the_best_jnp_and_every_other_rival(suites):
    panel, other = (
        named(contents.figures([suites["scatter"], results.upsampling()]), "upsample").panels[0],
        named(contents.figures([suites["scatter"]]), "scatter").panels[0],
    )
    won, lost = panel.lines  # and none of the row that failed
    assert won.values == {"ours": 0.5, "best jnp": 0.25}  # PyTorch failed
    assert (won.roof, won.loses) == (1.0, False)
    assert lost.values == {"ours": 0.25, "best jnp": 0.5}
    assert lost.loses
    assert list(other.lines[0].values) == ["ours", "best jnp", "deterministic", "torch"]


def test_rates_are_in_the_unit_of_the_axis():
    result = results.upsampling()
    result["environment"] |= {"platform": "cpu", "device": "CPU", "cpu": {"cores": 2}}
    (figure,) = contents.figures([result])
    assert figure.panels[0].unit == "GB/s"
    assert figure.panels[0].lines[0].values["ours"] == 500.0


def test_ladders_have_a_bar_a_kernel(suites):
    f32, f16 = named(contents.figures([suites["gelu_ladder"]]), "gelu_ladder").panels
    assert [line.label for line in f32.lines][-2:] == ["ours, f32 math", "ours, in JAX"]
    colours = {line.label: next(iter(line.values)) for line in f16.lines}
    assert colours["jnp"] == "best jnp"
    assert colours["half2"] == "the article's kernel"
    assert colours["ours, in JAX"] == "ours"
    atomic = named(contents.figures([suites["atomic_add"]]), "atomic_add").panels
    assert all(panel.logarithmic for panel in atomic)
    assert "half" not in [line.label for line in atomic[1].lines]  # which was not run


def test_the_articles_permutations_have_its_kernel(suites):
    drawn = contents.figures([suites["permute"]])
    line = named(drawn, "permute-article").panels[0].lines[0]
    assert line.values["the article's kernel"] == pytest.approx(1 / 9)
    assert "naive, 32-bit" not in line.values
    assert [panel.title for panel in named(drawn, "permute-wide").panels] == ["c64"]


def test_sweeps_have_a_roof_and_a_floor():
    rates, ratios = named(contents.figures([sweep()]), "elementwise-sweep").panels
    assert rates.title == "silu, f32"
    assert rates.x == [2.0**10, 2.0**30]
    assert rates.ticks == ["1 KiB", "1 GiB"]
    assert rates.curves["copy"] == [1.0, 1.0]
    assert rates.curves["torch"] == [pytest.approx(1 / 6), None]
    moved = 2 * 4 * (1 << 8)
    assert rates.curves["launch floor"] == [pytest.approx(moved / 1.5 / 1e6)] * 2
    assert ratios.curves == {"best jnp": [0.5, 0.5], "triton": [2.0, 2.0], "torch": [1.5, None]}
    case = CastCase("float32", "bfloat16", 1 << 8, "1 KiB", SWEEP)
    (figure,) = contents.figures(
        [of("cast", [results.row(case, 2.0, {"astype": 1.0}, ["astype"])])]
    )
    assert figure.panels[0].title == "f32 to bf16"
    assert "launch floor" not in figure.panels[0].curves


def test_models_have_steps_and_losses():
    steps, losses = (figure.panels[0] for figure in contents.figures([models()]))
    assert [(line.label, line.values, line.loses) for line in steps.lines] == [
        ("native", {"ours": 2.0}, True),
        ("xla", {"XLA": 1.5}, False),
    ]
    assert steps.worth == {"native": "2", "xla": "1.5"}
    assert losses.curves == {"ours": [3.0, 2.0], "XLA": [3.0, 2.5]}
    assert losses.x == [1.0, 2.0]


def test_the_headline_is_of_cases_that_all_were_timed_on(suites):
    headline, *_ = contents.figures([suites["elementwise"], suites["cast"]])
    assert headline.name == "headline"
    wide, narrow = headline.panels
    assert [line.label for line in wide.lines] == ["activations", "casts"]
    shares = {"ours": 50.0, "best jnp": 100 * (1 / 18) ** (1 / 3), "torch": 25.0}
    assert wide.lines[0].values == pytest.approx(shares)  # not of the array of 1 KiB
    assert wide.worth["activations"] == "50"
    assert wide.lines[1].values == pytest.approx({"ours": 50.0, "best jnp": 100.0})
    assert wide.lines[1].loses
    assert [line.label for line in narrow.lines] == ["arithmetic"]
    # A row without one of them is left out of all means.
    del suites["elementwise"]["rows"][0]["rivals"]["torch"]
    headline, *_ = contents.figures([suites["elementwise"], suites["cast"]])
    shares["best jnp"] = 100 * (1 / 6) ** (1 / 2)
    assert headline.panels[0].lines[0].values == pytest.approx(shares)


def test_training_has_no_chart(suites):
    assert contents.figures([{"runs": [], "suite": "embedding"}]) == []


@pytest.fixture
def repository(tmp_path, monkeypatch, suites):
    """A folder with two results and a drawing that is no chart."""
    folder = tmp_path / "benchmarks" / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    for name in ("cast", "kernels"):
        (folder / f"{name}.json").write_text(json.dumps(suites[name]))
    images = tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    (images / "tile.svg").write_text("<svg/>")
    monkeypatch.setattr(plot, "_ROOT", tmp_path)
    return tmp_path


def test_the_documentations_charts_are_those_of_the_results(repository):
    pytest.importorskip("matplotlib")
    images = repository / "docs" / "images"
    with pytest.raises(
        SystemExit, match=r"stale: cast-nvidia-h200, headline, kernels-nvidia-h200;"
    ):
        plot.main(["--check"])
    assert not list(images.glob("cast*"))
    assert plot.main(["--docs"]) == 0
    assert plot.main(["--check"]) == 0
    names = {file.name for file in images.iterdir()}
    assert names == {
        f"{n}.svg" for n in ("tile", "headline", "cast-nvidia-h200", "kernels-nvidia-h200")
    }
    file = repository / "benchmarks/results/nvidia-h200/kernels.json"
    result = json.loads(file.read_text())
    result["rows"][0]["ours"]["tb_per_s"] = 0.7
    file.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match=r"stale: kernels-nvidia-h200;"):
        plot.main(["--check"])
    file.unlink()
    assert plot.main(["--docs"]) == 0
    assert {file.name for file in images.iterdir()} == {"tile.svg", "cast-nvidia-h200.svg"}
    with pytest.raises(SystemExit):
        plot.main(["--check", str(file)])


def test_files_are_the_same_for_the_same_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "upsample.json"
    file.write_text(json.dumps(results.upsampling()))
    texts = []
    for name in ("one", "two"):
        assert plot.main([str(file), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name / "upsample-nvidia-h200.png").stat().st_size > 1000
        texts.append((tmp_path / name / "upsample-nvidia-h200.svg").read_text())
    assert texts[0] == texts[1]
    (figure,) = contents.figures([results.upsampling()])
    assert f"data:{figure.digest}<" in texts[0]
    assert ">slower than XLA</text>" in texts[0]  # text, not outlines of letters
    assert "fill: #ffffff" in texts[0]  # legible on a dark page, too
    assert not re.search(r"\.\d{3}", re.sub(r"<(style|metadata).*?</\1>", "", texts[0], flags=re.S))


def test_short_coordinates_leave_the_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot.drawing import save

    result = models()
    result["rows"][0]["ours"]["us"] = 816.0
    steps, _ = contents.figures([result])
    save(steps, tmp_path, ["svg"])
    assert ">0.816</text>" in (tmp_path / "models-nvidia-h200.svg").read_text()


def test_nothing_to_draw_is_said(tmp_path):
    result = results.upsampling()
    file = tmp_path / "upsample.json"
    file.write_text(json.dumps({**result, "rows": result["rows"][2:]}))
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot.main([str(file)])


RIVALS = ("torch.compile", "triton", "pallas", "cupy", "cub", "cutensor", "a new one")


def crowded(result):
    result = copy.deepcopy(result)
    for row in result["rows"]:
        row["rivals"] |= {name: results.rated(3.0 + i) for i, name in enumerate(RIVALS)}
    return result


def shown_texts(drawing):
    """The texts with their boxes; matplotlib keeps ticks beyond the ends of axes, too."""
    import matplotlib

    hidden = set()
    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks() + axis.get_minor_ticks()
            hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    texts = drawing.findobj(matplotlib.text.Text)
    texts = [text for text in texts if text.get_text().strip() and text not in hidden]
    return {text: text.get_window_extent() for text in texts if text.get_visible()}


@pytest.mark.parametrize("make", [lambda: crowded(results.suites()["elementwise"]), sweep, models])
def test_all_text_is_inside_and_apart(make):
    """Legends with every rival, names of lines, ticks."""
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.plot.drawing import draw

    for figure in contents.figures([make()]):
        drawing = draw(plt, figure)
        drawing.canvas.draw()
        whole = drawing.bbox
        boxes = shown_texts(drawing)
        for text, box in boxes.items():
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1
            assert inside, (figure.name, text.get_text())
        for (one, box), (other, theirs) in itertools.combinations(boxes.items(), 2):
            overlap = box.shrunk(0.9, 0.8).overlaps(theirs.shrunk(0.9, 0.8))
            assert not overlap, (figure.name, one.get_text(), other.get_text())
        plt.close(drawing)
