"""The ten conditions as functions of what was observed. Pure.

Every reason is a member of `Reason` (or of the tuner's enums) and is documented in docs/reference/resource.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.hold import hold_of
from trimtab_operator.observed.missing_pods import missing_sentence
from trimtab_operator.observed.phases import DOWNLOAD
from trimtab_operator.observed.pods import unschedulable
from trimtab_operator.observed.readiness import reported_layouts
from trimtab_operator.planning import gpu_budget as budget
from trimtab_operator.planning.model_facts import Reading, Unreadable
from trimtab_operator.planning.status_inputs import Findings
from trimtab_operator.resource.spec import PAUSED, RESTARTED_AT, InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.rollback import FailedChange
from trimtab_operator.tuner.decide import Condition


class Reason(StrEnum):
    """Why a condition is as it is."""

    READY = "ReplicasReady"  # every wanted replica runs what is asked for now, and takes requests
    ANSWERED = "RequestsAnswered"  # some replica takes requests, of whichever revision
    SCALED_TO_ZERO = "ScaledToZero"  # spec.replicas is 0
    NOT_READY = "ReplicasNotReady"  # some wanted replica does not take requests, and is not known to load
    LOADING = "Loading"  # a replica loads its model
    DOWNLOADING = "Downloading"  # a replica fetches its model, or waits for one that does
    PENDING = "Pending"  # a replica's pod does not run yet
    FAILING = "ReplicaFailing"  # a replica crashes again and again, or its image cannot be pulled
    INVALID = "InvalidSpec"  # the spec asks for something that cannot be carried out
    READING_MODEL = "ReadingModel"  # a Job reads what the model is; no engine starts before
    MODEL_UNREADABLE = "ModelUnreadable"  # that Job failed; it is tried again
    NAME_TAKEN = "NameTaken"  # an object with a child's name belongs to somebody else
    MISSING_RIGHT = "MissingRight"  # the operator's role does not allow what is to be done
    RECONCILE_ERROR = "ReconcileError"  # the API server refused, or the operator failed; it tries again
    ROLLED_BACK = "RolledBack"  # a change did not come up; replicas run the last revision that worked
    START_FAILED = "StartFailed"  # no replica of the first revision became Ready in its time
    ROLLING_OUT = "RollingOut"  # replicas are brought to a new revision
    SCALING = "Scaling"  # replicas are added or removed
    PAUSED = "Paused"  # nothing is changed, as its owner asks by an annotation
    SETTLED = "Settled"  # what runs is what is wanted
    LAYOUT_REPORTED = "LayoutReported"  # every ready engine runs the layout that was asked for
    LAYOUT_DIFFERS = "LayoutDiffers"  # an engine runs another layout
    LAYOUT_UNKNOWN = "NotYetReported"  # no engine has reported its layout
    NOT_LIMITED = "NotLimited"  # nothing keeps the replica count from what is wanted
    TOO_FEW_GPUS = "TooFewGPUsPerNode"  # a pod asks for more GPUs than any present node has
    UNSCHEDULABLE = "Unschedulable"  # pods of replicas find no node
    OVER_BUDGET = budget.OVER_BUDGET  # the GPU budget of the operator allows fewer replicas than are wanted
    AT_MAX_REPLICAS = "AtMaxReplicas"  # promises are missed with as many replicas as scaling allows
    PODS_REFUSED = "PodsRefused"  # the API server refuses to create pods: a quota, a policy
    AS_EXPECTED = "AsExpected"  # nothing is wrong
    STOPPED = "Stopped"  # nothing runs that could be tuned or measured


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
STANDS_STILL = f"nothing is changed, as the annotation {PAUSED} asks; remove it, and it goes on"


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition without its times."""

    type: str
    status: str
    reason: str
    message: str


