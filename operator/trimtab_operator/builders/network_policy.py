"""NetworkPolicy of a resource's engines: clients reach the API, the operator the admin port, ranks each other.

NetworkPolicies are additive: another policy can allow more, but cannot deny these. Egress is not restricted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab_operator.builders.labels import ADMIN_PORT, DEPLOYMENT_LABEL, HTTP_PORT, ROLE_LABEL, common_labels
from trimtab_operator.resource.installation import NetworkAccess, Peer
from trimtab_operator.resource.spec import InferenceDeployment


def network_policy(deployment: InferenceDeployment, access: NetworkAccess, *, spans_pods: bool) -> dict[str, Any]:
    """Return the policy. If replicas span several pods, `spans_pods` allows any port between them, as ranks need."""
    engines = {
        "matchLabels": {DEPLOYMENT_LABEL: deployment.name},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "Exists"}],
    }
    ingress = [_api(access), _from([access.operator], ADMIN_PORT)]
    if spans_pods:
        ingress.append({"from": [{"podSelector": engines}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": deployment.name,
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "spec": {"podSelector": engines, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _api(access: NetworkAccess) -> dict[str, Any]:
    """Return the rule of the API port, which also serves metrics. It is open if no clients are configured."""
    if not access.clients:
        return {"ports": [_port(HTTP_PORT)]}
    return _from((*access.clients, *access.monitoring, access.operator), HTTP_PORT)


def _from(peers: Iterable[Peer], port: int) -> dict[str, Any]:
    return {"from": list(peers), "ports": [_port(port)]}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
