"""Settings of the administrator for all resources of an installation, from flags of the operator.

Each flag is JSON, as the chart renders it. Unknown fields are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.spec import Model

Peer = dict[str, Any]
"""A NetworkPolicyPeer: podSelector, namespaceSelector or ipBlock."""


class NetworkAccess(Model):
    """Network access to engines."""

    operator: Peer = Field(description="The operator's pods, which alone may reach the admin port.")
    clients: tuple[Peer, ...] = Field(default=(), description="Peers that may send requests; empty: all.")
    monitoring: tuple[Peer, ...] = Field(default=(), description="Peers that may read metrics, if clients are set.")


class PodMonitoring(Model):
    """Settings of the PodMonitors."""

    labels: dict[str, str] = Field(default={}, description="Labels by which Prometheus selects PodMonitors.")
    interval: str = Field(default="15s", pattern="^[0-9]+(ms|s|m)$", description="Scrape interval.")


class Alerts(Model):
    """Settings of the PrometheusRules."""

    labels: dict[str, str] = Field(default={}, description="Labels by which Prometheus selects rules.")


class RouterRole(Model):
    """Role that the accounts of routers are bound to. It may get, list and watch EndpointSlices."""

    kind: Literal["ClusterRole", "Role"] = Field(description="Kind; a Role must exist in each namespace.")
    name: str = Field(min_length=1, max_length=253, description="Name.")


class RouterDefaults(Model):
    """Settings of the routers of all resources."""

    image: str = Field(min_length=1, max_length=512, description="Image of resources without spec.router.image.")
    role: RouterRole = Field(description="Role of the routers' accounts.")
    evict_unhealthy: bool = Field(
        default=False, description="Let evictions of router pods that are not Ready pass. Needs Kubernetes 1.27."
    )


class DisruptionBudgets(Model):
    """Settings of the PodDisruptionBudgets of replicas."""

    enabled: bool = Field(default=True, description="Create a PodDisruptionBudget per resource.")
    evict_unhealthy: bool = Field(
        default=True, description="Pods that are not Ready never block an eviction; needs Kubernetes 1.27."
    )


DEFAULT_DISRUPTION_BUDGETS = DisruptionBudgets()
Gpus = Annotated[int, Field(ge=0, le=1_000_000)]


class GpuBudget(Model):
    """Maximum GPUs of the engines of all resources."""

    total: Gpus | None = Field(default=None, description="Maximum in all watched namespaces; unset: no limit.")
    namespaces: dict[str, Gpus] = Field(default={}, description="Maximum per namespace.")


@dataclass(frozen=True, slots=True)
class Installation:
    """Settings of the installation. For None, the operator does not create that child and removes an existing one."""

    network: NetworkAccess | None = None
    pod_monitoring: PodMonitoring | None = None
    alerts: Alerts | None = None
    allowed_privileges: frozenset[str] = NO_PRIVILEGES
    """Privileges that overlays may give pods."""
    gpu_budget: GpuBudget | None = None
    """GPU budget; None if there is no limit."""
    router: RouterDefaults | None = None
    """Settings of routers; None if this installation has no router."""
    operator_class: str | None = None
    """Class of this operator; it serves resources with the same spec.class."""
    disruption_budgets: DisruptionBudgets = DEFAULT_DISRUPTION_BUDGETS
