"""Replays: every request is served once, time is billed, ticks are on time, and results are deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.samples import Phase
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.plant.routing import RouterKind, RouterSettings
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput
from trimtab_simulator.replay import ReplaySettings, SimulationResult, replay
from trimtab_simulator.scores import score
from trimtab_simulator.trace.arrivals import Arrival, Trace

MACHINE = Machine("m", "g", StepCost(0.01, 1e-4, 1e-4, 0.0), 100_000, max_model_len=8_000)


def settings(replicas: int = 1, *, budget: int = 512, cold: float = 60.0, machine: Machine = MACHINE) -> FleetSettings:
    parameters: dict[Parameter, Value] = {
        Parameter.MAX_NUM_SEQS: 64,
        Parameter.MAX_NUM_BATCHED_TOKENS: budget,
        Parameter.WATERMARK: 0.0,
        Parameter.GPU_MEMORY_UTILIZATION: 0.9,
    }
    return FleetSettings(machine, parameters, replicas, 1, 8, cold)


def a_trace(seconds: float = 300.0, rate: float = 4.0, *, prompt: int = 200, output: int = 50, seed: int = 0) -> Trace:
    rng = random.Random(seed)
    at, rows = 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        rows.append(Arrival(at, rng.randint(1, prompt), rng.randint(1, output)))
    return Trace("t", rows, seconds)


class Scripted:
    """Returns the test's actions at each tick, and records its inputs."""

    reads_requests = True

    def __init__(self, decide: Callable[[PolicyInput], PolicyActions], tick_seconds: float = 15.0) -> None:
        self.name = "scripted"
        self.tick_seconds = tick_seconds
        self.seen: list[PolicyInput] = []
        self._decide = decide

    def decide(self, view: PolicyInput) -> PolicyActions:
        self.seen.append(view)
        return self._decide(view)


@pytest.mark.parametrize("router", list(RouterKind))
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_request_is_served_once(router: RouterKind, replicas: int) -> None:
    trace = a_trace()
    outcome = replay(trace, Fixed("static"), settings(replicas), ReplaySettings(RouterSettings(router)))
    assert sorted(s.arrival for s in outcome.served) == [a.at for a in trace.arrivals]
    assert all(s.finished_at is not None and (s.ttft or 0) > 0 for s in outcome.served)
    assert outcome.gpu_seconds == pytest.approx(replicas * 300)


def test_the_fewest_requests_are_a_better_guide_than_none() -> None:
    trace = a_trace(rate=30.0)
    tails = [
        score(
            "static", replay(trace, Fixed("static"), settings(3), ReplaySettings(RouterSettings(router))), Objectives()
        ).ttft_p95
        for router in (RouterKind.LEAST_REQUEST, RouterKind.SERVICE)
    ]
    assert (tails[0] or 0) < (tails[1] or 0)


def test_new_replica_is_billed_during_its_cold_start() -> None:
    policy = Scripted(lambda view: PolicyActions(replicas=2))
    outcome = replay(a_trace(), policy, settings(cold=60.0), ReplaySettings())
    phases = {round(view.now): [snapshot.phase for snapshot in view.snapshots] for view in policy.seen}
    assert phases[15] == [Phase.READY]
    assert phases[60] == [Phase.READY, Phase.STARTING]
    assert phases[75] == [Phase.READY, Phase.READY]
    assert outcome.gpu_seconds == pytest.approx(300 + 285)
    assert [(c.at, c.target, c.before, c.after) for c in outcome.changes] == [(15.0, "replicas", 1, 2)]


def test_drained_replica_finishes_its_requests_while_billed() -> None:
    trace = a_trace(output=400)
    policy = Scripted(lambda view: PolicyActions(replicas=1))
    outcome = replay(trace, policy, settings(2), ReplaySettings())
    assert len(outcome.served) == len(trace.arrivals)
    assert 300 + 15 < outcome.gpu_seconds < 300 + 15 + 20


def test_scale_in_removes_starting_replicas_first() -> None:
    policy = Scripted(lambda view: PolicyActions(replicas=3 if view.now < 20 else 1))
    outcome = replay(a_trace(), policy, settings(1, cold=100.0), ReplaySettings())
    assert outcome.gpu_seconds == pytest.approx(300 + 2 * 15)
    assert outcome.most_replicas == 3


def test_targets_stay_within_the_bounds() -> None:
    outcome = replay(
        a_trace(),
        Scripted(lambda view: PolicyActions(replicas=100 if view.now < 100 else 0)),
        settings(),
        ReplaySettings(),
    )
    assert {c.after for c in outcome.changes} == {8, 1}


def test_a_known_schedule_is_followed() -> None:
    outcome = replay(a_trace(), Fixed("plan"), settings(cold=10.0), ReplaySettings(), schedule=[(50.0, 2), (100.0, 1)])
    assert [(c.at, c.after) for c in outcome.changes] == [(50.0, 2), (100.0, 1)]


def test_parameters_are_clamped_to_engine_limits() -> None:
    policy = Scripted(
        lambda view: PolicyActions(parameters={Parameter.MAX_NUM_BATCHED_TOKENS: 10**9}) if view.now < 20 else STAY
    )
    outcome = replay(a_trace(), policy, settings(), ReplaySettings())
    assert [(c.target, c.after) for c in outcome.changes] == [("max_num_batched_tokens", 16_384)]
    config = policy.seen[1].snapshots[0].config
    assert config is not None
    assert (config.generation, config.applied[Parameter.MAX_NUM_BATCHED_TOKENS]) == (2, 16_384)


def test_snapshot_reports_finished_requests_once() -> None:
    policy = Scripted(lambda view: STAY)
    outcome = replay(a_trace(), policy, settings(2), ReplaySettings())
    samples = [snapshot.sample for view in policy.seen for snapshot in view.snapshots if snapshot.sample is not None]
    told = [f.arrived_at for sample in samples if sample.requests for f in sample.requests.finished]
    assert len(told) == len(set(told)) > 0.9 * len(outcome.served)
    last = [snapshot.sample for snapshot in policy.seen[-1].snapshots if snapshot.sample is not None]
    assert sum(s.counters.arrived or 0 for s in last) == pytest.approx(len(outcome.served), rel=0.1)
    assert sum(s.ttft.counts[-1] for s in last if s.ttft) >= len(told)
    assert all(s.counters.decode is not None and s.counters.decode.seconds > 0 for s in last)


def test_delayed_snapshot_has_the_configured_age() -> None:
    policy = Scripted(lambda view: STAY)
    replay(a_trace(), policy, settings(), ReplaySettings(delay_seconds=30.0))
    ages = {
        round(view.now - snapshot.sample.at)
        for view in policy.seen
        for snapshot in view.snapshots
        if snapshot.sample is not None
    }
    assert ages == {30}


def test_a_request_that_no_replica_can_hold_is_refused_and_missed() -> None:
    trace = Trace("t", [Arrival(1.0, 10, 10), Arrival(2.0, 7_990, 20)], 10.0)
    outcome = replay(trace, Fixed("static"), settings(), ReplaySettings())
    judged = score("static", outcome, Objectives())
    assert (outcome.rejected, judged.requests, judged.met, judged.attainment) == (1, 2, 1, 0.5)


def test_a_replay_repeats() -> None:
    def once() -> SimulationResult:
        return replay(
            a_trace(), Fixed("static"), settings(3), ReplaySettings(RouterSettings(RouterKind.SERVICE), seed=7)
        )

    def times(outcome: SimulationResult) -> list[float | None]:
        return [s.finished_at for s in outcome.served]

    assert times(once()) == times(once())
