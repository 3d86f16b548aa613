"""The C++ source of a row kernel: a definition for csrc/cuda/compiled_rows.cuh.

Values of a row are members of `Row`. They are computed at the beginning of a row and after each
reduction. Element values are recomputed for each reduction and for the map, which writes the
results, unless they fit in a slot: the place of an input element that is no longer needed
(`_Writer._kept`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from jax_oneflow_ops._codegen.signature import TYPES, is_narrow
from jax_oneflow_ops._codegen.source import macros
from jax_oneflow_ops._codegen.traced import REDUCTIONS, Program, cpp_type

ARRAY, VECTOR, VALUE, SCALAR, SUMS = range(5)
"""The kind of an operand or a result: RowKind in csrc/ffi/compiled_rows.h."""

_HEADERS = {"cpu": "cpu/compiled_rows.h", "cuda": "cuda/compiled_rows.cuh"}
_QUALIFIERS = "JOF_HOST_DEVICE JOF_INLINE static"
# 32-bit words of row data that a thread holds in registers; twice as many with sums over rows.
_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of a kernel's operands and results, and its compile-time parameters."""

    inputs: tuple[int, ...]  # inputs of the definition, arrays first
    input_kinds: tuple[int, ...]
    outputs: tuple[int, ...]  # all except sums over rows, arrays first
    output_kinds: tuple[int, ...]
    sums: tuple[int, ...]
    word: str  # the dtype that holds any value that is reduced
    pack: int
    elements: int
    threads: int
    blocks: int


