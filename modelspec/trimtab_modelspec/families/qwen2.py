"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none. Qwen2.5-VL's text
half (arXiv:2502.13923) has a rope of three positions per token, which on text are one and the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors

VISION = "Qwen2_5_VLForConditionalGeneration"
DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}
"""Values of keys missing in a VISION config.json, as in transformers."""
SEVERAL_POSITIONS = "mrope"  # a rope type
SECTIONS = "mrope_section"


def parse(words: ConfigReader) -> ModelConfig:
    """Parse the configuration. The biases are not in config.json."""
    if words.architecture != VISION:
        return words.decoder(qkv_bias=True)
    config = DEFAULTS | dict(words.config)
    sections: tuple[int, ...] = ()
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key) or {}
        sections = tuple(ConfigReader(said, {}, f"{words.where}: {key}").listed(SECTIONS)) or sections
        config[key] = _of_one_position(said)
    parsed = ConfigReader(config, words.generation, words.where).decoder(qkv_bias=True)
    return replace(parsed, rope=replace(parsed.rope, sections=sections))


def _of_one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE for tokens with equal positions on all axes."""
    return {key: "default" if value == SEVERAL_POSITIONS else value for key, value in rope.items()}


FAMILY = ModelFamily(
    architectures=("Qwen2ForCausalLM", VISION),
    multimodal=(VISION,),
    parse=parse,
    tensors=decoder_tensors,
    kv=decoder_kv,
)
