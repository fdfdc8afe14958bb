"""`status` as a function of what was observed. Pure; nothing in it changes when nothing changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trimtab_operator.builders.engine_args import plain, served_name
from trimtab_operator.builders.labels import HTTP_PORT, leader_selector, selector_text, service_name
from trimtab_operator.layout import layout_of
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, is_worker, ordinal_of, revision_label
from trimtab_operator.observed.phases import EngineView, phase_of
from trimtab_operator.observed.readiness import Readiness, readiness_of, reported_layouts
from trimtab_operator.planning.status_inputs import Findings
from trimtab_operator.report.conditions import conditions, conditions_in_the_dark, said_by_us, timed
from trimtab_operator.report.tuning_status import show, tuning_status
from trimtab_operator.resource.live_parameters import knobs
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.tuner.knobs import Value
from trimtab_operator.tuner.moves import ReplicaCount

MAX_MESSAGE = 1024  # characters of a pod's own message that are worth repeating


def status_of(deployment: InferenceDeployment, findings: Findings, *, now: datetime) -> dict[str, Any]:
    """The complete status. `now` is used only where a condition's status differs from the previous one."""
    groups = [group_status(deployment, group, findings) for group in findings.groups]
    groups += [draining_status(pod) for pod in findings.draining if not is_worker(pod)]
    ready = sum(g["ready"] for g in groups)
    claims = conditions(deployment, findings, groups)
    ready_claim = claims[0]
    status: dict[str, Any] = {
        "observedGeneration": deployment.generation,
        "conditions": [timed(claim, deployment, now=now) for claim in claims],
        "phase": ready_claim.reason if ready_claim.status != "True" else "Ready",
        "ready": f"{ready}/{findings.desired_replicas}",
        "replicas": len(findings.groups),
        "readyReplicas": ready,
        "updatedReplicas": sum(g["ready"] and g["revision"] == findings.revision for g in groups),
        "desiredReplicas": findings.desired_replicas,
        **_wanted(findings),
        **_last_scaled(deployment, findings),
        "selector": selector_text(leader_selector(deployment)),
        "url": f"http://{service_name(deployment)}.{deployment.namespace}.svc:{HTTP_PORT}/v1",
        "model": served_name((findings.target or deployment).spec),
    }
    if findings.model_revision is not None:
        status["modelRevision"] = findings.model_revision
    if groups:
        status["groups"] = groups
    if not findings.refusals:
        status["layout"] = layout_status(deployment, findings)
        status["engine"] = engine_status(findings.target or deployment, findings)
    tuning = tuning_status(deployment, findings)
    if tuning:
        status["tuning"] = tuning
    _keep_exceptions(status)
    return status


def status_in_the_dark(deployment: InferenceDeployment, problem: tuple[str, str], *, now: datetime) -> dict[str, Any]:
    """The status when the children cannot be seen: as it was, but for the conditions that say so. What was observed of
    which generation stays as it was, too."""
    reason, message = problem
    claims = [timed(claim, deployment, now=now) for claim in conditions_in_the_dark(reason, message)]
    renewed = {claim["type"]: claim for claim in claims}
    known = said_by_us(deployment.status)
    before = [renewed.pop(c["type"], c) for c in known.get("conditions") or []]
    return {**known, "conditions": [*before, *renewed.values()], "phase": reason}


def _wanted(findings: Findings) -> dict[str, int]:
    """How many would be there if the GPU budget allowed it."""
    share = findings.share
    return {"wantedReplicas": share.wanted} if share is not None and share.is_limited else {}


def _last_scaled(deployment: InferenceDeployment, findings: Findings) -> dict[str, str]:
    """When tuning last changed the replica count. While it is not asked, what stood there before stays."""
    if deployment.spec.scaling is None:
        return {}
    before = deployment.status.get("lastScaleTime")
    moved = None if findings.tuning is None else findings.tuning.memory.moved_at.get(ReplicaCount().value)
    at = before if moved is None else timestamp(datetime.fromtimestamp(moved, UTC))
    return {} if at is None else {"lastScaleTime": str(at)}


