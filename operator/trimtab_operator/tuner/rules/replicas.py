"""Replicas: as many as hold the load that is foreseen for when a new one could serve.

The guide: data parallelism "when you have enough GPUs to replicate the entire model" and "need to scale throughput
rather than model size". Scaling out needs no more than some replicas that can be believed; scaling in needs all of
them, none that starts, and a prediction that fewer hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.learning import cold_start
from trimtab_operator.tuner.looks import Phase
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Observation
from trimtab_operator.tuner.scaling.law import (
    Need,
    ScalingMemory,
    bound,
    confidence,
    decided,
    needed,
    replicas_for_queue,
)
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import Memory

UNSURE = 0.1  # of a capacity
MOST_UNSURE = 0.5  # of a capacity, that few known lengths may take off it

Capacity = Callable[[int], float]
"""Requests a second that so many replicas hold."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The replica count to ask for, the move when it changes, and what to remember."""

    replicas: int
    memory: ScalingMemory
    move: Move | None = None


def wanted_replicas(
    memory: Memory,
    observation: Observation,
    settings: Settings,
    objectives: Objectives,
    situation: Situation | None,
    *,
    now: float,
) -> Chosen:
    """Choose the count. Where nothing can be predicted the present one stays, within its bounds."""
    scaling = settings.scaling
    assert scaling is not None
    present = [seen for seen in observation.replicas if seen.phase is not Phase.DRAINING]
    asked = memory.scaling.desired
    current = len(present) if asked is None else asked
    inside = max(scaling.min_replicas, min(scaling.max_replicas, current))
    if situation is None or situation.foresight is None or situation.rate <= 0:
        return Chosen(inside, replace(memory.scaling, desired=inside))
    foresight = situation.foresight
    start = cold_start(memory, settings)
    spent = memory.kept.spent(objectives.share)
    found = bound(memory.demand, memory.growth, settings.caution, confidence(settings.caution, spent))
    if found is None:
        return Chosen(inside, replace(memory.scaling, desired=inside))
    up, factor = found
    waiting = _waiting_seconds(situation)
    promise = None if objectives.ttft is None else objectives.ttft.seconds
    extra = replicas_for_queue(waiting, replicas=max(1, situation.replicas), promise=promise, cold_start=start)
    one = situation.candidate

    sure = 1.0 - min(MOST_UNSURE, foresight.sampling_error)

    def capacity(count: int) -> float:
        return sure * foresight.capacity(replace(one, replicas=count))

    need = needed(
        up,
        situation.rate,
        factor,
        capacity,
        least=max(1, scaling.min_replicas),
        most=scaling.max_replicas,
        queue_replicas=extra,
    )
    may_lower = observation.is_complete and not observation.coming
    target, kept = decided(
        memory.scaling,
        need.replicas,
        inside,
        now=now,
        cold_start=start,
        may_lower=may_lower,
        behavior=scaling.behavior,
        spent=spent,
    )
    if target == current:
        return Chosen(target, kept)
    return Chosen(target, kept, _move(current, target, need, capacity))


def _waiting_seconds(s: Situation) -> float:
    """The work that waits, in replica-seconds: prompts at the prefill's rate, of all replicas that can be believed."""
    tokens = math.fsum(seen.gauges.waiting_tokens or 0.0 for seen in s.observation.trusted if seen.gauges is not None)
    return tokens * s.cost.per_token


def _move(current: int, target: int, need: Need, capacity: Capacity) -> Move:
    before, after = capacity(max(1, current)), capacity(max(1, target))
    return Move(
        Reason.TOO_FEW_REPLICAS if target > current else Reason.TOO_MANY_REPLICAS,
        ReplicaCount(),
        current,
        target,
        {
            "requests_per_second": round(need.rate, 4),
            "foreseen_per_second": round(need.foreseen, 4),
            "growth_factor": round(need.growth, 4),
            "capacity_per_replica": round(after / max(1, target), 4),
            "replicas_for_queue": need.for_queue,
        },
        (Expectation(Measure.CAPACITY, before, after, (1 - UNSURE) * after, (1 + UNSURE) * after),),
        "a lower rate" if target > current else "a higher rate within the hold",
    )
