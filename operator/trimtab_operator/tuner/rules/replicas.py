"""Replicas: as many as hold the load that is foreseen for when a new one could serve.

The guide: data parallelism "when you have enough GPUs to replicate the entire model" and "need to scale throughput
rather than model size". Scaling out needs no more than some replicas that can be believed; scaling in needs all of
them, none that starts, and a prediction that fewer hold it. While a replica finds no place no more are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trimtab_operator.tuner.learning import cold_start, drain
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Observation, Seen
from trimtab_operator.tuner.prediction.capacity import TOLERANCE
from trimtab_operator.tuner.rules.pressure import FULL, peak_usage
from trimtab_operator.tuner.samples import Phase
from trimtab_operator.tuner.scaling.foretold import Foretold, foretold
from trimtab_operator.tuner.scaling.law import (
    LEVEL_SECONDS,
    Need,
    ScalingMemory,
    awaited,
    bound,
    confidence,
    decided,
    meant_load,
    needed,
    replicas_for_queue,
)
from trimtab_operator.tuner.settings import Scaling, Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import Memory

UNSURE = 0.1  # of a capacity
MOST_UNSURE = 0.5  # of a capacity, that few known lengths may take off it
UNPLACED_SECONDS = 30.0  # by then the scheduler has looked at a pod several times: there is no room for it
LOST_COLD_STARTS = 4.0  # a replica that has been starting for so many times as long as usual is not waited for
LEAST_LOST_SECONDS = 600.0

Capacity = Callable[[int], float]
"""Requests a second that so many replicas hold."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The replica count to ask for, the move when it changes, and what to remember."""

    replicas: int
    memory: ScalingMemory
    move: Move | None = None


def count_in_bounds(memory: Memory, observation: Observation, scaling: Scaling) -> int:
    """The count that is asked for, brought within the owner's bounds; as many as there are, before any was."""
    asked = memory.scaling.desired
    present = [seen for seen in observation.replicas if seen.phase is not Phase.DRAINING]
    count = len(present) if asked is None else asked
    return max(scaling.min_replicas, min(scaling.max_replicas, count))


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
    current = count_in_bounds(memory, observation, scaling)
    most = current if any(_finds_no_place(seen) for seen in observation.coming) else scaling.max_replicas
    least = max(1, scaling.min_replicas)
    ahead = _foretold(memory, settings, objectives, now)
    bounds = least, most
    found = None if situation is None else _need(memory, settings, objectives, situation, current, bounds, ahead)
    if found is None:
        return Chosen(current, replace(memory.scaling, desired=current))
    need, capacity = found
    start = cold_start(memory, settings)
    meant = awaited(memory.scaling, need.replicas, current, now=now, cold_start=start)
    if meant is not None and capacity is not None:
        need = _with_awaited(need, meant, capacity, least=least, most=most)
    may_lower = observation.is_complete and all(
        _finds_no_place(seen) or _is_lost(seen, start) for seen in observation.coming
    )
    target, kept = decided(
        memory.scaling,
        max(least, min(most, need.replicas)),
        current,
        now=now,
        cold_start=start,
        may_lower=may_lower,
        behavior=scaling.behavior,
        is_burst=memory.demand.has_doubled(start),
        drain=drain(memory),
        holds_load=partial(_holds_from_here, situation),
        meant=meant,
        later=_needed_later(ahead, need, capacity, least=least, most=most),
    )
    if target == current:
        return Chosen(target, kept)
    move = _move(current, target, need, capacity, observation)
    return Chosen(target, kept, replace(move, evidence={**move.evidence, **_of_forecast(memory.forecast, ahead)}))


def _finds_no_place(seen: Seen) -> bool:
    """Whether its pods have been without a node for longer than a scheduler takes: it neither serves nor will soon."""
    return seen.phase is Phase.PENDING and seen.age_seconds >= UNPLACED_SECONDS


def _is_lost(seen: Seen, start: float) -> bool:
    """Whether it takes so much longer to start than others do that nobody should wait for it."""
    return seen.phase is Phase.STARTING and seen.age_seconds >= max(LEAST_LOST_SECONDS, LOST_COLD_STARTS * start)


def _foretold(memory: Memory, settings: Settings, objectives: Objectives, now: float) -> Foretold | None:
    """What a forecast foretells, where it is asked for and has proved itself."""
    return foretold(
        memory.forecast,
        memory.demand,
        settings.caution,
        confidence(settings.caution, memory.kept.spent(objectives.share)),
        now=now,
        cold_start=cold_start(memory, settings),
        tick=settings.pace.tick_seconds,
        drain=drain(memory),
    )


def _needed_later(
    ahead: Foretold | None, need: Need, capacity: Capacity | None, *, least: int, most: int
) -> int | None:
    """How many are needed at most until one that goes now could be there again, by the forecast; None without one."""
    if ahead is None or capacity is None:
        return None
    return needed(ahead.later, need.rate, need.growth, capacity, least=least, most=most, queue_replicas=0).replicas


