"""The NetworkPolicy of a resource's engines: clients reach the API, the operator its admin port, ranks each other.

What is allowed elsewhere adds up: another NetworkPolicy can open more, none can close what is open here. What engines
themselves may reach is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab_operator.builders.labels import ADMIN_PORT, DEPLOYMENT_LABEL, HTTP_PORT, ROLE_LABEL, common_labels
from trimtab_operator.resource.installation import NetworkAccess, Peer
from trimtab_operator.resource.spec import InferenceDeployment


def network_policy(deployment: InferenceDeployment, access: NetworkAccess, *, spans_pods: bool) -> dict[str, Any]:
    """`spans_pods`: whether replicas have several pods, whose ranks meet at one port and then talk at any."""
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
    """Requests and metrics share a port. Without named clients it is open, as a Service is in any namespace."""
    if not access.clients:
        return {"ports": [_port(HTTP_PORT)]}
    return _from((*access.clients, *access.monitoring, access.operator), HTTP_PORT)


def _from(peers: Iterable[Peer], port: int) -> dict[str, Any]:
    return {"from": list(peers), "ports": [_port(port)]}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
