"""Unix time of the API server, for durations that span processes. No I/O.

Timers of rollouts, node loss and scaling compare times of the operator with times in objects, and with times that a
former leader on another node stored. The clock of the operator's own node is not used for them: within a process time
is monotonic, and its offset comes from the `Date` header of the API server's answers. Later differences are corrected
slowly, so that a step of any clock ends no timer early.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from statistics import median

SAMPLE_SECONDS = 5.0  # between two samples
MAX_SAMPLES = 9  # the median of them ignores single API servers with another clock
TOLERATED_SECONDS = 1.5  # the header has whole seconds
MAX_SLEW = 0.05  # seconds of correction per second


class ServerClock:
    """Clock that returns the API server's Unix time. Before the first sample, it returns the local time."""

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._offset = wall() - monotonic()
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._sampled_at = 0.0
        self._median: float | None = None

    def __call__(self) -> float:
        return self._monotonic() + self._offset

    def observe(self, date: str | None) -> None:
        """Take a sample from the `Date` header of an answer; None if it has none."""
        now = self._monotonic()
        if date is None or (self._samples and now - self._sampled_at < SAMPLE_SECONDS):
            return
        try:
            sample = parsedate_to_datetime(date).timestamp() + 0.5 - now
        except (ValueError, TypeError):
            return
        elapsed, self._sampled_at = now - self._sampled_at, now
        self._samples.append(sample)
        self._median = median(self._samples)
        if len(self._samples) == 1:
            self._offset = sample
            return
        difference = self._median - self._offset
        if abs(difference) > TOLERATED_SECONDS:
            most = MAX_SLEW * elapsed
            self._offset += max(-most, min(most, difference))

    @property
    def skew_seconds(self) -> float:
        """Seconds by which the local clock is ahead of the API server's latest samples; 0 without one."""
        return 0.0 if self._median is None else self._wall() - self._monotonic() - self._median
