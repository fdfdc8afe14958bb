"""One turn of a resource: from the world and what is remembered to all that is to be done. Pure and total.

In this order: what is wrong with the spec → what is known of the model → what replicas are to run (the spec, or the
last form that worked) → what the tuner makes of the engines' metrics → how many replicas → what the children lack.
The tuner comes before the plan, so that a decision on replicas acts in its own turn.

    World ──┐                 ┌── remember   ConfigMaps, written before anything is done by them
            ├── turn ── Turn ─┼── care       pods that must go, whatever is remembered
    Memory ─┘                 ├── children   Services, StatefulSets, the Job that reads the model
                              ├── patches    live fields of engines
                              ├── decisions, notes   to be told
                              └── findings   the status is made from them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from trimtab_operator.builders.account import service_account
from trimtab_operator.builders.admin_token import token_hash
from trimtab_operator.builders.record import Record, asked_of, records_of
from trimtab_operator.builders.stateful_set import Rendered, pod_template, rendered
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.observed.actions import Action, Apply, Delete, LiveValues, Note, Patch
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.engines import QueueSeen, view_of
from trimtab_operator.observed.groups import ordinal_of
from trimtab_operator.observed.looks import look_of
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.apply_backoff import Futile, sift
from trimtab_operator.planning.children import allowed_down, plan, plan_meeting_secret, plan_tuning_state
from trimtab_operator.planning.download_events import download_notes
from trimtab_operator.planning.gpu_budget import (
    NO_ROOM_IN_BUDGET,
    Stake,
    budget_notes,
    num_groups_meanwhile,
    room_beside,
    share_of,
    stake_of,
    standing_stake,
)
from trimtab_operator.planning.model_facts import (
    FactsState,
    Gate,
    Known,
    gate_of,
    plan_facts,
    with_kept,
    with_model_facts,
)
from trimtab_operator.planning.optional_children import plan_optional
from trimtab_operator.planning.scheduling_policy import QueueTurn, asked_order, queue_turn, serves_by_deadline
from trimtab_operator.planning.snapshot import World, targets_of
from trimtab_operator.planning.state import Memory, Recalled, recalled, with_layouts
from trimtab_operator.planning.status_inputs import Findings
from trimtab_operator.planning.step_time_prior import step_prior
from trimtab_operator.planning.tuning import (
    desired_replicas,
    remembered_text,
    settings_of,
    standing_replicas,
    stored_memory,
    with_standing_replicas,
)
from trimtab_operator.resource.spec import REPLICAS_ARE_NOT_ASKED, InferenceDeployment
from trimtab_operator.resource.validation_error import Refusal
from trimtab_operator.rollout.canary_comparison import Comparison, worse
from trimtab_operator.rollout.pod_lifecycle import Upkeep, upkeep
from trimtab_operator.rollout.rollback import (
    Course,
    RolloutState,
    Surge,
    change_of,
    course_of,
    form_of,
    plan_rollout_state,
    proven_form,
    stored_rollout,
    surge_of,
)
from trimtab_operator.rollout.surge import placeless
from trimtab_operator.tuner.decide import Outcome, decide
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.settings import Pace
from trimtab_operator.tuner.state import Memory as TunerMemory
from trimtab_operator.validation.rules import refusals

AS_RECORDED = ("spec.model", "spec.runtime", "spec.parallelism")  # what these ask of pods is taken from the record


@dataclass(frozen=True, slots=True)
class Turn:
    """All that is to be done now, and the memory that it leaves: to be adopted once `remember` is written."""

    memory: Memory
    findings: Findings
    desired_replicas: int
    remember: tuple[Apply, ...] = ()
    care: tuple[Delete, ...] = ()
    children: tuple[Action, ...] = ()
    patches: tuple[Patch, ...] = ()
    decisions: tuple[Decision, ...] = ()
    notes: tuple[Note, ...] = ()
    futile: Mapping[str, Futile] = field(default_factory=dict)
    """The part of the memory that may be adopted only once the children were applied."""
    stake: Stake | None = None
    """What the resource asks for of the GPU budget, and what it had; None: there is no budget."""
    num_beside: int = 0
    """Replicas beyond the wanted ones that are there while a change rolls, those that go counted."""

    @property
    def replicas_staked(self) -> int:
        """How many replicas are taken out of the GPU budget: those that are brought about, or those that are left."""
        assert self.stake is not None
        return self.stake.running if self.findings.share is None else self.findings.share.replicas

    @property
    def grows(self) -> bool:
        """Whether replicas that run may take more GPUs than they have, where what is asked for does."""
        return self.findings.share is not None and not self.findings.share.waits_to_grow

    @property
    def removes_replicas(self) -> bool:
        """Whether a replica goes as a whole: what is seen of the others changes with it, a moment later."""
        return any(isinstance(action, Delete) and action.kind == "StatefulSet" for action in self.children)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done, and nothing told but the status."""
        return not (self.remember or self.care or self.children or self.patches or self.decisions or self.notes)


