"""Scores of replays."""

from __future__ import annotations

import itertools

import pytest
from trimtab_simulator.replay import Change
from trimtab_simulator.scores import percentile, reversals


def moved(*values: float, every: float = 60.0, target: str = "replicas") -> list[Change]:
    return [Change(i * every, target, a, b) for i, (a, b) in enumerate(itertools.pairwise(values))]


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        (moved(1, 2, 3, 4), 0),
        (moved(1, 2, 1), 1),
        (moved(1, 2, 1, 2, 1), 3),
        (moved(1, 2, 1, 2, 1, every=599), 2),  # the first and the third reversal are more than 10 minutes apart
        ([], 0),
    ],
)
def test_turns_are_counted_within_ten_minutes(changes: list[Change], turns: int) -> None:
    assert reversals(changes) == {"replicas": turns}


def test_each_knob_turns_on_its_own() -> None:
    changes = moved(1, 2, 3) + moved(8, 4, 8, target="max_num_batched_tokens")
    assert reversals(changes) == {"max_num_batched_tokens": 1, "replicas": 0}


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert percentile([], 50) is None
