"""`status` as a function of what was observed. Pure; nothing in it changes when nothing changed.

Every reason is a member of `Reason` (or of the tuner's enums) and is documented in docs/resource.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from trimtab_operator.builders.engine_args import plain, served_name
from trimtab_operator.builders.labels import HTTP_PORT, leader_selector, selector_text, service_name
from trimtab_operator.engine_values import knobs
from trimtab_operator.layout import layout_of
from trimtab_operator.plan import Group, Manifest, is_terminating
from trimtab_operator.refusal import Refusal
from trimtab_operator.spec import InferenceDeployment
from trimtab_operator.tuner import Decision, Knob, Value, Verdict

MAX_MESSAGE = 1024  # characters of a pod's own message that are worth repeating


class Reason(StrEnum):
    """Why a condition is as it is."""

    READY = "ReplicasReady"  # every wanted replica takes requests
    SCALED_TO_ZERO = "ScaledToZero"  # spec.replicas is 0
    NOT_READY = "ReplicasNotReady"  # some wanted replica does not take requests, and is not known to load
    LOADING = "Loading"  # a replica loads its model
    PENDING = "Pending"  # a replica's pod does not run yet
    FAILING = "ReplicaFailing"  # a replica crashes again and again, or its image cannot be pulled
    INVALID = "InvalidSpec"  # the spec asks for something that cannot be carried out
    NAME_TAKEN = "NameTaken"  # an object with a child's name belongs to somebody else
    RECONCILE_ERROR = "ReconcileError"  # the API server refused, or the operator failed; it tries again
    ROLLING_OUT = "RollingOut"  # replicas are brought to a new revision
    SCALING = "Scaling"  # replicas are added or removed
    SETTLED = "Settled"  # what runs is what is wanted
    LAYOUT_REPORTED = "LayoutReported"  # every ready engine runs as many ranks as asked for
    LAYOUT_DIFFERS = "WorldSizeDiffers"  # an engine runs another number of ranks
    LAYOUT_UNKNOWN = "NotYetReported"  # no engine has reported its layout
    NOT_LIMITED = "NotLimited"  # nothing keeps the replica count from what is wanted
    UNSCHEDULABLE = "Unschedulable"  # pods of replicas find no node
    AS_EXPECTED = "AsExpected"  # nothing is wrong
    STOPPED = "Stopped"  # nothing runs that could be tuned or measured


@dataclass(frozen=True, slots=True)
class EngineView:
    """What one engine said of itself; None where it did not answer. `load` is (stage, percent)."""

    load: tuple[str, int] | None = None
    config_generation: int | None = None
    applied: Mapping[str, Value] | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class TuningView:
    """What the tuner said in this tick."""

    metrics_available: Verdict
    tuning_active: Verdict
    applied: Mapping[Knob, Value]
    history: Sequence[Decision]
    recommendation: Decision | None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a status is made from. `problem` is a (reason, message) that keeps the loop from working."""

    groups: tuple[Group, ...] = ()
    draining: tuple[Manifest, ...] = ()
    revision: str = ""
    engines: Mapping[str, EngineView] | None = None
    tuning: TuningView | None = None
    refusals: tuple[Refusal, ...] = ()
    problem: tuple[Reason, str] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition without its times."""

    type: str
    status: str
    reason: str
    message: str


def status_of(deployment: InferenceDeployment, facts: Facts, *, now: datetime) -> dict[str, Any]:
    """The complete status. `now` is used only where a condition's status differs from the previous one."""
    groups = [group_status(group, facts) for group in facts.groups]
    groups += [draining_status(pod) for pod in facts.draining]
    ready = sum(g["ready"] for g in groups)
    claims = conditions(deployment, facts, groups)
    ready_claim = claims[0]
    status: dict[str, Any] = {
        "observedGeneration": deployment.generation,
        "conditions": [timed(claim, deployment, now=now) for claim in claims],
        "phase": ready_claim.reason if ready_claim.status != "True" else "Ready",
        "ready": f"{ready}/{deployment.replicas}",
        "replicas": len(facts.groups),
        "readyReplicas": ready,
        "updatedReplicas": sum(group.is_ready and group.revision == facts.revision for group in facts.groups),
        "desiredReplicas": deployment.replicas,
        "selector": selector_text(leader_selector(deployment)),
        "url": f"http://{service_name(deployment)}.{deployment.namespace}.svc:{HTTP_PORT}/v1",
        "model": served_name(deployment.spec),
    }
    if groups:
        status["groups"] = groups
    if not facts.refusals:
        layout = layout_of(deployment.spec)
        status["layout"] = {
            "worldSize": layout.world_size,
            "podsPerReplica": layout.pods,
            "gpusPerPod": layout.gpus_per_pod,
        }
        status["engine"] = engine_status(deployment, facts)
    tuning = tuning_status(deployment, facts)
    if tuning:
        status["tuning"] = tuning
    _keep_exceptions(status)
    return status


