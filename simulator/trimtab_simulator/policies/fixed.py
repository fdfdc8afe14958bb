"""Nobody steers: the replicas and knobs of the start stay."""

from __future__ import annotations

import math

from trimtab_simulator.policies.policy import STAY, PolicyActions, View


class Fixed:
    """Does nothing, ever."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tick_seconds = math.inf
        self.reads_requests = False

    def decide(self, view: View) -> PolicyActions:
        """Stay."""
        return STAY
