"""Replacement of outdated pods: all pods of a group at once."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import a_pod, a_stateful_set
from operator_cluster import BROKEN, FakeCluster
from trimtab_operator.builders.labels import LEADER, REVISION_LABEL, WORKER
from trimtab_operator.observed.groups import ObservedChildren, groups_of
from trimtab_operator.rollout.pod_replacement import plan_pod_replacements

QUICK = {"startTimeout": "20s", "drainTimeout": "1s"}


def a_set(role: str = LEADER, *, revision: str = "r2", generation: int = 2, seen: int = 2) -> dict[str, Any]:
    made = a_stateful_set(role, revision=revision)
    made["metadata"]["generation"] = generation
    made["status"] = {"observedGeneration": seen}
    made["spec"]["template"] = {"metadata": {"labels": {REVISION_LABEL: revision}}}
    return made


def replaced(*sets: dict[str, Any], pods: list[dict[str, Any]]) -> list[str]:
    groups = groups_of(ObservedChildren(stateful_sets=sets, pods=tuple(pods)))
    return [found.name for found in plan_pod_replacements(groups, 1)]


def test_outdated_pod_is_replaced() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r1")]) == ["m-g0-0"]


def test_current_pod_is_kept() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r2")]) == []


def test_terminating_pod_is_not_deleted_again() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r1", deleted=0.0)]) == []


def test_replacement_waits_for_observed_template() -> None:
    assert replaced(a_set(seen=1), pods=[a_pod(revision="r1")]) == []


def test_all_pods_of_a_group_are_replaced_at_once() -> None:
    pods = [a_pod(revision="r1"), a_pod(WORKER, revision="r1"), a_pod(WORKER, 1, revision="r1")]
    assert replaced(a_set(), a_set(WORKER), pods=pods) == ["m-g0-0", "m-g0-w-0", "m-g0-w-1"]


def test_replacement_waits_for_equal_revisions() -> None:
    pods = [a_pod(revision="r1"), a_pod(WORKER, revision="r1")]
    assert replaced(a_set(), a_set(WORKER, revision="r1"), pods=pods) == []


def test_label_on_stateful_set_replaces_nothing() -> None:
    meddled = a_set(revision="r1")
    meddled["metadata"]["labels"][REVISION_LABEL] = "another"
    assert replaced(meddled, pods=[a_pod(revision="r1")]) == []


def in_place(**spec: Any) -> FakeCluster:
    """A cluster that replaces replicas in place; the first one was just given another template."""
    cluster = FakeCluster(rollout={"maxSurge": 0, "bakeTime": "0s"}, **spec)
    cluster.settle()
    cluster.edit(engine={"blockSize": 16})
    cluster.plan_reconcile()
    cluster.controllers()
    return cluster


def test_serving_replica_is_kept_at_max_unavailable() -> None:
    cluster = in_place(replicas=2)
    cluster.set_ready("m-g1-0", ready=False)
    cluster.plan_reconcile()
    assert "m-g0-0" in cluster.pods
    assert cluster.condition("Serving")["status"] == "True", "its pod is of another revision, and answers"


def test_down_replica_is_replaced_before_serving_one() -> None:
    """Otherwise both would wait for each other: a permanently unready replica blocks no other."""
    cluster = in_place(replicas=2)
    cluster.set_ready("m-g1-0", ready=False)
    for _ in range(3):
        cluster.plan_reconcile()
        cluster.controllers()
    assert cluster.revisions[0] == cluster.revisions[1]
    cluster.set_ready("m-g1-0")
    cluster.settle()
    assert not any(group.is_outdated for group in cluster.groups)


def test_edit_replaces_down_replicas_first() -> None:
    cluster = in_place(replicas=2)
    cluster.set_ready("m-g1-0", ready=False)
    cluster.edit(replicas=1)
    cluster.plan_reconcile()
    assert [group.name for group in cluster.groups] == ["m-g0"]
    assert "m-g0-0" in cluster.pods


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "gpusPerNode": 1}])
def test_reverted_edit_restarts_no_engine(layout: dict[str, int]) -> None:
    cluster = in_place(replicas=2, parallelism=layout)
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.edit(engine=None)
    cluster.settle()
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == pods
    assert cluster.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("spec", [{}, {"parallelism": {"pipeline": 2, "gpusPerNode": 1}}])
def test_broken_change_is_replaced_by_operator(spec: dict[str, Any]) -> None:
    """Some Kubernetes versions keep broken pods: a fix and a rollback must be rolled out nevertheless."""
    cluster = FakeCluster(rollout=QUICK, **spec)
    cluster.settle()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": [BROKEN]})
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    assert cluster.condition("Serving")["status"] == "True"
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--seed=2"]})
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"


def test_broken_first_revision_is_superseded() -> None:
    cluster = FakeCluster(runtime={"device": "cpu", "image": "engine:1", "args": [BROKEN]}, rollout=QUICK)
    for _ in range(8):
        cluster.tick()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": []})
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
