"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged cache of latent vectors.

All heads read one vector per token: c, the latent part, and k, the rotated part of a key. The key up-projection of c is
absorbed into the queries, and the value up-projection is applied after the sum, so that keys and values are never
expanded:
```
score(head) = plain query · (K[head] c) + rotated query · k      =  [K[head]ᵀ plain query | rotated query] · [c | k]
y(head)     = sum of weight * (V[head] c)                        =  V[head] (sum of weight * c)
```
Attention sees one kv head of kv_rank + rotary_size elements, whose values are the first kv_rank elements of its keys.
For long prompts this needs more arithmetic than expanded keys.
"""

import torch
from trimtab_kernels.latent_and_cache import latent_and_cache
from trimtab_kernels.latent_attention import latent_attention
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_kernels.rms_norm import rms_norm

from trimtab_engine.layers.quantized import Projection
from trimtab_engine.layers.rotary import Rotation


class LatentQuery:
    """Queries of this rank's heads. `down` and its norm make a latent vector of the hidden state first, or are not
    there.
    """

    def __init__(self, up: Projection, down: Projection | None, norm: torch.Tensor | None, eps: float) -> None:
        self._up, self._down, self._norm, self._eps = up, down, norm, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, num_heads * (plain_size + rotary_size)]."""
        if self._down is not None and self._norm is not None:
            x = rms_norm(self._down(x), self._norm, self._eps)
        return self._up(x)


class LatentAttention:
    """`keep` makes the latent vector, which `norm` normalises, and the rotated part of the key; keys [num_heads,
    plain_size, kv_rank] and values [num_heads, kv_rank, value_size] unfold it; `output` sums over the ranks that share
    the layer.
    """

    def __init__(
        self,
        query: LatentQuery,
        keep: Projection,
        norm: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: Projection,
        *,
        scale: float,
        eps: float,
        kv_scale: float,
    ) -> None:
        self._query, self._keep, self._norm = query, keep, norm
        self._keys, self._values, self._output = keys, values, output
        self._scale, self._eps = scale, eps
        self._kv_scale = kv_scale

    def __call__(
        self,
        x: torch.Tensor,
        turn: Rotation,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape. keys: this layer's part of the KV cache, as is values."""
        rows, (num_heads, plain_size, kv_rank) = x.shape[0], self._keys.shape
        query = self._query(x).view(rows, num_heads, -1)
        plain, rotated = query[:, :, :plain_size], query[:, :, plain_size:]
        whole = x.new_empty(rows, num_heads, kv_rank + rotated.shape[2])
        torch.bmm(plain.transpose(0, 1), self._keys, out=whole[:, :, :kv_rank].transpose(0, 1))
        key = latent_and_cache(
            whole,
            rotated,
            self._keep(x),
            self._norm,
            self._eps,
            turn.rotation,
            keys,
            metadata.slot_mapping,
            scale=self._kv_scale,
            is_padded=metadata.is_padded,
        )
        y = latent_attention(whole, key, keys, metadata, self._scale, kv_rank=kv_rank, cache_scale=self._kv_scale)
        unfolded = torch.einsum("thc,hcv->thv", y, self._values)
        return self._output(unfolded.reshape(rows, -1))
