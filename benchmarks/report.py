"""``python -m benchmarks report FILE...``: the tables of the README, from results alone.

Each result has a place in the README, between ``<!-- benchmarks:NAME begin -->`` and
``<!-- benchmarks:NAME end -->``. NAME is the suite and the device: ``upsample-nvidia-h200``,
``upsample-cpu``. ``--check`` writes nothing and fails where the README is not what the results say.
Results of the training examples have their tables too: ``autoencoder-nvidia-h200-x2``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import environment
from .cases import short, size

Result = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Writes the tables into the README, or checks that they are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON)")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--check", action="store_true", help="fail if the README is stale")
    options = parser.parse_args(argv)

    old = text = options.readme.read_text()
    command = f"python -m benchmarks report {' '.join(map(str, options.files))}"
    for file in options.files:
        result = json.loads(file.read_text())
        try:
            text = insert(text, marker_name(result), tables(result))
        except LookupError as error:
            sys.exit(f"{options.readme}: {error.args[0]}")
    if options.check and text != old:
        sys.exit(f"{options.readme} is stale: run {command}")
    if text != old:
        options.readme.write_text(text)
    return 0


def marker_name(result: Result) -> str:
    """The suite and the device; all CPUs share one place."""
    about = result["environment"]
    return f"{result['suite']}-{'cpu' if about['platform'] == 'cpu' else environment.slug(about)}"


def insert(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    begin, end = (f"<!-- benchmarks:{name} {word} -->" for word in ("begin", "end"))
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise LookupError(f"expected one pair of the markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def tables(result: Result) -> str:
    """Markdown: where the numbers come from, and the tables of the suite."""
    if "runs" in result:
        return training(result)
    sections = {"elementwise": _elementwise, "cast": _cast, "gelu_ladder": _ladder}
    sections |= {"scatter": _scatter, "atomic_add": _atomics, "permute": _permute}
    sections |= {"kernels": _kernels}
    parts = [provenance(result), *sections.get(result["suite"], _any)(result)]
    return "\n\n".join(part for part in parts if part)


def _any(result: Result) -> list[str]:
    """Geometric means, and all rows folded away."""
    return [summary(result), _folded("All cases", details(result))]


def _elementwise(result: Result) -> list[str]:
    """Geometric means; a row an op, at the largest arrays; the rest folded away."""
    rows = [row for row in result["rows"] if row["group"] != "small"]
    first, *others = _blocks(rows)
    return [
        summary({**result, "rows": rows}),
        f"At {first[0]}, {_CELL}:",
        by_op(first[1]),
        naive(rows),
        small(result),
        _folded(f"Every op at {first[0]}", op_details(first[1])),
        *(_folded(f"Every op at {title}", op_details(block)) for title, block in others),
    ]


def _cast(result: Result) -> list[str]:
    """Geometric means, and a row a pair of dtypes."""
    rows = result["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    columns = {variant: _has(variant=variant) for variant in variants}
    return [
        summary(result),
        f"{_CELL[0].upper()}{_CELL[1:]}:",
        matrix(rows, columns),
        _folded("All cases", details(result)),
    ]


_CELL = "the best jnp formulation's time over ours, and the share of a copy's bandwidth"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _blocks(rows: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The rows of each size, in their order."""
    sizes = dict.fromkeys(row["variant"] for row in rows)
    return [(size, [row for row in rows if row["variant"] == size]) for size in sizes]


def _has(**values: str) -> Callable[[Result], bool]:
    return lambda row: all(row[name] == value for name, value in values.items())


def by_op(rows: Sequence[Result]) -> str:
    """A row an op, a column a group and dtype."""
    keys = dict.fromkeys((row["group"], row["dtype"]) for row in rows)
    return matrix(rows, {f"{g} {short(d)}": _has(group=g, dtype=d) for g, d in keys})


