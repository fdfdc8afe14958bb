"""From what a model writes to OpenAI's tool calls: one file per form. Pure; fed with pieces of text as they come."""

from collections.abc import Callable

from trimtab_engine.api.openai.tool_parsers.hermes import HermesParser
from trimtab_engine.api.openai.tool_parsers.llama3_json import Llama3JsonParser
from trimtab_engine.api.openai.tool_parsers.parsed import ToolParser
from trimtab_engine.api.openai.tool_parsers.pythonic import PythonicParser

PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "pythonic": PythonicParser,
}
"""The parsers under vLLM's names, as --tool-call-parser takes them."""

__all__ = ["PARSERS", "ToolParser"]
