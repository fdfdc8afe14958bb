"""Families whose layers do not all see alike, on a GPU: the tokens of transformers on the CPU, of requests that are cut
in chunks, preempted and found in the prefix cache. Skipped without a GPU."""

from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import Reference, compare, reference_tokens
from hybrid_families import FAMILIES, save_family
from served import Served, greedy_requests, serve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[5], [5, 6, 7, 8, 9, 10, 11], list(range(20, 60)), [*range(20, 50), 3, 4]]
NUM_TOKENS = 48
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 16 << 20, "swap_space_bytes_cap": 16 << 20}
SIZES: dict[str, Any] = {
    "load_format": "auto",
    "dtype": "float32",
    "device": "cuda",
    "device_memory_bytes": 64 << 30,  # what other processes have of it counts as taken
    "block_size": 16,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
}
NUM_BLOCKS = {"mistral": 10, "gemma3": 60, "llama4": 60}
"""Too few for all requests: windows give blocks back, and two KV groups have a share each. 28 of the others."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[Reference]]:
    folder = tmp_path_factory.mktemp("family")
    return request.param, folder, reference_tokens(save_family(request.param, folder), PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    "changes",
    [{"enforce_eager": True}, {"async_scheduling": True}, SWAP | {"async_scheduling": True}],
    ids=["eager", "overlapping", "overlapping, swapping"],
)
def test_tokens_are_those_of_transformers(family: tuple[str, Path, list[Reference]], changes: dict[str, Any]) -> None:
    name, folder, references = family
    engine = engine_builders.an_engine(folder, num_gpu_blocks_override=NUM_BLOCKS.get(name, 28), **SIZES, **changes)
    served: list[Served] = []

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        served.append(serve(engine, greedy_requests(prompts, num_tokens)))
        return list(served[-1].tokens.values())

    for _ in range(2):
        parity = compare(references * 3, generate)
        assert parity.defects == []
        assert parity.near_ties <= 3
    assert any(batch.preempted[changes.get("preemption_mode", "recompute")] for batch in served)
    assert any(batch.prefix_cache_hits for batch in served)
    engine.close()
