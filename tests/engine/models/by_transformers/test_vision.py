"""Vision-language checkpoints run by transformers' code: parsed configuration, and rejected ones."""

import json
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from fixed_resolution_models import TEXT, TOKENS, VISION, the_reference
from safetensors.torch import load_file
from trimtab_engine.errors import ModelError
from trimtab_engine.models.by_transformers.vision import ARCHITECTURES, NATIVE, WHY_NOT, language_model_config
from trimtab_engine.models.by_transformers.vision_encoder import without_text
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.registry import (
    BY_ARCHITECTURE,
    longest_request,
    open_model,
    open_vision_encoder,
    parse_model_config,
    parse_vision_config,
    takes_images,
)

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32_000,
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
        "rms_norm_eps": 1e-5, "torch_dtype": "float16", "vocab_size": 32_064,
    },
    "torch_dtype": "float16",
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "hidden_size": 1024},
}  # fmt: skip
"""LLaVA 1.5's configuration, which relies on many defaults."""


@pytest.mark.parametrize("kind", list(TOKENS))
def test_facts_tell_both_halves(kind: str, tmp_path: Path) -> None:
    model = the_reference(kind)
    model.save_pretrained(tmp_path)
    facts = model_facts(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    tower = sum(tensor.nbytes for name, tensor in stored.items() if "vision" in name or "projector" in name)
    tower += sum(tensor.nbytes for name, tensor in stored.items() if "connector" in name)
    assert facts["architecture"] == type(model).__name__
    assert (facts["supported"], facts["num_layers"], facts["max_model_len"]) == (True, 2, 256)
    assert facts["tower_bytes"] == tower
    assert facts["weights_bytes"] + tower == sum(tensor.nbytes for tensor in stored.values())
    assert takes_images(str(tmp_path))
    halves = [set(open_model(str(tmp_path)).shapes()), set(open_vision_encoder(str(tmp_path)).shapes())]
    assert len(halves[0]) + len(halves[1]) == len(stored)
    assert {"model.norm.weight", "lm_head.weight"} < halves[0]


def test_language_model_defaults_equal_transformers() -> None:
    config = parse_model_config(LLAVA, {}, "here")
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 11_008, 32)
    assert (config.architecture, config.dtype, config.has_transformers_vision) == ("LlamaForCausalLM", "float16", True)
    assert longest_request(LLAVA, {}, "here") == 4096
    assert {*NATIVE.values()} <= BY_ARCHITECTURE.keys()


@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"),
    [(True, True, True), (True, None, True), (None, True, True), (True, False, False), (False, True, False)],
)
def test_an_output_layer_is_tied_where_all_that_is_said_says_so(
    outer: bool | None, inner: bool | None, is_tied: bool
) -> None:
    """If the two fields differ, the output layer is used if it exists; otherwise the checkpoint is rejected."""
    text = LLAVA["text_config"] | {"tie_word_embeddings": inner}
    config = parse_model_config(LLAVA | {"text_config": text, "tie_word_embeddings": outer}, {}, "here")
    assert config.tie_word_embeddings is is_tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"quantization_config": {"quant_method": "awq"}},
            "here: quantization_config is {'quant_method': 'awq'}; it is not",
        ),
        (
            {"text_config": LLAVA["text_config"] | {"quantization_config": {"quant_method": "awq"}}},
            "here: text_config: quantization_config is {'quant_method': 'awq'}; it is not supported for Llava",
        ),
        (
            {"vision_config": LLAVA["vision_config"] | {"quantization_config": {"quant_method": "awq"}}},
            "here: vision_config: quantization_config is {'quant_method': 'awq'}; it is not supported for Llava",
        ),
        ({"text_config": None}, "text_config must be an object"),
        ({"text_config": {"model_type": "t5"}}, "with a language model of model_type 't5' is not supported"),
    ],
)
def test_halves_that_cannot_be_read_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        language_model_config(LLAVA | change, "here")


@pytest.mark.parametrize("architecture", [*WHY_NOT, "AriaForConditionalGeneration"])
def test_others_that_see_are_refused_by_name_with_why(architecture: str) -> None:
    config = {"architectures": [architecture], "text_config": TEXT, "vision_config": VISION}
    why = WHY_NOT.get(architecture, "it has not been tested")
    with pytest.raises(
        ModelError, match=rf"architecture {architecture} is not supported: it takes images \({why}\)"
    ) as said:
        parse_model_config(config, {}, "here")
    assert all(name in str(said.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("kind", "outer", "vision", "words"),
    [
        ("llava", {"vision_feature_layer": 99}, {}, r"vision_feature_layer is 99, .*IndexError.*; -2 works$"),
        ("llava", {"vision_feature_layer": [-2, 99]}, {}, r"vision_feature_layer is \[-2, 99\].*; -2 works$"),
        ("llava", {}, {"hidden_act": "evil"}, "vision_config: hidden_act is 'evil', .*; 'quick_gelu' works$"),
        (
            "llava",
            {"projector_hidden_act": "evil"},
            {},
            "json: projector_hidden_act is 'evil', .*; 'gelu' works$",
        ),
        ("smolvlm", {}, {"hidden_act": "evil"}, "vision_config: hidden_act is 'evil', .*; 'gelu_py"),
        ("smolvlm", {}, {"patch_size": [4, 4]}, r"vision_config: patch_size is \[4, 4\], .*; 4 works$"),
        ("llava", {}, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; vision encoders of at most 1000"),
        ("internvl", {}, {"hidden_act": "evil"}, "vision_config: hidden_act is 'evil', .*; 'gelu' works$"),
        ("llava", {"projector_hidden_act": "evil"}, {"hidden_act": "evil"}, "'evil'.*, whichever one of its words"),
    ],
)
def test_unsupported_fields_are_reported_before_reading_weights(
    kind: str, outer: dict[str, Any], vision: dict[str, Any], words: str, tmp_path: Path
) -> None:
    the_reference(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | outer | {"vision_config": said["vision_config"] | vision}))
    source = open_model(str(tmp_path))
    config = parse_model_config(source.config, source.generation_config, source.where)
    with pytest.raises(ModelError, match=words) as told:
        parse_vision_config(source, config)
    assert str(path) in str(told.value)
    assert "tower_bytes" not in model_facts(str(tmp_path))


def test_a_tower_whose_weights_have_other_shapes_is_refused_as_it_loads(tmp_path: Path) -> None:
    the_reference("llava").save_pretrained(tmp_path)
    words = json.loads((tmp_path / "config.json").read_text())
    words["vision_config"]["patch_size"] = 5
    (tmp_path / "config.json").write_text(json.dumps(words))
    with pytest.raises(ModelError, match="cannot be read as LlavaForConditionalGeneration"):
        engine_builders.an_engine(tmp_path, load_format="auto", limit_mm_per_prompt={"image": 1})


@pytest.mark.parametrize("half", ["vision_config", "text_config"])
def test_the_code_that_a_half_would_choose_is_passed_over(half: str) -> None:
    """transformers fetches an attention that is named like a repository, and runs it."""
    chosen = {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "auto_map": {"A": "code.B"}}
    words = the_reference("llava").config.to_dict()
    config = without_text(words | {"architectures": LLAVA["architectures"], half: words[half] | chosen})
    assert "evil" not in str(getattr(config, half).__dict__)
    assert not hasattr(getattr(config, half), "auto_map")