def _need(
    memory: Memory,
    settings: Settings,
    objectives: Objectives,
    s: Situation,
    current: int,
    bounds: tuple[int, int],
    ahead: Foretold | None,
) -> tuple[Need, Capacity | None] | None:
    """How many are needed within `bounds`, and what so many hold; None where that cannot be told.

    Without foresight only one thing is sure: nobody needs more than the fewest when no request comes.
    """
    least, most = bounds
    if s.foresight is None:
        return (Need(least, 0.0, 0.0, 1.0), None) if _is_idle(memory, s) else None
    foresight, one = s.foresight, s.candidate
    spent = memory.kept.spent(objectives.share)
    start = cold_start(memory, settings)
    confident = confidence(settings.caution, spent)
    demand, is_burst = memory.demand, memory.demand.has_doubled(start)
    found = bound(
        demand,
        memory.growth,
        settings.caution,
        confident,
        cold_start=start,
        is_burst=is_burst,
        foretold=None if ahead is None else ahead.high,
    )
    if found is None:
        return None
    up, factor = found
    promise = None if objectives.ttft is None else objectives.ttft.seconds
    extra = replicas_for_queue(
        _waiting_seconds(s),
        replicas=max(1, s.replicas),
        promise=promise,
        cold_start=start,
    )
    error = min(MOST_UNSURE, foresight.sampling_error)

    def capacity(count: int) -> float:
        return (1.0 - error) * foresight.believed(replace(one, replicas=count))

    need = needed(up, s.rate, factor, capacity, least=least, most=most, queue_replicas=extra)
    if need.replicas > current and extra == 0 and up <= _at_most(capacity(current), error):
        need = replace(need, replicas=current)  # what is foreseen lies within the error of what they hold
    if need.replicas == most > current and capacity(most) <= 0:
        # No number of them keeps the promises: more of them help only with what waits.
        return replace(need, replicas=min(most, current + extra)), capacity
    if need.replicas <= current < most and is_overfull(s):
        return replace(need, replicas=current + 1, is_overfull=True), capacity
    return need, capacity


def _with_awaited(need: Need, meant: int, capacity: Capacity, *, least: int, most: int) -> Need:
    """The need once the load has come that those at the beginning were meant for, with the growth it is given."""
    up = meant_load(meant, capacity) * need.growth
    then = needed(up, need.rate, need.growth, capacity, least=least, most=most, queue_replicas=0)
    return replace(then, meant=meant) if then.replicas > need.replicas else need


def _at_most(capacity: float, error: float) -> float:
    """What may be held as well: by the error that was taken off it, and as far as a search looks."""
    return capacity * (1.0 + TOLERANCE + min(UNSURE, error)) / (1.0 - error)


def is_overfull(s: Situation) -> bool:
    """Whether the KV caches are nearly full, and what runs and comes is predicted to break promises from here, with
    those that start serving too. Answers that have grown long show here, whatever rate their replicas should hold."""
    if s.foresight is None or s.rate <= 0 or peak_usage(s) < FULL:
        return False
    soon = replace(s.candidate, replicas=max(1, s.replicas + s.coming))
    return not s.foresight.keeps(soon, s.rate)


def _holds_from_here(s: Situation | None, count: int) -> bool:
    """Whether so many replicas are predicted to keep the promises with what runs and waits now. A capacity is that of
    empty replicas and of the lengths that are known; answers that have grown long show here first."""
    if s is None or s.foresight is None or s.rate <= 0:
        return True
    return s.foresight.at(replace(s.candidate, replicas=count), s.rate).attainment >= s.objectives.share


def _is_idle(memory: Memory, s: Situation) -> bool:
    """Whether no request came in the last minute, and none is there."""
    gauges = [seen.gauges for seen in s.observation.trusted]
    is_empty = all(now is not None and now.running == now.waiting == 0 for now in gauges)
    return is_empty and s.rate <= 0 and memory.demand.seen_seconds(LEVEL_SECONDS) >= LEVEL_SECONDS / 2


def _waiting_seconds(s: Situation) -> float:
    """The work that waits, in replica-seconds: prompts at the prefill's rate, of all replicas that can be believed. One
    at each has just come, and is no queue."""
    gauges = [seen.gauges for seen in s.observation.trusted if seen.gauges is not None]
    if sum(now.waiting for now in gauges) <= len(gauges):
        return 0.0
    return math.fsum(now.waiting_tokens or 0.0 for now in gauges) * s.cost.per_token


def _of_forecast(forecast: Forecast | None, ahead: Foretold | None) -> dict[str, float]:
    """What is told of the forecast: what it foretells, or by how much it is off lately where it is not in use."""
    if ahead is not None:
        return {
            "forecast_per_second": round(ahead.rate, 4),
            "forecast_low": round(ahead.low, 4),
            "forecast_high": round(ahead.high, 4),
            "forecast_at": round(ahead.at),
            "forecast_periods": ahead.periods,
            "forecast_period_seconds": ahead.period_seconds,
        }
    if forecast is None or forecast.own_error is None or forecast.naive_error is None:
        return {}
    return {"forecast_error": round(forecast.own_error, 4), "naive_error": round(forecast.naive_error, 4)}


def _move(current: int, target: int, need: Need, capacity: Capacity | None, observation: Observation) -> Move:
    evidence = {
        "requests_per_second": round(need.rate, 4),
        "foreseen_per_second": round(need.foreseen, 4),
        "growth_factor": round(need.growth, 4),
        "replicas_for_queue": need.for_queue,
        "replicas_serving": len(observation.ready),
        "replicas_coming": len(observation.coming),
        "is_overfull": float(need.is_overfull),
    }
    if need.meant is not None:
        evidence["replicas_meant"] = need.meant
    expected: tuple[Expectation, ...] = ()
    if capacity is not None:
        before, after = capacity(max(1, current)), capacity(max(1, target))
        evidence["capacity_per_replica"] = round(after / max(1, target), 4)
        expected = (Expectation(Measure.CAPACITY, before, after, (1 - UNSURE) * after, (1 + UNSURE) * after),)
    return Move(
        Reason.TOO_FEW_REPLICAS if target > current else Reason.TOO_MANY_REPLICAS,
        ReplicaCount(),
        current,
        target,
        evidence,
        expected,
        "a lower rate" if target > current else "a higher rate within the hold",
    )
