"""The verdict on one AdmissionReview: pure, from the same table of rules as the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_operator.errors import InvalidSpec
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.planning.model_facts import cached_facts
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, REPLICAS_ARE_NOT_ASKED, InferenceDeployment
from trimtab_operator.validation.rules import refusals

MAX_WARNING = 256  # characters: API servers cut longer ones, and kubectl shows each on a line


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the cluster knows beside the resource: its ConfigMap NAME-facts, and nodes. None: not seen."""

    facts: Manifest | None = None
    nodes: Sequence[Manifest] | None = None


NOTHING_KNOWN = Surroundings()


def refusals_of(
    body: Mapping[str, Any],
    *,
    default_image: str | None,
    allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    facts: ModelFacts | None = None,
    gpu: Gpu | None = None,
) -> list[str]:
    """Everything that is wrong with a resource, as lines; empty when it can be carried out."""
    try:
        deployment = InferenceDeployment.parse(body, default_image=default_image, allowed_privileges=allowed_privileges)
    except InvalidSpec as error:
        return list(error.findings)
    return [str(refusal) for refusal in refusals(deployment, facts, gpu)]


def warnings_of(
    deployment: InferenceDeployment, *, known: Surroundings = NOTHING_KNOWN, old: Mapping[str, Any] | None = None
) -> list[str]:
    """What is accepted and may not be what was meant. `old` is the resource before an edit."""
    said = (too_few_gpus(deployment, known.nodes), _only_told(deployment), _jump(deployment, old or {}))
    return [warning for warning in said if warning is not None]


def review(
    request: Mapping[str, Any],
    *,
    default_image: str | None,
    allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    known: Surroundings = NOTHING_KNOWN,
) -> dict[str, Any]:
    """Answer an AdmissionReview v1. Raises KeyError or TypeError when it is none.

    An update that leaves the spec alone is allowed whatever the spec says: labels and finalizers of a resource that an
    older version accepted must stay editable. So is everything on a resource that is being deleted. A write to /scale
    carries a number alone, which the schema bounds; it is allowed.
    """
    asked = request["request"]
    verdict: dict[str, Any] = {"uid": str(asked["uid"]), "allowed": True}
    new, old = asked.get("object") or {}, asked.get("oldObject") or {}
    if is_checked(asked) and (asked["operation"] == "CREATE" or new.get("spec") != old.get("spec")):
        wrong = refusals_of(
            new, default_image=default_image, allowed_privileges=allowed_privileges
        ) or _changed_unheard(new, old)
        wrong = wrong or _newly_wrong_by_facts(new, old, default_image, known)
        if wrong:
            message = "; ".join(wrong)
            verdict |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
        else:
            deployment = InferenceDeployment.parse(new, default_image=default_image)
            warnings = warnings_of(deployment, known=known, old=old)
            verdict |= {"warnings": [warning[:MAX_WARNING] for warning in warnings]} if warnings else {}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": verdict}


def _changed_unheard(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """A change of `replicas` while `scaling` was and is set, which nobody would hear."""
    after, before = new.get("spec") or {}, old.get("spec") or {}
    if after.get("scaling") is None or before.get("scaling") is None or "replicas" not in before:
        return []
    return [f"spec.replicas: {REPLICAS_ARE_NOT_ASKED}"] if after.get("replicas", 1) != before["replicas"] else []


def _only_told(deployment: InferenceDeployment) -> str | None:
    """Automatic replicas that nobody adds or removes."""
    mode = deployment.spec.tuning.mode
    if deployment.spec.scaling is None or mode == "Auto":
        return None
    does = "only tells how many replicas are needed" if mode == "Recommend" else "leaves the replica count as it is"
    return f"spec.scaling: spec.tuning.mode {mode} {does}; set Auto, and it is done"


def _jump(deployment: InferenceDeployment, old: Mapping[str, Any]) -> str | None:
    """What becomes of the count when `scaling` is removed."""
    count = (old.get("status") or {}).get("desiredReplicas")
    was_scaled = (old.get("spec") or {}).get("scaling") is not None
    if not was_scaled or deployment.spec.scaling is not None or count in (None, deployment.spec.replicas):
        return None
    return f"spec.scaling is removed: replicas go from {count} to spec.replicas, which is {deployment.spec.replicas}"


def is_checked(asked: Mapping[str, Any]) -> bool:
    """Whether it is a write of ours to judge."""
    new = asked.get("object") or {}
    is_ours = not asked.get("subResource") and new.get("kind") == KIND
    is_going = bool((new.get("metadata") or {}).get("deletionTimestamp"))
    return is_ours and asked.get("operation") in ("CREATE", "UPDATE") and not is_going


def _newly_wrong_by_facts(
    new: Mapping[str, Any], old: Mapping[str, Any], default_image: str | None, known: Surroundings
) -> list[str]:
    """What the model says against an edit. What it said against the spec before is the loop's to tell: it must not
    keep the owner from changing something else.
    """
    before = set(_wrong_by_facts(old, default_image, known)) if old else set()
    return [line for line in _wrong_by_facts(new, default_image, known) if line not in before]


def _wrong_by_facts(body: Mapping[str, Any], default_image: str | None, known: Surroundings) -> list[str]:
    try:
        deployment = InferenceDeployment.parse(body, default_image=default_image)
    except InvalidSpec:
        return []
    facts = cached_facts(deployment, known.facts)
    if facts is None:
        return []
    gpu = gpu_for(deployment, known.nodes or ())
    return [str(refusal) for refusal in check_layout(deployment.spec, facts, gpu)]
