"""Story: a layout that the model cannot take is refused with the number that is wrong, before any engine pod exists."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.kube import CRD_KIND, Kube, KubectlError, Manifest, condition
from harness.wait import NotYet

READ_SECONDS = 90.0  # the Job's pod starts and reads headers
SAYS = ("spec.parallelism.tensor", "is 2", "num_attention_heads 9")  # SmolLM2 has 9 heads and 3 KV heads


def _refused(deployment: Deployment) -> dict[str, Manifest]:
    item = deployment.get()
    valid = condition(item, "LayoutValid")
    if valid is None or valid["status"] != "False":
        raise NotYet(f"LayoutValid: {valid}")
    return {entry["type"]: entry for entry in item["status"]["conditions"]}


def _engines_ever(kube: Kube, namespace: str) -> list[str]:
    """StatefulSets and their pods, those that are there and those that events speak of."""
    there = [item["metadata"]["name"] for item in kube.items("statefulsets", namespace)]
    told = [event["message"] for event in kube.events(namespace) if event["involvedObject"]["kind"] == "StatefulSet"]
    return there + told


@pytest.fixture(scope="module")
def refused(apply: Apply) -> Deployment:
    """TP2 of SmolLM2. The webhook lets it pass: the model is not known yet."""
    return apply(parallelism={"tensor": 2})


def test_the_loop_names_the_number_and_no_engine_ever_existed(refused: Deployment, kube: Kube) -> None:
    by_type = refused.waiter.until("LayoutValid=False", lambda: _refused(refused), deadline_seconds=READ_SECONDS)
    for kind in ("LayoutValid", "Ready"):
        assert (by_type[kind]["status"], by_type[kind]["reason"]) == ("False", "InvalidSpec")
        for part in SAYS:
            assert part in by_type[kind]["message"]
    assert _engines_ever(kube, refused.namespace) == []
    facts = kube.get("configmap", f"{refused.name}-facts", refused.namespace)
    assert facts is not None
    assert '"num_attention_heads":9' in facts["data"]["facts.json"]


def test_the_job_is_gone_when_it_was_read(refused: Deployment, kube: Kube) -> None:
    def gone() -> None:
        left = [item["metadata"]["name"] for item in kube.items("jobs,pods", refused.namespace)]
        if left:
            raise NotYet(f"left: {left}")

    refused.waiter.until("the Job and its pod are gone", gone, deadline_seconds=60.0)


def test_an_edit_to_another_layout_that_cannot_work_is_refused_by_the_webhook(refused: Deployment, kube: Kube) -> None:
    change: dict[str, Any] = {"spec": {"parallelism": {"tensor": 4}}}
    with pytest.raises(KubectlError, match=r"tensor: is 4.*num_attention_heads 9"):
        kube.patch(CRD_KIND, refused.name, refused.namespace, change)


def test_a_layout_that_works_then_runs_and_is_reported(refused: Deployment, kube: Kube) -> None:
    kube.patch(CRD_KIND, refused.name, refused.namespace, {"spec": {"parallelism": {"tensor": 1}}})
    status = refused.ready()["status"]
    valid = condition(refused.get(), "LayoutValid")
    assert valid is not None
    assert (valid["status"], valid["reason"]) == ("True", "LayoutReported")
    assert status["layout"]["reported"] == {"worldSize": 1, "tensor": 1, "pipeline": 1, "data": 1, "expert": False}
    assert EXPECTED in ask(refused).text


def test_a_model_that_is_not_there_is_told_in_the_jobs_last_words(apply: Apply, remove: Remove) -> None:
    absent = apply("absent", model={"uri": "file:///models/absent"})

    def unreadable() -> Manifest:
        ready = condition(absent.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable":
            raise NotYet(f"Ready: {ready}")
        return ready

    told = absent.waiter.until("the Job's last words", unreadable, deadline_seconds=READ_SECONDS)
    assert "/models/absent" in told["message"]
    assert "exit code 2" in told["message"]
    assert not any(entry.startswith("StatefulSet/") for entry in absent.children())
    remove(absent)


def test_more_gpus_than_any_node_has_are_accepted_and_told(apply: Apply, remove: Remove) -> None:
    """Pools scale from zero: what does not fit now may fit tomorrow."""
    hungry = apply("hungry", runtime={"device": "cuda"})

    def told() -> Manifest:
        limited = condition(hungry.get(), "ScalingLimited")
        if limited is None or limited["reason"] != "TooFewGPUsPerNode":
            raise NotYet(f"ScalingLimited: {limited}")
        return limited

    limited = hungry.waiter.until("ScalingLimited says so", told, deadline_seconds=READ_SECONDS)
    assert limited["status"] == "True"
    assert "asks for 1 GPU" in limited["message"]
    assert "no node has any" in limited["message"]
    remove(hungry)
