"""What the groups of a resource need beyond being as rendered: nodes that are gone, pods that end together, GPUs that
are given back. Reads nodes and rivals only when something is amiss; the decisions are pure, in modules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, MANAGED_BY
from trimtab_operator.builders.stateful_set import Held
from trimtab_operator.decisions.actions import Delete
from trimtab_operator.decisions.node_loss import may_be_lost, pods_to_give_up
from trimtab_operator.decisions.placement import (
    Age,
    age_of,
    ages_of_partly_placed,
    held_groups,
    holds,
    is_partly_placed,
)
from trimtab_operator.decisions.restart import companions
from trimtab_operator.edge.cluster import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.edge.nodes import Nodes
from trimtab_operator.observed.groups import Group, Observed, groups_of
from trimtab_operator.observed.hold import hold_of
from trimtab_operator.observed.missing_pods import REFUSED_CREATION
from trimtab_operator.resource.manifest import Manifest

ALL_GROUPS = f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL},{GROUP_LABEL}"
NODES_FRESH_SECONDS = 5.0  # a node that is back is not given up; all resources of a lost node ask at once


@dataclass(frozen=True, slots=True)
class Note:
    """Worth an Event: reason, message, and what tells it from others of the same text."""

    reason: str
    message: str
    key: str


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Pods to delete, and groups that hold no pods for a while."""

    deletions: tuple[Delete, ...] = ()
    held: Mapping[int, Held] | None = None
    notes: tuple[Note, ...] = ()


async def upkeep(cluster: Cluster, nodes: Nodes, observed: Observed, *, now: datetime, asked: str | None) -> Upkeep:
    """What is due now. `asked` names what is asked for now; None: nothing, as long as the spec is refused."""
    groups = groups_of(observed)
    present = await nodes.present(fresh_seconds=NODES_FRESH_SECONDS) if may_be_lost(observed.pods) else ()
    lost = pods_to_give_up(observed.pods, present or (), now)
    gone = {deletion.uid for deletion in lost}
    together = tuple(deletion for deletion in companions(groups) if deletion.uid not in gone)
    kept = holds(groups, await _rivals(cluster, groups), now, asked=asked)
    notes = [Note("NodeLost", f"{deletion.name} was given up: {deletion.reason}", deletion.uid) for deletion in lost]
    notes += [Note("RestartedAsOne", f"{deletion.name}: {deletion.reason}", deletion.uid) for deletion in together]
    for group in groups:
        hold, before = kept.get(group.ordinal), hold_of(group)
        if hold is not None and (before is None or before.count != hold.count):
            notes.append(Note("GaveBack", f"{group.name} {hold.sentence}", str(hold.count)))
    return Upkeep((*lost, *together), held_groups(groups, kept, now), tuple(notes))


async def _rivals(cluster: Cluster, groups: tuple[Group, ...]) -> tuple[Age, ...]:
    """The ages of the groups that are partly placed: of this resource, and, where it may be seen, of all others."""
    own = tuple(age_of(group) for group in groups if is_partly_placed(group))
    if not own:
        return ()
    try:
        sets = await cluster.list("StatefulSet", None, selector=ALL_GROUPS)
        return ages_of_partly_placed(sets, await cluster.list("Pod", None, selector=ALL_GROUPS))
    except API_ERRORS as error:
        if not is_forbidden(error):
            raise
        return own


async def refused_creations(cluster: Cluster, namespace: str) -> list[Manifest]:
    """The Events of StatefulSets whose pods the API server does not create; none without the right to read them."""
    fields = f"involvedObject.kind=StatefulSet,reason={REFUSED_CREATION}"
    try:
        return list(await cluster.list("Event", namespace, fields=fields))
    except API_ERRORS as error:
        if not is_forbidden(error):
            raise
        return []
