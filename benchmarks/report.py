"""``python -m benchmarks report``: fills the tables and the chart of README and docs/.

They are written between markers, which name a table, a device and perhaps more arguments: ``<!--
benchmarks:suite nvidia-h200 cast begin -->`` before the table, and the same with ``end`` after it.
Everything else on a page is written by hand.
"""

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

import jax_oneflow_ops as jof
from tests import programs

from . import chart, results, survey
from .harness import SWEEP
from .results import Result, Row, by, mean
from .suites import SUITES
from .suites.common import short
from .tables import markdown, microseconds, percent, ratio


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any is stale")
    parser.add_argument("--root", type=Path, default=results.ROOT, help="of the repository")
    options = parser.parse_args(argv)
    root: Path = options.root
    stale = []
    pages = [path for path in (root / "docs").rglob("*") if path.suffix in (".md", ".svg")]
    for page in [root / "README.md", *sorted(pages)]:
        text = page.read_text()
        try:
            wanted = filled(text, root / "benchmarks" / "results")
        except ValueError as error:
            sys.exit(f"{page.relative_to(root)}: {error}")
        if wanted != text:
            stale.append(str(page.relative_to(root)))
            if not options.check:
                page.write_text(wanted)
                print(f"wrote {stale[-1]}")
    if options.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python -m benchmarks report")
    return 0


_MARKER = "<!-- benchmarks:"
_MARKED = re.compile(rf"({_MARKER}(\S+) ([^>]*) begin -->).*?({_MARKER}\2 \3 end -->)", re.DOTALL)


def filled(text: str, root: Path) -> str:
    """Returns a page with current tables; raises ValueError if a marker is wrong."""

    def fill(found: re.Match[str]) -> str:
        begin, name, arguments, end = found.groups()
        return f"{begin}\n\n{table(name, arguments.split(), root)}\n\n{end}"

    text, pairs = _MARKED.subn(fill, text)
    if text.count(_MARKER) != 2 * pairs:
        raise ValueError(f"{text.count(_MARKER)} markers make {pairs} pairs")
    return text


def table(name: str, arguments: Sequence[str], root: Path) -> str:
    if name not in TABLES or not arguments:
        raise ValueError(f"no table {name!r}; there are: DEVICE after {', '.join(TABLES)}")
    device, *rest = arguments
    if not (found := _of_device(root / device)):
        raise ValueError(f"no results of {device!r}")
    text = TABLES[name](found, *((_of_device(root / x) or x) for x in rest))
    return text or "Not measured yet."


@functools.cache
def _of_device(folder: Path) -> list[Result]:
    """The results in a folder, cached: drawing a survey's cases again takes a while."""
    return [survey.read(path) for path in sorted(folder.glob("*.jsonl"))]


def listed(found: Sequence[Result], suite: str | None = None) -> list[Row]:
    """Returns the measured rows of listed cases, without those of surveys and sweeps."""
    return [r for r in _measured(found) if r["group"] != SWEEP and suite in (None, r["suite"])]


def _measured(found: Sequence[Result]) -> list[Row]:
    return [row for r in found if r.header.get("suite") in SUITES for row in r.rows if "us" in row]


def _failed(found: Sequence[Result], suite: str) -> list[Row]:
    of_suite = (r for r in found if r.header.get("suite") == suite)
    return [row for r in of_suite for row in r.rows if "error" in row]


def _surveyed(found: Sequence[Result]) -> list[Row]:
    return [row for r in found if "suite" not in r.header for row in r.rows]


def origin(found: Sequence[Result], which: str = "") -> str:
    """Device, versions, clock, date and commits; of all results, of a suite, or of "surveys"."""
    known = [r for r in found if which in ("", r.header.get("suite", "surveys"))]
    headers = sorted((r.header for r in known), key=lambda h: str(h["date"]), reverse=True)
    headers = [header for header in headers if "suite" in header] or headers
    newest, versions = headers[0], headers[0]["versions"]
    cores = f", {newest['cores']} cores" if newest["platform"] == "cpu" else ""
    number = f"{newest['devices']} " if newest["devices"] > 1 else ""
    facts = [f"{number}{newest['device']}{cores}"]
    facts += [f"driver {newest['driver']}"] if "driver" in newest else []
    facts += [f"{name} {versions[name]}" for name in ("jax", "torch") if name in versions]
    rows = [row for r in known if r.header is newest for row in r.rows if isinstance(row, dict)]
    clocks = {row.get("clock", newest.get("clock")) for row in rows} or {newest.get("clock")}
    facts.append("device time" if "cupti" in clocks else "wall time")
    commits = dict.fromkeys(c for h in headers for c in h.get("commit", "").split(", ") if c)
    return ", ".join([*facts, newest["date"][:10], f"commit {', '.join(commits)}"])


