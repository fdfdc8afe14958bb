"""How many replicas the demand needs that is foreseen for when a new one could serve, and for how long none goes.

up    = the demand that is not exceeded in `confidence` of the cases, one start-up ahead
need  = the fewest replicas that hold it, and some more for a queue that is there already
out   at once, to the need
in    to the highest need of the hold: as long as a start-up and a drain; three start-ups where the load comes in
      bursts; below a count that was regretted after longer than the lull was that was trusted then; none for ten
      minutes after some went and were needed again
first until as many are needed as there were, the load that these were meant for counts as if it came
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.scaling.behavior import Behavior, ScaleEvent, limited, stabilized

HOLD_COLD_STARTS = (
    1.0  # and a drain: ski rental, as a replica that is kept for as long costs what going and coming does
)
LEAST_HOLD_SECONDS = 120.0
FORETOLD_HOLD_SECONDS = 60.0  # where a forecast says that none of the replicas which go is needed again
BURST_HOLD_COLD_STARTS = 3.0  # what doubled within a start-up comes back as fast, and no new replica is in time for it
LEAST_BURST_HOLD_SECONDS = 360.0
BURST_SECONDS = 3600.0  # that a burst is remembered
MOST_HOLD_SECONDS = 900.0
LULL_HOLDS = 1.25  # times the lull that a regretted scale-in trusted: the next one like it is waited out
LEARN_COLD_STARTS = 3.0  # of load that must be seen before the first replica goes: a lull tells nothing of the bursts
REGRET_SECONDS = 720.0  # scaling out so soon after scaling in is a regret; six start-ups pay for the one that it cost
FORGIVE_SECONDS = 1800.0  # without regret after which the hold halves
TURN_SECONDS = 600.0  # after a turn from in to out in which none goes: so the count turns twice within them at most
KEEP_WANTED_SECONDS = 3600.0
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
    """For as long fewer than `regretted` must have been enough before one goes below it. It halves as time passes."""
    last_in_at: float | None = None
    last_in_from: int | None = None
    """How many there were before it, and before others shortly before."""
    regretted_at: float | None = None
    regretted: int | None = None
    """The count that was gone below and was needed again: nothing was learned of those above it."""
    began_at: float | None = None
    """Since when the load has been watched."""
    burst_at: float | None = None
    """When the load had last doubled within a start-up."""
    meant: int | None = None
    """How many there were when the load began to be watched, until as many were needed, or it was watched for long."""


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
    meant: int | None = None
    """How many there were at the beginning, where the load that these were meant for has not come and is foreseen."""


def confidence(caution: Caution, spent: float | None) -> float:
    """The share of growths to provide for. `spent` is how much of the misses that are allowed was used."""
    return caution.overspent if spent is not None and spent > 1.0 else caution.confidence


def bound(
    demand: Demand,
    growth: Growth,
    caution: Caution,
    confident: float,
    *,
    cold_start: float,
    is_burst: bool = False,
    foretold: float | None = None,
) -> tuple[float, float] | None:
    """The rate to provide for, and the factor of growth in it, which `confident` of the growths seen did not exceed.

    The present level times the growth that is seldom exceeded within a start-up by a load with this trend. Adding a
    slope to it was tried and made it worse: what slopes foretell is in the growths that were seen. A burst is met by
    who is there when it comes back, and is over before a minute has counted it: its height is that of half a minute.
    Where a forecast has proved itself, what it has `foretold` at most takes the place of the growth. The present load,
    and a jump, count all the same.
    """
    level = demand.level(LEVEL_SECONDS)
    if level is None:
        return None
    factor = growth.quantile(confident, prior_sd=prior_spread(caution, cold_start), trend=demand.trend())
    if foretold is not None and level > 0:
        factor = max(1.0, foretold / level)
    quick = demand.level(QUICK_SECONDS) or 0.0
    error = math.sqrt(max(quick, 1 / QUICK_SECONDS) * demand.dispersion() / QUICK_SECONDS)
    up = max(level * factor, level, quick - caution.jump_deviations * error)
    up = min(up, max(level, foretold or 0.0, caution.beyond_highest * demand.highest(LEVEL_SECONDS)))
    return max(up, quick * min(factor, caution.beyond_highest)) if is_burst else up, factor


def prior_spread(caution: Caution, seconds: float) -> float:
    """Standard deviation of the logarithm of growth before any was seen: its variance grows with time."""
    return caution.prior_sd * math.sqrt(seconds / PRIOR_COLD_START_SECONDS)


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


def awaited(memory: ScalingMemory, need: int, current: int, *, now: float, cold_start: float) -> int | None:
    """How many there were when the load began to be watched, as long as fewer have been needed all the time; None: as
    many were needed, or the load has been watched for so long that it tells more than they do.

    Nobody starts four replicas for what one holds: who did knows of more than has come by now.
    """
    meant = current if memory.began_at is None else memory.meant
    watched = 0.0 if memory.began_at is None else now - memory.began_at
    return None if meant is None or need >= meant or watched >= LEARN_COLD_STARTS * cold_start else meant


def meant_load(meant: int, capacity: Callable[[int], float]) -> float:
    """The load that so many replicas are meant for: between what one fewer holds and what they do."""
    return (capacity(meant) + (capacity(meant - 1) if meant > 1 else 0.0)) / 2


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
    is_burst: bool = False,
    drain: float = 0.0,
    holds_load: Callable[[int], bool] = lambda count: True,
    meant: int | None = None,
    later: int | None = None,
) -> tuple[int, ScalingMemory]:
    """The replica count to ask for, and what to remember. `current` counts those that start. `is_burst`: the load has
    doubled within a start-up just now. `drain` is how long a replica takes to go. `holds` tells whether fewer replicas
    would keep the promises from here, and is asked before any goes. `meant`: whose load is still awaited. `later`: how
    many a forecast that has proved itself asks for until a replica that goes could be there again."""
    memory = replace(
        memory,
        meant=meant,
        began_at=now if memory.began_at is None else memory.began_at,
        burst_at=now if is_burst else memory.burst_at,
    )
    hold = _hold(memory, now, cold_start, drain)
    memory = _forgiven(memory, now, hold)
    before = memory.wanted or ((now - 1.0, current),)  # windows begin with what is there, after a restart too
    wanted = (*(entry for entry in before if entry[0] > now - KEEP_WANTED_SECONDS), (now, need))
    memory = replace(memory, wanted=wanted)
    target = stabilized(behavior, current, wanted, now=now, own_hold=_own_hold(memory, hold, later, now))
    target = max(target, min(current, later or 0))
    target = max(target, min(current, _not_below(memory, now)))
    learned_for = now - memory.began_at if memory.began_at is not None else 0.0
    is_known = may_lower and learned_for >= LEARN_COLD_STARTS * cold_start
    if target < current and (not is_known or _turned_lately(memory, now)):
        target = current
    target = limited(behavior, current, target, memory.events, now=now)
    while target < current and not holds_load(target):
        target += 1
    if target == current:
        return current, replace(memory, desired=current)
    events = (
        *(event for event in memory.events if event.at > now - KEEP_WANTED_SECONDS),
        ScaleEvent(now, target - current),
    )
    memory = replace(memory, desired=target, events=events)
    if target < current:
        before_it = max(current, _went_lately(memory, now) or 0)
        return target, replace(memory, last_in_at=now, last_in_from=before_it)
    missed = _went_lately(memory, now)
    if missed is None:
        return target, memory
    count = min(target, missed)
    longer = max(2 * max(hold, memory.hold_seconds), LULL_HOLDS * _lull(wanted, count, now))
    return target, replace(
        memory,
        hold_seconds=min(MOST_HOLD_SECONDS, longer),
        regretted_at=now,
        regretted=max(count, memory.regretted or 0),
        last_in_at=None,
        last_in_from=None,
    )


def _turned_lately(memory: ScalingMemory, now: float) -> bool:
    """Whether replicas came so lately after some had gone that one which goes would turn the count a second time, and
    the next that is needed a third."""
    return any(
        before.change < 0 < event.change and now - event.at < TURN_SECONDS
        for before, event in itertools.pairwise(memory.events)
    )


def _went_lately(memory: ScalingMemory, now: float) -> int | None:
    """From how many replicas some went so lately that to need them again is a regret; None: none did."""
    if memory.last_in_at is None or now - memory.last_in_at >= REGRET_SECONDS:
        return None
    return memory.last_in_from


def _not_below(memory: ScalingMemory, now: float) -> int:
    """What was needed within the hold that a regret has taught, as far as it is the count that was regretted: so that
    one which is just not enough is not tried again and again, whatever the owner's pace. 0: nothing was learned."""
    if memory.regretted is None:
        return 0
    needs = (count for at, count in memory.wanted if at >= now - memory.hold_seconds)
    return min(memory.regretted, max(needs, default=0))


