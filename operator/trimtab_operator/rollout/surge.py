"""Replicas that are there beside the wanted ones while a change rolls: the new one serves before an old one goes. Pure.

A surge is nothing with a name of its own: it is a group like any other, of the new revision, under the lowest free
ordinal. When it is Ready one of the outdated groups goes, drained, and its ordinal is free for the next. So a roll ends
with as many groups as before, some under other ordinals, and each engine was started once
(ADR-0025).

        g0 old ──────────────────────────► drained
                     g1 new ► loads ► Ready ─────────────► stays

Where no node takes another group that is said, and remembered for the change; then groups are replaced in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from trimtab_operator.observed.groups import Group, Observed, groups_of, is_terminating, ordinal_of
from trimtab_operator.observed.hold import hold_of
from trimtab_operator.observed.missing_pods import missing_sentence
from trimtab_operator.observed.phases import has_started
from trimtab_operator.observed.pods import placed_since, unschedulable, unschedulable_since
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

PATIENCE_SECONDS = 60.0  # for a node: the scheduler has looked again several times, and a quota's refusal was repeated

HELD_BY_PODS = re.compile(
    r"insufficient|too many pods|anti-affinity|free ports|volume|claim|topology spread|exceeded quota", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A change for which there is no place beside the wanted replicas, and what was told of it."""

    change: str
    message: str


def allowed_surge(deployment: InferenceDeployment, replicas: int) -> int:
    """rollout.maxSurge as a number of `replicas`; a percentage is rounded up."""
    value = deployment.spec.rollout.max_surge
    if isinstance(value, int):
        return value
    return -(-replicas * int(value.rstrip("%")) // 100)


def extra_groups(groups: Iterable[Group], behind: Collection[int], *, replicas: int, surge: int) -> int:
    """How many groups there may be beyond `replicas` now: no more than outdated ones (`behind`: ordinals) serve, or
    may serve again in a moment."""
    serving = sum(group.ordinal in behind and (group.is_ready or has_started(group)) for group in groups)
    return min(surge, serving) if replicas else 0


def retired(
    groups: tuple[Group, ...],
    behind: Collection[int],
    *,
    replicas: int,
    unproven: Collection[str],
    loads: Mapping[str, float],
) -> tuple[Group, ...]:
    """The outdated groups that may go now, as others serve in their place: as many as `replicas` stay Ready.

    `unproven` names groups that are Ready, and do not count as that yet. Those with the fewest requests (`loads`, by
    name) go first, so that they drain soon.
    """

    def worth(group: Group) -> tuple[bool, float, int]:
        return group.is_ready, loads.get(group.name, math.inf), -group.ordinal

    ready = sum(group.is_ready and group.name not in unproven for group in groups)
    spare = ready - replicas
    if spare < 0 or len(groups) <= replicas:
        return ()
    outdated = sorted((group for group in groups if group.ordinal in behind), key=worth)
    down = [group for group in outdated if not group.is_ready]
    serving = [group for group in outdated if group.is_ready and group.name not in unproven]
    return (*down, *serving[:spare])[: len(groups) - replicas]


def no_room(observed: Observed, revision: str, *, replicas: int, start_seconds: float, now: datetime) -> str | None:
    """Why a group of the new `revision`, beyond the wanted ones, finds no place; None while it does, or may.

    What still drains may make room. `start_seconds`: how long one may take to start in all.
    """
    groups = groups_of(observed)
    others = [group for group in groups if group.revision != revision]
    if len(groups) <= replicas or not others or _is_draining(observed):
        return None
    for group in groups:
        why = _waits_in_vain(group, start_seconds, now) if group.revision == revision else None
        if why is not None:
            return f"{group.name}, which was to serve before {others[-1].name} goes, {why}"
    return None


def placeless(observed: Observed, *, now: datetime) -> frozenset[str]:
    """The groups that find no place, by name: a roll does not wait for them, as they wait for what an old pod holds.
    None as long as something drains, which may make room."""
    if _is_draining(observed):
        return frozenset()
    return frozenset(group.name for group in groups_of(observed) if _finds_no_place(group, now) is not None)


def allowed_beside(
    allowed: int, groups: Collection[Group], without_place: Collection[str], *, most_placed: int = 0
) -> int:
    """How many of the `groups` that have a place may be down for a roll, where `allowed` of all may. Those
    `without_place` use that up, but for one: else each would wait for the other's end. Not so the last that serves, and
    not where as many as have no place had one before: those are missing (`most_placed`: how many had one at once)."""
    num_without = sum(group.name in without_place for group in groups)
    num_serving = sum(group.serves for group in groups)
    num_lost = min(num_without, max(0, most_placed - (len(groups) - num_without)))
    at_least = 0 if num_serving == 1 else min(max(0, allowed - num_lost), 1)
    return max(allowed - num_without, at_least)


def allowed_back(allowed: int, groups: Collection[Group], without_place: Collection[str]) -> int:
    """The same of those that are down, though they may be back in a moment: nobody is answered by them now, so one may
    always be taken."""
    return max(allowed - sum(group.name in without_place for group in groups), min(allowed, 1))


def _is_draining(observed: Observed) -> bool:
    """Whether a pod is about to leave its place to others."""
    places = {group.ordinal for group in groups_of(observed)}
    return any(is_terminating(pod) or ordinal_of(pod) not in places for pod in observed.pods)


def _waits_in_vain(group: Group, start_seconds: float, now: datetime) -> str | None:
    """Why its pods have had no place for so long, or no containers there; None while they have, or may soon."""
    why = _finds_no_place(group, now)
    if why is not None:
        return why
    for pod in group.pods:
        placed = placed_since(pod)
        if placed is not None and not _was_begun(pod) and (now - placed).total_seconds() >= start_seconds / 2:
            return "has a node that does not begin with its containers: a volume may be held by the old one"
    return None


def _finds_no_place(group: Group, now: datetime) -> str | None:
    """Why its pods have had no node for so long, or are not even made; None while they have one, or may soon."""
    hold = hold_of(group)
    if hold is not None and group.num_pods == 0 and _would_be_freed(hold.why):
        return hold.sentence
    for pod in group.pods:
        since, said = unschedulable_since(pod), unschedulable(pod) or ""
        if since is not None and (now - since).total_seconds() >= PATIENCE_SECONDS and _would_be_freed(said):
            return f"finds no node: {said}"
    missing = group.missing
    is_late = missing is not None and now.timestamp() - missing.since >= PATIENCE_SECONDS
    if missing is not None and is_late and _would_be_freed(missing.words or ""):
        return f"gets no pods: {missing_sentence(group)}"
    return None


def _would_be_freed(words: str) -> bool:
    """Whether what the scheduler, or a quota, lacks is something that an old pod holds. Where no node is of the right
    kind at all, replacing in place would only take the one that serves."""
    return HELD_BY_PODS.search(words) is not None


def _was_begun(pod: Manifest) -> bool:
    """Whether some container of the pod was started, or has a reason why not."""
    states = [c.get("state") or {} for c in (pod.get("status") or {}).get("containerStatuses") or []]
    waiting = {str((state.get("waiting") or {}).get("reason", "")) for state in states if "waiting" in state}
    return any("waiting" not in state for state in states) or bool(waiting - {"", "ContainerCreating"})
