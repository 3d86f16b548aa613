"""The C++ source of an elementwise kernel: its value or a derivative."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from jax_oneflow_ops import _operands
from jax_oneflow_ops._codegen.definition import Definition, Position, partial
from jax_oneflow_ops._codegen.signature import TYPES, bind_variables, computed_in, is_narrow
from jax_oneflow_ops._codegen.text import OURS, rewritten
from jax_oneflow_ops._codegen.traced import Traced

Mode = Literal["value", "jvp", "vjp"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One kernel to be generated: a definition's value, or its derivative in one direction.

    The operands are the inputs `primals`, followed by the tangents of the inputs `ins` for "jvp" or
    the cotangents of the outputs `outs` for "vjp". The results are the outputs `outs` for "value",
    their tangents for "jvp", and the cotangents of the inputs `ins` for "vjp".
    """

    definition: Definition
    mode: Mode
    dtypes: tuple[str, ...]  # of all inputs
    primals: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]

    def __str__(self) -> str:  # in printed jaxprs
        return self.definition.name + ("" if self.mode == "value" else f" {self.mode}")

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        outputs = self.definition.output_dtypes(self.dtypes)
        others: tuple[str, ...] = ()
        if self.mode == "jvp":
            others = tuple(self.dtypes[i] for i in self.ins)
        elif self.mode == "vjp":
            others = tuple(outputs[o] for o in self.outs)
        return (*(self.dtypes[i] for i in self.primals), *others)

    @property
    def result_dtypes(self) -> tuple[str, ...]:
        if self.mode == "vjp":
            return tuple(self.dtypes[i] for i in self.ins)
        outputs = self.definition.output_dtypes(self.dtypes)
        return tuple(outputs[o] for o in self.outs)

    @property
    def is_narrow(self) -> bool:
        """Whether all results have 16 bits or fewer, so that math may be less accurate."""
        return all(map(is_narrow, self.result_dtypes))

    def partials(self) -> dict[Position, Definition]:
        """The derivatives that are not zero."""
        return {
            (o, i): found
            for o in self.outs
            for i in self.ins
            if (found := partial(self.definition, (o, i), self.dtypes)) is not None
        }

    def texts(self) -> dict[str, str]:
        """The user's C++ in the kernel, by the labels that compilers show."""
        written = [self.definition] if self.mode == "value" else [*self.partials().values()]
        return {label: text for d in written for label, text in d.body.texts.items()}


@functools.lru_cache(maxsize=256)
def value_spec(definition: Definition, dtypes: tuple[str, ...]) -> Spec:
    """The spec of the values of all outputs."""
    inputs, outputs = (tuple(range(len(s))) for s in (definition.inputs, definition.outputs))
    return Spec(definition, "value", dtypes, inputs, (), outputs)


def derivative_spec(
    definition: Definition,
    mode: Mode,
    dtypes: Sequence[str],
    ins: Iterable[int],
    outs: Iterable[int],
) -> Spec:
    """The spec of a derivative, whose primals are only the inputs that it reads."""
    spec = Spec(definition, mode, tuple(dtypes), (), tuple(ins), tuple(outs))
    read = {i for d in spec.partials().values() for i in d.reads}
    return dataclasses.replace(spec, primals=tuple(sorted(read)))


_HEADERS = {"cpu": "cpu/compiled.h", "cuda": "cuda/compiled.cuh"}
_QUALIFIERS = "JOF_HOST_DEVICE JOF_INLINE"
# Defined in sources without float16: its conversions take compilers long to read.
WITHOUT_HALF = "#define JOF_WITHOUT_HALF"
# Defined in sources without the user's C++ text. The math.h of libstdc++ declares the functions of
# C++ and of C, which takes a third of a kernel's compile time. Other libraries ignore this macro.
MATH_OF_C = "#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS"


def macros(dtypes: Iterable[str], headers: Iterable[str] = (Traced.header,)) -> list[str]:
    """The lines that leave out what a source with these dtypes and headers does not need."""
    return [
        *([] if "float16" in dtypes else [WITHOUT_HALF]),
        *([MATH_OF_C] if [*headers] == [Traced.header] else []),
    ]


def source(spec: Spec, kinds: Sequence[int], platform: str, *, safe_division: bool = True) -> str:
    """The C++ or CUDA source of a kernel for operands of the given kinds.

    Without safe division, the user's text is not rewritten: see `Text.statements`.
    """
    functions = _Functions(spec.dtypes, safe_division)
    names = _operand_names(spec)
    if spec.mode == "value":
        body = [f"return {functions.call(spec.definition)};"]
    else:
        body = _derivative(spec, functions)
    signature = ", ".join(
        f"const {_computed(dtype)} jof_{name}"
        for name, dtype in zip(names, spec.operand_dtypes, strict=True)
    )
    results = spec.result_dtypes
    inputs = ", ".join(
        _operand_type(kind, TYPES[dtype])
        for kind, dtype in zip(kinds, spec.operand_dtypes, strict=True)
    )
    outputs = ", ".join(f"{TYPES[dtype]}*" for dtype in results)
    title = {"value": "", "jvp": "the JVP of ", "vjp": "the VJP of "}[spec.mode]
    title += "" if isinstance(spec.definition.body, Traced) else "ElementwiseKernel "
    includes, namespaces = functions.text()
    lines = [
        f"// {title}{spec.definition.name}: {spec.definition}",
        *(["#define JOF_NARROW_RESULTS"] if spec.is_narrow else []),
        *macros((*spec.operand_dtypes, *results), functions.headers),
        f'#include "{_HEADERS[platform]}"',
        *(f'#include "{header}"' for header in functions.headers),
        *includes,
        "namespace jof_expression {",
        *namespaces,
        "struct jof_functor {",
        f"  {_QUALIFIERS} {_returned(results)} operator()({signature}) const {{",
        *(f"    {line}" for line in body),
        "  }",
        "};",
        "}  // namespace jof_expression",
        f"using jof_outputs = jof::Tuple<{outputs}>;",
        f"using jof_inputs = jof::Tuple<{inputs}>;",
        "JOF_COMPILED_KERNEL(jof_expression::jof_functor, jof_outputs, jof_inputs)",
    ]
    return "\n".join(lines) + "\n"


