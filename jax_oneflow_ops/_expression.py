"""What a user writes for an ElementwiseKernel, checked, and the C++ source that is made of it.

Everything here is text: nothing compiles, and no jax backend starts.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union

Mode = Literal["value", "jvp", "vjp"]
Position = tuple[int, int]  # of a derivative: of which output, with respect to which input

# Of csrc/ops/generated.h. A derivative kernel has the inputs and a tangent or cotangent for each.
MAX_INPUTS = 16
MAX_OUTPUTS = 16

# How an operand is laid out beside the results: as they are, as one element, along the last axis.
ARRAY, SCALAR, ROW = range(3)

# The dtypes that parameters may have, and the C++ types of their elements.
TYPES = {
    "bool": "bool",
    **{f"{u}int{bits}": f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)},
    "float8_e4m3fn": "jof::Float8E4M3FN",
    "float8_e5m2": "jof::Float8E5M2",
    "float16": "jof::Half",
    "bfloat16": "jof::BFloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "jof::Complex<float>",
    "complex128": "jof::Complex<double>",
}

_CPP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t
        char16_t char32_t class compl concept const consteval constexpr constinit const_cast
        continue co_await co_return co_yield decltype default delete do double dynamic_cast else
        enum explicit export extern false float for friend goto if inline int long mutable
        namespace new noexcept not not_eq nullptr operator or or_eq private protected public
        register reinterpret_cast requires restrict return short signed sizeof static static_assert
        static_cast struct switch template this thread_local throw true try typedef typeid typename
        union unsigned using virtual void volatile wchar_t while xor xor_eq""",
    )
)
# Macros of the compilers and of math.h, which would be replaced.
_MACROS = r"NAN|INFINITY|HUGE_VALF?|NULL|M_\w+|FP_\w+|MATH_\w+|linux|unix"
_NAME = r"(?a:[A-Za-z_]\w*)"


def why_reserved(name: str) -> str | None:
    """Why a parameter or a kernel may not have a name, or None where it may."""
    if name in _CPP_WORDS:
        return "is a word of C++"
    if name.lower().startswith("jof"):
        return "begins with jof, as the generated code's own names do"
    if "__" in name or re.match("_[A-Z]", name):
        return "is reserved for C++ compilers"
    if re.fullmatch(_MACROS, name):
        return "is a macro of C++ compilers"
    return None


# ---- what the user writes ----


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An input or an output: `T x`."""

    type: str  # a letter or a dtype's name
    name: str

    @property
    def is_variable(self) -> bool:
        """Whether the type is bound at the call."""
        return len(self.type) == 1

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


@dataclasses.dataclass(frozen=True)
class Definition:
    """A kernel as it was written."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    operation: str
    preamble: str = ""
    derivatives: tuple[tuple[Position, Union[str, "Definition", None]], ...] = ()
    # Not in what is written: programs are named by that, the same ones in every process.
    reference: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)
    # Of a derivative that was written as an expression: the kernel, the output and the input. Its
    # operation is that expression.
    origin: tuple[str, str, str] | None = None

    @property
    def label(self) -> str:
        """What compilers call the operation."""
        if self.origin is None:
            return f"operation of {self.name}"
        kernel, output, input_ = self.origin
        return f"derivative of {output} with respect to {input_} of {kernel}"

    @property
    def preamble_label(self) -> str:
        return f"preamble of {self.origin[0] if self.origin else self.name}"

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)


def parse_parameters(kernel: str, argument: str, text: Any) -> tuple[Parameter, ...]:
    """Reads "T x, float32 y"; raises TypeError or ValueError that names kernel and argument."""
    if not isinstance(text, str):
        raise TypeError(
            f'{kernel}: {argument} must be a string such as "T x, float32 y", got '
            f"{type(text).__name__}"
        )
    parameters: list[Parameter] = []
    for part in text.split(","):
        words = part.split()
        if len(words) != 2:
            hint = ""
            if words and words[0] in ("raw", "const"):
                hint = f'; "{words[0]}" of CuPy is not supported'
            raise ValueError(
                f'{kernel}: {argument} must be "type name" pairs with commas between them, such as '
                f'"T x, float32 y", got {part.strip()!r} in {text!r}{hint}'
            )
        type_, name = words
        _check_type(kernel, argument, type_)
        check_name(kernel, f"{argument}: a name", name)
        parameters.append(Parameter(type_, name))
    return tuple(parameters)


