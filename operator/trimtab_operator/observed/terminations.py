"""Terminations of engine containers as reported in pod status: count, exit code, OOM kills, last message. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time

OUT_OF_MEMORY = "OOMKilled"  # the kubelet's reason
EVICTED = "Evicted"  # the kubelet's reason under node pressure; its message names the resource
CRASH_LOOP = "CrashLoopBackOff"  # the kubelet delays restarts of a container that keeps terminating
UNKNOWN_STATUS = ("Unknown", "ContainerStatusUnknown")  # the kubelet's reasons after its node restarted
NODE_REASONS = (EVICTED, "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity")
DISRUPTION_TARGET = "DisruptionTarget"  # condition of a pod that the control plane or the kubelet ends
NO_TERMINATION_MESSAGE = "no reason is known"


def num_terminations(pod: Manifest) -> int:
    """Return how often the engine has terminated in this pod, whether or not it was restarted."""
    return _is_evicted(pod) + sum(int(s.get("restartCount", 0)) + _has_ended(s) for s in _statuses(pod))


def num_crashes(pod: Manifest) -> int:
    """Return how often the engine terminated by itself in this pod.

    The end of a pod that is deleted, evicted, preempted or on a lost node does not count, nor does a node's restart.
    """
    count = 0
    for status in _statuses(pod):
        count += int(status.get("restartCount", 0)) + _has_ended(status)
        is_ended = "terminated" in (status.get("state") or {})
        if (is_ended and _is_disrupted(pod)) or _last_end(status).get("reason") in UNKNOWN_STATUS:
            count -= 1
    return max(0, count)


def last_termination_time(pod: Manifest) -> float | None:
    """Return the Unix time of the engine's latest termination, or None if it is unknown."""
    times = (parse_time(_last_end(status).get("finishedAt")) for status in _statuses(pod))
    return max((moment.timestamp() for moment in times if moment is not None), default=None)


def exit_code_of(pod: Manifest) -> int | None:
    """Return the exit code of the engine's latest termination, or None if it never terminated."""
    codes = [code for status in _statuses(pod) if isinstance(code := _last_end(status).get("exitCode"), int)]
    return codes[0] if codes else None


def was_oom_killed(pod: Manifest) -> bool:
    """Return True if the engine's latest termination was caused by memory exhaustion."""
    evicted = str((pod.get("status") or {}).get("message")) if _is_evicted(pod) else ""
    return "memory" in evicted or any(_last_end(s).get("reason") == OUT_OF_MEMORY for s in _statuses(pod))


def last_termination_message(pod: Manifest) -> str:
    """Return the last line of the engine's termination message and its exit code."""
    return next((termination_message(status) for status in _statuses(pod)), NO_TERMINATION_MESSAGE)


def termination_message(container: Mapping[str, Any]) -> str:
    """Return the last line of a container's termination message and its exit code."""
    end = _last_end(container)
    if not end:
        return NO_TERMINATION_MESSAGE
    lines = [line for line in str(end.get("message", "")).strip().splitlines() if line.strip()]
    message = lines[-1].strip() if lines else str(end.get("reason", ""))
    return f"{message} (exit code {end.get('exitCode')})"


def _statuses(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """Yield the statuses of the engine container."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name", CONTAINER) == CONTAINER:
            yield status


def _has_ended(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return "terminated" in state or (state.get("waiting") or {}).get("reason") == CRASH_LOOP


def _last_end(status: Mapping[str, Any]) -> Mapping[str, Any]:
    ends = ((status.get(name) or {}).get("terminated") for name in ("state", "lastState"))
    return next((end for end in ends if end), {})


def _is_disrupted(pod: Manifest) -> bool:
    """Return True if the pod ends for a reason outside its containers."""
    status = pod.get("status") or {}
    conditions = status.get("conditions") or []
    return (
        "deletionTimestamp" in pod["metadata"]
        or status.get("reason") in NODE_REASONS
        or any(each.get("type") == DISRUPTION_TARGET and each.get("status") == "True" for each in conditions)
    )


def _is_evicted(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("reason") == EVICTED
