"""All model families, by the names of their architectures in config.json."""

from collections.abc import Mapping
from typing import Any

from trimtab_modelspec.families import (
    deepseek,
    gemma3,
    gpt_oss,
    llama,
    llama4,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from trimtab_modelspec.families.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma3.FAMILY,
    gpt_oss.FAMILY,
    llama4.FAMILY,
    deepseek.FAMILY,
)
"""Families that the engine computes with its own code."""
PLANNED_FAMILIES: tuple[ModelFamily, ...] = (mixtral.FAMILY,)
"""Families that can be planned from config.json; the engine runs them through transformers, on the CPU only."""
BY_ARCHITECTURE: Mapping[str, ModelFamily] = {name: family for family in FAMILIES for name in family.architectures}
PLANNED_BY_ARCHITECTURE: Mapping[str, ModelFamily] = {
    name: family for family in PLANNED_FAMILIES for name in family.architectures
}


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json's values for the language model, of a checkpoint that nests them in `text_config`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    # Weight tying is stated for the whole model and overrides what text_config repeats.
    ties = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**config, **text, **ties, "architectures": config.get("architectures")}