def conditions(deployment: InferenceDeployment, findings: Findings, groups: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """All ten conditions, Ready first."""
    progressing, ready = progressing_claim(deployment, findings, groups), ready_claim(findings, groups)
    return [
        ready,
        serving_claim(findings, groups),
        Claim("Reconciling", progressing.status, progressing.reason, progressing.message),
        stalled_claim(findings, progressing, ready),
        progressing,
        layout_claim(deployment, findings),
        *tuning_claims(findings),
        scaling_claim(deployment, findings),
        degraded_claim(findings, groups),
    ]


def conditions_in_the_dark(reason: str, message: str) -> list[Claim]:
    """What can be said when the children cannot be seen: replicas may take requests, but nobody looks after them."""
    return [
        Claim("Ready", "Unknown", reason, message),
        Claim("Reconciling", "False", reason, message),
        Claim("Stalled", "True", reason, message),
        Claim("Progressing", "False", reason, message),
        Claim("Degraded", "True", reason, message),
    ]


def ready_claim(findings: Findings, groups: Sequence[Mapping[str, Any]]) -> Claim:
    """Whether what is asked for now runs: not what ran before, nor what a change was taken back to."""
    held = _blocked(findings) or _unknown_model(findings)
    if held is not None:
        return Claim("Ready", "False", *held)
    if findings.failed_change is not None:
        failed = findings.failed_change
        reason = Reason.START_FAILED if failed.returns_to is None else Reason.ROLLED_BACK
        return Claim("Ready", "False", reason, failed.message if failed.returns_to is None else _back(failed))
    share = findings.share
    if share is not None and (share.is_below_least or share.waits_to_grow):
        return Claim("Ready", "False", Reason.OVER_BUDGET, share.message)
    wanted = findings.desired_replicas
    ready = sum(g["ready"] for g in groups)
    current = sum(g["ready"] and g["revision"] == findings.revision for g in groups)
    if wanted == 0:
        return Claim("Ready", "True", Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing runs, as asked")
    if current >= wanted:
        return Claim("Ready", "True", Reason.READY, f"{current} of {wanted} replicas take requests")
    if ready >= wanted:
        message = f"{current} of {wanted} replicas run what is asked for now; {ready} take requests"
        return Claim("Ready", "False", Reason.ROLLING_OUT, message)
    reason, why = _why_not_ready(groups)
    return Claim("Ready", "False", reason, f"{ready} of {wanted} replicas take requests{why}")


def serving_claim(findings: Findings, groups: Sequence[Mapping[str, Any]]) -> Claim:
    """Whether traffic is answered, by whichever revision."""
    if any(g["ready"] for g in groups) or any(group.is_outdated and group.serves for group in findings.groups):
        return Claim("Serving", "True", Reason.ANSWERED, "clients are answered")
    if findings.share is not None and findings.share.is_limited and findings.desired_replicas == 0:
        return Claim("Serving", "False", Reason.OVER_BUDGET, findings.share.message)
    if findings.desired_replicas == 0:
        return Claim("Serving", "False", Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing runs, as asked")
    return Claim("Serving", "False", Reason.NOT_READY, "no replica takes requests")


def stalled_claim(findings: Findings, progressing: Claim, ready: Claim) -> Claim:
    """Whether it will not go on until somebody acts."""
    stuck = _blocked(findings) is not None or findings.failed_change is not None
    stuck = stuck or (findings.is_paused and ready.status != "True")
    if progressing.status != "True" and (stuck or isinstance(findings.model, Unreadable)):
        return Claim("Stalled", "True", progressing.reason, progressing.message)
    return Claim("Stalled", "False", Reason.AS_EXPECTED, "nothing stands in the way")


def _why_not_ready(groups: Sequence[Mapping[str, Any]]) -> tuple[Reason, str]:
    """The worst thing first; messages name the replica but no percentages, which change all the time."""
    order = (("Failed", Reason.FAILING), ("Pending", Reason.PENDING), ("Loading", Reason.LOADING))
    for phase, reason in order:
        found = next((g for g in groups if g["phase"] == phase), None)
        if found is not None:
            detail = found.get("message")
            if reason is Reason.LOADING and _downloads(found):
                return Reason.DOWNLOADING, f"; {found['name']} downloads its model"
            return reason, f"; {found['name']} is {phase.lower()}" + (f": {detail}" if detail else "")
    return (Reason.NOT_READY, "") if groups else (Reason.PENDING, "; none is created yet")


def _downloads(group: Mapping[str, Any]) -> bool:
    return group["phase"] == "Loading" and (group.get("load") or {}).get("stage") == DOWNLOAD


def _blocked(findings: Findings) -> tuple[str, str] | None:
    if findings.refusals:
        return Reason.INVALID, "; ".join(str(refusal) for refusal in findings.refusals)
    return findings.problem


def _unknown_model(findings: Findings) -> tuple[Reason, str] | None:
    """Why nothing is known of the model yet; None when it is known, or does not matter."""
    if isinstance(findings.model, Reading):
        return Reason.READING_MODEL, findings.model.message
    if isinstance(findings.model, Unreadable):
        return Reason.MODEL_UNREADABLE, f"the model cannot be read: {findings.model.message}; it is tried again"
    return None


def progressing_claim(
    deployment: InferenceDeployment, findings: Findings, groups: Sequence[Mapping[str, Any]]
) -> Claim:
    blocked = _blocked(findings)
    if blocked is not None:
        return Claim("Progressing", "False", blocked[0], blocked[1])
    if findings.is_paused:
        return Claim("Progressing", "False", Reason.PAUSED, STANDS_STILL)
    unknown = _unknown_model(findings)
    if unknown is not None:
        return Claim("Progressing", "True" if isinstance(findings.model, Reading) else "False", *unknown)
    if findings.failed_change is not None:
        return _failed_change_claim(deployment, findings.failed_change, findings, groups)
    if findings.share is not None and findings.share.waits_to_grow:
        return Claim("Progressing", "False", Reason.OVER_BUDGET, findings.share.message)
    if findings.trying is not None:
        return Claim("Progressing", "True", Reason.ROLLING_OUT, findings.trying)
    if any(group.revision != findings.revision or group.is_outdated for group in findings.groups):
        how = "" if findings.no_room is None else f", in place: {findings.no_room}"
        return Claim(
            "Progressing", "True", Reason.ROLLING_OUT, f"replicas are brought to the current pod template{how}"
        )
    if len(findings.groups) != findings.desired_replicas or findings.draining:
        return Claim("Progressing", "True", Reason.SCALING, f"the replica count moves to {findings.desired_replicas}")
    if any(_downloads(g) for g in groups):
        return Claim(
            "Progressing", "True", Reason.DOWNLOADING, "replicas download the model; groups[].load says how far"
        )
    if any(g["phase"] == "Loading" for g in groups):
        return Claim("Progressing", "True", Reason.LOADING, "replicas load the model")
    if any(not g["ready"] for g in groups):
        return Claim("Progressing", "True", Reason.PENDING, "replicas wait for their pods")
    settled = "what runs is what is wanted"
    if findings.keeps_older_pods:
        settled += (
            f"; new pods would be rendered otherwise by now: another text in the annotation {RESTARTED_AT} asks for"
        )
        settled += " them"
    return Claim("Progressing", "False", Reason.SETTLED, settled)


def _failed_change_claim(
    deployment: InferenceDeployment, failed: FailedChange, findings: Findings, groups: Sequence[Mapping[str, Any]]
) -> Claim:
    if failed.returns_to is None:
        return Claim("Progressing", "False", Reason.START_FAILED, failed.message)
    is_back = all(group.revision == failed.returns_to and not group.is_outdated for group in findings.groups)
    is_settled = is_back and len(groups) == findings.desired_replicas and all(g["ready"] for g in groups)
    return Claim("Progressing", "False" if is_settled else "True", Reason.ROLLED_BACK, _back(failed))


def _back(failed: FailedChange) -> str:
    return f"a change was taken back until the spec changes again: {failed.message}"


def layout_claim(deployment: InferenceDeployment, findings: Findings) -> Claim:
    refused = findings.layout_refusals or [r for r in findings.refusals if r.field.startswith("spec.parallelism")]
    if refused:
        return Claim("LayoutValid", "False", Reason.INVALID, "; ".join(str(refusal) for refusal in refused))
    wanted = Degrees.wanted(deployment.spec)
    reported = dict(reported_layouts(findings.groups, findings.engines, findings.revision))
    wrong = sorted(name for name, layout in reported.items() if layout != wanted)
    if wrong:
        message = f"{wrong[0]} runs {reported[wrong[0]]}; asked for was {wanted}"
        return Claim("LayoutValid", "False", Reason.LAYOUT_DIFFERS, message)
    unknown = _unknown_model(findings)
    if not reported and unknown is not None:
        return Claim("LayoutValid", "Unknown", *unknown)
    if not reported and findings.failed_change is not None and findings.failed_change.returns_to is not None:
        return Claim("LayoutValid", "Unknown", Reason.ROLLED_BACK, _back(findings.failed_change))
    if not reported:
        return Claim("LayoutValid", "Unknown", Reason.LAYOUT_UNKNOWN, "no engine has reported its layout yet")
    return Claim("LayoutValid", "True", Reason.LAYOUT_REPORTED, f"every ready engine runs {wanted}, as asked")


def tuning_claims(findings: Findings) -> list[Claim]:
    if findings.tuning is None and findings.groups and (blocked := _blocked(findings)):
        return [Claim("MetricsAvailable", "Unknown", *blocked), Claim("TuningActive", "False", *blocked)]
    if findings.is_paused:
        return [
            Claim("MetricsAvailable", "Unknown", Reason.PAUSED, STANDS_STILL),
            Claim("TuningActive", "False", Reason.PAUSED, STANDS_STILL),
        ]
    if findings.tuning is None:
        message = "nothing runs that could be measured"
        return [
            Claim("MetricsAvailable", "Unknown", Reason.STOPPED, message),
            Claim("TuningActive", "False", Reason.STOPPED, message),
        ]
    return [
        _with_detour(_from_condition("MetricsAvailable", findings.tuning.metrics_available), findings.metrics_detour),
        _from_condition("TuningActive", findings.tuning.tuning_active),
    ]


def _from_condition(kind: str, found: Condition) -> Claim:
    return Claim(kind, "True" if found.ok else "False", found.reason, found.message)


def _with_detour(claim: Claim, detour: str | None) -> Claim:
    """The same, with why the pods are asked instead of Prometheus."""
    if detour is None:
        return claim
    return replace(claim, message=f"{claim.message}; read from the pods, as Prometheus is of no use: {detour}")


def scaling_claim(deployment: InferenceDeployment, findings: Findings) -> Claim:
    """What keeps the replica count from what is wanted, or what is wanted from what is needed."""
    claim = _placing_claim(findings)
    share = findings.share
    if claim.status != "True" and share is not None and (share.is_limited or share.waits_to_grow):
        return Claim("ScalingLimited", "True", Reason.OVER_BUDGET, share.message)
    scaling, tuned = deployment.spec.scaling, findings.tuning
    if scaling is None:
        return claim
    if claim.status == "True":
        return replace(claim, message=f"{claim.message}; no more replicas are asked for meanwhile")
    if deployment.spec.tuning.mode == "Off" or tuned is None:
        return claim
    if tuned.replicas == scaling.max_replicas and tuned.memory.missed_since is not None:
        message = f"promises are missed with all of the {scaling.max_replicas} replicas that scaling.maxReplicas allows"
        return Claim("ScalingLimited", "True", Reason.AT_MAX_REPLICAS, message)
    return claim


def _placing_claim(findings: Findings) -> Claim:
    fits = any(group.is_ready and group.revision == findings.revision for group in findings.groups)
    if findings.too_few_gpus is not None and not fits:
        return Claim("ScalingLimited", "True", Reason.TOO_FEW_GPUS, findings.too_few_gpus)
    for group in findings.groups:
        hold = hold_of(group)
        if hold is not None and group.num_pods == 0:
            return Claim("ScalingLimited", "True", Reason.UNSCHEDULABLE, f"{group.name} {hold.sentence}")
        if group.missing is not None and group.missing.words:
            return Claim("ScalingLimited", "True", Reason.PODS_REFUSED, f"{group.name}: {missing_sentence(group)}")
        why = next((said for pod in group.pods if (said := unschedulable(pod))), None)
        if why is not None:
            return Claim("ScalingLimited", "True", Reason.UNSCHEDULABLE, f"{group.name} finds no node: {why}")
    return Claim("ScalingLimited", "False", Reason.NOT_LIMITED, "nothing keeps the replica count from what is wanted")


def degraded_claim(findings: Findings, groups: Sequence[Mapping[str, Any]]) -> Claim:
    """The one condition where True is bad."""
    blocked = _blocked(findings)
    if blocked is not None:
        return Claim("Degraded", "True", blocked[0], blocked[1])
    unknown = _unknown_model(findings)
    if unknown is not None and isinstance(findings.model, Unreadable):
        return Claim("Degraded", "True", *unknown)
    if findings.failed_change is not None and findings.failed_change.returns_to is not None:
        return Claim("Degraded", "True", Reason.ROLLED_BACK, _back(findings.failed_change))
    failed = next((g for g in groups if g["phase"] == "Failed"), None)
    if failed is not None:
        return Claim("Degraded", "True", Reason.FAILING, f"{failed['name']}: {failed.get('message', 'fails')}")
    if findings.failed_change is not None:
        return Claim("Degraded", "True", Reason.START_FAILED, findings.failed_change.message)
    return Claim("Degraded", "False", Reason.AS_EXPECTED, "nothing is wrong")


def timed(claim: Claim, deployment: InferenceDeployment, *, now: datetime) -> dict[str, Any]:
    """A claim as a condition; its transition time is the previous one unless its status changed."""
    before = next((c for c in deployment.status.get("conditions") or [] if c.get("type") == claim.type), None)
    same = before is not None and before.get("status") == claim.status and before.get("lastTransitionTime")
    return {
        "type": claim.type,
        "status": claim.status,
        "reason": str(claim.reason),
        "message": claim.message,
        "observedGeneration": deployment.generation,
        "lastTransitionTime": before["lastTransitionTime"] if same and before else timestamp(now),
    }


def said_by_us(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status without the conditions that others have put beside ours: they are theirs to write and to remove."""
    ours = [condition for condition in status.get("conditions") or [] if condition.get("type") in TYPES]
    return {**status, "conditions": ours} if "conditions" in status else dict(status)


def changed_conditions(
    before: Mapping[str, Any], after: Mapping[str, Any], types: Iterable[str]
) -> list[dict[str, Any]]:
    """Conditions of the named types whose status or reason changed: each is worth an Event."""
    old = {c["type"]: (c.get("status"), c.get("reason")) for c in before.get("conditions") or []}
    wanted = set(types)
    return [c for c in after["conditions"] if c["type"] in wanted and old.get(c["type"]) != (c["status"], c["reason"])]
