"""Control law for the replica count: the load to provision for, and when a new count is requested.

up       = the load not exceeded in `confidence` of the cases, one lead time ahead
need     = the fewest replicas that are predicted to attain the objectives at that load, from the present requests on
out      at once, to the need
in       to the highest need of the hold time, all of which must have been observed: a start-up and a drain; ten
         minutes if a doubling of the load within a lead time is provisioned for; by a third of the replicas at a time,
         or one; not within ten minutes after a scale-in that was reversed

The lead time is what a new replica needs until its effect can be measured: start-up, one iteration and half of the
window over which rates are measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, ScaleEvent, Unit, limit_change, stabilize

BURST_GROWTH = 2.0  # provisioned growth within a lead time from which on a load is bursty
BURST_HOLD_SECONDS = 600.0  # of a bursty load: lulls of some minutes end sooner than a replica starts
FORECAST_HOLD_SECONDS = 60.0  # if the forecast needs none of the removed replicas again
MAX_DRAIN_SECONDS = 900.0  # that count for the hold time
LEARN_SECONDS = 600.0  # of observed load before the first scale-in: a lull does not show bursts
REVERSAL_COOLDOWN_SECONDS = 600.0  # no scale-in after a reversal: at most two reversals within it
KEEP_WANTED_SECONDS = 3600.0
STEP_PERCENT = 33  # of the replicas that are removed at once, or one: predictions for far fewer are extrapolations
MAX_SAMPLE_GAP_SECONDS = 60.0  # default; after a longer gap the load may have been anything, so windows begin again
PRIOR_LEAD_SECONDS = 165.0  # that Caution.prior_sd refers to: a start-up of two minutes
LEVEL_SECONDS = 60.0  # window of the present rate


@dataclass(frozen=True, slots=True)
class Caution:
    """Safety margins of the control law; one set for all loads."""

    confidence: float = 0.8
    """Share of the observed growths within a lead time that are provisioned for."""
    confidence_over_budget: float = 0.95
    """The same once the error budget is exhausted. It is never lowered: one unprovisioned jump violates more requests
    than an hour's budget allows."""
    prior_sd: float = 0.16
    """Standard deviation of the logarithm of the growth within PRIOR_LEAD_SECONDS, before any was observed."""
    beyond_highest: float = 1.25
    """Factor of the highest recent rate that is provisioned at most."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between steps."""

    desired: int | None = None
    wanted: tuple[tuple[float, int], ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    began_at: float | None = None
    """Time since which the load has been observed."""


def lead_seconds(cold_start: float, tick: float) -> float:
    """Return the seconds until a replica that is requested now has a measurable effect."""
    return cold_start + tick + LEVEL_SECONDS / 2


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
    lead: float,
    forecast_load: float | None = None,
) -> tuple[float, float] | None:
    """Return the rate to provision for, and its growth factor, which `confident` of the observed growths did not
    exceed.

    Adding a slope was tried and made it worse: the observed growths already contain it. With a proven forecast, its
    upper bound `forecast_load` replaces the growth; the present load counts in any case, or that since a clear rise.
    """
    level = demand.level(LEVEL_SECONDS)
    if level is None:
        return None
    factor = growth.quantile(confident, prior_sd=prior_spread(caution, lead))
    if forecast_load is not None and level > 0:
        factor = max(1.0, forecast_load / level)
    recent = max(level, demand.rate_since_rise(LEVEL_SECONDS) or 0.0)
    most = max(recent, forecast_load or 0.0, caution.beyond_highest * demand.highest(LEVEL_SECONDS))
    return min(recent * max(factor, 1.0), most), factor


def prior_spread(caution: Caution, lead: float) -> float:
    """Return the prior standard deviation of the logarithm of growth; its variance grows with time."""
    return caution.prior_sd * math.sqrt(lead / PRIOR_LEAD_SECONDS)


