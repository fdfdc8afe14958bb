"""NetworkPolicies of a resource's engines and router.

Clients reach the API of both, the operator their admin ports, the router both ports of engines, and ranks each other.

NetworkPolicies are additive: another policy can allow more, but cannot deny these. Egress is not restricted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab_operator.builders.labels import (
    ADMIN_PORT,
    DEPLOYMENT_LABEL,
    HTTP_PORT,
    ROLE_LABEL,
    ROUTER_ADMIN_PORT,
    common_labels,
    router_labels,
    router_name,
    router_selector,
)
from trimtab_operator.resource.installation import NetworkAccess, Peer
from trimtab_operator.resource.spec import InferenceDeployment


def network_policy(deployment: InferenceDeployment, access: NetworkAccess, *, spans_pods: bool) -> dict[str, Any]:
    """Return the policy. If replicas span several pods, `spans_pods` allows any port between them, as ranks need."""
    engines = {
        "matchLabels": {DEPLOYMENT_LABEL: deployment.name},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "Exists"}],
    }
    routers = _routers(deployment)
    ingress = [_api(access, routers), _from([access.operator, *routers], ADMIN_PORT)]
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


def router_network_policy(deployment: InferenceDeployment, access: NetworkAccess) -> dict[str, Any]:
    """Return the policy of the router's pods.

    Their admin port also serves metrics, so it is as open as the API port of engines: its other routes need a token.
    """
    admin = {"ports": [_port(ROUTER_ADMIN_PORT)]}
    if access.clients:
        admin = _from((*access.monitoring, access.operator), ROUTER_ADMIN_PORT)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": router_name(deployment),
            "namespace": deployment.namespace,
            "labels": router_labels(deployment),
        },
        "spec": {
            "podSelector": {"matchLabels": router_selector(deployment)},
            "policyTypes": ["Ingress"],
            "ingress": [_api(access, ()), admin],
        },
    }


def _routers(deployment: InferenceDeployment) -> tuple[Peer, ...]:
    """Return the peer of the router's pods, if there is a router."""
    if deployment.spec.active_router is None:
        return ()
    return ({"podSelector": {"matchLabels": router_selector(deployment)}},)


def _api(access: NetworkAccess, routers: tuple[Peer, ...]) -> dict[str, Any]:
    """Return the rule of an API port; that of engines also serves metrics. It is open if no clients are configured."""
    if not access.clients:
        return {"ports": [_port(HTTP_PORT)]}
    return _from((*access.clients, *access.monitoring, access.operator, *routers), HTTP_PORT)


def _from(peers: Iterable[Peer], port: int) -> dict[str, Any]:
    return {"from": list(peers), "ports": [_port(port)]}


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
