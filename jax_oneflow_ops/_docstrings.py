"""Docstrings of functions that share arguments and sections."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_F = TypeVar("_F", bound=Callable[..., jax.Array])


def documented(*, like: Callable[..., Any]) -> Callable[[_F], _F]:
    """Adds the arguments and sections that a docstring lacks from that of another function."""

    def decorate(function: _F) -> _F:
        head, own = _sections(function)
        theirs = _sections(like)[1]
        arguments = _arguments(theirs["Args"]) | _arguments(own.get("Args", ""))
        own["Args"] = "".join(arguments[name] for name in inspect.signature(function).parameters)
        kept = {title: own.get(title, text) for title, text in theirs.items()}
        if "Source" not in own:
            kept.pop("Source", None)
        parts = [head, *(f"{title}:\n{text.rstrip()}" for title, text in kept.items())]
        function.__doc__ = "\n\n".join(parts)
        return function

    return decorate


def _sections(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section of a docstring, and the sections by title."""
    text = inspect.cleandoc(function.__doc__ or "")
    head, *parts = re.split(r"^(\w[\w ]*):\n", text, flags=re.MULTILINE)
    return head.rstrip(), dict(zip(parts[::2], parts[1::2], strict=True))


def _arguments(text: str) -> dict[str, str]:
    """The entries of an "Args" section by argument name."""
    entries = re.split(r"^(?=  [\w*])", text.rstrip("\n") + "\n", flags=re.MULTILINE)
    return {entry.partition(":")[0].strip(" *"): entry for entry in entries if entry.strip()}
