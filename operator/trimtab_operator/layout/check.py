"""Whether a layout can work: every number that is wrong is named, before any pod exists.

The webhook, the loop and `trimtab plan` ask here. A refusal says the field, its value, what it may be, and the nearest
layouts that work, with the KV cache and the concurrency that they would have.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import GIB, Gpu
from trimtab_operator.layout.memory_fit import Envelope, MemoryFit, memory_fit, tower_bytes
from trimtab_operator.layout.nearest import Offer, nearest_layouts
from trimtab_operator.layout.rules import Problem, facts_problems, spec_problems
from trimtab_operator.layout.stored_weights import unsupported_reason
from trimtab_operator.resource.spec import Parallelism, Spec
from trimtab_operator.resource.validation_error import ValidationError


def check_layout(spec: Spec, facts: ModelFacts | None, gpu: Gpu | None = None) -> tuple[ValidationError, ...]:
    """Everything that is wrong with `spec.parallelism`; empty when it can work.

    Without facts only what the spec alone can say is checked; without a GPU (or on the CPU) nothing about memory.
    """
    parallelism = spec.parallelism
    if facts is None:
        return tuple(ValidationError(problem.field, str(problem)) for problem in spec_problems(parallelism))
    if not facts.is_run_on(spec.runtime.device) and spec.runtime.kind == "trimtab":
        return (_not_run(facts),)
    on_gpu = gpu if spec.runtime.device == "cuda" else None
    envelope = Envelope.of_spec(spec, facts, on_gpu) if on_gpu is not None else None
    cannot_be = [*_longer_than_positions(spec, facts), *_no_such_arithmetic(spec, on_gpu)]
    if cannot_be:
        return tuple(cannot_be)  # memory for it would mean nothing
    problems = layout_problems(parallelism, facts, on_gpu, envelope)
    if not problems:
        return ()
    offers = nearest_layouts(parallelism, facts, on_gpu, envelope)
    *first, last = problems
    return (
        *(ValidationError(problem.field, str(problem)) for problem in first),
        ValidationError(last.field, f"{last}. {_offered(offers, on_gpu)}"),
    )


def layout_problems(
    parallelism: Parallelism, facts: ModelFacts, gpu: Gpu | None = None, envelope: Envelope | None = None
) -> tuple[Problem, ...]:
    """What is wrong by rule, else by memory: where the rules refuse a layout its memory means nothing."""
    by_rule = spec_problems(parallelism) + facts_problems(parallelism, facts)
    if by_rule or gpu is None or envelope is None:
        return by_rule
    fit = memory_fit(facts, parallelism, gpu, envelope)
    return () if fit.fits else (_does_not_fit(parallelism, facts, fit, gpu, envelope),)


def longer_than_positions(asked: int | None, facts: ModelFacts) -> str | None:
    """What is wrong with so many tokens; None: nothing."""
    most = facts.max_model_len
    return None if asked is None or asked <= most else f"is {asked}, but the model's positions allow 1 to {most}"


def no_such_arithmetic(kv_cache_dtype: str | None, gpu: Gpu) -> str | None:
    """The engine refuses fp8_e4m3 (which fp8 means) on GPUs without it; fp8_e5m2 is converted on any."""
    if kv_cache_dtype not in ("fp8", "fp8_e4m3") or gpu.fp8_flops is not None:
        return None
    return f"is {kv_cache_dtype}, which {gpu.name} does not have; use fp8_e5m2 or auto"


def _not_run(facts: ModelFacts) -> ValidationError:
    message = f"is {unsupported_reason(facts)}, which the engine does not run; `trimtab plan` can still plan for it"
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
    """The tightest rank's sum, against what the utilisation leaves it; and what else than a layout would help."""
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
        f"({gpu.name}) gpuMemoryUtilization {envelope.gpu_memory_utilization} gives it {_gib(given)}"
    )
    remedies = [f"set more {'tensor, pipeline or data' if facts.is_mixture else 'tensor or pipeline'} ranks"]
    if of_tower:
        remedies.append("serve text alone with limitMmPerPrompt {image: 0, video: 0}")
    if fit.longest_model_len:
        remedies.append(f"set maxModelLen to {fit.longest_model_len} or less")
    if fit.min_utilization is not None:
        remedies.append(f"raise gpuMemoryUtilization to {fit.min_utilization}")
    degrees = f"tensor {parallelism.tensor} × pipeline {parallelism.pipeline}"
    degrees += f" × data {parallelism.data}" if facts.is_mixture else ""  # of a dense model data divides nothing
    return Problem("spec.parallelism", degrees, ", or ".join(remedies), reason)


def _offered(offers: tuple[Offer, ...], gpu: Gpu | None) -> str:
    if offers:
        return f"The nearest layouts that work: {'; '.join(map(str, offers))}"
    if gpu is None:
        return "No layout of this model works"
    return f"On {gpu.name} GPUs no layout works with this gpuMemoryUtilization and maxModelLen"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
