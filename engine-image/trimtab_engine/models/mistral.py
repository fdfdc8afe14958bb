"""Mistral (arXiv:2310.06825): Llama without biases. Layers of version 0.1 see a window, those of later ones see all."""

from trimtab_modelspec.families import mistral

from trimtab_engine.models.family import Family, build_decoder

FAMILY = Family.of(
    mistral.FAMILY,
    build=build_decoder,
)
