"""What a forecast that has proved itself tells the law: the load when a new replica could serve, and for as long as one
that goes would be missed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.tuner.load.demand import Demand
from trimtab_operator.tuner.load.forecast import Forecast, State
from trimtab_operator.tuner.scaling.law import LEVEL_SECONDS, Caution, prior_spread, usual_hold

LOOKS_AHEAD = 8  # times at which the load is asked for until a replica that goes could be there again


@dataclass(frozen=True, slots=True)
class Foretold:
    """The load when a replica could serve that is asked for now, with its interval, and the highest after that."""

    at: float
    rate: float
    low: float
    high: float
    later: float
    """The most that is to be provided for until one that goes now could be there again, were it missed once gone."""
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
    rates = [forecast.rate(level, now, first + hold * step / LOOKS_AHEAD) for step in range(LOOKS_AHEAD + 1)]
    season = forecast.season
    return Foretold(
        first, rates[0], low * rates[0], high * rates[0], high * max(rates), season.num_periods, season.period_seconds
    )
