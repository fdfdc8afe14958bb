"""Tiny random Llama checkpoints, and draft models for them: perturbed a little, or cut short."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
MAX_MODEL_LEN = 256
END_TOKEN = 96


def save_model(folder: Path, *, num_layers: int = 3, noise: float = 0.0, **changes: Any) -> Path:
    """The same random model every time; `num_layers` keeps its first layers, `noise` is added to its weights, as part
    of their spread.
    """
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "eos_token_id": END_TOKEN,
        "dtype": "float32",
        **changes,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**values))
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        spread = 0.25 if parameter.dim() > 1 else 0.1
        with torch.no_grad():
            parameter.normal_(1.0 if "norm" in name else 0.0, spread, generator=generator)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise * spread)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise on its weights: often right."""
    return save_model(tmp_path_factory.mktemp("perturbed"), noise=0.02)


@pytest.fixture(scope="session")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its last layers: hardly ever right."""
    return save_model(tmp_path_factory.mktemp("truncated"), num_layers=1)
