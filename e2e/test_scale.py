"""Story: replicas by `kubectl scale` and by an autoscaler's write to /scale; and no writes when nothing happens."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube
from harness.wait import NotYet

IDLE_SECONDS = 30.0
LOOKS_APART_SECONDS = 10.0  # two ticks of the operator


def _has_replicas(deployment: Deployment, count: int) -> None:
    scale = deployment.scale()
    status = deployment.status()
    seen = (scale["status"]["replicas"], status.get("readyReplicas"), len(deployment.pods()))
    if seen != (count, count, count):
        raise NotYet(f"/scale says {seen[0]} replicas, status {seen[1]} ready, and there are {seen[2]} pods")


def _await_replicas(deployment: Deployment, count: int) -> None:
    deployment.waiter.until(
        f"{count} replicas, all Ready", lambda: _has_replicas(deployment, count), deadline_seconds=180.0
    )


def _selected(deployment: Deployment) -> list[str]:
    """The pods that an autoscaler would average over: it leaves out those that are being deleted."""
    selector = str(deployment.scale()["status"]["selector"])
    found = deployment.kube.items("pods", deployment.namespace, selector)
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


def test_kubectl_scale_adds_a_replica_and_leaves_the_first_alone(ready: Deployment, kube: Kube) -> None:
    first = ready.restarts()
    kube.run("scale", CRD_KIND, ready.name, "--replicas=2", "-n", ready.namespace)
    _await_replicas(ready, 2)
    assert first.items() <= ready.restarts().items(), "the first replica was restarted"
    assert len(_selected(ready)) == 2
    assert sorted(group["ordinal"] for group in ready.status()["groups"]) == [0, 1]
    assert ready.status()["desiredReplicas"] == 2


def test_an_autoscalers_write_to_scale_removes_it_again(ready: Deployment, kube: Kube) -> None:
    scale = ready.scale()
    assert scale["apiVersion"] == "autoscaling/v1"
    scale["spec"]["replicas"] = 1
    kube.put_raw(ready.scale_path, scale)
    _await_replicas(ready, 1)
    assert ready.scale()["spec"]["replicas"] == 1
    assert len(_selected(ready)) == 1


def test_nothing_is_written_when_nothing_happens(ready: Deployment, kube: Kube) -> None:
    def versions() -> dict[str, str]:
        kinds = f"{CRD_KIND},statefulsets,services,configmaps"
        return {
            f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
            for item in kube.items(kinds, ready.namespace)
        }

    ready.waiter.until("the replica that was removed has drained", lambda: _has_settled(ready), deadline_seconds=90.0)
    settled = ready.waiter.until("two equal looks, 10 s apart", lambda: _equal_looks(versions), deadline_seconds=60.0)
    assert settled == ready.waiter.stays("no resourceVersion changes", versions, seconds=IDLE_SECONDS)


def _has_settled(deployment: Deployment) -> None:
    _has_replicas(deployment, 1)
    progressing = next(c for c in deployment.status()["conditions"] if c["type"] == "Progressing")
    if progressing["status"] != "False":
        raise NotYet(f"Progressing: {progressing['reason']}: {progressing['message']}")


def _equal_looks(versions: Callable[[], dict[str, str]]) -> dict[str, str]:
    first = versions()
    time.sleep(LOOKS_APART_SECONDS)
    second = versions()
    if first != second:
        raise NotYet(f"still changing: {sorted(set(first.items()) ^ set(second.items()))}")
    return second


def test_zero_replicas_and_back(ready: Deployment, kube: Kube) -> None:
    kube.run("scale", CRD_KIND, ready.name, "--replicas=0", "-n", ready.namespace)

    def none_left() -> None:
        status = ready.status()
        if ready.pods() or status.get("replicas", 0):
            raise NotYet(f"{len(ready.pods())} pods, status.replicas {status.get('replicas')}")

    ready.waiter.until("no replica is left", none_left, deadline_seconds=90.0)
