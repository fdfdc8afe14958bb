"""Scenario: without the webhook, the reconciler rejects invalid specs with the same reason."""

from __future__ import annotations

import pytest
from conftest import Apply, Remove
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, condition, is_true
from harness.rejected_specs import REJECTED, WITHOUT_WEBHOOK
from harness.wait import NotYet


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """The chart without its webhook."""
    chart.ensure(**{"webhook.enabled": "false"})
    return chart


@pytest.mark.parametrize("case", WITHOUT_WEBHOOK)
def test_reconciler_rejects_invalid_spec_without_webhook(apply: Apply, kube: Kube, namespace: str, case: str) -> None:
    changes, parts = next(row[1:] for row in REJECTED if row[0] == case)
    deployment = apply(f"refused-{case}", **changes)

    def rejected() -> str:
        ready = condition(deployment.get(), "Ready")
        if ready is None:
            raise NotYet("there is no Ready condition yet")
        assert ready["status"] == "False", ready
        return f"{ready['reason']}: {ready['message']}"

    message = deployment.waiter.until("Ready=False with the reason", rejected, deadline_seconds=30.0)
    assert message.startswith("InvalidSpec")
    for part in parts:
        assert part in message
    assert deployment.children() == []
    kube.delete(CRD_KIND, deployment.name, namespace)


def test_running_resource_keeps_serving_after_rejected_edit(
    apply: Apply, remove: Remove, kube: Kube, namespace: str
) -> None:
    """The reconciler rejects the edit and leaves running replicas alone."""
    deployment = apply()
    deployment.ready()
    before = deployment.restarts()
    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"parallelism": {"gpusPerNode": 3}}})

    def rejected() -> None:
        item = deployment.get()
        if item["status"]["observedGeneration"] != item["metadata"]["generation"] or is_true(item, "Ready"):
            raise NotYet("the edit is not reconciled yet")

    deployment.waiter.until("the edit is rejected", rejected, deadline_seconds=30.0)
    assert deployment.restarts() == before
    remove(deployment)
