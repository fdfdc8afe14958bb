"""Pod specs of one replica group, with the engine as the only container `main`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.download import cache_claim, cache_volumes, download_env, secret_volumes
from trimtab_operator.builders.engine_args import engine_args
from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT, account_name
from trimtab_operator.builders.model_volume import model_volumes
from trimtab_operator.builders.rendezvous_secret import RENDEZVOUS_MOUNT, rendezvous_volume
from trimtab_operator.builders.startup import probe_seconds
from trimtab_operator.layout import layout_of
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment

CONTAINER = "main"
PRE_STOP_SECONDS = 5  # a terminating engine serves that long, until endpoint removal has propagated
GRACE_MARGIN_SECONDS = 15  # after the drain timeout: abort requests, write the last responses, exit
ENGINE_USER = 10001  # any non-root user; fixed, so that the image's USER does not matter
SHM_GIB_PER_RANK = 1  # a limit, not a reservation; ranks of one pod exchange tensors there
SERVING_FIELDS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")
STARTUP_PERIOD_SECONDS = 2


def pod_spec(deployment: InferenceDeployment, *, token_hashes: TokenHashes) -> dict[str, Any]:
    """Return the pod spec of a group's leader, before the user's overlay."""
    return {
        "serviceAccountName": account_name(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds(deployment),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": ENGINE_USER,
            "runAsGroup": ENGINE_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            **_group_of_cache(deployment),
        },
        "containers": [_main(deployment, token_hashes)],
        "volumes": _volumes(deployment),
    }


def _group_of_cache(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the fsGroup of pods with a cache claim, because claims are often owned by root."""
    if cache_claim(deployment.spec) is None:
        return {}
    return {"fsGroup": ENGINE_USER, "fsGroupChangePolicy": "OnRootMismatch"}


def worker_pod_spec(leader: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's pod spec, from the leader's with the user's overlay, without ports and probes.

    A worker serves no requests. The leader exits if a rank is lost, so its probes cover the workers. The worker keeps
    the preStop hook of the leader, because SIGTERM to any pod ends the whole replica.
    """
    containers = [
        {key: value for key, value in container.items() if key not in SERVING_FIELDS}
        for container in leader["containers"]
    ]
    return {**leader, "containers": containers}


def grace_seconds(deployment: InferenceDeployment) -> int:
    """Return the termination grace period: preStop, the drain after SIGTERM, and a margin."""
    return math.ceil(stop_seconds(parse_seconds(deployment.spec.rollout.drain_timeout))) + GRACE_MARGIN_SECONDS


def stop_seconds(drain_seconds: float) -> float:
    """Return the seconds from the deletion of a pod until its last request has finished or was aborted."""
    return PRE_STOP_SECONDS + drain_seconds


def _main(deployment: InferenceDeployment, token_hashes: TokenHashes) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["trimtab-engine"],
        "args": engine_args(deployment, token_hashes=token_hashes),
        "env": [
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - the only folder in the pod that can be written
            *download_env(deployment.spec),
        ],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(deployment),
        "startupProbe": _probe("/startupz", period=STARTUP_PERIOD_SECONDS, failures=_startup_failures(deployment)),
        "readinessProbe": _probe("/readyz", period=2, failures=3),
        "livenessProbe": _probe("/livez", period=10, failures=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "securityContext": _container_security(deployment),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(deployment),
    }


def _startup_failures(deployment: InferenceDeployment) -> int:
    """Return a failure threshold that allows a large model to load from slow storage."""
    return math.ceil(probe_seconds(deployment) / STARTUP_PERIOD_SECONDS)


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    """Return a probe. `timeoutSeconds` is long, because on a CPU the API server shares cores with the model."""
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _container_security(deployment: InferenceDeployment) -> dict[str, Any]:
    security: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if deployment.spec.runtime.device == "cpu":
        security["readOnlyRootFilesystem"] = True  # on GPUs the driver's hook writes into the container
    return security


def _resources(deployment: InferenceDeployment) -> dict[str, Any]:
    gpus = layout_of(deployment.spec).gpus_per_pod
    if not gpus:
        return {}
    return {"requests": {"nvidia.com/gpu": str(gpus)}, "limits": {"nvidia.com/gpu": str(gpus)}}


def _volumes(deployment: InferenceDeployment) -> list[dict[str, Any]]:
    layout = layout_of(deployment.spec)
    shm_gib = SHM_GIB_PER_RANK * math.ceil(layout.world_size / layout.pods)
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    volumes += model_volumes(deployment.spec)[0]
    volumes += cache_volumes(deployment.spec)[0] + secret_volumes(deployment.spec)[0]
    if layout.pods > 1:
        volumes.append(rendezvous_volume(deployment))
    return volumes


def _mounts(deployment: InferenceDeployment) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in the pod
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a path in the pod
    ]
    mounts += model_volumes(deployment.spec)[1]
    mounts += cache_volumes(deployment.spec)[1] + secret_volumes(deployment.spec)[1]
    if layout_of(deployment.spec).pods > 1:
        mounts.append({"name": "rendezvous", "mountPath": RENDEZVOUS_MOUNT, "readOnly": True})
    return mounts
