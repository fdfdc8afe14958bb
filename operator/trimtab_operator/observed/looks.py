"""One replica as the tuner looks at it: what Kubernetes says of its pods, joined with what its engine said. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.observed.engines import EngineSeen
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import CRASH_LOOP, is_placed
from trimtab_operator.observed.pods import readiness_since
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.tuner.looks import Look, Phase

OUT_OF_MEMORY = "OOMKilled"  # the reason that the kubelet gives
EVICTED = "Evicted"  # likewise, where a node runs short of something; its message names what


def look_of(group: Group, seen: EngineSeen | None) -> Look:
    """A look at a replica. An engine that was asked before its pod became Ready, or not at all, has said nothing."""
    leader = group.leader
    answer = seen if seen is not None else EngineSeen(group.is_ready, "its engine was not asked")
    return Look(
        replica=group.name,
        phase=phase_for_tuning(group),
        instance="" if leader is None else str(leader["metadata"]["uid"]),
        since=_since(group),
        sample=answer.sample,
        config=answer.config,
        ledger=answer.ledger,
        problem=answer.problem,
        absence=answer.absence,
        was_oom_killed=any(map(_was_oom_killed, group.pods)),
        exit_code=None if leader is None else _exit_code(leader),
        restarts=0 if leader is None else _ends(leader),
    )


def phase_for_tuning(group: Group) -> Phase:
    """How far a replica is in its life. One whose pods are being replaced is on its way; one of whose pods a single one
    finds no node waits as a whole."""
    if group.is_ready:
        return Phase.READY
    return Phase.STARTING if is_placed(group) else Phase.PENDING


def _since(group: Group) -> float:
    """Since when it is in its phase; 0 where nothing says."""
    if group.leader is None:
        return 0.0 if group.missing is None else group.missing.since
    since = readiness_since(group.leader)
    return 0.0 if since is None else since.timestamp()


def _statuses(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """The statuses of the container with the engine."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name", CONTAINER) == CONTAINER:
            yield status


def _was_oom_killed(pod: Manifest) -> bool:
    evicted = str((pod.get("status") or {}).get("message")) if _is_evicted(pod) else ""
    return "memory" in evicted or any(_last_end(s).get("reason") == OUT_OF_MEMORY for s in _statuses(pod))


def _exit_code(pod: Manifest) -> int | None:
    codes = [code for status in _statuses(pod) if isinstance(code := _last_end(status).get("exitCode"), int)]
    return codes[0] if codes else None


def _ends(pod: Manifest) -> int:
    """How often the engine has ended in this pod, whether or not it was started again."""
    return _is_evicted(pod) + sum(int(s.get("restartCount", 0)) + _has_ended(s) for s in _statuses(pod))


def _has_ended(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return "terminated" in state or (state.get("waiting") or {}).get("reason") == CRASH_LOOP


def _last_end(status: Mapping[str, Any]) -> Mapping[str, Any]:
    ends = ((status.get(name) or {}).get("terminated") for name in ("state", "lastState"))
    return next((end for end in ends if end), {})


def _is_evicted(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("reason") == EVICTED
