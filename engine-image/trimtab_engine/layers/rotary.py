"""Angles of the rotary embedding, equal to transformers' in float32. Computed for a step's positions, once per step:
a table of all positions would cost tens of MiB for long contexts and save nothing.
"""

import math
from dataclasses import dataclass

import torch
from trimtab_modelspec.config import RopeConfig, Temperature


@dataclass(frozen=True, slots=True)
class Rotation:
    """Effect of positions on a layer's heads: rotation [num_tokens, head_size // 2] complex rotates queries and keys;
    query_factors [num_tokens] float32 scale queries, if present.
    """

    rotation: torch.Tensor
    query_factors: torch.Tensor | None = None


class RotaryAngles:
    """positions -> complex rotations [num_tokens, head_size // 2]."""

    def __init__(self, rope: RopeConfig, head_size: int, device: torch.device) -> None:
        self._frequencies = scaled_frequencies(rope, head_size).to(device)
        self._factor = rope.attention_factor
        sections = [axis for axis, count in enumerate(rope.sections) for _ in range(count)]
        self._axes = torch.tensor(sections, dtype=torch.int64, device=device) if sections else None
        """Position axis that each frequency uses, if tokens have several positions."""

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [num_tokens] int64, or [3, num_tokens] over time, height and width."""
        if self._axes is None or positions.dim() == 1:
            places = positions.unsqueeze(1)
        else:
            places = positions.t().index_select(1, self._axes)
        angles = places.float() * self._frequencies
        if self._factor == 1.0:
            return torch.complex(angles.cos(), angles.sin())
        return torch.complex(angles.cos() * self._factor, angles.sin() * self._factor)


def identity_rotation(positions: torch.Tensor, head_size: int, temperature: Temperature | None) -> Rotation:
    """Return the rotation for NoPE layers: the identity, with temperature-scaled queries."""
    ones = torch.ones(positions.shape[0], head_size // 2, device=positions.device)
    rotation = torch.complex(ones, torch.zeros_like(ones))
    if temperature is None:
        return Rotation(rotation)
    steps = torch.floor((positions.float() + 1.0) / temperature.floor)
    return Rotation(rotation, torch.log1p(steps) * temperature.scale + 1.0)


def scaled_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """[head_size // 2] float32, radians per position."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        return _yarn(rope, head_size)
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


def _yarn(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """Return YaRN frequencies (arXiv:2309.00071, section 3.2): high frequencies unchanged, low frequencies divided by
    `factor`, interpolated between.
    """
    wavelengths = rope.theta ** (torch.arange(0, head_size, 2).float() / head_size)
    low, high = (_frequency_index(times, rope, head_size) for times in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _frequency_index(times: float, rope: RopeConfig, head_size: int) -> float:
    """Return the index of the frequency with this number of turns within the original context."""
    context = rope.original_max_position_embeddings
    return (head_size * math.log(context / (times * 2 * math.pi))) / (2 * math.log(rope.theta))
