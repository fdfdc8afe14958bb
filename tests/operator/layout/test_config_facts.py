"""Facts from a config.json alone, against the engine's and against what the makers publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trimtab_operator.layout.config_facts import PLANNED_ONLY, facts_of_config
from trimtab_operator.layout.facts import RUN_BY_THE_ENGINE, SEEING_ON_GPUS, ModelFacts

GOLDEN = Path(__file__).parents[2] / "golden"
Published = Callable[[str], ModelFacts]
Configs = dict[str, dict[str, Any]]
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "model_facts.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_facts_are_the_engines(case: dict[str, Any]) -> None:
    """tests/engine/test_inspect_model.py holds the engine to the same file."""
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


def test_what_the_engine_runs_is_what_the_engine_says_it_runs() -> None:
    from trimtab_engine.models.registry import BY_ARCHITECTURE, tower_named

    assert tuple(BY_ARCHITECTURE) == RUN_BY_THE_ENGINE
    assert not set(RUN_BY_THE_ENGINE) & set(PLANNED_ONLY)
    assert not any(family.not_on_cuda for family in BY_ARCHITECTURE.values()), "GPUs run what is not by transformers"
    towers = {name: tower_named(name) for name in BY_ARCHITECTURE}
    assert tuple(name for name, kind in towers.items() if kind and not kind.not_on_cuda) == SEEING_ON_GPUS


def test_a_chunk_of_positions_counts_as_a_window(published: Published) -> None:
    assert [(group.num_layers, group.window) for group in published("Llama-4-Scout").kv_groups] == [
        (12, 8192), (12, 8192), (12, 8192), (12, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "'BloomForCausalLM' is not known; known are LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; a whole number of 1 or more"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method 'hqq' is not known; known are 'fp8', 'awq', 'gptq', 'compressed-tensors', 'modelopt'",
        ),
        ({"quantization_config": {"quant_method": "awq", "group_size": 0}}, "group_size is 0; a whole number of 1"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "bits is 5; one of 2, 3, 4, 8 is needed"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "8"}}, "bits is '8'; one of 2, 3, 4, 8 is needed"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(configs: Configs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        facts_of_config(configs["Llama-3.1-8B"] | changes, "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": None}, "config_groups is None; an object of groups is needed"),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "group_0 is .* targets and weights is needed"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'; a list of names is needed"),
        ({"ignore": ["re:("]}, "ignore: 're:\\(' is no regular expression"),
    ],
)
def test_what_is_wrong_with_weights_with_scales_is_named(
    configs: Configs, changes: dict[str, Any], message: str
) -> None:
    from trimtab_engine.config.quantization import stored_form
    from trimtab_engine.errors import ModelError

    scheme = COMPRESSED["fp8"] | changes
    with pytest.raises(ValueError, match=message):
        facts_of_config(configs["Llama-3.1-8B"] | {"quantization_config": scheme}, "m")
    with pytest.raises(ModelError, match=message):
        stored_form({"quantization_config": scheme}, "m")


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; at most 128, the number of experts, is needed"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10{30}; a whole number of 1 to 10000"),
        ({"hidden_size": 10**30}, "hidden_size is 10{30}; a whole number of 1 to"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 64; a multiple of num_key_value_heads 5 is needed"),
        ({"mlp_only_layers": 5}, "mlp_only_layers is 5; a list of whole numbers"),
        ({"mlp_only_layers": ["5"]}, "a list of whole numbers is needed"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; an object is needed"),
        *(
            (
                {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}},
                "a list of two whole numbers",
            )
            for block in ([0, 0], [128], "128", [128, -128], [128, 1.5])
        ),
    ],
)
def test_what_is_wrong_with_a_mixture_or_its_storage_is_named(
    configs: Configs, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        facts_of_config(configs["Qwen3-235B-A22B"] | changes, "m")


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": None}, True),
        ({"activation_scheme": "static"}, False),
        ({"fmt": "e5m2"}, False),
        ({"scale_fmt": "ue8m0"}, False),
        ({"weight_block_size": [64, 128]}, False),
        ({"weight_block_size": None}, True),
        ({"weight_block_size": None, "activation_scheme": "static"}, True),
        ({"weight_block_size": None, "activation_scheme": "weekly"}, False),
        ({"weight_block_size": None, "fmt": "e5m2"}, False),
    ],
)
def test_of_fp8_forms_only_what_the_engine_reads_is_said_to_run(
    configs: Configs, changes: dict[str, Any], runs: bool
) -> None:
    """The engine's own judgement is beside it."""
    from trimtab_engine.config.quantization import stored_quantization
    from trimtab_engine.errors import ModelError

    config = configs["Llama-3.1-8B"] | {"quantization_config": BLOCK_FP8 | changes}
    assert facts_of_config(config, "m").supported is runs
    try:
        stored_quantization(config, "m")
    except ModelError:
        assert not runs
    else:
        assert runs


