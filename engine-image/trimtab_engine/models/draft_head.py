"""Heads that draft from what a model has computed: a few layers behind it, which see the hidden state of each token
beside the embedding of the next one, and use the model's own embeddings.

```
target        h(0)   h(1)   h(2)  …      hidden states behind the last norm
next token    t(1)   t(2)   t(3)  …
head          g(0)   g(1)   g(2)  …      g(i) foretells t(i+2); behind the newest token g takes the place of h
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
from trimtab_engine.layers.rotary import RotaryAngles, Turn
from trimtab_engine.models.decoder import Decoder, DecoderLayer
from trimtab_engine.models.loading import Loader
from trimtab_engine.weights.source import WeightSource


class Join(Protocol):
    """Makes one row of the embedding of a token and the hidden state of the one before it."""

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] each, and positions [rows] int64 -> [rows, hidden_size] of its own memory."""
        ...


class DraftHead:
    """A head with its weights beside the model that it belongs to, both whole on one device."""

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
        """Whether callers pad rows to few sizes."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        before: torch.Tensor,
        kv_cache: KVTensors,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """token_ids, positions [rows] int64: tokens, each with the position of the one before it, whose hidden states
        are before [rows, hidden_size] -> hidden states of the same shape."""
        hidden = self._join(self._target.embedded(token_ids), before, positions)
        turns = [Turn(self._rotary(positions))]
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
    """What it is in numbers, beside this target. Raises ModelError, or NotSupportedError by name."""
    source: Callable[[WeightSource, ModelConfig], WeightSource]
    """Its tensors under the names that `tensors` has."""
    tensors: Callable[[ModelConfig], Tensors]
    """What its checkpoint must hold of it."""
    kv: Callable[[ModelConfig], Sequence[LayerKV]]
    """What each of its layers keeps of a token."""
    build: Callable[[ModelConfig, Loader, Decoder], DraftHead]
