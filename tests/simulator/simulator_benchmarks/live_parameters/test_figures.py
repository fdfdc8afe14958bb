"""Figures with their limits, and the table: mean and worst over seeds, and seeds within the limit."""

from __future__ import annotations

import pytest
from simulator_benchmarks.live_parameters.figures import Figure, first_token, good_tokens, markdown, reversals_figure
from trimtab_operator.tuner.engine_model import Sequence
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.replay import Change


def answered(arrival: float, ttft: float, *, tokens: int = 10) -> Sequence:
    sequence = Sequence(arrival, 5, tokens)
    sequence.first_token_at, sequence.finished_at = arrival + ttft, arrival + ttft + 1.0
    return sequence


def test_good_tokens_count_attained_requests_in_the_period() -> None:
    served = [answered(1.0, 0.1), answered(12.0, 0.1), answered(13.0, 9.0), answered(14.0, 0.2), answered(25.0, 0.1)]
    assert good_tokens(served, Objectives(1.0), 10.0, 20.0) == 20 / 10
    assert first_token(served, 10.0) == pytest.approx(0.15)


def test_replicas_that_turn_are_no_knobs_that_do() -> None:
    changes = [
        Change(at, target, *values)
        for at, target, values in (
            (0.0, "replicas", (1, 2)), (60.0, "replicas", (2, 1)), (120.0, "replicas", (1, 2)),
            (0.0, "watermark", (0.0, 0.05)), (300.0, "watermark", (0.05, 0.0)),
        )
    ]  # fmt: skip
    assert reversals_figure("storm", "any", 0, changes).value == 1


def test_table_has_mean_worst_and_seeds_within_limit() -> None:
    figures = [
        Figure("scenes", "gaps", seed, "goodput of Off's", value, 1.0) for seed, value in ((0, 1.2), (1, 0.9), (2, 1.5))
    ]
    figures += [Figure("storm", "x", seed, "seconds", value, 30.0, False) for seed, value in ((0, 15.0), (1, 45.0))]
    lines = markdown(figures).splitlines()
    assert lines[2] == "| scenes | gaps | goodput of Off's | 1.2 | 0.9 | ≥ 1 | 2 of 3 |"
    assert lines[3] == "| storm | x | seconds | 30 | 45 | ≤ 30 | 1 of 2 |"
