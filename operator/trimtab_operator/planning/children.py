"""Plan of a resource's children from the wanted revision and the observed children. Pure.

Groups take the lowest free ordinal. Scale-in removes the least valuable groups (`choose_groups_to_remove`). A new
revision reaches the groups one after another within rollout.maxUnavailable. Children that match are not written, so an
idle iteration writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.builders.labels import ROLE_LABEL, group_name
from trimtab_operator.builders.rendezvous_secret import RENDEZVOUS_SECRET_KEY, rendezvous_secret
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import Held, Rendered, leader_stateful_set, worker_stateful_set
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import Action, Apply, Delete, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import (
    Group,
    ObservedChildren,
    groups_of,
    is_terminating,
    is_worker,
    ordinal_of,
    pod_rendezvous_address,
)
from trimtab_operator.observed.phases import has_engine_started, is_placed, pod_failure_message
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.surge import (
    allowed_unavailable,
    allowed_unavailable_restarting,
    groups_to_retire,
    num_surge_groups,
)


def plan_children(
    wanted: Rendered,
    observed: ObservedChildren,
    *,
    replicas: int,
    held: Mapping[int, Held] | None = None,
    unverified: frozenset[str] = frozenset(),
    loads: Mapping[str, float] | None = None,
    surge: int = 0,
    max_new_groups: int | None = None,
    known_good: Rendered | None = None,
    without_node: frozenset[str] = frozenset(),
    max_placed: int = 0,
) -> tuple[Action, ...]:
    """Return all actions for `replicas` replicas: Services before the pods that they select, deletions last.

    Args:
        held: Back-offs to render, by ordinal (rollout/gang_placement.py).
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
        g.ordinal for g in groups if g.revision != wanted.revision or _has_stale_address(g, deployment, observed)
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
    to_update = {group.ordinal for group in updates}
    current = [g.ordinal for g in staying if g.ordinal not in outdated_ordinals or g.ordinal in to_update]
    num_first = len(new) if known_good is None else min(len(new), not is_tried and not updates)
    others, first = new[: len(new) - num_first], new[len(new) - num_first :]
    manifests: list[Manifest] = [
        client_service(deployment),
        *_rendezvous_services(deployment, staying, first, observed),
    ]
    manifests += _groups_manifests(wanted, (*current, *first), observed, held or {})
    if known_good is not None:
        kept = _ordinals_of_revision(known_good, staying, to_update, observed)
        manifests += _rendezvous_services(known_good.deployment, (), others, observed)
        manifests += _groups_manifests(known_good, (*kept, *others), observed, held or {})
    applied = map(_with_address_fallback, plan_applies(manifests, observed))
    return (*applied, *_plan_removals(deployment, staying, leaving, current, manifests, observed))


def _limit_to_first(updates: tuple[Group, ...], *, is_tried: bool) -> tuple[Group, ...]:
    """Return the groups that may get a change which only one replica may run; failing groups may get it as well."""
    failing = tuple(group for group in updates if any(pod_failure_message(pod) for pod in group.pods))
    others = tuple(group for group in updates if group not in failing)
    return failing or others[: 0 if is_tried else 1]


def _ordinals_of_revision(
    rendered: Rendered, groups: Iterable[Group], updated: Collection[int], observed: ObservedChildren
) -> Iterable[int]:
    """Yield the ordinals of groups that keep a revision and are not rendered elsewhere."""
    for group in groups:
        is_kept = group.revision == rendered.revision and group.ordinal not in updated
        if is_kept and not _has_stale_address(group, rendered.deployment, observed):
            yield group.ordinal


def _rendezvous_services(
    deployment: InferenceDeployment, staying: Iterable[Group], new: Iterable[int], observed: ObservedChildren
) -> Iterable[Manifest]:
    """Yield the Services that ranks of multi-pod replicas connect to; single-pod replicas need none."""
    if layout_of(deployment.spec).pods == 1:
        return
    for group in staying:
        yield rendezvous_service(deployment, group.ordinal, address=_known_address(group, deployment, observed))
    for ordinal in new:
        yield rendezvous_service(deployment, ordinal)


def _groups_manifests(
    rendered: Rendered, ordinals: Iterable[int], observed: ObservedChildren, held: Mapping[int, Held]
) -> Iterable[Manifest]:
    for ordinal in ordinals:
        yield from group_manifests(rendered, ordinal, observed, held.get(ordinal))


def group_manifests(
    wanted: Rendered, ordinal: int, observed: ObservedChildren, held: Held | None
) -> tuple[Manifest, ...]:
    """Return the StatefulSets of one group, both of one revision; none before the rendezvous Service has an address."""
    if layout_of(wanted.deployment.spec).pods == 1:
        return (leader_stateful_set(wanted, ordinal),)
    address = rendezvous_address(wanted.deployment, ordinal, observed)
    if address is None:
        return ()
    return (
        leader_stateful_set(wanted, ordinal, address=address, held=held),
        worker_stateful_set(wanted, ordinal, address=address, held=held),
    )


