"""Numbers that look random and are the same each time: what predictions draw from, so that equal inputs predict alike.

Two candidates are compared on the same draws. Values are spread evenly before they are shuffled: the mean of a few
hundred is then nearly exact, where independent draws of them would be off by several percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

MASK = (1 << 64) - 1
Item = TypeVar("Item")


class Draws:
    """A stream of numbers (SplitMix64, Steele et al. 2014). The same seed gives the same stream."""

    def __init__(self, seed: int) -> None:
        self._state = seed & MASK

    def number(self) -> int:
        """64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        return mixed ^ (mixed >> 31)

    def share(self) -> float:
        """From 0 to below 1."""
        return (self.number() >> 11) / (1 << 53)

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The same items in another order."""
        result = list(items)
        for index in range(len(result) - 1, 0, -1):
            other = self.number() % (index + 1)
            result[index], result[other] = result[other], result[index]
        return result

    def gaps(self, count: int, *, variation: float) -> list[float]:
        """Times between arrivals, of mean 1 and this coefficient of variation, in random order.

        1 and below: exponential, as of independent arrivals. Above: a mixture of two exponentials with balanced means,
        bursts and lulls.
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
    """The gap below which that share of a mixture of two exponentials lies, one half evenly and one half by its own."""
    if share < often:
        return -short * math.log1p(-share / often)
    return -long * math.log1p(-(share - often) / (1 - often))
