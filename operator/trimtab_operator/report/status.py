"""Status of a resource, computed from observations. Pure; unchanged inputs give an unchanged status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trimtab_operator.builders.engine_args import served_name
from trimtab_operator.builders.labels import HTTP_PORT, leader_selector, selector_text, service_name
from trimtab_operator.layout import layout_of
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, is_worker, ordinal_of, revision_label
from trimtab_operator.observed.phases import EngineView, phase_of
from trimtab_operator.observed.readiness import Readiness, readiness_of, reported_layouts
from trimtab_operator.planning.router import RouterView
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.report.conditions import (
    build_conditions,
    conditions_without_observation,
    with_timestamps,
    without_foreign_conditions,
)
from trimtab_operator.report.tuning_status import format_number, tuning_status
from trimtab_operator.resource.live_parameters import live_parameters, plain
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.tuner.moves import ReplicaCount
from trimtab_operator.tuner.parameters import Value

MAX_MESSAGE = 1024  # characters of a pod's message


def build_status(deployment: InferenceDeployment, inputs: StatusInputs, *, now: datetime) -> dict[str, Any]:
    """Return the complete status. `now` is used only for conditions whose status changed."""
    groups = [group_status(deployment, group, inputs) for group in inputs.groups]
    groups += [draining_status(pod) for pod in inputs.draining if not is_worker(pod)]
    ready = sum(g["ready"] for g in groups)
    untimed = build_conditions(deployment, inputs, groups)
    ready_condition = untimed[0]
    status: dict[str, Any] = {
        "observedGeneration": deployment.generation,
        "conditions": [with_timestamps(condition, deployment, now=now) for condition in untimed],
        "phase": ready_condition.reason if ready_condition.status != "True" else "Ready",
        "ready": f"{ready}/{inputs.desired_replicas}",
        "replicas": len(inputs.groups),
        "readyReplicas": ready,
        "updatedReplicas": sum(g["ready"] and g["revision"] == inputs.revision for g in groups),
        "desiredReplicas": inputs.desired_replicas,
        **_wanted(inputs),
        **_last_scaled(deployment, inputs),
        "selector": selector_text(leader_selector(deployment)),
        "url": f"http://{service_name(deployment)}.{deployment.namespace}.svc:{HTTP_PORT}/v1",
        "model": served_name((inputs.target or deployment).spec),
    }
    if inputs.model_revision is not None:
        status["modelRevision"] = inputs.model_revision
    if groups:
        status["groups"] = groups
    if not inputs.validation_errors:
        status["layout"] = layout_status(deployment, inputs)
        status["engine"] = engine_status(inputs.target or deployment, inputs)
    if inputs.router is not None:
        status["router"] = router_status(inputs.router)
    tuning = tuning_status(deployment, inputs)
    if tuning:
        status["tuning"] = tuning
    _keep_exceptions(status)
    return status


def status_without_observation(
    deployment: InferenceDeployment, problem: tuple[str, str], *, now: datetime
) -> dict[str, Any]:
    """Return the status for when the children cannot be read: the previous one with conditions that report the problem.

    `observedGeneration` values stay as they were.
    """
    reason, message = problem
    untimed = [
        with_timestamps(condition, deployment, now=now) for condition in conditions_without_observation(reason, message)
    ]
    renewed = {condition["type"]: condition for condition in untimed}
    known = without_foreign_conditions(deployment.status)
    before = [renewed.pop(c["type"], c) for c in known.get("conditions") or []]
    return {**known, "conditions": [*before, *renewed.values()], "phase": reason}


def _wanted(inputs: StatusInputs) -> dict[str, int]:
    """Return the replica count without the limit of the GPU budget, if it limits the count."""
    share = inputs.share
    return {"wantedReplicas": share.wanted} if share is not None and share.is_limited else {}


def _last_scaled(deployment: InferenceDeployment, inputs: StatusInputs) -> dict[str, str]:
    """Return when the tuner last changed the replica count; the previous value if the tuner did not run."""
    if deployment.spec.scaling is None:
        return {}
    before = deployment.status.get("lastScaleTime")
    moved = None if inputs.tuning is None else inputs.tuning.state.moved_at.get(ReplicaCount().value)
    at = before if moved is None else timestamp(datetime.fromtimestamp(moved, UTC))
    return {} if at is None else {"lastScaleTime": str(at)}


# --- replicas ---------------------------------------------------------------------------------------------------------


def group_status(deployment: InferenceDeployment, group: Group, inputs: StatusInputs) -> dict[str, Any]:
    """Return one entry of `groups`."""
    view = (inputs.engines or {}).get(group.name, EngineView())
    wanted = Degrees.wanted(deployment.spec)
    readiness = readiness_of(group, inputs.engines, revision=inputs.revision, wanted=wanted, previous=deployment.status)
    phase, message = phase_of(group, view)
    if readiness is Readiness.OTHER_LAYOUT:
        phase, message = "Failed", f"its engine runs {view.layout} instead of {wanted}"
    elif readiness is Readiness.UNVERIFIED:
        phase, message = "Loading", "its engine has not reported its layout yet"
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
        entry["effective"] = effective_values(view)
    return entry


def _load(deployment: InferenceDeployment, group: Group, view: EngineView) -> dict[str, Any] | None:
    """Return the load progress; the previous one if the engine does not answer for a moment."""
    if group.is_ready:
        return {"stage": "ready", "percent": 100}
    if view.load is None:
        groups: list[dict[str, Any]] = deployment.status.get("groups") or []
        previous: dict[str, Any] | None = next((g.get("load") for g in groups if g.get("name") == group.name), None)
        return None if previous is None or previous.get("stage") == "ready" else previous
    load: dict[str, Any] = {"stage": view.load[0], "percent": view.load[1]}
    if view.load_message:
        load["message"] = view.load_message
    if view.downloaded_bytes is not None:
        load["downloadedBytes"] = view.downloaded_bytes
    return load


def draining_status(pod: Manifest) -> dict[str, Any]:
    """Return the entry of a removed replica whose pod still finishes its requests."""
    return {
        "name": str(pod["metadata"]["name"]).rsplit("-", 1)[0],
        "ordinal": ordinal_of(pod) or 0,
        "revision": revision_label(pod),
        "phase": "Draining",
        "ready": False,
    }


def layout_status(deployment: InferenceDeployment, inputs: StatusInputs) -> dict[str, Any]:
    """Return the wanted layout and the reported one: a differing one if there is any."""
    layout, wanted = layout_of(deployment.spec), Degrees.wanted(deployment.spec)
    status: dict[str, Any] = {
        **wanted.status(),
        "podsPerReplica": layout.pods,
        "gpusPerPod": layout.gpus_per_pod,
    }
    reported = [found for _, found in reported_layouts(inputs.groups, inputs.engines, inputs.revision)]
    if reported:
        status["reported"] = next((found for found in reported if found != wanted), wanted).status()
    return status


def router_status(router: RouterView) -> dict[str, Any]:
    """Return the state of the router. Held requests are not part of it, because they change all the time."""
    status = {"replicas": router.replicas, "readyReplicas": router.ready, "selected": router.is_selected}
    return status if router.obstacle is None else {**status, "message": router.obstacle}


# --- engine and tuning ------------------------------------------------------------------------------------------------


def engine_status(deployment: InferenceDeployment, inputs: StatusInputs) -> dict[str, Any]:
    """Return the configured start values and caps, and the values that most ready engines report."""
    configured: dict[str, Any] = {}
    for knob in live_parameters(deployment.spec, deployment.caps):
        for suffix, value in (("", knob.start), ("_cap", knob.cap)):
            if value is not None:
                configured[camel(knob.field + suffix)] = plain(value)
    reported = [effective_values(view) for view in (inputs.engines or {}).values() if view.applied]
    status: dict[str, Any] = {"configured": configured}
    if reported:
        status["effective"] = max(reported, key=reported.count)
    return status


def _keep_exceptions(status: dict[str, Any]) -> None:
    """Remove `groups[].effective` where it equals the common values."""
    common = status.get("engine", {}).get("effective")
    for group in status.get("groups", []):
        if group.get("effective") == common:
            group.pop("effective", None)


def effective_values(view: EngineView) -> dict[str, str]:
    """Return the values in force in an engine: all numbers and the scheduling policy."""
    order = {} if view.queue_policy is None else {"schedulingPolicy": view.queue_policy}
    return format_values(view.applied or {}) | order


def format_values(values: Mapping[str, Value]) -> dict[str, str]:
    """Return engine values as strings with camelCase names."""
    return {camel(str(name)): format_number(value) for name, value in sorted(values.items())}


def camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