# --- replicas ---------------------------------------------------------------------------------------------------------


def group_status(group: Group, facts: Facts) -> dict[str, Any]:
    """One entry of `groups`."""
    view = (facts.engines or {}).get(group.name, EngineView())
    phase, message = phase_of(group, view)
    entry: dict[str, Any] = {
        "name": group.name,
        "ordinal": group.ordinal,
        "revision": group.revision,
        "phase": phase,
        "ready": group.is_ready,
    }
    load = ("ready", 100) if group.is_ready else view.load
    if load is not None and phase in ("Loading", "Ready"):
        entry["load"] = {"stage": load[0], "percent": load[1]}
    if view.config_generation is not None:
        entry["configGeneration"] = view.config_generation
    if message:
        entry["message"] = message[:MAX_MESSAGE]
    if view.applied:
        entry["effective"] = shown(view.applied)
    return entry


def draining_status(pod: Manifest) -> dict[str, Any]:
    """A replica that was removed and whose pod still finishes its requests."""
    labels = pod["metadata"].get("labels") or {}
    return {
        "name": str(pod["metadata"]["name"]).rsplit("-", 1)[0],
        "ordinal": int(labels.get("trimtab.dev/group", 0)),
        "revision": str(labels.get("trimtab.dev/revision", "")),
        "phase": "Draining",
        "ready": False,
    }


def phase_of(group: Group, view: EngineView) -> tuple[str, str | None]:
    """The group's phase, and a message when something is wrong."""
    pod = group.pod
    if pod is None:
        return "Pending", "the pod is not created yet"
    if is_terminating(pod) or group.pod_revision != group.revision:
        failure = failure_of(pod)
        return ("Failed", failure) if failure else ("Updating", None)
    if group.is_ready:
        return "Ready", None
    failure = failure_of(pod)
    if failure:
        return "Failed", failure
    if is_container_running(pod):
        return "Loading", None
    return "Pending", unschedulable(pod) or waiting_reason(pod)


def failure_of(pod: Manifest) -> str | None:
    """Why a pod keeps failing: crash loops, images that cannot be pulled; None when it does not."""
    for container in _container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason == "CrashLoopBackOff":
            return f"the engine crashes again and again: {_last_words(container)}"
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"):
            return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
        terminated = (container.get("state") or {}).get("terminated") or {}
        if terminated and terminated.get("exitCode") not in (0, None):
            return f"the engine ended: {_last_words(container)}"
    return None


def _last_words(container: Mapping[str, Any]) -> str:
    """The last line that a container said, and its exit code."""
    state = (container.get("state") or {}).get("terminated") or (container.get("lastState") or {}).get("terminated")
    if not state:
        return "no reason is known"
    lines = [line for line in str(state.get("message", "")).strip().splitlines() if line.strip()]
    said = lines[-1].strip() if lines else str(state.get("reason", ""))
    return f"{said} (exit code {state.get('exitCode')})"


def is_container_running(pod: Manifest) -> bool:
    return any("running" in (c.get("state") or {}) for c in _container_statuses(pod))


def waiting_reason(pod: Manifest) -> str | None:
    for container in _container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return str(waiting.get("reason", "")) or None
    return None


