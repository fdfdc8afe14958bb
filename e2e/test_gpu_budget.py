"""Scenario: resources share a GPU budget by priority, and released GPUs are granted again.

Only replica counts are checked: no node needs a GPU, and unschedulable pods stay Pending.
"""

from __future__ import annotations

import pytest
from conftest import Apply, Remove
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube
from harness.wait import NotYet

TOTAL = 2
SHARED_SECONDS = 120.0  # the facts Job, and replicas added or removed; none has to be Ready
GPU = {"device": "cuda"}


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """Install the chart with a GPU budget."""
    chart.ensure(**{"gpuBudget.total": str(TOTAL)})
    return chart


@pytest.fixture(scope="module")
def patient(apply: Apply) -> Deployment:
    """Return a resource with the default priority that needs more GPUs than the budget has."""
    return apply("patient", runtime=GPU, replicas=TOTAL + 1)


def _await_replicas(deployment: Deployment, *, granted: int, wanted: int | None = None) -> None:
    """Wait until `granted` replicas exist and the status reports them; `wanted` is set only if it is more."""

    def has_its_share() -> None:
        status = deployment.status()
        reported = status.get("desiredReplicas"), status.get("wantedReplicas")
        sets = deployment.kube.items("statefulsets", deployment.namespace, f"trimtab.dev/deployment={deployment.name}")
        if (reported, len(sets)) != ((granted, wanted), granted):
            raise NotYet(
                f"status has {reported[0]} of {reported[1]} wanted replicas, and there are {len(sets)} StatefulSets"
            )

    deployment.waiter.until(f"{deployment.name} has {granted} replicas", has_its_share, deadline_seconds=SHARED_SECONDS)


def _await_event(deployment: Deployment, kube: Kube, reason: str, *parts: str) -> None:
    """Wait for an Event of the resource that contains all `parts`."""

    def emitted() -> None:
        messages = [
            event["message"]
            for event in kube.events(deployment.namespace)
            if event["reason"] == reason and event["involvedObject"]["name"] == deployment.name
        ]
        if not any(all(part in message for part in parts) for message in messages):
            raise NotYet(f"{reason}: {messages}")

    deployment.waiter.until(f"an Event {reason} of {deployment.name}", emitted, deadline_seconds=SHARED_SECONDS)


def test_gpu_budget_limits_replicas_and_emits_event(patient: Deployment, kube: Kube) -> None:
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    _await_event(patient, kube, "OverBudget", f"{TOTAL} of {TOTAL + 1} wanted replicas", f"budget of {TOTAL} GPUs")


def test_higher_priority_preempts_replica_until_deleted(
    patient: Deployment, apply: Apply, remove: Remove, kube: Kube
) -> None:
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    urgent = apply("urgent", runtime=GPU, priority=100)
    _await_replicas(urgent, granted=1)
    _await_replicas(patient, granted=TOTAL - 1, wanted=TOTAL + 1)
    _await_event(patient, kube, "OverBudget", f"{urgent.namespace}/{urgent.name} (priority 100) uses 1")
    remove(urgent)
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    remove(patient)
