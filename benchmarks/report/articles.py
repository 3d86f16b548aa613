"""``docs/articles.md``: what the articles measured and claim, beside the same here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import articles as said
from ..cases import UpsampleCase, short, size
from .markdown import joined, microseconds, percent, table, times
from .provenance import chip
from .rows import Result, Row, by, having, measured, of_copy, ratios

HOLDS, FAILS, EQUAL = "holds", "does not hold", "no difference here"
HOLDS_BY_LESS = "holds, by less than there"


class Claim(NamedTuple):
    """What an article claims, its figure, ours, and what follows."""

    text: str
    there: str
    here: str
    verdict: str


class Section(NamedTuple):
    """The tables and claims of one article on one of our devices."""

    claims: list[Claim]
    tables: list[str]


def page(results: Sequence[Result]) -> str:
    """All claims in one table, then each article's figures beside ours."""
    devices = by([r for r in results if "rows" in r], lambda r: chip(r["environment"]))
    summary = [["article", "claim", "there", "device here", "here", "verdict"]]
    parts = []
    for number, (article, make) in enumerate(_SECTIONS.items(), 1):
        parts += [f"## {number}. {_capitalized(article.english)}", _ABOUT[article]]
        for device, found in devices.items():
            section = make({r["suite"]: measured(r["rows"]) for r in found})
            if not section.tables:
                continue
            summary += [
                [str(number), c.text, c.there, device, c.here, f"**{c.verdict}**"]
                for c in section.claims
            ]
            parts += [f"### On {device}", *section.tables]
    sources = [f"{number}. {article.source}" for number, article in enumerate(_SECTIONS, 1)]
    return joined(
        [
            "# The articles' claims, checked",
            _INTRODUCTION,
            "\n".join(sources),
            table(summary) if len(summary) > 1 else "",
            *parts,
        ]
    )


_INTRODUCTION = (
    "The techniques of this package are those of four articles. Here are the figures that they "
    "give, with the chips that they were measured on, beside the same measurement on the devices "
    "of [the benchmarks](benchmarks/index.md), and whether what they claim holds there. A newer "
    "chip is faster, and PyTorch has learned since: read ratios, not times."
)
_ABOUT = {
    said.ELEMENTWISE: (
        f"On an {said.ELEMENTWISE.chip} the template casts f32 to f16 at nearly the bandwidth of "
        "memory, and is 80 to 90% faster than PyTorch at all shapes. The figures themselves are in "
        "a chart that its text does not have."
    ),
    said.LADDER: (
        f"Steps from one f32 element a thread to four pairs of f16, on an {said.LADDER.chip}, on "
        "16M elements. Times are of the kernel; requests and sectors are those of its global "
        "loads."
    ),
    said.NOTES: (
        f"Three techniques. The product of two arrays, on an {said.MULTIPLY_CHIP}; the inner "
        "product of f16 vectors by atomic additions to one address, on "
        f"{said.ATOMICS_CHIP}; twofold upsampling of (16, 32, 80, 80), on an {said.NOTES.chip}."
    ),
    said.PERMUTE: (
        f"Both scenes, on an {said.PERMUTE.chip}: (0, 1, 2) to (1, 0, 2), where the last axis "
        "stays and whole rows move, and (0, 2, 1), which is a transpose. Its charts are not in its "
        "text, which gives the sizes and the range of the gains; the shapes here are a guess. "
        "`naive` is the kernel that it starts from, one element a thread, with indices of 64 and "
        "of 32 bits."
    ),
}


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _theirs(us: float | None) -> str:
    """An article's figure, as it gives it."""
    return "-" if us is None else f"{us:.2f}"


def _verdict(ratio: float, noise: float) -> str:
    """Whether what should be slower is, by more than the noise and more than 1%."""
    margin = max(noise, 0.01)
    return EQUAL if abs(ratio - 1) <= margin else HOLDS if ratio > 1 else FAILS


