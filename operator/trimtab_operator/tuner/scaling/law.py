"""How many replicas are needed now: the demand foreseen for when a new one could serve, over what one holds.

up    = the demand that is not exceeded in `confidence` of the cases, one start-up ahead
need  = the fewest replicas that hold it, and some more for a queue that is there already
out   at once, to the need
in    to the highest need of the hold: a start-up's length; three where the load comes in bursts; and once a scale-in
      was regretted, longer than the lull was that it trusted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.scaling.behavior import Behavior, ScaleEvent, limited, stabilized

HOLD_COLD_STARTS = 1.0  # ski rental: a replica that is kept for as long as a new one starts costs as much
LEAST_HOLD_SECONDS = 120.0
BURST_HOLD_COLD_STARTS = 3.0  # what doubled within a start-up comes back as fast, and no new replica is in time for it
LEAST_BURST_HOLD_SECONDS = 360.0
BURST_SECONDS = 3600.0  # that a burst is remembered
MOST_HOLD_SECONDS = 900.0
LULL_HOLDS = 1.25  # times the lull that a regretted scale-in trusted: the next one like it is waited out
LEARN_COLD_STARTS = 3.0  # of load that must be seen before the first replica goes: a lull tells nothing of the bursts
REGRET_SECONDS = 720.0  # scaling out so soon after scaling in is a regret; six start-ups pay for the one that it cost
FORGIVE_SECONDS = 1800.0  # without regret after which the hold halves
KEEP_WANTED_SECONDS = 3600.0
OVERSPENT_HOLDS = 2.0  # times the hold once more requests were missed than is allowed, and MOST_HOLD_SECONDS at least
PRIOR_COLD_START_SECONDS = 120.0  # what Caution.prior_sd is told for
LEVEL_SECONDS = 60.0  # over which the present rate is taken
QUICK_SECONDS = 30.0  # over which a jump is seen
QUEUE_SHARE = 0.5  # of the first token's promise that the queue may take before it is worth a replica
DRAIN_SECONDS = 60.0  # in which a queue should be gone, at least


@dataclass(frozen=True, slots=True)
class Caution:
    """How careful the law is. One set for all loads."""

    confidence: float = 0.9
    """Share of the growths seen so far, within a start-up, that are provided for."""
    overspent: float = 0.95
    """The same once more requests were missed than the promise allows. There is no lower share for who has missed
    none: one jump of the load that was not provided for costs more misses than an hour may have."""
    prior_sd: float = 0.16
    """Standard deviation of the logarithm of the growth within PRIOR_COLD_START, before any was seen."""
    beyond_highest: float = 1.25
    """Times the highest rate of the last hours: no more is provided for, however much the last burst grew."""
    jump_deviations: float = 0.5
    """Standard errors that the rate of the last half minute is taken less, to provide for a jump at once."""


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
    began_at: float | None = None
    """Since when the load has been watched."""
    burst_at: float | None = None
    """When the load had last doubled within a start-up."""


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
    """How many of the replicas the queue asks for."""
    is_overfull: bool = False
    """What is there already asks for one more."""


def confidence(caution: Caution, spent: float | None) -> float:
    """The share of growths to provide for. `spent` is how much of the misses that are allowed was used."""
    return caution.overspent if spent is not None and spent > 1.0 else caution.confidence


def bound(
    demand: Demand, growth: Growth, caution: Caution, confident: float, *, cold_start: float
) -> tuple[float, float] | None:
    """The rate to provide for, and the factor of growth in it, which `confident` of the growths seen did not exceed.

    The present level times the growth that is seldom exceeded within a start-up by a load with this trend. Adding a
    slope to it was tried and made it worse: what slopes foretell is in the growths that were seen.
    """
    level = demand.level(LEVEL_SECONDS)
    if level is None:
        return None
    wandering = math.sqrt(cold_start / PRIOR_COLD_START_SECONDS)  # variance grows with time
    prior_sd = caution.prior_sd * wandering
    factor = growth.quantile(confident, prior_sd=prior_sd, trend=demand.trend())
    quick = demand.level(QUICK_SECONDS) or 0.0
    error = math.sqrt(max(quick, 1 / QUICK_SECONDS) * demand.dispersion() / QUICK_SECONDS)
    up = max(level * factor, level, quick - caution.jump_deviations * error)
    return min(up, max(level, caution.beyond_highest * demand.highest(LEVEL_SECONDS))), factor


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
    spent: float | None = None,
    is_burst: bool = False,
) -> tuple[int, ScalingMemory]:
    """The replica count to ask for, and what to remember. `current` counts those that start. `is_burst`: the load has
    doubled within a start-up just now. `spent` is how much of the misses that are allowed was used: who has used all of
    them holds for twice as long, MOST_HOLD_SECONDS at least."""
    memory = replace(
        memory,
        began_at=now if memory.began_at is None else memory.began_at,
        burst_at=now if is_burst else memory.burst_at,
    )
    memory = _with_hold(memory, now, cold_start)
    before = memory.wanted or ((now - 1.0, current),)  # windows begin with what is there, after a restart too
    wanted = (*(entry for entry in before if entry[0] > now - KEEP_WANTED_SECONDS), (now, need))
    memory = replace(memory, wanted=wanted)
    hold = memory.hold_seconds
    if spent is not None and spent > 1.0:
        hold = max(MOST_HOLD_SECONDS, OVERSPENT_HOLDS * hold)
    target = stabilized(_after_regret(behavior, memory), current, wanted, now=now, own_hold=hold)
    learned_for = now - memory.began_at if memory.began_at is not None else 0.0
    if target < current and (not may_lower or learned_for < LEARN_COLD_STARTS * cold_start):
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
        longer = min(MOST_HOLD_SECONDS, max(2 * memory.hold_seconds, LULL_HOLDS * _lull(wanted, need, now)))
        memory = replace(memory, hold_seconds=longer, regretted_at=now, last_in_at=None)
    return target, memory


def _after_regret(behavior: Behavior, memory: ScalingMemory) -> Behavior:
    """The owner's pace; after a scale-in that was regretted no shorter a window than the hold that was learned from it,
    so that a count which is just not enough is not tried again and again."""
    window = behavior.down.stabilization_seconds
    if window is None or memory.regretted_at is None:
        return behavior
    return replace(behavior, down=replace(behavior.down, stabilization_seconds=max(window, memory.hold_seconds)))


def _lull(wanted: Sequence[tuple[float, int]], need: int, now: float) -> float:
    """How long it is since as many were needed as now: since the oldest entry where they never were."""
    return now - max((at for at, count in wanted[:-1] if count >= need), default=wanted[0][0])


def _with_hold(memory: ScalingMemory, now: float, cold_start: float) -> ScalingMemory:
    """The hold is as long as a start-up costs, longer after bursts; what regrets added halves when none came again."""
    least = max(LEAST_HOLD_SECONDS, HOLD_COLD_STARTS * cold_start)
    if memory.burst_at is not None and now - memory.burst_at < BURST_SECONDS:
        least = max(LEAST_BURST_HOLD_SECONDS, BURST_HOLD_COLD_STARTS * cold_start)
    regretted = memory.regretted_at
    if regretted is None:
        return replace(memory, hold_seconds=least)
    hold = max(least, memory.hold_seconds)
    if now - regretted > FORGIVE_SECONDS:
        return replace(memory, hold_seconds=max(least, hold / 2), regretted_at=now if hold / 2 > least else None)
    return replace(memory, hold_seconds=hold)
