"""Load predicted by a proven forecast: when a new replica could serve, and while a removed one would be missed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.tuner.load.demand import Demand
from trimtab_operator.tuner.load.forecast import Forecast, State
from trimtab_operator.tuner.scaling.control_law import LEVEL_SECONDS, Caution, prior_spread

SAMPLES_AHEAD = 8  # forecast times until a removed replica could serve again
SAMPLES_BACK = 8  # past levels within the usual hold time: a dip against the season may end at once


@dataclass(frozen=True, slots=True)
class ForecastLoad:
    """Load when a replica requested now could serve, with its interval, and the highest load after that."""

    at: float
    rate: float
    low: float
    high: float
    later: float
    """Highest load until a replica removed now could serve again, from any level of the usual hold time, scaled by the
    season."""
    periods: int
    """Number of periods that the season was learned from."""
    period_seconds: float


def forecast_load(
    forecast: Forecast | None,
    demand: Demand,
    caution: Caution,
    confident: float,
    *,
    now: float,
    lead: float,
    hold: float,
) -> ForecastLoad | None:
    """Return the forecast load; None without a requested or proven forecast."""
    level = demand.level(LEVEL_SECONDS)
    if forecast is None or forecast.state is not State.IN_USE or level is None:
        return None
    low, high = forecast.interval(confident, prior_sd=prior_spread(caution, lead))
    first = now + lead
    rate, season = forecast.rate(level, now, first), forecast.season
    times = [first + hold * step / SAMPLES_AHEAD for step in range(SAMPLES_AHEAD + 1)]
    later = max(forecast.rate(past, at, then) for at, past in _levels(demand, now, hold) for then in times)
    return ForecastLoad(first, rate, low * rate, high * rate, high * later, season.num_periods, season.period_seconds)


def _levels(demand: Demand, now: float, hold: float) -> list[tuple[float, float]]:
    """Return the times and levels of the load within the hold time."""
    times = [now - hold * step / SAMPLES_BACK for step in range(SAMPLES_BACK + 1)]
    levels = [(at, demand.level(LEVEL_SECONDS, until=at)) for at in times]
    return [(at, level) for at, level in levels if level is not None]
