"""Steady loads of mixes of requests, on one replica of llama-3.1-8b on an H200."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine, machine_of
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import ReplaySettings, SimulationResult
from trimtab_simulator.trace.arrivals import Arrival, Trace
from trimtab_simulator.trace.load import draw_of
from trimtab_simulator.trace.sampling import Draw

from simulator_benchmarks.live_parameters.figures import good_tokens

BUDGETS = (512, 1024, 2048, 4096, 8192)
BOTH = Objectives(2.0, 1 / 8000, itl_mean=0.08)
FIRST_TOKEN = Objectives(0.5, 1 / 8000, itl_mean=0.2)


@dataclass(frozen=True, slots=True)
class Phase:
    """Steady load of one mix of requests."""

    lengths: str
    """File of the development slice."""
    rate: float
    seconds: float


def poisson(folder: Path, phases: Sequence[Phase], seed: int) -> Trace:
    """Return independent arrivals, phase after phase."""
    rng = random.Random(f"hot-knobs-{seed}")
    draws: dict[str, Draw] = {phase.lengths: draw_of(folder / phase.lengths) for phase in phases}
    arrivals: list[Arrival] = []
    begin = 0.0
    for phase in phases:
        at, end = begin, begin + phase.seconds
        while (at := at + rng.expovariate(phase.rate)) < end:
            arrivals.append(Arrival(at, *draws[phase.lengths](rng, "", at)))
        begin = end
    return Trace("phases", arrivals, begin)


def one_replica(machine: Machine, parameters: dict[Parameter, Value]) -> FleetSettings:
    """Return a fleet of one replica with these start values."""
    start: dict[Parameter, Value] = {
        Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
        Parameter.WATERMARK: 0.0,
        **parameters,
    }
    return FleetSettings(machine, start, 1, 1, 1, 120.0)


def h200(parameters: dict[Parameter, Value], kv_tokens: int | None = None, *, headroom: bool = True) -> FleetSettings:
    """Return one replica of llama-3.1-8b on an H200."""
    machine = machine_of("llama-3.1-8b", "h200")
    if kv_tokens is not None:
        machine = machine.with_kv_tokens(kv_tokens)
    if not headroom:
        machine = replace(machine, cap_utilization=START_UTILIZATION)
    return one_replica(machine, {Parameter.MAX_NUM_SEQS: 512, Parameter.MAX_NUM_BATCHED_TOKENS: 8192, **parameters})


def run(
    trace: Trace, settings: FleetSettings, objectives: Objectives, policy: Policy | None, seed: int
) -> SimulationResult:
    """Replay the trace under a policy, by default the tuner."""
    experiment = Experiment(trace, settings, ReplaySettings(seed=seed, timeline_interval_seconds=math.inf), objectives)
    return experiment.run(policy or Trimtab(experiment.setup))


def budget_of(budget: int) -> dict[Parameter, Value]:
    """Return values with this token budget."""
    return {Parameter.MAX_NUM_BATCHED_TOKENS: budget}


def best_budget(trace: Trace, objectives: Objectives, seed: int, since: float) -> tuple[int, float]:
    """Return the fixed budget with the highest goodput, and that goodput."""
    found = {}
    for budget in BUDGETS:
        outcome = run(trace, h200(budget_of(budget)), objectives, Fixed("static"), seed)
        found[budget] = good_tokens(outcome.served, objectives, since, trace.seconds)
    best = max(found, key=lambda budget: found[budget])
    return best, found[best]
