"""The ten conditions of a resource, computed from observations. Pure.

Every reason is a member of `Reason` (or of the tuner's enums) and is documented in docs/reference/resource.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.gang_backoff import gang_backoff_of
from trimtab_operator.observed.missing_pods import missing_pods_message
from trimtab_operator.observed.phases import DOWNLOAD
from trimtab_operator.observed.pods import unschedulable_message
from trimtab_operator.observed.readiness import reported_layouts
from trimtab_operator.planning import gpu_budget as budget
from trimtab_operator.planning.model_facts import ModelBeingRead, ModelUnreadable
from trimtab_operator.planning.router import RouterView
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.resource.limits import cap_findings, shorten
from trimtab_operator.resource.spec import PAUSED, RESTARTED_AT, InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.rollback import FailedChange
from trimtab_operator.tuner.decide import Condition


class Reason(StrEnum):
    """Reason of a condition."""

    READY = "ReplicasReady"  # every wanted replica runs the current revision and takes requests
    ANSWERED = "RequestsAnswered"  # at least one replica takes requests, of any revision
    SCALED_TO_ZERO = "ScaledToZero"  # spec.replicas is 0, or no request arrived for scaling.idleTimeout
    REQUESTS_HELD = "RequestsHeld"  # the router holds requests while a replica starts
    ROUTER_NOT_READY = "RouterNotReady"  # without replicas, no router pod can hold requests
    NOT_READY = "ReplicasNotReady"  # a wanted replica does not take requests and is not loading
    LOADING = "Loading"  # a replica loads its model
    DOWNLOADING = "Downloading"  # a replica downloads its model, or waits for another one's download
    PENDING = "Pending"  # a replica's pod is not running yet
    FAILING = "ReplicaFailing"  # a replica is in a crash loop, or its image cannot be pulled
    INVALID = "InvalidSpec"  # the spec is invalid
    READING_MODEL = "ReadingModel"  # a Job reads the model's description; no engine starts before
    MODEL_UNREADABLE = "ModelUnreadable"  # that Job failed and will be retried
    NAME_CONFLICT = "NameConflict"  # an object with a child's name has another owner
    FORBIDDEN = "Forbidden"  # the operator's role lacks a permission
    RECONCILE_ERROR = "ReconcileError"  # the API server rejected a request, or the operator failed; it retries
    ROLLED_BACK = "RolledBack"  # a change failed; replicas run the last known-good revision
    START_FAILED = "StartFailed"  # no replica of the first revision became Ready in time
    ROLLING_OUT = "RollingOut"  # replicas are updated to a new revision
    SCALING = "Scaling"  # replicas are added or removed
    PAUSED = "Paused"  # changes are paused by an annotation
    UP_TO_DATE = "UpToDate"  # the present state is the wanted state
    LAYOUT_REPORTED = "LayoutReported"  # every ready engine runs the wanted layout
    LAYOUT_DIFFERS = "LayoutDiffers"  # an engine runs another layout
    LAYOUT_UNKNOWN = "NotYetReported"  # no engine has reported its layout
    NOT_LIMITED = "NotLimited"  # nothing limits the replica count
    TOO_FEW_GPUS = "TooFewGPUsPerNode"  # a pod requests more GPUs than any present node has
    UNSCHEDULABLE = "Unschedulable"  # pods of replicas cannot be scheduled
    OVER_BUDGET = budget.OVER_BUDGET  # the operator's GPU budget allows fewer replicas than wanted
    AT_MAX_REPLICAS = "AtMaxReplicas"  # objectives are violated with the maximum number of replicas
    FAILED_CREATE = "FailedCreate"  # the API server rejects pods because of a quota or policy
    AS_EXPECTED = "AsExpected"  # nothing is wrong
    STOPPED = "Stopped"  # no replica runs that could be tuned or measured


TYPES = (
    "Ready",
    "Serving",
    "Reconciling",
    "Stalled",
    "Progressing",
    "LayoutValid",
    "MetricsAvailable",
    "TuningActive",
    "ScalingLimited",
    "Degraded",
)
HELD_AT_ZERO = "no request arrived for the idle timeout; the router holds new ones until a replica is started"
MAX_CONDITION_MESSAGE = 8192  # characters: the schema allows 32,768, and several conditions repeat a message
PAUSED_MESSAGE = f"changes are paused by the annotation {PAUSED}; remove it to resume"


@dataclass(frozen=True, slots=True)
class UntimedCondition:
    """A condition without timestamps."""

    type: str
    status: str
    reason: str
    message: str


def build_conditions(
    deployment: InferenceDeployment, inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]
) -> list[UntimedCondition]:
    """Return all ten conditions, Ready first."""
    progressing, ready = progressing_condition(deployment, inputs, groups), ready_condition(inputs, groups)
    return [
        ready,
        serving_condition(inputs, groups),
        UntimedCondition("Reconciling", progressing.status, progressing.reason, progressing.message),
        stalled_condition(inputs, progressing, ready),
        progressing,
        layout_condition(deployment, inputs),
        *tuning_conditions(inputs),
        scaling_condition(deployment, inputs),
        degraded_condition(inputs, groups),
    ]


def conditions_without_observation(reason: str, message: str) -> list[UntimedCondition]:
    """Return the conditions for when the children cannot be read: replicas may serve, but they are not managed."""
    return [
        UntimedCondition("Ready", "Unknown", reason, message),
        UntimedCondition("Reconciling", "False", reason, message),
        UntimedCondition("Stalled", "True", reason, message),
        UntimedCondition("Progressing", "False", reason, message),
        UntimedCondition("Degraded", "True", reason, message),
    ]


def ready_condition(inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]) -> UntimedCondition:
    """Return Ready: True if all wanted replicas run the current spec, not a previous or rolled-back one."""
    held = _blocked(inputs) or _unknown_model(inputs)
    if held is not None:
        return UntimedCondition("Ready", "False", *held)
    if inputs.failed_change is not None:
        failed = inputs.failed_change
        reason = Reason.START_FAILED if failed.rolled_back_to is None else Reason.ROLLED_BACK
        return UntimedCondition(
            "Ready", "False", reason, failed.message if failed.rolled_back_to is None else _rollback_message(failed)
        )
    share = inputs.share
    if share is not None and (share.is_below_min or share.is_growth_pending):
        return UntimedCondition("Ready", "False", Reason.OVER_BUDGET, share.message)
    wanted = inputs.desired_replicas
    ready = sum(g["ready"] for g in groups)
    current = sum(g["ready"] and g["revision"] == inputs.revision for g in groups)
    if wanted == 0:
        return UntimedCondition("Ready", "True", Reason.SCALED_TO_ZERO, _zero_message(inputs))
    if current >= wanted:
        return UntimedCondition("Ready", "True", Reason.READY, f"{current} of {wanted} replicas take requests")
    if ready >= wanted:
        message = f"{current} of {wanted} replicas run the current revision; {ready} take requests"
        return UntimedCondition("Ready", "False", Reason.ROLLING_OUT, message)
    reason, why = _why_not_ready(groups)
    return UntimedCondition("Ready", "False", reason, f"{ready} of {wanted} replicas take requests{why}")


def serving_condition(inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]) -> UntimedCondition:
    """Return Serving: True if any replica takes requests, of any revision."""
    if any(g["ready"] for g in groups) or any(group.is_outdated and group.serves for group in inputs.groups):
        how = "" if inputs.router is None or inputs.router.is_selected else ", directly: no router pod is Ready"
        return UntimedCondition("Serving", "True", Reason.ANSWERED, f"at least one replica takes requests{how}")
    if inputs.share is not None and inputs.share.is_limited and inputs.desired_replicas == 0:
        return UntimedCondition("Serving", "False", Reason.OVER_BUDGET, inputs.share.message)
    if inputs.router is not None and inputs.is_scaled_from_zero:
        return _holding_condition(inputs, inputs.router, groups)
    if inputs.desired_replicas == 0:
        return UntimedCondition("Serving", "False", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    return UntimedCondition("Serving", "False", Reason.NOT_READY, "no replica takes requests")


def _zero_message(inputs: StatusInputs) -> str:
    return HELD_AT_ZERO if inputs.is_scaled_from_zero else "spec.replicas is 0"


def _holding_condition(
    inputs: StatusInputs, router: RouterView, groups: Sequence[Mapping[str, Any]]
) -> UntimedCondition:
    """Return Serving without a serving replica, if held requests start replicas: True while they can be held."""
    if router.ready == 0:
        return UntimedCondition("Serving", "False", Reason.ROUTER_NOT_READY, "no router pod is Ready to hold requests")
    if inputs.desired_replicas == 0:
        return UntimedCondition("Serving", "True", Reason.SCALED_TO_ZERO, HELD_AT_ZERO)
    is_failing = inputs.failed_change is not None or any(g["phase"] == "Failed" for g in groups)
    if is_failing or _blocked(inputs) is not None:
        return UntimedCondition("Serving", "False", Reason.NOT_READY, "no replica takes requests")
    return UntimedCondition("Serving", "True", Reason.REQUESTS_HELD, "the router holds requests while a replica starts")


def stalled_condition(inputs: StatusInputs, progressing: UntimedCondition, ready: UntimedCondition) -> UntimedCondition:
    """Return Stalled: True if there will be no progress until a user acts."""
    stuck = _blocked(inputs) is not None or inputs.failed_change is not None
    stuck = stuck or (inputs.is_paused and ready.status != "True")
    if progressing.status != "True" and (stuck or isinstance(inputs.model, ModelUnreadable)):
        return UntimedCondition("Stalled", "True", progressing.reason, progressing.message)
    return UntimedCondition("Stalled", "False", Reason.AS_EXPECTED, "not stalled")


def _why_not_ready(groups: Sequence[Mapping[str, Any]]) -> tuple[Reason, str]:
    """Return the worst problem. Messages name the replica but no percentages, which change all the time."""
    order = (("Failed", Reason.FAILING), ("Pending", Reason.PENDING), ("Loading", Reason.LOADING))
    for phase, reason in order:
        found = next((g for g in groups if g["phase"] == phase), None)
        if found is not None:
            detail = found.get("message")
            if reason is Reason.LOADING and _downloads(found):
                return Reason.DOWNLOADING, f"; {found['name']} is downloading its model"
            return reason, f"; {found['name']} is {phase.lower()}" + (f": {detail}" if detail else "")
    return (Reason.NOT_READY, "") if groups else (Reason.PENDING, "; no replica is created yet")


def _downloads(group: Mapping[str, Any]) -> bool:
    return group["phase"] == "Loading" and (group.get("load") or {}).get("stage") == DOWNLOAD


def _blocked(inputs: StatusInputs) -> tuple[str, str] | None:
    if inputs.validation_errors:
        return Reason.INVALID, join_errors(inputs.validation_errors)
    return inputs.problem


def _unknown_model(inputs: StatusInputs) -> tuple[Reason, str] | None:
    """Return why the model is not known yet; None if it is known or does not matter."""
    if isinstance(inputs.model, ModelBeingRead):
        return Reason.READING_MODEL, inputs.model.message
    if isinstance(inputs.model, ModelUnreadable):
        return Reason.MODEL_UNREADABLE, f"the model cannot be read: {inputs.model.message}; retrying"
    return None


def progressing_condition(
    deployment: InferenceDeployment, inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]
) -> UntimedCondition:
    blocked = _blocked(inputs)
    if blocked is not None:
        return UntimedCondition("Progressing", "False", blocked[0], blocked[1])
    if inputs.is_paused:
        return UntimedCondition("Progressing", "False", Reason.PAUSED, PAUSED_MESSAGE)
    unknown = _unknown_model(inputs)
    if unknown is not None:
        return UntimedCondition(
            "Progressing", "True" if isinstance(inputs.model, ModelBeingRead) else "False", *unknown
        )
    if inputs.failed_change is not None:
        return _failed_change_condition(deployment, inputs.failed_change, inputs, groups)
    if inputs.share is not None and inputs.share.is_growth_pending:
        return UntimedCondition("Progressing", "False", Reason.OVER_BUDGET, inputs.share.message)
    if inputs.canary_message is not None:
        return UntimedCondition("Progressing", "True", Reason.ROLLING_OUT, inputs.canary_message)
    if any(group.revision != inputs.revision or group.is_outdated for group in inputs.groups):
        how = "" if inputs.surge_obstacle is None else f", in place: {inputs.surge_obstacle}"
        return UntimedCondition(
            "Progressing", "True", Reason.ROLLING_OUT, f"replicas are updated to the current pod template{how}"
        )
    if len(inputs.groups) != inputs.desired_replicas or inputs.draining:
        return UntimedCondition(
            "Progressing", "True", Reason.SCALING, f"the replica count changes to {inputs.desired_replicas}"
        )
    if any(_downloads(g) for g in groups):
        return UntimedCondition(
            "Progressing",
            "True",
            Reason.DOWNLOADING,
            "replicas are downloading the model; see groups[].load for progress",
        )
    if any(g["phase"] == "Loading" for g in groups):
        return UntimedCondition("Progressing", "True", Reason.LOADING, "replicas are loading the model")
    if any(not g["ready"] for g in groups):
        return UntimedCondition("Progressing", "True", Reason.PENDING, "replicas are waiting for their pods")
    message = "the present state is the wanted state"
    if inputs.has_older_pods:
        message += f"; new pods would differ: change the annotation {RESTARTED_AT} to replace the present ones"
    return UntimedCondition("Progressing", "False", Reason.UP_TO_DATE, message)


def _failed_change_condition(
    deployment: InferenceDeployment, failed: FailedChange, inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]
) -> UntimedCondition:
    if failed.rolled_back_to is None:
        return UntimedCondition("Progressing", "False", Reason.START_FAILED, failed.message)
    is_back = all(group.revision == failed.rolled_back_to and not group.is_outdated for group in inputs.groups)
    is_settled = is_back and len(groups) == inputs.desired_replicas and all(g["ready"] for g in groups)
    return UntimedCondition(
        "Progressing", "False" if is_settled else "True", Reason.ROLLED_BACK, _rollback_message(failed)
    )


def _rollback_message(failed: FailedChange) -> str:
    return f"a change was rolled back until the spec changes again: {failed.message}"


def layout_condition(deployment: InferenceDeployment, inputs: StatusInputs) -> UntimedCondition:
    refused = inputs.layout_errors or [r for r in inputs.validation_errors if r.field.startswith("spec.parallelism")]
    if refused:
        return UntimedCondition("LayoutValid", "False", Reason.INVALID, join_errors(refused))
    wanted = Degrees.wanted(deployment.spec)
    reported = dict(reported_layouts(inputs.groups, inputs.engines, inputs.revision))
    differing = sorted(name for name, layout in reported.items() if layout != wanted)
    if differing:
        message = f"{differing[0]} runs {reported[differing[0]]} instead of {wanted}"
        return UntimedCondition("LayoutValid", "False", Reason.LAYOUT_DIFFERS, message)
    unknown = _unknown_model(inputs)
    if not reported and unknown is not None:
        return UntimedCondition("LayoutValid", "Unknown", *unknown)
    if not reported and inputs.failed_change is not None and inputs.failed_change.rolled_back_to is not None:
        return UntimedCondition("LayoutValid", "Unknown", Reason.ROLLED_BACK, _rollback_message(inputs.failed_change))
    if not reported:
        return UntimedCondition(
            "LayoutValid", "Unknown", Reason.LAYOUT_UNKNOWN, "no engine has reported its layout yet"
        )
    return UntimedCondition("LayoutValid", "True", Reason.LAYOUT_REPORTED, f"every ready engine runs {wanted}")


def tuning_conditions(inputs: StatusInputs) -> list[UntimedCondition]:
    if inputs.tuning is None and inputs.groups and (blocked := _blocked(inputs)):
        return [
            UntimedCondition("MetricsAvailable", "Unknown", *blocked),
            UntimedCondition("TuningActive", "False", *blocked),
        ]
    if inputs.is_paused:
        return [
            UntimedCondition("MetricsAvailable", "Unknown", Reason.PAUSED, PAUSED_MESSAGE),
            UntimedCondition("TuningActive", "False", Reason.PAUSED, PAUSED_MESSAGE),
        ]
    if inputs.tuning is None:
        message = "no replica runs"
        return [
            UntimedCondition("MetricsAvailable", "Unknown", Reason.STOPPED, message),
            UntimedCondition("TuningActive", "False", Reason.STOPPED, message),
        ]
    return [
        _with_fallback_reason(
            _from_tuner_condition("MetricsAvailable", inputs.tuning.metrics_available), inputs.metrics_fallback_reason
        ),
        _from_tuner_condition("TuningActive", inputs.tuning.tuning_active),
    ]


def _from_tuner_condition(kind: str, found: Condition) -> UntimedCondition:
    return UntimedCondition(kind, "True" if found.ok else "False", found.reason, found.message)


def _with_fallback_reason(condition: UntimedCondition, fallback_reason: str | None) -> UntimedCondition:
    """Return the condition with the reason why pods are scraped instead of querying Prometheus."""
    if fallback_reason is None:
        return condition
    return replace(
        condition,
        message=f"{condition.message}; read from the pods because Prometheus cannot be used: {fallback_reason}",
    )


def scaling_condition(deployment: InferenceDeployment, inputs: StatusInputs) -> UntimedCondition:
    """Return ScalingLimited: True if something limits the present or the wanted replica count."""
    condition = _placement_condition(inputs)
    share = inputs.share
    if condition.status != "True" and share is not None and (share.is_limited or share.is_growth_pending):
        return UntimedCondition("ScalingLimited", "True", Reason.OVER_BUDGET, share.message)
    scaling, tuned = deployment.spec.scaling, inputs.tuning
    if scaling is None:
        return condition
    if condition.status == "True":
        return replace(condition, message=f"{condition.message}; the replica count is not raised meanwhile")
    if deployment.spec.tuning.mode == "Off" or tuned is None:
        return condition
    if tuned.replicas == scaling.max_replicas and tuned.state.violated_since is not None:
        message = f"objectives are violated with scaling.maxReplicas ({scaling.max_replicas}) replicas"
        return UntimedCondition("ScalingLimited", "True", Reason.AT_MAX_REPLICAS, message)
    return condition


def _placement_condition(inputs: StatusInputs) -> UntimedCondition:
    fits = any(group.is_ready and group.revision == inputs.revision for group in inputs.groups)
    if inputs.too_few_gpus is not None and not fits:
        return UntimedCondition("ScalingLimited", "True", Reason.TOO_FEW_GPUS, inputs.too_few_gpus)
    for group in inputs.groups:
        backoff = gang_backoff_of(group)
        if backoff is not None and group.num_pods == 0:
            return UntimedCondition("ScalingLimited", "True", Reason.UNSCHEDULABLE, f"{group.name} {backoff.message}")
        if group.missing is not None and group.missing.error:
            return UntimedCondition(
                "ScalingLimited", "True", Reason.FAILED_CREATE, f"{group.name}: {missing_pods_message(group)}"
            )
        why = next((message for pod in group.pods if (message := unschedulable_message(pod))), None)
        if why is not None:
            return UntimedCondition(
                "ScalingLimited", "True", Reason.UNSCHEDULABLE, f"{group.name} is unschedulable: {why}"
            )
    return UntimedCondition("ScalingLimited", "False", Reason.NOT_LIMITED, "nothing limits the replica count")


def degraded_condition(inputs: StatusInputs, groups: Sequence[Mapping[str, Any]]) -> UntimedCondition:
    """Return Degraded, the one condition for which True is bad."""
    blocked = _blocked(inputs)
    if blocked is not None:
        return UntimedCondition("Degraded", "True", blocked[0], blocked[1])
    unknown = _unknown_model(inputs)
    if unknown is not None and isinstance(inputs.model, ModelUnreadable):
        return UntimedCondition("Degraded", "True", *unknown)
    if inputs.failed_change is not None and inputs.failed_change.rolled_back_to is not None:
        return UntimedCondition("Degraded", "True", Reason.ROLLED_BACK, _rollback_message(inputs.failed_change))
    failed = next((g for g in groups if g["phase"] == "Failed"), None)
    if failed is not None:
        return UntimedCondition(
            "Degraded", "True", Reason.FAILING, f"{failed['name']}: {failed.get('message', 'fails')}"
        )
    if inputs.failed_change is not None:
        return UntimedCondition("Degraded", "True", Reason.START_FAILED, inputs.failed_change.message)
    if inputs.minor_problem is not None:
        return UntimedCondition("Degraded", "True", *inputs.minor_problem)
    return UntimedCondition("Degraded", "False", Reason.AS_EXPECTED, "nothing is wrong")


def join_errors(errors: Iterable[object]) -> str:
    """Return the errors as one message, without those beyond the limits of `cap_findings`."""
    return "; ".join(cap_findings([str(error) for error in errors]))


def with_timestamps(condition: UntimedCondition, deployment: InferenceDeployment, *, now: datetime) -> dict[str, Any]:
    """Return the condition as an object; its transition time changes only with its status."""
    before = next((c for c in deployment.status.get("conditions") or [] if c.get("type") == condition.type), None)
    same = before is not None and before.get("status") == condition.status and before.get("lastTransitionTime")
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": str(condition.reason),
        "message": shorten(condition.message, most=MAX_CONDITION_MESSAGE),
        "observedGeneration": deployment.generation,
        "lastTransitionTime": before["lastTransitionTime"] if same and before else timestamp(now),
    }


def without_foreign_conditions(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without conditions that other controllers write."""
    ours = [condition for condition in status.get("conditions") or [] if condition.get("type") in TYPES]
    return {**status, "conditions": ours} if "conditions" in status else dict(status)


def changed_conditions(
    before: Mapping[str, Any], after: Mapping[str, Any], types: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the conditions of the given types whose status or reason changed; each is reported as an Event."""
    old = {c["type"]: (c.get("status"), c.get("reason")) for c in before.get("conditions") or []}
    wanted = set(types)
    return [c for c in after["conditions"] if c["type"] in wanted and old.get(c["type"]) != (c["status"], c["reason"])]
