"""How engines ended, as Kubernetes tells it: how often, with which exit code, for want of memory, their words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.resource.manifest import Manifest

OUT_OF_MEMORY = "OOMKilled"  # the reason that the kubelet gives
EVICTED = "Evicted"  # likewise, where a node runs short of something; its message names what
CRASH_LOOP = "CrashLoopBackOff"  # the kubelet waits before it starts a container again that keeps ending
NO_WORDS = "no reason is known"


def ends_of(pod: Manifest) -> int:
    """How often the engine has ended in this pod, whether or not it was started again."""
    return _is_evicted(pod) + sum(int(s.get("restartCount", 0)) + _has_ended(s) for s in _statuses(pod))


def exit_code_of(pod: Manifest) -> int | None:
    """With which the engine ended last; None: it never did."""
    codes = [code for status in _statuses(pod) if isinstance(code := _last_end(status).get("exitCode"), int)]
    return codes[0] if codes else None


def was_oom_killed(pod: Manifest) -> bool:
    """Whether the engine's last end was for want of memory."""
    evicted = str((pod.get("status") or {}).get("message")) if _is_evicted(pod) else ""
    return "memory" in evicted or any(_last_end(s).get("reason") == OUT_OF_MEMORY for s in _statuses(pod))


def last_words(pod: Manifest) -> str:
    """The last line that the engine said before it ended, and its exit code."""
    return next((words_of(status) for status in _statuses(pod)), NO_WORDS)


def words_of(container: Mapping[str, Any]) -> str:
    """The last line that a container said before it ended, and its exit code."""
    end = _last_end(container)
    if not end:
        return NO_WORDS
    lines = [line for line in str(end.get("message", "")).strip().splitlines() if line.strip()]
    said = lines[-1].strip() if lines else str(end.get("reason", ""))
    return f"{said} (exit code {end.get('exitCode')})"


def _statuses(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """The statuses of the container with the engine."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name", CONTAINER) == CONTAINER:
            yield status


def _has_ended(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return "terminated" in state or (state.get("waiting") or {}).get("reason") == CRASH_LOOP


def _last_end(status: Mapping[str, Any]) -> Mapping[str, Any]:
    ends = ((status.get(name) or {}).get("terminated") for name in ("state", "lastState"))
    return next((end for end in ends if end), {})


def _is_evicted(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("reason") == EVICTED
