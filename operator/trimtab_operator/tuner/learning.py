"""What one observation teaches: step times, lengths, demand, what users felt, how long replicas take to start."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import median

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load.arrivals import since, with_new
from trimtab_operator.tuner.load.clients import Count
from trimtab_operator.tuner.load.demand import Point
from trimtab_operator.tuner.load.forecast import Forecast
from trimtab_operator.tuner.load.lengths import Lengths
from trimtab_operator.tuner.load.season import Season
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation, Seen
from trimtab_operator.tuner.prediction import Foresight, Found
from trimtab_operator.tuner.prediction.capacity import (
    FIRST_STRIDE,
    KNOWN_STRIDE,
    WORK_AFTER_SHIFT,
    WORK_PER_TURN,
)
from trimtab_operator.tuner.samples import Finished, Unfinished
from trimtab_operator.tuner.scaling.law import LEVEL_SECONDS
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.state import KEEP_FELT_SECONDS, MAX_FELT, Felt, Memory

WARM_AFTER_SECONDS = 60.0  # a replica's caches and clocks are cold before: nothing is fitted from that
KEEP_COLD_STARTS = 5
MOST_COLD_START_SECONDS = 1800.0  # who took longer waited for something else: a node, a quota
DRAIN_REQUESTS = 1000  # the last ones, by which it is told how long a replica drains
DRAIN_SHARE = 0.99  # of them end within as long: of the hundred or so that a replica has, the longest is waited for
COST_CHANGE = 0.04  # of a typical step, from which on predictions are made anew
UNEVENNESS_CHANGE = 1.35  # factor of the variation of arrivals, likewise
MORE_PAIRS = 2.0  # times as many pairs, likewise
SOON_SECONDS = 30.0  # that few pairs are predicted with, where there are more by now
SETTLED_SECONDS = 120.0  # for which predictions hold while step times and unevenness change a little
REFRESH_SECONDS = 1800.0  # and after this long in any case
TYPICAL_BATCH = 16
TYPICAL_CHUNK = 1024


def with_observation(memory: Memory, observation: Observation, settings: Settings) -> Memory:
    """After one observation. Nothing is learned from a replica whose numbers cannot be believed."""
    memory = _with_model(memory, observation, settings)
    memory = _with_lengths(memory, observation)
    memory = _with_demand(memory, observation, settings)
    memory = _with_clients(memory, observation)
    memory = _with_starts(memory, observation)
    memory = _with_quiet(memory, observation, settings)
    return _with_felt(memory, observation, objectives_of(memory, settings))


def _with_model(memory: Memory, observation: Observation, settings: Settings) -> Memory:
    model = memory.model
    if model is None or model.prior != settings.prior:
        model = StepTime.of(settings.prior)
    alarms = model.alarms
    model = model.learned_all((part.decode, part.prefill) for part in _new_intervals(observation, warm=True))
    pins = () if model.alarms > alarms else memory.pins  # another engine than the one that they were learned on
    return replace(memory, model=model, pins=pins)


def _new_intervals(observation: Observation, *, warm: bool) -> list[Interval]:
    """What the believed replicas did since the look before."""
    return [
        seen.intervals[-1]
        for seen in observation.trusted
        if seen.has_new_interval and (not warm or _is_warm(seen)) and (not warm or seen.intervals[-1].is_steady)
    ]


def _is_warm(seen: Seen) -> bool:
    return seen.age_seconds >= WARM_AFTER_SECONDS


def _with_lengths(memory: Memory, observation: Observation) -> Memory:
    news = {seen.replica: seen.news for seen in observation.trusted if seen.news is not None}
    if not news:
        return memory
    serving = {seen.replica for seen in observation.ready if not seen.has_crashed}
    lost = [row for replica, rows in memory.running.items() if replica not in serving for row in rows]
    running = {replica: rows for replica, rows in memory.running.items() if replica in serving}
    running |= {replica: one.unfinished for replica, one in news.items()}
    finished = [row for one in news.values() for row in one.finished]
    unfinished = [row for one in news.values() for row in one.unfinished]
    lengths = memory.lengths.with_news(finished, unfinished, lost).checked(observation.at)
    return replace(memory, lengths=lengths, running=running)


def _with_demand(memory: Memory, observation: Observation, settings: Settings) -> Memory:
    fresh = [seen for seen in observation.ready if seen.start_seconds is not None]
    old = [seen for seen in observation.trusted if seen.has_new_interval and seen.start_seconds is None]
    if not old:
        return memory
    new = [seen.intervals[-1] for seen in old]
    seconds = median(part.seconds for part in new)
    per_second = math.fsum(_arrived(part) / part.seconds for part in new)
    per_second *= (len(observation.ready) - len(fresh)) / len(new)  # those that were not read got as much each
    begun = math.fsum(_arrived(part) for seen in fresh for part in seen.intervals)
    demand = memory.demand.with_point(Point(max(part.end for part in new), seconds, per_second * seconds + begun))
    horizon = cold_start(memory, settings) + settings.pace.tick_seconds
    growth = memory.growth.settled(demand, observation.at)
    level = demand.level(LEVEL_SECONDS)
    is_seen = level is not None and demand.seen_seconds(LEVEL_SECONDS) >= LEVEL_SECONDS / 2
    forecast = _forecast(memory, settings)
    if forecast is not None and demand is not memory.demand:
        forecast = forecast.with_observation(
            demand, growth, level=level if is_seen else None, now=observation.at, horizon=horizon
        )
    if level is not None and is_seen:
        growth = growth.foreseen(observation.at + horizon, level, demand.trend())
    return replace(memory, demand=demand, growth=growth, forecast=forecast)


def _forecast(memory: Memory, settings: Settings) -> Forecast | None:
    """What is remembered of arrivals, where it is asked for; nothing is known of a period that is new."""
    asked = None if settings.scaling is None else settings.scaling.forecast
    if asked is None:
        return None
    known = memory.forecast
    if known is not None and known.season.fits(asked.period_seconds, asked.buckets):
        return known
    return Forecast(Season.of(asked.period_seconds, buckets=asked.buckets))


def _with_clients(memory: Memory, observation: Observation) -> Memory:
    read = [seen for seen in observation.trusted if seen.has_new_interval]
    if not read:
        return memory
    latest = [seen.intervals[-1] for seen in read]
    count = Count(
        replicas=len(read),
        there=math.fsum(part.gauges.running + part.gauges.waiting for part in latest),
        waiting=math.fsum(part.gauges.waiting for part in latest),
        ended=math.fsum(part.finished for part in latest),
    )
    return replace(memory, clients=memory.clients.with_count(count))


def _arrived(part: Interval) -> float:
    """Requests that came; where the engine does not count them: those that ended, as the change of those that
    are there is small beside them."""
    return part.arrived if part.arrived is not None else part.finished


def cold_start(memory: Memory, settings: Settings) -> float:
    """How long a replica takes to start: as seen of the last ones, else as told."""
    return median(memory.cold_starts) if memory.cold_starts else settings.cold_start_seconds


def drain(memory: Memory) -> float:
    """How long a replica takes to drain: as long as all but the longest of the last requests took from begin to end."""
    seconds = sorted([felt.seconds for felt in memory.felt[-DRAIN_REQUESTS:]])
    return seconds[int(DRAIN_SHARE * len(seconds))] if seconds else 0.0


def _with_starts(memory: Memory, observation: Observation) -> Memory:
    told = [seen.start_seconds for seen in observation.replicas if seen.start_seconds]
    new = [seconds for seconds in told if seconds <= MOST_COLD_START_SECONDS]
    return replace(memory, cold_starts=(*memory.cold_starts, *new)[-KEEP_COLD_STARTS:]) if new else memory


def _with_quiet(memory: Memory, observation: Observation, settings: Settings) -> Memory:
    """Since when nothing was preempted for room, and how full the caches have been since, as far as that counts."""
    new = _new_intervals(observation, warm=False)
    if not new:
        return memory
    if any(part.preempted_for_room > 0 for part in new) or memory.quiet_since is None:
        memory = replace(memory, quiet_since=observation.at, kv_uses=())
    peak = max(part.gauges.kv_usage for part in new)
    return memory.with_kv_use(observation.at, peak, keep_seconds=settings.pace.quiet_seconds)


# --- what users felt --------------------------------------------------------------------------------------------------


def objectives_of(memory: Memory, settings: Settings) -> Objectives:
    """The owner's promises, or the defaults by the model of the engine."""
    cost = memory.model.cost if memory.model is not None else settings.prior
    pairs = memory.lengths.pairs[-200:]
    context = math.fsum(pair.prompt + pair.output / 2 for pair in pairs) / len(pairs) if pairs else 1000.0
    return settings.objectives.completed(cost, typical_context=context)


