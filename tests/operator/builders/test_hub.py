"""What pods have for a model of the hub."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trimtab_operator.builders.engine_args import engine_args, model_path
from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.stateful_set import rendered
from trimtab_operator.resource.spec import InferenceDeployment

COMMIT = "c" * 40


def a_deployment(uri: str = "hf://Qwen/Qwen3-8B", *, template: Any = None, **model: Any) -> InferenceDeployment:
    spec: dict[str, Any] = {"model": {"uri": uri, **model}, "runtime": {"device": "cpu", "image": "engine:1"}}
    if template is not None:
        spec["template"] = template
    return InferenceDeployment.parse({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec})


def pinned(deployment: InferenceDeployment) -> InferenceDeployment:
    return replace(deployment, commit=COMMIT)


def pod_of(deployment: InferenceDeployment) -> dict[str, Any]:
    found: dict[str, Any] = rendered(deployment, admin_token_sha256="h").template["spec"]
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


def test_what_replicas_serve_is_read_from_what_they_are_rendered_from() -> None:
    assert rendered(pinned(a_deployment()), admin_token_sha256="h").model_revision == COMMIT
    assert rendered(a_deployment("file:///m/x"), admin_token_sha256="h").model_revision is None


def test_clients_call_it_by_its_name_without_organisation_and_revision() -> None:
    assert "--served-model-name=Qwen3-8B" in engine_args(a_deployment("hf://Qwen/Qwen3-8B@v1"), admin_token_sha256="h")


def test_without_a_claim_the_cache_is_the_pods_own_and_bounded() -> None:
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


def test_who_reads_the_model_asks_the_mirror_that_engines_ask() -> None:
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