def _check_type(kernel: str, argument: str, type_: str) -> None:
    if type_ in TYPES or (len(type_) == 1 and type_.isascii() and type_.isalpha()):
        return
    meant = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}.get(type_)
    hint = f"; for C++'s {type_} write {meant}" if meant else ""
    raise ValueError(
        f"{kernel}: {argument}: a type must be a single letter, which stands for a dtype, or one "
        f"of {', '.join(TYPES)}, got {type_!r}{hint}"
    )


def check_name(kernel: str, what: str, name: Any) -> None:
    """Raises where `name` is no identifier of C++ or is reserved."""
    if not isinstance(name, str):
        raise TypeError(f"{kernel}: {what} must be a string, got {type(name).__name__}")
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            f"{kernel}: {what} must be letters, digits and underscores, a letter first, got "
            f"{name!r}"
        )
    if (reason := why_reserved(name)) is not None:
        raise ValueError(f"{kernel}: {what} may not be {name!r}, which {reason}")


def check_parameters(
    kernel: str, inputs: Sequence[Parameter], outputs: Sequence[Parameter]
) -> None:
    """Raises ValueError for what is wrong with all parameters together."""
    for argument, side, most in (
        ("in_params", inputs, MAX_INPUTS),
        ("out_params", outputs, MAX_OUTPUTS),
    ):
        if len(side) > most:
            raise ValueError(
                f"{kernel}: {argument} must have at most {most} parameters, got {len(side)}"
            )
    every = [*inputs, *outputs]
    names = [p.name for p in every]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{kernel}: parameters must have different names, got {name!r} twice")
    letters = {p.type for p in every if p.is_variable}
    for name in names:
        if name in letters:
            raise ValueError(
                f"{kernel}: {name!r} is a parameter's name and a type; give one of them another "
                "letter"
            )
    bound = {p.type for p in inputs if p.is_variable}
    for p in outputs:
        if p.is_variable and p.type not in bound:
            raise ValueError(
                f"{kernel}: out_params: the type {p.type} of {p.name!r} is not that of an input; "
                f"write a dtype's name, such as float32, or one of the inputs' types: "
                f"{', '.join(p.type for p in inputs)}"
            )


def check_code(kernel: str, what: str, text: Any, *, required: bool = True) -> None:
    """Raises where `text` cannot be C++ inside a function: empty, or its brackets do not match.

    What ended the function early would make the compiler speak of code that is not the user's.
    """
    if not isinstance(text, str):
        raise TypeError(f"{kernel}: {what} must be a string of C++, got {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{kernel}: {what} must be text, got a NUL character in it")
    code = without_comments(text)
    if code is None:
        raise ValueError(f"{kernel}: {what} has a comment or a string that does not end: {text!r}")
    if required and not code.strip("; \t\r\n"):
        raise ValueError(f"{kernel}: {what} must not be empty, got {text!r}")
    closing = {")": "(", "]": "[", "}": "{"}
    opened: list[tuple[str, int]] = []
    for number, line in enumerate(code.split("\n"), 1):
        for character in line:
            if character in "([{":
                opened.append((character, number))
            elif character in closing and (not opened or opened.pop()[0] != closing[character]):
                raise ValueError(
                    f"{kernel}: {what}, line {number}: {character!r} closes nothing: {text!r}"
                )
    if opened:
        bracket, number = opened[-1]
        raise ValueError(f"{kernel}: {what}, line {number}: {bracket!r} is never closed: {text!r}")


_COMMENT_OR_STRING = (
    r"""//[^\n]*|(?s:/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')|(?P<open>/\*|["'])"""
)


def without_comments(text: str) -> str | None:
    """C++ with blanks for comments and strings, lines kept; None where one does not end."""
    text = re.sub(r"(?<=[0-9A-Fa-f])'(?=[0-9A-Fa-f])", "", text)  # digits: 1'000
    if any(match["open"] for match in re.finditer(_COMMENT_OR_STRING, text)):
        return None
    return re.sub(_COMMENT_OR_STRING, lambda m: " " + "\n" * m[0].count("\n"), text)


# ---- types, once they are bound ----


def bind_variables(parameters: Sequence[Parameter], dtypes: Sequence[str]) -> dict[str, str]:
    """The dtype of each letter."""
    return {p.type: dtype for p, dtype in zip(parameters, dtypes, strict=True) if p.is_variable}


