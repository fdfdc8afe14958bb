"""Phase of one replica, from its pods and its engine's reports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.gang_backoff import gang_backoff_of
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.missing_pods import missing_pods_message
from trimtab_operator.observed.pods import node_of, unschedulable_message
from trimtab_operator.observed.start_errors import STARTING_REASONS
from trimtab_operator.observed.terminations import CRASH_LOOP, num_crashes, termination_message
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.tuner.parameters import Value

ENGINE = "the engine"
DOWNLOAD = "download"  # load stage in which the engine downloads its model


@dataclass(frozen=True, slots=True)
class EngineView:
    """The part of an engine observation that the status shows; values that were not reported are None.

    `load` is (stage, percent), `load_message` the engine's own description of it, `downloaded_bytes` the size of the
    download before it, and `instance` the uid of the leader pod.
    """

    load: tuple[str, int] | None = None
    load_message: str | None = None
    downloaded_bytes: int | None = None
    instance: str = ""
    config_generation: int | None = None
    applied: Mapping[str, Value] | None = None
    queue_policy: str | None = None
    layout: Degrees | None = None


def phase_of(group: Group, view: EngineView) -> tuple[str, str | None]:
    """Return the group's phase, and a message if something is wrong."""
    backoff = gang_backoff_of(group)
    if backoff is not None and group.num_pods == 0:
        return "Pending", backoff.message
    if not group.pods:
        return "Pending", missing_pods_message(group)
    if group.is_terminating or group.is_outdated:
        failure = _first(group, pod_failure_message)
        return ("Failed", failure) if failure else ("Updating", None)
    if group.is_ready:
        return "Ready", None
    failure = _first(group, pod_failure_message)
    if failure:
        return "Failed", failure
    if group.is_split:
        return "Updating", "a pod was replaced; the engine restarts in all pods of the group"
    is_missing = len(group.pods) < group.num_pods
    if not is_missing and all(is_container_running(pod) for pod in group.pods):
        return "Loading", None
    if group.missing is not None and group.missing.error:
        return "Pending", missing_pods_message(group)
    message = _first(group, unschedulable_message) or _first(group, lambda pod: _start_error(group, pod))
    message = message or _first(group, waiting_reason)
    return "Pending", message or (missing_pods_message(group) if is_missing else None)


def _start_error(group: Group, pod: Manifest) -> str | None:
    error = group.start_errors.get(pod["metadata"]["name"])
    return None if error is None else error.message


def _first(group: Group, describe: Callable[[Manifest], str | None]) -> str | None:
    """Return the first message of the group's pods, prefixed with the pod's name if there are several."""
    for pod in group.pods:
        message = describe(pod)
        if message:
            return f"{pod['metadata']['name']}: {message}" if group.num_pods > 1 else message
    return None


def pod_failure_message(pod: Manifest) -> str | None:
    """Return why a pod keeps failing, or None if it does not.

    Covers containers that crash, and containers that wait for anything but their start, such as an image that cannot be
    pulled, in init containers and sidecars as well; and pods that the kubelet evicted or rejected.
    """
    rejection = _kubelet_rejection(pod)
    if rejection is not None:
        return rejection
    for container, whose in _named_containers(pod):
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason == CRASH_LOOP:
            return f"{whose} is in a crash loop: {termination_message(container)}"
        if reason not in STARTING_REASONS:
            what = "" if whose == ENGINE else f"{whose}: "
            return f"{what}{reason}: {waiting.get('message') or ''}".rstrip(": ")
        terminated = state.get("terminated") or {}
        if terminated and terminated.get("exitCode") not in (0, None):
            return f"{whose} terminated: {termination_message(container)}"
    return None


def _named_containers(pod: Manifest) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the status of each container and what to call it, the engine first."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    for container in sorted(containers, key=lambda one: one.get("name", CONTAINER) != CONTAINER):
        is_engine = container.get("name", CONTAINER) == CONTAINER
        yield container, ENGINE if is_engine else f"container {container['name']}"
    for container in status.get("initContainerStatuses") or []:
        yield container, f"init container {container.get('name')}"


def _kubelet_rejection(pod: Manifest) -> str | None:
    """Return why the kubelet evicted or rejected the pod, or None if it did not."""
    status = pod.get("status") or {}
    reason = status.get("reason")
    if status.get("phase") != "Failed" or not reason:
        return None
    return f"{reason}: {' '.join(str(status.get('message') or '').split())}".rstrip(": ")


def is_container_running(pod: Manifest) -> bool:
    return any("running" in (c.get("state") or {}) for c in _container_statuses(pod))


def is_placed(group: Group) -> bool:
    """Return True if all pods of the group exist and are scheduled."""
    return len(group.pods) == group.num_pods > 0 and all(node_of(pod) for pod in group.pods)


def has_engine_started(group: Group) -> bool:
    """Return True if the group's engine has started since its pods were created, and its container still runs.

    If such an engine is not ready, it may become ready again soon.
    """
    if group.leader is None or group.is_terminating or group.is_outdated:
        return False
    engine = next((c for c in _container_statuses(group.leader) if c.get("name") == CONTAINER), {})
    return "running" in (engine.get("state") or {}) and engine.get("started") is not False


def crashes_at_start(group: Group) -> bool:
    """Return True if the group's engine has ended before it started, or keeps failing to start."""
    is_failing = any(pod_failure_message(pod) is not None or num_crashes(pod) for pod in group.pods)
    return is_failing and not has_engine_started(group)


def waiting_reason(pod: Manifest) -> str | None:
    for container in _container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return str(waiting.get("reason", "")) or None
    return None


def _container_statuses(pod: Manifest) -> list[Mapping[str, Any]]:
    return list((pod.get("status") or {}).get("containerStatuses") or [])
