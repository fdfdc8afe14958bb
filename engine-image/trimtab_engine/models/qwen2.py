"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none. Qwen2.5-VL's text
half (arXiv:2502.13923) has a rope of three positions per token, which on text are one and the same.
"""

from trimtab_modelspec.families import qwen2

from trimtab_engine.models.family import Family, TowerKind, build_decoder
from trimtab_engine.models.qwen2_5_vl_facts import build_tower, parse_vision, tower_tensors
from trimtab_engine.weights.gguf_file import GgufNames

FAMILY = Family.of(
    qwen2.FAMILY,
    tower=TowerKind(parse_vision, tower_tensors, build_tower),
    build=build_decoder,
    gguf_names={"qwen2": GgufNames("Qwen2ForCausalLM")},
)
