"""The oracle: replicas over time with the arrivals known beforehand.

1. The trace is cut into intervals of one cold start (60 s at least). Each is simulated, warmed by what came before it,
   with every count of replicas that matters: how many of its requests are missed?
2. The cheapest path over counts: their seconds, a price for each miss, and a cold start for each replica that is added.
3. The price is bisected until one whole replay of the schedule, ordered a cold start ahead, attains the objectives.
   Where no price is enough, since long requests outlast their interval, replicas are added where the replay missed.
4. Single intervals are lowered as long as it still does.

It is an upper bound of the cheapest schedule, and spends the misses that are allowed on purpose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab_simulator.contest import Contest, quiet
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score, percentile
from trimtab_simulator.trace.arrivals import Trace

SHORTEST_INTERVAL_SECONDS = 60.0
PRICE_STEPS = 9  # of the bisection: a factor of 2 ** (1 / 16) at the end
LOWEST_PRICE, HIGHEST_PRICE = 0.5, 1e6  # seconds of a replica for one miss
DESCENT_TRIES = 14
REPAIRS = 12
MISSED = 0.01  # of an interval's requests: from there on a repair adds a replica to it and to the one before
LONG_OUTPUTS = 90  # percentile of answers for whose time an interval is warmed up
ITL_SECONDS = 0.05  # of a slow engine, where no objective says
HOPELESS = 0.5  # of an interval's requests missed: fewer replicas are not tried, and count as missing all


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas of each interval, and the intervals' length in seconds."""

    counts: tuple[int, ...]
    seconds: float

    def schedule(self, cold_start: float) -> list[tuple[float, int]]:
        """When which target is asked for: more a cold start ahead, fewer when they are not needed any more."""
        asked: list[tuple[float, int, int]] = []
        for index in range(1, len(self.counts)):
            before, count = self.counts[index - 1], self.counts[index]
            at = index * self.seconds
            if count > before:
                asked.append((max(0.0, at - cold_start), 1, count))
            elif count < before:
                asked.append((at, 0, count))
        return [(at, count) for at, _, count in sorted(asked)]


@dataclass(frozen=True, slots=True)
class Found:
    """A plan with how its whole replay was judged."""

    plan: Plan
    judged: Score


def find_plan(contest: Contest) -> Plan:
    """The cheapest plan that was found, with the contest's knobs."""
    trial = replace(contest, loop=quiet(contest.loop))
    misses = count_misses(trial)
    return _descend(trial, _cheapest_price(trial, misses), misses).plan


def follow(contest: Contest, plan: Plan) -> SimulationResult:
    """Replay the whole trace on a plan."""
    started = contest.with_replicas(plan.counts[0])
    return started.play_fixed("oracle", schedule=plan.schedule(contest.settings.cold_start_seconds))


def interval_seconds(contest: Contest) -> float:
    """The length of an interval."""
    return max(SHORTEST_INTERVAL_SECONDS, contest.settings.cold_start_seconds)


def count_misses(contest: Contest) -> list[list[int]]:
    """[interval][replicas - min_replicas]: how many of the interval's requests would be missed."""
    seconds = interval_seconds(contest)
    times = [arrival.at for arrival in contest.trace.arrivals]
    num_intervals = max(1, math.ceil(contest.trace.seconds / seconds))
    warm_seconds = max(seconds, _long_answer_seconds(contest))
    rows = []
    hint = contest.settings.start_replicas
    for index in range(num_intervals):
        contest.progress("oracle", index / num_intervals)
        row, hint = _misses_of(contest, times, index, seconds, warm_seconds, hint)
        rows.append(row)
    return rows


def _misses_of(
    contest: Contest, times: Sequence[float], index: int, seconds: float, warm_seconds: float, hint: int
) -> tuple[list[int], int]:
    """One interval's misses by replicas, and the fewest replicas that miss nothing of it."""
    start, end = index * seconds, (index + 1) * seconds
    begun = max(0.0, start - warm_seconds)
    warm = bisect_left(times, begun)
    first, last = bisect_left(times, start), bisect_left(times, end)
    low, high = contest.settings.min_replicas, contest.settings.max_replicas
    if first == last:
        return [0] * (high - low + 1), low
    part = [a._replace(at=a.at - begun) for a in contest.trace.arrivals[warm:last]]
    trace = Trace("interval", part, end - begun)
    known: dict[int, int] = {}

    def missed(count: int) -> int:
        if count not in known:
            trial = replace(contest, trace=trace, progress=_silent).with_replicas(count)
            outcome = trial.play_fixed()
            late = (s for s in outcome.served if s.arrival >= start - begun and not contest.objectives.met_by(s))
            known[count] = sum(1 for _ in late)
        return known[count]

    # From the hint to the fewest that miss nothing, then down to where it is hopeless.
    count = min(max(hint, low), high)
    while count < high and missed(count) > 0:
        count += 1
    while count > low and missed(count) == 0 and missed(count - 1) == 0:
        count -= 1
    enough = count
    num = last - first
    while count > low and missed(count) < HOPELESS * num:
        count -= 1
    missed(count)
    row = []
    for replicas in range(low, high + 1):
        if replicas in known:
            row.append(known[replicas])
        else:
            row.append(0 if replicas > enough else num)
    return row, enough


