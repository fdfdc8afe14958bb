"""Mistral (arXiv:2310.06825): Llama without biases. Layers of version 0.1 have a sliding window, later ones full
attention.
"""

from trimtab_modelspec.families import mistral

from trimtab_engine.models.family import Family, build_decoder

FAMILY = Family.of(
    mistral.FAMILY,
    build=build_decoder,
)
