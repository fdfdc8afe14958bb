"""How many replicas are needed now: the demand foreseen for when a new one could serve, over what one holds.

up    = the demand that is not exceeded in `confidence` of the cases, one start-up ahead
need  = the fewest replicas that hold it, and some more for a queue that is there already
out   at once, to the need
in    to the highest need of the hold, which is as long as a start-up costs and doubles when it was regretted
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.scaling.behavior import Behavior, ScaleEvent, limited, stabilized

HOLD_COLD_STARTS = 1.5  # ski rental: one start-up's cost breaks even; one and a half measured better
LEAST_HOLD_SECONDS = 120.0
MOST_HOLD_SECONDS = 900.0
REGRET_SECONDS = 600.0  # scaling out so soon after scaling in is a regret
FORGIVE_SECONDS = 1800.0  # without regret after which the hold halves
KEEP_WANTED_SECONDS = 3600.0
LEVEL_SECONDS = 60.0  # over which the present rate is taken
QUICK_SECONDS = 30.0  # over which a jump is seen
TREND_SECONDS = 120.0
TREND_DEVIATIONS = 1.5  # from which on a slope is believed
TREND_SHARE = 0.7  # of it: slopes do not last
QUEUE_SHARE = 0.5  # of the first token's promise that the queue may take before it is worth a replica
DRAIN_SECONDS = 60.0  # in which a queue should be gone, at least


@dataclass(frozen=True, slots=True)
class Caution:
    """How careful the law is. One set for all loads."""

    z: float = 1.0
    """Standard errors of the present rate that are added to it."""
    confidence: float = 0.9
    """Share of the growths seen so far that are provided for."""
    prior_sd: float = 0.08
    """Of the logarithm of the growth within a start-up, before any was seen."""


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What is remembered between looks."""

    desired: int | None = None
    wanted: tuple[tuple[float, int], ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    hold_seconds: float = 0.0
    """0: not set yet."""
    last_in_at: float | None = None
    regretted_at: float | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """How many replicas are needed, and the numbers that say so."""

    replicas: int
    rate: float
    foreseen: float
    """Requests a second that are provided for."""
    growth: float
    """The factor between both that growth within a start-up is given."""
    for_queue: int = 0
    """Of the replicas, those that the queue asks for."""


def foreseen_rate(demand: Demand, horizon: float) -> float | None:
    """The rate at a time to come, without any margin: the level, and a significant slope."""
    level = demand.rate(LEVEL_SECONDS)
    if level is None:
        return None
    slope = demand.slope(TREND_SECONDS)
    if abs(slope.deviations) < TREND_DEVIATIONS:
        return level
    change = TREND_SHARE * slope.per_second * (horizon + LEVEL_SECONDS / 2)
    return max(0.3 * level, level + change) if change > 0 else level


def bound(demand: Demand, growth: Growth, horizon: float, caution: Caution) -> tuple[float, float] | None:
    """The rate to provide for, and the factor of growth in it."""
    level, ahead = demand.rate(LEVEL_SECONDS), foreseen_rate(demand, horizon)
    if level is None or ahead is None:
        return None
    dispersion = demand.dispersion()
    error = math.sqrt(max(level, 1 / LEVEL_SECONDS) * dispersion / LEVEL_SECONDS)
    factor = growth.quantile(caution.confidence, prior_sd=caution.prior_sd)
    up = max(ahead * factor, level + caution.z * error)
    quick = demand.rate(QUICK_SECONDS) or 0.0
    quick_error = math.sqrt(max(quick, 1 / QUICK_SECONDS) * dispersion / QUICK_SECONDS)
    return max(up, quick - caution.z / 2 * quick_error), factor


def needed(
    up: float,
    level: float,
    factor: float,
    capacity: Callable[[int], float],
    *,
    least: int,
    most: int,
    queue_replicas: int,
) -> Need:
    """The fewest replicas between `least` and `most` whose capacity is `up`, and those that the queue asks for."""
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if capacity(middle) >= up else (middle + 1, high)
    return Need(min(most, low + queue_replicas), level, up, factor, queue_replicas)


def replicas_for_queue(waiting_seconds: float, *, replicas: int, promise: float | None, cold_start: float) -> int:
    """How many more replicas empty the queue within a start-up: work that waits, in replica-seconds. 0 while waiting
    takes less than a share of what the first token may take."""
    if promise is None or waiting_seconds / max(1, replicas) <= QUEUE_SHARE * promise:
        return 0
    return math.ceil(waiting_seconds / max(DRAIN_SECONDS, cold_start))


def decided(
    memory: ScalingMemory,
    need: int,
    current: int,
    *,
    now: float,
    cold_start: float,
    may_lower: bool,
    behavior: Behavior,
) -> tuple[int, ScalingMemory]:
    """The replica count to ask for, and what to remember. `current` counts those that start."""
    memory = _with_hold(memory, now, cold_start)
    wanted = (*(entry for entry in memory.wanted if entry[0] > now - KEEP_WANTED_SECONDS), (now, need))
    memory = replace(memory, wanted=wanted)
    target = stabilized(behavior, current, wanted, now=now, own_hold=memory.hold_seconds)
    if target < current and (not may_lower or now - wanted[0][0] < memory.hold_seconds):
        target = current
    target = limited(behavior, current, target, memory.events, now=now)
    if target == current:
        return current, replace(memory, desired=current)
    events = (
        *(event for event in memory.events if event.at > now - KEEP_WANTED_SECONDS),
        ScaleEvent(now, target - current),
    )
    memory = replace(memory, desired=target, events=events)
    if target < current:
        return target, replace(memory, last_in_at=now)
    if memory.last_in_at is not None and now - memory.last_in_at < REGRET_SECONDS:
        longer = min(MOST_HOLD_SECONDS, 2 * memory.hold_seconds)
        memory = replace(memory, hold_seconds=longer, regretted_at=now, last_in_at=None)
    return target, memory


def _with_hold(memory: ScalingMemory, now: float, cold_start: float) -> ScalingMemory:
    """The hold begins at the start-up's cost, and halves towards it when nothing was regretted for long."""
    least = max(LEAST_HOLD_SECONDS, HOLD_COLD_STARTS * cold_start)
    hold = max(least, memory.hold_seconds)
    regretted = memory.regretted_at
    if regretted is not None and now - regretted > FORGIVE_SECONDS:
        return replace(memory, hold_seconds=max(least, hold / 2), regretted_at=now if hold / 2 > least else None)
    return replace(memory, hold_seconds=hold)