@pytest.mark.parametrize(
    ("scheme", "runs"),
    [
        ({"quant_method": "awq"}, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, True),
        ({"quant_method": "awq", "bits": 8}, False),
        ({"quant_method": "awq", "version": "gemv"}, False),
        ({"quant_method": "awq", "zero_point": False}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": False}, True),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, True),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, False),
        ({"quant_method": "gptq", "is_marlin_format": True}, False),
        ({"quant_method": "gptq", "bits": 3}, False),
        ({"quant_method": "gptq", "dynamic": {"-:.*gate.*": {}}}, False),
        ({"quant_method": "gptq", "dynamic": {}}, True),
    ],
)
def test_of_integers_of_4_bits_only_what_the_engine_reads_is_said_to_run(
    configs: Configs, scheme: dict[str, Any], runs: bool
) -> None:
    """The engine's own judgement is beside it, and the bytes that it counts."""
    from trimtab_engine.config.quantization import stored_form
    from trimtab_engine.errors import ModelError
    from trimtab_engine.weights.four_bits_form import FourBits

    facts = facts_of_config(configs["Llama-3.1-8B"] | {"quantization_config": scheme}, "m")
    assert (facts.supported, facts.quantization) == (runs, scheme["quant_method"])
    try:
        form = stored_form({"quantization_config": scheme}, "m")
    except ModelError:
        assert not runs
    else:
        assert runs
        assert isinstance(form, FourBits)
        plain = facts_of_config(configs["Llama-3.1-8B"], "m")
        assert facts.weights.dense_mlp == round(plain.weights.dense_mlp / 2 * form.weight_bytes)


@pytest.mark.parametrize(
    ("scheme", "bytes_each"),
    [
        ({"quant_method": "gptq", "bits": 8}, 1 + 3 / 128),  # a scale of 16 bits and a zero point of 8
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 0.5 + 2.5 / 32),
        ({"quant_method": "gptq", "bits": 3}, 3 / 8 + (2 + 3 / 8) / 128),
        ({"quant_method": "gptq", "bits": 2, "group_size": -1}, 0.25),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, 1 + 3 / 64),
    ],
)
def test_integers_are_counted_with_the_bits_that_they_have(
    configs: Configs, scheme: dict[str, Any], bytes_each: float
) -> None:
    plain = facts_of_config(configs["Llama-3.1-8B"], "m").weights
    stored = facts_of_config(configs["Llama-3.1-8B"] | {"quantization_config": scheme}, "m").weights
    for part in ("attention", "kv_projection", "dense_mlp"):
        assert getattr(stored, part) == round(getattr(plain, part) / 2 * bytes_each)
    assert (stored.embedding, stored.lm_head) == (plain.embedding, plain.lm_head)


