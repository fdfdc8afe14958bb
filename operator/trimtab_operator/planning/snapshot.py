"""Snapshot of a resource and everything that one reconcile iteration depends on. Pure.

The observer reads the resource and its children, calls `plan_extra_reads` for what else to read, and stores everything
in one `ClusterSnapshot`. The plan depends on this value only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings, target_of
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.observed.missing_pods import needs_creation_error
from trimtab_operator.observed.router import RouterReport
from trimtab_operator.observed.start_errors import needs_start_errors
from trimtab_operator.planning.gpu_budget import GpuClaim
from trimtab_operator.planning.state import RecalledState, ReconcilerState, recall_state
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import MAX_REPLICAS, InferenceDeployment, ModelSource, Spec
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.gang_placement import Age, is_partly_placed
from trimtab_operator.rollout.pod_lifecycle import may_be_on_lost_node

GPU_NODES_FRESH_SECONDS = 60.0  # the GPUs of nodes seldom change
LOST_NODES_FRESH_SECONDS = 5.0  # recovered nodes must be seen; all resources of a lost node share one list


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Everything observed of a resource at Unix time `at`.

    `token` is the admin token of its engines, `former_token` that of engines started before the operator's secret
    changed.
    """

    at: float
    deployment: InferenceDeployment
    token: str = field(repr=False)
    children: ObservedChildren = field(default_factory=ObservedChildren)
    engines: Mapping[str, EngineObservation] = field(default_factory=dict)
    """Observation of each engine by group name; absent if it was not polled."""
    parse_errors: tuple[ValidationError, ...] = ()
    """Errors of a spec that cannot be parsed; `deployment` then has a placeholder spec."""
    nodes: tuple[Manifest, ...] | None = ()
    """Empty if not needed; None without permission to list nodes."""
    partly_placed: tuple[Age, ...] | None = None
    """Partly scheduled groups of all resources; None if not read or not permitted."""
    failed_creations: tuple[Manifest, ...] | None = None
    """Events about pods that were not created or do not start; None if not read."""
    tick_seconds: float = 15.0
    installation: Installation = field(default_factory=Installation)
    former_token: str | None = field(default=None, repr=False)
    sample_seconds: float = 0.0
    """Interval at which metrics change at their source, such as Prometheus' scrape interval; 0 if each read is new."""
    gpu_claims: tuple[GpuClaim, ...] | None = ()
    """Claims of all other resources if there is a GPU budget; None if unknown."""
    cached_resource: Manifest | None = field(default=None, repr=False)
    """The resource as cached, if it and its children come from the cache; otherwise None."""
    live_resource: Manifest | None = field(default=None, repr=False)
    """The resource as read from the API server with its children, before engines were polled."""
    routers: Mapping[str, RouterReport] = field(default_factory=dict)
    """Last report of each router pod by its uid; absent if it has not reported."""

    @property
    def tokens(self) -> Tokens:
        """Admin tokens that engines may have been started with."""
        return Tokens(self.token, self.former_token)


@dataclass(frozen=True, slots=True)
class ExtraReads:
    """What to read in addition to the children.

    `nodes_fresh_seconds` is the allowed age of the node list; None if no nodes are needed.
    """

    nodes_fresh_seconds: float | None
    partly_placed: bool
    failed_creations: bool
    engines: tuple[EngineTarget, ...]
    metrics: MetricsSettings = field(default_factory=MetricsSettings)


def plan_extra_reads(
    deployment: InferenceDeployment, children: ObservedChildren, state: ReconcilerState, *, now: float
) -> ExtraReads:
    """Return what else to read: nodes and other resources' groups only if something is wrong."""
    known = recall_state(children, state, now=now)
    return ExtraReads(
        nodes_fresh_seconds=_nodes_fresh_seconds(deployment, children),
        partly_placed=any(is_partly_placed(group) for group in known.groups),
        failed_creations=any(needs_creation_error(missing, now=now) for missing in known.state.missing.values())
        or needs_start_errors(known.observed, known.state.start_errors, now=now),
        engines=engine_targets(known),
        metrics=metrics_settings(deployment),
    )


def metrics_settings(deployment: InferenceDeployment) -> MetricsSettings:
    """Return where to read the metrics of the resource's engines."""
    metrics = deployment.spec.metrics
    return MetricsSettings(metrics.source, deployment.namespace, metrics.labels)


def engine_targets(known: RecalledState) -> tuple[EngineTarget, ...]:
    """Return the poll targets of the groups."""
    return tuple(target_of(group, known.state.layouts) for group in known.groups)


def _nodes_fresh_seconds(deployment: InferenceDeployment, children: ObservedChildren) -> float | None:
    if may_be_on_lost_node(children.pods):
        return LOST_NODES_FRESH_SECONDS
    return GPU_NODES_FRESH_SECONDS if deployment.spec.runtime.device == "cuda" else None


def parse_resource(
    body: Mapping[str, Any], *, default_image: str | None, allowed_privileges: frozenset[str] = NO_PRIVILEGES
) -> tuple[InferenceDeployment, tuple[ValidationError, ...]]:
    """Parse a resource; with parse errors its spec is a placeholder that suffices to report them."""
    try:
        return InferenceDeployment.parse(body, default_image=default_image, allowed_privileges=allowed_privileges), ()
    except InvalidSpec as error:
        stand_in = InferenceDeployment.parse({**body, "spec": {"model": {"uri": "file:///"}}})
        spec = Spec(model=ModelSource(uri="file:///"), replicas=_readable_count(body))
        return replace(stand_in, spec=spec), (ValidationError("spec", str(error)),)


def _readable_count(body: Mapping[str, Any]) -> int:
    """Return the replica count of a spec that cannot be parsed: the desired one with scaling, else spec.replicas, else
    1.
    """
    spec = body.get("spec") or {}
    is_scaled = isinstance(spec, Mapping) and spec.get("scaling") is not None
    count = (body.get("status") or {}).get("desiredReplicas") if is_scaled else spec.get("replicas")
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_REPLICAS:
        return count
    return 1
