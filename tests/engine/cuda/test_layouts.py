"""Layouts on one GPU: ranks share it and talk by gloo through host memory; NCCL's code runs at world size 1. Skipped
without a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from trimtab_engine.config import EngineConfig
from trimtab_engine.messages import AddRequest, SamplingParams
from trimtab_engine.parallel.eplb_config import EplbConfig
from trimtab_engine.parallel.groups import RankGroup, WireMeter
from trimtab_engine.startup import start_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCABULARY = 512
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
MIXTURE = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
TP2, PP2, EP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
EPLB = {"eplb": EplbConfig(window_size=8, step_interval=8, num_redundant_experts=2)}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 16 << 20, "swap_space_bytes_cap": 16 << 20}


def tokens_of(folder: Path, values: dict[str, Any], **layout: Any) -> dict[str, list[int]]:
    """What 12 requests yield, in a KV cache that is too small for all of them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cuda", dtype="float32", num_gpu_blocks_override=16,
        max_model_len=128, max_num_seqs=8, max_num_seqs_cap=8, max_num_batched_tokens=48,
        max_num_batched_tokens_cap=48, **layout,
    )  # fmt: skip
    engine, _ = start_engine(config, lambda stage, percent: None, lambda: 0.0)
    try:
        tokens: dict[str, list[int]] = {}
        sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        for number in range(12):
            prompt = [3 + (number // 2 * 7919 + place * 101) % (VOCABULARY - 3) for place in range(1 + 6 * number)]
            engine.add(AddRequest(f"r{number}", prompt, sampling, 0.0))
        while engine.has_work:
            for output in engine.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        pytest.param(MODEL, TP2, id="dense tp2"),
        pytest.param(MODEL, PP2 | SWAP, id="dense pp2 swapping"),
        pytest.param(MIXTURE, TP2, id="moe tp2"),
        pytest.param(MIXTURE, TP2 | EP, id="moe tp2 ep"),
        pytest.param(MIXTURE, TP2 | EP | EPLB, id="moe tp2 ep balanced"),
    ],
)
def test_ranks_that_share_a_gpu_yield_the_tokens_of_one(
    values: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    assert tokens_of(tmp_path / "m", values, **layout) == tokens_of(tmp_path / "m", values)


@pytest.fixture
def nccl() -> Iterator[RankGroup]:
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    yield RankGroup(dist.new_group([0]), (0,), 0, WireMeter())
    dist.destroy_process_group()


def test_collectives_run_on_nccl(nccl: RankGroup) -> None:
    x = torch.arange(12.0, device="cuda").view(4, 3)
    assert nccl.device == "cuda"
    for collective in (nccl.all_reduce, nccl.all_gather, nccl.reduce_scatter, nccl.gather_columns):
        found = collective(x.clone())
        assert found is not None
        torch.testing.assert_close(found, x)
