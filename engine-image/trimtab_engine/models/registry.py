"""The families that are built. Adding one is a file beside this one, and a line in FAMILIES. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config
from trimtab_modelspec.four_bit_format import FourBits
from trimtab_modelspec.kv_groups import KVGroup, groups_of
from trimtab_modelspec.quantization import stored_format
from trimtab_modelspec.scaled_format import Mxfp4, ScaledFormat

from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import ModelError
from trimtab_engine.models import deepseek, gemma3, gpt_oss, llama, llama4, mistral, qwen2, qwen3, qwen3_moe
from trimtab_engine.models.by_transformers import family as by_transformers
from trimtab_engine.models.by_transformers import seeing
from trimtab_engine.models.family import Family, TowerKind
from trimtab_engine.weights.bare_decoder import BareDecoder, bare_decoder, is_bare, whole_architecture
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.mxfp4 import Mxfp4Source
from trimtab_engine.weights.open import open_source
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import CONFIG_FILE, WeightSource
from trimtab_engine.weights.text_half import (
    Half,
    text_half,
    text_half_of_transformers,
    tower_half,
    tower_half_of_transformers,
)

FAMILIES: tuple[Family, ...] = (
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
UNSAID_POSITIONS = 4096  # of a config.json that calls them otherwise
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
GGUF_NAMES = {kind: names for family in FAMILIES for kind, names in family.gguf_names.items()}


def family_of(architecture: str) -> Family:
    """The family of an architecture: its own, or that of what transformers' code computes."""
    return BY_ARCHITECTURE.get(architecture, by_transformers.FAMILY)


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """What config.json calls the model. Raises ModelError when it says nothing."""
    name = ConfigReader(config, {}, where).architecture
    if name is None:
        raise ModelError(
            f"{where}: no architectures; expected one of {', '.join(BY_ARCHITECTURE)}, or another that transformers has"
        )
    return name


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Read config.json (and generation_config.json, {} when absent). `where` names the file in messages.

    Raises ModelError for what is missing, malformed or not supported.
    """
    architecture = architecture_of(config, where)
    if architecture in seeing.ARCHITECTURES:
        words = seeing.text_words(config, where)
        parsed = parse_model_config(words, generation, where)
        return replace(parsed, has_transformers_vision=True)
    family = family_of(architecture)
    words = language_model_config(config) if architecture in family.multimodal else config
    parsed = family.parse(ConfigReader(words, generation, where))
    _check_is_causal(words, architecture, where)
    return parsed


def _check_is_causal(words: Mapping[str, Any], architecture: str, where: str) -> None:
    """Raise ModelError for a decoder that was made an encoder: some that embed see the tokens behind, too."""
    for name, made in (("is_causal", False), ("use_bidirectional_attention", True)):
        if words.get(name) is made:
            raise ModelError(
                f"{where}: {name} is {str(made).lower()}, so each token of this {architecture} sees those behind it; "
                f"built is attention to what came before"
            )


def tower_of(config: ModelConfig) -> TowerKind | None:
    """What computes the images and videos of this text half; None: nothing."""
    return seeing.TOWER if config.has_transformers_vision else family_of(config.architecture).tower


def parse_vision_config(source: WeightSource, config: ModelConfig) -> VisionConfig | None:
    """The tower of a checkpoint with this text half; None: it has none that is built. Raises ModelError."""
    kind = tower_of(config)
    if kind is None or "vision_config" not in source.config:
        return None
    words = source.config if config.has_transformers_vision else language_model_config(source.config)
    return kind.parse(ConfigReader(words, source.generation_config, source.where), config)


def longest_request(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> int:
    """About how long requests may be, without torch: of what transformers' code computes config.json's own words count.
    Raises ModelError."""
    architecture = architecture_of(config, where)
    if architecture in seeing.ARCHITECTURES:
        return longest_request(seeing.text_words(config, where), generation, where)
    if architecture in BY_ARCHITECTURE:
        return parse_model_config(config, generation, where).max_model_len
    words = ConfigReader(config, generation, where)
    return words.positive("max_position_embeddings", default=words.positive("n_positions", default=UNSAID_POSITIONS))


def kv_groups_of(config: ModelConfig) -> tuple[KVGroup, ...]:
    """What the whole model keeps of each token."""
    return groups_of(family_of(config.architecture).kv(config))


def open_model(model: str, load_format: str = "auto", *, seed: int = 0) -> WeightSource:
    """Open a checkpoint; a GGUF file has its tensors under the names that its family knows, one that sees images those
    of its text half alone, and one without output layer those of a whole model; weights that are stored in parts are
    one tensor. Raises ModelError."""
    source = open_source(model, load_format, seed=seed, gguf_names=GGUF_NAMES)
    if whole_architecture(source.config) in BY_ARCHITECTURE and is_bare(source):
        source = bare_decoder(source)
    architecture = ConfigReader(source.config, {}, source.where).architecture or ""
    if architecture in seeing.ARCHITECTURES and source.format == "safetensors":
        return text_half_of_transformers(source)
    family = BY_ARCHITECTURE.get(architecture)
    if family is None or source.format != "safetensors":
        return source
    whole = text_half(source) if family.multimodal else source
    form = stored_format(source.config, source.where)
    if isinstance(form, FourBits):
        return FourBitsSource(whole, form)
    if isinstance(form, ScaledFormat):
        return ScaledSource(whole, form, whole.stored_module if isinstance(whole, Half) else str)
    return Mxfp4Source(whole, form) if isinstance(form, Mxfp4) else whole


def has_output_layer(source: WeightSource) -> bool:
    """Whether a checkpoint that open_model() has opened gives logits."""
    whole = source.stored if isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source) else source
    return not isinstance(whole, BareDecoder)


def open_tower(model: str, load_format: str = "auto", *, seed: int = 0) -> WeightSource:
    """Open the towers of a checkpoint that sees images. Raises ModelError."""
    source = open_source(model, load_format, seed=seed, gguf_names=GGUF_NAMES)
    if source.format == "gguf":
        raise ModelError(f"{source.where}: a GGUF file holds no tower for images; give a folder with safetensors")
    if source.format != "safetensors":
        return source
    is_whole = architecture_of(source.config, source.where) in seeing.ARCHITECTURES
    return tower_half_of_transformers(source) if is_whole else tower_half(source)


def sees_images(model: str) -> bool | None:
    """Whether images and videos are computed for this checkpoint; None where it cannot be read, which is told when it
    is loaded. A file alone (GGUF) has no tower."""
    if Path(model).is_file():
        return False
    architecture = _architecture_in(model)
    return None if architecture is None else tower_named(architecture) is not None


def sees_on_cuda(model: str) -> bool:
    """Whether CUDA computes images and videos for this checkpoint."""
    architecture = _architecture_in(model)
    kind = None if architecture is None else tower_named(architecture)
    return kind is not None and kind.not_on_cuda is None


def tower_named(architecture: str) -> TowerKind | None:
    """What computes the images and videos of checkpoints that config.json calls so; None: they take text alone."""
    if architecture in seeing.ARCHITECTURES:
        return seeing.TOWER
    family = BY_ARCHITECTURE.get(architecture)
    return family.tower if family is not None and architecture in family.multimodal else None


def _architecture_in(model: str) -> str | None:
    """None where the checkpoint's folder cannot be read."""
    try:
        config = json.loads((Path(model) / CONFIG_FILE).read_text(encoding="utf-8"))
        return architecture_of(config, model)
    except (OSError, ValueError, AttributeError, ModelError):
        return None
