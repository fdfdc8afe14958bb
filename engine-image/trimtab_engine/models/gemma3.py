"""Gemma 3, text (Gemma team 2025, arXiv:2503.19786): five layers that see a window for each that sees all, norms before
and behind each half of a layer, whose weights are kept as what they add to 1, and a rotation of its own under windows.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.errors import ModelError
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, Model
from trimtab_engine.models.tensors import StoredTensor, decoder_tensors
from trimtab_engine.weights.gguf_file import LAYER_NAMES, GgufNames
from trimtab_engine.weights.gguf_words import ABOVE_ZERO, NUMBER, Metadata

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard

UNSAID = {
    "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 131072,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
}  # fmt: skip
"""What config.json leaves out where it is this, as transformers reads it."""
LOCAL_THETA = 10_000.0  # of layers under a window, likewise
PATTERN = 6  # every sixth layer sees all
LARGEST_LAYERS = 62  # of the model of 27B, whose scores are scaled by another size than the heads'
GGUF_LAYERS = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def parse(words: ConfigWords) -> ModelConfig:
    """Scores and logits that are softly capped, as Gemma 2's are, are refused, and so is sight of later tokens."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if words.config.get(key):
            raise ModelError(f"{words.where}: {key} {words.config[key]} is not built for {words.architecture}")
    config = UNSAID | dict(words.config)
    ropes = dict(config.pop("rope_parameters", None) or {})
    whole = ConfigWords(config | {"rope_parameters": ropes.get("full_attention")}, words.generation, words.where)
    local = ropes.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    local_words = ConfigWords({"rope_parameters": local}, {}, words.where)
    bias = words.flag("attention_bias")
    model = whole.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, is_gelu=True)
    pattern = words.positive("sliding_window_pattern", default=PATTERN)
    return replace(
        model,
        windows=words.windows(lambda layer: (layer + 1) % pattern > 0, unsaid=4096),
        local_rope=local_words.rope(model.max_model_len),
        attention_scale=words.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embedding_scale=model.hidden_size**0.5,
        norm_offset=1.0,
    )


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Two more norms per layer than others have."""
    norm = StoredTensor((config.hidden_size,), "replicated")
    more = {
        f"model.layers.{layer}.{which}_feedforward_layernorm.weight": norm
        for layer in range(config.num_layers)
        for which in ("pre", "post")
    }
    return decoder_tensors(config) | more


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """A decoder of layers with four norms."""
    from trimtab_engine.models.decoder import Decoder
    from trimtab_engine.models.sandwich_layer import SandwichLayer

    return Decoder(config, load, shard, groups, layer_type=SandwichLayer)


def gguf_words(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp knows by the number of layers what scores are scaled by, and by itself which layers see all."""
    heads, hidden = metadata.positive("attention.head_count"), metadata.positive("embedding_length")
    is_largest = metadata.positive("block_count") == LARGEST_LAYERS
    scaled_by = hidden // heads if is_largest else metadata.positive("attention.key_length")
    return {
        "sliding_window": metadata.positive("attention.sliding_window"),
        "query_pre_attn_scalar": scaled_by,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", LOCAL_THETA, ABOVE_ZERO),
        "final_logit_softcapping": metadata.find("final_logit_softcapping", NUMBER),
    }


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    multimodal=("Gemma3ForConditionalGeneration",),
    parse=parse,
    tensors=tensors,
    build=build,
    kv=decoder_kv,
    gguf_names={
        "gemma3": GgufNames("Gemma3ForCausalLM", layers=GGUF_LAYERS, norm_offset=1.0, words=gguf_words),
    },
)