def _of_gains(gains: Sequence[float], as_much: bool) -> str:
    """Whether ours is faster in all cases, and whether by as much as an article's was."""
    if max(gains) < 1.05:
        return EQUAL if min(gains) > 0.95 else FAILS
    return HOLDS if as_much else HOLDS_BY_LESS if min(gains) > 1 else FAILS


def _noise(slow: Row, fast: Row) -> float:
    return float(max(slow["iqr_us"], fast["iqr_us"]) / fast["us"])


def _range(values: Sequence[float]) -> str:
    low, high = times([min(values)]), times([max(values)])
    return low if low == high else f"{low} to {high}"


# ---- the elementwise template: cast ----


def _cast(suites: dict[str, list[Row]]) -> Section:
    rows = [row for row in suites.get("cast", []) if row["op"] == "f32 to f16"]
    rows = [row for row in rows if "us" in row["rivals"].get("torch", {})]
    lines = [["f32 to f16", "PyTorch, us", "ours, us", "PyTorch over ours", "of copy", "article"]]
    low, high = said.CAST_GAIN
    there = f"{low:.2f}x to {high:.2f}x"
    lines += [
        [
            row["variant"],
            microseconds(row["rivals"]["torch"]["us"]),
            microseconds(row["ours"]["us"]),
            times(ratios([row], "torch")),
            percent(of_copy([row])),
            there,
        ]
        for row in rows
    ]
    if not rows:
        return Section([], [])
    gains, shares = ratios(rows, "torch"), of_copy(rows)
    claims = [
        Claim(
            "the cast of f32 to f16 beats PyTorch's",
            there,
            _range(gains),
            _of_gains(gains, min(gains) >= low),
        )
    ]
    if shares:
        verdict = HOLDS if min(shares) >= 0.9 else FAILS
        claims.append(
            Claim("it runs at the bandwidth of memory", "nearly", percent(shares), verdict)
        )
    return Section(claims, [table(lines)])


# ---- the gelu ladder ----


def _ladder(suites: dict[str, list[Row]]) -> Section:
    rows = [r for r in suites.get("gelu_ladder", []) if r["variant"].startswith(said.LADDER_SIZE)]
    timed = {
        (row["dtype"], name): {**known, "copy": row["ceilings"].get("copy", {}).get("us")}
        for row in rows
        for name, known in {**row["rivals"], "ours": row["ours"]}.items()
        if "us" in known
    }
    head = ["kernel", "dtype", "article: us", "us", "of copy", "article: requests", "requests"]
    lines = [[*head, "article: sectors", "sectors"]]
    for (dtype, name), known in timed.items():
        if name not in (*said.LADDER_US, "ours"):
            continue
        requests = said.LADDER_REQUESTS.get(name)
        counts = [requests, known.get("requests")]
        counts += [said.LADDER_SECTORS if requests else None, known.get("sectors")]
        us = said.LADDER_US.get(name)
        lines.append(
            [
                name,
                short(dtype),
                _theirs(us),
                microseconds(known["us"]),
                percent([known["copy"] / known["us"]] if known["copy"] else []),
                *("-" if count is None else f"{count:,}" for count in counts),
            ]
        )
    return Section(list(_ladder_claims(timed)), [table(lines)] if rows else [])


