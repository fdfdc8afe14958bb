"""Validation of layouts before any pod exists. Every invalid number is reported.

Used by the webhook, the reconciler and `trimtab plan`. A validation error contains the field, its value, the valid
values, and the nearest valid layouts with their KV cache and concurrency.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import GIB, Gpu
from trimtab_operator.layout.memory_fit import Envelope, MemoryFit, memory_fit, tower_bytes
from trimtab_operator.layout.nearest import SuggestedLayout, nearest_layouts
from trimtab_operator.layout.rules import Problem, facts_problems, spec_problems
from trimtab_operator.layout.stored_weights import unsupported_reason
from trimtab_operator.resource.spec import Parallelism, Spec
from trimtab_operator.resource.validation_error import ValidationError


def check_layout(spec: Spec, facts: ModelFacts | None, gpu: Gpu | None = None) -> tuple[ValidationError, ...]:
    """Return all errors of `spec.parallelism`; empty if the layout is valid.

    Without facts, only rules on the spec are checked. Without a GPU, or on the CPU, memory is not checked.
    """
    parallelism = spec.parallelism
    if facts is None:
        return tuple(ValidationError(problem.field, str(problem)) for problem in spec_problems(parallelism))
    if not facts.is_run_on(spec.runtime.device) and spec.runtime.kind == "trimtab":
        return (_not_run(facts),)
    on_gpu = gpu if spec.runtime.device == "cuda" else None
    envelope = Envelope.of_spec(spec, facts, on_gpu) if on_gpu is not None else None
    errors = [*_longer_than_positions(spec, facts), *_no_such_arithmetic(spec, on_gpu)]
    if errors:
        return tuple(errors)  # the memory of an invalid configuration is meaningless
    problems = layout_problems(parallelism, facts, on_gpu, envelope)
    if not problems:
        return ()
    offers = nearest_layouts(parallelism, facts, on_gpu, envelope)
    *first, last = problems
    return (
        *(ValidationError(problem.field, str(problem)) for problem in first),
        ValidationError(last.field, f"{last}. {_describe_suggestions(offers, on_gpu)}"),
    )


def layout_problems(
    parallelism: Parallelism, facts: ModelFacts, gpu: Gpu | None = None, envelope: Envelope | None = None
) -> tuple[Problem, ...]:
    """Return the violated rules; if there are none, the lack of memory."""
    by_rule = spec_problems(parallelism) + facts_problems(parallelism, facts)
    if by_rule or gpu is None or envelope is None:
        return by_rule
    fit = memory_fit(facts, parallelism, gpu, envelope)
    return () if fit.fits else (_does_not_fit(parallelism, facts, fit, gpu, envelope),)


def longer_than_positions(requested: int | None, facts: ModelFacts) -> str | None:
    """Return the error message for a length above the model's positions, None if it is valid."""
    most = facts.max_model_len
    if requested is None or requested <= most:
        return None
    return f"is {requested}, but the model's positions allow 1 to {most}; use at most {most}"


def no_such_arithmetic(kv_cache_dtype: str | None, gpu: Gpu) -> str | None:
    """Return the error message for fp8_e4m3 (alias fp8) on a GPU without fp8, None if the dtype is supported.

    fp8_e5m2 is converted in software on every GPU.
    """
    if kv_cache_dtype not in ("fp8", "fp8_e4m3") or gpu.fp8_flops is not None:
        return None
    return f"is {kv_cache_dtype}, which {gpu.name} does not support; use fp8_e5m2 or auto"


def _not_run(facts: ModelFacts) -> ValidationError:
    message = f"is {unsupported_reason(facts)}, which the engine does not support; `trimtab plan` can still plan for it"
    return ValidationError("spec.model.uri", message)


def _longer_than_positions(spec: Spec, facts: ModelFacts) -> Iterator[ValidationError]:
    message = longer_than_positions(spec.engine.max_model_len, facts)
    if message is not None:
        yield ValidationError("spec.engine.maxModelLen", message)


def _no_such_arithmetic(spec: Spec, gpu: Gpu | None) -> Iterator[ValidationError]:
    message = None if gpu is None else no_such_arithmetic(spec.engine.kv_cache_dtype, gpu)
    if message is not None:
        yield ValidationError("spec.engine.kvCacheDtype", message)


def _does_not_fit(parallelism: Parallelism, facts: ModelFacts, fit: MemoryFit, gpu: Gpu, envelope: Envelope) -> Problem:
    """Return the problem of the rank with the least free memory, with remedies other than another layout."""
    rank = fit.tightest
    shape, given = rank.formula, rank.formula.requested_bytes
    rest = shape.fixed_bytes - shape.weights_bytes
    where = "" if parallelism.pipeline == 1 else f" of stage {rank.stage.index}"
    of_tower = tower_bytes(facts, rank.stage, envelope)
    seeing = f" ({_gib(of_tower)} of them for images and videos)" if of_tower else ""
    reason = (
        f"but a rank{where} needs {_gib(rank.needed_bytes)}: {_gib(shape.weights_bytes)} of weights{seeing}, "
        f"{_gib(rank.one_request_bytes)} of KV cache for one request of {envelope.max_model_len} tokens, about "
        f"{_gib(rest)} of activations, graphs and others; of the GPU's {_gib(gpu.memory_bytes)} "
        f"({gpu.name}), gpuMemoryUtilization {envelope.gpu_memory_utilization} allows {_gib(given)}"
    )
    remedies = [f"set more {'tensor, pipeline or data' if facts.is_moe else 'tensor or pipeline'} ranks"]
    if of_tower:
        remedies.append("serve text only with limitMmPerPrompt {image: 0, video: 0}")
    if fit.longest_model_len:
        remedies.append(f"set maxModelLen to {fit.longest_model_len} or less")
    if fit.min_utilization is not None:
        remedies.append(f"raise gpuMemoryUtilization to {fit.min_utilization}")
    degrees = f"tensor {parallelism.tensor} × pipeline {parallelism.pipeline}"
    degrees += (
        f" × data {parallelism.data}" if facts.is_moe else ""
    )  # data parallelism divides nothing in a dense model
    return Problem("spec.parallelism", degrees, ", or ".join(remedies), reason)


def _describe_suggestions(offers: tuple[SuggestedLayout, ...], gpu: Gpu | None) -> str:
    if offers:
        return f"The nearest layouts that work: {'; '.join(map(str, offers))}"
    if gpu is None:
        return "No layout of this model works"
    return f"On {gpu.name} GPUs no layout works with this gpuMemoryUtilization and maxModelLen"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