def layout(
    program: Program,
    dtypes: Sequence[str],
    kinds: dict[int, int],
    result_dtypes: Sequence[str],
    result_kinds: Sequence[int],
) -> Layout:
    """The layout for a program whose inputs have the given `kinds`; those missing are not read."""
    inputs = sorted(kinds, key=lambda i: (kinds[i], i))
    sums = tuple(o for o, kind in enumerate(result_kinds) if kind == SUMS)
    outputs = [o for o in range(len(result_kinds)) if o not in sums]
    outputs.sort(key=lambda o: (result_kinds[o], o))
    arrays = [dtypes[i] for i in inputs if kinds[i] == ARRAY]
    arrays += [result_dtypes[o] for o in outputs if result_kinds[o] == ARRAY]
    sizes = [_bytes(dtype) for dtype in arrays]
    words = [program.values[k].dtype for k in _reductions(program)]
    words += [dtypes[i] for i in inputs if kinds[i] == VECTOR]
    words += [result_dtypes[o] for o in sums]
    word = "float64" if max([*sizes, *map(_bytes, words)]) > 4 else "float32"
    pack = 16 // max(sizes)
    read = sum(kinds[i] == ARRAY for i in inputs)
    held = read + len(sums)
    registers = _REGISTERS * (2 if sums else 1) // (2 if word == "float64" else 1)
    elements = max(pack, 2 ** int(math.log2(max(1, registers // held))))
    is_small = not sums and read <= 2
    blocks = 1 if is_small or held * elements > 64 else 2
    return Layout(
        tuple(inputs),
        tuple(kinds[i] for i in inputs),
        tuple(outputs),
        tuple(result_kinds[o] for o in outputs),
        sums,
        word,
        pack,
        elements,
        512 if is_small else 256,
        blocks,
    )


def _bytes(dtype: str) -> int:
    return {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}.get(dtype) or int(
        "".join(c for c in dtype if c.isdigit())
    ) // 8


def _reductions(program: Program) -> list[int]:
    return [
        k for k, value in enumerate(program.values) if program.live[k] and value.kind in REDUCTIONS
    ]


def source(
    program: Program,
    title: str,
    dtypes: Sequence[str],
    result_dtypes: Sequence[str],
    order: Layout,
    width: int,
    platform: str,
) -> str:
    """The C++ or CUDA source of a kernel."""
    written = _Writer(program, dtypes, order)
    arrays, vectors = (
        [i for i, kind in zip(order.inputs, order.input_kinds, strict=True) if kind == one]
        for one in (ARRAY, VECTOR)
    )
    outputs = [
        o for o, kind in zip(order.outputs, order.output_kinds, strict=True) if kind == ARRAY
    ]
    levels = written.levels(outputs, order.sums)
    every = [*(dtypes[i] for i in order.inputs), *result_dtypes]
    is_short = all(map(is_narrow, result_dtypes))

    def types(dtypes: Iterable[str]) -> str:
        return f"jof::Tuple<{', '.join(TYPES[dtype] for dtype in dtypes)}>"

    values = "const jof_row& f, const int jof_column, X& x, const V& v"
    lines = [
        f"// {title}",
        *(["#define JOF_NARROW_RESULTS"] if is_short else []),
        *macros(every),
        f'#include "{_HEADERS[platform]}"',
        '#include "common/traced.h"',
        "namespace jof_expression {",
        "struct jof_row {",
        *(f"  {cpp_type(program.values[k].dtype)} v{k};" for k in written.of_row),
        *(f"  {stored} x{k};" for k, stored, _ in written.loaded),
        "};",
        "template <int>",
        "struct jof_level;",
    ]
    for r, level in enumerate(levels):
        lines += [
            "template <>",
            f"struct jof_level<{r}> {{",
            f"  static constexpr bool kReplaces = {_truth(level.replaced)};",
            "  template <typename X, typename V>",
            f"  {_QUALIFIERS} void Restore({values}) {{",
            *(f"    {line}" for line in level.restored),
            "  }",
        ]
        if level.terms:
            lines += [
                f"  using Terms = jof::Tuple<{', '.join(level.types)}>;",
                f"  using Operations = jof::Tuple<{', '.join(level.operations)}>;",
                "  template <typename X, typename V>",
                f"  {_QUALIFIERS} Terms Accumulate({values}) {{",
                *(f"    {line}" for line in [*level.lines, *level.replaced]),
                f"    return jof::MakeTuple({', '.join(level.terms)});",
                "  }",
                f"  {_QUALIFIERS} void Finish(const Terms& terms, jof_row* row) {{",
                "    jof_row& f = *row;",
                *(f"    {line}" for line in level.finish),
                "  }",
            ]
        lines.append("};")
    last = levels[-1]
    results = [
        f"jof::Get<{n}>(y) = {_as(result_dtypes[o], written.result(o, result_dtypes[o]))};"
        for n, o in enumerate(outputs)
    ]
    results += [
        f"jof_sums[{n}] = {_as(order.word, written.result(o, order.word))};"
        for n, o in enumerate(order.sums)
    ]
    ends = [
        f"static_cast<{TYPES[result_dtypes[o]]}*>(call.outputs[{n}])[jof_at] = "
        f"jof::Accumulator<{TYPES[result_dtypes[o]]}>::Store("
        f"{_as(result_dtypes[o], written.result(o, result_dtypes[o]))});"
        for n, (o, kind) in enumerate(zip(order.outputs, order.output_kinds, strict=True))
        if kind == VALUE
    ]
    terms = [str(len(level.terms)) for level in levels[:-1]]
    uses = [_truth("jof::Get" in "".join(level.lines) and "(v)" in "".join(level.lines))
            for level in levels[:-1]]  # fmt: skip
    lines += [
        "struct jof_rows {",
        f"  using Arrays = {types(dtypes[i] for i in arrays)};",
        f"  using Vectors = {types(dtypes[i] for i in vectors)};",
        f"  using Outputs = {types(result_dtypes[o] for o in outputs)};",
        f"  using Word = {TYPES[order.word]};",
        "  using Row = jof_row;",
        f"  static constexpr int kReductions = {len(levels) - 1}, kSums = {len(order.sums)};",
        f"  static constexpr int kSumsOutput = {len(order.outputs)};",
        f"  static constexpr int kWidth = {width};",
        f"  static constexpr int kPack = {order.pack}, kElements = {order.elements};",
        f"  static constexpr int kThreads = {order.threads}, kBlocks = {order.blocks};",
        f"  static constexpr int kMostTerms = {max(map(int, terms), default=1)};",
        "  JOF_HOST_DEVICE static constexpr int TermsOf(int r) {",
        f"    return {_chosen(terms, '1')};",
        "  }",
        "  JOF_HOST_DEVICE static constexpr bool UsesVectors(int r) {",
        f"    return {_chosen(uses, 'false')};",
        "  }",
        "  template <int r>",
        "  using Level = jof_level<r>;",
        f"  {_QUALIFIERS} void Begin(const jof::TracedRowsCall& call, int64_t jof_at, Row* row) {{",
        "    jof_row& f = *row;",
        *(f"    f.x{k} = {load};" for k, _, load in written.loaded),
        "  }",
        f"  {_QUALIFIERS} void Start(Row* row) {{",
        "    jof_row& f = *row;",
        *(f"    {line}" for line in written.start()),
        "  }",
        "  template <typename X, typename V, typename Y>",
        f"  {_QUALIFIERS} void Map({values}, Y& y, Word* jof_sums) {{",
        *(f"    {line}" for line in [*last.lines, *results]),
        "  }",
        f"  {_QUALIFIERS} void End(const jof::TracedRowsCall& call, int64_t jof_at, "
        "const jof_row& f) {",
        *(f"    {line}" for line in ends),
        "  }",
        "};",
        "}  // namespace jof_expression",
        "JOF_COMPILED_ROWS(jof_expression::jof_rows)",
    ]
    return "\n".join(lines) + "\n"


def _truth(x: object) -> str:
    return "true" if x and x != "false" else "false"


def _chosen(values: Sequence[str], rest: str) -> str:
    return "".join(f"r == {r} ? {value} : " for r, value in enumerate(values)) + rest


def _as(dtype: str, text: str) -> str:
    computed = "bool" if dtype == "bool" else f"jof::Compute<{TYPES[dtype]}>"
    return f"jof_Convert<{computed}>::Of({text})"


@dataclasses.dataclass
class _Level:
    """The code of one stage: a reduction, or the map that writes the results."""

    lines: list[str] = dataclasses.field(default_factory=list)
    terms: list[str] = dataclasses.field(default_factory=list)
    types: list[str] = dataclasses.field(default_factory=list)
    operations: list[str] = dataclasses.field(default_factory=list)
    replaced: list[str] = dataclasses.field(default_factory=list)
    restored: list[str] = dataclasses.field(default_factory=list)
    finish: list[str] = dataclasses.field(default_factory=list)


class _Writer:
    """Decides in which stage each value of a program is computed, and writes the code."""

    def __init__(self, program: Program, dtypes: Sequence[str], order: Layout):
        self._program = program
        self._order = order
        values = program.values
        self._live = [k for k in range(len(values)) if program.live[k]]
        for k in self._live:
            if values[k].kind.startswith("!"):
                raise program.not_computed(values[k].kind[1:])
        self.of_row = [
            k for k in self._live if not program.is_element[k] and values[k].kind != "literal"
        ]
        # A kernel may have to take an array that the program does not read.
        by_input = {int(value.text): k for k, value in enumerate(values) if value.kind == "input"}
        kinds = [*zip(order.inputs, order.input_kinds, strict=True)]
        self._arrays = [by_input[i] for i, kind in kinds if kind == ARRAY]
        vectors = [by_input[i] for i, kind in kinds if kind == VECTOR]
        self._names: dict[int, str] = {}  # of values that any stage can name
        for k in self._live:
            if values[k].kind in ("literal", "iota"):
                self._names[k] = values[k].text
        self._names |= {k: f"f.v{k}" for k in self.of_row}
        self._names |= {k: f"jof::Get<{n}>(v)" for n, k in enumerate(vectors)}
        self._final = self._names  # the same, plus the values that the map computes
        self._dtypes = dtypes

    def _expression(self, k: int, names: dict[int, str]) -> str:
        value = self._program.values[k]
        return value.text.format(*(names[arg] for arg in value.args))

    @functools.cached_property
    def loaded(self) -> list[tuple[int, str, str]]:
        """For each per-row input: the value, its type in memory, and the expression to load it."""
        place = {i: n for n, i in enumerate(self._order.inputs)}
        kinds = dict(zip(self._order.inputs, self._order.input_kinds, strict=True))
        found = []
        for k in self.of_row:
            value = self._program.values[k]
            if value.kind == "input":
                i = int(value.text)
                stored, at = TYPES[self._dtypes[i]], "jof_at" if kinds[i] == VALUE else "0"
                load = f"static_cast<const {stored}*>(call.inputs[{place[i]}])[{at}]"
                found.append((k, stored, load))
        return found

    def start(self) -> list[str]:
        """Statements for the values of a row that do not depend on its elements."""
        loaded = {k: f"jof::Accumulator<{stored}>::Load(f.x{k})" for k, stored, _ in self.loaded}
        return [
            f"f.v{k} = {loaded[k] if k in loaded else self._expression(k, self._names)};"
            for k in self.of_row
            if self._program.stage[k] == 0
        ]

    def _compute(self, targets: Iterable[int], known: dict[int, str]) -> tuple[list[str], set[int]]:
        """Statements that compute element values, and the values of `known` that they read."""
        needed, used = self._closure(targets, known)
        names = self._names | known | {k: f"v{k}" for k in needed}
        lines = [
            f"const {cpp_type(self._program.values[k].dtype)} v{k} = {self._expression(k, names)};"
            for k in sorted(needed)
        ]
        return lines, used

    def _closure(self, targets: Iterable[int], known: Iterable[int]) -> tuple[set[int], set[int]]:
        """The element values to compute for `targets`, and the known values that they use."""
        known = set(known)
        needed: set[int] = set()
        used: set[int] = set()
        pending = [*targets]
        while pending:
            k = pending.pop()
            if k in known:
                used.add(k)
            elif k not in self._names and k not in needed:
                needed.add(k)
                pending += self._program.values[k].args
        return needed, used

    def levels(self, outputs: Sequence[int], sums: Sequence[int]) -> list[_Level]:
        """The stages: one for each reduction in turn, then the map."""
        program = self._program
        count = program.reductions
        at: list[list[int]] = [[] for _ in range(count)]
        for k in _reductions(program):
            at[program.stage[k] - 1].append(k)
        last = [program.results[o] for o in (*outputs, *sums)]
        targets = [[program.values[k].args[0] for k in level] for level in at] + [last]
        slots: list[int] = [*self._arrays]
        levels = []
        for r in range(count + 1):
            level = _Level()
            known = {k: f"jof::Get<{n}>(x)" for n, k in enumerate(slots)}
            level.lines, _ = self._compute(targets[r], known)
            names = self._names | known
            if r > 0 and slots != self._arrays:
                level.restored = self._moved(self._arrays, slots)
            if r < count:
                for k in at[r]:
                    value, operand = program.values[k], program.values[k].args[0]
                    level.terms.append(names.get(operand, f"v{operand}"))
                    level.types.append(cpp_type(value.dtype))
                    level.operations.append(value.text)
                # Terms are copied: a slot may be replaced before they are returned.
                level.lines += [
                    f"const {kind} t{n} = {term};"
                    for n, (kind, term) in enumerate(zip(level.types, level.terms, strict=True))
                ]
                level.terms = [f"t{n}" for n in range(len(level.terms))]
                after = self._kept(slots, targets[r], [k for t in targets[r + 1 :] for k in t])
                if after != slots:
                    here, _ = self._closure(targets[r], known)
                    level.replaced = self._moved(slots, after, here)
                    slots = after
                level.finish = [f"f.v{k} = jof::Get<{n}>(terms);" for n, k in enumerate(at[r])]
                level.finish += [
                    f"f.v{k} = {self._expression(k, self._names)};"
                    for k in self.of_row
                    if program.stage[k] == r + 1 and k not in at[r]
                ]
            else:
                self._final = names | {k: f"v{k}" for k in self._closure(targets[r], known)[0]}
            levels.append(level)
        return levels

    def _moved(
        self, before: Sequence[int], after: Sequence[int], computed: Iterable[int] = ()
    ) -> list[str]:
        """Statements that change the slots from the values `before` to the values `after`."""
        known = {k: f"jof::Get<{n}>(x)" for n, k in enumerate(before)}
        changed = [n for n in range(len(after)) if after[n] != before[n]]
        known |= {k: f"v{k}" for k in computed}
        lines, _ = self._compute([after[n] for n in changed], known)
        names = known | {after[n]: f"v{after[n]}" for n in changed}
        # All values are read before any is replaced.
        lines += [f"const auto s{n} = {names[after[n]]};" for n in changed]
        return lines + [f"jof::Get<{n}>(x) = s{n};" for n in changed]

    def _kept(self, slots: list[int], here: Sequence[int], later: Sequence[int]) -> list[int]:
        """The values that slots should hold after a reduction, so that less is recomputed."""
        candidates, _ = self._closure(here, slots)
        known = set(slots)
        for k in sorted(candidates, reverse=True):
            without, _ = self._closure(later, known)
            cheaper, used = self._closure(later, known | {k})
            if k not in used or len(cheaper) >= len(without):
                continue
            placed = self._placed(slots, used)
            if placed is not None:
                known = {*placed}
                slots = placed
        return slots

    def _placed(self, slots: list[int], wanted: set[int]) -> list[int] | None:
        """Assigns the `wanted` values to slots of their types; None if they do not fit."""
        values = self._program.values
        result = [*slots]
        free = [n for n, k in enumerate(slots) if k not in wanted]
        for k in sorted(wanted - set(slots)):
            fitting = [
                n
                for n in free
                if cpp_type(values[self._arrays[n]].dtype) == cpp_type(values[k].dtype)
            ]
            if not fitting:
                return None
            result[fitting[0]] = k
            free.remove(fitting[0])
        return result

    def result(self, o: int, dtype: str) -> str:
        """The expression for a result."""
        k = self._program.results[o]
        stored = self._program.unrounded(k, f"jof::Compute<{TYPES[dtype]}>")
        names = self._final
        return names[stored] if stored in names else names[k]


@functools.cache
def shared_bytes(arrays: int, vectors: int, pack: int, word: int) -> int:
    """The least shared memory, in bytes, that a block of 256 threads needs."""
    return 256 * (16 * arrays + pack * word * vectors)
