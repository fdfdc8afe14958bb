"""PodDisruptionBudget of a resource's replicas."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, ROLE_LABEL, common_labels
from trimtab_operator.resource.spec import InferenceDeployment


def disruption_budget(deployment: InferenceDeployment, *, max_down: int) -> dict[str, Any]:
    """Return the budget: as many pods may be unavailable as replicas in a rollout.

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
            "maxUnavailable": max_down,
            "selector": {
                "matchLabels": {DEPLOYMENT_LABEL: deployment.name},
                "matchExpressions": [{"key": ROLE_LABEL, "operator": "Exists"}],
            },
        },
    }
