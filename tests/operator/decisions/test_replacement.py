"""Outdated pods are replaced by the operator: all of a group, once their StatefulSets would make better ones."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import a_pod, a_stateful_set
from operator_cluster import BROKEN, FakeCluster
from trimtab_operator.builders.labels import LEADER, REVISION_LABEL, WORKER
from trimtab_operator.decisions.replacement import outdated_pods
from trimtab_operator.observed.groups import Observed, groups_of

QUICK = {"startTimeout": "20s", "drainTimeout": "1s"}


def a_set(role: str = LEADER, *, revision: str = "r2", generation: int = 2, seen: int = 2) -> dict[str, Any]:
    made = a_stateful_set(role, revision=revision)
    made["metadata"]["generation"] = generation
    made["status"] = {"observedGeneration": seen}
    made["spec"]["template"] = {"metadata": {"labels": {REVISION_LABEL: revision}}}
    return made


def replaced(*sets: dict[str, Any], pods: list[dict[str, Any]]) -> list[str]:
    groups = groups_of(Observed(stateful_sets=sets, pods=tuple(pods)))
    return [found.name for found in outdated_pods(groups)]


def test_a_pod_of_another_revision_is_replaced() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r1")]) == ["m-g0-0"]


def test_a_pod_of_the_wanted_revision_is_left_alone() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r2")]) == []


def test_a_pod_that_goes_already_is_not_deleted_again() -> None:
    assert replaced(a_set(), pods=[a_pod(revision="r1", deleted=0.0)]) == []


def test_nothing_is_replaced_before_the_controller_has_seen_the_new_template() -> None:
    assert replaced(a_set(seen=1), pods=[a_pod(revision="r1")]) == []


def test_all_pods_of_a_group_are_replaced_at_once() -> None:
    pods = [a_pod(revision="r1"), a_pod(WORKER, revision="r1"), a_pod(WORKER, 1, revision="r1")]
    assert replaced(a_set(), a_set(WORKER), pods=pods) == ["m-g0-0", "m-g0-w-0", "m-g0-w-1"]


def test_nothing_is_replaced_while_leader_and_workers_are_to_get_different_revisions() -> None:
    pods = [a_pod(revision="r1"), a_pod(WORKER, revision="r1")]
    assert replaced(a_set(), a_set(WORKER, revision="r1"), pods=pods) == []


def test_a_label_that_somebody_wrote_on_a_stateful_set_replaces_nothing() -> None:
    meddled = a_set(revision="r1")
    meddled["metadata"]["labels"][REVISION_LABEL] = "another"
    assert replaced(meddled, pods=[a_pod(revision="r1")]) == []


@pytest.mark.parametrize("spec", [{}, {"parallelism": {"pipeline": 2, "gpusPerNode": 1}}])
def test_a_broken_change_is_replaced_though_no_controller_replaces_a_pod(spec: dict[str, Any]) -> None:
    """As where Kubernetes leaves broken pods as they are: a fix comes through, and so does a change that is taken
    back."""
    cluster = FakeCluster(rollout=QUICK, **spec)
    cluster.settle()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": [BROKEN]})
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    assert cluster.condition("Serving")["status"] == "True"
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--seed=2"]})
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"


def test_a_first_revision_that_is_broken_is_replaced_by_a_better_one() -> None:
    cluster = FakeCluster(runtime={"device": "cpu", "image": "engine:1", "args": [BROKEN]}, rollout=QUICK)
    for _ in range(8):
        cluster.tick()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": []})
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
