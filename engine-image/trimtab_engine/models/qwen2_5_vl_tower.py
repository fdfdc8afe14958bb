"""The tower of Qwen2.5-VL on a device; what its windows are is drawn in qwen2_5_vl_facts.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from trimtab_kernels.rms_norm import rms_norm

from trimtab_engine.config.vision import VisionConfig, tokens_per_window, windows_of
from trimtab_engine.layers.gated_mlp import GatedMlp
from trimtab_engine.layers.linear import MAX_ROWS, Linear
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.tower_share import TowerShare
from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.parallel.partition import Span

EPS = 1e-6  # of every norm; no configuration says another
THETA = 10_000.0  # of the rotary embedding, likewise
Grid = tuple[int, int, int]
Segments = list[torch.Tensor]
"""[count, length] int64 each: rows that see each other, those of one length together."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the patches of one item are laid out. `order`: the token at each place, window after window."""

    order: torch.Tensor
    cosines: torch.Tensor
    """[num_patches, 1, head_size // 2], as are the sines."""
    sines: torch.Tensor
    windows: Segments
    steps: Segments
    """The time steps."""


class TowerLayer:
    """Attention, then a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, vision: VisionConfig, layer: int, load: Loader, share: TowerShare) -> None:
        prefix, group = f"blocks.{layer}.", share.group
        self._heads = share.num_heads
        self._norms = load.copy(prefix + "norm1.weight"), load.copy(prefix + "norm2.weight")
        self._qkv = _linear(load, prefix + "attn.qkv", share.rows_of_three)
        self._output = load.summed(prefix + "attn.proj", share.columns, group, has_bias=True)
        gate_up = load.gated(prefix + "mlp.", "gate_proj", "up_proj", share.mlp, has_bias=True)
        self._mlp = GatedMlp(gate_up, load.summed(prefix + "mlp.down_proj", share.mlp, group, has_bias=True))

    def __call__(self, hidden: torch.Tensor, arranged: Arrangement, segments: Segments) -> None:
        """hidden [num_patches, hidden_size], changed in place."""
        qkv = self._qkv(rms_norm(hidden, self._norms[0], EPS)).view(hidden.shape[0], 3, self._heads, -1)
        query, key, value = _turned(qkv[:, 0], arranged), _turned(qkv[:, 1], arranged), qkv[:, 2]
        attended = torch.empty_like(query)
        for rows in segments:
            of_query, of_key, of_value = (part[rows].transpose(1, 2) for part in (query, key, value))
            attended[rows] = F.scaled_dot_product_attention(of_query, of_key, of_value).transpose(1, 2)
        hidden += self._output(attended.flatten(1))
        for part in torch.split(hidden, MAX_ROWS):
            part.add_(self._mlp(rms_norm(part, self._norms[1], EPS)))


class Tower:
    """One item at a time: its patches in, its embeddings out."""

    def __init__(self, vision: VisionConfig, load: Loader, group: RankGroup | None = None) -> None:
        self.vision = vision
        share = TowerShare.of(vision, group)
        self._device, self.dtype = load.device, load.dtype
        self._patches = Linear(load("patch_embed.proj.weight").flatten(1))
        self._layers = [TowerLayer(vision, layer, load, share) for layer in range(vision.num_layers)]
        self._norm = load.copy("merger.ln_q.weight")
        self._merge, self._out = _linear(load, "merger.mlp.0"), _linear(load, "merger.mlp.2")

    def __call__(self, rows: torch.Tensor, grid: Grid) -> torch.Tensor:
        """rows [num_patches, row_size] float32 -> [num_tokens, output_size] of the computing dtype."""
        arranged = arrange(grid, self.vision, self._device)
        per_token = self.vision.patches_per_token
        hidden = self._patches(rows.to(device=self._device, dtype=self.dtype))
        hidden = hidden.view(-1, per_token, hidden.shape[1])[arranged.order].flatten(0, 1)
        whole = windows_of(self.vision).whole_layers
        for number, layer in enumerate(self._layers):
            layer(hidden, arranged, arranged.steps if number in whole else arranged.windows)
        merged = F.gelu(self._merge(rms_norm(hidden, self._norm, EPS).view(-1, per_token * hidden.shape[1])))
        embeddings = torch.empty(merged.shape[0], self.vision.output_size, dtype=self.dtype, device=self._device)
        embeddings[arranged.order] = self._out(merged)
        return embeddings


def arrange(grid: Grid, vision: VisionConfig, device: torch.device) -> Arrangement:
    """Windows, time steps and angles of an item's patches."""
    times, height, width = grid
    merge, side = vision.merge_size, tokens_per_window(vision)
    tall, wide = height // merge, width // merge
    tokens = torch.arange(tall * wide).view(tall, wide)
    windows = [
        tokens[top : top + side, left : left + side].flatten()
        for top in range(0, tall, side)
        for left in range(0, wide, side)
    ]
    step, firsts = torch.cat(windows), torch.arange(times).unsqueeze(1) * (tall * wide)
    order = (step + firsts).flatten()
    lengths = [len(window) * vision.patches_per_token for window in windows] * times
    cosines, sines = (
        part.view(-1, vision.patches_per_token, *part.shape[1:])[order].flatten(0, 1).to(device)
        for part in _angles(grid, vision)
    )
    return Arrangement(
        order.to(device), cosines, sines, _segments(lengths, device), _segments([height * width] * times, device)
    )


def _angles(grid: Grid, vision: VisionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [num_patches, 1, head_size // 2] float32 by row and column, in the order in which patches
    come."""
    times, height, width = grid
    merge, half = vision.merge_size, vision.head_size // 2
    frequencies = 1.0 / THETA ** (torch.arange(0, half, 2).float() / half)
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    blocks = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    angles = (blocks.float().unsqueeze(-1) * frequencies).flatten(1).repeat(times, 1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _segments(lengths: list[int], device: torch.device) -> Segments:
    """Rows one run after another, of these lengths."""
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    sizes = torch.tensor(lengths)
    return [(firsts[sizes == length].unsqueeze(1) + torch.arange(length)).to(device) for length in sorted(set(lengths))]


def _turned(heads: torch.Tensor, arranged: Arrangement) -> torch.Tensor:
    """heads [num_patches, heads, head_size], each rotated by its patch's angles in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cosines, sines = arranged.cosines, arranged.sines
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(heads.dtype)


def _linear(load: Loader, name: str, parts: Sequence[Span] = ()) -> Linear:
    """A projection, or these rows of it one behind the other."""
    if not parts:
        return Linear(load(name + ".weight"), load(name + ".bias"))
    weight, bias = (torch.cat([load(name + kind, rows=rows) for rows in parts]) for kind in (".weight", ".bias"))
    return Linear(weight, bias)
