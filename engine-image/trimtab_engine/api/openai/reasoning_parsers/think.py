"""<think>thoughts</think>answer, as DeepSeek-R1, Qwen3 and many others write it. No character is lost but the marks,
and blanks before the first.

Templates may write the first mark at the end of the prompt, so that the answer begins with thoughts, or both, so that
there are none.
"""

from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser, Split
from trimtab_engine.api.openai.tool_parsers.parsed import overlap

BEGIN, END = "<think>", "</think>"


class ThinkParser:
    """`begins_thinking` None: as the answer's first word says."""

    def __init__(self, *, begins_thinking: bool | None) -> None:
        self._is_thinking = begins_thinking
        self._may_begin = begins_thinking is not False
        """Whether the mark may still come that begins the thoughts."""
        self._held = ""

    def push(self, text: str) -> Split:
        if self._is_thinking is False:
            return Split(content=text)
        self._held += text
        if self._may_begin:
            start = self._held.lstrip()
            if len(start) < len(BEGIN) and BEGIN.startswith(start):
                return Split()
            self._may_begin = False
            if start.startswith(BEGIN):
                self._is_thinking, self._held = True, start.removeprefix(BEGIN)
            elif self._is_thinking is None:
                self._is_thinking = False
                return self._all_content()
        at = self._held.find(END)
        if at >= 0:
            thoughts, self._held = self._held[:at], self._held[at + len(END) :]
            self._is_thinking = False
            return Split(thoughts, self._all_content().content)
        certain = len(self._held) - overlap(self._held, END)
        thoughts, self._held = self._held[:certain], self._held[certain:]
        return Split(reasoning=thoughts)

    def flush(self) -> Split:
        """Thoughts that were cut are thoughts."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self._is_thinking else Split(content=held)

    def _all_content(self) -> Split:
        content, self._held = self._held, ""
        return Split(content=content)


def after_deepseek_r1(prompt_end: str) -> ReasoningParser:
    """It thinks always, unless the prompt has ended the thoughts."""
    return ThinkParser(begins_thinking=_left_open(prompt_end) is not False)


def after_qwen3(prompt_end: str) -> ReasoningParser:
    """It thinks where the prompt, or the answer's first word, begins to."""
    return ThinkParser(begins_thinking=_left_open(prompt_end))


def _left_open(prompt_end: str) -> bool | None:
    """Whether the prompt ends within thoughts, or behind them; None: it says nothing of any."""
    begun, ended = prompt_end.rfind(BEGIN), prompt_end.rfind(END)
    return None if begun == ended else begun > ended
