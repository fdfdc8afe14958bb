"""Format `<think>reasoning</think>answer` of DeepSeek-R1, Qwen3 and others. Only the markers and leading blanks are
removed.

Templates may write the opening marker at the end of the prompt, so that the response starts with reasoning, or both
markers, so that there is no reasoning.
"""

from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser, Split
from trimtab_engine.api.openai.tool_parsers.parsed import overlap

BEGIN, END = "<think>", "</think>"


class ThinkParser:
    """Parser of think tags. With `begins_thinking` None the start of the response decides."""

    def __init__(self, *, begins_thinking: bool | None) -> None:
        self._is_thinking = begins_thinking
        self._may_begin = begins_thinking is not False
        """True while the opening marker may still follow."""
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
            reasoning, self._held = self._held[:at], self._held[at + len(END) :]
            self._is_thinking = False
            return Split(reasoning, self._all_content().content)
        certain = len(self._held) - overlap(self._held, END)
        reasoning, self._held = self._held[:certain], self._held[certain:]
        return Split(reasoning=reasoning)

    def flush(self) -> Split:
        """Return the held-back text; a truncated reasoning section stays reasoning."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self._is_thinking else Split(content=held)

    def _all_content(self) -> Split:
        content, self._held = self._held, ""
        return Split(content=content)


def deepseek_r1_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser that starts with reasoning, unless the prompt has closed the section."""
    return ThinkParser(begins_thinking=_is_reasoning_open(prompt_end) is not False)


def qwen3_parser(prompt_end: str) -> ReasoningParser:
    """Return a parser that starts with reasoning if the prompt or the start of the response opens the section."""
    return ThinkParser(begins_thinking=_is_reasoning_open(prompt_end))


def _is_reasoning_open(prompt_end: str) -> bool | None:
    """Return True if the prompt ends inside a reasoning section, False after one, None without any."""
    begun, ended = prompt_end.rfind(BEGIN), prompt_end.rfind(END)
    return None if begun == ended else begun > ended
