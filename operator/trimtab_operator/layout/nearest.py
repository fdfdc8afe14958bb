"""Valid layouts nearest to an invalid one, with their KV cache and concurrency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.memory_fit import Envelope, MemoryFit, memory_fit
from trimtab_operator.layout.pods import gpus_of_a_pod
from trimtab_operator.layout.rules import facts_problems, spec_problems
from trimtab_operator.layout.stages import min_weights_bytes
from trimtab_operator.layout.stored_weights import as_loaded
from trimtab_operator.resource.spec import Parallelism

MAX_TENSOR = 64  # an all-reduce over two racks of GPUs is never a useful alternative
MAX_PIPELINE = 32
MAX_SUGGESTIONS = 3
USUAL_GPUS_PER_NODE = 8
MAX_GPUS_PER_NODE = 64  # the maximum of the CRD


@dataclass(frozen=True, slots=True)
class SuggestedLayout:
    """A valid layout. `fit` is None if the GPU is unknown."""

    parallelism: Parallelism
    fit: MemoryFit | None

    def __str__(self) -> str:
        p = self.parallelism
        degrees = f"tensor {p.tensor} × pipeline {p.pipeline}" + (f" × data {p.data}" if p.data > 1 else "")
        degrees += " with expert" if p.expert else ""
        degrees += f", gpusPerNode {p.gpus_per_node}" if p.gpus_per_node is not None else ""
        if self.fit is None:
            return degrees
        tokens, concurrency = self.fit.kv_tokens, self.fit.max_concurrency
        return f"{degrees} ({tokens} tokens of KV cache, {concurrency:.1f} requests of maxModelLen)"


def works(
    parallelism: Parallelism, facts: ModelFacts, gpu: Gpu | None, envelope: Envelope | None
) -> SuggestedLayout | None:
    """Return the layout as an offer, None if it violates a rule or does not fit in memory."""
    if spec_problems(parallelism) or facts_problems(parallelism, facts):
        return None
    if gpu is None or envelope is None:
        return SuggestedLayout(parallelism, None)
    if min_weights_bytes(as_loaded(facts, gpu, envelope.quantization), parallelism) > gpu.memory_bytes:
        return None  # fast path for the common case, without computing every stage
    fit = memory_fit(facts, parallelism, gpu, envelope)
    return SuggestedLayout(parallelism, fit) if fit.fits else None


def nearest_layouts(
    requested: Parallelism, facts: ModelFacts, gpu: Gpu | None = None, envelope: Envelope | None = None
) -> tuple[SuggestedLayout, ...]:
    """Return up to three valid layouts, the nearest first, by the distance of GPU count and degrees.

    Expert parallelism is kept if the model has experts and there is more than one rank. Data parallelism is kept too,
    but may be lowered for engines that share experts. The pod size is kept if the ranks fill the pods.
    """
    found: list[SuggestedLayout] = []
    for candidate in sorted(_candidates(requested, facts), key=lambda p: _distance(requested, p)):
        offer = works(candidate, facts, gpu, envelope)
        if offer is not None:
            found.append(offer)
        if len(found) == MAX_SUGGESTIONS:
            break
    return tuple(found)


def _candidates(requested: Parallelism, facts: ModelFacts) -> Iterator[Parallelism]:
    halves = {requested.data, requested.data // 2, requested.data // 4, 1} - {0} if facts.is_moe else {requested.data}
    for tensor in range(1, min(MAX_TENSOR, facts.num_attention_heads) + 1):
        if facts.num_attention_heads % tensor:
            continue
        for pipeline in range(1, min(MAX_PIPELINE, facts.num_layers) + 1):
            for data in sorted(halves):
                expert = requested.expert and facts.is_moe and tensor * data > 1
                per_pod = _per_pod(requested, tensor, pipeline, data)
                yield Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert, gpus_per_node=per_pod)


def _per_pod(requested: Parallelism, tensor: int, pipeline: int, data: int) -> int | None:
    """Return gpusPerNode of a candidate: the requested value if the pods are full, else the largest smaller value.

    If none was requested, no pod gets more GPUs than nodes usually have.
    """
    most = requested.gpus_per_node
    if most is None:
        most = min(max(USUAL_GPUS_PER_NODE, requested.tensor * requested.pipeline), MAX_GPUS_PER_NODE)
        if tensor * pipeline <= most:
            return None
    elif tensor * pipeline * data % most == 0 and (data == 1 or most % (tensor * pipeline) == 0):
        return most
    return gpus_of_a_pod(tensor, pipeline, data, most=most) or requested.gpus_per_node


def _distance(requested: Parallelism, other: Parallelism) -> tuple[float, int, int]:
    """Return the sort key: steps of doubling or halving of the GPU count and of each degree, then synchronisation."""
    pairs = [(requested.tensor, other.tensor), (requested.pipeline, other.pipeline), (requested.data, other.data)]
    degrees = [math.log2(theirs / ours) for ours, theirs in pairs]
    steps = abs(sum(degrees)) + sum(map(abs, degrees))
    return round(steps, 6), other.tensor * other.pipeline * other.data, other.pipeline
