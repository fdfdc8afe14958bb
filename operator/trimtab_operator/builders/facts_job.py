"""Job NAME-facts, which runs `trimtab-engine inspect MODEL` once in the engine's image with access to the model.

It requests no GPU and reads headers only. Its result is the container's termination message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab_operator.builders.download import download_env, secret_volumes, source_flags
from trimtab_operator.builders.engine_args import as_arguments, model_path
from trimtab_operator.builders.labels import (
    FACTS_COMPONENT,
    account_name,
    common_labels,
    facts_name,
    leader_selector,
)
from trimtab_operator.builders.model_volume import model_claim, model_volumes
from trimtab_operator.builders.overlay import apply_overlay
from trimtab_operator.builders.pod import CONTAINER, ENGINE_USER
from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.resource.spec import (
    ContainerOverlay,
    InferenceDeployment,
    PodOverlay,
    PodTemplate,
    TemplateMetadata,
)

TERMINATION_LOG = "/dev/termination-log"  # termination message that the kubelet reads: 4096 bytes
RETRIES = 0  # of the Job; the operator reads the termination message and retries with its own backoff
DEADLINE_SECONDS = 3600  # headers are read in seconds; the rest is for node scale-up
RESULT_TTL_SECONDS = 3600  # for results that no operator has read; the Job is created again later
REQUESTS = {"cpu": "50m", "memory": "128Mi"}
GPU_TOLERATION = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
ENVIRONMENT_KEYS = ("kubernetes.io/arch", "kubernetes.io/os")  # the image needs these of a node
LIMITS = {
    "cpu": "1",
    "memory": "1Gi",
}  # quotas may require both; the headers of the largest checkpoints are tens of MiB


def facts_job(deployment: InferenceDeployment, annotations: dict[str, str]) -> dict[str, Any]:
    """Return the Job; `annotations` identify the model that it reads."""
    labels = {**common_labels(deployment), "app.kubernetes.io/component": FACTS_COMPONENT}
    rendered = {"metadata": {"labels": labels}, "spec": _pod(deployment)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": facts_name(deployment),
            "namespace": deployment.namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": RESULT_TTL_SECONDS,
            "template": apply_overlay(rendered, _with_reader_overlay(deployment)),
        },
    }


def _pod(deployment: InferenceDeployment) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": account_name(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": ENGINE_USER,
            "runAsGroup": ENGINE_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(deployment)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *secret_volumes(deployment.spec)[0]],
    }
    pod["volumes"] += model_volumes(deployment.spec)[0]
    if model_claim(deployment.spec):
        pod["affinity"] = _near_the_engines(deployment)
    return pod


def _container(deployment: InferenceDeployment) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - a path in the pod
    mounts += model_volumes(deployment.spec)[1]
    mounts += secret_volumes(deployment.spec)[1]
    return {
        "name": CONTAINER,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["trimtab-engine"],
        "args": [
            "inspect",
            model_path(deployment),
            "--output=json",
            f"--output-file={TERMINATION_LOG}",
            *as_arguments(source_flags(deployment.spec)),
        ],
        "env": [
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the only folder in the pod that can be written
            *download_env(deployment.spec),
        ],
        "resources": {"requests": REQUESTS, "limits": LIMITS},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # a killed container wrote no message
        "volumeMounts": mounts,
    }


def _near_the_engines(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return an affinity to the engines' nodes, because a claim may be bound to one node at a time."""
    term = {"labelSelector": {"matchLabels": leader_selector(deployment)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _with_reader_overlay(deployment: InferenceDeployment) -> InferenceDeployment:
    """Return the deployment with the overlay that the Job needs, without the resources of engines.

    The Job needs no GPU. It therefore ignores the selector of the GPU pool, unless a volume may be bound to that pool's
    nodes, and tolerates the taint of GPU nodes, because a cluster may have no others.
    For downloaded models, the Job keeps the environment, which may name mirrors and proxies, and the ServiceAccount,
    which may be the identity for the source.
    """
    overlay = deployment.spec.template
    pod = overlay.spec
    asks = deployment.spec.model.is_downloaded
    is_on_gpus = deployment.spec.runtime.device == "cuda"
    is_near = not is_on_gpus or bool(pod.volumes) or model_claim(deployment.spec) is not None
    containers = tuple(
        ContainerOverlay(
            name=main.name,
            volume_mounts=main.volume_mounts,
            image_pull_policy=main.image_pull_policy,
            env=main.env if asks else (),
            env_from=main.env_from if asks else (),
        )
        for main in pod.containers
    )
    account = (pod.model_extra or {}).get("serviceAccountName") if asks else None
    kept = PodOverlay(
        containers=containers,
        node_selector=pod.node_selector if is_near else _of_environment(pod.node_selector),
        tolerations=_with_gpu_toleration(pod.tolerations) if is_on_gpus else pod.tolerations,
        affinity=pod.affinity if is_near else None,
        scheduler_name=pod.scheduler_name,
        runtime_class_name=pod.runtime_class_name,
        image_pull_secrets=pod.image_pull_secrets,
        volumes=pod.volumes,
        priority_class_name=pod.priority_class_name,
        security_context=pod.security_context,
        **({} if account is None else {"serviceAccountName": account}),
    )
    metadata = TemplateMetadata(labels=overlay.metadata.labels, annotations=overlay.metadata.annotations)
    template = PodTemplate(metadata=metadata, spec=kept)
    return replace(deployment, spec=deployment.spec.model_copy(update={"template": template}))


def _of_environment(node_selector: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in node_selector.items() if key in ENVIRONMENT_KEYS}


def _with_gpu_toleration(tolerations: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    return tolerations if GPU_TOLERATION in tolerations else (*tolerations, GPU_TOLERATION)
