"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none."""

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames


def parse(words: ConfigWords) -> ModelConfig:
    """config.json does not say that there are biases."""
    return words.decoder(qkv_bias=True)


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={"qwen2": GgufNames("Qwen2ForCausalLM")},
)
