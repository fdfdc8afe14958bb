"""Parsers of tool calls in model output, one module per format. Pure and incremental."""

from trimtab_engine.api.openai.tool_parsers.hermes import HermesParser
from trimtab_engine.api.openai.tool_parsers.llama3_json import Llama3JsonParser
from trimtab_engine.api.openai.tool_parsers.parsed import ParserFactory, ToolParser
from trimtab_engine.api.openai.tool_parsers.pythonic import PythonicParser

PARSERS: dict[str, ParserFactory] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "pythonic": PythonicParser,
}
"""Parsers by vLLM's name, as in --tool-call-parser."""

__all__ = ["PARSERS", "ToolParser"]
