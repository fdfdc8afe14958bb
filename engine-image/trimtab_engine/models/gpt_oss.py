"""gpt-oss (OpenAI 2025, arXiv:2508.10925): every other layer has a sliding window, each head has a sink, and every
layer is an MoE whose experts have biases and a clamped gate. The experts' weights are stored in one tensor per layer.
"""

from trimtab_modelspec.families import gpt_oss

from trimtab_engine.models.family import Family, build_decoder

FAMILY = Family.of(
    gpt_oss.FAMILY,
    build=build_decoder,
)
