"""Canary phase: a change runs on one replica for a while before the others follow."""

from __future__ import annotations

import random
from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import TICK_SECONDS, TOKEN, FakeCluster
from trimtab_operator.rollout.crash_evidence import MIN_CRASHES
from trimtab_operator.rollout.rollback import (
    WATCH_SECONDS,
    PostRolloutWatch,
    RevisionSpec,
    RolloutAttempt,
    RolloutState,
    from_text,
    revision_spec_of,
    to_text,
)
from trimtab_operator.rollout.surge import NoSurgeRoom
from trimtab_operator.tuner.samples import Finished
from trimtab_operator.validation.rules import validation_errors

BAKE_SECONDS = 40.0
ROLLOUT = {"startTimeout": "2m", "drainTimeout": "10s", "bakeTime": "40s"}
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 40))]


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def settled(replicas: int = 3, *, parallelism: dict[str, int] | None = None, **rollout: Any) -> FakeCluster:
    layout: dict[str, Any] = {} if parallelism is None else {"parallelism": parallelism}
    rollout = {**ROLLOUT, **rollout}
    cluster = FakeCluster(replicas=replicas, runtime=a_runtime(), rollout=rollout, start_seconds=10.0, **layout)
    cluster.settle()
    return cluster


def state_of(cluster: FakeCluster) -> RolloutState:
    return cluster.state.rollout or RolloutState()


def until_first_is_ready(cluster: FakeCluster) -> str:
    """Roll a change out to its first replica and return its name."""
    old = cluster.revisions[0]
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(40):
        cluster.tick()
        attempt = state_of(cluster).attempt
        if attempt is not None and attempt.ready_since is not None:
            return next(group.name for group in cluster.groups if group.revision != old)
    raise AssertionError("no replica of the change became Ready")


def crash(cluster: FakeCluster, name: str, times: int = 1) -> None:
    """Terminate the engine of a replica and restart it in its pod."""
    pod = cluster.pods[f"{name}-0"]
    cluster.restarts[pod["metadata"]["uid"]] = cluster.restarts.get(pod["metadata"]["uid"], 0) + times
    cluster.kubelets()


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 3}, {"maxSurge": 0}, {"maxSurge": 0, "maxUnavailable": 3}])
def test_canary_serves_before_other_replicas_follow(rollout: dict[str, Any]) -> None:
    cluster = settled(**rollout)
    old = cluster.revisions[0]
    first = until_first_is_ready(cluster)
    began = cluster.now
    while sum(group.revision != old for group in cluster.groups) == 1:
        assert cluster.now - began <= BAKE_SECONDS + TICK_SECONDS
        assert f"{first} runs the change as a canary" in cluster.condition("Progressing")["message"]
        cluster.tick()
    assert cluster.now - began >= BAKE_SECONDS
    cluster.settle()
    assert old not in cluster.revisions
    assert state_of(cluster).known_good == revision_spec_of(cluster.deployment)


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"parallelism": {"pipeline": 2, "gpusPerNode": 1}})


