"""The verdict on one AdmissionReview: pure, from the same table of rules as the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.errors import InvalidSpec
from trimtab_operator.spec import KIND, InferenceDeployment
from trimtab_operator.validation import refusals


def refusals_of(body: Mapping[str, Any], *, default_image: str | None) -> list[str]:
    """Everything that is wrong with a resource, as lines; empty when it can be carried out."""
    try:
        deployment = InferenceDeployment.parse(body, default_image=default_image)
    except InvalidSpec as error:
        return str(error).split("; ")
    return [str(refusal) for refusal in refusals(deployment)]


def review(request: Mapping[str, Any], *, default_image: str | None) -> dict[str, Any]:
    """Answer an AdmissionReview v1. Raises KeyError or TypeError when it is none.

    An update that leaves the spec alone is allowed whatever the spec says: labels and finalizers of a resource that an
    older version accepted must stay editable. So is everything on a resource that is being deleted. A write to /scale
    carries a number alone, which the schema bounds; it is allowed.
    """
    asked = request["request"]
    verdict: dict[str, Any] = {"uid": str(asked["uid"]), "allowed": True}
    new, old = asked.get("object") or {}, asked.get("oldObject") or {}
    is_ours = not asked.get("subResource") and new.get("kind") == KIND
    is_checked = (
        is_ours
        and asked.get("operation") in ("CREATE", "UPDATE")
        and not (new.get("metadata") or {}).get("deletionTimestamp")
    )
    if is_checked and (asked["operation"] == "CREATE" or new.get("spec") != old.get("spec")):
        wrong = refusals_of(new, default_image=default_image)
        if wrong:
            message = "; ".join(wrong)
            verdict |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": verdict}
