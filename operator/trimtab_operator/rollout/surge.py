"""Surge replicas: during a rollout a new replica serves before an old one is removed. Pure.

A surge replica is an ordinary group of the new revision with the lowest free ordinal. When it is Ready, one outdated
group drains, and its ordinal becomes free for the next. A rollout ends with as many groups as before, some with other
ordinals, and starts each engine once (ADR-0025).

        g0 old ──────────────────────────► drained
                     g1 new ► loads ► Ready ─────────────► stays

If no node fits another group, this is reported and remembered for the change, and groups are then replaced in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from trimtab_operator.observed.gang_backoff import gang_backoff_of
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of, is_terminating, ordinal_of
from trimtab_operator.observed.missing_pods import missing_pods_message
from trimtab_operator.observed.phases import has_engine_started
from trimtab_operator.observed.pods import placed_since, unschedulable_message, unschedulable_since
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

PLACEMENT_TIMEOUT_SECONDS = 60.0  # the scheduler and the quota check have retried several times by then
LAST_REPLICA_TIMEOUT_SECONDS = 300.0  # before the only serving replica is replaced in place, which costs an outage

FREEABLE_RESOURCES = re.compile(
    r"insufficient|too many pods|anti-affinity|free ports|volume|claim|topology spread|exceeded quota", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class NoSurgeRoom:
    """A change for which no surge replica can be scheduled, and the reported reason."""

    change: str
    message: str


def allowed_surge(deployment: InferenceDeployment, replicas: int) -> int:
    """Return rollout.maxSurge as a number of replicas; percentages are rounded up."""
    value = deployment.spec.rollout.max_surge
    if isinstance(value, int):
        return value
    return -(-replicas * int(value.rstrip("%")) // 100)


def num_surge_groups(groups: Iterable[Group], outdated_ordinals: Collection[int], *, replicas: int, surge: int) -> int:
    """Return how many groups there may be beyond `replicas`: at most as many as outdated groups serve or may serve
    again soon.
    """
    serving = sum(
        group.ordinal in outdated_ordinals and (group.is_ready or has_engine_started(group)) for group in groups
    )
    return min(surge, serving) if replicas else 0


def groups_to_retire(
    groups: tuple[Group, ...],
    outdated_ordinals: Collection[int],
    *,
    replicas: int,
    unverified: Collection[str],
    loads: Mapping[str, float],
) -> tuple[Group, ...]:
    """Return the outdated groups that may be removed now, so that `replicas` groups stay Ready.

    `unverified` names Ready groups that do not count as Ready yet. Groups with the fewest requests (`loads`, by name)
    are removed first, because they drain soonest.
    """

    def worth(group: Group) -> tuple[bool, float, int]:
        return group.is_ready, loads.get(group.name, math.inf), -group.ordinal

    ready = sum(group.is_ready and group.name not in unverified for group in groups)
    spare = ready - replicas
    if spare < 0 or len(groups) <= replicas:
        return ()
    outdated = sorted((group for group in groups if group.ordinal in outdated_ordinals), key=worth)
    down = [group for group in outdated if not group.is_ready]
    serving = [group for group in outdated if group.is_ready and group.name not in unverified]
    return (*down, *serving[:spare])[: len(groups) - replicas]


def surge_obstacle(
    observed: ObservedChildren, revision: str, *, replicas: int, start_seconds: float, now: datetime
) -> str | None:
    """Return why a surge group of the new `revision` cannot be scheduled, or None if it can or may soon.

    Returns None while pods drain, which may free resources. `start_seconds` is the total start timeout: a node that a
    cluster autoscaler adds, or that the scheduler frees by preemption, is waited for that long.
    """
    groups = groups_of(observed)
    others = [group for group in groups if group.revision != revision]
    if len(groups) <= replicas or not others or _is_draining(observed):
        return None
    is_last = sum(group.serves for group in groups) <= 1
    for group in groups:
        timeout = PLACEMENT_TIMEOUT_SECONDS
        if is_last:
            timeout = max(timeout, min(LAST_REPLICA_TIMEOUT_SECONDS, start_seconds / 2))
        if _is_node_coming(group, observed):
            timeout = start_seconds
        why = _stuck_reason(group, start_seconds, now, timeout) if group.revision == revision else None
        if why is not None:
            return f"{group.name}, which should serve before {others[-1].name} is removed, {why}"
    return None


def unschedulable_groups(observed: ObservedChildren, *, now: datetime) -> frozenset[str]:
    """Return the names of the groups that cannot be scheduled.

    A rollout does not wait for them, because they may wait for resources that an old pod holds. Returns none while pods
    drain, which may free resources.
    """
    if _is_draining(observed):
        return frozenset()
    found = (group for group in groups_of(observed) if not _is_node_coming(group, observed))
    return frozenset(group.name for group in found if _unschedulable_reason(group, now) is not None)


def allowed_unavailable(
    allowed: int, groups: Collection[Group], without_node: Collection[str], *, max_placed: int = 0
) -> int:
    """Return how many of the scheduled `groups` may be down for a rollout if `allowed` groups may be down in total.

    Groups `without_node` use up `allowed` except for one, to avoid a deadlock. There is no exception for the last
    serving group, nor for as many groups as lost their node (`max_placed` were scheduled at once).
    """
    num_without = sum(group.name in without_node for group in groups)
    num_serving = sum(group.serves for group in groups)
    num_lost = min(num_without, max(0, max_placed - (len(groups) - num_without)))
    at_least = 0 if num_serving == 1 else min(max(0, allowed - num_lost), 1)
    return max(allowed - num_without, at_least)


def allowed_unavailable_restarting(allowed: int, groups: Collection[Group], without_node: Collection[str]) -> int:
    """Return the same limit for groups that are down but may be ready again soon; at least one, as they do not serve
    anyway.
    """
    return max(allowed - sum(group.name in without_node for group in groups), min(allowed, 1))


def _is_draining(observed: ObservedChildren) -> bool:
    """Return True if a pod is about to release its resources."""
    ordinals = {group.ordinal for group in groups_of(observed)}
    return any(is_terminating(pod) or ordinal_of(pod) not in ordinals for pod in observed.pods)


def _is_node_coming(group: Group, observed: ObservedChildren) -> bool:
    """Return True if a node is being added or freed for an unscheduled pod of the group."""
    waiting = [pod for pod in group.pods if unschedulable_since(pod) is not None]
    return any(
        pod["metadata"]["name"] in observed.scale_ups or (pod.get("status") or {}).get("nominatedNodeName")
        for pod in waiting
    )


def _stuck_reason(group: Group, start_seconds: float, now: datetime, timeout: float) -> str | None:
    """Return why the group's pods have been unscheduled or without started containers for too long, or None."""
    why = _unschedulable_reason(group, now, timeout)
    if why is not None:
        return why
    for pod in group.pods:
        placed = placed_since(pod)
        if (
            placed is not None
            and not _has_container_started(pod)
            and (now - placed).total_seconds() >= start_seconds / 2
        ):
            return "is scheduled, but its containers do not start: the old pod may hold a volume"
    return None


