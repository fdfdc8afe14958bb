"""Result of a tool-call parser for a piece of text, and the parsers' shared interface."""

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimtab_engine.text.tokenizer import well_formed


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new call (with `name`), or more of its arguments. `index` counts the calls of one response from 0."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """Output that is certain so far: content, calls, and reasoning, which precedes both."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""

    def plus(self, more: "Parsed") -> "Parsed":
        """Return this result joined with a later one."""
        return Parsed(self.content + more.content, [*self.calls, *more.calls], self.reasoning + more.reasoning)


class ToolParser(Protocol):
    """Incremental parser of one response. Ambiguous text is held back."""

    def push(self, text: str) -> Parsed:
        """Parse more text of the response."""

    def flush(self) -> Parsed:
        """Parse the end of the response: text held back is content."""


class ParserFactory(Protocol):
    """Constructor of a parser. `names`: the offered functions; None accepts every name."""

    def __call__(self, names: Collection[str] | None = None) -> ToolParser: ...


def call_decoder() -> json.JSONDecoder:
    """Return a decoder whose values can be written as JSON again: NaN and Infinity are invalid, and numbers beyond
    float64 become the largest ones.
    """
    return json.JSONDecoder(parse_float=_finite, parse_constant=_reject)


def _finite(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _reject(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


DECODER = call_decoder()


def read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments (as JSON text) of a call {"name": …, "arguments" or "parameters": {…}}, or None if it
    is invalid.
    """
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return parse_call(value)


def parse_call(value: Any) -> tuple[str, str] | None:
    """Return name and arguments of a decoded call, or None if it is invalid. Arguments may be an object, the JSON text
    of an object, or nothing.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # Granite and some Qwen models write JSON text
        try:
            arguments = DECODER.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    # A model may write the escape of a lone surrogate, which UTF-8 cannot encode.
    return well_formed(value["name"]), well_formed(json.dumps(arguments, ensure_ascii=False))


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
