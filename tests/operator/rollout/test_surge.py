"""Surge rollouts: no replica is removed before another one serves, unless no node has room."""

from __future__ import annotations

import random
from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import BROKEN, TICK_SECONDS, TOKEN, FakeCluster
from trimtab_operator.rollout.group_assignment import allowed_down
from trimtab_operator.rollout.rollback import from_text
from trimtab_operator.rollout.surge import LAST_REPLICA_TIMEOUT_SECONDS, PLACEMENT_TIMEOUT_SECONDS, allowed_surge
from trimtab_operator.validation.rules import validation_errors

QUICK = {"startTimeout": "2m", "drainTimeout": "10s", "bakeTime": "0s"}
START_SECONDS = 20.0
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 40))]


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def refused(name: str, words: str) -> dict[str, Any]:
    """Return the Event of a StatefulSet whose pod the API server rejects."""
    message = f"create Pod {name}-0 in StatefulSet {name} failed error: {words}"
    return {"involvedObject": {"name": name}, "message": message, "lastTimestamp": "2026-01-01T12:00:00Z"}


class Watched(FakeCluster):
    """A cluster that records the lowest number of Ready replicas and the number of groups."""

    fewest_ready = 99
    most_groups = 0

    def tick(self) -> Any:
        plan = super().tick()
        self.watch()
        return plan

    def watch(self) -> None:
        self.fewest_ready = min(self.fewest_ready, sum(group.is_ready for group in self.groups))
        self.most_groups = max(self.most_groups, len(self.groups))


def settled(replicas: int = 1, *, nodes: int = 99, rollout: dict[str, Any] | None = None, **spec: Any) -> Watched:
    rollout = {**QUICK, **(rollout or {})}
    cluster = Watched(
        replicas=replicas, nodes=nodes, runtime=a_runtime(), rollout=rollout, start_seconds=START_SECONDS, **spec
    )
    cluster.settle()
    cluster.fewest_ready, cluster.most_groups = 99, 0
    return cluster


@pytest.mark.parametrize(
    ("value", "replicas", "surge"), [(1, 1, 1), (0, 4, 0), (3, 2, 3), ("25%", 4, 1), ("10%", 1, 1), ("0%", 9, 0)]
)
def test_max_surge_is_a_count_or_a_share_rounded_up(value: int | str, replicas: int, surge: int) -> None:
    deployment = a_deployment(rollout={"maxSurge": value})
    assert validation_errors(deployment) == ()
    assert allowed_surge(deployment, replicas) == surge


@pytest.mark.parametrize("value", ["101%", "x%", 1001, -1])
def test_a_surge_that_is_no_count_is_refused_by_name(value: int | str) -> None:
    (error,) = validation_errors(a_deployment(rollout={"maxSurge": value}))
    assert error.field == "spec.rollout.maxSurge"


def test_single_replica_serves_until_surge_is_ready() -> None:
    cluster = settled()
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"))
    while cluster.decide().children or len(cluster.groups) > 1:
        cluster.tick()
        is_new_ready = any(group.is_ready and group.ordinal == 1 for group in cluster.groups)
        assert is_new_ready or cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    assert [(group.ordinal, group.is_ready) for group in cluster.groups] == [(1, True)]
    assert (cluster.fewest_ready, cluster.most_groups) == (1, 2)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(("replicas", "surge", "most"), [(3, 1, 4), (3, 2, 5), (2, 5, 4), (4, "50%", 6)])
def test_surge_rollout_keeps_all_replicas_serving(replicas: int, surge: int | str, most: int) -> None:
    cluster = settled(replicas, rollout={"maxSurge": surge})
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.settle()
    assert cluster.fewest_ready == replicas
    assert cluster.most_groups <= most
    assert len(set(cluster.revisions)) == 1
    assert len(cluster.groups) == replicas


def test_each_engine_starts_once() -> None:
    cluster = settled(3)
    started = len(cluster.engines)
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.settle()
    assert len(cluster.engines) - started == 3


def test_failing_change_removes_no_replica() -> None:
    cluster = settled(2)
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit(runtime=a_runtime(BROKEN))
    for _ in range(60):
        cluster.tick()
    assert cluster.fewest_ready == 2
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == before
    assert cluster.condition("Degraded")["reason"] == "RolledBack"


def test_flapping_readiness_during_surge_deletes_no_pod() -> None:
    cluster = settled(1)
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.set_ready("m-g0-0", False)
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(3):
        cluster.tick()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    cluster.set_ready("m-g0-0")
    cluster.settle()
    assert len(set(cluster.revisions)) == 1


