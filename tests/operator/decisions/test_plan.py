"""The plan: what is missing is made, what is too much goes, what changed is rolled, and what is right is left alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL, common_labels, group_selector
from trimtab_operator.builders.stateful_set import GAVE_BACK_ANNOTATION, Held
from trimtab_operator.decisions.actions import Action, Apply, Delete
from trimtab_operator.decisions.plan import allowed_down, plan, plan_tuning_state
from trimtab_operator.observed.groups import Observed, groups_of, is_pod_ready
from trimtab_operator.resource.spec import InferenceDeployment

HASH = "a" * 64


def a_deployment(**spec: Any) -> InferenceDeployment:
    base: dict[str, Any] = {"model": {"uri": "file:///models/m"}, "runtime": {"device": "cpu", "image": "engine:1"}}
    metadata = {"name": "m", "namespace": "models", "uid": "u-1", "generation": 1}
    return InferenceDeployment.parse({"metadata": metadata, "spec": {**base, **spec}})


class Plant:
    """A cluster in memory: what is applied exists; StatefulSets make pods, which become ready when told to."""

    def __init__(self, deployment: InferenceDeployment) -> None:
        self.deployment = deployment
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.uids = 0
        self.taken: set[str] = set()
        """ClusterIPs that others have."""

    def observed(self) -> Observed:
        def of(kind: str) -> tuple[dict[str, Any], ...]:
            return tuple(copy.deepcopy(m) for (k, _), m in sorted(self.objects.items()) if k == kind)

        pods = tuple(copy.deepcopy(list(self.pods.values())))
        return Observed(of("Service"), of("StatefulSet"), of("ConfigMap"), pods)

    def plan(self) -> tuple[Action, ...]:
        return plan(self.deployment, self.observed(), admin_token_sha256=HASH)

    def execute(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, Delete):
                gone = self.objects.pop((action.kind, action.name))
                assert gone["metadata"]["uid"] == action.uid
            else:
                manifest = copy.deepcopy(dict(action.manifest))
                key = (manifest["kind"], manifest["metadata"]["name"])
                self.uids += 1
                manifest["metadata"]["uid"] = self.objects.get(key, {}).get("metadata", {}).get("uid", f"o-{self.uids}")
                if manifest["kind"] == "Service":
                    manifest = self._with_address(action, self.objects.get(key, {}).get("spec", {}).get("clusterIP"))
                self.objects[key] = manifest

    def _with_address(self, action: Apply, present: str | None) -> dict[str, Any]:
        """As the API server does: the address that is asked for, if it is free, else one of its own choice."""
        manifest = copy.deepcopy(dict(action.manifest))
        wanted = manifest["spec"].get("clusterIP")
        assert present is None or wanted in (None, present), "a ClusterIP cannot be changed"
        if wanted in self.taken:
            assert action.otherwise is not None, "a Service that cannot be had"
            manifest, wanted = copy.deepcopy(dict(action.otherwise)), None
        manifest["spec"]["clusterIP"] = present or wanted or f"10.0.{self.uids // 250}.{self.uids % 250}"
        return {**manifest, "metadata": {**manifest["metadata"], "uid": f"s-{self.uids}"}}

    def controllers(self) -> None:
        """StatefulSets and garbage collection take one step."""
        sets = {name: m for (kind, name), m in self.objects.items() if kind == "StatefulSet"}
        for name in [n for n in self.pods if n.rsplit("-", 1)[0] not in sets]:
            del self.pods[name]
        for name, stateful_set in sets.items():
            template = stateful_set["spec"]["template"]
            wanted = [f"{name}-{number}" for number in range(stateful_set["spec"]["replicas"])]
            for extra in [n for n in self.pods if n.rsplit("-", 1)[0] == name and n not in wanted]:
                del self.pods[extra]
            for pod in wanted:
                metadata = {"name": pod, "labels": dict(template["metadata"]["labels"])}
                made = {"metadata": metadata, "spec": template["spec"], "status": {}}
                if pod not in self.pods or {**self.pods[pod], "status": {}} != made:
                    self.pods[pod] = copy.deepcopy(made)

    def set_ready(self, name: str, ready: bool = True) -> None:
        self.pods[name]["status"] = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}

    def settle(self) -> None:
        for _ in range(50):
            actions = self.plan()
            self.execute(actions)
            self.controllers()
            for name in self.pods:
                self.set_ready(name)
            if not actions and not self.plan():
                return
        raise AssertionError("the plan does not come to rest")

    def groups(self) -> list[int]:
        return [group.ordinal for group in groups_of(self.observed())]


def test_a_new_resource_gets_services_before_its_replicas() -> None:
    actions = Plant(a_deployment(replicas=2)).plan()
    kinds = [(a.manifest["kind"], a.manifest["metadata"]["name"]) for a in actions if isinstance(a, Apply)]
    assert kinds == [
        ("Service", "m"),
        ("Service", "m-g0"),
        ("Service", "m-g1"),
        ("StatefulSet", "m-g0"),
        ("StatefulSet", "m-g1"),
    ]


def test_an_idle_tick_does_nothing() -> None:
    plant = Plant(a_deployment(replicas=2))
    plant.settle()
    assert plant.plan() == ()


def test_replicas_absent_means_one_and_zero_means_none() -> None:
    for replicas, expected in ((None, [0]), (0, [])):
        plant = Plant(a_deployment(replicas=replicas))
        plant.settle()
        assert plant.groups() == expected


def test_groups_take_the_lowest_free_ordinal() -> None:
    plant = Plant(a_deployment(replicas=3))
    plant.settle()
    del plant.objects["StatefulSet", "m-g1"], plant.pods["m-g1-0"]
    plant.settle()
    assert plant.groups() == [0, 1, 2]


def test_an_ordinal_whose_pod_still_drains_is_not_taken() -> None:
    plant = Plant(a_deployment(replicas=2))
    plant.settle()
    del plant.objects["StatefulSet", "m-g0"]
    created = {a.manifest["metadata"]["name"] for a in plant.plan() if isinstance(a, Apply)}
    assert "m-g2" in created


def test_scale_in_takes_the_one_that_is_not_ready_then_the_highest() -> None:
    plant = Plant(a_deployment(replicas=4))
    plant.settle()
    plant.set_ready("m-g1-0", False)
    plant.deployment = a_deployment(replicas=2)
    deleted = [a.name for a in plant.plan() if isinstance(a, Delete) and a.kind == "StatefulSet"]
    assert deleted == ["m-g3", "m-g1"]


def test_scale_in_leaves_nothing_of_the_group() -> None:
    plant = Plant(a_deployment(replicas=3))
    plant.settle()
    plant.deployment = a_deployment(replicas=1)
    plant.settle()
    assert sorted(name for _, name in plant.objects) == ["m", "m-g0", "m-g0"]


def test_a_rollout_goes_group_by_group() -> None:
    plant = Plant(a_deployment(replicas=3))
    plant.settle()
    plant.deployment = a_deployment(replicas=3, engine={"maxNumSeqs": 32})
    for _ in range(3):
        actions = plant.plan()
        assert len(actions) == 1
        plant.execute(actions)
        assert plant.plan() == ()  # the updated one is down until its new pod is ready
        plant.controllers()
        for name in plant.pods:
            plant.set_ready(name)
    assert plant.plan() == ()


@pytest.mark.parametrize(("max_unavailable", "replicas", "down"), [(1, 4, 1), (2, 4, 2), ("50%", 4, 2), ("10%", 4, 1)])
def test_a_rollout_respects_max_unavailable(max_unavailable: int | str, replicas: int, down: int) -> None:
    rollout = {"maxUnavailable": max_unavailable}
    assert allowed_down(a_deployment(replicas=replicas, rollout=rollout)) == down
    plant = Plant(a_deployment(replicas=replicas, rollout=rollout))
    plant.settle()
    plant.deployment = a_deployment(replicas=replicas, rollout=rollout, engine={"maxNumSeqs": 32})
    assert len(plant.plan()) == down


def test_a_broken_rollout_is_replaced_by_a_better_one_at_once() -> None:
    plant = Plant(a_deployment())
    plant.settle()
    plant.deployment = a_deployment(runtime={"device": "cpu", "image": "broken:1"})
    plant.execute(plant.plan())
    plant.controllers()
    plant.deployment = a_deployment()
    assert [a.reason for a in plant.plan() if isinstance(a, Apply)]


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("Service", "m", ("spec", "selector", "trimtab.dev/role"), "other"),
        ("Service", "m", ("spec", "ports"), []),
        ("StatefulSet", "m-g0", ("spec", "replicas"), 3),
        ("StatefulSet", "m-g0", ("spec", "template", "spec", "containers", 0, "image"), "evil:1"),
        ("StatefulSet", "m-g0", ("spec", "template", "spec", "automountServiceAccountToken"), True),
    ],
)
def test_drift_is_repaired(kind: str, name: str, path: tuple[str | int, ...], value: Any) -> None:
    plant = Plant(a_deployment())
    plant.settle()
    node: Any = plant.objects[kind, name]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    (action,) = plant.plan()
    assert isinstance(action, Apply)
    assert action.manifest["metadata"]["name"] == name
    assert str(path[0]) in action.reason


def test_a_claim_that_may_be_written_is_no_drift() -> None:
    """The API server leaves `readOnly: false` out of what it stores."""
    claim = {"claimName": "c", "readOnly": False}
    template = {"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": claim}]}}
    actions = plan(a_deployment(template=template), Observed(), admin_token_sha256=HASH)
    stateful_set = next(a.manifest for a in actions if isinstance(a, Apply) and a.manifest["kind"] == "StatefulSet")
    (volume,) = (v for v in stateful_set["spec"]["template"]["spec"]["volumes"] if v["name"] == "v")
    assert volume["persistentVolumeClaim"] == {"claimName": "c"}


def test_the_tuners_memory_is_written_only_when_it_changed() -> None:
    plant = Plant(a_deployment())
    actions = plan_tuning_state(plant.deployment, plant.observed(), "{}")
    plant.execute(actions)
    assert len(actions) == 1
    assert plan_tuning_state(plant.deployment, plant.observed(), "{}") == ()
    assert len(plan_tuning_state(plant.deployment, plant.observed(), '{"a":1}')) == 1


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_it_comes_to_rest_and_never_exceeds_the_replicas(seed: int) -> None:
    chance = random.Random(seed)
    plant = Plant(a_deployment(replicas=2))
    for _ in range(60):
        move = chance.random()
        if move < 0.15:
            plant.deployment = a_deployment(
                replicas=chance.randrange(5), engine={"maxNumSeqs": chance.choice([16, 32])}
            )
        elif move < 0.3 and plant.pods:
            plant.set_ready(chance.choice(sorted(plant.pods)), chance.random() < 0.7)
        elif move < 0.4 and plant.pods:
            del plant.pods[chance.choice(sorted(plant.pods))]
        elif move < 0.5 and plant.objects:
            del plant.objects[chance.choice(sorted(plant.objects))]
        elif move < 0.8:
            before = len(plant.groups())
            plant.execute(plant.plan())
            assert len(plant.groups()) <= max(before, plant.deployment.replicas)
        else:
            plant.controllers()
    plant.settle()
    assert len(plant.groups()) == plant.deployment.replicas
    assert all(is_pod_ready(pod) for pod in plant.pods.values())
    revisions = {pod["metadata"]["labels"][REVISION_LABEL] for pod in plant.pods.values()}
    assert len(revisions) <= 1


def test_pods_of_other_kinds_are_not_counted_as_groups() -> None:
    deployment = a_deployment()
    pod = {"metadata": {"name": "stray", "labels": common_labels(deployment)}, "status": {}}
    assert groups_of(Observed(pods=(pod,))) == ()
    assert group_selector(deployment, 3)[GROUP_LABEL] == "3"


# --- groups of several pods -------------------------------------------------------------------------------------------

THREE = {"tensor": 3, "gpusPerNode": 1}


def args_of(manifest: dict[str, Any]) -> list[str]:
    found: list[str] = manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_a_group_of_several_pods_is_made_once_its_ranks_have_a_place_to_meet() -> None:
    plant = Plant(a_deployment(parallelism=THREE))
    first = plant.plan()
    assert [a.manifest["kind"] for a in first if isinstance(a, Apply)] == ["Service", "Service"]
    plant.execute(first)
    address = plant.objects["Service", "m-g0"]["spec"]["clusterIP"]
    plant.execute(plant.plan())
    leader, workers = plant.objects["StatefulSet", "m-g0"], plant.objects["StatefulSet", "m-g0-w"]
    assert (leader["spec"]["replicas"], workers["spec"]["replicas"]) == (1, 2)
    same = {"--tensor-parallel-size=3", "--nnodes=3", "--master-port=29500", f"--master-addr={address}"}
    assert same <= set(args_of(leader)) & set(args_of(workers))
    assert "--node-rank=0" in args_of(leader)
    assert "--node-rank=auto" in args_of(workers)
    plant.settle()
    assert [len(group.pods) for group in groups_of(plant.observed())] == [3]


def test_both_stateful_sets_of_a_group_carry_one_revision_in_a_rollout() -> None:
    plant = Plant(a_deployment(parallelism=THREE, replicas=2))
    plant.settle()
    plant.deployment = a_deployment(parallelism=THREE, replicas=2, engine={"maxNumSeqs": 32})
    plant.execute(plant.plan())
    for group in groups_of(plant.observed()):
        assert group.revision, "the leader's and the workers' differ"
    assert len({group.revision for group in groups_of(plant.observed())}) == 2
    plant.settle()
    assert len({group.revision for group in groups_of(plant.observed())}) == 1


def test_rendezvous_services_that_were_deleted_come_back_with_their_addresses_and_nobody_restarts() -> None:
    plant = Plant(a_deployment(parallelism=THREE, replicas=3))
    plant.settle()
    pods = copy.deepcopy(plant.pods)
    addresses = delete_rendezvous_services(plant)
    assert [a.manifest["kind"] for a in plant.plan() if isinstance(a, Apply)] == ["Service"] * 3
    plant.settle()
    assert {name: plant.objects["Service", name]["spec"]["clusterIP"] for name in addresses} == addresses
    assert plant.pods == pods


def test_a_rendezvous_service_made_anew_restarts_its_group() -> None:
    """Where somebody else has its address by now."""
    plant = Plant(a_deployment(parallelism=THREE))
    plant.settle()
    before = args_of(plant.objects["StatefulSet", "m-g0"])
    plant.taken.update(delete_rendezvous_services(plant).values())
    assert [a.manifest["kind"] for a in plant.plan() if isinstance(a, Apply)] == ["Service"]
    plant.settle()
    after = args_of(plant.objects["StatefulSet", "m-g0"])
    assert before != after
    assert args_of(plant.objects["StatefulSet", "m-g0-w"])[:-1] == after[:-1]


def test_groups_whose_addresses_are_lost_restart_one_after_another() -> None:
    """Engines that have met serve on, whatever becomes of the Service."""
    plant = Plant(a_deployment(parallelism=THREE, replicas=3))
    plant.settle()
    plant.taken.update(delete_rendezvous_services(plant).values())
    for _ in range(20):
        plant.execute(plant.plan())
        down = [group.name for group in groups_of(plant.observed()) if not group.is_ready]
        assert len(down) <= 1, "told to restart at once"
        plant.controllers()
        for name in plant.pods:
            plant.set_ready(name)
    assert plant.plan() == ()
    assert {g.meeting_addresses for g in groups_of(plant.observed())}.isdisjoint({frozenset([a]) for a in plant.taken})


def delete_rendezvous_services(plant: Plant) -> dict[str, str]:
    """All at once; the ClusterIPs that they had, by name."""
    names = [name for kind, name in plant.objects if kind == "Service" and name != plant.deployment.name]
    return {name: plant.objects.pop(("Service", name))["spec"]["clusterIP"] for name in names}


def test_ranks_meet_at_an_ipv6_address_and_get_it_back() -> None:
    """A flag's value of its own: no port follows that brackets would keep apart."""
    plant = Plant(a_deployment(parallelism=THREE))
    plant.execute(plant.plan())
    plant.objects["Service", "m-g0"]["spec"]["clusterIP"] = "fd00:10:96::a7"
    plant.settle()
    for name in ("m-g0", "m-g0-w"):
        assert "--master-addr=fd00:10:96::a7" in args_of(plant.objects["StatefulSet", name])
    pods = copy.deepcopy(plant.pods)
    delete_rendezvous_services(plant)
    plant.settle()
    assert plant.objects["Service", "m-g0"]["spec"]["clusterIP"] == "fd00:10:96::a7"
    assert plant.pods == pods