def _long_answer_seconds(contest: Contest) -> float:
    """How long a long answer takes where tokens come as slowly as they may: load builds up for that long."""
    outputs = sorted(arrival.output for arrival in contest.trace.arrivals)
    long = percentile(outputs, LONG_OUTPUTS) or 0.0
    return long * (contest.objectives.itl_mean or ITL_SECONDS)


def _silent(what: str, share: float) -> None:
    return None


def cheapest_path(
    misses: Sequence[Sequence[int]], *, low: int, first_most: int, seconds: float, cold_start: float, price: float
) -> tuple[int, ...]:
    """Viterbi: replicas of each interval that cost the least in replica-seconds, misses at `price` each included.

    The first interval cannot have more than `first_most`: they are there already.
    """
    width = len(misses[0])
    costs = [(low + i) * seconds + price * misses[0][i] if low + i <= first_most else math.inf for i in range(width)]
    back: list[list[int]] = []
    for row in misses[1:]:
        # Coming down is free, so the cheapest of those at or above; going up costs a cold start a replica.
        best_from = [0] * width
        best_cost = [math.inf] * width
        from_below, cost_below = 0, math.inf
        for i in range(width):
            cost_below += cold_start
            if costs[i] < cost_below:
                from_below, cost_below = i, costs[i]
            best_from[i], best_cost[i] = from_below, cost_below
        from_above, cost_above = width - 1, math.inf
        for i in reversed(range(width)):
            if costs[i] < cost_above:
                from_above, cost_above = i, costs[i]
            if cost_above <= best_cost[i]:
                best_from[i], best_cost[i] = from_above, cost_above
        costs = [best_cost[i] + (low + i) * seconds + price * row[i] for i in range(width)]
        back.append(best_from)
    at = min(range(width), key=lambda i: costs[i])
    path = [at]
    for row_back in reversed(back):
        at = row_back[at]
        path.append(at)
    return tuple(low + i for i in reversed(path))


def _cheapest_price(contest: Contest, misses: Sequence[Sequence[int]]) -> Found:
    """The path at the lowest price of a miss whose whole replay attains the objectives."""
    seen: dict[tuple[int, ...], Found] = {}

    def tried(price: float) -> Found:
        counts = cheapest_path(
            misses,
            low=contest.settings.min_replicas,
            first_most=contest.settings.start_replicas,
            seconds=interval_seconds(contest),
            cold_start=contest.settings.cold_start_seconds,
            price=price,
        )
        if counts not in seen:
            seen[counts] = _whole(contest, Plan(counts, interval_seconds(contest)))
        return seen[counts]

    found = tried(HIGHEST_PRICE)
    low, high = math.log(LOWEST_PRICE), math.log(HIGHEST_PRICE)
    for step in range(PRICE_STEPS):
        contest.progress("oracle", step / PRICE_STEPS)
        middle = (low + high) / 2
        candidate = tried(math.exp(middle))
        if contest.attains(candidate.judged):
            high, found = middle, candidate
        else:
            low = middle
    if not contest.attains(found.judged):
        return _raise_where_missed(contest, found)
    return found


def _raise_where_missed(contest: Contest, found: Found) -> Found:
    """Add a replica to the intervals of which the whole replay missed requests, and to those before them."""
    most, seconds = contest.settings.max_replicas, found.plan.seconds
    for step in range(REPAIRS):
        contest.progress("oracle", step / REPAIRS)
        misses, requests = [0] * len(found.plan.counts), [0] * len(found.plan.counts)
        for served in follow(contest, found.plan).served:
            index = min(len(misses) - 1, int(served.arrival / seconds))
            requests[index] += 1
            misses[index] += not contest.objectives.met_by(served)
        counts = list(found.plan.counts)
        for index, missed in enumerate(misses):
            if missed > MISSED * requests[index]:
                for raised in {max(0, index - 1), index}:
                    counts[raised] = min(most, found.plan.counts[raised] + 1)
        counts[0] = min(counts[0], contest.settings.start_replicas)
        if tuple(counts) == found.plan.counts:
            return found
        found = _whole(contest, replace(found.plan, counts=tuple(counts)))
        if contest.attains(found.judged):
            return found
    return found


def _descend(contest: Contest, found: Found, misses: Sequence[Sequence[int]]) -> Found:
    """Lower single intervals by one, those first whose own misses rise the least."""
    if not contest.attains(found.judged):
        return found
    low = contest.settings.min_replicas
    tried: set[int] = set()
    for step in range(DESCENT_TRIES):
        contest.progress("oracle", step / DESCENT_TRIES)
        candidates = [
            (misses[i][count - 1 - low] - misses[i][count - low], -count, i)
            for i, count in enumerate(found.plan.counts)
            if count > low and i not in tried
        ]
        if not candidates:
            break
        index = min(candidates)[2]
        tried.add(index)
        counts = list(found.plan.counts)
        counts[index] -= 1
        candidate = _whole(contest, replace(found.plan, counts=tuple(counts)))
        if contest.attains(candidate.judged) and candidate.judged.gpu_hours < found.judged.gpu_hours:
            found = candidate
    return found


def _whole(contest: Contest, plan: Plan) -> Found:
    """Replay the whole trace on the plan. Replicas that the first interval does not need are gone at once."""
    return Found(plan, contest.judge("oracle", follow(contest, plan)))