def turn(world: World, memory: Memory) -> Turn:
    """Decide what is to be done in this world. Never raises, whatever the cluster or the engines say."""
    decided = _decided(world, memory)
    if world.deployment.is_paused:
        decided = _standing_still(decided, memory)
    if decided.stake is None and world.installation.gpu_budget is not None:
        return replace(decided, stake=standing_stake(world.deployment, world.children))
    return decided


def _standing_still(decided: Turn, memory: Memory) -> Turn:
    """What is found out, and nothing of what would be done: clocks and trials begin when it goes on."""
    findings = replace(decided.findings, is_paused=True, tuning=None, share=None)
    kept = replace(decided.memory, tuner=memory.tuner, rollout=memory.rollout, queue=memory.queue)
    return Turn(kept, findings, decided.desired_replicas, futile=memory.futile)


def _decided(world: World, memory: Memory) -> Turn:
    records, seen = records_of(world.children.stateful_sets), world
    world = _as_recorded(world, records)
    known = _known(world, memory)
    refused = world.misread or refusals(world.deployment)
    rollout = memory.rollout or stored_rollout(
        world.deployment, world.children, key=world.token, former_key=world.former_token
    )
    if world.misread or (refused and not _runs_already(world, known, rollout, records, refused)):
        return _refused(world, known, refused)
    token_sha256 = token_hash(world.token)
    reading = plan_facts(with_model_facts(world.deployment, known.observed), known.observed, now=world.at)
    known = replace(known, observed=with_kept(known.observed, reading))
    world = replace(world, deployment=with_model_facts(world.deployment, known.observed))
    wanted = rendered(world.deployment, admin_token_sha256=token_sha256, records=records)
    proven = proven_form(rollout, wanted, admin_token_sha256=token_sha256, records=records)
    gate = _gate(world, known, wanted, proven)
    if gate.refusals:
        return _with_reading(_refused(world, known, gate.refusals, of_layout=gate.refusals), reading)
    known = replace(known, memory=replace(known.memory, comparison=_compared(world, known, rollout, wanted)))
    course = course_of(
        rollout,
        wanted,
        proven,
        known.groups,
        known.memory.layouts_of(known.groups),
        may_start=gate.is_open,
        now=world.at,
        worse=_worse(known.memory.comparison, wanted, proven),
    )
    steered = _steered(world, known, wanted, gate, course, proven)
    keeps_older_pods = _keeps_older_pods(seen, known, wanted)
    findings = replace(steered.findings, refusals=refused, keeps_older_pods=keeps_older_pods)
    return _with_reading(replace(steered, findings=findings), reading)


def _runs_already(
    world: World,
    known: Recalled,
    rollout: RolloutState,
    records: Mapping[str, Record],
    refused: tuple[Refusal, ...],
) -> bool:
    """Whether what a rule refuses by now is what runs, as an older operator accepted it: its replicas come and go as
    before, by what was recorded of them, and it is said what is wrong. Not so what an administrator forbids."""
    form = form_of(with_model_facts(world.deployment, known.observed))
    is_running = rollout.proven == form and asked_of(world.deployment) in records
    return is_running and all(refusal.field.startswith(AS_RECORDED) for refusal in refused)


def _as_recorded(world: World, records: Mapping[str, Record]) -> World:
    """The same world, where a spec without an image means the one that it meant when its replicas were rendered."""
    record = records.get(asked_of(world.deployment))
    if record is None or record.image is None or world.deployment.spec.runtime.image is not None:
        return world
    return replace(world, deployment=replace(world.deployment, image=record.image))


def _known(world: World, memory: Memory) -> Recalled:
    known = recalled(world.children, memory, now=world.at, refused_creations=world.refused_creations)
    layouts = with_layouts(known.memory, known.groups, world.engines)
    return replace(known, memory=replace(layouts, tuner=_recalled_tuner(world, memory)))


def _recalled_tuner(world: World, memory: Memory) -> TunerMemory:
    """What the tuner remembers: by this loop, or by the one before it."""
    kept = memory.tuner or stored_memory(
        world.deployment, world.children.config_maps, key=world.token, former_key=world.former_token
    )
    return with_standing_replicas(world.deployment, kept)


