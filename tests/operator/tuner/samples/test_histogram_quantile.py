"""Quantiles of histograms are estimated as PromQL does."""

from __future__ import annotations

import math

import pytest
from trimtab_operator.tuner.samples.sample import histogram_quantile


@pytest.mark.parametrize(
    ("counts", "quantile", "value"),
    [
        ((0, 50, 100, 100), 0.9, 1.8),  # 40 of the 50 observations between 1 and 2
        ((10, 10, 10, 10), 0.5, 0.25),  # half of the first bucket, which begins at 0
        ((0, 0, 0, 10), 0.9, 2.0),  # above the highest finite edge
        ((0, 0, 0, 0), 0.9, None),
    ],
)
def test_histogram_quantile_interpolates_within_a_bucket(
    counts: tuple[float, ...], quantile: float, value: float | None
) -> None:
    found = histogram_quantile(quantile, (0.5, 1.0, 2.0, math.inf), counts)
    assert found == (None if value is None else pytest.approx(value))
