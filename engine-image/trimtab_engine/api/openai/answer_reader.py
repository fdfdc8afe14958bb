"""Reader of one response: extracts the reasoning first, then parses tool calls in the remaining text."""

from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser, Split
from trimtab_engine.api.openai.tool_parsers.parsed import Parsed, ToolParser


class ResponseParser:
    """Incremental reader. With `tools` None the remaining text is content; with `include_reasoning` False reasoning is
    dropped.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, include_reasoning: bool) -> None:
        self._reasoning, self._tools, self._include_reasoning = reasoning, tools, include_reasoning

    def push(self, text: str) -> Parsed:
        """Parse more text of the response."""
        return self._read(Split(content=text) if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> Parsed:
        """Parse the end of the response and return the text held back so far."""
        parsed = Parsed() if self._reasoning is None else self._read(self._reasoning.flush())
        return parsed if self._tools is None else parsed.plus(self._tools.flush())

    def _read(self, split: Split) -> Parsed:
        parsed = Parsed(split.content) if self._tools is None or not split.content else self._tools.push(split.content)
        if self._include_reasoning:
            parsed.reasoning = split.reasoning
        return parsed
