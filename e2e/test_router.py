"""Scenario: the router loses no request through failures, rollouts, its own replacement and zero replicas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import Apply
from harness.deployment import Deployment, seconds_since
from harness.engine import read_engine
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, Manifest, condition
from harness.report import report_measurement
from harness.traffic import LoadOptions, LoadReport, load
from harness.wait import NotYet

REPLICAS = 3
CLIENTS = 6
OUTPUT_TOKENS = 8
REQUESTS_PER_SECOND = 50.0
HELD_REQUESTS = 200
TENANTS = ("a", "b")
SETTLED_SECONDS = 400.0  # three engines load on the same cores
BATCH_SECONDS = 2.0  # requests that run in one batch may get their first tokens in any order
FAIL_OPEN_SECONDS = 20.0
# Half of a pod's grace period, which includes maxHold, passes before Kubernetes looks again at a deleted namespace.
ROUTER: dict[str, Any] = {"replicas": 2, "trustHeaders": True, "maxHold": "4m"}
QUIET: dict[str, Any] = {"mode": "Off", "bounds": None}
ROLLOUT = {"drainTimeout": "60s"}
SMALL = {"containers": [{"name": "main", "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1500Mi"}}}]}


@pytest.fixture(scope="module")
def routed(apply: Apply) -> Deployment:
    """Return three replicas behind two router pods."""
    template = {"spec": SMALL}
    deployment = apply("routed", replicas=REPLICAS, router=ROUTER, tuning=QUIET, rollout=ROLLOUT, template=template)
    deployment.settled(deadline_seconds=SETTLED_SECONDS)
    await_router(deployment)
    return deployment


def options(deployment: Deployment, **changes: Any) -> LoadOptions:
    return LoadOptions(
        deployment.cluster_url(),
        deployment.served_name(),
        **{"concurrency": CLIENTS, "prompt_tokens": 16, "output_tokens": OUTPUT_TOKENS, **changes},
    )


def await_router(deployment: Deployment, *, replicas: int = 2) -> None:
    """Wait until the router pods are Ready and the client Service selects them."""

    def probe() -> None:
        router = deployment.status().get("router")
        if router != {"replicas": replicas, "readyReplicas": replicas, "selected": True}:
            raise NotYet(f"status.router is {router}")

    deployment.waiter.until("the Service selects the router", probe, deadline_seconds=120.0)


def router_pods(deployment: Deployment) -> list[Manifest]:
    selector = f"trimtab.dev/deployment={deployment.name},app.kubernetes.io/component=router"
    found = deployment.kube.items("pods", deployment.namespace, selector)
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def selects_router(deployment: Deployment) -> bool:
    service = deployment.kube.get("service", deployment.name, deployment.namespace) or {}
    return bool(service["spec"]["selector"].get("app.kubernetes.io/component") == "router")


def await_counts(deployment: Deployment, count: int) -> None:
    """Wait until there are exactly this many replicas, all Ready."""

    def probe() -> None:
        seen = len(deployment.pods()), deployment.status().get("readyReplicas")
        if seen != (count, count):
            raise NotYet(f"{seen[0]} pods, {seen[1]} of them Ready")

    deployment.waiter.until(f"{count} replicas", probe, deadline_seconds=SETTLED_SECONDS)


def assert_nothing_failed(report: LoadReport) -> None:
    assert report.failed == []
    assert report.completed > 0


def test_requests_through_the_service_reach_every_replica(
    routed: Deployment, installation: Installation, kube: Kube, namespace: str
) -> None:
    before = {pod["metadata"]["name"]: _tokens(routed, pod) for pod in routed.pods()}
    with load(kube, namespace, installation.images.operator, options(routed)) as running:
        time.sleep(20.0)
        report = running.stop()
    assert_nothing_failed(report)
    served = {pod["metadata"]["name"]: _tokens(routed, pod) - before[pod["metadata"]["name"]] for pod in routed.pods()}
    assert len(served) == REPLICAS
    assert all(served.values()), served
    report_measurement(f"{REPLICAS} replicas behind the router: {report}; tokens by replica {sorted(served.values())}")


def _tokens(deployment: Deployment, pod: Manifest) -> float:
    return read_engine(deployment.kube, deployment.namespace, pod["metadata"]["name"]).generation_tokens


def test_killed_engine_loses_no_request_without_first_token(
    routed: Deployment, installation: Installation, kube: Kube, namespace: str
) -> None:
    victim = routed.pods()[0]
    with load(kube, namespace, installation.images.operator, options(routed, probes_per_second=10.0)) as running:
        time.sleep(10.0)
        kube.delete("pod", victim["metadata"]["name"], namespace, grace=0)
        time.sleep(15.0)
        report = running.stop()
    routed.settled(deadline_seconds=SETTLED_SECONDS)
    assert report.lost == []
    assert report.completed > 0
    report_measurement(f"an engine is killed under load: {report}, all of the failed ones after their first token")


@pytest.mark.usefixtures("soak_only")
def test_scale_to_zero_and_back_under_load_loses_no_request(
    routed: Deployment, installation: Installation, kube: Kube, namespace: str
) -> None:
    rate = options(routed, concurrency=0, output_tokens=1, prompt_tokens=8, requests_per_second=REQUESTS_PER_SECOND)
    with load(kube, namespace, installation.images.operator, rate) as running:
        begin = time.monotonic()
        time.sleep(5.0)
        _scale(routed, 0)
        await_counts(routed, 0)
        assert selects_router(routed)
        _scale(routed, REPLICAS)
        await_counts(routed, REPLICAS)
        took = seconds_since(begin)
        report = running.stop()
    assert_nothing_failed(report)
    report_measurement(
        f"{REPLICAS} → 0 → {REPLICAS} replicas within {took:.0f} s under {REQUESTS_PER_SECOND:g} requests/s: {report}"
    )


def _scale(deployment: Deployment, count: int) -> None:
    deployment.kube.run("scale", CRD_KIND, deployment.name, f"--replicas={count}", "-n", deployment.namespace)


@pytest.mark.usefixtures("soak_only")
def test_rollout_of_engines_and_router_loses_no_request(
    routed: Deployment, installation: Installation, kube: Kube, namespace: str
) -> None:
    before = {pod["metadata"]["uid"] for pod in (*routed.pods(), *router_pods(routed))}
    with load(
        kube, namespace, installation.images.operator, options(routed, concurrency=2, probes_per_second=10.0)
    ) as running:
        begin = time.monotonic()
        kube.run("rollout", "restart", f"deployment/{routed.name}-router", "-n", namespace)
        status = ("rollout", "status", f"deployment/{routed.name}-router", "-n", namespace)
        kube.run(*status, timeout_seconds=SETTLED_SECONDS)
        length = int(routed.get()["spec"]["engine"]["maxModelLen"]) - 16
        kube.patch(CRD_KIND, routed.name, namespace, {"spec": {"engine": {"maxModelLen": length}}})
        routed.settled(deadline_seconds=2 * SETTLED_SECONDS)
        took = seconds_since(begin)
        report = running.stop()
    assert_nothing_failed(report)
    await_router(routed)
    after = {pod["metadata"]["uid"] for pod in (*routed.pods(), *router_pods(routed))}
    assert before.isdisjoint(after)
    report_measurement(f"all router pods and all engines are replaced under load in {took:.0f} s: {report}")


def test_deleted_router_fails_open(routed: Deployment, installation: Installation, kube: Kube, namespace: str) -> None:
    """One deleted router pod costs nothing; without any, clients reach the replicas directly."""
    with load(
        kube, namespace, installation.images.operator, options(routed, concurrency=2, probes_per_second=10.0)
    ) as running:
        time.sleep(3.0)
        kube.delete("pod", router_pods(routed)[0]["metadata"]["name"], namespace)
        time.sleep(10.0)
        await_router(routed)
        report = running.stop()
    assert_nothing_failed(report)
    with load(kube, namespace, installation.images.operator, options(routed, concurrency=2)) as running, cordoned(kube):
        time.sleep(5.0)
        begin = time.monotonic()
        for pod in router_pods(routed):
            kube.delete("pod", pod["metadata"]["name"], namespace, grace=0)
        routed.waiter.until(
            "the Service selects the replicas", lambda: _selects_replicas(routed), deadline_seconds=FAIL_OPEN_SECONDS
        )
        took = seconds_since(begin)
        time.sleep(10.0)  # requests that began in the gap have ended
        before = running.live() or {}
        time.sleep(10.0)
        after = running.live() or {}
    assert after["failed"] == before["failed"]
    assert after["completed"] > 0
    await_router(routed)
    report_measurement(f"all router pods are killed: the Service selects the replicas after {took:.1f} s")


@contextmanager
def cordoned(kube: Kube) -> Iterator[None]:
    """Keep new pods from being scheduled: deleted router pods are not replaced."""
    nodes = [node["metadata"]["name"] for node in kube.items("nodes")]
    kube.run("cordon", *nodes)
    try:
        yield
    finally:
        kube.run("uncordon", *nodes)


def _selects_replicas(deployment: Deployment) -> None:
    if selects_router(deployment):
        raise NotYet("it selects the router")


def test_held_requests_start_replicas_and_idle_ones_are_removed(
    apply: Apply, installation: Installation, kube: Kube, namespace: str
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 1, "idleTimeout": "30s"}
    deployment = apply(
        "idle",
        replicas=0,
        router={**ROUTER, "replicas": 1},  # each router pod has its own queue and order
        scaling=scaling,
        tuning={"mode": "Auto", "bounds": None},
        rollout=ROLLOUT,
        template={"spec": SMALL},
    )
    await_router(deployment, replicas=1)
    found = condition(deployment.get(), "Serving") or {}
    assert (found.get("status"), found.get("reason")) == ("True", "ScaledToZero")
    sent = options(
        deployment,
        concurrency=0,
        requests_per_second=100.0,
        max_requests=HELD_REQUESTS,
        tenants=TENANTS,
        probes_per_second=5.0,
    )
    with load(kube, namespace, installation.images.operator, sent) as running:
        begin = time.monotonic()
        await_counts(deployment, 1)
        took = seconds_since(begin)
        time.sleep(5.0)
        report = running.stop()
    assert report.failed == []
    assert report.completed == HELD_REQUESTS
    assert report.overtaken_seconds <= BATCH_SECONDS
    assert _replica_decision(deployment) == "RequestsHeld"
    report_measurement(
        f"{HELD_REQUESTS} requests at zero replicas: one Ready after {took:.0f} s, all served: {report}; no request "
        f"was overtaken by a later one of its tenant for more than {report.overtaken_seconds:.2f} s"
    )
    await_counts(deployment, 0)
    assert selects_router(deployment)
    assert _replica_decision(deployment) == "NoRequests"


def _replica_decision(deployment: Deployment) -> str | None:
    """Return the reason of the newest decision on replicas."""
    return next((entry["reason"] for entry in deployment.history() if entry.get("knob") == "replicas"), None)
