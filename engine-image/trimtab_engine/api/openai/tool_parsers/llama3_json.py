"""Llama 3 format: a response that is {"name": …, "parameters": {…}}, optionally after <|python_tag|>, several separated
by "; ".

A response that starts otherwise is text from its first character, and so is an object without arguments or with the
name of no offered function: it may be an answer in JSON.
"""

import re
from collections.abc import Collection
from typing import Any

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, call_decoder, parse_call

TAG = "<|python_tag|>"
SEPARATOR = re.compile(rf"\A(?:[ \t\r\n;]|{re.escape(TAG)})+")
"""Before a call: blanks, semicolons and tags in any order."""


class ObjectEnds:
    """Detector of the ends of JSON objects in incremental text: counts brackets outside of strings, each character
    once.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def is_outside(self) -> bool:
        """True outside of objects."""
        return self._depth <= 0

    def push(self, text: str) -> bool:
        """Return True if an object may have ended in this piece."""
        has_ended = False
        for character in text:
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                has_ended |= self._depth <= 0
        return has_ended


class Llama3JsonParser:
    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._ends = ObjectEnds()
        self._pieces: list[str] = []
        """Pieces received since the last check of `_held`: joining each one to a long text would copy all of it."""
        self._held = ""
        self._is_text = self._is_call = False
        self._num_calls = 0
        self._decoder = call_decoder()

    def push(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        self._pieces.append(text)
        is_open = self._num_calls > 0 or self._is_call
        if is_open and not self._ends.push(text) and not self._may_be_trailing_text(text):
            return Parsed()
        self._gather()
        if is_open:
            return self._complete_calls()
        if not self._may_be_call():
            return self._as_text()
        self._is_call = self._held.lstrip().removeprefix(TAG).lstrip().startswith("{")
        return self._complete_calls() if self._is_call and self._ends.push(self._held) else Parsed()

    def flush(self) -> Parsed:
        self._gather()
        parsed = self._complete_calls()
        if self._num_calls == 0:
            parsed.content += self._held
        self._held = ""
        return parsed

    def _offered_call(self, value: Any) -> tuple[str, str] | None:
        """Return name and arguments, or None if the object is an answer and not a call."""
        if not isinstance(value, dict) or not value.keys() & {"arguments", "parameters"}:
            return None
        call = parse_call(value)
        return call if call is not None and (self._names is None or call[0] in self._names) else None

    def _gather(self) -> None:
        self._held += "".join(self._pieces)
        self._pieces.clear()

    def _may_be_trailing_text(self, text: str) -> bool:
        """Return True if the piece comes after a call, outside of objects."""
        return self._num_calls > 0 and self._ends.is_outside and not text.isspace()

    def _may_be_call(self) -> bool:
        start = self._held.lstrip()
        return start.startswith(("{", TAG)) or TAG.startswith(start)

    def _as_text(self) -> Parsed:
        self._is_text = True
        held, self._held = self._held, ""
        return Parsed(held)

    def _complete_calls(self) -> Parsed:
        """Return the complete calls. Other text after a call is content."""
        parsed = Parsed()
        while not self._is_text:
            rest = SEPARATOR.sub("", self._held, count=1)
            if self._num_calls > 0 and rest and not rest.startswith("{") and not TAG.startswith(rest[: len(TAG)]):
                self._held = rest
                return parsed.plus(self._as_text())
            if not rest.endswith(("}", "} ", "}\n")) and "}" not in rest:
                break  # no object is complete: skip the decoder
            try:
                value, end = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            call = self._offered_call(value)
            if call is None:
                self._held = rest if self._num_calls else self._held
                return parsed.plus(self._as_text())
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
            self._held = rest[end:]
        return parsed
