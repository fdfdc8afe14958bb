"""Qwen3 (arXiv:2505.09388), dense: each head of queries and keys is normalised before it is rotated."""

from trimtab_modelspec.families import qwen3

from trimtab_engine.models.family import Family, build_decoder
from trimtab_engine.weights.gguf_file import GgufNames

FAMILY = Family.of(
    qwen3.FAMILY,
    build=build_decoder,
    gguf_names={"qwen3": GgufNames("Qwen3ForCausalLM")},
)
