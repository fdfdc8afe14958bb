"""Decoder layer with norms before and after each half (Gemma 3): the outputs of attention and the MLP are normalised
before they are added.
"""

from collections.abc import Sequence

import torch
from trimtab_kernels.native.decoder import LayerWeights
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_kernels.rms_norm import rms_norm
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import KVLayerIndex

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.layers.rotary import Rotation
from trimtab_engine.models.decoder import DecoderLayer, load_norm
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.shard import ModelShard


class SandwichLayer(DecoderLayer):
    """`post_attention_layernorm` normalises the attention output; the MLP has its own norms before and after it."""

    def __init__(
        self, config: ModelConfig, layer: int, place: KVLayerIndex, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> None:
        super().__init__(config, layer, place, shard, groups, load)
        prefix = f"model.layers.{layer}."
        self._attended_norm = self._mlp_norm
        self._mlp_norm = load_norm(config, prefix + "pre_feedforward_layernorm.weight", load)
        self._fed_norm = load_norm(config, prefix + "post_feedforward_layernorm.weight", load)

    def _attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        turns: Sequence[Rotation],
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """See DecoderLayer."""
        attended = super()._attend(hidden, delta, turns, kv_cache, metadata)
        return rms_norm(attended, self._attended_norm, self._eps)

    def _feed_forward(self, normalised: torch.Tensor) -> torch.Tensor:
        """See DecoderLayer."""
        return rms_norm(self.feed_forward(normalised), self._fed_norm, self._eps)

    def compiled_weights(self) -> LayerWeights | None:
        """Always None: the compiled operators support two norms per layer only."""
        return None
