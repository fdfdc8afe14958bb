"""Harmony, gpt-oss's form: messages on channels, of which `analysis` are thoughts and the others are for the user.

```
<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
```
Marks are special tokens, so the text must have them. A call on the channel `commentary` is text here, without its
marks.
"""

import re

from trimtab_engine.api.openai.reasoning_parsers.split import Split

MESSAGE = "<|message|>"
HEADERS = ("<|start|>", "<|channel|>")
"""Where a header begins; it goes to MESSAGE."""
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARK = re.compile("|".join(re.escape(mark) for mark in (MESSAGE, *HEADERS, *ENDS)))
LONGEST = max(map(len, (MESSAGE, *HEADERS, *ENDS)))
THOUGHTS = "analysis"


class HarmonyParser:
    """What stands outside of messages and headers is text."""

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = None
        """The header that is being read; None within a message."""
        self._is_thinking = False

    def push(self, text: str) -> Split:
        self._held += text
        split = Split()
        while (mark := MARK.search(self._held)) is not None:
            self._give(split, self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            self._pass(mark[0])
        begun = self._held.rfind("<", max(0, len(self._held) - LONGEST + 1))
        certain = begun if begun >= 0 and _may_be_mark(self._held[begun:]) else len(self._held)
        self._give(split, self._held[:certain])
        self._held = self._held[certain:]
        return split

    def flush(self) -> Split:
        split = Split()
        self._give(split, self._held)
        self._held = ""
        return split

    def _pass(self, mark: str) -> None:
        """A mark changes what the text behind it is."""
        if mark == MESSAGE:
            channel = (self._header or "").rpartition(HEADERS[1])[2].split()
            self._is_thinking = bool(channel) and channel[0] == THOUGHTS
            self._header = None
        elif mark in HEADERS:
            self._header = (self._header or "") + mark
        else:
            self._header = None
            self._is_thinking = False

    def _give(self, split: Split, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._is_thinking:
            split.reasoning += text
        else:
            split.content += text


def _may_be_mark(text: str) -> bool:
    return any(mark.startswith(text) for mark in (MESSAGE, *HEADERS, *ENDS))
