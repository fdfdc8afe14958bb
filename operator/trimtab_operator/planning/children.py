"""From what is wanted and what is there to what must be done. Pure: no clock, no cluster.

Groups take the lowest free ordinal. Scale-in takes the group that is worth least (`choose_victims`). A new revision
reaches the groups one after another within rollout.maxUnavailable. What is as wanted is left alone, so an idle tick
writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.builders.labels import ROLE_LABEL, group_name
from trimtab_operator.builders.meeting_secret import MEETING_SECRET_KEY, meeting_secret
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import Held, Rendered, leader_stateful_set, worker_stateful_set
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import Action, Apply, Delete, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import (
    Group,
    Observed,
    groups_of,
    is_terminating,
    is_worker,
    meeting_address,
    ordinal_of,
)
from trimtab_operator.observed.phases import failure_of, has_started, is_placed
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.surge import allowed_back, allowed_beside, extra_groups, retired


def plan(
    wanted: Rendered,
    observed: Observed,
    *,
    replicas: int,
    held: Mapping[int, Held] | None = None,
    unproven: frozenset[str] = frozenset(),
    loads: Mapping[str, float] | None = None,
    surge: int = 0,
    may_come: int | None = None,
    proven: Rendered | None = None,
    without_place: frozenset[str] = frozenset(),
    most_placed: int = 0,
) -> tuple[Action, ...]:
    """Everything to do now for so many `replicas`, in order: Services before the pods that they select, removals last.

    `held`: by ordinal, groups that hold no pods, or did (rollout/gang_placement.py). `unproven` names groups whose pods
    are Ready and that still count as down for a rollout. `loads`: by name, how many requests a group has; one that did
    not say is left out. `surge`: how many groups there may be beyond `replicas` while outdated ones serve
    (rollout/surge.py). `proven`: while the change has to show that it is good, the form of all replicas but the one
    that runs it. `without_place` names groups that find none; `most_placed` had one at once.
    """
    deployment = wanted.deployment
    groups, loads = groups_of(observed), loads or {}
    surge = surge if proven is None else min(surge, 1)
    behind = frozenset(
        g.ordinal for g in groups if g.revision != wanted.revision or _has_moved(g, deployment, observed)
    )
    relieved = retired(groups, behind, replicas=replicas, unproven=unproven, loads=loads) if surge else ()
    present = tuple(group for group in groups if group not in relieved)
    extra = extra_groups(present, behind, replicas=replicas, surge=surge)
    staying, superfluous = choose_victims(present, replicas + extra, revision=wanted.revision, loads=loads)
    leaving = [(group, "scaled in") for group in superfluous]
    leaving += [(group, "others serve what is asked for now") for group in relieved]
    num_new = replicas + extra - len(staying)
    new = free_ordinals(observed, num_new if may_come is None else min(num_new, may_come))
    may_be_down = allowed_down(deployment, replicas) if proven is None else 1
    num_unproven = sum(group.is_ready and group.name in unproven for group in staying)
    allowed = allowed_beside(may_be_down, staying, without_place, most_placed=most_placed) - num_unproven
    back = allowed_back(may_be_down, staying, without_place) - num_unproven
    is_tried = any(g.revision == wanted.revision and g.name not in without_place for g in staying)
    is_tried_by_new = proven is not None and not is_tried and bool(new)
    coming = len(new) if surge or is_tried_by_new else None
    updates = choose_updates(staying, behind, allowed, back=back, coming=coming, without_place=without_place)
    if proven is not None:
        updates = _first_alone(updates, is_tried=is_tried)
    to_update = {group.ordinal for group in updates}
    current = [g.ordinal for g in staying if g.ordinal not in behind or g.ordinal in to_update]
    num_first = len(new) if proven is None else min(len(new), not is_tried and not updates)
    others, first = new[: len(new) - num_first], new[len(new) - num_first :]
    manifests: list[Manifest] = [client_service(deployment), *_meeting_places(deployment, staying, first, observed)]
    manifests += _groups_manifests(wanted, (*current, *first), observed, held or {})
    if proven is not None:
        kept = _of_form(proven, staying, to_update, observed)
        manifests += _meeting_places(proven.deployment, (), others, observed)
        manifests += _groups_manifests(proven, (*kept, *others), observed, held or {})
    applied = map(_at_any_address, plan_applies(manifests, observed))
    return (*applied, *_removals(deployment, staying, leaving, current, manifests, observed))


def _first_alone(updates: tuple[Group, ...], *, is_tried: bool) -> tuple[Group, ...]:
    """Those of the groups that may get a change which only one of all is to run: who fails anyway loses nothing."""
    failing = tuple(group for group in updates if any(failure_of(pod) for pod in group.pods))
    others = tuple(group for group in updates if group not in failing)
    return failing or others[: 0 if is_tried else 1]


def _of_form(form: Rendered, groups: Iterable[Group], updated: Collection[int], observed: Observed) -> Iterable[int]:
    """The groups that stay of a form: those of several pods are not whole yet, or give theirs back."""
    for group in groups:
        is_kept = group.revision == form.revision and group.ordinal not in updated
        if is_kept and not _has_moved(group, form.deployment, observed):
            yield group.ordinal


def _meeting_places(
    deployment: InferenceDeployment, staying: Iterable[Group], new: Iterable[int], observed: Observed
) -> Iterable[Manifest]:
    """The Services where ranks of several pods meet. Those of one pod need none."""
    if layout_of(deployment.spec).pods == 1:
        return
    for group in staying:
        yield rendezvous_service(deployment, group.ordinal, address=_known_address(group, deployment, observed))
    for ordinal in new:
        yield rendezvous_service(deployment, ordinal)


def _groups_manifests(
    form: Rendered, ordinals: Iterable[int], observed: Observed, held: Mapping[int, Held]
) -> Iterable[Manifest]:
    for ordinal in ordinals:
        yield from group_manifests(form, ordinal, observed, held.get(ordinal))


def group_manifests(wanted: Rendered, ordinal: int, observed: Observed, held: Held | None) -> tuple[Manifest, ...]:
    """The StatefulSets of one group: always both of one revision, none before its ranks have a place to meet."""
    if layout_of(wanted.deployment.spec).pods == 1:
        return (leader_stateful_set(wanted, ordinal),)
    address = meeting_place(wanted.deployment, ordinal, observed)
    if address is None:
        return ()
    return (
        leader_stateful_set(wanted, ordinal, address=address, held=held),
        worker_stateful_set(wanted, ordinal, address=address, held=held),
    )


def meeting_place(deployment: InferenceDeployment, ordinal: int, observed: Observed) -> str | None:
    """The ClusterIP of the group's rendezvous Service, which works without cluster DNS; None until it has one."""
    name = group_name(deployment, ordinal)
    for service in observed.services:
        if service["metadata"]["name"] == name and not is_terminating(service):
            return (service.get("spec") or {}).get("clusterIP") or None
    return None


