"""Replacement of pods that do not match their StatefulSet's template. Pure.

The StatefulSets use the OnDelete update strategy: the plan decides which group may be down, and some versions of
Kubernetes never replace a broken pod under `Parallel` (ADR-0020). All pods of a group are replaced at once, as they run
one engine. Each stops gracefully: it is removed from endpoints, then it drains.

Other groups may go down between the template update and the deletion, so readiness is checked again here. A leader that
serves is evicted under its PodDisruptionBudget instead of deleted: if a user evicts another replica at the same moment,
the API server allows only one of the two. The other pods of the group follow in the next reconcile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from trimtab_operator.observed.actions import Delete, delete_of
from trimtab_operator.observed.groups import (
    Group,
    ObservedChildren,
    groups_of,
    is_pod_ready,
    is_terminating,
    ordinal_of,
    pod_rendezvous_address,
    revision_label,
    start_values_of,
)
from trimtab_operator.observed.phases import crashes_at_start
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.surge import allowed_unavailable


def plan_pod_replacements(
    groups: Sequence[Group],
    allowed: int,
    *,
    revisions: Mapping[int, str] | None = None,
    without_node: Collection[str] = frozenset(),
    max_placed: int = 0,
    budget: str | None = None,
) -> Iterator[Delete]:
    """Yield deletions of outdated pods, which their StatefulSets then recreate.

    `revisions` is the assigned revision by ordinal (rollout/group_assignment.py); None accepts the StatefulSets' own. A
    group without one, or whose StatefulSet does not have it yet, is left as it is. A serving group is replaced only
    while fewer than `allowed` groups are down. Groups `without_node` (names; rollout/surge.py) do not count as down
    unless they had a node: `max_placed` groups were scheduled at once. `budget` names the PodDisruptionBudget that
    allows an eviction (`find_eviction_budget`).

    Nothing is deleted before the StatefulSet controller has observed the new template, nor while the group's two
    templates differ: the controller would create pods from the old one.
    """
    down = sum(not group.serves and group.name not in without_node for group in groups)
    room = allowed_unavailable(allowed, groups, without_node, max_placed=max_placed) - down
    for group in groups:
        serving = budget if group.serves else None
        pods = tuple(_outdated_in(group, serving)) if _has_assigned_revision(group, revisions) else ()
        if pods and group.serves:
            room -= 1
        if not group.serves or room >= 0:
            yield from pods if serving is None else pods[:1]


def find_eviction_budget(observed: ObservedChildren) -> str | None:
    """Return the PodDisruptionBudget that currently allows an eviction.

    Returns None if there is none, or if it allows none, in which case other evictions are blocked as well.
    """
    groups = groups_of(observed)
    ordinals = {group.ordinal for group in groups}
    if any(ordinal_of(pod) is not None and ordinal_of(pod) not in ordinals for pod in observed.pods):
        return None  # of a removed group: without its controller the API server blocks all evictions
    num_down = sum(group.num_pods - sum(map(is_pod_ready, group.pods)) for group in groups)
    for present in observed.of("PodDisruptionBudget"):
        most = (present.get("spec") or {}).get("maxUnavailable")
        if isinstance(most, int) and num_down < most and not is_terminating(present):
            return str(present["metadata"]["name"])
    return None


def _has_assigned_revision(group: Group, revisions: Mapping[int, str] | None) -> bool:
    """Return True if both templates have the assigned revision and the controller has observed them."""
    found = {_template_revision(stateful_set) for stateful_set in group.stateful_sets}
    if len(found) != 1 or "" in found or not all(map(_is_observed, group.stateful_sets)):
        return False
    return revisions is None or revisions.get(group.ordinal) in found


def _outdated_in(group: Group, budget: str | None) -> Iterator[Delete]:
    """Yield deletions of the pods of one group that differ from their StatefulSet's template.

    Other start values count if the engine does not start: it cannot be patched, and the flags of a pod cannot change.
    """
    revision = _template_revision(group.stateful_set)
    template = (group.stateful_set.get("spec") or {}).get("template") or {}
    starts = start_values_of(template) if crashes_at_start(group) else None
    for pod in group.pods:
        is_elsewhere = pod_rendezvous_address(pod) not in (None, *group.rendezvous_addresses)
        is_outdated = revision_label(pod) != revision or starts not in (None, start_values_of(pod))
        if (is_outdated or is_elsewhere) and not is_terminating(pod):
            yield delete_of("Pod", pod, f"{group.name} is updated to revision {revision}", budget=budget)


def _template_revision(stateful_set: Manifest) -> str:
    """Return the revision label of the pod template, regardless of the StatefulSet's own labels."""
    template = (stateful_set.get("spec") or {}).get("template") or {}
    return revision_label({"metadata": template.get("metadata") or {}})


def _is_observed(stateful_set: Manifest) -> bool:
    """Return True if the controller has observed the latest template."""
    written = int(stateful_set["metadata"].get("generation") or 0)
    return int((stateful_set.get("status") or {}).get("observedGeneration") or 0) >= written
