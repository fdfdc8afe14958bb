"""Replica count: as many as hold the load that is expected when a new replica could serve.

vLLM's guide: data parallelism "when you have enough GPUs to replicate the entire model" and "need to scale throughput
rather than model size". Scaling out needs only some trusted replicas; scaling in needs all of them, none starting, and
a prediction that fewer hold the load. While a replica cannot be scheduled, no more are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trimtab_operator.tuner.learning import estimate_cold_start, estimate_drain
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Observation, ReplicaObservation
from trimtab_operator.tuner.prediction.capacity import TOLERANCE
from trimtab_operator.tuner.rules.pressure import FULL, peak_usage
from trimtab_operator.tuner.samples import Phase
from trimtab_operator.tuner.scaling.control_law import (
    LEVEL_SECONDS,
    MAX_SAMPLE_GAP_SECONDS,
    Need,
    ScalingState,
    awaited_initial_replicas,
    compute_need,
    confidence,
    decide_count,
    initial_load,
    rate_to_provision,
    replicas_for_queue,
)
from trimtab_operator.tuner.scaling.forecast_load import ForecastLoad, forecast_load
from trimtab_operator.tuner.settings import Scaling, Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import TunerState

UNSURE = 0.1  # of a capacity
MOST_UNSURE = 0.5  # of a capacity: maximum deduction for few known lengths
UNPLACED_SECONDS = 30.0  # by then the scheduler has tried a pod several times
LOST_COLD_STARTS = 4.0  # factor of the usual start-up time after which a starting replica is not waited for
LEAST_LOST_SECONDS = 600.0
GAP_SAMPLES = 3.0  # missing samples in a row that are a gap

Capacity = Callable[[int], float]
"""Requests a second that this many replicas hold."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Replica count to request, the move if it changes, and the new scaling state."""

    replicas: int
    state: ScalingState
    move: Move | None = None


def count_in_bounds(state: TunerState, observation: Observation, scaling: Scaling) -> int:
    """Return the requested count within the spec's bounds; the number of present replicas before any request."""
    requested = state.scaling.desired
    present = [seen for seen in observation.replicas if seen.phase is not Phase.DRAINING]
    count = len(present) if requested is None else requested
    return max(scaling.min_replicas, min(scaling.max_replicas, count))


def choose_replicas(
    state: TunerState,
    observation: Observation,
    settings: Settings,
    objectives: Objectives,
    situation: Situation | None,
    *,
    now: float,
) -> Chosen:
    """Choose the replica count. Without predictions the present one stays, within its bounds."""
    scaling = settings.scaling
    assert scaling is not None
    current = count_in_bounds(state, observation, scaling)
    most = current if any(_is_unschedulable(seen) for seen in observation.starting) else scaling.max_replicas
    least = max(1, scaling.min_replicas)
    ahead = _forecast_load(state, settings, objectives, now)
    bounds = least, most
    found = None if situation is None else _need(state, settings, objectives, situation, current, bounds, ahead)
    if found is None:
        return Chosen(current, replace(state.scaling, desired=current))
    need, capacity = found
    start = estimate_cold_start(state, settings)
    initial_replicas = awaited_initial_replicas(state.scaling, need.replicas, current, now=now, cold_start=start)
    if initial_replicas is not None and capacity is not None:
        need = _with_awaited(need, initial_replicas, capacity, least=least, most=most)
    may_lower = observation.is_complete and all(
        _is_unschedulable(seen) or _is_lost(seen, start) for seen in observation.starting
    )
    target, kept = decide_count(
        state.scaling,
        max(least, min(most, need.replicas)),
        current,
        now=now,
        cold_start=start,
        may_lower=may_lower,
        behavior=scaling.behavior,
        is_burst=state.demand.has_doubled(start),
        drain=estimate_drain(state),
        holds_load=partial(_holds_requests_in_flight, situation),
        initial_replicas=initial_replicas,
        later=_needed_later(ahead, need, capacity, least=least, most=most),
        max_gap_seconds=max(MAX_SAMPLE_GAP_SECONDS, GAP_SAMPLES * settings.pace.sampling_seconds),
    )
    if target == current:
        return Chosen(target, kept)
    move = _move(current, target, need, capacity, observation)
    return Chosen(target, kept, replace(move, evidence={**move.evidence, **_of_forecast(state.forecast, ahead)}))


def _is_unschedulable(seen: ReplicaObservation) -> bool:
    """Return True if the replica's pods have been unscheduled for longer than a scheduler needs."""
    return seen.phase is Phase.PENDING and seen.age_seconds >= UNPLACED_SECONDS


def _is_lost(seen: ReplicaObservation, start: float) -> bool:
    """Return True if the replica takes so much longer to start than usual that it is no longer waited for."""
    return seen.phase is Phase.STARTING and seen.age_seconds >= max(LEAST_LOST_SECONDS, LOST_COLD_STARTS * start)


def _forecast_load(state: TunerState, settings: Settings, objectives: Objectives, now: float) -> ForecastLoad | None:
    """Return the forecast load, if a forecast is requested and proven."""
    return forecast_load(
        state.forecast,
        state.demand,
        settings.caution,
        confidence(settings.caution, state.attainment.error_budget_used(objectives.share)),
        now=now,
        cold_start=estimate_cold_start(state, settings),
        tick=settings.pace.tick_seconds,
        drain=estimate_drain(state),
    )


