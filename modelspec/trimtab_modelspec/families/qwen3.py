"""Qwen3 (arXiv:2505.09388), dense: each head of queries and keys is normalised before it is rotated."""

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors


def parse(words: ConfigReader) -> ModelConfig:
    """Parse the configuration. Attention has biases in all projections or, as in all published models, in none."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True)


FAMILY = ModelFamily(
    architectures=("Qwen3ForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    kv=decoder_kv,
)
