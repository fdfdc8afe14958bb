"""Scenario: a model on a PersistentVolumeClaim is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask
from harness.claims import MOUNT, FolderClaim
from harness.install import Installation
from harness.kube import Kube, condition
from harness.nodes import pod_nodes
from harness.target import Target
from harness.wait import NotYet

FOLDER = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def claim(target: Target, installation: Installation, kube: Kube, namespace: str) -> Iterator[str]:
    """Return the name of a claim with the model in a folder; its files are removed from the node afterwards."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: this scenario writes to a node's folder, so it needs the cluster of e2e/cluster")
    folder, image = FolderClaim("models", "trimtab-e2e-pvc", "2Gi", pod_nodes(kube)[-1]), installation.images.model
    folder.make(kube, namespace)
    copy = f"mkdir -p {MOUNT}/llm && cp -r /models/{FOLDER} {MOUNT}/llm/ && chmod -R a+rX {MOUNT}/llm"
    folder.run(kube, namespace, name="fill", image=image, script=copy)
    yield folder.name
    folder.run(kube, namespace, name="empty", image=image, script=f"rm -rf {MOUNT}/llm")
    folder.delete_volume(kube)


def test_pvc_model_is_served(apply: Apply, remove: Remove, claim: str) -> None:
    deployment = apply("from-claim", model={"uri": f"pvc://{claim}/llm/{FOLDER}"})
    deployment.ready()
    mounts = deployment.pod()["spec"]["containers"][0]["volumeMounts"]
    assert [mount["readOnly"] for mount in mounts if mount["name"] == "model"] == [True]
    assert EXPECTED in ask(deployment).text
    remove(deployment)


def test_missing_claim_is_reported_in_status(apply: Apply, remove: Remove) -> None:
    deployment = apply("no-claim", model={"uri": "pvc://missing-claim/llm"})

    def is_reported() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or "missing-claim" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status names the missing claim", is_reported, deadline_seconds=45.0)
    remove(deployment)


def test_missing_model_on_claim_is_reported_in_status(apply: Apply, remove: Remove, claim: str) -> None:
    deployment = apply("no-model", model={"uri": f"pvc://{claim}/llm/absent"})

    def is_reported() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or "absent" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status contains the engine's error", is_reported, deadline_seconds=90.0)
    remove(deployment)
