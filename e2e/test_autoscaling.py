"""Scenario: autoscaling adds a replica under load and removes it after the configured stabilization window.

The tuned parameters are pinned, so that only replicas can help. No request fails while scaling up or down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import Apply
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube, KubectlError
from harness.report import log_line, report_measurement
from harness.traffic import LoadOptions, LoadReport, load
from harness.tuning import load_options, pinned_utilization, start_utilization
from harness.wait import NotYet
from trimtab_operator.tuner.scaling.control_law import LEARN_SECONDS

CLIENTS = 24  # the KV cache of one replica holds ten requests; the others queue
UP_SECONDS = 300.0  # the tuner needs 30 requests and a minute of load
DOWN_SECONDS = LEARN_SECONDS + 300.0  # load is observed for ten minutes before a replica is removed
READY_SECONDS = 300.0  # a replica that starts while another one is fully loaded
PAUSE_SECONDS = 20.0
SCALING: dict[str, Any] = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10}},
}


@pytest.fixture(scope="module")
def scaled(apply: Apply) -> Deployment:
    """Return the sample with autoscaling and every parameter pinned to its start value."""
    pinned = pinned_utilization(start_utilization())
    bounds = {
        **pinned["tuning"]["bounds"],
        "maxNumSeqs": {"min": 32, "max": 32},
        "maxNumBatchedTokens": {"min": 512, "max": 512},
        "watermark": {"max": "0.0"},
    }
    tuning = {"mode": "Auto", "bounds": bounds}
    rollout = {"drainTimeout": "30s"}
    deployment = apply("scaled", scaling=SCALING, engine=pinned["engine"], tuning=tuning, rollout=rollout)
    deployment.ready()
    return deployment


def test_replicas_follow_load(scaled: Deployment, installation: Installation, kube: Kube, namespace: str) -> None:
    deployment, image = scaled, installation.images.operator
    first = deployment.restarts()
    with load(kube, namespace, image, replace(load_options(deployment), concurrency=CLIENTS)) as running:
        more = _decision(deployment, "2", UP_SECONDS)
        _await_replicas(deployment, 2)
        # Checked before the load stops: afterwards a replica may be removed at once.
        assert first.items() <= deployment.restarts().items(), "the first replica was restarted"
        assert deployment.status()["lastScaleTime"] == more["time"]
        up = running.stop()
    _assert_no_failures(up)
    assert more["reason"] == "TooFewReplicas"

    with load(kube, namespace, image, _gentle(deployment), name="gentle") as running:
        fewer = _decision(deployment, "1", DOWN_SECONDS)
        _await_replicas(deployment, 1)
        down = running.stop()
    _assert_no_failures(down)
    assert fewer["reason"] == "TooManyReplicas"
    assert sum(deployment.restarts().values()) == 0
    events = [event for event in kube.events(namespace, deployment.name) if fewer["id"] in str(event["message"])]
    assert len(events) == 1, f"{len(events)} Events carry decision {fewer['id']}"
    report_measurement(f"automatic replicas: up under {CLIENTS} clients, {up}; down under two, {down}")


def test_scale_write_is_rejected_while_scaling_is_set(scaled: Deployment, kube: Kube, namespace: str) -> None:
    """Current API servers reject the write; older ones accept it, and an Event reports that it is ignored."""
    rejection = _rejection_of(scaled, 2)
    if rejection is not None:
        assert "spec.scaling" in rejection
        return

    def is_reported() -> None:
        if not any(event["reason"] == "ReplicasIgnored" for event in kube.events(namespace, scaled.name)):
            raise NotYet("no Event ReplicasIgnored yet")

    scaled.waiter.until("an Event reports the ignored write", is_reported, deadline_seconds=60.0)
    _await_replicas(scaled, 1)


def _rejection_of(deployment: Deployment, replicas: int) -> str | None:
    """Return the API server's error for a write of `replicas` to /scale, or None if it accepts the write."""
    scale = deployment.scale()
    scale["spec"]["replicas"] = replicas
    try:
        deployment.kube.put_raw(deployment.scale_path, scale)
    except KubectlError as error:
        return error.stderr
    return None


def _gentle(deployment: Deployment) -> LoadOptions:
    """Return a light load that one replica handles easily: two clients with occasional short requests."""
    return replace(
        load_options(deployment), concurrency=2, output_tokens=32, stagger_seconds=10.0, pause_seconds=PAUSE_SECONDS
    )


def _decision(deployment: Deployment, to: str, deadline_seconds: float) -> dict[str, Any]:
    """Wait until the newest decision on replicas is `to`, and return it."""

    def probe() -> dict[str, Any]:
        found = next((entry for entry in deployment.history() if entry.get("knob") == "replicas"), None)
        if found is None or found["to"] != to:
            wanted = deployment.status().get("desiredReplicas")
            raise NotYet(
                f"the newest decision on replicas is {found and found['message']}; desiredReplicas is {wanted}"
            )
        return found

    decision = deployment.waiter.until(
        f"the operator decides on {to} replicas", probe, deadline_seconds=deadline_seconds, every_seconds=2.0
    )
    log_line(f"decided: {decision['message']}")
    return decision


def _await_replicas(deployment: Deployment, count: int) -> None:
    def probe() -> None:
        status, pods = deployment.status(), deployment.pods()
        seen = (status.get("desiredReplicas"), status.get("readyReplicas"), len(pods))
        if seen != (count, count, count) or len(status.get("groups", [])) != count:
            raise NotYet(f"{seen[0]} desired, {seen[1]} ready, {seen[2]} pods, {len(status.get('groups', []))} groups")

    deployment.waiter.until(f"{count} replicas, all Ready", probe, deadline_seconds=READY_SECONDS)


def _assert_no_failures(report: LoadReport) -> None:
    log_line(str(report))
    assert report.failed == []
    assert report.completed > 0
