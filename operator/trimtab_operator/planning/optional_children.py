"""Children that engines can do without, of kinds that not every cluster serves: budget, network policy, monitoring.

They are made where the cluster serves their kind and the administrator wants them, and removed when that is no longer
so. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_operator.builders.disruption import disruption_budget
from trimtab_operator.builders.monitoring import pod_monitor, prometheus_rule
from trimtab_operator.builders.network_policy import network_policy
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import Action, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import Observed, is_terminating, is_worker
from trimtab_operator.planning.children import allowed_down
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment


def plan_optional(
    deployment: InferenceDeployment, observed: Observed, installation: Installation, *, replicas: int
) -> tuple[Action, ...]:
    """What is to be done to them for so many `replicas`; kinds that were not looked for are left alone."""
    wanted = optional_children(deployment, observed, installation, replicas=replicas)
    applied = plan_applies([m for kind, m in wanted.items() if m is not None and kind in observed.optional], observed)
    removed = [
        delete_of(kind, child, "this installation has none of these")
        for kind, children in observed.optional.items()
        for child in children
        if wanted.get(kind) is None and not is_terminating(child)
    ]
    return (*applied, *removed)


def optional_children(
    deployment: InferenceDeployment, observed: Observed, installation: Installation, *, replicas: int
) -> Mapping[str, Manifest | None]:
    """By kind, the child that is wanted; None where the administrator wants none."""
    network, monitoring, alerts = installation.network, installation.pod_monitoring, installation.alerts
    spans_pods = layout_of(deployment.spec).pods > 1 or any(map(is_worker, observed.stateful_sets))
    return {
        "PodDisruptionBudget": disruption_budget(deployment, max_down=allowed_down(deployment, replicas)),
        "NetworkPolicy": None if network is None else network_policy(deployment, network, spans_pods=spans_pods),
        "PodMonitor": None if monitoring is None else pod_monitor(deployment, monitoring),
        "PrometheusRule": None if alerts is None else prometheus_rule(deployment, alerts),
    }
