"""Optional children of kinds that not every cluster serves: disruption budget, network policy, monitoring. Pure.

They are created if the cluster serves their kind and the administrator enables them, and removed otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_operator.builders.disruption import disruption_budget
from trimtab_operator.builders.monitoring import pod_monitor, prometheus_rule
from trimtab_operator.builders.network_policy import network_policy
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import Action, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import ObservedChildren, is_terminating, is_worker
from trimtab_operator.planning.router import is_router_child
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.group_assignment import allowed_down


def plan_optional(
    deployment: InferenceDeployment, observed: ObservedChildren, installation: Installation, *, replicas: int
) -> tuple[Action, ...]:
    """Return the actions for optional children; kinds that were not observed are skipped."""
    wanted = optional_children(deployment, observed, installation, replicas=replicas)
    applied = plan_applies([m for kind, m in wanted.items() if m is not None and kind in observed.optional], observed)
    removed = [
        delete_of(kind, child, "disabled in this installation")
        for kind, children in observed.optional.items()
        for child in children
        if wanted.get(kind) is None and not is_terminating(child) and not is_router_child(child)
    ]
    return (*applied, *removed)


def optional_children(
    deployment: InferenceDeployment, observed: ObservedChildren, installation: Installation, *, replicas: int
) -> Mapping[str, Manifest | None]:
    """Return the wanted child by kind; None if the administrator disabled it."""
    network, monitoring, alerts = installation.network, installation.pod_monitoring, installation.alerts
    spans_pods = layout_of(deployment.spec).pods > 1 or any(map(is_worker, observed.stateful_sets))
    return {
        "PodDisruptionBudget": disruption_budget(
            deployment,
            max_down=allowed_down(deployment, replicas),
            evicts_unhealthy=installation.disruption_budgets.evict_unhealthy,
        )
        if installation.disruption_budgets.enabled
        else None,
        "NetworkPolicy": None if network is None else network_policy(deployment, network, spans_pods=spans_pods),
        "PodMonitor": None if monitoring is None else pod_monitor(deployment, monitoring),
        "PrometheusRule": None if alerts is None else prometheus_rule(deployment, alerts),
    }
