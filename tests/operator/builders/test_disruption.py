"""PodDisruptionBudget: node drains evict at most as many replicas as a rollout."""

from __future__ import annotations

from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.builders.labels import FACTS_COMPONENT, ROLE_LABEL
from trimtab_operator.resource.installation import DisruptionBudgets, Installation


def a_settled_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**spec)
    cluster.serves.add("PodDisruptionBudget")
    cluster.settle()
    return cluster


def budget(cluster: FakeCluster) -> dict[str, Any]:
    return dict(cluster.objects["PodDisruptionBudget", "m"]["spec"])


@pytest.mark.parametrize(
    ("replicas", "max_unavailable", "down"), [(1, 1, 1), (4, 1, 1), (4, "50%", 2), (0, "50%", 1), (3, 2, 2)]
)
def test_as_many_replicas_may_be_taken_as_may_be_down_in_a_rollout(
    replicas: int, max_unavailable: int | str, down: int
) -> None:
    cluster = a_settled_cluster(replicas=replicas, rollout={"maxUnavailable": max_unavailable})
    assert budget(cluster)["maxUnavailable"] == down


def test_a_budget_follows_the_replica_count() -> None:
    cluster = a_settled_cluster(replicas=2, rollout={"maxUnavailable": "50%"})
    cluster.edit(replicas=4)
    cluster.settle()
    assert budget(cluster)["maxUnavailable"] == 2


def test_a_budget_that_somebody_edits_is_put_back() -> None:
    cluster = a_settled_cluster()
    cluster.objects["PodDisruptionBudget", "m"]["spec"]["maxUnavailable"] = 0
    cluster.settle()
    assert budget(cluster)["maxUnavailable"] == 1


def test_engines_are_counted_and_the_reader_of_the_model_is_not() -> None:
    cluster = FakeCluster(knows_the_model=False, parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.serves.add("PodDisruptionBudget")
    cluster.tick()
    (reader,) = (pod for name, pod in cluster.pods.items() if FACTS_COMPONENT in name or "-facts" in name)
    cluster.settle()
    (expression,) = budget(cluster)["selector"]["matchExpressions"]
    assert (expression["key"], expression["operator"]) == (ROLE_LABEL, "Exists")
    assert ROLE_LABEL not in reader["metadata"]["labels"]
    assert all(ROLE_LABEL in pod["metadata"]["labels"] for pod in cluster.pods.values())


def test_a_cluster_that_serves_no_budgets_is_given_none() -> None:
    cluster = FakeCluster()
    cluster.settle()
    assert ("PodDisruptionBudget", "m") not in cluster.objects


@pytest.mark.parametrize("replicas", [1, 2])
def test_loading_or_crashing_replica_never_blocks_a_drain(replicas: int) -> None:
    cluster = a_settled_cluster(replicas=replicas)
    for name in cluster.pods:
        cluster.set_ready(name, ready=False)
    assert budget(cluster)["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert all(map(cluster.lets_go, cluster.pods))
    del cluster.objects["PodDisruptionBudget", "m"]["spec"]["unhealthyPodEvictionPolicy"]
    assert not any(map(cluster.lets_go, cluster.pods)), "as before Kubernetes 1.27"


def test_serving_replica_is_kept_while_another_is_down() -> None:
    cluster = a_settled_cluster(replicas=2)
    cluster.set_ready("m-g0-0", ready=False)
    assert (cluster.lets_go("m-g0-0"), cluster.lets_go("m-g1-0")) == (True, False)


def test_budgets_can_be_disabled() -> None:
    cluster = a_settled_cluster()
    cluster.installation = Installation(disruption_budgets=DisruptionBudgets(enabled=False))
    cluster.settle()
    assert ("PodDisruptionBudget", "m") not in cluster.objects
