"""Llama (Touvron et al. 2023, arXiv:2302.13971), with the grouped queries of Llama 2 and 3, and compatible models."""

from trimtab_modelspec.families import llama

from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.weights.gguf_file import GgufNames

FAMILY = Family.of(
    llama.FAMILY,
    build=build_decoder,
    gguf_names={"llama": GgufNames("LlamaForCausalLM", has_adjacent_pairs=True)},
)
