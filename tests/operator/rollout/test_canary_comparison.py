"""Comparison of a canary with other replicas: only clear regressions are reported, with numbers."""

from __future__ import annotations

from typing import Any

import pytest
from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.rollout.canary_comparison import (
    MAX_KEPT_REQUESTS,
    MIN_REQUESTS,
    CanaryComparison,
    find_regression,
)
from trimtab_operator.tuner.samples import Counters, Finished, Gauges, RequestUpdates, Sample


def requests(count: int = 40, **changes: Any) -> tuple[Finished, ...]:
    """Return requests with a TTFT of 0.2 s and an ITL of 20 ms."""
    row = {"prompt_tokens": 100, "output_tokens": 11, "ttft_seconds": 0.2, "decode_seconds": 0.2, **changes}
    return tuple(Finished(arrived_at=20.0 * number, finished_at=20.0 * number + 1.0, **row) for number in range(count))


def comparison(new: tuple[Finished, ...], old: tuple[Finished, ...]) -> CanaryComparison:
    return CanaryComparison("c", {"m-g1": new}, {"m-g0": old})


FINE = requests()
BROKEN = (*requests(35), *requests(5, reason="error"))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (FINE, None),
        (BROKEN, "12% of its 40 requests failed; other replicas: 0%"),
        ((*requests(38), *requests(2, reason="error")), None),  # two may be anything
        (requests(preemptions=1), "its requests were preempted 1.0 times each; other replicas: 0.0 times"),
        (requests(ttft_seconds=0.5), "the median TTFT with equal prefill work is 0.500 s; other replicas: 0.200 s"),
        (requests(ttft_seconds=0.39), None),  # slower, not clearly
        (requests(decode_seconds=0.5), "the median ITL with equal load is 0.050 s; other replicas: 0.020 s"),
        (requests(MIN_REQUESTS - 1, ttft_seconds=9.0), None),  # too few to compare
        (requests(reason="abort", output_tokens=1, decode_seconds=None), None),  # clients that disconnected
    ],
)
def test_clear_regression_is_described(new: tuple[Finished, ...], said: str | None) -> None:
    assert find_regression(comparison(new, FINE), is_same_model=True) == said


def test_equal_error_rates_are_no_regression() -> None:
    assert find_regression(comparison(BROKEN, BROKEN), is_same_model=True) is None


def test_other_model_is_compared_by_failures_only() -> None:
    assert (
        find_regression(comparison(requests(ttft_seconds=9.0, decode_seconds=9.0), FINE), is_same_model=False) is None
    )
    assert find_regression(comparison(BROKEN, FINE), is_same_model=False) is not None


def test_cached_prompts_are_compared_by_computed_tokens() -> None:
    cached = requests(cached_tokens=90, ttft_seconds=0.01)
    assert find_regression(comparison(FINE, cached), is_same_model=True) is None


def test_comparison_keeps_bounded_requests_of_both_sides() -> None:
    def telling(rows: tuple[Finished, ...]) -> EngineObservation:
        sample = Sample(1.0, Counters(0, 0, 0, {}), Gauges(0, 0, 0.0), requests=RequestUpdates(rows, ()))
        return EngineObservation(True, sample=sample)

    engines = {"m-g0": telling(FINE), "m-g1": telling(BROKEN), "m-g2": EngineObservation(True, "no answer")}
    found = CanaryComparison("c").with_finished(engines, {"m-g1", "m-g2"}, {"m-g0", "m-g3"})
    assert (found.new, found.old) == ({"m-g1": BROKEN}, {"m-g0": FINE})
    for _ in range(60):
        found = found.with_finished(engines, {"m-g1"}, {"m-g0"})
    assert (len(found.new["m-g1"]), len(found.old["m-g0"])) == (MAX_KEPT_REQUESTS, MAX_KEPT_REQUESTS)
