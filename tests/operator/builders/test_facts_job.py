"""The Job that reads a model: the engine's image, model and security context, without its resources."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, ROLE_LABEL
from trimtab_operator.resource.spec import InferenceDeployment

OVERLAY: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar": "no"}},
    "spec": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "pull"}],
        "runtimeClassName": "nvidia",
        "schedulerName": "own",
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}],
        "containers": [
            {
                "name": "main",
                "resources": {"limits": {"memory": "400Gi"}},
                "env": [{"name": "A", "value": "1"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
    },
}


def a_job(uri: str = "file:///models/m", **spec: Any) -> dict[str, Any]:
    base = {"model": {"uri": uri}, "runtime": {"image": "engine:1"}, **spec}
    metadata = {"name": "m", "namespace": "n", "uid": "u"}
    return facts_job(InferenceDeployment.parse({"metadata": metadata, "spec": base}), {"of": "m"})


def test_facts_job_writes_termination_message() -> None:
    job = a_job()
    (main,) = job["spec"]["template"]["spec"]["containers"]
    assert job["metadata"]["name"] == "m-facts"
    assert main["command"] == ["trimtab-engine"]
    assert main["args"][:2] == ["inspect", "/models/m"]
    assert f"--output-file={main['terminationMessagePath']}" in main["args"]


def test_facts_job_has_no_gpu_and_engine_privileges() -> None:
    pod = a_job(parallelism={"tensor": 8})["spec"]["template"]["spec"]
    (main,) = pod["containers"]
    assert "nvidia.com/gpu" not in str(main)
    assert main["resources"]["limits"]["memory"]
    assert main["securityContext"]["readOnlyRootFilesystem"] is True
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"


def test_no_service_and_no_group_takes_it_for_an_engine() -> None:
    labels = a_job()["spec"]["template"]["metadata"]["labels"]
    assert labels[DEPLOYMENT_LABEL] == "m"
    assert not labels.keys() & {ROLE_LABEL, GROUP_LABEL}


def test_a_claim_is_mounted_as_in_the_engine_and_sought_where_engines_have_it() -> None:
    pod = a_job("pvc://weights/llama")["spec"]["template"]["spec"]
    (main,) = pod["containers"]
    assert main["args"][1] == "/models/claim/llama"
    assert {"name": "model", "mountPath": "/models/claim", "readOnly": True} in main["volumeMounts"]
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert "preferredDuringSchedulingIgnoredDuringExecution" in pod["affinity"]["podAffinity"]


def test_the_overlay_counts_where_a_reader_needs_it() -> None:
    template = a_job(template=OVERLAY)["spec"]["template"]
    pod = template["spec"]
    (main,) = pod["containers"]
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert pod["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert {"name": "data", "mountPath": "/data"} in main["volumeMounts"]
    assert template["metadata"]["annotations"] == {"sidecar": "no"}
    assert template["metadata"]["labels"]["team"] == "a", "policies may require it"
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["schedulerName"] == "own"
    assert main["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}, "the reader needs as little as that"
    assert [variable["name"] for variable in main["env"]] == ["HOME"]


GPU_POOL = {"nodeSelector": {"cloud.example.com/accelerator": "h100", "kubernetes.io/arch": "arm64"}}


def test_facts_job_needs_no_gpu_node_and_may_use_one() -> None:
    pod = a_job(runtime={"image": "engine:1", "device": "cuda"}, template={"spec": GPU_POOL})["spec"]["template"][
        "spec"
    ]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_facts_job_uses_the_nodes_of_a_claim() -> None:
    runtime = {"image": "engine:1", "device": "cuda"}
    pod = a_job("pvc://weights/llama", runtime=runtime, template={"spec": GPU_POOL})["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == GPU_POOL["nodeSelector"]


def test_facts_job_on_cpus_keeps_the_selector_and_tolerates_nothing() -> None:
    pod = a_job(runtime={"image": "engine:1", "device": "cpu"}, template={"spec": GPU_POOL})["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == GPU_POOL["nodeSelector"]
    assert "tolerations" not in pod
