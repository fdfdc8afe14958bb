"""Plan of one reconcile iteration, from a cluster snapshot and the reconciler state. Pure; never raises.

The order is: validate the spec → read the model → choose the revision (the spec's, or the last known-good one) → tune
by the engines' metrics → choose the replica count → plan the children. The tuner runs before the children are planned,
so that its replica count takes effect in the same iteration.

    ClusterSnapshot ─┐                                     ┌── state_writes     ConfigMaps, written before anything else
                     ├── plan_reconcile ── ReconcilePlan ──┼── urgent_deletes   pods to delete in any case
    ReconcilerState ─┘                                     ├── children         Services, StatefulSets, the facts Job
                                                           ├── patches          live parameters of engines
                                                           ├── decisions, events
                                                           └── status_inputs    inputs of the status
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from trimtab_operator.builders.account import service_account
from trimtab_operator.builders.admin_token import token_hash
from trimtab_operator.builders.record import Record, asked_of, records_of
from trimtab_operator.builders.stateful_set import Rendered, pod_template, rendered
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.observed.actions import Action, Apply, Delete, Event, LiveValues, Patch
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.engines import ReportedScheduling, observe_replica, view_of
from trimtab_operator.observed.groups import ordinal_of
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.observed.router import router_load
from trimtab_operator.planning.apply_backoff import RepeatedApply, suppress_repeated_applies
from trimtab_operator.planning.children import plan_children, plan_rendezvous_secret, plan_tuning_state
from trimtab_operator.planning.download_events import download_events
from trimtab_operator.planning.gpu_budget import (
    NO_ROOM_IN_BUDGET,
    GpuClaim,
    budget_events,
    build_gpu_claim,
    compute_share,
    current_gpu_claim,
    num_groups_during,
    surge_room,
)
from trimtab_operator.planning.model_facts import (
    FactsState,
    ModelKnown,
    StartGate,
    evaluate_start_gate,
    plan_facts,
    plan_signature,
    with_model_facts,
    with_stored_facts,
    with_verified_facts,
)
from trimtab_operator.planning.optional_children import plan_optional
from trimtab_operator.planning.router import (
    plan_client_service,
    plan_router,
    router_errors,
    scale_from_or_to_zero,
    selects_router,
    view_router,
    watch_idle,
)
from trimtab_operator.planning.scheduling_policy import (
    SchedulingPlan,
    is_deadline_active,
    plan_scheduling,
    wanted_scheduling,
)
from trimtab_operator.planning.snapshot import ClusterSnapshot, engine_targets
from trimtab_operator.planning.state import RecalledState, ReconcilerState, recall_state, with_reported_layouts
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.planning.tuning import (
    current_replicas,
    desired_replicas,
    dump_tuner_state,
    load_tuner_state,
    settings_of,
    step_cost_prior,
    with_current_replicas,
)
from trimtab_operator.resource.spec import REPLICAS_IGNORED, InferenceDeployment
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.canary_comparison import CanaryComparison, find_regression
from trimtab_operator.rollout.group_assignment import GroupAssignment, allowed_down, assign_revisions
from trimtab_operator.rollout.pod_lifecycle import PodLifecyclePlan, plan_pod_lifecycle
from trimtab_operator.rollout.rollback import (
    RolloutPlan,
    RolloutState,
    SurgePlan,
    change_of,
    plan_rollout,
    plan_rollout_state,
    plan_surge,
    render_known_good,
    revision_spec_of,
    stored_rollout,
)
from trimtab_operator.rollout.surge import unschedulable_groups
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.settings import Pace
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.validation.rules import validation_errors

RECORDED_FIELDS = ("spec.model", "spec.runtime", "spec.parallelism")  # their effect on pods is taken from the record


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
    snapshot = _with_verified_facts(snapshot)
    records, seen = records_of(snapshot.children.stateful_sets), snapshot
    snapshot = _with_recorded_image(snapshot, records)
    known = _recall(snapshot, state)
    errors = snapshot.parse_errors or (
        *validation_errors(snapshot.deployment),
        *router_errors(snapshot.deployment, snapshot.installation),
    )
    rollout = state.rollout or stored_rollout(
        snapshot.deployment, snapshot.children, key=snapshot.token, former_key=snapshot.former_token
    )
    if snapshot.parse_errors or (errors and not _is_already_running(snapshot, known, rollout, records, errors)):
        return _plan_invalid_spec(snapshot, known, errors)
    token_sha256 = token_hash(snapshot.token)
    reading = plan_facts(with_model_facts(snapshot.deployment, known.observed), known.observed, now=snapshot.at)
    reading = plan_signature(snapshot.deployment, known.observed, reading, key=snapshot.token)
    known = replace(known, observed=with_stored_facts(known.observed, reading))
    snapshot = replace(snapshot, deployment=with_model_facts(snapshot.deployment, known.observed))
    wanted = rendered(snapshot.deployment, admin_token_sha256=token_sha256, records=records)
    known_good = render_known_good(rollout, wanted, admin_token_sha256=token_sha256, records=records)
    gate = _start_gate(snapshot, known, wanted, known_good)
    if gate.validation_errors:
        return _with_model_reading(
            _plan_invalid_spec(snapshot, known, gate.validation_errors, layout_errors=gate.validation_errors), reading
        )
    known = replace(known, state=replace(known.state, comparison=_update_comparison(snapshot, known, rollout, wanted)))
    rollout_plan = plan_rollout(
        rollout,
        wanted,
        known_good,
        known.groups,
        known.state.layouts_of(known.groups),
        may_start=gate.is_open,
        now=snapshot.at,
        find_regression=functools.partial(_find_regression, known.state.comparison, wanted, known_good),
    )
    next_step = _plan_next_step(snapshot, known, wanted, gate, rollout_plan, known_good)
    has_older_pods = _has_older_pods(seen, known, wanted)
    status_inputs = replace(next_step.status_inputs, validation_errors=errors, has_older_pods=has_older_pods)
    return _with_model_reading(replace(next_step, status_inputs=status_inputs), reading)


def _with_verified_facts(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    children = with_verified_facts(
        snapshot.deployment, snapshot.children, key=snapshot.token, former_key=snapshot.former_token
    )
    return replace(snapshot, children=children)


def _is_already_running(
    snapshot: ClusterSnapshot,
    known: RecalledState,
    rollout: RolloutState,
    records: Mapping[str, Record],
    errors: tuple[ValidationError, ...],
) -> bool:
    """Return True if an invalid spec already runs because an older operator accepted it.

    Its replicas are then managed as recorded, and the errors are reported. This does not apply to fields that an
    administrator forbids.
    """
    revision_spec = revision_spec_of(with_model_facts(snapshot.deployment, known.observed))
    is_running = rollout.known_good == revision_spec and asked_of(snapshot.deployment) in records
    return is_running and all(error.field.startswith(RECORDED_FIELDS) for error in errors)


def _with_recorded_image(snapshot: ClusterSnapshot, records: Mapping[str, Record]) -> ClusterSnapshot:
    """Return the snapshot with the recorded image if the spec has none, as the operator's default may have changed
    since.
    """
    record = records.get(asked_of(snapshot.deployment))
    if record is None or record.image is None or snapshot.deployment.spec.runtime.image is not None:
        return snapshot
    return replace(snapshot, deployment=replace(snapshot.deployment, image=record.image))


def _recall(snapshot: ClusterSnapshot, state: ReconcilerState) -> RecalledState:
    known = recall_state(snapshot.children, state, now=snapshot.at, failed_creations=snapshot.failed_creations)
    layouts = with_reported_layouts(known.state, known.groups, snapshot.engines)
    return replace(known, state=replace(layouts, tuner=_recall_tuner_state(snapshot, state)))


def _recall_tuner_state(snapshot: ClusterSnapshot, state: ReconcilerState) -> TunerState:
    """Return the tuner's state from this loop, or as stored by a previous one."""
    kept = state.tuner or load_tuner_state(
        snapshot.deployment, snapshot.children.config_maps, key=snapshot.token, former_key=snapshot.former_token
    )
    return with_current_replicas(snapshot.deployment, kept)


