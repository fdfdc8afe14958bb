"""Hermes format, used by Qwen and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>, mixed with text.

A call is emitted when complete. Invalid content between the markers stays text, including the markers. Markers within
JSON strings belong to the string.
"""

from collections.abc import Collection

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, overlap, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names` is unused: the markers make a call explicit, also of an unknown function."""
        self._held = ""
        self._num_calls = 0
        self._ignores_strings = False
        self._start_call()

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        while True:
            at = self._held.find(BEGIN)
            if at < 0:
                keep = overlap(self._held, BEGIN)
                self._emit(parsed, len(self._held) - keep)
                return parsed
            self._emit(parsed, at)
            end = self._find_end()
            if end < 0:
                return parsed
            call = read_call(self._held[len(BEGIN) : end])
            self._start_call()
            if call is None:
                self._emit(parsed, end + len(END))
                continue
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
            self._held = self._held[end + len(END) :].lstrip()

    def flush(self) -> Parsed:
        """Parse the end of the response; it may end an unclosed call."""
        parsed = Parsed()
        call = self._unclosed_call()
        if call is None and END in self._held:  # invalid JSON whose quotes do not match: from here they do not count
            self._ignores_strings = True
            parsed = self.push("")
            call = self._unclosed_call()
        held, self._held = self._held, ""
        if call is None:
            parsed.content += held
        else:
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
        return parsed

    def _unclosed_call(self) -> tuple[str, str] | None:
        return read_call(self._held.removeprefix(BEGIN)) if self._held.startswith(BEGIN) else None

    def _start_call(self) -> None:
        self._scanned = len(BEGIN)
        """Number of held characters that the search for the end has passed; each is read once."""
        self._in_string = self._escaped = self._is_plain = False

    def _find_end(self) -> int:
        """Return the position of the end marker outside of JSON strings, or -1. Content that is no JSON object, or has
        a line break within a string, has no strings.
        """
        held = self._held
        if self._ignores_strings:
            return held.find(END, len(BEGIN))
        if self._scanned == len(BEGIN):
            start = held[len(BEGIN) :].lstrip()
            if not start:
                return -1
            self._is_plain = start[0] != "{"
        while not self._is_plain and self._scanned < len(held):
            character = held[self._scanned]
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                self._is_plain = character == "\n"
            elif character == '"':
                self._in_string = True
            elif character == "<":
                if held.startswith(END, self._scanned):
                    return self._scanned
                if END.startswith(held[self._scanned :]):
                    return -1  # perhaps the beginning of the marker
            self._scanned += 1
        return held.find(END, len(BEGIN)) if self._is_plain else -1

    def _emit(self, parsed: Parsed, length: int) -> None:
        """Emit the first `length` held characters as text. Blanks between calls are dropped."""
        text, self._held = self._held[:length], self._held[length:]
        if self._num_calls == 0 or text.strip():
            parsed.content += text
