"""How each op may be sharded: a table that test_sharding.py checks and docs/sharding.md shows.

Dimensions have letters, as in einsum, and all ops obey one law. A mesh axis may shard any dimension
except those that are gathered. A dimension that the result lacks costs one all-reduce. In the
gradient with respect to an operand, a dimension of the result that this operand lacks also costs
one. There is no other communication.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tests.catalogue import (
    BY_NAME,
    ELEMENTWISE_CASES,
    EMBEDDING_LOOKUP,
    GRAPH_CASES,
    KERNEL_CASES,
    PERMUTE_CASES,
    RESIZE_CASES,
    ROWS_CASES,
    SCATTER_ADD,
    SEGMENT_SUM,
    UPSAMPLE_CASES,
    Case,
    case_of,
    integers,
    of_numbers,
)

# --- the table ------------------------------------------------------------------------------------


def split(equation: str) -> tuple[list[str], str]:
    """The letters of each operand and of the result."""
    operands, result = equation.replace(" ", "").split("->")
    return operands.split(","), result


@dataclasses.dataclass(frozen=True)
class Rule:
    equation: str
    names: Mapping[str, str]  # the dimensions' names in the documentation
    wrt: Mapping[int, str]  # names of the operands that it can be differentiated with respect to
    others: str  # stands for all dimensions without a name
    gathered: str = ""  # letters

    def kinds(self, letters: Iterable[str]) -> frozenset[str]:
        return frozenset(x if x in self.names else self.others for x in letters)

    def columns(self) -> tuple[list[str], ...]:
        operands, result = split(self.equation)
        free = [letter for letter in self.names if letter not in self.gathered]
        return (
            [self.names[x] for x in free if x in result],
            [self.names[x] for x in free if x not in result],
            [
                f"{self.names[x]}, for {operand}"
                for i, operand in self.wrt.items()
                for x in free
                if x in result and x not in operands[i]
            ],
            [self.names[x] for x in self.gathered],
        )


TRAILING = "the dimensions after them"
OTHERS = {"b": "all other dimensions", "n": "`axis`"}
IN_PARTS = {**OTHERS, "n": "`axis` (a second one for maxima)"}
RULES = {
    "elementwise operations": Rule(
        "x, -> x", {"x": "all dimensions"}, {0: "an array", 1: "a scalar"}, "x"
    ),
    "`ElementwiseKernel`": Rule(
        "a l, l, -> a l",
        {"a": "the dimensions but the last", "l": "the last one"},
        {0: "an array", 1: "a row", 2: "a scalar"},
        "a",
    ),
    "`permute`": Rule("x -> x", {"x": "all dimensions, permuted"}, {0: "`x`"}, "x"),
    "`upsample_nearest2d`": Rule(
        "b h w -> b h w",
        {"b": "all other dimensions", "h": "height", "w": "width"},
        {0: "`x`"},
        "b",
        gathered="hw",
    ),
    "`resize`": Rule(
        "b r -> b r",
        {"b": "all other dimensions", "r": "those that are resized"},
        {0: "`image`"},
        "b",
        gathered="r",
    ),
    "`segment_sum`": Rule(
        "n t, n -> s t",
        {"n": "rows of `data`", "s": "rows of the result", "t": TRAILING},
        {0: "`data`"},
        "t",
    ),
    "`scatter_add`": Rule(
        "s t, n, n t -> s t",
        {"n": "rows of `updates`", "s": "rows of `operand`", "t": TRAILING},
        {0: "`operand`", 2: "`updates`"},
        "t",
    ),
    "`embedding_lookup`": Rule(
        "s t, n -> n t",
        {"s": "rows of `table`", "n": "`ids`", "t": TRAILING},
        {0: "`table`"},
        "t",
    ),
    "`softmax`": Rule("b n -> b n", OTHERS, {0: "`x`"}, "b", gathered="n"),
    "`log_softmax`": Rule("b n -> b n", OTHERS, {0: "`x`"}, "b", gathered="n"),
    "`logsumexp`": Rule("b n -> b", IN_PARTS, {0: "`a`"}, "b"),
    "`softmax_cross_entropy_with_integer_labels`": Rule(
        "b n, b -> b", IN_PARTS, {0: "`logits`"}, "b"
    ),
    "`layer_norm`": Rule(
        "b n, n, n -> b n", OTHERS, {0: "`x`", 1: "`scale`", 2: "`bias`"}, "b", gathered="n"
    ),
    "`rms_norm`": Rule("b n, n -> b n", OTHERS, {0: "`x`", 1: "`scale`"}, "b", gathered="n"),
    "`group_norm`": Rule(
        "b p n, n, n -> b p n",
        {"b": "the first dimension", "p": "pixels", "n": "channels"},
        {0: "`x`", 1: "`scale`", 2: "`bias`"},
        "b",
        gathered="pn",
    ),
    "`message_sum`": Rule(
        "m t, n, n, n -> s t",
        {"m": "rows of `table`", "n": "edges", "s": "rows of the result", "t": TRAILING},
        {0: "`table`", 3: "`weights`"},
        "t",
        gathered="ms",
    ),
}


def table() -> str:
    """The tables of docs/sharding.md."""
    titles = ("", "no communication", "one all-reduce", "one in the gradient", "gathered")
    rows = [titles, ("---",) * len(titles)]
    rows += [(op, *("; ".join(c) or "-" for c in rule.columns())) for op, rule in RULES.items()]
    of_rows = ("", "rows of the updates", "in the gradient", "rows of the result, in the gradient")
    more = [of_rows, ("---",) * len(of_rows)]
    for ops, sent in REDUCTIONS.items():
        names = ", ".join(f"`{op}`" for op in ops)
        counts = ("".join(f"{n} {what}{'s' * (n > 1)}" for what, n in s.items()) for s in sent)
        more.append((names, *(count or "-" for count in counts)))
    return "\n\n".join("\n".join(f"| {' | '.join(r)} |" for r in part) for part in (rows, more))


# The collectives of reductions of rows: if the rows of updates are sharded, the additional ones in
# the gradient then, and those in the gradient if rows of the result are sharded. Sharding other
# dimensions needs none.
REDUCTIONS: Mapping[tuple[str, ...], tuple[Mapping[str, int], ...]] = {
    # One of the two all-reduces is for NaNs.
    ("segment_max", "segment_min", "scatter_max", "scatter_min"): (
        {"all-reduce": 2},
        {"all-reduce": 1},
        {"all-reduce": 2},
    ),
    ("segment_prod",): ({"all-gather": 1}, {}, {"all-reduce": 1}),
    ("scatter_mul",): ({"all-gather": 1}, {"all-gather": 1}, {"all-reduce": 1}),
    ("segment_mean",): ({"all-reduce": 2}, {}, {"all-reduce": 1}),
    ("segment_softmax",): ({"all-reduce": 3}, {"all-reduce": 1}, {}),
}


def rule_of(case: Case) -> Rule:
    return RULES.get(f"`{case.function}`", RULES["elementwise operations"])


# --- ways to shard the ops, which the tests go through -------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """A case, the letters of its dimensions, and the mesh axes that shard them."""

    case: Case
    equation: str
    axes: Mapping[str, Any]
    wrt: tuple[int, ...]

    def __str__(self) -> str:
        sharded = ", ".join(f"{letter}={''.join(axes)}" for letter, axes in self.axes.items())
        return f"{self.case}({sharded})" + "".join(f"-d{i}" for i in self.scalars)

    @property
    def operands(self) -> list[str]:
        return split(self.equation)[0]

    @property
    def result(self) -> str:
        return split(self.equation)[1]

    @property
    def scalars(self) -> tuple[int, ...]:
        """The scalars among the operands that the case is differentiated with respect to."""
        return tuple(i for i in self.wrt if not self.operands[i])

    def spec(self, letters: str) -> P:
        return P(*(self.axes.get(letter) for letter in letters))

    def specs(self) -> list[P]:
        return [self.spec(letters) for letters in self.operands]

    def summed(self) -> tuple[str, ...]:
        """The mesh axes that the result is summed over."""
        return tuple(a for x, axes in self.axes.items() if x not in self.result for a in axes)

    def on(self, mesh: jax.sharding.Mesh) -> "Layout":
        """The layout without the dimensions that are sharded over a single device of this mesh."""
        sizes = {x: math.prod(mesh.shape[a] for a in axes) for x, axes in self.axes.items()}
        return self.sharded(**{x: axes for x, axes in self.axes.items() if sizes[x] > 1})

    def all_reduces(self) -> tuple[int, int]:
        """The number of all-reduces that the law allows, in the function and in its gradients."""
        kept = [x for x in self.axes if x in self.result]
        gradients = [any(x not in self.operands[i] for x in kept) for i in self.wrt]
        if self.case.op and self.case.op.family == "rows":
            # The all-reduces of scale and bias are combined; maxima and sums need one each.
            return 2 * bool(self.summed()), any(gradients)
        return bool(self.summed()), sum(gradients)

    def sharded(self, **axes: Any) -> "Layout":
        return dataclasses.replace(self, axes=axes)

    def shard_size(self, letters: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> int:
        """The number of elements of one device's shard of an array."""
        axes = [a for letter in letters for a in self.axes.get(letter, ())]
        return math.prod(shape) // math.prod(mesh.shape[a] for a in axes)


