"""Send times of requests."""

import itertools
import math
import statistics

import pytest
from trimtab_engine.bench.serving.arrivals import RampUp, arrival_times, recorded_times
from trimtab_engine.bench.serving.samples import Sample


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def variation(times: list[float]) -> float:
    return statistics.stdev(gaps(times)) / statistics.mean(gaps(times))


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0] * 3


def test_last_request_matches_the_rate() -> None:
    for seed in range(5):
        assert arrival_times(50, rate=10.0, burstiness=1.0, seed=seed)[-1] == pytest.approx(5.0)


@pytest.mark.parametrize(("burstiness", "low", "high"), [(1.0, 0.9, 1.1), (0.25, 1.7, 2.3), (25.0, 0.17, 0.23)])
def test_burstiness_sets_variation_of_gaps(burstiness: float, low: float, high: float) -> None:
    assert low < variation(arrival_times(4000, rate=5.0, burstiness=burstiness, seed=1)) < high


def test_infinite_burstiness_gives_constant_gaps() -> None:
    assert arrival_times(4, rate=2.0, burstiness=math.inf, seed=0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_ramp_changes_rate_from_start_to_end() -> None:
    assert RampUp("linear", 1, 5).at(0.5) == 3
    assert RampUp("exponential", 1, 16).at(0.5) == pytest.approx(4)
    times = arrival_times(3, rate=math.inf, burstiness=math.inf, seed=0, ramp_up=RampUp("linear", 1, 4))
    assert gaps([0.0, *times]) == pytest.approx([1.0, 1 / 2.5, 1 / 4])


def test_recorded_times_are_those_of_the_samples() -> None:
    assert recorded_times([Sample("a", 1, 1, timestamp=0.0), Sample("b", 1, 1, timestamp=2.5)]) == [0.0, 2.5]
