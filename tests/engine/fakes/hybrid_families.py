"""Tiny random checkpoints of families with mixed attention layers, with every branch enabled, by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

VOCABULARY = 211
CORRECTION = "e_score_correction_bias"
"""Transformers keeps it as no parameter of the model, and stores it."""
PROMPTS = [[5], [5, 6, 7, 8, 9, 10, 11], list(range(20, 60)), [*range(20, 50), 3, 4]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 13,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
GEMMA: dict[str, Any] = SIZES | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "attention_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
GPT_OSS: dict[str, Any] = SIZES | {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "swiglu_limit": 1.5,  # so low that gates are cut off
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 15000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
LLAMA4: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "sliding_window"} | {
    "num_hidden_layers": 5,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 13,  # no multiple of a block
    "no_rope_layers": [1, 1, 0, 1, 0],
    "interleave_moe_layer_step": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    key: value for key, value in SIZES.items() if key not in ("sliding_window", "head_dim")
} | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
    },
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, SIZES),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config, DEEPSEEK),
    "deepseek, direct": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": False},
    ),
}


def save_family(name: str, folder: Path) -> Any:
    """Save and return transformers' model with random weights, biases, norms, sinks and score offsets."""
    model_class, config_class, config = FAMILIES[name]
    torch.manual_seed(0)
    model: Any = model_class(config_class(**config))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in parameter_name and name != "gemma3" else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 and "bias" not in parameter_name else 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(CORRECTION):
                buffer.normal_(0.0, 0.3)
    for module in model.modules():
        if hasattr(module, "limit"):  # transformers before 5.19 has 7.0 whatever the configuration says
            module.limit = config["swiglu_limit"]
    model.save_pretrained(folder)
    return model
