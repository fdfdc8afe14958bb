"""Story: owners share a GPU budget: the more important one goes first, and what it leaves is taken up again.

What is shared out are replicas: no node needs a GPU for it, and pods that find none wait.
"""

from __future__ import annotations

import pytest
from conftest import Apply, Remove
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube
from harness.wait import NotYet

TOTAL = 2
SHARED_SECONDS = 120.0  # the Job that reads the model, and replicas that come or go; none has to be Ready
GPU = {"device": "cuda"}


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """The chart with a budget of its administrator's."""
    chart.ensure(**{"gpuBudget.total": str(TOTAL)})
    return chart


@pytest.fixture(scope="module")
def patient(apply: Apply) -> Deployment:
    """A resource that wants more than there is, and matters no more than others."""
    return apply("patient", runtime=GPU, replicas=TOTAL + 1)


def _await_replicas(deployment: Deployment, *, granted: int, wanted: int | None = None) -> None:
    """Wait until so many replicas are there, and the status says so; `wanted` only where that is more."""

    def has_its_share() -> None:
        status = deployment.status()
        said = status.get("desiredReplicas"), status.get("wantedReplicas")
        sets = deployment.kube.items("statefulsets", deployment.namespace, f"trimtab.dev/deployment={deployment.name}")
        if (said, len(sets)) != ((granted, wanted), granted):
            raise NotYet(f"{said[0]} of {said[1]} wanted replicas by its status, {len(sets)} by its StatefulSets")

    deployment.waiter.until(f"{deployment.name} has {granted} replicas", has_its_share, deadline_seconds=SHARED_SECONDS)


def _await_word(deployment: Deployment, kube: Kube, reason: str, *parts: str) -> None:
    """Wait until an Event of the resource says all of these."""

    def told() -> None:
        said = [
            event["message"]
            for event in kube.events(deployment.namespace)
            if event["reason"] == reason and event["involvedObject"]["name"] == deployment.name
        ]
        if not any(all(part in message for part in parts) for message in said):
            raise NotYet(f"{reason} says {said}")

    deployment.waiter.until(f"{reason} of {deployment.name} says why", told, deadline_seconds=SHARED_SECONDS)


def test_no_more_replicas_come_than_the_budget_allows_and_an_event_says_why(patient: Deployment, kube: Kube) -> None:
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    _await_word(patient, kube, "OverBudget", f"{TOTAL} of {TOTAL + 1} wanted replicas", f"budget of {TOTAL} GPUs")


def test_a_higher_priority_takes_a_replica_and_gives_it_back(
    patient: Deployment, apply: Apply, remove: Remove, kube: Kube
) -> None:
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    urgent = apply("urgent", runtime=GPU, priority=100)
    _await_replicas(urgent, granted=1)
    _await_replicas(patient, granted=TOTAL - 1, wanted=TOTAL + 1)
    _await_word(patient, kube, "OverBudget", f"{urgent.namespace}/{urgent.name} (priority 100) gets 1")
    remove(urgent)
    _await_replicas(patient, granted=TOTAL, wanted=TOTAL + 1)
    remove(patient)
