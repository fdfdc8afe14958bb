"""Arrival rates: level, burstiness, and growth within the time that a replica needs to start.

Requests are counted on arrival. A replica with invalid metrics is assumed to get as many as the others.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

KEEP_SECONDS = 6 * 3600.0
RECENT_SECONDS = 3600.0  # in which every point is kept; older ones are only used for the highest rate
CLOCK_STEP_SECONDS = 60.0  # more than samples of several replicas differ in time
MOST_QUIET_SECONDS = 300.0  # that one older point without arrivals covers
QUIET_BEFORE_SECONDS = 120.0  # of points kept before arrivals: a one-minute rate may begin with them
THINNED_EVERY = 64  # points
FRESH_SECONDS = 300.0  # over which dispersion is measured
LEAST_POINTS = 6
MAX_DISPERSION = 25.0  # of counts: gaps with a coefficient of variation of 5
STEADY_SECONDS = 600.0  # over which few requests are assumed to have a constant rate, unless they clearly do not
STEADY_REQUESTS = 10.0  # weight of that rate, in requests
CLEARLY = 4.0  # standard deviations from the earlier rate that are a jump, even with few requests
VARIANCE_STEADYING = 3 / 8  # added to a count, whose root then has the same spread whatever its mean (Anscombe 1948)


@dataclass(frozen=True, slots=True)
class Point:
    """Arrivals in the `seconds` before `at`."""

    at: float
    seconds: float
    requests: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Demand:
    """Arrivals of a deployment over the last hours, one point per sample."""

    points: tuple[Point, ...] = ()

    def with_point(self, point: Point) -> Demand:
        """Return the demand with one more sample. Points move with a clock that was set back."""
        if point.seconds <= 0:
            return self
        if self.points and self.points[-1].at - point.at > CLOCK_STEP_SECONDS:
            return self._shifted(point.at - point.seconds - self.points[-1].at).with_point(point)
        if self.points and point.at <= self.points[-1].at:
            return self
        first = 0
        while first < len(self.points) and self.points[first].at < point.at - KEEP_SECONDS:
            first += 1
        points = (*self.points[first:], point)
        return replace(self, points=_merge_idle_points(points) if len(points) % THINNED_EVERY == 0 else points)

    def _shifted(self, seconds: float) -> Demand:
        return replace(self, points=tuple(replace(point, at=point.at + seconds) for point in self.points))

    def rate(self, seconds: float, *, until: float | None = None) -> float | None:
        """Return requests a second over the last `seconds`; None without observations."""
        found = self._last(seconds, until)
        total = math.fsum(point.seconds for point in found)
        return math.fsum(point.requests for point in found) / total if total > 0 else None

    def rate_since_rise(self, seconds: float) -> float | None:
        """Return the rate since the clearest rise within the last `seconds`, at most half of them long; None without a
        clear one. The mean of a minute in which the load rose describes the past.
        """
        rate, clearest, spread = None, CLEARLY, math.sqrt(self.dispersion())
        counted = requests = 0.0
        for point in reversed(self._last(seconds / 2, None)):
            counted, requests = counted + point.seconds, requests + point.requests
            before = self.level(seconds / 2, until=point.at - point.seconds)
            if before is None:
                continue
            observed, usual = (math.sqrt(count + VARIANCE_STEADYING) for count in (requests, before * counted))
            if 2 * (observed - usual) / spread > clearest:
                rate, clearest = requests / counted, 2 * (observed - usual) / spread
        return rate

    def level(self, seconds: float, *, until: float | None = None) -> float | None:
        """Return the estimated rate of the last `seconds`.

        Few requests are combined with the ten minutes before, as the mean of a gamma distribution with a prior of
        STEADY_REQUESTS at their rate. Many requests, or a jump, count by themselves.
        """
        found = self._last(seconds, until)
        counted = math.fsum(point.seconds for point in found)
        if counted <= 0:
            return None
        requests = math.fsum(point.requests for point in found)
        before = self.rate(STEADY_SECONDS, until=found[0].at - found[0].seconds)
        if not before:
            return requests / counted
        observed, usual = (math.sqrt(count + VARIANCE_STEADYING) for count in (requests, before * counted))
        if 2 * abs(observed - usual) > CLEARLY:
            return requests / counted
        return (requests + STEADY_REQUESTS) / (counted + STEADY_REQUESTS / before)

    def seen_seconds(self, seconds: float) -> float:
        """Return how much of the last `seconds` was observed."""
        return math.fsum(point.seconds for point in self._last(seconds, None))

    def highest(self, seconds: float) -> float:
        """Return the highest remembered rate over this many seconds; 0 without observations."""
        most = total = count = 0.0
        first = 0
        for point in self.points:
            total, count = total + point.seconds, count + point.requests
            while total - self.points[first].seconds >= seconds - 1e-6:
                total, count = total - self.points[first].seconds, count - self.points[first].requests
                first += 1
            if total >= seconds / 2:
                most = max(most, count / total)
        return most

    def dispersion(self) -> float:
        """Return the index of dispersion of counts (variance over mean), free of slow trends: 1 for Poisson arrivals,
        more for bursts.

        Computed from differences of adjacent points, whose mean square is twice the variance.
        """
        found = self._last(FRESH_SECONDS * 2, None)
        if len(found) < LEAST_POINTS:
            return 1.0
        mean = math.fsum(point.requests for point in found) / len(found)
        if mean <= 0:
            return 1.0
        squares = math.fsum((b.requests - a.requests) ** 2 for a, b in itertools.pairwise(found))
        return min(MAX_DISPERSION, max(1.0, squares / (2 * (len(found) - 1)) / mean))

    def _last(self, seconds: float, until: float | None) -> list[Point]:
        """Return the points of the last `seconds` before the newest one, or before `until`."""
        if not self.points:
            return []
        end = self.points[-1].at if until is None else until
        last = bisect_left(self.points, end + 1e-6, key=lambda point: point.at)
        first = last
        while first > 0 and self.points[first - 1].at - self.points[first - 1].seconds / 2 > end - seconds:
            first -= 1
        return list(self.points[first:last])


def _merge_idle_points(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Merge old points without arrivals, so that a thousand idle resources do not keep a point per five seconds."""
    old = bisect_left(points, points[-1].at - RECENT_SECONDS, key=lambda point: point.at)
    kept: list[Point] = []
    quiet = 0.0  # seconds without arrivals after the current point
    for point in reversed(points[:old]):
        after = kept[-1] if kept else None
        if (
            after is not None
            and quiet >= QUIET_BEFORE_SECONDS
            and point.requests == after.requests == 0
            and point.seconds + after.seconds <= MOST_QUIET_SECONDS
            and abs(after.at - after.seconds - point.at) < 1.0
        ):
            kept[-1] = replace(after, seconds=point.seconds + after.seconds)
        else:
            kept.append(point)
        quiet = quiet + point.seconds if point.requests == 0 else 0.0
    return (*reversed(kept), *points[old:])


