"""Replacement of pods that do not match their StatefulSet's template. Pure.

The StatefulSets use the OnDelete update strategy: the plan decides which group may be down, and some versions of
Kubernetes never replace a broken pod under `Parallel` (ADR-0020). All pods of a group are replaced at once, as they run
one engine. Each stops gracefully: it is removed from endpoints, then it drains.

Other groups may go down between the template update and the deletion, so readiness is checked again here. A leader that
serves is evicted under its PodDisruptionBudget instead of deleted: if a user evicts another replica at the same moment,
the API server allows only one of the two. The other pods of the group follow in the next reconcile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

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
)
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.surge import allowed_unavailable


def plan_pod_replacements(
    groups: Sequence[Group],
    allowed: int,
    *,
    wanted_revision: str | None = None,
    without_node: Collection[str] = frozenset(),
    max_placed: int = 0,
    budget: str | None = None,
) -> Iterator[Delete]:
    """Yield deletions of outdated pods, which their StatefulSets then recreate.

    A serving group is replaced only while fewer than `allowed` groups are down, and only for `wanted_revision` (None
    for any). Groups `without_node` (names; rollout/surge.py) do not count as down unless they had a node: `max_placed`
    groups were scheduled at once. `budget` names the PodDisruptionBudget that allows an eviction
    (`find_eviction_budget`).

    Nothing is deleted before the StatefulSet controller has observed the new template, nor while the group's two
    templates differ: the controller would create pods from the old one.
    """
    down = sum(not group.serves and group.name not in without_node for group in groups)
    room = allowed_unavailable(allowed, groups, without_node, max_placed=max_placed) - down
    for group in groups:
        serving = budget if group.serves else None
        pods = tuple(_outdated_in(group, wanted_revision, serving))
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


def _outdated_in(group: Group, wanted_revision: str | None, budget: str | None) -> Iterator[Delete]:
    """Yield deletions of the pods of one group that differ from their StatefulSet's template."""
    revisions = {_template_revision(stateful_set) for stateful_set in group.stateful_sets}
    if len(revisions) != 1 or not all(map(_is_observed, group.stateful_sets)):
        return
    (revision,) = revisions
    if not revision or wanted_revision not in (None, revision):
        return
    for pod in group.pods:
        is_elsewhere = pod_rendezvous_address(pod) not in (None, *group.rendezvous_addresses)
        if (revision_label(pod) != revision or is_elsewhere) and not is_terminating(pod):
            yield delete_of("Pod", pod, f"{group.name} is updated to revision {revision}", budget=budget)


def _template_revision(stateful_set: Manifest) -> str:
    """Return the revision label of the pod template, regardless of the StatefulSet's own labels."""
    template = (stateful_set.get("spec") or {}).get("template") or {}
    return revision_label({"metadata": template.get("metadata") or {}})


def _is_observed(stateful_set: Manifest) -> bool:
    """Return True if the controller has observed the latest template."""
    written = int(stateful_set["metadata"].get("generation") or 0)
    return int((stateful_set.get("status") or {}).get("observedGeneration") or 0) >= written
