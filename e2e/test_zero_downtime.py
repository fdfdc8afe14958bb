"""Scenario: no request fails during a rollout, scale-in, operator restart or node drain."""

from __future__ import annotations

import time

import pytest
from conftest import Apply
from harness.deployment import Deployment, seconds_since
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, Kube, KubectlError, Manifest
from harness.layouts import require_workers
from harness.nodes import drain_node, node_of
from harness.report import report_measurement
from harness.traffic import LoadOptions, load
from harness.wait import NotYet
from harness.watch import Watched, watch

CLIENTS = 4
PROBES_PER_SECOND = 25.0  # each over a new connection, so that a gap of a tenth of a second is detected
MIN_PROBE_SHARE = 0.8  # the load script may fall behind its rate on busy cores
HOST = "kubernetes.io/hostname"
SETTLED_SECONDS = 300.0  # a new engine loads while the old one serves on the same cores and then drains


def _options(deployment: Deployment) -> LoadOptions:
    return LoadOptions(
        deployment.cluster_url(),
        deployment.served_name(),
        concurrency=CLIENTS,
        prompt_tokens=16,
        output_tokens=16,
        probes_per_second=PROBES_PER_SECOND,
    )


def test_single_replica_rollout_under_load_fails_no_request(
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
    assert report.probed >= MIN_PROBE_SHARE * PROBES_PER_SECOND * took
    assert deployment.pod()["metadata"]["uid"] != uid
    assert [group["revision"] for group in after["status"]["groups"]] != [
        group["revision"] for group in before["status"]["groups"]
    ]
    report_measurement(f"a single replica is replaced under load in {took:.0f} s: {report}")


def test_scale_in_and_operator_restart_under_load_fail_no_request(
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
    assert report.probed >= MIN_PROBE_SHARE * PROBES_PER_SECOND * took
    assert [group["ready"] for group in after["status"]["groups"]] == [True]
    report_measurement(f"a replica is removed, and all operators are replaced, under load in {took:.0f} s: {report}")


def _is_rescheduled(deployment: Deployment, leaving: Manifest) -> None:
    """Raise NotYet until an evicted pod's replica has a new pod with a node."""
    name, uid = leaving["metadata"]["name"], leaving["metadata"]["uid"]
    now = next((pod for pod in deployment.pods() if pod["metadata"]["name"] == name), None)
    if now is None or now["metadata"]["uid"] == uid or not now["spec"].get("nodeName"):
        raise NotYet(f"{name} is not rescheduled")


def test_node_drain_under_load_fails_no_request(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    require_workers(kube)
    selector = "trimtab.dev/deployment=drained"
    other_host = {"labelSelector": {"matchLabels": {"trimtab.dev/deployment": "drained"}}, "topologyKey": HOST}
    affinity = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": other_host}]
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
    assert node_of(staying) != node, "both replicas are on one node"
    with load(kube, namespace, installation.images.operator, _options(deployment)) as running:
        begin = time.monotonic()
        with drain_node(kube, node, selector):
            deployment.waiter.until(
                f"{leaving['metadata']['name']} is rescheduled",
                lambda: _is_rescheduled(deployment, leaving),
                deadline_seconds=SETTLED_SECONDS,
            )
            deployment.settled(deadline_seconds=SETTLED_SECONDS)
            pods = {pod["metadata"]["name"]: pod for pod in deployment.pods()}
        took = seconds_since(begin)
        report = running.stop()
    assert report.failed == []
    assert report.probed >= MIN_PROBE_SHARE * PROBES_PER_SECOND * took
    assert node_of(pods[leaving["metadata"]["name"]]) != node
    assert pods[staying["metadata"]["name"]]["metadata"]["uid"] == staying["metadata"]["uid"]
    report_measurement(f"a node is drained under load, its replica serves on another node after {took:.0f} s: {report}")


def _evicted_pods(watched: Watched) -> list[str]:
    """Return the pods evicted under the PodDisruptionBudget, in order. Raises NotYet if there is none."""
    found = dict.fromkeys(pod for state in watched.states for pod in state.get("status", {}).get("disruptedPods", {}))
    if not found:
        raise NotYet("no pod was evicted")
    return list(found)


def test_in_place_rollout_blocks_eviction_of_other_replica(apply: Apply, kube: Kube, namespace: str) -> None:
    if not kube.serves("policy/v1"):
        pytest.skip("clusters before 1.21 have no policy/v1 PodDisruptionBudget")
    deployment = apply("in-place", replicas=2, tuning={"mode": "Off", "bounds": None}, rollout={"maxSurge": 0})
    before = deployment.settled(deadline_seconds=SETTLED_SECONDS)
    pods = {pod["metadata"]["name"] for pod in deployment.pods()}
    with watch(kube, "poddisruptionbudget", deployment.name, namespace) as watched:
        length = int(before["spec"]["engine"]["maxModelLen"]) - 16
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"engine": {"maxModelLen": length}}})
        (gone,) = deployment.waiter.until(
            "the first replica is replaced", lambda: _evicted_pods(watched), deadline_seconds=60.0, every_seconds=0.2
        )
        (other,) = pods - {gone}
        with pytest.raises(KubectlError, match="violate the pod's disruption budget"):
            kube.evict(namespace, other)
        deployment.settled(deadline_seconds=SETTLED_SECONDS)
    assert _evicted_pods(watched) == [gone, other]
