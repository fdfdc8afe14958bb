"""The deadline benchmark: figures from waits, and a short run of a tiny model with both policies."""

import asyncio
from pathlib import Path

import pytest
from engine_benchmarks import deadline_bench as bench
from engine_benchmarks.deadline_bench import ORDERS, Figures, figures, measure, medians, said_late
from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.bench.serving.load import Outcome


def test_figures_use_all_requests_and_waits_of_completed_ones() -> None:
    results = [RequestResult(ttft=wait, success=True) for wait in (0.5, 2.0, 2.5, 9.0)]
    results.insert(2, RequestResult(ttft=0.0, success=False))
    found = figures(Outcome(results, 15.0), seconds=10.0, target=2.0, said_late=2)
    assert (found.requests, found.failed, found.said_late, found.overload) == (5, 1, 2, 1.5)
    assert (found.in_time, found.in_time_of_last_half) == (2 / 5, 0.0)
    assert (found.wait_median, found.wait_longest, found.late_wait_median) == (2.25, 9.0, 5.75)
    assert figures(Outcome(results[:2], 15.0), seconds=10.0, target=2.0, said_late=0).late_wait_median == 0
    refused = Outcome([RequestResult(error="HTTP 503")], 1.0)
    with pytest.raises(RuntimeError, match="no request was answered: HTTP 503"):
        figures(refused, seconds=1.0, target=2.0, said_late=0)


def test_medians_are_taken_per_figure() -> None:
    runs = [Figures(float(number), 0.1 * number, *(0.0,) * 8) for number in (1, 9, 2)]
    assert medians(runs) == Figures(2.0, 0.2, *(0.0,) * 8)


def test_late_counter_is_summed_over_engine_cores() -> None:
    page = (
        "# TYPE trimtab_requests_late_total counter\n"
        'trimtab_requests_late_total{engine="0",model_name="m"} 3.0\n'
        'trimtab_requests_late_total{engine="1",model_name="m"} 4.0\n'
    )
    assert said_late(page) == 7


def test_both_policies_complete_same_load(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FULL_BATCHES", 1)
    measured = asyncio.run(
        measure(str(tiny_model), ["--load-format", "dummy"], load=2.0, seconds=0.5, target=1.0, rounds=1)
    )
    for order in ORDERS:
        (run,) = measured["runs"][order]
        assert run == measured["medians"][order]
        assert run["failed"] == 0
        assert 0 <= run["in_time"] <= 1
    assert measured["runs"]["fcfs"][0]["requests"] == measured["runs"]["deadline"][0]["requests"] >= 2
    assert measured["runs"]["fcfs"][0]["said_late"] == 0
