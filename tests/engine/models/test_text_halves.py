"""Checkpoints that see images too: their language model is run, and equals transformers on text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_benchmarks.parity import compare, greedy_generator, load_runner, reference_tokens
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_modelspec.families.registry import language_model_config

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LLAMA4 = {
    "text_config": TEXT | {"intermediate_size_mlp": 40, "num_local_experts": 4, "attention_chunk_size": 8},
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    },
}  # fmt: skip
GEMMA3 = {
    "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip
QWEN = {
    "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 2]}},
    "vision_config": {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama4": (Llama4ForConditionalGeneration, Llama4Config, LLAMA4),
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config, GEMMA3),
    "qwen2.5-vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, QWEN),
}
NAMES = [
    ("language_model.model.layers.0.a", "model.layers.0.a"),
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("model.language_model.layers.0.a", "model.layers.0.a"),
    ("model.layers.0.a", "model.layers.0.a"),
    ("lm_head.weight", "lm_head.weight"),
    ("vision_tower.a", None),
    ("vision_model.a", None),
    ("visual.blocks.0.a", None),
    ("model.visual.blocks.0.a", None),
    ("multi_modal_projector.a", None),
    ("model.multi_modal_projector.a", None),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_half_yields_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model_class, config_class, config = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = model_class(config_class(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and family != "gemma3" else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(tmp_path)
    references = reference_tokens(model, [[5, 6, 7], list(range(20, 40))], 24)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    parity = compare(references, greedy_generator(runner, block_size=8, batch=2))
    assert parity.defects == []
    assert parity.near_ties <= 1


@pytest.mark.parametrize(("stored", "name"), NAMES)
def test_tensors_have_the_names_of_a_checkpoint_of_text_alone(stored: str, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Llama4ForConditionalGeneration"]}')
    save_file({stored: torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    source = open_model(str(tmp_path))
    assert source.shapes() == ({} if name is None else {name: (2, 3)})
    if name is not None:
        assert torch.equal(source.tensor(name, rows=(1, 2)), load_file(tmp_path / "model.safetensors")[stored][1:])


def test_the_text_configs_words_count_and_ties_are_said_for_the_whole() -> None:
    config = {
        "architectures": ["A"],
        "hidden_size": 1,
        "tie_word_embeddings": False,
        "text_config": {"hidden_size": 2, "tie_word_embeddings": True, "architectures": None},
    }
    words = language_model_config(config)
    assert (words["architectures"], words["hidden_size"], words["tie_word_embeddings"]) == (["A"], 2, False)
    assert language_model_config({"hidden_size": 1}) == {"hidden_size": 1}


def test_a_rope_of_three_positions_is_plain_on_text() -> None:
    released = TEXT | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    config = parse_model_config(released, {}, "config.json")
    assert (config.rope.rope_type, config.rope.theta, config.qkv_bias) == ("default", 1e6, True)
