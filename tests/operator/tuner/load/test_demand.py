"""Demand: rates, dispersion, peaks, and growth above the prediction."""

import math
import random

import pytest
from trimtab_operator.tuner.load import demand
from trimtab_operator.tuner.load.demand import Demand, Growth, Point


def counted(rates: list[float], *, seconds: float = 15.0, burst: int = 1, seed: int = 1) -> Demand:
    """Return Poisson counts at these rates; `burst` requests arrive together."""
    rng = random.Random(seed)
    demand = Demand()
    for index, rate in enumerate(rates):
        mean, count, left = rate * seconds / burst, 0, 0.0
        while (left := left + rng.expovariate(1.0)) < mean:
            count += 1
        demand = demand.with_point(Point((index + 1) * seconds, seconds, count * burst))
    return demand


def test_the_rate_is_that_of_the_last_seconds() -> None:
    demand = Demand().with_point(Point(15, 15, 150)).with_point(Point(30, 15, 300))
    assert demand.rate(15) == 20
    assert demand.rate(30) == 15
    assert Demand().rate(60) is None


@pytest.mark.parametrize(
    ("usual", "latest", "low", "high"),
    [
        (1, 2, 0.07, 0.09),  # four and eight a minute hardly differ
        (1, 32, 2.1, 2.2),  # a jump counts even with few requests
        (150, 180, 11.9, 12.0),  # many requests count
    ],
)
def test_level_follows_many_requests_or_a_jump(usual: int, latest: int, low: float, high: float) -> None:
    demand = Demand()
    for index in range(40):
        demand = demand.with_point(Point(15.0 * (index + 1), 15.0, usual if index < 36 else latest))
    level = demand.level(60.0)
    assert level is not None
    assert low <= level <= high


@pytest.mark.parametrize(
    ("counts", "rate_since_rise"),
    [
        ((30, 30, 30, 30), None),  # steady
        ((30, 30, 82, 82), 82 / 15),  # it rose half a minute ago
        ((30, 30, 30, 82), 82 / 15),  # it rose a quarter of a minute ago
        ((82, 82, 30, 30), None),  # it fell: the queue is still from the first half
        ((30, 30, 40, 40), None),  # possible by chance
        ((1, 0, 3, 2), None),  # possible by chance, with few requests
        ((0, 0, 60, 60), 4.0),  # after a pause
    ],
)
def test_rate_since_rise_needs_clear_rise(counts: tuple[int, ...], rate_since_rise: float | None) -> None:
    demand = Demand()
    for index, count in enumerate(counts):
        demand = demand.with_point(Point(15.0 * (index + 1), 15.0, count))
    assert demand.rate_since_rise(60.0) == (None if rate_since_rise is None else pytest.approx(rate_since_rise))
    assert Demand().rate_since_rise(60.0) is None


@pytest.mark.parametrize("seed", range(4))
def test_bursts_of_requests_are_not_a_rise(seed: int) -> None:
    """Nine requests at a time differ by more from one sample to the next than independent ones."""
    demand = counted([5.0] * 40, burst=9, seed=seed)
    found = [Demand(demand.points[:count]).rate_since_rise(60.0) for count in range(10, 41)]
    assert sum(rate is not None for rate in found) <= 1


def test_without_anything_before_a_level_is_the_rate() -> None:
    assert Demand().level(60.0) is None
    assert Demand().with_point(Point(15.0, 15.0, 3)).level(60.0) == 0.2


@pytest.mark.parametrize(("burst", "low", "high"), [(1, 1.0, 1.6), (9, 5.0, 14.0)])
def test_unevenness_is_measured_through_a_trend(burst: int, low: float, high: float) -> None:
    demand = counted([10 + 0.2 * i for i in range(40)], burst=burst)
    assert low <= demand.dispersion() <= high


def test_the_highest_rate_is_that_of_a_whole_minute() -> None:
    demand = Demand()
    for index, count in enumerate([10, 10, 100, 10, 10, 50, 50, 50, 50, 10]):
        demand = demand.with_point(Point(15.0 * (index + 1), 15.0, count))
    assert demand.highest(60) == 200 / 60
    assert Demand().highest(60) == 0


