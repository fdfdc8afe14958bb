"""Durations of tuner steps, with fingerprints of their decisions."""

from __future__ import annotations

import random

import pytest
from simulator_benchmarks import decision_time
from simulator_benchmarks.decision_time import SLICES, Slice, cut
from simulator_benchmarks.scenarios import SCENARIOS
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace


def make_experiment() -> Experiment:
    rng = random.Random(0)
    arrivals = [Arrival(i / 4, rng.randint(1, 2000), rng.randint(1, 200)) for i in range(1200)]
    parameters: dict[Parameter, Value] = {
        Parameter.MAX_NUM_SEQS: 512,
        Parameter.MAX_NUM_BATCHED_TOKENS: 8192,
        Parameter.WATERMARK: 0.0,
        Parameter.GPU_MEMORY_UTILIZATION: 0.9,
    }
    settings = FleetSettings(machine_of("llama-3.1-8b", "h200"), parameters, 1, 1, 1, 60.0)
    return Experiment(Trace("t", arrivals, 300.0), settings, ReplaySettings(), Objectives(2.0, 1 / 8000, itl_mean=0.08))


def test_slices_are_of_scenarios_that_exist() -> None:
    assert {part.scenario for part in SLICES} <= {scenario.name for scenario in SCENARIOS}


def test_a_slice_begins_at_its_start() -> None:
    part = cut(make_experiment(), Slice("day", 100.0, 50.0)).trace
    assert part.seconds == 50.0
    assert len(part.arrivals) == 200
    assert part.arrivals[0].at == 0.0
    assert part.arrivals[-1].at == pytest.approx(49.75)


def test_equal_decisions_have_equal_fingerprints() -> None:
    one, other = (decision_time.measure_steps("any", make_experiment()) for _ in range(2))
    assert one.turns == 300 / 15 - 1
    assert 0 < one.p50 <= one.p90 <= one.p99 <= one.longest
    assert one.decisions == other.decisions
