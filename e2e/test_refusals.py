"""Story: what cannot be carried out is refused with its reason: by the webhook, and without it by the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Apply
from harness.deployment import sample
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, KubectlError, condition, is_true
from harness.wait import NotYet

NAME = "refused"
# Changes to the sample's spec, and what the refusal must say: the field, and what to do.
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("bucket", {"model": {"uri": "s3://org/model"}}, ("spec.model.uri", "s3:// is not built yet", "file:///path")),
    ("hub", {"model": {"uri": "hf://model"}}, ("spec.model.uri", "write hf://ORG/NAME")),
    ("relative-path", {"model": {"uri": "file://models/x"}}, ("spec.model.uri", "write file:///path")),
    ("dots", {"model": {"uri": "file:///models/../etc"}}, ("spec.model.uri", "'..'")),
    ("claim", {"model": {"uri": "pvc://Not_A_Claim/x"}}, ("spec.model.uri", "no name of a claim")),
    ("revision", {"model": {"revision": "main"}}, ("spec.model.revision", "models that are downloaded")),
    ("vllm", {"runtime": {"kind": "vllm"}}, ("spec.runtime.kind", "vllm is not built yet")),
    ("args", {"runtime": {"args": ["--max-num-seqs=4"]}}, ("spec.runtime.args[0]", "spec.engine.maxNumSeqs")),
    ("admin-port", {"runtime": {"args": ["--admin-port=9"]}}, ("spec.runtime.args[0]", "set by the operator")),
    ("layout", {"parallelism": {"gpusPerNode": 3}}, ("spec.parallelism.gpusPerNode", "is 3", "has 1 rank")),
    ("expert", {"parallelism": {"expert": True}}, ("spec.parallelism.expert", "set it to false")),
    ("swap", {"engine": {"preemptionMode": "swap"}}, ("spec.engine.swapSpace", "preemptionMode swap")),
    ("quantization", {"engine": {"quantization": "awq"}}, ("spec.engine.quantization", "only fp8 is built")),
    ("eagle", {"engine": {"speculative": {"method": "eagle"}}}, ("spec.engine.speculative.method", "not built yet")),
    ("step", {"engine": {"maxNumBatchedTokens": 8, "maxNumSeqs": 16}}, ("must be at least maxNumSeqs (16)",)),
    ("start", {"engine": {"gpuMemoryUtilization": "0.99"}}, ("spec.engine.gpuMemoryUtilization", "outside")),
    (
        "bounds",
        {"tuning": {"bounds": {"maxNumSeqs": {"min": 40, "max": 20}}}},
        ("spec.tuning.bounds.maxNumSeqs", "min 40 exceeds max 20"),
    ),
    ("canary", {"tuning": {"restartClass": "Canary"}}, ("spec.tuning.restartClass", "set Never")),
    ("scaling", {"scaling": {"minReplicas": 4, "maxReplicas": 3}}, ("spec.scaling.minReplicas", "above maxReplicas 3")),
    ("zero", {"scaling": {"minReplicas": 0, "maxReplicas": 3}}, ("spec.scaling.minReplicas", "nothing is measured")),
    ("objectives", {"objectives": {"ttft": {"target": "0s"}}}, ("spec.objectives.ttft", "above zero")),
    ("labels", {"metrics": {"labels": {"engine": "0"}}}, ("spec.metrics.labels", "a label that engines give")),
    ("container", {"template": {"spec": {"containers": [{"name": "other"}]}}}, ("spec.template", "main")),
]
# Refused by the CRD's schema, whether or not anything of ours runs.
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("type", {"replicas": "two"}, "spec.replicas"),
    ("negative", {"replicas": -1}, "spec.replicas"),
    ("enum", {"tuning": {"mode": "Sometimes"}}, "spec.tuning.mode"),
    ("fraction", {"engine": {"gpuMemoryUtilization": "1.5"}}, "spec.engine.gpuMemoryUtilization"),
    ("scheme", {"model": {"uri": "ftp://x"}}, "spec.model.uri"),
]
WITHOUT_WEBHOOK = ("bucket", "layout", "start", "args")  # none that rules of the CRD refuse on a current Kubernetes


def _refusal(installation: Installation, namespace: str, changes: dict[str, Any]) -> str:
    manifest = sample(NAME, image=installation.images.model, **changes)
    with pytest.raises(KubectlError) as refused:
        installation.kube.apply(manifest, namespace=namespace)
    return refused.value.stderr


@pytest.mark.parametrize(("changes", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_carried_out_is_refused_with_the_reason(
    installation: Installation, namespace: str, changes: dict[str, Any], says: tuple[str, ...]
) -> None:
    """By the webhook, or by the CRD's own rules where Kubernetes knows them: in the same words."""
    message = _refusal(installation, namespace, changes)
    assert "denied the request" in message or f'{NAME}" is invalid' in message, message
    for part in says:
        assert part in message, message


@pytest.mark.parametrize(("changes", "field"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_the_schema_refuses_what_is_malformed(
    installation: Installation, namespace: str, changes: dict[str, Any], field: str
) -> None:
    assert field in _refusal(installation, namespace, changes)


def test_an_edit_that_cannot_be_carried_out_is_refused_too(apply: Apply, kube: Kube, namespace: str) -> None:
    deployment = apply(replicas=0)
    with pytest.raises(KubectlError, match=r"spec\.parallelism\.gpusPerNode"):
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"parallelism": {"gpusPerNode": 3}}})
    assert deployment.get()["metadata"]["generation"] == 1
    kube.delete(CRD_KIND, deployment.name, namespace)


@pytest.fixture(scope="module")
def without_webhook(installation: Installation) -> Iterator[None]:
    installation.install(**{"webhook.enabled": "false"})
    yield
    installation.install()


@pytest.mark.usefixtures("without_webhook")
@pytest.mark.parametrize("case", WITHOUT_WEBHOOK)
def test_without_the_webhook_the_loop_says_the_same_and_creates_no_pod(
    apply: Apply, kube: Kube, namespace: str, case: str
) -> None:
    changes, says = next(row[1:] for row in REFUSED if row[0] == case)
    deployment = apply(f"{NAME}-{case}", **changes)

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


@pytest.mark.usefixtures("without_webhook")
def test_a_running_resource_whose_edit_is_refused_keeps_serving(apply: Apply, kube: Kube, namespace: str) -> None:
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
    kube.delete(CRD_KIND, deployment.name, namespace)
    deployment.gone()