def _with_felt(memory: Memory, observation: Observation, objectives: Objectives) -> Memory:
    rows = [row for seen in observation.trusted if seen.news is not None for row in seen.news.finished]
    if not rows:
        return memory
    new = [
        Felt(row.arrived_at, _is_met(row, objectives), row.finished_at - row.arrived_at)
        for row in rows
        if row.reason in ("stop", "length")
    ]
    felt = since(with_new(memory.felt, new), observation.at - KEEP_FELT_SECONDS)
    seconds = 0.0 if memory.kept_at is None else observation.at - memory.kept_at
    met = sum(one.is_met for one in new)
    account = memory.kept.later(seconds, met=met, missed=len(new) - met)
    return replace(memory, felt=tuple(felt[-MAX_FELT:]), kept=account, kept_at=observation.at)


def _is_met(row: Finished, objectives: Objectives) -> bool:
    return objectives.is_met(prompt=row.prompt_tokens, ttft=row.ttft_seconds, mean_gap=row.mean_gap)


def attained(memory: Memory, objectives: Objectives, *, now: float, start: float, least: int) -> float | None:
    """Share of the requests that came since `start` and kept their promises. One that waits for its first token longer
    than promised has broken them; of others that still run nothing is known. None: too few to say."""
    known = since(memory.felt, start)
    late = sum(1 for row in memory.lengths.unfinished if row.arrived_at >= start and _is_late(row, objectives, now))
    count = len(known) + late
    return sum(felt.is_met for felt in known) / count if count >= least else None


