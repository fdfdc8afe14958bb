"""Gemma 3, text (Gemma team 2025, arXiv:2503.19786): five windowed layers per layer with full attention, pre- and
post-norms whose weights are stored as offsets from 1, and a separate RoPE for windowed layers.
"""

from dataclasses import replace

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import StoredTensor, decoder_tensors

DEFAULTS = {
    "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 131072,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
}  # fmt: skip
"""Values of keys missing in config.json, as in transformers."""
LOCAL_THETA = 10_000.0  # of layers under a window, likewise
PATTERN = 6  # every sixth layer sees all


def parse(words: ConfigReader) -> ModelConfig:
    """Scores and logits that are softly capped, as Gemma 2's are, are refused, and so is sight of later tokens."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if words.config.get(key):
            raise ModelError(f"{words.where}: {key} {words.config[key]} is not supported for {words.architecture}")
    config = DEFAULTS | dict(words.config)
    ropes = dict(config.pop("rope_parameters", None) or {})
    whole = ConfigReader(config | {"rope_parameters": ropes.get("full_attention")}, words.generation, words.where)
    local = ropes.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    local_words = ConfigReader({"rope_parameters": local}, {}, words.where)
    bias = words.flag("attention_bias")
    model = whole.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, is_gelu=True)
    pattern = words.positive("sliding_window_pattern", default=PATTERN)
    return replace(
        model,
        windows=words.windows(lambda layer: (layer + 1) % pattern > 0, default_window=4096),
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


FAMILY = ModelFamily(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    multimodal=("Gemma3ForConditionalGeneration",),
    parse=parse,
    tensors=tensors,
    kv=decoder_kv,
)