def matrix(rows: Sequence[Result], columns: dict[str, Callable[[Result], bool]]) -> str:
    """A row an op; ops and cells where ours is slower are marked."""
    lines = [["", *columns]]
    lost = False
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = []
        for belongs in columns.values():
            found = [row for row in rows if row["op"] == op and belongs(row)]
            cells.append(_cell(found[0]) if found else "")
        slower = any(_SLOWER in cell for cell in cells)
        lost |= slower
        lines.append([f"{op} {_SLOWER}" if slower else op, *cells])
    text = _markdown(lines)
    return (
        f"{text}\n\n{_SLOWER} ours is slower, by more than the spread of the samples."
        if lost
        else text
    )


_SLOWER = "▼"
_OWN_TABLES = ("naive", "1 element", "deterministic")  # rivals that the geometric means leave out


def _cell(row: Result) -> str:
    if "error" in row:
        return "error"
    words = [f"{row['ratio']:.2f}x" if "ratio" in row else "-"]
    words += [_percent([row["of_copy"]])] if "of_copy" in row else []
    if row.get("ratio", 1) < 1 and not row["within_noise"]:
        words.append(_SLOWER)
    if row["implementation"] != "native":
        words.append(f"({row['implementation']})")
    return " ".join(words)


def op_details(rows: Sequence[Result]) -> str:
    """A row an op and group; for each dtype the ratios and the share of a copy."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    shown = ["best jnp", *(["torch"] if _ratios(rows, "torch") else []), "of copy"]
    lines = [["", "", *(word for d in dtypes for word in (f"{short(d)} us", *shown))]]
    for op, group in dict.fromkeys((row["op"], row["group"]) for row in rows):
        cells = []
        for dtype in dtypes:
            found = [r for r in rows if _has(op=op, group=group, dtype=dtype)(r)]
            if not found or "error" in found[0]:
                cells += ["error" if found else "", *[""] * len(shown)]
                continue
            (row,) = found
            known = {
                "best jnp": _times([row["ratio"]] if "ratio" in row else []),
                "torch": _times(_ratios([row], "torch")),
                "of copy": _percent([row["of_copy"]] if "of_copy" in row else []),
            }
            cells += [f"{row['ours']['us']:.1f}", *(known[name] for name in shown)]
        lines.append([op, group, *cells])
    return _markdown(lines)


def naive(rows: Sequence[Result]) -> str:
    """One element a thread against packs: the articles' table."""
    found = [row for row in rows if "us" in row["rivals"].get("naive", {}) and "error" not in row]
    if not found:
        return ""
    lines = [["multiply", "", "one element a thread", "packs", "gain", "the article's gain"]]
    for row in found:
        one = row["rivals"]["naive"]
        lines.append(
            [
                short(row["dtype"]),
                row["variant"],
                *(f"{x['us']:.1f} us, {x['tb_per_s']:.2f} TB/s" for x in (one, row["ours"])),
                _times([one["ratio"]]),
                f"{_ARTICLE_NAIVE[row['dtype']]:.2f}x",
            ]
        )
    return _markdown(lines)


# Of an A100 PCIe 40 GB: 298.46 us against 284 in f32, 237.28 against 140.74 in f16.
_ARTICLE_NAIVE = {"float32": 298.46 / 284, "float16": 237.28 / 140.74}


def small(result: Result) -> str:
    """Microseconds of small arrays, and of one element: what a launch costs."""
    rows = [row for row in result["rows"] if row["group"] == "small" and "error" not in row]
    if not rows:
        return ""
    rivals = ["1 element", *(name for name in _rivals(rows) if name != "1 element")]
    lines = [[f"{rows[0]['op']}, us", "", "ours", *rivals]]
    for row in rows:
        timed = [row["ours"], *(row["rivals"].get(name, {}) for name in rivals)]
        cells = [f"{x['us']:.2f}" if "us" in x else "-" for x in timed]
        lines.append([row["variant"], short(row["dtype"]), *cells])
    return _markdown(lines)


# ---- the gelu ladder ----