def compressed(weights: dict[str, Any], storage: str, **changes: Any) -> dict[str, Any]:
    """compressed-tensors with one group of all linear modules; `changes` to the group, or to what is around it."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "strategy": "channel"} | weights}
    of_group = {key: value for key, value in changes.items() if key in ("format", "input_activations", "targets")}
    around = {key: value for key, value in changes.items() if key not in of_group}
    groups = {"group_0": group | of_group}
    return {"quant_method": "compressed-tensors", "format": storage, "config_groups": groups} | around


FLOAT8 = {"type": "float", "num_bits": 8}
COMPRESSED: Configs = {
    "fp8": compressed(FLOAT8, "float-quantized", input_activations={"num_bits": 8, "dynamic": True}),
    "fp8, static": compressed(FLOAT8 | {"strategy": "tensor"}, "naive-quantized", ignore=["re:.*lm_head"]),
    "fp8, blocks": compressed(FLOAT8 | {"strategy": "block", "block_structure": "128x128"}, "float-quantized"),
    "int8": compressed({"num_bits": 8, "symmetric": False}, "int-quantized", sparsity_config={}),
    "4 bits": compressed({"strategy": "group", "group_size": 128, "actorder": "group"}, "pack-quantized"),
    "mixed": compressed({}, "mixed-precision", format="pack-quantized"),
    "mixed, unsaid": compressed({}, "mixed-precision"),
    "4 bits of float": compressed({"type": "float"}, "nvfp4-pack-quantized"),
    "fp8, packed": compressed(FLOAT8, "pack-quantized"),
    "3 bits": compressed({"num_bits": 3}, "pack-quantized"),
    "sparse": compressed({}, "pack-quantized", sparsity_config={"format": "sparse-24-bitmask"}),
    "transformed": compressed({}, "pack-quantized", transform_config={"config_groups": {"u": {}}}),
    "activations of 4 bits": compressed({}, "int-quantized", input_activations={"num_bits": 4}),
    "another strategy": compressed({"strategy": "tensor_group", "group_size": 16}, "pack-quantized"),
    "another order": compressed({"actorder": "random"}, "pack-quantized"),
    "without targets": compressed({}, "pack-quantized", targets=[]),
    "dynamic": compressed({"dynamic": True}, "pack-quantized"),
}


STORED: Configs = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "awq of 8 bits": {"quant_method": "awq", "bits": 8},
    "awq with a number for a yes": {"quant_method": "awq", "zero_point": 1},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "gptq with a number for a no": {"quant_method": "gptq", "is_marlin_format": 0},
    "fp8": BLOCK_FP8,
    "fp8 of other blocks": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "fp8 by tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8 by tensor, of another format": {"quant_method": "fp8", "fmt": "e5m2"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "modelopt in 4 bits": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    **{f"compressed-tensors, {name}": scheme for name, scheme in COMPRESSED.items()},
}


@pytest.mark.parametrize("scheme", STORED.values(), ids=STORED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_family_that_is_stored_so_is_said_to_run_where_the_engine_reads_it(
    case: dict[str, Any], scheme: dict[str, Any]
) -> None:
    from trimtab_engine.errors import ModelError
    from trimtab_engine.models.registry import parse_model_config

    config = case["config"] | {"quantization_config": scheme}
    facts = facts_of_config(config, "m")
    is_cut = scheme is BLOCK_FP8 and not facts.latent_kv_size and 128 % facts.head_size > 0  # told as it loads
    if facts.supported or is_cut:
        parse_model_config(config, {}, "config.json")
    else:
        with pytest.raises(ModelError, match="quantization_config"):
            parse_model_config(config, {}, "config.json")


def test_the_cases_are_of_every_family() -> None:
    assert {case["config"]["architectures"][0] for case in CASES} == set(RUN_BY_THE_ENGINE)


def test_heads_that_do_not_divide_an_fp8_block_are_said_not_to_run(configs: Configs) -> None:
    config = configs["Llama-3.1-8B"] | {"quantization_config": BLOCK_FP8}
    assert not facts_of_config(config | {"head_dim": 96}, "m").supported
    assert facts_of_config(config | {"head_dim": 64}, "m").supported
    assert facts_of_config(configs["Llama-3.1-8B"] | {"head_dim": 96}, "m").supported


def test_heads_of_a_latent_cache_need_no_kv_heads(configs: Configs) -> None:
    assert facts_of_config(configs["DeepSeek-V3"] | {"num_key_value_heads": 7}, "m").latent_kv_size == 576
