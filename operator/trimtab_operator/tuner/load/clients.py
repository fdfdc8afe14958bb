"""Whether requests come from clients that wait: each sends its next one when it has its answer.

Then as many come as end, whatever the engine does, and fewer seats or a fuller cache lower what comes. What is there of
a stream that nobody holds back changes by chance, as counts do: from look to look by about as many as have come, or, of
requests that are soon over, by about as many as are there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

LOOKED = 6  # looks that count: a load changes
LEAST_STEPS = 2  # from look to look
LEAST_TURNOVER = 8.0  # requests that others took the place of: fewer tell nothing
BALANCED = 0.2  # of the variance that counts of a stream would have


@dataclass(frozen=True, slots=True)
class Count:
    """One look at all replicas that can be believed."""

    replicas: int
    there: float
    """Requests that run or wait."""
    waiting: float
    ended: float
    """Since the look before."""

    @property
    def turnover(self) -> float:
        """How many of those that are there came in the place of others."""
        return min(self.there, self.ended)


@dataclass(frozen=True, slots=True)
class Clients:
    """What the last looks counted."""

    counts: tuple[Count, ...] = ()

    def with_count(self, count: Count) -> Clients:
        """After one more look. Who begins or ceases to be read changes what is there: then it begins anew."""
        if self.counts and self.counts[-1].replicas != count.replicas:
            return Clients((count,))
        return Clients((*self.counts, count)[-LOOKED:])

    @property
    def do_wait(self) -> bool:
        """Whether as many come as end, while some wait: what comes then is no stream that could be queued."""
        steps = list(itertools.pairwise(self.counts))
        turnover = sum(after.turnover for _, after in steps)
        if len(steps) < LEAST_STEPS or turnover < LEAST_TURNOVER:
            return False
        if 2 * sum(1 for _, after in steps if after.waiting >= 1) < len(steps):
            return False  # nothing is held back: seats and cache have room for all of them
        return sum((after.there - before.there) ** 2 for before, after in steps) <= BALANCED * turnover
