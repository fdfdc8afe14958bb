"""Deterministic pseudo-random numbers for predictions, so that equal inputs give equal predictions.

Two candidates are compared on the same numbers. Values are spread evenly before they are shuffled: the mean of a few
hundred is then nearly exact, while independent samples would be off by several percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

MASK = (1 << 64) - 1
Item = TypeVar("Item")


class Draws:
    """A stream of numbers (SplitMix64, Steele et al. 2014), determined by the seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & MASK

    def number(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        return mixed ^ (mixed >> 31)

    def share(self) -> float:
        """Return a number from 0 to below 1."""
        return (self.number() >> 11) / (1 << 53)

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in another order."""
        result = list(items)
        for index in range(len(result) - 1, 0, -1):
            other = self.number() % (index + 1)
            result[index], result[other] = result[other], result[index]
        return result

    def gaps(self, count: int, *, variation: float) -> list[float]:
        """Return interarrival times of mean 1 and this coefficient of variation, in random order.

        Up to 1.05: exponential, as of independent arrivals. Above: a mixture of two exponentials with balanced means
        (bursts and lulls).
        """
        shares = self.shuffled([(index + 0.5) / count for index in range(count)])
        if variation <= 1.05:
            gaps = [-math.log1p(-share) for share in shares]
        else:
            square = variation * variation
            often = (1 + math.sqrt((square - 1) / (square + 1))) / 2
            short, long = 1 / (2 * often), 1 / (2 * (1 - often))
            gaps = [_of_mixture(share, often, short, long) for share in shares]
        mean = sum(gaps) / count
        return [gap / mean for gap in gaps]


def _of_mixture(share: float, often: float, short: float, long: float) -> float:
    """Return the gap at that share of the mixture of two exponentials, each half by its own distribution."""
    if share < often:
        return -short * math.log1p(-share / often)
    return -long * math.log1p(-(share - often) / (1 - often))
