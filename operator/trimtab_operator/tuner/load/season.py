"""How many requests usually come at each time of the day, or of the week: a shape, learned period by period.

A period is cut into buckets of a quarter of an hour, and each remembers its mean rate: the first three periods count
alike, later ones by exponential weights. What came counts half a period later. Until then all buckets around the
present one are of the same periods, so that two of them compare: were today's half as high again, and counted at once,
all that is to come would look as if it fell.

Times are Unix times, buckets those of UTC: where clocks are put forward the load comes an hour earlier, and a shape
that is an hour late has to prove itself like any other (`forecast`).
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
LEAST_SEEN = 0.5  # of a bucket's time: of less nothing is remembered
LEAST_KNOWN = 0.9  # of the buckets: fewer are not yet a period
SMOOTH_BUCKETS = 2.0  # standard deviation of the bell under which neighbours count: two days differ by as much
REACH = 4  # buckets to each side under that bell
LEAST_RATE_SHARE = 0.02  # of the mean rate, that every bucket has at least: at night a few requests are chance
MOST_CHANGE = 4.0  # factor that the shape may foretell


@dataclass(frozen=True, slots=True)
class Bucket:
    """What came while one bucket of time lasted, `number` being how many such buckets passed since 1970."""

    number: int
    rate: float


@dataclass(frozen=True, slots=True)
class Season:
    """Rates by time of the period."""

    period_seconds: float = DAY_SECONDS
    rates: tuple[float | None, ...] = (None,) * BUCKETS_PER_DAY
    """Of each bucket, in requests a second; None before it was seen."""
    periods: tuple[int, ...] = (0,) * BUCKETS_PER_DAY
    """Of how many periods each is."""
    fresh: tuple[Bucket, ...] = ()
    """Those of the last half period, oldest first: they count later."""
    number: int | None = None
    """The bucket that is being filled."""
    seconds: float = 0.0
    requests: float = 0.0

    @classmethod
    def of(cls, period_seconds: float, *, buckets: int = BUCKETS_PER_DAY) -> Season:
        """One of which nothing is known."""
        return cls(period_seconds, (None,) * buckets, (0,) * buckets)

    @property
    def bucket_seconds(self) -> float:
        """How long a bucket lasts."""
        return self.period_seconds / len(self.rates)

    @property
    def day_seconds(self) -> float:
        """How long a day lasts: it is shorter where a trace is replayed faster."""
        return self.bucket_seconds * BUCKETS_PER_DAY

    def fits(self, period_seconds: float, buckets: int) -> bool:
        """Whether it is of this period, cut into as many buckets."""
        return self.period_seconds == period_seconds and len(self.rates) == buckets

    @property
    def is_known(self) -> bool:
        """Whether a period has been seen, but for some gaps."""
        return sum(rate is not None for rate in self.shape) >= LEAST_KNOWN * len(self.rates)

    @property
    def shape(self) -> tuple[float | None, ...]:
        """The usual rate of each bucket; in the first period as far as it has come."""
        shape = list(self.rates)
        for bucket in self.fresh:
            index = bucket.number % len(shape)
            if shape[index] is None:
                shape[index] = bucket.rate
        return tuple(shape)

    @property
    def num_periods(self) -> int:
        """How many periods the usual bucket is of."""
        return max(1, sorted(self.periods)[len(self.periods) // 2])

    @property
    def highest(self) -> float:
        """The highest rate of a bucket."""
        return max((rate for rate in self.shape if rate is not None), default=0.0)

    def with_point(self, point: Point) -> Season:
        """After one more look. A clock that went back takes what it had run ahead of with it."""
        number = math.floor((point.at - point.seconds / 2) / self.bucket_seconds)
        if number == self.number or self._is_of_both(number, point):
            return replace(self, seconds=self.seconds + point.seconds, requests=self.requests + point.requests)
        closed = self._closed()
        kept = tuple(bucket for bucket in closed.fresh if bucket.number < number)
        begun = replace(closed, fresh=kept, number=number, seconds=point.seconds, requests=point.requests)
        return begun._counted(number - len(self.rates) // 2)

    def _is_of_both(self, number: int, point: Point) -> bool:
        """Whether a point, most of which lies before the bucket that is being filled, ends in it: looks are of unequal
        lengths, and no clock went back."""
        return self.number is not None and number < self.number <= point.at / self.bucket_seconds

    def rate_at(self, at: float) -> float | None:
        """The usual rate at that time, smoothed; None where nothing is known."""
        place = at / self.bucket_seconds - 0.5
        before = math.floor(place)
        later = place - before
        shape = self.shape
        one, other = _smoothed(shape, before), _smoothed(shape, before + 1)
        return None if one is None or other is None else (1 - later) * one + later * other

    def change(self, now: float, then: float) -> float:
        """The factor by which the rate usually changes between two times; 1 where one of them is in a gap."""
        usual, other = self.rate_at(now), self.rate_at(then)
        if usual is None or other is None:
            return 1.0
        known = [rate for rate in self.shape if rate is not None]
        least = max(LEAST_RATE_SHARE * math.fsum(known) / max(1, len(known)), 1e-9)
        factor = max(other, least) / max(usual, least)
        return min(MOST_CHANGE, max(1 / MOST_CHANGE, factor))

    def _closed(self) -> Season:
        """After the bucket that was being filled has ended."""
        if self.number is None or self.seconds < LEAST_SEEN * self.bucket_seconds:
            return self
        ended = Bucket(self.number, _rounded(self.requests / self.seconds))
        return replace(self, fresh=(*self.fresh, ended)[-len(self.rates) :])

    def _counted(self, until: int) -> Season:
        """After those up to that bucket have become part of the shape."""
        due = [bucket for bucket in self.fresh if bucket.number <= until]
        if not due:
            return self
        rates, periods = list(self.rates), list(self.periods)
        for bucket in due:
            index = bucket.number % len(rates)
            before, weight = rates[index], max(RECENT_WEIGHT, 1 / (periods[index] + 1))
            rates[index] = bucket.rate if before is None else _rounded(before + weight * (bucket.rate - before))
            periods[index] = min(MOST_PERIODS, periods[index] + 1)
        return replace(self, rates=tuple(rates), periods=tuple(periods), fresh=self.fresh[len(due) :])


def _rounded(rate: float) -> float:
    """The rate with as many digits as are stored."""
    return float(f"{rate:.4g}")


def _smoothed(shape: tuple[float | None, ...], number: int) -> float | None:
    total = weights = 0.0
    for away, weight in _BELL:
        rate = shape[(number + away) % len(shape)]
        if rate is not None:
            total, weights = total + weight * rate, weights + weight
    return total / weights if weights else None


_BELL = [(away, math.exp(-0.5 * (away / SMOOTH_BUCKETS) ** 2)) for away in range(-REACH, REACH + 1)]
"""How much neighbours count, by how many buckets they are away."""
