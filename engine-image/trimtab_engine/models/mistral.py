"""Mistral (arXiv:2310.06825) from its version 0.2 on, which sees all tokens: Llama without biases."""

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.model_words import ConfigWords
from trimtab_engine.errors import ModelError
from trimtab_engine.models.family import Family, build_decoder, decoder_kv
from trimtab_engine.models.tensors import decoder_tensors

UNSAID_WINDOW = 4096  # of a config.json that does not say sliding_window, as transformers reads it


def parse(words: ConfigWords) -> ModelConfig:
    """A window that is shorter than the longest request is refused: every layer sees all tokens."""
    config = words.decoder()
    window = words.config.get("sliding_window", UNSAID_WINDOW)
    if window is not None and window < config.max_model_len:
        raise ModelError(
            f"{words.where}: sliding_window {window} is not built for {config.architecture}: every layer sees all "
            f"tokens; version 0.2 and later, which have null here, can be served"
        )
    return config


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    parse=parse,
    tensors=decoder_tensors,
    build=build_decoder,
    kv=decoder_kv,
)
