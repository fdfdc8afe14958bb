"""What the groups of a resource need beyond being as rendered: nodes that are gone, pods that are outdated or end
together, GPUs that are given back. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from trimtab_operator.builders.stateful_set import Held
from trimtab_operator.observed.actions import Delete, Note
from trimtab_operator.observed.groups import Group, Observed, groups_of
from trimtab_operator.observed.hold import hold_of
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.gang_placement import Age, age_of, held_groups, holds, is_partly_placed
from trimtab_operator.rollout.group_restart import companions
from trimtab_operator.rollout.node_loss import may_be_lost, pods_to_give_up
from trimtab_operator.rollout.pod_replacement import budget_to_ask, outdated_pods
from trimtab_operator.rollout.surge import placeless


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Pods to delete, by ordinal the groups that hold no pods for a while, and what is told of both."""

    deletions: tuple[Delete, ...]
    held: Mapping[int, Held]
    notes: tuple[Note, ...]


def upkeep(
    observed: Observed,
    *,
    nodes: tuple[Manifest, ...] | None,
    rivals: tuple[Age, ...] | None,
    now: datetime,
    asked: str | None,
    revision: str | None = None,
    allowed: int = 1,
    most_placed: int = 0,
) -> Upkeep:
    """Decide what is due at `now`.

    `nodes` None: they cannot be seen. `rivals` are the groups of all resources that are partly placed; None: only this
    resource's own can be seen. `asked` names what is asked for now; None: nothing, as long as the spec is refused.
    `revision` is what replicas are to run (None: what their StatefulSets say), `allowed` how many may be down for it,
    `most_placed` how many had a place at once.
    """
    groups, without_place = groups_of(observed), placeless(observed, now=now)
    lost = pods_to_give_up(observed.pods, (nodes or ()) if may_be_lost(observed.pods) else (), now)
    gone = {deletion.uid for deletion in lost}
    outdated = outdated_pods(
        groups,
        allowed,
        asked=revision,
        without_place=without_place,
        most_placed=most_placed,
        budget=budget_to_ask(observed),
    )
    replaced = tuple(deletion for deletion in outdated if deletion.uid not in gone)
    gone |= {deletion.uid for deletion in replaced}
    together = tuple(deletion for deletion in companions(groups) if deletion.uid not in gone)
    kept = holds(groups, _own(groups) if rivals is None else rivals, now, asked=asked)
    notes = [_warning("NodeLost", f"{found.name} was given up: {found.reason}", found.uid) for found in lost]
    notes += [_warning("RestartedAsOne", f"{found.name}: {found.reason}", found.uid) for found in together]
    for group in groups if asked is not None else ():  # giving back is done by rendering
        hold, before = kept.get(group.ordinal), hold_of(group)
        if hold is not None and (before is None or before.count != hold.count):
            notes.append(_warning("GaveBack", f"{group.name} {hold.sentence}", str(hold.count)))
    return Upkeep((*lost, *replaced, *together), held_groups(groups, kept, now), tuple(notes))


def _own(groups: Iterable[Group]) -> tuple[Age, ...]:
    return tuple(age_of(group) for group in groups if is_partly_placed(group))


def _warning(reason: str, message: str, key: str) -> Note:
    return Note("Warning", reason, message, key)
