"""Forecast of arrivals: the present level, scaled by the usual change at this time of the day or week.

A forecast is used only after it has proven itself. Each sample adds a prediction for when a replica requested now could
serve, as `Growth` does for the naive prediction of a constant load. Both are compared with the observed rate. The
forecast is used from when its root mean square error of the last four hours is clearly smaller than the naive one until
it is clearly larger. With less than a period of history it predicts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.load.season import Season

JUDGED_SHARE = 1 / 6  # of a day: age limit of errors
LEAST_JUDGED_SHARE = 1 / 24  # of a day that must have been predicted before a decision
CLEARLY = 1.05  # factor of the errors for starting and for ending its use


class State(StrEnum):
    """State of the forecast."""

    LEARNING = "Learning"
    """Less than a period of history."""
    UNPROVEN = "Unproven"
    """Its errors are not, or not yet known to be, smaller than those of a constant load."""
    IN_USE = "InUse"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Season, recent errors of forecasts, and whether they are good enough."""

    season: Season = field(default_factory=Season)
    errors: Growth = field(default_factory=Growth)
    since: float | None = None
    """Time since which it has been in use."""
    own_error: float | None = None
    """Recent root mean square of the logarithm of observed over predicted; None if too few."""
    naive_error: float | None = None
    """The same for the constant load."""

    @property
    def state(self) -> State:
        """State of the forecast."""
        if not self.season.is_known:
            return State.LEARNING
        return State.UNPROVEN if self.since is None else State.IN_USE

    def rate(self, level: float, now: float, at: float) -> float:
        """Return the predicted rate at `at` for the present level."""
        return level * self.season.change(now, at)

    def interval(self, confident: float, *, prior_sd: float) -> tuple[float, float]:
        """Return the factors that bound observed over predicted rates with confidence `confident` on each side."""
        low, high = (self.errors.quantile(share, prior_sd=prior_sd) for share in (1 - confident, confident))
        return min(1.0, low), max(1.0, high)

    def with_observation(
        self, demand: Demand, naive: Growth, *, level: float | None, now: float, horizon: float
    ) -> Forecast:
        """Return the forecast with the newest point of `demand`. `naive` must already include errors up to now."""
        errors = self.errors.with_errors(demand, now)
        season = self.season.with_point(demand.points[-1])
        after = replace(self, season=season, errors=errors)
        if level is not None and season.is_known:
            rate = after.rate(level, now, now + horizon)
            after = replace(after, errors=errors.with_prediction(now + horizon, rate))
        return after._judged(naive, now)

    def _judged(self, naive: Growth, now: float) -> Forecast:
        """Return the forecast with its use decided by comparing its errors with the naive ones of the same times."""
        day = self.season.day_seconds
        recent = {case.at: case.error for case in self.errors.cases if case.at > now - JUDGED_SHARE * day}
        naive_errors = {case.at: case.error for case in naive.cases if case.at in recent}
        if not self.season.is_known:
            return replace(self, since=None, own_error=None, naive_error=None)
        if not naive_errors or max(naive_errors) - min(naive_errors) < LEAST_JUDGED_SHARE * day:
            return replace(self, own_error=None, naive_error=None)  # unchanged after a night without requests
        own = math.sqrt(fmean(recent[at] ** 2 for at in naive_errors))
        naive_error = math.sqrt(fmean(error**2 for error in naive_errors.values()))
        if self.since is None:
            since = now if CLEARLY * own < naive_error else None
        else:
            since = self.since if own <= CLEARLY * naive_error else None
        return replace(self, since=since, own_error=own, naive_error=naive_error)
