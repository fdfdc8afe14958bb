"""Kubernetes' Horizontal Pod Autoscaler and policies built on it: a target of running requests, and KEDA's queue.

Defaults of autoscaling/v2: every 15 s, a tolerance of 10 %, up at once by at most double or 4 pods per 15 s, down only
to the highest recommendation of the last 300 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trimtab_operator.tuner.samples import Phase

from trimtab_simulator.policies.policy import PolicyActions, PolicyInput
from trimtab_simulator.policies.signals import Sliding, num_pods, running, samples, waiting

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
DOWN_WINDOW_SECONDS = 300.0
UP_FACTOR, UP_PODS = 2, 4  # per 15 s, whichever allows more

KEDA_POLL_SECONDS = 30.0


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
    """One autoscaler with one metric."""

    def __init__(
        self, name: str, recommend: Callable[[PolicyInput], int], *, poll_seconds: float = SYNC_SECONDS
    ) -> None:
        self.name = name
        self.tick_seconds = SYNC_SECONDS
        self.reads_requests = False
        self._recommend = recommend
        self._poll_seconds = poll_seconds
        self._polled: tuple[float, PolicyInput] | None = None
        self._recent = Sliding(DOWN_WINDOW_SECONDS)

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one sync."""
        if not samples(view):
            return PolicyActions()
        if self._polled is None or view.now - self._polled[0] >= self._poll_seconds:
            self._polled = (view.now, view)
        pods = num_pods(view)
        wanted = self._recommend(_with_pods_of(self._polled[1], view))
        self._recent.add(view.now, wanted)
        if wanted > pods:
            wanted = min(wanted, max(UP_FACTOR * pods, pods + UP_PODS))
        elif wanted < pods:
            wanted = min(pods, int(self._recent.highest))
        return PolicyActions(replicas=max(1, wanted))


def _with_pods_of(polled: PolicyInput, now: PolicyInput) -> PolicyInput:
    """Combine polled metrics, which may be older, with the present number of pods."""
    return now if polled.now == now.now else PolicyInput(now.now, now.desired, now.parameters, polled.snapshots)


def hpa_running(target: float) -> Hpa:
    """Return an HPA on the mean of num_requests_running."""
    return Hpa("hpa-running", per_pod(target))


def keda_queue(target: float) -> Hpa:
    """Return KEDA on the sum of num_requests_waiting, `target` per pod."""
    return Hpa("keda-queue", total(waiting, target), poll_seconds=KEDA_POLL_SECONDS)