def _has_moved(group: Group, deployment: InferenceDeployment, observed: Observed) -> bool:
    """Whether the group's Service has another address than its pods were told. Engines that have met serve on: the
    group restarts in its turn."""
    address = meeting_place(deployment, group.ordinal, observed)
    return address is not None and bool(group.meeting_addresses - {address})


def _known_address(group: Group, deployment: InferenceDeployment, observed: Observed) -> str | None:
    """The ClusterIP of the group's Service; of one that is gone, the one that its pods were told: with it nobody has to
    restart."""
    told = next(iter(sorted(group.meeting_addresses)), None)
    return meeting_place(deployment, group.ordinal, observed) or told


def _at_any_address(action: Apply) -> Apply:
    """A Service that is made again with its former address gets another one where somebody has that by now."""
    spec = action.manifest["spec"] if action.manifest["kind"] == "Service" else {}
    if not action.is_new or "clusterIP" not in spec:
        return action
    anywhere = {name: value for name, value in spec.items() if name != "clusterIP"}
    return replace(action, otherwise={**action.manifest, "spec": anywhere})


def plan_tuning_state(deployment: InferenceDeployment, observed: Observed, state: str) -> tuple[Apply, ...]:
    """The ConfigMap with the tuner's memory, when it differs from what is stored."""
    return plan_applies([tuning_config_map(deployment, state)], observed)


def plan_meeting_secret(wanted: InferenceDeployment, observed: Observed, *, token: str) -> tuple[Apply, ...]:
    """The Secret of replicas of several pods, when it is missing or says nothing. It comes before the pods, which do
    not start without it. A value that is there stays, whatever becomes of the operator's own secret: pods of one group
    that start at different times must read the same."""
    if layout_of(wanted.spec).pods == 1:
        return ()
    made = meeting_secret(wanted, token=token)
    present = next(iter(observed.secrets), None)
    if present is not None and (present.get("data") or {}).get(MEETING_SECRET_KEY):
        made["data"] = present["data"]
    return plan_applies([made], observed)


