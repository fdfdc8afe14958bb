"""Services: one for clients, and one per group for the rendezvous of its ranks."""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import (
    HTTP_PORT,
    RENDEZVOUS_PORT,
    common_labels,
    group_name,
    group_selector,
    leader_selector,
    service_name,
)
from trimtab_operator.resource.spec import InferenceDeployment


def client_service(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the Service for clients: every Ready leader, on port 8000."""
    return _service(
        deployment,
        name=service_name(deployment),
        labels=common_labels(deployment),
        spec={
            "type": "ClusterIP",
            "selector": leader_selector(deployment),
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    )


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