@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.parametrize("surge", [0, 1, 3])
@pytest.mark.parametrize("counts", [(4,), (6, 3), (1, 5), (2, 4, 3)])
def test_canary_stays_single_while_count_changes(spec: dict[str, Any], surge: int, counts: tuple[int, ...]) -> None:
    cluster = settled(2, maxSurge=surge, maxUnavailable=3, bakeTime="200s", **spec)
    old = cluster.revisions[0]
    first = until_first_is_ready(cluster)
    for count in counts:
        cluster.edit(replicas=count)
        for _ in range(6):
            cluster.tick()
            assert [group.name for group in cluster.groups if group.revision != old] == [first]
            assert first in cluster.condition("Progressing")["message"]
    assert sum(group.is_ready for group in cluster.groups) == counts[-1] + (surge > 0)
    cluster.settle()
    assert old not in cluster.revisions
    assert len(cluster.groups) == counts[-1]


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_change_with_more_replicas_has_one_canary(before: int, surge: int) -> None:
    cluster = settled(2, maxSurge=surge)
    cluster.edit(replicas=before)
    cluster.settle()
    old = state_of(cluster).known_good
    cluster.edit(runtime=a_runtime("--broken"), replicas=4)
    for _ in range(12):
        cluster.tick()
    revisions = [group.revision for group in cluster.groups if group.is_ready]
    assert len(revisions) == 4 - (surge == 0)
    assert len(set(cluster.revisions)) == 2
    cluster.settle()
    assert state_of(cluster).known_good == old
    assert [group.is_ready for group in cluster.groups] == [True] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_random_events_keep_a_single_canary(seed: int) -> None:
    """Randomize edits, scaling, full nodes and operator restarts; finally all replicas run the spec."""
    chance = random.Random(seed)
    replicas, parallelism = chance.randrange(1, 4), chance.choice([None, None, {"pipeline": 2, "gpusPerNode": 1}])
    rollout = {"maxSurge": chance.choice([0, 1, 2]), "maxUnavailable": chance.choice([1, 2, "50%"]), "bakeTime": "60s"}
    cluster = settled(replicas, parallelism=parallelism, **rollout)
    cluster.nodes = (1 if parallelism is None else 2) * (replicas + chance.choice([0, 1, 6]))
    for _ in range(60):
        what = chance.random()
        if what < 0.06:
            cluster.edit(runtime=a_runtime(f"--seed={chance.randrange(3)}"))
        elif what < 0.2:
            cluster.edit(replicas=chance.randrange(6))
        elif what < 0.25:
            cluster.restart_operator()
        cluster.tick()
        state, wanted = state_of(cluster), cluster.decide().status_inputs.revision
        if state.attempt is not None and state.known_good != revision_spec_of(cluster.deployment):
            assert sum(group.is_ready and group.revision == wanted for group in cluster.groups) <= 1
    cluster.nodes = 99
    cluster.edit(replicas=replicas)
    cluster.settle()
    assert [group.is_ready for group in cluster.groups] == [True] * replicas
    assert len(set(cluster.revisions)) == 1


def test_first_revision_has_no_canary() -> None:
    """There is nothing to compare with, and a broken edit a second later needs a known-good revision."""
    cluster = settled(1)
    assert state_of(cluster).known_good == revision_spec_of(cluster.deployment)
    assert state_of(cluster).attempt is None


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 0}])
def test_crash_during_bake_rolls_back(replicas: int, rollout: dict[str, Any]) -> None:
    cluster = settled(replicas, **rollout)
    before = cluster.revisions
    first = until_first_is_ready(cluster)
    cluster.tick()
    crash(cluster, first)
    cluster.settle()
    assert cluster.revisions == before
    said = cluster.condition("Degraded")
    assert said["reason"] == "RolledBack"
    assert "its engine terminated 10 s after it became Ready: out of luck (exit code 1)" in said["message"]


def test_single_failed_start_does_not_roll_back() -> None:
    cluster = settled(1)
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.tick()
    crash(cluster, "m-g1")
    cluster.settle()
    assert state_of(cluster).known_good == revision_spec_of(cluster.deployment)


def test_failing_requests_roll_back_with_numbers() -> None:
    cluster = settled(2)
    before = cluster.revisions
    first = until_first_is_ready(cluster)
    for _ in range(6):
        for group in cluster.groups:
            reason = "error" if group.name == first else "stop"
            rows = [Finished(0.0, 1.0, 9, 9, 0.1, 0.1, reason=reason)] * 10
            cluster.engine(group.ordinal).finished += rows
        cluster.tick()
    cluster.settle()
    assert cluster.revisions == before
    said = cluster.condition("Degraded")["message"]
    assert f"{first} is worse than the other replicas after 40s of serving: 100% of its" in said
    assert "requests failed; other replicas: 0%" in said


