"""Qwen2.5-VL's vision encoder on a device; qwen2_5_vl_vision.py has a drawing of its windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from trimtab_kernels.rms_norm import rms_norm
from trimtab_modelspec.partition import Span

from trimtab_engine.config.vision import VisionConfig, tokens_per_window, windows_of
from trimtab_engine.device.transfer import send_together
from trimtab_engine.layers.gated_mlp import GatedMlp
from trimtab_engine.layers.linear import Linear, rows_at_once
from trimtab_engine.layers.varlen_attention import Runs, attend_runs
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.vision_shard import VisionEncoderShard
from trimtab_engine.parallel.groups import RankGroup

EPS = 1e-6  # epsilon of every norm, fixed in all published models
THETA = 10_000.0  # of the rotary embedding, likewise
Grid = tuple[int, int, int]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Layout of one item's patches. `order`: the token at each position, window after window."""

    order: torch.Tensor
    cosines: torch.Tensor
    """[num_patches, 1, head_size // 2], as are the sines."""
    sines: torch.Tensor
    windows: Runs
    steps: Runs
    """The time steps."""


class VisionEncoderLayer:
    """Attention, then a gated MLP, each with a pre-norm and a residual connection."""

    def __init__(self, vision: VisionConfig, layer: int, load: Loader, share: VisionEncoderShard) -> None:
        prefix, group = f"blocks.{layer}.", share.group
        self._heads = share.num_heads
        self._norms = load.copy(prefix + "norm1.weight"), load.copy(prefix + "norm2.weight")
        self._qkv = _linear(load, prefix + "attn.qkv", share.rows_of_three)
        self._output = load.summed(prefix + "attn.proj", share.columns, group, has_bias=True)
        gate_up = load.gated(prefix + "mlp.", "gate_proj", "up_proj", share.mlp, has_bias=True)
        self._mlp = GatedMlp(gate_up, load.summed(prefix + "mlp.down_proj", share.mlp, group, has_bias=True))

    def __call__(self, hidden: torch.Tensor, arranged: Arrangement, runs: Runs) -> None:
        """hidden [num_patches, hidden_size], changed in place."""
        qkv = self._qkv(rms_norm(hidden, self._norms[0], EPS)).view(hidden.shape[0], 3, self._heads, -1)
        query, key, value = _turned(qkv[:, 0], arranged), _turned(qkv[:, 1], arranged), qkv[:, 2]
        hidden += self._output(attend_runs(query, key, value, runs).flatten(1))
        for part in torch.split(hidden, rows_at_once(hidden.device)):
            part.add_(self._mlp(rms_norm(part, self._norms[1], EPS)))


class VisionEncoder:
    """One item at a time: its patches in, its embeddings out."""

    def __init__(self, vision: VisionConfig, load: Loader, group: RankGroup | None = None) -> None:
        self.vision = vision
        share = VisionEncoderShard.of(vision, group)
        self._device, self.dtype = load.device, load.dtype
        self._patches = Linear(load("patch_embed.proj.weight").flatten(1))
        self._layers = [VisionEncoderLayer(vision, layer, load, share) for layer in range(vision.num_layers)]
        self._norm = load.copy("merger.ln_q.weight")
        self._merge, self._out = _linear(load, "merger.mlp.0"), _linear(load, "merger.mlp.2")

    def __call__(self, rows: torch.Tensor, grid: Grid) -> torch.Tensor:
        """rows [num_patches, row_size] float32 -> [num_tokens, output_size] of the computing dtype."""
        arranged = arrange(grid, self.vision, self._device)
        per_token = self.vision.patches_per_token
        hidden = self._patches(rows.to(device=self._device, dtype=self.dtype))
        hidden = hidden.view(-1, per_token, hidden.shape[1]).index_select(0, arranged.order).flatten(0, 1)
        whole = windows_of(self.vision).whole_layers
        for number, layer in enumerate(self._layers):
            layer(hidden, arranged, arranged.steps if number in whole else arranged.windows)
        merged = F.gelu(self._merge(rms_norm(hidden, self._norm, EPS).view(-1, per_token * hidden.shape[1])))
        embeddings = torch.empty(merged.shape[0], self.vision.output_size, dtype=self.dtype, device=self._device)
        return embeddings.index_copy_(0, arranged.order, self._out(merged))


def arrange(grid: Grid, vision: VisionConfig, device: torch.device) -> Arrangement:
    """Windows, time steps and angles of an item's patches, which go to the device in one copy."""
    times, height, width = grid
    merge, side = vision.merge_size, tokens_per_window(vision)
    tall, wide = height // merge, width // merge
    tokens = np.arange(tall * wide).reshape(tall, wide)
    windows = [
        tokens[top : top + side, left : left + side].ravel()
        for top in range(0, tall, side)
        for left in range(0, wide, side)
    ]
    step, firsts = np.concatenate(windows), np.arange(times)[:, None] * (tall * wide)
    order = torch.from_numpy((step + firsts).ravel())
    runs = _runs([len(window) * vision.patches_per_token for window in windows] * times)
    steps = _runs([height * width] * times)
    angles = [
        part.view(-1, vision.patches_per_token, *part.shape[1:]).index_select(0, order).flatten(0, 1)
        for part in _angles(grid, vision)
    ]
    made = [order, *angles, *map(torch.from_numpy, (*runs, *steps))]
    sent = send_together([part.flatten() for part in made], device)
    order, cosines, sines, *rows = (part.view(own.shape) for part, own in zip(sent, made, strict=True))
    return Arrangement(order, cosines, sines, rows[: len(runs)], rows[len(runs) :])


def _angles(grid: Grid, vision: VisionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [num_patches, 1, head_size // 2] float32 by row and column, in the input order of
    patches.
    """
    times, height, width = grid
    merge, half = vision.merge_size, vision.head_size // 2
    frequencies = 1.0 / THETA ** (torch.arange(0, half, 2).float() / half)
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    blocks = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    angles = (blocks.float().unsqueeze(-1) * frequencies).flatten(1).repeat(times, 1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _runs(lengths: list[int]) -> list[Array]:
    """Return [count, length] int64 each: one run after another of these lengths, runs of one length together."""
    firsts, sizes = np.cumsum([0, *lengths[:-1]]), np.array(lengths)
    return [firsts[sizes == length][:, None] + np.arange(length) for length in sorted(set(lengths))]


def _turned(heads: torch.Tensor, arranged: Arrangement) -> torch.Tensor:
    """heads [num_patches, heads, head_size], each rotated by its patch's angles in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cosines, sines = arranged.cosines, arranged.sines
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(heads.dtype)


def _linear(load: Loader, name: str, parts: Sequence[Span] = ()) -> Linear:
    """Return a projection, or some rows of it concatenated."""
    if not parts:
        return Linear(load(name + ".weight"), load(name + ".bias"))
    weight, bias = (torch.cat([load(name + kind, rows=rows) for rows in parts]) for kind in (".weight", ".bias"))
    return Linear(weight, bias)
