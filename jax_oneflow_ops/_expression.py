"""What a user writes for an ElementwiseKernel, checked, and the C++ source that is made of it.

Everything here is text: nothing compiles, and no jax backend starts.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

from jax_oneflow_ops import _operands

Mode = Literal["value", "jvp", "vjp"]
Position = tuple[int, int]  # of a derivative: of which output, with respect to which input

# Of csrc/ops/elementwise_call.h. A derivative kernel has the inputs, and a tangent or cotangent for
# each.
MAX_INPUTS = 16
MAX_OUTPUTS = 16

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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{kernel}: {what} must be text that UTF-8 has, got {text[error.start]!r} in it"
        ) from None
    code = tokens(text)
    if any(token.kind == "open" for token in code):
        raise ValueError(f"{kernel}: {what} has a comment or a string that does not end: {text!r}")
    if required and all(token.text == ";" for token in code):
        raise ValueError(f"{kernel}: {what} must not be empty, got {text!r}")
    opened: list[Token] = []
    for token in code:
        if token.text in _CLOSING.values():
            opened.append(token)
        elif token.text in _CLOSING and (not opened or opened.pop().text != _CLOSING[token.text]):
            raise ValueError(
                f"{kernel}: {what}, line {token.line}: {token.text!r} closes nothing: {text!r}"
            )
    if opened:
        bracket, number = opened[-1].text, opened[-1].line
        raise ValueError(f"{kernel}: {what}, line {number}: {bracket!r} is never closed: {text!r}")


_CLOSING = {")": "(", "]": "[", "}": "{"}

# What compilers read as one, and what cannot be that: a comment or a string that does not end.
_TOKEN = re.compile(
    r"""(?xs)
    (?P<blank> \s+ | //[^\n]* | /\*.*?\*/ )
    | (?P<string>
        (?:u8|[uUL])? R"(?P<mark>[^()\\\s]{0,16})\( .*? \)(?P=mark)"
        | (?:u8|[uUL])? (?: "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+' ) )
    | (?P<open> /\* | ["'] )
    | (?P<number> \.?\d (?: [eEpP][+-] | '\w | [\w.] )* )
    | (?P<word> [^\W\d]\w* )
    | (?P<operator>
        %:%: | \#\# | %: | <% | %> | <: | :> | <<= | >>= | << | >> | && | \|\| | \+\+ | -- | ->
        | :: | [-+*/%&|^=!<>]= | . )
    """
)


class Token(NamedTuple):
    """Of a source in C++."""

    kind: str
    text: str
    line: int


@functools.lru_cache(maxsize=256)
def tokens(text: str, *, blanks: bool = False) -> tuple[Token, ...]:
    """Of C++, without blanks and comments, which `blanks` leaves in."""
    found, line = [], 1
    for match in _TOKEN.finditer(_joined(text)):
        if blanks or match.lastgroup != "blank":
            found.append(Token(match.lastgroup or "", match[0], line))
        line += match[0].count("\n")
    return tuple(found)


def _joined(text: str) -> str:
    """With lines that end in a backslash joined to the next, as compilers do before all else.

    Blank lines keep the numbers of those that follow.
    """

    def line(match: re.Match[str]) -> str:
        return re.sub(_SPLICE, "", match[0]) + "\n" * match[0].count("\n")

    return re.sub(rf"(?m)^(?:[^\n]*{_SPLICE})+[^\n]*", line, text)


_SPLICE = r"\\[ \t\r]*\n"


def _has_directive(text: str, *names: str) -> bool:
    """Whether a preprocessor's directive of these names, or any, is in the code."""
    return any(
        token.text in ("#", "%:") and (not names or after.text in names)
        for token, after in itertools.pairwise([*tokens(text), _END])
    )


_END = Token("", "", 0)

_ASSIGNMENTS = frozenset(
    re.findall(r"\S+", "= += -= *= /= %= &= |= ^= <<= >>= ++ -- and_eq or_eq xor_eq")
)
# Words that an expression may follow. After any other word a name is declared.
_BEFORE_EXPRESSIONS = frozenset(
    re.findall(r"\w+", "else do return and or not compl bitand bitor xor")
)


def unassigned(operation: str, preamble: str, outputs: Sequence[Parameter]) -> list[str]:
    """The outputs that an operation cannot have assigned to.

    Any form that may assign counts: to a member or an element, through a pointer or a reference, in
    a call of a function of the user's.
    """
    own = tokens(preamble)
    macros = "define", "include"
    if any(_has_directive(text, *macros) for text in (operation, preamble)) or any(
        token.text == "operator" for token in own
    ):
        return []
    code = tokens(operation)
    called = {token.text for token in own}
    called |= {
        token.text
        for token, after in itertools.pairwise([*code, _END])
        if token.kind == "word" and after.text != "("
    }
    close: dict[int, int] = {}  # of brackets
    inside: list[tuple[int, ...]] = []  # of each token: the brackets that it is in
    opened: list[int] = []
    for k, token in enumerate(code):
        if token.text in _CLOSING:
            close[opened.pop()] = k
        inside.append(tuple(opened))
        if token.text in _CLOSING.values():
            opened.append(k)

    def at(k: int) -> Token:
        return code[k] if 0 <= k < len(code) else _END

    def is_passed(bracket: int) -> bool:
        """Whether what is in a bracket may be assigned to, there or by what it is passed to."""
        before = at(bracket - 1)
        if at(bracket).text == "[":
            return False
        if at(close[bracket] + 1).text in _ASSIGNMENTS:
            return True
        if before.text in _CPP_WORDS:
            return False
        if before.kind == "word":
            return before.text in called or at(bracket - 2).text in ("::", "&", "&&", ".", "->")
        if at(bracket).text == "{":
            return before.text == ">"
        return before.kind == "string" or before.text in (">", "]", ")")

    def may_assign(k: int) -> bool:
        before = at(k - 1)
        if before.text in (".", "->", "::"):
            return False  # another's member
        if before.kind == "word" and before.text not in _BEFORE_EXPRESSIONS:
            return False  # a variable of the same name
        if before.text in ("++", "--", "bitand"):
            return True
        if before.text == "&" and not (
            at(k - 2).text == "]"
            or at(k - 2).kind == "number"
            or (at(k - 2).kind == "word" and at(k - 2).text not in _BEFORE_EXPRESSIONS)
        ):
            return True  # its address, and no conjunction
        if before.text == "=" and at(k - 3).text in ("&", "&&"):
            return True  # a reference
        end = k + 1
        while at(end).text in (".", "->", "["):
            end = close[end] + 1 if at(end).text == "[" else end + 2
        return at(end).text in _ASSIGNMENTS or any(map(is_passed, inside[k]))

    return [
        p.name
        for p in outputs
        if not any(token.text == p.name and may_assign(k) for k, token in enumerate(code))
    ]


def _with_safe_division(text: str) -> str:
    """C++ whose quotients of integers are jax's: see jof_by in common/expression.h.

    `a / b` becomes `a /jof_by()/ b`, and `a /= b` becomes `a /=jof_by()<<= b`: no precedence
    changes, and floating point divides as before.
    """
    written: list[str] = []
    before = _END
    directive = ""  # on whose line this is
    for token in tokens(text, blanks=True):
        shown = token.text
        if token.kind == "blank" and "\n" in token.text and not token.text.startswith("/*"):
            directive = ""
        elif token.text in ("#", "%:") and not directive:
            directive = "#"
        elif directive == "#" and token.kind == "word":
            directive = token.text
        if before.text != "operator" and directive in ("", "define"):
            if token.text in ("/", "%"):
                shown = f"{token.text}jof_by(){token.text}"
            elif token.text in ("/=", "%="):
                shown = f"{token.text}jof_by()<<="
        if token.kind != "blank":
            before = token
        written.append(shown)
    return "".join(written)


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
    if _has_directive(definition.operation) or _has_directive(definition.preamble):
        return tuple(range(len(definition.inputs)))  # a macro may name any
    words = {token.text for token in tokens(definition.operation)}
    return tuple(i for i, p in enumerate(definition.inputs) if p.name in words)


def may_use_a_reference(definition: Definition) -> bool:
    """Whether derivatives of it, of any order, may be computed by a reference.

    That needs all inputs: what the reference reads is not known.
    """
    return definition.reference is not None or any(
        isinstance(d, Definition) and may_use_a_reference(d) for _, d in definition.derivatives
    )


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


_HEADERS = {"cpu": "cpu/compiled.h", "cuda": "cuda/compiled.cuh"}
_OURS = '#line 1 "jax_oneflow_ops"'
_QUALIFIERS = "JOF_HOST_DEVICE JOF_INLINE"


# Of a source all of whose results are rounded to 16 bits or fewer: math may be as short.
NARROW_RESULTS = "#define JOF_NARROW_RESULTS"
# Of one without float16: what converts it takes compilers long to read.
_WITHOUT_HALF = "#define JOF_WITHOUT_HALF"


def is_narrow(dtype: str) -> bool:
    """Whether it is a floating-point dtype of 16 bits or fewer, computed in float32."""
    return dtype.startswith(("float16", "bfloat16", "float8"))


def source(spec: Spec, kinds: Sequence[int], platform: str, *, safe_division: bool = True) -> str:
    """The C++ or CUDA source of a kernel whose operands are of such kinds.

    Without safe division it is word for word what the user has written: compilers' messages are
    best about that.
    """
    functions = _Functions(spec.dtypes, _with_safe_division if safe_division else str)
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
    includes, namespaces = functions.text()
    lines = [
        f"// {title}ElementwiseKernel {spec.definition.name}: {spec.definition}",
        *([NARROW_RESULTS] if all(map(is_narrow, results)) else []),
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
        "JOF_COMPILED_KERNEL(jof_expression::jof_functor, jof_outputs, jof_inputs)",
    ]
    return "\n".join(lines) + "\n"


def _operand_type(kind: int, element: str) -> str:
    """`kind` is one of `_operands`."""
    if kind >= _operands.BROADCAST:
        return f"jof::BroadcastOperand<{element}, {kind - _operands.BROADCAST}>"
    return f"jof::{('ArrayOperand', 'ScalarOperand')[kind]}<{element}>"


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
            f"{functions.call(definition)});"
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

    def __init__(self, dtypes: Sequence[str], rewritten: Callable[[str], str]):
        self._dtypes = dtypes
        self._rewritten = rewritten
        self._namespaces: dict[tuple[str, str], list[list[str]]] = {}

    def call(self, definition: Definition) -> str:
        """An expression that calls a definition's operation on the kernel's operands."""
        key = definition.preamble, definition.preamble_label
        space = [*self._namespaces, key].index(key)
        functions = self._namespaces.setdefault(key, [])
        name = f"jof_f{len(functions)}"
        functions.append(self._function(definition, name))
        args = (f"jof_x{i}" for i in mentioned(definition))
        return f"jof_n{space}::{name}::Of({', '.join(args)})"

    def _function(self, definition: Definition, name: str) -> list[str]:
        bound = bind_variables(definition.inputs, self._dtypes)
        results = output_dtypes(definition, self._dtypes)
        inputs = ", ".join(
            f"const {_computed(self._dtypes[i])} {definition.inputs[i].name}"
            for i in mentioned(definition)
        )
        outputs = [p.name for p in definition.outputs]
        returned = outputs[0] if len(outputs) == 1 else f"jof::MakeTuple({', '.join(outputs)})"
        declared = (
            f"    {_computed(dtype)} {output}{{}};"
            for output, dtype in zip(outputs, results, strict=True)
        )
        # What begins and ends it is the user's to compilers, so that they speak of the user's lines
        # where it does not fit. The blank line is for a backslash at the end.
        here = f'#line 1 "{definition.label}"'
        user = [here, self._rewritten(definition.operation), ""]
        if definition.origin is not None:
            body = [here, f"return jof_Convert<{_computed(results[0])}>::Of(", *user, ");", _OURS]
        else:
            body = [*declared, *user, ";", _OURS, f"    return {returned};"]
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
                rest = self._rewritten(preamble).split("\n")
                for number, line in enumerate(rest):
                    if re.match(r"\s*(#|%:)\s*include\b", line):
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


_LABEL = r"(?P<label>(?:operation|preamble|derivative of \w+ with respect to \w+) of \w+)"
_PLACE = rf"{_LABEL}(?::(?P<line>\d+)(?::(?P<column>\d+))?|\((?P<cuda_line>\d+)\)): *"
_ERROR = r"(?:fatal |catastrophic )?error(?: #[\w-]+)?:? (?P<text>.*)"
# The user's line that an error in a header comes from. GCC names it before the error.
_CAUSE = r"required from here|note: in instantiation"
_CAUSE_IN_NVRTC = rf"\s+detected during .* at line (\d+) of {_LABEL}.*"
# Of the linkers of GCC, Clang, macOS and NVRTC.
_UNDEFINED = (
    r"undefined (?:reference to|symbol:?) [`']?([\w:]+)"
    r"|^\s*\"_?([\w:]+)[^\"]*\", referenced from"
    r"|Unresolved extern function '(\w+)'"
)


def messages(log: str, texts: Mapping[str, str]) -> list[Message]:
    """The errors of a compiler's log that are about lines of the user's `texts`."""
    found: list[Message] = []
    cause: re.Match[str] | None = None
    in_header: str | None = None

    def add(place: re.Match[str], text: str) -> None:
        number = int(place["line"] or place["cuda_line"])
        column = int(place["column"]) if place["column"] else None
        found.append(Message(place["label"], number, column, text))

    for line in log.splitlines():
        line = re.sub(_CAUSE_IN_NVRTC, r"\2(\1): note: in instantiation", line)
        place = re.match(_PLACE, line)
        rest = line[place.end() :] if place else line
        error = re.match(_ERROR, rest) if place else re.match(rf".*?: {_ERROR}", rest)
        if place and error:
            add(place, error["text"])
        elif place and re.match(_CAUSE, rest):
            cause = place
        elif error:
            in_header = error["text"]
        if cause and in_header is not None:
            add(cause, in_header)
            cause = in_header = None
    for names in dict.fromkeys(re.findall(_UNDEFINED, log, re.MULTILINE)):
        symbol = "".join(names).split("::")[-1]
        for label, text in texts.items():
            for number, line in enumerate(text.split("\n"), 1):
                for word in re.finditer(_NAME, line):
                    if _is_named(word[0], symbol):
                        problem = f"{word[0]} is declared, but defined nowhere"
                        found.append(Message(label, number, word.start() + 1, problem))
    return found


def _is_named(name: str, symbol: str) -> bool:
    """Whether a linker's symbol is a function of this name, mangled or not."""
    of_name = f"{len(name)}{name}"
    mangled = symbol.startswith("_Z") and (f"{of_name}E" in symbol or f"_Z{of_name}" in symbol)
    return symbol == name or mangled


def annotated(texts: Mapping[str, str], found: Sequence[Message]) -> str:
    """The user's lines with the compiler's messages under them."""
    shown: list[str] = []
    for label in dict.fromkeys(message.label for message in found):
        lines = texts.get(label, "").rstrip().split("\n")
        shown.append(f"{label}:")
        for number, line in enumerate(lines, 1):
            shown.append(f"{number:5} | {line}")
            for message in found:
                if (message.label, min(message.line, len(lines))) == (label, number):
                    column = message.column or len(line) - len(line.lstrip()) + 1
                    if message.line > number or column > len(line):  # at what follows the code
                        column = len(line) + 1
                    shown.append(f"      | {' ' * (column - 1)}^ {message.text}")
    return "\n".join(shown)
