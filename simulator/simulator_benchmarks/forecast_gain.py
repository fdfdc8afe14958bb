"""Gain of a forecast on the scenario *day*, and the cost of a wrong one: `python -m
simulator_benchmarks.forecast_gain`.

The trace's second day under the tuner, with and without the history of the first: as it was, three hours late, and of
another service. A day passes in two hours, so that is the forecast's period.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from trimtab_operator.tuner.load.demand import Point
from trimtab_operator.tuner.load.season import DAY_SECONDS, Season
from trimtab_simulator.experiment import without_timeline
from trimtab_simulator.policies.trimtab import TICK_SECONDS, Trimtab
from trimtab_simulator.trace.load import load_trace

from simulator_benchmarks.scenarios import CONVERSATIONS, DAY, SCENARIOS, SMALL_RATES

PERIOD_SECONDS = DAY_SECONDS / DAY.speed
THREE_HOURS = PERIOD_SECONDS / 8
ANOTHER_SEED = 1000  # offset of the history's seed, so that it differs from the replayed day
HISTORIES = {
    "none": ("", 0.0),
    "the day before": (SMALL_RATES, 0.0),
    "three hours late": (SMALL_RATES, THREE_HOURS),
    "of another service": ("servegen_m-mid_rates_first.csv.gz", 0.0),
}
"""By name: the file of the history's first day, and its delay."""


class Gain(NamedTuple):
    """Result of one replay."""

    gpu_hours: float
    attainment: float


def history(folder: Path, name: str, seed: int) -> Season | None:
    """Return what the tuner would have learned on the day before; None without a history."""
    file, late = HISTORIES[name]
    if not file:
        return None
    first = replace(DAY, start=0.0)
    trace = load_trace(folder / file, first, lengths=folder / CONVERSATIONS, seed=seed + ANOTHER_SEED)
    counts = [0] * round(PERIOD_SECONDS / TICK_SECONDS)
    for arrival in trace.arrivals:
        counts[min(len(counts) - 1, int(arrival.at / TICK_SECONDS))] += 1
    away = round(late / TICK_SECONDS)
    season = Season.of(PERIOD_SECONDS)
    for index in range(len(counts)):
        at = (index + 1) * TICK_SECONDS - PERIOD_SECONDS
        season = season.with_point(Point(at, TICK_SECONDS, counts[index - away]))
    return season


def replay_day(folder: Path, name: str, seed: int, cold_start: float) -> Gain:
    """Replay *day* under the tuner with that history."""
    (day,) = (scenario for scenario in SCENARIOS if scenario.name == "day")
    experiment = without_timeline(day.experiment(folder, seed=seed, cold_start=cold_start))
    policy = Trimtab(experiment.setup, history=history(folder, name, seed))
    judged = experiment.judge(policy.name, experiment.run(policy))
    return Gain(judged.gpu_hours, judged.attainment)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each history and cold start: GPU-hours and attainment per seed, and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cold-starts", default="60,120,300")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    fields = product([float(seconds) for seconds in options.cold_starts.split(",")], HISTORIES)
    print("| cold start | history | GPU-hours @ attainment, by seed | mean |\n|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = [
            (cold, name, [pool.submit(replay_day, options.traces, name, seed, cold) for seed in seeds])
            for cold, name in fields
        ]
        for cold, name, futures in rows:
            gains = [future.result() for future in futures]
            both = Gain(fmean(gain.gpu_hours for gain in gains), fmean(gain.attainment for gain in gains))
            by_seed = ", ".join(_format(gain) for gain in gains)
            print(f"| {cold:g} s | {name} | {by_seed} | {_format(both)} |", flush=True)


def _format(gain: Gain) -> str:
    return f"{gain.gpu_hours:.2f} @ {100 * gain.attainment:.2f}"


if __name__ == "__main__":
    main()
