"""Oracle: replica counts over time with the arrivals known beforehand.

1. The trace is cut into intervals of one cold start (60 s at least). Each is simulated, warmed up by the load before
it, with every relevant replica count, to find how many of its requests violate the objectives.

2. The cheapest path over counts: replica-seconds, a price per violation, and a cold start per added replica.

3. The price is bisected until one whole replay of the schedule, with starts one cold start ahead, attains the
objectives. If no price suffices, because long requests outlast their interval, replicas are added where the replay
violated them.

4. Single intervals are lowered as long as it still attains them.

The result is an upper bound of the cheapest schedule, and uses the allowed violations on purpose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab_simulator.experiment import Experiment, without_timeline
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score, percentile
from trimtab_simulator.trace.arrivals import Trace

SHORTEST_INTERVAL_SECONDS = 60.0
PRICE_STEPS = 9  # of the bisection: a factor of 2 ** (1 / 16) at the end
LOWEST_PRICE, HIGHEST_PRICE = 0.5, 1e6  # replica-seconds per violation
DESCENT_TRIES = 14
REPAIRS = 12
MISSED = 0.01  # of an interval's requests: above it, a repair adds a replica to it and to the previous one
LONG_OUTPUTS = 90  # percentile of outputs for whose duration an interval is warmed up
ITL_SECONDS = 0.05  # without an ITL objective
HOPELESS = (
    0.5  # of an interval's requests: with more violations, fewer replicas are not tried and count as violating all
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas of each interval, and the intervals' length in seconds."""

    counts: tuple[int, ...]
    seconds: float

    def schedule(self, cold_start: float) -> list[tuple[float, int]]:
        """Return replica targets by request time: increases one cold start ahead, decreases when they are due."""
        targets: list[tuple[float, int, int]] = []
        for index in range(1, len(self.counts)):
            before, count = self.counts[index - 1], self.counts[index]
            at = index * self.seconds
            if count > before:
                targets.append((max(0.0, at - cold_start), 1, count))
            elif count < before:
                targets.append((at, 0, count))
        return [(at, count) for at, _, count in sorted(targets)]


@dataclass(frozen=True, slots=True)
class ScoredPlan:
    """A plan with the score of its whole replay."""

    plan: Plan
    judged: Score


def find_plan(experiment: Experiment) -> Plan:
    """Return the cheapest plan found, with the experiment's parameters."""
    trial = without_timeline(experiment)
    misses = count_misses(trial)
    return _descend(trial, _cheapest_price(trial, misses), misses).plan


def replay_plan(experiment: Experiment, plan: Plan) -> SimulationResult:
    """Replay the whole trace on a plan."""
    started = experiment.with_replicas(plan.counts[0])
    return started.run_fixed("oracle", schedule=plan.schedule(experiment.settings.cold_start_seconds))


def interval_seconds(experiment: Experiment) -> float:
    """Return the length of an interval."""
    return max(SHORTEST_INTERVAL_SECONDS, experiment.settings.cold_start_seconds)


def count_misses(experiment: Experiment) -> list[list[int]]:
    """Return [interval][replicas - min_replicas]: the interval's requests that violate the objectives."""
    seconds = interval_seconds(experiment)
    times = [arrival.at for arrival in experiment.trace.arrivals]
    num_intervals = max(1, math.ceil(experiment.trace.seconds / seconds))
    warm_seconds = max(seconds, _long_answer_seconds(experiment))
    rows = []
    hint = experiment.settings.start_replicas
    for index in range(num_intervals):
        experiment.progress("oracle", index / num_intervals)
        row, hint = _count_interval_misses(experiment, times, index, seconds, warm_seconds, hint)
        rows.append(row)
    return rows


def _count_interval_misses(
    experiment: Experiment, times: Sequence[float], index: int, seconds: float, warm_seconds: float, hint: int
) -> tuple[list[int], int]:
    """Return one interval's violations by replicas, and the fewest replicas without any."""
    start, end = index * seconds, (index + 1) * seconds
    begun = max(0.0, start - warm_seconds)
    warm = bisect_left(times, begun)
    first, last = bisect_left(times, start), bisect_left(times, end)
    low, high = experiment.settings.min_replicas, experiment.settings.max_replicas
    if first == last:
        return [0] * (high - low + 1), low
    part = [a._replace(at=a.at - begun) for a in experiment.trace.arrivals[warm:last]]
    trace = Trace("interval", part, end - begun)
    known: dict[int, int] = {}

    def missed(count: int) -> int:
        if count not in known:
            trial = replace(experiment, trace=trace, progress=_silent).with_replicas(count)
            outcome = trial.run_fixed()
            late = (s for s in outcome.served if s.arrival >= start - begun and not experiment.objectives.met_by(s))
            known[count] = sum(1 for _ in late)
        return known[count]

    # From the hint to the fewest without violations, then down to HOPELESS.
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


