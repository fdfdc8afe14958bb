"""Closed-loop clients: each sends its next request after a response, and a policy's changes apply."""

from __future__ import annotations

import itertools

from simulator_benchmarks.closed_loop import POLL_SECONDS, Clients, run_clients
from simulator_benchmarks.live_parameters.loads import one_replica
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput


def settings() -> FleetSettings:
    machine = Machine("m", "g", StepCost(0.01, 1e-4, 1e-4, 0.0), 10_000, max_model_len=1_000)
    return one_replica(machine, {Parameter.MAX_NUM_SEQS: 64, Parameter.MAX_NUM_BATCHED_TOKENS: 512})


class OneSeat:
    """Leaves one sequence slot from the second tick on."""

    name = "one slot"
    tick_seconds = 10.0
    reads_requests = False

    def decide(self, view: PolicyInput) -> PolicyActions:
        return PolicyActions(parameters={Parameter.MAX_NUM_SEQS: 1}) if view.now >= 20.0 else STAY


def test_each_client_has_one_request_in_flight() -> None:
    came = run_clients(settings(), Fixed("off"), Clients(4, lambda rng: (50, 20)), seconds=60.0, seed=0)
    times = [(s.arrival, 1) for s in came.served] + [(s.finished_at or 0.0, -1) for s in came.served]
    there = most = 0
    for _, change in sorted(times, key=lambda row: (row[0], row[1])):
        there += change
        most = max(most, there)
    assert most == 4
    alone = run_clients(settings(), Fixed("off"), Clients(1, lambda rng: (50, 20)), seconds=60.0, seed=0).served
    gaps = [after.arrival - (before.finished_at or 0.0) for before, after in itertools.pairwise(alone)]
    assert len(alone) > 100
    assert all(0 <= gap <= POLL_SECONDS for gap in gaps)


def test_changes_apply_immediately() -> None:
    came = run_clients(settings(), OneSeat(), Clients(4, lambda rng: (50, 200)), seconds=60.0, seed=0)
    assert [(change.at, change.target, change.after) for change in came.changes] == [(20.0, "max_num_seqs", 1)]
    early = [s.ttft or 0.0 for s in came.served if s.arrival < 15]
    late = [s.ttft or 0.0 for s in came.served if s.arrival > 30]
    assert min(late) > 3 * max(early)


def test_runs_are_deterministic() -> None:
    one, other = (
        run_clients(settings(), Fixed("off"), Clients(3, lambda rng: (rng.randint(1, 90), 30)), seconds=30.0, seed=5)
        for _ in range(2)
    )
    assert [(s.arrival, s.finished_at) for s in one.served] == [(s.arrival, s.finished_at) for s in other.served]
