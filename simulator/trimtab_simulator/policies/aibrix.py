"""AIBrix's PodAutoscaler (pkg/controller/podautoscaler): KPA with a stable and a panic window, and APA.

Every 10 s, windows of 180 and 60 s, a band of ±10 %, at most double or half at once. Stabilization windows work as in
its source: up the highest of 0 s, down the *lowest* of 300 s. KPA divides a value by the target without the number of
pods, so it suits totals: here all running and waiting requests.
"""

from __future__ import annotations

import math

from trimtab_simulator.policies.policy import PolicyActions, PolicyInput
from trimtab_simulator.policies.signals import Sliding, in_flight, num_pods, samples

RESYNC_SECONDS = 10.0
STABLE_SECONDS = 180.0
PANIC_SECONDS = 60.0
PANIC_RATIO = 2.0
TOLERANCE = 0.1
MAX_UP, MAX_DOWN = 2.0, 2.0
DOWN_WINDOW_SECONDS = 300.0


class _AiBrix:
    def __init__(self, name: str, target: float) -> None:
        self.name = name
        self.tick_seconds = RESYNC_SECONDS
        self.reads_requests = False
        self.target = target
        self._recent = Sliding(DOWN_WINDOW_SECONDS)

    def settle(self, wanted: int, pods: int, now: float) -> PolicyActions:
        """Limit the rate, and apply the stabilization windows."""
        wanted = max(math.floor(pods / MAX_DOWN), min(math.ceil(pods * MAX_UP), wanted))
        self._recent.add(now, wanted)
        return PolicyActions(replicas=max(1, int(self._recent.lowest) if wanted < pods else wanted))


class Kpa(_AiBrix):
    """A total over `target`: from the panic window while that is more than twice the stable one."""

    def __init__(self, target: float) -> None:
        super().__init__("aibrix-kpa", target)
        self._stable = Sliding(STABLE_SECONDS)
        self._panic = Sliding(PANIC_SECONDS)
        self._panic_until = -math.inf

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one resync."""
        value = in_flight(view)
        self._stable.add(view.now, value)
        self._panic.add(view.now, value)
        pods = num_pods(view)
        if self._stable.mean <= 0 or self._panic.mean / self._stable.mean > PANIC_RATIO:
            self._panic_until = view.now + STABLE_SECONDS
        is_panic = view.now < self._panic_until
        value = self._panic.mean if is_panic else self._stable.mean
        wanted = math.ceil(value / self.target)
        if pods and abs(value / (self.target * pods) - 1) <= TOLERANCE:
            wanted = pods
        if is_panic:
            wanted = max(wanted, pods)
        return self.settle(wanted, pods, view.now)


class Apa(_AiBrix):
    """Running requests per pod against `target`, with a tolerance band."""

    def __init__(self, target: float) -> None:
        super().__init__("aibrix-apa", target)
        self._mean = Sliding(STABLE_SECONDS)

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one resync."""
        seen = samples(view)
        pods = num_pods(view)
        if not seen:
            return PolicyActions()
        self._mean.add(view.now, sum(sample.gauges.running for sample in seen) / len(seen))
        ratio = self._mean.mean / self.target
        wanted = pods if abs(ratio - 1) <= TOLERANCE else math.ceil(pods * ratio)
        return self.settle(wanted, pods, view.now)
