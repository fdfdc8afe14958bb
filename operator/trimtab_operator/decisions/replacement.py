"""Pods that are not of their StatefulSet's template any more are replaced here, and by nobody else. Pure.

The StatefulSets update on deletion only: which group may be down is the plan's to decide, and some versions of
Kubernetes never replace a broken pod under `Parallel` (docs/decisions/pods-replaced-by-the-operator.md). All pods of a
group go at once, as they run one engine. Each is stopped gracefully: no endpoint leads to it by the time that it hears
of its end, and then it drains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trimtab_operator.decisions.actions import Delete, delete_of
from trimtab_operator.observed.groups import Group, is_terminating, meeting_address, revision_label
from trimtab_operator.resource.manifest import Manifest


def outdated_pods(groups: Iterable[Group]) -> Iterator[Delete]:
    """The pods to delete, so that their StatefulSets make them anew.

    Not before the controller has seen the new template, and not while the group's two have different ones: it would
    make them from the old one.
    """
    for group in groups:
        revisions = {_template_revision(stateful_set) for stateful_set in group.stateful_sets}
        if len(revisions) != 1 or not all(map(_is_seen, group.stateful_sets)):
            continue
        (revision,) = revisions
        for pod in group.pods if revision else ():
            is_elsewhere = meeting_address(pod) not in (None, *group.meeting_addresses)
            if (revision_label(pod) != revision or is_elsewhere) and not is_terminating(pod):
                yield delete_of("Pod", pod, f"{group.name} gets revision {revision}")


def _template_revision(stateful_set: Manifest) -> str:
    """What its next pods are labelled with, whatever somebody wrote on the StatefulSet itself."""
    template = (stateful_set.get("spec") or {}).get("template") or {}
    return revision_label({"metadata": template.get("metadata") or {}})


def _is_seen(stateful_set: Manifest) -> bool:
    """Whether the controller has taken up the latest template."""
    written = int(stateful_set["metadata"].get("generation") or 0)
    return int((stateful_set.get("status") or {}).get("observedGeneration") or 0) >= written
