"""Cap on running requests with additive growth and multiplicative cuts: prime-rl's client-side rule.

It grows only while KV cache usage is below its target and the cap is used; growth tapers from 1.20× to 1.00× as the
usage nears 0.8. It trims at 0.8 to inflight × 0.7 / usage, and cuts at 0.9 and when preemptions rise. Replicas stay
fixed.
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.parameters import Parameter

from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput
from trimtab_simulator.policies.signals import samples

TICK_SECONDS = 15.0
SOFT_USAGE, HARD_USAGE, AIM_USAGE = 0.8, 0.9, 0.7
MOST_GROWTH = 0.20
CUT = 0.7
SETTLED = 0.9  # of the cap must run before it grows


class Aimd:
    """Changes only max_num_seqs, by the fullest replica."""

    def __init__(self, most: int) -> None:
        self.name = "aimd"
        self.tick_seconds = TICK_SECONDS
        self.reads_requests = False
        self._most = most
        self._preemptions: dict[str, float] = {}

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one adjustment."""
        seen = samples(view)
        if not seen:
            return STAY
        usage = max(sample.gauges.kv_usage for sample in seen)
        inflight = max(sample.gauges.running for sample in seen)
        rose = self._has_preempted(view)
        cap = float(view.parameters[Parameter.MAX_NUM_SEQS])
        if rose or usage >= HARD_USAGE:
            wanted = min(cap, inflight) * CUT
        elif usage >= SOFT_USAGE:
            wanted = min(cap, inflight * AIM_USAGE / usage)
        elif inflight >= SETTLED * cap:
            wanted = math.ceil(cap * (1 + MOST_GROWTH * (1 - usage / SOFT_USAGE)))
        else:
            return STAY
        return PolicyActions(parameters={Parameter.MAX_NUM_SEQS: max(1, min(self._most, int(wanted)))})

    def _has_preempted(self, view: PolicyInput) -> bool:
        """Return True if any replica has preempted since the previous tick."""
        now = {
            snapshot.replica: sum(snapshot.sample.counters.preemptions.values())
            for snapshot in view.snapshots
            if snapshot.sample is not None
        }
        rose = any(count > self._preemptions.get(name, count) for name, count in now.items())
        self._preemptions = now
        return rose