def test_scale_in_takes_the_whole_group() -> None:
    plant = Plant(a_deployment(parallelism=THREE, replicas=2))
    plant.settle()
    plant.deployment = a_deployment(parallelism=THREE, replicas=1)
    deleted = {a.name for a in plant.plan() if isinstance(a, Delete)}
    assert deleted == {"m-g1", "m-g1-w"}
    plant.settle()
    assert sorted(name for _, name in plant.objects) == ["m", "m-g0", "m-g0", "m-g0-w"]


@pytest.mark.parametrize(("before", "after"), [(THREE, {}), ({}, THREE), (THREE, {"tensor": 2, "gpusPerNode": 1})])
def test_a_changed_layout_changes_the_pods_of_a_group(before: dict[str, int], after: dict[str, int]) -> None:
    plant = Plant(a_deployment(parallelism=before))
    plant.settle()
    plant.deployment = a_deployment(parallelism=after)
    plant.settle()
    (group,) = groups_of(plant.observed())
    assert len(group.pods) == after.get("tensor", 1)
    assert group.is_ready


def test_workers_whose_leader_is_gone_go_too() -> None:
    plant = Plant(a_deployment(parallelism=THREE))
    plant.settle()
    del plant.objects["StatefulSet", "m-g0"]
    assert "m-g0-w" in {a.name for a in plant.plan() if isinstance(a, Delete)}
    plant.settle()
    assert all(group.is_ready for group in groups_of(plant.observed()))


def test_a_group_that_gave_its_pods_back_has_none_until_it_tries_again() -> None:
    plant = Plant(a_deployment(parallelism=THREE))
    plant.settle()
    for held, pods in (
        (Held("note", has_pods=False), 0),
        (Held("note", has_pods=True), 3),
        (Held("", has_pods=True), 3),
    ):
        plant.execute(plan(plant.deployment, plant.observed(), admin_token_sha256=HASH, held={0: held}))
        plant.controllers()
        assert len(plant.pods) == pods
        stored = plant.objects["StatefulSet", "m-g0"]["metadata"]["annotations"]
        assert stored == {GAVE_BACK_ANNOTATION: held.note}
