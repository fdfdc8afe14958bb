"""First stage of a plan: the spec is checked, joined with the model and remembered state, and rendered. Pure.

A spec that cannot be rendered ends the plan here. An invalid spec that an older operator accepted, and that runs, is
resolved like a valid one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.record import Record, asked_of, find_record, records_of
from trimtab_operator.builders.stateful_set import Rendered, pod_template, rendered
from trimtab_operator.layout.node_gpus import gpu_for
from trimtab_operator.observed.actions import Action
from trimtab_operator.planning.model_facts import (
    StartGate,
    evaluate_start_gate,
    plan_facts,
    plan_signature,
    with_model_facts,
    with_stored_facts,
    with_verified_facts,
)
from trimtab_operator.planning.router import router_errors
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.state import RecalledState, ReconcilerState, recall_state, with_reported_layouts
from trimtab_operator.planning.tuning import load_tuner_state, with_current_replicas
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.rollback import RolloutState, render_known_good, revision_spec_of, stored_rollout
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.validation.rules import validation_errors

RECORDED_FIELDS = ("spec.model", "spec.runtime", "spec.parallelism")  # their effect on pods is taken from the record


@dataclass(frozen=True, slots=True)
class Resolution:
    """A spec that can be rendered, with everything that the later stages need.

    The deployment of `snapshot` has the recorded image and the facts of the model.
    """

    snapshot: ClusterSnapshot
    known: RecalledState
    wanted: Rendered
    """The revision of the spec."""
    known_good: Rendered | None
    """The last known-good revision; None if there is none."""
    rollout: RolloutState
    gate: StartGate
    reading: tuple[Action, ...]
    """Actions that read the model."""
    errors: tuple[ValidationError, ...] = ()
    """Errors of a spec that runs nevertheless."""
    has_older_pods: bool = False

    @property
    def deployment(self) -> InferenceDeployment:
        return self.snapshot.deployment


@dataclass(frozen=True, slots=True)
class UnresolvedSpec:
    """A spec that cannot be rendered: replicas stay as they are."""

    snapshot: ClusterSnapshot
    known: RecalledState
    errors: tuple[ValidationError, ...]
    layout_errors: tuple[ValidationError, ...] = ()
    reading: tuple[Action, ...] = ()


def resolve(snapshot: ClusterSnapshot, state: ReconcilerState) -> Resolution | UnresolvedSpec:
    """Check the spec, read the model and render the revisions."""
    seen, records = snapshot, records_of(snapshot.children.stateful_sets)
    snapshot = with_known_facts(with_recorded_choices(seen, records))
    known = recall(snapshot, state)
    rollout = state.rollout or stored_rollout(
        snapshot.deployment, snapshot.children, key=snapshot.token, former_key=snapshot.former_token
    )
    errors = _spec_errors(snapshot)
    if snapshot.parse_errors or (errors and not _is_already_running(snapshot, known, rollout, records, errors)):
        return UnresolvedSpec(snapshot, known, errors)
    snapshot, known, reading = _read_model(snapshot, known)
    token_hashes = TokenHashes.of(snapshot.token)
    wanted = rendered(snapshot.deployment, token_hashes=token_hashes, records=records)
    known_good = render_known_good(rollout, wanted, token_hashes=token_hashes, records=records)
    gate = _start_gate(snapshot, known, wanted, known_good)
    if gate.validation_errors:
        return UnresolvedSpec(snapshot, known, gate.validation_errors, gate.validation_errors, reading)
    has_older_pods = _has_older_pods(seen, known, wanted)
    return Resolution(snapshot, known, wanted, known_good, rollout, gate, reading, errors, has_older_pods)


def recall(snapshot: ClusterSnapshot, state: ReconcilerState) -> RecalledState:
    """Return the children joined with the remembered state, layouts and tuner state included."""
    known = recall_state(snapshot.children, state, now=snapshot.at, failed_creations=snapshot.failed_creations)
    layouts = with_reported_layouts(known.state, known.groups, snapshot.engines)
    return replace(known, state=replace(layouts, tuner=_recall_tuner_state(snapshot, state)))


def with_recorded_choices(snapshot: ClusterSnapshot, records: Mapping[str, Record]) -> ClusterSnapshot:
    """Return the snapshot with the recorded caps, and with the recorded image if the spec has none, as the operator's
    default may have changed since.
    """
    deployment = snapshot.deployment
    record = find_record(deployment, records)
    if record is None:
        return snapshot
    image = deployment.image if deployment.spec.runtime.image is not None else record.image or deployment.image
    return replace(snapshot, deployment=replace(deployment, caps=record.caps, image=image))


def _recall_tuner_state(snapshot: ClusterSnapshot, state: ReconcilerState) -> TunerState:
    """Return the tuner's state from this loop, or as stored by a previous one."""
    kept = state.tuner or load_tuner_state(
        snapshot.deployment, snapshot.children.config_maps, key=snapshot.token, former_key=snapshot.former_token
    )
    return with_current_replicas(snapshot.deployment, kept)


def with_known_facts(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the snapshot without stored facts of a model that this operator has not signed."""
    children = with_verified_facts(
        snapshot.deployment, snapshot.children, key=snapshot.token, former_key=snapshot.former_token
    )
    return replace(snapshot, children=children)


def _spec_errors(snapshot: ClusterSnapshot) -> tuple[ValidationError, ...]:
    if snapshot.parse_errors:
        return snapshot.parse_errors
    deployment, has_router = snapshot.deployment, snapshot.installation.router is not None
    return (*validation_errors(deployment), *router_errors(deployment, has_router=has_router))


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


def _read_model(
    snapshot: ClusterSnapshot, known: RecalledState
) -> tuple[ClusterSnapshot, RecalledState, tuple[Action, ...]]:
    """Return the snapshot and state with the model's facts as far as they are known, and the actions that read them."""
    reading = plan_facts(with_model_facts(snapshot.deployment, known.observed), known.observed, now=snapshot.at)
    reading = plan_signature(snapshot.deployment, known.observed, reading, key=snapshot.token)
    known = replace(known, observed=with_stored_facts(known.observed, reading))
    deployment = with_model_facts(snapshot.deployment, known.observed)
    return replace(snapshot, deployment=deployment), known, reading


def _start_gate(
    snapshot: ClusterSnapshot, known: RecalledState, wanted: Rendered, known_good: Rendered | None
) -> StartGate:
    """Return whether engines may be started or changed."""
    is_known_good = known_good is not None and known_good.revision == wanted.revision
    gpu = gpu_for(snapshot.deployment, snapshot.nodes or ())
    return evaluate_start_gate(
        snapshot.deployment, known.observed, revision=wanted.revision, gpu=gpu, is_known_good=is_known_good
    )


def _has_older_pods(snapshot: ClusterSnapshot, known: RecalledState, wanted: Rendered) -> bool:
    """Return True if this operator would now render other pods for the same spec."""
    today = with_model_facts(snapshot.deployment, known.observed)
    return wanted.is_recorded and wanted.template != pod_template(today, token_hashes=TokenHashes.of(snapshot.token))
