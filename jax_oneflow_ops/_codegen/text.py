"""A body that is text: what a user has written in C++, checked and rewritten."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax_oneflow_ops._codegen.signature import CPP_WORDS, Parameter

OURS = '#line 1 "jax_oneflow_ops"'


@dataclasses.dataclass(frozen=True)
class Text:
    """Statements that assign to the outputs, or an expression, which is the only one."""

    code: str
    preamble: str
    kernel: str  # what compilers name in messages, as also the label
    label: str
    is_expression: bool = False

    header = "common/expression.h"  # not a field

    @property
    def preamble_label(self) -> str:
        """What compilers call the preamble."""
        return f"preamble of {self.kernel}"

    @property
    def texts(self) -> dict[str, str]:
        """What the user has written, by what compilers call it."""
        return {self.label: self.code, self.preamble_label: self.preamble}

    def reads(self, inputs: Sequence[Parameter]) -> tuple[int, ...]:
        """The inputs that may be read: any whose name is in the text."""
        if _has_directive(self.code) or _has_directive(self.preamble):
            return tuple(range(len(inputs)))  # a macro may name any
        words = {token.text for token in tokens(self.code)}
        return tuple(i for i, p in enumerate(inputs) if p.name in words)

    def statements(self, outputs: Iterable[tuple[str, str]], safe_division: bool) -> list[str]:
        """The lines of a function whose arguments are the inputs that are read.

        `outputs` are names and C++ types. Without safe division the text is word for word what the
        user has written: compilers' messages are best about that.
        """
        # What begins and ends it is the user's to compilers, so that they speak of the user's lines
        # where it does not fit. The blank line is for a backslash at the end.
        here = f'#line 1 "{self.label}"'
        user = [here, rewritten(self.code) if safe_division else self.code, ""]
        names, types = zip(*outputs, strict=True)
        if self.is_expression:
            return [here, f"return jof_Convert<{types[0]}>::Of(", *user, ");", OURS]
        declared = (f"    {kind} {name}{{}};" for name, kind in zip(names, types, strict=True))
        returned = names[0] if len(names) == 1 else f"jof::MakeTuple({', '.join(names)})"
        return [*declared, *user, ";", OURS, f"    return {returned};"]


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
        if before.text in CPP_WORDS:
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


def rewritten(text: str) -> str:
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
