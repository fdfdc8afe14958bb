"""Story: where the webhook is switched off, what cannot be carried out is refused with the same reason by the loop."""

from __future__ import annotations

import pytest
from conftest import Apply, Remove
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, condition, is_true
from harness.refused import REFUSED, WITHOUT_WEBHOOK
from harness.wait import NotYet


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """The chart without its webhook."""
    chart.ensure(**{"webhook.enabled": "false"})
    return chart


@pytest.mark.parametrize("case", WITHOUT_WEBHOOK)
def test_without_the_webhook_the_loop_says_the_same_and_creates_no_pod(
    apply: Apply, kube: Kube, namespace: str, case: str
) -> None:
    changes, says = next(row[1:] for row in REFUSED if row[0] == case)
    deployment = apply(f"refused-{case}", **changes)

    def refused() -> str:
        ready = condition(deployment.get(), "Ready")
        if ready is None:
            raise NotYet("there is no condition yet")
        assert ready["status"] == "False", ready
        return f"{ready['reason']}: {ready['message']}"

    message = deployment.waiter.until("Ready=False with the reason", refused, deadline_seconds=30.0)
    assert message.startswith("InvalidSpec")
    for part in says:
        assert part in message
    assert deployment.children() == []
    kube.delete(CRD_KIND, deployment.name, namespace)


def test_a_running_resource_whose_edit_is_refused_keeps_serving(
    apply: Apply, remove: Remove, kube: Kube, namespace: str
) -> None:
    """The loop refuses the edit; what ran before goes on running."""
    deployment = apply()
    deployment.ready()
    before = deployment.restarts()
    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"parallelism": {"gpusPerNode": 3}}})

    def refused() -> None:
        item = deployment.get()
        if item["status"]["observedGeneration"] != item["metadata"]["generation"] or is_true(item, "Ready"):
            raise NotYet("the edit is not judged yet")

    deployment.waiter.until("the edit is refused", refused, deadline_seconds=30.0)
    assert deployment.restarts() == before
    remove(deployment)
