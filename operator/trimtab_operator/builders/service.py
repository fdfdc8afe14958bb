"""Services: for clients, for the router to find the engines, and per group for the rendezvous of its ranks."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import (
    ADMIN_PORT,
    HTTP_PORT,
    RENDEZVOUS_PORT,
    common_labels,
    engines_service_name,
    group_name,
    group_selector,
    leader_selector,
    router_labels,
    router_selector,
    service_name,
)
from trimtab_operator.resource.spec import InferenceDeployment


def client_service(deployment: InferenceDeployment, *, to_router: bool = False) -> dict[str, Any]:
    """Return the Service for clients on port 8000: to every Ready router pod, or to every Ready leader."""
    return _service(
        deployment,
        name=service_name(deployment),
        labels=common_labels(deployment),
        spec={
            "type": "ClusterIP",
            "selector": router_selector(deployment) if to_router else leader_selector(deployment),
            "ports": [_port("http", HTTP_PORT)],
        },
    )


def engines_service(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the headless Service whose EndpointSlices list the Ready leaders, with API and admin port."""
    return _service(
        deployment,
        name=engines_service_name(deployment),
        labels=router_labels(deployment),
        spec={
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": leader_selector(deployment),
            "ports": [_port("http", HTTP_PORT), _port("admin", ADMIN_PORT)],
        },
    )


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}


def rendezvous_service(deployment: InferenceDeployment, ordinal: int, *, address: str | None = None) -> dict[str, Any]:
    """Return the rendezvous Service of one group. It publishes pods before they are Ready, which needs the rendezvous.

    `address` is its current or previous ClusterIP, which is an argument of running pods.
    """
    selector = group_selector(deployment, ordinal)
    known = {} if address is None else {"clusterIP": address}
    return _service(
        deployment,
        name=group_name(deployment, ordinal),
        labels={**common_labels(deployment), **selector},
        spec={
            "type": "ClusterIP",
            **known,
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [
                {"name": "rendezvous", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT, "protocol": "TCP"}
            ],
        },
    )


def _service(
    deployment: InferenceDeployment, *, name: str, labels: dict[str, str], spec: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": deployment.namespace, "labels": labels},
        "spec": spec,
    }
