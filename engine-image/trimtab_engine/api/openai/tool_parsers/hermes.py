"""Hermes' form, which Qwen and others share: <tool_call>{"name": …, "arguments": {…}}</tool_call>, among text.

A call is told when it is complete. What is between the marks but is no call stays text, marks and all.
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
                self._give(parsed, len(self._held) - keep)
                return parsed
            self._give(parsed, at)
            end = self._held.find(END, len(BEGIN))
            if end < 0:
                return parsed
            call = read_call(self._held[len(BEGIN) : end])
            if call is None:
                self._give(parsed, end + len(END))
                continue
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
            self._held = self._held[end + len(END) :].lstrip()

    def flush(self) -> Parsed:
        """A model may end a call by ending its answer."""
        held, self._held = self._held, ""
        call = read_call(held.removeprefix(BEGIN)) if held.startswith(BEGIN) else None
        if call is None:
            return Parsed(held)
        return Parsed(calls=[CallDelta(self._num_calls, call[1], call[0])])

    def _give(self, parsed: Parsed, length: int) -> None:
        """The beginning of what is held is text. Blanks between calls are none."""
        text, self._held = self._held[:length], self._held[length:]
        if self._num_calls == 0 or text.strip():
            parsed.content += text