def _refused(
    world: World, known: Recalled, refused: tuple[Refusal, ...], *, of_layout: tuple[Refusal, ...] = ()
) -> Turn:
    """Say what is wrong. What runs is cared for, and otherwise left as it is."""
    replicas = standing_replicas(world.deployment, known.memory.tuner)
    care = _care(world, known, None, allowed=allowed_down(world.deployment, replicas))
    findings = replace(findings_of_cluster(world, known), refusals=refused, layout_refusals=of_layout)
    return Turn(known.memory, findings, findings.desired_replicas, care=care.deletions, notes=care.notes)


def _gate(world: World, known: Recalled, wanted: Rendered, proven: Rendered | None) -> Gate:
    """Whether engines may be started or changed."""
    is_proven = proven is not None and proven.revision == wanted.revision
    gpu = gpu_for(world.deployment, world.nodes or ())
    return gate_of(world.deployment, known.observed, revision=wanted.revision, gpu=gpu, is_proven=is_proven)


def _steered(
    world: World, known: Recalled, wanted: Rendered, gate: Gate, course: Course, proven: Rendered | None
) -> Turn:
    """Bring replicas and engines one step nearer to what the course asks for, or, where the GPU budget has no room for
    that yet, to the last `proven` form."""
    deployment = world.deployment
    target = deployment if course.target is None else course.target.deployment
    tuned = _tuned(world, known, target, gate.model)
    queue = queue_turn(deployment, _queues(world, known), known.memory.queue)
    standing = standing_replicas(deployment, known.memory.tuner)
    count = standing if deployment.is_paused else desired_replicas(deployment, tuned)
    stake = share = None
    if course.target is not None and not deployment.is_paused and world.installation.gpu_budget is not None:
        stake = stake_of(
            target,
            known.observed,
            wanted=count,
            revision=course.target.revision,
            proven=proven.deployment if proven is not None and course.is_first_only else None,
        )
        share = share_of(stake, world.stakes, world.installation.gpu_budget)
        if share.waits_to_grow:
            course = _standing(course, proven, known)
            if course.target is None:
                stake = replace(stake, least=stake.running, wanted=max(stake.wanted, stake.running))
                share = replace(share, replicas=stake.running)
            else:
                target = course.target.deployment
        count = share.replicas
    moment = datetime.fromtimestamp(world.at, UTC)
    room, is_short, may_come = Surge(0), False, 0
    if course.target is not None:
        room = surge_of(course.state.no_room, course.target, known.observed, replicas=count, now=moment)
        beside = room_beside(stake, count, world.stakes, world.installation.gpu_budget)
        is_short = beside.groups < room.groups
        room = replace(room, groups=min(room.groups, beside.groups))
        may_come = max(0, count - len(known.groups)) + beside.now
    rollout = replace(course.state, no_room=room.no_room if course.target is not None else course.state.no_room)
    allowed = 1 if course.is_first_only else allowed_down(deployment, count)
    care = _care(world, known, course.target, allowed=allowed)
    children: tuple[Action, ...] = plan_applies([service_account(deployment)], known.observed)
    if course.target is not None:
        children = (
            *children,
            *plan_meeting_secret(target, known.observed, token=world.token),
            *plan(
                course.target,
                known.observed,
                replicas=count,
                held=care.held,
                unproven=course.unproven,
                loads=_loads(world),
                surge=room.groups,
                may_come=may_come,
                proven=proven if course.is_first_only else None,
                without_place=placeless(known.observed, now=moment),
                most_placed=known.memory.most_placed,
            ),
            *plan_optional(target, known.observed, world.installation, replicas=count),
        )
    sifted = sift(children, known.memory.futile, now=world.at)
    return Turn(
        memory=replace(
            known.memory,
            tuner=tuned.memory,
            rollout=rollout,
            queue=queue.told,
            unheard=None if deployment.spec.scaling is None else deployment.spec.replicas,
        ),
        findings=replace(
            findings_of_cluster(world, known),
            desired_replicas=count,
            revision=wanted.revision,
            model_revision=wanted.model_revision,
            engines=_views(world, known),
            tuning=tuned if known.groups else None,
            queue=queue,
            model=None if gate.is_open else gate.model,
            failed_change=course.failed,
            trying=course.trying,
            no_room=NO_ROOM_IN_BUDGET if is_short else None if room.no_room is None else room.no_room.message,
            target=None if course.target is None else course.target.deployment,
            share=share,
            too_few_gpus=_too_few_gpus(world),
            metrics_source=_metrics_source(world),
            metrics_detour=next((said.detour for _, said in sorted(world.engines.items()) if said.detour), None),
        ),
        desired_replicas=count,
        remember=_remembered(deployment, known, rollout, tuned, key=world.token, now=world.at),
        care=care.deletions,
        children=sifted.actions,
        patches=_patches(world, known, tuned, queue),
        decisions=tuned.decisions,
        notes=(
            *_unheard(deployment, known.memory.unheard),
            *download_notes(deployment, _views(world, known)),
            *budget_notes(deployment, share),
            *room.notes,
            *care.notes,
            *sifted.notes,
            *queue.notes,
        ),
        futile=sifted.futile,
        stake=stake,
        num_beside=max(0, num_groups_meanwhile(known.groups, children) - count),
    )