def test_growth_quantile_covers_repeated_growth() -> None:
    demand, growth = Demand(), Growth()
    for index in range(200):
        now = 15.0 * (index + 1)
        rate = 10.0 * math.exp(0.3 * math.sin(index / 6))
        demand = demand.with_point(Point(now, 15.0, rate * 15))
        growth = growth.with_errors(demand, now)
        growth = growth.with_prediction(now + 135.0, demand.rate(60.0) or 0.0)
    high = growth.quantile(0.9, prior_sd=0.05)
    assert 1.3 < high < 1.9
    assert growth.quantile(0.5, prior_sd=0.05) < high
    assert Growth().quantile(0.9, prior_sd=0.1) == pytest.approx(math.exp(0.128), rel=0.01)


def after_pauses(*, pause: int, active: int) -> Growth:
    """Return the growth observed in an hour of pauses and of 5 requests/s; numbers of samples each."""
    demand, growth = Demand(), Growth()
    for index in range(240):
        now = 15.0 * (index + 1)
        demand = demand.with_point(Point(now, 15.0, 0.0 if index % (pause + active) < pause else 75.0))
        growth = growth.with_errors(demand, now).with_prediction(now + 165.0, demand.level(60.0) or 0.0)
    return growth


def test_load_after_a_pause_is_growth() -> None:
    growth = after_pauses(pause=20, active=20)
    assert growth.quantile(0.8, prior_sd=0.16) > 10
    steady = after_pauses(pause=0, active=20)
    assert steady.quantile(0.8, prior_sd=0.16) == pytest.approx(1.0)


def test_growth_before_the_first_request_is_unknown() -> None:
    assert after_pauses(pause=240, active=0) == Growth()


def test_random_variation_between_minutes_is_not_growth() -> None:
    """Minutes of 11 and of 9 requests a second alternate: two minutes have 10."""
    demand, growth = Demand(), Growth()
    for index in range(600):
        now = 15.0 * (index + 1)
        demand = demand.with_point(Point(now, 15.0, 15.0 * (11 if index // 4 % 2 else 9)))
        growth = growth.with_errors(demand, now).with_prediction(now + 135.0, demand.rate(60.0) or 0.0)
    assert growth.quantile(0.95, prior_sd=0.16) < 1.12  # 10 after 9, and never 11 after 9


def test_thinned_points_give_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def after_hours(every: int) -> Demand:
        monkeypatch.setattr(demand, "THINNED_EVERY", every)
        rng, made = random.Random(7), Demand()
        for index in range(round(5 * 3600 / 5)):
            is_burst = index % 700 in range(3, 3 + rng.randrange(1, 30)) and index < 2500
            made = made.with_point(Point(5.0 * (index + 1), 5.0, rng.randrange(9) if is_burst else 0))
        return made

    thinned, whole = after_hours(64), after_hours(10**9)
    assert len(whole.points) == 3600
    assert len(thinned.points) < 1000
    assert thinned.highest(60.0) == whole.highest(60.0) > 0
    for seconds in (30.0, 60.0, 600.0, 1800.0):
        assert thinned.level(seconds) == whole.level(seconds)
        assert thinned.seen_seconds(seconds) == whole.seen_seconds(seconds)
    assert thinned.dispersion() == whole.dispersion()
    assert math.fsum(point.seconds for point in thinned.points) == math.fsum(point.seconds for point in whole.points)


def test_clock_set_back_keeps_new_points() -> None:
    """A step back by an hour must not hide an hour of arrivals."""
    demand = Demand()
    for index in range(20):
        demand = demand.with_point(Point(7200.0 + 15.0 * index, 15.0, 15.0))
    for index in range(8):
        demand = demand.with_point(Point(3600.0 + 15.0 * index, 15.0, 900.0))
    assert demand.rate(60.0) == pytest.approx(60.0)
    assert demand.points[-1].at == 3600.0 + 15.0 * 7
    dates = [point.at for point in demand.points]
    assert dates == sorted(dates)
    assert demand.rate(300.0, until=3600.0 - 15.0) == pytest.approx(1.0)
