"""Inputs of the forecast measurements: the history is another sample of another day, and can be made wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import trimtab_simulator
from simulator_benchmarks import forecast_gain
from simulator_benchmarks.forecast_gain import PERIOD_SECONDS, THREE_HOURS, history
from simulator_benchmarks.scenarios import CONVERSATIONS, SCENARIOS, SMALL_RATES
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.policies.trimtab import Trimtab

ROWS = 144  # windows of ten minutes a day


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two days whose load is ten times as high in their second half."""
    rates = [
        f"1,{600 * index},{1.0 if index % ROWS < ROWS // 2 else 10.0},1.0,Gamma,1.0,1.0" for index in range(2 * ROWS)
    ]
    head = "client,window_start_s,rate,cv,pattern,arg1,arg2"
    (tmp_path / SMALL_RATES).write_bytes(gzip.compress("\n".join([head, *rates, ""]).encode()))
    lengths = [f"2023-11-16 18:15:{second:02}.0000000,{100 + second},{20 + second}" for second in range(40)]
    told = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lengths, ""])
    (tmp_path / CONVERSATIONS).write_bytes(gzip.compress(told.encode()))
    return tmp_path


def make_experiment(folder: Path) -> Experiment:
    (day,) = (scenario for scenario in SCENARIOS if scenario.name == "day")
    return day.experiment(folder)


def test_the_day_before_has_the_shape_of_the_first_day(folder: Path) -> None:
    season = history(folder, "the day before", 0)
    assert season is not None
    assert season.is_known
    quarter, half = PERIOD_SECONDS / 4, PERIOD_SECONDS / 2
    lowest = season.rate_at(quarter)
    assert lowest is not None
    assert season.rate_at(quarter + half) == pytest.approx(10 * lowest, rel=0.2)


def test_late_history_has_the_same_shape_three_hours_later(folder: Path) -> None:
    right, late = (history(folder, name, 0) for name in ("the day before", "three hours late"))
    assert right is not None
    assert late is not None
    for share in (0.1, 0.4, 0.6, 0.9):
        at = share * PERIOD_SECONDS
        assert late.rate_at(at + THREE_HOURS) == pytest.approx(right.rate_at(at), rel=0.01)


def test_tuner_forecasts_only_with_a_history(folder: Path) -> None:
    setup = make_experiment(folder).setup
    season = history(folder, "the day before", 0)
    scaling = Trimtab(setup, history=season).settings.scaling
    assert scaling is not None
    assert scaling.forecast is not None
    assert scaling.forecast.period_seconds == PERIOD_SECONDS
    plain = Trimtab(setup)
    assert plain.state.forecast is None
    assert plain.settings.scaling is not None
    assert plain.settings.scaling.forecast is None


def test_table_cells_do_not_depend_on_forecast_gain() -> None:
    """A cell's digest covers the packaged simulator; this module is not part of it."""
    assert Path(trimtab_simulator.__file__).parent not in Path(forecast_gain.__file__).parents