def _unschedulable_reason(group: Group, now: datetime, timeout: float = PLACEMENT_TIMEOUT_SECONDS) -> str | None:
    """Return why the group's pods have been unscheduled or missing for too long, or None."""
    backoff = gang_backoff_of(group)
    if backoff is not None and group.num_pods == 0 and _is_freeable(backoff.reason):
        return backoff.message
    for pod in group.pods:
        since, message = unschedulable_since(pod), unschedulable_message(pod) or ""
        if since is not None and (now - since).total_seconds() >= timeout and _is_freeable(message):
            return f"is unschedulable: {message}"
    missing = group.missing
    is_late = missing is not None and now.timestamp() - missing.since >= timeout
    if missing is not None and is_late and _is_freeable(missing.error or ""):
        return f"has missing pods: {missing_pods_message(group)}"
    return None


def _is_freeable(error: str) -> bool:
    """Return True if the scheduler or a quota lacks something that an old pod holds.

    If no node fits at all, replacing in place would only remove the replica that serves.
    """
    return FREEABLE_RESOURCES.search(error) is not None


def _has_container_started(pod: Manifest) -> bool:
    """Return True if a container of the pod has started, or reports why it cannot."""
    states = [c.get("state") or {} for c in (pod.get("status") or {}).get("containerStatuses") or []]
    waiting = {str((state.get("waiting") or {}).get("reason", "")) for state in states if "waiting" in state}
    return any("waiting" not in state for state in states) or bool(waiting - {"", "ContainerCreating"})
