"""How a model's weights lie in a GPU's memory: as the checkpoint stores them, quantised as they load, or widened.

The engine's rules (docs/guides/quantization.md): fp8 in blocks of 128 × 128 for the layers' projections, on GPUs
that multiply
float8. On others the weights are turned back into the model's dtype as they load, and so is on any what is stored in
integers, with scales per tensor, channel or group, or in mxfp4.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.quantization import BLOCK as FP8_BLOCK
from trimtab_modelspec.quantization import FOUR_BIT_METHODS as INTEGER_METHODS

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu

FP8_BYTES = 1 + 4 / FP8_BLOCK**2  # of a parameter: float8 and its share of a float32 scale
UNQUANTISED_ALONE = ("GptOssForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration")
"""Whose experts lie in one tensor, of which the engine reads no quantised form, but gpt-oss's mxfp4, and makes none."""
PROJECTIONS = ("attention", "kv_projection", "dense_mlp", "experts", "shared_experts")


def as_run(facts: ModelFacts, gpu: Gpu, asked: str | None = None) -> ModelFacts:
    """The facts with the weights as this GPU holds them. `asked`: spec.engine.quantization.

    What the engine does not run stays as it is stored: another engine may do otherwise.
    """
    multiplies_fp8 = gpu.fp8_flops is not None
    if facts.weights_at_dtype is not None and facts.is_run_on("cuda"):
        facts = replace(facts, quantization=None, weights=facts.weights_at_dtype, weights_at_dtype=None)
    if facts.quantization in INTEGER_METHODS and facts.is_run_on("cuda"):
        facts = _at_dtype(facts)
    if facts.quantization is None and asked == "fp8" and multiplies_fp8:
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
    """With projections that take what is left of all parameters at `dtype`."""
    projections = sum(getattr(facts.weights, part) for part in PROJECTIONS)
    others = facts.weights_bytes - projections
    return _with_projections(facts, (facts.num_parameters * DTYPE_BYTES[facts.dtype] - others) / projections, None)


def _with_projections(facts: ModelFacts, factor: float, quantization: str | None) -> ModelFacts:
    has_plain_experts = facts.architecture in UNQUANTISED_ALONE
    parts = [part for part in PROJECTIONS if part != "experts" or not has_plain_experts]
    sizes = {part: round(getattr(facts.weights, part) * factor) for part in parts}
    return replace(facts, quantization=quantization, weights=replace(facts.weights, **sizes))