def _plan_invalid_spec(
    snapshot: ClusterSnapshot,
    known: RecalledState,
    errors: tuple[ValidationError, ...],
    *,
    layout_errors: tuple[ValidationError, ...] = (),
) -> ReconcilePlan:
    """Return a plan that reports the errors and leaves replicas as they are, except for their pod lifecycle."""
    replicas = current_replicas(snapshot.deployment, known.state.tuner)
    lifecycle = _plan_lifecycle(snapshot, known, None, allowed=allowed_down(snapshot.deployment, replicas))
    status_inputs = replace(
        cluster_status_inputs(snapshot, known), validation_errors=errors, layout_errors=layout_errors
    )
    return ReconcilePlan(
        known.state,
        status_inputs,
        status_inputs.desired_replicas,
        urgent_deletes=lifecycle.deletions,
        events=lifecycle.events,
    )


def _start_gate(
    snapshot: ClusterSnapshot, known: RecalledState, wanted: Rendered, known_good: Rendered | None
) -> StartGate:
    """Return whether engines may be started or changed."""
    is_known_good = known_good is not None and known_good.revision == wanted.revision
    gpu = gpu_for(snapshot.deployment, snapshot.nodes or ())
    return evaluate_start_gate(
        snapshot.deployment, known.observed, revision=wanted.revision, gpu=gpu, is_known_good=is_known_good
    )


