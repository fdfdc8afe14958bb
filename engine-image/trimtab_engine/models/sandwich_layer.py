"""A decoder layer whose halves stand between two norms each (Gemma 3): what attention and the MLP yield is normalised
before it is added.
"""

from collections.abc import Sequence

import torch
from trimtab_kernels.native.decoder import LayerWeights
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_kernels.rms_norm import add_rms_norm, rms_norm

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.layers.linear import MAX_ROWS
from trimtab_engine.memory.kv_groups import KVPlace
from trimtab_engine.models.decoder import DecoderLayer, load_norm
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.shard import ModelShard


class SandwichLayer(DecoderLayer):
    """`post_attention_layernorm` is of what attention yields; the MLP has norms of its own before and behind it."""

    def __init__(
        self, config: ModelConfig, layer: int, place: KVPlace, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> None:
        super().__init__(config, layer, place, shard, groups, load)
        prefix = f"model.layers.{layer}."
        self._pre_mlp_norm = load_norm(config, prefix + "pre_feedforward_layernorm.weight", load)
        self._post_mlp_norm = load_norm(config, prefix + "post_feedforward_layernorm.weight", load)

    def __call__(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        rotations: Sequence[torch.Tensor],
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor | None:
        """See DecoderLayer."""
        attended = rms_norm(self._attend(hidden, delta, rotations, kv_cache, metadata), self._post_norm, self._eps)
        if hidden.shape[0] <= MAX_ROWS or hidden.is_cuda:
            y = self.feed_forward(add_rms_norm(attended, hidden, self._pre_mlp_norm, self._eps))
            return rms_norm(y, self._post_mlp_norm, self._eps)
        hidden.add_(attended)
        for part in torch.split(hidden, MAX_ROWS):
            part.add_(self.mlp(part))
        return None

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The second half's result, to be added to hidden [rows, hidden_size]."""
        y = self.feed_forward(rms_norm(hidden, self._pre_mlp_norm, self._eps))
        return rms_norm(y, self._post_mlp_norm, self._eps)

    def compiled_weights(self) -> LayerWeights | None:
        """None: the compiled operators have two norms per layer."""
        return None