LEARN_SECONDS = 4 * 3600.0  # of errors; older ones are not representative
LEAST_ERRORS = 80.0  # cases below which the prior counts too: twenty minutes show a few jumps at most
LEAST_RATE = 1 / 60  # requests a second that a pause counts as
OBSERVED_SECONDS = 120.0  # window of the observed rate: one minute's chance is not growth


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction for `at`; `error` is the logarithm of observed over predicted."""

    at: float
    rate: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Prediction errors one lead time ahead: logarithms of observed over predicted rates.

    Each sample adds a prediction; when its time has come, the observed rate is compared.
    """

    open: tuple[Case, ...] = ()
    cases: tuple[Case, ...] = ()

    def with_prediction(self, at: float, rate: float) -> Growth:
        """Return the growth with a prediction for a later time."""
        return replace(self, open=(*self.open, Case(at, max(rate, LEAST_RATE)))) if self.open or rate > 0 else self

    def with_errors(self, demand: Demand, now: float) -> Growth:
        """Return the growth with due predictions compared with the rate in the OBSERVED_SECONDS around their time."""
        due = [case for case in self.open if case.at + OBSERVED_SECONDS / 2 <= now]
        if not due:
            return self
        cases = list(self.cases)
        for case in due:
            observed = demand.level(OBSERVED_SECONDS, until=case.at + OBSERVED_SECONDS / 2)
            if observed is not None:
                cases.append(replace(case, error=math.log(max(observed, LEAST_RATE) / case.rate)))
        kept = tuple(case for case in cases if case.at > now - LEARN_SECONDS)
        return Growth(tuple(case for case in self.open if case.at + OBSERVED_SECONDS / 2 > now), kept)

    def quantile(self, share: float, *, prior_sd: float) -> float:
        """Return the factor that the observed rate exceeded in 1 − `share` of the cases.

        Until enough is learned, a lognormal prior of spread `prior_sd` counts as LEAST_ERRORS cases.
        """
        prior, count = _normal_quantile(share) * prior_sd, len(self.cases)
        if not count:
            return math.exp(prior)
        errors = sorted(case.error for case in self.cases)
        own = errors[min(count - 1, int(share * count))]
        known = min(1.0, count / LEAST_ERRORS)
        return math.exp(known * own + (1 - known) * prior)


def _normal_quantile(share: float) -> float:
    """Return a quantile of the standard normal distribution (Abramowitz and Stegun 26.2.23, within 5e-4)."""
    tail = min(share, 1 - share)
    t = math.sqrt(-2 * math.log(max(tail, 1e-9)))
    value = t - (2.515517 + 0.802853 * t + 0.010328 * t * t) / (
        1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t * t * t
    )
    return value if share >= 0.5 else -value
