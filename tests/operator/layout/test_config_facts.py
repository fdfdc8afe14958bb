"""Facts from a config.json only, compared with the engine's and with published figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trimtab_operator.layout.facts import GPU_VISION_ARCHITECTURES, NATIVE_ARCHITECTURES, ModelFacts, facts_of_config

GOLDEN = Path(__file__).parents[2] / "golden"
Published = Callable[[str], ModelFacts]
Configs = dict[str, dict[str, Any]]
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "model_facts.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_facts_of_config_equal_golden_facts(case: dict[str, Any]) -> None:
    facts = facts_of_config(case["config"], "m").to_json()
    assert {key: value for key, value in facts.items() if key != "model"} == case["facts"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),  # these five are the totals of the published safetensors headers
        ("Llama-3.1-70B", 70_553_706_496),
        ("Llama-3.1-405B", 405_853_388_800),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("SmolLM2-135M", 134_515_008),
        ("DeepSeek-V3", 671e9),  # "671B", without the multi-token prediction layer
        ("Llama-4-Scout", 108.6e9),  # with its vision tower of 0.9e9, which is not counted here
        ("Llama-4-Maverick", 401.6e9),
    ],
)
def test_parameters_are_within_one_percent_of_the_published_count(
    published: Published, name: str, parameters: float
) -> None:
    assert published(name).num_parameters == pytest.approx(parameters, rel=0.01)


def test_fp8_blocks_halve_the_linear_layers_and_leave_the_rest(published: Published, configs: Configs) -> None:
    facts = published("DeepSeek-V3")
    whole = facts_of_config({k: v for k, v in configs["DeepSeek-V3"].items() if k != "quantization_config"}, "m")
    assert facts.weights.experts == round(whole.weights.experts / 2 * (1 + 4 / 128**2))
    assert facts.weights.embedding == whole.weights.embedding
    assert facts.quantization == "fp8"
    assert facts.is_run_on("cuda")


def test_a_latent_cache_is_576_elements_per_token_and_layer_of_deepseek(published: Published) -> None:
    assert published("DeepSeek-V3").latent_kv_size == 512 + 64


def test_maverick_has_experts_in_every_second_layer(published: Published) -> None:
    facts = published("Llama-4-Maverick")
    assert facts.dense_layers == tuple(range(0, 48, 2))
    assert (facts.intermediate_size, facts.moe_intermediate_size) == (16384, 8192)


def test_native_architectures_equal_the_engine_registry() -> None:
    from trimtab_engine.models.registry import BY_ARCHITECTURE, vision_encoder_for

    assert tuple(BY_ARCHITECTURE) == NATIVE_ARCHITECTURES
    assert not any(family.not_on_cuda for family in BY_ARCHITECTURE.values()), "GPUs run what is not by transformers"
    towers = {name: vision_encoder_for(name) for name in BY_ARCHITECTURE}
    assert tuple(name for name, kind in towers.items() if kind and not kind.not_on_cuda) == GPU_VISION_ARCHITECTURES


def test_a_chunk_of_positions_counts_as_a_window(published: Published) -> None:
    assert [(group.num_layers, group.each.window) for group in published("Llama-4-Scout").kv_groups] == [
        (12, 8192), (12, 8192), (12, 8192), (12, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "'BloomForCausalLM' is not known; known are LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"hidden_size": 10**30}, "hidden_size is 10{30}; a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; a positive whole number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10{30}; a whole number of 1 to 10000"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 must be a multiple of num_key_value_heads 5"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
    ],
)
def test_malformed_config_raises_value_error(configs: Configs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        facts_of_config(configs["Llama-3.1-8B"] | changes, "m")


def test_implausible_number_of_experts_raises_value_error(configs: Configs) -> None:
    with pytest.raises(ValueError, match="94 layers of 1000000000 experts"):
        facts_of_config(configs["Qwen3-235B-A22B"] | {"num_experts": 10**9}, "m")


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "gptq", "bits": 8}, "bits 8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ("fp8", "quantization_config is 'fp8'"),
    ],
)
def test_unsupported_quantization_is_planned_as_unquantized(configs: Configs, scheme: object, reason: str) -> None:
    plain = facts_of_config(configs["Llama-3.1-8B"], "m")
    facts = facts_of_config(configs["Llama-3.1-8B"] | {"quantization_config": scheme}, "m")
    assert not facts.supported
    assert reason in facts.refusal
    assert facts.weights == plain.weights


def test_heads_that_do_not_divide_an_fp8_block_are_unsupported(configs: Configs) -> None:
    scheme = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert not facts_of_config(configs["Llama-3.1-8B"] | scheme | {"head_dim": 96}, "m").supported
    assert facts_of_config(configs["Llama-3.1-8B"] | scheme | {"head_dim": 64}, "m").supported
    assert facts_of_config(configs["Llama-3.1-8B"] | {"head_dim": 96}, "m").supported


def test_cases_cover_every_family() -> None:
    assert {case["config"]["architectures"][0] for case in CASES} == set(NATIVE_ARCHITECTURES)
