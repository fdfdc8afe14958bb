"""The real model against transformers, and the comparison itself."""

import os
import time
from pathlib import Path

import pytest
import torch
from trimtab_engine.bench.parity import PROMPTS, Reference, compare, greedy_generator, load_runner, reference_tokens
from trimtab_engine.config import EngineConfig
from trimtab_engine.messages import AddRequest, SamplingParams
from trimtab_engine.startup import start_engine

CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
MODEL = CACHE / "SmolLM2-135M-Instruct"
NUM_TOKENS = 64


def test_a_difference_is_a_defect_unless_the_reference_was_undecided() -> None:
    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        return [[len(prompt) + i for i in range(count)] for prompt in prompts]

    same = Reference([0], [1, 2, 3], [0.5, 0.5, 0.5])
    assert compare([same], generate).defects == []
    wrong = Reference([0], [1, 9, 3], [0.5, 0.5, 0.5])
    assert "2 instead of 9" in compare([wrong], generate).defects[0]
    near = Reference([0], [1, 9, 3], [0.5, 1e-6, 0.5])
    parity = compare([near], generate)
    assert (parity.near_ties, parity.defects, parity.num_tokens) == (1, [], 3)


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return reference_tokens(model, [tokenizer(prompt).input_ids for prompt in PROMPTS], NUM_TOKENS)


@pytest.mark.model
@pytest.mark.timeout(900)  # 1,280 tokens one by one in transformers on two cores
@pytest.mark.parametrize(("chunk", "batch"), [(None, 1), (None, 20), (3, 20)], ids=["alone", "batched", "chunked"])
def test_the_real_model_gives_the_tokens_of_transformers(
    references: list[Reference], chunk: int | None, batch: int
) -> None:
    runner = load_runner(str(MODEL))
    parity = compare(references, greedy_generator(runner, block_size=16, chunk=chunk, batch=batch))
    assert parity.defects == []
    assert parity.near_ties <= 2, "at most 1 in 1,000 tokens"


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_gguf_file_gives_the_same_tokens(references: list[Reference]) -> None:
    files = sorted((CACHE / "gguf").glob("*.gguf"))
    if not files:
        pytest.skip("no GGUF file in the cache; make model")
    runner = load_runner(str(files[0]))
    parity = compare(references, greedy_generator(runner, block_size=16, batch=20))
    assert parity.defects == []


@pytest.mark.model
@pytest.mark.timeout(900)
def test_requests_that_are_chunked_and_preempted_by_the_engine_give_the_tokens_of_transformers(
    references: list[Reference],
) -> None:
    config = EngineConfig(
        model=str(MODEL),
        max_model_len=256,
        num_gpu_blocks_override=16,  # one request of max_model_len, or about three of the twenty that are sent
        max_num_seqs=20,
        max_num_seqs_cap=20,
        max_num_batched_tokens=20,
        max_num_batched_tokens_cap=20,
    )
    engine, _ = start_engine(config, lambda stage, percent: None, time.monotonic)
    num_preemptions = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        nonlocal num_preemptions
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            engine.add(AddRequest(str(number), prompt, sampling, arrival_time=0.0))
        while engine.has_work:
            step = engine.step()
            engine.check_integrity()
            num_preemptions += sum(sum(reasons.values()) for reasons in step.stats.preempted.values())
            for output in step.outputs:
                outputs[output.request_id] += output.token_ids
        return list(outputs.values())

    parity = compare(references, generate)
    assert parity.defects == []
    assert parity.near_ties <= 2, "at most 1 in 1,000 tokens"
    assert num_preemptions >= 10
