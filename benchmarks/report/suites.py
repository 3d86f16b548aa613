"""The tables of every suite, a page each in ``docs/benchmarks``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cases import SWEEP, short
from .markdown import (
    SLOWER,
    SLOWER_NOTE,
    bullets,
    folded,
    microseconds,
    percent,
    rate_unit,
    table,
    times,
)
from .rows import (
    Result,
    Row,
    best,
    by,
    having,
    is_slower,
    main_rows,
    measured,
    of_copy,
    ratios,
    rivals,
)

_OWN_TABLES = ("naive", "1 element", "deterministic")  # rivals that the geometric means leave out
_CELL = "The best jnp formulation's time over ours, and the share of a copy's bandwidth"


@dataclass(frozen=True)
class Suite:
    """A page: its title, what is measured, and the tables of a result."""

    title: str
    about: str
    tables: Callable[[Result], list[str]]


# ---- what several suites have ----


def _any(result: Result) -> list[str]:
    """Geometric means, and all rows folded away."""
    return [summary(main_rows(result)), _all_cases(result)]


def summary(rows: Sequence[Row]) -> str:
    """Geometric means over the cases of each group, variant and dtype."""
    rows = measured(rows)
    names = [name for name in rivals(rows) if name not in _OWN_TABLES]
    lines = [["", "", "dtype", "cases", "best jnp", "worst case", *names, "of copy"]]
    for key, members in by(rows, lambda row: (row["group"], row["variant"], row["dtype"])).items():
        lines.append(
            [
                *key,
                str(len(members)),
                f"**{times(best(members))}**",
                times([min(best(members))]) if best(members) else "-",
                *(times(ratios(members, name)) for name in names),
                percent(of_copy(members)),
            ]
        )
    return table(lines)


def _together(rows: Sequence[Row]) -> list[Row]:
    """The rows as one group, for a summary by dtype."""
    return [{**row, "group": "all", "variant": ""} for row in rows]


def _all_cases(result: Result) -> str:
    return folded("All cases", details(main_rows(result), result["environment"]["platform"]))


def details(rows: Sequence[Row], platform: str) -> str:
    """A line for every case."""
    unit, scale = rate_unit(platform)
    names = rivals(rows)
    lines = [["case", "ran", "us", unit, "of copy", "best jnp", *names]]
    for row in rows:
        if "error" in row:
            lines.append([row["case"], f"error: {row['error']}"])
            continue
        lines.append(
            [
                row["case"],
                row["implementation"],
                f"{row['ours']['us']:.1f}",
                f"{row['ours']['tb_per_s'] * scale:.2f}",
                percent(of_copy([row])),
                times(best([row])) + (f" {SLOWER}" if is_slower(row) else ""),
                *(times(ratios([row], name)) for name in names),
            ]
        )
    return table(lines)


def slower(rows: Sequence[Row]) -> str:
    """Every case that XLA is faster at, and by how much."""
    rows = measured(rows)
    if not any(best([row]) for row in rows):
        return ""
    lost = sorted(filter(is_slower, rows), key=lambda row: row["ratio"])
    said = (
        "Ours is slower than the best jnp formulation, by more than the spread of the samples, in "
        f"{len(lost)} of {len(rows)} cases."
    )
    cases = bullets([f"{row['case']}: {row['best']}, {times([row['ratio']])}" for row in lost])
    return f"{said}\n\n{folded('Which', cases)}" if lost else said


def sweeps(result: Result) -> str:
    """Through the sizes: microseconds of ours, of the rivals and of a single element."""
    rows = [row for row in measured(result["rows"]) if row["group"] == SWEEP]
    if not rows:
        return ""
    unit, scale = rate_unit(result["environment"]["platform"])
    names = sorted(rivals(rows), key=lambda name: name != "1 element")
    lines = [["", "array", "dtype", f"ours, {unit}", "of copy", "ours, us", *names]]
    for row in rows:
        known = [row["ours"], *(row["rivals"].get(name, {}) for name in names)]
        lines.append(
            [
                row["op"],
                row["variant"],
                short(row["dtype"]),
                f"{row['ours']['tb_per_s'] * scale:.3g}",
                percent(of_copy([row])),
                *(microseconds(x.get("us")) for x in known),
            ]
        )
    about = "Microseconds of ours and of the rivals"
    about += "; those of one element are what a launch costs." if "1 element" in names else "."
    return f"{about}\n\n{table(lines)}"


def matrix(rows: Sequence[Row], column: Callable[[Row], str]) -> str:
    """A row an op, a column what ``column`` says; where ours is slower is marked."""
    columns = by(rows, column)
    lines = [["", *columns]]
    for op in by(rows, lambda row: row["op"]):
        found = [having(members, op=op) for members in columns.values()]
        cells = [_cell(rows[0]) if rows else "" for rows in found]
        lines.append([f"{op} {SLOWER}" if any(SLOWER in cell for cell in cells) else op, *cells])
    text = table(lines)
    return f"{text}\n\n{SLOWER_NOTE}" if SLOWER in text else text


def _cell(row: Row) -> str:
    if "error" in row:
        return "error"
    words = [times(best([row])), *([percent(of_copy([row]))] if "of_copy" in row else [])]
    words += [SLOWER] if is_slower(row) else []
    if row["implementation"] != "native":
        words.append(f"({row['implementation']})")
    return " ".join(words)


def op_details(rows: Sequence[Row]) -> str:
    """A row an op and group; for each dtype the ratios and the share of a copy."""
    dtypes = by(rows, lambda row: row["dtype"])
    has_torch = bool(ratios(measured(rows), "torch"))
    shown = ["best jnp", *(["torch"] if has_torch else []), "of copy"]
    lines = [["", "", *(word for d in dtypes for word in (f"{short(d)} us", *shown))]]
    for op, group in by(rows, lambda row: (row["op"], row["group"])):
        cells: list[str] = []
        for members in dtypes.values():
            found = having(members, op=op, group=group)
            if not found or "error" in found[0]:
                cells += ["error" if found else "", *[""] * len(shown)]
                continue
            (row,) = found
            cells += [f"{row['ours']['us']:.1f}", times(best(found))]
            cells += [times(ratios(found, "torch"))] if has_torch else []
            cells.append(percent(of_copy(found)))
        lines.append([op, group, *cells])
    return table(lines)


# ---- elementwise and casts ----


def _elementwise(result: Result) -> list[str]:
    """Geometric means; a row an op, at the largest arrays; the rest folded away."""
    rows = main_rows(result)
    sizes = by(rows, lambda row: row["variant"])
    first, largest = next(iter(sizes.items()))
    return [
        summary(rows),
        f"{_CELL}, at {first}:",
        matrix(largest, lambda row: f"{row['group']} {short(row['dtype'])}"),
        *(folded(f"Every op at {size}", op_details(members)) for size, members in sizes.items()),
        _libraries(measured(rows)),
    ]


def _libraries(rows: Sequence[Row]) -> str:
    """The cases that have rivals beside jnp's formulations and PyTorch's eager mode."""
    own = {*_OWN_TABLES, "torch"}.union(*(row["jnp"] for row in rows))
    names = [name for name in rivals(rows) if name not in own]
    lines = [["case", "ours, us", *names]]
    for row in rows:
        cells = [times(ratios([row], name)) for name in names]
        if {*cells} != {"-"} and cells:
            lines.append([row["case"], f"{row['ours']['us']:.1f}", *cells])
    return folded("Other libraries", table(lines)) if names else ""


def _cast(result: Result) -> list[str]:
    """Geometric means, and a row a pair of dtypes."""
    rows = main_rows(result)
    return [
        summary(rows),
        f"{_CELL}:",
        matrix(rows, lambda row: str(row["variant"])),
        _all_cases(result),
    ]


# ---- sums of rows ----


def _scatter(result: Result) -> list[str]:
    """Means; a row a problem; what determinism costs and what 16 bits lose; the rest folded."""
    rows = main_rows(result)
    return [
        summary(_together(rows)),
        op_details(rows),
        sums(measured(rows)),
        _all_cases(result),
    ]


def _wall(rows: Sequence[Row]) -> str:
    walled = dict.fromkeys(f"{r['group']} {r['op']}" for r in rows if r.get("clock") == "wall")
    if not walled:
        return ""
    why = "since memsets and copies count there, of which kernel times know nothing"
    return f" Timed by the wall, {why}: {'; '.join(walled)}."


def sums(rows: Sequence[Row]) -> str:
    """A row a sum; for each dtype what determinism costs, and in 16 bits the errors of all."""
    rows = [row for row in rows if "rms_error" in row["ours"]]
    if not rows:
        return ""
    about = (
        "deterministic: its time over that of the default. Errors: root mean square, over that of "
        "the sums in float64; a sum that is rounded once to 16 bits has about 2e-4 in f16 and 2e-3 "
        "in bf16." + _wall(rows)
    )
    whose = ["ours", *(name for name in ("jnp", "torch") if name in rivals(rows))]
    dtypes = by(rows, lambda row: row["dtype"])
    head = ["", ""]
    for dtype in dtypes:
        head.append(f"{short(dtype)} deterministic")
        head += [f"error, {name}" for name in whose if dtype != "float32"]
    lines = [head]
    for op, group in by(rows, lambda row: (row["op"], row["group"])):
        line = [op, group]
        for dtype, members in dtypes.items():
            found = having(members, op=op, group=group)
            known = {"ours": found[0]["ours"], **found[0]["rivals"]} if found else {}
            line.append(times(ratios(found, "deterministic")))
            errors = [known.get(name, {}).get("rms_error") for name in whose]
            line += ["-" if e is None else f"{e:.1e}" for e in errors if dtype != "float32"]
        lines.append(line)
    return f"{about}\n\n{table(lines)}"


# ---- kernels of articles ----


def _ladder(result: Result) -> list[str]:
    """A row a kernel."""
    errors = (
        "Errors are against float64; those in ulp leave the tail out in f32, where "
        "|f(x)| < |x| / 1024. Requests and sectors are those of global loads."
    )
    head = ["kernel", "us", "TB/s", "of copy", "error, ulp", "error", "load, store bits"]
    lines = [[*head, "requests", "sectors"]]
    for row in measured(main_rows(result)):
        lines.append([f"**{short(row['dtype'])}, {row['variant']}**"])
        copy = row["ceilings"].get("copy", {}).get("us")
        kernels = {k: v for k, v in row["rivals"].items() if k not in (*row["jnp"], "torch")}
        kernels["ours, in JAX"] = row["ours"]
        for name, known in {**kernels, **row["rivals"]}.items():
            if "us" not in known:
                continue
            bits = [str(known[k]) for k in ("load_bits", "store_bits") if k in known]
            counts = [known.get(k) for k in ("requests", "sectors")]
            lines.append(
                [
                    name,
                    f"{known['us']:.2f}",
                    f"{known['tb_per_s']:.2f}",
                    percent([copy / known["us"]] if copy else []),
                    f"{known['max_ulp']:,.1f}" if "max_ulp" in known else "-",
                    f"{known['max_error']:.1e}" if "max_error" in known else "-",
                    ", ".join(bits) or "-",
                    *("-" if count is None else f"{count:,}" for count in counts),
                ]
            )
    return [errors, table(lines)]


def _atomics(result: Result) -> list[str]:
    """A row a form, at each number of elements."""
    lines = [["form", "us", "GB/s", "relative error", "half over it"]]
    for row in measured(main_rows(result)):
        lines.append([f"**{row['variant']}**"])
        half = row["rivals"].get("half", {}).get("us")
        for name, known in {**row["rivals"], "segment_sum of the products": row["ours"]}.items():
            if "us" not in known:
                lines.append([name, "not run", *["-"] * (len(lines[0]) - 2)])
                continue
            lines.append(
                [
                    name,
                    f"{known['us']:,.1f}",
                    f"{known['tb_per_s'] * 1e3:.4g}",
                    f"{known['relative_error']:.1e}" if "relative_error" in known else "-",
                    times([half / known["us"]] if half else []),
                ]
            )
    return [table(lines)]


# ---- permutations ----


def _permute(result: Result) -> list[str]:
    """Means of what moves; a row a permutation; the rest folded."""
    rows = having(main_rows(result), group="table")
    kinds = [{**row, "group": row["variant"], "variant": ""} for row in rows]
    return [
        summary([*_together(rows), *kinds]),
        f"{_CELL}:",
        matrix(rows, lambda row: short(row["dtype"])),
        _all_cases({**result, "rows": [_with_plan(row) for row in rows]}),
    ]


def _with_plan(row: Row) -> Row:
    """What ran, with the strategy and the bytes that move together."""
    if "error" in row:
        return row
    plan = "{strategy}, {unit_bytes} B".format(**row["ours"])
    return {**row, "implementation": f"{row['implementation']}: {plan}"}


# ---- kernels of users ----


def _kernels(result: Result) -> list[str]:
    """Means, and a row an expression and dtype."""
    rows = measured(main_rows(result))
    names = rivals(rows)
    lines = [["expression", "of each array", "dtype", "us", "of copy", *names]]
    lines += [
        [
            f"`{row['op']}`",
            row["variant"],
            short(row["dtype"]),
            f"{row['ours']['us']:.1f}",
            percent(of_copy([row])),
            *(times(ratios([row], name)) for name in names),
        ]
        for row in rows
    ]
    return [summary(_together(rows)), table(lines)]


# ---- whole models ----


def _models(result: Result) -> list[str]:
    """A row a model and dtype: the steps' times and losses; each op by itself; the programs."""
    rows = measured(result["rows"])
    names = [name for name in rivals(rows) if not name.startswith(_ONLY)]
    head = ["model", "", "dtype", "native, us", *(f"{name}, us" for name in names)]
    lines = [[*head, *(f"{name} over native" for name in names), "losses, native", "losses, xla"]]
    for row in rows:
        losses = row.get("losses", {})
        over = [times(ratios([row], name)) for name in names]
        lines.append(
            [
                f"{row['op']} {SLOWER}" if is_slower(row) else row["op"],
                row["variant"],
                short(row["dtype"]),
                microseconds(row["ours"]["us"]),
                *(microseconds(row["rivals"].get(name, {}).get("us")) for name in names),
                *over,
                *(_from_to(losses.get(which, [])) for which in ("native", "xla")),
            ]
        )
    text = table(lines)
    return [
        f"{text}\n\n{SLOWER_NOTE}" if SLOWER in text else text,
        _one_op(rows),
        _programs(rows),
    ]


