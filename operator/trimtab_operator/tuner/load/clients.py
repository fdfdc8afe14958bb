"""Detection of closed-loop clients: each sends its next request when it has received a response.

Then as many requests arrive as end, whatever the engine does, and fewer slots or a fuller cache reduce arrivals. With
open-loop load the number in flight varies by chance between samples: by about the number of arrivals, or, for short
requests, by about the number in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

MAX_COUNTS = 6  # samples; older ones say nothing about the present load
LEAST_STEPS = 2  # between samples
LEAST_TURNOVER = 8.0  # replaced requests; fewer are not conclusive
BALANCED = 0.2  # of the variance that open-loop counts would have


@dataclass(frozen=True, slots=True)
class Count:
    """Requests of all trusted replicas in one sample."""

    replicas: int
    there: float
    """Waiting and running requests."""
    waiting: float
    ended: float
    """Since the previous sample."""

    @property
    def turnover(self) -> float:
        """Requests in flight that replaced others since the previous sample."""
        return min(self.there, self.ended)


@dataclass(frozen=True, slots=True)
class Clients:
    """Counts of the last samples."""

    counts: tuple[Count, ...] = ()

    def with_count(self, count: Count) -> Clients:
        """Return the counts with one more sample. A changed number of replicas resets them."""
        if self.counts and self.counts[-1].replicas != count.replicas:
            return Clients((count,))
        return Clients((*self.counts, count)[-MAX_COUNTS:])

    @property
    def are_known(self) -> bool:
        """True if there are enough samples to distinguish closed-loop clients from open-loop load."""
        return len(self.counts) == MAX_COUNTS or self.are_closed_loop

    @property
    def are_closed_loop(self) -> bool:
        """True if as many requests arrive as end while some wait."""
        steps = list(itertools.pairwise(self.counts))
        turnover = sum(after.turnover for _, after in steps)
        if len(steps) < LEAST_STEPS or turnover < LEAST_TURNOVER:
            return False
        if 2 * sum(1 for _, after in steps if after.waiting >= 1) < len(steps):
            return False  # nothing waits: slots and cache hold all requests
        return sum((after.there - before.there) ** 2 for before, after in steps) <= BALANCED * turnover
