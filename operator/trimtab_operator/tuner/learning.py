"""State updates from one observation: step times, lengths, demand, attainment and start-up times."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import median

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load.arrivals import merge_by_arrival, since
from trimtab_operator.tuner.load.clients import Count
from trimtab_operator.tuner.load.demand import Point
from trimtab_operator.tuner.load.forecast import Forecast
from trimtab_operator.tuner.load.lengths import Lengths
from trimtab_operator.tuner.load.season import Season
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation, ReplicaObservation
from trimtab_operator.tuner.prediction import InFlightRequest, Predictor
from trimtab_operator.tuner.prediction.capacity import (
    FIRST_STRIDE,
    KNOWN_STRIDE,
    WORK_AFTER_SHIFT,
    WORK_PER_STEP,
)
from trimtab_operator.tuner.samples import Finished, Unfinished
from trimtab_operator.tuner.scaling.control_law import LEVEL_SECONDS, lead_seconds
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.state import KEEP_OUTCOMES_SECONDS, MAX_REQUEST_OUTCOMES, RequestOutcome, TunerState

WARM_AFTER_SECONDS = 15.0  # before, caches and clocks are cold, so nothing is fitted
KEEP_COLD_STARTS = 5
MAX_COLD_START_SECONDS = 1800.0  # a longer start waited for something else: a node, a quota
DRAIN_REQUESTS = 1000  # last requests from which the drain time is estimated
DRAIN_SHARE = 0.99  # a replica has about a hundred requests, and drains until the longest ends
COST_CHANGE = 0.04  # relative change of a typical step that invalidates predictions
SHARING_CHANGE = 0.1  # of the shared part of cached prompts that invalidates predictions
UNEVENNESS_CHANGE = 1.35  # factor of the variation of arrivals that invalidates predictions
MORE_PAIRS = 2.0  # factor of the known pairs that invalidates predictions
SOON_SECONDS = 30.0  # minimum age of predictions from few pairs
SETTLED_SECONDS = 120.0  # for which predictions hold despite small changes
REFRESH_SECONDS = 1800.0  # maximum age of predictions
TYPICAL_BATCH = 16
TYPICAL_CHUNK = 1024


def with_observation(state: TunerState, observation: Observation, settings: Settings) -> TunerState:
    """Return the state updated with one observation. Replicas with invalid metrics are ignored."""
    state = _with_model(state, observation, settings)
    state = _with_lengths(state, observation)
    state = _with_sharing(state, observation)
    state = _with_demand(state, observation, settings)
    state = _with_clients(state, observation)
    state = _with_starts(state, observation)
    state = _with_quiet(state, observation, settings)
    return _with_request_outcomes(state, observation, objectives_of(state, settings))


def _with_model(state: TunerState, observation: Observation, settings: Settings) -> TunerState:
    model = state.model
    if model is None or model.prior != settings.prior:
        model = StepTime.of(settings.prior)
    change_count = model.change_count
    model = model.with_intervals((part.decode, part.prefill) for part in _new_intervals(observation, warm=True))
    pins = () if model.change_count > change_count else state.pins  # they were learned on another engine
    return replace(state, model=model, pins=pins)


def _new_intervals(observation: Observation, *, warm: bool) -> list[Interval]:
    """Return the trusted replicas' intervals since the previous sample."""
    return [
        seen.intervals[-1]
        for seen in observation.trusted
        if seen.has_new_interval and (not warm or _is_warm(seen)) and (not warm or seen.intervals[-1].is_steady)
    ]


def _is_warm(seen: ReplicaObservation) -> bool:
    return seen.age_seconds >= WARM_AFTER_SECONDS


def _with_lengths(state: TunerState, observation: Observation) -> TunerState:
    updates = {seen.replica: seen.updates for seen in observation.trusted if seen.updates is not None}
    if not updates:
        return state
    serving = {seen.replica for seen in observation.ready if not seen.has_crashed}
    lost = [row for replica, rows in state.running.items() if replica not in serving for row in rows]
    running = {replica: rows for replica, rows in state.running.items() if replica in serving}
    running |= {replica: one.unfinished for replica, one in updates.items()}
    finished = [row for one in updates.values() for row in one.finished]
    unfinished = [row for one in updates.values() for row in one.unfinished]
    lengths = state.lengths.with_requests(finished, unfinished, lost).with_shift_check(observation.at)
    has_shifted = lengths.version != state.lengths.version
    pins = tuple(pin for pin in state.pins if not (has_shifted and pin.is_for_mix))
    return replace(state, lengths=lengths, running=running, pins=pins)


def _with_sharing(state: TunerState, observation: Observation) -> TunerState:
    """Update the share of cached prompt tokens that several requests hold, from each replica's requests and blocks."""
    sharing = state.sharing
    for seen in observation.trusted:
        if seen.updates is None or seen.gauges is None or seen.ledger is None:
            continue
        running = [row for row in seen.updates.unfinished if row.output_tokens > 0]
        cached = sum(row.cached_tokens for row in running)
        if cached:
            own = sum(row.prompt_tokens + row.output_tokens for row in running) - cached
            sharing = sharing.with_sample(own=own, cached=cached, used=seen.gauges.kv_usage * seen.ledger.kv_tokens)
    return replace(state, sharing=sharing)


