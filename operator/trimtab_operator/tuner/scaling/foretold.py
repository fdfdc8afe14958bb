"""What a forecast that has proved itself tells the law: the load when a new replica could serve, and for as long as one
that goes would be missed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.tuner.load.demand import Demand
from trimtab_operator.tuner.load.forecast import Forecast, State
from trimtab_operator.tuner.scaling.law import LEVEL_SECONDS, Caution, prior_spread, usual_hold

LOOKS_AHEAD = 8  # times at which the load is asked for until a replica that goes could be there again
LOOKS_BACK = (
    8  # times in the usual hold whose level is taken along: what fell against its shape may be back in a moment
)


@dataclass(frozen=True, slots=True)
class Foretold:
    """The load when a replica could serve that is asked for now, with its interval, and the highest after that."""

    at: float
    rate: float
    low: float
    high: float
    later: float
    """The most that is to be provided for until one that goes now could be there again, were it missed once gone: by
    any level of the usual hold, changed as the shape says since then."""
    periods: int
    """How many periods it was learned from."""
    period_seconds: float


def foretold(
    forecast: Forecast | None,
    demand: Demand,
    caution: Caution,
    confident: float,
    *,
    now: float,
    cold_start: float,
    tick: float,
    drain: float,
) -> Foretold | None:
    """What is foretold; None where nobody asks for a forecast, or none has proved itself."""
    level = demand.level(LEVEL_SECONDS)
    if forecast is None or forecast.state is not State.IN_USE or level is None:
        return None
    low, high = forecast.interval(confident, prior_sd=prior_spread(caution, cold_start), trend=demand.trend())
    first, hold = now + cold_start + tick, usual_hold(cold_start, drain)
    rate, season = forecast.rate(level, now, first), forecast.season
    times = [first + hold * step / LOOKS_AHEAD for step in range(LOOKS_AHEAD + 1)]
    later = max(forecast.rate(past, at, then) for at, past in _levels(demand, now, hold) for then in times)
    return Foretold(first, rate, low * rate, high * rate, high * later, season.num_periods, season.period_seconds)


def _levels(demand: Demand, now: float, hold: float) -> list[tuple[float, float]]:
    """When, and at what level, the load was within the hold."""
    times = [now - hold * step / LOOKS_BACK for step in range(LOOKS_BACK + 1)]
    levels = [(at, demand.level(LEVEL_SECONDS, until=at)) for at in times]
    return [(at, level) for at, level in levels if level is not None]
