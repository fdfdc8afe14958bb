"""Llama 4's vision encoder on a device; llama4_vision.py describes it."""

import torch
import torch.nn.functional as F

from trimtab_engine.config.vision import VisionConfig, tiles_of
from trimtab_engine.layers.linear import Linear, rows_at_once
from trimtab_engine.layers.varlen_attention import attend_runs
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.vision_shard import VisionEncoderShard
from trimtab_engine.parallel.groups import RankGroup

EPS = 1e-5  # epsilon of every norm, independent of the configuration
Norm = tuple[torch.Tensor, torch.Tensor]


class TileLayer:
    """Attention, then an MLP, each with a pre-norm and a residual connection."""

    def __init__(self, layer: int, load: Loader, share: VisionEncoderShard) -> None:
        prefix, group = f"model.layers.{layer}.", share.group
        self._heads = share.num_heads
        self._norms = _norm(load, prefix + "input_layernorm"), _norm(load, prefix + "post_attention_layernorm")
        projections = {f"{name}_proj": share.columns for name in "qkv"}
        self._qkv = load.joined(prefix + "self_attn.", projections, has_bias=True)
        self._output = load.summed(prefix + "self_attn.o_proj", share.columns, group, has_bias=True)
        self._up = load.joined(prefix + "mlp.", {"fc1": share.mlp}, has_bias=True)
        self._down = load.summed(prefix + "mlp.fc2", share.mlp, group, has_bias=True)

    def __call__(self, hidden: torch.Tensor, turns: torch.Tensor, rows: torch.Tensor) -> None:
        """hidden [rows, hidden_size], changed in place. turns [rows, 1, head_size // 2] complex64; rows [1, rows]
        int64: all of them.
        """
        qkv = self._qkv(_normed(hidden, self._norms[0])).view(hidden.shape[0], 3, self._heads, -1)
        query, key, value = _turned(qkv[:, 0], turns), _turned(qkv[:, 1], turns), qkv[:, 2]
        hidden += self._output(attend_runs(query, key, value, [rows]).flatten(1))
        for part in torch.split(hidden, rows_at_once(hidden.device)):
            part.add_(self._down(F.gelu(self._up(_normed(part, self._norms[1])))))


class Llama4VisionEncoder:
    """One tile at a time: its patches in, its embeddings out."""

    def __init__(self, vision: VisionConfig, load: Loader, group: RankGroup | None = None) -> None:
        self.vision = vision
        self._device, self.dtype = load.device, load.dtype
        share = VisionEncoderShard.of(vision, group)
        order = _in_order_of_tokens(vision)
        self._patches = Linear(load("patch_embedding.linear.weight"))
        positions = load.copy("positional_embedding_vlm")
        self._positions = positions[:-1].index_select(0, order.to(positions.device))
        self._last_row = (load.copy("class_embedding") + positions[-1]).unsqueeze(0)
        self._turns = _turns(vision, order).to(load.device)
        self._rows = torch.arange(len(self._turns), device=load.device).unsqueeze(0)
        self._before, self._after = _norm(load, "layernorm_pre"), _norm(load, "layernorm_post")
        self._layers = [TileLayer(layer, load, share) for layer in range(vision.num_layers)]
        self._adapter = [Linear(load(f"vision_adapter.mlp.{name}.weight")) for name in ("fc1", "fc2")]
        self._projector = Linear(load("linear_1.weight"))

    def __call__(self, rows: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """rows [num_patches, row_size] float32 of one tile -> [num_tokens, output_size] of the computing dtype."""
        patches = self._patches(rows.to(device=self._device, dtype=self.dtype)) + self._positions
        hidden = _normed(torch.cat([patches, self._last_row]), self._before)
        for layer in self._layers:
            layer(hidden, self._turns, self._rows)
        merged = _normed(hidden[:-1], self._after).view(-1, self.vision.patches_per_token * hidden.shape[1])
        for projection in self._adapter:
            merged = F.gelu(projection(merged))
        return self._projector(merged)


def _in_order_of_tokens(vision: VisionConfig) -> torch.Tensor:
    """Return [num_patches] int64: the row-major patch index at each position of the input order."""
    side, merge = tiles_of(vision).size // vision.patch_size, vision.merge_size
    places = torch.arange(side * side).view(side // merge, merge, side // merge, merge)
    return places.transpose(1, 2).flatten()


def _turns(vision: VisionConfig, order: torch.Tensor) -> torch.Tensor:
    """[num_patches + 1, 1, head_size // 2] complex64: by column, then by row, both counted from 1; the last row is not
    turned.
    """
    side, quarter = tiles_of(vision).size // vision.patch_size, vision.head_size // 4
    steps = torch.arange(quarter, dtype=torch.float32) * 2 / (vision.head_size // 2)
    frequencies = 1.0 / tiles_of(vision).rope_theta ** steps
    angles = torch.cat([(place + 1).unsqueeze(1) * frequencies for place in (order % side, order // side)], dim=1)
    angles = torch.cat([angles, angles.new_zeros(1, 2 * quarter)])
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate heads [rows, heads, head_size] with adjacent pairs, in float32."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(2).to(heads.dtype)


def _norm(load: Loader, name: str) -> Norm:
    return load.copy(name + ".weight"), load.copy(name + ".bias")


def _normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], *norm, EPS)