_ONLY = "only "  # the rivals that have one native op


def _one_op(rows: Sequence[Row]) -> str:
    """What each op is worth by itself: the steps that have it alone as a native kernel."""
    lines = [["model", "the native op", "us", "XLA over it", "it over all native"]]
    for row in rows:
        xla = row["rivals"].get("xla", {}).get("us")
        for name, known in row["rivals"].items():
            if name.startswith(_ONLY) and "us" in known:
                lines.append(
                    [
                        row["op"],
                        f"`{name.removeprefix(_ONLY)}`",
                        microseconds(known["us"]),
                        times([xla / known["us"]] if xla else []),
                        times([known["ratio"]]),
                    ]
                )
    about = "One native op at a time, the others by XLA: which one gains, and which one loses."
    return f"{about}\n\n{table(lines)}" if len(lines) > 1 else ""


def _programs(rows: Sequence[Row]) -> str:
    """What the compiled steps run."""
    counts = {"library call": "of libraries", "fusion": "fusions", "copy": "copies"}
    counts |= {"transpose": "transposes"}
    lines = [
        ["model", "step", "kernels of ours", *counts.values(), "GB moved by all but libraries"]
    ]
    for row in rows:
        for name, known in row.get("program", {}).items():
            calls = ", ".join(f"{count} {call}" for call, count in known["calls"].items())
            moved = f"{known['bytes'] / 1e9:.2f}"
            lines.append([row["op"], name, calls or "-", *(str(known[k]) for k in counts), moved])
    return folded("What is in the compiled steps", table(lines)) if len(lines) > 1 else ""


