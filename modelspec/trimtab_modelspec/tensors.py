"""Tensors of a decoder checkpoint from its configuration: names, shapes, and division among ranks. Families with other
tensors define them in their own files. No tensor data, no files.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from trimtab_modelspec.config import ModelConfig

Part = Literal[
    "embedding", "lm_head", "attention", "kv_projection", "dense_mlp", "experts", "shared_experts", "replicated"
]
"""Division of a tensor among ranks (docs/reference/contract.md, section 6, defines the parts)."""
PARTS: tuple[Part, ...] = get_args(Part)
LINEAR_PARTS: tuple[Part, ...] = ("attention", "kv_projection", "dense_mlp", "experts", "shared_experts")
"""Parts that quantization applies to."""
PROJECTION = ("_proj.weight", "_proj_with_mqa.weight")
"""Name suffixes of quantizable weights."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    part: Part

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Tensors = Mapping[str, StoredTensor]
"""Stored tensors under their transformers names."""


def decoder_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return every tensor of a decoder as most families store it."""
    hidden = config.hidden_size
    tensors = outer_tensors(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = StoredTensor((hidden,), "replicated")
        tensors[prefix + "post_attention_layernorm.weight"] = StoredTensor((hidden,), "replicated")
        tensors |= attention_tensors(config, prefix + "self_attn.")
        tensors |= (moe_tensors if config.is_moe_layer(layer) else mlp_tensors)(config, prefix + "mlp.")
    return tensors


def outer_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Embeddings, the last norm and the output layer."""
    hidden = config.hidden_size
    tensors = {
        "model.embed_tokens.weight": StoredTensor((config.vocab_size, hidden), "embedding"),
        "model.norm.weight": StoredTensor((hidden,), "replicated"),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = StoredTensor((config.vocab_size, hidden), "lm_head")
    return tensors


def attention_tensors(config: ModelConfig, prefix: str) -> dict[str, StoredTensor]:
    """Projections of queries, keys, values and output, and the norms of queries and keys where there are some."""
    hidden, size = config.hidden_size, config.head_size
    heads, kv = config.num_attention_heads * size, config.num_kv_heads * size
    tensors = {
        **_projection(prefix + "q_proj", (heads, hidden), "attention", config.qkv_bias),
        **_projection(prefix + "k_proj", (kv, hidden), "kv_projection", config.qkv_bias),
        **_projection(prefix + "v_proj", (kv, hidden), "kv_projection", config.qkv_bias),
        **_summed(prefix + "o_proj", (hidden, heads), "attention", config.output_bias),
    }
    if config.qk_norm:
        tensors |= {prefix + name: StoredTensor((size,), "replicated") for name in ("q_norm.weight", "k_norm.weight")}
    return tensors


def mlp_tensors(config: ModelConfig, prefix: str) -> dict[str, StoredTensor]:
    """Return the gated MLP of a dense layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        **_projection(prefix + "gate_proj", (wide, hidden), "dense_mlp", config.mlp_bias),
        **_projection(prefix + "up_proj", (wide, hidden), "dense_mlp", config.mlp_bias),
        **_summed(prefix + "down_proj", (hidden, wide), "dense_mlp", config.mlp_bias),
    }


def moe_tensors(config: ModelConfig, prefix: str) -> dict[str, StoredTensor]:
    """Return the router and the experts of an MoE layer, each expert's projections on their own."""
    assert config.moe is not None
    hidden, wide = config.hidden_size, config.moe.intermediate_size
    rows, columns = StoredTensor((wide, hidden), "experts"), StoredTensor((hidden, wide), "experts")
    tensors = {prefix + "gate.weight": StoredTensor((config.moe.num_experts, hidden), "replicated")}
    for expert in range(config.moe.num_experts):
        of_expert = f"{prefix}experts.{expert}."
        tensors |= {of_expert + "gate_proj.weight": rows, of_expert + "up_proj.weight": rows}
        tensors[of_expert + "down_proj.weight"] = columns
    return tensors


def shared_expert_tensors(config: ModelConfig, prefix: str) -> dict[str, StoredTensor]:
    """Return the tensors of the shared expert."""
    assert config.moe is not None
    hidden, wide = config.hidden_size, config.moe.shared_size
    rows, columns = StoredTensor((wide, hidden), "shared_experts"), StoredTensor((hidden, wide), "shared_experts")
    return {
        prefix + "gate_proj.weight": rows,
        prefix + "up_proj.weight": rows,
        prefix + "down_proj.weight": columns,
    }


def _projection(name: str, shape: tuple[int, int], part: Part, has_bias: bool) -> dict[str, StoredTensor]:
    """Return rows are divided, and the bias with them."""
    weight = {name + ".weight": StoredTensor(shape, part)}
    return {**weight, name + ".bias": StoredTensor(shape[:1], part)} if has_bias else weight


def _summed(name: str, shape: tuple[int, int], part: Part, has_bias: bool) -> dict[str, StoredTensor]:
    """Columns are divided, and the products summed: the bias is one rank's."""
    weight = {name + ".weight": StoredTensor(shape, part)}
    return {**weight, name + ".bias": StoredTensor(shape[:1], "replicated")} if has_bias else weight


def num_elements(tensors: Iterable[StoredTensor]) -> int:
    """Return the total number of elements of these tensors."""
    return sum(tensor.num_elements for tensor in tensors)


def elements_by_part(tensors: Tensors) -> dict[Part, int]:
    """Return the same number by the way in which ranks divide the tensors."""
    counts = dict.fromkeys(PARTS, 0)
    for tensor in tensors.values():
        counts[tensor.part] += tensor.num_elements
    return counts


def num_quantizable(tensors: Tensors) -> int:
    """Return the elements of the layers' projections, which quantization makes smaller."""
    return num_elements(tensor for name, tensor in tensors.items() if name.endswith(PROJECTION))