def layout(case: Case, equation: str, wrt: tuple[int, ...] | None = None, **axes: Any) -> Layout:
    return Layout(case, equation, axes, case.wrt if wrt is None else wrt)


def sized(case: Case, equation: str, **sizes: int) -> Case:
    """The case with other sizes for the dimensions of some letters."""
    shapes = (
        tuple(sizes.get(x, size) for x, size in zip(letters, shape, strict=True))
        for letters, shape in zip(split(equation)[0], case.shapes, strict=True)
    )
    return dataclasses.replace(case, shapes=tuple(shapes))


# Elementwise ops with one, two and three arrays, which represent all in tests of shared code.
SEVERAL_WAYS = ("leaky_relu", "swiglu", "fma")


def elementwise_layouts() -> Iterator[Layout]:
    for case in ELEMENTWISE_CASES:
        letters = ["xyz" if shape else "" for shape in case.shapes]
        equation = f"{','.join(letters)}->xyz"
        case = case.resized((8, 4, 6))
        yield layout(case, equation, x="a", z="b")
        if case.name in SEVERAL_WAYS:
            yield layout(case, equation, x=("a", "b"))
            yield layout(case, equation, z="b")
        if not all(letters):
            wrt = tuple(i for i, x in enumerate(letters) if i in case.wrt or not x)
            yield layout(case, equation, wrt, x=("a", "b"))