def choose_victims(
    groups: tuple[Group, ...], wanted: int, *, revision: str, loads: Mapping[str, float]
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Split groups into those that stay and those that go, the ones that are worth least.

    First go those without a place, then those that load or are down: nobody loses an answer by it. Of those that serve
    the outdated ones go first, then those with the fewest requests, so that they drain soon (one that did not say
    counts as the busiest), then the highest ordinals.
    """

    def worth(group: Group) -> tuple[bool, bool, bool, float, int]:
        is_current = group.revision == revision and not group.is_outdated
        load = loads.get(group.name, math.inf)
        return group.serves, is_placed(group), is_current, load if group.serves else 0.0, -group.ordinal

    by_worth = sorted(groups, key=worth, reverse=True)
    stay = sorted(by_worth[:wanted], key=lambda group: group.ordinal)
    go = sorted(by_worth[wanted:], key=lambda group: group.ordinal, reverse=True)
    return tuple(stay), tuple(go)


def allowed_down(deployment: InferenceDeployment, replicas: int) -> int:
    """rollout.maxUnavailable as a number of `replicas`; a percentage is rounded down, never below 1."""
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int):
        return max(1, value)
    return max(1, replicas * int(value.rstrip("%")) // 100)


def choose_updates(
    groups: tuple[Group, ...],
    behind: Collection[int],
    allowed: int,
    *,
    back: int | None = None,
    coming: int | None = None,
    without_place: Collection[str] = frozenset(),
) -> tuple[Group, ...]:
    """Choose those of the groups `behind` (ordinals) that may be brought up to date now; `allowed` may be down. `back`
    is the same of those that are down and may be back in a moment (None: as many).

    One whose engine has not come up costs nothing. One that had come up and is not ready now may be back in a moment:
    it costs one, unless one that was brought up to date is still on its way. One that is ready costs one, too, and is
    taken last: never because another is down, and not at all where others come to serve in its place (`coming`: how
    many are made now; None: groups are replaced in place). One that was chosen before and whose pods still serve is
    taken already, and keeps nobody that is down waiting: its pods go when enough others serve (`replacement`). Those
    `without_place` (names) cost nothing and are waited for by nobody: what they use up is not in `allowed` any more.
    """
    outdated = [group for group in groups if group.ordinal in behind]
    down = [group for group in groups if not group.is_ready and group.name not in without_place]
    blinking = [group for group in outdated if not group.is_ready and has_started(group)]
    lost = [group for group in outdated if not group.is_ready and group not in blinking]
    ready = [group for group in outdated if group.is_ready]
    num_lost = sum(group.name not in without_place for group in lost)
    under_way = sum(not group.serves for group in down if group not in (*blinking, *lost)) + (coming or 0)
    back_soon = blinking[: max(0, (allowed if back is None else back) - under_way - num_lost)]
    return (*lost, *back_soon, *(ready[: max(0, allowed - len(down))] if coming is None else ()))


def free_ordinals(observed: Observed, count: int) -> tuple[int, ...]:
    """The lowest ordinals that nothing holds: neither a StatefulSet nor a pod that is still draining."""
    children = (*observed.stateful_sets, *observed.pods)
    taken = {ordinal_of(child) for child in children}
    free: list[int] = []
    candidate = 0
    while len(free) < count:
        if candidate not in taken:
            free.append(candidate)
        candidate += 1
    return tuple(free)


def _removals(
    deployment: InferenceDeployment,
    staying: Iterable[Group],
    leaving: Sequence[tuple[Group, str]],
    current: Collection[int],
    wanted: Iterable[Manifest],
    observed: Observed,
) -> Iterable[Delete]:
    """StatefulSets of groups that go, with why, or that need no workers, and Services at which nobody meets."""
    for group, why in leaving:
        for stateful_set in group.stateful_sets:
            yield delete_of("StatefulSet", stateful_set, why)
    for group in staying:
        if group.worker_set is not None and group.ordinal in current and layout_of(deployment.spec).pods == 1:
            yield delete_of("StatefulSet", group.worker_set, "a replica is one pod now")
    present = {group.ordinal for group in (*staying, *(group for group, _ in leaving))}
    for stateful_set in observed.stateful_sets:
        if is_worker(stateful_set) and ordinal_of(stateful_set) not in present and not is_terminating(stateful_set):
            yield delete_of("StatefulSet", stateful_set, "its leader is gone")
    needed = {m["metadata"]["name"] for m in wanted if m["kind"] == "Service"}
    meeting: set[int | None] = {group.ordinal for group in staying if group.meeting_addresses}
    meeting |= {ordinal_of(pod) for pod in observed.pods if meeting_address(pod) is not None}
    for service in observed.services:
        metadata = service["metadata"]
        is_group_service = ROLE_LABEL in (metadata.get("labels") or {})
        is_needed = metadata["name"] in needed or ordinal_of(service) in meeting
        if is_group_service and not is_needed and not is_terminating(service):
            yield delete_of("Service", service, "nobody meets there")