def _with_demand(state: TunerState, observation: Observation, settings: Settings) -> TunerState:
    fresh = [seen for seen in observation.ready if seen.start_seconds is not None]
    old = [seen for seen in observation.trusted if seen.has_new_interval and seen.start_seconds is None]
    if not old:
        return state
    new = [seen.intervals[-1] for seen in old]
    seconds = median(part.seconds for part in new)
    per_second = math.fsum(_arrived(part) / part.seconds for part in new)
    per_second *= (len(observation.ready) - len(fresh)) / len(new)  # unread replicas are assumed to get as much each
    begun = math.fsum(_arrived(part) for seen in fresh for part in seen.intervals)
    demand = state.demand.with_point(Point(max(part.end for part in new), seconds, per_second * seconds + begun))
    horizon = lead_seconds(estimate_cold_start(state, settings), settings.pace.tick_seconds)
    growth = state.growth.with_errors(demand, observation.at)
    level = demand.level(LEVEL_SECONDS)
    is_seen = level is not None and demand.seen_seconds(LEVEL_SECONDS) >= LEVEL_SECONDS / 2
    forecast = _forecast(state, settings)
    if forecast is not None and demand is not state.demand:
        forecast = forecast.with_observation(
            demand, growth, level=level if is_seen else None, now=observation.at, horizon=horizon
        )
    if level is not None and is_seen:
        growth = growth.with_prediction(observation.at + horizon, level)
    return replace(state, demand=demand, growth=growth, forecast=forecast)


def _forecast(state: TunerState, settings: Settings) -> Forecast | None:
    """Return the forecast state, if one is requested; an empty one for a new period."""
    requested = None if settings.scaling is None else settings.scaling.forecast
    if requested is None:
        return None
    known = state.forecast
    if known is not None and known.season.fits(requested.period_seconds, requested.buckets):
        return known
    return Forecast(Season.of(requested.period_seconds, buckets=requested.buckets))


def _with_clients(state: TunerState, observation: Observation) -> TunerState:
    read = [seen for seen in observation.trusted if seen.has_new_interval]
    if not read:
        return state
    latest = [seen.intervals[-1] for seen in read]
    count = Count(
        replicas=len(read),
        there=math.fsum(part.gauges.running + part.gauges.waiting for part in latest),
        waiting=math.fsum(part.gauges.waiting for part in latest),
        ended=math.fsum(part.finished for part in latest),
    )
    return replace(state, clients=state.clients.with_count(count))


def _arrived(part: Interval) -> float:
    """Return arrived requests. Without that counter, return finished ones: the change in requests in flight is small in
    comparison.
    """
    return part.arrived if part.arrived is not None else part.finished


def estimate_cold_start(state: TunerState, settings: Settings) -> float:
    """Return the start-up seconds of a replica: the median of the last ones, or the configured value."""
    return median(state.cold_starts) if state.cold_starts else settings.cold_start_seconds


def estimate_drain(state: TunerState) -> float:
    """Return the drain seconds of a replica: the duration of all but the longest of the last requests."""
    seconds = sorted([outcome.seconds for outcome in state.request_outcomes[-DRAIN_REQUESTS:]])
    return seconds[int(DRAIN_SHARE * len(seconds))] if seconds else 0.0


def _with_starts(state: TunerState, observation: Observation) -> TunerState:
    seconds_seen = [seen.start_seconds for seen in observation.replicas if seen.start_seconds]
    new = [seconds for seconds in seconds_seen if seconds <= MAX_COLD_START_SECONDS]
    return replace(state, cold_starts=(*state.cold_starts, *new)[-KEEP_COLD_STARTS:]) if new else state


def _with_quiet(state: TunerState, observation: Observation, settings: Settings) -> TunerState:
    """Update the time since the last capacity preemption, and the KV cache usages since then."""
    new = _new_intervals(observation, warm=False)
    if not new:
        return state
    if any(part.preempted_for_room > 0 for part in new) or state.quiet_since is None:
        state = replace(state, quiet_since=observation.at, kv_uses=())
    peak = max(part.gauges.kv_usage for part in new)
    return state.with_kv_use(observation.at, peak, keep_seconds=settings.pace.quiet_seconds)


# --- attainment -------------------------------------------------------------------------------------------------------


def objectives_of(state: TunerState, settings: Settings) -> Objectives:
    """Return the objectives of the spec, or the defaults derived from the step-time model."""
    cost = state.model.cost if state.model is not None else settings.prior
    pairs = state.lengths.pairs[-200:]
    context = math.fsum(pair.prompt + pair.output / 2 for pair in pairs) / len(pairs) if pairs else 1000.0
    return settings.objectives.with_defaults(cost, typical_context=context)


