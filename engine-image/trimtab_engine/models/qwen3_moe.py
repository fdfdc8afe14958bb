"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts in place of most or all MLPs."""

from typing import Any

from trimtab_engine.config.model import ModelConfig, MoeConfig
from trimtab_engine.config.model_words import MAX_LAYERS, ConfigWords
from trimtab_engine.errors import ModelError
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import LAYER_NAMES, GgufNames
from trimtab_engine.weights.gguf_words import Metadata

GGUF_EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}


def parse(words: ConfigWords) -> ModelConfig:
    """Attention as in the dense models."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, moe=_mixture(words))


def _mixture(words: ConfigWords) -> MoeConfig:
    """The experts, which transformers 5 calls num_local_experts, and the layers that have none."""
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


def gguf_words(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp runs mixtures in all layers, and has the chosen experts' weights sum to 1."""
    return {
        "num_experts": metadata.positive("expert_count"),
        "num_experts_per_tok": metadata.positive("expert_used_count"),
        "moe_intermediate_size": metadata.positive("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={
        "qwen3moe": GgufNames(
            "Qwen3MoeForCausalLM",
            layers=LAYER_NAMES | {"ffn_gate_inp": "mlp.gate"},
            experts=GGUF_EXPERTS,
            words=gguf_words,
        )
    },
)