def _operand_type(kind: int, element: str) -> str:
    """The C++ type of an operand; `kind` is one of `_operands`."""
    if kind >= _operands.BROADCAST:
        return f"jof::BroadcastOperand<{element}, {kind - _operands.BROADCAST}>"
    return f"jof::{('ArrayOperand', 'ScalarOperand')[kind]}<{element}>"


def _operand_names(spec: Spec) -> list[str]:
    """The operands' names in the generated code: x0 an input, t0 its tangent, ct0 a cotangent."""
    names = [f"x{i}" for i in spec.primals]
    if spec.mode == "jvp":
        names += [f"t{i}" for i in spec.ins]
    elif spec.mode == "vjp":
        names += [f"ct{o}" for o in spec.outs]
    return names


def _computed(dtype: str) -> str:
    return f"jof::Compute<{TYPES[dtype]}>" if dtype != "bool" else "bool"


def _returned(dtypes: Sequence[str]) -> str:
    types = ", ".join(map(_computed, dtypes))
    return types if len(dtypes) == 1 else f"jof::Tuple<{types}>"


def _derivative(spec: Spec, functions: "_Functions") -> list[str]:
    """The body of a derivative: a sum of derivatives times vectors for each result."""
    partials = spec.partials()
    outputs = spec.definition.output_dtypes(spec.dtypes)
    lines, names = [], []
    for (o, i), definition in partials.items():
        (dtype,) = definition.output_dtypes(spec.dtypes)
        factor = computed_in(dtype, spec.dtypes[i], outputs[o])
        lines.append(
            f"const auto jof_d{o}_{i} = jof_Convert<{TYPES[factor]}>::Of("
            f"{functions.call(definition)});"
        )
    results = spec.outs if spec.mode == "jvp" else spec.ins
    for k, dtype in zip(results, spec.result_dtypes, strict=True):
        terms = []
        for o, i in partials:
            if k != (o if spec.mode == "jvp" else i):
                continue
            (of,) = partials[o, i].output_dtypes(spec.dtypes)
            factor = TYPES[computed_in(of, spec.dtypes[i], outputs[o])]
            vector = f"jof_t{i}" if spec.mode == "jvp" else f"jof_ct{o}"
            product = f"jof_d{o}_{i} * jof_Convert<{factor}>::Of({vector})"
            terms.append(f"jof_Convert<{_computed(dtype)}>::Of({product})")
        names.append(f"jof_y{k}")
        lines.append(f"const {_computed(dtype)} jof_y{k} = {' + '.join(terms) or '{}'};")
    result = names[0] if len(names) == 1 else f"jof::MakeTuple({', '.join(names)})"
    return [*lines, f"return {result};"]


class _Functions:
    """The bodies as C++ functions, in one namespace for each preamble."""

    def __init__(self, dtypes: Sequence[str], safe_division: bool):
        self._dtypes = dtypes
        self._safe_division = safe_division
        self._namespaces: dict[tuple[str, str], list[list[str]]] = {}
        self.headers: dict[str, None] = {}

    def call(self, definition: Definition) -> str:
        """An expression that calls a definition's operation on the kernel's operands."""
        self.headers[definition.body.header] = None
        key = definition.body.preamble, definition.body.preamble_label
        space = [*self._namespaces, key].index(key)
        functions = self._namespaces.setdefault(key, [])
        name = f"jof_f{len(functions)}"
        functions.append(self._function(definition, name))
        args = (f"jof_x{i}" for i in definition.reads)
        return f"jof_n{space}::{name}::Of({', '.join(args)})"

    def _function(self, definition: Definition, name: str) -> list[str]:
        bound = bind_variables(definition.inputs, self._dtypes)
        results = definition.output_dtypes(self._dtypes)
        inputs = ", ".join(
            f"const {_computed(self._dtypes[i])} {definition.inputs[i].name}"
            for i in definition.reads
        )
        outputs = [(p.name, _computed(d)) for p, d in zip(definition.outputs, results, strict=True)]
        return [
            f"struct {name} {{",
            *(f"  using {letter} = {TYPES[dtype]};" for letter, dtype in bound.items()),
            f"  {_QUALIFIERS} static {_returned(results)} Of({inputs}) {{",
            *definition.body.statements(outputs, self._safe_division),
            "  }",
            "};",
        ]

    def text(self) -> tuple[list[str], list[str]]:
        """The #include lines of all preambles, and the namespaces."""
        includes: dict[str, list[str]] = {}
        lines: list[str] = []
        for k, ((preamble, label), functions) in enumerate(self._namespaces.items()):
            lines.append(f"namespace jof_n{k} {{")
            if preamble.strip():
                rest = (rewritten(preamble) if self._safe_division else preamble).split("\n")
                for number, line in enumerate(rest):
                    if re.match(r"\s*(#|%:)\s*include\b", line):
                        includes.setdefault(line, [f'#line {number + 1} "{label}"', line, OURS])
                        rest[number] = ""
                lines += [f'#line 1 "{label}"', *rest, OURS]
            lines += [line for function in functions for line in function]
            lines.append(f"}}  // namespace jof_n{k}")
        return [line for three in includes.values() for line in three], lines
