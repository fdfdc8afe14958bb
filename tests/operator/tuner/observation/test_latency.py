"""Latency from histograms."""

import math

import pytest
from trimtab_operator.tuner.observation.latency import percentile, share_within
from trimtab_operator.tuner.samples import Histogram

TTFT = Histogram((0.1, 0.5, 1.0, math.inf), (50.0, 90.0, 98.0, 100.0), 30.0)


@pytest.mark.parametrize(
    ("target", "share", "is_exact"),
    [
        (0.5, 0.90, True),  # an edge
        (0.3, 0.70, False),  # in the middle of a wide bucket
        (1.0, 0.98, True),
        (5.0, 0.98, False),  # beyond the last edge nothing is known
    ],
)
def test_the_share_within_a_target(target: float, share: float, is_exact: bool) -> None:
    found = share_within(TTFT, target)
    assert found is not None
    assert found.share == pytest.approx(share)
    assert (found.count, found.is_exact) == (100.0, is_exact)


def test_percentiles_are_interpolated_and_end_at_the_last_edge() -> None:
    assert percentile(TTFT, 90) == pytest.approx(0.5)
    assert percentile(TTFT, 70) == pytest.approx(0.3)
    assert percentile(TTFT, 99) == 1.0


def test_empty_histogram_returns_none() -> None:
    empty = Histogram((0.1, math.inf), (0.0, 0.0), 0.0)
    assert share_within(empty, 0.1) is None
    assert percentile(empty, 95) is None