def kernel_layouts() -> Iterator[Layout]:
    letters = {0: "", 1: "l", 2: "xyl"}
    for case in KERNEL_CASES:
        operands = [letters[len(shape)] for shape in case.shapes]
        equation = f"{','.join(operands)}->xyl"
        case = case.resized((8, 4, 6))
        yield layout(case, equation, x="a", l="b")
        yield layout(case, equation, x=("a", "b"))
        yield layout(case, equation, l="b")
        if not all(operands):
            yield layout(case, equation, case.every_operand, x="a", l="b")


def upsample_layouts() -> Iterator[Layout]:
    cases = {case.name.partition("-")[2]: case for case in UPSAMPLE_CASES}
    for name, equation, *sharded in (
        ("2x-NCHW", "nchw->nchw", {"n": "a", "c": "b"}, {"n": ("b", "a")}, {"c": "a"}),
        ("2x-NHWC", "nhwc->nhwc", {"n": "a", "c": "b"}, {"c": "a"}),
        ("exact-NHWC", "hwc->hwc", {"c": ("a", "b")}),
        ("3x2-rank3", "nhw->nhw", {"n": "b"}),
        ("down-rank5", "nmchw->nmchw", {"n": "a", "c": "b"}),
    ):
        case = sized(cases[name], equation, n=8, c=8)
        for axes in sharded:
            yield layout(case, equation, **axes)


def resize_layouts() -> Iterator[Layout]:
    _, one = RESIZE_CASES
    case, equation = sized(one, "nrm->nrm", n=8, m=8), "nrm->nrm"
    yield layout(case, equation, n="a", m="b")
    yield layout(case, equation, n=("b", "a"))


def permute_layouts() -> Iterator[Layout]:
    cycle, backwards = PERMUTE_CASES
    cycle, equation = sized(cycle, "ijk->kij", i=8), "ijk->kij"
    yield layout(cycle, equation, i="a", k="b")
    yield layout(cycle, equation, i=("a", "b"))
    yield layout(sized(backwards, "ijkl->lkji", l=8), "ijkl->lkji", k="b", l="a")


# Enough rows that each device looks up ids in its own rows, instead of all-gathering the table.
SEGMENTS = 64


def ids_around(rng, shape):
    """Ids of rows, negative ones, and some out of range. They are numbers, which cases cast."""
    return rng.integers(-SEGMENTS - 2, SEGMENTS + 3, size=shape)


def rows_cases() -> dict[str, Case]:
    def case(op, shapes, target, grad_target, **options):
        samplers = tuple(integers if len(shape) > 1 else ids_around for shape in shapes)
        return case_of(
            op,
            "",
            shapes,
            target,
            options=options,
            grad_targets={op.wrt: (grad_target,)},
            jvp_targets=(target,) * 2,
            samplers=samplers,
        )

    rows, features = (SEGMENTS, 4, 8), (16, 4, 8)
    ids = features[:1]
    add, gather = "jof_scatter_add", "jof_gather_rows"
    cases = (
        case(SEGMENT_SUM, (features, ids), add, gather, num_segments=SEGMENTS),
        case(SCATTER_ADD, (rows, ids, features), add, gather),
        case(EMBEDDING_LOOKUP, (rows, ids), gather, add),
    )
    return {case.name: case for case in cases}


