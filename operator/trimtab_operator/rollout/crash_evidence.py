"""Evidence that a revision terminates its engines more often than the revision before it. Pure.

A count is no evidence by itself: a large fleet loses engines at any revision. Terminations that the node caused
(eviction, shutdown, lost node) do not count, see `observed/terminations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_operator.observed.groups import Group, revision_label
from trimtab_operator.observed.terminations import last_termination_time, num_crashes
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time

MIN_CRASHES = 3  # the tuner resets its own values after the first
MIN_CRASHED_SHARE = 0.05  # of the replicas, unless one of them crashed MIN_CRASHES times
PRIOR_CRASHES, PRIOR_POD_HOURS = (
    1.0,
    20.0,
)  # weight of the prior rate, for a revision that was observed for a short time
MAX_CHANCE = 1e-5  # of this number of crashes at the former rate; it is checked after each crash, for a day


@dataclass(frozen=True, slots=True)
class CrashEvidence:
    """Crashes of a revision's pods since a time, and the number expected at the rate of the revision before it."""

    crashes: int
    crashed_pods: int
    most_of_one_pod: int
    pods: int
    expected: float

    @property
    def is_regression(self) -> bool:
        """Return True if the crashes, on several pods or of one, are too many for the former revision's rate."""
        needed = max(MIN_CRASHES, math.ceil(MIN_CRASHED_SHARE * self.pods))
        if self.crashes < MIN_CRASHES:
            return False
        chance = _chance_of_at_least(self.crashes, self.expected) if self.crashed_pods >= needed else 1.0
        if self.most_of_one_pod >= MIN_CRASHES:
            of_one = _chance_of_at_least(min(self.crashes, self.most_of_one_pod), self.expected / self.pods)
            chance = min(chance, self.pods * of_one)
        return chance < MAX_CHANCE


def _chance_of_at_least(count: int, expected: float) -> float:
    """Return the probability of `count` or more independent events if `expected` are expected."""
    if count <= expected or expected <= 0.0:
        return 1.0 if count <= expected else 0.0
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    chance, number = 0.0, count
    while term > MAX_CHANCE * 1e-6:
        chance, number = chance + term, number + 1
        term *= expected / number
    return chance


def own_pods(group: Group) -> tuple[Manifest, ...]:
    """Return the pods of the group's revision; others say nothing about it."""
    return tuple(pod for pod in group.pods if revision_label(pod) == group.revision)


def count_crashes(groups: Iterable[Group]) -> int:
    """Return how often engines of these groups' revision crashed in the present pods."""
    return sum(num_crashes(pod) for group in groups for pod in own_pods(group))


def crashes_per_pod_hour(groups: Iterable[Group], now: float) -> float:
    """Return the crash rate of these groups' pods, with a prior for pods that are few or young."""
    pods = [pod for group in groups for pod in own_pods(group)]
    hours = math.fsum(_age_seconds(pod, now) for pod in pods) / 3600
    rate = (sum(map(num_crashes, pods)) + PRIOR_CRASHES) / (hours + PRIOR_POD_HOURS)
    return round(rate, 6)


def find_crash_evidence(
    groups: Iterable[Group], *, since: float, known: int, rate: float | None, now: float
) -> CrashEvidence:
    """Return the crashes of these groups after Unix time `since`.

    `known` is the number of crashes by then, and `rate` the former revision's crashes per pod and hour; None if it is
    unknown.
    """
    pods = [pod for group in groups for pod in own_pods(group)]
    counts = [num_crashes(pod) if _has_crashed_after(pod, since) else 0 for pod in pods]
    hours = math.fsum(min(_age_seconds(pod, now), max(0.0, now - since)) for pod in pods) / 3600
    per_hour = PRIOR_CRASHES / PRIOR_POD_HOURS if rate is None else rate
    crashes = max(0, sum(map(num_crashes, pods)) - known)
    return CrashEvidence(
        crashes, sum(count > 0 for count in counts), max(counts, default=0), len(pods), hours * per_hour
    )


def _age_seconds(pod: Manifest, now: float) -> float:
    made = parse_time(pod["metadata"].get("creationTimestamp"))
    return 0.0 if made is None else max(0.0, now - made.timestamp())


def _has_crashed_after(pod: Manifest, since: float) -> bool:
    """Return True if the latest termination is newer, or if its time is unknown."""
    ended = last_termination_time(pod)
    return ended is None or ended > since
