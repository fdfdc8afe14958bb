"""What an administrator chooses for all resources of an installation: flags of the operator, never a resource's spec.

Each is JSON, as the chart writes it; what it does not know is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.spec import Model

Peer = dict[str, Any]
"""A NetworkPolicyPeer: podSelector, namespaceSelector or ipBlock."""


class NetworkAccess(Model):
    """Who may reach engines over the network."""

    operator: Peer = Field(description="The operator's pods: the only ones that reach the admin port.")
    clients: tuple[Peer, ...] = Field(default=(), description="Who may send requests; empty: everybody.")
    monitoring: tuple[Peer, ...] = Field(default=(), description="Who may read metrics, where clients are named.")


class PodMonitoring(Model):
    """How Prometheus reads the engines."""

    labels: dict[str, str] = Field(default={}, description="Labels by which a Prometheus chooses its PodMonitors.")
    interval: str = Field(default="15s", pattern="^[0-9]+(ms|s|m)$", description="Time between two readings.")


class Alerts(Model):
    """Which Prometheus evaluates the alerts of engines."""

    labels: dict[str, str] = Field(default={}, description="Labels by which a Prometheus chooses its rules.")


Gpus = Annotated[int, Field(ge=0, le=1_000_000)]


class GpuBudget(Model):
    """How many GPUs the engines of all resources may hold together."""

    total: Gpus | None = Field(default=None, description="Of all namespaces that the operator serves; none: no limit.")
    namespaces: dict[str, Gpus] = Field(default={}, description="Of single namespaces.")


@dataclass(frozen=True, slots=True)
class Installation:
    """The choices. None: no such child is made, and one that is there from before is removed."""

    network: NetworkAccess | None = None
    pod_monitoring: PodMonitoring | None = None
    alerts: Alerts | None = None
    allowed_privileges: frozenset[str] = NO_PRIVILEGES
    """What overlays may give pods beyond what every unprivileged one has."""
    gpu_budget: GpuBudget | None = None
    """None: there is no limit."""
