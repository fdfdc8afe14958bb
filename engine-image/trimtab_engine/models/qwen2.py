"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none. Qwen2.5-VL's text
half (arXiv:2502.13923) has a rope of three positions per token, which on text are one and the same.
"""

from collections.abc import Mapping
from typing import Any

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames

VISION = "Qwen2_5_VLForConditionalGeneration"
UNSAID = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}
"""What config.json of VISION leaves out where it is this, as transformers reads it."""
SEVERAL_POSITIONS = "mrope"  # a rope type


def parse(words: ConfigWords) -> ModelConfig:
    """config.json does not say that there are biases."""
    if words.architecture == VISION:
        config = UNSAID | dict(words.config)
        for key in ("rope_scaling", "rope_parameters"):
            config[key] = _of_one_position(config.get(key) or {})
        words = ConfigWords(config, words.generation, words.where)
    return words.decoder(qkv_bias=True)


def _of_one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope of tokens whose positions are all the same."""
    return {key: "default" if value == SEVERAL_POSITIONS else value for key, value in rope.items()}


FAMILY = Family(
    architectures=("Qwen2ForCausalLM", VISION),
    multimodal=(VISION,),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={"qwen2": GgufNames("Qwen2ForCausalLM")},
)
