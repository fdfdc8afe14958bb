"""Scheduling state of a pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time


def node_of(pod: Manifest) -> str | None:
    """Return the pod's node, or None while it is unscheduled."""
    return (pod.get("spec") or {}).get("nodeName") or None


def placed_since(pod: Manifest) -> datetime | None:
    """Return when the pod was scheduled, or None while it is not."""
    condition = _scheduled(pod, "True")
    return None if condition is None else parse_time(condition.get("lastTransitionTime"))


def unschedulable_message(pod: Manifest) -> str | None:
    """Return the scheduler's reason why no node fits the pod, or None if the pod is not unschedulable."""
    condition = _scheduled(pod, "False")
    return None if condition is None else str(condition.get("message") or condition.get("reason") or "no node fits")


def unschedulable_since(pod: Manifest) -> datetime | None:
    condition = _scheduled(pod, "False")
    return None if condition is None else parse_time(condition.get("lastTransitionTime"))


def readiness_since(pod: Manifest) -> datetime | None:
    """Return when the pod's readiness last changed; its creation time if that is unknown."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    changed = next((c.get("lastTransitionTime") for c in conditions if c.get("type") == "Ready"), None)
    return parse_time(changed) or parse_time(pod["metadata"].get("creationTimestamp"))


def _scheduled(pod: Manifest, status: str) -> Mapping[str, Any] | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == status), None)
