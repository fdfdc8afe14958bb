"""Layouts on GPUs. On one the ranks share it and talk by gloo through host memory, so that only pipelines replay
graphs, and NCCL's code runs at world size 1; on two or more each rank has its own. Skipped without a GPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter
from trimtab_engine.runner.graphs.recorder import CudaRecorder, Outside
from trimtab_engine.scheduling.sampling import Sampling

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
LATENT = MODEL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
TP2, PP2, EP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
EPLB = {"eplb": EplbConfig(window_size=8, step_interval=8, num_redundant_experts=2)}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 16 << 20, "swap_space_bytes_cap": 16 << 20}


def tokens_of(
    folder: Path, values: dict[str, Any], replayed: set[str] | None = None, **layout: Any
) -> dict[str, list[int]]:
    """What 12 requests yield, in a KV cache that is too small for all of them. `replayed` gets the kinds of graphs."""
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
        sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
        for number in range(12):
            prompt = [3 + (number // 2 * 7919 + place * 101) % (VOCABULARY - 3) for place in range(1 + 6 * number)]
            engine.add(AddRequest(f"r{number}", prompt, sampling, 0.0))
        while engine.has_work:
            step = engine.step()
            if replayed is not None:
                replayed |= set(step.stats.graph_steps)
            for output in step.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        pytest.param(MODEL, TP2, id="dense tp2"),
        pytest.param(MODEL, PP2, id="dense pp2"),
        pytest.param(MODEL, PP2 | SWAP, id="dense pp2 swapping"),
        pytest.param(MIXTURE, TP2, id="moe tp2"),
        pytest.param(MIXTURE, TP2 | EP, id="moe tp2 ep"),
        pytest.param(MIXTURE, TP2 | EP | EPLB, id="moe tp2 ep balanced"),
        pytest.param(LATENT, PP2 | SWAP, id="latent pp2 swapping"),
        pytest.param(LATENT, TP2 | EP, id="latent tp2 ep"),
    ],
)
def test_ranks_equal_single_rank_and_replay_capturable_graphs(
    values: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    expected = tokens_of(tmp_path / "m", values, enforce_eager=True)
    replayed: set[str] = set()
    assert tokens_of(tmp_path / "m", values, replayed, **layout) == expected
    captures = torch.cuda.device_count() > 1 or "tensor_parallel_size" not in layout
    assert ("full" in replayed) if captures else not replayed


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


def test_collectives_are_part_of_a_graph(nccl: RankGroup) -> None:
    """Recorded with the communicator that eager calls use, before and after."""
    device = torch.device("cuda", torch.cuda.current_device())
    groups = RankGroups(tensor=nccl, data=nccl)
    assert groups.can_capture(device)
    groups.connect(device)
    x, y = torch.zeros(4, 3, device=device), torch.zeros(4, 3, device=device)

    def run(outside: Outside) -> None:
        y.copy_(nccl.reduce_scatter(nccl.all_gather(nccl.all_reduce(x * 2))))

    run(lambda call: call())
    replay = CudaRecorder(device).record(run)
    for number in (1.0, 5.0):
        x.fill_(number)
        replay()
        torch.testing.assert_close(nccl.all_reduce(y.clone()), torch.full_like(y, 2 * number))
