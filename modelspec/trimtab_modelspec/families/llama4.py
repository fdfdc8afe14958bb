"""Llama 4, text (Meta 2025): three layers with chunked attention per NoPE layer with full attention; sigmoid routing
plus a shared expert, in all layers or every other one. llama4_vision.py has the vision encoder.
"""

from dataclasses import replace

from trimtab_modelspec.config import ModelConfig, MoeConfig, SigmoidRouting, Temperature
from trimtab_modelspec.config_reader import FULL, ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.quantization import check_unquantised
from trimtab_modelspec.tensors import (
    StoredTensor,
    attention_tensors,
    mlp_tensors,
    outer_tensors,
    shared_expert_tensors,
)

CHUNKED = "chunked_attention"  # entry of layer_types
DEFAULTS = {
    "head_dim": 128, "rope_theta": 500_000.0, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "attention_chunk_size": 8192, "use_qk_norm": True,
    "attn_temperature_tuning": True,
}  # fmt: skip
"""Values of keys missing in config.json, as in transformers."""


def parse(words: ConfigReader) -> ModelConfig:
    """Return a chunk that no request can leave is none."""
    check_unquantised(words.config, words.architecture, words.where)
    words = ConfigReader(DEFAULTS | dict(words.config), words.generation, words.where)
    num_layers = words.num_layers()
    turned = words.listed("no_rope_layers", num_layers)  # of which 1 means that the layer has a rope
    if not turned:
        interval = words.positive("no_rope_layer_interval", default=4)
        turned = [int((layer + 1) % interval > 0) for layer in range(num_layers)]
    bias = words.flag("attention_bias")
    config = words.decoder(
        qkv_bias=bias, output_bias=bias, qk_norm=words.flag("use_qk_norm"), moe=_moe(words, num_layers)
    )
    windows = _chunks(words, turned, config.max_model_len)
    temperature = Temperature(words.number("floor_scale", default=8192.0), words.number("attn_scale", default=0.1))
    return replace(
        config,
        intermediate_size=words.positive("intermediate_size_mlp"),
        windows=windows if any(windows) else (),
        is_chunked=any(windows),
        nope_layers=frozenset(layer for layer in range(num_layers) if not turned[layer]),
        temperature=temperature if words.flag("attn_temperature_tuning") else None,
    )


def _chunks(words: ConfigReader, turned: list[int], max_model_len: int) -> tuple[int | None, ...]:
    """Return the chunk size of each layer. None means full attention."""
    types = words.config.get("layer_types") or [CHUNKED if is_turned else FULL for is_turned in turned]
    if len(types) != len(turned) or not {*types} <= {CHUNKED, FULL}:
        raise ModelError(
            f"{words.where}: layer_types has {len(types)} entries, of {', '.join(sorted(map(str, {*types})))}; "
            f"supported are {len(turned)}, of {FULL} and {CHUNKED}"
        )
    if CHUNKED not in types:
        return (None,) * len(turned)
    size = words.positive("attention_chunk_size")
    return tuple(size if kind == CHUNKED and size < max_model_len else None for kind in types)


def _moe(words: ConfigReader, num_layers: int) -> MoeConfig:
    step = words.positive("interleave_moe_layer_step", default=1)
    listed = words.config.get("moe_layers")
    mixtures = range(step - 1, num_layers, step) if listed is None else words.listed("moe_layers")
    num_experts = words.positive("num_local_experts", default=16)
    per_token = words.positive("num_experts_per_tok", default=1)
    if per_token > num_experts:
        raise ModelError(f"{words.where}: num_experts_per_tok {per_token} is above num_local_experts {num_experts}")
    wide = words.positive("intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=wide,
        renormalize=False,
        dense_layers=frozenset(range(num_layers)) - frozenset(mixtures),
        is_stacked=True,
        sigmoid=SigmoidRouting(weighs_inputs=True),
        shared_size=wide,
    )


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Experts in one tensor per projection, gate before up, transposed. Norms of queries and keys have no weights."""
    assert config.moe is not None
    hidden, wide, experts = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
    norm = StoredTensor((hidden,), "replicated")
    found = outer_tensors(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        found |= {prefix + "input_layernorm.weight": norm, prefix + "post_attention_layernorm.weight": norm}
        found |= attention_tensors(replace(config, qk_norm=False), prefix + "self_attn.")
        mlp = prefix + "feed_forward."
        if not config.is_moe_layer(layer):
            found |= mlp_tensors(config, mlp)
            continue
        found |= {
            mlp + "router.weight": StoredTensor((experts, hidden), "replicated"),
            mlp + "experts.gate_up_proj": StoredTensor((experts, hidden, 2 * wide), "experts"),
            mlp + "experts.down_proj": StoredTensor((experts, wide, hidden), "experts"),
            **shared_expert_tensors(config, mlp + "shared_expert."),
        }
    return found


FAMILY = ModelFamily(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    multimodal=("Llama4ForConditionalGeneration",),
    parse=parse,
    tensors=tensors,
    kv=decoder_kv,
)
