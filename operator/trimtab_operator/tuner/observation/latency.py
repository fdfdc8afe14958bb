"""User-visible latency from histograms: shares within a target and percentiles, with the number of observations."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from trimtab_operator.tuner.samples import Histogram

COARSE_WIDTH = 0.3  # of the target: a wider bucket is inexact


@dataclass(frozen=True, slots=True)
class Share:
    """Share of `count` observations that met a target. `is_exact`: the target is an edge, or its bucket is narrow."""

    share: float
    count: float
    is_exact: bool


def share_within(histogram: Histogram, target: float) -> Share | None:
    """Return the share of observations of at most `target`, interpolated within its bucket; None without any."""
    total = histogram.counts[-1] if histogram.counts else 0.0
    if total <= 0:
        return None
    index = bisect_left(histogram.edges, target)
    upper = histogram.edges[index] if index < len(histogram.edges) else math.inf
    lower = histogram.edges[index - 1] if index else 0.0
    below = histogram.counts[index - 1] if index else 0.0
    if upper == target:
        return Share(histogram.counts[index] / total, total, True)
    if not math.isfinite(upper):  # observations beyond the last edge count as too late
        return Share(below / total, total, False)
    inside = (histogram.counts[index] - below) * (target - lower) / (upper - lower)
    return Share((below + inside) / total, total, (upper - lower) <= COARSE_WIDTH * target)


def percentile(histogram: Histogram, percent: float) -> float | None:
    """Return the interpolated percentile; the last finite edge if it is beyond; None without observations."""
    total = histogram.counts[-1] if histogram.counts else 0.0
    if total <= 0:
        return None
    rank = total * percent / 100
    index = bisect_left(histogram.counts, rank)
    upper = histogram.edges[index]
    lower = histogram.edges[index - 1] if index else 0.0
    if not math.isfinite(upper):
        return lower
    below = histogram.counts[index - 1] if index else 0.0
    within = histogram.counts[index] - below
    return upper if within <= 0 else lower + (upper - lower) * (rank - below) / within
