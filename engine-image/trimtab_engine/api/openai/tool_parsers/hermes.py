"""Hermes format, used by Qwen and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>, mixed with text.

A call is emitted when complete. Invalid content between the markers stays text, including the markers.
"""

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, overlap, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0

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
            end = self._held.find(END, len(BEGIN))
            if end < 0:
                return parsed
            call = read_call(self._held[len(BEGIN) : end])
            if call is None:
                self._emit(parsed, end + len(END))
                continue
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
            self._held = self._held[end + len(END) :].lstrip()

    def flush(self) -> Parsed:
        """Parse the end of the response; it may end an unclosed call."""
        held, self._held = self._held, ""
        call = read_call(held.removeprefix(BEGIN)) if held.startswith(BEGIN) else None
        if call is None:
            return Parsed(held)
        return Parsed(calls=[CallDelta(self._num_calls, call[1], call[0])])

    def _emit(self, parsed: Parsed, length: int) -> None:
        """Emit the first `length` held characters as text. Blanks between calls are dropped."""
        text, self._held = self._held[:length], self._held[length:]
        if self._num_calls == 0 or text.strip():
            parsed.content += text