def _standing(course: Course, proven: Rendered | None, known: Recalled) -> Course:
    """The course while what is asked for takes more GPUs than there are: the proven form, where that lacks none; else
    replicas are left as they are."""
    target = None
    if proven is not None and not stake_of(proven.deployment, known.observed, wanted=0).smaller:
        target = proven
    return Course(course.state, target, course.failed)


def _unheard(deployment: InferenceDeployment, before: int | None) -> tuple[Note, ...]:
    """Tell who wrote `spec.replicas`, as an autoscaler does through /scale, that nobody heard it: API servers that know
    rules of the schema refuse it, older ones take it."""
    asked = deployment.spec.replicas
    if deployment.spec.scaling is None or before is None or asked == before:
        return ()
    message = f"spec.replicas: {asked} {REPLICAS_ARE_NOT_ASKED}"
    return (Note("Warning", "ReplicasIgnored", message, str(deployment.generation)),)


def findings_of_cluster(world: World, known: Recalled) -> Findings:
    """What the cluster alone says, before anything is rendered or asked of the engines."""
    present = {group.ordinal for group in known.groups}
    pods = known.observed.pods
    draining = tuple(pod for pod in pods if ordinal_of(pod) is not None and ordinal_of(pod) not in present)
    count = standing_replicas(world.deployment, known.memory.tuner)
    return Findings(count, groups=known.groups, draining=draining)


def findings_without_a_turn(world: World, memory: Memory, problem: tuple[str, str]) -> Findings:
    """What can be said when a turn could not be carried out: the children as they are, and the problem."""
    records = records_of(world.children.stateful_sets)
    world = _as_recorded(world, records)
    world = replace(world, deployment=with_model_facts(world.deployment, world.children))
    findings = findings_of_cluster(world, _known(world, memory))
    if world.misread:
        return replace(findings, problem=problem)
    wanted = rendered(world.deployment, admin_token_sha256=token_hash(world.token), records=records)
    return replace(findings, revision=wanted.revision, problem=problem)


def _care(world: World, known: Recalled, target: Rendered | None, *, allowed: int) -> Upkeep:
    """What groups need beyond being as rendered; `target` is what replicas are to run, None: as they are. `allowed` may
    be down for it."""
    revision = None if target is None else target.revision
    return upkeep(
        known.observed,
        nodes=world.nodes,
        rivals=world.rivals,
        now=datetime.fromtimestamp(world.at, UTC),
        asked=None if revision is None else f"{world.deployment.generation}-{revision}",
        revision=revision,
        allowed=allowed,
        most_placed=known.memory.most_placed,
    )


def _keeps_older_pods(world: World, known: Recalled, wanted: Rendered) -> bool:
    """Whether this operator, with its defaults, would render other pods for what is asked than those that run."""
    today = with_model_facts(world.deployment, known.observed)
    return wanted.is_recorded and wanted.template != pod_template(today, admin_token_sha256=token_hash(world.token))


def _too_few_gpus(world: World) -> str | None:
    return too_few_gpus(world.deployment, world.nodes) if world.deployment.spec.runtime.device == "cuda" else None


def _metrics_source(world: World) -> str | None:
    """Where metrics were read: of some engines here and of others there, both are named."""
    return ", ".join(sorted({said.source.value for said in world.engines.values() if said.source is not None})) or None


