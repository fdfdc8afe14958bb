"""Llama 3's form: an answer that is {"name": …, "parameters": {…}}, perhaps after <|python_tag|>, several with "; ".

An answer that begins otherwise is text from its first character on.
"""

import json

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed, call_of

TAG = "<|python_tag|>"


class Llama3JsonParser:
    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._num_calls = 0
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        self._held += text
        if self._num_calls == 0 and not self._may_be_call():
            return self._as_text()
        return self._complete_calls()

    def flush(self) -> Parsed:
        parsed = self._complete_calls()
        if self._num_calls == 0:
            parsed.content += self._held
        self._held = ""
        return parsed

    def _may_be_call(self) -> bool:
        start = self._held.lstrip()
        return start.startswith(("{", TAG)) or TAG.startswith(start)

    def _as_text(self) -> Parsed:
        self._is_text = True
        held, self._held = self._held, ""
        return Parsed(held)

    def _complete_calls(self) -> Parsed:
        """What follows a call and is none is passed over, as the model's next words are nobody's."""
        parsed = Parsed()
        while not self._is_text:
            rest = self._held.lstrip().removeprefix(TAG).lstrip(" \t\r\n;")
            if not rest.endswith(("}", "} ", "}\n")) and "}" not in rest:
                break  # nothing is complete: the decoder need not look
            try:
                value, end = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            call = call_of(value)
            if call is None:
                return self._as_text() if self._num_calls == 0 else parsed
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
            self._held = rest[end:]
        return parsed
