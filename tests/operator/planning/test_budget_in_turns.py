"""What a turn makes of its share of the GPU budget: replicas, status, conditions, Events; and what it leaves alone."""

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
from trimtab_operator.planning.gpu_budget import Stake
from trimtab_operator.reconcile.gpu_claims import Stakes
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


def a_cluster(total: int, *others: Stake, replicas: int = 3, **spec: Any) -> FakeCluster:
    cluster = FakeCluster(runtime=GPU, replicas=replicas, **spec)
    cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
    cluster.stakes = others
    return cluster


def another(gpus: int, *, priority: int = 100) -> Stake:
    return Stake("n/other", priority, "2026-01-01", 1, gpus, gpus, gpus, gpus)


def test_without_a_budget_nothing_is_asked_or_said() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    cluster.settle()
    assert (cluster.status["replicas"], "wantedReplicas" in cluster.status) == (3, False)
    assert cluster.decide().stake is None


def test_as_many_replicas_come_as_the_budget_allows_and_it_is_said_once_why_not_more() -> None:
    cluster = a_cluster(5, another(3))
    cluster.settle()
    assert len(cluster.groups) == 2
    status = cluster.status
    assert (status["desiredReplicas"], status["wantedReplicas"], status["ready"]) == (2, 3, "2/2")
    limited = cluster.condition("ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "OverBudget")
    assert "of the budget of 5 GPUs n/other (priority 100) gets 3" in limited["message"]
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.events.count("OverBudget") == 1
    cluster.restart_operator()
    cluster.settle()
    assert cluster.events.count("OverBudget") == 1


def test_when_there_is_room_again_the_rest_comes_and_that_is_said() -> None:
    cluster = a_cluster(5, another(3))
    cluster.settle()
    cluster.stakes = ()
    cluster.settle()
    assert len(cluster.groups) == 3
    assert "wantedReplicas" not in cluster.status
    assert cluster.condition("ScalingLimited")["reason"] == "NotLimited"
    assert cluster.events.count("WithinBudget") == 1


def test_a_higher_priority_takes_replicas_but_not_the_fewest() -> None:
    cluster = a_cluster(4, scaling={"minReplicas": 2, "maxReplicas": 3}, tuning={"mode": "Off"})
    cluster.settle()
    assert len(cluster.groups) == 3
    cluster.stakes = (Stake("n/other", 1, "2026-01-01", 1, 1, 9, 1, 1),)
    cluster.settle()
    assert len(cluster.groups) == 2
    cluster.edit(priority=2)
    cluster.settle()
    assert len(cluster.groups) == 3


def test_a_resource_that_gets_none_is_not_called_ready_nor_scaled_to_zero() -> None:
    cluster = a_cluster(3, another(3))
    cluster.settle()
    assert cluster.groups == ()
    for kind in ("Ready", "Serving"):
        condition = cluster.condition(kind)
        assert (condition["status"], condition["reason"]) == ("False", "OverBudget")
    assert cluster.status["desiredReplicas"] == 0


def test_an_autoscalers_wish_is_limited_and_kept_as_it_was_written() -> None:
    cluster = a_cluster(4)
    cluster.edit(replicas=9)
    cluster.settle()
    assert len(cluster.groups) == 4
    assert cluster.status["wantedReplicas"] == 9
    assert cluster.deployment.replicas == 9


def test_another_priority_changes_no_pod() -> None:
    cluster = a_cluster(9)
    cluster.settle()
    before = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.edit(priority=5)
    cluster.settle()
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == before


def test_a_change_rolls_in_place_where_the_budget_has_no_further_replica() -> None:
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


def test_a_replica_beside_the_wanted_ones_is_taken_out_of_the_budget_with_them() -> None:
    cluster = a_cluster(2, replicas=1, rollout={"bakeTime": "0s"})
    cluster.settle()
    assert cluster.decide().num_beside == 0
    cluster.edit(engine={"maxModelLen": 1024})
    decided = cluster.turn()
    assert (decided.replicas_staked, decided.num_beside, len(cluster.groups)) == (1, 1, 2)
    cluster.settle()
    assert (len(cluster.groups), cluster.decide().num_beside) == (1, 0)


def test_what_is_paused_or_refused_keeps_what_it_has_and_asks_for_nothing() -> None:
    cluster = a_cluster(3)
    cluster.settle()
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"}
    cluster.edit(replicas=9)
    stake = cluster.decide().stake
    assert stake is not None
    assert (stake.running, stake.least, stake.wanted, stake.held) == (3, 3, 3, 3)
    cluster.body["metadata"]["annotations"] = {}
    cluster.edit(replicas="many")
    assert cluster.decide().stake == stake


def test_what_takes_no_gpu_is_not_limited() -> None:
    cluster = a_cluster(0)
    cluster.edit(runtime={**GPU, "device": "cpu"})
    cluster.settle()
    assert len(cluster.groups) == 3
    assert cluster.condition("ScalingLimited")["reason"] == "NotLimited"


def test_a_replica_of_several_pods_counts_with_all_its_gpus() -> None:
    cluster = a_cluster(3, parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.settle()
    assert len(cluster.groups) == 1
    stake = cluster.decide().stake
    assert stake is not None
    assert (stake.gpus, stake.running, stake.held) == (2, 1, 2)


def test_while_others_are_not_known_nothing_is_added_or_taken() -> None:
    cluster = a_cluster(3)
    cluster.settle()
    cluster.stakes = None
    cluster.edit(replicas=5)
    cluster.settle()
    assert len(cluster.groups) == 3
    assert "is not known now" in cluster.condition("ScalingLimited")["message"]


# --- a form that takes more -------------------------------------------------------------------------------------------


def gpus_held_in(cluster: FakeCluster) -> int:
    stake = cluster.decide().stake
    assert stake is not None
    return stake.held


@pytest.mark.parametrize("before", [GPU, {**GPU, "device": "cpu"}])
def test_a_change_that_takes_more_gpus_waits_until_there_is_room(before: dict[str, Any]) -> None:
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
        assert "n/other (priority 100) gets 2" in condition["message"]
    assert cluster.condition("Serving")["status"] == "True"
    assert cluster.events.count("OverBudget") == 1
    cluster.restart_operator()
    cluster.settle()
    assert cluster.events.count("OverBudget") == 1
    cluster.stakes = ()
    cluster.settle()
    assert gpus_held_in(cluster) == 3
    assert list(cluster.revisions) != revisions
    assert cluster.condition("Ready")["status"] == "True"


def test_a_change_waits_for_what_a_lower_priority_gives_back_and_rolls_then() -> None:
    cluster = a_cluster(8, another(7, priority=-1), replicas=1)
    cluster.settle()
    cluster.stakes = (Stake("n/other", -1, "2026-01-01", 1, 1, 7, 7, 7),)
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 1
    assert "more come once n/other gave GPUs of the budget back" in cluster.condition("Progressing")["message"]
    cluster.stakes = (Stake("n/other", -1, "2026-01-01", 1, 1, 7, 5, 5),)
    cluster.settle()
    assert gpus_held_in(cluster) == 3


def test_room_for_one_replica_lets_none_of_several_roll() -> None:
    cluster = a_cluster(8, another(3), replicas=3, rollout={"maxUnavailable": 3, "bakeTime": "0s"})
    cluster.settle()
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 3
    assert "fewer replicas here" in cluster.condition("Progressing")["message"]
    cluster.edit(replicas=1)
    cluster.settle()
    assert (gpus_held_in(cluster), len(cluster.groups)) == (3, 1)


def test_while_a_change_waits_a_higher_priority_still_takes_replicas_of_the_form_that_runs() -> None:
    cluster = a_cluster(4)
    cluster.settle()
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert len(cluster.groups) == 3
    cluster.stakes = (another(3),)
    cluster.settle()
    assert len(cluster.groups) == 1


def test_to_return_to_a_proven_form_that_takes_more_waits_as_well() -> None:
    cluster = a_cluster(8, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "1h", "maxSurge": 0})
    cluster.settle()
    cluster.edit(parallelism={"tensor": 1})
    for _ in range(20):
        cluster.tick()
    assert gpus_held_in(cluster) == 1
    cluster.stakes = (another(7),)
    cluster.edit(parallelism={"tensor": 3})
    cluster.settle()
    assert gpus_held_in(cluster) == 1
    assert cluster.condition("Progressing")["reason"] == "OverBudget"
    cluster.stakes = ()
    cluster.settle()
    assert gpus_held_in(cluster) == 3


def test_what_was_never_proven_is_left_as_it_is_while_its_change_waits() -> None:
    cluster = a_cluster(4, another(2), replicas=2)
    cluster.turn()
    cluster.turn()
    assert len(cluster.groups) == 2
    cluster.edit(parallelism={"tensor": 3})
    decided = cluster.decide()
    assert decided.stake is not None
    assert (decided.grows, decided.stake.least, decided.replicas_staked) == (False, 2, 2)
    assert not any(isinstance(action, Delete) for action in decided.children)


# --- at no time more --------------------------------------------------------------------------------------------------


class Draining(FakeCluster):
    """A cluster whose pods take their time to end."""

    def __init__(self, **spec: Any) -> None:
        self.ends: dict[str, float] = {}
        """When the pods that are being deleted are gone, by uid."""
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
        """The GPUs of pods that are there, and of those that controllers are to make."""
        coming = [template for name, (_, template) in self._wanted_pods().items() if name not in self.pods]
        containers = [pod["spec"]["containers"][0] for pod in (*self.pods.values(), *coming)]
        return sum(int(((one.get("resources") or {}).get("limits") or {}).get(GPU_RESOURCE, 0)) for one in containers)


def a_draining(total: int, **spec: Any) -> Draining:
    cluster = Draining(runtime=GPU, **spec)
    cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
    cluster.stakes = ()
    for _ in range(12):
        cluster.tick()
    return cluster


def most_held(cluster: Draining, ticks: int) -> int:
    most = 0
    for _ in range(ticks):
        cluster.turn()
        most = max(most, cluster.gpus)
        cluster.now += TICK_SECONDS
        cluster.controllers()
        most = max(most, cluster.gpus)
    return most


@pytest.mark.parametrize("surge", [0, 1])
def test_replicas_that_are_added_while_a_change_to_fewer_gpus_is_tried_take_no_more_than_there_is(surge: int) -> None:
    """They come in the form before, and take what that takes."""
    cluster = a_draining(8, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "2m", "maxSurge": surge})
    cluster.edit(parallelism={"tensor": 1})
    assert most_held(cluster, 8) <= 8
    cluster.edit(replicas=4)
    assert most_held(cluster, 12) <= 8
    limited = cluster.condition("ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "OverBudget")
    assert "until then each is added with 3 GPUs" in limited["message"]
    assert most_held(cluster, 60) <= 8
    assert [group.is_ready for group in cluster.groups] == [True] * 4
    assert cluster.gpus == 4


def test_a_replica_comes_beside_one_of_more_gpus_only_where_there_is_room_for_both() -> None:
    cluster = a_draining(3, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "0s"})
    cluster.edit(parallelism={"tensor": 1})
    assert most_held(cluster, 20) == 3
    assert (cluster.gpus, cluster.condition("Ready")["status"]) == (1, "True")


