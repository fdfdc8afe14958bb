"""Registry of native model families. To add one, add a file to this package and a line in FAMILIES. Needs no torch."""

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
from trimtab_engine.model_files.json_files import CONFIG_FILE
from trimtab_engine.models import deepseek, gemma3, gpt_oss, llama, llama4, mistral, qwen2, qwen3, qwen3_moe
from trimtab_engine.models.by_transformers import family as by_transformers
from trimtab_engine.models.by_transformers import vision as transformers_vision
from trimtab_engine.models.family import Family, VisionEncoderFamily
from trimtab_engine.weights.bare_decoder import BareDecoder, bare_decoder, is_bare, whole_architecture
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.language_model_weights import (
    Half,
    language_model_weights,
    language_model_weights_of_transformers,
    vision_encoder_weights,
    vision_encoder_weights_of_transformers,
)
from trimtab_engine.weights.mxfp4 import Mxfp4Source
from trimtab_engine.weights.open import open_source
from trimtab_engine.weights.output_layer import use_stored_output_layer
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import WeightSource

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
    """Return an architecture's family: its own, or the transformers fallback."""
    return BY_ARCHITECTURE.get(architecture, by_transformers.FAMILY)


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """Return config.json's architecture.

    Raises:
        ModelError: config.json has none.
    """
    name = ConfigReader(config, {}, where).architecture
    if name is None:
        raise ModelError(
            f"{where}: no architectures; expected one of {', '.join(BY_ARCHITECTURE)}, or another that transformers has"
        )
    return name


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Read config.json (and generation_config.json, {} if absent). `where` names the file in messages.

    Raises:
        ModelError: the configuration is incomplete, malformed or not supported.
    """
    architecture = architecture_of(config, where)
    if architecture in transformers_vision.ARCHITECTURES:
        words = transformers_vision.language_model_config(config, where)
        parsed = parse_model_config(words, generation, where)
        return replace(parsed, has_transformers_vision=True)
    family = family_of(architecture)
    words = language_model_config(config) if architecture in family.multimodal else config
    parsed = family.parse(ConfigReader(words, generation, where))
    _check_is_causal(words, architecture, where)
    return parsed


def _check_is_causal(words: Mapping[str, Any], architecture: str, where: str) -> None:
    """Raise ModelError for a decoder that was converted to an encoder: some embedding models use bidirectional
    attention.
    """
    for name, made in (("is_causal", False), ("use_bidirectional_attention", True)):
        if words.get(name) is made:
            raise ModelError(
                f"{where}: {name} is {str(made).lower()}, so this {architecture} uses bidirectional attention; "
                f"only causal attention is supported"
            )


def vision_encoder_of(config: ModelConfig) -> VisionEncoderFamily | None:
    """Return the vision encoder of this language model's checkpoints, or None if they take text only."""
    return transformers_vision.TOWER if config.has_transformers_vision else family_of(config.architecture).tower


def parse_vision_config(source: WeightSource, config: ModelConfig) -> VisionConfig | None:
    """Return the vision encoder of a checkpoint with this language model, or None if it has none that is supported.

    Raises:
        ModelError: its configuration is invalid.
    """
    kind = vision_encoder_of(config)
    if kind is None or "vision_config" not in source.config:
        return None
    words = source.config if config.has_transformers_vision else language_model_config(source.config)
    return kind.parse(ConfigReader(words, source.generation_config, source.where), config)


