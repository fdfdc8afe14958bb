"""Scenario: `kubectl scale` and writes to /scale change replicas, and an idle resource causes no writes."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube
from harness.wait import NotYet

IDLE_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 10.0  # two reconcile intervals of the operator


def _has_replicas(deployment: Deployment, count: int) -> None:
    scale = deployment.scale()
    status = deployment.status()
    seen = (scale["status"]["replicas"], status.get("readyReplicas"), len(deployment.pods()))
    if seen != (count, count, count):
        raise NotYet(f"/scale has {seen[0]} replicas, status has {seen[1]} ready, and there are {seen[2]} pods")


def _await_replicas(deployment: Deployment, count: int) -> None:
    deployment.waiter.until(
        f"{count} replicas, all Ready", lambda: _has_replicas(deployment, count), deadline_seconds=180.0
    )


def _selected(deployment: Deployment) -> list[str]:
    """Return the pods that an autoscaler averages over, without terminating ones."""
    selector = str(deployment.scale()["status"]["selector"])
    found = deployment.kube.items("pods", deployment.namespace, selector)
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


def test_kubectl_scale_adds_replica_without_restart(ready: Deployment, kube: Kube) -> None:
    first = ready.restarts()
    kube.run("scale", CRD_KIND, ready.name, "--replicas=2", "-n", ready.namespace)
    _await_replicas(ready, 2)
    assert first.items() <= ready.restarts().items(), "the first replica was restarted"
    assert len(_selected(ready)) == 2
    assert sorted(group["ordinal"] for group in ready.status()["groups"]) == [0, 1]
    assert ready.status()["desiredReplicas"] == 2


def test_scale_subresource_write_removes_replica(ready: Deployment, kube: Kube) -> None:
    scale = ready.scale()
    assert scale["apiVersion"] == "autoscaling/v1"
    scale["spec"]["replicas"] = 1
    kube.put_raw(ready.scale_path, scale)
    _await_replicas(ready, 1)
    assert ready.scale()["spec"]["replicas"] == 1
    assert len(_selected(ready)) == 1


def test_idle_resource_causes_no_writes(ready: Deployment, kube: Kube) -> None:
    def versions() -> dict[str, str]:
        kinds = f"{CRD_KIND},statefulsets,services,configmaps"
        return {
            f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
            for item in kube.items(kinds, ready.namespace)
        }

    ready.waiter.until("the replica that was removed has drained", lambda: _has_settled(ready), deadline_seconds=90.0)
    settled = ready.waiter.until(
        "equal resourceVersions 10 s apart", lambda: _stable_versions(versions), deadline_seconds=60.0
    )
    assert settled == ready.waiter.stays("no resourceVersion changes", versions, seconds=IDLE_SECONDS)


def _has_settled(deployment: Deployment) -> None:
    _has_replicas(deployment, 1)
    progressing = next(c for c in deployment.status()["conditions"] if c["type"] == "Progressing")
    if progressing["status"] != "False":
        raise NotYet(f"Progressing: {progressing['reason']}: {progressing['message']}")


def _stable_versions(versions: Callable[[], dict[str, str]]) -> dict[str, str]:
    first = versions()
    time.sleep(POLL_INTERVAL_SECONDS)
    second = versions()
    if first != second:
        raise NotYet(f"still changing: {sorted(set(first.items()) ^ set(second.items()))}")
    return second


def test_scale_to_zero_removes_all_pods(ready: Deployment, kube: Kube) -> None:
    kube.run("scale", CRD_KIND, ready.name, "--replicas=0", "-n", ready.namespace)

    def none_left() -> None:
        status = ready.status()
        if ready.pods() or status.get("replicas", 0):
            raise NotYet(f"{len(ready.pods())} pods, status.replicas {status.get('replicas')}")

    ready.waiter.until("no replica is left", none_left, deadline_seconds=90.0)
