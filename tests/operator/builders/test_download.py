"""Volumes, flags and environment of pods with a downloaded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.engine_args import engine_args, model_path
from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.stateful_set import rendered
from trimtab_operator.resource.spec import InferenceDeployment

COMMIT = "c" * 40
HASHES = TokenHashes("h", "i")


def a_deployment(uri: str = "hf://Qwen/Qwen3-8B", *, template: Any = None, **model: Any) -> InferenceDeployment:
    spec: dict[str, Any] = {"model": {"uri": uri, **model}, "runtime": {"device": "cpu", "image": "engine:1"}}
    if template is not None:
        spec["template"] = template
    return InferenceDeployment.parse({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec})


def pinned(deployment: InferenceDeployment) -> InferenceDeployment:
    return replace(deployment, commit=COMMIT)


def pod_of(deployment: InferenceDeployment) -> dict[str, Any]:
    found: dict[str, Any] = rendered(deployment, token_hashes=HASHES).template["spec"]
    return found


def job_pod_of(deployment: InferenceDeployment) -> dict[str, Any]:
    found: dict[str, Any] = facts_job(deployment, {})["spec"]["template"]["spec"]
    return found


def volume(pod: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next(({k: v for k, v in one.items() if k != "name"} for one in pod["volumes"] if one["name"] == name), None)


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("uri", "revision", "before"),
    [
        ("hf://Qwen/Qwen3-8B", None, "hf://Qwen/Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B@v1", None, "hf://Qwen/Qwen3-8B@v1"),
        ("hf://Qwen/Qwen3-8B", "v1", "hf://Qwen/Qwen3-8B@v1"),
    ],
)
def test_replicas_are_told_the_commit_once_it_is_known(uri: str, revision: str | None, before: str) -> None:
    deployment = a_deployment(uri, **({} if revision is None else {"revision": revision}))
    assert model_path(deployment) == before
    assert model_path(pinned(deployment)) == f"hf://Qwen/Qwen3-8B@{COMMIT}"


def test_model_revision_is_read_from_template() -> None:
    assert rendered(pinned(a_deployment()), token_hashes=HASHES).model_revision == COMMIT
    assert rendered(a_deployment("file:///m/x"), token_hashes=HASHES).model_revision is None


def test_clients_call_it_by_its_name_without_organisation_and_revision() -> None:
    assert "--served-model-name=Qwen3-8B" in engine_args(a_deployment("hf://Qwen/Qwen3-8B@v1"), token_hashes=HASHES)


def test_cache_without_claim_is_bounded_empty_dir() -> None:
    pod = pod_of(a_deployment())
    assert volume(pod, "trimtab-model-cache") == {"emptyDir": {"sizeLimit": "200Gi"}}
    assert {"--download-dir=/models/cache", "--download-dir-size=200Gi"} <= set(pod["containers"][0]["args"])
    assert volume(pod_of(a_deployment(cache={"size": "9Gi"})), "trimtab-model-cache") == {
        "emptyDir": {"sizeLimit": "9Gi"}
    }
    assert "fsGroup" not in pod["securityContext"]


def test_a_claim_is_written_by_the_engines_group_and_grows_as_its_owner_says() -> None:
    pod = pod_of(a_deployment(cache={"claimName": "models"}))
    assert volume(pod, "trimtab-model-cache") == {"persistentVolumeClaim": {"claimName": "models"}}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert not [flag for flag in pod["containers"][0]["args"] if flag.startswith("--download-dir-size")]
    bounded = pod_of(a_deployment(cache={"claimName": "models", "size": "50Gi"}))
    assert "--download-dir-size=50Gi" in bounded["containers"][0]["args"]


@pytest.mark.parametrize("of", [pod_of, job_pod_of])
def test_the_token_is_a_file_of_the_engine_and_of_the_reader(of: Any) -> None:
    pod = of(a_deployment(tokenSecretRef={"name": "hub", "key": "read"}))
    assert volume(pod, "trimtab-hub-token") == {
        "secret": {"secretName": "hub", "items": [{"key": "read", "path": "token"}]}
    }
    assert environment(pod)["HF_TOKEN_PATH"] == "/etc/trimtab/hub/token"
    assert volume(of(a_deployment()), "trimtab-hub-token") is None
    assert "HF_TOKEN_PATH" not in environment(of(a_deployment()))


@pytest.mark.parametrize(
    ("uri", "pin", "told"),
    [
        ("s3://models/llms/name/", "c" * 64, "s3://models/llms/name@" + "c" * 64),
        ("s3://models/a@b", None, "s3://models/a@b"),
        ("s3://models/name@" + "d" * 64, "d" * 64, "s3://models/name@" + "d" * 64),
        ("oci://localhost:5000/name", None, "oci://localhost:5000/name"),
        ("oci://localhost:5000/name:v1", None, "oci://localhost:5000/name:v1"),
        ("oci://localhost:5000/name:v1", f"sha256:{'d' * 64}", f"oci://localhost:5000/name@sha256:{'d' * 64}"),
    ],
)
def test_a_bucket_and_a_tag_are_pinned_as_a_branch_is(uri: str, pin: str | None, told: str) -> None:
    deployment = replace(a_deployment(uri), commit=pin)
    assert model_path(deployment) == told
    assert rendered(deployment, token_hashes=HASHES).model_revision == pin
    if uri != "s3://models/a@b":
        assert "--served-model-name=name" in engine_args(deployment, token_hashes=HASHES)


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the variables by name, with their value or valueFrom."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["containers"][0]["env"]}


@pytest.mark.parametrize("of", [pod_of, job_pod_of])
def test_the_engine_and_the_reader_are_told_how_a_bucket_is_reached(of: Any) -> None:
    reached = {"endpoint": "http://minio:9000", "region": "eu-1", "addressing": "virtual", "credentialsSecret": "keys"}
    pod = of(a_deployment("s3://models/name", s3=reached))
    found = variables(pod)
    assert found["AWS_ENDPOINT_URL"] == "http://minio:9000"
    assert found["AWS_DEFAULT_REGION"] == "eu-1"
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert found[key] == {"secretKeyRef": {"name": "keys", "key": key}}
    session = {"name": "keys", "key": "AWS_SESSION_TOKEN", "optional": True}
    assert found["AWS_SESSION_TOKEN"] == {"secretKeyRef": session}
    assert "--s3-addressing-style=virtual" in pod["containers"][0]["args"]
    bare = of(a_deployment("s3://models/name"))
    assert not [name for name in variables(bare) if name.startswith("AWS_")]
    assert not [flag for flag in bare["containers"][0]["args"] if flag.startswith("--s3")]


@pytest.mark.parametrize("of", [pod_of, job_pod_of])
def test_the_pull_secret_is_a_file_of_the_engine_and_of_the_reader(of: Any) -> None:
    pod = of(a_deployment("oci://localhost:5000/name", oci={"pullSecret": "pull", "plainHttp": True}))
    accounts = {"secretName": "pull", "items": [{"key": ".dockerconfigjson", "path": "config.json"}]}
    assert volume(pod, "trimtab-registry") == {"secret": accounts}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["trimtab-registry"]["mountPath"] == "/etc/trimtab/registry"
    assert mounts["trimtab-registry"]["readOnly"]
    flags = set(pod["containers"][0]["args"])
    assert {"--registry-auth-file=/etc/trimtab/registry/config.json", "--registry-plain-http"} <= flags
    bare = of(a_deployment("oci://localhost:5000/name"))
    assert volume(bare, "trimtab-registry") is None
    assert not [flag for flag in bare["containers"][0]["args"] if flag.startswith("--registry")]


@pytest.mark.parametrize("of", [pod_of, job_pod_of])
def test_an_image_volume_is_pulled_by_the_node_and_read_as_a_folder(of: Any) -> None:
    uri = f"oci://ghcr.io/o/name@sha256:{'d' * 64}"
    pod = of(a_deployment(uri, oci={"imageVolume": True, "folder": "/models/x"}))
    image = {"reference": uri.removeprefix("oci://"), "pullPolicy": "IfNotPresent"}
    assert volume(pod, "model") == {"image": image}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": "/models/claim", "readOnly": True}
    assert pod["containers"][0]["args"][1] == "/models/claim/models/x"
    assert volume(pod, "trimtab-model-cache") is None
    assert not [flag for flag in pod["containers"][0]["args"] if flag.startswith(("--download", "--registry"))]
    root = of(a_deployment(uri, oci={"imageVolume": True}))
    assert root["containers"][0]["args"][1] == "/models/claim"


def test_facts_job_uses_engine_service_account() -> None:
    template = {"spec": {"serviceAccountName": "reads-models"}}
    bucket, folder = (
        replace(a_deployment(uri, template=template), allowed_privileges=frozenset({"serviceAccountName"}))
        for uri in ("s3://models/name", "file:///m/x")
    )
    assert job_pod_of(bucket)["serviceAccountName"] == pod_of(bucket)["serviceAccountName"] == "reads-models"
    assert job_pod_of(folder)["serviceAccountName"] != "reads-models"


def test_facts_job_uses_engine_mirror() -> None:
    mirror = [{"name": "HF_ENDPOINT", "value": "http://mirror"}]
    template = {"spec": {"containers": [{"name": "main", "env": mirror}]}}
    assert environment(job_pod_of(a_deployment(template=template)))["HF_ENDPOINT"] == "http://mirror"
    assert environment(pod_of(a_deployment(template=template)))["HF_ENDPOINT"] == "http://mirror"
    assert "HF_ENDPOINT" not in environment(job_pod_of(a_deployment("file:///m/x", template=template)))


def test_the_reader_has_no_cache_of_weights() -> None:
    assert volume(job_pod_of(a_deployment(cache={"claimName": "models"})), "trimtab-model-cache") is None


def test_other_models_have_nothing_of_it() -> None:
    pod = pod_of(a_deployment("file:///models/x"))
    assert {one["name"] for one in pod["volumes"]} == {"shm", "tmp"}
