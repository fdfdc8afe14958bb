"""How many gaps between two tokens were how long: counts over fine buckets, filled a whole run of steps at a time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Values

SHORTEST_SECONDS = 1e-4
LONGEST_SECONDS = 1e4
PER_DECADE = 100  # buckets: 2.3 % wide


def fine_edges(others: Values[float] = ()) -> list[float]:
    """Upper edges of the fine buckets, and those of `others` among them, so that its counts can be told exactly."""
    low, high = round(math.log10(SHORTEST_SECONDS)), round(math.log10(LONGEST_SECONDS))
    edges = {10 ** (low + i / PER_DECADE) for i in range((high - low) * PER_DECADE + 1)}
    return sorted(edges.union(others))


class Gaps:
    """A histogram of seconds. A bucket holds what is at most its upper edge and above the edge before."""

    __slots__ = ("_edges", "counts", "total_seconds")

    def __init__(self, edges: list[float]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Count `count` gaps of that length."""
        self.counts[bisect_left(self._edges, seconds)] += count
        self.total_seconds += seconds * count

    def add_run(self, first: float, increase: float, steps: int, each: int) -> None:
        """Count `each` gaps in every one of `steps` steps, the first of which took `first` seconds and each later one
        `increase` more than the one before."""
        edges, counts = self._edges, self.counts
        self.total_seconds += each * (steps * first + increase * steps * (steps - 1) / 2)
        bucket = bisect_left(edges, first)
        done = 0
        while done < steps:
            if increase <= 0 or bucket >= len(edges):
                upto = steps
            else:
                upto = min(steps, max(done, math.floor((edges[bucket] - first) / increase) + 1))
            counts[bucket] += each * (upto - done)
            done = upto
            bucket += 1

    def merge(self, other: Gaps) -> None:
        """Count what `other`, which has the same edges, has counted."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_seconds += other.total_seconds

    def percentile(self, percent: float) -> float | None:
        """The length below which `percent` of the gaps are, interpolated within its bucket; None without gaps."""
        return percentile(self.counts, self._edges, percent)

    def at_most(self, edge: float) -> int:
        """How many gaps were at most that long. It must be one of the edges."""
        return sum(self.counts[: bisect_left(self._edges, edge) + 1])


def percentile(counts: Values[int], edges: Values[float], percent: float) -> float | None:
    """The value below which `percent` of what `counts` counted lies; None when that is nothing."""
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
