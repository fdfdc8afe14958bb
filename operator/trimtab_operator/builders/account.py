"""The ServiceAccount of a resource's pods: an identity of their own, which has no token and no rights.

Clouds and policies know pods by it, and nothing that is granted to the namespace's `default` account reaches an engine.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import account_name, common_labels
from trimtab_operator.resource.spec import InferenceDeployment


def service_account(deployment: InferenceDeployment) -> dict[str, Any]:
    """The account of engines, and of the Job that reads their model."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": account_name(deployment),
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "automountServiceAccountToken": False,
    }
