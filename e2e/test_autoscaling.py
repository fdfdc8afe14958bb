"""Story: automatic replicas. Load comes, and a second replica; load goes, and so does the replica, at the owner's pace.

The knobs are pinned, so that replicas are all that can help. No request fails on the way up or down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import Apply
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube, KubectlError
from harness.report import measured, say
from harness.traffic import LoadOptions, LoadReport, load
from harness.trim import load_options, pinned_utilization, start_utilization
from harness.wait import NotYet

CLIENTS = 24  # ten run at once in the KV cache of one replica, and the others wait
UP_SECONDS = 300.0  # 30 requests must have been seen, and a minute of load
DOWN_SECONDS = 600.0  # a load is watched for five start-ups before the first replica goes
READY_SECONDS = 300.0  # a replica that starts beside one under full load
PAUSE_SECONDS = 20.0
SCALING: dict[str, Any] = {
    "minReplicas": 1,
    "maxReplicas": 2,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10}},
}


@pytest.fixture(scope="module")
def scaled(apply: Apply) -> Deployment:
    """The sample with automatic replicas and every knob where it starts."""
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


def test_replicas_come_with_the_load_and_go_with_it(
    scaled: Deployment, installation: Installation, kube: Kube, namespace: str
) -> None:
    deployment, image = scaled, installation.images.operator
    first = deployment.restarts()
    with load(kube, namespace, image, replace(load_options(deployment), concurrency=CLIENTS)) as running:
        more = _decision(deployment, "2", UP_SECONDS)
        _await_replicas(deployment, 2)
        # Now: once the load stops, one of them may go before its last requests are answered.
        assert first.items() <= deployment.restarts().items(), "the first replica was restarted"
        assert deployment.status()["lastScaleTime"] == more["time"]
        up = running.stop()
    _nobody_failed(up)
    assert more["reason"] == "TooFewReplicas"

    with load(kube, namespace, image, _gentle(deployment), name="gentle") as running:
        fewer = _decision(deployment, "1", DOWN_SECONDS)
        _await_replicas(deployment, 1)
        down = running.stop()
    _nobody_failed(down)
    assert fewer["reason"] == "TooManyReplicas"
    assert sum(deployment.restarts().values()) == 0
    events = [event for event in kube.events(namespace, deployment.name) if fewer["id"] in str(event["message"])]
    assert len(events) == 1, f"{len(events)} Events carry decision {fewer['id']}"
    measured(f"automatic replicas: up under {CLIENTS} clients, {up}; down under two, {down}")


def test_who_writes_to_scale_meanwhile_learns_that_nobody_hears(scaled: Deployment, kube: Kube, namespace: str) -> None:
    """On a current cluster the API server refuses the write; an older one takes it, and an Event says so."""
    refusal = _refusal_of(scaled, 2)
    if refusal is not None:
        assert "spec.scaling" in refusal
        return

    def is_told() -> None:
        if not any(event["reason"] == "ReplicasIgnored" for event in kube.events(namespace, scaled.name)):
            raise NotYet("no Event ReplicasIgnored yet")

    scaled.waiter.until("an Event says that nobody heard", is_told, deadline_seconds=60.0)
    _await_replicas(scaled, 1)


def _refusal_of(deployment: Deployment, replicas: int) -> str | None:
    """What the API server says to an autoscaler that asks for so many; None when it takes it."""
    scale = deployment.scale()
    scale["spec"]["replicas"] = replicas
    try:
        deployment.kube.put_raw(deployment.scale_path, scale)
    except KubectlError as error:
        return error.stderr
    return None


def _gentle(deployment: Deployment) -> LoadOptions:
    """Two clients with a short request now and then: one replica holds that easily."""
    return replace(
        load_options(deployment), concurrency=2, output_tokens=32, stagger_seconds=10.0, pause_seconds=PAUSE_SECONDS
    )


def _decision(deployment: Deployment, to: str, deadline_seconds: float) -> dict[str, Any]:
    """Wait until the newest decision on replicas is for so many; returns it."""

    def probe() -> dict[str, Any]:
        found = next((entry for entry in deployment.history() if entry.get("knob") == "replicas"), None)
        if found is None or found["to"] != to:
            wanted = deployment.status().get("desiredReplicas")
            raise NotYet(f"the newest decision on replicas is {found and found['message']}; {wanted} are wanted")
        return found

    decision = deployment.waiter.until(
        f"the operator asks for {to} replicas", probe, deadline_seconds=deadline_seconds, every_seconds=2.0
    )
    say(f"decided: {decision['message']}")
    return decision


def _await_replicas(deployment: Deployment, count: int) -> None:
    def probe() -> None:
        status, pods = deployment.status(), deployment.pods()
        seen = (status.get("desiredReplicas"), status.get("readyReplicas"), len(pods))
        if seen != (count, count, count) or len(status.get("groups", [])) != count:
            raise NotYet(f"{seen[0]} wanted, {seen[1]} ready, {seen[2]} pods, {len(status.get('groups', []))} groups")

    deployment.waiter.until(f"{count} replicas, all Ready", probe, deadline_seconds=READY_SECONDS)


def _nobody_failed(report: LoadReport) -> None:
    say(str(report))
    assert report.failed == []
    assert report.completed > 0