@pytest.mark.parametrize("hung", [["m-g0-0"], ["m-g0-0", "m-g1-0"], ["m-g0-0", "m-g1-0", "m-g2-0"]])
def test_replicas_that_hang_for_good_do_not_hold_a_change_up(hung: list[str]) -> None:
    cluster = settled(3)
    uids = {name: cluster.pods[name]["metadata"]["uid"] for name in hung}
    cluster.unready.update(hung)
    cluster.controllers()
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(40):
        cluster.tick()
        cluster.unready = {
            name
            for name in hung
            if (cluster.pods.get(name) or {"metadata": {"uid": ""}})["metadata"]["uid"] == uids[name]
        }
        cluster.kubelets()
    assert len(set(cluster.revisions)) == 1
    assert all(group.is_ready for group in cluster.groups)


def test_unschedulable_surge_is_reported_before_replacement() -> None:
    cluster = settled(1, nodes=1)
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"))
    edited = cluster.now
    while "SurgeUnschedulable" not in cluster.events:
        assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
        cluster.tick()
    assert PLACEMENT_TIMEOUT_SECONDS <= cluster.now - edited <= PLACEMENT_TIMEOUT_SECONDS + 4 * TICK_SECONDS
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    said = cluster.condition("Progressing")["message"]
    assert (
        "m-g1, which should serve before m-g0 is removed, is unschedulable: 0/1 nodes are available: 1 Insufficient"
        in said
    )
    assert "requests fail until the new one is Ready" in said
    cluster.settle()
    assert [(group.ordinal, group.is_ready) for group in cluster.groups] == [(0, True)]
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] != old
    assert cluster.events.count("SurgeUnschedulable") == 1


def test_a_new_operator_remembers_that_there_is_no_room() -> None:
    cluster = settled(3, nodes=3)
    cluster.edit(runtime=a_runtime("--seed=1"))
    while "SurgeUnschedulable" not in cluster.events:
        cluster.tick()
    cluster.restart_operator()
    cluster.most_groups = 0
    cluster.tick()
    cluster.most_groups = 0
    cluster.settle()
    assert (cluster.most_groups, cluster.fewest_ready) == (3, 2)
    assert cluster.events.count("SurgeUnschedulable") == 1
    state = from_text(cluster.objects["ConfigMap", "m-rollout"]["data"]["rollout.json"], key=TOKEN)
    assert state.surge_obstacle is not None


def test_the_next_change_looks_for_room_again() -> None:
    cluster = settled(1, nodes=1)
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.settle()
    cluster.nodes, cluster.fewest_ready = 2, 99
    cluster.edit(runtime=a_runtime("--seed=2"))
    cluster.settle()
    assert cluster.fewest_ready == 1


def test_exhausted_quota_is_a_surge_obstacle() -> None:
    cluster = settled(1)
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.quota = 1
    words = 'pods "m-g1-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
    cluster.creation_failures = [refused("m-g1", words)]
    for _ in range(40):
        cluster.tick()
    assert "SurgeUnschedulable" in cluster.events
    assert [(group.ordinal, group.is_ready) for group in cluster.groups] == [(0, True)]
    assert len(set(cluster.revisions)) == 1


@pytest.mark.parametrize(
    "words", ["node(s) didn't match Pod's node affinity/selector", "node(s) had untolerated taint(s)"]
)
def test_never_schedulable_change_replaces_nothing(words: str) -> None:
    cluster = settled(1, nodes=1, rollout={"startTimeout": "5m"})
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.unschedulable_message = f"0/1 nodes are available: 1 {words}."
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(90):
        cluster.tick()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    assert "SurgeUnschedulable" not in cluster.events
    assert words in cluster.condition("Degraded")["message"]


def test_rejected_pods_replace_nothing() -> None:
    cluster = settled(1)
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.quota = 1
    cluster.creation_failures = [refused("m-g1", 'admission webhook "policy" denied the request: no')]
    for _ in range(60):
        cluster.tick()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    assert "denied the request" in cluster.condition("Degraded")["message"]


def test_scaling_to_zero_waits_for_no_surge() -> None:
    cluster = settled(2)
    cluster.edit(runtime=a_runtime("--seed=1"), replicas=0)
    cluster.tick()
    assert cluster.groups == ()


def test_change_with_more_replicas_adds_them_at_once() -> None:
    cluster = settled(1)
    cluster.edit(runtime=a_runtime("--seed=1"), replicas=3)
    cluster.settle()
    assert cluster.fewest_ready == 1
    assert len(cluster.groups) == 3
    assert len(set(cluster.revisions)) == 1


