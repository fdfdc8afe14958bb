"""What a parser of tool calls makes of a piece of text, and what all parsers share."""

import json
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call that begins (with `name`), or more of its arguments. `index` counts the calls of one answer from 0."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """What has become certain: text for the user, calls, and thoughts, which come before both."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""

    def plus(self, more: "Parsed") -> "Parsed":
        """This, and what became certain behind it."""
        return Parsed(self.content + more.content, [*self.calls, *more.calls], self.reasoning + more.reasoning)


class ToolParser(Protocol):
    """Reads one answer. What is not certain yet is held back."""

    def push(self, text: str) -> Parsed:
        """More of the answer."""

    def flush(self) -> Parsed:
        """The answer has ended: what was held back is text after all."""


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call {"name": …, "arguments" or "parameters": {…}}; None: it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return call_of(value)


def call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
