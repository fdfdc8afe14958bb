"""Mistral (arXiv:2310.06825): Llama without biases. Version 0.1 has windowed layers, later versions full attention."""

from dataclasses import replace

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors

DEFAULT_WINDOW = 4096  # default of sliding_window, as in transformers


def parse(words: ConfigReader) -> ModelConfig:
    """Return a window that no request can leave is none."""
    config = words.decoder()
    window = words.window(default=DEFAULT_WINDOW)
    if window is None or window >= config.max_model_len:
        return config
    return replace(config, windows=(window,) * words.num_layers())


FAMILY = ModelFamily(
    architectures=("MistralForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    kv=decoder_kv,
)
