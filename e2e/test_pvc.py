"""Story: a model on a PersistentVolumeClaim is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask
from harness.install import Installation
from harness.kube import Kube, Manifest, condition
from harness.target import Target
from harness.wait import NotYet, Waiter

CLAIM = "models"
VOLUME = "trimtab-e2e-pvc"
SIZE = "2Gi"
FOLDER = "SmolLM2-135M-Instruct"
COPY_SECONDS = 120.0


def _volume() -> Manifest:
    """A folder of the node, with no class, so that no provisioner is needed."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": VOLUME},
        "spec": {
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/var/{VOLUME}", "type": "DirectoryOrCreate"},
        },
    }


def _claim() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "volumeName": VOLUME,
            "resources": {"requests": {"storage": SIZE}},
        },
    }


def _pod(name: str, image: str, command: list[str]) -> Manifest:
    """A pod that runs one command as root on the claim."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 0},
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "command": command,
                    "volumeMounts": [{"name": "claim", "mountPath": "/claim"}],
                }
            ],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }


def _run_pod(kube: Kube, namespace: str, pod: Manifest) -> None:
    name = pod["metadata"]["name"]
    kube.apply(pod, namespace=namespace)

    def ended() -> None:
        phase = ((kube.get("pod", name, namespace) or {}).get("status") or {}).get("phase")
        assert phase != "Failed", kube.logs(namespace, name)
        if phase != "Succeeded":
            raise NotYet(f"pod {name} is {phase}")

    Waiter(kube, namespace).until(f"pod {name} has ended", ended, deadline_seconds=COPY_SECONDS)
    kube.delete("pod", name, namespace, wait=True)


@pytest.fixture(scope="module")
def claim(target: Target, installation: Installation, kube: Kube, namespace: str) -> Iterator[str]:
    """A claim with the model in a folder; the files are removed from the node afterwards."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: this story writes to a folder of the node, so it runs on a cluster of its own")
    kube.delete("persistentvolume", VOLUME)
    kube.apply(_volume())
    kube.apply(_claim(), namespace=namespace)
    copy = f"mkdir -p /claim/llm && cp -r /models/{FOLDER} /claim/llm/ && chmod -R a+rX /claim/llm"
    _run_pod(kube, namespace, _pod("fill", installation.images.model, ["sh", "-c", copy]))
    yield CLAIM
    _run_pod(kube, namespace, _pod("empty", installation.images.model, ["sh", "-c", "rm -rf /claim/llm"]))
    kube.delete("persistentvolume", VOLUME)


def test_a_model_on_a_claim_is_served(apply: Apply, remove: Remove, claim: str) -> None:
    deployment = apply("from-claim", model={"uri": f"pvc://{claim}/llm/{FOLDER}"})
    deployment.ready()
    mounts = deployment.pod()["spec"]["containers"][0]["volumeMounts"]
    assert [mount["readOnly"] for mount in mounts if mount["name"] == "model"] == [True]
    assert EXPECTED in ask(deployment).text
    remove(deployment)


def test_a_missing_claim_is_said_in_status(apply: Apply, remove: Remove) -> None:
    deployment = apply("no-claim", model={"uri": "pvc://nobody-made-this/llm"})

    def said() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or "nobody-made-this" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status names the missing claim", said, deadline_seconds=45.0)
    remove(deployment)


def test_a_missing_model_is_said_in_status(apply: Apply, remove: Remove, claim: str) -> None:
    deployment = apply("no-model", model={"uri": f"pvc://{claim}/llm/absent"})

    def said() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or "absent" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status repeats the engine's own words", said, deadline_seconds=90.0)
    remove(deployment)
