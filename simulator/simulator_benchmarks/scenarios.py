"""Named loads on real traces with suitable objectives: the rows of the result table.

`folder` has the files of the development slice; each scenario names those that it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, machine_of
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace
from trimtab_simulator.trace.load import Transform, load_trace

SMALL_RATES = "servegen_m-small_rates_first.csv.gz"
R1_RATES = "servegen_deepseek-r1_rates_first.csv.gz"
R1_LENGTHS = "servegen_deepseek-r1_lengths_first.jsonl.gz"
CONVERSATIONS = "azure2023_conv_first.csv.gz"
CODE = "azure2023_code_first.csv.gz"
MOONCAKE = "mooncake_conversation_first.jsonl.gz"

DAY_SECONDS = 86_400.0
DAY = Transform(start=DAY_SECONDS, duration=DAY_SECONDS, speed=12, peak=30, cv=1)
"""The second day of a service, in two hours."""
SWITCH_SECONDS = 600.0
CODE_SHARES = (1.0, 0.15)  # of its load, alternating
SLOTS = 512

Load = Callable[[Path, int], Trace]
"""(folder of the traces, seed) → arrivals."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, its objectives, and start values of replicas and token budget: the best budget of fixed replicas."""

    name: str
    load: Load
    objectives: Objectives
    budget: int
    start_replicas: int
    max_replicas: int

    def experiment(self, folder: Path, *, seed: int = 0, cold_start: float = 120.0) -> Experiment:
        """Return the experiment of this scenario."""
        parameters: dict[Parameter, Value] = {
            Parameter.MAX_NUM_SEQS: SLOTS,
            Parameter.MAX_NUM_BATCHED_TOKENS: self.budget,
            Parameter.WATERMARK: 0.0,
            Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
        }
        settings = FleetSettings(
            machine_of("llama-3.1-8b", "h200"),
            parameters,
            self.start_replicas,
            1,
            self.max_replicas,
            cold_start,
            slow_gap=self.objectives.slow_gap,
        )
        return Experiment(self.load(folder, seed), settings, ReplaySettings(seed=seed), self.objectives)


def _day(folder: Path, seed: int) -> Trace:
    return load_trace(folder / SMALL_RATES, DAY, lengths=folder / CONVERSATIONS, seed=seed)


def _burst(folder: Path, seed: int) -> Trace:
    burst = Transform(DAY.start, DAY.duration, DAY.speed, peak=DAY.peak, cv=4)
    return load_trace(folder / SMALL_RATES, burst, lengths=folder / CONVERSATIONS, seed=seed)


def _r1(folder: Path, seed: int) -> Trace:
    return load_trace(folder / R1_RATES, Transform(speed=6, peak=12), lengths=folder / R1_LENGTHS, seed=seed)


def _mix(folder: Path, seed: int) -> Trace:
    """Return conversations, and code load that switches on and off."""
    parts = [
        load_trace(
            folder / SMALL_RATES,
            Transform(DAY.start, DAY.duration, DAY.speed, peak=peak, cv=1),
            lengths=folder / lengths,
            seed=2 * seed + index,
        )
        for index, (peak, lengths) in enumerate(((16.0, CONVERSATIONS), (10.0, CODE)))
    ]
    rng = random.Random(f"mix-{seed}")
    arrivals: list[Arrival] = list(parts[0].arrivals)
    for arrival in parts[1].arrivals:
        if rng.random() < CODE_SHARES[int(arrival.at / SWITCH_SECONDS) % len(CODE_SHARES)]:
            arrivals.append(arrival)
    arrivals.sort(key=lambda arrival: arrival.at)
    return Trace("mix", arrivals, parts[0].seconds)


def _code(folder: Path, seed: int) -> Trace:
    return load_trace(folder / CODE, Transform(copies=3, jitter=20), seed=seed)


def _moon(folder: Path, seed: int) -> Trace:
    """Return long prompts: two copies, shifted within the trace's grid of three seconds. Every prompt is computed
    whole.
    """
    trace = load_trace(folder / MOONCAKE, Transform(copies=2, jitter=3), seed=seed)
    return Trace(trace.name, [arrival._replace(prefix=()) for arrival in trace.arrivals], trace.seconds)


CHAT = Objectives(2.0, 1 / 8000, itl_mean=0.08)
REASONING = Objectives(4.0, 1 / 4000, itl_mean=0.08)
LONG = Objectives(10.0, 1 / 4000, itl_mean=0.1)

SCENARIOS = (
    Scenario("day", _day, CHAT, 1024, 3, 16),
    Scenario("burst", _burst, CHAT, 1024, 4, 16),
    Scenario("r1", _r1, REASONING, 8192, 3, 16),
    Scenario("mix", _mix, CHAT, 1024, 3, 16),
    Scenario("code", _code, CHAT, 1024, 4, 28),
    Scenario("moon", _moon, LONG, 8192, 6, 28),
)
