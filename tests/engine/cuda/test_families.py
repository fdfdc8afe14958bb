"""Families whose layers do not all see alike, on a GPU: the tokens of transformers on the CPU, of requests that are cut
in chunks, preempted and found in the prefix cache. Skipped without a GPU.
"""

from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import Reference, reference_tokens
from hybrid_families import FAMILIES, PROMPTS, save_family
from served import served_twice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUM_TOKENS = 48
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 16 << 20, "swap_space_bytes_cap": 16 << 20}
SIZES: dict[str, Any] = engine_builders.ON_A_GPU | {
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
    served = served_twice(engine, references)
    assert any(batch.preempted[changes.get("preemption_mode", "recompute")] for batch in served)
    assert any(batch.prefix_cache_hits for batch in served)
    engine.close()
