"""Planned children: missing ones are created, superfluous ones deleted, changes rolled out, and matching ones left
alone.

The tests run whole reconcile plans.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
from operator_builders import a_deployment, a_spec
from operator_cluster import FakeCluster
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL, common_labels, group_selector
from trimtab_operator.builders.rendezvous_secret import rendezvous_secret, rendezvous_volume
from trimtab_operator.builders.service import rendezvous_service
from trimtab_operator.builders.stateful_set import GANG_BACKOFF_ANNOTATION, Held, rendered
from trimtab_operator.observed.actions import Apply, Delete
from trimtab_operator.observed.groups import ObservedChildren, groups_of, is_pod_ready
from trimtab_operator.planning.children import plan_children, plan_tuning_state
from trimtab_operator.rollout.group_assignment import allowed_down, assign_revisions

HASHES = TokenHashes("a" * 64, "f" * 64)


def a_settled_cluster(**spec: Any) -> FakeCluster:
    """Return a cluster that replaces replicas in place; rollout/test_surge.py covers surge."""
    cluster = FakeCluster(**{**spec, "rollout": {"maxSurge": 0, "bakeTime": "0s", **spec.get("rollout", {})}})
    cluster.settle()
    return cluster


def applied(cluster: FakeCluster) -> list[tuple[str, str]]:
    """Return kind and name of the children that the next plan applies."""
    found = (a.manifest for a in cluster.decide().children if isinstance(a, Apply))
    return [(manifest["kind"], manifest["metadata"]["name"]) for manifest in found]


def deleted(cluster: FakeCluster) -> list[str]:
    """Return the names of the StatefulSets that the next plan deletes."""
    return [a.name for a in cluster.decide().children if isinstance(a, Delete) and a.kind == "StatefulSet"]


def children_of(cluster: FakeCluster) -> list[str]:
    return sorted(name for kind, name in cluster.objects if kind != "ConfigMap")


def test_a_new_resource_gets_its_service_before_its_replicas() -> None:
    assert applied(FakeCluster(replicas=2)) == [
        ("ServiceAccount", "m-engine"),
        ("Service", "m"),
        ("StatefulSet", "m-g0"),
        ("StatefulSet", "m-g1"),
    ]


def test_an_idle_turn_does_nothing() -> None:
    assert a_settled_cluster(replicas=2).decide().is_idle


@pytest.mark.parametrize(("replicas", "ordinals"), [({}, [0]), ({"replicas": 0}, [])])
def test_replicas_absent_means_one_and_zero_means_none(replicas: Mapping[str, int], ordinals: list[int]) -> None:
    assert [group.ordinal for group in a_settled_cluster(**replicas).groups] == ordinals


def test_groups_use_lowest_free_ordinal() -> None:
    cluster = a_settled_cluster(replicas=3)
    del cluster.objects["StatefulSet", "m-g1"], cluster.pods["m-g1-0"]
    cluster.settle()
    assert [group.ordinal for group in cluster.groups] == [0, 1, 2]


def test_ordinal_of_draining_pod_is_not_reused() -> None:
    cluster = a_settled_cluster(replicas=2)
    del cluster.objects["StatefulSet", "m-g0"]
    assert ("StatefulSet", "m-g2") in applied(cluster)


def test_scale_in_removes_unready_then_highest_ordinal() -> None:
    cluster = a_settled_cluster(replicas=4)
    cluster.set_ready("m-g1-0", False)
    cluster.edit(replicas=2)
    assert deleted(cluster) == ["m-g3", "m-g1"]


def test_scale_in_removes_least_loaded_serving_replica() -> None:
    cluster = a_settled_cluster(replicas=4)
    for ordinal, running in enumerate((3.0, 1.0, 9.0, 2.0)):
        cluster.engine(ordinal).running = running
    cluster.edit(replicas=2)
    assert deleted(cluster) == ["m-g3", "m-g1"]


def test_scale_in_removes_replica_of_unknown_load_last() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.engine(0).running = 5.0
    cluster.engine(1).running = 6.0
    del cluster.engines[cluster.pods["m-g2-0"]["metadata"]["uid"]]
    cluster.edit(replicas=2)
    assert deleted(cluster) == ["m-g0"]


def test_scale_in_removes_outdated_before_idle_current_replica() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(engine={"blockSize": 16})
    for _ in range(3):
        cluster.tick()  # the first one of three is brought up to date, and is Ready
    assert len(set(cluster.revisions)) == 2
    for ordinal in (1, 2):
        cluster.engine(ordinal).running = 8.0
    cluster.edit(replicas=1)
    assert deleted(cluster) == ["m-g2", "m-g1"]


def test_scale_in_removes_unschedulable_before_loading() -> None:
    cluster = FakeCluster(start_seconds=600.0, nodes=2, replicas=3)
    for _ in range(3):
        cluster.tick()
    unplaced = [name for name, pod in cluster.pods.items() if "nodeName" not in pod["spec"]]
    cluster.edit(replicas=2)
    assert [f"{name}-0" for name in deleted(cluster)] == unplaced


def test_scale_in_leaves_nothing_of_the_group() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(replicas=1)
    cluster.settle()
    assert children_of(cluster) == ["m", "m-engine", "m-g0"]


def test_rollout_updates_groups_one_by_one() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(engine={"blockSize": 32})
    for name in ("m-g0", "m-g1", "m-g2"):
        assert [
            one.manifest["metadata"]["name"] for one in cluster.plan_reconcile().children if isinstance(one, Apply)
        ] == [name]
        cluster.controllers()  # the StatefulSet controller observes it and keeps the pod
        assert [one.name for one in cluster.plan_reconcile().urgent_deletes] == [f"{name}-0"]
        assert cluster.decide().children == ()  # the updated one is down until its new pod is ready
        cluster.controllers()
    assert cluster.decide().is_idle


@pytest.mark.parametrize(("max_unavailable", "replicas", "down"), [(1, 4, 1), (2, 4, 2), ("50%", 4, 2), ("10%", 4, 1)])
def test_a_rollout_respects_max_unavailable(max_unavailable: int | str, replicas: int, down: int) -> None:
    rollout = {"maxUnavailable": max_unavailable}
    assert allowed_down(a_deployment(rollout=rollout), replicas) == down
    cluster = a_settled_cluster(replicas=replicas, rollout=rollout)
    cluster.edit(engine={"blockSize": 32})
    assert len(cluster.decide().children) == down


@pytest.mark.parametrize(("max_unavailable", "taken"), [(1, 1), (2, 2), ("50%", 5)])
def test_rollout_with_unready_replicas_respects_max_unavailable(max_unavailable: int | str, taken: int) -> None:
    """Eight of ten replicas are briefly not Ready; a restart would take minutes."""
    cluster = a_settled_cluster(replicas=10, rollout={"maxUnavailable": max_unavailable})
    for ordinal in range(8):
        cluster.set_ready(f"m-g{ordinal}-0", False)
    cluster.edit(engine={"blockSize": 32})
    assert len(applied(cluster)) == taken
    cluster.plan_reconcile()
    assert applied(cluster) == []  # replaced replicas are down until they are Ready again


def test_replicas_that_still_load_are_brought_up_to_date_at_once() -> None:
    """No request is lost, and a large model loads for a long time."""
    cluster = FakeCluster(start_seconds=600.0, replicas=4)
    for _ in range(4):
        cluster.tick()
    cluster.edit(engine={"blockSize": 32})
    assert len(applied(cluster)) == 4


def test_rollout_updates_down_before_serving_groups() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.set_ready("m-g2-0", False)
    cluster.edit(engine={"blockSize": 32})
    assert applied(cluster) == [("StatefulSet", "m-g2")]


def test_serving_group_is_kept_while_another_is_down() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(engine={"blockSize": 32})
    cluster.plan_reconcile()
    cluster.unready.add("m-g0-0")  # the first replica of the new revision is not Ready yet
    cluster.controllers()
    assert applied(cluster) == []


def test_broken_rollout_is_superseded_at_once() -> None:
    cluster = a_settled_cluster()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--broken"]})
    cluster.tick()
    cluster.edit(runtime=a_spec()["runtime"])
    assert applied(cluster) == [("StatefulSet", "m-g0")]


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
    cluster = a_settled_cluster()
    node: Any = cluster.objects[kind, name]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    (action,) = cluster.decide().children
    assert isinstance(action, Apply)
    assert action.manifest["metadata"]["name"] == name
    assert str(path[0]) in action.reason


def test_a_claim_that_may_be_written_is_no_drift() -> None:
    """The API server does not store `readOnly: false`."""
    claim = {"claimName": "c", "readOnly": False}
    cluster = a_settled_cluster(template={"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": claim}]}})
    volumes = cluster.objects["StatefulSet", "m-g0"]["spec"]["template"]["spec"]["volumes"]
    assert [v["persistentVolumeClaim"] for v in volumes if v["name"] == "v"] == [{"claimName": "c"}]


def test_tuner_state_is_written_only_on_change() -> None:
    deployment = a_deployment()
    (first,) = plan_tuning_state(deployment, ObservedChildren(), "{}")
    stored = ObservedChildren(config_maps=(first.manifest,))
    assert plan_tuning_state(deployment, stored, "{}") == ()
    assert len(plan_tuning_state(deployment, stored, '{"a":1}')) == 1


@pytest.mark.parametrize("seed", range(30))
def test_random_events_converge_within_replica_count(seed: int) -> None:
    chance = random.Random(seed)
    surge = seed % 3
    cluster = FakeCluster(replicas=2, rollout={"maxSurge": surge, "bakeTime": "0s"})
    for _ in range(60):
        move = chance.random()
        if move < 0.15:
            cluster.edit(replicas=chance.randrange(5), engine={"blockSize": chance.choice([16, 32])})
        elif move < 0.3 and cluster.pods:
            cluster.set_ready(chance.choice(sorted(cluster.pods)), chance.random() < 0.7)
        elif move < 0.4 and cluster.pods:
            del cluster.pods[chance.choice(sorted(cluster.pods))]
        elif move < 0.5 and cluster.objects:
            del cluster.objects[chance.choice(sorted(cluster.objects))]
        elif move < 0.8:
            before = len(cluster.groups)
            cluster.plan_reconcile()
            assert len(cluster.groups) <= max(before, cluster.deployment.replicas + surge)
        else:
            cluster.controllers()
    cluster.unready.clear()
    cluster.settle()
    assert len(cluster.groups) == cluster.deployment.replicas
    assert all(is_pod_ready(pod) for pod in cluster.pods.values())
    assert len({pod["metadata"]["labels"][REVISION_LABEL] for pod in cluster.pods.values()}) <= 1


def test_pods_of_other_kinds_are_not_counted_as_groups() -> None:
    deployment = a_deployment()
    pod = {"metadata": {"name": "stray", "labels": common_labels(deployment)}, "status": {}}
    assert groups_of(ObservedChildren(pods=(pod,))) == ()
    assert group_selector(deployment, 3)[GROUP_LABEL] == "3"


# --- multi-pod groups -------------------------------------------------------------------------------------------------

THREE = {"tensor": 3, "gpusPerNode": 1}
TWO = {"pipeline": 2, "gpusPerNode": 1}


def args_of(manifest: dict[str, Any]) -> list[str]:
    found: list[str] = manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def addresses_of(cluster: FakeCluster) -> dict[str, str]:
    """Return the ClusterIPs of the rendezvous Services by name."""
    services = {name: m for (kind, name), m in cluster.objects.items() if kind == "Service" and name != "m"}
    return {name: service["spec"]["clusterIP"] for name, service in services.items()}


def delete_rendezvous_services(cluster: FakeCluster) -> dict[str, str]:
    """Delete all rendezvous Services and return their ClusterIPs by name."""
    found = addresses_of(cluster)
    for name in found:
        del cluster.objects["Service", name]
    return found


def test_multi_pod_group_waits_for_rendezvous_address() -> None:
    cluster = FakeCluster(parallelism=THREE)
    assert [kind for kind, _ in applied(cluster)] == ["ServiceAccount", "Secret", "Service", "Service"]
    cluster.plan_reconcile()
    address = addresses_of(cluster)["m-g0"]
    cluster.plan_reconcile()
    leader, workers = cluster.objects["StatefulSet", "m-g0"], cluster.objects["StatefulSet", "m-g0-w"]
    assert (leader["spec"]["replicas"], workers["spec"]["replicas"]) == (1, 2)
    same = {"--tensor-parallel-size=3", "--nnodes=3", "--master-port=29500", f"--master-addr={address}"}
    assert same <= set(args_of(leader)) & set(args_of(workers))
    assert "--node-rank=0" in args_of(leader)
    assert "--node-rank=auto" in args_of(workers)
    cluster.settle()
    assert [len(group.pods) for group in cluster.groups] == [3]


def test_lost_rendezvous_secret_is_recreated() -> None:
    cluster = a_settled_cluster(parallelism=THREE, replicas=2)
    made = copy.deepcopy(cluster.objects["Secret", "trimtab-rendezvous"])
    for name in ("m-g0", "m-g0-w", "m-g1", "m-g1-w"):
        pod = cluster.objects["StatefulSet", name]["spec"]["template"]["spec"]
        assert rendezvous_volume(cluster.deployment) in pod["volumes"]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "rendezvous"]
        assert f"--rendezvous-secret-file={mount['mountPath']}/secret" in pod["containers"][0]["args"]
    pods = copy.deepcopy(cluster.pods)
    for present in (None, {}, {"m": ""}):
        if present is None:
            del cluster.objects["Secret", "trimtab-rendezvous"]
        else:
            cluster.objects["Secret", "trimtab-rendezvous"]["data"] = dict(present)
        assert applied(cluster) == [("Secret", "trimtab-rendezvous")]
        cluster.settle()
        assert cluster.objects["Secret", "trimtab-rendezvous"]["data"] == made["data"]
    assert cluster.pods == pods, "no pod restarts"


def test_existing_rendezvous_secret_value_is_kept() -> None:
    """Pods of one group that start at different times must read the same value."""
    cluster = a_settled_cluster(parallelism=THREE)
    cluster.objects["Secret", "trimtab-rendezvous"]["data"] = {"m": "c29tZWJvZHkgZWxzZSdz"}
    assert applied(cluster) == []


def test_single_pod_replicas_have_no_rendezvous_secret() -> None:
    cluster = a_settled_cluster()
    assert not [name for kind, name in cluster.objects if kind == "Secret"]
    assert "rendezvous" not in str(cluster.objects["StatefulSet", "m-g0"])


def test_unused_rendezvous_service_is_deleted_without_restart() -> None:
    cluster = a_settled_cluster(replicas=2)
    assert addresses_of(cluster) == {}
    for ordinal in range(2):
        cluster.do([Apply(rendezvous_service(cluster.deployment, ordinal), True, "as older operators did")])
    pods = copy.deepcopy(cluster.pods)
    cluster.settle()
    assert addresses_of(cluster) == {}
    assert cluster.pods == pods


def test_running_ranks_keep_their_rendezvous_service() -> None:
    """A replica of three pods becomes a single pod: the Service is deleted after its last pod."""
    cluster = a_settled_cluster(parallelism=THREE, rollout={"maxSurge": 0, "bakeTime": "0s"})
    cluster.edit(parallelism={"tensor": 1})
    cluster.plan_reconcile()
    assert set(addresses_of(cluster)) == {"m-g0"}
    cluster.settle()
    assert addresses_of(cluster) == {}
    assert [len(group.pods) for group in cluster.groups] == [1]


def test_rendezvous_secret_is_per_resource_and_not_the_token() -> None:
    deployment = FakeCluster(parallelism=THREE).deployment
    secrets = [rendezvous_secret(deployment, token=token)["data"]["m"] for token in ("a", "b", "a")]
    assert secrets[0] == secrets[2] != secrets[1]
    assert len(base64.b64decode(secrets[0])) == 64


def test_both_stateful_sets_of_a_group_carry_one_revision_in_a_rollout() -> None:
    cluster = a_settled_cluster(parallelism=THREE, replicas=2)
    cluster.edit(engine={"blockSize": 32})
    cluster.plan_reconcile()
    assert all(cluster.revisions), "the leader's and the workers' differ"
    assert len(set(cluster.revisions)) == 2
    cluster.settle()
    assert len(set(cluster.revisions)) == 1


def test_deleted_rendezvous_services_keep_their_addresses() -> None:
    cluster = a_settled_cluster(parallelism=THREE, replicas=3)
    pods = copy.deepcopy(cluster.pods)
    addresses = delete_rendezvous_services(cluster)
    assert [kind for kind, _ in applied(cluster)] == ["Service"] * 3
    cluster.settle()
    assert addresses_of(cluster) == addresses
    assert cluster.pods == pods


def test_recreated_rendezvous_service_restarts_its_group() -> None:
    """For when the previous address is in use."""
    cluster = a_settled_cluster(parallelism=THREE)
    before = args_of(cluster.objects["StatefulSet", "m-g0"])
    cluster.taken.update(delete_rendezvous_services(cluster).values())
    assert [kind for kind, _ in applied(cluster)] == ["Service"]
    cluster.settle()
    after = args_of(cluster.objects["StatefulSet", "m-g0"])
    assert before != after
    assert args_of(cluster.objects["StatefulSet", "m-g0-w"])[:-1] == after[:-1]


def test_groups_with_lost_addresses_restart_one_by_one() -> None:
    """Connected engines keep serving without the Service."""
    cluster = a_settled_cluster(parallelism=THREE, replicas=3)
    cluster.taken.update(delete_rendezvous_services(cluster).values())
    for _ in range(20):
        cluster.plan_reconcile()
        down = [group.name for group in cluster.groups if not group.is_ready]
        assert len(down) <= 1, "restarted at once"
        cluster.controllers()
    assert cluster.decide().children == ()
    assert {g.rendezvous_addresses for g in cluster.groups}.isdisjoint({frozenset([a]) for a in cluster.taken})


def test_ipv6_rendezvous_address_is_restored() -> None:
    """The flag has an IPv6 address without port, so it needs no brackets."""
    cluster = FakeCluster(parallelism=THREE)
    cluster.plan_reconcile()
    cluster.objects["Service", "m-g0"]["spec"]["clusterIP"] = "fd00:10:96::a7"
    cluster.settle()
    for name in ("m-g0", "m-g0-w"):
        assert "--master-addr=fd00:10:96::a7" in args_of(cluster.objects["StatefulSet", name])
    pods = copy.deepcopy(cluster.pods)
    delete_rendezvous_services(cluster)
    cluster.settle()
    assert addresses_of(cluster) == {"m-g0": "fd00:10:96::a7"}
    assert cluster.pods == pods


def test_scale_in_deletes_whole_group() -> None:
    cluster = a_settled_cluster(parallelism=THREE, replicas=2)
    cluster.edit(replicas=1)
    assert set(deleted(cluster)) == {"m-g1", "m-g1-w"}
    cluster.settle()
    assert children_of(cluster) == ["m", "m-engine", "m-g0", "m-g0", "m-g0-w", "trimtab-rendezvous"]


@pytest.mark.parametrize(("before", "after"), [(THREE, {}), ({}, THREE), (THREE, TWO)])
def test_a_changed_layout_changes_the_pods_of_a_group(before: dict[str, int], after: dict[str, int]) -> None:
    cluster = a_settled_cluster(parallelism=before)
    cluster.edit(parallelism=after)
    cluster.settle()
    (group,) = cluster.groups
    assert len(group.pods) == after.get("tensor", 1) * after.get("pipeline", 1)
    assert group.is_ready


def test_workers_without_leader_are_deleted() -> None:
    cluster = a_settled_cluster(parallelism=THREE)
    del cluster.objects["StatefulSet", "m-g0"]
    assert "m-g0-w" in deleted(cluster)
    cluster.settle()
    assert all(group.is_ready for group in cluster.groups)


def test_backed_off_group_has_no_pods_until_retry() -> None:
    cluster = a_settled_cluster(parallelism=THREE)
    wanted = rendered(cluster.deployment, token_hashes=HASHES)
    for held, pods in (
        (Held("note", has_pods=False), 0),
        (Held("note", has_pods=True), 3),
        (Held("", has_pods=True), 3),
    ):
        assignment = assign_revisions(wanted, cluster.children(), replicas=1)
        cluster.do(plan_children(assignment, cluster.children(), held={0: held}))
        cluster.controllers()
        assert len(cluster.pods) == pods
        stored = cluster.objects["StatefulSet", "m-g0"]["metadata"]["annotations"]
        assert stored[GANG_BACKOFF_ANNOTATION] == held.note