def _long_answer_seconds(experiment: Experiment) -> float:
    """Return the duration of a long output at the ITL objective: load builds up for that long."""
    outputs = sorted(arrival.output for arrival in experiment.trace.arrivals)
    long = percentile(outputs, LONG_OUTPUTS) or 0.0
    return long * (experiment.objectives.itl_mean or ITL_SECONDS)


def _silent(what: str, share: float) -> None:
    return None


def cheapest_path(
    misses: Sequence[Sequence[int]], *, low: int, first_most: int, seconds: float, cold_start: float, price: float
) -> tuple[int, ...]:
    """Return the cheapest replicas of each interval (Viterbi): replica-seconds plus violations at `price` each.

    The first interval cannot have more than `first_most`, which are already running.
    """
    width = len(misses[0])
    costs = [(low + i) * seconds + price * misses[0][i] if low + i <= first_most else math.inf for i in range(width)]
    back: list[list[int]] = []
    for row in misses[1:]:
        # Decreases are free, so take the cheapest count at or above; increases cost a cold start per replica.
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


def _cheapest_price(experiment: Experiment, misses: Sequence[Sequence[int]]) -> ScoredPlan:
    """Return the path at the lowest price per violation whose whole replay attains the objectives."""
    seen: dict[tuple[int, ...], ScoredPlan] = {}

    def tried(price: float) -> ScoredPlan:
        counts = cheapest_path(
            misses,
            low=experiment.settings.min_replicas,
            first_most=experiment.settings.start_replicas,
            seconds=interval_seconds(experiment),
            cold_start=experiment.settings.cold_start_seconds,
            price=price,
        )
        if counts not in seen:
            seen[counts] = _score_plan(experiment, Plan(counts, interval_seconds(experiment)))
        return seen[counts]

    found = tried(HIGHEST_PRICE)
    low, high = math.log(LOWEST_PRICE), math.log(HIGHEST_PRICE)
    for step in range(PRICE_STEPS):
        experiment.progress("oracle", step / PRICE_STEPS)
        middle = (low + high) / 2
        candidate = tried(math.exp(middle))
        if experiment.attains(candidate.judged):
            high, found = middle, candidate
        else:
            low = middle
    if not experiment.attains(found.judged):
        return _raise_where_missed(experiment, found)
    return found


def _raise_where_missed(experiment: Experiment, found: ScoredPlan) -> ScoredPlan:
    """Add a replica to intervals whose requests violated the objectives in the whole replay, and to those before
    them.
    """
    most, seconds = experiment.settings.max_replicas, found.plan.seconds
    for step in range(REPAIRS):
        experiment.progress("oracle", step / REPAIRS)
        misses, requests = [0] * len(found.plan.counts), [0] * len(found.plan.counts)
        for served in replay_plan(experiment, found.plan).served:
            index = min(len(misses) - 1, int(served.arrival / seconds))
            requests[index] += 1
            misses[index] += not experiment.objectives.met_by(served)
        counts = list(found.plan.counts)
        for index, missed in enumerate(misses):
            if missed > MISSED * requests[index]:
                for raised in {max(0, index - 1), index}:
                    counts[raised] = min(most, found.plan.counts[raised] + 1)
        counts[0] = min(counts[0], experiment.settings.start_replicas)
        if tuple(counts) == found.plan.counts:
            return found
        found = _score_plan(experiment, replace(found.plan, counts=tuple(counts)))
        if experiment.attains(found.judged):
            return found
    return found


def _descend(experiment: Experiment, found: ScoredPlan, misses: Sequence[Sequence[int]]) -> ScoredPlan:
    """Lower single intervals by one, those with the smallest increase in violations first."""
    if not experiment.attains(found.judged):
        return found
    low = experiment.settings.min_replicas
    tried: set[int] = set()
    for step in range(DESCENT_TRIES):
        experiment.progress("oracle", step / DESCENT_TRIES)
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
        candidate = _score_plan(experiment, replace(found.plan, counts=tuple(counts)))
        if experiment.attains(candidate.judged) and candidate.judged.gpu_hours < found.judged.gpu_hours:
            found = candidate
    return found


def _score_plan(experiment: Experiment, plan: Plan) -> ScoredPlan:
    """Replay the whole trace on the plan. Replicas that the first interval does not need are removed at once."""
    return ScoredPlan(plan, experiment.judge("oracle", replay_plan(experiment, plan)))
