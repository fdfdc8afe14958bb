"""Draft heads that read the target's hidden states: a few layers after the target, whose input is the hidden state of
each token and the embedding of the next token. They use the target's own embeddings.

```
target        h(0)   h(1)   h(2)  …      hidden states after the last norm
next token    t(1)   t(2)   t(3)  …
head          g(0)   g(1)   g(2)  …      g(i) predicts t(i+2); after the newest token g replaces h
```
At position i the head keeps keys and values in the slot of token i, under the target's block tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.layers.rotary import RotaryAngles, Rotation
from trimtab_engine.models.decoder import Decoder, DecoderLayer
from trimtab_engine.models.loading import Loader
from trimtab_engine.weights.source import WeightSource


class Join(Protocol):
    """Makes one row of the embedding of a token and the hidden state of the one before it."""

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden_size] of newly allocated memory, from two inputs [rows, hidden_size] and positions
        [rows] int64.
        """
        ...


class DraftHead:
    """A draft head and its target model, both unsharded on one device."""

    def __init__(
        self,
        config: ModelConfig,
        target: Decoder,
        layers: Sequence[DecoderLayer],
        join: Join,
        to_logits: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._target, self._layers, self._join, self._to_logits = target, layers, join, to_logits
        self._rotary = RotaryAngles(config.rope, config.rotary_size, device)
        self.pads_rows = target.pads_rows
        """True if callers should pad the number of rows to a few sizes."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        before: torch.Tensor,
        kv_cache: KVTensors,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return hidden states [rows, hidden_size]. token_ids, positions [rows] int64: tokens, each with the position
        of the previous token, whose hidden states are before [rows, hidden_size].
        """
        hidden = self._join(self._target.embedded(token_ids), before, positions)
        turns = [Rotation(self._rotary(positions))]
        delta = None
        for layer in self._layers:
            delta = layer(hidden, delta, turns, kv_cache, [metadata])
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Some rows of `forward`'s result -> [rows, vocab_size] float32."""
        return self._to_logits(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """One kind of head: how its checkpoint is read."""

    parse: Callable[[WeightSource, ModelConfig], ModelConfig]
    """Return the head's configuration with this target.

    Raises:
        ModelError: the checkpoint is invalid.
        NotSupportedError: the head is not supported.
    """
    source: Callable[[WeightSource, ModelConfig], WeightSource]
    """Its tensors under the names that `tensors` has."""
    tensors: Callable[[ModelConfig], Tensors]
    """Return the expected tensors of the head's checkpoint."""
    kv: Callable[[ModelConfig], Sequence[LayerKV]]
    """Return the KV cache of each layer."""
    build: Callable[[ModelConfig, Loader, Decoder], DraftHead]
