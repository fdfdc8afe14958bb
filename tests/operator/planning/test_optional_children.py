"""Network policy, budget and monitoring: created if the cluster serves them and they are enabled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT
from trimtab_operator.resource.installation import Alerts, Installation, NetworkAccess, PodMonitoring

OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "trimtab-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
}
FRONT = {"podSelector": {"matchLabels": {"app": "front"}}}
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
EVERYTHING = Installation(NetworkAccess(operator=OPERATOR), PodMonitoring(labels={"release": "prometheus"}), Alerts())
KINDS = ("NetworkPolicy", "PodMonitor", "PrometheusRule")
TWO_PODS = {"pipeline": 2, "gpusPerNode": 1}


def a_cluster(installation: Installation = EVERYTHING, *, serves: tuple[str, ...] = KINDS, **spec: Any) -> FakeCluster:
    cluster = FakeCluster(**spec)
    cluster.installation = installation
    cluster.serves |= set(serves)
    cluster.settle()
    return cluster


def made(cluster: FakeCluster) -> list[str]:
    return sorted(kind for kind, _ in cluster.objects if kind in KINDS)


def ways_in(cluster: FakeCluster) -> dict[int | None, list[dict[str, Any]] | None]:
    """Return by port (None for all) which pods may connect; None for all pods."""
    rules = cluster.objects["NetworkPolicy", "m"]["spec"]["ingress"]
    return {(rule["ports"][0]["port"] if "ports" in rule else None): rule.get("from") for rule in rules}


# --- lifecycle --------------------------------------------------------------------------------------------------------


def test_enabled_and_served_kinds_are_created_and_owned() -> None:
    assert made(a_cluster()) == sorted(KINDS)


def test_unserved_kinds_are_not_created() -> None:
    assert made(a_cluster(serves=("NetworkPolicy",))) == ["NetworkPolicy"]


def test_disabled_kinds_are_deleted() -> None:
    assert made(a_cluster(Installation())) == []
    cluster = a_cluster()
    cluster.installation = replace(EVERYTHING, network=None)
    cluster.settle()
    assert made(cluster) == ["PodMonitor", "PrometheusRule"]


@pytest.mark.parametrize("kind", KINDS)
def test_edited_or_deleted_children_are_restored(kind: str) -> None:
    cluster = a_cluster()
    whole = cluster.objects[kind, "m"]["spec"]
    cluster.objects[kind, "m"]["spec"] = {}
    cluster.settle()
    assert cluster.objects[kind, "m"]["spec"] == whole
    del cluster.objects[kind, "m"]
    cluster.settle()
    assert cluster.objects[kind, "m"]["spec"] == whole


def test_a_cluster_at_rest_is_not_written() -> None:
    cluster = a_cluster()
    cluster.writes = 0
    for _ in range(5):
        cluster.tick()
    assert cluster.writes == 0


# --- network policy ---------------------------------------------------------------------------------------------------


def test_network_policy_opens_api_and_restricts_admin_port() -> None:
    assert ways_in(a_cluster()) == {HTTP_PORT: None, ADMIN_PORT: [OPERATOR]}


def test_network_policy_restricts_api_to_named_clients() -> None:
    access = NetworkAccess(operator=OPERATOR, clients=(FRONT,), monitoring=(PROMETHEUS,))
    ways = ways_in(a_cluster(replace(EVERYTHING, network=access)))
    assert ways == {HTTP_PORT: [FRONT, PROMETHEUS, OPERATOR], ADMIN_PORT: [OPERATOR]}


def test_network_policy_opens_ports_between_ranks() -> None:
    """Ranks connect at one port and then use ports chosen by the system."""
    ways = ways_in(a_cluster(parallelism=TWO_PODS))
    (peer,) = ways[None] or []
    assert peer["podSelector"] == a_cluster().objects["NetworkPolicy", "m"]["spec"]["podSelector"]
    assert "namespaceSelector" not in peer  # of the same namespace


def test_rank_ports_stay_open_until_last_multi_pod_replica() -> None:
    cluster = a_cluster(parallelism=TWO_PODS, replicas=2)
    cluster.edit(parallelism={})
    cluster.tick()
    assert any(name.endswith("-w") for kind, name in cluster.objects if kind == "StatefulSet")
    assert None in ways_in(cluster)
    cluster.settle()
    assert None not in ways_in(cluster)


def test_engines_are_selected_and_the_reader_of_the_model_is_not() -> None:
    cluster = FakeCluster(knows_the_model=False)
    cluster.installation, cluster.serves = EVERYTHING, set(KINDS)
    cluster.tick()
    (reader,) = cluster.pods.values()
    cluster.settle()
    selector = cluster.objects["NetworkPolicy", "m"]["spec"]["podSelector"]
    (role,) = selector["matchExpressions"]
    (engine,) = cluster.pods.values()
    assert selector["matchLabels"].items() <= engine["metadata"]["labels"].items()
    assert role["key"] in engine["metadata"]["labels"]
    assert role["key"] not in reader["metadata"]["labels"]


# --- service account --------------------------------------------------------------------------------------------------


def test_pods_use_own_service_account_without_token() -> None:
    cluster = FakeCluster(knows_the_model=False)
    (account, *_) = [action.manifest for action in cluster.plan_reconcile().children if hasattr(action, "manifest")]
    assert account["kind"] == "ServiceAccount"
    assert account["automountServiceAccountToken"] is False
    cluster.controllers()
    (reader,) = cluster.pods.values()
    cluster.settle()
    (engine,) = cluster.pods.values()
    for pod in (reader, engine):
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"] == "m-engine"
        assert pod["spec"]["automountServiceAccountToken"] is False
