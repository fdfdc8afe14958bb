"""The world as one look sees it, and what is worth looking at. Pure.

A look reads the resource and its children, asks `questions_of` what else matters now, reads that, and puts all of it
into one `World`. Nothing is read after that: the turn decides by this value alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.observed.engines import EngineSeen, MetricsAsked, Target, target_of
from trimtab_operator.observed.groups import Observed
from trimtab_operator.observed.missing_pods import wants_words
from trimtab_operator.planning.gpu_budget import Stake
from trimtab_operator.planning.state import Memory, Recalled, recalled
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import MAX_REPLICAS, InferenceDeployment, ModelSource, Spec
from trimtab_operator.resource.validation_error import Refusal
from trimtab_operator.rollout.gang_placement import Age, is_partly_placed
from trimtab_operator.rollout.node_loss import may_be_lost

GPU_NODES_FRESH_SECONDS = 60.0  # which GPUs there are seldom changes
LOST_NODES_FRESH_SECONDS = 5.0  # a node that is back is not given up; all resources of a lost node ask at once


@dataclass(frozen=True, slots=True)
class World:
    """All that one look at a resource saw, at Unix time `at`. `token` is the admin token of its engines, `former_token`
    the one of those that were started before the operator's secret was changed."""

    at: float
    deployment: InferenceDeployment
    token: str = field(repr=False)
    children: Observed = field(default_factory=Observed)
    engines: Mapping[str, EngineSeen] = field(default_factory=dict)
    """What each engine said, by the group's name; absent: it was not asked."""
    misread: tuple[Refusal, ...] = ()
    """What of the spec cannot even be read; the deployment's spec is a stand-in then."""
    nodes: tuple[Manifest, ...] | None = ()
    """Empty where they do not matter; None: the operator has no right to see them."""
    rivals: tuple[Age, ...] | None = None
    """The groups of all resources that are partly placed; None: nobody has looked, or may."""
    refused_creations: tuple[Manifest, ...] | None = None
    """Events of StatefulSets whose pods the API server did not create; None: nobody has looked."""
    tick_seconds: float = 15.0
    installation: Installation = field(default_factory=Installation)
    former_token: str | None = field(default=None, repr=False)
    sample_seconds: float = 0.0
    """How often metrics change where they are read: Prometheus scrapes at its own pace. 0: with each look."""
    stakes: tuple[Stake, ...] | None = ()
    """What all other resources ask for and hold of the GPU budget, where there is one; None: it is not known."""
    remembered: Manifest | None = field(default=None, repr=False)
    """The resource as a cache knew it, if it and its children come from there; None: the API server was asked."""
    read: Manifest | None = field(default=None, repr=False)
    """The resource as the API server gave it, where it was asked, with its children, before the engines were."""

    @property
    def tokens(self) -> Tokens:
        """What engines may have been started with."""
        return Tokens(self.token, self.former_token)


@dataclass(frozen=True, slots=True)
class Questions:
    """What is worth reading beyond the children. `nodes_fresh_seconds`: how old a list of nodes may be; None: none is
    needed."""

    nodes_fresh_seconds: float | None
    rivals: bool
    refused_creations: bool
    engines: tuple[Target, ...]
    metrics: MetricsAsked = field(default_factory=MetricsAsked)


def questions_of(deployment: InferenceDeployment, children: Observed, memory: Memory, *, now: float) -> Questions:
    """Decide what else to read: nodes and other resources' groups only when something is amiss."""
    known = recalled(children, memory, now=now)
    return Questions(
        nodes_fresh_seconds=_nodes_fresh_seconds(deployment, children),
        rivals=any(is_partly_placed(group) for group in known.groups),
        refused_creations=any(wants_words(missing, now=now) for missing in known.memory.missing.values()),
        engines=targets_of(known),
        metrics=metrics_asked(deployment),
    )


def metrics_asked(deployment: InferenceDeployment) -> MetricsAsked:
    """Where the owner has the engines' metrics read."""
    asked = deployment.spec.metrics
    return MetricsAsked(asked.source, deployment.namespace, asked.labels)


def targets_of(known: Recalled) -> tuple[Target, ...]:
    """Where the engines are asked."""
    return tuple(target_of(group, known.memory.layouts) for group in known.groups)


def _nodes_fresh_seconds(deployment: InferenceDeployment, children: Observed) -> float | None:
    if may_be_lost(children.pods):
        return LOST_NODES_FRESH_SECONDS
    return GPU_NODES_FRESH_SECONDS if deployment.spec.runtime.device == "cuda" else None


def as_read(
    body: Mapping[str, Any], *, default_image: str | None, allowed_privileges: frozenset[str] = NO_PRIVILEGES
) -> tuple[InferenceDeployment, tuple[Refusal, ...]]:
    """The resource, and what of its spec cannot be read. Such a spec is empty: enough to say so in the status."""
    try:
        return InferenceDeployment.parse(body, default_image=default_image, allowed_privileges=allowed_privileges), ()
    except InvalidSpec as error:
        stand_in = InferenceDeployment.parse({**body, "spec": {"model": {"uri": "file:///"}}})
        spec = Spec(model=ModelSource(uri="file:///"), replicas=_readable_count(body))
        return replace(stand_in, spec=spec), (Refusal("spec", str(error)),)


def _readable_count(body: Mapping[str, Any]) -> int:
    """What was wanted until now, where that is the operator's to say; what stands in spec.replicas, if that can be."""
    spec = body.get("spec") or {}
    is_scaled = isinstance(spec, Mapping) and spec.get("scaling") is not None
    count = (body.get("status") or {}).get("desiredReplicas") if is_scaled else spec.get("replicas")
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_REPLICAS:
        return count
    return 1
