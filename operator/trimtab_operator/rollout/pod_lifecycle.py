"""Pod deletions and back-offs that groups need in addition to rendered manifests. Pure.

Covers lost nodes, outdated pods, restarts of multi-pod groups, and gang-scheduling back-offs.

A StatefulSet creates no second pod of a name while the first may still run. Without force deletion, a replica on a lost
node stays down until the node returns or a user acts. An engine holds no state, so two pods of one name do no harm: the
ranks of a group are assigned once (docs/concepts/parallelism.md), and the Services only select the new pod.

One engine runs in all pods of a group: when a user, a node drain or a rollout deletes one of them, the others can only
fail. They are deleted too, while the leader can still finish its requests, and all of them start again together. When a
pod is lost abruptly, nothing needs to be done: the engine ends by itself in the remaining pods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from trimtab_operator.builders.stateful_set import Held
from trimtab_operator.observed.actions import Delete, Event, delete_of
from trimtab_operator.observed.gang_backoff import gang_backoff_of
from trimtab_operator.observed.groups import (
    Group,
    ObservedChildren,
    groups_of,
    is_pod_ready,
    is_terminating,
    ordinal_of,
    revision_label,
)
from trimtab_operator.observed.pods import node_of
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time
from trimtab_operator.rollout.gang_placement import (
    Age,
    age_of,
    is_partly_placed,
    plan_gang_backoffs,
    render_gang_backoffs,
)
from trimtab_operator.rollout.pod_replacement import find_eviction_budget, plan_pod_replacements
from trimtab_operator.rollout.surge import unschedulable_groups

NODE_LOSS_TIMEOUT_SECONDS = 60.0  # NotReady time before pods are deleted; Kubernetes needs about 40 s to report it


@dataclass(frozen=True, slots=True)
class PodLifecyclePlan:
    """Pods to delete, back-offs to render by ordinal, and the Events that report both."""

    deletions: tuple[Delete, ...]
    held: Mapping[int, Held]
    events: tuple[Event, ...]


def plan_pod_lifecycle(
    observed: ObservedChildren,
    *,
    nodes: tuple[Manifest, ...] | None,
    partly_placed: tuple[Age, ...] | None,
    now: datetime,
    change_id: str | None,
    revisions: Mapping[int, str] | None = None,
    allowed: int = 1,
    max_placed: int = 0,
) -> PodLifecyclePlan:
    """Plan the deletions and back-offs that are due at `now`.

    `nodes` is None if they cannot be listed. `partly_placed` are the partly scheduled groups of all resources; None if
    only this resource's own are visible. `change_id` names the current generation and revision, None while the spec is
    invalid. `revisions` is the assigned revision by ordinal (None: that of each StatefulSet), `allowed` the number of
    groups that may be down for it, and `max_placed` the largest number of groups that were scheduled at once.
    """
    groups, without_node = groups_of(observed), unschedulable_groups(observed, now=now)
    lost = lost_pod_deletions(observed.pods, (nodes or ()) if may_be_on_lost_node(observed.pods) else (), now)
    gone = {deletion.uid for deletion in lost}
    outdated = plan_pod_replacements(
        groups,
        allowed,
        revisions=revisions,
        without_node=without_node,
        max_placed=max_placed,
        budget=find_eviction_budget(observed),
    )
    replaced = tuple(deletion for deletion in outdated if deletion.uid not in gone)
    gone |= {deletion.uid for deletion in replaced}
    together = tuple(deletion for deletion in group_restart_deletions(groups) if deletion.uid not in gone)
    kept = plan_gang_backoffs(
        groups, _own_partly_placed(groups) if partly_placed is None else partly_placed, now, change_id=change_id
    )
    events = [_warning("NodeLost", f"deleted {found.name}: {found.reason}", found.uid) for found in lost]
    events += [_warning("GroupRestarted", f"{found.name}: {found.reason}", found.uid) for found in together]
    events += [
        _warning(error.reason, f"{name}: {error.message}", name) for name, error in observed.new_start_errors.items()
    ]
    for group in groups if change_id is not None else ():  # the StatefulSets' replica counts implement it
        backoff, before = kept.get(group.ordinal), gang_backoff_of(group)
        if backoff is not None and (before is None or before.count != backoff.count):
            events.append(_warning("GangSchedulingBackoff", f"{group.name} {backoff.message}", str(backoff.count)))
    return PodLifecyclePlan((*lost, *replaced, *together), render_gang_backoffs(groups, kept, now), tuple(events))


def _own_partly_placed(groups: Iterable[Group]) -> tuple[Age, ...]:
    return tuple(age_of(group) for group in groups if is_partly_placed(group))


def _warning(reason: str, message: str, key: str) -> Event:
    return Event("Warning", reason, message, key)


# --- lost nodes -------------------------------------------------------------------------------------------------------


def may_be_on_lost_node(pods: Iterable[Manifest]) -> bool:
    """Return True if nodes should be read: the control plane marks every pod on a lost node as not ready."""
    return any(ordinal_of(pod) is not None and node_of(pod) and not is_pod_ready(pod) for pod in pods)


def _is_force_deleted(pod: Manifest) -> bool:
    """Return True if the pod was already deleted without a grace period and a finalizer keeps it."""
    return is_terminating(pod) and pod["metadata"].get("deletionGracePeriodSeconds") == 0


def not_ready_since(nodes: Iterable[Manifest]) -> Mapping[str, datetime]:
    """Return the nodes that are not Ready, and since when."""
    found = {}
    for node in nodes:
        for condition in (node.get("status") or {}).get("conditions") or []:
            since = parse_time(condition.get("lastTransitionTime"))
            if condition.get("type") == "Ready" and condition.get("status") != "True" and since is not None:
                found[str(node["metadata"]["name"])] = since
    return found


def lost_pod_deletions(pods: Iterable[Manifest], nodes: Collection[Manifest], now: datetime) -> tuple[Delete, ...]:
    """Return force deletions of the engine pods on nodes that have been NotReady for NODE_LOSS_TIMEOUT_SECONDS.

    Returns nothing if most nodes are NotReady: then the control plane is probably partitioned and the engines may still
    serve.
    """
    since = not_ready_since(nodes)
    if 2 * len(since) > len(nodes):
        return ()
    deletions = []
    for pod in pods:
        node = node_of(pod)
        if ordinal_of(pod) is None or node is None or node not in since or _is_force_deleted(pod):
            continue
        seconds = (now - since[node]).total_seconds()
        if seconds >= NODE_LOSS_TIMEOUT_SECONDS:
            reason = (
                f"node {node} has been NotReady for {NODE_LOSS_TIMEOUT_SECONDS:.0f} s; restarting the replica elsewhere"
            )
            deletions.append(delete_of("Pod", pod, reason, grace_seconds=0))
    return tuple(deletions)


# --- multi-pod groups -------------------------------------------------------------------------------------------------


def group_restart_deletions(groups: Iterable[Group]) -> Iterator[Delete]:
    """Yield deletions of the pods that share an engine with a pod that is being deleted.

    Pods created later belong to the next engine. Pods of another revision wait for their own.
    """
    for group in groups:
        if group.worker_set is None:
            continue
        deleted = [(when, pod) for pod in group.pods if (when := deletion_time(pod)) is not None]
        for pod in group.pods:
            first = None if is_terminating(pod) else _deleted_first(pod, deleted)
            if first is not None:
                reason = f"{group.name} restarts as a group: {first['metadata']['name']} is being deleted"
                yield delete_of("Pod", pod, reason)


def _deleted_first(pod: Manifest, deleted: Iterable[tuple[datetime, Manifest]]) -> Manifest | None:
    """Return the first deleted pod that shared this pod's engine, or None."""
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    if created is None:
        return None
    revision = revision_label(pod)
    shared = [entry for entry in deleted if entry[0] > created and revision_label(entry[1]) == revision]
    return min(shared, key=lambda entry: entry[0])[1] if shared else None


def deletion_time(pod: Manifest) -> datetime | None:
    """Return when the deletion was requested; `deletionTimestamp` is the end of the grace period."""
    ends = parse_time(pod["metadata"].get("deletionTimestamp"))
    if ends is None:
        return None
    return ends - timedelta(seconds=int(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