_FAMILIES = {
    "elementwise": "`gelu`, `swiglu`, `add`, ... (elementwise)",
    "cast": "`cast`",
    "upsample": "`upsample_nearest2d`",
    "permute": "`permute`",
    "scatter": "`segment_sum`, `scatter_add`, `embedding_lookup`",
    "rows": "`softmax`, cross entropy, `layer_norm`, `rms_norm`, `group_norm`",
    "strided": "`softmax`, `logsumexp`, norms along another axis than the last",
    "kernels": "`ElementwiseKernel`",
    "graph": "`message_sum`, `attention_sum`",
}


def headline(found: Sequence[Result]) -> str:
    """One line per family: means over listed cases with the kernels, then over random shapes."""
    drawn = [survey.timed(_surveyed(found), way) for way in ("native", "default")]
    lines = []
    for name, family in _FAMILIES.items():
        if rows := listed(found, name):
            written = ratio(mean(map(results.as_written, rows)))
            random = (_best([row for row in its if row["suite"] == name]) for its in drawn)
            lines.append([family, written, _best(rows)[0], *itertools.chain(*random)])
    head = ["", "listed, over jnp as written", "over XLA's best"]
    head += ["random shapes", "worst of them", "random shapes by default", "worst of them"]
    return markdown(head, lines)


def _best(rows: Sequence[Row]) -> list[str]:
    """The mean and the minimum of XLA's best time divided by ours."""
    ratios = [found[1] for row in rows if (found := results.best(row))]
    return [ratio(mean(ratios)), ratio(min(ratios, default=None))]


_LAYOUT = {
    "cast": ("op", "shape"),
    "upsample": ("group op", "dtype"),
    "permute": ("group", "dtype"),
    "scatter": ("op shape", "dtype"),
    "graph": ("op shape", "dtype"),
}
"""The fields that lines and columns stand for, if not ops and dtypes."""


def suite(found: Sequence[Result], name: str, *words: str) -> str:
    """XLA's best over ours: one line per op (permute: per group), one column per dtype."""
    rows = [row for row in listed(found, name) if " ".join(words) in ("", row["group"])]
    label, column = _LAYOUT.get(name, ("op", "dtype"))
    columns = [str(key) for (key,) in by(rows, column)]
    torch = [""] if any(results.rival(row, "torch") for row in rows) else []
    code = "`" if name in ("elementwise", "kernels") else ""
    lines = []
    for keys, its in by(rows, *label.split()).items():
        cells = [_best([row for row in its if row[column] == key])[0] for key in columns]
        torch_cells = [ratio(mean(results.rival(row, "torch") for row in its)) for _ in torch]
        share = percent(mean(row["copy"] / row["us"] for row in its if "copy" in row))
        lines.append([f"{code}{' '.join(keys)}{code}", *cells, _best(its)[1], *torch_cells, share])
    head = ["", *map(short, columns), "worst", *("PyTorch" for _ in torch), "of copy"]
    return markdown(head, lines)


def sizes(found: Sequence[Result]) -> str:
    """One line per size, one column per op: our microseconds, and XLA's best over ours."""
    rows = [row for r in found for row in r.rows if "us" in row and row["group"] == SWEEP]
    swept = {"2x": "upsample 2x", "permute": "transpose"}
    ops = by(rows, "op", "dtype")
    lines = []
    for (shape,), its in by(rows, "shape").items():
        known = by(its, "op", "dtype")
        cells = (known.get(key) for key in ops)
        texts = (f"{microseconds(c[0]['us'])} ({_best(c)[0]})" if c else "-" for c in cells)
        lines.append([shape, *texts])
    names = (op if " to " in op else f"{swept.get(op, op)} {short(d)}" for op, d in ops)
    return markdown(["", *names], lines)


def slower(found: Sequence[Result]) -> str:
    """One line per case in which XLA's best form is faster by more than the samples' spread."""
    lost = [(results.best(row) or ("", 1.0), row) for row in _measured(found)]
    lost = sorted((pair for pair in lost if results.is_slower(pair[1])), key=lambda x: x[0][1])
    lines = [[row["suite"], row["case"], form, ratio(value)] for (form, value), row in lost]
    return markdown(["suite", "case", "XLA's best form", "its time over ours"], lines)


