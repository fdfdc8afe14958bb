"""The Job NAME-facts: `trimtab-engine inspect MODEL` once, in the engine's image, where the model can be read.

It asks for no GPU and reads headers only. It hands its result over as the container's termination message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab_operator.builders.download import asking_flags, download_env, secret_volumes
from trimtab_operator.builders.engine_args import as_arguments, model_path
from trimtab_operator.builders.labels import (
    FACTS_COMPONENT,
    account_name,
    common_labels,
    facts_name,
    leader_selector,
)
from trimtab_operator.builders.mounted import model_claim, model_volumes
from trimtab_operator.builders.overlay import lay_over
from trimtab_operator.builders.pod import CONTAINER, ENGINE_USER
from trimtab_operator.resource.spec import (
    ContainerOverlay,
    InferenceDeployment,
    PodOverlay,
    PodTemplate,
    TemplateMetadata,
)

TERMINATION_LOG = "/dev/termination-log"  # where the kubelet reads a container's last words: 4096 bytes
RETRIES = 0  # of the Job itself: the operator reads the last words first and then retries with a backoff of its own
DEADLINE_SECONDS = 3600  # headers are read in seconds; the rest is for a node that is still to come
KEPT_SECONDS = 3600  # a result that nobody read, because no operator runs: long enough to look, then it is made again
REQUESTS = {"cpu": "50m", "memory": "128Mi"}
LIMITS = {
    "cpu": "1",
    "memory": "1Gi",
}  # quotas may insist on both; the headers of the largest checkpoints are some tens of MiB


def facts_job(deployment: InferenceDeployment, annotations: dict[str, str]) -> dict[str, Any]:
    """The Job; `annotations` say whose facts it reads."""
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
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": lay_over(rendered, _with_what_a_reader_needs(deployment)),
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
            *as_arguments(asking_flags(deployment.spec)),
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
        "terminationMessagePolicy": "FallbackToLogsOnError",  # one that was killed wrote nothing
        "volumeMounts": mounts,
    }


def _near_the_engines(deployment: InferenceDeployment) -> dict[str, Any]:
    """A claim may be bound to one node at a time: rather go where engines already have it."""
    term = {"labelSelector": {"matchLabels": leader_selector(deployment)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _with_what_a_reader_needs(deployment: InferenceDeployment) -> InferenceDeployment:
    """The user's overlay without what only an engine needs: resources, environment, labels, schedule. Who asks for
    a model elsewhere keeps the environment, which names mirrors and proxies, and the account, which may be who asks."""
    overlay = deployment.spec.template
    pod = overlay.spec
    asks = deployment.spec.model.is_downloaded
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
        node_selector=pod.node_selector,
        tolerations=pod.tolerations,
        affinity=pod.affinity,
        image_pull_secrets=pod.image_pull_secrets,
        volumes=pod.volumes,
        priority_class_name=pod.priority_class_name,
        security_context=pod.security_context,
        **({} if account is None else {"serviceAccountName": account}),
    )
    template = PodTemplate(metadata=TemplateMetadata(annotations=overlay.metadata.annotations), spec=kept)
    return replace(deployment, spec=deployment.spec.model_copy(update={"template": template}))