def unschedulable(pod: Manifest) -> str | None:
    """The scheduler's reason why no node takes the pod; None when one does."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "no node takes the pod")
    return None


def _container_statuses(pod: Manifest) -> list[Mapping[str, Any]]:
    return list((pod.get("status") or {}).get("containerStatuses") or [])


# --- conditions -------------------------------------------------------------------------------------------------------


def conditions(deployment: InferenceDeployment, facts: Facts, groups: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """All seven conditions, Ready first."""
    return [
        ready_claim(deployment, facts, groups),
        progressing_claim(deployment, facts, groups),
        layout_claim(deployment, facts),
        *tuning_claims(facts),
        scaling_claim(facts),
        degraded_claim(facts, groups),
    ]


def ready_claim(deployment: InferenceDeployment, facts: Facts, groups: Sequence[Mapping[str, Any]]) -> Claim:
    blocked = _blocked(facts)
    if blocked is not None:
        return Claim("Ready", "False", blocked[0], blocked[1])
    wanted = deployment.replicas
    ready = sum(g["ready"] for g in groups)
    if wanted == 0:
        return Claim("Ready", "True", Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing runs, as asked")
    if ready >= wanted:
        return Claim("Ready", "True", Reason.READY, f"{ready} of {wanted} replicas take requests")
    reason, why = _why_not_ready(groups)
    return Claim("Ready", "False", reason, f"{ready} of {wanted} replicas take requests{why}")


def _why_not_ready(groups: Sequence[Mapping[str, Any]]) -> tuple[Reason, str]:
    """The worst thing first; messages name the replica but no percentages, which change all the time."""
    order = (("Failed", Reason.FAILING), ("Pending", Reason.PENDING), ("Loading", Reason.LOADING))
    for phase, reason in order:
        found = next((g for g in groups if g["phase"] == phase), None)
        if found is not None:
            detail = found.get("message")
            return reason, f"; {found['name']} is {phase.lower()}" + (f": {detail}" if detail else "")
    return Reason.NOT_READY, ""


def _blocked(facts: Facts) -> tuple[Reason, str] | None:
    if facts.refusals:
        return Reason.INVALID, "; ".join(str(refusal) for refusal in facts.refusals)
    return facts.problem


def progressing_claim(deployment: InferenceDeployment, facts: Facts, groups: Sequence[Mapping[str, Any]]) -> Claim:
    blocked = _blocked(facts)
    if blocked is not None:
        return Claim("Progressing", "False", blocked[0], blocked[1])
    if any(
        group.revision != facts.revision or group.pod_revision not in (None, group.revision) for group in facts.groups
    ):
        return Claim("Progressing", "True", Reason.ROLLING_OUT, "replicas are brought to the current pod template")
    if len(facts.groups) != deployment.replicas or facts.draining:
        return Claim("Progressing", "True", Reason.SCALING, f"the replica count moves to {deployment.replicas}")
    if any(g["phase"] == "Loading" for g in groups):
        return Claim("Progressing", "True", Reason.LOADING, "replicas load the model")
    if any(not g["ready"] for g in groups):
        return Claim("Progressing", "True", Reason.PENDING, "replicas wait for their pods")
    return Claim("Progressing", "False", Reason.SETTLED, "what runs is what is wanted")


def layout_claim(deployment: InferenceDeployment, facts: Facts) -> Claim:
    refused = [r for r in facts.refusals if r.field.startswith("spec.parallelism")]
    if refused:
        return Claim("LayoutValid", "False", Reason.INVALID, "; ".join(str(refusal) for refusal in refused))
    wanted = layout_of(deployment.spec).world_size
    reported = {name: v.world_size for name, v in (facts.engines or {}).items() if v.world_size is not None}
    wrong = {name: size for name, size in reported.items() if size != wanted}
    if wrong:
        name, size = sorted(wrong.items())[0]
        return Claim(
            "LayoutValid", "False", Reason.LAYOUT_DIFFERS, f"{name} runs {size} ranks, {wanted} were asked for"
        )
    if not reported:
        return Claim("LayoutValid", "Unknown", Reason.LAYOUT_UNKNOWN, "no engine has reported its layout yet")
    return Claim("LayoutValid", "True", Reason.LAYOUT_REPORTED, f"every ready engine runs {wanted} rank(s), as asked")


def tuning_claims(facts: Facts) -> list[Claim]:
    if facts.tuning is None and facts.groups and (blocked := _blocked(facts)):
        return [Claim("MetricsAvailable", "Unknown", *blocked), Claim("TuningActive", "False", *blocked)]
    if facts.tuning is None:
        message = "nothing runs that could be measured"
        return [
            Claim("MetricsAvailable", "Unknown", Reason.STOPPED, message),
            Claim("TuningActive", "False", Reason.STOPPED, message),
        ]
    return [
        _from_verdict("MetricsAvailable", facts.tuning.metrics_available),
        _from_verdict("TuningActive", facts.tuning.tuning_active),
    ]


def _from_verdict(kind: str, verdict: Verdict) -> Claim:
    return Claim(kind, "True" if verdict.ok else "False", verdict.reason, verdict.message)


def scaling_claim(facts: Facts) -> Claim:
    stuck = [(g.name, unschedulable(g.pod)) for g in facts.groups if g.pod is not None and unschedulable(g.pod)]
    if stuck:
        name, why = stuck[0]
        return Claim("ScalingLimited", "True", Reason.UNSCHEDULABLE, f"{name} finds no node: {why}")
    return Claim("ScalingLimited", "False", Reason.NOT_LIMITED, "nothing keeps the replica count from what is wanted")


def degraded_claim(facts: Facts, groups: Sequence[Mapping[str, Any]]) -> Claim:
    """The one condition where True is bad."""
    blocked = _blocked(facts)
    if blocked is not None:
        return Claim("Degraded", "True", blocked[0], blocked[1])
    failed = next((g for g in groups if g["phase"] == "Failed"), None)
    if failed is not None:
        return Claim("Degraded", "True", Reason.FAILING, f"{failed['name']}: {failed.get('message', 'fails')}")
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


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as the API server writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- engine and tuning ------------------------------------------------------------------------------------------------


def engine_status(deployment: InferenceDeployment, facts: Facts) -> dict[str, Any]:
    """Configured: start values and caps. Effective: what most ready engines report."""
    configured: dict[str, Any] = {}
    for knob in knobs(deployment.spec):
        for suffix, value in (("", knob.start), ("_cap", knob.cap)):
            if value is not None:
                configured[camel(knob.field + suffix)] = plain(value)
    reported = [shown(view.applied) for view in (facts.engines or {}).values() if view.applied]
    status: dict[str, Any] = {"configured": configured}
    if reported:
        status["effective"] = max(reported, key=reported.count)
    return status


def _keep_exceptions(status: dict[str, Any]) -> None:
    """`groups[].effective` stays only where it differs from what all report."""
    common = status.get("engine", {}).get("effective")
    for group in status.get("groups", []):
        if group.get("effective") == common:
            group.pop("effective", None)


def shown(values: Mapping[str, Value]) -> dict[str, str]:
    """Engine values as they stand in status: strings, in camel case, in one spelling."""
    return {camel(str(name)): show(value) for name, value in sorted(values.items())}


def show(value: Value | None) -> str:
    """Ten significant digits are more than any knob has."""
    return "" if value is None else f"{value:.10g}"


def camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def tuning_status(deployment: InferenceDeployment, facts: Facts) -> dict[str, Any]:
    """`status.tuning`; while nothing runs, what stood there before stays."""
    if facts.tuning is None:
        before = deployment.status.get("tuning")
        return dict(before) if before else {}
    tuning: dict[str, Any] = {"mode": deployment.spec.tuning.mode}
    if facts.tuning.applied:
        tuning["applied"] = {str(knob.value): show(value) for knob, value in sorted(facts.tuning.applied.items())}
    if facts.tuning.recommendation is not None:
        tuning["recommendation"] = decision_status(facts.tuning.recommendation)
    if facts.tuning.history:
        tuning["history"] = [decision_status(decision) for decision in reversed(facts.tuning.history)]
    return tuning


def decision_status(decision: Decision) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": decision.id,
        "time": timestamp(datetime.fromtimestamp(decision.at, UTC)),
        "reason": decision.reason.value,
        "message": decision.sentence,
    }
    if decision.knob is not None:
        entry |= {"knob": decision.knob.value, "from": show(decision.before), "to": show(decision.after)}
    return entry


def applied_values(status: Mapping[str, Any]) -> dict[str, Value]:
    """`status.tuning.applied` as numbers again; what is no number is left out."""
    found: dict[str, Value] = {}
    for name, text in ((status.get("tuning") or {}).get("applied") or {}).items():
        try:
            found[name] = int(text) if re.fullmatch(r"-?\d+", str(text)) else float(text)
        except ValueError:
            continue
    return found


def changed_conditions(
    before: Mapping[str, Any], after: Mapping[str, Any], types: Iterable[str]
) -> list[dict[str, Any]]:
    """Conditions of the named types whose status or reason changed: each is worth an Event."""
    old = {c["type"]: (c.get("status"), c.get("reason")) for c in before.get("conditions") or []}
    wanted = set(types)
    return [c for c in after["conditions"] if c["type"] in wanted and old.get(c["type"]) != (c["status"], c["reason"])]