def _with_request_outcomes(state: TunerState, observation: Observation, objectives: Objectives) -> TunerState:
    rows = [row for seen in observation.trusted if seen.updates is not None for row in seen.updates.finished]
    if not rows:
        return state
    new = [
        RequestOutcome(row.arrived_at, _is_met(row, objectives), row.finished_at - row.arrived_at)
        for row in rows
        if row.reason in ("stop", "length")
    ]
    outcomes = since(merge_by_arrival(state.request_outcomes, new), observation.at - KEEP_OUTCOMES_SECONDS)
    seconds = 0.0 if state.attainment_at is None else observation.at - state.attainment_at
    met = sum(one.is_met for one in new)
    account = state.attainment.later(seconds, met=met, missed=len(new) - met)
    return replace(
        state,
        request_outcomes=tuple(outcomes[-MAX_REQUEST_OUTCOMES:]),
        attainment=account,
        attainment_at=observation.at,
    )


def _is_met(row: Finished, objectives: Objectives) -> bool:
    return objectives.is_met(prompt=row.prompt_tokens, ttft=row.ttft_seconds, mean_gap=row.mean_gap)


def compute_attainment(
    state: TunerState, objectives: Objectives, *, now: float, start: float, least: int
) -> float | None:
    """Return the share of requests since `start` that attained the objectives; None if there are too few.

    A request that has waited for its first token longer than the objective violates it; other unfinished requests do
    not count yet.
    """
    known = since(state.request_outcomes, start)
    late = sum(1 for row in state.lengths.unfinished if row.arrived_at >= start and _is_late(row, objectives, now))
    count = len(known) + late
    return sum(outcome.is_met for outcome in known) / count if count >= least else None


def _is_late(row: Unfinished, objectives: Objectives, now: float) -> bool:
    if objectives.ttft is None or row.output_tokens > 0:
        return False
    return now - row.arrived_at > objectives.ttft.limit(row.prompt_tokens)


# --- predictions ------------------------------------------------------------------------------------------------------


def update_predictor(state: TunerState, objectives: Objectives, *, now: float, level: float) -> TunerState:
    """Rebuild the predictor if its inputs have changed; keep it otherwise."""
    if state.model is None or not state.model.is_fitted or not state.lengths.is_known:
        return replace(state, predictor=None)
    cost, variation = state.model.cost, math.sqrt(state.lengths.dispersion(now))
    old = state.predictor
    if old is not None and not _is_outdated(state, old, cost, variation, objectives, now, level):
        old.begin_step(
            partial(_requests_in_flight, state.lengths, old, now), is_closed_loop=state.clients.are_closed_loop
        )
        return state
    pairs = state.lengths.sample(now)
    predictor = Predictor(cost, pairs, objectives, variation, level, state.sharing.share)
    if old is not None:
        easier = old.mean_work / predictor.mean_work
        predictor.guesses = {candidate: easier * rate for candidate, rate in old.capacities.items()}
        is_shift = state.predictor_key[0] != state.lengths.version
        predictor.stride, predictor.work_left = (
            (FIRST_STRIDE, WORK_AFTER_SHIFT) if is_shift else (KNOWN_STRIDE, WORK_PER_STEP)
        )
    predictor.find, predictor.is_closed_loop = (
        partial(_requests_in_flight, state.lengths, predictor, now),
        state.clients.are_closed_loop,
    )
    return replace(state, predictor=predictor, predictor_key=(state.lengths.version, now))


def _requests_in_flight(lengths: Lengths, predictor: Predictor, now: float) -> tuple[InFlightRequest, ...]:
    """Return the requests in flight in all trusted replicas."""
    return tuple(
        InFlightRequest(max(0.0, now - u.arrived_at), max(1, u.prompt_tokens), output, u.output_tokens, u.cached_tokens)
        for u, output in lengths.predict_outputs(predictor.survival)
    )


def _is_outdated(
    state: TunerState,
    old: Predictor,
    cost: StepCost,
    variation: float,
    objectives: Objectives,
    now: float,
    level: float,
) -> bool:
    version, made_at = state.predictor_key
    assert isinstance(made_at, float)
    if version != state.lengths.version or level != old.level or now - made_at > REFRESH_SECONDS:
        return True
    if objectives.are_given and objectives != old.objectives:
        return True
    if state.lengths.num_of_epoch > MORE_PAIRS * len(old.pairs) and len(old.pairs) < 4000:
        return now - made_at > SOON_SECONDS
    if now - made_at < SETTLED_SECONDS:
        return False
    if abs(state.sharing.share - old.sharing) > SHARING_CHANGE:
        return True
    ratio = max(variation, old.variation) / min(variation, old.variation)
    return ratio > UNEVENNESS_CHANGE or _change(old.cost, cost, old.typical_context) > COST_CHANGE


def _change(one: StepCost, other: StepCost, typical_context: float) -> float:
    """Return the relative change of the time of a typical step."""
    context = round(TYPICAL_BATCH * typical_context)
    changes = []
    for tokens in (TYPICAL_BATCH, TYPICAL_CHUNK):
        before = one.seconds(tokens, TYPICAL_BATCH, context, context)
        after = other.seconds(tokens, TYPICAL_BATCH, context, context)
        changes.append(abs(after / before - 1))
    return max(changes)