def test_restarted_operator_waits_for_remaining_bake_time() -> None:
    cluster = settled()
    until_first_is_ready(cluster)
    began = cluster.now
    for _ in range(4):
        cluster.tick()
    cluster.restart_operator()
    while state_of(cluster).known_good != revision_spec_of(cluster.deployment):
        cluster.tick()
    assert cluster.now - began <= BAKE_SECONDS + 2 * TICK_SECONDS


def test_edit_during_bake_rolls_back_to_known_good() -> None:
    cluster = settled(1)
    known_good = revision_spec_of(cluster.deployment)
    until_first_is_ready(cluster)
    cluster.edit(runtime=a_runtime("--broken"))
    for _ in range(60):
        cluster.tick()
    assert state_of(cluster).known_good == known_good
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    assert [group.is_ready for group in cluster.groups] == [True]


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 0}])
def test_crash_loop_after_bake_rolls_back(
    rollout: dict[str, Any],
) -> None:
    cluster = settled(2, **rollout)
    old, previous = cluster.revisions[0], revision_spec_of(cluster.deployment)
    until_first_is_ready(cluster)
    cluster.settle()
    assert state_of(cluster).previous == previous
    cluster.now += 1800.0
    crash(cluster, cluster.groups[0].name, MIN_CRASHES - 1)
    cluster.settle()
    assert old not in cluster.revisions
    crash(cluster, cluster.groups[0].name)
    cluster.settle()
    assert set(cluster.revisions) == {old}
    assert "its engines terminated 3 times in 3" in cluster.condition("Degraded")["message"]
    cluster.restart_operator()
    cluster.settle()
    assert set(cluster.revisions) == {old}, "it is remembered until something changes"


def test_unrelated_crashes_of_large_fleet_do_not_roll_back() -> None:
    """Each of three replicas of 24 loses its engine once within an hour, as at any revision."""
    cluster = settled(24, maxSurge=0, maxUnavailable=24)
    until_first_is_ready(cluster)
    cluster.settle()
    revisions = set(cluster.revisions)
    assert len(revisions) == 1
    for number in range(3):
        cluster.now += WATCH_SECONDS / 5
        crash(cluster, cluster.groups[number].name)
        cluster.settle()
    assert set(cluster.revisions) == revisions
    assert cluster.condition("Degraded")["status"] == "False"


def test_crashes_of_many_replicas_roll_back() -> None:
    cluster = settled(4)
    until_first_is_ready(cluster)
    cluster.settle()
    revisions = set(cluster.revisions)
    for group in [group.name for group in cluster.groups[:3]]:
        crash(cluster, group)
    cluster.settle()
    assert set(cluster.revisions) != revisions
    assert "its engines terminated 3 times" in cluster.condition("Degraded")["message"]


def test_crashes_long_after_change_do_not_roll_back() -> None:
    cluster = settled(1)
    until_first_is_ready(cluster)
    cluster.settle()
    revision = cluster.revisions
    cluster.now += WATCH_SECONDS + 1
    crash(cluster, cluster.groups[0].name, 9)
    cluster.settle()
    assert cluster.revisions == revision


def test_zero_bake_time_has_no_canary() -> None:
    cluster = settled(bakeTime="0s")
    cluster.edit(runtime=a_runtime("--seed=1"))
    edited = cluster.now
    cluster.settle()
    assert cluster.now - edited < 3 * BAKE_SECONDS
    assert len(set(cluster.revisions)) == 1


@pytest.mark.parametrize("text", ["2h", "3601s", "61m"])
def test_a_time_that_cannot_be_is_refused_by_name(text: str) -> None:
    (error,) = validation_errors(a_deployment(rollout={"bakeTime": text}))
    assert error.field == "spec.rollout.bakeTime"


def test_rollout_state_round_trips() -> None:
    form = RevisionSpec("{}", None, "now")
    state = RolloutState(
        form, RolloutAttempt("c", 1.0, 2.0, 3), None, NoSurgeRoom("c", "full"), form, PostRolloutWatch(4.0, 5, 0.25)
    )
    assert from_text(to_text(state, key=TOKEN), key=TOKEN) == state