def _plan_next_step(
    snapshot: ClusterSnapshot,
    known: RecalledState,
    wanted: Rendered,
    gate: StartGate,
    rollout_plan: RolloutPlan,
    known_good: Rendered | None,
) -> ReconcilePlan:
    """Plan the next step towards the target of the rollout plan.

    If the GPU budget has no room for it, the target is the last known-good revision.
    """
    deployment = snapshot.deployment
    target = deployment if rollout_plan.target is None else rollout_plan.target.deployment
    load = router_load(known.observed.router_pods, snapshot.routers, now=snapshot.at)
    idle = watch_idle(known.state.idle, load, known.groups, snapshot.engines, now=snapshot.at)
    tuned = scale_from_or_to_zero(
        deployment, _run_tuner(snapshot, known, target, gate.model), load, idle, known.groups, now=snapshot.at
    )
    queue = plan_scheduling(deployment, _reported_scheduling(snapshot, known), known.state.queue)
    current_count = current_replicas(deployment, known.state.tuner)
    count = current_count if deployment.is_paused else desired_replicas(deployment, tuned)
    gpu_claim = share = None
    if rollout_plan.target is not None and not deployment.is_paused and snapshot.installation.gpu_budget is not None:
        gpu_claim = build_gpu_claim(
            target,
            known.observed,
            wanted=count,
            revision=rollout_plan.target.revision,
            known_good=known_good.deployment if known_good is not None and rollout_plan.is_canary else None,
        )
        share = compute_share(gpu_claim, snapshot.gpu_claims, snapshot.installation.gpu_budget)
        if share.is_growth_pending:
            rollout_plan = _rollout_within_current_gpus(rollout_plan, known_good, known)
            if rollout_plan.target is None:
                gpu_claim = replace(
                    gpu_claim, min_replicas=gpu_claim.running, wanted=max(gpu_claim.wanted, gpu_claim.running)
                )
                share = replace(share, replicas=gpu_claim.running)
            else:
                target = rollout_plan.target.deployment
        count = share.replicas
    now = datetime.fromtimestamp(snapshot.at, UTC)
    surge, is_over_budget, max_new_groups = SurgePlan(0), False, 0
    if rollout_plan.target is not None:
        surge = plan_surge(
            rollout_plan.state.surge_obstacle,
            rollout_plan.target,
            known.observed,
            replicas=count,
            now=now,
            rejected=known.state.rejected_group,
        )
        surge_limit = surge_room(gpu_claim, count, snapshot.gpu_claims, snapshot.installation.gpu_budget)
        is_over_budget = surge_limit.groups < surge.groups
        surge = replace(surge, groups=min(surge.groups, surge_limit.groups))
        max_new_groups = max(0, count - len(known.groups)) + surge_limit.now
    rollout = replace(
        rollout_plan.state,
        surge_obstacle=surge.surge_obstacle if rollout_plan.target is not None else rollout_plan.state.surge_obstacle,
    )
    assignment = None
    if rollout_plan.target is not None:
        assignment = assign_revisions(
            rollout_plan.target,
            known.observed,
            replicas=count,
            unverified=rollout_plan.unverified,
            loads=_request_counts(snapshot),
            surge=surge.groups,
            max_new_groups=max_new_groups,
            known_good=known_good if rollout_plan.is_canary else None,
            without_node=unschedulable_groups(known.observed, now=now),
            max_placed=known.state.max_placed,
        )
    allowed = 1 if rollout_plan.is_canary else allowed_down(deployment, count)
    lifecycle = _plan_lifecycle(snapshot, known, assignment, allowed=allowed)
    to_router = selects_router(deployment, known.observed, known.groups)
    children: tuple[Action, ...] = (
        *plan_applies([service_account(deployment)], known.observed),
        *plan_router(deployment, known.observed, snapshot.installation, admin_token=snapshot.token),
    )
    if assignment is None:
        children = (*children, *plan_client_service(deployment, known.observed, to_router=to_router))
    else:
        children = (
            *children,
            *plan_rendezvous_secret(target, known.observed, token=snapshot.token),
            *plan_children(assignment, known.observed, held=lifecycle.held, to_router=to_router),
            *plan_optional(target, known.observed, snapshot.installation, replicas=count),
        )
    filtered = suppress_repeated_applies(children, known.state.repeated_applies, now=snapshot.at)
    return ReconcilePlan(
        state=replace(
            known.state,
            tuner=tuned.state,
            rollout=rollout,
            queue=queue.sent,
            idle=idle,
            ignored_replicas=None if deployment.spec.scaling is None else deployment.spec.replicas,
        ),
        status_inputs=replace(
            cluster_status_inputs(snapshot, known),
            desired_replicas=count,
            revision=wanted.revision,
            model_revision=wanted.model_revision,
            engines=_engine_views(snapshot, known),
            tuning=tuned if known.groups else None,
            queue=queue,
            model=None if gate.is_open else gate.model,
            failed_change=rollout_plan.failed,
            canary_message=rollout_plan.canary_message,
            surge_obstacle=NO_ROOM_IN_BUDGET
            if is_over_budget
            else None
            if surge.surge_obstacle is None
            else surge.surge_obstacle.message,
            target=None if rollout_plan.target is None else rollout_plan.target.deployment,
            share=share,
            too_few_gpus=_too_few_gpus(snapshot),
            router=view_router(deployment, known.observed, is_selected=to_router),
            is_scaled_from_zero=deployment.spec.scaling is not None and deployment.spec.scaling.min_replicas == 0,
            metrics_source=_metrics_source(snapshot),
            metrics_fallback_reason=next(
                (seen.fallback_reason for _, seen in sorted(snapshot.engines.items()) if seen.fallback_reason), None
            ),
        ),
        desired_replicas=count,
        state_writes=_plan_state_writes(deployment, known, rollout, tuned, key=snapshot.token, now=snapshot.at),
        urgent_deletes=lifecycle.deletions,
        children=filtered.actions,
        patches=_patches(snapshot, known, tuned, queue),
        decisions=tuned.decisions,
        events=(
            *_ignored_replicas_events(deployment, known.state.ignored_replicas),
            *download_events(deployment, _engine_views(snapshot, known)),
            *budget_events(deployment, share),
            *surge.events,
            *lifecycle.events,
            *filtered.events,
            *queue.events,
        ),
        repeated_applies=filtered.repeated_applies,
        gpu_claim=gpu_claim,
        num_surge=max(0, num_groups_during(known.groups, children) - count),
    )


