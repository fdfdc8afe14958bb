"""Assignment of a revision to each replica group: kept, removed and created groups, and their revisions. Pure.

The assignment is the only place that decides this. The children are rendered from it (planning/children.py), and pods
are replaced by it (rollout/pod_replacement.py), so that a StatefulSet and its pods never follow different decisions.

Groups take the lowest free ordinal. Scale-in removes the least valuable groups (`choose_groups_to_remove`). A new
revision reaches the groups one after another within rollout.maxUnavailable. While one replica tries a change, the
others have the last known-good revision.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trimtab_operator.builders.labels import group_name
from trimtab_operator.builders.stateful_set import Rendered
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of, is_terminating, ordinal_of
from trimtab_operator.observed.phases import has_engine_started, is_placed, pod_failure_message
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.surge import (
    allowed_unavailable,
    allowed_unavailable_restarting,
    groups_to_retire,
    num_surge_groups,
)

MAX_SHARE_DIGITS = 3  # of a percentage


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The groups of a resource and the revision of each.

    `revisions` holds the revision by ordinal of the present groups, and `created` of those to create. A group that is
    in neither keeps its StatefulSets and pods as they are until its turn, or until it is removed.
    """

    wanted: Rendered
    known_good: Rendered | None
    """Revision of all replicas except the canary; None if there is no canary."""
    staying: tuple[Group, ...]
    leaving: tuple[tuple[Group, str], ...]
    """Groups to remove, and why."""
    revisions: Mapping[int, Rendered]
    created: Mapping[int, Rendered]

    def ordinals_of(self, revision: Rendered) -> tuple[int, ...]:
        """Return the ordinals of the groups that should have `revision`, created ones last."""
        return tuple(n for table in (self.revisions, self.created) for n, one in table.items() if one is revision)


def assign_revisions(
    wanted: Rendered,
    observed: ObservedChildren,
    *,
    replicas: int,
    unverified: frozenset[str] = frozenset(),
    loads: Mapping[str, float] | None = None,
    surge: int = 0,
    max_new_groups: int | None = None,
    known_good: Rendered | None = None,
    without_node: frozenset[str] = frozenset(),
    max_placed: int = 0,
) -> GroupAssignment:
    """Return the assignment for `replicas` replicas.

    Args:
        unverified: Names of Ready groups that still count as down for a rollout.
        loads: Number of requests by group name; groups that did not report are absent.
        surge: Groups allowed beyond `replicas` while outdated ones serve (rollout/surge.py).
        max_new_groups: Groups that may be created now; None for no limit.
        known_good: During a canary, the revision of all replicas except the canary.
        without_node: Names of groups that cannot be scheduled.
        max_placed: Largest number of groups that were scheduled at once.
    """
    deployment = wanted.deployment
    groups, loads = groups_of(observed), loads or {}
    surge = surge if known_good is None else min(surge, 1)
    outdated_ordinals = frozenset(
        g.ordinal for g in groups if g.revision != wanted.revision or has_stale_address(g, deployment, observed)
    )
    retiring = (
        groups_to_retire(groups, outdated_ordinals, replicas=replicas, unverified=unverified, loads=loads)
        if surge
        else ()
    )
    present = tuple(group for group in groups if group not in retiring)
    extra = num_surge_groups(present, outdated_ordinals, replicas=replicas, surge=surge)
    staying, superfluous = choose_groups_to_remove(present, replicas + extra, revision=wanted.revision, loads=loads)
    leaving = [(group, "scaled in") for group in superfluous]
    leaving += [(group, "replaced by a newer replica") for group in retiring]
    num_new = replicas + extra - len(staying)
    new = free_ordinals(observed, num_new if max_new_groups is None else min(num_new, max_new_groups))
    may_be_down = allowed_down(deployment, replicas) if known_good is None else 1
    num_unproven = sum(group.is_ready and group.name in unverified for group in staying)
    allowed = allowed_unavailable(may_be_down, staying, without_node, max_placed=max_placed) - num_unproven
    back = allowed_unavailable_restarting(may_be_down, staying, without_node) - num_unproven
    is_tried = any(g.revision == wanted.revision and g.name not in without_node for g in staying)
    is_tried_by_new = known_good is not None and not is_tried and bool(new)
    coming = len(new) if surge or is_tried_by_new else None
    updates = choose_updates(staying, outdated_ordinals, allowed, back=back, coming=coming, without_node=without_node)
    if known_good is not None:
        updates = _limit_to_first(updates, is_tried=is_tried)
    updated = {group.ordinal for group in updates}
    revisions = {g.ordinal: wanted for g in staying if g.ordinal not in outdated_ordinals or g.ordinal in updated}
    num_first = len(new) if known_good is None else min(len(new), not is_tried and not updates)
    created = dict.fromkeys(new[len(new) - num_first :], wanted)
    if known_good is not None:
        for group in staying:
            if group.ordinal not in revisions and _may_have_known_good(group, known_good, observed):
                revisions[group.ordinal] = known_good
        created |= dict.fromkeys(new[: len(new) - num_first], known_good)
    return GroupAssignment(wanted, known_good, staying, tuple(leaving), revisions, created)


