"""Control law for the replica count: the load expected when a new replica could serve, and the hold time of scale-in.

up       = the load not exceeded in `confidence` of the cases, one start-up ahead
need     = the fewest replicas that hold it, plus replicas for an existing queue
out      at once, to the need
in       to the highest need of the hold time, all of which must have been observed: one start-up and drain; three
         start-ups for bursty load; longer than the last lull for a count whose scale-in was regretted; not within ten
         minutes after a scale-in that was reverted
initial  the load that the initial replicas imply counts until as many are needed
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.scaling.behavior import Behavior, ScaleEvent, limit_change, stabilize

HOLD_COLD_STARTS = 1.0  # plus a drain (ski rental): keeping a replica this long costs as much as restarting it
LEAST_HOLD_SECONDS = 120.0
FORECAST_HOLD_SECONDS = 60.0  # if the forecast needs none of the removed replicas again
BURST_HOLD_COLD_STARTS = 3.0  # a burst returns faster than a new replica starts
LEAST_BURST_HOLD_SECONDS = 360.0
BURST_SECONDS = 3600.0  # during which a burst is remembered
MOST_HOLD_SECONDS = 900.0
LULL_HOLDS = 1.25  # factor of the lull before a regretted scale-in: the next one like it is waited out
LEARN_COLD_STARTS = 3.0  # of observed load before the first scale-in: a lull does not show bursts
REGRET_SECONDS = 720.0  # scaling out this soon after scaling in is a regret (six start-ups)
REGRET_DECAY_SECONDS = 1800.0  # without regret, after which the hold time halves
REVERSAL_COOLDOWN_SECONDS = 600.0  # no scale-in after a reversal: at most two reversals within it
KEEP_WANTED_SECONDS = 3600.0
MAX_SAMPLE_GAP_SECONDS = 60.0  # default; after a longer gap the load may have been anything, so windows begin again
PRIOR_COLD_START_SECONDS = 120.0  # that Caution.prior_sd refers to
LEVEL_SECONDS = 60.0  # window of the present rate
QUICK_SECONDS = 30.0  # window in which a jump is detected
QUEUE_SHARE = 0.5  # of the TTFT objective that the queue may take before it needs a replica
DRAIN_SECONDS = 60.0  # minimum time to empty a queue


@dataclass(frozen=True, slots=True)
class Caution:
    """Safety margins of the control law; one set for all loads."""

    confidence: float = 0.9
    """Share of the observed growths within a start-up that are provisioned for."""
    confidence_over_budget: float = 0.95
    """The same once the error budget is exhausted. It is never lowered: one unprovisioned jump violates more requests
    than an hour's budget allows."""
    prior_sd: float = 0.16
    """Standard deviation of the logarithm of the growth within PRIOR_COLD_START_SECONDS, before any was observed."""
    beyond_highest: float = 1.25
    """Factor of the highest recent rate that is provisioned at most."""
    jump_deviations: float = 0.5
    """Standard errors subtracted from the rate of the last half minute, to provision for jumps at once."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between steps."""

    desired: int | None = None
    wanted: tuple[tuple[float, int], ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    hold_seconds: float = 0.0
    """Seconds for which fewer than `regretted` must have sufficed before scaling in below it. It halves over time."""
    last_in_at: float | None = None
    last_in_from: int | None = None
    """Replicas before the last scale-in, including others shortly before it."""
    regretted_at: float | None = None
    regretted: int | None = None
    """Count whose scale-in was regretted; higher counts are not affected."""
    began_at: float | None = None
    """Time since which the load has been observed."""
    burst_at: float | None = None
    """Time when the load had last doubled within a start-up."""
    initial_replicas: int | None = None
    """Replicas at the start of the observation, until as many were needed or the load was observed for long."""


@dataclass(frozen=True, slots=True)
class Need:
    """Needed replicas and their evidence."""

    replicas: int
    rate: float
    provisioned_rate: float
    """Requests a second that are provisioned for."""
    growth: float
    """Growth factor within a start-up."""
    for_queue: int = 0
    """Replicas needed for the queue."""
    is_overfull: bool = False
    """True if the requests in flight need one more replica."""
    initial_replicas: int | None = None
    """Initial replicas, if the load that they imply has not arrived and is expected."""


def confidence(caution: Caution, error_budget_used: float | None) -> float:
    """Return the share of growths to provision for. `error_budget_used` is the used share of the error budget."""
    return (
        caution.confidence_over_budget
        if error_budget_used is not None and error_budget_used > 1.0
        else caution.confidence
    )


def rate_to_provision(
    demand: Demand,
    growth: Growth,
    caution: Caution,
    confident: float,
    *,
    cold_start: float,
    is_burst: bool = False,
    forecast_load: float | None = None,
) -> tuple[float, float] | None:
    """Return the rate to provision for, and its growth factor, which `confident` of the observed growths did not
    exceed.

    The present level times the growth that a load with this trend rarely exceeds within a start-up. Adding a slope was
    tried and made it worse: the observed growths already contain it. A burst must be served by replicas that are ready
    when it returns and is over before a minute has counted it, so its height is that of half a minute. With a proven
    forecast, its upper bound `forecast_load` replaces the growth; the present load and jumps count in any case.
    """
    level = demand.level(LEVEL_SECONDS)
    if level is None:
        return None
    factor = growth.quantile(confident, prior_sd=prior_spread(caution, cold_start), trend=demand.trend())
    if forecast_load is not None and level > 0:
        factor = max(1.0, forecast_load / level)
    quick = demand.level(QUICK_SECONDS) or 0.0
    error = math.sqrt(max(quick, 1 / QUICK_SECONDS) * demand.dispersion() / QUICK_SECONDS)
    up = max(level * factor, level, quick - caution.jump_deviations * error)
    up = min(up, max(level, forecast_load or 0.0, caution.beyond_highest * demand.highest(LEVEL_SECONDS)))
    return max(up, quick * min(factor, caution.beyond_highest)) if is_burst else up, factor


def prior_spread(caution: Caution, seconds: float) -> float:
    """Return the prior standard deviation of the logarithm of growth; its variance grows with time."""
    return caution.prior_sd * math.sqrt(seconds / PRIOR_COLD_START_SECONDS)


def compute_need(
    up: float,
    level: float,
    factor: float,
    capacity: Callable[[int], float],
    *,
    least: int,
    most: int,
    queue_replicas: int,
) -> Need:
    """Return the fewest replicas between `least` and `most` with capacity `up`, plus those for the queue."""
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if capacity(middle) >= up else (middle + 1, high)
    return Need(min(most, low + queue_replicas), level, up, factor, queue_replicas)


def awaited_initial_replicas(
    state: ScalingState, need: int, current: int, *, now: float, cold_start: float
) -> int | None:
    """Return the initial replica count while fewer have been needed since; None once as many were needed or the load
    was observed for long.

    A user who starts four replicas for the load of one expects more load than has arrived.
    """
    initial_replicas = current if state.began_at is None else state.initial_replicas
    watched = 0.0 if state.began_at is None else now - state.began_at
    return (
        None
        if initial_replicas is None or need >= initial_replicas or watched >= LEARN_COLD_STARTS * cold_start
        else initial_replicas
    )


def initial_load(initial_replicas: int, capacity: Callable[[int], float]) -> float:
    """Return the load that this many replicas imply: between the capacity of one fewer and theirs."""
    return (capacity(initial_replicas) + (capacity(initial_replicas - 1) if initial_replicas > 1 else 0.0)) / 2


def replicas_for_queue(waiting_seconds: float, *, replicas: int, ttft_seconds: float | None, cold_start: float) -> int:
    """Return the replicas that empty the queue within a start-up; 0 while waiting takes less than QUEUE_SHARE of the
    TTFT objective. `waiting_seconds` is queued work in replica-seconds.
    """
    if ttft_seconds is None or waiting_seconds / max(1, replicas) <= QUEUE_SHARE * ttft_seconds:
        return 0
    return math.ceil(waiting_seconds / max(DRAIN_SECONDS, cold_start))


def decide_count(
    state: ScalingState,
    need: int,
    current: int,
    *,
    now: float,
    cold_start: float,
    may_lower: bool,
    behavior: Behavior,
    is_burst: bool = False,
    drain: float = 0.0,
    holds_load: Callable[[int], bool] = lambda count: True,
    initial_replicas: int | None = None,
    later: int | None = None,
    max_gap_seconds: float = MAX_SAMPLE_GAP_SECONDS,
) -> tuple[int, ScalingState]:
    """Return the replica count to request and the new state.

    `current` includes starting replicas. `is_burst`: the load has just doubled within a start-up. `drain`: seconds that
    a replica takes to drain. `holds_load` returns whether fewer replicas would attain the objectives with the requests
    in flight. `later`: replicas needed, by a proven forecast, until a removed one could serve again. After more than
    `max_gap_seconds` without a sample, windows begin again.
    """
    state = _without_gap(state, now, max_gap_seconds)
    state = replace(
        state,
        initial_replicas=initial_replicas,
        began_at=now if state.began_at is None else state.began_at,
        burst_at=now if is_burst else state.burst_at,
    )
    hold = _hold(state, now, cold_start, drain)
    state = _decay_regret(state, now, hold)
    before = state.wanted or ((now - 1.0, current),)  # windows begin with the present count, after a restart too
    wanted = (*(entry for entry in before if entry[0] > now - KEEP_WANTED_SECONDS), (now, need))
    state = replace(state, wanted=wanted)
    target = stabilize(behavior, current, wanted, now=now, tuner_hold=_tuner_hold(state, hold, later, now))
    target = max(target, min(current, later or 0))
    target = max(target, min(current, _regret_floor(state, now)))
    learned_for = now - state.began_at if state.began_at is not None else 0.0
    is_known = may_lower and learned_for >= LEARN_COLD_STARTS * cold_start
    if target < current and (not is_known or _has_reversed_recently(state, now)):
        target = current
    target = limit_change(behavior, current, target, state.events, now=now)
    while target < current and not holds_load(target):
        target += 1
    if target == current:
        return current, replace(state, desired=current)
    events = (
        *(event for event in state.events if event.at > now - KEEP_WANTED_SECONDS),
        ScaleEvent(now, target - current),
    )
    state = replace(state, desired=target, events=events)
    if target < current:
        before_it = max(current, _recent_scale_in_from(state, now) or 0)
        return target, replace(state, last_in_at=now, last_in_from=before_it)
    removed_from = _recent_scale_in_from(state, now)
    if removed_from is None:
        return target, state
    count = min(target, removed_from)
    longer = max(2 * max(hold, state.hold_seconds), LULL_HOLDS * _lull(wanted, count, now))
    return target, replace(
        state,
        hold_seconds=min(MOST_HOLD_SECONDS, longer),
        regretted_at=now,
        regretted=max(count, state.regretted or 0),
        last_in_at=None,
        last_in_from=None,
    )


def _without_gap(state: ScalingState, now: float, max_gap_seconds: float) -> ScalingState:
    """Return the state without windows that a gap in the samples interrupts, so that only observed time counts.

    A clock that was set back is a gap too. Times of the state move with it, as they would otherwise be in the future.
    """
    if not state.wanted:
        return state
    passed = now - state.wanted[-1][0]
    if 0 <= passed <= max_gap_seconds:
        return state

    def shift(at: float | None) -> float | None:
        return None if at is None else at + passed

    state = replace(state, wanted=(), began_at=shift(state.began_at))
    if passed > 0:
        return state
    return replace(
        state,
        events=tuple(replace(event, at=event.at + passed) for event in state.events),
        last_in_at=shift(state.last_in_at),
        regretted_at=shift(state.regretted_at),
        burst_at=shift(state.burst_at),
    )


def _has_reversed_recently(state: ScalingState, now: float) -> bool:
    """Return True if a scale-out followed a scale-in so recently that another scale-in would reverse the count a second
    time.
    """
    return any(
        before.change < 0 < event.change and now - event.at < REVERSAL_COOLDOWN_SECONDS
        for before, event in itertools.pairwise(state.events)
    )


def _recent_scale_in_from(state: ScalingState, now: float) -> int | None:
    """Return the count before a scale-in that is recent enough to be regretted; None without one."""
    if state.last_in_at is None or now - state.last_in_at >= REGRET_SECONDS:
        return None
    return state.last_in_from


def _regret_floor(state: ScalingState, now: float) -> int:
    """Return the count needed within the learned hold time, at most the regretted count; 0 without regret. It prevents
    repeated attempts of a slightly too small count at any configured pace.
    """
    if state.regretted is None:
        return 0
    needs = (count for at, count in state.wanted if at >= now - state.hold_seconds)
    return min(state.regretted, max(needs, default=0))


def _lull(wanted: Sequence[tuple[float, int]], count: int, now: float) -> float:
    """Return the seconds since as many replicas were last needed, or since the oldest entry."""
    return now - max((at for at, need in wanted[:-1] if need >= count), default=wanted[0][0])


def _tuner_hold(state: ScalingState, hold: float, later: int | None, now: float) -> float:
    """Return the hold time; a short one if a forecast bounds the need and no bursts occur, which quarter-hour buckets
    cannot show.
    """
    return hold if later is None or _has_recent_burst(state, now) else FORECAST_HOLD_SECONDS


def usual_hold(cold_start: float, drain: float) -> float:
    """Return the hold time without bursts."""
    return max(LEAST_HOLD_SECONDS, HOLD_COLD_STARTS * cold_start + min(MOST_HOLD_SECONDS, drain))


def _hold(state: ScalingState, now: float, cold_start: float, drain: float) -> float:
    """Return the hold time: the cost of removing and restarting a replica (drain and start-up); longer after bursts."""
    hold = usual_hold(cold_start, drain)
    if _has_recent_burst(state, now):
        return max(hold, LEAST_BURST_HOLD_SECONDS, BURST_HOLD_COLD_STARTS * cold_start)
    return hold


def _has_recent_burst(state: ScalingState, now: float) -> bool:
    return state.burst_at is not None and now - state.burst_at < BURST_SECONDS


def _decay_regret(state: ScalingState, now: float, hold: float) -> ScalingState:
    """Halve the learned hold time after a period without regret; forget it once it is below the usual hold time."""
    if state.regretted_at is None or now - state.regretted_at <= REGRET_DECAY_SECONDS:
        return state
    halved = state.hold_seconds / 2
    if halved > hold:
        return replace(state, hold_seconds=halved, regretted_at=now)
    return replace(state, hold_seconds=0.0, regretted_at=None, regretted=None)
