"""What a turn found out, for whoever tells it: all that a status is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.gpu_budget import Share
from trimtab_operator.planning.model_facts import FactsState
from trimtab_operator.planning.scheduling_policy import QueueTurn
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.validation_error import Refusal
from trimtab_operator.rollout.rollback import FailedChange
from trimtab_operator.tuner.decide import Outcome


@dataclass(frozen=True, slots=True)
class Findings:
    """What is so, and what is wanted. `problem` is a (reason, message) that keeps the loop from working.

    `revision` is what the spec renders to; empty when it is refused, and nothing is rendered. `engines` is what engines
    said, by the group's name; None: nobody was asked. `refusals` is everything that is wrong with the spec,
    `layout_refusals` those of them that concern the layout. `model` is what is known of the model; None: nobody looked,
    or it does not matter. `target` is what replicas are brought to; None: they are left as they are.
    """

    desired_replicas: int
    groups: tuple[Group, ...] = ()
    draining: tuple[Manifest, ...] = ()
    revision: str = ""
    engines: Mapping[str, EngineView] | None = None
    tuning: Outcome | None = None
    queue: QueueTurn = field(default_factory=QueueTurn)
    refusals: tuple[Refusal, ...] = ()
    layout_refusals: tuple[Refusal, ...] = ()
    model: FactsState | None = None
    failed_change: FailedChange | None = None
    target: InferenceDeployment | None = None
    too_few_gpus: str | None = None
    trying: str | None = None
    """What a change that has to show first that it is good waits for."""
    no_room: str | None = None
    """Why no replica comes up beside those that it is to replace."""
    problem: tuple[str, str] | None = None
    model_revision: str | None = None
    """The pin that replicas are rendered for; None: their model is not downloaded."""
    metrics_source: str | None = None
    """Where the engines' metrics were read; None: they were not."""
    metrics_detour: str | None = None
    """Why they were read from the pods instead of from Prometheus."""
    share: Share | None = None
    """What the GPU budget allows; None: there is none, or nothing is brought about."""
    is_paused: bool = False
    """Whether nothing is changed, as its owner asks."""
    keeps_older_pods: bool = False
    """Whether replicas run what another operator, or this one with other defaults, rendered for the same spec."""