def _may_have_known_good(group: Group, known_good: Rendered, observed: ObservedChildren) -> bool:
    """Return True if the group has the known-good revision already, or does not serve and therefore loses nothing."""
    is_same = group.revision == known_good.revision and not has_stale_address(group, known_good.deployment, observed)
    return is_same or not (group.serves or has_engine_started(group))


def _limit_to_first(updates: tuple[Group, ...], *, is_tried: bool) -> tuple[Group, ...]:
    """Return the groups that may get a change which only one replica may run; failing groups may get it as well."""
    failing = tuple(group for group in updates if any(pod_failure_message(pod) for pod in group.pods))
    others = tuple(group for group in updates if group not in failing)
    return failing or others[: 0 if is_tried else 1]


def choose_groups_to_remove(
    groups: tuple[Group, ...], wanted: int, *, revision: str, loads: Mapping[str, float]
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Split groups into kept and removed ones.

    Unscheduled groups are removed first, then groups that load or are down, as no request is lost. Of the serving ones,
    outdated groups come first, then those with the fewest requests, which drain soonest (an unknown load counts as the
    highest), then those with the highest ordinals.
    """

    def worth(group: Group) -> tuple[bool, bool, bool, float, int]:
        is_current = group.revision == revision and not group.is_outdated
        load = loads.get(group.name, math.inf)
        return group.serves, is_placed(group), is_current, load if group.serves else 0.0, -group.ordinal

    by_worth = sorted(groups, key=worth, reverse=True)
    staying = sorted(by_worth[:wanted], key=lambda group: group.ordinal)
    removed = sorted(by_worth[wanted:], key=lambda group: group.ordinal, reverse=True)
    return tuple(staying), tuple(removed)


def allowed_down(deployment: InferenceDeployment, replicas: int) -> int:
    """Return rollout.maxUnavailable as a number of replicas; percentages are rounded down to at least 1.

    The value of an invalid spec counts as 1: its replicas are still maintained.
    """
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int):
        return max(1, value)
    share = value.removesuffix("%")
    return max(1, replicas * int(share) // 100) if share.isdecimal() and len(share) <= MAX_SHARE_DIGITS else 1


def choose_updates(
    groups: tuple[Group, ...],
    outdated_ordinals: Collection[int],
    allowed: int,
    *,
    back: int | None = None,
    coming: int | None = None,
    without_node: Collection[str] = frozenset(),
) -> tuple[Group, ...]:
    """Choose the outdated groups to update now. At most `allowed` groups may be down.

    `back` is the limit for groups that are down but may be ready again soon; None means `allowed`. `coming` is the
    number of groups created now; None if groups are replaced in place.

    A group whose engine has not started costs nothing. One that had started and is not ready may be ready again soon:
    it counts as one, unless an updated group is still starting. A ready group counts as one as well and is taken last:
    never while another is down, and not at all if new groups replace it. Groups `without_node` (names) cost nothing, as
    they are already subtracted from `allowed`.
    """
    outdated = [group for group in groups if group.ordinal in outdated_ordinals]
    down = [group for group in groups if not group.is_ready and group.name not in without_node]
    blinking = [group for group in outdated if not group.is_ready and has_engine_started(group)]
    lost = [group for group in outdated if not group.is_ready and group not in blinking]
    ready = [group for group in outdated if group.is_ready]
    num_lost = sum(group.name not in without_node for group in lost)
    under_way = sum(not group.serves for group in down if group not in (*blinking, *lost)) + (coming or 0)
    back_soon = blinking[: max(0, (allowed if back is None else back) - under_way - num_lost)]
    return (*lost, *back_soon, *(ready[: max(0, allowed - len(down))] if coming is None else ()))


def free_ordinals(observed: ObservedChildren, count: int) -> tuple[int, ...]:
    """Return the lowest ordinals that neither a StatefulSet nor a draining pod uses."""
    children = (*observed.stateful_sets, *observed.pods)
    used = {ordinal_of(child) for child in children}
    free: list[int] = []
    candidate = 0
    while len(free) < count:
        if candidate not in used:
            free.append(candidate)
        candidate += 1
    return tuple(free)


def rendezvous_address(deployment: InferenceDeployment, ordinal: int, observed: ObservedChildren) -> str | None:
    """Return the ClusterIP of the group's rendezvous Service, which works without cluster DNS; None before it is
    assigned.
    """
    name = group_name(deployment, ordinal)
    for service in observed.services:
        if service["metadata"]["name"] == name and not is_terminating(service):
            return (service.get("spec") or {}).get("clusterIP") or None
    return None


def has_stale_address(group: Group, deployment: InferenceDeployment, observed: ObservedChildren) -> bool:
    """Return True if the rendezvous Service's address differs from the one in the group's pods.

    Connected engines keep serving; the group is restarted as part of the rollout.
    """
    address = rendezvous_address(deployment, group.ordinal, observed)
    return address is not None and bool(group.rendezvous_addresses - {address})
