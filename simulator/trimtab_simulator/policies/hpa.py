"""Kubernetes' Horizontal Pod Autoscaler and policies built on it: a target of running requests, and KEDA's queue.

Every 15 s, with a tolerance of 10 %. The defaults of `behavior` in autoscaling/v2 are: up at once by at most double or
4 pods per 15 s, down only to the highest recommendation of the last 300 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_operator.tuner.samples import Phase

from trimtab_simulator.policies.policy import PolicyActions, PolicyInput
from trimtab_simulator.policies.signals import Sliding, num_pods, running, samples, waiting

SYNC_SECONDS = 15.0
TOLERANCE = 0.1

KEDA_POLL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Behavior:
    """`spec.behavior`: stabilization windows, and how far one period may move. Times are in seconds.

    Up to the lowest recommendation of `up_window`, at most to `up_factor` times the pods or `up_pods` more of them,
    whichever allows more. Down to the highest of `down_window`, by at most `down_pods`.
    """

    up_window: float = 0.0
    up_factor: float = 2.0
    up_pods: int = 4
    up_period: float = 15.0
    down_window: float = 300.0
    down_pods: float = math.inf
    down_period: float = 15.0


def per_pod(target: float) -> Callable[[PolicyInput], int]:
    """Return a recommendation from the mean of num_requests_running over pods against `target` (a metric of type
    Pods).
    """

    def recommend(view: PolicyInput) -> int:
        pods = num_pods(view)
        loads = [
            running(snapshot)
            for snapshot in view.snapshots
            if snapshot.phase is Phase.READY and snapshot.sample is not None
        ]
        if not loads:
            return pods
        ratio = sum(loads) / len(loads) / target
        missing = pods - len(loads)
        if missing <= 0:
            return pods if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * len(loads))
        # Pods without a metric count as idle when that argues for more, as at their target when it argues for fewer.
        filled = [*loads, *([0.0 if ratio > 1 else target] * missing)]
        rebalanced = sum(filled) / len(filled) / target
        if abs(rebalanced - 1) <= TOLERANCE or (ratio > 1) != (rebalanced > 1):
            return pods
        wanted = math.ceil(rebalanced * len(filled))
        return pods if (wanted < pods) == (rebalanced > 1) else wanted

    return recommend


def total(read: Callable[[PolicyInput], float], target: float) -> Callable[[PolicyInput], int]:
    """Return a recommendation from a sum over pods, `target` per pod (a metric of type External, as KEDA creates
    it).
    """

    def recommend(view: PolicyInput) -> int:
        pods = num_pods(view)
        value = read(view)
        if pods and abs(value / (target * pods) - 1) <= TOLERANCE:
            return pods
        return math.ceil(value / target)

    return recommend


class Hpa:
    """One autoscaler with one metric, read at most every `poll_seconds`."""

    def __init__(
        self,
        name: str,
        recommend: Callable[[PolicyInput], int],
        *,
        behavior: Behavior | None = None,
        poll_seconds: float = SYNC_SECONDS,
    ) -> None:
        self.name = name
        self.tick_seconds = SYNC_SECONDS
        self.reads_requests = False
        self._recommend = recommend
        self._behavior = behavior or Behavior()
        self._poll_seconds = poll_seconds
        self._polled: tuple[float, PolicyInput] | None = None
        self._recent_up = Sliding(self._behavior.up_window)
        self._recent_down = Sliding(self._behavior.down_window)
        self._last: tuple[float, int] | None = None  # (time, pods) of the previous sync
        self._changes: deque[tuple[float, int]] = deque()  # (time of the request, change of pods)

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one sync."""
        if not samples(view):
            return PolicyActions()
        if self._polled is None or view.now - self._polled[0] >= self._poll_seconds:
            self._polled = (view.now, view)
        pods = num_pods(view)
        wanted = self._recommend(_with_pods_of(self._polled[1], view))
        # A new autoscaler records the present pods as its first recommendation.
        for recommended in (wanted,) if self._last is not None else (pods, wanted):
            self._recent_up.add(view.now, recommended)
            self._recent_down.add(view.now, recommended)
        stable = int(max(self._recent_up.lowest, min(pods, self._recent_down.highest)))
        if self._last is not None:
            self._changes.append((self._last[0], pods - self._last[1]))
        self._last = (view.now, pods)
        return PolicyActions(replicas=max(1, self._limit(stable, pods, view.now)))

    def _limit(self, wanted: int, pods: int, now: float) -> int:
        """Return `wanted` within the allowed change since the start of a period."""
        behavior = self._behavior
        while self._changes and self._changes[0][0] <= now - max(behavior.up_period, behavior.down_period):
            self._changes.popleft()
        if wanted > pods:
            before = pods - sum(n for at, n in self._changes if n > 0 and at > now - behavior.up_period)
            most = max(math.ceil(behavior.up_factor * before), before + behavior.up_pods)
            return max(pods, min(wanted, most))
        before = pods - sum(n for at, n in self._changes if n < 0 and at > now - behavior.down_period)
        return min(pods, max(wanted, int(max(0.0, before - behavior.down_pods))))


def _with_pods_of(polled: PolicyInput, now: PolicyInput) -> PolicyInput:
    """Combine polled metrics, which may be older, with the present number of pods."""
    return now if polled.now == now.now else PolicyInput(now.now, now.desired, now.parameters, polled.snapshots)


def hpa_running(target: float) -> Hpa:
    """Return an HPA on the mean of num_requests_running."""
    return Hpa("hpa-running", per_pod(target))


def keda_queue(target: float) -> Hpa:
    """Return KEDA on the sum of num_requests_waiting, `target` per pod."""
    return Hpa("keda-queue", total(waiting, target), poll_seconds=KEDA_POLL_SECONDS)
