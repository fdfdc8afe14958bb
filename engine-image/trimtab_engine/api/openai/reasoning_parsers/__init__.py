"""Parsers that separate reasoning content from the answer, one module per format. Pure and incremental."""

from collections.abc import Callable

from trimtab_engine.api.openai.reasoning_parsers.harmony import HarmonyParser
from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser
from trimtab_engine.api.openai.reasoning_parsers.think import deepseek_r1_parser, qwen3_parser


def harmony_parser(prompt_end: str) -> ReasoningParser:
    """Return gpt-oss' parser; its channels are independent of the end of the prompt."""
    return HarmonyParser()


PARSERS: dict[str, Callable[[str], ReasoningParser]] = {
    "deepseek_r1": deepseek_r1_parser,
    "openai_gptoss": harmony_parser,
    "qwen3": qwen3_parser,
}
"""Parsers by vLLM's name, as in --reasoning-parser. Each receives the end of the prompt, because templates may open or
close the reasoning section themselves."""
NEEDS_SPECIAL_TOKENS = frozenset({"openai_gptoss"})
"""Parsers that need special tokens in the text."""

__all__ = ["NEEDS_SPECIAL_TOKENS", "PARSERS", "ReasoningParser"]
