"""Replica count: as many as hold the load that is expected when a new replica could serve.

vLLM's guide: data parallelism "when you have enough GPUs to replicate the entire model" and "need to scale throughput
rather than model size". Scaling out needs only some trusted replicas; scaling in needs all of them, none starting, and
a prediction that fewer hold the load. While a replica cannot be scheduled, no more are requested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from trimtab_operator.tuner.learning import estimate_cold_start, estimate_drain
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.moves import Expectation, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Observation, ReplicaObservation
from trimtab_operator.tuner.prediction.capacity import Answer
from trimtab_operator.tuner.rules.gain import UNSURE, attainment
from trimtab_operator.tuner.samples import Phase
from trimtab_operator.tuner.scaling.control_law import (
    LEVEL_SECONDS,
    MAX_SAMPLE_GAP_SECONDS,
    ScalingState,
    confidence,
    decide_count,
    find_fewest,
    lead_seconds,
    rate_to_provision,
    usual_hold,
)
from trimtab_operator.tuner.scaling.forecast_load import ForecastLoad, forecast_load
from trimtab_operator.tuner.settings import Scaling, Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import TunerState

LEAST_HELP = 0.005  # of the requests: more replicas that help less do not help
MARGIN = 3.0  # factor of the allowed violations at the load that is provisioned for: it is an upper bound itself
CONTRADICTED_SECONDS = 3600.0  # after a contradicted prediction in which others are less certain
CONTRADICTED_UNSURE = 0.05  # error of a predicted share in that time
UNPLACED_SECONDS = 30.0  # by then the scheduler has tried a pod several times
LOST_COLD_STARTS = 4.0  # factor of the usual start-up time after which a starting replica is not waited for
LEAST_LOST_SECONDS = 600.0
GAP_SAMPLES = 3.0  # missing samples in a row that are a gap


@dataclass(frozen=True, slots=True)
class Need:
    """Needed replicas and their evidence."""

    replicas: int
    rate: float
    provisioned_rate: float
    """Requests a second that are provisioned for."""
    growth: float
    """Growth factor within a lead time."""
    attained_now: float | None = None
    """Predicted attainment at that rate with the present replicas; None without a prediction."""
    attained_then: float | None = None
    """The same with the needed ones."""
    later: int | None = None
    """Replicas needed, by the forecast, until one that is removed now could serve again; None without a forecast."""


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
    need = None if situation is None else _need(state, settings, objectives, situation, current, (least, most), ahead)
    if need is None:
        return Chosen(current, replace(state.scaling, desired=current))
    start = estimate_cold_start(state, settings)
    may_lower = observation.is_complete and all(
        _is_unschedulable(seen) or _is_lost(seen, start) for seen in observation.starting
    )
    target, kept = decide_count(
        state.scaling,
        max(least, min(most, need.replicas)),
        current,
        now=now,
        hold=usual_hold(start, estimate_drain(state)),
        may_lower=may_lower,
        behavior=scaling.behavior,
        growth=need.growth,
        holds_load=partial(_holds_requests_in_flight, situation),
        later=need.later,
        max_gap_seconds=max(MAX_SAMPLE_GAP_SECONDS, GAP_SAMPLES * settings.pace.sampling_seconds),
    )
    if target == current:
        return Chosen(target, kept)
    is_contradicted = state.contradicted_at is not None and now - state.contradicted_at < CONTRADICTED_SECONDS
    move = _move(current, target, need, observation, unsure=CONTRADICTED_UNSURE if is_contradicted else UNSURE)
    return Chosen(target, kept, replace(move, evidence={**move.evidence, **_of_forecast(state.forecast, ahead)}))


def level_at_bound(share: float) -> float:
    """Return the attainment wanted at the load that is provisioned for."""
    return 1.0 - MARGIN * (1.0 - share)


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
        lead=lead_seconds(estimate_cold_start(state, settings), settings.pace.tick_seconds),
        hold=usual_hold(estimate_cold_start(state, settings), estimate_drain(state)),
    )


def _need(
    state: TunerState,
    settings: Settings,
    objectives: Objectives,
    s: Situation,
    current: int,
    bounds: tuple[int, int],
    ahead: ForecastLoad | None,
) -> Need | None:
    """Return the needed replicas within `bounds`; None if unknown.

    Without a predictor only one case is known: the minimum suffices when no requests arrive.
    """
    least, most = bounds
    if s.predictor is None:
        return Need(least, 0.0, 0.0, 1.0) if _is_idle(state, s) else None
    lead = lead_seconds(estimate_cold_start(state, settings), settings.pace.tick_seconds)
    found = rate_to_provision(
        state.demand,
        state.growth,
        settings.caution,
        confidence(settings.caution, state.attainment.error_budget_used(objectives.share)),
        lead=lead,
        forecast_load=None if ahead is None else ahead.high,
    )
    if found is None:
        return None
    up, factor = found
    predictor = s.predictor

    level = level_at_bound(objectives.share)

    def answer(count: int, rate: float) -> Answer:
        return predictor.attains_after(replace(s.candidate, replicas=count), rate, lead, level)

    def evidence(count: int, rate: float) -> bool | None:
        candidate = replace(s.candidate, replicas=count)
        return state.evidence.verdict(
            candidate, rate, work=predictor.mean_work, context=predictor.typical_context, now=s.now
        )

    def attains(count: int, rate: float) -> bool:
        known = evidence(count, rate)
        return answer(count, rate).is_attained if known is None else known

    def fewest(rate: float) -> int:
        return find_fewest(lambda count: attains(count, rate), least=least, most=most, start=current)

    replicas = fewest(up)
    if (
        replicas > current
        and evidence(current, up) is None
        and answer(replicas, up).share - answer(current, up).share < LEAST_HELP
    ):
        replicas = current
    later = None if ahead is None else fewest(ahead.later)
    if replicas == current:
        return Need(replicas, s.rate, up, factor, later=later)
    return Need(replicas, s.rate, up, factor, answer(max(1, current), up).share, answer(replicas, up).share, later)


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


def _move(current: int, target: int, need: Need, observation: Observation, *, unsure: float) -> Move:
    evidence = {
        "requests_per_second": round(need.rate, 4),
        "provisioned_per_second": round(need.provisioned_rate, 4),
        "growth_factor": round(need.growth, 4),
        "replicas_serving": len(observation.ready),
        "replicas_starting": len(observation.starting),
    }
    expected: tuple[Expectation, ...] = ()
    if need.attained_now is not None and need.attained_then is not None:
        expected = (attainment(need.attained_now, need.attained_then, unsure=unsure),)
    return Move(
        Reason.TOO_FEW_REPLICAS if target > current else Reason.TOO_MANY_REPLICAS,
        ReplicaCount(),
        current,
        target,
        evidence,
        expected,
        "a lower arrival rate" if target > current else "a higher arrival rate during the hold time",
    )
