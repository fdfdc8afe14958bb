"""Preconditions of a plan: none if it only creates, else the resource and the remaining replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.planning.plan import plan_reconcile
from trimtab_operator.planning.preconditions import preconditions_of


def grounds(cluster: FakeCluster) -> set[str]:
    """Return the names of the next plan's preconditions, for a cached snapshot."""
    snapshot = replace(cluster.look(), cached_resource=cluster.body)
    return {
        manifest["metadata"]["name"] for manifest in preconditions_of(snapshot, plan_reconcile(snapshot, cluster.state))
    }


def a_settled_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(rollout={"maxSurge": 0, "bakeTime": "0s"}, **spec)
    cluster.settle()
    return cluster


def test_idle_and_creating_plans_have_no_preconditions() -> None:
    cluster = a_settled_cluster(replicas=1)
    assert grounds(cluster) == set()
    cluster.edit(replicas=2)
    assert cluster.decide().children
    assert grounds(cluster) == set()


def test_removed_replica_requires_remaining_replicas() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(replicas=2)
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0", "m-g1", "m-g1-0"}


def test_removed_unready_replica_is_a_precondition() -> None:
    cluster = FakeCluster(replicas=2, start_seconds=60.0)
    while len(cluster.pods) < 2:
        cluster.tick()
    cluster.edit(replicas=1)
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0", "m-g1-0"}


def test_overwritten_objects_and_deleted_pods_are_preconditions() -> None:
    cluster = a_settled_cluster(replicas=2)
    cluster.edit(engine={"blockSize": 16})
    everybody = {"m", "m-g0", "m-g0-0", "m-g1", "m-g1-0"}
    assert grounds(cluster) == everybody
    cluster.plan_reconcile()
    cluster.controllers()
    assert cluster.decide().urgent_deletes
    assert grounds(cluster) == everybody


def test_rollout_verdict_has_preconditions() -> None:
    cluster = FakeCluster(replicas=1)
    while not cluster.decide().state_writes or cluster.state.rollout is None or not cluster.pods:
        cluster.tick()
    plan = cluster.decide()
    assert not plan.children
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0"}


@pytest.mark.parametrize("kind", ["Service", "ServiceAccount"])
def test_user_edit_is_overwritten_if_spec_is_unchanged(kind: str) -> None:
    cluster = a_settled_cluster(replicas=1)
    name = "m" if kind == "Service" else "m-engine"
    cluster.objects[kind, name]["metadata"]["labels"]["app.kubernetes.io/part-of"] = "another"
    assert grounds(cluster) >= {"m"}


def test_uncached_snapshot_has_no_preconditions() -> None:
    cluster = a_settled_cluster(replicas=2)
    cluster.edit(replicas=1)
    snapshot = cluster.look()
    assert preconditions_of(snapshot, plan_reconcile(snapshot, cluster.state)) == ()