def _tuned(world: World, known: Recalled, target: InferenceDeployment, model: FactsState) -> Outcome:
    """Let the tuner look. Starts and bounds are those of what runs; mode, promises and how many replicas there may be
    are the owner's latest word. It begins with what steps of this model on this GPU should take, where both are known;
    where they are not for a while, what was learned stands."""
    owners = settings_of(world.deployment.spec)
    by_deadline = serves_by_deadline(_queues(world, known), asked_order(world.deployment.spec))
    settings = replace(
        settings_of(target.spec),
        mode=owners.mode,
        objectives=replace(owners.objectives, order_queues=by_deadline),
        scaling=owners.scaling,
        pace=Pace(tick_seconds=world.tick_seconds, sample_seconds=world.sample_seconds),
    )
    memory = known.memory.tuner
    assert memory is not None
    gpu = gpu_for(target, world.nodes or ())
    if isinstance(model, Known) and gpu is not None:
        settings = replace(settings, prior=step_prior(model.facts, target.spec.parallelism, gpu))
    elif memory.model is not None:
        settings = replace(settings, prior=memory.model.prior)
    looks = [look_of(group, world.engines.get(group.name)) for group in known.groups]
    return decide(looks, memory, settings, world.at)


def _remembered(
    deployment: InferenceDeployment, known: Recalled, rollout: RolloutState, tuned: Outcome, *, key: str, now: float
) -> tuple[Apply, ...]:
    """The ConfigMaps that must be written before anything is done by what they say."""
    return (
        *plan_rollout_state(deployment, known.observed, rollout, key=key, now=now),
        *plan_tuning_state(deployment, known.observed, remembered_text(tuned.memory, key=key)),
    )


def _compared(world: World, known: Recalled, rollout: RolloutState, wanted: Rendered) -> Comparison | None:
    """What users get of the first replica of a change and of the others, while it has to show that it is good."""
    attempt = rollout.attempt
    if attempt is None or attempt.ready_since is None or attempt.change != change_of(world.deployment, wanted.revision):
        return None
    ready = [group for group in known.groups if group.is_ready]
    new = {group.name for group in ready if group.revision == wanted.revision}
    before = known.memory.comparison
    found = before if before is not None and before.change == attempt.change else Comparison(attempt.change)
    return found.later(world.engines, new, {group.name for group in ready} - new)


def _worse(found: Comparison | None, wanted: Rendered, proven: Rendered | None) -> str | None:
    """What the change does worse; times are nobody's fault where another model, or another layout, is asked for."""
    if found is None or proven is None:
        return None
    new, old = wanted.deployment.spec, proven.deployment.spec
    return worse(found, is_same_model=(new.model, new.parallelism) == (old.model, old.parallelism))


def _queues(world: World, known: Recalled) -> dict[str, QueueSeen | None]:
    """What the engine of each group says of its queue; None where it says nothing."""
    engines = {group.name: world.engines.get(group.name) for group in known.groups}
    return {name: None if seen is None else seen.queue for name, seen in engines.items()}


def _patches(world: World, known: Recalled, tuned: Outcome, queue: QueueTurn) -> tuple[Patch, ...]:
    """What brings every engine that answers to the applied values, and then to the order of its queue: one change at a
    time, so that neither keeps the other from an engine that refuses it."""
    targets = {target.group: target for target in targets_of(known)}
    knobs = {group: {knob.value: value for knob, value in fields.items()} for group, fields in tuned.patches.items()}
    wanted: dict[str, LiveValues] = {**queue.patches, **knobs}
    found = []
    for group, fields in wanted.items():
        target, config = targets[group], world.engines[group].config
        if target.address is not None and config is not None:
            otherwise = queue.patches.get(group) if group in knobs else None
            found.append(Patch(target, fields, config.generation, otherwise))
    return tuple(found)


def _loads(world: World) -> dict[str, float]:
    """How many requests each engine that answers has, running and waiting."""
    gauges = {name: seen.sample.gauges for name, seen in world.engines.items() if seen.sample is not None}
    return {name: now.running + now.waiting for name, now in gauges.items()}


def _views(world: World, known: Recalled) -> dict[str, EngineView]:
    layouts = known.memory.layouts_of(known.groups)
    return {
        group.name: view_of(group, world.engines.get(group.name), layouts.get(group.name)) for group in known.groups
    }


def _with_reading(turn: Turn, reading: tuple[Action, ...]) -> Turn:
    """The same turn, with what reading the model needs: what was read is remembered first, its Job comes last, so that
    engines that run wait for no reader."""
    kept = tuple(action for action in reading if isinstance(action, Apply) and action.manifest["kind"] == "ConfigMap")
    rest = tuple(action for action in reading if action not in kept)
    return replace(turn, remember=(*kept, *turn.remember), children=(*turn.children, *rest))
