"""Qwen2, Qwen3 and Qwen3-MoE against transformers on tiny random checkpoints: single requests, batches, chunks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_benchmarks.parity import compare, greedy_generator, load_runner, reference_tokens
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import num_parameters
from trimtab_engine.models.registry import open_model, parse_model_config

VOCABULARY = 193
PROMPT_LENGTHS = (1, 2, 7, 16, 31, 40)
NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}
MIXTURE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3, biases": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12, "attention_bias": True}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MIXTURE),
    "qwen3-moe, weights as they are": (
        Qwen3MoeForCausalLM, Qwen3MoeConfig, {**MIXTURE, "norm_topk_prob": False, "num_experts_per_tok": 3}
    ),
    "qwen3-moe, some layers dense": (
        Qwen3MoeForCausalLM, Qwen3MoeConfig, {**MIXTURE, "decoder_sparse_step": 2, "mlp_only_layers": [0]}
    ),
}  # fmt: skip


def a_checkpoint(folder: Path, model_class: Any, config_class: Any, changes: dict[str, Any]) -> Any:
    """A random model, its biases and norms random too, saved as safetensors."""
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_tokens_equal_transformers(variant: tuple[Any, Any, dict[str, Any]], tmp_path: Path) -> None:
    references = reference_tokens(a_checkpoint(tmp_path, *variant), prompts(), NUM_TOKENS)
    runner = load_runner(str(tmp_path), block_size=8, num_blocks=64)
    for chunk, batch in ((None, 1), (None, 6), (3, 6)):
        parity = compare(references, greedy_generator(runner, block_size=8, chunk=chunk, batch=batch))
        assert parity.defects == []
        assert parity.near_ties <= 1


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_number_of_parameters_is_the_checkpoints(variant: tuple[Any, Any, dict[str, Any]], tmp_path: Path) -> None:

    model = a_checkpoint(tmp_path, *variant)
    source = open_model(str(tmp_path))
    config = parse_model_config(source.config, source.generation_config, source.where)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"num_experts": 10**12}, "implies 3 layers and 1000000000000 experts, but there are"),
        ({"num_hidden_layers": 10**12, "decoder_sparse_step": 2}, "implies 1000000000000 layers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is above num_experts 6"),
    ],
)
def test_config_unsupported_or_absurd_error_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    a_checkpoint(tmp_path, *VARIANTS["qwen3-moe"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts", 6)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load_runner(str(tmp_path))
