"""Qwen2 and Qwen2.5 (arXiv:2407.10671): queries, keys and values have biases, the output has none. Qwen2.5-VL's text
half (arXiv:2502.13923) has a rope of three positions per token, which on text are one and the same.
"""

from trimtab_modelspec.families import qwen2

from trimtab_engine.models.family import Family, VisionEncoderFamily, build_decoder
from trimtab_engine.models.qwen2_5_vl_vision import build_vision_encoder, parse_vision, vision_encoder_tensors
from trimtab_engine.weights.gguf_file import GgufNames

FAMILY = Family.of(
    qwen2.FAMILY,
    tower=VisionEncoderFamily(parse_vision, vision_encoder_tensors, build_vision_encoder),
    build=build_decoder,
    gguf_names={"qwen2": GgufNames("Qwen2ForCausalLM")},
)
