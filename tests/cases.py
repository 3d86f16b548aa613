"""One row for each op and variant that the table-driven tests share: transformations, lowering,
sharding. A new op joins them by its row."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from tests import kernels, oracle

Shape = tuple[int, ...]
Sampler = Callable[[np.random.Generator, Shape], np.ndarray]


def integers(rng, shape):
    """So small that cubes of results and their sums are exact; with zeros and equal pairs."""
    return rng.integers(-2, 3, size=shape)


def nonzero_integers(rng, shape):
    return rng.choice([-2, -1, 1, 2], size=shape)


def normals(rng, shape):
    return 1.5 * rng.standard_normal(shape)


def positive(rng, shape):
    return rng.uniform(0.5, 2.0, size=shape)


# How a scatter-add may be done. Platforms and shapes choose: a case's targets are without it.
WAYS = ("sorted", "private", "atomic")


def without_way(target: str) -> str:
    name, _, way = target.rpartition("_")
    return name if way in WAYS else target


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays and scalars, and the same function in plain jnp."""

    name: str
    f: Callable[..., jax.Array]  # takes `implementation`, too, where it is no kernel
    ref: Callable[..., jax.Array]
    shapes: tuple[Shape, ...]  # of the operands; () is a scalar
    target: str  # the custom call that f lowers to
    # The custom calls of the gradient with respect to some operands together. The first entry has
    # all arrays that f can be differentiated with respect to.
    grad_targets: Mapping[tuple[int, ...], tuple[str, ...]]
    jvp_targets: tuple[str, ...]  # the custom calls of the value and the tangent, for all of these
    # The sets of operands that f is linear in while the others are fixed.
    linear: tuple[tuple[int, ...], ...] = ()
    samplers: tuple[Sampler, ...] | None = None  # of the operands; integers where there are none
    dtype: str = "float32"
    # 0: equal bit for bit. Otherwise relative to the largest number of a result, because sums of
    # what is wrong by this much may cancel.
    rtol: float = 0.0
    parameters: int = 0  # how many operands at the end are parameters
    besides: frozenset[str] = frozenset()  # HLO instructions of f besides the custom call
    grad_besides: frozenset[str] = frozenset()  # likewise of the gradient with respect to `wrt`
    # Whether another row is of the same function: it goes through the core columns only.
    variant: bool = False
    elementwise: bool = True  # f takes any shapes
    # Of a kernel as users write them: what docs/transformations.md says of it.
    kernel: str = ""
    # The operands' dimensions that may be symbolic, as `jax.export.symbolic_shape` reads them.
    # Those of an elementwise function are all.
    symbolic: tuple[str, ...] | None = None
    # Where a batch axis of all arrays needs not be moved; None: anywhere.
    free_axes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def function(self) -> str:
        """The public function that f calls: what its errors name."""
        if self.kernel:
            return "ElementwiseKernel"
        try:
            self.f(*self.inputs(), implementation="no such")
        except ValueError as error:
            return str(error).partition(":")[0]
        raise AssertionError(f"{self}: f does not pass `implementation` on")

    @property
    def shape(self) -> Shape:
        """The shape of the first array."""
        return self.shapes[self.arrays[0]]

    @property
    def arrays(self) -> tuple[int, ...]:
        """Which operands are no scalars."""
        return tuple(i for i, shape in enumerate(self.shapes) if shape) or (0,)

    @property
    def wrt(self) -> tuple[int, ...]:
        """The arrays that f is differentiated with respect to where its calls are counted."""
        return next(iter(self.grad_targets))

    @property
    def every_operand(self) -> tuple[int, ...]:
        return tuple(range(len(self.shapes)))

    def inputs(self, *leading: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        samplers = self.samplers or (integers,) * len(self.shapes)
        return tuple(
            np.asarray(sample(rng, (*leading, *shape)), self.dtype)
            for sample, shape in zip(samplers, self.shapes, strict=True)
        )

    def resized(self, shape: Shape) -> "Case":
        """The same case for arrays of another shape, and rows of its last axis."""
        assert self.elementwise
        of_rank = {0: (), 1: shape[-1:], len(self.shape): shape}
        return dataclasses.replace(self, shapes=tuple(of_rank[len(s)] for s in self.shapes))

    @property
    def symbolic_shapes(self) -> tuple[str, ...]:
        of_rank = ("", "b", "a, b")
        return self.symbolic or tuple(of_rank[len(shape)] for shape in self.shapes)

    def larger(self) -> "Case":
        """The same case where symbolic dimensions are larger."""
        shapes = tuple(
            tuple(n + 3 * d.strip().isalpha() for n, d in zip(shape, dims.split(","), strict=False))
            for shape, dims in zip(self.shapes, self.symbolic_shapes, strict=True)
        )
        return dataclasses.replace(self, shapes=shapes)

    def precision(self) -> contextlib.AbstractContextManager:
        """The setting that the case's dtype needs."""
        return jax.enable_x64(True) if self.dtype == "float64" else contextlib.nullcontext()

    def all_targets(self) -> set[str]:
        """The custom calls that any derivative may consist of."""
        known = {self.target, *self.jvp_targets}.union(*self.grad_targets.values())
        suffixes = ("vjp", "jvp", *WAYS)
        return known | {f"{target}_{suffix}" for target in known for suffix in suffixes}


def upsample_case(name, shape, method, data_format, *, out, **as_called) -> Case:
    axis = oracle.spatial_axis(len(shape), data_format)
    rows, cols = (
        oracle.source_indices(shape[axis + i], out[i], method).astype(np.int32) for i in (0, 1)
    )
    names = [str(n) if i in (axis, axis + 1) else "abcd"[i] for i, n in enumerate(shape)]

    def ref(x):
        return jnp.take(jnp.take(x, rows, axis=axis), cols, axis=axis + 1)

    return Case(
        f"upsample_nearest2d-{name}",
        functools.partial(
            jof.upsample_nearest2d, method=method, data_format=data_format, **as_called
        ),
        ref,
        (shape,),
        target="jof_upsample_nearest2d",
        grad_targets={(0,): ("jof_upsample_nearest2d_backward",)},
        jvp_targets=("jof_upsample_nearest2d",) * 2,
        linear=((0,),),
        elementwise=False,
        variant=name != "exact-NHWC",
        symbolic=(", ".join(names),),
    )


UPSAMPLE_CASES = (
    upsample_case("2x-NCHW", (2, 1, 3, 4), "nearest", "NCHW", scale_factor=2, out=(6, 8)),
    upsample_case("2x-NHWC", (2, 2, 3, 2), "nearest", "NHWC", scale_factor=2, out=(4, 6)),
    upsample_case("exact-NHWC", (3, 4, 2), "nearest-exact", "NHWC", size=(5, 7), out=(5, 7)),
    upsample_case("3x2-rank3", (2, 2, 3), "nearest", "NCHW", scale_factor=(3, 2), out=(6, 6)),
    upsample_case("down-rank5", (1, 2, 1, 5, 4), "nearest", "NCHW", size=(2, 3), out=(2, 3)),
)


def resize_case(name, shape, out, **options) -> Case:
    """`out` has the sizes of the dimensions that are resized, and None for the others."""
    names = ", ".join("abcd"[i] if out[i] is None else str(n) for i, n in enumerate(shape))

    def sizes(x):
        return tuple(n if o is None else o for n, o in zip(x.shape, out, strict=True))

    return Case(
        f"resize{name}",
        lambda x, **implementation: jof.resize(x, sizes(x), "nearest", **implementation),
        lambda x: jax.image.resize(x, sizes(x), "nearest"),
        (shape,),
        target="jof_upsample_nearest2d",
        grad_targets={(0,): ("jof_upsample_nearest2d_backward",)},
        jvp_targets=("jof_upsample_nearest2d",) * 2,
        linear=((0,),),
        elementwise=False,
        symbolic=(names,),
        **options,
    )


RESIZE_CASES = (
    resize_case("", (2, 3, 4), (None, 5, 8), free_axes=(0, 1, 3)),
    resize_case("-one", (2, 3, 2), (None, 9, None), free_axes=(0,), variant=True),
)


def permute_case(name, shape, axes, **options) -> Case:
    return Case(
        f"permute-{name}",
        functools.partial(jof.permute, axes=axes),
        functools.partial(jnp.transpose, axes=axes),
        (shape,),
        target="jof_permute",
        grad_targets={(0,): ("jof_permute",)},
        jvp_targets=("jof_permute",) * 2,
        linear=((0,),),
        elementwise=False,
        free_axes=(0,),
        symbolic=(", ".join("abcd"[: len(shape)]),),
        **options,
    )


PERMUTE_CASES = (
    permute_case("cycle", (2, 3, 4), (2, 0, -2)),
    permute_case("reversed", (3, 1, 2, 2), None, variant=True),
)

ARRAY, SCALAR = (2, 3), ()
# Double precision, where native and reference formulas agree to a few units of 2e-16: what a wrong
# rule would change by as little as 1e-12 is seen, kinks are not hit. The exact rest is on integers.
SMOOTH = {"dtype": "float64", "rtol": 1e-12}


def unary(name, f, ref, parameters=(), **options) -> Case:
    """A function of one array, and scalars that `parameters` samples."""
    target = f"jof_{name}"
    if options.get("dtype"):
        options.setdefault("samplers", (normals, *parameters))
    return Case(
        name,
        f,
        ref,
        (ARRAY, *(SCALAR,) * len(parameters)),
        target,
        options.pop("grad_targets", {(0,): (f"{target}_vjp",)}),
        options.pop("jvp_targets", (target, f"{target}_vjp")),
        parameters=len(parameters),
        **options,
    )


def binary(name, f, ref, *, linear=(), **options) -> Case:
    """A function of two arrays with derivative kernels, linear alone in each operand of `linear`:
    there the function itself is its derivative."""
    target = f"jof_{name}"
    vjp, jvp = f"{target}_vjp", f"{target}_jvp"
    return Case(
        name,
        f,
        ref,
        (ARRAY, ARRAY),
        target,
        {(0, 1): (vjp,)} | {(i,): (target if i in linear else vjp,) for i in range(2)},
        (target, jvp),
        linear=tuple((i,) for i in linear),
        **options,
    )


def with_scalar(case: Case, position: int, **options) -> Case:
    """The case with a scalar as one of its operands."""
    shapes = tuple(SCALAR if i == position else s for i, s in enumerate(case.shapes))
    wrt = tuple(i for i in case.wrt if i != position)
    grad_targets = {wrt: case.grad_targets[wrt]}
    grad_targets |= {k: v for k, v in case.grad_targets.items() if position not in k}
    options = {
        "name": f"{case.name}-scalar{position}",
        "jvp_targets": (case.target, *grad_targets[wrt]),
        "linear": tuple(s for s in case.linear if position not in s),
        "variant": True,
        **options,
    }
    if case.samplers is None:
        options["samplers"] = tuple(integers if s else nonzero_integers for s in shapes)
    return dataclasses.replace(case, shapes=shapes, grad_targets=grad_targets, **options)


def linear_sum(name, f, ref, **options) -> Case:
    target = f"jof_{name}"
    nothing = {(0, 1): (), (0,): (), (1,): ()}
    sets = ((0,), (1,), (0, 1))
    # A program that returns its argument copies it; the difference negates it.
    besides = frozenset({"copy"} if name == "add" else {"copy", "fusion", "negate"})
    return Case(
        *(name, f, ref, (ARRAY, ARRAY), target, nothing, (target, target)),
        linear=sets,
        grad_besides=besides,
        **options,
    )


def where(condition, x, y, **options):
    return jof.where(condition > 0, x, y, **options)


def where_ref(condition, x, y):
    return jnp.where(condition > 0, x, y)


def gelu_erf(x, **options):
    return jof.gelu(x, approximate=False, **options)


def geglu_erf(x, gate, **options):
    return jof.geglu(x, gate, approximate=False, **options)


BINARY_CASES = (
    linear_sum("add", jof.add, jnp.add),
    linear_sum("subtract", jof.subtract, jnp.subtract),
    binary("multiply", jof.multiply, jnp.multiply, linear=(0, 1)),
    binary(
        "divide",
        jof.divide,
        jnp.divide,
        linear=(0,),
        samplers=(normals, positive),
        **SMOOTH,
    ),
    binary("maximum", jof.maximum, jnp.maximum),
    binary("minimum", jof.minimum, jnp.minimum),
    binary(
        "swiglu",
        jof.swiglu,
        lambda x, gate: jax.nn.silu(gate) * x,
        linear=(0,),
        samplers=(normals, normals),
        **SMOOTH,
    ),
    binary(
        "geglu_tanh",
        jof.geglu,
        lambda x, gate: jax.nn.gelu(gate) * x,
        linear=(0,),
        samplers=(normals, normals),
        **SMOOTH,
    ),
    binary(
        "geglu_erf",
        geglu_erf,
        lambda x, gate: jax.nn.gelu(gate, approximate=False) * x,
        linear=(0,),
        samplers=(normals, normals),
        variant=True,
        **SMOOTH,
    ),
)
BINARY = {case.name: case for case in BINARY_CASES}

FMA = Case(
    "fma",
    jof.fma,
    lambda x, y, z: x * y + z,
    (ARRAY, ARRAY, ARRAY),
    "jof_fma",
    {
        (0, 1, 2): ("jof_multiply_vjp",),
        (0, 1): ("jof_multiply_vjp",),
        (0, 2): ("jof_multiply",),
        (1,): ("jof_multiply",),
        (2,): (),
    },
    ("jof_fma", "jof_multiply_jvp", "jof_add"),
    grad_besides=frozenset({"copy"}),  # the cotangent, returned as it came
)
WHERE = Case(
    "where",
    where,
    where_ref,
    (ARRAY, ARRAY, ARRAY),
    "jof_where",
    {(1, 2): ("jof_where_vjp",), (1,): ("jof_where_vjp",), (2,): ("jof_where_vjp",)},
    ("jof_where", "jof_where"),
    linear=((1,), (2,), (1, 2)),
    # The comparison that makes the condition of a number.
    besides=frozenset({"compare", "constant", "broadcast", "fusion"}),
)

ELEMENTWISE_CASES = (
    unary("relu", jof.relu, jax.nn.relu),
    unary(
        "leaky_relu",
        jof.leaky_relu,
        jax.nn.leaky_relu,
        (positive,),
        samplers=(integers, nonzero_integers),
    ),
    unary("elu", jof.elu, jax.nn.elu, (positive,), **SMOOTH),
    unary("sigmoid", jof.sigmoid, jax.nn.sigmoid, **SMOOTH),
    unary("silu", jof.silu, jax.nn.silu, **SMOOTH),
    unary("tanh", jof.tanh, jnp.tanh, **SMOOTH),
    unary("softplus", jof.softplus, jax.nn.softplus, **SMOOTH),
    unary("hard_swish", jof.hard_swish, jax.nn.hard_swish, **SMOOTH),
    unary("mish", jof.mish, jax.nn.mish, **SMOOTH),
    unary("gelu_tanh", jof.gelu, jax.nn.gelu, **SMOOTH),
    unary(
        "gelu_erf",
        gelu_erf,
        lambda x: jax.nn.gelu(x, approximate=False),
        variant=True,
        **SMOOTH,
    ),
    unary(
        "scale",
        jof.scale,
        lambda x, alpha: x * alpha,
        (integers,),
        grad_targets={(0,): ("jof_scale",)},
        jvp_targets=("jof_scale", "jof_scale"),
        linear=((0,),),
        samplers=(integers, nonzero_integers),
    ),
    unary(
        "cast",
        lambda x, **options: jof.cast(x, jnp.float16, **options),
        lambda x: jnp.asarray(x).astype(jnp.float16),
        grad_targets={(0,): ("jof_cast",)},
        jvp_targets=("jof_cast", "jof_cast"),
        linear=((0,),),
    ),
    *BINARY_CASES,
    with_scalar(BINARY["add"], 0, jvp_targets=("jof_add",)),
    with_scalar(BINARY["subtract"], 1, jvp_targets=("jof_subtract",)),
    with_scalar(BINARY["multiply"], 0),
    with_scalar(BINARY["multiply"], 1),
    with_scalar(BINARY["divide"], 0),
    with_scalar(BINARY["divide"], 1),
    with_scalar(BINARY["maximum"], 1),
    with_scalar(BINARY["minimum"], 0),
    with_scalar(BINARY["swiglu"], 0),
    with_scalar(BINARY["geglu_tanh"], 1),
    FMA,
    with_scalar(FMA, 2, jvp_targets=("jof_fma", "jof_multiply_jvp")),
    with_scalar(FMA, 1, jvp_targets=("jof_fma", "jof_multiply", "jof_add")),
    WHERE,
    with_scalar(WHERE, 2, jvp_targets=("jof_where",) * 2),
)

SEGMENTS = 5


def some_ids(rng, shape):
    """Repeated, negative and too large ones, as numbers: functions of a case cast them."""
    return rng.integers(-3, SEGMENTS + 2, size=shape)


def sorted_ids(rng, shape):
    """None negative, which would count from the end, and too large ones."""
    return np.sort(rng.integers(0, SEGMENTS + 2, size=shape))


def as_ids(x):
    return x.astype(jnp.int32)


def rows_of(x):
    """Ids that name rows whatever the columns of the table do to them: others give NaN."""
    return as_ids(x) % SEGMENTS - 2


# What makes ids of numbers, the operands that are not there, and the copy of one that is needed.
ID_ARITHMETIC = frozenset(
    {"add", "and", "broadcast", "compare", "constant", "convert", "copy", "fusion", "multiply"}
    | {"or", "remainder", "select", "sign", "subtract", "xor"}
)
ROWS = (7, 2)  # so narrow and many that CPUs do not sort


def of_rows(options: Mapping[str, object]) -> dict[str, object]:
    """What the cases of sums and lookups have in common. GPUs sort for sums in a fixed order."""
    sorting = {"sort", "iota", "get-tuple-element"} if options.get("deterministic") else set()
    return {"elementwise": False, "besides": ID_ARITHMETIC | sorting, "free_axes": (0,)}


def segment_sum_case(suffix="", ids=some_ids, mode=None, **options) -> Case:
    def f(x, ids, **implementation):
        return jof.segment_sum(x, as_ids(ids), SEGMENTS, mode=mode, **options, **implementation)

    return Case(
        f"segment_sum{suffix}",
        f,
        lambda x, ids: jax.ops.segment_sum(x, as_ids(ids), SEGMENTS, mode=mode),
        (ROWS, ROWS[:1]),
        "jof_scatter_add",
        {(0,): ("jof_gather_rows",)},
        ("jof_scatter_add",) * 2,
        linear=((0,),),
        samplers=(integers, ids),
        variant=bool(suffix),
        symbolic=("n, d", "n"),
        **of_rows(options),
    )


def scatter_add_case(suffix="", ids=some_ids, mode="drop", **options) -> Case:
    def f(x, ids, updates, **implementation):
        return jof.scatter_add(x, as_ids(ids), updates, mode=mode, **options, **implementation)

    return Case(
        f"scatter_add{suffix}",
        f,
        lambda x, ids, updates: jnp.asarray(x).at[as_ids(ids)].add(updates, mode=mode),
        ((SEGMENTS, 2), ROWS[:1], ROWS),
        "jof_scatter_add",
        {(0, 2): ("jof_gather_rows",), (2,): ("jof_gather_rows",), (0,): ()},
        ("jof_scatter_add",) * 2,
        linear=((0, 2),),
        samplers=(integers, ids, integers),
        variant=bool(suffix),
        symbolic=("s, d", "n", "n, d"),
        **of_rows(options),
    )


def embedding_case(suffix="", **options) -> Case:
    def f(table, ids, **implementation):
        return jof.embedding_lookup(table, rows_of(ids), **options, **implementation)

    return Case(
        f"embedding_lookup{suffix}",
        f,
        lambda table, ids: jnp.take(table, rows_of(ids), axis=0),
        ((SEGMENTS, 2), ROWS[:1]),
        "jof_gather_rows",
        {(0,): ("jof_scatter_add",)},
        ("jof_gather_rows",) * 2,
        linear=((0,),),
        samplers=(integers, some_ids),
        variant=bool(suffix),
        symbolic=("s, d", "n"),
        **of_rows(options),
    )


SCATTER_CASES = (
    segment_sum_case(),
    segment_sum_case("-clip", mode="clip"),
    segment_sum_case("-sorted", sorted_ids, indices_are_sorted=True),
    segment_sum_case("-deterministic", deterministic=True),
    scatter_add_case(),
    scatter_add_case("-clip", mode="clip"),
    scatter_add_case("-sorted", sorted_ids, indices_are_sorted=True),
    scatter_add_case("-deterministic", deterministic=True),
    embedding_case(),
    embedding_case("-deterministic", deterministic=True),
)


def kernel_case(name, f, ref, what, **options) -> Case:
    """Of one kernel, as is each of its derivatives."""
    shapes = options.pop("shapes")
    arrays = tuple(i for i, shape in enumerate(shapes) if shape)
    target = "jof_generated"
    return Case(
        *(name, f, ref, shapes, target),
        {arrays: (target,)} | {(i,): (target,) for i in arrays},
        (target, target),
        samplers=(normals,) * len(shapes),
        kernel=what,
        **SMOOTH,
        **options,
    )


def of_both_outputs(rotation):
    """One array, as the columns take it, to which each output adds in its own way."""

    def f(*xs):
        u, v = rotation(*xs)
        return 2 * u - v

    return f


KERNEL_CASES = (
    kernel_case(
        "softsign",
        lambda x: kernels.softsign(x),
        kernels.softsign_ref,
        "one input",
        shapes=(ARRAY,),
    ),
    kernel_case(
        "scaled_silu",
        lambda x, bias, alpha: kernels.scaled_silu(x, bias, alpha),
        kernels.scaled_silu_ref,
        "an array, a row and a scalar",
        shapes=(ARRAY, ARRAY[-1:], SCALAR),
        # What sums the cotangent of the row.
        grad_besides=frozenset({"add", "constant", "fusion", "reduce"}),
        free_axes=(),  # a row of each example is broadcast
    ),
    kernel_case(
        "rotation",
        of_both_outputs(kernels.rotation),
        of_both_outputs(kernels.rotation_ref),
        "three inputs, two outputs",
        shapes=(ARRAY, ARRAY, ARRAY),
        # What makes one of the outputs, and their cotangents of one.
        besides=frozenset({"broadcast", "constant", "fusion", "multiply", "negate", "subtract"}),
    ),
)

# The rows that are public functions, and the kernels.
FUNCTIONS = (*UPSAMPLE_CASES, *RESIZE_CASES, *PERMUTE_CASES, *ELEMENTWISE_CASES, *SCATTER_CASES)
CASES = (*FUNCTIONS, *KERNEL_CASES)

# One row for each kind of machinery, for tests of what all rows of a kind share.
_REPRESENTATIVE = {
    *("upsample_nearest2d-exact-NHWC", "permute-cycle", "scatter_add", "add-scalar0", "cast"),
    *("fma", "leaky_relu", "multiply", "sigmoid", "swiglu", "where"),
}
REPRESENTATIVE = tuple(case for case in CASES if case.name in _REPRESENTATIVE)
