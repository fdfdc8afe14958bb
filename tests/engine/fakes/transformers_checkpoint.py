"""Tiny random checkpoints of architectures that transformers' own code computes."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MIXTURE = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {"sliding_window": 13},
    "Olmo2ForCausalLM": {},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "Starcoder2ForCausalLM": {"sliding_window": None},
    "GraniteForCausalLM": {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    "CohereForCausalLM": {"logit_scale": 0.3, "tie_word_embeddings": True},
    "Cohere2ForCausalLM": {**WINDOWS, "logit_scale": 0.3, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {**WINDOWS, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 7.0},
    "Glm4ForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1]},
    "Ernie4_5ForCausalLM": {},
    "MixtralForCausalLM": MIXTURE,
    "OlmoeForCausalLM": MIXTURE,
    "GPT2LMHeadModel": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128, "tie_word_embeddings": True},
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 64},
}


def a_checkpoint(folder: Path, name: str, **changes: Any) -> Any:
    """A random model of transformers', its biases and norms random too, saved as safetensors."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**{**SIZES, **ARCHITECTURES.get(name, {}), **changes})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name or "ln_" in parameter_name
            centre = 1.0 if is_norm and parameter_name.endswith("weight") and name != "Gemma2ForCausalLM" else 0.0
            parameter.normal_(centre, 0.15 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    return model
