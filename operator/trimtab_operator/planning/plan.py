"""Plan of one reconcile iteration, from a cluster snapshot and the reconciler state. Pure; never raises.

Five stages, each with one value as its result:

    resolve           spec checked, model known, revisions rendered     planning/resolve.py
    choose_revision   of the spec, or the last known-good one           planning/choices.py
    choose_values     live values of the engines, by their metrics
    choose_count      replicas, within the GPU budget
    plan_groups       revision of each group, surge, pod lifecycle; then the children and everything else

    ClusterSnapshot ─┐                                     ┌── state_writes     ConfigMaps, written before anything else
                     ├── plan_reconcile ── ReconcilePlan ──┼── urgent_deletes   pods to delete in any case
    ReconcilerState ─┘                                     ├── children         Services, StatefulSets, the facts Job
                                                           ├── patches          live parameters of engines
                                                           ├── decisions, events
                                                           └── status_inputs    inputs of the status
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from trimtab_operator.builders.account import service_account
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.record import records_of
from trimtab_operator.builders.stateful_set import Rendered, rendered
from trimtab_operator.layout.node_gpus import too_few_gpus
from trimtab_operator.observed.actions import Action, Apply, Delete, Event, LiveValues, Patch
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.engines import view_of
from trimtab_operator.observed.groups import ordinal_of, revision_label
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.apply_backoff import FilteredActions, RepeatedApply, suppress_repeated_applies
from trimtab_operator.planning.children import plan_children, plan_rendezvous_secret, plan_tuning_state
from trimtab_operator.planning.choices import (
    CountChoice,
    RevisionChoice,
    ValuesChoice,
    choose_count,
    choose_revision,
    choose_values,
)
from trimtab_operator.planning.download_events import download_events
from trimtab_operator.planning.gpu_budget import (
    NO_ROOM_IN_BUDGET,
    GpuClaim,
    SurgeRoom,
    budget_events,
    current_gpu_claim,
    num_groups_during,
    surge_room,
)
from trimtab_operator.planning.model_facts import with_model_facts
from trimtab_operator.planning.optional_children import plan_optional
from trimtab_operator.planning.resolve import (
    Resolution,
    UnresolvedSpec,
    recall,
    resolve,
    with_known_facts,
    with_recorded_choices,
)
from trimtab_operator.planning.router import plan_client_service, plan_router, selects_router, view_router
from trimtab_operator.planning.snapshot import ClusterSnapshot, engine_targets
from trimtab_operator.planning.state import RecalledState, ReconcilerState
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.planning.tuning import current_replicas, dump_tuner_state, start_values
from trimtab_operator.resource.spec import REPLICAS_IGNORED, InferenceDeployment
from trimtab_operator.rollout.group_assignment import GroupAssignment, allowed_down, assign_revisions
from trimtab_operator.rollout.pod_lifecycle import PodLifecyclePlan, plan_pod_lifecycle
from trimtab_operator.rollout.rollback import RolloutState, SurgePlan, plan_rollout_state, plan_surge
from trimtab_operator.rollout.surge import unschedulable_groups
from trimtab_operator.tuner.decide import TunerOutput
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.parameters import Parameter, Value, Values
from trimtab_operator.tuner.safety import applicable_values


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    """Everything to do in one iteration, and the reconciler state to adopt once `state_writes` are written."""

    state: ReconcilerState
    status_inputs: StatusInputs
    desired_replicas: int
    state_writes: tuple[Apply, ...] = ()
    urgent_deletes: tuple[Delete, ...] = ()
    children: tuple[Action, ...] = ()
    patches: tuple[Patch, ...] = ()
    decisions: tuple[Decision, ...] = ()
    events: tuple[Event, ...] = ()
    repeated_applies: Mapping[str, RepeatedApply] = field(default_factory=dict)
    """Part of the state that may only be adopted after the children were applied."""
    gpu_claim: GpuClaim | None = None
    """Wanted and held GPUs; None without a GPU budget."""
    num_surge: int = 0
    """Replicas beyond the wanted ones during a rollout, including those that are being removed."""

    @property
    def claimed_replicas(self) -> int:
        """Number of replicas to claim from the GPU budget."""
        assert self.gpu_claim is not None
        return self.gpu_claim.running if self.status_inputs.share is None else self.status_inputs.share.replicas

    @property
    def grows(self) -> bool:
        """True if running replicas may be updated to a revision with more GPUs."""
        return self.status_inputs.share is not None and not self.status_inputs.share.is_growth_pending

    @property
    def removes_replicas(self) -> bool:
        """True if a replica is removed, which soon changes the observed children."""
        return any(isinstance(action, Delete) and action.kind == "StatefulSet" for action in self.children)

    @property
    def is_idle(self) -> bool:
        """True if only the status is to be written."""
        return not (
            self.state_writes or self.urgent_deletes or self.children or self.patches or self.decisions or self.events
        )


def plan_reconcile(snapshot: ClusterSnapshot, state: ReconcilerState) -> ReconcilePlan:
    """Return the plan for a snapshot. Never raises, whatever the cluster or the engines report."""
    plan = _plan(snapshot, state)
    if snapshot.deployment.is_paused:
        plan = _paused_plan(plan, state)
    if plan.gpu_claim is None and snapshot.installation.gpu_budget is not None:
        return replace(plan, gpu_claim=current_gpu_claim(snapshot.deployment, snapshot.children))
    return plan


def _paused_plan(plan: ReconcilePlan, state: ReconcilerState) -> ReconcilePlan:
    """Return a plan that only reports: timers and trials start when the resource is resumed."""
    status_inputs = replace(plan.status_inputs, is_paused=True, tuning=None, share=None)
    kept = replace(plan.state, tuner=state.tuner, rollout=state.rollout, queue=state.queue, idle=None)
    return ReconcilePlan(kept, status_inputs, plan.desired_replicas, repeated_applies=state.repeated_applies)


def _plan(snapshot: ClusterSnapshot, state: ReconcilerState) -> ReconcilePlan:
    found = resolve(snapshot, state)
    if isinstance(found, UnresolvedSpec):
        return _plan_unresolved(found)
    revision = choose_revision(found)
    values = choose_values(found, revision)
    count = choose_count(found, revision, values)
    groups = plan_groups(found, count)
    return _assemble(found, revision, values, count, groups)


def _plan_unresolved(found: UnresolvedSpec) -> ReconcilePlan:
    """Return a plan that reports the errors and leaves replicas as they are, except for their pod lifecycle."""
    known, deployment = found.known, found.snapshot.deployment
    replicas = current_replicas(deployment, known.state.tuner)
    lifecycle = plan_lifecycle(found.snapshot, known, None, allowed=allowed_down(deployment, replicas))
    status_inputs = replace(
        cluster_status_inputs(found.snapshot, known),
        validation_errors=found.errors,
        layout_errors=found.layout_errors,
    )
    plan = ReconcilePlan(
        known.state,
        status_inputs,
        status_inputs.desired_replicas,
        urgent_deletes=lifecycle.deletions,
        events=lifecycle.events,
    )
    return _with_model_reading(plan, found.reading)


@dataclass(frozen=True, slots=True)
class GroupsPlan:
    """The revision of each group, the surge groups, and the deletions and back-offs of pods.

    Without an assignment, StatefulSets stay as they are.
    """

    assignment: GroupAssignment | None
    surge: SurgePlan
    lifecycle: PodLifecyclePlan
    rollout: RolloutState
    is_surge_over_budget: bool = False

    @property
    def surge_obstacle(self) -> str | None:
        """Reason for which no surge replica can be created."""
        if self.is_surge_over_budget:
            return NO_ROOM_IN_BUDGET
        return None if self.surge.surge_obstacle is None else self.surge.surge_obstacle.message


def plan_groups(found: Resolution, chosen: CountChoice) -> GroupsPlan:
    """Assign revisions to the groups, and plan the lifecycle of their pods."""
    rollout, known = chosen.rollout, found.known
    allowed = 1 if rollout.is_canary else allowed_down(found.deployment, chosen.count)
    if rollout.target is None:
        lifecycle = plan_lifecycle(found.snapshot, known, None, allowed=allowed)
        return GroupsPlan(None, SurgePlan(0), lifecycle, rollout.state)
    surge, limit = _plan_surge(found, chosen, rollout.target)
    limited = replace(surge, groups=min(surge.groups, limit.groups))
    assignment = assign_revisions(
        rollout.target,
        known.observed,
        replicas=chosen.count,
        unverified=rollout.unverified,
        loads=_request_counts(found.snapshot),
        surge=limited.groups,
        max_new_groups=max(0, chosen.count - len(known.groups)) + limit.now,
        known_good=found.known_good if rollout.is_canary else None,
        without_node=unschedulable_groups(known.observed, now=datetime.fromtimestamp(found.snapshot.at, UTC)),
        max_placed=known.state.max_placed,
    )
    lifecycle = plan_lifecycle(found.snapshot, known, assignment, allowed=allowed)
    state = replace(rollout.state, surge_obstacle=surge.surge_obstacle)
    return GroupsPlan(assignment, limited, lifecycle, state, limit.groups < surge.groups)


def _plan_surge(found: Resolution, chosen: CountChoice, target: Rendered) -> tuple[SurgePlan, SurgeRoom]:
    """Return the surge groups of a rollout, and how many of them the GPU budget has room for."""
    snapshot, known = found.snapshot, found.known
    surge = plan_surge(
        chosen.rollout.state.surge_obstacle,
        target,
        known.observed,
        replicas=chosen.count,
        now=datetime.fromtimestamp(snapshot.at, UTC),
        rejected=known.state.rejected_group,
    )
    room = surge_room(chosen.gpu_claim, chosen.count, snapshot.gpu_claims, snapshot.installation.gpu_budget)
    return surge, room


def plan_lifecycle(
    snapshot: ClusterSnapshot, known: RecalledState, assignment: GroupAssignment | None, *, allowed: int
) -> PodLifecyclePlan:
    """Plan deletions and back-offs of pods.

    Without an assignment, StatefulSets stay as they are. `allowed` groups may be down for it.
    """
    revision = None if assignment is None else assignment.wanted.revision
    revisions = None if assignment is None else {n: one.revision for n, one in assignment.revisions.items()}
    return plan_pod_lifecycle(
        known.observed,
        nodes=snapshot.nodes,
        partly_placed=snapshot.partly_placed,
        now=datetime.fromtimestamp(snapshot.at, UTC),
        change_id=None if revision is None else f"{snapshot.deployment.generation}-{revision}",
        revisions=revisions,
        allowed=allowed,
        max_placed=known.state.max_placed,
    )


# --- assembly ---------------------------------------------------------------------------------------------------------


def _assemble(
    found: Resolution, revision: RevisionChoice, values: ValuesChoice, count: CountChoice, groups: GroupsPlan
) -> ReconcilePlan:
    """Return the plan of all choices."""
    known, deployment = found.known, found.deployment
    children = _children(found, count, groups)
    filtered = suppress_repeated_applies(children, known.state.repeated_applies, now=found.snapshot.at)
    plan = ReconcilePlan(
        state=replace(
            known.state,
            tuner=values.tuned.state,
            rollout=groups.rollout,
            queue=values.queue.sent,
            idle=values.idle,
            comparison=revision.comparison,
            ignored_replicas=None if deployment.spec.scaling is None else deployment.spec.replicas,
        ),
        status_inputs=_status_inputs(found, values, count, groups),
        desired_replicas=count.count,
        state_writes=_plan_state_writes(found, groups.rollout, values.tuned),
        urgent_deletes=groups.lifecycle.deletions,
        children=filtered.actions,
        patches=_patches(found, values),
        decisions=values.tuned.decisions,
        events=_events(found, values, count, groups, filtered),
        repeated_applies=filtered.repeated_applies,
        gpu_claim=count.gpu_claim,
        num_surge=max(0, num_groups_during(known.groups, children) - count.count),
    )
    return _with_model_reading(plan, found.reading)


def _children(found: Resolution, count: CountChoice, groups: GroupsPlan) -> tuple[Action, ...]:
    """Return the actions for the children, in the order of their dependencies."""
    deployment, observed, snapshot = found.deployment, found.known.observed, found.snapshot
    to_router = selects_router(deployment, observed, found.known.groups)
    always: tuple[Action, ...] = (
        *plan_applies([service_account(deployment)], observed),
        *plan_router(deployment, observed, snapshot.installation, admin_token=snapshot.token),
    )
    if groups.assignment is None or count.rollout.target is None:
        return (*always, *plan_client_service(deployment, observed, to_router=to_router))
    target = count.rollout.target.deployment
    return (
        *always,
        *plan_rendezvous_secret(target, observed, token=snapshot.token),
        *plan_children(groups.assignment, observed, held=groups.lifecycle.held, to_router=to_router),
        *plan_optional(target, observed, snapshot.installation, replicas=count.count),
    )


def _status_inputs(found: Resolution, values: ValuesChoice, count: CountChoice, groups: GroupsPlan) -> StatusInputs:
    deployment, known, snapshot = found.deployment, found.known, found.snapshot
    rollout, scaling = count.rollout, deployment.spec.scaling
    to_router = selects_router(deployment, known.observed, known.groups)
    return replace(
        cluster_status_inputs(snapshot, known),
        validation_errors=found.errors,
        has_older_pods=found.has_older_pods,
        desired_replicas=count.count,
        revision=found.wanted.revision,
        model_revision=found.wanted.model_revision,
        engines=_engine_views(snapshot, known),
        tuning=values.tuned if known.groups else None,
        history=values.tuned.state.history,
        queue=values.queue,
        model=None if found.gate.is_open else found.gate.model,
        failed_change=rollout.failed,
        canary_message=rollout.canary_message,
        surge_obstacle=groups.surge_obstacle,
        target=None if rollout.target is None else rollout.target.deployment,
        share=count.share,
        too_few_gpus=_too_few_gpus(snapshot),
        router=view_router(deployment, known.observed, is_selected=to_router),
        is_scaled_from_zero=scaling is not None and scaling.min_replicas == 0,
        metrics_source=_metrics_source(snapshot),
        metrics_fallback_reason=next(
            (seen.fallback_reason for _, seen in sorted(snapshot.engines.items()) if seen.fallback_reason), None
        ),
    )


def _events(
    found: Resolution, values: ValuesChoice, count: CountChoice, groups: GroupsPlan, filtered: FilteredActions
) -> tuple[Event, ...]:
    deployment, known = found.deployment, found.known
    return (
        *_ignored_replicas_events(deployment, known.state.ignored_replicas),
        *download_events(deployment, _engine_views(found.snapshot, known)),
        *budget_events(deployment, count.share),
        *groups.surge.events,
        *groups.lifecycle.events,
        *filtered.events,
        *values.queue.events,
    )


def _ignored_replicas_events(deployment: InferenceDeployment, before: int | None) -> tuple[Event, ...]:
    """Return an Event if `spec.replicas` was written, for example through /scale, while `spec.scaling` is set.

    API servers that support CEL validation rules reject such a write; older ones accept it.
    """
    replicas = deployment.spec.replicas
    if deployment.spec.scaling is None or before is None or replicas == before:
        return ()
    message = f"spec.replicas: {replicas} {REPLICAS_IGNORED}"
    return (Event("Warning", "ReplicasIgnored", message, str(deployment.generation)),)


def cluster_status_inputs(snapshot: ClusterSnapshot, known: RecalledState) -> StatusInputs:
    """Return the status inputs known from the cluster only, before rendering and without engines."""
    present = {group.ordinal for group in known.groups}
    pods = known.observed.pods
    draining = tuple(pod for pod in pods if ordinal_of(pod) is not None and ordinal_of(pod) not in present)
    count = current_replicas(snapshot.deployment, known.state.tuner)
    return StatusInputs(count, groups=known.groups, draining=draining)


def status_inputs_after_error(
    snapshot: ClusterSnapshot, state: ReconcilerState, problem: tuple[str, str]
) -> StatusInputs:
    """Return the status inputs for a plan that could not be executed: the present children and the problem."""
    records = records_of(snapshot.children.stateful_sets)
    snapshot = with_known_facts(with_recorded_choices(snapshot, records))
    snapshot = replace(snapshot, deployment=with_model_facts(snapshot.deployment, snapshot.children))
    status_inputs = cluster_status_inputs(snapshot, recall(snapshot, state))
    if snapshot.parse_errors:
        return replace(status_inputs, problem=problem)
    wanted = rendered(snapshot.deployment, token_hashes=TokenHashes.of(snapshot.token), records=records)
    return replace(status_inputs, revision=wanted.revision, problem=problem)


def _too_few_gpus(snapshot: ClusterSnapshot) -> str | None:
    return (
        too_few_gpus(snapshot.deployment, snapshot.nodes) if snapshot.deployment.spec.runtime.device == "cuda" else None
    )


def _metrics_source(snapshot: ClusterSnapshot) -> str | None:
    """Return the sources that metrics were read from, comma-separated."""
    return (
        ", ".join(sorted({seen.source.value for seen in snapshot.engines.values() if seen.source is not None})) or None
    )


def _plan_state_writes(found: Resolution, rollout: RolloutState, tuned: TunerOutput) -> tuple[Apply, ...]:
    """Return the ConfigMaps that must be written before their contents are acted on."""
    deployment, observed, key = found.deployment, found.known.observed, found.snapshot.token
    return (
        *plan_rollout_state(deployment, observed, rollout, key=key, now=found.snapshot.at),
        *plan_tuning_state(deployment, observed, dump_tuner_state(tuned.state, key=key)),
    )


def _patches(found: Resolution, values: ValuesChoice) -> tuple[Patch, ...]:
    """Return the patches that bring each engine to its start values, the tuned values and then the scheduling policy.

    They are sent one after the other, so that an engine that rejects one still gets the others.
    """
    targets = {target.group: target for target in engine_targets(found.known)}
    starts = _start_values(found, values.tuned.state.applied)
    patches = []
    for group, target in targets.items():
        seen = found.snapshot.engines.get(group)
        if target.address is None or seen is None or seen.config is None:
            continue
        start, tuned = applicable_values(seen.config, starts.get(group, {})), values.tuned.patches.get(group, {})
        steps = ({**start, **tuned}, start if tuned else {}, values.queue.patches.get(group, {}))
        first, second, *_ = (*(_by_name(step) for step in steps if step), None, None)
        if first is not None:
            patches.append(Patch(target, first, seen.config.generation, second, needs_state=bool(tuned)))
    return tuple(patches)


def _by_name(fields: Mapping[Parameter, Value] | LiveValues) -> LiveValues:
    """Return values by their names in the admin API."""
    return {str(name): value for name, value in fields.items()}


def _start_values(found: Resolution, tuned: Values) -> dict[str, Values]:
    """Return the start values of each group's revision, without the parameters that the tuner sets.

    They are sent in every tuning mode: an edit of a start value reaches running engines, and an engine that was started
    before the edit gets it again after a restart. Groups of other revisions keep their values.
    """
    specs = {one.revision: one.deployment.spec for one in (found.known_good, found.wanted) if one is not None}
    known = {revision: start_values(spec) for revision, spec in specs.items()}
    revisions = {group.name: revision_label(group.leader) for group in found.known.groups if group.leader is not None}
    return {
        name: {parameter: value for parameter, value in known[revision].items() if parameter not in tuned}
        for name, revision in revisions.items()
        if revision in known
    }


def _request_counts(snapshot: ClusterSnapshot) -> dict[str, float]:
    """Return the number of running and waiting requests of each engine that reported."""
    gauges = {name: seen.sample.gauges for name, seen in snapshot.engines.items() if seen.sample is not None}
    return {name: now.running + now.waiting for name, now in gauges.items()}


def _engine_views(snapshot: ClusterSnapshot, known: RecalledState) -> dict[str, EngineView]:
    layouts = known.state.layouts_of(known.groups)
    return {
        group.name: view_of(group, snapshot.engines.get(group.name), layouts.get(group.name)) for group in known.groups
    }


def _with_model_reading(plan: ReconcilePlan, reading: tuple[Action, ...]) -> ReconcilePlan:
    """Return the plan extended by reading the model.

    Stored results come first. The Job comes last, so that running engines do not wait for it.
    """
    kept = tuple(action for action in reading if isinstance(action, Apply) and action.manifest["kind"] == "ConfigMap")
    rest = tuple(action for action in reading if action not in kept)
    return replace(plan, state_writes=(*kept, *plan.state_writes), children=(*plan.children, *rest))
