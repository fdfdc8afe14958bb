"""Parsers of responses that a grammar forces into tool calls: tool_choice required, and a named function."""

import json
from typing import Any

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, call_decoder
from trimtab_engine.text.tokenizer import well_formed


class NamedParser:
    """Parser of a response that is one function's arguments, streamed incrementally."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        name, self._name = self._name, None
        return Parsed(calls=[CallDelta(0, text, name)])

    def flush(self) -> Parsed:
        return Parsed()


class RequiredParser:
    """Parser of a response that is an array of calls, each emitted when complete."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._decoder = call_decoder()

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        if "}" not in text:
            return parsed  # no call ends in this piece
        while True:
            rest = self._held.lstrip(" \t\r\n[,")
            try:
                value, end = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return parsed
            if _is_call(value):
                arguments = well_formed(json.dumps(value.get("parameters", {}), ensure_ascii=False))
                parsed.calls.append(CallDelta(self._num_calls, arguments, well_formed(value["name"])))
                self._num_calls += 1
            self._held = rest[end:]

    def flush(self) -> Parsed:
        """Drop a call truncated by max_tokens; a response without any call is returned as text."""
        held, self._held = self._held, ""
        return Parsed("" if self._num_calls else held)


def _is_call(value: Any) -> bool:
    """Return True for a call in the form that the grammar enforces; the schema decides on its parameters."""
    return isinstance(value, dict) and isinstance(value.get("name"), str)
