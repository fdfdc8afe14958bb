"""Mistral (arXiv:2310.06825): Llama without biases. Layers of version 0.1 see a window, those of later ones see all."""

from dataclasses import replace

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.models.decoder_kv import decoder_kv
from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.models.tensors import decoder_tensors

UNSAID_WINDOW = 4096  # of a config.json that does not say sliding_window, as transformers reads it


def parse(words: ConfigWords) -> ModelConfig:
    """A window that no request can leave is none."""
    config = words.decoder()
    window = words.window(default=UNSAID_WINDOW)
    if window is None or window >= config.max_model_len:
        return config
    return replace(config, windows=(window,) * words.num_layers())


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
)