def _needed_later(
    ahead: ForecastLoad | None, need: Need, capacity: Capacity | None, *, least: int, most: int
) -> int | None:
    """Return the count needed, by the forecast, until a replica removed now could serve again; None without a
    forecast.
    """
    if ahead is None or capacity is None:
        return None
    return compute_need(
        ahead.later, need.rate, need.growth, capacity, least=least, most=most, queue_replicas=0
    ).replicas


def _need(
    state: TunerState,
    settings: Settings,
    objectives: Objectives,
    s: Situation,
    current: int,
    bounds: tuple[int, int],
    ahead: ForecastLoad | None,
) -> tuple[Need, Capacity | None] | None:
    """Return the needed replicas within `bounds` and the capacity function; None if unknown.

    Without a predictor only one case is known: the minimum suffices when no requests arrive.
    """
    least, most = bounds
    if s.predictor is None:
        return (Need(least, 0.0, 0.0, 1.0), None) if _is_idle(state, s) else None
    predictor, one = s.predictor, s.candidate
    error_budget_used = state.attainment.error_budget_used(objectives.share)
    start = estimate_cold_start(state, settings)
    confident = confidence(settings.caution, error_budget_used)
    demand, is_burst = state.demand, state.demand.has_doubled(start)
    found = rate_to_provision(
        demand,
        state.growth,
        settings.caution,
        confident,
        cold_start=start,
        is_burst=is_burst,
        forecast_load=None if ahead is None else ahead.high,
    )
    if found is None:
        return None
    up, factor = found
    ttft = None if objectives.ttft is None else objectives.ttft.seconds
    extra = replicas_for_queue(
        _waiting_seconds(s),
        replicas=max(1, s.replicas),
        ttft_seconds=ttft,
        cold_start=start,
    )
    error = min(MOST_UNSURE, predictor.sampling_error)

    def capacity(count: int) -> float:
        return (1.0 - error) * predictor.believed_capacity(replace(one, replicas=count))

    need = compute_need(up, s.rate, factor, capacity, least=least, most=most, queue_replicas=extra)
    if need.replicas > current and extra == 0 and up <= _at_most(capacity(current), error):
        need = replace(need, replicas=current)  # the expected load is within the error of their capacity
    if need.replicas == most > current and capacity(most) <= 0:
        # No count attains the objectives: more replicas help only with the queue.
        return replace(need, replicas=min(most, current + extra)), capacity
    if need.replicas <= current < most and is_overfull(s):
        return replace(need, replicas=current + 1, is_overfull=True), capacity
    return need, capacity


def _with_awaited(need: Need, initial_replicas: int, capacity: Capacity, *, least: int, most: int) -> Need:
    """Return the need once the load arrives that the initial replicas imply, with its growth."""
    up = initial_load(initial_replicas, capacity) * need.growth
    then = compute_need(up, need.rate, need.growth, capacity, least=least, most=most, queue_replicas=0)
    return replace(then, initial_replicas=initial_replicas) if then.replicas > need.replicas else need


def _at_most(capacity: float, error: float) -> float:
    """Return the upper end of a capacity: without the deducted error, and within the search tolerance."""
    return capacity * (1.0 + TOLERANCE + min(UNSURE, error)) / (1.0 - error)


def is_overfull(s: Situation) -> bool:
    """Return True if the KV caches are nearly full and the requests in flight are predicted to violate the objectives,
    even with the starting replicas. Long answers show here before they change the capacity.
    """
    if s.predictor is None or s.rate <= 0 or peak_usage(s) < FULL:
        return False
    soon = replace(s.candidate, replicas=max(1, s.replicas + s.starting))
    return not s.predictor.meets_objectives(soon, s.rate)


def _holds_requests_in_flight(s: Situation | None, count: int) -> bool:
    """Return True if this many replicas are predicted to attain the objectives with the requests in flight.

    A capacity assumes empty replicas and known lengths; long answers show here first.
    """
    if s is None or s.predictor is None or s.rate <= 0:
        return True
    return s.predictor.at(replace(s.candidate, replicas=count), s.rate).attainment >= s.objectives.share


def _is_idle(state: TunerState, s: Situation) -> bool:
    """Return True if no request arrived in the last minute and none is in flight."""
    gauges = [seen.gauges for seen in s.observation.trusted]
    is_empty = all(now is not None and now.running == now.waiting == 0 for now in gauges)
    return is_empty and s.rate <= 0 and state.demand.seen_seconds(LEVEL_SECONDS) >= LEVEL_SECONDS / 2


def _waiting_seconds(s: Situation) -> float:
    """Return queued work in replica-seconds: prompts without their cached part at the prefill rate, over trusted
    replicas. One request per replica has just arrived and is not a queue.
    """
    gauges = [seen.gauges for seen in s.observation.trusted if seen.gauges is not None]
    if sum(now.waiting for now in gauges) <= len(gauges):
        return 0.0
    computed = 1.0 if s.predictor is None else s.predictor.computed_share
    return math.fsum(now.waiting_tokens or 0.0 for now in gauges) * s.cost.per_token * computed


def _of_forecast(forecast: Forecast | None, ahead: ForecastLoad | None) -> dict[str, float]:
    """Return the evidence of the forecast: its values, or its recent error if it is not used."""
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
        "provisioned_per_second": round(need.provisioned_rate, 4),
        "growth_factor": round(need.growth, 4),
        "replicas_for_queue": need.for_queue,
        "replicas_serving": len(observation.ready),
        "replicas_starting": len(observation.starting),
        "is_overfull": float(need.is_overfull),
    }
    if need.initial_replicas is not None:
        evidence["initial_replicas"] = need.initial_replicas
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
        "a lower arrival rate" if target > current else "a higher arrival rate during the hold time",
    )