# Microseconds and requests of global loads on an RTX 2080 Ti.
_ARTICLE_US = {"scalar": 257.70, "vec2": 249.79, "vec4": 249.15, "half2": 136.83}
_ARTICLE_US |= {"vec2 half2": 127.23, "vec4 half2": 125.82, "cute": 125.75}
_ARTICLE_REQUESTS = {"scalar": 524288, "vec2": 262144, "vec4": 131072}
_ARTICLE_ELEMENTS = "16M elements"


def _ladder(result: Result) -> list[str]:
    """The kernels, the article's claims, and what could not be measured."""
    rows = [row for row in result["rows"] if "error" not in row]
    article = (
        "The article's figures are of an RTX 2080 Ti and as many elements; it counts 2,097,152 "
        "sectors for each of its f32 kernels. Errors are against float64; those in ulp leave the "
        "tail out in f32, where |f(x)| < |x| / 1024."
    )
    return [article, ladder(rows), verdicts(rows), _failures(result["rows"])]


def ladder(rows: Sequence[Result]) -> str:
    """A row a kernel, with the article's figures beside ours."""
    head = ["kernel", "us", "TB/s", "of copy", "error, ulp", "error", "load, store bits"]
    lines = [[*head, "requests", "sectors", "article: us", "requests"]]
    for row in rows:
        lines.append([f"**{short(row['dtype'])}, {row['variant']}**", *[""] * (len(lines[0]) - 1)])
        copy = row["ceilings"].get("copy", {}).get("us")
        comparable = row["variant"].startswith(_ARTICLE_ELEMENTS)
        kernels = {k: v for k, v in row["rivals"].items() if k not in (*row["jnp"], "torch")}
        kernels["ours, in JAX"] = row["ours"]
        for name, known in {**kernels, **row["rivals"]}.items():
            if "us" not in known:
                continue
            us, requests = (
                figures.get(name) if comparable else None
                for figures in (_ARTICLE_US, _ARTICLE_REQUESTS)
            )
            bits = [str(known[k]) for k in ("load_bits", "store_bits") if k in known]
            counts = [known.get(k) for k in ("requests", "sectors")]
            lines.append(
                [
                    name,
                    f"{known['us']:.2f}",
                    f"{known['tb_per_s']:.2f}",
                    f"{copy / known['us']:.0%}" if copy else "-",
                    f"{known['max_ulp']:,.1f}" if "max_ulp" in known else "-",
                    f"{known['max_error']:.1e}" if "max_error" in known else "-",
                    ", ".join(bits) or "-",
                    *("-" if count is None else f"{count:,}" for count in counts),
                    "-" if us is None else f"{us:.2f}",
                    "-" if requests is None else f"{requests:,}",
                ]
            )
    return _markdown(lines)


def verdicts(rows: Sequence[Result]) -> str:
    """The article's claims, as these measurements have them."""
    timed = {
        (row["dtype"], name): known
        for row in rows
        if row["variant"].startswith(_ARTICLE_ELEMENTS)
        for name, known in row["rivals"].items()
        if "us" in known
    }
    f32, f16 = "float32", "float16"
    claims = [
        ("four f32 a thread beat one", (f32, "scalar"), (f32, "vec4")),
        ("half2 beats f32", (f32, "scalar"), (f16, "half2")),
        ("four half2 a thread beat one", (f16, "half2"), (f16, "vec4 half2")),
        ("CuTe is as fast as four half2 by hand", (f16, "vec4 half2"), (f16, "cute")),
    ]
    lines = []
    for claim, slow, fast in claims:
        if slow not in timed or fast not in timed:
            continue
        here = timed[slow]["us"] / timed[fast]["us"]
        article = _ARTICLE_US[slow[1]] / _ARTICLE_US[fast[1]]
        noise = max(timed[key]["iqr_us"] for key in (slow, fast)) / timed[fast]["us"]
        equal = abs(here - 1) <= max(noise, 0.01)
        if fast[1] == "cute":
            verdict = "holds" if equal else "does not hold"
        else:
            verdict = "no difference here" if equal else "holds" if here > 1 else "does not hold"
        lines.append(f"- {claim}: **{verdict}**, {here:.2f}x here, {article:.2f}x in the article")
    steps = [timed.get((f32, name), {}) for name in _ARTICLE_REQUESTS]
    if all("requests" in step for step in steps):
        first = steps[0]
        halved = all(s["requests"] << i == first["requests"] for i, s in enumerate(steps))
        same = all(s["sectors"] == first["sectors"] for s in steps)
        verdict = "holds" if halved and same else "does not hold"
        lines.append(f"- each widening halves the requests and leaves the sectors: **{verdict}**")
    half2, ours = (timed.get((f16, name), {}) for name in ("vec4 half2", "ours, f32 math"))
    if "max_error" in half2 and "max_error" in ours:
        verdict = "holds" if half2["max_error"] >= 5e-4 else "does not hold"
        lines.append(
            f"- half arithmetic is off by 0.001: **{verdict}**, {half2['max_error']:.1e} here; "
            f"f32 arithmetic, rounded once, {ours['max_error']:.1e}"
        )
    return "\n".join(lines)


