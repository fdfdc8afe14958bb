"""KubeAI's autoscaler: the mean of active requests over ten minutes (internal/modelautoscaler/autoscaler.go).

Every 10 s; the replicas are the mean over `target` requests each. Up at once, down after three lower results in a row.
"""

from __future__ import annotations

import math

from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput
from trimtab_simulator.policies.signals import Sliding, in_flight

INTERVAL_SECONDS = 10.0
WINDOW_SECONDS = 600.0
SCALE_DOWN_DELAY_SECONDS = 30.0


class KubeAi:
    """`target` is a Model's targetRequests."""

    def __init__(self, target: float) -> None:
        self.name = "kubeai"
        self.tick_seconds = INTERVAL_SECONDS
        self.reads_requests = False
        self._target = target
        self._active = Sliding(WINDOW_SECONDS)
        self._num_lower = 0

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one interval."""
        self._active.add(view.now, in_flight(view))
        wanted = math.ceil(self._active.mean / self._target)
        if wanted > view.desired:
            self._num_lower = 0
            return PolicyActions(replicas=wanted)
        if wanted == view.desired:
            self._num_lower = 0
            return STAY
        self._num_lower += 1
        if self._num_lower < math.ceil(SCALE_DOWN_DELAY_SECONDS / INTERVAL_SECONDS):
            return STAY
        return PolicyActions(replicas=wanted)
