"""Pods that are not of their StatefulSet's template any more are replaced here, and by nobody else. Pure.

The StatefulSets update on deletion only: which group may be down is the plan's to decide, and some versions of
Kubernetes never replace a broken pod under `Parallel` (ADR-0020). All pods of a
group go at once, as they run one engine. Each is stopped gracefully: no endpoint leads to it by the time that it hears
of its end, and then it drains.

Between a group's new template and the end of its pods others may go down. So who serves is asked again here: the plan
chose by what was so before. And in the moment between that look and the deletion somebody may evict another: a leader
that serves is evicted like theirs, by the same PodDisruptionBudget, so that the API server lets only one of both go.
The other pods of its group follow in the next look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from trimtab_operator.observed.actions import Delete, delete_of
from trimtab_operator.observed.groups import (
    Group,
    Observed,
    groups_of,
    is_pod_ready,
    is_terminating,
    meeting_address,
    ordinal_of,
    revision_label,
)
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.surge import allowed_beside


def outdated_pods(
    groups: Sequence[Group],
    allowed: int,
    *,
    asked: str | None = None,
    without_place: Collection[str] = frozenset(),
    most_placed: int = 0,
    budget: str | None = None,
) -> Iterator[Delete]:
    """The pods to delete, so that their StatefulSets make them anew. A group that serves goes only as long as fewer
    than `allowed` do not, and only for the revision that is `asked` for now (None: for any). Groups `without_place`
    (names; rollout/surge.py) are not waited for, unless they had one: `most_placed` groups had one at once.
    `budget` names the PodDisruptionBudget that has somebody to spare (`budget_to_ask`).

    Not before the controller has seen the new template, and not while the group's two have different ones: it would
    make them from the old one.
    """
    down = sum(not group.serves and group.name not in without_place for group in groups)
    room = allowed_beside(allowed, groups, without_place, most_placed=most_placed) - down
    for group in groups:
        serving = budget if group.serves else None
        pods = tuple(_outdated_in(group, asked, serving))
        if pods and group.serves:
            room -= 1
        if not group.serves or room >= 0:
            yield from pods if serving is None else pods[:1]


def budget_to_ask(observed: Observed) -> str | None:
    """The PodDisruptionBudget that lets a replica go, or somebody else's in its place; None where there is none, or
    where it lets no healthy pod go, so that nobody can be faster."""
    groups = groups_of(observed)
    places = {group.ordinal for group in groups}
    if any(ordinal_of(pod) is not None and ordinal_of(pod) not in places for pod in observed.pods):
        return None  # of a group that goes: no controller is found for it, and then nothing is let go
    num_down = sum(group.num_pods - sum(map(is_pod_ready, group.pods)) for group in groups)
    for made in observed.of("PodDisruptionBudget"):
        most = (made.get("spec") or {}).get("maxUnavailable")
        if isinstance(most, int) and num_down < most and not is_terminating(made):
            return str(made["metadata"]["name"])
    return None


def _outdated_in(group: Group, asked: str | None, budget: str | None) -> Iterator[Delete]:
    """The pods of one group that their StatefulSets would make better."""
    revisions = {_template_revision(stateful_set) for stateful_set in group.stateful_sets}
    if len(revisions) != 1 or not all(map(_is_seen, group.stateful_sets)):
        return
    (revision,) = revisions
    if not revision or asked not in (None, revision):
        return
    for pod in group.pods:
        is_elsewhere = meeting_address(pod) not in (None, *group.meeting_addresses)
        if (revision_label(pod) != revision or is_elsewhere) and not is_terminating(pod):
            yield delete_of("Pod", pod, f"{group.name} gets revision {revision}", budget=budget)


def _template_revision(stateful_set: Manifest) -> str:
    """What its next pods are labelled with, whatever somebody wrote on the StatefulSet itself."""
    template = (stateful_set.get("spec") or {}).get("template") or {}
    return revision_label({"metadata": template.get("metadata") or {}})


def _is_seen(stateful_set: Manifest) -> bool:
    """Whether the controller has taken up the latest template."""
    written = int(stateful_set["metadata"].get("generation") or 0)
    return int((stateful_set.get("status") or {}).get("observedGeneration") or 0) >= written
