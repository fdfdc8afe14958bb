"""Whether the pods of a group share one engine: no node's clock tells, so it is remembered who was there. Pure.

A worker pod that is killed is replaced within seconds, and everything is Ready again before the leader has noticed that
a rank is silent. The leader only becomes Ready together with its workers. So as long as the leader's container is the
one that became Ready with other workers than are there now, its engine is about to end: the group is not ready.

A kubelet may report late, though, that a worker's container had restarted before the leader became Ready. An engine
that lost a rank ends within seconds; a leader that is still Ready long after runs with the workers that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.observed.groups import Group
from trimtab_operator.resource.manifest import Manifest

TORN_SECONDS = 40.0  # an engine that lost a rank ends within 10 s; a kubelet that is alive has told so by then

Life = tuple[str, int]
"""(uid, restarts): one run of a pod's container."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Other workers than the engine's are there, all Ready, and since when (Unix time)."""

    workers: frozenset[Life]
    since: float


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One engine of a group: the lives of the pods that it runs in."""

    leader: Life
    workers: frozenset[Life]
    doubt: Doubt | None = None


def learned(groups: Iterable[Group], known: Mapping[str, Incarnation], *, now: float) -> dict[str, Incarnation]:
    """Say, by name, what is known of the groups that there are: a ready group whose leader is new is learned.

    `now` is Unix time.
    """
    found = {}
    for group in groups:
        seen, before = incarnation_of(group), known.get(group.name)
        if seen is None:
            continue
        if before is not None and before.leader == seen.leader:
            found[group.name] = _followed(before, seen, group, now)
        elif group.is_ready:
            found[group.name] = seen
    return found


def _followed(before: Incarnation, seen: Incarnation, group: Group, now: float) -> Incarnation:
    """The same engine one look later."""
    if seen.workers == before.workers or not group.is_ready:
        return replace(before, doubt=None)
    if before.doubt is None or before.doubt.workers != seen.workers:
        return replace(before, doubt=Doubt(seen.workers, now))
    return seen if now - before.doubt.since >= TORN_SECONDS else before


def torn(groups: Iterable[Group], known: Mapping[str, Incarnation]) -> frozenset[int]:
    """The ordinals of groups whose leader still runs the engine of workers that are gone."""
    found = set()
    for group in groups:
        now, before = incarnation_of(group), known.get(group.name)
        if now is not None and before is not None and now.leader == before.leader and now.workers != before.workers:
            found.add(group.ordinal)
    return frozenset(found)


def incarnation_of(group: Group) -> Incarnation | None:
    """Who is there now; None for a replica of one pod, and while there is no leader."""
    if group.worker_set is None or group.leader is None:
        return None
    return Incarnation(_life(group.leader), frozenset(_life(pod) for pod in group.pods if pod is not group.leader))


def _life(pod: Manifest) -> Life:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine = (c for c in containers if c.get("name") == CONTAINER)  # a mesh's own container is none of the engine's
    return str(pod["metadata"].get("uid", "")), sum(int(c.get("restartCount") or 0) for c in engine)
