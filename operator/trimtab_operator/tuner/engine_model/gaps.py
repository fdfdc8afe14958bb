"""Histogram of gaps between tokens with fine buckets, filled for a whole run of steps at a time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Values

SHORTEST_SECONDS = 1e-4
LONGEST_SECONDS = 1e4
PER_DECADE = 100  # buckets: 2.3 % wide


def fine_edges(others: Values[float] = ()) -> list[float]:
    """Return upper edges of the fine buckets, including `others`, so that counts at those edges are exact."""
    low, high = round(math.log10(SHORTEST_SECONDS)), round(math.log10(LONGEST_SECONDS))
    edges = {10 ** (low + i / PER_DECADE) for i in range((high - low) * PER_DECADE + 1)}
    return sorted(edges.union(others))


class Gaps:
    """Histogram of seconds. A bucket holds values above the previous edge and up to its own."""

    __slots__ = ("_edges", "counts", "total_seconds")

    def __init__(self, edges: list[float]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Add `count` gaps of that length."""
        self.counts[bisect_left(self._edges, seconds)] += count
        self.total_seconds += seconds * count

    def add_run(self, first: float, increase: float, steps: int, count_per_step: int) -> None:
        """Add `count_per_step` gaps for each of `steps` steps; the first takes `first` seconds and each later one
        `increase` more.
        """
        edges, counts = self._edges, self.counts
        self.total_seconds += count_per_step * (steps * first + increase * steps * (steps - 1) / 2)
        bucket = bisect_left(edges, first)
        done = 0
        while done < steps:
            if increase <= 0 or bucket >= len(edges):
                upto = steps
            else:
                upto = min(steps, max(done, math.floor((edges[bucket] - first) / increase) + 1))
            counts[bucket] += count_per_step * (upto - done)
            done = upto
            bucket += 1

    def merge(self, other: Gaps) -> None:
        """Add the counts of `other`, which has the same edges."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_seconds += other.total_seconds

    def percentile(self, percent: float) -> float | None:
        """Return the interpolated percentile; None without gaps."""
        return percentile(self.counts, self._edges, percent)

    def at_most(self, edge: float) -> int:
        """Return the number of gaps up to that edge, which must be one of the edges."""
        return sum(self.counts[: bisect_left(self._edges, edge) + 1])


def percentile(counts: Values[int], edges: Values[float], percent: float) -> float | None:
    """Return the interpolated percentile of these counts; None if they are all zero."""
    total = sum(counts)
    if not total:
        return None
    rank = total * percent / 100
    seen = 0
    for bucket, count in enumerate(counts):
        if count and seen + count >= rank:
            if bucket >= len(edges):
                return edges[-1]
            low = edges[bucket - 1] if bucket else 0.0
            return low + (edges[bucket] - low) * max(0.0, rank - seen) / count
        seen += count
    return edges[-1]
