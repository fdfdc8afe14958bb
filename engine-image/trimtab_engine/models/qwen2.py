"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none. Qwen2.5-VL's text
half (arXiv:2502.13923) has a rope of three positions per token, which on text are one and the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, TowerKind, build_decoder
from trimtab_engine.models.qwen2_5_vl_facts import build_tower, parse_vision, tower_tensors
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames

VISION = "Qwen2_5_VLForConditionalGeneration"
UNSAID = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}
"""What config.json of VISION leaves out where it is this, as transformers reads it."""
SEVERAL_POSITIONS = "mrope"  # a rope type
SECTIONS = "mrope_section"


def parse(words: ConfigWords) -> ModelConfig:
    """config.json does not say that there are biases."""
    if words.architecture != VISION:
        return words.decoder(qkv_bias=True)
    config = UNSAID | dict(words.config)
    sections: tuple[int, ...] = ()
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key) or {}
        sections = tuple(ConfigWords(said, {}, f"{words.where}: {key}").listed(SECTIONS)) or sections
        config[key] = _of_one_position(said)
    parsed = ConfigWords(config, words.generation, words.where).decoder(qkv_bias=True)
    return replace(parsed, rope=replace(parsed.rope, sections=sections))


def _of_one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope of tokens whose positions are all the same."""
    return {key: "default" if value == SEVERAL_POSITIONS else value for key, value in rope.items()}


FAMILY = Family(
    architectures=("Qwen2ForCausalLM", VISION),
    multimodal=(VISION,),
    tower=TowerKind(parse_vision, tower_tensors, build_tower),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={"qwen2": GgufNames("Qwen2ForCausalLM")},
)
