"""Llama (Touvron et al. 2023, arXiv:2302.13971), with grouped queries of Llama 2 and 3, and similar models."""

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors


def parse(words: ConfigReader) -> ModelConfig:
    """Parse the configuration. Attention has biases in all projections or in none; so does the MLP."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, mlp_bias=words.flag("mlp_bias"))


FAMILY = ModelFamily(
    architectures=("LlamaForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    kv=decoder_kv,
)
