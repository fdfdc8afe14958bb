"""What the scheduler made of a pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time


def node_of(pod: Manifest) -> str | None:
    """The node that a pod was given; None while it waits for one."""
    return (pod.get("spec") or {}).get("nodeName") or None


def placed_since(pod: Manifest) -> datetime | None:
    """When the pod was given its node; None while it waits for one."""
    condition = _scheduled(pod, "True")
    return None if condition is None else parse_time(condition.get("lastTransitionTime"))


def unschedulable(pod: Manifest) -> str | None:
    """The scheduler's reason why no node takes the pod; None when one does."""
    condition = _scheduled(pod, "False")
    return None if condition is None else str(condition.get("message") or condition.get("reason") or "no node takes it")


def unschedulable_since(pod: Manifest) -> datetime | None:
    condition = _scheduled(pod, "False")
    return None if condition is None else parse_time(condition.get("lastTransitionTime"))


def readiness_since(pod: Manifest) -> datetime | None:
    """When the pod became Ready, or ceased to be; when it was made, where nothing says."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    changed = next((c.get("lastTransitionTime") for c in conditions if c.get("type") == "Ready"), None)
    return parse_time(changed) or parse_time(pod["metadata"].get("creationTimestamp"))


def _scheduled(pod: Manifest, status: str) -> Mapping[str, Any] | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == status), None)