def _is_late(row: Unfinished, objectives: Objectives, now: float) -> bool:
    if objectives.ttft is None or row.output_tokens > 0:
        return False
    return now - row.arrived_at > objectives.ttft.limit(row.prompt_tokens)


# --- foresight --------------------------------------------------------------------------------------------------------


def with_foresight(memory: Memory, objectives: Objectives, *, now: float, level: float) -> Memory:
    """Make predictions anew when what they rest on has changed; keep them as long as it has not."""
    if memory.model is None or not memory.model.is_fitted or not memory.lengths.is_known:
        return replace(memory, foresight=None)
    cost, variation = memory.model.cost, math.sqrt(memory.lengths.dispersion(now))
    old = memory.foresight
    if old is not None and not _is_outdated(memory, old, cost, variation, objectives, now, level):
        old.begin_turn(partial(_found, memory.lengths, old, now), clients_wait=memory.clients.do_wait)
        return memory
    pairs = memory.lengths.sample(now)
    made = Foresight(cost, pairs, objectives, variation, level)
    if old is not None:
        easier = old.mean_work / made.mean_work
        made.guesses = {candidate: easier * rate for candidate, rate in old.capacities.items()}
        made.before = {candidate: easier * rate for candidate, rate in old.beliefs().items()}
        is_shift = memory.foresight_key[0] != memory.lengths.version
        made.stride, made.work_left = (FIRST_STRIDE, WORK_AFTER_SHIFT) if is_shift else (KNOWN_STRIDE, WORK_PER_TURN)
    made.find, made.clients_wait = partial(_found, memory.lengths, made, now), memory.clients.do_wait
    return replace(memory, foresight=made, foresight_key=(memory.lengths.version, now))


def _found(lengths: Lengths, foresight: Foresight, now: float) -> tuple[Found, ...]:
    """What runs and waits in all that can be believed."""
    return tuple(
        Found(max(0.0, now - u.arrived_at), max(1, u.prompt_tokens - u.cached_tokens), output, u.output_tokens)
        for u, output in lengths.going_on(foresight.survival)
    )


def _is_outdated(
    memory: Memory,
    old: Foresight,
    cost: StepCost,
    variation: float,
    objectives: Objectives,
    now: float,
    level: float,
) -> bool:
    version, made_at = memory.foresight_key
    assert isinstance(made_at, float)
    if version != memory.lengths.version or level != old.level or now - made_at > REFRESH_SECONDS:
        return True
    if objectives.are_given and objectives != old.objectives:
        return True
    if memory.lengths.num_of_epoch > MORE_PAIRS * len(old.pairs) and len(old.pairs) < 4000:
        return now - made_at > SOON_SECONDS
    if now - made_at < SETTLED_SECONDS:
        return False
    ratio = max(variation, old.variation) / min(variation, old.variation)
    return ratio > UNEVENNESS_CHANGE or _change(old.cost, cost, old.typical_context) > COST_CHANGE


def _change(one: StepCost, other: StepCost, typical_context: float) -> float:
    """How much the time of a typical step has changed, as a share."""
    context = round(TYPICAL_BATCH * typical_context)
    changes = []
    for tokens in (TYPICAL_BATCH, TYPICAL_CHUNK):
        before = one.seconds(tokens, TYPICAL_BATCH, context, context)
        after = other.seconds(tokens, TYPICAL_BATCH, context, context)
        changes.append(abs(after / before - 1))
    return max(changes)
