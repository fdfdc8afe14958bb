"""From what a model writes to its thoughts and its answer: one file per form. Pure; fed with pieces of text as they
come."""

from collections.abc import Callable

from trimtab_engine.api.openai.reasoning_parsers.harmony import HarmonyParser
from trimtab_engine.api.openai.reasoning_parsers.split import ReasoningParser
from trimtab_engine.api.openai.reasoning_parsers.think import after_deepseek_r1, after_qwen3


def harmony(prompt_end: str) -> ReasoningParser:
    """gpt-oss names its channels itself, however the prompt ends."""
    return HarmonyParser()


PARSERS: dict[str, Callable[[str], ReasoningParser]] = {
    "deepseek_r1": after_deepseek_r1,
    "openai_gptoss": harmony,
    "qwen3": after_qwen3,
}
"""The parsers under vLLM's names, as --reasoning-parser takes them. Each is given how the answer begins in the prompt:
templates may begin, or end, the thoughts themselves."""
WRITTEN_WITH_SPECIAL_TOKENS = frozenset({"openai_gptoss"})
"""Those that need special tokens in the text."""

__all__ = ["PARSERS", "WRITTEN_WITH_SPECIAL_TOKENS", "ReasoningParser"]
