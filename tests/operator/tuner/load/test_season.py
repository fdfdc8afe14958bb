"""Usual rate by time of day: learned over periods, robust against gaps and clock changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_operator.tuner.load.demand import Point
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS, MAX_CHANGE, Season

SAMPLE_SECONDS = 300.0
MONDAY = 20_000 * DAY_SECONDS
HOUR = 3600.0


def daily(at: float) -> float:
    """Return a rate that is high at six in the evening and low at six in the morning."""
    return 10.0 - 5.0 * math.sin(2 * math.pi * at / DAY_SECONDS)


def after(
    season: Season, rate: Callable[[float], float], *, begin: float, seconds: float, gaps: Iterable[range] = ()
) -> Season:
    """Return the season after samples every five minutes, except in the gaps (minutes from the beginning)."""
    missing = {minute for gap in gaps for minute in gap}
    for index in range(round(seconds / SAMPLE_SECONDS)):
        at = begin + (index + 1) * SAMPLE_SECONDS
        if round(index * SAMPLE_SECONDS / 60) not in missing:
            season = season.with_point(Point(at, SAMPLE_SECONDS, SAMPLE_SECONDS * rate(at - SAMPLE_SECONDS / 2)))
    return season


def test_nothing_is_known_before_a_day_has_been_seen() -> None:
    most_of_it = after(Season(), daily, begin=MONDAY, seconds=20 * HOUR)
    assert not most_of_it.is_known
    assert after(most_of_it, daily, begin=MONDAY + 20 * HOUR, seconds=4 * HOUR).is_known


@pytest.mark.parametrize("days", [1, 2, 5])
def test_the_shape_of_a_day_is_learned(days: int) -> None:
    season = after(Season(), daily, begin=MONDAY, seconds=days * DAY_SECONDS)
    now = MONDAY + days * DAY_SECONDS
    for hour in range(24):
        at = now + hour * HOUR
        assert season.rate_at(at) == pytest.approx(daily(at), rel=0.05)
        assert season.change(at, at + HOUR) == pytest.approx(daily(at + HOUR) / daily(at), rel=0.05)


def test_busier_day_does_not_predict_a_decline() -> None:
    """Today is twice as high: counted hours of it must not be compared with the others."""
    season = after(Season(), daily, begin=MONDAY, seconds=2 * DAY_SECONDS)
    now = MONDAY + 2 * DAY_SECONDS + 11 * HOUR
    season = after(season, lambda at: 2 * daily(at), begin=MONDAY + 2 * DAY_SECONDS, seconds=11 * HOUR)
    assert season.change(now, now + HOUR) == pytest.approx(daily(now + HOUR) / daily(now), rel=0.05)


def test_later_days_count_more_than_the_first() -> None:
    season = after(Season(), lambda _: 4.0, begin=MONDAY, seconds=5 * DAY_SECONDS)
    season = after(season, lambda _: 8.0, begin=MONDAY + 5 * DAY_SECONDS, seconds=5 * DAY_SECONDS)
    assert season.rate_at(MONDAY) == pytest.approx(8.0 - 4.0 * 0.7**5, rel=0.1)
    assert season.num_periods == 9 or season.num_periods == 10


def test_gaps_are_filled_by_their_neighbours() -> None:
    season = after(Season(), daily, begin=MONDAY, seconds=DAY_SECONDS, gaps=[range(600, 660)])
    assert season.is_known
    assert season.rate_at(MONDAY + 10.5 * HOUR) == pytest.approx(daily(MONDAY + 10.5 * HOUR), rel=0.1)


def test_a_day_with_a_long_gap_is_not_a_day() -> None:
    season = after(Season(), daily, begin=MONDAY, seconds=DAY_SECONDS, gaps=[range(600, 900)])
    assert not season.is_known


def test_change_into_or_out_of_a_gap_is_one() -> None:
    week = Season.of(7 * DAY_SECONDS, buckets=7 * BUCKETS_PER_DAY)
    away = range(3 * 24 * 60, 3 * 24 * 60 + 15 * 60)
    season = after(week, lambda _: 10.0, begin=MONDAY, seconds=7 * DAY_SECONDS, gaps=[away])
    assert season.is_known
    before, within = MONDAY + 2 * DAY_SECONDS, MONDAY + 3 * DAY_SECONDS + 7 * HOUR
    assert season.change(before, within) == season.change(within, before) == 1.0


def test_samples_of_unequal_lengths_lose_no_bucket() -> None:
    quarter = DAY_SECONDS / BUCKETS_PER_DAY
    season = Season()
    for index in range(round(quarter / 5) + 2):
        season = season.with_point(Point(MONDAY + 5.0 * (index + 1), 5.0, 50.0))
    assert [bucket.rate for bucket in season.fresh] == [10.0]
    later = season.with_point(Point(MONDAY + quarter + 12.0, 62.5, 625.0))
    assert later.fresh == season.fresh


def test_partly_observed_bucket_is_dropped() -> None:
    season = (
        Season()
        .with_point(Point(MONDAY + SAMPLE_SECONDS, SAMPLE_SECONDS, 3000.0))
        .with_point(Point(MONDAY + HOUR, SAMPLE_SECONDS, 30.0))
    )
    assert season.fresh == ()


def test_clock_set_back_drops_later_buckets() -> None:
    season = after(Season(), daily, begin=MONDAY, seconds=DAY_SECONDS)
    ahead = after(season, lambda _: 500.0, begin=MONDAY + DAY_SECONDS, seconds=6 * HOUR)
    back = after(ahead, daily, begin=MONDAY + DAY_SECONDS + SAMPLE_SECONDS, seconds=DAY_SECONDS)
    for hour in range(24):
        at = MONDAY + hour * HOUR
        assert back.rate_at(at) == pytest.approx(daily(at), rel=0.05)


def test_a_clock_that_jumped_far_ahead_leaves_a_gap() -> None:
    season = after(Season(), daily, begin=MONDAY, seconds=DAY_SECONDS)
    later = season.with_point(Point(MONDAY + 400 * DAY_SECONDS, SAMPLE_SECONDS, SAMPLE_SECONDS * daily(MONDAY)))
    assert later.is_known
    assert later.fresh == ()
    assert later.rate_at(MONDAY) == pytest.approx(daily(MONDAY), rel=0.05)


def test_week_has_seven_separate_days() -> None:
    def weekly(at: float) -> float:
        return daily(at) * (0.3 if int(at / DAY_SECONDS) % 7 in (2, 3) else 1.0)  # 1970 began on a Thursday

    week = Season.of(7 * DAY_SECONDS, buckets=7 * BUCKETS_PER_DAY)
    assert week.day_seconds == DAY_SECONDS
    season = after(week, weekly, begin=MONDAY, seconds=7 * DAY_SECONDS)
    assert season.is_known
    for day in range(7):
        noon = MONDAY + (day + 7.5) * DAY_SECONDS
        assert season.rate_at(noon) == pytest.approx(weekly(noon), rel=0.05)


snapshots = st.tuples(
    st.floats(-1e6, 1e6), st.floats(0.1, 3000, allow_subnormal=False), st.floats(0, 1e6, allow_subnormal=False)
)


@given(st.lists(snapshots, max_size=300), st.floats(-1e7, 1e7), st.floats(-1e7, 1e7))
def test_season_stays_bounded_for_any_points(told: list[tuple[float, float, float]], now: float, then: float) -> None:
    season = Season()
    for at, seconds, requests in told:
        season = season.with_point(Point(at, seconds, requests))
    assert len(season.rates) == len(season.periods) == BUCKETS_PER_DAY
    assert len(season.fresh) <= BUCKETS_PER_DAY
    assert 1 / MAX_CHANGE <= season.change(now, then) <= MAX_CHANGE
    usual = season.rate_at(now)
    assert usual is None or 0 <= usual < math.inf
