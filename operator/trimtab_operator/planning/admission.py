"""Response to an AdmissionReview, computed with the same validation rules as the reconciler. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_operator.errors import InvalidSpec
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.planning.model_facts import cached_facts
from trimtab_operator.planning.router import router_errors
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.limits import cap_findings
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import CLASS_IMMUTABLE, KIND, REPLICAS_IGNORED, InferenceDeployment, class_of
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.validation.engine_flags import argument_warnings
from trimtab_operator.validation.rules import validation_errors

MAX_WARNING = 256  # characters: API servers truncate longer ones, and kubectl prints each on one line


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """Objects needed to validate a resource: its ConfigMap NAME-facts and the nodes; None if they were not read."""

    facts: Manifest | None = None
    nodes: Sequence[Manifest] | None = None


NO_CLUSTER_CONTEXT = ClusterContext()


def validation_messages(
    body: Mapping[str, Any],
    *,
    default_image: str | None,
    allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    facts: ModelFacts | None = None,
    gpu: Gpu | None = None,
    has_router: bool = True,
) -> list[str]:
    """Return all validation errors of a resource as lines; empty if it is valid.

    `has_router` is False if the installation is known to have no routers.
    If fields have the wrong type, the rules check the resource without these fields, so that one answer has all errors.
    """

    def parse(body: Mapping[str, Any]) -> InferenceDeployment:
        return InferenceDeployment.parse(body, default_image=default_image, allowed_privileges=allowed_privileges)

    def check(body: Mapping[str, Any]) -> tuple[ValidationError, ...]:
        deployment = parse(body)
        return (*validation_errors(deployment, facts, gpu), *router_errors(deployment, has_router=has_router))

    try:
        return [str(error) for error in check(body)]
    except InvalidSpec as error:
        findings = list(error.findings)
    wrong = [finding.partition(":")[0] for finding in findings]
    try:
        others = check(_without(body, wrong))
    except InvalidSpec:
        return findings
    return findings + [str(error) for error in others if not any(_overlap(error.field, field) for field in wrong)]


def _without(body: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a resource without these fields, written as in error messages. List items become the list."""
    copy: dict[str, Any] = json.loads(json.dumps(body, default=str))
    for field in fields:
        node: Any = copy
        *parents, last = field.partition("[")[0].split(".")
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return copy


def _overlap(field: str, other: str) -> bool:
    """Return True if one field contains the other."""
    shorter, longer = sorted((field, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def warnings_of(
    deployment: InferenceDeployment, *, known: ClusterContext = NO_CLUSTER_CONTEXT, old: Mapping[str, Any] | None = None
) -> list[str]:
    """Return warnings about a valid spec that may not do what was intended. `old` is the resource before an edit."""
    found = (
        too_few_gpus(deployment, known.nodes),
        _scaling_mode_warning(deployment),
        _replica_jump_warning(deployment, old or {}),
    )
    return [*argument_warnings(deployment), *(warning for warning in found if warning is not None)]


def review(
    request: Mapping[str, Any],
    *,
    default_image: str | None,
    allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    has_router: bool = True,
    known: ClusterContext = NO_CLUSTER_CONTEXT,
) -> dict[str, Any]:
    """Return the response to an AdmissionReview v1. `has_router` is False if the installation has no routers.

    An update that does not change the spec is always allowed: labels and finalizers of a resource that an older version
    accepted must stay editable. So is every update of a resource that is being deleted. A write to /scale is allowed,
    as it contains only a number, which the schema bounds.

    Raises:
        KeyError, TypeError: The request is not an AdmissionReview.
    """
    request_body = request["request"]
    verdict: dict[str, Any] = allow(request_body)["response"]
    new, old = request_body.get("object") or {}, request_body.get("oldObject") or {}
    if should_validate(request_body) and (request_body["operation"] == "CREATE" or new.get("spec") != old.get("spec")):
        errors = validation_messages(
            new, default_image=default_image, allowed_privileges=allowed_privileges, has_router=has_router
        ) or _transition_errors(new, old)
        errors = errors or _new_layout_errors(new, old, default_image, known)
        if errors:
            message = "; ".join(cap_findings(errors))
            verdict |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
        else:
            deployment = InferenceDeployment.parse(new, default_image=default_image)
            warnings = warnings_of(deployment, known=known, old=old)
            verdict |= {"warnings": [warning[:MAX_WARNING] for warning in warnings]} if warnings else {}
    return _answer(verdict)


def allow(request_body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response without findings."""
    return _answer({"uid": str(request_body["uid"]), "allowed": True})


def _answer(verdict: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": verdict}


def _transition_errors(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return the errors of an update: a changed class, and a changed `replicas` that `scaling` would ignore.

    The removal of `replicas` is accepted; the API server replaces it by the default.
    """
    after, before = new.get("spec") or {}, old.get("spec") or {}
    errors = [] if not old or class_of(new) == class_of(old) else [f"spec.class: {CLASS_IMMUTABLE}"]
    is_ignored = after.get("scaling") is not None and before.get("scaling") is not None and "replicas" in before
    if is_ignored and after.get("replicas", 1) not in (1, before["replicas"]):
        errors.append(f"spec.replicas: {REPLICAS_IGNORED}")
    return errors


def _scaling_mode_warning(deployment: InferenceDeployment) -> str | None:
    """Return a warning if `scaling` is set but the tuning mode does not change the replica count."""
    mode = deployment.spec.tuning.mode
    if deployment.spec.scaling is None or mode == "Auto":
        return None
    effect = "only recommends a replica count" if mode == "Recommend" else "does not change the replica count"
    return f"spec.scaling: spec.tuning.mode {mode} {effect}; set Auto to scale automatically"


def _replica_jump_warning(deployment: InferenceDeployment, old: Mapping[str, Any]) -> str | None:
    """Return a warning if removing `scaling` changes the replica count."""
    count = (old.get("status") or {}).get("desiredReplicas")
    was_scaled = (old.get("spec") or {}).get("scaling") is not None
    if not was_scaled or deployment.spec.scaling is not None or count in (None, deployment.spec.replicas):
        return None
    return (
        f"spec.scaling is removed: the replica count changes from {count} to spec.replicas ({deployment.spec.replicas})"
    )


def should_validate(request_body: Mapping[str, Any]) -> bool:
    """Return True for creations and updates of InferenceDeployments that are not being deleted."""
    new = request_body.get("object") or {}
    is_supported_kind = not request_body.get("subResource") and new.get("kind") == KIND
    is_terminating = bool((new.get("metadata") or {}).get("deletionTimestamp"))
    return is_supported_kind and request_body.get("operation") in ("CREATE", "UPDATE") and not is_terminating


def _new_layout_errors(
    new: Mapping[str, Any], old: Mapping[str, Any], default_image: str | None, known: ClusterContext
) -> list[str]:
    """Return the model's layout errors that an edit introduces.

    Errors of the previous spec are reported by the reconciler; they must not block other edits.
    """
    before = set(_layout_errors(old, default_image, known)) if old else set()
    return [line for line in _layout_errors(new, default_image, known) if line not in before]


def _layout_errors(body: Mapping[str, Any], default_image: str | None, known: ClusterContext) -> list[str]:
    try:
        deployment = InferenceDeployment.parse(body, default_image=default_image)
    except InvalidSpec:
        return []
    facts = cached_facts(deployment, known.facts)
    if facts is None:
        return []
    gpu = gpu_for(deployment, known.nodes or ())
    return [str(error) for error in check_layout(deployment.spec, facts, gpu)]
