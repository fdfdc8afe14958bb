"""One replica: an engine in virtual time, from its request to its removal."""

from __future__ import annotations

import math

from trimtab_operator.tuner.engine_model import EngineModel, Sequence
from trimtab_operator.tuner.samples import Phase


class Replica:
    """`count` is its number of requests when last refreshed; it is valid until `quiet_until`."""

    __slots__ = (
        "count",
        "engine",
        "gone_at",
        "name",
        "num_sent",
        "number",
        "phase",
        "quiet_until",
        "ready_at",
        "requested_at",
        "since",
    )

    def __init__(self, number: int, engine: EngineModel, requested_at: float, ready_at: float) -> None:
        self.number = number
        """Number of the replica in its fleet, from 0."""
        self.name = f"r{number}"
        self.engine = engine
        self.requested_at = requested_at
        self.ready_at = ready_at
        self.gone_at = math.inf
        self.phase = Phase.STARTING
        self.since = requested_at  # when the phase began
        self.num_sent = 0
        self.count = 0
        self.quiet_until = -math.inf

    def refresh(self, at: float) -> int:
        """Update and return the number of requests at that time."""
        engine = self.engine
        engine.run_until(at)
        self.count = engine.in_flight(at)
        # Requests that end in the current step count until that step is over.
        self.quiet_until = engine.now if self.count != engine.in_flight(engine.now) else engine.quiet_until()
        return self.count

    def send(self, sequence: Sequence, at: float) -> None:
        """Add a request."""
        engine = self.engine
        engine.run_until(at)
        engine.add(sequence)
        self.num_sent += 1
        self.count += 1
        self.quiet_until = min(self.quiet_until, engine.quiet_until())

    def enter(self, phase: Phase, at: float) -> None:
        """Enter another phase."""
        self.phase = phase
        self.since = at

    @property
    def is_gone(self) -> bool:
        """True if it has been removed and is not billed any more."""
        return self.gone_at < math.inf

    def paid_seconds(self, until: float) -> float:
        """Return the billed seconds by `until`."""
        return max(0.0, min(until, self.gone_at) - self.requested_at)