def _failures(rows: Sequence[Result]) -> str:
    """What could not be measured, or only just, and why."""
    said = [f"- {row['case']}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        for name, known in row["rivals"].items():
            why = [known.get(k) for k in ("error", "skipped", "sass", "ncu")]
            why += [f"one call of {known['us'] / 1e6:.2f} s"] if "once" in known else []
            said += [f"- {name} on {row['case']}: {text}" for text in why if text]
    return "\n".join(dict.fromkeys(said))


# ---- scatter ----


def _scatter(result: Result) -> list[str]:
    """Means; a row a problem; what determinism costs and what 16 bits lose; the rest folded."""
    rows = result["rows"]
    together = [{**row, "group": "all", "variant": ""} for row in rows]
    return [
        summary({**result, "rows": together}),
        op_details(rows),
        "deterministic: its time over that of the default. Errors: root mean square, over that of "
        "the sums in float64; a sum that is rounded once to 16 bits has about 2e-4 in f16 and 2e-3 "
        "in bf16." + _wall(rows),
        sums(rows),
        _folded("All cases", details(result)),
        _failures(rows),
    ]


def _wall(rows: Sequence[Result]) -> str:
    walled = dict.fromkeys(f"{r['group']} {r['op']}" for r in rows if r.get("clock") == "wall")
    if not walled:
        return ""
    why = "since memsets and copies count there, of which kernel times know nothing"
    return f" Timed by the wall, {why}: {'; '.join(walled)}."


def sums(rows: Sequence[Result]) -> str:
    """A row a sum; for each dtype what determinism costs, and in 16 bits the errors of all."""
    rows = [row for row in rows if "rms_error" in row.get("ours", {})]
    if not rows:
        return ""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    whose = ["ours", *(name for name in ("jnp", "torch") if name in _rivals(rows))]
    head = ["", ""]
    for dtype in dtypes:
        head.append(f"{short(dtype)} deterministic")
        head += [f"error, {name}" for name in whose if dtype != "float32"]
    lines = [head]
    for op, group in dict.fromkeys((row["op"], row["group"]) for row in rows):
        line = [op, group]
        for dtype in dtypes:
            found = next((r for r in rows if _has(op=op, group=group, dtype=dtype)(r)), None)
            known = {"ours": found["ours"], **found["rivals"]} if found else {}
            line.append(_times(_ratios([found] if found else [], "deterministic")))
            errors = [known.get(name, {}).get("rms_error") for name in whose]
            line += ["-" if e is None else f"{e:.1e}" for e in errors if dtype != "float32"]
        lines.append(line)
    return _markdown(lines)


# ---- the atomics of an article ----

# Milliseconds of 32M elements; the article does not name its chip.
_ARTICLE_ATOMICS_MS = {"half": 422.36, "half2": 137.02, "FastAtomicAdd": 137.01}
_ARTICLE_ATOMICS = "32M elements"


def _atomics(result: Result) -> list[str]:
    """The forms at each number of elements, the article's claims, and what took too long."""
    rows = [row for row in result["rows"] if "error" not in row]
    return [atomics(rows), atomic_verdicts(rows), _failures(result["rows"])]


def atomics(rows: Sequence[Result]) -> str:
    """A row a form, with the article's figures beside ours."""
    article = ["article: ms", "half over it"]
    lines = [["form", "us", "GB/s", "relative error", "half over it", *article]]
    for row in rows:
        lines.append([f"**{row['variant']}**", *[""] * (len(lines[0]) - 1)])
        half = row["rivals"].get("half", {}).get("us")
        theirs = _ARTICLE_ATOMICS_MS if row["variant"] == _ARTICLE_ATOMICS else {}
        for name, known in {**row["rivals"], "segment_sum of the products": row["ours"]}.items():
            if "us" not in known:
                lines.append([name, "not run", *["-"] * (len(lines[0]) - 2)])
                continue
            lines.append(
                [
                    name,
                    f"{known['us']:,.1f}",
                    f"{known['tb_per_s'] * 1e3:.4g}",
                    f"{known['relative_error']:.1e}",
                    f"{half / known['us']:,.2f}x" if half else "-",
                    f"{theirs[name]:.2f}" if name in theirs else "-",
                    f"{theirs['half'] / theirs[name]:.2f}x" if name in theirs else "-",
                ]
            )
    return _markdown(lines)


def atomic_verdicts(rows: Sequence[Result]) -> str:
    """The article's claims, as each number of elements has them."""
    lines = []
    for row in rows:
        timed = {name: x["us"] for name, x in row["rivals"].items() if "us" in x}
        for claim, slow, fast in (
            ("a padded half beats a half", "half", "FastAtomicAdd"),
            ("a padded half is as fast as a pair", "half2", "FastAtomicAdd"),
        ):
            if slow not in timed or fast not in timed:
                continue
            here = timed[slow] / timed[fast]
            article = _ARTICLE_ATOMICS_MS[slow] / _ARTICLE_ATOMICS_MS[fast]
            holds = here > 1.05 if slow == "half" else here > 0.95
            lines.append(
                f"- {claim}, {row['variant']}: **{'holds' if holds else 'does not hold'}**, "
                f"{here:,.2f}x here, {article:.2f}x in the article"
            )
    return "\n".join(lines)


# ---- permute ----

# PyTorch's time over OneFlow's on an A100, the least and the most that the article gives, by axes.
_ARTICLE_PERMUTE: list[tuple[str, tuple[str, ...], float | None, float]] = [
    ("(1, 0, 2)", ("float32", "float16"), 1.24, 1.4),
    ("(0, 2, 1)", ("float32",), 3.0, 3.2),
    ("(0, 2, 1)", ("float16",), None, 6.3),
]


def _permute(result: Result) -> list[str]:
    """Means of what moves; a row a permutation; the article's figures; the rest folded."""
    rows = result["rows"]
    table = [{**row, "group": row["variant"], "variant": ""} for row in _of(rows, "table")]
    together = [{**row, "group": "all"} for row in table]
    dtypes = dict.fromkeys(row["dtype"] for row in table)
    return [
        summary({**result, "rows": [*together, *table]}),
        f"{_CELL[0].upper()}{_CELL[1:]}:",
        matrix(table, {short(dtype): _has(dtype=dtype) for dtype in dtypes}),
        _folded("All cases", details({**result, "rows": [_with_plan(row) for row in table]})),
        article_permutes(_of(rows, "article")),
        permute_verdicts(_of(rows, "article")),
        _failures(rows),
    ]


def _of(rows: Sequence[Result], group: str) -> list[Result]:
    return [row for row in rows if row["group"] == group]


def _with_plan(row: Result) -> Result:
    """What ran, with the strategy and the bytes that move together."""
    if "error" in row:
        return row
    plan = "{strategy}, {unit_bytes} B".format(**row["ours"])
    return {**row, "implementation": f"{row['implementation']}: {plan}"}


def article_permutes(rows: Sequence[Result]) -> str:
    """A row a case: microseconds of all, and ours against the others."""
    rows = [row for row in rows if "error" not in row]
    if not rows:
        return ""
    rivals = _rivals(rows)
    over = [name for name in ("naive", "torch") if name in rivals]
    head = ["article", "", *rivals, "ours", "copy", *(f"ours over {name}" for name in over)]
    lines = [[*head, "of copy"]]
    for row in rows:
        timed = [row["rivals"].get(name, {}) for name in rivals]
        timed += [row["ours"], row["ceilings"].get("copy", {})]
        lines.append(
            [
                row["op"],
                f"{short(row['dtype'])}, {size(row['bytes'] // 2)}",
                *(f"{x['us']:.1f} us" if "us" in x else "-" for x in timed),
                *(_times(_ratios([row], name)) for name in over),
                _percent([row["of_copy"]] if "of_copy" in row else []),
            ]
        )
    return _markdown(lines)


def permute_verdicts(rows: Sequence[Result]) -> str:
    """The article's gains over PyTorch, as these measurements have them."""
    lines = []
    for axes, dtypes, least, most in _ARTICLE_PERMUTE:
        found = [r for r in rows if r["variant"] == axes and r["dtype"] in dtypes]
        if not (ratios := _ratios(found, "torch")):
            continue
        low, high = min(ratios), max(ratios)
        holds = low >= least if least else high >= most
        claim = f"{least:.2f}x to {most:.2f}x" if least else f"up to {most:.2f}x"
        lines.append(
            f"- {axes} in {' and '.join(map(short, dtypes))} is {claim} as fast as PyTorch's on an "
            f"A100: **{'holds' if holds else 'does not hold'}**, {low:.2f}x to {high:.2f}x here"
        )
    if shares := [row["of_copy"] for row in rows if "of_copy" in row]:
        most = max(shares)
        lines.append(
            f"- as fast as a copy, or nearly, in most cases: {min(shares):.0%} to {most:.0%} here"
        )
    return "\n".join(lines)


# ---- kernels of users ----


def _kernels(result: Result) -> list[str]:
    """Means, and a row an expression and dtype."""
    together = [{**row, "group": "all", "variant": ""} for row in result["rows"]]
    return [
        summary({**result, "rows": together}),
        expressions(result["rows"]),
        _failures(result["rows"]),
    ]


def expressions(rows: Sequence[Result]) -> str:
    """Microseconds, the share of a copy, and the ratio to every rival."""
    rows = [row for row in rows if "error" not in row]
    rivals = _rivals(rows)
    head = ["expression", "of each array", "dtype", "us", "of copy", *rivals]
    lines = [
        [
            f"`{row['op']}`",
            row["variant"],
            short(row["dtype"]),
            f"{row['ours']['us']:.1f}",
            _percent([row["of_copy"]] if "of_copy" in row else []),
            *(_times(_ratios([row], rival)) for rival in rivals),
        ]
        for row in rows
    ]
    return _markdown([head, *lines])


# ---- training, by the examples ----


def training(result: Result) -> str:
    """A row a division over devices: losses and throughput there and on one device."""
    one, *runs = result["runs"]
    unit = f"{result['unit']}/s"
    head = ["", "devices", "losses on one", "losses", f"{unit} on one", unit, "", "collectives"]
    lines = [
        [
            run["variant"],
            str(run["devices"]),
            *(f"{x['losses'][0]:.4f} to {x['losses'][-1]:.4f}" for x in (one, run)),
            *(f"{x['rate']:,.0f}" for x in (one, run)),
            f"{run['rate'] / one['rate']:.2f}x",
            communication(run["collectives"]),
        ]
        for run in runs
    ]
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    about = origin(result["environment"], "wall time of a step")
    return (
        f"{about} {settings.capitalize()}. Losses of the first and the last step.\n\n"
        f"{_markdown([head, *lines])}"
    )


def communication(collectives: dict[str, list[int]]) -> str:
    """How many there are of each kind, and the megabytes that they make together."""
    texts = (f"{len(s)} {kind}, {sum(s) / 1e6:,.2f} MB" for kind, s in collectives.items())
    return "; ".join(texts) or "none"


def origin(about: dict[str, Any], clock: str) -> str:
    """The device, the versions, the clock, the date and the commit."""
    versions = about["versions"]
    commit = (about["commit"] or "unknown")[:10] + (" with changes" if about["dirty"] else "")
    facts = [about["device"]]
    facts += [f"driver {about['driver']}" if about["driver"] else f"{about['cpu']['cores']} cores"]
    facts += [f"{name} {versions[name]}" for name in ("jax", "torch") if versions.get(name)]
    return f"{', '.join(facts)}; {clock}, medians; {about['date'][:10]}, commit {commit}."


def provenance(result: Result) -> str:
    """Where the numbers come from and how to read them."""
    clock = {"cupti": "device time of the kernels (CUPTI)", "wall": "wall time"}[result["clock"]]
    notes = "".join(f" Note: {note}." for note in result["notes"])
    return (
        f"{origin(result['environment'], clock)} "
        f"Ratios are the rival's time over ours: above 1, ours is faster. "
        f"The copy is {result['ceiling']}, moving as many bytes.{notes}"
    )


def summary(result: Result) -> str:
    """Geometric means over the cases of each group, variant and dtype."""
    rows = [row for row in result["rows"] if "error" not in row]
    rivals = [name for name in _rivals(rows) if name not in _OWN_TABLES]
    lines = [["", "", "dtype", "cases", "best jnp", "worst case", *rivals, "of copy"]]
    keys = [(row["group"], row["variant"], row["dtype"]) for row in rows]
    for key in dict.fromkeys(keys):
        members = [row for row, k in zip(rows, keys, strict=True) if k == key]
        ratios = [row["ratio"] for row in members if "ratio" in row]
        lines.append(
            [
                *key,
                str(len(members)),
                f"**{_times(ratios)}**",
                f"{min(ratios):.2f}x" if ratios else "-",
                *(_times(_ratios(members, rival)) for rival in rivals),
                _percent([row["of_copy"] for row in members if "of_copy" in row]),
            ]
        )
    return _markdown(lines)


def details(result: Result) -> str:
    """A line for every case."""
    unit, scale = rate_unit(result["environment"]["platform"])
    rivals = _rivals(result["rows"])
    lines = [["case", "ran", "us", unit, "of copy", "best jnp", *rivals]]
    for row in result["rows"]:
        if "error" in row:
            lines.append([row["case"], f"error: {row['error']}"])
            continue
        lines.append(
            [
                row["case"],
                row["implementation"],
                f"{row['ours']['us']:.1f}",
                f"{row['ours']['tb_per_s'] * scale:.2f}",
                _percent([row["of_copy"]] if "of_copy" in row else []),
                _times([row["ratio"]] if "ratio" in row else []),
                *(_times(_ratios([row], rival)) for rival in rivals),
            ]
        )
    return _markdown(lines)


def rate_unit(platform: str) -> tuple[str, float]:
    """The unit that rates are shown in, and how many of it a TB/s has."""
    return ("GB/s", 1e3) if platform == "cpu" else ("TB/s", 1.0)


def _rivals(rows: Iterable[Result]) -> list[str]:
    """In their order; PyTorch last."""
    names = dict.fromkeys(name for row in rows for name in row["rivals"])
    return sorted(names, key=lambda name: name == "torch")


def _ratios(rows: Iterable[Result], rival: str) -> list[float]:
    known = (row["rivals"].get(rival, {}).get("ratio") for row in rows)
    return [ratio for ratio in known if ratio is not None]


def _times(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}x" if ratios else "-"


def _percent(shares: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(shares):.0%}" if shares else "-"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])
