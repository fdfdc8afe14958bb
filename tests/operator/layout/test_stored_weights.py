"""Weights in fp8: their GPU memory, and layouts that would split their blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from trimtab_engine.errors import ConfigError
from trimtab_engine.models.checkpoint import expected_tensors
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.quantization import BLOCK, Quantization, check_aligned
from trimtab_modelspec.quantization import BLOCK as FP8_BLOCK
from trimtab_modelspec.tensors import num_quantizable
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.gpus import GIB, gpu_named
from trimtab_operator.layout.rules import facts_problems
from trimtab_operator.layout.stored_weights import FP8_BYTES, as_loaded
from trimtab_operator.resource.spec import Parallelism, Spec

Published = Callable[[str], ModelFacts]
Configs = dict[str, dict[str, Any]]
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "model_facts.json").read_text())
H200, A100 = gpu_named("H200"), gpu_named("A100")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_the_blocks_are_the_engines() -> None:
    assert FP8_BLOCK == BLOCK
    assert Quantization(is_stored=True).weight_bytes == FP8_BYTES


def test_quantising_halves_the_projections_where_the_gpu_multiplies_fp8(published: Published) -> None:
    facts = published("Llama-3.1-70B")
    narrow = as_loaded(facts, H200, "fp8")
    assert narrow.weights_bytes / GIB == pytest.approx(67.7, abs=0.1)  # 68.45e9 projections, 2.1e9 embeddings in bf16
    assert narrow.weights.embedding == facts.weights.embedding
    assert as_loaded(facts, A100, "fp8") == facts
    assert as_loaded(facts, H200, None) == facts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_experts_become_fp8_here_where_the_engine_makes_them_so(case: dict[str, Any]) -> None:
    config = {key: value for key, value in case["config"].items() if key != "quantization_config"}
    tensors = expected_tensors(parse_model_config(config, {}, "config.json"))
    becomes_small = num_quantizable({name: held for name, held in tensors.items() if held.part == "experts"}) > 0
    facts = facts_of_config(config, "m")
    factor = FP8_BYTES / DTYPE_BYTES[facts.dtype] if becomes_small else 1
    assert as_loaded(facts, H200, "fp8").weights.experts == round(facts.weights.experts * factor)


def test_stored_fp8_is_widened_where_the_gpu_has_none(configs: Configs) -> None:
    plain = facts_of_config(configs["Llama-3.1-70B"], "m")
    stored = facts_of_config(configs["Llama-3.1-70B"] | {"quantization_config": FP8}, "m")
    assert as_loaded(stored, H200) == stored
    assert as_loaded(stored, A100).weights_bytes == pytest.approx(plain.weights_bytes, rel=1e-6)


@pytest.mark.parametrize("scheme", [{"quant_method": "awq"}, {"quant_method": "gptq", "bits": 4, "group_size": -1}])
def test_integers_of_4_bits_are_widened_on_every_gpu(configs: Configs, scheme: dict[str, Any]) -> None:
    plain = facts_of_config(configs["Llama-3.1-70B"], "m")
    stored = facts_of_config(configs["Llama-3.1-70B"] | {"quantization_config": scheme}, "m")
    assert stored.weights_bytes < 0.3 * plain.weights_bytes
    for gpu in (A100, H200):
        held = as_loaded(stored, gpu)
        assert held.quantization is None
        assert held.weights_bytes == pytest.approx(plain.weights_bytes, rel=1e-6)
    assert as_loaded(stored, H200, "fp8").weights_bytes == pytest.approx(
        as_loaded(plain, H200, "fp8").weights_bytes, rel=1e-6
    )


FP8_BY_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    },
    "ignore": ["lm_head", "re:.*self_attn.*"],
}


def test_weights_with_scales_are_counted_as_stored_and_widened_on_every_gpu(configs: Configs) -> None:
    plain = facts_of_config(configs["Llama-3.1-70B"], "m")
    stored = facts_of_config(configs["Llama-3.1-70B"] | {"quantization_config": FP8_BY_CHANNEL}, "m")
    rows = 80 * (2 * 28672 + 8192)  # each with a scale of 2 bytes
    assert stored.weights.dense_mlp == plain.weights.dense_mlp // 2 + 2 * rows
    assert (stored.weights.attention, stored.weights.lm_head) == (plain.weights.attention, plain.weights.lm_head)
    assert stored.weights_at_dtype == plain.weights
    for gpu in (A100, H200):
        assert as_loaded(stored, gpu) == plain
    assert as_loaded(stored, H200, "fp8") == as_loaded(plain, H200, "fp8")


def test_gpt_oss_is_planned_as_it_is_published(configs: Configs) -> None:
    """openai/gpt-oss-20b: 13.76 GB of safetensors; 21 billion parameters at bfloat16."""
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32,
        "num_experts_per_tok": 4, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    plain = facts_of_config(config, "m")
    stored = facts_of_config(config | {"quantization_config": {"quant_method": "mxfp4"}}, "m")
    assert stored.supported
    assert stored.weights_bytes == pytest.approx(13.76e9, rel=1e-3)
    assert as_loaded(stored, H200) == plain
    parsed = ModelFacts.parse(stored.to_json())
    assert parsed == stored


@pytest.mark.parametrize(("quantization", "works"), [(None, False), ("fp8", True)])
def test_a_model_that_is_too_large_may_fit_when_it_is_quantised(
    published: Published, a_spec: Callable[..., Spec], quantization: str | None, works: bool
) -> None:
    facts = published("Llama-3.1-70B")
    engine = {"maxModelLen": 8192, "quantization": quantization}
    refusals = check_layout(a_spec(facts, engine=engine), facts, H200)
    assert (not refusals) == works, list(map(str, refusals))


def test_expert_slices_cutting_fp8_blocks_are_rejected(configs: Configs) -> None:
    """Qwen3-235B-A22B in fp8 over 8 tensor ranks: 1536 / 8 = 192."""
    facts = facts_of_config(configs["Qwen3-235B-A22B"] | {"quantization_config": FP8}, "m")
    (problem,) = facts_problems(Parallelism(tensor=8), facts)
    assert "moe_intermediate_size 1536 in 8 parts cuts fp8 blocks of 128" in str(problem)
    assert facts_problems(Parallelism(tensor=8, expert=True), facts) == ()
    assert facts_problems(Parallelism(tensor=4), facts) == ()


def cuts_a_block(config: dict[str, Any], layout: Layout) -> bool:
    """By the engine: the spans that its ranks read of stored weights."""
    model = parse_model_config(config, {}, "config.json")
    for rank in range(layout.world_size):
        shard, size = shard_model(model, layout, rank), model.head_size
        spans = [
            ((shard.heads[0] * size, shard.heads[1] * size), model.num_attention_heads * size),
            ((shard.kv_heads[0] * size, shard.kv_heads[1] * size), model.num_kv_heads * size),
        ]
        spans += [(shard.mlp, model.intermediate_size)] if model.has_dense_layers else []
        spans += [(shard.expert_mlp, model.moe.intermediate_size)] if model.moe is not None else []
        try:
            for span, total in spans:
                check_aligned("a projection", span, total)
        except ConfigError:
            return True
    return False


@pytest.mark.parametrize("seed", range(200))
def test_a_block_is_cut_here_when_the_engine_would_cut_it(seed: int) -> None:
    random = Random(seed)
    is_moe, kv_heads = random.random() < 0.5, random.choice([1, 2, 4, 8])
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "LlamaForCausalLM"],
        "hidden_size": 256,
        "head_dim": random.choice([32, 64, 128]),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * random.choice([1, 2, 4]),
        "num_hidden_layers": 2,
        "intermediate_size": random.choice([256, 512, 768, 1536, 64]),
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        "quantization_config": FP8,
    }
    if is_moe:
        width = random.choice([128, 256, 384, 768])
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}
        config |= {"mlp_only_layers": random.choice([[], [0]])}
    layout: dict[str, Any] = {
        "tensor": random.choice([1, 2, 4, 8]),
        "data": random.choice([1, 2, 3]) if is_moe else 1,
        "expert": is_moe and random.random() < 0.5,
    }
    facts, parallelism = facts_of_config(config, "m"), Parallelism(**layout)
    problems = facts_problems(parallelism, facts)
    by_blocks = [problem for problem in problems if "cuts fp8 blocks" in str(problem)]
    if len(by_blocks) < len(problems):
        return  # other rules refuse it as well; the engine has no spans for it
    assert bool(by_blocks) == cuts_a_block(config, Layout(**layout))
