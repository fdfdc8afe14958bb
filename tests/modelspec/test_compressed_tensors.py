"""Parsing of compressed-tensors, AutoFP8 and ModelOpt configurations; unsupported values are rejected by name."""

from typing import Any

import pytest
from trimtab_engine.errors import ModelError
from trimtab_modelspec.quantization import check_unquantised, stored_format, stored_quantization
from trimtab_modelspec.scaled_format import Mxfp4, ScaledFormat, Scheme

WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def said(weights: Any = None, *, group: dict[str, Any] | None = None, **around: Any) -> dict[str, Any]:
    """Return a configuration as published by RedHatAI for FP8-dynamic, with changes."""
    of_group = {"targets": ["Linear"], "input_activations": ACTIVATIONS, "output_activations": None}
    whole = of_group | {"weights": WEIGHTS if weights is None else weights} | (group or {})
    shared = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return {**shared, "config_groups": {"group_0": whole}, **around}


def parsed(scheme: dict[str, Any]) -> ScaledFormat:
    form = stored_format({"quantization_config": scheme}, "config.json")
    assert isinstance(form, ScaledFormat)
    assert stored_quantization({"quantization_config": scheme}, "config.json") is None
    return form


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (said(), Scheme("float", 8, "channel")),
        (said(WEIGHTS | {"strategy": None}), Scheme("float", 8, "tensor")),
        (said({"num_bits": 4, "group_size": 128}, format="pack-quantized"),
         Scheme("int", 4, "group", group_size=128, is_packed=True)),
        (said({"num_bits": 4, "group_size": -1}, format="pack-quantized"),
         Scheme("int", 4, "channel", is_packed=True)),
        (said({"num_bits": 4, "group_size": 64, "symmetric": False, "actorder": "group"}, format="pack-quantized"),
         Scheme("int", 4, "group", group_size=64, is_symmetric=False, is_packed=True, is_ordered=True)),
        (said({"num_bits": 8, "strategy": "group", "group_size": 64, "actorder": "weight"}, format="int-quantized"),
         Scheme("int", 8, "group", group_size=64)),
        (said(WEIGHTS | {"strategy": "block", "block_structure": "128x64"}),
         Scheme("float", 8, "block", block=(128, 64))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("float", 8, "tensor")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Scheme("float", 8, "tensor")),
    ],
)  # fmt: skip
def test_published_configurations_are_parsed(scheme: dict[str, Any], expected: Scheme) -> None:
    assert parsed(scheme).scheme_of("model.layers.0.mlp.up_proj") == expected


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (said(format="marlin-24"), "format 'marlin-24' is not supported; supported: float-quantized, int"),
        (said(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config .* not supported; supported: dense"),
        (said(transform_config={"config_groups": {}}), "transform_config is not supported: activations would"),
        (said(config_groups=[]), "config_groups is \\[\\]; an object of groups is needed"),
        (said(7), "config_groups: group_0 is .*; an object with targets and weights is needed"),
        (said(group={"targets": None}), "group_0: targets is None; a list of names is needed"),
        (said(group={"targets": ["re:["]}), "targets: 're:\\[' is no regular expression"),
        (said(group={"format": "nvfp4-pack-quantized"}), "group_0: format 'nvfp4-pack-quantized' is not supported"),
        (said(group={"input_activations": {"num_bits": 4}}), "input_activations .* not supported; supported: 8 bits"),
        (said(group={"output_activations": ACTIVATIONS}), "output_activations .* is not supported"),
        (said(WEIGHTS | {"num_bits": 4}), "group_0: weights: num_bits 4 is not supported; supported: 8"),
        (said(WEIGHTS | {"num_bits": "8"}), "num_bits '8' is not supported; supported: 8"),
        (said({"num_bits": True}, format="int-quantized"), "num_bits True is not supported; supported: 4, 8"),
        (said(WEIGHTS | {"type": "complex"}), "type 'complex' is not supported; supported: float, int"),
        (said(format="pack-quantized"), "type 'float' is not supported; supported: int, in the format pack-quantized"),
        (said(WEIGHTS | {"dynamic": True}), "dynamic True is not supported"),
        (said(WEIGHTS | {"strategy": "tensor_group"}), "strategy 'tensor_group' is not supported; supported: tensor"),
        (said({"strategy": "group"}, format="int-quantized"), "group_size is None; a whole number of 1 or more"),
        (said({"group_size": 0}, format="int-quantized"), "group_size is 0; a whole number of 1 or more is needed, or"),
        (said(WEIGHTS | {"symmetric": False}), "symmetric False is not supported; supported: True"),
        (said({"actorder": "random"}, format="int-quantized"), "actorder 'random' is not supported; supported: group"),
        (said(WEIGHTS | {"strategy": "block"}), "block_structure is None; two whole numbers of 1 or more are needed"),
        (said(ignore=[1]), "ignore is \\[1\\]; a list of names is needed"),
        (
            {"quant_method": "fp8", "activation_scheme": "weekly"},
            "activation_scheme 'weekly' is not supported; supported: stat",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not supported; supported: FP8"),
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported; supported: fp8, awq, gptq, compressed-tensors, modelopt, mxfp4",
        ),
    ],
)
def test_unsupported_values_are_rejected_by_name(scheme: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        stored_format({"quantization_config": scheme}, "config.json")


def test_ignored_modules_and_target_precedence() -> None:
    scheme = said(ignore=["lm_head", "re:.*gate$"])
    scheme["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": WEIGHTS | {"strategy": "tensor"}}
    form = parsed(scheme)
    expected = {
        "lm_head": None,
        "x.mlp.gate": None,
        "x.mlp.gate_proj": "channel",
        "x.mlp.down_proj": "tensor",
        "x.embed_tokens": None,
        "x.input_layernorm": None,
    }
    found = {module: form.scheme_of(module) for module in expected}
    assert {module: None if scheme is None else scheme.strategy for module, scheme in found.items()} == expected


def test_modelopt_names_match_submodules_with_wildcards() -> None:
    names = ["lm_head", "model.layers.0*", "model.layers.1.mlp"]
    form = parsed({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": names})
    modules = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj")
    assert [form.scheme_of(module) is None for module in modules] == [True, True, False]


def test_mxfp4_is_gpt_oss_s_alone() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert stored_format(config, "config.json") == Mxfp4()
    check_unquantised(config, "GptOssForCausalLM", "config.json", but="mxfp4")
    with pytest.raises(ModelError, match="'mxfp4' is not supported for Llama4ForCausalLM, whose experts"):
        check_unquantised(config, "Llama4ForCausalLM", "config.json")
    with pytest.raises(
        ModelError,
        match=r"'awq' is not supported for GptOss.*use an unquantized checkpoint, or the published one in mxfp4",
    ):
        check_unquantised(
            {"quantization_config": {"quant_method": "awq"}}, "GptOssForCausalLM", "config.json", but="mxfp4"
        )


@pytest.mark.parametrize(
    ("scheme", "num_bytes"),
    [
        (Scheme("float", 8, "tensor"), 96 * 64 + 2),
        (Scheme("float", 8, "channel"), 96 * 64 + 2 * 96),
        (Scheme("float", 8, "block", block=(64, 64)), 96 * 64 + 2 * 2),
        (Scheme("int", 4, "group", group_size=32), 96 * 64 // 2 + 2 * 2 * 96),
        (Scheme("int", 4, "group", group_size=32, is_symmetric=False), 96 * 64 // 2 + 2 * 2 * 96 + 96),
    ],
)
def test_a_weight_is_counted_with_its_scales(scheme: Scheme, num_bytes: int) -> None:
    assert scheme.stored_bytes(96, 64) == num_bytes
