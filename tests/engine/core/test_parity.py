"""The real model against transformers, and the comparison itself."""

import os
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import PROMPTS, Reference, compare, greedy_generator, load_runner, reference_tokens
from served import Served, greedy_requests, serve
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.startup import start_engine

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
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "chunk", "batch"), [(5, None, 1), (20, None, 20), (20, 3, 20)], ids=["alone", "batched", "chunked"]
)
def test_the_real_model_gives_the_tokens_of_transformers(
    references: list[Reference], count: int, chunk: int | None, batch: int
) -> None:
    runner = load_runner(str(MODEL))
    parity = compare(references[:count], greedy_generator(runner, block_size=16, chunk=chunk, batch=batch))
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


TIGHT = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 20, "max_num_batched_tokens_cap": 20}
"""Room for one request of max_model_len, or about three of the twenty requests, in chunks."""
SWAP = {"swap_space_bytes": 256 << 20, "swap_space_bytes_cap": 256 << 20}


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("changes", "mode", "rounds"),
    [
        (TIGHT, "recompute", 1),
        ({**TIGHT, **SWAP, "preemption_mode": "swap", "async_scheduling": True}, "swap", 1),
        (
            {"block_size": 8, "num_gpu_blocks_override": 400, "async_scheduling": True},
            None,
            2,
        ),  # the second time from the prefix cache
    ],
    ids=["chunked and preempted", "chunked and swapped, steps overlapping", "prefix-cached"],
)
def test_tokens_equal_transformers_under_all_features(
    references: list[Reference], changes: dict[str, Any], mode: str | None, rounds: int
) -> None:
    config = EngineConfig(model=str(MODEL), max_model_len=256, max_num_seqs=20, max_num_seqs_cap=20, **changes)
    engine, _ = start_engine(config, lambda stage, percent: None, engine_builders.ticking())
    served: list[Served] = []

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        served.append(serve(engine, greedy_requests(prompts, num_tokens)))
        return list(served[-1].tokens.values())

    for _ in range(rounds):
        parity = compare(references, generate)
        assert parity.defects == []
        assert parity.near_ties <= 2, "at most 1 in 1,000 tokens"
    assert sum(batch.preempted[mode or ""] for batch in served) >= (10 if mode else 0)
    assert sum(batch.prefix_cache_hits for batch in served) > (40 if rounds > 1 else -1)
