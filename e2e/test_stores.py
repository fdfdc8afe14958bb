"""Stories: a model of a bucket and one of a registry are served, by accounts that only the engine's pods see.

The bucket is moto's (`tests/engine/fakes/bucket_server.py`), which cuts the weights in mid-file; the registry is
Debian's docker-registry. Both run on this machine, over the real model (`harness/stores.py` says how pods reach them).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_server import KEYS, BucketServer
from cluster import model
from conftest import Apply, Remove
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
LOST_BYTES = 20_000_000  # of what came before a cut, what the client had not handed over yet
READY_SECONDS = 300.0  # the model is read, downloaded and loaded
REFUSED_SECONDS = 90.0
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
"""The sample's, with room for the files that are being written."""


@pytest.fixture(scope="module")
def address(target: Target, kube: Kube) -> str:
    """Where stores on this machine are reached from pods."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: pods of another machine's cluster do not reach a store on this one")
    return own_address(kube)


@pytest.fixture(scope="module")
def bucket(address: str, kube: Kube, namespace: str) -> Iterator[BucketServer]:
    """The store with the model in it, and its keys in the namespace."""
    keys = {name: text for name, text in KEYS.items() if name != "AWS_DEFAULT_REGION"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket-keys"}, "stringData": keys}
    kube.apply(secret, namespace=namespace)
    with BucketServer(address).running() as store:
        store.client.create_bucket(Bucket=BUCKET)
        store.put(BUCKET, PREFIX, model.ensure())
        yield store


@pytest.fixture(scope="module")
def registry(address: str, kube: Kube, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """One that asks for an account, which a Secret of the namespace has."""
    with docker_registry(address, tmp_path_factory.mktemp("registry")) as store:
        kube.apply(store.pull_secret("registry-account"), namespace=namespace)
        yield store


def _of_bucket(store: BucketServer, prefix: str = PREFIX) -> Manifest:
    access = {"endpoint": store.url, "region": KEYS["AWS_DEFAULT_REGION"], "credentialsSecret": "bucket-keys"}
    return {"uri": f"s3://{BUCKET}/{prefix}", "s3": access}


def _refused(deployment: Deployment, *words: str) -> None:
    """Status must say so, in these words."""

    def said() -> None:
        ready = condition(deployment.get(), "Ready")
        if ready is None or ready["reason"] != "ModelUnreadable" or not all(word in ready["message"] for word in words):
            raise NotYet(f"Ready: {ready}")

    deployment.waiter.until(f"status says {words}", said, deadline_seconds=REFUSED_SECONDS)


def _told(kube: Kube, namespace: str, deployment: Deployment) -> dict[str, str]:
    """Events by their reason."""
    return {event["reason"]: event.get("message", "") for event in kube.events(namespace, deployment.name)}


def test_a_model_of_a_bucket_is_served_through_a_cut_by_keys_of_a_secret(
    apply: Apply, remove: Remove, bucket: BucketServer, kube: Kube, namespace: str
) -> None:
    bucket.faults.cuts[WEIGHTS] = [CUT_BYTES]
    goes_on = bucket.faults.held[WEIGHTS] = threading.Event()
    deployment = apply("from-bucket", model=_of_bucket(bucket), template=TEMPLATE)

    def is_told() -> None:
        if "DownloadStarted" not in (told := _told(kube, namespace, deployment)):
            raise NotYet(f"Events: {sorted(told)}")

    deployment.waiter.until("an Event tells of the download", is_told, deadline_seconds=READY_SECONDS)
    goes_on.set()  # however quick a store is, its download has been seen by then
    deployment.ready(deadline_seconds=READY_SECONDS)
    assert EXPECTED in ask(deployment).text
    pin = deployment.status()["modelRevision"]
    assert re.fullmatch("[0-9a-f]{64}", pin)
    assert deployment.pod()["spec"]["containers"][0]["args"][1] == f"s3://{BUCKET}/{PREFIX}@{pin}"
    told = _told(kube, namespace, deployment)
    assert pin in told.get("DownloadStarted", ""), told
    assert ": Downloaded " in told["Downloaded"], "what came, in what time"
    assert all(one.is_signed for one in bucket.asked if BUCKET in one.path), "somebody asked without the Secret's keys"
    assert bucket.faults.cuts[WEIGHTS] == [], "the download was never cut"
    firsts = [int(one.range.removeprefix("bytes=").split("-")[0]) for one in bucket.asked_for(WEIGHTS) if one.range]
    assert any(first > CUT_BYTES - LOST_BYTES for first in firsts), "what had come before the cut was fetched again"
    remove(deployment)


def test_a_prefix_without_a_model_is_said_in_status(apply: Apply, remove: Remove, bucket: BucketServer) -> None:
    deployment = apply("no-objects", model=_of_bucket(bucket, "llms/smollm3"))
    _refused(deployment, BUCKET, "llms/smollm3")
    remove(deployment)


def test_a_model_of_a_registry_is_served_by_the_account_of_a_secret(
    apply: Apply, remove: Remove, registry: Registry
) -> None:
    digest = registry.push(REPOSITORY, TAG, Path(model.ensure()))
    place = f"oci://{registry.host}/{REPOSITORY}"
    access = {"pullSecret": "registry-account", "plainHttp": True}
    deployment = apply("from-registry", model={"uri": f"{place}:{TAG}", "oci": access}, template=TEMPLATE)
    deployment.ready(deadline_seconds=READY_SECONDS)
    assert EXPECTED in ask(deployment).text
    assert deployment.status()["modelRevision"] == digest
    assert digest in deployment.pod()["spec"]["containers"][0]["args"][1]
    remove(deployment)


def test_a_registry_that_asks_for_an_account_is_said_in_status(
    apply: Apply, remove: Remove, registry: Registry
) -> None:
    uri = f"oci://{registry.host}/{REPOSITORY}:{TAG}"
    deployment = apply("no-account", model={"uri": uri, "oci": {"plainHttp": True}})
    _refused(deployment, registry.host)
    remove(deployment)
