"""Trimtab's policy on loads that once showed a mistake of the control law."""

from __future__ import annotations

import random

from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import REPLICAS, ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace

START: dict[Parameter, Value] = {
    Parameter.MAX_NUM_SEQS: 512,
    Parameter.MAX_NUM_BATCHED_TOKENS: 8192,
    Parameter.WATERMARK: 0.0,
    Parameter.GPU_MEMORY_UTILIZATION: 0.9,
}
SECONDS = 420.0


def documents() -> Trace:
    """Eight requests a second: 4,000 tokens each, and every twelfth of them 90,000."""
    dice, now, arrivals = random.Random(1), 0.0, list[Arrival]()
    while now < SECONDS:
        prompt = 90_000 if len(arrivals) % 12 == 11 else 4_000
        arrivals.append(Arrival(now, prompt, dice.randrange(50, 600), ()))
        now += dice.expovariate(8.0)
    return Trace("documents", arrivals, SECONDS)


def test_budget_trial_ignores_latency_before_replicas_were_ready() -> None:
    """Overload from the first second, with a budget too large for ITL objectives and more than a minute until replicas
    are ready: latency until then depends on their number.
    """
    machine = machine_of("llama-3.1-8b", "h200")
    fleet = FleetSettings(machine, START, 6, 1, 28, 120.0)
    experiment = Experiment(documents(), fleet, ReplaySettings(), Objectives(10.0, 1 / 4000, itl_mean=0.1))
    changes = experiment.run(Trimtab(experiment.setup)).changes
    budgets = [change.after for change in changes if change.target == Parameter.MAX_NUM_BATCHED_TOKENS.value]
    assert len([change for change in changes if change.target == REPLICAS and change.after > change.before]) >= 1
    assert budgets
    assert budgets == sorted(budgets, reverse=True)  # none is taken back
    assert budgets[0] < START[Parameter.MAX_NUM_BATCHED_TOKENS]


def test_restarted_operator_keeps_only_its_stored_state() -> None:
    machine = machine_of("llama-3.1-8b", "h200")
    fleet = FleetSettings(machine, START, 6, 1, 28, 120.0)
    experiment = Experiment(documents(), fleet, ReplaySettings(), Objectives(10.0, 1 / 4000, itl_mean=0.1))
    policy = Trimtab(experiment.setup, restart_seconds=405.0)
    experiment.run(policy)
    assert policy.state.applied
    assert len(policy.state.history) > 1
    assert not any(track.intervals for track in policy.state.tracks.values())
