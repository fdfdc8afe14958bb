"""Harmony, gpt-oss' format: messages on channels; `analysis` is reasoning, the other channels are for the user.

``` <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|> ``` The
markers are special tokens, so the text must include them. A call on the channel `commentary` becomes text without its
markers.
"""

import re

from trimtab_engine.api.openai.reasoning_parsers.split import Split

MESSAGE = "<|message|>"
HEADERS = ("<|start|>", "<|channel|>")
"""Markers that start a header; the header ends at MESSAGE."""
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARK = re.compile("|".join(re.escape(mark) for mark in (MESSAGE, *HEADERS, *ENDS)))
MAX_MARK_LENGTH = max(map(len, (MESSAGE, *HEADERS, *ENDS)))
REASONING_CHANNEL = "analysis"


class HarmonyParser:
    """Parser of Harmony messages. Text outside of messages and headers is content."""

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = None
        """Header that is being read, or None inside a message."""
        self._is_thinking = False

    def push(self, text: str) -> Split:
        self._held += text
        split = Split()
        while (mark := MARK.search(self._held)) is not None:
            self._emit(split, self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            self._apply_mark(mark[0])
        begun = self._held.rfind("<", max(0, len(self._held) - MAX_MARK_LENGTH + 1))
        certain = begun if begun >= 0 and _may_be_mark(self._held[begun:]) else len(self._held)
        self._emit(split, self._held[:certain])
        self._held = self._held[certain:]
        return split

    def flush(self) -> Split:
        split = Split()
        self._emit(split, self._held)
        self._held = ""
        return split

    def _apply_mark(self, mark: str) -> None:
        """Update the state after a marker, which determines the type of the following text."""
        if mark == MESSAGE:
            channel = (self._header or "").rpartition(HEADERS[1])[2].split()
            self._is_thinking = bool(channel) and channel[0] == REASONING_CHANNEL
            self._header = None
        elif mark in HEADERS:
            self._header = (self._header or "") + mark
        else:
            self._header = None
            self._is_thinking = False

    def _emit(self, split: Split, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._is_thinking:
            split.reasoning += text
        else:
            split.content += text


def _may_be_mark(text: str) -> bool:
    return any(mark.startswith(text) for mark in (MESSAGE, *HEADERS, *ENDS))