def rows_layouts() -> Iterator[Layout]:
    cases = rows_cases()
    for name, equation in (
        ("segment_sum", "ntu,n->stu"),
        ("scatter_add", "stu,n,ntu->stu"),
        ("embedding_lookup", "stu,n->ntu"),
    ):
        for axes in (
            {"n": "a", "u": "b"},
            {"n": ("a", "b")},
            {"t": "b", "u": "a"},
            {"s": "a"},
            {"s": ("b", "a")},
            {"s": "b", "n": "a"},
            {"s": "a", "t": "b"},
        ):
            yield layout(cases[name], equation, **axes)


def reduced_rows_layouts() -> Iterator[Layout]:
    equations = {
        "softmax": "bcn->bcn",
        "log_softmax": "bcn->bcn",
        "logsumexp": "bcn->bc",
        "softmax_cross_entropy_with_integer_labels": "bcn,bc->bc",
        "layer_norm-operands": "bcn,n,n->bcn",
        "rms_norm-operands": "bcn,n->bcn",
        "layer_norm-axis1": "bnc,n,n->bnc",
        "group_norm": "bpn,n,n->bpn",
    }
    for case in ROWS_CASES:
        if equation := equations.get(case.name):
            sizes = {"b": 8, "c": 4, "p": 4, "n": 64 if equation.endswith("->bc") else 3}
            shapes = (tuple(sizes[x] for x in side) for side in split(equation)[0])
            case = dataclasses.replace(case, shapes=tuple(shapes))
            if equation.endswith("->bc"):  # the case keeps the axis in the result
                f, ref = (of_numbers(case.op, f) for f in (case.op.function, case.op.replaces))
                case = dataclasses.replace(case, f=f, ref=ref)
            if "c" in equation:
                yield layout(case, equation, b="a", c="b")
            yield layout(case, equation, b=("a", "b"))
            if equation.endswith("->bc"):
                yield layout(case, equation, n=("a", "b"))
                yield layout(case, equation, b="b", n="a")


def graph_layouts() -> Iterator[Layout]:
    equation = "mt,n,n,n->st"
    case = sized(GRAPH_CASES[0], equation, t=8, n=16)
    yield layout(case, equation, t="b")
    yield layout(case, equation, n="a", t="b")


REDUCTION_TARGETS = {
    "segment_prod": "jof_scatter_multiply",
    "scatter_mul": "jof_scatter_multiply",
    "segment_mean": "jof_scatter_add",
    "segment_softmax": "jof_scatter_max",
}


def ids_in_range(rng, shape):
    return rng.integers(0, SEGMENTS, size=shape)


def unique_ids(rng, shape):
    """Unique ids, as the derivative of a product needs; some are too large."""
    return rng.permutation(SEGMENTS + 8)[: shape[0]]


def reduction_layouts() -> Iterator[Layout]:
    rows, features = (SEGMENTS, 4, 8), (16, 4, 8)
    for op in (BY_NAME[name] for names in REDUCTIONS for name in names):
        segments = op.name.startswith("segment_")
        shapes = (features, features[:1]) if segments else (rows, features[:1], features)
        options = {"num_segments": SEGMENTS} if segments else {"unique_indices": True}
        product = op.name in ("segment_prod", "scatter_mul")
        known = op.name == "segment_softmax"  # other ids give NaN in JAX
        ids = unique_ids if product else ids_in_range if known else ids_around
        case = case_of(
            op,
            "",
            shapes,
            REDUCTION_TARGETS.get(op.name, f"jof_scatter_{op.name.partition('_')[2]}"),
            options=options if segments or product else {},
            # All operands except the ids. The tests do not check the custom calls.
            grad_targets={tuple(i for i, s in enumerate(shapes) if len(s) > 1): ()},
            jvp_targets=(),
            samplers=tuple(ids if len(s) == 1 else integers for s in shapes),
            rtol=1e-6,
        )
        equation = "ntu,n->stu" if segments else "stu,n,ntu->stu"
        equation = equation.replace("->stu", "->ntu") if known else equation
        for axes in ({"n": "a", "u": "b"}, {"n": ("b", "a")}, {"t": "b", "u": "a"}):
            yield layout(case, equation, **axes)
        if not known:
            yield layout(case, equation, s="b", n="a")


REDUCTION_LAYOUTS = (*reduction_layouts(),)


LAYOUTS = (
    *elementwise_layouts(),
    *kernel_layouts(),
    *upsample_layouts(),
    *resize_layouts(),
    *permute_layouts(),
    *rows_layouts(),
    *reduced_rows_layouts(),
    *graph_layouts(),
)
