"""Format of a model's weights in GPU memory: as stored, quantised when loading, or dequantised.

The rules are the engine's (docs/guides/quantization.md): fp8 in blocks of 128 × 128 for the layers' projections, on
GPUs with fp8 arithmetic. Other GPUs dequantise to the model's dtype when loading. All GPUs dequantise integer weights,
weights with scales per tensor, channel or group, and mxfp4.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.quantization import BLOCK as FP8_BLOCK
from trimtab_modelspec.quantization import FOUR_BIT_METHODS as INTEGER_METHODS

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu

FP8_BYTES = 1 + 4 / FP8_BLOCK**2  # of a parameter: float8 and its share of a float32 scale
UNQUANTISED_EXPERTS = ("GptOssForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration")
"""Architectures whose experts are one tensor, which the engine does not quantise. It reads only gpt-oss's mxfp4."""
PROJECTIONS = ("attention", "kv_projection", "dense_mlp", "experts", "shared_experts")


def as_loaded(facts: ModelFacts, gpu: Gpu, requested: str | None = None) -> ModelFacts:
    """Return the facts with the weights in this GPU's memory format. `requested` is spec.engine.quantization.

    Weights of unsupported models stay as stored, because another engine may load them differently.
    """
    multiplies_fp8 = gpu.fp8_flops is not None
    if facts.weights_at_dtype is not None and facts.is_run_on("cuda"):
        facts = replace(facts, quantization=None, weights=facts.weights_at_dtype, weights_at_dtype=None)
    if facts.quantization in INTEGER_METHODS and facts.is_run_on("cuda"):
        facts = _at_dtype(facts)
    if facts.quantization is None and requested == "fp8" and multiplies_fp8:
        return _with_projections(facts, FP8_BYTES / DTYPE_BYTES[facts.dtype], "fp8")
    if facts.quantization == "fp8" and not multiplies_fp8 and facts.is_run_on("cuda"):
        return _with_projections(facts, DTYPE_BYTES[facts.dtype] / FP8_BYTES, None)
    return facts


def unsupported_reason(facts: ModelFacts) -> str:
    """Return why the engine does not run the model, or does not run it on GPUs."""
    if facts.supported:
        return f"{facts.architecture} on GPUs (with runtime.device cpu it is supported)"
    return f"{facts.architecture} ({facts.refusal})" if facts.refusal else facts.architecture


def _at_dtype(facts: ModelFacts) -> ModelFacts:
    """Return the facts with projections sized as the remaining parameters at `dtype`."""
    projections = sum(getattr(facts.weights, part) for part in PROJECTIONS)
    others = facts.weights_bytes - projections
    return _with_projections(facts, (facts.num_parameters * DTYPE_BYTES[facts.dtype] - others) / projections, None)


def _with_projections(facts: ModelFacts, factor: float, quantization: str | None) -> ModelFacts:
    has_plain_experts = facts.architecture in UNQUANTISED_EXPERTS
    parts = [part for part in PROJECTIONS if part != "experts" or not has_plain_experts]
    sizes = {part: round(getattr(facts.weights, part) * factor) for part in parts}
    return replace(facts, quantization=quantization, weights=replace(facts.weights, **sizes))
