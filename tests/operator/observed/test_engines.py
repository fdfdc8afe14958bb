"""The tuner's observation of a replica: phase, start of the phase, instance, and last termination."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import NOW, READY, RUNNING, a_group, a_pod, at, not_ready
from trimtab_operator.builders.labels import WORKER
from trimtab_operator.observed.engines import EngineObservation, observe_replica
from trimtab_operator.observed.groups import MissingPods
from trimtab_operator.tuner.samples import Phase


def a_pod_ready_since(seconds: float, ready: str = "True") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": at(seconds)}
    return a_pod(status={**READY, "conditions": [condition]}, created=-900.0)


@pytest.mark.parametrize(
    ("pod", "phase", "since"),
    [
        (a_pod_ready_since(-60.0), Phase.READY, -60.0),
        (a_pod_ready_since(-5.0, "False"), Phase.STARTING, -5.0),  # it was ready, and its engine ended
        (a_pod(status=RUNNING, created=-900.0), Phase.STARTING, -900.0),
        (not_ready(a_pod(node=None, created=-30.0)), Phase.PENDING, -30.0),
    ],
)
def test_phase_since_matches_pod_conditions(pod: dict[str, Any], phase: Phase, since: float) -> None:
    look = observe_replica(a_group(pod), None)
    assert (look.phase, look.since) == (phase, NOW + since)
    assert look.problem == "its engine was not polled"


def test_a_replica_without_pods_waits() -> None:
    look = observe_replica(a_group(), None)
    assert (look.phase, look.instance, look.since) == (Phase.PENDING, "", 0.0)


def test_replica_with_missing_pods_is_pending_since_then() -> None:
    assert observe_replica(a_group(missing=MissingPods(NOW - 70.0, 0)), None).since == NOW - 70.0


def test_replica_with_unscheduled_pod_is_pending() -> None:
    leader = not_ready(a_pod(created=-30.0))
    placed = not_ready(a_pod(WORKER, created=-30.0))
    assert observe_replica(a_group(leader, placed, workers=1), None).phase is Phase.STARTING
    stuck = not_ready(a_pod(WORKER, node=None, created=-30.0))
    assert observe_replica(a_group(leader, stuck, workers=1), None).phase is Phase.PENDING


def test_restarts_are_those_of_the_engine_container() -> None:
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    sidecar = {"name": "other", "restartCount": 7, "lastState": ended}
    main: dict[str, Any] = {"name": "main", "restartCount": 2, "state": {"running": {}}}
    pod = a_pod(status={**READY, "containerStatuses": [sidecar, main]})
    look = observe_replica(a_group(pod), EngineObservation(True))
    assert (look.restarts, look.was_oom_killed) == (2, False)
    pod = a_pod(status={**READY, "containerStatuses": [sidecar, {**main, "lastState": ended}]})
    assert observe_replica(a_group(pod), EngineObservation(True)).was_oom_killed
    assert look.instance == "u-m-g0-0"


def test_the_exit_code_of_an_engines_last_end_is_read() -> None:
    main: dict[str, Any] = {"name": "main", "restartCount": 2, "state": {"running": {}}}
    assert observe_replica(a_group(a_pod(status={**READY, "containerStatuses": [main]})), None).exit_code is None
    main |= {"lastState": {"terminated": {"reason": "Error", "exitCode": 1}}}
    assert observe_replica(a_group(a_pod(status={**READY, "containerStatuses": [main]})), None).exit_code == 1
    main |= {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}  # the newer one
    look = observe_replica(a_group(a_pod(status={"containerStatuses": [main]})), None)
    assert (look.exit_code, look.was_oom_killed, look.restarts) == (137, True, 3)


@pytest.mark.parametrize(("error", "is_oom"), [("The node was low on resource: memory.", True), ("disk", False)])
def test_a_pod_that_its_node_evicted_has_ended_once_more(error: str, is_oom: bool) -> None:
    evicted = {"phase": "Failed", "reason": "Evicted", "message": error, "containerStatuses": []}
    look = observe_replica(a_group(a_pod(status=evicted)), None)
    assert (look.restarts, look.was_oom_killed) == (1, is_oom)
