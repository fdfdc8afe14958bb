"""gpt-oss (OpenAI 2025, arXiv:2508.10925): every other layer is windowed, each head has an attention sink, and every
layer is an MoE with expert biases and a clamped gate. Experts are stacked in one tensor per layer.
"""

from dataclasses import replace

from trimtab_modelspec.config import ClampedGate, ModelConfig, MoeConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.quantization import MXFP4, check_unquantised
from trimtab_modelspec.tensors import StoredTensor, attention_tensors, outer_tensors

DEFAULTS = {"head_dim": 64, "rope_theta": 150_000.0, "attention_bias": True}
"""Values of keys missing in config.json, as in transformers."""


def parse(words: ConfigReader) -> ModelConfig:
    """Parse the configuration. Released checkpoints have mxfp4 experts; restored ones have bfloat16 experts."""
    check_unquantised(words.config, words.architecture, words.where, but=MXFP4)
    words = ConfigReader(DEFAULTS | dict(words.config), words.generation, words.where)
    bias = words.flag("attention_bias")
    wide, num_experts = words.positive("intermediate_size"), words.positive("num_local_experts")
    per_token = words.positive("num_experts_per_tok", default=4)
    if per_token > num_experts:
        raise ModelError(f"{words.where}: num_experts_per_tok {per_token} is above num_local_experts {num_experts}")
    gate = ClampedGate(words.number("swiglu_alpha", default=1.702), words.number("swiglu_limit", default=7.0))
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=wide,
        renormalize=True,  # the softmax over the chosen ones
        dense_layers=frozenset(),
        is_stacked=True,
        clamped_gate=gate,
    )
    config = words.decoder(qkv_bias=bias, output_bias=bias, moe=moe)
    return replace(config, windows=words.windows(lambda layer: layer % 2 == 0, default_window=128), has_sinks=True)


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Experts in one tensor per projection, with rows of gate and up in turn, transposed."""
    assert config.moe is not None
    hidden, wide, experts = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
    norm = StoredTensor((hidden,), "replicated")
    found = outer_tensors(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        found |= {prefix + "input_layernorm.weight": norm, prefix + "post_attention_layernorm.weight": norm}
        found |= attention_tensors(config, prefix + "self_attn.")
        found[prefix + "self_attn.sinks"] = StoredTensor((config.num_attention_heads,), "replicated")
        mlp = prefix + "mlp."
        found |= {
            mlp + "router.weight": StoredTensor((experts, hidden), "replicated"),
            mlp + "router.bias": StoredTensor((experts,), "replicated"),
            mlp + "experts.gate_up_proj": StoredTensor((experts, hidden, 2 * wide), "experts"),
            mlp + "experts.gate_up_proj_bias": StoredTensor((experts, 2 * wide), "experts"),
            mlp + "experts.down_proj": StoredTensor((experts, wide, hidden), "experts"),
            mlp + "experts.down_proj_bias": StoredTensor((experts, hidden), "experts"),
        }
    return found


FAMILY = ModelFamily(
    architectures=("GptOssForCausalLM",),
    parse=parse,
    tensors=tensors,
    kv=decoder_kv,
)
