"""Adapters against transformers with merged weights, in float32: two adapters and the base model in one batch, under
any scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from adapter_folders import ATTENTION, EVERY, an_adapter, merged, modules_of
from engine_benchmarks.parity import Reference, compare, reference_tokens
from safetensors import safe_open
from served import serve
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.device.device import Device
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

NUM_TOKENS = 64
BLOCK_SIZE = 8
GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(3, 257, (length,), generator=GENERATOR).tolist() for length in (3, 17, 34, 60)]
SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
LATENT = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 3,
    "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, SIZES | {"attention_bias": True, "mlp_bias": True}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        SIZES
        | {"sliding_window": 13, "query_pre_attn_scalar": 12}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config, LATENT),
}
"""Compiled layers; windows, and gates that are no silu; latent attention, and an expert that all tokens pass."""
TARGETS = (*EVERY, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class Checkpoint:
    """A model with two adapters. References of transformers' greedy tokens, and its models, by adapter; "" is none."""

    folder: str
    adapters: dict[str, str]
    models: dict[str, Any]
    references: dict[str, list[Reference]]

    @property
    def config(self) -> AdapterConfig:
        modules = tuple(AdapterModule(name=name, path=path) for name, path in self.adapters.items())
        return AdapterConfig(modules=modules, max_loras=2)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model_class, config_class, config = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model: Any = model_class(config_class(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and request.param != "gemma3" else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder / "model")
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    adapters = {
        "all": an_adapter(folder / "all", modules_of(shapes, TARGETS), rank=4, alpha=4, seed=1, size=0.2),
        "some": an_adapter(
            folder / "some", modules_of(shapes, ("o_proj", "v_proj", "up_proj")), rank=5, seed=2, use_rslora=True
        ),
    }
    models = {"": model} | {
        name: AutoModelForCausalLM.from_pretrained(merged(folder / "model", path, folder / f"merged-{name}"))
        for name, path in adapters.items()
    }
    references = {name: reference_tokens(each, PROMPTS, NUM_TOKENS) for name, each in models.items()}
    assert len({tuple(own[2].tokens) for own in references.values()}) == 3, "the adapters are to make a difference"
    return Checkpoint(str(folder / "model"), adapters, models, references)


def an_engine(checkpoint: Checkpoint, **changes: Any) -> Engine:
    sizes = {"num_gpu_blocks_override": 400, "max_model_len": 128, "max_num_seqs": 12, "block_size": BLOCK_SIZE}
    settings = sizes | {"load_format": "auto", "adapters": checkpoint.config} | changes
    return engine_builders.an_engine(Path(checkpoint.folder), **settings)


TIGHT = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 20}
"""Blocks for about three of the twelve requests, and chunks of a few tokens."""
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 4 << 20, "swap_space_bytes_cap": 4 << 20}


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        (TIGHT, "recompute"),
        (TIGHT | SWAP | {"async_scheduling": True}, "swap"),
        ({"max_num_batched_tokens": 512}, None),  # 342 prompt tokens, whose MLPs are computed in slices
    ],
    ids=["chunked and preempted", "chunked and swapped, steps overlapping", "in one step"],
)
def test_mixed_adapter_batch_equals_merged_weights(
    checkpoint: Checkpoint, changes: dict[str, Any], mode: str | None
) -> None:
    """Twice, so that the second round hits the prefix cache, which must not mix adapters."""
    engine = an_engine(checkpoint, **changes)
    references = [reference for own in checkpoint.references.values() for reference in own]
    names = [name for name, own in checkpoint.references.items() for _ in own]
    preempted, hits = 0, 0

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        nonlocal preempted, hits
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        asked = [
            AddRequest(f"{place}", prompt, sampling, arrival_time=0.0, adapter=name)
            for place, (prompt, name) in enumerate(zip(prompts, names, strict=True))
        ]
        served = serve(engine, asked)
        preempted += served.preempted[mode or ""]
        hits += served.prefix_cache_hits
        return list(served.tokens.values())

    for _ in range(2):
        parity = compare(references, generate)
        assert parity.defects == []
        assert parity.near_ties == 0
    assert (preempted > 0) == (mode is not None)
    assert (hits > 0) == (mode is None), "in a KV cache this small nothing is left of the first round"


def test_logits_equal_those_of_merged_weights_at_every_position(checkpoint: Checkpoint) -> None:
    config = EngineConfig(
        model=checkpoint.folder, block_size=BLOCK_SIZE, dtype="float32", cpu_threads=1, adapters=checkpoint.config
    )
    runner = load_model_runner(ModelRunner, config, Device("cpu", cpu_threads=1), lambda stage, percent: None)
    runner.init_kv_cache(64)
    runner.kv_cache.map_blocks(64)
    loaded = {"": None} | {each.adapter.name: each.adapter for each in runner.adapters}
    num_groups, prompt = len(runner.facts.kv_groups), PROMPTS[2]
    for name, adapter in loaded.items():
        request = Request.of("r", prompt, Sampling(), arrival_time=0.0, adapter=adapter)
        request.block_tables = [list(range(group, 5 * num_groups, num_groups)) for group in range(num_groups)]
        request.num_out_of_window = [0] * num_groups
        rows = [runner.execute([ScheduledSequence(request, i, 1, samples=True)]) for i in range(len(prompt))]
        with torch.no_grad():
            expected = checkpoint.models[name](torch.tensor([prompt])).logits[0]
        assert float((torch.cat(rows) - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_attention_alone_may_be_adapted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Modules without an adapter compute the base model's results."""
    with safe_open(Path(checkpoint.folder) / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    nothing = an_adapter(tmp_path / "nothing", modules_of(shapes, ATTENTION), size=0.0)
    config = AdapterConfig(modules=(AdapterModule(name="nothing", path=nothing),))
    engine = an_engine(checkpoint, adapters=config)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    served = serve(engine, [AddRequest("r", PROMPTS[1], sampling, arrival_time=0.0, adapter="nothing")])
    assert served.tokens["r"] == checkpoint.references[""][1].tokens
