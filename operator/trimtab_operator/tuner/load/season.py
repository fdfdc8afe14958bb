"""Usual arrival rates by time of the day or week, learned over periods.

A period has buckets of a quarter of an hour, each with a mean rate: the first three periods count equally, later ones
with exponential weights. Arrivals count half a period later, so that all buckets around the present one come from the
same periods and can be compared: if today were half as high again and counted at once, the following hours would look
like a decline.

Times are Unix times, and buckets are in UTC. After a daylight-saving change the load comes an hour earlier, and the
late shape has to prove itself like any other (`forecast`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trimtab_operator.tuner.load.demand import Point

DAY_SECONDS = 86_400.0
BUCKETS_PER_DAY = 96
MOST_BUCKETS = 7 * BUCKETS_PER_DAY
RECENT_WEIGHT = 0.3  # of the newest period, once there are more than three
MOST_PERIODS = 9999  # that are counted
LEAST_SEEN = 0.5  # of a bucket's time; with less it is dropped
LEAST_KNOWN = 0.9  # of the buckets of a period
SMOOTH_BUCKETS = 2.0  # standard deviation of the smoothing kernel: two days differ by as much
REACH = 4  # buckets on each side of the kernel
LEAST_RATE_SHARE = 0.02  # of the mean rate: floor of a bucket, because a few requests at night are chance
MAX_CHANGE = 4.0  # of a predicted factor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rate in one bucket of time; `number` counts buckets since 1970."""

    number: int
    rate: float


@dataclass(frozen=True, slots=True)
class Season:
    """Rates by time of the period."""

    period_seconds: float = DAY_SECONDS
    rates: tuple[float | None, ...] = (None,) * BUCKETS_PER_DAY
    """Requests a second per bucket; None before it was observed."""
    periods: tuple[int, ...] = (0,) * BUCKETS_PER_DAY
    """Number of periods in each bucket."""
    fresh: tuple[Bucket, ...] = ()
    """Buckets of the last half period, oldest first, which count later."""
    number: int | None = None
    """Number of the current bucket."""
    seconds: float = 0.0
    requests: float = 0.0

    @classmethod
    def of(cls, period_seconds: float, *, buckets: int = BUCKETS_PER_DAY) -> Season:
        """Return an empty season."""
        return cls(period_seconds, (None,) * buckets, (0,) * buckets)

    @property
    def bucket_seconds(self) -> float:
        """Length of a bucket."""
        return self.period_seconds / len(self.rates)

    @property
    def day_seconds(self) -> float:
        """Length of a day; shorter when a trace is replayed faster."""
        return self.bucket_seconds * BUCKETS_PER_DAY

    def fits(self, period_seconds: float, buckets: int) -> bool:
        """Return True if it has this period and number of buckets."""
        return self.period_seconds == period_seconds and len(self.rates) == buckets

    @property
    def is_known(self) -> bool:
        """True if a whole period has been observed, except for some gaps."""
        return sum(rate is not None for rate in self.shape) >= LEAST_KNOWN * len(self.rates)

    @property
    def shape(self) -> tuple[float | None, ...]:
        """Usual rate of each bucket; in the first period as far as observed."""
        shape = list(self.rates)
        for bucket in self.fresh:
            index = bucket.number % len(shape)
            if shape[index] is None:
                shape[index] = bucket.rate
        return tuple(shape)

    @property
    def num_periods(self) -> int:
        """Number of periods in the median bucket."""
        return max(1, sorted(self.periods)[len(self.periods) // 2])

    @property
    def highest(self) -> float:
        """Highest rate of a bucket."""
        return max((rate for rate in self.shape if rate is not None), default=0.0)

    def with_point(self, point: Point) -> Season:
        """Return the season with one more sample. After a clock was set back, later buckets are dropped."""
        number = math.floor((point.at - point.seconds / 2) / self.bucket_seconds)
        if number == self.number or self._is_of_both(number, point):
            return replace(self, seconds=self.seconds + point.seconds, requests=self.requests + point.requests)
        closed = self._closed()
        kept = tuple(bucket for bucket in closed.fresh if bucket.number < number)
        begun = replace(closed, fresh=kept, number=number, seconds=point.seconds, requests=point.requests)
        return begun._counted(number - len(self.rates) // 2)

    def _is_of_both(self, number: int, point: Point) -> bool:
        """Return True if a point that mostly lies before the current bucket ends in it: samples have unequal lengths,
        and no clock was set back.
        """
        return self.number is not None and number < self.number <= point.at / self.bucket_seconds

    def rate_at(self, at: float) -> float | None:
        """Return the usual rate at that time, smoothed; None if unknown."""
        place = at / self.bucket_seconds - 0.5
        before = math.floor(place)
        later = place - before
        shape = self.shape
        one, other = _smooth(shape, before), _smooth(shape, before + 1)
        return None if one is None or other is None else (1 - later) * one + later * other

    def change(self, now: float, then: float) -> float:
        """Return the usual factor between the rates at two times; 1 if one of them is in a gap."""
        usual, other = self.rate_at(now), self.rate_at(then)
        if usual is None or other is None:
            return 1.0
        known = [rate for rate in self.shape if rate is not None]
        least = max(LEAST_RATE_SHARE * math.fsum(known) / max(1, len(known)), 1e-9)
        factor = max(other, least) / max(usual, least)
        return min(MAX_CHANGE, max(1 / MAX_CHANGE, factor))

    def _closed(self) -> Season:
        """Return the season with the current bucket completed."""
        if self.number is None or self.seconds < LEAST_SEEN * self.bucket_seconds:
            return self
        ended = Bucket(self.number, _round_rate(self.requests / self.seconds))
        return replace(self, fresh=(*self.fresh, ended)[-len(self.rates) :])

    def _counted(self, until: int) -> Season:
        """Return the season with the buckets up to that one added to the shape."""
        due = [bucket for bucket in self.fresh if bucket.number <= until]
        if not due:
            return self
        rates, periods = list(self.rates), list(self.periods)
        for bucket in due:
            index = bucket.number % len(rates)
            before, weight = rates[index], max(RECENT_WEIGHT, 1 / (periods[index] + 1))
            rates[index] = bucket.rate if before is None else _round_rate(before + weight * (bucket.rate - before))
            periods[index] = min(MOST_PERIODS, periods[index] + 1)
        return replace(self, rates=tuple(rates), periods=tuple(periods), fresh=self.fresh[len(due) :])


def _round_rate(rate: float) -> float:
    """Return the rate with as many digits as are stored."""
    return float(f"{rate:.4g}")


def _smooth(shape: tuple[float | None, ...], number: int) -> float | None:
    total = weights = 0.0
    for away, weight in _BELL:
        rate = shape[(number + away) % len(shape)]
        if rate is not None:
            total, weights = total + weight * rate, weights + weight
    return total / weights if weights else None


_BELL = [(away, math.exp(-0.5 * (away / SMOOTH_BUCKETS) ** 2)) for away in range(-REACH, REACH + 1)]
"""Smoothing weights of adjacent buckets, by distance."""
