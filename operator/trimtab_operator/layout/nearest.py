"""The layouts next to one that does not work: what to write instead, with what it would give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.memory_fit import Envelope, MemoryFit, memory_fit
from trimtab_operator.layout.pods import gpus_of_a_pod
from trimtab_operator.layout.rules import facts_problems, spec_problems
from trimtab_operator.layout.stages import least_weights_bytes
from trimtab_operator.layout.stored_weights import as_run
from trimtab_operator.resource.spec import Parallelism

MAX_TENSOR = 64  # two racks' worth of GPUs in one all-reduce: nobody's next layout
MAX_PIPELINE = 32
MAX_OFFERED = 3
USUAL_GPUS_PER_NODE = 8
MAX_GPUS_PER_NODE = 64  # what a spec can say


@dataclass(frozen=True, slots=True)
class Offer:
    """A layout that works. `fit` is None where the GPU is not known."""

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


def works(parallelism: Parallelism, facts: ModelFacts, gpu: Gpu | None, envelope: Envelope | None) -> Offer | None:
    """The layout as an offer; None when a rule or the memory refuses it."""
    if spec_problems(parallelism) or facts_problems(parallelism, facts):
        return None
    if gpu is None or envelope is None:
        return Offer(parallelism, None)
    if least_weights_bytes(as_run(facts, gpu, envelope.quantization), parallelism) > gpu.memory_bytes:
        return None  # the common case, without a look at every stage
    fit = memory_fit(facts, parallelism, gpu, envelope)
    return Offer(parallelism, fit) if fit.fits else None


def nearest_layouts(
    asked: Parallelism, facts: ModelFacts, gpu: Gpu | None = None, envelope: Envelope | None = None
) -> tuple[Offer, ...]:
    """Up to three layouts that work, the nearest first: as many GPUs as were asked for, or the next numbers of them.

    Expert parallelism stays as asked where there are experts, and ranks to spread them over; data parallel too, but
    that engines which share experts may become fewer. Pods stay as large as asked where the ranks fill them.
    """
    found: list[Offer] = []
    for candidate in sorted(_candidates(asked, facts), key=lambda p: _distance(asked, p)):
        offer = works(candidate, facts, gpu, envelope)
        if offer is not None:
            found.append(offer)
        if len(found) == MAX_OFFERED:
            break
    return tuple(found)


def _candidates(asked: Parallelism, facts: ModelFacts) -> Iterator[Parallelism]:
    halves = {asked.data, asked.data // 2, asked.data // 4, 1} - {0} if facts.is_mixture else {asked.data}
    for tensor in range(1, min(MAX_TENSOR, facts.num_attention_heads) + 1):
        if facts.num_attention_heads % tensor:
            continue
        for pipeline in range(1, min(MAX_PIPELINE, facts.num_layers) + 1):
            for data in sorted(halves):
                expert = asked.expert and facts.is_mixture and tensor * data > 1
                per_pod = _per_pod(asked, tensor, pipeline, data)
                yield Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert, gpus_per_node=per_pod)


def _per_pod(asked: Parallelism, tensor: int, pipeline: int, data: int) -> int | None:
    """gpusPerNode of a candidate: as asked where its pods would be full, else the largest smaller number that does.

    Where nothing was asked, no pod gets more GPUs than nodes usually have.
    """
    most = asked.gpus_per_node
    if most is None:
        most = min(max(USUAL_GPUS_PER_NODE, asked.tensor * asked.pipeline), MAX_GPUS_PER_NODE)
        if tensor * pipeline <= most:
            return None
    elif tensor * pipeline * data % most == 0 and (data == 1 or most % (tensor * pipeline) == 0):
        return most
    return gpus_of_a_pod(tensor, pipeline, data, most=most) or asked.gpus_per_node


def _distance(asked: Parallelism, other: Parallelism) -> tuple[float, int, int]:
    """Fewer steps of doubling or halving first: of the GPUs in all, then of each degree; then less synchronisation."""
    pairs = [(asked.tensor, other.tensor), (asked.pipeline, other.pipeline), (asked.data, other.data)]
    degrees = [math.log2(theirs / ours) for ours, theirs in pairs]
    steps = abs(sum(degrees)) + sum(map(abs, degrees))
    return round(steps, 6), other.tensor * other.pipeline * other.data, other.pipeline
