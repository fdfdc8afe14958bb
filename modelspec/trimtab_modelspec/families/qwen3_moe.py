"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with MoE layers instead of most or all MLPs."""

from trimtab_modelspec.config import ModelConfig, MoeConfig
from trimtab_modelspec.config_reader import MAX_LAYERS, ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors


def parse(words: ConfigReader) -> ModelConfig:
    """Attention as in the dense models."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, moe=_moe(words))


def _moe(words: ConfigReader) -> MoeConfig:
    """Return the experts, which transformers 5 calls num_local_experts, and the layers that have none."""
    key = "num_experts" if "num_experts" in words.config else "num_local_experts"
    num_layers, num_experts = words.positive("num_hidden_layers"), words.positive(key)
    per_token = words.positive("num_experts_per_tok")
    if per_token > num_experts:
        raise ModelError(f"{words.where}: num_experts_per_tok {per_token} is above {key} {num_experts}")
    step = words.positive("decoder_sparse_step", default=1)
    listed = {int(layer) for layer in words.config.get("mlp_only_layers") or ()}
    # A configuration of absurdly many layers is refused later, by the number of tensors: no set of that size here.
    dense = listed if step == 1 else listed | {n for n in range(min(num_layers, MAX_LAYERS)) if (n + 1) % step}
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=words.positive("moe_intermediate_size"),
        renormalize=words.flag("norm_topk_prob"),
        dense_layers=frozenset(n for n in dense if n < num_layers),
    )


FAMILY = ModelFamily(
    architectures=("Qwen3MoeForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    kv=decoder_kv,
)
