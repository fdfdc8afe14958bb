"""PodDisruptionBudgets of a resource's replicas and of its router."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import (
    DEPLOYMENT_LABEL,
    ROLE_LABEL,
    common_labels,
    router_labels,
    router_name,
    router_selector,
)
from trimtab_operator.resource.spec import InferenceDeployment


def disruption_budget(deployment: InferenceDeployment, *, max_down: int, evicts_unhealthy: bool) -> dict[str, Any]:
    """Return the budget: as many pods may be unavailable as replicas in a rollout.

    With `evicts_unhealthy`, pods that load or crash never block a node drain; Kubernetes knows that since 1.27.

    In a replica with several pods, an eviction restarts all of them, so the budget is exhausted until all are back. A
    single replica may be evicted, because otherwise its node could never be drained.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": deployment.name,
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "spec": {
            **({"unhealthyPodEvictionPolicy": "AlwaysAllow"} if evicts_unhealthy else {}),
            "maxUnavailable": max_down,
            "selector": {
                "matchLabels": {DEPLOYMENT_LABEL: deployment.name},
                "matchExpressions": [{"key": ROLE_LABEL, "operator": "Exists"}],
            },
        },
    }


def router_disruption_budget(deployment: InferenceDeployment, *, evicts_unhealthy: bool) -> dict[str, Any]:
    """Return the budget of the router's pods: one may be evicted at a time.

    With `evicts_unhealthy`, pods that are not Ready never block a node drain; Kubernetes knows that since 1.27.
    """
    policy = {"unhealthyPodEvictionPolicy": "AlwaysAllow"} if evicts_unhealthy else {}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": router_name(deployment),
            "namespace": deployment.namespace,
            "labels": router_labels(deployment),
        },
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": router_selector(deployment)}, **policy},
    }
