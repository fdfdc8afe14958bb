"""Inputs of the status, collected by a reconcile plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.gpu_budget import BudgetShare
from trimtab_operator.planning.model_facts import FactsState
from trimtab_operator.planning.router import RouterView
from trimtab_operator.planning.scheduling_policy import SchedulingPlan
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.rollback import FailedChange
from trimtab_operator.tuner.decide import TunerOutput
from trimtab_operator.tuner.moves import Decision


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Observed and wanted state to report in the status.

    `problem` is a (reason, message) that blocks the reconciler. `revision` is the revision of the spec, empty if it is
    invalid. `engines` holds reports by group name, None if engines were not polled. `validation_errors` are those of
    the whole spec, `layout_errors` those of the layout. `model` is the state of reading the model, None if it does not
    matter. `target` is the revision that replicas are updated to, None to leave them as they are.
    """

    desired_replicas: int
    groups: tuple[Group, ...] = ()
    draining: tuple[Manifest, ...] = ()
    revision: str = ""
    engines: Mapping[str, EngineView] | None = None
    tuning: TunerOutput | None = None
    history: tuple[Decision, ...] = ()
    """Latest decisions, newest last, reported while no replica runs too."""
    queue: SchedulingPlan = field(default_factory=SchedulingPlan)
    validation_errors: tuple[ValidationError, ...] = ()
    layout_errors: tuple[ValidationError, ...] = ()
    model: FactsState | None = None
    failed_change: FailedChange | None = None
    target: InferenceDeployment | None = None
    too_few_gpus: str | None = None
    canary_message: str | None = None
    """What a change that is being tried waits for."""
    surge_obstacle: str | None = None
    """Why no surge replica can be created."""
    problem: tuple[str, str] | None = None
    minor_problem: tuple[str, str] | None = None
    """(reason, message) of objects that could not be written and that engines serve without."""
    model_revision: str | None = None
    """Commit that replicas are rendered for; None if the model is not downloaded."""
    metrics_source: str | None = None
    """Source of the engines' metrics; None if they were not read."""
    metrics_fallback_reason: str | None = None
    """Why metrics were read from the pods instead of Prometheus."""
    share: BudgetShare | None = None
    """Share of the GPU budget; None without a budget or a target."""
    is_paused: bool = False
    """True if the resource is paused by its annotation."""
    router: RouterView | None = None
    """State of the router; None without one."""
    is_scaled_from_zero: bool = False
    """True if held requests raise the replica count from zero."""
    has_older_pods: bool = False
    """True if replicas run pods that another operator version or other defaults rendered for the same spec."""