def _rollout_within_current_gpus(
    rollout_plan: RolloutPlan, known_good: Rendered | None, known: RecalledState
) -> RolloutPlan:
    """Return the rollout plan for when the wanted revision needs more GPUs than are free.

    It targets the last known-good revision if that needs no additional GPUs; otherwise replicas stay as they are.
    """
    target = None
    if known_good is not None and not build_gpu_claim(known_good.deployment, known.observed, wanted=0).smaller_replicas:
        target = known_good
    return RolloutPlan(rollout_plan.state, target, rollout_plan.failed)


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
    snapshot = _with_verified_facts(snapshot)
    records = records_of(snapshot.children.stateful_sets)
    snapshot = _with_recorded_image(snapshot, records)
    snapshot = replace(snapshot, deployment=with_model_facts(snapshot.deployment, snapshot.children))
    status_inputs = cluster_status_inputs(snapshot, _recall(snapshot, state))
    if snapshot.parse_errors:
        return replace(status_inputs, problem=problem)
    wanted = rendered(snapshot.deployment, admin_token_sha256=token_hash(snapshot.token), records=records)
    return replace(status_inputs, revision=wanted.revision, problem=problem)


def _plan_lifecycle(
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


def _has_older_pods(snapshot: ClusterSnapshot, known: RecalledState, wanted: Rendered) -> bool:
    """Return True if this operator would now render other pods for the same spec."""
    today = with_model_facts(snapshot.deployment, known.observed)
    return wanted.is_recorded and wanted.template != pod_template(today, admin_token_sha256=token_hash(snapshot.token))


def _too_few_gpus(snapshot: ClusterSnapshot) -> str | None:
    return (
        too_few_gpus(snapshot.deployment, snapshot.nodes) if snapshot.deployment.spec.runtime.device == "cuda" else None
    )


def _metrics_source(snapshot: ClusterSnapshot) -> str | None:
    """Return the sources that metrics were read from, comma-separated."""
    return (
        ", ".join(sorted({seen.source.value for seen in snapshot.engines.values() if seen.source is not None})) or None
    )


def _run_tuner(
    snapshot: ClusterSnapshot, known: RecalledState, target: InferenceDeployment, model: FactsState
) -> TunerOutput:
    """Run the tuner on the observed replicas.

    Start values and bounds are those of the running revision; mode, objectives and scaling are the latest of the spec.
    The prior is the roofline of the model on its GPU if both are known, otherwise the stored one.
    """
    spec_settings = settings_of(snapshot.deployment.spec)
    by_deadline = is_deadline_active(_reported_scheduling(snapshot, known), wanted_scheduling(snapshot.deployment.spec))
    settings = replace(
        settings_of(target.spec),
        mode=spec_settings.mode,
        objectives=replace(spec_settings.objectives, order_queues=by_deadline),
        scaling=spec_settings.scaling,
        pace=Pace(tick_seconds=snapshot.tick_seconds, sample_seconds=snapshot.sample_seconds),
    )
    state = known.state.tuner
    assert state is not None
    gpu = gpu_for(target, snapshot.nodes or ())
    if isinstance(model, ModelKnown) and gpu is not None:
        settings = replace(settings, prior=step_cost_prior(model.facts, target.spec.parallelism, gpu))
    elif state.model is not None:
        settings = replace(settings, prior=state.model.prior)
    observations = [observe_replica(group, snapshot.engines.get(group.name)) for group in known.groups]
    return decide(observations, state, settings, snapshot.at)


def _plan_state_writes(
    deployment: InferenceDeployment,
    known: RecalledState,
    rollout: RolloutState,
    tuned: TunerOutput,
    *,
    key: str,
    now: float,
) -> tuple[Apply, ...]:
    """Return the ConfigMaps that must be written before their contents are acted on."""
    return (
        *plan_rollout_state(deployment, known.observed, rollout, key=key, now=now),
        *plan_tuning_state(deployment, known.observed, dump_tuner_state(tuned.state, key=key)),
    )


def _update_comparison(
    snapshot: ClusterSnapshot, known: RecalledState, rollout: RolloutState, wanted: Rendered
) -> CanaryComparison | None:
    """Return the comparison of the canary with the other replicas while a change is being tried."""
    attempt = rollout.attempt
    if (
        attempt is None
        or attempt.ready_since is None
        or attempt.change != change_of(snapshot.deployment, wanted.revision)
    ):
        return None
    ready = [group for group in known.groups if group.is_ready]
    new = {group.name for group in ready if group.revision == wanted.revision}
    before = known.state.comparison
    found = before if before is not None and before.change == attempt.change else CanaryComparison(attempt.change)
    return found.with_finished(snapshot.engines, new, {group.name for group in ready} - new)


def _find_regression(found: CanaryComparison | None, wanted: Rendered, known_good: Rendered | None) -> str | None:
    """Return the regression of a change; times count only if the model and the layout are unchanged."""
    if found is None or known_good is None:
        return None
    new, old = wanted.deployment.spec, known_good.deployment.spec
    return find_regression(found, is_same_model=(new.model, new.parallelism) == (old.model, old.parallelism))


def _reported_scheduling(snapshot: ClusterSnapshot, known: RecalledState) -> dict[str, ReportedScheduling | None]:
    """Return each engine's scheduling policy by group; None if not reported."""
    engines = {group.name: snapshot.engines.get(group.name) for group in known.groups}
    return {name: None if seen is None else seen.queue for name, seen in engines.items()}


def _patches(
    snapshot: ClusterSnapshot, known: RecalledState, tuned: TunerOutput, queue: SchedulingPlan
) -> tuple[Patch, ...]:
    """Return the patches that bring each engine to the tuned values, and then to the scheduling policy.

    They are sent one after the other, so that an engine that rejects one still gets the other.
    """
    targets = {target.group: target for target in engine_targets(known)}
    knobs = {group: {knob.value: value for knob, value in fields.items()} for group, fields in tuned.patches.items()}
    wanted: dict[str, LiveValues] = {**queue.patches, **knobs}
    found = []
    for group, fields in wanted.items():
        target, config = targets[group], snapshot.engines[group].config
        if target.address is not None and config is not None:
            fallback = queue.patches.get(group) if group in knobs else None
            found.append(Patch(target, fields, config.generation, fallback, needs_state=group in knobs))
    return tuple(found)


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