@pytest.mark.parametrize("bake", ["0s", "40s"])
@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize(("before", "wanted"), [(2, 3), (3, 5)])
def test_rollout_continues_despite_unschedulable_additions(before: int, wanted: int, surge: int, bake: str) -> None:
    """An unschedulable replica cannot serve: scheduled ones are replaced one at a time."""
    cluster = settled(before, nodes=before, rollout={"maxSurge": surge, "bakeTime": bake})
    old = cluster.revisions[0]
    cluster.edit(runtime=a_runtime("--seed=1"), replicas=wanted)
    for _ in range(100):
        cluster.tick()
    ready = [group.revision for group in cluster.groups if group.is_ready]
    assert len(ready) == before
    assert old not in cluster.revisions
    assert cluster.fewest_ready == before - 1
    assert cluster.condition("Degraded")["reason"] != "RolledBack"


def test_last_serving_replica_is_kept() -> None:
    cluster = settled(1, nodes=1, rollout={"maxSurge": 0})
    uid = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"), replicas=2)
    for _ in range(60):
        cluster.tick()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == uid
    assert cluster.condition("Degraded")["reason"] == "RolledBack"


def is_placed(cluster: FakeCluster, name: str) -> bool:
    return "nodeName" in cluster.pods[name]["spec"]


@pytest.mark.parametrize("bake", ["0s", "40s"])
@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("replicas", [3, 4])
def test_drained_replica_counts_as_unavailable(replicas: int, surge: int, bake: str) -> None:
    """Its node is drained: unlike an added replica it served, and replacing another would leave two missing."""
    cluster = settled(replicas, nodes=replicas, rollout={"maxSurge": surge, "bakeTime": bake, "startTimeout": "20m"})
    cluster.nodes = replicas - 1
    del cluster.pods["m-g0-0"]
    cluster.controllers()
    assert not is_placed(cluster, "m-g0-0")
    cluster.fewest_ready = 99
    for tick in range(70):
        if tick == 20:
            cluster.edit(runtime=a_runtime("--seed=1"))
        cluster.tick()
        assert cluster.fewest_ready == replicas - 1
    cluster.nodes = replicas
    cluster.controllers()
    cluster.settle()
    assert cluster.fewest_ready == replicas - 1
    assert len(set(cluster.revisions)) == 1
    assert [group.is_ready for group in cluster.groups] == [True] * replicas
    assert cluster.condition("Degraded")["reason"] != "RolledBack"


def test_added_replica_does_not_count_as_lost() -> None:
    cluster = settled(2, nodes=3)
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.settle()
    assert cluster.most_groups == 3
    cluster.nodes = 2
    cluster.edit(replicas=3)
    for _ in range(20):
        cluster.tick()
    cluster.edit(runtime=a_runtime("--seed=2"))
    for _ in range(100):
        cluster.tick()
    assert len(set(cluster.revisions)) == 1


@pytest.mark.parametrize("bake", ["0s", "40s"])
@pytest.mark.parametrize("surge", [0, 1])
def test_hanging_replica_is_replaced_before_serving_one(surge: int, bake: str) -> None:
    """Then two replicas serve, and the rollout continues without removing the last one."""
    cluster = settled(2, nodes=2, rollout={"maxSurge": surge, "bakeTime": bake})
    cluster.edit(replicas=3)
    for _ in range(20):
        cluster.tick()
    assert not is_placed(cluster, "m-g2-0")
    hung = cluster.pods["m-g1-0"]["metadata"]["uid"]
    cluster.set_ready("m-g1-0", ready=False)
    cluster.fewest_ready = 99
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(100):
        cluster.tick()
        if (cluster.pods.get("m-g1-0") or {"metadata": {"uid": ""}})["metadata"]["uid"] != hung:
            cluster.set_ready("m-g1-0")
    assert cluster.fewest_ready == 1
    assert len(set(cluster.revisions)) == 1
    assert sum(group.is_ready for group in cluster.groups) == 2
    assert cluster.condition("Degraded")["reason"] != "RolledBack"