def output_dtypes(definition: Definition, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Those of the outputs where `dtypes` are the inputs'."""
    bound = bind_variables(definition.inputs, dtypes)
    return tuple(bound.get(p.type, p.type) for p in definition.outputs)


def is_inexact(dtype: str) -> bool:
    """Whether there is a derivative with respect to values of the dtype."""
    return "float" in dtype or "complex" in dtype


def computed_in(*dtypes: str) -> str:
    """The dtype that values are computed in, those of several dtypes together."""
    if len(set(dtypes)) == 1 and not is_inexact(dtypes[0]):
        return dtypes[0]
    wide = any(dtype in ("float64", "complex128") for dtype in dtypes)
    if any("complex" in dtype for dtype in dtypes):
        return "complex128" if wide else "complex64"
    return "float64" if wide else "float32"


def mentioned(definition: Definition) -> tuple[int, ...]:
    """The inputs that the operation may read: any whose name is in it."""
    code = without_comments(definition.operation)
    if code is None or "#" in definition.preamble:  # a macro may name any
        return tuple(range(len(definition.inputs)))
    words = set(re.findall(_NAME, code))
    return tuple(i for i, p in enumerate(definition.inputs) if p.name in words)


def partial(definition: Definition, position: Position, dtypes: Sequence[str]) -> Definition | None:
    """The derivative of an output with respect to an input, as a kernel; None where it is zero.

    Raises NotImplementedError where the user has given none.
    """
    o, i = position
    output, input_ = definition.outputs[o].name, definition.inputs[i].name
    derivative: str | Definition | None
    try:
        derivative = dict(definition.derivatives)[position]
    except KeyError:
        raise NotImplementedError(_no_derivative(definition, output, input_)) from None
    if derivative is None:
        return None
    reference = definition.reference and PartialReference(
        definition.reference, len(definition.outputs), position
    )
    if isinstance(derivative, Definition):
        if derivative.reference is not None:
            return derivative
        return dataclasses.replace(derivative, reference=reference)
    own, of = dtypes[i], output_dtypes(definition, dtypes)[o]
    return Definition(
        name=f"{definition.name}_d{output}_d{input_}",
        inputs=definition.inputs,
        outputs=(Parameter(own if own == of else computed_in(own, of), "jof_derivative"),),
        operation=derivative,
        preamble=definition.preamble,
        reference=reference,
        origin=(definition.name, output, input_),
    )


def _no_derivative(definition: Definition, output: str, input_: str) -> str:
    if definition.origin is not None:
        kernel, of, respect = definition.origin
        return (
            f"{kernel}: the derivative of {of} with respect to {respect} is an expression, which "
            f"cannot be differentiated again, with respect to {input_}. Remedy: give that "
            "derivative as an ElementwiseKernel that has derivatives of its own."
        )
    key = f'"{input_}"' if len(definition.outputs) == 1 else f'("{output}", "{input_}")'
    return (
        f"{definition.name}: there is no derivative of {output} with respect to {input_}. Remedy: "
        f"give one when the kernel is made, derivatives={{{key}: ...}}, None for zero; or stop the "
        f"gradient of {input_} with jax.lax.stop_gradient."
    )


@dataclasses.dataclass(frozen=True)
class PartialReference:
    """The derivative of one output of a reference with respect to one input, as a reference."""

    reference: Callable[..., Any]
    outputs: int
    position: Position

    def __call__(self, *args: Any) -> Any:
        import jax
        import jax.numpy as jnp

        o, i = self.position
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        full = [jnp.broadcast_to(x, shape) for x in args]

        def of_input(x: Any) -> Any:
            result = self.reference(*full[:i], x, *full[i + 1 :])
            return jnp.broadcast_to(result if self.outputs == 1 else result[o], shape)

        if jnp.iscomplexobj(full[i]):
            value, pull = jax.vjp(of_input, full[i])
            return pull(jnp.ones_like(value))[0]
        return jax.jvp(of_input, (full[i],), (jnp.ones_like(full[i]),))[1]


# ---- the source ----


@dataclasses.dataclass(frozen=True)
class Spec:
    """One kernel to be generated: a definition's value, or its derivative in one direction.

    Operands are the inputs `primals`, then the tangents of the inputs `ins` for "jvp" and the
    cotangents of the outputs `outs` for "vjp". Results are the outputs `outs`, their tangents, and
    for "vjp" the cotangents of the inputs `ins`.
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
        outputs = output_dtypes(self.definition, self.dtypes)
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
        outputs = output_dtypes(self.definition, self.dtypes)
        return tuple(outputs[o] for o in self.outs)

    def partials(self) -> dict[Position, Definition]:
        """The derivatives that are not zero."""
        return {
            (o, i): found
            for o in self.outs
            for i in self.ins
            if (found := partial(self.definition, (o, i), self.dtypes)) is not None
        }

    def texts(self) -> dict[str, str]:
        """What the user has written of the kernel, by what compilers call it."""
        written = [self.definition] if self.mode == "value" else [*self.partials().values()]
        return {
            label: text
            for d in written
            for label, text in ((d.label, d.operation), (d.preamble_label, d.preamble))
        }


def value_spec(definition: Definition, dtypes: Sequence[str]) -> Spec:
    """The value of all outputs."""
    inputs, outputs = (tuple(range(len(s))) for s in (definition.inputs, definition.outputs))
    return Spec(definition, "value", tuple(dtypes), inputs, (), outputs)


def derivative_spec(
    definition: Definition,
    mode: Mode,
    dtypes: Sequence[str],
    ins: Iterable[int],
    outs: Iterable[int],
) -> Spec:
    """A derivative, whose operands are those inputs only that it reads."""
    spec = Spec(definition, mode, tuple(dtypes), (), tuple(ins), tuple(outs))
    read = {i for d in spec.partials().values() for i in mentioned(d)}
    return dataclasses.replace(spec, primals=tuple(sorted(read)))


_HEADERS = {"cpu": "cpu/generated.h", "cuda": "cuda/generated.cuh"}
_OPERANDS = ("ArrayOperand", "ScalarOperand", "RowOperand")
_OURS = '#line 1 "jax_oneflow_ops"'
_QUALIFIERS = "JOF_HOST_DEVICE JOF_INLINE"


# Of a source all of whose results are rounded to 16 bits or fewer: math may be as short.
NARROW_RESULTS = "#define JOF_NARROW_RESULTS"
# Of one without float16: what converts it takes compilers long to read.
_WITHOUT_HALF = "#define JOF_WITHOUT_HALF"


def _is_narrow(dtype: str) -> bool:
    return dtype.startswith(("float16", "bfloat16", "float8"))


def source(spec: Spec, kinds: Sequence[int], platform: str) -> str:
    """The C++ or CUDA source of a kernel whose operands are of such kinds."""
    functions = _Functions(spec.dtypes)
    names = _operand_names(spec)
    if spec.mode == "value":
        body = [f"return {functions.call(spec.definition, spec)};"]
    else:
        body = _derivative(spec, functions)
    signature = ", ".join(
        f"const {_computed(dtype)} jof_{name}"
        for name, dtype in zip(names, spec.operand_dtypes, strict=True)
    )
    results = spec.result_dtypes
    inputs = ", ".join(
        f"jof::{_OPERANDS[kind]}<{TYPES[dtype]}>"
        for kind, dtype in zip(kinds, spec.operand_dtypes, strict=True)
    )
    outputs = ", ".join(f"{TYPES[dtype]}*" for dtype in results)
    title = {"value": "", "jvp": "the JVP of ", "vjp": "the VJP of "}[spec.mode]
    includes, namespaces = functions.text()
    lines = [
        f"// {title}ElementwiseKernel {spec.definition.name}: {spec.definition}",
        *([NARROW_RESULTS] if all(map(_is_narrow, results)) else []),
        *([] if "float16" in (*spec.operand_dtypes, *results) else [_WITHOUT_HALF]),
        f'#include "{_HEADERS[platform]}"',
        '#include "common/expression.h"',
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
        "JOF_GENERATED_KERNEL(jof_expression::jof_functor, jof_outputs, jof_inputs)",
    ]
    return "\n".join(lines) + "\n"


def _operand_names(spec: Spec) -> list[str]:
    """Of the operands, in the generated code: x0 an input, t0 its tangent, ct0 a cotangent."""
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
    """The body: each result is a sum of derivatives times tangents or cotangents."""
    partials = spec.partials()
    outputs = output_dtypes(spec.definition, spec.dtypes)
    lines, names = [], []
    for (o, i), definition in partials.items():
        (dtype,) = output_dtypes(definition, spec.dtypes)
        factor = computed_in(dtype, spec.dtypes[i], outputs[o])
        lines.append(
            f"const auto jof_d{o}_{i} = jof_Convert<{TYPES[factor]}>::Of("
            f"{functions.call(definition, spec)});"
        )
    results = spec.outs if spec.mode == "jvp" else spec.ins
    for k, dtype in zip(results, spec.result_dtypes, strict=True):
        terms = []
        for o, i in partials:
            if k != (o if spec.mode == "jvp" else i):
                continue
            (of,) = output_dtypes(partials[o, i], spec.dtypes)
            factor = TYPES[computed_in(of, spec.dtypes[i], outputs[o])]
            vector = f"jof_t{i}" if spec.mode == "jvp" else f"jof_ct{o}"
            product = f"jof_d{o}_{i} * jof_Convert<{factor}>::Of({vector})"
            terms.append(f"jof_Convert<{_computed(dtype)}>::Of({product})")
        names.append(f"jof_y{k}")
        lines.append(f"const {_computed(dtype)} jof_y{k} = {' + '.join(terms) or '{}'};")
    result = names[0] if len(names) == 1 else f"jof::MakeTuple({', '.join(names)})"
    return [*lines, f"return {result};"]


class _Functions:
    """What the user has written, as functions in namespaces: one for each preamble."""

    def __init__(self, dtypes: Sequence[str]):
        self._dtypes = dtypes
        self._namespaces: dict[tuple[str, str], list[list[str]]] = {}

    def call(self, definition: Definition, spec: Spec) -> str:
        """An expression that calls a definition's operation on the kernel's operands."""
        key = definition.preamble, definition.preamble_label
        space = [*self._namespaces, key].index(key)
        functions = self._namespaces.setdefault(key, [])
        name = f"jof_f{len(functions)}"
        functions.append(self._function(definition, name))
        args = (
            f"jof_x{i}" if i in spec.primals else f"{_computed(dtype)}{{}}"
            for i, dtype in enumerate(self._dtypes)
        )
        return f"jof_n{space}::{name}::Of({', '.join(args)})"

    def _function(self, definition: Definition, name: str) -> list[str]:
        bound = bind_variables(definition.inputs, self._dtypes)
        results = output_dtypes(definition, self._dtypes)
        inputs = ", ".join(
            f"const {_computed(dtype)} {p.name}"
            for p, dtype in zip(definition.inputs, self._dtypes, strict=True)
        )
        outputs = [p.name for p in definition.outputs]
        returned = outputs[0] if len(outputs) == 1 else f"jof::MakeTuple({', '.join(outputs)})"
        declared = (
            f"    {_computed(dtype)} {output}{{}};"
            for output, dtype in zip(outputs, results, strict=True)
        )
        user = [f'#line 1 "{definition.label}"', definition.operation, _OURS]
        if definition.origin is not None:
            body = [f"    return jof_Convert<{_computed(results[0])}>::Of(", *user, "    );"]
        else:
            body = [*declared, *user, "    ;", f"    return {returned};"]
        return [
            f"struct {name} {{",
            *(f"  using {letter} = {TYPES[dtype]};" for letter, dtype in bound.items()),
            f"  {_QUALIFIERS} static {_returned(results)} Of({inputs}) {{",
            *body,
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
                rest = preamble.split("\n")
                for number, line in enumerate(rest):
                    if re.match(r"\s*#\s*include\b", line):
                        includes.setdefault(line, [f'#line {number + 1} "{label}"', line, _OURS])
                        rest[number] = ""
                lines += [f'#line 1 "{label}"', *rest, _OURS]
            lines += [line for function in functions for line in function]
            lines.append(f"}}  // namespace jof_n{k}")
        return [line for three in includes.values() for line in three], lines


# ---- what compilers say ----


@dataclasses.dataclass(frozen=True)
class Message:
    """An error in what the user has written."""

    label: str
    line: int
    column: int | None
    text: str


_ERROR = r"""(?x)^
    (?P<label>(?:operation|preamble|derivative\ of\ \w+\ with\ respect\ to\ \w+)\ of\ \w+)
    (?: :(?P<line>\d+)(?::(?P<column>\d+))? | \((?P<cuda_line>\d+)\) )
    :\ (?:fatal\ |catastrophic\ )?error(?:\ \#[\w-]+)?:?\ (?P<text>.*)$"""


def messages(log: str) -> list[Message]:
    """The errors of a compiler's log that are at lines of the user's."""
    found = []
    for line in log.splitlines():
        if match := re.match(_ERROR, line):
            number = int(match["line"] or match["cuda_line"])
            column = int(match["column"]) if match["column"] else None
            found.append(Message(match["label"], number, column, match["text"]))
    return found


def annotated(texts: Mapping[str, str], found: Sequence[Message]) -> str:
    """The user's lines with the compiler's messages under them."""
    shown: list[str] = []
    for label in dict.fromkeys(message.label for message in found):
        lines = texts.get(label, "").split("\n")
        shown.append(f"{label}:")
        for number, line in enumerate(lines, 1):
            shown.append(f"{number:5} | {line}")
            for message in found:
                if (message.label, min(message.line, len(lines))) == (label, number):
                    column = message.column or len(line) - len(line.lstrip()) + 1
                    shown.append(f"      | {' ' * (column - 1)}^ {message.text}")
    return "\n".join(shown)
