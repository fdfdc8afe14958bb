"""gpt-oss (OpenAI 2025, arXiv:2508.10925): every other layer sees a window, each head has a sink, and every layer is a
mixture whose experts have biases and a gate that is cut off. Their weights lie in one tensor per layer.
"""

from trimtab_modelspec.families import gpt_oss

from trimtab_engine.models.family import Family, build_decoder

FAMILY = Family.of(
    gpt_oss.FAMILY,
    build=build_decoder,
)
