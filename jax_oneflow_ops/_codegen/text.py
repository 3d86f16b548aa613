"""Text bodies: the user's C++, checked and rewritten."""

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
    """Statements that assign to the outputs, or an expression for the only output."""

    code: str
    preamble: str
    kernel: str  # compilers show this name, and the label, in messages
    label: str
    is_expression: bool = False

    header = "common/expression.h"  # not a field

    @property
    def preamble_label(self) -> str:
        """The label that compilers show for the preamble."""
        return f"preamble of {self.kernel}"

    @property
    def texts(self) -> dict[str, str]:
        """The user's texts, by the labels that compilers show."""
        return {self.label: self.code, self.preamble_label: self.preamble}

    def reads(self, inputs: Sequence[Parameter]) -> tuple[int, ...]:
        """The inputs that may be read: any whose name is in the text."""
        if _has_directive(self.code) or _has_directive(self.preamble):
            return tuple(range(len(inputs)))  # a macro may name any
        words = {token.text for token in tokens(self.code)}
        return tuple(i for i, p in enumerate(inputs) if p.name in words)

    def statements(self, outputs: Iterable[tuple[str, str]], safe_division: bool) -> list[str]:
        """The body of a C++ function whose arguments are the inputs that are read.

        `outputs` are names and C++ types. Without safe division the user's text is not rewritten:
        compilers' messages are clearest about the original text.
        """
        # The generated lines before and after the text carry the user's label too, so that errors
        # at either end name the user's lines. The blank line is for a backslash at the end.
        here = f'#line 1 "{self.label}"'
        user = [here, rewritten(self.code) if safe_division else self.code, ""]
        names, types = zip(*outputs, strict=True)
        if self.is_expression:
            return [here, f"return jof_Convert<{types[0]}>::Of(", *user, ");", OURS]
        declared = (f"    {kind} {name}{{}};" for name, kind in zip(names, types, strict=True))
        returned = names[0] if len(names) == 1 else f"jof::MakeTuple({', '.join(names)})"
        return [*declared, *user, ";", OURS, f"    return {returned};"]


def check_code(kernel: str, what: str, text: Any, *, required: bool = True) -> None:
    """Raises if `text` cannot be C++ inside a function: it is empty or its brackets do not match.

    Text that ended the function early would cause errors in code that is not the user's.
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

# A token of C++; "open" is the beginning of a comment or string that does not end.
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
    """A token of C++."""

    kind: str
    text: str
    line: int


@functools.lru_cache(maxsize=256)
def tokens(text: str, *, blanks: bool = False) -> tuple[Token, ...]:
    """The tokens of C++ text, without white space and comments unless `blanks` is set."""
    found, line = [], 1
    for match in _TOKEN.finditer(_joined(text)):
        if blanks or match.lastgroup != "blank":
            found.append(Token(match.lastgroup or "", match[0], line))
        line += match[0].count("\n")
    return tuple(found)


def _joined(text: str) -> str:
    """Joins lines that end in a backslash to the next line, as compilers do first.

    Adds blank lines so that the following lines keep their numbers.
    """

    def line(match: re.Match[str]) -> str:
        return re.sub(_SPLICE, "", match[0]) + "\n" * match[0].count("\n")

    return re.sub(rf"(?m)^(?:[^\n]*{_SPLICE})+[^\n]*", line, text)


_SPLICE = r"\\[ \t\r]*\n"


def _has_directive(text: str, *names: str) -> bool:
    """Whether the code contains a preprocessor directive, of these names if any are given."""
    return any(
        token.text in ("#", "%:") and (not names or after.text in names)
        for token, after in itertools.pairwise([*tokens(text), _END])
    )


_END = Token("", "", 0)

_ASSIGNMENTS = frozenset(
    re.findall(r"\S+", "= += -= *= /= %= &= |= ^= <<= >>= ++ -- and_eq or_eq xor_eq")
)
# Words that an expression may follow. After any other word, a name is a declaration.
_BEFORE_EXPRESSIONS = frozenset(
    re.findall(r"\w+", "else do return and or not compl bitand bitor xor")
)


def unassigned(operation: str, preamble: str, outputs: Sequence[Parameter]) -> list[str]:
    """The outputs that an operation certainly does not assign to.

    Any form that may assign counts as assignment: to a member or an element, through a pointer or a
    reference, or in a call of a user's function.
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
    close: dict[int, int] = {}  # for each opening bracket, its closing one
    inside: list[tuple[int, ...]] = []  # for each token, the brackets around it
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
        """Whether the content of a bracket may be assigned to, directly or by a called function."""
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
            return False  # a member of another variable
        if before.kind == "word" and before.text not in _BEFORE_EXPRESSIONS:
            return False  # a variable of the same name
        if before.text in ("++", "--", "bitand"):
            return True
        if before.text == "&" and not (
            at(k - 2).text == "]"
            or at(k - 2).kind == "number"
            or (at(k - 2).kind == "word" and at(k - 2).text not in _BEFORE_EXPRESSIONS)
        ):
            return True  # takes the address; not a bitwise and
        if before.text == "=" and at(k - 3).text in ("&", "&&"):
            return True  # binds a reference
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
    """Rewrites C++ so that integers divide as in jax: see jof_by in common/expression.h.

    `a / b` becomes `a /jof_by()/ b`, and `a /= b` becomes `a /=jof_by()<<= b`. This changes no
    precedence, and floating-point numbers divide as before.
    """
    written: list[str] = []
    before = _END
    directive = ""  # the preprocessor directive on the current line
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