def _ladder_claims(timed: dict[tuple[str, str], Row]) -> Iterator[Claim]:
    f32, f16 = "float32", "float16"
    for text, slow, fast in (
        ("two f32 a thread beat one", (f32, "scalar"), (f32, "vec2")),
        ("four f32 a thread beat one", (f32, "scalar"), (f32, "vec4")),
        ("half2 beats f32", (f32, "scalar"), (f16, "half2")),
        ("four half2 a thread beat one", (f16, "half2"), (f16, "vec4 half2")),
        ("CuTe is as fast as four half2 by hand", (f16, "vec4 half2"), (f16, "cute")),
    ):
        if slow not in timed or fast not in timed:
            continue
        here = timed[slow]["us"] / timed[fast]["us"]
        there = said.LADDER_US[slow[1]] / said.LADDER_US[fast[1]]
        verdict = _verdict(here, _noise(timed[slow], timed[fast]))
        if fast[1] == "cute":  # which claims to be equal, not to be faster
            verdict = FAILS if verdict == FAILS else HOLDS
        yield Claim(text, times([there]), times([here]), verdict)
    steps = [timed.get((f32, name), {}) for name in said.LADDER_REQUESTS]
    if all("requests" in step for step in steps):
        first = steps[0]
        halved = all(s["requests"] << i == first["requests"] for i, s in enumerate(steps))
        same = all(s["sectors"] == first["sectors"] for s in steps)
        counts = [f"{step['requests']:,}" for step in steps]
        there_counts = [f"{count:,}" for count in said.LADDER_REQUESTS.values()]
        yield Claim(
            "each widening halves the requests and leaves the sectors",
            "; ".join(there_counts),
            "; ".join(counts),
            HOLDS if halved and same else FAILS,
        )
    half2 = timed.get((f16, "vec4 half2"), {})
    if "max_error" in half2:
        ours = timed.get((f16, "ours, f32 math"), {})
        rounded = f"; f32 arithmetic, rounded once: {ours['max_error']:.1e}"
        yield Claim(
            "half arithmetic is off by 0.001",
            f"{said.LADDER_ERROR}",
            f"{half2['max_error']:.1e}" + (rounded if "max_error" in ours else ""),
            HOLDS if half2["max_error"] >= said.LADDER_ERROR / 2 else FAILS,
        )


# ---- the notes: elementwise, atomics, upsampling ----


def _notes(suites: dict[str, list[Row]]) -> Section:
    parts = (_multiply(suites), _atomics(suites), _upsample(suites))
    return Section([c for part in parts for c in part.claims], [t for p in parts for t in p.tables])


def _multiply(suites: dict[str, list[Row]]) -> Section:
    rows = [r for r in suites.get("elementwise", []) if "us" in r["rivals"].get("naive", {})]
    lines = [["x * y", "dtype", "article: us", "of the chip", "array here", "us", "of copy"]]
    claims = []
    for row in rows:
        dtype, naive = row["dtype"], row["rivals"]["naive"]
        copy = row["ceilings"].get("copy", {}).get("us")
        for form, known in ((said.NAIVE, naive), (said.PACKED, row["ours"])):
            there = said.MULTIPLY[dtype, form]
            lines.append(
                [
                    form if form == said.NAIVE else "OneFlow elementwise; here ours",
                    short(dtype),
                    _theirs(there.us),
                    f"{there.share:.0%}",
                    row["variant"],
                    microseconds(known["us"]),
                    percent([copy / known["us"]] if copy else []),
                ]
            )
        gain = said.MULTIPLY[dtype, said.NAIVE].us / said.MULTIPLY[dtype, said.PACKED].us
        claims.append(
            Claim(
                f"packs beat one element a thread, {short(dtype)}, {row['variant']}",
                times([gain]),
                times([naive["ratio"]]),
                _verdict(naive["ratio"], _noise(naive, row["ours"])),
            )
        )
    return Section(claims, [table(lines)] if rows else [])


def _atomics(suites: dict[str, list[Row]]) -> Section:
    rows = suites.get("atomic_add", [])
    lines = [["atomic additions of f16", "article: ms, 32M elements", "elements here", "ms"]]
    claims = []
    for row in rows:
        for form, there in said.ATOMICS_MS.items():
            known = row["rivals"].get(form, {})
            here = f"{known['us'] / 1e3:,.3f}" if "us" in known else known.get("skipped", "-")
            lines.append([form, f"{there:.2f}", row["variant"], here])
        timed = {name: x["us"] for name, x in row["rivals"].items() if "us" in x}
        for text, slow, fast in (
            ("a padded half beats a half", "half", "FastAtomicAdd"),
            ("a padded half is as fast as a pair", "half2", "FastAtomicAdd"),
        ):
            if slow not in timed or fast not in timed:
                continue
            here_gain = timed[slow] / timed[fast]
            holds = here_gain > 1.05 if slow == "half" else here_gain > 0.95
            claims.append(
                Claim(
                    f"{text}, {row['variant']}",
                    times([said.ATOMICS_MS[slow] / said.ATOMICS_MS[fast]]),
                    times([here_gain]),
                    HOLDS if holds else FAILS,
                )
            )
    return Section(claims, [table(lines)] if rows else [])


