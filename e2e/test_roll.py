"""Story: a change reaches a single replica while clients ask, replicas come and go, operators are replaced, a node is
drained; and nobody is refused."""

from __future__ import annotations

import time

import pytest
from conftest import Apply
from harness.deployment import Deployment, seconds_since
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, Kube, KubectlError, Manifest
from harness.layouts import needs_workers
from harness.nodes import drained, node_of
from harness.report import measured
from harness.traffic import LoadOptions, load
from harness.wait import NotYet
from harness.watch import Watched, watch

CLIENTS = 4
ASKS_PER_SECOND = 25.0  # each over a connection of its own: a gap of a tenth of a second would be seen
SHARE_ASKED = 0.8  # at least: a load on busy cores falls behind at times
HOST = "kubernetes.io/hostname"
SETTLED_SECONDS = 300.0  # another engine loads beside one that serves on the same cores, and the old one drains


def _options(deployment: Deployment) -> LoadOptions:
    return LoadOptions(
        deployment.cluster_url(),
        deployment.served_name(),
        concurrency=CLIENTS,
        prompt_tokens=16,
        output_tokens=16,
        asks_per_second=ASKS_PER_SECOND,
    )


def test_a_single_replica_is_replaced_under_load_without_a_failed_request(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    deployment = apply("single", tuning={"mode": "Off", "bounds": None}, rollout={"drainTimeout": "60s"})
    before = deployment.settled()
    uid = deployment.pod()["metadata"]["uid"]
    with load(kube, namespace, installation.images.operator, _options(deployment)) as running:
        begin = time.monotonic()
        length = int(before["spec"]["engine"]["maxModelLen"]) - 16
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"engine": {"maxModelLen": length}}})
        after = deployment.settled(deadline_seconds=SETTLED_SECONDS)
        took = seconds_since(begin)
        report = running.stop()
    assert report.failed == []
    assert report.completed > 0
    assert report.asked >= SHARE_ASKED * ASKS_PER_SECOND * took
    assert deployment.pod()["metadata"]["uid"] != uid
    assert [group["revision"] for group in after["status"]["groups"]] != [
        group["revision"] for group in before["status"]["groups"]
    ]
    measured(f"a single replica is replaced under load in {took:.0f} s: {report}")


def test_a_replica_and_the_operators_go_under_load_without_a_failed_request(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    deployment = apply("single", replicas=2, tuning={"mode": "Off", "bounds": None}, rollout={"drainTimeout": "60s"})
    deployment.settled(deadline_seconds=SETTLED_SECONDS)
    assert len(deployment.pods()) == 2
    with load(kube, namespace, installation.images.operator, _options(deployment)) as running:
        begin = time.monotonic()
        kube.run("scale", CRD_KIND, deployment.name, "--replicas=1", "-n", namespace)
        after = deployment.settled(deadline_seconds=SETTLED_SECONDS)
        kube.run("rollout", "restart", "deployment/trimtab-operator", "--namespace", NAMESPACE)
        installation.ready()
        deployment.settled()
        took = seconds_since(begin)
        report = running.stop()
    assert report.failed == []
    assert report.asked >= SHARE_ASKED * ASKS_PER_SECOND * took
    assert [group["ready"] for group in after["status"]["groups"]] == [True]
    measured(f"a replica is removed, and all operators are replaced, under load in {took:.0f} s: {report}")


def _elsewhere(deployment: Deployment, leaving: Manifest) -> None:
    """Raises NotYet until the replica of a pod that was evicted has another one, on another node."""
    name, uid = leaving["metadata"]["name"], leaving["metadata"]["uid"]
    now = next((pod for pod in deployment.pods() if pod["metadata"]["name"] == name), None)
    if now is None or now["metadata"]["uid"] == uid or not now["spec"].get("nodeName"):
        raise NotYet(f"{name} is not placed anew")


def test_a_node_is_drained_under_load_without_a_failed_request(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    needs_workers(kube)
    selector = "trimtab.dev/deployment=drained"
    apart = {"labelSelector": {"matchLabels": {"trimtab.dev/deployment": "drained"}}, "topologyKey": HOST}
    affinity = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]
        }
    }
    deployment = apply(
        "drained",
        replicas=2,
        tuning={"mode": "Off", "bounds": None},
        rollout={"drainTimeout": "60s"},
        template={"spec": {"affinity": affinity}},
    )
    deployment.settled(deadline_seconds=SETTLED_SECONDS)
    leaving, staying = deployment.pods()
    node = node_of(leaving)
    assert node_of(staying) != node, "clusters before 1.21 serve no budget that would keep one of two"
    with load(kube, namespace, installation.images.operator, _options(deployment)) as running:
        begin = time.monotonic()
        with drained(kube, node, selector):
            deployment.waiter.until(
                f"{leaving['metadata']['name']} is elsewhere",
                lambda: _elsewhere(deployment, leaving),
                deadline_seconds=SETTLED_SECONDS,
            )
            deployment.settled(deadline_seconds=SETTLED_SECONDS)
            pods = {pod["metadata"]["name"]: pod for pod in deployment.pods()}
        took = seconds_since(begin)
        report = running.stop()
    assert report.failed == []
    assert report.asked >= SHARE_ASKED * ASKS_PER_SECOND * took
    assert node_of(pods[leaving["metadata"]["name"]]) != node
    assert pods[staying["metadata"]["name"]]["metadata"]["uid"] == staying["metadata"]["uid"]
    measured(f"a node is drained under load, its replica serves elsewhere after {took:.0f} s: {report}")


def _let_go(watched: Watched) -> list[str]:
    """The pods that the API server has evicted by a PodDisruptionBudget, in that order. Raises NotYet."""
    found = dict.fromkeys(pod for state in watched.states for pod in state.get("status", {}).get("disruptedPods", {}))
    if not found:
        raise NotYet("nobody was evicted")
    return list(found)


def test_while_a_replica_is_replaced_in_place_nobody_else_may_take_the_other(
    apply: Apply, kube: Kube, namespace: str
) -> None:
    if not kube.serves("policy/v1"):
        pytest.skip("clusters before 1.21 serve no budget")
    deployment = apply("turns", replicas=2, tuning={"mode": "Off", "bounds": None}, rollout={"maxSurge": 0})
    before = deployment.settled(deadline_seconds=SETTLED_SECONDS)
    pods = {pod["metadata"]["name"] for pod in deployment.pods()}
    with watch(kube, "poddisruptionbudget", deployment.name, namespace) as watched:
        length = int(before["spec"]["engine"]["maxModelLen"]) - 16
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"engine": {"maxModelLen": length}}})
        (gone,) = deployment.waiter.until(
            "the first replica is replaced", lambda: _let_go(watched), deadline_seconds=60.0, every_seconds=0.2
        )
        (other,) = pods - {gone}
        with pytest.raises(KubectlError, match="violate the pod's disruption budget"):
            kube.evict(namespace, other)
        deployment.settled(deadline_seconds=SETTLED_SECONDS)
    assert _let_go(watched) == [gone, other]
