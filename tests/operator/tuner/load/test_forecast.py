"""A forecast proves itself against the constant load, and its use ends when it is wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from trimtab_operator.tuner.load.demand import Demand, Growth, Point
from trimtab_operator.tuner.load.forecast import Forecast, State
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, Season

DAY = 7200.0  # a replay at twelve times the speed
SAMPLE_SECONDS = 15.0
HORIZON = 135.0


def daily(at: float) -> float:
    return 15.0 - 10.0 * math.sin(2 * math.pi * at / DAY)


def flat(at: float) -> float:
    return 15.0


def run_forecast(
    rate: Callable[[float], float], *, history: Callable[[float], float] | None, seconds: float = DAY, seed: int = 0
) -> tuple[Forecast, list[State]]:
    """Return the forecast and its states during a day of samples of a Poisson load at this rate, after a day of
    `history`.
    """
    rng = random.Random(seed)
    season = Season.of(DAY)
    for index in range(round(DAY / SAMPLE_SECONDS) if history is not None else 0):
        at = (index + 1) * SAMPLE_SECONDS - DAY
        season = season.with_point(
            Point(at, SAMPLE_SECONDS, SAMPLE_SECONDS * history(at - SAMPLE_SECONDS / 2) if history is not None else 0.0)
        )
    forecast, naive, demand, states = Forecast(season), Growth(), Demand(), []
    for index in range(round(seconds / SAMPLE_SECONDS)):
        now = (index + 1) * SAMPLE_SECONDS
        came = max(0.0, rng.gauss(SAMPLE_SECONDS * rate(now), math.sqrt(SAMPLE_SECONDS * rate(now))))
        demand = demand.with_point(Point(now, SAMPLE_SECONDS, came))
        naive = naive.with_errors(demand, now)
        level = demand.level(60.0)
        forecast = forecast.with_observation(demand, naive, level=level, now=now, horizon=HORIZON)
        if level is not None:
            naive = naive.with_prediction(now + HORIZON, level)
        states.append(forecast.state)
    return forecast, states


def test_forecast_is_learning_without_a_day_of_history() -> None:
    forecast, states = run_forecast(daily, history=None, seconds=0.85 * DAY)
    assert set(states) == {State.LEARNING}
    assert not forecast.errors.cases
    assert forecast.since is None


def test_forecast_is_unproven_during_the_first_hour() -> None:
    _, states = run_forecast(daily, history=daily, seconds=DAY / 24 + HORIZON)
    assert set(states) == {State.UNPROVEN}


@pytest.mark.parametrize("seed", range(3))
def test_accurate_forecast_comes_into_use_and_stays(seed: int) -> None:
    forecast, states = run_forecast(daily, history=daily, seed=seed)
    assert states.count(State.IN_USE) > 0.75 * len(states)
    assert forecast.state is State.IN_USE
    assert forecast.own_error is not None
    assert forecast.naive_error is not None
    assert forecast.own_error < forecast.naive_error


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wrong", [lambda at: daily(at + DAY / 2), lambda at: daily(7 * at), flat])
def test_wrong_forecast_is_rarely_in_use(wrong: Callable[[float], float], seed: int) -> None:
    _, states = run_forecast(daily, history=wrong, seed=seed)
    assert states.count(State.IN_USE) < 0.1 * len(states)


def test_forecast_use_ends_when_the_day_is_flat() -> None:
    _, states = run_forecast(lambda at: daily(at) if at < DAY / 2 else flat(at), history=daily)
    half = len(states) // 2
    assert states[half - 1] is State.IN_USE
    assert State.IN_USE not in states[half + round(DAY / 6 / SAMPLE_SECONDS) :]


def test_night_without_requests_keeps_forecast_in_use() -> None:
    """No requests arrive for longer than errors are remembered; the first hour of the morning is when the forecast
    matters.
    """

    def by_day(at: float) -> float:
        return 20.0 * max(0.0, -math.sin(2 * math.pi * at / DAY))

    forecast, states = run_forecast(by_day, history=by_day, seconds=2 * DAY)
    evening, morning = (round(share * len(states)) for share in (0.5, 0.76))
    assert states[evening - 2] is State.IN_USE
    assert set(states[evening:morning]) == {State.IN_USE}
    assert forecast.since is not None


def test_forecast_recovers_from_clock_change() -> None:
    """After a clock change the load comes an hour earlier than the season: the error must not exceed that of a constant
    load.
    """
    forecast, states = run_forecast(lambda at: daily(at + DAY / 24), history=daily)
    assert states.count(State.IN_USE) > 0.5 * len(states)
    assert forecast.own_error is not None
    assert forecast.naive_error is not None
    assert forecast.own_error < 1.05 * forecast.naive_error


def test_forecast_rate_is_proportional_to_the_level() -> None:
    forecast = Forecast(run_forecast(daily, history=daily)[0].season)
    now = 3000.0
    once, twice = (forecast.rate(level, now, now + 600.0) for level in (5.0, 10.0))
    assert twice == 2 * once
    assert once == pytest.approx(5.0 * daily(now + 600.0) / daily(now), rel=0.1)


def test_the_interval_is_that_of_its_own_errors() -> None:
    forecast, _ = run_forecast(daily, history=daily)
    low, high = forecast.interval(0.9, prior_sd=0.16)
    assert 0.7 < low < 1.0 < high < 1.0 + 0.16 * 1.3  # narrower than the prior
    wider = Forecast(Season.of(DAY, buckets=BUCKETS_PER_DAY)).interval(0.9, prior_sd=0.16)
    assert wider == pytest.approx((math.exp(-0.16 * 1.2816), math.exp(0.16 * 1.2816)), rel=1e-3)
