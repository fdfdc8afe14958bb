"""Reasoning parsers split model output into reasoning and content, independent of how the text is split into pieces."""

import pytest
from trimtab_engine.api.openai.reasoning_parsers import PARSERS, ReasoningParser
from trimtab_engine.api.openai.reasoning_parsers.split import Split

HARMONY = (
    "<|channel|>analysis<|message|>2 < 3, so<|end|><|start|>assistant<|channel|>final<|message|>It is <3.<|return|>"
)
CALLING = (
    "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment. "
    '<|end|><|start|>assistant to=functions.time<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
)
CASES = [
    # name, end of the prompt, model output, reasoning, content
    ("deepseek_r1", "", "<think>\nhm</think>\n\nyes", "\nhm", "\n\nyes"),
    ("deepseek_r1", "<think>\n", "hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "hm</think>yes", "hm", "yes"),  # always starts with reasoning
    ("deepseek_r1", "", "hm, cut", "hm, cut", ""),
    ("deepseek_r1", "", "a < b </thin", "a < b </thin", ""),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "yes", "", "yes"),  # disabled by the prompt
    ("deepseek_r1", "", "", "", ""),
    ("deepseek_r1", "<think>hm</think>So", " yes", "", " yes"),  # a continued message
    ("deepseek_r1", "<think>hm", " hm</think>yes", " hm", "yes"),
    ("qwen3", "", "<think>hm</think>yes", "hm", "yes"),
    ("qwen3", "", "yes, </think> is a mark", "", "yes, </think> is a mark"),
    ("qwen3", "", " <thin air", "", " <thin air"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "assistant\n<think>\n", "hm</think>yes", "hm", "yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "<think> is a mark", "", "<think> is a mark"),
    ("qwen3", "", "<think>a</think>b</think>c", "a", "b</think>c"),
    ("openai_gptoss", "", HARMONY, "2 < 3, so", "It is <3."),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>2 < 3, cut", "2 < 3, cut", ""),
    ("openai_gptoss", "", CALLING, "I need it.", 'One moment. {"a": 1}'),
    ("openai_gptoss", "", "no channel at all <|", "", "no channel at all <|"),
    ("openai_gptoss", "", "<|channel|>fin", "", ""),
]


def read(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    splits: list[Split] = [parser.push(piece) for piece in pieces] + [parser.flush()]
    return "".join(split.reasoning for split in splits), "".join(split.content for split in splits)


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), CASES)
def test_parser_separates_reasoning_and_content(
    name: str, prompt_end: str, text: str, reasoning: str, content: str
) -> None:
    for size in (len(text) or 1, 1, 3, 7):
        pieces = [text[first : first + size] for first in range(0, len(text), size)]
        assert read(PARSERS[name](prompt_end), pieces) == (reasoning, content)


def test_certain_text_is_returned_at_once() -> None:
    parser = PARSERS["deepseek_r1"]("")
    assert parser.push("<think>one ").reasoning == "one "
    assert parser.push("two </th").reasoning == "two "
    assert parser.push("ink>three") == Split("", "three")
    assert parser.push("four").content == "four"