def longest_request(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> int:
    """Return the approximate maximum request length without torch: for models run by transformers' code, config.json's
    own fields count.

    Raises:
        ModelError: the configuration is invalid.
    """
    architecture = architecture_of(config, where)
    if architecture in transformers_vision.ARCHITECTURES:
        return longest_request(transformers_vision.language_model_config(config, where), generation, where)
    if architecture in BY_ARCHITECTURE:
        return parse_model_config(config, generation, where).max_model_len
    words = ConfigReader(config, generation, where)
    return words.positive("max_position_embeddings", default=words.positive("n_positions", default=UNSAID_POSITIONS))


def kv_groups_of(config: ModelConfig) -> tuple[KVGroup, ...]:
    """Return the KV cache layout of the whole model."""
    return groups_of(family_of(config.architecture).kv(config))


def open_model(model: str, load_format: str = "auto", *, seed: int = 0) -> WeightSource:
    """Open a checkpoint and normalise its tensor names: a GGUF file uses the names of its family, a vision-language
    checkpoint shows its language model only, a checkpoint without an output layer looks like a whole model, and a
    weight stored in several parts is one tensor. A stored output layer has priority over tie_word_embeddings.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    source = open_source(model, load_format, seed=seed, gguf_names=GGUF_NAMES)
    use_stored_output_layer(source)
    if whole_architecture(source.config) in BY_ARCHITECTURE and is_bare(source):
        source = bare_decoder(source)
    architecture = ConfigReader(source.config, {}, source.where).architecture or ""
    if architecture in transformers_vision.ARCHITECTURES and source.format == "safetensors":
        return language_model_weights_of_transformers(source)
    family = BY_ARCHITECTURE.get(architecture)
    if family is None or source.format != "safetensors":
        return source
    whole = language_model_weights(source) if family.multimodal else source
    form = stored_format(source.config, source.where)
    if isinstance(form, FourBits):
        return FourBitsSource(whole, form)
    if isinstance(form, ScaledFormat):
        return ScaledSource(whole, form, whole.stored_module if isinstance(whole, Half) else str)
    return Mxfp4Source(whole, form) if isinstance(form, Mxfp4) else whole


def has_output_layer(source: WeightSource) -> bool:
    """Return True if a checkpoint opened by open_model() produces logits."""
    whole = source.stored if isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source) else source
    return not isinstance(whole, BareDecoder)


def open_vision_encoder(model: str, load_format: str = "auto", *, seed: int = 0) -> WeightSource:
    """Open the vision encoders of a checkpoint that sees images. Raises ModelError."""
    source = open_source(model, load_format, seed=seed, gguf_names=GGUF_NAMES)
    if source.format == "gguf":
        raise ModelError(f"{source.where}: a GGUF file has no vision encoder; give a folder with safetensors")
    if source.format != "safetensors":
        return source
    is_whole = architecture_of(source.config, source.where) in transformers_vision.ARCHITECTURES
    return vision_encoder_weights_of_transformers(source) if is_whole else vision_encoder_weights(source)


def takes_images(model: str) -> bool | None:
    """Return True if images and videos are computed for this checkpoint, or None if it cannot be read (loading reports
    the error). A single file (GGUF) has no vision encoder.
    """
    if Path(model).is_file():
        return False
    architecture = _architecture_in(model)
    return None if architecture is None else vision_encoder_for(architecture) is not None


def takes_images_on_cuda(model: str) -> bool:
    """Return True if CUDA computes images and videos for this checkpoint."""
    architecture = _architecture_in(model)
    kind = None if architecture is None else vision_encoder_for(architecture)
    return kind is not None and kind.not_on_cuda is None


def vision_encoder_for(architecture: str) -> VisionEncoderFamily | None:
    """Return the vision encoder for checkpoints of this architecture, or None if they take text only."""
    if architecture in transformers_vision.ARCHITECTURES:
        return transformers_vision.TOWER
    family = BY_ARCHITECTURE.get(architecture)
    return family.tower if family is not None and architecture in family.multimodal else None


def _architecture_in(model: str) -> str | None:
    """None where the checkpoint's folder cannot be read."""
    try:
        config = json.loads((Path(model) / CONFIG_FILE).read_text(encoding="utf-8"))
        return architecture_of(config, model)
    except (OSError, ValueError, AttributeError, RecursionError, ModelError):
        return None