def find_fewest(attains: Callable[[int], bool], *, least: int, most: int, start: int) -> int:
    """Return the smallest count between `least` and `most` that attains the objectives, or `most`. The search begins
    at `start`, and counts are assumed to be monotone.
    """
    start = max(least, min(most, start))
    low, high, step = least, most, 1
    if attains(start):
        high = start
        while high > low:
            count = max(low, high - step)
            if not attains(count):
                low = count + 1
                break
            high, step = count, 2 * step
    else:
        low = min(most, start + 1)
        while low < high:
            count = min(high, low + step - 1)
            if attains(count):
                high = count
                break
            low, step = min(most, count + 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle + 1, high)
    return low


def decide_count(
    state: ScalingState,
    need: int,
    current: int,
    *,
    now: float,
    hold: float,
    may_lower: bool,
    behavior: Behavior,
    growth: float = 1.0,
    holds_load: Callable[[int], bool] = lambda count: True,
    later: int | None = None,
    max_gap_seconds: float = MAX_SAMPLE_GAP_SECONDS,
) -> tuple[int, ScalingState]:
    """Return the replica count to request and the new state.

    `current` includes starting replicas. `hold`: hold time without bursts. `growth`: growth within a lead time that
    is provisioned for. `holds_load` returns whether fewer replicas attain the objectives with
    the requests in flight. `later`: replicas needed, by a proven forecast, until a removed one could serve again. After
    more than `max_gap_seconds` without a sample, windows begin again.
    """
    state = _without_gap(state, now, max_gap_seconds)
    began_at = now if state.began_at is None else state.began_at
    before = state.wanted or ((now - 1.0, current),)  # windows begin with the present count, after a restart too
    wanted = (*(entry for entry in before if entry[0] > now - KEEP_WANTED_SECONDS), (now, need))
    state = replace(state, began_at=began_at, wanted=wanted)
    hold = hold if later is None else FORECAST_HOLD_SECONDS
    if growth >= BURST_GROWTH:
        hold = max(hold, BURST_HOLD_SECONDS)
    target = stabilize(behavior, current, wanted, now=now, tuner_hold=hold)
    target = max(target, min(current, later or 0))
    is_known = may_lower and now - began_at >= LEARN_SECONDS
    if target < current and (not is_known or _has_reversed_recently(state, now)):
        target = current
    target = limit_change(_with_steps(behavior, hold), current, target, state.events, now=now)
    while target < current and not holds_load(target):
        target += 1
    if target == current:
        return current, replace(state, desired=current)
    kept = tuple(event for event in state.events if event.at > now - KEEP_WANTED_SECONDS)
    return target, replace(state, desired=target, events=(*kept, ScaleEvent(now, target - current)))


def _with_steps(behavior: Behavior, hold: float) -> Behavior:
    """Return the behavior with the default steps of a scale-in, if the spec has none."""
    if behavior.down.policies:
        return behavior
    steps = Policy(Unit.PODS, 1, hold), Policy(Unit.PERCENT, STEP_PERCENT, hold)
    return replace(behavior, down=replace(behavior.down, policies=steps))


def _without_gap(state: ScalingState, now: float, max_gap_seconds: float) -> ScalingState:
    """Return the state without windows that a gap in the samples interrupts, so that only observed time counts.

    A clock that was set back is a gap too. Times of the state move with it, as they would otherwise be in the future.
    """
    if not state.wanted:
        return state
    passed = now - state.wanted[-1][0]
    if 0 <= passed <= max_gap_seconds:
        return state
    state = replace(state, wanted=(), began_at=None if state.began_at is None else state.began_at + passed)
    if passed > 0:
        return state
    return replace(state, events=tuple(replace(event, at=event.at + passed) for event in state.events))


def _has_reversed_recently(state: ScalingState, now: float) -> bool:
    """Return True if a scale-out followed a scale-in so recently that another scale-in would reverse the count a second
    time.
    """
    return any(
        before.change < 0 < event.change and now - event.at < REVERSAL_COOLDOWN_SECONDS
        for before, event in itertools.pairwise(state.events)
    )


def usual_hold(cold_start: float, drain: float) -> float:
    """Return the hold time, the cost of removing and restarting a replica: keeping it this long costs as much (ski
    rental).
    """
    return max(LEVEL_SECONDS, cold_start + min(MAX_DRAIN_SECONDS, drain))
