"""How many requests come, how unevenly, and how much that grows within the time that a replica needs to start.

Counted on arrival. What a replica whose numbers cannot be believed got is taken to be what the others got each.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

KEEP_SECONDS = 6 * 3600.0
RECENT_SECONDS = 3600.0  # in which every point is kept: nothing but the highest rate is asked of older ones
MOST_QUIET_SECONDS = 300.0  # that one older point stands for, if nothing came
QUIET_BEFORE_SECONDS = 120.0  # of points before one in which something came: a rate over a minute may begin with them
THINNED_EVERY = 64  # points
FRESH_SECONDS = 300.0  # over which unevenness is measured
LEAST_POINTS = 6
MAX_DISPERSION = 25.0  # of counts: gaps with a coefficient of variation of 5
TREND_SECONDS = 60.0
CHANCE_ERRORS = 3.0  # standard errors of a count that chance does not explain
MOST_TREND = 0.3  # a load that has changed more is as if it had changed by this
STEADY_SECONDS = 600.0  # over which few requests are taken to come at one rate, unless they clearly do not
STEADY_REQUESTS = 10.0  # that this counts as, beside those that were counted
CLEARLY = 4.0  # standard deviations from the rate before: a jump, however few requests came
VARIANCE_STEADYING = 3 / 8  # added to a count, whose root then has the same spread whatever its mean (Anscombe 1948)


@dataclass(frozen=True, slots=True)
class Point:
    """What came in the `seconds` before `at`. `work` weighs each request by its prompt; 1 is the usual one's."""

    at: float
    seconds: float
    requests: float
    work: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Demand:
    """Arrivals of a deployment over the last hours, one point per look."""

    points: tuple[Point, ...] = ()

    def with_point(self, point: Point) -> Demand:
        """After one more look."""
        if point.seconds <= 0 or (self.points and point.at <= self.points[-1].at):
            return self
        first = 0
        while first < len(self.points) and self.points[first].at < point.at - KEEP_SECONDS:
            first += 1
        points = (*self.points[first:], point)
        return replace(self, points=_thinned(points) if len(points) % THINNED_EVERY == 0 else points)

    def rate(self, seconds: float, *, until: float | None = None) -> float | None:
        """Requests a second over the last `seconds`; None where nothing was seen."""
        found = self._last(seconds, until)
        total = math.fsum(point.seconds for point in found)
        return math.fsum(point.requests for point in found) / total if total > 0 else None

    def risen(self, seconds: float) -> float | None:
        """The rate of the latter half of the last `seconds`, where it clearly is higher than that of the former: a load
        that has just risen, of which the mean of both tells what has passed. Else the rate of all of them."""
        rate = self.rate(seconds)
        late = self._last(seconds / 2, None)
        early = self.rate(seconds / 2, until=late[0].at - late[0].seconds) if late else None
        if rate is None or not early:
            return rate
        counted, requests = math.fsum(p.seconds for p in late), math.fsum(p.requests for p in late)
        came, usual = (math.sqrt(count + VARIANCE_STEADYING) for count in (requests, early * counted))
        return requests / counted if 2 * (came - usual) > CLEARLY else rate

    def level(self, seconds: float, *, until: float | None = None) -> float | None:
        """What rate the last `seconds` tell of. Three requests in a minute are three by chance: few of them count
        together with those of the ten minutes before, as the mean of a gamma distribution does that begins with
        STEADY_REQUESTS at the rate of these. Many count alone, and so do few that are a jump."""
        found = self._last(seconds, until)
        counted = math.fsum(point.seconds for point in found)
        if counted <= 0:
            return None
        requests = math.fsum(point.requests for point in found)
        before = self.rate(STEADY_SECONDS, until=found[0].at - found[0].seconds)
        if not before:
            return requests / counted
        came, usual = (math.sqrt(count + VARIANCE_STEADYING) for count in (requests, before * counted))
        if 2 * abs(came - usual) > CLEARLY:
            return requests / counted
        return (requests + STEADY_REQUESTS) / (counted + STEADY_REQUESTS / before)

    def trend(self) -> float:
        """Logarithm of the level of the last minute over that of the three before, within MOST_TREND; 0: not known."""
        if not self.points:
            return 0.0
        now = self.level(TREND_SECONDS)
        before = self.level(3 * TREND_SECONDS, until=self.points[-1].at - TREND_SECONDS)
        if not now or not before:
            return 0.0
        return max(-MOST_TREND, min(MOST_TREND, math.log(now / before)))

    def has_doubled(self, within: float) -> bool:
        """Whether the rate of the last minute is twice what it was at some time in the `within` seconds before, and
        more than chance can make of it."""
        rate = self.rate(TREND_SECONDS)
        if not rate:
            return False
        newest = self.points[-1].at
        before = [
            self.rate(TREND_SECONDS, until=point.at)
            for point in self._last(within, newest - 1e-3)
            if point.at - self.points[0].at >= TREND_SECONDS / 2
        ]
        lowest = min((past for past in before if past is not None), default=rate)
        grown = (rate - lowest) * TREND_SECONDS
        return rate >= 2 * lowest and grown >= CHANCE_ERRORS * math.sqrt((rate + lowest) * TREND_SECONDS)

    def seen_seconds(self, seconds: float) -> float:
        """How much of the last `seconds` was seen."""
        return math.fsum(point.seconds for point in self._last(seconds, None))

    def highest(self, seconds: float) -> float:
        """The highest rate over so many seconds that is remembered; 0 before anything was seen."""
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
        """Variance of counts over their mean, free of slow trends: 1 for independent arrivals, more for bursts.

        From differences of neighbouring points, whose mean square is twice the variance.
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
        """Points of the last `seconds` before the newest, or before `until`."""
        if not self.points:
            return []
        end = self.points[-1].at if until is None else until
        last = bisect_left(self.points, end + 1e-6, key=lambda point: point.at)
        first = last
        while first > 0 and self.points[first - 1].at - self.points[first - 1].seconds / 2 > end - seconds:
            first -= 1
        return list(self.points[first:last])


def _thinned(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The same, where long ago nothing came in fewer points: a thousand resources at rest for hours are not to be
    remembered every five seconds."""
    old = bisect_left(points, points[-1].at - RECENT_SECONDS, key=lambda point: point.at)
    kept: list[Point] = []
    quiet = 0.0  # seconds in which nothing came, after the point in hand
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