def _from_to(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "-"


SUITES = {
    "elementwise": Suite(
        "Elementwise operations",
        "Each op and its pullback alone, on arrays of one dtype and shape. `jnp` is the function "
        "that the op replaces, `jnp f32` the same with 16-bit inputs widened by hand.",
        _elementwise,
    ),
    "cast": Suite(
        "Casts",
        "`cast` beside `astype`, both directions of each pair of dtypes.",
        _cast,
    ),
    "upsample": Suite(
        "Nearest-neighbour upsampling",
        "`resize` is `jax.image.resize`, `repeat` is `jnp.repeat` twice, `broadcast` is "
        "`broadcast_to` and a reshape; backward rows time the transposes.",
        _any,
    ),
    "permute": Suite(
        "Permutations",
        "`permute` beside `jnp.transpose` and PyTorch's `permute(...).contiguous()`: whole rows "
        "that change places, transposes, images between NCHW and NHWC, and other orders. "
        "`python -m benchmarks --suite permute --explain` prints how each case is carried out.",
        _permute,
    ),
    "scatter": Suite(
        "Sums and lookups of rows",
        "`segment_sum`, `scatter_add`, `embedding_lookup` and its gradient. `deterministic` is "
        "ours with `deterministic=True`: what the same bits on every run cost. `jnp f32` widens "
        "16-bit inputs by hand. On CPUs, for integers, for sorted ids, and for rows of 32 bytes or "
        "more in problems of megabytes sums have a fixed order anyway.",
        _scatter,
    ),
    "kernels": Suite(
        "Kernels from an expression",
        "`ElementwiseKernel` beside the same expression in jnp. `built-in` is the package's own "
        "op.",
        _kernels,
    ),
    "models": Suite(
        "Whole models",
        "Training steps of small models, those of `examples`: with native kernels, with `xla`, "
        "which is `JAX_ONEFLOW_OPS_IMPLEMENTATION=xla`, and in `jnp` as one would write it without "
        "this package. XLA does not fuse a custom call with what is around it; this is what is "
        "left of the gains of single calls. Times are those of the wall, launches included. Losses "
        "are those of the first and the last step.",
        _models,
    ),
    "gelu_ladder": Suite(
        "The gelu ladder",
        "One gelu, from one f32 element a thread to four pairs of half a thread: the steps of "
        "[an article](../articles.md), beside this package's kernel.",
        _ladder,
    ),
    "atomic_add": Suite(
        "Atomic additions in 16 bits",
        "The inner product of [an article](../articles.md) by atomics, all threads adding to one "
        "value: half by half, packed in pairs, and by `FastAtomicAdd`, which pairs a half with "
        "a -0.",
        _atomics,
    ),
}
"""The suites' pages, in the order of the index."""


def tables(result: Result) -> list[str]:
    """The tables of a result's suite."""
    suite = SUITES.get(result["suite"])
    return (suite.tables if suite else _any)(result)
