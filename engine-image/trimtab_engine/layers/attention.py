"""Attention of one decoder layer over the paged KV cache: one matmul for q, k and v, one pass that rotates and writes
them, paged attention, and the output projection.

Invariant of every layer: K and V of all rows of a step are in the cache before any of the layer's attention reads it.
Requests of one step can share blocks that the step computes (see the scheduler), and the reader's rows may precede
the writer's. The paths ensure it as follows:

- torch's operators and transformers' own code: `rope_and_cache`, `latent_and_cache` or `reshape_and_cache` of all rows
  returns before attention is called (here, latent_attention.py, models/by_transformers/attention.py).
- compiled CPU layers: steps of several slices write K and V of every slice first (native/layers.c).
- CUDA: one launch writes all rows, and attention is launched after it in the same stream, inside graphs too. A kernel
  that starts early waits for the one before it (trimtab_kernels/launch/dependence.py).
- draft models and heads: their own layers do the same with the draft's part of the cache.

tests/engine/core/test_differential_mixes.py and test_start_on_cuda.py check it.
"""

from dataclasses import dataclass

import torch
from trimtab_kernels.paged_attention import AttentionMetadata, paged_attention
from trimtab_kernels.rope_and_cache import Norms, rope_and_cache

from trimtab_engine.layers.quantized import Projection
from trimtab_engine.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales that keys and values are divided by before a float8 KV cache stores them."""

    key: float = 1.0
    value: float = 1.0


class Attention:
    """Attention of one layer. `qkv` has this rank's heads concatenated, q and k with adjacent rotary pairs; `output`
    sums over the ranks that share the layer. `norms`: each head of q and k is normalised before it is rotated. sinks
    [num_heads] float32: softmax weight of each head that has no value.
    """

    def __init__(
        self,
        qkv: Projection,
        output: Projection,
        *,
        scale: float,
        norms: Norms | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        self.qkv, self.output, self.norms, self.sinks = qkv, output, norms, sinks
        self._scale = scale
        kv_scales = kv_scales or KVScales()
        self._kv_scales = {"key_scale": kv_scales.key, "value_scale": kv_scales.value}

    def __call__(
        self,
        x: torch.Tensor,
        turn: Rotation,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape. keys, values: this layer's part of the KV cache."""
        return self.output(self.between_products(self.qkv(x), turn, keys, values, metadata))

    def between_products(
        self,
        qkv: torch.Tensor,
        turn: Rotation,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The first product's result -> the second one's input [num_tokens, num_heads * head_size]."""
        slots, scales = metadata.slot_mapping, self._kv_scales
        query, key, value = rope_and_cache(
            qkv, turn.rotation, keys, values, slots, norms=self.norms, is_padded=metadata.is_padded, **scales
        )
        if turn.query_factors is not None:
            query = (query * turn.query_factors.view(-1, 1, 1)).to(query.dtype)
        output = paged_attention(query, key, value, keys, values, metadata, self._scale, sinks=self.sinks, **scales)
        return output.view(qkv.shape[0], -1)
