"""Pods that a StatefulSet cannot create because a quota or an admission policy rejects them. Pure.

A StatefulSet has no condition for this. The API server's error is only in Events, which expire and are not emitted for
every attempt. Missing pods are therefore detected by counting pods; Events only supply the error message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trimtab_operator.observed.groups import Group, MissingPods
from trimtab_operator.resource.manifest import Manifest

FIRST_READ_SECONDS = 5.0  # a StatefulSet creates its pods within a second unless they are rejected
REREAD_SECONDS = 60.0  # the error may have changed since
FAILED_CREATE = "FailedCreate"  # the reason of these Events
_ERROR_SEPARATOR = " failed error: "  # create Pod NAME in StatefulSet NAME failed error: API SERVER ERROR


def find_missing_pods(
    groups: Iterable[Group], known: Mapping[str, MissingPods], *, now: float
) -> dict[str, MissingPods]:
    """Return, by group name, the groups that have fewer pods than they want.

    `now` is Unix time of the operator's clock. A group with a terminating pod is skipped because its replacement may
    have to wait for that pod.
    """
    found = {}
    for group in groups:
        before = known.get(group.name)
        if len(group.pods) < group.num_pods and not group.is_terminating:
            is_same = before is not None and before.num_pods == len(group.pods)
            found[group.name] = before if before is not None and is_same else MissingPods(now, len(group.pods))
    return found


def needs_creation_error(missing: MissingPods, *, now: float) -> bool:
    """Return True if it is time to read the Events about pods that were not created."""
    if missing.read_at is not None:
        return now - missing.read_at >= REREAD_SECONDS
    return now - missing.since >= FIRST_READ_SECONDS


def with_creation_errors(
    groups: Iterable[Group], known: Mapping[str, MissingPods], events: Iterable[Manifest], *, now: float
) -> dict[str, MissingPods]:
    """Return the missing pods with the API server's latest error for each group."""
    rejected = list(events)
    missing = {group.name: (group, known[group.name]) for group in groups if group.name in known}
    return {
        name: replace(found, error=_creation_error(group, rejected), read_at=now)
        for name, (group, found) in missing.items()
    }


def _creation_error(group: Group, events: Iterable[Manifest]) -> str | None:
    names = {stateful_set["metadata"]["name"] for stateful_set in group.stateful_sets}
    errors = [
        (str(event.get("lastTimestamp") or ""), str(event.get("message") or "").rpartition(_ERROR_SEPARATOR)[2])
        for event in events
        if (event.get("involvedObject") or {}).get("name") in names
    ]
    return max(errors)[1] if errors else None


def missing_pods_message(group: Group) -> str:
    """Return how many pods are missing and, if known, why."""
    missing = group.num_pods - len(group.pods)
    error = None if group.missing is None else group.missing.error
    which = "the pod is" if group.num_pods == 1 else f"{missing} of {group.num_pods} pods are"
    return f"{which} not created yet" + (f": {error}" if error else "")
