"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped-query attention of Llama 2 and 3), as transformers'
LlamaForCausalLM computes it.

One step: token ids and positions of all scheduled tokens in, their hidden states out; logits only for the rows that
are asked for. q, k, v are one product, gate and up another. The MLP runs in slices of rows, so that its wide
intermediate stays in the cache and the activations' peak does not depend on it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from trimtab_kernels.paged_attention import AttentionMetadata, paged_attention
from trimtab_kernels.reshape_and_cache import reshape_and_cache
from trimtab_kernels.rms_norm import rms_norm
from trimtab_kernels.rotary_embedding import interleave_pairs, rotary_embedding
from trimtab_kernels.silu_and_mul import silu_and_mul

from trimtab_engine.errors import ModelError
from trimtab_engine.kv_cache import KVCache
from trimtab_engine.layers.linear import MAX_ROWS, Linear, can_pack
from trimtab_engine.layers.rotary import RotaryAngles
from trimtab_engine.model_config import ModelConfig
from trimtab_engine.weights.source import WeightSource

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store what the configuration says
Progress = Callable[[int], None]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (heads, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, heads, config.attention_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_tensors(config: ModelConfig, source: WeightSource) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that this architecture uses."""
    found = source.shapes()
    if config.num_layers > len(found):  # before the names of so many layers are listed
        raise ModelError(
            f"{source.where}: implies {config.num_layers} layers, but there are {len(found)} tensors in all"
        )
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(
        name
        for name in found.keys() - expected.keys()
        if not name.endswith(IGNORED_SUFFIX) and not (name == "lm_head.weight" and config.tie_word_embeddings)
    )
    if missing:
        raise ModelError(f"{source.where}: the weights lack {len(missing)} tensors, first {missing[0]}")
    if extra:
        raise ModelError(
            f"{source.where}: the weights hold {len(extra)} tensors that {config.architecture} does not use, first "
            f"{extra[0]}; this variant is not built"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{source.where}: tensor {name} is {list(found[name])}, config.json implies {list(shape)}")


class _Loader:
    """Reads tensors to the computing dtype and device, and reports the bytes read."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self._source, self._dtype, self._device, self._progress = source, dtype, device, progress

    def __call__(self, *names: str) -> torch.Tensor:
        """The tensors in a row along their first dimension; one alone may be a view of the file."""
        tensors = [self._source.tensor(name) for name in names]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        self._progress(sum(t.numel() for t in tensors))
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, *names: str, has_bias: bool, pairs: int | None = None) -> Linear:
        """Projections joined along their outputs. `pairs`: head size, to interleave the first two (q and k)."""
        weights = [self(f"{prefix}{name}.weight") for name in names]
        biases = [self(f"{prefix}{name}.bias") for name in names] if has_bias else []
        if pairs is not None:
            weights[:2] = [interleave_pairs(weight, pairs) for weight in weights[:2]]
            biases[:2] = [interleave_pairs(bias, pairs) for bias in biases[:2]]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def copy(self, name: str) -> torch.Tensor:
        """A tensor of its own memory, for small weights."""
        return self(name).clone()


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, config: ModelConfig, index: int, load: _Loader) -> None:
        prefix = f"model.layers.{index}."
        self._index = index
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_kv_heads
        self._head_size, self._eps = config.head_size, config.rms_norm_eps
        self._scale = config.head_size**-0.5
        self._num_rotated = config.num_attention_heads + config.num_kv_heads
        attention = prefix + "self_attn."
        self._input_norm = load.copy(prefix + "input_layernorm.weight")
        self._qkv = load.linear(
            attention, "q_proj", "k_proj", "v_proj", has_bias=config.attention_bias, pairs=config.head_size
        )
        self._output = load.linear(attention, "o_proj", has_bias=config.attention_bias)
        self._post_norm = load.copy(prefix + "post_attention_layernorm.weight")
        self._gate_up = load.linear(prefix + "mlp.", "gate_proj", "up_proj", has_bias=config.mlp_bias)
        self._down = load.linear(prefix + "mlp.", "down_proj", has_bias=config.mlp_bias)

    def __call__(
        self, hidden: torch.Tensor, rotation: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """hidden [num_tokens, hidden_size], changed in place and returned."""
        normalised = rms_norm(hidden, self._input_norm, self._eps)
        hidden = hidden.add_(self._attention(normalised, rotation, kv_cache, metadata))
        if hidden.shape[0] <= MAX_ROWS:
            return hidden.add_(self._mlp(hidden))
        for part in torch.split(hidden, MAX_ROWS):
            part.add_(self._mlp(part))
        return hidden

    def _attention(
        self, x: torch.Tensor, rotation: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        rows, num_tokens, size = x.shape[0], metadata.num_tokens, self._head_size
        qkv = self._qkv(x)
        split = self._num_rotated * size
        rotated = rotary_embedding(qkv[:, :split].view(rows, self._num_rotated, size), rotation)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        value = qkv[:, split:].view(rows, self._num_kv_heads, size)
        keys, values = kv_cache.keys[self._index], kv_cache.values[self._index]
        reshape_and_cache(key[:num_tokens], value[:num_tokens], keys, values, metadata.slot_mapping)
        output = paged_attention(query, key, value, keys, values, metadata, self._scale)
        return self._output(output.view(rows, -1))

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._down(silu_and_mul(self._gate_up(rms_norm(hidden, self._post_norm, self._eps))))


class LlamaForCausalLM:
    """The whole model on one device. Weights are read by `source`; `progress` gets numbers of elements."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        load = _Loader(source, dtype, device, progress)
        self.config = config
        self._layers = [LlamaLayer(config, index, load) for index in range(config.num_layers)]
        self._norm = load.copy("model.norm.weight")
        # On the CPU the table is looked up where it lies: in the page cache when the file has the computing dtype, so
        # that a tied, packed lm_head is the only copy in anonymous memory.
        self._embeddings = load("model.embed_tokens.weight")
        tied = config.tie_word_embeddings
        self._lm_head = Linear(self._embeddings if tied else load("lm_head.weight"))
        self._rotary = RotaryAngles(config.rope, config.head_size, device)
        self.pads_rows = can_pack(dtype, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        *,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """token_ids, positions [num_tokens] int64 -> hidden states [num_tokens, hidden_size] before the last norm.

        `num_layers` runs the first layers only, for profiling: they all use the same memory.
        """
        hidden = F.embedding(token_ids, self._embeddings)
        rotation = self._rotary(positions)
        for layer in self._layers[:num_layers]:
            hidden = layer(hidden, rotation, kv_cache, metadata)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result -> [rows, vocab_size] float32."""
        return self._lm_head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()
