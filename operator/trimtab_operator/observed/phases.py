"""What one replica is doing, from its pods and from what its engine says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.ends import CRASH_LOOP, words_of
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.hold import hold_of
from trimtab_operator.observed.missing_pods import missing_sentence
from trimtab_operator.observed.pods import node_of, unschedulable
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.tuner.knobs import Value

DOWNLOAD = "download"  # the stage in which an engine fetches its model


@dataclass(frozen=True, slots=True)
class EngineView:
    """What one engine said of itself; None where it did not answer. `load` is (stage, percent), `load_message` the same
    in the engine's words, `downloaded_bytes` what it fetched before that, `instance` its leader's uid."""

    load: tuple[str, int] | None = None
    load_message: str | None = None
    downloaded_bytes: int | None = None
    instance: str = ""
    config_generation: int | None = None
    applied: Mapping[str, Value] | None = None
    queue_policy: str | None = None
    layout: Degrees | None = None


def phase_of(group: Group, view: EngineView) -> tuple[str, str | None]:
    """The group's phase, and a message when something is wrong."""
    hold = hold_of(group)
    if hold is not None and group.num_pods == 0:
        return "Pending", hold.sentence
    if not group.pods:
        return "Pending", missing_sentence(group)
    if group.is_terminating or group.is_outdated:
        failure = _first(group, failure_of)
        return ("Failed", failure) if failure else ("Updating", None)
    if group.is_ready:
        return "Ready", None
    failure = _first(group, failure_of)
    if failure:
        return "Failed", failure
    if group.is_torn:
        return "Updating", "a pod was replaced; its engine ends, and all its pods start a new one"
    is_missing = len(group.pods) < group.num_pods
    if not is_missing and all(is_container_running(pod) for pod in group.pods):
        return "Loading", None
    if group.missing is not None and group.missing.words:
        return "Pending", missing_sentence(group)
    said = _first(group, unschedulable) or _first(group, waiting_reason)
    return "Pending", said or (missing_sentence(group) if is_missing else None)


def _first(group: Group, says: Callable[[Manifest], str | None]) -> str | None:
    """What the first pod that has something to say says, under its name where there are several."""
    for pod in group.pods:
        said = says(pod)
        if said:
            return f"{pod['metadata']['name']}: {said}" if group.num_pods > 1 else said
    return None


def failure_of(pod: Manifest) -> str | None:
    """Why a pod keeps failing: crash loops, images that cannot be pulled, a node that gave it up; None when it does
    not."""
    given_up = _given_up(pod)
    if given_up is not None:
        return given_up
    for container in _container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason == CRASH_LOOP:
            return f"the engine crashes again and again: {words_of(container)}"
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"):
            return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
        terminated = (container.get("state") or {}).get("terminated") or {}
        if terminated and terminated.get("exitCode") not in (0, None):
            return f"the engine ended: {words_of(container)}"
    return None


def _given_up(pod: Manifest) -> str | None:
    """Why the kubelet gave the whole pod up: its node ran short of something, or does not take it after all."""
    status = pod.get("status") or {}
    reason = status.get("reason")
    if status.get("phase") != "Failed" or not reason:
        return None
    return f"{reason}: {' '.join(str(status.get('message') or '').split())}".rstrip(": ")


def is_container_running(pod: Manifest) -> bool:
    return any("running" in (c.get("state") or {}) for c in _container_statuses(pod))


def is_placed(group: Group) -> bool:
    """Whether all pods that a group asks for are there and have their nodes."""
    return len(group.pods) == group.num_pods > 0 and all(node_of(pod) for pod in group.pods)


def has_started(group: Group) -> bool:
    """Whether the engine of a group has come up since its pods were made, and still runs: if it is not ready, it may be
    so again in a moment."""
    if group.leader is None or group.is_terminating or group.is_outdated:
        return False
    engine = next((c for c in _container_statuses(group.leader) if c.get("name") == CONTAINER), {})
    return "running" in (engine.get("state") or {}) and engine.get("started") is not False


def waiting_reason(pod: Manifest) -> str | None:
    for container in _container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return str(waiting.get("reason", "")) or None
    return None


def _container_statuses(pod: Manifest) -> list[Mapping[str, Any]]:
    return list((pod.get("status") or {}).get("containerStatuses") or [])
