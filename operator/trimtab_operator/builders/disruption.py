"""The PodDisruptionBudget: how many replicas may be taken at once by who drains nodes."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, ROLE_LABEL, common_labels
from trimtab_operator.resource.spec import InferenceDeployment


def disruption_budget(deployment: InferenceDeployment, *, max_down: int) -> dict[str, Any]:
    """As many pods as replicas may be down in a rollout. One pod of a replica of several takes the others along, so
    that its budget is used up until all are back. A single replica may be evicted: its node must not wait for ever.
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
