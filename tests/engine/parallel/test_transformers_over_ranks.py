"""Models on transformers' code over tensor-parallel processes: greedy tokens equal one rank's, alone, preempted,
swapped and from the prefix cache. See models/by_transformers/test_division.py for the division.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_checkpoint import VOCABULARY, a_checkpoint
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.scheduling.sampling import Sampling

pytestmark = pytest.mark.usefixtures("forked")

OUTPUT = 64
ROOM = {"max_model_len": 104, "num_gpu_blocks_override": 64}
TIGHT = {
    "num_gpu_blocks_override": 18,
    "max_num_batched_tokens": 24,
    "preemption_mode": "swap",
    "swap_space_bytes": 1 << 20,
    "swap_space_bytes_cap": 1 << 20,
}


def requests() -> list[AddRequest]:
    """Prompts of several lengths, half of which begin alike."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, VOCABULARY, (24,), generator=generator).tolist()
    sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    own = [torch.randint(3, VOCABULARY, (1 + 3 * number,), generator=generator).tolist() for number in range(4)]
    prompts = [(shared if number % 2 else []) + rest for number, rest in enumerate(own)]
    return [AddRequest(f"r{number}", prompt, sampling, 0.0) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "name", ["Phi3ForCausalLM", "MixtralForCausalLM", pytest.param("GPTNeoXForCausalLM", marks=pytest.mark.soak)]
)
def test_64_greedy_tokens_of_two_ranks_equal_one_rank(
    name: str, tmp_path: Path, start: Callable[..., Engine], serving: Any
) -> None:
    serve, _, _ = serving
    a_checkpoint(tmp_path, name)
    expected = serve(start(str(tmp_path), **ROOM), requests())
    assert serve(start(str(tmp_path), tensor_parallel_size=2, **ROOM), requests()) == expected


def test_shared_kv_heads_keep_tokens_under_all_features(
    tmp_path: Path, start: Callable[..., Engine], serving: Any
) -> None:
    serve, _, _ = serving
    a_checkpoint(tmp_path, "GraniteForCausalLM")
    alone = start(str(tmp_path), **ROOM)
    expected = serve(alone, requests())
    engine = start(str(tmp_path), tensor_parallel_size=2, **ROOM | TIGHT)
    steps: list[StepStats] = []
    assert serve(engine, requests(), steps) == expected
    assert serve(engine, requests()[1:2], steps).items() <= expected.items(), "from cached blocks"
    assert sum(stats.swapped_in_bytes for stats in steps) > 0
    assert sum(stats.prefix_cache_hits for stats in steps) > 0
    assert [(rank["heads"], rank["kv_heads"]) for rank in engine.layout()["ranks"]] == [(2, 1)] * 2
    assert engine.ledger().bytes_per_block == alone.ledger().bytes_per_block // 2


def test_a_model_without_a_plan_is_refused_before_any_process_starts(
    tmp_path: Path, start: Callable[..., Engine]
) -> None:
    a_checkpoint(tmp_path, "GPT2LMHeadModel")
    with pytest.raises(NotSupportedError, match="--tensor-parallel-size: GPT2LMHeadModel runs on transformers"):
        start(str(tmp_path), tensor_parallel_size=2)
