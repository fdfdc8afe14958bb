"""Simulation of several cores on a trace."""

import pytest
from engine_benchmarks.balance_bench import POLICIES, Figures, simulate
from trimtab_engine.bench.serving.traces import TraceRequest

ALTERNATING = [TraceRequest(0.02 * number, 400, 200 if number % 2 else 5) for number in range(120)]
"""Every second request is long: round robin sends all of those to one of two cores."""


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    return {policy: simulate(ALTERNATING, policy, num_cores=2) for policy in POLICIES}


def test_round_robin_alternates_and_balancer_follows_load(figures: dict[str, Figures]) -> None:
    blind, balanced = figures["round robin"], figures["least loaded, exact admission"]
    assert blind.requests_max_over_mean > 1.5
    assert balanced.requests_max_over_mean < 1.2
    assert balanced.kv_max_over_mean < blind.kv_max_over_mean


def test_same_trace_gives_same_figures(figures: dict[str, Figures]) -> None:
    assert simulate(ALTERNATING, "round robin", num_cores=2) == figures["round robin"]