def rendezvous_address(deployment: InferenceDeployment, ordinal: int, observed: ObservedChildren) -> str | None:
    """Return the ClusterIP of the group's rendezvous Service, which works without cluster DNS; None before it is
    assigned.
    """
    name = group_name(deployment, ordinal)
    for service in observed.services:
        if service["metadata"]["name"] == name and not is_terminating(service):
            return (service.get("spec") or {}).get("clusterIP") or None
    return None


def _has_stale_address(group: Group, deployment: InferenceDeployment, observed: ObservedChildren) -> bool:
    """Return True if the rendezvous Service's address differs from the one in the group's pods.

    Connected engines keep serving; the group is restarted as part of the rollout.
    """
    address = rendezvous_address(deployment, group.ordinal, observed)
    return address is not None and bool(group.rendezvous_addresses - {address})


def _known_address(group: Group, deployment: InferenceDeployment, observed: ObservedChildren) -> str | None:
    """Return the ClusterIP of the group's Service. If the Service was deleted, return the address in its pods, which
    avoids a restart.
    """
    pod_address = next(iter(sorted(group.rendezvous_addresses)), None)
    return rendezvous_address(deployment, group.ordinal, observed) or pod_address


def _with_address_fallback(action: Apply) -> Apply:
    """Return the action with a fallback without ClusterIP: a recreated Service's former address may be in use."""
    spec = action.manifest["spec"] if action.manifest["kind"] == "Service" else {}
    if not action.is_new or "clusterIP" not in spec:
        return action
    anywhere = {name: value for name, value in spec.items() if name != "clusterIP"}
    return replace(action, fallback={**action.manifest, "spec": anywhere})


def plan_tuning_state(deployment: InferenceDeployment, observed: ObservedChildren, state: str) -> tuple[Apply, ...]:
    """Return an apply of the tuner's ConfigMap if it differs from the stored one."""
    return plan_applies([tuning_config_map(deployment, state)], observed)


def plan_rendezvous_secret(wanted: InferenceDeployment, observed: ObservedChildren, *, token: str) -> tuple[Apply, ...]:
    """Return an apply of the Secret of multi-pod replicas if it is missing or empty.

    It precedes the pods, which do not start without it. An existing value is kept even if the operator's secret
    changes, because pods of one group that start at different times must read the same value.
    """
    if layout_of(wanted.spec).pods == 1:
        return ()
    wanted_secret = rendezvous_secret(wanted, token=token)
    present = next(iter(observed.secrets), None)
    if present is not None and (present.get("data") or {}).get(RENDEZVOUS_SECRET_KEY):
        wanted_secret["data"] = present["data"]
    return plan_applies([wanted_secret], observed)


def choose_groups_to_remove(
    groups: tuple[Group, ...], wanted: int, *, revision: str, loads: Mapping[str, float]
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Split groups into those that stay and those that are removed.

    Unscheduled groups are removed first, then those that load or are down, as no request is lost. Of the serving ones,
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
    """Return rollout.maxUnavailable as a number of replicas; percentages are rounded down to at least 1."""
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int):
        return max(1, value)
    return max(1, replicas * int(value.rstrip("%")) // 100)


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


def _plan_removals(
    deployment: InferenceDeployment,
    staying: Iterable[Group],
    leaving: Sequence[tuple[Group, str]],
    current: Collection[int],
    wanted: Iterable[Manifest],
    observed: ObservedChildren,
) -> Iterable[Delete]:
    """Yield deletions of removed groups, of workers that are not needed any more, and of unused rendezvous Services."""
    for group, why in leaving:
        for stateful_set in group.stateful_sets:
            yield delete_of("StatefulSet", stateful_set, why)
    for group in staying:
        if group.worker_set is not None and group.ordinal in current and layout_of(deployment.spec).pods == 1:
            yield delete_of("StatefulSet", group.worker_set, "a replica has a single pod now")
    present = {group.ordinal for group in (*staying, *(group for group, _ in leaving))}
    for stateful_set in observed.stateful_sets:
        if is_worker(stateful_set) and ordinal_of(stateful_set) not in present and not is_terminating(stateful_set):
            yield delete_of("StatefulSet", stateful_set, "its leader was deleted")
    needed = {m["metadata"]["name"] for m in wanted if m["kind"] == "Service"}
    rendezvous_ordinals: set[int | None] = {group.ordinal for group in staying if group.rendezvous_addresses}
    rendezvous_ordinals |= {ordinal_of(pod) for pod in observed.pods if pod_rendezvous_address(pod) is not None}
    for service in observed.services:
        metadata = service["metadata"]
        is_group_service = ROLE_LABEL in (metadata.get("labels") or {})
        is_needed = metadata["name"] in needed or ordinal_of(service) in rendezvous_ordinals
        if is_group_service and not is_needed and not is_terminating(service):
            yield delete_of("Service", service, "no pod uses it")
