"""One answer's reader where a parser looks at it: thoughts are taken out first, calls are read in what is left."""

from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser, Split
from trimtab_engine.api.openai.tool_parsers.parsed import Parsed, ToolParser


class AnswerReader:
    """`tools` None: what is no thought is text. `tells_thoughts` False: thoughts are left out of the answer."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, tells_thoughts: bool) -> None:
        self._reasoning, self._tools, self._tells_thoughts = reasoning, tools, tells_thoughts

    def push(self, text: str) -> Parsed:
        """More of the answer."""
        return self._read(Split(content=text) if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> Parsed:
        """The answer has ended: what was held back comes."""
        parsed = Parsed() if self._reasoning is None else self._read(self._reasoning.flush())
        return parsed if self._tools is None else parsed.plus(self._tools.flush())

    def _read(self, split: Split) -> Parsed:
        parsed = Parsed(split.content) if self._tools is None or not split.content else self._tools.push(split.content)
        if self._tells_thoughts:
            parsed.reasoning = split.reasoning
        return parsed
