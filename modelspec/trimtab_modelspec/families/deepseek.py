"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention (MLA), sigmoid routing within the best expert groups plus
shared experts, leading dense layers. deepseek_mtp.py has the multi-token prediction layer.
"""

import math
from dataclasses import replace

from trimtab_modelspec.config import LatentAttention, ModelConfig, MoeConfig, SigmoidRouting
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import (
    StoredTensor,
    mlp_tensors,
    moe_tensors,
    outer_tensors,
    shared_expert_tensors,
)

DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096, "rope_interleave": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Values of keys missing in config.json, as in transformers."""


def parse(words: ConfigReader) -> ModelConfig:
    """Parse the configuration. Rotated pairs must be interleaved, as in every released checkpoint."""
    words = ConfigReader(DEFAULTS | dict(words.config), words.generation, words.where)
    for key, built in (("rope_interleave", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if words.config.get(key, built) != built:
            raise ModelError(
                f"{words.where}: {key} {words.config[key]!r} is not supported for {words.architecture}; only {built!r} "
                f"is"
            )
    if words.positive("moe_layer_freq", default=1) != 1:
        raise ModelError(f"{words.where}: moe_layer_freq is not supported for {words.architecture}; only 1 is")
    latent = LatentAttention(
        query_rank=None if words.config["q_lora_rank"] is None else words.positive("q_lora_rank"),
        kv_rank=words.positive("kv_lora_rank"),
        plain_size=words.positive("qk_nope_head_dim"),
        rotary_size=words.positive("qk_rope_head_dim"),
        value_size=words.positive("v_head_dim"),
    )
    if latent.rotary_size % 2:
        raise ModelError(f"{words.where}: qk_rope_head_dim {latent.rotary_size} must be even")
    bias = words.flag("attention_bias")
    config = words.decoder(qkv_bias=bias, output_bias=bias, moe=_moe(words))
    head_size = latent.plain_size + latent.rotary_size
    return replace(
        config,
        head_size=head_size,
        latent=latent,
        attention_scale=head_size**-0.5 * _sharpening(words, config.rope.factor),
        num_draft_layers=words.count("num_nextn_predict_layers"),
    )


def _sharpening(words: ConfigReader, factor: float) -> float:
    """Return YaRN's factor of attention scores, in addition to its scaling of rotations."""
    parameters = dict(words.config.get("rope_scaling") or {}) | dict(words.config.get("rope_parameters") or {})
    if parameters.get("rope_type", parameters.get("type", "default")) == "default" or factor <= 1:
        return 1.0
    weight = ConfigReader(parameters, {}, words.where).number("mscale_all_dim", default=0.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight else 1.0


def _moe(words: ConfigReader) -> MoeConfig:
    num_experts, per_token = words.positive("n_routed_experts"), words.positive("num_experts_per_tok")
    num_groups, num_top_groups = (words.positive(key, default=1) for key in ("n_group", "topk_group"))
    if num_experts % num_groups or num_experts < 2 * num_groups or num_top_groups > num_groups:
        raise ModelError(
            f"{words.where}: n_routed_experts {num_experts} must be a multiple of n_group {num_groups}, of 2 or more, "
            f"and topk_group {num_top_groups} no more than n_group"
        )
    most = num_experts // num_groups * num_top_groups
    if per_token > most:
        raise ModelError(f"{words.where}: num_experts_per_tok {per_token} is above the {most} of topk_group groups")
    wide = words.positive("moe_intermediate_size")
    num_dense = min(words.count("first_k_dense_replace"), words.num_layers())
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=wide,
        renormalize=words.flag("norm_topk_prob"),
        dense_layers=frozenset(range(num_dense)),
        sigmoid=SigmoidRouting(
            has_bias=True,
            num_groups=num_groups,
            num_top_groups=num_top_groups,
            factor=words.number("routed_scaling_factor", default=1.0),
        ),
        shared_size=wide * words.count("n_shared_experts"),
    )


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors. Every rank has the whole down-projections to latent vectors."""
    found = outer_tensors(config)
    for layer in range(config.num_layers):
        found |= layer_tensors(config, layer)
    return found


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, StoredTensor]:
    """Return the tensors of one layer."""
    assert config.moe is not None
    prefix, norm = f"model.layers.{layer}.", StoredTensor((config.hidden_size,), "replicated")
    mlp = prefix + "mlp."
    found = {prefix + "input_layernorm.weight": norm, prefix + "post_attention_layernorm.weight": norm}
    found |= _attention_tensors(config, prefix + "self_attn.")
    if not config.is_moe_layer(layer):
        return found | mlp_tensors(config, mlp)
    found |= moe_tensors(config, mlp)
    found[mlp + "gate.e_score_correction_bias"] = StoredTensor((config.moe.num_experts,), "replicated")
    if config.moe.shared_size:
        found |= shared_expert_tensors(config, mlp + "shared_experts.")
    return found


def _attention_tensors(config: ModelConfig, prefix: str) -> dict[str, StoredTensor]:
    how, hidden, heads = config.latent, config.hidden_size, config.num_attention_heads
    assert how is not None
    found = {
        prefix + "kv_a_proj_with_mqa.weight": StoredTensor((how.kept_size, hidden), "replicated"),
        prefix + "kv_a_layernorm.weight": StoredTensor((how.kv_rank,), "replicated"),
        prefix + "kv_b_proj.weight": StoredTensor(
            (heads * (how.plain_size + how.value_size), how.kv_rank), "attention"
        ),
        prefix + "o_proj.weight": StoredTensor((hidden, heads * how.value_size), "attention"),
    }
    if how.query_rank is None:
        found[prefix + "q_proj.weight"] = StoredTensor((heads * config.head_size, hidden), "attention")
    else:
        found |= {
            prefix + "q_a_proj.weight": StoredTensor((how.query_rank, hidden), "replicated"),
            prefix + "q_a_layernorm.weight": StoredTensor((how.query_rank,), "replicated"),
            prefix + "q_b_proj.weight": StoredTensor((heads * config.head_size, how.query_rank), "attention"),
        }
    if config.qkv_bias:
        found[prefix + "kv_a_proj_with_mqa.bias"] = StoredTensor((how.kept_size,), "replicated")
        if how.query_rank is not None:
            found[prefix + "q_a_proj.bias"] = StoredTensor((how.query_rank,), "replicated")
    if config.output_bias:
        found[prefix + "o_proj.bias"] = StoredTensor((hidden,), "replicated")
    return found


def latent_kv(config: ModelConfig) -> list[LayerKV]:
    """Return one latent vector per layer, which includes the values."""
    assert config.latent is not None
    return [LayerKV(num_kv_heads=1, key_size=config.latent.kept_size, value_size=0)] * config.num_layers


FAMILY = ModelFamily(
    architectures=("DeepseekV3ForCausalLM",),
    parse=parse,
    tensors=tensors,
    kv=latent_kv,
)
