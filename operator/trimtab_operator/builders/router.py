"""Deployment of a resource's router pods.

Router pods hold no state that must survive them, and all of them serve. The Deployment replaces them one by one, each
after a new one is Ready.
"""

from __future__ import annotations

import math
from typing import Any

from trimtab_operator.builders.download import SWITCH
from trimtab_operator.builders.engine_args import as_arguments, served_name
from trimtab_operator.builders.labels import (
    HTTP_PORT,
    ROUTER_ADMIN_PORT,
    engines_service_name,
    router_labels,
    router_name,
    router_selector,
)
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Router

CONTAINER = "router"
ROUTER_USER = 65532  # any non-root user; fixed, so that the image's USER does not matter
GRACE_MARGIN_SECONDS = 15  # after the drain timeout: abort requests, write the last responses, exit
DEFAULT_REQUESTS = {"cpu": "250m", "memory": "256Mi"}


def router_deployment(
    deployment: InferenceDeployment, router: Router, *, image: str, admin_token_sha256: str
) -> dict[str, Any]:
    """Return the Deployment. `admin_token_sha256` is the hash of the router's own admin token."""
    labels = router_labels(deployment)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": router_name(deployment), "namespace": deployment.namespace, "labels": labels},
        "spec": {
            "replicas": router.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": router_selector(deployment)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod_spec(deployment, router, image=image, admin_token_sha256=admin_token_sha256),
            },
        },
    }


def router_drain_seconds(deployment: InferenceDeployment, router: Router) -> float:
    """Return how long a router pod that is stopped may finish its requests: waiting ones first need a replica."""
    return parse_seconds(router.max_hold) + parse_seconds(deployment.spec.rollout.drain_timeout)


def router_args(deployment: InferenceDeployment, router: Router, *, admin_token_sha256: str) -> list[str]:
    """Return the arguments of `trimtab-router`, one flag per item."""
    itl = None if deployment.spec.objectives is None else deployment.spec.objectives.itl
    flags: dict[str, object | None] = {
        "--port": HTTP_PORT,
        "--admin-port": ROUTER_ADMIN_PORT,
        "--admin-token-sha256": admin_token_sha256,
        "--service": f"{deployment.namespace}/{engines_service_name(deployment)}",
        "--served-model": served_name(deployment.spec),
        "--max-hold": f"{parse_seconds(router.max_hold):g}",
        "--max-held-requests": router.max_held_requests,
        "--priority-header": router.priority_header,
        "--session-header": router.session_header,
        "--tenant-header": router.tenant_header,
        "--trust-headers": SWITCH if router.trust_headers else None,
        "--itl-target": None if itl is None else f"{parse_seconds(itl.target):g}",
        "--drain-timeout": f"{router_drain_seconds(deployment, router):g}",
    }
    priorities = [f"--priority={priority.name}={priority.value}" for priority in router.priorities]
    keys = [
        f"--key-priority={digest}={priority.name}"
        for priority in router.priorities
        for digest in priority.api_key_sha256s
    ]
    return [*as_arguments(flags), *priorities, *keys]


def _pod_spec(
    deployment: InferenceDeployment, router: Router, *, image: str, admin_token_sha256: str
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "serviceAccountName": router_name(deployment),
        "automountServiceAccountToken": True,  # to read the EndpointSlices of the engines
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(router_drain_seconds(deployment, router)) + GRACE_MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": ROUTER_USER,
            "runAsGroup": ROUTER_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": router_selector(deployment)},
            }
        ],
        "containers": [_container(deployment, router, image=image, admin_token_sha256=admin_token_sha256)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if deployment.spec.template.spec.image_pull_secrets:
        pod["imagePullSecrets"] = list(deployment.spec.template.spec.image_pull_secrets)
    return pod


def _container(
    deployment: InferenceDeployment, router: Router, *, image: str, admin_token_sha256: str
) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["trimtab-router"],
        "args": router_args(deployment, router, admin_token_sha256=admin_token_sha256),
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ROUTER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(router),
        "startupProbe": _probe("/healthz", period=1, failures=60),
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        "livenessProbe": _probe("/healthz", period=10, failures=3),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a path in the pod
    }


def _resources(router: Router) -> dict[str, Any]:
    if router.resources is None:
        return {"requests": dict(DEFAULT_REQUESTS)}
    return dict(router.resources)


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    """Return a probe of the admin port. `timeoutSeconds` is long, because the pod may share its cores."""
    return {
        "httpGet": {"path": path, "port": "admin", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
