"""Rollback: a failing change is rolled back, a working one stays, and replicas converge."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_builders import MODEL_FACTS
from operator_builders import a_deployment as deployment_of
from operator_cluster import BROKEN, TICK_SECONDS, TOKEN, FakeCluster
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.stateful_set import rendered
from trimtab_operator.observed.actions import Apply
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.rollback import (
    MIN_REFUSED_STARTS,
    UNSTORED_ATTEMPT_SECONDS,
    FailedChange,
    RolloutState,
    change_of,
    change_timeout_seconds,
    from_text,
    known_good_deployment,
    plan_rollout_state,
    revision_spec_of,
    stored_rollout,
    to_text,
)

KEY = "a token"
START_SECONDS = 20.0  # of an engine that starts
QUICK = {"startTimeout": "2m", "drainTimeout": "10s", "maxSurge": 0, "bakeTime": "0s"}
"""Replace in place, which is harder than with surge (test_surge.py), and without a canary (test_bake.py)."""
BAD = (BROKEN,)


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def a_deployment(*, args: tuple[str, ...] = (), replicas: int = 2, **spec: Any) -> InferenceDeployment:
    return deployment_of(**{"runtime": a_runtime(*args), "replicas": replicas, "rollout": QUICK, **spec})


def render(deployment: InferenceDeployment) -> str:
    return rendered(deployment, token_hashes=TokenHashes.of(TOKEN)).revision


class RolloutCluster(FakeCluster):
    """A cluster whose engines take START_SECONDS to start, and which keeps the last failed change."""

    def __init__(self, *, args: tuple[str, ...] = (), replicas: int = 2, nodes: int = 99, **spec: Any) -> None:
        spec = {"runtime": a_runtime(*args), "replicas": replicas, "rollout": QUICK, **spec}
        super().__init__(start_seconds=START_SECONDS, nodes=nodes, **spec)
        self.most_down = 0
        self.failed: FailedChange | None = None

    def tick(self) -> ReconcilePlan:
        plan = super().tick()
        self.failed = plan.status_inputs.failed_change
        self.most_down = max(self.most_down, sum(not group.is_ready for group in self.groups))
        return plan

    def run(self, ticks: int = 70) -> None:
        """Run long enough for a rollout, a timeout and a rollback."""
        for _ in range(ticks):
            self.tick()

    @property
    def rollout_state(self) -> RolloutState:
        return self.state.rollout or RolloutState()


def settled(replicas: int = 2) -> RolloutCluster:
    cluster = RolloutCluster(replicas=replicas)
    cluster.settle()
    assert cluster.rollout_state.known_good == revision_spec_of(cluster.deployment)
    cluster.most_down = 0
    return cluster


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_failing_change_is_rolled_back_after_one_replica(replicas: int) -> None:
    cluster = settled(replicas)
    before = cluster.revisions
    cluster.edit(runtime=a_runtime(*BAD))
    bad = render(cluster.deployment)
    most = 0
    for _ in range(100):
        cluster.tick()
        most = max(most, cluster.revisions.count(bad))
    assert most == 1
    assert cluster.revisions == before
    assert all(group.is_ready for group in cluster.groups)
    assert cluster.failed is not None
    assert "m-g0 did not become Ready within 2m" in cluster.failed.message
    assert cluster.failed.rolled_back_to == before[0]
    assert cluster.most_down == 1


@pytest.mark.parametrize(("gigabytes", "is_given_up"), [(1, True), (141, False)])
def test_large_model_has_longer_start_timeout(gigabytes: int, is_given_up: bool) -> None:
    parts = {**MODEL_FACTS["weights_by_part"], "dense_mlp": gigabytes * 10**9}
    facts = {**MODEL_FACTS, "weights_by_part": parts, "weights_bytes": sum(parts.values())}
    cluster = FakeCluster(knows_the_model=False, rollout={"drainTimeout": "10s", "bakeTime": "0s", "maxSurge": 0})
    cluster.model_words = (0, json.dumps(facts))
    cluster.settle()
    cluster.start_seconds = 40 * 60.0
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(42):
        cluster.tick()
        cluster.now += 60.0
    ready = cluster.condition("Ready")
    assert (ready["reason"] == "RolledBack") is is_given_up
    assert (ready["status"] == "True") is not is_given_up


def test_failing_layout_is_rolled_back_without_mixed_groups() -> None:
    cluster = settled()
    cluster.edit(runtime=a_runtime(*BAD), parallelism={"pipeline": 2, "gpusPerNode": 1})
    for _ in range(70):
        cluster.tick()
        assert all(group.revision for group in cluster.groups), "the sets of a group differ"
    assert cluster.failed is not None
    assert [group.num_pods for group in cluster.groups] == [1, 1]
    assert all(group.is_ready for group in cluster.groups)
    cluster.edit(runtime=a_runtime())
    cluster.run()
    assert [group.num_pods for group in cluster.groups] == [2, 2]
    assert all(group.is_ready for group in cluster.groups)
    assert cluster.rollout_state.known_good == revision_spec_of(cluster.deployment)


def test_unschedulable_group_is_rolled_back() -> None:
    """The new group backs off for longer each time; the known-good group starts at once."""
    cluster = RolloutCluster(replicas=1, parallelism={"pipeline": 2, "gpusPerNode": 1}, nodes=2)
    cluster.run()
    assert all(group.is_ready for group in cluster.groups)
    patient = {"startTimeout": "5m", "drainTimeout": "10s", "maxSurge": 0, "bakeTime": "0s"}
    cluster.edit(rollout=patient, parallelism={"pipeline": 3, "gpusPerNode": 1})
    gave_back = 0
    while cluster.failed is None:
        cluster.tick()
        gave_back += sum(group.num_pods == 0 for group in cluster.groups)
    assert gave_back > 0
    assert "m-g0 did not become Ready within 5m" in cluster.failed.message
    for _ in range(int(START_SECONDS / TICK_SECONDS) + 2):
        cluster.tick()
    assert [(group.num_pods, group.is_ready) for group in cluster.groups] == [(2, True)]


def test_rolled_back_change_is_retried_after_edit() -> None:
    cluster = settled()
    cluster.edit(runtime=a_runtime(*BAD))
    cluster.run()
    good = cluster.revisions
    cluster.edit(replicas=3)  # an autoscaler's write is no change of the spec in this sense
    cluster.run()
    assert cluster.revisions == [good[0]] * 3
    cluster.edit(rollout={"startTimeout": "3m", "drainTimeout": "10s"})
    cluster.tick()
    cluster.tick()
    assert render(cluster.deployment) in cluster.revisions
    cluster.run()
    assert cluster.revisions == [good[0]] * 3


def test_good_change_after_bad_one_is_rolled_out() -> None:
    cluster = settled()
    cluster.edit(runtime=a_runtime(*BAD))
    cluster.run()
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.run()
    assert cluster.revisions == [render(cluster.deployment)] * 2
    assert cluster.failed is None
    assert (cluster.rollout_state.known_good, cluster.rollout_state.attempt, cluster.rollout_state.rolled_back) == (
        revision_spec_of(cluster.deployment),
        None,
        None,
    )


def test_failing_first_revision_is_reported() -> None:
    cluster = RolloutCluster(args=BAD)
    cluster.run()
    assert cluster.failed is not None
    assert cluster.failed.rolled_back_to is None
    assert cluster.revisions == [render(cluster.deployment)] * 2


def test_restarted_operator_keeps_timer_and_known_good() -> None:
    cluster = settled(1)
    cluster.edit(runtime=a_runtime(*BAD))
    for _ in range(4):
        cluster.tick()
    began = cluster.now
    while cluster.rollout_state.rolled_back is None:
        cluster.restart_operator()
        cluster.tick()
    assert cluster.now - began < change_timeout_seconds(cluster.deployment) + 2 * TICK_SECONDS
    cluster.restart_operator()
    cluster.run()
    assert all(group.is_ready for group in cluster.groups)


def test_unreachable_ready_engine_blocks_rollout() -> None:
    cluster = settled(3)
    cluster.edit(runtime=a_runtime("--seed=1"))
    new = render(cluster.deployment)
    cluster.is_answering = False
    cluster.run()
    assert cluster.revisions.count(new) == 1
    assert cluster.rollout_state.rolled_back is None
    cluster.is_answering = True
    cluster.run()
    assert cluster.revisions == [new] * 3


def test_failing_known_good_revision_is_not_rolled_back() -> None:
    cluster = settled()
    cluster.unready.update(cluster.pods)
    cluster.is_answering = False
    cluster.now += 1e6
    cluster.run(3)
    assert cluster.failed is None
    assert cluster.revisions == [render(cluster.deployment)] * 2


def test_blocked_spec_keeps_known_good_at_present_count() -> None:
    cluster = settled()
    before = cluster.revisions[0]
    cluster.model_words = (1, "no such file")  # of the spec's model
    cluster.edit(model={"uri": "file:///models/other"}, replicas=5)
    cluster.run()
    assert cluster.revisions == [before] * 5
    assert all(group.is_ready for group in cluster.groups)


# --- rejected configuration -------------------------------------------------------------------------------------------


def ended(exit_code: int, times: int) -> dict[str, Any]:
    last = {"terminated": {"exitCode": exit_code, "message": "trimtab-engine: max_model_len is too long"}}
    container = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last, "restartCount": times}
    return {"containerStatuses": [container]}


@pytest.mark.parametrize(
    ("exit_code", "times", "is_taken_back"),
    [
        (2, MIN_REFUSED_STARTS, True),  # the engine rejects it: waiting does not help
        (2, MIN_REFUSED_STARTS - 1, False),
        (1, 50, False),  # a crash may be the node's fault: the budget decides
        (137, 50, False),
    ],
)
def test_rejected_configuration_is_rolled_back_at_once(exit_code: int, times: int, is_taken_back: bool) -> None:
    cluster = settled(1)
    cluster.edit(runtime=a_runtime(*BAD))
    cluster.tick()
    cluster.tick()
    cluster.pods["m-g0-0"]["status"] = ended(exit_code, times)
    failed = cluster.decide().status_inputs.failed_change
    assert (failed is not None) is is_taken_back
    if failed is not None:
        assert "max_model_len is too long (exit code 2)" in failed.message


# --- stored state -----------------------------------------------------------------------------------------------------


def test_known_good_revision_is_the_written_spec() -> None:
    overlay = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "2Gi"}}}]}}
    deployment = a_deployment(template=overlay, engine={"gpuMemoryUtilization": "0.50"})
    found = known_good_deployment(a_deployment(replicas=7), revision_spec_of(deployment))
    assert found is not None
    assert render(found) == render(deployment)
    assert found.replicas == 7


def test_invalid_known_good_spec_is_not_used() -> None:
    form = revision_spec_of(a_deployment(runtime={"device": "cpu", "image": "e", "kind": "vllm"}))
    assert known_good_deployment(a_deployment(), form) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[" * 100_000, '{"signature": "x", "state": "{}"}'])
def test_damaged_rollout_state_is_ignored(text: str | None) -> None:
    assert from_text(text, key=KEY) == RolloutState()


def test_unsigned_rollout_state_is_ignored() -> None:
    text = to_text(settled().rollout_state, key=KEY)
    assert from_text(text, key=KEY) != RolloutState()
    assert from_text(text.replace("engine:1", "evil:1"), key=KEY) == RolloutState()
    assert from_text(text, key="another token") == RolloutState()


def test_rollout_state_is_written_only_on_change() -> None:
    cluster = settled()
    assert plan_rollout_state(cluster.deployment, ObservedChildren(), RolloutState(), key=KEY, now=cluster.now) == ()
    (first,) = plan_rollout_state(
        cluster.deployment, ObservedChildren(), cluster.rollout_state, key=KEY, now=cluster.now
    )
    assert isinstance(first, Apply)
    stored = ObservedChildren(config_maps=(first.manifest,))
    assert plan_rollout_state(cluster.deployment, stored, cluster.rollout_state, key=KEY, now=cluster.now) == ()


def test_counts_and_tuning_modes_are_no_changes_but_caps_and_images_are() -> None:
    base = a_deployment()
    same = [a_deployment(replicas=9), a_deployment(engine={"schedulingPolicy": "priority"})]
    other = [
        a_deployment(args=("--seed=1",)),
        a_deployment(runtime={"device": "cpu", "image": "engine:2"}),
        a_deployment(engine={"gpuMemoryUtilization": "0.5"}),
        a_deployment(rollout={"startTimeout": "9m", "drainTimeout": "10s"}),
    ]
    name = change_of(base, render(base))
    assert all(change_of(found, render(found)) == name for found in same)
    assert all(change_of(found, render(found)) != name for found in other)


# --- randomized history -----------------------------------------------------------------------------------------------

EVENTS = st.sampled_from(["tick", "tick", "tick", "bad", "good", "other", "scale", "restart", "wait"])


@given(st.lists(EVENTS, max_size=40), st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_edits_converge_to_working_revision(events: list[str], ends_bad: bool) -> None:
    cluster = settled()
    replicas = 2
    for number, event in enumerate(events):
        if event == "tick":
            cluster.tick()
        elif event == "wait":
            cluster.now += 30.0
        elif event == "restart":
            cluster.restart_operator()
        elif event == "scale":
            replicas = 1 + number % 3
            cluster.edit(replicas=replicas)
        else:
            cluster.edit(runtime=a_runtime(*{"bad": BAD, "good": (), "other": (f"--seed={number}",)}[event]))
    cluster.edit(runtime=a_runtime(*(*(BAD if ends_bad else ()), "--last")))
    cluster.run()
    assert len(cluster.groups) == replicas
    assert all(group.is_ready for group in cluster.groups)
    assert len(set(cluster.revisions)) == 1
    assert (cluster.failed is not None) is ends_bad
    assert cluster.decide().is_idle


def test_young_attempt_is_not_stored() -> None:
    cluster = RolloutCluster(replicas=1)
    cluster.settle()
    known = cluster.objects["ConfigMap", "m-rollout"]["data"]
    cluster.edit(runtime=a_runtime(*BAD))
    for _ in range(int(UNSTORED_ATTEMPT_SECONDS / TICK_SECONDS)):
        cluster.tick()
        assert cluster.objects["ConfigMap", "m-rollout"]["data"] == known
    for _ in range(3):
        cluster.tick()
    assert cluster.objects["ConfigMap", "m-rollout"]["data"] != known


def test_restarting_operator_rolls_back_in_time() -> None:
    cluster = RolloutCluster(replicas=1)
    cluster.settle()
    cluster.edit(runtime=a_runtime(*BAD))
    began = cluster.now
    while cluster.failed is None:
        cluster.restart_operator()
        cluster.tick()
        assert cluster.now - began < change_timeout_seconds(cluster.deployment) + 6 * TICK_SECONDS


def test_earlier_attempt_does_not_delay_rollback() -> None:
    cluster = RolloutCluster(replicas=1)
    cluster.settle()
    cluster.edit(runtime=a_runtime(*BAD))
    while stored_rollout(cluster.deployment, cluster.children(), key=TOKEN).attempt is None:
        cluster.tick()
    cluster.edit(rollout={**QUICK, "startTimeout": "3m"})  # another change, with the pods of the one before
    began = cluster.now
    while cluster.failed is None:
        cluster.restart_operator()
        cluster.tick()
        assert cluster.now - began < change_timeout_seconds(cluster.deployment) + 6 * TICK_SECONDS