def test_another_comes_beside_the_wanted_ones_when_the_one_that_went_has_drained() -> None:
    cluster = a_draining(4, replicas=3, rollout={"bakeTime": "0s"})
    before = set(cluster.revisions)
    cluster.edit(engine={"maxModelLen": 1024})
    fewest = 3
    for _ in range(40):
        assert most_held(cluster, 1) <= 4
        fewest = min(fewest, sum(group.is_ready for group in cluster.groups))
    assert not before & set(cluster.revisions)
    assert (fewest, cluster.gpus) == (3, 3), "nobody was replaced in place meanwhile"


def test_a_pod_counts_until_it_is_gone_whatever_its_template_asks_for_by_now() -> None:
    cluster = a_draining(3, replicas=1, parallelism={"tensor": 3}, rollout={"bakeTime": "0s", "maxSurge": 0})
    cluster.edit(parallelism={"tensor": 1})
    cluster.turn()
    assert gpus_held_in(cluster) == 3
    most_held(cluster, 20)
    assert gpus_held_in(cluster) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_two_resources_ask_for_no_more_is_held_than_the_budget(seed: int) -> None:
    """Edits of counts, of GPUs for each replica and of priorities, changes that fail, operators that end."""
    chance = random.Random(seed)
    total = chance.randrange(4, 10)
    stakes = Stakes(GpuBudget(total=total), lambda *_: None)
    clusters = {name: Draining(runtime=GPU, replicas=0, rollout=a_rollout(chance)) for name in "ab"}
    for cluster in clusters.values():
        cluster.installation = Installation(gpu_budget=GpuBudget(total=total))
        cluster.stakes = ()
        cluster.tick()
    said, layouts = [], {name: chance.choice(LAYOUTS) for name in clusters}
    for tick in range(100):
        for name, cluster in clusters.items():
            if chance.random() < 0.12:
                said.append(f"tick {tick}: {name} {an_edit(cluster, layouts[name], chance)}")
            cluster.stakes = stakes.of_others("n", name)
            decided = cluster.decide()
            assert decided.stake is not None
            stake = replace(decided.stake, key=f"n/{name}")
            if stakes.put(stake, decided.replicas_staked, beside=decided.num_beside, grows=decided.grows):
                cluster.turn(decided)
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