# --- replicas ---------------------------------------------------------------------------------------------------------


def group_status(deployment: InferenceDeployment, group: Group, findings: Findings) -> dict[str, Any]:
    """One entry of `groups`."""
    view = (findings.engines or {}).get(group.name, EngineView())
    wanted = Degrees.wanted(deployment.spec)
    readiness = readiness_of(
        group, findings.engines, revision=findings.revision, wanted=wanted, previous=deployment.status
    )
    phase, message = phase_of(group, view)
    if readiness is Readiness.OTHER_LAYOUT:
        phase, message = "Failed", f"its engine runs {view.layout}; asked for was {wanted}"
    elif readiness is Readiness.UNVERIFIED:
        phase, message = "Loading", "its engine has not said yet what layout it runs"
    entry: dict[str, Any] = {
        "name": group.name,
        "ordinal": group.ordinal,
        "revision": group.revision,
        "phase": phase,
        "ready": readiness is Readiness.READY,
    }
    load = _load(deployment, group, view)
    if load is not None and phase in ("Loading", "Ready"):
        entry["load"] = load
    if view.config_generation is not None:
        entry["configGeneration"] = view.config_generation
    if message:
        entry["message"] = message[:MAX_MESSAGE]
    if view.applied:
        entry["effective"] = effective(view)
    return entry


def _load(deployment: InferenceDeployment, group: Group, view: EngineView) -> dict[str, Any] | None:
    """How far it has loaded. One that does not answer for a moment is where it was."""
    if group.is_ready:
        return {"stage": "ready", "percent": 100}
    if view.load is None:
        groups: list[dict[str, Any]] = deployment.status.get("groups") or []
        said: dict[str, Any] | None = next((g.get("load") for g in groups if g.get("name") == group.name), None)
        return None if said is None or said.get("stage") == "ready" else said
    load: dict[str, Any] = {"stage": view.load[0], "percent": view.load[1]}
    if view.load_message:
        load["message"] = view.load_message
    if view.downloaded_bytes is not None:
        load["downloadedBytes"] = view.downloaded_bytes
    return load


def draining_status(pod: Manifest) -> dict[str, Any]:
    """A replica that was removed and whose pod still finishes its requests."""
    return {
        "name": str(pod["metadata"]["name"]).rsplit("-", 1)[0],
        "ordinal": ordinal_of(pod) or 0,
        "revision": revision_label(pod),
        "phase": "Draining",
        "ready": False,
    }


def layout_status(deployment: InferenceDeployment, findings: Findings) -> dict[str, Any]:
    """What is asked for, and what a ready replica reports: one that differs, where there is one."""
    layout, wanted = layout_of(deployment.spec), Degrees.wanted(deployment.spec)
    status: dict[str, Any] = {
        **wanted.status(),
        "podsPerReplica": layout.pods,
        "gpusPerPod": layout.gpus_per_pod,
    }
    reported = [found for _, found in reported_layouts(findings.groups, findings.engines, findings.revision)]
    if reported:
        status["reported"] = next((found for found in reported if found != wanted), wanted).status()
    return status


# --- engine and tuning ------------------------------------------------------------------------------------------------


def engine_status(deployment: InferenceDeployment, findings: Findings) -> dict[str, Any]:
    """Configured: start values and caps. Effective: what most ready engines report."""
    configured: dict[str, Any] = {}
    for knob in knobs(deployment.spec):
        for suffix, value in (("", knob.start), ("_cap", knob.cap)):
            if value is not None:
                configured[camel(knob.field + suffix)] = plain(value)
    reported = [effective(view) for view in (findings.engines or {}).values() if view.applied]
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


def effective(view: EngineView) -> dict[str, str]:
    """What an engine runs now: every number, and the order of its queue."""
    order = {} if view.queue_policy is None else {"schedulingPolicy": view.queue_policy}
    return shown(view.applied or {}) | order


def shown(values: Mapping[str, Value]) -> dict[str, str]:
    """Engine values as they stand in status: strings, in camel case, in one spelling."""
    return {camel(str(name)): show(value) for name, value in sorted(values.items())}


def camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
