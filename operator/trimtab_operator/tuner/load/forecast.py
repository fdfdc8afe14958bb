"""A forecast of arrivals: the present level, changed as it usually changes at this time of the day or the week.

It has to prove itself. Each look notes what it foretells for when a replica asked for now could serve, as `Growth` does
for a load that stays as it is, its naive rival. When that time has come both are compared with what came. The forecast
is in use from when its error of the last four hours (root mean square: ramps count) is clearly smaller than the rival's
until it is clearly larger, as far as there was anything to compare; with less than a period of history it foretells
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.load.season import Season

JUDGED_SHARE = 1 / 6  # of a day, whose errors count
LEAST_JUDGED_SHARE = 1 / 24  # of a day, that must have been foretold before it is believed
CLEARLY = 1.05  # times as far off: what the rival must be for it to come into use, and it itself to go out of it


class State(StrEnum):
    """What becomes of the forecast."""

    LEARNING = "Learning"
    """Less than a period of history is there."""
    UNPROVEN = "Unproven"
    """Its errors are not smaller, or not known yet to be, than those of a load that stays as it is."""
    IN_USE = "InUse"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The shape of a period, how far forecasts by it were off lately, and whether that is good enough."""

    season: Season = field(default_factory=Season)
    errors: Growth = field(default_factory=Growth)
    since: float | None = None
    """In use since then."""
    own_error: float | None = None
    """Root mean square of the logarithm of what came over what was foretold, lately; None: too little was."""
    naive_error: float | None = None
    """The same of the rival."""

    @property
    def state(self) -> State:
        """What becomes of it."""
        if not self.season.is_known:
            return State.LEARNING
        return State.UNPROVEN if self.since is None else State.IN_USE

    def rate(self, level: float, now: float, at: float) -> float:
        """What is foretold for `at`, while `level` comes now."""
        return level * self.season.change(now, at)

    def interval(self, confident: float, *, prior_sd: float, trend: float) -> tuple[float, float]:
        """Factors between what fell short of forecasts and what exceeded them in 1 − `confident` of the cases."""
        low, high = (
            self.errors.quantile(share, prior_sd=prior_sd, trend=trend) for share in (1 - confident, confident)
        )
        return min(1.0, low), max(1.0, high)

    def with_observation(
        self, demand: Demand, naive: Growth, *, level: float | None, now: float, horizon: float
    ) -> Forecast:
        """After one more look: the newest point of `demand`. `naive` has settled what was foreseen for up to now."""
        errors = self.errors.settled(demand, now)
        season = self.season.with_point(demand.points[-1])
        after = replace(self, season=season, errors=errors)
        if level is not None and season.is_known:
            rate = after.rate(level, now, now + horizon)
            after = replace(after, errors=errors.foreseen(now + horizon, rate, demand.trend()))
        return after._judged(naive, now)

    def _judged(self, naive: Growth, now: float) -> Forecast:
        """After its errors were compared with those of the rival, of the same times."""
        day = self.season.day_seconds
        recent = {case.at: case.error for case in self.errors.cases if case.at > now - JUDGED_SHARE * day}
        rivals = {case.at: case.error for case in naive.cases if case.at in recent}
        if not self.season.is_known:
            return replace(self, since=None, own_error=None, naive_error=None)
        if not rivals or max(rivals) - min(rivals) < LEAST_JUDGED_SHARE * day:
            return replace(self, own_error=None, naive_error=None)  # after a night without requests it is as it was
        own = math.sqrt(fmean(recent[at] ** 2 for at in rivals))
        rival = math.sqrt(fmean(error**2 for error in rivals.values()))
        if self.since is None:
            since = now if CLEARLY * own < rival else None
        else:
            since = self.since if own <= CLEARLY * rival else None
        return replace(self, since=since, own_error=own, naive_error=rival)
