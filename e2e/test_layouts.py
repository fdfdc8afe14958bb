"""Scenario: replicas with several ranks and pods answer like a single rank and recover from pod failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Apply, Remove
from harness.deployment import Deployment, describe
from harness.engine import API_PORT
from harness.kube import Kube, Manifest, condition, is_true
from harness.layouts import NEVER, READY_SECONDS, ROOM, answer_of, await_ready, layout, nodes_of, require_workers
from harness.nodes import pod_nodes, simulated_resource, tainted_except, worker_nodes
from harness.report import report_measurement
from harness.wait import NotYet, Waiter

ACCELERATOR = "example.com/accelerator"


def apply_layout(apply: Apply, name: str, **parallelism: Any) -> Deployment:
    return apply(name, **layout(**parallelism))


@pytest.fixture(scope="module", autouse=True)
def several_nodes(kube: Kube) -> None:
    require_workers(kube)


@pytest.fixture(scope="module")
def expected(apply: Apply, remove: Remove) -> str:
    """Return the answer of a single rank."""
    one = apply_layout(apply, "one")
    one.ready(deadline_seconds=READY_SECONDS)
    text = answer_of(one)
    remove(one)
    return text


@pytest.fixture(scope="module")
def three(apply: Apply, remove: Remove, expected: str) -> Iterator[Deployment]:
    """Return one replica of three pods with one rank each: 9 heads and 3 KV heads split by three."""
    began = time.monotonic()
    deployment = apply_layout(apply, "three", tensor=3, gpusPerNode=1)
    await_ready(deployment, "three pods, TP3, from apply", began)
    yield deployment
    remove(deployment)


def test_three_pod_replica_answers_like_single_rank(three: Deployment, expected: str, kube: Kube) -> None:
    pods = three.group_pods()
    assert [pod["metadata"]["name"] for pod in pods] == ["three-g0-0", "three-g0-w-0", "three-g0-w-1"]
    assert len(set(nodes_of(three))) == min(3, len(pod_nodes(kube))), "pods of the group share a node"
    status = three.status()
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert (status["layout"]["worldSize"], status["layout"]["podsPerReplica"]) == (3, 3)
    assert is_true(three.get(), "LayoutValid")
    assert [pod["metadata"]["name"] for pod in three.pods()] == ["three-g0-0"], (
        "autoscalers must average over leaders only"
    )
    three.waiter.until("the Service has one endpoint", lambda: _has_endpoints(three, 1), deadline_seconds=60.0)
    assert answer_of(three) == expected


def test_killed_worker_pod_restarts_group(three: Deployment, expected: str, kube: Kube) -> None:
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in three.group_pods()}
    began = time.monotonic()
    kube.run("delete", "pod", "three-g0-w-0", "-n", three.namespace, "--grace-period=0", "--force", "--wait=false")
    _await_down(three)
    report_measurement(f"worker pod killed: Ready is False after {time.monotonic() - began:.0f} s")
    await_ready(three, "worker pod killed", began)
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in three.group_pods()}
    assert after.keys() == before.keys()
    assert after["three-g0-w-0"] != before["three-g0-w-0"]
    assert answer_of(three) == expected


def test_deleted_worker_pod_replaces_group(three: Deployment, expected: str, kube: Kube) -> None:
    before = {pod["metadata"]["uid"] for pod in three.group_pods()}
    began = time.monotonic()
    kube.delete("pod", "three-g0-w-1", three.namespace)
    _await_down(three)
    await_ready(three, "worker pod deleted", began)
    after = {pod["metadata"]["uid"] for pod in three.group_pods()}
    assert not before & after, "a pod of the former engine is still there"
    assert any(event["reason"] == "GroupRestarted" for event in kube.events(three.namespace, three.name))
    assert answer_of(three) == expected


def test_deleted_rendezvous_service_keeps_clusterip_without_restarts(
    three: Deployment, expected: str, kube: Kube
) -> None:
    def service() -> tuple[str, str]:
        found = kube.get("service", "three-g0", three.namespace)
        if found is None or not found["spec"].get("clusterIP"):
            raise NotYet("there is no Service with a clusterIP")
        return found["metadata"]["uid"], found["spec"]["clusterIP"]

    def pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in three.group_pods()}

    (uid, address), before = service(), pods()
    kube.delete("service", "three-g0", three.namespace)
    again = three.waiter.until("the Service is recreated", service, deadline_seconds=60.0)
    assert again[0] != uid
    assert again[1] == address

    def undisturbed() -> None:
        if pods() != before or not is_true(three.get(), "Ready"):
            raise NotYet(describe(three.get()))

    three.waiter.stays("no pod restarts", undisturbed, seconds=20.0)
    assert answer_of(three) == expected


def _has_endpoints(deployment: Deployment, count: int) -> None:
    """Raise NotYet unless the Service has `count` endpoints, which Kubernetes updates with a delay."""
    endpoints = deployment.kube.get("endpoints", deployment.name, deployment.namespace) or {}
    addresses = [len(subset.get("addresses", [])) for subset in endpoints.get("subsets") or []]
    if addresses != [count]:
        raise NotYet(f"the Service has {addresses} endpoints")


def _await_down(deployment: Deployment) -> None:
    def down() -> None:
        item = deployment.get()
        if is_true(item, "Ready"):
            raise NotYet(describe(item))

    deployment.waiter.until("Ready is not True", down, deadline_seconds=60.0, every_seconds=0.5)


# --- other layouts ----------------------------------------------------------------------------------------------------


def test_group_blocked_by_quota_starts_once_quota_is_removed(
    apply: Apply, remove: Remove, namespace: str, kube: Kube, expected: str
) -> None:
    pods = Waiter(kube, namespace).until(
        "no pod is terminating", lambda: _running_pods(kube, namespace), deadline_seconds=90.0
    )
    one_more = {"hard": {"pods": str(len(pods) + 1)}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": one_more}
    kube.apply(quota, namespace=namespace)
    try:
        half = apply_layout(apply, "half", pipeline=2, gpusPerNode=1)
        reason, message = half.waiter.until("the quota is reported", lambda: _rejected(half), deadline_seconds=120.0)
    finally:
        kube.delete("resourcequota", "few", namespace)
    assert (reason, "exceeded quota: few" in message) == ("FailedCreate", True), message
    began = time.monotonic()
    await_ready(half, "group limited to one of two pods by a quota, from the quota's removal", began)
    assert answer_of(half) == expected
    remove(half)


def _running_pods(kube: Kube, namespace: str) -> list[Manifest]:
    """Return all pods once none is terminating: a terminating pod would free quota later."""
    pods = kube.items("pods", namespace)
    ending = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]
    if ending:
        raise NotYet(f"still terminating: {', '.join(ending)}")
    return pods


def _rejected(deployment: Deployment) -> tuple[str, str]:
    found = condition(deployment.get(), "ScalingLimited")
    if found is None or found["status"] != "True":
        raise NotYet(f"ScalingLimited: {found}")
    return found["reason"], found["message"]


def test_two_pipeline_stages_in_two_pods(apply: Apply, remove: Remove, expected: str) -> None:
    began = time.monotonic()
    two = apply_layout(apply, "stages", pipeline=2, gpusPerNode=1)
    await_ready(two, "two pods, PP2, from apply", began)
    assert len(set(nodes_of(two))) == 2
    assert answer_of(two) == expected
    remove(two)


def test_two_data_parallel_ranks_in_one_pod(apply: Apply, remove: Remove, expected: str, kube: Kube) -> None:
    began = time.monotonic()
    name = "ranks"
    memory = {"requests": {"cpu": "300m", "memory": "1400Mi"}, "limits": {"memory": "3000Mi"}}
    template = {"spec": {"containers": [{"name": "main", "resources": memory}]}}
    both = apply(name, parallelism={"data": 2, "gpusPerNode": 2}, tuning=NEVER, template=template)
    await_ready(both, "one pod, DP2, from apply", began)
    assert len(both.group_pods()) == 1
    assert both.status()["layout"]["worldSize"] == 2
    assert answer_of(both) == expected
    metrics = kube.pod_http(both.namespace, both.pod_name(), API_PORT, "/metrics")
    assert 'vllm:num_requests_running{engine="1"' in metrics
    remove(both)


def test_two_data_parallel_ranks_in_two_pods(apply: Apply, remove: Remove, expected: str, kube: Kube) -> None:
    began = time.monotonic()
    both = apply_layout(apply, "spread", data=2, gpusPerNode=1)
    await_ready(both, "two pods, DP2, from apply", began)
    assert len(set(nodes_of(both))) == 2
    assert answer_of(both) == expected
    metrics = kube.pod_http(both.namespace, both.pod_name(), API_PORT, "/metrics")
    assert 'vllm:num_requests_running{engine="1"' in metrics
    remove(both)


# --- two groups that compete for accelerators -----------------------------------------------------------------------

RACER = {"parallelism": {"pipeline": 2, "gpusPerNode": 1}, "tuning": NEVER}
TOLERATION = {"key": "trimtab.dev/e2e-kept-for", "operator": "Exists", "effect": "NoSchedule"}


def apply_racer(apply: Apply, name: str, **pod: Any) -> Deployment:
    resources = {kind: {**amounts, ACCELERATOR: "1"} for kind, amounts in ROOM.items()}
    return apply(name, **RACER, template={"spec": {"containers": [{"name": "main", "resources": resources}], **pod}})


def test_newer_of_two_deadlocked_groups_backs_off(apply: Apply, remove: Remove, kube: Kube, expected: str) -> None:
    """Two groups of two pods hold one of two accelerators each: without gang scheduling both wait indefinitely."""
    one, other = worker_nodes(kube)[:2]
    with simulated_resource(kube, ACCELERATOR, {one: 1}):
        old = apply_racer(apply, "old")
        old.waiter.until("the older group has one pod placed", lambda: _holds(old, 1), deadline_seconds=60.0)
        young = apply_racer(apply, "young", tolerations=[TOLERATION])
        young.waiter.until("the newer group has its pods", lambda: _holds(young, 0), deadline_seconds=60.0)
        with simulated_resource(kube, ACCELERATOR, {other: 1}):
            with tainted_except(kube, other, TOLERATION):  # otherwise the scheduler may place a pod of either group
                young.waiter.until("each group has one pod placed", lambda: _holds(young, 1), deadline_seconds=60.0)
            began = time.monotonic()
            assert len(_placed(old)) == 1
            old.ready(deadline_seconds=READY_SECONDS)
            report_measurement(f"two deadlocked groups: the older one is Ready after {time.monotonic() - began:.0f} s")
            events = [
                event
                for event in kube.events(young.namespace, young.name)
                if event["reason"] == "GangSchedulingBackoff"
            ]
            assert events
            assert f"Insufficient {ACCELERATOR}" in events[0]["message"]
            limited = young.waiter.until(
                "the newer group reports ScalingLimited", lambda: _limited(young), deadline_seconds=60.0
            )
            assert f"Insufficient {ACCELERATOR}" in limited["message"]
            assert answer_of(old) == expected
            began = time.monotonic()
            remove(old)
            await_ready(young, "newer group, from the removal of the older", began)
            assert answer_of(young) == expected
            remove(young)


def _placed(deployment: Deployment) -> list[str]:
    pods = deployment.group_pods()
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName")]


def _holds(deployment: Deployment, count: int) -> None:
    """Raise NotYet unless both pods exist and `count` of them have a node."""
    pods, placed = deployment.group_pods(), _placed(deployment)
    if len(pods) != 2 or len(placed) != count:
        raise NotYet(f"{len(pods)} pods, placed: {', '.join(placed) or 'none'}")


def _limited(deployment: Deployment) -> Manifest:
    found = condition(deployment.get(), "ScalingLimited")
    if found is None or found["status"] != "True" or found["reason"] != "Unschedulable":
        raise NotYet(f"ScalingLimited: {found}")
    return found
