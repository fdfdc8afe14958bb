"""Parsers of responses that a grammar forces into tool calls: tool_choice required, and a named function."""

import json

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, parse_call


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
        self._decoder = json.JSONDecoder()

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
            call = parse_call(value)
            if call is not None:
                parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
                self._num_calls += 1
            self._held = rest[end:]

    def flush(self) -> Parsed:
        """Drop a call truncated by max_tokens; a response without any call is returned as text."""
        held, self._held = self._held, ""
        return Parsed("" if self._num_calls else held)
