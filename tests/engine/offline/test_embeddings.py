"""LLM.embed on a tiny random model, compatible with vLLM."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine import LLM, PoolingParams, SamplingParams
from trimtab_engine.errors import InvalidRequest

TINY: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "device_memory_bytes": 4 << 30,
    "cpu_threads": 1,
    "max_model_len": 128,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **TINY) as llm:
        yield llm


def test_vectors_are_in_prompt_order_and_equal_single_prompts(llm: LLM) -> None:
    prompts = ["one", "two and more " * 9, "three"]
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == list(prompt.encode())
        assert output.outputs.hidden_size == 64
        assert math.hypot(*output.outputs.embedding) == pytest.approx(1.0)
        (alone,) = llm.embed({"prompt_token_ids": list(prompt.encode())}, use_tqdm=False)
        assert alone.prompt is None
        assert alone.outputs.embedding == pytest.approx(output.outputs.embedding, abs=1e-5)


def test_dimensions_and_normalization_apply_per_prompt(llm: LLM) -> None:
    params = [
        PoolingParams(normalize=False),
        PoolingParams(task="embed", use_activation=False, dimensions=5),
        PoolingParams(dimensions=5),
    ]
    whole, first, cut = (o.outputs.embedding for o in llm.embed(["a"] * 3, pooling_params=params, use_tqdm=False))
    assert first == pytest.approx(whole[:5])
    length = math.hypot(*whole[:5])
    assert cut == pytest.approx([value / length for value in whole[:5]])
    with pytest.raises(InvalidRequest, match="3 pooling_params for 2 prompts"):
        llm.embed(["a", "b"], pooling_params=params, use_tqdm=False)


def test_prompt_may_fill_the_context(llm: LLM) -> None:
    assert len(llm.embed("a" * 128, use_tqdm=False)[0].prompt_token_ids) == 128
    with pytest.raises(InvalidRequest, match="a prompt has 129 tokens, but max_model_len is 128; shorten it"):
        llm.embed("a" * 129, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        ("", {}, "a prompt has no tokens"),
        ([300], {}, "a token id outside the vocabulary"),
        ("a", {"dimensions": 65}, r"dimensions exceeds the model's 64 \(65\)"),
        ("a", {"dimensions": 0}, r"dimensions must be 1 or more \(0\)"),
        ("a", {"task": "classify"}, "task 'classify' is not supported"),
        ("a", {"normalize": True, "use_activation": False}, "normalize and use_activation conflict"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, "does not support multi_modal_data"),
    ],
)
def test_invalid_embedding_prompt_is_rejected_before_running(
    llm: LLM, prompt: Any, params: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        llm.embed(prompt, pooling_params=PoolingParams(**params), use_tqdm=False)


def test_pooling_keywords_apply_and_pooling_llm_does_not_generate(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **TINY, runner="pooling", pooler_config={"pooling_type": "MEAN", "dimensions": 3}) as llm:
        assert llm.embed("abc", use_tqdm=False)[0].outputs.hidden_size == 3
        with pytest.raises(InvalidRequest, match=r"does not generate text: .* --runner pooling"):
            llm.generate("abc", SamplingParams(max_tokens=1), use_tqdm=False)


def test_generation_llm_does_not_embed(tiny_model: Path) -> None:
    with (
        LLM(str(tiny_model), **TINY, runner="generate") as llm,
        pytest.raises(InvalidRequest, match=r"does not compute embeddings: .* --runner generate"),
    ):
        llm.embed("abc", use_tqdm=False)
