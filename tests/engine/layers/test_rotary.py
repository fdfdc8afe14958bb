"""Angles equal to transformers' in float32."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from trimtab_engine.layers.rotary import RotaryAngles
from trimtab_engine.models.registry import parse_model_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        YARN,
        {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        {**YARN, "truncate": False},
        {**YARN, "factor": 1.0},
        LLAMA3,
    ],
)
def test_angles_equal_transformers(rope: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=rope)
    config.architectures = ["LlamaForCausalLM"]
    positions = torch.tensor([0, 1, 17, 255, 2047])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    ours = parse_model_config(config.to_dict(), {}, "config.json")
    rotation = RotaryAngles(ours.rope, ours.head_size, torch.device("cpu"))(positions)
    assert torch.equal(rotation.real, cos[0, :, : ours.head_size // 2])
    assert torch.equal(rotation.imag, sin[0, :, : ours.head_size // 2])
