"""Scenario: an hf:// model is served after an interrupted download, and a second replica uses the shared cache.

The hub is a server of the same protocol (`harness/hub_server.py`) in a pod of the cluster, with the real model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.claims import MOUNT, FolderClaim
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, Manifest, condition
from harness.nodes import pod_nodes
from harness.target import Target
from harness.wait import NotYet, Waiter

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = f"/models/{REPO.rsplit('/', 1)[-1]}"
WEIGHTS = "model.safetensors"
PORT = 8080
CUT_BYTES = 100_000_000  # of 538 MB
LOST_BYTES = 20_000_000  # received before the interruption, but not yet handed over by the HTTP client
CHUNK_SECONDS = 0.005  # before each 64 KiB: the download takes at least 40 s, so that it can be observed
HUB_SECONDS = 180.0  # its pod, and the digests of all files
FIRST_SECONDS = 480.0  # the model is read, downloaded at that rate, and loaded
ENGINE_USER = 10001


def _hub(image: str) -> list[Manifest]:
    """Return the hub's ConfigMap, Service and pod. The probe is the first request that huggingface_hub sends."""
    labels = {"app": "hub"}
    script = Path(harness.__file__).parent.joinpath("hub_server.py").read_text(encoding="utf-8")
    command = ["python3", "/hub/hub_server.py", f"{REPO}={FOLDER}", f"--port={PORT}"]
    command += [f"--cut={WEIGHTS}={CUT_BYTES}", f"--chunk-seconds={CHUNK_SECONDS}"]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hub"},
            "data": {"hub_server.py": script},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": labels, "ports": [{"port": PORT, "protocol": "TCP"}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "hub", "labels": labels},
            "spec": {
                "containers": [
                    {
                        "name": "hub",
                        "image": image,
                        "command": command,
                        "readinessProbe": {
                            "httpGet": {"path": f"/api/models/{REPO}", "port": PORT},
                            "periodSeconds": 2,
                            "timeoutSeconds": 10,
                        },
                        "volumeMounts": [{"name": "hub", "mountPath": "/hub"}],
                    }
                ],
                "volumes": [{"name": "hub", "configMap": {"name": "hub"}}],
            },
        },
    ]


@pytest.fixture(scope="module")
def hub(installation: Installation, kube: Kube, namespace: str) -> str:
    """Return the hub's URL, with an IP address since not every test cluster has DNS."""
    kube.apply(*_hub(installation.images.model), namespace=namespace)

    def answers() -> None:
        pod = kube.get("pod", "hub", namespace) or {}
        ready = condition(pod, "Ready") if pod else None
        if ready is None or ready["status"] != "True":
            raise NotYet(f"the hub's pod: {ready}")

    Waiter(kube, namespace).until("the hub answers", answers, deadline_seconds=HUB_SECONDS)
    service = kube.get("service", "hub", namespace)
    assert service is not None
    return f"http://{service['spec']['clusterIP']}:{PORT}"


@pytest.fixture(scope="module")
def cache(target: Target, installation: Installation, kube: Kube, namespace: str) -> Iterator[str]:
    """Return the name of a claim that engines can write to; its files are removed from the node afterwards."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: this scenario writes to a node's folder, so it needs the cluster of e2e/cluster")
    folder = FolderClaim("model-cache", "trimtab-e2e-hub", "2Gi", pod_nodes(kube)[0], "ReadWriteMany")
    folder.make(kube, namespace)
    image = installation.images.model
    give = f"chown {ENGINE_USER}:{ENGINE_USER} {MOUNT} && rm -rf {MOUNT}/*"
    folder.run(kube, namespace, name="give", image=image, script=give)
    yield folder.name
    folder.run(kube, namespace, name="empty", image=image, script=f"rm -rf {MOUNT}/*")
    folder.delete_volume(kube)


@pytest.fixture(scope="module")
def served(apply: Apply, hub: str, cache: str) -> Deployment:
    """Return the model served by its hub name, with the test hub as the mirror."""
    deployment = apply(
        "from-hub",
        model={"uri": f"hf://{REPO}", "cache": {"claimName": cache}},
        template=_template_with_mirror(hub),
    )
    deployment.ready(deadline_seconds=FIRST_SECONDS)
    return deployment


def _template_with_mirror(hub: str) -> Manifest:
    """Return the sample's template with HF_ENDPOINT set to the mirror."""
    resources = {"requests": {"cpu": "500m", "memory": "1500Mi"}, "limits": {"memory": "1500Mi"}}
    environment = [{"name": "HF_ENDPOINT", "value": hub}]
    return {"spec": {"containers": [{"name": "main", "resources": resources, "env": environment}]}}


def _ranges(kube: Kube, namespace: str) -> list[str]:
    """Return the start offsets of all requests for the weights, in order; empty for a request without a range."""
    log = kube.logs(namespace, "hub", tail=-1)
    return re.findall(rf"GET /large/\S+/{re.escape(WEIGHTS)} (?:bytes=(\d+)-\d*)?", log)


def test_interrupted_hub_download_resumes(served: Deployment, kube: Kube, namespace: str) -> None:
    assert EXPECTED in ask(served).text
    whole, *later = _ranges(kube, namespace)
    assert whole == ""
    assert later, "the download was never interrupted"
    assert int(later[0]) > CUT_BYTES - LOST_BYTES, "data received before the interruption was downloaded again"


def test_commit_and_download_are_reported(served: Deployment, kube: Kube, namespace: str) -> None:
    commit = served.status()["modelRevision"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert served.pod()["spec"]["containers"][0]["args"][1] == f"hf://{REPO}@{commit}"
    events = {event["reason"]: event.get("message", "") for event in kube.events(namespace, served.name)}
    assert commit in events.get("DownloadStarted", ""), events
    assert ": Downloaded " in events["Downloaded"], "the size and the duration are missing"


def test_second_replica_starts_from_shared_cache(served: Deployment, kube: Kube, namespace: str) -> None:
    before = _ranges(kube, namespace)
    kube.run("scale", CRD_KIND, served.name, "--replicas=2", "-n", namespace)

    def both() -> None:
        status = served.status()
        if status.get("readyReplicas") != 2:
            raise NotYet(f"{status.get('readyReplicas')} of 2 replicas are ready: {status.get('groups')}")

    served.waiter.until("both replicas are Ready", both, deadline_seconds=240.0)
    assert _ranges(kube, namespace) == before
    kube.delete("infd", served.name, namespace)
    served.await_deletion()


def test_unknown_hub_model_is_reported_in_status(apply: Apply, hub: str, kube: Kube, namespace: str) -> None:
    deployment = apply(
        "misspelt", model={"uri": "hf://HuggingFaceTB/SmolLM3-135M"}, template=_template_with_mirror(hub)
    )

    def is_reported() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or "no such model" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status reports that there is no such model", is_reported, deadline_seconds=90.0)
    kube.delete("infd", deployment.name, namespace)
    deployment.await_deletion()
