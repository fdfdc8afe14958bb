"""Fixed replicas and parameters: the start values stay."""

from __future__ import annotations

import math

from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput


class Fixed:
    """Changes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tick_seconds = math.inf
        self.reads_requests = False

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Return no change."""
        return STAY
