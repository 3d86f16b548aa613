"""The drawings of how-kernels-work.md: `python docs/drawings.py` writes them to images/kernels.

Every drawing stands on a light ground of its own, which is legible on light and dark pages alike.
Colours are Okabe and Ito's, which colour-blind eyes tell apart, and never say anything alone.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

INK, SOFT, LINE = "#1f2328", "#57606a", "#8c959f"
BLUE, ORANGE, GREEN, PINK, GREY, WHITE = (
    *("#cbe3f3", "#fbe0a8", "#bfe6da", "#f1d3e4", "#e6e8eb"),
    "#ffffff",
)
WIDTH = 760


class Drawing:
    """An SVG image, made of boxes, texts and arrows. Positions are pixels."""

    def __init__(self, height: int, title: str):
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """One line, whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def note(self, x: float, y: float, text: str, *, color: str = SOFT) -> None:
        """Lines of small text, the first of which has its baseline at y."""
        for k, line in enumerate(text.split("\n")):
            self.text(x, y + 16 * k, line, 12, color=color)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = WHITE,
        text: str = "",
        size: float = 12,
        *,
        dashed: bool = False,
    ) -> None:
        """A rectangle with lines of text in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{fill}" stroke="{LINE}"{dash}/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
        for k, line in enumerate(lines):
            self.text(x + width / 2, top + k * size * 1.24, line, size, anchor="middle")

    def cells(
        self,
        x: float,
        y: float,
        texts: Sequence[str],
        fills: Sequence[str],
        width: float = 28,
        height: float = 24,
        size: float = 11,
    ) -> None:
        """Boxes in a row."""
        for k, (text, fill) in enumerate(zip(texts, fills, strict=True)):
            self.box(x + k * width, y, width, height, fill, text, size)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """A straight arrow."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{SOFT}" stroke-width="1.4" '
            f'marker-end="url(#tip)"{dash}/>'
        )

    def brace(self, x1: float, x2: float, y: float, text: str, size: float = 11.5) -> None:
        """A bracket under something, with a text under it."""
        self.parts.append(
            f'<path d="M{x1:g} {y:g}v6H{x2:g}v-6" stroke="{SOFT}" fill="none" stroke-width="1.2"/>'
        )
        self.text((x1 + x2) / 2, y + 7 + size * 1.15, text, size, anchor="middle", color=SOFT)

    def rule(self, y: float) -> None:
        """A line from side to side."""
        self.parts.append(f'<path d="M20 {y:g}H{WIDTH - 20}" stroke="{LINE}"/>')

    def svg(self) -> str:
        """The whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                f'width="{WIDTH}" height="{self.height}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker>'
                "</defs>",
                f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="6" '
                f'fill="#f9fafb" stroke="#d0d7de"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


# fmt: off
def elementwise() -> Drawing:
    """Packs, the peeled head, the tail."""
    d = Drawing(296, "Elementwise: packs of 16 bytes, a head and a tail")
    left, width, head, packs, tail = 86, 29, 3, 2, 2
    n = head + 8 * packs + tail
    fills = [ORANGE] * head + [BLUE] * 8 + [GREEN] * 8 + [ORANGE] * tail
    d.text(16, 26, "bfloat16, 21 elements of arrays that begin 10 bytes after a multiple of 16")
    for name, y in (("x", 66), ("y", 216)):
        d.text(70, y + 17, name, 14, anchor="end", bold=True)
        d.cells(left, y, [str(i) for i in range(n)], fills, width)
    for k in range(packs + 1):
        x = left + (head + 8 * k) * width
        d.parts.append(f'<path d="M{x} 58V248" stroke="{INK}" stroke-dasharray="2 3"/>')
        d.text(x, 52, "aligned to 16", 11, anchor="middle", color=SOFT)
    for k in range(packs):
        x = left + (head + 8 * k) * width + 40
        d.arrow(x + 76, 92, x + 76, 120)
        d.box(x, 122, 152, 62, BLUE if k == 0 else GREEN,
              f"thread {k}\none load of 16 bytes\nwiden, f, round once\none store of 16 bytes", 11)
        d.arrow(x + 76, 186, x + 76, 214)
    d.box(left - 46, 132, 112, 42, ORANGE, "threads 2, 3, 4\nan element each", 11)
    d.box(left + 20 * width - 53, 132, 106, 42, ORANGE, "threads 5, 6\nan element each", 11)
    for x in (left + 43, left + 20 * width):
        d.arrow(x, 92, x, 130)
        d.arrow(x, 176, x, 214)
    d.note(left, 272, "head")
    d.text(left + 11 * width, 272, "packs, the first threads", 12, anchor="middle", color=SOFT)
    d.text(left + 21 * width, 272, "tail", 12, anchor="end", color=SOFT)
    return d


def cast() -> Drawing:
    """Different widths in and out."""
    d = Drawing(262, "Casts: a thread writes one pack of 16 bytes, whatever it reads")
    for x, title, reads, out, notes in (
        (24, "f32 to f16: narrows", [BLUE, GREEN], ORANGE,
         ("two loads of 16 bytes", "8 values", "blocks of 1024 threads")),
        (404, "f16 to f32: widens", [BLUE], ORANGE,
         ("one load of 8 bytes", "4 values", "blocks of 256 threads")),
    ):
        narrows = len(reads) == 2
        d.text(x, 28, title, 14, bold=True)
        read_width, write_width = (40, 20) if narrows else (20, 40)
        n = 8 if narrows else 4
        texts = [str(i) for i in range(n)]
        fills = [c for c in reads for _ in range(4)]
        d.cells(x, 48, texts, fills, read_width)
        for k in range(len(reads)):
            first = x + k * 4 * read_width
            d.brace(first + 2, first + 4 * read_width - 2, 76, "16 bytes" if narrows else "8 bytes")
        mid = x + 2 * len(texts) * read_width / 4
        d.arrow(mid, 104, mid, 122)
        d.box(x, 124, 332, 40, WHITE, f"a thread: {notes[0]}, {notes[1]},\none store of 16 bytes")
        d.arrow(x + 80, 166, x + 80, 184)
        d.cells(x, 186, texts, [out] * n, write_width)
        d.brace(x + 2, x + 158, 214, "16 bytes")
        d.note(x + 172, 203, notes[2])
        if not narrows:
            d.note(x + 172, 221, "on sm_90 block b prefetches\nthe input of block b + 512")
    return d


def gelu_ladder() -> Drawing:
    """Bytes a thread, and requests of 16 Mi elements."""
    rungs = [
        ("scalar", "f32", 4, 1), ("vec2", "f32", 4, 2), ("vec4, ours", "f32", 4, 4),
        ("half2", "f16", 2, 2), ("vec2 half2", "f16", 2, 4),
        ("vec4 half2, cute, ours", "f16", 2, 8),
    ]
    d = Drawing(58 + 36 * len(rungs) + 44, "The gelu ladder: bytes that a thread loads at once")
    for x, text in (
        (20, "kernel"), (214, "a thread's load"), (404, "a warp's request"), (546, "requests"),
        (632, "sectors of 32 B"),
    ):
        d.text(x, 30, text, 12.5, bold=True)
    elements = 16 << 20
    for k, (name, dtype, size, n) in enumerate(rungs):
        y = 44 + 36 * k
        fill = BLUE if dtype == "f32" else ORANGE
        d.text(20, y + 17, f"{name}", 12.5)
        d.text(178, y + 17, dtype, 12.5, color=SOFT)
        d.cells(214, y, [""] * n, [fill] * n, 7 * size)
        d.note(222 + 7 * size * n, y + 17, f"{size * n} bytes", color=INK)
        d.note(404, y + 17, f"{32 * size * n} bytes", color=INK)
        d.text(610, y + 17, f"{elements // (32 * n):,}", 12, anchor="end")
        d.text(730, y + 17, f"{elements * size // 32:,}", 12, anchor="end")
    y = 44 + 36 * len(rungs) + 22
    d.note(20, y, "For 16 Mi elements. Wider loads are fewer requests for the same sectors: "
           "more bytes on their way for each instruction.")
    return d


def atomic_add() -> Drawing:
    """A single 16-bit value, and a pack."""
    d = Drawing(300, "Atomic additions of 16-bit floats")
    d.text(20, 28, "One value", 14, bold=True)
    d.note(20, 52, "base[5] += v: the pair that it lies in, the neighbour gets -0", color=INK)
    d.cells(20, 66, [f"[{i}]" for i in range(8)], [WHITE] * 4 + [GREY, ORANGE] + [WHITE] * 2, 40)
    d.cells(180, 124, ["-0", "v"], [GREY, ORANGE], 40)
    d.arrow(220, 122, 220, 94)
    d.note(20, 140, "one 32-bit reduction", color=INK)
    d.note(20, 156, "red.add.noftz.f16x2")
    d.note(20, 184, "x + -0 is x, also where x is -0. At either end of the array,\n"
           "where half of the pair is not its own: the 16-bit instruction.")
    x = 404
    d.text(x, 28, "A pack of 8", 14, bold=True)
    d.note(x, 52, "an aligned run of a row, on sm_90 and newer", color=INK)
    d.cells(x, 66, [f"[{i}]" for i in range(8)], [BLUE] * 8, 41)
    d.cells(x, 124, [f"v{i}" for i in range(8)], [ORANGE] * 8, 41)
    d.arrow(x + 164, 122, x + 164, 94)
    d.note(x, 170, "one reduction of 16 bytes: red.add.noftz.v4.f16x2", color=INK)
    d.note(x, 186, "(of float: red.add.v4.f32, four values)")
    d.note(x, 208, "Every element is added atomically, the pack is not.")
    d.rule(224)
    d.note(20, 248, "Bytes: the value's 2 or 16 travel to the L2 cache, which adds; nothing comes "
           "back (red, not atom).", color=INK)
    d.note(20, 268,
           "Older chips: packs are single values; bf16 is a loop of compare-and-swap before sm_90.")
    return d


def scatter_private() -> Drawing:
    """Tables side by side in shared memory."""
    d = Drawing(356, "Few sums: private tables in shared memory")
    d.text(20, 28, "updates and ids, cut into 128 parts: a block of 1024 threads each", 13)
    d.cells(20, 40, ["part 0", "part 1", "...", "part 127"], [BLUE, WHITE, WHITE, WHITE], 178, 28,
            12)
    d.arrow(109, 70, 109, 92)
    d.note(124, 86, "8 elements a thread at once (4 where they have 8 bytes)")
    x0, y0, w = 96, 126, 46
    d.text(x0, y0 - 8, "block 0, shared memory: up to 160 KiB", 12.5, bold=True)
    names = ["table 0", "table 1", "table 2", "...", "table 31"]
    for r, row in enumerate(["sum 0", "sum 1", "...", "sum 1023"]):
        y = y0 + 26 * r
        d.text(x0 - 8, y + 18, row, 11.5, anchor="end", color=SOFT)
        d.cells(x0, y, ["..." if row == "..." else "+"] * 5, [GREEN] * 5, w, 26, 12)
    for k, name in enumerate(names):
        d.text(x0 + w * (k + 0.5), y0 + 118, name, 10.5, anchor="middle", color=SOFT)
    x = 360
    d.note(x, 138, "Thread k adds to table k mod 32, f32 for 16-bit values.\n"
           "The 32 words of one sum are neighbours: in 32 banks.\n"
           "With 32, no two lanes of a warp meet in a word or a bank.", color=INK)
    d.note(x, 198,
           "As many tables as fit, a power of two:\n1024 f32 sums take 4 KiB, 32 of them 128 KiB.")
    d.note(x, 238, "deterministic=True: a table a warp, and lanes that\nmeet in a word take turns.")
    d.arrow(210, 250, 210, 274)
    d.note(222, 268, "tables added up")
    d.cells(20, 276, ["sums of part 0", "of part 1", "...", "of part 127"],
            [GREEN, WHITE, WHITE, WHITE], 130, 26, 12)
    d.arrow(542, 289, 588, 289)
    d.box(590, 276, 150, 26, ORANGE, "result, rounded once")
    d.note(20, 336,
           "Bytes: each update and each id read once; 128 partial results written and read; "
           "the result written once.", color=INK)
    return d


def scatter_sorted() -> Drawing:
    """Runs, chunks and carries."""
    d = Drawing(330, "Many sums: runs of equal ids")
    ids = [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 5, 5, 6, 6, 6]
    fills = {0: BLUE, 2: ORANGE, 5: GREEN, 6: PINK}
    x0, w = 92, 35
    d.text(20, 28, "positions, sorted by id", 13, bold=True)
    d.text(84, 61, "id", 12, anchor="end", color=SOFT)
    d.cells(x0, 44, [str(i) for i in ids], [fills[i] for i in ids], w, 26, 12)
    d.text(84, 87, "row", 12, anchor="end", color=SOFT)
    order = [4, 9, 13, 0, 2, 3, 5, 8, 10, 11, 12, 14, 17, 1, 7, 6, 15, 16]
    d.cells(x0, 70, [str(i) for i in order], [WHITE] * 18, w, 26, 12)
    for k in range(4):
        x = x0 + 6 * w * k
        d.parts.append(f'<path d="M{x} 36V188" stroke="{INK}" stroke-width="1.4"/>')
    for k in range(3):
        d.brace(x0 + 6 * w * k + 4, x0 + 6 * w * (k + 1) - 4, 100, f"chunk {k}: a block")
    y = 146
    d.box(x0 + 4, y, 97, 36, BLUE, "a run inside:\nits sum", 11)
    d.box(x0 + 3 * w + 4, y, 97, 36, ORANGE, "starts here,\ngoes on", 11)
    d.box(x0 + 6 * w + 4, y, 6 * w - 8, 36, ORANGE, "goes on from before,\nand goes on", 11)
    d.box(x0 + 12 * w + 4, y, 30, 36, ORANGE, "ends", 10)
    d.box(x0 + 13 * w + 4, y, 62, 36, GREEN, "its sum", 11)
    d.box(x0 + 15 * w + 4, y, 97, 36, PINK, "its sum", 11)
    d.box(x0 + 4 * w, 224, 9 * w, 30, ORANGE, "pieces of run 2 in the scratch, added up in order")
    for x in (x0 + 4.5 * w, x0 + 9 * w, x0 + 12.5 * w):
        d.arrow(x, 184, x, 222)
    d.cells(x0, 272, [f"row {i}" for i in range(7)], [BLUE, GREY, ORANGE, GREY, GREY, GREEN, PINK],
            90, 26, 12)
    d.text(84, 289, "result", 12, anchor="end", color=SOFT)
    d.arrow(x0 + 1.5 * w, 184, x0 + 40, 270)
    d.arrow(x0 + 6.5 * w, 256, x0 + 6.5 * w, 270)
    d.arrow(x0 + 14 * w + 6, 184, x0 + 14 * w + 6, 270)
    d.arrow(x0 + 16.5 * w, 184, x0 + 16.5 * w, 270)
    d.note(x0, 318,
           "No atomics, one order: the same bits on every run. Grey rows, which no id hits, "
           "are filled with zeros.")
    return d


def scatter_atomic() -> Drawing:
    """Through f32 in the scratch; hot targets."""
    d = Drawing(286, "Atomic additions, for what is small or narrow")
    steps = [
        (20, "clear", "f32 scratch := -0", GREY),
        (206, "add", "updates, widened,\nby atomics in the L2", BLUE),
        (466, "finish", "result := round(operand + scratch)", ORANGE),
    ]
    d.text(20, 28, "16-bit sums: three kernels", 14, bold=True)
    for k, (x, name, what, fill) in enumerate(steps):
        width = (140, 214, 274)[k]
        d.box(x, 44, width, 52, fill, f"{name}\n{what}", 12)
        if k:
            d.arrow(x - 46, 70, x - 2, 70)
    d.note(20, 120,
           "f32, f64 and integers: zeros where there is no operand, then the additions to the "
           "result itself.")
    d.text(20, 156,
           "Single elements: additions to one address queue up, so a hot one is summed first", 14,
           bold=True)
    lanes = ["7", "7", "3", "7", "9", "7", "4", "7"]
    d.note(20, 187, "targets of a warp")
    d.cells(132, 170, [*lanes, "..."], [PINK if t == "7" else WHITE for t in lanes] + [WHITE], 34,
            26, 12)
    d.note(452, 180,
           "7 is the target of 4 lanes or more: their\nvalues of all 8 turns are summed by "
           "shuffles",
           color=INK)
    d.arrow(150, 198, 230, 224)
    d.arrow(184, 198, 238, 224)
    d.arrow(252, 198, 252, 224)
    d.arrow(320, 198, 268, 224)
    d.arrow(388, 198, 282, 224)
    d.box(206, 226, 92, 26, PINK, "one addition")
    d.note(452, 242, "the others are added one by one")
    d.note(20, 274,
           "Wide rows: a thread takes a pack of 16 bytes, and adds it in one instruction (two "
           "of f32 for 16-bit values).")
    return d


def gather_rows() -> Drawing:
    """Four words a thread, a block apart."""
    d = Drawing(258, "Gathered rows: four words a thread, a block apart")
    d.text(20, 28, "a block: 1024 words of 16 bytes of the result, 16 KiB", 13, bold=True)
    for k in range(4):
        x = 20 + 181 * k
        d.cells(x, 42, [f"{256 * k}", f"{256 * k + 1}", "...", f"{256 * k + 255}"],
                [ORANGE, BLUE, WHITE, WHITE], 44, 26, 11)
    d.note(20, 92,
           "thread 0 has the first word of each quarter, thread 1 the second: a warp's 32 words "
           "are neighbours")
    for k, (name, what, fill) in enumerate(
        [
            ("1", "four ids,\nasked for at once", GREEN),
            ("2", "four words of the\ntable's rows at once", BLUE),
            ("3", "four stores, first to\nleave the L2 cache", ORANGE),
        ]
    ):
        x = 20 + 250 * k
        d.box(x, 112, 220, 56, fill, f"{name}. {what}", 12)
        if k:
            d.arrow(x - 28, 140, x - 2, 140)
    d.note(20, 198, "A word alone would wait for its id, then for its row, and memory would idle.",
           color=INK)
    d.note(20, 218, "Words are 8, 4, 2 or 1 bytes where rows or pointers are no multiples of 16.")
    d.note(20, 240, "Bytes: each gathered row read and written once, and its id read.", color=INK)
    return d


def upsample2x() -> Drawing:
    """Forward and backward at 2x."""
    d = Drawing(318, "Upsampling by 2, bfloat16: one thread")
    fills = [BLUE, ORANGE, GREEN, PINK]
    d.text(20, 28, "forward", 14, bold=True)
    d.cells(20, 54, list("abcd"), fills, 34, 26, 13)
    d.note(20, 46, "x: one load of 8 bytes")
    d.arrow(88, 84, 88, 112)
    d.note(98, 102, "columns are doubled in registers")
    wide = [c for c in fills for _ in range(2)]
    for r in range(2):
        d.cells(20, 116 + 30 * r, [c for c in "abcd" for _ in range(2)], wide, 34, 26, 13)
        d.text(300, 134 + 30 * r, "16 bytes", 11.5, color=SOFT)
    d.note(20, 194, "y: two stores of 16 bytes, to two rows")
    d.text(20, 224, "Bytes: 8 read, 32 written.", 12.5)
    x = 410
    d.text(x, 28, "backward", 14, bold=True)
    d.note(x, 46, "dy: two loads of 16 bytes, from two rows")
    for r in range(2):
        d.cells(x, 54 + 30 * r, [f"{c}{2 * r + i}" for c in "abcd" for i in range(2)], wide, 34, 26,
                12)
        d.text(x + 280, 72 + 30 * r, "16 bytes", 11.5, color=SOFT)
    d.arrow(x + 136, 114, x + 68, 142)
    d.note(x + 120, 138, "four of a kind are summed in f32")
    d.cells(x, 146, list("abcd"), fills, 34, 26, 13)
    d.note(x, 194, "dx: one store of 8 bytes, rounded once")
    d.text(x, 224, "Bytes: 32 read, 8 written. No atomics.", 12.5)
    d.rule(242)
    d.note(20, 266,
           "Pixels of many channels (NHWC) move whole: a thread reads one pack of 16 bytes of a "
           "pixel and writes it to two rows.")
    d.note(20, 286,
           "It is one of two that do, for the pixel's two columns. The backward sums 8 bytes of "
           "channels of four pixels.")
    d.note(20, 306, "At 4x a thread reads 4 bytes, and writes 16 to each of four rows.")
    return d


def upsample_any() -> Drawing:
    """The index map and the two steps of the backward."""
    d = Drawing(356, "Upsampling to any size")
    n_in, n_out = 5, 8
    source = [i * n_in // n_out for i in range(n_out)]
    fills = [BLUE, ORANGE, GREEN, PINK, GREY]
    d.text(20, 28, "5 pixels to 8: output i shows floor(i * 5 / 8)", 13, bold=True)
    w, x0 = 44, 60
    d.text(50, 62, "x", 13, anchor="end", bold=True)
    d.cells(x0 + 1.5 * w, 46, [str(i) for i in range(n_in)], fills, w, 26, 12)
    d.text(50, 138, "y", 13, anchor="end", bold=True)
    d.cells(x0, 120, [str(s) for s in source], [fills[s] for s in source], w, 26, 12)
    for i, s in enumerate(source):
        d.arrow(x0 + (s + 2) * w, 74, x0 + (i + 0.5) * w, 118)
    x = 440
    d.note(x, 58, "Forward: a thread makes 16 bytes of a row of y,\n"
           "each element from its own source, and stores\n"
           "them to every row that shows the source row.", color=INK)
    d.note(x, 114, "The map is exact: a multiplication by the inverse,\nin integers.")
    d.rule(166)
    d.text(20, 190, "Backward: a block has some rows of dx", 13, bold=True)
    d.cells(20, 204, [""] * 8, [BLUE] * 8, 26, 20)
    d.cells(20, 226, [""] * 8, [BLUE] * 8, 26, 20)
    d.note(20, 264, "rows of dy that show one row of x,\n16 bytes a load, three rows at once")
    d.arrow(232, 225, 272, 225)
    d.cells(276, 214, [""] * 8, [GREEN] * 8, 26, 22)
    d.note(276, 264, "their sum in shared memory, in f32\n(24 KiB a block, or one row)")
    d.arrow(488, 225, 528, 225)
    d.cells(532, 214, [""] * 5, [ORANGE] * 5, 26, 22)
    d.note(532, 264, "columns that show one\npixel, rounded once: dx")
    d.note(20, 316,
           "Bytes: dy read once, dx written once. No atomics, one order: the same bits on every "
           "run.",
           color=INK)
    d.note(20, 338,
           "Pixels of whole packs (NHWC) need no shared memory: a thread sums the packs of its "
           "rectangle.")
    return d


def permute_plan() -> Drawing:
    """Merging, movement size, the choice of a kernel."""
    d = Drawing(392, "How a permutation is simplified, then carried out")
    d.text(20, 28, "1. Dimensions that stay neighbours are merged", 13.5, bold=True)
    d.cells(20, 40, ["32", "224", "224", "64"], [BLUE, ORANGE, ORANGE, GREEN], 56, 26, 12)
    d.note(252, 58, "by (0, 3, 1, 2)")
    d.arrow(346, 53, 386, 53)
    d.cells(392, 40, ["32", "50176", "64"], [BLUE, ORANGE, GREEN], 66, 26, 12)
    d.note(598, 58, "by (0, 2, 1)")
    d.text(20, 98, "2. What keeps its last dimension moves in units of up to 16 bytes", 13.5,
           bold=True)
    d.cells(20, 110, ["64", "32", "4 x f32"], [BLUE, ORANGE, GREEN], 74, 26, 12)
    d.note(252, 128, "by (1, 0, 2)")
    d.arrow(346, 123, 386, 123)
    d.cells(392, 110, ["64", "32"], [BLUE, ORANGE], 74, 26, 12)
    d.note(550, 128, "units of 16 bytes by (1, 0)")
    d.text(20, 168, "3. The fastest dimensions of input and output choose the kernel", 13.5,
           bold=True)
    rows = [
        ("nothing moves", "a copy", GREY),
        ("the last dimension stays, rows of 64 bytes or more", "rows: a pack a thread", BLUE),
        (
            "a dimension of 2, 3 or 4 becomes the last, or was it",
            "interleave, deinterleave: registers",
            GREEN,
        ),
        ("both fastest dimensions have 64 bytes or more", "tile: shared memory", ORANGE),
        ("all else: short dimensions", "runs: tiles over several dimensions", PINK),
    ]
    for k, (when, kernel, fill) in enumerate(rows):
        y = 182 + 33 * k
        d.box(20, y, 360, 27, WHITE, when, 12)
        d.arrow(382, y + 13, 416, y + 13)
        d.box(420, y, 320, 27, fill, kernel, 12)
    d.note(20, 374, "Bytes, in all of them: each element read once and written once.", color=INK)
    return d


def permute_tile() -> Drawing:
    """The tile of 4-byte elements, its gaps."""
    d = Drawing(398, "A tile of a transposition, 4-byte elements")
    d.text(20, 28, "a block of 256 threads has a tile of 64 x 64 elements: 16 KiB", 13, bold=True)
    for x, title in ((20, "input"), (278, "shared memory"), (560, "output")):
        d.text(x, 56, title, 13, bold=True)
    rows = [BLUE, ORANGE, GREEN, PINK]
    for r in range(8):
        d.cells(20, 66 + 22 * r, [""] * 4, [rows[r % 4]] * 4, 46, 22)
    d.brace(20, 204, 246, "rows of 256 bytes = 16 packs")
    d.note(20, 288,
           "A thread loads four packs of\n16 bytes, 16 rows apart; 16\nthreads load one row.")
    d.arrow(208, 156, 270, 156)
    for r in range(8):
        y = 66 + 22 * r + (10 if r > 3 else 0)
        d.cells(278, y, [""] * 8, [rows[r % 4]] + [WHITE] * 7, 24, 22)
    d.box(278, 154, 192, 10, GREY, dashed=True)
    d.note(278, 270, "After every 4 rows 16 bytes\n" "are left out. A thread reads an\n"
           "element from each of 4 rows;\n" "8 such threads, 4 rows apart,\n"
           "meet 8 times 4 different banks.")
    d.arrow(474, 111, 552, 79)
    d.cells(560, 66, [""] * 4, rows, 42, 24)
    d.cells(560, 90, [""] * 4, [WHITE] * 4, 42, 24)
    d.cells(560, 114, [""] * 4, [WHITE] * 4, 42, 24)
    d.brace(560, 728, 142, "4 elements: a pack")
    d.note(560, 186, "One store of 16 bytes.\n8 threads write 128 bytes\nof one row of the output.")
    d.rule(352)
    d.note(20, 376,
           "Rows that are no whole packs: a pack is shifted together from the two aligned ones "
           "that it lies in, on either side.", color=INK)
    return d


def permute_pairs() -> Drawing:
    """Elements of 2 bytes leave shared memory as words of 4."""
    d = Drawing(300, "2-byte elements: two columns a thread")
    d.text(20, 28, "a thread reads 8 words of 4 bytes from 8 rows, two elements each", 13,
           bold=True)
    for r in range(8):
        d.cells(60, 44 + 26 * r, [f"a{r}", f"b{r}"], [BLUE, ORANGE], 44, 26, 12)
        d.text(52, 62 + 26 * r, f"row {r}", 11, anchor="end", color=SOFT)
    d.brace(60, 148, 256, "4 bytes")
    d.arrow(156, 148, 214, 148)
    d.box(218, 112, 130, 72, WHITE, "8 byte permutations\n(PRMT): the first\nhalves, the second",
          11.5)
    d.arrow(350, 138, 394, 116)
    d.arrow(350, 158, 394, 180)
    d.cells(398, 102, [f"a{r}" for r in range(8)], [BLUE] * 8, 42, 28, 12)
    d.cells(398, 166, [f"b{r}" for r in range(8)], [ORANGE] * 8, 42, 28, 12)
    d.note(398, 94, "one store of 16 bytes, to a row of the output")
    d.note(398, 158, "one store of 16 bytes, to the next row")
    d.note(398, 232, "Elements of 1 byte: 16 words, four columns, four packs.")
    d.note(398, 252, "A bank of shared memory gives 4 bytes at a time.")
    return d


def permute_interleave() -> Drawing:
    """Three rows become one of pixels."""
    d = Drawing(292, "Interleaving three rows: channels become pixels")
    d.text(20, 28, "NCHW to NHWC with 3 channels, f32", 13, bold=True)
    fills = [BLUE, ORANGE, GREEN]
    for c, (name, fill) in enumerate(zip("rgb", fills, strict=True)):
        d.cells(96, 50 + 34 * c, [f"{name}{i}" for i in range(4)], [fill] * 4, 40, 26, 12)
        d.text(88, 68 + 34 * c, f"channel {c}", 11.5, anchor="end", color=SOFT)
    d.note(96, 166, "three loads of 16 bytes")
    d.arrow(264, 98, 300, 98)
    texts = [f"{name}{i}" for i in range(4) for name in "rgb"]
    for c in range(3):
        d.cells(306, 50 + 34 * c, texts[4 * c : 4 * c + 4],
                [fills[k % 3] for k in range(4 * c, 4 * c + 4)], 40, 26, 12)
    d.note(306, 166, "in registers: three packs")
    d.arrow(474, 98, 508, 98)
    d.box(512, 52, 96, 92, WHITE, "shared\nmemory:\n256 threads,\n12 KiB", 12)
    d.arrow(610, 98, 640, 98)
    d.box(644, 52, 96, 92, ORANGE, "aligned packs\nin order:\n16 bytes,\nneighbours", 12)
    d.cells(96, 192, texts, [fills[k % 3] for k in range(12)], 40, 26, 12)
    d.text(88, 210, "a row of y", 11.5, anchor="end", color=SOFT)
    d.brace(98, 254, 222, "pack 0")
    d.brace(258, 414, 222, "pack 1")
    d.brace(418, 574, 222, "pack 2")
    d.note(20, 276,
           "Bytes: 48 read and 48 written by a thread. The reverse stages only rows of no whole "
           "packs.",
           color=INK)
    return d


def generated() -> Drawing:
    """From an expression to a call."""
    d = Drawing(330, "From a line of C++ to an operation")
    d.box(20, 24, 330, 56, BLUE,
          'ElementwiseKernel("T x, T y", "T z",\n"z = (x - y) * (x - y)", ...)', 12)
    d.note(366, 48,
           "names, types and brackets are checked here;\ndtypes and shapes when it is called")
    d.arrow(185, 82, 185, 104)
    d.box(20, 106, 330, 56, WHITE,
          "source: a functor of T = bfloat16 around\nthe template of the built-in operations", 12)
    d.note(366, 130,
           "its value, or its JVP or VJP: each a kernel, which reads\nonly what the derivatives "
           "use")
    d.arrow(120, 164, 120, 186)
    d.arrow(260, 164, 260, 186)
    d.box(20, 188, 158, 44, GREEN, "GPU: NVRTC,\na cubin", 12)
    d.box(192, 188, 158, 44, GREEN, "CPU: C++ compiler,\na shared library", 12)
    d.box(470, 188, 270, 44, GREY,
          "cache: in memory and in the user's\nfolder, shared by all processes", 12)
    d.arrow(352, 210, 466, 210, dashed=True)
    d.arrow(185, 234, 185, 256)
    d.box(20, 258, 330, 44, ORANGE,
          "the compiled program carries the code:\nno compiler when it runs", 12)
    d.arrow(352, 280, 466, 280)
    d.box(470, 258, 270, 44, ORANGE,
          "FFI handler: loads it once,\nsplits arrays into packs, launches", 12)
    return d

# fmt: on

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        elementwise,
        cast,
        gelu_ladder,
        atomic_add,
        scatter_private,
        scatter_sorted,
        scatter_atomic,
        gather_rows,
        upsample2x,
        upsample_any,
        permute_plan,
        permute_tile,
        permute_pairs,
        permute_interleave,
        generated,
    )
}


def main(directory: Path) -> None:
    """Writes every drawing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (directory / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "kernels")
