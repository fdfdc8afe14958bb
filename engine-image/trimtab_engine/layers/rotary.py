"""Angles of the rotary embedding, equal to transformers' in float32. Computed for a step's positions, once per step:
a table of all positions would cost tens of MiB for long contexts and save nothing."""

import math

import torch

from trimtab_engine.config.model import RopeConfig


class RotaryAngles:
    """positions -> complex rotations [num_tokens, head_size // 2]."""

    def __init__(self, rope: RopeConfig, head_size: int, device: torch.device) -> None:
        self._frequencies = scaled_frequencies(rope, head_size).to(device)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [num_tokens] int64."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        return torch.complex(angles.cos(), angles.sin())


def scaled_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """[head_size // 2] float32, radians per position."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1's model card)."""
    original = rope.original_max_position_embeddings
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, between, slowed)