def test_replicas_of_several_pods_surge_as_a_whole() -> None:
    cluster = settled(1, parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.edit(runtime=a_runtime("--seed=1"))
    cluster.settle()
    assert cluster.fewest_ready == 1
    assert [(group.ordinal, group.num_pods) for group in cluster.groups] == [(1, 2)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_edits_during_rollout_lose_no_replica(seed: int) -> None:
    """Randomize edits, scaling and operator restarts; the wanted number of replicas serves throughout."""
    chance = random.Random(seed)
    replicas = chance.randrange(1, 4)
    cluster = settled(replicas, rollout={"maxSurge": chance.choice([1, 2, "50%"])})
    least = replicas
    for _ in range(12):
        what = chance.random()
        if what < 0.4:
            cluster.edit(runtime=a_runtime(f"--seed={chance.randrange(3)}"))
        elif what < 0.6:
            wanted = chance.randrange(1, 4)
            least = min(least, wanted)
            cluster.edit(replicas=wanted)
        elif what < 0.7:
            cluster.restart_operator()
        for _ in range(chance.randrange(8)):
            cluster.tick()
    cluster.settle()
    assert cluster.fewest_ready >= least
    assert len(set(cluster.revisions)) == 1
    assert len(cluster.groups) == cluster.deployment.replicas


def ready_pods(cluster: FakeCluster) -> set[str]:
    return {group.leader["metadata"]["uid"] for group in cluster.groups if group.is_ready and group.leader is not None}


def kept_pods(cluster: FakeCluster) -> set[str]:
    """Return the pods that are not being deleted."""
    owners = {manifest["metadata"]["name"] for (kind, _), manifest in cluster.objects.items() if kind == "StatefulSet"}
    return {
        pod["metadata"]["uid"]
        for pod in cluster.pods.values()
        if pod["metadata"]["ownerReferences"][0]["name"] in owners
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_random_flapping_respects_max_unavailable(seed: int) -> None:
    """Serving replicas are replaced only while enough others serve: all wanted ones with surge, otherwise all but
    `maxUnavailable`.
    """
    chance = random.Random(seed)
    replicas, surge, unavailable = chance.randrange(1, 5), chance.choice([0, 1, 2]), chance.choice([1, 2, "50%"])
    rollout = {"maxSurge": surge, "maxUnavailable": unavailable, "bakeTime": chance.choice(["0s", "10s"])}
    cluster = settled(replicas, nodes=replicas + chance.choice([0, 1, 9]), rollout=rollout)
    for _ in range(50):
        what = chance.random()
        if what < 0.15:
            cluster.edit(runtime=a_runtime(f"--seed={chance.randrange(3)}"))
        elif what < 0.3:
            cluster.unready = {name for name in cluster.pods if chance.random() < 0.3}
            cluster.kubelets()
        elif what < 0.35:
            cluster.restart_operator()
        elif what < 0.4:
            cluster.nodes = replicas + chance.choice([0, 1, 9])
        before, is_full = ready_pods(cluster), was_no_room(cluster)
        cluster.plan_reconcile()
        left = before & kept_pods(cluster)
        may_be_missing = allowed_down(cluster.deployment, replicas) if surge == 0 or is_full else 0
        assert left == before or len(left) >= replicas - may_be_missing
        cluster.now += TICK_SECONDS
        cluster.controllers()
    cluster.unready.clear()
    cluster.kubelets()
    cluster.settle()
    assert len(set(cluster.revisions)) == 1
    assert len(cluster.groups) == replicas


def was_no_room(cluster: FakeCluster) -> bool:
    """Return True if the operator found no room for a surge replica of the present change."""
    kept = cluster.objects.get(("ConfigMap", "m-rollout"), {}).get("data", {}).get("rollout.json")
    return from_text(kept, key=TOKEN).surge_obstacle is not None


def scale_up_event(cluster: FakeCluster, reason: str) -> dict[str, Any]:
    return {"involvedObject": {"name": "m-g1-0"}, "reason": reason, "lastTimestamp": cluster._time()}


@pytest.mark.parametrize("reason", ["TriggeredScaleUp", "Nominated"])
def test_node_that_is_added_is_waited_for(reason: str) -> None:
    """The autoscaler needs longer than the placement timeout; the only replica serves throughout."""
    cluster = settled(1, nodes=1, rollout={"startTimeout": "10m"})
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(3):
        cluster.tick()
    cluster.creation_failures = [scale_up_event(cluster, reason)]
    for _ in range(int(400 / TICK_SECONDS)):
        cluster.tick()
        assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old
    cluster.nodes = 2
    cluster.settle()
    assert "SurgeUnschedulable" not in cluster.events
    assert [group.is_ready for group in cluster.groups] == [True]
    assert "m-g0-0" not in cluster.pods


def test_only_replica_is_kept_longer_than_one_of_several() -> None:
    cluster = settled(1, nodes=1, rollout={"startTimeout": "30m"})
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(runtime=a_runtime("--seed=1"))
    began = cluster.now
    for _ in range(200):
        cluster.tick()
        if cluster.pods["m-g0-0"]["metadata"]["uid"] != old:
            break
    assert LAST_REPLICA_TIMEOUT_SECONDS <= cluster.now - began <= LAST_REPLICA_TIMEOUT_SECONDS + 4 * TICK_SECONDS
