"""The parameters of a kernel: their names and dtypes."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

# Limits of csrc/ops/elementwise_call.h. The operands of a derivative kernel are the inputs and a
# tangent or cotangent for each.
MAX_INPUTS = 16
MAX_OPERANDS = 32
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

CPP_WORDS = frozenset(
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
# Macros of compilers and of math.h: the preprocessor would replace a parameter of such a name.
_MACROS = r"NAN|INFINITY|HUGE_VALF?|NULL|M_\w+|FP_\w+|MATH_\w+|linux|unix"
NAME = r"(?a:[A-Za-z_]\w*)"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An input or an output: `T x`."""

    type: str  # a letter, or the name of a dtype
    name: str

    @property
    def is_variable(self) -> bool:
        """Whether the type is a letter, which the call binds to a dtype."""
        return len(self.type) == 1

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def parse_parameters(kernel: str, argument: str, text: Any) -> tuple[Parameter, ...]:
    """Parses "T x, float32 y"; raises TypeError or ValueError, naming the kernel and argument."""
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


def _why_reserved(name: str) -> str | None:
    """Why a parameter or a kernel may not have a name, or None if it may."""
    if name in CPP_WORDS:
        return "is a word of C++"
    if name.lower().startswith("jof"):
        return "begins with jof, as the generated code's own names do"
    if "__" in name or re.match("_[A-Z]", name):
        return "is reserved for C++ compilers"
    if re.fullmatch(_MACROS, name):
        return "is a macro of C++ compilers"
    return None


def check_name(kernel: str, what: str, name: Any) -> None:
    """Raises if `name` is not a C++ identifier or is reserved."""
    if not isinstance(name, str):
        raise TypeError(f"{kernel}: {what} must be a string, got {type(name).__name__}")
    if not re.fullmatch(NAME, name):
        raise ValueError(
            f"{kernel}: {what} must be letters, digits and underscores, a letter first, got "
            f"{name!r}"
        )
    if (reason := _why_reserved(name)) is not None:
        raise ValueError(f"{kernel}: {what} may not be {name!r}, which {reason}")


def check_parameters(
    kernel: str, inputs: Sequence[Parameter], outputs: Sequence[Parameter]
) -> None:
    """Raises ValueError if the parameters do not go together."""
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


# ---- types after binding ----


def bind_variables(parameters: Sequence[Parameter], dtypes: Sequence[str]) -> dict[str, str]:
    """The dtype of each letter."""
    return {p.type: dtype for p, dtype in zip(parameters, dtypes, strict=True) if p.is_variable}


def is_inexact(dtype: str) -> bool:
    """Whether values of the dtype have derivatives."""
    return "float" in dtype or "complex" in dtype


def is_narrow(dtype: str) -> bool:
    """Whether it is a floating-point dtype of 16 bits or fewer, computed in float32."""
    return dtype.startswith(("float16", "bfloat16", "float8"))


def computed_in(*dtypes: str) -> str:
    """The dtype in which values of these dtypes are computed together."""
    if len(set(dtypes)) == 1 and not is_inexact(dtypes[0]):
        return dtypes[0]
    wide = any(dtype in ("float64", "complex128") for dtype in dtypes)
    if any("complex" in dtype for dtype in dtypes):
        return "complex128" if wide else "complex64"
    return "float64" if wide else "float32"


def size_of(shape: Sequence[Any]) -> int:
    """The number of elements, to compare shapes by. Symbolic dimensions count as 4096."""
    return math.prod(n if isinstance(n, int) else 4096 for n in shape)
