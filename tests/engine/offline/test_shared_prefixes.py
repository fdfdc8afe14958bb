"""Prompts of one step with a common prefix: each has the tokens and the vector of a single prompt.

More than 240 rows per step: the compiled CPU layers compute them in several slices.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine import LLM, SamplingParams

TINY: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "device_memory_bytes": 4 << 30,
    "cpu_threads": 2,
    "max_model_len": 512,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
}
PREFIX = list(range(40, 81))
PROMPTS = [{"prompt_token_ids": [*PREFIX, *range(5, 5 + length), 7 + length]} for length in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def values(output: Any) -> list[float]:
    """Return the log-probability of each token of a choice."""
    return [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **TINY) as llm:
        yield llm


@pytest.fixture
def uncached(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **TINY, enable_prefix_caching=False) as llm:
        yield llm


def test_prompts_with_shared_prefix_generate_tokens_of_each_alone(llm: LLM, uncached: LLM) -> None:
    alone = [uncached.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    for _ in range(2):  # the second time, from the prefix cache
        for output, expected in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), alone, strict=True):
            assert output.outputs[0].token_ids == expected.token_ids
            assert values(output.outputs[0]) == pytest.approx(values(expected), abs=1e-4)


def test_prompts_with_shared_prefix_embed_to_vectors_of_each_alone(llm: LLM, uncached: LLM) -> None:
    alone = [uncached.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in PROMPTS]
    for _ in range(2):
        together = llm.embed(PROMPTS, use_tqdm=False)
        for output, vector in zip(together, alone, strict=True):
            assert output.outputs.embedding == pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize("num_tokens", [241, 293])
def test_greedy_choices_of_one_prompt_are_equal(llm: LLM, num_tokens: int) -> None:
    prompt = {"prompt_token_ids": [number % 250 for number in range(num_tokens)]}
    params = SamplingParams(n=4, temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    first, *others = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    for other in others:
        assert other.token_ids == first.token_ids
        assert values(other) == pytest.approx(values(first), abs=1e-4)