LEARN_SECONDS = 4 * 3600.0  # of errors: a quantile of old ones says little
LEAST_ERRORS = 80.0  # alike cases, before which the prior speaks too: an hour shows a few jumps at most
ALIKE = 0.04  # of trends: the width of the bell by which cases count, as wide as chance moves the trend of a usual load
CAME_SECONDS = 120.0  # over which that is counted which came: a queue adds up, and one minute's chance is no growth


@dataclass(frozen=True, slots=True)
class Case:
    """What was foreseen for `at`, under which trend; `error` is the logarithm of what came over it, once it came."""

    at: float
    rate: float
    trend: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """How much more came than was foreseen, one start-up ahead: logarithms of ratios, learned as time passes.

    Each look notes what it foresees; when that time has come, what came is compared. A load that has been level seldom
    jumps, one that rises mostly goes on: cases count by how alike their trends are.
    """

    open: tuple[Case, ...] = ()
    cases: tuple[Case, ...] = ()

    def foreseen(self, at: float, rate: float, trend: float = 0.0) -> Growth:
        """Remember what is foreseen for a time to come."""
        return replace(self, open=(*self.open, Case(at, rate, trend))) if rate > 0 else self

    def settled(self, demand: Demand, now: float) -> Growth:
        """Compare what was foreseen for up to now with what came in the CAME_SECONDS around it."""
        due = [case for case in self.open if case.at + CAME_SECONDS / 2 <= now]
        if not due:
            return self
        cases = list(self.cases)
        for case in due:
            came = demand.level(CAME_SECONDS, until=case.at + CAME_SECONDS / 2)
            if came is not None and came > 0:
                cases.append(replace(case, error=math.log(came / case.rate)))
        kept = tuple(case for case in cases if case.at > now - LEARN_SECONDS)
        return Growth(self.open[len(due) :], kept)

    def quantile(self, share: float, *, prior_sd: float, trend: float = 0.0) -> float:
        """The factor that what came exceeded in 1 − `share` of the cases with such a trend. Until enough is learned,
        that of a lognormal of the prior's spread, which counts as LEAST_ERRORS cases."""
        prior = _normal_quantile(share) * prior_sd
        weighed = sorted((case.error, math.exp(-0.5 * ((case.trend - trend) / ALIKE) ** 2)) for case in self.cases)
        total = math.fsum(weight for _, weight in weighed)
        if total <= 0:
            return math.exp(prior)
        left, own = share * total, weighed[-1][0]
        for error, weight in weighed:
            left -= weight
            if left < 0:
                own = error
                break
        known = min(1.0, total / LEAST_ERRORS)
        return math.exp(known * own + (1 - known) * prior)


def _normal_quantile(share: float) -> float:
    """A quantile of the standard normal distribution (Abramowitz and Stegun 26.2.23, within 5e-4)."""
    tail = min(share, 1 - share)
    t = math.sqrt(-2 * math.log(max(tail, 1e-9)))
    value = t - (2.515517 + 0.802853 * t + 0.010328 * t * t) / (
        1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t * t * t
    )
    return value if share >= 0.5 else -value
