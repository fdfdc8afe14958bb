"""Llama (Touvron et al. 2023, arXiv:2302.13971), with the grouped queries of Llama 2 and 3, and what is like it."""

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames


def parse(words: ConfigWords) -> ModelConfig:
    """Attention has biases everywhere or nowhere; so has the MLP."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, mlp_bias=words.flag("mlp_bias"))


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={"llama": GgufNames("LlamaForCausalLM", has_adjacent_pairs=True)},
)
