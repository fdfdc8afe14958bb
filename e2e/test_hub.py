"""Story: a model of the hub is served by its name, through a cut, and a second replica starts from the shared cache.

The hub is a server of the same protocol (`harness/hub_server.py`) in a pod of the cluster, over the real model.
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
LOST_BYTES = 20_000_000  # of what came before a cut, what the HTTP client had not handed over yet
CHUNK_SECONDS = 0.005  # before each 64 KiB: a download of 40 s at least, that somebody can look at
HUB_SECONDS = 180.0  # its pod, and the digests of all files
FIRST_SECONDS = 480.0  # the model is read, downloaded at that pace, and loaded
ENGINE_USER = 10001


def _hub(image: str) -> list[Manifest]:
    """The hub's pod, Service and script. It is Ready once it answers what huggingface_hub asks first."""
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
    """Where the hub answers: an address, as not every cluster of the stories has names."""
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
    """A claim that the engines may write; its files are removed from the node afterwards."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: this story writes to a folder of a node, so it runs on a cluster of its own")
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
    """The model by its name, with the story's hub for a mirror."""
    deployment = apply(
        "from-hub",
        model={"uri": f"hf://{REPO}", "cache": {"claimName": cache}},
        template=_asking(hub),
    )
    deployment.ready(deadline_seconds=FIRST_SECONDS)
    return deployment


def _asking(hub: str) -> Manifest:
    """The sample's template, with the environment that names the mirror."""
    resources = {"requests": {"cpu": "500m", "memory": "1500Mi"}, "limits": {"memory": "1500Mi"}}
    environment = [{"name": "HF_ENDPOINT", "value": hub}]
    return {"spec": {"containers": [{"name": "main", "resources": resources, "env": environment}]}}


def _ranges(kube: Kube, namespace: str) -> list[str]:
    """What was asked of the weights, in order: `first-` of a range, or nothing for the whole."""
    log = kube.logs(namespace, "hub", tail=-1)
    return re.findall(rf"GET /large/\S+/{re.escape(WEIGHTS)} (?:bytes=(\d+)-\d*)?", log)


def test_a_model_is_served_by_its_name_through_a_cut(served: Deployment, kube: Kube, namespace: str) -> None:
    assert EXPECTED in ask(served).text
    whole, *later = _ranges(kube, namespace)
    assert whole == ""
    assert later, "the download was never cut"
    assert int(later[0]) > CUT_BYTES - LOST_BYTES, "what had come before the cut was fetched again"


def test_its_commit_and_its_download_are_told(served: Deployment, kube: Kube, namespace: str) -> None:
    commit = served.status()["modelRevision"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert served.pod()["spec"]["containers"][0]["args"][1] == f"hf://{REPO}@{commit}"
    told = {event["reason"]: event.get("message", "") for event in kube.events(namespace, served.name)}
    assert commit in told.get("DownloadStarted", ""), told
    assert ": Downloaded " in told["Downloaded"], "what came, in what time"


def test_a_second_replica_starts_from_the_cache(served: Deployment, kube: Kube, namespace: str) -> None:
    before = _ranges(kube, namespace)
    kube.run("scale", CRD_KIND, served.name, "--replicas=2", "-n", namespace)

    def both() -> None:
        status = served.status()
        if status.get("readyReplicas") != 2:
            raise NotYet(f"{status.get('readyReplicas')} of 2 replicas are ready: {status.get('groups')}")

    served.waiter.until("both replicas are Ready", both, deadline_seconds=240.0)
    assert _ranges(kube, namespace) == before
    kube.delete("infd", served.name, namespace)
    served.gone()


def test_a_misspelt_name_is_said_in_status(apply: Apply, hub: str, kube: Kube, namespace: str) -> None:
    deployment = apply("misspelt", model={"uri": "hf://HuggingFaceTB/SmolLM3-135M"}, template=_asking(hub))

    def said() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or "no such model" not in ready["message"]:
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until("status says that there is no such model", said, deadline_seconds=90.0)
    kube.delete("infd", deployment.name, namespace)
    deployment.gone()
