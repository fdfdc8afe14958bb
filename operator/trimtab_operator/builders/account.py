"""ServiceAccounts of a resource's pods.

Clouds and policies identify pods by them, and permissions of the namespace's `default` account do not apply to engines.
That of engines has no token and no permissions; that of the router may only read EndpointSlices of its namespace.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import account_name, common_labels, router_labels, router_name
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


def router_account(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the ServiceAccount of the router's pods, which mount its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": router_name(deployment),
            "namespace": deployment.namespace,
            "labels": router_labels(deployment),
        },
        "automountServiceAccountToken": False,
    }


def router_role_binding(deployment: InferenceDeployment, *, role_kind: str, role_name: str) -> dict[str, Any]:
    """Return the RoleBinding of the router's account, to a role of the installation that may read EndpointSlices."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {
            "name": router_name(deployment),
            "namespace": deployment.namespace,
            "labels": router_labels(deployment),
        },
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": role_name},
        "subjects": [{"kind": "ServiceAccount", "name": router_name(deployment), "namespace": deployment.namespace}],
    }