def _upsample(suites: dict[str, list[Row]]) -> Section:
    rows = {row["case"]: row for row in suites.get("upsample", [])}
    h, w = said.UPSAMPLE_SHAPE[2:]
    head = ["upsampling of (16, 32, 80, 80)", "dtype", "", "article: us", "of the chip"]
    lines = [[*head, "us", "of copy"]]
    claims = []
    for framework, dtype, way in said.UPSAMPLE:
        case = UpsampleCase(said.UPSAMPLE_SHAPE, (2 * h, 2 * w), "NCHW", dtype, way)
        if not (row := rows.get(case.name)) or "us" not in row["rivals"].get("torch", {}):
            continue
        torch, ours = row["rivals"]["torch"], row["ours"]
        known = torch if framework == said.PYTORCH else ours
        there = said.UPSAMPLE[framework, dtype, way]
        copy = row["ceilings"].get("copy", {}).get("us")
        lines.append(
            [
                framework if framework == said.PYTORCH else "OneFlow; here ours",
                short(dtype),
                way,
                _theirs(there.us),
                f"{there.share:.0%}",
                microseconds(known["us"]),
                percent([copy / known["us"]] if copy else []),
            ]
        )
        if framework == said.ONEFLOW:
            gain = said.UPSAMPLE[said.PYTORCH, dtype, way].us / there.us
            claims.append(
                Claim(
                    f"a kernel for twofold upsampling beats PyTorch's, {way} {short(dtype)}",
                    times([gain]),
                    times([torch["ratio"]]),
                    _verdict(torch["ratio"], _noise(torch, ours)),
                )
            )
    return Section(claims, [table(lines)] if len(lines) > 1 else [])


# ---- permute ----


def _permute(suites: dict[str, list[Row]]) -> Section:
    rows = having(suites.get("permute", []), group="article")
    rivals = ("jnp", "naive", "naive, 32-bit", "torch")
    head = ["scene", "dtype", "array", *(f"{name}, us" for name in rivals), "ours, us", "copy, us"]
    lines = [[*head, "naive over ours", "torch over ours", "of copy"]]
    for row in rows:
        timed = [*(row["rivals"].get(name, {}) for name in rivals), row["ours"]]
        timed.append(row["ceilings"].get("copy", {}))
        lines.append(
            [
                row["variant"],
                short(row["dtype"]),
                size(row["bytes"] // 2),
                *(microseconds(known.get("us")) for known in timed),
                times(ratios([row], "naive")),
                times(ratios([row], "torch")),
                percent(of_copy([row])),
            ]
        )
    return Section(list(_permute_claims(rows)), [table(lines)] if rows else [])


def _permute_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    for axes, dtypes, least, most in said.PERMUTE_GAINS:
        found = [r for r in having(rows, variant=axes) if r["dtype"] in dtypes]
        if not (gains := ratios(found, "torch")):
            continue
        # Where no least gain is claimed, the most has to be reached.
        as_much = min(gains) >= least if least else max(gains) >= most
        yield Claim(
            f"{axes} beats PyTorch's, {' and '.join(map(short, dtypes))}",
            f"{least:.2f}x to {most:.2f}x" if least else f"up to {most:.2f}x",
            _range(gains),
            _of_gains(gains, as_much),
        )
    if shares := of_copy(rows):
        yield Claim(
            "a permutation is nearly as fast as a copy, in most cases",
            "nearly",
            f"{min(shares):.0%} to {max(shares):.0%}",
            HOLDS if sorted(shares)[len(shares) // 2] >= 0.9 else FAILS,
        )


_SECTIONS = {
    said.ELEMENTWISE: _cast,
    said.LADDER: _ladder,
    said.NOTES: _notes,
    said.PERMUTE: _permute,
}
