"""Scenarios: models from S3 and from an OCI registry are served with credentials that only engine pods see.

The bucket is moto's (`tests/engine/fakes/bucket_server.py`), which interrupts the download of the weights; the
registry is Debian's docker-registry. Both run on this machine and hold the real model (see `harness/stores.py`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_server import KEYS, BucketServer
from conftest import Apply, Remove
from devtools import model
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.kube import Kube, Manifest, condition
from harness.stores import Registry, docker_registry, own_address
from harness.target import Target
from harness.wait import NotYet

BUCKET, PREFIX = "models", "llms/smollm2"
REPOSITORY, TAG = "llms/smollm2", "v1"
WEIGHTS = "model.safetensors"
CUT_BYTES = 100_000_000  # of 538 MB
LOST_BYTES = 20_000_000  # received before the interruption, but not yet handed over by the client
READY_SECONDS = 300.0  # the model is read, downloaded and loaded
REJECTED_SECONDS = 90.0
TEMPLATE: Manifest = {
    "spec": {
        "containers": [
            {
                "name": "main",
                "resources": {"requests": {"cpu": "500m", "memory": "1500Mi"}, "limits": {"memory": "1500Mi"}},
            }
        ]
    }
}
"""The sample's pod template, with memory for the files being downloaded."""


@pytest.fixture(scope="module")
def address(target: Target, kube: Kube) -> str:
    """Return the address at which pods reach stores on this machine."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: pods of another machine's cluster cannot reach a store on this one")
    return own_address(kube)


@pytest.fixture(scope="module")
def bucket(address: str, kube: Kube, namespace: str) -> Iterator[BucketServer]:
    """Start the store with the model in it, and create a Secret with its keys."""
    keys = {name: text for name, text in KEYS.items() if name != "AWS_DEFAULT_REGION"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket-keys"}, "stringData": keys}
    kube.apply(secret, namespace=namespace)
    with BucketServer(address).running() as store:
        store.client.create_bucket(Bucket=BUCKET)
        store.put(BUCKET, PREFIX, model.ensure())
        yield store


@pytest.fixture(scope="module")
def registry(address: str, kube: Kube, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Start a registry that requires credentials, and create a Secret with them."""
    with docker_registry(address, tmp_path_factory.mktemp("registry")) as store:
        kube.apply(store.pull_secret("registry-account"), namespace=namespace)
        yield store


def _bucket_model(store: BucketServer, prefix: str = PREFIX) -> Manifest:
    access = {"endpoint": store.url, "region": KEYS["AWS_DEFAULT_REGION"], "credentialsSecret": "bucket-keys"}
    return {"uri": f"s3://{BUCKET}/{prefix}", "s3": access}


def _await_rejection(deployment: Deployment, *words: str) -> None:
    """Wait until Ready is False with reason ModelUnreadable and a message that contains all `words`."""

    def is_reported() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or not all(word in ready["message"] for word in words):
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until(f"status mentions {words}", is_reported, deadline_seconds=REJECTED_SECONDS)


def _events_by_reason(kube: Kube, namespace: str, deployment: Deployment) -> dict[str, str]:
    """Return the messages of Events by reason."""
    return {event["reason"]: event.get("message", "") for event in kube.events(namespace, deployment.name)}


def test_interrupted_s3_download_with_secret_credentials_resumes(
    apply: Apply, remove: Remove, bucket: BucketServer, kube: Kube, namespace: str
) -> None:
    bucket.faults.cuts[WEIGHTS] = [CUT_BYTES]
    resume = bucket.faults.held[WEIGHTS] = threading.Event()
    deployment = apply("from-bucket", model=_bucket_model(bucket), template=TEMPLATE)

    def is_emitted() -> None:
        if "DownloadStarted" not in (events := _events_by_reason(kube, namespace, deployment)):
            raise NotYet(f"Events: {sorted(events)}")

    deployment.waiter.until("an Event DownloadStarted", is_emitted, deadline_seconds=READY_SECONDS)
    resume.set()  # held until here, so that the download is observed even from a fast store
    deployment.ready(deadline_seconds=READY_SECONDS)
    assert EXPECTED in ask(deployment).text
    pin = deployment.status()["modelRevision"]
    assert re.fullmatch("[0-9a-f]{64}", pin)
    assert deployment.pod()["spec"]["containers"][0]["args"][1] == f"s3://{BUCKET}/{PREFIX}@{pin}"
    events = _events_by_reason(kube, namespace, deployment)
    assert pin in events.get("DownloadStarted", ""), events
    assert ": Downloaded " in events["Downloaded"], "the size and the duration are missing"
    assert all(one.is_signed for one in bucket.asked if BUCKET in one.path), (
        "a request was not signed with the Secret's keys"
    )
    assert bucket.faults.cuts[WEIGHTS] == [], "the download was never interrupted"
    firsts = [int(one.range.removeprefix("bytes=").split("-")[0]) for one in bucket.asked_for(WEIGHTS) if one.range]
    assert any(first > CUT_BYTES - LOST_BYTES for first in firsts), (
        "data received before the interruption was downloaded again"
    )
    remove(deployment)


def test_empty_s3_prefix_is_reported_in_status(apply: Apply, remove: Remove, bucket: BucketServer) -> None:
    deployment = apply("no-objects", model=_bucket_model(bucket, "llms/smollm3"))
    _await_rejection(deployment, BUCKET, "llms/smollm3")
    remove(deployment)


def test_oci_model_with_pull_secret_is_served(apply: Apply, remove: Remove, registry: Registry) -> None:
    digest = registry.push(REPOSITORY, TAG, Path(model.ensure()))
    place = f"oci://{registry.host}/{REPOSITORY}"
    access = {"pullSecret": "registry-account", "plainHttp": True}
    deployment = apply("from-registry", model={"uri": f"{place}:{TAG}", "oci": access}, template=TEMPLATE)
    deployment.ready(deadline_seconds=READY_SECONDS)
    assert EXPECTED in ask(deployment).text
    assert deployment.status()["modelRevision"] == digest
    assert digest in deployment.pod()["spec"]["containers"][0]["args"][1]
    remove(deployment)


def test_missing_registry_credentials_are_reported_in_status(apply: Apply, remove: Remove, registry: Registry) -> None:
    uri = f"oci://{registry.host}/{REPOSITORY}:{TAG}"
    deployment = apply("no-account", model={"uri": uri, "oci": {"plainHttp": True}})
    _await_rejection(deployment, registry.host)
    remove(deployment)