def steps(
    found: Sequence[Result], name: str, group: str = "step", beside: Sequence[Result] = ()
) -> str:
    """One line per whole program (such as a training step) or single call: as written, and ours.

    If a second device is given (``beside``), its gain is added. Otherwise the temporary memory of
    programs is.
    """
    there = {row["case"]: ratio(results.rival(row, "jnp")) for row in listed(beside, name)}
    rows = [row for row in listed(found, name) if row["group"] == group]
    failed = [row for row in _failed(found, name) if row["group"] == group]
    layers = [""] if any("layers" in row.get("others", {}) for row in rows) else []
    memory = [("jnp", "as written"), ("ours", "accelerated")]
    memory = memory if not there and any("temporary MiB" in row for row in rows) else []

    def label(row: Row) -> str:
        of_dtype = f", {short(row['dtype'])}" if group == "call" else ""
        return f"{chart.label(row['op'])}{of_dtype}"

    lines = []
    for row in rows:
        times = map(microseconds, (results.numbers(row["xla"]).get("jnp"), row["us"]))
        line = [label(row), *times, ratio(results.rival(row, "jnp"))]
        line += [there.get(row["case"], "-")] if there else []
        line += [microseconds(results.numbers(row["others"]).get("layers")) for _ in layers]
        mib = row.get("temporary MiB", {})
        line += [f"{mib[way]:,}" if way in mib else "-" for way, _ in memory]
        lines.append(line)
    head = ["", "jnp as written, us", "accelerated, us", "gain"]
    head += [f"on {beside[0].header['device'].split()[1]}"] if there else []
    head += ["with graph layers, us" for _ in layers]
    head += [f"memory {what}, MiB" for _, what in memory]
    nothing = ["-"] * (len(head) - 2)
    lines += [[label(row), f"failed: {row['error']}", *nothing] for row in failed]
    return markdown(head, lines)


def scaled(found: Sequence[Result], name: str = "programs") -> str:
    """One line per program: milliseconds per step on one device and on all, as written and ours."""
    lines = []
    for row in (row for row in listed(found, name) if "sent" in row):
        us = {"ours": row["us"]} | results.numbers(row["xla"]) | results.numbers(row["others"])
        names = ("jnp on one", "jnp", "ours on one", "ours")
        times = [f"{us[name] / 1e3:.3g}" if name in us else "-" for name in names]
        sent = ", ".join(f"{n} {kind}" for kind, n in row["sent"]["ours"].items())
        lines.append([chart.label(row["op"]), *times, sent])
    ways = [f"{way}, {where}" for way in ("XLA", "accelerated") for where in ("one", "all")]
    head = ["ms a step", *ways, "collectives of the accelerated step"]
    return markdown(head, lines)


def throughput(found: Sequence[Result]) -> str:
    """One line per example on several devices: its throughput and its all-reduced bytes."""
    lines = []
    for result in (r for r in found if any("rate" in row for row in r.rows)):
        one, *others = result.rows
        for row in others:
            rates = (f"{r['rate'] / 1e3:,.0f} thousand {r['unit']}/s" for r in (one, row))
            sent = sum(row["collectives"].get("all-reduce", [])) / 1e6
            lines.append([f"{result.header['suite']}, {row['case']}", *rates, f"{sent:,.1f} MB"])
    return markdown(["", "on one device", "on all", "all-reduced"], lines)


def charted(found: Sequence[Result]) -> str:
    """The chart of the unchanged programs and calls, an SVG."""
    rows = listed(found, "programs")
    return chart.svg(rows, found[0].header["device"]) if rows else ""


def explained(found: Sequence[Result], name: str = "mesh_graph_net") -> str:
    """The report that `explain` prints for a program and a measured device."""
    program, key = programs.make(name, "full"), jax.eval_shape(jax.random.key, 0)
    state, batch = (jax.eval_shape(make, key) for make in (program.state, program.batch))
    header = found[0].header
    platform = header["device"] if header["platform"] == "gpu" else "cpu"
    report = jof.explain(program.step, state, batch, platform=platform)
    return f"```\n{report.table(100)}\n```"


def surveyed(
    found: Sequence[Result], by_what: str = "family", implementation: str = "native"
) -> str:
    """One line per family (or size, or permute strategy), over the rows of all surveys together."""
    lines = survey.summaries(survey.timed(_surveyed(found), implementation), by_what)
    return markdown(["", *survey.HEAD], lines) if lines else ""


TABLES: dict[str, Callable[..., str]] = {
    "origin": origin,
    "headline": headline,
    "suite": suite,
    "sizes": sizes,
    "slower": slower,
    "steps": steps,
    "scaled": scaled,
    "throughput": throughput,
    "chart": charted,
    "explain": explained,
    "survey": surveyed,
}
"""The tables by the names in markers. Each takes the results of a device as its first argument."""
