"""Effect of the GPU budget share on a reconcile plan: replicas, status, conditions, Events."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from operator_cluster import TICK_SECONDS, FakeCluster
from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.observed.actions import Delete
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.planning.gpu_budget import GpuClaim
from trimtab_operator.reconcile.gpu_claims import GpuClaims
from trimtab_operator.resource.installation import GpuBudget, Installation
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.resource.time import timestamp

GPU = {"device": "cuda", "image": "engine:1"}
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40))]
DRAIN_SECONDS = 12.0
LAYOUTS: tuple[tuple[dict[str, int], ...], ...] = (
    ({"tensor": 1}, {"tensor": 3}),
    ({"pipeline": 1}, {"pipeline": 2, "gpusPerNode": 1}, {"pipeline": 3, "gpusPerNode": 1}),
)


def a_cluster(total: int, *others: GpuClaim, replicas: int = 3, **spec: Any) -> FakeCluster:
    cluster = FakeCluster(runtime=GPU, replicas=replicas, **spec)
    cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
    cluster.gpu_claims = others
    return cluster


def another(gpus: int, *, priority: int = 100) -> GpuClaim:
    return GpuClaim("n/other", priority, "2026-01-01", 1, gpus, gpus, gpus, gpus)


def test_no_budget_makes_no_claim_and_no_event() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    cluster.settle()
    assert (cluster.status["replicas"], "wantedReplicas" in cluster.status) == (3, False)
    assert cluster.decide().gpu_claim is None


def test_budget_limits_replicas_and_reports_once() -> None:
    cluster = a_cluster(5, another(3))
    cluster.settle()
    assert len(cluster.groups) == 2
    status = cluster.status
    assert (status["desiredReplicas"], status["wantedReplicas"], status["ready"]) == (2, 3, "2/2")
    limited = cluster.condition("ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "OverBudget")
    assert "of the budget of 5 GPUs n/other (priority 100) uses 3" in limited["message"]
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.events.count("OverBudget") == 1
    cluster.restart_operator()
    cluster.settle()
    assert cluster.events.count("OverBudget") == 1


def test_freed_budget_adds_missing_replicas_and_reports() -> None:
    cluster = a_cluster(5, another(3))
    cluster.settle()
    cluster.gpu_claims = ()
    cluster.settle()
    assert len(cluster.groups) == 3
    assert "wantedReplicas" not in cluster.status
    assert cluster.condition("ScalingLimited")["reason"] == "NotLimited"
    assert cluster.events.count("WithinBudget") == 1


def test_higher_priority_preempts_above_minimum() -> None:
    cluster = a_cluster(4, scaling={"minReplicas": 2, "maxReplicas": 3}, tuning={"mode": "Off"})
    cluster.settle()
    assert len(cluster.groups) == 3
    cluster.gpu_claims = (GpuClaim("n/other", 1, "2026-01-01", 1, 1, 9, 1, 1),)
    cluster.settle()
    assert len(cluster.groups) == 2
    cluster.edit(priority=2)
    cluster.settle()
    assert len(cluster.groups) == 3


def test_resource_without_gpus_is_neither_ready_nor_scaled_to_zero() -> None:
    cluster = a_cluster(3, another(3))
    cluster.settle()
    assert cluster.groups == ()
    for kind in ("Ready", "Serving"):
        condition = cluster.condition(kind)
        assert (condition["status"], condition["reason"]) == ("False", "OverBudget")
    assert cluster.status["desiredReplicas"] == 0


def test_autoscaler_replicas_are_limited_but_not_overwritten() -> None:
    cluster = a_cluster(4)
    cluster.edit(replicas=9)
    cluster.settle()
    assert len(cluster.groups) == 4
    assert cluster.status["wantedReplicas"] == 9
    assert cluster.deployment.replicas == 9


def test_priority_edit_changes_no_pod() -> None:
    cluster = a_cluster(9)
    cluster.settle()
    before = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.edit(priority=5)
    cluster.settle()
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == before


def test_rollout_without_surge_budget_replaces_in_place() -> None:
    cluster = a_cluster(2, replicas=2, rollout={"bakeTime": "0s"})
    cluster.settle()
    before = set(cluster.revisions)
    cluster.edit(engine={"maxModelLen": 1024})
    most, words = 0, set[str]()
    while before & set(cluster.revisions) or cluster.condition("Ready")["status"] != "True":
        cluster.tick()
        most = max(most, len(cluster.groups))
        words.add(cluster.condition("Progressing")["message"])
    assert most == 2
    assert any(said.endswith("in place: the GPU budget has no room for a further replica") for said in words)


def test_surge_replica_counts_against_budget() -> None:
    cluster = a_cluster(2, replicas=1, rollout={"bakeTime": "0s"})
    cluster.settle()
    assert cluster.decide().num_surge == 0
    cluster.edit(engine={"maxModelLen": 1024})
    plan = cluster.plan_reconcile()
    assert (plan.claimed_replicas, plan.num_surge, len(cluster.groups)) == (1, 1, 2)
    cluster.settle()
    assert (len(cluster.groups), cluster.decide().num_surge) == (1, 0)


def test_paused_or_invalid_resource_claims_its_present_gpus() -> None:
    cluster = a_cluster(3)
    cluster.settle()
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"}
    cluster.edit(replicas=9)
    gpu_claim = cluster.decide().gpu_claim
    assert gpu_claim is not None
    assert (gpu_claim.running, gpu_claim.min_replicas, gpu_claim.wanted, gpu_claim.held) == (3, 3, 3, 3)
    cluster.body["metadata"]["annotations"] = {}
    cluster.edit(replicas="many")
    assert cluster.decide().gpu_claim == gpu_claim


def test_cpu_replicas_are_not_limited_by_budget() -> None:
    cluster = a_cluster(0)
    cluster.edit(runtime={**GPU, "device": "cpu"})
    cluster.settle()
    assert len(cluster.groups) == 3
    assert cluster.condition("ScalingLimited")["reason"] == "NotLimited"


def test_a_replica_of_several_pods_counts_with_all_its_gpus() -> None:
    cluster = a_cluster(3, parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.settle()
    assert len(cluster.groups) == 1
    gpu_claim = cluster.decide().gpu_claim
    assert gpu_claim is not None
    assert (gpu_claim.gpus, gpu_claim.running, gpu_claim.held) == (2, 1, 2)


def test_unknown_claims_keep_replica_count() -> None:
    cluster = a_cluster(3)
    cluster.settle()
    cluster.gpu_claims = None
    cluster.edit(replicas=5)
    cluster.settle()
    assert len(cluster.groups) == 3
    assert "the GPU usage of other resources is unknown" in cluster.condition("ScalingLimited")["message"]


# --- growing revisions ------------------------------------------------------------------------------------------------


def gpus_held_in(cluster: FakeCluster) -> int:
    gpu_claim = cluster.decide().gpu_claim
    assert gpu_claim is not None
    return gpu_claim.held


@pytest.mark.parametrize("before", [GPU, {**GPU, "device": "cpu"}])
def test_growing_change_waits_for_room(before: dict[str, Any]) -> None:
    cluster = a_cluster(3, another(2), replicas=1, rollout={"bakeTime": "0s"})
    cluster.edit(runtime=before)
    cluster.settle()
    held, revisions = gpus_held_in(cluster), list(cluster.revisions)
    cluster.edit(runtime=GPU, parallelism={"pipeline": 3, "gpusPerNode": 1})
    cluster.settle()
    assert (gpus_held_in(cluster), list(cluster.revisions)) == (held, revisions)
    words = f"1 replica of 1 wanted stay as they are ({'1 GPU' if held else '0 GPUs'} in all)"
    for kind in ("Progressing", "Ready"):
        condition = cluster.condition(kind)
        assert (condition["status"], condition["reason"]) == ("False", "OverBudget")
        assert words in condition["message"]
        assert "n/other (priority 100) uses 2" in condition["message"]
    assert cluster.condition("Serving")["status"] == "True"
    assert cluster.events.count("OverBudget") == 1
    cluster.restart_operator()
    cluster.settle()
    assert cluster.events.count("OverBudget") == 1
    cluster.gpu_claims = ()
    cluster.settle()
    assert gpus_held_in(cluster) == 3
    assert list(cluster.revisions) != revisions
    assert cluster.condition("Ready")["status"] == "True"


def test_growing_change_waits_for_preempted_gpus() -> None:
    cluster = a_cluster(8, another(7, priority=-1), replicas=1)
    cluster.settle()
    cluster.gpu_claims = (GpuClaim("n/other", -1, "2026-01-01", 1, 1, 7, 7, 7),)
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 1
    assert "more start after n/other released GPUs of the budget" in cluster.condition("Progressing")["message"]
    cluster.gpu_claims = (GpuClaim("n/other", -1, "2026-01-01", 1, 1, 7, 5, 5),)
    cluster.settle()
    assert gpus_held_in(cluster) == 3


def test_growth_needs_room_for_all_replicas() -> None:
    cluster = a_cluster(8, another(3), replicas=3, rollout={"maxUnavailable": 3, "bakeTime": "0s"})
    cluster.settle()
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 3
    assert "fewer replicas here" in cluster.condition("Progressing")["message"]
    cluster.edit(replicas=1)
    cluster.settle()
    assert (gpus_held_in(cluster), len(cluster.groups)) == (3, 1)


def test_higher_priority_preempts_while_growth_is_pending() -> None:
    cluster = a_cluster(4)
    cluster.settle()
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert len(cluster.groups) == 3
    cluster.gpu_claims = (another(3),)
    cluster.settle()
    assert len(cluster.groups) == 1


def test_rollback_to_larger_revision_waits_for_budget() -> None:
    cluster = a_cluster(8, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "1h", "maxSurge": 0})
    cluster.settle()
    cluster.edit(parallelism={"tensor": 1})
    for _ in range(20):
        cluster.tick()
    assert gpus_held_in(cluster) == 1
    cluster.gpu_claims = (another(7),)
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 1
    assert cluster.condition("Progressing")["reason"] == "OverBudget"
    cluster.gpu_claims = ()
    cluster.settle()
    assert gpus_held_in(cluster) == 3


def test_unverified_revision_stays_while_growth_is_pending() -> None:
    cluster = a_cluster(4, another(2), replicas=2)
    cluster.plan_reconcile()
    cluster.plan_reconcile()
    assert len(cluster.groups) == 2
    cluster.edit(parallelism={"tensor": 3})
    plan = cluster.decide()
    assert plan.gpu_claim is not None
    assert (plan.grows, plan.gpu_claim.min_replicas, plan.claimed_replicas) == (False, 2, 2)
    assert not any(isinstance(action, Delete) for action in plan.children)


# --- total GPUs -------------------------------------------------------------------------------------------------------


class Draining(FakeCluster):
    """A cluster whose pods take time to terminate."""

    def __init__(self, **spec: Any) -> None:
        self.ends: dict[str, float] = {}
        """Time at which each terminating pod is gone, by uid."""
        super().__init__(start_seconds=8.0, **spec)

    def _terminate(self, pod: dict[str, Any]) -> None:
        if not is_terminating(pod):
            self.ends[pod["metadata"]["uid"]] = self.now + DRAIN_SECONDS
            pod["metadata"]["deletionTimestamp"] = timestamp(datetime.fromtimestamp(self.now + DRAIN_SECONDS, UTC))

    def delete_now(self, kind: str, name: str, uid: str, grace_seconds: int | None = None) -> None:
        if kind != "Pod" or name not in self.pods:
            return super().delete_now(kind, name, uid, grace_seconds)
        assert self.pods[name]["metadata"]["uid"] == uid
        self._terminate(self.pods[name])
        return self._written()

    def controllers(self) -> None:
        wanted = self._wanted_pods()
        for name, pod in self.pods.items():
            if name not in wanted:
                self._terminate(pod)
        going = {name: pod for name, pod in self.pods.items() if is_terminating(pod)}
        kept = {name: pod for name, pod in going.items() if self.ends[pod["metadata"]["uid"]] > self.now}
        self.pods = {name: pod for name, pod in self.pods.items() if name not in going}
        super().controllers()
        self.pods.update(kept)
        self.kubelets()

    @property
    def gpus(self) -> int:
        """GPUs of present pods and of those that controllers will create."""
        coming = [template for name, (_, template) in self._wanted_pods().items() if name not in self.pods]
        containers = [pod["spec"]["containers"][0] for pod in (*self.pods.values(), *coming)]
        return sum(int(((one.get("resources") or {}).get("limits") or {}).get(GPU_RESOURCE, 0)) for one in containers)


def a_draining(total: int, **spec: Any) -> Draining:
    cluster = Draining(runtime=GPU, **spec)
    cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
    cluster.gpu_claims = ()
    for _ in range(12):
        cluster.tick()
    return cluster


def most_held(cluster: Draining, ticks: int) -> int:
    most = 0
    for _ in range(ticks):
        cluster.plan_reconcile()
        most = max(most, cluster.gpus)
        cluster.now += TICK_SECONDS
        cluster.controllers()
        most = max(most, cluster.gpus)
    return most


@pytest.mark.parametrize("surge", [0, 1])
def test_replicas_added_during_shrinking_canary_fit_budget(surge: int) -> None:
    """Added replicas have the previous revision and its size."""
    cluster = a_draining(8, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "2m", "maxSurge": surge})
    cluster.edit(parallelism={"tensor": 1})
    assert most_held(cluster, 8) <= 8
    cluster.edit(replicas=4)
    assert most_held(cluster, 12) <= 8
    limited = cluster.condition("ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "OverBudget")
    assert "until then each new replica needs 3 GPUs" in limited["message"]
    assert most_held(cluster, 60) <= 8
    assert [group.is_ready for group in cluster.groups] == [True] * 4
    assert cluster.gpus == 4


def test_surge_beside_larger_replica_needs_room_for_both() -> None:
    cluster = a_draining(3, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "0s"})
    cluster.edit(parallelism={"tensor": 1})
    assert most_held(cluster, 20) == 3
    assert (cluster.gpus, cluster.condition("Ready")["status"]) == (1, "True")


def test_next_surge_waits_for_drained_replica() -> None:
    cluster = a_draining(4, replicas=3, rollout={"bakeTime": "0s"})
    before = set(cluster.revisions)
    cluster.edit(engine={"maxModelLen": 1024})
    fewest = 3
    for _ in range(40):
        assert most_held(cluster, 1) <= 4
        fewest = min(fewest, sum(group.is_ready for group in cluster.groups))
    assert not before & set(cluster.revisions)
    assert (fewest, cluster.gpus) == (3, 3), "no replica was replaced in place"


def test_pod_counts_until_deleted_despite_smaller_template() -> None:
    cluster = a_draining(3, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "0s", "maxSurge": 0})
    cluster.edit(parallelism={"tensor": 1})
    cluster.plan_reconcile()
    assert gpus_held_in(cluster) == 3
    most_held(cluster, 20)
    assert gpus_held_in(cluster) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_random_edits_of_two_resources_never_exceed_budget(seed: int) -> None:
    """Randomize counts, GPUs per replica, priorities, failing changes and operator restarts."""
    chance = random.Random(seed)
    total = chance.randrange(4, 10)
    gpu_claims = GpuClaims(GpuBudget(total=total), lambda *_: None)
    clusters = {name: Draining(runtime=GPU, replicas=0, rollout=a_rollout(chance)) for name in "ab"}
    for cluster in clusters.values():
        cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
        cluster.gpu_claims = ()
        cluster.tick()
    said, layouts = [], {name: chance.choice(LAYOUTS) for name in clusters}
    for tick in range(100):
        for name, cluster in clusters.items():
            if chance.random() < 0.12:
                said.append(f"tick {tick}: {name} {an_edit(cluster, layouts[name], chance)}")
            cluster.gpu_claims = gpu_claims.other_claims("n", name)
            plan = cluster.decide()
            assert plan.gpu_claim is not None
            gpu_claim = replace(plan.gpu_claim, key=f"n/{name}")
            if gpu_claims.reserve(gpu_claim, plan.claimed_replicas, beside=plan.num_surge, grows=plan.grows):
                cluster.plan_reconcile(plan)
            held = sum(one.gpus for one in clusters.values())
            assert held <= total, f"seed {seed}, {held} of {total}: {said}"
            cluster.now += TICK_SECONDS
            cluster.controllers()


def a_rollout(chance: random.Random) -> dict[str, Any]:
    return {
        "startTimeout": "60s",
        "drainTimeout": "1s",
        "maxSurge": chance.choice([0, 1, 1, 2]),
        "maxUnavailable": chance.choice([1, 2]),
        "bakeTime": chance.choice(["0s", "30s"]),
    }


def an_edit(cluster: Draining, layouts: tuple[dict[str, int], ...], chance: random.Random) -> dict[str, Any]:
    edit: dict[str, Any] = chance.choice(
        [
            {"replicas": chance.randrange(6)},
            {"parallelism": chance.choice(layouts)},
            {"parallelism": chance.choice(layouts)},
            {"runtime": {**GPU, "args": [f"--seed={chance.randrange(3)}"]}},
            {"runtime": {**GPU, "args": ["--broken"]}},
            {"priority": chance.randrange(3)},
        ]
    )
    cluster.edit(**edit)
    if chance.random() < 0.2:
        cluster.restart_operator()
    return edit
