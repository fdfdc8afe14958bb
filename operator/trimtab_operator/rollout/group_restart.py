"""A group of several pods ends together. Pure.

One engine runs in all pods of a group: when one is deleted, by a user, a node drain or a rollout, the others can only
fail. They are deleted, too, while the leader can still finish its requests; all come up again together. When a pod is
lost without a word, nothing is to be done here: the engine ends by itself in the pods that are left, and their
containers wait for the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from trimtab_operator.observed.actions import Delete, delete_of
from trimtab_operator.observed.groups import Group, is_terminating, revision_label
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time


def companions(groups: Iterable[Group]) -> Iterator[Delete]:
    """The pods that shared an engine with one that is being deleted. Pods made since then belong to the next engine; so
    do pods of another revision, which wait for theirs."""
    for group in groups:
        if group.worker_set is None:
            continue
        deleted = [(when, pod) for pod in group.pods if (when := deletion_time(pod)) is not None]
        for pod in group.pods:
            first = None if is_terminating(pod) else _deleted_first(pod, deleted)
            if first is not None:
                reason = f"{group.name} restarts as one: {first['metadata']['name']} is being deleted"
                yield delete_of("Pod", pod, reason)


def _deleted_first(pod: Manifest, deleted: Iterable[tuple[datetime, Manifest]]) -> Manifest | None:
    """The first of the pods in this one's engine that were deleted while it was there."""
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    if created is None:
        return None
    revision = revision_label(pod)
    shared = [entry for entry in deleted if entry[0] > created and revision_label(entry[1]) == revision]
    return min(shared, key=lambda entry: entry[0])[1] if shared else None


def deletion_time(pod: Manifest) -> datetime | None:
    """When deletion was asked for; `deletionTimestamp` is when the grace period ends."""
    ends = parse_time(pod["metadata"].get("deletionTimestamp"))
    if ends is None:
        return None
    return ends - timedelta(seconds=int(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
