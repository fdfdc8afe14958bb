"""Angles equal to transformers' in float32."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from trimtab_engine.layers.rotary import RotaryAngles
from trimtab_engine.models.registry import parse_model_config
from trimtab_modelspec.config import RopeConfig

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


def test_each_frequency_turns_by_the_position_of_its_section() -> None:
    rope = RopeConfig(theta=100.0)
    over_time, height, width = (torch.tensor(axis) for axis in ([0, 7, 2], [3, 1, 4], [5, 9, 6]))
    single = RotaryAngles(rope, 8, torch.device("cpu"))
    several = RotaryAngles(replace(rope, sections=(1, 2, 1)), 8, torch.device("cpu"))
    turned = several(torch.stack([over_time, height, width]))
    assert turned.is_contiguous()  # compiled layers read this memory layout
    assert torch.equal(turned[:, :1], single(over_time)[:, :1])
    assert torch.equal(turned[:, 1:3], single(height)[:, 1:3])
    assert torch.equal(turned[:, 3:], single(width)[:, 3:])
    assert torch.equal(several(height), single(height))  # text only
