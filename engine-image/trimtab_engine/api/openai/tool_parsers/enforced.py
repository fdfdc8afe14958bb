"""Answers that a grammar has made into calls: tool_choice required, and one named function."""

import json

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, call_of


class NamedParser:
    """The whole answer is the arguments of one function, told as they come."""

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
    """The whole answer is an array of calls, each told when it is complete."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        if "}" not in text:
            return parsed  # no call ends here
        while True:
            rest = self._held.lstrip(" \t\r\n[,")
            try:
                value, end = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return parsed
            call = call_of(value)
            if call is not None:
                parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
                self._num_calls += 1
            self._held = rest[end:]

    def flush(self) -> Parsed:
        """A call that max_tokens has cut is none; an answer without any is shown as it is."""
        held, self._held = self._held, ""
        return Parsed("" if self._num_calls else held)
