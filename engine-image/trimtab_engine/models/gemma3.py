"""Gemma 3, text (Gemma team 2025, arXiv:2503.19786): five sliding-window layers per full-attention layer, norms before
and after each half of a layer (stored as the weight minus 1), and a separate rope for windowed layers.
"""

from typing import TYPE_CHECKING, Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.families import gemma3

from trimtab_engine.models.family import Family, Model
from trimtab_engine.weights.gguf_file import LAYER_NAMES, GgufNames
from trimtab_engine.weights.gguf_metadata import ABOVE_ZERO, NUMBER, Metadata

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard

LARGEST_LAYERS = 62  # of the 27B model, whose scores are scaled by another size than the heads'
GGUF_LAYERS = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """A decoder of layers with four norms."""
    from trimtab_engine.models.decoder import Decoder
    from trimtab_engine.models.sandwich_layer import SandwichLayer

    return Decoder(config, load, shard, groups, layer_type=SandwichLayer)


def gguf_words(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp derives the score scale from the number of layers, and has a fixed pattern of full-attention layers."""
    heads, hidden = metadata.positive("attention.head_count"), metadata.positive("embedding_length")
    is_largest = metadata.positive("block_count") == LARGEST_LAYERS
    scaled_by = hidden // heads if is_largest else metadata.positive("attention.key_length")
    return {
        "sliding_window": metadata.positive("attention.sliding_window"),
        "query_pre_attn_scalar": scaled_by,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", gemma3.LOCAL_THETA, ABOVE_ZERO),
        "final_logit_softcapping": metadata.find("final_logit_softcapping", NUMBER),
    }


FAMILY = Family.of(
    gemma3.FAMILY,
    build=build,
    gguf_names={
        "gemma3": GgufNames("Gemma3ForCausalLM", layers=GGUF_LAYERS, norm_offset=1.0, words=gguf_words),
    },
)
