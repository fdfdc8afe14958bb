"""Gaps between tokens: a run of steps counts like its single steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_operator.tuner.engine_model.gaps import Gaps, fine_edges


@given(
    first=st.floats(1e-4, 0.5),
    increase=st.one_of(st.just(0.0), st.floats(1e-7, 1e-2)),
    steps=st.integers(1, 300),
    each=st.integers(1, 5),
)
def test_a_run_counts_as_its_steps_one_by_one(first: float, increase: float, steps: int, each: int) -> None:
    at_once, singly = Gaps(fine_edges()), Gaps(fine_edges())
    at_once.add_run(first, increase, steps, each)
    for step in range(steps):
        singly.add(first + increase * step, each)
    assert at_once.total_seconds == pytest.approx(singly.total_seconds)
    moved = sum(abs(a - b) for a, b in zip(at_once.counts, singly.counts, strict=True))
    assert moved <= 2 * each  # one gap may be on an edge, by rounding


def test_percentiles_lie_within_the_width_of_a_fine_bucket() -> None:
    gaps = Gaps(fine_edges())
    for milliseconds in range(1, 101):
        gaps.add(milliseconds / 1000, 1)
    assert gaps.percentile(50) == pytest.approx(0.050, rel=0.03)
    assert gaps.percentile(95) == pytest.approx(0.095, rel=0.03)
    assert Gaps(fine_edges()).percentile(50) is None


def test_counts_at_another_histograms_edges_are_exact() -> None:
    edges = fine_edges([0.025, 0.075])
    gaps = Gaps(edges)
    gaps.add(0.025, 3)
    gaps.add(0.0251, 2)
    assert (gaps.at_most(0.025), gaps.at_most(0.075)) == (3, 5)
