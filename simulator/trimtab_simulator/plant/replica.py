"""One replica: an engine in virtual time, with a life from being asked for to being gone."""

from __future__ import annotations

import math

from trimtab_operator.tuner.engine_model import EngineModel, Sequence
from trimtab_operator.tuner.samples import Phase


class Replica:
    """`count` is how many requests it had when it was last looked at; it holds until `quiet_until`.

    `news` are requests that have ended since the last look at it, `histograms` what all of them saw.
    """

    __slots__ = (
        "asked_at",
        "count",
        "engine",
        "gone_at",
        "name",
        "num_sent",
        "phase",
        "quiet_until",
        "ready_at",
        "since",
    )

    def __init__(self, name: str, engine: EngineModel, asked_at: float, ready_at: float) -> None:
        self.name = name
        self.engine = engine
        self.asked_at = asked_at
        self.ready_at = ready_at
        self.gone_at = math.inf
        self.phase = Phase.STARTING
        self.since = asked_at  # when the phase began
        self.num_sent = 0
        self.count = 0
        self.quiet_until = -math.inf

    def refresh(self, at: float) -> int:
        """How many requests it has at that time."""
        engine = self.engine
        engine.run_until(at)
        self.count = engine.in_flight(at)
        # What ended in the step that goes on is not known to have ended before that step is over.
        self.quiet_until = engine.now if self.count != engine.in_flight(engine.now) else engine.quiet_until()
        return self.count

    def send(self, sequence: Sequence, at: float) -> None:
        """Give it a request."""
        engine = self.engine
        engine.run_until(at)
        engine.add(sequence)
        self.num_sent += 1
        self.count += 1
        self.quiet_until = min(self.quiet_until, engine.quiet_until())

    def enter(self, phase: Phase, at: float) -> None:
        """Come into another phase of its life."""
        self.phase = phase
        self.since = at

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and costs nothing any more."""
        return self.gone_at < math.inf

    def paid_seconds(self, until: float) -> float:
        """How long it has been paid for by `until`."""
        return max(0.0, min(until, self.gone_at) - self.asked_at)