def _lull(wanted: Sequence[tuple[float, int]], count: int, now: float) -> float:
    """How long it is since as many were needed before now: since the oldest entry where they never were."""
    return now - max((at for at, need in wanted[:-1] if need >= count), default=wanted[0][0])


def _own_hold(memory: ScalingMemory, hold: float, later: int | None, now: float) -> float:
    """The hold where no forecast tells for how long a replica would be missed; and where bursts come, of which a shape
    of quarters of an hour knows nothing."""
    return hold if later is None or _came_in_bursts(memory, now) else FORETOLD_HOLD_SECONDS


def usual_hold(cold_start: float, drain: float) -> float:
    """The hold where no burst was seen."""
    return max(LEAST_HOLD_SECONDS, HOLD_COLD_STARTS * cold_start + min(MOST_HOLD_SECONDS, drain))


def _hold(memory: ScalingMemory, now: float, cold_start: float, drain: float) -> float:
    """As long as what a replica costs that goes and comes again: it is paid while it drains, and a new one while it
    starts. It is longer after bursts."""
    hold = usual_hold(cold_start, drain)
    if _came_in_bursts(memory, now):
        return max(hold, LEAST_BURST_HOLD_SECONDS, BURST_HOLD_COLD_STARTS * cold_start)
    return hold


def _came_in_bursts(memory: ScalingMemory, now: float) -> bool:
    return memory.burst_at is not None and now - memory.burst_at < BURST_SECONDS


def _forgiven(memory: ScalingMemory, now: float, hold: float) -> ScalingMemory:
    """What a regret has taught halves when none came again, and is forgotten once it is no more than the own hold."""
    if memory.regretted_at is None or now - memory.regretted_at <= FORGIVE_SECONDS:
        return memory
    halved = memory.hold_seconds / 2
    if halved > hold:
        return replace(memory, hold_seconds=halved, regretted_at=now)
    return replace(memory, hold_seconds=0.0, regretted_at=None, regretted=None)
