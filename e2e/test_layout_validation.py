"""Scenario: a layout that does not fit the model is rejected with the offending number before engine pods exist."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube, KubectlError, Manifest, condition
from harness.wait import NotYet

READ_SECONDS = 90.0  # the Job's pod starts and reads headers
EXPECTED_PARTS = ("spec.parallelism.tensor", "is 2", "num_attention_heads 9")  # SmolLM2 has 9 heads and 3 KV heads


def _rejected(deployment: Deployment) -> dict[str, Manifest]:
    item = deployment.get()
    valid = condition(item, "LayoutValid")
    if valid is None or valid["status"] != "False":
        raise NotYet(f"LayoutValid: {valid}")
    return {entry["type"]: entry for entry in item["status"]["conditions"]}


def _engines_ever(kube: Kube, namespace: str) -> list[str]:
    """Return existing StatefulSets, and Events about StatefulSets that existed earlier."""
    existing = [item["metadata"]["name"] for item in kube.items("statefulsets", namespace)]
    messages = [
        event["message"] for event in kube.events(namespace) if event["involvedObject"]["kind"] == "StatefulSet"
    ]
    return existing + messages


@pytest.fixture(scope="module")
def rejected(apply: Apply) -> Deployment:
    """Apply SmolLM2 with TP2. The webhook accepts it, since the model's facts are not known yet."""
    return apply(parallelism={"tensor": 2})


def test_invalid_layout_is_reported_before_engines_exist(rejected: Deployment, kube: Kube) -> None:
    by_type = rejected.waiter.until("LayoutValid=False", lambda: _rejected(rejected), deadline_seconds=READ_SECONDS)
    for kind in ("LayoutValid", "Ready"):
        assert (by_type[kind]["status"], by_type[kind]["reason"]) == ("False", "InvalidSpec")
        for part in EXPECTED_PARTS:
            assert part in by_type[kind]["message"]
    assert _engines_ever(kube, rejected.namespace) == []
    facts = kube.get("configmap", f"{rejected.name}-facts", rejected.namespace)
    assert facts is not None
    assert '"num_attention_heads":9' in facts["data"]["facts.json"]


def test_facts_job_is_deleted_after_reading(rejected: Deployment, kube: Kube) -> None:
    def gone() -> None:
        left = [item["metadata"]["name"] for item in kube.items("jobs,pods", rejected.namespace)]
        if left:
            raise NotYet(f"left: {left}")

    rejected.waiter.until("the Job and its pod are gone", gone, deadline_seconds=60.0)


def test_webhook_rejects_edit_to_invalid_layout(rejected: Deployment, kube: Kube) -> None:
    change: dict[str, Any] = {"spec": {"parallelism": {"tensor": 4}}}
    with pytest.raises(KubectlError, match=r"tensor: is 4.*num_attention_heads 9"):
        kube.patch(CRD_KIND, rejected.name, rejected.namespace, change)


def test_valid_layout_after_edit_is_served_and_reported(rejected: Deployment, kube: Kube) -> None:
    kube.patch(CRD_KIND, rejected.name, rejected.namespace, {"spec": {"parallelism": {"tensor": 1}}})
    status = rejected.ready()["status"]
    valid = condition(rejected.get(), "LayoutValid")
    assert valid is not None
    assert (valid["status"], valid["reason"]) == ("True", "LayoutReported")
    assert status["layout"]["reported"] == {"worldSize": 1, "tensor": 1, "pipeline": 1, "data": 1, "expert": False}
    assert EXPECTED in ask(rejected).text


def test_missing_model_is_reported_with_job_output(apply: Apply, remove: Remove) -> None:
    absent = apply("absent", model={"uri": "file:///models/absent"})

    def unreadable() -> Manifest:
        ready = condition(absent.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable":
            raise NotYet(f"Ready: {ready}")
        return ready

    reported = absent.waiter.until("the Job's error is in the condition", unreadable, deadline_seconds=READ_SECONDS)
    assert "/models/absent" in reported["message"]
    assert "exit code 2" in reported["message"]
    assert not any(entry.startswith("StatefulSet/") for entry in absent.children())
    remove(absent)


def test_unavailable_gpus_set_scaling_limited(apply: Apply, remove: Remove) -> None:
    """The resource is accepted, since node pools can scale up from zero later."""
    hungry = apply("hungry", runtime={"device": "cuda"})

    def is_limited() -> Manifest:
        limited = condition(hungry.get(), "ScalingLimited")
        if limited is None or limited["reason"] != "TooFewGPUsPerNode":
            raise NotYet(f"ScalingLimited: {limited}")
        return limited

    limited = hungry.waiter.until("ScalingLimited", is_limited, deadline_seconds=READ_SECONDS)
    assert limited["status"] == "True"
    assert "requests 1 GPU" in limited["message"]
    assert "no node has any" in limited["message"]
    remove(hungry)
