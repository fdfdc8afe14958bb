"""Qwen3 (arXiv:2505.09388), dense: each head of queries and keys is normalised before it is rotated."""

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames


def parse(words: ConfigWords) -> ModelConfig:
    """Attention has biases everywhere or, as in all that were published, nowhere."""
    bias = words.flag("attention_bias")
    return words.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True)


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
    gguf_names={"qwen3": GgufNames("Qwen3ForCausalLM")},
)
