"""ServiceAccount of a resource's pods, without a token and without permissions.

Clouds and policies identify pods by it, and permissions of the namespace's `default` account do not apply to engines.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import account_name, common_labels
from trimtab_operator.resource.spec import InferenceDeployment


def service_account(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the ServiceAccount of engines and of the Job that reads their model."""
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
