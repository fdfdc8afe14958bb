"""Network policy, budget and monitoring: made where the cluster serves them and the administrator wants them."""

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
    """By port (None: every port), who may reach the engines; None: everybody."""
    rules = cluster.objects["NetworkPolicy", "m"]["spec"]["ingress"]
    return {(rule["ports"][0]["port"] if "ports" in rule else None): rule.get("from") for rule in rules}


# --- made, kept and removed -------------------------------------------------------------------------------------------


def test_what_the_cluster_serves_and_the_administrator_wants_is_made_and_belongs_to_the_resource() -> None:
    assert made(a_cluster()) == sorted(KINDS)


def test_what_the_cluster_does_not_serve_is_not_made() -> None:
    assert made(a_cluster(serves=("NetworkPolicy",))) == ["NetworkPolicy"]


def test_what_the_administrator_does_not_want_is_not_made_and_goes_when_it_was_there() -> None:
    assert made(a_cluster(Installation())) == []
    cluster = a_cluster()
    cluster.installation = replace(EVERYTHING, network=None)
    cluster.settle()
    assert made(cluster) == ["PodMonitor", "PrometheusRule"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_edits_or_deletes_is_put_back(kind: str) -> None:
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


# --- who may reach an engine ------------------------------------------------------------------------------------------


def test_everybody_reaches_the_api_and_the_operator_alone_the_admin_port() -> None:
    assert ways_in(a_cluster()) == {HTTP_PORT: None, ADMIN_PORT: [OPERATOR]}


def test_named_clients_prometheus_and_the_operator_alone_reach_the_api() -> None:
    access = NetworkAccess(operator=OPERATOR, clients=(FRONT,), monitoring=(PROMETHEUS,))
    ways = ways_in(a_cluster(replace(EVERYTHING, network=access)))
    assert ways == {HTTP_PORT: [FRONT, PROMETHEUS, OPERATOR], ADMIN_PORT: [OPERATOR]}


def test_ranks_of_a_replica_of_several_pods_reach_each_other_at_any_port() -> None:
    """They meet at one port, and talk at ports that the system chooses."""
    ways = ways_in(a_cluster(parallelism=TWO_PODS))
    (peer,) = ways[None] or []
    assert peer["podSelector"] == a_cluster().objects["NetworkPolicy", "m"]["spec"]["podSelector"]
    assert "namespaceSelector" not in peer  # of the same namespace


def test_a_way_between_ranks_stays_open_until_the_last_replica_of_several_pods_is_gone() -> None:
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


# --- an account without rights ----------------------------------------------------------------------------------------


def test_pods_have_an_account_of_their_own_that_is_there_before_them_and_mounts_no_token() -> None:
    cluster = FakeCluster(knows_the_model=False)
    (account, *_) = [action.manifest for action in cluster.turn().children if hasattr(action, "manifest")]
    assert account["kind"] == "ServiceAccount"
    assert account["automountServiceAccountToken"] is False
    cluster.controllers()
    (reader,) = cluster.pods.values()
    cluster.settle()
    (engine,) = cluster.pods.values()
    for pod in (reader, engine):
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"] == "m-engine"
        assert pod["spec"]["automountServiceAccountToken"] is False
