"""Finds compilers' errors that are about the user's code, and shows them at its lines."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jax_oneflow_ops._codegen.signature import NAME


@dataclasses.dataclass(frozen=True)
class Message:
    """An error in the user's code."""

    label: str
    line: int
    column: int | None
    text: str


_LABEL = r"(?P<label>(?:operation|preamble|derivative of \w+ with respect to \w+) of \w+)"
_PLACE = rf"{_LABEL}(?::(?P<line>\d+)(?::(?P<column>\d+))?|\((?P<cuda_line>\d+)\)): *"
_ERROR = r"(?:fatal |catastrophic )?error(?: #[\w-]+)?:? (?P<text>.*)"
# Names the user's line that caused an error in a header. GCC prints it before the error.
_CAUSE = r"required from here|note: in instantiation"
_CAUSE_IN_NVRTC = rf"\s+detected during .* at line (\d+) of {_LABEL}.*"
# Messages about undefined symbols, of the linkers of GCC, Clang, macOS and NVRTC.
_UNDEFINED = (
    r"undefined (?:reference to|symbol:?) [`']?([\w:]+)"
    r"|^\s*\"_?([\w:]+)[^\"]*\", referenced from"
    r"|Unresolved extern function '(\w+)'"
)


def messages(log: str, texts: Mapping[str, str]) -> list[Message]:
    """The errors in a compiler's log that are about lines of the user's `texts`."""
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
                for word in re.finditer(NAME, line):
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
                    if message.line > number or column > len(line):  # past the end of the text
                        column = len(line) + 1
                    shown.append(f"      | {' ' * (column - 1)}^ {message.text}")
    return "\n".join(shown)
