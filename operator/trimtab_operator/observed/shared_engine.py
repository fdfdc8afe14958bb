"""Detection of groups whose pods do not share one engine. Pure.

A worker pod that is killed is replaced within seconds, and every pod is Ready again before the leader notices the lost
rank. The leader only becomes Ready together with its workers. While its container is the one that became Ready with
other workers than the present ones, its engine is about to end and the group is not ready. Nodes' clocks cannot order
these events, so the set of containers is remembered.

A kubelet may report late that a worker's container restarted before the leader became Ready. An engine that lost a rank
ends within seconds, so a leader that is still Ready long after runs with the present workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.observed.groups import Group
from trimtab_operator.resource.manifest import Manifest

MISMATCH_TIMEOUT_SECONDS = 40.0  # an engine that lost a rank ends within 10 s, and a live kubelet has reported it

ContainerRun = tuple[str, int]
"""(pod uid, restart count): one run of a pod's engine container."""


@dataclass(frozen=True, slots=True)
class WorkerMismatch:
    """Ready workers that are not those of the engine, and since when (Unix time)."""

    workers: frozenset[ContainerRun]
    since: float


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One engine of a group: the container runs that it consists of."""

    leader: ContainerRun
    workers: frozenset[ContainerRun]
    mismatch: WorkerMismatch | None = None


def update_incarnations(
    groups: Iterable[Group], known: Mapping[str, Incarnation], *, now: float
) -> dict[str, Incarnation]:
    """Return the known engines by group name, adding ready groups with a new leader. `now` is Unix time."""
    found = {}
    for group in groups:
        seen, before = incarnation_of(group), known.get(group.name)
        if seen is None:
            continue
        if before is not None and before.leader == seen.leader:
            found[group.name] = _updated_incarnation(before, seen, group, now)
        elif group.is_ready:
            found[group.name] = seen
    return found


def _updated_incarnation(before: Incarnation, seen: Incarnation, group: Group, now: float) -> Incarnation:
    """Return the known engine after one more observation."""
    if seen.workers == before.workers or not group.is_ready:
        return replace(before, mismatch=None)
    if before.mismatch is None or before.mismatch.workers != seen.workers:
        return replace(before, mismatch=WorkerMismatch(seen.workers, now))
    return seen if now - before.mismatch.since >= MISMATCH_TIMEOUT_SECONDS else before


def split_groups(groups: Iterable[Group], known: Mapping[str, Incarnation]) -> frozenset[int]:
    """Return the ordinals of groups whose leader still runs the engine of workers that are gone."""
    found = set()
    for group in groups:
        now, before = incarnation_of(group), known.get(group.name)
        if now is not None and before is not None and now.leader == before.leader and now.workers != before.workers:
            found.add(group.ordinal)
    return frozenset(found)


def incarnation_of(group: Group) -> Incarnation | None:
    """Return the present container runs of a group; None for a replica of one pod and while there is no leader."""
    if group.worker_set is None or group.leader is None:
        return None
    return Incarnation(
        _container_run(group.leader), frozenset(_container_run(pod) for pod in group.pods if pod is not group.leader)
    )


def _container_run(pod: Manifest) -> ContainerRun:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine = (c for c in containers if c.get("name") == CONTAINER)  # without sidecars, such as a service mesh's
    return str(pod["metadata"].get("uid", "")), sum(int(c.get("restartCount") or 0) for c in engine)
