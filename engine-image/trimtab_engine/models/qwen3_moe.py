"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with MoE layers instead of most or all MLPs."""

from typing import Any

from trimtab_modelspec.families import qwen3_moe

from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.weights.gguf_file import LAYER_NAMES, GgufNames
from trimtab_engine.weights.gguf_metadata import Metadata

GGUF_EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}


def gguf_words(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp runs MoE layers in all layers, and has the chosen experts' weights sum to 1."""
    return {
        "num_experts": metadata.positive("expert_count"),
        "num_experts_per_tok": metadata.positive("expert_used_count"),
        "moe_intermediate_size": metadata.positive("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


FAMILY = Family.of(
    qwen3_moe.FAMILY,
    build=build_decoder,
    gguf_names={
        "qwen3moe": GgufNames(
            "Qwen3MoeForCausalLM",
            layers=LAYER_NAMES | {"ffn_gate_inp": "mlp.gate"},
            experts=GGUF_EXPERTS,
            words=gguf_words,
        )
    },
)
